"""How much becomes free when trees go one after the other, though others have directories of theirs as homes.

A directory of a tree that goes, or of a remnant, is free as soon as its own tree is gone and all trees that
name it are. So each has its *turn*: the number of trees that must be gone for it. Remnants are gone already,
and what nothing needs of them is free at turn 0. Trees that stay have no turn, and what they name has none.
An inode is free when all of its names are, and no other name is anywhere else.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from holdfast.errors import Corrupt, NotFound
from holdfast.fs import calls
from holdfast.fs.directory import io_failure
from holdfast.fs.trees.descent import Descent, shown
from holdfast.fs.trees.homes import read_homes
from holdfast.fs.trees.layout import PAYLOAD
from holdfast.fs.trees.remnants import Need
from holdfast.fs.trees.scan import allocated
from holdfast.fs.trees.way import joined

_NEVER = 1 << 62


def freed_in_turn(going: Sequence[Path], need: Need, remnants: Iterable[Path] = ()) -> list[int]:
    """How many bytes are free once the first 0, 1, 2, ... of the trees `going` are gone. Never falls.

    `need` is what all other trees need of them, and of the remnants. Blocks that clones share count for each
    of them.
    """
    turns = _Turns()
    for turn, tree in enumerate(going, 1):
        try:
            turns.need(tree, turn)
        except Corrupt:  # what it needs does not matter once it is gone; and before that nothing is removed
            continue
    turns.need_always(need)
    freed = _Freed()
    for turn, tree in [(0, each) for each in remnants] + list(enumerate(going, 1)):
        _count(tree, turns.of(tree.name), turn, freed)
    return freed.in_turn(len(going))


class _Turns:
    """When each directory that is somebody's home is needed for the last time."""

    def __init__(self) -> None:
        self._last: defaultdict[str, dict[bytes, int]] = defaultdict(dict)

    def need(self, tree: Path, turn: int) -> None:
        """Note what a tree needs until its turn."""
        for home in read_homes(tree).values():
            last = self._last[home.tree]
            last[home.path] = max(turn, last.get(home.path, 0))

    def need_always(self, need: Need) -> None:
        """Note what is needed by trees that stay."""
        for tree, paths in need.items():
            self._last[tree].update(dict.fromkeys(paths, _NEVER))

    def of(self, tree: str) -> dict[bytes, int]:
        """The directories of a tree that others need, each with the turn until which they do."""
        return self._last.get(tree, {})


class _Freed:
    """What is free from which turn on."""

    def __init__(self) -> None:
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._inodes: dict[tuple[int, int], list[int]] = {}

    def add(self, turn: int, size: int) -> None:
        self._bytes[turn] += size

    def add_name(self, turn: int, status: os.stat_result) -> None:
        """One of the names of a file."""
        if status.st_nlink == 1:
            self.add(turn, allocated(status))
            return
        found = self._inodes.setdefault((status.st_dev, status.st_ino), [0, status.st_nlink, 0, 0])
        found[:] = found[0] + 1, found[1], max(found[2], turn), allocated(status)

    def in_turn(self, count: int) -> list[int]:
        for names, links, turn, size in self._inodes.values():
            if names >= links:
                self.add(turn, size)
        self._inodes.clear()
        return list(accumulate(self._bytes[turn] for turn in range(count + 1)))


def _count(tree: Path, needed: dict[bytes, int], turn: int, freed: _Freed) -> None:
    """Add what is in a tree. Its own turn is the first one at which anything of it can be free."""
    sizes: dict[str, int] = {}
    until: dict[str, int] = {}
    inside = len(PAYLOAD) + 1
    waiting = [""]
    try:
        with Descent(tree) as way:
            while waiting:
                path = waiting.pop()
                in_payload = path == PAYLOAD or path.startswith(f"{PAYLOAD}/")
                last = max(turn, needed.get(os.fsencode(path[inside:]), 0) if in_payload else 0)
                try:
                    sizes[path] = _count_directory(way.enter(path), path, last, waiting, freed)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise io_failure("look at", way.where(shown(path)), error) from error
                until[path] = last
    except NotFound:
        return
    for path in sorted(until, key=len, reverse=True):  # one that has another in it stays as long as that
        freed.add(until[path], sizes[path])
        above = path.rpartition("/")[0]
        if path:
            until[above] = max(until[above], until[path])


def _count_directory(here: int, path: str, turn: int, waiting: list[str], freed: _Freed) -> int:
    with calls.scandir(here) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(joined(path, entry.name))
            else:
                freed.add_name(turn, entry.stat(follow_symlinks=False))
    return allocated(calls.fstat(here))
