"""The claims of issues in the overview: all that are held, at a cost that does not grow with the finished issues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.fs import calls
from holdfast.issues import projection
from holdfast.issues.claims import Claimed
from holdfast.issues.gates import Definition
from holdfast.issues.model import ISSUES, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.repository.holdings import Holding, issue_claims
from holdfast.repository.overview import look_around, with_details
from holdfast.store import stat_cache
from holdfast.store.etcd import EtcdEngine
from holdfast.store.model import Create, Decision, Delete, Key, StructCodec
from holdfast.store.open import open_store
from holdfast.store.postgres import PostgresEngine
from tests.issues.trackers import claim_id_of, create_issues, tracker_on

FEW, MANY = 5, 60


@pytest.fixture(params=["files", "postgres_url", "etcd_url"])
def address(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "files" else str(request.getfixturevalue(request.param))


@pytest.fixture
def tracker(address: str | None, tmp_path: Path) -> Iterator[Tracker]:
    (tmp_path / ".holdfast").mkdir()
    store = open_store(tmp_path, address)
    tracker = tracker_on(store)
    tracker.initialise()
    yield tracker
    store.close()


def claim(tracker: Tracker, issue_id: str) -> Claimed:
    return tracker.claims.claim(issue_id, tracker.claims.request())


def finish(tracker: Tracker, count: int) -> None:
    for issue_id in create_issues(tracker, *map(str, range(count))):
        tracker.update(issue_id, Update(state=State.DONE), claim=claim_id_of(claim(tracker, issue_id)))


class Reads:
    """Counts the files that are opened, and the requests to servers with the documents that they return."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for engine in (PostgresEngine, EtcdEngine):
            for name in ("fetch", "page", "changes"):
                patch.setattr(engine, name, self._counted(getattr(engine, name)))
        patch.setattr(calls, "open", self._counted(calls.open))

    def _counted(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            documents = found if isinstance(found, list) else getattr(found, "found", ())
            self.count += 1 + len(documents)
            return found

        return call


def claims(path: Path, address: str | None) -> Sequence[Holding]:
    return list(issue_claims(path, address))


def whole_overview(path: Path, address: str | None) -> Sequence[Holding]:
    return with_details(look_around(path, address=address), address=address).holdings


def reads(look: Callable[[Path, str | None], Sequence[Holding]], path: Path, address: str | None) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stat_cache, "RECENT", 0)  # or files of the last two seconds are read again
        look(path, address)  # keeps the checkpoint up to date, as others do
        counted = Reads(patch)
        assert [each.kind for each in look(path, address)] == ["issue"]
    return counted.count


@pytest.mark.parametrize("look", [claims, whole_overview])
def test_it_reads_no_more_however_many_issues_are_finished(
    tracker: Tracker, address: str | None, tmp_path: Path, look: Callable[[Path, str | None], Sequence[Holding]]
) -> None:
    (held,) = create_issues(tracker, "held")
    claim(tracker, held)
    finish(tracker, FEW)
    few = reads(look, tmp_path, address)
    finish(tracker, MANY)
    assert 0 < reads(look, tmp_path, address) <= few + 2


@pytest.mark.parametrize("usable", [True, False])
def test_every_claim_that_is_held_is_found(
    tracker: Tracker, address: str | None, tmp_path: Path, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the projection of the issues, and by the scan that replaces it if it cannot be used."""
    working, gated, unreadable, *_ = create_issues(tracker, "working", "gated", "unreadable", "free")
    tracker.gates.define(Definition(key="review", title="Review"))
    tracker.gates.require(gated, ["review"])
    claims = {each: claim_id_of(claim(tracker, each)) for each in (working, gated, unreadable)}
    assert tracker.update(gated, Update(state=State.DONE), claim=claims[gated]).state is State.GATED
    damaged = Key(ISSUES.key(unreadable).name, StructCodec(dict[str, int]))
    tracker.store.transact([ISSUES.key(unreadable)], lambda view, now: Decision([Delete(ISSUES.key(unreadable))], None))
    tracker.store.transact([damaged], lambda view, now: Decision([Create(damaged, {"x": 1})], None))
    finish(tracker, FEW)
    if not usable:

        def look(*_: Any, **__: Any) -> Any:
            raise projection.IndexUnusable

        monkeypatch.setattr(projection.IssueProjection, "look", look)
    found = {each.what: (each.title, each.who) for each in issue_claims(tmp_path, address)}
    me = "agent:tester"
    assert found == {working: ("working", me), gated: ("gated", me), unreadable: ("", me)}
