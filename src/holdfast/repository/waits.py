"""Waits for file locks and repository locks, as parts of the picture in which circles are looked for.

The kernel and the lock files say who holds such a lock, but not who waits for it, nor since when. So who
waits writes a note (`holding.notes`), where those look who may wait in a circle with it: in its repository,
and in the data directory that the repository locks are kept in, for those who are in no repository.

A wait that is over within `FIRST_LOOK` leaves no trace, and a lock that is free is taken without any of this.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import make_directories
from holdfast.fs.paths import exists
from holdfast.leases.deadlock import Hold, Look, Party, Thing, WaitGraph, process_id, proof_of, refuse_circle
from holdfast.leases.queue import DeadlockWatch
from holdfast.leases.wait_notes import Posted, WaitNote, WaitNotes, new_ticket
from holdfast.locks.flock_wait import LockWait
from holdfast.locks.identity import Holder, current_holder, holder_with_pid, processes_above
from holdfast.locks.kernel_locks import HeldFlock, held_flocks, inode_of
from holdfast.locks.repo_lock import RepoLock, RepoLockState
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Store


class Elsewhere:
    """What can be held and waited for in another part of a directory. It is opened when it is first needed.

    `store` is that of the part that looks, None if it has none; `address` is where the other one is kept,
    None: in the same, or where it was settled.
    """

    def __init__(self, root: Path, store: Store | None, address: str | None = None) -> None:
        self._root = root
        self._store = store
        self._address = address
        self._opened: Store | None = None
        self._look: Look | None = None
        self._opening = threading.Lock()  # any number of threads may wait

    def __call__(self) -> WaitGraph:
        """The picture of it, as of now; an empty one if it is not in use here."""
        with self._opening:
            if self._look is None and self._is_in_use():
                self._look = self._open(self._other_store())
            look = self._look
        return WaitGraph() if look is None else look()

    def close(self) -> None:
        """Let go of what was opened here. What is being opened at this moment goes when nobody needs it."""
        if not self._opening.acquire(blocking=False):
            return  # perhaps by asking a server that is away: not to be waited for
        try:
            self._look = None
            if self._opened is not None:
                self._opened.close()
                self._opened = None
        finally:
            self._opening.release()

    def _is_in_use(self) -> bool:
        raise NotImplementedError

    def _open(self, store: Store) -> Look:
        raise NotImplementedError

    def _other_store(self) -> Store:
        from holdfast.store.open import open_store

        if self._address is None and self._store is not None:
            return self._store
        self._opened = open_store(self._root, self._address)
        return self._opened


class ClaimsElsewhere(Elsewhere):
    """The claims of the ledger of a directory, for those who wait for a lease of the repository there."""

    def _is_in_use(self) -> bool:
        from holdfast.store.open import FILES, address_of

        if self._address is not None:
            return True
        if self._store is None:
            return address_of(self._root) != FILES or exists(self._root / "ledger")
        return self._store.files is None or exists(self._store.files.path / "ledger")

    def _open(self, store: Store) -> Look:
        from holdfast.ledger.checkpoints import FileCheckpoints
        from holdfast.ledger.log import Ledger
        from holdfast.ledger.service import ClaimService

        return ClaimService(Ledger(store, shelf=FileCheckpoints(self._root))).look


class LeasesElsewhere(Elsewhere):
    """The leases of the repository of a directory, for those who wait for a claim in the ledger there."""

    def _is_in_use(self) -> bool:
        return exists(self._root / ".jvs")

    def _open(self, store: Store) -> Look:
        from holdfast.leases.service import LeaseService

        return LeaseService(store, AuditTrail(), skew=store.skew).look


class LocksElsewhere:
    """The file locks and repository locks that somebody in a repository waits for, and who holds them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self) -> WaitGraph:
        """The picture of them, as of now; an empty one if nobody ever waited for one here."""
        from holdfast.leases.wait_notes import WaitNotes

        place = waits_of_repository(self._root)
        return look_at(WaitNotes([place])) if exists(place) else WaitGraph()


FILE_LOCK, REPO_LOCK = "file lock", "repo lock"
QUEUE = ".queue"
WAITS = "waits"
_BETWEEN = " "
"""Between the files that a place names, if a lock has two: the lock itself and the queue for it."""


def waits_of_repository(root: Path) -> Path:
    """Where those leave their notes who wait for locks in a repository."""
    return root / ".jvs" / WAITS


def waits_of_data(data_dir: Path) -> Path:
    """Where all of a user's processes do who share a data directory, in a repository or not."""
    return data_dir / WAITS


def look_at(board: WaitNotes) -> WaitGraph:
    """Who waits for a lock, and who holds those that are waited for."""
    notes = board.notes()
    holds = (*_holds_of_files(notes), *_holds_of_repos(notes))
    return WaitGraph(holds, tuple(note.as_wait() for note in notes))


class WaitContext(NamedTuple):
    """Where one who waits leaves its note, and what else can be held and waited for around it."""

    board: WaitNotes
    elsewhere: Sequence[Look] = ()


def surroundings(
    root: Path | None, data_dir: Path | None, *, ledger_address: str | None = None
) -> WaitContext:
    """What is around one who waits in this repository, if it is in one, with this data directory."""
    boards: list[Path] = []
    elsewhere: list[Elsewhere] = []
    if root is not None:
        boards.append(waits_of_repository(root))
        elsewhere = [LeasesElsewhere(root, None), ClaimsElsewhere(root, None, ledger_address)]
    if data_dir is not None:
        with contextlib.suppress(Failure, OSError):  # not ours to write, or not even to look at
            make_directories(data_dir)
        boards.append(waits_of_data(data_dir))
    return WaitContext(WaitNotes(boards), elsewhere)


