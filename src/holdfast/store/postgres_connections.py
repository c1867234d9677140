"""Connections to PostgreSQL: opened when needed, kept for the next one, never waited for without end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from holdfast.errors import (
    NotFound,
    SettingInvalid,
    StoreAccessRefused,
    StoreIncompatible,
    StoreMissing,
    StoreUnavailable,
    StoreUntrusted,
)
from holdfast.locks.retry import CHANCE
from holdfast.store import postgres_sql as statements
from holdfast.store.addresses import has_secrets, joined, parts_of, without_secrets

Answer = TypeVar("Answer")

TIMEOUT = 10.0
"""How long the server may take to answer, and how long it is looked for."""

MOST_IDLE = 4
_ONLY_WHEN_ASKED = 1 << 30
DEFAULT_SCHEMA = "holdfast"
_TRANSIENT = ("starting up", "shutting down", "recovery", "too many", "remaining connection slots")
_UNTRUSTED = (
    *("certificate verify failed", "does not support SSL", "server certificate for", "root certificate file"),
    *("could not read certificate", "certificate file", "private key file", "tlsv1", "tlsv13", "sslv3 alert"),
)
_REFUSED = (
    *("authentication failed", "no password supplied", "no pg_hba.conf entry", "pg_hba.conf rejects"),
    *("not permitted to log in", "permission denied", "valid client certificate"),
)
"""What libpq and the server say, in English, when a connection is refused: there is no code for it."""

_DISTRIBUTED = ("CockroachDB", "-YB-")
"""How the relatives call themselves that have many nodes, with a clock each, and seldom notifications."""


class PostgresAddress(NamedTuple):
    """Where a store is: what to connect to, the schema in it, and how it is shown, without secrets."""

    parameters: dict[str, Any]
    schema: str
    place: str

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Read `postgresql://…`, with libpq's parameters and `schema`; whatever is not said libpq looks up
        as usual (a service file, `.pgpass`, `PG…` in the environment)."""
        parts = parts_of(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
        schema = dict(query).get("schema", DEFAULT_SCHEMA)
        rest = joined(parts, [each for each in query if each[0] != "schema"])
        try:
            parameters = conninfo_to_dict(rest)
        except psycopg.ProgrammingError as error:
            reason = "libpq cannot read it" if has_secrets(url) else one_line(error)  # which may quote them
            raise SettingInvalid("store", without_secrets(url), f"a PostgreSQL address: {reason}") from None
        if not schema or len(schema) > 63 or not schema.replace("_", "").isalnum() or not schema.isascii():
            raise SettingInvalid("schema", schema, "letters, digits and '_', at most 63 of them")
        return cls(parameters, schema, without_secrets(url))


class Connection(psycopg.Connection):  # type: ignore[misc]  # its types are there only if it is installed
    """A connection that does not wait for ever for a server that does not answer."""

    answer_within = TIMEOUT

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked_before: set[str] = set()

    def ask(self, statement: str, parameters: Any) -> Any:
        """Run a statement that is run often: prepared when it is first used, in the same round trip."""
        if statement in self._asked_before:
            return self.execute(statement, parameters, prepare=True, binary=True)
        self._asked_before.add(statement)
        try:
            with self.pipeline():
                return self.execute(statement, parameters, prepare=True, binary=True)
        except psycopg.Error:
            raise
        except LookupError as error:  # psycopg loses count if the server refuses only what ends the pipeline
            self.close()
            raise psycopg.OperationalError("the server's answer could not be understood") from error

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        limit = self.answer_within
        started = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.Error:
            raise
        except Exception as error:
            if time.monotonic() - started < limit:
                raise
            self.close()
            raise psycopg.OperationalError(f"the server did not answer within {limit:g} s") from error


class Connections:
    """The connections of one process to one store."""

    def __init__(self, address: PostgresAddress, *, timeout: float = TIMEOUT, create: bool = True) -> None:
        self.address = address
        self.create = create
        self.timeout = timeout
        self.notifies = True
        """Whether commits tell those who watch; where that cannot be, those look from time to time."""
        self.is_distributed = False
        self._idle: list[Any] = []
        self._pid = os.getpid()
        self._listeners: list[Any] = []
        for kept in (self._idle, self._listeners):
            weakref.finalize(self, _close_all, kept, self._pid)
        self._prepared = False
        self._preparing = threading.Lock()

    def run(self, work: Callable[[Any], Answer], *, patience: float | None = None) -> Answer:
        """Do something that may be done twice, on any connection."""

        def borrow_and_work() -> Answer:
            with self.borrowed() as connection:
                return work(connection)

        return self.persist(borrow_and_work, patience=patience)

    def persist(self, work: Callable[[], Answer], *, patience: float | None = None) -> Answer:
        """Do something again if the server goes away meanwhile, as long as there is patience."""
        deadline = time.monotonic() + (self.timeout if patience is None else patience)
        while True:
            try:
                return work()
            except psycopg.Error as error:
                if not is_away(error) and not is_conflict(error):
                    raise self.failure(error) from error
                left = deadline - time.monotonic()
                if left <= 0 or is_final(error):
                    raise self.failure(error) from error
            time.sleep(min(left, 0.02 + CHANCE.random() * 0.1))

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Any]:
        """A connection for a while. One that fails is closed, and with it those that have been idle."""
        connection = self._take()
        try:
            yield connection
        except BaseException:
            if connection.closed or connection.broken:
                self.close()
            raise
        finally:
            self._give_back(connection)

    def _take(self) -> Any:
        if self._pid != os.getpid():  # after a fork: they are the parent's, even to close
            self._pid, self._idle = os.getpid(), []
            weakref.finalize(self, _close_all, self._idle, self._pid)
        while self._idle:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
        return self.connect()

    def take_listener(self) -> Any:
        """A listener that a watch has left behind, if there is one."""
        while self._listeners:
            with contextlib.suppress(IndexError):
                listener = self._listeners.pop()
                if listener.pid == os.getpid():
                    return listener
        return None

    def keep_listener(self, listener: Any) -> None:
        """Keep a listener for the next watch, if it can be used."""
        if self._listeners or listener.connection.closed or not listener.pause():
            listener.close()
        else:
            self._listeners.append(listener)

    def _give_back(self, connection: Any) -> None:
        if connection.closed:
            return
        usable = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if usable and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def connect(self) -> Any:
        """A new connection; the first one also finds the store's tables, or makes them."""
        parameters = {
            "connect_timeout": max(2, math.ceil(self.timeout)),
            "application_name": "holdfast",
            "target_session_attrs": "read-write",  # a standby may show what is old
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": math.ceil(self.timeout * 1000),
            **self.address.parameters,
        }
        connection = Connection.connect(autocommit=True, prepare_threshold=_ONLY_WHEN_ASKED, **parameters)
        try:
            connection.answer_within = self.timeout + 1  # the server gives up first, if it can
            connection.execute(self._session())
            if not self._prepared:
                with self._preparing:
                    self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _session(self) -> Any:
        """A transaction left alone ends, nobody waits for ever, what is committed is on the disk."""
        return sql.SQL(
            "SET search_path TO {schema}; SET default_transaction_isolation TO 'read committed';"
            "SET statement_timeout TO {limit}; SET idle_in_transaction_session_timeout TO {limit};"
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') IN ('off', 'local')"
        ).format(
            schema=sql.Identifier(self.address.schema), limit=sql.Literal(math.ceil(self.timeout * 1000))
        )

    def _prepare(self, connection: Any) -> None:
        if self._prepared:
            return
        server = connection.execute("SELECT version()").fetchone()[0]
        self.is_distributed = any(each in server for each in _DISTRIBUTED)
        self.notifies = self.notifies and not self.is_distributed
        found = self._found_version(connection)
        if found is None:
            if not self.create:
                raise NotFound(f"there is no store at {self.address.place} yet", store=self.address.place)
            self._create(connection)
            found = self._found_version(connection)
        if found != str(statements.SCHEMA_VERSION):
            raise StoreIncompatible(
                f"the store {self.address.place} has the schema version {found}; "
                f"this version of Holdfast knows {statements.SCHEMA_VERSION}",
                store=self.address.place,
                found=found,
                known=statements.SCHEMA_VERSION,
            )
        self._prepared = True

    def _found_version(self, connection: Any) -> str | None:
        try:
            row = connection.execute(statements.FOUND_VERSION).fetchone()
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            return None
        return None if row is None else str(row[0])

    def _create(self, connection: Any) -> None:
        """Make the tables. If others do so at the same moment, some servers raise: again then."""
        refused = None
        for attempt in range(10):
            try:
                refused = self._create_schema(connection)
                for statement in statements.CREATE.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
                connection.execute(statements.NOTE_VERSION, [str(statements.SCHEMA_VERSION)])
                return
            except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
                raise StoreAccessRefused(
                    self.address.place,
                    f"its tables cannot be made: {one_line(refused or error)}",
                    hint="Let the owner of the database run 'holdfast init', grant CREATE on it, or make the "
                    "schema for this user: CREATE SCHEMA name AUTHORIZATION user.",
                ) from error
            except psycopg.Error:
                if connection.closed or attempt == 9:
                    raise
                time.sleep(CHANCE.random() * 0.1)

    def _create_schema(self, connection: Any) -> Any:
        """Make the schema; why not, if that is not allowed: somebody else may have made it for this user."""
        name = sql.Identifier(self.address.schema)
        try:
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        except psycopg.errors.InsufficientPrivilege as refused:
            return refused
        return None

    def failure(self, error: Any) -> StoreUnavailable:
        """An error that trying again did not help against, or would not."""
        place, reason = self.address.place, one_line(error)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StoreAccessRefused(place, reason)
        if is_away(error):
            return _connection_failure(error)(place, reason)
        return StoreUnavailable(place, reason, hint="Look at the server's own message, and at its log.")

    def cannot_notify(self, error: Any) -> bool:
        """Whether a statement was refused for its notification. If so, there will be no more of them."""
        refused = was_rejected(error) and "notify" in str(error).lower()
        if not (self.notifies and (refused or isinstance(error, psycopg.errors.FeatureNotSupported))):
            return False
        self.notifies = False
        return True

    def close(self) -> None:
        """Close what is idle."""
        for kept in (self._idle, self._listeners):
            _close_all(kept, self._pid)


