"""Intents: commits of several changes, committed by one file, then applied by the author or the next process.

1. The *intent*, a file that contains the whole change, is published. Commit point.
2. New content is written to drafts and synced.
3. Everything is published: documents before those that refer to them, removals last. Each directory is synced before
   anything is published in the next one, so that a reference leads to something even for a program that reads it after
   a power cut and knows nothing of intents.
4. The intent is renamed to `.done`, durably, and then removed. It must not come back once others have changed the
   documents: a process that finds the `.done` file syncs it before it changes anything.

The document locks of everything that it touches are held from before 1 until after 4. So a process that holds one of
these locks and finds such an intent knows that the author is gone. It finishes the intent first, starting with the sync
that the author may not have reached. Applying an intent twice is harmless. A document that matches neither its old nor
its new content was changed by a program that does not know intents, and is not overwritten. But if a later step in
another directory is done, the document was published before it was changed: the change stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from holdfast.errors import AlreadyExists, Corrupt, NotDurable, NotFound
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, io_failure
from holdfast.store.layout import INTENTS, Kind, Layout, Location, open_directory
from holdfast.store.model import StructCodec

MOST_SINGLE_SYNCS = 8  # up to this many drafts are synced one by one; more are synced with the whole filesystem, once


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change. `before` is the digest of a document's old content; `at` is where an append goes."""

    name: str
    operation: Literal["put", "remove", "append"]
    content: str = ""
    before: str = ""
    at: int = 0

    @property
    def document(self) -> bytes | None:
        """The new content of a document; None if it is removed."""
        return self.content.encode() if self.operation == "put" else None


class Intent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A commit that may not be applied yet. Its steps are in the order in which they are applied. `drafts` is the
    suffix of its drafts' names, if those were written before the commit point."""

    id: str
    steps: tuple[Step, ...]
    drafts: str = ""


_PENDING, _DONE = ".json", ".done"
_CODEC = StructCodec(Intent, pretty=False, limit=64 << 20, bounded=True)
encode = _CODEC.encode


def digest(content: bytes | None) -> str:
    """The digest of a document's content; "" if there is no document."""
    return "" if content is None else hashlib.blake2b(content, digest_size=16).hexdigest()


def are_many(files: int) -> bool:
    """Whether one sync of the filesystem is cheaper than a sync of each file."""
    return files > MOST_SINGLE_SYNCS


def intent_name(commit_id: str) -> str:
    return commit_id + _PENDING


