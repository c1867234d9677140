"""The store on PostgreSQL and databases that speak its protocol: `postgresql://host/database?schema=name`.

A commit is one statement that locks its dependencies, compares versions, writes, and records its id
(`postgres_sql.COMMIT`). Commit point: the server's commit. A read is one statement too, so it is as of one instant.
Since a commit keeps its locks until it is visible, these instants are in commit order. The clock is the server's. See
`served` for the protocol around these statements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import psycopg

from holdfast.errors import StoreMoved
from holdfast.locks.retry import CHANCE
from holdfast.store import postgres_sql as statements
from holdfast.store import served
from holdfast.store.model import Key, ServerVersion, Watched
from holdfast.store.postgres_connections import (
    Connections,
    PostgresAddress,
    has_lost_its_turn,
    is_conflict,
    one_line,
    was_rejected,
)
from holdfast.store.postgres_watch import PostgresWatch, channel_of, message_of
from holdfast.store.served import (
    Attempt,
    CommitPlan,
    Fate,
    Fetched,
    LooseRecord,
    Named,
    Picked,
    ServedChanges,
    ServedStore,
    StoredValue,
)

CLOCKS_APART = 0.5  # how far the clocks of a distributed database's nodes may differ before it shuts itself down
TURN = 500  # milliseconds to wait for a turn, and to use it: a client that stops delays others by at most this
_FORGET_EVERY = 1000


class PostgresStore(ServedStore):
    """Documents and streams in one schema of a PostgreSQL database."""

    def __init__(
        self, url: str, *, timeout: float = served.TIMEOUT, patience: float = served.PATIENCE, create: bool = True
    ) -> None:
        """`create` creates missing tables; without it, a missing store raises `NotFound` at its first use."""
        super().__init__(PostgresEngine(url, timeout=timeout, create=create), patience=patience)


class PostgresEngine:
    """Requests to a PostgreSQL server."""

    most_sealed = 500

    def __init__(self, url: str, *, timeout: float = served.TIMEOUT, create: bool = True) -> None:
        address = PostgresAddress.parse(url)
        self.address = address.display
        self.connections = Connections(address, timeout=timeout, create=create)
        self._channel = channel_of(address.schema)
        self._has_index = False
        self._has_queue: bool | None = None  # None: not known yet

    @property
    def skew(self) -> float:
        return CLOCKS_APART if self.connections.is_distributed else 0.0

    @property
    def version(self) -> ServerVersion | None:
        return self.connections.server

    def fetch(self, named: Sequence[Named]) -> Fetched:
        return self.connections.run(lambda connection: _fetched(named, _ask_for(connection, named)))

    @contextlib.contextmanager
    def attempt(self, named: Sequence[Named], *, in_turn: bool) -> Iterator[Attempt]:
        with contextlib.ExitStack() as stack:
            yield self.connections.persist(lambda: self._begin(stack, named, in_turn=in_turn))

    def _begin(self, stack: contextlib.ExitStack, named: Sequence[Named], *, in_turn: bool) -> Attempt:
        with contextlib.ExitStack() as inner:
            connection = inner.enter_context(self.connections.borrowed())
            inner.callback(_roll_back, connection)
            found = _ask_in_turn(connection, named) if in_turn else _ask_for(connection, named)
            fetched = _fetched(named, found)
            stack.push(inner.pop_all())
        return Attempt(fetched, partial(self._commit_on, connection))

    @contextlib.contextmanager
    def pick(self, assignee: str, skew: float) -> Iterator[Picked | None]:
        """Lock the issue. This lock outlives the request, like that of a turn, so the server limits its time; others
        who pick skip the issue meanwhile."""
        with contextlib.ExitStack() as stack:
            yield self.connections.persist(lambda: self._pick(stack, assignee, skew))

    def _pick(self, stack: contextlib.ExitStack, assignee: str, skew: float) -> Picked | None:
        with contextlib.ExitStack() as inner:
            connection = inner.enter_context(self.connections.borrowed())
            if not self._find_queue(connection):
                return None
            inner.callback(_end, connection)
            limit = f"SET LOCAL idle_in_transaction_session_timeout TO {TURN}"
            own = served.field_start("assignee").encode() + served.as_assigned(assignee) + b'"'
            row = connection.write(statements.PICK, {"skew": skew, "own": own}, begin=("BEGIN", limit)).fetchone()
            if row is None or not row[-1]:
                return None
            now, name, version, content, claim_version, claim, _ = row
            member = name.decode().removeprefix(served.ISSUES)
            found = {name.decode(): StoredValue(version, content)}
            if claim_version is not None:
                found[served.CLAIMS + member] = StoredValue(claim_version, claim)
            stack.push(inner.pop_all())
        return Picked(
            member, Attempt(Fetched(found, now), partial(self._commit_on, connection)), partial(_fetch_more, connection)
        )

    def _find_queue(self, connection: Any) -> bool:
        """Whether the server has the indexes of the queue; the first client that may do so creates them."""
        if self._has_queue is None and not self.connections.numbers:
            self._has_queue = False
        if self._has_queue is None:
            try:
                if connection.execute(statements.FOUND_QUEUE).fetchone() is None:
                    connection.ask_at_once("; ".join(statements.CREATE_QUEUE))
                self._has_queue = True
            except psycopg.Error as error:
                if connection.closed or is_conflict(error):
                    return False  # a later claim tries again
                self._has_queue = False
        return self._has_queue

    def _commit_on(self, connection: Any, plan: CommitPlan) -> bool:
        made = self._try_commit(connection, plan)
        if not made and not connection.closed:
            self._refuse_if_moved(connection)
        return made

    def _refuse_if_moved(self, connection: Any) -> None:
        _roll_back(connection)
        with contextlib.suppress(psycopg.Error):  # the next attempt finds out
            if (target := _moved_to(connection)) is not None:
                raise StoreMoved(self.address, target)

    def _try_commit(self, connection: Any, plan: CommitPlan) -> bool:
        try:
            return self.commit(connection, plan)
        except psycopg.errors.UniqueViolation as error:
            if error.diag.table_name == "commits":
                raise served.IdTaken from error
            return False
        except psycopg.errors.InvalidSqlStatementName:
            return False  # in a turn, of which nothing is left
        except psycopg.errors.LockNotAvailable as error:
            raise served.WaitedTooLong(self.connections.failure(error)) from error
        except psycopg.Error as error:
            if is_conflict(error) or has_lost_its_turn(error) or self.connections.cannot_notify(error):
                return False  # start over, without notifying if that was refused
            if was_rejected(error):
                raise self.connections.failure(error) from error
            connection.close()
            raise served.AnswerLost(one_line(error)) from error

    def commit(self, connection: Any, plan: CommitPlan) -> bool:
        """Send the commit; False, with nothing written, if something it depends on has changed."""
        single = _is_single(plan)
        parameters = _single(plan) if single else _parameters(plan)
        if plan.sealed:
            parameters |= {
                "loose": _array(_loose(each.stream) for each in plan.sealed),
                "loose_places": _array(each.place for each in plan.sealed),
            }
            statement = statements.SEAL
        elif self.connections.notifies:
            parameters |= {"channel": self._channel, "changed": message_of(plan.id, plan.changed)}
            statement = statements.COMMIT_ONE_AND_NOTIFY if single else statements.COMMIT_AND_NOTIFY
        else:
            statement = statements.COMMIT_ONE if single else statements.COMMIT
        if not self.connections.numbers:
            statement = statements.unnumbered(statement)
        is_turn = connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        answer = connection.write(statement, parameters, then=("COMMIT",) if is_turn else ())
        row = answer.fetchone()
        made = row is not None and bool(row[0])
        if made and CHANCE.randrange(_FORGET_EVERY) == 0:
            self._forget(connection)
        return made

    def _forget(self, connection: Any) -> None:
        """Remove notes of old commits, oldest first. A failure is harmless: a later commit removes more."""
        with contextlib.suppress(psycopg.Error):  # only the owner of the tables may create an index
            if not self._has_index and connection.execute(statements.FOUND_INDEX).fetchone() is None:
                connection.execute(statements.CREATE_INDEX)
                connection.execute(statements.NOTE_INDEX)
        self._has_index = True  # or it cannot be created
        with contextlib.suppress(psycopg.Error):
            connection.ask_at_once(statements.FORGET)

    def fate_of(self, commit_id: str) -> Fate:
        def ask(connection: Any) -> Fate:
            if connection.ask_at_once(statements.RULE_OUT, [commit_id]).rowcount == 1:
                return Fate.RULED_OUT_NOW
            (made,) = connection.execute(statements.WAS_MADE, [commit_id]).fetchone()
            return Fate.MADE if made else Fate.RULED_OUT

        return self.connections.run(ask, patience=3 * self.connections.timeout)

    def bury(self, stream: str, position: int, tombstone: bytes) -> None:
        self._write(statements.BURY, [tombstone, stream.encode(), position])

    def drop_records(self, stream: str, first: int, last: int) -> None:
        self._write(statements.DROP_RECORDS, [stream.encode(), first, last])

    def _write(self, statement: str, parameters: Sequence[Any]) -> None:
        self.connections.run(lambda connection: connection.ask_at_once(statement, parameters))

    def loose_records(self, stream: str, limit: int) -> list[LooseRecord]:
        rows = self._rows(statements.PAGE_OF_STREAM, [_loose(stream), -1, limit])
        return [LooseRecord(stream, place, content) for place, content in rows]

    def set_moved(self, target: str | None) -> None:
        def set_it(connection: Any) -> None:
            wait = "" if self.connections.is_distributed else f"{statements.WAIT_FOR_COMMITS}; "
            change = statements.UNSET_MOVED if target is None else statements.SET_MOVED
            connection.ask_at_once(wait + change, None if target is None else [target])

        self.connections.run(set_it)

    def moved_to(self) -> str | None:
        return self.connections.run(_moved_to)

    def page(self, family: str, after: str, limit: int) -> list[tuple[str, StoredValue]]:
        start, end = f"{family}/".encode(), f"{family}0".encode()  # '0' follows '/'
        rows = self._rows(statements.PAGE, [start + after.encode(), end, limit])
        return [(name[len(start) :].decode(), StoredValue(version, content)) for name, version, content in rows]

    def cursor(self) -> bytes:
        def ask(connection: Any) -> bytes:  # connecting finds out whether the server numbers transactions
            return _cursor(*connection.execute(statements.NEWEST).fetchone()) if self.connections.numbers else b""

        return self.connections.run(ask)

    def changes(self, family: str, cursor: bytes) -> ServedChanges | None:
        number, *last = cursor.decode("ascii", "replace").split()
        if not number.isdecimal():
            return None
        start, end = f"{family}/".encode(), f"{family}0".encode()
        named = {"number": int(number), "last": _array(last), "start": start, "end": end}

        def ask(connection: Any) -> list[Any]:
            if not self.connections.numbers:
                return []
            found: list[Any] = connection.execute(statements.CHANGES, named, binary=True).fetchall()
            return found

        rows = self.connections.run(ask)
        if not rows or not rows[0][3]:
            return None
        found = {
            name[len(start) :].decode(): StoredValue(version, content)
            for *_, name, version, content in rows
            if name is not None and version
        }
        return ServedChanges(_cursor(*rows[0][:3]), found, rows[0][1])

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

    def exceeded_limit(self, changes: int) -> None:
        """None: only the size of a statement is limited."""

    def places(self, plan: CommitPlan) -> int:
        return 0

    def space(self) -> None:
        """None: the only limit is the disk, and clients cannot query it."""

    def close(self) -> None:
        self.connections.close()


def _moved_to(connection: Any) -> str | None:
    row = connection.execute(statements.MOVED_TO).fetchone()
    return None if row is None else str(row[0])


def _cursor(number: int, now: float, last: Sequence[str]) -> bytes:
    """The cursor: the lowest number that may still be in use and the last commits; empty if there are no commits."""
    return " ".join([str(number), *last]).encode() if last else b""


def _ask_for(connection: Any, named: Sequence[Named]) -> Any:
    return connection.ask(*_request(named))


def _ask_in_turn(connection: Any, named: Sequence[Named]) -> Any:
    """Lock, then fetch in a second statement, which sees the latest commits. The locks outlive this request, so the
    server limits their time. If the locks are not granted in time, fetch without them."""
    statement, (name,) = _request(named)
    limit = min(TURN, math.ceil(connection.answer_within * 500))  # before the statement times out
    together = statements.TAKE_TURN + statement.replace("%s", "%(name)s")
    compared = [each for each in named if isinstance(each, Key) or each.chain is None]
    try:
        answer = connection.ask_at_once(together, {"limit": limit, "names": _names(compared), "name": name})
    except psycopg.errors.LockNotAvailable:
        _roll_back(connection)
        return _ask_for(connection, named)
    while answer.nextset():
        pass
    return answer


def _request(named: Sequence[Named]) -> tuple[str, list[Any]]:
    if len(named) == 1 and isinstance(named[0], Key):
        return statements.FETCH_ONE, [named[0].name.encode()]
    return statements.FETCH, [_names(named)]


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


def _fetch_more(connection: Any, named: Sequence[Named]) -> Fetched:
    """Fetch during a turn: in one message, because the server's limit does not hold in the middle of one."""
    return _fetched(named, connection.ask_at_once(*_request(named)))


