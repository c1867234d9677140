"""The holders and waiters of file locks, as the kernel lists them.

A locked file, which may be any file, does not record its holders. The kernel knows them, even those in other programs.
Only Linux lists locks (/proc/locks); on other systems the holders are unknown.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from holdfast.clock import format_ago, format_duration, format_instant
from holdfast.errors import Failure, LockTimeout
from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.fs.mounts import device_number, filesystem_kind, is_network
from holdfast.locks import identity
from holdfast.locks.flock import OpenFileDescription

MOST_BYTES = 16 << 20


class FileLockHolder(NamedTuple):
    """A process that holds or waits for a lock on a file; unknown fields are None."""

    pid: int | None
    command: str | None
    started_at: str | None
    shared: bool
    waiting: bool

    def as_record(self) -> dict[str, object]:
        """The fields as JSON values, with a readable description under `shown`."""
        return {**self._asdict(), "shown": str(self)}

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that cannot be seen from here"
        text = f"pid {self.pid}"
        if self.command:
            text += f" ({self.command if len(self.command) <= 80 else self.command[:77] + '...'})"
        return text + (f", started {format_ago(self.started_at)}" if self.started_at else "")


def find_holders(path: str | os.PathLike[str]) -> list[FileLockHolder] | None:
    """The holders and waiters of the lock on the file at `path`; None if they are unknown."""
    if sys.platform != "linux":
        return None
    try:
        inode = _inode(calls.stat(path))
        return [_describe(fields) for fields in _flocks() if fields[4] == inode]
    except OSError:
        return None


class HeldFlock(NamedTuple):
    """A lock on a file, and the processes that hold it: several, if the open file was inherited."""

    inode: str
    shared: bool
    pids: tuple[int, ...]


def inode_of(path: str | os.PathLike[str]) -> str:
    """The file at a path as the kernel's list of locks names it; "" if it does not exist."""
    try:
        return _inode(calls.stat(path, follow_symlinks=False))
    except OSError:
        return ""


def _inode(status: os.stat_result) -> str:
    return f"{device_number(status.st_dev, base='02x')}:{status.st_ino}"


def held_flocks(inodes: Container[str]) -> list[HeldFlock]:
    """The locks on these files (see `inode_of`) whose holders are certain.

    The kernel lists the process that took a lock. That process may have passed the open file on and ended (shells lock
    files that way), and its pid may have been reused. So the holders are the processes that have the locked file
    description open. Locks without a visible holder are left out.
    """
    if sys.platform != "linux":
        return []
    try:
        flocks = [fields for fields in _flocks() if fields[4] in inodes and fields[-1] != "waiting"]
        flocks = [*dict.fromkeys(flocks)]  # read page by page: a lock may appear twice if others come and go
    except OSError:
        return []
    found = []
    for fields in flocks:
        taker = int(fields[3])
        pids = [taker] if taker > 0 and _has_lock(taker, fields[4]) else _all_with_lock(fields[4])
        if pids:
            found.append(HeldFlock(fields[4], fields[2] == "READ", tuple(pids)))
    return found


