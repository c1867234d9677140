"""Shared parts of the issue commands: options, the tracker, the claim, output."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import ACTOR, REPO, options
from holdfast.cli.output import CommandFailed, Output, printable, show_table
from holdfast.clock import format_duration
from holdfast.errors import LockTimeout, UsageFailure
from holdfast.issues.model import SHORT, ClaimId, Issue, IssueSummary, State, issue_summary_to_json
from holdfast.issues.reading import issues_to_json
from holdfast.issues.rules import Broken, IssueSet

if TYPE_CHECKING:
    from holdfast.issues.claims import Claimed
    from holdfast.issues.tracker import Tracker


CLAIM_VARIABLE = "HOLDFAST_CLAIM_ID"
COLUMNS = ("ID", "STATE", "PRIORITY", "ASSIGNEE", "TITLE")

_repo_option = options.repo_option_for(
    f"The directory of the tracker.  [default: {REPO}, else the nearest one upwards that has a tracker]"
)
_actor_option = options.actor_option("human:USER")
claim_option = click.option(
    "--claim",
    "claim_text",
    metavar="CLAIM_ID",
    help="The claim that you hold; refused once it has expired or been taken over.  "
    f"[default: {CLAIM_VARIABLE}, if it is for this issue]",
)


def reading_options(command: options.Command) -> options.Command:
    return _repo_option(options.json_option(command))


def writing_options(command: options.Command) -> options.Command:
    return _repo_option(_actor_option(options.json_option(command)))


@contextlib.contextmanager
def tracking(
    repo: str | None, actor: str | None = None, *, place: Callable[[Path], Path] | None = None
) -> Iterator[Tracker]:
    """Yield the tracker that the options and the environment name, or one to create in the directory that `place`
    chooses. If a lock times out, the failure has advice for people."""
    from holdfast.fs.names import checked_actor
    from holdfast.locks.identity import current_holder
    from holdfast.locks.retry import lock_timeout, retry_config
    from holdfast.repository.opening import find_root, open_tracker

    start = Path(os.path.abspath(repo or os.environ.get(REPO) or os.getcwd()))
    timeout, retry = lock_timeout(os.environ), retry_config(os.environ)
    root = (place or find_root)(start)
    if named := actor or os.environ.get(ACTOR):
        named = checked_actor(named, "--actor" if actor else ACTOR)
    else:
        named = f"human:{current_holder().user.replace(' ', '_') or 'unknown'}"
    try:
        address = options.store_address(os.environ)
        yield open_tracker(root, actor=named, address=address, timeout=timeout, retry=retry, start=".")
    except LockTimeout as failure:
        raise CommandFailed(failure, advice=_lock_advice(failure)) from failure


def _lock_advice(failure: LockTimeout) -> str:
    seconds = math.ceil(max(10.0, 2 * failure.timeout))
    return (
        "This usually means another holdfast process is running.\n"
        "Try:\n"
        "  1. Wait a few seconds and retry\n"
        "  2. Check for stuck processes: ps aux | grep holdfast\n"
        f"  3. Increase timeout: JIT_LOCK_TIMEOUT={seconds} holdfast ..."
    )


def claim_for(issue_id: str, flag: str | None) -> ClaimId | None:
    """The claim that the option names; else the claim in the environment, if it is on this issue."""
    text = flag or os.environ.get(CLAIM_VARIABLE)
    claim = ClaimId.parse(text) if text else None
    if claim is None or claim.issue_id == issue_id:
        return claim
    if flag:
        raise UsageFailure(f"the claim {flag} is for {claim.issue_id}, not for {issue_id}")
    return None


def waiting_for_issue(wait: float | None, tracker: Tracker) -> AbstractContextManager[None]:
    """Show that the command waits for an issue, if it does."""
    if wait == 0.0:
        return contextlib.nullcontext()
    from holdfast.cli.progress import waiting

    return waiting(wait, partial(issue_waited_for, tracker))


def issue_waited_for(tracker: Tracker) -> str:
    """The thing that a command waits for while no issue can be claimed, as text for people."""
    from holdfast.cli.progress import waiting_for

    issues = tracker.transactions.summaries(finished=False)
    working = [each for each in issues if issues.state(each) is State.IN_PROGRESS]
    people = {each.assignee for each in working}
    by = f" by {people.pop()}" if len(people) == 1 and None not in people else ""
    return waiting_for(f"an issue that can be claimed ({len(working)} in progress{by})")


def show_issues(
    output: Output, snapshot: IssueSet[IssueSummary], issues: Iterable[IssueSummary], field: str | None
) -> None:
    """Print the issues as a table, as records, or one field of each, and warn of broken issues."""
    if field:
        options.show_field(output, issues_to_json(snapshot, issues)["issues"], field)
    elif output.as_json:
        output.result(issues_to_json(snapshot, issues))
    else:
        show_table(output, COLUMNS, _rows(snapshot, issues))
    warn_of_broken(output, snapshot.broken, reported=output.as_json and not field)


def _rows(snapshot: IssueSet[IssueSummary], issues: Iterable[IssueSummary]) -> list[tuple[str, ...]]:
    return [  # `_value_` is faster than `value`
        (issue.id[:SHORT], state._value_, issue.priority._value_, issue.assignee or "-", issue.title)
        for issue, state in snapshot.with_states(issues)
    ]


def warn_of_broken(output: Output, broken: Sequence[Broken], *, reported: bool | None = None) -> None:
    """Name the broken issues on standard error, unless the JSON output has reported them."""
    if not broken or (output.as_json if reported is None else reported):
        return
    for each in broken:
        output.diagnostic(
            f"Warning: {each.issue_id[:SHORT]} is left out because it cannot be read. "
            f"{printable(each.failure.message)} ({each.failure.code})"
        )
    output.diagnostic("Nothing was changed. 'holdfast issue validate' shows what to repair.")


def show_changed(output: Output, verb: str, issue: Issue, state: State, **more: Any) -> None:
    record = {**issue_summary_to_json(issue, state), **more}
    output.result(record, [f"{verb} {issue.id[:SHORT]} ({state.value}): {issue.title}"])


def claimed_lines(claimed: Claimed) -> Iterator[str]:
    claim = claimed.claim
    yield f"claimed {claimed.issue.id[:SHORT]}: {claimed.issue.title}"
    if claimed.taken_over_from:
        yield f"  taken over from {claimed.taken_over_from}, whose claim expired"
    yield f"  token    {claim.token}"
    yield f"  expires  in {format_duration(claim.ttl)}, unless you renew it ('holdfast issue heartbeat')"
    yield f"  export {CLAIM_VARIABLE}={claim.claim_id}"
    yield "When you are done: 'holdfast issue finish'. To give it back: 'holdfast issue release'."


def issue_lines(record: dict[str, Any]) -> Iterator[str]:
    yield record["title"]
    yield from (f"  {name:12}  {record[name]}" for name in ("id", "state", "priority"))
    yield f"  assignee      {record['assignee'] or '-'}"
    if record["labels"]:
        yield f"  labels        {', '.join(record['labels'])}"
    if record["touches"]:
        yield f"  touches       {', '.join(record['touches'])}"
    titles = {"dependencies": "depends on", "blocked_by": "waits for", "dependents": "needed by"}
    for name, title in titles.items():
        if record[name]:
            yield f"  {title:12}  {', '.join(each[:SHORT] for each in record[name])}"
    for each in record["broken"]:
        yield f"  cannot read   {each['id'][:SHORT]}: {each['message']}"
    for gate in record["gates_required"]:
        known = record["gates_status"].get(gate) or "pending"
        status = known if isinstance(known, dict) else {"status": known}
        by = f" by {status['updated_by']}" if status.get("updated_by") else ""
        yield f"  gate          {gate}: {status.get('status', 'pending')}{by}"
    for name, value in record["context"].items():
        yield f"  context       {name}={value}"
    yield from _superseded_lines(record)
    yield from _claim_lines(record["claim"])
    yield f"  created       {record['created_at']}"
    yield f"  updated       {record['updated_at']}"
    if record["description"]:
        yield ""
        yield from (f"  {line}" for line in record["description"].splitlines())


def _claim_lines(claim: dict[str, Any] | None) -> Iterator[str]:
    if claim is None:
        return
    time = format_duration(abs(claim["time_left"]))
    expiry = f"expires in {time}" if claim["time_left"] > 0 else f"expired {time} ago"
    if claim.get("held_for"):
        expiry = f"held until the landing {claim['held_for']} has an outcome"
    yield f"  claim         {claim['claim_id']}"
    yield f"                by {claim['actor']}, token {claim['token']}, {expiry}"


def _superseded_lines(record: dict[str, Any]) -> Iterator[str]:
    from holdfast.issues.merging import superseded_values

    for each in superseded_values(record):
        yield f"  superseded    {each['field']}: {each['value']} (another branch, {each['updated_at']})"
