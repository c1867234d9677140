"""A wait in the queue ends with a grant, a timeout, a cancellation or an error from a deadlock check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import Deadlock, LockTimeout, StoreUnavailable
from holdfast.leases import queue
from holdfast.leases.queue import NotYet, QueueWait, wait_in_queue
from holdfast.store.model import Watch
from tests.locks.workers import PATIENCE


class Bell(Watch):
    """A watch that tests trigger by hand."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def _next(self, left: float | None) -> frozenset[str]:
        rung = self._rung.wait(left)
        self._rung.clear()
        return frozenset(("it",) if rung else ())


def no_cycle() -> None: ...


class Counter:
    """A resource that becomes free on demand; `asked` counts the attempts to get it."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.asked = 0

    def release(self, bell: Bell) -> None:
        self.free.set()
        bell.ring()

    def __call__(self) -> str | NotYet:
        self.asked += 1
        return "got it" if self.free.is_set() else NotYet(PATIENCE, [{"shown": "somebody"}])


def queue_wait(wait: float | None = PATIENCE, cancelled: threading.Event | None = None) -> QueueWait:
    return QueueWait("the thing", wait, cancelled, SYSTEM_CLOCK, SYSTEM_CLOCK.monotonic())


def soon(call: Callable[[], object]) -> None:
    threading.Timer(0.05, call).start()


def test_a_waiter_is_served_when_something_changes() -> None:
    counter, bell = Counter(), Bell()
    soon(lambda: counter.release(bell))
    assert wait_in_queue(queue_wait(), counter, bell, no_cycle) == "got it"
    assert counter.asked == 2


def test_a_waiter_that_times_out_is_told_who_holds_the_lock() -> None:
    with pytest.raises(LockTimeout, match="somebody"):
        wait_in_queue(queue_wait(0.05), Counter(), Bell(), no_cycle)


def test_a_waiter_that_is_cancelled_stops_soon() -> None:
    cancelled = threading.Event()
    soon(cancelled.set)
    with pytest.raises(LockTimeout):
        wait_in_queue(queue_wait(None, cancelled), Counter(), Bell(), no_cycle)


@pytest.mark.parametrize("problem", [Deadlock("in vain"), StoreUnavailable("here", "away"), KeyError("a bug")])
def test_a_problem_that_a_check_finds_is_raised_in_the_waiter(problem: Exception) -> None:
    def check() -> None:
        raise problem

    with pytest.raises(type(problem)):
        wait_in_queue(queue_wait(None), Counter(), Bell(), check)


def test_checks_become_less_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_CHECK", 0.001)
    monkeypatch.setattr(queue, "LAST_CHECK", 0.05)
    checks: list[float] = []
    with pytest.raises(LockTimeout):
        wait_in_queue(queue_wait(0.5), Counter(), Bell(), lambda: checks.append(time.monotonic()))
    assert 3 <= len(checks) <= 16


def test_a_slow_check_delays_neither_a_grant_nor_a_timeout() -> None:
    """A check may have to read from a server that does not answer."""
    answer = threading.Event()

    def check() -> None:
        answer.wait(PATIENCE)
        raise Deadlock("too late")

    try:
        counter, bell = Counter(), Bell()
        threading.Timer(0.3, counter.release, (bell,)).start()
        assert wait_in_queue(queue_wait(), counter, bell, check) == "got it"
        with pytest.raises(LockTimeout):
            wait_in_queue(queue_wait(0.3), Counter(), Bell(), check)
    finally:
        answer.set()


def test_a_deadlock_that_a_slow_check_finds_is_still_raised() -> None:
    answer = threading.Event()

    def check() -> None:
        answer.wait(PATIENCE)
        raise Deadlock("at last")

    threading.Timer(0.3, answer.set).start()
    with pytest.raises(Deadlock, match="at last"):
        wait_in_queue(queue_wait(None), Counter(), Bell(), check)


def test_a_waiter_checks_by_itself_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def check() -> None:
        raise Deadlock("in vain")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Deadlock):
        wait_in_queue(queue_wait(None), Counter(), Bell(), check)
