"""Operations of the tracker, one after the other, on every kind of store."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.errors import (
    Blocked,
    DependencyCycle,
    IdAmbiguous,
    IssueClaimed,
    NotFound,
    NotInitialised,
    Refused,
    SettingInvalid,
    TransitionRefused,
    UsageFailure,
    VersionMismatch,
)
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import GateStatus, Issue, Priority, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.store.model import Store
from tests.issues.trackers import create_issues, events_of, problems, tracker_on

DONE = Update(state=State.DONE)


def states(tracker: Tracker, *ids: str) -> list[str]:
    """The stored states, which must agree with the rules."""
    stored = [tracker.issue(each) for each in ids]
    assert [tracker.state(issue) for issue in stored] == [issue.state for issue in stored]
    return [issue.state.value for issue in stored]


# --- Creating and finding ---------------------------------------------------------------------------


def test_every_operation_fails_without_an_initialised_tracker(store: Store) -> None:
    tracker = tracker_on(store)

    for act in (
        tracker.snapshot,
        lambda: tracker.create(NewIssue(title="x")),
        lambda: tracker.issue("x"),
        lambda: tracker.find_id("x"),
        lambda: tracker.update("x", DONE),
    ):
        with pytest.raises(NotInitialised):
            act()


def test_initialising_again_changes_nothing(tracker: Tracker) -> None:
    create_issues(tracker, "a")

    assert not tracker.initialise()
    assert len(tracker.snapshot()) == 1


def test_an_issue_is_created_with_every_given_field(tracker: Tracker) -> None:
    tracker.gates.define(Definition("review"))
    new = NewIssue(
        title="  Write it ",
        description="at length",
        priority=Priority.HIGH,
        labels=("a", "b", "a"),
        context={"k": "v"},
        gates=("review",),
        assignee="agent:x",
    )
    issue = tracker.create(new)

    assert tracker.issue(issue.id) == issue
    assert (issue.title, issue.state, issue.labels) == ("Write it", State.READY, ("a", "b"))
    assert issue.gates_status["review"]["status"] == "pending"
    assert issue.created_at == issue.updated_at != ""


@pytest.mark.parametrize(
    ("new", "failure"),
    [
        (NewIssue(title=" "), SettingInvalid),
        (NewIssue(title="two\nlines"), SettingInvalid),
        (NewIssue(title="x", assignee="nobody"), SettingInvalid),
        (NewIssue(title="x", depends_on=("nothing",)), NotFound),
        (NewIssue(title="x", gates=("nothing",)), NotFound),
    ],
)
def test_one_invalid_issue_fails_its_whole_batch(tracker: Tracker, new: NewIssue, failure: type[Exception]) -> None:
    with pytest.raises(failure):
        tracker.create_all([NewIssue(title="the other one of the batch"), new])
    assert len(tracker.snapshot()) == 0


def test_issues_of_a_batch_may_depend_on_each_other(tracker: Tracker) -> None:
    created = tracker.create_all(
        [
            NewIssue(title="last", key="c", depends_on=("b", "a")),
            NewIssue(title="first", key="a"),
            NewIssue(title="middle", key="b", depends_on=("a",)),
        ]
    )
    last, first, middle = (each.issue for each in created)

    assert last.dependencies == (middle.id,)
    assert created[0].implied == {first.id: [middle.id, first.id]}
    assert states(tracker, last.id, first.id, middle.id) == ["backlog", "ready", "backlog"]
    assert problems(tracker) == []


def test_a_batch_with_a_cycle_or_a_duplicate_key_is_refused(tracker: Tracker) -> None:
    with pytest.raises(DependencyCycle):
        tracker.create_all(
            [NewIssue(title="a", key="a", depends_on=("b",)), NewIssue(title="b", key="b", depends_on=("a",))]
        )
    with pytest.raises(UsageFailure, match="same key"):
        tracker.create_all([NewIssue(title="a", key="a"), NewIssue(title="b", key="a")])


def test_an_id_may_be_shortened_to_a_unique_prefix(tracker: Tracker) -> None:
    tracker.adopt([Issue(id="abc1", title="1"), Issue(id="abc2", title="2"), Issue(id="xyz", title="3")])

    assert tracker.find_id("x") == tracker.find_id("xyz") == "xyz"
    assert tracker.find_id("ABC2") == "abc2"
    with pytest.raises(IdAmbiguous):
        tracker.find_id("abc")
    for text in ("q", "", "../x"):
        with pytest.raises(NotFound):
            tracker.find_id(text)


# --- Updates ----------------------------------------------------------------------------------------


def test_an_update_changes_what_it_names_and_records_it(tracker: Tracker) -> None:
    [issue_id] = create_issues(tracker, "a")
    change = Update(title="b", add_labels=("x", "y"), context={"k": "v"}, increments={"n": 2}, assignee="human:bob")
    tracker.update(issue_id, change)
    issue = tracker.update(issue_id, Update(remove_labels=("x",), context={"k": None}, increments={"n": 3}))

    assert (issue.title, issue.labels, issue.context) == ("b", ("y",), {"n": "5"})
    assert tracker.update(issue_id, Update(assignee=None)).assignee is None
    last = list(tracker.events())[-1].record
    assert (last.type, last.unknown["fields"], last.unknown["by"]) == (
        "issue_updated",
        ["assignee"],
        "agent:tester",
    )


def test_an_update_that_changes_nothing_leaves_no_trace(tracker: Tracker) -> None:
    [issue_id] = create_issues(tracker, "a")
    before = tracker.document(issue_id)
    tracker.update(issue_id, Update(title="a"))

    assert tracker.document(issue_id) == before
    assert events_of(tracker) == {"issue_created": 1}


def test_an_update_is_refused_if_the_version_has_changed(tracker: Tracker) -> None:
    [issue_id] = create_issues(tracker, "a")
    version = tracker.document(issue_id).version
    tracker.update(issue_id, Update(title="b"), if_version=version)

    for change in (Update(title="c"), DONE):
        with pytest.raises(VersionMismatch):
            tracker.update(issue_id, change, if_version=version)
    assert tracker.issue(issue_id).title == "b"


def test_an_edit_changes_neither_state_nor_dependencies(tracker: Tracker) -> None:
    [issue_id] = create_issues(tracker, "a")
    edited = tracker.edit(
        issue_id,
        lambda issue: msgspec.structs.replace(issue, title="b", state=State.DONE, dependencies=("x",)),
    )

    assert (edited.title, edited.state, edited.dependencies) == ("b", State.READY, ())


def test_a_value_that_is_not_a_number_cannot_be_incremented(tracker: Tracker) -> None:
    [issue_id] = create_issues(tracker, "a")
    tracker.update(issue_id, Update(context={"n": "many"}))

    with pytest.raises(SettingInvalid):
        tracker.update(issue_id, Update(increments={"n": 1}))


# --- States -----------------------------------------------------------------------------------------


def test_an_open_dependency_sends_an_issue_to_the_backlog_and_done_unblocks_it(tracker: Tracker) -> None:
    a, b, c = create_issues(tracker, "a", "b", "c")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(a, c)
    assert states(tracker, a, b, c) == ["backlog", "ready", "ready"]

    tracker.update(b, DONE)
    assert states(tracker, a) == ["backlog"]
    tracker.update(c, DONE)
    assert states(tracker, a) == ["ready"]
    tracker.update(c, Update(state=State.IN_PROGRESS))
    assert states(tracker, a, c) == ["backlog", "in_progress"]


def test_a_blocked_issue_cannot_start_or_finish_and_the_error_names_the_blocker(tracker: Tracker) -> None:
    a, b = create_issues(tracker, "a", "b")
    tracker.dependencies.add(a, b)

    for state in (State.DONE, State.IN_PROGRESS, State.READY, State.GATED):
        with pytest.raises(Blocked, match=b):
            tracker.update(a, Update(state=state))
    assert tracker.snapshot().blocked() == [(tracker.issue(a), [b])]


def test_a_rejected_dependency_does_not_unblock_its_dependents(tracker: Tracker) -> None:
    a, b = create_issues(tracker, "a", "b")
    tracker.dependencies.add(a, b)
    tracker.update(b, Update(state=State.REJECTED))

    assert states(tracker, a) == ["backlog"]
    tracker.dependencies.remove(a, b)
    assert states(tracker, a) == ["ready"]


def test_a_rejected_issue_stays_rejected(tracker: Tracker) -> None:
    [a] = create_issues(tracker, "a")
    tracker.update(a, Update(state=State.REJECTED))

    for state in State:
        if state is not State.REJECTED:
            with pytest.raises(TransitionRefused, match="rejected is final"):
                tracker.update(a, Update(state=state))


def test_an_archived_issue_unblocks_its_dependents_only_if_it_was_done(tracker: Tracker) -> None:
    a, b, c, d = create_issues(tracker, "a", "b", "c", "d")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(c, d)
    tracker.update(b, DONE)
    tracker.update(b, Update(state=State.ARCHIVED))
    tracker.update(d, Update(state=State.ARCHIVED))

    assert states(tracker, a, c) == ["ready", "backlog"]
    tracker.update(d, Update(state=State.BACKLOG))
    assert states(tracker, d) == ["ready"]
    assert "archived_from" not in tracker.issue(d).unknown


def test_a_dependency_of_a_finished_issue_cannot_be_reopened(tracker: Tracker) -> None:
    a, b = create_issues(tracker, "a", "b")
    tracker.dependencies.add(a, b)
    tracker.update(b, DONE)
    tracker.update(a, DONE)

    with pytest.raises(TransitionRefused, match=a):
        tracker.update(b, Update(state=State.READY))
    tracker.update(a, Update(state=State.READY))
    tracker.update(b, Update(state=State.READY))
    assert states(tracker, a, b) == ["backlog", "ready"]


def test_a_finished_issue_accepts_no_unfinished_dependency(tracker: Tracker) -> None:
    a, b, c = create_issues(tracker, "a", "b", "c")
    tracker.update(a, DONE)
    tracker.update(c, DONE)

    with pytest.raises(Refused):
        tracker.dependencies.add(a, b)
    assert tracker.dependencies.add(a, c).added


# --- Dependencies -----------------------------------------------------------------------------------


@pytest.mark.req("FL-10")
def test_a_cycle_is_refused_and_its_path_named(tracker: Tracker) -> None:
    a, b, c = create_issues(tracker, "a", "b", "c")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(b, c)

    with pytest.raises(DependencyCycle) as caught:
        tracker.dependencies.add(c, a)
    assert caught.value.facts["path"] == [c, a, b, c]
    assert f"{c} -> {a} -> {b} -> {c}" in caught.value.message
    with pytest.raises(DependencyCycle):
        tracker.dependencies.add(a, a)


@pytest.mark.req("FL-10")
def test_a_long_cycle_is_found(tracker: Tracker) -> None:
    count = 150
    tracker.adopt(
        [
            Issue(id=f"i{n:03d}", title=str(n), dependencies=(f"i{n + 1:03d}",) if n < count - 1 else ())
            for n in range(count)
        ]
    )

    with pytest.raises(DependencyCycle) as caught:
        tracker.dependencies.add("i149", "i000")
    assert len(caught.value.facts["path"]) == count + 1  # type: ignore[arg-type]
    assert len(tracker.dependencies.add("i000", "i149").implied_by) == count


def test_an_implied_dependency_is_skipped_and_the_implying_path_returned(tracker: Tracker) -> None:
    a, b, c = create_issues(tracker, "a", "b", "c")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(b, c)
    version = tracker.document(a).version

    assert tracker.dependencies.add(a, c)[1:] == (False, (a, b, c))
    assert tracker.dependencies.add(a, b)[1:] == (False, (a, b))
    assert tracker.document(a).version == version


def test_a_missing_dependency_is_not_removed_and_an_unknown_issue_is_not_linked(tracker: Tracker) -> None:
    a, b = create_issues(tracker, "a", "b")

    assert tracker.dependencies.remove(a, b) is None
    with pytest.raises(NotFound):
        tracker.dependencies.add(a, "nothing")
    with pytest.raises(NotFound):
        tracker.dependencies.add("nothing", a)


def test_deleting_an_issue_removes_it_from_all_dependencies(tracker: Tracker) -> None:
    a, b, c, d = create_issues(tracker, "a", "b", "c", "d")
    for waiting in (a, b):
        tracker.dependencies.add(waiting, c)
    tracker.dependencies.add(b, d)
    tracker.delete(c)

    assert tracker.snapshot().lookup(c) is None
    assert states(tracker, a, b, d) == ["ready", "backlog", "ready"]
    assert tracker.issue(b).dependencies == (d,)
    assert events_of(tracker)["dependency_removed"] == 2
    assert problems(tracker) == []
    with pytest.raises(NotFound):
        tracker.delete(c)


def test_states_are_right_with_more_dependents_than_one_transaction_can_name(
    tracker: Tracker,
) -> None:
    hub = create_issues(tracker, "hub")[0]
    waiting = [
        each.issue.id for each in tracker.create_all([NewIssue(title=f"w{n}", depends_on=(hub,)) for n in range(150)])
    ]
    tracker.update(hub, DONE)

    assert {tracker.issue(each).state for each in waiting} == {State.READY}  # as stored, for other programs
    assert len(tracker.snapshot().ready()) == 150
    assert problems(tracker) == []
    tracker.update(hub, Update(state=State.READY))
    assert {tracker.issue(each).state for each in waiting} == {State.BACKLOG}
    tracker.gates.define(Definition("review"))
    tracker.gates.require(hub, ["review"])
    tracker.update(hub, DONE)
    tracker.gates.judge(hub, "review", GateStatus.PASSED)
    assert problems(tracker) == []
    tracker.delete(hub)
    assert all(tracker.issue(each).dependencies == () for each in waiting)


def test_the_parts_of_an_issue_inherit_its_dependencies(tracker: Tracker) -> None:
    before, whole, after = create_issues(tracker, "before", "whole", "after")
    tracker.dependencies.add(whole, before)
    tracker.dependencies.add(after, whole)
    parts = [each.issue.id for each in tracker.break_down(whole, [NewIssue(title="1"), NewIssue(title="2")])]

    assert tracker.issue(whole).dependencies == tuple(parts)
    assert [tracker.issue(part).dependencies for part in parts] == [(before,), (before,)]
    assert states(tracker, before, whole, after, *parts) == ["ready", *["backlog"] * 4]
    assert problems(tracker) == []


# --- Gates ------------------------------------------------------------------------------------------


@pytest.mark.req("FL-11")
def test_an_issue_is_done_only_when_its_last_gate_passes(tracker: Tracker) -> None:
    for gate in ("one", "two"):
        tracker.gates.define(Definition(gate))
    a, b = create_issues(tracker, "a", "b")
    tracker.dependencies.add(b, a)
    tracker.gates.require(a, ["one", "two", "one"])

    assert tracker.update(a, DONE).state is State.GATED
    assert tracker.gates.judge(a, "one", GateStatus.PASSED).state is State.GATED
    assert tracker.gates.judge(a, "two", GateStatus.FAILED).state is State.GATED
    assert tracker.gates.judge(a, "two", GateStatus.PASSED).state is State.DONE
    assert states(tracker, b) == ["ready"]
    assert events_of(tracker)["issue_completed"] == 1


@pytest.mark.req("FL-11")
def test_a_gate_passed_before_the_work_is_done_counts(tracker: Tracker) -> None:
    tracker.gates.define(Definition("one"))
    [a] = create_issues(tracker, "a")
    tracker.gates.require(a, ["one"])

    assert tracker.gates.judge(a, "one", GateStatus.PASSED).state is State.READY
    assert tracker.update(a, DONE).state is State.DONE
    with pytest.raises(TransitionRefused):
        tracker.gates.judge(a, "one", GateStatus.FAILED)
    tracker.gates.define(Definition("two"))
    with pytest.raises(TransitionRefused):
        tracker.gates.require(a, ["two"])


@pytest.mark.req("FL-11")
def test_passing_the_last_gate_does_not_finish_a_blocked_issue(tracker: Tracker) -> None:
    tracker.gates.define(Definition("one"))
    a, b = create_issues(tracker, "a", "b")
    tracker.gates.require(a, ["one"])
    tracker.update(a, DONE)
    tracker.dependencies.add(a, b)

    assert tracker.gates.judge(a, "one", GateStatus.PASSED).state is State.GATED
    tracker.update(b, DONE)
    assert tracker.update(a, DONE).state is State.DONE


def test_a_gate_is_defined_once_and_only_a_defined_gate_can_be_required(tracker: Tracker) -> None:
    [a] = create_issues(tracker, "a")
    tracker.gates.define(Definition("one", title="first"))

    with pytest.raises(Exception, match="already exists"):
        tracker.gates.define(Definition("one"))
    assert tracker.gates.define(Definition("one", title="second"), replace=True).title == "second"
    with pytest.raises(NotFound):
        tracker.gates.require(a, ["nothing"])
    with pytest.raises(TransitionRefused):
        tracker.gates.judge(a, "one", GateStatus.PASSED)
    with pytest.raises(SettingInvalid):
        tracker.gates.define(Definition("two", stage="sometime"))


def test_an_automatic_gate_is_judged_by_its_checker(tracker: Tracker) -> None:
    tracker.gates.define(Definition("auto", command="true"))
    [a] = create_issues(tracker, "a")
    tracker.gates.require(a, ["auto"])

    with pytest.raises(TransitionRefused, match="checker"):
        tracker.gates.judge(a, "auto", GateStatus.PASSED)
    assert tracker.gates.judge(a, "auto", GateStatus.FAILED, force=True).open_gates() == ["auto"]


# --- Ready issues -----------------------------------------------------------------------------------


def test_ready_issues_are_ordered_by_priority_and_age(tracker: Tracker) -> None:
    low, normal, critical, older = (
        tracker.create(NewIssue(title=title, priority=priority)).id
        for title, priority in (
            ("low", Priority.LOW),
            ("normal", Priority.NORMAL),
            ("critical", Priority.CRITICAL),
            ("assigned", Priority.HIGH),
        )
    )
    tracker.update(older, Update(assignee="human:bob"))
    snapshot = tracker.snapshot()

    assert [issue.id for issue in snapshot.ready()] == [critical, normal, low]
    assert [issue.id for issue in snapshot.ready("human:bob")] == [critical, older, normal, low]


def test_claim_next_skips_claimed_issues(tracker: Tracker) -> None:
    a, b = create_issues(tracker, "a", "b")
    tracker.claims.claim(a, tracker.claims.request("agent:one"))
    claimed = tracker.claims.claim_next(tracker.claims.request("agent:two"))

    assert claimed is not None
    assert claimed.issue.id == b
    assert tracker.claims.claim_next(tracker.claims.request("agent:three")) is None
    with pytest.raises(IssueClaimed, match="agent:one"):
        tracker.claims.claim(a, tracker.claims.request("agent:three"))
