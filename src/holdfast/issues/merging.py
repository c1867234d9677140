"""Merging the documents of a tracker that two git branches have changed: the rules of git's merge driver.

1. Each field is merged three ways (`store.merge`): a change of one side stands, and lists are sets.
2. If both sides changed a field differently, the side that was updated later stands; for a gate, the later result.
3. If both changed the state, work that one side finished stays finished, whatever the other did. Otherwise rule 2.
4. A finished issue keeps the dependencies and gates with which it was finished, because the tracker would have refused
   to change them. An issue in progress keeps the assignee of the side that gave it its state.
5. Every value that does not stand is kept in the field `superseded` of the issue, so that nothing is lost.

Which side is ours does not matter, so branches that merge each other end up equal. Claims are not in git.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import parse_instant
from holdfast.errors import Corrupt, Refused
from holdfast.issues import model
from holdfast.issues.model import ARCHIVED_FROM, Issue, State
from holdfast.issues.rules import FINISHED, WAITING
from holdfast.store.merge import ABSENT, Path, merged

SUPERSEDED = "superseded"
_FIXED_WHEN_FINISHED = ("dependencies", "gates_required", "gates_status")
_ISSUES = model.ISSUES.codec


class Sides(NamedTuple):
    """The contents of one file: at the common ancestor (empty if it had none), on our side, and on the other."""

    old: bytes
    ours: bytes
    theirs: bytes


def merge_file(path: str, sides: Sides) -> bytes:
    """The merged content of a file of the tracker; a `Failure` if a person must decide."""
    if path.endswith("index.json"):
        return _merge_index(sides)
    if path.endswith("gates.json"):
        return _merge_gates(sides)
    old = _ISSUES.decode(sides.old, "the common ancestor") if sides.old else None
    ours, theirs = _ISSUES.decode(sides.ours, "our side"), _ISSUES.decode(sides.theirs, "their side")
    if len({each.id for each in (old, ours, theirs) if each}) > 1:  # git took a new issue for a renamed one
        raise Refused("these are different issues", hint="Resolve the conflict by hand.", path=path)
    return _ISSUES.encode(merge_issues(old, ours, theirs)) + b"\n"


def merge_issues(old: Issue | None, one: Issue, other: Issue) -> Issue:
    """The issue with the changes of both sides since `old`."""
    earlier, later = sorted((one, other), key=_age)
    superseded: list[dict[str, Any]] = []
    before = earlier, later
    standing = _standing(old, earlier, later)
    if standing is earlier:
        later = _aligned(later, standing, old, superseded)
    elif standing is later:
        earlier = _aligned(earlier, standing, old, superseded)

    def decide(path: Path, ours: Any, theirs: Any) -> Any:
        stands, loses = theirs, ours
        if path[0] == "gates_status" and _gate_age(ours) > _gate_age(theirs):
            stands, loses = ours, theirs
        if loses is not ABSENT and path != ("updated_at",):
            superseded.append(_kept(path, loses, earlier if loses is ours else later))
        return stands

    values = merged(None if old is None else _values(old), _values(earlier), _values(later), decide)
    issue = _issue(values)
    if superseded:
        known = issue.unknown.get(SUPERSEDED)
        kept = [*(known if isinstance(known, list) else []), *superseded]
        issue = msgspec.structs.replace(issue, unknown={**issue.unknown, SUPERSEDED: kept})
    return _with_ruled_state(issue, before)


def superseded_values(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values that merges have kept in an issue; without what other programs may have put there."""
    found, names = record.get(SUPERSEDED), {"field", "value", "updated_at"}
    return (
        [each for each in found if isinstance(each, dict) and names <= each.keys()] if isinstance(found, list) else []
    )


def _standing(old: Issue | None, earlier: Issue, later: Issue) -> Issue | None:
    """The side whose state stands (rule 3); None if their states do not differ."""
    was, first, second = (each and _progress(each.state) for each in (old, earlier, later))
    if first is second:
        return None
    if was is first:
        return later
    if was is second:
        return earlier
    finished = [each for each in (earlier, later) if each.state in FINISHED]
    return finished[0] if len(finished) == 1 and was not in FINISHED else later


