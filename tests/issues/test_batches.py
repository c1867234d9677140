"""Batches of issues on an etcd without special options, which accepts 128 operations in a transaction."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import UsageFailure
from holdfast.issues.creating import MOST_TOGETHER, NewIssue
from holdfast.issues.model import DEPENDENTS, EVENTS, GRAPH, ISSUES, Dependents, IssueEvent, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.issues.transactions import MOST_NAMED
from holdfast.issues.validate import repair
from holdfast.ledger.log import Ledger
from holdfast.store.model import Append, Create, Decision, Delete
from holdfast.store.open import open_address
from holdfast.store.served import ServedStore
from tests.issues.trackers import create_issues, events_of, problems, tracker_at, tracker_on
from tests.support.servers import Etcd

LIMIT = 120  # documents and records in a commit: etcd counts some operations besides
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def stock_etcd(server_directory: Path) -> Iterator[Etcd]:
    directory = server_directory / "stock-etcd"
    directory.mkdir()
    server = Etcd(directory, options=("--unsafe-no-fsync",))
    server.start()
    yield server
    server.kill()


@contextlib.contextmanager
def opened(path: Path, url: str) -> Iterator[Tracker]:
    store = open_address(path, url)
    assert isinstance(store, ServedStore)
    with store:
        tracker = tracker_on(store)
        tracker.initialise()
        yield tracker


@pytest.fixture
def tracker(stock_etcd: Etcd, tmp_path: Path) -> Iterator[Tracker]:
    with opened(tmp_path, stock_etcd.store_url(f"stock-{next(_prefixes)}")) as tracker:
        yield tracker


def commits(tracker: Tracker) -> int:
    assert isinstance(tracker.store, ServedStore)
    return tracker.store.statistics().commits


def chained(count: int) -> list[NewIssue]:
    """Issues that depend on the two before them, in an order in which they cannot be created."""
    keys = [str(each) for each in range(count)]
    new = [NewIssue(title=key, key=key, depends_on=tuple(keys[max(0, n - 2) : n])) for n, key in enumerate(keys)]
    return new[::-1]


def test_a_batch_is_created_in_parts_that_the_server_accepts(tracker: Tracker) -> None:
    before = commits(tracker)
    create_issues(tracker, *map(str, range(MOST_TOGETHER)))
    assert commits(tracker) - before == 7  # up to 37 issues with their events and places in the queue in each
    assert len(tracker.snapshot()) == MOST_TOGETHER
    tracker.create_all(chained(100))
    assert len(tracker.snapshot()) == MOST_TOGETHER + 100
    assert problems(tracker) == []


def test_an_import_is_made_in_parts_that_the_server_accepts(tracker: Tracker, tmp_path: Path) -> None:
    source = tracker_at(tmp_path / "files")
    source.initialise()
    source.create_all(chained(150))
    issues = [document.record for _, document in source.store.scan(ISSUES)]
    tracker.adopt(issues)
    assert {document.record.id for _, document in tracker.store.scan(ISSUES)} == {each.id for each in issues}
    assert problems(tracker) == []


def test_a_server_with_a_higher_limit_creates_the_batch_in_one_commit(etcd_url: str, tmp_path: Path) -> None:
    with opened(tmp_path, etcd_url) as tracker:
        before = commits(tracker)
        create_issues(tracker, *map(str, range(MOST_TOGETHER)))
        assert commits(tracker) - before == 1


def test_more_parts_than_fit_into_one_commit_are_refused_with_the_limit(tracker: Tracker) -> None:
    (whole,) = create_issues(tracker, "whole")
    parts = [NewIssue(title=str(each)) for each in range(60)]
    with pytest.raises(UsageFailure, match="at most 120 documents and records in one commit") as refused:
        tracker.break_down(whole, parts)
    assert refused.value.facts["limit"] == LIMIT
    assert events_of(tracker) == {"issue_created": 1}
    tracker.break_down(whole, parts[:20])
    assert len(tracker.snapshot()) == 21


def test_more_events_of_a_ledger_than_fit_into_one_commit_are_refused_with_the_limit(tracker: Tracker) -> None:
    ledger = Ledger(tracker.store)
    with pytest.raises(UsageFailure, match="at most 120 documents and records in one commit; this one has 121"):
        ledger.append_many([{"type": "x"}] * LIMIT)
    assert ledger.sequence == 0
    assert len(ledger.append_many([{"type": "x"}] * (LIMIT - 1))) == LIMIT - 1


def test_everything_within_the_limit_is_accepted(tracker: Tracker) -> None:
    """What is named, put and appended together counts as the store says."""
    store, names = tracker.store, [f"n{each}" for each in range(LIMIT)]
    assert store.server is not None
    assert (store.server.exceeded_limit(LIMIT), store.server.exceeded_limit(LIMIT + 1)) == (None, LIMIT)

    def create(count: int, events: int) -> None:
        made = [Create(DEPENDENTS.key(each), Dependents(issue_id=each)) for each in names[:count]]
        appended = [Append(EVENTS, IssueEvent())] * events
        store.transact([*(each.key for each in made), EVENTS], lambda view, now: Decision([*made, *appended], None))

    with pytest.raises(UsageFailure, match="this one has 121"):
        create(LIMIT - 10, 11)
    create(LIMIT - 10, 10)
    assert len(list(store.scan(DEPENDENTS))) == LIMIT - 10


def test_a_finished_issue_releases_all_its_dependents(tracker: Tracker) -> None:
    (base,) = create_issues(tracker, "base")
    new = [NewIssue(title=str(each), depends_on=(base,)) for each in range(MOST_NAMED + 20)]
    waiting = [each.issue.id for each in tracker.create_all(new)]
    tracker.update(base, Update(state=State.DONE))
    assert {tracker.document(each).record.state for each in waiting} == {State.READY}
    (last,) = tracker.create_all([NewIssue(title="last", depends_on=tuple(waiting[:50]))])
    assert last.issue.state is State.BACKLOG


def test_the_dependents_of_many_issues_are_repaired(tracker: Tracker) -> None:
    tracker.create_all(chained(150))
    tracker.store.transact([GRAPH], lambda view, now: Decision([Delete(GRAPH)], None))
    assert repair(tracker) == []
    assert problems(tracker) == []
