"""What the file system at a place really does, found out by doing it.

Documentation and mount options tell what a file system should do; a lock that two machines both get
tells otherwise. So each ability is tried once, in a directory of its own that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, FilesystemUnsafe
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory

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


KIND = "fuse.juicefs"
SAFE_OPTIONS = "--attr-cache 0 --entry-cache 0 --dir-entry-cache 0"
"""How to mount it such that every machine sees what the others have done, at once."""

UNKNOWN = (
    "it is a JuiceFS whose settings cannot be read (only root may): if this mount remembers names, as it "
    f"does by default, locks do not help against old records (mount with {SAFE_OPTIONS})"
)
"""What to say of a mount that does not tell."""

_CONFIGS = (".config", ".jfs.config")
_OWN_INODES = 0x7FFFFFFF00000000
"""The files by which a mount tells of itself have higher inodes than any file in the volume."""
_REMEMBERED = {
    "AttrTimeout": "attr-cache",
    "EntryTimeout": "entry-cache",
    "DirEntryTimeout": "dir-entry-cache",
    "NegEntryTimeout": "negative-entry-cache",
}


class MountSettings(NamedTuple):
    """What a mount does by itself. `remembers` are its caches of names and attributes, in seconds."""

    remembers: dict[str, float]
    writes_back: bool


def settings_of(path: Path) -> MountSettings | None:
    """How the JuiceFS at `path` is mounted; None if it does not tell."""
    point = mount_point(path)
    for name in _CONFIGS if point is not None else ():
        config = Path(str(point)) / name
        try:
            if calls.stat(config, follow_symlinks=False).st_ino < _OWN_INODES:
                continue  # a file that somebody keeps there
            return _understood(strictjson.decode(durable.read(config, limit=1 << 20), source=name))
        except (OSError, Failure, AttributeError, KeyError, TypeError, ValueError):
            continue
    return None


def _understood(told: object) -> MountSettings:
    if not isinstance(told, dict):
        raise TypeError("not the settings of a mount")
    seconds = {option: float(told.get(name) or 0) / 1e9 for name, option in _REMEMBERED.items()}
    seconds["open-cache"] = float(told["Meta"].get("OpenCache") or 0) / 1e9
    seconds["readdir-cache"] = seconds["attr-cache"] if told.get("ReaddirCache") else 0.0
    remembers = {option: value for option, value in seconds.items() if value > 0}
    return MountSettings(remembers, bool(told["Chunk"].get("Writeback")))


def troubles(path: Path) -> list[str]:
    """What stands against keeping records that several machines share on this mount, in words."""
    settings = settings_of(path)
    if settings is None:
        return [UNKNOWN]
    found = []
    if settings.remembers:
        shown = ", ".join(f"{option} {value:g}s" for option, value in sorted(settings.remembers.items()))
        found.append(
            f"it is a JuiceFS mounted so that it remembers names ({shown}): what other machines have "
            f"written is seen too late (mount with {SAFE_OPTIONS})"
        )
    if settings.writes_back:
        found.append(
            "it is a JuiceFS mounted with --writeback: what was synced is lost with this machine, and other "
            "machines cannot read it until it is uploaded"
        )
    return found


class Capabilities(NamedTuple):
    """What was found out. `flock` means: between processes, held against each other, and freed again."""

    kind: str
    network: bool
    flock: bool
    link: bool
    rename_noreplace: bool
    rename_exchange: bool
    reflink: bool
    symlink: bool
    sync_directory: bool
    case_sensitive: bool
    network_troubles: tuple[str, ...] = ()
    """What is not to be trusted about it when several machines use it; see `network_troubles`."""

    def troubles(self, *, records_elsewhere: bool = False) -> list[str]:
        """What stands against keeping shared state here, in words; empty if nothing does.

        With `records_elsewhere`, a server keeps the records that machines share: only files are kept here.
        """
        found: list[str] = [] if records_elsewhere else list(self.network_troubles)
        if not self.flock:
            found.append("file locks do not exclude other processes")
        if not (self.link or self.rename_noreplace):
            found.append("a file cannot be created without the risk of overwriting another")
        if not self.sync_directory:
            found.append("names cannot be made to survive a power cut")
        return found


def find_capabilities(directory: Path) -> Capabilities:
    """Find out what the file system of `directory` (which exists and is writable) can do."""
    kind = filesystem_kind(directory)
    with _scratch(directory) as scratch:
        place = scratch.path
        durable.create_in(scratch, "a", b"content")
        return Capabilities(
            kind=kind,
            network=is_network(kind),
            flock=_excludes_processes(place / "a"),
            link=_works(lambda: calls.link(place / "a", place / "linked")),
            rename_noreplace=_renames_without_replacing(scratch),
            rename_exchange=_exchanges(scratch),
            reflink=_clones(place),
            symlink=_works(lambda: calls.symlink("a", place / "symlinked")),
            sync_directory=_works(scratch.sync),
            case_sensitive=scratch.status("A") is None,
            network_troubles=tuple(network_troubles(directory, kind)),
        )


def network_troubles(directory: Path, kind: str | None = None) -> list[str]:
    """Why records that machines share are not safe in this directory, in words; empty for local file systems.

    JuiceFS is safe if it is mounted so that it remembers nothing: its locks do reach other machines.
    """
    kind = filesystem_kind(directory) if kind is None else kind
    if kind == KIND:
        return troubles(directory)
    if is_network(kind):
        return [f"it is a network file system ({kind}): locks may not reach other machines"]
    return []


def require_safe(directory: Path, *, records_elsewhere: bool = False) -> Capabilities:
    """Probe, and refuse a file system on which the promises would not hold."""
    found = find_capabilities(directory)
    troubles = found.troubles(records_elsewhere=records_elsewhere)
    if troubles:
        raise FilesystemUnsafe(
            f"{directory} is on a file system that cannot be trusted with this: {'; '.join(troubles)}",
            path=str(directory),
            kind=found.kind,
            troubles=troubles,
        )
    return found


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Directory]:
    name = f".holdfast-probe-{os.urandom(6).hex()}"
    with Directory.open(directory) as parent:
        parent.make(name, mode=0o700)
        with parent.enter(name) as scratch:
            try:
                yield scratch
            finally:
                with calls.scandir(scratch.path) as entries:
                    names = [entry.name for entry in entries]
                for each in names:
                    durable.discard(scratch, each)
        calls.rmdir(parent.at(name), dir_fd=parent.fd)


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, NotImplementedError):
        return False
    return True


def _renames_without_replacing(scratch: Directory) -> bool:
    durable.create_in(scratch, "b", b"one")
    durable.create_in(scratch, "taken", b"two")
    try:
        calls.rename_noreplace(scratch.at("b"), scratch.at("taken"), directory=scratch.fd)
    except FileExistsError:
        return durable.read_in(scratch, "taken") == b"two"
    except OSError:
        return False
    return False


def _exchanges(scratch: Directory) -> bool:
    durable.replace_in(scratch, "c", b"one")
    durable.replace_in(scratch, "d", b"two")
    if not _works(lambda: calls.rename_exchange(scratch.at("c"), scratch.at("d"), directory=scratch.fd)):
        return False
    return durable.read_in(scratch, "c") == b"two"


def _clones(place: Path) -> bool:
    source = calls.open(place / "a", os.O_RDONLY)
    try:
        target = calls.open(place / "cloned", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            return _works(lambda: calls.clone(target, source))
        finally:
            calls.close(target)
    finally:
        calls.close(source)


_TRY_LOCK = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    if os.name == "nt":
        import msvcrt
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(42)
"""


def _excludes_processes(path: Path) -> bool:
    """Whether another process is kept out while we hold a lock, and let in afterwards."""
    fd = calls.open(path, os.O_RDWR)
    try:
        if not _works(lambda: _lock(fd)):
            return False
        while_held = _other_process_gets(path)
    finally:
        calls.close(fd)
    return not while_held and _other_process_gets(path)


def _lock(fd: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        calls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _other_process_gets(path: Path) -> bool:
    command = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)]
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0
