"""Where the files of a tree's directories are: in its own payload, or in that of another tree.

A directory that is as it was in the base is not made again. The tree notes its *home* instead: the tree
that has it, and its path there. A home really has the directory; it is never a tree that only knows another
home. So whatever a tree needs of others is in its own list, and a tree that nobody's list names is needed by
nobody.

    file   = "holdfast homes 1\\n", u32 number of trees, tree*, record*, u32 0xffffffff, u32 CRC-32 of what is
             before these two
    tree   = u32 length of name, name
    record = u32 number of the tree, counted from 0, u32 length of path, u32 length of the path in its home or
             0xffffffff if that is the same, path, path in its home

The other trees stand beside the one that names them, or, once their snapshots are gone, among the
remnants. Directories without a record are in the tree's own payload; a tree without the file has all of them.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, Failure
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import Closing, write_all
from holdfast.fs.names import is_safe_name
from holdfast.trees.manifest import (
    HOMES,
    MANIFEST,
    PAYLOAD,
    READY,
    REMNANTS,
    Manifest,
    directory_of,
    read_whole,
)
from holdfast.trees.scan import NOFOLLOW, TreeWalker, unreadable, unwritable

_MAGIC = b"holdfast homes 1\n"
_NUMBER = struct.Struct("<I")
_RECORD = struct.Struct("<III")
_TAIL = struct.Struct("<II")
_END = _SAME = 0xFFFFFFFF
_MOST_OPEN = 32
_HINT = (
    "Bring this file back from a copy. Until then nothing that other snapshots have is deleted, for this one "
    "may need it; the snapshot itself may be, if nothing keeps it."
)


class SharedDirectory(NamedTuple):
    """Where the files of a directory are: the name of a tree, and the directory's path in it."""

    tree: str
    path: bytes


# --- The list of a tree -----------------------------------------------------------------------------


def read_shared_directories(tree: Path, *, complete: bool = True) -> dict[bytes, SharedDirectory]:
    """The directories of a tree that are in others. `Corrupt` if the list cannot be understood.

    Also if a `complete` tree has lost it: its mark says whether there is one.
    """
    where = f"{os.fspath(tree)}/{HOMES}"
    try:
        content = read_whole(where)
    except FileNotFoundError:
        if complete and _is_marked(tree):
            raise Corrupt(f"{where} is gone", hint=_HINT, path=where) from None
        return {}
    except OSError as error:
        raise unreadable(where, error) from error
    try:
        return _decoded(content)
    except (struct.error, IndexError, ValueError) as error:
        raise Corrupt(f"{where} is not a list of homes: {error}", hint=_HINT, path=where) from None


def _is_marked(tree: Path) -> bool:
    """Whether the mark of completeness says that there is a list."""
    where = f"{os.fspath(tree)}/{READY}"
    try:
        said = strictjson.decode(read_whole(where), source=where)
    except (OSError, Failure):
        return False
    return isinstance(said, dict) and said.get(HOMES) is True


def _decoded(content: bytes) -> dict[bytes, SharedDirectory]:
    if not content.startswith(_MAGIC):
        raise ValueError("it does not begin like one")
    last, checksum = _TAIL.unpack_from(content, len(content) - _TAIL.size)
    if last != _END or checksum != zlib.crc32(memoryview(content)[: -_TAIL.size]):
        raise ValueError("it is cut off, or was changed")
    at = len(_MAGIC)
    (count,) = _NUMBER.unpack_from(content, at)
    at += _NUMBER.size
    names: list[str] = []
    for _ in range(count):
        (length,) = _NUMBER.unpack_from(content, at)
        at += _NUMBER.size
        names.append(_checked(content[at : at + length].decode("ascii")))
        at += length
    return dict(_records(content, at, names))


def _checked(name: str) -> str:
    """The name of a tree leads nowhere else."""
    if not is_safe_name(name):
        raise ValueError("it has a name that no tree can have")
    return name


def _records(content: bytes, at: int, names: list[str]) -> Iterator[tuple[bytes, SharedDirectory]]:
    end, unpack, size = len(content) - _TAIL.size, _RECORD.unpack_from, _RECORD.size
    while at < end:
        number, length, there = unpack(content, at)
        start = at + size
        path = content[start : start + length]
        at = start + length
        if there == _SAME:
            yield path, SharedDirectory(names[number], path)
        else:
            yield path, SharedDirectory(names[number], content[at : at + there])
            at += there


def write_homes(tree: Path, homes: Iterable[tuple[bytes, SharedDirectory]]) -> None:
    """Write the list of a new tree. None is written if there is nothing to say."""
    numbers: dict[str, int] = {}
    records: list[bytes] = []
    for path, home in homes:
        number = numbers.setdefault(home.tree, len(numbers))
        if home.path == path:
            records += (_RECORD.pack(number, len(path), _SAME), path)
        else:
            records += (_RECORD.pack(number, len(path), len(home.path)), path, home.path)
    if not records:
        return
    names = [name.encode("ascii") for name in numbers]
    head = [_MAGIC, _NUMBER.pack(len(names)), *(_NUMBER.pack(len(name)) + name for name in names)]
    content = b"".join([*head, *records])
    content += _NUMBER.pack(_END)
    where = tree / HOMES
    try:
        descriptor = calls.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o444)
        try:
            write_all(descriptor, content + _NUMBER.pack(zlib.crc32(content[: -_NUMBER.size])))
        finally:
            calls.close(descriptor)
    except OSError as error:
        raise unwritable(os.fspath(where), error) from error


