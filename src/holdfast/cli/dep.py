"""`holdfast dep`: which issue waits for which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli.entry import Group
from holdfast.cli.issue_view import reading_options, tracking, writing_options
from holdfast.cli.output import Output

if TYPE_CHECKING:
    from holdfast.issues.model import Issue
    from holdfast.issues.reading import IssueSet

group = Group(
    "dep",
    help="""\
Dependencies: an issue waits for another one until that is done. There are never circles, whoever adds
what at the same time.

\b
Example:
  holdfast dep add 4f1c 9a2b
""",
)


@group.command(short_help="Let an issue wait for another one.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("depends_on", metavar="DEPENDS_ON")
@writing_options
@click.pass_obj
def add(output: Output, *, issue_id: str, depends_on: str, repo: str | None, actor: str | None) -> None:
    """Let ISSUE wait for DEPENDS_ON. A circle is refused, and named.

    A dependency that follows from others is left out, and the way it follows is said.

    \b
    Example:
      holdfast dep add 4f1c 9a2b
    """
    from holdfast.cli.issue_view import SHORT, issue_summary_to_json

    with tracking(repo, actor) as tracker:
        found, on = tracker.find_id(issue_id), tracker.find_id(depends_on)
        added = tracker.dependencies.add(found, on)
        record = {
            **issue_summary_to_json(added.issue, tracker.state(added.issue)),
            "depends_on": on,
            "added": added.added,
            "implied_by": list(added.implied_by),
        }
    pair = f"{found[:SHORT]} -> {on[:SHORT]}"
    way = " -> ".join(each[:SHORT] for each in added.implied_by)
    if added.added:
        line = f"added {pair}"
    elif len(added.implied_by) == 2:
        line = f"{pair} is there already"
    else:
        line = f"left out {pair}: it is redundant, as it follows from {way}"
    output.result(record, [line])


@group.command(short_help="Let an issue wait no longer for another one.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("depends_on", metavar="DEPENDS_ON")
@writing_options
@click.pass_obj
def remove(output: Output, *, issue_id: str, depends_on: str, repo: str | None, actor: str | None) -> None:
    """Let ISSUE wait no longer for DEPENDS_ON. Status 3 if it did not.

    \b
    Example:
      holdfast dep remove 4f1c 9a2b
    """
    from holdfast.cli.issue_view import SHORT, issue_summary_to_json
    from holdfast.errors import NotFound

    with tracking(repo, actor) as tracker:
        found = tracker.find_id(issue_id)
        own = [each for each in tracker.issue(found).dependencies if each.startswith(depends_on)]
        on = own[0] if len(own) == 1 else tracker.find_id(depends_on)
        issue = tracker.dependencies.remove(found, on)
        if issue is None:
            raise NotFound(f"{found[:SHORT]} does not depend on {on[:SHORT]}", issue_id=found, depends_on=on)
        record = {**issue_summary_to_json(issue, tracker.state(issue)), "depends_on": on, "removed": True}
        output.result(record, [f"removed {found[:SHORT]} -> {on[:SHORT]}"])


@group.command(short_help="Show what an issue waits for, and that in turn.")
@click.argument("issue_id", metavar="ISSUE")
@click.option("--depth", metavar="N", type=click.IntRange(1), help="Only so many steps.")
@reading_options
@click.pass_obj
def tree(output: Output, *, issue_id: str, depth: int | None, repo: str | None) -> None:
    """Show what ISSUE waits for, what that waits for, and so on. What was shown is not shown again.

    \b
    Example:
      holdfast dep tree 4f1c
    """
    from holdfast.cli.issue_view import issue_summary_to_json, unreadable_issues_to_json, warn_of_broken

    with tracking(repo) as tracker:
        found = tracker.find_id(issue_id)
        snapshot = tracker.snapshot()
        rows = list(_walk(snapshot, found, depth))

    def lost(issue_id: str) -> str:
        return "broken" if issue_id in snapshot.broken_issues else "missing"

    issues = [
        {**issue_summary_to_json(each, snapshot.state(each)), "depth": level}
        for level, _, each in rows
        if each
    ]
    lines = [
        "  " * level
        + (f"{here[:8]} ({snapshot.state(each).value}) {each.title}" if each else f"{here} ({lost(here)})")
        for level, here, each in rows
    ]
    output.result(
        {"id": found, "issues": issues, "broken": unreadable_issues_to_json(snapshot.broken)}, lines
    )
    warn_of_broken(output, snapshot.broken)


def _walk(snapshot: IssueSet, start: str, depth: int | None) -> Iterator[tuple[int, str, Issue | None]]:
    todo = [(0, start)]
    seen: set[str] = set()
    while todo:
        level, here = todo.pop()
        issue = snapshot.lookup(here)
        yield level, here, issue
        if issue and here not in seen and (depth is None or level < depth):
            todo += [(level + 1, each) for each in reversed(issue.dependencies)]
        seen.add(here)
