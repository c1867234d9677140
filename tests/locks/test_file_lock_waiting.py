"""A wait for a file lock ends on time despite any signals, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import LockTimeout
from holdfast.locks import flock_wait, kernel_locks
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.flock_wait import LockWait
from tests.locks.lock_watch import (
    Caller,
    descriptors_of,
    flocked,
    holding,
    is_free,
    linux_only,
    obey,
    open_files,
    others_get,
    own_threads,
    start_holding,
    wait_until_no_thread_is_left,
    wait_until_waiting,
    waiting_for,
)
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs POSIX forks and signals", allow_module_level=True)

LATE = PATIENCE / 2
"""No wait of a fraction of a second may take this long, however busy the machine is."""


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


def time_out(path: Path, timeout: float) -> float:
    """Wait for the lock until the timeout; returns the elapsed seconds."""
    started = time.monotonic()
    with pytest.raises(LockTimeout):
        FileLocker(timeout).lock_exclusive(path)
    return time.monotonic() - started


def candidates() -> list[int]:
    """The signals that Holdfast may use to interrupt a wait."""
    found: list[int] = [signal.SIGURG]
    if sys.platform == "linux":
        found += [signal.SIGRTMAX - offset for offset in range(1, 9)]
    return found


# --- Signals during a wait ----------------------------------------------------------------------------


def under_a_storm(line: Line, task: Callable[[], object]) -> None:
    """In a worker: run the task while a signal arrives every millisecond; report its result and the signal count."""
    arrived = 0

    def count(*_: object) -> None:
        nonlocal arrived
        arrived += 1

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    result = task()
    signal.setitimer(signal.ITIMER_REAL, 0)
    line.say((result, arrived))


@pytest.mark.req("FL-01")
def test_a_wait_under_a_storm_of_signals_still_ends_at_its_timeout(path: Path, workers: Workers) -> None:
    with flocked(path):
        worker = workers.start(lambda line: under_a_storm(line, lambda: time_out(path, 0.3)))
        waited, arrived = worker.hear()

    assert 0.3 <= waited < LATE
    assert arrived > 20


@linux_only
@pytest.mark.req("FL-01")
@pytest.mark.parametrize("timeout", [PATIENCE, None], ids=["with a deadline", "without"])
def test_a_wait_under_a_storm_of_signals_still_gets_the_lock(
    timeout: float | None, path: Path, workers: Workers
) -> None:
    def wait_for_it() -> bool:
        return FileLocker(timeout).lock_exclusive(path).held

    with flocked(path):
        worker = workers.start(lambda line: under_a_storm(line, wait_for_it))
        wait_until_waiting(path)
        end = time.monotonic() + 0.05
        wait_until(lambda: time.monotonic() > end)
    held, arrived = worker.hear()

    assert held
    assert arrived > 5


@linux_only
@pytest.mark.parametrize("timeout", [PATIENCE, None], ids=["with a deadline", "without"])
@pytest.mark.parametrize("fair", [False, True], ids=["unfair", "fair"])
def test_ctrl_c_ends_the_wait_and_leaves_no_lock_no_thread_and_no_descriptor(
    timeout: float | None, fair: bool, path: Path, workers: Workers
) -> None:
    def wait_until_interrupted(line: Line) -> None:
        locker = FileLocker(timeout, fair=fair)
        before = open_files().keys()
        try:
            locker.lock_exclusive(path)
        except KeyboardInterrupt:
            line.say("interrupted")
        locker.close()
        wait_until_no_thread_is_left()
        line.say((open_files().keys() - before, descriptors_of(path), locker.statistics()[:4]))
        line.wait()

    holder = start_holding(workers, path)
    waiter = workers.start(wait_until_interrupted)
    wait_until_waiting(path)

    os.kill(waiter.pid, signal.SIGINT)

    assert waiter.hear() == "interrupted"
    assert waiter.hear() == (set(), [], (0, 1, 0, 0))
    assert waiting_for(path) == []
    holder.ask("go on")
    assert holding(path) == []
    assert others_get(workers, path)


@linux_only
def test_an_exception_from_a_signal_handler_at_any_moment_leaves_no_lock_and_no_wait(
    scratch: Path, workers: Workers
) -> None:
    """Like Ctrl-C at a thousand other points, such as just after a grant and during a release."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    def wait_and_be_interrupted(line: Line) -> None:
        signal.signal(signal.SIGALRM, interrupt)
        threading.excepthook = lambda _: None  # a thread whose start is interrupted may die with a traceback
        sys.unraisablehook = lambda _: None
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        locker, interrupted = FileLocker(0.001), 0
        for turn in range(2000):
            name = scratch / ("taken.lock" if turn % 2 else "free.lock")
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.001))
                try:
                    with locker.lock_exclusive(name):
                        pass
                except LockTimeout:
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        locker.close()
        line.say((interrupted, time_out(scratch / "taken.lock", 0.01)))
        wait_until_no_thread_is_left()
        line.say("no thread is left")
        line.wait()

    with flocked(scratch / "taken.lock"):
        worker = workers.start(wait_and_be_interrupted)
        interrupted, waited = worker.hear()
        assert interrupted > 100
        assert 0.01 <= waited < LATE, "later deadlines must still hold"
        assert worker.hear() == "no thread is left"
        assert is_free(scratch / "free.lock"), "the lock must be free while the process is still alive"


