"""Many processes on one store, slowed down at bad moments and killed at random ones."""

from __future__ import annotations

import contextlib
import mmap
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from holdfast.fs import calls
from tests.locks.workers import Line, Worker, Workers

LATE = ("link", "replace", "unlink", "listdir")
"""The calls before which a little time makes all the difference."""


@contextlib.contextmanager
def late_calls(*, chance: float = 0.2, longest: float = 0.002) -> Iterator[None]:
    """Within, file system calls are sometimes made a little later."""

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_late(*arguments: Any, **rest: Any) -> Any:
            if random.random() < chance:
                time.sleep(random.random() * longest)
            return call(*arguments, **rest)

        return call_late

    with contextlib.ExitStack() as patches:
        for name in LATE:
            patches.enter_context(mock.patch.object(calls, name, late(getattr(calls, name))))
        yield


class Life(NamedTuple):
    """One of the processes that follow each other in one place."""

    place: int
    generation: int

    @property
    def name(self) -> str:
        return f"{self.place}.{self.generation}"


IsOver = Callable[[], bool]
Live = Callable[[Life, IsOver], object]


def storm(
    places: int,
    live: Live,
    *,
    kills: int,
    pause: float = 0.02,
    on_death: Callable[[Life], object] = lambda life: None,
) -> int:
    """Let `live` run in a process at each place until it returns there; return how many were killed.

    At random moments a random process is killed, and the next generation takes its place. After
    `kills` of them the storm is over, and those that are left come to their end in peace.
    """
    killed = 0
    calm = mmap.mmap(-1, 1)  # one byte that all of them see
    with Workers() as workers:
        running = {Life(place, 0): _start(workers, Life(place, 0), live, calm) for place in range(places)}
        while running:
            if killed < kills:
                time.sleep(random.random() * pause)
                life = random.choice(list(running))
                running[life].kill()
            else:
                calm[0] = 1
                life = next(iter(running))
            if _ended_by_itself(running.pop(life)):
                continue
            killed += 1
            on_death(life)
            following = Life(life.place, life.generation + 1)
            running[following] = _start(workers, following, live, calm)
    return killed


def _start(workers: Workers, life: Life, live: Live, calm: mmap.mmap) -> Worker:
    def work(line: Line) -> None:
        with late_calls(longest=0.004):
            live(life, lambda: calm[0] == 1)
        line.say("done")

    return workers.start(work)


def _ended_by_itself(worker: Worker) -> bool:
    """Wait for the end of a process, however long it takes; whether it came to it by itself."""
    try:
        said = worker.line.wait()
    except (EOFError, ConnectionResetError):
        assert worker.wait() == -9, f"a process ended with {worker.wait()}"
        return False
    assert said == "done", f"a process failed: {said}"
    worker.wait()
    return True
