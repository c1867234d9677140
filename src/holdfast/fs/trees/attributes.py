"""Giving new entries what they had where they come from: owner, extended attributes, mode, times."""

from __future__ import annotations

import errno
import os
import stat

from holdfast.fs import calls
from holdfast.fs.trees.content import create_file, link_path, write_xattrs
from holdfast.fs.trees.manifest import ManifestEntry, Meta, Xattrs

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
