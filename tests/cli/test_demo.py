"""`holdfast demo`: it passes, it fails when there are no locks, and its judge finds each kind of fault."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from holdfast.demo.audit import examine
from holdfast.demo.crew import Life
from holdfast.demo.scene import Notes, Protection, Scene
from holdfast.fs import durable, strictjson
from tests.cli.commands import Running, data, envelope, error, holdfast, wait_until

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")

# --- As a person sees it ----------------------------------------------------------------------------


def test_the_demo_passes_and_leaves_nothing_behind(scratch: Path) -> None:
    result = holdfast("demo", "--seconds", "3", "--workers", "4", env={"TMPDIR": str(scratch)})

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert result.stdout.endswith("no lock stuck.\nPASSED\n")
    assert "killed while it held the" in result.stdout
    assert list(scratch.iterdir()) == []


@posix_only
def test_the_demo_tells_programs_what_happened_and_what_was_found(scratch: Path) -> None:
    arguments = ("demo", "--seconds", "3", "--workers", "3", "--seed", "7", "--json")
    report = data(holdfast(*arguments, env={"TMPDIR": str(scratch)}))

    assert (report["verdict"], report["findings"], report["seed"]) == ("PASSED", [], 7)
    assert {each["what"] for each in report["incidents"]} == {"killed", "stopped", "resumed"}
    for tally in report["tallies"].values():
        assert tally["present"] == tally["acknowledged"] + tally["unacknowledged"] > 0
        assert tally["turns"] >= tally["present"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_without_locks_the_demo_fails(scratch: Path, options: list[str]) -> None:
    arguments = ("demo", "--seconds", "1.5", "--workers", "6", "--fault", "no-lock", *options)
    result = holdfast(*arguments, env={"TMPDIR": str(scratch)})

    assert result.returncode == 1
    if options:
        assert error(result)["verdict"] == "FAILED"
        assert any("two holders at once" in each for each in error(result)["findings"])
    else:
        assert result.stdout.endswith("\nFAILED\n")
        assert "two holders at once" in result.stdout
    assert list(scratch.iterdir()) == []


@posix_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_ended_early_leaves_nothing_behind(scratch: Path, number: signal.Signals) -> None:
    with Running("demo", "--seconds", "60", env={"TMPDIR": str(scratch)}) as demo:
        wait_until(lambda: list(scratch.glob("*/notes/*")))
        demo.send(number)
        result = demo.finish()

    assert result.returncode == 128 + number
    assert "Traceback" not in result.stderr
    assert list(scratch.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends workers that nobody can end any more")
def test_workers_do_not_outlive_a_demo_that_is_killed(scratch: Path) -> None:
    with Running("demo", "--seconds", "60", env={"TMPDIR": str(scratch)}) as demo:
        wait_until(lambda: list(scratch.glob("*/notes/*")))
        demo.kill()
        demo.finish()

    wait_until(lambda: not workers_in(scratch))


def workers_in(directory: Path) -> list[str]:
    """The command lines of all processes that have to do with this directory."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if str(directory) in line and "demo-worker" in line:
            found.append(line)
    return found


def test_an_unusable_temporary_directory_is_named(scratch: Path) -> None:
    result = holdfast("demo", "--json", env={"TMPDIR": str(scratch / "missing")})

    assert result.returncode == 1
    assert envelope(result.stdout)["error"]["code"] == "E_IO"


# --- The judge --------------------------------------------------------------------------------------


class Stage:
    """A scene on which a test plays the workers itself."""

    def __init__(self, directory: Path) -> None:
        self.scene = Scene.prepared(directory)
        self.lives: dict[str, Life] = {}

    def notes(self, name: str, *, killed_at: float | None = None, exit_status: int | None = 0) -> Notes:
        """The notes of a worker that ended like this."""
        self.lives[name] = Life(name, killed_at, None if killed_at else exit_status, "")
        return Notes(self.scene, name)

    def count(self, **numbers: int) -> None:
        """Let the counter say this."""
        durable.replace(self.scene.counter, strictjson.encode(numbers))

    def line(self, worker: str, number: int) -> None:
        """Add a line to the journal."""
        durable.append(self.scene.journal, strictjson.encode({"worker": worker, "number": number}))

    def event(self, position: int, worker: str, number: int) -> None:
        """Put an event into the ledger."""
        content = strictjson.encode({"worker": worker, "number": number})
        durable.create(self.scene.event(position), content)

    def findings(self) -> list[str]:
        """What the judge finds."""
        return list(examine(self.scene, list(self.lives.values())).findings)


