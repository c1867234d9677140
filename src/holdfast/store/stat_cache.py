"""The stat cache of a family in plain files: finds the members that may have changed since an earlier read.

The *stamp* of a member is its inode, size, modification time and change time, taken before it was read. A member with
an equal stamp has not changed, unless its last change was so recent that another change could leave the same times.
Such a stamp is not kept, so the member is read again.

A program that creates, replaces or removes a member changes the directory, and then all members are examined. If the
directory has not changed, a program may still have written to a file in place. So up to `MOST_EXAMINED` members are
examined each time. In a larger family, a different part is examined each second; if a member of that part has changed,
all members are examined.

A cursor is not trusted: if it is damaged or belongs to another filesystem, it is ignored. Clocks may be set: a file
with a time in the future counts as recent, and equal stamps have the same inode, the same size and the same two times.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Collection
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from holdfast.errors import NotFound
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure
from holdfast.fs.names import is_safe_name

MOST_EXAMINED = 1024  # examining 4,096 files takes longer than starting Python
RECENT = 2_000_000_000  # ns; no filesystem has coarser times
_MAGIC = b"stat cache 1\n"
_HEAD = struct.Struct("<QQqqI")
_FIELDS = 4
_STAMP = 8 * _FIELDS
_NO_STAMP = bytes(_STAMP)
_64_BITS = (1 << 64) - 1

Identity = tuple[int, int, int, int]
"""Device, inode, modification and change time of a directory."""


class FamilyLook(NamedTuple):
    """The members of a family that may have changed since an earlier look, and those that are gone. If `is_whole`,
    there was no earlier look."""

    changed: list[str]
    removed: frozenset[str]
    is_whole: bool
    cursor: bytes


def empty_look(cursor: bytes) -> FamilyLook:
    """The result for a family whose directory does not exist."""
    earlier = _Earlier.of(cursor)
    return FamilyLook([], frozenset(() if earlier is None else earlier.names), earlier is None, b"")


def look_at(directory: Directory, start: str, end: str, cursor: bytes, pending: Collection[str] = ()) -> FamilyLook:
    """Compare the members `<start><name><end>` of a directory with an earlier look. If `end` begins with a slash, each
    member is a directory with a file in it. `pending` has the members that a committed intent is about to change: the
    caller reads those anyway, and in the next look they count as changed."""
    now, own = time.time_ns(), _identity(directory)
    earlier = _Earlier.of(cursor)
    if earlier is not None and earlier.directory[0] != own[0]:
        earlier = None  # another filesystem: its inodes mean other files
    files = _Files(directory, start, end)
    if earlier is None or earlier.directory != own:
        names = files.names(() if earlier is None else earlier.names)
    elif not pending and files.seem_unchanged(earlier, now):
        return FamilyLook([], frozenset(), False, cursor)
    else:
        names = earlier.names
    names, stamps = files.examine(names)
    changed, removed = _compare(earlier, names, stamps)
    kept, new = _kept(names, stamps, now, pending), sorted(set(pending).difference(names))
    return FamilyLook(
        changed,
        removed,
        earlier is None,
        _cursor(own, [*names, *new], kept + _NO_STAMP * len(new), now),
    )


class _Earlier(NamedTuple):
    """An earlier look, decoded from its cursor."""

    directory: Identity
    names: list[str]
    stamps: bytes

    @classmethod
    def of(cls, cursor: bytes) -> _Earlier | None:
        if len(cursor) < len(_MAGIC) + _HEAD.size or not cursor.startswith(_MAGIC):
            return None
        *directory, count = _HEAD.unpack_from(cursor, len(_MAGIC))
        begin = len(_MAGIC) + _HEAD.size
        end = begin + count * _STAMP
        names = cursor[end:].decode("utf-8", "replace").split("\n") if len(cursor) > end else []
        if len(names) != count:
            return None
        return cls((directory[0], directory[1], directory[2], directory[3]), names, cursor[begin:end])


def _cursor(own: Identity, names: list[str], stamps: bytes, now: int) -> bytes:
    if max(own[2:]) >= now - RECENT:
        own = (*own[:2], 0, 0)  # another change could leave the same times: list the names again
    return b"".join((_MAGIC, _HEAD.pack(*own, len(names)), stamps, "\n".join(names).encode()))


def _identity(directory: Directory) -> Identity:
    status = directory.status(".")
    if status is None:
        raise NotFound(f"{directory.shown} is gone", path=directory.shown)
    return status.st_dev & _64_BITS, status.st_ino & _64_BITS, status.st_mtime_ns, status.st_ctime_ns


class _Files:
    """The files of the members of a family."""

    def __init__(self, directory: Directory, start: str, end: str) -> None:
        self._directory, self._start, self._end = directory, start, end

    def names(self, known: Collection[str]) -> list[str]:
        """The names of all members, sorted; those in `known` are not checked again."""
        start, suffix = self._start, "" if self._end.startswith("/") else self._end
        first, last = len(start), -len(suffix) or None
        listed = [each for each in self._directory.names() if each.endswith(suffix) and each.startswith(start)]
        found = {each[first:last] for each in listed}
        if len(found) == len(known) and found.issuperset(known):
            return list(known)
        return sorted(found.intersection(known).union(filter(is_safe_name, found.difference(known))))

    def seem_unchanged(self, earlier: _Earlier, now: int) -> bool:
        """Whether the members (of a large family, a part of them) have their earlier stamps. The names are the same."""
        names, stamps = earlier.names, earlier.stamps
        if _NO_STAMP in stamps:
            return False
        if len(names) > MOST_EXAMINED and not self._end.startswith("/"):  # otherwise, each has its own directory
            at = now // 1_000_000_000 % -(-len(names) // MOST_EXAMINED) * MOST_EXAMINED
            names, stamps = names[at : at + MOST_EXAMINED], stamps[at * _STAMP : (at + MOST_EXAMINED) * _STAMP]
        return self.examine(names) == (names, stamps)

    def examine(self, names: list[str]) -> tuple[list[str], bytes]:
        """The members that exist, and their stamps."""
        fd = self._directory.fd
        before = self._start if fd is not None else self._directory.where(self._start)
        paths = [f"{before}{name}{self._end}" for name in names]
        look = partial(calls.stat, dir_fd=fd, follow_symlinks=False)
        try:
            return names, _packed(list(chain.from_iterable(map(_fields, map(look, paths)))))
        except OSError:
            pass  # some are gone, or cannot be examined: find out which
        numbers, there = list[int](), list[str]()
        for name, path in zip(names, paths, strict=True):
            try:
                numbers += _fields(look(path))
                there.append(name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise io_failure("examine", self._directory.where(path), error) from error
        return there, _packed(numbers)


_fields = attrgetter("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


def _packed(numbers: list[int]) -> bytes:
    try:
        return array("q", numbers).tobytes()
    except OverflowError:
        return array("Q", [number & _64_BITS for number in numbers]).tobytes()


def _compare(earlier: _Earlier | None, names: list[str], stamps: bytes) -> tuple[list[str], frozenset[str]]:
    """The members that changed or are new, and those that are gone."""
    if earlier is None:
        return names, frozenset()
    now = zip(names, struct.iter_unpack(f"{_STAMP}s", stamps), strict=True)
    before = struct.iter_unpack(f"{_STAMP}s", earlier.stamps)
    if earlier.names == names:
        return [name for (name, stamp), known in zip(now, before, strict=True) if stamp != known], frozenset()
    by_name = dict(zip(earlier.names, before, strict=True))
    return [name for name, stamp in now if by_name.get(name) != stamp], frozenset(by_name).difference(names)


def _kept(names: list[str], stamps: bytes, now: int, pending: Collection[str]) -> bytes:
    """The stamps, without those of members that are to be read again next time."""
    numbers, latest = array("q", stamps), now - RECENT
    modified, changed = numbers[2::_FIELDS], numbers[3::_FIELDS]
    again = [at for at, name in enumerate(names) if name in pending] if pending else []
    if names and (max(modified) >= latest or max(changed) >= latest):
        again += [at for at, changed_at in enumerate(map(max, modified, changed)) if changed_at >= latest]
    if not again:
        return stamps
    kept = bytearray(stamps)
    for at in again:
        kept[at * _STAMP : (at + 1) * _STAMP] = _NO_STAMP
    return bytes(kept)
