"""What is known about something that somebody holds, in one form for all kinds of locks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.leases.wait_notes import WaitNote
from holdfast.locks import identity
from holdfast.locks.identity import Liveness
from holdfast.locks.kernel_locks import FileLockHolder, find_holders, find_locked_files, inode_of, with_queue
from holdfast.repository.waits import FILE_LOCK, QUEUE


class Reclaim(NamedTuple):
    """Whether what is held can be had without harm, and how: a command, or what to wait for."""

    safe: bool
    how: str


class HoldingWaiter(NamedTuple):
    """One who waits, and in which place, from 1; None if there is no order in which they are served."""

    who: str
    place: int | None
    since: str | None
    purpose: str = ""
    liveness: Liveness = Liveness.UNKNOWN

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {**self._asdict(), "liveness": self.liveness.value}


class Holding(NamedTuple):
    """Something that somebody holds. What is not known is None.

    `who` is the name that its holder gave itself, else its process; `process` is that in any case.
    """

    kind: str
    what: str
    who: str
    since: str | None
    until: str | None
    time_left: float | None
    liveness: Liveness
    purpose: str
    waiting: tuple[HoldingWaiter, ...]
    reclaim: Reclaim
    process: str | None = None

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {
            **self._asdict(),
            "liveness": self.liveness.value,
            "waiting": [each.as_record() for each in self.waiting],
            "reclaim": self.reclaim._asdict(),
        }


GUARDS = (".jvs/guards", ".jvs/audit", ".jit", ".jit/issues", "ledger", ".holdfast")
"""Where our own are: they are found even if their holder cannot be looked into."""

TURNSTILE = "ledger/.ledger.lock.turnstile"
"""Where our own processes line up for the ledger lock: shown with that, not by itself."""

NOTES = ".jvs/waits/"
"""Locked by those who wait, for as long as they do: they are shown with what they wait for."""

_OURS = (".jvs/", ".jit/", ".holdfast/", "ledger/", "locks/")


def file_locks(root: Path, notes: Sequence[WaitNote] = ()) -> Iterator[Holding]:
    """Each lock on a file below `root`, with those who wait for it; elsewhere, each that is waited for."""
    top = calls.realpath(root)  # as the kernel names what is open
    noted = {note.thing.name for note in notes if note.thing.kind == FILE_LOCK}
    below = find_locked_files(top, [os.path.join(top, each) for each in GUARDS])
    for path in (*below, *sorted(noted.difference(below))):
        shown = os.path.relpath(path, top) if path.startswith(top + "/") else path
        if not shown.endswith(QUEUE) and shown != TURNSTILE and not shown.startswith(NOTES):
            yield from _file_lock(path, shown, notes)


def waiting_at(path: Path) -> tuple[HoldingWaiter, ...]:
    """Those who wait for the lock on a file."""
    return _line(str(path), find_holders(path) or [], ())


def _file_lock(path: str, shown: str, notes: Sequence[WaitNote]) -> Iterator[Holding]:
    seen = find_holders(path) or []
    waiting = _line(path, seen, notes)
    for holder in (each for each in seen if not each.waiting):
        yield Holding(
            kind="file lock",
            what=shown,
            who=_who(holder),
            since=None,
            until=None,
            time_left=None,
            liveness=Liveness.ALIVE,  # the kernel drops the locks of the dead
            purpose=holder.command or "",
            waiting=waiting,
            reclaim=_reclaim(path, shown, holder),
        )


def _reclaim(path: str, shown: str, holder: FileLockHolder) -> Reclaim:
    if shown.startswith(_OURS):
        return Reclaim(False, "wait: it is held for the duration of one command")
    options = " --shared" if holder.shared else ""
    options += " --fair" if _is_fair(path) else ""
    command = f"holdfast lock run {shlex.quote(path)}{options} --wait 10m -- COMMAND"
    return Reclaim(False, f"wait: {command}")


def _is_fair(path: str) -> bool:
    """Whether those who wait for the lock are served in turn: then who comes has to line up too."""
    try:
        calls.stat(path + QUEUE)
    except OSError:
        return False
    return True


def _line(path: str, seen: list[FileLockHolder], notes: Sequence[WaitNote]) -> tuple[HoldingWaiter, ...]:
    """Those who wait: as the kernel has them, and by their notes those who ask again and again instead.

    The kernel serves them in no order. Of a fair lock it is known whose turn it is, and no more than that.
    """
    told = {note.holder.pid: note for note in reversed(notes) if _is_about(note, path)}
    at_the_lock = [each for each in seen if each.waiting]
    waiting = []
    for each in with_queue(path, at_the_lock):
        note = told.pop(each.pid or 0, None)
        next_one = _is_fair(path) and at_the_lock == [each]
        waiting.append(_waiting(_who(each), 1 if next_one else None, note, each.command))
    rest = sorted(told.values(), key=lambda note: note.since)
    return (*waiting, *(_waiting(f"pid {note.holder.pid}", None, note, None) for note in rest))


def _is_about(note: WaitNote, path: str) -> bool:
    inode = inode_of(path)
    return note.thing.kind == FILE_LOCK and bool(inode) and inode in note.thing.place.split()


def _waiting(who: str, place: int | None, note: WaitNote | None, command: str | None) -> HoldingWaiter:
    """One who waits. `since` is known of those who wait long enough to have left a note."""
    if note is None:
        return HoldingWaiter(who, place, None, command or "", Liveness.ALIVE)
    purpose = command or identity.command_of(note.holder.pid) or ""
    return HoldingWaiter(note.actor or who, place, note.since, purpose, Liveness.ALIVE)


def _who(each: FileLockHolder) -> str:
    return f"pid {each.pid}" if each.pid else "a process that cannot be seen from here"
