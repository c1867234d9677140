"""The repository context, which every operation receives; the token check of publishing; snapshot names."""

from __future__ import annotations

import contextlib
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import (
    Ambiguous,
    Failure,
    FencingMismatch,
    LockConflict,
    LockNotHeld,
    NameInvalid,
    NotFound,
    PartialSnapshot,
    Refused,
    SnapshotCollected,
    UsageFailure,
)
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure
from holdfast.fs.names import is_safe_name, safe_name
from holdfast.fs.reserve import Reserve
from holdfast.leases.rules import LeaseKeys
from holdfast.leases.service import HeldLease, LeaseService
from holdfast.locks.identity import Holder
from holdfast.repository.records import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    REFERENCES,
    WORKTREES,
    Descriptor,
    Isolation,
    Operation,
    OperationKind,
    WorktreeConfig,
)
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Append, Family, Key, Store, View


class RepositoryPaths:
    """Everything in a repository that is not a document. All of it is on one filesystem."""

    def __init__(self, root: Path) -> None:
        private = root / ".jvs"
        self.root = root
        self.worktrees = root / "worktrees"
        self.snapshots = private / "snapshots"
        self.remnants = private / "remnants"  # directories of deleted snapshots that others still share
        self.quarantine = private / "quarantine"  # trees of unknown origin, for people to inspect
        self.scratch = private / "tmp"  # unfinished trees, each in a scratch directory of its own
        self.caches = private / "cache"  # files that only save time; they can be deleted at any moment
        self.guards = private / "guards"
        self.reserve = Reserve(private / "reserve", caches=self.caches)  # for when the disk is full

    def payload(self, worktree: str) -> Path:
        """The directory that a worktree's users work in; it contains nothing of ours."""
        return self.root / MAIN if worktree == MAIN else self.worktrees / worktree

    def tree(self, snapshot_id: str) -> Path:
        """The directory of a snapshot: `payload/`, `manifest` and `.READY`."""
        return self.snapshots / snapshot_id

    def stat_cache(self, worktree: str) -> Path:
        return self.caches / f"{worktree}.stat"


class RepositoryContext(NamedTuple):
    """One open repository. Every operation receives it; none opens anything itself."""

    places: RepositoryPaths
    store: Store
    trail: AuditTrail
    desk: LeaseService

    @property
    def holder(self) -> Holder:
        return self.desk.holder

    def audit(self, view: View, now: float, event: str, **facts: object) -> Append:
        """The audit entry of a transaction, which must name `self.trail.stream`. Pure."""
        return self.trail.entry(view, now, event, actor=self.holder.holder_id, facts=facts)

    def config(self, worktree: str) -> WorktreeConfig:
        """The current record of a worktree, or `NotFound`. Takes no lock."""
        document = self.store.read(WORKTREES.key(worktree))
        if document is None:
            raise worktree_not_found(worktree, _known_names(self.store, WORKTREES))
        return document.record


def new_snapshot_id() -> str:
    """A unique id; random from its first character on, so that a short prefix names the snapshot."""
    return secrets.token_hex(8)


def worktree_not_found(worktree: str, known: Iterable[str] = ()) -> NotFound:
    return NotFound(
        f"there is no worktree {worktree}",
        hint=meant(worktree, known) + "List the worktrees: 'holdfast worktree list'.",
        worktree=worktree,
    )


def snapshot_not_found(name: str, references: Iterable[str] = ()) -> NotFound:
    return NotFound(
        f"there is no snapshot {name}",
        hint=meant(name, [HEAD, *references]) + "List the snapshots: 'holdfast history --all'.",
        name=name,
    )


def _known_names(store: Store, family: Family[Any]) -> list[str]:
    """The names of all records of a kind, for a hint; none if some of them cannot be read."""
    with contextlib.suppress(Failure):
        return [name for name, _ in store.scan(family)]
    return []


def meant(name: str, known: Iterable[str]) -> str:
    """'Did you mean …?' for a mistyped name; empty if no known name resembles it."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=1)
    return f"Did you mean {similar[0]}? " if similar else ""


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


def may_be_leased(view: View, worktree: str) -> None:
    """Refuse the lease of a worktree that does not exist, is being changed, or is shared. Pure."""
    if settled_config(view, worktree).isolation is Isolation.SHARED:
        raise UsageFailure(
            f"{worktree} is a shared worktree (high-risk): anybody may write at any time, so it has no lease",
            hint="Write without a lease, or use an exclusive worktree: 'holdfast worktree create NAME'.",
            worktree=worktree,
        )


_PARTICIPLES = {
    OperationKind.CREATE: "created",
    OperationKind.RENAME: "renamed",
    OperationKind.REMOVE: "removed",
    OperationKind.RESTORE: "restored in place",
}


def operation_pending(operation: Operation) -> LockConflict:
    return LockConflict(
        f"{operation.worktree_id} is being {_PARTICIPLES[operation.kind]} by {operation.holder_id} "
        f"since {operation.begun_at}",
        hint="Try again in a moment. If its process has died, the next command finishes its work.",
        worktree=operation.worktree_id,
        operation=operation.kind.value,
        operation_id=operation.operation_id,
        holder_id=operation.holder_id,
        since=operation.begun_at,
    )


# --- The token check ----------------------------------------------------------------------------------


class Proof(NamedTuple):
    """The lock id and token of a lease: the right to publish as long as that lease is the current one."""

    lock_id: str
    token: int

    @classmethod
    def of(cls, lease: HeldLease | None) -> Proof | None:
        """The proof of a held lease, None without one; a lease that is known to be lost raises."""
        if lease is None:
            return None
        lease.check()
        return cls(lease.lock_id, lease.token)


TokenCheck = Callable[[View, float], WorktreeConfig]
"""Returns the worktree's record if it may be changed in this transaction; else raises. Pure."""


