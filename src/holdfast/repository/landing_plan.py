"""The plan for a landing queue: the candidates to test next, and the decision from the results. No clock, no I/O.

A *candidate* is a sequence of entries that are put on the target's tip one after the other. The planner asks for tests
of candidates that are a prefix of the queue, and decides from their results alone:

- A candidate that has passed is published as it was built. Nothing else is ever published.
- A candidate that fails is tested once more. If it passes then, the check is flaky, and the candidate is accepted.
- A batch that has failed twice is bisected: a shorter prefix that passes is published, and what follows it is tested on
  top of it. Up to `SINGLY` entries are tested one by one.
- An entry fails if it alone, on the tip, has failed twice. The others go on without it.

Results apply to candidates on one tip. When a prefix is published, results of candidates that begin with it stay valid
for the rest, because the commit is the same. So the last entry of a bisected batch often needs no further test.

Size of a batch: the setting `land.batch`, or a quarter of a queue that is longer than four batches. A batch that passes
doubles the next one, up to `GROWTH` times the setting; an entry that fails halves it, down to 1. With a setting of 1,
every entry is tested alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec

BATCH, PARALLEL = 8, 1
GROWTH = 8  # a batch grows to at most this many times its configured size
SINGLY = 3  # a batch of at most this size is not bisected
_LONG = 4  # a queue of more batches than this is taken in quarters
_ENOUGH = 2  # failures after which a candidate is not tested again

Candidate: TypeAlias = tuple[str, ...]


class CandidateResults(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of one candidate so far: how often it failed, and whether it finally passed."""

    candidate: Candidate
    failures: int = 0
    passed: bool = False


class LandingPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entries without an outcome, in order, and the results of candidates on the target's tip.

    It can be stored, and another process can continue from it.
    """

    queue: Candidate
    size: int
    batch: int = BATCH
    parallel: int = PARALLEL
    tested: tuple[CandidateResults, ...] = ()


class PlanOutcome(NamedTuple):
    """The decision: the candidate to publish, or entries that fail; both are empty if tests are needed.

    `flaky` says that the candidate to publish failed before it passed.
    """

    publish: Candidate = ()
    failed: Candidate = ()
    flaky: bool = False


def plan_for(
    entries: Iterable[str], *, batch: int = BATCH, parallel: int = PARALLEL, has_checks: bool = True
) -> LandingPlan:
    """The plan for a queue of which nothing has been tested. Without checks, no batch can fail: the first is the
    largest."""
    queue = tuple(entries)
    size = min(_largest(batch), max(batch, -(-len(queue) // _LONG))) if has_checks else _largest(batch)
    return LandingPlan(queue=queue, size=size, batch=batch, parallel=parallel)


def wanted(plan: LandingPlan, running: Collection[Candidate] = ()) -> tuple[Candidate, ...]:
    """The candidates to be tested now, at most `parallel`, the most important first; none if the queue is empty or
    `outcome` decides something.

    `running` are the candidates under test. Start those that are wanted and not running; end those that are running and
    not wanted, because their results would no longer decide anything.
    """
    if not plan.queue or outcome(plan) != PlanOutcome():
        return ()
    lengths = list(_lengths(plan, {len(each) for each in running if each == plan.queue[: len(each)]}))
    return tuple(plan.queue[:length] for length in lengths[: plan.parallel])


def outcome(plan: LandingPlan) -> PlanOutcome:
    """The decision from the results so far. Carry it out, then continue with `published` or `with_queue`."""
    prefixes = _prefixes(plan)
    passed = [each for each in prefixes.values() if each.passed]
    if passed:
        longest = max(passed, key=lambda each: len(each.candidate))
        return PlanOutcome(publish=longest.candidate, flaky=longest.failures > 0)
    first = prefixes.get(1)
    if first is not None and first.failures >= _ENOUGH:
        return PlanOutcome(failed=first.candidate)
    return PlanOutcome()


def with_result(plan: LandingPlan, candidate: Candidate, *, passed: bool) -> LandingPlan:
    """The plan after one more test of a candidate. Further results of a candidate that has passed change nothing."""
    known = {each.candidate: each for each in plan.tested}
    before = known.get(candidate, CandidateResults(candidate))
    if not before.passed:
        known[candidate] = CandidateResults(candidate, before.failures + (not passed), passed)
    return msgspec.structs.replace(plan, tested=tuple(known.values()))


def published(plan: LandingPlan, candidate: Candidate) -> LandingPlan:
    """The plan after the target's tip has become this candidate, which must be a prefix of the queue."""
    if plan.queue[: len(candidate)] != candidate:
        raise ValueError("a candidate that does not begin the queue cannot have been published")
    rests = ((each, after(candidate, each.candidate)) for each in plan.tested)
    tested = tuple(msgspec.structs.replace(each, candidate=rest) for each, rest in rests if rest)
    size = min(2 * plan.size, _largest(plan.batch)) if len(candidate) >= plan.size else plan.size
    return msgspec.structs.replace(plan, queue=plan.queue[len(candidate) :], tested=tested, size=size)


