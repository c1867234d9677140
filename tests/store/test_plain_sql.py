"""The store uses only SQL that CockroachDB and YugabyteDB support. It also copes with their differences (no
notifications, conflicts at any moment, stricter isolation), here on a real PostgreSQL that is made to behave so."""

from __future__ import annotations

import contextlib
import inspect
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.errors import StoreMoved
from holdfast.issues import rules
from holdfast.issues.tracker import Tracker
from holdfast.leases.service import LeaseService, acquire
from holdfast.locks.retry import CHANCE
from holdfast.store import postgres_sql as statements
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Append, Create, Delete, Replace
from holdfast.store.open import open_content
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
from tests.store.plain_sql import FOREIGN, NOTIFICATIONS, NUMBERS, all_problems, problems_of
from tests.store.test_file_store import RICH, act_on_accounts, judge_accounts, record
from tests.support.proxy import Door
from tests.support.servers import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store import postgres as postgres_module  # noqa: E402
from holdfast.store import postgres_connections  # noqa: E402
from holdfast.store.postgres import PostgresEngine, PostgresStore  # noqa: E402

ONE = ISSUES.key("one")
TRAIL = AuditTrail()


# --- Statements ----------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded() -> Iterator[dict[int, list[str]]]:
    """A context that records the statements passed to psycopg, per connection."""
    sent: dict[int, list[str]] = {}
    original = psycopg.Cursor.execute

    def execute(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        text = query.as_string(self) if isinstance(query, psycopg.sql.Composable) else query
        text = text.replace(f'"{getattr(self.connection, "schema", "")}".', "")
        several = [each for each in text.split(";") if each.strip()]
        sent.setdefault(id(self.connection), []).extend(several)
        return original(self, query, *arguments, **options)

    with mock.patch.object(psycopg.Cursor, "execute", execute):
        yield sent


def do_everything(url: str) -> None:
    """Use every feature of the store."""
    with PostgresStore(url) as store, PostgresStore(url) as other:
        apply(store, Create(INDEX, Item(0)), Create(ONE, Item(1)), Append(EVENTS, Event(1)))
        with store.watch(ISSUES) as watch, store.watch(INDEX), store.watch(TRAIL.stream):
            apply(other, Replace(ONE, Item(2)))
            assert watch.wait(30) == {ONE.name}
        run_threads(*[lambda: [increment(store, INDEX) for _ in range(10)]] * 3)
        run_threads(*[lambda: [increment(other, INDEX, EVENTS) for _ in range(10)]] * 3)
        store._conflicts = {INDEX.name: float("inf")}
        increment(store, INDEX, EVENTS)
        apply(store, Delete(ONE))
        assert store.was_made("never") is False
        assert store.was_made("never") is False
        assert list(store.scan(ISSUES)) == []
        assert len(list(store.entries(EVENTS))) == 32
        store.read_together([INDEX, ONE])
        store.changes(ISSUES, store.changes(ISSUES).cursor)
        store.now()
        leases = LeaseService(store, TRAIL)
        lease = leases.acquire("main", leases.request(ttl=60)).lease
        leases.renew("main", lease.lock_id)
        leases.release("main", lease.lock_id)
        assert len(list(store.entries(TRAIL.stream))) == 2
        Tracker(store).claims.claim_next(rules.IssueClaimRequest("agent:a", 60.0, "secret"))
        with mock.patch.object(CHANCE, "randrange", return_value=0):
            increment(store, INDEX)  # also deletes old commit ids
        store.drop(EVENTS.name, 2)
        store.set_moved("etcd://elsewhere/")
        with pytest.raises(StoreMoved):
            increment(other, INDEX)
        store.set_moved(None)


def use_content(url: str) -> None:
    """Use every feature of the content store."""
    with PostgresStore(url) as store:
        content, name = open_content("postgres:", store), f"{'0' * 64}-aa"
        content.prepare()
        content.put({name: b"chunk"})
        assert content.names(["0" * 64]) == {"0" * 64: [name]}
        assert (content.get([name]), list(content.every_name())) == ({name: b"chunk"}, [name])
        content.delete([name])


def plain(statement: str) -> str:
    return " ".join(statement.replace("holdfast.", "").split())


ONLY_POSTGRESQL = {*map(plain, (statements.WAIT_FOR_COMMITS, statements.PICK, *statements.CREATE_QUEUE))}
"""Distributed databases, which are known by their version, do not get these."""


def portable(sessions: Iterable[list[str]]) -> list[list[str]]:
    return [[each for each in session if plain(each) not in ONLY_POSTGRESQL] for session in sessions]


def test_every_statement_is_portable(postgres_url: str) -> None:
    with recorded() as sent:
        do_everything(postgres_url)
        use_content(postgres_url)

    assert all_problems(portable(sent.values())) == []
    seen = {" ".join(each.split()) for session in sent.values() for each in session}
    for name, statement in inspect.getmembers(statements, lambda each: isinstance(each, str)):
        if name.isupper() and not name.startswith("_"):
            for each in statement.split(";"):
                wanted = " ".join(each.split()).replace("holdfast.", "")
                without = name in ("COMMIT", "COMMIT_ONE")  # sent only without notifications: see the next test
                assert not wanted or without or wanted in seen, f"{name} was not sent: {wanted}"


def test_a_distributed_server_gets_no_statement_about_notifications(postgres_url: str) -> None:
    with recorded() as sent, mock.patch.object(postgres_connections, "_DISTRIBUTED", ("PostgreSQL",)):
        do_everything(postgres_url)
        with PostgresStore(postgres_url) as store:
            store.read(INDEX)
            assert store.skew == postgres_module.CLOCKS_APART

    assert all_problems(sent.values()) == []
    said = [each for session in sent.values() for each in session if NOTIFICATIONS.search(each)]
    assert [each for each in said if "CREATE TABLE" not in each] == []
    assert [each for session in sent.values() for each in session if NUMBERS.search(each)] == []
    seen = {" ".join(each.split()) for session in sent.values() for each in session}
    commits = map(statements.unnumbered, (statements.COMMIT, statements.COMMIT_ONE))
    assert {" ".join(each.split()).replace("holdfast.", "") for each in commits} <= seen


PLANTED = """
SELECT pg_advisory_xact_lock(1)
SELECT pg_try_advisory_lock(1)
SELECT 1 FOR UPDATE SKIP LOCKED
LOCK TABLE documents IN SHARE MODE
SELECT 1 FROM documents FOR NO KEY UPDATE
CREATE TRIGGER t
CREATE OR REPLACE FUNCTION f() RETURNS int
DO $$ BEGIN END $$
CREATE TABLE t (n bigserial PRIMARY KEY)
SELECT nextval('s')
CREATE SEQUENCE s
SELECT xmin FROM documents
DELETE FROM t WHERE ctid = '(0,1)'
ALTER TABLE t ADD UNIQUE (a) DEFERRABLE
CREATE TEMP TABLE t (a int PRIMARY KEY)
DECLARE c CURSOR FOR x
PREPARE TRANSACTION 'x'
SAVEPOINT s
SELECT a COLLATE "C" FROM t
INSERT INTO t ON CONFLICT ON CONSTRAINT k
MERGE INTO t USING u
SET TRANSACTION ISOLATION LEVEL SERIALIZABLE
SELECT pg_backend_pid()
CREATE TABLE t (a int)
WITH a AS (UPDATE t SET x = 1), b AS (DELETE FROM t) SELECT 1
""".strip().splitlines()


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_feature_is_found(planted: str) -> None:
    assert list(problems_of(planted))
    assert list(problems_of(planted.lower())) or planted != planted.upper()


def test_every_foreign_feature_is_planted() -> None:
    found = {each.split(" (")[0] for planted in PLANTED for each in problems_of(planted)}
    assert {each.name for each in FOREIGN} <= found


def test_a_schema_change_within_a_transaction_is_found() -> None:
    assert all_problems([["BEGIN", "CREATE TABLE t (a int PRIMARY KEY)", "COMMIT"]])
    assert not all_problems([["BEGIN", "SELECT 1", "COMMIT", "CREATE TABLE t (a int PRIMARY KEY)"]])


# --- No notifications ----------------------------------------------------------------------------


class NoListening(Door):
    """A proxy to a real server that answers LISTEN as a server without it does."""

    _ERROR = b"SERROR\0VERROR\0C0A000\0MLISTEN not supported yet\0\0"

    def __init__(self, port: int) -> None:
        self._target = port
        self.refused = 0
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=self._answer, args=(client, server), daemon=True).start()
        self._ask(client, server)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), server:
            while chunk := client.recv(1 << 16):
                if b"LISTEN " in chunk and b"UNLISTEN" not in chunk:
                    self.refused += 1
                    error = b"E" + struct.pack("!I", len(self._ERROR) + 4) + self._ERROR
                    client.sendall(error + b"Z" + struct.pack("!I", 5) + b"I")
                else:
                    server.sendall(chunk)
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            while chunk := server.recv(1 << 16):
                client.sendall(chunk)
            client.shutdown(socket.SHUT_RDWR)