class Intents:
    """The intents of one store."""

    def __init__(self, root: Directory, layout: Layout) -> None:
        self._root = root
        self._layout = layout
        self._path = root.where(INTENTS)
        self._known: dict[str, Intent] = {}

    def pending(self) -> list[Intent]:
        """Intents that are not applied yet: most often none."""
        return self._listed(_PENDING)

    def all(self) -> list[Intent]:
        """All intents, including those of which only the `.done` file is left."""
        return self._listed(_PENDING, _DONE)

    def unfinished(self, names: Iterable[str]) -> list[Intent]:
        """All intents that touch one of these documents or streams."""
        found = self.all()
        if not found:
            return found  # the usual case
        wanted = set(names)
        return [each for each in found if any(step.name in wanted for step in each.steps)]

    def _listed(self, *endings: str) -> list[Intent]:
        try:
            listed = calls.listdir(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise io_failure("list", self._path, error) from error
        names = [name for name in listed if name.endswith(endings) and name[0] != "."]
        if not names:
            self._known = {}
            return []
        found = {name: intent for name in sorted(names) if (intent := self._read(name)) is not None}
        self._known = dict(found)
        return list(found.values())

    def _read(self, name: str) -> Intent | None:
        known = self._known.get(name)
        if known is not None:
            return known
        try:
            with self._root.beneath(INTENTS) as directory:
                content = durable.read_in(directory, name)
        except NotFound:
            return None  # applied since it was listed
        return _CODEC.decode(content, os.path.join(self._path, name))

    def publish(self, intent: Intent) -> None:
        """Step 1, the commit point: from here on, this or another process applies it."""
        content = encode(intent)
        with self._root.beneath(INTENTS, create=True) as directory:
            durable.create_in(directory, intent_name(intent.id), content)

    def apply(self, intent: Intent) -> list[int]:
        """Steps 2 to 4; return the numbers of the records in numbered streams, in order. The caller holds the document
        locks of everything that the intent touches."""
        with contextlib.ExitStack() as open_directories:
            directories: dict[str, Directory] = {}
            prepared: list[_Prepared] = []
            numbers: dict[str, int] = {}
            bulk = are_many(len(intent.steps)) and self._root.fd is not None
            try:
                for index, step in enumerate(intent.steps):  # 2.
                    location = self._layout.locate(step.name)
                    if location.directory not in directories:
                        directory = open_directory(self._root, location.directory, create=True)
                        directories[location.directory] = open_directories.enter_context(directory)
                    target = _Target(directories[location.directory], location, step, intent)
                    was_published = partial(self._was_published, intent, index)
                    prepared.append(_prepare(target, numbers, was_published, synced=not bulk))
                if bulk:
                    _sync_filesystems(directories.values())
                published = _publish(prepared)  # 3.
            except BaseException:
                for each in prepared:  # no litter, however often this is retried: the disk may be full
                    each.discard()
                raise
            if intent.drafts:  # remove the drafts that the author did not get to publish
                for step in intent.steps:
                    location = self._layout.locate(step.name)
                    draft = durable.draft_name(location.numbered(step.at), intent.drafts)
                    durable.discard(directories[location.directory], draft)
        self._drop(intent)
        return [number for number in published if type(number) is int]  # other steps return none

    def _was_published(self, intent: Intent, index: int) -> bool:
        """Whether a document must have been published, durably, because a later step has been."""
        location = self._layout.locate(intent.steps[index].name)
        for step in intent.steps[index + 1 :]:
            later = self._layout.locate(step.name)
            if later.directory == location.directory and later.kind is Kind.DOCUMENT:
                continue  # there is no sync in between
            with open_directory(self._root, later.directory, create=True) as directory:
                if _Target(directory, later, step, intent).is_published():
                    return True
        return False

    def _drop(self, intent: Intent) -> None:
        """Step 4."""
        pending, done = intent.id + _PENDING, intent.id + _DONE
        with self._root.beneath(INTENTS) as directory:
            if intent.drafts:
                durable.remove_in(directory, pending, durable=False)  # harmless if it comes back
                return
            fd = directory.fd
            try:
                calls.replace(directory.at(pending), directory.at(done), src_dir_fd=fd, dst_dir_fd=fd)
            except OSError as error:
                raise io_failure("drop", directory.where(pending), error) from error
            durable.sync_names(directory)
            durable.remove_in(directory, done, durable=False)  # harmless if it comes back

    def finish(self, intent: Intent) -> None:
        """Finish the intent of a dead author, if it is unfinished. The caller holds the document locks."""
        with self._root.beneath(INTENTS) as directory:
            pending = directory.status(intent.id + _PENDING) is not None
            if not pending and directory.status(intent.id + _DONE) is None:
                return
            durable.sync_names(directory)  # neither the intent nor its `.done` file may be lost from here on
            if not pending:
                durable.remove_in(directory, intent.id + _DONE, durable=False)
        if pending:
            self.apply(intent)

    def obstacle(self, intent: Intent) -> Corrupt | None:
        """Why an intent cannot be applied: another program's change, which a person has to resolve; or None. Changes
        nothing. The caller holds the document locks."""
        try:
            with self._root.beneath(INTENTS) as directory:
                if directory.status(intent.id + _PENDING) is None:
                    return None  # it has been applied
            for index, step in enumerate(intent.steps):
                location = self._layout.locate(step.name)
                with contextlib.suppress(NotFound), open_directory(self._root, location.directory) as here:
                    target = _Target(here, location, step, intent)
                    if location.kind is Kind.LINES:
                        target.existing_line()
                    elif location.kind is Kind.DOCUMENT:
                        current = read_if_exists(here, location.file)
                        target.needs_change(current, partial(self._was_published, intent, index))
        except Corrupt as failure:
            return failure
        return None


class _Target(NamedTuple):
    """The document or stream that one step of an intent changes."""

    directory: Directory
    location: Location
    step: Step
    intent: Intent

    def is_published(self) -> bool:
        directory, location, step, _ = self
        content = step.content.encode()
        if location.kind is Kind.NUMBERED:
            return _find_number(directory, location, step.at, content)[1]
        if location.kind is Kind.LINES:
            line = content + b"\n"
            return durable.read_lines_in(directory, location.file, after=step.at, limit=len(line)) == line
        current = read_if_exists(directory, location.file)
        return current == step.document and digest(current) != step.before

    def needs_change(self, current: bytes | None, was_published: Callable[[], bool]) -> bool:
        """Whether a document with this content still needs the change; `Corrupt` if it must not be changed."""
        if current == self.step.document:
            return False
        if digest(current) == self.step.before:
            return True
        if was_published():
            return False  # and another program has changed it since
        raise self._foreign_change()

    def existing_line(self) -> bytes:
        """The line of the step, or b"" if it does not exist; `Corrupt` if another line is in its place."""
        line = self.step.content.encode() + b"\n"
        found = durable.read_lines_in(self.directory, self.location.file, after=self.step.at, limit=len(line))
        if found not in (b"", line):
            raise self._foreign_change()
        return found

    def _foreign_change(self) -> Corrupt:
        where, intent = self.directory.where(self.location.file), f"{INTENTS}/{self.intent.id}.json"
        return Corrupt(
            f"{where} was changed by another program while the commit {self.intent.id} was being applied",
            path=where,
            intent=intent,
            hint=f"Compare {where} with {intent}, keep the right content, and remove the intent.",
        )


class _Prepared(NamedTuple):
    """A step that is ready to be published or discarded. `directory` is where names change, if any do."""

    directory: Directory | None
    publish: Callable[[], object] = lambda: None
    discard: Callable[[], None] = lambda: None


def _prepare(target: _Target, numbers: dict[str, int], was_published: Callable[[], bool], *, synced: bool) -> _Prepared:
    """Step 2 for one target: write a draft, unless the step is done. (It may be done but not durable: a
    killed process published it.) `numbers` has the last number given to a record of each stream."""
    directory, location, step, _ = target
    file, content = location.file, step.content.encode()
    if location.kind is Kind.LINES:
        existing = target.existing_line()
        if existing:
            return _Prepared(None, lambda: _write_again(directory, location, existing, step.at))
        return _Prepared(None, lambda: durable.append_in(directory, file, content, at=step.at))
    if location.kind is Kind.NUMBERED:
        # The intended number, or the next free one if the ledger's lock was broken by mistake.
        first = max(step.at, numbers.get(step.name, 0) + 1)
        number, exists = _find_number(directory, location, first, content)
        numbers[step.name] = number
        if exists:
            return _Prepared(directory, lambda: number)
        draft = durable.write_draft(directory, location.numbered(number), content, durable=synced)
        publish: Callable[[], object] = partial(publish_number, directory, location, draft, number, content)
    else:
        current = read_if_exists(directory, file)
        if not target.needs_change(current, was_published):
            return _Prepared(directory)
        if step.operation != "put":
            return _Prepared(directory, lambda: durable.remove_in(directory, file, durable=False))
        draft = durable.write_draft(directory, file, content, durable=synced)
        publish_draft = durable.publish_new if current is None else durable.publish
        publish = partial(publish_draft, directory, draft, file)
    return _Prepared(directory, publish, lambda: durable.discard(directory, draft))


def _publish(prepared: Iterable[_Prepared]) -> list[object]:
    """Step 3: one after the other, each directory synced before the next one changes."""
    results: list[object] = []
    changed: Directory | None = None
    for each in prepared:
        if changed is not None and each.directory is not changed:
            durable.sync_names(changed)
        results.append(each.publish())
        changed = each.directory
    if changed is not None:
        durable.sync_names(changed)
    return results


def _sync_filesystems(directories: Iterable[Directory]) -> None:
    """Sync everything written in these directories."""
    synced: set[int] = set()
    for directory in directories:
        try:
            device = calls.fstat(directory.fd or 0).st_dev
            if device not in synced:
                calls.sync_filesystem(directory.fd or 0)
            synced.add(device)
        except OSError as error:
            raise NotDurable("sync the filesystem of", directory.shown, error) from error


def _write_again(directory: Directory, location: Location, lines: bytes, at: int) -> None:
    """Sync existing lines: a killed process may have written but not synced them."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = calls.open(directory.at(location.file), flags, dir_fd=directory.fd)
        try:
            calls.lseek(fd, at, os.SEEK_SET)
            calls.write(fd, lines)  # so that the sync has something to do, and reports if it cannot
            calls.fsync(fd)
        finally:
            calls.close(fd)
    except OSError as error:
        raise NotDurable("sync", directory.where(location.file), error) from error


def _find_number(directory: Directory, location: Location, number: int, content: bytes) -> tuple[int, bool]:
    """The first number from `number` on that is free or has this content, and whether it has it."""
    while directory.status(location.numbered(number)) is not None:
        if read_if_exists(directory, location.numbered(number)) == content:
            return number, True
        number += 1
    return number, False


def publish_number(directory: Directory, location: Location, draft: str, number: int, content: bytes) -> int:
    """Give a draft the number, or the first free one after it; return it. A number that holds exactly this content was
    given by another process that applies the same intent."""
    while True:
        name = location.numbered(number)
        try:
            durable.publish_new(directory, draft, name, keep_if_taken=True, often=True)
        except AlreadyExists:
            if read_if_exists(directory, name) == content:
                durable.discard(directory, draft)
                return number
            number += 1
        else:
            return number


def read_if_exists(directory: Directory, name: str) -> bytes | None:
    """The content of a file, or None."""
    try:
        return durable.read_in(directory, name)
    except NotFound:
        return None
