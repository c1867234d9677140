"""Every filesystem call of the package.

All other modules write `calls.open(...)`, never `os.open(...)`; a test of the source enforces this. So a test can
replace any name here to kill, fail, delay, shorten or record exactly that call everywhere.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False  # true for type checkers; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# `stat` is one of our calls here, not the module.
_KIND, _DIRECTORY, _REGULAR, _LINK = 0o170000, 0o040000, 0o100000, 0o120000

open = os.open
close = os.close
read = os.read
write = os.write
lseek = os.lseek
ftruncate = os.ftruncate
fstat = os.fstat
stat = os.stat
access = os.access
link = os.link
rename = os.rename
replace = os.replace
unlink = os.unlink
mkdir = os.mkdir
rmdir = os.rmdir
chdir = os.chdir
readlink = os.readlink
realpath = os.path.realpath
symlink = os.symlink
utime = os.utime

if TYPE_CHECKING:
    scandir, listdir = os.scandir, os.listdir
else:
    # btrfs lists what a directory had when its descriptor was opened or rewound, not what was created since.
    def scandir(place):
        if type(place) is int:
            os.lseek(place, 0, os.SEEK_SET)
        return os.scandir(place)

    def listdir(place):
        if type(place) is int:
            os.lseek(place, 0, os.SEEK_SET)
        return os.listdir(place)


def _unsupported(*_: object, **__: object) -> Any:
    """A stand-in for calls that this system does not have."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


if sys.platform == "win32":

    def free_space(path: str | os.PathLike[str]) -> int:
        """The number of bytes that users may still write on the filesystem of `path`."""
        import shutil

        return shutil.disk_usage(path).free

    fsync = os.fsync

    def sync_directory(descriptor: int) -> None:
        """Do nothing: NTFS journals names, and a directory cannot be opened for this."""

    clone = chown = mknod = write_mapped = _unsupported

    def read_into(descriptor: int, buffer: memoryview) -> int:
        """Read at most what `buffer` holds; return the number of bytes."""
        content = os.read(descriptor, len(buffer))
        buffer[: len(content)] = content
        return len(content)

else:
    import fcntl

    def free_space(path: str | os.PathLike[str]) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    flock = fcntl.flock
    chown = os.chown
    mknod = os.mknod

    if sys.platform == "darwin":

        def fsync(descriptor: int) -> None:
            """Write through to the disk: a plain fsync stops at the drive's cache here."""
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)

        clone = _unsupported

    else:
        fsync = os.fsync
        _FICLONE = 0x40049409

        def clone(target: int, source: int) -> None:
            """Share the source's blocks with the target (a reflink)."""
            fcntl.ioctl(target, _FICLONE, source)

    def sync_directory(descriptor: int) -> None:
        fsync(descriptor)

    def read_into(descriptor: int, buffer: memoryview) -> int:
        return os.readv(descriptor, (buffer,))

    def write_mapped(descriptor: int) -> None:
        """Read the first byte of an open file through a shared mapping, then set it to 0 there.

        The kernel does the writing: if it cannot (the disk is full), this raises, and no signal kills the process.
        """
        import mmap

        zeros = open("/dev/zero", os.O_RDONLY)
        try:
            with mmap.mmap(descriptor, 1) as mapped:
                mapped.find(b"x")  # reads it
                os.readv(zeros, (mapped,))
        finally:
            close(zeros)


if sys.platform == "linux":

    def chmod(path: int | str | os.PathLike[str], mode: int, *, dir_fd: int | None = None) -> None:
        """Change the mode of a path or an open file; refuse a link with ELOOP."""
        if isinstance(path, int):
            os.chmod(path, mode)
            return
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)  # needs no read access
        try:
            if (os.fstat(descriptor).st_mode & _KIND) == _LINK:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        finally:
            os.close(descriptor)

    listxattr = os.listxattr
    getxattr = os.getxattr
    setxattr = os.setxattr
    _SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ

    def enlarge_pipe(descriptor: int, size: int) -> None:
        """Enlarge the buffer of a pipe, if the system allows it; never raises."""
        try:
            fcntl.fcntl(descriptor, _SET_PIPE_SIZE, size)
        except OSError:
            return

    _SNAPSHOT_CREATE = 0x50009417  # BTRFS_IOC_SNAP_CREATE_V2
    _SNAPSHOT_NAME = 4040

    def snapshot_subvolume(parent: int, name: bytes, source: int) -> None:
        """Make `name` in the open directory `parent` a snapshot of the open btrfs subvolume `source`."""
        if len(name) >= _SNAPSHOT_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        fields = bytearray(source.to_bytes(8, sys.byteorder) + bytes(48) + name.ljust(_SNAPSHOT_NAME, b"\0"))
        fcntl.ioctl(parent, _SNAPSHOT_CREATE, fields)

