"""Claims of issues when wall clocks are set or disagree: they expire as leases do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.clock import SKEW, ClockReading, ManualClock
from holdfast.errors import IssueClaimed, LockExpired
from holdfast.issues.model import CLAIMS, ClaimId, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.locks.identity import boot_clock_id
from holdfast.store.model import Decision, Replace, Store, View
from tests.cli.commands import data, error, holdfast
from tests.issues.trackers import claim_id_of, create_issues, tracker_on
from tests.support.wall_clock import WallClock, settable_wall_clock

TTL = 30.0
HOUR = 3600.0
on_linux = pytest.mark.skipif(not boot_clock_id(), reason="this system does not name its boot clock")


@pytest.fixture
def remote(store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A tracker on another machine, or on this one after a reboot: its boot clock differs."""
    other = tracker_on(store, "agent:there", clock=clock)
    reading = ClockReading("another boot", clock.boot() + 5000)
    monkeypatch.setattr(other.transactions, "reading", lambda: reading._replace(boot=clock.boot() + 5000), raising=True)
    return other


@pytest.fixture
def issue_id(tracker: Tracker) -> str:
    [issue_id] = create_issues(tracker, "work")
    return issue_id


def attempt(tracker: Tracker, issue_id: str, ttl: float = TTL) -> ClaimId:
    return claim_id_of(tracker.claims.claim(issue_id, tracker.claims.request(ttl=ttl)))


@on_linux
@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_setting_the_wall_clock_neither_ends_nor_prolongs_a_claim_on_the_same_machine(
    tracker: Tracker, clock: ManualClock, issue_id: str, step: float
) -> None:
    claim = attempt(tracker, issue_id)
    clock.step_wall(step)
    clock.advance(TTL - 1)
    assert tracker.snapshot().ready() == []
    assert not tracker.claims.reclaim(issue_id)
    with pytest.raises(IssueClaimed, match="expires in 1s"):
        attempt(tracker, issue_id)
    with pytest.raises(IssueClaimed):
        tracker.update(issue_id, Update(state=State.DONE))
    clock.advance(1)
    with pytest.raises(LockExpired, match="expired 0ms ago"):
        tracker.update(issue_id, Update(state=State.DONE), claim=claim)
    assert [each.id for each in tracker.snapshot().ready()] == [issue_id]
    assert attempt(tracker, issue_id).token == claim.token + 1


@on_linux
@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_claim_is_renewed_as_if_the_wall_clock_had_not_been_set(
    tracker: Tracker, clock: ManualClock, issue_id: str, step: float
) -> None:
    claim = attempt(tracker, issue_id)
    for _ in range(3):
        clock.advance(TTL - 1)
        clock.step_wall(step)
        tracker.claims.renew(claim)
    clock.advance(TTL - 1)
    with pytest.raises(IssueClaimed):
        attempt(tracker, issue_id)
    assert tracker.update(issue_id, Update(state=State.DONE), claim=claim).state is State.DONE


def test_another_machine_judges_a_claim_by_the_store_clock_plus_a_margin(
    tracker: Tracker, remote: Tracker, clock: ManualClock, issue_id: str
) -> None:
    claim = attempt(tracker, issue_id)
    clock.advance(TTL)
    with pytest.raises(LockExpired):  # the holder stops at once
        tracker.claims.renew(claim)
    with pytest.raises(IssueClaimed):  # others wait for the allowed clock skew as well
        attempt(remote, issue_id)
    clock.advance(SKEW)
    assert attempt(remote, issue_id).token == claim.token + 1


def test_an_expired_claim_can_be_released_from_another_machine(
    tracker: Tracker, remote: Tracker, clock: ManualClock, issue_id: str
) -> None:
    claim = attempt(tracker, issue_id)
    clock.advance(TTL)
    with pytest.raises(IssueClaimed):
        remote.claims.release(issue_id)
    assert remote.claims.release(issue_id, claim).state is State.READY


@pytest.mark.parametrize("step", [0.0, -HOUR])
def test_a_claim_of_an_earlier_version_expires_by_the_wall_clock(
    tracker: Tracker, clock: ManualClock, issue_id: str, step: float
) -> None:
    claim, key = attempt(tracker, issue_id), CLAIMS.key(issue_id)

    def without_mark(view: View, now: float) -> Decision[None]:
        record = view.get(key)
        assert record is not None
        assert record.claim is not None
        old = msgspec.structs.replace(record.claim, boot_expires_at=None)
        return Decision([Replace(key, msgspec.structs.replace(record, claim=old))], None)

    tracker.store.transact([key], without_mark)
    clock.step_wall(step)
    clock.advance(TTL - 1)
    with pytest.raises(IssueClaimed):
        attempt(tracker, issue_id)
    clock.advance(1 + SKEW - step)
    assert attempt(tracker, issue_id).token == claim.token + 1


def test_a_claim_file_of_an_earlier_version_can_be_read() -> None:
    old = b"""{
  "issue_id": "x",
  "token": 3,
  "claim": {
    "claim_id": "x.3.s",
    "assignee": "agent:a",
    "token": 3,
    "ttl": 60.0,
    "claimed_at": "2026-01-01T00:00:00.000000Z",
    "renewed_at": "2026-01-01T00:00:00.000000Z",
    "expires_at": "2026-01-01T00:01:00.000000Z",
    "purpose": "",
    "holder": {}
  }
}
"""
    claim = CLAIMS.key("x").codec.decode(old, "x.json").claim
    assert claim is not None
    assert (claim.token, claim.boot_expires_at) == (3, None)


# --- Real processes whose wall clock is set ---------------------------------------------------------


@pytest.fixture
def wall_clock(tmp_path: Path) -> WallClock:
    return settable_wall_clock(tmp_path)


def test_processes_with_different_wall_clocks_agree_on_the_holder_of_an_issue(
    tmp_path: Path, wall_clock: WallClock
) -> None:
    assert holdfast("issue", "init", cwd=tmp_path).returncode == 0
    issue = holdfast("issue", "create", "work", "--field", "id", cwd=tmp_path).stdout.strip()
    held = data(holdfast("issue", "claim", issue, "--ttl", "10m", "--json", cwd=tmp_path))
    shifted = wall_clock.environment

    wall_clock.set(HOUR)
    refused = holdfast("issue", "claim", issue, "--json", cwd=tmp_path, env=shifted)
    assert error(refused)["code"] == "E_ISSUE_CLAIMED"
    assert 0 < error(refused)["time_left"] <= 600
    assert holdfast("ready", "--field", "id", cwd=tmp_path, env=shifted).stdout == ""
    shown = data(holdfast("issue", "show", issue, "--json", cwd=tmp_path, env=shifted))["claim"]
    assert (shown["expired"], 0 < shown["time_left"] <= 600) == (False, True)
    mine = ("--claim", held["claim_id"])
    beat = ("issue", "heartbeat", issue, "--ttl", "200ms", *mine)
    assert holdfast(*beat, cwd=tmp_path, env=shifted).returncode == 0

    wall_clock.set(-HOUR)
    again = holdfast("issue", "claim-next", "--wait", "60s", "--json", cwd=tmp_path, env=shifted)
    assert data(again)["token"] == held["token"] + 1
