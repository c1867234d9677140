"""Waiting in line, the same for everything that has one: woken by changes, ended by time, by whoever
cancels it, or because it would never end.

Who comes next is decided by the rules of each kind, inside its transactions: higher priorities first,
then in the order of asking. Here is only how the time until then passes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

from holdfast.clock import Clock, format_duration
from holdfast.errors import LockTimeout
from holdfast.holding.lookout import FIRST_LOOK, LAST_LOOK, LOOK_UP
from holdfast.store.model import Watch

Got = TypeVar("Got")


class NotYet(NamedTuple):
    """Somebody else has it, or comes first: ask again after `pause`, or when something has changed.

    `holders` says who has it, in the form of `LockTimeout`.
    """

    pause: float
    holders: list[dict[str, Any]]


class Wish(NamedTuple):
    """What is waited for and how long (None: without limit); who sets `cancelled` ends it at once."""

    what: str
    wait: float | None
    cancelled: threading.Event | None
    clock: Clock


def wait_in_line(
    wish: Wish, ask: Callable[[], Got | NotYet], watch: Watch, refuse_circle: Callable[[], None]
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
