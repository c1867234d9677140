"""The content of files: read once, hashed on the way, written or cloned; holes stay holes.

Nothing here waits: what is not a regular file is never read, and opened without blocking.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple, Self

from holdfast.fs import calls
from holdfast.fs.trees.descent import NOFOLLOW
from holdfast.fs.trees.manifest import BODY, ENTRY, Meta, Xattrs, write_all
from holdfast.fs.trees.scan import allocated, held_time

READ: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | NOFOLLOW
_WRITE: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | NOFOLLOW
_SMALL = 1 << 20
_CHUNK = 1 << 20
_WORTH_A_THREAD = 16 << 20
_WORTH_A_CLONE = 128 << 10
_ZEROS = bytes(_CHUNK)
_NO_CLONE = (
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTTY,
    errno.EPERM,
    errno.EISDIR,
)
_NO_XATTRS = (errno.EOPNOTSUPP, errno.ENOSYS)
_LABELS_OF_A_PLACE = ("security.selinux", "security.ima", "security.evm")
_KIND, _MODE = 0o170000, 0o7777
_KINDS = {
    stat.S_IFREG: b"f",
    stat.S_IFLNK: b"l",
    stat.S_IFDIR: b"d",
    stat.S_IFIFO: b"p",
    stat.S_IFSOCK: b"s",
    stat.S_IFCHR: b"c",
    stat.S_IFBLK: b"b",
}
KIND_WORDS = {b"p": "fifo", b"s": "socket", b"c": "character device", b"b": "block device"}


class Content(NamedTuple):
    """What was read: its hash, its size, and how much of it was written anew."""

    digest: bytes
    size: int
    written: int


def meta_of(status: os.stat_result) -> Meta:
    """What the manifest says of something with this status."""
    mode = status.st_mode
    kind = _KINDS.get(mode & _KIND, b"?")
    return Meta(kind, mode & _MODE, status.st_uid, status.st_gid, held_time(status.st_mtime_ns))


HEAD_OF_ENTRY = ENTRY.size - 6
"""The bytes of an entry that a status tells: kind, mode, owner, time and size."""
HEAD_OF_BODY = BODY.size - 8


def head_of_entry(status: os.stat_result) -> bytes:
    """How the entry of something with this status begins."""
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return ENTRY.pack(*meta_of(status), size, 0, 0)[:HEAD_OF_ENTRY]


def head_of_body(status: os.stat_result) -> bytes:
    """How the body of a directory with this status begins."""
    return BODY.pack(*meta_of(status), 0, 0)[:HEAD_OF_BODY]


# --- Content ----------------------------------------------------------------------------------------


def hash_file(source: int, size: int) -> Content:
    """The hash of what can be read from an open file."""
    if size < _SMALL:
        content = _read_small(source, size)
        return Content(hashlib.sha256(content).digest(), len(content), 0)
    digest, total = hashlib.sha256(), 0
    while chunk := calls.read(source, _CHUNK):
        digest.update(chunk)
        total += len(chunk)
    return Content(digest.digest(), total, 0)


def copy_file(source: int, status: os.stat_result, target: int, *, hashed: bool = True) -> Content:
    """Write into the new file `target` what can be read from `source`; its hash is b"" if not asked for."""
    if status.st_size < _SMALL and allocated(status) >= status.st_size:
        content = _read_small(source, status.st_size)
        if content:
            write_all(target, content)
        return Content(hashlib.sha256(content).digest() if hashed else b"", len(content), len(content))
    if not hashed:
        return Content(b"", *_copy_chunks(source, status, target, len))
    if status.st_size < _WORTH_A_THREAD:
        digest = hashlib.sha256()
        size, written = _copy_chunks(source, status, target, digest.update)
        return Content(digest.digest(), size, written)
    with _HashingThread() as hashing:
        size, written = _copy_chunks(source, status, target, hashing.update)
    return Content(hashing.digest(), size, written)


def _read_small(source: int, size: int) -> bytes:
    content = calls.read(source, size + 1)
    if len(content) <= size:
        return content
    parts = [content]  # it has grown
    while chunk := calls.read(source, _CHUNK):
        parts.append(chunk)
    return b"".join(parts)


def _copy_chunks(
    source: int, status: os.stat_result, target: int, hashed: Callable[[bytes | memoryview], object]
) -> tuple[int, int]:
    size = written = 0
    sparse = allocated(status) < status.st_size
    for start, end in _extents(source, status.st_size) if sparse else [(0, -1)]:
        for gap in range(size, start, _CHUNK):
            hashed(memoryview(_ZEROS)[: min(_CHUNK, start - gap)])
        if sparse:
            calls.lseek(source, start, os.SEEK_SET)
            calls.lseek(target, start, os.SEEK_SET)
        size = start
        while size != end and (chunk := calls.read(source, _CHUNK if end < 0 else min(_CHUNK, end - size))):
            hashed(chunk)
            write_all(target, chunk)
            size += len(chunk)
            written += len(chunk)
    if sparse:
        calls.ftruncate(target, size)
    return size, written


def _extents(source: int, size: int) -> Iterator[tuple[int, int]]:
    """Where there is something in a file with holes; the last one ends at its size and may be empty."""
    if sys.platform == "win32":
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            start = calls.lseek(source, end, os.SEEK_DATA)
            end = min(size, calls.lseek(source, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing more
                break
            start, end = end, size  # a file system that does not tell
        yield start, end
    yield size, size


class _HashingThread:
    """Hashes in a thread of its own, while the next piece is read and written."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pieces: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._room = threading.Semaphore(8)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def update(self, piece: bytes | memoryview) -> None:
        self._room.acquire()
        self._pieces.put(piece)

    def digest(self) -> bytes:
        return self._digest.digest()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)
            self._room.release()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.put(None)
        self._thread.join()


