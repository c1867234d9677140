"""The payload of a new tree while it is being filled."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import Closing, Directory, io_failure
from holdfast.trees.manifest import (
    BODY,
    ENTRY,
    ManifestEntry,
    Meta,
    Xattrs,
    meta_of_directory,
    mtime_of_directory,
)
from holdfast.trees.scan import NOFOLLOW, TreeWalker, held_time, split, unwritable


@contextmanager
def synced(place: Path) -> Iterator[None]:
    """What this block writes to the file system of `place` is on the disk after it; one call for all of it.

    The call is made through what was opened before the block: the system tells an error of the disk to
    everybody who had something open then, but to those who come later only if nobody was told yet.
    """
    with Directory.open(place) as directory:
        yield
        _sync(directory, place)


def sync_tree(tree: Path) -> None:
    """Bring to the disk what was written to the file system of a tree."""
    with synced(tree):
        pass


def _sync(directory: Directory, tree: Path) -> None:
    if directory.fd is None:
        return
    try:
        calls.sync_filesystem(directory.fd)
    except OSError as error:
        raise io_failure("sync", tree, error) from error


class EarlySync:
    """Syncs a tree in a thread of its own, so that less is left to do at the end.

    The system tells an error of the disk once, to whoever syncs first. So it must not be lost here: who
    marks the tree as complete asks for it before.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._directory = Directory.open(tree)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with self._directory as directory:
                _sync(directory, self._tree)
        except Exception as failure:
            self._failure = failure

    @classmethod
    def start(cls, tree: Path) -> EarlySync | None:
        """Begin; None where there can be no more threads, or no more open files."""
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
        """Wait until it is done, and raise what went wrong."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait until it is done, whatever comes of it: something else has gone wrong."""
        self._thread.join()


READ: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | NOFOLLOW
_WRITE: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | NOFOLLOW
_WORTH_A_CLONE = 128 << 10
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


