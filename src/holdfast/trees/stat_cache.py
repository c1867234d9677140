"""What is known of a source from the last time: for each directory its identity and the body of its record.

The cache only saves time. A missing, damaged or foreign one is as good as none; one that is there is
believed only where the identity of a directory, or the mark of a file, is still the same.

    file   = "holdfast stat cache 2\\n", u64 device, part*
    part   = record*, u32 0xffffffff, u32 CRC-32 of its records
    record = u32 length of path, u32 length of identity, u32 length of body, path, identity, body

If little has changed, a part with that is appended; of several records of an inode the last one counts. A
part that is torn, and whatever follows it, is not believed. Records of what is gone do no harm.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.directory import Closing, close_quietly, write_all
from holdfast.fs.mounts import filesystem_kind, is_network
from holdfast.trees.manifest import read_whole
from holdfast.trees.scan import NOFOLLOW, inode_of, joined

_MAGIC = b"holdfast stat cache 2\n"
_DEVICE = struct.Struct("<Q")
_RECORD = struct.Struct("<III")
_TAIL = struct.Struct("<II")
_END = 0xFFFFFFFF
_END_MARK = b"\xff" * 4
_CHUNK = 4 << 20


class KnownDirectory(NamedTuple):
    """What was known of a directory: where it was, how it looked, and what its record said."""

    path: bytes
    identity: bytes
    body: bytes


class StatCache:
    """A cache that has been read, by the directories' inodes: a directory that was renamed is found again."""

    def __init__(self, content: bytes = b"", device: int = 0) -> None:
        self._content = content
        self._places: dict[int, tuple[int, int, int]] = {}
        self.parts: list[int] = []
        """Where each sound part of it ends."""
        head = _MAGIC + _DEVICE.pack(device)
        start = len(head) if content.startswith(head) else 0
        while start:
            start = self._index_part(start)

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

    def known(self, inode: int) -> KnownDirectory | None:
        """What is known of the directory with this inode."""
        place = self._places.get(inode)
        if place is None:
            return None
        at, size, length = place
        middle, content = at + size, self._content
        path_length = _RECORD.unpack_from(content, at - _RECORD.size)[0]
        start = at + path_length
        return KnownDirectory(content[at:start], content[start:middle], content[middle : middle + length])

    def _index_part(self, start: int) -> int:
        """Take in the part that begins there, if it is sound; where the next one begins, or 0."""
        content, at, unpack = self._content, start, _RECORD.unpack_from
        places: dict[int, tuple[int, int, int]] = {}
        try:
            while content[at : at + 4] != _END_MARK:
                path, identity, body = unpack(content, at)
                at += _RECORD.size
                places[inode_of(content[at + path : at + path + 8])] = (at, path + identity, body)
                at += path + identity + body
            checksum = _TAIL.unpack_from(content, at)[1]
        except struct.error:
            return 0
        if checksum != zlib.crc32(memoryview(content)[start:at]):
            return 0
        self._places.update(places)
        self.parts.append(at + _TAIL.size)
        return at + _TAIL.size


def append_to_cache(path: Path, before: StatCache, changed: Iterable[KnownDirectory]) -> bool:
    """Append what has changed to the cache at `path`, which was `before` when it was read.

    False if it is not that any more, or would become more than twice what it was when it was written anew, or
    if it cannot be appended to: then it is to be written anew.
    """
    if not before.parts:
        return False
    part = b"".join(_records(changed))
    part += _TAIL.pack(_END, zlib.crc32(part))
    if before.parts[-1] + len(part) > 2 * before.parts[0]:
        return False
    try:
        descriptor = calls.open(path, os.O_WRONLY | os.O_APPEND | NOFOLLOW)
        try:
            if calls.fstat(descriptor).st_size != before.parts[-1]:
                return False
            write_all(descriptor, part)
        finally:
            calls.close(descriptor)
    except OSError:
        return False
    return True


def write_cache(path: Path, device: int, known: Iterable[KnownDirectory]) -> None:
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


def _write(descriptor: int, device: int, known: Iterable[KnownDirectory]) -> None:
    write_all(descriptor, _MAGIC + _DEVICE.pack(device))
    checksum, parts, size = 0, list[bytes](), 0
    for each in _records(known):
        parts.append(each)
        size += len(each)
        if size > _CHUNK:
            chunk = b"".join(parts)
            checksum = zlib.crc32(chunk, checksum)
            write_all(descriptor, chunk)
            parts, size = [], 0
    chunk = b"".join(parts)
    write_all(descriptor, chunk + _TAIL.pack(_END, zlib.crc32(chunk, checksum)))


def _records(known: Iterable[KnownDirectory]) -> Iterator[bytes]:
    for path, identity, body in known:
        yield _RECORD.pack(len(path), len(identity), len(body))
        yield path
        yield identity
        yield body


def _discard(draft: str) -> None:
    try:
        calls.unlink(draft)
    except OSError:
        return


_EVENT = struct.Struct("iIII")
_OVERFLOW = 0x4000
_ENOUGH = 1 << 16
_CLOSED = -1


class SourceWatch(Closing):
    """Listens to directories from the moment when each is added."""

    def __init__(self, root: str) -> None:
        self._fd = _CLOSED
        self._paths: dict[int, str] = {}
        self._possible = sys.platform == "linux" and not is_network(filesystem_kind(root))

    def add(self, directory: int, path: str) -> bool:
        """Listen to an open directory from now on; False if that cannot be."""
        if sys.platform != "linux" or not self._possible:
            return False
        from holdfast.fs import native

        number = native.inotify_watch_directory(self.begin(), directory)
        if number < 0:  # too many
            self._possible = False
            return False
        self._paths[number] = path
        return True

    def begin(self) -> int:
        """The descriptor to listen with, also for another process; less than 0 if that cannot be."""
        if sys.platform == "linux" and self._possible and self._fd == _CLOSED:
            from holdfast.fs import native

            self._fd = native.inotify_open()
        return self._fd

    @property
    def has_begun(self) -> bool:
        """Whether somebody listens already."""
        return self._fd != _CLOSED

    def adopt(self, number: int, path: str) -> None:
        """Know by its number what another process listens to with the same descriptor."""
        self._paths[number] = path

    def changed(self) -> list[str]:
        """Paths that something happened to; perhaps not all of them."""
        found: list[str] = []
        with suppress(BlockingIOError):
            while self._fd != _CLOSED and len(found) < _ENOUGH:
                found += self._events(calls.read(self._fd, _ENOUGH))
        return found

    def _events(self, content: bytes) -> list[str]:
        at, found = 0, []
        while at < len(content):
            number, mask, _, length = _EVENT.unpack_from(content, at)
            at += _EVENT.size
            name = content[at : at + length].rstrip(b"\0")
            at += length
            path = None if mask & _OVERFLOW else self._paths.get(number)
            found.append("" if path is None else joined(path, os.fsdecode(name)))
        return [path.rstrip("/") for path in found]

    def close(self) -> None:
        """Stop listening. The system takes some 10 ms for that, doing nothing; nobody has to wait for it."""
        if self._fd != _CLOSED:
            import threading

            descriptor, self._fd = self._fd, _CLOSED
            try:
                threading.Thread(target=close_quietly, args=(descriptor,), daemon=True).start()
            except RuntimeError:  # no more threads
                close_quietly(descriptor)
