"""The audit trail: its entries form a chain, and every kind of tampering is detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import AuditChainBroken, Corrupt
from holdfast.store.audit import START, AuditTrail, verify
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, View

TRAIL = AuditTrail()


def record(store: FileStore, number: int) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        facts = {"number": number, "name": "zoë\n"}
        return Decision([TRAIL.entry(view, now, "tested", actor="someone", facts=facts)], None)

    store.transact([TRAIL.stream], decide)


@pytest.fixture
def store(scratch: Path) -> FileStore:
    made = FileStore(scratch)
    for number in range(1, 6):
        record(made, number)
    return made


def lines(store: FileStore) -> list[str]:
    return (store.path / ".jvs/audit/audit.jsonl").read_text().splitlines()


def rewrite(store: FileStore, found: list[str]) -> None:
    (store.path / ".jvs/audit/audit.jsonl").write_text("".join(line + "\n" for line in found))


def test_each_entry_has_the_hash_of_the_previous_one(store: FileStore) -> None:
    entries = list(verify(store.entries(TRAIL.stream)))
    assert [entry.number for entry in entries] == [1, 2, 3, 4, 5]
    assert entries[0].previous == START
    assert [entry.previous for entry in entries[1:]] == [entry.hash for entry in entries[:-1]]
    assert entries[2].facts == {"number": 3, "name": "zoë\n"}


def _change_a_fact(found: list[str]) -> list[str]:
    entry = json.loads(found[2])
    entry["facts"]["number"] = 33
    return [*found[:2], json.dumps(entry), *found[3:]]


def _change_the_actor(found: list[str]) -> list[str]:
    return [*found[:2], found[2].replace("someone", "nobody"), *found[3:]]


def _remove(found: list[str]) -> list[str]:
    return [*found[:2], *found[3:]]


def _remove_the_first(found: list[str]) -> list[str]:
    return found[1:]


def _double(found: list[str]) -> list[str]:
    return [*found[:3], *found[2:]]


def _swap(found: list[str]) -> list[str]:
    return [*found[:2], found[3], found[2], found[4]]


@pytest.mark.parametrize("tamper", [_change_a_fact, _change_the_actor, _remove, _remove_the_first, _double, _swap])
def test_tampering_is_detected_and_located(store: FileStore, tamper: Callable[[list[str]], list[str]]) -> None:
    rewrite(store, tamper(lines(store)))
    with pytest.raises(AuditChainBroken) as broken:
        list(verify(store.entries(TRAIL.stream)))
    assert broken.value.facts["number"] in (1, 3, 4)


def test_an_invalid_line_is_reported_and_not_skipped(store: FileStore) -> None:
    rewrite(store, [*lines(store)[:2], '{"number": "x"}', *lines(store)[2:]])
    with pytest.raises(Corrupt, match=r"audit\.jsonl"):
        list(verify(store.entries(TRAIL.stream)))
