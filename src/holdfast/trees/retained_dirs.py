"""Retained directories: the rest of a tree whose snapshot is gone, because other trees share it.

The tree of a deleted snapshot is retained as a whole, then trimmed to the directories that the lists of all other trees
name. A needed directory keeps all its files but no subdirectories, and keeps its time: otherwise it would not be shared
again (see `capture_directories`). Moving a subdirectory out changes that time for a moment. So the times are noted in
the tree first and restored; after a kill, the next trim restores them. Without the note, only the sharing is lost.

Only files that no tree needs are deleted here: directories are moved into a trash directory, which the caller removes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, Failure, NotFound
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, entry_exists, failing_to, io_failure, parent_of
from holdfast.trees.manifest import PAYLOAD, READY, Manifest, raw_entries
from holdfast.trees.shared_dirs import read_shared_directories
from holdfast.trees.walker import TreeWalker, allocated, joined, make_writable, move_away, refuse_mounts, shown

TIMES = "times"
"""In a tree while it is trimmed: the times of directories that are about to lose a subdirectory."""

Need = dict[str, set[bytes]]
"""The needed directories of each tree, by its name."""


def needed(trees: Iterable[Path], *, complete: bool = True) -> Need:
    """The directories of others that these trees need. Raises `Corrupt` if a list is: all may be needed."""
    need: Need = {}
    for tree in trees:
        for name, path in read_shared_directories(tree, complete=complete).values():
            need.setdefault(name, set()).add(path)
    return need


def needed_by_captures(trees: Iterable[Path]) -> Need:
    """The same for trees that are being captured.

    An incomplete tree needs nothing that its base does not need too, so its damaged list is ignored. The list exists
    before `.READY`: if that exists, a damaged list is read once more.
    """
    need: Need = {}
    for tree in trees:
        try:
            found = needed([tree], complete=False)
        except Corrupt:
            found = needed([tree], complete=False) if entry_exists(tree / READY) else {}
        for name, paths in found.items():
            need.setdefault(name, set()).update(paths)
    return need


class Excess(NamedTuple):
    """The entries of one directory of a retained tree that no tree needs."""

    path: str
    files: list[str]
    directories: list[str]


def is_trimmed(tree: Path, need: Collection[bytes]) -> bool:
    """Whether a retained tree has only the needed directories. Changes nothing."""
    if not need:
        return False
    with TreeWalker(tree) as walker:
        return not _others(walker) and next(_excess(walker, need), None) is None


def _others(walker: TreeWalker) -> list[str]:
    """The names beside the payload; `.READY` first, because a trimmed tree is no longer complete."""
    here = walker.top()
    with failing_to("list", shown(walker.root)):
        return sorted(name for name in calls.listdir(here) if name != PAYLOAD)


def _inside(path: str) -> str:
    """The path of a directory of the payload, relative to the tree: a link in place of either is refused."""
    return joined(PAYLOAD, path) if path else PAYLOAD


def _list(walker: TreeWalker, path: str) -> list[tuple[str, bool]] | None:
    """The names in a directory of the payload, and whether each is a directory; None if it is missing."""
    try:
        here = walker.enter(_inside(path))
        with calls.scandir(here) as listed:
            return [(each.name, each.is_dir(follow_symlinks=False)) for each in listed]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise io_failure("examine", shown(walker.where(_inside(path))), error) from error


def _excess(walker: TreeWalker, need: Collection[bytes]) -> Iterator[Excess]:
    kept: set[bytes] = set()  # the needed directories and their parents
    for parent in need:
        while parent not in kept:
            kept.add(parent)
            parent = parent.rpartition(b"/")[0]  # noqa: PLW2901 - upwards
    for path in sorted(map(os.fsdecode, kept)):
        is_needed = os.fsencode(path) in need
        entries = _list(walker, path) or ()  # verifying a tree reports what is lost
        files = [name for name, is_directory in entries if not is_directory and not is_needed]
        below = [name for name, is_directory in entries if is_directory]
        directories = [name for name in below if os.fsencode(joined(path, name)) not in kept]
        if files or directories:
            yield Excess(path, files, directories)


def has_all(tree: Path, need: Iterable[bytes], manifest: Manifest | None) -> bool:
    """Whether a tree has these directories, with all files that the manifest (if any) names."""
    try:
        with TreeWalker(tree) as walker:
            return all(_has(walker, path, manifest) for path in need)
    except NotFound:
        return False


def _has(walker: TreeWalker, path: bytes, manifest: Manifest | None) -> bool:
    body = None if manifest is None else manifest.body(path)
    listed = None if manifest is not None and body is None else _list(walker, os.fsdecode(path))
    if listed is None:
        return False
    names = {os.fsencode(name) for name, _ in listed}
    entries = {} if body is None else raw_entries(body)
    return all(name in names for name, raw in entries.items() if raw[:1] in (b"f", b"l"))


def readable_manifest(tree: Path) -> Manifest | None:
    """The manifest of a tree; None if it is lost or damaged."""
    try:
        return Manifest.read(tree)
    except Failure:
        return None


class TrashDirectory:
    """A new directory on the filesystem of the retained trees, whose content is to be removed."""

    def __init__(self, path: Path) -> None:
        self._directory = Directory.open(path)
        self._count = 0

    def take(self, here: int, name: str, where: str = "") -> None:
        """Move an entry of an open directory here. With `where`, its path, make it movable, or remove it at once."""
        assert self._directory.fd is not None
        self._count += 1
        if where:
            move_away(here, name, self._directory.fd, f"bin-{self._count}", where)
        else:
            calls.rename(name, f"bin-{self._count}", src_dir_fd=here, dst_dir_fd=self._directory.fd)


def trim(tree: Path, need: Collection[bytes], trash: TrashDirectory) -> None:
    """Reduce a retained tree to the needed directories, and move the others into the trash.

    Refuses a tree with a mount in it. An interrupted trim is finished by the next one.
    """
    where = os.fspath(tree)
    with failing_to("trim", shown(where)), TreeWalker(tree) as walker, parent_of(where) as (above, own_name):
        top = walker.top()
        refuse_mounts(top, where, "trimmed")
        if not need:
            trash.take(above, own_name)
            return
        _trim_payload(tree, walker, need, trash)
        for name in _others(walker):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(calls.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                    trash.take(top, name)
                else:
                    calls.unlink(name, dir_fd=top)


def _trim_payload(tree: Path, walker: TreeWalker, need: Collection[bytes], trash: TrashDirectory) -> None:
    excess = list(_excess(walker, need))
    times = _note_times(tree, walker, need, excess)
    for each in excess:
        here = walker.enter(_inside(each.path))
        make_writable(here)
        for name in each.files:
            with contextlib.suppress(FileNotFoundError):
                calls.unlink(name, dir_fd=here)
        for name in each.directories:
            trash.take(here, name, walker.where(_inside(each.path), name))
        _restore_time(here, times.pop(each.path, None))
    for path, time in times.items():  # of a trim that was killed
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _restore_time(walker.enter(_inside(path)), time)


def _note_times(tree: Path, walker: TreeWalker, need: Collection[bytes], excess: list[Excess]) -> dict[str, int]:
    """Note the times of needed directories, as they were before a trim that was killed."""
    try:
        found = strictjson.decode(durable.read(tree / TIMES), source=os.fspath(tree / TIMES))
        noted = {os.fsdecode(bytes.fromhex(path)): int(str(time)) for path, time in dict(found).items()}
    except (Failure, TypeError, ValueError):
        noted = {}
    times = {path: time for path, time in noted.items() if os.fsencode(path) in need}
    for each in excess:
        if each.directories and os.fsencode(each.path) in need:
            times.setdefault(each.path, calls.fstat(walker.enter(_inside(each.path))).st_mtime_ns)
    if times.keys() - noted.keys():
        content = {os.fsencode(path).hex(): str(time) for path, time in times.items()}
        with contextlib.suppress(Failure):  # on a full disk: the note only helps to share after a kill
            durable.replace(tree / TIMES, strictjson.encode(content))
    return times


def _restore_time(here: int, time: int | None) -> None:
    if time is not None and calls.fstat(here).st_mtime_ns != time:
        calls.utime(here, ns=(time, time))


_NEVER = 1 << 62


def tree_bytes(trees: Iterable[Path]) -> int:
    """How many bytes are reclaimable by removing all of these trees, whatever other trees need of them."""
    freed = _Freed()
    for tree in trees:
        _count(tree, {}, 0, freed)
    return freed.in_turn(0)[0]


def reclaimable_sizes(trees: Sequence[Path], need: Need, retained: Iterable[Path] = ()) -> list[int]:
    """How many bytes are reclaimable by removing the first 0, 1, 2, ... of the trees. Never decreases.

    `need` is what all other trees need of them and of the retained trees. An inode counts if all its names are in the
    trees. Blocks that clones share count for each clone.
    """
    last_needed: defaultdict[str, dict[bytes, int]] = defaultdict(dict)  # the turn, by tree and path
    for turn, tree in enumerate(trees, 1):
        with contextlib.suppress(Corrupt):  # needs nothing once it is gone; before that, nothing is removed
            for name, path in read_shared_directories(tree).values():
                last_needed[name][path] = turn
    for name, paths in need.items():
        last_needed[name].update(dict.fromkeys(paths, _NEVER))
    freed = _Freed()
    for turn, tree in [(0, each) for each in retained] + list(enumerate(trees, 1)):
        _count(tree, last_needed[tree.name], turn, freed)
    return freed.in_turn(len(trees))


class _Freed:
    def __init__(self) -> None:
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._inodes: dict[tuple[int, int], list[int]] = {}

    def add(self, turn: int, size: int) -> None:
        self._bytes[turn] += size

    def add_name(self, turn: int, status: os.stat_result) -> None:
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


def _count(tree: Path, last_needed: dict[bytes, int], turn: int, freed: _Freed) -> None:
    """Add the content of a tree, nothing of which is reclaimable before its own turn."""
    sizes: dict[str, int] = {}
    until: dict[str, int] = {}
    waiting = [""]
    try:
        with TreeWalker(tree) as walker:
            while waiting:
                path = waiting.pop()
                in_payload = path == PAYLOAD or path.startswith(f"{PAYLOAD}/")
                inside = os.fsencode(path[len(PAYLOAD) + 1 :])
                last = max(turn, last_needed.get(inside, 0) if in_payload else 0)
                try:
                    here = walker.enter(path)
                    with calls.scandir(here) as entries:
                        for entry in entries:
                            if entry.is_dir(follow_symlinks=False):
                                waiting.append(joined(path, entry.name))
                            else:
                                freed.add_name(last, entry.stat(follow_symlinks=False))
                    sizes[path] = allocated(calls.fstat(here))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise io_failure("examine", walker.where(shown(path)), error) from error
                until[path] = last
    except NotFound:
        return
    for path in sorted(until, key=len, reverse=True):  # a directory stays as long as its subdirectories
        freed.add(until[path], sizes[path])
        if path:
            parent = path.rpartition("/")[0]
            until[parent] = max(until[parent], until[path])
