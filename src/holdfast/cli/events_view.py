"""Events as they are shown."""

from __future__ import annotations

from typing import Any

from holdfast.issues.model import IssueEvent
from holdfast.store.model import Entry

SHORT = 8


def as_record(entry: Entry[IssueEvent]) -> dict[str, Any]:
    """Everything that an event says, and where it stands."""
    event = entry.record
    known = {"type": event.type, "id": event.id, "issue_id": event.issue_id, "timestamp": event.timestamp}
    return {**known, **{k: v for k, v in event.unknown.items() if k not in known}, "position": entry.position}


def line(event: IssueEvent) -> str:
    """The same on a line."""
    facts = ", ".join(f"{name}={_short(value)}" for name, value in event.unknown.items() if value is not None)
    return f"{event.timestamp or '-'}  {event.issue_id[:SHORT] or '-':8}  {event.type:20}  {facts}".rstrip()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
