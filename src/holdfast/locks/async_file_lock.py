"""Waits for a file lock in a coroutine, without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from holdfast.locks.flock_wait import LockWait

if TYPE_CHECKING:
    from holdfast.locks.file_lock import FileLocker, LockGuard, StrPath


class AsyncAcquisition:
    """A pending acquisition: `async with` it, or `await` it for the guard. A free lock is taken at once; otherwise a
    separate thread waits. Cancelling the coroutine ends the wait, and releases a lock that is granted at the same
    time."""

    def __init__(self, locker: FileLocker, path: StrPath, *, shared: bool) -> None:
        self._locker = locker
        self._path = path
        self._shared = shared
        self._guard: LockGuard | None = None

    def __await__(self) -> Generator[object, None, LockGuard]:
        return self._acquire().__await__()

    async def __aenter__(self) -> LockGuard:
        self._guard = await self._acquire()
        return self._guard

    async def __aexit__(self, *_: object) -> None:
        if self._guard is not None:
            self._guard.release()

    async def _acquire(self) -> LockGuard:
        owner = asyncio.current_task()
        at_once = self._locker.try_acquire(self._path, shared=self._shared, owner=owner)
        if at_once is not None:
            return at_once
        wait = LockWait(self._locker.timeout, cancellable=True)
        handover = _Handover(asyncio.get_running_loop())

        def work() -> None:
            try:
                guard = self._locker.acquire(self._path, shared=self._shared, wait=wait, owner=owner)
            except BaseException as error:
                handover.fail(error)
            else:
                handover.grant(guard)

        threading.Thread(target=work, name="holdfast-async-wait", daemon=True).start()
        try:
            return await handover.granted
        except (asyncio.CancelledError, GeneratorExit):
            wait.cancel()
            handover.abandon()
            raise


class _Handover:
    """Passes the result of a waiting thread to its coroutine, unless the coroutine was cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.granted: asyncio.Future[LockGuard] = loop.create_future()

    def grant(self, guard: LockGuard) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle, guard)
        except RuntimeError:  # the loop is closed: the coroutine can no longer use the lock
            guard.release()

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle_failure, error)

    def abandon(self) -> None:
        """Give up the wait; release the lock if it was granted meanwhile."""
        granted = self.granted
        with contextlib.suppress(RuntimeError):  # the loop is closed
            granted.cancel()
        if not granted.cancelled() and granted.exception() is None:
            granted.result().release()

    def _settle(self, guard: LockGuard) -> None:
        if self.granted.cancelled():
            guard.release()
        else:
            self.granted.set_result(guard)

    def _settle_failure(self, error: BaseException) -> None:
        if not self.granted.cancelled():
            self.granted.set_exception(error)
