"""Claims as files: in step with the ledger even after a crash, and next to files of other programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock, format_instant
from holdfast.errors import LockTimeout, NodeLocked
from holdfast.ledger.claim_files import in_nanoseconds
from holdfast.ledger.service import Claims
from tests.ledger.ledgers import open_claims
from tests.locks.workers import Line, Workers


@pytest.fixture
def claims(scratch: Path, clock: ManualClock) -> Claims:
    return open_claims(scratch, files=True, clock=clock)


def read(root: Path, node: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / f"locks/{node}.lock").read_bytes())
    return content


def put(root: Path, node: str, owner: str, at: float, expires_at: float) -> None:
    """Write a claim file as another program does."""
    (root / "locks").mkdir(exist_ok=True)
    record = {
        "node_id": node,
        "owner": owner,
        "acquired_at": in_nanoseconds(format_instant(at)),
        "expires_at": in_nanoseconds(format_instant(expires_at)),
    }
    (root / f"locks/{node}.lock").write_text(json.dumps(record))


@pytest.mark.req("LG-09")
def test_a_claim_has_a_file_with_times_in_nanoseconds(claims: Claims, scratch: Path, clock: ManualClock) -> None:
    held = claims.claim("1.2.3", "agent-1", ttl=60)

    assert read(scratch, "1.2.3") == {
        "node_id": "1.2.3",
        "owner": "agent-1",
        "acquired_at": "2023-11-14T22:13:20.000000000Z",
        "expires_at": "2023-11-14T22:14:20.000000000Z",
        "claim_id": held.claim.claim_id,
    }
    clock.advance(30)
    held.extend()
    assert read(scratch, "1.2.3")["expires_at"] == "2023-11-14T22:14:50.000000000Z"
    assert read(scratch, "1.2.3")["acquired_at"] == "2023-11-14T22:13:20.000000000Z"
    held.release()
    assert os.listdir(scratch / "locks") == [".guard"]


@pytest.mark.req("LG-09")
@pytest.mark.parametrize(
    ("instant", "shown"),
    [
        ("2024-01-15T10:30:00Z", "2024-01-15T10:30:00.000000000Z"),
        ("2024-01-15T10:30:00.5Z", "2024-01-15T10:30:00.500000000Z"),
        ("2024-01-15T10:30:00.123456789Z", "2024-01-15T10:30:00.123456789Z"),
        ("2024-01-15T12:30:00.25+02:00", "2024-01-15T10:30:00.250000000Z"),
    ],
)
def test_timestamps_have_nine_fractional_digits(instant: str, shown: str) -> None:
    assert in_nanoseconds(instant) == shown


def test_without_the_setting_there_are_no_files(scratch: Path) -> None:
    open_claims(scratch).claim("1", "a")
    assert not (scratch / "locks").exists()


@pytest.mark.req("LG-10")
def test_reaping_removes_the_file_and_appends_one_event(claims: Claims, scratch: Path, clock: ManualClock) -> None:
    claims.claim("1", "a", ttl=10)
    clock.advance(11)
    assert [each.owner for each in claims.reap()] == ["a"]
    assert not (scratch / "locks/1.lock").exists()
    assert [each.event["type"] for each in claims.ledger.events()] == ["lock_acquired", "lock_reaped"]


@pytest.mark.req("LG-10")
def test_an_expired_file_of_another_program_is_reaped_once(claims: Claims, scratch: Path, clock: ManualClock) -> None:
    put(scratch, "1.7", "go-agent", clock.wall(), clock.wall() + 10)
    claims.reap()
    assert claims.ledger.sequence == 0
    clock.advance(11)
    content = (scratch / "locks/1.7.lock").read_bytes()
    claims.reap()
    (scratch / "locks/1.7.lock").write_bytes(content)  # the reaper was killed before it removed the file
    claims.reap()
    assert not (scratch / "locks/1.7.lock").exists()
    (reaped,) = (each.event for each in claims.ledger.events())
    assert (reaped["type"], reaped["node_id"], reaped["owner"]) == ("lock_reaped", "1.7", "go-agent")


def test_a_file_of_another_program_is_respected_until_it_expires(
    claims: Claims, scratch: Path, clock: ManualClock
) -> None:
    put(scratch, "1", "go-agent", clock.wall(), clock.wall() + 10)
    with pytest.raises(NodeLocked, match="go-agent"):
        claims.claim("1", "a")
    with pytest.raises(LockTimeout, match="go-agent"):
        claims.claim("1", "a", wait=0.01)
    clock.advance(11)
    assert claims.claim("1", "a").owner == "a"
    assert read(scratch, "1")["owner"] == "a"


def test_stale_files_of_a_killed_process_are_brought_up_to_date(
    claims: Claims, scratch: Path, clock: ManualClock
) -> None:
    silent = open_claims(scratch, clock=clock)  # writes no files, as if killed right after its event
    claims.claim("1", "a")
    silent.release("1", "a")
    silent.claim("2", "b", ttl=60)
    assert sorted(path.name for path in (scratch / "locks").glob("*.lock")) == ["1.lock"]
    assert claims.claim("1", "c").owner == "c"  # the ledger decides, not the file
    claims.release("1", "c")
    claims.extend("2", "b")
    assert [path.name for path in (scratch / "locks").glob("*.lock")] == ["2.lock"]


def test_unrecognised_files_in_locks_are_left_alone(claims: Claims, scratch: Path) -> None:
    (scratch / "locks").mkdir()
    strange = {"1.lock": "{", "2.lock": '{"node_id":"3"}', "README.lock": "x", "notes": "y", "4.lock": "[]"}
    for name, content in strange.items():
        (scratch / "locks" / name).write_text(content)
    claims.reap()
    claims.claim("5", "a").release()
    found = {path.name: path.read_text() for path in (scratch / "locks").iterdir() if path.name != ".guard"}
    assert found == strange


@pytest.mark.req("LG-09", "LG-10")
@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_files_stay_in_step_while_processes_claim_release_and_reap(scratch: Path, workers: Workers) -> None:
    def work(line: Line) -> None:
        claims = open_claims(scratch, files=True)
        for turn in range(12):
            claims.reap()
            node = f"1.{turn % 3 + 1}"
            try:
                held = claims.claim(node, f"agent-{os.getpid()}")
            except NodeLocked:
                continue
            if turn < 10:
                held.release()

    running = workers.start_many(6, work)
    assert [each.wait() for each in running] == [0] * 6
    claims = open_claims(scratch, files=True)
    active = {each.node_id: each.claim_id for each in claims.active()}
    found = {path.stem: json.loads(path.read_bytes())["claim_id"] for path in (scratch / "locks").glob("*.lock")}
    assert found == active
