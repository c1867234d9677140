"""The time of a store on etcd, which has no clock to ask for.

But every answer of a member says when it was sent, by that member's clock, cut to whole seconds. So when an
answer arrives, it is *at least* that late: a lower bound, which is never ahead of the servers, whatever the
clock of this machine says. The best bounds of the last minutes, carried on by this machine's clock that
nobody can set, come within milliseconds of the servers' time; a new process is less than a second (and the
way of the answer) behind it.

Each commit leaves its time in the store, and whoever reads it is at least that late too: so times never run
backwards from one commit to the next. A time that is further ahead than `MARGIN` is not believed: then the
members' clocks are at odds (etcd itself complains from one second on), and following the fastest one would
make time stand still for everybody else.
"""

from __future__ import annotations

import calendar
import threading
from email.utils import parsedate

from holdfast.clock import Clock

MARGIN = 5.0
_WINDOW = 60.0
"""Bounds are kept for one to two of these: the clocks of two machines drift apart."""


class ServerTime:
    """What is known of the time of the servers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bounds: list[float | None] = [None, None]  # of this window, and of the one before
        self._window_ends = 0.0
        self._last = 0.0

    def heard(self, date: str | None) -> None:
        """An answer has arrived that was sent at this time."""
        fields = parsedate(date) if date else None
        if fields is None:
            return
        here = self._clock.boot()
        bound = calendar.timegm(fields) - here
        with self._lock:
            if here >= self._window_ends:
                self._bounds = [None, self._bounds[0] if here < self._window_ends + _WINDOW else None]
                self._window_ends = here + _WINDOW
            self._bounds[0] = bound if self._bounds[0] is None else max(self._bounds[0], bound)

    def is_known(self) -> bool:
        """Whether an answer has arrived not long ago."""
        return self._clock.boot() < self._window_ends + _WINDOW

    def now(self, left_by_a_commit: float = 0.0) -> float:
        """The time; not before that of a commit which has been seen, nor before what was said last."""
        with self._lock:
            known = [each for each in self._bounds if each is not None]
            found = self._clock.boot() + max(known, default=0.0)
            for earlier in (left_by_a_commit, self._last):
                if found < earlier <= found + MARGIN:
                    found = earlier
            self._last = found
            return found
