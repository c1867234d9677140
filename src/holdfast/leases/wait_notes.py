"""Notes of those who wait for locks that say nothing of their waiters: file locks and repository locks.

A note is a file in a directory where those look who may wait in a circle with its writer. It is there for
their eyes only: no lock depends on it. Its writer holds a file lock on it as long as it waits, so nobody
ever has to guess whether a note still counts:

1. Make the file under a new ticket and lock it; if it was swept in between, again. Only then write.
2. Who reads tries the lock, shared. Has it been had, nobody waits there any more: the note is swept. A
   ticket is never used twice, so what is swept is never a later one.
3. At the end of the wait the file is removed. Who dies leaves it to be swept.

What cannot be written (a full disk, a directory that is not ours) is not seen by others: that costs time, in
the worst case, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import parse_instant
from holdfast.errors import Failure, JsonInvalid
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import make_directories
from holdfast.fs.paths import exists
from holdfast.leases.deadlock import Party, Thing, WaitEdge, process_id
from holdfast.locks import flock
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.flock import without_forks
from holdfast.locks.identity import Holder, Liveness, current_vantage, liveness

SUFFIX = ".json"
MOST_BYTES = 64 << 10
_READ = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_WRITE = os.O_WRONLY | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_SWEEPERS = 5.0
"""How long others who look at a note that is being made may take to let go of it."""


class WaitNote(NamedTuple):
    """Who waits for which lock, since when. `agent` is for whom, `above` are those that it descends from.

    `proof` is that of the lease that it works under, if it knows one.
    """

    ticket: str
    thing: Thing
    since: str
    holder: Holder
    agent: str = ""
    above: tuple[str, ...] = ()
    actor: str = ""
    purpose: str = ""
    shared: bool = False
    proof: str = ""

    @property
    def who(self) -> str:
        """The one who waits, in words."""
        return f"{self.actor}, {self.holder.holder_id}" if self.actor else self.holder.holder_id

    def as_wait(self) -> WaitEdge:
        """The same in a picture in which circles are looked for."""
        party = Party(
            self.who,
            processes=self._processes(self.holder.holder_id, self.agent),
            above=self._processes(*self.above),
            actor=self.actor,
            proofs=frozenset((self.proof,)) if self.proof else frozenset(),
        )
        return WaitEdge(self.thing, party, self.since, self.ticket, self.shared)

    def as_record(self) -> dict[str, object]:
        """What is written."""
        return {
            "ticket": self.ticket,
            **self.thing._asdict(),
            "since": self.since,
            **self.holder.as_record(),
            "agent": self.agent,
            "above": list(self.above),
            "actor": self.actor,
            "purpose": self.purpose,
            "shared": self.shared,
            "proof": self.proof,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> WaitNote | None:
        """Read what was written; None if it is no note."""
        texts = {
            name: record.get(name)
            for name in ("ticket", "kind", "name", "place", "since", "agent", "actor", "purpose", "proof")
        }
        above, holder = record.get("above"), Holder.from_record(record)
        if not all(isinstance(each, str) for each in texts.values()):
            return None
        if holder is None or not isinstance(above, list):
            return None
        told = {name: str(value) for name, value in texts.items()}
        try:
            parse_instant(told["since"])
        except ValueError:
            return None
        return cls(
            told["ticket"],
            Thing(told["kind"], told["name"], told["place"]),
            told["since"],
            holder,
            told["agent"],
            tuple(map(str, above)),
            told["actor"],
            told["purpose"],
            record.get("shared") is True,
            told["proof"],
        )

    def _processes(self, *holder_ids: str) -> frozenset[str]:
        here = self.holder
        return frozenset(process_id(each, here.boot_id, here.pid_namespace) for each in holder_ids if each)


def new_ticket() -> str:
    """A ticket that nobody ever had."""
    return str(uuid.uuid4())


class Posted:
    """A note that is there, in one directory or several, until it is taken down."""

    def __init__(self, locker: FileLocker, guards: Sequence[LockGuard]) -> None:
        self._locker = locker
        self._guards = guards

    def take_down(self) -> None:
        """Remove the note; twice is fine."""
        for guard in self._guards:
            if guard.held:  # not in a forked child, whose parent still waits
                with contextlib.suppress(OSError):
                    calls.unlink(guard.path)
            guard.release()
        self._locker.close()


class WaitNotes:
    """Where notes are posted and read: one directory, or several that are read as one.

    A directory is made when it is needed, if that in which it is to be is there. On Windows, where what is
    locked cannot be read, there are none.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = () if sys.platform == "win32" else tuple(dict.fromkeys(directories))

    def post(self, note: WaitNote) -> Posted:
        """Show a note to all who look here."""
        locker = FileLocker(_SWEEPERS)
        content = strictjson.encode(note.as_record(), what="a note", limit=MOST_BYTES, string_keys=True)
        guards: list[LockGuard] = []
        posted = Posted(locker, guards)
        try:
            for directory in self._directories:
                with contextlib.suppress(Failure, OSError):
                    _make(directory)
                    guard = locker.lock_exclusive(str(directory / f"{note.ticket}{SUFFIX}"))  # 1.
                    guards.append(guard)
                    _write(guard.path, content)
        except BaseException:
            posted.take_down()
            raise
        return posted

    def notes(self, *, sweep: bool = True) -> list[WaitNote]:
        """The notes of all who wait at this moment, the oldest first; those of others are swept."""
        found = {note.ticket: note for each in self._directories for note in _notes_in(each, sweep=sweep)}
        return sorted(found.values(), key=lambda each: (each.since, each.ticket))


def _make(directory: Path) -> None:
    if not exists(directory) and exists(directory.parent):
        make_directories(directory)


def _write(path: str, content: bytes) -> None:
    descriptor = calls.open(path, _WRITE)
    try:
        calls.write(descriptor, content)
    finally:
        calls.close(descriptor)


def _notes_in(directory: Path, *, sweep: bool) -> Iterator[WaitNote]:
    try:
        names = sorted(calls.listdir(directory))
    except OSError:
        return
    for name in names:
        if name.endswith(SUFFIX):
            note = _look_at(str(directory / name), sweep=sweep)
            if note is not None and f"{note.ticket}{SUFFIX}" == name:
                yield note


def _look_at(path: str, *, sweep: bool) -> WaitNote | None:
    """The note at a path, if its writer waits; if it does not, the note may be swept: step 2."""
    with without_forks():  # a child with a copy of this descriptor would keep the writer from its note
        try:
            descriptor = calls.open(path, _READ)
        except OSError:
            return None  # taken down meanwhile
        try:
            over = flock.try_lock(descriptor, True)
            note = _parsed(calls.read(descriptor, MOST_BYTES))
            if over and sweep and _may_be_swept(note):
                calls.unlink(path)
        except OSError:
            return None
        finally:
            calls.close(descriptor)
    if over or note is None or liveness(note.holder) is Liveness.DEAD:
        return None
    return note


def _may_be_swept(note: WaitNote | None) -> bool:
    """Whether that it could be locked says something: on a shared file system, locks may not be shared."""
    if note is None or note.holder.boot_id == current_vantage().boot_id:
        return True
    return liveness(note.holder) is Liveness.DEAD


def _parsed(content: bytes) -> WaitNote | None:
    try:
        record = strictjson.decode(content, limit=MOST_BYTES)
    except JsonInvalid:
        return None  # not written yet
    return WaitNote.from_record(record) if isinstance(record, dict) else None
