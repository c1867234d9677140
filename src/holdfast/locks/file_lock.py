"""File locks for processes and threads: shared or exclusive, with a time limit, released by the kernel.

The lock is flock(2) on the file at a path, so it also excludes other programs that use flock on it. Nothing
is ever written into the file, and it is never deleted, because others may be waiting for it.

Promise: per file there is one exclusive holder or any number of shared ones at a time, across processes and
threads. When a holder ends, however it ends, its lock is free.

Taking a free lock needs one system call and little code. The modules for waiting and for coroutines are imported on
first use, because most programs never wait. The process cannot fork during these imports: a child forked in the middle
of an import would wait for it forever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Self

from holdfast.errors import LockNotHeld, LockReentry
from holdfast.fs.directory import io_failure
from holdfast.locks import flock
from holdfast.locks.flock import DescriptionPool, OpenFileDescription, held_by, without_forks
from holdfast.locks.flock_wait import LockWait, Observer

if TYPE_CHECKING:
    from holdfast.locks.async_file_lock import AsyncAcquisition

DEFAULT_TIMEOUT = 5.0

StrPath = str | os.PathLike[str]


class _Thread(threading.local):
    """An identity of the calling thread that no later thread gets, unlike thread numbers, which are reused."""

    def __init__(self) -> None:
        self.itself = object()


_this_thread = _Thread()


class LockStatistics(NamedTuple):
    """Counters of a `FileLocker` since its creation; times are in seconds."""

    acquired: int
    contended: int
    timed_out: int
    held_now: int
    seconds_waited: float
    longest_wait: float
    seconds_held: float


class HeldLock:
    """Base class of held locks. A `with` block releases the lock at its end. A released lock cannot be entered again:
    its block would run without the lock."""

    __slots__ = ()

    def release(self) -> object:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.release()


class LockGuard(HeldLock):
    """A held lock, released by `release`, at the end of its `with` block, or on garbage collection. In a forked
    child the guard is a copy without effect: the parent keeps the lock."""

    __slots__ = ("_held", "_release", "path", "shared")

    def __init__(
        self, release: Callable[[OpenFileDescription], None], description: OpenFileDescription, path: str, shared: bool
    ) -> None:
        self._held = [description]  # a list, because `pop` has one winner among threads
        self._release = release
        self.path = path
        self.shared = shared

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock through this guard."""
        return any(description.fd >= 0 for description in self._held)

    def release(self) -> None:
        """Release the lock; idempotent."""
        try:
            description = self._held.pop()
        except IndexError:
            return
        self._release(description)

    def __enter__(self) -> Self:
        for description in self._held:
            if description.fd >= 0:
                return self
        raise LockNotHeld(f"this process does not hold the lock on {self.path}: it was released", path=self.path)

    def __del__(self) -> None:
        if getattr(self, "_held", None):  # missing if a signal interrupted the constructor
            self.release()

    def __repr__(self) -> str:
        mode = "shared" if self.shared else "exclusive"
        return f"<LockGuard {mode} on {self.path!r}, {'held' if self.held else 'released'}>"


