"""What the commands about issues share: which tracker, in whose name, under which claim."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import ACTOR
from holdfast.cli.options import Command, field_of, json_option, store_address
from holdfast.cli.options import show_field as show_field
from holdfast.cli.output import CommandFailed, Output, printable, show_table
from holdfast.clock import format_duration
from holdfast.errors import LockTimeout, UsageFailure
from holdfast.issues.claims import Claimed
from holdfast.issues.model import Issue, State
from holdfast.issues.reading import SHORT as SHORT
from holdfast.issues.reading import Broken, IssueSet, issues_to_json
from holdfast.issues.reading import claimed_issue_to_json as claimed_issue_to_json
from holdfast.issues.reading import issue_claim_to_json as issue_claim_to_json
from holdfast.issues.reading import issue_summary_to_json as issue_summary_to_json
from holdfast.issues.reading import issue_to_json as issue_to_json
from holdfast.issues.reading import unreadable_issues_to_json as unreadable_issues_to_json

if TYPE_CHECKING:
    from holdfast.issues.model import ClaimId
    from holdfast.issues.tracker import Tracker


REPO_VARIABLE = "HOLDFAST_REPO"
ACTOR_VARIABLE = ACTOR
CLAIM_VARIABLE = "HOLDFAST_CLAIM_ID"

_repo = click.option(
    "--repo",
    metavar="DIRECTORY",
    type=click.Path(),
    help="Where the tracker is.  [default: HOLDFAST_REPO from the environment, else this directory "
    "or the nearest above it that has a tracker]",
)
_actor = click.option(
    "--actor",
    metavar="KIND:NAME",
    help="Who is doing this.  [default: HOLDFAST_ACTOR from the environment, else human:USER]",
)
claim_option = click.option(
    "--claim",
    "claim_text",
    metavar="CLAIM_ID",
    help="The claim under which you write; refused if it is not in force any more.  "
    "[default: HOLDFAST_CLAIM_ID from the environment, if it is for this issue]",
)
field_option = field_of()


def reading_options(command: Command) -> Command:
    """The options of a command that only looks."""
    return _repo(json_option(command))


def writing_options(command: Command) -> Command:
    """The options of a command that changes something."""
    return _repo(_actor(json_option(command)))


@contextlib.contextmanager
def tracking(repo: str | None, actor: str | None = None, *, init: bool = False) -> Iterator[Tracker]:
    """The tracker, opened as the options and the environment say; with advice if a lock cannot be had."""
    from holdfast.fs.names import checked_actor
    from holdfast.locks.retry import lock_timeout, retry_config
    from holdfast.repository.opening import find_root, open_tracker

    named = repo or os.environ.get(REPO_VARIABLE)
    start = Path(os.path.abspath(named or os.getcwd()))
    timeout, retry = lock_timeout(os.environ), retry_config(os.environ)
    root = start if init else find_root(start)
    who = actor or os.environ.get(ACTOR_VARIABLE)
    who = checked_actor(who, "--actor" if actor else ACTOR_VARIABLE) if who else _person()
    try:
        address = store_address(os.environ)
        yield open_tracker(root, actor=who, address=address, timeout=timeout, retry=retry)
    except LockTimeout as failure:
        raise CommandFailed(failure, advice=lock_advice(failure)) from failure


def lock_advice(failure: LockTimeout) -> str:
    """What to do about a lock that was not to be had in time."""
    seconds = math.ceil(max(10.0, 2 * failure.timeout))
    return (
        "This usually means another holdfast process is running.\n"
        "Try:\n"
        "  1. Wait a few seconds and retry\n"
        "  2. Check for stuck processes: ps aux | grep holdfast\n"
        f"  3. Increase timeout: JIT_LOCK_TIMEOUT={seconds} holdfast ..."
    )


def claim_for(issue_id: str, flag: str | None) -> ClaimId | None:
    """The claim that was shown for this issue: by the option, or by the environment if it is for it."""
    from holdfast.issues.model import ClaimId

    if flag:
        shown = ClaimId.parse(flag)
        if shown.issue_id != issue_id:
            raise UsageFailure(f"the claim {flag} is for {shown.issue_id}, not for {issue_id}")
        return shown
    text = os.environ.get(CLAIM_VARIABLE)
    claim = ClaimId.parse(text) if text else None
    return claim if claim is not None and claim.issue_id == issue_id else None


def _person() -> str:
    from holdfast.locks.identity import current_holder

    return f"human:{current_holder().user.replace(' ', '_') or 'unknown'}"


COLUMNS = ("ID", "STATE", "PRIORITY", "ASSIGNEE", "TITLE")


def claimed_lines(claimed: Claimed) -> Iterator[str]:
    claim = claimed.claim
    yield f"claimed {claimed.issue.id[:SHORT]}: {claimed.issue.title}"
    if claimed.taken_over_from:
        yield f"  taken over from {claimed.taken_over_from}, whose claim ran out"
    yield f"  token    {claim.token}"
    yield f"  expires  {claim.expires_at}, unless it is renewed ('holdfast issue heartbeat')"
    yield f"  export HOLDFAST_CLAIM_ID={claim.claim_id}"
    yield "When it is done: 'holdfast issue finish'; to give it back: 'holdfast issue release'."


def show_issues(output: Output, snapshot: IssueSet, issues: Iterable[Issue], field: str | None) -> None:
    """A list of issues: as a table, as records, or one field of each; and what could not be read."""
    if field:
        show_field(output, issues_to_json(snapshot, issues)["issues"], field)
    elif output.as_json:
        output.result(issues_to_json(snapshot, issues))
    else:
        show_table(output, COLUMNS, [_row(issue, snapshot.state(issue)) for issue in issues])
    warn_of_broken(output, snapshot.broken, told=output.as_json and not field)


def warn_of_broken(output: Output, broken: Sequence[Broken], *, told: bool | None = None) -> None:
    """Name what could not be read, on standard error; not if programs were told (`told`)."""
    if not broken or (output.as_json if told is None else told):
        return
    for each in broken:
        output.diagnostic(
            f"Warning: {each.issue_id[:SHORT]} is left out, because it cannot be read. "
            f"{printable(each.failure.message)} ({each.failure.code})"
        )
    output.diagnostic("Nothing was changed. 'holdfast issue validate' shows what is to be repaired.")


def changed(
    output: Output, what: str, issue: Issue, state: State, extra: dict[str, Any] | None = None
) -> None:
    """What has become of one issue."""
    record = {**issue_summary_to_json(issue, state), **(extra or {})}
    output.result(record, [f"{what} {issue.id[:SHORT]} ({state.value}): {issue.title}"])


def issue_lines(record: dict[str, Any]) -> Iterator[str]:
    """One issue, for people."""
    yield f"{record['title']}"
    yield f"  id            {record['id']}"
    yield f"  state         {record['state']}"
    yield f"  priority      {record['priority']}"
    yield f"  assignee      {record['assignee'] or '-'}"
    if record["labels"]:
        yield f"  labels        {', '.join(record['labels'])}"
    for name, title in (
        ("dependencies", "depends on"),
        ("blocked_by", "waits for"),
        ("dependents", "needed by"),
    ):
        if record[name]:
            yield f"  {title:12}  {', '.join(each[:SHORT] for each in record[name])}"
    for each in record["broken"]:
        yield f"  cannot read   {each['id'][:SHORT]}: {each['message']}"
    for gate in record["gates_required"]:
        verdict = record["gates_status"].get(gate, {})
        by = f" by {verdict['updated_by']}" if verdict.get("updated_by") else ""
        yield f"  gate          {gate}: {verdict.get('status', 'pending')}{by}"
    for name, value in record["context"].items():
        yield f"  context       {name}={value}"
    if record["claim"]:
        yield from _claim_lines(record["claim"])
    yield f"  created       {record['created_at']}"
    yield f"  updated       {record['updated_at']}"
    if record["description"]:
        yield ""
        yield from (f"  {line}" for line in record["description"].splitlines())


def _claim_lines(claim: dict[str, Any]) -> Iterator[str]:
    left = claim["time_left"]
    until = f"for another {format_duration(left)}" if left > 0 else f"ran out {format_duration(-left)} ago"
    yield f"  claim         {claim['claim_id']}"
    yield f"                token {claim['token']}, by {claim['assignee']}, {until}"


def _row(issue: Issue, state: State) -> tuple[str, ...]:
    return issue.id[:SHORT], state.value, issue.priority.value, issue.assignee or "-", issue.title
