"""The content of regular files: read once, hashed and written in the same pass; holes stay holes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.directory import Closing, close_quietly, write_all
from holdfast.trees.manifest import Meta, Xattrs
from holdfast.trees.payload import READ, Attributes
from holdfast.trees.walker import allocated

_SMALL = 1 << 20
_CHUNK = 1 << 17  # a larger one does not stay in the processor's cache between reading and writing
_BLOCK = 1 << 19  # the unit handed to the hashing thread: a switch costs as much as hashing some KiB
_BLOCKS = 8
_WORTH_A_THREAD = 16 << 20
_WORTH_STARTING = 4 << 20
_WORTH_A_CLONE = 128 << 10
_NO_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EPERM, errno.EISDIR)
_ZEROS = memoryview(bytes(_CHUNK))


class Content(NamedTuple):
    """The SHA-256 and the size of content that was read, and how many bytes were written."""

    digest: bytes
    size: int
    written: int


def hash_file(source: int, size: int) -> Content:
    """Hash an open file of about this size."""
    if size < _SMALL:
        content = _read_small(source, size)
        return Content(hashlib.sha256(content).digest(), len(content), 0)
    total = 0
    with _hashing(size) as hashing:
        while count := calls.read_into(source, hashing.buffer()):
            hashing.update(count)
            total += count
    return Content(hashing.digest(), total, 0)


def copy_file(source: int, status: os.stat_result, target: int) -> Content:
    """Copy `source` to the new file `target`."""
    if status.st_size < _SMALL and allocated(status) >= status.st_size:
        content = _read_small(source, status.st_size)
        if content:
            write_all(target, content)
        return Content(hashlib.sha256(content).digest(), len(content), len(content))
    with _hashing(status.st_size) as hashing:
        size, written = _copy_chunks(source, status, target, hashing)
    return Content(hashing.digest(), size, written)


def _read_small(source: int, size: int) -> bytes:
    content = calls.read(source, size + 1)
    if len(content) == size:
        return content
    parts = [content]  # the file has grown or shrunk, or the read was short
    while chunk := calls.read(source, _CHUNK):
        parts.append(chunk)
    return b"".join(parts)


def _copy_chunks(source: int, status: os.stat_result, target: int, hashing: _Hashing) -> tuple[int, int]:
    size = written = begun = 0
    sparse = allocated(status) < status.st_size
    for start, end in _extents(source, status.st_size) if sparse else [(0, -1)]:
        hashing.add_zeros(start - size)
        if sparse:
            calls.lseek(source, start, os.SEEK_SET)
            calls.lseek(target, start, os.SEEK_SET)
        size = start
        while size < end or end < 0:
            buffer = hashing.buffer()
            count = calls.read_into(source, buffer if end < 0 else buffer[: end - size])
            if not count:
                break
            write_all(target, buffer[:count])
            hashing.update(count)
            size += count
            written += count
            if size - begun >= _WORTH_STARTING:  # the disk need not wait for the sync at the end
                calls.start_writing(target, begun, size - begun)
                begun = size
    if sparse:
        calls.ftruncate(target, size)
    return size, written


def _extents(source: int, size: int) -> Iterator[tuple[int, int]]:
    """The data extents of a file with holes; the last one ends at its size and may be empty."""
    if sys.platform == "win32":
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            start = calls.lseek(source, end, os.SEEK_DATA)
            if start >= size:  # it has grown
                break
            end = min(size, calls.lseek(source, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                break
            start, end = end, size  # a filesystem that does not report holes
        yield start, end
    yield size, size


class _Hashing(Closing):
    """Provides the buffer to read into, and hashes each piece when it is added."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_CHUNK))
        self._digest = hashlib.sha256()

    def buffer(self) -> memoryview:
        """The buffer for the next piece; its previous content may be gone."""
        return self._buffer

    def update(self, count: int) -> None:
        """Add the first `count` bytes of the last buffer, which the caller no longer uses."""
        self._digest.update(self._buffer[:count])

    def add_zeros(self, count: int) -> None:
        for at in range(0, count, len(_ZEROS)):
            self._digest.update(_ZEROS[: count - at])

    def digest(self) -> bytes:
        return self._digest.digest()

    def close(self) -> None:
        return


class _HashingThread(_Hashing):
    """Hashes in a thread while the next pieces are read and written."""

    def __init__(self) -> None:
        super().__init__()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._pieces: SimpleQueue[tuple[memoryview, memoryview] | int | None] = SimpleQueue()
        for _ in range(_BLOCKS):
            self._free.put(memoryview(bytearray(_BLOCK)))
        self._block, self._filled = self._free.get(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def buffer(self) -> memoryview:
        return self._block[self._filled : self._filled + _CHUNK]

    def update(self, count: int) -> None:
        self._filled += count
        if self._filled + _CHUNK > len(self._block):
            self._hand_over()

    def add_zeros(self, count: int) -> None:
        self._hand_over()
        self._pieces.put(count)

    def _hand_over(self) -> None:
        """Let the thread hash the filled part, and wait for a free block."""
        if self._filled:
            self._pieces.put((self._block[: self._filled], self._block))
            self._block, self._filled = self._free.get(), 0

    def _run(self) -> None:
        while (item := self._pieces.get()) is not None:
            if isinstance(item, int):
                super().add_zeros(item)
            else:
                piece, block = item
                self._digest.update(piece)
                self._free.put(block)

    def start(self) -> None:
        """Raises `RuntimeError` if no more threads are available."""
        self._thread.start()

    def close(self) -> None:
        try:
            self._hand_over()
        finally:
            self._pieces.put(None)
            self._thread.join()


def _hashing(size: int) -> _Hashing:
    if size >= _WORTH_A_THREAD:
        with suppress(RuntimeError):
            hashing = _HashingThread()
            hashing.start()
            return hashing
    return _Hashing()


def clone_file(source: int, target: int, size: int) -> bool:
    """Let a new file share the blocks of another; False if that is impossible or not worthwhile."""
    if size < _WORTH_A_CLONE:
        return False
    try:
        calls.clone(target, source)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


class NewFile(NamedTuple):
    """A file to create: the name of its source, its own name and its attributes."""

    source_name: str
    name: str
    meta: Meta
    xattrs: Xattrs = ()


def place_file(source: int, target: int, new: NewFile, attributes: Attributes) -> tuple[bytes, list[str]]:
    """Clone or copy a file into the directory `target`; return the digest of its content and what was refused."""
    source_name, name, meta, xattrs = new
    reading = calls.open(source_name, READ, dir_fd=source)
    try:
        status = calls.fstat(reading)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(source_name)
        writing = attributes.create(target, name, meta.mode)
        try:
            cloned = clone_file(reading, writing, status.st_size)
            content = hash_file(reading, status.st_size) if cloned else copy_file(reading, status, writing)
            lost = attributes.finish_file(writing, meta, xattrs)
        finally:
            calls.close(writing)
    finally:
        close_quietly(reading)
    return content.digest, lost
