"""One look at a directory: what is in it, and by which marks one can tell later that it is still the same.

The *identity* of a directory is one string of bytes: its own status, the names of all that is in it, and
of each that is no directory its inode, mode, size and the times when content and status changed last. Two
looks with equal identities saw the same content, unless a file was changed so shortly before the first that
a second change would have left the same time: such a file is *recent*.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import IoFailure, NotFound, NotReadable
from holdfast.fs import calls
from holdfast.fs.directory import Closing, close_quietly, io_failure

TYPE_CHECKING = False  # what checkers take for true; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Iterator


HEAD = struct.Struct("<QIIIqqIII")
MARK = struct.Struct("<QIQqq")
NO_MARK = bytes(MARK.size)
_TIME = struct.Struct("<q")
_TIME_OF_CHANGE = struct.calcsize("<QIIIq")  # where it is in the head

_TICK = 20_000_000  # the longest that file systems with fine timestamps keep the same one, doubled
_COARSE_TICK = 2_000_000_000
_SECOND = 1_000_000_000
_BLOCK = 512
_KIND, _FILE = 0o170000, 0o100000
_EMPTY_SUBVOLUME = 2  # in a btrfs snapshot, the inode of what was a subvolume in its source
_FIRST_TIME, _LAST_TIME = -(1 << 63), (1 << 63) - 1


class Listing:
    """What one look at a directory found; `names` and `statuses` are of what is no directory, in order.

    There are no `statuses` if only the identity is left of the look. `newest` is when the status of one of
    them changed last; `linked`, whether one of them has other names.
    """

    __slots__ = ("directories", "identity", "linked", "names", "newest", "own", "statuses")

    def __init__(
        self,
        own: os.stat_result,
        directories: list[str],
        names: list[str],
        statuses: list[os.stat_result],
        identity: bytes,
        newest: int,
        linked: bool,
    ) -> None:
        self.own, self.directories, self.names, self.statuses = own, directories, names, statuses
        self.identity, self.newest, self.linked = identity, newest, linked

    def encoded_names(self) -> list[bytes]:
        """The names as the file system has them."""
        return names_in(self.identity)

    def marks(self) -> list[bytes]:
        """By what each of `names` can be told apart from what it may become."""
        identity, size = self.identity, MARK.size
        return [identity[at : at + size] for at in range(self._marks_at(), len(identity), size)]

    def sizes_and_times(self) -> list[tuple[int, int]]:
        """Of each of `names` its size, and when its status changed last."""
        marks = MARK.iter_unpack(memoryview(self.identity)[self._marks_at() :])
        return [(size, changed) for _, _, size, _, changed in marks]

    def status(self, index: int) -> os.stat_result:
        """The status of one of `names`; who owns it is not known if only the identity is left."""
        if self.statuses:
            return self.statuses[index]
        inode, *rest = MARK.unpack_from(self.identity, self._marks_at() + index * MARK.size)
        return _status(inode, *rest)

    def _marks_at(self) -> int:
        return len(self.identity) - MARK.size * len(self.names)


def look(descriptor: int) -> Listing:
    """Look at an open directory. The order of names is that of their bytes.

    This is the price of every file that has not changed, so it is written for speed.
    """
    own = calls.fstat(descriptor)
    with calls.scandir(descriptor) as listed:
        entries = list(listed)
    directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    if directories:
        entries = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
    try:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        found = list(_still_there(entries))
    found.sort()
    directories.sort()
    names = [name for name, _ in found]
    blob, below = "\0".join(names), "\0".join(directories)
    if not (blob.isascii() and below.isascii()):
        found.sort(key=_bytes_of_name)
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
    return Listing(
        own,
        directories,
        names,
        statuses,
        b"".join([head, encoded, encoded_below, *marks]),
        max([each.st_ctime_ns for each in statuses], default=0),
        max([each.st_nlink for each in statuses], default=1) > 1,
    )


def _still_there(entries: list[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield entry.name, status


def _bytes_of_name(found: tuple[str, os.stat_result]) -> bytes:
    return os.fsencode(found[0])


def own_mark(own: os.stat_result, count: int, names: int, directories: int) -> bytes:
    """What an identity begins with: the directory itself, and how long what follows is."""
    times = held_time(own.st_mtime_ns), held_time(own.st_ctime_ns)
    status = (own.st_ino, own.st_mode, own.st_uid, own.st_gid, *times)
    return HEAD.pack(*status, count, names, directories)


def mark_of(status: os.stat_result) -> bytes:
    """By what one file can be told apart from what it may become."""
    times = held_time(status.st_mtime_ns), held_time(status.st_ctime_ns)
    return MARK.pack(status.st_ino, status.st_mode, status.st_size, *times)


def held_time(nanoseconds: int) -> int:
    """A time as 64 bits can hold it: what is before 1677 or after 2262 becomes the first or last moment."""
    return max(_FIRST_TIME, min(_LAST_TIME, nanoseconds))


def marks_by_name(identity: bytes) -> dict[bytes, bytes]:
    """Take an identity apart: the mark of each name."""
    *_, count, length, directories = HEAD.unpack_from(identity)
    start, size = HEAD.size + length + directories, MARK.size
    marks = [identity[at : at + size] for at in range(start, start + count * size, size)]
    return dict(zip(names_in(identity), marks, strict=True))


def names_in(identity: bytes) -> list[bytes]:
    """The names of what is no directory in the directory that an identity is of."""
    *_, count, length, _ = HEAD.unpack_from(identity)
    return identity[HEAD.size : HEAD.size + length].split(b"\0") if count else []


def directories_in(identity: bytes) -> list[str]:
    """The names of the directories in the directory that an identity is of."""
    *_, names, directories = HEAD.unpack_from(identity)
    start = HEAD.size + names
    return os.fsdecode(identity[start : start + directories]).split("\0") if directories else []


def is_identity(content: bytes) -> bool:
    """Whether it can be one."""
    if len(content) < HEAD.size:
        return False
    *_, count, names, directories = HEAD.unpack_from(content)
    return bool(len(content) == HEAD.size + names + directories + count * MARK.size)


def is_of(identity: bytes, own: os.stat_result) -> bool:
    """Whether an identity is of the directory with this status, and no name came or went there since."""
    inode, _, _, _, mtime, ctime, *_ = HEAD.unpack_from(identity)
    return bool((inode, mtime, ctime) == (own.st_ino, own.st_mtime_ns, own.st_ctime_ns))


def listing_of(identity: bytes) -> Listing | None:
    """What a look found that gave this identity; None if it was not files with one name alone."""
    inode, mode, uid, gid, mtime, ctime, count, names, directories = HEAD.unpack_from(identity)
    marks = [*MARK.iter_unpack(memoryview(identity)[HEAD.size + names + directories :])]
    if {each[1] & _KIND for each in marks} - {_FILE}:
        return None
    return Listing(
        _status(inode, mode, 0, mtime, ctime, uid, gid),
        directories_in(identity),
        os.fsdecode(identity[HEAD.size : HEAD.size + names]).split("\0") if count else [],
        [],
        identity,
        max([each[4] for each in marks], default=0),
        False,
    )


def _status(
    inode: int, mode: int, size: int, mtime: int, ctime: int, uid: int = 0, gid: int = 0
) -> os.stat_result:
    return os.stat_result((mode, inode, 0, 1, uid, gid, size, 0, 0, 0, 0.0, 0.0, 0.0, 0, mtime, ctime))


def count_in(identity: bytes) -> int:
    """How many entries it has that are no directories."""
    return int(HEAD.unpack_from(identity)[-3])


def inode_of(identity: bytes) -> int:
    """The inode of the directory that an identity is of."""
    return int.from_bytes(identity[:8], "little")


def is_foreign(path: str, own: os.stat_result, device: int, mounts: frozenset[str]) -> bool:
    """Whether a directory of a source on `device` is none of it: something else is mounted there."""
    return own.st_dev != device or path in mounts or (path != "" and own.st_ino == _EMPTY_SUBVOLUME)


def is_recent(changed: int, now: int) -> bool:
    """Whether a file changed at `changed` could be changed again at `now` and keep that time (both in ns)."""
    if changed < now - _COARSE_TICK:
        return False
    return changed >= now - (_TICK if changed % _SECOND else _COARSE_TICK)


def without_recent(identity: bytes, listing: Listing, now: int) -> bytes:
    """The identity with what is recent blotted out: it matches nothing, so it is read again.

    Of files their marks; of the directory itself its time, for its extended attributes may change again.
    """
    own = is_recent(listing.own.st_ctime_ns, now)
    start, earliest = len(identity) - MARK.size * len(listing.names), now - _COARSE_TICK
    marks = MARK.iter_unpack(memoryview(identity)[start:])  # of what was read, which is after the look
    recent = [at for at, each in enumerate(marks) if each[4] >= earliest and is_recent(each[4], now)]
    if not (own or recent):
        return identity
    kept = bytearray(identity)
    if own:
        _TIME.pack_into(kept, _TIME_OF_CHANGE, _FIRST_TIME)
    for index in recent:
        at = start + index * MARK.size
        kept[at : at + MARK.size] = NO_MARK
    return bytes(kept)


def allocated(status: os.stat_result) -> int:
    """How many bytes something takes on the disk."""
    if sys.platform == "win32":
        return status.st_size
    return status.st_blocks * _BLOCK


def device_number(status: os.stat_result) -> int:
    """Which device a device file stands for."""
    if sys.platform == "win32":
        return 0
    return status.st_rdev


NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
DIRECTORY: int = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW
_KEPT = 64
_DEEP = 4096
_CLOSED = -1


class Walker(Closing):
    """Opens directories below a root; each stays open while the way leads through it.

    Each step refuses a symbolic link, whatever happens to the tree meanwhile. Only some descriptors of
    a very long way are kept, so that the depth is not limited by their number, nor by that of a path.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._names: list[str] = []
        self._path: str | None = ""
        self._open = [self._open_top(self.root)]

    @staticmethod
    def _open_top(root: str) -> int:
        return open_top(root)

    def enter(self, path: str) -> int:
        """The descriptor of the directory at `path` ("" is the root), good until the next call.

        Raises the system's own error if there is no such directory.
        """
        if path == self._path:
            return self._open[-1]
        common, rest = self._shared_with(path)
        self._leave(common)
        self._path = None  # until it is reached
        level = common
        while self._open[level] == _CLOSED:
            level -= 1
        for depth, name in enumerate([*self._names[level:], *rest], level):
            self._step(depth, name)
        self._path = path
        return self._open[-1]

    def _shared_with(self, path: str) -> tuple[int, list[str]]:
        """How many steps of the way are also the way to `path`, and the names of its other steps.

        Most ways lead on from where we are, or from one step back: so those are not taken apart.
        """
        here = self._path or ""
        if here and path.startswith(here) and path[len(here)] == "/":
            return len(self._names), path[len(here) + 1 :].split("/")
        back = here.rpartition("/")[0]
        if here and path.startswith(back) and (not back or path[len(back) : len(back) + 1] == "/"):
            rest = path[len(back) + 1 :] if back else path
            return len(self._names) - 1, rest.split("/") if rest else []
        names = path.split("/") if path else []
        common = _common(self._names, names)
        return common, names[common:]

    def _step(self, depth: int, name: str) -> None:
        found = calls.open(name, DIRECTORY, dir_fd=self._open[depth])
        if depth + 1 < len(self._open):
            self._open[depth + 1] = found
        else:
            self._open.append(found)
            self._names.append(name)
        if depth >= _KEPT and depth % (_KEPT if depth < _DEEP else _DEEP):
            close_quietly(self._open[depth])
            self._open[depth] = _CLOSED

    def _leave(self, level: int) -> None:
        for each in self._open[level + 1 :]:
            if each != _CLOSED:
                close_quietly(each)
        del self._open[level + 1 :], self._names[level:]

    def top(self) -> int:
        """The descriptor of the root, good until the way is closed."""
        return self._open[0]

    def where(self, path: str, name: str = "") -> str:
        """A path in the tree, for messages."""
        return "/".join(filter(None, (self.root, path, name)))

    def close(self) -> None:
        """Let go of all descriptors."""
        self._leave(0)
        self._path = None
        if self._open[0] != _CLOSED:
            close_quietly(self._open[0])
            self._open[0] = _CLOSED


