"""Which kind of file system a path is on, and whether it is a network's."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

from holdfast.errors import Failure
from holdfast.fs import calls, durable

_NETWORK = frozenset(
    "9p afpfs afs beegfs ceph cifs coda davfs davfs2 fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.juicefs "
    "fuse.rclone fuse.s3fs fuse.sshfs glusterfs gpfs lustre ncpfs nfs nfs3 nfs4 ocfs2 orangefs smb2 smb3 "
    "smbfs webdav".split()
)


def is_network(kind: str) -> bool:
    """Whether a file system of this kind is reached over a network."""
    return kind in _NETWORK


def filesystem_kind(path: str | os.PathLike[str]) -> str:
    """The kind of file system that `path` (which exists) is on, such as `ext4`; "" if unknown."""
    try:
        device = calls.stat(path).st_dev
    except OSError:
        return ""
    return _kind_of(device, os.path.abspath(os.fspath(path)))


def device_number(device: int, *, base: str = "d") -> str:
    """A device as `major:minor`, the way the kernel writes it; "" where there is no such thing."""
    if sys.platform == "win32":
        return ""
    return f"{os.major(device):{base}}:{os.minor(device):{base}}"


@functools.lru_cache(maxsize=256)
def _kind_of(device: int, path: str) -> str:
    if sys.platform == "linux":
        return _kind_on_linux(device, path)
    import psutil

    try:
        mounted = [(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]
    except (OSError, psutil.Error):
        return ""
    return _deepest(mounted, path)


def mount_point(path: str | os.PathLike[str]) -> str | None:
    """Where the file system that `path` is on has its root; Linux alone tells, others say None."""
    if sys.platform != "linux":
        return None
    try:
        wanted = device_number(calls.stat(path).st_dev)
    except OSError:
        return None
    points = [_unescaped(fields[4]) for fields, _ in _mounts() if fields[2] == wanted and fields[3] == "/"]
    return points[-1] if points else None


def _mounts() -> list[tuple[list[str], str]]:
    """The rows of the kernel's table of mounts: the fields before the kind, and the kind."""
    try:
        text = durable.read(Path("/proc/self/mountinfo")).decode("utf-8", "surrogateescape")
    except Failure:
        return []
    rows = [line.split(" - ", 1) for line in text.splitlines() if " - " in line]
    return [(left.split(), right.split()[0]) for left, right in rows]


def _kind_on_linux(device: int, path: str) -> str:
    wanted = device_number(device)
    mounts = _mounts()
    by_device = [kind for fields, kind in mounts if fields[2] == wanted]
    if by_device:
        return by_device[-1]
    return _deepest([(_unescaped(fields[4]), kind) for fields, kind in mounts], path)  # btrfs


def _deepest(mounted: list[tuple[str, str]], path: str) -> str:
    """The kind of the mount that is nearest above `path`; of equals the last, which covers the others."""
    best, kind = -1, ""
    for point, candidate in mounted:
        inside = path == point or path.startswith(point.rstrip("/\\") + os.sep)
        if inside and len(point) >= best:
            best, kind = len(point), candidate
    return kind


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mounts_beneath(directory: int) -> frozenset[str]:
    """Where below an open directory something is mounted, as paths relative to it; Linux alone tells."""
    if sys.platform != "linux":
        return frozenset()
    try:
        text = durable.read(Path("/proc/self/mountinfo")).decode("utf-8", "surrogateescape")
        top = calls.readlink(f"/proc/self/fd/{directory}").rstrip("/") + "/"
    except (Failure, OSError):
        return frozenset()
    points = (_unescaped(line.split()[4]) for line in text.splitlines() if " - " in line)
    return frozenset(point[len(top) :] for point in points if point.startswith(top))
