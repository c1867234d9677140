"""Intents: several changes committed by one file, then applied by the author or the next process.

1. Write the new content of documents to drafts and sync them: from here on, applying a document needs no disk space.
2. Publish the *intent*, a file that contains the whole change. Commit point.
3. Publish every change: documents before those that refer to them, removals last. Sync each directory before
   publishing anything in the next one: after a power cut, even a program that knows nothing of intents finds no
   dangling reference.
4. Rename the intent to `.done`, durably, and then remove it. It must not come back once others have changed the
   documents: a process that finds the `.done` file syncs it before it changes anything.

The author holds the document locks of everything that the intent touches from before 1 until after 4. So a process that
holds one of these locks and finds the intent knows that the author is gone, and finishes it first: see `recovery`.

Loose lines are the exception: every commit has some, and writers should not wait for each other because of them. Their
stream is locked only while they are written, in step 3. So its lock does not show whether their author lives, and
another process may write them first: one that needs the stream, if the author takes long, or one that finishes the
commit, if the author is gone. Each first checks which of the lines the stream has (`lines.write_missing`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from _blake2 import blake2b  # `hashlib` loads OpenSSL, which is slow
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Literal, NamedTuple

import msgspec

from holdfast.errors import AlreadyExists, Failure, NotDurable, NotFound, NotWritable
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, failing_to, io_failure
from holdfast.store.layout import (
    INTENTS,
    Directories,
    DocumentLocks,
    Kind,
    Layout,
    Location,
    OpenDirectories,
    document_locks_until,
)
from holdfast.store.lines import End, write_missing
from holdfast.store.model import SafeName, StructCodec, not_understood

MOST_SINGLE_SYNCS = 8  # up to this many drafts are synced one by one; more are synced with the whole filesystem, once


Mark = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]*\Z", max_length=64)]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One change. `before` is the digest of a document's old content; `old` is that content, if other programs change
    such documents too. `at` is the position of an append. A loose line is usually written there or later; its `before`
    is the fingerprint of what preceded that (`lines.End`)."""

    name: str
    operation: Literal["put", "remove", "append"]
    content: str = ""
    before: str = ""
    at: int = 0
    old: str = ""

    @property
    def document(self) -> bytes | None:
        """The new content of a document; None if it is removed."""
        return self.content.encode() if self.operation == "put" else None


class Intent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A commit that may not be applied yet; its steps are in the order of applying. `drafts` is the suffix of the names
    of its drafts, which were written before the commit point."""

    id: SafeName
    steps: tuple[Step, ...]
    drafts: Mark = ""

    def steps_of(self, name: str) -> list[Step]:
        """Those that change one document or stream."""
        return [each for each in self.steps if each.name == name]


_LONG_AGO = 2.0  # seconds; an author usually needs a few milliseconds
_PENDING, _DONE, _ASIDE = ".json", ".done", ".aside"
_CODEC = StructCodec(Intent, pretty=False, limit=64 << 20, bounded=True)
encode = _CODEC.encode


def digest(content: bytes | None) -> str:
    """The digest of a document's content; "" if there is no document."""
    return "" if content is None else blake2b(content, digest_size=16).hexdigest()


def are_many(files: int) -> bool:
    """Whether one sync of the filesystem is cheaper than a sync of each file."""
    return files > MOST_SINGLE_SYNCS


def touching(intents: Sequence[Intent], names: Iterable[str]) -> list[Intent]:
    """Those of the intents that change one of these documents or streams."""
    wanted = set(names) if intents else ()
    return [each for each in intents if any(step.name in wanted for step in each.steps)]


def intent_name(commit_id: str) -> str:
    return commit_id + _PENDING


