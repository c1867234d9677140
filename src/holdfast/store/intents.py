"""Commits to several documents: decided as one file, then carried out, by whoever comes by.

1. The *intent*, a file that holds all of the change, is published. This is the commit point.
2. What is to be written is written under private names, and brought to the disk.
3. Each change is published: documents before what points to them, removals last. The names in one
   directory are brought to the disk before anything is published in the next: so a pointer leads to
   something even for one who finds it after a power cut and knows nothing of intents.
4. The intent is marked as done by a new name, durably, and then removed. It must not come back once
   somebody else has changed things: who sees the mark brings it to the disk first.

The guards of all that it touches are held from before 1 until after 4. So whoever holds one of these
guards and sees an intent that touches what it guards knows that its author is gone, and finishes it
first, beginning with the sync that the author may not have come to. Applying twice does no harm; a
document that is neither as it was nor as it shall be has been changed by somebody who does not know
intents, and is not overwritten. If something was published that comes after it, in another directory, it had
been published too, and was changed since then: that is as if the commit had come to its end before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from holdfast.errors import AlreadyExists, Corrupt, NotDurable, NotFound
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, io_failure
from holdfast.store.layout import INTENTS, Kind, Layout, Location, open_directory
from holdfast.store.model import StructCodec

MOST_SINGLE_SYNCS = 8
"""With more steps than this, the drafts are brought to the disk by one sync of the file system."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change. `before` is the digest of what a document held; `at` is where an append goes."""

    name: str
    operation: Literal["put", "remove", "append"]
    content: str = ""
    before: str = ""
    at: int = 0


class Intent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A commit, decided but perhaps not yet carried out. Its steps stand in the order of applying.

    `drafts` is what the names of its drafts end in, where these were written before it was decided.
    """

    id: str
    steps: tuple[Step, ...]
    drafts: str = ""


MOST_BYTES = 64 << 20
_PENDING, _DONE = ".json", ".done"
_CODEC = StructCodec(Intent, pretty=False, limit=MOST_BYTES, bounded=True)


def digest(content: bytes | None) -> str:
    """A short name for a document's content; "" for a document that is not there."""
    return "" if content is None else hashlib.blake2b(content, digest_size=16).hexdigest()


def are_many(files: int) -> bool:
    """Whether so many files are brought to the disk by one sync of the file system."""
    return files > MOST_SINGLE_SYNCS


def encode(intent: Intent) -> bytes:
    """The content of an intent's file."""
    return _CODEC.encode(intent)


def intent_name(commit_id: str) -> str:
    """The name of an intent's file."""
    return commit_id + _PENDING


