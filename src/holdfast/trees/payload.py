"""The payload of a tree under construction, and the attributes of its entries."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import Closing, Directory, parent_of
from holdfast.trees.manifest import BODY, ENTRY, KEPT_MODE, Meta, Xattrs, meta_of_directory, mtime_of_directory
from holdfast.trees.scan import held_time
from holdfast.trees.walker import NOFOLLOW, TreeWalker, split, sync_filesystem, unwritable, writing

READ: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | NOFOLLOW
_WRITE: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | NOFOLLOW
_PERMISSIONS, _MODE, _KIND = 0o777, 0o7777, 0o170000
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
_NO_OWNERS = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_XATTRS = (errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_LARGE_XATTR = 1024  # some filesystems report ENOSPC for an attribute that is too large for an inode
# security modules assign these by location, so they are not preserved
_LOCATION_LABELS = ("security.selinux", "security.ima", "security.evm")

HEAD_OF_ENTRY = ENTRY.size - 6
"""The bytes of an entry that a status determines: kind, mode, owner, time and size."""
HEAD_OF_BODY = BODY.size - 8


def meta_of(status: os.stat_result) -> Meta:
    """The manifest's fields for an entry with this status."""
    mode = status.st_mode
    kind = _KINDS.get(mode & _KIND, b"?")
    return Meta(kind, mode & _MODE, status.st_uid, status.st_gid, held_time(status.st_mtime_ns))


def head_of_entry(status: os.stat_result) -> bytes:
    """The first `HEAD_OF_ENTRY` bytes of the entry with this status."""
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return ENTRY.pack(*meta_of(status), size, 0, 0)[:HEAD_OF_ENTRY]


def head_of_body(status: os.stat_result) -> bytes:
    """The first `HEAD_OF_BODY` bytes of the body of a directory with this status."""
    return BODY.pack(*meta_of(status), 0, 0)[:HEAD_OF_BODY]


def read_xattrs(target: int | str) -> tuple[Xattrs, list[str]]:
    """The extended attributes of an open file, or of a path without following it; and the unreadable ones."""
    follow = isinstance(target, int)
    try:
        names = calls.listxattr(target, follow_symlinks=follow)
    except OSError as error:
        return (), [] if error.errno in _NO_XATTRS else ["extended attributes"]
    if not names:
        return (), []
    found, lost = [], []
    for name in names:
        try:
            if name in _LOCATION_LABELS:
                continue
            found.append((os.fsencode(name), calls.getxattr(target, name, follow_symlinks=follow)))
        except OSError:
            lost.append(f"extended attribute {name}")
    return tuple(sorted(found)), lost


def _write_xattrs(target: int | str, xattrs: Xattrs) -> list[str]:
    """Set extended attributes; return the names of those that the system refuses."""
    refused = []
    for name, value in xattrs:
        try:
            calls.setxattr(target, os.fsdecode(name), value, follow_symlinks=isinstance(target, int))
        except OSError as error:
            if error.errno in _FULL and len(value) <= _LARGE_XATTR:
                raise
            refused.append(os.fsdecode(name))
    return refused


def link_path(directory: int, name: str) -> str:
    """A path to an entry of an open directory, for calls that take no directory descriptor."""
    return f"/proc/self/fd/{directory}/{name}"


