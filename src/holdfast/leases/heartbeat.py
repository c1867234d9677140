"""What is held for a time, and kept alive by a heartbeat: the same for leases, claims and issues.

The heartbeat renews in the background, so that nobody has to remember. When renewing is refused, or
has not succeeded for as long as the thing lasts, it is *lost*: `lost` is set, `check` raises from then
on and says why, and what its holder writes later is refused by the store whatever the holder believes.

1. One thread sleeps until the next renewal is due, or the time is up; a renewal runs in a thread of
   its own. So that the time is up is noticed also while a store does not answer.
2. Time is told by the boot clock, which goes on while the machine sleeps and which nobody can set. It
   is read *before* a renewal is asked for: we never believe to hold something longer than the store does.
3. A renewal that failed is tried again, soon, until the time is up; the last problem is told then.
4. The threads know the thing by a weak reference: what nobody has any more is not kept alive.
5. In a forked child nothing is held: it has no thread that could renew, and must not release.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from holdfast.clock import Clock
from holdfast.errors import Failure, FencingMismatch, LockExpired, LockNotHeld
from holdfast.locks.retry import CHANCE

BEATS = 3
"""How many times a thing is renewed in the time that it lasts, at least."""

JITTER = 0.2
"""How much earlier than that a renewal may come, so that those who began together do not go on so."""

LOOK_UP = 2.0
"""How long the heart sleeps at most: the machine may have slept meanwhile, or the thing may be gone."""

REFUSED = (LockNotHeld, LockExpired, FencingMismatch)
"""What a renewal that will never succeed ends with."""

Record = TypeVar("Record")


class Subject(NamedTuple):
    """What is held, in the words of those who hold it: `the lease on main` is `renewed`."""

    name: str
    renewed: str
    facts: dict[str, Any]


class Held(Generic[Record]):
    """Something held for `ttl` seconds from `began` on (by the boot clock; None: from now on).

    Used as a context manager, also an asynchronous one, it beats while its block runs. A kind says in
    `_renewed` how it is renewed, and in `_given_back` how it ends.
    """

    ends_with_block: ClassVar[bool] = True
    """Whether it is given back when its block ends, or only not renewed any more."""

    def __init__(
        self, subject: Subject, record: Record, ttl: float, *, clock: Clock, began: float | None = None
    ) -> None:
        self.lost = threading.Event()
        self.record = record
        self.ttl = ttl
        self.problem: BaseException | None = None
        """Why the last renewal failed; None if it did not."""
        self._subject = subject
        self._clock = clock
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._woken = threading.Event()
        self._renewing = threading.RLock()  # a signal may have us release in the middle of renewing
        self._reason: Failure | None = None
        self._heart: threading.Thread | None = None
        self._renewal: threading.Thread | None = None
        self._lasts_from(clock.boot() if began is None else began)

    def _renewed(self, ttl: float | None) -> tuple[Record, float]:
        """Let it run on for so long (None: as before): what it is then, and how long it lasts."""
        raise NotImplementedError

    def _given_back(self) -> None:
        """Give it back to whoever comes next."""
        raise NotImplementedError

    # --- For who holds it --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if this is not held any more: call it before every piece of work."""
        if self._pid != os.getpid():
            raise self._not_held(f"is held by the process {self._pid}, from which this one was forked")
        if self._ended.is_set():
            raise self._not_held("was released")
        if not self.lost.is_set() and self._time_left() <= 0:
            self._lose(self._too_late())
        if self._reason is not None:
            raise self._reason.with_traceback(None)

    def renew(self, ttl: float | None = None) -> Record:
        """Let it run on from now, for so long (None: as before); if that is refused, it is lost."""
        self.check()
        with self._renewing:  # so that what is noted last is what the store has
            self.check()
            began = self._clock.boot()
            try:
                self.record, self.ttl = self._renewed(ttl)
            except REFUSED as failure:
                self._lose(failure)
                raise
            self.problem = None
            self._lasts_from(began)
        self._woken.set()  # the heart may be asleep for longer than it lasts now
        self.check()  # it may have come too late
        return self.record

    def beat(self) -> Self:
        """Keep it alive in the background until it is released or lost."""
        if self._heart is None and not self._is_over():
            heart = threading.Thread(
                target=_beat, args=(weakref.ref(self), self._woken), name="holdfast-heartbeat", daemon=True
            )
            heart.start()
            self._heart = heart
        return self

    def release(self) -> None:
        """Give it back; twice is fine, and so is what has been lost."""
        if self._is_over():
            return
        self.hand_on()
        with contextlib.suppress(LockNotHeld, FencingMismatch):
            self._given_back()

    def hand_on(self) -> None:
        """Stop renewing without giving it back: it goes on as that of whoever has its id."""
        if self._is_over():
            return
        self._ended.set()
        self._woken.set()
        if self._heart is not None:
            self._heart.join()
        with self._renewing:  # what is on its way comes first: it is still ours
            pass

    def __enter__(self) -> Self:
        try:
            return self.beat()
        except BaseException:
            self.release()  # there is no block that could do it
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self._leave)

    # --- The heart ---------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Do what is due by now; how long to sleep then, None if there is nothing left to do."""
        if self._is_over() or self.lost.is_set():
            return None
        left = self._time_left()
        if left <= 0:
            with contextlib.suppress(Failure):
                self.check()
            return None
        if self._renewal is None and self._clock.boot() >= self._due:
            self._begin_renewal()
        next_one = left if self._renewal is not None else self._due - self._clock.boot()
        return max(0.0, min(left, next_one, LOOK_UP))

    def _begin_renewal(self) -> None:
        self._due = self._clock.boot() + self._soon()
        self._renewal = threading.Thread(target=self._try_to_renew, name="holdfast-renewal", daemon=True)
        try:
            self._renewal.start()
        except RuntimeError as problem:  # no thread can be had now: perhaps a little later
            self._renewal = None
            self._failed(problem)

    def _try_to_renew(self) -> None:
        try:
            self.renew()
        except Exception as problem:  # whatever it is, it is told if the time runs out because of it
            self._failed(problem)
        finally:
            self._renewal = None
            self._woken.set()

    def _failed(self, problem: BaseException) -> None:
        self.problem = problem
        self._due = self._clock.boot() + self._soon()

    def _soon(self) -> float:
        """When to try again what failed."""
        return _shortened(min(1.0, self.ttl / (4 * BEATS)))

    def _lasts_from(self, began: float) -> None:
        self._valid_until = began + self.ttl
        self._due = began + _shortened(self.ttl / BEATS)

    def _time_left(self) -> float:
        return self._valid_until - self._clock.boot()

    def _is_over(self) -> bool:
        """Whether it was given back or handed on, or is not this process's at all."""
        return self._pid != os.getpid() or self._ended.is_set()

    def _leave(self) -> None:
        if self.ends_with_block:
            self.release()
        else:
            self.hand_on()

    def _lose(self, reason: Failure) -> None:
        self._reason = self._reason or reason
        self.lost.set()

    def _not_held(self, why: str) -> LockNotHeld:
        return LockNotHeld(f"{self._subject.name} {why}", **self._subject.facts)

    def _too_late(self) -> LockExpired:
        name, renewed, facts = self._subject
        told = f"{name} was not {renewed} in time"
        if self.problem is None:
            return LockExpired(told, **facts)
        failure = LockExpired(f"{told}; the last attempt failed: {self.problem}", **facts)
        failure.__cause__ = self.problem
        return failure


def begun(clock: Clock, ttl: float, time_left: float) -> float:
    """When something began that lasts for `ttl` and has so much of it left, by the boot clock."""
    return clock.boot() - max(0.0, ttl - time_left)


def _beat(reference: weakref.ref[Held[object]], woken: threading.Event) -> None:
    while True:
        held = reference()
        pause = None if held is None else held.turn()
        del held  # while we sleep, others decide whether it is still needed
        if pause is None:
            return
        woken.wait(pause)
        woken.clear()


def _shortened(pause: float) -> float:
    return pause * (1 - JITTER * CHANCE.random())