class Intents:
    """The intents of one store."""

    def __init__(self, root: Directory, layout: Layout, directories: Directories, locks: DocumentLocks) -> None:
        self._root = root
        self._directories = directories
        self._locks = locks
        self.layout = layout
        self._path = root.where(INTENTS)
        self._known: dict[str, Intent] = {}

    def pending(self) -> list[Intent]:
        """Intents that are not applied yet; usually none."""
        return self._listed(_PENDING)

    def all(self) -> list[Intent]:
        """All intents, including applied ones whose `.done` file is left."""
        return self._listed(_PENDING, _DONE)

    def pending_steps(self, name: str) -> list[tuple[Intent, Step]]:
        """The changes of a document or stream that are committed but not applied yet."""
        return [(each, step) for each in self.pending() for step in each.steps if step.name == name]

    def pending_members(self, family: str) -> dict[str, tuple[Intent, Step]]:
        """The changes of a family that are committed but not applied yet, by member."""
        steps = ((each, step) for each in self.pending() for step in each.steps)
        return {
            step.name[len(family) + 1 :]: (each, step) for each, step in steps if step.name.startswith(f"{family}/")
        }

    def unfinished(self, names: Iterable[str]) -> list[Intent]:
        """All intents that touch one of these documents or streams."""
        return touching(self.all(), names)

    def abandoned(self, intents: Iterable[Intent]) -> list[Intent]:
        """Those of the intents that are so old that their authors are probably gone."""
        found: list[Intent] = []
        with contextlib.suppress(Failure), self._root.beneath(INTENTS) as directory:
            for each in intents:
                status = directory.status(each.id + _PENDING) or directory.status(each.id + _DONE)
                if status is not None and abs(time.time() - status.st_mtime) > _LONG_AGO:
                    found.append(each)
        return found

    def _listed(self, *endings: str) -> list[Intent]:
        try:
            with OpenDirectories(self._directories) as opened:
                listed = opened.get(INTENTS).names()
        except NotFound:
            return []
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
        where = os.path.join(self._path, name)
        intent = _CODEC.decode(content, where)
        if name not in (intent.id + _PENDING, intent.id + _DONE):
            raise not_understood(where, f"its id is {intent.id}")
        return intent

    def write_drafts(self, intent: Intent, opened: OpenDirectories) -> None:
        """Step 1. Raises `NotWritable` if this user may not change one of the targets: an intent that cannot be applied
        would block everyone who needs its documents."""
        for target in self.targets(intent, opened):
            target.require_writable()
        located = [(self.layout.locate(step.name), step) for step in intent.steps if step.operation == "put"]
        bulk = are_many(len(located)) and self._root.fd is not None
        try:
            for location, step in located:
                directory, content = opened.get(location.directory, create=True), step.content.encode()
                durable.write_draft(directory, location.file, content, durable=not bulk, mark=intent.drafts)
            if bulk:
                _sync_filesystems([opened.get(location.directory) for location, _ in located])
        except BaseException:
            self.discard_drafts(intent, opened)
            raise

    def publish(self, intent: Intent, opened: OpenDirectories) -> None:
        """Step 2, the commit point: from here on, this or another process applies the intent."""
        try:
            durable.create_in(opened.get(INTENTS, create=True), intent_name(intent.id), encode(intent))
        except Failure as failure:
            if not isinstance(failure, NotDurable):  # after that, the intent may need its drafts
                self.discard_drafts(intent, opened)
            raise

    def apply(self, intent: Intent, opened: OpenDirectories, loose: Collection[str] = ()) -> list[int]:
        """Steps 3 and 4, by the author: return the numbers of the records in numbered streams, in order. The caller
        holds the document locks of everything that the intent touches, except those of the `loose` streams."""
        published = publish_all(self._as_decided(intent, opened, loose))
        self.drop(intent)
        return [number for number in published if type(number) is int]  # other steps return None

    def _as_decided(self, intent: Intent, opened: OpenDirectories, loose: Collection[str]) -> Iterator[Prepared]:
        """Step 3, by the author: locks have kept others out of all targets but loose streams, so nothing has changed
        there."""
        numbers: dict[str, int] = {}
        for targets in together(self.targets(intent, opened)):
            directory, location, step, _ = targets[0]
            if location.kind is Kind.LINES:
                write = self._write_loose if step.name in loose else _write_lines
                yield Prepared(None, partial(write, directory, location, [each.step for each in targets]))
            elif location.kind is Kind.NUMBERED:
                yield numbered(targets[0], numbers)
            elif step.operation == "put":
                yield Prepared(
                    directory, partial(name_draft, directory, targets[0].draft, location.file, is_new=not step.before)
                )
            else:
                yield Prepared(directory, partial(_remove, targets[0]))

    def _write_loose(self, directory: Directory, location: Location, steps: Sequence[Step]) -> None:
        """Write the lines that the stream lacks, durably. Others may write theirs while this syncs."""
        lines, at = lines_of(steps), steps[0].at
        with contextlib.ExitStack() as held:
            held.enter_context(document_locks_until(None))  # the commit is made: its time limit is over
            held.enter_context(self._locks.locked([location]))
            if durable.end_of_lines_in(directory, location.file) == (at, b""):  # the usual case
                durable.append_in(directory, location.file, *lines, unlock=held.close)
            else:
                write_missing(directory, location, at, lines, unlock=held.close)

    def set_aside(self) -> list[str]:
        """The paths of intents that were not applied completely because another program's change won."""
        try:
            with self._root.beneath(INTENTS) as directory:
                return sorted(directory.where(name) for name in directory.names() if name.endswith(_ASIDE))
        except NotFound:
            return []

    def surely_pending(self) -> list[Intent]:
        """The intents that are not applied yet, once their names are synced: what another process writes of them must
        not survive a power cut that they do not."""
        with contextlib.suppress(NotFound), self._root.beneath(INTENTS) as directory:
            durable.sync_names(directory)
        return self.pending()

    def needs_applying(self, intent: Intent) -> bool:
        """Whether the intent of a dead author still has to be applied. Syncs the intent or its `.done` file, so that a
        power cut cannot undo either. The caller holds the document locks."""
        with self._root.beneath(INTENTS) as directory:
            pending = directory.status(intent.id + _PENDING) is not None
            if pending or directory.status(intent.id + _DONE) is not None:
                durable.sync_names(directory)
            if not pending:
                durable.remove_in(directory, intent.id + _DONE, durable=False)
        return pending

    def targets(self, intent: Intent, opened: OpenDirectories) -> Iterator[StepTarget]:
        """The targets of the steps, in order."""
        for step in intent.steps:
            location = self.layout.locate(step.name)
            yield StepTarget(opened.get(location.directory, create=True), location, step, intent)

    def discard_drafts(self, intent: Intent, opened: OpenDirectories) -> None:
        if intent.drafts:
            for target in self.targets(intent, opened):
                durable.discard(target.directory, target.draft)

    def drop(self, intent: Intent, *, keep: bool = False) -> None:
        """Step 4. With `keep`, set the intent aside instead, so that a person can see what was not applied."""
        pending, done = intent.id + _PENDING, intent.id + (_ASIDE if keep else _DONE)
        with self._root.beneath(INTENTS) as directory:
            if all(self.layout.locate(step.name).kind is Kind.NUMBERED for step in intent.steps):
                durable.remove_in(directory, pending, durable=False)  # harmless if it comes back
                return
            _rename(directory, pending, done)
            durable.sync_names(directory)
            if not keep:
                durable.remove_in(directory, done, durable=False)  # harmless if it comes back


