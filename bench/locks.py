"""File locks: cost, throughput under contention, fairness, hand-over, and CPU time of waiting."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import contention
from bench.contenders import OURS, PEERS, Contender, Flock, Holdfast, HoldfastFair, Kind
from bench.crew import Crew
from bench.measure import enough_times, interleave, jain, percentile, ratio, seconds_each
from bench.report import Column, Report, Table, at_least, at_most, below, number

MICRO, MILLI = 1e6, 1e3
LATE = 0.02
FLOOR, PLAIN, FAIR = Flock.name, Holdfast.name, HoldfastFair.name


class Size(NamedTuple):
    """How much to measure; durations in seconds, for each contender and round."""

    processes: int = 8
    hold: float = 0.001
    cycle_rounds: int = 301
    cycle_seconds: float = 0.001
    contend_rounds: int = 5
    contend_seconds: float = 0.6
    turn_rounds: int = 3
    turn_seconds: float = 1.2
    hand_over_rounds: int = 16
    hand_over_seconds: float = 0.2
    wait_seconds: float = 3.0


FULL = Size()
QUICK = Size(
    cycle_rounds=51,
    contend_rounds=1,
    contend_seconds=0.3,
    turn_rounds=1,
    turn_seconds=0.5,
    hand_over_rounds=3,
    wait_seconds=1.0,
)


@dataclass(frozen=True)
class Contest:
    """The contenders, the size and the directory of the measurements, and their report."""

    kinds: Sequence[Kind]
    size: Size
    directory: Path
    report: Report

    def present(self, found: Mapping[str, object]) -> list[Kind]:
        """The contenders that finished."""
        return [kind for kind in self.kinds if kind.name in found]


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report = Report()
    if not Flock.is_available():
        report.notes.append("locks: there is no flock here to compare with; nothing was measured")
        return report
    if missing := [kind.name for kind in PEERS if not kind.is_available()]:
        report.notes.append(f"not installed, so not compared: {', '.join(missing)}")
    kinds: list[Kind] = [Flock, *OURS, *(kind for kind in PEERS if kind.is_available())]
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        measure(Contest(kinds, QUICK if quick else FULL, Path(directory), report))
    return report


def measure(contest: Contest) -> None:
    """Run the parts one after the other."""
    _say("acquire and release")
    uncontended(contest)
    _say(f"starting {contest.size.processes} processes")
    with Crew(contest.size.processes) as crew:
        _say("increments under contention")
        throughput(contest, crew)
        _say("fairness")
        fairness(contest, crew)
        _say("hand-over")
        hand_over(contest, crew)
        if crew.latest_start > LATE:
            late = f"{crew.latest_start * MILLI:.0f} ms"
            contest.report.notes.append(f"a process began {late} after the others: this machine is too busy")


def _say(what: str) -> None:
    print(f"locks: {what} ...", file=sys.stderr, flush=True)


# --- 1. Uncontended ---------------------------------------------------------------------------------


def uncontended(contest: Contest) -> None:
    """Acquire and release in one process, exclusive and shared."""
    table = Table(f"acquire + release, uncontended; medians of {contest.size.cycle_rounds} rounds", [])
    table.rows = {kind.label(): [] for kind in contest.kinds}
    for mode in ("exclusive", "shared"):
        series = _cycles(contest, mode)
        table.columns += [Column(f"{mode} µs", number(".2f")), Column(f"{mode} / floor")]
        for kind in contest.kinds:
            values = series.get(kind.name)
            table.rows[kind.label()] += (
                [median(values) * MICRO, ratio(values, series[FLOOR])] if values else [None, None]
            )
        _judge_cycles(mode, series, contest.report)
    contest.report.tables.append(table)


def _cycles(contest: Contest, mode: str) -> dict[str, list[float]]:
    timers = {
        kind.name: _CycleTimer(
            partial(kind, str(contest.directory / f"{kind.__name__}.{mode}"), shared=mode == "shared"),
            contest.size.cycle_seconds,
        )
        for kind in contest.kinds
    }
    rounds = interleave(timers, contest.size.cycle_rounds)
    contest.report.note_failures(f"uncontended, {mode}", rounds.failures)
    return rounds.series


class _CycleTimer:
    """Returns the seconds of one acquire and release; the first call chooses the sample size."""

    def __init__(self, make: partial[Contender], seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._lock: Contender | None = None
        self._times = 0

    def __call__(self) -> float:
        if self._lock is None:
            self._lock = self._make()
            self._times = enough_times(self._lock.cycle, self._seconds)
        return seconds_each(self._lock.cycle, self._times)


def _judge_cycles(mode: str, series: Mapping[str, list[float]], report: Report) -> None:
    ours = series.get(PLAIN)
    to_floor = ratio(ours, series[FLOOR]).median if ours else None
    report.targets.append(at_most(2, f"{PLAIN}, {mode}: acquire + release at most 2 times the floor", to_floor))
    for peer in PEERS:
        theirs = series.get(peer.name)
        to_peer = ratio(ours, theirs).median if ours and theirs else None
        report.targets.append(below(1, f"{PLAIN}, {mode}: takes less than {peer.name} (1)", to_peer))


# --- 2. Throughput under contention -----------------------------------------------------------------


def throughput(contest: Contest, crew: Crew) -> None:
    """Increments of a shared number, and whether any were lost."""
    size = contest.size
    rounds = interleave(
        {
            kind.name: partial(contention.contend, crew, kind, contest.directory, size.contend_seconds)
            for kind in contest.kinds
        },
        size.contend_rounds,
    )
    contest.report.note_failures("contention", rounds.failures)
    speeds = {name: [each.per_second for each in results] for name, results in rounds.series.items()}
    lost = {name: sum(each.lost for each in results) for name, results in rounds.series.items()}
    table = Table(
        f"{crew.size} processes, no hold; medians of {size.contend_rounds} times {size.contend_seconds} s",
        [Column("increments/s", number(",.0f")), Column("/ floor"), Column("lost", number("d"))],
    )
    for kind in contest.present(speeds):
        values = speeds[kind.name]
        table.rows[kind.label()] = [median(values), ratio(values, speeds[FLOOR]), lost[kind.name]]
    contest.report.tables.append(table)
    _judge_throughput(speeds, lost, contest.report)


def _judge_throughput(speeds: Mapping[str, list[float]], lost: Mapping[str, int], report: Report) -> None:
    peers = [speeds[kind.name] for kind in PEERS if kind.name in speeds]
    ours = speeds.get(PLAIN)
    to_best = ratio(ours, max(peers, key=median)).median if ours and peers else None
    report.targets += [
        at_least(2, f"{PLAIN}: increments/s at least 2 times those of the best peer", to_best),
        at_most(0, f"{PLAIN}: no increment lost", lost.get(PLAIN)),
        at_most(0, f"{FAIR}: no increment lost", lost.get(FAIR)),
    ]


# --- 3. Fairness ------------------------------------------------------------------------------------


def fairness(contest: Contest, crew: Crew) -> None:
    """How evenly the processes get the lock, and the longest wait."""
    size = contest.size
    rounds = interleave(
        {
            kind.name: partial(contention.take_turns, crew, kind, contest.directory, size.turn_seconds, size.hold)
            for kind in contest.kinds
        },
        size.turn_rounds,
    )
    contest.report.note_failures("fairness", rounds.failures)
    shares = {name: _share(results) for name, results in rounds.series.items()}
    table = Table(
        f"{crew.size} processes, {size.hold * MILLI:g} ms holds; "
        f"the median of {size.turn_rounds} times {size.turn_seconds} s",
        [
            Column("most : least"),
            Column("max/min", number(".2f")),
            Column("Jain", number(".3f")),
            Column("worst wait ms", number(".0f")),
        ],
    )
    for kind in contest.present(shares):
        share = shares[kind.name]
        most_and_least = f"{max(share.counts)} : {min(share.counts)}"
        table.rows[kind.label()] = [
            most_and_least,
            _spread(share.counts),
            jain(share.counts),
            share.worst_wait * MILLI,
        ]
    contest.report.tables.append(table)
    fair = shares.get(FAIR)
    contest.report.targets += [
        at_most(1.5, f"{FAIR}: max/min at most 1.5", fair and _spread(fair.counts)),
        at_most(0.2, f"{FAIR}: no wait over 0.2 s", fair and fair.worst_wait, "s"),
    ]


class _Share(NamedTuple):
    """The counts of the median round, by evenness; the longest wait of all rounds."""

    counts: list[int]
    worst_wait: float


def _share(rounds: Sequence[Sequence[contention.Turns]]) -> _Share:
    counts = sorted(([each.taken for each in turns] for turns in rounds), key=_spread)
    return _Share(counts[len(counts) // 2], max(each.longest_wait for turns in rounds for each in turns))


def _spread(counts: Sequence[int]) -> float:
    return max(counts) / min(counts) if min(counts) else math.inf


# --- 4. Hand-over, and the cost of waiting ----------------------------------------------------------


def hand_over(contest: Contest, crew: Crew) -> None:
    """The time from the release in one process to the grant in another, and the CPU time of a long wait."""
    size = contest.size
    rounds = interleave(
        {
            kind.name: partial(contention.hand_over, crew, kind, contest.directory, size.hand_over_seconds)
            for kind in contest.kinds
        },
        1 + size.hand_over_rounds,
    )
    contest.report.note_failures("hand-over", rounds.failures)
    # Drop the first round: loading modules at the first wait is not part of a hand-over.
    series = {name: batches[1:] for name, batches in rounds.series.items()}
    latencies = {name: [each for batch in batches for each in batch] for name, batches in series.items()}
    per_round = {name: [median(batch) for batch in batches] for name, batches in series.items()}
    kinds = contest.present(series)
    costs = contention.cost_of_waiting(crew, kinds, contest.directory, size.wait_seconds)
    table = Table(
        "hand-over to a process that waits with a time limit",
        [
            Column("p50 ms", number(".3f")),
            Column("p99 ms", number(".3f")),
            Column("p50 / floor"),
            Column("samples", number("d")),
            Column("CPU ms per s of waiting", number(".2f")),
        ],
    )
    for kind in kinds:
        table.rows[kind.label()] = [
            median(latencies[kind.name]) * MILLI,
            percentile(latencies[kind.name], 99) * MILLI,
            ratio(per_round[kind.name], per_round[FLOOR]),
            len(latencies[kind.name]),
            costs[kind.name] * MILLI,
        ]
    contest.report.tables.append(table)
    _judge_hand_over(latencies, costs, contest.report)


def _judge_hand_over(latencies: Mapping[str, list[float]], costs: Mapping[str, float], report: Report) -> None:
    for name in (PLAIN, FAIR):
        measured = name in latencies
        soon = median(latencies[name]) * MILLI if measured else None
        cost = costs[name] * MILLI if measured else None
        report.targets += [
            at_most(0.3, f"{name}: hand-over p50 at most 0.3 ms", soon, "ms"),
            at_most(5, f"{name}: at most 5 ms CPU per second of waiting", cost, "ms"),
        ]
