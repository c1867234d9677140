"""Deadlocks across leases and claims: of every cycle of waiting processes, exactly one gives up.

In each round, every worker takes a resource of its own, then all wait at once for that of the next worker.
The one that gives up releases its own, so the others are served one after the other.
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
from holdfast.repository.ledgers import OpenLedger, init_ledger, open_ledger
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from proof.effort import rounds
from tests.locks.workers import PATIENCE, Line, Worker, Workers, wait_until

pytestmark = [pytest.mark.both_homes, pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")]

ROUNDS = rounds(60, least=6)
LONG = 3600.0
MOST = 4


class Task(NamedTuple):
    """The resource to hold, then the one to wait for, if any. Each is a kind, lease or claim, and a name."""

    own: tuple[str, str]
    following: tuple[str, str] | None


class Shop(NamedTuple):
    """A repository and its ledger; `address` is the store of the ledger, if that is a different one."""

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


def resources(number: int, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(kind, f"tree-{each}" if kind == "lease" else f"{each + 1}") for each, kind in enumerate(kinds)][:number]


def play(crew: list[Worker], tasks: list[Task], *, last: Worker | None = None) -> Counter[str]:
    """Play one round; `last` starts only once all others wait."""
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
    """Wait long enough for every waiter to look for cycles a few times; correctness does not depend on it."""
    time.sleep(0.15)
    return True


def in_a_circle(own: list[tuple[str, str]]) -> list[Task]:
    return [Task(one, other) for one, other in zip(own, (*own[1:], own[0]), strict=True)]


def in_a_row(own: list[tuple[str, str]]) -> list[Task]:
    return [*(Task(one, other) for one, other in itertools.pairwise(own)), Task(own[-1], None)]


MIXTURES = [kinds for number in (2, 3, 4) for kinds in itertools.product(("lease", "claim"), repeat=number)]


def test_exactly_one_waiter_of_every_cycle_of_leases_and_claims_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        all_workers = workers.start_many(MOST, worker_in(shop))
        for number in range(ROUNDS):
            kinds = MIXTURES[number % len(MIXTURES)]
            crew = random.sample(all_workers, len(kinds))
            found = play(crew, in_a_circle(resources(len(kinds), kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, (number, kinds)


def test_without_a_cycle_no_waiter_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        all_workers = workers.start_many(MOST, worker_in(shop))
        for number in range(ROUNDS // 3):
            kinds = MIXTURES[-1 - number % len(MIXTURES)]
            crew = random.sample(all_workers, len(kinds))
            found = play(crew, in_a_row(resources(len(kinds), kinds)), last=crew[-1])
            assert found == {"served": len(kinds)}, (number, kinds)


def whoever_looks(cycle: Cycle) -> WaitEdge:
    """A planted bug: every waiter that finds a cycle picks itself as the victim."""
    return cycle[0].wait


def test_a_detector_that_picks_any_victim_would_be_found(shop: Shop) -> None:
    with mock.patch.object(deadlock, "youngest", whoever_looks), Workers() as workers:
        all_workers = workers.start_many(MOST, worker_in(shop))
        for number in range(10 * ROUNDS):
            kinds = MIXTURES[-1 - number % 16]
            if play(all_workers, in_a_circle(resources(MOST, kinds)))["E_DEADLOCK"] != 1:
                return
    pytest.fail("the planted bug was not found")


# --- On servers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["on one store", "the ledger on another"])
@pytest.mark.sampled(1)
def test_every_cycle_is_broken_on_every_store(tmp_path: Path, store_url: str, apart: bool) -> None:
    root = tmp_path / "shop"
    shop = make_shop(root, ledger=store_url) if apart else make_shop(root, store=store_url)
    with Workers() as workers:
        all_workers = workers.start_many(MOST, worker_in(shop))
        for kinds in (("lease", "claim"), ("claim", "claim", "lease"), ("lease", "claim", "lease", "claim")):
            crew = all_workers[: len(kinds)]
            found = play(crew, in_a_circle(resources(len(kinds), kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, kinds
        crew = all_workers[:3]
        found = play(crew, in_a_row(resources(3, ("claim", "lease", "claim"))), last=crew[-1])
        assert found == {"served": 3}


# --- Killed waiters, and lists of waiters -----------------------------------------------------------------


@pytest.mark.parametrize(("own", "other"), [("lease", "claim"), ("claim", "lease")])
def test_a_killed_waiter_is_in_no_cycle(shop: Shop, own: str, other: str) -> None:
    [mine, theirs] = resources(2, (other, own))

    def work(line: Line) -> None:
        with shop.opened() as (repository, ledger), take(repository, ledger, theirs, "doomed", 0.0):
            line.say("holding")
            line.wait()
            line.say("waiting")
            take(repository, ledger, mine, "doomed", PATIENCE)

    def survive(line: Line) -> None:  # a sibling, as a forked child would hold what its parent has
        with shop.opened() as (repository, ledger), take(repository, ledger, mine, "survivor", 0.0):
            line.say("holding")
            line.wait()
            with pytest.raises(LockTimeout):  # a dead holder's lease has yet to expire, but that is no deadlock
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
def test_the_overview_lists_waiters_for_leases_and_claims_in_queue_order(shop: Shop) -> None:
    lease, claim = resources(2, ("lease", "claim"))

    def wait_for(what: tuple[str, str]) -> Callable[[Line], None]:
        def work(line: Line) -> None:
            with shop.opened() as (repository, ledger):
                take(repository, ledger, what, f"agent-{os.getpid()}", PATIENCE)

        return work

    def queue_of(what: tuple[str, str]) -> tuple[HoldingWaiter, ...]:
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
                wait_until(lambda what=what, pids=pids: len(queue_of(what)) == len(pids))  # type: ignore[misc]
            assert [each.place for each in queue_of(what)] == [1, 2]
            assert all(each.since is not None for each in queue_of(what))
            assert all(pid in each.who for each, pid in zip(queue_of(what), pids, strict=True))


# --- A ledger that does not answer ------------------------------------------------------------------------


def test_a_ledger_that_does_not_answer_neither_delays_nor_ends_the_wait_for_a_lease(
    scratch: Path,
) -> None:
    """Nothing answers at its address, and only a timeout reveals that."""
    initialise(scratch / "shop")
    with socket.socket() as silent:  # accepts connections, and never answers
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
            time.sleep(0.3)  # until the waiter asks the ledger
            first.release()
            waiting.result(PATIENCE).release()
