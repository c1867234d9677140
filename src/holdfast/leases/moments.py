"""When it is, by two clocks: the one that all who share the store have, and the one that nobody can set.

The wall clock of a machine is set by people and by time servers, in both directions. Its boot clock
only ever counts on, but means nothing on another machine or after a restart. So whoever writes a lease
notes both, and whoever judges one uses the boot clock if it is the same one, and else the store's time:
strictly for the holder itself, and with a margin for others, whose clocks may differ from the holder's.

    reading = desk.reading()                            # before the transaction
    ...protocol.validate(view, reading.at(now), ...)    # inside it

The reading is taken before the transaction because decisions are pure. That it is a little old then
makes others wait a little longer, and lets a holder in only as long as nobody has taken its place.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.clock import parse_instant

SKEW = 5.0
"""How far the clocks of two machines that share a store are allowed to be apart."""


class BootMark(NamedTuple):
    """An instant by the boot clock with this id. (Not a struct: a guard that must be quick reads it too.)"""

    clock_id: str
    at: float


class Moment(NamedTuple):
    """Now: the store's time, and what the boot clock of whoever decides has shown just before."""

    now: float
    clock_id: str = ""
    boot: float = 0.0
    skew: float = SKEW

    def mark(self, after: float = 0.0) -> BootMark | None:
        """The instant that is `after` seconds from now, if there is a boot clock to tell it by."""
        return BootMark(self.clock_id, self.boot + after) if self.clock_id else None

    def until(self, instant: str, mark: BootMark | None, *, margin: bool) -> float:
        """How many seconds it is until an instant, known by the store's time and perhaps by a mark."""
        if mark is not None and self.clock_id and mark.clock_id == self.clock_id:
            return mark.at - self.boot
        return parse_instant(instant) - self.now + (self.skew if margin else 0.0)


class Reading(NamedTuple):
    """What a boot clock has shown; with the store's time it becomes a moment."""

    clock_id: str
    boot: float
    skew: float = SKEW

    def at(self, now: float) -> Moment:
        return Moment(now, self.clock_id, self.boot, self.skew)
