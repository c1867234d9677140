"""The life of worktrees as their users see it: created, listed, renamed, removed.

Each operation first brings to its end what a dead process has left pending on the names it is about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists
from holdfast.fs.directory import is_there, make_directories, move
from holdfast.fs.names import checked_text
from holdfast.leases.rules import Identity
from holdfast.leases.service import LeaseState
from holdfast.repository import context, exchange, payloads, worktree_changes
from holdfast.repository.context import RepositoryContext, being_changed
from holdfast.repository.payloads import (
    Scratch,
    other_than_main,
    payload_locked,
    scratch,
    sweep,
    worktree_name,
)
from holdfast.repository.records import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    WORKTREES,
    Isolation,
    Operation,
    OperationKind,
    WorktreeConfig,
    worktree_keys,
)
from holdfast.repository.usage import Usage, usage_of
from holdfast.repository.worktree_changes import Removed, Save
from holdfast.store.model import Change, Create, Decision, Delete, Key, Stream, View

PAYLOAD = "payload"


class CreateOptions(NamedTuple):
    """What the new worktree shall be like."""

    name: str
    snapshot_id: str | None = None
    isolation: Isolation = Isolation.EXCLUSIVE
    label: str | None = None


def create(control: RepositoryContext, wanted: CreateOptions) -> WorktreeConfig:
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


def finish(control: RepositoryContext, operation: Operation) -> WorktreeConfig | None:
    """Bring a creation to its end: None if it had not come far enough and was undone."""
    in_scratch = is_there(control.places.scratch / operation.operation_id / PAYLOAD)
    if not in_scratch and payloads.status_of(control.places, operation.worktree_id) is not None:
        payloads.sync_names(control.places, operation.worktree_id)
        return _make_visible(control, operation)
    _undo(control, operation)
    sweep(control.places, operation.operation_id)
    return None


def _check_early(control: RepositoryContext, wanted: CreateOptions) -> None:
    """What would be refused in the end is refused before the work is done."""
    if control.store.read(WORKTREES.key(wanted.name)) is not None:
        raise payloads.already_there(wanted.name)
    _check_path(control, wanted.name)
    if wanted.snapshot_id is not None:
        context.usable(context.visible(control, wanted.snapshot_id))


def _check_path(control: RepositoryContext, name: str) -> None:
    make_directories(control.places.worktrees)
    if payloads.status_of(control.places, name) is not None:
        raise payloads.stranger(control.places.payload(name))


def _make_payload(control: RepositoryContext, wanted: CreateOptions, payload: Path) -> None:
    from holdfast.trees.restore import materialise
    from holdfast.trees.walker import synced

    if wanted.snapshot_id is None:
        make_directories(payload)
        return
    tree = control.places.tree(wanted.snapshot_id)
    make_directories(control.places.caches)
    with synced(payload.parent):
        materialise(tree, payload, cache=control.places.stat_cache(wanted.name))


def _decide(control: RepositoryContext, wanted: CreateOptions, made_in: Scratch) -> Operation:
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
                raise context.no_snapshot(wanted.snapshot_id)
            context.usable(descriptor)
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


def _move_into_place(control: RepositoryContext, name: str, payload: Path) -> None:
    target = control.places.payload(name)
    try:
        move(payload, target)
    except AlreadyExists:
        raise payloads.stranger(target) from None


def _make_visible(control: RepositoryContext, operation: Operation) -> WorktreeConfig:
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


def _undo(control: RepositoryContext, operation: Operation) -> None:
    key = OPERATIONS.key(operation.worktree_id)
    control.store.transact([key], lambda view, now: Decision([Delete(key)], None))


Finisher = Callable[[RepositoryContext, Operation], object]
"""Brings an operation to its end. Its caller holds the payload locks; it may be run any number of times."""

_FINISHERS: dict[OperationKind, Finisher] = {
    OperationKind.CREATE: finish,
    OperationKind.RENAME: worktree_changes.finish_renaming,
    OperationKind.REMOVE: worktree_changes.finish_removal,
    OperationKind.RESTORE: exchange.finish,
}


def settle(control: RepositoryContext, worktree: str) -> Operation | None:
    """See to it that nothing is pending on a worktree; return what was brought to its end, if anything was.

    `LockConflict` if the process that is at it lives. Costs one read if there is nothing to do.
    """
    pending = control.store.read(OPERATIONS.key(worktree))
    if pending is None:
        return None
    with payload_locked(control, *names_of(pending.record)):
        found = control.store.read(OPERATIONS.key(worktree))
        if found is None or found.record.operation_id != pending.record.operation_id:
            return None  # somebody else was faster
        _FINISHERS[found.record.kind](control, found.record)
        return found.record


def names_of(operation: Operation) -> tuple[str, ...]:
    """The worktrees whose payload locks an operation is done under."""
    if operation.counterpart is None:
        return (operation.worktree_id,)
    return operation.worktree_id, operation.counterpart


class WorktreeState(NamedTuple):
    """A worktree as it stands. `is_there` says whether its directory is; `operation` is what is pending."""

    config: WorktreeConfig
    path: Path
    is_there: bool
    lease: LeaseState | None
    operation: Operation | None

    @property
    def is_shared(self) -> bool:
        """Whether nothing keeps writers apart: shown as high-risk everywhere."""
        return self.config.isolation is Isolation.SHARED


class Worktrees:
    """The worktrees of one repository."""

    def __init__(self, control: RepositoryContext) -> None:
        self._control = control

    def configs(self) -> list[WorktreeConfig]:
        """The record of each worktree, `main` first, then by name. Takes no lock."""
        found = [document.record for _, document in self._control.store.scan(WORKTREES)]
        return sorted(found, key=lambda each: (each.worktree_id != MAIN, each.worktree_id))

    def states(self) -> Iterator[WorktreeState]:
        """The state of each worktree. Takes no lock and changes nothing."""
        return map(self._state, self.configs())

    def state(self, name: str) -> WorktreeState:
        """The state of one worktree. Takes no lock and changes nothing."""
        return self._state(self._control.config(worktree_name(name)))

    def usage(self, name: str) -> Usage:
        """Which running processes work in the directory of a worktree."""
        self._control.config(worktree_name(name))
        return usage_of(payloads.directory_of(self._control, name))

    def create(
        self,
        name: str,
        *,
        snapshot: str | None = None,
        seen_from: str = MAIN,
        isolation: Isolation = Isolation.EXCLUSIVE,
        label: str | None = None,
    ) -> WorktreeConfig:
        """Make a worktree: empty, or with the content of a snapshot, which becomes its base and head.

        The snapshot may be named in all ways that there are; `seen_from` is whose head `head` is.
        """
        name = worktree_name(name)
        if name == MAIN:
            raise payloads.already_there(MAIN)
        if label is not None:
            checked_text(label, what="label")
        snapshot_id = None
        if snapshot is not None:
            snapshot_id = context.resolve_usable(self._control, snapshot, worktree=seen_from).snapshot_id
        settle(self._control, name)
        return create(self._control, CreateOptions(name, snapshot_id, isolation, label))

    def change_name(self, old: str, new: str, *, force: bool = False) -> WorktreeConfig:
        """Give a worktree another name. An active lease is a conflict; `force` overlooks processes in it."""
        old, new = other_than_main(worktree_name(old), "renamed"), worktree_name(new)
        if new in (old, MAIN):
            raise payloads.already_there(new)
        settle(self._control, old)
        settle(self._control, new)
        self._control.config(old)
        return worktree_changes.rename(self._control, old, new, force=force)

    def remove(
        self, name: str, *, save: Save | None, force: bool = False, lock_id: str | None = None
    ) -> Removed:
        """Remove a worktree; its snapshots stay. `save` keeps what is unsaved; without it, that is lost.

        An active lease is a conflict unless it is the caller's, named by `lock_id`; `force` overlooks
        processes that work in it.
        """
        name = other_than_main(worktree_name(name), "removed")
        settle(self._control, name)
        self._control.config(name)
        work = functools.partial(
            worktree_changes.remove, self._control, name, save=save, force=force, lock_id=lock_id
        )
        return self._control.places.reserve.relieve(work, again=lambda: self._finish_removal(name) or work())

    def _finish_removal(self, name: str) -> Removed | None:
        """Bring to its end a removal that was decided before the disk was full."""
        there = self._control.store.read(WORKTREES.key(name))
        if there is None:
            return Removed(name, None, None)
        done = settle(self._control, name)
        head = there.record.head_snapshot_id
        return None if done is None else Removed(name, done.snapshot_id or head, done.snapshot_id)

    def _state(self, config: WorktreeConfig) -> WorktreeState:
        control, name = self._control, config.worktree_id
        pending = control.store.read(OPERATIONS.key(name))
        return WorktreeState(
            config=config,
            path=control.places.payload(name),
            is_there=payloads.inode_of(payloads.status_of(control.places, name)) is not None,
            lease=control.desk.state(name),
            operation=None if pending is None else pending.record,
        )
