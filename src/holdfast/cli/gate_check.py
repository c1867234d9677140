"""Running checkers for the command line, and saying what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cli.issue_view import SHORT, issue_summary_to_json
from holdfast.cli.output import Output
from holdfast.errors import GateFailed
from holdfast.issues.model import GateRun, GateStatus
from holdfast.issues.tracker import Tracker

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