def _progress(state: State) -> State:
    """The state, with `backlog` and `ready` as one: other issues decide which of the two applies."""
    return State.BACKLOG if state in WAITING else state


def _aligned(issue: Issue, standing: Issue, old: Issue | None, superseded: list[dict[str, Any]]) -> Issue:
    """The issue with the state of the side that stands, and with everything that goes with it (rule 4)."""
    fields = ["state"]
    if standing.state in FINISHED:
        fields += _FIXED_WHEN_FINISHED
    if old is None or standing.assignee != old.assignee:
        fields.append("assignee")
    for name in fields:
        value, was = getattr(issue, name), None if old is None else getattr(old, name)
        is_same = _progress(value) is _progress(was or State.BACKLOG) if name == "state" else value == was
        if not is_same and value and value != getattr(standing, name):
            superseded.append(_kept((name,), _plain(issue)[name], issue))
    unknown = {name: value for name, value in issue.unknown.items() if name != ARCHIVED_FROM}
    if ARCHIVED_FROM in standing.unknown:
        unknown[ARCHIVED_FROM] = standing.unknown[ARCHIVED_FROM]
    values = {name: getattr(standing, name) for name in fields}
    return msgspec.structs.replace(issue, unknown=unknown, **values)


def _with_ruled_state(issue: Issue, sides: Iterable[Issue]) -> Issue:
    """The issue with the state that the rules require, as far as this issue alone shows: a dependency is done if it was
    done on the side that has it. `validate` settles what followed on other branches."""
    done = {on for each in sides if each.state in (State.READY, State.GATED) for on in each.dependencies}
    state, released = issue.state, done.issuperset(issue.dependencies)
    if state in WAITING:
        state = State.READY if released else State.BACKLOG
    elif state is State.GATED and released and not issue.open_gates():
        state = State.DONE
    return msgspec.structs.replace(issue, state=state)


def _kept(path: Path, value: Any, side: Issue) -> dict[str, Any]:
    field = ".".join(each for each in path if each != model.UNKNOWN)
    return {"field": field, "value": value[0] if isinstance(value, tuple) else value, "updated_at": side.updated_at}


def _values(issue: Issue) -> dict[str, Any]:
    """The fields. The result of a gate is one value, so that two results are never mixed."""
    values = _plain(issue)
    values["gates_status"] = {gate: (status,) for gate, status in values["gates_status"].items()}
    return values


def _plain(record: model.OpenRecord) -> dict[str, Any]:
    """The fields as JSON has them: lists, no tuples."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return values


def _issue(values: dict[str, Any]) -> Issue:
    values["gates_status"] = {gate: status for gate, (status,) in values["gates_status"].items()}
    return msgspec.convert(values, Issue)


def _age(issue: Issue) -> tuple[float, bytes]:
    return _instant(issue.updated_at), _ISSUES.encode(issue)


def _gate_age(value: Any) -> float:
    status = value[0] if isinstance(value, tuple) else None
    return _instant(status.get("updated_at")) if isinstance(status, dict) else 0.0


def _instant(text: Any) -> float:
    try:
        return parse_instant(text)
    except (ValueError, TypeError):
        return 0.0


def _merge_index(sides: Sides) -> bytes:
    """The ids of both sides. An index that cannot be understood stays: the next command rebuilds it."""
    codec = model.INDEX.codec
    try:
        old, ours, theirs = (_plain(codec.decode(each or b"{}", "the index")) for each in sides)
    except Corrupt:
        return sides.ours
    values = merged(old, theirs, ours, lambda path, theirs, ours: ours)
    return codec.encode(msgspec.convert(values, model.Index)) + b"\n"


def _merge_gates(sides: Sides) -> bytes:
    """The gates of both sides; `Refused` if both changed one value of a gate: nobody can tell which is meant."""
    codec = model.GATES.codec
    old, ours, theirs = (_plain(codec.decode(each or b"{}", "the gates")) for each in sides)

    def decide(path: Path, theirs: Any, ours: Any) -> Any:
        hint = "Resolve the conflict by hand."
        raise Refused(f"both sides changed {'.'.join(path)}", hint=hint, path="gates.json")

    return codec.encode(msgspec.convert(merged(old, theirs, ours, decide), model.Registry)) + b"\n"
