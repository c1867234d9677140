"""A repository, opened: the directory with `.jvs/`, wired to its store, its leases and its parts."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from holdfast.clock import SKEW
from holdfast.errors import AlreadyExists, Corrupt, Failure, LockConflict, NotFound, Refused
from holdfast.fs import calls
from holdfast.fs.names import checked_text
from holdfast.leases.rules import LeaseGranted
from holdfast.leases.service import DEFAULT_TTL, HeldLease, LeaseService, acquire
from holdfast.locks.file_lock import DEFAULT_TIMEOUT, FileLocker
from holdfast.locks.identity import Holder
from holdfast.repository import compare, context, history, restore, snapshots
from holdfast.repository.compare import Comparison
from holdfast.repository.context import Proof, RepositoryContext, RepositoryPaths, may_be_leased
from holdfast.repository.history import History
from holdfast.repository.payloads import directory_of, worktree_name
from holdfast.repository.records import (
    DESCRIPTORS,
    FORMAT,
    FORMAT_VERSION,
    MAIN,
    WORKTREES,
    Descriptor,
    RepositoryFormat,
    WorktreeConfig,
    worktree_keys,
)
from holdfast.repository.restore import InPlace, Restored
from holdfast.repository.snapshots import AS_USUAL, SnapshotOptions
from holdfast.repository.waits import ClaimsElsewhere, LocksElsewhere
from holdfast.repository.worktrees import Worktrees, settle
from holdfast.store.addresses import without_secrets
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Store
from holdfast.store.open import CONFIG, FILES, FailingFast, close_store, open_address, read_config, skew_of

if TYPE_CHECKING:
    from holdfast.repository.doctor import Finding, Repaired
    from holdfast.repository.payloads import Right
    from holdfast.repository.records import Consistency
    from holdfast.repository.worktree_changes import Removed
    from holdfast.trees import Engine, Materialised, Problem
    from holdfast.trees.scan import Progress


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
        places = RepositoryPaths(
            Path(calls.realpath(root))
        )  # so that it is known again, whatever path leads to it
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
        self.control = RepositoryContext(places, store, trail, desk)

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
        from holdfast.leases.queue import in_a_thread

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
        from holdfast.repository.waits import LockWaits, WaitContext, waits_of_repository

        around = WaitContext(WaitNotes([waits_of_repository(self.root)]), (self.desk.look, self._claims))
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
        from holdfast.repository.worktrees import Worktrees

        return Worktrees(self.control)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Taking, naming, comparing, verifying and restoring snapshots."""

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
        from holdfast.repository.snapshots import SnapshotOptions

        wanted = SnapshotOptions(
            note=note, tag=tag, consistency=consistency, engine=engine, progress=progress
        )
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
        from holdfast.repository.restore import InPlace

        name = worktree_name(worktree)
        source = self.snapshots.named(snapshot, seen_from=name)
        how = InPlace(reason=reason, path=path)
        return self.snapshots.restore_in_place(name, source.snapshot_id, _proof(lease), how)

    def remove_worktree(
        self, name: str, *, keep_unsaved: bool = True, force: bool = False, lock_id: str | None = None
    ) -> Removed:
        """Remove a worktree; what is unsaved in it becomes a snapshot first, unless it is not to be kept."""
        from holdfast.repository.snapshots import SnapshotOptions

        def save(right: Right) -> str | None:
            wanted = SnapshotOptions(note=f"before {name} was removed")
            made = self.snapshots.take_if_changed(name, _proof(right.lease), wanted)
            return None if made is None else made.snapshot_id

        kept = save if keep_unsaved else None
        return self.worktrees.remove(name, save=kept, force=force, lock_id=lock_id)

    def examine(self, *, strict: bool = False) -> list[Finding]:
        """What is wrong here; changes nothing. `strict` reads every file of every snapshot."""
        from holdfast.repository.checks import all_checks
        from holdfast.repository.doctor import examine

        return examine(self.control, all_checks(), strict=strict)

    def repair(self, *, strict: bool = False) -> Repaired:
        """Repair what can be repaired without risk. Repairing twice is the same as repairing once."""
        from holdfast.repository.checks import all_checks
        from holdfast.repository.doctor import repair

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


class RestorePlan(NamedTuple):
    """What restoring in place would do: `comparison.changes` are what would be undone, from the snapshot's
    content to what is there now; `keeps` says that what is there would be kept as a snapshot first."""

    source: Descriptor
    comparison: Comparison
    keeps: bool


