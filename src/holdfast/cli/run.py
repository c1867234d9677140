"""`holdfast run`: a command under the lock of a worktree, from acquiring it to releasing it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from holdfast.cli import child
from holdfast.cli.child import RunCommand
from holdfast.cli.options import UNLIMITED, duration, duration_or_none, json_option
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import (
    LOCK_ID,
    REPO,
    TOKEN,
    WORKTREE,
    current_directory,
    open_worktree,
    refuse_own_lock,
    repo_option,
    worktree_option,
)
from holdfast.errors import Failure, LockExpired, LockNotHeld, NotFound
from holdfast.fs import calls
from holdfast.fs.names import checked_text
from holdfast.leases.service import HeldLease
from holdfast.repository.context import Isolation
from holdfast.repository.repository import Repository


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

    opened = open_worktree(repo, worktree)
    wish = RunOptions(
        ttl=ttl,
        wait=None if wait == UNLIMITED else wait or 0.0,
        purpose=purpose,
        priority=priority,
        snapshot=snapshot,
        note=note,
        chdir=chdir,
    )
    return run_leased(opened.repository, opened.worktree, command, output, wish)


LOST = """\
The command was ended: the lock was lost, so somebody else may be writing.
Look at what it left half done before you run it again."""
NOT_SAVED = """\
The command has succeeded, but no snapshot was taken. What it wrote is still in the worktree."""
LONGEST_PURPOSE = 200
LOOK_EVERY = 1.0


class RunOptions(NamedTuple):
    """How a command is to be run."""

    ttl: float
    wait: float | None
    purpose: str | None
    priority: int
    snapshot: bool
    note: str
    chdir: bool


def run_leased(
    repository: Repository, worktree: str, command: tuple[str, ...], output: Output, wish: RunOptions
) -> int:
    """Run the command under the lease; end as it ends, or end it if the lease is lost."""
    return child.end_like(_run_leased(repository, worktree, command, output, wish))


def _run_leased(
    repository: Repository, worktree: str, command: tuple[str, ...], output: Output, wish: RunOptions
) -> child.CommandExit:
    began = time.monotonic()
    checked_text(wish.note, what="note")  # not only when the command has done its work
    directory = repository.path(worktree)
    if wish.snapshot and not (wish.chdir or output.as_json):
        _warn_if_elsewhere(output, worktree, directory)
    with _leased(repository, worktree, command, output, wish) as lease:
        locked = time.monotonic()
        ended = _run(command, lease, _environment(repository, worktree, lease), wish, directory)
        saved = None
        if wish.snapshot and ended.exit_status == 0:
            saved = _save(repository, worktree, lease, wish.note)
        duration = time.monotonic() - locked
    output.result(
        {
            **ended.as_record(),
            "waited": round(locked - began, 6),
            "held": round(duration, 6),
            "worktree_id": worktree,
            "lock_id": lease.lock_id if lease else None,
            "fencing_token": lease.token if lease else None,
            "snapshot_id": saved,
        }
    )
    if saved is not None and not output.as_json:
        output.diagnostic(f"holdfast: what is in {worktree} now is the snapshot {saved}")
    return ended


def _warn_if_elsewhere(output: Output, worktree: str, directory: Path) -> None:
    """What a command writes outside of the worktree is in no snapshot: say so before it does."""
    with contextlib.suppress(OSError, NotFound):  # a current directory that is gone
        here, wanted = current_directory(), calls.stat(directory)
        if not any(os.path.samestat(wanted, calls.stat(each)) for each in (here, *here.parents)):
            output.diagnostic(
                f"holdfast: the command runs in {printable(str(here))}; the snapshot is of {worktree}, "
                "which is elsewhere. To run it there: --chdir"
            )


@contextlib.contextmanager
def _leased(
    repository: Repository, worktree: str, command: tuple[str, ...], output: Output, wish: RunOptions
) -> Iterator[HeldLease | None]:
    """The lease, renewed in the background; None for a shared worktree, which has none."""
    if repository.config(worktree).isolation is Isolation.SHARED:
        output.diagnostic(f"{worktree} is shared (high-risk): others may write while the command runs.")
        yield None
        return
    refuse_own_lock(repository, worktree)
    purpose = _purpose(command) if wish.purpose is None else wish.purpose
    held = repository.lease(worktree, ttl=wish.ttl, wait=wish.wait, purpose=purpose, priority=wish.priority)
    try:
        with child.kept_back():  # the thread that renews inherits it: no signal is to reach that one
            held.beat()
        yield held
    finally:
        held.release()


def _run(
    command: tuple[str, ...],
    lease: HeldLease | None,
    environment: dict[str, str],
    wish: RunOptions,
    directory: Path,
) -> child.CommandExit:
    duty = None if lease is None else child.SignalForwarding(min(LOOK_EVERY, wish.ttl / 10), lease.check)
    where = directory if wish.chdir else None
    mark = None if lease is None else child.Mark(LOCK_ID, lease.lock_id, directory)
    try:
        ended = child.run(command, duty=duty, environment=environment, directory=where, mark=mark)
        if lease is not None:
            lease.check()  # it may have been lost at the very end
    except (LockNotHeld, LockExpired) as failure:
        raise CommandFailed(failure, advice=LOST) from failure
    return ended


def _environment(repository: Repository, worktree: str, lease: HeldLease | None) -> dict[str, str]:
    """What the command is told: which repository and worktree, and by which right."""
    known = {**os.environ, REPO: str(repository.root), WORKTREE: worktree}
    for name in (LOCK_ID, TOKEN):
        known.pop(name, None)  # of some other lock
    if lease is not None:
        known |= {LOCK_ID: lease.lock_id, TOKEN: str(lease.token)}
    return known


def _save(repository: Repository, worktree: str, lease: HeldLease | None, note: str) -> str:
    try:
        return repository.save(worktree, lease, note=note)
    except Failure as failure:
        raise CommandFailed(failure, advice=f"{NOT_SAVED}\n{printable(failure.hint)}") from failure


def _purpose(command: tuple[str, ...]) -> str:
    """The command as those see it who ask what the lock is held for."""
    from shlex import join

    text = printable(join(command))
    return text if len(text) <= LONGEST_PURPOSE else text[: LONGEST_PURPOSE - 3] + "..."
