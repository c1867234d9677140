"""Many processes on one store, delayed at critical calls and killed at random."""

from __future__ import annotations

import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from holdfast.fs import calls
from tests.locks.workers import Line, Worker, Workers

LATE = ("link", "replace", "unlink", "listdir")
"""The calls before which a delay is most likely to expose a race."""


_lately = threading.Lock()
_patches = contextlib.ExitStack()
_users = 0  # threads that are in the block


@contextlib.contextmanager
def late_calls(*, chance: float = 0.2, longest: float = 0.002) -> Iterator[None]:
    """A context in which some file system calls are delayed a little; in threads at the same time, by the first."""

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_late(*arguments: Any, **rest: Any) -> Any:
            if random.random() < chance:
                time.sleep(random.random() * longest)
            return call(*arguments, **rest)

        return call_late

    global _users
    with _lately:
        if _users == 0:  # patches of several threads would be undone in the wrong order
            for name in LATE:
                _patches.enter_context(mock.patch.object(calls, name, late(getattr(calls, name))))
        _users += 1
    try:
        yield
    finally:
        with _lately:
            _users -= 1
            if _users == 0:
                _patches.close()


class Life(NamedTuple):
    """A process; `generation` counts its predecessors in the same place."""

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
    stop_for: float = 0.0,
    on_death: Callable[[Life], object] = lambda life: None,
) -> int:
    """Run `live` in a process at each place until it returns there; return the number of kills.

    At random moments, a random process is killed, and the next generation takes its place. Before some kills, another
    one is stopped and continued, if `stop_for` is given in seconds. After `kills` kills the storm is over, and the
    remaining processes finish undisturbed.
    """
    killed = 0
    calm = mmap.mmap(-1, 1)  # one byte that all processes share
    with Workers() as workers:
        running = {Life(place, 0): _start(workers, Life(place, 0), live, calm) for place in range(places)}
        while running:
            if killed < kills:
                time.sleep(random.random() * pause)
                if stop_for and random.random() < 0.5:
                    stopped = random.choice(list(running.values()))
                    stopped.stop()
                    time.sleep(random.random() * stop_for)
                    stopped.resume()
                life = random.choice(list(running))
                running[life].kill()
            else:
                calm[0] = 1
                life = next(iter(running))
            if _finished(running.pop(life)):
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


def _finished(worker: Worker) -> bool:
    """Wait for a process to end, without a time limit; return whether it was not killed."""
    try:
        said = worker.line.wait()
    except (EOFError, ConnectionResetError):
        assert worker.wait() == -9, f"a process exited with {worker.wait()}"
        return False
    assert said == "done", f"a process failed: {said}"
    worker.wait()
    return True
