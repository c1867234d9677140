"""Many processes race for one lease: exactly one wins, and the audit trail agrees.

Each round sets up a lease, starts all workers at once, and judges their answers.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.leases.rules import Lease, LeaseKeys
from holdfast.leases.service import LeaseService
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, Replace, View
from proof.effort import rounds
from tests.locks.workers import Line, Worker, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

PROCESSES = 8
ROUNDS = rounds(100, least=20)
LONG = 3600.0
KEYS = LeaseKeys.of("main")
TRAIL = AuditTrail()


class Answer(NamedTuple):
    """The answer of a worker: an error code, or its action and the lease."""

    what: str
    lock_id: str = ""
    token: int = 0


def service_at(directory: Path) -> LeaseService:
    return LeaseService(FileStore(directory, timeout=60.0), TRAIL)


def act(service: LeaseService, action: str, lock_id: str) -> Answer:
    try:
        if action == "renew":
            return Answer("renewed", service.renew("main", lock_id, LONG).lock_id)
        if action == "release":
            return Answer("released", service.release("main", lock_id).lock_id)
        give = service.acquire if action == "acquire" else service.steal
        lease = give("main", service.request(ttl=LONG)).lease
    except Failure as failure:
        return Answer(failure.code)
    return Answer("granted", lease.lock_id, lease.fencing_token)


class Stage:
    """One store with eight workers, and helpers that set up a round."""

    def __init__(self, directory: Path, workers: Workers) -> None:
        def work(line: Line) -> None:
            service = service_at(directory)
            while True:
                line.say(act(service, *line.wait()))

        self.service = service_at(directory)
        self.workers: list[Worker] = workers.start_many(PROCESSES, work)

    def run_all(self, *orders: tuple[str, str]) -> list[Answer]:
        """Give the workers the orders in turn, all at once; return their answers in the same order."""
        for number, worker in enumerate(self.workers):
            worker.say(orders[number % len(orders)])
        return [Answer(*worker.hear()) for worker in self.workers]

    def current(self) -> Lease | None:
        state = self.service.state("main")
        return None if state is None else state.lease

    def clear(self) -> None:
        lease = self.current()
        if lease is not None:
            self.service.release("main", lease.lock_id)

    def expired_lease(self) -> Lease:
        """Leave an expired lease, as a holder that died long ago does."""
        self.clear()
        lease = self.service.acquire("main", self.service.request(ttl=LONG)).lease

        reading = self.service.reading()

        def expire(view: View, now: float) -> Decision[Lease]:
            found = view.get(KEYS.lease)
            assert found is not None
            old = Lease(
                **{
                    **{name: getattr(found, name) for name in found.__struct_fields__},
                    "lease_expires_at": format_instant(now - 1),
                    "boot_expires_at": reading.at(now).mark(-1),
                }
            )
            return Decision([Replace(KEYS.lease, old)], old)

        assert lease.fencing_token
        return self.service.store.transact(KEYS.all(), expire).result

    def stolen(self) -> int:
        """The number of steals in the trail; reading it verifies the chain."""
        entries = verify(self.service.store.entries(TRAIL.stream))
        return sum(entry.event == "lock_stolen" for entry in entries)


@pytest.fixture
def stage(records: Path) -> Iterator[Stage]:
    with Workers() as workers:
        yield Stage(records, workers)


@pytest.mark.req("LC-02", "LC-07", "LC-08")
def test_one_of_eight_acquirers_wins_and_seven_are_refused(stage: Stage) -> None:
    tokens = [0]
    for _ in range(ROUNDS):
        stage.clear()
        answers = stage.run_all(("acquire", ""))
        counted = Counter(answer.what for answer in answers)
        assert counted == {"granted": 1, "E_LOCK_CONFLICT": PROCESSES - 1}
        winner = next(answer for answer in answers if answer.what == "granted")
        current = stage.current()
        assert current is not None
        assert current.lock_id == winner.lock_id
        tokens.append(winner.token)
    assert all(later > earlier for earlier, later in itertools.pairwise(tokens))


@pytest.mark.req("LC-09", "LC-14", "LC-15")
@pytest.mark.parametrize("how", ["acquire", "steal"])
def test_one_of_eight_racers_for_an_expired_lease_wins_with_the_next_token_and_one_record(
    stage: Stage, how: str
) -> None:
    for number in range(1, ROUNDS + 1):
        expired = stage.expired_lease()
        answers = stage.run_all((how, ""))
        assert Counter(answer.what for answer in answers) == {"granted": 1, "E_LOCK_CONFLICT": PROCESSES - 1}
        winner = next(answer for answer in answers if answer.what == "granted")
        assert winner.token == expired.fencing_token + 1
        if number % 20 == 0:
            assert stage.stolen() == number


@pytest.mark.req("LC-11", "LC-13")
def test_a_renewal_that_races_steals_never_revives_the_old_lease(stage: Stage) -> None:
    for _ in range(ROUNDS):
        expired = stage.expired_lease()
        answers = stage.run_all(("renew", expired.lock_id), ("steal", ""))
        granted = [answer for answer in answers if answer.what == "granted"]
        assert len(granted) == 1
        assert not [answer for answer in answers if answer.what == "renewed"]
        current = stage.current()
        assert current is not None
        assert current.lock_id == granted[0].lock_id


@pytest.mark.long
@pytest.mark.req("LC-16")
def test_a_release_that_races_steals_never_removes_the_new_lease(stage: Stage) -> None:
    for _ in range(ROUNDS):
        expired = stage.expired_lease()
        answers = stage.run_all(("release", expired.lock_id), ("acquire", ""))
        granted = [answer for answer in answers if answer.what == "granted"]
        released = [answer for answer in answers if answer.what == "released"]
        assert len(granted) == 1
        assert len(released) <= 1
        current = stage.current()
        assert current is not None
        assert current.lock_id == granted[0].lock_id
        assert current.fencing_token == expired.fencing_token + 1
