"""Issues as they are shown: as records for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from holdfast.cli.output import Output, printable
from holdfast.cli.tables import show_table
from holdfast.cli.tracking import show_field
from holdfast.clock import format_duration
from holdfast.issues.claims import Claimed
from holdfast.issues.model import Issue, State
from holdfast.issues.reading import SHORT as SHORT
from holdfast.issues.reading import Broken, IssueSet, issues_to_json
from holdfast.issues.reading import claimed_issue_to_json as claimed_issue_to_json
from holdfast.issues.reading import issue_claim_to_json as issue_claim_to_json
from holdfast.issues.reading import issue_summary_to_json as issue_summary_to_json
from holdfast.issues.reading import issue_to_json as issue_to_json
from holdfast.issues.reading import unreadable_issues_to_json as unreadable_issues_to_json

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


def lines(record: dict[str, Any]) -> Iterator[str]:
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
