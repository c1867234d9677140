"""The mounts of this system: the kind of filesystem behind a path, and the mounts below a directory."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import NamedTuple

from holdfast.fs import calls

_MOUNTINFO = "/proc/self/mountinfo"
_MOST_BYTES = 16 << 20
_NETWORK = frozenset(
    "9p afpfs afs beegfs ceph cifs coda davfs davfs2 fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.juicefs "
    "fuse.rclone fuse.s3fs fuse.sshfs glusterfs gpfs lustre ncpfs nfs nfs3 nfs4 ocfs2 orangefs smb2 smb3 "
    "smbfs webdav".split()
)


class _Mount(NamedTuple):
    device: str
    root: str
    point: str
    kind: str


def is_network(kind: str) -> bool:
    return kind in _NETWORK


def keeps_order(directory: str | os.PathLike[str]) -> bool:
    """Whether a power cut that leaves a new name in a directory also leaves those that were made there before: its
    filesystem has one journal, for all names. (btrfs logs some files ahead of others.)"""
    kind = filesystem_kind(directory)
    return kind == "xfs" or (kind in ("ext3", "ext4") and _has_journal(directory))


def _has_journal(directory: str | os.PathLike[str]) -> bool:
    """Whether an ext filesystem certainly has a journal of its own. Images of virtual machines are often made without
    one."""
    try:
        device = os.path.basename(calls.readlink(f"/sys/dev/block/{device_number(calls.stat(directory).st_dev)}"))
    except OSError:
        return False
    return calls.exists(f"/proc/fs/jbd2/{device}-8")


def filesystem_kind(path: str | os.PathLike[str]) -> str:
    """The kind of filesystem that `path` is on, such as `ext4`; "" if unknown."""
    try:
        device = calls.stat(path).st_dev
    except OSError:
        return ""
    return _kind_of(device, os.path.abspath(os.fspath(path)))


def device_number(device: int, *, base: str = "d") -> str:
    """A device as `major:minor`, the kernel's notation; "" on Windows, which has none."""
    if sys.platform == "win32":
        return ""
    return f"{os.major(device):{base}}:{os.minor(device):{base}}"


def mount_point(path: str | os.PathLike[str]) -> str | None:
    """The root of the filesystem of `path`; None if unknown."""
    try:
        device = device_number(calls.stat(path).st_dev)
    except OSError:
        return None
    return next((each.point for each in reversed(_mounts()) if (each.device, each.root) == (device, "/")), None)


def mounts_beneath(directory: int) -> frozenset[str]:
    """The mount points below an open directory, relative to it; empty if unknown."""
    try:
        mounts, top = _mounts(), calls.readlink(f"/proc/self/fd/{directory}").rstrip("/") + "/"
    except OSError:
        return frozenset()
    return frozenset(each.point[len(top) :] for each in mounts if each.point.startswith(top))


@functools.lru_cache(maxsize=256)
def _kind_of(device: int, path: str) -> str:
    if sys.platform == "linux":
        mounts, number = _mounts(), device_number(device)
        kinds = [each.kind for each in mounts if each.device == number]
        # Files of a btrfs subvolume have a device number that no mount has.
        return kinds[-1] if kinds else _deepest([(each.point, each.kind) for each in mounts], path)
    import psutil

    try:
        return _deepest([(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)], path)
    except (OSError, psutil.Error):
        return ""


def _deepest(mounted: list[tuple[str, str]], path: str) -> str:
    """The kind of the mount nearest above `path`; of several at one point, the last, which covers the others."""
    best, kind = -1, ""
    for point, candidate in mounted:
        inside = path == point or path.startswith(point.rstrip("/\\") + os.sep)
        if inside and len(point) >= best:
            best, kind = len(point), candidate
    return kind


def _mounts() -> list[_Mount]:
    """The kernel's table of mounts; empty if it cannot be read."""
    try:
        text = calls.read_small(_MOUNTINFO, _MOST_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        if separator:
            fields = before.split()
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            found.append(_Mount(fields[2], fields[3], point, after.split()[0]))
    return found
