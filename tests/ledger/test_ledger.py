"""Appending, reading, watching and finding events, on both stores."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock, format_instant
from holdfast.errors import (
    Corrupt,
    NotFound,
    OutcomeUnknown,
    SequenceMismatch,
    TooLarge,
    TooManyRetries,
    UsageFailure,
)
from holdfast.fs import calls
from holdfast.ledger.log import CODEC, MOST_BYTES, Ledger
from holdfast.locks.retry import RetryConfig
from tests.ledger.ledgers import PATIENCE, event_files, fill, open_ledger, put_event, raw_events

NOTE = {"type": "note"}


# --- Appending --------------------------------------------------------------------------------------------


def test_an_event_gets_the_next_sequence_the_time_and_an_id(ledger: Ledger, clock: ManualClock) -> None:
    first, second = ledger.append({"type": "note", "text": "a"}), ledger.append(NOTE)

    assert (first.sequence, second.sequence, ledger.sequence) == (1, 2, 2)
    assert first.event == {
        "type": "note",
        "timestamp": format_instant(clock.wall()),
        "text": "a",
        "id": first.event["id"],
    }
    assert first.event["id"] != second.event["id"]
    assert [*ledger.events()] == [first, second]


def test_an_event_keeps_its_own_time_and_id(ledger: Ledger) -> None:
    own = {"type": "note", "timestamp": "2024-01-15T10:30:00Z", "id": "mine"}

    assert ledger.append(own).event == own
    assert own == {"type": "note", "timestamp": "2024-01-15T10:30:00Z", "id": "mine"}


@pytest.mark.req("LG-11")
def test_append_if_sequence_succeeds_only_at_the_current_sequence(ledger: Ledger) -> None:
    assert ledger.append_if_sequence(NOTE, 0).sequence == 1
    for wrong in (0, 2, 7):
        with pytest.raises(SequenceMismatch, match="sequence mismatch") as caught:
            ledger.append_if_sequence(NOTE, wrong)
        assert (caught.value.expected, caught.value.found) == (wrong, 1)
    assert ledger.append_if_sequence(NOTE, 1).sequence == 2
    assert ledger.sequence == 2


@pytest.mark.req("LG-14")
def test_a_writer_decides_again_and_retries_after_a_mismatch(ledger: Ledger) -> None:
    seen: list[int] = []

    def decide(sequence: int) -> dict[str, Any]:
        seen.append(sequence)
        if len(seen) < 3:
            ledger.append({"type": "intervention"})  # another writer is faster, twice
        return {"type": "decided", "at": sequence}

    made = ledger.append_decided(decide, retry=RetryConfig(initial_delay=0.0))
    assert (seen, made.sequence, made.event["at"]) == ([0, 1, 2], 3, 2)

    def always_late(sequence: int) -> dict[str, Any]:
        ledger.append({"type": "intervention"})
        return NOTE

    with pytest.raises(TooManyRetries):
        ledger.append_decided(always_late, retry=RetryConfig(max_attempts=4, initial_delay=0.0))
    assert [each.event["type"] for each in ledger.events()].count("note") == 0


def test_many_events_are_appended_in_order(ledger: Ledger) -> None:
    ledger.append(NOTE)
    made = ledger.append_many({"type": "part", "number": number} for number in range(20))

    assert [each.sequence for each in made] == list(range(2, 22))
    assert [each.event["number"] for each in ledger.events(after=1)] == list(range(20))
    assert ledger.append_many([]) == []
    assert ledger.append(NOTE).sequence == 22


BAD: dict[str, Any] = {
    "no type": {"text": "x"},
    "an empty type": {"type": ""},
    "a type that is no text": {"type": 7},
    "a long type": {"type": "x" * 129},
    "a NaN": {"type": "note", "value": float("nan")},
    "a key that is no text": {"type": "note", "value": {1: 2}},
    "a name that is no text": {"type": "note", 1: 2},
    "a lone surrogate": {"type": "note", "text": "\ud800"},
    "something that is not JSON": {"type": "note", "value": object()},
    "a timestamp without a zone": {"type": "note", "timestamp": "2024-01-15T10:30:00"},
    "a timestamp that is none": {"type": "note", "timestamp": 5},
    "an id that is no text": {"type": "note", "id": 5},
    "a type of claims": {"type": "lock_released", "node_id": "1", "owner": "a"},
    "a type that claims may get": {"type": "lock_"},
    "not an object": ["type"],
}


@pytest.mark.parametrize("event", BAD.values(), ids=BAD)
def test_an_invalid_event_is_refused_and_nothing_is_written(ledger: Ledger, event: Any) -> None:
    for act in (
        lambda: ledger.append(event),
        lambda: ledger.append_if_sequence(event, 0),
        lambda: ledger.append_many([NOTE, event]),
    ):
        with pytest.raises(UsageFailure):
            act()
    assert ledger.sequence == 0


def test_an_event_over_a_mebibyte_is_refused_before_anything_is_written(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    size = len(CODEC.encode({"type": "note", "timestamp": "2024-01-15T10:30:00Z", "id": "x", "text": ""}))
    event = {
        "type": "note",
        "timestamp": "2024-01-15T10:30:00Z",
        "id": "x",
        "text": "y" * (MOST_BYTES - size),
    }

    with pytest.raises(TooLarge):
        ledger.append({**event, "text": event["text"] + "z"})
    assert not (scratch / "ledger").exists()
    assert ledger.append(event).sequence == 1
    assert event_files(scratch)[0].stat().st_size == MOST_BYTES
    assert next(ledger.events()).event == event


# --- Files ------------------------------------------------------------------------------------------------


@pytest.mark.req("LG-12", "LG-13")
def test_events_are_numbered_files_that_never_change(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    made = [ledger.append({"type": "note", "number": number}) for number in range(3)]
    made += ledger.append_many([{"type": "note", "text": "zwölf ☂"}] * 2)
    before = [(path.name, path.stat().st_ino, path.read_bytes()) for path in event_files(scratch)]

    assert raw_events(scratch) == [each.event for each in made]
    assert [name for name, _, _ in before] == [f"event-00000{number}.json" for number in range(1, 6)]
    for _ in range(3):
        ledger.append(NOTE)
    after = [(path.name, path.stat().st_ino, path.read_bytes()) for path in event_files(scratch)]
    assert after[:5] == before


@pytest.mark.req("LG-12")
def test_numbers_continue_past_999999(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(scratch)
    ledger.append(NOTE)
    content = event_files(scratch)[0].read_bytes()
    for number in (1 << bit for bit in range(20)):  # the search for the end probes these
        put_event(scratch, number, content)
    for number in range(999_980, 1_000_000):
        put_event(scratch, number, content)
    monkeypatch.setattr(ledger.store._numbers, "_last", {"ledger/events": 999_990})  # type: ignore[attr-defined]

    assert [ledger.append(NOTE).sequence for _ in range(2)] == [1_000_000, 1_000_001]
    assert (scratch / "ledger/event-1000000.json").exists()
    assert [each.sequence for each in ledger.events(after=999_998)] == [999_999, 1_000_000, 1_000_001]


@pytest.mark.req("LG-16")
@pytest.mark.parametrize("how", ["link", "rename_noreplace"])
def test_an_event_is_synced_as_a_draft_before_it_is_published(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """For the first append of a process, and for a later one."""
    steps: list[str] = []
    descriptors: dict[int, str] = {}
    open_ledger(scratch).append(NOTE)
    ledger = open_ledger(scratch)
    if how == "rename_noreplace":
        ledger.append(NOTE)
    number = ledger.sequence + 1
    real_open, real_fsync, real_publish = calls.open, calls.fsync, getattr(calls, how)

    def open_(path: str, *arguments: Any, **options: Any) -> int:
        fd = real_open(path, *arguments, **options)
        descriptors[fd] = str(path)
        return fd

    def fsync(fd: int) -> None:
        steps.append(f"fsync {descriptors.get(fd, 'a file opened earlier')}")
        real_fsync(fd)

    def publish(source: str, target: str, **options: Any) -> None:
        steps.append(f"publish {source} {target}")
        real_publish(source, target, **options)

    monkeypatch.setattr(calls, "open", open_)
    monkeypatch.setattr(calls, "fsync", fsync)
    monkeypatch.setattr(calls, how, publish)
    ledger.append(NOTE)
    (published,) = [step for step in steps if step.endswith(f"event-{number:06d}.json")]
    draft = published.split()[1]
    assert draft.startswith(".event-")
    assert draft.endswith(".tmp")
    assert [step for step in steps if draft in step] == [f"fsync {draft}", published]


@pytest.mark.req("LG-13")
def test_reading_takes_no_lock(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    ledger.append_many([NOTE] * 3)
    os.mkdir(scratch / "ledger/ledger.lock")  # a shell tool holds the lock forever
    reader = open_ledger(scratch, timeout=0.0)

    assert [each.sequence for each in reader.events()] == [1, 2, 3]
    assert (reader.sequence, reader.read(2).sequence) == (3, 2)
    assert reader.fold(lambda count, _: count + 1, 0) == 3


def test_appending_neither_lists_the_directory_nor_reads_earlier_events(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(root: Path) -> dict[str, int]:
        ledger = open_ledger(root)
        ledger.append(NOTE)
        counts: dict[str, int] = {}

        def counting(name: str, real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                where = str(arguments[0])
                counts[name] = counts.get(name, 0) + 1
                assert name != "scandir" or "intents" in where, "the ledger is listed"
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for name in (*calls.CHANGING, *calls.READING):
                patch.setattr(calls, name, counting(name, getattr(calls, name)))
            ledger.append(NOTE)
        return counts

    small, large = scratch / "small", scratch / "large"
    fill(small, 3)
    fill(large, 3000)
    assert counted(large) == counted(small)


def test_an_event_formatted_by_another_program_can_be_read(scratch: Path) -> None:
    put_event(scratch, 1, b'{\n  "timestamp" : "2024-01-15T10:30:00Z",\n  "type" : "cust\\u00f6m"\n}\n\n')
    put_event(scratch, 2, b'{"no":"type at all","big":123456789012345678901234567890}')

    events = [each.event for each in open_ledger(scratch).events()]
    assert events[0]["type"] == "custöm"
    assert events[1]["big"] == 123456789012345678901234567890


TORN = {
    "empty": b"",
    "half": b'{"type":"no',
    "not an object": b"[1]\n",
    "a key twice": b'{"type":"a","type":"b"}\n',
    "a NaN": b'{"type":"a","value":NaN}\n',
    "not UTF-8": b'{"type":"\xff"}\n',
    "a lone surrogate": b'{"type":"\\ud800"}\n',
    "two values": b'{"type":"a"}{"type":"b"}\n',
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_an_unreadable_event_is_named_and_does_not_stop_appending(scratch: Path, content: bytes) -> None:
    ledger = open_ledger(scratch)
    ledger.append(NOTE)
    put_event(scratch, 2, content)

    assert ledger.append(NOTE).sequence == 3
    events = ledger.events()
    assert next(events).sequence == 1
    with pytest.raises(Corrupt, match=r"event-000002\.json") as caught:
        next(events)
    assert "ledger verify" in caught.value.hint
    assert next(ledger.events(after=2)).sequence == 3


# --- Reading ----------------------------------------------------------------------------------------------


def test_events_can_be_read_from_and_up_to_a_sequence(ledger: Ledger) -> None:
    ledger.append_many([NOTE] * 10)

    assert [each.sequence for each in ledger.events(after=3, until=6)] == [4, 5, 6]
    assert [each.sequence for each in ledger.events(after=8, until=60)] == [9, 10]
    assert [*ledger.events(after=10)] == [*ledger.events(until=0)] == []
    with pytest.raises(UsageFailure):
        next(ledger.events(after=-1))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
def test_the_sequence_is_found_for_any_number_of_events(ledger: Ledger, count: int) -> None:
    ledger.append_many([NOTE] * count)

    assert Ledger(ledger.store).sequence == count


def test_one_event_is_read_by_its_sequence_or_found_by_its_id(ledger: Ledger) -> None:
    made = ledger.append_many([NOTE] * 5)

    assert ledger.read(3) == made[2] == ledger.find(made[2].event["id"])
    assert ledger.find(made[2].event["id"], after=3) is None
    for missing in (0, 6, -1):
        with pytest.raises(NotFound, match=f"no event {missing}; its last one is 5"):
            ledger.read(missing)


def test_an_unknown_outcome_can_be_resolved_by_the_event_id(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(scratch)
    ledger.append(NOTE)
    real, syncs = calls.sync_directory, []

    def failing(fd: int) -> None:
        syncs.append(fd)
        if (scratch / "ledger/event-000002.json").exists():
            raise OSError(5, "the disk is broken")
        real(fd)

    monkeypatch.setattr(calls, "sync_directory", failing)
    with pytest.raises(OutcomeUnknown) as caught:
        ledger.append({"type": "note", "id": "my-own-id"})
    assert caught.value.facts["event_id"] == "my-own-id"
    found = ledger.find("my-own-id")
    assert found is not None
    assert found.sequence == 2


def test_a_watch_yields_existing_events_and_then_new_ones(ledger: Ledger) -> None:
    ledger.append_many([NOTE] * 2)
    behind, new = ledger.watch(after=1, timeout=PATIENCE), ledger.watch(timeout=PATIENCE)
    assert next(behind).sequence == 2
    received: list[int] = []

    def listen() -> None:
        received.extend(each.sequence for _, each in zip(range(3), new, strict=False))

    listener = threading.Thread(target=listen)
    listener.start()
    ledger.append_many([{"type": "new"}] * 3)
    assert [next(behind).sequence for _ in range(3)] == [3, 4, 5]
    while listener.is_alive():  # the listener may have started late
        ledger.append(NOTE)
        listener.join(0.01)
    assert received == list(range(received[0], received[0] + 3))
    assert received[0] >= 3


def test_a_watch_ends_when_it_times_out_or_is_cancelled(ledger: Ledger) -> None:
    ledger.append(NOTE)
    assert [each.sequence for each in ledger.watch(after=0, timeout=0.05)] == [1]
    cancelled = threading.Event()
    cancelled.set()
    assert [*ledger.watch(cancelled=cancelled)] == []


def test_an_event_file_is_one_line_of_plain_json(scratch: Path) -> None:
    open_ledger(scratch).append({"type": "note", "timestamp": "2024-01-15T10:30:00Z", "id": "i", "text": "ä\n"})

    content = event_files(scratch)[0].read_bytes()
    assert content.decode() == '{"type":"note","timestamp":"2024-01-15T10:30:00Z","id":"i","text":"ä\\n"}\n'
    assert json.loads(content)["text"] == "ä\n"