def test_the_store_polls_for_changes_if_listen_is_refused(postgres_server: Postgres, postgres_url: str) -> None:
    between = NoListening(postgres_server.port)
    url = postgres_url.replace(f":{postgres_server.port}/", f":{between.port}/")
    with between, PostgresStore(url) as store, PostgresStore(postgres_url) as other:
        with store.watch(ISSUES) as watch:
            apply(other, Create(ONE, Item(1)))
            assert watch.wait(30) == {ONE.name}
            apply(other, Create(INDEX, Item(1)))
            assert watch.wait(0.7) == frozenset()
        leases, elsewhere = LeaseService(store, TRAIL), LeaseService(other, TRAIL)
        held = elsewhere.acquire("main", elsewhere.request(ttl=60)).lease
        threading.Timer(0.2, lambda: elsewhere.release("main", held.lock_id)).start()
        assert acquire(leases, "main", leases.request(ttl=60), wait=30.0).token == held.fencing_token + 1
        assert between.refused == 1


@pytest.fixture
def role(postgres_server: Postgres) -> Iterator[str]:
    """The address of a user with few rights and a schema of its own."""
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE ROLE plain LOGIN")
        owner.execute("CREATE SCHEMA plain AUTHORIZATION plain")
        yield f"{postgres_server.url.replace('holdfast@', 'plain@')}?schema=plain"
        owner.execute("GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO PUBLIC")
        owner.execute("DROP SCHEMA plain CASCADE")
        owner.execute("DROP ROLE plain")


