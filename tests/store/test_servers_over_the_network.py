"""Stores on servers and the network: the number of round trips, lost answers and outages."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.errors import LockExpired, OutcomeUnknown, StoreUnavailable, UsageFailure
from holdfast.leases.rules import LeaseRequest
from holdfast.leases.service import LeaseService, acquire
from holdfast.locks.retry import CHANCE
from holdfast.store.audit import AuditTrail
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.model import Append, Create, Decision, Replace, View
from holdfast.store.served import AnswerLost, CommitPlan, ServedStore
from holdfast.testing.backend import (
    EVENTS,
    INDEX,
    ISSUES,
    Event,
    Item,
    apply,
    increment,
    number_of,
    run_threads,
)
from tests.support.proxy import Proxy
from tests.support.servers import Etcd, Postgres, Server

pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresEngine, PostgresStore

ONE = ISSUES.key("one")
TRAIL = AuditTrail()


class Link:
    """A store behind a proxy, and the same store without one."""

    def __init__(self, kind: str, server: Server, url: str) -> None:
        self.kind = kind
        self.server = server
        self.url = url
        self.proxy = Proxy(server.port)
        self.store = self.open(timeout=5.0)
        self.beside = self.make(url)
        apply(self.store, Create(INDEX, Item(0)))  # connects, and creates the tables

    def make(self, url: str, timeout: float = 10.0) -> ServedStore:
        kind = PostgresStore if self.kind == "postgresql" else EtcdStore
        return kind(url, timeout=timeout)

    def open(self, *, timeout: float) -> ServedStore:
        return self.make(self.url.replace(f":{self.server.port}/", f":{self.proxy.port}/"), timeout)

    def close(self) -> None:
        self.store.close()
        self.beside.close()
        self.proxy.close()

    def turns(self, act: Callable[[], object]) -> int:
        """The number of round trips that an action takes.

        This is the median of several tries: if two requests are sent together and the answer to the first overtakes
        the second, the proxy counts one too many, and perhaps one too few the next time.
        """
        counts = []
        for _ in range(5):
            before = self.proxy.turns
            act()
            counts.append(self.proxy.turns - before)
        return statistics.median_low(counts)


@pytest.fixture(params=["postgresql", "etcd"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    kind = request.param
    names = ("postgres_server", "postgres_url") if kind == "postgresql" else ("etcd_server", "etcd_url")
    server, url = (request.getfixturevalue(each) for each in names)
    made = Link(kind, server, url)
    yield made
    made.close()


# --- Round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_a_lease_is_acquired_renewed_and_released_in_two_round_trips_each(link: Link, known: bool) -> None:
    leases = LeaseService(link.store, TRAIL)
    held = [(f"w{each}", leases.request(ttl=60)) for each in range(5)]

    def each_once(act: Callable[[str, LeaseRequest], object]) -> int:
        left = iter(held)
        return link.turns(lambda: act(*next(left)))

    if known:
        for worktree, _ in held:
            leases.release(worktree, leases.acquire(worktree, leases.request(ttl=60)).lease.lock_id)
    with mock.patch.object(CHANCE, "randrange", lambda limit: limit - 1):  # without those that also seal
        assert each_once(leases.acquire) <= 2
        assert each_once(lambda worktree, request: leases.renew(worktree, request.lock_id)) <= 2
        assert each_once(lambda worktree, request: leases.release(worktree, request.lock_id)) <= 2


def test_reading_takes_one_round_trip_and_a_commit_two(link: Link) -> None:
    keys = [INDEX, ONE, ISSUES.key("two")]
    assert link.turns(lambda: link.store.read(INDEX)) == 1
    assert link.turns(lambda: link.store.read_together(keys)) == 1
    assert link.turns(lambda: increment(link.store, INDEX)) == 2
    assert link.turns(lambda: increment(link.store, ONE, EVENTS)) == 2
    assert link.turns(lambda: link.store.transact(keys, lambda view, now: Decision([], None))) == 1


@pytest.mark.sampled(1)
def test_latency_only_makes_commits_slower(link: Link) -> None:
    link.proxy.delay = 0.02
    counted = run_threads(*[lambda: [increment(link.store, ONE, EVENTS) for _ in range(3)]] * 3)

    assert sorted(each for some in counted for each in some) == list(range(1, 10))


# --- Lost answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.sampled(1)
def test_the_outcome_of_a_lost_answer_is_found_by_commit_id_and_nothing_happens_twice(link: Link, when: str) -> None:
    for each in range(1, 6):
        cut = threading.Timer(0.15, lambda: setattr(link.proxy, "cut", "never"))
        with _lossy_commits(link, when):
            cut.start()
            assert increment(link.store, ONE, EVENTS) == each
        cut.join()
        assert number_of(link.beside, ONE) == each
        assert [entry.record.number for entry in link.beside.entries(EVENTS)] == list(range(1, each + 1))
    assert link.proxy.lost >= 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_outcome_is_unknown_until_the_server_can_be_reached(link: Link, when: str) -> None:
    hasty = link.open(timeout=0.5)
    hasty.read(ONE)
    with _lossy_commits(link, when, hasty), pytest.raises(OutcomeUnknown) as raised:
        hasty.transact([ONE], lambda view, now: Decision([Create(ONE, Item(1))], None), commit_id="mine")
    link.proxy.cut = "never"

    assert raised.value.commit_id == "mine"
    assert (link.beside.read(ONE) is not None) == (when == "after")
    assert link.beside.was_made("mine") == (when == "after")
    with pytest.raises(
        UsageFailure, match="was used before"
    ):  # the id is used up, whether the commit was made or ruled out
        link.beside.transact([INDEX], _setting_two, commit_id="mine")
    hasty.close()


def test_a_commit_that_was_ruled_out_cannot_be_made_later(link: Link) -> None:
    """The commit is ruled out by its id before the slow client sends it."""

    def rule_out_meanwhile(view: View, now: float) -> Decision[None]:
        assert link.beside.was_made("slow") is False
        return Decision([Create(ONE, Item(1)), Append(EVENTS, Event(1))], None)

    with pytest.raises(UsageFailure):
        link.store.transact([ONE, EVENTS], rule_out_meanwhile, commit_id="slow")

    assert link.beside.read(ONE) is None
    assert list(link.beside.entries(EVENTS)) == []


@pytest.mark.parametrize("sent", [True, False])
def test_an_outcome_is_found_even_if_an_earlier_attempt_was_ruled_out(link: Link, sent: bool) -> None:
    """The first attempt never arrived and was ruled out; the answer to the second was lost."""
    original, attempts = link.store.engine.attempt, itertools.count(1)

    @contextlib.contextmanager
    def attempt(*arguments: Any, **options: Any) -> Iterator[Any]:
        with original(*arguments, **options) as made:
            commit, number = made.commit, next(attempts)

            def lose(plan: CommitPlan) -> bool:
                if number == 2:
                    unreachable.start()
                if number == 2 and sent:
                    commit(plan)
                raise AnswerLost("nothing was heard")

            yield made._replace(commit=lose)

    unreachable = mock.patch.object(link.store.engine, "fate_of", side_effect=StoreUnavailable("it", "gone"))
    with mock.patch.object(link.store.engine, "attempt", attempt), pytest.raises(OutcomeUnknown) as raised:
        link.store.transact([ONE], lambda view, now: Decision([Create(ONE, Item(1))], None), commit_id="mine")
    unreachable.stop()

    assert link.beside.was_made(raised.value.commit_id) is sent
    assert (link.beside.read(ONE) is not None) is sent
    assert link.store.was_made(raised.value.commit_id) is sent  # the same for every client, every time


def test_asking_for_a_commit_in_progress_waits_for_its_outcome(link: Link) -> None:
    """In PostgreSQL, a commit may have been sent but not be complete: asking for its outcome waits for it."""
    if link.kind == "etcd":
        assert link.beside.was_made("none") is False  # a commit is a single step in etcd
        return
    store = link.beside
    assert isinstance(store.engine, PostgresEngine)
    with store.engine.connections.borrowed() as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO holdfast.commits VALUES ('under-way', true, now(), NULL, '{}')")
        threading.Timer(0.2, lambda: connection.execute("COMMIT")).start()
        assert link.store.was_made("under-way") is True
        time.sleep(0.05)


def _setting_two(view: View, now: float) -> Decision[None]:
    return Decision([Replace(INDEX, Item(2))], None)


def _lossy_commits(link: Link, when: str, store: ServedStore | None = None) -> mock._patch[object]:
    """Cut the link exactly when a commit is sent."""
    engine = (store or link.store).engine
    if isinstance(engine, PostgresEngine):
        name = "commit"
    else:
        assert isinstance(engine, EtcdEngine)
        name = "_send_once"
    original = getattr(engine, name)

    def send(*arguments: object) -> object:
        if link.proxy.cut == "never" and not sent:
            sent.append(True)
            link.proxy.lost = 0 if store else link.proxy.lost
            link.proxy.cut = when  # type: ignore[assignment]
        return original(*arguments)

    sent: list[bool] = []
    return mock.patch.object(engine, name, send)


# --- Outages --------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
def test_an_unreachable_server_is_a_retryable_failure(link: Link) -> None:
    link.proxy.close()
    hasty = link.open(timeout=0.2)
    for act in (lambda: hasty.read(ONE), lambda: increment(hasty, ONE), hasty.now, lambda: hasty.watch(ONE)):
        with pytest.raises(StoreUnavailable) as raised:
            act()
        assert raised.value.retryable


def test_a_server_that_does_not_answer_times_out(
    server_directory: Path, etcd_server: Etcd, postgres_server: Postgres
) -> None:
    """The server accepts connections but never answers, as if it were stopped or behind a dead link."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        for store in (
            EtcdStore(f"etcd://127.0.0.1:{port}/x", timeout=0.3),
            PostgresStore(f"postgresql://127.0.0.1:{port}/x?connect_timeout=2&sslmode=disable", timeout=0.3),
        ):
            with pytest.raises(StoreUnavailable):
                store.read(ONE)


