"""Removing a worktree: its directory, then its record, then the entry in the audit trail.

1. The payload lock, and the lease: acquired by the remover, or its own. (A shared worktree has none.)
2. What has not been saved is saved as a snapshot, unless the caller does not want that.
3. Running processes are looked for; `force` overlooks them.
4. T1: the lease still counts and nothing else is being done; an `Operation` says what is on its way.
   The decision: from here on the worktree is going to be gone, whoever finishes it.
5. The directory is moved into a scratch, in one step, and deleted there.
6. T2: the record, the lease and the line of waiters go, the audit entry is appended. The snapshots stay,
   and so does the counter of tokens: a worktree of the same name counts on from it.

Killed after 4, `finish` goes on with 5.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import Refused
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.mounts import mounts_beneath
from holdfast.fs.moving import move
from holdfast.leases.records import Identity, LeaseKeys
from holdfast.store.records import Create, Decision, Delete, Key, Stream, View
from holdfast.worktrees import payloads
from holdfast.worktrees.control import Control, settled_config
from holdfast.worktrees.guarding import Right, guarded
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.records import OPERATIONS, WORKTREES, Operation, OperationKind, worktree_keys
from holdfast.worktrees.scratch import scratch
from holdfast.worktrees.usage import refuse_if_used

REMOVED, MOVED = "removed", "moved"

Save = Callable[[Right], str | None]
"""Saves what has changed in a worktree as a snapshot; the id of it, or None if there was nothing to save."""


class Removed(NamedTuple):
    """What was removed; `saved` is the snapshot of what had not been saved, if there was any."""

    worktree: str
    head_snapshot_id: str | None
    saved: str | None


def remove(
    control: Control,
    name: str,
    *,
    save: Save | None,
    force: bool = False,
    lock_id: str | None = None,
) -> Removed:
    """Remove a worktree. Nothing is pending on it. Without `save`, unsaved work is lost."""
    with (
        payload_locked(control, name),
        guarded(control, name, "remove", lock_id=lock_id) as right,  # 1
    ):
        payloads.refuse_replaced(control, name)
        saved = None if save is None else save(right)  # 2
        if not force and payloads.status_of(control.places, name) is not None:
            refuse_if_used(payloads.directory_of(control, name), name, "removed")  # 3
        _refuse_if_mounted(control, name)
        operation = _decide(control, name, right, saved)  # 4
        head = saved or right.config.head_snapshot_id
        finish(control, operation)  # 5, 6
        return Removed(name, head, saved)


def finish(control: Control, operation: Operation) -> None:
    """Bring a removal to its end."""
    name = operation.worktree_id
    with scratch(control, "remove", worktree=name, scratch_id=operation.operation_id) as bin_:
        _move_away(control, operation, bin_.path)  # 5
        _delete(bin_.path)
        _make_visible(control, operation)  # 6


def _refuse_if_mounted(control: Control, name: str) -> None:
    """What is mounted below a directory is not part of it, and deleting would reach it."""
    if payloads.status_of(control.places, name) is None:
        return
    with Directory.open(payloads.directory_of(control, name)) as directory:
        mounted = sorted(mounts_beneath(directory.fd)) if directory.fd is not None else []
    if mounted:
        raise Refused(
            f"{name} cannot be removed: something is mounted at {ascii(mounted[0])[1:-1]} in it",
            hint="Unmount it first.",
            worktree=name,
        )


def _decide(control: Control, name: str, right: Right, saved: str | None) -> Operation:
    operation_id, validate = secrets.token_hex(8), right.validator()
    keys: list[Key[Any] | Stream[Any]] = [*LeaseKeys.of(name).all(), *worktree_keys(name)]

    def decide(view: View, now: float) -> Decision[Operation]:
        settled_config(view, name)
        validate(view, now)
        operation = Operation(
            operation_id=operation_id,
            kind=OperationKind.REMOVE,
            worktree_id=name,
            begun_at=format_instant(now),
            holder_id=control.holder.holder_id,
            identity=Identity.of(control.holder),
            snapshot_id=saved,
        )
        return Decision([Create(OPERATIONS.key(name), operation)], operation)

    return control.store.transact(keys, decide).result


def _move_away(control: Control, operation: Operation, into: Path) -> None:
    """Move the directory out of sight, once: what has come to stand at its path since then stays there.

    So that this can be told when it has been deleted, the mark that it was moved is set before.
    """
    name = operation.worktree_id
    if payloads.is_there(into / MOVED):
        return
    if not payloads.is_there(into / REMOVED) and payloads.status_of(control.places, name) is not None:
        move(payloads.directory_of(control, name), into / REMOVED)
    make_directories(into / MOVED)


def _delete(into: Path) -> None:
    from holdfast.fs.trees import remove_tree

    remove_tree(into / REMOVED)


def _make_visible(control: Control, operation: Operation) -> None:
    name = operation.worktree_id
    leases = LeaseKeys.of(name)
    payloads.drop_cache(control.places, name)

    def decide(view: View, now: float) -> Decision[None]:
        config = view.get(WORKTREES.key(name))
        present = [
            key for key in (*worktree_keys(name), leases.lease, leases.line) if view.get(key) is not None
        ]
        entry = control.audit(
            view,
            now,
            "worktree_removed",
            worktree_id=name,
            head_snapshot_id=config.head_snapshot_id if config else None,
            saved_snapshot_id=operation.snapshot_id,
            begun_by=operation.holder_id,
        )
        return Decision([*map(Delete, present), entry], None)

    control.store.transact([*leases.all(), *worktree_keys(name), control.trail.stream], decide)
    payloads.drop_empty_home(control.places, name)