class FileLocker:
    """Locks files. Each wait ends after `timeout` seconds (None: no limit).

    With `fair=True`, no process overtakes the next waiter, and competitors get about equal shares, though in no strict
    order; all of them must be fair. A fair lock needs a second lock file, `<path>.queue`, and twice the time. An
    `observer` sees each wait that does not end at once, and may end it: see `Repository.file_locker`. A path may not
    end in a symbolic link; `follow_links=False`, for directories that others may change, refuses links anywhere in it.
    """

    def __init__(
        self,
        timeout: float | None = DEFAULT_TIMEOUT,
        *,
        fair: bool = False,
        observer: Observer | None = None,
        follow_links: bool = True,
    ) -> None:
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"the timeout must be 0 or more seconds, or None, not {timeout!r}")
        self.timeout = timeout
        self.fair = fair
        self._observer = observer
        self._pool = DescriptionPool(follow_links=follow_links)

    def lock_exclusive(self, path: StrPath) -> LockGuard:
        """Wait for an exclusive lock on the file at `path`; raise `LockTimeout` at the time limit."""
        return self.acquire(path, shared=False)

    def lock_shared(self, path: StrPath) -> LockGuard:
        """Wait for a shared lock, which excludes only exclusive holders; raise `LockTimeout` at the time limit."""
        return self.acquire(path, shared=True)

    def try_lock_exclusive(self, path: StrPath) -> LockGuard | None:
        """Like `lock_exclusive`, but return None at once if the file is locked."""
        return self.try_acquire(path, shared=False)

    def try_lock_shared(self, path: StrPath) -> LockGuard | None:
        """Like `lock_shared`, but return None at once if the file is locked exclusively."""
        return self.try_acquire(path, shared=True)

    def lock_exclusive_async(self, path: StrPath) -> AsyncAcquisition:
        """`lock_exclusive` for coroutines: `async with` it, or `await` it for the guard."""
        return self._asynchronously(path, shared=False)

    def lock_shared_async(self, path: StrPath) -> AsyncAcquisition:
        """`lock_shared` for coroutines: `async with` it, or `await` it for the guard."""
        return self._asynchronously(path, shared=True)

    def acquire(self, path: StrPath, *, shared: bool, wait: LockWait | None = None, owner: object = None) -> LockGuard:
        """Lock the file at `path`. Another thread can cancel `wait`. If `owner`, by default the calling thread, already
        has the lock, raise `LockReentry`."""
        key = path if isinstance(path, str) else os.fspath(path)
        if owner is None:
            owner = _this_thread.itself
        description = self._try_key(key, shared)
        if description is None:
            wait = wait or LockWait(self.timeout, cancellable=self._observer is not None)
            description = self._wait(key, shared, wait, owner)
        return self._guard(description, key, shared, owner)

    def try_acquire(self, path: StrPath, *, shared: bool, owner: object = None) -> LockGuard | None:
        """Lock the file at `path`, or return None at once if it is locked."""
        key = path if isinstance(path, str) else os.fspath(path)
        description = self._try_key(key, shared)
        return None if description is None else self._guard(description, key, shared, owner or _this_thread.itself)

    def statistics(self) -> LockStatistics:
        """The counters of this locker since its creation."""
        uses, waits = self._pool.totals(), self._pool.waits
        waited = waits.count, waits.timed_out, self._pool.held_now(), waits.seconds, waits.longest
        return LockStatistics(uses.uses, *waited, uses.held_seconds)

    def close(self) -> None:
        """Close the files that are kept open for speed. Held locks stay held."""
        self._pool.close_idle()

    def _asynchronously(self, path: StrPath, *, shared: bool) -> AsyncAcquisition:
        with without_forks():
            from holdfast.locks.async_file_lock import AsyncAcquisition
        return AsyncAcquisition(self, path, shared=shared)

    def _try_key(self, key: str, shared: bool) -> OpenFileDescription | None:
        if not self.fair:
            return self._try_description(key, shared)
        turn = self._try_description(_queue(key), shared=False)
        if turn is None:
            return None  # others are waiting, and come first
        try:
            return self._try_description(key, shared)
        finally:
            self._free(turn)

    def _guard(self, description: OpenFileDescription, key: str, shared: bool, owner: object) -> LockGuard:
        description.owner = owner
        description.uses += 1
        description.since = monotonic()
        return LockGuard(self._release, description, key, shared)

    def _try_description(self, key: str, shared: bool) -> OpenFileDescription | None:
        while True:
            description = self._pool.take(key)
            try:
                granted = flock.try_lock(description.fd, shared)
            except OSError as error:
                raise io_failure("lock", key, error) from error
            if not granted:
                self._pool.give_back(description)
                return None
            if description.is_current():
                return description
            description.close()  # the path now leads to another file: lock that one

    def _wait(self, key: str, shared: bool, wait: LockWait, owner: object) -> OpenFileDescription:
        """Wait for the lock until `wait` is over, and count the time."""
        _import_for_waiting()
        from holdfast.locks import kernel_locks

        started = monotonic()
        timed_out = False
        observation = self._observer(key, wait, shared=shared, fair=self.fair) if self._observer else None
        try:
            wait_for_it = self._wait_in_turn if self.fair else self._wait_for_description
            description = wait_for_it(key, shared, wait, owner)
            timed_out = description is None and not wait.cancelled
        finally:
            if observation is not None:
                observation.end()
            self._pool.waits.add(monotonic() - started, timed_out=timed_out)
        if description is not None:
            return description
        if observation is not None and observation.found is not None:
            raise observation.found
        raise kernel_locks.timeout(key, wait.timeout or 0.0)

    def _wait_in_turn(self, key: str, shared: bool, wait: LockWait, owner: object) -> OpenFileDescription | None:
        """Wait for the turn, then for the lock. A holder of the lock skips the turn: it would wait for itself."""
        if self._is_held_by(owner, key):
            again = self._try_description(key, shared)
            if again is None:
                raise _reentry(key)
            return again
        turn = self._wait_for_description(_queue(key), False, wait, owner)
        if turn is None:
            return None
        try:
            return self._wait_for_description(key, shared, wait, owner)
        finally:
            self._free(turn)

    def _is_held_by(self, owner: object, key: str) -> bool:
        description = self._pool.take(key)
        try:
            return held_by(owner, description)
        finally:
            self._pool.give_back(description)

    def _wait_for_description(
        self, key: str, shared: bool, wait: LockWait, owner: object
    ) -> OpenFileDescription | None:
        from holdfast.locks.kernel_locks import must_poll  # loaded by `_wait`

        while True:
            description = self._pool.take(key)
            try:
                granted = flock.try_lock(description.fd, shared)
                if not granted:
                    if held_by(owner, description):
                        raise _reentry(key)
                    granted = wait.acquire(description.fd, shared=shared, poll=must_poll(description))
            except BaseException as error:
                description.close()
                if isinstance(error, OSError):
                    raise io_failure("lock", key, error) from error
                raise
            if granted and description.is_current():
                return description
            description.close()
            if not granted:
                return None

    def _release(self, description: OpenFileDescription) -> None:
        description.owner = None
        if description.fd >= 0:  # not in a forked child
            description.held_seconds += monotonic() - description.since
            self._free(description)

    def _free(self, description: OpenFileDescription) -> None:
        try:
            flock.unlock(description.fd)
        except OSError:
            description.close()
        else:
            self._pool.give_back(description)


def _import_for_waiting() -> None:
    """Import in advance the modules that a wait or its timeout imports inside functions."""
    with without_forks():
        for module in ("datetime", "signal", "holdfast.fs.native", "holdfast.locks.kernel_locks"):
            __import__(module)


def _queue(key: str) -> str:
    """The second lock file of a fair lock; its holder is served next."""
    return key + ".queue"


def _reentry(key: str) -> LockReentry:
    return LockReentry(f"{key} is already locked by this thread", path=key)
