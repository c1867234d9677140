"""What the stores on servers ask of the network: how often, and what they do when it loses an answer."""

from __future__ import annotations

import contextlib
import itertools
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


class Line:
    """A store behind a proxy, and the same store without one."""

    def __init__(self, kind: str, server: Server, url: str) -> None:
        self.kind = kind
        self.server = server
        self.url = url
        self.proxy = Proxy(server.port)
        self.store = self.open(timeout=5.0)
        self.beside = self.make(url)
        apply(self.store, Create(INDEX, Item(0)))  # connected, and the tables made

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
        """How many round trips something takes.

        The fewest of several tries: if the answer to the first of two requests that are sent together overtakes the
        second, that counts as a round trip more. What must wait for an answer counts every time.
        """
        counts = []
        for _ in range(5):
            before = self.proxy.turns
            act()
            counts.append(self.proxy.turns - before)
        return min(counts)


@pytest.fixture(params=["postgresql", "etcd"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    kind = request.param
    names = ("postgres_server", "postgres_url") if kind == "postgresql" else ("etcd_server", "etcd_url")
    server, url = (request.getfixturevalue(each) for each in names)
    made = Line(kind, server, url)
    yield made
    made.close()


# --- Round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_a_lease_is_acquired_renewed_and_released_in_two_round_trips_each(line: Line, known: bool) -> None:
    leases = LeaseService(line.store, TRAIL)
    held = [(f"w{each}", leases.request(ttl=60)) for each in range(5)]

    def each_once(act: Callable[[str, LeaseRequest], object]) -> int:
        left = iter(held)
        return line.turns(lambda: act(*next(left)))

    if known:
        for worktree, _ in held:
            leases.release(worktree, leases.acquire(worktree, leases.request(ttl=60)).lease.lock_id)
    assert each_once(leases.acquire) <= 2
    assert each_once(lambda worktree, request: leases.renew(worktree, request.lock_id)) <= 2
    assert each_once(lambda worktree, request: leases.release(worktree, request.lock_id)) <= 2


def test_reading_takes_one_round_trip_and_a_commit_two(line: Line) -> None:
    keys = [INDEX, ONE, ISSUES.key("two")]
    assert line.turns(lambda: line.store.read(INDEX)) == 1
    assert line.turns(lambda: line.store.read_together(keys)) == 1
    assert line.turns(lambda: increment(line.store, INDEX)) == 2
    assert line.turns(lambda: increment(line.store, ONE, EVENTS)) == 2
    assert line.turns(lambda: line.store.transact(keys, lambda view, now: Decision([], None))) == 1


def test_a_long_way_only_makes_it_slower(line: Line) -> None:
    line.proxy.delay = 0.02
    counted = run_threads(*[lambda: [increment(line.store, ONE, EVENTS) for _ in range(3)]] * 3)

    assert sorted(each for some in counted for each in some) == list(range(1, 10))


# --- Answers that get lost ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.sampled(1)
def test_a_lost_answer_is_found_out_by_the_id_and_nothing_happens_twice(line: Line, when: str) -> None:
    for each in range(1, 6):
        cut = threading.Timer(0.15, lambda: setattr(line.proxy, "cut", "never"))
        with _lossy_commits(line, when):
            cut.start()
            assert increment(line.store, ONE, EVENTS) == each
        cut.join()
        assert number_of(line.beside, ONE) == each
        assert [entry.record.number for entry in line.beside.entries(EVENTS)] == list(range(1, each + 1))
    assert line.proxy.lost >= 5


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_outcome_that_cannot_be_asked_for_is_unknown_until_it_can(line: Line, when: str) -> None:
    hasty = line.open(timeout=0.1)
    hasty.read(ONE)
    with _lossy_commits(line, when, hasty), pytest.raises(OutcomeUnknown) as raised:
        hasty.transact([ONE], lambda view, now: Decision([Create(ONE, Item(1))], None), commit_id="mine")
    line.proxy.cut = "never"

    assert raised.value.commit_id == "mine"
    assert (line.beside.read(ONE) is not None) == (when == "after")
    assert line.beside.was_made("mine") == (when == "after")
    with pytest.raises(UsageFailure, match="was used before"):  # made, or ruled out: not again under this id
        line.beside.transact([INDEX], _setting_two, commit_id="mine")
    hasty.close()


def test_a_commit_that_was_ruled_out_cannot_come_late(line: Line) -> None:
    """Somebody is slow to commit; meanwhile its id is taken away; then it comes."""

    def rule_out_meanwhile(view: View, now: float) -> Decision[None]:
        assert line.beside.was_made("slow") is False
        return Decision([Create(ONE, Item(1)), Append(EVENTS, Event(1))], None)

    with pytest.raises(UsageFailure):
        line.store.transact([ONE, EVENTS], rule_out_meanwhile, commit_id="slow")

    assert line.beside.read(ONE) is None
    assert list(line.beside.entries(EVENTS)) == []


@pytest.mark.parametrize("sent", [True, False])
def test_an_outcome_is_found_out_also_if_an_earlier_attempt_was_ruled_out(line: Line, sent: bool) -> None:
    """The first attempt never got there, and that was found out; of the second one nothing was heard."""
    original, attempts = line.store.engine.attempt, itertools.count(1)

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

    unreachable = mock.patch.object(line.store.engine, "fate_of", side_effect=StoreUnavailable("it", "gone"))
    with mock.patch.object(line.store.engine, "attempt", attempt), pytest.raises(OutcomeUnknown) as raised:
        line.store.transact([ONE], lambda view, now: Decision([Create(ONE, Item(1))], None), commit_id="mine")
    unreachable.stop()

    assert line.beside.was_made(raised.value.commit_id) is sent
    assert (line.beside.read(ONE) is not None) is sent
    assert line.store.was_made(raised.value.commit_id) is sent  # whoever asks, and as often as you like


def test_who_asks_for_a_commit_under_way_waits_for_its_outcome(line: Line) -> None:
    """In PostgreSQL a commit may have been sent and not be done: whoever asks waits for it."""
    if line.kind == "etcd":
        assert line.beside.was_made("none") is False  # there, a commit is one step
        return
    store = line.beside
    assert isinstance(store.engine, PostgresEngine)
    with store.engine.connections.borrowed() as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO commits VALUES ('under-way', true, now())")
        threading.Timer(0.2, lambda: connection.execute("COMMIT")).start()
        assert line.store.was_made("under-way") is True
        time.sleep(0.05)


def _setting_two(view: View, now: float) -> Decision[None]:
    return Decision([Replace(INDEX, Item(2))], None)


def _lossy_commits(line: Line, when: str, store: ServedStore | None = None) -> mock._patch[object]:
    """The line is cut exactly when a commit is sent."""
    engine = (store or line.store).engine
    if isinstance(engine, PostgresEngine):
        name = "commit"
    else:
        assert isinstance(engine, EtcdEngine)
        name = "_send_once"
    original = getattr(engine, name)

    def send(*arguments: object) -> object:
        if line.proxy.cut == "never" and not sent:
            sent.append(True)
            line.proxy.lost = 0 if store else line.proxy.lost
            line.proxy.cut = when  # type: ignore[assignment]
        return original(*arguments)

    sent: list[bool] = []
    return mock.patch.object(engine, name, send)


# --- Servers that are away ------------------------------------------------------------------------


def test_a_server_that_is_away_is_a_failure_that_may_be_tried_again(line: Line) -> None:
    line.proxy.close()
    hasty = line.open(timeout=0.2)
    for act in (lambda: hasty.read(ONE), lambda: increment(hasty, ONE), hasty.now, lambda: hasty.watch(ONE)):
        with pytest.raises(StoreUnavailable) as raised:
            act()
        assert raised.value.retryable


def test_a_server_that_does_not_answer_does_not_hold_up_anybody_for_ever(
    server_directory: Path, etcd_server: Etcd, postgres_server: Postgres
) -> None:
    """It takes connections, but says nothing: as one that is stopped, or behind a dead line."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        for store in (
            EtcdStore(f"etcd://127.0.0.1:{port}/x", timeout=0.3),
            PostgresStore(f"postgresql://127.0.0.1:{port}/x?connect_timeout=2&sslmode=disable", timeout=0.3),
        ):
            with pytest.raises(StoreUnavailable):
                store.read(ONE)


def test_a_standby_is_not_read_for_it_may_be_behind(postgres_url: str) -> None:
    """What can only be read is taken for one; then it is waited for until it can be written."""
    options = "options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(StoreUnavailable, match="read-only"):
        PostgresStore(f"{postgres_url}&{options}", timeout=0.3).read(ONE)


@pytest.mark.req("LC-12")
def test_a_holder_whose_server_has_stopped_answering_stops_when_its_lease_ends(line: Line) -> None:
    store = line.open(timeout=30.0)
    held = acquire(LeaseService(store, TRAIL), "main", LeaseService(store, TRAIL).request(ttl=1.0)).beat()
    line.proxy.delay = 60.0  # from now on nothing arrives

    assert held.lost.wait(30.0)
    with pytest.raises(LockExpired):
        held.check()
    leases = LeaseService(line.beside, TRAIL)
    after = acquire(leases, "main", leases.request(ttl=60), wait=30.0)
    assert after.token == held.token + 1
    line.proxy.close()
    held._ended.set()
    store.close()


# --- Watching -------------------------------------------------------------------------------------


def test_a_watch_goes_on_after_its_line_was_cut(line: Line) -> None:
    with line.store.watch(ISSUES) as watch:
        apply(line.beside, Create(ONE, Item(1)))
        assert watch.wait(30) == {ONE.name}
        line.proxy.cut_all_lines()
        apply(line.beside, Replace(ONE, Item(2)))  # while nobody could be told
        assert watch.wait(30) == {ONE.name}
        apply(line.beside, Create(ISSUES.key("two"), Item(2)))
        assert watch.wait(30) == {"jit/issues/two"}


def test_a_watch_that_slept_through_a_compaction_reports_all_there_is(etcd_url: str) -> None:
    with EtcdStore(etcd_url) as store, store.watch(ISSUES) as watch, store.watch(INDEX) as single:
        apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
        commit = apply(store, Create(ISSUES.key("two"), Item(1)))
        assert isinstance(store.engine, EtcdEngine)
        revision = store.engine.gateway.ask("/v3/kv/range", {"key": "YQ=="})["header"]["revision"]
        store.engine.gateway.ask("/v3/kv/compaction", {"revision": revision})
        assert commit.id
        assert watch.wait(30) == {ONE.name, "jit/issues/two"}
        assert single.wait(30) == {INDEX.name}


def test_a_notification_that_is_too_long_is_made_up_for_by_looking(postgres_url: str) -> None:
    names = [f"{'x' * 100}{each}" for each in range(100)]
    with PostgresStore(postgres_url) as store, store.watch(ISSUES) as watch:
        apply(store, *(Create(ISSUES.key(each), Item(1)) for each in names))

        assert watch.wait(30) == {f"jit/issues/{each}" for each in names}


# --- Forks and threads ----------------------------------------------------------------------------


def test_a_child_does_not_disturb_its_parents_connections(line: Line) -> None:
    from tests.locks.workers import Line as Pipe
    from tests.locks.workers import Workers

    increment(line.beside, ONE)

    def work(pipe: Pipe) -> None:
        pipe.say([increment(line.beside, ONE) for _ in range(5)])

    with Workers() as workers:
        worker = workers.start(work)
        mine = [increment(line.beside, ONE) for _ in range(5)]
        assert sorted(worker.hear() + mine) == list(range(2, 12))
        worker.wait()
    assert increment(line.beside, ONE) == 12
