"""The index: derived from the issues, rebuilt when it is damaged, and cheap to add to at any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotFound, NotInitialised
from holdfast.fs import calls
from holdfast.issues import index as index_module
from holdfast.issues.creating import NewIssue
from holdfast.issues.index import rebuild_index
from holdfast.issues.model import INDEX, Index, Issue, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.issues.validate import examine, repair
from proof.crash import kill_points
from proof.effort import SHARE, rounds
from tests.issues.test_crashes import SWEPT, Operation, legal
from tests.issues.trackers import create_issues, problems, tracker_at


@pytest.fixture
def tracker(scratch: Path) -> Tracker:
    tracker = tracker_at(scratch)
    tracker.initialise()
    return tracker


def index_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / ".jit/index.json").read_bytes())
    return found


def listed(tracker: Tracker) -> list[str]:
    return [issue.id for issue in tracker.snapshot()]


# --- Damage -----------------------------------------------------------------------------------------

CONFLICT = """{
  "schema_version": 2,
  "all_ids": [
<<<<<<< HEAD
    "aaaa"
=======
    "bbbb"
>>>>>>> other
  ],
  "deleted_ids": []
}
"""

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a merge conflict": lambda path: path.write_text(CONFLICT),
    "no file": lambda path: path.unlink(),
    "an empty file": lambda path: path.write_text(""),
    "another type": lambda path: path.write_text("[]"),
    "a key twice": lambda path: path.write_text('{"all_ids": [], "all_ids": []}'),
}

COMMANDS: dict[str, Callable[[Tracker, str], object]] = {
    "list": lambda tracker, issue_id: tracker.snapshot(),
    "create": lambda tracker, issue_id: tracker.create(NewIssue(title="new")),
    "delete": lambda tracker, issue_id: tracker.delete(create_issues(tracker, "another")[0]),
    "break down": lambda tracker, issue_id: tracker.break_down(issue_id, [NewIssue(title="part")]),
    "claim the next": lambda tracker, issue_id: tracker.claims.take_next(tracker.claims.request()),
    "initialise": lambda tracker, issue_id: tracker.initialise(),
    "repair": lambda tracker, issue_id: repair(tracker),
}


@pytest.mark.req("FL-08")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_index_is_rebuilt_by_the_next_command(
    tracker: Tracker, scratch: Path, damage: str, command: str
) -> None:
    ids = create_issues(tracker, *"abc")
    tracker.dependencies.add(ids[0], ids[1])
    DAMAGE[damage](scratch / ".jit/index.json")
    COMMANDS[command](tracker, ids[2])

    assert set(index_of(scratch)["all_ids"]) == set(listed(tracker)) >= set(ids)
    assert problems(tracker) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_disturbs_no_command_on_one_issue(tracker: Tracker, scratch: Path, damage: str) -> None:
    [issue_id] = create_issues(tracker, "a")
    DAMAGE[damage](scratch / ".jit/index.json")

    assert tracker.find_id(issue_id[:8]) == issue_id
    with pytest.raises(NotFound):
        tracker.find_id("nothing")
    DAMAGE[damage](scratch / ".jit/index.json")
    tracker.update(issue_id, Update(state=State.DONE))
    assert [each.code for each in examine(tracker)] == ["index"]  # which changes nothing
    tracker.transactions.check_initialised()
    assert repair(tracker) == []


def test_without_an_index_and_issues_there_is_no_tracker(tracker: Tracker, scratch: Path) -> None:
    (scratch / ".jit/index.json").unlink()

    for act in (
        tracker.snapshot,
        lambda: tracker.create(NewIssue(title="new")),
        lambda: tracker.find_id("a"),
        lambda: examine(tracker),
    ):
        with pytest.raises(NotInitialised):
            act()
    assert tracker.initialise()
    assert listed(tracker) == []


def test_a_rebuilt_index_lists_issues_by_age_and_keeps_the_fields_of_others(tracker: Tracker, scratch: Path) -> None:
    ids = create_issues(tracker, "a") + create_issues(tracker, "b") + create_issues(tracker, "c")
    path = scratch / ".jit/index.json"
    path.unlink()
    assert listed(tracker) == ids
    path.write_text(json.dumps({"schema_version": 1, "all_ids": [ids[2], "gone"], "extra": {"kept": True}}))
    rebuild_index(tracker.transactions)

    assert index_of(scratch) == {
        "schema_version": 1,
        "all_ids": [ids[2], ids[0], ids[1]],
        "deleted_ids": [],
        "extra": {"kept": True},
    }


def test_an_issue_that_no_list_contains_is_shown_and_found(tracker: Tracker, scratch: Path) -> None:
    ids = create_issues(tracker, *"ab")
    (scratch / ".jit/index.json").write_text(json.dumps({"all_ids": [ids[1]]}))

    assert listed(tracker) == [ids[1], ids[0]]
    assert tracker.find_id(ids[0][:8]) == ids[0]


# --- Size -------------------------------------------------------------------------------------------

MANY = 110_000  # more than 4 MiB of ids


def write_large_index(scratch: Path) -> list[str]:
    """An index as another program writes it. Only the last issue exists: others would not be read."""
    ids = [str(uuid.UUID(int=n << 64)) for n in range(1, MANY)]
    issue = {"id": str(uuid.UUID(int=MANY << 64)), "title": "the last one"}
    (scratch / ".jit/issues").mkdir(exist_ok=True)
    (scratch / f".jit/issues/{issue['id']}.json").write_text(json.dumps(issue))
    ids.append(issue["id"])
    (scratch / ".jit/index.json").write_text(json.dumps({"schema_version": 2, "all_ids": ids}, indent=2))
    return ids


def bytes_moved(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes an operation reads and writes."""
    sizes: list[int] = []
    with monkeypatch.context() as patch:
        real_read, real_write = calls.read, calls.write

        def read(fd: int, size: int) -> bytes:
            content = real_read(fd, size)
            sizes.append(len(content))
            return content

        def write(fd: int, content: bytes) -> int:
            sizes.append(len(content))
            return real_write(fd, content)

        patch.setattr(calls, "read", read)
        patch.setattr(calls, "write", write)
        act()
    return sum(sizes)


