"""What the tracker does, one operation after the other, on every kind of store."""

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
from tests.issues.trackers import events_of, made, problems, tracker_on

DONE = Update(state=State.DONE)


def states(tracker: Tracker, *ids: str) -> list[str]:
    """As stored, which has to be as the rules have it."""
    stored = [tracker.issue(each) for each in ids]
    assert [tracker.state(issue) for issue in stored] == [issue.state for issue in stored]
    return [issue.state.value for issue in stored]


# --- Creating and finding ---------------------------------------------------------------------------


def test_without_a_tracker_everything_says_so(store: Store) -> None:
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
    made(tracker, "a")

    assert not tracker.initialise()
    assert len(tracker.snapshot()) == 1


def test_an_issue_is_created_with_all_that_was_said(tracker: Tracker) -> None:
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
def test_what_makes_no_sense_is_not_created(tracker: Tracker, new: NewIssue, failure: type[Exception]) -> None:
    with pytest.raises(failure):
        tracker.create_all([NewIssue(title="the other one of the batch"), new])
    assert len(tracker.snapshot()) == 0


def test_a_batch_may_refer_to_itself_and_is_created_whole(tracker: Tracker) -> None:
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


def test_a_batch_with_a_circle_is_refused_and_the_circle_named(tracker: Tracker) -> None:
    with pytest.raises(DependencyCycle):
        tracker.create_all(
            [NewIssue(title="a", key="a", depends_on=("b",)), NewIssue(title="b", key="b", depends_on=("a",))]
        )
    with pytest.raises(UsageFailure, match="same key"):
        tracker.create_all([NewIssue(title="a", key="a"), NewIssue(title="b", key="a")])


def test_an_id_may_be_shortened_as_long_as_it_is_one(tracker: Tracker) -> None:
    tracker.adopt([Issue(id="abc1", title="1"), Issue(id="abc2", title="2"), Issue(id="xyz", title="3")])

    assert tracker.find_id("x") == tracker.find_id("xyz") == "xyz"
    assert tracker.find_id("ABC2") == "abc2"
    with pytest.raises(IdAmbiguous):
        tracker.find_id("abc")
    for text in ("q", "", "../x"):
        with pytest.raises(NotFound):
            tracker.find_id(text)


# --- Changing ---------------------------------------------------------------------------------------


def test_an_update_changes_what_it_names_and_records_it(tracker: Tracker) -> None:
    [issue_id] = made(tracker, "a")
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
    [issue_id] = made(tracker, "a")
    before = tracker.document(issue_id)
    tracker.update(issue_id, Update(title="a"))

    assert tracker.document(issue_id) == before
    assert events_of(tracker) == {"issue_created": 1}


def test_an_update_of_one_version_is_refused_for_another(tracker: Tracker) -> None:
    [issue_id] = made(tracker, "a")
    version = tracker.document(issue_id).version
    tracker.update(issue_id, Update(title="b"), if_version=version)

    for change in (Update(title="c"), DONE):
        with pytest.raises(VersionMismatch):
            tracker.update(issue_id, change, if_version=version)
    assert tracker.issue(issue_id).title == "b"


def test_an_edit_moves_nothing(tracker: Tracker) -> None:
    [issue_id] = made(tracker, "a")
    edited = tracker.edit(
        issue_id,
        lambda issue: msgspec.structs.replace(issue, title="b", state=State.DONE, dependencies=("x",)),
    )

    assert (edited.title, edited.state, edited.dependencies) == ("b", State.READY, ())


def test_what_is_no_number_is_not_counted_up(tracker: Tracker) -> None:
    [issue_id] = made(tracker, "a")
    tracker.update(issue_id, Update(context={"n": "many"}))

    with pytest.raises(SettingInvalid):
        tracker.update(issue_id, Update(increments={"n": 1}))


# --- States -----------------------------------------------------------------------------------------


def test_adding_a_dependency_sends_back_and_done_releases(tracker: Tracker) -> None:
    a, b, c = made(tracker, "a", "b", "c")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(a, c)
    assert states(tracker, a, b, c) == ["backlog", "ready", "ready"]

    tracker.update(b, DONE)
    assert states(tracker, a) == ["backlog"]
    tracker.update(c, DONE)
    assert states(tracker, a) == ["ready"]
    tracker.update(c, Update(state=State.IN_PROGRESS))
    assert states(tracker, a, c) == ["backlog", "in_progress"]


