"""The repository context, the records and keys of a repository, and the token check of every publish."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import (
    Failure,
    FencingMismatch,
    LockConflict,
    LockNotHeld,
    NotFound,
    OutcomeUnknown,
    UsageFailure,
    WorktreeElsewhere,
)
from holdfast.fs.directory import Directory
from holdfast.fs.reserve import Reserve
from holdfast.leases.rules import Identity, LeaseKeys
from holdfast.leases.service import HeldLease, LeaseService
from holdfast.locks.identity import Holder
from holdfast.store.audit import AuditTrail
from holdfast.store.content import ChunkHash
from holdfast.store.model import Append, Family, Instant, Key, SafeName, SafePath, Store, StructCodec, View

if TYPE_CHECKING:
    from holdfast.repository.home import Home
    from holdfast.repository.site import Site

MAIN = "main"  # the worktree that every repository has; it is never renamed or removed
FORMAT_VERSION = 1  # the layout of `.jvs/` of a new repository
JOINED_VERSION = 2  # other clones have joined: a program that does not know about them would do harm
CONTENT_VERSION = 3  # the same for a plain home with a content store, which other machines can join


class Isolation(StrEnum):
    EXCLUSIVE = "exclusive"  # one writer at a time: the holder of the lease
    SHARED = "shared"  # any number of writers; high-risk: nothing protects them from each other


class Consistency(StrEnum):
    QUIESCED = "quiesced"  # nothing changed during the capture
    BEST_EFFORT = "best_effort"  # each file as it was found; files may be from different points in time


class RepositoryFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a repository. `version` grows when older programs could do harm. `home` is `git`, or unset for a
    plain home. `history` is the first commit of a git home, which identifies its clones. `content` is the address of
    the content store of a plain home."""

    version: int
    repository_id: str
    created_at: str
    home: str | msgspec.UnsetType = msgspec.UNSET
    history: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class SnapshotDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    consistency_level: Consistency | None = None


class GitWorktree(msgspec.Struct, frozen=True, kw_only=True):
    """The git worktree behind a worktree: its path, its branch (None: no branch is checked out), whether it is
    isolated, and the clone that has it, by the name of its checkout (unset: `main`). The record of a clone's checkout
    also has the identity of the clone. The operation that creates a worktree also has the commit to start at;
    `new_branch` and `new` say whether it creates the branch and the directory."""

    path: str
    branch: str | None = None
    commit: str | msgspec.UnsetType = msgspec.UNSET
    new_branch: bool | msgspec.UnsetType = msgspec.UNSET
    new: bool | msgspec.UnsetType = msgspec.UNSET
    isolated: bool | msgspec.UnsetType = msgspec.UNSET
    clone: SafeName | msgspec.UnsetType = msgspec.UNSET
    clone_id: str | msgspec.UnsetType = msgspec.UNSET


class PlainWorktree(msgspec.Struct, frozen=True, kw_only=True):
    """The directory of a worktree of a plain home that has joined: its path, the clone that has it, and, in the record
    of a clone's checkout, the identity of the clone."""

    path: str
    clone: SafeName
    clone_id: str | msgspec.UnsetType = msgspec.UNSET


class WorktreeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a worktree: `config.json`. `worktree_id` is its name."""

    worktree_id: SafeName
    isolation: Isolation
    created_at: str
    base_snapshot_id: SafeName | None
    head_snapshot_id: SafeName | None
    label: str | None = None
    snapshot_defaults: SnapshotDefaults | None = None
    git: GitWorktree | msgspec.UnsetType = msgspec.UNSET  # in a git home
    plain: PlainWorktree | msgspec.UnsetType = msgspec.UNSET  # in a plain home that has joined
    prepared_at: str | msgspec.UnsetType = msgspec.UNSET  # when its setup succeeded; left out if there was none

    @property
    def clone(self) -> str:
        """The clone that has the directory, by the name of its checkout."""
        return (self.place and self.place.clone) or MAIN

    @property
    def place(self) -> GitWorktree | PlainWorktree | None:
        """The path of the directory, and the clone that has it, if they are recorded."""
        return self.git or self.plain or None

    @property
    def tip(self) -> str | None:
        """The snapshot that the worktree's content builds on: its head, else the base it was created from."""
        return self.head_snapshot_id or self.base_snapshot_id


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a snapshot. A snapshot is visible when it has a descriptor and its tree has `.READY`."""

    snapshot_id: SafeName
    worktree_id: SafeName
    parent_id: SafeName | None
    created_at: Instant
    consistency_level: Consistency
    engine: str
    payload_hash: str
    files: int
    bytes: int
    note: str = ""
    holder_id: str = ""
    lock_id: str | None = None
    fencing_token: int | None = None
    restored_from: SafeName | None = None  # the snapshot whose content this is, if a restore in place published it
    not_preserved: tuple[str, ...] = ()
    special: tuple[str, ...] = ()  # fifos, sockets and devices: recorded, not captured
    doomed_by: SafeName | None = None  # the gc plan that is deleting this snapshot; nothing new may refer to it
    left_out: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # in a git home: what was not captured, and how much
    clone: SafeName | msgspec.UnsetType = msgspec.UNSET  # the clone that took it; unset: `main`
    content: ChunkHash | msgspec.UnsetType = msgspec.UNSET  # the hash of its chunk list in the content store
    fetched_from: str | msgspec.UnsetType = msgspec.UNSET  # the remote; then `worktree_id` is that of another machine


class OperationKind(StrEnum):
    """A change of a worktree's directory. The comments say how it ends if its process dies."""

    CREATE = "create"  # undone; finished if the directory is in place
    RENAME = "rename"  # finished
    REMOVE = "remove"  # finished
    RESTORE = "restore"  # finished


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A decided change of a worktree's directory that is not complete.

    While it exists, the lease is refused and nothing is published. A process that finds it and gets the payload lock
    finishes it: the process that began it is gone.
    """

    operation_id: SafeName
    kind: OperationKind
    worktree_id: SafeName
    begun_at: Instant
    holder_id: str
    identity: Identity = Identity()
    counterpart: SafeName | None = None  # the other name of a rename
    becomes: bool = False  # whether this is a rename's record under the new name
    inode: str | None = None  # identifies the directory when another one exists at its path
    isolation: Isolation | None = None  # of the worktree to create, like the label
    label: str | None = None
    snapshot_id: SafeName | None = None  # the snapshot to create from or to restore; of a removal, that of unsaved work
    path: SafePath | None = None  # the part of the tree to restore, if not all of it
    reason: str = ""
    keeps: bool = False  # of a restore or removal: whether to keep the old content, down to the last write
    pinned_until: Instant | None = None  # of a removal: how long a pin protects the last snapshot; None: no pin
    git: GitWorktree | msgspec.UnsetType = msgspec.UNSET  # of a creation in a git home
    clone: SafeName | msgspec.UnsetType = msgspec.UNSET  # the clone that has the directory; unset: `main`


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A name for a snapshot, which protects it from collection."""

    name: SafeName
    snapshot_id: SafeName
    created_at: str
    note: str = ""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Protects a snapshot from collection, perhaps for a limited time. A snapshot can have several."""

    pin_id: SafeName
    snapshot_id: SafeName
    created_at: str
    reason: str = ""
    until: Instant | None = None
    holder_id: str = ""


FORMAT: Key[RepositoryFormat] = Key("jvs/format", StructCodec(RepositoryFormat))
WORKTREES: Family[WorktreeConfig] = Family("jvs/worktrees", StructCodec(WorktreeConfig), id_field="worktree_id")
OPERATIONS: Family[Operation] = Family("jvs/operations", StructCodec(Operation), id_field="worktree_id")
DESCRIPTORS: Family[Descriptor] = Family("jvs/descriptors", StructCodec(Descriptor), id_field="snapshot_id")
REFERENCES: Family[Reference] = Family("jvs/refs", StructCodec(Reference), id_field="name")
PINS: Family[Pin] = Family("jvs/pins", StructCodec(Pin), id_field="pin_id")


def worktree_keys(name: str) -> list[Key[Any]]:
    """The record of a worktree, and the operation pending on it."""
    return [WORKTREES.key(name), OPERATIONS.key(name)]


READY = ".READY"


class RepositoryPaths:
    """The paths in a repository apart from its documents. All of them are on one filesystem."""

    def __init__(self, root: Path) -> None:
        private = root / ".jvs"
        self.root = root
        self.main = MAIN  # the worktree that is the main checkout here; it has another name in a clone that has joined
        self.private = private  # nothing below it is content of a worktree
        self.snapshots = private / "snapshots"
        self.remnants = private / "remnants"  # directories of deleted snapshots that others still share
        self.quarantine = private / "quarantine"  # trees of unknown origin, for people to inspect
        self.scratch = private / "tmp"  # unfinished trees, each in a scratch directory of its own
        self.caches = private / "cache"  # can be deleted at any time
        self.guards = private / "guards"
        self.checks = private / "checks"  # runs of checks with their logs, and the records of scratch worktrees
        self.is_elsewhere: Callable[[Identity], bool] = lambda identity: False  # see `Site.is_elsewhere`
        self.reserve = Reserve(private / "reserve", caches=self.caches)  # freed when the disk is full

    @property
    def worktrees(self) -> Path:
        """The directory in which new worktrees are created."""
        return self.root / "worktrees"

    def foreign(self, worktree: str) -> list[Path]:
        """Directories that may be inside a worktree's directory but are not part of its content."""
        return [self.private]

    def payload(self, worktree: str) -> Path:
        """The directory that a worktree's users work in; it contains none of our files."""
        return self.root / MAIN if worktree == MAIN else self.worktrees / worktree

    def above(self, worktree: str) -> Directory:
        """The open directory that contains the worktree's directory; a link is refused."""
        with Directory.open(self.root) as root:
            if worktree != MAIN:
                return root.enter("worktrees")
        return Directory.open(self.root)

    def check(self, worktree: str, path: Path) -> None:
        """Raise `DirectoryReplaced` if an existing directory is not that of the worktree."""

    def tree(self, snapshot_id: str) -> Path:
        """The directory of a snapshot: `payload/`, `manifest` and `.READY`."""
        return self.snapshots / snapshot_id

    def stat_cache(self, worktree: str) -> Path:
        return self.caches / f"{worktree}.stat"


