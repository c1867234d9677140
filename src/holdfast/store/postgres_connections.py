"""Connections to PostgreSQL: opened when needed, kept for the next use, and every wait has a time limit.

Not `psycopg_pool`: its connections do not survive a fork, and its threads hide why a connection was refused
(see docs/decisions/0010).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from holdfast.errors import (
    SettingInvalid,
    StoreAccessRefused,
    StoreFull,
    StoreMissing,
    StoreUnavailable,
    StoreUntrusted,
)
from holdfast.fs import calls
from holdfast.locks.retry import CHANCE
from holdfast.store import postgres_sql as statements
from holdfast.store.addresses import has_secrets, is_local, joined, parts_of, query_of, without_secrets
from holdfast.store.model import ServerVersion
from holdfast.store.postgres_requests import DEFAULT_SCHEMA, PREPARE_AFTER, Connection
from holdfast.store.served import TIMEOUT, TimeLimit, require_version

Answer = TypeVar("Answer")

MOST_IDLE = 4
SPARE = 2.0  # seconds that a connection may lie idle while another is used; then it is closed
_DISTRIBUTED = ("CockroachDB", "-YB-")
"""Substrings of `version()` of distributed databases. Each node has its own clock, and few support notifications."""

# English messages of libpq and the server for refused connections, which have no error code.
_TRANSIENT = ("starting up", "shutting down", "recovery", "too many", "remaining connection slots")
_UNTRUSTED = (
    *("certificate verify failed", "does not support SSL", "server certificate for", "root certificate file"),
    *("could not read certificate", "certificate file", "private key file", "tlsv1", "tlsv13", "sslv3 alert"),
    *("weak sslmode", "invalid sslmode value"),
)
_REFUSED = (
    *("authentication failed", "no password supplied", "no pg_hba.conf entry", "pg_hba.conf rejects"),
    *("not permitted to log in", "permission denied", "valid client certificate"),
)


_HINTS = {
    "53200": "The server is out of memory: read its log.",
    "53300": "The server has no free connection: raise its max_connections, or use fewer processes.",
}
_LOCKED = "Another client holds locks for longer than Holdfast does: look for open transactions in pg_stat_activity."


class PostgresAddress(NamedTuple):
    """The parameters of a connection, the schema, and the address without secrets, for display."""

    parameters: dict[str, Any]
    schema: str
    display: str

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse `postgresql://…` with libpq's parameters and `schema`. libpq looks up everything else as usual
        (service file, `.pgpass`, `PG…` in the environment)."""
        parts = parts_of(url)
        query = query_of(parts)
        schema = dict(query).get("schema", DEFAULT_SCHEMA)
        rest = joined(parts, [each for each in query if each[0] != "schema"])
        try:
            parameters = conninfo_to_dict(rest)
        except psycopg.ProgrammingError as error:
            reason = "libpq cannot read it" if has_secrets(url) else one_line(error)  # which may quote them
            raise SettingInvalid("store", without_secrets(url), f"a PostgreSQL address: {reason}") from None
        except ValueError:
            raise SettingInvalid("store", "postgresql://…", "a PostgreSQL address in UTF-8") from None
        if not schema or len(schema) > 63 or not schema.replace("_", "").isalnum() or not schema.isascii():
            raise SettingInvalid("schema", schema, "letters, digits and '_', at most 63 of them")
        return cls({**_encryption(parameters), **parameters}, schema, without_secrets(url))


