"""A batch whose author is killed while other programs go on: numbers that a reader was shown never change.

The other program follows the specification: it removes the lock of the dead holder and appends. Our readers and a
long-running claimer look at every moment in between.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import LockTimeout, NodeLocked, OutcomeUnknown
from holdfast.ledger.log import Ledger
from holdfast.store import intents
from holdfast.store.files import FileStore
from proof.crash import Attempt, Outcome, interposed, kill_points
from proof.effort import SHARE, rounds
from tests.ledger.ledgers import acquired, close_all, open_claims, open_ledger, raw_events
from tests.ledger.test_other_programs import GoProgram
from tests.locks.workers import Line, Workers
from tests.store.commit_operations import determined

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

CLOCK = ManualClock()
PARTS = 3
NODE = "1.2"


class Views:
    """What readers were shown: what one of them saw at a number, all see there; of a batch, all see all or nothing."""

    def __init__(self) -> None:
        self.shown: dict[int, dict[str, Any]] = {}

    def look(self, ledger: Ledger) -> None:
        seen = {each.sequence: each.event for each in ledger.events()}
        for number, event in self.shown.items():
            assert seen.get(number) == event, f"event {number} was {event}, and is now {seen.get(number)}"
        counted = Counter(str(event["batch"]) for event in seen.values() if "batch" in event)
        assert set(counted.values()) <= {PARTS}, f"readers see a part of a batch: {counted}"
        self.shown = seen


def batch(name: str) -> list[dict[str, Any]]:
    return [{"type": "part", "batch": name, "id": f"{name}-{part}"} for part in range(PARTS)]


class TakenOver:
    """Append a batch; then another program takes over the lock and claims a node."""

    def prepare(self, directory: Path) -> None:
        with FileStore(directory, clock=CLOCK) as store:
            Ledger(store).append_many(batch("old"))

    def operate(self, directory: Path) -> None:
        with determined("writer"), FileStore(directory, clock=CLOCK, timeout=1.0) as store:
            Ledger(store).append_many(batch("new"))

    def check(self, directory: Path, outcome: Outcome) -> None:
        views, program = Views(), GoProgram(directory)
        claims = open_claims(directory, clock=CLOCK)  # runs all the time, and sees everything in between
        claims.active()
        views.look(claims.ledger)
        program.lock.unlink(missing_ok=True)
        program.acquire()
        claims.active()
        views.look(claims.ledger)
        foreign = {**acquired(NODE, "go-agent", expires_in=100, at=CLOCK.wall()), "id": "foreign"}
        draft = program.ledger / ".event-go.tmp"
        draft.write_text(json.dumps(foreign))
        os.rename(draft, program.ledger / f"event-{program.count() + 1:06d}.json")
        views.look(claims.ledger)
        views.look(open_ledger(directory, clock=CLOCK))
        program.release()
        claims.active()
        views.look(claims.ledger)
        with pytest.raises(NodeLocked, match="go-agent"):
            claims.claim(NODE, "ours")
        claims.ledger.append({"type": "next"})
        views.look(claims.ledger)
        events = raw_events(directory)  # as any program reads them: no gap
        assert [dict(each) for each in events] == list(views.shown.values())
        made = [each.get("batch") for each in events].count("new")
        assert made == PARTS or (made == 0 and not outcome.acknowledged)
        close_all()


class TakenOverAtOnce(TakenOver):
    """The same with a batch that is synced all at once."""

    def operate(self, directory: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
            super().operate(directory)


@pytest.mark.req("LG-05", "LG-13", "LG-15", "LG-17")
@pytest.mark.parametrize("scenario", [TakenOver(), TakenOverAtOnce()], ids=["several", "at once"])
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_of_a_batch_beside_another_program_changes_no_number_that_was_shown(
    scenario: TakenOver,
) -> None:
    kill_points(scenario, share=SHARE).require_clean(at_least=60)


@pytest.mark.req("LG-13", "LG-15", "LG-17")
def test_a_kill_at_any_publication_of_a_batch_beside_another_program_grants_no_node_twice() -> None:
    kill_points(TakenOver(), names=("rename_noreplace",)).require_clean(at_least=5)


@pytest.mark.req("LG-05", "LG-11")
@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_author_whose_lock_was_broken_learns_the_numbers_that_another_process_gave(
    scratch: Path, number: int
) -> None:
    ledger, views = open_ledger(scratch), Views()
    broken: list[int] = []
    ledger.append({"type": "old"})

    def break_lock(attempt: Attempt) -> Any:
        if attempt.arguments[1] == f"event-{number:06d}.json" and not broken:
            broken.append(number)
            (scratch / "ledger/ledger.lock").unlink()
            (scratch / "ledger/.ledger.lock.turnstile").unlink()
            (scratch / f"ledger/event-{number:06d}.json").write_bytes(b'{"type":"stranger"}\n')
            views.look(open_ledger(scratch, timeout=5.0))  # a reader finishes what it takes for abandoned
        return attempt.perform()

    with interposed(break_lock, ("rename_noreplace",)):
        made = ledger.append_many(batch("mine"))
    views.look(ledger)
    assert {each.sequence: each.event for each in made}.items() <= views.shown.items()
    assert len(views.shown) == PARTS + 2


def test_a_batch_that_is_decided_but_cannot_be_applied_is_not_reported_as_done(scratch: Path) -> None:
    ledger = open_ledger(scratch)

    def fail(attempt: Attempt) -> Any:
        if attempt.arguments[1].startswith("event-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return attempt.perform()

    with interposed(fail, ("rename_noreplace", "link")), pytest.raises(OutcomeUnknown, match="mine-0"):
        ledger.append_many(batch("mine"))
    found = ledger.find("mine-0")
    assert found is not None
    assert (found.sequence, ledger.sequence) == (1, PARTS)


def test_an_event_is_searched_for_until_it_is_known_whether_it_was_appended(scratch: Path, workers: Workers) -> None:
    def die(line: Line) -> None:
        def end(attempt: Attempt) -> Any:
            if attempt.arguments[1].startswith("event-"):
                os._exit(9)
            return attempt.perform()

        with interposed(end, ("rename_noreplace",)):
            open_ledger(scratch).append_many(batch("mine"))

    open_ledger(scratch).append({"type": "old"})
    assert workers.start(die).wait() == 9
    program = GoProgram(scratch)
    program.lock.unlink()
    program.acquire()
    with pytest.raises(LockTimeout):
        open_ledger(scratch, timeout=0.05).find("mine-0")
    program.release()
    found = open_ledger(scratch).find("mine-0")
    assert found is not None
    assert found.sequence == 2


class _Judge:
    """Compares what all readers of a storm were shown."""

    def __init__(self) -> None:
        self.shown: dict[int, str] = {}

    def hear(self, seen: dict[int, str]) -> None:
        for number, event in seen.items():
            assert self.shown.setdefault(number, event) == event, f"two readers saw different events at {number}"


@pytest.mark.req("LG-05", "LG-13", "LG-17")
def test_readers_agree_on_every_number_while_authors_are_killed_and_another_program_takes_over(
    scratch: Path, workers: Workers
) -> None:
    """Kill an author of batches, take over its lock and append, many times, while readers and a claimer look."""
    open_ledger(scratch).append({"type": "first"})

    def append(line: Line) -> None:
        ledger = open_ledger(scratch)
        for turn in range(1000):
            ledger.append_many(batch(f"{os.getpid()}-{turn}"))

    def read(line: Line) -> None:
        views, ledger = Views(), open_ledger(scratch)
        while not line.has_news():
            views.look(ledger)
        line.say({number: json.dumps(event) for number, event in views.shown.items()})

    def claim(line: Line) -> None:
        claims, got = open_claims(scratch), 0
        while not line.has_news():
            with contextlib.suppress(NodeLocked, LockTimeout):
                claims.claim(NODE, "ours")
                got += 1
            claims.active()
        line.say(got)

    judge, program, chance = _Judge(), GoProgram(scratch), random.Random(7)
    program.safe_append(acquired(NODE, "go-agent", expires_in=3600))
    readers, claimer = workers.start_many(2, read), workers.start(claim)
    for turn in range(rounds(300, least=6)):
        author = workers.start(append)
        before = program.count()
        while program.count() == before:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.01)
        author.kill()
        author.wait()
        taken_over(program, {"type": "foreign", "timestamp": program.now(), "turn": str(turn)})
    for each in readers:
        judge.hear(each.ask("stop"))
    assert claimer.ask("stop") == 0, "a node was granted that another program holds"
    final = {each.sequence: json.dumps(each.event) for each in open_ledger(scratch).events()}
    judge.hear(final)
    assert set(judge.shown) == set(final)
    Views().look(open_ledger(scratch))
    events = raw_events(scratch)
    assert [each["turn"] for each in events if each["type"] == "foreign"] == [
        str(turn) for turn in range(rounds(300, least=6))
    ]
    assert program.locks() == {NODE: "go-agent"}


def taken_over(program: GoProgram, event: dict[str, str]) -> None:
    """Append as a program that removes the lock of a holder which it knows to be dead."""
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            program.acquire(timeout=0.0)
            break
    else:
        record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(program.lock.read_bytes())
        pid = int(str(record.get("holder_id", ":::0")).split(":")[2] or 0)
        if not pid or not Path(f"/proc/{pid}").exists():
            program.lock.unlink(missing_ok=True)
        return taken_over(program, event)
    try:
        draft = program.ledger / ".event-go.tmp"
        draft.write_text(json.dumps(event))
        os.rename(draft, program.ledger / f"event-{program.count() + 1:06d}.json")
    finally:
        program.release()
