"""Changing an issue by the words of the command line."""

from __future__ import annotations

from typing import Any

from holdfast.cli.fields import tell
from holdfast.cli.issue_view import SHORT, issue_summary_to_json
from holdfast.cli.output import Output
from holdfast.cli.tracking import claim_for
from holdfast.errors import SettingInvalid, UsageFailure
from holdfast.issues.model import Priority, State
from holdfast.issues.tracker import KEEP, Tracker, Update


def update_one(tracker: Tracker, output: Output, issue_id: str, words: dict[str, Any]) -> None:
    """Make the change, and say what came of it."""
    change = _change(words)
    if change == Update():
        raise UsageFailure("there is nothing to change", hint="Say what shall change: see --help.")
    claim = claim_for(issue_id, words["claim_text"])
    issue = tracker.update(issue_id, change, claim=claim, if_version=words["if_version"])
    state = tracker.state(issue)
    record = {
        **issue_summary_to_json(issue, state),
        "context": issue.context,
        "open_gates": issue.open_gates(),
    }
    line = f"updated {issue.id[:SHORT]} ({state.value}): {issue.title}"
    if state is State.GATED and issue.open_gates():
        line += f"; done when these are passed: {', '.join(issue.open_gates())}"
    tell(output, words["field"], record, [line])


def _change(words: dict[str, Any]) -> Update:
    assignee = words["assignee"]
    return Update(
        title=words["title"],
        description=words["description"],
        priority=Priority(words["priority"]) if words["priority"] else None,
        state=State(words["state"]) if words["state"] else None,
        assignee=KEEP if assignee is None else None if assignee == "none" else assignee,
        add_labels=words["labels"],
        remove_labels=words["remove_labels"],
        context=dict(_pair(each) for each in words["context"]),
        increments=dict(_count(each) for each in words["increment"]),
    )


def _pair(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingInvalid("--context", text, "KEY=VALUE, or KEY= to remove it")
    return name, value or None


def _count(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value or "1")
    except ValueError:
        raise SettingInvalid("--increment", text, "KEY, or KEY=N with a whole number") from None
