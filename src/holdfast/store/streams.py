"""Numbered streams (reading records, finding numbers, appending batches) and the planning of a commit's changes.

A record of a numbered stream is a file with its number in the name. Readers yield only records that have their number,
because other programs may take the number intended for a pending record. They hide a batch until it is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast.errors import AlreadyExists, Failure, UsageFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, close_quietly, io_failure
from holdfast.store import intents
from holdfast.store.intents import Intent, Step, are_many, encode, find_number, intent_name, publish_number
from holdfast.store.layout import Kind, Location
from holdfast.store.lines import End, not_a_position
from holdfast.store.model import Append, Change, Delete, Key, Stream, View

_CHUNK = 1 << 20
_MOST_OLD = 256 << 10  # the most bytes of old content that an intent keeps
_READ = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_APPEND = _READ | os.O_WRONLY | os.O_APPEND

# --- Numbered files --------------------------------------------------------------------------------------

_LISTED_PER_READ = 16  # at least this many names can be listed in the time of reading one record
_MOST_AT_ONCE = 256  # records held back until it is known whether to hide them


def numbered_files(
    directory: Directory | None,
    location: Location,
    after: int,
    last: LastNumbers,
    hidden: Callable[[Directory], int | None],
) -> Iterator[tuple[int, bytes]]:
    """The records with numbers after `after`. A missing number is skipped if later ones exist.

    `hidden` returns the first number of an unfinished batch. It is called after the records are read: a batch whose
    intent is gone by then is whole, so a reader that sees one of its records finds the others too.
    """
    if after < 0:
        raise not_a_position(location, after)
    number, most, seen = after + 1, 1, 0
    while directory is not None:
        found = _existing_from(directory, location, number, most)
        until = hidden(directory)
        for each in found:
            if until is not None and each[0] >= until:
                return
            yield each
        number, most, seen = number + len(found), min(2 * most, _MOST_AT_ONCE), seen + len(found)
        if not found:
            end = last.find(directory, location)
            if number > end and seen * _LISTED_PER_READ > end:
                end, seen = last.find_exactly(directory, location, None), 0
            if number > end:
                return
            if directory.status(location.numbered(number)) is None:  # not just appended: a gap
                number = min(each for each in numbers_in(directory, location) if each > number)


def _existing_from(directory: Directory, location: Location, number: int, most: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    size = 0
    while len(found) < most and size < _CHUNK:
        content = intents.read_if_exists(directory, location.numbered(number))
        if content is None:
            break
        found.append((number, content))
        number, size = number + 1, size + len(content)
    return found


def first_unfinished(directory: Directory, location: Location, batch: Intent) -> int | None:
    """The number that the first record of an unfinished batch has or should have; None if the batch is whole. After a
    power cut, the first record may be missing while later ones exist."""
    first, number = None, batch.steps[0].at
    for step in batch.steps:
        number, exists = find_number(directory, location, number, step.content.encode())
        first = number if first is None else first
        if not exists:
            return first
        number += 1
    return None


def numbers_in(directory: Directory, location: Location) -> Iterator[int]:
    """The numbers of all records, by listing them."""
    start, end = location.file.split("{number}")
    for name in directory.names():
        digits = name[len(start) : len(name) - len(end)]
        if digits.isdecimal() and digits.isascii() and name == location.numbered(int(digits)):
            yield int(digits)


class LastNumbers:
    """Finds the last number of a stream, usually without listing it.

    A writer holds the lock and knows whether another program has changed the stream; only then does it list the
    directory. A reader gallops from the last number that this process or the last receipt knows. If that number is
    missing, or a number beyond the end exists, the stream has a gap, and the directory is listed. A process looks for
    numbers far beyond the end once; after that, only just beyond it.
    """

    _AHEAD = (*range(2, 17), *(1 << power for power in range(5, 18)))

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        self._ours: set[str] = set()

    def remember(self, location: Location, number: int) -> None:
        """Remember the last number, which this process has published."""
        self._last[location.name] = number
        self._ours.add(location.name)

    def are_ours(self, location: Location) -> bool:
        """Whether this process has published some of the numbers."""
        return location.name in self._ours

    def remember_durable(self, location: Location, number: int) -> None:
        """Remember that this process has synced the names up to this number."""
        self._durable[location.name] = number

    def is_durable(self, location: Location) -> bool:
        """Whether this process has synced the last known number."""
        name = location.name
        return location.kind is Kind.NUMBERED and self._last.get(name, 0) == self._durable.get(name)

    def find_exactly(self, directory: Directory, location: Location, noted: int | None) -> int:
        """The last number, for the holder of the lock. `noted` is the last number that Holdfast's processes know, or
        None if another program has changed the directory since. A change during that check goes unnoticed, but it adds
        the next number."""
        if noted is None or directory.status(location.numbered(noted + 1)) is not None:
            noted = _list_last(directory, location)
        return self._remembered(location, noted)

    def find(self, directory: Directory, location: Location) -> int:
        """The last number, 0 if there is none; a few lookups, however many records there are."""

        def exists(number: int) -> bool:
            return directory.status(location.numbered(number)) is not None

        seen = self._last.get(location.name)
        known = max(seen or 0, _last_receipt(directory))
        is_known = known > 0 and exists(known)
        leap = 1
        while is_known and exists(known + leap):
            known += leap
            leap *= 2
        while leap > 1:  # known exists, known + leap does not
            leap //= 2
            if exists(known + leap):
                known += leap
        if not is_known or any(exists(known + each) for each in (self._AHEAD if seen is None else (2,))):
            known = _list_last(directory, location)
        return self._remembered(location, known)

    def _remembered(self, location: Location, number: int) -> int:
        self._last[location.name] = number
        return number


def _list_last(directory: Directory, location: Location) -> int:
    return max(numbers_in(directory, location), default=0)


def publish_without_lock(directory: Directory, location: Location, content: bytes) -> int:
    """Publish a record durably under the next number, without the stream's lock; return the number."""
    while True:
        number = _list_last(directory, location) + 1
        with contextlib.suppress(AlreadyExists):
            durable.create_in(directory, location.numbered(number), content)
            write_receipts(directory, [(number, content)])
            return number


