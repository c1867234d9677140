"""Details of the stores on servers: limits of a server, deletion of old commit ids, retries that time out."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from holdfast.errors import NotFound, TooManyRetries, UsageFailure
from holdfast.locks.retry import CHANCE
from holdfast.store import postgres_sql as statements
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.etcd_gateway import encoded
from holdfast.store.model import Create, Decision, Key, Stream, View
from holdfast.store.served import ServedStore
from holdfast.testing.backend import (
    EVENTS,
    INDEX,
    ISSUES,
    Item,
    apply,
    increment,
    increment_often,
    number_of,
    run_threads,
)
from proof.model import StoreSubject, run_state_machine
from tests.support.servers import Etcd, Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store import postgres_connections  # noqa: E402
from holdfast.store.postgres import PostgresEngine, PostgresStore  # noqa: E402

ONE = ISSUES.key("one")


@pytest.fixture(params=["postgresql", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[ServedStore]:
    if request.param == "postgresql":
        made: ServedStore = PostgresStore(request.getfixturevalue("postgres_url"), patience=0.3)
    else:
        made = EtcdStore(request.getfixturevalue("etcd_url"), patience=0.3)
    yield made
    made.close()


@pytest.mark.parametrize("patience", [0.3, 0.0])
def test_a_transaction_that_always_conflicts_fails_after_several_attempts(store: ServedStore, patience: float) -> None:
    """Also if the time is over at the first conflict, as on a machine that is overloaded or was suspended."""
    store.patience = patience
    name = "commit"
    with mock.patch.object(store.engine, name, return_value=False), pytest.raises(TooManyRetries) as raised:
        increment(store, ONE)

    assert raised.value.retryable
    assert raised.value.attempts > 2
    assert increment(store, ONE) == 1


def test_a_transaction_is_retried_after_a_conflict(store: ServedStore) -> None:
    rivals = itertools.count()

    def decide(view: View, now: float) -> Decision[int]:
        if next(rivals) == 0:
            thread = threading.Thread(target=increment, args=(store, ONE))
            thread.start()
            thread.join()
        there = view.get(ONE)
        assert there is None or there.number == 1
        return Decision([Create(INDEX, Item(0 if there is None else there.number))], next(rivals))

    store.transact([INDEX, ONE], decide)

    assert number_of(store, INDEX) == 1


def test_a_decision_based_on_a_missing_document_conflicts_with_its_creation(store: ServedStore) -> None:
    """Two clients each create a document only if the other's does not exist: exactly one succeeds."""
    for each in range(20):
        ours, theirs = ISSUES.key(f"ours-{each}"), ISSUES.key(f"theirs-{each}")

        def create(mine: Key[Item], other: Key[Item]) -> bool:
            def decide(view: View, now: float) -> Decision[bool]:
                if view.get(other) is not None:
                    return Decision([], False)
                return Decision([Create(mine, Item(1))], True)

            return store.transact([mine, other], decide).result

        won = run_threads(lambda: create(ours, theirs), lambda: create(theirs, ours))  # noqa: B023
        assert sorted(won) == [False, True]


def test_a_commit_id_is_forgotten_after_a_week_and_not_before(store: ServedStore) -> None:
    def commit(name: str) -> None:
        store.transact([ONE], lambda view, now: Decision([Create(ONE, Item(1))], None), commit_id=name)

    commit("old")
    if isinstance(store.engine, PostgresEngine):
        connections = store.engine.connections
        connections.run(lambda each: each.execute("UPDATE holdfast.commits SET at = at - interval '8 days'"))
        with mock.patch.object(CHANCE, "randrange", return_value=0):
            increment(store, INDEX)
        kept = connections.run(lambda each: each.execute("SELECT count(*) FROM holdfast.commits").fetchone()[0])
    else:
        assert isinstance(store.engine, EtcdEngine)
        key = store.engine.keys.commit("old")
        note = msgspec.json.encode({"outcome": "made", "at": store.now() - 8 * 86400})
        store.engine.gateway.ask("/v3/kv/put", {"key": encoded(key), "value": encoded(note)})
        with mock.patch.object(CHANCE, "randrange", return_value=0):
            increment(store, INDEX)
        kept = len(store.engine._range(store.engine.keys.commit(""), store.engine.keys.commit("~"), 0))
    assert kept == 1


