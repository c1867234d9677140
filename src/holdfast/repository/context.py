"""What every operation on a repository needs: its directories, its store, its audit trail, its leases."""

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
from holdfast.leases.service import LeaseService
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


class RepositoryPaths(NamedTuple):
    """Where a repository keeps what is not a document. All of it is on one filesystem."""

    root: Path

    @property
    def worktrees(self) -> Path:
        return self.root / "worktrees"

    @property
    def snapshots(self) -> Path:
        return self.root / ".jvs" / "snapshots"

    @property
    def remnants(self) -> Path:
        """What is left of trees whose snapshots are gone: the directories that other snapshots need."""
        return self.root / ".jvs" / "remnants"

    @property
    def quarantine(self) -> Path:
        """Trees of which nobody knows where they come from, put aside for people to look at."""
        return self.root / ".jvs" / "quarantine"

    @property
    def scratch(self) -> Path:
        """Trees in the making, each in a directory of its own; see `scratch`."""
        return self.root / ".jvs" / "tmp"

    @property
    def caches(self) -> Path:
        """What can be deleted at any time, and costs only time then."""
        return self.root / ".jvs" / "cache"

    @property
    def guards(self) -> Path:
        return self.root / ".jvs" / "guards"

    @property
    def reserve(self) -> Reserve:
        """What is set aside for the day when the disk is full."""
        return Reserve(self.root / ".jvs" / "reserve", caches=self.caches)

    def payload(self, worktree: str) -> Path:
        """The directory that the users of a worktree work in: nothing of ours is ever in it."""
        return self.root / MAIN if worktree == MAIN else self.worktrees / worktree

    def tree(self, snapshot_id: str) -> Path:
        """The directory of a snapshot: `payload/`, `manifest` and `.READY`."""
        return self.snapshots / snapshot_id

    def stat_cache(self, worktree: str) -> Path:
        return self.caches / f"{worktree}.stat"


class RepositoryContext(NamedTuple):
    """One repository, opened. It is handed to every part; none of them opens anything itself."""

    places: RepositoryPaths
    store: Store
    trail: AuditTrail
    desk: LeaseService

    @property
    def holder(self) -> Holder:
        return self.desk.holder

    def audit(self, view: View, now: float, event: str, **facts: object) -> Append:
        """The change that records what a transaction does; it must name `self.trail.stream`. Pure."""
        return self.trail.entry(view, now, event, actor=self.holder.holder_id, facts=facts)

    def config(self, worktree: str) -> WorktreeConfig:
        """The record of a worktree as of now; `NotFound` if there is none. Takes no lock."""
        document = self.store.read(WORKTREES.key(worktree))
        if document is None:
            raise no_worktree(worktree, names_in(self.store, WORKTREES))
        return document.record


def new_snapshot_id() -> str:
    """An id that no other snapshot has; random from the start, so that a few characters name it."""
    return secrets.token_hex(8)


def names_in(store: Store, family: Family[Any]) -> list[str]:
    """The names of all records of a kind, for a hint; none if some of them cannot be read."""
    with contextlib.suppress(Failure):
        return [name for name, _ in store.scan(family)]
    return []


def no_worktree(worktree: str, known: Iterable[str] = ()) -> NotFound:
    """What is raised for a worktree that is not there; of those that are known, one may be meant."""
    return NotFound(
        f"there is no worktree {worktree}",
        hint=meant(worktree, known) + "See 'holdfast worktree list' for those that are there.",
        worktree=worktree,
    )


def meant(name: str, known: Iterable[str]) -> str:
    """A question that helps who has mistyped a name; nothing if no known one is like it."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=1)
    return f"Did you mean {similar[0]}? " if similar else ""


def settled_config(view: View, worktree: str) -> WorktreeConfig:
    """The record of a worktree to which nothing is being done; else raise. Pure, for decide functions."""
    pending = view.get(OPERATIONS.key(worktree))
    if pending is not None:
        raise being_changed(pending)
    config = view.get(WORKTREES.key(worktree))
    if config is None:
        raise no_worktree(worktree)
    return config


def may_be_leased(view: View, worktree: str) -> None:
    """Refuse the lease of a worktree that is not there, is being changed, or has no leases. Pure."""
    if settled_config(view, worktree).isolation is Isolation.SHARED:
        raise UsageFailure(
            f"{worktree} is a shared worktree (high-risk): anybody may write at any time, "
            "so there is no lock to hold",
            hint="Write without a lock, or use an exclusive worktree: 'holdfast worktree create NAME'.",
            worktree=worktree,
        )


_DOING = {
    OperationKind.CREATE: "created",
    OperationKind.RENAME: "renamed",
    OperationKind.REMOVE: "removed",
    OperationKind.RESTORE: "restored in place",
}


def being_changed(operation: Operation) -> LockConflict:
    """What to tell who meets an operation that is not at its end."""
    return LockConflict(
        f"{operation.worktree_id} is being {_DOING[operation.kind]} by {operation.holder_id} "
        f"since {operation.begun_at}",
        hint="Try again in a moment. If its process has died, the next command finishes its work.",
        worktree=operation.worktree_id,
        operation=operation.kind.value,
        operation_id=operation.operation_id,
        holder_id=operation.holder_id,
        since=operation.begun_at,
    )


class Proof(NamedTuple):
    """The right to publish, as long as the lease that it names is the current one."""

    lock_id: str
    token: int


Permission = Callable[[View, float], WorktreeConfig]
"""The worktree's record, if it may be published into at this moment; else raises. Pure."""


