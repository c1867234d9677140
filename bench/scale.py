"""Commands on a repository and on one that is a hundred times as long, on the same server.

The cost of a command is its time from start to end, the start of Python included: what a user waits for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import NamedTuple

from bench.measure import interleave, ratio
from bench.report import Column, Report, Table, at_most, number
from bench.servers import MILLI, each_server
from bench.startup import holdfast_command
from holdfast.clock import format_instant
from holdfast.issues.creating import NewIssue
from holdfast.repository.ledgers import open_ledger
from holdfast.repository.opening import open_tracker
from holdfast.store.audit import AuditEntry, AuditTrail
from holdfast.store.model import Append, Decision, Store, Stream, View
from holdfast.store.served import ServedStore

LIMIT = 1.3
BATCHES = {"PostgreSQL": (500, 1000), "etcd": (20, 100)}
"""How many issues, and how many records, are written at once; etcd takes few with its default limits."""


class Size(NamedTuple):
    """How much the large repository has; the small one has a hundredth."""

    issues: int = 100_000
    events: int = 1_000_000
    entries: int = 1_000_000
    rounds: int = 21

    def hundredth(self) -> Size:
        return Size(self.issues // 100, self.events // 100, self.entries // 100, self.rounds)


FULL = Size()
QUICK = Size(issues=1000, events=2000, entries=2000, rounds=2)

COMMANDS: dict[str, list[str]] = {
    "ready": ["ready", "--limit", "20"],
    "issue list": ["issue", "list", "--limit", "20"],
    "issue claim-next": ["issue", "claim-next"],
    "blocked": ["blocked"],
    "prime": ["prime", "--actor", "agent:idle"],
    "who": ["who"],
    "ledger log": ["ledger", "log", "--limit", "20"],
    "ledger append": ["ledger", "append", '{"type": "note"}'],
    "audit": ["audit", "--limit", "20"],
    "lease renew": ["lease", "renew", "--ttl", "1h"],
}


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report, size = Report(), QUICK if quick else FULL
    command = holdfast_command(report)
    if command is None:
        return report
    for server, url, directory in each_server("scale", report):
        sizes = {"small": size.hundredth(), "large": size}
        small, large = (
            Place(command, server, directory, url.replace("bench", name), name, each) for name, each in sizes.items()
        )
        compare(server, small, large, report)
    return report


class Place:
    """A repository on a server, filled."""

    def __init__(self, command: list[str], server: str, directory: Path, url: str, name: str, size: Size) -> None:
        self.command, self.name, self.size, self.directory = command, name, size, directory / f"{server}-{name}"
        self.issues_at_once, self.at_once = BATCHES[server]
        self.environment = {**os.environ, "HOLDFAST_ACTOR": "agent:bench"}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.run(["init", str(self.directory), "--store", url], at=directory)
        self.run(["issue", "init"])
        self.run(["ledger", "init"])
        began = monotonic()
        self.fill()
        print(f"{server}, {name}: filled in {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        lock = self.run(["lease", "acquire", "--ttl", "1h", "--field", "lock_id"]).strip()
        self.environment["HOLDFAST_LOCK_ID"] = lock
        for each in COMMANDS.values():  # what a machine does once: its checkpoints
            self.run(each)
            self.run(each)

    def run(self, arguments: list[str], *, at: Path | None = None) -> str:
        """Run one command."""
        where = at or self.directory
        done = subprocess.run(
            [*self.command, *arguments], cwd=where, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ChildProcessError(f"`holdfast {' '.join(arguments)}` ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def seconds(self, arguments: list[str]) -> float:
        began = monotonic()
        self.run(arguments)
        return monotonic() - began

    def fill(self) -> None:
        tracker = open_tracker(self.directory, actor="agent:bench")
        for batch in batched(self.size.issues, self.issues_at_once):
            tracker.create_all([NewIssue(title=f"Work on part {each}") for each in batch])
        append_entries(tracker.store, self.size.entries, self.at_once)
        tracker.store.close()
        with closing(open_ledger(self.directory)) as opened:
            for batch in batched(self.size.events, self.at_once):
                opened.ledger.append_many([{"type": "note", "number": each} for each in batch])


def append_entries(store: Store, count: int, at_once: int) -> None:
    """Append sealed entries to the audit trail."""
    trail = AuditTrail()
    sealed, chain = Stream(trail.stream.name, trail.stream.codec, head=trail.head), trail.stream.chain
    assert isinstance(store, ServedStore)
    assert chain is not None
    store.seal(trail.stream)
    for batch in batched(count, at_once):

        def decide(view: View, now: float, batch: range = batch) -> Decision[None]:
            at = format_instant(now)
            entries = [AuditEntry(0, at, "measured", "agent:bench", {"number": each}, "") for each in batch]
            return Decision([Append(sealed, each.record) for each in chain(view, entries)], None)

        store.transact([sealed], decide)


def batched(count: int, at_once: int) -> Iterator[range]:
    return (range(start, min(count, start + at_once)) for start in range(0, count, at_once))


def compare(server: str, small: Place, large: Place, report: Report) -> None:
    """Run each command in both, in turns."""
    table = Table(
        f"{server}: start to end of a command with {large.size.issues:,} issues, {large.size.events:,} events and "
        f"{large.size.entries:,} audit entries, and with a hundredth; medians of {large.size.rounds} rounds",
        [Column("a hundredth, ms", number(".0f")), Column("ms", number(".0f")), Column("/ a hundredth")],
    )
    for name, arguments in COMMANDS.items():
        print(f"{server}: {name} ...", file=sys.stderr, flush=True)
        contenders = {each.name: partial(each.seconds, arguments) for each in (small, large)}
        found = interleave(contenders, large.size.rounds)
        report.note_failures(f"{server}, {name}", found.failures)
        short, long = (found.series.get(each.name) for each in (small, large))
        times = ratio(long, short) if short and long else None
        if short and long:
            table.rows[name] = [median(short) * MILLI, median(long) * MILLI, times]
        what = f"{server}: {name} at a hundred times the length ≤ {LIMIT} x"
        report.targets.append(at_most(LIMIT, what, times and times.median))
    report.tables.append(table)