def test_what_waits_cannot_be_begun_or_finished_and_is_told_for_whom(tracker: Tracker) -> None:
    a, b = made(tracker, "a", "b")
    tracker.dependencies.add(a, b)

    for state in (State.DONE, State.IN_PROGRESS, State.READY, State.GATED):
        with pytest.raises(Blocked, match=b):
            tracker.update(a, Update(state=state))
    assert tracker.snapshot().blocked() == [(tracker.issue(a), [b])]


def test_a_rejected_dependency_releases_nobody(tracker: Tracker) -> None:
    a, b = made(tracker, "a", "b")
    tracker.dependencies.add(a, b)
    tracker.update(b, Update(state=State.REJECTED))

    assert states(tracker, a) == ["backlog"]
    tracker.dependencies.remove(a, b)
    assert states(tracker, a) == ["ready"]


def test_rejected_is_the_end(tracker: Tracker) -> None:
    [a] = made(tracker, "a")
    tracker.update(a, Update(state=State.REJECTED))

    for state in State:
        if state is not State.REJECTED:
            with pytest.raises(TransitionRefused, match="rejected is final"):
                tracker.update(a, Update(state=state))


def test_an_archived_issue_still_releases_if_it_was_done(tracker: Tracker) -> None:
    a, b, c, d = made(tracker, "a", "b", "c", "d")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(c, d)
    tracker.update(b, DONE)
    tracker.update(b, Update(state=State.ARCHIVED))
    tracker.update(d, Update(state=State.ARCHIVED))

    assert states(tracker, a, c) == ["ready", "backlog"]
    tracker.update(d, Update(state=State.BACKLOG))
    assert states(tracker, d) == ["ready"]
    assert "archived_from" not in tracker.issue(d).unknown


def test_what_others_rest_on_is_not_reopened(tracker: Tracker) -> None:
    a, b = made(tracker, "a", "b")
    tracker.dependencies.add(a, b)
    tracker.update(b, DONE)
    tracker.update(a, DONE)

    with pytest.raises(TransitionRefused, match=a):
        tracker.update(b, Update(state=State.READY))
    tracker.update(a, Update(state=State.READY))
    tracker.update(b, Update(state=State.READY))
    assert states(tracker, a, b) == ["backlog", "ready"]


def test_a_finished_issue_waits_for_nothing_new(tracker: Tracker) -> None:
    a, b, c = made(tracker, "a", "b", "c")
    tracker.update(a, DONE)
    tracker.update(c, DONE)

    with pytest.raises(Refused):
        tracker.dependencies.add(a, b)
    assert tracker.dependencies.add(a, c).added


# --- Dependencies -----------------------------------------------------------------------------------


@pytest.mark.req("FL-10")
def test_a_circle_is_refused_and_the_way_around_named(tracker: Tracker) -> None:
    a, b, c = made(tracker, "a", "b", "c")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(b, c)

    with pytest.raises(DependencyCycle) as caught:
        tracker.dependencies.add(c, a)
    assert caught.value.facts["path"] == [c, a, b, c]
    assert f"{c} -> {a} -> {b} -> {c}" in caught.value.message
    with pytest.raises(DependencyCycle):
        tracker.dependencies.add(a, a)


@pytest.mark.req("FL-10")
def test_a_circle_is_found_however_long_it_is(tracker: Tracker) -> None:
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


def test_a_dependency_that_follows_is_left_out_and_the_way_said(tracker: Tracker) -> None:
    a, b, c = made(tracker, "a", "b", "c")
    tracker.dependencies.add(a, b)
    tracker.dependencies.add(b, c)
    version = tracker.document(a).version

    assert tracker.dependencies.add(a, c)[1:] == (False, (a, b, c))
    assert tracker.dependencies.add(a, b)[1:] == (False, (a, b))
    assert tracker.document(a).version == version


def test_removing_a_dependency_that_is_not_there_says_so(tracker: Tracker) -> None:
    a, b = made(tracker, "a", "b")

    assert tracker.dependencies.remove(a, b) is None
    with pytest.raises(NotFound):
        tracker.dependencies.add(a, "nothing")
    with pytest.raises(NotFound):
        tracker.dependencies.add("nothing", a)


def test_deleting_takes_an_issue_out_of_everybodys_dependencies(tracker: Tracker) -> None:
    a, b, c, d = made(tracker, "a", "b", "c", "d")
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


