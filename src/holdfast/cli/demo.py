"""`holdfast demo`: run a fault-injection demo and report pass or fail."""

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

from holdfast.cli.options import json_option, temporary_directory
from holdfast.cli.output import Output, printable, width, wrapped
from holdfast.errors import ExitStatus, Failure
from holdfast.fs.directory import Directory

if TYPE_CHECKING:
    from holdfast.demo.scenario import Command, DemoPlan, DemoReport, Incident, Scene


TTL = 3.0


@click.command()
@click.option("--workers", metavar="N", type=click.IntRange(2, 32), default=8, show_default=True, help="Run N agents.")
@click.option("--issues", metavar="N", type=click.IntRange(6, 500), default=18, show_default=True, help="Add N issues.")
@click.option("--seed", metavar="N", type=int, help="Repeat the choices of an earlier run.  [default: random]")
@click.option("--store", metavar="URL", help="Keep the records in postgresql://… or etcd://… instead of files.")
@click.option("--landing", is_flag=True, help="Let agents land their work on a branch of a git repository instead.")
@click.option("--fault", type=click.Choice(["no-fencing"]), hidden=True, help="Break it on purpose.")
@json_option
@click.pass_obj
def demo(
    output: Output,
    *,
    workers: int,
    issues: int,
    seed: int | None,
    store: str | None,
    landing: bool,
    fault: str | None,
) -> int:
    """Run agents on a queue, kill three, pause one past its lease, and check the result.

    Each agent is a process that runs 'holdfast agent run': it claims an issue, works on it in a worktree that it
    leases, takes a snapshot and records the work in a ledger. Everything happens in a temporary directory, which is
    removed afterwards. Prints PASSED and exits with status 0, or prints FAILED and exits with status 1.

    With --landing, the agents change one file of a git repository, so that their work conflicts, and land it
    ('holdfast agent run --land'). Five are killed. At the end, it shows the history of the branch.

    \b
    Examples:
      holdfast demo
      holdfast demo --landing --issues 8
      holdfast demo --workers 16 --seed 7
    """
    from holdfast.demo.scenario import DemoPlan, play

    seed = random.randrange(1_000_000) if seed is None else seed
    if landing:
        return _land(output, workers, issues, seed)
    plan = DemoPlan(workers, issues, seed, TTL, store)
    if not output.as_json:
        introduction = _INTRODUCTION.format(workers=workers, issues=issues, seed=seed)
        output.text("\n".join(part for line in introduction.splitlines() for part in wrapped(line, width(sys.stdout))))
    with (
        _signals_raise() as raise_again,
        _scratch_directory(temporary_directory(os.environ)) as directory,
        _display(output) as (report_incident, show),
    ):

        def show_scene(scene: Scene) -> None:
            raise_again()
            show(scene)

        report = play(directory, plan, _agent_command(seed, fault), report=report_incident, show=show_scene)
    record = _report_to_json(report, plan)
    if output.as_json and report.audit.findings:
        raise Failure(f"the demo FAILED: {report.audit.findings[0]}", hint=None, **record)
    output.result(record, [part for line in _conclusion(report) for part in wrapped(line, width(sys.stdout))])
    return ExitStatus.UNEXPECTED if report.audit.findings else ExitStatus.OK


def _land(output: Output, workers: int, issues: int, seed: int) -> int:
    from holdfast.demo.landing import play

    own = [sys.executable, "-P", "-m", "holdfast"]
    agent = [*own, "agent", "run", "--next", "--land", "--ttl", f"{TTL:g}s", "--wait", f"{4 * TTL:g}s"]

    def command(top: Path, name: str) -> list[str]:
        return [*agent, "--actor", name, "--repo", str(top), "--", *own, "demo-landing-task", "--seed", str(seed)]

    def tell(text: str) -> None:
        if not output.as_json:
            output.line(f"  {text}")

    if not output.as_json:
        output.text(f"{workers} agents change one file of a git repository for {issues} issues. (seed {seed})\n")
    with _signals_raise(), _scratch_directory(temporary_directory(os.environ)) as directory:
        report = play(directory, command, issues=issues, workers=workers, seed=seed, tell=tell)
    record = {**report._asdict(), "findings": list(report.findings), "graph": list(report.graph)}
    record["result"] = "FAILED" if report.findings else "PASSED"
    if output.as_json and report.findings:
        raise Failure(f"the demo FAILED: {report.findings[0]}", hint=None, **record)
    told = f"{report.issues} issues landed in {report.attempts} runs; {report.conflicts} conflicts were resolved."
    verdict = [f"  {each}" for each in report.findings] + ["FAILED"]
    passed = ["Everything landed once, and every commit of the branch passes the check.", "PASSED"]
    output.result(record, ["", *report.graph, "", told, *(verdict if report.findings else passed)])
    return ExitStatus.UNEXPECTED if report.findings else ExitStatus.OK


@click.command(hidden=True)
@click.option("--seed", type=int, required=True)
def landing_task(seed: int) -> None:
    """The task that an agent of the demo of landing runs, in its worktree."""
    from holdfast.demo.landing import work

    work(Path(os.getcwd()), issue=os.environ["HOLDFAST_ISSUE_ID"], seed=seed)


