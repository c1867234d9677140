"""What changed since a cursor, where stores differ: files that other programs write, transactions that end out of
order, history that is gone, tables of an earlier version."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import IoFailure
from holdfast.fs import calls
from holdfast.store import postgres_sql as statements
from holdfast.store import stat_cache
from holdfast.store.etcd import EtcdEngine, EtcdStore
from holdfast.store.files import FileStore
from holdfast.store.intents import Intents
from holdfast.store.model import Append, Change, Create, Delete, Replace
from holdfast.testing.backend import EVENTS, ISSUES, ONE, TWO, WORKTREES, Event, Item, apply, increment, run_threads
from holdfast.testing.contract_changes import FamilyCopy
from proof.effort import rounds

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresEngine, PostgresStore  # noqa: E402

MINUTE = 60_000_000_000


# --- Files ------------------------------------------------------------------------------------------


class CoarseStatus:
    """The status of a file on a filesystem that keeps whole seconds."""

    def __init__(self, status: os.stat_result) -> None:
        self.st_dev, self.st_ino, self.st_size, self.st_mode = (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mode,
        )
        self.st_mtime_ns = status.st_mtime_ns // 1_000_000_000 * 1_000_000_000
        self.st_ctime_ns = status.st_ctime_ns // 1_000_000_000 * 1_000_000_000


class CoarseCalls:
    """The calls of the stat cache, on such a filesystem."""

    @staticmethod
    def stat(*arguments: Any, **options: Any) -> CoarseStatus:
        return CoarseStatus(calls.stat(*arguments, **options))

    @staticmethod
    def fstat(*arguments: Any) -> CoarseStatus:
        return CoarseStatus(calls.fstat(*arguments))


def settle(path: Path) -> None:
    """Make everything here older than recent: as if a minute had passed."""
    then = time.time_ns() - MINUTE
    for each in (*path.iterdir(), path):
        os.utime(each, ns=(then, then))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock by which files are recent, relative to the system's."""

    def step(seconds: float) -> None:
        now = lambda: time.monotonic_ns() + offset + int(seconds * 1e9)  # noqa: E731
        monkeypatch.setattr("holdfast.store.stat_cache.time.time_ns", now)

    offset = time.time_ns() - time.monotonic_ns()
    return step


@pytest.fixture
def files(scratch: Path) -> Iterator[FileStore]:
    with FileStore(scratch) as store:
        yield store


def text(number: int) -> str:
    return f'{{"number": {number}, "text": ""}}'


def write_in_place(directory: Path, name: str, number: int) -> None:
    with (directory / f"{name}.json").open("r+") as file:
        file.write(text(number))
        file.truncate()


def histories(store: FileStore, directory: Path, chance: random.Random, steps: int) -> int:
    """Change the members of a family in every way that a program can; return how often the copy was wrong."""
    copy, wrong = FamilyCopy(store), 0
    names = [f"m{each}" for each in range(6)]
    for _ in range(steps):
        name = chance.choice(names)
        path = directory / f"{name}.json"
        how = chance.randrange(7)
        if not path.exists():
            path.write_text(text(chance.randrange(10)))
        elif how < 3:
            write_in_place(directory, name, chance.randrange(10))
        elif how == 3:
            path.unlink()
        elif how == 4:
            (directory / "draft").write_text(text(chance.randrange(10)))
            (directory / "draft").rename(path)
        elif how == 5:
            other = directory.parent / "linked"
            other.unlink(missing_ok=True)
            os.link(path, other)
            other.write_text(text(chance.randrange(10)))
        else:
            apply(store, Replace(ISSUES.key(name), Item(chance.randrange(10))))
        if chance.random() < 0.7:
            wrong += copy.catch_up() != dict(store.scan(ISSUES))
    return wrong


@pytest.mark.parametrize("coarse", [False, True], ids=["fine times", "coarse times"])
def test_changes_of_other_programs_are_found(
    files: FileStore, scratch: Path, monkeypatch: pytest.MonkeyPatch, coarse: bool
) -> None:
    apply(files, Create(ONE, Item(1)))
    if coarse:
        monkeypatch.setattr(stat_cache, "calls", CoarseCalls)
    assert histories(files, scratch / ".jit/issues", random.Random(5), rounds(20_000, least=200)) == 0


