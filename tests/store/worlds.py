"""The content of a store as plain values, seen through a store or by a program that knows only files.

The keys are those of the real layout. An index points to issues and a worktree to a descriptor: such
a pointer must never dangle, for any reader at any moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from holdfast.store.files import FileStore
from holdfast.store.layout import INTENTS, Kind, Layout
from holdfast.store.model import (
    Append,
    Change,
    Delete,
    Document,
    Family,
    Key,
    Stream,
    StructCodec,
    Tail,
    View,
)

LAYOUT = Layout()
Named = Key[Any] | Stream[Any]


class Text(msgspec.Struct, frozen=True):
    """The record of most documents and all streams here. `head` points to a descriptor."""

    text: str
    head: str = ""


class Listed(msgspec.Struct, frozen=True):
    """The record of the index: it points to issues."""

    ids: tuple[str, ...]


_TEXT = StructCodec(Text)
_LINE = StructCodec(Text, pretty=False)

INDEX = Key("jit/index", StructCodec(Listed))
GATES = Key("jit/gates", _TEXT)
ISSUES = Family("jit/issues", _TEXT)
WORKTREES = Family("jvs/worktrees", _TEXT)
DESCRIPTORS = Family("jvs/descriptors", _TEXT)
REFS = Family("jvs/refs", _TEXT)
EVENTS = Stream("jit/events", _LINE)
AUDIT = Stream("jvs/audit", _LINE)
LEDGER = Stream("ledger/events", _TEXT)


def _in_turn(view: View, records: Sequence[Any]) -> list[Append]:
    raise AssertionError("only a server calls this")


LOOSE_EVENTS = Stream("jit/events", _LINE, chain=_in_turn)
"""The same, as trackers use it: its lock is taken late."""


def plain(each: Named) -> Named:
    """The same name, but not loose."""
    return EVENTS if each == LOOSE_EVENTS else each


FAMILIES: Mapping[str, Family[Any]] = {each.name: each for each in (ISSUES, WORKTREES, DESCRIPTORS, REFS)}


class World(NamedTuple):
    """The documents that exist, and the records of each stream, by name."""

    documents: Mapping[str, object]
    streams: Mapping[str, tuple[object, ...]]

    def changed(self, changes: Iterable[Change]) -> World:
        """The world after a commit of these changes."""
        documents, streams = dict(self.documents), dict(self.streams)
        for change in changes:
            if isinstance(change, Append):
                streams[change.stream.name] = (*streams.get(change.stream.name, ()), change.record)
            elif isinstance(change, Delete):
                del documents[change.key.name]
            else:
                documents[change.key.name] = change.record
        return World(documents, streams)

    def view(self, named: Iterable[Named]) -> View:
        """The view of a transaction that names these. Positions only say whether a stream is empty."""
        documents: dict[Key[Any], Document[Any] | None] = {}
        tails: dict[Stream[Any], Tail] = {}
        for each in named:
            if isinstance(each, Stream):
                records = self.streams.get(each.name, ())
                last = each.codec.encode(records[-1]) if records else b""
                tails[each] = Tail(len(records), last, each.name)
            else:
                record = self.documents.get(each.name)
                documents[each] = None if record is None else Document(record, "")
        return View(documents, tails)

    @classmethod
    def empty(cls) -> Self:
        return cls({}, {})


# --- Through a store ---------------------------------------------------------------------------------


def seen_by_readers(store: FileStore, named: Sequence[Named]) -> World:
    """The world that readers without a lock see; scans must agree with reads."""
    documents: dict[str, object] = {}
    streams: dict[str, tuple[object, ...]] = {}
    for each in named:
        if isinstance(each, Stream):
            if records := tuple(entry.record for entry in store.entries(each)):
                streams[each.name] = records
        elif (document := store.read(each)) is not None:
            documents[each.name] = document.record
    for family in {each.name.rpartition("/")[0] for each in named} & FAMILIES.keys():
        scanned = {f"{family}/{name}": document.record for name, document in store.scan(FAMILIES[family])}
        read = {name: record for name, record in documents.items() if name.startswith(family + "/")}
        assert scanned == read, f"scanned {scanned}, but read {read}"
    return World(documents, streams)


# --- In the files ------------------------------------------------------------------------------------


def seen_in_files(directory: Path, named: Sequence[Named]) -> World:
    """The world that a program sees if it knows the files, but not the intents."""
    documents: dict[str, object] = {}
    streams: dict[str, tuple[object, ...]] = {}
    for each in named:
        if isinstance(each, Stream):
            if records := tuple(each.codec.decode(one, each.name) for one in _raw_records(directory, each)):
                streams[each.name] = records
        elif (content := _raw(directory, each)) is not None:
            documents[each.name] = each.codec.decode(content, each.name)
    return World(documents, streams)


def check_pointers(directory: Path) -> None:
    """Assert that no pointer dangles, even for a program that knows only files."""
    content = _raw(directory, INDEX)
    for issue in INDEX.codec.decode(content, "the index").ids if content is not None else ():
        assert _raw(directory, ISSUES.key(issue)) is not None, f"the index lists {issue}, which is not there"
    for name in _names(directory / ".jvs/worktrees"):
        content = _raw(directory, WORKTREES.key(name))
        head = WORKTREES.codec.decode(content, name).head if content is not None else ""
        there = not head or _raw(directory, DESCRIPTORS.key(head)) is not None
        assert there, f"{name} has the head {head}, which is not there"


def intents_left(directory: Path) -> list[str]:
    """The entries of the intents directory, without drafts."""
    return [name for name in _names(directory / INTENTS) if not name.startswith(".")]


def drafts_left(directory: Path) -> list[str]:
    """Drafts that nobody removed."""
    return sorted(path.name for path in directory.rglob(".*.tmp"))


def drafts_needed(directory: Path) -> set[str]:
    """Drafts of commits that are decided but not applied."""
    intents = [json.loads(_content(f"{directory}/{INTENTS}/{name}") or b"") for name in intents_left(directory)]
    marks = tuple(f"-{each['drafts']}.tmp" for each in intents if "drafts" in each)
    return {name for name in drafts_left(directory) if name.endswith(marks)}


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _raw(directory: Path, key: Key[Any]) -> bytes | None:
    return _content(f"{directory}/{LAYOUT.locate(key.name).path}")


def _raw_records(directory: Path, stream: Stream[Any]) -> list[bytes]:
    place = LAYOUT.locate(stream.name)
    if place.kind is Kind.NUMBERED:
        found = [name for name in _names(directory / place.directory) if name.startswith("event-")]
        expected = [place.numbered(number + 1) for number in range(len(found))]
        assert found == expected, f"the numbers are {found}"
        return [_content(f"{directory}/{place.directory}/{name}") or b"" for name in found]
    content = _content(f"{directory}/{place.path}") or b""
    return content.split(b"\n")[:-1]  # the rest, after the last newline, was torn by a crash
