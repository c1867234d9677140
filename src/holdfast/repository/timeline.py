"""The timeline: past holders of worktrees, issues and nodes, and the states of issues at any instant, from the audit
trail, the issue events and the ledger.

Each function folds recorded events, and reads nothing of the present state. It keeps only what is held at once, so the
whole history can be folded. A lease or claim that was taken over had expired. One without an end is still held, or has
expired and was not taken over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.clock import parse_instant
from holdfast.issues.model import IssueEvent, IssueSummary, State
from holdfast.ledger.log import Recorded
from holdfast.store.audit import AuditEntry

WORKTREE, LEASE, ISSUE, NODE = "worktree", "lease", "issue", "node"
_ABOUT_LEASES = ("lock_acquired", "lock_stolen", "lock_released", "lock_removed", "worktree_removed")
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

    def is_between(self, begin: float, end: float) -> bool:
        """Whether the span overlaps this period."""
        return self.begin < end and (self.end is None or self.end > begin)


class _Open:
    """The spans that are open while events are folded, at most one per thing. A span that ends is yielded."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._held: dict[str, tuple[str, float]] = {}

    def begin(self, what: str, who: str, at: float, how: str = "taken over") -> Iterator[HeldSpan]:
        yield from self.end(what, at, how)
        self._held[what] = who, at

    def end(self, what: str, at: float, how: str) -> Iterator[HeldSpan]:
        if (known := self._held.pop(what, None)) is not None:
            yield HeldSpan(self._kind, what, known[0], known[1], max(at, known[1]), how)

    def left(self) -> Iterator[HeldSpan]:
        return (HeldSpan(self._kind, what, *known, None) for what, known in self._held.items())


def lease_spans(entries: Iterable[AuditEntry]) -> Iterator[HeldSpan]:
    """The holders of the lease of each worktree, and of each named lease."""
    of_worktrees, of_names = _Open(WORKTREE), _Open(LEASE)
    for each in entries:
        if each.event not in _ABOUT_LEASES or (at := _instant(each.at)) is None:
            continue
        facts, new = each.facts, each.facts.get("new")
        found = of_names if "name" in (new if isinstance(new, dict) else facts) else of_worktrees
        if each.event == "lock_acquired":
            yield from found.begin(_subject(facts), _holder(facts), at)
        elif each.event == "lock_stolen":
            expired = _instant(str(facts.get("expired_at", "")))
            if isinstance(new, dict):
                yield from found.end(_subject(new), min(at, expired or at), "expired, and was taken over")
                yield from found.begin(_subject(new), _holder(new), at)
        elif each.event == "worktree_removed":
            yield from of_worktrees.end(_subject(facts), at, "removed")
        else:
            yield from found.end(_subject(facts), at, each.event.removeprefix("lock_"))
    yield from of_worktrees.left()
    yield from of_names.left()


def issue_spans(events: Iterable[IssueEvent]) -> Iterator[HeldSpan]:
    """The holders of the claims of issues."""
    found = _Open(ISSUE)
    for each in events:
        claimed, end = each.type == "issue_claimed", _issue_end(each)
        if not (claimed or end) or (at := _instant(each.timestamp)) is None:
            continue
        if claimed:
            how = "expired, and was taken over" if each.unknown.get("taken_over_from") else "taken over"
            yield from found.begin(each.issue_id, str(each.unknown.get("assignee") or "somebody"), at, how)
        else:
            yield from found.end(each.issue_id, at, end)
    yield from found.left()


def _issue_end(event: IssueEvent) -> str:
    if event.type == "issue_state_changed" and event.unknown.get("to") not in ("in_progress", None):
        return str(event.unknown["to"])
    return _ENDS_ISSUE.get(event.type, "")


def node_spans(events: Iterable[Recorded]) -> Iterator[HeldSpan]:
    """The holders of the claims of ledger nodes."""
    found = _Open(NODE)
    for each in events:
        kind, node = str(each.event.get("type")), str(each.event.get("node_id", ""))
        if kind not in ("lock_acquired", "lock_released", "lock_reaped") or not node:
            continue
        if (at := _instant(str(each.event.get("timestamp", "")))) is None:
            continue
        if kind == "lock_acquired":
            yield from found.begin(node, str(each.event.get("owner", "somebody")), at)
        else:
            yield from found.end(node, at, "released" if kind == "lock_released" else "expired")
    yield from found.left()


def states_at(events: Iterable[IssueEvent], instant: float, now: Iterable[IssueSummary] = ()) -> dict[str, State]:
    """The state of each issue that existed at an instant. Events do not say whether a new issue waits for others, so
    `backlog` stands for `ready` too.

    `events` may be only the last ones. An issue whose first event is later was in the `from` state of that event;
    one without events has its state in `now`, if it was created by then.
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
