"""`holdfast demo`: agents work through a queue while some are killed and one is paused; then a verdict."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from holdfast.cli.options import json_option, temporary_directory
from holdfast.cli.output import Output, printable, wrapped
from holdfast.errors import ExitStatus, Failure
from holdfast.fs import calls
from holdfast.fs.directory import io_failure

if TYPE_CHECKING:
    from holdfast.demo.agents import Command, Stage
    from holdfast.demo.scenario import DemoReport, Incident, Scene


NO_FENCING = "no-fencing"
TTL = 3.0


@click.command()
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(2, 32),
    default=8,
    show_default=True,
    help="How many agents.",
)
@click.option(
    "--issues", metavar="N", type=click.IntRange(6, 500), default=18, show_default=True, help="How much work."
)
@click.option(
    "--seed", metavar="N", type=int, help="Repeat the choices of an earlier run.  [default: random]"
)
@click.option(
    "--store", metavar="URL", help="Keep what is shared there, not in files: postgresql://…, etcd://…"
)
@click.option("--fault", type=click.Choice([NO_FENCING]), hidden=True, help="Break it on purpose.")
@json_option
@click.pass_obj
def demo(
    output: Output, *, workers: int, issues: int, seed: int | None, store: str | None, fault: str | None
) -> int:
    """Let agents work through a queue, kill three of them, pause one until its lease is over, and judge.

    Each agent is a process of its own that runs 'holdfast agent run': it claims an issue, works on it in a
    worktree that it has leased, and keeps and records what it did. Nothing of yours is touched: it all
    happens in a directory of its own, which is removed afterwards. Ends with PASSED and status 0, or with
    FAILED and status 1.

    \b
    Examples:
      holdfast demo
      holdfast demo --workers 16 --seed 7
    """
    from holdfast.demo.scenario import DemoPlan, play

    seed = random.randrange(1_000_000) if seed is None else seed
    plan = DemoPlan(workers, issues, seed, TTL, store)
    if not output.as_json:
        for line in _introduction(plan.workers, plan.issues, seed):
            output.text("\n".join(wrapped(line)))
    with (
        _ended_by_signals() as raise_again,
        scratch_directory(temporary_directory(os.environ)) as directory,
        _watching(output) as (tell, show),
    ):

        def look(scene: Scene) -> None:
            raise_again()
            show(scene)

        report = play(directory, plan, _commands(seed, fault), tell=tell, show=look)
    record = _record(report, workers=workers, seed=seed)
    if output.as_json and report.audit.findings:
        raise Failure(f"the demo FAILED: {report.audit.findings[0]}", hint=None, **record)
    output.result(record, [part for line in _conclusion(report) for part in wrapped(line)])
    return ExitStatus.UNEXPECTED if report.audit.findings else ExitStatus.OK


@click.command(hidden=True)
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--seed", type=int, required=True)
def task(directory: str, seed: int) -> None:
    """Be what an agent of a demo in DIRECTORY does with its work."""
    from holdfast.demo.agents import Stage, work
    from holdfast.issues.model import ClaimId

    claim = ClaimId.parse(os.environ["HOLDFAST_CLAIM_ID"])
    work(Stage.at(Path(directory)), Path(os.getcwd()), issue=claim.issue_id, token=claim.token, seed=seed)


@click.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1)
def faulty_agent(arguments: tuple[str, ...]) -> int:
    """Be an agent that no token stops: 'agent run' with fencing switched off, to see the demo fail."""
    from holdfast.cli.entry import run
    from holdfast.demo.scenario import switch_off_fencing

    switch_off_fencing()
    return run(["agent", "run", *arguments])


def _commands(seed: int, fault: str | None) -> Callable[[Stage], Command]:
    own = [sys.executable, "-P", "-m", "holdfast"]  # never modules of the current directory
    agent = [*own, "demo-faulty-agent"] if fault else [*own, "agent", "run"]

    def on(stage: Stage) -> Command:
        def command(name: str) -> list[str]:
            options = ["--next", "--actor", name, "--repo", str(stage.root)]
            times = ["--ttl", f"{TTL:g}s", "--wait", f"{4 * TTL:g}s"]
            return [
                *agent,
                *options,
                *times,
                "--",
                *own,
                "demo-task",
                str(stage.root.parent),
                "--seed",
                str(seed),
            ]

        return command

    return on


@contextlib.contextmanager
def _watching(output: Output) -> Iterator[tuple[Callable[[Incident], None], Callable[[Scene], None]]]:
    """How the demo is shown while it lasts: as a live table on a terminal, else incident by incident."""
    if output.as_json:
        yield (lambda incident: None), (lambda scene: None)
    elif sys.stdout is None or not sys.stdout.isatty():
        yield (lambda incident: output.line(_told(incident))), (lambda scene: None)
    else:
        from rich.live import Live
        from rich.text import Text

        happened: list[str] = []
        with Live(Text(""), auto_refresh=False, transient=True) as live:

            def tell(incident: Incident) -> None:
                happened.append(_told(incident))
                live.console.print(Text(happened[-1]))

            yield tell, lambda scene: live.update(Text("\n".join(_table(scene))), refresh=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Turn signals that would end us at once into exceptions, so that everything is cleaned up.

    An exception that comes up where Python cannot pass it on (in a finaliser) is lost; what this yields
    raises it again, and is to be called from time to time.
    """
    received: list[int] = []

    def leave(number: int, frame: object) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def raise_again() -> None:
        if received:
            leave(received[0], None)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield raise_again
    finally:
        for number, disposition in before.items():
            signal.signal(number, disposition)


