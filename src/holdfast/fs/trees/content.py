"""What entries are and have: kinds and modes as the manifest says it, new files, extended attributes."""

from __future__ import annotations

import errno
import os
import stat

from holdfast.fs import calls
from holdfast.fs.trees.manifest import BODY, ENTRY, Meta, Xattrs
from holdfast.fs.trees.scan import held_time
from holdfast.fs.trees.way import NOFOLLOW

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
