"""Restoring in place: replacing the content of a worktree with that of a snapshot, in one step.

The steps are numbered as in `docs/protocols/restore.md`; 4 to 6 are in `exchange`. The commit point is the
transaction of step 3: after the token check, it publishes a snapshot R with the restored content as the new head and
records the operation; from then on, this process or another one finishes it. History stays linear and loses nothing:
the old content is kept first (1), and late writes become a snapshot between that and R (5). Restoring a part (`path`)
exchanges only that part and publishes no R: the result is unsaved work on top of the head.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.errors import ConsistencyUnavailable, Refused, UsageFailure
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import checked_text, split_relative
from holdfast.repository.compare import differs
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    Descriptor,
    Isolation,
    Operation,
    OperationKind,
    Proof,
    RepositoryContext,
    WorktreeConfig,
    check_early,
    new_snapshot_id,
    publishing_keys,
    token_check,
)
from holdfast.repository.exchange import CACHE, NEW, REPLACED, inode_at
from holdfast.repository.history import require_usable, usable, visible
from holdfast.repository.payloads import (
    Scratch,
    payload_locked,
    refuse_if_fixed,
    refuse_if_mounted,
    refuse_replaced,
    scratch,
)
from holdfast.repository.snapshots import SnapshotOptions, publish_changes, published_tree, same_worktree, snapshot
from holdfast.repository.usage import User, refuse_if_written, standing_in
from holdfast.store.model import Change, Create, Decision, View

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress


class RestoreOptions(NamedTuple):
    """How to restore in place. `path`, relative to the worktree, is the part to restore; None means all."""

    reason: str
    path: str | None = None
    keep: bool = True
    allow_shared: bool = False
    force: bool = False  # even if a process has files open for writing that would be replaced
    progress: Progress | None = None


class Restored(NamedTuple):
    """The restored snapshot; the new head, if one was published; the snapshots of the replaced content: `kept` from
    before the restore, `late` for later writes; and the processes that still work in the replaced directory."""

    source: Descriptor
    published: Descriptor | None
    kept: Descriptor | None
    late: str | None = None
    standing: tuple[User, ...] = ()


def restore_in_place(
    context: RepositoryContext, worktree: str, snapshot_id: str, proof: Proof | None, how: RestoreOptions
) -> Restored:
    """Replace the content of a worktree with that of a snapshot, in the steps that the module describes. An exclusive
    worktree requires the proof of its lease; a shared one, `allow_shared`."""
    checked(context, worktree, how)
    config = check_early(context, worktree, proof)
    usable(visible(context, snapshot_id))
    if not how.force:
        path = context.paths.payload(worktree) / (how.path or "")
        refuse_if_written(path, worktree, "restored in place", foreign=context.paths.foreign(worktree))
    kept = _keep(context, config, snapshot_id, proof, how) if how.keep else None  # 1
    tip = kept.snapshot_id if kept else config.tip
    uses, operation_id = [snapshot_id, *([tip] if tip else [])], new_snapshot_id()
    with scratch(context, "restore", worktree=worktree, uses=uses, scratch_id=operation_id) as room:
        source = usable(visible(context, snapshot_id))  # again: now our intent protects it
        operation = context.home.prepare_restore(context, worktree, room, source, how)  # 2
        if how.path is None:
            with payload_locked(context, worktree), published_tree(context, room, operation_id):
                published = _decide(context, config, proof, source, operation)  # 3
                context.home.restore(context, operation)  # 4, 5, 6
        else:
            with payload_locked(context, worktree):
                if how.keep and differs_from_head(context, context.config(worktree)):
                    raise _changed_meanwhile(worktree, how)
                published = _decide(context, config, proof, source, operation)
                tip = context.config(worktree).tip  # fixed while an operation is pending
                if not context.home.restore(context, operation):
                    raise _changed_meanwhile(worktree, how)
        standing = _standing(context, worktree, room)
        return Restored(source, published, kept, _late(context, worktree, published, tip), standing)


def _standing(context: RepositoryContext, worktree: str, room: Scratch) -> tuple[User, ...]:
    """The processes whose current directory was replaced, each with the path by which it entered it."""
    if not context.home.replaces_directory:
        return ()
    replaced, path = str(room.path / REPLACED), str(context.paths.payload(worktree))
    return tuple(each._replace(path=each.path.replace(replaced, path, 1)) for each in standing_in(Path(replaced)))


def _late(context: RepositoryContext, worktree: str, published: Descriptor | None, tip: str | None) -> str | None:
    """The snapshot of late writes: between R and its old parent, or on top of the old head."""
    if published is None:
        head = context.config(worktree).tip
        return head if head != tip else None
    current = context.descriptor(published.snapshot_id)
    parent = published.parent_id if current is None else current.parent_id
    return parent if parent != published.parent_id else None


def checked(context: RepositoryContext, worktree: str, how: RestoreOptions) -> WorktreeConfig:
    """The worktree's record, if a restore in place with these options is allowed."""
    if not how.reason.strip():
        raise UsageFailure("restoring in place needs a reason", hint="Give the reason: --reason TEXT.")
    checked_text(how.reason, what="reason")
    if how.path is not None:
        split_relative(how.path)
        _check_utf8(how.path)
    config = context.config(worktree)
    refuse_replaced(context, worktree)
    if context.home.replaces_directory:
        refuse_if_mounted(context, worktree, "restored in place", how.path)
        refuse_if_fixed(context, worktree)
    if config.isolation is Isolation.SHARED and not how.allow_shared:
        message = f"{worktree} is a shared worktree (high-risk): others may be writing to it now"
        hint = "Restore into a new worktree ('holdfast restore ID'), or allow it for this call: --allow-shared."
        raise Refused(message, hint=hint, worktree=worktree)
    return config


