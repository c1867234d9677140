"""Folds and their checkpoints: with checkpoints kept, lost or torn, the result equals a full replay."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import format_instant, parse_instant
from holdfast.errors import UsageFailure
from holdfast.ledger.log import CHECKPOINT_EVERY, EVENTS, Checkpoint, Ledger, Recorded, save_checkpoint
from holdfast.ledger.projection import NAME, ClaimProjection, ClaimState
from holdfast.store.layout import CHECKPOINTS
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Append, Decision
from proof.effort import rounds
from tests.ledger.ledgers import acquired, fill, open_claims, open_ledger

START = 1_700_000_000.0
NONE: dict[str, int] = {}


# --- Replay ------------------------------------------------------------------------------------------------

_NODES = st.sampled_from(["1", "1.2", "1.2.3"])
_OWNERS = st.sampled_from(["a", "b"])
_IDS = st.sampled_from(["", "x", "y"])
_TIMES = st.integers(0, 100).map(lambda seconds: format_instant(START + seconds))


@st.composite
def _lock_events(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(
        st.sampled_from(["lock_acquired", "lock_released", "lock_reaped", "lock_requested", "lock_withdrawn", "note"])
    )
    event: dict[str, Any] = {"type": kind, "timestamp": draw(_TIMES), "node_id": draw(_NODES)}
    event["owner"] = draw(_OWNERS)
    if kind == "lock_acquired":
        event["expires_at"] = draw(_TIMES)
    if claim_id := draw(_IDS):
        event["claim_id"] = claim_id
    if kind in ("lock_requested", "lock_withdrawn"):
        event.update(ticket=draw(st.sampled_from("xyz")), priority=draw(st.integers(0, 2)), until=draw(_TIMES))
    if draw(st.integers(0, 20)) == 0:  # a malformed event
        event[draw(st.sampled_from(sorted(event)))] = draw(st.sampled_from([None, 7, "", "..", [1]]))
        event.setdefault("type", "note")
        if not isinstance(event["type"], str) or not event["type"]:
            event["type"] = "note"
    return event


def by_the_specification(events: list[dict[str, Any]], now: float) -> dict[str, str]:
    """The owner of each node by the specification's own pseudocode, for events that follow its rules."""
    locks: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "lock_acquired":
            locks[event["node_id"]] = event
        elif event["type"] in ("lock_released", "lock_reaped"):
            del locks[event["node_id"]]
    return {node: lock["owner"] for node, lock in locks.items() if parse_instant(lock["expires_at"]) > now}


@pytest.mark.req("LG-06", "LG-08")
@given(st.data())
@settings(max_examples=rounds(150, least=5), deadline=None)
def test_replay_agrees_with_the_specification(data: st.DataObject) -> None:
    events: list[dict[str, Any]] = []
    held: dict[str, str] = {}
    for second in range(data.draw(st.integers(0, 30))):
        node, owner = data.draw(_NODES), data.draw(_OWNERS)
        now = START + second
        if node not in held:
            events.append(acquired(node, owner, expires_in=data.draw(st.integers(1, 20)), at=now))
            held[node] = owner
        else:
            kind = data.draw(st.sampled_from(["lock_released", "lock_reaped"]))
            stamp = format_instant(now)
            events.append({"type": kind, "timestamp": stamp, "node_id": node, "owner": held.pop(node)})
    book = ClaimState()
    for number, event in enumerate(events, 1):
        book.apply(Recorded(number, event))
    now = START + data.draw(st.integers(0, 60))
    assert {
        node: claim.owner for node, claim in book.claims.items() if not claim.is_expired(now)
    } == by_the_specification(events, now)


