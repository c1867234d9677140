"""The bench measures correctly, and its check for lost increments detects a lock that does not exclude."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import SUITES, conflicts, contention, git, landing, ledger, locks, queues, scale, startup, writers
from bench import __main__ as command
from bench.contenders import PEERS, Contender, Flock, Holdfast, HoldfastFair, Kind
from bench.crew import Crew, CrewFailure
from bench.locks import Contest, Size
from bench.measure import Ratio, interleave, jain, percentile, ratio, rotated
from bench.report import Column, Report, Table, at_least, at_most, below, number

ROOT = Path(__file__).parents[1]
TINY = Size(
    processes=3,
    hold=0.0005,
    cycle_rounds=2,
    cycle_seconds=0.001,
    contend_rounds=1,
    contend_seconds=0.05,
    turn_rounds=1,
    turn_seconds=0.05,
    hand_over_rounds=1,
    hand_over_seconds=0.0,
    wait_seconds=0.05,
)
OWN: list[Kind] = [Flock, Holdfast, HoldfastFair]

needs_flock = pytest.mark.skipif(sys.platform == "win32", reason="the floor of this suite is flock")


class NoLock(Contender):
    """Planted: locks nothing."""

    name = Holdfast.name

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass


class SharedInstead(Flock):
    """Planted: takes a shared lock instead of an exclusive one."""

    name = Holdfast.name

    def __init__(self, path: str, *, shared: bool = False) -> None:
        super().__init__(path, shared=True)


class Careless(queues.IssuesOnPostgres):
    """Planted: reports work that it has not finished."""

    name = "careless"

    def finish(self, claimed: object) -> None:
        pass


class Broken(Contender):
    """Planted: cannot be acquired."""

    name = "broken"

    def acquire(self) -> None:
        raise TimeoutError("never")

    def release(self) -> None:
        pass


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(TINY.processes) as crew:
        yield crew


@pytest.fixture
def contest(scratch: Path) -> Contest:
    return Contest(OWN, TINY, scratch, Report())


def verdicts(report: Report) -> dict[str, str]:
    return {target.text: target.verdict for target in report.targets}


# --- Lost increments --------------------------------------------------------------------------------


@needs_flock
@pytest.mark.parametrize("fault", [NoLock, SharedInstead])
def test_increments_lost_by_a_lock_that_does_not_exclude_are_found(crew: Crew, scratch: Path, fault: Kind) -> None:
    # On a busy machine the processes may not overlap in one short sample.
    assert any(contention.contend(crew, fault, scratch, 0.1).lost > 0 for _ in range(100))


@needs_flock
def test_lost_increments_miss_the_target(crew: Crew, contest: Contest) -> None:
    planted = Contest([Flock, NoLock], TINY, contest.directory, contest.report)
    text = f"{Holdfast.name}: no increment lost"
    for _ in range(100):
        locks.throughput(planted, crew)
        if contest.report.targets[-2].verdict == "MISSED":
            break

    assert contest.report.targets[-2].text == text
    assert contest.report.targets[-2].verdict == "MISSED"
    assert not contest.report.all_met


@needs_flock
@pytest.mark.parametrize("kind", OWN)
def test_an_exclusive_lock_loses_no_increment(crew: Crew, scratch: Path, kind: Kind) -> None:
    found = contention.contend(crew, kind, scratch, 0.1)

    assert found.done > 0
    assert found.lost == 0


# --- The parts of the locks suite -------------------------------------------------------------------


@needs_flock
def test_every_part_has_a_row_for_every_contender(crew: Crew, contest: Contest) -> None:
    locks.uncontended(contest)
    locks.throughput(contest, crew)
    locks.fairness(contest, crew)
    locks.hand_over(contest, crew)

    assert contest.report.notes == []
    assert [list(table.rows) for table in contest.report.tables] == [[kind.label() for kind in OWN]] * 4
    found = verdicts(contest.report)
    assert {text for text, verdict in found.items() if verdict == "not measured"} == {
        *(f"holdfast, {mode}: takes less than {peer.name} (1)" for mode in ("exclusive", "shared") for peer in PEERS),
        "holdfast: increments/s at least 2 times those of the best peer",
    }


@needs_flock
def test_a_failing_contender_is_left_out_and_reported(crew: Crew, contest: Contest) -> None:
    with_broken = Contest([*OWN, Broken], TINY, contest.directory, contest.report)
    locks.uncontended(with_broken)
    locks.throughput(with_broken, crew)
    locks.fairness(with_broken, crew)
    locks.hand_over(with_broken, crew)

    assert len([note for note in contest.report.notes if "broken failed" in note]) == 5
    assert list(contest.report.tables[-1].rows) == [kind.label() for kind in OWN]


@needs_flock
def test_the_suite_runs_without_peers_and_reports_them_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for peer in PEERS:
        monkeypatch.setattr(peer, "is_available", lambda: False)
    monkeypatch.setattr(locks, "QUICK", TINY)
    results = tmp_path / "out.json"

    assert command.main(["locks", "--quick", "--json", str(results)]) == 0

    printed = capsys.readouterr().out
    assert "not installed, so not compared: filelock, portalocker, fasteners" in printed
    record = json.loads(results.read_text(encoding="utf-8"))
    assert [*record["suites"]] == ["locks"]
    assert record["suites"]["locks"]["tables"][1]["rows"]["holdfast"]["lost"] == 0


@needs_flock
def test_installed_peers_are_usable(scratch: Path) -> None:
    installed = [kind for kind in PEERS if kind.is_available()]
    if not installed:
        pytest.skip("no other lock library is installed; `make bench` installs them")
    for kind in installed:
        for shared in (False, True):
            lock = kind(str(scratch / f"{kind.name}-{shared}"), shared=shared)
            lock.acquire()
            lock.release()
            lock.cycle(2)


# --- The crew ---------------------------------------------------------------------------------------


def slow_to_prepare(directory: str) -> Callable[[float], tuple[float, float]]:
    """Prepare at once, except in the first process to arrive, which is slow."""
    try:
        os.close(os.open(os.path.join(directory, "first"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        time.sleep(0.2)
    prepared_at = time.monotonic()
    return lambda end_at: (prepared_at, time.monotonic())


def fail_in_one(directory: str) -> Callable[[float], int]:
    os.close(os.open(os.path.join(directory, str(os.getpid())), os.O_CREAT))

    def work(end_at: float) -> int:
        if str(os.getpid()) == min(os.listdir(directory)):
            raise ValueError("planted")
        return 1

    return work


def end_the_process() -> None:
    os._exit(1)


def test_no_process_works_before_all_have_prepared(crew: Crew, scratch: Path) -> None:
    spans = crew.all_do(slow_to_prepare, str(scratch), seconds=0.01)

    assert max(prepared_at for prepared_at, _ in spans) <= min(began_at for _, began_at in spans)


def test_a_failure_in_one_process_is_raised_and_the_crew_stays_usable(crew: Crew, scratch: Path) -> None:
    with pytest.raises(CrewFailure, match="ValueError: planted"):
        crew.all_do(fail_in_one, str(scratch), seconds=0.01)

    crew.tell(0, os.getpid)
    assert crew.hear(0) != os.getpid()


def test_a_process_that_ends_is_noticed() -> None:
    with Crew(1) as small:
        small.tell(0, end_the_process)
        with pytest.raises(CrewFailure, match="ended"):
            small.hear(0)


# --- Measuring --------------------------------------------------------------------------------------


def test_contenders_take_turns_and_each_round_starts_with_a_different_one() -> None:
    order: list[str] = []
    actions = {name: (lambda name=name: order.append(name)) for name in "abc"}

    interleave(actions, 3)

    assert "".join(order) == "abc" + "bca" + "cab"


def test_a_failing_contender_does_not_stop_the_others() -> None:
    def fail() -> int:
        raise OSError("no")

    rounds = interleave({"good": lambda: 1, "bad": fail}, 3)

    assert rounds.series == {"good": [1, 1, 1]}
    assert rounds.failures == {"bad": "OSError: no"}


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was ten times slower in the last round, for both.
    assert ratio([2.0, 2.0, 2.0, 20.0], [1.0, 1.0, 1.0, 10.0]) == Ratio(2.0, 2.0, 2.0)
    assert ratio([1.0], [0.0]).median == math.inf


def test_statistics_of_known_samples() -> None:
    assert rotated([], 2) == []
    assert percentile([3, 1, 2, 4], 50) == 2
    assert percentile([3, 1, 2, 4], 99) == 4
    assert jain([5, 5, 5, 5]) == 1
    assert jain([8, 0, 0, 0]) == 0.25
    assert jain([0, 0]) == 0


# --- Reporting --------------------------------------------------------------------------------------


def test_targets_are_met_missed_or_not_measured() -> None:
    assert [each.verdict for each in (at_most(2, "", 2), at_least(2, "", 2), below(2, "", 1.9))] == ["met"] * 3
    assert [each.verdict for each in (at_most(2, "", 2.1), at_least(2, "", 1.9), below(2, "", 2))] == ["MISSED"] * 3
    assert at_most(2, "", None).verdict == "not measured"
    assert not Report(targets=[at_most(2, "", None)]).all_met


def test_a_table_is_aligned_and_is_valid_json_even_with_infinity() -> None:
    table = Table("title", [Column("n", number(".1f")), Column("/ floor")])
    table.rows = {"a": [1.0, Ratio(1, 1, math.inf)], "longer": [math.inf, None]}

    assert list(table.lines()) == [
        "title",
        "            n          / floor",
        "  a       1.0  1.00 (1.00-inf)",
        "  longer  inf                -",
    ]
    assert json.loads(json.dumps(table.record(), allow_nan=False))["rows"]["longer"]["n"] == "inf"


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--strict"], 1)])
def test_a_missed_target_fails_only_a_strict_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], status: int
) -> None:
    monkeypatch.setattr(locks, "run", lambda *, quick: Report(targets=[at_most(1, "slow", 2)]))

    assert command.main(["locks", *options, "--json", str(tmp_path / "out.json")]) == status


def test_an_unknown_suite_is_refused() -> None:
    result = subprocess.run([sys.executable, "-m", "bench", "nonsense"], cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 2
    assert f"the suites are {', '.join(SUITES)}" in result.stderr


# --- Starting up ------------------------------------------------------------------------------------


def test_start_up_is_measured_for_the_commands_that_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text("import sys; sys.exit('status' in sys.argv)")
    monkeypatch.setattr(startup, "holdfast_command", lambda report: [sys.executable, str(fake)])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    report = Report()

    startup.measure(1, tmp_path, report)

    rows = report.tables[0].rows
    assert {startup.FLOOR, startup.IMPORT, "--version", "--help"} <= set(rows)
    assert not any(name.endswith("status") for name in rows)
    assert [note for note in report.notes if "ended with status 1" in note] != []
    assert verdicts(report)["repo-lock status: at most 6 times the floor"] == "not measured"
    assert startup.GUARD in rows
    assert startup.GUARD_REFUSING not in rows, "a guard that lets everything pass is not measured"


def test_start_up_without_a_command_line_measures_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(startup, "holdfast_command", lambda report: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    report = Report()

    startup.measure(1, tmp_path, report)

    assert set(report.tables[0].rows) - {startup.CHILD} == {startup.FLOOR, startup.IMPORT}


# --- The git home -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a git home needs POSIX")
def test_commands_in_a_git_home_are_measured_beside_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(git, "QUICK", git.Size(rounds=2, files=200, directories=10, worktrees=1))
    monkeypatch.setattr(git, "holdfast_command", lambda report: [sys.executable, "-m", "holdfast"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    report = git.run(quick=True)

    assert report.notes == []
    assert list(report.tables[0].rows) == list(git.LIMITS)
    assert all(target.measured is not None for target in report.targets)
    for action in report.afterwards:
        action()
    assert os.listdir(tmp_path) == []


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a git home needs POSIX")
def test_searches_for_conflicts_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(git, "holdfast_command", lambda report: [sys.executable, "-m", "holdfast"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    report = conflicts.run(quick=True)

    assert report.notes == []
    names = [conflicts.COLD, conflicts.WARM, conflicts.FLOOR, conflicts.ONE_CHANGED]
    assert list(report.tables[0].rows) == names
    assert all(target.measured is not None for target in report.targets)


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a git home needs POSIX")
def test_landings_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(git, "holdfast_command", lambda report: [sys.executable, "-m", "holdfast"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    report = landing.run(quick=True)

    assert report.notes == []
    assert list(report.tables[0].rows) == [landing.OURS, landing.FLOOR, landing.SYNCED]
    assert all(target.measured is not None for target in report.targets)


@pytest.mark.skipif(sys.platform == "win32", reason="a git home needs POSIX")
def test_a_command_that_fails_in_a_git_home_is_reported(tmp_path: Path) -> None:
    report = Report()
    size = git.Size(rounds=1, files=20, directories=1)
    git.make(tmp_path, size)
    side = git.Side(tmp_path, ["git"])
    match = git.Match(side, side, report)

    match.measure("status", lambda: side.call("nonsense"), lambda: side.git("status"))
    git.judge(match, size)

    assert "nonsense" in report.notes[0]
    assert {target.verdict for target in report.targets} == {"not measured"}


# --- Long histories -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="the servers need POSIX")
def test_commands_on_a_long_history_are_measured_beside_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "QUICK", scale.Size(issues=1000, events=200, entries=200, rounds=1))
    with tempfile.TemporaryDirectory(prefix="holdfast-") as place:  # PostgreSQL runs as another user
        Path(place).chmod(0o755)
        monkeypatch.chdir(place)
        report = scale.run(quick=True)
        assert os.listdir(place) == []
    assert report.notes == []
    assert [list(table.rows) for table in report.tables] == [list(scale.COMMANDS)] * 2
    assert all(target.measured is not None for target in report.targets)


# --- The ledger ---------------------------------------------------------------------------------------


class Forgetful(ledger.Ours):
    """Planted: acknowledges every append, but performs only every other one, and not the first: on a busy machine
    there may be no second."""

    _turn = 0

    def append(self) -> None:
        self._turn += 1
        if self._turn % 2 == 0:
            super().append()


@pytest.mark.long
@needs_flock
def test_the_ledger_is_measured_and_lost_events_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = ledger.Size(rounds=1, sample_seconds=0.001, claim_rounds=1, crew_seconds=0.05, events=(0, 10))
    monkeypatch.setattr(ledger, "QUICK", size)
    monkeypatch.setattr(ledger, "WRITERS", (2,))
    monkeypatch.chdir(tmp_path)
    report = ledger.run(quick=True)
    titles = [table.title.split()[0] for table in report.tables]
    assert titles == ["one", "events", "open,", "replay", "durable"]
    assert all(target.measured is not None for target in report.targets)
    assert report.notes == []
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(ledger, "Ours", Forgetful)
    found = Report()
    ledger.writers(tmp_path, size, found)
    assert len(found.notes) == 1
    assert "were appended" in found.notes[0]


@pytest.mark.long
@needs_flock
def test_writers_that_meet_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "PROCESSES", (1, 2))
    monkeypatch.setattr(writers, "QUICK", writers.Size(rounds=1, seconds=0.05))
    monkeypatch.chdir(tmp_path)
    report = writers.run(quick=True)
    assert [table.title.split()[0] for table in report.tables] == ["appends", "updates", "updates"]
    assert len(report.targets) == 12
    assert all(target.measured is not None for target in report.targets)
    assert report.notes == []
    assert os.listdir(tmp_path) == []


class Failing(ledger.Sqlite):
    """A peer that fails once several processes meet."""

    def append(self) -> None:
        raise OSError("database is locked")


@needs_flock
def test_a_writer_that_fails_leaves_a_gap_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    kinds = (writers.LockedAppends, ledger.Ours, Failing)
    monkeypatch.setattr(writers, "APPENDS", writers.APPENDS._replace(kinds=kinds))
    writers._compare(writers.APPENDS, tmp_path, writers.Size(rounds=1, seconds=0.05), report)
    assert any("- " in line for line in report.lines())
    assert any("database is locked" in note for note in report.notes)


def test_agents_on_a_queue_are_counted_and_lost_work_is_noted(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_url
    for ours, notes in ((queues.IssuesOnPostgres, 0), (Careless, 1)):
        monkeypatch.setitem(queues.QUEUES, "PostgreSQL", (queues.SkipLocked, ours))
        report = Report()
        queues.agents("PostgreSQL", url, tmp_path, queues.QUICK._replace(span=0.1), report)
        (table,) = report.tables
        assert [value for row in table.rows.values() for value in row[::3] if not value] == []  # all have done some
        assert len(report.targets) == 2 * len(queues.QUICK.agents) + 1
        assert len([each for each in report.notes if each.startswith(ours.name)]) >= notes
        assert notes or not report.notes
