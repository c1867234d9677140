"""The cost of an operation on a server does not depend on the length of its streams. Also the upgrade of a store in
etcd that was made before streams had heads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from holdfast.errors import StoreUnavailable
from holdfast.issues import model as issues
from holdfast.issues.creating import NewIssue
from holdfast.leases.service import LeaseService
from holdfast.ledger.log import Ledger
from holdfast.locks.retry import CHANCE
from holdfast.store.audit import START, AuditEntry, AuditReader, AuditTrail, _hash
from holdfast.store.etcd import FIRST_WITH_HEADS, EtcdEngine, EtcdStore
from holdfast.store.etcd_gateway import Gateway, decoded, encoded
from holdfast.store.model import Append, Decision, Stream, View
from holdfast.store.served import CommitPlan, ServedStore
from holdfast.testing.backend import EVENTS as LINES
from holdfast.testing.backend import INDEX, Event, apply, increment, number_of
from proof.effort import rounds
from tests.issues.trackers import claim_id_of, tracker_on
from tests.support.servers import Etcd, Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresStore  # noqa: E402

FEW, MANY = 100, rounds(200_000, least=2000)
BATCH = 100  # appends in a commit: etcd limits them
TRAIL = AuditTrail()


# --- Operations -----------------------------------------------------------------------------------


def renew(store: ServedStore) -> None:
    leases = LeaseService(store, TRAIL)
    lease = leases.acquire("main", leases.request(ttl=60)).lease
    leases.renew("main", lease.lock_id)
    leases.release("main", lease.lock_id)


def claim(store: ServedStore) -> None:
    tracker = tracker_on(store)
    ((issue, _),) = store.scan(issues.ISSUES)
    tracker.claims.release(issue, claim_id_of(tracker.claims.claim(issue, tracker.claims.request())))


def append(store: ServedStore) -> None:
    Ledger(store).append({"type": "one"})


def log(store: ServedStore) -> None:
    ledger = Ledger(store)
    end = ledger.sequence
    assert [each.sequence for each in ledger.events(after=end - 20)] == list(range(end - 19, end + 1))


def audit(store: ServedStore) -> None:
    reader = AuditReader(store, TRAIL, last=20)
    shown = list(reader.read())
    assert len(shown) == 20
    assert shown[-1].number == reader.end.entries == store.end(TRAIL.stream)


OPERATIONS: tuple[Callable[[ServedStore], None], ...] = (append, renew, claim, log, audit)


def grow(store: ServedStore, stream: Stream[Any], to: int, record: Callable[[int], Any]) -> None:
    """Append records until a stream has this number of them."""

    def decide(view: View, now: float) -> Decision[None]:
        end = view.end(stream)
        return Decision([Append(stream, record(each)) for each in range(end + 1, min(to, end + BATCH) + 1)], None)

    while store.end(stream) < to:
        store.transact([stream], decide)


def grow_all(store: ServedStore, to: int) -> None:
    hashes = {store.end(TRAIL.stream): START}
    for entry in AuditReader(store, TRAIL, last=1).read():
        hashes = {entry.number: entry.hash}

    def audited(number: int) -> AuditEntry:
        entry = AuditEntry(number, "2026-01-01T00:00:00Z", "x", "agent:me", {}, hashes[number - 1])
        hashes[number] = _hash(entry)
        return msgspec.structs.replace(entry, hash=hashes[number])

    direct = AuditTrail()
    direct.stream.chain = None  # nothing stays loose
    grow(store, direct.stream, to, audited)
    store.seal(issues.EVENTS)
    events = Stream(issues.EVENTS.name, issues.EVENTS.codec)
    grow(store, events, to, lambda number: issues.IssueEvent(type="x", id=str(number)))
    ledger = Ledger(store)
    while (missing := to - ledger.sequence) > 0:
        ledger.append_many([{"type": "x"}] * min(BATCH, missing))


# --- Costs ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_housekeeping() -> Iterator[None]:
    """No commit happens to seal loose records, or to forget old commits."""
    with mock.patch.object(CHANCE, "randrange", lambda limit: limit - 1):
        yield


def keys_visited(store: ServedStore, act: Callable[[], object]) -> int:
    """The keys that etcd visits for an action. A sorted range visits all its keys before it applies its limit."""
    asked: list[Any] = []
    original = Gateway.ask_once

    def ask_once(self: Gateway, path: str, request: Any) -> Any:
        answer = original(self, path, request)
        asked.extend(_ranges_in(request, answer) if path == "/v3/kv/txn" else [request])
        return answer

    with mock.patch.object(Gateway, "ask_once", ask_once):
        act()
    total = 0
    for each in asked:
        limit = 0 if "sort_order" in each else int(each.get("limit", 0))
        bounds = {name: each[name] for name in ("key", "range_end") if name in each}
        count = int(_engine(store).gateway.ask("/v3/kv/range", {**bounds, "count_only": True}).get("count", 0))
        total += min(limit, count) if limit else count
    return total


def _ranges_in(request: Any, answer: Any) -> Iterator[Any]:
    """The ranges of the branches that a transaction has taken."""
    taken = request.get("success" if answer.get("succeeded") else "failure", [])
    for each, answered in zip(taken, answer.get("responses", []), strict=True):
        if "request_range" in each:
            yield each["request_range"]
        elif "request_txn" in each:
            yield from _ranges_in(each["request_txn"], answered["response_txn"])


def _engine(store: ServedStore) -> EtcdEngine:
    assert isinstance(store.engine, EtcdEngine)
    return store.engine


def rows_read(url: str, server: str, act: Callable[[], object]) -> int:
    """The rows of the growing tables that PostgreSQL reads for an action, by its own statistics: complete once its
    connections ended. A small table is read whole as soon as the planner knows that it is small."""
    schema = url.partition("schema=")[2].partition("&")[0]
    statement = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_all_tables
WHERE schemaname = %s AND relname IN ('entries', 'commits')"""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("ANALYZE")  # or the plans depend on whether the server got to it already

        def settled() -> int:
            end = time.monotonic() + 60.0
            others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'flat'"
            while connection.execute(others).fetchone()[0]:
                assert time.monotonic() < end
                time.sleep(0.01)
            return int(connection.execute(statement, [schema]).fetchone()[0])

        before = settled()
        act()
        return settled() - before


