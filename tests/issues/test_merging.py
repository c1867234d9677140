"""Two git branches that changed the same issues, merged by real git with the driver that `setup git` installs."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.issue_view import issue_lines
from holdfast.errors import Failure, Refused
from holdfast.issues.gates import Definition, Gating
from holdfast.issues.merging import SUPERSEDED, Sides, merge_file, merge_issues
from holdfast.issues.model import GateStatus, Issue, Priority, State
from holdfast.issues.reading import issue_to_json
from holdfast.issues.rules import FINISHED
from holdfast.issues.tracker import Tracker, Update
from holdfast.issues.validate import examine, repair
from holdfast.setup.edits import apply
from holdfast.setup.plan import edits
from holdfast.setup.targets import Target
from proof.effort import SEED, rounds
from tests.issues.trackers import create_issues, tracker_at

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


# --- The rules ---------------------------------------------------------------------------------------


def issue(at: str = EARLY, /, **fields: Any) -> Issue:
    return Issue(id="a", **{"title": "t", "state": State.READY, "updated_at": at, **fields})


def both_ways(old: Issue, early: Issue, late: Issue) -> Issue:
    """The merged issue, which does not depend on which side is ours."""
    found = merge_issues(old, early, late)
    assert found == merge_issues(old, late, early)
    return found


def superseded(found: Issue) -> dict[str, object]:
    return {each["field"]: each["value"] for each in found.unknown.get(SUPERSEDED, [])}


def test_changes_of_different_fields_are_all_kept() -> None:
    old = issue(labels=("a", "b"), context={"x": "1"}, unknown={"theirs": {"p": 1}})
    early = issue(labels=("b", "c"), context={"x": "1", "y": "2"}, unknown={"theirs": {"p": 1, "q": 2}})
    late = issue(LATE, title="new", labels=("a", "b", "d"), context={}, unknown={"theirs": {"p": 3}})

    found = both_ways(old, early, late)

    assert (found.title, found.updated_at) == ("new", LATE)
    assert set(found.labels) == {"b", "c", "d"}
    assert found.context == {"y": "2"}
    assert found.unknown == {"theirs": {"p": 3, "q": 2}}


def test_the_paths_that_an_issue_touches_are_merged_as_a_set() -> None:
    old = issue(touches=("src", "docs"))
    early, late = issue(touches=("src", "docs", "tests")), issue(LATE, touches=("docs", "README.md"))

    assert sorted(both_ways(old, early, late).touches) == ["README.md", "docs", "tests"]


def test_of_two_values_the_later_stands_and_the_other_is_kept() -> None:
    early, late = issue(title="early", context={"k": "e"}), issue(LATE, title="late", context={"k": "l"})

    found = both_ways(issue(context={"k": "o"}), early, late)

    assert (found.title, found.context) == ("late", {"k": "l"})
    assert superseded(found) == {"title": "early", "context.k": "e"}


STATES = [  # before, on one side, on the other side (later), merged
    (State.READY, State.IN_PROGRESS, State.READY, State.IN_PROGRESS),
    (State.READY, State.IN_PROGRESS, State.BACKLOG, State.IN_PROGRESS),
    (State.READY, State.DONE, State.IN_PROGRESS, State.DONE),
    (State.READY, State.REJECTED, State.GATED, State.REJECTED),
    (State.READY, State.DONE, State.REJECTED, State.REJECTED),
    (State.IN_PROGRESS, State.DONE, State.READY, State.DONE),
    (State.DONE, State.ARCHIVED, State.IN_PROGRESS, State.IN_PROGRESS),
    (State.DONE, State.READY, State.DONE, State.READY),
    (State.BACKLOG, State.READY, State.BACKLOG, State.READY),
]


@pytest.mark.parametrize(("before", "early", "late", "expected"), STATES)
def test_work_that_one_side_finished_stays_finished(before: State, early: State, late: State, expected: State) -> None:
    assert both_ways(issue(state=before), issue(state=early), issue(LATE, state=late)).state is expected


def test_a_finished_issue_keeps_what_it_was_finished_with() -> None:
    done = issue(state=State.DONE, gates_required=("g",), gates_status={"g": {"status": "passed"}})
    other = issue(LATE, state=State.BACKLOG, dependencies=("x",), gates_required=("g", "h"), labels=("l",))

    found = both_ways(issue(gates_required=("g",)), done, other)

    assert (found.state, found.dependencies, found.gates_required) == (State.DONE, (), ("g",))
    assert found.gates_status == {"g": {"status": "passed"}}
    assert found.labels == ("l",)
    assert superseded(found) == {"dependencies": ["x"], "gates_required": ["g", "h"]}


def test_the_assignee_goes_with_the_state() -> None:
    claimed = issue(state=State.IN_PROGRESS, assignee="agent:a")

    found = both_ways(issue(), claimed, issue(LATE, assignee="human:b"))

    assert (found.state, found.assignee, superseded(found)) == (State.IN_PROGRESS, "agent:a", {"assignee": "human:b"})


def test_the_later_result_of_a_gate_stands_as_a_whole() -> None:
    def with_gate(at: str, status: str, by: str, gate_at: str) -> Issue:
        gate = {"status": status, "updated_by": by, "updated_at": gate_at}
        return issue(at, gates_required=("g",), gates_status={"g": gate})

    old = with_gate(EARLY, "pending", "x", "2025-01-01T00:00:00Z")
    passed = with_gate(EARLY, "passed", "a", LATE)
    failed = with_gate(LATE, "failed", "b", EARLY)  # its issue was updated later, for another reason

    found = both_ways(old, passed, failed)

    assert found.gates_status == passed.gates_status
    assert superseded(found) == {"gates_status.g": failed.gates_status["g"]}


def test_gates_that_passed_on_different_sides_complete_a_gated_issue() -> None:
    def passed(at: str, *gates: str) -> Issue:
        status = {gate: {"status": "passed" if gate in gates else "pending"} for gate in "gh"}
        return issue(at, state=State.GATED, gates_required=("g", "h"), gates_status=status)

    assert both_ways(passed(EARLY), passed(EARLY, "g"), passed(LATE, "h")).state is State.DONE


def test_a_dependency_that_one_side_added_makes_the_issue_wait() -> None:
    done, waits = issue(dependencies=("x",)), issue(LATE, state=State.BACKLOG, dependencies=("y",))

    assert both_ways(issue(), done, waits).state is State.BACKLOG
    assert both_ways(issue(), done, issue(LATE, dependencies=("y",))).state is State.READY


def test_different_issues_and_different_definitions_of_a_gate_are_not_merged() -> None:
    def content(id_: str) -> bytes:
        return json.dumps({"id": id_, "title": "t"}).encode()

    with pytest.raises(Refused):
        merge_file(".jit/issues/a.json", Sides(content("a"), content("a"), content("b")))
    gates = [json.dumps({"gates": {"g": {"title": each}}}).encode() for each in "abc"]
    with pytest.raises(Refused):
        merge_file(".jit/gates.json", Sides(*gates))


def test_the_values_that_do_not_stand_are_shown(scratch: Path) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    tracker.adopt([merge_issues(issue(), issue(title="early"), issue(LATE, title="late"))])

    lines = list(issue_lines(issue_to_json(tracker, "a")))

    assert f"  superseded    title: early (another branch, {EARLY})" in lines


# --- Real git ----------------------------------------------------------------------------------------

DROPPED = """
from holdfast.store import merge
from holdfast.issues import merging
def dropped(old, ours, theirs, decide, path=()):
    found = merge.merged(old, ours, theirs, decide, path)
    return {**found, "labels": theirs["labels"]} if "labels" in found else found
