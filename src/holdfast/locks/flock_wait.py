"""Waits for a file lock inside the kernel, with a time limit.

The caller's thread blocks in flock(2): it uses no CPU, and the kernel wakes it as soon as the lock is free. flock has
no time limit, so one watcher thread per process keeps the deadlines. At a deadline, it sends the waiting thread a
signal whose only effect is to interrupt the call. The wait ends without leaving a thread, a descriptor, or a lock
without a holder. Another thread can cancel a wait in the same way.

The signal is SIGURG (ignored by default), or a real-time signal if the program uses SIGURG. If no signal is free, on
Windows, and on network filesystems, where the kernel polls anyway, the lock is polled instead.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Protocol

from holdfast.locks import flock

_TICK = 0.1  # the watcher's longest sleep, and so the longest time it outlives the last wait
_REPEAT = 0.001  # a signal that arrives just before the call interrupts nothing, so it is sent again after this time
_POLL_FIRST, _POLL_MOST = 0.001, 0.02


class LockWait:
    """One wait, which ends at its deadline or, if it is `cancellable`, when another thread cancels it."""

    __slots__ = ("_cancellable", "cancelled", "deadline", "due", "thread", "timeout")

    def __init__(self, timeout: float | None, *, cancellable: bool = False) -> None:
        self.timeout = timeout
        self._cancellable = cancellable
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.cancelled = False
        self.thread = 0
        self.due = float("inf")

    def is_over(self) -> bool:
        return self.cancelled or (self.deadline is not None and time.monotonic() >= self.deadline)

    def remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None if there is no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def cancel(self) -> None:
        """End the wait from another thread; its `acquire` returns False soon after."""
        self.cancelled = True
        _watcher.hurry(self)

    def acquire(self, fd: int, *, shared: bool, poll: bool = False) -> bool:
        """Wait for the lock on `fd`; return False, without the lock, if the wait ends first."""
        if sys.platform != "win32" and not poll:
            if self.deadline is None and not self._cancellable:
                flock.lock(fd, shared)
                return True
            number = _interrupting_signal()
            if number is not None:
                return self._acquire_in_kernel(fd, shared, number)
        return self._acquire_by_polling(fd, shared)

    if sys.platform != "win32":

        def _acquire_in_kernel(self, fd: int, shared: bool, number: int) -> bool:
            import signal

            self.due = float("inf") if self.deadline is None else self.deadline
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
                self.thread = threading.get_ident()
                if not _watcher.watch(self):
                    return self._acquire_by_polling(fd, shared)
                while not self.is_over():
                    code = flock.lock_until_signal(fd, shared)
                    if code == 0:
                        return True
                    if code != errno.EINTR:
                        raise OSError(code, os.strerror(code))
                return False
            finally:
                self.thread = 0  # first: a Ctrl-C may interrupt the following calls, but not this
                _watcher.forget(self)
                if number in blocked:
                    signal.pthread_sigmask(signal.SIG_BLOCK, (number,))

    def _acquire_by_polling(self, fd: int, shared: bool) -> bool:
        pause = _POLL_FIRST
        while not flock.try_lock(fd, shared):
            if self.is_over():
                return False
            left = self.remaining()
            time.sleep(pause if left is None else min(pause, left))
            pause = min(pause * 2, _POLL_MOST)
        return True


class Observation(Protocol):
    """Observes one wait. If it cancelled the wait, `found` is the reason."""

    @property
    def found(self) -> BaseException | None: ...

    def end(self) -> None: ...


class Observer(Protocol):
    """Called before a wait for the lock on the file at `path` begins."""

    def __call__(self, path: str, wait: LockWait, *, shared: bool, fair: bool) -> Observation: ...


class _Watcher:
    """Interrupts threads whose wait is over. Its own thread runs only while there are waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # entered directly, not through `_changed`: Ctrl-C cannot leave it locked
        self._changed = threading.Condition(self._lock)
        self._waits: set[LockWait] = set()
        self._runner: threading.Thread | None = None
        self._wakes_at = 0.0

    def watch(self, wait: LockWait) -> bool:
        """Interrupt `wait` when it is due; return False if the watcher thread cannot be started."""
        with self._lock:
            self._waits.add(wait)
            if self._runner is None:
                return self._start()
            if wait.due < self._wakes_at:
                self._changed.notify()
            return True

    def _start(self) -> bool:
        self._wakes_at = 0.0
        self._runner = threading.Thread(target=self._run, name="holdfast-deadlines", daemon=True)
        try:
            self._runner.start()
        except BaseException as error:
            self._runner = None  # a thread that started before a Ctrl-C sees this and ends
            if isinstance(error, RuntimeError):
                return False
            raise
        return True

    def hurry(self, wait: LockWait) -> None:
        with self._lock:
            wait.due = 0.0
            self._changed.notify()

    def forget(self, wait: LockWait) -> None:
        """After this, no signal is sent for `wait`."""
        with self._lock:
            self._waits.discard(wait)

    def _run(self) -> None:
        if sys.platform != "win32":
            import signal

            # Leave signals to the program's own threads.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with self._lock:
            if self._runner is not threading.current_thread():
                return
            try:
                while self._waits:
                    now = time.monotonic()
                    self._wakes_at = min([now + _TICK, *self._interrupt_due(now)])
                    self._changed.wait(max(0.0, self._wakes_at - now))
            finally:
                self._runner = None

    def _interrupt_due(self, now: float) -> list[float]:
        if sys.platform != "win32":
            import signal

            for wait in list(self._waits):
                thread = wait.thread
                if thread == 0:
                    self._waits.discard(wait)  # over; a Ctrl-C prevented `forget`
                elif wait.due <= now:
                    # Choose again: the program may have begun to ignore the signal, which then interrupts nothing.
                    number = _interrupting_signal()
                    signal.pthread_kill(thread, signal.SIGURG if number is None else number)
                    wait.due = now + _REPEAT
        return [wait.due for wait in self._waits]


_watcher = _Watcher()


if sys.platform != "win32":

    def _interrupting_signal() -> int | None:
        """Prepare a signal that interrupts waits, and return its number; None if every candidate is in use. Each wait
        chooses again, because the program may begin to use a signal. A signal with a Python handler is left alone."""
        import signal

        from holdfast.fs import native

        candidates: list[int] = [signal.SIGURG]
        if sys.platform == "linux":
            candidates += [signal.SIGRTMAX - offset for offset in range(1, 9)]
        for number in candidates:
            if signal.getsignal(number) == signal.SIG_DFL and native.set_interrupting_handler(number):
                return number
        return None

    def _new_watcher_after_fork() -> None:
        global _watcher
        _watcher = _Watcher()  # the child has none of the parent's threads, one of which may hold the lock

    os.register_at_fork(after_in_child=_new_watcher_after_fork)
