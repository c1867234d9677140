"""`holdfast ready`, `blocked`, `graph`, `events`: looking at all issues at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.fields import ISSUE, field_of, tell
from holdfast.cli.output import Output
from holdfast.cli.tracking import reading_options, tracking

if TYPE_CHECKING:
    from holdfast.issues.model import IssueEvent
    from holdfast.store.model import Entry


@click.command()
@click.option("--assignee", metavar="KIND:NAME", help="Also what is assigned to this one already.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="At most this many.")
@field_of(*ISSUE)
@reading_options
@click.pass_obj
def ready(
    output: Output, *, assignee: str | None, limit: int | None, field: str | None, repo: str | None
) -> None:
    """List the issues that can be worked on now, the most urgent first.

    These wait for nobody, and nobody works on them; or somebody did, and the claim has run out.

    \b
    Examples:
      holdfast ready
      holdfast ready --limit 1 --field id
    """
    from holdfast.cli.issue_view import show_issues

    with tracking(repo) as tracker:
        snapshot = tracker.snapshot()
        show_issues(output, snapshot, snapshot.ready(assignee)[:limit], field)


@click.command()
@field_of(*ISSUE, "blocked_by")
@reading_options
@click.pass_obj
def blocked(output: Output, *, field: str | None, repo: str | None) -> None:
    """List the issues that wait for others, and say what for.

    \b
    Example:
      holdfast blocked
    """
    from holdfast.cli.issue_view import (
        SHORT,
        issue_summary_to_json,
        unreadable_issues_to_json,
        warn_of_broken,
    )

    with tracking(repo) as tracker:
        snapshot = tracker.snapshot()
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for issue, waiting in snapshot.blocked():
        reasons = []
        lines.append(f"{issue.id[:SHORT]} ({snapshot.state(issue).value}) {issue.title}")
        for on in waiting:
            other = snapshot.lookup(on)
            lost = "broken" if on in snapshot.broken_issues else "missing"
            state = snapshot.state(other).value if other else lost
            reasons.append({"id": on, "state": state, "title": other.title if other else None})
            advice = _ADVICE.get(state, "")
            lines.append(f"  waits for {on[:SHORT]} ({state}) {other.title if other else ''}{advice}")
        records.append({**issue_summary_to_json(issue, snapshot.state(issue)), "blocked_by": reasons})
    broken = unreadable_issues_to_json(snapshot.broken)
    record = {"issues": records, "count": len(records), "broken": broken}
    tell(output, field, record, lines, records=records)
    warn_of_broken(output, snapshot.broken, told=output.as_json and not field)


_ADVICE = {
    "rejected": "  <- will never be done: remove the dependency?",
    "broken": "  <- cannot be read, so nobody knows: repair it first",
}


@click.command()
@click.option(
    "--format",
    "form",
    metavar="FORM",
    type=click.Choice(["text", "dot", "mermaid"]),
    default="text",
    show_default=True,
    help="text, dot (for Graphviz) or mermaid.",
)
@click.option("--all", "everything", is_flag=True, help="Also issues that are finished.")
@reading_options
@click.pass_obj
def graph(output: Output, *, form: str, everything: bool, repo: str | None) -> None:
    """Show which issue waits for which.

    \b
    Examples:
      holdfast graph
      holdfast graph --format dot | dot -Tsvg > issues.svg
    """
    from holdfast.cli import graph_view
    from holdfast.cli.issue_view import unreadable_issues_to_json, warn_of_broken

    with tracking(repo) as tracker:
        snapshot = tracker.snapshot()
    picture = graph_view.Picture(snapshot, everything=everything)
    if output.as_json:
        output.result({**picture.as_record(), "broken": unreadable_issues_to_json(snapshot.broken)})
    else:
        output.text("\n".join(getattr(picture, form)()))
    warn_of_broken(output, snapshot.broken)


@click.command()
@click.option("--follow", is_flag=True, help="Go on, and show what happens as it happens.")
@click.option("--issue", "issue_id", metavar="ID", help="Only events of this issue.")
@click.option("--type", "types", metavar="TYPE", multiple=True, help="Only events of this type.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Only the last so many.")
@reading_options
@click.pass_obj
def events(
    output: Output,
    *,
    follow: bool,
    issue_id: str | None,
    types: tuple[str, ...],
    limit: int | None,
    repo: str | None,
) -> None:
    """Show what happened, in order. With --follow and --json, one envelope per event.

    \b
    Examples:
      holdfast events --limit 20
      holdfast events --follow --type issue_completed
    """
    from holdfast.cli.events_view import as_record, line

    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        wanted = tracker.find_id(issue_id) if issue_id else None

        def fits(event: IssueEvent) -> bool:
            return (wanted is None or event.issue_id == wanted) and (not types or event.type in types)

        def tell(entry: Entry[IssueEvent]) -> None:
            output.result(as_record(entry), [line(entry.record)])

        past = list(tracker.events())
        position = past[-1].position if past else 0
        chosen = [entry for entry in past if fits(entry.record)][-(limit or len(past) or 1) :]
        if not follow:
            output.result(
                {"events": [as_record(each) for each in chosen]}, map(line, (e.record for e in chosen))
            )
            return
        for entry in chosen:
            tell(entry)
        from holdfast.issues.model import EVENTS

        with tracker.store.watch(EVENTS) as watch:
            while True:
                for entry in tracker.events(after=position):
                    position = entry.position
                    if fits(entry.record):
                        tell(entry)
                watch.wait(5.0)