# --- The other trees --------------------------------------------------------------------------------


def places_beside(tree: Path, name: str) -> tuple[Path, Path]:
    """Where the tree of this name may be: beside another one; among the remnants if its snapshot is gone.

    Who opens the first of them that is there, in this order, finds it, though it is moved meanwhile.
    """
    return tree.parent / name, tree.parent.parent / REMNANTS / name


def tree_beside(tree: Path, name: str) -> Path:
    """The one of the two that is there at this moment."""
    beside, remnant = places_beside(tree, name)
    try:
        calls.stat(beside, follow_symlinks=False)
    except OSError:
        return remnant
    return beside


def located(tree: Path, homes: Mapping[bytes, SharedDirectory], path: bytes) -> Path:
    """Where a file of a tree really is."""
    directory, _, name = path.rpartition(b"/")
    home = homes.get(directory)
    top = tree if home is None else tree_beside(tree, home.tree)
    inside = directory if home is None else home.path
    return top / PAYLOAD / os.fsdecode(inside) / os.fsdecode(name)


class Stored(Closing):
    """The way to the directories of a tree, wherever their files are."""

    def __init__(self, tree: Path, homes: Mapping[bytes, SharedDirectory] | None = None) -> None:
        """`Corrupt` or an `IoFailure` if the tree's own list or payload cannot be read."""
        self.tree = tree
        self.homes = read_shared_directories(tree) if homes is None else homes
        self.own = TreeWalker(tree / PAYLOAD)
        self._others: dict[str, TreeWalker] = {}
        self._tops: dict[str, str] = {}

    def home(self, path: bytes) -> SharedDirectory:
        """Where the files of a directory are; in the tree itself, under its own name, if nowhere else."""
        return self.homes.get(path) or SharedDirectory(self.tree.name, path)

    def enter(self, path: str) -> int:
        """The descriptor of a directory, good until the next call.

        Raises the system's own error if there is no such directory.
        """
        home = self.homes.get(os.fsencode(path))
        if home is None:
            return self.own.enter(path)
        return self._other(home.tree).enter(os.fsdecode(home.path))

    def status(self, path: bytes) -> os.stat_result:
        """The status of a directory. Raises the system's own error."""
        home = self.homes.get(path)
        top = os.fsencode(self.own.root if home is None else self._top(home.tree))
        inside = path if home is None else home.path
        return calls.stat(top + b"/" + inside if inside else top, follow_symlinks=False)

    def where(self, path: str, name: str = "") -> str:
        """A path in the tree, for messages: where it really is."""
        home = self.homes.get(os.fsencode(path))
        if home is None:
            return self.own.where(path, name)
        return "/".join(filter(None, (self._top(home.tree), os.fsdecode(home.path), name)))

    def _top(self, name: str) -> str:
        """The payload of another tree, where it was when it was first asked for: a history may have many."""
        top = self._tops.get(name)
        if top is None:
            top = self._tops[name] = os.fspath(tree_beside(self.tree, name) / PAYLOAD)
        return top

    def _other(self, name: str) -> TreeWalker:
        way = self._others.get(name)
        if way is None:
            way = self._open(name)
            if len(self._others) >= _MOST_OPEN:
                self._others.pop(next(iter(self._others))).close()
            self._others[name] = way
        return way

    def _open(self, name: str) -> TreeWalker:
        missing: Failure | None = None
        for place in places_beside(self.tree, name):
            try:
                way = TreeWalker(place / PAYLOAD)
                self._tops[name] = way.root
                return way
            except Failure as failure:
                missing = failure
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from missing

    def close(self) -> None:
        """Let go of all descriptors."""
        self.own.close()
        for way in self._others.values():
            way.close()
        self._others.clear()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def share_tree(tree: Path, new_tree: Path) -> None:
    """Make `new_tree`, which will stand beside `tree`, one with the same content: it notes where that is."""
    manifest = Manifest.read(tree)
    try:
        calls.mkdir(new_tree)
        calls.mkdir(new_tree / PAYLOAD)
        with Stored(tree) as stored:
            entered = (path for path, body in manifest.records() if directory_of(path, body).kind != "m")
            write_homes(new_tree, ((path, stored.home(path)) for path in entered))
        link_or_copy_file(tree / MANIFEST, new_tree / MANIFEST)
        _mark(tree, new_tree)  # last
    except OSError as error:
        raise unwritable(os.fspath(new_tree), error) from error


def _mark(tree: Path, new_tree: Path) -> None:
    """The mark of completeness, which says that there is a list of homes. A damaged one stays what it is."""
    where = os.fspath(tree / READY)
    try:
        said = strictjson.decode(read_whole(where), source=where)
    except Failure:
        said = None
    if isinstance(said, dict):
        _write(new_tree / READY, strictjson.encode({**said, HOMES: True}) + b"\n")
    else:
        link_or_copy_file(tree / READY, new_tree / READY)


def link_or_copy_file(source: Path, target: Path) -> None:
    """Give a file of a tree a second name in another one, or else copy it."""
    try:
        calls.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _FULL or isinstance(error, FileNotFoundError | FileExistsError):
            raise
        _write(target, read_whole(os.fspath(source)))


def _write(target: Path, content: bytes) -> None:
    descriptor = calls.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    try:
        write_all(descriptor, content)
    finally:
        calls.close(descriptor)
