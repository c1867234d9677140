"""`holdfast repo-lock`: run a command as the only writer of a repository; see and break its lock."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping

import click

from holdfast.cli import child
from holdfast.cli.child import RunCommand, SignalForwarding
from holdfast.cli.entry import Group
from holdfast.cli.options import duration, duration_or_none, json_option
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import observe_repo_lock
from holdfast.clock import format_duration, format_instant
from holdfast.errors import Failure, LockChanged, LockNotHeld, LockTimeout, RepoLocked, SettingInvalid
from holdfast.locks.identity import Liveness
from holdfast.locks.repo_lock import HeldRepoLock, RepoLock, RepoLockState

STALE_AFTER = "2h"
LONGEST_STALE_AFTER = 3650 * 86400.0

group = Group(
    "repo-lock",
    help="""\
One writer per repository: a lock file in a data directory, which every program that keeps its
protocol respects. A lock whose process is gone is taken over, and so is one that is older than
--stale-after.

The data directory is --data-dir, else HOLDFAST_DATA_DIR or AGENCY_DATA_DIR from the environment,
else the usual place of this system, such as ~/.local/share/holdfast.

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


_data_dir_option = click.option(
    "--data-dir", metavar="DIRECTORY", type=click.Path(file_okay=False), help="Where the locks are kept."
)
_stale_after_option = click.option(
    "--stale-after",
    metavar="DURATION",
    default=STALE_AFTER,
    show_default=True,
    callback=_stale_after,
    help="The age from which on a lock may be taken over, even from a live process.",
)


def _locks_in(data_dir: str | None, stale_after: float) -> RepoLock:
    from holdfast.cli.options import data_directory
    from holdfast.locks.repo_lock import RepoLock

    return RepoLock(data_directory(data_dir, os.environ), stale_after=stale_after)


