"""A client of PostgreSQL that is stopped or unplugged, at any message, does not delay the others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from holdfast.store.model import Create
from holdfast.testing.backend import EVENTS, INDEX, Item, apply, increment, number_of
from proof.effort import rounds, tried
from tests.locks.workers import Line, Workers
from tests.support.proxy import Proxy
from tests.support.servers import Postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store.postgres import PostgresStore  # noqa: E402

if sys.platform == "win32":
    pytest.skip("Windows has no fork", allow_module_level=True)

MOST_DELAY = 2.0  # seconds, beyond the longest wait without a frozen client

Fault = Literal["stop", "unplug before", "unplug after"]
FAULTS: tuple[Fault, ...] = ("stop", "unplug before", "unplug after")


class Victim:
    """A process that commits all the time through a proxy, until it is frozen at one of its messages."""

    def __init__(self, workers: Workers, server: Postgres, url: str, fault: Fault, at: int, *, in_turn: bool) -> None:
        self.proxy = Proxy(server.port)
        self.frozen = threading.Event()
        self._fault, self._left = fault, at
        through = url.replace(f":{server.port}/", f":{self.proxy.port}/")
        self._worker = workers.start(lambda line: commit_forever(line, through, in_turn=in_turn))
        self._worker.hear()
        self.proxy.forward = self._deliver
        self._worker.say("go")

    def _deliver(self, server: socket.socket, chunk: bytes) -> None:
        self._left -= 1
        if self._left <= 0:
            if self._fault == "stop":
                os.kill(self._worker.pid, signal.SIGSTOP)
            else:
                self.proxy.unplugged = True
            self.frozen.set()
        if self._left > 0 or self._fault != "unplug before":
            server.sendall(chunk)

    def close(self) -> None:
        self._worker.kill()
        self._worker.wait()
        self.proxy.close()


def commit_forever(line: Line, url: str, *, in_turn: bool) -> None:
    store = PostgresStore(url)
    store.read(INDEX)
    if in_turn:
        store._conflicts = {INDEX.name: float("inf")}
    line.say("ready")
    line.wait()
    while True:
        increment(store, INDEX, EVENTS)


class Controls:
    """Clients that commit to the same documents, directly; and how long each commit takes."""

    def __init__(self, url: str) -> None:
        self.waits: dict[int, list[float]] = {each: [] for each in range(2)}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(url, own)) for own in self.waits.values()]
        for each in self._threads:
            each.start()

    def _work(self, url: str, own: list[float]) -> None:
        with PostgresStore(url) as store:
            while not self._ended.is_set():
                began = time.monotonic()
                increment(store, INDEX, EVENTS)
                own.append(time.monotonic() - began)

    def wait_for_more(self, number: int) -> None:
        """Until each has made this number of commits from now on, and one that has begun by now."""
        wanted = [(own, len(own) + number + 1) for own in self.waits.values()]
        end = time.monotonic() + 120.0
        while any(len(own) < least for own, least in wanted):
            assert time.monotonic() < end, "nobody could commit for two minutes"
            time.sleep(0.005)

    @property
    def longest(self) -> float:
        return max(max(own) for own in self.waits.values())

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        for own in self.waits.values():
            own.clear()
        yield

    def close(self) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()


def freeze_some(server: Postgres, url: str, chance: random.Random) -> float:
    """Freeze three clients at random messages; how much longer than usual the others had to wait for a commit."""
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(Workers())
        victims: list[Victim] = []
        for _ in range(3):
            options: Any = {"at": chance.randrange(1, 20), "in_turn": chance.random() < 0.7}
            victims.append(Victim(workers, server, url, chance.choice(FAULTS), **options))
            stack.callback(victims[-1].close)
        controls = Controls(url)
        stack.callback(controls.close)
        for each in victims:
            assert each.frozen.wait(60.0)
        controls.wait_for_more(3)
        delayed = controls.longest
        for each in victims:
            each.close()
        controls.wait_for_more(3)
        with controls.measured():
            controls.wait_for_more(10)
        return delayed - controls.longest


def test_frozen_clients_do_not_delay_others(postgres_server: Postgres, postgres_url: str) -> None:
    with PostgresStore(postgres_url) as store:
        apply(store, Create(INDEX, Item(0)))
        for number in range(rounds(500, least=3)):
            chance = random.Random(number)
            assert freeze_some(postgres_server, postgres_url, chance) < MOST_DELAY, f"round {number}"
            tried["rounds with frozen clients"] += 1
        assert number_of(store, INDEX) == len(list(store.entries(EVENTS)))
