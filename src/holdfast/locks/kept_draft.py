"""A private file that is made a lock by a link, again and again.

Making a file costs more than everything else about a lock: the file system looks for a free inode, and
looks longer the more of them were given back lately. So who takes a lock often keeps one private file
and its directory open, writes what is to be said into the file while nobody can see it, and links it to
the lock's name. Nobody sees it while the link is not there, and nothing is written into it while it is.

As long as the file is open its inode is nobody else's: what has this inode is this very file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable

from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, close_quietly, io_failure, write_all

_FLAGS = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
KEPT_FROM = 2
"""From which use on a file is kept: who takes the lock only once needs none."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class _File:
    """The private file, open, in its directory, which is open too."""

    def __init__(self, directory: Directory, name: str, fd: int, identity: tuple[int, int]) -> None:
        self.directory = directory
        self.name = name
        self.fd = fd
        self.identity = identity
        self.place = _identity(calls.fstat(directory.fd or 0))
        self.size = 0
        self.pid = os.getpid()

    def write(self, content: bytes) -> None:
        """Make it hold this and nothing else."""
        calls.lseek(self.fd, 0, os.SEEK_SET)
        write_all(self.fd, content)
        if self.size > len(content):
            calls.ftruncate(self.fd, len(content))
        self.size = len(content)

    def remove(self) -> None:
        """Close it, and remove it where it is ours: a forked child does not clear up behind its parent."""
        if self.pid == os.getpid():
            with contextlib.suppress(OSError):
                calls.unlink(self.name, dir_fd=self.directory.fd)
        self.directory.close()
        close_quietly(self.fd)


class KeptDraft:
    """The private file of one lock in one process. Who takes the lock only once makes none."""

    def __init__(self, path: str, name: str, open_directory: Callable[[], Directory]) -> None:
        """The lock is `name` in the directory at `path`, which `open_directory` opens."""
        self._path = path
        self._name = name
        self._open_directory = open_directory
        self._lock = threading.Lock()
        self._uses = 0
        self._file: _File | None = None
        self._lock_id = ""
        self._was_taken = False
        self._finalizer: weakref.finalize[..., KeptDraft] | None = None

    def is_worth_it(self) -> bool:
        """Count one more use of the lock, and say whether it is used often."""
        self._uses += 1
        return self._uses >= KEPT_FROM

    def publish(self, content: bytes, lock_id: str) -> bool | None:
        """Make a lock with this content if there is none; None if it has to be done another way.

        Commit point: the link. `lock_id` is what `remove` will be asked for.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._publish(content, lock_id)
        except FileNotFoundError:
            self._forget()  # somebody cleared it away, or all of the directory
            return None
        except OSError as error:
            self._forget()
            if error.errno in _NO_LINKS:
                self._uses = -(1 << 62)  # here there is no other way than the other way
                return None
            raise io_failure("create", f"{self._path}/{self._name}", error) from error
        finally:
            self._lock.release()

    def is_for(self, lock_id: str) -> bool:
        """Whether this very lock was made of the file, as far as that can be told without looking."""
        return self._lock_id == lock_id and self._file is not None and self._file.pid == os.getpid()

    def remove(self, lock_id: str) -> bool | None:
        """Remove the lock if it is this very file, published as this very lock; None: look closer."""
        if not self.is_for(lock_id):
            return None
        with self._lock:  # another thread may be about to close the directory
            file = self._file
            if file is None or not self.is_for(lock_id):
                return None
            status = file.directory.status(self._name)
            if status is None or _identity(status) != file.identity:
                return None
            return durable.remove_in(file.directory, self._name, durable=False)

    def discard(self) -> None:
        """Remove the private file; a lock that it is linked to stays."""
        file = self._file
        if file is not None and file.pid == os.getpid():  # in a forked child, the lock may be held for ever
            with self._lock:
                self._forget()

    def _publish(self, content: bytes, lock_id: str) -> bool | None:
        file = self._file
        if file is None or not self._is_private(file):
            file = self._make()
            if file is None:
                return None
        fd = file.directory.fd
        if self._was_taken and file.directory.status(self._name) is not None:
            return False  # spares the writing while somebody waits; what decides is the link
        file.write(content)
        self._lock_id = lock_id
        self._was_taken = True
        try:
            calls.link(file.name, self._name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        except FileExistsError:
            return False
        self._was_taken = False
        return True

    def _is_private(self, file: _File) -> bool:
        """Whether the file is ours, where the path leads to, and not a lock that is held."""
        if file.pid != os.getpid():
            return False
        status = file.directory.status(file.name)  # by name: the one that is left may be the lock's
        return (
            status is not None
            and status.st_nlink == 1
            and _identity(status) == file.identity
            and _identity(calls.stat(self._path)) == file.place
        )

    def _make(self) -> _File | None:
        self._forget()
        directory = self._open_directory()
        if directory.fd is None:
            return None
        draft = f".{self._name}-{os.urandom(6).hex()}.tmp"
        try:
            fd = calls.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory.fd)
        except BaseException:
            directory.close()
            raise
        try:
            made = _File(directory, draft, fd, _identity(calls.fstat(fd)))
        except BaseException:
            with contextlib.suppress(OSError):
                calls.unlink(draft, dir_fd=directory.fd)
            directory.close()
            close_quietly(fd)
            raise
        self._finalizer = weakref.finalize(self, made.remove)
        self._file = made
        return made

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._file, self._finalizer = None, None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
