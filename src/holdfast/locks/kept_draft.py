"""A private file that is made a lock by a link, again and again.

Making a file costs more than everything else about a lock: the file system looks for a free inode, and
looks longer the more of them were given back lately. So who takes a lock often keeps one private file,
writes what is to be said into it while nobody can see it, and links it to the lock's name. Nobody sees
it while the link is not there, and nothing is written into it while the link is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref

from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly, io_failure

_FLAGS = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
KEPT_FROM = 2
"""From which use on a file is kept: who takes the lock only once needs none."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class KeptDraft:
    """The private file of one lock in one process. Who takes the lock only once makes none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = 0
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._written_at = 0
        self._name = ""
        self._lock_id = ""
        self._pid = 0
        self._finalizer: weakref.finalize[..., KeptDraft] | None = None

    def publish(self, directory: Directory, name: str, content: bytes, lock_id: str) -> bool | None:
        """Give `name` this content if nobody has it; None if it has to be done another way.

        Commit point: the link. `lock_id` is what `is_lock` will be asked for.
        """
        if directory.fd is None or not self._lock.acquire(blocking=False):
            return None
        try:
            self._uses += 1
            if self._uses < KEPT_FROM:
                return None
            if not self._is_private(directory):
                self._make(directory, name)
            self._write(directory, content)
            self._lock_id = lock_id
            return self._link(directory, name)
        except OSError as error:
            self._forget()
            if error.errno in _NO_LINKS:
                self._uses = -(1 << 62)  # here there is no other way than the other way
                return None
            raise io_failure("create", directory.where(name), error) from error
        finally:
            self._lock.release()

    def is_lock(self, directory: Directory, name: str, lock_id: str) -> bool:
        """Whether `name` is this very file, published as this very lock. No means: look closer."""
        if self._lock_id != lock_id or self._pid != os.getpid():
            return False
        status = directory.status(name)
        if status is None or status.st_mtime_ns != self._written_at:
            return False  # the time too: an inode that was given back may be somebody else's by now
        return (status.st_dev, status.st_ino) == self._identity

    def discard(self) -> None:
        """Remove the private file; a lock that it is linked to stays."""
        with self._lock:
            if self._pid == os.getpid():
                self._forget()

    def _is_private(self, directory: Directory) -> bool:
        """Whether the file is still ours, in this directory, and not a lock that is held."""
        if self._identity is None or self._pid != os.getpid():
            return False
        status = directory.status(self._name)
        return (
            status is not None and status.st_nlink == 1 and (status.st_dev, status.st_ino) == self._identity
        )

    def _make(self, directory: Directory, name: str) -> None:
        self._forget()
        draft = f".{name}-{os.urandom(6).hex()}.tmp"
        fd = calls.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory.fd)
        try:
            status = calls.fstat(fd)
        finally:
            close_quietly(fd)
        self._name, self._pid, self._size = draft, os.getpid(), 0
        self._identity = status.st_dev, status.st_ino
        self._finalizer = weakref.finalize(self, _remove, directory.where(draft), os.getpid())

    def _write(self, directory: Directory, content: bytes) -> None:
        fd = calls.open(self._name, _FLAGS, dir_fd=directory.fd)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[calls.write(fd, rest) :]
            if self._size > len(content):
                calls.ftruncate(fd, len(content))
            self._size = len(content)
            self._written_at = calls.fstat(fd).st_mtime_ns
        finally:
            calls.close(fd)

    def _link(self, directory: Directory, name: str) -> bool:
        try:
            calls.link(
                self._name, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd, follow_symlinks=False
            )
        except FileExistsError:
            return False
        return True

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._identity, self._finalizer, self._size = None, None, 0


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():  # a forked child does not clear up behind its parent
        with contextlib.suppress(OSError):
            calls.unlink(path)
