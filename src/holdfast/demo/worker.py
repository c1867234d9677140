"""One worker of the demo: it does three kinds of work, each under its lock, until its time is up."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator

from holdfast.demo.scene import Notes, Protection, Scene
from holdfast.errors import AlreadyExists, RepoLocked
from holdfast.fs import durable, native, strictjson
from holdfast.locks.file_locker import FileLocker
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.repo_lock import RepoLock

PATIENCE = 60.0
"""How long to wait for a lock: longer than any holder can be stopped here."""
LONGEST_THOUGHT = 0.004


class Worker:
    """A worker with a name that no other one has, nor had."""

    def __init__(self, scene: Scene, name: str, *, seed: int, locking: bool = True) -> None:
        self._scene = scene
        self._name = name
        self._locking = locking
        self._random = random.Random(f"{seed}/{name}")
        self._notes = Notes(scene, name)
        self._done = dict.fromkeys(Protection, 0)
        self._file_locker = FileLocker(PATIENCE, fair=True)
        self._repo_lock = RepoLock(scene.data)
        self._ledger_lock = LedgerLock(scene.ledger, name, timeout=PATIENCE)

    def run(self, until: float, *, parent: int) -> None:
        """Work until the (monotonic) time `until`, or until the process that started us is gone."""
        if sys.platform == "linux":
            native.die_with_parent(signal.SIGKILL)  # even if we are stopped then
        work = {
            Protection.COUNTER: self._count,
            Protection.JOURNAL: self._write_journal,
            Protection.LEDGER: self._append_event,
        }
        while time.monotonic() < until and (sys.platform == "win32" or os.getppid() == parent):
            protection = self._random.choice(list(Protection))
            number = self._done[protection] + 1
            with self._protected(protection):
                completed = work[protection](number)
            if completed:
                self._done[protection] = number
                self._notes.write("done", protection, number, synced=True)

    def _count(self, number: int) -> bool:
        """Read the numbers, add one to ours, write them back."""
        numbers = strictjson.decode(durable.read(self._scene.counter))
        self._think()
        durable.replace(
            self._scene.counter, strictjson.encode({**numbers, self._name: numbers.get(self._name, 0) + 1})
        )
        return True

    def _write_journal(self, number: int) -> bool:
        """Add a line to the journal."""
        self._think()
        durable.append(self._scene.journal, strictjson.encode({"worker": self._name, "number": number}))
        return True

    def _append_event(self, number: int) -> bool:
        """Find the last event and make the one that follows it."""
        following = max(self._scene.event_numbers(), default=0) + 1
        self._think()
        try:
            durable.create(
                self._scene.event(following), strictjson.encode({"worker": self._name, "number": number})
            )
        except AlreadyExists:  # somebody was here at the same time
            self._notes.write("taken", Protection.LEDGER, following)
            return False
        return True

    def _think(self) -> None:
        """Take the time in which others could come between, if they were let."""
        time.sleep(self._random.uniform(0, LONGEST_THOUGHT))

    @contextlib.contextmanager
    def _protected(self, protection: Protection) -> Iterator[None]:
        with self._held(protection):
            self._notes.write("enter", protection)
            yield
            self._notes.write("leave", protection)

    def _held(self, protection: Protection) -> contextlib.AbstractContextManager[object]:
        if not self._locking:
            return contextlib.nullcontext()
        if protection is Protection.COUNTER:
            return self._file_locker.lock_exclusive(self._scene.counter_lock)
        if protection is Protection.LEDGER:
            return self._ledger_lock.acquire()
        return self._hold_repository()

    def _hold_repository(self) -> contextlib.AbstractContextManager[object]:
        """The repository lock does not wait: so we ask again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._repo_lock.lock("demo", f"worker {self._name}")
            except RepoLocked:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(self._random.uniform(0.001, 0.01))
