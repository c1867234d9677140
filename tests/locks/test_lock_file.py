"""A lock that is a file: its identity, and its state after a crash or an error at any call."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from traceback import clear_frames

import pytest

from holdfast.errors import IoFailure, LockTimeout, RepoLocked
from holdfast.fs import calls
from holdfast.locks.identity import current_holder
from holdfast.locks.ledger_lock import HeldLedgerLock, LedgerLock
from holdfast.locks.lock_file import FoundLock, LockFile
from holdfast.locks.repo_lock import HeldRepoLock, RepoLock
from proof.crash import Ending, Outcome, error_points, kill_points
from proof.effort import SHARE

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")

MINE = {"lock_id": "mine", "text": "x"}
OTHERS = {"lock_id": "another", "text": "x"}


@pytest.fixture
def file(tmp_path: Path) -> LockFile:
    return LockFile(tmp_path, "", "the.lock")


def seen(file: LockFile) -> FoundLock:
    found = file.read()
    assert found is not None
    return found


# --- Identity ---------------------------------------------------------------------------------------------


def test_reading_a_lock_twice_gives_the_same_identity(file: LockFile) -> None:
    assert file.create(MINE, synced=False)
    assert seen(file) == seen(file)
    assert seen(file).record == MINE


def test_different_content_is_a_different_lock(file: LockFile) -> None:
    file.create(MINE, synced=False)
    before, status = seen(file), file.path.stat()
    file.path.write_bytes(file.path.read_bytes().replace(b"x", b"y"))
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.path.stat().st_ino == status.st_ino
    assert seen(file).identity != before.identity


def test_a_different_time_is_a_different_lock(file: LockFile) -> None:
    file.create(MINE, synced=False)
    before, status = seen(file), file.path.stat()
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    assert seen(file).identity != before.identity


def test_a_different_file_with_the_same_content_and_time_is_a_different_lock(file: LockFile, tmp_path: Path) -> None:
    file.create(MINE, synced=False)
    before, status = seen(file), file.path.stat()
    shutil.copy(file.path, tmp_path / "copy")  # while the first still exists, so that the inode differs
    os.utime(tmp_path / "copy", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(tmp_path / "copy", file.path)
    assert seen(file).record == before.record
    assert seen(file).identity != before.identity


def test_a_directory_that_replaces_another_is_a_different_lock(file: LockFile) -> None:
    file.path.mkdir()
    before = seen(file)
    file.path.rename(file.path.with_name("before"))
    file.path.mkdir()
    assert before.is_directory
    assert seen(file).identity != before.identity


def test_a_lock_is_created_only_if_none_exists(file: LockFile) -> None:
    assert file.create(MINE, synced=False)
    assert not file.create(OTHERS, synced=False)
    assert seen(file).record == MINE


def test_a_takeover_replaces_the_lock_that_was_read_and_no_other(file: LockFile) -> None:
    file.create(OTHERS, synced=False)
    judged = seen(file)
    assert file.take_over(judged, MINE, synced=False)
    assert not file.take_over(judged, OTHERS, synced=False)
    assert seen(file).record == MINE
    assert file.remove_own("lock_id", "mine")
    assert not file.take_over(judged, OTHERS, synced=False), "a lock that is gone is created, not taken over"


def test_only_the_lock_with_the_given_identity_is_removed(file: LockFile) -> None:
    file.create(OTHERS, synced=False)
    assert not file.remove("0" * 16)
    assert file.remove(seen(file).identity)
    assert not file.remove("0" * 16)


def test_remove_own_and_replace_own_affect_only_our_own_lock(file: LockFile) -> None:
    file.create(OTHERS, synced=False)
    assert not file.remove_own("lock_id", "mine")
    assert not file.replace_own("lock_id", "mine", MINE)
    assert seen(file).record == OTHERS
    assert file.replace_own("lock_id", "another", {**OTHERS, "text": "new"})
    assert file.remove_own("lock_id", "another")
    assert not file.replace_own("lock_id", "another", OTHERS)
    assert file.read() is None


def test_a_directory_that_is_not_empty_is_not_removed(file: LockFile) -> None:
    file.path.mkdir()
    (file.path / "precious").touch()
    with pytest.raises(Exception, match="cannot remove"):
        file.remove(seen(file).identity)
    assert (file.path / "precious").exists()


# --- Kills and errors at every call -----------------------------------------------------------------------

STALE = json.dumps({"pid": 4711, "created_at": "2001-01-01T00:00:00Z"})
LEFT_BEHIND = json.dumps({"agent_id": "agent-gone", **current_holder()._replace(start_time="1").as_record()})


class Locking:
    """An operation on a lock. However it ends, the next process gets the lock."""

    path = "repos/repo/.lock"
    before: str | None = None
    ends_with_the_lock = True

    def prepare(self, directory: Path) -> None:
        self.lock_id = ""
        lock = directory / self.path
        lock.parent.mkdir(parents=True, exist_ok=True)
        if self.before is not None:
            lock.write_text(self.before)

    def operate(self, directory: Path) -> None:
        try:
            self.work(directory)
        except Exception as error:
            clear_frames(error.__traceback__)  # closes the files they keep open now, not at some later time
            raise

    def work(self, directory: Path) -> None:
        raise NotImplementedError

    def lock_next(self, directory: Path) -> AbstractContextManager[object]:
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        lock = directory / self.path
        content = lock.read_text() if lock.exists() else None
        if content is not None and content != self.before:
            assert "lock_id" in json.loads(content), f"not a complete record: {content!r}"
        if outcome.ending is Ending.SUCCEEDED:
            assert (content is not None) == self.ends_with_the_lock, f"after success there is {content!r}"
        if self.lock_id:  # it survived, knows that it holds the lock, and releases it
            LockFile(lock.parent, "", lock.name).remove_own("lock_id", self.lock_id)
        try:
            with self.lock_next(directory):
                assert "next" in lock.read_text()
        except (RepoLocked, LockTimeout) as error:
            raise AssertionError(f"the lock is stuck: {error}") from error
        assert not lock.exists(), "the next holder could not release the lock"


class RepoLocking(Locking):
    def lock(self, directory: Path) -> HeldRepoLock:
        held = RepoLock(directory).lock("repo", "first")
        self.lock_id = held.lock_id
        return held

    def work(self, directory: Path) -> None:
        self.lock(directory)

    def lock_next(self, directory: Path) -> AbstractContextManager[object]:
        return RepoLock(directory).lock("repo", "next")


class RepoTakeover(RepoLocking):
    before = STALE


class RepoUnlock(RepoLocking):
    ends_with_the_lock = False

    def work(self, directory: Path) -> None:
        self.lock(directory).unlock()


class RepoRefresh(RepoLocking):
    def work(self, directory: Path) -> None:
        self.lock(directory).refresh()


class RepoBreak(RepoLocking):
    before = STALE
    ends_with_the_lock = False

    def work(self, directory: Path) -> None:
        lock = RepoLock(directory)
        state = lock.state("repo")
        assert state is not None
        lock.break_lock("repo", state.identity)


class LedgerLocking(Locking):
    path = "ledger.lock"

    def acquire(self, directory: Path) -> HeldLedgerLock:
        held = LedgerLock(directory, "agent-first", timeout=0.0).acquire()
        self.lock_id = held.lock_id
        return held

    def work(self, directory: Path) -> None:
        self.acquire(directory)

    def lock_next(self, directory: Path) -> AbstractContextManager[object]:
        return LedgerLock(directory, "agent-next", timeout=0.0).acquire()


class LedgerRecovery(LedgerLocking):
    before = LEFT_BEHIND


class LedgerRelease(LedgerLocking):
    ends_with_the_lock = False

    def work(self, directory: Path) -> None:
        self.acquire(directory).release()


EVERY: list[type[Locking]] = [RepoLocking, RepoTakeover, RepoUnlock, RepoRefresh, RepoBreak]
EVERY += [LedgerLocking, LedgerRecovery, LedgerRelease]


@needs_fork
@pytest.mark.req("RL-05", "LG-05")
@pytest.mark.parametrize("scenario", EVERY)
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_leaves_no_partial_record_and_no_stuck_lock(scenario: type[Locking]) -> None:
    kill_points(scenario(), share=SHARE).require_clean(at_least=20)


@needs_fork
@pytest.mark.parametrize("scenario", EVERY)
@pytest.mark.sampled(2)
def test_an_error_at_any_call_leaves_no_partial_record_and_no_stuck_lock(scenario: type[Locking]) -> None:
    error_points(scenario(), share=SHARE).require_clean(at_least=50)


# --- Planted bugs -----------------------------------------------------------------------------------------


class CreatesThenWrites(RepoLocking):
    """The lock exists before its record: a crash in between leaves an empty lock."""

    record: Mapping[str, object] = {"lock_id": "planted", "pid": 4711}

    def work(self, directory: Path) -> None:
        fd = calls.open(directory / self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            calls.write(fd, json.dumps(self.record).encode())
        finally:
            calls.close(fd)


class NamesNoHolder(RepoLocking):
    """The record names no holder, so its death can never be established."""

    def work(self, directory: Path) -> None:
        LockFile(directory, "repos/repo", ".lock").create({"lock_id": "planted"}, synced=True)


class LeavesTheLockAfterAFailure(RepoLocking):
    """The lock stays although its holder was told that it failed: no process will ever release it."""

    def work(self, directory: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LockFile, "_withdraw", lambda *_: None)
            super().work(directory)


class TreatsUnreadableAsAnothers(RepoUnlock):
    """A lock that cannot be read at the moment is treated as another's, and stays."""

    def work(self, directory: Path) -> None:
        held = self.lock(directory)
        self.lock_id = ""
        with suppress(IoFailure):
            held.unlock()


@pytest.mark.sampled(1)
@needs_fork
@pytest.mark.parametrize(
    ("planted", "problem"), [(CreatesThenWrites, "JSONDecodeError"), (NamesNoHolder, "the lock is stuck")]
)
def test_kills_catch_a_planted_bug(planted: type[Locking], problem: str) -> None:
    report = kill_points(planted())
    assert any(problem in each.problem for each in report.violations), str(report)


@needs_fork
@pytest.mark.parametrize(
    ("planted", "problem"),
    [(LeavesTheLockAfterAFailure, "the lock is stuck"), (TreatsUnreadableAsAnothers, "after success there is")],
)
def test_errors_catch_a_planted_bug(planted: type[Locking], problem: str) -> None:
    report = error_points(planted())
    assert any(problem in each.problem for each in report.violations), str(report)
