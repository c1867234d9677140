"""`holdfast gate`: conditions on the completion of issues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from holdfast.cli.entry import Group
from holdfast.cli.issue_view import SHORT, issue_summary_to_json, reading_options, tracking, writing_options
from holdfast.cli.options import duration
from holdfast.cli.output import Output
from holdfast.errors import GateFailed
from holdfast.issues.model import GateRun, GateStatus
from holdfast.issues.tracker import Tracker

group = Group(
    "gate",
    help="""\
Gates: conditions that an issue must meet to be done. A manual gate is passed by somebody who has looked;
an automatic one by a command, its checker.

\b
Example:
  holdfast gate define review --title "Somebody else has read it"
  holdfast gate define tests --checker "make test" --timeout 10m
  holdfast gate require 4f1c review tests
""",
)


@group.command(short_help="Define a gate.")
@click.argument("key")
@click.option("--title", metavar="TEXT", default="", help="What it is about.  [default: the key]")
@click.option("--description", metavar="TEXT", default="", help="When it is passed, in detail.")
@click.option("--checker", metavar="COMMAND", help="What judges it: passed if this ends with status 0.")
@click.option(
    "--timeout",
    metavar="DURATION",
    callback=duration,
    default="5m",
    show_default=True,
    help="Its time limit.",
)
@click.option("--working-dir", metavar="DIRECTORY", help="Where it runs, below the root of the tracker.")
@click.option("--env", metavar="NAME=VALUE", multiple=True, help="Something for its environment.")
@click.option("--replace", is_flag=True, help="Change a gate that is defined already.")
@writing_options
@click.pass_obj
def define(
    output: Output,
    *,
    key: str,
    title: str,
    description: str,
    checker: str | None,
    timeout: float,
    working_dir: str | None,
    env: tuple[str, ...],
    replace: bool,
    repo: str | None,
    actor: str | None,
) -> None:
    """Define the gate KEY: manual, or automatic if it has a checker.

    \b
    Examples:
      holdfast gate define review --title "Somebody else has read it"
      holdfast gate define tests --checker "make test" --timeout 10m
    """
    from holdfast.issues.gates import Definition

    pairs = {name: value for name, _, value in (each.partition("=") for each in env)}
    definition = Definition(
        key, title, description, command=checker, timeout=timeout, working_dir=working_dir, env=pairs
    )
    with tracking(repo, actor) as tracker:
        gate = tracker.gates.define(definition, replace=replace)
    output.result(
        {"key": gate.key, "title": gate.title, "mode": gate.mode}, [f"defined {gate.key} ({gate.mode})"]
    )


@group.command("list", short_help="List the gates that are defined.")
@reading_options
@click.pass_obj
def list_(output: Output, *, repo: str | None) -> None:
    """List the gates that are defined.

    \b
    Example:
      holdfast gate list
    """
    from holdfast.cli.output import show_table

    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        gates = tracker.gates.all().values()
    records = [
        {**gate._asdict(), "checker": gate.checker._asdict() if gate.checker else None} for gate in gates
    ]
    if output.as_json:
        output.result({"gates": records})
    else:
        rows = [(gate.key, gate.mode, gate.checker.command if gate.checker else gate.title) for gate in gates]
        show_table(output, ("KEY", "MODE", "CHECKER OR TITLE"), rows)


@group.command(short_help="Let an issue need gates.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@writing_options
@click.pass_obj
def require(
    output: Output, *, issue_id: str, keys: tuple[str, ...], repo: str | None, actor: str | None
) -> None:
    """Let ISSUE need the gates KEY... to be done.

    \b
    Example:
      holdfast gate require 4f1c review tests
    """
    from holdfast.cli.issue_view import SHORT, issue_summary_to_json

    with tracking(repo, actor) as tracker:
        issue = tracker.gates.require(tracker.find_id(issue_id), keys)
        needs = ", ".join(issue.gates_required)
        output.result(
            issue_summary_to_json(issue, tracker.state(issue)), [f"{issue.id[:SHORT]} needs {needs}"]
        )


@group.command(short_help="Run the checkers of an issue's gates.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@writing_options
@click.pass_obj
def check(
    output: Output, *, issue_id: str, keys: tuple[str, ...], repo: str | None, actor: str | None
) -> None:
    """Run the checkers of the gates KEY... of ISSUE; without any, of all that are not passed yet.

    No lock is held meanwhile. What they print is kept below .jit/gate-runs/. Ends with status 1 if one
    did not pass.

    \b
    Example:
      holdfast gate check 4f1c tests
    """

    with tracking(repo, actor) as tracker:
        check_gates(tracker, output, tracker.find_id(issue_id), keys, os.environ)


@group.command("pass", short_help="Say that a gate is passed.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("key")
@click.option("--force", is_flag=True, help="Also if it is automatic.")
@writing_options
@click.pass_obj
def pass_(
    output: Output, *, issue_id: str, key: str, force: bool, repo: str | None, actor: str | None
) -> None:
    """Say that the gate KEY of ISSUE is passed. With the last one, an issue that is gated is done.

    \b
    Example:
      holdfast gate pass 4f1c review
    """
    _judge(output, issue_id, key, "passed", force, repo, actor)


@group.command(short_help="Say that a gate is failed.")
@click.argument("issue_id", metavar="ISSUE")
@click.argument("key")
@click.option("--force", is_flag=True, help="Also if it is automatic.")
@writing_options
@click.pass_obj
def fail(
    output: Output, *, issue_id: str, key: str, force: bool, repo: str | None, actor: str | None
) -> None:
    """Say that the gate KEY of ISSUE is failed.

    \b
    Example:
      holdfast gate fail 4f1c review
    """
    _judge(output, issue_id, key, "failed", force, repo, actor)


def _judge(
    output: Output, issue_id: str, key: str, status: str, force: bool, repo: str | None, actor: str | None
) -> None:
    from holdfast.cli.issue_view import SHORT, issue_summary_to_json
    from holdfast.issues.model import GateStatus

    with tracking(repo, actor) as tracker:
        issue = tracker.gates.judge(tracker.find_id(issue_id), key, GateStatus(status), force=force)
        state = tracker.state(issue)
    record = {
        **issue_summary_to_json(issue, state),
        "gate": key,
        "status": status,
        "open_gates": issue.open_gates(),
    }
    output.result(record, [f"{key} of {issue.id[:SHORT]} is {status}; the issue is {state.value}"])


SHOWN = 20
"""How many of the last lines of a checker that did not pass are shown."""


def check_gates(
    tracker: Tracker, output: Output, issue_id: str, keys: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run them one after the other; `GateFailed` at the end if one did not pass."""
    issue = tracker.issue(issue_id)
    defined = tracker.gates.all()
    automatic = [key for key in issue.open_gates() if (gate := defined.get(key)) and gate.checker]
    wanted = list(keys) or automatic
    runs: list[GateRun] = []
    for key in wanted:
        issue, run = tracker.gates.check(issue_id, key, environment)
        runs.append(run)
        if not output.as_json:
            _tell(output, run)
    state = tracker.state(issue)
    record: dict[str, Any] = {**issue_summary_to_json(issue, state), "runs": [_record(run) for run in runs]}
    failed = [run.gate_key for run in runs if run.status != GateStatus.PASSED]
    if failed:
        raise GateFailed(f"not passed by {issue_id[:SHORT]}: {', '.join(failed)}", **record)
    nothing = "" if runs else "; it has no automatic gate that is not passed"
    output.result(record, [f"{issue_id[:SHORT]} is {state.value}{nothing}"])


def _record(run: GateRun) -> dict[str, Any]:
    import msgspec

    record: dict[str, Any] = msgspec.to_builtins(run)
    return record


def _tell(output: Output, run: GateRun) -> None:
    how = run.message or f"status {run.exit_code}"
    output.line(f"{run.gate_key}: {run.status} ({how}, {run.duration_ms / 1000:.1f} s), run {run.run_id}")
    if run.status != GateStatus.PASSED:
        for line in (run.stdout + run.stderr).splitlines()[-SHOWN:]:
            output.line(f"  {line}")