def after(tip: Candidate, candidate: Candidate) -> Candidate | None:
    """The name of a candidate once `tip` is published: the entries after it. None if it is not built on `tip`."""
    return candidate[len(tip) :] if candidate[: len(tip)] == tip else None


def with_failed(plan: LandingPlan, entries: Collection[str]) -> LandingPlan:
    """The plan without entries that failed; the next batch is smaller."""
    shrunk = msgspec.structs.replace(plan, size=max(1, plan.size // 2))
    return with_queue(shrunk, (each for each in plan.queue if each not in entries))


def with_queue(plan: LandingPlan, entries: Iterable[str]) -> LandingPlan:
    """The plan with another queue on the same tip: entries were added, withdrawn or reordered, or do not merge.

    Results stay valid for candidates whose entries all remain.
    """
    queue = tuple(entries)
    remaining = set(queue)
    tested = tuple(each for each in plan.tested if remaining.issuperset(each.candidate))
    return msgspec.structs.replace(plan, queue=queue, tested=tested)


def on_new_tip(plan: LandingPlan) -> LandingPlan:
    """The plan after somebody else has moved the target: every candidate is built and tested again."""
    return msgspec.structs.replace(plan, tested=())


# --- The next tests -----------------------------------------------------------------------------------


def _largest(batch: int) -> int:
    return 1 if batch == 1 else batch * GROWTH


def _prefixes(plan: LandingPlan) -> dict[int, CandidateResults]:
    """The results that are about prefixes of the queue, by length."""
    return {len(each.candidate): each for each in plan.tested if each.candidate == plan.queue[: len(each.candidate)]}


def _lengths(plan: LandingPlan, running: Collection[int]) -> Iterator[int]:
    """The lengths of the prefixes to test: batches, each on top of the one before, up to the shortest that failed; then
    that one again, or shorter ones."""
    red = {length: each.failures for length, each in _prefixes(plan).items() if each.failures}
    shortest = min(red, default=len(plan.queue) + 1)
    below = [length for length in _batches(plan) if length < shortest]
    yield from below
    if not red:
        return
    if red[shortest] < _ENOUGH and (shortest == 1 or max(red.values()) < _ENOUGH):
        yield shortest
        return
    yield from _splits(below[-1] if below else 0, shortest, running)


def _batches(plan: LandingPlan) -> Iterator[int]:
    """The ends of the next batches, if each of them passes."""
    end, size = 0, plan.size
    while end < len(plan.queue):
        end = min(end + size, len(plan.queue))
        yield end
        size = min(2 * size, _largest(plan.batch))


def _splits(passing: int, failing: int, running: Collection[int]) -> Iterator[int]:
    """Lengths between one that passes and one that fails: those under test, then the middle of the widest gap."""
    chosen = sorted(each for each in running if passing < each < failing)
    yield from chosen
    while True:
        low, high = max(pairwise([passing, *sorted(chosen), failing]), key=lambda gap: gap[1] - gap[0])
        if high - low < 2:
            return
        chosen.append(low + 1 if high - low <= SINGLY else (low + high) // 2)
        yield chosen[-1]
