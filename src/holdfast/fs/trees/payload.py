"""The payload of a new tree while it is being filled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from holdfast.fs import calls
from holdfast.fs.directory import Closing
from holdfast.fs.trees.attributes import Attributes
from holdfast.fs.trees.descent import Descent, split, unwritable
from holdfast.fs.trees.manifest import meta_of_directory, mtime_of_directory


class Payload(Closing):
    """A directory that is filled, with what its entries are given."""

    def __init__(self, way: Descent, made_as: os.stat_result, *, kept: bool) -> None:
        """`made_as` is what its top was when it had just been made; `kept` if it is a snapshot's."""
        self.way = way
        self.attributes = Attributes(made_as, kept=kept)
        self._made = {""}
        self.complete: set[str] = set()
        """Directories that somebody else gives all that they lack."""

    @classmethod
    def begin(cls, path: str | os.PathLike[str], *, kept: bool) -> Self:
        """Make the directory; `kept` if it is a snapshot's and not one to work in."""
        try:
            calls.mkdir(path)
            made_as = calls.stat(path)
        except OSError as error:
            raise unwritable(os.fspath(path), error) from error
        return cls(Descent(path), made_as, kept=kept)

    def enter(self, path: str) -> int:
        """The descriptor of a directory of the payload, good until the next call."""
        try:
            return self.way.enter(path)
        except OSError as error:
            raise unwritable(self.way.where(path), error) from error

    def make(self, path: str) -> int:
        """Make a directory and those above it, as far as they are missing; its descriptor, as of `enter`."""
        missing: list[str] = []
        while path not in self._made:
            missing.append(path)
            path = split(path)[0]
        here = self.enter(path)
        for each in reversed(missing):
            above, name = split(each)
            with self.changing(each):
                calls.mkdir(name, dir_fd=here)
            self.complete.discard(above)
            self._made.add(each)
            here = self.enter(each)
        return here

    def has(self, path: str) -> bool:
        """Whether the directory was made: for its own sake, or on the way to others."""
        return path in self._made

    def finish_way(self, path: str, body: bytes) -> None:
        """Complete a directory that only leads to others: what is private stays so, whatever is below it.

        It gets a time that its record has not, for it has not the files either: nobody shall share it.
        """
        self.finish_directory(path, body)
        time = 0 if mtime_of_directory(body) else 1_000_000_000
        with self.changing(path):
            calls.utime(self.enter(path), ns=(time, time))

    def finish_directory(self, path: str, body: bytes) -> list[str]:
        """Complete a directory into which nothing more will be put; return what it could not be given."""
        meta, xattrs = meta_of_directory(body)
        if meta.kind == b"m":
            return []
        here = self.enter(path)
        try:
            return self.attributes.finish_directory(here, meta, xattrs)
        except OSError as error:
            raise unwritable(self.way.where(path), error) from error

    @contextmanager
    def changing(self, path: str, name: str = "") -> Iterator[None]:
        """Whatever the system refuses in this block is a failure to write there."""
        try:
            yield
        except OSError as error:
            raise unwritable(self.way.where(path, name), error) from error

    def close(self) -> None:
        """Let go of its directories."""
        self.way.close()