class Attributes:
    """The default attributes of new entries below a directory, which decide what has to be set.

    In the payload of a snapshot (`kept`), the owner can read every file, nobody else can write to one, and none is
    setuid or setgid; the manifest has the original mode. If a group shares the repository, it may delete entries.
    """

    def __init__(self, directory: os.stat_result | None, *, kept: bool) -> None:
        """`directory` was just created, with the permissions that new ones below it get; None if unknown."""
        self._kept = kept
        effective = os.geteuid() if hasattr(os, "geteuid") else 0
        self._is_root = effective == 0
        self._uid, self._gid = (effective, -1) if directory is None else (directory.st_uid, directory.st_gid)
        self._denied = _PERMISSIONS if directory is None else _PERMISSIONS & ~directory.st_mode
        self._is_shared = kept and directory is not None and bool(directory.st_mode & stat.S_ISGID)

    def create(self, directory: int, name: str, mode: int) -> int:
        """Create a file that has `mode` in the manifest; return its descriptor."""
        mode = mode & KEPT_MODE | stat.S_IRUSR if self._kept else mode & _PERMISSIONS
        return calls.open(name, _WRITE, mode, dir_fd=directory)

    def finish_file(self, descriptor: int, meta: Meta, xattrs: Xattrs) -> list[str]:
        """Complete a new file; return what the system refused."""
        _, mode, uid, gid, mtime = meta
        lost = [] if uid == self._uid and gid == self._gid else self._chown(descriptor, uid, gid)
        if xattrs:
            lost += _write_xattrs(descriptor, xattrs)
        mode = mode & KEPT_MODE | stat.S_IRUSR if self._kept else mode
        if xattrs or mode & self._denied or mode & ~_PERMISSIONS:
            calls.chmod(descriptor, mode)
        calls.utime(descriptor, ns=(mtime, mtime))
        return lost

    def finish_directory(self, descriptor: int, meta: Meta, xattrs: Xattrs) -> list[str]:
        """Complete a directory to which nothing more is added."""
        _, mode, uid, gid, mtime = meta
        lost = [] if uid == self._uid and gid == self._gid else self._chown(descriptor, uid, gid)
        mode = self._kept_mode(mode) if self._kept else mode
        if xattrs or uid != self._uid or gid != self._gid or mode != _PERMISSIONS & ~self._denied:
            lost += _write_xattrs(descriptor, xattrs)
            calls.chmod(descriptor, mode)
        calls.utime(descriptor, ns=(mtime, mtime))
        return lost

    def _kept_mode(self, mode: int) -> int:
        """The mode of a directory of a payload: a group that shares the repository may delete what it may read."""
        shared = stat.S_ISGID | stat.S_IWGRP if self._is_shared and mode & stat.S_IRGRP else 0
        return mode & KEPT_MODE | stat.S_IRWXU | shared

    def finish_other(self, directory: int, name: str, meta: Meta, xattrs: Xattrs = ()) -> list[str]:
        """Complete a symbolic link or a special file, without following or opening it."""
        kind, mode, uid, gid, mtime = meta
        lost = [] if uid == self._uid and gid == self._gid else self._chown(name, uid, gid, directory)
        if xattrs:
            lost += _write_xattrs(link_path(directory, name), xattrs)
        if kind != b"l":
            calls.chmod(name, mode, dir_fd=directory)
        calls.utime(name, ns=(mtime, mtime), dir_fd=directory, follow_symlinks=False)
        return lost

    def _chown(self, target: int | str, uid: int, gid: int, directory: int | None = None) -> list[str]:
        lost = [f"owner {uid}:{gid}"]
        if not self._is_root and uid != self._uid:
            return lost
        try:
            if directory is None:
                calls.chown(target, uid, gid)
            else:
                calls.chown(target, uid, gid, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_OWNERS:
                raise
            return lost
        return []


class Payload(Closing):
    """The new directory of a snapshot's files, with the attributes of its entries."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with writing(path), parent_of(path) as (here, name):
            calls.mkdir(name, KEPT_MODE, dir_fd=here)
        self.walker = TreeWalker(path)
        self.attributes = Attributes(self.walker.root_status(), kept=True)
        self._created = {""}
        self._first_links: TreeWalker | None = None

    def enter(self, path: str) -> int:
        """The descriptor of a directory of the payload, valid until the next call."""
        try:
            return self.walker.enter(path)
        except OSError as error:
            raise unwritable(self.walker.where(path), error) from error

    def make(self, path: str) -> int:
        """Create a directory and its missing parents; return its descriptor, as `enter` does."""
        missing: list[str] = []
        while path not in self._created:
            missing.append(path)
            path = split(path)[0]
        here = self.enter(path)
        for each in reversed(missing):
            with self.changing(each):
                calls.mkdir(split(each)[1], KEPT_MODE, dir_fd=here)
            self._created.add(each)
            here = self.enter(each)
        return here

    def first_links(self) -> TreeWalker:
        """A second walker, to link files to names that they have already."""
        if self._first_links is None:
            self._first_links = TreeWalker(self.walker.root)
        return self._first_links

    def has(self, path: str) -> bool:
        """Whether the directory was created, for itself or as a parent of others."""
        return path in self._created

    def finish_parent(self, path: str, body: bytes) -> None:
        """Complete a directory that exists only as a parent of others: private content stays private.

        It gets another time than in its record, because it lacks the files: no tree may share it.
        """
        self.finish_directory(path, body)
        time = 0 if mtime_of_directory(body) else 1_000_000_000
        with self.changing(path):
            here = self.enter(path)
            calls.utime(here, ns=(time, time))

    def finish_directory(self, path: str, body: bytes) -> None:
        """Complete a directory to which nothing more is added."""
        meta, xattrs = meta_of_directory(body)
        if meta.kind != b"m":
            here = self.enter(path)
            with self.changing(path):
                self.attributes.finish_directory(here, meta, xattrs)

    @contextmanager
    def changing(self, path: str, name: str = "") -> Iterator[None]:
        """Raise the failure to write there for an `OSError` of the block."""
        try:
            yield
        except OSError as error:
            raise unwritable(self.walker.where(path, name), error) from error

    def close(self) -> None:
        self.walker.close()
        if self._first_links is not None:
            self._first_links.close()


class EarlySync:
    """Syncs a tree in a thread, so that less is left for the end.

    The system reports a disk error only once, to the first sync. So the capture asks for the error here before it marks
    the tree as complete.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._directory = Directory.open(tree)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with self._directory as directory:
                sync_filesystem(directory, self._tree)
        except Exception as failure:
            self._failure = failure

    @classmethod
    def start(cls, tree: Path) -> EarlySync | None:
        """Begin; None if no more threads or descriptors are available."""
        try:
            syncing = cls(tree)
        except Failure:
            return None
        try:
            syncing._thread.start()
        except RuntimeError:
            syncing._directory.close()
            return None
        return syncing

    def finish(self) -> None:
        self.close()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for the sync, and ignore its failure: another one is on its way."""
        self._thread.join()
