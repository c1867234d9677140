"""`holdfast run`: run a command under the lease of a worktree, and save what it wrote."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli import LEASE_ID, LEASE_NAME, LEASE_TOKEN, LOCK_ID, REPO, TOKEN, WORKTREE, child
from holdfast.cli.child import RunCommand
from holdfast.cli.options import (
    consistency_option,
    name_option,
    priority_option,
    ttl_option,
    wait_option,
    with_output,
    worktree_options,
)
from holdfast.cli.output import CommandFailed, Output, command_as_text, printable
from holdfast.cli.repository import OpenedLease, current_directory, open_lease, refuse_own_lease
from holdfast.clock import format_duration
from holdfast.errors import Failure, LockExpired, LockNotHeld, NotFound, UsageFailure
from holdfast.fs import calls
from holdfast.fs.names import checked_text
from holdfast.leases.service import COMMAND_TTL, HeldLease
from holdfast.locks.process_tree import Mark
from holdfast.repository.context import Consistency, Isolation
from holdfast.repository.repository import Repository

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress

LOST = """\
The command was stopped: the lease was lost, so another holder may be writing.
Check what it left half done before you run it again."""
NOT_SAVED = "The command succeeded, but no snapshot was taken. Its files are still in the worktree."
CHECK_EVERY = 1.0


class RunOptions(NamedTuple):
    name: str | None
    ttl: float
    wait: float | None
    purpose: str | None
    priority: int
    snapshot: bool
    note: str
    consistency: Consistency | None
    no_chdir: bool


@click.command(cls=RunCommand, short_help="Run a command under the lease of a worktree, or a named one.")
@worktree_options
@name_option
@wait_option("How long to wait in the queue")
@ttl_option(
    "How long the lease lasts if this process is killed, from 100ms to 1d; while it lives, it renews the lease.",
    default=format_duration(COMMAND_TTL),
)
@click.option("--purpose", metavar="TEXT", help="The purpose, shown to others.  [default: the command]")
@priority_option
@click.option("--snapshot", is_flag=True, help="Take a snapshot if the command succeeds.")
@click.option("-m", "--note", "--message", metavar="TEXT", default="", help="The note of that snapshot.")
@consistency_option("that snapshot")
@click.option("--no-chdir", is_flag=True, help="Run it in the current directory, not in the worktree.")
@with_output
def run(output: Output, /, *, repo: str | None, worktree: str | None, command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND in a worktree while holding its lease, and exit with its status.

    The lease is renewed as long as the command runs. If the lease is lost, the command is stopped (SIGTERM, then
    SIGKILL) and the exit status is 5: stop writing. The command has HOLDFAST_REPO, HOLDFAST_WORKTREE, HOLDFAST_LOCK_ID
    and HOLDFAST_TOKEN in its environment, so the holdfast commands that it calls use this lease. With --json, the
    outcome is printed to standard error.

    With --name, COMMAND runs in the current directory under a lease without a worktree, and has HOLDFAST_LEASE_NAME,
    HOLDFAST_LEASE_ID and HOLDFAST_LEASE_TOKEN instead of the last three.

    \b
    Examples:
      holdfast run --wait 5m -- make
      holdfast run --name nightly-job -- ./report
      holdfast run --worktree experiment --snapshot -m "generated" -- ./generate
    """
    given = RunOptions(**options)
    if given.name is not None and given.snapshot:
        raise UsageFailure("--snapshot is for a worktree, not for --name", hint="Leave out one of them.")
    opened = open_lease(repo, worktree, given.name)
    return child.end_like(_run_leased(opened, command, output, given))


def _run_leased(
    opened: OpenedLease, command: tuple[str, ...], output: Output, options: RunOptions
) -> child.CommandExit:
    began = time.monotonic()
    repository, worktree = opened.repository, opened.worktree
    checked_text(options.note, what="note")  # a wrong note must fail before the command runs
    directory = repository.path(worktree) if opened.name is None else None
    if options.snapshot and options.no_chdir and not output.as_json and directory is not None:
        _warn_if_elsewhere(output, worktree, directory)
    with _leased(opened, command, output, options) as lease:
        acquired = time.monotonic()
        ended = _run(command, lease, _environment(opened, lease), options, directory)
        saved = None
        if options.snapshot and ended.exit_status == 0:
            saved = _save(repository, worktree, lease, options, output)
        held = time.monotonic() - acquired
    output.result(
        {
            **ended.as_record(),
            "waited": round(acquired - began, 6),
            "held": round(held, 6),
            "worktree": worktree or None,
            "name": opened.name,
            "lock_id": lease.lock_id if lease else None,
            "token": lease.token if lease else None,
            "snapshot_id": saved,
        }
    )
    if saved is not None and not output.as_json:
        output.diagnostic(f"holdfast: saved {worktree} as the snapshot {saved}")
    return ended


