"""A client of PostgreSQL that vanishes in the middle of a commit, at any byte, leaves no lock behind.

The proxy of these tests withholds the bytes of a commit, and passes on as many as the test wants. The limits of the
server on the time of sessions are too long to matter here: the protection tested is that of the client.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.store.model import Append, Create, Decision, Replace, View
from holdfast.testing.backend import EVENTS, INDEX, Event, Item, apply, increment, number_of
from proof.effort import chosen, rounds, tried
from tests.locks.workers import wait_until
from tests.store.test_plain_sql import TRAIL, do_everything
from tests.support.proxy import Proxy
from tests.support.servers import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.leases.service import LeaseService  # noqa: E402
from holdfast.store.postgres import PostgresStore  # noqa: E402
from holdfast.store.postgres_requests import Connection  # noqa: E402

if sys.platform != "linux":
    pytest.skip("the waits of the server are counted by /proc", allow_module_level=True)

LONG = 600.0
"""The time limit of the victims, and of the server for their sessions, in seconds."""
MOST_DELAY = 2.0
BLOCK = 8192
"""libpq sends whole blocks of this size before a commit is complete."""


class Withholding(Proxy):
    """Withholds what a client sends from `hold` on, until it is released."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.forward = self._deliver
        self.server: socket.socket
        self.held = bytearray()
        self.holds = False
        self._guard = threading.Lock()

    def _deliver(self, server: socket.socket, chunk: bytes) -> None:
        with self._guard:
            if self.holds:
                self.server = server
                self.held += chunk
                return
        server.sendall(chunk)

    def hold(self) -> None:
        self.held.clear()
        self.holds = True

    def release(self, count: int) -> None:
        """Pass on so many of the bytes that are withheld."""
        self.server.sendall(self.held[:count])
        del self.held[:count]

    def release_all(self) -> None:
        with self._guard:
            self.holds = False
            self.release(len(self.held))

    def cut_off(self) -> None:
        """Forget the bytes that are withheld, and cut all connections."""
        self.holds = False
        self.cut_all_lines()