# --- Early drafts ----------------------------------------------------------------------------------------
# A record that does not depend on the others is written and synced before its writer takes the lock. Its draft is in a
# directory of its own: a change of the names beside the records would look like an append by another program.

DRAFTS = ".drafts"


def drafts_of(location: Location) -> str:
    """The directory of the early drafts of a numbered stream."""
    return f"{location.directory}/{DRAFTS}"


def write_early(directory: Directory, drafts: Directory, content: bytes) -> str:
    """Write and sync the draft of a record whose number is not known yet; return its name in `drafts`."""
    return durable.write_draft(drafts, "event", content, like=directory)


# --- Receipts --------------------------------------------------------------------------------------------
# If another program stalls while it appends, and its lock is broken, it may later rename its file over an acknowledged
# record. So each acknowledged record is also a line of a file beside the stream: the record, a space, its number. That
# file is not synced: a power cut costs the last copies, not the records. A full file replaces the older one. Lines are
# written after the lock is released, so they may be out of order.

RECEIPTS, OLDER_RECEIPTS = ".receipts", ".receipts.old"
_MOST_RECEIPTS = 8 << 20
_NUMBER_AT_END = re.compile(rb" ([0-9]{1,15})\n\Z")


def write_receipts(directory: Directory, records: Iterable[tuple[int, bytes]]) -> None:
    """Append copies of records to the receipts before they are acknowledged; failures are ignored."""
    copies = ((content.removesuffix(b"\n"), number) for number, content in records)
    lines = b"".join(b"%b %d\n" % copy for copy in copies if b"\n" not in copy[0])
    with contextlib.suppress(OSError, Failure):
        fd = directory.open_or_create(RECEIPTS, _APPEND)
        try:
            calls.write(fd, lines)
        finally:
            close_quietly(fd)


