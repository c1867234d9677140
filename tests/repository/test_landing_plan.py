"""The planner of the landing queue, driven by random entries, culprits, pairs that do not fit, and flaky checks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.repository import landing_plan
from holdfast.repository.landing_plan import (
    BATCH,
    GROWTH,
    Candidate,
    LandingPlan,
    PlanOutcome,
    after,
    on_new_tip,
    outcome,
    plan_for,
    published,
    wanted,
    with_failed,
    with_queue,
    with_result,
)
from proof.effort import rounds

Passes = Callable[[Candidate], bool]
"""Whether everything that has landed, with a candidate on top of it, passes the checks."""


@dataclass
class Target:
    """A branch that carries out a plan, and keeps a record of everything that it did."""

    passes: Passes
    landed: Candidate = ()
    failed: list[str] = field(default_factory=list)
    green: set[Candidate] = field(default_factory=set)
    red: list[Candidate] = field(default_factory=list)
    runs: int = 0
    flaky: int = 0

    def test(self, plan: LandingPlan, candidate: Candidate) -> LandingPlan:
        built = self.landed + candidate
        self.runs += 1
        passed = self.passes(built)
        if passed:
            self.green.add(built)
        else:
            self.red.append(built)
        return with_result(plan, candidate, passed=passed)

    def carry_out(self, plan: LandingPlan, decided: PlanOutcome) -> LandingPlan:
        if decided.publish:
            self.landed += decided.publish
            self.flaky += decided.flaky
            assert self.landed in self.green, "an untested combination was published"
            return published(plan, decided.publish)
        (entry,) = decided.failed
        assert self.red.count((*self.landed, entry)) == 2, "an entry failed that has not failed alone, twice"
        self.failed.append(entry)
        return with_failed(plan, decided.failed)


def work_off(target: Target, plan: LandingPlan, order: random.Random | None = None) -> Target:
    """Carry out a plan to its end; with an order, the tests that run at the same time end in a random order."""
    running: list[Candidate] = []
    entries = len(plan.queue)
    while plan.queue:
        decided = outcome(plan)
        if decided != PlanOutcome():
            plan = target.carry_out(plan, decided)
            rests = (after(decided.publish, each) for each in running)
            running = [each for each in rests if each and set(each).isdisjoint(decided.failed)]
            continue
        want = wanted(plan, running)
        assert 0 < len(want) <= plan.parallel
        assert all(plan.queue[: len(each)] == each for each in want)
        running = [each for each in running if each in want] + [each for each in want if each not in running]
        assert set(running) == set(want)
        ended = running.pop(order.randrange(len(running)) if order else 0)
        plan = target.test(plan, ended)
        assert target.runs <= 4 * entries * (entries + 2), "it does not come to an end"
        plan = msgspec.json.decode(msgspec.json.encode(plan), type=LandingPlan)  # as another process continues
    return target


def names(count: int) -> Candidate:
    return tuple(f"e{number}" for number in range(count))


def without(culprits: Sequence[str]) -> Passes:
    return lambda built: not set(built) & set(culprits)


@pytest.mark.parametrize(("parallel", "most"), [(1, 12), (2, 18), (4, 24)])
def test_64_entries_with_one_culprit_land_in_at_most_12_runs(parallel: int, most: int) -> None:
    """Of tests that run at the same time, some are in vain."""
    entries = names(64)
    for culprit in entries:
        target = work_off(Target(without([culprit])), plan_for(entries, parallel=parallel))
        assert target.runs <= most
        assert (target.failed, len(target.landed)) == ([culprit], 63)


def test_a_queue_without_culprits_is_tested_in_batches_that_grow() -> None:
    sizes: list[int] = []

    def passes(built: Candidate) -> bool:
        sizes.append(len(built))
        return True

    work_off(Target(passes), plan_for(names(64)))
    assert sizes == [16, 48, 64]  # a quarter of the queue, then twice as many
    sizes.clear()
    work_off(Target(passes), plan_for(names(20)))
    assert sizes == [8, 20]
    sizes.clear()
    work_off(Target(passes), plan_for(names(3), batch=1))
    assert sizes == [1, 2, 3]


def test_a_queue_without_checks_is_one_batch_up_to_the_largest() -> None:
    entries = [str(number) for number in range(100)]
    assert [len(each) for each in wanted(plan_for(entries, has_checks=False))] == [BATCH * GROWTH]
    assert [len(each) for each in wanted(plan_for(entries, batch=1, has_checks=False))] == [1]


def test_only_failures_make_the_next_batches_small() -> None:
    every = work_off(Target(lambda built: False), plan_for(names(64)))
    assert every.runs <= 64 * 2 + 14
    assert (every.failed, every.landed) == (list(names(64)), ())


def test_a_red_batch_is_run_once_more_and_accepted_if_it_passes() -> None:
    answers = iter([False, True])
    target = work_off(Target(lambda built: next(answers)), plan_for(names(8)))
    assert (target.landed, target.failed, target.flaky, target.runs) == (names(8), [], 1, 2)


def test_the_results_of_a_bisection_are_used_again() -> None:
    """The last entry of a batch is the culprit: everything before it passed, and with it everything failed twice."""
    target = work_off(Target(without(["e7"])), plan_for(names(8)))
    assert [len(each) for each in target.red] == [8, 8]
    assert sorted(map(len, target.green)) == [4, 6, 7]


def test_of_two_entries_that_do_not_fit_together_the_later_one_fails() -> None:
    target = work_off(Target(lambda built: not {"e2", "e5"} <= set(built)), plan_for(names(8)))
    assert target.failed == ["e5"]
    assert target.landed == tuple(each for each in names(8) if each != "e5")


def test_a_small_batch_is_tested_singly() -> None:
    target = work_off(Target(without(["e2"])), plan_for(names(3)))
    assert [len(each) for each in target.red] == [3, 3]
    assert sorted(map(len, target.green)) == [1, 2]


def test_the_queue_can_change_while_it_is_worked_off() -> None:
    plan = with_result(plan_for(names(4)), ("e0", "e1"), passed=False)
    assert with_queue(plan, ("e9", *names(4))).tested == plan.tested
    assert with_queue(plan, ("e1", "e2")).tested == ()
    assert on_new_tip(plan).tested == ()
    assert wanted(with_queue(plan, ("e9", *names(4)))) == (("e9", *names(4)),)
    with pytest.raises(ValueError, match="does not begin the queue"):
        published(plan, ("e1",))


def test_a_result_that_comes_late_changes_nothing() -> None:
    plan = with_result(plan_for(names(4)), ("e0", "e1"), passed=True)
    late = with_result(plan, ("e0", "e1"), passed=False)
    assert outcome(late) == outcome(plan) == PlanOutcome(publish=("e0", "e1"))


def bound(entries: int, culprits: int, batch: int) -> float:
    """For each culprit, its batch and itself twice each, a bisection, and the smaller batches that follow; and at most
    one run more than batches of the first size need."""
    largest = max(2, batch * GROWTH)
    return entries / batch + 1 + culprits * (2 * math.log2(largest) + 6)


queues = st.integers(1, 40)
orders = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=rounds(2000, least=30), deadline=None)
@given(data=st.data(), count=queues, batch=st.integers(1, 10), parallel=st.integers(1, 4), order=orders)
def test_everything_innocent_lands_and_every_culprit_fails(
    data: st.DataObject, count: int, batch: int, parallel: int, order: random.Random
) -> None:
    entries = names(count)
    culprits = data.draw(st.sets(st.sampled_from(entries)))
    target = work_off(Target(without(list(culprits))), plan_for(entries, batch=batch, parallel=parallel), order)

    assert target.landed == tuple(each for each in entries if each not in culprits)
    assert target.failed == [each for each in entries if each in culprits]
    if parallel == 1:
        assert target.runs <= bound(count, len(culprits), batch)


@settings(max_examples=rounds(2000, least=30), deadline=None)
@given(data=st.data(), count=st.integers(2, 30), parallel=st.integers(1, 3), order=orders)
def test_an_entry_fails_only_for_what_has_landed(
    data: st.DataObject, count: int, parallel: int, order: random.Random
) -> None:
    """Pairs that do not fit: of each, the one that comes first lands, unless it does not fit to something else."""
    entries = names(count)
    pair = st.sets(st.sampled_from(entries), min_size=2, max_size=2)
    pairs = data.draw(st.lists(pair, max_size=6))
    target = work_off(
        Target(lambda built: not any(each <= set(built) for each in pairs)),
        plan_for(entries, parallel=parallel),
        order,
    )

    expected: list[str] = []
    for each in entries:
        if not any(pair <= {*expected, each} for pair in pairs):
            expected.append(each)
    assert target.landed == tuple(expected)
    assert sorted(target.failed) == sorted(set(entries) - set(expected))


@settings(max_examples=rounds(2000, least=30), deadline=None)
@given(data=st.data(), count=queues, rate=st.floats(0, 0.9), seed=st.integers(0, 2**32), parallel=st.integers(1, 3))
def test_flaky_checks_cost_runs_and_let_no_culprit_land(
    data: st.DataObject, count: int, rate: float, seed: int, parallel: int
) -> None:
    """An innocent entry can only fail if its own check fails by chance twice; `carry_out` asserts that."""
    entries, chance = names(count), random.Random(seed)
    culprits = data.draw(st.sets(st.sampled_from(entries)))
    innocent = without(list(culprits))
    target = work_off(
        Target(lambda built: innocent(built) and chance.random() >= rate), plan_for(entries, parallel=parallel), chance
    )

    assert culprits <= set(target.failed)
    assert sorted((*target.landed, *target.failed)) == sorted(entries)


@settings(max_examples=rounds(2000, least=30), deadline=None)
@given(data=st.data(), count=st.integers(2, 30), rate=st.floats(0.0, 0.3), seed=st.integers(0, 2**32), order=orders)
def test_a_target_that_others_move_and_a_queue_that_changes_come_to_an_end(
    data: st.DataObject, count: int, rate: float, seed: int, order: random.Random
) -> None:
    entries, chance = names(count), random.Random(seed)
    culprits = data.draw(st.sets(st.sampled_from(entries)))
    target, plan = Target(without(list(culprits))), plan_for(entries)
    gone: list[str] = []
    while plan.queue:
        if (decided := outcome(plan)) != PlanOutcome():
            plan = target.carry_out(plan, decided)
        elif chance.random() < rate and plan.tested:
            target.landed += (f"person-{target.runs}",)
            plan = on_new_tip(plan)
        elif chance.random() < rate / 4:
            gone.append(chance.choice(plan.queue))
            plan = with_queue(plan, (each for each in plan.queue if each not in gone))
        else:
            plan = target.test(plan, wanted(plan)[0])
        assert target.runs < 2000

    landed = [each for each in target.landed if each in entries]
    assert sorted((*landed, *target.failed, *gone)) == sorted(entries)
    assert not culprits & set(landed)


# --- Planted faults -----------------------------------------------------------------------------------


def test_a_planner_that_publishes_an_untested_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(plan: LandingPlan) -> PlanOutcome:
        decided = landing_plan.outcome(plan)
        return decided._replace(publish=decided.publish[:-1]) if len(decided.publish) > 1 else decided

    monkeypatch.setattr("tests.repository.test_landing_plan.outcome", hasty)
    with pytest.raises(AssertionError, match="untested combination"):
        work_off(Target(without([])), plan_for(names(8)))


def test_a_planner_that_fails_an_entry_after_one_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_plan, "_ENOUGH", 1)
    with pytest.raises(AssertionError, match="has not failed alone, twice"):
        work_off(Target(without(["e3"])), plan_for(names(8)))


def test_a_planner_that_keeps_results_of_an_old_tip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target, plan = Target(without([])), plan_for(names(4))
    plan = target.test(plan, wanted(plan)[0])
    target.landed += ("person",)
    with pytest.raises(AssertionError, match="untested combination"):
        target.carry_out(plan, outcome(plan))
