"""What the file system at a place really does, found out by doing it.

Documentation and mount options tell what a file system should do; a lock that two machines both get
tells otherwise. So each ability is tried once, in a directory of its own that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import FilesystemUnsafe
from holdfast.fs import calls, durable, juicefs
from holdfast.fs.directory import Directory
from holdfast.fs.mounts import filesystem_kind, is_network


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


def probe(directory: Path) -> Capabilities:
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
    if kind == juicefs.KIND:
        return juicefs.troubles(directory)
    if is_network(kind):
        return [f"it is a network file system ({kind}): locks may not reach other machines"]
    return []


def require_safe(directory: Path, *, records_elsewhere: bool = False) -> Capabilities:
    """Probe, and refuse a file system on which the promises would not hold."""
    found = probe(directory)
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
