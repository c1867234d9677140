"""Leases on files, PostgreSQL and etcd: one winner, growing tokens, a queue that moves when notified."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.errors import Failure, FencingMismatch
from holdfast.leases.rules import LeaseKeys
from holdfast.leases.service import LeaseService, acquire
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.model import Append, Decision, View
from holdfast.store.open import open_address
from holdfast.testing.backend import LEDGER, Event
from tests.locks.workers import PATIENCE, Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

PROCESSES = 4
ROUNDS = 12
LONG = 3600.0
KEYS = LeaseKeys.of("main")
TRAIL = AuditTrail()


@pytest.fixture
def service(tmp_path: Path, store_url: str) -> LeaseService:
    return LeaseService(open_address(tmp_path, store_url), TRAIL)


@pytest.mark.sampled(1)
def test_exactly_one_concurrent_acquirer_wins_with_the_next_token(
    tmp_path: Path, store_url: str, service: LeaseService
) -> None:
    def work(line: Line) -> None:
        own = LeaseService(open_address(tmp_path, store_url), TRAIL)
        while True:
            line.wait()
            try:
                lease = own.acquire("main", own.request(ttl=LONG)).lease
                line.say(("granted", lease.lock_id, lease.fencing_token))
            except Failure as failure:
                line.say((failure.code, "", 0))

    tokens = []
    with Workers() as workers:
        crew = workers.start_many(PROCESSES, work)
        for _ in range(ROUNDS):
            for worker in crew:
                worker.say("acquire")
            answers = [worker.hear() for worker in crew]
            assert Counter(what for what, _, _ in answers) == {"granted": 1, "E_LOCK_CONFLICT": PROCESSES - 1}
            _, lock_id, token = max(answers, key=lambda each: each[2])
            tokens.append(token)
            service.release("main", lock_id)

    assert tokens == list(range(1, ROUNDS + 1))
    events = [entry.event for entry in verify(service.store.entries(TRAIL.stream))]
    assert events == ["lock_acquired", "lock_released"] * ROUNDS


def test_releasing_a_lease_wakes_the_waiters_in_queue_order(
    tmp_path: Path, store_url: str, service: LeaseService
) -> None:
    def work(line: Line) -> None:
        own = LeaseService(open_address(tmp_path, store_url), TRAIL)
        request = own.request(ttl=LONG)
        own.join_queue("main", request)
        line.say("waiting")
        held = acquire(own, "main", request, wait=PATIENCE)
        line.say(held.token)
        line.wait()
        held.release()
        line.say("released")

    first = service.acquire("main", service.request(ttl=LONG)).lease
    with Workers() as workers:
        crew = []
        for _ in range(PROCESSES):  # one at a time, so that their order is known
            crew.append(workers.start(work))
            assert crew[-1].hear() == "waiting"
        service.release("main", first.lock_id)
        for number, worker in enumerate(crew):
            assert worker.hear() == first.fencing_token + 1 + number
            assert not any(later.line.has_news() for later in crew[number + 1 :])
            assert worker.ask("release") == "released"


def test_a_lease_that_was_released_cannot_commit(service: LeaseService) -> None:
    leases = []
    for _ in range(3):
        leases.append(service.acquire("main", service.request(ttl=LONG)).lease)
        service.release("main", leases[-1].lock_id)
    leases.append(service.acquire("main", service.request(ttl=LONG)).lease)

    def commit(number: int) -> None:
        lease = leases[number]

        def decide(view: View, now: float) -> Decision[None]:
            found = view.get(KEYS.lease)
            if found is None or found.lock_id != lease.lock_id or found.fencing_token != lease.fencing_token:
                raise FencingMismatch("not the current one")
            return Decision([Append(LEDGER, Event(lease.fencing_token))], None)

        service.store.transact([KEYS.lease, LEDGER], decide)

    for stale in range(3):
        with pytest.raises(FencingMismatch):
            commit(stale)
    commit(3)

    assert [each.record.number for each in service.store.entries(LEDGER)] == [4]
    assert all(later > earlier for earlier, later in itertools.pairwise(each.fencing_token for each in leases))
