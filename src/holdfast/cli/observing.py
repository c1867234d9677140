"""What lets a command's wait for a file lock or a repository lock be seen by others, and found in a circle.

Nothing of it is loaded before somebody really has to wait; and what takes long to load is loaded beside the
wait, which begins at once. When the lock is had, the command is started at once too, whatever is being looked
at: between fork and exec nothing is needed that a look may be in the middle of.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import Failure
from holdfast.leases.queue import DeadlockWatch

if TYPE_CHECKING:
    from holdfast.locks.flock_wait import LockWait
    from holdfast.locks.repo_lock import RepoLock
    from holdfast.repository.waits import LockWaits, NotedWait


def observe_file_lock(path: str, wait: LockWait, *, shared: bool, fair: bool) -> DeadlockWatch:
    """Look on while this command waits for the lock on a file: for `FileLocker(observer=...)`."""
    since = time.time()

    def prepare() -> NotedWait:
        return _lock_waits(None, path).for_file_lock(path, since, shared=shared, fair=fair)

    return DeadlockWatch(prepare, wait.timeout, wait.cancel, forks=False)


def observe_repo_lock(lock: RepoLock, repo_id: str, purpose: str, wait: float) -> DeadlockWatch:
    """Look on while this command asks for the lock of a repository again and again."""
    since = time.time()

    def prepare() -> NotedWait:
        return _lock_waits(lock.data_dir, None).for_repo_lock(lock, repo_id, purpose, since)

    return DeadlockWatch(prepare, wait, forks=False)


def _lock_waits(data_dir: Path | None, path: str | None) -> LockWaits:
    """What is around this command: its repository, if it is in one or the lock is, and the data directory."""
    from holdfast.cli.places import data_directory, store_address
    from holdfast.cli.repository import ACTOR, LOCK_ID
    from holdfast.locks.identity import calling_agent
    from holdfast.repository.waits import LockWaits, surroundings

    if data_dir is None:
        with contextlib.suppress(Failure):  # there is no home directory
            data_dir = data_directory(None, os.environ)
    around = surroundings(_repository(path), data_dir, ledger_address=store_address(os.environ))
    actor, lock_id = os.environ.get(ACTOR) or "", os.environ.get(LOCK_ID) or ""
    return LockWaits(around, agent=calling_agent(), actor=actor, lock_id=lock_id)


def _repository(path: str | None) -> Path | None:
    """The repository that this command is in; else the one that what it is about is in."""
    from holdfast.cli.repository import REPO
    from holdfast.repository.guard import repository_around

    starts = [os.environ.get(REPO) or "."]
    if path is not None:
        starts.append(os.path.dirname(path) or ".")
    with contextlib.suppress(OSError):  # a current directory that is gone
        found = next(filter(None, map(repository_around, starts)), None)
        return None if found is None else Path(found)
    return None
