"""Many processes acquire, snapshot, rename, remove and create one worktree at the same time.

In each round, the stage is set up, all workers start at once, all answer, and the result is checked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import Failure
from holdfast.leases.rules import LeaseKeys
from holdfast.repository.context import MAIN, OPERATIONS, Proof, RepositoryContext, TokenCheck, settled_config
from holdfast.repository.payloads import LeasedWorktree
from holdfast.repository.repository import Repository
from proof.effort import rounds, until
from tests.locks.workers import Line, Worker, Workers
from tests.repository.stages import events, expire, files_in, json_at, make_repository, put_files

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked"), pytest.mark.both_homes]

PROCESSES = 8
ROUNDS = rounds(200, least=10)
MOVES = 100
WORK = {"precious": "work"}
NAMES = ("a", "b")
EXPECTED = {"E_LOCK_CONFLICT", "E_NOT_FOUND", "E_ALREADY_EXISTS", "E_LOCK_NOT_HELD", "E_FENCING_MISMATCH"}


class Answer(NamedTuple):
    """The result of a worker: an error code or its action; and the token, if it was granted a lease."""

    what: str
    name: str
    token: int = 0
    lock_id: str = ""


def act(repository: Repository, action: str, name: str) -> Answer:
    try:
        if action == "acquire":
            held = repository.lease(name, ttl=600)
            return Answer("acquired", name, held.token, held.lock_id)
        if action == "snapshot":
            with repository.lease(name) as held:
                repository.snapshot(name, held)
            return Answer("snapshotted", name, held.token)
        if action == "steal":
            lease = repository.steal(name, ttl=600).lease
            return Answer("acquired", name, lease.fencing_token, lease.lock_id)
        if action == "rename":
            repository.worktrees.change_name(name, "b" if name == "a" else "a", force=True)
            return Answer("renamed", name)
        if action == "remove":
            repository.worktrees.remove(name, save=None, force=True)
            return Answer("removed", name)
        repository.worktrees.create(name)
        return Answer("created", name)
    except Failure as failure:
        return Answer(failure.code, name)


class Stage:
    """One repository, eight workers on it, and methods to set up and check a round."""

    def __init__(self, directory: Path, workers: Workers) -> None:
        self.repository = make_repository(directory)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)

        def work(line: Line) -> None:
            repository = Repository(directory)
            while True:
                line.say(act(repository, *line.wait()))

        self.workers: list[Worker] = workers.start_many(PROCESSES, work)

    def run_all(self, *orders: tuple[str, str]) -> list[Answer]:
        """Send the orders, in rotation, to all workers at once; return the answers in the same order."""
        for number, worker in enumerate(self.workers):
            worker.say(orders[number % len(orders)])
        answers = [Answer(*worker.hear()) for worker in self.workers]
        unexpected = {answer.what for answer in answers if answer.what.startswith("E_")} - EXPECTED
        assert not unexpected, unexpected
        return answers

    def names(self) -> list[str]:
        return [each.worktree_id for each in self.repository.worktrees.configs() if each.worktree_id != MAIN]

    def set_up(self) -> None:
        """Leave exactly the worktree `a`, unlocked, with work in it."""
        for name in self.names():
            self.clear(name)
            if name != "a":
                self.repository.worktrees.remove(name, save=None, force=True)
        if "a" not in self.names():
            self.repository.worktrees.create("a")
        put_files(self.repository.path("a"), WORK)

    def clear(self, name: str) -> None:
        state = self.repository.leases.state(name)
        if state is not None:
            self.repository.leases.release(name, state.lease.lock_id)

    def judge(self, answers: list[Answer]) -> None:
        """Records, directories and locks are consistent; tokens have grown."""
        store, names = self.repository.context.store, self.names()
        place = self.repository.context.paths.worktrees
        there = sorted(os.listdir(place)) if place.exists() else []
        assert sorted(names) == there, "a record without a directory, or the reverse"
        for name in NAMES:
            assert store.read(OPERATIONS.key(name)) is None, "an unfinished operation"
            lease = store.read(LeaseKeys.of(name).lease)
            assert lease is None or name in names, "a lock without a worktree"
            granted = [each for each in answers if each.what == "acquired" and each.name == name]
            held = [] if lease is None else [lease.record.lock_id]
            assert held == [each.lock_id for each in granted], "a ghost lock, or a lost lock"
            new = sorted(each.token for each in answers if each.token and each.name == name)
            earlier = max(self.tokens[name], default=0)
            assert all(token > earlier for token in new), "a token that was granted before"
            assert len(set(new)) == len(new), "a token that was granted twice"
            self.tokens[name] += new


@pytest.fixture
def stage(scratch: Path) -> Iterator[Stage]:
    with Workers() as workers:
        yield Stage(scratch / "repo", workers)


@pytest.mark.req("LC-02", "LC-07", "LC-08")
def test_of_eight_processes_that_acquire_one_wins_and_seven_get_a_conflict(stage: Stage) -> None:
    for _ in range(ROUNDS):
        stage.clear(MAIN)
        answers = stage.run_all(("acquire", MAIN))
        assert Counter(each.what for each in answers) == {"acquired": 1, "E_LOCK_CONFLICT": PROCESSES - 1}


@pytest.mark.req("LC-07")
def test_a_reader_of_the_lock_file_never_sees_a_partial_record(stage: Stage) -> None:
    path = stage.repository.root / ".jvs/locks/main.json"

    def read(line: Line) -> None:
        seen = False
        while not line.has_news():
            with contextlib.suppress(FileNotFoundError):
                assert json_at(path)["worktree_id"] == MAIN
                if not seen:
                    seen = True
                    line.say("seen")
        line.say("ended")

    with Workers() as readers:
        reader = readers.start(read)
        for _ in until(reader.line.has_news, 200):
            stage.clear(MAIN)
            answers = stage.run_all(("acquire", MAIN))
            assert [each.what for each in answers].count("acquired") == 1
        assert (reader.hear(), reader.ask("enough")) == ("seen", "ended")


@pytest.mark.req("LC-09", "LC-14", "LC-15")
def test_of_eight_processes_that_steal_or_acquire_an_expired_lease_one_wins(stage: Stage) -> None:
    for number in range(1, ROUNDS + 1):
        stage.clear(MAIN)
        old = stage.repository.lease(MAIN)
        expire(stage.repository)
        answers = stage.run_all(("acquire", MAIN), ("steal", MAIN))
        assert Counter(each.what for each in answers) == {"acquired": 1, "E_LOCK_CONFLICT": PROCESSES - 1}
        assert max(each.token for each in answers) == old.token + 1
        if number % 50 == 0:
            assert [each.event for each in events(stage.repository)].count("lock_stolen") == number


@pytest.mark.req("LC-06", "WT-08")
@pytest.mark.parametrize(
    "orders",
    [
        [("rename", "a"), ("acquire", "a")],
        [("rename", "a"), ("acquire", "b"), ("acquire", "a"), ("create", "b")],
        [("rename", "a"), ("snapshot", "a")],
        [("rename", "a"), ("rename", "b")],
    ],
    ids=["acquire", "acquire-and-create", "snapshot", "rename-back"],
)
@pytest.mark.sampled(1)
def test_a_race_with_renames_leaves_no_ghost_lock_and_loses_no_work(
    stage: Stage, orders: list[tuple[str, str]]
) -> None:
    done: Counter[str] = Counter()
    for _ in until(lambda: done["renamed"], MOVES):
        stage.set_up()
        answers = stage.run_all(*orders)
        stage.judge(answers)
        done.update(answer.what for answer in answers)
        kept = [files_in(stage.repository.path(name)) for name in stage.names()]
        assert WORK in kept, "work was lost"


@pytest.mark.req("LC-06", "WT-10")
@pytest.mark.parametrize(
    "orders",
    [
        [("remove", "a"), ("acquire", "a")],
        [("remove", "a"), ("rename", "a"), ("acquire", "b"), ("create", "a")],
        [("remove", "a"), ("snapshot", "a"), ("create", "a")],
    ],
    ids=["acquire", "rename-and-create", "snapshot-and-create"],
)
@pytest.mark.sampled(1)
def test_a_race_with_removals_leaves_all_or_nothing(stage: Stage, orders: list[tuple[str, str]]) -> None:
    done: Counter[str] = Counter()
    for _ in until(lambda: done["removed"], MOVES):
        stage.set_up()
        answers = stage.run_all(*orders)
        stage.judge(answers)
        done.update(answer.what for answer in answers)
        if not any(answer.what == "removed" for answer in answers):
            assert WORK in [files_in(stage.repository.path(name)) for name in stage.names()], "work was lost"


# --- Planted bugs, which the storms must find ---------------------------------------------------------


@contextlib.contextmanager
def no_lease(context: RepositoryContext, worktree: str, purpose: str, **_: object) -> Iterator[LeasedWorktree]:
    """Does not acquire the lease before a worktree is renamed or removed."""
    yield LeasedWorktree(context.config(worktree), None)


def no_token_check(context: RepositoryContext, worktree: str, proof: Proof | None) -> TokenCheck:
    """Does not check lease and token in the deciding transaction."""
    return lambda view, now: settled_config(view, worktree)


@pytest.mark.parametrize(
    "planted",
    [
        {
            "holdfast.repository.worktree_changes.leased": no_lease,
            "holdfast.repository.worktree_changes.token_check": no_token_check,
        },
        {"holdfast.repository.repository.check_leasable": lambda view, worktree: None},
    ],
    ids=["rename-or-remove-without-lease", "lease-of-what-is-not-there"],
)
def test_a_planted_bug_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch, planted: dict[str, object]) -> None:
    for name, bug in planted.items():
        monkeypatch.setattr(name, bug)
    orders = [("remove", "a"), ("acquire", "a"), ("rename", "a"), ("acquire", "b")]
    with Workers() as workers, pytest.raises(AssertionError, match=r"lock|record|work"):  # noqa: PT012
        stage = Stage(scratch / "repo", workers)
        for _ in range(10 * ROUNDS):
            stage.set_up()
            stage.judge(stage.run_all(*orders))