@pytest.mark.req("LG-08")
@given(st.lists(_lock_events(), max_size=40), st.data())
@settings(max_examples=rounds(200, least=5), deadline=None)
def test_resuming_from_any_saved_state_equals_a_full_replay(events: list[dict[str, Any]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    whole, resumed = ClaimState(), ClaimState()
    for number, event in enumerate(events, 1):
        whole.apply(Recorded(number, event))
    for number, event in enumerate(events[:cut], 1):
        resumed.apply(Recorded(number, event))
    kept = ClaimState.from_record(json.loads(json.dumps(resumed.as_record())), cut)
    assert kept is not None
    assert kept == resumed
    for number, event in enumerate(events[cut:], cut + 1):
        kept.apply(Recorded(number, event))
    assert kept == whole


def test_a_malformed_saved_state_is_ignored() -> None:
    assert ClaimState.from_record({"claims": [{"node_id": 7}], "waiters": []}, 1) is None
    assert ClaimState.from_record(None, 1) is None


# --- Checkpoints ------------------------------------------------------------------------------------------


def tally(state: dict[str, int], recorded: Recorded) -> dict[str, int]:
    kind = recorded.event["type"]
    return {**state, kind: state.get(kind, 0) + 1}


def by_number(state: dict[int, int], recorded: Recorded) -> dict[int, int]:
    return {recorded.sequence: 1}


@contextmanager
def no_reading_before(ledger: Ledger, sequence: int) -> Iterator[None]:
    """Fail if an event before this one is read."""
    real = ledger.store.entries

    def entries(stream: Any, *, after: int = 0) -> Any:
        assert after >= sequence - 1, f"read from {after} on"
        return real(stream, after=after)

    ledger.store.entries = entries  # type: ignore[method-assign]
    try:
        yield
    finally:
        ledger.store.entries = real  # type: ignore[method-assign]


def test_a_fold_is_a_reduction_over_all_events(ledger: Ledger) -> None:
    ledger.append_many([{"type": "a"}, {"type": "b"}, {"type": "a"}])

    assert ledger.fold(tally, NONE) == {"a": 2, "b": 1}
    assert ledger.fold(tally, NONE, until=1) == {"a": 1}
    assert ledger.fold(lambda last, each: each.sequence, 0) == 3


def test_a_named_fold_reads_only_new_events(scratch: Path) -> None:
    fill(scratch, 500)
    assert open_ledger(scratch).fold(tally, NONE, name="tally") == {"note": 500}
    ledger = open_ledger(scratch)
    ledger.append({"type": "new"})
    with no_reading_before(ledger, 500):
        assert ledger.fold(tally, NONE, name="tally") == {"note": 500, "new": 1}
    assert ledger.fold(tally, NONE, name="tally", until=10) == {"note": 10}
    assert ledger.fold(tally, NONE, name="tally", version="2") == {"note": 500, "new": 1}


def test_the_state_of_a_named_fold_must_be_json(ledger: Ledger) -> None:
    ledger.append_many([{"type": "a"}] * CHECKPOINT_EVERY)
    with pytest.raises(UsageFailure):
        ledger.fold(lambda state, each: state, (1, 2), name="tally")
    with pytest.raises(UsageFailure):
        ledger.fold(by_number, dict[int, int](), name="tally")


_STATES = st.sampled_from(["kept", "deleted", "torn", "changed", "of another ledger", "ahead", "foreign"])


@given(
    st.lists(st.tuples(st.lists(_lock_events(), max_size=70), _STATES), max_size=4),
)
@settings(max_examples=rounds(60, least=5), deadline=None)
def test_missing_or_damaged_checkpoints_never_change_a_result(
    rounds: list[tuple[list[dict[str, Any]], str]],
) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        store = MemoryStore()
        bare = Ledger(store)
        for events, fate in rounds:
            _append_unchecked(store, events)
            ledger = Ledger(store, checkpoint_root=root)
            whole = ClaimState()
            for each in bare.events():
                whole.apply(each)
            assert ClaimProjection(ledger).query(lambda book: book) == whole
            assert ledger.fold(tally, NONE, name="tally") == bare.fold(tally, NONE)
            _damage(root / CHECKPOINTS, fate)


def _append_unchecked(store: MemoryStore, events: list[dict[str, Any]]) -> None:
    """Append events unchecked, as other programs may."""
    whole = [{**event, "number": number} for number, event in enumerate(events)]
    store.transact([EVENTS], lambda view, now: Decision([Append(EVENTS, each) for each in whole], None))


def _damage(place: Path, fate: str) -> None:
    for path in place.glob("*.json"):
        content = path.read_bytes()
        if fate == "deleted":
            path.unlink()
        elif fate == "torn":
            path.write_bytes(content[: len(content) // 2])
        elif fate == "changed":
            path.write_bytes(content.replace(b'"owner":"a"', b'"owner":"b"').replace(b'"note":', b'"nope":'))
        elif fate in ("of another ledger", "ahead"):
            record = json.loads(content)["checkpoint"]
            record["event" if fate == "of another ledger" else "sequence"] = (
                "0" * 32 if fate == "of another ledger" else record["sequence"] + 1000
            )
            del record["format"]
            save_checkpoint(place.parent.parent, Checkpoint(**record))
        elif fate == "foreign":
            path.write_bytes(b'{"checkpoint":[1],"digest":5}')


def test_claims_are_loaded_from_their_checkpoint(scratch: Path) -> None:
    fill(scratch, 300)
    first = open_claims(scratch)
    first.claim("1.2", "a")
    first.claim("1.3", "b")
    assert [each.owner for each in open_claims(scratch).active()] == ["a", "b"]
    assert (scratch / CHECKPOINTS / f"{NAME}.json").exists()
    again = open_claims(scratch)
    with no_reading_before(again.ledger, 300):
        assert [each.owner for each in again.active()] == ["a", "b"]
    shutil.rmtree(scratch / CHECKPOINTS)
    assert [each.owner for each in open_claims(scratch).active()] == ["a", "b"]


def test_a_checkpoint_that_cannot_be_written_is_skipped(scratch: Path) -> None:
    fill(scratch, 100)
    (scratch / ".holdfast").mkdir()
    (scratch / CHECKPOINTS).write_text("not a directory")
    assert open_ledger(scratch).fold(tally, NONE, name="tally") == {"note": 100}
    assert open_claims(scratch).active() == []


def test_a_ledger_that_became_shorter_is_read_again(scratch: Path) -> None:
    claims = open_claims(scratch)
    claims.claim("1", "a")
    assert len(claims.active()) == 1
    for path in (scratch / "ledger").glob("event-*"):
        path.unlink()
    assert claims.claim("2", "b").claim.sequence == 1  # the transaction sees the shorter ledger first
    assert [each.owner for each in claims.active()] == ["b"]
