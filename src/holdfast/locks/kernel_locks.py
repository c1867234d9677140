"""Who holds a file lock and who waits for it, asked of the kernel itself.

Nothing is written for this into the lock file, which may be anybody's data: the kernel knows who
locked it, other programs included. Only Linux tells (/proc/locks); elsewhere the answer is None.
"""

from __future__ import annotations

import functools
import os
import signal as _signal  # noqa: F401 - what `waiting` needs, loaded here and now
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from holdfast.clock import format_duration, format_instant
from holdfast.errors import LockTimeout
from holdfast.fs import calls, lookup
from holdfast.fs import native as _native  # noqa: F401 - likewise
from holdfast.fs.probe import device_number, filesystem_kind, is_network
from holdfast.locks import identity
from holdfast.locks.flock import OpenFileDescription

MOST_BYTES = 16 << 20


class FileLockHolder(NamedTuple):
    """A process that holds, or waits for, a lock on a file. What is not known is None."""

    pid: int | None
    command: str | None
    started_at: str | None
    shared: bool
    waiting: bool

    def as_record(self) -> dict[str, object]:
        """Plain values, with a line for people under `shown`."""
        return {**self._asdict(), "shown": str(self)}

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that cannot be seen from here"
        text = f"pid {self.pid}"
        if self.command:
            text += f" ({self.command if len(self.command) <= 80 else self.command[:77] + '...'})"
        return text + (f", running since {self.started_at}" if self.started_at else "")


def find_holders(path: str | os.PathLike[str]) -> list[FileLockHolder] | None:
    """Everybody who holds or waits for a lock on the file at `path`; None if that cannot be known."""
    if sys.platform != "linux":
        return None
    try:
        status = calls.stat(path)
        flocks = _flocks()
    except OSError:
        return None
    wanted = f"{device_number(status.st_dev, base='02x')}:{status.st_ino}"
    return [_describe(fields) for fields in flocks if fields[4] == wanted]


class HeldFlock(NamedTuple):
    """A lock on a file that certain processes have: more than one, if the open file was passed on."""

    inode: str
    shared: bool
    pids: tuple[int, ...]


def inode_of(path: str | os.PathLike[str]) -> str:
    """The file at a path as the kernel names it in its list of locks; "" if there is none."""
    try:
        status = calls.stat(path, follow_symlinks=False)
    except OSError:
        return ""
    return f"{device_number(status.st_dev, base='02x')}:{status.st_ino}"


def held_flocks(inodes: Container[str]) -> list[HeldFlock]:
    """The locks that are held on these files (see `inode_of`) by processes that certainly have them.

    The kernel's list names the process that took a lock. It may be gone since, and have passed the open file
    on (that is how shells lock files), and its number may be another's by now. So those are asked that have
    the file open. Locks of which nobody can be seen are left out.
    """
    if sys.platform != "linux":
        return []
    try:
        flocks = [fields for fields in _flocks() if fields[4] in inodes and fields[-1] != "waiting"]
    except OSError:
        return []
    found = []
    for fields in flocks:
        taker = int(fields[3])
        pids = [taker] if taker > 0 and _has_lock(taker, fields[4]) else _everybody_with(fields[4])
        if pids:
            found.append(HeldFlock(fields[4], fields[2] == "READ", tuple(pids)))
    return found


