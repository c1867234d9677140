"""One writer per repository: a lock file with stale detection that cannot race.

The lock is the file `<data_dir>/repos/<repo_id>/.lock`. It never blocks: it is had at once, or
`RepoLocked` says who has it. A lock whose process is gone, or that is older than `stale_after`, is
taken over, by exactly one of those who try.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from holdfast.clock import SYSTEM_CLOCK, Clock, format_instant, parse_instant
from holdfast.errors import LockChanged, LockNotHeld, NotFound, RepoLocked
from holdfast.fs import calls
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import is_safe_name, safe_name
from holdfast.locks.identity import Holder, Liveness, current_holder, liveness, process_liveness
from holdfast.locks.lock_file import LockFile, Sighting

DEFAULT_STALE_AFTER = 2 * 3600.0
MOST_TRIES = 3


class RepoLockInfo(NamedTuple):
    """What a lock file says about its holder. `holder` is None for a lock that another program wrote, and
    `lock_id`, which tells this lock from all others before and after it, is empty then."""

    pid: int | None
    created_at: float | None
    cmd: str
    holder: Holder | None
    lock_id: str = ""

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> RepoLockInfo:
        """Read a record as far as it makes sense."""
        pid, cmd, lock_id = record.get("pid"), record.get("cmd"), record.get("lock_id")
        return cls(
            pid=pid if isinstance(pid, int) and not isinstance(pid, bool) else None,
            created_at=_instant(record.get("created_at")),
            cmd=cmd if isinstance(cmd, str) else "",
            holder=Holder.from_record(record),
            lock_id=lock_id if isinstance(lock_id, str) else "",
        )

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {
            "pid": self.pid,
            "created_at": None if self.created_at is None else format_instant(self.created_at),
            "cmd": self.cmd,
            "holder_id": self.holder.holder_id if self.holder else None,
        }


class RepoLockState(NamedTuple):
    """One look at a lock that is there. `info` is None if its content could not be read."""

    path: Path
    identity: str
    info: RepoLockInfo | None
    age: float
    liveness: Liveness
    stale: bool


LivenessCheck = Callable[[RepoLockInfo], Liveness]


def is_holder_alive(info: RepoLockInfo) -> Liveness:
    """Whether the holder of a lock exists: by its whole identity, or by the pid if that is all there is."""
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
        self.data_dir = Path(data_dir)
        self.stale_after = stale_after
        self._clock = clock
        self._liveness_check = liveness_check

    def lock(self, repo_id: str, cmd: str = "") -> HeldRepoLock:
        """Take the lock of `repo_id`, or raise `RepoLocked` at once. `cmd` is stored for whoever asks."""
        repo_id = safe_name(repo_id, what="repository id")
        self._make_directory(repo_id)
        file = self._file(repo_id)
        lock_id = str(uuid.uuid4())
        held = HeldRepoLock(file, repo_id, lock_id, lambda: self._record(lock_id, cmd))
        for _ in range(MOST_TRIES):
            record = self._record(lock_id, cmd)
            if file.create(record, synced=True):  # 1. free: commit point
                return held
            seen = file.look()  # 2. who has it?
            if seen is None or not self._judge(file, seen).stale:
                raise self._locked(repo_id, file, seen)
            if file.take_over(seen, record, synced=True):  # 3. stale: one of us takes its place
                return held
        raise self._locked(repo_id, file, file.look())

    def state(self, repo_id: str) -> RepoLockState | None:
        """Who holds the lock of `repo_id`, or None if nobody does. Changes nothing."""
        file = self._file(safe_name(repo_id, what="repository id"))
        try:
            seen = file.look()
        except NotFound:
            return None
        return None if seen is None else self._judge(file, seen)

    def states(self) -> dict[str, RepoLockState | None]:
        """`state` of every repository that was ever locked here, by its id, in order."""
        return {repo_id: self.state(repo_id) for repo_id in self._repo_ids()}

    def break_lock(self, repo_id: str, identity: str) -> None:
        """Remove the lock that has exactly this `identity`, stale or not: an order, for people."""
        file = self._file(safe_name(repo_id, what="repository id"))
        if not file.remove(identity):
            raise LockChanged(
                f"the lock of {repo_id} does not have the identity {identity}",
                repo_id=repo_id,
                path=str(file.path),
            )

    def _file(self, repo_id: str) -> LockFile:
        return LockFile(self.data_dir, f"repos/{repo_id}", ".lock")

    def _repo_ids(self) -> list[str]:
        try:
            with Directory.open(self.data_dir) as top, top.beneath("repos") as repos:
                with calls.scandir(repos.path) as entries:
                    names = sorted(entry.name for entry in entries)
                return [name for name in names if _is_repo(repos, name)]
        except NotFound:
            return []

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

    def _judge(self, file: LockFile, seen: Sighting) -> RepoLockState:
        info = None if seen.record is None else RepoLockInfo.from_record(seen.record)
        since = seen.modified_at if info is None or info.created_at is None else info.created_at
        age = self._clock.wall() - since
        alive = Liveness.UNKNOWN if info is None else self._liveness_check(info)
        stale = alive is Liveness.DEAD or age > self.stale_after
        return RepoLockState(file.path, seen.identity, info, age, alive, stale and not seen.is_directory)

    def _locked(self, repo_id: str, file: LockFile, seen: Sighting | None) -> RepoLocked:
        info = None if seen is None or seen.record is None else RepoLockInfo.from_record(seen.record)
        return RepoLocked(repo_id, file.path, info.as_record() if info else None)


class HeldRepoLock:
    """The lock of a repository, held. In a forked child it is a copy without effect."""

    def __init__(
        self, file: LockFile, repo_id: str, lock_id: str, new_record: Callable[[], dict[str, object]]
    ) -> None:
        self.repo_id = repo_id
        self.lock_id = lock_id
        self.path = file.path
        self._file = file
        self._new_record = new_record
        self._pid = os.getpid()
        self._released = False

    def unlock(self) -> None:
        """Remove the lock file, if it is still ours; twice is fine."""
        if not self._released and self._pid == os.getpid():
            self._file.remove_own("lock_id", self.lock_id)
            self._released = True

    def refresh(self) -> None:
        """Date the lock anew, so that long work is not taken for stale; `LockNotHeld` if it was lost."""
        ours = not self._released and self._pid == os.getpid()
        if not ours or not self._file.replace_own("lock_id", self.lock_id, self._new_record()):
            raise LockNotHeld(f"the lock of {self.repo_id} is not ours any more", repo_id=self.repo_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlock()


def _is_repo(repos: Directory, name: str) -> bool:
    """Whether this is the directory of a repository, not something that others keep beside them."""
    status = repos.status(name) if is_safe_name(name) else None
    return status is not None and stat.S_ISDIR(status.st_mode)


def _instant(value: object) -> float | None:
    """The instant that a text names, or None; one that cannot be written again is none."""
    if not isinstance(value, str):
        return None
    try:
        instant = parse_instant(value)
        format_instant(instant)
    except (ValueError, OverflowError):
        return None
    return instant
