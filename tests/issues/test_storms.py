"""Many processes on one tracker: no lost update, no double claim, no cycle, no torn state.

Each round sets up the issues, starts all workers at once, and judges their answers.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import DependencyCycle, Failure
from holdfast.issues import rules
from holdfast.issues.creating import NewIssue
from holdfast.issues.dependencies import Walk
from holdfast.issues.gates import Definition
from holdfast.issues.model import GateStatus, State
from holdfast.issues.tracker import Tracker, Update
from proof.effort import rounds
from tests.issues.trackers import create_issues, cycles, events_of, problems, tracker_at
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

Act = Callable[[Tracker, Any], object]


def served_by(act: Act, directory: Path) -> Callable[[Line], None]:
    """A worker that calls `act` with each message it receives and answers with the result."""

    def work(line: Line) -> None:
        tracker = tracker_at(directory, f"agent:{os.getpid()}")
        while True:
            told = line.wait()
            try:
                line.say(act(tracker, told))
            except Failure as failure:
                line.say(failure.code)

    return work


def run_rounds(directory: Path, act: Act, rounds: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Run all workers at once, round by round; the first round sets their number."""
    first = next(rounds)
    with Workers() as workers:
        crew = workers.start_many(len(first), served_by(act, directory))
        for told in itertools.chain([first], rounds):
            for worker, message in zip(crew, told, strict=True):
                worker.say(message)
            yield [worker.hear() for worker in crew]


@pytest.fixture
def tracker(scratch: Path) -> Tracker:
    tracker = tracker_at(scratch)
    tracker.initialise()
    return tracker


@pytest.mark.req("FL-08", "FL-16")
def test_a_hundred_concurrent_creates_give_a_hundred_issues(tracker: Tracker, scratch: Path) -> None:
    act: Act = lambda here, title: here.create(NewIssue(title=title)).id  # noqa: E731
    many = rounds(100, least=20)
    titles = [f"issue {number}" for number in range(many)]

    [ids] = run_rounds(scratch, act, iter([titles]))

    assert len(set(ids)) == many
    assert {issue.id: issue.title for issue in tracker.snapshot()} == dict(zip(ids, titles, strict=True))
    assert events_of(tracker) == {"issue_created": many}
    index = json.loads((scratch / ".jit/index.json").read_text())
    assert sorted(index["all_ids"]) == sorted(ids)
    assert problems(tracker) == []


@pytest.mark.req("FL-08", "FL-16")
def test_fifty_writers_with_ten_increments_each_count_to_five_hundred(tracker: Tracker, scratch: Path) -> None:
    [issue_id] = create_issues(tracker, "counted")

    def act(here: Tracker, times: int) -> int:
        for _ in range(times):
            here.update(issue_id, Update(increments={"n": 1}))
        return times

    writers = rounds(50, least=5)
    [done] = run_rounds(scratch, act, iter([[10] * writers]))

    assert sum(done) == 10 * writers
    assert tracker.issue(issue_id).context == {"n": str(10 * writers)}
    assert events_of(tracker)["issue_updated"] == 10 * writers


@pytest.mark.req("FL-08", "FL-16")
def test_fifty_writers_on_ten_issues_lose_no_field(tracker: Tracker, scratch: Path) -> None:
    ids = create_issues(tracker, *(f"issue {number}" for number in range(10)))

    def act(here: Tracker, writer: int) -> int:
        for issue_id in random.sample(ids, len(ids)):
            here.update(issue_id, Update(context={f"w{writer}": str(writer)}))
        return writer

    writers = list(range(rounds(50, least=5)))
    [done] = run_rounds(scratch, act, iter([writers]))

    assert done == writers
    for issue in tracker.snapshot():
        assert issue.context == {f"w{writer}": str(writer) for writer in writers}


@pytest.mark.req("FL-11")
def test_eight_processes_pass_their_own_gates_and_none_overwrites_another(tracker: Tracker, scratch: Path) -> None:
    gates = [f"gate-{number}" for number in range(8)]
    for gate in gates:
        tracker.gates.define(Definition(gate))

    def act(here: Tracker, told: tuple[str, str]) -> str:
        return here.gates.judge(*told, GateStatus.PASSED).state.value

    full = rounds(40)

    def messages() -> Iterator[list[tuple[str, str]]]:
        for number in range(full):
            issue = tracker.create(NewIssue(title=f"issue {number}", gates=tuple(gates)))
            tracker.update(issue.id, Update(state=State.DONE))
            yield [(issue.id, gate) for gate in gates]

    for states in run_rounds(scratch, act, messages()):
        assert Counter(states) == {"gated": 7, "done": 1}  # the last gate to pass completes the issue
    assert events_of(tracker)["gate_passed"] == 8 * full
    assert all(issue.state is State.DONE and not issue.open_gates() for issue in tracker.snapshot())


@pytest.mark.req("FL-10")
def test_concurrent_dependency_adds_never_close_a_cycle(tracker: Tracker, scratch: Path) -> None:
    ids = create_issues(tracker, "a", "b", "c", "d")

    def act(here: Tracker, told: tuple[str, str]) -> object:
        try:
            return here.dependencies.add(*told).added
        except DependencyCycle as failure:
            return failure.facts["path"]

    def messages() -> Iterator[list[tuple[str, str]]]:
        for _ in range(rounds(200)):
            a, b, c, d = ids
            clear(tracker)
            tracker.dependencies.add(b, c)  # for a longer cycle too: a -> b -> c -> d -> a
            yield [(a, b), (c, d), (d, a), (b, a)]

    for answers in run_rounds(scratch, act, messages()):
        issues = list(tracker.snapshot())
        assert cycles(issues) == []
        assert True in answers
        refused = [each for each in answers if isinstance(each, list)]
        assert refused
        assert all(path[0] == path[-1] for path in refused)
    assert "dependents" not in " ".join(problems(tracker))


