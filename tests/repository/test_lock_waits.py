"""Deadlocks through file locks and repository locks: exactly one process of each cycle gives up.

The cycles mix leases, claims, file locks and repository locks; the rounds are those of `test_waits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest import mock

import pytest

from holdfast.cli.repo_lock import acquire
from holdfast.errors import Deadlock, Failure, LockTimeout
from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.leases import deadlock, wait_notes
from holdfast.leases.wait_notes import WaitNote, WaitNotes
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.kernel_locks import inode_of
from holdfast.locks.repo_lock import RepoLock
from holdfast.repository.ledgers import OpenLedger
from holdfast.repository.repository import Repository
from holdfast.repository.waits import LockWaits, WaitContext, wait_context, waits_of_repository
from proof.effort import rounds
from tests.locks.workers import PATIENCE, Line, Workers, wait_until
from tests.repository.test_waits import (
    LONG,
    MOST,
    Shop,
    Task,
    in_a_circle,
    in_a_row,
    make_shop,
    play,
    whoever_looks,
)

pytestmark = pytest.mark.both_homes

if sys.platform != "linux":
    pytest.skip("only Linux reports the holders of a file lock", allow_module_level=True)

ROUNDS = rounds(30, least=10)
KINDS = ("lease", "claim", "file lock", "fair lock", "repo lock")
LOCKS = ("file lock", "fair lock", "repo lock")


@pytest.fixture
def shop(scratch: Path) -> Shop:
    return make_shop(scratch / "shop")


class Agent:
    """A process that takes leases, claims and locks."""

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


def code_of(failure: Failure) -> object:
    return failure.code


def worker_in(
    shop: Shop, wait: float = PATIENCE, tell: Callable[[Failure], object] = code_of
) -> Callable[[Line], None]:
    """Agents must be siblings: a child also holds everything that its parent holds."""

    def work(line: Line) -> None:
        os.environ["HOLDFAST_REPO"] = str(shop.root)  # read by the command that waits for repository locks
        with agent_in(shop) as agent:
            while True:
                task = line.wait()
                with agent.take(task.own, PATIENCE):
                    line.say("holding")
                    line.wait()
                    try:
                        if task.following is not None:
                            with agent.take(task.following, wait):
                                pass
                        found: object = "served"
                    except Failure as failure:
                        found = tell(failure)
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
    """Every pair, then longer mixtures, with a lock in each."""
    pairs = [each for each in itertools.product(KINDS, repeat=2) if set(each) & set(LOCKS)]
    more = (tuple(random.choices(KINDS, k=random.randint(3, MOST - 1))) for _ in itertools.count())
    longer = ((*each, random.choice(LOCKS)) for each in more)
    return [*pairs, *itertools.islice(longer, max(0, number - len(pairs)))][:number]


def test_exactly_one_process_of_every_cycle_through_locks_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for kinds in mixtures(ROUNDS):
            crew = random.sample(everybody, len(kinds))
            found = play(crew, in_a_circle(things(kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, kinds


def test_without_a_cycle_through_locks_no_process_gives_up(shop: Shop) -> None:
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for kinds in random.sample(mixtures(ROUNDS), ROUNDS // 3):
            crew = random.sample(everybody, len(kinds))
            found = play(crew, in_a_row(things(kinds)), last=crew[-1])
            assert found == {"served": len(kinds)}, kinds


ALL = things(("lease", "claim", "file lock", "fair lock", "repo lock"))


@pytest.mark.parametrize("in_order", [True, False], ids=["in one order", "in any order"])
def test_a_process_that_takes_several_locks_is_refused_only_if_the_order_allows_cycles(
    shop: Shop, in_order: bool
) -> None:
    """In one order no process is refused. In any order every process succeeds in the end: a refused process
    releases everything and starts again, and no wait times out."""

    def work(line: Line) -> None:
        os.environ["HOLDFAST_REPO"] = str(shop.root)
        with agent_in(shop) as agent:
            for _ in range(ROUNDS // 5):
                wanted = random.sample(ALL, random.randint(2, 3))
                wanted = sorted(wanted) if in_order else wanted
                refused = 0
                while not took_all(agent, wanted):
                    refused += 1
                    time.sleep(random.uniform(0.0, 0.1 * refused))  # else it retries before others are served
                line.say(refused)
            line.wait()

    with Workers() as workers:
        crew = workers.start_many(MOST, work)
        refused = sum(each.hear() for _ in range(ROUNDS // 5) for each in crew)
    assert refused == 0 or not in_order


def took_all(agent: Agent, wanted: list[tuple[str, str]]) -> bool:
    """Whether the agent got all of them at once; False after a deadlock. A timeout is a failure."""
    with contextlib.ExitStack() as held:
        try:
            for each in wanted:
                held.enter_context(agent.take(each, PATIENCE))
                time.sleep(random.uniform(0.0, 0.02))
        except Deadlock:
            return False
    return True


@pytest.mark.long
def test_a_detector_that_picks_any_victim_would_be_found(shop: Shop) -> None:
    with mock.patch.object(deadlock, "youngest", whoever_looks), Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for _ in range(10 * ROUNDS):
            kinds = tuple(random.choices(LOCKS, k=MOST))
            if play(everybody, in_a_circle(things(kinds)))["E_DEADLOCK"] != 1:
                return
    pytest.fail("the planted bug was not found")


@pytest.mark.sampled(1)
def test_cycles_through_locks_are_detected_on_every_store(tmp_path: Path, store_url: str) -> None:
    shop = make_shop(tmp_path / "shop", store=store_url)
    with Workers() as workers:
        everybody = workers.start_many(MOST, worker_in(shop))
        for kinds in (
            ("lease", "file lock"),
            ("claim", "repo lock", "lease"),
            ("lease", "claim", *LOCKS[:2]),
        ):
            found = play(everybody[: len(kinds)], in_a_circle(things(kinds)))
            assert found == {"E_DEADLOCK": 1, "served": len(kinds) - 1}, kinds
        crew = everybody[:3]
        found = play(crew, in_a_row(things(("claim", "file lock", "lease"))), last=crew[-1])
        assert found == {"served": 3}


def has_waiter(shop: Shop, worktree: str) -> bool:
    with Repository(shop.root) as repository:
        state = repository.leases.state(worktree)
        return state is not None and bool(state.waiters)


def test_a_coroutine_that_waits_for_a_file_lock_in_a_cycle_is_refused(shop: Shop) -> None:
    def work(line: Line) -> None:
        async def wait(repository: Repository) -> object:
            try:
                async with repository.file_locker(None).lock_exclusive_async(shop.root / "x.lock"):
                    return "served"
            except Deadlock as failure:
                return failure.code

        with agent_in(shop) as agent, agent.take(("lease", "tree-0"), 0.0):
            line.say("holding")
            line.wait()
            line.say(asyncio.run(wait(agent.repository)))
        line.wait()

    with Workers() as workers:
        other, coroutine = workers.start(worker_in(shop)), workers.start(work)
        assert coroutine.hear() == "holding"
        assert other.ask(Task(("file lock", "x.lock"), ("lease", "tree-0"))) == "holding"
        other.say("go")
        wait_until(lambda: has_waiter(shop, "tree-0"))
        assert coroutine.ask("go") == "E_DEADLOCK"
        assert other.hear() == "served"


# --- Shared locks -----------------------------------------------------------------------------------------


def test_one_of_several_shared_holders_may_be_in_a_cycle(shop: Shop) -> None:
    """Two readers share the file. The writer waits for both, and the second reader waits for the writer's lease."""

    def read(line: Line) -> None:
        with agent_in(shop) as agent, agent.repository.file_locker().lock_shared(shop.root / "x.lock"):
            line.say("holding")
            line.wait()
            with agent.take(("lease", "tree-0"), PATIENCE):
                line.say("served")
        line.wait()

    with Workers() as workers:
        readers = workers.start_many(2, read)
        assert [each.hear() for each in readers] == ["holding"] * 2
        writer = workers.start(worker_in(shop, tell=Failure.as_record))
        assert writer.ask(Task(("lease", "tree-0"), ("file lock", "x.lock"))) == "holding"
        readers[1].say("wait")
        wait_until(lambda: has_waiter(shop, "tree-0"))
        refused = writer.ask("go")
        assert readers[1].hear() == "served"
    assert refused["code"] == "E_DEADLOCK"
    [mine, theirs] = refused["cycle"]
    assert (mine["kind"], theirs["kind"]) == ("file lock", "lease")
    assert f":{readers[1].pid}:" in mine["held_by"]


