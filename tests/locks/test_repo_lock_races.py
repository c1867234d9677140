"""Exactly one of the processes that judge a lock stale gets it, and no fresh lock is ever removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import RepoLocked
from holdfast.fs import durable
from holdfast.locks.identity import Liveness, process_liveness
from holdfast.locks.lock_file import LockFile
from holdfast.locks.repo_lock import HeldRepoLock, RepoLock, RepoLockInfo
from proof.effort import rounds
from tests.locks.race_rounds import LATE, REPO, MakeLock, delayed, lock_path, pause, race, storm
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")


@pytest.mark.req("RL-08", "RL-09")
def test_exactly_one_of_eight_processes_gets_a_stale_lock_of_any_kind(scratch: Path) -> None:
    each = rounds(150)
    tally = race(scratch, RepoLock, rounds=9 * each)
    assert not tally.violations, str(tally)
    assert list(tally.kinds.values()) == [each] * 9, "not every kind was tried"


@pytest.mark.req("RL-08", "RL-09")
def test_exactly_one_process_gets_a_stale_lock_when_any_call_may_be_delayed(scratch: Path) -> None:
    tally = race(scratch, delayed, rounds=rounds(90, least=9))
    assert not tally.violations, str(tally)


def test_a_race_leaves_nothing_behind_but_the_guard(scratch: Path) -> None:
    race(scratch, delayed, rounds=18)
    assert sorted(os.listdir(lock_path(scratch).parent)) == [".lock.guard"]


# --- Planted bugs -------------------------------------------------------------------------------------


class Planted(RepoLock):
    """Our lock until a lock is judged stale; each subclass then does something wrong."""

    def lock(self, repo_id: str, cmd: str = "") -> HeldRepoLock:
        self._make_directory(repo_id)
        held = self._new(repo_id, cmd)
        for _ in range(3):
            if held._file.create(held._new_record(), synced=False):
                return held
            state = self.state(repo_id)
            if state is None or not state.stale:
                break
            pause()
            if self.take(held, state.identity):
                return held
        raise RepoLocked(repo_id, held.path, None)

    def take(self, held: HeldRepoLock, identity: str) -> bool:
        raise NotImplementedError

    def _new(self, repo_id: str, cmd: str) -> HeldRepoLock:
        lock_id = os.urandom(8).hex()
        return HeldRepoLock(self._file(repo_id), repo_id, lock_id, lambda: self._record(lock_id, cmd))


class RemovesByPath(Planted):
    """The lock is read, judged, removed by path and created again, as in most programs."""

    def take(self, held: HeldRepoLock, identity: str) -> bool:
        held.path.unlink(missing_ok=True)
        return False  # start over


class RenamesOver(Planted):
    """A draft is renamed over the lock: every rename succeeds, so every process wins."""

    def take(self, held: HeldRepoLock, identity: str) -> bool:
        draft = held.path.with_name(f"draft-{held.lock_id}")
        LockFile(draft.parent, "", draft.name).create(held._new_record(), synced=False)
        os.rename(draft, held.path)
        return True


class RenamesAway(Planted):
    """The lock is renamed away and a new one created, but the rename may have hit a fresh lock."""

    def take(self, held: HeldRepoLock, identity: str) -> bool:
        try:
            os.rename(held.path, held.path.with_name(f"old-{held.lock_id}"))
        except FileNotFoundError:
            return False
        return held._file.create(held._new_record(), synced=False)


class RechecksWithoutGuard(Planted):
    """The identity is checked again, but the lock may still change before the removal."""

    def take(self, held: HeldRepoLock, identity: str) -> bool:
        state = self.state(held.repo_id)
        if state is None or state.identity != identity:
            return False
        pause()
        held.path.unlink(missing_ok=True)
        return held._file.create(held._new_record(), synced=False)


class UnlocksByPath(RepoLock):
    """Locks like ours, but unlocks by removing any lock at the path."""

    def lock(self, repo_id: str, cmd: str = "") -> HeldRepoLock:
        held = super().lock(repo_id, cmd)

        def unlock() -> None:
            pause()
            held.path.unlink(missing_ok=True)

        held.unlock = unlock  # type: ignore[method-assign]
        return held


@pytest.mark.parametrize("planted", [RemovesByPath, RenamesOver, RenamesAway, RechecksWithoutGuard, UnlocksByPath])
@pytest.mark.sampled(1)
def test_the_rounds_catch_a_planted_bug(planted: MakeLock, scratch: Path) -> None:
    tally = race(scratch, planted, rounds=540, first_violation_ends=True)
    assert tally.violations, f"not caught in {tally.rounds} rounds"


def test_the_rounds_catch_an_unlock_by_path_after_a_steal(scratch: Path) -> None:
    tally = race(scratch, UnlocksByPath, rounds=200, kinds=[LATE.kind], first_violation_ends=True)
    assert tally.violations, f"not caught in {tally.rounds} rounds"


# --- Kills --------------------------------------------------------------------------------------------


@pytest.mark.req("RL-05", "RL-08")
def test_a_storm_of_kills_leaves_no_stuck_lock_and_never_two_holders(scratch: Path) -> None:
    seen = storm(scratch, _half_of_them_delayed, kills=rounds(120, least=12))
    assert not seen.violations, f"{seen}"
    RepoLock(scratch).lock(REPO).unlock()


@pytest.mark.long
def test_a_storm_catches_a_removal_by_path(scratch: Path) -> None:
    seen = storm(scratch, RemovesByPath, kills=2000, first_violation_ends=True)
    assert "two holders at once" in seen.violations, f"{seen}"


def _half_of_them_delayed(data_dir: Path) -> RepoLock:
    return delayed(data_dir) if os.getpid() % 2 else RepoLock(data_dir)


# --- Another pid namespace ----------------------------------------------------------------------------

_IN_ANOTHER_NAMESPACE = """
import os, sys
from holdfast.locks.repo_lock import RepoLock
wanted = {int(each) for each in sys.argv[2].split()}
while os.getpid() not in wanted:  # a pid that is unused outside
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
RepoLock(sys.argv[1]).lock("repo")
print("held", os.getpid(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holder_in_another_pid_namespace(data_dir: Path) -> Iterator[int]:
    """A real process in another pid namespace that holds the lock; yields its pid there."""
    enter = ["unshare", "--pid", "--fork", "--mount-proc"]
    if sys.platform != "linux" or shutil.which("unshare") is None or subprocess.run([*enter, "true"]).returncode:
        pytest.skip("a new pid namespace needs Linux, unshare(1) and the privilege: a foreign holder is untested")
    free = [pid for pid in range(3, 3000) if process_liveness(pid) is Liveness.DEAD]
    command = [sys.executable, "-c", _IN_ANOTHER_NAMESPACE, str(data_dir), " ".join(map(str, free))]
    pipe = subprocess.PIPE
    with subprocess.Popen([*enter, *command], text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdin
        assert process.stdout
        word, pid = process.stdout.readline().split()
        assert word == "held"
        yield int(pid)
        process.stdin.close()


def _try_often(data_dir: Path, make_lock: MakeLock, rounds: int) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        wins = 0
        for _ in range(rounds):
            try:
                make_lock(data_dir).lock(REPO)
                wins += 1
            except RepoLocked:
                pass
        line.say(wins)

    return task


def _by_pid_alone(data_dir: Path) -> RepoLock:
    def check(info: RepoLockInfo) -> Liveness:
        return process_liveness(info.pid or 0)

    return RepoLock(data_dir, liveness_check=check)


@pytest.mark.req("RL-07", "RL-08")
def test_a_fresh_lock_from_another_pid_namespace_is_never_stolen(scratch: Path) -> None:
    with holder_in_another_pid_namespace(scratch) as pid, Workers() as workers:
        assert process_liveness(pid) is Liveness.DEAD, "judged by its pid alone, the holder must look dead"
        before = durable.read(lock_path(scratch))
        tries = workers.start_many(8, _try_often(scratch, RepoLock, 50))
        assert [each.hear() for each in tries] == [0] * 8
        assert durable.read(lock_path(scratch)) == before


def test_a_check_of_the_pid_alone_steals_from_another_pid_namespace(scratch: Path) -> None:
    with holder_in_another_pid_namespace(scratch), Workers() as workers:
        tries = workers.start_many(8, _try_often(scratch, _by_pid_alone, 50))
        assert sum(each.hear() for each in tries) > 0, "the test above would not notice a steal"