@linux_only
def test_a_signal_handler_that_resets_errno_is_not_mistaken_for_a_grant(path: Path, workers: Workers) -> None:
    def wait_and_reset(line: Line) -> None:
        def reset(*_: object) -> None:
            line.say("handled")
            ctypes.set_errno(0)

        signal.signal(signal.SIGALRM, reset)
        with FileLocker(PATIENCE).lock_exclusive(path):
            line.say("held")

    with flocked(path):
        worker = workers.start(wait_and_reset)
        wait_until_waiting(path)
        os.kill(worker.pid, signal.SIGALRM)
        assert worker.hear() == "handled"
        wait_until(lambda: waiting_for(path) or worker.line.has_news())
        assert not worker.line.has_news(), "the waiter believes that it holds the lock that is held here"
    assert worker.hear() == "held"


# --- The signal that ends a wait ----------------------------------------------------------------------


def test_a_wait_in_a_thread_times_out_and_installs_no_python_handler(path: Path, workers: Workers) -> None:
    def wait_in_a_thread(line: Line) -> None:
        waiting = Caller(lambda: time_out(path, 0.05))
        line.say((signal.getsignal(signal.SIGURG) == signal.SIG_DFL, waiting.result()))

    with flocked(path):
        untouched, waited = workers.start(wait_in_a_thread).hear()
    assert untouched
    assert 0.05 <= waited < LATE


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_program_that_uses_the_signal_itself_keeps_it_and_the_wait_uses_another(
    thread: str, path: Path, workers: Workers
) -> None:
    def use_the_signal(line: Line) -> None:
        arrived = []
        readable, writable = os.pipe()

        def handle(*_: object) -> None:
            arrived.append("urgent")
            os.write(writable, b"!")

        signal.signal(signal.SIGURG, handle)
        waited = time_out(path, 0.05) if thread == "main" else Caller(lambda: time_out(path, 0.05)).result()
        line.say((waited, arrived[:], signal.getsignal(signal.SIGURG) is handle))
        # The program's handler was installed without SA_RESTART. With it, the kernel would restart the read and
        # the Python handler would never run.
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGURG)).start()
        line.say((os.read(readable, 1), arrived))

    with flocked(path):
        worker = workers.start(use_the_signal)
        waited, arrived, is_unchanged = worker.hear()

    assert 0.05 <= waited < LATE
    assert arrived == []
    assert is_unchanged
    assert worker.hear() == (b"!", ["urgent"])


@pytest.mark.parametrize("disposition", ["handled", "ignored"])
@pytest.mark.req("FL-01")
def test_a_wait_polls_in_a_program_that_uses_every_signal(disposition: str, path: Path, workers: Workers) -> None:
    def use_every_signal(line: Line) -> None:
        arrived: list[int] = []
        for number in candidates():
            signal.signal(number, (lambda got, _: arrived.append(got)) if disposition == "handled" else signal.SIG_IGN)
        waited = time_out(path, 0.05)
        line.say((waited, arrived, own_threads()))
        with FileLocker(PATIENCE).lock_exclusive(path):
            line.say("held")

    with flocked(path):
        worker = workers.start(use_every_signal)
        waited, arrived, threads = worker.hear()

    assert 0.05 <= waited < LATE
    assert arrived == []
    assert threads == []
    assert worker.hear() == "held"


@pytest.mark.parametrize("blocked", ["SIGURG", "every signal"])
def test_a_thread_that_blocks_the_signal_still_times_out_and_still_blocks_it_afterwards(
    blocked: str, path: Path, workers: Workers
) -> None:
    def wait_with_the_signal_blocked(line: Line) -> None:
        mask = {signal.SIGURG} if blocked == "SIGURG" else signal.valid_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, mask)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        waited = time_out(path, 0.05)
        line.say((waited, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, signal.sigpending()))

    with flocked(path):
        waited, is_blocked_again, pending = workers.start(wait_with_the_signal_blocked).hear()

    assert 0.05 <= waited < LATE
    assert is_blocked_again
    assert pending == set()


