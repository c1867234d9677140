"""Waiting in line ends when it is one's turn, when the time is up, when one is told to stop, or in vain."""

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
    """A watch that is rung by hand."""

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
    """Something that is free when it is said so; `asked` is how often it was asked for."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.asked = 0

    def release(self, bell: Bell) -> None:
        self.free.set()
        bell.ring()

    def __call__(self) -> str | NotYet:
        self.asked += 1
        return "got it" if self.free.is_set() else NotYet(PATIENCE, [{"shown": "somebody"}])


def wish(wait: float | None = PATIENCE, cancelled: threading.Event | None = None) -> QueueWait:
    return QueueWait("the thing", wait, cancelled, SYSTEM_CLOCK)


def soon(call: Callable[[], object]) -> None:
    threading.Timer(0.05, call).start()


def test_who_waits_is_served_when_something_changes() -> None:
    counter, bell = Counter(), Bell()
    soon(lambda: counter.release(bell))
    assert wait_in_queue(wish(), counter, bell, no_cycle) == "got it"
    assert counter.asked == 2


def test_who_waits_too_long_is_told_who_has_it() -> None:
    with pytest.raises(LockTimeout, match="somebody"):
        wait_in_queue(wish(0.05), Counter(), Bell(), no_cycle)


def test_who_is_told_to_stop_stops_soon() -> None:
    cancelled = threading.Event()
    soon(cancelled.set)
    with pytest.raises(LockTimeout):
        wait_in_queue(wish(None, cancelled), Counter(), Bell(), no_cycle)


@pytest.mark.parametrize("problem", [Deadlock("in vain"), StoreUnavailable("here", "away"), KeyError("a bug")])
def test_what_a_look_finds_is_told_to_the_one_who_waits(problem: Exception) -> None:
    def look() -> None:
        raise problem

    with pytest.raises(type(problem)):
        wait_in_queue(wish(None), Counter(), Bell(), look)


def test_looks_are_first_close_and_then_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_CHECK", 0.001)
    monkeypatch.setattr(queue, "LAST_CHECK", 0.05)
    looks: list[float] = []
    with pytest.raises(LockTimeout):
        wait_in_queue(wish(0.5), Counter(), Bell(), lambda: looks.append(time.monotonic()))
    assert 3 <= len(looks) <= 16


def test_a_look_that_takes_long_keeps_nobody_from_being_served_or_from_giving_up() -> None:
    """What is kept elsewhere may be on a server that is away."""
    answer = threading.Event()

    def look() -> None:
        answer.wait(PATIENCE)
        raise Deadlock("too late")

    try:
        counter, bell = Counter(), Bell()
        threading.Timer(0.3, counter.release, (bell,)).start()
        assert wait_in_queue(wish(), counter, bell, look) == "got it"
        with pytest.raises(LockTimeout):
            wait_in_queue(wish(0.3), Counter(), Bell(), look)
    finally:
        answer.set()


def test_what_a_look_finds_after_a_long_time_is_told_all_the_same() -> None:
    answer = threading.Event()

    def look() -> None:
        answer.wait(PATIENCE)
        raise Deadlock("at last")

    threading.Timer(0.3, answer.set).start()
    with pytest.raises(Deadlock, match="at last"):
        wait_in_queue(wish(None), Counter(), Bell(), look)


def test_where_no_thread_can_be_had_the_waiter_looks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def look() -> None:
        raise Deadlock("in vain")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Deadlock):
        wait_in_queue(wish(None), Counter(), Bell(), look)
