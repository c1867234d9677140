"""Expiry: until when a lease, a ledger claim or an issue claim counts.

The deadline is an instant of the store's clock. Within one boot of one machine, a mark of the boot clock
overrides it, because nobody can set that clock. For its holder a right ends at the deadline; others, whose
clock may be off by `Now.skew`, wait that much longer. So nobody takes a right before its holder has stopped.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.clock import BootMark, Now, format_duration, parse_instant
from holdfast.errors import SettingInvalid


class Deadline(NamedTuple):
    """The end of a right: by the store's clock, and by the boot clock where one has an id."""

    at: str
    boot: BootMark | None = None


class TimedRight(msgspec.Struct, frozen=True, kw_only=True):
    """A right that counts until its deadline."""

    def deadline(self) -> Deadline:
        raise NotImplementedError

    def expiry(self) -> float:
        """The deadline by the store's clock."""
        return parse_instant(self.deadline().at)

    def time_left(self, now: Now | float, *, for_others: bool) -> float:
        """Seconds until it ends for its holder, or until others may take it; negative afterwards.

        A bare number is the store's time alone, which a step of the wall clock moves.
        """
        now = now if isinstance(now, Now) else Now(now)
        return now.until(*self.deadline(), margin=for_others)

    def is_expired(self, now: Now | float) -> bool:
        """Whether its holder must not use it any more."""
        return self.time_left(now, for_others=False) <= 0

    def may_be_taken(self, now: Now | float) -> bool:
        """Whether others may take it: never before it has expired for its holder."""
        return self.time_left(now, for_others=True) <= 0


def checked_ttl(ttl: float, shortest: float, longest: float, *, setting: str = "ttl") -> float:
    """The ttl as a float; `SettingInvalid` outside the bounds, for NaN too."""
    if not shortest <= ttl <= longest:
        bounds = f"a duration from {format_duration(shortest)} to {format_duration(longest)}"
        raise SettingInvalid(setting, f"{ttl:g}s", bounds)
    return float(ttl)
