"""Waits in a queue, with deadlock checks; shared by all kinds of leases, claims and locks.

The rules of each kind choose the next waiter in their transactions. This module only waits until then: changes wake a
waiter, and the wait ends when it is served, at its time limit, by cancellation, or in a deadlock. Reading the wait
graph may take long, for example if a server does not answer. So it happens in a thread, and does not delay the waiter.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from holdfast.clock import Clock, format_duration
from holdfast.errors import Deadlock, Failure, LockTimeout
from holdfast.locks import flock as _descriptors  # noqa: F401 - registers its fork hooks before ours
from holdfast.store.layout import document_locks_until

if TYPE_CHECKING:
    from holdfast.store.model import Watch

POLL = 0.1  # the longest pause of a wait that can be cancelled or is being checked; how long a fork waits for checks
FIRST_CHECK, LAST_CHECK = 0.02, 5.0
"""When a wait is first checked for a deadlock, and the longest time between checks. Each interval is twice the last:
a short wait costs nothing, and of two waits that began together, the one that must give up soon learns it, even if it
could not see the other at first."""
MOST_CHECKS = 8  # how many threads of a process check at once
THREAD_NAME = "holdfast-deadlock"

Got = TypeVar("Got")


class NotYet(NamedTuple):
    """The answer while another participant holds the resource or comes first: ask again after `pause` seconds, or after
    a change. `holders` has the form that `LockTimeout` takes."""

    pause: float
    holders: list[dict[str, Any]]


class QueueWait(NamedTuple):
    """The subject of a wait and its time limit (None: no limit); setting `cancelled` ends the wait. `began` is the
    start of the wait, by the monotonic clock."""

    what: str
    wait: float | None
    cancelled: threading.Event | None
    clock: Clock
    began: float

    def left(self) -> float:
        return math.inf if self.wait is None else self.began + self.wait - self.clock.monotonic()


def wait_in_queue(
    wait: QueueWait, ask: Callable[[], Got | NotYet], watch: Watch, check_deadlock: Callable[[], None]
) -> Got:
    """Ask until the answer is not `NotYet`. The watch must begin before this call. Raises `LockTimeout` when the time
    is up or the wait is cancelled, and any failure of `check_deadlock`."""
    with _QueueChecks(check_deadlock, wait.cancelled) as checks:
        while True:
            answer = ask_in_time(ask, wait.left())
            if not isinstance(answer, NotYet | LockTimeout):
                return answer
            left = wait.left()
            if left <= 0 or (wait.cancelled is not None and wait.cancelled.is_set()):
                waited, stuck = wait.wait or 0.0, answer if isinstance(answer, LockTimeout) else None
                what = wait.what if stuck is None else f"{wait.what}, at {stuck.path},"
                raise LockTimeout(what, waited, format_duration(waited), holders=answer.holders) from stuck
            pause = answer.pause if isinstance(answer, NotYet) else POLL
            checks.wait(watch, max(0.002, min(pause, left)))


def ask_in_time(ask: Callable[[], Got], left: float) -> Got | LockTimeout:
    """The answer, or the failure of a transaction that could not get its document locks within the time `left` (a
    process that has one may be stopped)."""
    try:
        with document_locks_until(None if left == math.inf else time.monotonic() + left):
            return ask()
    except LockTimeout as stuck:
        return stuck


def leave_in_time(leave: Callable[[], object], reason: BaseException) -> None:
    """Leave a queue after a failed wait. Do not wait for a document lock that made it fail: a ticket that is left
    behind counts only until its process ends, or its heartbeat is overdue."""
    ends_at = time.monotonic() if isinstance(reason.__cause__, LockTimeout) else None
    with contextlib.suppress(Failure), document_locks_until(ends_at):
        leave()


class _QueueChecks:
    """Waits for changes, and checks for deadlocks from time to time."""

    def __init__(self, check_deadlock: Callable[[], None], cancelled: threading.Event | None) -> None:
        self._check_deadlock = check_deadlock
        self._cancelled = cancelled
        self._interval = FIRST_CHECK
        self._next = time.monotonic() + FIRST_CHECK
        self._thread: threading.Thread | None = None
        self._found: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """Leave no thread behind, unless it hangs: the next fork could happen in the middle of its check."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(POLL)

    def wait(self, watch: Watch, pause: float) -> None:
        """Wait for a change for at most `pause` seconds; raise the failure that a check has found."""
        end = time.monotonic() + pause
        while not (self._cancelled is not None and self._cancelled.is_set()):
            self._check()
            now = time.monotonic()
            if now >= end:
                return
            often = self._thread is not None or self._cancelled is not None
            until = min(end, self._next, now + POLL) if often else min(end, self._next)
            if watch.wait(max(0.0, until - now)):
                return

    def _check(self) -> None:
        """Start a check if one is due, and collect its outcome as soon as it is known."""
        if self._thread is None and time.monotonic() >= self._next:
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            try:
                self._thread.start()
                self._thread.join(POLL)  # usually long enough
            except RuntimeError:  # no thread can be started
                self._run()
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._interval = min(2 * self._interval, LAST_CHECK)
            self._next = time.monotonic() + self._interval
            if self._found is not None:
                raise self._found
        elif self._thread is not None:
            self._next = time.monotonic() + POLL

    def _run(self) -> None:
        try:
            self._check_deadlock()
        except BaseException as found:  # raised in the waiter's own thread
            self._found = found


