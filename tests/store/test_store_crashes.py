"""Crash sweeps over the commits of the file store: a kill, an error and a power cut at every call.

The commits are in `commit_cases`. `commit_scenarios.examine` checks the store after each crash point.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.errors import Failure, NotApplied
from holdfast.fs import calls
from holdfast.store import intents
from holdfast.store.files import FileStore
from proof.crash import (
    Attempt,
    Ending,
    Fault,
    Outcome,
    Report,
    error_points,
    fresh,
    interposed,
    kill_points,
    mark,
    scratch,
)
from proof.effort import SHARE, chosen, rounds
from proof.powercut import Case, power_cuts
from tests.store.commit_cases import ALL, LARGE, LATE, SEVERAL, SINGLE
from tests.store.commit_operations import looking, restoring, touching
from tests.store.commit_scenarios import (
    CommitCase,
    RecoveryCase,
    after_deaths,
    after_faults,
    death_points,
    difference,
    leftovers,
    manual_steps,
)
from tests.store.worlds import GATES, Named, drafts_left, seen_in_files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, and directories that can be synced")

POINTS_DEMANDED, STATES_DEMANDED = 10_000, 20_000
"""The minimum over all sweeps: kills and errors, and distinct states after power cuts."""

points: Counter[str] = Counter()
"""The kills and errors that this run has tried."""
states: set[int] = set()
"""The distinct states that this run has tried, over all sweeps."""

KILLED = [
    *("create", "create in a new directory", "replace", "delete", "append a line", "append to the ledger"),
    "append blindly",
    *("create an issue", "delete an issue", "transfer", "append two to the ledger", "wide", "twelve steps"),
    *("delete an issue, late", "tell twice"),
]
"""Cases that each make calls that the others do not; every point takes a process of its own."""
FAILED = [
    *(*KILLED, "create in a new store", "rest on others", "append the first line", "begin the ledger"),
    "append blindly to a new ledger",
    "take the first snapshot",
]
USED = [name for name in (*SINGLE, *SEVERAL, *LATE) if ALL[name].old.documents or ALL[name].old.streams]
"""Cases on a used store. In a new one, lock files are new too, and multiply the states."""
MANY_STATES = ("take a snapshot", "share out")
BATCH = "append two to the ledger"
"""Its drafts multiply the states of the next transaction, so only a sample of those is tried."""
IN_A_ROW = [name for name in USED if name not in ("wide", "create, large", "append a long line", BATCH, *MANY_STATES)]
NEW, WARM = False, True
FOLLOWED = [
    *((name, second, warm) for name in IN_A_ROW for second in ("everything", "one thing") for warm in (NEW, WARM)),
    *((name, second, warm) for name in MANY_STATES for second, warm in (("everything", NEW), ("one thing", WARM))),
]
"""The commit that dies, the operation that follows, and whether that uses a new store or a warm one."""


def count(kind: str, report: Report, *, at_least: int) -> None:
    report.require_clean(at_least=at_least)
    points[kind] += report.points


class States:
    """The states that a sweep has checked; `add` counts them."""

    def __init__(self) -> None:
        self.checked: set[Case] = set()

    def count(self, report: Report, *, at_least: int) -> None:
        report.require_clean(at_least=at_least)
        self.add()

    def add(self) -> None:
        states.update(hash(state) for _, _, state in self.checked)


# --- One transaction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KILLED)
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_leaves_all_of_a_commit_or_nothing(name: str) -> None:
    count("kills", kill_points(ALL[name], share=SHARE), at_least=50)


@pytest.mark.parametrize("name", FAILED)
@pytest.mark.sampled(1)
def test_an_error_at_any_call_leaves_all_of_a_commit_or_nothing(name: str) -> None:
    count("errors", error_points(ALL[name], share=SHARE), at_least=100)


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL, *LATE])
@pytest.mark.sampled(4)
def test_an_error_at_any_reading_call_leaves_all_of_a_commit_or_nothing(name: str) -> None:
    count("errors", error_points(ALL[name], names=calls.READING, share=SHARE), at_least=15)


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL, *LATE])
@pytest.mark.sampled(5)
def test_a_power_cut_at_any_moment_leaves_all_of_a_commit_or_nothing(name: str) -> None:
    sweep = States()
    sweep.count(power_cuts(ALL[name], checked=sweep.checked, share=SHARE), at_least=3)


@pytest.mark.parametrize("name", LARGE)
def test_a_power_cut_during_a_large_commit_leaves_all_of_it_or_nothing(name: str) -> None:
    """It has too many states to try them all, so this takes a sample at each moment."""
    sweep = States()
    report = power_cuts(ALL[name], limit=8, checked=sweep.checked, share=SHARE)
    assert report.violations == [], str(report)
    assert report.capped
    sweep.add()


# --- After a death or a failure ----------------------------------------------------------------------


def seconds(case: CommitCase) -> dict[str, Sequence[Named]]:
    """The names that the second operation changes: everything, or one thing alone."""
    return {"everything": case.named, "one thing": case.named[:1]}


@pytest.mark.parametrize(("name", "second", "warm"), FOLLOWED)
@pytest.mark.sampled(1)
def test_a_commit_acknowledged_after_a_death_survives_a_power_cut(name: str, second: str, warm: bool) -> None:
    case, sweep = ALL[name], States()
    report = after_deaths(case, touching(seconds(case)[second]), sweep.checked, warm=warm, share=SHARE)
    sweep.count(report, at_least=10)


@pytest.mark.parametrize(
    "name", ["create an issue", "delete an issue", "replace and tell", "share out", "update and tell"]
)
@pytest.mark.sampled(1)
def test_the_intent_of_a_dead_process_does_not_redo_a_change_that_was_undone(name: str) -> None:
    case, sweep = ALL[name], States()
    report = after_deaths(case, restoring(case.old, case.named), sweep.checked, share=SHARE)
    sweep.count(report, at_least=50)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, Fault(errno.EIO)) for name in IN_A_ROW),
        *((name, Fault(errno.EIO, lasting=True)) for name in ("append a line", "transfer")),
    ],
)
@pytest.mark.sampled(2)
def test_the_outcome_reported_after_a_failure_holds_after_a_power_cut(name: str, fault: Fault) -> None:
    """A commit reported as made survives, a failed one does not show; and the next one, on a working disk, survives."""
    case, sweep = ALL[name], States()
    report = after_faults(case, touching(case.named[:1]), fault, sweep.checked, share=SHARE)
    sweep.count(report, at_least=4)


@pytest.mark.parametrize("name", ["create an issue", "transfer", "delete an issue, late"])
def test_a_recovery_survives_a_kill_an_error_or_a_power_cut_at_any_call(name: str) -> None:
    """For every state that a dead process can leave: disturb recovery at each call; another process finishes it."""
    case, sweep = ALL[name], States()
    for files in chosen(leftovers(case), least=3):
        recovery = RecoveryCase(files, case.named, looking(case.named))
        count("kills", death_points(recovery, share=SHARE), at_least=1)
        sweep.count(power_cuts(recovery, checked=sweep.checked, share=SHARE), at_least=0)
        if recovery.finishes_an_intent and name == "transfer":
            count("errors", error_points(recovery, (errno.EIO,), lasting=(), share=SHARE), at_least=20)


def test_a_recovery_in_a_real_process_can_be_killed_at_any_call() -> None:
    """The same with real processes, for the states around the commit point."""
    case = ALL["transfer"]
    cases = [RecoveryCase(files, case.named, looking(case.named)) for files in leftovers(case)]
    unfinished = [each for each in cases if each.finishes_an_intent]
    assert len(unfinished) >= 3
    for each in unfinished[: rounds(3, least=1)]:
        count("kills", kill_points(each, share=SHARE), at_least=50)


@pytest.mark.parametrize(
    ("second", "warm", "at_once"),
    [("everything", NEW, False), ("everything", NEW, True), ("one", WARM, True)],
)
@pytest.mark.sampled(1)
def test_a_commit_after_the_death_of_a_batch_survives_a_power_cut(
    second: str, warm: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:
        monkeypatch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    case, sweep = ALL[BATCH], States()
    operation = touching(case.named if second == "everything" else case.operation.named[:1])
    report = after_deaths(case, operation, sweep.checked, warm=warm, limit=6, share=SHARE)
    assert report.violations == [], str(report)
    sweep.add()


def test_the_outcome_reported_after_a_failed_batch_holds_after_a_power_cut() -> None:
    case, sweep = ALL[BATCH], States()
    report = after_faults(case, touching(case.named), Fault(errno.EIO), sweep.checked, limit=6, share=SHARE)
    assert report.violations == [], str(report)
    sweep.add()


def test_a_batch_that_is_synced_all_at_once_is_just_as_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    case, sweep = ALL[BATCH], States()
    count("errors", error_points(case, (errno.EIO,), lasting=(), share=SHARE), at_least=30)
    sweep.count(power_cuts(case, checked=sweep.checked, share=SHARE), at_least=10)


def test_recovery_of_a_batch_removes_its_drafts() -> None:
    """Only the drafts of a decided batch: those of an undecided one are litter."""
    case = ALL[BATCH]
    cases = [RecoveryCase(files, case.named, looking(case.named)) for files in leftovers(case)]
    unfinished = [each for each in cases if each.finishes_an_intent]
    assert len(unfinished) >= 3
    for each in unfinished:
        with scratch() as base, fresh(base) as directory:
            each.prepare(directory)
            with FileStore(directory) as store:
                each.operation.run(store)
            assert [name for name in drafts_left(directory) if "event-" in name] == []


def test_a_commit_that_is_synced_all_at_once_is_just_as_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of large commits, on a commit small enough to try all its states."""
    monkeypatch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    case, sweep = ALL["share out"], States()
    count("errors", error_points(case, share=SHARE), at_least=100)
    sweep.count(power_cuts(case, checked=sweep.checked, share=SHARE), at_least=10)
    sweep.count(after_deaths(case, touching(case.named), sweep.checked, share=SHARE), at_least=100)


