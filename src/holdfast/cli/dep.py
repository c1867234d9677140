"""`holdfast dep`: dependencies between issues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.entry import Group
from holdfast.cli.issue_view import reading_options, tracking, warn_of_broken, writing_options
from holdfast.cli.output import Output
from holdfast.issues.model import SHORT, issue_summary_to_json
from holdfast.issues.reading import unreadable_issues_to_json

if TYPE_CHECKING:
    from holdfast.issues.model import IssueSummary
    from holdfast.issues.rules import IssueSet

HELP = """\
Dependencies: an issue waits until its dependencies are done. Cycles are impossible, even if several processes add
dependencies at the same time.
"""
group = Group("dep", help=HELP)


@group.command(short_help="Add a dependency.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("depends_on", metavar="DEPENDS_ON")
@writing_options
@click.pass_obj
def add(output: Output, /, *, issue_id: str, depends_on: str, **where: Any) -> None:
    """Make ISSUE wait for DEPENDS_ON. A cycle is refused and named.

    A dependency that existing ones imply is not added; the path that implies it is printed.

    \b
    Example:
      holdfast dep add 4f1c 9a2b
    """
    with tracking(**where) as tracker:
        found, on = tracker.find_id(issue_id), tracker.find_id(depends_on)
        added = tracker.dependencies.add(found, on)
        outcome = {"depends_on": on, "added": added.added, "implied_by": list(added.implied_by)}
        record = issue_summary_to_json(added.issue, tracker.state(added.issue)) | outcome
    pair = f"{found[:SHORT]} -> {on[:SHORT]}"
    if added.added:
        line = f"added {pair}"
    elif len(added.implied_by) == 2:
        line = f"{pair} already exists"
    else:
        path = " -> ".join(each[:SHORT] for each in added.implied_by)
        line = f"skipped {pair}: it is redundant, because {path} implies it"
    output.result(record, [line])


@group.command(short_help="Remove a dependency.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("depends_on", metavar="DEPENDS_ON")
@writing_options
@click.pass_obj
def remove(output: Output, /, *, issue_id: str, depends_on: str, **where: Any) -> None:
    """Remove the dependency of ISSUE on DEPENDS_ON. Status 3 if there is none.

    \b
    Example:
      holdfast dep remove 4f1c 9a2b
    """
    from holdfast.errors import NotFound

    with tracking(**where) as tracker:
        found = tracker.find_id(issue_id)
        own = [each for each in tracker.issue(found).dependencies if each.startswith(depends_on)]
        on = own[0] if len(own) == 1 else tracker.find_id(depends_on)
        issue = tracker.dependencies.remove(found, on)
        if issue is None:
            raise NotFound(f"{found[:SHORT]} does not depend on {on[:SHORT]}", issue_id=found, depends_on=on)
        record = {**issue_summary_to_json(issue, tracker.state(issue)), "depends_on": on, "removed": True}
    output.result(record, [f"removed {found[:SHORT]} -> {on[:SHORT]}"])


@group.command(short_help="Show the dependencies of an issue as a tree.")
@click.argument("issue_id", metavar="ISSUE")
@click.option("--depth", metavar="N", type=click.IntRange(1), help="Descend at most N levels.")
@reading_options
@click.pass_obj
def tree(output: Output, *, issue_id: str, depth: int | None, repo: str | None) -> None:
    """Show the dependencies of ISSUE, their dependencies, and so on. Each subtree appears once.

    \b
    Example:
      holdfast dep tree 4f1c
    """
    with tracking(repo) as tracker:
        found = tracker.find_id(issue_id)
        snapshot = tracker.summaries()
    issues, lines = [], []
    for level, here, issue in _walk(snapshot, found, depth):
        if issue:
            state = snapshot.state(issue)
            issues.append({**issue_summary_to_json(issue, state), "depth": level})
            line = f"{here[:SHORT]} ({state.value}) {issue.title}"
        else:
            line = f"{here} ({'broken' if here in snapshot.broken_issues else 'missing'})"
        lines.append("  " * level + line)
    output.result({"id": found, "issues": issues, "broken": unreadable_issues_to_json(snapshot.broken)}, lines)
    warn_of_broken(output, snapshot.broken)


def _walk(
    snapshot: IssueSet[IssueSummary], start: str, depth: int | None
) -> Iterator[tuple[int, str, IssueSummary | None]]:
    """The level, id and content of each dependency; None if it is missing or broken."""
    todo = [(0, start)]
    seen: set[str] = set()
    while todo:
        level, here = todo.pop()
        issue = snapshot.lookup(here)
        yield level, here, issue
        if issue and here not in seen and (depth is None or level < depth):
            todo += [(level + 1, each) for each in reversed(issue.dependencies)]
        seen.add(here)
