"""Fair file locks: every waiter is served before anyone is served again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.locks.file_lock import FileLocker
from tests.locks.lock_watch import (
    Pair,
    hold,
    linux_only,
    obey,
    pairs,
    start_holding,
    wait_until_waiting,
    waiting_for,
)
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


def overtakes(path: Path, workers: Workers, *, fair: bool, rounds: int) -> int:
    """How often a process that releases the lock gets it again before the process that waits for it."""
    waiter = workers.start(take_and_log(path, fair=fair))
    locker = FileLocker(PATIENCE, fair=fair)
    log = path.with_suffix(".log")
    overtaken = 0
    for turn in range(1, rounds + 1):
        guard = locker.lock_exclusive(path)
        waiter.say("go on")
        wait_until_waiting(path)
        guard.release()
        guard = locker.lock_exclusive(path)
        overtaken += log.stat().st_size < turn
        guard.release()
        assert waiter.hear() == "done"
    return overtaken


def take_and_log(path: Path, *, fair: bool) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        locker = FileLocker(PATIENCE, fair=fair)
        while True:
            line.wait()
            with locker.lock_exclusive(path):
                os.write(log, b".")
            line.say("done")

    return task


@linux_only
def test_a_fair_lock_goes_to_the_waiter_before_its_last_holder_gets_it_again(path: Path, workers: Workers) -> None:
    path.with_suffix(".log").touch()
    assert overtakes(path, workers, fair=True, rounds=200) == 0


@linux_only
def test_overtaking_is_found_with_an_unfair_lock(path: Path, workers: Workers) -> None:
    path.with_suffix(".log").touch()
    assert overtakes(path, workers, fair=False, rounds=200) > 0


@pairs
def test_a_fair_lock_excludes_like_any_other(pair: Pair, path: Path, workers: Workers) -> None:
    holder, other = workers.start(obey(path, fair=True)), workers.start(obey(path, fair=True))
    assert holder.ask(("lock", pair.held == "shared", 0))

    assert other.ask(("try", pair.wanted == "shared")) is pair.granted
    assert other.ask(("lock", pair.wanted == "shared", 0.01)) is pair.granted


@linux_only
def test_trying_a_fair_lock_does_not_overtake_the_waiters(path: Path, workers: Workers) -> None:
    start_holding(workers, path, shared=True, fair=True)
    workers.start(hold(path, fair=True))
    wait_until_waiting(path)

    assert FileLocker(0, fair=True).try_lock_shared(path) is None
    assert FileLocker(0).try_lock_shared(path) is not None, "an unfair try overtakes them"


@linux_only
def test_a_fair_waiter_that_times_out_lets_the_next_one_proceed(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path, fair=True)
    queue = path.with_name(path.name + ".queue")
    first = workers.start(obey(path, fair=True))
    first.say(("lock", False, 0.3))
    wait_until(lambda: waiting_for(path) or first.line.has_news())
    second = workers.start(hold(path, fair=True))
    wait_until(lambda: waiting_for(queue) or waiting_for(path) == [second.pid])

    assert first.hear() is False

    wait_until(lambda: waiting_for(path) == [second.pid])
    holder.say("go on")
    assert second.hear() == "held"


@linux_only
def test_a_fair_waiter_that_is_killed_lets_the_next_one_proceed(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path, fair=True)
    first = workers.start(hold(path, fair=True))
    wait_until_waiting(path)
    second = workers.start(hold(path, fair=True))
    wait_until_waiting(path.with_name(path.name + ".queue"))

    first.kill()

    wait_until(lambda: waiting_for(path) == [second.pid])
    holder.say("go on")
    assert second.hear() == "held"
