"""A storm: clients and servers on separate machines, on a network that fails, and a judge of the result.

Each client logs every attempt before it starts, and the outcome that was reported. If an outcome is unknown, the
client asks for it by commit id as soon as it can reach the server again, as any client must. At the end, the judge
compares the logs with the content of the store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from holdfast.errors import Failure, FencingMismatch, OutcomeUnknown, StoreUnavailable
from holdfast.leases.rules import LeaseKeys
from holdfast.leases.service import LeaseService
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.etcd import EtcdStore
from holdfast.store.model import Append, Create, Decision, Key, Replace, Store, Stream, View
from holdfast.store.served import ServedStore
from holdfast.testing.backend import EVENTS, INDEX, LEDGER, Event, Item, number_of
from tests.locks.workers import Line, Worker, Workers
from tests.support.machines import Network, entered
from tests.support.proxy import Proxy
from tests.support.servers import PATIENCE, Etcd, Machine, Postgres, Server, enter, sound_etcd

FAULTS = int(os.environ.get("HOLDFAST_FAULTS", "6"))
"""The number of faults that each kind of server must survive; `make storm` sets a higher one."""

CLIENTS = 3
TTL = 1.0
TIMEOUT = 0.4
AN_HOUR = 3600.0
KEYS = LeaseKeys.of("main")
TRAIL = AuditTrail()
LONGEST_HOLD = 8
"""A partition lasts for at most this many further faults: long enough that asking for an outcome fails too."""
DELAY = 0.02
"""The delay of the detour in seconds, in each direction."""


class Site:
    """Servers and clients, each on its own machine, and a detour to the servers with an adjustable delay."""

    def __init__(self, network: Network, servers: list[Server]) -> None:
        self.network = network
        self.servers = servers
        self.clients = [network.machine() for _ in range(CLIENTS)]
        self.detour = network.machine()

    @property
    def url(self) -> str:
        return self._url([f"{each.machine.address}:{each.port}" for each in self.servers])

    @property
    def url_via_detour(self) -> str:
        return self._url([f"{self.detour.address}:{each.port}" for each in self.servers])

    def _url(self, places: list[str]) -> str:
        if isinstance(self.servers[0], Etcd):
            return f"etcd://{','.join(places)}/storm"
        return f"postgresql://holdfast@{places[0]}/postgres?schema=storm&sslmode=disable"

    def open(self, *, via_detour: bool = False, timeout: float = TIMEOUT) -> ServedStore:
        url = self.url_via_detour if via_detour else self.url
        if url.startswith("etcd"):
            return EtcdStore(url, timeout=timeout)
        from holdfast.store.postgres import PostgresStore

        return PostgresStore(url, timeout=timeout)

    @contextlib.contextmanager
    def opened_from_outside(self) -> Iterator[ServedStore]:
        """The store as seen from the switch, with a generous timeout."""
        with entered(self.network.hub.namespace or ""), self.open(timeout=30.0) as store:
            yield store

    def wait_until_all_answer(self) -> None:
        end = time.monotonic() + PATIENCE
        with entered(self.network.hub.namespace or ""):
            while not all(each.answers() for each in self.servers):
                assert time.monotonic() < end, "a server did not start"
                self.revive()
                time.sleep(0.02)

    def revive(self) -> int:
        """Restart the servers that have exited, and count them. etcd before 3.5.5 crashes if a client hangs up
        while it reads: a bug of etcd, and one more fault to survive."""
        dead = [each for each in self.servers if each.process is None or each.process.poll() is not None]
        for each in dead:
            each.restart(wait=False)
        return len(dead)

    def leader(self) -> Server:
        """The leader of a cluster; otherwise, the only server."""
        with entered(self.network.hub.namespace or ""):
            for server in self.servers:
                if isinstance(server, Etcd) and server.leads():
                    return server
        return self.servers[0]

    def lose_answers(self, client: Machine) -> None:
        """Requests of this client arrive, but their answers are dropped."""
        for each in self._servers_and_detour:
            self.network.drop(each, client)

    def lose_requests(self, client: Machine) -> None:
        """Requests of this client are dropped."""
        for each in self._servers_and_detour:
            self.network.drop(client, each)

    def restore_requests(self) -> None:
        """Requests of all clients arrive again."""
        self.network.mend(*self._servers_and_detour)

    @property
    def _servers_and_detour(self) -> list[Machine]:
        return [*(each.machine for each in self.servers), self.detour]


@contextlib.contextmanager
def site_of(kind: str, network: Network, scratch: Path, *, options: Sequence[str] = ()) -> Iterator[Site]:
    """Running servers of this kind, and machines for clients, on a network. `options` are for etcd."""
    servers: list[Server] = []
    if kind == "postgresql":
        servers.append(Postgres(_created(scratch / "postgres"), network.machine(), durable=True))
    else:
        members = [_member(scratch, network.machine(), number, options) for number in range(3)]
        for member in members:
            member.peers = members
        servers += members
    made = Site(network, servers)
    try:
        for server in servers:
            server.start(wait=False)
        made.wait_until_all_answer()
        yield made
    finally:
        for server in servers:
            server.kill()


def _member(scratch: Path, machine: Machine, number: int, options: Sequence[str]) -> Etcd:
    quick = ("--heartbeat-interval", "30", "--election-timeout", "300", *options)
    return Etcd(_created(scratch / f"etcd-{number}"), machine, name=f"m{number}", options=quick, program=sound_etcd())


def _created(directory: Path) -> Path:
    directory.mkdir()
    return directory


# --- Clients --------------------------------------------------------------------------------------


class Diary:
    """A log of what one client did, written before and after each attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.unknown: list[tuple[int, str, str]] = []

    def note(self, number: int, outcome: str, what: str = "append") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([number, what, outcome]) + "\n")

    def resolve(self, was_made: Callable[[str], bool]) -> None:
        """Ask for unknown outcomes, until the server cannot be reached."""
        with contextlib.suppress(StoreUnavailable):
            while self.unknown:
                number, what, commit_id = self.unknown[-1]
                self.note(number, "done" if was_made(commit_id) else "E_NOT_MADE", what)
                self.unknown.pop()