def clear(tracker: Tracker) -> None:
    for issue in tracker.snapshot():
        for on in issue.dependencies:
            tracker.dependencies.remove(issue.id, on)


@pytest.mark.req("FL-08", "FL-10")
def test_five_concurrent_dependency_adds_are_all_kept(tracker: Tracker, scratch: Path) -> None:
    act: Act = lambda here, told: here.dependencies.add(*told).added  # noqa: E731

    def messages() -> Iterator[list[tuple[str, str]]]:
        for _ in range(rounds(30)):
            issue, *others = create_issues(tracker, "waiting", *(f"dependency {number}" for number in range(5)))
            yield [(issue, other) for other in others]

    for answers in run_rounds(scratch, act, messages()):
        assert answers == [True] * 5
    waiting = [issue for issue in tracker.snapshot() if issue.title == "waiting"]
    assert [len(issue.dependencies) for issue in waiting] == [5] * rounds(30)
    assert problems(tracker) == []


@pytest.mark.req("FL-19")
@pytest.mark.parametrize("how", ["claim", "next"])
@pytest.mark.sampled(1)
def test_exactly_one_of_eight_claimers_wins_with_one_event(tracker: Tracker, scratch: Path, how: str) -> None:
    def act(here: Tracker, issue_id: str) -> str:
        if how == "claim":
            return here.claims.claim(issue_id, here.claims.request()).claim.assignee
        claimed = here.claims.claim_next(here.claims.request())
        return "E_ISSUE_CLAIMED" if claimed is None else claimed.claim.assignee

    def messages() -> Iterator[list[str]]:
        for number in range(rounds(200 if how == "claim" else 40, least=5)):
            yield create_issues(tracker, f"issue {number}") * 8

    for answers in run_rounds(scratch, act, messages()):
        tally = Counter(answers)
        assert tally.pop("E_ISSUE_CLAIMED") == 7
        [winner] = tally
        newest = list(tracker.snapshot())[-1]
        assert (newest.state, newest.assignee) == (State.IN_PROGRESS, winner)
    assert events_of(tracker)["issue_claimed"] == len(tracker.snapshot())


@pytest.mark.req("FL-19")
def test_concurrent_claimers_of_the_next_issue_each_get_a_different_one(tracker: Tracker, scratch: Path) -> None:
    ids = create_issues(tracker, *(f"issue {number}" for number in range(8)))

    def act(here: Tracker, told: object) -> str:
        claimed = here.claims.claim_next(here.claims.request())
        return claimed.issue.id if claimed else ""

    [answers] = run_rounds(scratch, act, iter([[None] * 8]))

    assert sorted(answers) == sorted(ids)


# --- Concurrent readers -----------------------------------------------------------------------------


@pytest.mark.req("FL-09", "FL-16", "FL-08")
def test_readers_see_consistent_states_while_writers_create_link_finish_and_delete(
    tracker: Tracker, scratch: Path
) -> None:
    def write(here: Tracker, seed: int) -> int:
        chance = random.Random(seed)
        for _ in range(25):
            created = here.create_all(
                [
                    NewIssue(title="first", key="first", labels=("pair",)),
                    NewIssue(title="second", depends_on=("first",), labels=("pair",)),
                ]
            )
            first, second = (each.issue.id for each in created)
            if chance.random() < 0.5:
                here.update(first, Update(state=State.DONE))
            if chance.random() < 0.5:
                here.delete(first)
                here.update(second, Update(title="alone"))
        return 25

    def read(here: Tracker, told: int) -> int:
        reads = 0
        while reads < 40:
            reads += 1
            snapshot = here.snapshot()
            for issue in snapshot:
                for on in issue.dependencies:
                    assert snapshot.lookup(on) is not None, f"{issue.id} depends on {on}, which does not exist"
                waits = rules.open_dependencies(issue, snapshot.lookup)
                assert (snapshot.state(issue) is State.READY) is (issue.state in rules.WAITING and not waits)
        return reads

    def act(here: Tracker, told: int) -> int:
        return write(here, told) if told >= 0 else read(here, told)

    [answers] = run_rounds(scratch, act, iter([[1, 2, 3, 4, -1, -2]]))

    assert answers == [25, 25, 25, 25, 40, 40]
    assert problems(tracker) == []


# --- Planted bugs that the storms must find ---------------------------------------------------------


def test_a_lost_update_is_found(tracker: Tracker, scratch: Path) -> None:
    [issue_id] = create_issues(tracker, "counted")

    def act(here: Tracker, times: int) -> int:
        for _ in range(times):
            read = here.issue(issue_id)  # before taking the lock, so that concurrent updates are overwritten
            counted = Update(increments={"n": 1}).applied(read)
            here.edit(issue_id, lambda issue, counted=counted: counted)  # type: ignore[misc]
        return times

    [done] = run_rounds(scratch, act, iter([[25] * 8]))

    assert int(tracker.issue(issue_id).context["n"]) < sum(done)


def test_a_missing_cycle_check_is_found(tracker: Tracker, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "check", lambda self, draft, walked: None)
    a, b = create_issues(tracker, "a", "b")

    def act(here: Tracker, told: tuple[str, str]) -> bool | str:
        return here.dependencies.add(*told).added

    def messages() -> Iterator[list[tuple[str, str]]]:
        for _ in range(2_000):  # the first cycle ends the search
            clear(tracker)
            yield [(a, b), (b, a)]

    assert any(cycles(list(tracker.snapshot())) for _ in run_rounds(scratch, act, messages()))