def test_a_user_who_may_not_notify_can_commit(postgres_server: Postgres, role: str) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC")
    with PostgresStore(role) as store:
        apply(store, Create(INDEX, Item(0)))
        assert run_threads(*[lambda: [increment(store, INDEX) for _ in range(5)]] * 3)
        assert number_of(store, INDEX) == 15
        assert isinstance(store.engine, PostgresEngine)
        assert not store.engine.connections.notifies


# --- Conflicts at any moment, and stricter isolation ---------------------------------------------

_FAILING = """
CREATE FUNCTION plain.perhaps() RETURNS {returns} LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF random() < {chance} THEN RAISE EXCEPTION 'restart transaction' USING ERRCODE = '{state}'; END IF;
    RETURN {value};
END $$"""


def _fail_commits(owner: Any, state: str) -> None:
    """Make the server refuse commits at random, at commit time, with this code."""
    owner.execute(_FAILING.format(returns="trigger", value="NULL", chance=0.3, state=state))
    owner.execute(
        "CREATE CONSTRAINT TRIGGER perhaps AFTER INSERT ON plain.commits DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW WHEN (NEW.made) EXECUTE FUNCTION plain.perhaps()"
    )


def _fail_reads(owner: Any, state: str) -> None:
    """Make the server refuse reads at random, with this code."""
    owner.execute(_FAILING.format(returns="boolean", value="true", chance=0.05, state=state))
    owner.execute("ALTER TABLE plain.documents ENABLE ROW LEVEL SECURITY")
    owner.execute("ALTER TABLE plain.documents FORCE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY perhaps ON plain.documents USING (plain.perhaps())")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fail", "state"), [(_fail_commits, "40001"), (_fail_commits, "40003"), (_fail_reads, "40001")]
)
def test_a_transaction_that_the_server_restarts_at_random_is_committed_once(
    postgres_server: Postgres, role: str, fail: Callable[[Any, str], None], state: str
) -> None:
    """40001: a conflict. 40003: the server does not know whether it committed; the commit id tells."""
    with PostgresStore(role) as store, psycopg.connect(postgres_server.url, autocommit=True) as owner:
        apply(store, Create(INDEX, Item(0)), Append(EVENTS, Event(0)))
        fail(owner, state)
        single = run_threads(*[lambda: [increment(store, INDEX) for _ in range(10)]] * 3)
        several = run_threads(*[lambda: [increment(store, INDEX, EVENTS) for _ in range(10)]] * 3)

        assert sorted(each for some in single for each in some) == list(range(1, 31))
        assert sorted(each for some in several for each in some) == list(range(31, 61))
        assert [each.record.number for each in store.entries(EVENTS)] == [0, *range(31, 61)]


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_stricter_isolation_than_requested_does_no_harm(scratch: Path, postgres_url: str, level: str) -> None:
    """By default, YugabyteDB treats 'read committed' as snapshot isolation and CockroachDB as serializable."""
    original = postgres_connections.Connections._session

    def strict(self: Any, **options: Any) -> Any:
        text = original(self, **options).as_string(None)
        assert "read committed" in text
        return psycopg.sql.SQL(text.replace("read committed", level))

    def opening(path: Path) -> PostgresStore:
        return PostgresStore(postgres_url)

    with mock.patch.object(postgres_connections.Connections, "_session", strict):
        with PostgresStore(postgres_url) as store:
            apply(store, Create(ONE, Item(0)))
            counted = run_threads(*[lambda: [increment(store, ONE) for _ in range(10)]] * 3)
            assert sorted(each for some in counted for each in some) == list(range(1, 31))
        history = record(scratch, opening, act_on_accounts, RICH, kills=5, each=10)  # type: ignore[arg-type]
    judge_accounts(history).require()
