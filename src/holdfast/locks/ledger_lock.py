"""The write lock of a ledger: the lock file `ledger.lock`, which other programs use too, behind a fair queue.

Other programs follow a simple protocol: the creator of `<ledger>/ledger.lock` may write, and all others try
again every 10 ms. Our own processes neither poll nor starve: they queue at a turnstile, a fair file lock, and only the
first in the queue tries for `ledger.lock`. The turnstile gives speed and order, not safety: a process that cannot pass
it within half its timeout, because another process in the queue is stopped, tries for `ledger.lock` directly.

A lock whose holder is certainly dead is recovered. Age alone proves nothing, since a stopped process may wake up: an
old lock is only reported, and breaking it requires its exact identity. Even if a lock is broken by mistake, we must not
overwrite an event, so events are published by a link that never replaces. Others may: see `OpenLedger.break_lock`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from holdfast.clock import SYSTEM_CLOCK, Clock, format_duration, format_instant, parse_instant
from holdfast.errors import Failure, LockChanged, LockNotHeld, LockReentry, LockTimeout
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, chosen, close_quietly
from holdfast.locks.file_lock import FileLocker, HeldLock, LockGuard
from holdfast.locks.flock_wait import LockWait
from holdfast.locks.identity import Holder, Liveness, current_holder, liveness
from holdfast.locks.lock_file import EncodedRecord, FoundLock, LockFile, content_of

LOCK_NAME = "ledger.lock"
_TURNSTILE = ".ledger.lock.turnstile"
_END = ".ledger.lock.end"
_WRITE = sum(getattr(os, name, 0) for name in ("O_WRONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
DEFAULT_TIMEOUT = 5.0
POLL_INTERVAL = 0.01
SUSPECT_AFTER = 30.0  # a lock older than this was probably left behind


class LedgerLockState(NamedTuple):
    """A held ledger lock. A directory is the lock of a shell tool, made by `mkdir`."""

    path: Path
    identity: str
    agent_id: str | None
    holder: Holder | None
    age: float
    liveness: Liveness
    is_directory: bool

    @property
    def suspect(self) -> bool:
        return self.age > SUSPECT_AFTER

    def as_record(self) -> dict[str, object]:
        """The fields as JSON values, with a readable description under `shown`."""
        holder_id = self.holder.holder_id if self.holder else None
        record = {"identity": self.identity, "agent_id": self.agent_id, "holder_id": holder_id, "age": self.age}
        return {**record, "liveness": self.liveness.value, "suspect": self.suspect, "shown": str(self)}

    def __str__(self) -> str:
        name = self.agent_id or ("a shell tool" if self.is_directory else "a holder without a name")
        return f"{name} for {format_duration(self.age)} (holder {self.liveness.value}, lock {self.identity})"


class _Frame(NamedTuple):
    """The constant parts of the record, `before` the time and `after` the id."""

    agent_id: str
    holder: Holder
    before: str
    after: str


class EndNote:
    """The last number of a ledger, noted with the state of its directory right after a holder released the lock. The
    names up to this number are durable or, on a filesystem that keeps the order of names, their writers sync them now.

    As long as the directory has that state, nobody has added or removed an event. Every use of the lock changes the
    state, so only a process at the turnstile reads or writes the note. The note is not synced: after a power cut it may
    name another state, and is then ignored.
    """

    def __init__(self, file: LockFile) -> None:
        self._file = file
        self._path = str(file.path.parent)
        self._written: tuple[int, tuple[int, ...]] | None = None

    def read(self) -> int | None:
        """The last number, or None if the directory has changed since it was noted."""
        with contextlib.suppress(OSError, Failure, ValueError):
            state = _state(calls.stat(self._path, follow_symlinks=False))
            if self._written is not None and self._written[1] == state:
                return self._written[0]
            if (kept := self._file.kept_directory) is not None:
                return self._read(kept, state)
            with self._file.directory() as directory:
                return self._read(directory, state)
        return None

    def _read(self, directory: Directory, state: tuple[int, ...]) -> int | None:
        number, *noted = map(int, durable.read_in(directory, _END, limit=200).split())
        return number if (*noted,) == state else None

    def write(self, number: int) -> None:
        """Note the last number, if possible; without a note, the next process lists the directory."""
        with contextlib.suppress(OSError, Failure):
            if (kept := self._file.kept_directory) is not None:
                self._write(kept, number)
            else:
                with self._file.directory() as directory:
                    self._write(directory, number)

    def _write(self, directory: Directory, number: int) -> None:
        fd = directory.open_or_create(_END, _WRITE)
        try:
            if calls.fstat(fd).st_nlink > 1:
                return  # another name leads to this file
            state = _mark(directory)
            line = b"%d %d %d %d %d" % (number, *state)
            calls.write(fd, line.ljust(120) + b"\n")  # a fixed length: each line replaces the previous one in place
        finally:
            close_quietly(fd)
        self._written = number, state


def _mark(directory: Directory) -> tuple[int, ...]:
    """Give the directory a state that no later change can give it, and return that state. Two changes within one clock
    tick, often 4 ms, get the same time, so set the time back a little. Only the owner can do that; other users miss a
    change within the tick."""
    status = _status(directory)
    with contextlib.suppress(OSError):
        times = status.st_atime_ns, status.st_mtime_ns - 1000
        calls.utime(directory.at("."), ns=times, dir_fd=directory.fd)
        status = _status(directory)
    return _state(status)


def _status(directory: Directory) -> os.stat_result:
    return calls.stat(directory.at("."), dir_fd=directory.fd)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


class LedgerLock:
    """The write lock of the ledger in one directory, acquired in the name of one agent."""

    def __init__(
        self,
        ledger_dir: str | os.PathLike[str],
        agent_id: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        clock: Clock = SYSTEM_CLOCK,
        liveness_check: Callable[[Holder], Liveness] = liveness,
    ) -> None:
        self.path = chosen(ledger_dir) / LOCK_NAME
        self.agent_id = agent_id
        self.timeout = timeout
        self._clock = clock
        self._liveness_check = liveness_check
        self._file = LockFile(self.path.parent, "", LOCK_NAME, often=True)
        self._turnstile_path = str(self.path.parent / _TURNSTILE)
        self._turnstile = FileLocker(timeout / 2, fair=True, follow_links=False)
        self._frame: _Frame | None = None
        self._end = EndNote(self._file)
        self.held: HeldLedgerLock | None = None

    def acquire(self, timeout: float | None = None) -> HeldLedgerLock:
        """Wait for the lock; after `timeout` seconds (None: as configured) raise `LockTimeout`, which names the
        holder."""
        began = time.monotonic()
        turn = self._turnstile.try_lock_exclusive(self._turnstile_path)
        is_contended = turn is None
        if turn is None:
            turn = self._wait_for_turn(
                None if timeout is None else LockWait(timeout / 2)
            )  # 1. Our own processes queue.
        timeout = self.timeout if timeout is None else timeout
        held = self.held = HeldLedgerLock(self._file, turn, self._end)  # known before the lock can be ours
        held.is_contended = is_contended
        try:
            noted = None if turn is None else self._end.read()  # only at the turnstile
            self._acquire_in_turn(held, noted, began + timeout, timeout)
        except BaseException:
            if turn is not None:
                turn.release()
            raise
        return held

    def release_interrupted(self) -> None:
        """Release the lock if a signal interrupted its acquisition or release by this thread."""
        if (held := self.held) is not None and held.thread == threading.get_ident():
            with contextlib.suppress(Failure):
                held.release()

    def state(self) -> LedgerLockState | None:
        """The lock and its holder, or None if it is free. Changes nothing."""
        found = self._file.read()
        return None if found is None else self._judge(found)

    def close(self) -> None:
        """Remove the kept draft; do not touch the lock itself."""
        turn = noted = None
        if self._file.kept_directory is not None:  # removing the draft changes it: note its new state, without waiting
            with contextlib.suppress(Failure):
                turn = self._turnstile.try_lock_exclusive(self._turnstile_path)
                noted = None if turn is None else self._end.read()
        try:
            self._file.close()
            if noted is not None:
                self._end.write(noted)
        finally:
            if turn is not None:
                turn.release()

    def break_lock(self, identity: str) -> None:
        """Remove the lock with exactly this `identity`. Call it only at a person's request."""
        if not self._file.remove(identity):
            raise LockChanged(f"{self.path} does not have the identity {identity}", path=str(self.path))
        # A stopped holder may keep the turnstile forever: let the others create a new one.
        with Directory.open(self.path.parent) as directory:
            durable.remove_in(directory, _TURNSTILE, durable=False)

    def _wait_for_turn(self, wait: LockWait | None) -> LockGuard | None:
        try:
            return self._turnstile.acquire(self._turnstile_path, shared=False, wait=wait)
        except LockTimeout:
            return None
        except LockReentry:
            raise LockReentry(f"{self.path} is already held by this thread", path=str(self.path)) from None

    def _acquire_in_turn(self, held: HeldLedgerLock, noted: int | None, deadline: float, timeout: float) -> None:
        while True:
            record = self._record(held.lock_id)
            # 2. Free: commit point. 3. Its holder is certainly dead: replace it.
            if self._file.create(record, synced=False):
                held.noted = noted
                return
            if self._recover(record):
                return
            noted = None  # its holder changes the ledger
            if time.monotonic() >= deadline:
                raise self._timed_out(timeout)
            time.sleep(POLL_INTERVAL)  # 4. Held by another process: try again.

    def _recover(self, record: EncodedRecord) -> bool:
        found = self._file.read()
        if found is None or self._judge(found).liveness is not Liveness.DEAD:
            return False
        return self._file.take_over(found, record, synced=False)

    def _record(self, lock_id: str) -> EncodedRecord:
        """The encoded record. Only the id and the time change between calls, and need no escaping."""
        acquired_at = format_instant(self._clock.wall())
        new = f'{acquired_at}","lock_id":"{lock_id}'
        holder, frame = current_holder(), self._frame
        if frame is None or frame.agent_id != self.agent_id or frame.holder != holder:
            fields = {"agent_id": self.agent_id, "acquired_at": acquired_at, "lock_id": lock_id}
            before, _, after = content_of({**fields, **holder.as_record()}).decode().rpartition(new)
            frame = self._frame = _Frame(self.agent_id, holder, before, after)
        return EncodedRecord(lock_id, f"{frame.before}{new}{frame.after}".encode())

    def _judge(self, found: FoundLock) -> LedgerLockState:
        record = found.record or {}
        agent_id, acquired_at = record.get("agent_id"), record.get("acquired_at")
        holder = Holder.from_record(record)
        since = found.modified_at
        if isinstance(acquired_at, str):
            with contextlib.suppress(ValueError):
                since = parse_instant(acquired_at)
        name, age = agent_id if isinstance(agent_id, str) else None, self._clock.wall() - since
        alive = Liveness.UNKNOWN if holder is None else self._liveness_check(holder)
        return LedgerLockState(self.path, found.identity, name, holder, age, alive, found.is_directory)

    def _timed_out(self, timeout: float) -> LockTimeout:
        state, waited, summary = self.state(), format_duration(timeout), "timeout waiting for lock"
        holders = [state.as_record()] if state else ()
        failure = LockTimeout(self.path, timeout, waited, holders=holders, summary=summary)
        if state is not None and state.suspect:
            failure.hint = (
                f"This lock is {format_duration(state.age)} old. If you are certain that its holder is "
                f"gone, break it by its identity: {state.identity}"
            )
        return failure


