"""Taking the locks of a transaction, in the one order of the layout. Nothing else takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

from holdfast.errors import NotFound
from holdfast.fs.directory import Directory
from holdfast.locks.file_lock import FileLocker, LockStatistics
from holdfast.locks.ledger_lock import DEFAULT_TIMEOUT, LOCK_NAME, LedgerLock
from holdfast.store.layout import Place


class Guards:
    """The guards of one store. Most are file locks; that of the ledger is its own protocol."""

    def __init__(self, root: Directory, timeout: float | None, agent_id: str) -> None:
        self._root = root
        self._timeout = timeout
        self._agent_id = agent_id
        self._locker = FileLocker(timeout)
        self._ledger_locks: dict[str, LedgerLock] = {}

    def locked(self, places: Collection[Place], *, shared: bool = False) -> AbstractContextManager[object]:
        """Hold the guards of all places; `LockTimeout` if one cannot be had, and then none is held."""
        if len(places) == 1:
            return self._lock(next(iter(places)).guard, shared=shared)
        guards = [guard for _, guard in sorted({(place.rank, place.guard) for place in places})]
        return self._all(guards, shared=shared)

    @contextlib.contextmanager
    def _all(self, guards: list[str], *, shared: bool) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for guard in guards:
                held.enter_context(self._lock(guard, shared=shared))
            yield

    def statistics(self) -> LockStatistics:
        """What was locked and waited for so far."""
        return self._locker.statistics()

    def without_waiting(self) -> Guards:
        """The same guards, but `LockTimeout` at once if one is held."""
        return Guards(self._root, 0.0, self._agent_id)

    def close(self) -> None:
        """Close the lock files that are kept open for speed, and remove those that are kept for it."""
        self._locker.close()
        for lock in self._ledger_locks.values():
            lock.close()

    def _lock(self, guard: str, *, shared: bool) -> AbstractContextManager[object]:
        try:
            return self._take(guard, shared=shared)
        except NotFound:  # the first use: its directory is not there yet
            self._root.beneath(guard.rpartition("/")[0], create=True).close()
            return self._take(guard, shared=shared)

    def _take(self, guard: str, *, shared: bool) -> AbstractContextManager[object]:
        directory, _, name = guard.rpartition("/")
        if name == LOCK_NAME:
            return self._ledger_lock(directory).acquire()
        path = self._root.where(guard)
        return self._locker.lock_shared(path) if shared else self._locker.lock_exclusive(path)

    def _ledger_lock(self, directory: str) -> LedgerLock:
        lock = self._ledger_locks.get(directory)
        if lock is None:
            timeout = DEFAULT_TIMEOUT if self._timeout is None else self._timeout
            lock = LedgerLock(self._root.path / directory, self._agent_id, timeout=timeout)
            self._ledger_locks[directory] = lock
        return lock
