"""The explored directory: its prepared image, stable names for its inodes, and the open files of each task.

Everything here is the same in two executions if the tasks did the same. An inode is named by its first path, or by
the task that created it and a count. Descriptors are our own numbers and are never reused, so the leftovers of a
dead task cannot close another task's file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

Label = str | tuple[int, int]
"""An inode: its path in the prepared directory, or the task that created it and a count."""

FIRST_DESCRIPTOR = 1 << 30
_numbers = itertools.count(FIRST_DESCRIPTOR)


class Opened(NamedTuple):
    """The file behind one of our descriptors; `path` is for messages."""

    task: int
    real: int
    label: Label
    path: str


class Found(NamedTuple):
    """The result of a path lookup: the directories and names on the path, and the inode of the last one.

    `parent` is None if a directory on the path does not exist. `boundless` is set if the path has a symbolic
    link or `..`, so that anything may have been looked up.
    """

    looked_up: tuple[tuple[Label, str], ...]
    parent: Label | None
    label: Label | None
    status: os.stat_result | None
    boundless: bool = False


class Image:
    """A prepared directory that can be restored any number of times; hard links are preserved."""

    def __init__(self, directory: Path) -> None:
        self._entries: list[tuple[str, os.stat_result, bytes | str]] = []
        for path in sorted(directory.rglob("*")):
            status = path.lstat()
            name = path.relative_to(directory).as_posix()
            if stat.S_ISREG(status.st_mode):
                self._entries.append((name, status, path.read_bytes()))
            elif stat.S_ISLNK(status.st_mode):
                self._entries.append((name, status, str(path.readlink())))
            elif stat.S_ISDIR(status.st_mode):
                self._entries.append((name, status, ""))
            else:
                raise ValueError(f"{path} is neither a file, a directory nor a symbolic link")

    def restore(self, directory: Path) -> None:
        """Make `directory` contain the prepared content and nothing else."""
        _empty(str(directory))
        first_names: dict[int, str] = {}
        for name, status, content in self._entries:
            path = f"{directory}/{name}"
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(path)
                os.chmod(path, stat.S_IMODE(status.st_mode))
            elif isinstance(content, str):
                os.symlink(content, path)
            elif status.st_ino in first_names:
                os.link(first_names[status.st_ino], path)
            else:
                first_names[status.st_ino] = path
                _write(path, content, status)


class Tree:
    """The directory at one point of one execution."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        status = os.stat(self.root)
        self._labels: dict[tuple[int, int], Label] = {(status.st_dev, status.st_ino): ""}
        self.snapshot()

    def label(self, status: os.stat_result, path: str = "") -> Label:
        """The name of an inode; one that no call created is named by its path."""
        return self._labels.setdefault((status.st_dev, status.st_ino), path)

    def name(self, status: os.stat_result, label: Label) -> None:
        """Name an inode that has just been created; its number may have been used before."""
        self._labels[status.st_dev, status.st_ino] = label

    def holds(self, path: Any) -> bool:
        """Whether a path (not a descriptor) is in this directory, or the directory itself."""
        return self.relative(path) is not None

    def relative(self, path: Any) -> str | None:
        """A path relative to this directory; None if it is elsewhere."""
        text = os.fsdecode(path)
        if not text.startswith("/") or "/." in text:
            text = os.path.abspath(text)
        if text == self.root:
            return ""
        return text[len(self.root) + 1 :] if text.startswith(self.root + "/") else None

    def look_up(self, path: str, *, follow: bool, base: Opened | None = None) -> Found:
        """Resolve a path from the root of this tree, or from an open directory."""
        directory = None if base is None else base.real
        prefix = "" if base is not None else self.root + "/"
        label: Label = "" if base is None else base.label
        parent: Label | None = None
        status: os.stat_result | None = None
        looked_up: list[tuple[Label, str]] = []
        boundless = False
        parts = [part for part in path.split("/") if part not in ("", ".")]
        for index, part in enumerate(parts):
            looked_up.append((label, part))
            last = index == len(parts) - 1
            prefix += part
            try:
                status = os.stat(prefix, dir_fd=directory, follow_symlinks=False)
            except OSError:
                return Found(tuple(looked_up), label if last else None, None, None, boundless)
            boundless |= part == ".." or (stat.S_ISLNK(status.st_mode) and (follow or not last))
            parent, label = label, self.label(status, prefix.removeprefix(self.root + "/"))
            prefix += "/"
        return Found(tuple(looked_up), parent, label, status, boundless)

    def snapshot(self) -> tuple[object, ...]:
        """Everything in the directory: names, inodes, kinds, contents. For comparison only."""
        return tuple(self._below(self.root))

    def _below(self, directory: str) -> Iterator[tuple[object, ...]]:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            status = entry.stat(follow_symlinks=False)
            name = entry.path[len(self.root) + 1 :]
            here = (name, self.label(status, name), status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                yield here
                yield from self._below(entry.path)
            elif stat.S_ISLNK(status.st_mode):
                yield (*here, os.readlink(entry.path))
            else:
                yield (*here, _content(entry.path))


class Descriptors:
    """The open files of each task, and the locks on them. The numbers are our own."""

    def __init__(self) -> None:
        self._open: dict[int, Opened] = {}
        self._locks: dict[Label, dict[int, bool]] = {}
        self.paths: dict[int, str] = {}

    def add(self, opened: Opened) -> int:
        """Register a file that a task has opened; return its number."""
        number = next(_numbers)
        self._open[number] = opened
        self.paths[number] = opened.path
        return number

    def __getitem__(self, number: int) -> Opened:
        return self._open[number]

    def require(self, number: int) -> None:
        """Raise EBADF, as the system does, if this descriptor is not open."""
        if number not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def real(self, value: Any) -> Any:
        """The system's descriptor for one of ours; anything else unchanged."""
        return self[value].real if is_descriptor(value) else value

    def close(self, number: int) -> None:
        """Close a descriptor and release its lock."""
        opened = self[number]
        del self._open[number]
        self._locks.get(opened.label, {}).pop(number, None)
        os.close(opened.real)

    def close_all(self, task: int) -> None:
        """Close everything that a task has open, as the system does for a process that has ended."""
        for number, opened in list(self._open.items()):
            if opened.task == task:
                self.close(number)

    def lock(self, number: int, *, shared: bool) -> None:
        """Record a granted lock."""
        self._locks.setdefault(self[number].label, {})[number] = shared

    def unlock(self, number: int) -> None:
        """Record that a lock was released."""
        self._locks.get(self[number].label, {}).pop(number, None)

    def is_locked(self, number: int) -> bool:
        return number in self._locks.get(self[number].label, {})

    def locked_by(self, task: int) -> list[Label]:
        """The inodes that a task has locked."""
        return [label for label, locks in self._locks.items() if any(self[each].task == task for each in locks)]

    def lockers(self, number: int, *, shared: bool) -> list[int]:
        """The tasks whose locks conflict with one on this descriptor."""
        locks = self._locks.get(self[number].label, {})
        return [self[each].task for each, kind in locks.items() if each != number and not (kind and shared)]

    def nameless(self) -> tuple[object, ...]:
        """The open files that no longer have a name, with the content that a task could still read."""
        found: dict[Label, tuple[object, ...]] = {}
        for opened in self._open.values():
            status = os.fstat(opened.real)
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                content = found.get(opened.label, (None, None))[1]
                if sys.platform != "win32":
                    with contextlib.suppress(OSError):  # open for writing only
                        content = os.pread(opened.real, status.st_size, 0)
                found[opened.label] = (opened.label, content, status.st_size)
        return tuple(sorted(found.values(), key=repr))


def is_descriptor(value: Any) -> bool:
    """Whether this is one of our numbers for open files."""
    return type(value) is int and value >= FIRST_DESCRIPTOR


class Listing:
    """The result of `scandir`, read at the time of the call. In name order: any order is allowed."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self.names = tuple(entry.name for entry in entries)
        self._rest = iter(entries)

    @classmethod
    def made_by(cls, scan: Callable[[], Any]) -> Listing:
        with scan() as entries:
            return cls(sorted(entries, key=lambda entry: entry.name))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._rest = iter(())


def _empty(directory: str) -> None:
    with os.scandir(directory) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            _empty(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def _write(path: str, content: bytes, status: os.stat_result) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)
    os.chmod(path, stat.S_IMODE(status.st_mode))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)
