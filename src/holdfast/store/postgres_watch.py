"""Watching PostgreSQL for changes: by notifications, and by polling where notifications may be missed.

Watchers register in a table, and commits notify only if it has a row. A commit that began before the registration may
not have seen it, so the watcher polls once more shortly after. After a disconnect, it compares versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterable

import psycopg
from psycopg import sql

from holdfast.errors import UsageFailure
from holdfast.store import postgres_sql as statements
from holdfast.store.model import Family, Stream, Watch, Watched
from holdfast.store.postgres_connections import Connections, is_away, was_rejected

POLL_INTERVAL = 0.5  # without notifications
REFRESH_INTERVAL = 20.0  # with notifications: how often to poll anyway, and to register again
_LONGEST_MESSAGE = 7900
_MANY = "*"


def channel_of(schema: str) -> str:
    """The notification channel of a schema; hashed, because channel names are limited in length."""
    return f"holdfast_{hashlib.sha256(schema.encode()).hexdigest()[:16]}"


def message_of(version: str, names: Iterable[str]) -> str:
    """A notification: the new version and the changed names, or `*` if there are too many names."""
    message = " ".join([version, *names])
    return message if len(message.encode()) <= _LONGEST_MESSAGE else _MANY


class Listener:
    """A connection that receives notifications. It outlives its watch, because waiting for a lease creates many
    watches. Between watches it does not listen: nothing would read the notifications."""

    def __init__(self, connections: Connections, channel: str) -> None:
        self.connection = connections.connect()
        self.pid = os.getpid()
        self._id = str(uuid.uuid4())
        self._connections = connections
        self._registered_at = -math.inf
        self._channel = sql.Identifier(channel)

    def register(self) -> None:
        """Register as a watcher, unless the last registration is recent."""
        if self._connections.listens and time.monotonic() - self._registered_at >= REFRESH_INTERVAL:
            self.connection.ask_at_once(statements.REGISTER, [self._id])
            self._registered_at = time.monotonic()

    def listen(self) -> None:
        """Receive notifications from now on; pending ones are discarded."""
        if not self._connections.listens:
            return
        try:
            self.register()
            self.connection.execute(sql.SQL("LISTEN {}").format(self._channel))
        except psycopg.Error as error:
            if not was_rejected(error):
                raise
            self._connections.notifies = False  # poll instead
            return
        for _ in self.connection.notifies(timeout=0):
            pass

    def pause(self) -> bool:
        """Stop receiving notifications; False if the connection is dead."""
        try:
            if self._connections.listens:
                self.connection.execute("UNLISTEN *")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        if self._connections.listens and self.pid == os.getpid():
            with contextlib.suppress(psycopg.Error):
                self.connection.ask_at_once(statements.UNREGISTER, [self._id])
        self.connection.close()


class PostgresWatch(Watch):
    """A watch of one document, family or stream."""

    def __init__(self, connections: Connections, channel: str, what: Watched) -> None:
        self._connections = connections
        self._channel = channel
        self._what = what
        self._listener: Listener | None = None
        self._poll_at = 0.0
        self._pending: set[str] = set()
        self._first = True
        self._versions: dict[str, str] = connections.persist(self._begin)

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._connections.keep_listener(listener)

    def _next(self, left: float | None) -> set[str]:
        """Changes that are notified within this time, or found by polling when a poll is due."""
        until_poll = max(0.0, self._poll_at - time.monotonic())
        try:
            self._pending |= self._notified(until_poll if left is None else min(left, until_poll))
            if time.monotonic() >= self._poll_at:
                self._pending |= self._compare()
        except psycopg.Error as error:
            if not is_away(error):
                raise self._connections.failure(error) from error
            self._pending |= self._connections.persist(self._resume)
        changed, self._pending = self._pending, set()
        return changed

    def _notified(self, left: float) -> set[str]:
        if not self._connections.listens:
            time.sleep(left)
            return set()
        changed: set[str] = set()
        for message in self._listening.connection.notifies(timeout=left, stop_after=1):
            version, *names = message.payload.split(" ")
            if version == _MANY:
                self._poll_at = 0.0
            new = {each for each in names if self._has(each) and self._versions.get(each) != version}
            self._versions.update(dict.fromkeys(new, version))
            changed |= new
        return changed

    def _compare(self) -> set[str]:
        before, self._versions = self._versions, self._poll()
        return _differences(before, self._versions)

    def _poll(self) -> dict[str, str]:
        """The version of everything watched."""
        self._listening.register()
        connection = self._listening.connection
        name = self._what.name
        if isinstance(self._what, Family):
            rows = connection.execute(
                statements.FAMILY_VERSIONS, [f"{name}/".encode(), f"{name}0".encode()], binary=True
            )
        else:
            rows = connection.execute(statements.VERSION, [name.encode()], binary=True)
        found = {each.decode(): version for each, version in rows.fetchall()}
        if isinstance(self._what, Stream) and self._what.chain is not None:
            (last,) = connection.execute(statements.LAST_LOOSE, [name.encode() + b"~"]).fetchone()
            found[name] = f"{found.get(name, '')} {last}"
        seldom = self._connections.listens and not self._first
        self._poll_at = time.monotonic() + (REFRESH_INTERVAL if seldom else POLL_INTERVAL)
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
        """Listen, with a kept listener or a new one, and poll."""
        self._first = True
        self._listener = self._connections.take_listener() or Listener(self._connections, self._channel)
        try:
            self._listener.listen()
            return self._poll()
        except psycopg.Error:
            self._drop()
            raise

    def _resume(self) -> set[str]:
        """Listen again after a disconnect, and return the changes since."""
        self._drop()
        before, self._versions = self._versions, self._begin()
        return _differences(before, self._versions)

    def _drop(self) -> None:
        if self._listener is not None:
            self._listener.connection.close()
            self._listener = None


def _differences(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
