"""Renaming a worktree: its directory, its record and the count of its tokens go over to the new name.

1. The payload locks of both names.
2. The lease of the worktree is acquired by the renamer: one that is active is a conflict, and nobody
   can acquire it behind our back. (A shared worktree has none.) Running processes are looked for.
3. T1: our lease still counts, the new name is free; an `Operation` under each name says what is on
   its way. From here on nobody is given the lease of either.
4. The directory is renamed, never over something that stands there.
5. T2: the record goes over, the lease is deleted, the new name's token counter becomes the greater of
   both (so tokens grow under either name), the audit entry; the `Operation`s go. Commit point.

Killed after 3, `finish` goes on with 4. If something else has come to stand at the new path, or somebody
has taken the directory away, it is undone. If a directory stands at both names and it cannot be told which is
the worktree's, it stays pending until somebody has moved one of them away.
"""

from __future__ import annotations

import contextlib
import secrets
import stat
from typing import Any

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, DirectoryReplaced, NotFound, Refused
from holdfast.fs.directory import move
from holdfast.leases.rules import Identity, LeaseKeys, TokenCounter
from holdfast.store.model import Change, Create, Decision, Delete, Key, Replace, Stream, View
from holdfast.worktrees import payloads
from holdfast.worktrees.control import Control, being_changed, settled_config
from holdfast.worktrees.guarding import Right, guarded
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.records import (
    OPERATIONS,
    WORKTREES,
    Operation,
    OperationKind,
    WorktreeConfig,
    worktree_keys,
)
from holdfast.worktrees.usage import refuse_if_used


def rename(control: Control, old: str, new: str, *, force: bool = False) -> WorktreeConfig:
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
        operation = _decide(control, old, new, right)  # 3
        return _carry_out(control, operation, old, new)  # 4, 5


def finish(control: Control, operation: Operation) -> None:
    """Bring a renaming to its end, whichever of its two records it is known by."""
    old, new = _names(operation)
    with contextlib.suppress(
        AlreadyExists, NotFound, DirectoryReplaced
    ):  # then it was undone, which is an end too
        _carry_out(control, operation, old, new)


def _carry_out(control: Control, operation: Operation, old: str, new: str) -> WorktreeConfig:
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
    return _make_visible(control, operation, old, new)  # 5


def _is_moved(control: Control, operation: Operation, old: str, new: str) -> bool:
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


def _decide(control: Control, old: str, new: str, right: Right) -> Operation:
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


def _make_visible(control: Control, operation: Operation, old: str, new: str) -> WorktreeConfig:
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


def _undo(control: Control, old: str, new: str) -> None:
    """Leave everything under the old name, free to be locked again."""

    def decide(view: View, now: float) -> Decision[None]:
        operations = [Delete(OPERATIONS.key(old)), Delete(OPERATIONS.key(new))]
        return Decision([*operations, *_end_of_lease(view, LeaseKeys.of(old))], None)

    control.store.transact(_all_keys(control, old, new), decide)


def _all_keys(control: Control, old: str, new: str) -> list[Key[Any] | Stream[Any]]:
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