def prepared(store: ServedStore) -> None:
    tracker = tracker_on(store)
    tracker.initialise()
    tracker.create(NewIssue(title="One"))


def require_flat(costs: list[dict[str, int]]) -> None:
    few, many = costs
    assert {name for name, cost in many.items() if not 0 < cost <= 1.2 * few[name]} == set(), (few, many)


def test_etcd_visits_as_many_keys_however_long_the_streams_are(etcd_url: str) -> None:
    costs = []
    with EtcdStore(etcd_url) as store:
        prepared(store)
        for length in (FEW, MANY):
            grow_all(store, length)
            costs.append({act.__name__: keys_visited(store, partial(act, store)) for act in OPERATIONS * 2})
    require_flat(costs)


def test_postgresql_reads_as_many_rows_however_long_the_streams_are(
    postgres_server: Postgres, postgres_url: str
) -> None:
    costs, url = [], f"{postgres_url}&application_name=flat"

    def once(act: Callable[[ServedStore], None]) -> None:
        with PostgresStore(url) as store:
            act(store)

    once(prepared)
    for length in (FEW, MANY):
        once(lambda store: grow_all(store, length))  # noqa: B023
        costs.append({act.__name__: rows_read(url, postgres_server.url, partial(once, act)) for act in OPERATIONS * 2})
    require_flat(costs)


# --- The upgrade of older stores ------------------------------------------------------------------


class OldEngine(EtcdEngine):
    """Requests as of version 1 of the schema: there are no heads."""

    def _end(self, stream: str) -> dict[str, Any]:
        order = {"limit": 1, "sort_order": "DESCEND", "sort_target": "KEY"}
        start = self.keys.records(stream)
        return {"request_range": {"key": encoded(start), "range_end": encoded(start[:-1] + b"0"), **order}}

    def _writes(self, plan: CommitPlan) -> Iterator[dict[str, Any]]:
        new = (self.keys.head(""), self.keys.schema)
        for each in super()._writes(plan):
            key = decoded(each.get("request_put", {}).get("key", ""))
            if not key.startswith(new) and not key.endswith(b"/~") and "request_txn" not in each:
                yield each


