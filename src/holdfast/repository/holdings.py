"""`Holding`, the record that describes leases, claims and locks alike; locks and claims of issues as holdings."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.clock import SYSTEM_CLOCK, ClockReading, Now, format_duration, format_instant
from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.issues.model import CLAIMS, AnyIssue, ClaimRecord, Issue, IssueSummary, State
from holdfast.issues.projection import IndexUnusable, projection_of
from holdfast.issues.reading import look_at, read_claims
from holdfast.issues.rules import Broken, IssueSet
from holdfast.leases.wait_notes import WaitNote, WaitNotes
from holdfast.locks import identity
from holdfast.locks.identity import Liveness, boot_clock_id, described_liveness
from holdfast.locks.kernel_locks import FileLockHolder, find_holders, find_locked_files, inode_of, with_queue
from holdfast.locks.repo_lock import RepoLock
from holdfast.repository.waits import FILE_LOCK, QUEUE, is_note_of, waits_of_data
from holdfast.store.model import Store, Unreadable
from holdfast.store.open import open_store


class Reclaim(NamedTuple):
    """Whether a holding can be taken over safely; and the command, or what to wait for."""

    safe: bool
    how: str


class HoldingWaiter(NamedTuple):
    """A waiter, and its position in the queue, from 1; None if waiters are not served in order."""

    who: str
    place: int | None
    since: str | None
    purpose: str = ""
    liveness: Liveness = Liveness.UNKNOWN
    process: str | None = None

    def as_record(self) -> dict[str, object]:
        return {**self._asdict(), "liveness": self.liveness.value}


class Holding(NamedTuple):
    """A lease, claim or lock; unknown fields are None. `who` is the actor if known, else the process. `title` is that
    of a claimed issue; `ttl` is how long the lease or claim lasts after a renewal."""

    kind: str
    what: str
    who: str
    since: str | None = None
    until: str | None = None
    time_left: float | None = None
    liveness: Liveness = Liveness.UNKNOWN
    purpose: str = ""
    waiting: tuple[HoldingWaiter, ...] = ()
    reclaim: Reclaim = Reclaim(False, "")
    process: str | None = None
    title: str = ""
    ttl: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is a lock of Holdfast's own, which a command holds while it runs."""
        return self.kind == "file lock" and self.what.startswith(_OURS)

    def as_record(self) -> dict[str, object]:
        return {
            **self._asdict(),
            "liveness": self.liveness.value,
            "waiting": [each.as_record() for each in self.waiting],
            "reclaim": self.reclaim._asdict(),
        }


GUARDS = (".jvs/guards", ".jvs/audit", ".jit", ".jit/issues", "ledger", ".holdfast")
"""The directories of our own locks, which are found even if their holder hides its open files."""

TURNSTILE = "ledger/.ledger.lock.turnstile"  # the queue for the ledger lock: listed only with that lock
HIDDEN = (".jvs/waits/", ".jvs/tmp/")  # wait notes and scratch directories: other holdings show their processes
_OURS = (".jvs/", ".jit/", ".holdfast/", "ledger/", "locks/")


def file_locks(root: Path, notes: Sequence[WaitNote] = ()) -> Iterator[Holding]:
    """All locks on files below `root`, with their waiters; and locks elsewhere for which there are wait notes."""
    top = calls.realpath(root)  # as the kernel names what is open
    noted = {note.thing.name for note in notes if note.thing.kind == FILE_LOCK}
    below = find_locked_files(top, [os.path.join(top, each) for each in GUARDS])
    for path in (*below, *sorted(noted.difference(below))):
        shown = os.path.relpath(path, top) if path.startswith(top + "/") else path
        if not shown.endswith(QUEUE) and shown != TURNSTILE and not shown.startswith(HIDDEN):
            yield from _file_lock(path, shown, notes)


def waiting_at(path: Path) -> tuple[HoldingWaiter, ...]:
    """The waiters for the lock on a file."""
    return _queue(str(path), find_holders(path) or [], ())


def _file_lock(path: str, shown: str, notes: Sequence[WaitNote]) -> Iterator[Holding]:
    seen = find_holders(path) or []
    waiting = _queue(path, seen, notes)
    for holder in (each for each in seen if not each.waiting):
        yield Holding(
            kind="file lock",
            what=shown,
            who=_who(holder),
            liveness=Liveness.ALIVE,  # the kernel drops the locks of dead processes
            purpose=holder.command or "",
            waiting=waiting,
            reclaim=_reclaim(path, shown, holder),
        )


def _reclaim(path: str, shown: str, holder: FileLockHolder) -> Reclaim:
    if shown.startswith(_OURS):
        return Reclaim(False, "wait: it is held for the duration of one command")
    options = (" --shared" if holder.shared else "") + (" --fair" if _is_fair(path) else "")
    return Reclaim(False, f"wait: holdfast lock run {shlex.quote(path)}{options} --wait 10m -- COMMAND")


def _is_fair(path: str) -> bool:
    """Whether waiters for the lock are served in turn."""
    return calls.exists(path + QUEUE)


def _queue(path: str, seen: list[FileLockHolder], notes: Sequence[WaitNote]) -> tuple[HoldingWaiter, ...]:
    """The waiters that the kernel knows, and those that poll, which have wait notes. Only the next waiter for a fair
    lock has a position: the kernel serves waiters in no particular order."""
    inode = inode_of(path)
    about = (each for each in reversed(notes) if each.thing.kind == FILE_LOCK and inode in each.thing.place.split())
    noted = {note.holder.pid: note for note in about} if inode else {}
    blocked = [each for each in seen if each.waiting]
    waiting = []
    for each in with_queue(path, blocked):
        note = noted.pop(each.pid or 0, None)
        next_one = _is_fair(path) and blocked == [each]
        waiting.append(_waiting(_who(each), 1 if next_one else None, note, each.command))
    rest = sorted(noted.values(), key=lambda note: note.since)
    return (*waiting, *(_waiting(f"pid {note.holder.pid}", None, note, None) for note in rest))


