"""The duration of short commands, compared with an interpreter that does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.measure import interleave, ratio
from bench.report import Column, Report, Table, at_most, below, number

ROUNDS, QUICK_ROUNDS = 25, 3
MILLI = 1e3

FLOOR = "python -c pass"
CHILD = "true"
IMPORT = "import holdfast"
RUN = "lock run"
GUARD, GUARD_REFUSING = "guard (allowed)", "guard (refused)"


LIMITS = {
    IMPORT: 2.0,
    "--version": 5.0,
    "--help": 6.0,
    "lock status": 6.0,
    RUN: 6.0,
    "repo-lock status": 6.0,
    GUARD: 4.0,
    GUARD_REFUSING: 4.0,
}
"""The limits, as multiples of the floor; the import must stay below its limit."""


def arguments(directory: Path) -> dict[str, list[str]]:
    """The arguments of each command of Holdfast."""
    lock, data = str(directory / "bench.lock"), str(directory)
    return {
        "--version": ["--version"],
        "--help": ["--help"],
        "lock status": ["lock", "status", lock],
        RUN: ["lock", "run", lock, "--", CHILD],
        "repo-lock status": ["repo-lock", "status", "bench", "--data-dir", data],
        GUARD: ["guard", str(directory / REPOSITORY / "worktrees/free/file")],
        GUARD_REFUSING: ["guard", str(directory / REPOSITORY / "main/file")],
    }


REPOSITORY = "repository"
REFUSED = 4
EXPECTED = {GUARD_REFUSING: REFUSED}
"""The exit status of a command, if it is not 0."""


def prepare(directory: Path) -> None:
    """Create a repository whose worktree `main` is leased by another process: the one with PID 1."""
    from holdfast.locks.identity import current_holder, holder_with_pid
    from holdfast.repository.init import initialise
    from holdfast.repository.repository import Repository

    root = directory / REPOSITORY
    initialise(root)
    holder = holder_with_pid(1) or current_holder()._replace(host="elsewhere")
    Repository(root).lease(ttl=3600.0, purpose="to be in the way", behalf_of=holder)


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        measure(QUICK_ROUNDS if quick else ROUNDS, Path(name), report)
    return report


def measure(rounds: int, directory: Path, report: Report) -> None:
    """Time every command that works here."""
    programs = {FLOOR: [sys.executable, "-c", "pass"], IMPORT: [sys.executable, "-c", "import holdfast"]}
    if true := shutil.which("true"):
        programs[CHILD] = [true]
    else:
        report.notes.append(f"startup: there is no `{CHILD}` here to run under a lock")
    programs |= _commands(directory, report, with_child=CHILD in programs)
    print(f"startup: {len(programs)} programs, {rounds} times each ...", file=sys.stderr, flush=True)
    results = interleave(
        {name: partial(seconds_of, argv, EXPECTED.get(name, 0)) for name, argv in programs.items()}, rounds
    )
    report.note_failures("startup", results.failures)
    _judge(results.series, rounds, report)


def _commands(directory: Path, report: Report, *, with_child: bool) -> dict[str, list[str]]:
    """The commands of Holdfast that can be run, after one run of each that warms the caches."""
    program = holdfast_command(report)
    if program is None:
        return {}
    prepare(directory)
    working: dict[str, list[str]] = {}
    for name, typed in arguments(directory).items():
        if name == RUN and not with_child:
            continue
        argv = [*program, *typed]
        try:
            seconds_of(argv, EXPECTED.get(name, 0))
        except OSError as error:
            report.notes.append(f"startup: {error}")
        else:
            working[name] = argv
    return working


def holdfast_command(report: Report) -> list[str] | None:
    """The command that starts Holdfast: its console script, next to the interpreter that runs this."""
    script = shutil.which("holdfast", path=os.path.dirname(sys.executable))
    if script:
        return [script]
    if find_spec("holdfast.__main__"):
        report.notes.append("startup: the console script is not installed; measuring `python -m holdfast`")
        return [sys.executable, "-m", "holdfast"]
    report.notes.append("startup: the command line is not installed, so only the import was measured")
    return None


def seconds_of(argv: list[str], expected: int = 0) -> float:
    """Run a program to its end; it must exit with this status."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = perf_counter()
    done = subprocess.run(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    elapsed = perf_counter() - started
    if done.returncode != expected:
        raise ChildProcessError(f"`{' '.join(argv)}` ended with status {done.returncode}")
    return elapsed


def _judge(series: Mapping[str, list[float]], rounds: int, report: Report) -> None:
    table = Table(
        f"start to end of a command; medians of {rounds} rounds",
        [Column("ms", number(".1f")), Column("/ floor"), Column("limit", number("g"))],
    )
    floor = series[FLOOR]
    table.rows[FLOOR] = [median(floor) * MILLI, ratio(floor, floor), None]
    if CHILD in series:
        table.rows[CHILD] = [median(series[CHILD]) * MILLI, None, None]
    for name, limit in LIMITS.items():
        times = None
        if name in series:
            times = ratio(series[name], _floor_of(name, series))
            table.rows[name] = [median(series[name]) * MILLI, times, limit]
        judge, words = (below, "less than") if name == IMPORT else (at_most, "at most")
        report.targets.append(judge(limit, f"{name}: {words} {limit:g} times the floor", times and times.median))
    report.tables.append(table)


def _floor_of(name: str, series: Mapping[str, list[float]]) -> list[float]:
    """An interpreter that does nothing; for `lock run`, plus the command that it runs."""
    if name != RUN:
        return series[FLOOR]
    return [own + child for own, child in zip(series[FLOOR], series[CHILD], strict=True)]
