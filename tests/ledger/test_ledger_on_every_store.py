"""The ledger and its claims on files, PostgreSQL and etcd."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.errors import Failure, SequenceMismatch
from holdfast.ledger.log import Ledger
from holdfast.ledger.projection import ACQUIRED
from holdfast.ledger.service import Claims
from tests.ledger.ledgers import append_raw
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
pytest.importorskip("tests.support.servers", reason="this version has no stores on servers")

PROCESSES = 4
ROUNDS = 8


def claims_at(root: Path, url: str) -> Claims:
    from holdfast.store import open

    return Claims(Ledger(open.open_address(root, url)))  # type: ignore[attr-defined, unused-ignore]


@pytest.mark.sampled(1)
def test_events_are_appended_compared_read_and_found(tmp_path: Path, store_url: str) -> None:
    ledger = claims_at(tmp_path, store_url).ledger
    assert [ledger.append({"type": "a"}).sequence for _ in range(3)] == [1, 2, 3]
    assert [each.sequence for each in ledger.append_many([{"type": "b"}] * 5)] == [4, 5, 6, 7, 8]
    with pytest.raises(SequenceMismatch):
        ledger.append_if_sequence({"type": "c"}, 7)
    made = ledger.append_if_sequence({"type": "c"}, 8)
    assert (ledger.find(made.event["id"]), ledger.read(9)) == (made, made)
    assert Ledger(ledger.store).sequence == 9
    assert [each.sequence for each in ledger.events(after=3, until=5)] == [4, 5]
    assert [each.sequence for each in ledger.watch(after=7, timeout=0.05)] == [8, 9]
    assert ledger.fold(lambda count, _: count + 1, 0) == 9


@pytest.mark.req("LG-17")
@pytest.mark.sampled(2)
def test_exactly_one_concurrent_claimer_wins_and_one_concurrent_reaper_reaps(tmp_path: Path, store_url: str) -> None:
    def work(line: Line) -> None:
        own = claims_at(tmp_path, store_url)
        while True:
            order, node = line.wait()
            try:
                line.say(len(own.reap()) if order == "reap" else own.claim(node, "me").owner)
            except Failure as failure:
                line.say(failure.code)

    claims = claims_at(tmp_path, store_url)
    with Workers() as workers:
        crew = workers.start_many(PROCESSES, work)

        def run_all(order: str, node: str) -> list[object]:
            for worker in crew:
                worker.say((order, node))
            return [worker.hear() for worker in crew]

        for number in range(1, ROUNDS + 1):
            answers = Counter(run_all("claim", f"1.{number}"))
            assert answers == {"me": 1, "E_NODE_LOCKED": PROCESSES - 1}
            stamp = "2024-01-15T10:30:00Z"
            expired = {"type": ACQUIRED, "timestamp": stamp, "node_id": f"2.{number}", "owner": "gone"}
            append_raw(claims.ledger, {**expired, "expires_at": stamp})
            assert Counter(run_all("reap", "")) == {1: 1, 0: PROCESSES - 1}
    assert [each.sequence for each in claims.ledger.events()] == list(range(1, 3 * ROUNDS + 1))


@pytest.mark.req("LG-19")
def test_waiters_are_served_in_order_of_arrival(tmp_path: Path, store_url: str) -> None:
    def work(line: Line) -> None:
        name = line.wait()
        with claims_at(tmp_path, store_url).claim("1", name, wait=PATIENCE) as held:
            line.say(held.claim.sequence)

    claims = claims_at(tmp_path, store_url)
    first = claims.claim("1", "first")
    with Workers() as workers:
        crew = workers.start_many(PROCESSES, work)
        for number, worker in enumerate(crew, 1):
            worker.say(f"agent-{number}")
            wait_until(lambda: len(claims.waiting("1")) == number)  # noqa: B023 (called at once)
        first.release()
        sequences = [worker.hear() for worker in crew]
    assert sequences == sorted(sequences)