def _all_with_lock(inode: str) -> list[int]:
    try:
        pids = [int(name) for name in calls.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return [pid for pid in sorted(pids) if _has_lock(pid, inode)]


def _has_lock(pid: int, inode: str) -> bool:
    """Whether a process has the locked file description open, not merely another description of the same file."""
    for name in _descriptors(pid, {int(inode.rpartition(":")[2])}):
        with suppress(OSError):  # closed in the meantime
            text = calls.read_small(f"/proc/{pid}/fdinfo/{name}", 1 << 16).decode("ascii", "replace")
            # `lock: 1: FLOCK ADVISORY WRITE 1234 fe:00:131 0 EOF`
            lines = (line.split() for line in text.splitlines() if line.startswith("lock:"))
            if any("FLOCK" in fields and inode in fields for fields in lines):
                return True
    return False


def with_queue(path: str, waiting: list[FileLockHolder]) -> list[FileLockHolder]:
    """The `waiting` processes, followed by those in the queue of a fair lock."""
    known = {each.pid for each in waiting}
    return waiting + [each for each in find_holders(path + ".queue") or () if each.waiting and each.pid not in known]


def find_locked_files(root: str, directories: Iterable[str] = ()) -> list[str]:
    """The locked files, sorted: those in `directories`, and those below `root` (a real path) that a lock holder visible
    to this user has open."""
    if sys.platform != "linux":
        return []
    try:
        flocks = _flocks()
    except OSError:
        return []
    inodes = {int(fields[4].rpartition(":")[2]) for fields in flocks}
    candidates = {path for each in directories for path in _files_in(each, inodes)}
    for pid in {int(fields[3]) for fields in flocks if int(fields[3]) > 0}:
        candidates.update(path for path in _open_files(pid, inodes) if path.startswith(root + "/"))
    return sorted(each for each in candidates if find_holders(each))


def is_holding(group: int) -> bool:
    """Whether any process in a process group is known to hold a file lock."""
    if sys.platform == "win32":
        return False
    try:
        holders = {int(fields[3]) for fields in _flocks() if fields[-1] != "waiting"}
    except OSError:
        return False
    for pid in holders:
        with suppress(OSError):  # gone, or not visible from here
            if pid > 0 and os.getpgid(pid) == group:
                return True
    return False


def _flocks() -> list[tuple[str, ...]]:
    """The fields of each flock, from its kind on, then "waiting" for a waiter or "". A line of the kernel's list is
    `1: FLOCK ADVISORY WRITE 1234 fe:00:131 0 EOF`; a waiter has `->` before the kind."""
    found = []
    for line in calls.read_small("/proc/locks", MOST_BYTES).decode("ascii", "replace").splitlines():
        fields = line.split()[1:]
        waiting = fields[:1] == ["->"]
        fields = fields[1:] if waiting else fields
        if len(fields) >= 5 and fields[0] == "FLOCK":
            found.append((*fields, "waiting" if waiting else ""))
    return found


def _files_in(directory: str, inodes: Container[int]) -> Iterator[str]:
    with suppress(Failure, OSError), Directory.open(directory) as here, calls.scandir(here.fd) as entries:
        yield from (here.where(entry.name) for entry in entries if entry.inode() in inodes)


def _open_files(pid: int, inodes: Container[int]) -> Iterator[str]:
    """The open files of a process that may have these inodes, as far as this user may see them."""
    for name in _descriptors(pid, inodes):
        with suppress(OSError):  # closed in the meantime
            yield calls.readlink(f"/proc/{pid}/fd/{name}")


def _descriptors(pid: int, inodes: Container[int]) -> Iterator[str]:
    names: list[str] = []
    with suppress(OSError):
        names = calls.listdir(f"/proc/{pid}/fd")
    for name in names:
        with suppress(OSError):
            if calls.stat(f"/proc/{pid}/fd/{name}").st_ino in inodes:
                yield name


def _describe(fields: tuple[str, ...]) -> FileLockHolder:
    shared, waiting = fields[2] == "READ", fields[-1] == "waiting"
    pid = int(fields[3])
    process = identity.find_process(pid) if pid > 0 else None
    if process is None:
        return FileLockHolder(pid if pid > 0 else None, None, None, shared, waiting)
    started = format_instant(round(time.time() - identity.started_ago(process)))  # to the second
    return FileLockHolder(pid, identity.command_of(pid), started, shared, waiting)


def must_poll(description: OpenFileDescription) -> bool:
    """Whether a blocking wait is unreliable: a network filesystem may not wake the waiter."""
    return _is_on_network(description.device, description.key)


@functools.lru_cache(maxsize=64)
def _is_on_network(device: int, key: str) -> bool:
    return is_network(filesystem_kind(key))


def timeout(key: str, seconds: float) -> LockTimeout:
    holders = [each.as_record() for each in find_holders(key) or () if not each.waiting]
    return LockTimeout(key, seconds, format_duration(seconds), holders=holders)
