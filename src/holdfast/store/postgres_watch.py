"""Noticing changes in PostgreSQL: by its notifications, and by looking from time to time where they may fail.

Who watches says so in a table; commits notify only if somebody does. A commit that began before may not have
seen it: so it is looked at once more shortly after. A connection that breaks is opened anew, and then, too,
how things look is compared with how they looked before.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Iterable
from typing import Any, Self

import psycopg
from psycopg import sql

from holdfast.store import postgres_sql as statements
from holdfast.store.base import Watched
from holdfast.store.postgres_connections import Connections, is_away
from holdfast.store.records import Family

LOOK_EVERY = 0.5
"""How often to look where there are no notifications."""

LOOK_SELDOM = 20.0
"""How often to look where there are; also how often to say that one still watches."""

_LONGEST_MESSAGE = 7900
_MANY = "*"


def channel_of(schema: str) -> str:
    """The name under which changes of a schema are told; short enough for every schema."""
    return f"holdfast_{hashlib.sha256(schema.encode()).hexdigest()[:16]}"


def message_of(version: str, names: Iterable[str]) -> str:
    """What those who watch are told: the new version and the names; or that these are too many."""
    message = " ".join([version, *names])
    return message if len(message.encode()) <= _LONGEST_MESSAGE else _MANY


class PostgresWatch:
    """A watch of one document, family or stream, on a connection of its own."""

    def __init__(self, connections: Connections, channel: str, what: Watched) -> None:
        self._connections = connections
        self._channel = channel
        self._what = what
        self._id = str(uuid.uuid4())
        self._connection: Any = None
        self._looks: dict[str, str] = {}
        self._look_at = 0.0
        self._pending: set[str] = set()
        self._first = True
        self._listen()
        self._looks = self._look()

    def wait(self, timeout: float | None = None) -> frozenset[str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, self._look_at - time.monotonic())
            if deadline is not None:
                left = min(left, max(0.0, deadline - time.monotonic()))
            changed = self._next(left)
            if changed or (deadline is not None and time.monotonic() >= deadline):
                return frozenset(changed)

    def close(self) -> None:
        """Stop watching."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute(statements.UNREGISTER, [self._id])
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _next(self, left: float) -> set[str]:
        """What is told within this time; or what has come to look different, when it is time to look."""
        try:
            self._pending |= self._told(left)
            if time.monotonic() >= self._look_at:
                self._pending |= self._compare()
        except psycopg.Error as error:
            if not is_away(error):
                raise self._connections.failure(error) from error
            self._connection.close()
            self._listen()
            self._look_at = 0.0
        told, self._pending = self._pending, set()
        return told

    def _told(self, left: float) -> set[str]:
        if not self._connections.notifies:
            time.sleep(left)
            return set()
        told: set[str] = set()
        for message in self._connection.notifies(timeout=left, stop_after=1):
            version, *names = message.payload.split(" ")
            if version == _MANY:
                self._look_at = 0.0
            new = {each for each in names if self._has(each) and self._looks.get(each) != version}
            self._looks.update(dict.fromkeys(new, version))
            told |= new
        return told

    def _compare(self) -> set[str]:
        before, self._looks = self._looks, self._look()
        names = before.keys() | self._looks.keys()
        return {name for name in names if before.get(name) != self._looks.get(name)}

    def _look(self) -> dict[str, str]:
        """The version of everything that is watched."""
        if self._connections.notifies:
            self._connection.execute(statements.REGISTER, [self._id])
        name = self._what.name
        if isinstance(self._what, Family):
            rows = self._connection.execute(
                statements.LOOK_AT_FAMILY, [f"{name}/".encode(), f"{name}0".encode()], binary=True
            )
        else:
            rows = self._connection.execute(statements.LOOK, [name.encode()], binary=True)
        found = {each.decode(): version for each, version in rows.fetchall()}
        seldom = self._connections.notifies and not self._first
        self._look_at = time.monotonic() + (LOOK_SELDOM if seldom else LOOK_EVERY)
        self._first = False
        return found

    def _has(self, name: str) -> bool:
        if isinstance(self._what, Family):
            return name.startswith(self._what.name + "/")
        return name == self._what.name

    def _listen(self) -> None:
        """Open the connection, and be told from now on."""

        def listen() -> Any:
            connection = self._connections.connect()
            if self._connections.notifies:
                connection.execute(statements.REGISTER, [self._id])
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            return connection

        self._connection = self._connections.persist(listen)
        self._first = True