def test_a_standby_is_not_read_because_it_may_lag_behind(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only server is taken for a standby; the store waits until it can write."""
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    with pytest.raises(StoreUnavailable, match="read-only"):
        PostgresStore(postgres_url, timeout=0.3).read(ONE)


@pytest.mark.sampled(1)
@pytest.mark.req("LC-12")
def test_a_holder_whose_server_has_stopped_answering_stops_when_its_lease_ends(link: Link) -> None:
    store = link.open(timeout=30.0)
    held = acquire(LeaseService(store, TRAIL), "main", LeaseService(store, TRAIL).request(ttl=1.0)).beat()
    link.proxy.delay = 60.0  # from now on, nothing arrives in time

    assert held.lost.wait(30.0)
    with pytest.raises(LockExpired):
        held.check()
    leases = LeaseService(link.beside, TRAIL)
    after = acquire(leases, "main", leases.request(ttl=60), wait=30.0)
    assert after.token == held.token + 1
    link.proxy.close()
    held._ended.set()
    store.close()


# --- Watching -------------------------------------------------------------------------------------


def test_a_watch_continues_after_its_connection_was_cut(link: Link) -> None:
    with link.store.watch(ISSUES) as watch:
        apply(link.beside, Create(ONE, Item(1)))
        assert watch.wait(30) == {ONE.name}
        link.proxy.cut_all_lines()
        apply(link.beside, Replace(ONE, Item(2)))  # while the watch is disconnected
        assert watch.wait(30) == {ONE.name}
        apply(link.beside, Create(ISSUES.key("two"), Item(2)))
        assert watch.wait(30) == {"jit/issues/two"}


def test_a_watch_that_missed_a_compaction_reports_everything(etcd_url: str) -> None:
    with EtcdStore(etcd_url) as store, store.watch(ISSUES) as watch, store.watch(INDEX) as single:
        apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
        commit = apply(store, Create(ISSUES.key("two"), Item(1)))
        assert isinstance(store.engine, EtcdEngine)
        revision = store.engine.gateway.ask("/v3/kv/range", {"key": "YQ=="})["header"]["revision"]
        store.engine.gateway.ask("/v3/kv/compaction", {"revision": revision})
        assert commit.id
        assert watch.wait(30) == {ONE.name, "jit/issues/two"}
        assert single.wait(30) == {INDEX.name}


def test_changes_are_found_by_polling_if_a_notification_is_too_long(postgres_url: str) -> None:
    names = [f"{'x' * 100}{each}" for each in range(100)]
    with PostgresStore(postgres_url) as store, store.watch(ISSUES) as watch:
        apply(store, *(Create(ISSUES.key(each), Item(1)) for each in names))

        assert watch.wait(30) == {f"jit/issues/{each}" for each in names}


# --- Forks and threads ----------------------------------------------------------------------------


def test_a_forked_child_does_not_disturb_the_connections_of_its_parent(link: Link) -> None:
    from tests.locks.workers import Line as Pipe
    from tests.locks.workers import Workers

    increment(link.beside, ONE)

    def work(pipe: Pipe) -> None:
        pipe.say([increment(link.beside, ONE) for _ in range(5)])

    with Workers() as workers:
        worker = workers.start(work)
        mine = [increment(link.beside, ONE) for _ in range(5)]
        assert sorted(worker.hear() + mine) == list(range(2, 12))
        worker.wait()
    assert increment(link.beside, ONE) == 12
