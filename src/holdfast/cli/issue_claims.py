"""`holdfast issue claim`, `claim-next`, `heartbeat`, `finish`, `release`, `locks`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import issue_view as view
from holdfast.cli.options import (
    ISSUE_FIELDS,
    Command,
    field_option,
    given_back,
    ignore_touches_option,
    print_record,
    purpose_option,
    ttl_option,
    wait_option,
)
from holdfast.cli.output import Output
from holdfast.clock import format_duration
from holdfast.errors import UsageFailure
from holdfast.issues.claims import claimed_issue_to_json
from holdfast.issues.model import SHORT, ClaimId, State
from holdfast.issues.reading import issue_claim_to_json

if TYPE_CHECKING:
    from holdfast.issues.claims import Claimed
    from holdfast.issues.tracker import Tracker


_FIELDS = ("claim_id", *ISSUE_FIELDS, "token", "ttl", "expires_at", "taken_over_from")


def request_options(command: Command) -> Command:
    """`--ttl`, `--assignee` and `--purpose`: arguments of `tracker.claims.request`."""
    assignee = click.option("--assignee", metavar="KIND:NAME", help="Claim it for this assignee.  [default: the actor]")
    ttl = ttl_option("How long the claim lasts, from 100ms to 30d; every write under it renews it.", default="1h")
    return ttl(assignee(purpose_option(command)))


@click.command()
@click.argument("issue_id", metavar="ID")
@request_options
@field_option(*_FIELDS)
@view.writing_options
@click.pass_obj
def claim(
    output: Output, /, *, issue_id: str, field: str | None, repo: str | None, actor: str | None, **request: Any
) -> None:
    """Claim the issue ID. Only one claim succeeds; the others fail and name its holder.

    The issue is yours until you finish or release it, or until the claim expires. Then others may claim it, and writes
    under the old claim are refused.

    \b
    Example:
      holdfast issue claim 4f1c --ttl 30m
    """
    from holdfast.locks.identity import calling_agent

    with view.tracking(repo, actor) as tracker:
        requested = tracker.claims.request(behalf_of=calling_agent(), **request)
        claimed = tracker.claims.claim(tracker.find_id(issue_id), requested)
        _print_claimed(output, tracker, claimed, field, claimed_issue_to_json(claimed))


@click.command()
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="Only issues with this label.")
@ignore_touches_option
@wait_option(
    "While any issue is unfinished, how long to wait for a ready one",
    default_text="do not wait; fail with status 3",
)
@request_options
@field_option(*_FIELDS, "broken")
@view.writing_options
@click.pass_obj
def claim_next(
    output: Output,
    /,
    *,
    labels: tuple[str, ...],
    ignore_touches: bool,
    wait: float | None,
    field: str | None,
    **request: Any,
) -> None:
    """Claim the most urgent ready issue; among equals, the one unchanged for longest.

    An issue whose claim has expired counts as ready. If another agent claims an issue first, or another program keeps
    it locked, the next one is claimed. Broken issues are named and skipped. Issues that wait for them are skipped too,
    and so is an issue that touches the same paths as one in progress ('issue create --touches'). Status 3 if no issue
    is ready.

    \b
    Example:
      holdfast issue claim-next --label area:parser
    """
    from holdfast.issues.tracker import Query
    from holdfast.locks.identity import calling_agent

    query = Query(labels=labels)
    with view.tracking(request.pop("repo"), request.pop("actor")) as tracker:
        requested = tracker.claims.request(behalf_of=calling_agent(), **request)
        with view.waiting_for_issue(wait, tracker):
            claimed = tracker.claims.take_next(
                requested,
                wanted=(lambda issue: query.fits(issue, issue.state)) if labels else None,
                wait=wait,
                ignore_touches=ignore_touches,
            )
        record = {**claimed_issue_to_json(claimed), "broken": [each.as_record() for each in claimed.broken]}
        _print_claimed(output, tracker, claimed, field, record)
        view.warn_of_broken(output, claimed.broken)


def _print_claimed(
    output: Output, tracker: Tracker, claimed: Claimed, field: str | None, record: Mapping[str, Any]
) -> None:
    """Print a new claim; if that fails, release it."""
    held = ClaimId.parse(claimed.claim.claim_id)
    with given_back(lambda: tracker.claims.release(held.issue_id, held, reason="its id could not be printed")):
        print_record(output, field, record, list(view.claimed_lines(claimed)))


@click.command()
@click.argument("issue_id", metavar="ID")
@ttl_option("The new ttl, from now: from 100ms to 30d.  [default: unchanged]")
@view.claim_option
@view.writing_options
@click.pass_obj
def heartbeat(output: Output, /, *, issue_id: str, ttl: float | None, claim_text: str | None, **where: Any) -> None:
    """Renew your claim on the issue ID for its full ttl.

    Status 5 if the claim has expired or been taken over: stop, because another agent may work on the issue.

    \b
    Example:
      holdfast issue heartbeat 4f1c
    """
    with view.tracking(**where) as tracker:
        found = tracker.find_id(issue_id)
        named = view.claim_for(found, claim_text)
        if named is None:
            raise UsageFailure("no claim was named", hint=f"Name it: --claim, or {view.CLAIM_VARIABLE}.")
        renewed = tracker.claims.renew(named, ttl)
        record = {"id": found, **issue_claim_to_json(renewed, tracker.transactions.moment())}
        output.result(record, [f"renewed {found[:SHORT]}: it is yours for another {format_duration(renewed.ttl)}"])


@click.command()
@click.argument("issue_id", metavar="ID")
@click.option("--reason", metavar="TEXT", default="", help="The reason. Recorded.")
@view.claim_option
@view.writing_options
@click.pass_obj
def release(output: Output, /, *, issue_id: str, reason: str, claim_text: str | None, **where: Any) -> None:
    """Release your claim, so that others can claim the issue ID.

    It needs the claim's id, unless the claim has expired. To take an issue away from its holder, name the claim that
    'holdfast issue show' prints.

    \b
    Example:
      holdfast issue release 4f1c --reason "needs a decision first"
    """
    with view.tracking(**where) as tracker:
        found = tracker.find_id(issue_id)
        issue = tracker.claims.release(found, view.claim_for(found, claim_text), reason=reason)
        view.show_changed(output, "released", issue, tracker.state(issue))


@click.command()
@click.argument("issue_id", metavar="[ID]", required=False)
@view.claim_option
@view.writing_options
@click.pass_obj
def finish(output: Output, /, *, issue_id: str | None, claim_text: str | None, **where: Any) -> None:
    """Mark the issue ID as done; without ID, the issue that your claim is for.

    It is 'gated' until all its gates pass. This is the same as 'holdfast issue update ID --state done'. To give up
    instead, use 'holdfast issue release'.

    \b
    Examples:
      holdfast issue finish
      holdfast issue finish 4f1c
    """
    from holdfast.issues.tracker import Update

    with view.tracking(**where) as tracker:
        if issue_id:
            found = tracker.find_id(issue_id)
        elif text := claim_text or os.environ.get(view.CLAIM_VARIABLE):
            found = ClaimId.parse(text).issue_id
        else:
            hint = f"Name it: 'holdfast issue finish ID'. Or name your claim: --claim, or {view.CLAIM_VARIABLE}."
            raise UsageFailure("no issue was named", hint=hint)
        issue = tracker.update(found, Update(state=State.DONE), claim=view.claim_for(found, claim_text))
        gates = issue.open_gates()
        view.show_changed(output, "finished", issue, tracker.state(issue), open_gates=gates)
        if gates and not output.as_json:
            output.line(f"  done when these gates pass: {', '.join(gates)}")


@click.command()
@view.reading_options
@click.pass_obj
def locks(output: Output, *, repo: str | None) -> None:
    """Show which locks of the tracker are held, with their holders and waiters.

    It shows holders in any program that uses these lock files. Their processes are named only on Linux.

    \b
    Example:
      holdfast issue locks
    """
    from holdfast.cli.lock import file_lock_state

    with view.tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        paths = tracker.store.files.lock_files(".jit") if tracker.store.files is not None else []
        states = [each for each in map(file_lock_state, paths) if each.holders or each.waiting or each.state != "free"]
    lines = [line for state in states for line in state.lines()]
    output.result({"locks": [state.as_record() for state in states]}, lines or ["no lock is held"])
