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

import contextlib
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, DirectoryReplaced, NotFound, Refused
from holdfast.fs.directory import is_there, make_directories, move
from holdfast.leases.rules import Identity, LeaseKeys, TokenCounter
from holdfast.repository import payloads
from holdfast.repository.context import RepositoryContext, being_changed, settled_config
from holdfast.repository.payloads import Right, guarded, payload_locked, scratch
from holdfast.repository.records import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Descriptor,
    Operation,
    OperationKind,
    WorktreeConfig,
    worktree_keys,
)
from holdfast.repository.snapshots import late_whole, publishing
from holdfast.repository.usage import refuse_if_used
from holdfast.store.model import Change, Create, Decision, Delete, Key, Replace, Stream, View

REMOVED, MOVED, SAVED = "removed", "moved", "saved"

Save = Callable[[Right], str | None]
"""Saves what has changed in a worktree as a snapshot; the id of it, or None if there was nothing to save."""


class Removed(NamedTuple):
    """What was removed; `saved` is the snapshot of what had not been saved, if there was any."""

    worktree: str
    head_snapshot_id: str | None
    saved: str | None


def remove(
    control: RepositoryContext,
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
        operation = _decide_removal(control, name, right, saved, keeps=save is not None)  # 4
        saved = finish_removal(control, operation) or saved  # 5, 6
        return Removed(name, saved or right.config.head_snapshot_id, saved)


def finish_removal(control: RepositoryContext, operation: Operation) -> str | None:
    """Bring a removal to its end; return the snapshot of what was written late, if anything was."""
    name = operation.worktree_id
    with scratch(control, "remove", worktree=name, scratch_id=operation.operation_id) as bin_:
        _move_away(control, operation, bin_.path)  # 5
        late = _save_late(control, operation, bin_.path)
        _delete(bin_.path)
        _make_removal_visible(control, operation)  # 6
        return late


def _decide_removal(
    control: RepositoryContext, name: str, right: Right, saved: str | None, *, keeps: bool
) -> Operation:
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


def _move_away(control: RepositoryContext, operation: Operation, into: Path) -> None:
    """Move the directory out of sight, once: what has come to stand at its path since then stays there.

    So that this can be told when it has been deleted, the mark that it was moved is set before.
    """
    name = operation.worktree_id
    if is_there(into / MOVED):
        return
    if not is_there(into / REMOVED) and payloads.status_of(control.places, name) is not None:
        move(payloads.directory_of(control, name), into / REMOVED)
    make_directories(into / MOVED)


def _save_late(control: RepositoryContext, operation: Operation, into: Path) -> str | None:
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


def _publish_late(control: RepositoryContext, operation: Operation, late: Descriptor) -> None:
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
    from holdfast.trees.walker import remove_tree

    remove_tree(into / REMOVED)


def _make_removal_visible(control: RepositoryContext, operation: Operation) -> None:
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


def rename(control: RepositoryContext, old: str, new: str, *, force: bool = False) -> WorktreeConfig:
    """Give a worktree another name. Nothing is pending on either; `force` overlooks running processes."""
    with (
        payload_locked(control, old, new),  # 1
        guarded(control, old, f"rename to {new}") as right,  # 2
    ):
        if not force:
            refuse_if_used(payloads.directory_of(control, old), old, "renamed")
        payloads.refuse_if_fixed(control, old)
        if payloads.status_of(control.places, new) is not None:
            if control.store.read(WORKTREES.key(new)) is not None:
                raise payloads.already_there(new)
            raise payloads.stranger(control.places.payload(new))
        operation = _decide_renaming(control, old, new, right)  # 3
        return _carry_out(control, operation, old, new)  # 4, 5


def finish_renaming(control: RepositoryContext, operation: Operation) -> None:
    """Bring a renaming to its end, whichever of its two records it is known by."""
    old, new = _names(operation)
    with contextlib.suppress(
        AlreadyExists, NotFound, DirectoryReplaced
    ):  # then it was undone, which is an end too
        _carry_out(control, operation, old, new)


def _carry_out(control: RepositoryContext, operation: Operation, old: str, new: str) -> WorktreeConfig:
    if not _is_moved(control, operation, old, new):
        try:
            move(payloads.directory_of(control, old), control.places.payload(new))  # 4
        except (AlreadyExists, NotFound, DirectoryReplaced) as failure:
            _undo(control, old, new)
            if not isinstance(failure, AlreadyExists):  # somebody has taken the directory away
                raise
            raise payloads.stranger(control.places.payload(new)) from None
    else:
        payloads.sync_names(control.places, new)
    payloads.drop_cache(control.places, old)
    return _make_renaming_visible(control, operation, old, new)  # 5


def _is_moved(control: RepositoryContext, operation: Operation, old: str, new: str) -> bool:
    """Whether the directory has its new name. If a directory stands at both, it is known by its inode.

    If that cannot tell (the repository is a copy, say) nothing is guessed: it takes a person.
    """
    at_old, at_new = (payloads.status_of(control.places, name) for name in (old, new))
    if not (at_new and stat.S_ISDIR(at_new.st_mode)):
        return False
    if not (at_old and stat.S_ISDIR(at_old.st_mode)):
        return True
    same_boot = operation.identity.boot_id == Identity.of(control.holder).boot_id
    which = payloads.which_has(operation.inode, (at_old, at_new), same_boot=same_boot)
    if which is None:
        raise Refused(
            f"{old} was being renamed to {new} by {operation.holder_id}, which died, and now there is "
            "a directory at both names: which of them is the worktree cannot be told",
            hint=f"Move the one that is not of this worktree out of {control.places.worktrees}, and try "
            "again: then the renaming is brought to its end.",
            worktree=old,
            renamed_to=new,
            operation_id=operation.operation_id,
        )
    return which == 1


def _names(operation: Operation) -> tuple[str, str]:
    names = (operation.worktree_id, operation.counterpart or "")
    return (names[1], names[0]) if operation.becomes else names


def _decide_renaming(control: RepositoryContext, old: str, new: str, right: Right) -> Operation:
    inode = payloads.inode_of(payloads.status_of(control.places, old))
    lease, operation_id = LeaseKeys.of(old), secrets.token_hex(8)
    keys: list[Key[Any] | Stream[Any]] = [*lease.all(), *worktree_keys(old), *worktree_keys(new)]
    validate = right.validator()

    def decide(view: View, now: float) -> Decision[Operation]:
        settled_config(view, old)
        validate(view, now)
        pending = view.get(OPERATIONS.key(new))
        if pending is not None:
            raise being_changed(pending)
        if view.get(WORKTREES.key(new)) is not None:
            raise payloads.already_there(new)
        operation = Operation(
            operation_id=operation_id,
            kind=OperationKind.RENAME,
            worktree_id=old,
            begun_at=format_instant(now),
            holder_id=control.holder.holder_id,
            identity=Identity.of(control.holder),
            counterpart=new,
            inode=inode,
        )
        twin = msgspec.structs.replace(operation, worktree_id=new, counterpart=old, becomes=True)
        changes = [Create(OPERATIONS.key(old), operation), Create(OPERATIONS.key(new), twin)]
        return Decision(changes, operation)

    return control.store.transact(keys, decide).result


def _make_renaming_visible(
    control: RepositoryContext, operation: Operation, old: str, new: str
) -> WorktreeConfig:
    leases, new_leases = LeaseKeys.of(old), LeaseKeys.of(new)

    def decide(view: View, now: float) -> Decision[WorktreeConfig]:
        config = view.get(WORKTREES.key(old))
        assert config is not None, "a worktree that is being renamed has its record"
        renamed = msgspec.structs.replace(config, worktree_id=new)
        changes: list[Change] = [
            Delete(WORKTREES.key(old)),
            Create(WORKTREES.key(new), renamed),
            Delete(OPERATIONS.key(old)),
            Delete(OPERATIONS.key(new)),
            *_end_of_lease(view, leases),
            *_end_of_lease(view, new_leases),
            *_counted_on(view, leases, new_leases),
        ]
        entry = control.audit(
            view, now, "worktree_renamed", worktree_id=old, renamed_to=new, begun_by=operation.holder_id
        )
        return Decision([*changes, entry], renamed)

    renamed = control.store.transact(_all_keys(control, old, new), decide).result
    payloads.drop_empty_home(control.places, old)
    return renamed


def _undo(control: RepositoryContext, old: str, new: str) -> None:
    """Leave everything under the old name, free to be locked again."""

    def decide(view: View, now: float) -> Decision[None]:
        operations = [Delete(OPERATIONS.key(old)), Delete(OPERATIONS.key(new))]
        return Decision([*operations, *_end_of_lease(view, LeaseKeys.of(old))], None)

    control.store.transact(_all_keys(control, old, new), decide)


def _all_keys(control: RepositoryContext, old: str, new: str) -> list[Key[Any] | Stream[Any]]:
    documents = [key for name in (old, new) for key in (*LeaseKeys.of(name).all(), *worktree_keys(name))]
    return [*documents, control.trail.stream]


def _end_of_lease(view: View, keys: LeaseKeys) -> list[Change]:
    """No lease is left under this name, and nobody in line: while the operation was pending the only lease
    that there can be is the renamer's own."""
    both: list[Key[Any]] = [keys.lease, keys.line]
    return [Delete(key) for key in both if view.get(key) is not None]


def _counted_on(view: View, old: LeaseKeys, new: LeaseKeys) -> list[Change]:
    """The new name counts on from the greater of both counters; the old one's stays as it is."""
    before, there = view.get(old.counter), view.get(new.counter)
    counted = max(each.fencing_token if each else 0 for each in (before, there))
    if counted == (there.fencing_token if there else 0):
        return []
    counter = TokenCounter(new.worktree, counted)
    return [Create(new.counter, counter) if there is None else Replace(new.counter, counter)]
