"""Clients and servers on machines of their own, on a network that fails: nothing acknowledged gets lost, and
nobody commits under a token that has been passed on.

An hour of faults is more than everyday testing has time for: `HOLDFAST_FAULTS` says how many each kind of
server has to survive (`make storm` asks for 60).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from holdfast.audit.chain import AuditTrail, verify
from holdfast.errors import Failure, FencingMismatch, LockConflict, OutcomeUnknown
from holdfast.leases.desk import Desk
from holdfast.leases.held import acquire
from holdfast.leases.records import LeaseKeys
from holdfast.store.base import Store
from holdfast.store.etcd import EtcdStore
from holdfast.store.memory import MemoryStore
from holdfast.store.records import Append, Create, Decision, Key, Replace, Stream, View
from holdfast.store.served import ServedStore
from holdfast.testing.contract_clients import EVENTS, INDEX, LEDGER, Event, Item, apply, number_of
from tests.locks.workers import Line, Worker, Workers
from tests.support.machines import Network, entered
from tests.support.servers import Etcd, Machine, Postgres, Server, enter

pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

FAULTS = int(os.environ.get("HOLDFAST_FAULTS", "6"))
CLIENTS = 3
TTL = 1.0
TIMEOUT = 3.0
AN_HOUR = 3600.0
KEYS = LeaseKeys.of("main")
TRAIL = AuditTrail()


class Site:
    """Servers and clients, each on its machine."""

    def __init__(self, network: Network, servers: list[Server], url: str) -> None:
        self.network = network
        self.servers = servers
        self.url = url
        self.clients = [network.machine() for _ in range(CLIENTS)]

    def open(self) -> ServedStore:
        if self.url.startswith("etcd"):
            return EtcdStore(self.url, timeout=TIMEOUT)
        from holdfast.store.postgres import PostgresStore

        return PostgresStore(self.url, timeout=TIMEOUT)

    def wait_until_all_answer(self) -> None:
        with entered(self.network.hub.namespace or ""):
            for server in self.servers:
                server.wait_until_it_answers()

    def leader(self) -> Server:
        """The member that leads; the only one that there is, elsewhere."""
        with entered(self.network.hub.namespace or ""):
            for server in self.servers:
                if isinstance(server, Etcd) and server.leads():
                    return server
        return self.servers[0]


@pytest.fixture(params=["postgresql", "etcd"])
def site(
    request: pytest.FixtureRequest, network: Network, tmp_path: Path, server_scratch: Path
) -> Iterator[Site]:
    servers: list[Server] = []
    if request.param == "postgresql":
        directory = server_scratch / "postgres"
        directory.mkdir()
        postgres = Postgres(directory, network.machine(), durable=True)
        servers.append(postgres)
        url = f"{postgres.url}?schema=storm"
    else:
        members = [_member(server_scratch, network.machine(), number) for number in range(3)]
        for member in members:
            member.peers = members
        servers += members
        url = f"etcd://{','.join(each.endpoint for each in members)}/storm"
    made = Site(network, servers, url)
    for server in servers:
        server.start(wait=False)
    made.wait_until_all_answer()
    yield made
    for server in servers:
        server.kill()


def _member(server_scratch: Path, machine: Machine, number: int) -> Etcd:
    directory = server_scratch / f"etcd-{number}"
    directory.mkdir()
    quick = ("--heartbeat-interval", "50", "--election-timeout", "500")
    return Etcd(directory, machine, name=f"m{number}", options=quick)


# --- What clients do ------------------------------------------------------------------------------


class Diary:
    """What one client did: written down before it is tried, and after."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, number: int, outcome: str, what: str = "append") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([number, what, outcome]) + "\n")


def live(site: Site, name: str, diary: Diary, over: Callable[[], bool]) -> None:
    """Append to a stream, and work under the lease, until it is over."""
    store = site.open()
    desk = Desk(store, TRAIL)
    for number in itertools.count():
        if over():
            store.close()
            return
        attempt(diary, number, "append", lambda: append(store, name, number))  # noqa: B023
        if random.random() < 0.4:
            work_under_the_lease(store, desk, name, number, diary)


def attempt(diary: Diary, number: int, what: str, act: Callable[[], object]) -> bool:
    diary.note(number, "begun", what)
    try:
        act()
    except OutcomeUnknown:
        return False
    except Failure as failure:
        diary.note(number, failure.code, what)
        return False
    diary.note(number, "done", what)
    return True


def append(store: ServedStore, name: str, number: int) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        there = view.get(INDEX)
        count = 1 if there is None else there.number + 1
        put = (Create if there is None else Replace)(INDEX, Item(count))
        return Decision([put, Append(EVENTS, Event(number, name))], None)

    store.transact([INDEX, EVENTS], decide)


