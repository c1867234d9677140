"""Bringing to its end what another process has begun to do to a worktree's directory, and has died over.

An `Operation` is pending from the transaction that decides it to the one that makes its result visible.
Its process holds the payload lock all that time. So who finds an operation and gets the lock has
found one whose process is gone, and finishes it, or undoes it if it has not come far enough:

| operation | killed before its directory is in its new place | killed after that |
|---|---|---|
| create  | undone: nothing was visible  | finished |
| rename  | finished                     | finished |
| remove  | finished                     | finished |
| restore | finished                     | finished |

Every finisher may be killed itself, at any point, and be run again.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.worktrees import creating, exchanging, removing, renaming
from holdfast.worktrees.control import Control
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.records import OPERATIONS, Operation, OperationKind

Finisher = Callable[[Control, Operation], object]
"""Brings an operation to its end. Its caller holds the payload locks; it may be run any number of times."""

_FINISHERS: dict[OperationKind, Finisher] = {
    OperationKind.CREATE: creating.finish,
    OperationKind.RENAME: renaming.finish,
    OperationKind.REMOVE: removing.finish,
    OperationKind.RESTORE: exchanging.finish,
}


def settle(control: Control, worktree: str) -> Operation | None:
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
