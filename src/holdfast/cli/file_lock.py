"""`holdfast file-lock`: run a command under a file lock, and see who holds one."""

from __future__ import annotations

import click

from holdfast.cli.group import Group
from holdfast.cli.options import duration_or_none, json_option
from holdfast.cli.output import Output
from holdfast.cli.running import RunCommand

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
    from holdfast.cli.file_lock_run import Request, run_locked

    if nonblock and timeout is not None:
        raise click.UsageError("--nonblock and --timeout exclude each other.", click.get_current_context())
    request = Request(path, shared=shared, fair=fair, wait=not nonblock, timeout=timeout)
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
    from holdfast.cli.file_lock_state import look

    state = look(path)
    output.result(state.as_record(), state.lines())
