"""The reductions lose no outcome: random programs have the same outcomes with and without them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from proof.explore import Exploration, Result, explore
from proof.explorer.footprints import LOCK_EX, LOCK_NB, LOCK_UN
from tests.proof.explored_tasks import FRESH, Listing, flock, flocked, listing, load, opened, wait_for_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no flock on Windows")

NAMES = ("a", "b", "d/a", "d/b", "e/a")


class Program:
    """A few random operations; returns the observation of each."""

    def __init__(self, chance: random.Random, index: int, length: int) -> None:
        self.__name__ = f"program {index}"
        self.index = index
        steps = sorted(name for name in vars(Program) if name.startswith("do_"))
        self.steps = [(chance.choice(steps), *chance.choices(NAMES, k=2)) for _ in range(length)]

    def __call__(self, directory: Path) -> tuple[object, ...]:
        seen: list[object] = []
        for name, first, second in self.steps:
            try:
                seen.append(getattr(self, name)(directory, directory / first, directory / second))
            except OSError as error:
                seen.append(error.errno)
        return tuple(seen)

    def do_create(self, directory: Path, path: Path, other: Path) -> None:
        with opened(path, FRESH) as fd:
            calls.write(fd, b"created by %d" % self.index)

    def do_append(self, directory: Path, path: Path, other: Path) -> None:
        with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            calls.write(fd, b"%d" % self.index)

    def do_read_twice(self, directory: Path, path: Path, other: Path) -> list[bytes] | tuple[bytes, bytes]:
        with opened(path) as fd:
            return calls.read(fd, 100), calls.read(fd, 100)

    def do_look(self, directory: Path, path: Path, other: Path) -> tuple[int, int]:
        status = calls.stat(path, follow_symlinks=False)
        return status.st_size, status.st_nlink

    def do_list(self, directory: Path, path: Path, other: Path) -> tuple[str, ...]:
        with calls.scandir(path.parent) as entries:
            return tuple(entry.name for entry in entries)

    def do_unlink(self, directory: Path, path: Path, other: Path) -> None:
        calls.unlink(path)

    def do_rename(self, directory: Path, path: Path, other: Path) -> None:
        calls.rename(path, other)

    def do_link(self, directory: Path, path: Path, other: Path) -> None:
        calls.link(path, other)

    def do_choose(self, directory: Path, path: Path, other: Path) -> None:
        if durable.read_lines_in(Directory.open(directory), "l"):
            calls.unlink(path)
        else:
            calls.rename(path, other)

    def do_make_directory(self, directory: Path, path: Path, other: Path) -> None:
        calls.mkdir(directory / "e")

    def do_move_directory(self, directory: Path, path: Path, other: Path) -> None:
        calls.rename(directory / "d", directory / "e")

    def do_in_directory(self, directory: Path, path: Path, other: Path) -> None:
        with opened(path.parent, os.O_RDONLY) as base:
            fd = calls.open("b", os.O_WRONLY | os.O_TRUNC, dir_fd=base)
            calls.write(fd, b"%d" % self.index)
            calls.close(fd)
            calls.unlink("a", dir_fd=base)

    def do_publish(self, directory: Path, path: Path, other: Path) -> None:
        draft = directory / f".{os.urandom(3).hex()}"
        with opened(draft, FRESH) as fd:
            calls.write(fd, b"%d" % self.index)
        try:
            calls.link(draft, path)
        finally:
            calls.unlink(draft)

    def do_locked(self, directory: Path, path: Path, other: Path) -> bytes:
        with flocked(directory / "l"):
            self.do_append(directory, path, other)
            return load(path)

    def do_try_lock(self, directory: Path, path: Path, other: Path) -> None:
        with opened(directory / "l", os.O_RDWR | os.O_CREAT) as fd:
            flock(fd, LOCK_EX | LOCK_NB)
            self.do_append(directory, path, other)
            flock(fd, LOCK_UN)

    def do_wait(self, directory: Path, path: Path, other: Path) -> str:
        return wait_for_file(path.parent)


def a_few_files(directory: Path) -> None:
    (directory / "a").write_bytes(b"A")
    (directory / "d").mkdir()
    (directory / "d" / "b").write_bytes(b"B")
    os.link(directory / "d" / "b", directory / "b")


def all_outcomes(
    programs: Sequence[Program], *, kills: int, reduced: bool
) -> tuple[Exploration, set[tuple[Listing, tuple[object, ...]]]]:
    found = set()

    def note(directory: Path, results: Sequence[Result]) -> None:
        found.add((listing(directory), tuple("killed" if each.killed else each.value for each in results)))

    explored = explore(programs, prepare=a_few_files, check=note, kills=kills, reduced=reduced, most_schedules=1_000)
    return explored, found


def weaker(result: object, than: object) -> bool:
    return result in ("killed", than)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.sampled(1)
def test_random_programs_have_the_same_outcomes_with_and_without_reduction(seed: int) -> None:
    chance = random.Random(seed)
    kills = seed % 2
    programs = [Program(chance, index, 2) for index in range(2)]

    reduced, few = all_outcomes(programs, kills=kills, reduced=True)
    full, every = all_outcomes(programs, kills=kills, reduced=False)

    assert reduced.exhausted
    if not full.exhausted:
        pytest.skip("too many schedules to try them all")
    assert few <= every
    assert reduced.schedules < full.schedules
    # A task that is killed after its last change leaves the same state as one that is not killed.
    for directory, results in every - few:
        assert kills
        assert any(directory == other and all(map(weaker, results, ended)) for other, ended in few), (
            directory,
            results,
        )
