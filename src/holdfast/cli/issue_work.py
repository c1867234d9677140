"""`holdfast issue work`: run a command under a claim."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import child
from holdfast.cli import issue_view as view
from holdfast.cli.issue_claims import request_options
from holdfast.cli.options import ignore_touches_option
from holdfast.cli.output import Output
from holdfast.issues.model import ClaimId, State

if TYPE_CHECKING:
    from holdfast.issues.model import Issue
    from holdfast.issues.tracker import Tracker


@click.command(cls=child.RunCommand)
@click.argument("issue_id", metavar="[ID]", required=False)
@click.option("--next", "take_next", is_flag=True, help="Claim the most urgent issue that is ready.")
@ignore_touches_option
@click.option(
    "--then",
    metavar="ACTION",
    type=click.Choice(["done", "release", "keep"]),
    default="done",
    show_default=True,
    help="If the command succeeds: mark the issue as done, release it, or keep the claim.",
)
@request_options
@view.writing_options
@click.pass_obj
def work(
    output: Output,
    /,
    *,
    issue_id: str | None,
    take_next: bool,
    ignore_touches: bool,
    then: str,
    command: tuple[str, ...],
    **request: Any,
) -> int:
    """Claim the issue ID, run COMMAND under the claim, then finish or release the issue.

    The claim is renewed while the command runs; HOLDFAST_ISSUE_ID and HOLDFAST_CLAIM_ID are in its environment. If it
    fails, the issue is released. If the claim is lost, the command is stopped. The exit status is that of the command.

    \b
    Example:
      holdfast issue work --next --ttl 5m -- ./agent
    """
    from holdfast.issues.held_claim import HeldIssueClaim
    from holdfast.leases.heartbeat import BEATS
    from holdfast.locks.identity import calling_agent

    if take_next is (issue_id is not None):
        raise click.UsageError("Give an ID, or --next.", click.get_current_context())
    request["purpose"] = request["purpose"] or " ".join(command)[:200]
    if then == "keep":
        request["behalf_of"] = calling_agent()  # the claim outlives this process
    with view.tracking(request.pop("repo"), request.pop("actor")) as tracker:
        requested, claims = tracker.claims.request(**request), tracker.claims
        if issue_id:
            claimed = claims.claim(tracker.find_id(issue_id), requested)
        else:
            claimed = claims.take_next(requested, ignore_touches=ignore_touches)
        view.warn_of_broken(output, claimed.broken)
        held_claim = ClaimId.parse(claimed.claim.claim_id)
        os.environ.update({view.CLAIM_VARIABLE: held_claim.text, "HOLDFAST_ISSUE_ID": held_claim.issue_id})
        with ExitStack() as stack:
            with child.block_signals():  # the heartbeat thread inherits the mask, so no signal goes to it
                held = stack.enter_context(HeldIssueClaim(tracker.claims, claimed.claim))
            ended = child.run(command, check=child.Periodic(min(1.0, request["ttl"] / BEATS), held.check))
        issue = _conclude(tracker, held_claim, then, succeeded=ended.exit_status == 0)
        record = {"id": issue.id, "state": tracker.state(issue).value, **ended.as_record()}
        output.result({**record, "broken": [each.as_record() for each in claimed.broken]})
    return child.end_like(ended)


def _conclude(tracker: Tracker, claim: ClaimId, then: str, *, succeeded: bool) -> Issue:
    from holdfast.issues.tracker import Update

    if succeeded and then == "done":
        return tracker.update(claim.issue_id, Update(state=State.DONE), claim=claim)
    if succeeded and then == "keep":
        return tracker.issue(claim.issue_id)
    return tracker.claims.release(claim.issue_id, claim, reason="" if succeeded else "the command failed")