class StepTarget(NamedTuple):
    """The document or stream that one step of an intent changes."""

    directory: Directory
    location: Location
    step: Step
    intent: Intent

    @property
    def draft(self) -> str:
        return durable.draft_name(self.location.numbered(self.step.at), self.intent.drafts)

    def require_writable(self) -> None:
        """Raise `NotWritable` unless this user may apply the step. (For a new content, writing the draft shows it.)"""
        directory, location, step, _ = self
        if step.operation == "put" or directory.fd is None:
            return
        lines = location.kind is Kind.LINES and directory.status(location.file) is not None
        name, needed = (location.file, os.W_OK | os.R_OK) if lines else (".", os.W_OK | os.X_OK)
        with failing_to("examine", directory.where(location.file)):
            permitted = calls.access(name, needed, dir_fd=directory.fd)
        if not permitted:
            denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            hint = "It belongs to another user. 'holdfast doctor' names wrong owners and modes; --fix repairs them."
            raise NotWritable("change", directory.where(location.file), denied, hint=hint)

    def was_published(self) -> bool:
        """Whether the draft of a document was published. Only publishing it or dropping the intent removes it."""
        if self.step.operation != "put" or not self.intent.drafts:
            return False
        status = self.directory.status(self.draft)
        return status is None or status.st_nlink > 1


