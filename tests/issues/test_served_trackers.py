"""Trackers on servers: no document grows with the number of issues, so no operation on one issue costs more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import format_instant
from holdfast.issues.claims import Claimed
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import DEPENDENTS, GRAPH, INDEX, ISSUES, UNLISTED, Index, Issue, State, Unlisted
from holdfast.issues.tracker import Tracker
from holdfast.issues.validate import rewrite_dependents
from holdfast.locks.retry import CHANCE
from holdfast.repository.migration import migrate
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Create, Decision, Document, Family, Record, Replace, Store
from holdfast.store.open import open_address
from holdfast.store.served import Attempt, CommitPlan, ServedStore
from tests.issues.trackers import claim_id_of, create_issues, events_of, problems, tracker_on

FEW, MANY = 10, 5_000


@pytest.fixture(params=["postgres_url", "etcd_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def served(url: str, tmp_path: Path) -> Iterator[ServedStore]:
    store = open_address(tmp_path, url)
    assert isinstance(store, ServedStore)
    with store:
        yield store


@pytest.fixture
def other(served: ServedStore, url: str, tmp_path: Path) -> Iterator[ServedStore]:
    """Another client of the same store."""
    store = open_address(tmp_path, url)
    assert isinstance(store, ServedStore)
    with store:
        yield store


def plant(store: Store, start: int, end: int) -> None:
    """Write issues directly, as fast as the store can."""
    for first in range(start, end, 50):
        made = [
            Issue(id=f"n{each:06d}", title=f"Number {each}", state=State.READY, created_at=format_instant(1.7e9 + each))
            for each in range(first, min(end, first + 50))
        ]
        commit(store, *(Create(ISSUES.key(each.id), each) for each in made))


def commit(store: Store, *changes: Create | Replace) -> None:
    store.transact([each.key for each in changes], lambda view, now: Decision(changes, None))


class Cost:
    """Counts the requests of a store, and the bytes of documents and records that they carry."""

    def __init__(self, store: ServedStore) -> None:
        self.requests = self.received = self.sent = 0
        self._engine: Any = store.engine

    @contextlib.contextmanager
    def counted(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        engine = self._engine
        fetch, page, attempt = engine.fetch, engine.page, engine.attempt

        def receive(contents: Any) -> None:
            self.requests += 1
            self.received += sum(len(each.content or b"") for each in contents)

        def counting_fetch(named: Any) -> Any:
            fetched = fetch(named)
            receive(fetched.found.values())
            return fetched

        def counting_page(family: str, after: str, limit: int) -> Any:
            found = page(family, after, limit)
            receive(value for _, value in found)
            return found

        @contextlib.contextmanager
        def counting_attempt(named: Any, *, in_turn: bool) -> Iterator[Attempt]:
            def commit(plan: Any) -> bool:
                self.requests += 1
                self.sent += sum(len(each or b"") for each in plan.puts.values())
                self.sent += sum(len(each.content) for each in plan.additions)
                return bool(made.commit(plan))

            with attempt(named, in_turn=in_turn) as made:
                receive(made.fetched.found.values())
                yield Attempt(made.fetched, commit)

        with patch.context() as patched:
            patched.setattr(engine, "fetch", counting_fetch)
            patched.setattr(engine, "page", counting_page)
            patched.setattr(engine, "attempt", counting_attempt)
            yield


@contextlib.contextmanager
def before_request(store: ServedStore, number: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """Act before a request of this store, by its number. Yields the requests, which it counts until then."""
    engine: Any = store.engine
    asked: list[str] = []

    def interrupted(name: str) -> Any:
        original = getattr(engine, name)

        def ask(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            if len(asked) == number:
                act()
            return original(*arguments, **options)

        return ask

    def attempt(*arguments: Any, **options: Any) -> Any:
        @contextlib.contextmanager
        def attempted() -> Iterator[Attempt]:
            with fetching(*arguments, **options) as made:
                yield Attempt(made.fetched, lambda plan: committing(made, plan))

        return attempted()

    def committing(made: Attempt, plan: CommitPlan) -> bool:
        asked.append("commit")
        if len(asked) == number:
            act()
        return made.commit(plan)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fetch", "attempt", "page", "page_of_stream", "loose_records"):
            patch.setattr(engine, name, interrupted(name))
        fetching = engine.attempt
        patch.setattr(engine, "attempt", attempt)
        yield asked


def test_claims_of_different_issues_do_not_meet(served: ServedStore, other: ServedStore) -> None:
    mine, yours = tracker_on(served), tracker_on(other, "agent:other")
    mine.initialise()
    first, *issues = create_issues(mine, *map(str, range(30)))
    for number, issue in enumerate(issues, start=1):
        with before_request(served, number, lambda issue=issue: claim(yours, issue)) as asked:  # type: ignore[misc]
            mine.claims.release(first, claim_id_of(claim(mine, first)))
        if len(asked) < number:  # every moment had its turn
            break
    assert 5 < number < 30
    assert served.statistics().conflicts == other.statistics().conflicts == 0
    assert events_of(mine)["issue_claimed"] == 2 * number - 1


def claim(tracker: Tracker, issue_id: str) -> Claimed:
    return tracker.claims.claim(issue_id, tracker.claims.request(ttl=60))


def test_a_repair_of_the_dependents_includes_issues_that_are_created_meanwhile(
    served: ServedStore, other: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of dependents is complete, and says so, whenever an issue is created during its repair."""
    mine, yours = tracker_on(served), tracker_on(other)
    mine.initialise()
    (base,) = create_issues(mine, "base")
    first = mine.create(NewIssue(title="first", depends_on=(base,)))
    monkeypatch.setattr(CHANCE, "randrange", lambda limit: limit - 1)  # no commit seals
    new, number, requests = NewIssue(title="second", depends_on=(base,)), 0, 1
    while number < requests:
        number += 1
        made: list[str] = []
        with before_request(served, number, lambda made=made: made.append(yours.create(new).id)) as asked:  # type: ignore[misc]
            mine.transactions.retrying(lambda: rewrite_dependents(mine))
        requests = len(asked)
        record, graph = served.read(DEPENDENTS.key(base)), served.read(GRAPH)
        assert record is not None
        assert graph is not None
        assert graph.record.dependents_complete
        assert {*record.record.dependents} == {first.id, *made}, number
        assert problems(mine) == []
        for each in made:
            yours.delete(each)
    assert number > 10


