"""A soak: clients work on a server for a long time while faults happen, and nothing grows but the records themselves.

Every figure is sampled from outside. Its growth is the slope of a straight line through the samples after the first
third, times the time that they span. It must stay below a bound that consists of a part for each commit in that time
and an allowance for noise. So a leak is found as soon as it exceeds the allowance, and the longer the soak, the smaller
the leak that is found. `HOLDFAST_SOAK` is the duration in seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest

from holdfast.errors import Failure
from holdfast.store import etcd
from holdfast.store import postgres_sql as statements
from holdfast.store.etcd import EtcdEngine
from holdfast.store.etcd_gateway import Gateway, encoded, end_of
from holdfast.store.served import ServedStore
from holdfast.testing.backend import INDEX
from proof.effort import SHARE, tried
from tests.locks.workers import Line, Worker, Workers
from tests.store.server_storm import CLIENTS, Crew, Diary, Site, append, attempt, inject, judge, live, site_of
from tests.support.machines import Network, entered
from tests.support.servers import enter

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here")

from holdfast.store import postgres  # noqa: E402
from holdfast.store.postgres_connections import Connections  # noqa: E402

if sys.platform != "linux":
    pytest.skip("the storm needs the network namespaces of Linux", allow_module_level=True)

SECONDS = float(os.environ.get("HOLDFAST_SOAK", max(8.0, 180.0 * SHARE)))
RETENTION = 30.0
"""Seconds for which the notes of commits are kept: longer than any fault, since lost answers are looked up there."""
CALM = 3.0
"""Seconds without faults, between two rounds of them."""
KINDS = ("postgresql", "etcd")
COMPACTING = ("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10s")


class Bound(NamedTuple):
    """How much a figure may grow: for each commit, and in any case."""

    per_commit: float
    allowance: float


BOUNDS = {
    "documents": Bound(0.01, 20),
    "notes of commits": Bound(0.1, 150),
    "loose records": Bound(0.1, 400),  # one commit in 128 seals them
    "other keys": Bound(0.01, 20),
    "watchers": Bound(0.01, 10),
    "bytes of documents": Bound(20, 4 << 20),
    "bytes of notes": Bound(20, 4 << 20),
    "bytes in use": Bound(4000, 16 << 20),  # of etcd: two records in each commit, and the history since a compaction
    "connections": Bound(0.001, 6),
    "descriptors of servers": Bound(0.001, 60),  # of three, each with connections of clients that were cut off
    "descriptors of a client": Bound(0.001, 6),
    "memory of a client": Bound(64, 8 << 20),
}
Sample = dict[str, float]
Work = Callable[[ServedStore, str, Diary, Callable[[], bool]], object]


def growth(samples: list[Sample], name: str) -> float:
    """The slope of a figure after the first third of the samples, times the time that they span."""
    rest = samples[len(samples) // 3 :]
    times, values = [each["time"] for each in rest], [each[name] for each in rest]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    slope = sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True)) / spread
    return slope * (times[-1] - times[0])


def leaks(samples: list[Sample], retention: float) -> dict[str, tuple[float, float]]:
    """The figures that grew beyond their bounds: by how much, and the bound. Notes of commits grow with the rate of
    commits, so they are judged only if the samples span some times their retention."""
    rest = samples[len(samples) // 3 :]
    commits = rest[-1]["commits"] - rest[0]["commits"]
    is_long = rest[-1]["time"] - rest[0]["time"] >= 10 * retention
    found = {}
    for name, bound in BOUNDS.items():
        if name in rest[0] and (is_long or "notes" not in name):
            most = bound.per_commit * commits + bound.allowance
            if (grown := growth(samples, name)) > most:
                found[name] = (grown, most)
    return found


# --- Samples --------------------------------------------------------------------------------------

IN_POSTGRES = {
    "documents": "(SELECT count(*) FROM storm.documents)",
    "notes of commits": "(SELECT count(*) FROM storm.commits)",
    "watchers": "(SELECT count(*) FROM storm.watchers)",
    "loose records": "(SELECT count(*) FROM storm.entries WHERE substr(stream, length(stream)) = '~')",
    "bytes of documents": "pg_total_relation_size('storm.documents')",
    "bytes of notes": "pg_total_relation_size('storm.commits')",
    "connections": "(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')",
}


def sample_of_postgres(site: Site) -> Sample:
    with psycopg.connect(site.url.partition("?")[0], connect_timeout=2, autocommit=True) as connection:
        # In the place of the server's own vacuum, which the kills keep from counting the changes.
        connection.execute("VACUUM storm.documents, storm.commits")
        found = connection.execute(f"SELECT {', '.join(IN_POSTGRES.values())}").fetchone()
    return dict(zip(IN_POSTGRES, found or (), strict=True))


def sample_of_etcd(engine: EtcdEngine) -> Sample:
    def count(prefix: bytes) -> int:
        request = {"key": encoded(prefix), "range_end": encoded(end_of(prefix)), "count_only": True}
        return int(engine.gateway.ask("/v3/kv/range", request).get("count", 0))

    streams, documents, notes, total = (count(b"storm/" + each) for each in (b"s/", b"d/", b"c/", b""))
    loose = sum(count(b"storm/s/" + stream + b"/~") for stream in (b"jvs/audit", b"jit/events", b"ledger/events"))
    space = engine.space()
    return {
        "documents": documents,
        "notes of commits": notes,
        "loose records": loose,
        "other keys": total - streams - documents - notes,
        "bytes in use": space.in_use,
    }


def sample(site: Site, client: Worker, began: float) -> Sample:
    """All figures now. Raises if the server cannot be reached."""
    with site.opened_from_outside() as store:
        index = store.read(INDEX)
        found: Sample = {"time": time.monotonic() - began, "commits": index.record.number if index else 0}
        engine: Any = store.engine
        found |= sample_of_etcd(engine) if isinstance(engine, EtcdEngine) else {}
    if "documents" not in found:
        with entered(site.network.hub.namespace or ""):
            found |= sample_of_postgres(site)
    process = psutil.Process(client.pid)
    found |= {"descriptors of a client": process.num_fds(), "memory of a client": process.memory_info().rss}
    servers = [psutil.Process(each.process.pid) for each in site.servers if each.process is not None]
    found["descriptors of servers"] = sum(each.num_fds() for each in servers)
    return found


class Sampler:
    """Samples all figures in a thread. While the server cannot be reached, there is no sample."""

    def __init__(self, site: Site, client: Worker) -> None:
        self.samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(site, client))
        self._thread.start()

    def _work(self, site: Site, client: Worker) -> None:
        began = time.monotonic()
        while not self._ended.wait(max(0.2, SECONDS / 300)):
            with contextlib.suppress(Failure, psycopg.Error, psutil.Error):
                self.samples.append(sample(site, client, began))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


# --- The soak -------------------------------------------------------------------------------------


def steady(site: Site, path: Path, work: Work, line: Line) -> None:
    """A client that no fault stops or kills."""
    enter(site.network.hub.namespace or "")
    with site.open() as store:
        work(store, path.name, Diary(path), line.has_news)
    line.say("over")


def append_only(store: ServedStore, name: str, diary: Diary, over: Callable[[], bool]) -> None:
    """Instead of `live`: as fast as possible."""
    for number in itertools.count():
        if over():
            return
        attempt(diary, number, "append", lambda: append(store, name, number))  # noqa: B023


@contextlib.contextmanager
def forgetting(after: float) -> Iterator[None]:
    """Let clients that start now forget the notes of commits after so many seconds, instead of a week."""
    soon = statements.FORGET.replace("7 days", f"{after} seconds")
    with (
        mock.patch.object(statements, "FORGET", soon),
        mock.patch.object(postgres, "_FORGET_EVERY", 20),
        mock.patch.object(etcd, "_FORGET_EVERY", 20),
        mock.patch.object(etcd, "_FORGET_AFTER", after),
    ):
        yield


def soak(site: Site, diaries: Path, seconds: float, *, retention: float, faults: bool = True) -> list[Sample]:
    """Let clients work for so long while faults happen; judge the records, and return the samples."""
    end = time.monotonic() + seconds
    with forgetting(retention), Workers() as workers:
        crew = Crew(workers, site, diaries)
        for number in range(CLIENTS if faults else 0):
            crew.start(number)
        work = live if faults else append_only
        client = workers.start(lambda line: steady(site, diaries / "client-steady", work, line))
        sampler = Sampler(site, client)
        try:
            while time.monotonic() < end:
                if faults:
                    tried["faults in a soak"] += len(inject(site, crew, 4))
                time.sleep(CALM / 3 if faults and seconds < 60 else CALM)
        finally:
            sampler.close()
        client.say("end")
        assert client.hear() == "over"
        crew.finish()
    with site.opened_from_outside() as store:
        judge(store, diaries)
    tried["samples of a soak"] += len(sampler.samples)
    return sampler.samples


@pytest.mark.timeout(int(2 * SECONDS) + 600)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows_but_the_records(kind: str, network: Network, tmp_path: Path, server_scratch: Path) -> None:
    with site_of(kind, network, server_scratch, options=COMPACTING) as site:
        samples = soak(site, tmp_path, SECONDS, retention=RETENTION)
    for name in BOUNDS.keys() & samples[0].keys():
        print(f"{kind}: {name}: {samples[0][name]:.0f} → {samples[-1][name]:.0f}, growth {growth(samples, name):.1f}")  # noqa: T201
    print(f"{kind}: {samples[-1]['commits']:.0f} commits, {len(samples)} samples")  # noqa: T201
    assert leaks(samples, RETENTION) == {}


def never_forget(*_: object) -> None:
    """Leave the notes of old commits where they are."""


kept: list[Any] = []
_uses = itertools.count()


def keep_some(give_back: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """One connection in ten is neither given back nor closed."""
    return lambda self, connection: kept.append(connection) if next(_uses) % 10 == 0 else give_back(self, connection)


PLANTED: dict[str, list[tuple[Any, str, Any]]] = {
    "notes of commits": [(postgres.PostgresEngine, "_forget", never_forget), (EtcdEngine, "_forget", never_forget)],
    "descriptors of a client": [(each, "_give_back", keep_some(each._give_back)) for each in (Connections, Gateway)],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("figure", PLANTED)
def test_a_planted_leak_is_found(
    figure: str, kind: str, network: Network, tmp_path: Path, server_scratch: Path
) -> None:
    with site_of(kind, network, server_scratch, options=COMPACTING) as site, contextlib.ExitStack() as patches:
        for where, name, planted in PLANTED[figure]:
            patches.enter_context(mock.patch.object(where, name, planted))
        samples = soak(site, tmp_path, 20.0, retention=0.9, faults=False)
    assert figure in leaks(samples, 0.9)
