"""Shared directories: which directories of a tree other trees store, and where.

A directory that is unchanged since the base is not stored again. The tree records its location instead: the name of the
tree that stores it, never of one that only refers to another, and its path there. So a tree's own list names everything
that it needs from others, and no tree needs one that no list names.

    file   = "holdfast homes 1\\n", u32 number of trees, tree*, record*, u32 0xffffffff, u32 CRC-32 of everything
             before these two
    tree   = u32 length of name, name
    record = u32 number of the tree from 0, u32 length of path, u32 length of the path there or 0xffffffff if
             it is the same, path, path there

The other trees are beside the one that names them or, once their snapshots are gone, among the retained directories.
A directory without a record is in the tree's own payload; a tree without the file stores everything itself.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, Failure
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import Closing, Directory, entry_exists, opened, parent_of, write_all
from holdfast.fs.names import is_safe_name
from holdfast.trees.manifest import (
    HOMES,
    KEPT_MODE,
    MANIFEST,
    PAYLOAD,
    READY,
    REMNANTS,
    Manifest,
    directory_of,
    is_safe_path,
)
from holdfast.trees.walker import NOFOLLOW, TreeWalker, read_whole, split, unreadable, writing

_MAGIC = b"holdfast homes 1\n"
_NUMBER = struct.Struct("<I")
_RECORD = struct.Struct("<III")
_TAIL = struct.Struct("<II")
_END = _SAME = 0xFFFFFFFF
_MOST_OPEN = 32
_HINT = (
    "Restore this file from a backup. Until then, no content of other snapshots is deleted, because this one may "
    "need it; the snapshot itself may be, if nothing protects it."
)


class SharedDirectory(NamedTuple):
    """The location of a stored directory: the name of a tree, and the path in it."""

    tree: str
    path: bytes


def read_shared_directories(tree: Path, *, complete: bool = True) -> dict[bytes, SharedDirectory]:
    """The directories of a tree that others store. Raises `Corrupt` if the list is damaged, or if a `complete` tree has
    lost it.

    The `.READY` of a tree says whether the tree has a list.
    """
    where = f"{os.fspath(tree)}/{HOMES}"
    try:
        content = read_whole(where)
    except FileNotFoundError:
        if complete and ready_fields(tree).get(HOMES) is True:
            raise Corrupt(f"{where} is gone", hint=_HINT, path=where) from None
        return {}
    except OSError as error:
        raise unreadable(where, error) from error
    try:
        return _decoded(content)
    except (struct.error, IndexError, ValueError) as error:
        raise Corrupt(f"{where} is not a list of shared directories: {error}", hint=_HINT, path=where) from None


def ready_fields(tree: Path) -> dict[str, object]:
    """The content of the tree's `.READY`; empty if it is missing or damaged."""
    where = f"{os.fspath(tree)}/{READY}"
    try:
        fields = strictjson.decode(read_whole(where), source=where)
    except (OSError, Failure):
        return {}
    return fields if isinstance(fields, dict) else {}


def _decoded(content: bytes) -> dict[bytes, SharedDirectory]:
    if not content.startswith(_MAGIC):
        raise ValueError("it has another first line")
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
        names.append(content[at : at + length].decode("ascii"))
        if not is_safe_name(names[-1]):  # it would lead elsewhere
            raise ValueError("it has an invalid name")
        at += length
    return dict(_records(content, at, names))


def _records(content: bytes, at: int, names: list[str]) -> Iterator[tuple[bytes, SharedDirectory]]:
    end, unpack, size = len(content) - _TAIL.size, _RECORD.unpack_from, _RECORD.size
    while at < end:
        number, length, there = unpack(content, at)
        start = at + size
        path = stored = content[start : start + length]
        at = start + length
        if there != _SAME:
            stored = content[at : at + there]
            at += there
        if (path and not is_safe_path(path)) or (stored and stored is not path and not is_safe_path(stored)):
            raise ValueError("it has a path that could lead elsewhere")
        yield path, SharedDirectory(names[number], stored)


def write_shared_directories(tree: Path, shared: Iterable[tuple[bytes, SharedDirectory]]) -> None:
    """Write the list of a new tree, unless it is empty."""
    numbers: dict[str, int] = {}
    records: list[bytes] = []
    for path, (name, there) in shared:
        number = numbers.setdefault(name, len(numbers))
        if there == path:
            records += (_RECORD.pack(number, len(path), _SAME), path)
        else:
            records += (_RECORD.pack(number, len(path), len(there)), path, there)
    if not records:
        return
    names = [name.encode("ascii") for name in numbers]
    head = [_MAGIC, _NUMBER.pack(len(names)), *(_NUMBER.pack(len(name)) + name for name in names)]
    content = b"".join([*head, *records])
    with writing(tree / HOMES):
        write_file(tree / HOMES, content + _TAIL.pack(_END, zlib.crc32(content)))


def places_beside(tree: Path, name: str) -> tuple[Path, Path]:
    """The paths at which another tree may be, beside `tree` or retained; this order finds it even if it is moved."""
    return tree.parent / name, tree.parent.parent / REMNANTS / name


