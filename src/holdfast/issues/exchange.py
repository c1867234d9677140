"""Export and import of issues as JSON, and batches of new issues."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Corrupt, UsageFailure
from holdfast.fs import strictjson
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import GATES, Issue, IssueCodec, Registry
from holdfast.issues.rules import IssueSet
from holdfast.issues.tracker import Tracker
from holdfast.issues.transactions import Draft

MOST_BYTES = 256 << 20
_CODEC = IssueCodec()


class Imported(NamedTuple):
    issues: list[Issue]
    gates: list[str]


def exported(snapshot: IssueSet[Issue], registry: Registry | None) -> dict[str, Any]:
    """All issues and gates as JSON values, with unknown fields. Raises if an issue cannot be read."""
    for each in snapshot.broken:
        raise each.failure
    issues = [msgspec.json.decode(_CODEC.encode(issue)) for issue in snapshot]
    return {"schema_version": 1, "gates": dict(registry.gates) if registry else {}, "issues": issues}


def import_text(tracker: Tracker, text: bytes, source: str) -> Imported:
    """Import an export, a list of issues, or one issue per line; existing ids are refused."""
    issues, gates = _parse(text, source)
    defined = _define(tracker, gates)
    return Imported([each.issue for each in tracker.adopt(issues)], defined)


def read_batch(text: bytes, source: str) -> list[NewIssue]:
    """The issues of a batch: a JSON list, or one object per line."""
    values = _values(text, source)
    try:
        return [msgspec.convert(value, NewIssue) for value in values]
    except msgspec.ValidationError as error:
        raise UsageFailure(
            f"{source} is not a batch of issues: {error}",
            hint='Each has a "title", and may have description, priority, depends_on, gates, labels, touches, '
            "context, assignee, and a key that others in the batch depend on.",
        ) from None


def _parse(text: bytes, source: str) -> tuple[list[Issue], dict[str, dict[str, Any]]]:
    values, gates = _values(text, source), dict[str, dict[str, Any]]()
    if len(values) == 1 and isinstance(values[0], dict) and isinstance(values[0].get("issues"), list):
        gates = values[0].get("gates") or {}
        values = values[0]["issues"]
    if not isinstance(gates, dict) or not all(isinstance(each, dict) for each in gates.values()):
        raise UsageFailure(f"{source} has gates that are not objects")
    try:
        return [_CODEC.decode(msgspec.json.encode(value), source) for value in values], gates
    except Corrupt as failure:
        raise UsageFailure(f"{source} cannot be imported: {failure.message}") from None


def _values(text: bytes, source: str) -> list[Any]:
    try:
        value = strictjson.decode(text.strip(), source=source, limit=MOST_BYTES)
        return value if isinstance(value, list) else [value]
    except Corrupt as failure:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise UsageFailure(failure.message) from None
    try:
        return [strictjson.decode(line, source=f"line {n} of {source}") for n, line in enumerate(lines, 1)]
    except Corrupt as failure:
        raise UsageFailure(failure.message) from None


def _define(tracker: Tracker, gates: dict[str, dict[str, Any]]) -> list[str]:
    """Define the gates that do not exist yet."""
    if not gates:
        return []

    def body(draft: Draft) -> list[str]:
        registry = draft.get(GATES) or Registry()
        new = {key: gate for key, gate in gates.items() if key not in registry.gates}
        if new:
            draft.set(GATES, msgspec.structs.replace(registry, gates={**registry.gates, **new}))
        for key in new:
            draft.record("gate_defined", "", gate_key=key)
        return list(new)

    return tracker.transactions.change(body, also=[GATES])
