"""Running a command under a file lock: `holdfast file-lock run`."""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple

from holdfast.cli import child
from holdfast.cli.observing import observe_file_lock
from holdfast.cli.options import UNLIMITED
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.errors import LockConflict, LockTimeout
from holdfast.locks.file_lock import FileLocker, LockGuard


class Request(NamedTuple):
    """Which lock is wanted, and how. Without a timeout of its own it waits as the environment says."""

    path: str
    shared: bool
    fair: bool
    wait: bool
    timeout: float | None

    def acquire(self) -> LockGuard:
        """The lock; `LockConflict` if it is held and not to be waited for, `LockTimeout`, or `Deadlock`."""
        if self.wait:
            locker = FileLocker(self._limit(), fair=self.fair, observer=observe_file_lock)
            return locker.acquire(self.path, shared=self.shared)
        guard = FileLocker(0.0, fair=self.fair).try_acquire(self.path, shared=self.shared)
        if guard is None:
            raise self._held()
        return guard

    def advice(self, failure: LockTimeout | LockConflict) -> str | None:
        """What to do about a lock that was not to be had in time."""
        if not isinstance(failure, LockTimeout):
            return None
        from shlex import quote

        seconds = math.ceil(max(10.0, 2 * failure.timeout))
        longer = f"JIT_LOCK_TIMEOUT={seconds} holdfast ..."
        if self.timeout is not None:
            longer = f"--timeout {seconds}s, or without it {longer}"
        return (
            "This usually means another process is running.\n"
            "Try:\n"
            "  1. Wait a few seconds and retry\n"
            f"  2. Check for stuck processes: holdfast file-lock status {printable(quote(self.path))}\n"
            f"  3. Increase timeout: {longer}"
        )

    def _limit(self) -> float | None:
        if self.timeout is None:
            from holdfast.locks.retry import lock_timeout

            return lock_timeout(os.environ)
        return None if self.timeout == UNLIMITED else self.timeout

    def _held(self) -> LockConflict:
        from holdfast.cli.file_lock_state import look

        holders = [each.as_record() for each in look(self.path).holders]
        by = " by " + ", ".join(str(each["shown"]) for each in holders) if holders else ""
        return LockConflict(
            f"{self.path} is locked{by}",
            path=self.path,
            holders=holders,
            hint="Wait for the holder to finish: --timeout 1m.",
        )


def run_locked(
    request: Request, command: tuple[str, ...], output: Output, *, conflict_status: int | None
) -> int:
    """Run the command while holding the lock; end as it ends. Without the lock, with `conflict_status`."""
    began = time.monotonic()
    try:
        guard = request.acquire()
    except (LockTimeout, LockConflict) as failure:
        advice = request.advice(failure)
        raise CommandFailed(failure, exit_status=conflict_status, advice=advice) from failure
    with guard:
        locked = time.monotonic()
        ended = child.run(command)
        held = time.monotonic() - locked
    output.result({**ended.as_record(), "waited": round(locked - began, 6), "held": round(held, 6)})
    return child.end_like(ended)
