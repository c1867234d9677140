"""The ledger: durable appends, claims, many writers and replay, at sizes up to 100 000 events.

They are compared with SQLite with WAL and synchronous=FULL, which promises the same durability, and with
the floor: the bare calls that create one durable file (write, fsync, link, unlink, fsync of the directory).
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import ClassVar, NamedTuple

import msgspec

from bench.crew import Crew
from bench.measure import enough_times, interleave, ratio, seconds_each
from bench.report import Column, Report, Table, Value, at_least, at_most, number
from holdfast.fs import calls
from holdfast.ledger.log import Ledger
from holdfast.ledger.projection import ClaimProjection
from holdfast.ledger.service import Claims
from holdfast.store.files import FileStore

MICRO = 1e6
WRITERS = (1, 8, 32)
BATCH = 100
TIMEOUT = 60.0
EVENT = {
    "type": "node_measured",
    "timestamp": "2024-01-15T10:30:00.000000Z",
    "node_id": "1.2.3",
    "owner": "agent-uuid-1234",
    "expires_at": "2024-01-15T10:35:00.000000Z",
}


class Size(NamedTuple):
    """How much to measure; durations in seconds."""

    rounds: int = 51
    sample_seconds: float = 0.02
    claim_rounds: int = 31
    crew_seconds: float = 1.5
    events: tuple[int, ...] = (0, 1_000, 100_000)


FULL = Size()
QUICK = Size(rounds=5, claim_rounds=3, crew_seconds=0.2, events=(0, 100, 1_000))


class Contender(ABC):
    """A log to which events are appended."""

    name: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def fill(self, count: int) -> None:
        """Create the initial events, in any way."""

    @abstractmethod
    def append(self) -> None:
        """Append one event, durably."""

    @abstractmethod
    def append_many(self, count: int) -> None:
        """Append several events, durably, all or none."""

    @abstractmethod
    def replay(self) -> int:
        """Read all events; return their number."""


class Floor(Contender):
    """Just durable files: no lock, no order, no atomic batches."""

    name = "bare calls (floor)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._content = msgspec.json.encode(EVENT) + b"\n"
        self._last = 0

    def fill(self, count: int) -> None:
        _write_files(self.directory, count)
        self._last = count

    def append(self) -> None:
        self._last += 1
        path = os.path.join(self.directory, f"event-{self._last:06d}.json")
        draft = os.path.join(self.directory, f".event-{self._last:06d}.tmp")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(fd, self._content)
        os.fsync(fd)
        os.close(fd)
        os.link(draft, path)
        os.unlink(draft)
        directory = os.open(self.directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def append_many(self, count: int) -> None:
        """Use one sync for all contents and one for all names; not atomic."""
        directory = os.open(self.directory, os.O_RDONLY)
        numbers = self._next(count)
        for each in numbers:
            self._write(f".event-{each:06d}.tmp", directory)
        calls.sync_filesystem(directory)
        for each in numbers:
            os.rename(
                f".event-{each:06d}.tmp",
                f"event-{each:06d}.json",
                src_dir_fd=directory,
                dst_dir_fd=directory,
            )
        os.fsync(directory)
        os.close(directory)

    def _next(self, count: int) -> range:
        first, self._last = self._last + 1, self._last + count
        return range(first, first + count)

    def _write(self, name: str, directory: int) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory)
        os.write(fd, self._content)
        os.close(fd)

    def replay(self) -> int:
        count = 0
        for last in range(1, self._last + 1):
            with open(os.path.join(self.directory, f"event-{last:06d}.json"), "rb") as file:
                msgspec.json.decode(file.read())
            count += 1
        return count


class AllOrNone(Floor):
    """The bare calls of an atomic batch."""

    name = "bare calls, all or none"

    def append_many(self, count: int) -> None:
        """Write and sync an intent with the events; rename it before any of them, and remove it at the end."""
        path = os.path.join(self.directory, "intents")
        os.makedirs(path, exist_ok=True)
        intents = os.open(path, os.O_RDONLY)
        directory = os.open(self.directory, os.O_RDONLY)
        numbers = self._next(count)
        for each in numbers:
            self._write(f".event-{each:06d}.tmp", directory)
        fd = os.open(".intent.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=intents)
        os.write(fd, self._content * count)
        os.close(fd)
        calls.sync_filesystem(directory)
        calls.rename_noreplace(".intent.tmp", "intent.json", src_dir_fd=intents, dst_dir_fd=intents)
        os.fsync(intents)
        for each in numbers:
            names = f".event-{each:06d}.tmp", f"event-{each:06d}.json"
            calls.rename_noreplace(*names, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
        os.unlink("intent.json", dir_fd=intents)
        os.close(directory)
        os.close(intents)


class NeverSynced(Floor):
    """Files that are written under their final names and never synced: a power cut may tear them."""

    name = "bare files, never synced"

    def append_many(self, count: int) -> None:
        """Write the files only: no batch with one file per event can be faster."""
        directory = os.open(self.directory, os.O_RDONLY)
        for each in self._next(count):
            self._write(f"event-{each:06d}.json", directory)
        os.close(directory)


class Ours(Contender):
    """`Ledger` on files."""

    name = "holdfast ledger"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.store = FileStore(directory, timeout=TIMEOUT)
        self.ledger = Ledger(self.store, checkpoint_root=directory)

    def fill(self, count: int) -> None:
        (self.directory / "ledger").mkdir()
        _write_files(self.directory / "ledger", count)

    def append(self) -> None:
        self.ledger.append(EVENT)

    def append_many(self, count: int) -> None:
        self.ledger.append_many([EVENT] * count)

    def replay(self) -> int:
        return ClaimProjection(Ledger(self.store)).query(lambda state: state.sequence)


class Sqlite(Contender):
    """SQLite with WAL and synchronous=FULL."""

    name = "SQLite (WAL, FULL)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        path = directory / "events.db"
        self.connection = sqlite3.connect(path, timeout=TIMEOUT, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("CREATE TABLE IF NOT EXISTS e (n INTEGER PRIMARY KEY, content BLOB)")

    def fill(self, count: int) -> None:
        self._insert(count)

    def append(self) -> None:
        self._insert(1)

    def append_many(self, count: int) -> None:
        self._insert(count)

    def replay(self) -> int:
        rows = self.connection.execute("SELECT content FROM e ORDER BY n")
        return sum(1 for (content,) in rows if msgspec.json.decode(content))

    def _insert(self, count: int) -> None:
        content = msgspec.json.encode(EVENT)
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany("INSERT INTO e (content) VALUES (?)", [(content,)] * count)
        self.connection.execute("COMMIT")


KINDS: tuple[type[Contender], ...] = (Floor, Ours, Sqlite)


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report, size = Report(), QUICK if quick else FULL
    if sys.platform == "win32":
        report.notes.append("ledger: the floor needs directories that can be synced; nothing was measured")
        return report
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as place:
        directory = Path(place)
        filled = {count: _contenders(directory / str(count), count) for count in size.events}
        appends(filled, size, report)
        batches(filled[0], size, report)
        claims(filled, size, report)
        replays(filled[max(filled)], report)
        writers(directory, size, report)
    return report


def appends(filled: dict[int, dict[str, Contender]], size: Size, report: Report) -> None:
    """One writer: the cost of an append, by the number of events."""
    _say("appends")
    samples = {
        (name, count): _sampled(each.append, size.sample_seconds)
        for count, contenders in filled.items()
        for name, each in contenders.items()
    }
    found = interleave({f"{name} {count}": act for (name, count), act in samples.items()}, size.rounds)
    report.note_failures("appends", found.failures)
    least, most = min(filled), max(filled)
    table = Table(f"one durable append; medians of {size.rounds} rounds", [])
    for count in filled:
        table.columns += [Column(f"at {count:,} µs", number(".0f")), Column("/ floor")]
        for name in filled[count]:
            values, floor = found.series[f"{name} {count}"], found.series[f"{Floor.name} {count}"]
            cells: list[Value] = [median(values) * MICRO, ratio(values, floor)]
            table.rows.setdefault(name, []).extend(cells)
    report.tables.append(table)
    first, last = found.series[f"{Ours.name} {least}"], found.series[f"{Ours.name} {most}"]
    floor = found.series[f"{Floor.name} {least}"]
    text = f"append at event {most:,} ≤ 1.2 x append at event 1"
    report.targets.append(at_most(1.2, text, ratio(last, first).median))
    report.targets.append(at_most(1.5, "append ≤ 1.5 x the floor", ratio(first, floor).median))


def batches(contenders: dict[str, Contender], size: Size, report: Report) -> None:
    """One writer: the cost of an event in a batch and alone, and of the bare calls of such a batch."""
    _say("batches")
    compared = dict(contenders)
    for kind in (AllOrNone, NeverSynced):
        place = contenders[Floor.name].directory.parent / kind.__name__
        place.mkdir()
        compared[kind.name] = kind(place)
    samples: dict[str, Callable[[], float]] = {}
    for name, each in compared.items():
        samples[f"{name} alone"] = _sampled(each.append, size.sample_seconds)
        samples[name] = partial(_batch, each)
    found = interleave(samples, size.rounds)
    report.note_failures("batches", found.failures)
    columns = [Column("µs each", number(".0f")), Column("alone / in a batch"), Column("/ bare, all or none")]
    table = Table(f"events in batches of {BATCH}", columns)
    cheaper = {name: ratio(found.series[f"{name} alone"], found.series[name]) for name in compared}
    dearer = {name: ratio(found.series[name], found.series[AllOrNone.name]) for name in compared}
    for name in compared:
        table.rows[name] = [median(found.series[name]) * MICRO, cheaper[name], dearer[name]]
    report.tables.append(table)
    text = f"append_many of {BATCH} at least 20 x cheaper per event than single appends"
    report.targets.append(at_least(20, text, cheaper[Ours.name].median))
    text = f"append_many of {BATCH} ≤ 1.3 x the bare calls of the same files"
    report.targets.append(at_most(1.3, text, dearer[Ours.name].median))


def claims(filled: dict[int, dict[str, Contender]], size: Size, report: Report) -> None:
    """A new object, a claim and its release, with a warm checkpoint."""
    _say("claims")
    places = {count: contenders[Ours.name].directory for count, contenders in filled.items()}
    for place in places.values():
        _claim_and_release(place)  # leaves a checkpoint
    found = interleave({str(count): partial(_claim_and_release, at) for count, at in places.items()}, size.claim_rounds)
    base = found.series[str(min(places))]
    table = Table("open, claim and release, with a warm checkpoint", [Column("ms", number(".2f")), Column("/ empty")])
    for count in places:
        values = found.series[str(count)]
        table.rows[f"{count:,} events"] = [median(values) * 1000, ratio(values, base)]
    report.tables.append(table)
    grown = ratio(found.series[str(max(places))], base).median
    text = f"claim + release at {max(places):,} events ≤ 2 x that of an empty ledger"
    report.targets.append(at_most(2.0, text, grown))


def replays(contenders: dict[str, Contender], report: Report) -> None:
    """Reading everything and folding it, without a checkpoint."""
    _say("replay")
    found = interleave({name: partial(_rate, each) for name, each in contenders.items()}, 3)
    table = Table("replay without a checkpoint", [Column("events/s", number(",.0f"))])
    for name, values in found.series.items():
        table.rows[name] = [median(values)]
    report.tables.append(table)
    report.note_failures("replay", found.failures)
    ours = median(found.series[Ours.name])
    report.targets.append(at_least(50_000, "cold replay ≥ 50 000 events/s", ours, "events/s"))


def writers(directory: Path, size: Size, report: Report) -> None:
    """Several processes: appends per second in total."""
    columns = [Column(f"{count} writers", number(",.0f")) for count in WRITERS]
    table = Table("durable appends/s by several processes", columns)
    for count in WRITERS:
        _say(f"{count} writers")
        with Crew(count) as crew:
            for kind in (Ours, Sqlite):
                place = directory / f"{kind.__name__}-{count}"
                place.mkdir()
                kind(place)
                done = crew.all_do(_prepare, kind, place, seconds=size.crew_seconds)
                table.rows.setdefault(kind.name, []).append(sum(done) / size.crew_seconds)
                read_back = kind(place).replay()
                if read_back != sum(done):
                    report.notes.append(f"{kind.name}: {sum(done)} were appended, {read_back} were found")
    report.tables.append(table)


def _contenders(directory: Path, count: int) -> dict[str, Contender]:
    _say(f"filling {count}")
    directory.mkdir()
    made: dict[str, Contender] = {}
    for kind in KINDS:
        place = directory / kind.__name__
        place.mkdir()
        made[kind.name] = kind(place)
        made[kind.name].fill(count)
    return made


def _write_files(directory: Path, count: int) -> None:
    content = msgspec.json.encode({**EVENT, "type": "note"}) + b"\n"
    for each in range(1, count + 1):
        fd = os.open(os.path.join(directory, f"event-{each:06d}.json"), os.O_WRONLY | os.O_CREAT)
        os.write(fd, content)
        os.close(fd)
    if sys.platform != "win32":
        os.sync()


def _sampled(act: Callable[[], None], seconds: float) -> Callable[[], float]:
    def cycle(times: int) -> None:
        for _ in range(times):
            act()

    times = enough_times(cycle, seconds)
    return lambda: seconds_each(cycle, times)


def _batch(each: Contender) -> float:
    started = perf_counter()
    each.append_many(BATCH)
    return (perf_counter() - started) / BATCH


def _claim_and_release(directory: Path) -> float:
    started = perf_counter()
    with FileStore(directory, timeout=TIMEOUT) as store:
        Claims(Ledger(store, checkpoint_root=directory)).claim("7.7", "bench").release()
    return perf_counter() - started


def _rate(each: Contender) -> float:
    started = perf_counter()
    return each.replay() / (perf_counter() - started)


def _prepare(kind: type[Contender], place: Path) -> Callable[[float], int]:
    each = kind(place)

    def work(end_at: float) -> int:
        done = 0
        while monotonic() < end_at:
            each.append()
            done += 1
        return done

    return work


def _say(what: str) -> None:
    print(f"ledger: {what} ...", file=sys.stderr, flush=True)
