"""`holdfast repo-lock`: run a command as the only writer of a repository; show and break its lock."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import click

from holdfast.cli import child
from holdfast.cli.child import Periodic, RunCommand
from holdfast.cli.entry import Group
from holdfast.cli.options import data_dir_option, dry_run_option, duration, wait_option, with_output
from holdfast.cli.output import CommandFailed, Output, command_as_text
from holdfast.cli.repository import observe_repo_lock
from holdfast.clock import format_ago, format_duration, format_instant
from holdfast.errors import Failure, LockChanged, LockNotHeld, LockTimeout, RepoLocked, SettingInvalid
from holdfast.locks.identity import Liveness
from holdfast.locks.repo_lock import DEFAULT_STALE_AFTER, HeldRepoLock, RepoLock, RepoLockState

STALE_AFTER = "2h"
LONGEST_STALE_AFTER = 3650 * 86400.0
CHECK_EVERY = 5.0
LOST = """\
The command was stopped: the lock was broken or taken over, so another process may be writing.
Check what it left half done before you run it again."""
_PAUSES = (0.02, 0.05, 0.1, 0.25)
_ROUNDING = 0.01

group = Group(
    "repo-lock",
    help="""\
One writer per repository: a lock file in a data directory, which every program that follows its protocol
respects. A lock is taken over if its process is gone, or if it is older than --stale-after.

The data directory is --data-dir, else HOLDFAST_DATA_DIR or AGENCY_DATA_DIR from the environment, else the
data directory of this system, such as ~/.local/share/holdfast.

\b
Example:
  holdfast repo-lock run my-repo --wait 1m -- git push
""",
)


def _stale_after(context: click.Context, parameter: click.Parameter, value: str) -> float:
    seconds = duration(context, parameter, value) or 0.0
    if not 1 <= seconds <= LONGEST_STALE_AFTER:
        raise SettingInvalid(parameter.opts[0], value, "a duration from 1s to 3650d")
    return seconds


_stale_after_option = click.option(
    "--stale-after",
    metavar="DURATION",
    default=STALE_AFTER,
    show_default=True,
    callback=_stale_after,
    help="The age from which a lock may be taken over, even from a live process.",
)


def _locks_in(data_dir: str | None, stale_after: float) -> RepoLock:
    from holdfast.store.approvals import data_directory

    return RepoLock(data_directory(data_dir, os.environ), stale_after=stale_after)


@group.command(cls=RunCommand, short_help="Run a command as the only writer.")
@click.argument("repo_id")
@data_dir_option
@wait_option("How long to wait for the lock")
@_stale_after_option
@with_output
def run(
    output: Output,
    *,
    repo_id: str,
    data_dir: str | None,
    wait: float | None,
    stale_after: float,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock of the repository REPO_ID, and exit with its status.

    In a deadlock (the holder in turn waits for something that you hold), the youngest waiter gives up (E_DEADLOCK).
    While COMMAND runs, the lock is refreshed so that it does not become stale. If the lock is lost (a user broke it),
    COMMAND is stopped and the exit status is 5: stop writing. With --json, the outcome is printed to standard error,
    because standard output belongs to COMMAND.

    \b
    Examples:
      holdfast repo-lock run my-repo -- git push
      holdfast repo-lock run my-repo --wait 5m -- ./release
    """
    lock = _locks_in(data_dir, stale_after)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with _waiting(lock, repo_id, wait):
            held = stack.enter_context(acquire(lock, repo_id, command_as_text(command), wait))
        acquired = time.monotonic()
        heartbeat = Heartbeat(lock, held)
        try:
            ended = child.run(command, check=Periodic(heartbeat.every, heartbeat))
        except LockNotHeld as failure:
            raise CommandFailed(failure, advice=LOST) from failure
        time_held = time.monotonic() - acquired
    output.result({**ended.as_record(), "waited": round(acquired - began, 6), "held": round(time_held, 6)})
    return child.end_like(ended)


def _waiting(lock: RepoLock, repo_id: str, wait: float | None) -> AbstractContextManager[None]:
    if sys.stderr is None or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from holdfast.cli.progress import waiting, waiting_for

    def text() -> str:
        state = lock.state(repo_id)
        return waiting_for(f"the lock of {repo_id}", f"pid {state.info.pid}" if state and state.info else "")

    return waiting(wait, text)


@group.command(short_help="Show which repositories are locked, and by whom.")
@click.argument("repo_id", required=False)
@data_dir_option
@_stale_after_option
@with_output
def status(output: Output, *, repo_id: str | None, data_dir: str | None, stale_after: float) -> None:
    """Show the holder of the lock of REPO_ID, or of every repository. Changes nothing.

    \b
    Examples:
      holdfast repo-lock status
      holdfast repo-lock status my-repo --json
    """
    lock = _locks_in(data_dir, stale_after)
    states = lock.states() if repo_id is None else {repo_id: lock.state(repo_id)}
    records = [repo_lock_to_json(each, state, stale_after) for each, state in states.items()]
    lines = [line for each, state in states.items() for line in repo_lock_lines(each, state, stale_after)]
    none = [f"No repository has ever been locked in {lock.data_dir}."]
    output.result({"data_dir": str(lock.data_dir), "repositories": records}, lines or none)


