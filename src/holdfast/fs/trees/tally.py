"""What is found on the way through a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.fs.trees.descent import shown

Progress = Callable[[int, int], None]
"""Called now and then with the number of files and of bytes that have been dealt with."""


class Recent(NamedTuple):
    """A file that changed so shortly before it was read that its times cannot show another change."""

    path: str
    name: str
    digest: bytes


class Tally:
    """Counts, and lists of what is out of the ordinary."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.files = self.directories = self.bytes = self.stored_bytes = 0
        self.not_preserved: list[str] = []
        self.special: list[str] = []
        self.changed: list[str] = []
        self.recent: list[Recent] = []
        self.any_recent = False
        self._progress = progress

    def report(self) -> None:
        """Tell who wants to know how far it is."""
        if self._progress is not None:
            self._progress(self.files, self.bytes)

    def lose(self, path: str, what: list[str]) -> None:
        """Note what cannot be kept of an entry."""
        self.not_preserved += [f"{shown(path) or '.'}: {each}" for each in what]
