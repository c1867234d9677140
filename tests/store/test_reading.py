"""Reading the audit trail: tampering is located, torn ends are ignored, and readers can follow new entries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import AuditChainBroken
from holdfast.store.audit import START, AuditReader, AuditTrail, check_chain
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, View

TRAIL = AuditTrail()
Lines = list[str]


def record(store: FileStore, number: int) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        entry = TRAIL.entry(view, now, "tested", actor="someone", facts={"number": number})
        return Decision([entry], None)

    store.transact([TRAIL.stream], decide)


@pytest.fixture
def store(scratch: Path) -> FileStore:
    made = FileStore(scratch)
    for number in range(1, 6):
        record(made, number)
    return made


def trail_of(store: FileStore) -> Path:
    return store.path / ".jvs/audit/audit.jsonl"


def forged(lines: Lines) -> Lines:
    entry = json.loads(lines[2])
    entry["facts"]["number"] = 33
    return [*lines[:2], json.dumps(entry) + "\n", *lines[3:]]


def removed(lines: Lines) -> Lines:
    return [*lines[:2], *lines[3:]]


def reordered(lines: Lines) -> Lines:
    return [*lines[:2], lines[3], lines[2], lines[4]]


def overwritten(lines: Lines) -> Lines:
    return [*lines[:2], "not json\n", *lines[3:]]


@pytest.mark.parametrize("tamper", [forged, removed, reordered, overwritten])
def test_tampering_is_reported_with_its_position(store: FileStore, tamper: Callable[[Lines], Lines]) -> None:
    path = trail_of(store)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(tamper(lines)))
    with pytest.raises(AuditChainBroken) as caught:
        check_chain(store, TRAIL)
    assert caught.value.code == "E_AUDIT_CHAIN_BROKEN"
    assert caught.value.facts["number"] == 3
    position = caught.value.facts["position"]
    assert isinstance(position, int)
    assert position >= len(lines[0]) + len(lines[1])


def test_a_torn_last_line_is_ignored_and_truncated_by_the_next_entry(store: FileStore) -> None:
    path = trail_of(store)
    path.write_text(path.read_text() + '{"number":6,"at":"2026')
    assert check_chain(store, TRAIL).entries == 5
    record(store, 6)
    assert check_chain(store, TRAIL).entries == 6


def test_the_end_of_the_chain_is_its_last_hash(store: FileStore, tmp_path: Path) -> None:
    entries = list(AuditReader(store, TRAIL).read())
    assert check_chain(store, TRAIL) == (5, entries[-1].hash)
    assert check_chain(FileStore(tmp_path / "new"), TRAIL) == (0, START)


@pytest.mark.parametrize("verified", [False, True])
def test_a_reader_resumes_where_it_stopped(store: FileStore, verified: bool) -> None:
    reader = AuditReader(store, TRAIL, verified=verified)
    assert [entry.number for entry in reader.read()] == [1, 2, 3, 4, 5]
    assert list(reader.read()) == []
    record(store, 6)
    record(store, 7)
    assert [entry.number for entry in reader.read()] == [6, 7]


def test_a_reader_that_was_interrupted_resumes_at_the_next_entry(store: FileStore) -> None:
    reader = AuditReader(store, TRAIL, verified=True)
    for entry in reader.read():
        if entry.number == 2:
            break
    assert [entry.number for entry in reader.read()] == [3, 4, 5]


def test_a_reader_that_follows_detects_a_forged_entry(store: FileStore) -> None:
    reader = AuditReader(store, TRAIL, verified=True)
    list(reader.read())
    record(store, 6)
    path = trail_of(store)
    path.write_text(path.read_text().replace('"number":6}', '"number":7}'))
    with pytest.raises(AuditChainBroken):
        list(reader.read())
