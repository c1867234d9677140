"""A repository, opened: the directory with `.jvs/`, wired to its store, its leases and its parts."""

from __future__ import annotations

import os
import stat
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from holdfast.clock import SKEW
from holdfast.errors import Corrupt, Failure, LockConflict, NotFound, Refused
from holdfast.fs import calls
from holdfast.leases.rules import LeaseGranted
from holdfast.leases.service import DEFAULT_TTL, HeldLease, LeaseService, acquire
from holdfast.locks.file_lock import DEFAULT_TIMEOUT, FileLocker
from holdfast.locks.identity import Holder
from holdfast.store.addresses import without_secrets
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Store
from holdfast.store.open import CONFIG, FILES, FailingFast, close_store, open_address, read_config, skew_of
from holdfast.workspace.waits import ClaimsElsewhere, LocksElsewhere
from holdfast.worktrees.control import Control, Places, may_be_leased
from holdfast.worktrees.finishing import settle
from holdfast.worktrees.payloads import directory_of, worktree_name
from holdfast.worktrees.proof import Proof
from holdfast.worktrees.records import FORMAT, FORMAT_VERSION, MAIN, RepositoryFormat, worktree_keys

if TYPE_CHECKING:
    from holdfast.trees import Engine
    from holdfast.trees.scan import Progress
    from holdfast.worktrees.doctor import Finding, Repaired
    from holdfast.worktrees.guarding import Right
    from holdfast.worktrees.keeping import Snapshots
    from holdfast.worktrees.lifecycle import Worktrees
    from holdfast.worktrees.records import Consistency, Descriptor
    from holdfast.worktrees.removing import Removed
    from holdfast.worktrees.restoring import Restored

_LOOK_AGAIN = 0.05
"""How often one who waits looks whether an operation on the worktree is over."""


