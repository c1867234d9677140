"""The store on PostgreSQL, and on the databases that speak its protocol.

A commit is one statement that locks what it rests on, compares the versions, writes, and notes its id
(`postgres_sql.COMMIT`). Commit point: the server's. Reading is one statement too, so it sees one moment; and
since a commit keeps its locks until it is visible, these moments are in the order of the commits. The time is
that of the server. See `served` for the protocol around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg

from holdfast.errors import StoreUnavailable
from holdfast.locks.retry import CHANCE
from holdfast.store import postgres_sql as statements
from holdfast.store.layout import Layout
from holdfast.store.model import Key, Watched
from holdfast.store.postgres_connections import (
    TIMEOUT,
    Connections,
    PostgresAddress,
    is_conflict,
    one_line,
    was_rejected,
)
from holdfast.store.postgres_watch import PostgresWatch, channel_of, message_of
from holdfast.store.served import (
    PATIENCE,
    AnswerLost,
    CommitPlan,
    Fate,
    Fetched,
    IdTaken,
    Named,
    ServedStore,
    StoredValue,
)

_FORGET_EVERY = 1000
CLOCKS_APART = 0.5
"""So far the clocks of the nodes of a distributed database may be apart before it stops working by itself."""


class PostgresStore(ServedStore):
    """Documents and streams in one schema of a PostgreSQL database: `postgresql://host/database?schema=name`."""

    def __init__(
        self,
        url: str,
        *,
        layout: Layout | None = None,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        create: bool = True,
    ) -> None:
        """`create` makes the tables if they are not there; without it, that is `NotFound`."""
        engine = PostgresEngine(url, timeout=timeout, create=create)
        super().__init__(engine, layout=layout, patience=patience)


class PostgresAttempt:
    """One try, on one connection."""

    def __init__(self, engine: PostgresEngine, connection: Any, fetched: Fetched) -> None:
        self.fetched = fetched
        self._engine = engine
        self._connection = connection

    def commit(self, plan: CommitPlan) -> bool:
        try:
            return self._engine.commit(self._connection, plan)
        except psycopg.errors.UniqueViolation as error:
            if error.diag.table_name == "commits":
                raise IdTaken from error
            return False
        except psycopg.Error as error:
            if is_conflict(error):
                return False
            if self._engine.connections.cannot_notify(error):
                return False  # start over, without
            if was_rejected(error):
                raise self._engine.connections.failure(error) from error
            self._connection.close()
            raise AnswerLost(one_line(error)) from error


class PostgresEngine:
    """How a PostgreSQL server is asked."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT, create: bool = True) -> None:
        address = PostgresAddress.parse(url)
        self.place = address.place
        self.connections = Connections(address, timeout=timeout, create=create)
        self._channel = channel_of(address.schema)

    @property
    def skew(self) -> float:
        return CLOCKS_APART if self.connections.is_distributed else 0.0

    def fetch(self, named: Sequence[Named]) -> Fetched:
        return self.connections.run(lambda connection: _fetched(named, _ask_for(connection, named)))

    @contextlib.contextmanager
    def attempt(self, named: Sequence[Named], *, in_turn: bool) -> Iterator[PostgresAttempt]:
        with contextlib.ExitStack() as stack:
            connection, fetched = self.connections.persist(lambda: self._begin(stack, named, in_turn=in_turn))
            yield PostgresAttempt(self, connection, fetched)

    def _begin(
        self, stack: contextlib.ExitStack, named: Sequence[Named], *, in_turn: bool
    ) -> tuple[Any, Fetched]:
        with contextlib.ExitStack() as inner:
            connection = inner.enter_context(self.connections.borrowed())
            inner.callback(_roll_back, connection)
            if not in_turn:
                found = _ask_for(connection, named)
            else:
                # Lock first, look then: a statement sees what there was when it began, not later.
                with connection.pipeline():
                    connection.execute("BEGIN")
                    connection.execute(statements.LOCK, [_names(named)])
                    found = _ask_for(connection, named)
            fetched = _fetched(named, found)
            stack.push(inner.pop_all())
        return connection, fetched

    def commit(self, connection: Any, plan: CommitPlan) -> bool:
        """Send the commit; whether what it rests on was still so. If not, there is nothing to take back."""
        single = _is_single(plan)
        parameters = _single(plan) if single else _parameters(plan)
        if self.connections.notifies:
            parameters |= {"channel": self._channel, "changed": message_of(plan.id, plan.changed)}
            statement = statements.COMMIT_ONE_AND_NOTIFY if single else statements.COMMIT_AND_NOTIFY
        else:
            statement = statements.COMMIT_ONE if single else statements.COMMIT
        if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            told = connection.ask(statement, parameters)
        else:
            with connection.pipeline():
                told = connection.ask(statement, parameters)
                connection.execute("COMMIT")
        row = told.fetchone()
        made = row is not None and bool(row[0])
        if made and CHANCE.randrange(_FORGET_EVERY) == 0:
            with contextlib.suppress(StoreUnavailable):
                self.connections.run(lambda each: each.execute(statements.FORGET))
        return made

    def fate_of(self, commit_id: str) -> Fate:
        def ask(connection: Any) -> Fate:
            taken_now = connection.execute(statements.RULE_OUT, [commit_id]).rowcount == 1
            if taken_now:
                return Fate.RULED_OUT_NOW
            (made,) = connection.execute(statements.WAS_MADE, [commit_id]).fetchone()
            return Fate.MADE if made else Fate.RULED_OUT

        return self.connections.run(ask, patience=3 * self.connections.timeout)

    def page(self, family: str, after: str, limit: int) -> list[tuple[str, StoredValue]]:
        start, end = f"{family}/".encode(), f"{family}0".encode()  # '0' follows '/'
        bounds = [start + after.encode(), end, limit]
        rows = self._rows(statements.PAGE, bounds)
        return [
            (name[len(start) :].decode(), StoredValue(version, content)) for name, version, content in rows
        ]

    def page_of_stream(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        if limit <= 0:
            return []
        return self._rows(statements.PAGE_OF_STREAM, [stream.encode(), after, limit])

    def _rows(self, statement: str, parameters: Sequence[Any]) -> list[Any]:
        return self.connections.run(lambda each: each.execute(statement, parameters, binary=True).fetchall())

    def watch(self, what: Watched) -> PostgresWatch:
        return PostgresWatch(self.connections, self._channel, what)

    def now(self) -> float:
        found = self.connections.run(lambda connection: connection.execute(statements.NOW).fetchone())
        return float(found[0])

    def close(self) -> None:
        self.connections.close()


def _names(named: Sequence[Named]) -> str:
    return _array(each.name.encode() for each in named)


def _ask_for(connection: Any, named: Sequence[Named]) -> Any:
    if len(named) == 1 and isinstance(named[0], Key):
        return connection.ask(statements.FETCH_ONE, [named[0].name.encode()])
    return connection.ask(statements.FETCH, [_names(named)])


def _fetched(named: Sequence[Named], answer: Any) -> Fetched:
    if len(named) == 1 and isinstance(named[0], Key):
        now, version, content = answer.fetchone()
        return Fetched({} if version is None else {named[0].name: StoredValue(version, content)}, now)
    rows = answer.fetchall()
    found = {
        name.decode(): StoredValue(version, content, position or 0)
        for _, name, version, content, position in rows
        if name is not None
    }
    return Fetched(found, rows[-1][0])


def _roll_back(connection: Any) -> None:
    """Let go of what was locked, if the attempt has not come to its end."""
    if connection.closed or connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        return
    with contextlib.suppress(psycopg.Error):
        connection.execute("ROLLBACK")


def _is_single(plan: CommitPlan) -> bool:
    """Whether a plan changes the one document that it names, and that has a row."""
    (first, *more) = plan.named
    return plan.puts.get(first.name) is not None and not more and first.name in plan.fetched.found


def _single(plan: CommitPlan) -> dict[str, Any]:
    ((name, content),) = plan.puts.items()
    version = plan.fetched.of(name).version
    return {"id": plan.id, "name": name.encode(), "version": version, "content": content}


def _parameters(plan: CommitPlan) -> dict[str, Any]:
    """The plan as arrays, written as text: a statement stays prepared only if its parameters are always of
    the same types, and an empty list has none.

    What is only read is not written, unless it had no row: then it gets one without content or version, for
    an absence that was relied on must not end unnoticed.
    """
    there = [each.name for each in plan.named if each.name in plan.fetched.found]
    absent = [each.name for each in plan.named if each.name not in plan.fetched.found]
    ends = {each.stream: each.position for each in plan.additions}
    changed = [*plan.puts, *ends]
    put = list(dict.fromkeys([*changed, *absent]))
    return {
        "id": plan.id,
        "count": str(len(there)),
        "names": _array(name.encode() for name in there),
        "versions": _array(plan.fetched.of(name).version for name in there),
        "put": _array(name.encode() for name in put),
        "new_versions": _array([plan.id] * len(changed) + [""] * (len(put) - len(changed))),
        "contents": _array(plan.puts.get(name) for name in put),
        "positions": _array(ends.get(name) for name in put),
        "streams": _array(each.stream.encode() for each in plan.additions),
        "places": _array(each.position for each in plan.additions),
        "records": _array(each.content for each in plan.additions),
    }


def _array(values: Iterable[bytes | str | int | None]) -> str:
    """Values as the server reads an array. Texts are names and ids, which need no more than quotes."""
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: bytes | str | int | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return f'"{value}"'