@click.command(hidden=True)
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--seed", type=int, required=True)
def task(directory: str, seed: int) -> None:
    """The task that an agent of the demo in DIRECTORY runs."""
    from holdfast.demo.agents import Stage, work
    from holdfast.issues.model import ClaimId

    claim = ClaimId.parse(os.environ["HOLDFAST_CLAIM_ID"])
    work(Stage.at(Path(directory)), Path(os.getcwd()), issue=claim.issue_id, token=claim.token, seed=seed)


@click.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1)
def faulty_agent(arguments: tuple[str, ...]) -> int:
    """Run 'agent run' with fencing switched off, so that the demo must fail."""
    from holdfast.cli.entry import run
    from holdfast.demo.scenario import switch_off_fencing

    switch_off_fencing()
    return run(["agent", "run", *arguments])


def _agent_command(seed: int, fault: str | None) -> Command:
    own = [sys.executable, "-P", "-m", "holdfast"]  # -P: never import from the current directory
    agent = [*own, "demo-faulty-agent"] if fault else [*own, "agent", "run"]
    agent += ["--next", "--ttl", f"{TTL:g}s", "--wait", f"{4 * TTL:g}s"]
    task = [*own, "demo-task", "--seed", str(seed)]
    return lambda stage, name: [*agent, "--actor", name, "--repo", str(stage.root), "--", *task, str(stage.root.parent)]


@contextlib.contextmanager
def _scratch_directory(parent: Path) -> Iterator[Path]:
    from holdfast.trees.walker import remove_tree

    with Directory.follow(parent) as above:
        path = above.path / f"holdfast-demo-{os.urandom(6).hex()}"
        above.make(path.name, mode=0o700)
    try:
        yield path
    finally:
        remove_tree(path)


@contextlib.contextmanager
def _signals_raise() -> Iterator[Callable[[], None]]:
    """Turn termination signals into exceptions, so that everything is cleaned up.

    Python drops an exception that a finaliser raises. The yielded function raises it again; call it regularly.
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


@contextlib.contextmanager
def _display(output: Output) -> Iterator[tuple[Callable[[Incident], None], Callable[[Scene], None]]]:
    """Functions that print incidents and, on a terminal, a live table; nothing with --json."""
    if output.as_json:
        yield (lambda incident: None), (lambda scene: None)
    elif sys.stdout is None or not sys.stdout.isatty():
        yield (lambda incident: output.line(_incident_line(incident))), (lambda scene: None)
    else:
        from rich.live import Live
        from rich.text import Text

        with Live(Text(""), auto_refresh=False, transient=True) as live:
            yield (
                lambda incident: live.console.print(Text(_incident_line(incident))),
                lambda scene: live.update(Text("\n".join(_table(scene))), refresh=True),
            )


_INTRODUCTION = """\
{workers} agents work through {issues} issues, some of which depend on others. Each
claims an issue, leases a worktree for it, works there, takes a snapshot, and records the work in
a ledger. Three agents are killed (SIGKILL). One is paused until its lease has expired and another
agent has done its work; when it resumes, every write that it tries must be refused.
(seed {seed})

"""
_INCIDENTS = {
    "killed": "agent {agent} is killed{at}: its issue returns to the queue when its claim expires",
    "paused": "agent {agent} is paused{at}: it cannot renew its lease",
    "resumed": "agent {agent} resumes: another agent has done its work meanwhile",
    "refused": "agent {agent} was refused: its token is stale",
    "not refused": "agent {agent} was NOT refused",
}


def _incident_line(incident: Incident) -> str:
    at = f" at issue {incident.issue[:8]}" if incident.issue else ""
    return f"  {incident.after:5.1f} s  {_INCIDENTS[incident.what].format(agent=incident.agent, at=at)}"


def _table(scene: Scene) -> Iterator[str]:
    titles = {issue.id: printable(issue.title) for issue, _ in scene.issues}
    states = [state.value for _, state in scene.issues]
    yield f"{scene.after:5.1f} s   {states.count('done')} of {len(states)} done"
    for number, issue in sorted(scene.working.items()):
        doing = "paused" if number in scene.paused else titles[issue] if issue else "looking for work"
        yield f"  agent {number:2}  {doing}"
    line = "".join({"done": "#", "in_progress": "+", "ready": "o"}.get(state, ".") for state in states)
    yield f"  {line}   # done  + in progress  o ready  . waiting"


def _conclusion(report: DemoReport) -> Iterator[str]:
    audit = report.audit
    yield ""
    yield f"{audit.done} issues done in {audit.attempts} attempts; {audit.taken_over} were taken over."
    yield f"{audit.snapshots} snapshots, {audit.events} ledger events, {audit.entries} audit entries."
    yield ""
    if audit.findings:
        yield from (f"  {finding}" for finding in audit.findings)
        yield "FAILED"
    else:
        yield "No work lost or done twice, every stale write refused, everything verified."
        yield "PASSED"


def _report_to_json(report: DemoReport, plan: DemoPlan) -> dict[str, object]:
    return {
        "result": "FAILED" if report.audit.findings else "PASSED",
        "seconds": round(report.seconds, 3),
        "workers": plan.workers,
        "seed": plan.seed,
        "incidents": [each._asdict() for each in report.incidents],
        "runs": report.agents,
        **report.audit._asdict(),
        "findings": list(report.audit.findings),
    }
