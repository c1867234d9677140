"""`holdfast run`: a command under the lock of a worktree, from acquiring it to releasing it."""

from __future__ import annotations

import click

from holdfast.cli.options import UNLIMITED, duration, duration_or_none, json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree, repo_option, worktree_option
from holdfast.cli.running import RunCommand


@click.command(cls=RunCommand, short_help="Run a command while you hold the lock of a worktree.")
@repo_option
@worktree_option
@click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait in line for the lock, such as 30s, 5m; 'none': without limit.  "
    "[default: not at all, fail with status 4]",
)
@click.option(
    "--ttl",
    metavar="DURATION",
    default="30s",
    show_default=True,
    callback=duration,
    help="How long others wait if this process is killed; it is renewed as long as it lives.",
)
@click.option("--purpose", metavar="TEXT", help="What for: others are shown it.  [default: the command]")
@click.option(
    "--priority", type=int, default=0, show_default=True, help="Who waits with a higher one is served first."
)
@click.option("--snapshot", is_flag=True, help="Take a snapshot if the command succeeds.")
@click.option("-m", "--note", "--message", metavar="TEXT", default="", help="The note of that snapshot.")
@click.option("--chdir", is_flag=True, help="Run it in the directory of the worktree.")
@json_option
@click.pass_obj
def run(
    output: Output,
    *,
    repo: str | None,
    worktree: str | None,
    wait: float | None,
    ttl: float,
    purpose: str | None,
    priority: int,
    snapshot: bool,
    note: str,
    chdir: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND while holding the lock of a worktree, and end as it ends.

    The lock is renewed as long as the command runs. If it is lost all the same, the command is ended
    (SIGTERM, then SIGKILL) and the status is 5: stop writing. The command finds HOLDFAST_REPO,
    HOLDFAST_WORKTREE, HOLDFAST_LOCK_ID and HOLDFAST_TOKEN in its environment, so what it calls of
    Holdfast uses this lock. With --json the outcome is printed to standard error.

    \b
    Examples:
      holdfast run --wait 5m -- make
      holdfast run --worktree experiment --snapshot -m "generated" -- ./generate
    """
    from holdfast.cli.lease_run import Wish, run_leased

    opened = open_worktree(repo, worktree)
    wish = Wish(
        ttl=ttl,
        wait=None if wait == UNLIMITED else wait or 0.0,
        purpose=purpose,
        priority=priority,
        snapshot=snapshot,
        note=note,
        chdir=chdir,
    )
    return run_leased(opened.repository, opened.worktree, command, output, wish)
