"""Restoring in place: the directory of a worktree gets the content of a snapshot, all at once.

`docs/protocols/restore.md` has the same numbers.

1. What is in the directory now is kept as a snapshot, if it differs from the head.
2. In a scratch: the content as a new directory, and (for the whole tree) a new snapshot R with the
   same content, by links. Synced once; R's tree is renamed to its place, where nobody sees it.
3. Under the payload lock, one transaction: the lease is held with this very token; R is the new head,
   and the operation is on record. **Commit point.** From here on it is finished, by us or by others.
4. The new directory and the old one are exchanged in one step.
5. The old one is moved aside and compared with what was kept: something written at the last moment
   becomes a snapshot too, between that and R.
6. One transaction: the operation is off the record. Then the scratch is removed.

So history stays one line, and nothing that was ever on it becomes unreachable. Restoring a part
(`path`) exchanges that part only and publishes no R: it is unsaved work on top of the head.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import ConsistencyUnavailable, Refused, UsageFailure
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import checked_text, split_relative
from holdfast.leases.rules import Identity
from holdfast.repository.compare import differs
from holdfast.repository.context import (
    Permission,
    Proof,
    RepositoryContext,
    check_early,
    new_snapshot_id,
    no_snapshot,
    permission,
    publishing_keys,
    usable,
    visible,
)
from holdfast.repository.exchange import CACHE, NEW, REPLACED, carry_out, inode_at
from holdfast.repository.payloads import (
    Scratch,
    payload_locked,
    refuse_if_fixed,
    refuse_if_mounted,
    refuse_replaced,
    scratch,
)
from holdfast.repository.records import (
    DESCRIPTORS,
    OPERATIONS,
    Descriptor,
    Isolation,
    Operation,
    OperationKind,
    WorktreeConfig,
)
from holdfast.repository.snapshots import SnapshotOptions, published_tree, publishing, same_worktree, snapshot
from holdfast.repository.usage import refuse_if_written
from holdfast.store.model import Change, Create, Decision, Key, Stream, View

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress


class InPlace(NamedTuple):
    """How to restore in place. `path` is relative to the worktree; without it, everything is."""

    reason: str
    path: str | None = None
    keep: bool = True
    allow_shared: bool = False
    force: bool = False
    """In spite of processes that have files open for writing in what is replaced."""
    progress: Progress | None = None


class Restored(NamedTuple):
    """What was restored; the new head, if one was made; and what keeps that which was replaced: a snapshot
    made before, and another one (`late`) if something was written after that."""

    source: Descriptor
    published: Descriptor | None
    kept: Descriptor | None
    late: str | None = None


def restore_in_place(
    control: RepositoryContext, worktree: str, snapshot_id: str, proof: Proof | None, how: InPlace
) -> Restored:
    """Make the directory of a worktree hold what a snapshot holds. See the module's text.

    In an exclusive worktree it takes the proof that the lease is held; in a shared one it is refused
    unless it is switched on for this call.
    """
    checked(control, worktree, how)
    config = check_early(control, worktree, proof)
    usable(visible(control, snapshot_id))
    if not how.force:
        refuse_if_written(control.places.payload(worktree) / (how.path or ""), worktree, "restored in place")
    kept = _keep(control, config, snapshot_id, proof, how) if how.keep else None  # 1
    tip = kept.snapshot_id if kept else config.head_snapshot_id or config.base_snapshot_id
    uses = [snapshot_id, *([tip] if tip else [])]
    operation_id = new_snapshot_id()
    with scratch(control, "restore", worktree=worktree, uses=uses, scratch_id=operation_id) as room:
        source = usable(visible(control, snapshot_id))  # looked at after our intent names it
        operation = _prepare(control, worktree, room, source, how)  # 2
        if how.path is None:
            _link(control, room, source)
            with payload_locked(control, worktree), published_tree(control, room, operation_id):
                published = _Beginning.of(control, config, proof, source, operation).whole()  # 3
                carry_out(control, operation)  # 4, 5, 6
        else:
            published = None
            with payload_locked(control, worktree):
                _require_kept(control, worktree, how)
                _Beginning.of(control, config, proof, source, operation).part()
                tip = _tip(control, worktree)  # nobody publishes while an operation is pending
                if not carry_out(control, operation):
                    raise _changed_meanwhile(worktree, how)
        return Restored(source, published, kept, _late(control, worktree, published, tip))


def _tip(control: RepositoryContext, worktree: str) -> str | None:
    config = control.config(worktree)
    return config.head_snapshot_id or config.base_snapshot_id


def _late(
    control: RepositoryContext, worktree: str, published: Descriptor | None, tip: str | None
) -> str | None:
    """What has come on top of what was there when it was decided: the snapshot of late writes, if any."""
    if published is None:
        head = _tip(control, worktree)
        return head if head != tip else None
    now = control.store.read(DESCRIPTORS.key(published.snapshot_id))
    below = published.parent_id if now is None else now.record.parent_id
    return below if below != published.parent_id else None


def checked(control: RepositoryContext, worktree: str, how: InPlace) -> WorktreeConfig:
    """The worktree's record, if restoring in place may be tried in it, for this reason."""
    if not how.reason.strip():
        raise UsageFailure("restoring in place needs a reason", hint="Say why: --reason TEXT.")
    checked_text(how.reason, what="reason")
    if how.path is not None:
        _check_path(how.path)
    config = control.config(worktree)
    refuse_replaced(control, worktree)
    refuse_if_mounted(control, worktree, "restored in place", how.path)
    refuse_if_fixed(control, worktree)
    if config.isolation is Isolation.SHARED and not how.allow_shared:
        raise Refused(
            f"{worktree} is a shared worktree (high-risk): others may be writing into it at this moment",
            hint="Restore into a new worktree instead ('holdfast restore ID'), "
            "or switch this on for once: --allow-shared.",
            worktree=worktree,
        )
    return config


