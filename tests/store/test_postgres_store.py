"""The PostgreSQL store keeps the contract on a real server, and behaves like the model."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest

from holdfast.store.model import Key, Store
from holdfast.testing import Backend, Recipe, StoreContract, When
from proof.effort import rounds
from proof.model import StoreSubject, run_state_machine
from tests.support.servers import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresEngine, PostgresStore  # noqa: E402


def _engine(store: Store) -> PostgresEngine:
    assert isinstance(store, PostgresStore)
    assert isinstance(store.engine, PostgresEngine)
    return store.engine


class PostgresBackend(Backend):
    """Runs the contract on PostgreSQL."""

    many_within = 600.0  # the machine may be busy
    url: str

    def open_store(self) -> PostgresStore:
        return PostgresStore(self.url)

    def reopen(self, store: Store) -> PostgresStore:
        return PostgresStore(self.url)

    def process_target(self, store: Store) -> Recipe:
        return Recipe(PostgresStore, (self.url,))

    @contextlib.contextmanager
    def losing_answers(self, store: Store, when: When) -> Iterator[None]:
        """The connection breaks before the commit is sent or before the answer arrives; reconnecting fails."""
        engine = _engine(store)
        commit = engine.commit
        lost: list[bool] = []

        def lose(connection: Any, plan: Any) -> bool:
            if when == "after":
                commit(connection, plan)
            connection.pgconn.finish()
            lost.append(True)
            raise psycopg.OperationalError("the connection is gone")

        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(engine, "commit", lose))
            patches.enter_context(mock.patch.object(engine.connections, "timeout", 0.005))
            connect = _failing_if(lost, engine.connections.connect)
            patches.enter_context(mock.patch.object(engine.connections, "connect", connect))
            take = _failing_if(lost, engine.connections._take)
            patches.enter_context(mock.patch.object(engine.connections, "_take", take))
            yield

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        commit = PostgresEngine.commit

        def commit_late(self: PostgresEngine, connection: Any, plan: Any) -> bool:
            if random.random() < 0.2:
                time.sleep(random.random() * 0.004)
            return commit(self, connection, plan)

        with mock.patch.object(PostgresEngine, "commit", commit_late):
            yield

    def damage(self, store: Store, key: Key[Any], content: bytes) -> None:
        statement = "UPDATE holdfast.documents SET content = %s WHERE name = %s"
        with _engine(store).connections.borrowed() as connection:
            connection.execute(statement, [content, key.name.encode()])

    def stored(self, store: Store, key: Key[Any]) -> bytes:
        with _engine(store).connections.borrowed() as connection:
            found = connection.execute("SELECT content FROM holdfast.documents WHERE name = %s", [key.name.encode()])
            content: bytes = found.fetchone()[0]
            return content


def _failing_if(lost: list[bool], call: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        if lost:
            raise psycopg.OperationalError("the server is gone")
        return call(*arguments)

    return fail


class TestPostgresStore(PostgresBackend, StoreContract):
    many = rounds(100_000, least=500)

    @pytest.fixture(autouse=True)
    def place(self, postgres_url: str) -> None:
        self.url = postgres_url


def test_it_behaves_like_the_model(postgres_server: Postgres) -> None:
    numbers = count()

    def fresh() -> StoreSubject:
        schema = f"model_{next(numbers)}"
        url = f"{postgres_server.url}?schema={schema}"

        def dispose() -> None:
            with psycopg.connect(postgres_server.url, autocommit=True) as connection:
                connection.execute(f"DROP SCHEMA {schema} CASCADE")

        return StoreSubject(PostgresStore(url), partial(PostgresStore, url), dispose)

    run_state_machine(fresh, examples=rounds(12, least=4))