def messages_in(sent: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The complete messages of a client: kind and content."""
    while len(sent) >= 5 and len(sent) > (size := struct.unpack("!I", sent[1:5])[0]):
        yield sent[:1], bytes(sent[5 : size + 1])
        sent = sent[size + 1 :]


def is_complete(sent: bytes) -> bool:
    """Whether nothing is missing from a request: it ends with a simple query, or with Sync."""
    return any(kind in b"QS" for kind, _ in messages_in(sent))


class Backend:
    """The server's process for one connection of the proxy."""

    def __init__(self, control: Any, proxy: Withholding) -> None:
        self._control = control
        query = "SELECT pid FROM pg_stat_activity WHERE client_port = %s"
        (self._pid,) = control.execute(query, [proxy.server.getsockname()[1]]).fetchone()

    def has_transaction(self, after: Callable[[], object]) -> bool:
        """Whether it has locked or written anything, after it has read what is sent now and waits for more."""
        before = self._waits()
        after()
        while self._waits() == before:
            pass
        query = "SELECT wait_event, backend_xid FROM pg_stat_activity WHERE pid = %s"
        while True:
            event, number = self._control.execute(query, [self._pid]).fetchone()
            if event == "ClientRead":
                return number is not None

    def _waits(self) -> int:
        """How often it has begun to wait."""
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
        raise AssertionError("the kernel does not count")


class Scene:
    """A victim whose store is behind a withholding proxy."""

    def __init__(self, server: Postgres, url: str) -> None:
        self.proxy = Withholding(server.port)
        self.store = PostgresStore(url.replace(f":{server.port}/", f":{self.proxy.port}/"), timeout=LONG)
        self.control = psycopg.connect(server.url, autocommit=True)
        self.other = PostgresStore(url)
        apply(self.other, Create(INDEX, Item(0)))
        self.store.read(INDEX)

    @contextlib.contextmanager
    def withheld(self, act: Callable[[Scene], object]) -> Iterator[int]:
        """While a thread is in the middle of this; yields the number of bytes that are withheld."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                act(self)
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: is_complete(bytes(self.proxy.held)) or failures)
        assert not failures, failures
        try:
            yield len(self.proxy.held)
        finally:
            if self.proxy.holds:
                self.proxy.release_all()
            thread.join()
        assert not failures, failures

    def bytes_with_locks(self, act: Callable[[Scene], object], salt: str) -> list[int]:
        """After which bytes of this the server keeps locks, although more is to come. A short run tries a share of the
        bytes, and all at the ends of libpq's blocks and of the whole."""
        found = []
        with self.withheld(act) as total:
            sampled = {*chosen(range(1, total), salt=salt), *range(max(1, total - 32), total)}
            sampled |= {each + near for each in range(BLOCK, total - 32, BLOCK) for near in (-1, 0, 1)}
            backend, passed = Backend(self.control, self.proxy), 0
            for at in sorted(sampled):
                if backend.has_transaction(lambda: self.proxy.release(at - passed)):  # noqa: B023
                    found.append(at)
                passed = at
                tried["bytes of commits"] += 1
        return found

    def close(self) -> None:
        self.proxy.cut_off()
        for each in (self.store, self.other, self.control):
            each.close()
        self.proxy.close()


@pytest.fixture
def scene(postgres_server: Postgres, postgres_url: str) -> Iterator[Scene]:
    made = Scene(postgres_server, postgres_url)
    yield made
    made.close()


def grow(store: PostgresStore, *, alone: bool, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Replace the document by a large one, and append as much to a stream unless `alone`."""

    def decide(view: View, now: float) -> Decision[None]:
        item, text = view.get(INDEX), random.randbytes(2300).hex()
        assert item is not None
        number = item.number + 1
        meanwhile()
        appended = [] if alone else [Append(EVENTS, Event(number, text))]
        return Decision([Replace(INDEX, Item(number, text)), *appended], None)

    store.transact([INDEX] if alone else [INDEX, EVENTS], decide)


def commit(scene: Scene, *, alone: bool, uses: int = 0) -> None:
    """A large commit, by a statement that was used so often before: first it is not prepared, then it is."""
    for _ in range(uses):
        grow(scene.store, alone=alone)
    grow(scene.store, alone=alone, meanwhile=functools.cache(scene.proxy.hold))  # only at the first attempt


def seal(scene: Scene) -> None:
    leases = LeaseService(scene.other, TRAIL)
    for _ in range(20):
        leases.release("main", leases.acquire("main", leases.request(ttl=60)).lease.lock_id)
    engine: Any = scene.store.engine
    commit = engine.commit

    def hold_and_commit(*arguments: Any) -> Any:
        scene.proxy.hold()
        return commit(*arguments)

    with mock.patch.object(engine, "commit", hold_and_commit):
        scene.store.seal(TRAIL.stream)


def rule_out(scene: Scene) -> None:
    scene.proxy.hold()
    assert not scene.store.was_made("never")


def move(scene: Scene) -> None:
    scene.proxy.hold()
    scene.store.set_moved("etcd://elsewhere/")


ACTS: dict[str, Callable[[Scene], object]] = {
    "one document": lambda scene: commit(scene, alone=True),
    "one document, to be prepared": lambda scene: commit(scene, alone=True, uses=2),
    "one document, prepared": lambda scene: commit(scene, alone=True, uses=3),
    "several": lambda scene: commit(scene, alone=False),
    "several, to be prepared": lambda scene: commit(scene, alone=False, uses=2),
    "several, prepared": lambda scene: commit(scene, alone=False, uses=3),
    "seal": seal,
    "rule out": rule_out,
    "move": move,
}


@pytest.mark.parametrize("name", ACTS)
def test_the_server_begins_only_when_it_has_all_bytes(scene: Scene, name: str) -> None:
    assert scene.bytes_with_locks(ACTS[name], name) == []


def written_in_parts(
    connection: Connection, statement: str, parameters: Any, *, begin: Sequence[str] = (), then: Sequence[str] = ()
) -> Any:
    """A planted bug: the end of each statement is a message of its own."""
    for each in begin:
        connection.ask(each, {})
    answer = connection.ask(statement, parameters)
    for each in then:
        connection.ask(each, {})
    return answer


@pytest.mark.parametrize("name", ["one document", "several, prepared"])
def test_a_commit_whose_end_is_a_message_of_its_own_is_found(scene: Scene, name: str) -> None:
    with mock.patch.object(Connection, "write", written_in_parts):
        assert scene.bytes_with_locks(ACTS[name], name)


def test_others_do_not_wait_for_a_client_that_vanishes_in_the_middle_of_a_commit(scene: Scene) -> None:
    expected = 0
    for number in range(rounds(500, least=8)):
        chance = random.Random(number)
        in_turn = number % 2 == 0
        scene.store._conflicts = {INDEX.name: float("inf")} if in_turn else {}
        with scene.withheld(lambda scene: commit(scene, alone=chance.random() < 0.5)) as total:  # noqa: B023
            scene.proxy.release(chance.randrange(1, total))
            if chance.random() < 0.3:
                scene.proxy.cut_off()
            began = time.monotonic()
            increment(scene.other, INDEX)
            assert time.monotonic() - began < MOST_DELAY, f"round {number}, in turn: {in_turn}"
            scene.proxy.cut_off()
        expected += 2
        assert number_of(scene.other, INDEX) == expected, f"round {number}"
        tried["commits left in the middle"] += 1


# --- What is sent in parts ------------------------------------------------------------------------

WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|LOCK|CREATE|ALTER|DROP)\b", re.IGNORECASE)


@contextlib.contextmanager
def parts_sent(server: Postgres, url: str) -> Iterator[list[str]]:
    """While everything is done once; the statements whose execution and end are different messages."""
    streams: dict[Any, bytearray] = {}

    def note(to: socket.socket, chunk: bytes) -> None:
        streams.setdefault(to.getsockname(), bytearray()).extend(chunk)
        to.sendall(chunk)

    with Proxy(server.port) as proxy:
        proxy.forward = note
        found: list[str] = []
        do_everything(url.replace(f":{server.port}/", f":{proxy.port}/"))
        for sent in streams.values():
            while sent[:1] == b"\0":  # the first messages have no kind
                del sent[: struct.unpack("!I", sent[:4])[0]]
            found += [content.split(b"\0")[1].decode() for kind, content in messages_in(bytes(sent)) if kind == b"P"]
        yield found


def test_only_statements_that_read_are_sent_in_parts(postgres_server: Postgres, postgres_url: str) -> None:
    with parts_sent(postgres_server, postgres_url) as statements:
        assert len(statements) > 10
        assert [each for each in statements if WRITES.search(each)] == []


def test_a_statement_that_writes_and_is_sent_in_parts_is_found(postgres_server: Postgres, postgres_url: str) -> None:
    with (
        mock.patch.object(Connection, "write", written_in_parts),
        parts_sent(postgres_server, postgres_url) as statements,
    ):
        assert [each for each in statements if WRITES.search(each)] != []
