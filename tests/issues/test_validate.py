"""Damage is found, and repaired if there is only one way to repair it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import AlreadyExists, DependencyCycle, NotFound, UsageFailure
from holdfast.issues.creating import NewIssue
from holdfast.issues.exchange import exported, import_text, read_batch
from holdfast.issues.gates import Definition
from holdfast.issues.graph import find_path, in_order, reachable
from holdfast.issues.model import GATES, Issue, Priority, State
from holdfast.issues.tracker import Query, Tracker, Update, find
from holdfast.issues.validate import examine, repair
from holdfast.store.files import FileStore
from tests.issues.trackers import create_issues, problems, tracker_on

A, B, C = "aaaa", "bbbb", "cccc"


@pytest.fixture
def tracker(scratch: Path, clock: ManualClock) -> Tracker:
    """a -> b -> c, in files."""
    tracker = tracker_on(FileStore(scratch, clock=clock), clock=clock)
    tracker.initialise()
    tracker.adopt(
        [
            Issue(id=A, title="a", dependencies=(B,)),
            Issue(id=B, title="b", dependencies=(C,)),
            Issue(id=C, title="c"),
        ]
    )
    return tracker


def edit_json(path: Path, **fields: Any) -> None:
    """Change fields of a file, as a program unaware of Holdfast would."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def issue_file(jit: Path, issue_id: str) -> Path:
    return jit / f"issues/{issue_id}.json"


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an index that lost an entry": (
        "unlisted",
        lambda jit: edit_json(jit / "index.json", all_ids=[A, C]),
    ),
    "an index with a name for nothing": (
        "missing",
        lambda jit: edit_json(jit / "index.json", all_ids=[A, B, C, "dddd"]),
    ),
    "an index with a name twice": ("index", lambda jit: edit_json(jit / "index.json", all_ids=[A, B, C, A])),
    "a dependency on nothing": (
        "dangling",
        lambda jit: edit_json(issue_file(jit, A), dependencies=[B, "gone"]),
    ),
    "a dependency on what cannot be": (
        "dangling",
        lambda jit: edit_json(issue_file(jit, A), dependencies=[B, "no/such name"]),
    ),
    "a state that does not follow": ("state", lambda jit: edit_json(issue_file(jit, B), state="ready")),
    "an edge without its reverse": ("dependents", lambda jit: (jit / f"dependents/{B}.json").unlink()),
    "no graph at all": ("dependents", lambda jit: (jit / "graph.json").unlink()),
    "an issue that was removed by hand": ("dangling", lambda jit: issue_file(jit, B).unlink()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repaired(tracker: Tracker, scratch: Path, name: str) -> None:
    kind, damage = DAMAGE[name]
    assert problems(tracker) == []
    damage(scratch / ".jit")

    assert kind in {finding.code for finding in examine(tracker)}
    assert repair(tracker) == []
    assert problems(tracker) == []


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("circle", lambda jit: edit_json(issue_file(jit, C), dependencies=[A])),
        ("unreadable", lambda jit: issue_file(jit, C).write_text("{")),
        ("gate", lambda jit: edit_json(issue_file(jit, C), gates_required=["nothing"])),
        ("done too early", lambda jit: edit_json(issue_file(jit, A), state="done")),
    ],
)
def test_damage_that_needs_a_decision_is_found_and_not_repaired(
    tracker: Tracker, scratch: Path, kind: str, damage: Callable[[Path], object]
) -> None:
    damage(scratch / ".jit")

    found = [finding for finding in examine(tracker) if finding.code == kind]
    assert found
    assert not any(finding.fixable for finding in found)
    if kind == "circle":
        assert found[0].message in "aaaa -> bbbb -> cccc -> aaaa -> bbbb -> cccc"


def test_an_abandoned_issue_becomes_ready_again(tracker: Tracker, clock: ManualClock) -> None:
    tracker.claims.claim(C, tracker.claims.request(ttl=10))
    clock.advance(10)

    assert [finding.code for finding in examine(tracker)] == ["abandoned"]
    assert repair(tracker) == []
    assert tracker.issue(C).state is State.READY


# --- Export and import ------------------------------------------------------------------------------


def test_an_export_can_be_imported_into_another_tracker(tracker: Tracker, tmp_path: Path) -> None:
    tracker.gates.define(Definition("review"))
    tracker.gates.require(C, ["review"])
    tracker.update(B, Update(context={"k": "ü"}))
    gates = tracker.store.read(GATES)
    text = json.dumps(exported(tracker.snapshot(), gates.record if gates else None)).encode()
    other = tracker_on(FileStore(tmp_path / "other"))
    other.initialise()

    imported = import_text(other, text, "the export")
    assert (len(imported.issues), imported.gates) == (3, ["review"])
    assert {issue.id: issue.dependencies for issue in other.snapshot()} == {A: (B,), B: (C,), C: ()}
    assert other.issue(B).context == {"k": "ü"}
    assert problems(other) == []
    with pytest.raises(AlreadyExists):
        import_text(other, text, "the export")