class LockWaits:
    """Lets the waits of one agent for file locks and repository locks be seen, and ended if they would never.

    `agent` is for whom the process waits, if not for itself; `actor` is in whose name; `lock_id` is that of
    the lease that it works under, if it knows one.
    """

    def __init__(
        self, around: WaitContext, *, agent: Holder | None = None, actor: str = "", lock_id: str = ""
    ) -> None:
        self._around = around
        self._proof = proof_of(lock_id)
        self._agent = "" if agent is None else agent.holder_id
        self._actor = actor

    def observe_file_lock(self, path: str, wait: LockWait, *, shared: bool, fair: bool) -> DeadlockWatch:
        """Look on while somebody waits for the lock on a file: for `FileLocker(observer=...)`."""
        since = time.time()

        def prepare() -> NotedWait:
            return self.for_file_lock(path, since, shared=shared, fair=fair)

        return DeadlockWatch(prepare, wait.timeout, wait.cancel)

    def for_file_lock(self, path: str, since: float, *, shared: bool, fair: bool) -> NotedWait:
        """A wait for the lock on the file at `path`. Only who waits in turn waits for who has the turn."""
        files = (path, path + QUEUE) if fair else (path,)
        place = _BETWEEN.join(filter(None, map(inode_of, files)))
        thing = Thing(FILE_LOCK, _shown(calls.realpath(path)), place)
        return NotedWait(self._around, self._note(thing, since)._replace(shared=shared))

    def for_repo_lock(self, lock: RepoLock, repo_id: str, purpose: str, since: float) -> NotedWait:
        """A wait for the lock of a repository."""
        place = f"{lock.stale_after:g}{_BETWEEN}{calls.realpath(lock.data_dir)}"
        note = self._note(Thing(REPO_LOCK, repo_id, place), since)
        return NotedWait(self._around, note._replace(purpose=purpose))

    def _note(self, thing: Thing, since: float) -> WaitNote:
        return WaitNote(
            new_ticket(),
            thing,
            format_instant(since),
            current_holder(),
            agent=self._agent,
            above=processes_above(),
            actor=self._actor,
            proof=self._proof,
        )


class NotedWait:
    """A wait that is seen by its note."""

    def __init__(self, around: WaitContext, note: WaitNote) -> None:
        self._around = around
        self.note = note
        self._posted: Posted | None = None

    def post(self) -> None:
        self._posted = self._around.board.post(self.note)

    def take_down(self) -> None:
        if self._posted is not None:
            self._posted.take_down()

    def look(self) -> None:
        board, elsewhere = self._around
        refuse_circle(self.note.ticket, lambda: look_at(board), elsewhere)


# --- Who holds what is waited for -------------------------------------------------------------------------


def _holds_of_files(notes: Iterable[WaitNote]) -> Iterator[Hold]:
    things = {note.thing for note in notes if note.thing.kind == FILE_LOCK}
    wanted = {inode for thing in things for inode in thing.place.split(_BETWEEN) if inode}
    held = held_flocks(wanted) if wanted else []
    for thing in sorted(things):
        for each in held:
            if each.inode in thing.place.split(_BETWEEN):
                yield from _hold_of_file(thing, each)


def _hold_of_file(thing: Thing, held: HeldFlock) -> Iterator[Hold]:
    """A process that waits neither takes nor drops a lock meanwhile, unless it is several agents in one: so
    a process and a file tell one hold from another, for those who wait."""
    holders = [holder for pid in held.pids if (holder := holder_with_pid(pid)) is not None]
    if holders:
        hold_id = " ".join([*(each.holder_id for each in holders), held.inode])
        party = _party(holders)
        yield Hold(thing, party, hold_id, for_descendants=True, shared=held.shared, by_process=True)


def _holds_of_repos(notes: Iterable[WaitNote]) -> Iterator[Hold]:
    """For how old a lock must be to be taken over, those count who wait: each has a place of its own."""
    for thing in sorted({note.thing for note in notes if note.thing.kind == REPO_LOCK}):
        state = repo_lock_state(thing)
        if state is None or state.stale or state.info is None or state.info.holder is None:
            continue  # free, or free for the one who waits; or of another program, of which nothing is known
        hold_id = state.info.lock_id or state.identity
        yield Hold(thing, _party([state.info.holder]), hold_id, for_descendants=True, by_process=True)


def is_repo_lock_of(note: WaitNote, locks: RepoLock) -> bool:
    """Whether somebody waits for one of these repository locks."""
    kind, _, place = note.thing
    return kind == REPO_LOCK and place.partition(_BETWEEN)[2] == calls.realpath(locks.data_dir)


def repo_lock_state(thing: Thing) -> RepoLockState | None:
    """The lock of a repository that is waited for, as the one sees it who waits; None if it is free."""
    stale_after, _, data_dir = thing.place.partition(_BETWEEN)
    with contextlib.suppress(Failure, ValueError):
        return RepoLock(data_dir, stale_after=float(stale_after)).state(thing.name)
    return None  # or if it cannot be seen


def _party(holders: Collection[Holder]) -> Party:
    processes = frozenset(process_id(each.holder_id, each.boot_id, each.pid_namespace) for each in holders)
    return Party(", ".join(each.holder_id for each in holders), processes=processes)


def _shown(path: str) -> str:
    """A path as text, also one whose bytes are none."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