_PERMISSIONS = 0o777
_NO_OWNERS = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Attributes:
    """What new entries below one directory get by themselves, and so what has to be set.

    In the payload of a snapshot (`kept`) a mode is only what reading takes: its owner can read it all, and
    nothing in it runs with other rights. The manifest has the mode as it was.
    """

    def __init__(self, directory: os.stat_result | None, *, kept: bool) -> None:
        """`directory` was just made, with all permissions that it was let have; None if that is not known."""
        self._kept = kept
        effective = os.geteuid() if hasattr(os, "geteuid") else 0
        self._may_give = effective == 0
        self._uid, self._gid = (effective, -1) if directory is None else (directory.st_uid, directory.st_gid)
        self._denied = _PERMISSIONS if directory is None else _PERMISSIONS & ~directory.st_mode

    def file_mode(self, mode: int) -> int:
        """The mode of a file here that has `mode` in the manifest."""
        return mode & _PERMISSIONS | stat.S_IRUSR if self._kept else mode

    def directory_mode(self, mode: int) -> int:
        """The mode of a directory here that has `mode` in the manifest."""
        return mode & _PERMISSIONS | stat.S_IRWXU if self._kept else mode

    def create(self, directory: int, name: str, mode: int) -> int:
        """Make a new file that is to have `mode` in the manifest."""
        return create_file(directory, name, self.file_mode(mode) & _PERMISSIONS)

    def finish_file(self, descriptor: int, meta: Meta, xattrs: Xattrs) -> list[str]:
        """Complete a new file; return what could not be given to it."""
        _, mode, uid, gid, mtime = meta
        lost = [] if uid == self._uid and gid == self._gid else self._give(descriptor, uid, gid)
        if xattrs:
            lost += write_xattrs(descriptor, xattrs)
        wanted = self.file_mode(mode)
        if xattrs or wanted & self._denied or wanted & ~_PERMISSIONS:
            calls.chmod(descriptor, wanted)
        calls.utime(descriptor, ns=(mtime, mtime))
        return lost

    def finish_directory(self, descriptor: int, meta: Meta, xattrs: Xattrs) -> list[str]:
        """Complete a directory into which nothing more will be put."""
        _, mode, uid, gid, mtime = meta
        lost: list[str] = []
        if not self.lacks_only_time(meta, xattrs):
            if uid != self._uid or gid != self._gid:
                lost = self._give(descriptor, uid, gid)
            lost += write_xattrs(descriptor, xattrs)
            calls.chmod(descriptor, self.directory_mode(mode))
        calls.utime(descriptor, ns=(mtime, mtime))
        return lost

    def lacks_only_time(self, meta: Meta, xattrs: Xattrs) -> bool:
        """Whether a directory that was just made has all but its time."""
        _, mode, uid, gid, _ = meta
        is_ours = uid == self._uid and gid == self._gid
        return is_ours and not xattrs and self.directory_mode(mode) == _PERMISSIONS & ~self._denied

    def finish_other(self, directory: int, name: str, meta: Meta, xattrs: Xattrs = ()) -> list[str]:
        """Complete a symbolic link or something special, without following or opening it."""
        kind, mode, uid, gid, mtime = meta
        lost = []
        if uid != self._uid or gid != self._gid:
            lost = self._give(name, uid, gid, directory)
        if xattrs:
            lost += write_xattrs(link_path(directory, name), xattrs)
        if kind != b"l":
            calls.chmod(name, mode, dir_fd=directory)
        calls.utime(name, ns=(mtime, mtime), dir_fd=directory, follow_symlinks=False)
        return lost

    def _give(self, target: int | str, uid: int, gid: int, directory: int | None = None) -> list[str]:
        if not self._may_give and uid != self._uid:
            return [f"owner {uid}:{gid}"]
        try:
            if directory is None:
                calls.chown(target, uid, gid)
            else:
                calls.chown(target, uid, gid, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_OWNERS:
                raise
            return [f"owner {uid}:{gid}"]
        return []


def meta_of_entry(entry: ManifestEntry) -> Meta:
    """What an entry of any kind has."""
    return Meta(entry.kind.encode(), entry.mode, entry.uid, entry.gid, entry.mtime_ns)


class Payload(Closing):
    """A directory that is filled, with what its entries are given."""

    def __init__(self, way: TreeWalker, made_as: os.stat_result, *, kept: bool) -> None:
        """`made_as` is what its top was when it had just been made; `kept` if it is a snapshot's."""
        self.way = way
        self.attributes = Attributes(made_as, kept=kept)
        self._made = {""}
        self.complete: set[str] = set()
        """Directories that somebody else gives all that they lack."""

    @classmethod
    def begin(cls, path: str | os.PathLike[str], *, kept: bool) -> Self:
        """Make the directory; `kept` if it is a snapshot's and not one to work in."""
        try:
            calls.mkdir(path)
            made_as = calls.stat(path)
        except OSError as error:
            raise unwritable(os.fspath(path), error) from error
        return cls(TreeWalker(path), made_as, kept=kept)

    def enter(self, path: str) -> int:
        """The descriptor of a directory of the payload, good until the next call."""
        try:
            return self.way.enter(path)
        except OSError as error:
            raise unwritable(self.way.where(path), error) from error

    def make(self, path: str) -> int:
        """Make a directory and those above it, as far as they are missing; its descriptor, as of `enter`."""
        missing: list[str] = []
        while path not in self._made:
            missing.append(path)
            path = split(path)[0]
        here = self.enter(path)
        for each in reversed(missing):
            above, name = split(each)
            with self.changing(each):
                calls.mkdir(name, dir_fd=here)
            self.complete.discard(above)
            self._made.add(each)
            here = self.enter(each)
        return here

    def has(self, path: str) -> bool:
        """Whether the directory was made: for its own sake, or on the way to others."""
        return path in self._made

    def finish_way(self, path: str, body: bytes) -> None:
        """Complete a directory that only leads to others: what is private stays so, whatever is below it.

        It gets a time that its record has not, for it has not the files either: nobody shall share it.
        """
        self.finish_directory(path, body)
        time = 0 if mtime_of_directory(body) else 1_000_000_000
        with self.changing(path):
            calls.utime(self.enter(path), ns=(time, time))

    def finish_directory(self, path: str, body: bytes) -> list[str]:
        """Complete a directory into which nothing more will be put; return what it could not be given."""
        meta, xattrs = meta_of_directory(body)
        if meta.kind == b"m":
            return []
        here = self.enter(path)
        try:
            return self.attributes.finish_directory(here, meta, xattrs)
        except OSError as error:
            raise unwritable(self.way.where(path), error) from error

    @contextmanager
    def changing(self, path: str, name: str = "") -> Iterator[None]:
        """Whatever the system refuses in this block is a failure to write there."""
        try:
            yield
        except OSError as error:
            raise unwritable(self.way.where(path, name), error) from error

    def close(self) -> None:
        """Let go of its directories."""
        self.way.close()