def _encryption(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The default TLS parameters: another machine must prove its name with a certificate, unless the address, the
    environment or the service file says otherwise."""
    defaults = {each.keyword.decode(): each for each in psycopg.pq.Conninfo.get_defaults()}
    known = {name: _text(each.val) for name, each in defaults.items() if each.val and each.val != each.compiled}
    known |= parameters
    hosts = known.get("hostaddr") or known.get("host") or ""
    if "sslmode" in known or all(map(is_local, str(hosts).split(","))):
        return {}
    own = os.path.expanduser("~/.postgresql/root.crt")  # libpq's default
    return {"sslmode": "verify-full"} | (
        {} if "sslrootcert" in known or calls.exists(own) else {"sslrootcert": "system"}
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


class Connections:
    """The connections of one process to one store."""

    def __init__(self, address: PostgresAddress, *, timeout: float = TIMEOUT, create: bool = True) -> None:
        self.address = address
        self.create = create
        self.timeout = timeout
        self.notifies = True  # whether commits notify watchers; otherwise, watchers poll
        self.is_pooled = False  # whether a pooler shares the server's sessions among clients
        self.is_distributed = False
        self.numbers = False  # whether the server numbers its transactions
        self.server: ServerVersion | None = None
        self.deadline = TimeLimit()
        self._pid = os.getpid()
        self._idle: list[Any] = []
        self._listeners: list[Any] = []
        for kept in (self._idle, self._listeners):
            weakref.finalize(self, _close_all, kept, self._pid)
        self._checked = False
        self._checking = threading.Lock()

    def run(self, work: Callable[[Any], Answer], *, patience: float | None = None) -> Answer:
        """Do idempotent work on any connection, with the retries of `persist`."""

        def borrow_and_work() -> Answer:
            with self.borrowed() as connection:
                return work(connection)

        return self.persist(borrow_and_work, patience=patience)

    def persist(self, work: Callable[[], Answer], *, patience: float | None = None) -> Answer:
        """Do idempotent work; repeat it for up to `patience` seconds after conflicts or if the server is away."""
        with self.deadline.within(self.timeout if patience is None else patience) as deadline:
            while True:
                try:
                    return work()
                except psycopg.Error as error:
                    left = deadline - time.monotonic()
                    retryable = is_conflict(error) or (is_away(error) and not _is_refused(error))
                    if not retryable or left <= 0:
                        raise self.failure(error) from error
                time.sleep(min(left, 0.02 + CHANCE.random() * 0.1))

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Any]:
        """A connection for the duration of the block. If it breaks, all idle connections are closed too."""
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
        if self._pid != os.getpid():  # after a fork: only the parent may close its connections
            self._pid, self._idle = os.getpid(), []
            weakref.finalize(self, _close_all, self._idle, self._pid)
        while self._idle:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
        return self.connect()

    def _give_back(self, connection: Any) -> None:
        if connection.closed:
            return
        usable = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if not usable or len(self._idle) >= MOST_IDLE:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)  # the last one is taken first, so the first one is spare
        with contextlib.suppress(IndexError):
            if self._idle[0].idle_since < connection.idle_since - SPARE:
                self._idle.pop(0).close()

    @property
    def listens(self) -> bool:
        """Whether watchers are notified; otherwise, they poll."""
        return self.notifies and not self.is_pooled

    def take_listener(self) -> Any:
        """A listener that an earlier watch left behind, or None."""
        while self._listeners:
            with contextlib.suppress(IndexError):
                listener = self._listeners.pop()
                if listener.pid == os.getpid():
                    return listener
        return None

    def keep_listener(self, listener: Any) -> None:
        """Keep a listener for the next watch; close it if one is already kept or its connection is dead."""
        if self._listeners or listener.connection.closed or not listener.pause():
            listener.close()
        else:
            self._listeners.append(listener)

    def close(self) -> None:
        """Close all idle connections and listeners."""
        for kept in (self._idle, self._listeners):
            _close_all(kept, self._pid)

    def connect(self) -> Any:
        """A new connection; the first one also finds or creates the store's tables."""
        parameters = {
            "connect_timeout": max(2, math.ceil(self.deadline.left(self.timeout))),
            "application_name": "holdfast",
            "target_session_attrs": "read-write",  # a standby may lag behind
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": math.ceil(self.timeout * 1000),
            **self.address.parameters,
        }
        connection = Connection.connect(autocommit=True, prepare_threshold=PREPARE_AFTER, **parameters)
        try:
            connection.deadline, connection.answer_within = self.deadline, self.timeout
            connection.schema = self.address.schema
            self._prepare(connection)
            if not self._checked:
                with self._checking:
                    self._check(connection)
            connection.prepares = not (self.is_pooled or self.is_distributed)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: Any) -> None:
        """Set up the session, unless a pooler shares it with other clients. A shared session gets no settings, prepared
        statements or notifications, so the server's own settings must make commits durable."""
        direct, limits = self._is_direct(connection.info), self._limits(connection.info)
        answer = connection.execute(self._session(direct=direct, limits=limits))
        self.is_pooled = answer.rowcount == 0
        if self.is_pooled:
            connection.prepare_threshold = None
            while answer.nextset():
                pass
            (level,) = answer.fetchone()
            if level in ("off", "local"):
                raise StoreAccessRefused(
                    self.address.display,
                    f"a pooler shares its sessions, and commits are not on disk: synchronous_commit is {level}",
                    hint="Connect without the pooler, or set synchronous_commit to 'on' for the database.",
                )

    def _session(self, *, direct: Any, limits: Mapping[str, int]) -> Any:
        """The statements that set the session's time limits, its isolation level and synchronous commits."""
        settings = {"default_transaction_isolation": "read committed", **limits}
        return sql.SQL(
            "SELECT set_config(w.name, w.value, false) FROM (VALUES {settings}) AS w (name, value) WHERE {direct};"
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') IN ('off', 'local') AND {direct};"
            "SELECT current_setting('synchronous_commit')"
        ).format(
            settings=sql.SQL(", ").join(
                sql.SQL("({}, {})").format(name, sql.Literal(str(value))) for name, value in settings.items()
            ),
            direct=direct,
        )

    def _is_direct(self, server: Any) -> Any:
        """The SQL condition for a direct connection: the server knows the backend pid. A pooler makes one up."""
        if server.parameter_status("crdb_version"):
            return sql.SQL("true")
        return sql.SQL("EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = {})").format(sql.Literal(server.backend_pid))

    def _limits(self, server: Any) -> dict[str, int]:
        """Session settings with which the server ends statements that wait too long, and the transactions and
        connections of clients that are gone."""
        limit = math.ceil(self.timeout * 1000)
        limits = {"statement_timeout": limit, "lock_timeout": math.ceil(limit / 2)}
        limits |= {"idle_in_transaction_session_timeout": limit}
        if not server.parameter_status("crdb_version"):
            limits |= {"tcp_keepalives_idle": 5, "tcp_keepalives_interval": 2, "tcp_keepalives_count": 3}
            limits |= {"tcp_user_timeout": limit} if server.server_version >= 120000 else {}
            limits |= {"transaction_timeout": limit + 1000} if server.server_version >= 170000 else {}
        return limits

    def _check(self, connection: Any) -> None:
        if self._checked:
            return
        answer = connection.execute("SELECT version()").fetchone()[0]
        self.server = ServerVersion(*answer.split()[:2])
        self.is_distributed = any(each in answer for each in _DISTRIBUTED)
        self.notifies = self.notifies and not self.is_distributed
        found = _schema_version(connection)
        if found is None and self.create:
            self._create(connection)
            found = _schema_version(connection)
        if found == "1" and self.create:
            self._upgrade(connection)
            found = _schema_version(connection)
        oldest = statements.FIRST_VERSION if self.create else 1
        require_version(self.address.display, found, statements.SCHEMA_VERSION, oldest=oldest)
        self.numbers = not self.is_distributed and connection.info.server_version >= 130000 and found != "1"
        self._checked = True

    def _upgrade(self, connection: Any) -> None:
        """Upgrade the tables, after the commits in progress. If two clients try at once, one of them upgrades."""
        try:
            connection.ask_at_once(";".join(statements.UPGRADE))
        except psycopg.errors.DuplicateColumn:
            pass  # another client was faster
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreAccessRefused(
                self.address.display,
                f"its tables cannot be upgraded: {one_line(error)}",
                hint="Let the owner of the tables run any command of this version of Holdfast once.",
            ) from error

    def _create(self, connection: Any) -> None:
        """Create the tables. If other clients do so at the same time, some servers raise: try again."""
        schema = sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self.address.schema))
        refused = None
        for attempt in range(10):
            try:
                try:
                    connection.execute(schema)
                except psycopg.errors.InsufficientPrivilege as error:  # the owner may have created it for this user
                    refused = error
                for statement in statements.CREATE.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
                connection.ask_at_once(statements.NOTE_VERSION, [str(statements.FIRST_VERSION)])
                return
            except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
                raise StoreAccessRefused(
                    self.address.display,
                    f"its tables cannot be created: {one_line(refused or error)}",
                    hint="Let the owner of the database run 'holdfast init', grant CREATE on it, or create "
                    "the schema for this user: CREATE SCHEMA name AUTHORIZATION user.",
                ) from error
            except psycopg.Error:
                if connection.closed or attempt == 9:
                    raise
                time.sleep(CHANCE.random() * 0.1)

    def failure(self, error: Any) -> StoreUnavailable:
        """The failure to raise for an error that is not retried."""
        address, reason = self.address.display, one_line(error)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return StoreAccessRefused(address, reason)
        if isinstance(error, psycopg.errors.DiskFull):
            return StoreFull(address, reason)
        if is_away(error):
            return _connection_failure(error)(address, reason, hint=_HINTS.get(error.sqlstate or ""))
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return StoreUnavailable(address, reason, hint=_LOCKED)
        return StoreUnavailable(address, reason, hint="Read the server's message and its log.")

    def cannot_notify(self, error: Any) -> bool:
        """Whether a statement was refused because it notifies. If so, later statements do not notify."""
        refused = was_rejected(error) and "notify" in str(error).lower()
        if not (self.notifies and (refused or isinstance(error, psycopg.errors.FeatureNotSupported))):
            return False
        self.notifies = False
        return True