# --- What a success means ----------------------------------------------------------------------------


class TruthfulCase(CommitCase):
    """A commit that succeeds is in the files, or the caller is told that it is not yet."""

    def operate(self, directory: Path) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NotApplied)
            super().operate(directory)
        for each in caught:
            assert isinstance(each.message, NotApplied)
            mark("not applied")

    def check(self, directory: Path, outcome: Outcome) -> None:
        if outcome.ending is Ending.SUCCEEDED and not outcome.marks:
            found = seen_in_files(directory, self.named)
            assert found == self.new, f"a success that is not in the files: {difference(found, [self.new])}"
        super().check(directory, outcome)


@pytest.mark.parametrize(
    "name", ["create an issue", "delete an issue", "transfer", "take a snapshot", "delete an issue, late"]
)
@pytest.mark.sampled(1)
def test_a_success_is_in_the_files_or_the_caller_is_told(name: str) -> None:
    case = TruthfulCase(ALL[name].history, ALL[name].operation)
    count("errors", error_points(case, (errno.ENOSPC, errno.EIO), share=SHARE), at_least=50)


def test_documents_need_no_space_once_a_commit_is_decided(tmp_path: Path) -> None:
    """So on a full disk a commit fails, or its documents are in place."""
    case = ALL["create an issue"]
    decided: list[object] = []
    case.prepare(tmp_path)

    def full_from_the_commit_point_on(attempt: Attempt) -> object:
        if decided and (attempt.name == "write" or attempt.flags & os.O_CREAT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        result = attempt.perform()
        if attempt.name == "link" and str(attempt.arguments[1]).endswith("first.json"):
            decided.append(result)
        return result

    with interposed(full_from_the_commit_point_on), FileStore(tmp_path) as store, pytest.warns(NotApplied) as told:
        case.operation.run(store, commit_id="first")
    assert "No space left" in str(told[0].message)
    assert seen_in_files(tmp_path, case.named).documents == case.new.documents
    with FileStore(tmp_path) as store:
        looking(case.named).run(store)
    assert seen_in_files(tmp_path, case.named) == case.new


# --- Locks, and the totals ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["close", "fstat"])
def test_locks_raise_nothing_but_failures(call: str, tmp_path: Path) -> None:
    def fail(attempt: Attempt) -> None:
        attempt.perform()
        raise OSError(errno.EIO, "the disk is broken")

    with FileStore(tmp_path) as store, store._locks.locked([store._locate(GATES)]):
        pass
    store = FileStore(tmp_path)
    try:
        with (
            contextlib.suppress(Failure),
            interposed(fail, (call,)),
            store._locks.locked([store._locate(GATES)]),
        ):
            pass
        with interposed(fail, (call,)):
            store._locks.close()
    finally:
        store.close()


@pytest.mark.long
def test_all_sweeps_together_try_enough_points(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    tried = f"{points['kills']} kills, {points['errors']} errors, {len(states)} states after power cuts"
    with capsys.disabled():
        sys.stdout.write(f"\nthe commits of the store went through {tried}\n")
        for step, times in manual_steps.items():
            sys.stdout.write(f"NOT BY ITSELF: {times} checks needed an operator {step}\n")
    terminal = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if (terminal and terminal.stats.get("deselected")) or any("::" in each for each in pytestconfig.args):
        pytest.skip("only part of the sweeps was selected")
    assert points.total() >= POINTS_DEMANDED, tried
    assert len(states) >= STATES_DEMANDED, tried
