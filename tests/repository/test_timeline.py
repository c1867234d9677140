"""The timeline: spans from what was recorded, and what was held at a past moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import format_instant, parse_instant
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId, Issue, IssueEvent, IssueSummary, State
from holdfast.issues.tracker import Update
from holdfast.ledger.log import Recorded
from holdfast.repository.init import initialise
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from holdfast.repository.timeline import HeldSpan, issue_spans, lease_spans, node_spans, states_at
from holdfast.store.audit import AuditEntry


def entry(at: float, event: str, **facts: object) -> AuditEntry:
    return AuditEntry(1, format_instant(at), event, "somebody", facts, "")


def lease(worktree: str, holder: str) -> dict[str, object]:
    return {"worktree_id": worktree, "holder_id": holder, "purpose": ""}


def test_a_lease_lasts_until_it_is_released() -> None:
    entries = [entry(10, "lock_acquired", **lease("main", "a")), entry(20, "lock_released", **lease("main", "a"))]
    assert list(lease_spans(entries)) == [HeldSpan("worktree", "main", "a", 10.0, 20.0, "released")]


def test_a_stolen_lease_ends_when_it_expired() -> None:
    stolen = {"old": lease("main", "a"), "new": lease("main", "b"), "expired_at": format_instant(15)}
    found = lease_spans([entry(10, "lock_acquired", **lease("main", "a")), entry(20, "lock_stolen", **stolen)])
    assert list(found) == [
        HeldSpan("worktree", "main", "a", 10.0, 15.0, "expired, and was taken over"),
        HeldSpan("worktree", "main", "b", 20.0, None),
    ]


def test_a_named_lease_is_not_a_worktree_of_that_name() -> None:
    named = {"name": "main", "holder_id": "a", "purpose": "landing"}
    found = lease_spans([entry(1, "lock_acquired", **lease("main", "b")), entry(2, "lock_acquired", **named)])
    assert [(each.kind, each.who, each.end) for each in found] == [("worktree", "b", None), ("lease", "a", None)]


def event(at: float, kind: str, **facts: object) -> IssueEvent:
    return IssueEvent(type=kind, issue_id="x", timestamp=format_instant(at), unknown=dict(facts))


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (event(9, "issue_released"), "released"),
        (event(9, "issue_completed"), "finished"),
        (event(9, "issue_state_changed", to="rejected"), "rejected"),
        (event(9, "issue_claimed", assignee="b", taken_over_from="a"), "expired, and was taken over"),
    ],
)
def test_a_claim_ends_in_several_ways(last: IssueEvent, how: str) -> None:
    first = next(issue_spans([event(1, "issue_claimed", assignee="a"), event(2, "issue_updated"), last]))
    assert first == HeldSpan("issue", "x", "a", 1.0, 9.0, how)


def test_a_node_of_the_ledger_is_held_until_it_is_reaped() -> None:
    def recorded(at: float, kind: str) -> Recorded:
        return Recorded(1, {"type": kind, "node_id": "1.2", "owner": "a", "timestamp": format_instant(at)})

    found = node_spans([recorded(1, "lock_acquired"), recorded(3, "lock_reaped"), recorded(4, "note")])
    assert list(found) == [HeldSpan("node", "1.2", "a", 1.0, 3.0, "expired")]


def test_what_was_held_at_a_moment() -> None:
    ended, lasting = HeldSpan("issue", "x", "a", 1.0, 3.0), HeldSpan("issue", "y", "b", 2.0, None)
    assert [ended.is_at(each) for each in (0.5, 1.0, 2.5, 3.0)] == [False, True, True, False]
    assert [lasting.is_at(each) for each in (1.5, 2.0, 99.0)] == [False, True, True]
    assert [ended.is_between(*each) for each in ((0.0, 1.5), (2.0, 2.5), (3.0, 4.0))] == [True, True, False]
    assert [lasting.is_between(*each) for each in ((0.0, 2.0), (50.0, 60.0))] == [False, True]


def test_a_long_history_is_folded_without_being_kept() -> None:
    """Ten thousand claims of one issue: each is given out before the next one is read."""
    read = 0

    def history() -> Iterator[IssueEvent]:
        nonlocal read
        for read in range(10_000):
            yield event(read, "issue_claimed", assignee=f"agent-{read}")

    for number, span in enumerate(issue_spans(history())):
        assert span.who == f"agent-{number}"
        assert read <= number + 1


def test_the_states_of_issues_at_every_moment_are_those_of_the_tracker(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path, actor="human:ada")
    tracker.initialise()
    first, second, third = (tracker.create(NewIssue(title=each)).id for each in ("one", "two", "three"))
    seen: list[tuple[float, dict[str, State]]] = []

    def look() -> None:
        *_, last = tracker.events()
        is_ready = {State.READY: State.BACKLOG}
        states = {each.id: is_ready.get(each.state, each.state) for each in tracker.summaries()}
        seen.append((parse_instant(last.record.timestamp), states))

    look()
    claimed = tracker.claims.claim(first, tracker.claims.request("agent:a", ttl=60.0))
    look()
    tracker.claims.release(first, ClaimId.parse(claimed.claim.claim_id), reason="")
    look()
    for issue_id, state in ((first, State.DONE), (second, State.IN_PROGRESS), (third, State.REJECTED)):
        tracker.update(issue_id, Update(state=state))
        look()
    tracker.delete(third)
    look()
    events = [each.record for each in tracker.events()]
    assert len({at for at, _ in seen}) == len(seen)
    assert [states_at(events, at) for at, _ in seen] == [states for _, states in seen]
    assert states_at(events, seen[0][0] - 3600) == {}


def test_an_issue_is_as_its_later_events_and_the_present_say() -> None:
    later = [event(9, "issue_state_changed", **{"from": "gated", "to": "done"})]
    assert states_at(later, 5) == {"x": State.GATED}
    assert states_at(later, 9) == {"x": State.DONE}
    assert states_at([event(9, "issue_created"), *later], 5) == {}
    adopted = Issue(id="y", title="", state=State.DONE, created_at=format_instant(4))
    assert states_at(later, 5, [IssueSummary.of(adopted)]) == {"x": State.GATED, "y": State.DONE}
    assert states_at(later, 3, [IssueSummary.of(adopted)]) == {"x": State.GATED}


def test_unreadable_times_are_left_out() -> None:
    assert list(issue_spans([IssueEvent(type="issue_claimed", issue_id="x", timestamp="yesterday")])) == []


def test_the_audit_trail_of_a_repository_has_what_the_timeline_needs(tmp_path: Path) -> None:
    initialise(tmp_path / "repo")
    with Repository(tmp_path / "repo", actor="agent:a") as repository:
        with repository.lease(purpose="work"):
            pass
        found = list(lease_spans(repository.audit().read()))
    assert [(each.what, each.who, each.how) for each in found] == [("main", "agent:a", "released")]
