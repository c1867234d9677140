"""`holdfast issue claim`, `claim-next`, `heartbeat`, `release`: who works on what."""

from __future__ import annotations

import click

from holdfast.cli.fields import ISSUE, field_of, tell
from holdfast.cli.options import UNLIMITED, duration, duration_or_none
from holdfast.cli.output import Output
from holdfast.cli.tracking import claim_for, claim_option, tracking, writing_options
from holdfast.errors import UsageFailure

ttl_option = click.option(
    "--ttl",
    metavar="DURATION",
    callback=duration,
    default="1h",
    show_default=True,
    help="How long it is yours without a sign of life; every write under the claim is one.",
)
assignee_option = click.option(
    "--assignee", metavar="KIND:NAME", help="Who works on it.  [default: the actor]"
)
_FIELDS = ("claim_id", *ISSUE, "token", "ttl", "expires_at", "taken_over_from")
purpose_option = click.option("--purpose", metavar="TEXT", default="", help="What for, for others to see.")


@click.command()
@click.argument("issue_id", metavar="ID")
@ttl_option
@assignee_option
@purpose_option
@field_of(*_FIELDS)
@writing_options
@click.pass_obj
def claim(
    output: Output,
    *,
    issue_id: str,
    ttl: float,
    assignee: str | None,
    purpose: str,
    field: str | None,
    repo: str | None,
    actor: str | None,
) -> None:
    """Take the issue ID to work on it. Of all who try, one gets it; the others are told who.

    It is yours until you finish or release it, or until the claim runs out. Then others may take it, and
    what you write with the old claim is refused.

    \b
    Example:
      holdfast issue claim 4f1c --ttl 30m
    """
    from holdfast.cli.issue_view import claimed_issue_to_json, claimed_lines
    from holdfast.locks.identity import calling_agent

    with tracking(repo, actor) as tracker:
        request = tracker.claims.request(assignee, ttl=ttl, purpose=purpose, behalf_of=calling_agent())
        claimed = tracker.claims.claim(tracker.find_id(issue_id), request)
        tell(output, field, claimed_issue_to_json(claimed), list(claimed_lines(claimed)))


@click.command()
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="Only issues with this label.")
@click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait until one is ready, such as 5m; 'none': without limit. It ends at once when "
    "every issue is finished.  [default: not at all]",
)
@ttl_option
@assignee_option
@purpose_option
@field_of(*_FIELDS, "broken")
@writing_options
@click.pass_obj
def claim_next(
    output: Output,
    *,
    labels: tuple[str, ...],
    wait: float | None,
    ttl: float,
    assignee: str | None,
    purpose: str,
    field: str | None,
    repo: str | None,
    actor: str | None,
) -> None:
    """Take the most urgent issue that is ready, of those what was left alone longest. Status 3 if none is.

    Issues whose claim has run out count as ready. If somebody else is faster, the next one is taken. An
    issue that cannot be read is named and left out; so is one that waits for it.

    \b
    Example:
      holdfast issue claim-next --label area:parser
    """
    from holdfast.cli.issue_view import (
        claimed_issue_to_json,
        claimed_lines,
        unreadable_issues_to_json,
        warn_of_broken,
    )
    from holdfast.issues.tracker import Query
    from holdfast.locks.identity import calling_agent

    query = Query(labels=labels)
    with tracking(repo, actor) as tracker:
        request = tracker.claims.request(assignee, ttl=ttl, purpose=purpose, behalf_of=calling_agent())
        claimed = tracker.claims.take_next(
            request,
            wanted=lambda issue: query.fits(issue, issue.state),
            wait=None if wait == UNLIMITED else wait or 0.0,
        )
        record = {**claimed_issue_to_json(claimed), "broken": unreadable_issues_to_json(claimed.broken)}
        tell(output, field, record, list(claimed_lines(claimed)))
        warn_of_broken(output, claimed.broken)


@click.command()
@click.argument("issue_id", metavar="ID")
@click.option("--ttl", metavar="DURATION", callback=duration, help="Another ttl.  [default: as before]")
@claim_option
@writing_options
@click.pass_obj
def heartbeat(
    output: Output,
    *,
    issue_id: str,
    ttl: float | None,
    claim_text: str | None,
    repo: str | None,
    actor: str | None,
) -> None:
    """Say that you still work on the issue ID: your claim runs on from now.

    Status 5 if the claim is not in force any more: then stop, somebody else may be at it.

    \b
    Example:
      holdfast issue heartbeat 4f1c
    """
    from holdfast.cli.issue_view import SHORT, issue_claim_to_json

    with tracking(repo, actor) as tracker:
        found = tracker.find_id(issue_id)
        shown = claim_for(found, claim_text)
        if shown is None:
            raise UsageFailure("no claim was shown", hint="Show it: --claim, or HOLDFAST_CLAIM_ID.")
        renewed = tracker.claims.renew(shown, ttl)
        record = {"id": found, **issue_claim_to_json(renewed, tracker.transactions.moment())}
        output.result(record, [f"{found[:SHORT]} is yours until {renewed.expires_at}"])


@click.command()
@click.argument("issue_id", metavar="ID")
@click.option("--reason", metavar="TEXT", default="", help="Why, for the record.")
@claim_option
@writing_options
@click.pass_obj
def release(
    output: Output, *, issue_id: str, reason: str, claim_text: str | None, repo: str | None, actor: str | None
) -> None:
    """Put the issue ID back, so that others can take it.

    It takes the claim, unless that has run out. 'holdfast issue show' has the exact id of a claim, for
    those who must take an issue away from somebody.

    \b
    Example:
      holdfast issue release 4f1c --reason "needs a decision first"
    """
    from holdfast.cli.issue_view import changed

    with tracking(repo, actor) as tracker:
        found = tracker.find_id(issue_id)
        issue = tracker.claims.release(found, claim_for(found, claim_text), reason=reason)
        changed(output, "released", issue, tracker.state(issue))
