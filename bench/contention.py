"""Several processes that contend for one lock: their work, and the measurements.

Times are taken with `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bench.contenders import Kind
    from bench.crew import Crew

SHORTEST_HOLD, LONGEST_HOLD = 0.02, 0.06
"""A lock is held for a random time before its release, which so falls into any phase of a polling interval."""


# --- Throughput -------------------------------------------------------------------------------------


class Increments(NamedTuple):
    """The additions to a shared number that the processes report, and its final value."""

    done: int
    counted: int
    per_second: float

    @property
    def lost(self) -> int:
        return self.done - self.counted


def contend(crew: Crew, kind: Kind, directory: Path, seconds: float) -> Increments:
    """Have all processes add 1 to a number in shared memory, under the lock, as often as possible."""
    number = directory / "number"
    number.write_bytes(bytes(8))
    done = sum(crew.all_do(_increment, kind, _lock_path(directory, kind), str(number), seconds=seconds))
    counted = int.from_bytes(number.read_bytes(), sys.byteorder)
    return Increments(done, counted, done / seconds)


def _increment(kind: Kind, path: str, number: str) -> Callable[[float], int]:
    lock = kind(path)

    def work(end_at: float) -> int:
        done = 0
        with (
            open(number, "r+b") as file,
            mmap.mmap(file.fileno(), 8) as memory,
            memoryview(memory) as view,
            view.cast("Q") as cells,
        ):
            while time.monotonic() < end_at:
                lock.acquire()
                cells[0] += 1
                lock.release()
                done += 1
        return done

    return work


# --- Fairness ---------------------------------------------------------------------------------------


class Turns(NamedTuple):
    """How often one process had the lock, and its longest wait for it."""

    taken: int
    longest_wait: float


def take_turns(crew: Crew, kind: Kind, directory: Path, seconds: float, hold: float) -> list[Turns]:
    """Have all processes hold the lock briefly, again and again."""
    turns: list[Turns] = crew.all_do(_hold, kind, _lock_path(directory, kind), hold, seconds=seconds)
    return turns


def _hold(kind: Kind, path: str, hold: float) -> Callable[[float], Turns]:
    lock = kind(path)

    def work(end_at: float) -> Turns:
        taken, longest = 0, 0.0
        while (asked_at := time.monotonic()) < end_at:
            lock.acquire()
            granted_at = time.monotonic()
            time.sleep(hold)
            lock.release()
            taken += granted_at < end_at
            longest = max(longest, granted_at - asked_at)
        return Turns(taken, longest)

    return work


# --- Hand-over --------------------------------------------------------------------------------------


class Grant(NamedTuple):
    """One wait for a lock: its start, its end, and the CPU time that the process spent on it."""

    asked_at: float
    granted_at: float
    cpu: float


def hand_over(crew: Crew, kind: Kind, directory: Path, seconds: float) -> list[float]:
    """Hand a lock over to another process, again and again; the seconds from each release to the grant."""
    path, end_at = _lock_path(directory, kind), time.monotonic() + seconds
    lock, latencies = kind(path), list[float]()
    while not latencies or time.monotonic() < end_at:
        lock.acquire()
        crew.tell(0, _wait, kind, path)
        time.sleep(random.uniform(SHORTEST_HOLD, LONGEST_HOLD))
        released_at = time.monotonic()
        try:
            lock.release()
        finally:
            grant = crew.hear(0)
        if grant.asked_at < released_at - SHORTEST_HOLD / 2:  # otherwise it asked too late
            latencies.append(grant.granted_at - released_at)
    return latencies


def cost_of_waiting(crew: Crew, kinds: Sequence[Kind], directory: Path, seconds: float) -> dict[str, float]:
    """CPU seconds per second of waiting. All contenders wait at once, each in its own process for its own lock."""
    costs: dict[str, float] = {}
    for first in range(0, len(kinds), crew.size):
        costs |= _cost_of_some(crew, kinds[first : first + crew.size], directory, seconds)
    return costs


def _cost_of_some(crew: Crew, kinds: Sequence[Kind], directory: Path, seconds: float) -> dict[str, float]:
    locks = [kind(_lock_path(directory, kind)) for kind in kinds]
    for member, lock in enumerate(locks):
        lock.acquire()
        crew.tell(member, _wait, kinds[member], lock.path)
    time.sleep(seconds)
    for lock in locks:
        lock.release()
    grants: list[Grant] = crew.hear_all(range(len(locks)))
    return {
        kind.name: grant.cpu / (grant.granted_at - grant.asked_at) for kind, grant in zip(kinds, grants, strict=True)
    }


def _wait(kind: Kind, path: str) -> Grant:
    lock = kind(path)
    before, asked_at = time.process_time(), time.monotonic()
    lock.acquire()
    granted_at, after = time.monotonic(), time.process_time()
    lock.release()
    return Grant(asked_at, granted_at, after - before)


def _lock_path(directory: Path, kind: Kind) -> str:
    return str(directory / f"{kind.__name__}.lock")
