"""The file store: reads, commits, many processes, many documents; compared with SQLite and with bare calls.

The floor of a commit is the durable replacement of one file: write, fsync, rename, fsync of the
directory. SQLite runs with WAL and synchronous=FULL, which promises the same.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import ClassVar, NamedTuple

import msgspec

from bench.crew import Crew
from bench.measure import enough_times, interleave, ratio, seconds_each
from bench.report import Column, Report, Table, at_most, number
from holdfast.store.files import FileStore
from holdfast.store.model import Create, Decision, Family, Key, Replace, StructCodec, View

MICRO = 1e6
PROCESSES = (1, 4, 16)
SEVERAL = 3


class Size(NamedTuple):
    """How much to measure; durations in seconds."""

    commit_rounds: int = 101
    commit_seconds: float = 0.02
    read_rounds: int = 51
    crew_seconds: float = 1.0
    documents: int = 100_000


FULL = Size()
QUICK = Size(commit_rounds=5, read_rounds=5, crew_seconds=0.2, documents=2_000)


class Counter(msgspec.Struct):
    """The document that is incremented, padded to the size of a typical record."""

    n: int
    padding: str = "x" * 250


COUNTERS: Family[Counter] = Family("jit/issues", StructCodec(Counter))


class Contender(ABC):
    """Keeps named counters, and increments one or several together."""

    name: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def make(self, names: list[str]) -> None:
        """Create counters."""

    @abstractmethod
    def increment(self, names: list[str]) -> None:
        """Increment all of these, durably, all or none."""

    @abstractmethod
    def value(self, name: str) -> int:
        """Read a counter."""


class BareCalls(Contender):
    """The floor: just durable replacement, with no lock and no atomicity across documents."""

    name = "bare calls (floor)"

    def make(self, names: list[str]) -> None:
        for name in names:
            (self.directory / name).write_bytes(msgspec.json.encode(Counter(0)))

    def increment(self, names: list[str]) -> None:
        for name in names:
            path = os.path.join(self.directory, name)
            draft = f"{path}.{os.getpid()}.tmp"
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.write(fd, msgspec.json.encode(Counter(1)))
            os.fsync(fd)
            os.close(fd)
            os.replace(draft, path)
            directory = os.open(self.directory, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    def value(self, name: str) -> int:
        fd = os.open(os.path.join(self.directory, name), os.O_RDONLY)
        content = os.read(fd, 4096)
        os.close(fd)
        return msgspec.json.decode(content, type=Counter).n


class Ours(Contender):
    """`FileStore`."""

    name = "holdfast files"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.store = FileStore(directory, timeout=60.0)

    def make(self, names: list[str]) -> None:
        for start in range(0, len(names), 1000):
            keys = [COUNTERS.key(name) for name in names[start : start + 1000]]
            self.store.transact(keys, _creating(keys))

    def increment(self, names: list[str]) -> None:
        keys = [COUNTERS.key(name) for name in names]

        def decide(view: View, now: float) -> Decision[None]:
            counted = [(key, view.get(key)) for key in keys]
            return Decision([Replace(key, Counter(old.n + 1)) for key, old in counted if old], None)

        self.store.transact(keys, decide)

    def value(self, name: str) -> int:
        document = self.store.read(COUNTERS.key(name))
        assert document is not None
        return document.record.n


class Sqlite(Contender):
    """SQLite with WAL and synchronous=FULL."""

    name = "SQLite (WAL, FULL)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.connection = sqlite3.connect(directory / "counters.db", timeout=60.0, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("CREATE TABLE IF NOT EXISTS c (name TEXT PRIMARY KEY, content BLOB)")

    def make(self, names: list[str]) -> None:
        content = msgspec.json.encode(Counter(0))
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany("INSERT INTO c VALUES (?, ?)", [(name, content) for name in names])
        self.connection.execute("COMMIT")

    def increment(self, names: list[str]) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        for name in names:
            content = msgspec.json.encode(Counter(self.value(name) + 1))
            self.connection.execute("UPDATE c SET content = ? WHERE name = ?", (content, name))
        self.connection.execute("COMMIT")

    def value(self, name: str) -> int:
        with closing(self.connection.execute("SELECT content FROM c WHERE name = ?", (name,))) as rows:
            return msgspec.json.decode(rows.fetchone()[0], type=Counter).n


KINDS: tuple[type[Contender], ...] = (BareCalls, Ours, Sqlite)


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report, size = Report(), QUICK if quick else FULL
    if sys.platform == "win32":
        report.notes.append("store: the floor needs directories that can be synced; nothing was measured")
        return report
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as directory:
        contenders = {kind.name: kind(_made(Path(directory) / kind.__name__)) for kind in KINDS}
        names = [f"counter-{number}" for number in range(16)]
        for each in contenders.values():
            each.make(names)
        commits(contenders, names, size, report)
        reads(contenders, names, size, report)
        together(Path(directory), size, report)
        opening(_made(Path(directory) / "many"), size, report)
    return report


def commits(contenders: dict[str, Contender], names: list[str], size: Size, report: Report) -> None:
    """One process: a commit of one document, and of several."""
    _say("commits")
    table = Table(f"durable commits, one process; medians of {size.commit_rounds} rounds", [])
    table.rows = {name: [] for name in contenders}
    for count in (1, SEVERAL):
        series = _timed_rounds(contenders, names[:count], size)
        table.columns += [Column(f"{count} doc µs", number(".0f")), Column("/ floor")]
        for name, values in series.items():
            table.rows[name] += [median(values) * MICRO, ratio(values, series[BareCalls.name])]
        if count == 1:
            found = ratio(series[Ours.name], series[BareCalls.name]).median
            report.targets.append(at_most(1.3, "commit of one document ≤ 1.3 x its own system calls", found))
    report.tables.append(table)


def reads(contenders: dict[str, Contender], names: list[str], size: Size, report: Report) -> None:
    """One process: reading one document."""
    _say("reads")

    def sample(each: Contender) -> Callable[[], float]:
        cycle = _repeating(lambda: each.value(names[0]))
        times = enough_times(cycle, 0.002)
        return lambda: seconds_each(cycle, times)

    found = interleave({name: sample(each) for name, each in contenders.items()}, size.read_rounds)
    table = Table("reads of one document", [Column("reads/s", number(",.0f")), Column("time / floor")])
    for name, values in found.series.items():
        table.rows[name] = [1 / median(values), ratio(values, found.series[BareCalls.name])]
    report.tables.append(table)
    report.note_failures("reads", found.failures)


def together(directory: Path, size: Size, report: Report) -> None:
    """Several processes, all on one document or each on its own: commits per second in total."""
    columns = [Column(f"{count} proc {how}", number(",.0f")) for count in PROCESSES for how in ("same", "own")]
    table = Table("commits/s by several processes, all on the same document or each on its own", columns)
    table.rows = {kind.name: [] for kind in KINDS[1:]}
    for count in PROCESSES:
        _say(f"{count} processes")
        with Crew(count) as crew:
            for kind in KINDS[1:]:
                for same in (True, False):
                    place = _made(directory / f"{kind.__name__}-{count}-{same}")
                    kind(place).make([f"counter-{number}" for number in range(count)])
                    done = crew.all_do(_prepare, kind, place, count, same, seconds=size.crew_seconds)
                    table.rows[kind.name].append(sum(done) / size.crew_seconds)
                    _check_sum(kind(place), count, sum(done), report)
    report.tables.append(table)


def opening(directory: Path, size: Size, report: Report) -> None:
    """Open a store with many documents, and use one of them."""
    _say(f"{size.documents} documents")
    names = [f"counter-{number}" for number in range(size.documents)]
    Ours(directory).make(names)
    empty = _made(directory.parent / "few")
    Ours(empty).make(names[:1])
    table = Table(
        f"a new store object, one read and one commit; with 1 and with {size.documents:,} documents",
        [Column("ms", number(".2f")), Column("/ with 1")],
    )
    samples = {"1 document": empty, f"{size.documents:,} documents": directory}
    found = interleave({name: partial(_open_and_use, at) for name, at in samples.items()}, 31)
    base = found.series["1 document"]
    for name, values in found.series.items():
        table.rows[name] = [median(values) * 1000, ratio(values, base)]
    started = perf_counter()
    scanned = sum(1 for _ in Ours(directory).store.scan(COUNTERS))
    table.rows["scan of all"] = [(perf_counter() - started) * 1000, None]
    assert scanned == size.documents
    report.tables.append(table)


def _open_and_use(directory: Path) -> float:
    started = perf_counter()
    each = Ours(directory)
    each.value("counter-0")
    each.increment(["counter-0"])
    each.store.close()
    return perf_counter() - started


def _creating(keys: list[Key[Counter]]) -> Callable[[View, float], Decision[None]]:
    return lambda view, now: Decision([Create(key, Counter(0)) for key in keys], None)


def _prepare(kind: type[Contender], place: Path, count: int, same: bool) -> Callable[[float], int]:
    each = kind(place)
    name = "counter-0" if same else f"counter-{os.getpid() % count}"
    each.value(name)

    def work(end_at: float) -> int:
        done = 0
        while monotonic() < end_at:
            each.increment([name])
            done += 1
        return done

    return work


def _check_sum(each: Contender, count: int, expected: int, report: Report) -> None:
    found = sum(each.value(f"counter-{number}") for number in range(count))
    if found != expected:
        report.notes.append(f"{each.name}: {expected - found} of {expected} commits were lost")


def _timed_rounds(contenders: dict[str, Contender], names: list[str], size: Size) -> dict[str, list[float]]:
    def sample(each: Contender) -> Callable[[], float]:
        cycle = _repeating(lambda: each.increment(names))
        times = enough_times(cycle, size.commit_seconds)
        return lambda: seconds_each(cycle, times)

    return interleave({name: sample(each) for name, each in contenders.items()}, size.commit_rounds).series


def _repeating(act: Callable[[], object]) -> Callable[[int], None]:
    def cycle(times: int) -> None:
        for _ in range(times):
            act()

    return cycle


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _say(what: str) -> None:
    print(f"store: {what} ...", file=sys.stderr, flush=True)