def live(store: ServedStore, name: str, diary: Diary, over: Callable[[], bool]) -> None:
    """Append to a stream, and work under a lease, until the storm is over; resolve unknown outcomes."""
    leases = LeaseService(store, TRAIL)
    for number in itertools.count():
        if over():
            break
        attempt(diary, number, "append", lambda: append(store, name, number))  # noqa: B023
        if random.random() < 0.1:
            work_under_lease(store, leases, name, number, diary)
        diary.resolve(store.was_made)
        time.sleep(random.random() * 0.01)
    diary.resolve(partial(wait_for_outcome, store))
    store.close()


def attempt(diary: Diary, number: int, what: str, act: Callable[[], object]) -> bool:
    diary.note(number, "begun", what)
    try:
        act()
    except OutcomeUnknown as unknown:
        diary.note(number, "unknown", what)
        diary.unknown.append((number, what, unknown.commit_id))
        return False
    except Failure as failure:
        diary.note(number, failure.code, what)
        return False
    diary.note(number, "done", what)
    return True


def wait_for_outcome(store: ServedStore, commit_id: str) -> bool:
    """Whether a commit was made; waits without a time limit until the server can be reached."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            return store.was_made(commit_id)


def append(store: ServedStore, name: str, number: int) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        there = view.get(INDEX)
        count = 1 if there is None else there.number + 1
        put = (Create if there is None else Replace)(INDEX, Item(count))
        return Decision([put, Append(EVENTS, Event(number, name))], None)

    store.transact([INDEX, EVENTS], decide)


def work_under_lease(store: ServedStore, leases: LeaseService, name: str, number: int, diary: Diary) -> None:
    """Commit several times under one token, even if the lease may have been taken over by then."""
    try:
        lease = leases.acquire("main", leases.request(ttl=TTL)).lease
    except Failure:
        return
    for each in range(3):
        time.sleep(random.random() * 0.6 * TTL)
        what = f"{lease.fencing_token}.{each}"
        commit = lambda: commit_under_token(store, lease.lock_id, lease.fencing_token, f"{name}.{number}.{each}")  # noqa: B023, E731
        attempt(diary, number, what, commit)
    if random.random() < 0.5:
        with contextlib.suppress(Failure):
            leases.release("main", lease.lock_id)


def commit_under_token(store: ServedStore, lock_id: str, token: int, text: str) -> None:
    """Commit as protected work does: name the lease, and refuse if it is no longer the same one."""

    def decide(view: View, now: float) -> Decision[None]:
        lease = view.get(KEYS.lease)
        if lease is None or (lease.lock_id, lease.fencing_token) != (lock_id, token):
            raise FencingMismatch("the lease was taken over")
        return Decision([Append(LEDGER, Event(token, text))], None)

    named: list[Key[Any] | Stream[Any]] = [KEYS.lease, LEDGER]
    store.transact(named, decide)


class Crew:
    """The client processes, one on each machine. The first has a clock that is an hour off; the last takes the
    detour, so that most of the time one of its requests is in flight."""

    def __init__(self, workers: Workers, site: Site, diaries: Path) -> None:
        self._workers = workers
        self._site = site
        self._diaries = diaries
        self._over = mmap.mmap(-1, 1)
        self._generation = itertools.count()
        self._running: dict[int, Worker] = {}
        self._detour = workers.start(partial(_run_detour, site))
        assert self._detour.hear() == "open"

    def start(self, number: int) -> None:
        """Start a client on this machine; it replaces any earlier one."""
        site, over = self._site, self._over
        machine = site.clients[number]
        diary = self._diaries / f"client-{number}-{next(self._generation)}"

        def work(line: Line) -> None:
            enter(machine.namespace or "")
            real = time.time
            clock = (lambda: real() + AN_HOUR) if number == 0 else real
            with mock.patch("time.time", clock):
                store = site.open(via_detour=number == CLIENTS - 1)
                live(store, diary.name, Diary(diary), lambda: over[0] == 1)
            line.say("over")

        self._running[number] = self._workers.start(work)

    def kill(self, number: int) -> None:
        self._running[number].kill()
        self._running[number].wait()

    def stop(self, number: int) -> None:
        if sys.platform != "win32":
            os.kill(self._running[number].pid, signal.SIGSTOP)  # it may have been stopped already

    def resume(self, number: int) -> None:
        """Continue the client on this machine; without effect if it was killed since."""
        self._running[number].resume()

    def delay(self, seconds: float) -> None:
        """Set the delay of the detour, in each direction."""
        assert self._detour.ask(("delay", seconds)) == "done"

    def cut_answer(self, after: int | None) -> None:
        """Cut a connection of the detour when so many more bytes of answers have passed."""
        assert self._detour.ask(("cut_after", after)) == "done"

    def finish(self) -> None:
        """Tell the clients to stop, and wait for them."""
        self._over[0] = 1
        for each in self._running.values():
            assert each.hear() == "over"


def _run_detour(site: Site, line: Line) -> None:
    enter(site.detour.namespace or "")
    proxies = [
        Proxy(each.port, delay=DELAY, target=each.machine.address, listen=f"{site.detour.address}:{each.port}")
        for each in site.servers
    ]
    line.say("open")
    while True:
        name, value = line.wait()
        for each in proxies:
            setattr(each, name, value)
        line.say("done")


# --- Faults ---------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault: how it begins, how it ends, and for how many further faults it lasts."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]
    hold: int = 0


def faults(site: Site, crew: Crew) -> Iterator[Fault]:
    """An endless sequence of faults: rounds of all kinds, each in random order."""
    network = site.network
    kinds: list[Callable[[], Fault]] = [
        lambda: _cut_off("client cut off", network, random.choice(site.clients)),
        lambda: _cut_off("leader cut off", network, site.leader().machine),
        lambda: _killed("leader killed", [site.leader()]),
        lambda: _killed("any killed", [random.choice(site.servers)]),
        lambda: _killed("all killed", site.servers),
        lambda: _stopped(site.leader()),
        lambda: _client_killed(crew, random.randrange(CLIENTS)),
        lambda: _client_stopped(crew, random.randrange(CLIENTS)),
        lambda: _answer_cut(crew),
        lambda: _delayed(crew),
    ]
    if network.filters:
        kinds += [
            lambda: _answers_lost(site, random.choice(site.clients)),
            lambda: _answers_lost(site, site.clients[-1]),
            lambda: _requests_lost(site, random.choice(site.clients)),
            lambda: _separated(site),
            lambda: _one_way_between_servers(site),
        ]
    while True:
        random.shuffle(kinds)
        yield from (kind() for kind in kinds)


def _cut_off(name: str, network: Network, machine: Machine) -> Fault:
    return Fault(name, lambda: network.cut_off(machine), lambda: network.reconnect(machine))


def _killed(name: str, servers: list[Server]) -> Fault:
    def kill() -> None:
        for each in servers:
            each.kill()

    def start_again() -> None:
        for each in servers:
            each.start(wait=False)

    return Fault(name, kill, start_again)


def _stopped(server: Server) -> Fault:
    return Fault("leader stopped", server.pause, server.resume)


def _client_killed(crew: Crew, number: int) -> Fault:
    return Fault("client killed", lambda: crew.kill(number), lambda: crew.start(number))


def _client_stopped(crew: Crew, number: int) -> Fault:
    """It continues after its lease may have expired, and its turn has."""
    begin, end = partial(crew.stop, number), partial(crew.resume, number)
    return Fault("client stopped", begin, end, random.randrange(LONGEST_HOLD))


def _answer_cut(crew: Crew) -> Fault:
    """An answer to the client behind the detour, at any byte."""
    begin = partial(crew.cut_answer, random.randrange(1000))
    return Fault("answer cut", begin, partial(crew.cut_answer, None), 1)


def _delayed(crew: Crew) -> Fault:
    seconds = 0.05 + random.random() * 0.2
    return Fault("delayed", partial(crew.delay, seconds), partial(crew.delay, DELAY), 2)


def _answers_lost(site: Site, client: Machine) -> Fault:
    begin = partial(site.lose_answers, client)
    return Fault("answers lost", begin, partial(site.network.mend, client), random.randint(3, LONGEST_HOLD))


def _requests_lost(site: Site, client: Machine) -> Fault:
    begin = partial(site.lose_requests, client)
    return Fault("requests lost", begin, site.restore_requests, random.randrange(LONGEST_HOLD))


def _separated(site: Site) -> Fault:
    """One client and one server cannot reach each other; all other paths work."""
    client, server = random.choice(site.clients), random.choice(site.servers).machine
    begin = partial(site.network.separate, client, server)
    return Fault("separated", begin, partial(site.network.mend, client, server), 1)


def _one_way_between_servers(site: Site) -> Fault:
    """Packets from the leader are dropped: to the other members, or, without any, to all clients."""
    leader = site.leader()
    others = [each.machine for each in site.servers if each is not leader] or [*site.clients, site.detour]

    def begin() -> None:
        for each in others:
            site.network.drop(leader.machine, each)

    return Fault("leader not heard", begin, partial(site.network.mend, *others))


def inject(site: Site, crew: Crew, count: int) -> list[str]:
    """Inject this many faults, one after the other; some overlap. Return their names."""
    injected: list[str] = []
    lasting: list[tuple[int, Fault]] = []
    for number, fault in enumerate(itertools.islice(faults(site, crew), count)):
        fault.begin()
        injected.append(fault.name)
        time.sleep(0.05 + random.random() * 0.35)
        lasting.append((number + fault.hold, fault))
        for until, each in list(lasting):
            if until <= number:
                each.end()
                lasting.remove((until, each))
        died = site.revive()
        injected += ["died by itself"] * died
        if died or ("killed" in fault.name and fault.name != "client killed"):
            site.wait_until_all_answer()
        time.sleep(random.random() * 0.2)
    for _, each in lasting:
        each.end()
    site.revive()
    site.wait_until_all_answer()
    return injected


def storm(site: Site, diaries: Path, count: int) -> Totals:
    """Inject this many faults while clients work; then judge the result."""
    with Workers() as workers:
        crew = Crew(workers, site, diaries)
        for number in range(CLIENTS):
            crew.start(number)
        injected = inject(site, crew, count)
        crew.finish()
    assert len(injected) >= count
    with site.opened_from_outside() as store:
        totals = judge(store, diaries)
    assert totals.acknowledged > count, "too few commits were acknowledged"
    return totals


# --- The judge ------------------------------------------------------------------------------------


class Totals(NamedTuple):
    """Counts of what happened in a storm."""

    acknowledged: int
    unknown: int
    refused: int
    under_token: int
    tokens: int
    never_reported: int


def judge(store: Store, diaries: Path) -> Totals:
    """Assert that the store agrees with the outcomes that were reported to clients."""
    notes = [
        (path.name, *json.loads(line))
        for path in sorted(diaries.glob("client-*"))
        for line in path.read_text().splitlines()
    ]

    def noted(*outcomes: str) -> set[tuple[str, int, str]]:
        return {(name, number, what) for name, number, what, outcome in notes if outcome in outcomes}

    begun, unknown, done = noted("begun"), noted("unknown"), noted("done")
    known = noted(*{outcome for *_, outcome in notes} - {"begun", "unknown"})

    appended = [(each.record.text, each.record.number, "append") for each in store.entries(EVENTS)]
    assert len(appended) == len(set(appended)) == number_of(store, INDEX), "something was done twice"
    assert not {each for each in done if each[2] == "append"} - set(appended), "something was lost"
    assert not set(appended) & (known - done), "something was done that was said not to be"

    under = [(each.record.number, each.record.text) for each in store.entries(LEDGER)]
    tokens = [token for token, _ in under]
    assert tokens == sorted(tokens), "a stale token has committed"
    written = [(text.split(".")[0], int(text.split(".")[1]), f"{token}.{text[-1]}") for token, text in under]
    assert len(written) == len(set(written)), "something was done twice"
    assert not {each for each in done if each[2] != "append"} - set(written), "something was lost"
    assert not set(written) & (known - done), "something was done that was said not to be"

    given = [
        int(str(facts["fencing_token"]))
        for entry in verify(store.entries(TRAIL.stream))
        if (facts := entry.facts.get("new", entry.facts))
        and entry.event in ("lock_acquired", "lock_stolen")
        and isinstance(facts, dict)
    ]
    assert given == sorted(set(given)), "a token was given twice"
    return Totals(len(done), len(unknown), len(known - done), len(under), len(given), len(begun - known))
