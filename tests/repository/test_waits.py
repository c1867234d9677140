"""Processes that wait in circles, for leases and for claims in any mixture: one of each circle gives up.

Each round: everybody takes a thing of its own; all are told at once to wait for the next one's; whoever
gives up lets go of what it has, and so the others are served, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from holdfast.errors import Failure, LockTimeout
from holdfast.leases import deadlock
from holdfast.leases.deadlock import Cycle, WaitEdge
from holdfast.repository.holdings import HoldingWaiter
from holdfast.repository.init import initialise
from holdfast.repository.opening import OpenLedger, init_ledger, open_ledger
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from proof.effort import rounds
from tests.locks.workers import PATIENCE, Line, Worker, Workers, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

ROUNDS = rounds(60, least=6)
LONG = 3600.0
MOST = 4


class Task(NamedTuple):
    """What to hold and what to wait for then: a lease or a claim, and its name. None: nothing."""

    own: tuple[str, str]
    following: tuple[str, str] | None


class Shop(NamedTuple):
    """A repository with a ledger in the same directory; `address` is where the ledger is, if elsewhere."""

    root: Path
    address: str | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Repository, OpenLedger]]:
        with Repository(self.root, ledger_address=self.address) as repository:
            yield repository, open_ledger(self.root, address=self.address)


def make_shop(root: Path, *, store: str | None = None, ledger: str | None = None) -> Shop:
    initialise(root, store=store)
    init_ledger(root, address=ledger)
    with Repository(root) as repository:
        for number in range(MOST):
            repository.worktrees.create(f"tree-{number}")
    return Shop(root, ledger)


@pytest.fixture
def shop(scratch: Path) -> Shop:
    return make_shop(scratch / "shop")


def take(
    repository: Repository, ledger: OpenLedger, what: tuple[str, str], owner: str, wait: float
) -> contextlib.AbstractContextManager[Any]:
    kind, name = what
    if kind == "lease":
        return repository.lease(name, ttl=LONG, wait=wait)
    return ledger.claims.claim(name, owner, ttl=LONG, wait=wait)


def worker_in(shop: Shop) -> Callable[[Line], None]:
    def work(line: Line) -> None:
        owner = f"agent-{os.getpid()}"
        with shop.opened() as (repository, ledger):
            while True:
                task: Task = line.wait()
                with take(repository, ledger, task.own, owner, PATIENCE):
                    line.say("holding")
                    line.wait()
                    try:
                        if task.following is not None:
                            with take(repository, ledger, task.following, owner, PATIENCE):
                                pass
                        found = "served"
                    except Failure as failure:
                        found = failure.code
                line.say(found)

    return work


def things(number: int, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(kind, f"tree-{each}" if kind == "lease" else f"{each + 1}") for each, kind in enumerate(kinds)][:number]


def play(crew: list[Worker], tasks: list[Task], *, last: Worker | None = None) -> Counter[str]:
    """One round; `last` is told only when all others wait."""
    for worker, task in zip(crew, tasks, strict=True):
        worker.say(task)
    assert [worker.hear() for worker in crew] == ["holding"] * len(crew)
    for worker in crew:
        if worker is not last:
            worker.say("go")
    if last is not None:
        wait_until(lambda: any(worker.line.has_news() for worker in crew) or _looked_for_a_while())
        last.say("go")
    return Counter(worker.hear() for worker in crew)


def _looked_for_a_while() -> bool:
    """Long enough for everybody to have looked for circles a few times; nothing depends on it."""
    time.sleep(0.15)
    return True


def in_a_circle(own: list[tuple[str, str]]) -> list[Task]:
    return [Task(one, other) for one, other in zip(own, (*own[1:], own[0]), strict=True)]


def in_a_row(own: list[tuple[str, str]]) -> list[Task]:
    return [*(Task(one, other) for one, other in itertools.pairwise(own)), Task(own[-1], None)]


MIXTURES = [kinds for number in (2, 3, 4) for kinds in itertools.product(("lease", "claim"), repeat=number)]


def test_of_every_circle_of_leases_and_claims_exactly_one_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for number in range(ROUNDS):
            kinds = MIXTURES[number % len(MIXTURES)]
            crew = random.sample(everybody, len(kinds))
            found = play(crew, in_a_circle(things(len(kinds), kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, (number, kinds)


def test_where_there_is_no_circle_nobody_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for number in range(ROUNDS // 3):
            kinds = MIXTURES[-1 - number % len(MIXTURES)]
            crew = random.sample(everybody, len(kinds))
            found = play(crew, in_a_row(things(len(kinds), kinds)), last=crew[-1])
            assert found == {"served": len(kinds)}, (number, kinds)


def whoever_looks(circle: Cycle) -> WaitEdge:
    """A planted fault: everybody who finds a circle thinks that it is the one to give up."""
    return circle[0].wait


def test_a_detector_that_picks_any_victim_would_be_found(shop: Shop) -> None:
    with mock.patch.object(deadlock, "youngest", whoever_looks), Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for number in range(10 * ROUNDS):
            kinds = MIXTURES[-1 - number % 16]
            if play(everybody, in_a_circle(things(MOST, kinds)))["E_DEADLOCK"] != 1:
                return
    pytest.fail("it was not found")


# --- On servers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["on one store", "the ledger on another"])
@pytest.mark.sampled(1)
def test_the_same_on_every_store(tmp_path: Path, store_url: str, apart: bool) -> None:
    root = tmp_path / "shop"
    shop = make_shop(root, ledger=store_url) if apart else make_shop(root, store=store_url)
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for kinds in (("lease", "claim"), ("claim", "claim", "lease"), ("lease", "claim", "lease", "claim")):
            crew = everybody[: len(kinds)]
            found = play(crew, in_a_circle(things(len(kinds), kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, kinds
        crew = everybody[:3]
        found = play(crew, in_a_row(things(3, ("claim", "lease", "claim"))), last=crew[-1])
        assert found == {"served": 3}


# --- Who does not wait any more ---------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "other"), [("lease", "claim"), ("claim", "lease")])
def test_one_who_was_killed_while_it_waited_is_in_no_circle(shop: Shop, own: str, other: str) -> None:
    [mine, theirs] = things(2, (other, own))

    def work(line: Line) -> None:
        with shop.opened() as (repository, ledger), take(repository, ledger, theirs, "doomed", 0.0):
            line.say("holding")
            line.wait()
            line.say("waiting")
            take(repository, ledger, mine, "doomed", PATIENCE)

    def survive(line: Line) -> None:  # beside the other one, not above it: it would hold what this one has
        with shop.opened() as (repository, ledger), take(repository, ledger, mine, "survivor", 0.0):
            line.say("holding")
            line.wait()
            with pytest.raises(LockTimeout):  # it is not to be had for a while, but not for ever
                take(repository, ledger, theirs, "survivor", 0.5)
            line.say("not served")

    with Workers() as workers:
        survivor = workers.start(survive)
        assert survivor.hear() == "holding"
        doomed = workers.start(work)
        assert doomed.hear() == "holding"
        assert doomed.ask("go") == "waiting"
        wait_until(lambda: any(each.waiting for each in look_around(shop.root).holdings))
        doomed.kill()
        doomed.wait()
        assert survivor.ask("go") == "not served"


@pytest.mark.req("FL-20")
def test_who_shows_those_who_wait_for_leases_and_claims_in_their_places(shop: Shop) -> None:
    lease, claim = things(2, ("lease", "claim"))

    def wait_for(what: tuple[str, str]) -> Callable[[Line], None]:
        def work(line: Line) -> None:
            with shop.opened() as (repository, ledger):
                take(repository, ledger, what, f"agent-{os.getpid()}", PATIENCE)

        return work

    def line_of(what: tuple[str, str]) -> tuple[HoldingWaiter, ...]:
        seen = {(each.kind, each.what): each.waiting for each in look_around(shop.root).holdings}
        return seen.get(what, ())

    with (
        Workers() as workers,
        shop.opened() as (repository, ledger),
        take(repository, ledger, lease, "me", 0.0),
        take(repository, ledger, claim, "me", 0.0),
    ):
        for what in (lease, claim):
            pids = []
            for _ in range(2):
                pids.append(str(workers.start(wait_for(what)).pid))
                wait_until(lambda what=what, pids=pids: len(line_of(what)) == len(pids))  # type: ignore[misc]
            assert [each.place for each in line_of(what)] == [1, 2]
            assert all(each.since is not None for each in line_of(what))
            assert all(pid in each.who for each, pid in zip(line_of(what), pids, strict=True))


# --- Elsewhere --------------------------------------------------------------------------------------------


def test_a_ledger_that_is_away_neither_holds_up_who_waits_for_a_lease_nor_ends_the_wait(
    scratch: Path,
) -> None:
    """Nobody answers at that address, and it takes the server's time limit to find out."""
    initialise(scratch / "shop")
    with socket.socket() as silent:  # takes connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"etcd://127.0.0.1:{silent.getsockname()[1]}/nothing"
        with (
            Repository(scratch / "shop", ledger_address=address) as repository,
            ThreadPoolExecutor(1) as pool,
        ):
            first = repository.lease(ttl=LONG)
            waiting = pool.submit(lambda: repository.lease(ttl=LONG, wait=PATIENCE))
            wait_until(lambda: (state := repository.leases.state("main")) is not None and state.waiters)
            time.sleep(0.3)  # until it looks there
            first.release()
            waiting.result(PATIENCE).release()
