"""`holdfast demo`: it passes, it fails with fencing disabled, and its check detects each kind of fault."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.demo.agents import AgentExit, Stage, set_up, work
from holdfast.demo.check import examine
from holdfast.repository.agent import AssignmentOptions, take_work
from tests.cli.commands import HOLDFAST, Result, Running, data, environment, error, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot pause a process")
SMALL = ("--workers", "3", "--issues", "6")

# --- The command -------------------------------------------------------------------------------------


def demo(scratch: Path, *options: str) -> Result:
    """Run the demo with a long timeout, for busy machines."""
    return subprocess.run(
        [*HOLDFAST, "demo", *options],
        env=environment({"TMPDIR": str(scratch)}),
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_demo_passes_and_leaves_nothing_behind(scratch: Path) -> None:
    result = demo(scratch, *SMALL)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("everything verified.\nPASSED\n")
    assert "is killed" in result.stdout
    assert "was refused" in result.stdout
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_the_demo_of_landing_passes_and_shows_the_history(scratch: Path) -> None:
    result = demo(scratch, "--landing", *SMALL)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("every commit of the branch passes the check.\nPASSED\n")
    assert "is killed" in result.stdout
    assert "* The beginning" in result.stdout
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_with_fencing_disabled_the_demo_fails_and_says_why(scratch: Path) -> None:
    result = demo(scratch, *SMALL, "--fault", "no-fencing", "--json")

    told = error(result)
    assert told["result"] == "FAILED"
    found = ("a stale write came through", "was not refused when it resumed")
    assert any(each in finding for each in found for finding in told["findings"]), told["findings"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_ended_by_a_signal_leaves_nothing_behind(scratch: Path, number: signal.Signals) -> None:
    with Running("demo", "--issues", "60", env={"TMPDIR": str(scratch)}) as running:
        wait_until(lambda: list(scratch.glob("*/notes/agent-*")))
        running.send(number)
        result = running.finish()

    assert result.returncode == 128 + number
    assert "Traceback" not in result.stderr
    assert list(scratch.iterdir()) == []


# --- The check --------------------------------------------------------------------------------------


class DemoRun:
    """A demo that runs in this process, so that a test can tamper with its results."""

    def __init__(self, directory: Path) -> None:
        self.stage = Stage.at(directory)
        self.issues = list(set_up(self.stage, issues=6, seed=1, store=None))
        self.ended: list[AgentExit] = []

    def work_all(self) -> None:
        repository, tracker, ledger = self.stage.repository(), self.stage.tracker(), self.stage.ledger()
        for issue in self.issues:
            options = AssignmentOptions(issue_id=issue, assignee="agent:1")
            with take_work(repository, tracker, options, ledger=ledger.ledger) as assignment:
                name = "attempt-1-step-1.txt"
                (assignment.path / name).write_text(f"{issue} 1 1\n")
                self.stage.note(f"{issue}-1-1.json", {"issue": issue, "token": 1, "file": name})
                assignment.succeed()

    def findings(self, *, paused: bool = False) -> tuple[str, ...]:
        return examine(self.stage, self.issues, self.ended, finished=True, paused=paused).findings


@pytest.fixture
def demo_run(scratch: Path) -> DemoRun:
    run = DemoRun(scratch)
    run.work_all()
    return run


def test_the_check_accepts_good_work(demo_run: DemoRun) -> None:
    assert demo_run.findings() == ()


def test_the_check_reports_work_that_was_not_done(scratch: Path) -> None:
    assert any("was done 0 times" in each for each in DemoRun(scratch).findings())


def test_the_check_reports_a_lost_write(demo_run: DemoRun) -> None:
    issue = demo_run.issues[0]
    for path in demo_run.stage.root.rglob("attempt-1-step-1.txt"):
        if issue in path.read_text():
            path.chmod(0o644)
            path.unlink()

    findings = demo_run.findings()

    assert any("a write is lost" in each for each in findings)
    assert any("does not verify" in each for each in findings)


def test_the_check_reports_work_repeated_by_an_earlier_holder(demo_run: DemoRun) -> None:
    ledger = demo_run.stage.ledger().ledger
    event = {"type": "work_done", "issue_id": demo_run.issues[0], "claim_token": 0}
    ledger.append(event)

    assert any("an earlier holder did" in each for each in demo_run.findings())


def test_the_check_reports_a_paused_agent_that_was_not_refused(demo_run: DemoRun) -> None:
    demo_run.ended = [AgentExit(1, 0, killed=False, paused=True)]

    assert any("was not refused" in each for each in demo_run.findings(paused=True))
    demo_run.ended = [AgentExit(1, 5, killed=False, paused=True)]
    assert demo_run.findings(paused=True) == ()


def test_the_check_reports_a_forged_audit_trail(demo_run: DemoRun) -> None:
    trail = demo_run.stage.root / ".jvs/audit/audit.jsonl"
    trail.write_text(trail.read_text().replace("agent", "agemt", 1).replace("issue-", "issue_", 1))

    assert any("chain" in each for each in demo_run.findings())


def test_the_check_reports_a_lease_that_is_still_held(demo_run: DemoRun) -> None:
    with demo_run.stage.repository().lease("main", ttl=600):
        assert any("still held: lease main" in each for each in demo_run.findings())


def test_a_task_records_its_writes(scratch: Path) -> None:
    stage = Stage.at(scratch)
    stage.notes.mkdir()
    place = scratch / "place"
    place.mkdir()

    work(stage, place, issue="abc", token=3, seed=1)

    assert len(stage.noted()) == 4
    assert (place / "result.txt").read_text() == "abc by attempt 3\n"


@pytest.mark.long
def test_the_json_report_lists_the_incidents(scratch: Path) -> None:
    report = data(demo(scratch, "--workers", "3", "--issues", "6", "--seed", "7", "--json"))

    assert (report["result"], report["findings"], report["seed"]) == ("PASSED", [], 7)
    assert {"paused", "resumed", "refused"} <= {each["what"] for each in report["incidents"]}
    assert report["done"] == 6
