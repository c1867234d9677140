"""`holdfast issue claim`, `claim-next`, `heartbeat`, `release`: who works on what."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.child import RunCommand
from holdfast.cli.issue_view import (
    CLAIM_VARIABLE,
    claim_for,
    claim_option,
    reading_options,
    tracking,
    writing_options,
)
from holdfast.cli.options import ISSUE_FIELDS, UNLIMITED, duration, duration_or_none, field_of, tell
from holdfast.cli.output import Output
from holdfast.errors import UsageFailure

if TYPE_CHECKING:
    from holdfast.issues.claims import Claimed
    from holdfast.issues.model import ClaimId, Issue
    from holdfast.issues.rules import IssueClaimRequest
    from holdfast.issues.tracker import Tracker


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
_FIELDS = ("claim_id", *ISSUE_FIELDS, "token", "ttl", "expires_at", "taken_over_from")
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
    from holdfast.cli.child import Periodic, block_signals
    from holdfast.cli.issue_view import warn_of_broken
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
            with block_signals():  # the thread that renews inherits it: no signal is to reach that one
                held = stack.enter_context(HeldIssueClaim(tracker.claims, claimed.claim))
            check = Periodic(min(1.0, ttl / BEATS), held.check)
            ended = child.run(command, check=check)
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
        found = tracker.find_id(issue_id) if issue_id else _issue_finish_claimed(claim_text)
        issue = tracker.update(found, Update(state=State.DONE), claim=claim_for(found, claim_text))
        gates = issue.open_gates()
        changed(output, "finished", issue, tracker.state(issue), {"open_gates": gates})
        if gates and not output.as_json:
            output.line(f"  done when these are passed: {', '.join(gates)}")


def _issue_finish_claimed(claim_text: str | None) -> str:
    from holdfast.issues.model import ClaimId

    text = claim_text or os.environ.get(CLAIM_VARIABLE)
    if not text:
        raise UsageFailure(
            "no issue was named",
            hint=f"Name it: 'holdfast issue finish ID'. Or name your claim: --claim, or {CLAIM_VARIABLE}.",
        )
    return ClaimId.parse(text).issue_id


@click.command()
@reading_options
@click.pass_obj
def locks(output: Output, *, repo: str | None) -> None:
    """Show which locks of the tracker are held now, by whom, and who waits for them.

    Processes of every program are shown that use these lock files; only Linux tells who they are.

    \b
    Example:
      holdfast issue locks
    """
    from holdfast.cli.lock import file_lock_state
    from holdfast.store.files import FileStore

    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        found: list[dict[str, Any]] = []
        lines: list[str] = []
        if isinstance(tracker.store, FileStore):
            for path in tracker.store.guard_files(".jit"):
                state = file_lock_state(path)
                if state.holders or state.waiting or state.state != "free":
                    found.append(state.as_record())
                    lines += state.lines()
    output.result({"locks": found}, lines or ["no lock is held"])