@pytest.fixture
def stage(scratch: Path) -> Stage:
    """An empty scene."""
    return Stage(scratch / "scene")


def test_work_that_is_all_there_is_in_order(stage: Stage) -> None:
    notes = stage.notes("a")
    for protection in Protection:
        notes.write("enter", protection)
        notes.write("leave", protection)
        notes.write("done", protection, 1)
    stage.count(a=1)
    stage.line("a", 1)
    stage.event(1, "a", 1)

    assert stage.findings() == []


def test_a_lost_increment_is_found(stage: Stage) -> None:
    notes = stage.notes("a")
    notes.write("done", Protection.COUNTER, 1)
    notes.write("done", Protection.COUNTER, 2)
    stage.count(a=1)

    assert stage.findings() == ["counter: 1 operations are lost that were acknowledged"]


def test_a_lost_line_and_a_line_that_is_there_twice_are_found(stage: Stage) -> None:
    notes = stage.notes("a")
    for number in (1, 2):
        notes.write("done", Protection.JOURNAL, number)
    stage.line("a", 1)
    stage.line("a", 1)

    assert stage.findings() == [
        "journal: 1 operations are lost that were acknowledged",
        "journal: 1 operations were done more than once",
    ]


def test_a_damaged_line_and_a_gap_are_found(stage: Stage) -> None:
    durable.append(stage.scene.journal, b"{torn")
    stage.event(2, "a", 1)
    stage.notes("a", killed_at=1.0)

    assert stage.findings() == [
        "journal: line 1 is damaged",
        "ledger: the numbers of the events have gaps",
    ]


def test_one_more_operation_is_excused_by_being_killed_only(stage: Stage) -> None:
    stage.notes("killed", killed_at=1.0)
    stage.notes("alive")
    stage.count(killed=1, alive=1)

    assert stage.findings() == ["counter: 1 operations are there that nobody acknowledged"]


def test_two_holders_at_once_are_found(stage: Stage) -> None:
    first, second = stage.notes("a"), stage.notes("b")
    first.write("enter", Protection.LEDGER)
    second.write("enter", Protection.LEDGER)
    first.write("leave", Protection.LEDGER)
    second.write("leave", Protection.LEDGER)

    assert stage.findings() == [
        "ledger lock: two holders at once, 1 times; the first time worker b came in while worker a was there"
    ]


def test_one_who_comes_in_before_a_holder_is_killed_is_found(stage: Stage) -> None:
    stage.notes("a", killed_at=float("inf")).write("enter", Protection.COUNTER)
    second = stage.notes("b")
    second.write("enter", Protection.COUNTER)
    second.write("leave", Protection.COUNTER)

    assert "file lock: two holders at once" in stage.findings()[0]


def test_one_who_comes_in_after_a_holder_was_killed_is_in_order(stage: Stage) -> None:
    stage.notes("a", killed_at=1e-9).write("enter", Protection.COUNTER)
    second = stage.notes("b")
    second.write("enter", Protection.COUNTER)
    second.write("leave", Protection.COUNTER)

    assert stage.findings() == []


def test_a_worker_that_failed_or_did_not_end_is_found(stage: Stage) -> None:
    stage.notes("a", exit_status=1)
    stage.notes("b", exit_status=None)

    assert stage.findings() == ["worker a failed with status 1", "worker b did not end"]


def test_a_number_that_was_taken_is_found(stage: Stage) -> None:
    stage.notes("a").write("taken", Protection.LEDGER, 5)

    assert stage.findings() == ["ledger: 1 times the next number had been taken by somebody else"]
