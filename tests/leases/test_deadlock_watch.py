"""The deadlock watch of a wait: it checks soon, then less often, and never blocks the waiter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from holdfast.errors import Deadlock, StoreUnavailable
from holdfast.leases import queue
from holdfast.leases.queue import DeadlockWatch
from tests.locks.workers import PATIENCE, Workers, wait_until


class Wait:
    """A wait that records the calls of its watch; each check runs the given function."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.seen: list[str] = []
        self._check = check

    def post(self) -> None:
        self.seen.append("post")

    def take_down(self) -> None:
        self.seen.append("take down")

    def check(self) -> None:
        self.seen.append("check")
        self._check()


def raising(problem: BaseException) -> Callable[[], None]:
    def check() -> None:
        raise problem

    return check


def test_a_wait_that_ends_before_the_first_check_leaves_no_trace() -> None:
    for _ in range(1000):  # on a slow machine, a check may come first
        watched, began = Wait(), time.monotonic()
        DeadlockWatch(lambda: watched, None).end()  # noqa: B023
        if time.monotonic() - began < queue.FIRST_CHECK / 2:
            assert watched.seen == []
            return
    pytest.fail("this machine was never fast enough")


@pytest.mark.parametrize("timeout", [0.0, queue.FIRST_CHECK])
def test_a_wait_with_a_short_timeout_starts_no_thread(timeout: float) -> None:
    before = set(threading.enumerate())
    DeadlockWatch(Wait, timeout)
    assert set(threading.enumerate()) <= before


def test_a_wait_is_posted_once_checked_repeatedly_and_taken_down() -> None:
    watched = Wait()
    watch = DeadlockWatch(lambda: watched, None)
    wait_until(lambda: watched.seen.count("check") >= 3)
    watch.end()
    assert watch.found is None
    assert watched.seen[:2] == ["post", "check"]
    assert watched.seen.count("post") == 1
    assert set(watched.seen[watched.seen.index("take down") :]) == {"take down"}


@pytest.mark.parametrize("problem", [Deadlock("in vain"), KeyError("a bug")])
def test_a_deadlock_or_bug_that_a_check_finds_is_reported(problem: BaseException) -> None:
    cancelled = threading.Event()
    watch = DeadlockWatch(lambda: Wait(raising(problem)), None, cancelled.set)
    assert cancelled.wait(PATIENCE)
    watch.end()
    assert watch.found is problem


@pytest.mark.parametrize(
    "problem", [StoreUnavailable("elsewhere", "it is away"), FileNotFoundError("the current directory")]
)
def test_a_check_that_cannot_reach_its_store_does_not_end_the_wait(problem: Exception) -> None:
    watched = Wait(raising(problem))
    watch = DeadlockWatch(lambda: watched, None)
    wait_until(lambda: watched.seen.count("check") >= 2)
    watch.end()
    assert watch.found is None


def test_a_failed_preparation_is_retried() -> None:
    tried: list[int] = []

    def prepare() -> Wait:
        tried.append(1)
        raise StoreUnavailable("elsewhere", "it is away")

    watch = DeadlockWatch(prepare, None)
    wait_until(lambda: len(tried) >= 2)
    watch.end()


def test_a_hanging_check_does_not_delay_the_end_of_the_wait() -> None:
    answer, checked = threading.Event(), threading.Event()

    def check() -> None:
        checked.set()
        answer.wait(PATIENCE)

    watched = Wait(check)
    watch = DeadlockWatch(lambda: watched, None)
    try:
        assert checked.wait(PATIENCE)
        watch.end()
        assert watched.seen[-1] == "take down"
    finally:
        answer.set()


def test_a_slow_preparation_posts_nothing_after_the_wait_has_ended() -> None:
    answer, asked, watched = threading.Event(), threading.Event(), Wait()

    def prepare() -> Wait:
        asked.set()
        answer.wait(PATIENCE)
        return watched

    before = set(threading.enumerate())
    watch = DeadlockWatch(prepare, None)
    assert asked.wait(PATIENCE)
    watch.end()
    answer.set()
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert watched.seen == []


def test_a_wait_whose_end_was_missed_is_taken_down_when_it_times_out() -> None:
    """If Ctrl-C comes at a bad moment, `end` is never called."""
    watched = Wait()
    DeadlockWatch(lambda: watched, 0.1)
    wait_until(lambda: watched.seen[-1:] == ["take down"])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.parametrize("forks", [True, False])
def test_a_fork_waits_for_a_running_check_if_no_exec_follows(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "POLL", PATIENCE)
    begun, answer = threading.Event(), threading.Event()
    ended: list[int] = []

    def check() -> None:
        begun.set()
        answer.wait(PATIENCE)
        ended.append(1)

    watch = DeadlockWatch(lambda: Wait(check), None, forks=forks)
    try:
        assert begun.wait(PATIENCE)
        if forks:
            threading.Timer(0.05, answer.set).start()
        with Workers() as workers:
            workers.start(lambda line: None).wait()
            assert bool(ended) is forks
    finally:
        answer.set()
        watch.end()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_hanging_check_delays_a_fork_only_briefly() -> None:
    begun, answer = threading.Event(), threading.Event()

    def check() -> None:
        begun.set()
        answer.wait(PATIENCE)

    watch = DeadlockWatch(lambda: Wait(check), None)
    try:
        assert begun.wait(PATIENCE)
        with Workers() as workers:
            assert workers.start(lambda line: None).wait() == 0
    finally:
        answer.set()
        watch.end()


def test_no_further_check_starts_while_the_maximum_number_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_CHECKS", 1)
    begun, answer, later = threading.Event(), threading.Event(), Wait()

    def check() -> None:
        begun.set()
        answer.wait(PATIENCE)

    first = DeadlockWatch(lambda: Wait(check), None)
    second = None
    try:
        assert begun.wait(PATIENCE)
        second = DeadlockWatch(lambda: later, None)
        time.sleep(0.1)
        assert later.seen == []
        answer.set()
        wait_until(lambda: "check" in later.seen)
    finally:
        answer.set()
        first.end()
        if second is not None:
            second.end()


def test_a_wait_is_not_checked_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    watch = DeadlockWatch(Wait, None)
    watch.end()
    assert watch.found is None


def test_checks_become_less_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_CHECK", 0.001)
    monkeypatch.setattr(queue, "LAST_CHECK", 0.05)
    watched, began = Wait(), time.monotonic()
    watch = DeadlockWatch(lambda: watched, None)
    time.sleep(0.4)
    watch.end()
    assert watched.seen.count("check") <= 7 + (time.monotonic() - began) / queue.LAST_CHECK
