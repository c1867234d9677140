"""Random sequences of operations against a small model, and random concurrent operations by processes."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from holdfast.clock import ManualClock
from holdfast.errors import Failure
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import ClaimId, GateStatus, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Store
from proof.effort import rounds
from tests.issues.trackers import cycles, problems, tracker_at, tracker_on
from tests.locks.workers import Line, Worker, Workers

GATES = ("g1", "g2")
MOVES = [State.READY, State.IN_PROGRESS, State.DONE, State.REJECTED]
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


# --- Sequences, against a model ---------------------------------------------------------------------


class Modelled:
    """An issue as the model knows it."""

    def __init__(self, deps: set[str]) -> None:
        self.deps = deps
        self.moved: str | None = None  # None: not started, so backlog or ready
        self.gates: dict[str, bool | None] = {}  # None: not judged yet
        self.claimed = False

    def finished(self) -> bool:
        return self.moved in ("done", "rejected")


class Model:
    """The rules again, in their simplest form."""

    def __init__(self) -> None:
        self.issues: dict[str, Modelled] = {}

    def waits(self, issue: str) -> bool:
        return any(self.issues[dep].moved != "done" for dep in self.issues[issue].deps)

    def state(self, issue: str) -> str:
        return self.issues[issue].moved or ("backlog" if self.waits(issue) else "ready")

    def reaches(self, start: str, goal: str) -> bool:
        return start == goal or any(self.reaches(dep, goal) for dep in self.issues[start].deps)

    def add(self, issue: str, on: str) -> str:
        if self.reaches(on, issue):
            return "E_DEPENDENCY_CYCLE" if on not in self.issues[issue].deps else "skipped"
        if self.reaches(issue, on):
            return "skipped"
        if self.issues[issue].finished() and self.issues[on].moved != "done":
            return "E_TRANSITION_REFUSED"
        self.issues[issue].deps.add(on)
        return "added"

    def move(self, issue: str, to: str) -> str:
        here = self.issues[issue]
        if to == self.state(issue):
            return to
        if here.moved == "rejected":
            return "E_TRANSITION_REFUSED"
        resting = any(issue in each.deps and each.moved == "done" for each in self.issues.values())
        if here.moved == "done" and resting:
            return "E_TRANSITION_REFUSED"
        if to == "rejected":
            here.moved = to
            return to
        if self.waits(issue):
            return "E_BLOCKED"
        here.moved = None if to == "ready" else to
        if to == "done" and not all(here.gates.values()):
            here.moved = "gated"
        return self.state(issue)

    def judge(self, issue: str, gate: str, passed: bool) -> str:
        here = self.issues[issue]
        if gate not in here.gates or (here.finished() and here.gates[gate] is not passed):
            return "E_TRANSITION_REFUSED"
        here.gates[gate] = passed
        if here.moved == "gated" and all(here.gates.values()) and not self.waits(issue):
            here.moved = "done"
        return self.state(issue)

    def delete(self, issue: str) -> None:
        del self.issues[issue]
        for each in self.issues.values():
            each.deps.discard(issue)


class TrackerMachine(RuleBasedStateMachine):
    """Runs each operation on the tracker and on the model, which must agree on the outcome."""

    ids = Bundle("ids")
    made_by = MemoryStore

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.store: Store = self.new_store()
        self.tracker = tracker_on(self.store, clock=self.clock)
        self.model = Model()
        self.claims: dict[str, ClaimId] = {}

    def new_store(self) -> Store:
        return MemoryStore(clock=self.clock)

    @initialize(target=ids)
    def begin(self) -> Any:
        self.tracker.initialise()
        for gate in GATES:
            self.tracker.gates.define(Definition(gate))
        return multiple(*(self._create([], []) for _ in range(3)))

    @rule(target=ids, deps=st.lists(ids, max_size=3), gates=st.lists(st.sampled_from(GATES), max_size=2))
    def create(self, deps: list[str], gates: list[str]) -> str:
        return self._create([dep for dep in deps if dep in self.model.issues], gates)

    def _create(self, deps: list[str], gates: list[str]) -> str:
        issue = self.tracker.create(NewIssue(title="t", depends_on=tuple(deps), gates=tuple(gates)))
        needed = {dep for dep in deps if not any(o != dep and self.model.reaches(o, dep) for o in deps)}
        assert set(issue.dependencies) == needed
        self.model.issues[issue.id] = Modelled(needed)
        self.model.issues[issue.id].gates = dict.fromkeys(gates)
        return issue.id

    @rule(issue=ids, on=ids)
    def add_dependency(self, issue: str, on: str) -> None:
        if self.exist(issue, on):
            expected = self.model.add(issue, on)
            assert self.outcome(lambda: self._added(issue, on)) == expected

    def _added(self, issue: str, on: str) -> str:
        return "added" if self.tracker.dependencies.add(issue, on).added else "skipped"

    @rule(issue=ids, on=ids)
    def remove_dependency(self, issue: str, on: str) -> None:
        if self.exist(issue, on):
            removed = self.tracker.dependencies.remove(issue, on) is not None
            assert removed is (on in self.model.issues[issue].deps)
            self.model.issues[issue].deps.discard(on)

    @rule(issue=ids, to=st.sampled_from(MOVES))
    def move(self, issue: str, to: State) -> None:
        if self.exist(issue):
            change = Update(state=to)
            claim = self.claims.get(issue)
            expected = self.model.move(issue, to.value)
            found = self.outcome(lambda: self.tracker.update(issue, change, claim=claim).state.value)
            assert found == expected
            if self.model.state(issue) not in ("in_progress", "gated"):
                self.claims.pop(issue, None)

    @rule(issue=ids, gate=st.sampled_from(GATES), passed=st.booleans())
    def judge(self, issue: str, gate: str, passed: bool) -> None:
        if self.exist(issue):
            status = GateStatus.PASSED if passed else GateStatus.FAILED
            expected = self.model.judge(issue, gate, passed)
            found = self.outcome(lambda: self.tracker.gates.judge(issue, gate, status))
            assert (found if isinstance(found, str) else self.model.state(issue)) == expected
            if self.model.state(issue) == "done":
                self.claims.pop(issue, None)

    @rule(issue=ids)
    def claim(self, issue: str) -> None:
        if not self.exist(issue):
            return
        state = self.model.state(issue)
        found = self.outcome(lambda: self.tracker.claims.claim(issue, self.tracker.claims.request()))
        wrong = {"backlog": "E_BLOCKED", "ready": "", "in_progress": "E_ISSUE_CLAIMED"}
        expected = wrong.get(state, "E_TRANSITION_REFUSED")
        assert (found if isinstance(found, str) else "") == expected
        if not expected:
            self.claims[issue] = ClaimId.parse(found.claim.claim_id)
            self.model.issues[issue].moved = "in_progress"

    @rule(issue=ids)
    def release(self, issue: str) -> None:
        if self.exist(issue) and self.model.state(issue) == "in_progress":
            self.tracker.claims.release(issue, self.claims.pop(issue, None))
            self.model.issues[issue].moved = None

    @rule(issue=consumes(ids))
    def delete(self, issue: str) -> None:
        if self.exist(issue):
            self.tracker.delete(issue, claim=self.claims.pop(issue, None))
            self.model.delete(issue)

    @invariant()
    def tracker_agrees_with_the_model(self) -> None:
        if not self.model.issues:
            return
        snapshot = self.tracker.snapshot()
        assert {issue.id: snapshot.state(issue).value for issue in snapshot} == {
            issue: self.model.state(issue) for issue in self.model.issues
        }
        assert {issue.id: set(issue.dependencies) for issue in snapshot} == {
            issue: each.deps for issue, each in self.model.issues.items()
        }
        assert problems(self.tracker) == []

    def exist(self, *issues: str) -> bool:
        return all(issue in self.model.issues for issue in issues)

    def outcome(self, act: Any) -> Any:
        try:
            return act()
        except Failure as failure:
            return failure.code


class FileTrackerMachine(TrackerMachine):
    """The same on files."""

    def new_store(self) -> Store:
        self.directory = tempfile.mkdtemp(prefix="holdfast-", dir=_memory())
        return FileStore(self.directory, clock=self.clock)

    def teardown(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.mark.req("FL-17")
@pytest.mark.parametrize(
    ("machine", "examples"), [(TrackerMachine, rounds(60, least=12)), (FileTrackerMachine, rounds(12, least=4))]
)
@pytest.mark.sampled(1)
def test_any_sequence_of_operations_agrees_with_the_model(machine: type[TrackerMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=QUIET),
    )


# --- Concurrent operations, by processes ------------------------------------------------------------


class Order(NamedTuple):
    """An operation for a process, on one or two issues given by number."""

    what: str
    first: int = 0
    second: int = 0


class Done(NamedTuple):
    """The outcome of an order: the ids it was about, and a result or an error code."""

    what: str
    first: str
    second: str
    result: str


ORDERS = st.builds(
    Order,
    st.sampled_from(["create", "count", "count", "add", "add", "remove", "delete", "finish", "ledger", "release"]),
    st.integers(0, 5),
    st.integers(0, 5),
)
PROCESSES = 3


def carry_out(tracker: Tracker, orders: list[Order], ids: list[str], claims: dict[str, str]) -> Iterator[Done]:
    for what, first, second in orders:
        a, b = ids[first % len(ids)], ids[second % len(ids)]
        claim = ClaimId.parse(claims[a]) if a in claims else None
        try:
            if what == "create":
                a, result = tracker.create(NewIssue(title="new", depends_on=(b,))).id, "yes"
            else:
                result = act(tracker, what, a, b, claim)
        except Failure as failure:
            result = failure.code
        yield Done(what, a, b, result)


def act(tracker: Tracker, what: str, a: str, b: str, claim: ClaimId | None) -> str:
    """Carry out one order on existing issues."""
    if what == "add":
        return "yes" if tracker.dependencies.add(a, b).added else "no"
    if what == "remove":
        return "yes" if tracker.dependencies.remove(a, b) else "no"
    if what == "claim":
        return tracker.claims.claim(a, tracker.claims.request()).claim.claim_id
    if what == "count":
        tracker.update(a, Update(increments={"n": 1}))
    elif what == "delete":
        tracker.delete(a)
    elif what == "finish":
        tracker.update(a, Update(state=State.DONE), claim=claim)
    elif claim is not None:
        tracker.claims.release(a, claim)
    return "yes"


class ProcessMachine(RuleBasedStateMachine):
    """Each step gives every process some orders, starts all at once, and checks the result for consistency."""

    crew: list[Worker]
    base: Path

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=self.base))
        self.tracker = tracker_at(self.directory)
        self.tracker.initialise()
        self.counts: Counter[str] = Counter()
        self.created: set[str] = {self.tracker.create(NewIssue(title=f"issue {n}")).id for n in range(4)}
        self.deleted: set[str] = set()
        self.claims: dict[str, str] = {}
        self.tokens: set[tuple[str, int]] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    @rule(orders=st.lists(st.lists(ORDERS, min_size=1, max_size=4), min_size=PROCESSES, max_size=PROCESSES))
    def all_at_once(self, orders: list[list[Order]]) -> None:
        ids = [issue.id for issue in self.tracker.snapshot()] or [self._one_more()]
        before = {issue.id: issue for issue in self.tracker.snapshot()}
        for worker, own in zip(self.crew, orders, strict=True):
            worker.say((str(self.directory), own, ids, self.claims))
        answers = [Done(*each) for worker in self.crew for each in worker.hear()]
        assert not [each for each in answers if each.result == "E_CORRUPT"]
        self._account(answers)
        self._check_edges(answers, {(issue, on) for issue, each in before.items() for on in each.dependencies})

    def _one_more(self) -> str:
        issue = self.tracker.create(NewIssue(title="one more"))
        self.created.add(issue.id)
        return issue.id

    def _account(self, answers: list[Done]) -> None:
        """Every acknowledged change took effect exactly once."""
        successes = [each for each in answers if not each.result.startswith(("E_", "no"))]
        self.created |= {each.first for each in successes if each.what == "create"}
        deletions = Counter(each.first for each in successes if each.what == "delete")
        assert set(deletions.values()) <= {1}
        self.deleted |= set(deletions)
        self.counts.update(each.first for each in successes if each.what == "count")
        for each in successes:
            if each.what == "claim":
                token = each.first, ClaimId.parse(each.result).token
                assert token not in self.tokens
                self.tokens.add(token)
                self.claims[each.first] = each.result
        issues = {issue.id: issue for issue in self.tracker.snapshot()}
        assert set(issues) == self.created - self.deleted
        assert {i: int(each.context.get("n", 0)) for i, each in issues.items()} == {i: self.counts[i] for i in issues}
        for issue_id, issue in issues.items():
            record = self.tracker.claims.state(issue_id)
            assert (issue.state is State.IN_PROGRESS) is bool(record and record.claim)

    def _check_edges(self, answers: list[Done], before: set[tuple[str, str]]) -> None:
        """Every edge that existed or was added, and was not removed, exists; and there is no cycle."""
        issues = list(self.tracker.snapshot())
        edges = {(issue.id, on) for issue in issues for on in issue.dependencies}
        added = {(each.first, each.second) for each in answers if each.what == "add" and each.result == "yes"}
        removed = {(each.first, each.second) for each in answers if each.what == "remove"}
        kept = {edge for edge in (before | added) - removed if not self.deleted & set(edge)}
        assert kept <= edges
        assert cycles(issues) == []
        assert problems(self.tracker) == []


def serve(line: Line) -> None:
    while True:
        directory, orders, ids, claims = line.wait()
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(FileStore(directory, timeout=60.0))
            line.say(list(carry_out(tracker_on(store, "agent:p"), orders, ids, claims)))


@pytest.mark.req("FL-17")
@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_random_concurrent_operations_of_processes_lose_and_break_nothing(scratch: Path) -> None:
    with Workers() as workers:
        machine = type("Machine", (ProcessMachine,), {"crew": workers.start_many(PROCESSES, serve), "base": scratch})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=rounds(25, least=6), stateful_step_count=6, deadline=None, suppress_health_check=QUIET
            ),
        )
