"""The on-disk format: the exact bytes of the specification, and files written by other programs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Corrupt
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import GateStatus, Issue, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.locks.file_lock import FileLocker
from holdfast.store.files import FileStore
from proof.interpose import Attempt, interposed
from tests.issues.trackers import create_issues, events_of, problems, tracker_at
from tests.locks.workers import Line, Workers, wait_until

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
INSTANT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


@pytest.fixture
def tracker(scratch: Path) -> Tracker:
    tracker = tracker_at(scratch)
    tracker.initialise()
    return tracker


def written(path: Path) -> Any:
    return json.loads(path.read_bytes())


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))


@pytest.mark.req("FL-07")
def test_an_empty_tracker_has_exactly_these_bytes(tracker: Tracker, scratch: Path) -> None:
    assert (scratch / ".jit/index.json").read_bytes() == (
        b'{\n  "schema_version": 2,\n  "all_ids": [],\n  "deleted_ids": []\n}\n'
    )
    assert (scratch / ".jit/gates.json").read_bytes() == b'{\n  "gates": {}\n}\n'


@pytest.mark.req("FL-07")
def test_an_issue_file_has_exactly_these_bytes(tracker: Tracker, scratch: Path) -> None:
    tracker.gates.define(Definition("review"))
    [on] = create_issues(tracker, "other")
    new = NewIssue(title="Ünïcode", depends_on=(on,), gates=("review",), labels=("a",), context={"k": "v"})
    issue = tracker.create(new)
    content = (scratch / f".jit/issues/{issue.id}.json").read_text()

    instant = issue.created_at
    assert re.fullmatch(INSTANT, instant)
    assert re.fullmatch(UUID, issue.id)
    assert content == (
        f'{{\n  "id": "{issue.id}",\n  "title": "Ünïcode",\n  "description": "",\n  "state": "backlog",\n'
        f'  "priority": "normal",\n  "assignee": null,\n  "dependencies": [\n    "{on}"\n  ],\n'
        '  "gates_required": [\n    "review"\n  ],\n  "gates_status": {\n    "review": {\n'
        '      "status": "pending",\n      "updated_by": null,\n'
        f'      "updated_at": "{instant}"\n    }}\n  }},\n'
        '  "context": {\n    "k": "v"\n  },\n  "documents": [],\n  "labels": [\n    "a"\n  ],\n'
        f'  "created_at": "{instant}",\n  "updated_at": "{instant}"\n}}\n'
    )


@pytest.mark.req("FL-07")
def test_gates_index_and_events_have_the_specified_shape(tracker: Tracker, scratch: Path) -> None:
    tracker.gates.define(Definition("tests", "All tests", "they pass", command="make test", timeout=60.0))
    a, b = create_issues(tracker, "a", "b")
    tracker.dependencies.add(a, b)
    tracker.delete(b)

    assert written(scratch / ".jit/gates.json")["gates"]["tests"] == {
        "version": 1,
        "key": "tests",
        "title": "All tests",
        "description": "they pass",
        "stage": "postcheck",
        "mode": "auto",
        "checker": {
            "type": "exec",
            "command": "make test",
            "timeout_seconds": 60,
            "working_dir": None,
            "env": {},
        },
        "priority": 100,
        "reserved": {},
        "auto": True,
        "example_integration": None,
    }
    assert written(scratch / ".jit/index.json") == {"schema_version": 2, "all_ids": [a], "deleted_ids": [b]}
    lines = (scratch / ".jit/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert all(list(event)[:4] == ["type", "id", "issue_id", "timestamp"] for event in events)
    assert all(re.fullmatch(UUID, event["id"]) and re.fullmatch(INSTANT, event["timestamp"]) for event in events)
    assert len({event["id"] for event in events}) == len(events)
    assert events[-2] == {**events[-2], "type": "issue_deleted", "issue_id": b, "title": "b"}


@pytest.mark.req("FL-05", "FL-07")
def test_the_lock_files_are_those_of_the_specification(tracker: Tracker, scratch: Path) -> None:
    tracker.gates.define(Definition("tests"))
    [a] = create_issues(tracker, "a")
    tracker.claims.claim(a, tracker.claims.request())
    locks = {path.relative_to(scratch / ".jit").as_posix() for path in (scratch / ".jit").rglob("*.lock")}

    assert locks == {".index.lock", ".gates.lock", ".events.lock", f"issues/{a}.lock"}
    assert all((scratch / ".jit" / name).stat().st_size == 0 for name in locks)


# --- Files of other programs ------------------------------------------------------------------------

FOREIGN: dict[str, Any] = {
    "id": "11111111-1111-4111-8111-111111111111",
    "title": "by another program",
    "description": "d",
    "state": "in_progress",
    "priority": "critical",
    "assignee": "agent:copilot",
    "dependencies": [],
    "gates_required": ["fmt"],
    "gates_status": {
        "fmt": {"status": "passed", "updated_by": None, "updated_at": "2025-01-01T00:00:00Z", "note": "x"}
    },
    "context": {"k": "v"},
    "documents": [{"path": "docs/a.md", "commit": None, "assets": [1, 2.5, {"deep": None}]}],
    "labels": ["type:task"],
    "content_format": "markdown",
    "big": 123456789012345678901234567890,
    "created_at": "2025-01-01T00:00:00.123456789Z",
    "updated_at": "2025-01-01T00:00:00Z",
}


@pytest.fixture
def foreign(scratch: Path) -> Tracker:
    """A directory written by another program: no deleted ids, older states, extra files."""
    older = {
        "id": "old",
        "title": "t",
        "description": None,
        "state": "open",
        "priority": "low",
        "labels": None,
    }
    waiting = {**FOREIGN, "id": "waiting", "state": "ready", "dependencies": ["old"], "gates_required": []}
    write(
        scratch / ".jit/index.json",
        {"schema_version": 1, "all_ids": [FOREIGN["id"], "old", "waiting"], "extra": {"kept": True}},
    )
    for issue in (FOREIGN, older, waiting):
        write(scratch / f".jit/issues/{issue['id']}.json", issue)
    gate = {"version": 1, "key": "fmt", "title": "F", "mode": "auto", "unknown": [1]}
    write(scratch / ".jit/gates.json", {"gates": {"fmt": gate}, "presets": {}})
    (scratch / ".jit/events.jsonl").write_text('{"type":"something_new","x":1}\n{"type":"issue_created"}\n')
    (scratch / ".jit/config.toml").write_text("[x]\n")
    (scratch / ".jit/issues/notes.txt").write_text("not an issue")
    return tracker_at(scratch)


def test_a_directory_of_another_program_can_be_read(foreign: Tracker) -> None:
    snapshot = foreign.snapshot()

    assert [snapshot.state(issue).value for issue in snapshot] == ["in_progress", "ready", "backlog"]
    assert [gate.mode for gate in foreign.gates.all().values()] == ["auto"]
    assert [entry.record.type for entry in foreign.events()] == ["something_new", "issue_created"]
    assert foreign.dependents_of("old") == ("waiting",)


def test_unknown_fields_and_files_survive(foreign: Tracker, scratch: Path) -> None:
    foreign.update(FOREIGN["id"], Update(title="changed", context={"n": "1"}))
    foreign.gates.define(Definition("more"))
    foreign.update("old", Update(state=State.DONE))
    create_issues(foreign, "new")

    changed = written(scratch / f".jit/issues/{FOREIGN['id']}.json")
    assert changed.pop("updated_at") != FOREIGN["updated_at"]
    assert changed == {
        **{name: value for name, value in FOREIGN.items() if name != "updated_at"},
        "title": "changed",
        "context": {"k": "v", "n": "1"},
    }
    assert written(scratch / ".jit/gates.json")["presets"] == {}
    assert written(scratch / ".jit/gates.json")["gates"]["fmt"]["unknown"] == [1]
    index = written(scratch / ".jit/index.json")
    assert (index["schema_version"], index["extra"]) == (1, {"kept": True})
    assert (scratch / ".jit/config.toml").read_text() == "[x]\n"
    assert (scratch / ".jit/issues/notes.txt").read_text() == "not an issue"
    lines = (scratch / ".jit/events.jsonl").read_text().splitlines()
    assert lines[:2] == ['{"type":"something_new","x":1}', '{"type":"issue_created"}']
    assert foreign.issue("waiting").state is State.READY


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"id": "x"}',
        b'{"id": "x", "title": "t", "title": "u"}',
        b'{"id": "x", "title": "t", "n": NaN}',
        b'{"id": "x", "title": "t", "n": "\\ud800"}',
        b'{"id": "x", "title": "t", "state": "paused"}',
        b'{"id": "x", "title": 7}',
    ],
)
def test_an_unreadable_issue_is_reported_and_never_silently_skipped(
    tracker: Tracker, scratch: Path, content: bytes
) -> None:
    a, b = create_issues(tracker, "a", "b")
    tracker.dependencies.add(a, b)
    (scratch / f".jit/issues/{b}.json").write_bytes(content)

    assert [each.issue_id for each in tracker.snapshot().broken] == [b]
    for act in (
        lambda: tracker.issue(b),
        lambda: tracker.update(b, Update(title="x")),
        lambda: tracker.dependencies.add(b, a),
    ):
        with pytest.raises(Corrupt, match=b):
            act()
    assert (scratch / f".jit/issues/{b}.json").read_bytes() == content
    assert any(each.startswith("unreadable") for each in problems(tracker))


def dangling(root: Path) -> list[str]:
    """Names in the files that lead nowhere, for a program that knows only the files."""
    issues = [json.loads(path.read_text()) for path in root.glob(".jit/issues/*.json")]
    named = [on for issue in issues for on in issue["dependencies"]] + written(root / ".jit/index.json")["all_ids"]
    return [each for each in named if not (root / f".jit/issues/{each}.json").exists()]


@pytest.mark.parametrize("operation", ["break down", "import", "delete"])
def test_other_programs_never_see_an_issue_that_names_missing_ones(scratch: Path, operation: str) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    whole = Issue(id="zzzz", title="whole")
    parts = [NewIssue(title=f"part {number}") for number in range(12)]
    chain = [Issue(id=f"i{n:02}", title="link", dependencies=(f"i{n - 1:02}",) if n else ()) for n in range(12)]
    if operation != "import":
        tracker.adopt([whole])
    if operation == "delete":
        tracker.break_down("zzzz", parts)
    looks = []

    def look(attempt: Attempt) -> object:
        result = attempt.perform()
        looks.append(dangling(scratch))
        return result

    with interposed(look, ("link", "replace", "unlink")):
        if operation == "break down":
            tracker.break_down("zzzz", parts)
        elif operation == "import":
            tracker.adopt(chain[::-1])
        else:
            tracker.delete(tracker.issue("zzzz").dependencies[0])
    assert len(looks) > 3
    assert not any(looks), f"an issue named {next(filter(None, looks))}"


# --- Events -----------------------------------------------------------------------------------------


@pytest.mark.req("FL-12")
def test_a_torn_last_line_is_cut_off_before_the_next_event(tracker: Tracker, scratch: Path) -> None:
    create_issues(tracker, "a")
    path = scratch / ".jit/events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"issue_cr')
    assert events_of(tracker) == {"issue_created": 1}
    create_issues(tracker, "b")

    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[0] == whole
    assert len(lines) == 2
    assert all(json.loads(line) for line in lines)


@pytest.mark.req("FL-12")
def test_a_line_that_is_not_an_event_is_listed_as_unreadable(tracker: Tracker, scratch: Path) -> None:
    create_issues(tracker, "a")
    with (scratch / ".jit/events.jsonl").open("ab") as file:
        file.write(b"not json\n")
    create_issues(tracker, "b")

    types = [entry.record.type for entry in tracker.events()]
    assert types == ["issue_created", "unreadable", "issue_created"]
    assert [each.partition(":")[0] for each in problems(tracker)] == ["event "]


# --- Locks ------------------------------------------------------------------------------------------


def update_in_a_process(workers: Workers, directory: Path, issue_id: str) -> Any:
    def work(line: Line) -> None:
        tracker_at(directory).update(issue_id, Update(increments={"n": 1}))
        line.say("done")

    return workers.start(work)


@pytest.mark.req("FL-08", "FL-20")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the holders of a lock")
def test_updates_of_different_issues_run_concurrently(tracker: Tracker, scratch: Path) -> None:
    from holdfast.cli.lock import file_lock_state

    a, b = create_issues(tracker, "a", "b")
    lock = scratch / f".jit/issues/{a}.lock"
    with Workers() as workers:
        with FileLocker(5.0).lock_exclusive(lock):  # another program is busy with one issue
            waiting = update_in_a_process(workers, scratch, a)
            wait_until(lambda: file_lock_state(str(lock)).waiting)
            state = file_lock_state(str(lock))
            assert ([each.pid for each in state.holders], [each.pid for each in state.waiting]) == (
                [os.getpid()],
                [waiting.pid],
            )
            assert update_in_a_process(workers, scratch, b).hear() == "done"
            assert tracker.issue(a).context == {}
            assert len(tracker.snapshot()) == 2  # readers never block
        assert waiting.hear() == "done"
    assert tracker.issue(a).context == {"n": "1"}


@pytest.mark.req("FL-20")
def test_a_store_counts_its_locks(scratch: Path) -> None:
    store = FileStore(scratch)
    tracker = Tracker(store, actor="agent:x")
    tracker.initialise()
    before = store.lock_statistics()
    create_issues(tracker, "a")
    after = store.lock_statistics()

    assert after.acquired - before.acquired == 4  # index, the issue, and events twice: could we have it, and to write
    assert (after.contended, after.held_now) == (0, 0)
    assert after.seconds_held > before.seconds_held
    assert {Path(path).name for path in store.lock_files(".jit")} > {".index.lock", ".events.lock"}


@pytest.mark.req("FL-06")
def test_every_operation_takes_its_locks_in_the_global_order(
    tracker: Tracker, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the events is taken twice: to see that it can be had, and to write."""
    taken: list[str] = []
    orders: list[list[str]] = []
    take = FileLocker.acquire

    def acquire(self: FileLocker, path: Any, **options: Any) -> Any:
        name = os.path.relpath(path, scratch / ".jit")
        taken.append(name)
        if taken[-2:] == [".events.lock"] * 2:
            orders.append(list(taken))
            taken.clear()
        return take(self, path, **options)

    monkeypatch.setattr(FileLocker, "acquire", acquire)
    tracker.gates.define(Definition("g"))
    ids = create_issues(tracker, "a", "b", "c", "d")
    for on in ids[1:]:
        tracker.dependencies.add(ids[0], on)
    tracker.gates.require(ids[1], ["g"])
    tracker.update(ids[1], Update(state=State.DONE))
    tracker.gates.judge(ids[1], "g", GateStatus.PASSED)
    tracker.delete(ids[2])
    tracker.claims.claim(ids[3], tracker.claims.request())

    rank = {".index.lock": "0", ".gates.lock": "1", ".events.lock": "3"}
    assert len(orders) == 10
    for order in orders:
        assert order == sorted(order, key=lambda name: rank.get(name, "2" + name))