def proof_of(control: RepositoryContext, worktree: str, lock_id: str, token: int | None = None) -> Proof:
    """The proof of who holds the lease `lock_id`; a token that is not given is the one that it has now."""
    if token is not None:
        return Proof(lock_id, token)
    document = control.store.read(LeaseKeys.of(worktree).lease)
    if document is None or document.record.lock_id != lock_id:
        counter = control.store.read(LeaseKeys.of(worktree).counter)
        raise FencingMismatch(
            f"the lock {lock_id} is not the current one of {worktree}; nothing was published",
            worktree=worktree,
            lock_id=lock_id,
            current_token=counter.record.fencing_token if counter else None,
        )
    return Proof(lock_id, document.record.fencing_token)


def publishing_keys(worktree: str) -> list[Key[Any]]:
    """What a transaction names that asks for a permission."""
    keys = LeaseKeys.of(worktree)
    return [WORKTREES.key(worktree), OPERATIONS.key(worktree), keys.lease, keys.counter]


def permission(control: RepositoryContext, worktree: str, proof: Proof | None) -> Permission:
    """Whether what comes with this proof may be published, to be asked inside the transaction that does.

    So no steal can come between the question and the publishing. The clock is read now; if it is old
    by then it may let in a holder whose time is up, but never one whose place somebody has taken.
    """
    validate = None if proof is None else control.desk.validator(worktree, proof.lock_id, proof.token)

    def ask(view: View, now: float) -> WorktreeConfig:
        config = settled_config(view, worktree)
        if config.isolation is Isolation.EXCLUSIVE:
            if validate is None:
                raise not_held(worktree)
            validate(view, now)
        return config

    return ask


def check_early(control: RepositoryContext, worktree: str, proof: Proof | None) -> WorktreeConfig:
    """The same as of now, so that what is bound to be refused costs no work. It proves nothing."""
    view = View({key: control.store.read(key) for key in publishing_keys(worktree)})
    return permission(control, worktree, proof)(view, control.store.now())


def not_held(worktree: str) -> LockNotHeld:
    return LockNotHeld(
        f"{worktree} is an exclusive worktree: this needs its lock",
        hint="Acquire it ('holdfast lease acquire') and hand on its id with --lock-id or HOLDFAST_LOCK_ID, "
        "or work under 'holdfast run'.",
        worktree=worktree,
    )


HEAD = "head"
READY = ".READY"

