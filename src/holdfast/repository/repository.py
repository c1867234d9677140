"""`Repository`: an open repository with its store, its leases and its parts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import Corrupt, Failure, LockConflict, NotFound, NotInitialised, Refused, UsageFailure
from holdfast.fs import calls
from holdfast.fs.directory import entry_exists, resolved
from holdfast.leases.rules import Identity, LeaseGranted
from holdfast.leases.service import DEFAULT_TTL, HeldLease, LeaseService, acquire
from holdfast.locks.file_lock import DEFAULT_TIMEOUT, FileLocker
from holdfast.locks.identity import Holder, current_holder
from holdfast.repository.context import (
    CONTENT_VERSION,
    FORMAT,
    MAIN,
    Descriptor,
    Proof,
    RepositoryContext,
    RepositoryFormat,
    RepositoryPaths,
    WorktreeConfig,
    check_leasable,
    fenced,
    proof_of,
    require_here,
    settle,
    worktree_keys,
)
from holdfast.repository.home import Home, PlainHome
from holdfast.repository.locating import find_repository_root, git_home_of, git_worktree_at, is_git_home, root_in
from holdfast.repository.payloads import directory_of, lease_name, refuse_replaced, worktree_name
from holdfast.repository.worktree_changes import KEEP_FOR
from holdfast.repository.worktrees import Worktrees
from holdfast.store.addresses import without_secrets
from holdfast.store.audit import AuditEntry, AuditReader, AuditTrail, ChainEnd, check_chain, check_segments
from holdfast.store.fail_fast import FailFastStore
from holdfast.store.model import ServerVersion, Store, View, Watch, newest_first
from holdfast.store.open import CONFIG, FILES, SETTINGS, approved_address, open_address, read_config, save_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from holdfast.findings import Finding, Repaired
    from holdfast.leases.deadlock import ReadGraph
    from holdfast.repository.context import Consistency
    from holdfast.repository.gc import GarbageCollector
    from holdfast.repository.payloads import LeasedWorktree
    from holdfast.repository.restore import Restored
    from holdfast.repository.site import Site
    from holdfast.repository.snapshot_service import Snapshots
    from holdfast.repository.waits import ClaimGraph
    from holdfast.repository.worktree_changes import Removed
    from holdfast.store.archive import Segment
    from holdfast.store.model import Append
    from holdfast.trees.engines import Engine
    from holdfast.trees.scan import Progress


_POLL = 0.05  # seconds between two checks whether an operation on the worktree has ended


class _OtherGraphs:
    """The wait graphs of claims and locks, created by the first wait for a lease: most commands never wait."""

    def __init__(self, root: Path, store: Store, ledger_address: str | None) -> None:
        self._root, self._store, self._ledger_address = root, store, ledger_address
        self._claims: ClaimGraph | None = None
        self._lock = threading.Lock()  # any number of threads may wait

    def __call__(self) -> Sequence[ReadGraph]:
        from holdfast.repository.waits import locks_waited_for

        return self.claims(), partial(locks_waited_for, self._root)

    def claims(self) -> ClaimGraph:
        from holdfast.repository.waits import ClaimGraph

        with self._lock:
            self._claims = self._claims or ClaimGraph(self._root, self._store, self._ledger_address)
            return self._claims

    def close(self) -> None:
        if self._claims is not None:
            self._claims.close()


class Repository:
    """One repository. Its parts are loaded when they are first used.

    Leases are acquired as `actor` (`kind:name`). A program that runs several agents in one process opens it once for
    each agent, because the process alone does not distinguish them. `ledger_address` is the store of the ledger, if it
    is not the configured one: a wait for a lease may be part of a deadlock with its claims. With `to_examine`, it opens
    even if its store is unavailable: see `trouble`. Setup and teardown commands run with `environment`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        holder: Holder | None = None,
        actor: str | None = None,
        ledger_address: str | None = None,
        to_examine: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.environment = environment or {}
        paths = _paths_of(resolved(root))  # the same, whatever path leads to it
        if to_examine and not _is_on_files(paths.root):
            store: Store = FailFastStore(lambda: _opened_to_examine(paths.root))
        else:
            store, self.format = _opened(paths.root)
        if store.files is None and type(paths) is RepositoryPaths:
            with contextlib.suppress(*([Failure] if to_examine else [])):
                paths.main = read_config(paths.root).clone
        trail = AuditTrail()
        site = None if store.files is not None else self._site(paths, store, holder or current_holder())
        self._other_graphs = _OtherGraphs(paths.root, store, ledger_address)
        leases = LeaseService(
            store,
            trail,
            also_named=worktree_keys,
            precondition=partial(_check_leasable_here, site, paths.main),
            site=site,
            holder=holder,
            actor=actor or "",
            reserve=paths.reserve,
            skew=store.skew,
            other_graphs=self._other_graphs,
        )
        self.context = RepositoryContext(home_at(paths), store, trail, leases, site)
        if store.files is None and type(paths) is RepositoryPaths:
            with contextlib.suppress(*((Failure,) if to_examine else ())):
                self._connect_content()

    def _connect_content(self) -> None:
        if self.format.content:
            from holdfast.repository.content import Contents

            self.context.home.contents = Contents(self.context, self.format.content)

    def _site(self, paths: RepositoryPaths, store: Store, holder: Holder) -> Site:
        from holdfast.repository.site import Site

        site = Site(paths.root, store, Identity.of(holder), holder.host, name=paths.main)
        paths.is_elsewhere = site.is_elsewhere
        return site

    @cached_property
    def format(self) -> RepositoryFormat:
        """The format of the repository; raises if the store is away."""
        return checked_format(self.context.store, self.root)

    @property
    def trouble(self) -> Failure | None:
        """Why the records cannot be read; None if they can."""
        return self.context.store.trouble

    def close(self) -> None:
        """Close the files that are kept open for speed; useful in programs that open many repositories."""
        self._other_graphs.close()
        save_statistics()
        self.context.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """The directory of the repository, without symbolic links in its path."""
        return self.context.paths.root

    @property
    def paths(self) -> RepositoryPaths:
        """The paths of the repository's files."""
        return self.context.paths

    @property
    def home(self) -> Home:
        """Where the directories and the content of the repository are: plain, or in a git checkout."""
        return self.context.home

    @property
    def server(self) -> ServerVersion | None:
        """The server that keeps the records, once it has answered; None if they are in files."""
        server = self.context.store.server
        return None if server is None else server.version

    @cached_property
    def leases(self) -> LeaseService:
        """Lease operations; each is one transaction."""
        return self.context.leases

    @cached_property
    def named_leases(self) -> LeaseService:
        """Operations on leases that have a name instead of a worktree."""
        return self.leases.of_names()

    def lease(
        self,
        worktree: str = MAIN,
        *,
        name: str | None = None,
        ttl: float = DEFAULT_TTL,
        wait: float | None = 0.0,
        purpose: str = "",
        priority: int = 0,
        behalf_of: Holder | None = None,
        client: Holder | None = None,
        cancelled: threading.Event | None = None,
    ) -> HeldLease:
        """Acquire the lease of a worktree; with `name`, a lease that needs no worktree, such as that of a nightly job.
        The result is a context manager, for `with` or `async with`.

        `wait` is the time limit in the queue in seconds; None means no limit. With `behalf_of`, that process is the
        holder, and the lease outlives this process. With `client`, this process holds the lease for that one: see
        `LeaseService.request`. Setting `cancelled` ends the wait at once, like its time limit.
        """
        request = self.leases.request(ttl=ttl, purpose=purpose, priority=priority, behalf_of=behalf_of, client=client)
        if name is not None:
            return acquire(self.named_leases, lease_name(name), request, wait=wait, cancelled=cancelled)
        worktree, began = worktree_name(worktree), time.monotonic()
        while True:
            try:
                settle(self.context, worktree)
                refuse_replaced(self.context, worktree)
                return acquire(self.leases, worktree, request, wait=wait, began=began, cancelled=cancelled)
            except LockConflict as conflict:
                time_is_up = wait is not None and time.monotonic() - began >= wait
                if "operation" not in conflict.facts or time_is_up or (cancelled is not None and cancelled.is_set()):
                    raise
            time.sleep(_POLL)  # it is being renamed or restored, which ends soon

    async def lease_async(
        self,
        worktree: str = MAIN,
        *,
        name: str | None = None,
        ttl: float = DEFAULT_TTL,
        wait: float | None = 0.0,
        purpose: str = "",
        priority: int = 0,
    ) -> HeldLease:
        """Like `lease`, for coroutines: `async with await repository.lease_async()`.

        A lease that is granted to a coroutine after it was cancelled is released.
        """
        from holdfast.leases.queue import wait_in_thread

        def wait_for_it(cancelled: threading.Event) -> HeldLease:
            return self.lease(
                worktree, name=name, ttl=ttl, wait=wait, purpose=purpose, priority=priority, cancelled=cancelled
            )

        return await wait_in_thread(wait_for_it, HeldLease.release)

    def file_locker(self, timeout: float | None = DEFAULT_TIMEOUT, *, fair: bool = False) -> FileLocker:
        """A `FileLocker` whose waits take part in the deadlock detection of this repository.

        The youngest wait of a deadlock raises `Deadlock`, here as for leases and claims.
        """
        from holdfast.leases.wait_notes import WaitNotes
        from holdfast.repository.waits import LockWaits, WaitContext, waits_of_repository

        claims = self._other_graphs.claims()
        around = WaitContext(WaitNotes([waits_of_repository(self.root)]), (self.leases.wait_graph, claims))
        waits = LockWaits(around, actor=self.leases.actor)
        return FileLocker(timeout, fair=fair, observer=waits.observe_file_lock)

    def steal(
        self,
        worktree: str = MAIN,
        *,
        name: str | None = None,
        ttl: float = DEFAULT_TTL,
        purpose: str = "",
        behalf_of: Holder | None = None,
    ) -> LeaseGranted:
        """Take over an expired lease; an unexpired one raises `LockConflict`."""
        request = self.leases.request(ttl=ttl, purpose=purpose, behalf_of=behalf_of)
        if name is not None:
            return self.named_leases.steal(lease_name(name), request)
        worktree = worktree_name(worktree)
        settle(self.context, worktree)
        refuse_replaced(self.context, worktree)
        return self.leases.steal(worktree, request)

    def worktree_around(self, path: Path) -> str:
        """The worktree whose directory contains `path`; the main checkout if there is none."""
        if isinstance(self.context.home, PlainHome):
            return self._plain_worktree_around(path)
        for above in (path, *path.parents):
            if git_home_of(str(above)) == str(self.root):
                name = git_worktree_at(str(above), str(self.root))
                if name is None and not calls.is_directory(above / ".git"):  # else a directory beside its worktrees
                    hint = f"Adopt it: 'holdfast worktree adopt {above}'. Or name a worktree: --worktree."
                    message = f"{above} is a git worktree that Holdfast does not know"
                    raise NotFound(message, hint=hint, path=str(above))
                return name or self.context.paths.main
        return self.context.paths.main

    def _plain_worktree_around(self, path: Path) -> str:
        root = _identity(self.root)
        for above in path.parents:
            if _identity(above) == root:
                parts = path.relative_to(above).parts
                if parts[0] == "worktrees" and len(parts) > 1:
                    return worktree_name(parts[1])
        return self.context.paths.main

    def path(self, worktree: str = MAIN) -> Path:
        """The directory of a worktree; checked to exist and not to be a symbolic link."""
        name = worktree_name(worktree)
        settle(self.context, name)
        require_here(self.context.config(name), self.context.paths.main)
        return directory_of(self.context, name)

    @cached_property
    def worktrees(self) -> Worktrees:
        """Creating, listing, renaming and removing worktrees."""
        return Worktrees(self.context)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Taking, naming, comparing, verifying, restoring and pinning snapshots."""
        from holdfast.repository.snapshot_service import Snapshots

        return Snapshots(self.context)

    @cached_property
    def gc(self) -> GarbageCollector:
        """Planning and running garbage collection."""
        from holdfast.repository.gc import GarbageCollector

        return GarbageCollector(self.context)

    def variables(self, worktree: str = MAIN) -> dict[str, str]:
        """The environment variables that the settings give to commands in a worktree: its ports."""
        if not entry_exists(self.root / SETTINGS):  # the usual case
            return {}
        from holdfast.repository.preparation import worktree_variables

        return worktree_variables(self, worktree)

    def payload(self, worktree: str = MAIN) -> Path:
        """The path of a worktree's directory, which may not exist."""
        return self.context.paths.payload(worktree)

    def config(self, worktree: str = MAIN) -> WorktreeConfig:
        """The record of a worktree as of now; `NotFound` if there is none. Takes no lock."""
        return self.context.config(worktree)

    def proof(self, worktree: str, lock_id: str, token: int | None = None) -> Proof:
        """The proof of holding the lease `lock_id`; without a token, the current one is read."""
        return proof_of(self.context, worktree, lock_id, token)

    def now(self) -> float:
        """The time by the store's clock."""
        return self.context.store.now()

    def fenced(self, worktree: str, proof: Proof | None) -> AbstractContextManager[None]:
        """Turn a failure of the block into `FencingMismatch` if the lease was granted to another holder meanwhile."""
        return fenced(self.context, worktree, proof)

    def audit(self, *, verified: bool = False, last: int | None = None, segments: Sequence[Path] = ()) -> AuditReader:
        """A reader of the audit trail, from its beginning, or of at least its `last` entries. With the files of all
        `segments`, the archived entries are verified first."""
        if segments:
            check_segments(self.context.store, self.context.trail, segments)
        return AuditReader(self.context.store, self.context.trail, verified=verified, last=last)

    def newest_audit_entries(self) -> Iterator[AuditEntry]:
        """The entries of the audit trail, newest first. The cost grows with the number used. Raises `Archived` when
        it comes to an archived entry."""
        return (each.record for each in newest_first(self.context.store, self.context.trail.stream))

    def archive_audit(
        self, directory: Path, *, keep: int = 1, before: float | None = None, dry_run: bool = False
    ) -> list[Segment]:
        """Move the entries of an audit trail on a server, except the last `keep` and those that are not older than
        `before`, to files in a directory; return these segments."""
        from holdfast.store.archive import archive
        from holdfast.store.audit import archivable

        trail, holder_id = self.context.trail, self.context.holder.holder_id

        def noted(view: View, now: float, segment: Segment) -> Append:
            facts = {"first": segment.first, "last": segment.last, "file": segment.file, "sha256": segment.sha256}
            return self.context.audit(view, now, "audit_archived", **facts)

        how: dict[str, Any] = {"keep": keep, "before": before, "dry_run": dry_run, "also": (trail.stream, noted)}
        return archive(self.context.store, archivable(trail), directory, holder_id=holder_id, **how)

    def watch_audit(self) -> Watch:
        """A watch that wakes up when the audit trail grows."""
        return self.context.store.watch(self.context.trail.stream)

    def verify_audit(self) -> ChainEnd:
        """Verify the whole chain of the audit trail, and return its end; `AuditChainBroken` names the first break."""
        return check_chain(self.context.store, self.context.trail)

    def watch_landing(self) -> Watch:
        """A watch that wakes up when a landing queue changes."""
        from holdfast.repository.landing_records import TARGETS

        return self.context.store.watch(TARGETS)

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
        warn: Callable[[str], object] | None = None,
    ) -> Descriptor:
        """Take a snapshot of a worktree. An exclusive worktree needs its lease.

        Raises `FencingMismatch` or `LockExpired` if the lease is lost, and `ConsistencyUnavailable` if a file changed
        during the capture; nothing is published then. `warn` is called if the parent snapshot turns out to be damaged.
        """
        from holdfast.repository.snapshots import SnapshotOptions

        options = SnapshotOptions(note, consistency, tag, engine, progress, warn)
        name = worktree_name(worktree)
        with self._proven(name, lease) as proof:
            return self.snapshots.take(name, proof, options)

    def restore(
        self,
        snapshot: str,
        worktree: str = MAIN,
        lease: HeldLease | None = None,
        *,
        reason: str,
        path: str | None = None,
    ) -> Restored:
        """Restore a worktree, or `path` in it, from a snapshot, in one step.

        The previous content becomes a snapshot first. An exclusive worktree needs its lease. `snapshots.restore`
        creates a new worktree instead, which needs no lease.
        """
        from holdfast.repository.restore import RestoreOptions

        name, how = worktree_name(worktree), RestoreOptions(reason=reason, path=path)
        with self._proven(name, lease) as proof:
            source = self.snapshots.named(snapshot, seen_from=name).snapshot_id
            return self.snapshots.restore_in_place(name, source, proof, how)

    @contextlib.contextmanager
    def _proven(self, worktree: str, lease: HeldLease | None) -> Iterator[Proof | None]:
        """The proof of a held lease. A lease that is known to be lost raises at once."""
        proof = None if lease is None else Proof(lease.lock_id, lease.token)
        with fenced(self.context, worktree, proof):
            if lease is not None:
                lease.check()
            yield proof

    def remove_worktree(
        self,
        name: str,
        *,
        keep_unsaved: bool = True,
        force: bool = False,
        lock_id: str | None = None,
        keep_for: float = KEEP_FOR,
    ) -> Removed:
        """Remove a worktree; unsaved content becomes a snapshot first, unless `keep_unsaved` is false. A pin protects
        its last snapshot for `keep_for` seconds. Teardown commands run first; `force` ignores their failure."""
        from holdfast.repository.preparation import free_ports, tear_down
        from holdfast.repository.snapshots import SnapshotOptions

        def save(right: LeasedWorktree) -> str | None:
            options = SnapshotOptions(note=f"before {name} was removed")
            made = self.snapshots.take_if_changed(name, Proof.of(right.lease), options)
            return None if made is None else made.snapshot_id

        def teardown(lease: HeldLease | None) -> None:
            tear_down(self, name, lease, force=force)

        chosen = save if keep_unsaved else None
        removed = self.worktrees.remove(
            name, save=chosen, teardown=teardown, force=force, lock_id=lock_id, keep_for=keep_for
        )
        free_ports(self)
        return removed

    def prove_files(self) -> None:
        """Raise `FilesUnproven` or `StoreRestored` unless this machine sees the files that the records belong to."""
        self.context.prove_site()

    def adopt_files(self) -> int:
        """Declare that these are the files that the records on the server belong to; return the new epoch. Raises
        `LockConflict` while another machine has a lease."""
        if self.context.site is None:
            hint = "Adopting files is for repositories whose records are on a server."
            raise UsageFailure(f"the records of {self.root} are files, not on a server", hint=hint)
        return self.context.site.adopt(self.leases, self.context.trail)

    def examine(self, *, strict: bool = False, progress: Progress | None = None) -> list[Finding]:
        """Examine the repository. Changes nothing. `strict` reads every file of every snapshot."""
        from holdfast.repository.checks import all_checks
        from holdfast.repository.doctor import examine

        return examine(self.context, all_checks(self.context.home), strict=strict, progress=progress)

    def repair(self, *, strict: bool = False, progress: Progress | None = None) -> Repaired:
        """Repair what can be repaired without risk. Idempotent."""
        from holdfast.repository.checks import all_checks
        from holdfast.repository.doctor import repair

        return repair(self.context, all_checks(self.context.home), strict=strict, progress=progress)