class Prepared(NamedTuple):
    """A step that is ready to be published or discarded. `directory` is the one whose names change, if any."""

    directory: Directory | None
    publish: Callable[[], object] = lambda: None
    discard: Callable[[], None] = lambda: None


def together(targets: Iterable[StepTarget]) -> Iterator[list[StepTarget]]:
    """The targets one by one, but all lines of a stream together, in the place of the first."""
    lines: dict[str, list[StepTarget]] = {}
    grouped: list[list[StepTarget]] = []
    for each in targets:
        if each.location.kind is not Kind.LINES:
            grouped.append([each])
        elif each.step.name in lines:
            lines[each.step.name].append(each)
        else:
            grouped.append(lines.setdefault(each.step.name, [each]))
    yield from grouped


def lines_of(steps: Iterable[Step]) -> tuple[bytes, ...]:
    return tuple(each.content.encode() for each in steps)


def end_before(steps: Sequence[Step]) -> End:
    """Where the stream of these lines ended before their commit."""
    return End(steps[0].at, steps[0].before)


def _write_lines(directory: Directory, location: Location, steps: Sequence[Step]) -> None:
    durable.append_in(directory, location.file, *lines_of(steps), at=steps[0].at)


def _remove(target: StepTarget) -> None:
    durable.remove_in(target.directory, target.location.file, durable=False)


def numbered(target: StepTarget, numbers: dict[str, int]) -> Prepared:
    """Step 3 for a record of a numbered stream: writes a draft, unless a killed process has already published the
    record (perhaps not durably). `numbers` has the last number given to a record of each stream."""
    directory, location, step, _ = target
    content = step.content.encode()
    # The intended number, or the next free one if the ledger's lock was broken by mistake.
    first = max(step.at, numbers.get(step.name, 0) + 1)
    number, exists = find_number(directory, location, first, content)
    numbers[step.name] = number
    if exists:
        return Prepared(directory, lambda: number)
    draft = durable.write_draft(directory, location.numbered(number), content)
    publish = partial(publish_number, directory, location, draft, number, content)
    return Prepared(directory, publish, lambda: durable.discard(directory, draft))


def name_draft(directory: Directory, draft: str, name: str, *, is_new: bool) -> None:
    """Publish a draft under its name. If that fails, the draft stays, which shows that it was not published."""
    if is_new:
        durable.publish_new(directory, draft, name, keep_if_taken=True)
    else:
        _rename(directory, draft, name)


def _rename(directory: Directory, source: str, target: str) -> None:
    try:
        calls.replace(directory.at(source), directory.at(target), src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    except OSError as error:
        raise io_failure("replace", directory.where(target), error) from error


def publish_all(preparing: Iterable[Prepared]) -> list[object]:
    """Step 3: publish in order; sync each directory before the next one changes."""
    prepared: list[Prepared] = []
    results: list[object] = []
    changed: Directory | None = None
    try:
        prepared.extend(preparing)
        for each in prepared:
            if changed is not None and each.directory is not changed:
                durable.sync_names(changed)
            results.append(each.publish())
            changed = each.directory
        if changed is not None:
            durable.sync_names(changed)
    except BaseException:
        for each in prepared:  # leave no drafts, however often this is retried: the disk may be full
            each.discard()
        raise
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
            raise io_failure("sync the filesystem of", directory.shown, error) from error


def find_number(directory: Directory, location: Location, number: int, content: bytes) -> tuple[int, bool]:
    """The first number from `number` on that is free or holds this content, and whether it holds it."""
    while directory.status(location.numbered(number)) is not None:
        if read_if_exists(directory, location.numbered(number)) == content:
            return number, True
        number += 1
    return number, False


def publish_number(directory: Directory, location: Location, draft: str, number: int, content: bytes) -> int:
    """Publish a draft under the number, or the first free one after it; return the number used. If a number already
    holds exactly this content, another process that applies the same intent has published it."""
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
    """The content of a file, or None if it does not exist."""
    try:
        return durable.read_in(directory, name)
    except NotFound:
        return None
