"""The lock of a repository: a lock file with race-free stale detection.

The lock is the file `<data_dir>/repos/<repo_id>/.lock`. Taking it never blocks: it succeeds at once, or
raises `RepoLocked` with the holder. Of all processes that find a stale lock (its holder is
dead, or it is older than `stale_after`), exactly one takes it over.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from holdfast.clock import SYSTEM_CLOCK, Clock, format_instant, parse_instant
from holdfast.errors import LockChanged, LockNotHeld, NotFound, RepoLocked
from holdfast.fs.directory import Directory, make_directories, resolved
from holdfast.fs.names import is_safe_name, safe_name
from holdfast.locks.identity import Holder, Liveness, current_holder, liveness, process_liveness
from holdfast.locks.lock_file import FoundLock, LockFile

DEFAULT_STALE_AFTER = 2 * 3600.0
MOST_TRIES = 3


class RepoLockInfo(NamedTuple):
    """A lock file's record of its holder. `lock_id` tells the lock apart from all others. If another program made the
    lock, `holder` is None and `lock_id` is empty."""

    pid: int | None
    created_at: float | None
    cmd: str
    holder: Holder | None
    lock_id: str = ""

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> RepoLockInfo:
        """Read the valid fields of a record."""
        pid, cmd, lock_id = record.get("pid"), record.get("cmd"), record.get("lock_id")
        return cls(
            pid=pid if isinstance(pid, int) and not isinstance(pid, bool) else None,
            created_at=_instant(record.get("created_at")),
            cmd=cmd if isinstance(cmd, str) else "",
            holder=Holder.from_record(record),
            lock_id=lock_id if isinstance(lock_id, str) else "",
        )

    def as_record(self) -> dict[str, object]:
        """The fields as JSON values."""
        created_at = None if self.created_at is None else format_instant(self.created_at)
        holder_id = self.holder.holder_id if self.holder else None
        return {"pid": self.pid, "created_at": created_at, "cmd": self.cmd, "holder_id": holder_id}


class RepoLockState(NamedTuple):
    """A held lock. `info` is None if the content of its file cannot be read."""

    path: Path
    identity: str
    info: RepoLockInfo | None
    age: float
    liveness: Liveness
    stale: bool


LivenessCheck = Callable[[RepoLockInfo], Liveness]


def is_holder_alive(info: RepoLockInfo) -> Liveness:
    """Whether the holder of a lock exists, judged by its full identity or, if that is missing, by its pid."""
    if info.holder is not None:
        return liveness(info.holder)
    return Liveness.UNKNOWN if info.pid is None else process_liveness(info.pid)


class RepoLock:
    """The locks of all repositories in one data directory."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        stale_after: float = DEFAULT_STALE_AFTER,
        clock: Clock = SYSTEM_CLOCK,
        liveness_check: LivenessCheck = is_holder_alive,
    ) -> None:
        self.data_dir: Path = resolved(data_dir)
        self.stale_after = stale_after
        self._clock = clock
        self._liveness_check = liveness_check

    def lock(self, repo_id: str, cmd: str = "") -> HeldRepoLock:
        """Take the lock of `repo_id`, or raise `RepoLocked` at once. `cmd` describes the holder."""
        repo_id = safe_name(repo_id, what="repository id")
        self._make_directory(repo_id)
        file = self._file(repo_id)
        lock_id = str(uuid.uuid4())
        held = HeldRepoLock(file, repo_id, lock_id, lambda: self._record(lock_id, cmd))
        for _ in range(MOST_TRIES):
            record = self._record(lock_id, cmd)
            if file.create(record, synced=True):  # 1. free: commit point
                return held
            found = file.read()  # 2. held: by a live holder?
            if found is None or not self._judge(file, found).stale:
                raise self._locked(repo_id, file, found)
            if file.take_over(found, record, synced=True):  # 3. stale: one process replaces it
                return held
        raise self._locked(repo_id, file, file.read())

    def state(self, repo_id: str) -> RepoLockState | None:
        """The lock of `repo_id` and its holder, or None if it is free. Changes nothing."""
        file = self._file(safe_name(repo_id, what="repository id"))
        try:
            found = file.read()
        except NotFound:
            return None
        return None if found is None else self._judge(file, found)

    def states(self) -> dict[str, RepoLockState | None]:
        """The `state` of every repository that was ever locked here, sorted by id."""
        try:
            with Directory.open(self.data_dir) as top, top.beneath("repos") as repos:
                return {name: self.state(name) for name in repos.directories() if is_safe_name(name)}
        except NotFound:
            return {}

    def break_lock(self, repo_id: str, identity: str) -> None:
        """Remove the lock with exactly this `identity`, stale or not. Call it only at a person's request."""
        file = self._file(safe_name(repo_id, what="repository id"))
        if not file.remove(identity):
            message = f"the lock of {repo_id} does not have the identity {identity}"
            raise LockChanged(message, repo_id=repo_id, path=str(file.path))

    def _file(self, repo_id: str) -> LockFile:
        return LockFile(self.data_dir, f"repos/{repo_id}", ".lock")

    def _make_directory(self, repo_id: str) -> None:
        make_directories(self.data_dir)
        with Directory.open(self.data_dir) as top:
            top.beneath(f"repos/{repo_id}", create=True).close()

    def _record(self, lock_id: str, cmd: str) -> dict[str, object]:
        me = current_holder()
        record: dict[str, object] = {"pid": me.pid, "created_at": format_instant(self._clock.wall())}
        if cmd:
            record["cmd"] = cmd
        return {**record, "lock_id": lock_id, **me.as_record()}

    def _judge(self, file: LockFile, found: FoundLock) -> RepoLockState:
        info = None if found.record is None else RepoLockInfo.from_record(found.record)
        since = found.modified_at if info is None or info.created_at is None else info.created_at
        age = self._clock.wall() - since
        alive = Liveness.UNKNOWN if info is None else self._liveness_check(info)
        stale = alive is Liveness.DEAD or age > self.stale_after
        return RepoLockState(file.path, found.identity, info, age, alive, stale and not found.is_directory)

    def _locked(self, repo_id: str, file: LockFile, found: FoundLock | None) -> RepoLocked:
        info = None if found is None or found.record is None else RepoLockInfo.from_record(found.record)
        return RepoLocked(repo_id, file.path, info.as_record() if info else None)


