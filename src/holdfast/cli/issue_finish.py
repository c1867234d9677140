"""`holdfast issue finish`: the end of the work on an issue."""

from __future__ import annotations

import os

import click

from holdfast.cli.output import Output
from holdfast.cli.tracking import CLAIM_VARIABLE, claim_for, claim_option, tracking, writing_options
from holdfast.errors import UsageFailure


@click.command()
@click.argument("issue_id", metavar="[ID]", required=False)
@claim_option
@writing_options
@click.pass_obj
def finish(
    output: Output,
    *,
    issue_id: str | None,
    claim_text: str | None,
    repo: str | None,
    actor: str | None,
) -> None:
    """Say that the work on the issue ID is done; without ID, on the one that your claim is for.

    If it has gates that are not passed yet, it is 'gated' until they are. The same as 'holdfast issue
    update ID --state done'. To give up instead: 'holdfast issue release'.

    \b
    Examples:
      holdfast issue finish
      holdfast issue finish 4f1c
    """
    from holdfast.cli.issue_view import changed
    from holdfast.issues.model import State
    from holdfast.issues.tracker import Update

    with tracking(repo, actor) as tracker:
        found = tracker.find_id(issue_id) if issue_id else _claimed(claim_text)
        issue = tracker.update(found, Update(state=State.DONE), claim=claim_for(found, claim_text))
        gates = issue.open_gates()
        changed(output, "finished", issue, tracker.state(issue), {"open_gates": gates})
        if gates and not output.as_json:
            output.line(f"  done when these are passed: {', '.join(gates)}")


def _claimed(claim_text: str | None) -> str:
    from holdfast.issues.model import ClaimId

    text = claim_text or os.environ.get(CLAIM_VARIABLE)
    if not text:
        raise UsageFailure(
            "no issue was named",
            hint=f"Name it: 'holdfast issue finish ID'. Or name your claim: --claim, or {CLAIM_VARIABLE}.",
        )
    return ClaimId.parse(text).issue_id