else:

    def chmod(path: int | str | os.PathLike[str], mode: int, *, dir_fd: int | None = None) -> None:
        os.chmod(path, mode, dir_fd=dir_fd, follow_symlinks=isinstance(path, int) or sys.platform == "win32")

    def enlarge_pipe(descriptor: int, size: int) -> None:
        """Do nothing: other systems have no such call."""

    listxattr = getxattr = setxattr = snapshot_subvolume = _unsupported


def sync_filesystem(descriptor: int) -> None:
    """Sync the whole filesystem of an open file or directory."""
    from holdfast.fs import native

    native.sync_filesystem(descriptor)


def start_writing(descriptor: int, offset: int, length: int) -> None:
    """Start writing back a part of a file, or all of it (0, 0), and wait only for writes already under way.

    Each page that is dirty when the call begins is clean at some time after that.
    """
    from holdfast.fs import native

    native.start_writing(descriptor, offset, length)


def rename_noreplace(source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    """Rename, failing with EEXIST rather than replacing."""
    from holdfast.fs import native

    native.rename(source, target, native.NOREPLACE, src_dir_fd, dst_dir_fd)


def rename_exchange(source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    """Swap two names atomically."""
    from holdfast.fs import native

    native.rename(source, target, native.EXCHANGE, src_dir_fd, dst_dir_fd)


def flock_interruptible(descriptor: int, operation: int) -> int:
    """Like `flock`, but return EINTR when a signal arrives instead of waiting on; 0 is success."""
    from holdfast.fs import native

    return native.flock(descriptor, operation)


if sys.platform == "win32":

    def open_without_links(path: str) -> int:
        """Always raise: directories have no descriptors on Windows."""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

elif sys.platform == "darwin":

    def open_without_links(path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW_ANY)

else:
    _INTO = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    _THROUGH = _INTO | getattr(os, "O_PATH", os.O_RDONLY)  # needs no right to list it

    def open_without_links(path: str) -> int:
        """Open the directory at an absolute path. If a part of it is a symbolic link, raise ELOOP with that part.

        Each part is opened in the one before it, so replacing a directory with a link while this runs has no effect.
        (`openat2` needs only one system call, but loading `ctypes` takes longer than the calls that it saves.)
        """
        names = path.strip("/").split("/")
        here = os.open("/", _THROUGH)
        for depth, name in enumerate(names, 1):
            try:
                below = os.open(name or ".", _THROUGH if depth < len(names) else _INTO, dir_fd=here)
            except OSError as error:
                error.filename = "/" + "/".join(names[:depth])
                if error.errno == errno.ENOTDIR and _is_link(name, here):
                    error.errno = errno.ELOOP
                raise
            finally:
                os.close(here)
            here = below
        return here

    def _is_link(name: str, directory: int) -> bool:
        try:
            return (os.lstat(name, dir_fd=directory).st_mode & _KIND) == _LINK
        except OSError:
            return False


CHANGING = (
    *"open close write write_mapped ftruncate fsync sync_directory sync_filesystem link rename replace".split(),
    *"rename_noreplace rename_exchange unlink mkdir rmdir symlink mknod clone snapshot_subvolume chmod chown".split(),
    *"utime setxattr flock flock_interruptible".split(),
)
"""The calls that change the disk, or the holder of a lock."""
READING = (
    *"read read_into start_writing enlarge_pipe lseek fstat stat access scandir listdir chdir readlink".split(),
    *"realpath listxattr getxattr free_space open_without_links".split(),
)
"""The other calls."""


# --- Questions about one path -------------------------------------------------------------------------
# The guard asks these before every write, so they need no other module of this package.

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether `path` exists, links followed; False also if this user may not see it."""
    try:
        stat(path)
    except OSError:
        return False
    return True


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory, not a link to one; False also if this user may not see it."""
    try:
        return (stat(path, follow_symlinks=False).st_mode & _KIND) == _DIRECTORY
    except (OSError, ValueError):  # a NUL or a lone surrogate: no path has one
        return False


def read_small(path: str, limit: int, *, follow: bool = True) -> bytes:
    """The first `limit` bytes of a regular file; raises the system's own `OSError`. Never waits: a fifo or a device is
    refused, and so is a link unless `follow`."""
    descriptor = open(path, _FLAGS if follow else _FLAGS | _NOFOLLOW)
    try:
        if (fstat(descriptor).st_mode & _KIND) != _REGULAR:
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = b""
        while len(content) < limit and (more := read(descriptor, limit - len(content))):
            content += more
        return content
    finally:
        close(descriptor)


def find_upwards(start: str | os.PathLike[str], is_root: Callable[[str], bool]) -> str | None:
    """The nearest directory that is a root: `start`, or one above it; None if there is none."""
    here = os.path.abspath(start)
    while not is_root(here):
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above
    return here


def may_be_repository(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has `.jvs/`, or a `.git` that may lead to a repository."""
    return is_repository(path) or exists(os.path.join(path, ".git"))


def is_repository(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has a `.jvs/` that is not a symbolic link."""
    return is_directory(os.path.join(path, ".jvs"))
