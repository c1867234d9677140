"""Disk space set aside for commands that must work on a full disk.

Collecting garbage, releasing a lease and renewing one all write a little. On a full disk they would fail, and nothing
could free space. So Holdfast keeps a reserve of files that such a command may delete. The command first tries without;
if the disk, the quota or the inodes are used up, it deletes the files and tries once more. Another writer may take the
space first: then the second attempt fails too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from holdfast.errors import Failure, IoFailure, NotDurable
from holdfast.fs import calls
from holdfast.fs.directory import NO_SPACE, Directory, close_quietly, write_all

FILES = 64
"""Each frees an inode; a collection needs half as many at once."""
LARGE = 8
LARGE_BYTES = 256 << 10
"""The large files hold 2 MiB together, several times what the largest commit of a collection writes. The
others are empty."""

_FLAGS = os.O_WRONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))

Result = TypeVar("Result")


def is_full(failure: Failure) -> bool:
    """Whether only space was missing. A failed sync does not count: it leaves doubt and is never repeated."""
    is_certain = isinstance(failure, IoFailure) and not isinstance(failure, NotDurable)
    return is_certain and failure.facts.get("errno") in NO_SPACE


class Reserve:
    """The spare files in one directory. When they are used up, `caches` can be deleted, which costs only time."""

    def __init__(self, directory: Path, *, caches: Path | None = None) -> None:
        self.directory = directory
        self.caches = caches

    def fill(self) -> bool:
        """Create the missing files as far as there is room; return whether all exist. Never raises."""
        try:
            with Directory.open(self.directory.parent) as parent:
                parent.make(self.directory.name, durable=False)
            content = os.urandom(LARGE_BYTES)  # random, so that no filesystem can compress it
            with Directory.open(self.directory) as directory:
                for number in range(FILES):
                    _fill(directory, str(number), content if number < LARGE else b"")
        except (OSError, Failure):
            return False
        return True

    def refill(self) -> None:
        """Recreate the used files of an existing reserve as far as there is room."""
        names = _names(self.directory)
        if names is not None and len(names) < FILES:
            self.fill()

    def release(self) -> bool:
        """Delete the spare files or, if there are none, the caches; return whether anything was deleted."""
        caches = self.caches
        return _delete(self.directory, map(str, range(FILES))) or (
            caches is not None and _delete(caches, _names(caches) or ())
        )

    def relieve(self, work: Callable[[], Result], *, again: Callable[[], Result] | None = None) -> Result:
        """Do `work`; on a full disk, delete the reserve, try `again` (or `work`), and refill the reserve."""
        try:
            return work()
        except IoFailure as failure:
            if not is_full(failure) or not self.release():
                raise
        try:
            return (again or work)()
        finally:
            self.fill()


def _fill(directory: Directory, name: str, content: bytes) -> None:
    status = directory.status(name)
    if status is not None and status.st_size >= len(content):
        return
    descriptor = directory.open_or_create(name, _FLAGS)
    try:
        write_all(descriptor, content)
    except OSError:
        calls.unlink(directory.at(name), dir_fd=directory.fd)  # do not take the last free bytes
        raise
    finally:
        close_quietly(descriptor)


def _names(directory: Path) -> list[str] | None:
    """The names in a directory; None if it does not exist or cannot be listed."""
    with contextlib.suppress(Failure), Directory.open(directory) as opened:
        return opened.names()
    return None


def _delete(directory: Path, names: Iterable[str]) -> bool:
    deleted = False
    with contextlib.suppress(Failure), Directory.open(directory) as opened:
        for name in names:
            with contextlib.suppress(OSError):
                calls.unlink(opened.at(name), dir_fd=opened.fd)
                deleted = True
    return deleted
