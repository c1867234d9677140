"""Clocks, instants and durations.

Instants are float seconds since 1970, durations are float seconds. Clocks are passed in. Safety never depends
on them: they only determine when something is *allowed* (a steal, a retry, a timeout).
"""

from __future__ import annotations

import math
import re
import sys
import time
from typing import NamedTuple, Protocol

from holdfast.errors import SettingInvalid


class Clock(Protocol):
    """A source of time."""

    def wall(self) -> float:
        """Seconds since 1970; jumps when the clock is set."""

    def monotonic(self) -> float:
        """Seconds since some start; never jumps, may stop while the machine sleeps."""

    def boot(self) -> float:
        """Seconds since the machine started, including sleep where the system counts it."""


class SystemClock:
    """The clocks of the operating system."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def boot(self) -> float:
        if sys.platform == "linux":
            return time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic()


class ManualClock:
    """A clock that moves only when it is advanced: for tests and for exploring a protocol."""

    def __init__(self, *, wall: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    boot = monotonic

    def advance(self, seconds: float) -> None:
        """Advance all clocks."""
        self._wall += seconds
        self._monotonic += seconds

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock alone, as an administrator or a time server does."""
        self._wall += seconds


SYSTEM_CLOCK = SystemClock()

SKEW = 5.0  # how far apart the clocks of machines that share a store may be


class BootMark(NamedTuple):
    """An instant by the boot clock with this id. A tuple, not a struct, because the guard must load quickly."""

    clock_id: str
    at: float


class Now(NamedTuple):
    """The current time by two clocks: the store's, and this machine's boot clock, read just before. A process with the
    same boot clock as a mark measures by that clock, since it cannot be set; all others use the store's time and allow
    for skew."""

    now: float
    clock_id: str = ""
    boot: float = 0.0
    skew: float = SKEW

    def mark(self, after: float = 0.0) -> BootMark | None:
        """The instant `after` seconds from now by the boot clock; None if there is no boot clock."""
        return BootMark(self.clock_id, self.boot + after) if self.clock_id else None

    def until(self, instant: str, mark: BootMark | None, *, margin: bool) -> float:
        """Seconds until an instant, given by the store's time and perhaps a mark. `margin` adds the skew, if needed."""
        if mark is not None and self.clock_id and mark.clock_id == self.clock_id:
            return mark.at - self.boot
        return parse_instant(instant) - self.now + (self.skew if margin else 0.0)


class ClockReading(NamedTuple):
    """A reading of the boot clock, to be combined with the store's time."""

    clock_id: str
    boot: float
    skew: float = SKEW

    def at(self, now: float) -> Now:
        return Now(now, self.clock_id, self.boot, self.skew)