def token_check(context: RepositoryContext, worktree: str, proof: Proof | None) -> TokenCheck:
    """The comparison of lease and token that every publish makes inside its own transaction.

    Snapshot, restore in place, rename and remove all call its result in the decide function that
    commits them, on a view that has `publishing_keys`: so no steal can come between check and commit.
    It raises if an operation is pending, or if an exclusive worktree's current lease does not have the
    proof's lock id and token. The clock is read now. A stale reading may admit a holder whose lease has
    just expired, but never one whose lease was taken over.
    """
    validate = None if proof is None else context.desk.validator(worktree, proof.lock_id, proof.token)

    def check(view: View, now: float) -> WorktreeConfig:
        config = settled_config(view, worktree)
        if config.isolation is Isolation.EXCLUSIVE:
            if validate is None:
                raise LockNotHeld(
                    f"{worktree} is an exclusive worktree: this needs its lease",
                    hint="Acquire it ('holdfast lease acquire') and pass its id with --lock-id or "
                    "HOLDFAST_LOCK_ID, or work under 'holdfast run'.",
                    worktree=worktree,
                )
            validate(view, now)
        return config

    return check


def publishing_keys(worktree: str) -> list[Key[Any]]:
    """The documents that a transaction with a token check must name."""
    keys = LeaseKeys.of(worktree)
    return [WORKTREES.key(worktree), OPERATIONS.key(worktree), keys.lease, keys.counter]


def check_early(context: RepositoryContext, worktree: str, proof: Proof | None) -> WorktreeConfig:
    """The token check outside any transaction: it saves work that would be refused, and proves nothing."""
    view = View({key: context.store.read(key) for key in publishing_keys(worktree)})
    return token_check(context, worktree, proof)(view, context.store.now())


def proof_of(context: RepositoryContext, worktree: str, lock_id: str, token: int | None = None) -> Proof:
    """The proof for the lease `lock_id`; without a token, the one that this very lease has now."""
    if token is not None:
        return Proof(lock_id, token)
    document = context.store.read(LeaseKeys.of(worktree).lease)
    if document is None or document.record.lock_id != lock_id:
        counter = context.store.read(LeaseKeys.of(worktree).counter)
        raise FencingMismatch(
            f"{lock_id} is not the current lease of {worktree}; nothing was published",
            worktree=worktree,
            lock_id=lock_id,
            current_token=counter.record.fencing_token if counter else None,
        )
    return Proof(lock_id, document.record.fencing_token)


# --- Snapshots by name --------------------------------------------------------------------------------

HEAD = "head"
READY = ".READY"
MOST_STEPS = 1_000_000

