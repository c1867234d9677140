"""Directories with every kind of entry, and an observer independent of our code."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from pathlib import Path
from typing import NamedTuple

YEARS_AGO = 1_300_000_000_123_456_789

NAMES = [
    b"plain",
    b"with space",
    b"new\nline",
    b"tab\t",
    b"\xff\xfe",
    "ünïcödé".encode(),
    b"-dash",
    b"\\x41",
    b".READY",
]


class Seen(NamedTuple):
    """Everything that a snapshot keeps of an entry, observed without the code under test."""

    kind: int
    mode: int
    mtime_ns: int
    owner: tuple[int, int]
    content: bytes
    xattrs: tuple[tuple[str, bytes], ...]
    device: int
    names: frozenset[bytes]


def seen(directory: Path) -> dict[bytes, Seen]:
    """Observe the entries of a directory, by path."""
    found: dict[bytes, os.stat_result] = {}
    waiting = [os.fsencode(directory)]
    top = waiting[0]
    while waiting:
        here = waiting.pop()
        found[here[len(top) + 1 :]] = status = os.lstat(here)
        if stat.S_ISDIR(status.st_mode):
            waiting += [os.path.join(here, name) for name in os.listdir(here)]
    links: dict[int, set[bytes]] = {}
    for path, status in found.items():
        links.setdefault(status.st_ino, set()).add(path)
    return {
        path: _seen(os.path.join(top, path).rstrip(b"/"), status, links[status.st_ino])
        for path, status in found.items()
    }


def _seen(path: bytes, status: os.stat_result, names: set[bytes]) -> Seen:
    kind = stat.S_IFMT(status.st_mode)
    content = b""
    if kind == stat.S_IFREG:
        content = Path(os.fsdecode(path)).read_bytes()
    elif kind == stat.S_IFLNK:
        content = os.readlink(path)
    return Seen(
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_mtime_ns,
        (status.st_uid, status.st_gid),
        content,
        _xattrs(path),
        getattr(status, "st_rdev", 0) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
        frozenset(names) if kind == stat.S_IFREG else frozenset(),
    )


def set_xattr(path: Path, name: str, value: bytes) -> None:
    """Set an extended attribute, where supported."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setxattr(path, name, value)


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    if sys.platform != "linux":
        return ()
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return ()
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names))


def grow(top: Path) -> Path:
    """Create a directory with one entry of every kind; all times lie in the past."""
    if sys.platform == "win32":
        raise NotImplementedError
    top.mkdir()
    for number, name in enumerate(NAMES):
        Path(os.fsdecode(os.fsencode(top) + b"/" + name)).write_bytes(b"content of %d\n" % number)
    (top / "empty").mkdir()
    (top / "empty file").touch()
    deep = top / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep")
    (top / "big").write_bytes(os.urandom(1 << 20) * 3)
    with (top / "sparse").open("wb") as file:
        file.seek(2 << 20)
        file.write(b"middle")
        file.truncate(5 << 20)
    (top / "a" / "one").write_bytes(b"two names")
    os.link(top / "a" / "one", top / "other name")
    os.link(top / "a" / "one", deep / "third name")
    (top / "link").symlink_to("a/one")
    (top / "dangling").symlink_to("../nowhere")
    (top / "loop").symlink_to(".")
    os.symlink(b"\xff target", os.fsencode(top / "odd link"))
    os.mkfifo(top / "fifo")
    _socket(top)
    (top / "script").write_text("#!/bin/sh\n")
    for text, mode in {"script": 0o755, "other name": 0o640, "empty": 0o711, "plain": 0o444}.items():
        (top / text).chmod(mode)
    for place in (top / "plain", top / "empty"):
        set_xattr(place, "user.colour", b"blue\0green")
        set_xattr(place, "user.empty", b"")
    if os.getuid() == 0:
        os.mknod(top / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.chown(top / "script", 12, 34)
        (top / "script").chmod(0o4755)
    age(top)
    return top


def _socket(top: Path) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    place = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(top)  # socket paths are limited to about 100 bytes
        try:
            listener.bind("socket")
        finally:
            os.chdir(place)


def age(top: Path) -> None:
    """Give every entry its own time in the past."""
    number = 0
    for here, directories, names in os.walk(top, topdown=False):
        for name in (*names, *directories):
            number += 1
            stamp = YEARS_AGO + number * 1_000_000_007
            os.utime(Path(here, name), ns=(stamp, stamp), follow_symlinks=False)
    os.utime(top, ns=(YEARS_AGO, YEARS_AGO))