def _everybody_with(inode: str) -> list[int]:
    try:
        pids = [int(name) for name in calls.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return [pid for pid in sorted(pids) if _has_lock(pid, inode)]


def _has_lock(pid: int, inode: str) -> bool:
    """Whether a process has a file open on which the lock is, not merely another opening of that file."""
    number = int(inode.rpartition(":")[2])
    try:
        names = calls.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if calls.stat(f"/proc/{pid}/fd/{name}").st_ino == number:
                told = lookup.read_small(f"/proc/{pid}/fdinfo/{name}", 1 << 16).decode("ascii", "replace")
                if any(_is_lock_on(line.split(), inode) for line in told.splitlines()):
                    return True
        except OSError:
            continue  # closed meanwhile
    return False


def _is_lock_on(fields: list[str], inode: str) -> bool:
    """`lock: 1: FLOCK ADVISORY WRITE 1234 fe:00:131 0 EOF`."""
    return fields[:1] == ["lock:"] and "FLOCK" in fields and inode in fields


def with_queue(path: str, waiting: list[FileLockHolder]) -> list[FileLockHolder]:
    """Those who wait for a lock, and then those who stand in line for it, if it is a fair one."""
    known = {each.pid for each in waiting}
    queue = [each for each in find_holders(path + ".queue") or () if each.waiting and each.pid not in known]
    return waiting + queue


def find_locked_files(root: str, directories: Iterable[str] = ()) -> list[str]:
    """The files below `root` (a real path) that somebody has locked at this moment, sorted.

    They are found among what the processes that hold locks have open, as far as this user may look into
    them; and in these `directories`, whosoever holds them.
    """
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
    """Whether a process of a process group holds a lock on any file, as far as the kernel tells."""
    if sys.platform == "win32":
        return False
    try:
        holders = {int(fields[3]) for fields in _flocks() if fields[-1] != "waiting"}
    except OSError:
        return False
    for pid in holders:
        with suppress(OSError):  # gone, or not to be seen from here
            if pid > 0 and os.getpgid(pid) == group:
                return True
    return False


def _flocks() -> list[list[str]]:
    """For each whole-file lock the fields from its kind on, and at the end whether it is waited for.

    `1: FLOCK ADVISORY WRITE 1234 fe:00:131 0 EOF`, with `->` before the kind for one who waits.
    """
    found = []
    for line in lookup.read_small("/proc/locks", MOST_BYTES).decode("ascii", "replace").splitlines():
        fields = line.split()[1:]
        waiting = fields[:1] == ["->"]
        fields = fields[1:] if waiting else fields
        if len(fields) >= 5 and fields[0] == "FLOCK":
            found.append([*fields, "waiting" if waiting else ""])
    return found


def _files_in(directory: str, inodes: Container[int]) -> Iterator[str]:
    """The files of a directory that may be those with these inodes: others are not even looked at."""
    try:
        with calls.scandir(directory) as entries:
            yield from (entry.path for entry in entries if entry.inode() in inodes)
    except OSError:
        return


def _open_files(pid: int, inodes: Container[int]) -> Iterator[str]:
    """What a process has open, if this user may know, and if it may be one of these inodes."""
    try:
        names = calls.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            link = f"/proc/{pid}/fd/{name}"
            if calls.stat(link).st_ino in inodes:
                yield calls.readlink(link)
        except OSError:
            continue  # closed meanwhile


def _describe(fields: list[str]) -> FileLockHolder:
    shared, waiting = fields[2] == "READ", fields[-1] == "waiting"
    pid = int(fields[3])
    process = identity.find_process(pid) if pid > 0 else None
    if process is None:
        return FileLockHolder(pid if pid > 0 else None, None, None, shared, waiting)
    started = format_instant(round(time.time() - identity.started_ago(process)))  # it is not known better
    return FileLockHolder(pid, identity.command_of(pid), started, shared, waiting)


def must_poll(description: OpenFileDescription) -> bool:
    """Whether a blocking wait is not to be trusted here: a network file system may not wake us."""
    return _is_on_network(description.device, description.key)


@functools.lru_cache(maxsize=64)
def _is_on_network(device: int, key: str) -> bool:
    return is_network(filesystem_kind(key))


def timeout(key: str, seconds: float) -> LockTimeout:
    """The failure of a wait that took too long, naming those who hold the lock as far as one can tell."""
    holders = [each.as_record() for each in find_holders(key) or () if not each.waiting]
    return LockTimeout(key, seconds, format_duration(seconds), holders=holders)
