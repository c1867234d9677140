"""`holdfast repo-lock`: run a command as the only writer of a repository; see and break its lock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from holdfast.cli.group import Group
from holdfast.cli.options import duration, duration_or_none, json_option
from holdfast.cli.output import Output
from holdfast.cli.running import RunCommand
from holdfast.errors import LockChanged, SettingInvalid

if TYPE_CHECKING:
    from holdfast.locks.repo_lock import RepoLock

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
    from holdfast.cli.places import data_directory
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
    from holdfast.cli.repo_lock_run import run_locked

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
    from holdfast.cli.repo_lock_view import as_record, lines

    lock = _locks_in(data_dir, stale_after)
    states = lock.states() if repo_id is None else {repo_id: lock.state(repo_id)}
    records = [as_record(each, state, stale_after) for each, state in states.items()]
    shown = [line for each, state in states.items() for line in lines(each, state, stale_after)]
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
    from holdfast.cli.repo_lock_view import as_record, lines
    from holdfast.clock import parse_duration

    lock = _locks_in(data_dir, parse_duration(STALE_AFTER))
    state = lock.state(repo_id)
    if not dry_run:
        lock.break_lock(repo_id, identity)
    elif state is None or state.identity != identity:
        raise LockChanged(f"the lock of {repo_id} does not have the identity {identity}", repo_id=repo_id)
    heading = "Would break this lock:" if dry_run else "Broke this lock:"
    output.result(
        {"dry_run": dry_run, "broken": as_record(repo_id, state, lock.stale_after)},
        [heading, *lines(repo_id, state, lock.stale_after)],
    )
