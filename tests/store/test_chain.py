"""The audit trail: its entries form a chain, and every kind of tampering is detected."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import AuditChainBroken, Corrupt
from holdfast.store.audit import START, AuditTrail, check_chain, verify
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, View
from proof.crash import Outcome, kill_points
from proof.effort import SHARE

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


CUTS = [0, 1, 4]
"""How many of the five entries are left after a cut."""


@pytest.mark.parametrize("left", CUTS)
def test_an_emptied_or_cut_trail_is_noticed(store: FileStore, left: int) -> None:
    assert check_chain(store, TRAIL).entries == 5
    rewrite(store, lines(store)[:left])
    with pytest.raises(AuditChainBroken, match=f"the trail ends with entry {left}, but entry 5 was written"):
        check_chain(store, TRAIL)


@pytest.mark.parametrize("left", CUTS)
def test_a_cut_stays_visible_when_the_trail_grows_again(store: FileStore, left: int) -> None:
    rewrite(store, lines(store)[:left])
    record(store, 6)
    with pytest.raises(AuditChainBroken, match=f"entry 6 follows entry {left}"):
        check_chain(store, TRAIL)


def test_a_rewritten_end_is_noticed(store: FileStore, scratch: Path) -> None:
    other = FileStore(scratch / "other")
    for number in range(5):
        record(other, number)
    rewrite(store, lines(other))
    with pytest.raises(AuditChainBroken, match="entry 5 is not the one that was written"):
        check_chain(store, TRAIL)


def test_a_trail_of_an_older_version_has_no_head_until_it_grows(store: FileStore) -> None:
    head = store.path / ".jvs/audit/head.json"
    head.unlink()
    assert check_chain(store, TRAIL).entries == 5
    record(store, 6)
    assert head.exists()
    assert check_chain(store, TRAIL).entries == 6


@pytest.mark.parametrize("content", ["", "garbage", "{}"])
def test_a_damaged_head_is_noticed_and_stops_nothing(store: FileStore, content: str) -> None:
    head = store.path / ".jvs/audit/head.json"
    head.write_text(content)
    with pytest.raises(AuditChainBroken, match="the copy of the last entry cannot be understood"):
        check_chain(store, TRAIL)
    record(store, 6)
    assert check_chain(store, TRAIL).entries == 6


def test_the_loss_of_the_trail_shows_although_its_head_is_damaged(store: FileStore) -> None:
    (store.path / ".jvs/audit/head.json").write_text("garbage")
    rewrite(store, [])
    record(store, 1)
    with pytest.raises(AuditChainBroken, match="entry 1 does not have the hash of the previous entry"):
        check_chain(store, TRAIL)


class Recording:
    """Records an event; whenever that is killed, the trail and its head agree, before and after the next event."""

    name = "record an event in the audit trail"

    def prepare(self, directory: Path) -> None:
        with FileStore(directory) as store:
            record(store, 1)

    def operate(self, directory: Path) -> None:
        with FileStore(directory) as store:
            record(store, 2)

    def check(self, directory: Path, outcome: Outcome) -> None:
        with FileStore(directory) as store:
            seen = check_chain(store, TRAIL).entries
            assert seen == 2 or (seen == 1 and not outcome.acknowledged)
            record(store, 3)
            assert check_chain(store, TRAIL).entries == seen + 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_kill_never_looks_like_a_cut() -> None:
    kill_points(Recording(), share=SHARE).require_clean(at_least=20)