# --- New files --------------------------------------------------------------------------------------


def create_file(directory: int, name: str, mode: int) -> int:
    """Make a new file in an open directory and return its descriptor."""
    return calls.open(name, _WRITE, mode, dir_fd=directory)


def clone_file(source: int, target: int, size: int) -> bool:
    """Let a new file share the blocks of another; False where that cannot be, or is not worth it."""
    if size < _WORTH_A_CLONE:
        return False
    try:
        calls.clone(target, source)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


# --- Extended attributes ----------------------------------------------------------------------------


def read_xattrs(target: int | str) -> tuple[Xattrs, list[str]]:
    """The extended attributes of an open file, or of a path without following it; and what cannot be read.

    Labels that a security module gives to a place, not to a content, are left out.
    """
    follow = isinstance(target, int)
    try:
        names = calls.listxattr(target, follow_symlinks=follow)
    except OSError as error:
        return (), [] if error.errno in _NO_XATTRS else ["extended attributes"]
    if not names:
        return (), []
    found, lost = [], []
    for name in names:
        if name in _LABELS_OF_A_PLACE:
            continue
        try:
            found.append((os.fsencode(name), calls.getxattr(target, name, follow_symlinks=follow)))
        except OSError:
            lost.append(f"extended attribute {name}")
    return tuple(sorted(found)), lost


def write_xattrs(target: int | str, xattrs: Xattrs) -> list[str]:
    """Set extended attributes; return the names of those that the file system or the system refuses."""
    refused = []
    for name, value in xattrs:
        try:
            calls.setxattr(target, os.fsdecode(name), value, follow_symlinks=isinstance(target, int))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and not _too_large(value):
                raise
            refused.append(os.fsdecode(name))
    return refused


def _too_large(value: bytes) -> bool:
    """Some file systems say ENOSPC for an attribute that is too large for an inode."""
    return len(value) > 1024


def link_path(directory: int, name: str) -> str:
    """A path to an entry of an open directory, for the calls that know no directories."""
    return f"/proc/self/fd/{directory}/{name}"
