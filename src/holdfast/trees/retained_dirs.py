"""What is left of trees whose snapshots are gone: the directories that other trees have there.

The tree of a snapshot that goes becomes a *remnant* as a whole, and is then trimmed to what the lists of
homes of all other trees name. Of a directory that is needed all files stay, directories in it do not, and
its time stays what it is: only so is it shared again (see `intake`). To take a directory out of another one
changes that time for a moment. So the times are noted in the remnant first, and put back; who goes on after a
kill puts them back too. Without the note, nothing but the sharing is lost.

Nothing is deleted here but files that nobody needs: directories are moved into a bin, with all that is in
them, and the bin is the caller's to empty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, Failure, NotFound, Refused
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, io_failure, is_there
from holdfast.fs.mounts import mounts_beneath
from holdfast.trees.manifest import PAYLOAD, READY, Manifest, raw_entries
from holdfast.trees.remove import remove_tree
from holdfast.trees.scan import TreeWalker, allocated, joined, shown
from holdfast.trees.shared_dirs import read_shared_directories

TIMES = "times"
"""In a remnant, while it is trimmed: the times of directories that are about to lose one."""

Need = dict[str, set[bytes]]
"""Which directories of which trees are needed, by the names of the trees."""


def needed(trees: Iterable[Path], *, complete: bool = True) -> Need:
    """Which directories of others these trees need. `Corrupt` if one cannot say: then all may be needed."""
    need: Need = {}
    for tree in trees:
        for home in read_shared_directories(tree, complete=complete).values():
            need.setdefault(home.tree, set()).add(home.path)
    return need


def needed_in_the_making(trees: Iterable[Path]) -> Need:
    """The same for trees that others are about to complete.

    One that cannot say while it is not marked as complete needs nothing that its base does not need too.
    The list is there before the mark: so a list that is bad although the mark is there is read once more.
    """
    need: Need = {}
    for tree in trees:
        try:
            found = needed([tree], complete=False)
        except Corrupt:
            found = needed([tree], complete=False) if is_there(tree / READY) else {}
        for name, paths in found.items():
            need.setdefault(name, set()).update(paths)
    return need


def with_those_above(paths: Iterable[bytes]) -> set[bytes]:
    """These directories, and those on the way to them."""
    found: set[bytes] = set()
    for path in paths:
        above = path
        while above not in found:
            found.add(above)
            above = above.rpartition(b"/")[0]
    return found


# --- What a remnant has too much of -----------------------------------------------------------------


class Excess(NamedTuple):
    """What nobody needs in one directory of a remnant."""

    path: str
    files: list[str]
    directories: list[str]


def is_trimmed(remnant: Path, need: Collection[bytes]) -> bool:
    """Whether a remnant has nothing but the directories that are needed of it. Changes nothing."""
    if not need or _others(remnant):
        return False
    with TreeWalker(remnant) as way:
        return next(_excess(way, need), None) is None


def _others(remnant: Path) -> list[str]:
    """What is beside the payload: the mark first, for what follows is not complete any more."""
    with Directory.open(remnant) as directory:
        return sorted(name for name in directory.names() if name != PAYLOAD)


def _inside(path: str) -> str:
    """The path of a directory of the payload, seen from the remnant: a link in its place is refused too."""
    return f"{PAYLOAD}/{path}" if path else PAYLOAD


def _excess(way: TreeWalker, need: Collection[bytes]) -> Iterator[Excess]:
    kept = with_those_above(need)
    for path in sorted(os.fsdecode(each) for each in kept):
        is_needed = os.fsencode(path) in need
        try:
            with calls.scandir(way.enter(_inside(path))) as listed:
                entries = [(each.name, each.is_dir(follow_symlinks=False)) for each in listed]
        except (FileNotFoundError, NotADirectoryError):
            continue  # it is lost: whoever reads it tells that
        except OSError as error:
            raise io_failure("look at", shown(way.where(_inside(path))), error) from error
        files = [name for name, is_directory in entries if not is_directory and not is_needed]
        directories = [
            name
            for name, is_directory in entries
            if is_directory and os.fsencode(joined(path, name)) not in kept
        ]
        if files or directories:
            yield Excess(path, files, directories)


# --- Whether it has all that is needed --------------------------------------------------------------


def has_all(tree: Path, need: Iterable[bytes], manifest: Manifest | None) -> bool:
    """Whether a tree, or what is left of it, has these directories with all their files.

    Which files that are is known by its manifest; without one, only whether the directories are there.
    """
    try:
        with TreeWalker(tree) as way:
            return all(_has(way, path, manifest) for path in need)
    except NotFound:
        return False


def _has(way: TreeWalker, path: bytes, manifest: Manifest | None) -> bool:
    body = None if manifest is None else manifest.body(path)
    if manifest is not None and body is None:
        return False
    inside = _inside(os.fsdecode(path))
    try:
        with calls.scandir(way.enter(inside)) as listed:
            names = {os.fsencode(each.name) for each in listed}
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_failure("look at", shown(way.where(inside)), error) from error
    entries = {} if body is None else raw_entries(body)
    return all(name in names for name, raw in entries.items() if raw[:1] in (b"f", b"l"))


def readable_manifest(tree: Path) -> Manifest | None:
    """The manifest of a tree, unless it has lost it."""
    try:
        return Manifest.read(tree)
    except Failure:
        return None


# --- Trimming ---------------------------------------------------------------------------------------


class RetainedDirectories:
    """A new directory, of the file system of the remnants, into which one puts what is to be removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0

    def place(self) -> Path:
        """Where to put the next one."""
        self._count += 1
        return self._path / f"bin-{self._count}"


