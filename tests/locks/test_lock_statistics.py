"""The statistics of a locker: grants, waits, and times waited and held, exact under many threads."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import LockReentry, LockTimeout
from holdfast.locks.file_lock import FileLocker
from tests.locks.lock_watch import Caller, flocked, start_holding, wait_until_waiting
from tests.locks.workers import PATIENCE, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


def test_the_statistics_of_a_new_locker_are_all_zero() -> None:
    assert set(FileLocker().statistics()) == {0}


def test_statistics_count_acquired_and_held_locks(scratch: Path) -> None:
    locker = FileLocker(0)
    first = locker.lock_exclusive(scratch / "a.lock")
    second = locker.try_lock_shared(scratch / "b.lock")
    assert second is not None
    assert locker.statistics()[:4] == (2, 0, 0, 2)

    first.release()

    assert locker.statistics()[:4] == (2, 0, 0, 1)
    assert locker.statistics().seconds_held > 0


def test_a_refused_try_is_not_counted(path: Path) -> None:
    locker = FileLocker(0)

    with flocked(path):
        assert locker.try_lock_exclusive(path) is None

    assert set(locker.statistics()) == {0}


def test_time_held_runs_from_the_grant_to_the_release(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("holdfast.locks.file_lock.monotonic", lambda: now)
    locker = FileLocker(0)

    for seconds in (2.0, 3.5):
        with locker.lock_exclusive(path):
            now += seconds
    locker.close()

    assert locker.statistics().seconds_held == 5.5
    assert locker.statistics().acquired == 2, "closed files still count"


def test_a_wait_is_counted_with_its_duration(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)
    locker = FileLocker(PATIENCE)
    started = time.monotonic()
    waiter = Caller(lambda: locker.lock_exclusive(path))
    wait_until_waiting(path)
    least = time.monotonic()
    wait_until(lambda: time.monotonic() > least + 0.05)

    holder.say("go on")
    waiter.guard()

    seen = locker.statistics()
    assert (seen.acquired, seen.contended, seen.timed_out) == (1, 1, 0)
    assert 0.05 <= seen.seconds_waited <= time.monotonic() - started
    assert seen.longest_wait == seen.seconds_waited


def test_the_longest_wait_is_recorded(path: Path) -> None:
    locker = FileLocker(0.05)
    with flocked(path):
        for timeout in (0.001, 0.05, 0.002):
            locker.timeout = timeout
            with pytest.raises(LockTimeout):
                locker.lock_exclusive(path)

    seen = locker.statistics()
    assert (seen.acquired, seen.contended, seen.timed_out) == (0, 3, 3)
    assert 0.05 <= seen.longest_wait <= seen.seconds_waited - 0.003


def test_a_refused_reentry_is_contention_but_not_a_timeout(path: Path) -> None:
    locker = FileLocker(PATIENCE)
    with locker.lock_exclusive(path), pytest.raises(LockReentry):
        locker.lock_exclusive(path)

    assert locker.statistics()[1:3] == (1, 0)


def test_statistics_are_exact_when_eight_threads_use_one_locker(scratch: Path) -> None:
    locker = FileLocker(PATIENCE)
    impatient = FileLocker(0)
    taken = scratch / "taken.lock"

    def use() -> None:
        for turn in range(200):
            with locker.lock_exclusive(scratch / "common.lock"), locker.lock_shared(scratch / "shared.lock"):
                pass
            locker.lock_exclusive(scratch / f"{turn % 80}-{threading.get_ident()}.lock")  # more than stay open
            with contextlib.suppress(LockTimeout):
                impatient.lock_exclusive(taken)

    with flocked(taken):
        for caller in [Caller(use) for _ in range(8)]:
            caller.result()

    seen = locker.statistics()
    assert (seen.acquired, seen.held_now, seen.timed_out) == (8 * 200 * 3, 0, 0)
    assert seen.contended <= 8 * 200
    assert impatient.statistics()[:4] == (0, 8 * 200, 8 * 200, 0)


def test_statistics_can_be_read_while_other_threads_open_files(scratch: Path) -> None:
    locker = FileLocker(0)
    done = threading.Event()

    def churn(number: int) -> None:
        while not done.is_set():
            locker.lock_exclusive(scratch / f"{number}.lock")
            locker.close()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        churning = [Caller(functools.partial(churn, number)) for number in range(4)]
        for _ in range(500):
            assert 0 <= locker.statistics().held_now <= 4
        done.set()
        for caller in churning:
            caller.result()
    finally:
        done.set()
        sys.setswitchinterval(before)
