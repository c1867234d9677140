"""A command does not wait for a server beyond its limit, and its failure tells why it could not go on."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.errors import StoreUnavailable, TooManyRetries
from holdfast.store.etcd import EtcdStore
from holdfast.store.model import Create
from holdfast.store.served import TimeLimit
from holdfast.testing.backend import INDEX, Item, apply, increment, number_of
from tests.support.proxy import Proxy

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresEngine, PostgresStore  # noqa: E402

LIMIT = 5.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["postgres", "etcd"])
def test_attempts_that_fail_late_leave_less_time_for_the_next(request: pytest.FixtureRequest, kind: str) -> None:
    """The server is silent. Its connections break shortly before the limit, and the next ones are silent too."""
    server, url = (request.getfixturevalue(f"{kind}_{each}") for each in ("server", "url"))
    proxy = Proxy(server.port)
    proxy.unplugged = True
    made = PostgresStore if kind == "postgres" else EtcdStore
    with proxy, made(url.replace(f":{server.port}/", f":{proxy.port}/"), timeout=LIMIT) as store:
        cut = threading.Timer(0.9 * LIMIT, proxy.cut_all_lines)
        cut.start()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.read(INDEX)
        assert time.monotonic() - began < 1.6 * LIMIT
        cut.join()


def test_the_time_left_is_that_of_the_innermost_limit_of_this_thread() -> None:
    deadline, elsewhere = TimeLimit(), []
    assert deadline.left(5.0) == 5.0
    with deadline.within(2.0) as outer:
        with deadline.within(60.0) as inner:
            assert inner == outer
        assert 0 < deadline.left(5.0) <= 2.0
        with deadline.within(-1.0):
            assert 0 < deadline.left(5.0) < 0.1
        thread = threading.Thread(target=lambda: elsewhere.append(deadline.left(5.0)))
        thread.start()
        thread.join()
    assert elsewhere == [5.0]
    assert deadline.left(5.0) == 5.0


def test_locks_of_another_program_are_named_as_the_reason(postgres_url: str) -> None:
    with PostgresStore(postgres_url, timeout=0.4, patience=0.5) as store:
        apply(store, Create(INDEX, Item(0)))
        schema = postgres_url.partition("schema=")[2]
        with psycopg.connect(postgres_url.partition("?")[0]) as other:
            other.execute(f"SELECT * FROM {schema}.documents FOR UPDATE")
            with pytest.raises(TooManyRetries, match="lock timeout") as raised:
                increment(store, INDEX)
            assert raised.value.retryable
        assert increment(store, INDEX) == number_of(store, INDEX) == 1


@pytest.mark.parametrize(("state", "hint"), [("53100", "Free space"), ("53300", "connection"), ("55P03", "locks")])
def test_the_hint_follows_the_reason_of_the_server(postgres_url: str, state: str, hint: str) -> None:
    statement = f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$"
    with PostgresStore(postgres_url, timeout=0.1) as store:
        assert isinstance(store.engine, PostgresEngine)
        connections = store.engine.connections
        with pytest.raises(StoreUnavailable) as raised:
            connections.run(lambda connection: connection.execute(statement))
        assert hint in raised.value.hint
