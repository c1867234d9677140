"""Noticing changes in PostgreSQL: by its notifications, and by looking from time to time where they may fail.

Who watches says so in a table; commits notify only if somebody does. A commit that began before may not have
seen it: so it is looked at once more shortly after. A connection that breaks is opened anew, and then, too,
how things look is compared with how they looked before.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterable
from typing import Self

import psycopg
from psycopg import sql

from holdfast.errors import UsageFailure
from holdfast.store import postgres_sql as statements
from holdfast.store.model import Family, Watched
from holdfast.store.postgres_connections import Connections, is_away, was_rejected

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


class Listener:
    """A connection that is told of changes. It outlives its watch, for the next one: who waits for a lease
    watches again and again. In between it does not listen, for nobody would take what it is told."""

    def __init__(self, connections: Connections, channel: str) -> None:
        self.connection = connections.connect()
        self.pid = os.getpid()
        self._id = str(uuid.uuid4())
        self._connections = connections
        self._registered_at = -math.inf
        self._channel = sql.Identifier(channel)

    def register(self) -> None:
        """Say that somebody watches, if that was said too long ago."""
        if self._connections.notifies and time.monotonic() - self._registered_at >= LOOK_SELDOM:
            self.connection.execute(statements.REGISTER, [self._id])
            self._registered_at = time.monotonic()

    def listen(self) -> None:
        """Be told from now on, and of nothing that was before."""
        if not self._connections.notifies:
            return
        try:
            self.register()
            self.connection.execute(sql.SQL("LISTEN {}").format(self._channel))
        except psycopg.Error as error:
            if not was_rejected(error):
                raise
            self._connections.notifies = False  # nobody tells anything here: look from time to time
            return
        for _ in self.connection.notifies(timeout=0):
            pass

    def pause(self) -> bool:
        """Be told nothing for a while; False if the line is dead."""
        try:
            if self._connections.notifies:
                self.connection.execute("UNLISTEN *")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        if self._connections.notifies and self.pid == os.getpid():
            with contextlib.suppress(psycopg.Error):
                self.connection.execute(statements.UNREGISTER, [self._id])
        self.connection.close()


class PostgresWatch:
    """A watch of one document, family or stream."""

    def __init__(self, connections: Connections, channel: str, what: Watched) -> None:
        self._connections = connections
        self._channel = channel
        self._what = what
        self._listener: Listener | None = None
        self._looks: dict[str, str] = {}
        self._look_at = 0.0
        self._pending: set[str] = set()
        self._first = True
        self._looks = connections.persist(self._begin)

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
        listener, self._listener = self._listener, None
        if listener is not None:
            self._connections.keep_listener(listener)

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
            self._pending |= self._connections.persist(self._resume)
        told, self._pending = self._pending, set()
        return told

    def _told(self, left: float) -> set[str]:
        if not self._connections.notifies:
            time.sleep(left)
            return set()
        told: set[str] = set()
        for message in self._listening.connection.notifies(timeout=left, stop_after=1):
            version, *names = message.payload.split(" ")
            if version == _MANY:
                self._look_at = 0.0
            new = {each for each in names if self._has(each) and self._looks.get(each) != version}
            self._looks.update(dict.fromkeys(new, version))
            told |= new
        return told

    def _compare(self) -> set[str]:
        before, self._looks = self._looks, self._look()
        return _differences(before, self._looks)

    def _look(self) -> dict[str, str]:
        """The version of everything that is watched."""
        self._listening.register()
        connection = self._listening.connection
        name = self._what.name
        if isinstance(self._what, Family):
            rows = connection.execute(
                statements.LOOK_AT_FAMILY, [f"{name}/".encode(), f"{name}0".encode()], binary=True
            )
        else:
            rows = connection.execute(statements.LOOK, [name.encode()], binary=True)
        found = {each.decode(): version for each, version in rows.fetchall()}
        seldom = self._connections.notifies and not self._first
        self._look_at = time.monotonic() + (LOOK_SELDOM if seldom else LOOK_EVERY)
        self._first = False
        return found

    def _has(self, name: str) -> bool:
        if isinstance(self._what, Family):
            return name.startswith(self._what.name + "/")
        return name == self._what.name

    @property
    def _listening(self) -> Listener:
        if self._listener is None:
            raise UsageFailure("the watch was closed")
        return self._listener

    def _begin(self) -> dict[str, str]:
        """Be told from now on, by a listener that is there or by a new one; and see how things look."""
        self._first = True
        self._listener = self._connections.take_listener() or Listener(self._connections, self._channel)
        try:
            self._listener.listen()
            return self._look()
        except psycopg.Error:
            self._drop()
            raise

    def _resume(self) -> set[str]:
        """The line was cut: begin again, and find out what has changed meanwhile."""
        self._drop()
        before, self._looks = self._looks, self._begin()
        return _differences(before, self._looks)

    def _drop(self) -> None:
        if self._listener is not None:
            self._listener.connection.close()
            self._listener = None


def _differences(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
