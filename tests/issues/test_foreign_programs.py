"""Programs that follow the specification and know nothing of intents, beside processes of Holdfast that are killed.

Whatever they do to the documents and events that a dead process was changing, every command of Holdfast still works,
and neither side loses a change.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.fs.directory import Directory
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.tracker import Tracker, Update
from holdfast.store import lines, recovery
from holdfast.store.intents import Intents, StepTarget
from holdfast.store.layout import Location
from holdfast.store.lines import Waiting
from holdfast.store.recovery import Resolution
from proof.crash import Outcome, kill_points
from proof.effort import SHARE, rounds
from tests.issues.foreign import ForeignProgram
from tests.issues.test_crashes import SWEPT, A, B, Facts, Operation, facts, legal
from tests.issues.trackers import create_issues, problems, tracker_at
from tests.locks.workers import Line, Workers
from tests.store.storm import IsOver, Life, storm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and flock(2)")


def events_in(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / ".jit/events.jsonl").read_text().splitlines()]


def document(directory: Path, name: str) -> Any:
    return json.loads((directory / ".jit" / name).read_text())


def label_issues(other: ForeignProgram) -> None:
    for each in (A, B):
        if other.has_issue(each):
            other.add_label(each, "noted")


def are_labelled(directory: Path) -> bool:
    return all(is_labelled(directory, each["issue_id"]) for each in events_in(directory) if each.get("name") == "noted")


def is_labelled(directory: Path, issue_id: str) -> bool:
    """Whether an issue has the label; if we deleted it at the same time, an event keeps what it was."""
    if (directory / f".jit/issues/{issue_id}.json").exists():
        return "noted" in document(directory, f"issues/{issue_id}.json")["labels"]
    kept = [each["found"] for each in events_in(directory) if each["type"] == "change_conflict"]
    return any(each["id"] == issue_id and "noted" in each["labels"] for each in kept)


DEEDS: dict[str, tuple[Callable[[ForeignProgram], object], Callable[[Path], bool]]] = {
    "event": (lambda other: other.append_event("noted"), lambda _: True),
    "label": (label_issues, are_labelled),
    "issue": (
        lambda other: other.create_issue("noted"),
        lambda here: "noted" in document(here, "index.json")["all_ids"],
    ),
    "gate": (lambda other: other.define_gate("noted"), lambda here: "noted" in document(here, "gates.json")["gates"]),
}
"""What the other program does, and whether that is in the files. Every deed also appends an event."""


OTHERS = {"foreign_event", "change_conflict", "unreadable"}
"""Events that are not ours. An event is unreadable if it follows a torn one, until that is repaired."""


class BesideAnother(Operation):
    """An operation of ours is killed, another program does something, and we work on. A reader that comes first adds
    the lines that the killed process owes; without one, the other program meets what is left of them."""

    def __init__(self, name: str, deed: str, legal: tuple[Facts, Facts], *, is_read_first: bool = True) -> None:
        super().__init__(name, legal)
        self._deed, self._done = DEEDS[deed]
        self._is_read_first = is_read_first

    def check(self, directory: Path, outcome: Outcome) -> None:
        assert self._legal is not None
        tracker = tracker_at(directory)
        legal, position = [*map(without_others, self._legal)], 0
        if self._is_read_first:
            legal = [seen for seen in legal if seen == issues_and_events(tracker)]
            assert legal, "readers see something else before the other program does anything"
            position = max((entry.position for entry in tracker.events()), default=0)

        self._deed(ForeignProgram(directory))
        seen = issues_and_events(tracker)
        assert seen in legal, "readers see something else before we finish"
        assert OTHERS & {each.record.type for each in tracker.events(after=position)}, "a reader missed it"
        assert tracker.create(NewIssue(title="works on")).title == "works on"
        for issue_id in (A, B):
            if (issue := tracker.transactions.read(issue_id)) is not None:
                tracker.update(issue_id, Update(title=issue.title))

        assert issues_and_events(tracker) == seen, "a change of ours is lost"
        assert "foreign_event" in {each.record.type for each in tracker.events(after=position)}, "a reader missed it"
        assert self._done(directory), "a change of the other program is lost"
        events = events_in(directory)  # every line is whole
        assert "noted" in [each.get("name") for each in events], "an event of the other program is lost"
        assert max(Counter(each["id"] for each in events).values()) == 1, "an event appears twice"
        assert not list(directory.glob(".holdfast/intents/[!.]*")), "an intent is left"
        assert problems(tracker) == []


def issues_and_events(tracker: Tracker) -> tuple[object, object]:
    return without_others(facts(tracker))


def without_others(found: Facts) -> tuple[object, object]:
    """The facts without what the other program, or the commands after the kill, have added."""
    issues, events = found
    assert isinstance(issues, dict)
    assert isinstance(events, list)
    ours = Counter(type_ for type_, is_known in events if type_ not in OTHERS)
    created = "works on" in issues
    return {k: v for k, v in issues.items() if k not in ("noted", "works on")}, ours - Counter(issue_created=created)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("name", ["update", "break down", "finish", "create", "delete"])
@pytest.mark.parametrize("is_read_first", [True, False], ids=["read first", "at once"])
@pytest.mark.sampled(3)
def test_a_kill_and_a_change_by_another_program_block_nothing_and_lose_nothing(
    name: str, deed: str, is_read_first: bool, scratch: Path
) -> None:
    scenario = BesideAnother(name, deed, legal(name, scratch / "legal"), is_read_first=is_read_first)
    kill_points(scenario, names=SWEPT, share=SHARE).require_clean(at_least=16)


KILL = 9


def killed_before(step: str, root: Path, operation: Callable[[Tracker], object]) -> None:
    """Let another process decide an operation, and be killed before it applies or drops its intent."""

    def work(line: Line) -> None:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(Intents, step, lambda *_, **__: os.kill(os.getpid(), KILL))
            operation(tracker_at(root))

    with Workers() as workers:
        assert workers.start(work).wait() == -KILL


def finish_commits(tracker: Tracker) -> None:
    """Apply what the dead process has left."""
    files = tracker.store.files
    assert files is not None
    files.finish_commits(files.unfinished_commits())


@pytest.mark.parametrize("name", ["create", "delete"])
def test_an_index_too_large_for_an_intent_is_merged_by_what_was_deleted(name: str, scratch: Path) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    ids, many = create_issues(tracker, "a", "b"), [f"{number:036}" for number in range(8_000)]
    other = ForeignProgram(scratch)
    other._change("index.json", lambda index: index["all_ids"].extend(many))
    operations: dict[str, Callable[[Tracker], object]] = {
        "create": lambda tracker: tracker.create(NewIssue(title="new")),
        "delete": lambda tracker: tracker.delete(ids[0]),
    }
    killed_before("apply", scratch, operations[name])
    other.create_issue("noted")
    other._change("index.json", lambda index: index.update(deleted_ids=[index["all_ids"].pop(2)]))

    finish_commits(tracker)
    left, new = (
        document(scratch, "index.json")["all_ids"],
        [each.id for each in tracker.snapshot() if each.title == "new"],
    )
    assert left == [*(ids if name == "create" else ids[1:]), *many[1:], "noted", *new]
    assert len(new) == (name == "create")


@pytest.mark.parametrize("found", ["x" * (17 << 20), "[" * 99 + "]" * 99], ids=["huge", "deep"])
def test_a_conflict_with_a_document_that_fits_into_no_event_blocks_nothing(found: str, scratch: Path) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    ids = create_issues(tracker, "a", "b")
    killed_before("apply", scratch, lambda tracker: tracker.update(ids[0], Update(title="ours")))
    path = scratch / f".jit/issues/{ids[0]}.json"
    value = found if found.startswith("[") else json.dumps(found)
    path.write_text(path.read_text().replace('"title": "a"', f'"title": "theirs", "more": {value}'))

    assert tracker.update(ids[1], Update(title="works on")).title == "works on"
    finish_commits(tracker)
    assert '"title": "theirs"' in path.read_text()
    assert not list(scratch.glob(".holdfast/intents/*.json"))


def test_an_issue_that_another_program_deleted_after_we_published_it_stays_deleted(scratch: Path) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    killed_before("drop", scratch, lambda tracker: tracker.create(NewIssue(title="new")))
    (new,) = document(scratch, "index.json")["all_ids"]
    ForeignProgram(scratch).delete_issue(new)

    tracker.create(NewIssue(title="works on"))
    assert [each.title for each in tracker.snapshot()] == ["works on"]
    assert problems(tracker) == []


# --- The storm ----------------------------------------------------------------------------------------


class Diary:
    """What a process tried and did; it survives the process."""

    def __init__(self, directory: Path, name: str) -> None:
        self._fd = os.open(directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, word: str, token: str) -> None:
        os.write(self._fd, f"{word} {token}\n".encode())

    @staticmethod
    def read(directory: Path, word: str) -> set[str]:
        lines = [line.split() for path in directory.iterdir() for line in path.read_text().splitlines()]
        return {token for said, token in lines if said == word}


def others_work(root: Path, diaries: Path, ids: list[str], line: Line) -> None:
    """A foreign program that never dies; it works until the test says something."""
    other, diary = ForeignProgram(root), Diary(diaries, f"foreign-{os.getpid()}")
    for number in itertools.count():
        if line.has_news():
            break
        token = f"f{os.getpid()}-{number}"
        kind = random.choice(["label", "label", "event", "gate", "issue"])
        if kind == "label":
            other.add_label(random.choice(ids), token)
        elif kind == "event":
            other.append_event(token)
        elif kind == "gate":
            other.define_gate(token)
        else:
            other.create_issue(token)
        diary.note(kind, token)
        time.sleep(random.random() * 0.02)  # not faster than we are killed
    line.say("done")


def we_work(root: Path, diaries: Path, ids: list[str], life: Life, is_over: IsOver) -> None:
    """A process of ours; it may be killed anywhere."""
    tracker, diary = tracker_at(root, f"agent:{life.name}"), Diary(diaries, f"ours-{life.name}")
    for number in itertools.count():
        if is_over():
            return
        token = f"o{life.name}-{number}"
        kind = random.choice(["update", "update", "gate", "create"])
        diary.note("tried", token)
        if kind == "update":
            tracker.update(random.choice(ids), Update(context={token: "done"}))
        elif kind == "gate":
            tracker.gates.define(Definition(token))
        else:
            tracker.create(NewIssue(title=token))
        diary.note(kind, token)


def storm_beside_others(base: Path, kills: int) -> None:
    """8 processes of ours that are killed, beside 4 programs that know nothing of intents; then judge the files."""
    root, diaries = base / "root", base / "diaries"
    diaries.mkdir()
    tracker = tracker_at(root)
    tracker.initialise()
    tracker.gates.define(Definition("first"))
    ids = create_issues(tracker, *(f"issue {number}" for number in range(6)))
    with Workers() as workers:
        others = workers.start_many(4, lambda line: others_work(root, diaries, ids, line))
        assert storm(8, lambda life, is_over: we_work(root, diaries, ids, life, is_over), kills=kills) >= kills
        assert [each.ask("stop") for each in others] == ["done"] * 4

    for issue_id in ids:  # nothing is blocked
        tracker.update(issue_id, Update(title="calm"))
    issues = list(tracker.snapshot())
    found = {
        "label": {label for issue in issues for label in issue.labels},
        "issue": set(document(root, "index.json")["all_ids"]),
        "gate": set(document(root, "gates.json")["gates"]),
        "update": {token for issue in issues for token in issue.context},
        "create": {issue.title for issue in issues},
    }
    lost = {word: Diary.read(diaries, word) - there for word, there in found.items()}
    assert not any(lost.values()), f"lost: {lost}"
    events, ours = events_in(root), Diary.read(diaries, "tried")
    twice = [key for key, times in Counter(each["id"] for each in events).items() if times > 1]
    assert not twice, f"events that appear twice: {twice}"
    told = Counter(each["type"] for each in events)
    names = {each.get("name") for each in events}
    assert all(Diary.read(diaries, word) & names == Diary.read(diaries, word) - ours for word in DEEDS)
    assert told["issue_created"] == len(issues) - len(Diary.read(diaries, "issue"))
    assert told["issue_updated"] == len(found["update"]) + len(ids)
    assert problems(tracker) == []


@pytest.mark.req("FL-07", "FL-08")
def test_a_storm_of_kills_beside_other_programs_blocks_nothing_and_loses_nothing(scratch: Path) -> None:
    storm_beside_others(scratch, kills=rounds(2000, least=5))


# --- Planted bugs that the sweeps must find -----------------------------------------------------------


def lines_not_recognised(plant: pytest.MonkeyPatch) -> None:
    def none_found(directory: Directory, location: Location, after: int, lines: tuple[bytes, ...]) -> Waiting:
        return Waiting(after, after, lines)

    plant.setattr(lines, "find_waiting", none_found)


def documents_overwritten(plant: pytest.MonkeyPatch) -> None:
    ours_always = lambda target, current, *, published: Resolution(target.step.document)  # noqa: E731
    plant.setattr(recovery, "resolve", ours_always)


def documents_left_to_others(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(StepTarget, "was_published", lambda self: True)


def torn_lines_left(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(lines, "_torn", lambda directory, location, after, line: (0, 0))


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (lines_not_recognised, "event", "readers see something else"),
    (documents_overwritten, "label", "a change of the other program is lost"),
    (documents_left_to_others, "label", "readers see something else"),
    (torn_lines_left, "event", "a reader missed it"),
]


@pytest.mark.parametrize(("plant", "deed", "symptom"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
@pytest.mark.sampled(2)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    deed: str,
    symptom: str,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = BesideAnother("update", deed, legal("update", scratch / "legal"), is_read_first=False)
    plant(monkeypatch)
    found = [each.problem for each in kill_points(scenario, names=("write", "replace")).violations]
    assert any(symptom in each for each in found), f"not among {found}"


def test_the_time_of_the_last_change_is_no_conflict() -> None:
    old, ours = {"title": "a", "updated_at": "1"}, {"title": "b", "updated_at": "2"}
    theirs = {"title": "a", "labels": ["x"], "updated_at": "3"}
    clashes: list[str] = []
    merged = recovery._merged(old, ours, theirs, clashes)
    assert merged == {"title": "b", "labels": ["x"], "updated_at": "3"}
    assert clashes == []
    recovery._merged(old, ours, {"title": "c", "updated_at": "3"}, clashes)
    assert clashes == ["title"]