def work_under_the_lease(store: ServedStore, desk: Desk, name: str, number: int, diary: Diary) -> None:
    """Commit under the token as long as that goes, also when the lease may have been taken over by then."""
    try:
        lease = desk.acquire("main", desk.request(ttl=TTL)).lease
    except Failure:
        return
    for each in range(3):
        time.sleep(random.random() * 0.6 * TTL)
        what = f"{lease.fencing_token}.{each}"
        commit = lambda: commit_under(store, lease.lock_id, lease.fencing_token, f"{name}.{number}.{each}")  # noqa: B023, E731
        attempt(diary, number, what, commit)
    if random.random() < 0.5:
        with contextlib.suppress(Failure):
            desk.release("main", lease.lock_id)


def commit_under(store: ServedStore, lock_id: str, token: int, text: str) -> None:
    """What every commit of protected work does: name the lease, and refuse if it is another one by now."""

    def decide(view: View, now: float) -> Decision[None]:
        lease = view.get(KEYS.lease)
        if lease is None or (lease.lock_id, lease.fencing_token) != (lock_id, token):
            raise FencingMismatch("the lease was taken over")
        return Decision([Append(LEDGER, Event(token, text))], None)

    named: list[Key[Any] | Stream[Any]] = [KEYS.lease, LEDGER]
    store.transact(named, decide)


# --- What goes wrong ------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Something that goes wrong, and what ends it."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]


def faults(site: Site) -> Iterator[Fault]:
    """One fault after the other, all kinds in each round."""
    network = site.network
    while True:
        kinds = ["client", "leader cut off", "leader killed", "leader stopped", "any killed", "all killed"]
        random.shuffle(kinds)
        for kind in kinds:
            client, leader, any_ = random.choice(site.clients), site.leader(), random.choice(site.servers)
            match kind:
                case "client":
                    yield Fault(kind, lambda: network.cut_off(client), lambda: network.reconnect(client))  # noqa: B023
                case "leader cut off":
                    machine = leader.machine
                    yield Fault(kind, lambda: network.cut_off(machine), lambda: network.reconnect(machine))  # noqa: B023
                case "leader killed":
                    yield Fault(kind, leader.kill, lambda: leader.start(wait=False))  # noqa: B023
                case "leader stopped":
                    yield Fault(kind, leader.pause, leader.resume)
                case "any killed":
                    yield Fault(kind, any_.kill, lambda: any_.start(wait=False))  # noqa: B023
                case "all killed":
                    yield Fault(kind, partial(_each, site, Server.kill), partial(_each, site, _start_again))


def _each(site: Site, do: Callable[[Server], None]) -> None:
    for server in site.servers:
        do(server)


def _start_again(server: Server) -> None:
    server.start(wait=False)


def test_whatever_fails_nothing_acknowledged_is_lost_and_no_stale_token_commits(
    site: Site, tmp_path: Path
) -> None:
    over = mmap.mmap(-1, 1)
    suffered: list[str] = []
    with Workers() as workers:
        clients = [
            _start(workers, site, machine, tmp_path / f"client-{number}", over, skewed=number == 0)
            for number, machine in enumerate(site.clients)
        ]
        time.sleep(0.5)
        for fault in itertools.islice(faults(site), FAULTS):
            fault.begin()
            time.sleep(0.2 + random.random() * 1.3)
            fault.end()
            suffered.append(fault.name)
            site.wait_until_all_answer()
            time.sleep(random.random() * 0.5)
        over[0] = 1
        for client in clients:
            assert client.hear() == "over"

    assert len(suffered) == FAULTS
    with entered(site.network.hub.namespace or ""):
        told = judge(site.open(), tmp_path)
    assert told.acknowledged > 3 * FAULTS, "hardly anything was done"
    print(f"{site.url.split(':')[0]}: {len(suffered)} faults; {told}")  # noqa: T201


def _start(
    workers: Workers, site: Site, machine: Machine, diary: Path, over: mmap.mmap, *, skewed: bool
) -> Worker:
    def work(line: Line) -> None:
        enter(machine.namespace or "")
        real = time.time
        clock = (lambda: real() + AN_HOUR) if skewed else real
        with mock.patch("time.time", clock):  # the clock of this machine is an hour off
            live(site, diary.name, Diary(diary), lambda: over[0] == 1)
        line.say("over")

    return workers.start(work)


class Told(NamedTuple):
    """What came of a storm."""

    acknowledged: int
    unknown: int
    refused: int
    under_a_token: int
    tokens: int