def costs(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int, int]]:
    """The requests, and the bytes received and sent, of some operations on one issue."""
    store = tracker.store
    assert isinstance(store, ServedStore)
    found: dict[str, tuple[int, int, int]] = {}

    def measure(name: str, operation: Any) -> Any:
        cost = Cost(store)
        with cost.counted(monkeypatch):
            result = operation()
        found[name] = cost.requests, cost.received, cost.sent
        return result

    tracker.create(NewIssue(title="first"))
    made = measure("create", lambda: tracker.create(NewIssue(title="measured")))
    measure("show", lambda: tracker.issue(tracker.find_id(made.id)))
    measure("show by prefix", lambda: tracker.find_id(made.id[:8]))
    measure("delete", lambda: tracker.delete(made.id))
    return found


def test_an_operation_on_one_issue_costs_the_same_at_any_size(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHANCE, "randrange", lambda limit: limit - 1)  # no commit seals the events of others
    tracker = tracker_on(served)
    tracker.initialise()
    plant(served, 0, FEW)
    few = costs(tracker, monkeypatch)
    plant(served, FEW, MANY)
    many = costs(tracker, monkeypatch)
    assert few.keys() == many.keys()
    for name, (requests, received, sent) in many.items():
        before = few[name]
        assert requests == before[0], name
        if name != "show by prefix":  # reads one page of names that follow, whichever these are
            assert received <= before[1] + 64, name
        assert sent <= before[2] + 64, name
    document = served.read(INDEX)
    assert document is not None
    assert (document.record.all_ids, document.record.deleted_ids, served.read(UNLISTED)) == ([], [], None)
    snapshot = tracker.snapshot()
    assert len(snapshot) == MANY + 2
    assert [each.id for each in snapshot][:MANY] == [f"n{number:06d}" for number in range(MANY)]


def test_a_tracker_with_an_index_on_a_server_loses_nothing(served: ServedStore) -> None:
    tracker = tracker_on(served)
    tracker.initialise()
    plant(served, 0, 20)
    old = Index(all_ids=[f"n{number:06d}" for number in range(15)], deleted_ids=["gone"], unknown={"theirs": 1})
    noted = Unlisted(ids=[f"n{number:06d}" for number in range(15, 20)])
    commit(served, Replace(INDEX, old), Create(UNLISTED, noted))

    assert [each.id for each in tracker.snapshot()] == [f"n{number:06d}" for number in range(20)]
    assert problems(tracker) == []
    new = create_issues(tracker, "a", "b", "c")
    assert [each.id for each in tracker.snapshot()] == [*(f"n{number:06d}" for number in range(20)), *new]
    document = served.read(INDEX)
    assert document is not None
    assert document.record == Index(unknown={"theirs": 1})
    assert served.read(UNLISTED) is None


def test_a_batch_that_is_created_during_a_scan_is_seen_as_a_whole() -> None:
    class Busy(MemoryStore):
        armed = False
        made: tuple[str, ...] = ()

        def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
            if self.armed:  # the scan has passed half of the new ids when they are created
                self.armed = False
                self.made = tuple(create_issues(tracker_on(self), *"abcdef"))
            return ((name, each) for name, each in super().scan(family, after=after) if name not in self.made[:3])

    store = Busy()
    tracker = tracker_on(store)
    tracker.initialise()
    store.armed = True
    seen = [each.id for each in tracker.snapshot()]
    assert sorted(seen) == sorted(store.made)


def test_a_tracker_moves_between_files_and_a_server_and_has_an_index_in_files_only(
    served: ServedStore, tmp_path: Path
) -> None:
    with FileStore(tmp_path / "origin") as origin, FileStore(tmp_path / "back") as back:
        tracker = tracker_on(origin)
        tracker.initialise()
        first = create_issues(tracker, "a", "b", "c")
        migrate(origin, served)
        moved = tracker_on(served)
        assert [each.id for each in moved.snapshot()] == first
        second = create_issues(moved, "d", "e")
        moved.delete(first[1])
        assert problems(moved) == []

        assert migrate(served, back).passes == 2
        listed = json.loads((tmp_path / "back/.jit/index.json").read_bytes())
        assert listed["all_ids"] == [each.id for each in moved.snapshot()]
        assert sorted(listed["all_ids"]) == sorted([first[0], first[2], *second])
        assert problems(tracker_on(back)) == []
        assert migrate(served, back).copied_documents == 0  # as after an interruption
