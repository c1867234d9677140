"""The cost of a file system action with one sync; progress messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from holdfast.trees.walker import sync_tree


def say(what: str) -> None:
    """Print a progress message."""
    print(f"{what} ...", file=sys.stderr, flush=True)


class Cost(NamedTuple):
    """Wall-clock seconds and CPU seconds."""

    wall: float
    cpu: float


def timed(action: Callable[[], None], place: Path) -> Cost:
    """The cost of an action with one sync; an earlier sync first writes the data of others."""
    sync_tree(place)
    started, used = perf_counter(), sum(os.times()[:4])
    action()
    sync_tree(place)
    return Cost(perf_counter() - started, sum(os.times()[:4]) - used)
