"""The payload of a new tree while it is being filled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from holdfast.fs import calls
from holdfast.fs.trees.attributes import Attributes
from holdfast.fs.trees.descent import Descent, split, unwritable
from holdfast.fs.trees.manifest import meta_of_directory


class Payload:
    """A directory that is filled, with what its entries are given."""

    def __init__(self, way: Descent, made_as: os.stat_result, *, kept: bool) -> None:
        """`made_as` is what its top was when it had just been made; `kept` if it is a snapshot's."""
        self.way, self.made_as, self._kept = way, made_as, kept
        self.attributes = Attributes(made_as, kept=kept)

    @classmethod
    def make(cls, path: str | os.PathLike[str], *, kept: bool) -> Self:
        """Make the directory; `kept` if it is a snapshot's and not one to work in."""
        try:
            calls.mkdir(path)
            made_as = calls.stat(path)
        except OSError as error:
            raise unwritable(os.fspath(path), error) from error
        return cls(Descent(path), made_as, kept=kept)

    def again(self) -> Payload:
        """The same payload with a way of its own."""
        return Payload(Descent(self.way.root), self.made_as, kept=self._kept)

    def enter(self, path: str) -> int:
        """The descriptor of a directory of the payload, good until the next call."""
        try:
            return self.way.enter(path)
        except OSError as error:
            raise unwritable(self.way.where(path), error) from error

    def make_directories(self, path: str, names: list[str]) -> None:
        """Make directories in the directory `path`."""
        if names:
            here = self.enter(path)
            with self.changing(path):
                for name in names:
                    calls.mkdir(name, dir_fd=here)

    def remove_directory(self, path: str) -> None:
        """Remove a directory that was made for one that is gone."""
        parent, name = split(path)
        here = self.enter(parent)
        with self.changing(path):
            calls.rmdir(name, dir_fd=here)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
