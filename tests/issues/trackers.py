"""Helpers shared by the tests of issues: trackers on files, and checks of their state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.issues.claims import Claimed
from holdfast.issues.creating import NewIssue
from holdfast.issues.graph import in_order
from holdfast.issues.model import ClaimId, Issue
from holdfast.issues.tracker import Tracker
from holdfast.issues.validate import examine
from holdfast.locks.retry import RetryConfig
from holdfast.store.files import FileStore
from holdfast.store.model import Store

RETRIES = RetryConfig(max_attempts=30, initial_delay=0.001, max_delay=0.05)


def tracker_at(directory: Path, actor: str = "agent:tester") -> Tracker:
    """A tracker on the files of a directory, with a long lock timeout and many retries."""
    return tracker_on(FileStore(directory, timeout=60.0), actor)


def tracker_on(store: Store, actor: str = "agent:tester", *, clock: Clock = SYSTEM_CLOCK) -> Tracker:
    return Tracker(store, actor=actor, retry=RETRIES, clock=clock)


def create_issues(tracker: Tracker, *titles: str) -> list[str]:
    """Create issues with these titles; return their ids."""
    return [each.issue.id for each in tracker.create_all([NewIssue(title=title) for title in titles])]


def events_of(tracker: Tracker) -> Counter[str]:
    """The number of events of each type."""
    return Counter(entry.record.type for entry in tracker.events())


def claim_id_of(claimed: Claimed) -> ClaimId:
    return ClaimId.parse(claimed.claim.claim_id)


def problems(tracker: Tracker) -> list[str]:
    """Every problem that `examine` finds, one line each."""
    return [f"{each.code} {each.subject}: {each.message}" for each in examine(tracker)]


def cycles(issues: list[Issue]) -> list[list[str]]:
    """The dependency cycles among these issues."""
    return in_order({each.id: each.dependencies for each in issues})[1]
