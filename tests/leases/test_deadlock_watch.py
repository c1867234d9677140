"""While one waits another one looks: soon, seldom in the end, and never in the way."""

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
    """A wait that is looked at; `look` is what such a check comes to."""

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


def test_a_wait_that_is_over_at_once_leaves_no_trace() -> None:
    watched = Wait()
    DeadlockWatch(lambda: watched, None).end()
    assert watched.seen == []


@pytest.mark.parametrize("timeout", [0.0, queue.FIRST_CHECK])
def test_who_will_not_wait_for_long_needs_no_one_to_check(timeout: float) -> None:
    before = threading.active_count()
    DeadlockWatch(Wait, timeout)
    assert threading.active_count() == before


def test_a_wait_is_posted_once_looked_at_again_and_again_and_taken_down() -> None:
    watched = Wait()
    looking = DeadlockWatch(lambda: watched, None)
    wait_until(lambda: watched.seen.count("check") == 3)
    looking.end()
    assert looking.found is None
    assert watched.seen[:2] == ["post", "check"]
    assert watched.seen.count("post") == 1
    assert set(watched.seen[watched.seen.index("take down") :]) == {"take down"}


@pytest.mark.parametrize("problem", [Deadlock("in vain"), KeyError("a mistake")])
def test_what_is_found_is_told(problem: BaseException) -> None:
    told = threading.Event()
    looking = DeadlockWatch(lambda: Wait(raising(problem)), None, told.set)
    assert told.wait(PATIENCE)
    looking.end()
    assert looking.found is problem


@pytest.mark.parametrize(
    "problem", [StoreUnavailable("elsewhere", "it is away"), FileNotFoundError("the current directory")]
)
def test_what_cannot_be_seen_ends_nothing(problem: Exception) -> None:
    watched = Wait(raising(problem))
    looking = DeadlockWatch(lambda: watched, None)
    wait_until(lambda: watched.seen.count("check") == 2)
    looking.end()
    assert looking.found is None


def test_what_cannot_be_prepared_is_tried_again() -> None:
    tried: list[int] = []

    def prepare() -> Wait:
        tried.append(1)
        raise StoreUnavailable("elsewhere", "it is away")

    looking = DeadlockWatch(prepare, None)
    wait_until(lambda: len(tried) == 2)
    looking.end()


def test_a_look_that_hangs_holds_up_nobody_and_is_not_seen_afterwards() -> None:
    answer, looked = threading.Event(), threading.Event()

    def check() -> None:
        looked.set()
        answer.wait(PATIENCE)

    watched = Wait(check)
    looking = DeadlockWatch(lambda: watched, None)
    try:
        assert looked.wait(PATIENCE)
        looking.end()
        assert watched.seen[-1] == "take down"
    finally:
        answer.set()


def test_who_prepares_for_too_long_does_not_post_afterwards() -> None:
    answer, asked, watched = threading.Event(), threading.Event(), Wait()

    def prepare() -> Wait:
        asked.set()
        answer.wait(PATIENCE)
        return watched

    looking = DeadlockWatch(prepare, None)
    assert asked.wait(PATIENCE)
    looking.end()
    answer.set()
    wait_until(lambda: not any(each.name == "holdfast-deadlock" for each in threading.enumerate()))
    assert watched.seen == []


def test_a_wait_whose_end_was_missed_is_taken_down_when_its_time_is_up() -> None:
    """Ctrl-C at a bad moment: `end` is never called."""
    watched = Wait()
    DeadlockWatch(lambda: watched, 0.1)
    wait_until(lambda: watched.seen[-1:] == ["take down"])


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.parametrize("forks", [True, False])
def test_a_fork_waits_for_the_end_of_a_look_if_the_child_goes_on_with_it(
    forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "POLL", PATIENCE)
    begun, answer = threading.Event(), threading.Event()
    ended: list[int] = []

    def check() -> None:
        begun.set()
        answer.wait(PATIENCE)
        ended.append(1)

    looking = DeadlockWatch(lambda: Wait(check), None, forks=forks)
    try:
        assert begun.wait(PATIENCE)
        if forks:
            threading.Timer(0.05, answer.set).start()
        with Workers() as workers:
            workers.start(lambda line: None).wait()
            assert bool(ended) is forks
    finally:
        answer.set()
        looking.end()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_look_that_hangs_holds_up_a_fork_for_a_moment_only() -> None:
    begun, answer = threading.Event(), threading.Event()

    def check() -> None:
        begun.set()
        answer.wait(PATIENCE)

    looking = DeadlockWatch(lambda: Wait(check), None)
    try:
        assert begun.wait(PATIENCE)
        with Workers() as workers:
            assert workers.start(lambda line: None).wait() == 0
    finally:
        answer.set()
        looking.end()


def test_where_looks_hang_no_more_of_them_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_where_no_thread_can_be_had_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    looking = DeadlockWatch(Wait, None)
    looking.end()
    assert looking.found is None


def test_looks_are_first_close_and_then_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_CHECK", 0.001)
    monkeypatch.setattr(queue, "LAST_CHECK", 0.05)
    watched = Wait()
    looking = DeadlockWatch(lambda: watched, None)
    time.sleep(0.4)
    looking.end()
    assert watched.seen.count("check") <= 14
