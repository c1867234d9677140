"""Wait notes: files that record the waiters of file locks and repository locks.

All processes that could be in a deadlock with the writer of a note read its directory. No lock depends on a note. Its
writer keeps it locked during the wait, so neither pids nor ages decide whether it counts (step 3 of the wait notes in
docs/protocols/waits.md):

- The writer creates the file under a new ticket and locks it; if the file was removed in between, it starts again. Then
  it writes the note.
- A reader tries the lock in shared mode. If that succeeds, the waiter is gone, and the reader removes the note. Tickets
  are never reused, so no reader removes a newer note.
- The writer removes the note when its wait ends. A killed writer leaves that to the next reader.

If a note cannot be written (a full disk, another user's directory), others do not see the wait, and may wait longer.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import parse_instant
from holdfast.errors import Failure, JsonInvalid
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, opened
from holdfast.leases.deadlock import Participant, Resource, WaitEdge, is_dead, process_ids
from holdfast.locks import flock
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.identity import Holder, current_vantage

SUFFIX = ".json"
MOST_BYTES = 64 << 10
_NO_LINKS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _NO_LINKS | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_TRUNC | _NO_LINKS | getattr(os, "O_NONBLOCK", 0)
_READERS = 5.0  # how long readers of a note that is being created may keep it locked
_TEXTS = ("ticket", "kind", "name", "place", "since", "agent", "actor", "purpose", "proof")


class WaitNote(NamedTuple):
    """A wait for a lock. `agent` is the process on whose behalf the holder waits, if any; `above` are its ancestors.
    `proof` is the proof of the lease that it works under, if it knows one."""

    ticket: str
    thing: Resource
    since: str
    holder: Holder
    agent: str = ""
    above: tuple[str, ...] = ()
    actor: str = ""
    purpose: str = ""
    shared: bool = False
    proof: str = ""

    def as_wait(self) -> WaitEdge:
        holder_id, machine = self.holder.holder_id, (self.holder.boot_id, self.holder.pid_namespace)
        waiter = Participant(
            f"{self.actor}, {holder_id}" if self.actor else holder_id,
            processes=process_ids((holder_id, self.agent), *machine),
            above=process_ids(self.above, *machine),
            actor=self.actor,
            proofs=frozenset((self.proof,)) if self.proof else frozenset(),
        )
        return WaitEdge(self.thing, waiter, self.since, self.ticket, self.shared)

    def as_record(self) -> dict[str, object]:
        """The fields of the note, as they are written."""
        fields = self._asdict()
        thing, holder = fields.pop("thing"), fields.pop("holder")
        return {**fields, **thing._asdict(), **holder.as_record(), "above": list(self.above)}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> WaitNote | None:
        """The note in a record; None if the record is not a note."""
        texts: dict[str, Any] = {name: record.get(name) for name in _TEXTS}
        above, holder = record.get("above"), Holder.from_record(record)
        if holder is None or not isinstance(above, list) or not all(isinstance(each, str) for each in texts.values()):
            return None
        try:
            parse_instant(texts["since"])
        except ValueError:
            return None
        thing = Resource(*(texts.pop(name) for name in Resource._fields))
        shared = record.get("shared") is True
        return cls(thing=thing, holder=holder, above=tuple(map(str, above)), shared=shared, **texts)


class Posted:
    """A note that was written to one or more directories."""

    def __init__(self, locker: FileLocker, guards: Sequence[LockGuard]) -> None:
        self._locker = locker
        self._guards = guards

    def take_down(self) -> None:
        """Remove the note; idempotent."""
        for guard in self._guards:
            if guard.held:  # not in a forked child, whose parent still waits
                note = Path(guard.path)
                with contextlib.suppress(Failure), Directory.open(note.parent) as directory:
                    durable.remove_in(directory, note.name, durable=False)
            guard.release()
        self._locker.close()


class WaitNotes:
    """The notes of one directory, or of several that are read as one. `post` creates a missing directory if its parent
    exists. On Windows, where a locked file cannot be read, there are no notes."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = () if sys.platform == "win32" else tuple(dict.fromkeys(directories))

    def post(self, note: WaitNote) -> Posted:
        """Write a note for all readers of these directories."""
        locker = FileLocker(_READERS, follow_links=False)
        content = strictjson.encode(note.as_record(), what="a note", limit=MOST_BYTES, string_keys=True)
        guards: list[LockGuard] = []
        posted = Posted(locker, guards)
        try:
            for directory in self._directories:
                with (
                    contextlib.suppress(Failure, OSError),
                    Directory.open(directory.parent) as parent,
                    parent.enter(directory.name, create=True) as notes,
                ):
                    name = f"{note.ticket}{SUFFIX}"
                    guards.append(locker.lock_exclusive(notes.where(name)))
                    _write(notes, name, content)
        except BaseException:
            posted.take_down()
            raise
        return posted

    def notes(self, *, sweep: bool = True) -> list[WaitNote]:
        """The notes of all current waiters, oldest first. `sweep` removes the notes of former waiters."""
        found = {note.ticket: note for each in self._directories for note in _notes_in(each, sweep=sweep)}
        return sorted(found.values(), key=lambda each: (each.since, each.ticket))


def _write(directory: Directory, name: str, content: bytes) -> None:
    with opened(directory.at(name), _WRITE, dir_fd=directory.fd) as descriptor:
        calls.write(descriptor, content)


def _notes_in(path: Path, *, sweep: bool) -> Iterator[WaitNote]:
    with contextlib.suppress(Failure), Directory.open(path) as directory:
        for name in sorted(directory.names()):
            if name.endswith(SUFFIX):
                note = _read(directory, name, sweep=sweep)
                if note is not None and f"{note.ticket}{SUFFIX}" == name:
                    yield note


def _read(directory: Directory, name: str, *, sweep: bool) -> WaitNote | None:
    """The note in a file, or None if its writer no longer waits. With `sweep`, remove such a note."""
    with flock.without_forks():  # a forked child's copy of this descriptor would keep the writer from locking its note
        try:
            with opened(directory.at(name), _READ, dir_fd=directory.fd) as descriptor:
                over = flock.try_lock(descriptor, True)
                note = _parsed(calls.read(descriptor, MOST_BYTES))
                if over and sweep and _may_be_swept(note):
                    calls.unlink(directory.at(name), dir_fd=directory.fd)
        except OSError:
            return None  # removed meanwhile
    return None if over or note is None or is_dead(note.holder) else note


def _may_be_swept(note: WaitNote | None) -> bool:
    """Whether a free lock proves that the waiter is gone: machines that share a filesystem may not share its locks."""
    return note is None or note.holder.boot_id == current_vantage().boot_id or is_dead(note.holder)


def _parsed(content: bytes) -> WaitNote | None:
    try:
        record = strictjson.decode(content, limit=MOST_BYTES)
    except JsonInvalid:
        return None  # not written yet
    return WaitNote.from_record(record) if isinstance(record, dict) else None