def trim(remnant: Path, need: Collection[bytes], bin_: RetainedDirectories) -> None:
    """Leave of a remnant the directories that are needed of it, and nothing else.

    What goes is put into the bin. A remnant in which something is
    mounted is refused. One that was interrupted is finished by the next one.
    """
    try:
        _refuse_mounts(remnant)
        if not need:
            calls.rename(remnant, bin_.place())
            return
        with TreeWalker(remnant) as way:
            _trim_payload(remnant, way, need, bin_)
        for name in _others(remnant):
            _discard(remnant, name, bin_)
    except OSError as error:
        raise io_failure("trim", shown(os.fspath(remnant)), error) from error


def _refuse_mounts(remnant: Path) -> None:
    with TreeWalker(remnant) as way:
        mounted = mounts_beneath(way.top())
    if mounted:
        raise Refused(
            f"{remnant} is not touched: something is mounted at {shown(min(mounted))} in it",
            path=os.fspath(remnant),
        )


def _trim_payload(remnant: Path, way: TreeWalker, need: Collection[bytes], bin_: RetainedDirectories) -> None:
    excess = list(_excess(way, need))
    times = _times_of(remnant, way, need, excess)
    for each in excess:
        here = way.enter(_inside(each.path))
        _make_writable(here)
        for name in each.files:
            with contextlib.suppress(FileNotFoundError):
                calls.unlink(name, dir_fd=here)
        for name in each.directories:
            _move_out(here, name, bin_.place(), Path(way.where(_inside(each.path), name)))
        _put_back(here, times.pop(each.path, None))
    for path, time in times.items():  # of one who was killed before it came to that
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _put_back(way.enter(_inside(path)), time)


def _times_of(
    remnant: Path, way: TreeWalker, need: Collection[bytes], excess: list[Excess]
) -> dict[str, int]:
    """The times that needed directories have, or had before one who was killed; noted, if there is room."""
    noted = _noted_times(remnant)
    times = {path: time for path, time in noted.items() if os.fsencode(path) in need}
    for each in excess:
        if each.directories and os.fsencode(each.path) in need:
            times.setdefault(each.path, calls.fstat(way.enter(_inside(each.path))).st_mtime_ns)
    if times.keys() - noted.keys():
        content = {os.fsencode(path).hex(): str(time) for path, time in times.items()}
        with contextlib.suppress(
            Failure
        ):  # on a full disk: it helps only after a kill, and only to save space
            durable.replace(remnant / TIMES, strictjson.encode(content))
    return times


def _noted_times(remnant: Path) -> dict[str, int]:
    try:
        found = strictjson.decode(durable.read(remnant / TIMES), source=os.fspath(remnant / TIMES))
        return {os.fsdecode(bytes.fromhex(path)): int(str(time)) for path, time in dict(found).items()}
    except (Failure, TypeError, ValueError):
        return {}


def _put_back(directory: int, time: int | None) -> None:
    if time is not None and calls.fstat(directory).st_mtime_ns != time:
        calls.utime(directory, ns=(time, time))


def _make_writable(directory: int) -> None:
    mode = calls.fstat(directory).st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with contextlib.suppress(PermissionError):  # not ours; it may be allowed all the same
            calls.chmod(directory, stat.S_IMODE(mode) | stat.S_IRWXU)


def _move_out(here: int, name: str, target: Path, where: Path) -> None:
    """Move a directory away; one that changes its parent is itself written to.

    A remnant may be a volume of its own, out of which nothing can be moved: there it is removed at once.
    """
    with contextlib.suppress(FileNotFoundError):
        status = calls.stat(name, dir_fd=here, follow_symlinks=False)
        if not status.st_mode & stat.S_IWUSR:
            calls.chmod(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=here)
        try:
            calls.rename(name, target, src_dir_fd=here)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            remove_tree(where)


def _discard(remnant: Path, name: str, bin_: RetainedDirectories) -> None:
    """What is beside the payload, of whatever kind."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(calls.stat(remnant / name, follow_symlinks=False).st_mode):
            calls.rename(remnant / name, bin_.place())
        else:
            calls.unlink(remnant / name)


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
        for home in read_shared_directories(tree).values():
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
        with TreeWalker(tree) as way:
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
