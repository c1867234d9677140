"""`holdfast ready`, `blocked`, `graph`, `events`: looking at all issues at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from holdfast.cli.issue_view import reading_options, tracking
from holdfast.cli.options import ISSUE_FIELDS, field_of, tell
from holdfast.cli.output import Output, printable
from holdfast.issues import rules
from holdfast.issues.model import Issue, IssueEvent
from holdfast.issues.reading import IssueSet
from holdfast.store.model import Entry


@click.command()
@click.option("--assignee", metavar="KIND:NAME", help="Also what is assigned to this one already.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="At most this many.")
@field_of(*ISSUE_FIELDS)
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
@field_of(*ISSUE_FIELDS, "blocked_by")
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
    from holdfast.cli.issue_view import unreadable_issues_to_json, warn_of_broken

    with tracking(repo) as tracker:
        snapshot = tracker.snapshot()
    picture = GraphView(snapshot, everything=everything)
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

    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        wanted = tracker.find_id(issue_id) if issue_id else None

        def fits(event: IssueEvent) -> bool:
            return (wanted is None or event.issue_id == wanted) and (not types or event.type in types)

        def tell(entry: Entry[IssueEvent]) -> None:
            output.result(issue_event_to_json(entry), [issue_event_line(entry.record)])

        past = list(tracker.events())
        position = past[-1].position if past else 0
        chosen = [entry for entry in past if fits(entry.record)][-(limit or len(past) or 1) :]
        if not follow:
            output.result(
                {"events": [issue_event_to_json(each) for each in chosen]},
                map(issue_event_line, (e.record for e in chosen)),
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


SHORT = 8


def issue_event_to_json(entry: Entry[IssueEvent]) -> dict[str, Any]:
    """Everything that an event says, and where it stands."""
    event = entry.record
    known = {"type": event.type, "id": event.id, "issue_id": event.issue_id, "timestamp": event.timestamp}
    return {**known, **{k: v for k, v in event.unknown.items() if k not in known}, "position": entry.position}


def issue_event_line(event: IssueEvent) -> str:
    """The same on a line."""
    facts = ", ".join(f"{name}={_short(value)}" for name, value in event.unknown.items() if value is not None)
    return f"{event.timestamp or '-'}  {event.issue_id[:SHORT] or '-':8}  {event.type:20}  {facts}".rstrip()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class GraphView:
    """The issues to be shown, and the edges between them."""

    def __init__(self, snapshot: IssueSet, *, everything: bool) -> None:
        self._snapshot = snapshot
        chosen = [issue for issue in snapshot if everything or issue.state not in rules.FINISHED]
        self._issues = {issue.id: issue for issue in chosen}
        self._edges = [(issue.id, on) for issue in chosen for on in issue.dependencies if on in self._issues]

    def as_record(self) -> dict[str, Any]:
        """Nodes and edges."""
        nodes = [
            {"id": each.id, "title": each.title, "state": self._state(each)} for each in self._issues.values()
        ]
        return {"nodes": nodes, "edges": [{"issue": issue, "depends_on": on} for issue, on in self._edges]}

    def text(self) -> Iterator[str]:
        """From what nobody waits for, down to what waits for nobody."""
        needed = {on for _, on in self._edges}
        shown: set[str] = set()
        for issue in self._issues.values():
            if issue.id not in needed:
                yield from self._below(issue, shown)

    def dot(self) -> Iterator[str]:
        """For Graphviz."""
        yield "digraph issues {"
        yield "  rankdir=LR; node [shape=box];"
        for issue in self._issues.values():
            label = f"{issue.id[:SHORT]}\\n{_quoted(issue.title)}\\n({self._state(issue)})"
            yield f'  "{issue.id}" [label="{label}"];'
        yield from (f'  "{issue}" -> "{on}";' for issue, on in self._edges)
        yield "}"

    def mermaid(self) -> Iterator[str]:
        """For Mermaid."""
        yield "graph LR"
        names = {issue_id: f"n{number}" for number, issue_id in enumerate(self._issues)}
        for issue in self._issues.values():
            title = printable(issue.title).replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
            yield f'  {names[issue.id]}["{issue.id[:SHORT]}: {title} ({self._state(issue)})"]'
        yield from (f"  {names[issue]} --> {names[on]}" for issue, on in self._edges)

    def _below(self, start: Issue, shown: set[str]) -> Iterator[str]:
        todo = [(0, start)]
        while todo:
            level, issue = todo.pop()
            again = issue.id in shown and bool(issue.dependencies)
            title = printable(issue.title) + ("  (see above)" if again else "")
            yield "  " * level + f"{issue.id[:SHORT]} ({self._state(issue)}) {title}"
            if issue.id not in shown:
                below = [self._issues[on] for on in reversed(issue.dependencies) if on in self._issues]
                todo += [(level + 1, each) for each in below]
            shown.add(issue.id)

    def _state(self, issue: Issue) -> str:
        return self._snapshot.state(issue).value


def _quoted(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