def test_planted_trust_in_recent_times_is_found(
    files: FileStore, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(files, Create(ONE, Item(1)))
    monkeypatch.setattr(stat_cache, "calls", CoarseCalls)
    monkeypatch.setattr(stat_cache, "RECENT", -MINUTE)
    assert histories(files, scratch / ".jit/issues", random.Random(5), 400) > 0


def test_a_member_that_was_not_touched_is_not_read(files: FileStore, scratch: Path, later: Any) -> None:
    apply(files, Create(ONE, Item(1)), Create(TWO, Item(2)))
    later(60)
    cursor = files.changes(ISSUES).cursor
    assert files.changes(ISSUES, cursor)[1:4] == ({}, frozenset(), False)
    increment(files, ONE)
    found = files.changes(ISSUES, cursor)
    assert found.changed.keys() == {"one"}
    later(120)
    assert len(files.changes(ISSUES, found.cursor).changed) <= 1


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_changes_are_found_after_the_clock_was_set(files: FileStore, scratch: Path, later: Any, step: float) -> None:
    apply(files, Create(ONE, Item(1)))
    copy = FamilyCopy(files)
    copy.catch_up()
    for number in range(2, 6):
        later(step * (number % 2))
        write_in_place(scratch / ".jit/issues", "one", number)
        assert copy.catch_up()["one"].record == Item(number)


def test_in_a_large_family_a_file_written_in_place_is_found_in_turn(
    files: FileStore, scratch: Path, monkeypatch: pytest.MonkeyPatch, later: Any
) -> None:
    monkeypatch.setattr(stat_cache, "MOST_EXAMINED", 4)
    apply(files, *(Create(ISSUES.key(f"m{each:02}"), Item(1)) for each in range(20)))
    copy = FamilyCopy(files)
    later(60)
    copy.catch_up()
    copy.catch_up()
    write_in_place(scratch / ".jit/issues", "m13", 2)
    seen = []
    for second in range(5):  # 20 members, 4 in each look
        later(61 + second)
        seen.append(copy.catch_up()["m13"].record.number)
    assert seen[-1] == 2
    increment(files, ISSUES.key("m19"))  # this changes the directory: all are examined
    write_in_place(scratch / ".jit/issues", "m02", 3)
    assert copy.catch_up() == dict(files.scan(ISSUES))


@pytest.mark.parametrize("family", [ISSUES, WORKTREES], ids=lambda each: str(each.name))
def test_a_commit_that_a_crash_interrupted_is_seen_and_followed(
    files: FileStore, monkeypatch: pytest.MonkeyPatch, family: Any
) -> None:
    apply(files, Create(family.key("kept"), Item(1)), Create(family.key("removed"), Item(1)))
    copy = FamilyCopy(files, family)
    copy.catch_up()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Intents, "apply", _interrupted)
        changes: list[Change] = [
            Create(family.key("new"), Item(1)),
            Replace(family.key("kept"), Item(2)),
            Delete(family.key("removed")),
        ]
        apply(files, *changes, Append(EVENTS, Event(1)))
    assert copy.catch_up().keys() == {"new", "kept"}
    apply(files, Delete(family.key("new")))  # applies the other commit first
    assert copy.catch_up() == dict(files.scan(family))


def _interrupted(*_: object) -> list[int]:
    raise IoFailure("apply", "here", OSError("interrupted"))


def test_the_directory_may_be_replaced_removed_and_made_again(files: FileStore, scratch: Path) -> None:
    apply(files, Create(ONE, Item(1)), Create(TWO, Item(2)))
    copy, place = FamilyCopy(files), scratch / ".jit/issues"
    copy.catch_up()
    place.rename(scratch / "aside")
    assert copy.catch_up() == {}
    place.mkdir()
    (place / "one.json").write_text(text(7))
    assert {name: each.record for name, each in copy.catch_up().items()} == {"one": Item(7)}
    (place / "one.json").unlink()
    place.rmdir()
    (scratch / "aside").rename(place)
    assert copy.catch_up() == dict(files.scan(ISSUES))


def test_a_cursor_of_another_directory_does_not_hide_anything(files: FileStore, scratch: Path, later: Any) -> None:
    later(60)
    apply(files, Create(ONE, Item(1)), Create(TWO, Item(2)))
    with FileStore(scratch / "other") as other:
        apply(other, Create(ONE, Item(9)))
        found = other.changes(ISSUES, files.changes(ISSUES).cursor)
        assert found.changed == dict(other.scan(ISSUES))
        assert found.removed == {"two"}


# --- PostgreSQL -------------------------------------------------------------------------------------


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[PostgresStore]:
    with PostgresStore(postgres_url) as store:
        yield store


def _engine(store: PostgresStore) -> PostgresEngine:
    assert isinstance(store.engine, PostgresEngine)
    return store.engine


