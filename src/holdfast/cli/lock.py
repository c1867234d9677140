"""`holdfast file-lock`: run a command under a file lock, and see who holds one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import click

from holdfast.cli import child
from holdfast.cli.child import RunCommand
from holdfast.cli.entry import Group
from holdfast.cli.options import UNLIMITED, duration_or_none, json_option
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import observe_file_lock
from holdfast.errors import LockConflict, LockTimeout
from holdfast.fs import calls
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.kernel_locks import FileLockHolder, find_holders, with_queue

group = Group(
    "file-lock",
    help="""\
Lock any file, between processes that ask for it the same way: flock(2), as flock(1) and many
libraries do. The file is made if it is not there; nothing is ever written into it, and it is never
deleted. When a holder ends, however it ends, its lock is free.

\b
Example:
  holdfast file-lock run build.lock -- make install
""",
)

_PATH = click.Path()


@group.command(cls=RunCommand, short_help="Run a command while holding the lock.")
@click.argument("path", type=_PATH)
@click.option("--shared", is_flag=True, help="Lock out exclusive holders only: for reading.")
@click.option(
    "--timeout",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait for the lock, such as 500ms, 5s, 1m30s; 'none': without limit.  "
    "[default: JIT_LOCK_TIMEOUT from the environment, else 5s]",
)
@click.option("--nonblock", is_flag=True, help="Do not wait: fail at once with status 4 if it is held.")
@click.option(
    "--fair",
    is_flag=True,
    help="Serve those who wait in turn. All who use this lock must ask for it. Makes PATH.queue.",
)
@click.option(
    "--conflict-status",
    metavar="N",
    type=click.IntRange(0, 255),
    help="End with this status if the lock cannot be had, instead of 75 or 4.",
)
@json_option
@click.pass_obj
def run(
    output: Output,
    *,
    path: str,
    shared: bool,
    timeout: float | None,
    nonblock: bool,
    fair: bool,
    conflict_status: int | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock on the file PATH, and end as it ends.

    Waits for the lock if somebody else holds it, and names who that is if it takes too long. A wait that
    would never end, because the holder waits in turn for what you hold, is given up by the youngest of
    those in the circle (E_DEADLOCK, status 4). The command gets every signal that is sent to this one,
    does not inherit the lock, and on Linux is killed if this one is killed. With --json the outcome is
    printed to standard error, because standard output is the command's.

    \b
    Examples:
      holdfast file-lock run build.lock -- make install
      holdfast file-lock run db.lock --shared --timeout 1m -- ./report
      holdfast file-lock run cron.lock --nonblock --conflict-status 0 -- ./hourly
    """

    if nonblock and timeout is not None:
        raise click.UsageError("--nonblock and --timeout exclude each other.", click.get_current_context())
    request = LockRunOptions(path, shared=shared, fair=fair, wait=not nonblock, timeout=timeout)
    return run_locked(request, command, output, conflict_status=conflict_status)


@group.command(short_help="Show whether a file is locked, by whom, and who waits.")
@click.argument("path", type=_PATH)
@json_option
@click.pass_obj
def status(output: Output, *, path: str) -> None:
    """Show whether the file PATH is locked, who holds the lock and who waits for it.

    Holders of every program that uses flock(2) are shown. Only Linux tells who they are, and only
    those in the same pid namespace; where it does not tell, the lock is tried for a moment to find
    out whether it is free. Changes nothing.

    \b
    Example:
      holdfast file-lock status build.lock
    """

    state = look(path)
    output.result(state.as_record(), state.lines())


class LockRunOptions(NamedTuple):
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

        holders = [each.as_record() for each in look(self.path).holders]
        by = " by " + ", ".join(str(each["shown"]) for each in holders) if holders else ""
        return LockConflict(
            f"{self.path} is locked{by}",
            path=self.path,
            holders=holders,
            hint="Wait for the holder to finish: --timeout 1m.",
        )


def run_locked(
    request: LockRunOptions, command: tuple[str, ...], output: Output, *, conflict_status: int | None
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


FREE, SHARED, EXCLUSIVE = "free", "shared", "exclusive"


class FileLockState(NamedTuple):
    """What was seen. If `holders_known` is False, there may be holders that are not listed."""

    path: str
    exists: bool
    state: str
    holders: list[FileLockHolder]
    waiting: list[FileLockHolder]
    holders_known: bool

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        record = self._asdict()
        record["holders"] = [each.as_record() for each in self.holders]
        record["waiting"] = [each.as_record() for each in self.waiting]
        return record

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"{self.path}: {self._described()}"
        yield from (f"  held by  {each}" for each in self.holders)
        yield from (f"  waiting  {each}" for each in self.waiting)

    def _described(self) -> str:
        if not self.exists:
            return "free (there is no such file yet)"
        if self.state == FREE:
            return "free"
        text = "locked, exclusively" if self.state == EXCLUSIVE else "locked, shared"
        return text if self.holders_known else f"{text}; by whom cannot be seen from here"


def look(path: str) -> FileLockState:
    """Who holds a lock on the file at `path` and who waits for it. Never makes the file."""
    if not _exists(path):
        return FileLockState(path, False, FREE, [], [], True)
    seen = find_holders(path)
    holders = [each for each in seen or () if not each.waiting]
    waiting = [each for each in seen or () if each.waiting]
    if holders:
        state = SHARED if all(each.shared for each in holders) else EXCLUSIVE
        return FileLockState(path, True, state, holders, with_queue(path, waiting), True)
    state = _try(path)  # the kernel does not tell, or hides those of another pid namespace or machine
    return FileLockState(path, True, state, [], with_queue(path, waiting), state == FREE)


def _try(path: str) -> str:
    """Find out by taking the lock for a moment, the gentler way first."""
    locker = FileLocker(0.0)
    guard = locker.try_lock_shared(path)
    if guard is None:
        return EXCLUSIVE
    guard.release()
    guard = locker.try_lock_exclusive(path)
    if guard is None:
        return SHARED
    guard.release()
    return FREE


def _exists(path: str) -> bool:
    try:
        calls.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be looked at; what is tried next says why
    return True