class Intents:
    """The intents of one store."""

    def __init__(self, root: Directory, layout: Layout) -> None:
        self._root = root
        self._layout = layout
        self._path = root.where(INTENTS)
        self._known: dict[str, Intent] = {}

    def pending(self) -> list[Intent]:
        """All intents that are to be carried out now: most often none."""
        return self._listed(_PENDING)

    def unfinished(self, names: Iterable[str]) -> list[Intent]:
        """Those that change one of these documents or streams, for one who is about to change them: also
        those of which only the mark is left."""
        found = self._listed(_PENDING, _DONE)
        if not found:
            return found  # most often
        wanted = set(names)
        return [each for each in found if any(step.name in wanted for step in each.steps)]

    def left(self) -> list[Intent]:
        """All that are there, also those of which only the mark is left."""
        return self._listed(_PENDING, _DONE)

    def publish(self, intent: Intent) -> None:
        """Step 1: make the commit. From here on it will be carried out, by us or by another."""
        content = encode(intent)
        with self._root.beneath(INTENTS, create=True) as directory:
            durable.create_in(directory, intent_name(intent.id), content)

    def carry_out(self, intent: Intent) -> list[int]:
        """Steps 2 to 4; the numbers that the records of numbered streams have now, in order.

        The caller holds the guards of all that the intent touches.
        """
        with contextlib.ExitStack() as open_directories:
            directories: dict[str, Directory] = {}
            prepared: list[_Prepared] = []
            numbers = _Numbers()
            bulk = are_many(len(intent.steps)) and self._root.fd is not None
            try:
                for number, step in enumerate(intent.steps):
                    place = self._layout.place(step.name)
                    if place.directory not in directories:
                        directory = open_directory(self._root, place.directory, create=True)
                        directories[place.directory] = open_directories.enter_context(directory)
                    here = directories[place.directory]
                    progress = _Progress(numbers, partial(self._was_published, intent, number))
                    prepared.append(_prepare(here, place, step, intent, progress, synced=not bulk))
                if bulk:
                    _sync_filesystems(directories.values())
                published = _publish(prepared)
            except BaseException:
                for each in prepared:  # no litter, however often this is tried: the disk may be full
                    each.discard()
                raise
            if intent.drafts:
                self._clear_drafts(intent, directories)
        self._drop(intent)
        return [number for number in published if type(number) is int]  # others give none

    def _was_published(self, intent: Intent, number: int) -> bool:
        """Whether a document must have been published, durably, because a step is that comes after it."""
        place = self._layout.place(intent.steps[number].name)
        for step in intent.steps[number + 1 :]:
            later = self._layout.place(step.name)
            if later.directory == place.directory and later.kind is Kind.DOCUMENT:
                continue  # it was not brought to the disk in between
            with open_directory(self._root, later.directory, create=True) as directory:
                if _is_published(directory, later, step):
                    return True
        return False

    def obstacle(self, intent: Intent) -> Corrupt | None:
        """What keeps an intent from being carried out: something that another program has changed, and that
        only a person can decide about. None if nothing does. Changes nothing; the caller holds the guards.
        """
        try:
            with self._root.beneath(INTENTS) as directory:
                if directory.status(intent.id + _PENDING) is None:
                    return None  # it has been carried out
            for number, step in enumerate(intent.steps):
                place = self._layout.place(step.name)
                with contextlib.suppress(NotFound), open_directory(self._root, place.directory) as here:
                    if place.kind is Kind.LINES:
                        _line_there(here, place, step, intent)
                    elif place.kind is Kind.DOCUMENT:
                        now = read_if_there(here, place.file)
                        was_published = partial(self._was_published, intent, number)
                        _is_to_be_changed(here, place, step, intent, now, was_published)
        except Corrupt as failure:
            return failure
        return None

    def finish(self, intent: Intent) -> None:
        """Do what its author did not come to do, if it still has to be. The caller holds the guards."""
        with self._root.beneath(INTENTS) as directory:
            pending = directory.status(intent.id + _PENDING) is not None
            if not pending and directory.status(intent.id + _DONE) is None:
                return
            durable.sync_names(directory)  # neither the intent nor its mark may be lost from here on
            if not pending:
                durable.remove_in(directory, intent.id + _DONE, durable=False)
        if pending:
            self.carry_out(intent)

    def _drop(self, intent: Intent) -> None:
        """Step 4."""
        pending, done = intent.id + _PENDING, intent.id + _DONE
        with self._root.beneath(INTENTS) as directory:
            if intent.drafts:
                durable.remove_in(directory, pending, durable=False)  # should it come back, it does no harm
                return
            try:
                calls.replace(
                    directory.at(pending),
                    directory.at(done),
                    src_dir_fd=directory.fd,
                    dst_dir_fd=directory.fd,
                )
            except OSError as error:
                raise io_failure("drop", directory.where(pending), error) from error
            durable.sync_names(directory)
            durable.remove_in(directory, done, durable=False)  # should this one come back, it does no harm

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

    def _clear_drafts(self, intent: Intent, directories: Mapping[str, Directory]) -> None:
        """Remove what its author had written before it was decided, and did not come to publish."""
        for step in intent.steps:
            place = self._layout.place(step.name)
            draft = durable.draft_name(place.numbered(step.at), intent.drafts)
            durable.discard(directories[place.directory], draft)

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


class _Prepared(NamedTuple):
    """A step that is ready to be published, or to be forgotten. `directory` is where names change."""

    directory: Directory | None
    publish: Callable[[], object] = lambda: None
    discard: Callable[[], None] = lambda: None


class _Numbers(dict[str, int]):
    """The last number that was given to a record of each stream: the next one gets a higher one."""

    def first(self, step: Step) -> int:
        """The lowest number that the record of this step may have."""
        return max(step.at, self.get(step.name, 0) + 1)


def _sync_filesystems(directories: Iterable[Directory]) -> None:
    """Bring everything to the disk that was written in these directories."""
    synced: set[int] = set()
    for directory in directories:
        try:
            device = calls.fstat(directory.fd or 0).st_dev
            if device not in synced:
                calls.sync_filesystem(directory.fd or 0)
            synced.add(device)
        except OSError as error:
            raise NotDurable("sync the file system of", directory.shown, error) from error


class _Progress(NamedTuple):
    """What is known of the steps around one: the numbers given before it, whether a later one was made."""

    numbers: _Numbers
    was_published: Callable[[], bool]


def _publish(prepared: Iterable[_Prepared]) -> list[object]:
    """Step 3: one after the other, each directory on the disk before the next one is changed."""
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


def _prepare(
    directory: Directory, place: Location, step: Step, intent: Intent, progress: _Progress, *, synced: bool
) -> _Prepared:
    """Write what a step needs under a private name; return what publishes it, if it is not there already.

    What is there may have been published by one who was killed before it was durable.
    """
    if place.kind is Kind.LINES:
        return _prepare_line(directory, place, step, intent)
    if place.kind is Kind.NUMBERED:
        return _prepare_number(directory, place, step, progress.numbers, synced=synced)
    return _prepare_document(directory, place, step, intent, progress.was_published, synced=synced)


