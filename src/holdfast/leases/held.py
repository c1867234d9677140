"""A lease that is held, and kept alive by a heartbeat, as an object to work under.

The heartbeat renews in the background, so that nobody has to remember. When renewing fails for good,
or when no renewal has succeeded for as long as the lease lasts, the lease is *lost*: `lost` is set,
`check` raises from then on, and whatever is published later is refused by its token anyway.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import TracebackType
from typing import Self

from holdfast.clock import SYSTEM_CLOCK, Clock, format_duration
from holdfast.errors import Failure, LockExpired, LockNotHeld, LockTimeout
from holdfast.leases.desk import Desk
from holdfast.leases.protocol import SHOW_EVERY, Granted, Request, Waiting
from holdfast.leases.records import Lease, LeaseKeys
from holdfast.store.base import Watch

BEATS = 3
"""How many times a lease is renewed in the time that it lasts."""

LOOK_UP = 0.1
"""How often one who waits looks whether it is to give up."""


class HeldLease:
    """A lease on a worktree. Used as a context manager, also an asynchronous one, it ends with its block."""

    def __init__(
        self, desk: Desk, lease: Lease, *, clock: Clock = SYSTEM_CLOCK, began: float | None = None
    ) -> None:
        """`began` is what the boot clock showed before the lease was asked for."""
        self.lost = threading.Event()
        self.lease = lease
        self._desk = desk
        self._clock = clock
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._woken = threading.Event()
        self._reason: Failure | None = None
        self._valid_until = (clock.boot() if began is None else began) + lease.ttl
        self._heart: threading.Thread | None = None

    @property
    def worktree(self) -> str:
        return self.lease.worktree_id

    @property
    def lock_id(self) -> str:
        return self.lease.lock_id

    @property
    def token(self) -> int:
        return self.lease.fencing_token

    def check(self) -> None:
        """Raise if this lease is not held any more: call it before every piece of work."""
        if self._ended.is_set() or self._pid != os.getpid():
            raise LockNotHeld(f"the lease on {self.worktree} was released", worktree=self.worktree)
        if not self.lost.is_set() and self._clock.boot() >= self._valid_until:
            self._lose(
                LockExpired(f"the lease on {self.worktree} was not renewed in time", worktree=self.worktree)
            )
        if self._reason is not None:
            raise self._reason

    def renew(self, ttl: float | None = None) -> Lease:
        """Let the lease run on; if that is refused, it is lost."""
        self.check()
        began = self._clock.boot()
        try:
            self.lease = self._desk.renew(self.worktree, self.lock_id, ttl)
        except (LockNotHeld, LockExpired) as failure:
            self._lose(failure)
            raise
        self._valid_until = began + self.lease.ttl
        if ttl is not None:
            self._woken.set()  # the heart may be asleep for longer than the lease lasts now
        return self.lease

    def beat(self) -> Self:
        """Keep the lease alive in the background until it is released or lost."""
        if self._heart is None:
            self._heart = threading.Thread(target=self._keep_alive, name="holdfast-heartbeat", daemon=True)
            self._heart.start()
            threading.Thread(target=self._mind_the_end, name="holdfast-lease-end", daemon=True).start()
        return self

    def release(self) -> None:
        """Give the lease back; twice is fine, and so is one that has been lost."""
        if self._ended.is_set() or self._pid != os.getpid():
            return
        self.hand_on()
        with contextlib.suppress(LockNotHeld):
            self._desk.release(self.worktree, self.lock_id)

    def hand_on(self) -> None:
        """Stop renewing without giving the lease back: it goes on as that of whoever has its id."""
        self._ended.set()
        self._woken.set()
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join()

    def _keep_alive(self) -> None:
        pause = self.lease.ttl / BEATS
        while True:
            self._woken.wait(pause)
            self._woken.clear()
            if self._ended.is_set():
                return
            try:
                self.renew()
                pause = self.lease.ttl / BEATS
            except Failure:
                if self.lost.is_set():
                    return
                pause = min(1.0, self.lease.ttl / (4 * BEATS))  # a store that does not answer: try again

    def _mind_the_end(self) -> None:
        """Say so when the time is up, also while a renewal is on its way to a store that does not answer."""
        while not self._ended.is_set() and not self.lost.is_set():
            left = self._valid_until - self._clock.boot()
            if left <= 0:
                with contextlib.suppress(Failure):
                    self.check()
                return
            self._ended.wait(left)

    def _lose(self, reason: Failure) -> None:
        self._reason = reason
        self.lost.set()

    def __enter__(self) -> Self:
        return self.beat()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self.beat()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.release)


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
