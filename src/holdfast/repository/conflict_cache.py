"""The cache of the search for conflicts: `conflicts.json` in the directory of caches, below a repository's root.

Everything in it can be computed again, so a missing, damaged or foreign file counts as an empty cache. Its size is
bounded: the least recently used entries are dropped. A planted file can make a report wrong but do nothing else: the
types validate object names before git gets them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from holdfast.errors import Failure
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.git.pairs import Pair
from holdfast.store.model import StructCodec

V = TypeVar("V")

CONFLICTS = "conflicts.json"
LOOK = ".look"  # ends the name of a worktree's index in the directory of caches
_MOST_BYTES = 16 << 20
_MOST_ENTRIES = 4_000
_MOST_PATHS = 2_000  # of one tree; more are not kept

ObjectName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40,64}\Z", max_length=64)]
Found = tuple[tuple[str, ...], tuple[str, ...]]
"""The paths that conflict in a merge, and git's messages; both empty if it is clean."""


class Remembered(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of the cache. A key is one object name or several, or a hash. Texts have one character for each
    byte, because paths need not be UTF-8."""

    schema_version: int = 1
    trees: dict[str, ObjectName] = {}
    bases: dict[str, list[ObjectName]] = {}
    attributes: dict[str, str] = {}
    changes: dict[str, dict[str, str]] = {}
    merges: dict[str, Found] = {}


_CODEC = StructCodec(Remembered, pretty=False, limit=_MOST_BYTES)


class ConflictCache:
    """The results of earlier searches."""

    def __init__(self, directory: Path, content: Remembered) -> None:
        self._directory, self._content = directory, content
        self._is_new = False

    @classmethod
    def read(cls, directory: Path) -> ConflictCache:
        try:
            found = _CODEC.decode(durable.read(directory / CONFLICTS, limit=_MOST_BYTES), CONFLICTS)
        except Failure:
            return cls.empty(directory)
        return cls(directory, found) if found.schema_version == 1 else cls.empty(directory)

    @classmethod
    def empty(cls, directory: Path) -> ConflictCache:
        return cls(directory, Remembered())

    def save(self, looks: Collection[str]) -> None:
        """Save the content for the next search, and delete all indexes but those named in `looks`. A failure to do so
        is ignored: it does not affect the search."""
        stored = self._content
        for each in (stored.trees, stored.bases, stored.attributes, stored.changes, stored.merges):
            for key in list(each)[: max(0, len(each) - _MOST_ENTRIES)]:
                del each[key]
        with contextlib.suppress(Failure):
            if self._is_new:
                durable.replace(self._directory / CONFLICTS, _CODEC.encode(stored))
            with Directory.open(self._directory) as directory:
                for name in directory.names():
                    if name.removesuffix(".sums").endswith(LOOK) and name.removesuffix(".sums") not in looks:
                        durable.remove_in(directory, name, durable=False)

    def tree(self, commit: str) -> str | None:
        return _used(self._content.trees, commit)

    def put_trees(self, found: dict[str, str]) -> None:
        self._content.trees |= found
        self._is_new |= bool(found)

    def bases(self, pair: Pair) -> list[str] | None:
        return _used(self._content.bases, " ".join(pair))

    def put_bases(self, found: dict[Pair, list[str]]) -> None:
        self._content.bases |= {" ".join(pair): bases for pair, bases in found.items()}
        self._is_new |= bool(found)

    def attributes(self, commit: str) -> str | None:
        return _used(self._content.attributes, commit)

    def put_attributes(self, commit: str, found: str) -> None:
        self._content.attributes[commit] = found
        self._is_new = True

    def changes(self, pair: Pair) -> dict[bytes, str] | None:
        found = _used(self._content.changes, " ".join(pair))
        try:
            return None if found is None else {path.encode("latin-1"): what for path, what in found.items()}
        except UnicodeEncodeError:  # not written by `put_changes`
            return None

    def put_changes(self, pair: Pair, found: dict[bytes, str]) -> None:
        if len(found) <= _MOST_PATHS:
            self._content.changes[" ".join(pair)] = {path.decode("latin-1"): what for path, what in found.items()}
            self._is_new = True

    def merged(self, key: str) -> Found | None:
        found = _used(self._content.merges, key)
        try:
            return None if found is None else (_texts(found[0]), _texts(found[1]))
        except UnicodeEncodeError:
            return None

    def put_merged(self, key: str, found: Found) -> None:
        paths, messages = (tuple(os.fsencode(text).decode("latin-1") for text in each) for each in found)
        self._content.merges[key] = paths, messages
        self._is_new = True


def _texts(stored: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(os.fsdecode(text.encode("latin-1")) for text in stored)


def _used(entries: dict[str, V], key: str) -> V | None:
    """The entry with this key, which becomes the most recently used."""
    found = entries.pop(key, None)
    if found is not None:
        entries[key] = found
    return found
