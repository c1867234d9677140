"""Heartbeats: the background renewal of leases, ledger claims and issue claims while they are held.

The steps are those of docs/protocols/waits.md:

1. A thread renews at least `BEATS` times per ttl, each time slightly early by a random amount.
2. Time comes from the boot clock, which cannot be set and continues while the machine sleeps. It is
   read *before* a renewal is requested: a holder never believes it holds longer than the store does.
3. One thread sleeps until a renewal or the deadline is due; each renewal has its own thread. So the deadline
   is noticed even while a store does not answer.
4. A failed renewal is retried soon, until the deadline; a refused one is not. After the deadline or a refusal, the
   lease or claim is *lost* for good: `lost` is set and `check` raises, with the last problem as its cause.
5. The threads have a weak reference, so an unreferenced lease or claim is not renewed. A forked child holds nothing: it
   has no thread that could renew, and must not release.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from holdfast.clock import Clock
from holdfast.errors import Failure, FencingMismatch, LockExpired, LockNotHeld
from holdfast.locks.retry import CHANCE

BEATS = 3  # renewals per ttl, at least
JITTER = 0.2  # how much earlier a renewal may come, so that holders that began together drift apart
LONGEST_SLEEP = 2.0  # between two checks: the machine may have slept meanwhile, or the holder may be gone
REFUSED = (LockNotHeld, LockExpired, FencingMismatch)  # a renewal that raises one of these will never succeed

Record = TypeVar("Record")


class Subject(NamedTuple):
    """The words for a lease or claim in messages: `the lease on main` is `renewed`."""

    name: str
    renewed: str
    facts: dict[str, Any]


class Held(Generic[Record]):
    """A lease or claim, held for `ttl` seconds from `began` (by the boot clock; None: from now). As a context manager
    (`with` or `async with`), it is renewed while its block runs. A subclass defines how to renew and release it."""

    ends_with_block: ClassVar[bool] = True  # whether the end of the block releases it, or only stops its renewal

    def __init__(
        self, subject: Subject, record: Record, ttl: float, *, clock: Clock, began: float | None = None
    ) -> None:
        self.lost = threading.Event()  # set when it is lost, for good
        self.record = record  # as of the last renewal
        self.ttl = ttl  # how long a renewal lasts, in seconds
        self.problem: BaseException | None = None  # why the last renewal failed; None if it succeeded
        self._subject = subject
        self._clock = clock
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._woken = threading.Event()
        self._renewing = threading.RLock()  # a signal handler may release in the middle of a renewal
        self._reason: Failure | None = None
        self._heart: threading.Thread | None = None
        self._renewal: threading.Thread | None = None
        self._start_term(clock.boot() if began is None else began)

    def _renew(self, ttl: float | None) -> tuple[Record, float]:
        """Renew it in the store, for this ttl (None: as before); return the new record and its ttl."""
        raise NotImplementedError

    def _release(self) -> None:
        """Release it in the store."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if it is no longer held. Call this before every piece of work."""
        if self._pid != os.getpid():
            raise self._not_held(f"is held by the process {self._pid}, from which this one was forked")
        if self._ended.is_set():
            raise self._not_held("was released")
        if not self.lost.is_set() and self._time_left() <= 0:
            self._lose(self._too_late())
        if self._reason is not None:
            raise self._reason.with_traceback(None)

    def renew(self, ttl: float | None = None) -> Record:
        """Renew it from now, for this ttl (None: as before); if the store refuses, it is lost."""
        self.check()
        with self._renewing:  # so that `record` is the latest in the store
            self.check()
            began = self._clock.boot()  # 2.
            try:
                self.record, self.ttl = self._renew(ttl)
            except REFUSED as failure:
                self._lose(failure)
                raise
            self.problem = None
            self._start_term(began)
        self._woken.set()  # the new ttl may be shorter than the heartbeat's sleep
        self.check()  # the renewal may have come too late
        return self.record

    def beat(self) -> Self:
        """Renew it in the background until it is released or lost."""
        if self._heart is None and not self._is_over():
            arguments = (weakref.ref(self), self._woken)
            heart = threading.Thread(target=_beat, args=arguments, name="holdfast-heartbeat", daemon=True)
            heart.start()
            self._heart = heart
        return self

    def release(self) -> None:
        """Release it. Idempotent, and allowed after a loss."""
        if self._is_over():
            return
        self.hand_on()
        with contextlib.suppress(LockNotHeld, FencingMismatch):
            self._release()

    def hand_on(self) -> None:
        """Stop renewing without releasing: from now on it belongs to the process that has its id."""
        if self._is_over():
            return
        self._ended.set()
        self._woken.set()
        if self._heart is not None:
            self._heart.join()
        with self._renewing:  # let a renewal in progress finish: it is still ours
            pass

    def __enter__(self) -> Self:
        """Begin to renew it. Raises as `check` does: a released or lost one cannot be entered again."""
        self.check()
        try:
            return self.beat()
        except BaseException:
            self.release()  # no block will run that could do it
            raise

    def __exit__(self, *_: object) -> None:
        if self.ends_with_block:
            self.release()
        else:
            self.hand_on()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        await asyncio.to_thread(self.__exit__)

    def turn(self) -> float | None:
        """Start a renewal, or note the loss, if that is due; return how long to sleep, or None at the end."""
        if self._is_over() or self.lost.is_set():
            return None
        left = self._time_left()
        if left <= 0:
            with contextlib.suppress(Failure):
                self.check()
            return None
        if self._renewal is None and self._clock.boot() >= self._due:
            self._begin_renewal()
        pause = left if self._renewal is not None else self._due - self._clock.boot()
        return max(0.0, min(left, pause, LONGEST_SLEEP))

    def _begin_renewal(self) -> None:
        self._retry_soon()
        self._renewal = threading.Thread(target=self._try_to_renew, name="holdfast-renewal", daemon=True)
        try:
            self._renewal.start()
        except RuntimeError as problem:  # no thread can be started now
            self._renewal = None
            self._failed(problem)

    def _try_to_renew(self) -> None:
        try:
            self.renew()
        except Exception as problem:  # reported if it leads to the expiry
            self._failed(problem)
        finally:
            self._renewal = None
            self._woken.set()

    def _failed(self, problem: BaseException) -> None:
        self.problem = problem
        self._retry_soon()

    def _retry_soon(self) -> None:
        self._due = self._clock.boot() + _shortened(min(1.0, self.ttl / (4 * BEATS)))

    def _start_term(self, began: float) -> None:
        self._deadline = began + self.ttl
        self._due = began + _shortened(self.ttl / BEATS)

    def _time_left(self) -> float:
        return self._deadline - self._clock.boot()

    def _is_over(self) -> bool:
        """Whether it was released or handed on, or belongs to another process."""
        return self._pid != os.getpid() or self._ended.is_set()

    def _lose(self, reason: Failure) -> None:
        self._reason = self._reason or reason
        self.lost.set()

    def _not_held(self, why: str) -> LockNotHeld:
        return LockNotHeld(f"{self._subject.name} {why}", **self._subject.facts)

    def _too_late(self) -> LockExpired:
        name, renewed, facts = self._subject
        problem = "" if self.problem is None else f"; the last attempt failed: {self.problem}"
        failure = LockExpired(f"{name} was not {renewed} in time{problem}", **facts)
        failure.__cause__ = self.problem
        return failure


def began_at(clock: Clock, ttl: float, time_left: float) -> float:
    """When a term of `ttl` seconds began, by the boot clock, if `time_left` seconds are left."""
    return clock.boot() - max(0.0, ttl - time_left)


def _beat(reference: weakref.ref[Held[object]], woken: threading.Event) -> None:
    while True:
        held = reference()
        pause = None if held is None else held.turn()
        del held  # 5.
        if pause is None:
            return
        woken.wait(pause)
        woken.clear()


def _shortened(pause: float) -> float:
    return pause * (1 - JITTER * CHANCE.random())
