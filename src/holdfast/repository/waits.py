"""The wait graphs of a directory: its leases, its ledger claims, and the locks that have waiters.

The kernel and the lock files name the holders of file locks and repository locks, but no waiters. So a waiter leaves a
note (`leases.wait_notes`) for the other processes of a possible deadlock: in its repository, and in the data directory
of the repository locks, for processes outside a repository. A wait shorter than `FIRST_CHECK` leaves no note.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import make_directories, resolved
from holdfast.leases import deadlock
from holdfast.leases.deadlock import Hold, Participant, ReadGraph, Resource, WaitGraph
from holdfast.leases.queue import DeadlockWatch
from holdfast.leases.wait_notes import Posted, WaitNote, WaitNotes
from holdfast.locks.flock_wait import LockWait
from holdfast.locks.identity import Holder, current_holder, holder_with_pid, processes_above
from holdfast.locks.kernel_locks import held_flocks, inode_of
from holdfast.locks.repo_lock import RepoLock
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Store
from holdfast.store.open import FILES, address_of, open_store

FILE_LOCK, REPO_LOCK = "file lock", "repo lock"
QUEUE = ".queue"
WAITS = "waits"
_BETWEEN = " "  # separates the two files in the place of a fair lock: the lock and its queue


# --- Leases and claims -----------------------------------------------------------------------------------


class StoredGraph:
    """The wait graph of another part of a directory, opened on first use; empty while that part is not in use.

    `store` is the caller's, if it has one. `address` is that of the other part's store; None means the same store, or
    the configured one.
    """

    def __init__(self, root: Path, store: Store | None, address: str | None = None) -> None:
        self._root = root
        self._store = store
        self._address = address
        self._opened: Store | None = None
        self._read: ReadGraph | None = None
        self._opening = threading.Lock()  # threads may wait concurrently

    def __call__(self) -> WaitGraph:
        with self._opening:
            if self._read is None and self._is_in_use():
                store = self._store if self._address is None else None
                if store is None:
                    store = self._opened = open_store(self._root, self._address)
                self._read = self._open(store)
            read = self._read
        return WaitGraph() if read is None else read()

    def close(self) -> None:
        """Close the store that was opened here. Never waits for an opening in progress: a server may be unreachable."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            self._read = None
            if self._opened is not None:
                self._opened.close()
                self._opened = None
        finally:
            self._opening.release()

    def _is_in_use(self) -> bool:
        raise NotImplementedError

    def _open(self, store: Store) -> ReadGraph:
        raise NotImplementedError


class ClaimGraph(StoredGraph):
    """The ledger claims of a directory, for waiters for a lease there."""

    def _is_in_use(self) -> bool:
        if self._address is not None:
            return True
        if self._store is None:
            return address_of(self._root) != FILES or calls.exists(self._root / "ledger")
        return self._store.files is None or calls.exists(self._store.files.path / "ledger")

    def _open(self, store: Store) -> ReadGraph:
        from holdfast.ledger.log import Ledger
        from holdfast.ledger.service import Claims

        return Claims(Ledger(store, checkpoint_root=self._root)).wait_graph


class LeaseGraph(StoredGraph):
    """The leases of a repository, for waiters for a claim in the ledger there."""

    def _is_in_use(self) -> bool:
        return calls.exists(self._root / ".jvs")

    def _open(self, store: Store) -> ReadGraph:
        from holdfast.leases.service import LeaseService

        return LeaseService(store, AuditTrail(), skew=store.skew).wait_graph


# --- File locks and repository locks ---------------------------------------------------------------------


def waits_of_repository(root: Path) -> Path:
    return root / ".jvs" / WAITS


def waits_of_data(data_dir: Path) -> Path:
    """The directory of the wait notes of all processes that share a data directory."""
    return resolved(data_dir) / WAITS


def locks_waited_for(root: Path) -> WaitGraph:
    """The file locks and repository locks that have waiters in a repository."""
    return lock_graph(WaitNotes([waits_of_repository(root)]))


def lock_graph(notes: WaitNotes) -> WaitGraph:
    """The locks that these notes name, with their waiters and holders."""
    found = notes.notes()
    holds = (*_file_lock_holds(found), *_repo_lock_holds(found))
    return WaitGraph(holds, tuple(note.as_wait() for note in found))


class WaitContext(NamedTuple):
    """The notes of the waiters, and the other wait graphs that a deadlock may lead through."""

    notes: WaitNotes
    other_graphs: Sequence[ReadGraph] = ()


def wait_context(root: Path | None, data_dir: Path | None, *, ledger_address: str | None = None) -> WaitContext:
    """The context of a waiter with this repository and data directory, if it has them."""
    directories = [] if root is None else [waits_of_repository(root)]
    graphs = [] if root is None else [LeaseGraph(root, None), ClaimGraph(root, None, ledger_address)]
    if data_dir is not None:
        with contextlib.suppress(Failure, OSError):  # it may not be writable or readable
            make_directories(resolved(data_dir))
        directories.append(waits_of_data(data_dir))
    return WaitContext(WaitNotes(directories), graphs)


