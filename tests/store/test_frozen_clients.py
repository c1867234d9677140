"""A client of PostgreSQL that is stopped or unplugged, at any message, does not delay the others: neither commits to
the same documents, nor renewals of the same lease, nor a `holdfast run` that holds it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from holdfast.errors import StoreUnavailable, TooManyRetries
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId
from holdfast.issues.tracker import Tracker
from holdfast.leases.service import LeaseService
from holdfast.repository.init import initialise
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Create
from holdfast.testing.backend import EVENTS, INDEX, Item, apply, increment, number_of
from proof.effort import chosen, rounds, tried
from tests.cli.commands import Running
from tests.locks.workers import Line, Workers
from tests.support.proxy import Proxy
from tests.support.servers import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store import postgres  # noqa: E402
from holdfast.store.postgres import PostgresStore  # noqa: E402

if sys.platform == "win32":
    pytest.skip("Windows has no fork", allow_module_level=True)

MOST_DELAY = 2.0  # seconds, beyond the longest wait without a frozen client

Fault = Literal["stop", "unplug before", "unplug after"]
FAULTS: tuple[Fault, ...] = ("stop", "unplug before", "unplug after")


Work = Callable[[PostgresStore], Callable[[], object]]
"""What a client does again and again with its store."""


def incrementing(store: PostgresStore) -> Callable[[], object]:
    return lambda: increment(store, INDEX, EVENTS)


def incrementing_in_turn(store: PostgresStore) -> Callable[[], object]:
    store._conflicts = {INDEX.name: float("inf")}
    return incrementing(store)


def renewing(lock_id: str) -> Work:
    """Renew a lease that others renew too."""
    return lambda store: partial(LeaseService(store, AuditTrail()).renew, "main", lock_id)


class Victim:
    """A process that works all the time through a proxy, until it is frozen at one of its messages."""

    def __init__(self, workers: Workers, server: Postgres, url: str, work: Work, fault: Fault, at: int) -> None:
        self.proxy = Proxy(server.port)
        self.frozen = threading.Event()
        self._fault, self._left = fault, at
        through = url.replace(f":{server.port}/", f":{self.proxy.port}/")
        self._worker = workers.start(lambda line: work_forever(line, through, work))
        self._worker.hear()
        self.proxy.forward = self._deliver
        self._worker.say("go")

    def _deliver(self, server: socket.socket, chunk: bytes) -> None:
        self._left -= 1
        if self._left <= 0:
            if self._fault == "stop":
                os.kill(self._worker.pid, signal.SIGSTOP)
            else:
                self.proxy.unplugged = True
            self.frozen.set()
        if self._left > 0 or self._fault != "unplug before":
            server.sendall(chunk)

    def close(self) -> None:
        self._worker.kill()
        self._worker.wait()
        self.proxy.close()


def work_forever(line: Line, url: str, work: Work) -> None:
    store = PostgresStore(url)
    store.now()
    act = work(store)
    line.say("ready")
    line.wait()
    while True:
        with contextlib.suppress(StoreUnavailable, TooManyRetries):  # it is unplugged
            act()


class Controls:
    """Clients that do the same work directly, each in a thread; and how long each piece of it takes."""

    def __init__(self, url: str, works: Sequence[Work]) -> None:
        self.waits: dict[int, list[float]] = {each: [] for each in range(len(works))}
        self._ended = threading.Event()
        pairs = zip(works, self.waits.values(), strict=True)
        self._threads = [threading.Thread(target=self._work, args=(url, *each)) for each in pairs]
        for each in self._threads:
            each.start()

    def _work(self, url: str, work: Work, own: list[float]) -> None:
        with PostgresStore(url) as store:
            act = work(store)
            while not self._ended.is_set():
                began = time.monotonic()
                act()
                own.append(time.monotonic() - began)

    def wait_for_more(self, number: int) -> None:
        """Until each has made this number of commits from now on, and one that has begun by now."""
        wanted = [(own, len(own) + number + 1) for own in self.waits.values()]
        end = time.monotonic() + 120.0
        while any(len(own) < least for own, least in wanted):
            assert time.monotonic() < end, "nobody could commit for two minutes"
            time.sleep(0.005)

    @property
    def longest(self) -> float:
        return max(max(own) for own in self.waits.values())

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        for own in self.waits.values():
            own.clear()
        yield

    def close(self) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()


def freeze(
    server: Postgres, url: str, victims: Sequence[tuple[Work, Fault, int]], works: Sequence[Work], seconds: float = 0.0
) -> float:
    """Freeze clients, each at one of its messages, for at least this time; how much longer than usual the others had to
    wait meanwhile."""
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(Workers())
        frozen: list[Victim] = []
        for work, fault, at in victims:
            frozen.append(Victim(workers, server, url, work, fault, at))
            stack.callback(frozen[-1].close)
        controls = Controls(url, works)
        stack.callback(controls.close)
        for each in frozen:
            assert each.frozen.wait(60.0)
        end = time.monotonic() + seconds
        controls.wait_for_more(3)
        while time.monotonic() < end:
            controls.wait_for_more(1)
        delayed = controls.longest
        for each in frozen:
            each.close()
        controls.wait_for_more(3)
        with controls.measured():
            controls.wait_for_more(10)
        return delayed - controls.longest


def test_frozen_clients_do_not_delay_others(postgres_server: Postgres, postgres_url: str) -> None:
    with PostgresStore(postgres_url) as store:
        apply(store, Create(INDEX, Item(0)))
        for number in range(rounds(500, least=3)):
            chance = random.Random(number)
            works = [incrementing_in_turn if chance.random() < 0.7 else incrementing for _ in range(3)]
            victims = [(each, chance.choice(FAULTS), chance.randrange(1, 20)) for each in works]
            assert freeze(postgres_server, postgres_url, victims, [incrementing] * 2) < MOST_DELAY, f"round {number}"
            tried["rounds with frozen clients"] += 1
        assert number_of(store, INDEX) == len(list(store.entries(EVENTS)))


def claiming(ids: Sequence[str]) -> Work:
    """Claim the next issue, and release it."""

    def work(store: PostgresStore) -> Callable[[], object]:
        claims = Tracker(store, actor=f"agent:{random.random()}").claims

        def claim() -> None:
            claimed = claims.claim_next(claims.request(ttl=3600.0))
            assert claimed is not None
            assert claimed.issue.id in ids
            claims.release(claimed.issue.id, ClaimId.parse(claimed.claim.claim_id))

        return claim

    return work


def test_clients_frozen_while_they_claim_do_not_delay_claims(postgres_server: Postgres, postgres_url: str) -> None:
    """At every message in turn. Each frozen client keeps at most one issue from the others, and enough are left."""
    with PostgresStore(postgres_url) as store:
        tracker = Tracker(store)
        tracker.initialise()
        for number in range(rounds(300, least=3)):
            ids = [each.issue.id for each in tracker.create_all([NewIssue(title="next")] * 9)]
            claim = claiming(ids)
            victims = [(claim, FAULTS[(number + own) % 3], 1 + (number + 7 * own) % 20) for own in range(3)]
            assert freeze(postgres_server, postgres_url, victims, [claim] * 2) < MOST_DELAY, f"round {number}"
            for each in ids:
                delete(tracker, each)
            tried["rounds with clients frozen while they claim"] += 1


def delete(tracker: Tracker, issue_id: str) -> None:
    record = tracker.claims.state(issue_id)
    claim = record.claim if record else None
    tracker.delete(issue_id, claim=ClaimId.parse(claim.claim_id) if claim else None)


@contextlib.contextmanager
def running(root: Path, url: str) -> Iterator[Work]:
    """While `holdfast run` holds the lease of `main`; yields the work of renewing it. It must not lose the lease."""
    initialise(root, store=url)
    script = 'echo "$HOLDFAST_LOCK_ID"; exec cat'
    with Running("run", "--repo", root, "--ttl", "4s", "--", "sh", "-c", script) as command:
        yield renewing(command.hear())
        ended = command.finish()
        assert ended.returncode == 0, ended


def test_frozen_clients_do_not_delay_leases(tmp_path: Path, postgres_server: Postgres, postgres_url: str) -> None:
    """At every message in turn; a full run ends after twenty minutes, however far it is."""
    end = time.monotonic() + 1200.0
    with running(tmp_path / "repository", postgres_url) as renew, PostgresStore(postgres_url) as store:
        apply(store, Create(INDEX, Item(0)))
        for number in range(rounds(500, least=3)):
            works = (incrementing, incrementing_in_turn, renew)
            victims = [(work, FAULTS[(number + own) % 3], 1 + number // 3 % 20) for own, work in enumerate(works)]
            assert freeze(postgres_server, postgres_url, victims, [incrementing, renew]) < MOST_DELAY, f"round {number}"
            tried["rounds with frozen clients beside a run"] += 1
            if time.monotonic() > end:
                break


def test_many_clients_frozen_for_a_minute_do_not_delay_leases(
    tmp_path: Path, postgres_server: Postgres, postgres_url: str
) -> None:
    with running(tmp_path / "repository", postgres_url) as renew, PostgresStore(postgres_url) as store:
        apply(store, Create(INDEX, Item(0)))
        works = (incrementing_in_turn, renew)
        every = [(work, fault, at) for at in range(1, 11) for fault in FAULTS for work in works]
        seconds = rounds(60, least=3)
        assert (
            freeze(postgres_server, postgres_url, chosen(every, least=6), [incrementing, renew], seconds) < MOST_DELAY
        )


def test_locks_that_outlive_a_turn_are_found(
    postgres_server: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "TURN", 4000)  # milliseconds
    with PostgresStore(postgres_url) as store:
        apply(store, Create(INDEX, Item(0)))
        victims = [(incrementing_in_turn, FAULTS[1], 2)]  # its commit never arrives
        assert freeze(postgres_server, postgres_url, victims, [incrementing]) > MOST_DELAY
