"""Engines: the ways to store a directory in a snapshot, and which of them work for given directories.

All produce the same payload and manifest. They differ in cost, and in whether they share blocks with the source.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import EngineUnavailable
from holdfast.fs import calls, probe
from holdfast.fs.directory import Directory, close_quietly, failing_to, is_shared, open_directly, opened, parent_of
from holdfast.fs.mounts import filesystem_kind
from holdfast.trees.manifest import KEPT_MODE, ManifestEntry, decode_entry, directory_of, raw_entries
from holdfast.trees.scan import modes_in
from holdfast.trees.walker import (
    GONE,
    NOFOLLOW,
    TreeWalker,
    joined,
    open_directory,
    remove_tree,
    shown,
    unreadable,
    writing,
)

_PROGRAM = "juicefs"
_OPEN = 0o7777 & ~KEPT_MODE
_SUBVOLUME_ROOT = 256  # the inode of every btrfs subvolume's root


class Engine(StrEnum):
    """A way to store a directory in a snapshot; the best one first."""

    JUICEFS_CLONE = "juicefs-clone"
    BTRFS_SUBVOLUME = "btrfs-subvolume"
    REFLINK = "reflink"
    LINKED = "linked"
    COPY = "copy"


def is_whole(engine: Engine) -> bool:
    """Whether an engine clones a source as a whole instead of file by file."""
    return engine in (Engine.JUICEFS_CLONE, Engine.BTRFS_SUBVOLUME)


def choose_engine(
    source: Path, beside: Path, requested: Engine | str | None = None, *, but: Engine | None = None
) -> Engine:
    """The best engine, except `but`, for snapshots of `source` that are stored in the directory `beside`.

    Each engine is tried once per process and pair of filesystems. Raises `EngineUnavailable` if the `requested` engine
    is unknown or does not work here.
    """
    places = _Places.at(source, beside)
    if requested is None:
        return next(each for each in Engine if each is not but and not _why_not(each, places))
    try:
        engine = Engine(requested)
    except ValueError:
        message = f"unknown engine {requested!r}; the engines are {', '.join(Engine)}"
        raise EngineUnavailable(message, engine=str(requested)) from None
    if why := _why_not(engine, places):
        raise _unable(engine, os.fspath(source), why)
    return engine


class _Places(NamedTuple):
    """A source and the directory of its snapshots, with their statuses and kinds of filesystems."""

    source: Path
    beside: Path
    of_source: os.stat_result
    of_beside: os.stat_result
    kinds: tuple[str, str]

    @classmethod
    def at(cls, source: Path, beside: Path) -> _Places:
        kinds = filesystem_kind(source), filesystem_kind(beside)
        return cls(source, beside, _status(source), _status(beside), kinds)

    def are_on_one_device(self) -> bool:
        return self.of_source.st_dev == self.of_beside.st_dev


def _status(directory: Path) -> os.stat_result:
    with failing_to("examine", directory):
        descriptor = open_directly(os.fspath(directory))
        try:
            return calls.fstat(descriptor)
        finally:
            close_quietly(descriptor)


_found: dict[tuple[Engine, int, str, int, str], str] = {}


def _why_not(engine: Engine, places: _Places) -> str:
    """The reason why an engine does not work here; "" if it does."""
    if engine is Engine.COPY:
        return ""
    if engine is Engine.BTRFS_SUBVOLUME and places.of_source.st_ino != _SUBVOLUME_ROOT:
        return "it is not a btrfs subvolume"
    if engine is Engine.JUICEFS_CLONE and is_shared(places.of_beside):
        return "a group shares the repository, and `juicefs clone` would follow a link that another member makes"
    kinds = places.kinds  # device numbers are reused
    key = (engine, places.of_source.st_dev, kinds[0], places.of_beside.st_dev, kinds[1])
    if key not in _found:
        _found[key] = _PROBES[engine](places)
    return _found[key]


def _juicefs(places: _Places) -> str:
    if places.kinds != (probe.JUICEFS, probe.JUICEFS):
        return "it is not on JuiceFS"
    if not places.are_on_one_device():
        return "the snapshots are on another JuiceFS"
    try:
        done = subprocess.run([_PROGRAM, "clone", "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return "the command `juicefs` was not found"
    return "" if done.returncode == 0 else "this `juicefs` has no command `clone`"


def _btrfs(places: _Places) -> str:
    if places.kinds != ("btrfs", "btrfs"):
        return "it is not on btrfs"
    name = f".holdfast-probe-{os.urandom(6).hex()}"
    with Directory.open(places.beside) as parent:
        try:
            _snapshot(os.fspath(places.source), parent, name)
        except OSError as error:
            return error.strerror or str(error)
    remove_tree(places.beside / name)
    return ""


def _reflink(places: _Places) -> str:
    both_on_btrfs = places.kinds == ("btrfs", "btrfs")  # subvolumes share blocks
    if not places.are_on_one_device() and not both_on_btrfs:
        return "the snapshots are on another filesystem"
    return "" if _works_on_two_files(places.beside, _clone) else "this filesystem cannot share blocks between files"


def _linked(places: _Places) -> str:
    return "" if _works_on_two_files(places.beside, _link) else "this filesystem has no hard links"


_PROBES = {
    Engine.JUICEFS_CLONE: _juicefs,
    Engine.BTRFS_SUBVOLUME: _btrfs,
    Engine.REFLINK: _reflink,
    Engine.LINKED: _linked,
}


def _clone(directory: int, one: str, other: str) -> None:
    with (
        opened(one, os.O_RDONLY | NOFOLLOW, dir_fd=directory) as source,
        opened(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=directory) as target,
    ):
        calls.clone(target, source)


def _link(directory: int, one: str, other: str) -> None:
    calls.link(one, other, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)


def _works_on_two_files(beside: Path, attempt: Callable[[int, str, str], None]) -> bool:
    one = f".holdfast-probe-{os.urandom(6).hex()}"
    other = f"{one}-2"
    directory = open_directory(os.fspath(beside))
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with writing(beside), opened(one, flags, 0o600, dir_fd=directory) as fresh:
            calls.write(fresh, bytes(4096))
        try:
            attempt(directory, one, other)
        except OSError:
            return False
        return True
    finally:
        for name in (one, other):
            with contextlib.suppress(OSError):
                calls.unlink(name, dir_fd=directory)
        close_quietly(directory)


_TIMED = frozenset({"ext4", "xfs", "btrfs"})


def cleans_each_file(source: str | Path) -> bool:
    """Whether `start_writing` cleans the pages of a file; an overlay, for example, ignores it."""
    return sys.platform == "linux" and filesystem_kind(source) in _TIMED


def times_tell(source: Path, beside: Path) -> bool:
    """Whether a write to a file of `source` that was synced before always changes its times.

    On tmpfs, writes through a mapping do not. Unknown filesystems are tried in the directory `beside`; if that is on
    another filesystem, the times are not trusted.
    """
    with failing_to("examine", source):
        if filesystem_kind(source) in _TIMED:
            return True
        if _status(source).st_dev != _status(beside).st_dev:
            return False
    return _shows_mapped_writes(beside)


def _shows_mapped_writes(beside: Path) -> bool:
    probing = beside / f".holdfast-probe-{os.urandom(6).hex()}"
    with contextlib.suppress(OSError), parent_of(probing) as (here, name):
        try:
            with opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=here) as descriptor:
                calls.write(descriptor, b"x")
                calls.utime(descriptor, ns=(0, 0))
                calls.write_mapped(descriptor)
                if calls.fstat(descriptor).st_mtime_ns == 0:
                    calls.fsync(descriptor)
                return calls.fstat(descriptor).st_mtime_ns != 0
        finally:
            calls.unlink(name, dir_fd=here)
    return False


def clone_whole(engine: Engine, source: str, payload: str) -> None:
    """Make the new directory `payload` a clone of `source`."""
    if engine is not Engine.BTRFS_SUBVOLUME:
        clone_directory(source, payload)
        return
    parent, name = os.path.split(payload)
    with Directory.open(parent) as directory, writing(payload):
        _snapshot(source, directory, name)


def _snapshot(source: str, parent: Directory, name: str) -> None:
    if parent.fd is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    descriptor = open_directory(source)
    try:
        calls.snapshot_subvolume(parent.fd, os.fsencode(name), descriptor)
    finally:
        close_quietly(descriptor)


def clone_directory(source: str, payload: str) -> None:
    """Clone with `juicefs clone`, and restore the hard links.

    That command takes paths: before it starts and after it ends, no link leads to either.
    Raises `EngineUnavailable` if it fails: for example, JuiceFS on a SQL database rejects empty extended attributes.
    """
    command = [_PROGRAM, "clone", "--preserve", source, payload]
    for each in (source, os.path.dirname(payload)):
        close_quietly(open_directory(each))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", check=False)
    except OSError as error:
        raise _unable(Engine.JUICEFS_CLONE, source, f"cannot run `{_PROGRAM}`: {error.strerror}") from error
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        why = f"`juicefs clone` ended with status {done.returncode}: {output[0]}"
        raise _unable(Engine.JUICEFS_CLONE, source, why)
    with TreeWalker(source) as walker, TreeWalker(payload) as one, TreeWalker(payload) as other:
        for (first_path, first), *others in _hard_links(walker):
            for path, name in others:
                with writing(other.where(path, name)):
                    try:
                        _link_again(one.enter(first_path), first, other.enter(path), name)
                    except OSError as error:
                        if error.errno not in GONE:  # the check for changes finds files that are gone
                            raise


def _unable(engine: Engine, source: str, why: str) -> EngineUnavailable:
    message = f"the engine {engine} cannot be used for {shown(source)}: {why}"
    return EngineUnavailable(message, engine=str(engine), reason=why)


def _hard_links(walker: TreeWalker) -> list[list[tuple[str, str]]]:
    """For each file with several names below the root, the directory and name of each."""
    found: dict[int, list[tuple[str, str]]] = {}
    waiting = [""]
    while waiting:
        path = waiting.pop()
        try:
            here = walker.enter(path)
            entries = [(name, calls.stat(name, dir_fd=here, follow_symlinks=False)) for name in calls.listdir(here)]
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(walker.where(path), error) from error
            continue
        waiting += [joined(path, name) for name, status in entries if stat.S_ISDIR(status.st_mode)]
        for name, status in entries:
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                found.setdefault(status.st_ino, []).append((path, name))
    return [names for names in found.values() if len(names) > 1]


def _link_again(first_directory: int, first: str, here: int, name: str) -> None:
    """Make two equal files of the clone one file; the directory keeps its mode and times."""
    one = calls.stat(first, dir_fd=first_directory, follow_symlinks=False)
    other = calls.stat(name, dir_fd=here, follow_symlinks=False)
    if (one.st_size, one.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
        return  # the file changed while the source was cloned
    before = calls.fstat(here)
    writable = before.st_mode & stat.S_IWUSR
    if not writable:
        calls.chmod(here, stat.S_IMODE(before.st_mode) | stat.S_IRWXU)
    calls.unlink(name, dir_fd=here)
    calls.link(first, name, src_dir_fd=first_directory, dst_dir_fd=here, follow_symlinks=False)
    if not writable:
        calls.chmod(here, stat.S_IMODE(before.st_mode))
    calls.utime(here, ns=(before.st_atime_ns, before.st_mtime_ns))


def close_clone(clone: TreeWalker, identities: Iterable[tuple[str, bytes]]) -> None:
    """Let only the owners write to the files and directories of a clone, which have these identities.

    Entries of other users stay as they are, unless this user is root.
    """
    for path, identity in identities:
        for name, mode in modes_in(identity).items():
            if mode & _OPEN and not stat.S_ISLNK(mode):
                here = clone.enter(path)
                with contextlib.suppress(PermissionError):
                    calls.chmod(name or here, mode & KEPT_MODE, dir_fd=here if name else None)


def differing(clone: TreeWalker, records: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """The paths at which a clone differs from these manifest records in a field that stat reports."""
    bodies = dict(records)
    return [
        shown(os.fsdecode(path))
        for directory, body in bodies.items()
        if directory_of(directory, body).kind == "d"
        for path in _differing_in(clone, directory, raw_entries(body), bodies)
    ]


def _differing_in(
    clone: TreeWalker, directory: bytes, entries: Mapping[bytes, bytes], bodies: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    try:
        here = clone.enter(os.fsdecode(directory))
        present = {os.fsencode(name) for name in calls.listdir(here)}
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(clone.where(os.fsdecode(directory)), error) from error
        yield directory
        return
    start = directory + b"/" if directory else b""
    yield from (start + name for name in present - entries.keys() if start + name not in bodies)
    for name, raw in entries.items():
        entry = decode_entry(directory, raw)
        if entry.kind in "fl" and not _matches(here, os.fsdecode(name), entry):
            yield entry.path


def _matches(here: int, name: str, entry: ManifestEntry) -> bool:
    try:
        status = calls.stat(name, dir_fd=here, follow_symlinks=False)
        if entry.kind == "l":
            return stat.S_ISLNK(status.st_mode) and os.fsencode(calls.readlink(name, dir_fd=here)) == entry.target
    except OSError as error:
        if error.errno not in (*GONE, errno.EINVAL):
            raise unreadable(name, error) from error
        return False
    found = (stat.S_IMODE(status.st_mode), status.st_size, status.st_mtime_ns)
    return stat.S_ISREG(status.st_mode) and found == (entry.mode, entry.size, entry.mtime_ns)
