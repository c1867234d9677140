"""Space that is set aside for the day when the disk is full.

Deleting what nobody needs, giving back a lock, and keeping one alive all write a little. On a disk without a
free byte they would fail, and the disk could not be emptied by the very commands that are there for it. So
some files of random bytes lie ready to be deleted. Whoever may use them tries without; if the disk is full
(or a quota is used up, or there are no inodes left) they are deleted, and it is tried once more.

What was set aside is not locked away: another writer may be faster. Then the second attempt fails too.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from holdfast.errors import Failure, IoFailure, NotDurable
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly

FILES = 64
"""So many inodes, for a disk that has no more of them: twice what a collection needs at once."""
LARGE = 8
LARGE_BYTES = 256 << 10
"""The first of them have content, together 2 MiB: what the largest commits of a collection write, several
times over. The others are empty."""

_FULL = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)
_FLAGS = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)

Result = TypeVar("Result")


def is_full(failure: Failure) -> bool:
    """Whether there was no room, and nothing is in doubt: a sync that failed is never tried again."""
    return (
        isinstance(failure, IoFailure)
        and not isinstance(failure, NotDurable)
        and failure.facts.get("errno") in _FULL
    )


class Reserve:
    """The files of one directory that are there to be deleted; after them those of `caches`, which cost only
    time."""

    def __init__(self, directory: Path, *, caches: Path | None = None) -> None:
        self.directory = directory
        self.caches = caches

    def fill(self) -> bool:
        """Set aside what is missing, if there is room; whether all of it is there now. Never raises."""
        try:
            with contextlib.suppress(FileExistsError):
                calls.mkdir(self.directory)
            filling = os.urandom(LARGE_BYTES)  # what a file system cannot compress
            for number in range(FILES):
                self._fill(self.directory / str(number), filling if number < LARGE else b"")
        except OSError:
            return False
        return True

    def refill(self) -> None:
        """Set aside again what was used, if there is room; nothing where nothing was ever set aside."""
        with contextlib.suppress(OSError):
            if len(calls.listdir(self.directory)) < FILES:
                self.fill()

    def _fill(self, path: Path, filling: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            if calls.stat(path, follow_symlinks=False).st_size >= len(filling):
                return
        descriptor = calls.open(path, _FLAGS, 0o600)
        try:
            while filling:
                filling = filling[calls.write(descriptor, filling) :]
        except OSError:
            calls.unlink(path)  # the last free bytes are not ours to take
            raise
        finally:
            close_quietly(descriptor)

    def release(self) -> bool:
        """Delete what is set aside, or if nothing is, the caches; whether there was anything."""
        names = [str(number) for number in range(FILES)]
        return _delete(self.directory, names) or (self.caches is not None and _delete_all(self.caches))

    def relieve(self, work: Callable[[], Result], *, again: Callable[[], Result] | None = None) -> Result:
        """Do something that needs little room and may be done twice: if the disk is full, with the reserve.

        `again` is what to do the second time, if that is something else. The reserve is set aside anew
        afterwards, as far as there is room.
        """
        try:
            return work()
        except IoFailure as failure:
            if not is_full(failure) or not self.release():
                raise
        try:
            return (again or work)()
        finally:
            self.fill()


def _delete(directory: Path, names: Iterable[str]) -> bool:
    deleted = False
    for name in names:
        with contextlib.suppress(OSError):
            calls.unlink(directory / name)
            deleted = True
    return deleted


def _delete_all(directory: Path) -> bool:
    try:
        return _delete(directory, calls.listdir(directory))
    except OSError:
        return False