def _check_path(path: str) -> None:
    """Refuse what is no path below the worktree, or cannot be put on record."""
    split_relative(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageFailure(
            f"the path {path!a} is not valid UTF-8, so it cannot be put on record",
            hint="Restore the directory that it is in, or all of it: 'holdfast restore ID'.",
            path=ascii(path)[1:-1],
        ) from None


# --- 1. What is there now ---------------------------------------------------------------------------


def _keep(
    control: RepositoryContext, config: WorktreeConfig, snapshot_id: str, proof: Proof | None, how: InPlace
) -> Descriptor | None:
    lost = inode_at(control.places.payload(config.worktree_id)) is None
    if lost or not differs_from_head(control, config):
        return None
    note = f"before restoring {snapshot_id}: {how.reason}"
    return snapshot(control, config.worktree_id, proof, SnapshotOptions(note=note, progress=how.progress))


def _require_kept(control: RepositoryContext, worktree: str, how: InPlace) -> None:
    """Refuse to replace a part if something was written since the snapshot that keeps what is replaced."""
    if how.keep and differs_from_head(control, control.config(worktree)):
        raise _changed_meanwhile(worktree, how)


def _changed_meanwhile(worktree: str, how: InPlace) -> ConsistencyUnavailable:
    return ConsistencyUnavailable(
        f"{worktree} was written to while {how.path} was being restored; nothing was replaced",
        worktree=worktree,
    )


def differs_from_head(control: RepositoryContext, config: WorktreeConfig) -> bool:
    """Whether a worktree's directory holds something that its head does not, or lacks something."""
    tip = config.head_snapshot_id or config.base_snapshot_id
    return differs(control, control.places.payload(config.worktree_id), tip, config.worktree_id)


# --- 2. What shall be there -------------------------------------------------------------------------


def _prepare(
    control: RepositoryContext, worktree: str, room: Scratch, source: Descriptor, how: InPlace
) -> Operation:
    from holdfast.trees.restore import materialise
    from holdfast.trees.walker import synced

    tree = control.places.tree(source.snapshot_id)
    new, path = room.path / NEW, None
    with synced(room.path):
        if how.path is None:
            materialise(tree, new, cache=room.path / CACHE, progress=how.progress)
        else:
            path, rest = _placed(control, worktree, how.path)
            for top in (control.places.payload(worktree), room.path / REPLACED):
                inode_at(top / path)  # what the system cannot look at is refused before anything is decided
            for each in rest:
                make_directories(new)
                new = new / each
            materialise(tree, new, only=os.fsencode(how.path), progress=how.progress)
    if how.progress is not None and how.path is None:
        how.progress(source.files, source.bytes)  # the last moment to say no: nothing was changed yet
    operation = Operation(
        operation_id=room.scratch_id,
        kind=OperationKind.RESTORE,
        worktree_id=worktree,
        begun_at=format_instant(control.store.now()),
        holder_id=control.holder.holder_id,
        identity=Identity.of(control.holder),
        snapshot_id=source.snapshot_id,
        path=path,
        reason=how.reason,
        keeps=how.keep,
    )
    return msgspec.structs.replace(operation, inode=inode_at(room.path / NEW))


def _placed(control: RepositoryContext, worktree: str, path: str) -> tuple[str, tuple[str, ...]]:
    """What is exchanged so that `path` comes back: itself, or the first that is missing above it; and
    which names lead on from there."""
    parts = split_relative(path)
    with contextlib.ExitStack() as opened:
        here = opened.enter_context(Directory.open(control.places.payload(worktree)))
        for depth, part in enumerate(parts[:-1], 1):
            if here.status(part) is None:
                return "/".join(parts[:depth]), parts[depth:]
            here = opened.enter_context(here.enter(part))  # refuses a link: it could lead elsewhere
    return path, ()


def _link(control: RepositoryContext, room: Scratch, source: Descriptor) -> None:
    from holdfast.trees.shared_dirs import share_tree
    from holdfast.trees.walker import synced

    with synced(room.path):
        share_tree(control.places.tree(source.snapshot_id), room.tree)


# --- 3. The decision --------------------------------------------------------------------------------


class _Beginning(NamedTuple):
    """The transaction that decides."""

    control: RepositoryContext
    config: WorktreeConfig
    proof: Proof | None
    source: Descriptor
    operation: Operation
    may_publish: Permission

    @classmethod
    def of(
        cls,
        control: RepositoryContext,
        config: WorktreeConfig,
        proof: Proof | None,
        source: Descriptor,
        operation: Operation,
    ) -> _Beginning:
        may_publish = permission(control, config.worktree_id, proof)
        return cls(control, config, proof, source, operation, may_publish)

    def whole(self) -> Descriptor:
        """Publish R on top of the line and put the operation on record."""
        key = DESCRIPTORS.key(self.operation.operation_id)

        def decide(view: View, now: float) -> Decision[Descriptor]:
            current, source = self._allowed(view, now)
            changes, published = publishing(current, self._restored(source))
            return Decision([*changes, *self._recorded(view, now)], published)

        return self.control.store.transact([*self._named(), key], decide).result

    def part(self) -> None:
        """Put the operation on record: what is exchanged is unsaved work on top of the head."""

        def decide(view: View, now: float) -> Decision[None]:
            self._allowed(view, now)
            return Decision(self._recorded(view, now), None)

        self.control.store.transact(self._named(), decide)

    def _named(self) -> list[Key[Any] | Stream[Any]]:
        source = DESCRIPTORS.key(self.source.snapshot_id)
        return [*publishing_keys(self.config.worktree_id), source, self.control.trail.stream]

    def _allowed(self, view: View, now: float) -> tuple[WorktreeConfig, Descriptor]:
        config = same_worktree(self.config, self.may_publish(view, now))
        source = view.get(DESCRIPTORS.key(self.source.snapshot_id))
        if source is None:
            raise no_snapshot(self.source.snapshot_id)
        return config, usable(source)

    def _recorded(self, view: View, now: float) -> list[Change]:
        operation = self.operation
        facts = {
            "worktree_id": operation.worktree_id,
            "operation_id": operation.operation_id,
            "restored_from": operation.snapshot_id,
            "path": operation.path,
            "reason": operation.reason,
            "lock_id": self.proof.lock_id if self.proof else None,
            "fencing_token": self.proof.token if self.proof else None,
        }
        return [
            Create(OPERATIONS.key(operation.worktree_id), operation),
            self.control.audit(view, now, "restore_begun", **facts),
        ]

    def _restored(self, source: Descriptor) -> Descriptor:
        exclusive = self.config.isolation is Isolation.EXCLUSIVE
        return msgspec.structs.replace(
            source,
            snapshot_id=self.operation.operation_id,
            worktree_id=self.operation.worktree_id,
            parent_id=None,
            created_at=self.operation.begun_at,
            note=self.operation.reason,
            holder_id=self.operation.holder_id,
            lock_id=self.proof.lock_id if self.proof and exclusive else None,
            fencing_token=self.proof.token if self.proof and exclusive else None,
            restored_from=source.snapshot_id,
        )