def _introduction(workers: int, issues: int, seed: int) -> Iterator[str]:
    yield f"{workers} agents work through {issues} issues, some of which wait for others. Each claims one,"
    yield "leases a worktree for it, works there, takes a snapshot, and records what it did in a ledger."
    yield "Three are killed (SIGKILL). One is paused until its lease is over and another has done its work;"
    yield "when it goes on, whatever it still tries to write must be refused."
    yield f"(seed {seed})"
    yield ""


_SAID = {
    "killed": "agent {agent} is killed{at}: its work comes back to the queue when its claim runs out",
    "paused": "agent {agent} is paused{at}: it cannot renew its lease now",
    "resumed": "agent {agent} goes on: meanwhile another one has done its work",
    "refused": "agent {agent} was refused: its token is not the current one any more",
    "not refused": "agent {agent} was NOT refused",
}


def _told(incident: Incident) -> str:
    at = f" at issue {incident.issue[:8]}" if incident.issue else ""
    return f"  {incident.after:5.1f} s  {_SAID[incident.what].format(agent=incident.agent, at=at)}"


def _table(scene: Scene) -> Iterator[str]:
    titles = {issue.id: issue.title for issue in scene.issues}
    done = sum(state.value == "done" for state in scene.states)
    yield f"{scene.after:5.1f} s   {done} of {len(scene.issues)} done"
    for number in sorted(scene.working):
        issue = scene.working[number]
        what = (
            "paused"
            if number in scene.paused
            else "looks for work"
            if issue is None
            else printable(titles[issue])
        )
        yield f"  agent {number:2}  {what}"
    marks = {"done": "#", "in_progress": "+", "ready": "o"}
    yield (
        "  "
        + "".join(marks.get(state.value, ".") for state in scene.states)
        + "   # done  + at work  o ready  . waits"
    )


def _conclusion(report: DemoReport) -> Iterator[str]:
    audit = report.audit
    yield ""
    yield f"{audit.done} issues done in {audit.attempts} attempts; {audit.taken_over} were taken over."
    yield f"{audit.snapshots} snapshots, {audit.events} events in the ledger, {audit.entries} audit entries."
    yield ""
    if audit.findings:
        yield from (f"  {finding}" for finding in audit.findings)
        yield "FAILED"
    else:
        yield "No work lost, none done twice, every stale write refused, all verified, the chain holds."
        yield "PASSED"


def _record(report: DemoReport, *, workers: int, seed: int) -> dict[str, object]:
    audit = report.audit._asdict()
    return {
        "verdict": "FAILED" if report.audit.findings else "PASSED",
        "seconds": round(report.seconds, 3),
        "workers": workers,
        "seed": seed,
        "incidents": [each._asdict() for each in report.incidents],
        "runs": report.agents,
        **audit,
        "findings": list(report.audit.findings),
    }


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Make an empty directory that nobody else may enter; remove it with all that is in it."""
    path = parent / f"holdfast-demo-{os.urandom(6).hex()}"
    try:
        calls.mkdir(path, 0o700)
    except OSError as error:
        raise io_failure("make the directory", path, error) from error
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory and what is in it; a link is removed, not followed."""
    with calls.scandir(path) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        below = path / name
        if stat.S_ISDIR(calls.stat(below, follow_symlinks=False).st_mode):
            _remove(below)
        else:
            calls.unlink(below)
    calls.rmdir(path)
