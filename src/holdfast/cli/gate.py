"""`holdfast gate`: conditions that an issue must pass to be done."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from holdfast.cli.child import without_store_secrets
from holdfast.cli.entry import Group
from holdfast.cli.issue_view import reading_options, tracking, writing_options
from holdfast.cli.options import duration
from holdfast.cli.output import Output, show_table
from holdfast.clock import format_duration
from holdfast.errors import GateFailed
from holdfast.issues.model import SHORT, GateRun, GateStatus, issue_summary_to_json

LINES_SHOWN = 20
"""How many of the last lines of a failed checker's output are printed."""
HELP = """\
Gates: conditions that an issue must pass to be done. A person or an agent passes a manual gate; a command, its checker,
passes an automatic gate.
"""
group = Group("gate", help=HELP)
_issue_argument = click.argument("issue_id", metavar="ISSUE")
_force_option = click.option("--force", is_flag=True, help="Override an automatic gate.")


@group.command(short_help="Define a gate.")
@click.argument("key")
@click.option("--title", metavar="TEXT", default="", help="A short title.  [default: the key]")
@click.option("--description", metavar="TEXT", default="", help="The condition in detail.")
@click.option("--checker", "command", metavar="COMMAND", help="The checker: it passes the gate by exiting with 0.")
@click.option(
    "--timeout", metavar="DURATION", callback=duration, default="5m", show_default=True, help="The checker's timeout."
)
@click.option("--working-dir", metavar="DIR", help="The checker's directory, relative to the tracker's root.")
@click.option("--env", metavar="NAME=VALUE", multiple=True, help="A variable for the checker. Repeatable.")
@click.option("--replace", is_flag=True, help="Replace an existing definition.")
@writing_options
@click.pass_obj
def define(
    output: Output, /, *, env: tuple[str, ...], replace: bool, repo: str | None, actor: str | None, **given: Any
) -> None:
    """Define the gate KEY: automatic if it has a checker, otherwise manual.

    \b
    Examples:
      holdfast gate define review --title "Reviewed by another person"
      holdfast gate define tests --checker "make test" --timeout 10m
    """
    from holdfast.issues.gates import Definition

    pairs = {name: value for name, _, value in (each.partition("=") for each in env)}
    with tracking(repo, actor) as tracker:
        gate = tracker.gates.define(Definition(env=pairs, **given), replace=replace)
    output.result({"key": gate.key, "title": gate.title, "mode": gate.mode}, [f"defined {gate.key} ({gate.mode})"])


@group.command("list", short_help="List the defined gates.")
@reading_options
@click.pass_obj
def list_(output: Output, *, repo: str | None) -> None:
    """List the defined gates.

    \b
    Example:
      holdfast gate list
    """
    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        gates = tracker.gates.all().values()
    if output.as_json:
        records = [{**each._asdict(), "checker": each.checker and each.checker._asdict()} for each in gates]
        output.result({"gates": records})
    else:
        rows = [(each.key, each.mode, each.checker.command if each.checker else each.title) for each in gates]
        show_table(output, ("KEY", "MODE", "CHECKER OR TITLE"), rows)


@group.command(short_help="Require gates of an issue.")
@_issue_argument
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@writing_options
@click.pass_obj
def require(output: Output, /, *, issue_id: str, keys: tuple[str, ...], **where: Any) -> None:
    """Require the gates KEY... of ISSUE: it is done only when they have passed.

    \b
    Example:
      holdfast gate require 4f1c review tests
    """
    with tracking(**where) as tracker:
        issue = tracker.gates.require(tracker.find_id(issue_id), keys)
        record = issue_summary_to_json(issue, tracker.state(issue))
    output.result(record, [f"{issue.id[:SHORT]} requires {', '.join(issue.gates_required)}"])


@group.command(short_help="Run the checkers of an issue's gates.")
@_issue_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@writing_options
@click.pass_obj
def check(output: Output, /, *, issue_id: str, keys: tuple[str, ...], **where: Any) -> None:
    """Run the checkers of the gates KEY... of ISSUE; by default, of all its open gates.

    No lock is held while a checker runs. Its output is stored in .jit/gate-runs/. Status 1 if a gate did not pass. A
    checker that you have not defined yourself on this machine must be approved first: 'holdfast trust'.

    \b
    Example:
      holdfast gate check 4f1c tests
    """
    with tracking(**where) as tracker:
        issue = tracker.issue(tracker.find_id(issue_id))
        name, defined = issue.id[:SHORT], tracker.gates.all()
        automatic = [key for key in issue.open_gates() if (gate := defined.get(key)) and gate.checker]
        runs: list[GateRun] = []
        for key in keys or automatic:
            issue, run = tracker.gates.check(issue.id, key, without_store_secrets(os.environ))
            runs.append(run)
            if not output.as_json:
                _print_run(output, run)
        state = tracker.state(issue)
    record: dict[str, Any] = {**issue_summary_to_json(issue, state), "runs": msgspec.to_builtins(runs)}
    if failed := [run.gate_key for run in runs if run.status != GateStatus.PASSED]:
        raise GateFailed(f"{name} did not pass {', '.join(failed)}", **record)
    output.result(record, [f"{name} is {state.value}" + ("" if runs else "; no automatic gate is open")])


def _print_run(output: Output, run: GateRun) -> None:
    reason = run.message or f"status {run.exit_code}"
    output.line(f"{run.gate_key}: {run.status} ({reason}, {format_duration(run.duration_ms / 1000)}), run {run.run_id}")
    if run.status != GateStatus.PASSED:
        for line in (run.stdout + run.stderr).splitlines()[-LINES_SHOWN:]:
            output.line(f"  {line}")


@group.command("pass", short_help="Mark a gate as passed.")
@_issue_argument
@click.argument("key")
@_force_option
@writing_options
@click.pass_obj
def pass_(output: Output, /, **given: Any) -> None:
    """Mark the gate KEY of ISSUE as passed. Passing the last open gate makes a gated issue done.

    \b
    Example:
      holdfast gate pass 4f1c review
    """
    _set_status(output, GateStatus.PASSED, **given)


@group.command(short_help="Mark a gate as failed.")
@_issue_argument
@click.argument("key")
@_force_option
@writing_options
@click.pass_obj
def fail(output: Output, /, **given: Any) -> None:
    """Mark the gate KEY of ISSUE as failed.

    \b
    Example:
      holdfast gate fail 4f1c review
    """
    _set_status(output, GateStatus.FAILED, **given)


def _set_status(output: Output, status: GateStatus, *, issue_id: str, key: str, force: bool, **where: Any) -> None:
    with tracking(**where) as tracker:
        issue = tracker.gates.judge(tracker.find_id(issue_id), key, status, force=force)
        state = tracker.state(issue)
    gate = {"gate": key, "status": status.value, "open_gates": issue.open_gates()}
    line = f"{key} of {issue.id[:SHORT]} is {status.value}; the issue is {state.value}"
    output.result({**issue_summary_to_json(issue, state), **gate}, [line])
