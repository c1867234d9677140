"""Removing a worktree: its directory, then its record, then the entry in the audit trail.

1. The payload lock, and the lease: acquired by the remover, or its own. (A shared worktree has none.)
2. What has not been saved is saved as a snapshot, unless the caller does not want that.
3. Running processes are looked for; `force` overlooks them.
4. T1: the lease still counts and nothing else is being done; an `Operation` says what is on its way.
   The decision: from here on the worktree is going to be gone, whoever finishes it.
5. The directory is moved into a scratch, in one step. What was written into it since 2 is saved there as
   another snapshot; then it is deleted.
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
from holdfast.fs.directory import is_there, make_directories, move
from holdfast.leases.rules import Identity, LeaseKeys
from holdfast.store.model import Create, Decision, Delete, Key, Stream, View
from holdfast.worktrees import payloads
from holdfast.worktrees.control import Control, settled_config
from holdfast.worktrees.guarding import Right, guarded
from holdfast.worktrees.late import late_whole
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.records import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Descriptor,
    Operation,
    OperationKind,
    worktree_keys,
)
from holdfast.worktrees.scratch import scratch
from holdfast.worktrees.snapshots import publishing
from holdfast.worktrees.usage import refuse_if_used

REMOVED, MOVED, SAVED = "removed", "moved", "saved"

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
        payloads.refuse_if_mounted(control, name, "removed")
        payloads.refuse_if_fixed(control, name)
        operation = _decide(control, name, right, saved, keeps=save is not None)  # 4
        saved = finish(control, operation) or saved  # 5, 6
        return Removed(name, saved or right.config.head_snapshot_id, saved)


def finish(control: Control, operation: Operation) -> str | None:
    """Bring a removal to its end; return the snapshot of what was written late, if anything was."""
    name = operation.worktree_id
    with scratch(control, "remove", worktree=name, scratch_id=operation.operation_id) as bin_:
        _move_away(control, operation, bin_.path)  # 5
        late = _save_late(control, operation, bin_.path)
        _delete(bin_.path)
        _make_visible(control, operation)  # 6
        return late


def _decide(control: Control, name: str, right: Right, saved: str | None, *, keeps: bool) -> Operation:
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
            keeps=keeps,
        )
        return Decision([Create(OPERATIONS.key(name), operation)], operation)

    return control.store.transact(keys, decide).result


def _move_away(control: Control, operation: Operation, into: Path) -> None:
    """Move the directory out of sight, once: what has come to stand at its path since then stays there.

    So that this can be told when it has been deleted, the mark that it was moved is set before.
    """
    name = operation.worktree_id
    if is_there(into / MOVED):
        return
    if not is_there(into / REMOVED) and payloads.status_of(control.places, name) is not None:
        move(payloads.directory_of(control, name), into / REMOVED)
    make_directories(into / MOVED)


def _save_late(control: Control, operation: Operation, into: Path) -> str | None:
    """Save what was written behind the snapshot that keeps the directory; the mark is that it was done.

    Without the mark, a directory that is half deleted would be taken for one that was written to.
    """
    removed = into / REMOVED
    if not operation.keeps or is_there(into / SAVED) or not is_there(removed):
        return None
    name = operation.worktree_id
    config = control.config(name)
    kept = config.head_snapshot_id or config.base_snapshot_id
    with late_whole(control, operation, removed, kept, f"written while {name} was being removed") as late:
        if late is not None:
            _publish_late(control, operation, late)
    make_directories(into / SAVED)
    return None if late is None else late.snapshot_id


def _publish_late(control: Control, operation: Operation, late: Descriptor) -> None:
    """Put it on top of the line: who does this again finds nothing that is not in the head."""
    name, key = operation.worktree_id, DESCRIPTORS.key(late.snapshot_id)
    facts = {"worktree_id": name, "snapshot_id": late.snapshot_id, "operation_id": operation.operation_id}

    def decide(view: View, now: float) -> Decision[None]:
        config = view.get(WORKTREES.key(name))
        assert config is not None, "a worktree that is being removed has its record"
        changes, _ = publishing(config, late)
        return Decision([*changes, control.audit(view, now, "snapshot_published", **facts)], None)

    control.store.transact([*worktree_keys(name), key, control.trail.stream], decide)


def _delete(into: Path) -> None:
    from holdfast.trees import remove_tree

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