class RepositoryContext(NamedTuple):
    """One open repository, which every operation receives."""

    home: Home
    store: Store
    trail: AuditTrail
    leases: LeaseService
    site: Site | None = None  # None if the records are files too

    def prove_site(self) -> None:
        """Raise `FilesUnproven` or `StoreRestored` unless this machine sees the files that the records belong to."""
        if self.site is not None:
            self.site.prove()

    @property
    def paths(self) -> RepositoryPaths:
        return self.home.paths

    @property
    def holder(self) -> Holder:
        return self.leases.holder

    def audit(self, view: View, now: float, event: str, **facts: object) -> Append:
        """The audit entry of a transaction, which must name `self.trail.stream`. Pure."""
        return self.trail.entry(view, now, event, actor=self.holder.holder_id, facts=facts)

    def operation(self, kind: OperationKind, operation_id: str, worktree: str, now: float, **facts: Any) -> Operation:
        """An operation that this process begins `now`. Pure."""
        return Operation(
            operation_id=operation_id,
            kind=kind,
            worktree_id=worktree,
            begun_at=format_instant(now),
            holder_id=self.holder.holder_id,
            identity=Identity.of(self.holder),
            clone=self.clone,
            **facts,
        )

    @property
    def clone(self) -> str | msgspec.UnsetType:
        """This clone, as a field of a record; unset means `main`."""
        return msgspec.UNSET if self.paths.main == MAIN else self.paths.main

    def descriptor(self, snapshot_id: str) -> Descriptor | None:
        document = self.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record

    def pending(self, worktree: str) -> Operation | None:
        document = self.store.read(OPERATIONS.key(worktree))
        return None if document is None else document.record

    def config(self, worktree: str) -> WorktreeConfig:
        """The current record of a worktree, or `NotFound`. Takes no lock."""
        document = self.store.read(WORKTREES.key(worktree))
        if document is None:
            raise worktree_not_found(worktree, known_names(self.store, WORKTREES))
        return document.record