_STEPS = re.compile(r"(?P<start>[^~]*)(?P<steps>(?:~\d*)*)", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
MOST_STEPS = 1_000_000


def resolve(control: RepositoryContext, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, seen from `worktree`. It is visible; it may be doomed."""
    where, colon, name = text.rpartition(":")
    if colon:
        worktree = safe_name(where, what="worktree name")
    match = _STEPS.fullmatch(name)
    if match is None or not match["start"]:
        raise NameInvalid(
            f"{text!a} is not the name of a snapshot",
            hint="Name it by its id or the first characters of it, a reference, head, or head~2.",
            name=ascii(text),
        )
    found = visible(control, _start(control, match["start"], worktree, of_a_worktree=bool(colon)))
    for _ in range(_count(match["steps"], text)):
        found = _parent(control, found, text)
    return found


def _parent(control: RepositoryContext, child: Descriptor, text: str) -> Descriptor:
    """The parent of a snapshot as of now: a collection may give it another one at any moment."""
    while True:
        if child.parent_id is None:
            raise NotFound(f"{text}: {child.snapshot_id} has no parent", name=text)
        try:
            return visible(control, child.parent_id)
        except NotFound:
            now = visible(control, child.snapshot_id)
            if now.parent_id == child.parent_id:
                raise
            child = now


def resolve_usable(control: RepositoryContext, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, if something new may rest on it."""
    return usable(resolve(control, text, worktree=worktree))


def visible(control: RepositoryContext, snapshot_id: str) -> Descriptor:
    """The descriptor of a snapshot that is there and complete, by its full id."""
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    ready = is_ready(control.places, snapshot_id)
    if document is not None and ready:
        return document.record
    if document is None and not _has_tree(control.places, snapshot_id):
        raise no_snapshot(snapshot_id)
    if document is not None:
        refuse_if_collected(control, snapshot_id)
    raise PartialSnapshot(
        f"the snapshot {snapshot_id} is not complete: "
        + ("its tree is not there or has no .READY" if document else "it was never published"),
        snapshot_id=snapshot_id,
    )


def refuse_if_collected(control: RepositoryContext, snapshot_id: str) -> None:
    """Raise `SnapshotCollected` if a snapshot that was there is being deleted by now, or is gone.

    Who reads a snapshot without keeping it asks this when something is missing: a collection dooms a snapshot
    before it takes anything away. If it is neither doomed nor gone, it is damaged.
    """
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    if document is None or document.record.doomed_by is not None:
        plan = document.record.doomed_by if document is not None else None
        by = f"is being deleted by the plan {plan}" if plan else "was deleted by a garbage collection"
        raise SnapshotCollected(f"the snapshot {snapshot_id} {by}", snapshot_id=snapshot_id, plan=plan)


@contextlib.contextmanager
def reading(control: RepositoryContext, *snapshot_ids: str) -> Iterator[None]:
    """Read what these snapshots hold, without keeping them: what fails because one is collected says so."""
    try:
        yield
    except SnapshotCollected:
        raise
    except Failure:
        for each in snapshot_ids:
            refuse_if_collected(control, each)
        raise


def usable(descriptor: Descriptor) -> Descriptor:
    """The same snapshot, if it is not about to be deleted. Pure."""
    if descriptor.doomed_by is not None:
        raise Refused(
            f"the snapshot {descriptor.snapshot_id} is being deleted by the plan {descriptor.doomed_by}",
            hint="Choose another snapshot. See 'holdfast gc plan' for what is kept, and why.",
            snapshot_id=descriptor.snapshot_id,
            plan=descriptor.doomed_by,
        )
    return descriptor


def is_ready(places: RepositoryPaths, snapshot_id: str) -> bool:
    """Whether the tree of a snapshot is there and complete."""
    path = places.tree(snapshot_id) / READY
    try:
        return stat.S_ISREG(calls.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_failure("look at", path, error) from error


def no_snapshot(name: str, references: Iterable[str] = ()) -> NotFound:
    return NotFound(
        f"there is no snapshot {name}",
        hint=meant(name, [HEAD, *references]) + "See 'holdfast history --all' for those that are there.",
        name=name,
    )


def reference_name(name: str) -> str:
    """A name that a reference may have: one that cannot be taken for the head or for an id."""
    name = safe_name(name, what="name of a reference")
    if name == HEAD or _ID.fullmatch(name):
        raise UsageFailure(
            f"a reference cannot be called {name}: that names a snapshot already",
            hint="Choose another name.",
            name=name,
        )
    return name


def _start(control: RepositoryContext, name: str, worktree: str, *, of_a_worktree: bool) -> str:
    """The id of the snapshot from which parents are counted."""
    if name == HEAD:
        config = control.config(worktree)
        head = config.head_snapshot_id or config.base_snapshot_id
        if head is None:
            raise NotFound(
                f"{worktree} has no snapshot yet",
                hint="Take one: 'holdfast snapshot'.",
                worktree=worktree,
            )
        return head
    if of_a_worktree:
        raise NameInvalid(
            f"only the head of a worktree is named with ':', not {name!a}", name=f"{worktree}:{name}"
        )
    name = safe_name(name, what="name of a snapshot")
    if control.store.read(DESCRIPTORS.key(name)) is not None:
        return name
    reference = control.store.read(REFERENCES.key(name))
    if reference is not None:
        return reference.record.snapshot_id
    return _by_beginning(control, name)


def _by_beginning(control: RepositoryContext, beginning: str) -> str:
    """The one snapshot whose id begins like this; those that are not visible count only if none is."""
    found = [each for each in _trees(control.places) if each.startswith(beginning)]
    seen = [each for each in found if control.store.read(DESCRIPTORS.key(each)) is not None]
    candidates = seen or found
    if not candidates:
        raise no_snapshot(beginning, names_in(control.store, REFERENCES))
    if len(candidates) > 1 and beginning not in candidates:
        raise Ambiguous(beginning, candidates)
    return beginning if beginning in candidates else candidates[0]


def _trees(places: RepositoryPaths) -> list[str]:
    """The ids of all trees, complete or not. Listing names costs little, however many there are."""
    try:
        with Directory.open(places.snapshots) as directory:
            return sorted(name for name in directory.names() if is_safe_name(name))
    except NotFound:
        return []


def _has_tree(places: RepositoryPaths, snapshot_id: str) -> bool:
    return snapshot_id in _trees(places)


def _count(steps: str, text: str) -> int:
    """How many parents up: `~` is one, `~3` three, `~1~1` two."""
    count = sum(int(each or 1) for each in steps.split("~")[1:])
    if count > MOST_STEPS:
        raise NotFound(f"{text}: no line is that long", name=text)
    return count
