"""The directories of a store, kept open between uses.

Walking down to a directory costs more than working in it. So one that is free again waits for its next
use, which first looks whether the path still leads to it: a directory that was removed, renamed or
replaced meanwhile is opened anew, from the root, through no symbolic link.

A link on the way that leads to the very directory that was kept is not noticed: it is the same one.

A directory has one user at a time, so none is closed under another thread's hands.
"""

from __future__ import annotations

import contextlib
import os
from typing import Self

from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure

MOST_IDLE = 32
"""How many free directories are kept; beyond that the one kept longest is closed."""


def open_directory(root: Directory, relative: str, *, create: bool = False) -> Directory:
    """A directory of the store; "" is the root itself."""
    return root.beneath(relative, create=create) if relative else Directory.open(root.path)


class _Kept(Directory):
    """A directory that knows which one it is."""

    __slots__ = ("identity",)

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory.shown, directory.fd)
        try:
            self.identity = None if self.fd is None else _identity(calls.fstat(self.fd))
        except OSError as error:
            self.close()
            raise io_failure("look at", self.shown, error) from error


class Directories:
    """The directories below one root."""

    def __init__(self, root: Directory) -> None:
        self._root = root
        self._idle: dict[str, _Kept] = {}

    def take(self, relative: str, *, create: bool = False) -> _Kept:
        """The directory `relative` as of now, for the caller alone; `NotFound` unless it may be created."""
        kept = self._idle.pop(relative, None)
        if kept is not None:
            if self._is_current(relative, kept):
                return kept
            kept.close()
        return _Kept(open_directory(self._root, relative, create=create))

    def give_back(self, relative: str, directory: _Kept) -> None:
        """Keep a directory for the next use."""
        if self._idle.setdefault(relative, directory) is not directory:
            directory.close()
        elif len(self._idle) > MOST_IDLE:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                self._idle.pop(next(iter(self._idle))).close()

    def close(self) -> None:
        """Close all that nobody uses."""
        while self._idle:
            with contextlib.suppress(KeyError):
                self._idle.popitem()[1].close()

    def _is_current(self, relative: str, kept: _Kept) -> bool:
        if kept.identity is None:
            return False
        try:
            status = calls.stat(relative or self._root.shown, dir_fd=self._root.fd, follow_symlinks=False)
        except OSError:
            return False
        return _identity(status) == kept.identity


class Opened:
    """The directories that one transaction works in, each taken once, given back together."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._taken: dict[str, _Kept] = {}

    def get(self, relative: str, *, create: bool = False) -> Directory:
        """A directory; `NotFound` unless it may be created."""
        found = self._taken.get(relative)
        if found is None:
            found = self._taken[relative] = self._directories.take(relative, create=create)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        for relative, directory in self._taken.items():
            self._directories.give_back(relative, directory)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
