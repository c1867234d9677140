"""Removing whole trees, whatever is in them, and knowing beforehand how much that frees."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import NotFound, Refused
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly, io_failure
from holdfast.fs.mounts import mounts_beneath
from holdfast.trees.scan import DIRECTORY, TreeWalker, allocated, joined, shown

_LEVELS = 256


def remove_tree(path: Path) -> bool:
    """Remove what is at `path`, with all that is in it; False if nothing was there.

    Never follows a symbolic link, and refuses a tree in which something is mounted. What is read-only is made
    writable first, as far as it is ours. A removal that was interrupted is finished by the next one.
    """
    where = os.fspath(path)
    try:
        status = calls.stat(where, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            calls.unlink(where)
            return True
        _empty(where)
        calls.rmdir(where)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise io_failure("remove", shown(where), error) from error
    return True


def _empty(where: str) -> None:
    top = _open_writable(where, None)
    try:
        mounted = mounts_beneath(top)
        if mounted:
            one = min(mounted)
            raise Refused(
                f"{shown(where)} is not removed: something is mounted at {shown(one)} in it", path=where
            )
        _empty_directory(top)
    finally:
        close_quietly(top)


def _empty_directory(top: int) -> None:
    """Remove all that is below an open directory, without going deeper than a number of levels at once.

    What lies deeper is moved up to the top first, so neither descriptors nor the stack grow with the depth.
    """
    moved = _Moved(top)
    while True:
        before = moved.count
        _empty_levels(top, moved)
        if moved.count == before:
            return


def _empty_levels(top: int, moved: _Moved) -> None:
    stack: list[tuple[int, list[str], str]] = [(top, _unlink_files(top), "")]
    try:
        while True:
            here, below, name = stack[-1]
            if below:
                child = below.pop()
                if len(stack) > _LEVELS:
                    moved.move(here, child)
                elif (inner := _enter(here, child)) is not None:
                    stack.append((inner, [], child))
                    stack[-1][1].extend(_unlink_files(inner))
                continue
            if len(stack) == 1:
                return
            stack.pop()
            close_quietly(here)
            _remove_directory(name, stack[-1][0])
    finally:
        for descriptor, _, _ in stack[1:]:
            close_quietly(descriptor)


class _Moved:
    """What was moved up to the top, in order to be removed from there."""

    def __init__(self, top: int) -> None:
        self.count = 0
        self._top = top

    def move(self, here: int, name: str) -> None:
        """Move a directory to the top, under a name that nothing has there."""
        while True:
            self.count += 1
            try:
                _make_movable(here, name)
                calls.rename(name, f".removed-{self.count}", src_dir_fd=here, dst_dir_fd=self._top)
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            else:
                return


def _unlink_files(here: int) -> list[str]:
    """Remove all that is no directory, and return the names of what is."""
    below: list[str] = []
    unlink = calls.unlink
    with calls.scandir(here) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in names:
        if is_directory:
            below.append(name)
        else:
            try:
                unlink(name, dir_fd=here)
            except FileNotFoundError:
                continue
    return below


def _enter(here: int, name: str) -> int | None:
    try:
        return _open_writable(name, here)
    except FileNotFoundError:
        return None


def _open_writable(name: str, here: int | None) -> int:
    """Open a directory in order to empty it."""
    try:
        descriptor = calls.open(name, DIRECTORY, dir_fd=here)
    except PermissionError:
        _make_writable(name, here)
        descriptor = calls.open(name, DIRECTORY, dir_fd=here)
    try:
        mode = calls.fstat(descriptor).st_mode
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(PermissionError):  # not ours; removing may be allowed all the same
                calls.chmod(descriptor, stat.S_IMODE(mode) | stat.S_IRWXU)
    except BaseException:
        close_quietly(descriptor)
        raise
    return descriptor


def _make_writable(name: str, here: int | None) -> None:
    """Of a directory that cannot even be opened; what is no directory, or a link, is left alone."""
    status = calls.stat(name, dir_fd=here, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        calls.chmod(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=here)


def _make_movable(here: int, name: str) -> None:
    """A directory that changes its parent is itself written to."""
    status = calls.stat(name, dir_fd=here, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_IWUSR:
        calls.chmod(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=here)


def _remove_directory(name: str, parent: int) -> None:
    try:
        calls.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return


def tree_bytes(trees: Iterable[Path]) -> int:
    """How many bytes on the disk become free when all of these trees are removed.

    An inode counts when all of its names are in them. Blocks that clones share count for each of them. One
    that is not there frees nothing. What others need of them is not looked at: see `freed_in_turn`.
    """
    found: dict[tuple[int, int], list[int]] = {}
    total = 0
    for tree in trees:
        total += _count(tree, found)
    return total + sum(size for names, links, size in found.values() if names >= links)


def _count(tree: Path, found: dict[tuple[int, int], list[int]]) -> int:
    """Add up what has one name; note the names of what has several."""
    total, waiting = 0, [""]
    with contextlib.suppress(NotFound), TreeWalker(tree) as way:
        while waiting:
            path = waiting.pop()
            try:
                total += _count_directory(way.enter(path), path, waiting, found)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise io_failure("look at", way.where(shown(path)), error) from error
    return total


def _count_directory(
    here: int, path: str, waiting: list[str], found: dict[tuple[int, int], list[int]]
) -> int:
    total = allocated(calls.fstat(here))
    with calls.scandir(here) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(joined(path, entry.name))
                continue
            status = entry.stat(follow_symlinks=False)
            if status.st_nlink == 1:
                total += allocated(status)
            else:
                key = (status.st_dev, status.st_ino)
                found.setdefault(key, [0, status.st_nlink, allocated(status)])[0] += 1
    return total
