"""The commits of the file store, killed, failed and cut off from power at every call that they make.

What is swept stands in `commit_cases`, what must be true after each point in `commit_scenarios.examine`.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.store import intents
from holdfast.store.files import FileStore
from proof.crash import Attempt, Fault, Report, error_points, fresh, interposed, kill_points, scratch
from proof.effort import SHARE, chosen, rounds
from proof.powercut import Case, power_cuts
from tests.store.commit_cases import ALL, LARGE, SEVERAL, SINGLE
from tests.store.commit_operations import looking, restoring, touching
from tests.store.commit_scenarios import (
    CommitCase,
    RecoveryCase,
    after_deaths,
    after_faults,
    death_points,
    orders_given,
    remains,
)
from tests.store.worlds import GATES, Named, drafts_left

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, and directories that can be synced")

POINTS_DEMANDED, STATES_DEMANDED = 10_000, 20_000
"""What all sweeps together must try: kills and errors, and different states after a power cut."""

points: Counter[str] = Counter()
"""The kills and errors that this run has tried."""
states: set[int] = set()
"""The states that it has tried, each once, whichever sweeps came to it."""

KILLED = [
    *("create", "create in a new directory", "replace", "delete", "append a line", "append to the ledger"),
    *("create an issue", "delete an issue", "transfer", "append two to the ledger", "wide", "twelve steps"),
]
"""Cases of which each makes calls that the others do not make; each point takes a process of its own."""
FAILED = [
    *(*KILLED, "create in a new store", "rest on others", "append the first line", "begin the ledger"),
    "take the first snapshot",
]
USED = [name for name in (*SINGLE, *SEVERAL) if ALL[name].old.documents or ALL[name].old.streams]
"""Cases on a store that was in use. In a new one, lock files are new too, and multiply the states."""
MANY_STATES = ("take a snapshot", "share out")
BATCH = "append two to the ledger"
"""Its drafts multiply the states of whoever comes next: of those only a sample is tried."""
IN_A_ROW = [name for name in USED if name not in ("wide", "create, large", "append a long line", BATCH, *MANY_STATES)]
NEW, WARM = False, True
FOLLOWED = [
    *((name, second, warm) for name in IN_A_ROW for second in ("everything", "one thing") for warm in (NEW, WARM)),
    *((name, second, warm) for name in MANY_STATES for second, warm in (("everything", NEW), ("one thing", WARM))),
]
"""What died, what came next, and whether that came through a new store or through one that was in use."""


def count(kind: str, report: Report, *, at_least: int) -> None:
    report.require_clean(at_least=at_least)
    points[kind] += report.points


class States:
    """Collects what a sweep has checked, and counts it in the end."""

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


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
@pytest.mark.sampled(7)
def test_an_error_of_a_call_that_only_reads_leaves_all_of_a_commit_or_nothing(name: str) -> None:
    count("errors", error_points(ALL[name], names=calls.READING, share=SHARE), at_least=15)


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
@pytest.mark.sampled(9)
def test_a_power_cut_at_any_moment_leaves_all_of_a_commit_or_nothing(name: str) -> None:
    sweep = States()
    sweep.count(power_cuts(ALL[name], checked=sweep.checked, share=SHARE), at_least=3)


@pytest.mark.parametrize("name", LARGE)
def test_a_power_cut_during_a_large_commit_leaves_all_of_it_or_nothing(name: str) -> None:
    """Its states are too many to try all: a sample of each moment."""
    sweep = States()
    report = power_cuts(ALL[name], limit=8, checked=sweep.checked, share=SHARE)
    assert report.violations == [], str(report)
    assert report.capped
    sweep.add()


# --- After somebody's death, or failure --------------------------------------------------------------


def seconds(case: CommitCase) -> dict[str, list[Named]]:
    """What comes next: a change of everything, or of one thing alone."""
    return {"everything": list(case.named), "one thing": list(case.operation.named[:1])}


@pytest.mark.parametrize(("name", "second", "warm"), FOLLOWED)
@pytest.mark.sampled(1)
def test_what_is_acknowledged_after_a_death_survives_a_power_cut(name: str, second: str, warm: bool) -> None:
    case, sweep = ALL[name], States()
    report = after_deaths(case, touching(seconds(case)[second]), sweep.checked, warm=warm, share=SHARE)
    sweep.count(report, at_least=10)


@pytest.mark.parametrize("name", ["create an issue", "delete an issue", "replace and tell", "share out"])
@pytest.mark.sampled(1)
def test_an_intent_of_a_dead_one_does_not_come_back_over_what_was_undone(name: str) -> None:
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
@pytest.mark.sampled(3)
def test_what_was_said_about_a_failure_is_true_after_a_power_cut(name: str, fault: Fault) -> None:
    """Made is made, failed is not there; and what came next, on a disk that works again, is there."""
    case, sweep = ALL[name], States()
    report = after_faults(case, touching(case.operation.named[:1]), fault, sweep.checked, share=SHARE)
    sweep.count(report, at_least=4)


@pytest.mark.parametrize("name", ["create an issue", "transfer"])
def test_a_recovery_can_be_killed_and_fail_and_lose_its_power_at_any_call(name: str) -> None:
    """Whatever a dead one left: who finishes it is disturbed at each call, and another one finishes it."""
    case, sweep = ALL[name], States()
    for files in chosen(remains(case), least=3):
        recovery = RecoveryCase(files, case.named, looking(case.named))
        count("kills", death_points(recovery, share=SHARE), at_least=1)
        sweep.count(power_cuts(recovery, checked=sweep.checked, share=SHARE), at_least=0)
        if recovery.finishes_an_intent and name == "transfer":
            count("errors", error_points(recovery, (errno.EIO,), lasting=(), share=SHARE), at_least=20)


def test_a_recovery_is_really_killed_and_can_be_done_by_another() -> None:
    """The same with real processes, for what is left at the moments around the commit point."""
    case = ALL["transfer"]
    cases = [RecoveryCase(files, case.named, looking(case.named)) for files in remains(case)]
    unfinished = [each for each in cases if each.finishes_an_intent]
    assert len(unfinished) >= 3
    for each in unfinished[: rounds(3, least=1)]:
        count("kills", kill_points(each, share=SHARE), at_least=50)


@pytest.mark.parametrize(
    ("second", "warm", "at_once"),
    [("everything", NEW, False), ("everything", NEW, True), ("one", WARM, True)],
)
@pytest.mark.sampled(1)
def test_what_comes_after_the_death_of_a_batch_survives_a_power_cut(
    second: str, warm: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:
        monkeypatch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    case, sweep = ALL[BATCH], States()
    operation = touching(case.named if second == "everything" else case.operation.named[:1])
    report = after_deaths(case, operation, sweep.checked, warm=warm, limit=6, share=SHARE)
    assert report.violations == [], str(report)
    sweep.add()


def test_what_was_said_about_a_failure_of_a_batch_is_true_after_a_power_cut() -> None:
    case, sweep = ALL[BATCH], States()
    report = after_faults(case, touching(case.named), Fault(errno.EIO), sweep.checked, limit=6, share=SHARE)
    assert report.violations == [], str(report)
    sweep.add()


def test_a_batch_that_is_synced_all_at_once_is_as_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    case, sweep = ALL[BATCH], States()
    count("errors", error_points(case, (errno.EIO,), lasting=(), share=SHARE), at_least=30)
    sweep.count(power_cuts(case, checked=sweep.checked, share=SHARE), at_least=10)


def test_who_finishes_a_batch_clears_its_drafts_away() -> None:
    """Those that its author had written before it was decided; what was not decided is litter."""
    case = ALL[BATCH]
    cases = [RecoveryCase(files, case.named, looking(case.named)) for files in remains(case)]
    unfinished = [each for each in cases if each.finishes_an_intent]
    assert len(unfinished) >= 3
    for each in unfinished:
        with scratch() as base, fresh(base) as directory:
            each.prepare(directory)
            with FileStore(directory) as store:
                each.operation.run(store)
            assert [name for name in drafts_left(directory) if "event-" in name] == []


def test_a_commit_that_is_synced_all_at_once_is_as_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of large commits, taken by one whose states can all be tried."""
    monkeypatch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    case, sweep = ALL["share out"], States()
    count("errors", error_points(case, share=SHARE), at_least=100)
    sweep.count(power_cuts(case, checked=sweep.checked, share=SHARE), at_least=10)
    sweep.count(after_deaths(case, touching(case.named), sweep.checked, share=SHARE), at_least=100)


# --- What is known, and the sum ----------------------------------------------------------------------


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
def test_all_sweeps_together_try_as_much_as_is_demanded(
    pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = f"{points['kills']} kills, {points['errors']} errors, {len(states)} states after power cuts"
    with capsys.disabled():
        sys.stdout.write(f"\nthe commits of the store went through {tried}\n")
        for order, times in orders_given.items():
            sys.stdout.write(f"NOT BY ITSELF: in {times} checks a person had {order}\n")
    terminal = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if (terminal and terminal.stats.get("deselected")) or any("::" in each for each in pytestconfig.args):
        pytest.skip("only a part of the sweeps was asked for")
    assert points.total() >= POINTS_DEMANDED, tried
    assert len(states) >= STATES_DEMANDED, tried