def late_commit(store: PostgresStore, number: int, commit_id: str) -> Any:
    """A connection with an open transaction that has replaced a document, and has not ended."""
    document = store.read(ONE)
    assert document is not None
    connection = _engine(store).connections.connect()
    connection.execute("BEGIN")
    named = {"id": commit_id, "name": ONE.name.encode(), "version": document.version, "content": text(number).encode()}
    assert connection.execute(statements.COMMIT_ONE, named).fetchone() == (True,)
    return connection


def follow_late_commits(store: PostgresStore) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a copy has, and what is there, after a transaction that began before others has ended after them."""
    apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)))
    copy = FamilyCopy(store)
    copy.catch_up()
    late = late_commit(store, 5, "late")
    for _ in range(3):
        increment(store, TWO)
        copy.catch_up()
    late.execute("COMMIT")
    late.close()
    return dict(copy.catch_up()), dict(store.scan(ISSUES))


def test_a_commit_that_ends_after_later_ones_is_reported(postgres: PostgresStore) -> None:
    copied, found = follow_late_commits(postgres)
    assert copied == found
    assert found["one"].record == Item(5)


def test_a_planted_cursor_that_skips_open_transactions_is_found(
    postgres: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    horizon = "pg_snapshot_xmin(pg_current_snapshot())"
    for name in ("NEWEST", "CHANGES"):
        statement = getattr(statements, name)
        assert horizon in statement
        monkeypatch.setattr(statements, name, statement.replace(horizon, "pg_snapshot_xmax(pg_current_snapshot())"))
    copied, found = follow_late_commits(postgres)
    assert copied != found


def test_a_transaction_that_is_open_for_long_hides_nothing(postgres: PostgresStore) -> None:
    apply(postgres, Create(ONE, Item(1)))
    late = late_commit(postgres, 5, "open")
    copy = FamilyCopy(postgres)
    for number in range(5):
        apply(postgres, Create(ISSUES.key(f"m{number}"), Item(number)))
        assert copy.catch_up() == dict(postgres.scan(ISSUES))
    late.execute("ROLLBACK")
    late.close()
    assert copy.catch_up() == dict(postgres.scan(ISSUES))


def test_an_older_copy_of_the_database_is_noticed(postgres: PostgresStore) -> None:
    apply(postgres, Create(ONE, Item(1)))
    with _engine(postgres).connections.borrowed() as connection:
        documents = connection.execute("SELECT name, version, content FROM holdfast.documents").fetchall()
        commits = connection.execute("SELECT id FROM holdfast.commits").fetchall()
        increment(postgres, ONE)
        copy = FamilyCopy(postgres)
        copy.catch_up()
        for name, version, content in documents:
            restore = "UPDATE holdfast.documents SET version = %s, content = %s WHERE name = %s"
            connection.execute(restore, [version, content, name])
        connection.execute("DELETE FROM holdfast.commits WHERE id <> ALL(%s)", [[each for (each,) in commits]])
    apply(postgres, Create(TWO, Item(1)))
    assert copy.catch_up() == dict(postgres.scan(ISSUES))


def test_the_changes_of_a_large_family_cost_what_has_changed_without_statistics(postgres: PostgresStore) -> None:
    """A new store has many documents before the server has analysed its tables."""
    apply(postgres, Create(ONE, Item(1)))
    many = """INSERT INTO holdfast.documents (name, version, content)
        SELECT ('jit/issues/m' || n)::bytea, '1', '{"number": 1}' FROM generate_series(1, 5000) AS n"""
    read = """SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables
        WHERE schemaname = %s AND relname = 'documents'"""
    with _engine(postgres).connections.borrowed() as connection:
        connection.execute("ALTER TABLE holdfast.documents SET (autovacuum_enabled = false)")
        connection.execute(many)
        number, *last = postgres.changes(ISSUES).cursor.decode().split()
        increment(postgres, ONE)
        named = {"number": int(number), "last": last, "start": b"jit/issues/", "end": b"jit/issues0"}
        connection.execute("BEGIN")
        assert len(connection.execute(statements.CHANGES, named).fetchall()) == 1
        assert connection.execute(read, [connection.schema]).fetchone() == (1,)
        connection.execute("ROLLBACK")


VERSION_1 = """
CREATE SCHEMA IF NOT EXISTS holdfast;
CREATE TABLE holdfast.settings (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE holdfast.documents (name bytea PRIMARY KEY, version text NOT NULL, content bytea, position bigint);
CREATE TABLE holdfast.entries (
    stream bytea NOT NULL, position bigint NOT NULL, content bytea NOT NULL, PRIMARY KEY (stream, position));
CREATE TABLE holdfast.commits (id text PRIMARY KEY, made boolean NOT NULL, at timestamptz NOT NULL);
CREATE TABLE holdfast.watchers (id text PRIMARY KEY, until timestamptz NOT NULL);
INSERT INTO holdfast.settings VALUES ('schema_version', '1');
INSERT INTO holdfast.commits VALUES ('before', true, now());
INSERT INTO holdfast.documents VALUES ('jit/issues/one', 'before', '{"number": 1, "text": ""}', NULL)
"""
COMMIT_OF_VERSION_1 = """
WITH fits AS (
    UPDATE holdfast.documents SET version = %(id)s, content = %(content)s
    WHERE name = %(name)s AND version = %(version)s RETURNING true AS yes
), noted AS (
    INSERT INTO holdfast.commits (id, made, at) SELECT %(id)s, true, clock_timestamp() FROM fits
)
SELECT fits.yes FROM fits"""


@pytest.fixture
def version_1(postgres_url: str) -> Iterator[Any]:
    """A connection of an earlier version of Holdfast, whose tables these are."""
    connections = PostgresEngine(postgres_url).connections
    connections._checked = True
    connection = connections.connect()
    connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{connection.schema}"')
    for statement in VERSION_1.split(";\n")[1:]:
        connection.execute(statement)
    yield connection
    connection.close()


def test_the_tables_of_version_1_are_upgraded(postgres_url: str, version_1: Any) -> None:
    def old_commit(commit_id: str, version: str) -> Any:
        named = {"id": commit_id, "name": ONE.name.encode(), "version": version, "content": text(2).encode()}
        return version_1.execute(COMMIT_OF_VERSION_1, named, prepare=True).fetchone()

    assert old_commit("old", "before") == (True,)
    with PostgresStore(postgres_url) as store, PostgresStore(postgres_url) as other:
        assert store.read(ONE) == other.read(ONE)
        copy = FamilyCopy(store)
        assert copy.catch_up()["one"].record == Item(2)
        with pytest.raises(psycopg.errors.CheckViolation, match="needs_a_newer_holdfast"):
            old_commit("late", "old")
        assert store.read(ONE) == other.read(ONE)
        assert increment(other, ONE) == 3
        assert copy.catch_up() == dict(store.scan(ISSUES))
        assert increment(other, ONE) == 4
        assert not store.changes(ISSUES, copy.cursor).is_whole
        assert store.was_made("old")


@pytest.mark.usefixtures("version_1")
def test_several_clients_upgrade_at_once(postgres_url: str) -> None:
    def work() -> int:
        with PostgresStore(postgres_url) as store:
            return increment(store, ONE)

    assert sorted(run_threads(*[work] * 6)) == [2, 3, 4, 5, 6, 7]


def test_without_numbers_of_transactions_everything_is_returned(
    postgres: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(postgres, Create(ONE, Item(1)))
    cursor = postgres.changes(ISSUES).cursor
    _engine(postgres).connections.numbers = False
    apply(postgres, Create(TWO, Item(1)))
    found = postgres.changes(ISSUES, cursor)
    assert (found.is_whole, found.cursor) == (True, b"")
    assert found.changed == dict(postgres.scan(ISSUES))


# --- etcd -------------------------------------------------------------------------------------------


def test_compacted_history_means_everything(etcd_url: str) -> None:
    with EtcdStore(etcd_url) as store:
        engine = store.engine
        assert isinstance(engine, EtcdEngine)
        apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)))
        copy = FamilyCopy(store)
        copy.catch_up()
        apply(store, Delete(TWO))
        increment(store, ONE)
        revision = engine.gateway.ask("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        engine.gateway.ask("/v3/kv/compaction", {"revision": revision})
        found = store.changes(ISSUES, copy.cursor)
        assert found.is_whole
        assert copy.catch_up() == dict(store.scan(ISSUES)) != {}


def test_a_history_that_cannot_be_read_means_everything(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("cut")

    with EtcdStore(etcd_url) as store:
        apply(store, Create(ONE, Item(1)))
        copy = FamilyCopy(store)
        copy.catch_up()
        increment(store, ONE)
        monkeypatch.setattr(EtcdEngine, "_history", fail)
        assert store.changes(ISSUES, copy.cursor).is_whole
        assert copy.catch_up() == dict(store.scan(ISSUES))


def test_another_history_with_higher_revisions_is_noticed(etcd_url: str) -> None:
    with EtcdStore(etcd_url) as store:
        apply(store, Create(ONE, Item(1)))
        revision, _, at = store.changes(ISSUES).cursor.partition(b" ")
        increment(store, ONE)
        assert store.changes(ISSUES, revision + b" 1" + at).is_whole
        assert not store.changes(ISSUES, revision + b" " + at).is_whole