def _close_all(idle: list[Any], pid: int) -> None:
    """Close connections; not those of a parent, to whom the server would hang up."""
    while idle and pid == os.getpid():
        with contextlib.suppress(IndexError):
            idle.pop().close()


def is_conflict(error: Any) -> bool:
    """Whether somebody else was faster: a version that moved, a row that appeared, a deadlock, a restart."""
    return isinstance(
        error,
        psycopg.errors.SerializationFailure
        | psycopg.errors.DeadlockDetected
        | psycopg.errors.NotNullViolation
        | psycopg.errors.UniqueViolation
        | psycopg.errors.LockNotAvailable,
    )


def was_rejected(error: Any) -> bool:
    """Whether the server understood a statement and does not carry it out: missing rights, or something that
    it does not know or take. Nothing has happened then. Of other errors not every server promises that."""
    return (error.sqlstate or "")[:2] in ("0A", "22", "23", "42", "54")


def is_away(error: Any) -> bool:
    """Whether the server does not answer, or is about to stop doing so."""
    state = error.sqlstate or ""
    return (
        isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        and not is_conflict(error)
        and (not state or state[:2] in ("08", "53", "57", "58"))
    )


def is_final(error: Any) -> bool:
    """Whether a connection was refused for good: a wrong password, no such database, no trust."""
    message = str(error)
    if error.sqlstate or any(each in message for each in _TRANSIENT):
        return False
    return "FATAL:" in message or _connection_failure(error) is not StoreUnavailable


def _connection_failure(error: Any) -> type[StoreUnavailable]:
    """What kind of failure it is that no connection could be made."""
    message = str(error)
    if any(each in message for each in _UNTRUSTED):
        return StoreUntrusted
    if any(each in message for each in _REFUSED) or re.search(r'role ".*" does not exist', message):
        return StoreAccessRefused
    if re.search(r'database ".*" does not exist', message):
        return StoreMissing
    return StoreUnavailable


def one_line(error: object) -> str:
    return " ".join(str(error).split())
