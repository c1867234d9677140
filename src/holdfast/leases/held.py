"""A lease that is held, as an object to work under; and how to get one, at once or by waiting in line."""

from __future__ import annotations

import contextlib
import threading

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import Failure
from holdfast.holding.heartbeat import Held, Subject
from holdfast.holding.line import NotYet, Wish, wait_in_line
from holdfast.leases.desk import Desk
from holdfast.leases.protocol import SHOW_EVERY, Granted, Request, Waiting
from holdfast.leases.records import Lease, LeaseKeys
from holdfast.locks.identity import processes_above


class HeldLease(Held[Lease]):
    """A lease on a worktree. Used as a context manager, also an asynchronous one, it ends with its block."""

    def __init__(
        self, desk: Desk, lease: Lease, *, clock: Clock = SYSTEM_CLOCK, began: float | None = None
    ) -> None:
        """`began` is what the boot clock showed before the lease was asked for."""
        subject = Subject(f"the lease on {lease.worktree_id}", "renewed", {"worktree": lease.worktree_id})
        super().__init__(subject, lease, lease.ttl, clock=clock, began=began)
        self._desk = desk

    @property
    def lease(self) -> Lease:
        """The lease as it was last renewed."""
        return self.record

    @property
    def worktree(self) -> str:
        return self.lease.worktree_id

    @property
    def lock_id(self) -> str:
        return self.lease.lock_id

    @property
    def token(self) -> int:
        return self.lease.fencing_token

    def _renewed(self, ttl: float | None) -> tuple[Lease, float]:
        lease = self._desk.renew(self.worktree, self.lock_id, ttl)
        return lease, lease.ttl

    def _given_back(self) -> None:
        self._desk.release(self.worktree, self.lock_id)


def acquire(
    desk: Desk,
    worktree: str,
    request: Request,
    *,
    wait: float | None = 0.0,
    cancelled: threading.Event | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> HeldLease:
    """Get a lease: at once, or by waiting in line at most `wait` seconds (None: without limit).

    `LockConflict` names the holder if there is no time to wait, `LockTimeout` if it was not enough or
    `cancelled` was set, `Deadlock` if the holder waits in turn for something that the requester holds.
    """
    if wait == 0.0:
        began = clock.boot()
        return HeldLease(desk, desk.acquire(worktree, request).lease, clock=clock, began=began)
    request = request._replace(above=processes_above())

    def ask() -> HeldLease | NotYet:
        began = clock.boot()
        answer = desk.line_up(worktree, request)
        if isinstance(answer, Granted):
            return HeldLease(desk, answer.lease, clock=clock, began=began)
        return _not_yet(answer)

    wish = Wish(f"the worktree {worktree}", wait, cancelled, clock)
    try:
        with desk.store.watch(LeaseKeys.of(worktree).lease) as watch:
            return wait_in_line(wish, ask, watch, lambda: desk.refuse_circle(request.lock_id))
    except BaseException:
        with contextlib.suppress(Failure):
            desk.leave(worktree, request.lock_id)
        raise


def _not_yet(answer: Waiting) -> NotYet:
    """Until the lease may expire, or the waiter must show itself."""
    lease = answer.lease
    if lease is None:  # free, but others come first: they are about to take it, or have died
        return NotYet(0.05 if answer.place > 1 else SHOW_EVERY, [])
    shown = f"{lease.holder_id}" + (f" ({lease.purpose})" if lease.purpose else "")
    holder = {"holder_id": lease.holder_id, "lock_id": lease.lock_id, "shown": shown}
    return NotYet(min(SHOW_EVERY, answer.time_left), [holder])
