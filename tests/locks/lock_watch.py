"""Observers of file locks: holders, waiters, open descriptors, and whether another process gets the lock."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import LockTimeout
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.kernel_locks import find_holders
from tests.locks.workers import PATIENCE, Line, Task, Worker, Workers, wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows this, in /proc")

IMPORTED_LATE = (
    "ctypes",
    "holdfast.fs.native",
    "holdfast.locks.async_file_lock",
    "holdfast.locks.kernel_locks",
)


# --- Holders and waiters ------------------------------------------------------------------------------


def waiting_for(path: Path) -> list[int | None]:
    """The processes that wait for a lock on the file at `path`, according to the kernel."""
    found = find_holders(path)
    if found is None:
        pytest.skip("only Linux lists the waiters of a lock")
    return [each.pid for each in found if each.waiting]


def holding(path: Path) -> list[int | None]:
    """The processes that hold a lock on the file that is now at `path`."""
    return [each.pid for each in find_holders(path) or () if not each.waiting]


def wait_until_waiting(path: Path, count: int = 1) -> None:
    """Wait until `count` waiters for a lock on the file at `path` are blocked in the kernel."""
    wait_until(lambda: len(waiting_for(path)) == count)


def others_get(workers: Workers, path: Path, *, shared: bool = False) -> bool:
    """Whether another process would get the lock now."""

    def try_once(line: Line) -> None:
        line.say(is_free(path, shared=shared))

    return bool(workers.start(try_once).hear())


def is_free(path: Path, *, shared: bool = False) -> bool:
    """Whether a new locker would get the lock now."""
    return FileLocker(0).try_acquire(path, shared=shared) is not None


class Pair(NamedTuple):
    """The mode of a held lock, the mode that is wanted, and whether it is granted."""

    held: str
    wanted: str
    granted: bool


PAIRS = [
    Pair("shared", "shared", True),
    Pair("shared", "exclusive", False),
    Pair("exclusive", "shared", False),
    Pair("exclusive", "exclusive", False),
]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.wanted} while {pair.held}")


# --- Other holders ------------------------------------------------------------------------------------


@contextlib.contextmanager
def flocked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a bare flock(2) on the file at `path`, without Holdfast."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no flock on Windows")
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: workers forked in the meantime have copies
    finally:
        os.close(fd)


def hold(path: Path, *, shared: bool = False, fair: bool = False) -> Task:
    """Task for a worker: take the lock, report it, release it when told to, and report that."""

    def task(line: Line) -> None:
        with FileLocker(PATIENCE, fair=fair).acquire(path, shared=shared):
            line.say("held")
            line.wait()
        line.say("released")
        line.wait()

    return task


def obey(path: Path, *, fair: bool = False) -> Task:
    """Task for a worker: obey "release", `("try", shared)` and `("lock", shared, timeout)`.

    The answer to the last two is whether the lock was granted.
    """

    def task(line: Line) -> None:
        guards: list[LockGuard] = []
        locker = FileLocker(fair=fair)
        while True:
            match line.wait():
                case "lock", bool(shared), timeout:
                    locker.timeout = timeout
                    try:
                        guards.append(locker.acquire(path, shared=shared))
                    except LockTimeout:
                        line.say(False)
                    else:
                        line.say(True)
                case "try", bool(shared):
                    guard = locker.try_acquire(path, shared=shared)
                    guards += [guard] if guard else []
                    line.say(guard is not None)
                case "release":
                    guards.pop().release()
                    line.say("released")
                case unknown:
                    raise AssertionError(f"unknown command {unknown!r}")

    return task


def start_holding(workers: Workers, path: Path, *, shared: bool = False, fair: bool = False) -> Worker:
    """Start a process and wait until it holds the lock."""
    worker = workers.start(hold(path, shared=shared, fair=fair))
    assert worker.hear() == "held"
    return worker


# --- Leftovers ----------------------------------------------------------------------------------------


def open_files() -> dict[int, str]:
    """The open files of this process, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def descriptors_of(path: Path) -> list[int]:
    """The descriptors of this process that have the file at `path` open."""
    return [fd for fd, target in open_files().items() if target in (str(path), f"{path} (deleted)")]


def own_threads() -> list[str]:
    """The names of the threads that Holdfast has started and that are still alive.

    A thread whose start was interrupted never runs, or dies at once, but Python lists it forever.
    """
    living = [each.name for each in threading.enumerate() if each.is_alive()]
    return [name for name in living if name.startswith("holdfast-")]


def wait_until_no_thread_is_left() -> None:
    """Wait for the deadline watcher, which outlives the last wait by a moment."""
    wait_until(lambda: not own_threads())


# --- Threads and users --------------------------------------------------------------------------------


class Caller(threading.Thread):
    """A thread that makes one call; `result` waits for its outcome."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._returned: object = None
        self._raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._returned = self._call()
        except BaseException as error:
            self._raised = error

    def result(self) -> object:
        """The return value of the call; an exception of the call is raised here."""
        self.join(PATIENCE)
        assert not self.is_alive(), "the call did not return"
        if self._raised is not None:
            raise self._raised
        return self._returned

    def guard(self) -> LockGuard:
        found = self.result()
        assert isinstance(found, LockGuard)
        return found


def become_nobody() -> None:
    """In a worker: drop root privileges, if it has them."""
    for name in IMPORTED_LATE:
        importlib.import_module(name)  # the interpreter's own files may be unreadable afterwards
    if sys.platform != "win32" and os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="holdfast-public-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        path.chmod(0o755)