def _is_published(directory: Directory, place: Location, step: Step) -> bool:
    """Whether a step has been carried out, and that shows."""
    content = step.content.encode()
    if place.kind is Kind.NUMBERED:
        return _find_number(directory, place, step.at, content)[1]
    if place.kind is Kind.LINES:
        line = content + b"\n"
        return durable.read_lines_in(directory, place.file, after=step.at, limit=len(line)) == line
    now = read_if_there(directory, place.file)
    return now == (content if step.operation == "put" else None) and digest(now) != step.before


def _prepare_document(
    directory: Directory,
    place: Location,
    step: Step,
    intent: Intent,
    was_published: Callable[[], bool],
    *,
    synced: bool,
) -> _Prepared:
    now = read_if_there(directory, place.file)
    if not _is_to_be_changed(directory, place, step, intent, now, was_published):
        return _Prepared(directory)
    if step.operation != "put":
        return _Prepared(directory, lambda: durable.remove_in(directory, place.file, durable=False))
    draft = durable.write_draft(directory, place.file, step.content.encode(), durable=synced)
    publish = durable.publish_new if now is None else durable.publish
    return _Prepared(
        directory,
        lambda: publish(directory, draft, place.file),
        lambda: durable.discard(directory, draft),
    )


def _is_to_be_changed(
    directory: Directory,
    place: Location,
    step: Step,
    intent: Intent,
    now: bytes | None,
    was_published: Callable[[], bool],
) -> bool:
    """Whether a document, which holds `now`, still has to be changed; `Corrupt` if it must not be."""
    if now == (step.content.encode() if step.operation == "put" else None):
        return False
    if digest(now) == step.before:
        return True
    if was_published():
        return False  # and another program has changed it since
    raise _foreign_change(directory, place, intent)


def _prepare_line(directory: Directory, place: Location, step: Step, intent: Intent) -> _Prepared:
    there = _line_there(directory, place, step, intent)
    if there:
        return _Prepared(None, lambda: _write_again(directory, place, there, step.at))
    line = step.content.encode()
    return _Prepared(None, lambda: durable.append_in(directory, place.file, line, at=step.at))


def _line_there(directory: Directory, place: Location, step: Step, intent: Intent) -> bytes:
    """The line of a step if it has been written, b"" if it is to be; `Corrupt` if another is in its place."""
    line = step.content.encode() + b"\n"
    there = durable.read_lines_in(directory, place.file, after=step.at, limit=len(line))
    if there not in (b"", line):
        raise _foreign_change(directory, place, intent)
    return there


def _write_again(directory: Directory, place: Location, lines: bytes, at: int) -> None:
    """Bring to the disk what is there: one who was killed may have written it but not synced it."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = calls.open(directory.at(place.file), flags, dir_fd=directory.fd)
        try:
            calls.lseek(fd, at, os.SEEK_SET)
            calls.write(fd, lines)  # so that the sync has something to do, and reports if it cannot
            calls.fsync(fd)
        finally:
            calls.close(fd)
    except OSError as error:
        raise NotDurable("sync", directory.where(place.file), error) from error


def _prepare_number(
    directory: Directory, place: Location, step: Step, numbers: _Numbers, *, synced: bool
) -> _Prepared:
    """The intended number, or the next free one if the ledger's lock was broken wrongly meanwhile."""
    content = step.content.encode()
    number, there = _find_number(directory, place, numbers.first(step), content)
    numbers[step.name] = number
    if there:
        return _Prepared(directory, lambda: number)
    draft = durable.write_draft(directory, place.numbered(number), content, durable=synced)
    return _Prepared(
        directory,
        lambda: publish_number(directory, place, draft, number, content),
        lambda: durable.discard(directory, draft),
    )


def _find_number(directory: Directory, place: Location, number: int, content: bytes) -> tuple[int, bool]:
    """The first number from `number` on that has this content or none; and whether it has it."""
    while directory.status(place.numbered(number)) is not None:
        if read_if_there(directory, place.numbered(number)) == content:
            return number, True
        number += 1
    return number, False


def publish_number(directory: Directory, place: Location, draft: str, number: int, content: bytes) -> int:
    """Give a draft the number, or the first one behind it that is free; return which it was.

    One that has this very content was published by another who carries out the same intent.
    """
    while True:
        name = place.numbered(number)
        try:
            durable.publish_new(directory, draft, name, keep_if_taken=True, often=True)
        except AlreadyExists:
            if read_if_there(directory, name) == content:
                durable.discard(directory, draft)
                return number
            number += 1
        else:
            return number


def _foreign_change(directory: Directory, place: Location, intent: Intent) -> Corrupt:
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
