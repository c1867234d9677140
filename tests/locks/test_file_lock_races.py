"""Races between processes lose no update and show no partial write, and locks with planted bugs are caught.

Each check takes the lock as an argument, so that a planted bug goes through the same check.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.locks.file_lock import FileLocker
from holdfast.locks.flock import OpenFileDescription
from proof.effort import rounds
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)

import fcntl

Lock = Callable[[Path, bool], AbstractContextManager[object]]
"""Hold the lock on the file at a path in a block; True for shared."""

MakeLock = Callable[[], Lock]


def ours() -> Lock:
    locker = FileLocker(PATIENCE)
    return lambda path, shared: locker.acquire(path, shared=shared)


def ours_fair() -> Lock:
    locker = FileLocker(PATIENCE, fair=True)
    return lambda path, shared: locker.acquire(path, shared=shared)


def ours_with_a_new_locker_each_time() -> Lock:
    return lambda path, shared: FileLocker(PATIENCE).acquire(path, shared=shared)


# --- Planted bugs -------------------------------------------------------------------------------------


def no_lock_at_all() -> Lock:
    return lambda path, shared: contextlib.nullcontext()


def shared_where_exclusive_is_needed() -> Lock:
    locker = FileLocker(PATIENCE)
    return lambda path, shared: locker.acquire(path, shared=True)


def released_too_early() -> Lock:
    locker = FileLocker(PATIENCE)

    @contextlib.contextmanager
    def lock(path: Path, shared: bool) -> Iterator[None]:
        locker.acquire(path, shared=shared).release()
        yield

    return lock


def without_checking_which_file_was_locked() -> Lock:
    pytest.MonkeyPatch().setattr(OpenFileDescription, "is_current", lambda _: True)  # the worker ends with it
    return ours()


def dropped_when_the_file_is_closed_elsewhere() -> Lock:
    """Locks of fcntl(2), which end when *any* descriptor of the file is closed."""

    @contextlib.contextmanager
    def lock(path: Path, shared: bool) -> Iterator[None]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    return lock


# --- No increment is lost -----------------------------------------------------------------------------


class Count(NamedTuple):
    """The final counter, the acknowledged increments, and the number of killed processes."""

    counted: int
    acknowledged: int
    killed: int

    @property
    def is_right(self) -> bool:
        """No acknowledged increment is lost; the last increment of a killed process may count or not."""
        return self.acknowledged <= self.counted <= self.acknowledged + self.killed


class Scene(NamedTuple):
    """The directory of a race; `after` is applied to the lock file before the lock is released."""

    directory: Path
    after: Callable[[Path], object] = lambda path: None

    @property
    def lock_path(self) -> Path:
        return self.directory / "counter.lock"

    @property
    def counter(self) -> Path:
        return self.directory / "counter"


def increment(counter: int) -> None:
    """Read the counter and write one more, in two steps that other processes can come between."""
    before = int.from_bytes(os.pread(counter, 8, 0), "big")
    if random.random() < 0.2:
        time.sleep(0)
    os.pwrite(counter, (before + 1).to_bytes(8, "big"), 0)


def count_on(scene: Scene, make_lock: MakeLock) -> Callable[[Line], None]:
    """Task for a worker: increment until told to stop, and acknowledge each increment after the release."""

    def task(line: Line) -> None:
        lock = make_lock()
        counter = os.open(scene.counter, os.O_RDWR)
        own = os.open(scene.directory / f"acknowledged-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
        done = 0
        while not line.has_news():
            with lock(scene.lock_path, False):
                increment(counter)
                scene.after(scene.lock_path)
            done += 1
            os.pwrite(own, done.to_bytes(8, "big"), 0)
        line.say("done")

    return task


def race(scene: Scene, make_lock: MakeLock, *, up_to: int, count: int = 8, kills: int = 0) -> Count:
    """Let `count` processes increment one counter to at least `up_to`, and kill and replace `kills` of them."""
    scene.counter.write_bytes(bytes(8))
    killed = 0
    with Workers() as workers:
        running = workers.start_many(count, count_on(scene, make_lock))
        wait_until(lambda: read_number(scene.counter) > 0)
        while killed < kills:
            time.sleep(random.random() * 0.01)  # at any moment
            victim = running.pop(random.randrange(count))
            victim.kill()
            assert victim.wait() == -signal.SIGKILL
            killed += 1
            running.append(workers.start(count_on(scene, make_lock)))
        wait_until(lambda: read_number(scene.counter) >= up_to)
        for worker in running:
            assert worker.ask("stop") == "done"
    acknowledged = sum(read_number(each) for each in scene.directory.glob("acknowledged-*"))
    return Count(read_number(scene.counter), acknowledged, killed)


def read_number(path: Path) -> int:
    return int.from_bytes(path.read_bytes(), "big")


def unlink(path: Path) -> None:
    """Delete the lock file after use, as some programs do."""
    path.unlink(missing_ok=True)


def open_and_read(path: Path) -> None:
    """Open, read and close the file, as any library that is given the path may do."""
    if path.exists():
        path.read_bytes()
    time.sleep(0)


every_kind = pytest.mark.parametrize(
    "make_lock", [ours, ours_fair, ours_with_a_new_locker_each_time], ids=lambda each: each.__name__
)


@pytest.mark.req("FL-03")
@every_kind
def test_eight_processes_lose_no_increment(make_lock: MakeLock, scratch: Path) -> None:
    seen = race(Scene(scratch), make_lock, up_to=2000)

    assert seen.is_right, seen


@pytest.mark.req("FL-02", "FL-03")
@every_kind
@pytest.mark.sampled(1)
def test_no_increment_is_lost_when_processes_are_killed_at_any_moment(make_lock: MakeLock, scratch: Path) -> None:
    seen = race(Scene(scratch), make_lock, up_to=rounds(1000, least=250), kills=rounds(25, least=6))

    assert seen.is_right, seen


@pytest.mark.sampled(2)
@pytest.mark.req("FL-03")
@every_kind
@pytest.mark.parametrize("after", [unlink, open_and_read], ids=["deletes it", "reads it"])
def test_no_increment_is_lost_even_if_each_holder_deletes_or_reads_the_lock_file(
    make_lock: MakeLock, after: Callable[[Path], object], scratch: Path
) -> None:
    seen = race(Scene(scratch, after), make_lock, up_to=1000)

    assert seen.is_right, seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("make_lock", "after"),
    [
        (no_lock_at_all, open_and_read),
        (shared_where_exclusive_is_needed, open_and_read),
        (released_too_early, open_and_read),
        (without_checking_which_file_was_locked, unlink),
    ],
    ids=lambda each: each.__name__,
)
def test_a_lock_with_a_planted_bug_is_caught_losing_increments(
    make_lock: MakeLock, after: Callable[[Path], object], scratch: Path
) -> None:
    for number in range(20):
        (scratch / str(number)).mkdir()
        if not race(Scene(scratch / str(number), after), make_lock, up_to=1000).is_right:
            return
    pytest.fail("the planted bug was not noticed in 20 races")


def test_a_lock_that_any_close_drops_is_caught_losing_increments(scratch: Path) -> None:
    def open_and_read_first(make: MakeLock) -> MakeLock:
        def make_with_read() -> Lock:
            lock = make()

            @contextlib.contextmanager
            def lock_and_read(path: Path, shared: bool) -> Iterator[None]:
                with lock(path, shared):
                    open_and_read(path)
                    yield

            return lock_and_read

        return make_with_read

    (scratch / "ours").mkdir()
    assert race(Scene(scratch / "ours"), open_and_read_first(ours), up_to=1000).is_right
    for number in range(20):
        (scratch / str(number)).mkdir()
        broken = open_and_read_first(dropped_when_the_file_is_closed_elsewhere)
        if not race(Scene(scratch / str(number)), broken, up_to=1000).is_right:
            return
    pytest.fail("the planted bug was not noticed in 20 races")


# --- No partial write is seen -------------------------------------------------------------------------


def write_pairs(directory: Path, make_lock: MakeLock) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        lock = make_lock()
        first, second = (os.open(directory / name, os.O_WRONLY) for name in ("first", "second"))
        number = os.getpid() << 24
        while not line.has_news():
            number += 1
            with lock(directory / "pair.lock", False):
                os.pwrite(first, number.to_bytes(8, "big"), 0)
                time.sleep(0)
                os.pwrite(second, number.to_bytes(8, "big"), 0)
        line.say("done")

    return task


def read_pairs(directory: Path, make_lock: MakeLock, changes: int) -> Callable[[Line], None]:
    """Task for a worker: read until it has seen `changes` changes; report how often the two files differed."""

    def task(line: Line) -> None:
        lock = make_lock()
        first, second = (os.open(directory / name, os.O_RDONLY) for name in ("first", "second"))
        torn = seen = 0
        last = b""
        while seen < changes:
            with lock(directory / "pair.lock", True):
                one, other = os.pread(first, 8, 0), os.pread(second, 8, 0)
            torn, seen, last = torn + (one != other), seen + (one != last), one
            time.sleep(random.random() * 0.001)  # readers that never pause would starve the writers
        line.say(torn)

    return task


def torn_pairs(directory: Path, writing: MakeLock, reading: MakeLock, *, changes: int) -> int:
    """The number of torn pairs that four readers see, each until it has seen `changes` changes by two writers."""
    for name in ("first", "second"):
        (directory / name).write_bytes(bytes(8))
    with Workers() as workers:
        writers = workers.start_many(2, write_pairs(directory, writing))
        readers = workers.start_many(4, read_pairs(directory, reading, changes))
        torn = sum(int(worker.hear()) for worker in readers)
        assert [worker.ask("stop") for worker in writers] == ["done", "done"]
    return torn


@pytest.mark.req("FL-03")
@pytest.mark.parametrize("make_lock", [ours, ours_fair], ids=lambda each: each.__name__)
def test_readers_that_share_the_lock_never_see_a_half_written_pair(make_lock: MakeLock, scratch: Path) -> None:
    assert torn_pairs(scratch, make_lock, make_lock, changes=100) == 0


@pytest.mark.parametrize(
    ("writing", "reading"),
    [(ours, no_lock_at_all), (no_lock_at_all, ours), (shared_where_exclusive_is_needed, ours)],
    ids=["readers without a lock", "writers without a lock", "writers share"],
)
def test_a_half_written_pair_is_noticed_if_one_side_does_not_lock(
    writing: MakeLock, reading: MakeLock, scratch: Path
) -> None:
    for _ in range(20):
        if torn_pairs(scratch, writing, reading, changes=100):
            return
    pytest.fail("no torn pair was noticed in 20 rounds")
