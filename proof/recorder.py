"""Records the changes that an operation makes to a directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from proof.disk import LIMIT, Cell, Disk, Edit, Mark, Names, Naming, Node, Step, Sync, Trace, describe
from proof.interpose import Attempt, Call


class Recorder:
    """Makes each call and records its changes.

    Files and directories are identified by inode, so they are recognised through any path or descriptor,
    even one that was opened earlier. Anything outside the directory is ignored.
    """

    def __init__(self, directory: Path) -> None:
        self._count = 0
        self._call: Call | None = None
        self._nodes: dict[int, Node] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._contents: dict[int, bytes] = {}
        self._names: Names = {}
        self._steps: list[Step] = []
        self._device = os.stat(directory).st_dev
        self._survey(directory, self._add(os.stat(directory)))
        self._first_names = {number: dict(names) for number, names in self._names.items()}

    def __call__(self, attempt: Attempt) -> Any:
        self._count += 1
        result = attempt.perform()
        note = self._NOTES.get(attempt.name)
        if note is not None:
            self._call = attempt.numbered(self._count)
            note(self, attempt, result)
        return result

    def mark(self, label: str | None) -> None:
        """Record that a part of the operation is done; None: all of it."""
        self._steps.append(Step(Mark(label), self._call))

    def trace(self) -> Trace:
        """Everything that was recorded."""
        new: Names = {number: {} for number in self._names if number not in self._first_names}
        return Trace(self._nodes, self._first_names | new, self._contents, tuple(self._steps))

    def _survey(self, directory: Path, number: int) -> None:
        for path in sorted(directory.iterdir()):
            status = path.lstat()
            known = self._number(status)  # set if the file has several names
            target = os.readlink(path) if path.is_symlink() else ""
            node = self._add(status, target) if known is None else known
            self._names[number][path.name] = node
            if node in self._names:
                self._survey(path, node)
            elif self._nodes[node].kind == stat.S_IFREG:
                self._contents[node] = path.read_bytes()

    def _add(self, status: os.stat_result, target: str = "") -> int:
        kind = stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise ValueError("only files, directories and symbolic links can be recorded")
        number = len(self._nodes)
        self._nodes[number] = Node(kind, stat.S_IMODE(status.st_mode), target)
        self._numbers[status.st_dev, status.st_ino] = number
        if kind == stat.S_IFDIR:
            self._names[number] = {}
        return number

    def _number(self, status: os.stat_result) -> int | None:
        return self._numbers.get((status.st_dev, status.st_ino))

    def _place(self, attempt: Attempt, argument: int) -> tuple[int, str] | None:
        """The directory and the name in it that an argument refers to; None if it lies outside."""
        parent, name = os.path.split(os.fsdecode(attempt.arguments[argument]).rstrip("/"))
        directory = self._number(os.stat(parent or ".", dir_fd=_descriptor(attempt, argument)))
        return None if directory is None else (directory, name)

    def _at(self, place: tuple[int, str]) -> int | None:
        return self._names[place[0]].get(place[1])

    def _name(self, *cells: Cell) -> None:
        naming = Naming(cells)
        naming.apply(self._names)
        self._steps.append(Step(naming, self._call))

    def _edit(self, descriptor: int, offset: int, data: bytes | None) -> None:
        file = self._number(os.fstat(descriptor))
        if file is not None:
            self._steps.append(Step(Edit(file, offset, data), self._call))

    def _opened(self, attempt: Attempt, descriptor: int) -> None:
        place = self._place(attempt, 0)
        if attempt.flags & os.O_CREAT and place is not None and self._at(place) is None:
            self._name(Cell(*place, None, self._add(os.fstat(descriptor))))
        elif attempt.flags & os.O_TRUNC:
            self._edit(descriptor, 0, None)

    def _written(self, attempt: Attempt, size: int) -> None:
        descriptor, content = attempt.arguments
        if self._number(os.fstat(descriptor)) is not None:
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            self._edit(descriptor, end - size, bytes(memoryview(content)[:size]))

    def _truncated(self, attempt: Attempt, _: None) -> None:
        descriptor, size = attempt.arguments
        self._edit(descriptor, size, None)

    def _cloned(self, attempt: Attempt, _: None) -> None:
        target, source = attempt.arguments
        position = os.lseek(source, 0, os.SEEK_CUR)
        os.lseek(source, 0, os.SEEK_SET)
        self._edit(target, 0, os.read(source, os.fstat(source).st_size))
        os.lseek(source, position, os.SEEK_SET)

    def _synced(self, attempt: Attempt, _: None) -> None:
        node = self._number(os.fstat(attempt.arguments[0]))
        if node is not None:
            self._steps.append(Step(Sync((node,)), self._call))

    def _synced_all(self, attempt: Attempt, _: None) -> None:
        if os.fstat(attempt.arguments[0]).st_dev == self._device:
            self._steps.append(Step(Sync(tuple(self._nodes)), self._call))

    def _made(self, attempt: Attempt, _: None, *, argument: int = 0, target: str = "") -> None:
        place = self._place(attempt, argument)
        if place is not None:
            status = os.lstat(attempt.arguments[argument], dir_fd=_descriptor(attempt, argument))
            self._name(Cell(*place, None, self._add(status, target)))

    def _symlinked(self, attempt: Attempt, _: None) -> None:
        self._made(attempt, None, argument=1, target=os.fsdecode(attempt.arguments[0]))

    def _removed(self, attempt: Attempt, _: None) -> None:
        place = self._place(attempt, 0)
        if place is not None:
            self._name(Cell(*place, self._at(place), None))

    def _linked(self, attempt: Attempt, _: None) -> None:
        source, target = self._place(attempt, 0), self._place(attempt, 1)
        if source is not None and target is not None:
            self._name(Cell(*target, None, self._at(source)))

    def _renamed(self, attempt: Attempt, _: None) -> None:
        source, target = self._place(attempt, 0), self._place(attempt, 1)
        if source is None or target is None:
            return
        node, other = self._at(source), self._at(target)
        if attempt.name == "rename_exchange":
            self._name(Cell(*source, node, other), Cell(*target, other, node))
        elif node != other:  # of two names of one inode, rename keeps both
            replacing = attempt.name != "rename_noreplace"
            self._name(Cell(*source, node, None), Cell(*target, other, node, replacing))

    def _mode_changed(self, attempt: Attempt, _: None) -> None:
        """Keep only the last mode: no promise concerns the mode that a power cut leaves."""
        path, options = attempt.arguments[0], attempt.options
        follow = options.get("follow_symlinks", True)
        status = os.stat(path, dir_fd=options.get("dir_fd"), follow_symlinks=follow)
        number = self._number(status)
        if number is not None:
            self._nodes[number] = self._nodes[number]._replace(mode=stat.S_IMODE(status.st_mode))

    def _not_modelled(self, attempt: Attempt, _: None) -> None:
        """Ignore times and extended attributes: they are not rebuilt."""

    def _refused(self, attempt: Attempt, _: None) -> None:
        raise ValueError(f"only files, directories and symbolic links can be recorded, not {attempt.name}")

    _NOTES: ClassVar[Mapping[str, Callable[[Recorder, Attempt, Any], None]]] = {
        "open": _opened,
        "write": _written,
        "ftruncate": _truncated,
        "clone": _cloned,
        "fsync": _synced,
        "sync_directory": _synced,
        "sync_filesystem": _synced_all,
        "link": _linked,
        "rename": _renamed,
        "replace": _renamed,
        "rename_noreplace": _renamed,
        "rename_exchange": _renamed,
        "unlink": _removed,
        "rmdir": _removed,
        "mkdir": _made,
        "symlink": _symlinked,
        "mknod": _made,  # raises ValueError
        "snapshot_subvolume": _refused,
        "chmod": _mode_changed,
        "chown": _mode_changed,
        "utime": _not_modelled,
        "setxattr": _not_modelled,
    }


def _descriptor(attempt: Attempt, argument: int) -> int | None:
    """The open directory in which a path argument is looked up; None: the current one."""
    options = attempt.options
    own = options.get("dst_dir_fd" if argument else "src_dir_fd")
    found: int | None = own if own is not None else options.get("dir_fd")
    return found


def verify(trace: Trace, directory: Path) -> None:
    """Raise unless the trace explains the content of the directory, that is, nothing bypassed `calls`."""
    disk = Disk(trace, LIMIT)
    for step in trace.steps:
        disk.take(step.event)
    explained, present = disk.latest(), Disk(Recorder(directory).trace(), LIMIT).latest()
    if explained != present:
        raise RuntimeError(
            "something was changed without holdfast.fs.calls, so the trace is incomplete; "
            f"by the trace: {describe(explained)}; in the directory: {describe(present)}"
        )
