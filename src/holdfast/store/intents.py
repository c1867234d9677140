"""Commits to several documents: decided as one file, then carried out, by whoever comes by.

1. The *intent*, a file that holds all of the change, is published. This is the commit point.
2. What is to be written is written under private names, and brought to the disk.
3. Each change is published: documents before what points to them, removals last; then the names
   are brought to the disk.
4. The intent is dropped, durably: it must not come back once somebody else has changed things.

The guards of all that it touches are held from before 1 until after 4. So whoever holds one of these
guards and sees an intent that touches what it guards knows that its author is gone, and finishes it
first. Applying twice does no harm; a document that is neither as it was nor as it shall be has been
changed by somebody who does not know intents, and is not overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from holdfast.errors import AlreadyExists, Corrupt, NotFound, TooLarge
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.store.layout import INTENTS, Kind, Layout, Place
from holdfast.store.records import StructCodec

MOST_SINGLE_SYNCS = 8
"""With more steps than this, the drafts are brought to the disk by one sync of the file system."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change. `before` is the digest of what a document held; `at` is where an append goes."""

    name: str
    operation: Literal["put", "remove", "append"]
    content: str = ""
    before: str = ""
    at: int = 0


class Intent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A commit, decided but perhaps not yet carried out. Its steps stand in the order of applying."""

    id: str
    steps: tuple[Step, ...]


MOST_BYTES = 64 << 20
_CODEC = StructCodec(Intent, pretty=False, limit=MOST_BYTES)


def digest(content: bytes | None) -> str:
    """A short name for a document's content; "" for a document that is not there."""
    return "" if content is None else hashlib.blake2b(content, digest_size=16).hexdigest()


class Intents:
    """The intents of one store."""

    def __init__(self, root: Directory, layout: Layout) -> None:
        self._root = root
        self._layout = layout
        self._path = root.where(INTENTS)
        self._known: dict[str, Intent] = {}

    def pending(self) -> list[Intent]:
        """All intents that are there now: most often none."""
        try:
            with calls.scandir(self._path) as entries:
                names = [entry.name for entry in entries if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
        if not names:
            self._known = {}
            return []
        found = {name: intent for name in sorted(names) if (intent := self._read(name)) is not None}
        self._known = dict(found)
        return list(found.values())

    def touching(self, names: Iterable[str]) -> list[Intent]:
        """Those that change one of these documents or streams."""
        wanted = set(names)
        return [each for each in self.pending() if any(step.name in wanted for step in each.steps)]

    def publish(self, intent: Intent) -> None:
        """Step 1: make the commit. From here on it will be carried out, by us or by another."""
        content = _CODEC.encode(intent)
        if len(content) > MOST_BYTES:
            raise TooLarge("the whole of a commit", len(content), MOST_BYTES)
        with self._root.beneath(INTENTS, create=True) as directory:
            durable.create_in(directory, f"{intent.id}.json", content)

    def carry_out(self, intent: Intent) -> None:
        """Steps 2 to 4. The caller holds the guards of all that the intent touches."""
        with contextlib.ExitStack() as open_directories:
            directories: dict[str, Directory] = {}
            publications: list[Callable[[], object]] = []
            bulk = len(intent.steps) > MOST_SINGLE_SYNCS
            for step in intent.steps:
                place = self._layout.place(step.name)
                if place.directory not in directories:
                    directory = open_directory(self._root, place.directory, create=True)
                    directories[place.directory] = open_directories.enter_context(directory)
                publications += _prepare(directories[place.directory], place, step, intent, synced=not bulk)
            if bulk and self._root.fd is not None:
                calls.sync_filesystem(self._root.fd)
            for publish in publications:
                publish()
            for directory in directories.values():
                durable.sync_names(directory)
        with self._root.beneath(INTENTS) as directory:
            durable.remove_in(directory, f"{intent.id}.json")

    def is_pending(self, intent: Intent) -> bool:
        """Whether the intent still has to be carried out."""
        with self._root.beneath(INTENTS) as directory:
            return directory.status(f"{intent.id}.json") is not None

    def _read(self, name: str) -> Intent | None:
        known = self._known.get(name)
        if known is not None:
            return known
        try:
            with self._root.beneath(INTENTS) as directory:
                content = durable.read_in(directory, name)
        except NotFound:
            return None  # carried out since it was listed
        return _CODEC.decode(content, os.path.join(self._path, name))


def open_directory(root: Directory, relative: str, *, create: bool = False) -> Directory:
    """A directory of the store; "" is the root itself."""
    return root.beneath(relative, create=create) if relative else Directory.open(root.path)


def _prepare(
    directory: Directory, place: Place, step: Step, intent: Intent, *, synced: bool
) -> list[Callable[[], object]]:
    """Write what a step needs under a private name; return what publishes it, nothing if that was done."""
    if place.kind is Kind.LINES:
        return _prepare_line(directory, place, step, intent)
    if place.kind is Kind.NUMBERED:
        return _prepare_number(directory, place, step, synced=synced)
    return _prepare_document(directory, place, step, intent, synced=synced)


def _prepare_document(
    directory: Directory, place: Place, step: Step, intent: Intent, *, synced: bool
) -> list[Callable[[], object]]:
    now = read_if_there(directory, place.file)
    after = step.content.encode() if step.operation == "put" else None
    if now == after:
        return []
    if digest(now) != step.before:
        raise _foreign_change(directory, place, intent)
    if after is None:
        return [lambda: durable.remove_in(directory, place.file, durable=False)]
    draft = durable.write_draft(directory, place.file, after, durable=synced)
    publish = durable.publish_new if now is None else durable.publish
    return [lambda: publish(directory, draft, place.file)]


def _prepare_line(
    directory: Directory, place: Place, step: Step, intent: Intent
) -> list[Callable[[], object]]:
    line = step.content.encode()
    there = durable.read_lines_in(directory, place.file, after=step.at, limit=len(line) + 1)
    if there == line + b"\n":
        return []
    if there:
        raise _foreign_change(directory, place, intent)
    return [lambda: durable.append_in(directory, place.file, line, at=step.at)]


def _prepare_number(
    directory: Directory, place: Place, step: Step, *, synced: bool
) -> list[Callable[[], object]]:
    """The intended number, or the next free one if the ledger's lock was broken wrongly meanwhile."""
    content, number = step.content.encode(), step.at
    while (there := read_if_there(directory, place.numbered(number))) is not None:
        if there == content:
            return []
        number += 1
    draft = durable.write_draft(directory, place.numbered(number), content, durable=synced)
    return [lambda: publish_number(directory, place, draft, number)]


def publish_number(directory: Directory, place: Place, draft: str, number: int) -> int:
    """Give a draft the number, or the first one behind it that is free; return which it was."""
    while True:
        try:
            durable.publish_new(directory, draft, place.numbered(number), keep_if_taken=True)
        except AlreadyExists:
            number += 1
        else:
            return number


def _foreign_change(directory: Directory, place: Place, intent: Intent) -> Corrupt:
    where = directory.where(place.file)
    return Corrupt(
        f"{where} was changed by another program while the commit {intent.id} was being carried out",
        path=where,
        intent=f"{INTENTS}/{intent.id}.json",
        hint=f"Compare {where} with {INTENTS}/{intent.id}.json, keep what is right, remove the intent.",
    )


def read_if_there(directory: Directory, name: str) -> bytes | None:
    """The content of a file, or None."""
    try:
        return durable.read_in(directory, name)
    except NotFound:
        return None
