"""A lease that is held, as an object to work under; and how to get one, at once or by waiting in line."""

from __future__ import annotations

import contextlib
import threading
import time

from holdfast.clock import SYSTEM_CLOCK, Clock, format_duration
from holdfast.errors import Failure, LockTimeout
from holdfast.holding.heartbeat import Held, Subject
from holdfast.leases.desk import Desk
from holdfast.leases.protocol import SHOW_EVERY, Granted, Request, Waiting
from holdfast.leases.records import Lease, LeaseKeys
from holdfast.store.base import Watch

LOOK_UP = 0.1
"""How often one who waits looks whether it is to give up."""


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
    `cancelled` was set, `Deadlock` if the holder waits in turn for something that this process holds.
    """
    began = clock.boot()
    if wait == 0.0:
        return HeldLease(desk, desk.acquire(worktree, request).lease, clock=clock, began=began)
    deadline = None if wait is None else clock.monotonic() + wait
    try:
        while True:
            with desk.store.watch(LeaseKeys.of(worktree).lease) as watch:
                began = clock.boot()
                answer = desk.line_up(worktree, request)
                if isinstance(answer, Granted):
                    return HeldLease(desk, answer.lease, clock=clock, began=began)
                left = None if deadline is None else deadline - clock.monotonic()
                if (left is not None and left <= 0) or (cancelled is not None and cancelled.is_set()):
                    raise _timed_out(desk, worktree, wait or 0.0, answer)
                desk.refuse_deadlock(request.lock_id)
                _wait(watch, _pause(answer, left), cancelled)
    except BaseException:
        with contextlib.suppress(Failure):
            desk.leave(worktree, request.lock_id)
        raise


def _wait(watch: Watch, pause: float, cancelled: threading.Event | None) -> None:
    """Wait for a change, at most so long; who may be cancelled looks up from time to time."""
    if cancelled is None:
        watch.wait(pause)
        return
    end = time.monotonic() + pause
    while not cancelled.is_set() and (left := end - time.monotonic()) > 0:
        if watch.wait(min(left, LOOK_UP)):
            return


def _pause(answer: Waiting, left: float | None) -> float:
    """Until the lease may expire, the waiter must show itself, or the time is up; a little at least."""
    pauses = [SHOW_EVERY] if left is None else [SHOW_EVERY, left]
    if answer.lease is not None:
        pauses.append(answer.time_left)
    elif answer.place > 1:
        pauses.append(0.05)  # free, but others come first: they are about to take it, or have died
    return max(0.002, min(pauses))


def _timed_out(desk: Desk, worktree: str, waited: float, answer: Waiting) -> LockTimeout:
    holders: list[dict[str, object]] = []
    if answer.lease is not None:
        shown = f"{answer.lease.holder_id}" + (f" ({answer.lease.purpose})" if answer.lease.purpose else "")
        holders.append({"holder_id": answer.lease.holder_id, "lock_id": answer.lease.lock_id, "shown": shown})
    return LockTimeout(f"the worktree {worktree}", waited, format_duration(waited), holders=holders)