class HeldLedgerLock(HeldLock):
    """The held write lock of a ledger. In a forked child it is a copy without effect.

    `noted` is the last number of the ledger if only our processes have changed it, and None otherwise. Once the holder
    knows the last number, it sets `last`, for the next process. `is_contended`: it has waited for other processes.
    """

    def __init__(self, file: LockFile, turn: LockGuard | None, end: EndNote) -> None:
        self.lock_id: str = os.urandom(16).hex()
        self.thread: int = threading.get_ident()
        self.noted: int | None = None
        self.last: int | None = None
        self.is_contended = False
        self._file = file
        self._turn = turn
        self._end = end
        self._pid = os.getpid()
        self._released = False

    def __enter__(self) -> Self:
        if self._released:
            raise LockNotHeld(f"the lock {self._file.path} was released", path=str(self._file.path))
        return self

    def release(self) -> bool:
        """Remove the lock file if it is still ours; return False if the lock was broken. Idempotent."""
        if self._pid != os.getpid():
            return True
        try:
            if self._released:
                return True
            removed = self._file.remove_own("lock_id", self.lock_id)
            self._released = True
            if removed and self.last is not None and self._turn is not None:
                self._end.write(self.last)
            return removed
        finally:
            if self._turn is not None:
                self._turn.release()