class Snapshots:
    """The snapshots of one repository."""

    def __init__(self, control: RepositoryContext) -> None:
        self._control = control

    def take(self, worktree: str, proof: Proof | None, wanted: SnapshotOptions = AS_USUAL) -> Descriptor:
        """Keep what is in a worktree; see `snapshots.snapshot`."""
        checked_text(wanted.note, what="note")
        settle(self._control, worktree)
        return snapshots.snapshot(self._control, worktree, proof, wanted)

    def take_if_changed(
        self, worktree: str, proof: Proof | None, wanted: SnapshotOptions = AS_USUAL
    ) -> Descriptor | None:
        """The same, unless the worktree is as its head is; None then."""
        config = self._control.config(worktree)
        if not restore.differs_from_head(self._control, config):
            return None
        return snapshots.snapshot(self._control, worktree, proof, wanted)

    # --- Looking: takes no lock and changes nothing ------------------------------------------------

    def named(self, text: str, *, seen_from: str = MAIN) -> Descriptor:
        """The snapshot that `text` names: an id, a part of one, a reference, `head`, `head~2`."""
        return context.resolve(self._control, text, worktree=seen_from)

    def line(self, worktree: str, *, limit: int | None = None) -> History:
        """The snapshots that led to the head of a worktree."""
        return history.line(self._control, worktree, limit=limit)

    def everything(self, *, limit: int | None = None) -> History:
        """All snapshots of all lines."""
        return history.everything(self._control, limit=limit)

    def marks(self, snapshot_id: str) -> history.Marks:
        """What points at a snapshot."""
        return history.marks_of(self._control).get(snapshot_id, history.Marks())

    def status(self, worktree: str) -> Comparison:
        """What has changed in a worktree since its head."""
        return compare.status(self._control, worktree)

    def compare(self, worktree: str, old: str | None = None, new: str | None = None) -> Comparison:
        """What is different between two snapshots, or a snapshot and the worktree."""
        return compare.compare(self._control, worktree, old, new)

    def verify(self, snapshot_id: str) -> Iterator[Problem]:
        """Read everything that a snapshot holds; what is wrong with it.

        `SnapshotCollected` if it is deleted meanwhile: that is no damage.
        """
        from holdfast.trees.verify import verify

        descriptor = context.visible(self._control, snapshot_id)
        for problem in verify(self._control.places.tree(snapshot_id), descriptor.payload_hash):
            context.refuse_if_collected(self._control, snapshot_id)
            yield problem

    def all_ids(self) -> list[str]:
        """Every snapshot that has a descriptor, complete or not."""
        return [name for name, _ in self._control.store.scan(DESCRIPTORS)]

    def export(
        self,
        snapshot_id: str,
        destination: Path,
        *,
        path: bytes | None = None,
        progress: Progress | None = None,
    ) -> Materialised:
        """Write what a snapshot holds, or the one `path` of it, to a new directory; see `exporting`."""
        from holdfast.repository.compare import export

        return export(self._control, snapshot_id, destination, path=path, progress=progress)

    # --- Restoring ---------------------------------------------------------------------------------

    def restore(self, snapshot_id: str, name: str | None = None) -> WorktreeConfig:
        """Make a new worktree with the content of a snapshot. Nothing that exists is touched."""
        worktrees = Worktrees(self._control)
        for candidate in [name] if name else self.free_names(snapshot_id):
            try:
                return worktrees.create(candidate, snapshot=snapshot_id)
            except AlreadyExists:
                if name:
                    raise
        raise AssertionError("never reached")

    def free_names(self, snapshot_id: str) -> Iterator[str]:
        """Names that a worktree restored from a snapshot may get, as far as they are free now."""
        first, number = f"restored-{snapshot_id[:8]}", 1
        while True:
            name = first if number == 1 else f"{first}-{number}"
            number += 1
            if self._control.store.read(WORKTREES.key(name)) is None:
                yield name

    def plan(self, worktree: str, snapshot_id: str, how: InPlace) -> RestorePlan:
        """What restoring in place would do. Changes nothing."""
        config = restore.checked(self._control, worktree, how)
        source = context.usable(context.visible(self._control, snapshot_id))
        found = compare.compare(self._control, worktree, snapshot_id, None)
        if how.path is not None:
            found = found._replace(changes=tuple(compare.below(how.path, found.changes)))
        keeps = how.keep and restore.differs_from_head(self._control, config)
        return RestorePlan(source, found, keeps)

    def restore_in_place(
        self, worktree: str, snapshot_id: str, proof: Proof | None, how: InPlace
    ) -> Restored:
        """Make a worktree hold what a snapshot holds; see `restoring`."""
        settle(self._control, worktree)
        return restore.restore_in_place(self._control, worktree, snapshot_id, proof, how)