def new_snapshot_id() -> str:
    """A unique id, random from its first character on, so that a short prefix identifies the snapshot."""
    return secrets.token_hex(8)


def worktree_not_found(worktree: str, known: Iterable[str] = ()) -> NotFound:
    hint = did_you_mean(worktree, known) + "List the worktrees: 'holdfast worktree list'."
    return NotFound(f"there is no worktree {worktree}", hint=hint, worktree=worktree)


def known_names(store: Store, family: Family[Any]) -> list[str]:
    """The names of all records of a family, for a hint; none if a record cannot be read."""
    with contextlib.suppress(Failure):
        return [name for name, _ in store.scan(family)]
    return []


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'Did you mean …?' for a mistyped name; empty if no known name resembles it."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=1)
    return f"Did you mean {similar[0]}? " if similar else ""


def settle(context: RepositoryContext, worktree: str) -> Operation | None:
    """Finish the pending operation of a dead process on a worktree; return it, if there is one. Raises `LockConflict`
    if its process is alive, or if the directory is in another clone. Costs one read if nothing is pending."""
    pending = context.pending(worktree)
    if pending is not None and pending.clone != context.clone:
        raise operation_pending(pending)
    return None if pending is None else context.home.finish(context, pending)


# --- The state of a worktree, for decide functions ----------------------------------------------------


def settled_config(view: View, worktree: str) -> WorktreeConfig:
    """The record of a worktree that has no pending operation; else raise. Pure."""
    pending = view.get(OPERATIONS.key(worktree))
    if pending is not None:
        raise operation_pending(pending)
    config = view.get(WORKTREES.key(worktree))
    if config is None:
        raise worktree_not_found(worktree)
    return config


def has_several_clones(store: Store) -> bool:
    """Whether several clones share the records now. Costs one read if none has ever joined."""
    found = store.read(FORMAT)
    if found is None or found.record.version < JOINED_VERSION:
        return False
    return any(document.record.clone != MAIN for _, document in store.scan(WORKTREES))


def require_here(config: WorktreeConfig, here: str) -> None:
    """Raise `WorktreeElsewhere` if the directory of a worktree is in another clone than this one. Pure."""
    if config.clone != here:
        name, path = config.worktree_id, config.place.path if config.place else ""
        message = f"the directory of {name} is in the clone {config.clone}, not in this one: {path}"
        raise WorktreeElsewhere(message, worktree=name, clone=config.clone, path=path)


def check_leasable(view: View, worktree: str, *, here: str = MAIN) -> None:
    """Refuse the lease of a worktree that does not exist, has a pending operation, is shared, or is in another clone
    than `here`. Pure."""
    try:
        config = settled_config(view, worktree)
    except NotFound as failure:
        failure.hint = f"{failure.hint} To lease a name instead of a worktree: --name, or lease(name=...)."
        raise
    require_here(config, here)
    if config.isolation is Isolation.SHARED:
        message = f"{worktree} is a shared worktree (high-risk): it has any number of writers and no lease"
        hint = "Write without a lease, or use an exclusive worktree: 'holdfast worktree create NAME'."
        raise UsageFailure(message, hint=hint, worktree=worktree)


def operation_pending(operation: Operation) -> LockConflict:
    done = f"{operation.kind}d" + (" in place" if operation.kind is OperationKind.RESTORE else "")
    return LockConflict(
        f"{operation.worktree_id} is being {done} by {operation.holder_id}",
        hint="Try again in a moment. If its process has died, the next command finishes its work.",
        worktree=operation.worktree_id,
        operation=operation.kind.value,
        operation_id=operation.operation_id,
        holder_id=operation.holder_id,
        since=operation.begun_at,
    )