def _check_utf8(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        message = f"the path {path!a} is not valid UTF-8, so it cannot be recorded"
        hint = "Restore the directory that contains it, or everything: 'holdfast restore ID'."
        raise UsageFailure(message, hint=hint, path=ascii(path)[1:-1]) from None


def _keep(
    context: RepositoryContext, config: WorktreeConfig, snapshot_id: str, proof: Proof | None, how: RestoreOptions
) -> Descriptor | None:
    if inode_at(context.paths.payload(config.worktree_id)) is None or not differs_from_head(context, config):
        return None
    note = f"before restoring {snapshot_id}: {how.reason}"
    return snapshot(context, config.worktree_id, proof, SnapshotOptions(note=note, progress=how.progress))


def differs_from_head(context: RepositoryContext, config: WorktreeConfig) -> bool:
    return differs(context, context.paths.payload(config.worktree_id), config.tip, config.worktree_id)


def _changed_meanwhile(worktree: str, how: RestoreOptions) -> ConsistencyUnavailable:
    message = f"{worktree} was written to while {how.path} was being restored; nothing was replaced"
    return ConsistencyUnavailable(message, worktree=worktree)


def prepare(
    context: RepositoryContext, worktree: str, room: Scratch, source: Descriptor, how: RestoreOptions
) -> Operation:
    """Step 2 in a plain home."""
    from holdfast.trees.restore import materialise
    from holdfast.trees.shared_dirs import share_tree
    from holdfast.trees.walker import synced

    tree = context.paths.tree(source.snapshot_id)
    new, path = room.path / NEW, None
    with synced(room.path):
        if how.path is None:
            materialise(tree, new, cache=room.path / CACHE, progress=how.progress)
        else:
            path, rest = exchanged_path(context, worktree, how.path)
            for top in (context.paths.payload(worktree), room.path / REPLACED):
                inode_at(top / path)  # refuse an impossible path before anything is decided
            for each in rest:
                make_directories(new, mode=0o777)
                new = new / each
            materialise(tree, new, only=os.fsencode(how.path), progress=how.progress)
    facts: dict[str, Any] = {"inode": inode_at(room.path / NEW), "snapshot_id": source.snapshot_id, "path": path}
    facts |= {"reason": how.reason, "keeps": how.keep}
    operation = context.operation(OperationKind.RESTORE, room.scratch_id, worktree, context.store.now(), **facts)
    if how.path is None:
        if how.progress is not None:
            how.progress(source.files, source.bytes)  # the last chance to cancel: nothing has changed yet
        with synced(room.path):
            share_tree(tree, room.tree)
    return operation


def exchanged_path(context: RepositoryContext, worktree: str, path: str) -> tuple[str, tuple[str, ...]]:
    """The path to exchange in order to restore `path` (itself, or the topmost missing directory above it), and the
    names below it."""
    parts = split_relative(path)
    with contextlib.ExitStack() as opened:
        here = opened.enter_context(Directory.open(context.paths.payload(worktree)))
        for depth, part in enumerate(parts[:-1], 1):
            if here.status(part) is None:
                return "/".join(parts[:depth]), parts[depth:]
            here = opened.enter_context(here.enter(part))  # refuses a link: it could lead elsewhere
    return path, ()


def _decide(
    context: RepositoryContext, config: WorktreeConfig, proof: Proof | None, source: Descriptor, operation: Operation
) -> Descriptor | None:
    """Commit point of a restore: record the operation, and publish R unless it restores a part."""
    worktree, whole = config.worktree_id, operation.path is None
    check = token_check(context, worktree, proof)
    descriptors = [DESCRIPTORS.key(source.snapshot_id), *([DESCRIPTORS.key(operation.operation_id)] if whole else [])]

    def decide(view: View, now: float) -> Decision[Descriptor | None]:
        current = same_worktree(config, check(view, now))
        found = require_usable(view, source.snapshot_id)
        changes, published = list[Change](), None
        if whole:
            changes, published = publish_changes(current, _restored(config, found, operation, proof))
        facts: dict[str, object] = {"worktree_id": worktree, "operation_id": operation.operation_id}
        facts |= {"restored_from": operation.snapshot_id, "path": operation.path, "reason": operation.reason}
        facts |= {"lock_id": proof.lock_id if proof else None, "fencing_token": proof.token if proof else None}
        entry = context.audit(view, now, "restore_begun", **facts)
        return Decision([*changes, Create(OPERATIONS.key(worktree), operation), entry], published)

    return context.store.transact([*publishing_keys(worktree), *descriptors, context.trail.stream], decide).result


def _restored(config: WorktreeConfig, source: Descriptor, operation: Operation, proof: Proof | None) -> Descriptor:
    """The descriptor of R."""
    fencing = proof if config.isolation is Isolation.EXCLUSIVE else None
    return msgspec.structs.replace(
        source,
        snapshot_id=operation.operation_id,
        worktree_id=operation.worktree_id,
        parent_id=None,
        created_at=operation.begun_at,
        note=operation.reason,
        holder_id=operation.holder_id,
        lock_id=fencing.lock_id if fencing else None,
        fencing_token=fencing.token if fencing else None,
        restored_from=source.snapshot_id,
    )