def _warn_if_elsewhere(output: Output, worktree: str, directory: Path) -> None:
    """Warn that the snapshot does not include what a command writes outside the worktree."""
    with contextlib.suppress(OSError, NotFound):  # the current directory is gone
        here, expected = current_directory(), calls.stat(directory)
        if not any(os.path.samestat(expected, calls.stat(each)) for each in (here, *here.parents)):
            output.diagnostic(
                f"holdfast: the command runs in {printable(str(here))}, outside {worktree}; "
                f"the snapshot does not include what it writes there. Without --no-chdir, it runs in {worktree}."
            )


@contextlib.contextmanager
def _leased(
    opened: OpenedLease, command: tuple[str, ...], output: Output, options: RunOptions
) -> Iterator[HeldLease | None]:
    """The lease, renewed in the background; None for a shared worktree, which has none."""
    repository, worktree = opened.repository, opened.worktree
    if opened.name is None and repository.config(worktree).isolation is Isolation.SHARED:
        output.diagnostic(f"{worktree} is shared (high-risk): others may write while the command runs.")
        yield None
        return
    refuse_own_lease(opened)
    purpose = command_as_text(command) if options.purpose is None else options.purpose
    held = None
    try:
        with contextlib.nullcontext() if options.wait == 0.0 else _waiting(opened, options.wait):
            held = repository.lease(
                worktree,
                name=opened.name,
                ttl=options.ttl,
                wait=options.wait,
                purpose=purpose,
                priority=options.priority,
            )
        with child.block_signals():  # the heartbeat thread inherits the mask, so no signal goes to it
            held.beat()
        yield held
    finally:
        if held is not None:
            held.release()


def _waiting(opened: OpenedLease, wait: float | None) -> AbstractContextManager[None]:
    from holdfast.cli.progress import waiting

    return waiting(wait, opened.waiting_text)


def _run(
    command: tuple[str, ...],
    lease: HeldLease | None,
    environment: dict[str, str],
    options: RunOptions,
    directory: Path | None,
) -> child.CommandExit:
    check = mark = None
    if lease is not None:
        check = child.Periodic(min(CHECK_EVERY, options.ttl / 10), lease.check)
        mark = None if directory is None else Mark(LOCK_ID, lease.lock_id, directory)
    where = None if options.no_chdir else directory
    try:
        ended = child.run(command, check=check, environment=environment, directory=where, mark=mark)
        if lease is not None:
            lease.check()  # it may have been lost at the very end
    except (LockNotHeld, LockExpired) as failure:
        raise CommandFailed(failure, advice=LOST) from failure
    return ended


def _environment(opened: OpenedLease, lease: HeldLease | None) -> dict[str, str]:
    known = {**os.environ, REPO: str(opened.repository.root)}
    if opened.name is not None and lease is not None:
        return known | {LEASE_NAME: opened.name, LEASE_ID: lease.lock_id, LEASE_TOKEN: str(lease.token)}
    for name in (LOCK_ID, TOKEN):
        known.pop(name, None)  # of another lease
    if lease is not None:
        known |= {LOCK_ID: lease.lock_id, TOKEN: str(lease.token)}
    return known | opened.repository.variables(opened.worktree) | {WORKTREE: opened.worktree}


def _save(repository: Repository, worktree: str, lease: HeldLease | None, options: RunOptions, output: Output) -> str:
    try:
        with _capturing(repository, worktree) as progress:
            made = repository.snapshot(
                worktree,
                lease,
                note=options.note,
                consistency=options.consistency,
                progress=progress,
                warn=output.warning,
            )
        return made.snapshot_id
    except Failure as failure:
        raise CommandFailed(failure, advice=f"{NOT_SAVED}\n{printable(failure.hint)}") from failure


def _capturing(repository: Repository, worktree: str) -> AbstractContextManager[Progress | None]:
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from holdfast.cli.progress import showing

    return showing("Capturing", total=repository.snapshots.files_of_head(worktree))