# --- The token check ----------------------------------------------------------------------------------


class Proof(NamedTuple):
    """The lock id and token of a lease: the right to publish while that lease is current."""

    lock_id: str
    token: int

    @classmethod
    def of(cls, lease: HeldLease | None) -> Proof | None:
        """The proof of a held lease, None without one; raises if the lease is known to be lost."""
        if lease is None:
            return None
        lease.check()
        return cls(lease.lock_id, lease.token)


TokenCheck = Callable[[View, float], WorktreeConfig]
"""Returns the worktree's record if it may be changed in this transaction; else raises. Pure."""


def token_check(context: RepositoryContext, worktree: str, proof: Proof | None) -> TokenCheck:
    """The comparison of lease and token that every publish makes inside its own transaction.

    Snapshot, restore in place, rename and remove call the result in the decide function that commits them, on a view
    that has `publishing_keys`: no steal can come between check and commit. It raises if an operation is pending, or if
    an exclusive worktree's current lease does not have the proof's lock id and token. The clock is read now: a stale
    reading may admit a holder whose lease has just expired, but never one whose lease was taken over.
    """
    validate = None if proof is None else context.leases.validator(worktree, proof.lock_id, proof.token)

    def check(view: View, now: float) -> WorktreeConfig:
        config = settled_config(view, worktree)
        require_here(config, context.paths.main)
        if config.isolation is Isolation.EXCLUSIVE:
            if validate is None:
                message = f"{worktree} is an exclusive worktree: this needs its lease"
                hint = "Run 'holdfast lease acquire' and pass --lock-id or HOLDFAST_LOCK_ID, or use 'holdfast run'."
                raise LockNotHeld(message, hint=hint, worktree=worktree)
            validate(view, now)
        return config

    return check


def publishing_keys(worktree: str) -> list[Key[Any]]:
    """The documents that a transaction with a token check must name."""
    keys = LeaseKeys.of(worktree)
    return [*worktree_keys(worktree), keys.lease, keys.counter]


def check_early(context: RepositoryContext, worktree: str, proof: Proof | None) -> WorktreeConfig:
    """The token check outside a transaction: it refuses early, but proves only the site. (Every holder of a lease has
    proved that too, and `Site.adopt` waits for the leases of other machines.)"""
    context.prove_site()
    view = View({key: context.store.read(key) for key in publishing_keys(worktree)})
    return token_check(context, worktree, proof)(view, context.store.now())


@contextlib.contextmanager
def fenced(context: RepositoryContext, worktree: str, proof: Proof | None) -> Iterator[None]:
    """Turn a failure of the block into `FencingMismatch` if another holder was granted the lease since: then the lost
    lease is the reason, whatever that holder did to the files."""
    try:
        yield
    except (FencingMismatch, OutcomeUnknown):
        raise
    except Failure as failure:
        counter = context.store.read(LeaseKeys.of(worktree).counter)
        if proof is not None and counter is not None and proof.token < counter.record.fencing_token:
            raise _not_current(worktree, proof.lock_id, counter.record.fencing_token) from failure
        raise


def _not_current(worktree: str, lock_id: str, token: int | None) -> FencingMismatch:
    message = f"{lock_id} is not the current lease of {worktree}; nothing was published"
    return FencingMismatch(message, worktree=worktree, lock_id=lock_id, current_token=token)


def proof_of(context: RepositoryContext, worktree: str, lock_id: str, token: int | None = None) -> Proof:
    """The proof for the lease `lock_id`; without a token, with the current token of that lease."""
    if token is not None:
        return Proof(lock_id, token)
    document = context.store.read(LeaseKeys.of(worktree).lease)
    if document is None or document.record.lock_id != lock_id:
        counter = context.store.read(LeaseKeys.of(worktree).counter)
        raise _not_current(worktree, lock_id, counter.record.fencing_token if counter else None)
    return Proof(lock_id, document.record.fencing_token)
