"""One look at a file lock: free or held, by whom, and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.kernel_locks import FileLockHolder, find_holders, with_queue

FREE, SHARED, EXCLUSIVE = "free", "shared", "exclusive"


class FileLockState(NamedTuple):
    """What was seen. If `holders_known` is False, there may be holders that are not listed."""

    path: str
    exists: bool
    state: str
    holders: list[FileLockHolder]
    waiting: list[FileLockHolder]
    holders_known: bool

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        record = self._asdict()
        record["holders"] = [each.as_record() for each in self.holders]
        record["waiting"] = [each.as_record() for each in self.waiting]
        return record

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"{self.path}: {self._described()}"
        yield from (f"  held by  {each}" for each in self.holders)
        yield from (f"  waiting  {each}" for each in self.waiting)

    def _described(self) -> str:
        if not self.exists:
            return "free (there is no such file yet)"
        if self.state == FREE:
            return "free"
        text = "locked, exclusively" if self.state == EXCLUSIVE else "locked, shared"
        return text if self.holders_known else f"{text}; by whom cannot be seen from here"


def look(path: str) -> FileLockState:
    """Who holds a lock on the file at `path` and who waits for it. Never makes the file."""
    if not _exists(path):
        return FileLockState(path, False, FREE, [], [], True)
    seen = find_holders(path)
    holders = [each for each in seen or () if not each.waiting]
    waiting = [each for each in seen or () if each.waiting]
    if holders:
        state = SHARED if all(each.shared for each in holders) else EXCLUSIVE
        return FileLockState(path, True, state, holders, with_queue(path, waiting), True)
    state = _try(path)  # the kernel does not tell, or hides those of another pid namespace or machine
    return FileLockState(path, True, state, [], with_queue(path, waiting), state == FREE)


def _try(path: str) -> str:
    """Find out by taking the lock for a moment, the gentler way first."""
    locker = FileLocker(0.0)
    guard = locker.try_lock_shared(path)
    if guard is None:
        return EXCLUSIVE
    guard.release()
    guard = locker.try_lock_exclusive(path)
    if guard is None:
        return SHARED
    guard.release()
    return FREE


def _exists(path: str) -> bool:
    try:
        calls.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be looked at; what is tried next says why
    return True