def test_old_commit_ids_are_forgotten_piece_by_piece_with_an_index(postgres_url: str) -> None:
    """Also in a store that has no index on their age yet."""
    notes = """INSERT INTO holdfast.commits (id, made, at, names)
        SELECT %s || n, true, now() - %s::interval, '{}' FROM generate_series(1, 5000) AS n"""
    with PostgresStore(postgres_url) as store, mock.patch.object(CHANCE, "randrange", return_value=0):
        assert isinstance(store.engine, PostgresEngine)
        ask = store.engine.connections.run
        for prefix, age in (("old", "8 days"), ("young", "1 day")):
            ask(lambda each: each.execute(notes, [prefix, age]))  # noqa: B023
        kept = []
        for _ in range(4):
            increment(store, ONE)
            found = ask(lambda each: each.execute("SELECT count(*) FROM holdfast.commits WHERE id LIKE 'old%'"))
            kept.append(found.fetchone()[0])
        assert kept == [3000, 1000, 0, 0]
        ask(lambda each: each.execute("ANALYZE holdfast.commits"))
        plan = ask(lambda each: each.execute(f"EXPLAIN {statements.FORGET}").fetchall())
        assert "commits_at" in str(plan)
        young = ask(lambda each: each.execute("SELECT count(*) FROM holdfast.commits").fetchone()[0])
        assert young == 5004


def test_a_user_who_may_not_create_an_index_still_forgets(postgres_server: Postgres, postgres_url: str) -> None:
    schema = postgres_url.partition("schema=")[2]
    with PostgresStore(postgres_url) as owner, psycopg.connect(postgres_server.url, autocommit=True) as admin:
        increment(owner, ONE)
        admin.execute("CREATE ROLE guest LOGIN")
        admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO guest")
        admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO guest")
        admin.execute(f"UPDATE {schema}.commits SET at = at - interval '8 days'")
        try:
            guest = PostgresStore(postgres_url.replace("holdfast@", "guest@"))
            with guest, mock.patch.object(CHANCE, "randrange", return_value=0):
                increment(guest, ONE)
            assert admin.execute(f"SELECT count(*) FROM {schema}.commits").fetchone() == (1,)
        finally:
            admin.execute("DROP OWNED BY guest")
            admin.execute("DROP ROLE guest")


def test_forgetting_looks_at_a_bounded_number_of_notes_in_etcd(etcd_url: str) -> None:
    with EtcdStore(etcd_url) as store, mock.patch("holdfast.store.etcd._LOOK_AT", 40):
        engine = store.engine
        assert isinstance(engine, EtcdEngine)
        now = store.now()
        for number in range(200):
            note = msgspec.json.encode({"outcome": "made", "at": now - (number % 2) * 8 * 86400})
            request = {"key": encoded(engine.keys.commit(str(uuid.uuid4()))), "value": encoded(note)}
            engine.gateway.ask("/v3/kv/put", request)

        def left() -> int:
            return len(engine._range(engine.keys.commit(""), engine.keys.commit("~"), 0))

        looked: list[int] = []
        original = engine._range

        def counting(start: bytes, end: bytes, limit: int) -> list[Any]:
            looked.append(len(found := original(start, end, limit)))
            return found

        for _ in range(3):
            looked.clear()
            with mock.patch.object(engine, "_range", counting):
                engine._forget(now)
            assert sum(looked) == 40
        for _ in range(200):
            engine._forget(now)
        assert left() == 100