class HeldRepoLock:
    """The held lock of a repository. In a forked child it is a copy without effect."""

    def __init__(self, file: LockFile, repo_id: str, lock_id: str, new_record: Callable[[], dict[str, object]]) -> None:
        self.repo_id = repo_id
        self.lock_id = lock_id
        self.path = file.path
        self._file = file
        self._new_record = new_record
        self._pid = os.getpid()
        self._released = False

    def unlock(self) -> None:
        """Remove the lock file if it is still ours; idempotent."""
        if not self._released and self._pid == os.getpid():
            self._file.remove_own("lock_id", self.lock_id)
            self._released = True

    def refresh(self) -> None:
        """Renew the lock's time, so that long work does not look stale; raise `LockNotHeld` if the lock was lost."""
        ours = not self._released and self._pid == os.getpid()
        if not ours or not self._file.replace_own("lock_id", self.lock_id, self._new_record()):
            message = f"cannot refresh the lock of {self.repo_id}: this process no longer holds it"
            raise LockNotHeld(message, repo_id=self.repo_id)

    def __enter__(self) -> Self:
        if self._released:
            raise LockNotHeld(f"the lock of {self.repo_id} was released", repo_id=self.repo_id)
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()


def _instant(value: object) -> float | None:
    """The instant in a text; None if it cannot be parsed, or cannot be formatted again."""
    try:
        instant = parse_instant(value) if isinstance(value, str) else None
        return instant if instant is not None and format_instant(instant) else None
    except (ValueError, OverflowError):
        return None
