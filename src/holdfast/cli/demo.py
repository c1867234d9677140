"""`holdfast demo`: show that locks hold while processes are killed and stopped. And one of its workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.places import temporary_directory
from holdfast.errors import ExitStatus, Failure

if TYPE_CHECKING:
    from holdfast.demo.crew import Command
    from holdfast.demo.play import Incident, Report

NO_LOCK = "no-lock"

_fault = click.option("--fault", type=click.Choice([NO_LOCK]), hidden=True, help="Break it on purpose.")


@click.command()
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(1, 3600),
    default=8,
    show_default=True,
    help="How long the workers work.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(2, 64),
    default=8,
    show_default=True,
    help="How many of them there are.",
)
@click.option(
    "--seed", metavar="N", type=int, help="Repeat the choices of an earlier run.  [default: random]"
)
@_fault
@json_option
@click.pass_obj
def demo(output: Output, *, seconds: float, workers: int, seed: int | None, fault: str | None) -> int:
    """Let processes compete for locks, kill some of them while they hold one, and check the result.

    Nothing of yours is touched: it all happens in a directory of its own, which is removed afterwards.
    Ends with PASSED and status 0, or with FAILED and status 1.

    \b
    Examples:
      holdfast demo
      holdfast demo --seconds 30 --workers 16
    """
    from holdfast.demo.play import play
    from holdfast.demo.scratch import scratch_directory

    seed = random.randrange(1_000_000) if seed is None else seed
    if not output.as_json:
        for line in _introduction(workers, seconds, seed):
            output.line(line)
    with _ended_by_signals(), scratch_directory(temporary_directory(os.environ)) as directory:
        report = play(
            directory,
            workers=workers,
            seconds=seconds,
            seed=seed,
            command=_worker_command(directory, seed, fault),
            tell=_nothing if output.as_json else lambda incident: output.line(_told(incident)),
        )
    record = _record(report, workers=workers, seed=seed)
    if output.as_json and not report.passed:
        raise Failure(f"the demo FAILED: {report.findings[0]}", hint=None, **record)
    output.result(record, _conclusion(report))
    return ExitStatus.OK if report.passed else ExitStatus.UNEXPECTED


@click.command(hidden=True)
@click.argument("directory", type=click.Path(file_okay=False))
@click.argument("name")
@click.option("--until", type=float, required=True)
@click.option("--parent", type=int, required=True)
@click.option("--seed", type=int, required=True)
@_fault
def worker(directory: str, name: str, until: float, parent: int, seed: int, fault: str | None) -> None:
    """Be the worker NAME of a demo in DIRECTORY, until a moment of the system's monotonic clock."""
    from holdfast.demo.scene import Scene
    from holdfast.demo.worker import Worker

    Worker(Scene(Path(directory)), name, seed=seed, locking=fault != NO_LOCK).run(until, parent=parent)


def _worker_command(directory: Path, seed: int, fault: str | None) -> Callable[[float], Command]:
    def ending_at(deadline: float) -> Command:
        def command(name: str) -> list[str]:
            own = [sys.executable, "-m", "holdfast", "demo-worker", str(directory), name]
            until = ["--until", repr(deadline), "--parent", str(os.getpid())]
            return [*own, *until, "--seed", str(seed), *(["--fault", fault] if fault else [])]

        return command

    return ending_at


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn signals that would end us at once into exceptions, so that everything is cleaned up."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, disposition in before.items():
            signal.signal(number, disposition)


def _nothing(incident: Incident) -> None:
    """Say nothing while it lasts."""


def _introduction(workers: int, seconds: float, seed: int) -> Iterator[str]:
    yield f"{workers} processes share three things in an empty directory, each behind a lock of its own:"
    yield "  a counter, which each reads, adds one to and writes back      (file lock)"
    yield "  a journal, to which each adds lines at the end                (repository lock)"
    yield "  a ledger, in which each makes the file with the next number   (ledger lock)"
    yield f"For {seconds:g} s some are killed (SIGKILL), and one is stopped for a while, each while it holds"
    yield "a lock. Every process notes what it has finished. In the end that must all be there, once."
    yield f"(seed {seed})"
    yield ""


def _told(incident: Incident) -> str:
    slot = incident.worker.partition("-")[0]
    consequence = {
        "killed": "killed while it held the {}; another one takes its place",
        "stopped": "stopped while it held the {}: nobody may take that now",
        "resumed": "goes on; it still holds the {}",
    }[incident.what]
    return f"  {incident.after:5.1f} s  process {slot} {consequence.format(incident.held.value)}"


def _conclusion(report: Report) -> Iterator[str]:
    kills = sum(incident.what == "killed" for incident in report.incidents)
    yield ""
    yield f"{'':10}{'noted as finished':>20}{'found':>10}{'finished, but killed before noting it':>40}"
    for protection, tally in report.tallies.items():
        numbers = f"{tally.acknowledged:>20}{tally.present:>10}{tally.unacknowledged:>40}"
        yield f"  {protection.name.lower():8}{numbers}"
    yield ""
    turns = sum(tally.turns for tally in report.tallies.values())
    yield f"{turns} times a process held a lock; {kills} were killed holding one."
    slowest = max(report.last_acquired.values())
    yield f"Each lock was taken once more at the end; the slowest took {slowest * 1000:.0f} ms."
    yield ""
    if report.passed:
        yield "Nothing lost, nothing done twice, never two holders at once, no lock stuck."
        yield "PASSED"
    else:
        yield from (f"  {finding}" for finding in report.findings)
        yield "FAILED"


def _record(report: Report, *, workers: int, seed: int) -> dict[str, object]:
    return {
        "verdict": "PASSED" if report.passed else "FAILED",
        "findings": list(report.findings),
        "seconds": report.seconds,
        "workers": workers,
        "seed": seed,
        "incidents": [{**each._asdict(), "held": each.held.value} for each in report.incidents],
        "tallies": {each.name.lower(): tally._asdict() for each, tally in report.tallies.items()},
        "last_acquired": {each.name.lower(): round(t, 6) for each, t in report.last_acquired.items()},
    }