def test_a_name_outside_the_layout_is_refused_as_in_a_file_store(store: ServedStore) -> None:
    for act in _invalid_uses(store):
        with pytest.raises(UsageFailure):
            act()


def _nothing(view: View, now: float) -> Decision[None]:
    return Decision([], None)


def _invalid_uses(store: ServedStore) -> list[Callable[[], Any]]:
    wrong: list[Any] = [
        Key("jit/nothing", ONE.codec),
        Key(EVENTS.name, ONE.codec),
        Stream(INDEX.name, EVENTS.codec),
    ]
    acts: list[Callable[[], Any]] = []
    for each in wrong:
        acts.append(partial(store.transact, [each], _nothing))
        acts.append(partial(store.watch, each))
    return [*acts, lambda: store.read(wrong[0]), lambda: list(store.entries(wrong[2]))]


# --- A server with small limits -------------------------------------------------------------------


@pytest.fixture
def small_etcd(server_scratch: Path) -> Iterator[EtcdStore]:
    """etcd with default limits: at most 128 operations and 1.5 MiB in a transaction."""
    directory = server_scratch / "etcd"
    directory.mkdir()
    server = Etcd(directory)
    server.start()
    with EtcdStore(server.store_url("x")) as store:
        yield store
    server.kill()


def test_default_etcd_takes_usual_commits_and_names_the_limit_for_larger_ones(small_etcd: EtcdStore) -> None:
    keys = [ISSUES.key(f"m{each}") for each in range(300)]
    for start in range(0, 300, 60):  # each has a place in the queue
        apply(small_etcd, *(Create(key, Item(1)) for key in keys[start : start + 60]))
    view = small_etcd.read_together(keys)
    assert all(view.get(key) == Item(1) for key in keys)

    for large in (
        [Create(ISSUES.key(f"n{each}"), Item(1)) for each in range(200)],
        [Create(INDEX, Item(1, "x" * 2_000_000))],
    ):
        with pytest.raises(UsageFailure) as raised:
            apply(small_etcd, *large)
        assert "--max-" in raised.value.hint
    assert len(list(small_etcd.scan(ISSUES))) == 300
    assert small_etcd.read(INDEX) is None


def test_the_store_runs_on_the_latest_postgresql(server_scratch: Path) -> None:
    directory = server_scratch / "postgres"
    directory.mkdir()
    server = Postgres(directory, version="18")
    server.start()
    numbers = itertools.count()

    def fresh() -> StoreSubject:
        url = f"{server.url}?schema=s{next(numbers)}"
        return StoreSubject(PostgresStore(url), lambda: PostgresStore(url))

    run_state_machine(fresh, examples=3)
    with PostgresStore(server.url) as one, PostgresStore(server.url) as other, one.watch(ONE) as watch:
        run_threads(lambda: increment_often(one, ONE, EVENTS, 10), lambda: increment_often(other, ONE, EVENTS, 10))
        assert watch.wait(30) == {ONE.name}
        assert number_of(one, ONE) == 20
    server.kill()


def test_reading_does_not_create_a_missing_store(postgres_url: str, etcd_url: str) -> None:
    for store in (PostgresStore(postgres_url, create=False), EtcdStore(etcd_url, create=False)):
        for _ in range(2):
            with pytest.raises(NotFound):
                store.read(ONE)
        store.close()


def test_simultaneous_uses_leave_one_connection(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PostgresStore(postgres_url)
    assert isinstance(store.engine, PostgresEngine)
    connections = store.engine.connections
    with connections.borrowed() as one, connections.borrowed() as other:
        assert one is not other
    with connections.borrowed() as again:
        assert again is one, "both are kept: threads need them at the same time again and again"
    assert not other.closed

    monkeypatch.setattr(postgres_connections, "SPARE", 0.0)
    with connections.borrowed():
        pass
    assert (one.closed, other.closed) == (False, True)
    store.close()
