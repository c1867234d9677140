"""The right to change a worktree's directory: its lease, and nobody at work in it.

A shared worktree has no lease: there only the processes that work in it can stand in the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.errors import LockNotHeld
from holdfast.leases.rules import Lease
from holdfast.leases.service import HeldLease, acquire
from holdfast.store.model import View
from holdfast.worktrees.control import Control
from holdfast.worktrees.records import Isolation, WorktreeConfig

TTL = 60.0


class Right(NamedTuple):
    """The right to change a worktree; `lease` is None if it is shared."""

    config: WorktreeConfig
    lease: HeldLease | None
    control: Control

    def validator(self) -> Callable[[View, float], Lease | None]:
        """For the decide function of the transaction that makes use of the right; it raises if it is gone.

        The transaction must name the lease's documents. The clock is read now.
        """
        if self.lease is None:
            return lambda view, now: None
        self.lease.check()
        return self.control.desk.validator(self.lease.worktree, self.lease.lock_id, self.lease.token)


@contextlib.contextmanager
def guarded(control: Control, worktree: str, purpose: str, *, lock_id: str | None = None) -> Iterator[Right]:
    """Hold the lease of a worktree for the block: acquired now, or the caller's own if it has it.

    A lease that somebody else holds is a conflict. The caller's own is kept alive meanwhile, and is still
    there afterwards unless the block has deleted it.
    """
    config = control.config(worktree)
    if config.isolation is Isolation.SHARED:
        yield Right(config, None, control)
        return
    own = None if lock_id is None else _own(control, worktree, lock_id)
    if own is not None:
        try:
            yield Right(config, own.beat(), control)
        finally:
            own.hand_on()
        return
    request = control.desk.request(ttl=TTL, purpose=purpose)
    with acquire(control.desk, worktree, request) as held:
        yield Right(config, held, control)


def _own(control: Control, worktree: str, lock_id: str) -> HeldLease | None:
    """The caller's lease, if that is what the worktree is locked with."""
    try:
        return HeldLease(control.desk, control.desk.renew(worktree, lock_id))
    except LockNotHeld:
        return None