def _close_all(idle: list[Any], pid: int) -> None:
    """Close connections, but not those inherited from a parent process: the server would disconnect the parent."""
    while idle and pid == os.getpid():
        with contextlib.suppress(IndexError):
            idle.pop().close()


def _schema_version(connection: Any) -> str | None:
    try:
        row = connection.execute(statements.FOUND_VERSION).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    return None if row is None else str(row[0])


def is_conflict(error: Any) -> bool:
    """Whether an error is a conflict with another client: a changed version, a new row, a lock, a deadlock."""
    return isinstance(
        error,
        psycopg.errors.SerializationFailure
        | psycopg.errors.DeadlockDetected
        | psycopg.errors.NotNullViolation
        | psycopg.errors.UniqueViolation
        | psycopg.errors.LockNotAvailable,
    )


def has_lost_its_turn(error: Any) -> bool:
    """Whether the server ended an open transaction and its connection by a time limit: nothing was committed."""
    return error.sqlstate in ("25P03", "25P04")


def was_rejected(error: Any) -> bool:
    """Whether the server understood a statement and refused it (missing permission, unknown feature), so that
    nothing has happened. For other errors, not every server promises that."""
    return (error.sqlstate or "")[:2] in ("0A", "22", "23", "42", "54")


def is_away(error: Any) -> bool:
    """Whether the server does not answer, or is about to stop."""
    state = error.sqlstate or ""
    return (
        isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        and not is_conflict(error)
        and (not state or state[:2] in ("08", "53", "57", "58"))
    )


def _is_refused(error: Any) -> bool:
    """Whether a connection was refused for good: wrong password, missing database, untrusted certificate."""
    message = str(error)
    if error.sqlstate or any(each in message for each in _TRANSIENT):
        return False
    return "FATAL:" in message or _connection_failure(error) is not StoreUnavailable


def _connection_failure(error: Any) -> type[StoreUnavailable]:
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
