"""Creating issues from the words of the command line, or from a batch on standard input."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from holdfast.cli.fields import tell
from holdfast.cli.output import Output
from holdfast.errors import UsageFailure
from holdfast.issues.creating import Created, NewIssue
from holdfast.issues.exchange import read_batch
from holdfast.issues.model import Priority
from holdfast.issues.reading import SHORT, created_issues_to_json
from holdfast.issues.tracker import Tracker


def create_one(
    tracker: Tracker,
    output: Output,
    field: str | None,
    words: dict[str, Any],
    depends_on: tuple[str, ...],
    **more: Any,
) -> None:
    """Create the one issue that was described."""
    words["priority"] = Priority(words["priority"])
    new = NewIssue(**words, depends_on=tuple(map(tracker.find_id, depends_on)), **more)
    [created] = tracker.create_all([new])
    tell(output, field, created_issues_to_json(created), _lines(created))


def create_batch(tracker: Tracker, output: Output, field: str | None) -> None:
    """Create what stands on standard input."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageFailure("a batch is read from standard input, and that is a terminal")
    new = read_batch(sys.stdin.buffer.read(), "standard input")
    keys = {each.key for each in new}
    resolved = [
        msgspec.structs.replace(
            each, depends_on=tuple(on if on in keys else tracker.find_id(on) for on in each.depends_on)
        )
        for each in new
    ]
    created = tracker.create_all(resolved)
    records = [created_issues_to_json(each) for each in created]
    lines = [line for each in created for line in _lines(each)]
    tell(output, field, {"issues": records, "count": len(records)}, lines, records=records)


def _lines(created: Created) -> list[str]:
    issue = created.issue
    lines = [f"created {issue.id[:SHORT]} ({issue.state.value}): {issue.title}"]
    for on, way in created.implied.items():
        shown = " -> ".join(each[:SHORT] for each in way)
        lines.append(f"  left out {on[:SHORT]}, which follows from {shown}")
    return lines
