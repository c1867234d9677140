"""Processes that wait in circles which lead through file locks and repository locks: one of each gives up.

Leases, claims, file locks and repository locks in any mixture; the rounds are those of `test_waits`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.repo_lock_run import acquire
from holdfast.errors import Failure
from holdfast.locks.repo_lock import RepoLock
from holdfast.workspace.ledgers import OpenLedger
from holdfast.workspace.repository import Repository
from tests.locks.workers import PATIENCE, Line, Workers
from tests.workspace.test_waits import (
    LONG,
    MOST,
    Shop,
    in_a_circle,
    in_a_row,
    make_shop,
    play,
)

if sys.platform != "linux":
    pytest.skip("only Linux tells who holds a file lock", allow_module_level=True)

ROUNDS = int(os.environ.get("HOLDFAST_CIRCLES", "60"))
KINDS = ("lease", "claim", "file lock", "fair lock", "repo lock")
LOCKS = ("file lock", "fair lock", "repo lock")


@pytest.fixture
def shop(scratch: Path) -> Shop:
    return make_shop(scratch / "shop")


class Agent:
    """One process: it takes whatever there is to be taken."""

    def __init__(self, shop: Shop, repository: Repository, ledger: OpenLedger) -> None:
        self.root = shop.root
        self.repository = repository
        self.ledger = ledger
        self.owner = f"agent-{os.getpid()}"

    def take(self, what: tuple[str, str], wait: float) -> contextlib.AbstractContextManager[Any]:
        kind, name = what
        if kind == "lease":
            return self.repository.lease(name, ttl=LONG, wait=wait)
        if kind == "claim":
            return self.ledger.claims.claim(name, self.owner, ttl=LONG, wait=wait)
        if kind == "repo lock":
            return acquire(RepoLock(self.root.parent / "data"), name, "", wait)
        locker = self.repository.file_locker(wait, fair=kind == "fair lock")
        return locker.lock_exclusive(self.root / name)


@contextlib.contextmanager
def agent_in(shop: Shop) -> Iterator[Agent]:
    with shop.opened() as (repository, ledger):
        yield Agent(shop, repository, ledger)


def worker_in(shop: Shop) -> Callable[[Line], None]:
    def work(line: Line) -> None:
        os.environ["HOLDFAST_REPO"] = str(shop.root)  # for what a command does: it waits for repository locks
        with agent_in(shop) as agent:
            while True:
                task = line.wait()
                with agent.take(task.own, PATIENCE):
                    line.say("holding")
                    line.wait()
                    try:
                        if task.following is not None:
                            with agent.take(task.following, PATIENCE):
                                pass
                        found = "served"
                    except Failure as failure:
                        found = failure.code
                line.say(found)

    return work


def things(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    names = {
        "lease": "tree-{}",
        "claim": "1{}",
        "file lock": "{}.lock",
        "fair lock": "{}.fair",
        "repo lock": "repo-{}",
    }
    return [(kind, names[kind].format(number)) for number, kind in enumerate(kinds)]


def mixtures(number: int) -> list[tuple[str, ...]]:
    """Every pair, and so many others, with a lock in each."""
    pairs = [each for each in itertools.product(KINDS, repeat=2) if set(each) & set(LOCKS)]
    more = (tuple(random.choices(KINDS, k=random.randint(3, MOST - 1))) for _ in itertools.count())
    longer = ((*each, random.choice(LOCKS)) for each in more)
    return [*pairs, *itertools.islice(longer, max(0, number - len(pairs)))][:number]


def test_of_every_circle_through_locks_exactly_one_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for kinds in mixtures(ROUNDS):
            crew = random.sample(everybody, len(kinds))
            found = play(crew, in_a_circle(things(kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, kinds


def test_where_there_is_no_circle_through_locks_nobody_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for kinds in reversed(mixtures(ROUNDS // 2)):
            crew = random.sample(everybody, len(kinds))
            found = play(crew, in_a_row(things(kinds)), last=crew[-1])
            assert found == {"served": len(kinds)}, kinds
