"""The locks that are compared, each used the way its own documentation shows, with a time limit.

`cycle` is written out for each, so that none pays for method calls that only the bench makes.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from importlib.metadata import version
from importlib.util import find_spec
from typing import ClassVar

from holdfast import FileLocker, LockGuard

TIMEOUT = 10.0


class Contender(ABC):
    """One lock on one file, exclusive or shared."""

    name: ClassVar[str]
    package: ClassVar[str | None] = None

    def __init__(self, path: str, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared

    @abstractmethod
    def acquire(self) -> None:
        """Wait for the lock, `TIMEOUT` at most."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock."""

    def cycle(self, times: int) -> None:
        """Acquire and release that many times."""
        for _ in range(times):
            self.acquire()
            self.release()

    @classmethod
    def is_available(cls) -> bool:
        """Whether it can run here."""
        return cls.package is None or find_spec(cls.package) is not None

    @classmethod
    def label(cls) -> str:
        """The name, with the installed version."""
        return cls.name if cls.package is None else f"{cls.name} {version(cls.package)}"


if sys.platform == "win32":

    class Flock(Contender):
        """The floor; not available on Windows."""

        name = "bare flock"

        def acquire(self) -> None:
            raise OSError("Windows has no flock")

        def release(self) -> None:
            raise OSError("Windows has no flock")

        @classmethod
        def is_available(cls) -> bool:
            return False

else:
    from fcntl import LOCK_EX, LOCK_SH, flock

    class Flock(Contender):
        """The floor: the bare system calls, without a time limit. It waits in the kernel."""

        name = "bare flock"

        def acquire(self) -> None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            flock(self._fd, LOCK_SH if self.shared else LOCK_EX)

        def release(self) -> None:
            os.close(self._fd)

        def cycle(self, times: int) -> None:
            path, flags = self.path, os.O_RDWR | os.O_CREAT
            mode = LOCK_SH if self.shared else LOCK_EX
            for _ in range(times):
                fd = os.open(path, flags, 0o666)
                flock(fd, mode)
                os.close(fd)


class Holdfast(Contender):
    """Ours."""

    name = "holdfast"
    fair: ClassVar[bool] = False

    def __init__(self, path: str, *, shared: bool = False) -> None:
        super().__init__(path, shared=shared)
        self._locker = FileLocker(TIMEOUT, fair=self.fair)
        self._lock = self._locker.lock_shared if shared else self._locker.lock_exclusive
        self._guard: LockGuard | None = None

    def acquire(self) -> None:
        self._guard = self._lock(self.path)

    def release(self) -> None:
        if self._guard is not None:
            self._guard.release()

    def cycle(self, times: int) -> None:
        path, lock = self.path, self._lock
        for _ in range(times):
            with lock(path):
                pass


class HoldfastFair(Holdfast):
    """Ours, serving waiters in the order of arrival."""

    name = "holdfast, fair"
    fair = True


class Filelock(Contender):
    """`filelock.FileLock`; its shared lock is `ReadWriteLock`, a SQLite database."""

    name = package = "filelock"

    def __init__(self, path: str, *, shared: bool = False) -> None:
        import filelock

        super().__init__(path, shared=shared)
        self._exclusive = None if shared else filelock.FileLock(path, timeout=TIMEOUT)
        self._readers = filelock.ReadWriteLock(path + ".db", timeout=TIMEOUT) if shared else None

    def acquire(self) -> None:
        if self._readers is not None:
            self._readers.acquire_read()
        elif self._exclusive is not None:
            self._exclusive.acquire()

    def release(self) -> None:
        if self._readers is not None:
            self._readers.release()
        elif self._exclusive is not None:
            self._exclusive.release()

    def cycle(self, times: int) -> None:
        if self._readers is not None:
            for _ in range(times):
                with self._readers.read_lock():
                    pass
        elif self._exclusive is not None:
            for _ in range(times):
                with self._exclusive:
                    pass


class Portalocker(Contender):
    """`portalocker.Lock`."""

    name = package = "portalocker"

    def __init__(self, path: str, *, shared: bool = False) -> None:
        import portalocker

        super().__init__(path, shared=shared)
        mode = portalocker.LockFlags.SHARED if shared else portalocker.LockFlags.EXCLUSIVE
        self._lock = portalocker.Lock(path, "a", timeout=TIMEOUT, flags=mode | portalocker.LockFlags.NON_BLOCKING)

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def cycle(self, times: int) -> None:
        lock = self._lock
        for _ in range(times):
            with lock:
                pass


class Fasteners(Contender):
    """`fasteners.InterProcessLock`, and `InterProcessReaderWriterLock` if it is shared."""

    name = package = "fasteners"

    def __init__(self, path: str, *, shared: bool = False) -> None:
        import fasteners

        super().__init__(path, shared=shared)
        if shared:
            readers = fasteners.InterProcessReaderWriterLock(path)
            self._acquire, self._release = readers.acquire_read_lock, readers.release_read_lock
        else:
            lock = fasteners.InterProcessLock(path)
            self._acquire, self._release = lock.acquire, lock.release

    def acquire(self) -> None:
        if not self._acquire(timeout=TIMEOUT):
            raise TimeoutError(f"{self.path} could not be locked in {TIMEOUT} s")

    def release(self) -> None:
        self._release()

    def cycle(self, times: int) -> None:
        acquire, release = self._acquire, self._release
        for _ in range(times):
            if acquire(timeout=TIMEOUT):
                release()


Kind = type[Contender]

OURS: list[Kind] = [Holdfast, HoldfastFair]
PEERS: list[Kind] = [Filelock, Portalocker, Fasteners]
