"""Measurements on a shared machine.

Absolute times mean little there. So contenders take turns within each round, each round gives one
ratio between two contenders that met the same noise, and the result is the median of these ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

Result = TypeVar("Result")


class Ratio(NamedTuple):
    """The median of the ratios of all rounds, and the bounds of their middle half."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


class Rounds(NamedTuple, Generic[Result]):
    """The results of each contender, one per round, and the errors of those that failed."""

    series: dict[str, list[Result]]
    failures: dict[str, str]


def interleave(contenders: Mapping[str, Callable[[], Result]], rounds: int) -> Rounds[Result]:
    """Run every contender once per round, each round starting with a different one.

    A contender that fails is dropped; the others continue.
    """
    series: dict[str, list[Result]] = {name: [] for name in contenders}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for name in rotated(list(series), number):
            try:
                series[name].append(contenders[name]())
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                del series[name]
    return Rounds(series, failures)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names, rotated to the left."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


def ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """The values as multiples of the base, round by round."""
    ratios = [value / each if each else math.inf for value, each in zip(values, base, strict=True)]
    return Ratio(median(ratios), percentile(ratios, 25), percentile(ratios, 75))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all shares are equal, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def enough_times(cycle: Callable[[int], None], seconds: float) -> int:
    """The number of repetitions for which a `cycle` call takes about `seconds`, if nothing disturbs it.

    Keep `seconds` shorter than the scheduler's time slices, and the same for all contenders: longer samples
    contain interruptions that the median cannot remove.
    """
    times = 1
    while (elapsed := min(_timed(cycle, times) for _ in range(5))) < seconds / 4:
        times *= 2
    return max(1, round(times * seconds / elapsed))


def seconds_each(cycle: Callable[[int], None], times: int) -> float:
    """The duration of one repetition."""
    return _timed(cycle, times) / times


def _timed(cycle: Callable[[int], None], times: int) -> float:
    started = perf_counter()
    cycle(times)
    return perf_counter() - started
