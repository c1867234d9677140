"""`holdfast lock`: run a command under a file lock, and show who holds one."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import click
from click.core import ParameterSource

from holdfast.cli import child
from holdfast.cli.child import RunCommand
from holdfast.cli.entry import Group
from holdfast.cli.options import wait_option, with_output
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import observe_file_lock
from holdfast.errors import LockConflict, LockTimeout
from holdfast.fs import calls
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.kernel_locks import FileLockHolder, find_holders, with_queue

group = Group(
    "lock",
    help="""\
Lock any file between processes, with flock(2), as flock(1) and many libraries do. The file is created if it does not
exist; nothing is ever written to it, and it is never deleted. The kernel releases the lock when its holder exits or is
killed.

\b
Example:
  holdfast lock run build.lock -- make install
""",
)


def _default_wait() -> str:
    from holdfast.locks.retry import lock_timeout

    return f"{lock_timeout(os.environ):f}"


@group.command(cls=RunCommand, short_help="Run a command under the lock.")
@click.argument("path", metavar="FILE", type=click.Path())
@click.option("--shared", is_flag=True, help="Take a shared lock, which excludes only exclusive holders.")
@wait_option(
    "How long to wait for the lock",
    default=_default_wait,
    default_text="JIT_LOCK_TIMEOUT seconds from the environment, else 5s",
)
@click.option("--nonblock", is_flag=True, help="Do not wait: if the lock is held, fail with status 4.")
@click.option(
    "--fair", is_flag=True, help="Do not overtake waiters. All users of the lock must use it. Creates FILE.queue."
)
@click.option(
    "--conflict-status",
    metavar="N",
    type=click.IntRange(0, 255),
    help="Exit with this status if the lock is not available, instead of 75 or 4.",
)
@with_output
def run(
    output: Output,
    *,
    path: str,
    shared: bool,
    wait: float | None,
    nonblock: bool,
    fair: bool,
    conflict_status: int | None,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock on FILE, and exit with its status.

    If another process holds the lock, Holdfast waits for up to --wait, then fails with status 75 and names the holder.
    In a deadlock (the holder in turn waits for something that you hold), the youngest waiter gives up (E_DEADLOCK,
    status 4). Holdfast forwards signals to COMMAND. COMMAND does not inherit the lock, and on Linux it is killed if
    Holdfast is killed. With --json, the outcome is printed to standard error, because standard output belongs to
    COMMAND.

    \b
    Examples:
      holdfast lock run build.lock -- make install
      holdfast lock run db.lock --shared --wait 1m -- ./report
      holdfast lock run cron.lock --nonblock --conflict-status 0 -- ./hourly
    """
    context = click.get_current_context()
    wait_given = context.get_parameter_source("wait") is ParameterSource.COMMANDLINE
    if nonblock and wait_given:
        raise click.UsageError("--nonblock and --wait cannot be used together.", context)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            if nonblock:
                stack.enter_context(_try_once(path, shared, fair))
            else:
                locker = FileLocker(wait, fair=fair, observer=observe_file_lock)
                with _waiting(path, wait):
                    stack.enter_context(locker.acquire(path, shared=shared))
        except (LockTimeout, LockConflict) as failure:
            advice = _advice(path, failure, wait_given) if isinstance(failure, LockTimeout) else None
            raise CommandFailed(failure, exit_status=conflict_status, advice=advice) from failure
        acquired = time.monotonic()
        ended = child.run(command)
        held = time.monotonic() - acquired
    output.result({**ended.as_record(), "waited": round(acquired - began, 6), "held": round(held, 6)})
    return child.end_like(ended)


def _waiting(path: str, wait: float | None) -> AbstractContextManager[None]:
    if sys.stderr is None or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from holdfast.cli.progress import waiting, waiting_for

    def text() -> str:
        return waiting_for(path, ", ".join(str(each) for each in find_holders(path) or () if not each.waiting))

    return waiting(wait, text)


def _try_once(path: str, shared: bool, fair: bool) -> LockGuard:
    lock = FileLocker(0.0, fair=fair).try_acquire(path, shared=shared)
    if lock is not None:
        return lock
    holders = [each.as_record() for each in file_lock_state(path).holders]
    by = " by " + ", ".join(str(each["shown"]) for each in holders) if holders else ""
    hint = "Wait for the holder to finish: --wait 1m."
    raise LockConflict(f"{path} is locked{by}", path=path, holders=holders, hint=hint)


def _advice(path: str, failure: LockTimeout, wait_given: bool) -> str:
    from shlex import quote

    seconds = math.ceil(max(10.0, 2 * failure.timeout))
    longer = f"JIT_LOCK_TIMEOUT={seconds} holdfast ..."
    if wait_given:
        longer = f"--wait {seconds}s, or without it {longer}"
    return (
        "This usually means another process is running.\n"
        "Try:\n"
        "  1. Wait a few seconds and retry\n"
        f"  2. Check for stuck processes: holdfast lock status {printable(quote(path))}\n"
        f"  3. Increase timeout: {longer}"
    )


@group.command(short_help="Show whether a file is locked, its holders and its waiters.")
@click.argument("path", metavar="FILE", type=click.Path())
@with_output
def status(output: Output, *, path: str) -> None:
    """Show whether FILE is locked, who holds the lock and who waits for it.

    Shows holders in any program that uses flock(2). Holders are named only on Linux, and only in the same pid
    namespace; otherwise, the command briefly tries to lock the file to see whether it is free. Changes nothing.

    \b
    Example:
      holdfast lock status build.lock
    """
    state = file_lock_state(path)
    output.result(state.as_record(), state.lines())


FREE, SHARED, EXCLUSIVE = "free", "shared", "exclusive"


class FileLockState(NamedTuple):
    """A file lock at one moment. Unless `holders_known`, there may be holders that are not listed."""

    path: str
    exists: bool
    state: str
    holders: list[FileLockHolder]
    waiting: list[FileLockHolder]
    holders_known: bool

    def as_record(self) -> dict[str, object]:
        record = self._asdict()
        record["holders"] = [each.as_record() for each in self.holders]
        record["waiting"] = [each.as_record() for each in self.waiting]
        return record

    def lines(self) -> Iterator[str]:
        yield f"{self.path}: {self._described()}"
        yield from (f"  held by  {each}" for each in self.holders)
        yield from (f"  waiting  {each}" for each in self.waiting)

    def _described(self) -> str:
        if not self.exists:
            return "free (the file does not exist yet)"
        if self.state == FREE:
            return "free"
        text = "locked, exclusively" if self.state == EXCLUSIVE else "locked, shared"
        return text if self.holders_known else f"{text}; the holder is not visible from here"


def file_lock_state(path: str) -> FileLockState:
    """The holders and waiters of the lock on a file. Never creates the file."""
    if not _exists(path):
        return FileLockState(path, False, FREE, [], [], True)
    seen = find_holders(path)
    holders = [each for each in seen or () if not each.waiting]
    waiting = [each for each in seen or () if each.waiting]
    if holders:
        state = SHARED if all(each.shared for each in holders) else EXCLUSIVE
        return FileLockState(path, True, state, holders, with_queue(path, waiting), True)
    state = _try(path)  # the kernel hides holders in another pid namespace or machine
    return FileLockState(path, True, state, [], with_queue(path, waiting), state == FREE)


def _try(path: str) -> str:
    """The state of the lock, found by acquiring it for a moment: shared first, which does not disturb readers."""
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
        return True  # unreadable: acquiring the lock says why
    return True
