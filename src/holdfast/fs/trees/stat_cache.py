"""What is known of a source from the last time: for each directory its identity and the body of its record.

The cache only saves time. A missing, damaged or foreign one is as good as none; one that is there is
believed only where the identity of a directory, or the mark of a file, is still the same.

    file   = "holdfast stat cache 1\\n", u64 device, record*, u32 0xffffffff, u32 CRC-32 of all before it
    record = u32 length of path, u32 length of identity, u32 length of body, path, identity, body
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.trees.descent import NOFOLLOW
from holdfast.fs.trees.manifest import read_whole, write_all
from holdfast.fs.trees.scan import inode_of

_MAGIC = b"holdfast stat cache 1\n"
_DEVICE = struct.Struct("<Q")
_RECORD = struct.Struct("<III")
_TAIL = struct.Struct("<II")
_END = 0xFFFFFFFF
_CHUNK = 4 << 20


class Known(NamedTuple):
    """What was known of a directory: where it was, how it looked, and what its record said."""

    path: bytes
    identity: bytes
    body: bytes


class StatCache:
    """A cache that has been read, by the directories' inodes: a directory that was renamed is found again."""

    def __init__(self, content: bytes = b"", device: int = 0) -> None:
        self._content = content
        self._places: dict[int, tuple[int, int, int]] = {}
        if _is_sound(content) and _DEVICE.unpack_from(content, len(_MAGIC))[0] == device:
            try:
                self._index()
            except struct.error:
                self._places.clear()

    @classmethod
    def read(cls, path: Path | None, device: int) -> StatCache:
        """The cache at `path`, as far as there is one and it is about this device."""
        if path is None:
            return cls()
        try:
            return cls(read_whole(os.fspath(path)), device)
        except OSError:
            return cls()

    def __len__(self) -> int:
        """The number of directories."""
        return len(self._places)

    def known(self, inode: int) -> Known | None:
        """What is known of the directory with this inode."""
        place = self._places.get(inode)
        if place is None:
            return None
        at, size, length = place
        middle, content = at + size, self._content
        path_length = _RECORD.unpack_from(content, at - _RECORD.size)[0]
        start = at + path_length
        return Known(content[at:start], content[start:middle], content[middle : middle + length])

    def _index(self) -> None:
        content, at = self._content, len(_MAGIC) + _DEVICE.size
        end = len(content) - _TAIL.size
        while at < end:
            path, identity, body = _RECORD.unpack_from(content, at)
            at += _RECORD.size
            self._places[inode_of(content[at + path : at + path + 8])] = (at, path + identity, body)
            at += path + identity + body


def _is_sound(content: bytes) -> bool:
    if len(content) < len(_MAGIC) + _DEVICE.size + _TAIL.size or not content.startswith(_MAGIC):
        return False
    end, checksum = _TAIL.unpack_from(content, len(content) - _TAIL.size)
    return bool(end == _END and checksum == zlib.crc32(memoryview(content)[: -_TAIL.size]))


def write_cache(path: Path, device: int, known: Iterable[Known]) -> None:
    """Replace the cache at `path`. It is not brought to the disk: one that a power cut tears is not believed.

    What goes wrong here costs time later and nothing else, so it is no failure.
    """
    draft = f"{os.fspath(path)}-{os.urandom(6).hex()}.tmp"
    try:
        descriptor = calls.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o600)
        try:
            _write(descriptor, device, known)
        finally:
            calls.close(descriptor)
        calls.replace(draft, path)
    except OSError:
        _discard(draft)
    except BaseException:
        _discard(draft)
        raise


def _write(descriptor: int, device: int, known: Iterable[Known]) -> None:
    checksum = 0
    for chunk in _chunks(device, known):
        checksum = zlib.crc32(chunk, checksum)
        write_all(descriptor, chunk)
    write_all(descriptor, _TAIL.pack(_END, checksum))


def _chunks(device: int, known: Iterable[Known]) -> Iterator[bytes]:
    parts, size = [_MAGIC + _DEVICE.pack(device)], 0
    for path, identity, body in known:
        parts += (_RECORD.pack(len(path), len(identity), len(body)), path, identity, body)
        size += len(path) + len(identity) + len(body)
        if size > _CHUNK:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def _discard(draft: str) -> None:
    try:
        calls.unlink(draft)
    except OSError:
        return