def judge(store: Store, diaries: Path) -> Told:
    """Compare what clients were told with what is there."""
    notes = [
        (path.name, *json.loads(line))
        for path in sorted(diaries.glob("client-*"))
        for line in path.read_text().splitlines()
    ]
    begun = {(name, number, what) for name, number, what, outcome in notes if outcome == "begun"}
    done = {(name, number, what) for name, number, what, outcome in notes if outcome == "done"}
    known = {(name, number, what) for name, number, what, outcome in notes if outcome != "begun"}

    appended = [(each.record.text, each.record.number, "append") for each in store.entries(EVENTS)]
    assert len(appended) == len(set(appended)) == number_of(store, INDEX), "something was done twice"
    assert not {each for each in done if each[2] == "append"} - set(appended), "something was lost"
    assert not set(appended) & (known - done), "something was done that was said not to be"

    under = [(each.record.number, each.record.text) for each in store.entries(LEDGER)]
    tokens = [token for token, _ in under]
    assert tokens == sorted(tokens), "a stale token has committed"
    written = {(text.split(".")[0], int(text.split(".")[1]), f"{token}.{text[-1]}") for token, text in under}
    assert not {each for each in done if each[2] != "append"} - written, "something was lost"
    assert not written & (known - done), "something was done that was said not to be"

    given = [
        int(str(facts["fencing_token"]))
        for entry in verify(store.entries(TRAIL.stream))
        if (facts := entry.facts.get("new", entry.facts))
        and entry.event in ("lock_acquired", "lock_stolen")
        and isinstance(facts, dict)
    ]
    assert given == sorted(set(given)), "a token was given twice"
    return Told(len(done), len(begun - known), len(known - done), len(under), len(given))


PLANTED: dict[str, Callable[[MemoryStore, Diary], object]] = {
    "something was lost": lambda store, diary: diary.note(9, "done"),
    "something was done twice": lambda store, diary: apply(store, Append(EVENTS, Event(0, "client-0"))),
    "something was done that was said not to be": lambda store, diary: diary.note(1, "E_STORE_UNAVAILABLE"),
    "a stale token has committed": lambda store, diary: apply(
        store, Append(LEDGER, Event(1, "client-0.0.1"))
    ),
}


@pytest.mark.parametrize("found", ["nothing", *PLANTED])
def test_the_judge_finds_what_is_planted(tmp_path: Path, found: str) -> None:
    store, diary = MemoryStore(), Diary(tmp_path / "client-0")
    apply(
        store,
        Create(INDEX, Item(2)),
        Append(EVENTS, Event(0, "client-0")),
        Append(EVENTS, Event(1, "client-0")),
    )
    apply(store, Append(LEDGER, Event(1, "client-0.0.0")), Append(LEDGER, Event(2, "client-0.1.0")))
    diary.note(0, "done")
    diary.note(0, "done", "1.0")
    if found == "nothing":
        assert judge(store, tmp_path).acknowledged == 2
        return
    PLANTED[found](store, diary)
    with pytest.raises(AssertionError, match=found):
        judge(store, tmp_path)


# --- One holder, cut off ----------------------------------------------------------------------------


def test_a_holder_that_is_cut_off_stops_and_its_late_commit_is_refused(site: Site) -> None:
    """A machine holds a lease and is cut off: it stops by itself; another one takes over with a higher token;
    when the first one is back, what it still wanted to commit is refused."""
    first, second = site.clients[:2]

    def hold(line: Line) -> None:
        enter(first.namespace or "")
        store = site.open()
        desk = Desk(store, TRAIL)
        held = acquire(desk, "main", desk.request(ttl=TTL)).beat()
        line.say(held.token)
        line.wait()  # it is cut off now
        assert held.lost.wait(60)
        line.say("stopped")
        line.wait()  # it is back
        try:
            commit_under(store, held.lock_id, held.token, "late")
            line.say("committed")
        except FencingMismatch:
            line.say("refused")

    def follow(line: Line) -> None:
        enter(second.namespace or "")
        with mock.patch("time.time", return_value=1e9):  # a clock that is years behind
            desk = Desk(site.open(), TRAIL)
            with pytest.raises(LockConflict):
                desk.acquire("main", desk.request(ttl=60))
            line.say("refused")
            line.wait()
            after = acquire(desk, "main", desk.request(ttl=60), wait=60.0)
            line.say(after.token)

    with Workers() as workers:
        holder = workers.start(hold)
        token = holder.hear()
        successor = workers.start(follow)
        assert successor.hear() == "refused"
        site.network.cut_off(first)
        holder.say("you are cut off")
        successor.say("go on")
        assert holder.hear() == "stopped"
        assert successor.hear() == token + 1
        site.network.reconnect(first)
        assert holder.ask("you are back") == "refused"