def format_instant(instant: float) -> str:
    """Write an instant as ISO 8601 in UTC, to the microsecond."""
    from datetime import UTC, datetime  # imported here because the guard does not need it

    return datetime.fromtimestamp(instant, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


_MONTH_AND_DAY = "(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
_LEAP_YEAR = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
INSTANT = (
    rf"\A(?=19|[2-8])(?:[0-9]{{4}}-(?:{_MONTH_AND_DAY})|(?:{_LEAP_YEAR})-02-29)"
    r"[Tt ](?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:[.,][0-9]+)?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])\Z"
)
"""Matches instants of RFC 3339 from 1900 to 8999, all of which `parse_instant` reads and `format_instant` writes."""


_YEAR_1, _YEAR_10000 = -62_135_596_800.0, 253_402_300_800.0  # their beginnings in UTC


def parse_instant(text: str) -> float:
    """Read an ISO 8601 instant with a time zone. Raise ValueError for anything else, and for instants outside the years
    1 to 9999 of UTC, which `format_instant` could not write. As in RFC 3339, `t` and `z` may be lowercase; a leap
    second is the beginning of the next minute."""
    from datetime import datetime

    try:
        instant, leap = datetime.fromisoformat(text), 0
    except ValueError:
        usual, leap = re.subn(r"(:\d\d):60(?=[.,Z+-])", r"\1:59", text.upper(), count=1)
        instant = datetime.fromisoformat(usual)
    if instant.tzinfo is None:
        raise ValueError(f"no time zone in {text!r}")
    seconds = instant.timestamp() + leap
    if not _YEAR_1 <= seconds < _YEAR_10000:
        raise ValueError(f"{text!r} is not in the years 1 to 9999 of UTC")
    return seconds


LONGEST_COMMAND = 24 * 3600.0  # how long a command that decides something may take
LONGEST_DURATION = 36_500 * 86_400.0  # a hundred years: the instant at its end can be formatted
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_PART = r"(\d+(?:\.\d+)?)(ms|us|µs|μs|ns|s|m|h|d)"  # not compiled here: most commands parse no duration


def parse_duration(text: str, *, setting: str = "duration") -> float:
    """Read `250ms`, `30s`, `1m30s`, `2h`, or a number of seconds, up to `LONGEST_DURATION`."""
    stripped = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", stripped, re.ASCII):
        seconds = float(stripped)
    elif re.fullmatch(rf"(?:{_PART})+", stripped, re.ASCII):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, stripped, re.ASCII))
    else:
        raise SettingInvalid(setting, text, "a duration such as 250ms, 30s, 5m, 1h30m")
    if seconds > LONGEST_DURATION:
        raise SettingInvalid(setting, text, f"a duration of {format_duration(LONGEST_DURATION)} at most")
    return seconds


def format_ago(instant: str, now: float | None = None) -> str:
    """Write how long ago an instant was, for people: `just now`, `10s ago`, `2h ago`."""
    ago = round((SYSTEM_CLOCK.wall() if now is None else now) - parse_instant(instant))
    return f"{format_duration(ago)} ago" if ago > 0 else "just now"


def format_duration(seconds: float) -> str:
    """Write a duration for people: `250ms`, `5s`, `1m30s`, `2h`, `3d4h`."""
    if not math.isfinite(seconds):
        return f"{seconds}s"
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    parts: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, whole = divmod(whole, int(_UNITS[unit]))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


class Deadline(NamedTuple):
    """The end of a lease or claim: by the store's clock and, if it has an id, by the boot clock."""

    at: str
    boot: BootMark | None = None


class TimedRight:
    """A mixin for leases and claims, which end for their holder at the deadline. Others, whose clock may be off by
    `Now.skew`, wait that much longer: none is taken over before its holder has stopped using it."""

    __slots__ = ()

    def deadline(self) -> Deadline:
        raise NotImplementedError

    def expiry(self) -> float:
        """The deadline by the store's clock."""
        return parse_instant(self.deadline().at)

    def time_left(self, now: Now | float, *, for_others: bool) -> float:
        """Seconds until it ends for its holder, or until others may take it; negative afterwards. If `now` is a number,
        it is the store's time alone, which jumps when the wall clock is set."""
        now = now if isinstance(now, Now) else Now(now)
        return now.until(*self.deadline(), margin=for_others)

    def is_expired(self, now: Now | float) -> bool:
        """Whether its holder must no longer use it."""
        return self.time_left(now, for_others=False) <= 0

    def may_be_taken(self, now: Now | float) -> bool:
        """Whether others may take it: never before it has expired for its holder."""
        return self.time_left(now, for_others=True) <= 0


def ttl_within(ttl: float, shortest: float, longest: float, *, setting: str = "ttl") -> float:
    """The ttl as a float; `SettingInvalid` if it is outside the bounds or NaN."""
    if not shortest <= ttl <= longest:
        bounds = format_duration(shortest), format_duration(longest)
        shown = format_duration(ttl) if format_duration(ttl) not in bounds else f"{ttl}s"  # just outside
        raise SettingInvalid(setting, shown, f"a duration from {bounds[0]} to {bounds[1]}")
    return float(ttl)
