"""Many processes on one ledger, some killed or stopped: no event lost or duplicated, never two owners."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import parse_instant
from holdfast.errors import Failure, LockNotHeld
from holdfast.ledger.projection import ACQUIRED, REAPED, RELEASED
from holdfast.ledger.service import Claims, Rule
from proof.effort import rounds
from tests.ledger.ledgers import acquired, append_raw, open_claims, open_ledger, raw_events
from tests.locks.workers import PATIENCE, Line, Worker, Workers, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

WAITER_TIMEOUT = 2.0
"""The heartbeat timeout of waiters: short, because some are killed and some stopped."""


def check_claims(events: list[dict[str, Any]]) -> None:
    """Check by the events alone that claims never overlap and that each one ends once."""
    held: dict[str, dict[str, Any]] = {}
    for event in events:
        kind, node = event["type"], event.get("node_id", "")
        if kind == ACQUIRED and not event.get("extended"):
            assert node not in held, f"{event['owner']} took {node} while {held[node]['owner']} held it"
            held[node] = event
        elif kind == ACQUIRED:
            assert held[node]["claim_id"] == event["claim_id"]
            held[node] = event
        elif kind in (RELEASED, REAPED):
            ended = held.pop(node)
            assert ended["claim_id"] == event["claim_id"]
            assert kind == RELEASED or parse_instant(event["timestamp"]) >= parse_instant(ended["expires_at"])


def check_ids_are_unique(events: list[dict[str, Any]]) -> None:
    duplicates = [each for each, count in Counter(event["id"] for event in events).items() if count > 1]
    assert not duplicates


# --- Distinct nodes -----------------------------------------------------------------------------------------


@pytest.mark.req("LG-14", "LG-17")
@pytest.mark.parametrize(("processes", "each"), [(8, 12), pytest.param(32, 4, marks=pytest.mark.long)])
def test_processes_on_distinct_nodes_all_succeed(scratch: Path, workers: Workers, processes: int, each: int) -> None:
    def work(line: Line) -> None:
        number = line.wait()
        claims = open_claims(scratch)
        for turn in range(each):
            held = claims.claim(f"1.{number}", f"agent-{number}")
            held.append({"type": "work", "agent": number, "turn": turn})
            claims.ledger.append_decided(lambda at: {"type": "seen", "agent": number, "at": at})
            held.release()
        line.say("done")

    running = workers.start_many(processes, work)
    for number, worker in enumerate(running, 1):
        worker.say(number)
    assert [worker.hear() for worker in running] == ["done"] * processes
    events = raw_events(scratch)
    counted = Counter(event["type"] for event in events)
    total = processes * each
    assert counted == {"lock_acquired": total, "lock_released": total, "work": total, "seen": total}
    assert all(event["at"] == number for number, event in enumerate(events) if event["type"] == "seen")
    check_claims(events)  # type: ignore[arg-type]
    check_ids_are_unique(events)  # type: ignore[arg-type]


# --- Kills and stops ----------------------------------------------------------------------------------------


class Storm:
    """Workers that run until told to stop, while some are killed and others paused."""

    def __init__(self, workers: Workers, count: int, task: Callable[[Line], None]) -> None:
        self._workers, self._task = workers, task
        self.running: list[Worker] = workers.start_many(count, task)
        self.acknowledged: list[Any] = []

    def run(self, *, seconds: float, kills: int) -> None:
        """Let the workers run, with a kill and a pause every now and then."""
        chance = random.Random(7)
        pause = seconds / (2 * kills)
        for _ in range(kills):
            time.sleep(pause)
            victim = chance.choice(self.running)
            victim.kill()
            self._hear_out(victim)
            self.running.remove(victim)
            self.running.append(self._workers.start(self._task))
            other = chance.choice(self.running)
            other.stop()
            time.sleep(pause)
            other.resume()

    def end(self) -> None:
        """Tell all workers to finish, and collect what they have acknowledged."""
        for worker in self.running:
            worker.say("stop")
        for worker in self.running:
            self._hear_out(worker)
            assert worker.wait() == 0

    def _hear_out(self, worker: Worker) -> None:
        try:
            while True:
                self.acknowledged.append(worker.line.hear())
        except (EOFError, ConnectionResetError):
            worker.wait()


@pytest.mark.req("LG-05", "LG-14", "LG-16", "LG-17")
@pytest.mark.parametrize("processes", [8, pytest.param(32, marks=pytest.mark.long)])
def test_no_acknowledged_event_is_lost_or_duplicated_while_processes_are_killed_and_stopped(
    scratch: Path, workers: Workers, processes: int
) -> None:
    def work(line: Line) -> None:
        node = f"1.{os.getpid()}"
        claims = open_claims(scratch)
        while not line.has_news():
            event_id = f"{os.getpid()}-{time.monotonic_ns()}"
            claims.ledger.append({"type": "work", "id": event_id})
            line.say(event_id)
            many = [{"type": "work", "id": f"{event_id}-{part}"} for part in range(3)]
            claims.ledger.append_many(many)
            for event in many:
                line.say(event["id"])
            with claims.claim(node, "me") as held:
                line.say(held.append({"type": "work"}).event["id"])

    storm = Storm(workers, processes, work)
    storm.run(seconds=2.0, kills=8)
    storm.end()
    ledger = open_ledger(scratch)
    ledger.append({"type": "last"})  # the next writer finishes any decided commit first
    events = raw_events(scratch)
    check_ids_are_unique(events)  # type: ignore[arg-type]
    check_claims(events)  # type: ignore[arg-type]
    there = {event["id"] for event in events}
    assert len(storm.acknowledged) > 5 * processes
    assert not [each for each in storm.acknowledged if each not in there]
    batches = Counter(event["id"][:-2] for event in events if event["id"].count("-") == 2)
    assert set(batches.values()) <= {3}, "a batch is incomplete"


@pytest.mark.req("LG-15", "LG-17", "LG-19")
@pytest.mark.parametrize(("processes", "kills"), [(8, 4), pytest.param(32, 2, marks=pytest.mark.long)])
def test_on_one_hot_node_owners_never_overlap(scratch: Path, workers: Workers, processes: int, kills: int) -> None:
    mark = scratch / "mark"

    def work(line: Line) -> None:
        claims = open_claims(scratch, patience=WAITER_TIMEOUT)
        while not line.has_news():
            with claims.claim("1", f"agent-{os.getpid()}", ttl=1.0, wait=PATIENCE) as held:
                before = _put_mark(mark, held.claim.claim_id)
                time.sleep(0.001)
                mine = os.readlink(mark) == held.claim.claim_id
                try:
                    held.append({"type": "work"})
                except Failure:
                    continue  # stopped beyond its TTL: its claim no longer counts
                assert mine, "another owner worked while the claim was valid"
                assert before in (None, *_ended(claims)), "two owners at once"
                line.say("worked")

    storm = Storm(workers, processes, work)
    storm.run(seconds=0.6 * kills, kills=kills)
    storm.end()
    events = raw_events(scratch)
    check_claims(events)  # type: ignore[arg-type]
    worked = sum(event["type"] == "work" for event in events)
    assert worked >= len(storm.acknowledged) > 10, worked


def _put_mark(mark: Path, claim_id: str) -> str | None:
    """Replace the mark atomically; return the previous one."""
    draft = mark.with_name(f"mark-{os.getpid()}")
    os.symlink(claim_id, draft)
    before = os.readlink(mark) if os.path.lexists(mark) else None
    os.replace(draft, mark)
    return before


def _ended(claims: Claims) -> set[str]:
    """The ids of claims that have ended according to the ledger."""
    found = (each.event for each in claims.history("1"))
    return {event["claim_id"] for event in found if event["type"] in (RELEASED, REAPED)}


# --- Reaping ------------------------------------------------------------------------------------------------

ROUNDS, CLAIMED, REAPERS = rounds(200, least=10), rounds(100, least=20), 6


def deal(workers: list[Worker], *orders: str) -> list[Any]:
    """Give the workers the orders in turn, all at once; return their answers."""
    for worker, order in zip(workers, itertools.cycle(orders)):
        worker.say(order)
    return [worker.hear() for worker in workers]


class Careless(Claims):
    """Planted bug: it decides on what it read before it had the lock."""

    def _commit(self, rule: Rule[Any]) -> Any:
        now = self.ledger.store.now()
        ruling = self._projection.query(lambda book: rule(book, now))
        if ruling.event is not None:
            append_raw(self.ledger, ruling.event)
        return ruling.result


def reap_in_rounds(root: Path, workers: Workers, open_: Callable[[Path], Claims], rounds: int) -> Iterator[list[str]]:
    """Let all reapers race for one expired claim per round; yield the results other than a single reaping."""

    def work(line: Line) -> None:
        claims = open_(root)
        while True:
            line.wait()
            line.say([claim.node_id for claim in claims.reap()])

    reapers = workers.start_many(REAPERS, work)
    ledger = open_ledger(root)
    for number in range(1, rounds + 1):
        append_raw(ledger, acquired(f"1.{number}", "gone", expires_in=-1))
        reaped = sorted(itertools.chain(*deal(reapers, "reap")))
        if reaped != [f"1.{number}"]:
            yield reaped


def test_a_reaper_that_decides_without_the_lock_is_found(scratch: Path, workers: Workers) -> None:
    assert next(reap_in_rounds(scratch, workers, lambda root: Careless(open_ledger(root)), 2_000), None)


@pytest.mark.req("LG-10")
def test_exactly_one_of_many_reapers_reaps_each_expired_claim(scratch: Path, workers: Workers) -> None:
    assert list(reap_in_rounds(scratch, workers, open_claims, ROUNDS)) == []
    counted = Counter(event["node_id"] for event in raw_events(scratch) if event["type"] == REAPED)
    assert counted == dict.fromkeys((f"1.{number}" for number in range(1, ROUNDS + 1)), 1)


@pytest.mark.req("LG-10")
def test_either_the_release_or_one_reaper_ends_a_claim(scratch: Path, workers: Workers) -> None:
    def work(line: Line) -> None:
        claims = open_claims(scratch)
        while True:
            if line.wait() == "reap":
                line.say(len(claims.reap()))
                continue
            try:
                claims.release("1", "owner")
                line.say("released")
            except LockNotHeld:
                line.say("too late")

    running = workers.start_many(4, work)
    ledger = open_ledger(scratch)
    won: Counter[str] = Counter()
    for _ in range(ROUNDS):
        append_raw(ledger, acquired("1", "owner", expires_in=-1))
        answers = deal(running, "release", "reap")
        ends = answers.count("released") + sum(each for each in answers if isinstance(each, int))
        assert ends == 1, answers
        won["release" if "released" in answers else "reap"] += 1
    counted = Counter(event["type"] for event in raw_events(scratch))
    assert counted == Counter({ACQUIRED: ROUNDS, RELEASED: won["release"], REAPED: won["reap"]})


@pytest.mark.req("LG-17")
def test_exactly_one_of_many_concurrent_claimers_wins(scratch: Path, workers: Workers) -> None:
    def work(line: Line) -> None:
        claims = open_claims(scratch)
        while True:
            node = line.wait()
            try:
                line.say(claims.claim(node, f"agent-{os.getpid()}").owner)
            except Failure as failure:
                line.say(failure.code)

    running = workers.start_many(REAPERS, work)
    for number in range(1, CLAIMED + 1):
        answers = deal(running, f"1.{number}")
        assert Counter(answers)["E_NODE_LOCKED"] == REAPERS - 1, answers
    assert len(raw_events(scratch)) == CLAIMED


# --- The queue ----------------------------------------------------------------------------------------------


def _are_waiting(claims: Claims, count: int) -> bool:
    return len(claims.waiting("1")) == count


@pytest.mark.req("LG-19")
def test_sixteen_waiters_are_served_in_order_of_arrival(scratch: Path, workers: Workers) -> None:
    def work(line: Line) -> None:
        name = line.wait()
        with open_claims(scratch).claim("1", name, wait=PATIENCE) as held:
            line.say(held.claim.sequence)

    claims = open_claims(scratch)
    first = claims.claim("1", "first")
    running = workers.start_many(16, work)
    for number, worker in enumerate(running, 1):
        worker.say(f"agent-{number:02}")
        wait_until(partial(_are_waiting, claims, number))
    first.release()
    sequences = [worker.hear() for worker in running]
    assert sequences == sorted(sequences)
    taken = [event["owner"] for event in raw_events(scratch) if event["type"] == ACQUIRED]
    assert list(dict.fromkeys(taken)) == [
        "first",
        *(f"agent-{number:02}" for number in range(1, 17)),
    ]


@pytest.mark.req("LG-19")
def test_a_waiter_that_was_killed_is_skipped_at_once(scratch: Path, workers: Workers) -> None:
    def work(line: Line) -> None:
        name = line.wait()
        with open_claims(scratch, patience=600.0).claim("1", name, wait=PATIENCE):
            line.say(name)

    claims = open_claims(scratch)
    first = claims.claim("1", "first")
    dead, living = workers.start_many(2, work)
    for number, worker in enumerate((dead, living), 1):
        worker.say(f"agent-{number}")
        wait_until(partial(_are_waiting, claims, number))
    dead.kill()
    dead.wait()
    first.release()
    assert living.hear() == "agent-2"
