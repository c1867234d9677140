"""Writers that meet: one, 8 and 32 processes that append to one ledger, or update one issue or one each.

The floor of an append is the same file made with bare calls, one process at a time under one flock. The floor of an
update is the same calls without any lock, which loses updates. SQLite (WAL, synchronous=FULL) is shown beside them. All
take turns in each round, and only the ratios of a round count. A wait is the time of one operation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from bench import issues, ledger
from bench.crew import Crew
from bench.measure import interleave, ratio, rotated
from bench.report import Column, Report, Table, at_least, at_most, number

PROCESSES = (1, 8, 32)
ONE = 1
MILLI = 1e3


class Size(NamedTuple):
    """How much to measure; durations in seconds."""

    rounds: int = 7
    seconds: float = 1.0


FULL = Size()
QUICK = Size(rounds=1, seconds=0.1)


class LockedAppends:
    """Bare calls that make one durable file, one process at a time."""

    name = "bare calls under one flock (floor)"

    def __init__(self, directory: Path) -> None:
        import fcntl

        self._flock, self._exclusive, self._unlock = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_UN
        self._directory = os.open(directory, os.O_RDONLY)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        self._content = msgspec.json.encode(ledger.EVENT) + b"\n"

    def append(self) -> None:
        self._flock(self._lock, self._exclusive)
        last = int(os.pread(self._lock, 20, 0) or b"0") + 1
        draft, name = f".event-{last:06d}.tmp", f"event-{last:06d}.json"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._directory)
        os.write(file, self._content)
        os.fsync(file)
        os.close(file)
        os.link(draft, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        os.unlink(draft, dir_fd=self._directory)
        os.fsync(self._directory)
        os.pwrite(self._lock, b"%d" % last, 0)
        self._flock(self._lock, self._unlock)


class Work(NamedTuple):
    """What the processes do, by whom, and the share of the floor (the first contender) that they must reach; `alone` is
    what one process reached before writers that meet shared their syncs, less 10 % for noise."""

    title: str
    kinds: tuple[Any, ...]
    share: float
    alone: float


APPENDS = Work("appends to one ledger", (LockedAppends, ledger.Ours, ledger.Sqlite), 1.2, 1.3)
SAME = Work("updates of one issue", (issues.BareFiles, issues.Ours, issues.Sqlite), 0.7, 0.37)
OWN = Work("updates of one issue each", (issues.BareFiles, issues.Ours, issues.Sqlite), 0.7, 0.37)


class Rate(NamedTuple):
    """Operations per second of all processes, and the median and the longest time of one."""

    per_second: float
    typical: float
    longest: float


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report, size = Report(), QUICK if quick else FULL
    if sys.platform == "win32":
        report.notes.append("writers: the floors need flock, and directories that can be synced; nothing was measured")
        return report
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as directory:
        for work in (APPENDS, SAME, OWN):
            _compare(work, Path(directory), size, report)
    return report


def _compare(work: Work, directory: Path, size: Size, report: Report) -> None:
    floor, ours = work.kinds[0].name, work.kinds[1].name
    table = Table(f"{work.title}, per second; medians of {size.rounds} times {size.seconds} s", [])
    table.rows = {kind.name: [] for kind in work.kinds}
    alone = 0.0
    for count in PROCESSES:
        print(f"writers: {work.title}, {count} ...", file=sys.stderr, flush=True)
        table.columns += [Column(f"{count} proc", number(",.0f")), Column("/ floor"), Column("ms", number(".1f"))]
        table.columns += [Column("longest", number(".0f"))]
        with Crew(count) as crew:
            found = interleave(
                {kind.name: _round(crew, work, kind, directory, size) for kind in work.kinds}, size.rounds
            )
        report.note_failures(work.title, found.failures)
        for name, row in table.rows.items():
            if not (name in found.series and floor in found.series):
                table.rows[name] = [*row, *[None] * 4]
                if name == ours:
                    report.targets.append(at_least(work.share, f"{work.title} by {count}", None))
                continue
            rates, base = found.series[name], found.series[floor]
            share = ratio([each.per_second for each in rates], [each.per_second for each in base])
            times = median(each.typical for each in rates) * MILLI, max(each.longest for each in rates) * MILLI
            table.rows[name] = [*row, median(each.per_second for each in rates), share, *times]
            if name == ours:
                alone = alone or median(each.per_second for each in rates)
                _judge(work, count, rates, share.median, alone, report)
    report.tables.append(table)


def _judge(work: Work, count: int, rates: list[Rate], share: float, alone: float, report: Report) -> None:
    if count == ONE:
        report.targets.append(at_least(work.alone, f"{work.title} by one alone ≥ {work.alone} x the floor", share))
        return
    what = f"{work.title} by {count}"
    report.targets.append(at_least(work.share, f"{what} ≥ {work.share} x the floor", share))
    together = median(each.per_second for each in rates) / alone
    report.targets.append(at_least(1.0, f"{what}: no fewer than by one alone", together, "x"))
    waited = median(each.longest / each.typical for each in rates)
    report.targets.append(at_most(5.0, f"{what}: nobody waits longer than 5 x the median", waited, "x"))


def _round(crew: Crew, work: Work, kind: Any, directory: Path, size: Size) -> Callable[[], Rate]:
    def once() -> Rate:
        place = Path(tempfile.mkdtemp(dir=directory))
        ids = [] if work is APPENDS else kind(place).make(crew.size)
        spans = crew.all_do(_prepare, kind, place, work is SAME, ids, seconds=size.seconds)
        times = [each for span in spans for each in span]
        return Rate(len(times) / max(map(sum, spans)), median(times), max(times))

    return once


def _prepare(kind: Any, place: Path, same: bool, ids: list[str]) -> Callable[[float], list[float]]:
    each = kind(place)
    issue = "" if not ids else ids[0] if same else rotated(ids, os.getpid())[0]

    def work(end_at: float) -> list[float]:
        times: list[float] = []
        while not times or times[-1] < end_at:
            times.append(monotonic())
            with suppress(json.JSONDecodeError, FileNotFoundError):  # races of the unsafe floor
                each.update(issue) if issue else each.append()
        times.append(monotonic())
        return [later - earlier for earlier, later in pairwise(times)]

    return work