def prepare_receipts(directory: Directory) -> None:
    """Create the file of the receipts, or let a full one replace the older one; failures are ignored. The caller holds
    the lock of the stream, without which nobody changes the names in its directory."""
    with contextlib.suppress(OSError, Failure):
        status = directory.status(RECEIPTS)
        if status is not None and status.st_size <= _MOST_RECEIPTS:
            return  # the usual case
        if status is not None:
            durable.publish(directory, RECEIPTS, OLDER_RECEIPTS)
        close_quietly(directory.open_or_create(RECEIPTS, _APPEND))


def read_receipts(directory: Directory) -> Iterator[tuple[int, bytes]]:
    """The numbers and contents of acknowledged records for which copies exist. A torn line may be among them."""
    for name in (OLDER_RECEIPTS, RECEIPTS):
        for line in (intents.read_if_exists(directory, name) or b"").splitlines(keepends=True):
            if found := _NUMBER_AT_END.search(line):
                yield int(found[1]), line[: found.start()]


def _last_receipt(directory: Directory) -> int:
    """The number of the last acknowledged record; 0 if it is unknown."""
    try:
        fd = calls.open(directory.at(RECEIPTS), _READ, dir_fd=directory.fd)
        try:
            calls.lseek(fd, max(0, calls.fstat(fd).st_size - 20), os.SEEK_SET)
            found = _NUMBER_AT_END.search(calls.read(fd, 20))
        finally:
            close_quietly(fd)
    except OSError:
        return 0
    return int(found[1]) if found else 0


class Planned(NamedTuple):
    """One change, ready to be applied. `before` is the version of a document's old content; `old` is that content, if
    other programs share the document. `at` is the position of an append, and `before` then the fingerprint of what
    precedes it, if the lock of the stream is not held (`lines.End`)."""

    location: Location
    operation: Literal["put", "remove", "append"]
    content: bytes = b""
    before: str = ""
    at: int = 0
    old: bytes = b""

    def as_step(self) -> Step:
        old = self.old.decode("utf-8", "replace") if len(self.old) <= _MOST_OLD else ""
        return Step(self.location.name, self.operation, self.content.decode(), self.before, self.at, old)

    def next_at(self) -> int:
        """The `at` of the next append; for a line, also the position of its own record."""
        return self.at + (len(self.content) + 1 if self.location.kind is Kind.LINES else 1)


def plan(
    changes: Sequence[Change],
    view: View,
    locations: Mapping[Key[Any] | Stream[Any], Location],
    contents: Mapping[str, bytes],
    unlocked: Mapping[Stream[Any], End],
) -> list[Planned]:
    """The changes with their records encoded, in the order in which they were decided. `contents` holds the old content
    of documents that other programs share, `unlocked` the ends of streams whose lock is not held: their records may be
    written later in the stream."""
    planned: list[Planned] = []
    ends: dict[Stream[Any], int] = {}
    for change in changes:
        if isinstance(change, Append):
            stream = change.stream
            location, before, at = locations[stream], "", ends.get(stream)
            if at is None:
                at, before = unlocked.get(stream) or (view.end(stream) + (location.kind is Kind.NUMBERED), "")
            step = Planned(location, "append", stream.codec.encode(change.record), before, at)
            if location.kind is Kind.LINES and b"\n" in step.content:
                raise UsageFailure(f"a record of {stream.name} is encoded with a newline")
            ends[stream] = step.next_at()
        else:
            key, document = change.key, view.document(change.key)
            before = "" if document is None else document.version
            if isinstance(change, Delete):
                step = Planned(locations[key], "remove", before=before)
            else:
                content = key.codec.encode(change.record) + b"\n"
                step = Planned(locations[key], "put", content, before, old=contents.get(key.name, b""))
        planned.append(step)
    return planned