@contextlib.contextmanager
def old_store(url: str) -> Iterator[ServedStore]:
    """A client of version 1, and a store that it has made."""
    engine = OldEngine(url)
    engine.gateway.ask("/v3/kv/put", {"key": encoded(engine.keys.schema), "value": encoded(b"1")})
    with ServedStore(engine) as store:
        increment(store, INDEX, LINES)
        increment(store, INDEX, LINES)
        yield store


def numbers(store: ServedStore) -> list[tuple[int, int]]:
    return [(each.position, each.record.number) for each in store.entries(LINES)]


def schema_of(store: ServedStore) -> bytes:
    engine = _engine(store)
    return decoded(engine.gateway.ask("/v3/kv/range", {"key": encoded(engine.keys.schema)})["kvs"][0]["value"])


def test_an_older_store_is_read_as_it_is_and_upgraded_by_the_first_append(etcd_url: str) -> None:
    with old_store(etcd_url), EtcdStore(etcd_url) as store:
        assert numbers(store) == [(1, 1), (2, 2)]
        assert number_of(store, INDEX) == 2
        increment(store, INDEX)  # appends nothing
        assert schema_of(store) == b"1"
        assert increment(store, INDEX, LINES) == 4
        assert schema_of(store) == str(FIRST_WITH_HEADS).encode()
        assert numbers(store) == [(1, 1), (2, 2), (3, 4)]
        assert keys_visited(store, lambda: store.end(LINES)) <= 2
        with EtcdStore(etcd_url) as other:
            assert increment(other, INDEX, LINES) == 5
            assert numbers(store) == numbers(other) == [(1, 1), (2, 2), (3, 4), (4, 5)]


def test_a_search_for_the_last_record_is_counted(etcd_url: str) -> None:
    """The planted fault: without heads, the cost follows the length."""
    with old_store(etcd_url) as store:
        assert isinstance(store, ServedStore)
        for length in (10, 50):
            grow(store, LINES, length, Event)
            assert keys_visited(store, lambda: store.end(LINES)) >= length


def test_older_clients_cannot_append_after_the_upgrade(etcd_url: str) -> None:
    with old_store(etcd_url) as old, EtcdStore(etcd_url) as store:
        increment(store, INDEX, LINES)
        for act in (lambda: increment(old, INDEX, LINES), lambda: numbers(old)):
            with pytest.raises(StoreUnavailable):
                act()
        assert numbers(store) == [(1, 1), (2, 2), (3, 3)]


def test_an_append_of_an_older_client_that_is_on_its_way_conflicts_with_the_upgrade(etcd_url: str) -> None:
    with old_store(etcd_url) as old, EtcdStore(etcd_url) as store:
        upgraded: list[int] = []

        def decide(view: View, now: float) -> Decision[None]:
            if not upgraded:
                upgraded.append(increment(store, INDEX, LINES))
            return Decision([Append(LINES, Event(9))], None)

        with pytest.raises(StoreUnavailable):
            old.transact([LINES], decide)
        assert numbers(store) == [(1, 1), (2, 2), (3, 3)]


def test_streams_beyond_the_first_request_are_read_by_their_records(etcd_url: str) -> None:
    """These ranges are pinned to a revision, and the comparison of a nested transaction is not."""
    with EtcdStore(etcd_url) as store:
        for number in (1, 2, 3):
            apply(store, Append(LINES, Event(number)))
        with mock.patch("holdfast.store.etcd._MOST_STREAMS", 0):
            assert store.end(LINES) == 3
            apply(store, Append(LINES, Event(4)))
        assert numbers(store) == [(each, each) for each in range(1, 5)]


def test_a_large_record_is_not_copied_to_the_head(server_scratch: Path) -> None:
    """A commit must fit into the default limit of etcd, 1.5 MiB."""
    server = Etcd(server_scratch)
    server.start()
    try:
        with EtcdStore(server.store_url("x")) as store:
            for number in (1, 2):
                apply(store, Append(LINES, Event(number, "x" * 1_200_000)))
                apply(store, Append(LINES, Event(number + 10)))
            apply(store, Append(LINES, Event(3, "x" * 1_200_000)))
            view = store.transact([LINES], lambda view, now: Decision([], view.last(LINES))).result
            assert view is not None
            assert (view.position, view.record.number, len(view.record.text)) == (5, 3, 1_200_000)
            assert [each for _, each in numbers(store)] == [1, 11, 2, 12, 3]
    finally:
        server.kill()
