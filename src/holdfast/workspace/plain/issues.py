"""Issues and the work on them for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from holdfast.clock import Now
    from holdfast.issues.claims import Claimed
    from holdfast.issues.creating import Created
    from holdfast.issues.model import Issue, IssueClaim, State
    from holdfast.issues.reading import Broken, IssueSet
    from holdfast.issues.tracker import Tracker
    from holdfast.workspace.assignments import Assignment, Outcome

SHORT = 8


def summary(issue: Issue, state: State) -> dict[str, Any]:
    """What lists show of an issue; the state is the one that it is in, whatever is stored."""
    return {
        "id": issue.id,
        "short_id": issue.id[:SHORT],
        "title": issue.title,
        "state": state.value,
        "priority": issue.priority.value,
        "assignee": issue.assignee,
        "labels": list(issue.labels),
        "dependencies": list(issue.dependencies),
        "gates_required": list(issue.gates_required),
        "created_at": issue.created_at,
        "updated_at": issue.updated_at,
    }


def list_record(snapshot: IssueSet, issues: Iterable[Issue]) -> dict[str, Any]:
    """Some issues of a tracker, and what of it could not be read."""
    listed = [summary(issue, snapshot.state(issue)) for issue in issues]
    return {"issues": listed, "count": len(listed), "broken": broken_records(snapshot.broken)}


def broken_records(broken: Iterable[Broken]) -> list[dict[str, str]]:
    """What cannot be read: where it is, and what to do about it."""
    return [each.as_record() for each in broken]


def full(tracker: Tracker, issue_id: str) -> dict[str, Any]:
    """Everything that is known of one issue."""
    from holdfast.issues import rules

    issue, version = tracker.document(issue_id)
    known = msgspec.to_builtins(issue)
    known.pop("(unknown)", None)
    record = tracker.claims.state(issue_id)
    seen = tracker.transactions.with_dependencies(issue)
    return {
        **known,
        **{name: value for name, value in issue.unknown.items() if name not in known},
        "state": rules.state_of(issue, seen.issues.get).value,
        "short_id": issue.id[:SHORT],
        "blocked_by": rules.open_dependencies(issue, seen.issues.get),
        "broken": broken_records(seen.broken.values()),
        "dependents": list(tracker.dependents_of(issue_id)),
        "claim": claim_record(record.claim, tracker.transactions.moment())
        if record and record.claim
        else None,
        "version": version,
    }


def claim_record(claim: IssueClaim, moment: Now) -> dict[str, Any]:
    """A claim as others see it now: expired means that anybody may take its place."""
    left = claim.time_left(moment, for_others=True)
    return {**msgspec.to_builtins(claim), "expired": left <= 0, "time_left": round(left, 3)}


def claimed_record(claimed: Claimed) -> dict[str, Any]:
    """What a claimer is told: the issue, and what to show from now on."""
    claim = claimed.claim
    return {
        **summary(claimed.issue, claimed.issue.state),
        "claim_id": claim.claim_id,
        "token": claim.token,
        "ttl": claim.ttl,
        "expires_at": claim.expires_at,
        "taken_over_from": claimed.taken_over_from,
    }


def created_record(created: Created) -> dict[str, Any]:
    """The issue, and which dependencies were left out."""
    skipped = [{"depends_on": on, "implied_by": way} for on, way in created.implied.items()]
    return {**summary(created.issue, created.issue.state), "skipped_dependencies": skipped}


def outcome_record(outcome: Outcome, assignment: Assignment) -> dict[str, Any]:
    """What became of a piece of work."""
    return {
        "issue_id": outcome.issue.id,
        "state": outcome.issue.state.value,
        "succeeded": outcome.succeeded,
        "worktree_id": assignment.lease.worktree,
        "claim_token": assignment.claim.claim.token,
        "fencing_token": assignment.lease.token,
        "snapshot_id": outcome.snapshot_id,
        "sequence": outcome.sequence,
        "taken_over_from": assignment.taken_over_from,
    }