@group.command("break", short_help="Break a lock, named by its exact identity.")
@click.argument("repo_id")
@click.option("--identity", required=True, metavar="IDENTITY", help="The identity of the lock, as 'status' shows it.")
@data_dir_option
@dry_run_option("Show what would be removed, and change nothing.")
@with_output
def break_(output: Output, *, repo_id: str, identity: str, data_dir: str | None, dry_run: bool) -> None:
    """Remove the lock of REPO_ID if it still has the identity that you saw.

    Locks of dead processes need no breaking: the next 'run' takes them over. Break a lock only if you know
    that its holder no longer writes. The identity changes whenever the lock does.

    \b
    Examples:
      holdfast repo-lock status my-repo
      holdfast repo-lock break my-repo --identity 9f86d081884c7d65
    """
    lock = _locks_in(data_dir, DEFAULT_STALE_AFTER)
    state = lock.state(repo_id)
    if not dry_run:
        lock.break_lock(repo_id, identity)
    elif state is None or state.identity != identity:
        raise LockChanged(f"the lock of {repo_id} does not have the identity {identity}", repo_id=repo_id)
    lines = ["Would break this lock:" if dry_run else "Broke this lock:"]
    lines += repo_lock_lines(repo_id, state, lock.stale_after)
    output.result({"dry_run": dry_run, "broken": repo_lock_to_json(repo_id, state, lock.stale_after)}, lines)


def repo_lock_to_json(repo_id: str, state: RepoLockState | None, stale_after: float) -> dict[str, object]:
    """The lock of a repository; its `state` is `free`, `locked` or `stale`."""
    if state is None:
        return {"repo_id": repo_id, "state": "free"}
    return {
        "repo_id": repo_id,
        "state": "stale" if state.stale else "locked",
        "identity": state.identity,
        "path": str(state.path),
        "age": round(state.age, 3),
        "expires_at": _expiry(state, stale_after),
        "liveness": state.liveness.value,
        "holder": state.info.as_record() if state.info else None,
    }


def repo_lock_lines(repo_id: str, state: RepoLockState | None, stale_after: float) -> Iterator[str]:
    if state is None:
        yield f"{repo_id}: free"
        return
    holder = _holder(state.info.as_record()) if state.info else "an unknown holder (the file is unreadable)"
    yield f"{repo_id}: {'stale, was locked' if state.stale else 'locked'} by {holder}"
    if state.info and state.info.holder:
        yield f"  host      {state.info.holder.host}, user {state.info.holder.user}"
    yield f"  age       {format_duration(state.age)}"
    if state.stale:
        reason = "its process is gone" if state.liveness is Liveness.DEAD else "it is too old"
        yield f"  stale     {reason}; the next to acquire it takes it over"
    else:
        yield f"  expires   {_expiry(state, stale_after)}, unless refreshed"
        yield f"  process   {state.liveness.value}"
    yield f"  identity  {state.identity}"


def _holder(info: Mapping[str, object]) -> str:
    text = f"pid {info.get('pid')}" + (f" ({info['cmd']})" if info.get("cmd") else "")
    return text + (f", locked {format_ago(str(info['created_at']))}" if info.get("created_at") else "")


def _expiry(state: RepoLockState, stale_after: float) -> str | None:
    if state.info is None or state.info.created_at is None:
        return None
    return format_instant(state.info.created_at + stale_after)


def acquire(lock: RepoLock, repo_id: str, purpose: str, wait: float | None) -> HeldRepoLock:
    """Acquire the lock, polling for up to `wait` seconds (None: forever) or until a deadlock."""
    try:
        return lock.lock(repo_id, purpose)
    except RepoLocked as failure:
        if wait == 0.0:
            raise
        refused = failure
    deadline = time.monotonic() + (math.inf if wait is None else wait)
    deadlocks = observe_repo_lock(lock, repo_id, purpose, wait)
    try:
        for tries in itertools.count():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(_PAUSES[min(tries, len(_PAUSES) - 1)], left))
            try:
                return lock.lock(repo_id, purpose)
            except RepoLocked as failure:
                refused = failure
            if deadlocks.found is not None:
                raise deadlocks.found
    finally:
        deadlocks.end()
    assert wait is not None
    shown = _holder(refused.info) if refused.info else "an unknown holder"
    holders = [{**(refused.info or {}), "shown": shown}]
    raise LockTimeout(refused.path, wait, format_duration(wait), holders=holders) from refused


class Heartbeat:
    """Refreshes a held lock, and raises `LockNotHeld` once it is lost.

    It checks the lock every few seconds and refreshes it every `stale_after / 4`. If refreshing fails (a full
    disk, say), the lock is still ours until it becomes stale, and is given up before that.
    """

    def __init__(self, lock: RepoLock, held: HeldRepoLock) -> None:
        self._lock = lock
        self._held = held
        self._refresh_every = lock.stale_after / 4
        self.every = min(CHECK_EVERY, self._refresh_every)
        self._identity: str | None = None
        self._refreshed_at = time.monotonic()

    def __call__(self) -> None:
        age = time.monotonic() - self._refreshed_at + _ROUNDING
        if age < self._refresh_every and self._identity is not None and self._current_identity() == self._identity:
            return
        try:
            self._held.refresh()
        except LockNotHeld:
            raise
        except Failure as failure:
            if age >= 3 * self._refresh_every:
                repo_id, reason = self._held.repo_id, failure.as_record()
                message = f"the lock of {repo_id} cannot be refreshed: {failure.message}"
                raise LockNotHeld(message, repo_id=repo_id, reason=reason) from failure
        else:
            self._refreshed_at = time.monotonic()
            self._identity = self._current_identity()

    def _current_identity(self) -> str | None:
        state = self._lock.state(self._held.repo_id)
        return state.identity if state else None