def test_only_a_fair_waiter_also_waits_for_the_head_of_the_queue(shop: Shop) -> None:
    path = shop.root / "x.lock"
    FileLocker(fair=True).lock_exclusive(path).release()  # creates both files
    waits = LockWaits(WaitContext(WaitNotes([])))
    fair, any_time = (waits.for_file_lock(str(path), 0.0, shared=False, fair=each).note.thing for each in (True, False))
    assert any_time.place == inode_of(path)
    assert fair.place.split() == [inode_of(path), inode_of(f"{path}.queue")]


def test_a_data_directory_that_cannot_be_created_hides_no_wait_from_the_repository(shop: Shop) -> None:
    (shop.root / "file").touch()
    around = wait_context(shop.root, shop.root / "file" / "data")
    wait = LockWaits(around).for_file_lock(str(shop.root / "x.lock"), 0.0, shared=False, fair=False)
    wait.post()
    assert WaitNotes([waits_of_repository(shop.root)]).notes() == [wait.note]
    wait.take_down()


# --- Waits that ended -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.sampled(1)
def test_a_waiter_that_was_killed_is_in_no_cycle(shop: Shop, kind: str) -> None:
    """Its lease has time left, but its note no longer counts, and is deleted."""
    assert after_a_waiter_was_killed(shop, (kind, "mine"), 0.5) == "E_LOCK_TIMEOUT"
    assert not list(waits_of_repository(shop.root).iterdir())


