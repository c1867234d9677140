"""`holdfast issue work`: run a command while holding a claim that keeps itself alive."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from holdfast.cli.issue_claim import assignee_option, purpose_option, ttl_option
from holdfast.cli.output import Output
from holdfast.cli.running import RunCommand
from holdfast.cli.tracking import CLAIM_VARIABLE, tracking, writing_options

if TYPE_CHECKING:
    from holdfast.issues.claims import Claimed
    from holdfast.issues.model import ClaimId, Issue
    from holdfast.issues.rules import IssueClaimRequest
    from holdfast.issues.tracker import Tracker


@click.command(cls=RunCommand)
@click.argument("issue_id", metavar="[ID]", required=False)
@click.option("--next", "take_next", is_flag=True, help="Take the most urgent issue that is ready.")
@click.option(
    "--then",
    metavar="WHAT",
    type=click.Choice(["done", "release", "keep"]),
    default="done",
    show_default=True,
    help="What becomes of the issue if the command succeeds: done, release, or keep the claim.",
)
@ttl_option
@assignee_option
@purpose_option
@writing_options
@click.pass_obj
def work(
    output: Output,
    *,
    issue_id: str | None,
    take_next: bool,
    then: str,
    ttl: float,
    assignee: str | None,
    purpose: str,
    repo: str | None,
    actor: str | None,
    command: tuple[str, ...],
) -> int:
    """Claim the issue ID, run COMMAND while the claim is kept alive, and finish or release the issue.

    The command finds HOLDFAST_ISSUE_ID and HOLDFAST_CLAIM_ID in its environment. If it fails, the issue
    is released. If the claim is lost meanwhile, the command is ended. Ends as the command ends.

    \b
    Example:
      holdfast issue work --next --ttl 5m -- ./agent
    """
    from holdfast.cli import child
    from holdfast.cli.issue_view import warn_of_broken
    from holdfast.cli.signals import Duty, kept_back
    from holdfast.issues.claims import HeldIssueClaim
    from holdfast.issues.model import ClaimId
    from holdfast.issues.reading import unreadable_issues_to_json
    from holdfast.leases.heartbeat import BEATS
    from holdfast.locks.identity import calling_agent

    if take_next is (issue_id is not None):
        raise click.UsageError("Give an ID, or --next.", click.get_current_context())
    with tracking(repo, actor) as tracker:
        request = tracker.claims.request(
            assignee,
            ttl=ttl,
            purpose=purpose or " ".join(command)[:200],
            behalf_of=calling_agent() if then == "keep" else None,  # it outlives this process
        )
        claimed = _claimed(tracker, issue_id, request)
        warn_of_broken(output, claimed.broken)
        shown = ClaimId.parse(claimed.claim.claim_id)
        os.environ[CLAIM_VARIABLE] = shown.text
        os.environ["HOLDFAST_ISSUE_ID"] = shown.issue_id
        with ExitStack() as stack:
            with kept_back():  # the thread that renews inherits it: no signal is to reach that one
                held = stack.enter_context(HeldIssueClaim(tracker.claims, claimed.claim))
            duty = Duty(min(1.0, ttl / BEATS), held.check)
            ended = child.run(command, duty=duty)
        issue = _concluded(tracker, shown, then, succeeded=ended.exit_status == 0)
        record = {"id": issue.id, "state": tracker.state(issue).value, **ended.as_record()}
        output.result({**record, "broken": unreadable_issues_to_json(claimed.broken)})
    return child.end_like(ended)


def _claimed(tracker: Tracker, issue_id: str | None, request: IssueClaimRequest) -> Claimed:
    """The issue that was named, or the next one."""
    if issue_id is not None:
        return tracker.claims.claim(tracker.find_id(issue_id), request)
    return tracker.claims.take_next(request)


def _concluded(tracker: Tracker, shown: ClaimId, then: str, *, succeeded: bool) -> Issue:
    """What becomes of the issue: as was asked for if the command succeeded, else back to the queue."""
    from holdfast.issues.model import State
    from holdfast.issues.tracker import Update

    if succeeded and then == "done":
        return tracker.update(shown.issue_id, Update(state=State.DONE), claim=shown)
    if succeeded and then == "keep":
        return tracker.issue(shown.issue_id)
    reason = "" if succeeded else "the command failed"
    return tracker.claims.release(shown.issue_id, shown, reason=reason)