def test_an_import_that_would_close_a_cycle_is_refused(tracker: Tracker, scratch: Path) -> None:
    edit_json(issue_file(scratch / ".jit", C), dependencies=["dddd"])  # dangling, from another program

    with pytest.raises(DependencyCycle):
        tracker.adopt([Issue(id="dddd", title="d", dependencies=(A,))])
    with pytest.raises(NotFound):
        tracker.adopt([Issue(id="eeee", title="e", dependencies=("nothing",))])
    with pytest.raises(UsageFailure):
        tracker.adopt([Issue(id="eeee", title="e"), Issue(id="eeee", title="e")])


def test_more_issues_than_fit_into_one_transaction_can_be_imported(tracker: Tracker) -> None:
    many = [Issue(id=f"i{n:04d}", title=str(n), dependencies=(f"i{n + 1:04d}",) if n < 599 else ()) for n in range(600)]
    tracker.adopt(many)

    assert [issue.title for issue in tracker.snapshot().ready()] == ["c", "599"]
    assert problems(tracker) == []


def test_issues_can_be_imported_as_json_lines(tracker: Tracker) -> None:
    lines = b'{"id":"x1","title":"1"}\n\n{"id":"x2","title":"2","dependencies":["x1"]}\n'

    assert [issue.id for issue in import_text(tracker, lines, "lines").issues] == ["x1", "x2"]
    for text in (b"", b"{", b'{"id":"x"}', b"[7]", b'{"issues":[],"gates":[1]}', b'{"id":"a"}\n{'):
        with pytest.raises(UsageFailure):
            import_text(tracker, text, "it")


def test_a_malformed_batch_is_refused() -> None:
    assert read_batch(b'[{"title":"a","priority":"high"}]', "it") == [NewIssue(title="a", priority=Priority.HIGH)]
    for text in (b'[{"titel":"a"}]', b'[{"title":"a","priority":"urgent"}]', b'["a"]', b"nonsense"):
        with pytest.raises(UsageFailure):
            read_batch(text, "it")


# --- Queries ----------------------------------------------------------------------------------------


def test_an_issue_must_match_every_part_of_a_query(tracker: Tracker) -> None:
    tracker.update(C, Update(title="Write the Parser", add_labels=("area:x",), assignee="human:bob"))
    snapshot = tracker.snapshot()

    def ids(**wanted: Any) -> list[str]:
        return [issue.id for issue in find(snapshot, Query(**wanted))]

    assert ids(words=("parser", "WRITE")) == ids(labels=("area:*",)) == ids(assignee="human:bob") == [C]
    assert ids(states=(State.BACKLOG,)) == ids(priorities=(Priority.NORMAL,), states=(State.BACKLOG,)) == [A, B]
    assert ids(words=("parser",), labels=("other",)) == []
    assert len(ids()) == 3


def test_a_word_matches_only_the_beginning_of_an_id(tracker: Tracker) -> None:
    issue = tracker.create(NewIssue(title="~"))
    snapshot = tracker.snapshot()

    assert [each.id for each in find(snapshot, Query(words=(issue.id[:8],)))] == [issue.id]
    assert list(find(snapshot, Query(words=(issue.id[1:9],)))) == []


# --- Graphs -----------------------------------------------------------------------------------------


def test_paths_topological_order_and_cycles() -> None:
    graph = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": [], "x": ["y"], "y": ["x"], "z": ["x", "a"]}
    edges = graph.__getitem__

    assert find_path(edges, "a", "d") == ["a", "b", "d"]
    assert find_path(edges, "d", "a") is None
    assert reachable(edges, ["b"]) == {"b", "d"}
    order, cycles = in_order(graph)
    assert order.index("d") < order.index("b") < order.index("a")
    assert cycles == [["x", "y", "x"]]


def test_a_long_chain_does_not_overflow_the_stack() -> None:
    chain = {str(n): [str(n + 1)] if n < 50_000 else [] for n in range(50_001)}

    assert in_order(chain)[0][0] == "50000"
    path = find_path(chain.__getitem__, "0", "50000")
    assert path is not None
    assert len(path) == 50_001


def test_issues_are_listed_in_order_of_creation(tracker: Tracker) -> None:
    ids = create_issues(tracker, "x", "y", "z")

    assert [issue.id for issue in tracker.snapshot()] == [A, B, C, *ids]
