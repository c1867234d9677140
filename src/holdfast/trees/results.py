"""Results of operations on trees and commits, apart from the code that makes them, which takes long to load."""

from __future__ import annotations

from typing import NamedTuple


class Captured(NamedTuple):
    """The result of a capture. `stored_bytes` were written; the rest is shared with the base."""

    engine: str
    payload_hash: str
    files: int
    directories: int
    bytes: int
    stored_bytes: int
    not_preserved: tuple[str, ...]
    special: tuple[str, ...]
    damaged: tuple[str, ...] = ()  # directories of the base that were captured again
    left_out: dict[str, int] | None = None  # of a capture by git


class Materialised(NamedTuple):
    files: int
    directories: int
    bytes: int
    not_preserved: tuple[str, ...]


class Change(NamedTuple):
    """One difference. `what` is `added`, `removed` or `modified`; `aspects` say how.

    Aspects: `kind`, `content`, `mode`, `owner`, `mtime`, `target`, `device`, `xattrs`, `links`.
    """

    path: bytes
    what: str
    kind: str
    aspects: tuple[str, ...] = ()
    size: int = 0


class Problem(NamedTuple):
    """A problem of a tree: `what` is a word for programs, `detail` a sentence for people."""

    path: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"
