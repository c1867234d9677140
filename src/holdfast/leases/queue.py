"""Waiting in line, the same for everything that has one: woken by changes, ended by time, by whoever
cancels it, or because it would never end.

Who comes next is decided by the rules of each kind, inside its transactions: higher priorities first,
then in the order of asking. Here is only how the time until then passes.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from holdfast.clock import Clock, format_duration
from holdfast.errors import Deadlock, Failure, LockTimeout
from holdfast.locks import flock as _descriptors  # noqa: F401 - its hooks are registered by now
from holdfast.store.model import Watch

LOOK_UP = 0.1
"""How often one who may be cancelled looks whether it is to give up."""

FIRST_LOOK, LAST_LOOK = 0.02, 5.0
"""How long after it began a wait is first looked at for a circle, and how far these looks are apart in the
end. Each is twice as far from the last one: a wait that is soon over costs none, and of two that came
at the same time, the one that gives up finds out soon, also if the other was not to be seen yet."""

MOST_LOOKS = 8
"""How many threads of a process look at once."""


class Watched(Protocol):
    """A wait as others see it, and what they do to it."""

    def post(self) -> None:
        """Let others see it from now on."""
        ...

    def take_down(self) -> None:
        """Let nobody see it any more; twice is fine."""
        ...

    def look(self) -> None:
        """Raise `Deadlock` if the wait would never end and is the one to give up."""
        ...


class DeadlockWatch:
    """Lets a wait be seen and looks for what would keep it from ever ending, in the rhythm of all who wait.

    A wait of less than `FIRST_LOOK` leaves no trace. What is `found` in the end is why it is in vain; `tell`
    is called then. Failures of a look end nothing: what cannot be seen is not found.
    """

    def __init__(
        self,
        prepare: Callable[[], Watched],
        timeout: float | None,
        tell: Callable[[], None] = lambda: None,
        *,
        forks: bool = True,
    ) -> None:
        """`prepare` is called with the first look; `timeout` is how long the wait lasts at most.

        `forks` is whether this process may fork without executing another program: see `_let_looks_end`.
        """
        self.found: BaseException | None = None
        self._prepare = prepare
        self._tell = tell
        self._forks = forks
        self._ends_at = None if timeout is None else time.monotonic() + timeout
        self._watched: Watched | None = None
        self._posting = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-lookout", daemon=True)
        if timeout is None or timeout > FIRST_LOOK:
            self._begin()

    def end(self) -> None:
        """The wait is over, whatever it has come to: nobody sees it from now on."""
        self._over.set()
        self._take_down()

    def _begin(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be had: nobody looks, and the wait ends as it may
            self._over.set()

    def _run(self) -> None:
        if sys.platform != "win32":
            import signal

            # Signals are for the one who waits: here one would be taken by a bystander.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        apart = FIRST_LOOK
        while not self._over.wait(apart) and not self._is_late():
            apart = min(2 * apart, LAST_LOOK)
            try:
                self._look_if_few_do()
            except Deadlock as found:
                self._say(found)
                return
            except (Failure, OSError):  # such as a current directory that is gone
                continue
            except BaseException as mistake:  # for the one who waits, in its own thread
                self._say(mistake)
                return
        self._take_down()

    def _look_if_few_do(self) -> None:
        """Where looks hang, because a server is away, there is no use in hanging more and more of them."""
        if len(_under_way) < MOST_LOOKS:
            look = _Look(self._forks)
            _under_way.add(look)
            try:
                self._look()
            finally:
                _under_way.discard(look)
                look.over.set()

    def _look(self) -> None:
        watched = self._watched or self._prepare()
        with self._posting:
            if self._over.is_set():
                return
            if self._watched is None:
                watched.post()
                self._watched = watched
        watched.look()

    def _is_late(self) -> bool:
        """Whether the time of the wait is up: its own thread ends it, unless Ctrl-C came at a bad moment."""
        return self._ends_at is not None and time.monotonic() > self._ends_at

    def _take_down(self) -> None:
        with self._posting:
            if self._watched is not None:
                self._watched.take_down()

    def _say(self, found: BaseException) -> None:
        self.found = found
        self._tell()


class _Look:
    """A look that is under way."""

    def __init__(self, forks: bool) -> None:
        self.forks = forks
        self.over = threading.Event()


_under_way: set[_Look] = set()


def _let_looks_end() -> None:
    """Before a fork: a child that is forked in the middle of a look, and does not execute another program,
    may wait for ever for something that the look has locked. One that hangs is not waited for."""
    end = time.monotonic() + LOOK_UP
    for look in list(_under_way):
        if look.forks:
            look.over.wait(max(0.0, end - time.monotonic()))


if sys.platform != "win32":
    # Hooks are run from the last to the first: those of `descriptors` come after this one. They keep looks
    # from opening files, and so from coming to an end.
    os.register_at_fork(before=_let_looks_end, after_in_child=_under_way.clear)


Got = TypeVar("Got")


class NotYet(NamedTuple):
    """Somebody else has it, or comes first: ask again after `pause`, or when something has changed.

    `holders` says who has it, in the form of `LockTimeout`.
    """

    pause: float
    holders: list[dict[str, Any]]


class QueueWait(NamedTuple):
    """What is waited for and how long (None: without limit); who sets `cancelled` ends it at once."""

    what: str
    wait: float | None
    cancelled: threading.Event | None
    clock: Clock


def wait_in_line(
    wish: QueueWait, ask: Callable[[], Got | NotYet], watch: Watch, refuse_circle: Callable[[], None]
) -> Got:
    """What `ask` gives in the end. `LockTimeout` if there was not enough time or it was cancelled;
    `refuse_circle` raises `Deadlock` if waiting is in vain. The watch is older than the first asking."""
    deadline = None if wish.wait is None else wish.clock.monotonic() + wish.wait
    with _Lookout(refuse_circle, wish.cancelled) as lookout:
        while True:
            answer = ask()
            if not isinstance(answer, NotYet):
                return answer
            left = math.inf if deadline is None else deadline - wish.clock.monotonic()
            if left <= 0 or (wish.cancelled is not None and wish.cancelled.is_set()):
                waited = wish.wait or 0.0
                raise LockTimeout(wish.what, waited, format_duration(waited), holders=answer.holders)
            lookout.wait(watch, max(0.002, min(answer.pause, left)))


class _Lookout:
    """Waits for changes, and looks for circles from time to time.

    A look may take long: it reads what others keep elsewhere, perhaps on a server that is away. So it has a
    thread of its own, and does not keep the waiter from being served, or from giving up in time.
    """

    def __init__(self, refuse_circle: Callable[[], None], cancelled: threading.Event | None) -> None:
        self._refuse_circle = refuse_circle
        self._cancelled = cancelled
        self._apart = FIRST_LOOK
        self._next = time.monotonic() + FIRST_LOOK
        self._looking: threading.Thread | None = None
        self._found: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """Leave no thread behind, unless it hangs: who forks next would fork it in the middle of a look."""
        if self._looking is not None and self._looking.ident is not None:
            self._looking.join(LOOK_UP)

    def wait(self, watch: Watch, pause: float) -> None:
        """Wait until something has changed, so long at most; raises what a look has found."""
        end = time.monotonic() + pause
        while not (self._cancelled is not None and self._cancelled.is_set()):
            self._look_around()
            now = time.monotonic()
            if now >= end:
                return
            often = self._looking is not None or self._cancelled is not None
            until = min(end, self._next, now + LOOK_UP) if often else min(end, self._next)
            if watch.wait(max(0.0, until - now)):
                return

    def _look_around(self) -> None:
        """Begin a look if one is due, and see what came of it, as soon as that is known."""
        if self._looking is None and time.monotonic() >= self._next:
            self._looking = threading.Thread(target=self._look, name="holdfast-lookout", daemon=True)
            try:
                self._looking.start()
                self._looking.join(LOOK_UP)  # which is mostly enough
            except RuntimeError:  # no thread can be had
                self._look()
        if self._looking is not None and not self._looking.is_alive():
            self._looking = None
            self._apart = min(2 * self._apart, LAST_LOOK)
            self._next = time.monotonic() + self._apart
            if self._found is not None:
                raise self._found
        elif self._looking is not None:
            self._next = time.monotonic() + LOOK_UP

    def _look(self) -> None:
        try:
            self._refuse_circle()
        except BaseException as found:  # for the one who waits, in its own thread
            self._found = found


async def in_a_thread(
    wait_for_it: Callable[[threading.Event], Got], give_back: Callable[[Got], object]
) -> Got:
    """What `wait_for_it` returns, which runs in a thread and ends soon after the event it is given is set.

    If the coroutine is cancelled the event is set, and what comes too late is given back.
    """
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
            await asyncio.to_thread(give_back, waiting.result())  # it came while we were being cancelled
        raise