merging.merged = dropped
"""


class Clone:
    """A tracker in a git repository, with `holdfast` on the PATH."""

    def __init__(self, directory: Path, programs: Path) -> None:
        self.directory = directory
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "x"),
            **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "x@example.org"),
            **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "GIT_EDITOR": "true",
        }
        self.tracker = tracker_at(directory)

    def git(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.directory, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "change")

    def path(self, issue_id: str) -> Path:
        return self.directory / f".jit/issues/{issue_id}.json"


def program(scratch: Path, plant: str = "") -> Path:
    """A directory with a `holdfast` that runs this code, perhaps with a planted bug."""
    programs = scratch / "programs"
    programs.mkdir(exist_ok=True)
    code = f"{plant}\nimport sys\nfrom holdfast.__main__ import main\nsys.exit(main())"
    script = programs / "holdfast"
    path = os.pathsep.join(sys.path)
    script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(path)} exec {sys.executable} -c {shlex.quote(code)} "$@"\n')
    script.chmod(0o755)
    return programs


class Pair:
    """A repository and its clone, whose trackers started equal."""

    def __init__(self, scratch: Path, prepare: Callable[[Tracker], object], plant: str = "") -> None:
        programs = program(scratch, plant)
        (scratch / "ours").mkdir()
        self.ours = Clone(scratch / "ours", programs)
        self.ours.git("init", "-q", "-b", "main")
        self.ours.tracker.initialise()
        prepare(self.ours.tracker)
        self.ours.commit()
        self.ours.git("tag", "base")
        self.ours.git("clone", "-q", ".", str(scratch / "theirs"))
        self.theirs = Clone(scratch / "theirs", programs)
        repair(self.theirs.tracker)
        apply(self.ours.directory, edits(self.ours.directory, Target.GIT, remove=False))
        hook = self.ours.directory / ".git/hooks/pre-commit"
        hook.unlink()  # not the subject, and it costs time

    def join(self, how: str, *, check: bool = True) -> str:
        for each in (self.ours, self.theirs):
            if each.git("status", "--porcelain"):
                each.commit()
        self.ours.git("fetch", "-q", str(self.theirs.directory), "main")
        ways = {
            "merge": ("merge", "-q", "--no-edit", "FETCH_HEAD"),
            "rebase": ("rebase", "-q", "FETCH_HEAD"),
            "cherry-pick": ("cherry-pick", "--allow-empty", "--keep-redundant-commits", "base..FETCH_HEAD"),
        }
        return self.ours.git(*ways[how], check=check)


def test_a_merge_takes_the_changes_of_both_branches(scratch: Path) -> None:
    pair = Pair(scratch, lambda tracker: create_issues(tracker, "one", "two"))
    ours, theirs = pair.ours.tracker, pair.theirs.tracker
    one, two = [each.id for each in ours.snapshot()]
    new = create_issues(theirs, "new") + create_issues(ours, "another")
    ours.update(one, Update(title="ours", add_labels=("a",)))
    theirs.update(one, Update(priority=Priority.HIGH, add_labels=("b",), state=State.DONE))
    theirs.update(two, Update(title="theirs"))
    ours.gates.define(Definition("review"))
    theirs.gates.define(Definition("tests"))

    pair.join("merge")

    found = ours.issue(one)
    assert (found.title, found.priority, found.state) == ("ours", Priority.HIGH, State.DONE)
    assert set(found.labels) == {"a", "b"}
    index = json.loads((pair.ours.directory / ".jit/index.json").read_bytes())
    assert set(index["all_ids"]) == {one, two, *new}
    assert set(ours.gates.all()) == {"review", "tests"}
    assert examine(ours) == []
    assert pair.ours.git("status", "--porcelain") == ""
    before = pair.ours.path(one).read_bytes()
    ours.update(one, Update(add_labels=("c",)))
    ours.update(one, Update(remove_labels=("c",)))
    assert len(pair.ours.path(one).read_bytes()) == len(before)  # the same layout as the tracker's


@pytest.mark.parametrize("damage", ["<<<<<<< ours\n", '{"id": "x"}\n', ""])
def test_what_is_no_issue_is_a_conflict_with_the_markers_of_git(scratch: Path, damage: str) -> None:
    pair = Pair(scratch, lambda tracker: create_issues(tracker, "one"))
    [one] = [each.id for each in pair.ours.tracker.snapshot()]
    pair.ours.tracker.update(one, Update(title="ours"))
    pair.theirs.path(one).write_text(damage)

    said = pair.join("merge", check=False)

    assert f"CONFLICT (content): Merge conflict in .jit/issues/{one}.json" in said
    text = pair.ours.path(one).read_text()
    assert "<<<<<<< ours\n" in text
    assert '"title": "ours"' in text


def test_without_the_program_git_writes_its_markers(scratch: Path) -> None:
    pair = Pair(scratch, lambda tracker: create_issues(tracker, "one"))
    [one] = [each.id for each in pair.ours.tracker.snapshot()]
    pair.ours.tracker.update(one, Update(title="ours"))
    pair.theirs.tracker.update(one, Update(title="theirs"))
    (scratch / "programs/holdfast").write_text("#!/bin/sh\nexit 127\n")

    pair.join("merge", check=False)

    text = pair.ours.path(one).read_text()
    assert all(each in text for each in ("<<<<<<< ours", '"title": "ours"', '"title": "theirs"', ">>>>>>> theirs"))


def test_an_index_that_cannot_be_understood_stays_and_is_rebuilt(scratch: Path) -> None:
    pair = Pair(scratch, lambda tracker: create_issues(tracker, "one"))
    [new] = create_issues(pair.ours.tracker, "new")
    (pair.theirs.directory / ".jit/index.json").write_text("<<<<<<<\n")

    pair.join("merge")

    assert new in [each.id for each in pair.ours.tracker.snapshot()]
    assert examine(pair.ours.tracker) == []


# --- Random histories --------------------------------------------------------------------------------

GATES = ("g1", "g2")
LABELS = ("l1", "l2", "l3")
Act = Callable[[Tracker, str, list[str], random.Random], object]


def _finish(tracker: Tracker, one: str, below: list[str], chance: random.Random) -> None:
    for gate in tracker.issue(one).open_gates():
        if chance.random() < 0.7:
            tracker.gates.judge(one, gate, GateStatus.PASSED)
    tracker.update(one, Update(state=State.DONE))


def _judge(gating: Gating, one: str, chance: random.Random) -> None:
    gating.judge(one, chance.choice(GATES), chance.choice([GateStatus.PASSED, GateStatus.FAILED]))


ACTS: dict[str, Act] = {
    "title": lambda t, one, below, c: t.update(one, Update(title=f"title {c.random()}")),
    "description": lambda t, one, below, c: t.update(one, Update(description=f"text {c.random()}\n" * 3)),
    "priority": lambda t, one, below, c: t.update(one, Update(priority=c.choice(list(Priority)))),
    "label": lambda t, one, below, c: t.update(one, Update(add_labels=(c.choice(LABELS),))),
    "no label": lambda t, one, below, c: t.update(one, Update(remove_labels=(c.choice(LABELS),))),
    "context": lambda t, one, below, c: t.update(one, Update(context={c.choice("xy"): c.choice(["1", "2", None])})),
    "assignee": lambda t, one, below, c: t.update(one, Update(assignee=c.choice(["human:a", "human:b", None]))),
    "require": lambda t, one, below, c: t.gates.require(one, [c.choice(GATES)]),
    "judge": lambda t, one, below, c: _judge(t.gates, one, c),
    "claim": lambda t, one, below, c: t.claims.claim(one, t.claims.request()),
    "finish": _finish,
    "new": lambda t, one, below, c: create_issues(t, "new"),
}
OF_EDGES: dict[str, Act] = {  # what these bring must be derived again: the stored states, and the record of dependents
    "depend": lambda t, one, below, c: t.dependencies.add(one, c.choice(below)),
    "independent": lambda t, one, below, c: t.dependencies.remove(one, c.choice(below)),
}
OF_LAST: dict[str, Act] = {  # nothing depends on the last issue, so no other rests on what these undo
    "reject": lambda t, one, below, c: t.update(one, Update(state=State.REJECTED)),
    "archive": lambda t, one, below, c: t.update(one, Update(state=State.ARCHIVED)),
    "reopen": lambda t, one, below, c: t.update(one, Update(state=State.READY)),
}


def prepare(tracker: Tracker) -> None:
    for gate in GATES:
        tracker.gates.define(Definition(gate))
    first, *_, last = create_issues(tracker, "first", "second", "last")
    tracker.update(last, Update(add_labels=("l1", "l2")))
    tracker.gates.require(last, ["g1"])
    tracker.update(first, Update(context={"x": "0"}))


def change(tracker: Tracker, ids: list[str], acts: dict[str, Act], chance: random.Random) -> None:
    """One random change; what the rules refuse is no change."""
    name = chance.choice(list(acts))
    place = len(ids) - 1 if name in OF_LAST else chance.randrange(name in OF_EDGES, len(ids))
    try:
        acts[name](tracker, ids[place], ids[:place], chance)  # edges lead to earlier issues, so that no cycle arises
    except Failure:
        return


def losses(old: Issue, sides: Sequence[Issue], found: Issue) -> list[str]:
    """Every change of a side that is neither in the merged issue nor kept beside it."""
    lost = []
    kept = found.unknown.get(SUPERSEDED, [])
    for side in sides:
        for name in ("title", "description", "priority", "state", "assignee"):
            value = getattr(side, name)
            derived = name == "state" and {value, getattr(old, name)} <= {State.BACKLOG, State.READY, State.GATED}
            if value in (getattr(old, name), getattr(found, name), None) or derived:
                continue
            if not any(each["field"] == name and each["value"] == value for each in kept):
                lost.append(f"{name}: {value}")
        for key, text in side.context.items():
            if text not in (old.context.get(key), found.context.get(key)) and not any(
                each["field"] == f"context.{key}" and each["value"] == text for each in kept
            ):
                lost.append(f"context: {key}={text}")
        if found.state not in FINISHED:
            lost += [f"gate: {each}" for each in set(side.gates_required).difference(found.gates_required)]
            lost += [f"edge: {on}" for on in set(side.dependencies).difference(old.dependencies, found.dependencies)]
    was, (one, other) = set(old.labels), (set(each.labels) for each in sides)
    labels = was & one & other | (one - was) | (other - was)
    if labels != set(found.labels):
        lost.append(f"labels: {sorted(labels)} are {sorted(found.labels)}")
    return lost


def history(scratch: Path, how: str, number: int, plant: str = "") -> list[str]:
    """Change two clones at random, join them, and return what was lost or is inconsistent."""
    chance = random.Random(f"{SEED} {how} {number}")
    scratch.mkdir()
    pair = Pair(scratch, prepare, plant)
    ours, theirs = pair.ours.tracker, pair.theirs.tracker
    before = {each.id: each for each in ours.snapshot()}
    with_edges = chance.random() < 0.5
    acts = {**ACTS, **OF_LAST, **(OF_EDGES if with_edges else {})}
    in_steps = chance.random() < 0.5
    for _ in range(chance.randrange(4, 24)):
        side = chance.choice([pair.ours, pair.theirs])
        change(side.tracker, list(before), acts, chance)
        if in_steps and chance.random() < 0.2:
            side.commit()
    sides = [{each.id: each for each in tracker.snapshot()} for tracker in (ours, theirs)]
    said = pair.join(how, check=False)
    if conflicts := pair.ours.git("diff", "--name-only", "--diff-filter=U"):
        return [f"conflicts: {conflicts} {said}"]
    found = {each.id: each for each in ours.snapshot()}
    problems = [f"missing: {each}" for each in {*sides[0], *sides[1]}.difference(found)]
    for issue_id, old in before.items():
        if how != "merge" and in_steps:
            break  # a rebase also repeats what a later commit undoes
        problems += losses(old, [each[issue_id] for each in sides], found[issue_id])
    left = {each.code for each in examine(ours)} - ({"state"} if with_edges else set())
    problems += [f"validate: {each}" for each in left]
    return problems + [f"not repaired: {each.code}" for each in repair(ours)]


@pytest.mark.parametrize("how", ["merge", "rebase", "cherry-pick"])
def test_random_histories_merge_without_a_conflict_and_without_loss(scratch: Path, how: str) -> None:
    for number in range(rounds(50)):
        assert history(scratch / str(number), how, number) == [], f"seed {SEED}, {how} {number}"


def test_a_merge_that_drops_the_change_of_one_list_is_found(scratch: Path) -> None:
    found: list[str] = []
    for number in range(40):
        found += history(scratch / str(number), "merge", number, DROPPED)
        if any(each.startswith("labels: ") for each in found):
            return
    pytest.fail(f"not found: {found}")