@linux_only
@pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_a_program_that_resets_the_signal_during_the_wait_does_not_prolong_it(
    disposition: signal.Handlers, path: Path, workers: Workers
) -> None:
    def reset_the_signal(line: Line) -> None:
        waiting = Caller(lambda: time_out(path, 0.3))
        wait_until(lambda: waiting_for(path) or not waiting.is_alive())
        signal.signal(signal.SIGURG, disposition)
        line.say(waiting.result())

    with flocked(path):
        assert 0.3 <= workers.start(reset_the_signal).hear() < LATE


def test_a_wait_polls_if_no_thread_can_start_and_later_waits_are_watched_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    wait_until_no_thread_is_left()
    with flocked(path):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert 0.02 <= time_out(path, 0.02) < LATE
        long = Caller(lambda: FileLocker(PATIENCE).lock_exclusive(path))
        wait_until(lambda: own_threads() == ["holdfast-deadlines"])
        assert 0.02 <= time_out(path, 0.02) < LATE
    assert long.guard().held


# --- Deadlines ----------------------------------------------------------------------------------------


def test_one_thread_watches_all_deadlines_and_ends_after_the_last(scratch: Path) -> None:
    with flocked(scratch / "a.lock"), flocked(scratch / "b.lock"):
        waits = [Caller(lambda: time_out(scratch / "a.lock", 0.1)) for _ in range(10)]
        waits += [Caller(lambda: time_out(scratch / "b.lock", 0.1)) for _ in range(10)]
        assert len(own_threads()) <= 1
        for each in waits:
            each.result()

    wait_until_no_thread_is_left()
    assert flock_wait._watcher._waits == set()


def test_a_short_wait_ends_before_a_long_one_that_began_earlier(path: Path) -> None:
    with flocked(path):
        long = Caller(lambda: FileLocker(PATIENCE).lock_exclusive(path))
        if sys.platform == "linux":
            wait_until_waiting(path)
        assert 0.02 <= time_out(path, 0.02) < LATE
        assert long.is_alive()
    assert long.guard().held


@linux_only
def test_a_wait_without_a_timeout_can_be_cancelled_by_another_thread(path: Path) -> None:
    wait = LockWait(None, cancellable=True)
    locker = FileLocker(None)
    with flocked(path):
        waiter = Caller(lambda: locker.acquire(path, shared=False, wait=wait))
        wait_until_waiting(path)

        wait.cancel()

        with pytest.raises(LockTimeout):
            waiter.result()
        assert waiting_for(path) == []
    assert locker.statistics()[:4] == (0, 1, 0, 0)


@linux_only
def test_a_wait_that_is_cancelled_before_it_begins_does_not_begin(path: Path) -> None:
    wait = LockWait(None, cancellable=True)
    wait.cancel()

    with flocked(path), pytest.raises(LockTimeout):
        FileLocker(None).acquire(path, shared=False, wait=wait)


@linux_only
def test_cancelling_at_any_moment_ends_the_wait(path: Path) -> None:
    with flocked(path):
        for turn in range(200):
            wait = LockWait(None, cancellable=True)
            waiter = Caller(partial(FileLocker(None).acquire, path, shared=False, wait=wait))
            for _ in range(turn * 20):
                pass
            wait.cancel()
            with pytest.raises(LockTimeout):
                waiter.result()
    assert is_free(path)


def test_on_a_network_file_system_the_lock_is_polled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_locks, "filesystem_kind", lambda _: "nfs4")
    monkeypatch.setattr(LockWait, "_acquire_in_kernel", lambda *_: pytest.fail("must not wait in the kernel"))

    with flocked(path):
        assert 0.05 <= time_out(path, 0.05) < LATE
        waiter = Caller(lambda: FileLocker(PATIENCE).lock_exclusive(path))
        assert waiter.is_alive()
    assert waiter.guard().held


@linux_only
@pytest.mark.req("FL-02")
def test_abandoned_waits_leave_no_thread_no_descriptor_and_no_surprise_grant(path: Path, workers: Workers) -> None:
    before = open_files().keys()
    holder, third = workers.start(obey(path)), workers.start(obey(path))
    lines = open_files().keys() - before
    for turn in range(200):
        assert holder.ask(("try", False)) is True
        time_out(path, 0.0002 * (turn % 5))
        wait = LockWait(None, cancellable=True)
        abandoned = Caller(partial(FileLocker(None).acquire, path, shared=False, wait=wait))
        wait.cancel()
        with pytest.raises(LockTimeout):
            abandoned.result()

        assert holder.ask("release") == "released"

        assert third.ask(("try", False)) is True, "a waiter that had given up got the lock"
        assert third.ask("release") == "released"
    wait_until_no_thread_is_left()
    assert open_files().keys() == before | lines
