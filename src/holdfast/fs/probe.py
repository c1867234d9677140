"""Probes of what the filesystem of a directory really does.

Documentation and mount options say what a filesystem should do; two machines that both get a lock say otherwise. So
each ability is tried once, in a scratch directory that is then removed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import format_duration
from holdfast.errors import Failure, FilesystemUnsafe
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, failing_to, opened
from holdfast.fs.mounts import filesystem_kind, is_network, mount_point

JUICEFS = "fuse.juicefs"
SAFE_OPTIONS = "--attr-cache 0 --entry-cache 0 --dir-entry-cache 0"
"""Mount options with which every machine of a JuiceFS sees the others' writes at once."""
JUICEFS_UNKNOWN = (
    "it is a JuiceFS whose settings cannot be read (only root may): if this mount caches names, as it "
    f"does by default, machines may read stale records in spite of locks (mount with {SAFE_OPTIONS})"
)
"""The problem to report for a JuiceFS mount whose settings are unknown."""

_CONFIGS = (".config", ".jfs.config")
_OWN_INODES = 0x7FFFFFFF00000000
"""A mount's own virtual files have higher inodes than any file in the volume."""
_CACHES = {
    "AttrTimeout": "attr-cache",
    "EntryTimeout": "entry-cache",
    "DirEntryTimeout": "dir-entry-cache",
    "NegEntryTimeout": "negative-entry-cache",
}


class MountSettings(NamedTuple):
    """How a JuiceFS is mounted. `remembers` maps its caches of names and attributes to seconds."""

    remembers: dict[str, float]
    writes_back: bool


def settings_of(path: Path) -> MountSettings | None:
    """How the JuiceFS at `path` is mounted; None if it does not report that."""
    point = mount_point(path)
    for name in _CONFIGS if point is not None else ():
        config = Path(str(point)) / name
        try:
            if calls.stat(config, follow_symlinks=False).st_ino < _OWN_INODES:
                continue  # a user's file of the same name
            found = strictjson.decode(durable.read(config, limit=1 << 20), source=name)
            seconds = {option: float(found.get(key) or 0) / 1e9 for key, option in _CACHES.items()}
            seconds["open-cache"] = float(found["Meta"].get("OpenCache") or 0) / 1e9
            seconds["readdir-cache"] = seconds["attr-cache"] if found.get("ReaddirCache") else 0.0
            remembers = {option: value for option, value in seconds.items() if value > 0}
            return MountSettings(remembers, bool(found["Chunk"].get("Writeback")))
        except (OSError, Failure, AttributeError, KeyError, TypeError, ValueError):
            continue
    return None


def network_problems(directory: Path, kind: str | None = None) -> list[str]:
    """Why records that several machines share are not safe in `directory`; empty on local filesystems.

    JuiceFS is safe if it is mounted without caches: its locks do reach other machines.
    """
    kind = filesystem_kind(directory) if kind is None else kind
    if kind != JUICEFS:
        problem = f"it is a network filesystem ({kind}): locks may not reach other machines"
        return [problem] if is_network(kind) else []
    settings = settings_of(directory)
    if settings is None:
        return [JUICEFS_UNKNOWN]
    found = []
    if settings.remembers:
        caches = ", ".join(f"{option} {format_duration(value)}" for option, value in sorted(settings.remembers.items()))
        found.append(
            f"it is a JuiceFS mounted with caches of names ({caches}): other machines' writes are seen too "
            f"late (mount with {SAFE_OPTIONS})"
        )
    if settings.writes_back:
        found.append(
            "it is a JuiceFS mounted with --writeback: synced data is lost with this machine, and other "
            "machines cannot read it until it is uploaded"
        )
    return found


class Capabilities(NamedTuple):
    """The features of a filesystem. `flock`: a lock excludes other processes, and they get it after its release."""

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

    def troubles(self, *, records_elsewhere: bool = False) -> list[str]:
        """Why shared state is not safe here; with `records_elsewhere`, a server keeps the shared records."""
        found: list[str] = [] if records_elsewhere else list(self.network_troubles)
        if not self.flock:
            found.append("file locks do not exclude other processes")
        if not (self.link or self.rename_noreplace):
            found.append("a file cannot be created without the risk of overwriting another")
        if not self.sync_directory:
            found.append("names cannot be made to survive a power cut")
        return found


def find_capabilities(directory: Path) -> Capabilities:
    """Probe the filesystem of `directory`, which must be writable."""
    kind = filesystem_kind(directory)
    with failing_to("probe the filesystem of", directory), _scratch(directory) as scratch:
        at = scratch.at
        durable.create_in(scratch, "a", b"content")
        return Capabilities(
            kind=kind,
            network=is_network(kind),
            flock=_excludes_processes(scratch),
            link=_works(lambda: calls.link(at("a"), at("linked"), src_dir_fd=scratch.fd, dst_dir_fd=scratch.fd)),
            rename_noreplace=_renames_without_replacing(scratch),
            rename_exchange=_exchanges(scratch),
            reflink=_clones(scratch),
            symlink=_works(lambda: calls.symlink("a", at("symlinked"), dir_fd=scratch.fd)),
            sync_directory=_works(scratch.sync),
            case_sensitive=scratch.status("A") is None,
            network_troubles=tuple(network_problems(directory, kind)),
        )


def require_safe(directory: Path, *, records_elsewhere: bool = False) -> Capabilities:
    """Probe the filesystem of `directory`; raise `FilesystemUnsafe` if shared state is not safe there."""
    found = find_capabilities(directory)
    if problems := found.troubles(records_elsewhere=records_elsewhere):
        message = f"the filesystem of {directory} is not safe: {'; '.join(problems)}"
        raise FilesystemUnsafe(message, path=str(directory), kind=found.kind, troubles=problems)
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
                for each in scratch.names():
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
    with contextlib.suppress(OSError):
        try:
            fd = scratch.fd
            calls.rename_noreplace(scratch.at("b"), scratch.at("taken"), src_dir_fd=fd, dst_dir_fd=fd)
        except FileExistsError:
            return durable.read_in(scratch, "taken") == b"two"
    return False


def _exchanges(scratch: Directory) -> bool:
    durable.replace_in(scratch, "c", b"one")
    durable.replace_in(scratch, "d", b"two")
    at, fd = scratch.at, scratch.fd
    if not _works(lambda: calls.rename_exchange(at("c"), at("d"), src_dir_fd=fd, dst_dir_fd=fd)):
        return False
    return durable.read_in(scratch, "c") == b"two"


def _clones(scratch: Directory) -> bool:
    with (
        opened(scratch.at("a"), os.O_RDONLY, dir_fd=scratch.fd) as source,
        opened(scratch.at("cloned"), os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=scratch.fd) as target,
    ):
        return _works(lambda: calls.clone(target, source))


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


def _excludes_processes(scratch: Directory) -> bool:
    """Whether a lock keeps another process out, and that process gets it after its release."""
    path = scratch.path / "a"
    with opened(scratch.at("a"), os.O_RDWR, dir_fd=scratch.fd) as fd:
        if not _works(lambda: _lock(fd)) or _other_process_gets(path):
            return False
        _unlock(fd)  # closing is not enough: a process that another thread is starting may have the descriptor too
    return _other_process_gets(path)


def _lock(fd: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        calls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(fd: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
    else:
        import fcntl

        calls.flock(fd, fcntl.LOCK_UN)


def _other_process_gets(path: Path) -> bool:
    command = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)]
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0