def test_with_more_dependents_than_a_transaction_names_everything_is_still_told_right(
    tracker: Tracker,
) -> None:
    hub = made(tracker, "hub")[0]
    waiting = [
        each.issue.id for each in tracker.create_all([NewIssue(title=f"w{n}", depends_on=(hub,)) for n in range(150)])
    ]
    tracker.update(hub, DONE)

    assert {tracker.state(tracker.issue(each)) for each in waiting} == {State.READY}
    assert len(tracker.snapshot().ready()) == 150
    tracker.delete(hub)
    assert all(tracker.issue(each).dependencies == () for each in waiting)


def test_a_part_waits_for_what_the_whole_waited_for(tracker: Tracker) -> None:
    before, whole, after = made(tracker, "before", "whole", "after")
    tracker.dependencies.add(whole, before)
    tracker.dependencies.add(after, whole)
    parts = [each.issue.id for each in tracker.break_down(whole, [NewIssue(title="1"), NewIssue(title="2")])]

    assert tracker.issue(whole).dependencies == tuple(parts)
    assert [tracker.issue(part).dependencies for part in parts] == [(before,), (before,)]
    assert states(tracker, before, whole, after, *parts) == ["ready", *["backlog"] * 4]
    assert problems(tracker) == []


# --- Gates ------------------------------------------------------------------------------------------


@pytest.mark.req("FL-11")
def test_done_needs_all_gates_and_comes_with_the_last(tracker: Tracker) -> None:
    for gate in ("one", "two"):
        tracker.gates.define(Definition(gate))
    a, b = made(tracker, "a", "b")
    tracker.dependencies.add(b, a)
    tracker.gates.require(a, ["one", "two", "one"])

    assert tracker.update(a, DONE).state is State.GATED
    assert tracker.gates.judge(a, "one", GateStatus.PASSED).state is State.GATED
    assert tracker.gates.judge(a, "two", GateStatus.FAILED).state is State.GATED
    assert tracker.gates.judge(a, "two", GateStatus.PASSED).state is State.DONE
    assert states(tracker, b) == ["ready"]
    assert events_of(tracker)["issue_completed"] == 1


@pytest.mark.req("FL-11")
def test_a_gate_that_is_passed_before_the_work_is_done_counts(tracker: Tracker) -> None:
    tracker.gates.define(Definition("one"))
    [a] = made(tracker, "a")
    tracker.gates.require(a, ["one"])

    assert tracker.gates.judge(a, "one", GateStatus.PASSED).state is State.READY
    assert tracker.update(a, DONE).state is State.DONE
    with pytest.raises(TransitionRefused):
        tracker.gates.judge(a, "one", GateStatus.FAILED)
    tracker.gates.define(Definition("two"))
    with pytest.raises(TransitionRefused):
        tracker.gates.require(a, ["two"])


@pytest.mark.req("FL-11")
def test_passing_the_last_gate_does_not_finish_what_waits_for_others(tracker: Tracker) -> None:
    tracker.gates.define(Definition("one"))
    a, b = made(tracker, "a", "b")
    tracker.gates.require(a, ["one"])
    tracker.update(a, DONE)
    tracker.dependencies.add(a, b)

    assert tracker.gates.judge(a, "one", GateStatus.PASSED).state is State.GATED
    tracker.update(b, DONE)
    assert tracker.update(a, DONE).state is State.DONE


def test_a_gate_is_defined_once_and_required_only_if_it_is(tracker: Tracker) -> None:
    [a] = made(tracker, "a")
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
    [a] = made(tracker, "a")
    tracker.gates.require(a, ["auto"])

    with pytest.raises(TransitionRefused, match="checker"):
        tracker.gates.judge(a, "auto", GateStatus.PASSED)
    assert tracker.gates.judge(a, "auto", GateStatus.FAILED, force=True).open_gates() == ["auto"]


# --- The list of what is ready ----------------------------------------------------------------------


def test_ready_is_ordered_by_urgency_and_age(tracker: Tracker) -> None:
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


def test_claiming_the_next_passes_over_what_cannot_be_had(tracker: Tracker) -> None:
    a, b = made(tracker, "a", "b")
    tracker.claims.claim(a, tracker.claims.request("agent:one"))
    claimed = tracker.claims.claim_next(tracker.claims.request("agent:two"))

    assert claimed is not None
    assert claimed.issue.id == b
    assert tracker.claims.claim_next(tracker.claims.request("agent:three")) is None
    with pytest.raises(IssueClaimed, match="agent:one"):
        tracker.claims.claim(a, tracker.claims.request("agent:three"))