def test_trust_in_the_notes_of_dead_waiters_would_be_found(shop: Shop) -> None:
    """A planted bug: a note counts even if its writer is dead."""

    def believed(directory: Directory, name: str, *, sweep: bool) -> WaitNote | None:
        return wait_notes._parsed((directory.path / name).read_bytes())

    with mock.patch.object(wait_notes, "_read", believed):
        assert after_a_waiter_was_killed(shop, ("file lock", "mine"), PATIENCE) == "E_DEADLOCK"


def after_a_waiter_was_killed(shop: Shop, wanted: tuple[str, str], wait: float) -> object:
    """Kill a waiter; return the answer to a survivor that holds `wanted` and waits for the lease of the dead."""

    def work(line: Line) -> None:
        os.environ["HOLDFAST_REPO"] = str(shop.root)
        with agent_in(shop) as agent, agent.take(("lease", "tree-0"), 0.0):
            line.say("holding")
            agent.take(wanted, PATIENCE)

    with Workers() as workers:
        survivor = workers.start(worker_in(shop, wait))
        assert survivor.ask(Task(wanted, ("lease", "tree-0"))) == "holding"
        doomed = workers.start(work)
        assert doomed.hear() == "holding"
        wait_until(WaitNotes([waits_of_repository(shop.root)]).notes)
        doomed.kill()
        doomed.wait()
        return survivor.ask("go")


def test_a_wait_that_times_out_leaves_nothing_behind(shop: Shop) -> None:
    def hold(line: Line) -> None:
        with agent_in(shop) as agent, agent.take(("file lock", "x.lock"), 0.0):
            line.say("holding")
            line.wait()

    with Workers() as workers, agent_in(shop) as agent:
        assert workers.start(hold).hear() == "holding"
        before = set(threading.enumerate())
        with pytest.raises(LockTimeout):
            agent.take(("file lock", "x.lock"), 0.2)
        assert not list(waits_of_repository(shop.root).iterdir())
        wait_until(lambda: set(threading.enumerate()) <= before)


# --- Holders ----------------------------------------------------------------------------------------------