def _check_leasable_here(site: Site | None, clone: str, view: View, worktree: str) -> None:
    check_leasable(view, worktree, here=clone)
    if site is not None:
        site.require(view, worktree)


def _is_on_files(root: Path) -> bool:
    try:
        return read_config(root).store == FILES
    except Failure:  # unknown, so nothing is touched
        return False


def _opened(root: Path) -> tuple[Store, RepositoryFormat]:
    """The store of a repository, and its format; raises `NotFound` if the server has no records of it."""
    address = approved_address(root)
    store = open_address(root, address, create=address == FILES)
    try:
        return store, checked_format(store, root)
    except NotFound as failure:
        store.close()
        if address == FILES:
            raise
        shown = without_secrets(address)
        hint = f"Check the address in {CONFIG}. If it is right, restore the records from a backup."
        raise NotFound(
            f"the store {shown} has no records of {root}", hint=hint, store=shown, path=str(root)
        ) from failure
    except BaseException:
        store.close()
        raise


def _opened_to_examine(root: Path) -> Store:
    try:
        return _opened(root)[0]
    except Corrupt as failure:  # must not count as damage to the examined repository
        raise Refused(failure.message, hint=failure.hint, **failure.facts) from failure


def find_repository(start: str | os.PathLike[str], git_dir: str | None = None) -> Path:
    """The repository that a directory is in: the nearest one upwards that has `.jvs/`, or the git home of the checkout
    that it is in, or that `git_dir` (the value of `GIT_DIR`) belongs to."""
    found = calls.find_upwards(start, calls.may_be_repository)
    if found is not None and not calls.is_repository(found):
        found = find_repository_root(found)
    if found is None and git_dir:
        from holdfast.git.checkout import find_checkout

        checkout = find_checkout(os.fspath(start), git_dir)
        found = checkout and root_in(checkout.common)
    if found is not None and calls.is_repository(found):
        return Path(found)
    here = os.path.abspath(start)
    raise NotInitialised(f"{here} is not in a Holdfast repository", create="holdfast init DIR", path=here)


