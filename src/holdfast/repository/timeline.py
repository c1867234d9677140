"""The timeline: past holders of worktrees, issues and nodes, and the states of issues at any moment, from the audit
trail, the issue events and the ledger.

Each function folds recorded events, and reads nothing of the present state. A lease or claim that was taken over had
expired. One without an end is still held, or has expired and was not taken over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.clock import parse_instant
from holdfast.issues.model import IssueEvent, IssueSummary, State
from holdfast.ledger.log import Recorded
from holdfast.store.audit import AuditEntry

WORKTREE, LEASE, ISSUE, NODE = "worktree", "lease", "issue", "node"
_ENDS_ISSUE = {
    "issue_released": "released",
    "issue_completed": "finished",
    "issue_landed": "landed",
    "issue_not_landed": "given back",
    "issue_deleted": "deleted",
}


class HeldSpan(NamedTuple):
    """The time during which one holder held one thing. `end` is None if no end was recorded; `how` says how it
    ended."""

    kind: str
    what: str
    who: str
    begin: float
    end: float | None
    how: str = ""

    def is_at(self, instant: float) -> bool:
        return self.begin <= instant and (self.end is None or instant < self.end)


class _Open:
    """Spans while they are put together: at most one per thing is open."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: dict[str, tuple[str, float]] = {}
        self.ended: list[HeldSpan] = []

    def begin(self, what: str, who: str, at: float, how: str = "taken over") -> None:
        self.end(what, at, how)
        self._open[what] = who, at

    def end(self, what: str, at: float, how: str) -> None:
        if (known := self._open.pop(what, None)) is not None:
            self.ended.append(HeldSpan(self._kind, what, known[0], known[1], max(at, known[1]), how))

    def all(self) -> list[HeldSpan]:
        return [*self.ended, *(HeldSpan(self._kind, what, *known, None) for what, known in self._open.items())]


def lease_spans(entries: Iterable[AuditEntry]) -> list[HeldSpan]:
    """Who held the lease of each worktree, and each named lease."""
    of_worktrees, of_names = _Open(WORKTREE), _Open(LEASE)
    for each in entries:
        at, facts = _instant(each.at), each.facts
        if at is None:
            continue
        new = facts.get("new")
        found = of_names if "name" in (new if isinstance(new, dict) else facts) else of_worktrees
        if each.event == "lock_acquired":
            found.begin(_subject(facts), _holder(facts), at)
        elif each.event == "lock_stolen":
            expired = _instant(str(facts.get("expired_at", "")))
            if isinstance(new, dict):
                found.end(_subject(new), min(at, expired or at), "expired, and was taken over")
                found.begin(_subject(new), _holder(new), at)
        elif each.event in ("lock_released", "lock_removed"):
            found.end(_subject(facts), at, each.event.removeprefix("lock_"))
        elif each.event == "worktree_removed":
            of_worktrees.end(_subject(facts), at, "removed")
    return [*of_worktrees.all(), *of_names.all()]


def issue_spans(events: Iterable[IssueEvent]) -> list[HeldSpan]:
    """Who had claimed each issue."""
    found = _Open(ISSUE)
    for each in events:
        at = _instant(each.timestamp)
        if at is None:
            continue
        if each.type == "issue_claimed":
            how = "expired, and was taken over" if each.unknown.get("taken_over_from") else "taken over"
            found.begin(each.issue_id, str(each.unknown.get("assignee") or "somebody"), at, how)
        elif how := _issue_end(each):
            found.end(each.issue_id, at, how)
    return found.all()


def _issue_end(event: IssueEvent) -> str:
    if event.type == "issue_state_changed" and event.unknown.get("to") not in ("in_progress", None):
        return str(event.unknown["to"])
    return _ENDS_ISSUE.get(event.type, "")


def node_spans(events: Iterable[Recorded]) -> list[HeldSpan]:
    """Who had claimed each node of the ledger."""
    found = _Open(NODE)
    for each in events:
        kind, node = str(each.event.get("type")), str(each.event.get("node_id", ""))
        at = _instant(str(each.event.get("timestamp", "")))
        if at is None or not node:
            continue
        if kind == "lock_acquired":
            found.begin(node, str(each.event.get("owner", "somebody")), at)
        elif kind in ("lock_released", "lock_reaped"):
            found.end(node, at, "released" if kind == "lock_released" else "expired")
    return found.all()


def held_at(spans: Iterable[HeldSpan], instant: float) -> Iterator[HeldSpan]:
    """What was held at an instant."""
    return (each for each in spans if each.is_at(instant))


def states_at(events: Iterable[IssueEvent], instant: float, now: Iterable[IssueSummary] = ()) -> dict[str, State]:
    """The state of each issue that existed at an instant. Events do not say whether a new issue waits for others, so
    `backlog` stands for `ready` too.

    `events` may be only the last ones. An issue whose first event is a later one was in the state that it changed from;
    one without any is as it is in `now`, if it was created by then.
    """
    found: dict[str, State] = {}
    seen: set[str] = set()
    for each in events:
        at, name = _instant(each.timestamp), each.issue_id
        if at is None or not name:
            continue
        if at <= instant:
            _follow(found, each)
        elif name not in seen and (before := _state(each.unknown.get("from"))) is not None:
            found[name] = before
        seen.add(name)
    for issue in now:
        if issue.id not in seen and (_instant(issue.created_at) or 0.0) <= instant:
            found[issue.id] = issue.state
    return {name: State.BACKLOG if state is State.READY else state for name, state in found.items()}


def _follow(states: dict[str, State], event: IssueEvent) -> None:
    """Change the state of an issue as an event says."""
    name = event.issue_id
    if event.type == "issue_created":
        states[name] = State.BACKLOG
    elif event.type == "issue_claimed":
        states[name] = State.IN_PROGRESS
    elif event.type == "issue_released" and states.get(name) is State.IN_PROGRESS:
        states[name] = State.BACKLOG
    elif event.type == "issue_deleted":
        states.pop(name, None)
    elif event.type == "issue_state_changed" and (state := _state(event.unknown.get("to"))) is not None:
        states[name] = state


def _state(value: object) -> State | None:
    return State(value) if isinstance(value, str) and value in tuple(State) else None


def _instant(text: str) -> float | None:
    try:
        return parse_instant(text)
    except ValueError:
        return None


def _subject(facts: Mapping[str, Any]) -> str:
    return str(facts.get("worktree_id") or facts.get("name") or facts.get("worktree") or "")


def _holder(facts: Mapping[str, Any]) -> str:
    return str(facts.get("actor") or facts.get("holder_id") or "somebody")