def _waiting(name: str, position: int | None, note: WaitNote | None, command: str | None) -> HoldingWaiter:
    """A waiter; `since` is known only if it waited long enough to leave a note."""
    if note is None:
        return HoldingWaiter(name, position, None, command or "", Liveness.ALIVE)
    purpose = command or identity.command_of(note.holder.pid) or ""
    return HoldingWaiter(note.actor or name, position, note.since, purpose, Liveness.ALIVE, note.holder.holder_id)


def _noted(note: WaitNote) -> HoldingWaiter:
    process = note.holder.holder_id
    return HoldingWaiter(note.actor or process, None, note.since, note.purpose, Liveness.ALIVE, process)


def _who(each: FileLockHolder) -> str:
    return f"pid {each.pid}" if each.pid else "a process that cannot be seen from here"


def repo_lock_holdings(locks: RepoLock, notes: Sequence[WaitNote]) -> Iterator[Holding]:
    """All repository locks with their waiters, which poll and so have no order."""
    known = (*notes, *WaitNotes([waits_of_data(locks.data_dir)]).notes(sweep=False))
    waiting = [note for note in {each.ticket: each for each in known}.values() if is_note_of(note, locks)]
    for repo_id, state in locks.states().items():
        if state is None:
            continue
        info, holder = state.info, state.info.holder if state.info else None
        created_at = info.created_at if info else None
        pid = f"pid {info.pid}" if info and info.pid else "somebody"
        command = f"holdfast repo-lock run {repo_id} --wait 10m -- COMMAND"
        yield Holding(
            kind="repo lock",
            what=repo_id,
            who=holder.holder_id if holder else pid,
            since=None if created_at is None else format_instant(created_at),
            liveness=state.liveness,
            purpose=info.cmd if info else "",
            waiting=tuple(_noted(note) for note in waiting if note.thing.name == repo_id),
            reclaim=Reclaim(state.stale, command if state.stale else f"wait: {command}"),
        )


# --- Claims of issues ----------------------------------------------------------------------------------


def issue_claims(root: Path, address: str | None, issues: IssueSet[IssueSummary] | None = None) -> Iterator[Holding]:
    """The claims of issues. `issues` are the issues from an earlier read, if none has changed since."""
    with contextlib.closing(open_store(root, address)) as store:
        reading = ClockReading(boot_clock_id(), SYSTEM_CLOCK.boot(), store.skew)
        broken: Failure | None = None
        for issue_id, issue, record, now in _claimed(store, root, reading, issues):
            if isinstance(record, Broken):
                broken = broken or record.failure  # raised after the others
                continue
            if record is None or record.claim is None:
                continue
            claim = record.claim
            alive, left = described_liveness(claim.holder), claim.time_left(now, for_others=True)
            is_queued = claim.held_for is not msgspec.UNSET
            gated = issue is not None and issue.state is State.GATED
            if gated and left <= 0:
                continue  # nobody can work on it: it waits for its gates
            yield Holding(
                kind="issue",
                what=issue_id,
                who=claim.assignee,
                since=claim.claimed_at,
                until=None if is_queued else claim.expires_at,
                time_left=None if is_queued else left,
                liveness=alive,
                purpose=claim.purpose,
                reclaim=_reclaim_issue(issue_id, claim.held_for, left, alive) if not gated else _WAITS_FOR_GATES,
                process=claim.holder.get("holder_id"),
                title="" if issue is None else issue.title,
                ttl=claim.ttl,
            )
        if broken is not None:
            raise broken


class _Claimed(NamedTuple):
    """An issue that may have a claim, if it can be read, with the record of its claims, and the store's time."""

    issue_id: str
    issue: AnyIssue | None
    record: ClaimRecord | Broken | None
    now: Now


def _claimed(
    store: Store, root: Path, reading: ClockReading, issues: IssueSet[IssueSummary] | None
) -> Iterator[_Claimed]:
    """The issues that somebody works on, or that cannot be read. If the projection cannot tell which these are, every
    issue that was ever claimed."""
    try:
        seen = projection_of(store, root).look(reading, finished=False) if issues is None else issues
    except IndexUnusable:
        now = reading.at(store.now())
        for issue_id, document in store.scan(CLAIMS.tolerant()):
            issue, found = look_at(store, issue_id), document.record
            record = Broken(issue_id, found.failure) if isinstance(found, Unreadable) else found
            yield _Claimed(issue_id, issue if isinstance(issue, Issue) else None, record, now)
        return
    now = reading.at(store.now()) if seen is issues else seen.moment
    working = {each.id: each for each in seen.notable() if each.state in (State.IN_PROGRESS, State.GATED)}
    for issue_id, claims in read_claims(store, sorted({*working, *seen.broken_issues})).items():
        yield _Claimed(issue_id, working.get(issue_id), claims, now)


_WAITS_FOR_GATES = Reclaim(False, "the work is done; it waits for its gates: holdfast gate check")


def _reclaim_issue(issue_id: str, held_for: str | msgspec.UnsetType, left: float, alive: Liveness) -> Reclaim:
    if held_for is not msgspec.UNSET:
        return Reclaim(False, f"its work is queued to land; to withdraw that: holdfast landing cancel {held_for}")
    command = f"holdfast issue claim {issue_id[:8]}"
    if left <= 0:
        return Reclaim(True, command)
    gone = "its process is gone; " if alive is Liveness.DEAD else ""
    return Reclaim(False, f"{gone}free in {format_duration(left)} unless it is renewed, then: {command}")