def open_top(path: str) -> int:
    """Open a directory that a caller named; links on the way are the caller's own choice."""
    return calls.open(path, DIRECTORY & ~getattr(os, "O_NOFOLLOW", 0))


def joined(path: str, name: str) -> str:
    """The path of `name` in the directory `path` of a tree."""
    return f"{path}/{name}" if path else name


def _common(one: list[str], other: list[str]) -> int:
    count = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        count += 1
    return count


class TreeWalker(Walker):
    """The way below a root that a caller named."""

    @staticmethod
    def _open_top(root: str) -> int:
        return open_directory(root)


def open_directory(path: str) -> int:
    """Open the directory that a caller named; links on the way are the caller's own choice."""
    try:
        return open_top(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no directory {path}", path=path) from None
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> IoFailure:
    """The failure for something that must be read and cannot be."""
    if isinstance(error, PermissionError):
        return NotReadable("read", shown(path), error)
    return io_failure("read", shown(path), error)


def unwritable(path: str, error: OSError) -> IoFailure:
    """The failure for something that must be written and cannot be."""
    return io_failure("write", shown(path), error)


def split(path: str) -> tuple[str, str]:
    """The directory and the name in it."""
    directory, _, name = path.rpartition("/")
    return directory, name


def shown(path: str) -> str:
    """A path for people and for JSON: bytes that are no text are written as `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


Progress = Callable[[int, int], None]
"""Called now and then with the number of files and of bytes that have been dealt with."""


class Recent(NamedTuple):
    """A file that changed so shortly before it was read that its times cannot show another change."""

    path: str
    name: str
    digest: bytes


class CaptureStats:
    """Counts, and lists of what is out of the ordinary."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.files = self.directories = self.bytes = self.stored_bytes = 0
        self.not_preserved: list[str] = []
        self.special: list[str] = []
        self.changed: list[str] = []
        self.recent: list[Recent] = []
        self.any_recent = False
        self._progress = progress

    def report(self) -> None:
        """Tell who wants to know how far it is."""
        if self._progress is not None:
            self._progress(self.files, self.bytes)

    def lose(self, path: str, what: list[str]) -> None:
        """Note what cannot be kept of an entry."""
        self.not_preserved += [f"{shown(path) or '.'}: {each}" for each in what]
