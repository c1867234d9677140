"""`holdfast ready`, `blocked`, `graph`, `events`: views of all issues."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import click

from holdfast.cli.issue_view import reading_options, show_issues, tracking, warn_of_broken
from holdfast.cli.options import ISSUE_FIELDS, field_option, limit_option, print_record
from holdfast.cli.output import Output, printable, shortened
from holdfast.issues import rules
from holdfast.issues.model import EVENTS, SHORT, IssueEvent, IssueSummary, issue_summary_to_json
from holdfast.issues.reading import unreadable_issues_to_json
from holdfast.issues.rules import IssueSet
from holdfast.store.model import Entry


@click.command()
@click.option("--assignee", metavar="KIND:NAME", help="Include issues reserved for this assignee.")
@limit_option("Print at most N issues.")
@field_option(*ISSUE_FIELDS)
@reading_options
@click.pass_obj
def ready(output: Output, *, assignee: str | None, limit: int | None, field: str | None, repo: str | None) -> None:
    """List the issues that can be worked on now, most urgent first.

    An issue is ready if all its dependencies are done and nobody has claimed it, or its claim has expired.

    \b
    Examples:
      holdfast ready
      holdfast ready --limit 1 --field id
    """
    with tracking(repo) as tracker:
        snapshot = tracker.summaries(finished=False)
        show_issues(output, snapshot, islice(snapshot.by_urgency(assignee), limit), field)


@click.command()
@field_option(*ISSUE_FIELDS, "blocked_by")
@reading_options
@click.pass_obj
def blocked(output: Output, *, field: str | None, repo: str | None) -> None:
    """List the issues that wait for others, with the issues that they wait for.

    \b
    Example:
      holdfast blocked
    """
    with tracking(repo) as tracker:
        snapshot = tracker.summaries(finished=False)
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for issue, waiting in snapshot.blocked():
        blockers = []
        lines.append(f"{issue.id[:SHORT]} ({snapshot.state(issue).value}) {issue.title}")
        for on in waiting:
            other = snapshot.lookup(on)
            unknown = "broken" if on in snapshot.broken_issues else "missing"
            state, title = (snapshot.state(other).value, other.title) if other else (unknown, None)
            blockers.append({"id": on, "state": state, "title": title})
            lines.append(f"  waits for {on[:SHORT]} ({state}) {title or ''}{_ADVICE.get(state, '')}")
        records.append({**issue_summary_to_json(issue, snapshot.state(issue)), "blocked_by": blockers})
    record = {"issues": records, "count": len(records), "broken": unreadable_issues_to_json(snapshot.broken)}
    print_record(output, field, record, lines, records=records)
    warn_of_broken(output, snapshot.broken, reported=output.as_json and not field)


_ADVICE = {
    "rejected": "  <- will never be done: remove the dependency?",
    "broken": "  <- cannot be read: repair it first",
}


@click.command()
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    type=click.Choice(["text", "dot", "mermaid"]),
    default="text",
    show_default=True,
    help="text, dot (for Graphviz) or mermaid.",
)
@click.option("--all", "everything", is_flag=True, help="Include finished issues.")
@reading_options
@click.pass_obj
def graph(output: Output, *, form: str, everything: bool, repo: str | None) -> None:
    """Show the graph of dependencies between issues.

    \b
    Examples:
      holdfast graph
      holdfast graph --format dot | dot -Tsvg > issues.svg
    """
    with tracking(repo) as tracker:
        snapshot = tracker.summaries(finished=everything)
    view = GraphView(snapshot, everything=everything)
    if output.as_json:
        output.result({**view.as_record(), "broken": unreadable_issues_to_json(snapshot.broken)})
    else:
        output.text("\n".join(getattr(view, form)()))
    warn_of_broken(output, snapshot.broken)


class GraphView:
    """The dependency graph of a set of issues, in each output format."""

    def __init__(self, snapshot: IssueSet[IssueSummary], *, everything: bool) -> None:
        self._snapshot = snapshot
        chosen = [issue for issue in snapshot if everything or issue.state not in rules.FINISHED]
        self._issues = {issue.id: issue for issue in chosen}
        self._edges = [(issue.id, on) for issue in chosen for on in issue.dependencies if on in self._issues]

    def as_record(self) -> dict[str, Any]:
        nodes = [{"id": each.id, "title": each.title, "state": self._state(each)} for each in self._issues.values()]
        return {"nodes": nodes, "edges": [{"issue": issue, "depends_on": on} for issue, on in self._edges]}

    def text(self) -> Iterator[str]:
        """A tree below each issue that no other depends on."""
        needed = {on for _, on in self._edges}
        shown: set[str] = set()
        todo = [(0, issue) for issue in reversed(self._issues.values()) if issue.id not in needed]
        while todo:
            level, issue = todo.pop()
            again = issue.id in shown and bool(issue.dependencies)
            title = printable(issue.title) + ("  (see above)" if again else "")
            yield "  " * level + f"{issue.id[:SHORT]} ({self._state(issue)}) {title}"
            if issue.id not in shown:
                below = [self._issues[on] for on in reversed(issue.dependencies) if on in self._issues]
                todo += [(level + 1, each) for each in below]
            shown.add(issue.id)

    def dot(self) -> Iterator[str]:
        yield from ("digraph issues {", "  rankdir=LR; node [shape=box];")
        for issue in self._issues.values():
            title = printable(issue.title).replace("\\", "\\\\").replace('"', '\\"')
            label = f"{issue.id[:SHORT]}\\n{title}\\n({self._state(issue)})"
            yield f'  "{issue.id}" [label="{label}"];'
        yield from (f'  "{issue}" -> "{on}";' for issue, on in self._edges)
        yield "}"

    def mermaid(self) -> Iterator[str]:
        yield "graph LR"
        names = {issue_id: f"n{number}" for number, issue_id in enumerate(self._issues)}
        for issue in self._issues.values():
            title = printable(issue.title).replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
            yield f'  {names[issue.id]}["{issue.id[:SHORT]}: {title} ({self._state(issue)})"]'
        yield from (f"  {names[issue]} --> {names[on]}" for issue, on in self._edges)

    def _state(self, issue: IssueSummary) -> str:
        return self._snapshot.state(issue).value


@click.command()
@click.option("--follow", is_flag=True, help="Keep running and print new events as they happen.")
@click.option("--issue", "issue_id", metavar="ID", help="Only events of this issue.")
@click.option("--type", "types", metavar="TYPE", multiple=True, help="Only events of this type. Repeatable.")
@limit_option("Print only the last N events.")
@reading_options
@click.pass_obj
def events(
    output: Output, *, follow: bool, issue_id: str | None, types: tuple[str, ...], limit: int | None, repo: str | None
) -> None:
    """Show the events of the tracker, oldest first. With --follow and --json, one JSON object per event.

    \b
    Examples:
      holdfast events --limit 20
      holdfast events --follow --type issue_completed
    """
    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        wanted = tracker.find_id(issue_id) if issue_id else None

        def matches(event: IssueEvent) -> bool:
            return (wanted is None or event.issue_id == wanted) and (not types or event.type in types)

        newest = tracker.newest_events()
        last = list(islice(newest, 1))
        position = last[0].position if last else 0
        found = (entry for entry in chain(last, newest) if matches(entry.record))
        chosen = list(islice(found, limit))[::-1]
        if not follow:
            records = [issue_event_to_json(each) for each in chosen]
            output.result({"events": records}, [issue_event_line(each.record) for each in chosen])
            return
        with tracker.store.watch(EVENTS) as watch:
            while True:
                for entry in chosen:
                    output.result(issue_event_to_json(entry), [issue_event_line(entry.record)])
                new = list(tracker.events(after=position))
                position = new[-1].position if new else position
                chosen = [entry for entry in new if matches(entry.record)]
                if not new:
                    watch.wait(5.0)


def issue_event_to_json(entry: Entry[IssueEvent]) -> dict[str, Any]:
    event = entry.record
    known = {"type": event.type, "id": event.id, "issue_id": event.issue_id, "timestamp": event.timestamp}
    return {**known, **{k: v for k, v in event.unknown.items() if k not in known}, "position": entry.position}


def issue_event_line(event: IssueEvent) -> str:
    facts = ", ".join(
        f"{name}={shortened(str(value), 60)}" for name, value in event.unknown.items() if value is not None
    )
    return f"{event.timestamp or '-'}  {event.issue_id[:SHORT] or '-':8}  {event.type:20}  {facts}".rstrip()
