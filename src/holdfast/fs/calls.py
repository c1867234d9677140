"""Every file system call of the package, in one place.

All other modules write `calls.open(...)`, never `os.open(...)`: so a test can replace any of these
names to kill, fail, delay, shorten or record at exactly that call, and a reader can see at a glance
what Holdfast ever asks of a file system. A test reads the source and refuses any other way.

The names are looked up in this module at each use; replacing one here replaces it everywhere.
`CHANGING` are the calls that change what is on disk or who holds a lock, `READING` the rest.
"""

from __future__ import annotations

import errno
import os
import sys

open = os.open
close = os.close
read = os.read
write = os.write
lseek = os.lseek
ftruncate = os.ftruncate
fstat = os.fstat
stat = os.stat
link = os.link
rename = os.rename
replace = os.replace
unlink = os.unlink
mkdir = os.mkdir
rmdir = os.rmdir
scandir = os.scandir
listdir = os.listdir
readlink = os.readlink
symlink = os.symlink

if sys.platform == "win32":

    def fsync(descriptor: int) -> None:
        """Bring the file's content to the disk."""
        os.fsync(descriptor)

    def sync_directory(descriptor: int) -> None:
        """Nothing to do: NTFS journals names by itself, and directories cannot be opened for this."""

    def clone(target: int, source: int) -> None:
        """Share the source's blocks with the target."""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

else:
    import fcntl

    flock = fcntl.flock

    if sys.platform == "darwin":

        def fsync(descriptor: int) -> None:
            """Bring the file's content to the disk itself: a plain fsync stops at the drive's cache here."""
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)

        def clone(target: int, source: int) -> None:
            """Share the source's blocks with the target."""
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    else:
        fsync = os.fsync
        _FICLONE = 0x40049409

        def clone(target: int, source: int) -> None:
            """Share the source's blocks with the target (a reflink)."""
            fcntl.ioctl(target, _FICLONE, source)

    def sync_directory(descriptor: int) -> None:
        """Bring the directory's entries to the disk."""
        fsync(descriptor)


def sync_filesystem(descriptor: int) -> None:
    """Bring everything on the file system of an open file or directory to the disk, with one call."""
    from holdfast.fs import native

    native.sync_filesystem(descriptor)


def rename_noreplace(source: str, target: str, *, directory: int | None = None) -> None:
    """Rename within one directory, failing with EEXIST rather than replacing."""
    from holdfast.fs import native

    native.rename(source, target, native.NOREPLACE, directory)


def rename_exchange(source: str, target: str, *, directory: int | None = None) -> None:
    """Swap two names of one directory in one step."""
    from holdfast.fs import native

    native.rename(source, target, native.EXCHANGE, directory)


def flock_interruptible(descriptor: int, operation: int) -> int:
    """Like `flock`, but return EINTR when a signal arrives instead of going on waiting; 0 is success."""
    from holdfast.fs import native

    return native.flock(descriptor, operation)


CHANGING = (
    "open",
    "close",
    "write",
    "ftruncate",
    "fsync",
    "sync_directory",
    "sync_filesystem",
    "link",
    "rename",
    "replace",
    "rename_noreplace",
    "rename_exchange",
    "unlink",
    "mkdir",
    "rmdir",
    "symlink",
    "clone",
    "flock",
    "flock_interruptible",
)
READING = ("read", "lseek", "fstat", "stat", "scandir", "listdir", "readlink")