def in_order(planned: list[Planned]) -> list[Planned]:
    """The changes in the order of applying: referenced documents before those that refer to them, removals last.

    Documents that refer to others (an index) come early in lock order, and the documents they refer to come later. So
    documents are put in reverse lock order of their kinds and, within one kind, in the order decided: the parts of an
    issue before the whole. Appends follow in the order decided, then removals in lock order.
    """
    puts = sorted((each for each in planned if each.operation == "put"), key=lambda each: -each.location.rank[0])
    appends = [each for each in planned if each.operation == "append"]
    removals = sorted((each for each in planned if each.operation == "remove"), key=lambda each: each.location.rank)
    return [*puts, *appends, *removals]


def is_batch(planned: Sequence[Planned]) -> bool:
    """Whether all changes are appends to one numbered stream."""
    location = planned[0].location
    return location.kind is Kind.NUMBERED and all(each.location is location for each in planned)


class Batch:
    """A commit of several records of one numbered stream. Its author holds the stream's lock.

    Such records never change, so fewer steps than those of `intents` suffice:

    1. Write and sync drafts of all records and of the intent.
    2. Publish the intent durably under its name. Commit point; no record has a number before that.
    3. Give each draft its number, and sync the directory.
    4. Remove the intent. If a power cut brings it back, all its records exist.
    """

    def __init__(self, commit_id: str, planned: Sequence[Planned], records: Directory, intents: Directory) -> None:
        """`records` is the directory of the stream, `intents` that of all intents."""
        self._planned = planned
        mark = durable.new_mark()
        self.intent = Intent(commit_id, tuple(each.as_step() for each in planned), drafts=mark)
        self._name = intent_name(commit_id)
        self._location = planned[0].location
        self._records = records
        self._intents = intents
        self._drafts: list[str] = []
        self._draft_of_intent = ""

    def write(self) -> None:
        """Step 1."""
        mark, numbered = self.intent.drafts, self._location.numbered
        content = encode(self.intent)
        try:
            bulk = are_many(len(self._planned)) and _on_one_file_system(self._records, self._intents)
            contents = ((numbered(each.at), each.content) for each in self._planned)
            if bulk:
                self._drafts = durable.write_drafts(self._records, contents, mark)
            else:
                for name, record in contents:
                    self._drafts.append(durable.write_draft(self._records, name, record, mark=mark))
            self._draft_of_intent = durable.write_draft(self._intents, self._name, content, durable=not bulk, mark=mark)
            if bulk:
                _sync_file_system(self._records)
        except BaseException:
            self._discard()
            raise

    def publish_intent(self) -> None:
        """Step 2, the commit point: from here on, this or another process applies the batch."""
        draft, self._draft_of_intent = self._draft_of_intent, ""  # published or discarded
        try:
            durable.publish_new(self._intents, draft, self._name, often=True)
            durable.sync_names(self._intents, self._name)
        except BaseException:
            self._discard()
            raise

    def apply(self) -> list[int]:
        """Steps 3 and 4; return the numbers of the records, in order."""
        numbers: list[int] = []
        numbered, rename = self._location.numbered, durable.rename_new
        number = 0
        try:
            for each, draft in zip(self._planned, self._drafts, strict=True):
                number = max(each.at, number + 1)
                try:
                    done = rename(self._records, draft, numbered(number))
                except FileExistsError:
                    done = False
                if not done:
                    number = publish_number(self._records, self._location, draft, number, each.content)
                numbers.append(number)
        except BaseException:
            self._discard()
            raise
        durable.sync_names(self._records)
        durable.remove_in(self._intents, self._name, durable=False)
        return numbers

    def _discard(self) -> None:
        """Remove all drafts; published records are not affected, because they have other names."""
        if self._draft_of_intent:
            durable.discard(self._intents, self._draft_of_intent)
        for draft in self._drafts:
            durable.discard(self._records, draft)


def _on_one_file_system(one: Directory, other: Directory) -> bool:
    if one.fd is None or other.fd is None:
        return False
    try:
        return calls.fstat(one.fd).st_dev == calls.fstat(other.fd).st_dev
    except OSError as error:
        raise io_failure("examine", one.shown, error) from error


def _sync_file_system(directory: Directory) -> None:
    try:
        calls.sync_filesystem(directory.fd or 0)
    except OSError as error:
        raise io_failure("sync the filesystem of", directory.shown, error) from error
