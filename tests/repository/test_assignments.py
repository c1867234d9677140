"""Assignments: an agent that lost its claim can record nothing, wherever it was paused."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    AssignmentOptions,
    NewIssue,
    Repository,
    Tracker,
    init_ledger,
    open_tracker,
    take_work,
)
from holdfast.errors import ConsistencyUnavailable, FencingMismatch, LockExpired, LockNotHeld, Refused
from holdfast.ledger.log import Ledger, Recorded
from holdfast.repository import agent, worktree_changes
from holdfast.repository.context import Consistency, Descriptor, Proof
from holdfast.repository.retention import Policy
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.repository.worktree_changes import Removed
from holdfast.repository.worktrees import settle
from tests.support.homes import make_repository

pytestmark = pytest.mark.both_homes


class PausedLedger(Ledger):
    """A ledger whose user is paused just before its first append while another agent does the work."""

    def __init__(self, ledger: Ledger, repository: Repository, tracker: Tracker) -> None:
        super().__init__(ledger.store)
        self._ledger = ledger
        self._repository = repository
        self._tracker = tracker
        self._paused = False

    def append_if_sequence(self, event: Mapping[str, Any], expected: int) -> Recorded:
        if not self._paused:
            self._paused = True
            tracker = self._tracker
            record = tracker.claims.state(event["issue_id"])
            assert record is not None
            assert record.claim is not None
            release(tracker, record.claim.claim_id)
            options = AssignmentOptions(worktree="another")
            with take_work(self._repository, tracker, options, ledger=self._ledger) as work:
                work.succeed()
        return super().append_if_sequence(event, expected)


def release(tracker: Tracker, claim_id: str) -> None:
    """Stand in for the expiry of the claim."""
    from holdfast.issues.model import ClaimId

    shown = ClaimId.parse(claim_id)
    tracker.claims.release(shown.issue_id, shown)


@pytest.fixture
def shop(tmp_path: Path) -> tuple[Repository, Tracker, Ledger, str]:
    """A repository with a ledger and one issue."""
    make_repository(tmp_path)
    tracker = open_tracker(tmp_path, actor="agent:a")
    tracker.initialise()
    return Repository(tmp_path), tracker, init_ledger(tmp_path).ledger, tracker.create(NewIssue(title="x")).id


def prevent_snapshots(repository: Repository) -> None:
    """Put a file where the directory for captures would be."""
    scratch = repository.root / ".jvs/tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.write_text("in the way")


@pytest.mark.parametrize(
    ("asked", "refusals", "attempts", "level"),
    [
        (None, 1, [None, None], "quiesced"),
        (None, 3, [None, None, None, Consistency.BEST_EFFORT], "best_effort"),
        (Consistency.QUIESCED, 3, [Consistency.QUIESCED] * 3, None),
    ],
)
def test_the_snapshot_of_the_work_is_taken_again_and_then_as_best_effort(
    shop: tuple[Repository, Tracker, Ledger, str],
    monkeypatch: pytest.MonkeyPatch,
    asked: Consistency | None,
    refusals: int,
    attempts: list[Consistency | None],
    level: str | None,
) -> None:
    repository, tracker, ledger, _ = shop
    seen: list[Consistency | None] = []
    take = repository.snapshots.take_if_changed

    def refused_at_first(worktree: str, proof: Proof | None, options: SnapshotOptions) -> Descriptor | None:
        seen.append(options.consistency)
        if len(seen) <= refusals:
            raise ConsistencyUnavailable("something changed")
        return take(worktree, proof, options)

    monkeypatch.setattr(agent, "CAPTURE_PAUSE", 0.0)
    with take_work(repository, tracker, AssignmentOptions(consistency=asked), ledger=ledger) as work:
        (work.path / "result").write_text("work")
        monkeypatch.setattr(repository.snapshots, "take_if_changed", refused_at_first)
        outcome = work.succeed()

    assert (outcome.issue.state.value, seen) == ("done", attempts)
    assert (outcome.warning is not None) == (level == "best_effort")
    if level is None:
        assert isinstance(outcome.not_saved, ConsistencyUnavailable)
    else:
        assert outcome.snapshot_id is not None
        assert repository.snapshots.named(outcome.snapshot_id).consistency_level.value == level


@pytest.mark.parametrize(("how", "state", "kind"), [("succeed", "done", "work_done"), ("fail", "ready", "work_failed")])
def test_an_outcome_stands_although_no_snapshot_can_be_taken(
    shop: tuple[Repository, Tracker, Ledger, str], how: str, state: str, kind: str
) -> None:
    repository, tracker, ledger, issue = shop
    with take_work(repository, tracker, AssignmentOptions(), ledger=ledger) as work:
        (work.path / "result").write_text("precious")
        prevent_snapshots(repository)
        outcome = work.succeed() if how == "succeed" else work.fail("it did not work")

    assert outcome.not_saved is not None
    assert outcome.snapshot_id is None
    assert tracker.issue(issue).state == state
    [event] = [each.event for each in ledger.events()]
    assert (event["type"], event["snapshot_id"], event["not_saved"]) == (kind, None, outcome.not_saved.code)
    assert (work.path / "result").read_text() == "precious"


def test_a_worktree_with_the_only_copy_of_the_work_stays(shop: tuple[Repository, Tracker, Ledger, str]) -> None:
    repository, tracker, ledger, _ = shop
    with take_work(repository, tracker, AssignmentOptions(), ledger=ledger) as work:
        (work.path / "result").write_text("precious")
        prevent_snapshots(repository)
        work.succeed()
        (repository.root / ".jvs/tmp").unlink()
        with pytest.raises(Refused, match="the only copy of the work"):
            work.remove_worktree()

    assert (work.path / "result").read_text() == "precious"


def test_an_interrupted_removal_of_the_worktree_leaves_the_work_protected(
    shop: tuple[Repository, Tracker, Ledger, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, tracker, _, _ = shop
    repository.gc.set_policy(Policy(keep_last=1))

    def interrupted(context: object, operation: object) -> Removed:
        raise KeyboardInterrupt

    with take_work(repository, tracker, AssignmentOptions()) as work:
        (work.path / "result").write_text("precious")
        saved = work.succeed().snapshot_id
        with monkeypatch.context() as patched:
            patched.setattr(worktree_changes, "finish_remove", interrupted)  # it is decided, and others finish it
            with pytest.raises(KeyboardInterrupt):
                work.remove_worktree()
    settle(repository.context, work.lease.worktree)
    assert not work.path.exists()
    assert repository.gc.plan().plan.snapshots == ()
    assert saved in [pin.snapshot_id for pin in repository.snapshots.pins()]


def test_work_whose_lease_is_lost_does_not_count(shop: tuple[Repository, Tracker, Ledger, str]) -> None:
    repository, tracker, ledger, issue = shop
    with take_work(repository, tracker, AssignmentOptions(), ledger=ledger) as work:
        (work.path / "result").write_text("late")
        repository.leases.release(work.lease.worktree, work.lease.lock_id)
        repository.lease(work.lease.worktree)
        with pytest.raises((LockNotHeld, LockExpired, FencingMismatch)):
            work.succeed()

    assert tracker.issue(issue).state == "ready"
    assert list(ledger.events()) == []


@pytest.mark.parametrize("how", ["succeed", "fail"])
def test_an_agent_paused_before_it_records_cannot_record_after_its_successor(tmp_path: Path, how: str) -> None:
    make_repository(tmp_path)
    ledger = init_ledger(tmp_path).ledger
    tracker, other = (open_tracker(tmp_path, actor=f"agent:{name}") for name in "ab")
    tracker.initialise()
    issue = tracker.create(NewIssue(title="x")).id

    paused = PausedLedger(ledger, Repository(tmp_path), other)
    taken = take_work(Repository(tmp_path), tracker, AssignmentOptions(), ledger=paused)
    with taken as work, pytest.raises(FencingMismatch):
        work.succeed() if how == "succeed" else work.fail("it did not work")

    assert [(each.event["type"], each.event["claim_token"]) for each in ledger.events()] == [("work_done", 2)]
    assert tracker.issue(issue).state == "done"