def _end(connection: Any) -> None:
    """End a turn in which nothing was written. Not by a rollback: after one, all statements are prepared again."""
    if not connection.closed and connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS:
        with contextlib.suppress(psycopg.Error):
            connection.ask_at_once("COMMIT")
    _roll_back(connection)


def _roll_back(connection: Any) -> None:
    """Release the locks of an attempt that did not commit."""
    if connection.closed or connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        return
    with contextlib.suppress(psycopg.Error):
        connection.execute("ROLLBACK")


def _is_single(plan: CommitPlan) -> bool:
    """Whether a plan names only one document, which has a row, and puts it."""
    if not plan.named:
        return False
    (first, *more) = plan.named
    alone = not more and not plan.loose
    return plan.puts.get(first.name) is not None and alone and first.name in plan.fetched.found


def _single(plan: CommitPlan) -> dict[str, Any]:
    ((name, content),) = plan.puts.items()
    version = plan.fetched.of(name).version
    return {"id": plan.id, "name": name.encode(), "version": version, "content": content}


def _parameters(plan: CommitPlan) -> dict[str, Any]:
    """The plan as arrays in text form: a statement stays prepared only if its parameters always have the same
    types, and an empty list has no type.

    A document that is only read is not written, unless it has no row: then it gets a row without content or version,
    so that a document created there meanwhile is a conflict.
    """
    existing = [each.name for each in plan.named if each.name in plan.fetched.found]
    absent = [each.name for each in plan.named if each.name not in plan.fetched.found]
    ends = {each.stream: each.position for each in plan.additions}
    added = [(each.stream.encode(), each.position, each.content) for each in plan.additions]
    added += [(_loose(each.stream), each.place, each.content) for each in plan.loose]
    changed = [*plan.puts, *ends]
    put = list(dict.fromkeys([*changed, *absent]))
    return {
        "id": plan.id,
        "documents": _array(name.encode() for name in plan.puts),
        "count": str(len(existing)),
        "names": _array(name.encode() for name in existing),
        "versions": _array(plan.fetched.of(name).version for name in existing),
        "put": _array(name.encode() for name in put),
        "new_versions": _array([plan.id] * len(changed) + [""] * (len(put) - len(changed))),
        "contents": _array(plan.puts.get(name) for name in put),
        "positions": _array(ends.get(name) for name in put),
        "streams": _array(stream for stream, _, _ in added),
        "places": _array(place for _, place, _ in added),
        "records": _array(content for _, _, content in added),
    }


def _loose(stream: str) -> bytes:
    """The name of a stream's loose records in the table of entries; no stream has such a name."""
    return stream.encode() + b"~"


def _names(named: Sequence[Named]) -> str:
    return _array(each.name.encode() for each in named)


def _array(values: Iterable[bytes | str | int | None]) -> str:
    """An array literal. Strings are names and ids, which need no escaping beyond quotes."""
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: bytes | str | int | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return f'"{value}"'
