"""Archived streams: the first records of a stream on a server are moved to *segments*, files of JSON lines.

1. A segment is written durably.
2. One transaction adds it to the document of the stream. Commit point.
3. The records are deleted from the server, from the newest to the oldest, after a tombstone has replaced the last one.

A kill before 2 leaves a file that nothing reads; one after it leaves records that the next archive or the doctor
deletes. The document also has the state that later readers need of the archived records, so they need no segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol

import msgspec

from holdfast.clock import format_instant, parse_instant
from holdfast.errors import AlreadyExists, Archived, Changed, Corrupt, Failure, Refused
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories, resolved
from holdfast.store.model import (
    Append,
    Create,
    Decision,
    Entry,
    Instant,
    Key,
    Record,
    Replace,
    Store,
    Stream,
    StructCodec,
    View,
)

TOMBSTONE = b"The records up to this one were archived. Reading on needs a newer version of Holdfast."
"""Replaces the last archived record. Not JSON, so older versions fail instead of starting after it."""
MOST_BYTES = 64 << 20  # in a segment, which is written and read as a whole


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file with the records `first` to `last`: where `holder_id` has written it, and what it contained."""

    first: int
    last: int
    file: str
    sha256: str
    size: int
    archived_at: Instant
    holder_id: str


class Archive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of an archived stream: its segments without a gap, and the state after the last of their records."""

    segments: tuple[Segment, ...]
    state: dict[str, Any]

    @property
    def last(self) -> int:
        """The position of the last archived record."""
        return self.segments[-1].last


_CODEC = StructCodec(Archive, pretty=False)
ARCHIVES: Mapping[str, Key[Archive]] = {
    "ledger/events": Key("ledger/archive", _CODEC),
    "jvs/audit": Key("jvs/audit-archive", _CODEC),
}
"""The documents of the streams that can be archived."""
_NOUNS = {"ledger/events": "event", "jvs/audit": "audit entry"}


def archive_of(store: Store, stream: str) -> Archive | None:
    """The document of a stream; None if nothing was archived."""
    document = None if store.files is not None else store.read(ARCHIVES[stream])
    return None if document is None else document.record


def unreadable(store: Store, stream: str, after: int, tombstone: int) -> Failure:
    """The failure to raise for a reader that has read up to `after` and comes to a tombstone."""
    archive = archive_of(store, stream) if stream in ARCHIVES else None
    if archive is None or archive.last < tombstone:
        message = f"the records of {stream} up to {tombstone} are missing, and no archive lists them"
        return Corrupt(message, source=stream, problem=message)
    number = after + 1
    segment = next(each for each in archive.segments if number <= each.last)
    host = segment.holder_id.partition(":")[0]
    message = f"{_NOUNS[stream]} {number} was archived: it is in {segment.file}, written on {host}"
    return Archived(message, archive, archive.last, stream=stream, number=number, file=segment.file)


class ArchivedState(Protocol[Record]):
    """The state of the archived records that later readers need."""

    def add(self, entry: Entry[Record]) -> None: ...
    def as_record(self) -> dict[str, Any]: ...


class Archivable(NamedTuple, Generic[Record]):
    """How a stream is archived: the first part of its file names, the line and the time of a record, and the state
    after the records that have been archived."""

    stream: Stream[Record]
    name: str
    line: Callable[[Entry[Record]], bytes]
    at: Callable[[Record], object]
    state: Callable[[Archive | None], ArchivedState[Record]]


Also = Callable[[View, float, Segment], Append]


def archive(
    store: Store,
    what: Archivable[Record],
    directory: Path,
    *,
    keep: int,
    before: float | None = None,
    holder_id: str,
    also: tuple[Stream[Any], Also] | None = None,
    dry_run: bool = False,
) -> list[Segment]:
    """Archive all but the last `keep` records of a stream, or only those before the first one that is not older than
    the instant `before`; and finish what a killed process has begun. Commit point: the transaction of each segment,
    which also appends a record to the stream `also`, if it is given."""
    name, key = what.stream.name, ARCHIVES[what.stream.name]
    if (server := store.server) is None:
        message = f"{name} is in plain files, which other programs read and count: it cannot be archived"
        raise Refused(message, hint="Only streams on a server can: 'holdfast migrate' moves the records to one.")
    done, made = archive_of(store, name), list[Segment]()
    if done is not None and not dry_run:
        server.drop(name, done.last)
    server.seal(what.stream)
    until, directory = server.end(what.stream) - max(1, keep), resolved(directory)
    while True:
        content, last, state = _collect(store, what, done, until, before)
        if not content:
            return made
        first, now = done.last + 1 if done else 1, format_instant(store.now())
        path, digest = directory / f"{what.name}-{first}-{last}.jsonl", hashlib.sha256(content).hexdigest()
        segment = Segment(first, last, str(path), digest, len(content), now, holder_id)
        after = Archive((*(done.segments if done else ()), segment), state)
        if not dry_run:
            _write(path, content)  # 1.
            _commit(store, key, done, after, also)  # 2.
            server.drop(name, last)  # 3.
        made.append(segment)
        done = after


def _collect(
    store: Store, what: Archivable[Record], done: Archive | None, until: int, before: float | None
) -> tuple[bytes, int, dict[str, Any]]:
    """The content of the next segment, its last position, and the state after it."""
    lines, state, last = bytearray(), what.state(done), done.last if done else 0
    for entry in store.entries(what.stream, after=last) if last < until else ():
        if entry.position > until or (before is not None and not _is_older(what.at(entry.record), before)):
            break
        line = what.line(entry) + b"\n"
        if lines and len(lines) + len(line) > MOST_BYTES:
            break
        state.add(entry)
        lines += line
        last = entry.position
    return bytes(lines), last, state.as_record()


def _is_older(at: object, before: float) -> bool:
    try:
        return parse_instant(str(at)) < before
    except ValueError:  # another program's event, without a time: as old as the one before it
        return True


def _write(path: Path, content: bytes) -> None:
    make_directories(path.parent)
    try:
        durable.create(path, content, mode=0o600)
    except AlreadyExists:  # perhaps by an archive that was killed
        if durable.read(path) != content:
            hint = "Choose another directory: this file may be a segment of another repository."
            raise AlreadyExists(f"{path} already exists, with other content", hint=hint, path=str(path)) from None
        with Directory.open(path.parent) as directory:
            durable.sync_in(directory, path.name)
            durable.sync_names(directory, path.name)


def _commit(
    store: Store, key: Key[Archive], before: Archive | None, after: Archive, also: tuple[Stream[Any], Also] | None
) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        if view.get(key) != before:
            raise Changed("another process has archived this stream meanwhile; nothing was deleted", key=key.name)
        changes = [(Create if before is None else Replace)(key, after)]
        return Decision([*changes, *([also[1](view, now, after.segments[-1])] if also else [])], None)

    store.transact([key, *([also[0]] if also else [])], decide)


# --- Segments -------------------------------------------------------------------------------------------


def read_segments(archive: Archive | None, files: Sequence[Path]) -> Iterator[bytes]:
    """The lines of all segments, which must be among the files, in any order. `Corrupt` names the first segment that is
    missing or was altered, and a file that is not a segment."""
    segments = {Path(each.file).name: each for each in archive.segments} if archive else {}
    given = {path.name: path for path in files}
    if strange := sorted(given.keys() - segments.keys()):
        raise _damaged(f"{given[strange[0]]} is not a segment of this stream", given[strange[0]])
    for name, segment in segments.items():
        if name not in given:
            raise _damaged(f"the segment {name} is missing: numbers {segment.first} to {segment.last}", segment.file)
        content = durable.read(given[name])
        if hashlib.sha256(content).hexdigest() != segment.sha256:
            raise _damaged(f"the segment {given[name]} was altered after it was archived", given[name])
        yield from content.splitlines()


def _damaged(message: str, path: object) -> Corrupt:
    hint = "Name the files of all segments. Restore this one from a copy: a segment never changes."
    return Corrupt(message, hint=hint, segment=str(path))
