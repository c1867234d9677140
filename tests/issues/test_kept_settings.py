"""What other programs and people set on the files of a tracker survives every change by Holdfast."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.fs import calls
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import GateStatus, State
from holdfast.issues.tracker import Tracker, Update
from tests.issues.trackers import claim_id_of, create_issues, events_of, problems, tracker_at

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes and owners")


@pytest.fixture
def tracker(scratch: Path) -> Tracker:
    tracker = tracker_at(scratch)
    tracker.initialise()
    return tracker


# --- Modes and owners -------------------------------------------------------------------------------


def change_every_document(tracker: Tracker, issue_id: str, *, by: str) -> None:
    """Change the gates, the issue, its dependents and the index; and the claim, alone."""
    tracker.gates.define(Definition(by))
    tracker.update(issue_id, Update(title=f"changed by {by}"))
    tracker.create(NewIssue(title="new", depends_on=(issue_id,)))
    claimed = tracker.claims.claim(issue_id, tracker.claims.request())
    tracker.claims.renew(claim_id_of(claimed))
    tracker.claims.release(issue_id, claim_id_of(claimed))


def documents(scratch: Path) -> list[Path]:
    return sorted(path for path in (scratch / ".jit").rglob("*.json*") if path.is_file())


@posix
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640])
def test_the_modes_of_all_files_survive_a_change(tracker: Tracker, scratch: Path, mode: int) -> None:
    [issue_id] = create_issues(tracker, "a")
    change_every_document(tracker, issue_id, by="one")  # so that every kind of file exists
    before = {path: path.read_bytes() for path in documents(scratch)}
    for path in before:
        path.chmod(mode)
    change_every_document(tracker, issue_id, by="two")

    unchanged = {path.name for path, content in before.items() if path.read_bytes() == content}
    assert not unchanged & {"index.json", "gates.json", f"{issue_id}.json", "events.jsonl"}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in before} == dict.fromkeys(before, mode)


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_the_owners_of_all_files_survive_a_change(tracker: Tracker, scratch: Path) -> None:
    [issue_id] = create_issues(tracker, "a")
    before = documents(scratch)
    for path in before:
        calls.chown(path, 4321, 8765)
    change_every_document(tracker, issue_id, by="root")

    assert {(path.stat().st_uid, path.stat().st_gid) for path in before} == {(4321, 8765)}


@posix
def test_the_draft_of_a_private_file_is_never_open_to_others(
    tracker: Tracker, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [issue_id] = create_issues(tracker, "a")
    (scratch / f".jit/issues/{issue_id}.json").chmod(0o600)
    opened: list[int] = []
    real = calls.open

    def open_recorded(path: Any, flags: int, mode: int = 0o777, **where: Any) -> int:
        if flags & os.O_CREAT and f".{issue_id}.json-" in str(path):
            opened.append(mode)
        return real(path, flags, mode, **where)

    monkeypatch.setattr(calls, "open", open_recorded)
    tracker.update(issue_id, Update(title="changed"))

    assert opened == [0o600]


# --- Gates ------------------------------------------------------------------------------------------

SHAPES: dict[str, Any] = {
    "alone": {"status": "passed"},
    "null": {"status": "passed", "updated_at": None},
    "more": {"status": "failed", "by": ["x"], "updated_at": 7},
    "text": "passed",
    "nothing": None,
}


def written(scratch: Path, issue_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scratch / f".jit/issues/{issue_id}.json").read_bytes())
    return found


def test_gates_of_another_program_keep_their_shape(tracker: Tracker, scratch: Path) -> None:
    [issue_id] = create_issues(tracker, "a")
    path = scratch / f".jit/issues/{issue_id}.json"
    path.write_text(json.dumps({**written(scratch, issue_id), "gates_required": [*SHAPES], "gates_status": SHAPES}))
    tracker.update(issue_id, Update(title="changed"))

    assert written(scratch, issue_id)["gates_status"] == SHAPES
    assert tracker.issue(issue_id).open_gates() == ["more", "nothing"]


def test_deciding_a_gate_of_another_program_changes_only_that_gate(tracker: Tracker, scratch: Path) -> None:
    for gate in SHAPES:
        tracker.gates.define(Definition(gate))
    [issue_id] = create_issues(tracker, "a")
    path = scratch / f".jit/issues/{issue_id}.json"
    path.write_text(json.dumps({**written(scratch, issue_id), "gates_required": [*SHAPES], "gates_status": SHAPES}))
    tracker.gates.judge(issue_id, "text", GateStatus.FAILED)
    tracker.gates.judge(issue_id, "more", GateStatus.PASSED)
    tracker.gates.judge(issue_id, "nothing", GateStatus.PASSED)

    found = written(scratch, issue_id)["gates_status"]
    assert found["text"] == "failed"
    assert found["more"] == {**SHAPES["more"], **found["more"], "status": "passed", "by": ["x"]}
    assert found["nothing"]["status"] == "passed"
    assert {gate: found[gate] for gate in ("alone", "null")} == {gate: SHAPES[gate] for gate in ("alone", "null")}
    tracker.gates.judge(issue_id, "text", GateStatus.PASSED)
    assert tracker.update(issue_id, Update(state=State.DONE)).state is State.DONE


# --- Events -----------------------------------------------------------------------------------------

UNENDED = b'{"type":"by_another_program","id":"1","issue_id":"","timestamp":""}'


@pytest.mark.req("FL-12")
def test_a_whole_last_event_without_a_newline_is_kept(tracker: Tracker, scratch: Path) -> None:
    path = scratch / ".jit/events.jsonl"
    for round_ in range(2):  # a commit of several documents, then of the claim and the event alone
        whole = path.read_bytes() if path.exists() else b""
        path.write_bytes(whole + UNENDED)
        [issue_id] = create_issues(tracker, f"issue {round_}")
        assert path.read_bytes().startswith(whole + UNENDED + b"\n")
        assert all(json.loads(line) for line in path.read_bytes().splitlines())
        assert tracker.issue(issue_id)

    assert events_of(tracker) == {"by_another_program": 2, "issue_created": 2}
    assert problems(tracker) == []


@pytest.mark.req("FL-12")
@pytest.mark.parametrize("torn", [UNENDED[:-1], b'{"a":1,"a":2}', b"{", b"12", b'"text"', b"{}{}"])
def test_a_last_line_that_is_not_a_whole_record_is_still_cut_off(tracker: Tracker, scratch: Path, torn: bytes) -> None:
    create_issues(tracker, "a")
    path = scratch / ".jit/events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    create_issues(tracker, "b")

    lines = path.read_bytes().splitlines(keepends=True)
    assert (lines[0], len(lines)) == (whole, 2)
