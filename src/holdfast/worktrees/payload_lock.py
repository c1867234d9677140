"""The payload lock of a worktree: who holds it may move, replace or delete the worktree's directory.

It is a kernel lock on a file that is never deleted, so it ends with its process; therefore an
operation that is found pending while the lock can be had belongs to a process that is gone, and
whoever found it may bring it to its end. It is taken before the operation is decided and released
after its last step. Users who write into the directory do not take it: that is what leases are for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdfast.errors import LockConflict
from holdfast.fs.directory import make_directories
from holdfast.locks.file_lock import FileLocker
from holdfast.worktrees.control import Control, being_changed
from holdfast.worktrees.records import OPERATIONS


@contextlib.contextmanager
def payload_locked(control: Control, *worktrees: str) -> Iterator[None]:
    """Hold the payload locks of these worktrees, in the order of their names, for the block.

    Never waits: somebody who holds one is at work there, which is a conflict, named if it can be.
    """
    make_directories(control.places.guards)
    locker = FileLocker()
    with contextlib.ExitStack() as held:
        for worktree in sorted(set(worktrees)):
            guard = locker.try_lock_exclusive(control.places.guards / f"payload-{worktree}.lock")
            if guard is None:
                raise _in_use(control, worktree)
            held.enter_context(guard)
        yield


def _in_use(control: Control, worktree: str) -> LockConflict:
    pending = control.store.read(OPERATIONS.key(worktree))
    if pending is not None:
        return being_changed(pending.record)
    return LockConflict(
        f"another process is about to change the directory of {worktree}",
        hint="Try again in a moment.",
        worktree=worktree,
    )
