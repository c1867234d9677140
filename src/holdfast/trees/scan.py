"""Scans of directories, and the cache of the last ones.

The *identity* of a directory is one byte string: its own status, the names of all its entries, and the *mark* of each
entry that is not a directory: inode, mode, size, modification and change time. Two scans with equal identities saw the
same content, unless a file changed so shortly before the first that a second change would have left the same time: such
a file is *recent*.

The stat cache stores the identity and the manifest body of every directory of a source. It only saves time: a missing,
damaged or foreign cache is ignored, and a record is used only if the identity of the directory, or the mark of a file,
is still the same.

    file   = "holdfast stat cache 3\\n", u64 device, part*
    part   = record*, u32 0xffffffff, u32 CRC-32 of its records
    record = u32 length of path, u32 length of identity, u32 length of body, path, identity, body

If little changed, a part with the changes is appended; the last record of an inode counts. A torn part and
everything after it are ignored. Records of directories that are gone do no harm.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.directory import opened, parent_of, write_all
from holdfast.trees.walker import NOFOLLOW, read_whole

TYPE_CHECKING = False  # true for type checkers; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_HEAD = struct.Struct("<QIIIqqIII")
MARK = struct.Struct("<QIQqq")
NO_MARK = bytes(MARK.size)
_TIME = struct.Struct("<q")
_CHANGE_TIME_AT = struct.calcsize("<QIIIq")  # in the head

_TICK = 20_000_000  # twice the longest time for which filesystems with fine timestamps keep the same one
_COARSE_TICK = 2_000_000_000
_SECOND = 1_000_000_000
_KIND, _FILE = 0o170000, 0o100000
_EMPTY_SUBVOLUME = 2  # in a btrfs snapshot, the inode of a nested subvolume of the source
_FIRST_TIME, _LAST_TIME = -(1 << 63), (1 << 63) - 1
UNTIMED = _FIRST_TIME
"""Stands for `now` where times do not tell whether a file changed: every file is recent."""

Progress = Callable[[int, int], None]
"""Called now and then with the number of files and bytes processed so far."""


class Listing(NamedTuple):
    """The result of one scan; `names` and `statuses` are of the entries that are not directories, in order.

    `statuses` is empty if the listing was rebuilt from an identity. `newest` is the latest change time of an
    entry; `linked`, whether one of them has several names.
    """

    own: os.stat_result
    directories: list[str]
    names: list[str]
    statuses: list[os.stat_result]
    identity: bytes
    newest: int
    linked: bool

    def marks(self) -> list[bytes]:
        identity, size = self.identity, MARK.size
        return [identity[at : at + size] for at in range(self._marks_at(), len(identity), size)]

    def sizes_and_times(self) -> list[tuple[int, int]]:
        marks = MARK.iter_unpack(memoryview(self.identity)[self._marks_at() :])
        return [(size, changed) for _, _, size, _, changed in marks]

    def status(self, index: int) -> os.stat_result:
        """The status of one of `names`; without the owner if the listing was rebuilt from an identity."""
        if self.statuses:
            return self.statuses[index]
        return _status(*MARK.unpack_from(self.identity, self._marks_at() + index * MARK.size))

    def _marks_at(self) -> int:
        return len(self.identity) - MARK.size * len(self.names)


def scan_directory(descriptor: int) -> Listing:
    """Scan an open directory, in byte order. Written for speed: this is the cost of every unchanged file."""
    own = calls.fstat(descriptor)
    with calls.scandir(descriptor) as listed:
        entries = list(listed)
    directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    if directories:
        entries = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
    try:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        found = []
        for entry in entries:
            with suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    found.sort()
    directories.sort()
    names = [name for name, _ in found]
    blob, below = "\0".join(names), "\0".join(directories)
    if not (blob.isascii() and below.isascii()):
        found.sort(key=lambda each: os.fsencode(each[0]))
        directories.sort(key=os.fsencode)
        names = [name for name, _ in found]
        blob, below = "\0".join(names), "\0".join(directories)
    pack, statuses = MARK.pack, [status for _, status in found]
    try:
        marks = [pack(s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in statuses]
    except struct.error:  # a time that 64 bits cannot hold
        marks = [mark_of(status) for status in statuses]
    encoded, encoded_below = os.fsencode(blob), os.fsencode(below)
    head = own_mark(own, len(names), len(encoded), len(encoded_below))
    identity = b"".join([head, encoded, encoded_below, *marks])
    newest = max([each.st_ctime_ns for each in statuses], default=0)
    linked = max([each.st_nlink for each in statuses], default=1) > 1
    return Listing(own, directories, names, statuses, identity, newest, linked)


def own_mark(own: os.stat_result, count: int, names: int, directories: int) -> bytes:
    """The head of an identity: the directory itself, and the lengths of what follows."""
    times = held_time(own.st_mtime_ns), held_time(own.st_ctime_ns)
    return _HEAD.pack(own.st_ino, own.st_mode, own.st_uid, own.st_gid, *times, count, names, directories)


def mark_of(status: os.stat_result) -> bytes:
    times = held_time(status.st_mtime_ns), held_time(status.st_ctime_ns)
    return MARK.pack(status.st_ino, status.st_mode, status.st_size, *times)


def held_time(nanoseconds: int) -> int:
    """A time clamped to what 64 bits hold: 1677 to 2262."""
    return max(_FIRST_TIME, min(_LAST_TIME, nanoseconds))


def is_foreign(path: str, own: os.stat_result, device: int, mounts: frozenset[str]) -> bool:
    """Whether a directory does not belong to a source on `device`: another filesystem is mounted there."""
    return own.st_dev != device or path in mounts or (path != "" and own.st_ino == _EMPTY_SUBVOLUME)


def is_recent(changed: int, now: int) -> bool:
    """Whether a file changed at `changed` could change again at `now` and keep that time (both in ns)."""
    if changed < now - _COARSE_TICK:
        return False
    return changed >= now - (_TICK if changed % _SECOND else _COARSE_TICK)


def is_sound(content: bytes) -> bool:
    """Whether the lengths in `content` fit."""
    if len(content) < _HEAD.size:
        return False
    *_, count, names, directories = _HEAD.unpack_from(content)
    return bool(len(content) == _HEAD.size + names + directories + count * MARK.size)


def inode_of(identity: bytes) -> int:
    return int.from_bytes(identity[:8], "little")


def count_in(identity: bytes) -> int:
    """How many entries are not directories."""
    return int(_HEAD.unpack_from(identity)[-3])


def names_in(identity: bytes) -> list[bytes]:
    """The encoded names of the entries that are not directories."""
    *_, count, length, _ = _HEAD.unpack_from(identity)
    return identity[_HEAD.size : _HEAD.size + length].split(b"\0") if count else []


def directories_in(identity: bytes) -> list[str]:
    *_, names, directories = _HEAD.unpack_from(identity)
    start = _HEAD.size + names
    return os.fsdecode(identity[start : start + directories]).split("\0") if directories else []


def marks_by_name(identity: bytes) -> dict[bytes, bytes]:
    *_, count, length, directories = _HEAD.unpack_from(identity)
    start, size = _HEAD.size + length + directories, MARK.size
    marks = [identity[at : at + size] for at in range(start, start + count * size, size)]
    return dict(zip(names_in(identity), marks, strict=True))


def modes_in(identity: bytes) -> dict[str, int]:
    """The modes of the directory, as "", and of its entries that are not directories."""
    _, own, *_, names, directories = _HEAD.unpack_from(identity)
    marks = MARK.iter_unpack(memoryview(identity)[_HEAD.size + names + directories :])
    return {"": own} | {os.fsdecode(name): mark[1] for name, mark in zip(names_in(identity), marks, strict=True)}


def is_of(identity: bytes, own: os.stat_result) -> bool:
    """Whether it is the identity of the directory with this status, with no name added or removed since."""
    inode, _, _, _, mtime, ctime, *_ = _HEAD.unpack_from(identity)
    return bool((inode, mtime, ctime) == (own.st_ino, own.st_mtime_ns, own.st_ctime_ns))


def listing_of(identity: bytes) -> Listing | None:
    """Rebuild the listing with this identity, of files with one name; None if an entry is not a file."""
    inode, mode, uid, gid, mtime, ctime, count, names, directories = _HEAD.unpack_from(identity)
    marks = [*MARK.iter_unpack(memoryview(identity)[_HEAD.size + names + directories :])]
    if {each[1] & _KIND for each in marks} - {_FILE}:
        return None
    own = _status(inode, mode, 0, mtime, ctime, uid, gid)
    files = os.fsdecode(identity[_HEAD.size : _HEAD.size + names]).split("\0") if count else []
    newest = max([each[4] for each in marks], default=0)
    return Listing(own, directories_in(identity), files, [], identity, newest, False)


def _status(inode: int, mode: int, size: int, mtime: int, ctime: int, uid: int = 0, gid: int = 0) -> os.stat_result:
    return os.stat_result((mode, inode, 0, 1, uid, gid, size, 0, 0, 0, 0.0, 0.0, 0.0, 0, mtime, ctime))


def without_recent(identity: bytes, listing: Listing, now: int) -> bytes:
    """The identity with recent entries blanked: they match nothing, so they are read again next time.

    Of files the mark; of the directory itself the change time, because its extended attributes may change.
    """
    own = is_recent(listing.own.st_ctime_ns, now)
    start, earliest = len(identity) - MARK.size * len(listing.names), now - _COARSE_TICK
    marks = MARK.iter_unpack(memoryview(identity)[start:])  # of what was read, which is after the scan
    recent = [at for at, each in enumerate(marks) if each[4] >= earliest and is_recent(each[4], now)]
    if not (own or recent):
        return identity
    kept = bytearray(identity)
    if own:
        _TIME.pack_into(kept, _CHANGE_TIME_AT, _FIRST_TIME)
    for index in recent:
        at = start + index * MARK.size
        kept[at : at + MARK.size] = NO_MARK
    return bytes(kept)


_MAGIC = b"holdfast stat cache 3\n"
_DEVICE = struct.Struct("<Q")
_RECORD = struct.Struct("<III")
_TAIL = struct.Struct("<II")
_END = 0xFFFFFFFF
_END_MARK = b"\xff" * 4
_CHUNK = 4 << 20


Record = tuple[bytes, bytes, bytes]
"""A record of the cache: the path, the identity and the body of a directory."""


class KnownDirectory(NamedTuple):
    path: bytes
    identity: bytes
    body: bytes


class StatCache:
    """A cache that was read, indexed by inode: a renamed directory is found again."""

    def __init__(self, content: bytes = b"", device: int = 0) -> None:
        self._content = content
        self._records: dict[int, tuple[int, int, int]] = {}
        self.parts: list[int] = []
        """Where each sound part ends."""
        head = _MAGIC + _DEVICE.pack(device)
        start = len(head) if content.startswith(head) else 0
        while start:
            start = self._index_part(start)

    @classmethod
    def read(cls, path: Path | None, device: int) -> StatCache:
        """The cache at `path`; empty if it is missing or of another device."""
        try:
            return cls() if path is None else cls(read_whole(os.fspath(path)), device)
        except OSError:
            return cls()

    def __len__(self) -> int:
        return len(self._records)

    def known(self, inode: int) -> KnownDirectory | None:
        record = self._records.get(inode)
        if record is None:
            return None
        at, size, length = record
        middle, content = at + size, self._content
        start = at + _RECORD.unpack_from(content, at - _RECORD.size)[0]
        return KnownDirectory(content[at:start], content[start:middle], content[middle : middle + length])

    def _index_part(self, start: int) -> int:
        """Add the part at `start`, if it is sound; return where the next one starts, or 0."""
        content, at, unpack = self._content, start, _RECORD.unpack_from
        records: dict[int, tuple[int, int, int]] = {}
        try:
            while content[at : at + 4] != _END_MARK:
                path, identity, body = unpack(content, at)
                at += _RECORD.size
                records[inode_of(content[at + path : at + path + 8])] = (at, path + identity, body)
                at += path + identity + body
            checksum = _TAIL.unpack_from(content, at)[1]
        except struct.error:
            return 0
        if checksum != zlib.crc32(memoryview(content)[start:at]):
            return 0
        self._records.update(records)
        self.parts.append(at + _TAIL.size)
        return at + _TAIL.size


def append_to_cache(path: Path, before: StatCache, changed: Iterable[Record]) -> bool:
    """Append the changed records to the cache at `path`, which was `before` when it was read.

    False if the cache has to be written as a whole: it is no longer `before`, it would exceed twice its size when last
    written as a whole, or it cannot be appended to.
    """
    if not before.parts:
        return False
    part = b"".join(_records(changed))
    part += _TAIL.pack(_END, zlib.crc32(part))
    if before.parts[-1] + len(part) > 2 * before.parts[0]:
        return False
    try:
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | NOFOLLOW
        with parent_of(path) as (here, name), opened(name, flags, dir_fd=here) as descriptor:
            if calls.fstat(descriptor).st_size != before.parts[-1]:
                return False
            write_all(descriptor, part)
    except OSError:
        return False
    return True


def write_cache(path: Path, device: int, known: Iterable[Record]) -> None:
    """Replace the cache at `path` if possible, without a sync: the cache only saves time."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
    with suppress(OSError), parent_of(path) as (here, name):
        draft = f"{name}-{os.urandom(6).hex()}.tmp"
        try:
            with opened(draft, flags, 0o600, dir_fd=here) as descriptor:
                _write(descriptor, device, known)
            calls.replace(draft, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            with suppress(OSError):
                calls.unlink(draft, dir_fd=here)
            raise


def _write(descriptor: int, device: int, known: Iterable[Record]) -> None:
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


def _records(known: Iterable[Record]) -> Iterator[bytes]:
    for path, identity, body in known:
        yield from (_RECORD.pack(len(path), len(identity), len(body)), path, identity, body)
