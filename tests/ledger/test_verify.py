"""Verification of a ledger: each kind of damage is found and named, with a remedy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import ManualClock, format_instant
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import Ledger
from holdfast.ledger.projection import VERSION, ClaimState
from holdfast.ledger.verify import LedgerReport, verify
from holdfast.store.layout import CHECKPOINTS
from holdfast.store.memory import MemoryStore
from tests.ledger.ledgers import acquired, append_raw, fill, open_claims, open_ledger, put_event

Damage = Callable[[Path], object]
NOW = 1_700_000_000.0


def verified(root: Path) -> LedgerReport:
    return verify(open_ledger(root), root, ClaimFiles(root) if (root / "locks").exists() else None)


def test_a_sound_ledger_has_no_findings(scratch: Path) -> None:
    claims = open_claims(scratch)
    with claims.claim("1", "a") as held:
        held.append({"type": "note"})
        held.extend()
    claims.ledger.append_many([{"type": "note"}] * 200)
    claims.active()
    report = verified(scratch)
    assert (report.sound, report.findings, report.events) == (True, [], 204)


def remove(number: int) -> Damage:
    return lambda root: (root / f"ledger/event-{number:06d}.json").unlink()


def write(number: int, content: bytes) -> Damage:
    return lambda root: put_event(root, number, content)


def named(name: str, content: bytes = b'{"type":"a"}') -> Damage:
    return lambda root: (root / "ledger" / name).write_bytes(content)


def event(**fields: object) -> Damage:
    return lambda root: put_event(root, 6, json.dumps(fields).encode())


STAMP = format_instant(NOW)
LARGE = b" " * (1 << 20) + b'{"type":"a","timestamp":"2024-01-15T10:30:00Z"}'
ERRORS: dict[str, tuple[Damage, str]] = {
    "gap": (remove(3), "event-000003.json"),
    "torn: empty": (write(3, b""), "event-000003.json"),
    "torn: half": (write(3, b'{"type":"no'), "event-000003.json"),
    "torn: key twice": (write(3, b'{"type":"a","type":"b"}'), "event-000003.json"),
    "torn: list": (write(3, b"[]"), "event-000003.json"),
    "wrong-name": (named("event-7.json"), "event-7.json"),
    "wrong-name: long": (named("event-0000007.json"), "event-0000007.json"),
    "wrong-name: zero": (named("event-000000.json"), "event-000000.json"),
    "form: no type": (event(timestamp=STAMP), "event 6"),
    "form: no timestamp": (event(type="note"), "event 6"),
    "form: lock event": (event(type="lock_acquired", timestamp=STAMP, node_id="x", owner="a"), "event 6"),
    "twice": (event(type="note", timestamp=STAMP, id="n-2"), "event 6"),
}


@pytest.mark.req("LG-13", "LG-16")
@pytest.mark.parametrize("name", ERRORS)
def test_damage_is_found_and_comes_with_a_remedy(scratch: Path, name: str) -> None:
    damage, where = ERRORS[name]
    fill(scratch, 5)
    damage(scratch)
    report = verified(scratch)
    found = [each for each in report.findings if each.severity == "error"]
    assert [each.code for each in found] == [name.partition(":")[0]]
    assert found[0].subject.endswith(where)
    assert found[0].remedy.endswith(".")
    assert not report.sound


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_an_event_that_is_not_a_regular_file_is_found(scratch: Path) -> None:
    fill(scratch, 2)
    os.symlink("event-000002.json", scratch / "ledger/event-000003.json")
    assert [each.code for each in verified(scratch).findings] == ["not-a-file"]


def test_an_event_of_another_program_over_the_limit_is_a_warning_if_it_can_be_read(scratch: Path) -> None:
    fill(scratch, 5)
    write(3, LARGE)(scratch)
    report = verified(scratch)
    assert [(each.severity, each.code) for each in report.findings] == [("warning", "too-large")]
    assert (report.sound, report.events) == (True, 5)


def test_drafts_and_foreign_files_are_reported_as_notes_only(scratch: Path) -> None:
    fill(scratch, 2)
    named(".event-000003.json-0123.tmp")(scratch)
    (scratch / "ledger/.drafts").mkdir()
    named(".drafts/.event-0123.tmp")(scratch)
    named("README")(scratch)
    report = verified(scratch)
    assert report.sound
    assert sorted(each.code for each in report.findings) == ["draft", "draft", "foreign-file"]


def test_many_gaps_are_summarised(scratch: Path) -> None:
    fill(scratch, 1)
    write(100, json.dumps({"type": "note", "timestamp": STAMP}).encode())(scratch)
    findings = verified(scratch).findings
    assert len(findings) == 21
    assert "78 more events are missing" in findings[-1].message


def test_a_planted_number_of_any_length_takes_no_time_and_no_memory(scratch: Path) -> None:
    fill(scratch, 1)
    write(10**15 - 1, json.dumps({"type": "note", "timestamp": STAMP}).encode())(scratch)
    findings = verified(scratch).findings
    assert len(findings) == 21
    assert f"{10**15 - 2 - 1 - 20} more events are missing" in findings[-1].message


@pytest.mark.req("LG-17")
def test_overlapping_claims_and_releases_without_a_claim_are_found(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    append_raw(ledger, acquired("1", "a", expires_in=10, at=NOW))
    append_raw(ledger, acquired("1", "b", expires_in=10, at=NOW + 5))
    append_raw(ledger, acquired("1", "c", expires_in=10, at=NOW + 15))  # the claim of `b` has expired
    append_raw(ledger, {"type": "lock_released", "timestamp": STAMP, "node_id": "1", "owner": "a"})
    append_raw(ledger, {"type": "lock_released", "timestamp": STAMP, "node_id": "1", "owner": "a"})
    report = verified(scratch)
    assert [(each.severity, each.code, each.subject) for each in report.findings] == [
        ("error", "overlap", "event 2"),
        ("warning", "ended-by-another", "event 4"),
        ("note", "without-claim", "event 5"),
    ]


FORGED = {
    "a claim that lasts for centuries": {"type": "lock_acquired", "node_id": "2", "expires_at": "2999-01-01T00:00:00Z"},
    "a release without the id of the claim": {"type": "lock_released", "node_id": "1"},
    "a reap before the claim expired": {"type": "lock_reaped", "node_id": "1", "claim_id": "held"},
}


@pytest.mark.req("LG-17")
@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_an_event_that_no_holder_and_no_reaper_can_have_written_is_found(scratch: Path, forged: dict[str, str]) -> None:
    ledger = open_ledger(scratch)
    append_raw(ledger, {**acquired("1", "a", expires_in=60, at=NOW), "claim_id": "held"})
    append_raw(ledger, {"timestamp": STAMP, "owner": "a", **forged})
    report = verified(scratch)
    assert not report.sound
    assert [(each.code, each.subject) for each in report.findings] == [("forged", "event 2")]


def test_what_other_programs_do_by_the_specification_is_no_forgery(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    late = format_instant(NOW + 60)
    append_raw(ledger, acquired("1", "a", expires_in=3600, at=NOW), acquired("2", "a", expires_in=10, at=NOW))
    append_raw(ledger, {"type": "lock_released", "timestamp": STAMP, "node_id": "1", "owner": "a"})
    append_raw(ledger, {"type": "lock_reaped", "timestamp": late, "node_id": "2", "owner": "a"})
    append_raw(ledger, {**acquired("3", "a", expires_in=10, at=NOW), "claim_id": "ours"})
    append_raw(ledger, {"type": "lock_reaped", "timestamp": late, "node_id": "3", "owner": "a"})
    assert verified(scratch).findings == []


def test_a_wrong_checkpoint_is_found(scratch: Path) -> None:
    fill(scratch, 100)
    ledger = Ledger(MemoryStore(), checkpoint_root=scratch)
    append_raw(ledger, *[acquired("1", "a", expires_in=60)] * 100)
    last = ledger.read(100)
    ledger.save_checkpoint("claims", VERSION, last, ClaimState().as_record())
    assert [each.code for each in verify(ledger).findings if each.code == "checkpoint"] == ["checkpoint"]
    assert verified(scratch).sound, "a checkpoint of another ledger is ignored"
    assert (scratch / CHECKPOINTS).exists()


def test_claim_files_out_of_step_are_reported_as_notes(scratch: Path) -> None:
    open_claims(scratch, files=True).claim("1", "a")
    open_claims(scratch).claim("2", "b")
    open_claims(scratch).release("1", "a")
    report = verified(scratch)
    assert report.sound
    assert [(each.code, Path(each.subject).name) for each in report.findings] == [
        ("claim-file", "1.lock"),
        ("claim-file", "2.lock"),
    ]
    open_claims(scratch, files=True).reap()
    open_claims(scratch, files=True).extend("2", "b")
    assert verified(scratch).findings == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "huge"])
def test_a_claim_file_that_cannot_be_read_stops_only_itself(scratch: Path, kind: str, clock: ManualClock) -> None:
    claims = open_claims(scratch, files=True, clock=clock)
    for node in ("1", "2", "3", "4"):
        claims.claim(node, "a", ttl=10)
    path = scratch / "locks/3.lock"
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("2.lock")
    elif kind == "fifo":
        if sys.platform != "win32":
            os.mkfifo(path)
    else:
        path.write_bytes(b" " * (1 << 17))
    clock.advance(20)
    assert [each.node_id for each in claims.reap()] == ["1", "2", "3", "4"]
    assert sorted(os.listdir(scratch / "locks")) == [".guard", "3.lock"]
    report = verified(scratch)
    assert [(each.severity, each.code, each.subject) for each in report.findings] == [
        ("warning", "claim-file", str(path))
    ]
    assert claims.claim("4", "b").owner == "b"


def test_a_ledger_in_memory_can_be_verified_too() -> None:
    ledger = Ledger(MemoryStore())
    ledger.append({"type": "note"})
    assert verify(ledger).sound
