"""`holdfast agent run`: an agent's command on a piece of work, from claiming it to recording the outcome."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from holdfast.cli.child import RunCommand
from holdfast.cli.entry import Group
from holdfast.cli.issue_view import CLAIM_VARIABLE, tracking, writing_options
from holdfast.cli.options import UNLIMITED, duration, duration_or_none, store_address
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import ACTOR, LOCK_ID, REPO, TOKEN, WORKTREE, open_repository
from holdfast.errors import Failure, FencingMismatch, LockExpired, LockNotHeld, NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.cli.child import CommandExit
    from holdfast.issues.model import Issue
    from holdfast.issues.tracker import Tracker
    from holdfast.ledger.log import Ledger
    from holdfast.repository.agent import Assignment, AssignmentOptions, Outcome
    from holdfast.repository.repository import Repository

LOST = """\
The command was ended: the claim or the lease was lost, so somebody else may have been given this work.
Nothing of it was published. What it wrote is still in the worktree."""

group = Group("agent", help="Let agents work through the queue, one piece of work at a time.")


@group.command(cls=RunCommand, short_help="Take work, run an agent on it, keep and record what it did.")
@click.option("--issue", "issue_id", metavar="ID", help="Take this issue.")
@click.option("--next", "take_next", is_flag=True, help="Take the most urgent issue that is ready.")
@click.option(
    "--worktree", metavar="NAME", help="Work in this one.  [default: one of the issue's own, made from main]"
)
@click.option("--gate", metavar="KEY", help="The gate that this decides: passed or failed with the command.")
@click.option(
    "--ttl",
    metavar="DURATION",
    default="1m",
    show_default=True,
    callback=duration,
    help="How long the work stays taken if this process is killed; it is renewed as long as it lives.",
)
@click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait for the worktree, such as 5m; 'none': without limit.  [default: not at all]",
)
@click.option(
    "--patience",
    metavar="DURATION",
    callback=duration_or_none,
    help="With --next: how long to wait until an issue is ready, while others work on what must come first; "
    "'none': without limit. It ends at once when every issue is finished.  [default: not at all]",
)
@click.option(
    "--remove-worktree",
    is_flag=True,
    help="Remove the issue's own worktree once the issue is done; what was written stays as a snapshot, "
    "which a pin keeps.  [default: it stays, to be looked at]",
)
@writing_options
@click.pass_obj
def run(
    output: Output,
    *,
    issue_id: str | None,
    take_next: bool,
    worktree: str | None,
    gate: str | None,
    ttl: float,
    wait: float | None,
    patience: float | None,
    remove_worktree: bool,
    repo: str | None,
    actor: str | None,
    command: tuple[str, ...],
) -> int:
    """Claim an issue, make or reuse a worktree for it, lease that, and run COMMAND in it.

    If COMMAND succeeds, what it wrote becomes a snapshot, the ledger (if there is one) gets a record, and
    the issue is done; if it fails, all the same, but the issue goes back to the queue. If COMMAND or this
    program is killed, the work goes back to the queue by itself, and nothing that was written is lost.

    The command finds HOLDFAST_ISSUE_ID, HOLDFAST_CLAIM_ID, HOLDFAST_WORKTREE, HOLDFAST_LOCK_ID and
    HOLDFAST_TOKEN in its environment. If the claim or the lease is lost it is ended (SIGTERM, then SIGKILL),
    and nothing of it is published. If it says itself that the issue is done ('holdfast issue finish'), or
    gives it back, that counts. Ends as the command ends; 3 if there is nothing to do.

    The worktree stays when the work is done, so that somebody can look at it and bring it into main; remove
    it then ('holdfast worktree remove'). With --remove-worktree it is removed at once, if the issue is done
    (not while it waits for gates) and no process works in it; 'holdfast pin list' shows what is kept of it.

    \b
    Examples:
      holdfast agent run --next -- ./my-agent
      holdfast agent run --issue 4f1c --gate tests -- make check
      while holdfast agent run --next --patience none -- ./my-agent; do :; done
    """
    from holdfast.cli import child
    from holdfast.repository.agent import AssignmentOptions

    if patience is not None and not take_next:
        raise click.UsageError("--patience is for --next.", click.get_current_context())
    if take_next is (issue_id is not None):
        raise click.UsageError("Give --issue ID, or --next.", click.get_current_context())
    if remove_worktree and worktree is not None:
        raise click.UsageError("--remove-worktree is for worktrees of an issue's own.")
    wish = AssignmentOptions(
        issue_id=issue_id,
        worktree=worktree,
        assignee=actor,
        gate=gate,
        ttl=ttl,
        wait=None if wait == UNLIMITED else wait or 0.0,
        patience=None if patience == UNLIMITED else patience or 0.0,
    )
    environment = {**os.environ, ACTOR: actor} if actor else dict(os.environ)
    repository = open_repository(repo, environment)
    with tracking(repo or str(repository.root), actor) as tracker:
        ended = _work(
            repository, tracker, wish, command, environment, output, remove_worktree=remove_worktree
        )
    return child.end_like(ended)


def _work(
    repository: Repository,
    tracker: Tracker,
    wish: AssignmentOptions,
    command: tuple[str, ...],
    environment: dict[str, str],
    output: Output,
    *,
    remove_worktree: bool,
) -> CommandExit:
    from holdfast.cli import child
    from holdfast.cli.issue_view import warn_of_broken
    from holdfast.issues.reading import unreadable_issues_to_json
    from holdfast.repository.agent import outcome_to_json, take_work

    ledger = _ledger(repository.root)
    with take_work(repository, tracker, wish, ledger=ledger, quietly=child.kept_back) as assignment:
        _tell(output, f"{_name(assignment.issue)} in {assignment.path}")
        warn_of_broken(output, assignment.broken)
        try:
            ended = child.run(
                command,
                duty=child.SignalForwarding(min(1.0, wish.ttl / 10), assignment.check),
                environment=environment | _named(assignment, repository.root),
                directory=assignment.path,
                mark=child.Mark(LOCK_ID, assignment.lease.lock_id, assignment.path),
            )
            outcome = _concluded(assignment, ended)
            kept = (
                _remove_worktree(assignment, outcome, output) if remove_worktree else "it was not asked for"
            )
        except (LockNotHeld, LockExpired, FencingMismatch) as failure:
            raise CommandFailed(failure, advice=LOST) from failure
    record = {**ended.as_record(), **outcome_to_json(outcome, assignment)}
    broken = unreadable_issues_to_json(assignment.broken)
    output.result({**record, "worktree_removed": kept is None, "worktree_kept": kept, "broken": broken})
    _tell(output, _conclusion(outcome))
    return ended


def _remove_worktree(assignment: Assignment, outcome: Outcome, output: Output) -> str | None:
    """Remove the worktree if the work is done; else why it stays. Either way the work is done, or is not."""
    state = outcome.issue.state.value
    why = None if state == "done" else f"the issue is {state}"
    if why is None:
        try:
            assignment.remove_worktree()
        except Failure as failure:
            why = failure.message
    if why is not None:
        _tell(output, f"the worktree stays: {why}")
    return why


def _tell(output: Output, text: str) -> None:
    """Say it to the person who looks; standard output belongs to the command."""
    if not output.as_json:
        output.diagnostic(f"holdfast: {printable(text)}")


def _name(issue: Issue) -> str:
    return f"{issue.id[:8]} ({issue.title})"


def _conclusion(outcome: Outcome) -> str:
    state = outcome.issue.state.value
    became = f"is {state}" if outcome.succeeded or state != "ready" else "is back in the queue"
    kept = f"; what was written is the snapshot {outcome.snapshot_id}" if outcome.snapshot_id else ""
    return f"{_name(outcome.issue)} {became}{kept}"


def _concluded(assignment: Assignment, ended: CommandExit) -> Outcome:
    assignment.lease.check()  # it may have been lost at the very end
    if ended.exit_status == 0:
        return assignment.succeed()
    how = ended.signal_name or f"exit status {ended.exit_status}"
    return assignment.fail(f"the command ended with {how}", **ended.as_record())


def _named(assignment: Assignment, root: Path) -> dict[str, str]:
    """What the command finds in its environment."""
    return {
        REPO: str(root),
        WORKTREE: assignment.lease.worktree,
        LOCK_ID: assignment.lease.lock_id,
        TOKEN: str(assignment.lease.token),
        CLAIM_VARIABLE: assignment.claim.id.text,
        "HOLDFAST_ISSUE_ID": assignment.issue.id,
    }


def _ledger(root: Path) -> Ledger | None:
    from holdfast.repository.opening import open_ledger

    try:
        return open_ledger(root, address=store_address(os.environ)).ledger
    except NotFound:
        return None
