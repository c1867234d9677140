"""The amount of work in a run: everything in `make proof`, a random share of it in `make test`.

`HOLDFAST_ROUNDS` is the share, from 0 to 1. `HOLDFAST_SEED` repeats the choices of an earlier run. A test asks for
`rounds(200)`, a sweep for a share of its points. The summary of the run reports both.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SHARE = min(1.0, float(os.environ.get("HOLDFAST_ROUNDS", "0.01")))
"""The share of all rounds and points that this run tries."""

SEED = int(os.environ.setdefault("HOLDFAST_SEED", str(random.SystemRandom().randrange(1 << 32))))
"""The seed for choosing points. It is put into the environment, so that all processes of a run agree."""


tried: Counter[str] = Counter()
"""Counts of the points, states, schedules and rounds that this process has tried so far."""


def rounds(full: int, *, least: int = 2) -> int:
    """The number of rounds to run: a share of `full`, but at least `least`."""
    return max(min(full, least), round(full * SHARE))


def chosen(items: Sequence[T], *, share: float = SHARE, least: int = 3, salt: str = "") -> list[T]:
    """A share of the items, in order, always including the first and the last."""
    wanted = max(min(len(items), least), round(len(items) * share))
    if wanted >= len(items):
        return list(items)
    rest = random.Random(f"{SEED} {salt}").sample(range(1, len(items) - 1), wanted - 2)
    return [items[each] for each in sorted({0, len(items) - 1, *rest})]


def sometimes(items: Iterable[T], *, share: float = SHARE, salt: str = "") -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is chosen, without listing all items first. The first one always is."""
    chance = random.Random(f"{SEED} {salt}")
    first = True
    for item in items:
        yield item, first or share >= 1 or chance.random() < share
        first = False


def sweep(stride: int = 8) -> Iterator[int]:
    """Yield numbers of points, for a sweep that ends at a point that is not known before: all of them at full rounds,
    else about one in `stride`."""
    number, chance = 0, random.Random(SEED)
    while True:
        number += 1 if SHARE >= 1 else chance.randint(stride // 2, stride + stride // 2)
        yield number


def until(met: Callable[[], object], full: int, *, most: int = 20_000) -> Iterator[int]:
    """Yield round numbers: `rounds(full)` of them, and more until `met` returns true.

    So the result does not depend on luck: the run takes longer if the event is late, and fails only if it never
    occurs.
    """
    for number in range(most):
        if number >= rounds(full) and met():
            return
        tried["rounds of races"] += 1
        yield number
    raise AssertionError(f"the expected event did not occur in {most} rounds")