_STEPS = re.compile(r"(?P<start>[^~]*)(?P<steps>(?:~\d*)*)", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


def resolve(context: RepositoryContext, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, seen from `worktree`: visible, but perhaps marked for deletion."""
    prefix, colon, name = text.rpartition(":")
    if colon:
        worktree = safe_name(prefix, what="worktree name")
    match = _STEPS.fullmatch(name)
    if match is None or not match["start"]:
        raise NameInvalid(
            f"{text!a} is not the name of a snapshot",
            hint="Use an id, a unique prefix of one, a reference, head, or head~2.",
            name=ascii(text),
        )
    found = visible(context, _start(context, match["start"], worktree, head_only=bool(colon)))
    steps = sum(int(each or 1) for each in match["steps"].split("~")[1:])  # `~3` is three, `~1~1` two
    if steps > MOST_STEPS:
        raise NotFound(f"{text}: no history is that long", name=text)
    for _ in range(steps):
        found = _parent(context, found, text)
    return found


def resolve_usable(context: RepositoryContext, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, if something new may refer to it."""
    return usable(resolve(context, text, worktree=worktree))


def _start(context: RepositoryContext, name: str, worktree: str, *, head_only: bool) -> str:
    """The id of the snapshot at which the steps to parents begin."""
    if name == HEAD:
        tip = context.config(worktree).tip
        if tip is None:
            raise NotFound(
                f"{worktree} has no snapshot yet",
                hint="Take one: 'holdfast snapshot'.",
                worktree=worktree,
            )
        return tip
    if head_only:
        raise NameInvalid(
            f"only 'head' can follow a worktree and ':', not {name!a}", name=f"{worktree}:{name}"
        )
    name = safe_name(name, what="name of a snapshot")
    if context.store.read(DESCRIPTORS.key(name)) is not None:
        return name
    reference = context.store.read(REFERENCES.key(name))
    return reference.record.snapshot_id if reference is not None else _by_prefix(context, name)


def _by_prefix(context: RepositoryContext, prefix: str) -> str:
    """The one snapshot whose id has this prefix; trees without a descriptor count only as a last resort."""
    trees = [each for each in _tree_names(context.places) if each.startswith(prefix)]
    described = [each for each in trees if context.store.read(DESCRIPTORS.key(each)) is not None]
    candidates = described or trees
    if not candidates:
        raise snapshot_not_found(prefix, _known_names(context.store, REFERENCES))
    if len(candidates) > 1 and prefix not in candidates:
        raise Ambiguous(prefix, candidates)
    return prefix if prefix in candidates else candidates[0]


def _parent(context: RepositoryContext, child: Descriptor, text: str) -> Descriptor:
    """The current parent of a snapshot: a collection may attach the child to another one at any moment."""
    while True:
        if child.parent_id is None:
            raise NotFound(f"{text}: {child.snapshot_id} has no parent", name=text)
        try:
            return visible(context, child.parent_id)
        except NotFound:
            again = visible(context, child.snapshot_id)
            if again.parent_id == child.parent_id:
                raise
            child = again


def visible(context: RepositoryContext, snapshot_id: str) -> Descriptor:
    """The descriptor of a complete snapshot, by its full id."""
    document = context.store.read(DESCRIPTORS.key(snapshot_id))
    if document is not None and is_ready(context.places, snapshot_id):
        return document.record
    if document is not None:
        refuse_if_collected(context, snapshot_id)
    elif snapshot_id not in _tree_names(context.places):
        raise snapshot_not_found(snapshot_id)
    raise PartialSnapshot(
        f"the snapshot {snapshot_id} is not complete: "
        + ("its tree is missing or has no .READY" if document else "it was never published"),
        snapshot_id=snapshot_id,
    )


def usable(descriptor: Descriptor) -> Descriptor:
    """The same snapshot, unless it is marked for deletion. Pure."""
    if descriptor.doomed_by is not None:
        raise Refused(
            f"the snapshot {descriptor.snapshot_id} is being deleted by the plan {descriptor.doomed_by}",
            hint="Choose another snapshot. See 'holdfast gc plan' for what is kept, and why.",
            snapshot_id=descriptor.snapshot_id,
            plan=descriptor.doomed_by,
        )
    return descriptor


def refuse_if_collected(context: RepositoryContext, snapshot_id: str) -> None:
    """Raise `SnapshotCollected` if a snapshot that was visible is being deleted by now, or is gone.

    Readers that do not protect a snapshot call this when something is missing. A collection marks a
    snapshot before it deletes anything, so a snapshot that is neither marked nor gone is damaged.
    """
    document = context.store.read(DESCRIPTORS.key(snapshot_id))
    if document is None or document.record.doomed_by is not None:
        plan = document.record.doomed_by if document is not None else None
        by = f"is being deleted by the plan {plan}" if plan else "was deleted by a garbage collection"
        raise SnapshotCollected(f"the snapshot {snapshot_id} {by}", snapshot_id=snapshot_id, plan=plan)


@contextlib.contextmanager
def reading(context: RepositoryContext, *snapshot_ids: str) -> Iterator[None]:
    """Read unprotected snapshots: a failure becomes `SnapshotCollected` if one of them was collected."""
    try:
        yield
    except SnapshotCollected:
        raise
    except Failure:
        for each in snapshot_ids:
            refuse_if_collected(context, each)
        raise


def is_ready(paths: RepositoryPaths, snapshot_id: str) -> bool:
    """Whether the tree of a snapshot exists and is complete."""
    path = paths.tree(snapshot_id) / READY
    try:
        return stat.S_ISREG(calls.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_failure("look at", path, error) from error


def _tree_names(paths: RepositoryPaths) -> list[str]:
    """The ids of all trees, complete or not. Listing names is cheap, however many there are."""
    try:
        with Directory.open(paths.snapshots) as directory:
            return sorted(name for name in directory.names() if is_safe_name(name))
    except NotFound:
        return []


def reference_name(name: str) -> str:
    """The name, if a reference may have it: neither `head` nor anything that looks like an id."""
    name = safe_name(name, what="name of a reference")
    if name == HEAD or _ID.fullmatch(name):
        raise UsageFailure(
            f"a reference cannot be called {name}: that already names a snapshot",
            hint="Choose another name.",
            name=name,
        )
    return name