class LockWaits:
    """Posts notes of an agent's waits for file locks and repository locks, and ends waits that are in a deadlock.
    `agent` is the process on whose behalf this one waits, if any; `lock_id` is that of the agent's lease, if known."""

    def __init__(
        self, context: WaitContext, *, agent: Holder | None = None, actor: str = "", lock_id: str = ""
    ) -> None:
        self._context = context
        self._proof = deadlock.proof_of(lock_id)
        self._agent = "" if agent is None else agent.holder_id
        self._actor = actor

    def observe_file_lock(self, path: str, wait: LockWait, *, shared: bool, fair: bool) -> DeadlockWatch:
        """Watch a wait for a file lock: for `FileLocker(observer=...)`."""
        prepare = partial(self.for_file_lock, path, time.time(), shared=shared, fair=fair)
        return DeadlockWatch(prepare, wait.timeout, wait.cancel)

    def for_file_lock(self, path: str, since: float, *, shared: bool, fair: bool) -> NotedWait:
        """A wait for the lock on a file; if it is fair, also for the holder of its queue."""
        files = (path, path + QUEUE) if fair else (path,)
        place = _BETWEEN.join(filter(None, map(inode_of, files)))
        name = calls.realpath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return self._noted(Resource(FILE_LOCK, name, place), since, shared=shared)

    def for_repo_lock(self, lock: RepoLock, repo_id: str, purpose: str, since: float) -> NotedWait:
        """A wait for the lock of a repository."""
        place = f"{lock.stale_after:g}{_BETWEEN}{lock.data_dir}"
        return self._noted(Resource(REPO_LOCK, repo_id, place), since, purpose=purpose)

    def _noted(self, resource: Resource, since: float, *, shared: bool = False, purpose: str = "") -> NotedWait:
        note = WaitNote(str(uuid.uuid4()), resource, format_instant(since), current_holder(), above=processes_above())
        by: dict[str, Any] = {"agent": self._agent, "actor": self._actor, "purpose": purpose, "proof": self._proof}
        return NotedWait(self._context, note._replace(**by, shared=shared))


class NotedWait:
    """A wait that has a note."""

    def __init__(self, context: WaitContext, note: WaitNote) -> None:
        self._context = context
        self.note = note
        self._posted: Posted | None = None

    def post(self) -> None:
        self._posted = self._context.notes.post(self.note)

    def take_down(self) -> None:
        if self._posted is not None:
            self._posted.take_down()

    def check(self) -> None:
        notes, others = self._context
        deadlock.check_deadlock(self.note.ticket, lambda: lock_graph(notes), others)


def _file_lock_holds(notes: Iterable[WaitNote]) -> Iterator[Hold]:
    """A waiting process neither takes nor drops a lock, unless several agents share it: so a process and a file
    identify a waiter's hold."""
    locks = sorted({note.thing for note in notes if note.thing.kind == FILE_LOCK})
    inodes = {inode for lock in locks for inode in lock.place.split(_BETWEEN) if inode}
    held = held_flocks(inodes) if inodes else []
    for lock in locks:
        for each in held:
            holders = [holder for pid in each.pids if (holder := holder_with_pid(pid)) is not None]
            if holders and each.inode in lock.place.split(_BETWEEN):
                hold_id = " ".join([*(holder.holder_id for holder in holders), each.inode])
                yield _hold(lock, holders, hold_id, shared=each.shared)


def _repo_lock_holds(notes: Iterable[WaitNote]) -> Iterator[Hold]:
    """Each waiter decides by its own limit whether a lock is stale: the limit is part of the place."""
    for lock in sorted({note.thing for note in notes if note.thing.kind == REPO_LOCK}):
        stale_after, _, data_dir = lock.place.partition(_BETWEEN)
        try:
            state = RepoLock(data_dir, stale_after=float(stale_after)).state(lock.name)
        except (Failure, ValueError):  # unreadable
            continue
        if state is None or state.stale or state.info is None or state.info.holder is None:
            continue  # free, at least for the waiter; or held by another program that does not name its holder
        yield _hold(lock, [state.info.holder], state.info.lock_id or state.identity)


def _hold(lock: Resource, holders: Collection[Holder], hold_id: str, *, shared: bool = False) -> Hold:
    ids = (deadlock.process_ids([each.holder_id], each.boot_id, each.pid_namespace) for each in holders)
    processes = frozenset[str]().union(*ids)
    holder = Participant(", ".join(each.holder_id for each in holders), processes=processes)
    return Hold(lock, holder, hold_id, for_descendants=True, shared=shared, by_process=True)


def is_note_of(note: WaitNote, locks: RepoLock) -> bool:
    """Whether a note is about one of these repository locks."""
    kind, _, place = note.thing
    return kind == REPO_LOCK and place.partition(_BETWEEN)[2] == str(locks.data_dir)
