"""Checkers: real commands, with a timeout, that leave no processes behind."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from holdfast.errors import Refused
from holdfast.issues.gates import MOST_OUTPUT, Definition, Watched, run_checker
from holdfast.issues.model import Checker, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.store.files import FileStore
from tests.issues.trackers import create_issues
from tests.locks.workers import Line, Workers, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a Unix shell")

LONG = 60.0


def checker(command: str, **other: object) -> Checker:
    given = {"timeout": LONG, "working_dir": None, "env": {}, **other}
    return Checker(command=command, **given)  # type: ignore[arg-type]


def run(command: str, directory: Path, **other: object) -> tuple[bool, int | None, str]:
    outcome = run_checker(checker(command, **other), directory, dict(os.environ))
    return outcome.passed, outcome.exit_code, outcome.stdout


def test_a_checker_passes_with_status_zero_and_fails_with_any_other(tmp_path: Path) -> None:
    assert run("echo yes", tmp_path) == (True, 0, "yes\n")
    assert run("echo no; exit 3", tmp_path) == (False, 3, "no\n")
    outcome = run_checker(checker("echo why >&2; kill -9 $$"), tmp_path, {})
    assert (outcome.passed, outcome.exit_code, outcome.stderr) == (False, None, "why\n")
    assert "signal 9" in str(outcome.message)


def test_a_checker_runs_in_its_directory_with_its_environment(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()

    assert run("pwd; echo $X", tmp_path, working_dir="below", env={"X": "y"})[2] == f"{tmp_path}/below\ny\n"
    assert run_checker(checker("true", working_dir="../.."), tmp_path, {}).message is not None
    assert "not started" in str(run_checker(checker("true", working_dir="nowhere"), tmp_path, {}).message)


@pytest.mark.req("FL-11")
def test_a_timeout_kills_the_whole_process_group(tmp_path: Path) -> None:
    command = "sleep 1000 & echo $! > child; sleep 1000"
    outcome = run_checker(checker(command, timeout=0.3), tmp_path, dict(os.environ))

    assert (outcome.passed, outcome.exit_code) == (False, None)
    assert outcome.message == "killed after 300ms"
    wait_until(lambda: not is_running(int((tmp_path / "child").read_text())))


def test_background_processes_are_killed_when_their_checker_ends(tmp_path: Path) -> None:
    assert run("sleep 1000 & echo $! > child", tmp_path)[0]
    wait_until(lambda: not is_running(int((tmp_path / "child").read_text())))


def test_long_output_is_truncated_to_its_end(tmp_path: Path) -> None:
    outcome = run_checker(checker("yes x | head -c 1000000; printf '\\377end'"), tmp_path, dict(os.environ))

    assert outcome.stdout.endswith("x\n\\xffend")
    assert outcome.stdout.startswith(f"[{1000004 - MOST_OUTPUT} bytes left out]\n")


def test_a_timeout_kills_descendants_that_left_the_process_group(tmp_path: Path) -> None:
    command = "setsid sh -c 'echo $$ > child; sleep 1000' & sleep 1000"
    outcome = run_checker(checker(command, timeout=1.0), tmp_path, dict(os.environ))

    assert outcome.message == "killed after 1s"
    assert not is_running(int((tmp_path / "child").read_text()))


def test_others_see_the_output_as_it_comes_and_can_cancel(tmp_path: Path) -> None:
    cancelled, blocks = threading.Event(), list[bytes]()

    def log(block: bytes) -> None:
        blocks.append(block)
        cancelled.set()

    began = checker("echo one >&2; sleep 1000")
    outcome = run_checker(began, tmp_path, dict(os.environ), Watched(log, cancelled))

    assert (outcome.passed, outcome.exit_code, outcome.message) == (False, None, "cancelled")
    assert b"".join(blocks) == b"one\n"
    assert (outcome.stdout, outcome.stderr) == ("one\n", "")


def test_a_log_that_cannot_be_written_does_not_stop_the_command(tmp_path: Path) -> None:
    def log(block: bytes) -> None:
        raise Refused("no log")

    with pytest.raises(Refused, match="no log"):
        run_checker(
            checker("yes | head -c 1000000; touch done"), tmp_path, dict(os.environ), Watched(log, threading.Event())
        )
    assert (tmp_path / "done").exists()


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status != "Z"


# --- Checkers of gates ------------------------------------------------------------------------------


@pytest.fixture
def tracker(scratch: Path) -> Tracker:
    tracker = Tracker(FileStore(scratch, timeout=10.0), actor="agent:x", root=scratch)
    tracker.initialise()
    return tracker


@pytest.mark.req("FL-11")
def test_a_checker_judges_its_gate_and_its_output_is_kept(tracker: Tracker, scratch: Path) -> None:
    tracker.gates.define(Definition("there", command="cat proof && echo $HOLDFAST_GATE $HOLDFAST_ISSUE_ID"))
    [a] = create_issues(tracker, "a")
    tracker.gates.require(a, ["there"])
    tracker.update(a, Update(state=State.DONE))

    issue, failed = tracker.gates.check(a, "there", os.environ)
    assert (issue.state, failed.status, failed.exit_code) == (State.GATED, "failed", 1)
    (scratch / "proof").write_text("shown\n")
    issue, passed = tracker.gates.check(a, "there", os.environ)
    assert (issue.state, passed.status) == (State.DONE, "passed")
    assert passed.stdout == f"shown\nthere {a}\n"
    assert tracker.gates.runs(a) == [failed, passed]
    assert (scratch / f".jit/gate-runs/{passed.run_id}/result.json").is_file()


@pytest.mark.req("FL-11")
def test_no_lock_is_held_while_a_checker_runs(tracker: Tracker, scratch: Path) -> None:
    tracker.gates.define(Definition("slow", command="touch begun; while [ ! -e go ]; do sleep 0.01; done"))
    a, b = create_issues(tracker, "a", "b")
    tracker.gates.require(a, ["slow"])

    def work(line: Line) -> None:
        here = Tracker(FileStore(scratch, timeout=10.0), actor="agent:y", root=scratch)
        line.say(here.gates.check(a, "slow", os.environ)[1].status)

    with Workers() as workers:
        worker = workers.start(work)
        wait_until((scratch / "begun").exists)
        tracker.update(a, Update(title="changed meanwhile"))
        tracker.gates.define(Definition("other"))
        tracker.dependencies.add(b, a)
        create_issues(tracker, "c")
        (scratch / "go").touch()
        assert worker.hear() == "passed"
    issue = tracker.issue(a)
    assert (issue.title, issue.open_gates()) == ("changed meanwhile", [])


@pytest.mark.req("FL-11")
def test_checkers_of_one_issue_may_run_at_the_same_time(tracker: Tracker, scratch: Path) -> None:
    gates = [f"g{number}" for number in range(4)]
    for gate in gates:
        tracker.gates.define(Definition(gate, command=f"sleep 0.0{gate[1:]}"))
    [a] = create_issues(tracker, "a")
    tracker.gates.require(a, gates)
    tracker.update(a, Update(state=State.DONE))

    def work(line: Line) -> None:
        here = Tracker(FileStore(scratch, timeout=10.0), actor="agent:y", root=scratch)
        line.say(here.gates.check(a, line.wait(), os.environ)[1].status)

    with Workers() as workers:
        crew = workers.start_many(len(gates), work)
        for worker, gate in zip(crew, gates, strict=True):
            worker.say(gate)
        assert [worker.hear() for worker in crew] == ["passed"] * 4
    assert tracker.issue(a).state is State.DONE
    assert len(tracker.gates.runs(a)) == 4
