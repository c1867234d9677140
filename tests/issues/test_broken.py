"""One unreadable issue: it is named, never taken for done, never overwritten, and the others keep working."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import Blocked, Corrupt, NotFound
from holdfast.issues.creating import NewIssue
from holdfast.issues.exchange import exported
from holdfast.issues.model import Issue, Priority, State
from holdfast.issues.tracker import Query, Tracker, Update, find
from holdfast.issues.validate import examine, repair
from holdfast.store.files import FileStore
from holdfast.store.intents import Intent, Step
from holdfast.store.layout import OpenDirectories
from tests.issues.trackers import claim_id_of, tracker_at

BASE, BROKEN, WAITING, FREE = "base", "torn", "waiting", "free"
DEAD = "dead"


@pytest.fixture
def tracker(scratch: Path) -> Tracker:
    """waiting -> torn -> base; and free, which is unrelated."""
    tracker = tracker_at(scratch)
    tracker.initialise()
    tracker.adopt(
        [
            Issue(id=BASE, title="base"),
            Issue(id=BROKEN, title="torn", dependencies=(BASE,)),
            Issue(id=WAITING, title="waiting", dependencies=(BROKEN,)),
            Issue(id=FREE, title="free"),
        ]
    )
    return tracker


@pytest.fixture
def file(scratch: Path) -> Path:
    return scratch / f".jit/issues/{BROKEN}.json"


def torn(path: Path) -> bytes:
    """Cut a file short, as a writer that dies may; return the rest."""
    content = path.read_bytes()[:40]
    path.write_bytes(content)
    return content


def kinds(tracker: Tracker) -> list[str]:
    return [each.code for each in examine(tracker)]


def conflict(path: Path) -> None:
    whole = path.read_text()
    path.write_text(f"<<<<<<< HEAD\n{whole}=======\n{whole}>>>>>>> theirs\n")


def wrong_type(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "dependencies": "base"}))


def wrong_id(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": FREE}))


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "torn": torn,
    "a merge conflict": conflict,
    "a field of the wrong type": wrong_type,
    "another issue's content": wrong_id,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a directory": directory,
    "a link": link,
}


@pytest.mark.req("FL-09")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_issue_is_named_and_the_others_keep_working(tracker: Tracker, file: Path, damage: str) -> None:
    DAMAGE[damage](file)
    before = None if file.is_dir() else file.read_bytes()

    seen = tracker.snapshot()
    assert [each.id for each in seen] == [BASE, WAITING, FREE]
    assert [each.id for each in seen.ready()] == [BASE, FREE]
    assert [each.id for each in find(seen, Query(words=("free",)))] == [FREE]
    assert [(issue.id, on) for issue, on in seen.blocked()] == [(WAITING, [BROKEN])]
    [broken] = seen.broken
    record = broken.as_record()
    assert (record["id"], record["code"]) == (BROKEN, broken.failure.code)
    assert BROKEN in record["path"]
    assert record["hint"]

    claims = tracker.claims
    first, second = (claims.take_next(claims.request()) for _ in range(2))
    assert [each.issue.id for each in (first, second)] == [BASE, FREE]
    assert [each.issue_id for each in first.broken] == [BROKEN]
    assert tracker.update(BASE, Update(state=State.DONE), claim=claim_id_of(first)).state is State.DONE
    assert tracker.create(NewIssue(title="another")).state is State.READY
    assert kinds(tracker) == ["unreadable"]
    assert [each.code for each in repair(tracker)] == ["unreadable"]
    assert before is None or file.read_bytes() == before


def test_a_program_that_writes_in_place_disturbs_no_other_issue(tracker: Tracker, file: Path) -> None:
    """Its writes are not atomic, so a reader may find half a file."""
    whole, stop = file.read_bytes(), threading.Event()

    def write_in_place() -> None:
        while not stop.is_set():
            file.write_bytes(whole[:40])
            file.write_bytes(whole)

    seen = set[int]()
    with ThreadPoolExecutor(1) as other:
        writing = other.submit(write_in_place)
        try:
            for number in range(10_000):
                if number >= 200 and seen == {0, 1}:
                    break
                snapshot = tracker.snapshot()
                there = {each.id for each in snapshot} | {each.issue_id for each in snapshot.broken}
                assert there == {BASE, BROKEN, WAITING, FREE}
                seen.add(len(snapshot.broken))
                claimed = tracker.claims.take_next(tracker.claims.request())
                assert claimed.issue.id in (BASE, FREE)
                tracker.claims.release(claimed.issue.id, claim_id_of(claimed))
        finally:
            stop.set()
        writing.result()
    assert seen == {0, 1}  # otherwise the test proves nothing
    assert kinds(tracker) == []


def test_a_merge_conflict_is_reported_as_one(tracker: Tracker, file: Path) -> None:
    conflict(file)
    [broken] = tracker.snapshot().broken
    assert broken.failure.message == f"{file} cannot be understood: it contains a merge conflict"
    assert "merge conflict" in broken.failure.hint


def test_a_dependent_of_an_unreadable_issue_is_blocked_and_the_error_says_why(tracker: Tracker, file: Path) -> None:
    whole = file.read_bytes()
    torn(file)

    with pytest.raises(Blocked, match="cannot be read") as caught:
        tracker.claims.claim(WAITING, tracker.claims.request())
    assert str(file) in caught.value.hint
    assert caught.value.facts["blocked_by"] == [BROKEN]
    assert tracker.state(tracker.issue(WAITING)) is State.BACKLOG
    with pytest.raises(Blocked, match="cannot be read"):
        tracker.update(WAITING, Update(state=State.DONE))

    file.write_bytes(whole)
    for each in (BASE, BROKEN):
        tracker.update(each, Update(state=State.DONE))
    assert tracker.claims.claim(WAITING, tracker.claims.request()).issue.id == WAITING


def test_a_dependency_that_becomes_unreadable_blocks_finishing_but_not_releasing(tracker: Tracker, file: Path) -> None:
    for each in (BASE, BROKEN):
        tracker.update(each, Update(state=State.DONE))
    claimed = tracker.claims.claim(WAITING, tracker.claims.request())
    torn(file)

    with pytest.raises(Blocked, match="cannot be read"):
        tracker.update(WAITING, Update(state=State.DONE), claim=claim_id_of(claimed))
    tracker.claims.renew(claim_id_of(claimed))
    tracker.update(WAITING, Update(description="so far"), claim=claim_id_of(claimed))
    released = tracker.claims.release(WAITING, claim_id_of(claimed))
    assert (released.state, released.assignee) == (State.BACKLOG, None)


@pytest.mark.req("FL-10")
def test_no_cycle_can_be_made_through_an_unreadable_issue(tracker: Tracker, file: Path) -> None:
    torn(file)

    with pytest.raises(Corrupt, match=BROKEN):
        tracker.dependencies.add(BASE, WAITING)  # waiting -> torn -> base: the second half is unreadable
    with pytest.raises(Corrupt, match=BROKEN):
        tracker.dependencies.add(FREE, BROKEN)
    with pytest.raises(Corrupt, match=BROKEN):
        tracker.create(NewIssue(title="new", depends_on=(BROKEN,)))
    with pytest.raises(Corrupt, match=BROKEN):
        tracker.adopt([Issue(id="new", title="new", dependencies=(WAITING,))])
    assert tracker.dependencies.add(FREE, BASE).added  # no path leads through the unreadable issue
    assert tracker.dependencies.add(WAITING, FREE).added
    assert tracker.create(NewIssue(title="new", depends_on=(WAITING, FREE))).state is State.BACKLOG
    assert tracker.issue(BASE).dependencies == ()


def test_a_dependency_of_an_unreadable_issue_is_neither_reopened_nor_deleted(tracker: Tracker, file: Path) -> None:
    tracker.update(BASE, Update(state=State.DONE))
    torn(file)

    with pytest.raises(Corrupt, match=BROKEN):
        tracker.update(BASE, Update(state=State.READY))
    for each in (BASE, BROKEN):
        with pytest.raises(Corrupt, match=BROKEN):
            tracker.delete(each)
    assert tracker.update(BASE, Update(state=State.ARCHIVED)).state is State.ARCHIVED
    assert tracker.delete(FREE).id == FREE


def test_a_dependency_on_an_unreadable_issue_can_be_removed(tracker: Tracker, file: Path) -> None:
    torn(file)

    freed = tracker.dependencies.remove(WAITING, BROKEN)
    assert freed is not None
    assert freed.state is State.READY
    assert tracker.delete(WAITING).id == WAITING


def test_without_the_graph_an_unreadable_issue_counts_as_a_dependent_of_every_issue(
    tracker: Tracker, file: Path, scratch: Path
) -> None:
    torn(file)
    (scratch / ".jit/graph.json").unlink()

    assert BROKEN in tracker.dependents_of(FREE)
    with pytest.raises(Corrupt, match=BROKEN):
        tracker.delete(FREE)
    assert tracker.update(FREE, Update(state=State.DONE)).state is State.DONE
    found = {each.code: each.fixable for each in examine(tracker)}
    assert found == {"unreadable": False, "dependents": False}
    assert {each.code for each in repair(tracker)} == found.keys()


def test_an_export_contains_every_issue_or_fails(tracker: Tracker, file: Path) -> None:
    torn(file)
    with pytest.raises(Corrupt, match=BROKEN):
        exported(tracker.snapshot(), None)


@pytest.mark.parametrize("state", ["in_progress", "ready"])
def test_an_issue_with_an_unreadable_claim_is_skipped_and_named_at_last(
    tracker: Tracker, scratch: Path, state: str
) -> None:
    claimed = tracker.claims.claim(BASE, tracker.claims.request())
    if state == "ready":
        tracker.claims.release(BASE, claim_id_of(claimed))
    torn(scratch / f".jit/claims/{BASE}.json")

    assert tracker.claims.take_next(tracker.claims.request()).issue.id == FREE
    with pytest.raises(NotFound) as caught:
        tracker.claims.take_next(tracker.claims.request())
    told = caught.value.facts["broken"][0]  # type: ignore[index]
    assert (told["id"], f"claims/{BASE}.json" in told["path"]) == (BASE, True)
    assert kinds(tracker) == ["unreadable"]


def test_a_waiter_does_not_wait_for_an_unreadable_issue(tracker: Tracker, file: Path) -> None:
    tracker.delete(WAITING)
    for each in (BASE, FREE):
        tracker.update(each, Update(state=State.DONE))
    torn(file)

    with pytest.raises(NotFound, match=r"cannot be read .*torn\.json"):
        tracker.claims.take_next(tracker.claims.request(), wait=None)


@pytest.mark.parametrize("name", ["graph.json", "gates.json", f"dependents/{BASE}.json"])
def test_other_unreadable_documents_are_found_and_not_repaired(tracker: Tracker, scratch: Path, name: str) -> None:
    path = scratch / ".jit" / name
    path.write_text("{")

    findings = [each for each in repair(tracker) if each.code == "unreadable"]
    assert [name in each.message for each in findings] == [True]
    assert findings[0].remedy
    assert path.read_text() == "{"


def test_other_damage_is_still_repaired(tracker: Tracker, file: Path, scratch: Path) -> None:
    torn(file)
    index = scratch / ".jit/index.json"
    index.write_text(json.dumps({"all_ids": [BASE, BROKEN, WAITING, "nothing"]}))
    shutil.copy(file, file.with_name("copy.json"))

    assert sorted(kinds(tracker)) == ["missing", "unlisted", "unreadable", "unreadable"]
    assert {each.code for each in repair(tracker)} == {"unreadable"}
    assert json.loads(index.read_text())["all_ids"] == [BASE, BROKEN, WAITING, FREE]


# --- Unfinished commits -----------------------------------------------------------------------------


def leave_unfinished_commit(tracker: Tracker, scratch: Path) -> None:
    """Leave the intent of a process that decided to change two issues and then died."""
    store = tracker.store
    assert isinstance(store, FileStore)
    steps = []
    for issue_id in (BASE, FREE):
        path = scratch / f".jit/issues/{issue_id}.json"
        content = path.read_text().replace('"priority": "normal"', '"priority": "high"')
        version = tracker.document(issue_id).version
        steps.append(Step(f"jit/issues/{issue_id}", "put", content, before=version))
    with OpenDirectories(store._directories) as opened:
        store._intents.publish(Intent(DEAD, tuple(steps)), opened)


def test_a_commit_whose_writer_died_is_found_and_finished(tracker: Tracker, scratch: Path) -> None:
    leave_unfinished_commit(tracker, scratch)

    [found] = examine(tracker)
    assert (found.code, found.fixable) == ("commit unfinished", True)
    assert DEAD in found.message
    assert "validate --fix" in found.remedy
    assert repair(tracker) == []
    assert '"priority": "high"' in (scratch / f".jit/issues/{FREE}.json").read_text()


def test_a_commit_that_conflicts_with_another_program_blocks_nothing(tracker: Tracker, scratch: Path) -> None:
    leave_unfinished_commit(tracker, scratch)
    path = scratch / f".jit/issues/{FREE}.json"
    changed = path.read_text().replace('"title": "free"', '"title": "by hand"')
    path.write_text(changed)

    assert [each.code for each in examine(tracker)] == ["commit unfinished"]
    assert tracker.claims.take_next(tracker.claims.request()).issue.priority is Priority.HIGH
    assert tracker.issue(FREE).title == "by hand"
    assert examine(tracker) == []


def test_a_commit_already_marked_as_done_blocks_nothing(tracker: Tracker, scratch: Path) -> None:
    leave_unfinished_commit(tracker, scratch)
    repair(tracker)
    leave_unfinished_commit(tracker, scratch)
    directory = scratch / ".holdfast/intents"
    (directory / f"{DEAD}.json").rename(directory / f"{DEAD}.done")
    tracker.update(FREE, Update(title="later"))

    assert examine(tracker) == []
