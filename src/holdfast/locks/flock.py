"""flock(2) on open file descriptions that are kept between uses and are safe across fork.

Opening and closing a file costs more than locking it, so a pool keeps free descriptions for the next use of the same
path. One description serves one holder at a time, so the threads of a process exclude each other.

A forked child has copies of its parent's descriptions, and with them its locks. It closes them at once and never
unlocks them: the parent keeps its locks, and when it dies they are free although the child lives on. An executed
program inherits no descriptions, unless they are to stay locked until it has ended too (`descriptors_of_held`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager

from holdfast.errors import NotFound, PathEscape, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly, io_failure, not_a_path, resolved

if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _FAIL_IMMEDIATELY = 1
    _EXCLUSIVE = 2
    _LOCK_VIOLATION = 33
    _EVERYTHING = 0xFFFFFFFF
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)

    class _Overlapped(ctypes.Structure):
        _fields_ = (
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        )

    def _lock(fd: int, flags: int) -> bool:
        handle = msvcrt.get_osfhandle(fd)
        where = ctypes.byref(_Overlapped())
        if _kernel.LockFileEx(wintypes.HANDLE(handle), flags, 0, _EVERYTHING, _EVERYTHING, where):
            return True
        code = ctypes.get_last_error()
        if code == _LOCK_VIOLATION:
            return False
        raise OSError(errno.EIO, ctypes.FormatError(code))

    def try_lock(fd: int, shared: bool) -> bool:
        """Take the lock if it is free; return whether it was."""
        return _lock(fd, _FAIL_IMMEDIATELY | (0 if shared else _EXCLUSIVE))

    def lock(fd: int, shared: bool) -> None:
        """Wait for the lock without limit."""
        _lock(fd, 0 if shared else _EXCLUSIVE)

    def unlock(fd: int) -> None:
        handle = msvcrt.get_osfhandle(fd)
        where = ctypes.byref(_Overlapped())
        _kernel.UnlockFileEx(wintypes.HANDLE(handle), 0, _EVERYTHING, _EVERYTHING, where)

else:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN

    _TRY_SHARED = LOCK_SH | LOCK_NB
    _TRY_EXCLUSIVE = LOCK_EX | LOCK_NB

    def try_lock(fd: int, shared: bool) -> bool:
        try:
            calls.flock(fd, _TRY_SHARED if shared else _TRY_EXCLUSIVE)
        except BlockingIOError:
            return False
        return True

    def lock(fd: int, shared: bool) -> None:
        """Wait for the lock without limit; signal handlers run meanwhile and may raise."""
        calls.flock(fd, LOCK_SH if shared else LOCK_EX)

    def lock_until_signal(fd: int, shared: bool) -> int:
        """Wait for the lock until a signal arrives; return 0 if it was granted, else the error number."""
        return calls.flock_interruptible(fd, LOCK_SH if shared else LOCK_EX)

    def unlock(fd: int) -> None:
        calls.flock(fd, LOCK_UN)


MOST_IDLE = 64  # how many free descriptions a pool keeps; beyond that, the oldest is closed

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR)

_forking = threading.RLock()
"""Held across a fork, and while a description is opened or closed, so that a child knows all its copies."""


def without_forks() -> AbstractContextManager[object]:
    """A context in which this process does not fork."""
    return _forking


class UseStatistics:
    """How often descriptions were used, and for how long locks were held on them."""

    __slots__ = ("held_seconds", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.held_seconds = 0.0


class WaitStatistics:
    """How often and how long the users of a pool waited."""

    __slots__ = ("count", "longest", "seconds", "timed_out")

    def __init__(self) -> None:
        self.count = 0
        self.timed_out = 0
        self.seconds = 0.0
        self.longest = 0.0

    def add(self, waited: float, *, timed_out: bool) -> None:
        with _forking:  # threads may count at the same time
            self.count += 1
            self.timed_out += timed_out
            self.seconds += waited
            self.longest = max(self.longest, waited)


class OpenFileDescription(UseStatistics):
    """One open file description of a lock file. `owner` is the thread or task that holds a lock on it. It has one user
    at a time, so it counts its uses without a lock. `close` adds them to the pool's count."""

    __slots__ = ("__weakref__", "_retired", "device", "fd", "inode", "key", "owner", "since")

    def __init__(self, key: str, fd: int, retired: UseStatistics) -> None:
        super().__init__()
        self.fd = fd  # first, so that it is closed if anything below fails
        self.key = key
        self.owner: object = None
        self.since = 0.0
        self._retired = retired
        try:
            status = calls.fstat(fd)
        except OSError as error:
            raise io_failure("examine the lock file", key, error) from error
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise Refused(f"cannot lock {key}: it is neither a file nor a directory", path=key)
        self.device = status.st_dev
        self.inode = status.st_ino

    def is_current(self) -> bool:
        """Whether the path still leads to this file, and not to a replacement."""
        try:
            status = calls.stat(self.key, follow_symlinks=False)
        except OSError:
            return False
        return status.st_ino == self.inode and status.st_dev == self.device

    def close(self) -> None:
        """Close the description and so release its lock; idempotent."""
        with _forking:
            if self.fd < 0:
                return
            with contextlib.suppress(OSError):
                unlock(self.fd)  # closing alone would not release it while a child between fork and exec has a copy
            self.owner = None
            self._retired.uses += self.uses
            self._retired.held_seconds += self.held_seconds
            fd, self.fd = self.fd, -1  # last: after a Ctrl-C above, the next close() still does all of it
            close_quietly(fd)

    def forget_after_fork(self) -> None:
        """In the child: close the copy without unlocking, which would release the parent's lock."""
        fd, self.fd = self.fd, -1
        self.owner = None
        if fd >= 0:
            close_quietly(fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


_all: weakref.WeakSet[OpenFileDescription] = weakref.WeakSet()


class DescriptionPool:
    """The descriptions of one locker, both in use and free."""

    def __init__(self, *, follow_links: bool = True) -> None:
        self._open_file = _open if follow_links else _open_without_links
        self._idle: dict[str, OpenFileDescription] = {}
        self._open: weakref.WeakSet[OpenFileDescription] = weakref.WeakSet()
        self._retired = UseStatistics()
        self.waits = WaitStatistics()

    def take(self, key: str) -> OpenFileDescription:
        """Take a free description of the file at `key`, or open a new one. The caller has it to itself."""
        description = self._idle.pop(key, None)
        if description is not None and description.fd >= 0:
            return description
        with _forking:
            description = OpenFileDescription(key, self._open_file(key), self._retired)
            _all.add(description)
            self._open.add(description)
        return description

    def give_back(self, description: OpenFileDescription) -> None:
        """Keep an unlocked description for the next use of its path."""
        if self._idle.setdefault(description.key, description) is not description:
            description.close()
        elif len(self._idle) > MOST_IDLE:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                self._idle.pop(next(iter(self._idle))).close()

    def close_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(KeyError):
                self._idle.popitem()[1].close()

    def totals(self) -> UseStatistics:
        total = UseStatistics()
        with _forking:
            for each in (self._retired, *(each for each in self._open if each.fd >= 0)):
                total.uses += each.uses
                total.held_seconds += each.held_seconds
        return total

    def held_now(self) -> int:
        with _forking:
            return sum(1 for each in self._open if each.owner is not None)


def held_by(owner: object, description: OpenFileDescription) -> bool:
    """Whether `owner`, a thread or task of this process, already holds a lock on the same file."""
    with _forking:  # other threads may be opening files
        every = list(_all)
    return any(
        each.owner is owner and each.inode == description.inode and each.device == description.device for each in every
    )


_copies: set[int] = set()


@contextlib.contextmanager
def descriptors_of_held(directory: str) -> Iterator[list[int]]:
    """Copies of the descriptors of all locks that this process holds below a directory, for a program to inherit.

    Such a lock is free when this process releases it or, if it is killed first, when the program has ended too.
    """
    with _forking:
        held = [each for each in _all if each.owner is not None and each.key.startswith(directory + os.sep)]
        copies = [os.dup(each.fd) for each in held if each.fd >= 0]
        _copies.update(copies)
    try:
        yield copies
    finally:
        with _forking:
            _copies.difference_update(copies)
            for each in copies:
                close_quietly(each)


def _open_without_links(key: str) -> int:
    """Open a lock file, creating it if it is missing. No part of its path may be a symbolic link."""
    above, name = os.path.split(key)
    try:
        with Directory.open(above) as directory:
            return _open_in(directory, name, key)
    except NotFound:
        raise _no_directory(key) from None


_CONTROL = re.compile(r"(?:\A|(?<=/))\.(?:jvs|jit|holdfast)(?=/|\Z)", re.IGNORECASE)


def _open(key: str) -> int:
    """Open a lock file that the user named, creating it if it is missing. Neither the last part of its path nor any
    part below a control directory may be a link: whoever made the repository chose that link, not the user."""
    above, name = os.path.split(key)
    try:
        if control := _CONTROL.search(above):
            top = resolved(above[: control.start()] or ".")
            return _open_without_links(os.path.join(top, above[control.start() :], name))
        with contextlib.suppress(FileNotFoundError):
            return _open_existing(key, None, key)
        with Directory.follow(above or ".") as directory:
            return _open_in(directory, name, key)
    except NotFound:
        raise _no_directory(key) from None
    except ValueError:
        raise not_a_path(key) from None


def _open_in(directory: Directory, name: str, key: str) -> int:
    try:
        with contextlib.suppress(FileNotFoundError):
            return _open_existing(directory.at(name), directory.fd, key)
        return directory.open_or_create(name, os.O_RDWR | _FLAGS)
    except FileNotFoundError:  # the directory was removed
        raise _no_directory(key) from None
    except OSError as error:
        raise io_failure("open the lock file", key, error) from None
    except ValueError:
        raise not_a_path(key) from None


def _open_existing(name: str, directory: int | None, key: str) -> int:
    try:
        return calls.open(name, os.O_RDWR | _FLAGS, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _DENIED:
            # A directory can be locked too, and locking an existing file needs no write permission.
            with contextlib.suppress(OSError):
                return calls.open(name, os.O_RDONLY | _FLAGS, dir_fd=directory)
        if error.errno == errno.ELOOP:
            message = f"cannot lock {key}: it is a symbolic link, whose target may be another file"
            raise PathEscape(message, path=key) from None
        raise io_failure("open the lock file", key, error) from None


def _no_directory(key: str) -> NotFound:
    message = f"cannot lock {key}: its directory does not exist"
    return NotFound(message, path=key, hint="Create the directory first.")


if sys.platform != "win32":

    def _after_fork_in_child() -> None:
        global _forking
        _forking = threading.RLock()
        for description in list(_all):
            description.forget_after_fork()
        while _copies:
            close_quietly(_copies.pop())

    os.register_at_fork(
        before=lambda: _forking.acquire(),  # noqa: PLW0108 - a child has a new one
        after_in_parent=lambda: _forking.release(),  # noqa: PLW0108
        after_in_child=_after_fork_in_child,
    )
