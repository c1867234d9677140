"""The PostgreSQL store behind PgBouncer, which shares the sessions of the server among its clients."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreAccessRefused
from holdfast.store.model import Create
from holdfast.testing.backend import EVENTS, INDEX, ISSUES, Item, apply, increment, run_threads
from proof.effort import rounds
from tests.support.servers import Postgres, Server, is_root

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresEngine, PostgresStore  # noqa: E402

STORES, CLIENTS = 2, 3


class PgBouncer(Server):
    """PgBouncer before a PostgreSQL, with two sessions for all clients."""

    def __init__(self, directory: Path, server: Postgres, mode: str, *, options: str = "") -> None:
        super().__init__(directory)
        program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if program is None:
            pytest.skip("PgBouncer is not installed here (Debian: apt-get install pgbouncer)")
        self._program, self._target = program, server
        self.user = "nobody" if is_root() else None  # it refuses to run as root
        settings = directory / "pgbouncer.ini"
        settings.write_text(
            "[databases]\n"
            f"postgres = host=127.0.0.1 port={server.port} user=holdfast {options}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {mode}\ndefault_pool_size = 2\nmax_client_conn = 100\n"
        )

    def command(self) -> Sequence[str]:
        return [self._program, str(self.directory / "pgbouncer.ini")]

    def answers(self) -> bool:
        return self._connects()

    def through(self, url: str) -> str:
        return url.replace(f":{self._target.port}/", f":{self.port}/")


@contextlib.contextmanager
def pooled(directory: Path, server: Postgres, mode: str = "transaction", **options: Any) -> Iterator[PgBouncer]:
    made = PgBouncer(directory, server, mode, **options)
    made.start()
    try:
        yield made
    finally:
        made.kill()


def settings_of(url: str) -> dict[str, str]:
    """The settings of a session that another program gets."""
    names = ("search_path", "statement_timeout", "lock_timeout", "default_transaction_isolation")
    with psycopg.connect(url.partition("?")[0], autocommit=True, prepare_threshold=None) as connection:
        return {name: connection.execute(f"SHOW {name}").fetchone()[0] for name in names}


def numbers(store: PostgresStore) -> list[int]:
    return [each.record.number for each in store.entries(EVENTS)]


def test_each_repository_gets_its_own_events_through_a_pooler_of_transactions(
    server_scratch: Path, postgres_server: Postgres
) -> None:
    urls = [postgres_server.store_url(f"pooled_{each}") for each in range(STORES)]
    times = rounds(1000, least=10)
    with pooled(server_scratch, postgres_server) as pooler, contextlib.ExitStack() as stack:
        clients = [
            (number, stack.enter_context(PostgresStore(pooler.through(url))))
            for number, url in enumerate(urls)
            for _ in range(CLIENTS)
        ]
        for _, store in clients[::CLIENTS]:
            apply(store, Create(INDEX, Item(0)))
        usual = settings_of(postgres_server.url)
        work = [lambda store=store: [increment(store, INDEX, EVENTS) for _ in range(times)] for _, store in clients]
        run_threads(*work)

        for _, store in clients:
            assert isinstance(store.engine, PostgresEngine)
            assert store.engine.connections.is_pooled
        for _ in range(5):  # whichever session it gets
            assert settings_of(pooler.through(urls[0])) == usual
    for url in urls:
        with PostgresStore(url) as store:
            assert numbers(store) == list(range(1, CLIENTS * times + 1))
            assert isinstance(store.engine, PostgresEngine)
            assert not store.engine.connections.is_pooled


def test_a_watch_polls_behind_a_pooler_and_others_are_notified(
    server_scratch: Path, postgres_server: Postgres, postgres_url: str
) -> None:
    one, two = ISSUES.key("one"), ISSUES.key("two")
    with (
        pooled(server_scratch, postgres_server) as pooler,
        PostgresStore(pooler.through(postgres_url)) as behind,
        PostgresStore(postgres_url) as beside,
        behind.watch(ISSUES) as watch,
        beside.watch(ISSUES) as direct,
    ):
        apply(beside, Create(one, Item(1)))
        assert watch.wait(30) == {one.name}
        assert direct.wait(30) == {one.name}
        apply(behind, Create(two, Item(1)))
        assert direct.wait(30) == {two.name}


@pytest.mark.sampled(1)
def test_a_pooler_of_sessions_serves_a_store(
    server_scratch: Path, postgres_server: Postgres, postgres_url: str
) -> None:
    with (
        pooled(server_scratch, postgres_server, "session") as pooler,
        PostgresStore(pooler.through(postgres_url)) as store,
    ):
        commit = apply(store, Create(INDEX, Item(0)))
        for _ in range(10):
            increment(store, INDEX, EVENTS)
        assert store.was_made(commit.id)
        assert not store.was_made("never")
        assert numbers(store) == list(range(1, 11))


def test_a_pooled_session_whose_commits_are_not_on_disk_is_refused(
    server_scratch: Path, postgres_server: Postgres, postgres_url: str
) -> None:
    query = "connect_query='SET synchronous_commit TO off'"
    with (
        pooled(server_scratch, postgres_server, options=query) as pooler,
        PostgresStore(pooler.through(postgres_url)) as store,
        pytest.raises(StoreAccessRefused, match="not on disk"),
    ):
        store.read(INDEX)
