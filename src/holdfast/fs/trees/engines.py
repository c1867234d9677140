"""The ways to put a directory into a snapshot, and which of them work at a place.

All give the same payload and the same manifest. They differ in what they cost, and `reflink` and the
engines that clone all at once also in what they share with the source.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from holdfast.errors import EngineUnavailable, IoFailure
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly
from holdfast.fs.probe import filesystem_kind
from holdfast.fs.trees.descent import open_directory, unwritable

_SUBVOLUME_ROOT = 256  # the inode of every btrfs subvolume's root


class Engine(StrEnum):
    """How a directory gets into a snapshot."""

    JUICEFS_CLONE = "juicefs-clone"
    BTRFS_SUBVOLUME = "btrfs-subvolume"
    REFLINK = "reflink"
    LINKED = "linked"
    COPY = "copy"


def is_whole(engine: Engine) -> bool:
    """Whether an engine clones a source in one step, and not file by file."""
    return engine in (Engine.JUICEFS_CLONE, Engine.BTRFS_SUBVOLUME)


def choose_engine(
    source: Path, beside: Path, wanted: Engine | str | None = None, *, but: Engine | None = None
) -> Engine:
    """The best engine, `but` for one, for snapshots of `source` that are kept in the directory `beside`.

    Found out by trying, once per process and pair of file systems. A `wanted` engine that does not work
    here, or that nobody knows, is `EngineUnavailable`.
    """
    if wanted is not None:
        return _require(wanted, source, beside)
    return next(engine for engine in Engine if engine is not but and not _why_not(engine, source, beside))


def _require(wanted: Engine | str, source: Path, beside: Path) -> Engine:
    try:
        engine = Engine(wanted)
    except ValueError:
        known = ", ".join(Engine)
        raise EngineUnavailable(
            f"there is no engine {wanted!r}; known are {known}", engine=str(wanted)
        ) from None
    why = _why_not(engine, source, beside)
    if why:
        raise EngineUnavailable(
            f"the engine {engine} cannot be used for {source}: {why}", engine=str(engine), reason=why
        )
    return engine


_found: dict[tuple[Engine, int, str, int, str], str] = {}


def _why_not(engine: Engine, source: Path, beside: Path) -> str:
    """Why an engine does not work here; "" if it does."""
    if engine is Engine.COPY:
        return ""
    try:
        from_status, to_status = calls.stat(source), calls.stat(beside)
    except OSError as error:
        raise IoFailure("look at", source, error) from error
    if engine is Engine.BTRFS_SUBVOLUME and from_status.st_ino != _SUBVOLUME_ROOT:
        return "it is not a btrfs subvolume"
    kinds = filesystem_kind(source), filesystem_kind(beside)  # numbers of devices are given again
    key = (engine, from_status.st_dev, kinds[0], to_status.st_dev, kinds[1])
    if key not in _found:
        _found[key] = _PROBES[engine](source, beside)
    return _found[key]


# --- Probes -----------------------------------------------------------------------------------------


def _juicefs(source: Path, beside: Path) -> str:
    from holdfast.fs.trees.juicefs_clone import why_not

    return why_not(source, beside)


def _btrfs(source: Path, beside: Path) -> str:
    if filesystem_kind(source) != "btrfs" or filesystem_kind(beside) != "btrfs":
        return "it is not on btrfs"
    place = f".holdfast-probe-{os.urandom(6).hex()}"
    why = ""
    with Directory.open(beside) as parent:
        try:
            _snapshot(os.fspath(source), parent, place)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            from holdfast.fs.trees.removal import remove_tree

            remove_tree(beside / place)
    return why


def _reflink(source: Path, beside: Path) -> str:
    both_on_btrfs = filesystem_kind(source) == filesystem_kind(beside) == "btrfs"
    if (
        calls.stat(source).st_dev != calls.stat(beside).st_dev and not both_on_btrfs
    ):  # subvolumes share blocks
        return "the snapshots are on another file system"
    return "" if _try_with_two_files(beside, _clone) else "this file system cannot share blocks between files"


def _linked(source: Path, beside: Path) -> str:
    return "" if _try_with_two_files(beside, _link) else "this file system has no hard links"


_PROBES = {
    Engine.JUICEFS_CLONE: _juicefs,
    Engine.BTRFS_SUBVOLUME: _btrfs,
    Engine.REFLINK: _reflink,
    Engine.LINKED: _linked,
}


def _clone(directory: int, one: str, other: str) -> None:
    source = calls.open(one, os.O_RDONLY, dir_fd=directory)
    try:
        target = calls.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=directory)
        try:
            calls.clone(target, source)
        finally:
            calls.close(target)
    finally:
        close_quietly(source)


def _link(directory: int, one: str, other: str) -> None:
    calls.link(one, other, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)


def _try_with_two_files(place: Path, attempt: Callable[[int, str, str], None]) -> bool:
    one = f".holdfast-probe-{os.urandom(6).hex()}"
    other = f"{one}-2"
    directory = open_directory(os.fspath(place))
    try:
        try:
            fresh = calls.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
            calls.write(fresh, bytes(4096))
            calls.close(fresh)
        except OSError as error:
            raise unwritable(os.fspath(place), error) from error
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


# --- Cloning all at once ----------------------------------------------------------------------------


def clone_whole(engine: Engine, source: str, payload: str) -> None:
    """Make the new directory `payload` a clone of `source`, in one step."""
    parent, name = os.path.split(payload)
    if engine is Engine.BTRFS_SUBVOLUME:
        with Directory.open(parent) as directory:
            try:
                _snapshot(source, directory, name)
            except OSError as error:
                raise unwritable(payload, error) from error
        return
    from holdfast.fs.trees.juicefs_clone import clone_directory

    clone_directory(source, payload)


def _snapshot(source: str, parent: Directory, name: str) -> None:
    if parent.fd is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    descriptor = open_directory(source)
    try:
        calls.snapshot_subvolume(parent.fd, os.fsencode(name), descriptor)
    finally:
        close_quietly(descriptor)
