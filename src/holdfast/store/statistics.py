"""How often the processes of a machine have committed, conflicted and waited, in one small record per machine.

Each process adds its own counts when it is done with a store. The record is a checkpoint file: a cache that is not
synced and may be deleted, after which counting begins at zero. A process that has committed nothing writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import Failure, NotFound
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.locks import flock
from holdfast.locks.file_lock import LockStatistics
from holdfast.locks.identity import current_holder
from holdfast.locks.retry import CHANCE
from holdfast.store.layout import CHECKPOINTS

_PREFIX = "statistics-"
_MOST_BYTES = 1 << 12
_TRIES = 10  # of the lock


class CommitStatistics(NamedTuple):
    """Counters of a store since it was opened: successful transactions, attempts that conflicted with another, waits
    for document locks, and the seconds that these took."""

    commits: int = 0
    conflicts: int = 0
    waits: int = 0
    seconds_waited: float = 0.0

    def plus(self, other: CommitStatistics, sign: int = 1) -> CommitStatistics:
        commits, conflicts = self.commits + sign * other.commits, self.conflicts + sign * other.conflicts
        waits, seconds = self.waits + sign * other.waits, self.seconds_waited + sign * other.seconds_waited
        return CommitStatistics(commits, conflicts, waits, seconds)


class Tally:
    """The counts of one store, with those of its document locks, if it has any."""

    def __init__(self, locks: Callable[[], LockStatistics] | None = None) -> None:
        self._locks = locks
        self._counts, self._saved = CommitStatistics(), CommitStatistics()
        self._counting = threading.Lock()

    def count(self, *, made: bool) -> None:
        """Count an attempt to commit."""
        with self._counting:
            self._counts = self._counts.plus(CommitStatistics(commits=made, conflicts=not made))

    def read(self) -> CommitStatistics:
        if self._locks is None:
            return self._counts
        found = self._locks()
        return self._counts._replace(waits=found.contended, seconds_waited=found.seconds_waited)

    def new(self) -> CommitStatistics:
        """What was counted since the last call."""
        before, self._saved = self._saved, self.read()
        return self._saved.plus(before, -1)


_live: dict[int, tuple[Path, Tally]] = {}
_new: dict[Path, CommitStatistics] = {}
"""Counts that are not in a record yet."""


def follow(store: object, tally: Tally, root: Path) -> None:
    """Let `save` add the counts of a store to the record below this directory, even if the store is gone by then."""
    _live[id(tally)] = root, tally
    weakref.finalize(store, _retire, id(tally)).atexit = False


def _retire(key: int) -> None:
    if key in _live:
        root, tally = _live.pop(key)
        _note(root, tally.new())


def _note(root: Path, new: CommitStatistics) -> None:
    _new[root] = _new.get(root, CommitStatistics()).plus(new)


def _forget() -> None:
    _live.clear()
    _new.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)  # what the parent has counted is its own


def save() -> None:
    """Add what the stores of this process have counted to the record of this machine. Never fails: it is then added
    later, or lost."""
    for root, tally in list(_live.values()):
        _note(root, tally.new())
    for root, new in list(_new.items()):
        if new.commits:
            with contextlib.suppress(Failure, OSError):
                if _add(root, new):
                    _note(root, CommitStatistics().plus(new, -1))


def _add(root: Path, new: CommitStatistics) -> bool:
    """Add to the record of this machine; False if others kept its directory locked for some milliseconds."""
    file = f"{_PREFIX}{current_holder().machine_id}"
    with _checkpoints(root) as directory:
        if directory.fd is None or not _try_lock(directory.fd):
            return False
        try:
            content = msgspec.json.encode(_read(directory, file).plus(new))
            durable.publish(directory, durable.write_draft(directory, file, content, durable=False), file)
        finally:
            flock.unlock(directory.fd)
    return True


def _checkpoints(root: Path) -> Directory:
    with contextlib.suppress(NotFound):
        return Directory.open(root / CHECKPOINTS)
    make_directories(root / CHECKPOINTS)
    return Directory.open(root / CHECKPOINTS)


def _try_lock(descriptor: int) -> bool:
    for _ in range(_TRIES):
        if flock.try_lock(descriptor, shared=False):
            return True
        time.sleep(CHANCE.random() * 0.002)
    return False


def _read(directory: Directory, file: str) -> CommitStatistics:
    with contextlib.suppress(Failure, msgspec.DecodeError):
        found = msgspec.json.decode(durable.read_in(directory, file, limit=_MOST_BYTES), type=CommitStatistics)
        if min(found) >= 0:
            return found
    return CommitStatistics()


def totals(root: Path) -> CommitStatistics:
    """The sum of all machines' records below this directory."""
    found = CommitStatistics()
    with contextlib.suppress(Failure, OSError), Directory.open(root / CHECKPOINTS) as directory:
        for name in directory.names():
            if name.startswith(_PREFIX):
                found = found.plus(_read(directory, name))
    return found