class Repository:
    """One repository. Its parts are loaded when they are first used.

    `actor` (`kind:name`) is in whose name leases are taken. Programs that run several agents in one process
    open it once for each: by the process alone nobody could tell them apart. `ledger_address` is where the
    ledger of the directory is kept, if that is not as it was settled for it: who waits for a lease may wait
    in a circle with those who wait for its claims.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        holder: Holder | None = None,
        actor: str | None = None,
        ledger_address: str | None = None,
        to_examine: bool = False,
    ) -> None:
        """`to_examine` opens it even if the server that has its records cannot be used: see `trouble`."""
        places = Places(Path(calls.realpath(root)))  # so that it is known again, whatever path leads to it
        _require_control(places.root)
        if to_examine and not _is_on_files(places.root):
            store: Store = FailingFast(lambda: _opened_to_examine(places.root))
        else:
            store, self.format = _opened(places.root)
        trail = AuditTrail()
        self._claims = ClaimsElsewhere(places.root, store, ledger_address)
        desk = LeaseService(
            store,
            trail,
            also_named=worktree_keys,
            precondition=may_be_leased,
            holder=holder,
            actor=actor or "",
            reserve=places.reserve,
            skew=SKEW if (skew := skew_of(store)) is None else skew,
            elsewhere=[self._claims, LocksElsewhere(places.root)],
        )
        self.control = Control(places, store, trail, desk)

    @cached_property
    def format(self) -> RepositoryFormat:
        """What the repository says of itself: read when it is opened, except to be examined."""
        return checked_format(self.control.store, self.root)

    @property
    def trouble(self) -> Failure | None:
        """Why its records cannot be had, if it was opened to be examined and they could not."""
        found: Failure | None = getattr(self.control.store, "trouble", None)
        return found

    def close(self) -> None:
        """Let go of the files that are kept open for speed: for who opens many, or again and again."""
        self._claims.close()
        close_store(self.control.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def root(self) -> Path:
        return self.control.places.root

    @cached_property
    def desk(self) -> LeaseService:
        """Where leases are asked for."""
        return self.control.desk

    def lease(
        self,
        worktree: str = MAIN,
        *,
        ttl: float = DEFAULT_TTL,
        wait: float | None = 0.0,
        purpose: str = "",
        priority: int = 0,
        behalf_of: Holder | None = None,
        client: Holder | None = None,
        cancelled: threading.Event | None = None,
    ) -> HeldLease:
        """Acquire the lease of a worktree, to be used as a context manager, also an asynchronous one.

        `wait` is how many seconds to wait in line, None without limit. With `behalf_of` the lease is
        somebody else's, and is not released by the end of this process; with `client` it is held for
        that: see `Desk.request`. Who sets `cancelled` ends the waiting at once, as if the time were up.
        """
        name = worktree_name(worktree)
        request = self.desk.request(
            ttl=ttl, purpose=purpose, priority=priority, behalf_of=behalf_of, client=client
        )
        deadline = None if wait is None else time.monotonic() + wait
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                settle(self.control, name)
                return acquire(self.desk, name, request, wait=left, cancelled=cancelled)
            except LockConflict as conflict:
                given_up = left == 0.0 or (cancelled is not None and cancelled.is_set())
                if "operation" not in conflict.facts or given_up:
                    raise
            time.sleep(_LOOK_AGAIN)  # somebody is renaming or restoring it, which is soon over

    async def lease_async(
        self,
        worktree: str = MAIN,
        *,
        ttl: float = DEFAULT_TTL,
        wait: float | None = 0.0,
        purpose: str = "",
        priority: int = 0,
    ) -> HeldLease:
        """The same for coroutines: waiting holds up nobody else. `async with await repository.lease_async()`.

        What a cancelled coroutine is given all the same, because it came too late, is given back.
        """
        from holdfast.workspace.waiting import in_a_thread

        def wait_for_it(cancelled: threading.Event) -> HeldLease:
            return self.lease(
                worktree, ttl=ttl, wait=wait, purpose=purpose, priority=priority, cancelled=cancelled
            )

        return await in_a_thread(wait_for_it, HeldLease.release)

    def file_locker(self, timeout: float | None = DEFAULT_TIMEOUT, *, fair: bool = False) -> FileLocker:
        """A `FileLocker` whose waits are seen by all who wait for something of this repository.

        A wait that would never end, because the holder of the file waits in turn for what this process
        holds, raises `Deadlock` if it is the youngest of its circle; so do those for leases and claims then.
        """
        from holdfast.leases.wait_notes import WaitNotes
        from holdfast.workspace.lock_waits import LockWaits, Surroundings, waits_of_repository

        around = Surroundings(WaitNotes([waits_of_repository(self.root)]), (self.desk.look, self._claims))
        waits = LockWaits(around, actor=self.desk.actor)
        return FileLocker(timeout, fair=fair, observer=waits.observe_file_lock)

    def steal(
        self,
        worktree: str = MAIN,
        *,
        ttl: float = DEFAULT_TTL,
        purpose: str = "",
        behalf_of: Holder | None = None,
    ) -> LeaseGranted:
        """Take over a lease that has expired, and only such a one."""
        name = worktree_name(worktree)
        settle(self.control, name)
        return self.desk.steal(name, self.desk.request(ttl=ttl, purpose=purpose, behalf_of=behalf_of))

    def worktree_around(self, path: Path) -> str:
        """The worktree whose directory `path` is in; `main` if it is in none."""
        root = _identity(self.root)
        for above in path.parents:
            if _identity(above) == root:
                parts = path.relative_to(above).parts
                if parts[0] == "worktrees" and len(parts) > 1:
                    return worktree_name(parts[1])
        return MAIN

    def path(self, worktree: str = MAIN) -> Path:
        """The directory to work in. It is there, and it is no link to some other place."""
        name = worktree_name(worktree)
        settle(self.control, name)
        self.control.config(name)
        return directory_of(self.control, name)

    @cached_property
    def worktrees(self) -> Worktrees:
        """Creating, listing, renaming and removing worktrees."""
        from holdfast.worktrees.lifecycle import Worktrees

        return Worktrees(self.control)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Taking, naming, comparing, verifying and restoring snapshots."""
        from holdfast.worktrees.keeping import Snapshots

        return Snapshots(self.control)

    def snapshot(
        self,
        worktree: str = MAIN,
        lease: HeldLease | None = None,
        *,
        note: str = "",
        tag: str | None = None,
        consistency: Consistency | None = None,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> Descriptor:
        """Keep what is in a worktree. In an exclusive one it takes its lease, as `lease` gives it.

        Raises `FencingMismatch` or `LockExpired` if that is lost, and `ConsistencyUnavailable` if
        something wrote meanwhile; nothing of the snapshot is visible then.
        """
        from holdfast.worktrees.snapshots import Wanted

        wanted = Wanted(note=note, tag=tag, consistency=consistency, engine=engine, progress=progress)
        return self.snapshots.take(worktree_name(worktree), _proof(lease), wanted)

    def save(self, worktree: str, lease: HeldLease | None, *, note: str) -> str:
        """Keep what is in a worktree; the id of the snapshot."""
        return self.snapshot(worktree, lease, note=note).snapshot_id

    def restore(
        self,
        snapshot: str,
        worktree: str = MAIN,
        lease: HeldLease | None = None,
        *,
        reason: str,
        path: str | None = None,
    ) -> Restored:
        """Make a worktree, or what is at `path` in it, be as it is in a snapshot, in one step.

        What was there is kept as a snapshot first. In an exclusive worktree it takes its lease. To get a
        new worktree instead, which takes none: `snapshots.restore`.
        """
        from holdfast.worktrees.restoring import InPlace

        name = worktree_name(worktree)
        source = self.snapshots.named(snapshot, seen_from=name)
        how = InPlace(reason=reason, path=path)
        return self.snapshots.restore_in_place(name, source.snapshot_id, _proof(lease), how)

    def remove_worktree(
        self, name: str, *, keep_unsaved: bool = True, force: bool = False, lock_id: str | None = None
    ) -> Removed:
        """Remove a worktree; what is unsaved in it becomes a snapshot first, unless it is not to be kept."""
        from holdfast.worktrees.snapshots import Wanted

        def save(right: Right) -> str | None:
            wanted = Wanted(note=f"before {name} was removed")
            made = self.snapshots.take_if_changed(name, _proof(right.lease), wanted)
            return None if made is None else made.snapshot_id

        kept = save if keep_unsaved else None
        return self.worktrees.remove(name, save=kept, force=force, lock_id=lock_id)

    def examine(self, *, strict: bool = False) -> list[Finding]:
        """What is wrong here; changes nothing. `strict` reads every file of every snapshot."""
        from holdfast.workspace.checks import all_checks
        from holdfast.worktrees.doctor import examine

        return examine(self.control, all_checks(), strict=strict)

    def repair(self, *, strict: bool = False) -> Repaired:
        """Repair what can be repaired without risk. Repairing twice is the same as repairing once."""
        from holdfast.workspace.checks import all_checks
        from holdfast.worktrees.doctor import repair

        return repair(self.control, all_checks(), strict=strict)


def _is_on_files(root: Path) -> bool:
    try:
        return read_config(root).store == FILES
    except Failure:  # then nobody knows, and nothing is touched
        return False


def _opened(root: Path) -> tuple[Store, RepositoryFormat]:
    """The store of a repository, and its format. No server is asked to make one: it is `NotFound` then."""
    address = read_config(root).store
    store = open_address(root, address, create=address == FILES)
    try:
        return store, checked_format(store, root)
    except NotFound as failure:
        close_store(store)
        if address == FILES:
            raise
        place = without_secrets(address)
        raise NotFound(
            f"the store {place} has no records of {root}",
            hint=f"Check the address in {CONFIG}. If it is right, bring the records back from a copy.",
            store=place,
            path=str(root),
        ) from failure
    except BaseException:
        close_store(store)
        raise


def _opened_to_examine(root: Path) -> Store:
    try:
        return _opened(root)[0]
    except Corrupt as failure:  # which is not to be taken for damage of what was asked for
        raise Refused(failure.message, hint=failure.hint, **failure.facts) from failure


def _proof(lease: HeldLease | None) -> Proof | None:
    """What shows that a lease is held; one that is known to be lost is refused at once."""
    if lease is None:
        return None
    lease.check()
    return Proof(lease.lock_id, lease.token)


def find_repository(start: str | os.PathLike[str]) -> Path:
    """The repository that a directory belongs to: the nearest one upwards that has `.jvs/`."""
    here = Path(os.path.abspath(start))
    for directory in (here, *here.parents):
        if _has_control(directory):
            return directory
    raise NotFound(
        f"{here} is not in a Holdfast repository",
        hint="Go to one, name one with --repo, or make one: 'holdfast init DIR'.",
        path=str(here),
    )


def _has_control(root: Path) -> bool:
    try:
        return stat.S_ISDIR(calls.stat(root / ".jvs", follow_symlinks=False).st_mode)
    except OSError:
        return False


def _require_control(root: Path) -> None:
    """Refuse what is no repository before a store is opened there: opening one makes its directory."""
    if not _has_control(root):
        raise _no_repository(root)


def _no_repository(root: Path) -> NotFound:
    return NotFound(
        f"{root} is not a Holdfast repository", hint="Make one with 'holdfast init DIR'.", path=str(root)
    )


def checked_format(store: Store, root: Path) -> RepositoryFormat:
    """The format of the repository at `root`; one that is newer than this program is refused."""
    document = store.read(FORMAT)
    if document is None:
        raise _no_repository(root)
    if document.record.version > FORMAT_VERSION:
        raise Refused(
            f"{root} has the format {document.record.version}, "
            f"but this program knows {FORMAT_VERSION} at most",
            hint="Use the newer version of Holdfast that wrote it: an older one could do harm.",
            path=str(root),
            version=document.record.version,
            known=FORMAT_VERSION,
        )
    return document.record


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = calls.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
