"""Feeds hostile inputs to decoders, and collects what leaves them that is not allowed to."""

from __future__ import annotations

import collections
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from proof.hostile.inputs import hostile_inputs
from proof.hostile.record_decoders import Decoder

SLOW = 5.0
"""Seconds of processor time that no input may take: each is at most a few hundred kilobytes."""
STUCK = 20
"""An input that waits instead ends after this many times as long; a busy machine keeps a process waiting too."""
_BETWEEN = 500


class Raised(NamedTuple):
    """An exception that left a decoder: how often, and the shortest input that it left for."""

    decoder: str
    error: str
    where: str
    times: int
    shortest: bytes

    def __str__(self) -> str:
        return f"{self.decoder}: {self.error} at {self.where}, {self.times} times, such as for {self.shortest[:120]!r}"


class TooSlow(Exception):
    """An input took too long."""


@contextmanager
def _timed() -> Iterator[None]:
    """Raise `TooSlow` in the block if one of the timers ends, which `_wind` sets."""
    if sys.platform == "win32":
        raise NotImplementedError

    def ring(number: int, frame: object) -> None:
        raise TooSlow(f"an input took more than {SLOW:g} s")

    before, left = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, 0)
    before_cpu = signal.signal(signal.SIGPROF, ring)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before_cpu)
        signal.signal(signal.SIGALRM, before)
        if left[0]:  # the time limit of the test that called us
            signal.setitimer(signal.ITIMER_REAL, max(0.1, left[0] - (time.monotonic() - began)))


def _wind() -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    signal.setitimer(signal.ITIMER_PROF, SLOW)
    signal.setitimer(signal.ITIMER_REAL, STUCK * SLOW)


def fuzz(decoders: Sequence[Decoder], count: int, *, seed: object) -> list[Raised]:
    """Feed `count` inputs to each decoder."""
    return [raised for each in decoders for raised in _fuzz(each, count, random.Random(f"{seed} {each.name}"))]


def _fuzz(decoder: Decoder, count: int, chance: random.Random) -> list[Raised]:
    found: dict[tuple[str, str], tuple[int, bytes]] = {}
    inputs, decode, allowed = hostile_inputs(decoder.samples, chance), decoder.decode, decoder.allowed
    with _timed():
        for number in range(count):
            if number % _BETWEEN == 0:
                _wind()
            content = next(inputs)
            try:
                decode(content)
            except allowed:
                pass
            except Exception as error:
                if isinstance(error, TooSlow):
                    _wind()
                key = (type(error).__name__, _place(error))
                before = found.get(key, (0, content))
                found[key] = (before[0] + 1, min(before[1], content, key=len))
    return [Raised(decoder.name, *key, *value) for key, value in sorted(found.items())]


def _place(error: BaseException) -> str:
    """The last place of Holdfast in a traceback."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "/holdfast/" in each.filename]
    if not frames:
        return "the harness"
    last = frames[-1]
    return f"{last.filename.rpartition('/holdfast/')[2]}:{last.lineno} {last.name}"


def summary(raised: Sequence[Raised]) -> str:
    counts: collections.Counter[str] = collections.Counter()
    for each in raised:
        counts[each.decoder] += each.times
    return "\n".join([f"{sum(counts.values())} inputs to {len(counts)} decoders", *map(str, raised)])