def test_other_programs_that_lock_or_inherit_a_file_are_holders_too(shop: Shop) -> None:
    """A program locks a file through a child that exits, as a shell may, and runs a command that waits."""
    script = (
        "import fcntl, os, subprocess, sys\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "if not (taker := os.fork()):\n"
        "    fcntl.flock(file, fcntl.LOCK_EX)\n"
        "    os._exit(0)\n"
        "os.waitpid(taker, 0)\n"
        "print('holding', flush=True)\n"
        "sys.stdin.readline()\n"
        "done = subprocess.run([sys.executable, '-m', 'holdfast', 'lease', 'acquire', '--repo', sys.argv[2],"
        " '--worktree', 'tree-0', '--wait', '60s'])\n"
        "sys.exit(done.returncode)\n"
    )
    command = [sys.executable, "-c", script, str(shop.root / "x.lock"), str(shop.root)]
    with Workers() as workers, subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "holding\n"
            agent = workers.start(worker_in(shop, tell=str))
            assert agent.ask(Task(("lease", "tree-0"), ("file lock", "x.lock"))) == "holding"
            other.stdin.write("\n")
            other.stdin.flush()
            wait_until(lambda: has_waiter(shop, "tree-0"))
            refused = agent.ask("go")
            assert other.wait(PATIENCE) == 0
        finally:
            other.kill()
    assert f":{other.pid}:" in refused
    assert "would never end" in refused


def test_another_program_that_holds_a_lock_and_does_not_wait_is_in_no_cycle(shop: Shop) -> None:
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('holding', flush=True); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(shop.root / "x.lock")]
    with Workers() as workers, subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        agent = workers.start(worker_in(shop, 0.5))
        assert agent.ask(Task(("lease", "tree-0"), ("file lock", "x.lock"))) == "holding"
        assert agent.ask("go") == "E_LOCK_TIMEOUT"
        other.communicate("\n")


@pytest.mark.parametrize(
    ("names", "found"), [(("agent:one", "agent:two"), "E_LOCK_TIMEOUT"), ((None, None), "E_DEADLOCK")]
)
def test_agents_of_one_process_are_told_apart_if_they_give_their_names(
    shop: Shop, names: tuple[str | None, str | None], found: str
) -> None:
    """One agent holds the lock, and another of the same process waits. Without names the two count as one."""

    def work(line: Line) -> None:
        one, two = (Repository(shop.root, actor=name) for name in names)
        with one.file_locker().lock_exclusive(shop.root / "x.lock"):
            line.say("holding")
            line.wait()
            two.lease("tree-0", ttl=LONG, wait=PATIENCE)

    with Workers() as workers:
        other, agent = workers.start(work), workers.start(worker_in(shop, 0.5))
        assert other.hear() == "holding"
        assert agent.ask(Task(("lease", "tree-0"), ("file lock", "x.lock"))) == "holding"
        other.say("wait")
        wait_until(lambda: has_waiter(shop, "tree-0"))
        assert agent.ask("go") == found


# --- Costs ------------------------------------------------------------------------------------------------


def test_deadlock_detection_adds_no_system_call_to_taking_a_free_lock(shop: Shop) -> None:
    with Repository(shop.root) as repository:
        plain = calls_of(FileLocker(5.0), shop.root / "x.lock")
        observed = calls_of(repository.file_locker(5.0), shop.root / "x.lock")
    assert plain == observed
    assert Counter(observed) == {"flock": 2, "stat": 1}


def calls_of(locker: FileLocker, path: Path) -> list[str]:
    """The system calls that take and release a lock whose file already exists."""
    locker.lock_exclusive(path).release()
    made: list[str] = []

    def recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return function(*arguments, **options)

        return call

    names = [name for name, value in vars(calls).items() if callable(value) and not name.startswith("_")]
    with contextlib.ExitStack() as patched:
        patched.callback(gc.enable)
        gc.disable()  # it would close what earlier tests have left open
        for name in names:
            patched.enter_context(mock.patch.object(calls, name, recorder(name, getattr(calls, name))))
        before = set(threading.enumerate())
        locker.lock_exclusive(path).release()
        assert set(threading.enumerate()) <= before
    return made