class ObservedWait(Protocol):
    """A wait that others see from `post` to `take_down`; `check` raises `Deadlock` if it must give up."""

    def post(self) -> None: ...

    def take_down(self) -> None: ...

    def check(self) -> None: ...


class DeadlockWatch:
    """Posts a wait that blocks elsewhere (in the kernel) for longer than `FIRST_CHECK`, and checks it for a deadlock
    from time to time. If a check ends the wait by `cancel`, `found` is the reason; a check that fails ends nothing."""

    def __init__(
        self,
        prepare: Callable[[], ObservedWait],
        timeout: float | None,
        cancel: Callable[[], None] = lambda: None,
        *,
        forks: bool = True,
    ) -> None:
        """`prepare` is called for the first check; the wait lasts at most `timeout`. `forks` says whether this process
        may fork without an exec: see `_let_checks_end`."""
        self.found: BaseException | None = None
        self._prepare = prepare
        self._cancel = cancel
        self._forks = forks
        self._ends_at = math.inf if timeout is None else time.monotonic() + timeout
        self._wait: ObservedWait | None = None
        self._posting = threading.Lock()
        self._over = threading.Event()
        if timeout is None or timeout > FIRST_CHECK:
            _register_fork_hooks()
            try:
                threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()
            except RuntimeError:  # no thread can be started: the wait is not checked
                self._over.set()

    def end(self) -> None:
        """End the observation: the wait is over."""
        self._over.set()
        self._take_down()

    def _run(self) -> None:
        if sys.platform != "win32":
            import signal

            # Leave signals to the waiter.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        interval = FIRST_CHECK
        # The waiter's thread ends the wait when the time is up, unless Ctrl-C interrupts that.
        while not self._over.wait(interval) and time.monotonic() <= self._ends_at:
            interval = min(2 * interval, LAST_CHECK)
            try:
                self._check_unless_many_hang()
            except BaseException as found:  # raised in the waiter's own thread
                if isinstance(found, (Failure, OSError)) and not isinstance(found, Deadlock):
                    continue  # such as a current directory that is gone
                self.found = found
                self._cancel()
                return
        self._take_down()

    def _check_unless_many_hang(self) -> None:
        """Skip the check if many others hang, for example because a server does not answer: one more would not help."""
        if len(_running) < MOST_CHECKS:
            over = threading.Event()
            _running[over] = self._forks
            try:
                self._check()
            finally:
                _running.pop(over, None)
                over.set()

    def _check(self) -> None:
        wait = self._wait or self._prepare()
        with self._posting:
            if self._over.is_set():
                return
            if self._wait is None:
                wait.post()
                self._wait = wait
        wait.check()

    def _take_down(self) -> None:
        with self._posting:
            if self._wait is not None:
                self._wait.take_down()


_running: dict[threading.Event, bool] = {}
"""Maps the event that ends each running check to whether a fork waits for the check."""


def _let_checks_end() -> None:
    """Before a fork, wait for running checks, but not for checks that hang. A child forked in the middle of a check,
    without an exec, might wait forever for a lock of that check."""
    end = time.monotonic() + POLL
    for over, forks in list(_running.items()):
        if forks:
            over.wait(max(0.0, end - time.monotonic()))


@cache
def _register_fork_hooks() -> None:
    """Called with the first watch, so a command that never waits forks without hooks. Hooks run from last to first, so
    those of `flock`, which keep checks from opening files and so from ending, run after these."""
    if sys.platform != "win32":
        os.register_at_fork(before=_let_checks_end, after_in_child=_running.clear)


async def wait_in_thread(wait_for_it: Callable[[threading.Event], Got], give_back: Callable[[Got], object]) -> Got:
    """Run `wait_for_it` in a thread; it must end soon after the event that it receives is set. Cancelling the coroutine
    sets the event, and `give_back` gets a result that arrives too late."""
    import asyncio  # slow to load, and commands do not need it

    cancelled = threading.Event()

    def wait() -> Got:
        got = wait_for_it(cancelled)
        if cancelled.is_set():
            give_back(got)
        return got

    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        cancelled.set()
        if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
            await asyncio.to_thread(give_back, waiting.result())  # it arrived during the cancellation
        raise