def tree_beside(tree: Path, name: str) -> Path:
    """The first of `places_beside` if it exists at this moment, else the second."""
    beside, retained = places_beside(tree, name)
    return beside if entry_exists(beside) else retained


def located(tree: Path, shared: Mapping[bytes, SharedDirectory], path: bytes) -> Path:
    """The path of a file of a tree in the tree that stores it."""
    directory, _, name = path.rpartition(b"/")
    location = shared.get(directory)
    top = tree if location is None else tree_beside(tree, location.tree)
    inside = directory if location is None else location.path
    return top / PAYLOAD / os.fsdecode(inside) / os.fsdecode(name)


class Stored(Closing):
    """Opens the directories of a tree, wherever they are stored."""

    def __init__(self, tree: Path) -> None:
        """Raises `Corrupt` or an `IoFailure` if the tree's list or payload cannot be read."""
        self.tree = tree
        self.shared = read_shared_directories(tree)
        self.own = TreeWalker(tree / PAYLOAD)
        self._others: dict[str, TreeWalker] = {}
        self._tops: dict[str, str] = {}

    def location(self, path: bytes) -> SharedDirectory:
        """Where a directory is stored; by default in the tree itself, under its own name."""
        return self.shared.get(path) or SharedDirectory(self.tree.name, path)

    def enter(self, path: str) -> int:
        """The descriptor of a directory, valid until the next call. Raises `OSError`."""
        location = self.shared.get(os.fsencode(path))
        if location is None:
            return self.own.enter(path)
        return self._other(location.tree).enter(os.fsdecode(location.path))

    def status(self, path: bytes) -> os.stat_result:
        """The status of a directory. Raises `OSError`."""
        location = self.shared.get(path)
        walker = self.own if location is None else self._other(location.tree)
        above, name = split(os.fsdecode(path if location is None else location.path))
        return (
            calls.stat(name, dir_fd=walker.enter(above), follow_symlinks=False) if name else calls.fstat(walker.top())
        )

    def where(self, path: str, name: str = "") -> str:
        location = self.shared.get(os.fsencode(path))
        if location is None:
            return self.own.where(path, name)
        return "/".join(filter(None, (self._top(location.tree), os.fsdecode(location.path), name)))

    def _top(self, name: str) -> str:
        """The payload of another tree, looked up once: a history may have many."""
        if name not in self._tops:
            self._tops[name] = os.fspath(tree_beside(self.tree, name) / PAYLOAD)
        return self._tops[name]

    def _other(self, name: str) -> TreeWalker:
        if name in self._others:
            walker = self._others[name] = self._others.pop(name)  # the last one used is closed last
            return walker
        missing: Failure | None = None
        for path in places_beside(self.tree, name):
            try:
                walker = TreeWalker(path / PAYLOAD)
            except Failure as failure:
                missing = failure
                continue
            if len(self._others) >= _MOST_OPEN:
                self._others.pop(next(iter(self._others))).close()
            self._others[name], self._tops[name] = walker, walker.root
            return walker
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from missing

    def close(self) -> None:
        for walker in (self.own, *self._others.values()):
            walker.close()
        self._others.clear()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def share_tree(tree: Path, new_tree: Path) -> None:
    """Create `new_tree` with the content of `tree`, beside which it will be moved: it only records locations."""
    manifest = Manifest.read(tree)
    with writing(new_tree):
        with Directory.open(new_tree.parent) as parent:
            parent.make(new_tree.name, mode=0o700, durable=False)
        with Directory.open(new_tree) as top:
            top.make(PAYLOAD, mode=KEPT_MODE, durable=False)
        with Stored(tree) as stored:
            entered = (path for path, body in manifest.records() if directory_of(path, body).kind != "m")
            write_shared_directories(new_tree, ((path, stored.location(path)) for path in entered))
        link_or_copy_file(tree / MANIFEST, new_tree / MANIFEST)
        fields = ready_fields(tree)
        if fields:  # last
            write_file(new_tree / READY, strictjson.encode({**fields, HOMES: True}) + b"\n")
        else:  # a damaged one stays as it is
            link_or_copy_file(tree / READY, new_tree / READY)


def link_or_copy_file(source: Path, target: Path) -> None:
    try:
        with parent_of(source) as (here, name), parent_of(target) as (into, new_name):
            calls.link(name, new_name, src_dir_fd=here, dst_dir_fd=into, follow_symlinks=False)
    except OSError as error:
        if error.errno in _FULL or isinstance(error, FileNotFoundError | FileExistsError):
            raise
        write_file(target, read_whole(os.fspath(source)))


def adopt_tree(tree: Path) -> None:
    """Give the files beside the payload of a new tree to the owner of the repository, or to the group that shares it,
    whatever the umask of their creator. Raises `OSError`."""
    with Directory.open(tree) as directory:
        if directory.adopts():
            for name in (MANIFEST, HOMES, READY):
                with suppress(FileNotFoundError), opened(name, os.O_RDONLY | NOFOLLOW, dir_fd=directory.fd) as file:
                    directory.adopt(file, directory.mode_of_new(0o444))


def write_file(path: Path, content: bytes) -> None:
    """Create a read-only file of a tree. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
    with parent_of(path) as (here, name), opened(name, flags, 0o444, dir_fd=here) as descriptor:
        write_all(descriptor, content)
