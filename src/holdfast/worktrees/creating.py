"""Creating a worktree: its directory appears complete, and then its record, or neither does.

1. The payload lock of the name, and a scratch that names the snapshot it needs (so that it stays).
2. The payload is made in the scratch, and brought to the disk.
3. T1: the name is free, the snapshot is not about to be collected; an `Operation` with the id of the
   scratch says what is on its way.
4. The directory is renamed into its place, never over something that stands there.
5. T2: the record of the worktree, the audit entry; the `Operation` goes. Commit point.

Killed before 4 (the payload is still in the scratch), nothing was visible: `finish` undoes it. Killed
after 4, the directory is there and somebody may have put work into it: `finish` goes on with 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists
from holdfast.fs.directory import is_there, make_directories, move
from holdfast.leases.rules import Identity
from holdfast.store.model import Change, Create, Decision, Delete, Key, Stream, View
from holdfast.worktrees import naming, payloads
from holdfast.worktrees.control import Control, being_changed
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.records import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Isolation,
    Operation,
    OperationKind,
    WorktreeConfig,
    worktree_keys,
)
from holdfast.worktrees.scratch import Scratch, scratch, sweep

PAYLOAD = "payload"


class Wanted(NamedTuple):
    """What the new worktree shall be like."""

    name: str
    snapshot_id: str | None = None
    isolation: Isolation = Isolation.EXCLUSIVE
    label: str | None = None


def create(control: Control, wanted: Wanted) -> WorktreeConfig:
    """Make a worktree, empty or with the content of a snapshot. Nothing is pending on its name."""
    uses = [] if wanted.snapshot_id is None else [wanted.snapshot_id]
    with (
        payload_locked(control, wanted.name),  # 1
        scratch(control, "create", worktree=wanted.name, uses=uses) as made_in,
    ):
        _check_early(control, wanted)
        _make_payload(control, wanted, made_in.path / PAYLOAD)  # 2
        operation = _decide(control, wanted, made_in)  # 3
        try:
            _move_into_place(control, wanted.name, made_in.path / PAYLOAD)  # 4
        except AlreadyExists:
            _undo(control, operation)
            raise
        return _make_visible(control, operation)  # 5


def finish(control: Control, operation: Operation) -> WorktreeConfig | None:
    """Bring a creation to its end: None if it had not come far enough and was undone."""
    in_scratch = is_there(control.places.scratch / operation.operation_id / PAYLOAD)
    if not in_scratch and payloads.status_of(control.places, operation.worktree_id) is not None:
        payloads.sync_names(control.places, operation.worktree_id)
        return _make_visible(control, operation)
    _undo(control, operation)
    sweep(control.places, operation.operation_id)
    return None


def _check_early(control: Control, wanted: Wanted) -> None:
    """What would be refused in the end is refused before the work is done."""
    if control.store.read(WORKTREES.key(wanted.name)) is not None:
        raise payloads.already_there(wanted.name)
    _check_path(control, wanted.name)
    if wanted.snapshot_id is not None:
        naming.usable(naming.visible(control, wanted.snapshot_id))


def _check_path(control: Control, name: str) -> None:
    make_directories(control.places.worktrees)
    if payloads.status_of(control.places, name) is not None:
        raise payloads.stranger(control.places.payload(name))


def _make_payload(control: Control, wanted: Wanted, payload: Path) -> None:
    from holdfast.trees import materialise, synced

    if wanted.snapshot_id is None:
        make_directories(payload)
        return
    tree = control.places.tree(wanted.snapshot_id)
    make_directories(control.places.caches)
    with synced(payload.parent):
        materialise(tree, payload, cache=control.places.stat_cache(wanted.name))


def _decide(control: Control, wanted: Wanted, made_in: Scratch) -> Operation:
    keys: list[Key[Any] | Stream[Any]] = [*worktree_keys(wanted.name)]
    if wanted.snapshot_id is not None:
        keys.append(DESCRIPTORS.key(wanted.snapshot_id))

    def decide(view: View, now: float) -> Decision[Operation]:
        pending = view.get(OPERATIONS.key(wanted.name))
        if pending is not None:
            raise being_changed(pending)
        if view.get(WORKTREES.key(wanted.name)) is not None:
            raise payloads.already_there(wanted.name)
        if wanted.snapshot_id is not None:
            descriptor = view.get(DESCRIPTORS.key(wanted.snapshot_id))
            if descriptor is None:
                raise naming.no_snapshot(wanted.snapshot_id)
            naming.usable(descriptor)
        operation = Operation(
            operation_id=made_in.scratch_id,
            kind=OperationKind.CREATE,
            worktree_id=wanted.name,
            begun_at=format_instant(now),
            holder_id=control.holder.holder_id,
            identity=Identity.of(control.holder),
            isolation=wanted.isolation,
            label=wanted.label,
            snapshot_id=wanted.snapshot_id,
        )
        return Decision([Create(OPERATIONS.key(wanted.name), operation)], operation)

    return control.store.transact(keys, decide).result


def _move_into_place(control: Control, name: str, payload: Path) -> None:
    target = control.places.payload(name)
    try:
        move(payload, target)
    except AlreadyExists:
        raise payloads.stranger(target) from None


def _make_visible(control: Control, operation: Operation) -> WorktreeConfig:
    name = operation.worktree_id

    def decide(view: View, now: float) -> Decision[WorktreeConfig]:
        config = WorktreeConfig(
            worktree_id=name,
            isolation=operation.isolation or Isolation.EXCLUSIVE,
            created_at=format_instant(now),
            base_snapshot_id=operation.snapshot_id,
            head_snapshot_id=operation.snapshot_id,
            label=operation.label,
        )
        entry = control.audit(
            view,
            now,
            "worktree_created",
            worktree_id=name,
            isolation=config.isolation.value,
            base_snapshot_id=operation.snapshot_id,
        )
        changes: list[Change] = [
            Create(WORKTREES.key(name), config),
            Delete(OPERATIONS.key(name)),
            entry,
        ]
        return Decision(changes, config)

    return control.store.transact([*worktree_keys(name), control.trail.stream], decide).result


def _undo(control: Control, operation: Operation) -> None:
    key = OPERATIONS.key(operation.worktree_id)
    control.store.transact([key], lambda view, now: Decision([Delete(key)], None))