def test_creating_and_showing_cost_the_same_with_a_large_index(
    tracker: Tracker, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create() -> Issue:
        return tracker.create(NewIssue(title="new"))

    create()
    small = bytes_moved(create, monkeypatch)
    ids = write_large_index(scratch)
    first = create().id  # finds that the index is large
    index = (scratch / ".jit/index.json").stat()
    assert index.st_size > 4 << 20
    assert index_of(scratch)["all_ids"] == [*ids, first]

    assert bytes_moved(create, monkeypatch) < small + 4096
    assert bytes_moved(lambda: tracker.document(ids[-1]), monkeypatch) < 4096
    assert tracker.find_id("00000000-0001-adb0") == ids[-1]
    second = create().id
    assert tracker.find_id(second[:8]) == second
    after = (scratch / ".jit/index.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (index.st_ino, index.st_mtime_ns)
    tracker.delete(second)
    assert len(index_of(scratch)["all_ids"]) == len(ids) + 2  # deleting writes an exact index


def test_a_million_issues_can_be_listed() -> None:
    index = Index(all_ids=[str(uuid.UUID(int=n)) for n in range(rounds(1_000_000, least=MANY))])

    assert INDEX.codec.decode(INDEX.codec.encode(index), "index") == index


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of three issues counts as large."""
    monkeypatch.setattr(index_module, "MOST_EXACT", 3)
    monkeypatch.setattr(index_module, "MOST_UNLISTED", 4)
    monkeypatch.setattr(index_module, "MOST_DELETED", 5)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.req("FL-08")
def test_a_large_index_is_written_for_several_new_issues_together(tracker: Tracker, scratch: Path) -> None:
    ids: list[str] = []
    counts: list[int] = []
    for number in range(14):
        ids += create_issues(tracker, f"{number}", *("batch",) * (number == 9))
        counts.append(len(index_of(scratch)["all_ids"]))
        assert listed(tracker) == ids
        assert tracker.find_id(ids[-1][:13]) == ids[-1]
        assert problems(tracker) == []

    assert counts == [1, 2, 3, 4, 4, 4, 4, 4, 9, 9, 9, 9, 14, 14]
    tracker.delete(ids.pop(0))
    assert index_of(scratch)["all_ids"] == ids == listed(tracker)
    for each in ids[3:]:
        tracker.delete(each)
    assert not (scratch / ".jit/unlisted.json").exists()  # small again
    assert len(index_of(scratch)["deleted_ids"]) == 5
    assert create_issues(tracker, "last") == index_of(scratch)["all_ids"][-1:]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("content", ["{", "{}", None])
def test_a_lost_note_of_unlisted_issues_loses_no_issue(tracker: Tracker, scratch: Path, content: str | None) -> None:
    ids = [create_issues(tracker, f"{number}")[0] for number in range(6)]
    path = scratch / ".jit/unlisted.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)

    assert listed(tracker) == ids
    ids += create_issues(tracker, "new")
    assert repair(tracker) == []
    assert sorted(listed(tracker)) == sorted(ids)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_large_index_that_is_damaged_is_rebuilt_at_the_latest_with_the_next_ones(
    tracker: Tracker, scratch: Path, damage: str
) -> None:
    ids = [create_issues(tracker, f"{number}")[0] for number in range(6)]
    DAMAGE[damage](scratch / ".jit/index.json")
    ids += [create_issues(tracker, f"{number}")[0] for number in range(6, 12)]

    assert len(index_of(scratch)["all_ids"]) > 6
    assert sorted(listed(tracker)) == sorted(ids)
    assert problems(tracker) == []


@pytest.mark.usefixtures("small_limits")
def test_a_noted_issue_whose_file_is_gone_is_not_listed(tracker: Tracker, scratch: Path) -> None:
    ids = [create_issues(tracker, f"{number}")[0] for number in range(6)]
    (scratch / f".jit/issues/{ids[5]}.json").unlink()
    ids += [create_issues(tracker, f"{number}")[0] for number in range(6, 12)]

    assert ids[5] not in index_of(scratch)["all_ids"]
    assert len(index_of(scratch)["all_ids"]) > 6


@pytest.mark.usefixtures("small_limits")
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.req("FL-07", "FL-08")
@pytest.mark.parametrize("name", ["create", "create two", "delete", "break down"])
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_with_a_large_index_leaves_the_old_state_or_the_new(name: str, scratch: Path) -> None:
    report = kill_points(Operation(name, legal(name, scratch / "legal")), names=SWEPT, share=SHARE)

    report.require_clean(at_least=16)


# --- Git --------------------------------------------------------------------------------------------


class Clone:
    """A tracker in a git repository."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.git("init", "-q", "-b", "main")
        self.tracker = tracker_at(directory)
        self.tracker.initialise()

    def git(self, *words: str, check: bool = True) -> str:
        names = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "x")
        mails = dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "x@example.org")
        environment = {**os.environ, **names, **mails, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command = ["git", "-C", str(self.directory), *words]
        return subprocess.run(command, check=check, env=environment, capture_output=True, text=True).stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")

    def on_branch(self, act: Callable[[], object]) -> None:
        """Change something on another branch, then come back."""
        self.git("checkout", "-q", "-b", "other")
        act()
        self.commit()
        self.git("checkout", "-q", "main")


@pytest.fixture
def clone(scratch: Path) -> Clone:
    return Clone(scratch / "clone")


def test_git_ignores_what_belongs_to_one_machine(clone: Clone) -> None:
    a, b = create_issues(clone.tracker, "a", "b")
    clone.tracker.dependencies.add(a, b)
    clone.tracker.claims.claim(b, clone.tracker.claims.request())
    clone.git("add", "-A")

    tracked = clone.git("ls-files").split()
    issues = [f".jit/issues/{each}.json" for each in (a, b)]
    others = [".gitattributes", ".gitignore", "events.jsonl", "gates.json", "index.json"]
    assert sorted(tracked) == sorted([*issues, *(f".jit/{name}" for name in others)])


def test_initialising_again_keeps_the_files_for_git_that_a_person_changed(clone: Clone) -> None:
    path = clone.directory / ".jit/.gitignore"
    path.write_text("*\n")
    (clone.directory / ".jit/.gitattributes").unlink()

    assert not clone.tracker.initialise()
    assert path.read_text() == "*\n"
    assert (clone.directory / ".jit/.gitattributes").exists()


def test_issues_of_two_branches_merge_without_a_conflict(clone: Clone) -> None:
    tracker = clone.tracker
    [base] = create_issues(tracker, "base")
    clone.commit()
    created: list[str] = []
    clone.on_branch(lambda: created.extend(create_issues(tracker, "theirs", "too")))
    created += create_issues(tracker, "ours")
    clone.commit()
    clone.git("merge", "-q", "other")

    assert set(listed(tracker)) == {base, *created}
    assert set(index_of(clone.directory)["all_ids"]) == {base, *created}
    assert problems(tracker) == []
    assert [entry.record.type for entry in tracker.events()].count("issue_created") == 4


def test_a_fresh_clone_is_a_valid_tracker(clone: Clone, scratch: Path) -> None:
    a, b = create_issues(clone.tracker, "a", "b")
    clone.tracker.dependencies.add(a, b)
    clone.commit()
    clone.git("clone", "-q", ".", str(scratch / "copy"))
    copy = tracker_at(scratch / "copy")

    assert problems(copy) == []
    assert copy.dependents_of(b) == (a,)  # by reading all issues
    assert repair(copy) == []
    assert (scratch / f"copy/.jit/dependents/{b}.json").exists()
    copy.update(b, Update(state=State.DONE))
    assert copy.issue(a).state is State.READY


def test_repair_does_not_bring_back_what_another_branch_deleted(clone: Clone) -> None:
    tracker = clone.tracker
    kept, gone = create_issues(tracker, "kept", "gone")
    clone.commit()
    clone.on_branch(lambda: tracker.delete(gone))
    tracker.update(gone, Update(title="changed"))  # git keeps this file, and leaves the decision to a person
    create_issues(tracker, "ours")
    clone.commit()
    clone.git("merge", "-q", "other", check=False)
    path = clone.directory / f".jit/issues/{gone}.json"
    assert path.exists()
    for damaged in (False, True):
        if damaged:
            (clone.directory / ".jit/index.json").unlink()

        assert [each.code for each in repair(tracker)] == ["deleted"]
        assert gone not in index_of(clone.directory)["all_ids"]
        assert gone not in listed(tracker)
        assert kept in listed(tracker)
    path.unlink()
    assert problems(tracker) == []


def test_an_issue_that_was_deleted_and_imported_again_is_kept(tracker: Tracker, scratch: Path) -> None:
    tracker.adopt([Issue(id="a", title="a")])
    tracker.delete("a")
    tracker.adopt([Issue(id="a", title="a")])
    (scratch / ".jit/index.json").unlink()

    assert listed(tracker) == ["a"]
    assert problems(tracker) == []