def _paths_of(root: Path) -> RepositoryPaths:
    """The paths of the repository in this directory, or of the git home of the checkout there."""
    if not calls.is_repository(root):  # before opening a store creates its directory
        home = git_home_of(os.fspath(root))
        if home is None:
            raise _no_repository(root)
        root = Path(home)
    return paths_at(root)


def paths_at(root: Path) -> RepositoryPaths:
    """The paths of the repository with this root."""
    if root.name != "holdfast" or not is_git_home(os.fspath(root)):
        return RepositoryPaths(root)
    from holdfast.repository.git_paths import GitPaths

    return GitPaths(root)


def home_at(paths: RepositoryPaths) -> Home:
    """The home with these paths."""
    if type(paths) is RepositoryPaths:
        return PlainHome(paths)
    from holdfast.repository.git_home import GitHome
    from holdfast.repository.git_paths import GitPaths

    assert isinstance(paths, GitPaths)
    return GitHome(paths)


def _no_repository(root: Path) -> NotInitialised:
    message = f"{root} is not a Holdfast repository"
    return NotInitialised(message, create="holdfast init DIR", path=str(root))


def checked_format(store: Store, root: Path) -> RepositoryFormat:
    """The format of the repository at `root`; raises `Refused` if it is newer than this program."""
    document = store.read(FORMAT)
    if document is None:
        raise _no_repository(root)
    if document.record.version > CONTENT_VERSION:
        raise Refused(
            f"{root} has format {document.record.version}, but this version supports at most {CONTENT_VERSION}",
            hint="Use the newer version of Holdfast that wrote it: an older one could damage it.",
            path=str(root),
            version=document.record.version,
            known=CONTENT_VERSION,
        )
    return document.record


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = calls.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