@group.command(cls=RunCommand, short_help="Run a command as the only writer.")
@click.argument("repo_id")
@_data_dir_option
@click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait for the lock, such as 30s, 5m; 'none': without limit.  "
    "[default: not at all, fail with status 4]",
)
@_stale_after_option
@json_option
@click.pass_obj
def run(
    output: Output,
    *,
    repo_id: str,
    data_dir: str | None,
    wait: float | None,
    stale_after: float,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock of the repository REPO_ID, and end as it ends.

    A wait that would never end, because the holder waits in turn for what you hold, is given up by the
    youngest of those in the circle (E_DEADLOCK). While the command runs the lock is refreshed, so that
    nobody takes it for stale. If it is lost all the same (somebody broke it), the command is ended and
    the status is 5: stop writing. With --json the outcome is printed to standard error, because standard
    output is the command's.

    \b
    Examples:
      holdfast repo-lock run my-repo -- git push
      holdfast repo-lock run my-repo --wait 5m -- ./release
    """

    return run_locked(_locks_in(data_dir, stale_after), repo_id, command, output, wait=wait)


@group.command(short_help="Show which repositories are locked, and by whom.")
@click.argument("repo_id", required=False)
@_data_dir_option
@_stale_after_option
@json_option
@click.pass_obj
def status(output: Output, *, repo_id: str | None, data_dir: str | None, stale_after: float) -> None:
    """Show who holds the lock of REPO_ID, or of every repository if none is named. Changes nothing.

    \b
    Examples:
      holdfast repo-lock status
      holdfast repo-lock status my-repo --json
    """

    lock = _locks_in(data_dir, stale_after)
    states = lock.states() if repo_id is None else {repo_id: lock.state(repo_id)}
    records = [repo_lock_to_json(each, state, stale_after) for each, state in states.items()]
    shown = [line for each, state in states.items() for line in repo_lock_lines(each, state, stale_after)]
    output.result(
        {"data_dir": str(lock.data_dir), "repositories": records},
        shown or [f"No repository has ever been locked in {lock.data_dir}."],
    )


@group.command("break", short_help="Remove a lock by force, named by its exact identity.")
@click.argument("repo_id")
@click.option(
    "--identity", required=True, metavar="IDENTITY", help="The identity of the lock, as 'status' shows it."
)
@_data_dir_option
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@json_option
@click.pass_obj
def break_(output: Output, *, repo_id: str, identity: str, data_dir: str | None, dry_run: bool) -> None:
    """Remove the lock of REPO_ID whose holder will not come back, if it is still the one you looked at.

    Dead processes need no breaking: the next 'run' takes over from them. Break a lock only if you
    know that its holder no longer writes. Its identity changes whenever the lock does.

    \b
    Examples:
      holdfast repo-lock status my-repo
      holdfast repo-lock break my-repo --identity 9f86d081884c7d65
    """
    from holdfast.clock import parse_duration

    lock = _locks_in(data_dir, parse_duration(STALE_AFTER))
    state = lock.state(repo_id)
    if not dry_run:
        lock.break_lock(repo_id, identity)
    elif state is None or state.identity != identity:
        raise LockChanged(f"the lock of {repo_id} does not have the identity {identity}", repo_id=repo_id)
    heading = "Would break this lock:" if dry_run else "Broke this lock:"
    output.result(
        {"dry_run": dry_run, "broken": repo_lock_to_json(repo_id, state, lock.stale_after)},
        [heading, *repo_lock_lines(repo_id, state, lock.stale_after)],
    )


def repo_lock_to_json(repo_id: str, state: RepoLockState | None, stale_after: float) -> dict[str, object]:
    """Everything that is known, as plain values. `state` is `free`, `locked` or `stale`."""
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
    """The same for people: who, where, what for, since when, until when, and its identity."""
    if state is None:
        yield f"{repo_id}: free"
        return
    who = (
        repo_lock_holder_line(state.info.as_record())
        if state.info
        else "somebody (its content cannot be read)"
    )
    yield f"{repo_id}: {'stale, was locked' if state.stale else 'locked'} by {who}"
    if state.info and state.info.holder:
        yield f"  host      {state.info.holder.host}, user {state.info.holder.user}"
    yield f"  age       {format_duration(state.age)}"
    if state.stale:
        yield f"  stale     {_reason(state)}; the next one who wants it takes it over"
    else:
        yield f"  expires   {_expiry(state, stale_after)}, unless its holder refreshes it"
        yield f"  process   {state.liveness.value}"
    yield f"  identity  {state.identity}"


def repo_lock_holder_line(info: Mapping[str, object]) -> str:
    """Who holds a lock, by what its file says."""
    text = f"pid {info.get('pid')}"
    if info.get("cmd"):
        text += f" ({info['cmd']})"
    return text + (f" since {info['created_at']}" if info.get("created_at") else "")


def _reason(state: RepoLockState) -> str:
    return "its process is gone" if state.liveness is Liveness.DEAD else "it is too old"


def _expiry(state: RepoLockState, stale_after: float) -> str | None:
    if state.info is None or state.info.created_at is None:
        return None
    return format_instant(state.info.created_at + stale_after)


LOST = """\
The command was ended: the lock was broken or taken over, so somebody else may be writing.
Look at what it left half done before you run it again."""
LOOK_EVERY = 5.0
LONGEST_PURPOSE = 200
_PAUSES = (0.02, 0.05, 0.1, 0.25)
_ROUNDING = 0.01


def run_locked(
    lock: RepoLock, repo_id: str, command: tuple[str, ...], output: Output, *, wait: float | None
) -> int:
    """Run the command while holding the lock; end as it ends, or end it if the lock is lost."""
    began = time.monotonic()
    with acquire(lock, repo_id, _purpose(command), wait) as held:
        locked = time.monotonic()
        upkeep = Upkeep(lock, held)
        try:
            ended = child.run(command, duty=SignalForwarding(upkeep.every, upkeep))
        except LockNotHeld as failure:
            raise CommandFailed(failure, advice=LOST) from failure
        duration = time.monotonic() - locked
    output.result({**ended.as_record(), "waited": round(locked - began, 6), "held": round(duration, 6)})
    return child.end_like(ended)


def acquire(lock: RepoLock, repo_id: str, purpose: str, wait: float | None) -> HeldRepoLock:
    """Take the lock, asking again until `wait` seconds are over, or the wait is in vain; None: only once."""
    deadline = time.monotonic() + (wait or 0.0)
    try:
        return lock.lock(repo_id, purpose)
    except RepoLocked as failure:
        if wait is None:
            raise
        refused = failure
    lookout = observe_repo_lock(lock, repo_id, purpose, wait)
    try:
        for tries in itertools.count():
            if time.monotonic() >= deadline:
                break
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            try:
                return lock.lock(repo_id, purpose)
            except RepoLocked as failure:
                refused = failure
            if lookout.found is not None:
                raise lookout.found
    finally:
        lookout.end()
    raise _timeout(refused, wait) from refused


class Upkeep:
    """Keeps a lock that is held young, and fails as soon as it is seen to be lost.

    It is looked at every few seconds and dated anew every `stale_after / 4`. One that cannot be dated
    anew (a full disk, say) is ours until it is old; it is given up before that.
    """

    def __init__(self, lock: RepoLock, held: HeldRepoLock) -> None:
        self._lock = lock
        self._held = held
        self._refresh_every = lock.stale_after / 4
        self.every = min(LOOK_EVERY, self._refresh_every)
        self._identity: str | None = None
        self._dated_at = time.monotonic()

    def __call__(self) -> None:
        age = time.monotonic() - self._dated_at + _ROUNDING
        if age < self._refresh_every and self._is_as_we_left_it():
            return
        try:
            self._held.refresh()
        except LockNotHeld:
            raise
        except Failure as failure:
            if age >= 3 * self._refresh_every:
                raise self._given_up(failure) from failure
        else:
            self._dated_at = time.monotonic()
            self._identity = self._look()

    def _is_as_we_left_it(self) -> bool:
        return self._identity is not None and self._look() == self._identity

    def _look(self) -> str | None:
        state = self._lock.state(self._held.repo_id)
        return state.identity if state else None

    def _given_up(self, failure: Failure) -> LockNotHeld:
        return LockNotHeld(
            f"the lock of {self._held.repo_id} cannot be kept: {failure.message}",
            repo_id=self._held.repo_id,
            reason=failure.as_record(),
        )


def _timeout(failure: RepoLocked, wait: float) -> LockTimeout:
    holder = (
        {**failure.info, "shown": repo_lock_holder_line(failure.info)}
        if failure.info
        else {"shown": "somebody"}
    )
    return LockTimeout(failure.path, wait, format_duration(wait), holders=[holder])


def _purpose(command: tuple[str, ...]) -> str:
    """The command as those see it who ask what the lock is held for."""
    from shlex import join

    text = printable(join(command))
    return text if len(text) <= LONGEST_PURPOSE else text[: LONGEST_PURPOSE - 3] + "..."
