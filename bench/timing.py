"""What an action on the file system costs, with one sync; and telling those who wait what is going on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from holdfast.trees.walker import sync_tree


def say(what: str) -> None:
    """Tell those who wait what is going on."""
    print(f"{what} ...", file=sys.stderr, flush=True)


class Cost(NamedTuple):
    """Seconds until it is done, and seconds of CPU time."""

    wall: float
    cpu: float


def timed(action: Callable[[], None], place: Path) -> Cost:
    """What it costs, with one sync; what others have left to be written is written before."""
    sync_tree(place)
    started, used = perf_counter(), sum(os.times()[:4])
    action()
    sync_tree(place)
    return Cost(perf_counter() - started, sum(os.times()[:4]) - used)
