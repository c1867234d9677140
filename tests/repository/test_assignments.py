"""Assignments: what one who has lost its work can still record, wherever it was stopped. Nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    AgentContext,
    AssignmentOptions,
    NewIssue,
    Repository,
    init_ledger,
    initialise,
    open_tracker,
    take_work,
)
from holdfast.errors import FencingMismatch
from holdfast.ledger.log import Ledger, Recorded


class Stopped(Ledger):
    """A ledger whose user is stopped just before its first append, while another one does its work."""

    def __init__(self, ledger: Ledger, workshop: AgentContext) -> None:
        super().__init__(ledger.store)
        self._other = workshop
        self._stopped = False

    def append_if_sequence(self, event: Mapping[str, Any], expected: int) -> Recorded:
        if not self._stopped:
            self._stopped = True
            tracker = self._other.tracker
            record = tracker.claims.state(event["issue_id"])
            assert record is not None
            assert record.claim is not None
            give_back(self._other, record.claim.claim_id)
            with take_work(self._other, AssignmentOptions(worktree="another")) as work:
                work.succeed()
        return super().append_if_sequence(event, expected)


def give_back(workshop: AgentContext, claim_id: str) -> None:
    """As if the claim had run out."""
    from holdfast.issues.model import ClaimId

    shown = ClaimId.parse(claim_id)
    workshop.tracker.claims.release(shown.issue_id, shown)


@pytest.mark.parametrize("how", ["succeed", "fail"])
def test_one_who_was_stopped_before_its_record_records_nothing_after_the_next_one(
    tmp_path: Path, how: str
) -> None:
    initialise(tmp_path)
    ledger = init_ledger(tmp_path).ledger
    workshops = [
        AgentContext(Repository(tmp_path), open_tracker(tmp_path, actor=f"agent:{name}"), ledger)
        for name in "ab"
    ]
    mine, other = workshops
    mine.tracker.initialise()
    issue = mine.tracker.create(NewIssue(title="x")).id

    stopped = mine._replace(ledger=Stopped(ledger, other))
    with take_work(stopped, AssignmentOptions()) as work, pytest.raises(FencingMismatch):
        work.succeed() if how == "succeed" else work.fail("it did not work")

    assert [(each.event["type"], each.event["claim_token"]) for each in ledger.events()] == [("work_done", 2)]
    assert mine.tracker.issue(issue).state == "done"
