"""What the tests of issues share: trackers on real files, and questions that they ask of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.issues.claims import Claimed
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId, Issue
from holdfast.issues.rules import in_order
from holdfast.issues.tracker import Tracker
from holdfast.issues.validate import examine
from holdfast.locks.retry import RetryConfig
from holdfast.store.files import FileStore
from holdfast.store.model import Store

PATIENT = RetryConfig(max_attempts=30, initial_delay=0.001, max_delay=0.05)


def tracker_at(directory: Path, actor: str = "agent:tester") -> Tracker:
    """A tracker on the files of a directory, patient with others."""
    return tracker_on(FileStore(directory, timeout=60.0), actor)


def tracker_on(store: Store, actor: str = "agent:tester", *, clock: Clock = SYSTEM_CLOCK) -> Tracker:
    return Tracker(store, actor=actor, retry=PATIENT, clock=clock)


def made(tracker: Tracker, *titles: str) -> list[str]:
    """The ids of new issues with these titles."""
    return [each.issue.id for each in tracker.create_all([NewIssue(title=title) for title in titles])]


def events_of(tracker: Tracker) -> Counter[str]:
    """How often each type of event happened."""
    return Counter(entry.record.type for entry in tracker.events())


def proof(claimed: Claimed) -> ClaimId:
    """What a claimer shows."""
    return ClaimId.parse(claimed.claim.claim_id)


def problems(tracker: Tracker) -> list[str]:
    """All that is wrong with a tracker."""
    return [f"{each.code} {each.subject}: {each.message}" for each in examine(tracker)]


def circles(issues: list[Issue]) -> list[list[str]]:
    """The circles among them."""
    return in_order({each.id: each.dependencies for each in issues})[1]
