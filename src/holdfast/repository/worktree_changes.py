"""Renaming and removing a worktree: a decision, one move of its directory, then the record.

The steps are numbered as in `docs/protocols/worktrees.md`. The commit point of both is the transaction T1: it
makes the token check and records an `Operation`. From then on, the lease is refused to all others, and this process or
another one finishes the operation. T2 makes the result visible and deletes the `Operation`. Removing leaves the
snapshots and the token counter: a worktree of the same name continues from it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import LONGEST_DURATION, format_instant, parse_instant, ttl_within
from holdfast.errors import AlreadyExists, DirectoryReplaced, LockConflict, NotFound, Refused
from holdfast.fs.directory import entry_exists, make_directories
from holdfast.leases.rules import LeaseKeys, TokenCounter
from holdfast.leases.service import HeldLease
from holdfast.repository import payloads
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    PINS,
    WORKTREES,
    Descriptor,
    Operation,
    OperationKind,
    Pin,
    Proof,
    RepositoryContext,
    WorktreeConfig,
    operation_pending,
    token_check,
    worktree_keys,
)
from holdfast.repository.exchange import late_writes
from holdfast.repository.payloads import LeasedWorktree, leased, payload_locked, scratch
from holdfast.repository.snapshots import publish_changes
from holdfast.repository.usage import refuse_if_used
from holdfast.store.model import Change, Create, Decision, Delete, Key, Replace, Stream, View

_MOST_NAMED = 5
MOVED, SAVED = "moved", "saved"  # marks in the scratch directory

Save = Callable[[LeasedWorktree], str | None]  # saves unsaved work as a snapshot; returns its id, if there was any
Teardown = Callable[[HeldLease | None], None]  # under the lease


KEEP_FOR = 30 * 86_400.0
"""How long a pin protects the last snapshot of a removed worktree, in seconds."""


class Removed(NamedTuple):
    """The removed worktree: its last snapshot, which has its content, and the pin that protects it; `saved` is the
    snapshot of unsaved work, if there was any."""

    worktree: str
    head_snapshot_id: str | None
    saved: str | None
    pin: Pin | None = None


# --- Remove -------------------------------------------------------------------------------------------


def remove(
    context: RepositoryContext,
    name: str,
    *,
    save: Save | None,
    teardown: Teardown | None = None,
    force: bool = False,
    lock_id: str | None = None,
    keep_for: float = KEEP_FOR,
) -> Removed:
    """Remove a worktree without a pending operation. `teardown` runs first. Without `save`, unsaved work is lost. If
    the directory is gone, only the records are removed."""
    ttl_within(keep_for, 0.0, LONGEST_DURATION, setting="keep_for")
    with payload_locked(context, name), leased(context, name, "remove", lock_id=lock_id) as right:  # 1
        payloads.refuse_replaced(context, name)
        if not force:
            context.home.refuse_if_locked(name)
        is_there = payloads.status_of(context.paths, name) is not None
        if teardown is not None and is_there:
            teardown(right.lease)
        saved = save(right) if save is not None and is_there else None  # 2
        if not force and is_there:
            refuse_if_used(payloads.directory_of(context, name), name, "removed")  # 3
        payloads.refuse_if_mounted(context, name, "removed")
        _refuse_nested(context, name, "removed", but_repositories=force)
        payloads.refuse_if_fixed(context, name)
        facts = {"snapshot_id": saved, "keeps": save is not None}
        operation = _decide_remove(context, name, Proof.of(right.lease), keep_for, facts)  # 4
        return finish_remove(context, operation)  # 5, 6


def finish_remove(context: RepositoryContext, operation: Operation) -> Removed:
    """Finish a decided removal."""
    name = operation.worktree_id
    with scratch(context, "remove", worktree=name, scratch_id=operation.operation_id) as room:
        _move_away(context, operation, room.path)  # 5
        saved = _save_late(context, operation, room.path) or operation.snapshot_id
        context.home.delete(context, operation)
        return _publish_remove(context, operation)._replace(saved=saved)  # 6


def _refuse_nested(context: RepositoryContext, name: str, doing: str, *, but_repositories: bool) -> None:
    """Refuse a worktree that contains another one, leased or not: git would look for that one at its old path. Refuse
    one that contains a repository too, of which a snapshot has only the id of a commit, unless `but_repositories`."""
    worktrees, repositories = context.home.below(name)
    if worktrees:
        hint = "Remove that one first ('holdfast worktree list' has its name), or move it away: 'git worktree move'."
        message = f"{name} cannot be {doing}: the git worktree {worktrees[0]} is in it"
        raise Refused(message, hint=hint, worktree=name, worktrees=[str(each) for each in worktrees])
    if repositories and not but_repositories:
        paths = [str(each) for each in repositories]
        names = ", ".join(paths[:_MOST_NAMED]) + (", ..." if len(paths) > _MOST_NAMED else "")
        message = f"{name} cannot be {doing}: its snapshots do not contain the repositories in it: {names}"
        raise Refused(message, hint="Move them away. Or delete them too: --force.", worktree=name, repositories=paths)


def _decide_remove(
    context: RepositoryContext, name: str, proof: Proof | None, keep_for: float, facts: dict[str, Any]
) -> Operation:
    """Commit point of a removal."""
    check, operation_id = token_check(context, name, proof), secrets.token_hex(8)

    def decide(view: View, now: float) -> Decision[Operation]:
        check(view, now)
        until = format_instant(now + keep_for) if keep_for else None
        operation = context.operation(OperationKind.REMOVE, operation_id, name, now, pinned_until=until, **facts)
        return Decision([Create(OPERATIONS.key(name), operation)], operation)

    return context.store.transact([*LeaseKeys.of(name).all(), *worktree_keys(name)], decide).result


def _move_away(context: RepositoryContext, operation: Operation, room: Path) -> None:
    """Move the directory away, once: anything that appears at its path later stays. The mark records the move before
    the directory is deleted."""
    if not entry_exists(room / MOVED):
        context.home.move_away(context, operation)
        make_directories(room / MOVED)


def _save_late(context: RepositoryContext, operation: Operation, room: Path) -> str | None:
    """Publish late writes as a snapshot. Without the mark, a half deleted directory would look like late writes."""
    name, removed = operation.worktree_id, context.home.removed(operation)
    if not operation.keeps or entry_exists(room / SAVED) or not entry_exists(removed):
        return None
    note = f"written while {name} was being removed"
    with late_writes(context, operation, removed, context.config(name).tip, note) as late:
        if late is not None:
            _publish_late(context, operation, late)
    make_directories(room / SAVED)
    return None if late is None else late.snapshot_id


def _publish_late(context: RepositoryContext, operation: Operation, late: Descriptor) -> None:
    """Make the snapshot the head: a process that repeats this finds no difference from it."""
    name, key = operation.worktree_id, DESCRIPTORS.key(late.snapshot_id)
    facts = {"worktree_id": name, "snapshot_id": late.snapshot_id, "operation_id": operation.operation_id}

    def decide(view: View, now: float) -> Decision[None]:
        config = view.get(WORKTREES.key(name))
        assert config is not None, "a worktree that is being removed has its record"
        changes, _ = publish_changes(config, late)
        return Decision([*changes, context.audit(view, now, "snapshot_published", **facts)], None)

    context.store.transact([*worktree_keys(name), key, context.trail.stream], decide)


def _publish_remove(context: RepositoryContext, operation: Operation) -> Removed:
    """Delete the record, and pin its head in the same commit."""
    name = operation.worktree_id
    leases = LeaseKeys.of(name)
    payloads.drop_cache(context.paths, name)
    document = context.store.read(WORKTREES.key(name))  # it is fixed while the operation is pending
    head = None if document is None else document.record.head_snapshot_id
    pinned = () if head is None else (DESCRIPTORS.key(head), PINS.key(head))

    def decide(view: View, now: float) -> Decision[Pin | None]:
        changes, pin = _pin_head(view, operation, head, now)
        facts = {"worktree_id": name, "head_snapshot_id": head, "pinned_until": pin.until if pin else None}
        facts |= {"saved_snapshot_id": operation.snapshot_id, "begun_by": operation.holder_id}
        entry = context.audit(view, now, "worktree_removed", **facts)
        records = [Delete(key) for key in worktree_keys(name) if view.get(key) is not None]
        return Decision([*changes, *records, *_end_of_lease(view, leases), entry], pin)

    keys = [*leases.all(), *worktree_keys(name), *pinned, context.trail.stream]
    pin = context.store.transact(keys, decide).result
    payloads.drop_record_directory(context.paths, name)
    return Removed(name, head, None, pin)


def _pin_head(view: View, operation: Operation, head: str | None, now: float) -> tuple[list[Change], Pin | None]:
    """Pin the last snapshot of a removed worktree, or extend the pin of an earlier removal. Pure."""
    until = operation.pinned_until
    if head is None or until is None or view.get(DESCRIPTORS.key(head)) is None:
        return [], None
    key, reason = PINS.key(head), f"the worktree {operation.worktree_id} was removed"
    facts = {"snapshot_id": head, "reason": reason, "holder_id": operation.holder_id}
    pin, found = Pin(pin_id=head, created_at=format_instant(now), until=until, **facts), view.get(key)
    if found is None:
        return [Create(key, pin)], pin
    if found.until is None or parse_instant(found.until) >= parse_instant(until):
        return [], found
    return [Replace(key, pin)], pin


# --- Worktrees of a clone that is gone ----------------------------------------------------------------


def forget_clone(context: RepositoryContext, clone: str, *, force: bool = False) -> list[str]:
    """Delete the records of all worktrees of a clone, that of its checkout last; return their names. Raises
    `LockConflict` if one is leased, unless `force`. Their snapshots stay."""
    found = [name for name, each in context.store.scan(WORKTREES) if each.record.clone == clone]
    ordered = sorted(found, key=lambda name: (name == clone, name))
    for name in ordered:
        forget_worktree(context, name, force=force)
    return ordered


def forget_worktree(context: RepositoryContext, name: str, *, force: bool = False) -> None:
    """Delete the record of a worktree whose directory nobody will use again. Raises `LockConflict` if it is leased."""
    leases, state = LeaseKeys.of(name), context.leases.state(name)
    expected = state.lease.lock_id if state is not None else None
    if state is not None and not state.expired and not force:
        message = f"{name} is leased by {state.lease.holder_id}"
        raise LockConflict(message, hint="Wait until the lease expires.", worktree=name, lock_id=expected)

    def decide(view: View, now: float) -> Decision[None]:
        config, lease = view.get(WORKTREES.key(name)), view.get(leases.lease)
        if config is None:
            return Decision([], None)
        if (lease.lock_id if lease else None) != expected:
            raise LockConflict(f"{name} was leased meanwhile", worktree=name)
        facts = {"worktree_id": name, "head_snapshot_id": config.head_snapshot_id, "clone": config.clone}
        records = [Delete(key) for key in worktree_keys(name) if view.get(key) is not None]
        entry = context.audit(view, now, "worktree_removed", **facts)
        return Decision([*records, *_end_of_lease(view, leases), entry], None)

    context.store.transact([*leases.all(), *worktree_keys(name), context.trail.stream], decide)


# --- Rename -------------------------------------------------------------------------------------------


def rename(context: RepositoryContext, old: str, new: str, *, force: bool = False) -> WorktreeConfig:
    """Rename a worktree; no operation may be pending on either name. `force` ignores processes that use it."""
    with payload_locked(context, old, new), leased(context, old, f"rename to {new}") as right:  # 1, 2
        if not force:
            refuse_if_used(payloads.directory_of(context, old), old, "renamed")
        _refuse_nested(context, old, "renamed", but_repositories=True)
        payloads.refuse_if_fixed(context, old)
        if payloads.status_of(context.paths, new) is not None:
            if context.store.read(WORKTREES.key(new)) is not None:
                raise payloads.worktree_exists(new)
            raise payloads.path_taken(context.paths.payload(new))
        if payloads.status_of(context.paths, old) is not None:
            context.home.check_rename(old, new)
        operation = _decide_rename(context, old, new, Proof.of(right.lease))  # 3
        return _carry_out(context, operation, old, new)  # 4, 5


def finish_rename(context: RepositoryContext, operation: Operation) -> None:
    """Finish a decided rename, found under either of its names."""
    old, new = operation.worktree_id, operation.counterpart or ""
    if operation.becomes:
        old, new = new, old
    with contextlib.suppress(AlreadyExists, NotFound, DirectoryReplaced):  # it was undone, which ends it too
        _carry_out(context, operation, old, new)


def _carry_out(context: RepositoryContext, operation: Operation, old: str, new: str) -> WorktreeConfig:
    try:
        context.home.move(context, operation, old, new)  # 4
    except AlreadyExists:
        _undo(context, old, new)
        raise payloads.path_taken(context.paths.payload(new)) from None
    except (NotFound, DirectoryReplaced):
        _undo(context, old, new)
        raise
    payloads.drop_cache(context.paths, old)
    return _publish_rename(context, operation, old, new)  # 5


def _decide_rename(context: RepositoryContext, old: str, new: str, proof: Proof | None) -> Operation:
    """Commit point of a rename."""
    inode = payloads.inode_of(payloads.status_of(context.paths, old))
    check, operation_id = token_check(context, old, proof), secrets.token_hex(8)
    keys = [*LeaseKeys.of(old).all(), *worktree_keys(old), *worktree_keys(new)]

    def decide(view: View, now: float) -> Decision[Operation]:
        check(view, now)
        pending = view.get(OPERATIONS.key(new))
        if pending is not None:
            raise operation_pending(pending)
        if view.get(WORKTREES.key(new)) is not None:
            raise payloads.worktree_exists(new)
        operation = context.operation(OperationKind.RENAME, operation_id, old, now, counterpart=new, inode=inode)
        twin = msgspec.structs.replace(operation, worktree_id=new, counterpart=old, becomes=True)
        return Decision([Create(OPERATIONS.key(old), operation), Create(OPERATIONS.key(new), twin)], operation)

    return context.store.transact(keys, decide).result


def _publish_rename(context: RepositoryContext, operation: Operation, old: str, new: str) -> WorktreeConfig:
    leases, new_leases = LeaseKeys.of(old), LeaseKeys.of(new)
    facts = {"worktree_id": old, "renamed_to": new, "begun_by": operation.holder_id}
    described = context.home.described(new)

    def decide(view: View, now: float) -> Decision[WorktreeConfig]:
        config = view.get(WORKTREES.key(old))
        assert config is not None, "a worktree that is being renamed has its record"
        renamed = msgspec.structs.replace(config, worktree_id=new, **described)
        changes: list[Change] = [
            Delete(WORKTREES.key(old)),
            Create(WORKTREES.key(new), renamed),
            Delete(OPERATIONS.key(old)),
            Delete(OPERATIONS.key(new)),
            *_end_of_lease(view, leases),
            *_end_of_lease(view, new_leases),
            *_continue_tokens(view, leases, new_leases),
            context.audit(view, now, "worktree_renamed", **facts),
        ]
        return Decision(changes, renamed)

    renamed = context.store.transact(_all_keys(context, old, new), decide).result
    payloads.drop_record_directory(context.paths, old)
    return renamed


def _undo(context: RepositoryContext, old: str, new: str) -> None:
    """Leave everything under the old name, without a lease."""

    def decide(view: View, now: float) -> Decision[None]:
        operations = [Delete(OPERATIONS.key(old)), Delete(OPERATIONS.key(new))]
        return Decision([*operations, *_end_of_lease(view, LeaseKeys.of(old))], None)

    context.store.transact(_all_keys(context, old, new), decide)


def _all_keys(context: RepositoryContext, old: str, new: str) -> list[Key[Any] | Stream[Any]]:
    documents = [key for name in (old, new) for key in (*LeaseKeys.of(name).all(), *worktree_keys(name))]
    return [*documents, context.trail.stream]


def _end_of_lease(view: View, keys: LeaseKeys) -> list[Change]:
    """Delete the lease and its queue: while an operation is pending, only its own process can hold it."""
    both: list[Key[Any]] = [keys.lease, keys.queue]
    return [Delete(key) for key in both if view.get(key) is not None]


def _continue_tokens(view: View, old: LeaseKeys, new: LeaseKeys) -> list[Change]:
    """Continue the counter of the new name from the greater of both; that of the old name stays."""
    before, current = view.get(old.counter), view.get(new.counter)
    greater = max(each.fencing_token if each else 0 for each in (before, current))
    if greater == (current.fencing_token if current else 0):
        return []
    counter = TokenCounter(new.worktree, greater)
    return [Create(new.counter, counter) if current is None else Replace(new.counter, counter)]
