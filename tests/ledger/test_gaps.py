"""A ledger in which events are missing, and one in which another program has replaced an event of ours."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from holdfast.errors import NodeLocked, NotFound, SequenceMismatch
from holdfast.fs.directory import Directory
from holdfast.ledger.verify import verify
from holdfast.locks import ledger_lock
from holdfast.repository.ledgers import OpenLedger
from holdfast.store import streams
from holdfast.store.files import FileStore
from tests.ledger.ledgers import acquired, event_files, fill, open_claims, open_ledger
from tests.ledger.test_other_programs import GoProgram
from tests.locks.workers import Line, Worker, Workers, stop_myself


def event_path(root: Path, number: int) -> Path:
    return root / f"ledger/event-{number:06d}.json"


def remove(root: Path, *numbers: int) -> None:
    for number in numbers:
        event_path(root, number).unlink()


def findings(root: Path) -> list[tuple[str, str]]:
    found = verify(open_ledger(root), root).findings
    return [(each.severity.value, each.code) for each in found]


# --- Gaps ---------------------------------------------------------------------------------------------------

GAPS = [(1,), (2,), (3,), (9,), (2, 3), (6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8), (4, 8), (6, 7, 8, 9)]


@pytest.mark.req("LG-12", "LG-13")
@pytest.mark.parametrize("missing", GAPS)
@pytest.mark.parametrize("ours", [0, 5, 10], ids=["of another program", "of both", "ours"])
def test_the_next_number_is_one_past_the_highest_and_reading_goes_on_after_a_gap(
    scratch: Path, ours: int, missing: tuple[int, ...]
) -> None:
    running = open_claims(scratch)
    running.ledger.append_many([{"type": "note"}] * ours)
    program = GoProgram(scratch)
    (scratch / "ledger").mkdir(exist_ok=True)
    for _ in range(10 - ours):
        program.safe_append({"type": "go", "timestamp": program.now()})
    remove(scratch, *missing)
    left = [number for number in range(1, 11) if number not in missing]

    ledger = open_ledger(scratch)
    assert [each.sequence for each in ledger.events()] == left
    assert {number for first, last in ledger.gaps for number in range(first, last + 1)} == set(missing)
    assert (ledger.sequence, open_ledger(scratch).sequence) == (10, 10)
    for number in missing:
        with pytest.raises(NotFound):
            ledger.read(number)
    assert open_ledger(scratch).append({"type": "new"}).sequence == 11
    assert running.ledger.append({"type": "new"}).sequence == 12
    assert running.claim("1", "a").claim.sequence == 13
    assert [each.owner for each in open_claims(scratch).active()] == ["a"]
    assert [each.sequence for each in running.ledger.events(after=left[0])] == [*left[1:], 11, 12, 13]
    assert [code for _, code in findings(scratch)].count("gap") == len(missing)


def test_a_watch_goes_on_after_a_gap(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    ledger.append_many([{"type": "note"}] * 5)
    watch = ledger.watch(after=2, timeout=5.0)
    assert next(watch).sequence == 3
    remove(scratch, 4)
    other = open_ledger(scratch)
    other.append({"type": "note"})
    assert [next(watch).sequence for _ in range(2)] == [5, 6]


def test_a_gap_deep_in_a_long_ledger_of_another_program_is_found(scratch: Path) -> None:
    fill(scratch, 500)
    remove(scratch, 255, 256)
    assert open_ledger(scratch).append({"type": "new"}).sequence == 501
    assert len([*open_ledger(scratch).events()]) == 499


def test_the_last_event_may_be_missing_too(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    ledger.append_many([{"type": "note"}] * 3)
    remove(scratch, 3)
    assert [each.sequence for each in open_ledger(scratch).events()] == [1, 2]
    assert findings(scratch) == [("error", "lost")]


# --- Events that another program has replaced ------------------------------------------------------------------


@pytest.fixture
def stopped(scratch: Path, workers: Workers) -> Worker:
    """Another program that is stopped after counting and before renaming its claim of node 2."""

    def append(line: Line) -> None:
        program = GoProgram(scratch)
        program.acquire()
        number = program.count() + 1
        draft = scratch / "ledger/.event-go.tmp"
        draft.write_text(json.dumps(acquired("2", "go-agent", expires_in=100)))
        stop_myself()
        os.rename(draft, event_path(scratch, number))
        program.lock.unlink(missing_ok=True)

    open_ledger(scratch).append_many([{"type": "note"}] * 3)
    worker = workers.start(append)
    worker.wait_until_stopped()
    return worker


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.req("LG-05", "LG-17")
def test_an_event_survives_a_program_that_continues_after_its_lock_was_broken(scratch: Path, stopped: Worker) -> None:
    opened = OpenLedger(scratch, FileStore(scratch), None)
    assert opened.lock is not None
    state = opened.lock.state()
    assert state is not None
    assert opened.break_lock(state.identity) == 4
    running = open_claims(scratch)
    ours = running.ledger.append({"type": "ours", "id": "ours"})
    assert running.active() == []
    stopped.resume()
    assert stopped.wait() == 0

    assert ours.sequence == 5
    assert [each.event["type"] for each in running.ledger.events(after=3)] == ["lock_acquired", "ours"]
    for claims in (running, open_claims(scratch)):
        with pytest.raises(NodeLocked, match="go-agent"):
            claims.claim("2", "ours")
    assert findings(scratch) == [("note", "replaced")]


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.req("LG-05")
def test_a_checkpoint_does_not_hide_the_event_of_a_program_that_continued(scratch: Path, stopped: Worker) -> None:
    opened = OpenLedger(scratch, FileStore(scratch), None)
    assert opened.lock is not None
    state = opened.lock.state()
    assert state is not None
    opened.break_lock(state.identity)
    opened.ledger.append_many([{"type": "note"}] * 100)
    assert open_claims(scratch).active() == []
    assert open_claims(scratch).ledger.checkpoint("claims", "2") is not None
    stopped.resume()
    assert stopped.wait() == 0
    assert [each.owner for each in open_claims(scratch).active()] == ["go-agent"]
    opened.close()


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.req("LG-05")
def test_an_event_that_another_program_overwrote_is_reported_with_its_content(scratch: Path, stopped: Worker) -> None:
    (scratch / "ledger/ledger.lock").unlink()  # by hand: nothing keeps the place of the stopped program
    ledger = open_ledger(scratch)
    assert ledger.append({"type": "ours", "id": "ours", "text": "valuable"}).sequence == 4
    stopped.resume()
    assert stopped.wait() == 0

    assert ledger.read(4).event["type"] == "lock_acquired"
    (found,) = verify(ledger, scratch).findings
    assert (found.severity, found.code, found.subject) == ("error", "lost", str(event_path(scratch, 4)))
    kept = dict(streams.read_receipts(FileStore(scratch)._root.beneath("ledger")))
    content = json.loads(kept[4])
    assert content["text"] == "valuable"
    ledger.append(content)  # as the remedy says
    assert findings(scratch) == []


def test_a_lock_of_a_dead_holder_is_broken_without_an_event(scratch: Path, workers: Workers) -> None:
    def hold(line: Line) -> None:
        from holdfast.locks.ledger_lock import LedgerLock

        LedgerLock(scratch / "ledger", "doomed").acquire()

    open_ledger(scratch).append({"type": "note"})
    workers.start(hold).wait()
    opened = OpenLedger(scratch, FileStore(scratch), None)
    assert opened.lock is not None
    state = opened.lock.state()
    assert state is not None
    assert opened.break_lock(state.identity) is None
    assert len(event_files(scratch)) == 1


# --- Receipts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"no number", b'{"type":"torn","id":"x"', b'{"id":"a"} 99\n', b"\0" * 100])
def test_torn_receipts_mislead_nobody(scratch: Path, content: bytes) -> None:
    fill(scratch, 5)
    (scratch / "ledger/.receipts").write_bytes(content)
    ledger = open_ledger(scratch)
    assert ledger.append({"type": "note"}).sequence == 6
    assert open_ledger(scratch).append({"type": "note"}).sequence == 7
    assert [each.sequence for each in open_ledger(scratch).events()] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_receipts_that_cannot_be_written_stop_nobody(scratch: Path) -> None:
    fill(scratch, 2)
    if sys.platform != "win32":
        os.mkfifo(scratch / "ledger/.receipts")
    assert open_ledger(scratch).append({"type": "note"}).sequence == 3
    assert open_ledger(scratch).append_many([{"type": "note"}] * 2)[-1].sequence == 5
    assert findings(scratch) == []


def test_old_receipts_are_dropped(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST_RECEIPTS", 2000)
    ledger = open_ledger(scratch)
    for _ in range(100):
        ledger.append({"type": "note"})
    kept = [number for number, _ in streams.read_receipts(FileStore(scratch)._root.beneath("ledger"))]
    assert kept == list(range(kept[0], 101))
    assert 20 < len(kept) < 60
    assert findings(scratch) == []


# --- Long gaps, after which only another program has appended ---------------------------------------------------

GAP_LENGTHS = [17, 18, 20, 31, 33, 100, 1000]


class CarefulProgram(GoProgram):
    """Another program, which appends one past the highest number."""

    def highest(self) -> int:
        return max((int(path.name[6:-5]) for path in self.ledger.glob("event-*.json")), default=0)

    def append(self, count: int = 1) -> None:
        self.acquire()
        try:
            for number in range(self.highest() + 1, self.highest() + 1 + count):
                draft = self.ledger / ".event-careful.tmp"
                draft.write_text('{"type": "theirs", "timestamp": "2024-01-15T10:30:00Z"}')
                os.rename(draft, self.ledger / f"event-{number:06d}.json")
        finally:
            self.release()


@pytest.mark.req("LG-12")
@pytest.mark.parametrize("length", GAP_LENGTHS)
@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_gap_of_any_length_is_never_filled(scratch: Path, length: int, after: int) -> None:
    running, program = open_ledger(scratch), CarefulProgram(scratch)
    running.append_many([{"type": "note"}] * 3)
    program.append(length + after)
    remove(scratch, *range(4, 4 + length))
    assert [each.sequence for each in open_ledger(scratch).events()][3:] == [*range(4 + length, 4 + length + after)]
    assert open_ledger(scratch).append({"type": "new"}).sequence == 4 + length + after
    program.append(length + after)
    remove(scratch, *range(5 + length + after, 5 + 2 * length + after))
    assert running.append({"type": "new"}).sequence == 5 + 2 * (length + after)


def check_random_history(root: Path, seed: int) -> None:
    """The next number is one past the highest, whatever our processes, another program and a person have done."""
    chance, program = random.Random(seed), CarefulProgram(root)
    ledgers = [open_ledger(root)]
    ledgers[0].append({"type": "first"})
    for _ in range(40):
        act = chance.choice(["ours", "ours", "fresh", "batch", "refused", "theirs", "removed", "closed"])
        expected = program.highest() + 1
        if act == "fresh":
            ledgers.append(open_ledger(root))
        elif act == "closed":
            ledgers.pop(chance.randrange(len(ledgers))).store.close()
            ledgers.append(open_ledger(root))
        if act == "theirs":
            program.append(chance.choice([1, 2, 17, 19, 40, 130]))
        elif act == "removed":
            existing = sorted(int(path.name[6:-5]) for path in event_files(root))
            first = chance.randrange(len(existing) or 1)
            remove(root, *existing[first : first + chance.choice([1, 3, 18, 60, 140])])
        elif act == "batch":
            made = chance.choice(ledgers).append_many([{"type": "note"}] * chance.randrange(2, 30))
            assert made[0].sequence == expected, f"seed {seed}: a number was filled"
        elif act == "refused":
            with pytest.raises(SequenceMismatch):
                chance.choice(ledgers).append_if_sequence({"type": "note"}, expected + 5)
        else:
            sequence = chance.choice(ledgers[-3:]).append({"type": "note"}).sequence
            assert sequence == expected, f"seed {seed}: {sequence} is not one past the highest"
    for each in ledgers:
        each.store.close()


@pytest.mark.req("LG-12")
@pytest.mark.parametrize("seed", range(12))
def test_the_next_number_is_one_past_the_highest_in_random_histories(scratch: Path, seed: int) -> None:
    check_random_history(scratch, seed)


def test_a_note_that_outlives_the_changes_of_others_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_lock, "_state", lambda status: (1, 1, 1, 1))  # the planted bug

    def check() -> None:
        for seed in range(12):
            check_random_history(scratch / str(seed), seed)

    with pytest.raises(AssertionError, match=r"filled|one past"):
        check()


# --- What that costs ----------------------------------------------------------------------------------------------


def listings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the listings of the ledger from now on."""
    seen: list[str] = []
    real = Directory.names

    def names(directory: Directory) -> list[str]:
        if directory.shown.endswith("/ledger"):
            seen.append(directory.shown)
        return real(directory)

    monkeypatch.setattr(Directory, "names", names)
    return seen


def test_our_own_processes_list_nothing(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(scratch, 20_000)
    open_ledger(scratch).append({"type": "first"})  # lists once: who knows what the other program did
    listings = listings_of(monkeypatch)
    running, turns = [open_ledger(scratch) for _ in range(2)], 0
    for turn in range(60):
        fresh = open_ledger(scratch)
        for ledger in (running[turn % 2], fresh, running[0]):
            assert ledger.append({"type": "note"}).sequence == 20_002 + turns
            turns += 1
        if turn % 2:
            fresh.append_many([{"type": "note"}] * 2)
            turns += 2
        fresh.store.close()
    assert listings == []
    CarefulProgram(scratch).append()
    running[0].append({"type": "note"})
    assert len(listings) == 1
