"""The queue of issues on a server: it picks what the rules say is first, and claims rarely meet."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.clock import format_instant
from holdfast.errors import NotFound
from holdfast.issues.claims import Claimed, _Search
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import CLAIMS, ISSUES, ClaimId, Issue, Priority, State
from holdfast.issues.tracker import Query, Tracker, Update
from holdfast.locks.retry import CHANCE
from holdfast.store import etcd, postgres, postgres_sql, served
from holdfast.store.etcd_gateway import encoded, end_of
from holdfast.store.model import Create, Decision, Key, Replace
from holdfast.store.open import open_address
from holdfast.store.served import ServedStore
from proof.effort import SEED, rounds, tried
from tests.issues.trackers import create_issues, events_of, tracker_on
from tests.locks.workers import Line, Workers

DONE = Update(state=State.DONE)
SHORT = 0.2  # seconds: the ttl of claims that expire in a test
Open = Callable[[], ServedStore]


@pytest.fixture(params=["postgres_url", "etcd_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def opened(url: str, tmp_path: Path) -> Iterator[Open]:
    """Opens the store as another client."""
    with contextlib.ExitStack() as stack:

        def connect() -> ServedStore:
            store = open_address(tmp_path, url)
            assert isinstance(store, ServedStore)
            return stack.enter_context(store)

        yield connect


@pytest.fixture
def tracker(opened: Open) -> Tracker:
    tracker = Tracker(opened(), actor="agent:me", skew=0.0)
    tracker.initialise()
    return tracker


@pytest.fixture
def reads_no_changes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, no client may read what others have changed."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the changes of others were read")

    def arm() -> None:
        for engine in (etcd.EtcdEngine, postgres.PostgresEngine):
            monkeypatch.setattr(engine, "changes", refuse)

    return arm


def write(tracker: Tracker, *issues: Issue) -> None:
    keys = [ISSUES.key(each.id) for each in issues]
    made = [Create(key, each) for key, each in zip(keys, issues, strict=True)]
    tracker.store.transact(keys, lambda view, now: Decision(made, None))


def planted(chance: random.Random, number: int) -> Issue:
    """An issue as any client may have written it."""

    def instant() -> str:
        return format_instant(1.7e9 + chance.randrange(4))

    return Issue(
        id=f"{chance.randrange(1 << 32):08x}-{number}",
        title='a\n  "state": "done"',
        description='\n  "priority": "critical",\n  "updated_at": "1"',
        state=chance.choices(list(State), weights=[1, 6, 1, 1, 1, 1, 1])[0],
        priority=chance.choice(list(Priority)),
        assignee=chance.choice([None, None, "agent:me", 'agent:mé"', "agent:other"]),
        context={"state": "done", "priority": "low"},
        gates_status={"g": {"status": "pending", "updated_at": "2"}},
        created_at=instant(),
        updated_at=chance.choice(["", instant(), instant()]),
        unknown={"deep": {"state": "done", "assignee": "agent:other"}},
    )


def picked(tracker: Tracker, **options: Any) -> Claimed | None:
    """The claim of what the server picks."""
    return tracker.claims._claim_picked(_Search(tracker.claims.request(**options), None, {}))


def finish(tracker: Tracker, claimed: Claimed) -> None:
    tracker.update(claimed.issue.id, DONE, claim=ClaimId.parse(claimed.claim.claim_id))


@pytest.mark.parametrize("assignee", ["agent:me", 'agent:mé"', "agent:nobody"])
def test_the_server_picks_in_the_order_of_the_rules(tracker: Tracker, assignee: str) -> None:
    chance = random.Random(f"{SEED} {assignee}")
    write(tracker, *(planted(chance, number) for number in range(rounds(300, least=60))))
    create_issues(tracker, *"abc")  # of one batch: equal but for their ids
    (base,) = create_issues(tracker, "base")
    late = Issue(id="late", title="l", priority=Priority.CRITICAL, dependencies=(base,))  # nobody has settled it
    wanted = [each.id for each in tracker.summaries().ready(assignee)]
    write(tracker, late)
    found: list[str] = []
    while (claimed := picked(tracker, assignee=assignee)) is not None:
        found.append(claimed.issue.id)
        finish(tracker, claimed)
    assert len(wanted) >= 10
    assert found == wanted
    last = tracker.claims.claim_next(tracker.claims.request(assignee))
    assert last is not None
    assert last.issue.id == late.id


def test_a_claim_reads_only_the_issue_and_what_it_depends_on(
    tracker: Tracker, reads_no_changes: Callable[[], None]
) -> None:
    base, other = create_issues(tracker, "base", "other")
    (needing,) = (tracker.create(NewIssue(title="needing", priority=Priority.HIGH, depends_on=(base,))).id,)
    reads_no_changes()
    for expected in (base, needing, other):
        claimed = tracker.claims.claim_next(tracker.claims.request())
        assert claimed is not None
        assert claimed.issue.id == expected
        finish(tracker, claimed)
    assert events_of(tracker)["issue_completed"] == 3


def test_an_issue_whose_stored_state_is_outdated_is_not_claimed(tracker: Tracker) -> None:
    """The server picks by the record; the transaction decides by the dependencies."""
    base, free = create_issues(tracker, "base", "free")
    tracker.claims.claim(base, tracker.claims.request())
    now = format_instant(1.7e9)
    blocked = Issue(
        id="blocked", title="b", state=State.READY, priority=Priority.HIGH, dependencies=(base,), created_at=now
    )
    write(tracker, blocked)
    claimed = tracker.claims.claim_next(tracker.claims.request("agent:other"))
    assert claimed is not None
    assert claimed.issue.id == free


def test_issues_that_the_server_cannot_judge_are_judged_by_the_client(tracker: Tracker) -> None:
    """Labels, paths, and more urgent issues under an expired claim."""
    low = tracker.create(NewIssue(title="low", priority=Priority.LOW, labels=("area:x",))).id
    touching = [tracker.create(NewIssue(title="t", priority=Priority.HIGH, touches=("src/*",))).id for _ in range(2)]
    (normal,) = create_issues(tracker, "normal")
    abandoned = tracker.create(NewIssue(title="abandoned", priority=Priority.CRITICAL)).id
    assert tracker.claims.claim(abandoned, tracker.claims.request("agent:gone", ttl=SHORT)).issue.id == abandoned
    time.sleep(2 * SHORT)

    found = []
    for wanted in (None, None, None, lambda issue: Query(labels=("area:*",)).fits(issue, issue.state)):
        claimed = tracker.claims.claim_next(tracker.claims.request(ttl=60.0), wanted=wanted)
        assert claimed is not None
        found.append((claimed.issue.id, claimed.taken_over_from))
    first, second, *rest = found
    assert first == (abandoned, "agent:gone")
    assert second[0] in touching
    assert rest == [(normal, None), (low, None)]
    assert tracker.claims.claim_next(tracker.claims.request()) is None


def test_expired_claims_of_gated_and_landing_issues_do_not_matter(
    tracker: Tracker, reads_no_changes: Callable[[], None]
) -> None:
    tracker.gates.define(Definition("review"))
    gated, landing, free = (
        tracker.create(NewIssue(title=title, priority=priority)).id
        for title, priority in zip("glf", (Priority.CRITICAL, Priority.HIGH, Priority.LOW), strict=True)
    )
    tracker.gates.require(gated, ["review"])
    claim = tracker.claims.claim(gated, tracker.claims.request("agent:a", ttl=SHORT))
    assert tracker.update(gated, DONE, claim=ClaimId.parse(claim.claim.claim_id)).state is State.GATED
    tracker.claims.claim(landing, tracker.claims.request("agent:b", ttl=SHORT))
    key = CLAIMS.key(landing)

    def hold(view: Any, now: float) -> Decision[None]:
        record = view.get(key)
        held = msgspec.structs.replace(record.claim, held_for="landing-1")
        return Decision([Replace(key, msgspec.structs.replace(record, claim=held))], None)

    tracker.store.transact([key], hold)
    time.sleep(2 * SHORT)
    reads_no_changes()
    claimed = tracker.claims.claim_next(tracker.claims.request())
    assert claimed is not None
    assert claimed.issue.id == free


def test_an_unreadable_issue_is_reported_and_skipped(tracker: Tracker) -> None:
    write(tracker, Issue(id="torn", title="torn", state=State.READY))
    (readable,) = create_issues(tracker, "readable")
    tear(tracker, "torn", b'{"title": ')
    claimed = tracker.claims.take_next(tracker.claims.request())
    assert claimed.issue.id == readable
    assert [each.issue_id for each in claimed.broken] == ["torn"]
    with pytest.raises(NotFound, match="torn"):
        tracker.claims.take_next(tracker.claims.request())


def tear(tracker: Tracker, issue_id: str, content: bytes) -> None:
    """Damage the record of an issue, through the store: its codec writes these bytes."""

    class Damage:
        encode = staticmethod(lambda record: content)
        decode = staticmethod(lambda content, source: content)

    key: Key[Any] = Key(ISSUES.key(issue_id).name, Damage())
    tracker.store.transact([key], lambda view, now: Decision([Replace(key, None)], None))


# --- Many at once -----------------------------------------------------------------------------------


@pytest.mark.req("FL-19")
@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_no_issue_is_claimed_twice_and_claims_rarely_meet(tracker: Tracker, url: str, tmp_path: Path) -> None:
    """Eight processes claim and finish; urgent issues are claimed before all others."""
    count = rounds(1000, least=60)
    urgent = [
        each.issue.id for each in tracker.create_all([NewIssue(title="u", priority=Priority.HIGH)] * (count // 2))
    ]
    create_issues(tracker, *map(str, range(count - len(urgent))))

    def work(line: Line) -> None:
        with open_address(tmp_path, url) as store:  # type: ignore[attr-defined]
            here = tracker_on(store, f"agent:{os.getpid()}")
            here.store.now()
            line.say("ready")
            line.wait()
            done: list[tuple[float, str]] = []
            while (claimed := here.claims.claim_next(here.claims.request())) is not None:
                done.append((time.monotonic(), claimed.issue.id))
                finish(here, claimed)
            line.say((done, store.statistics().conflicts))

    with Workers() as workers:
        crew = workers.start_many(8, work)
        for each in crew:
            each.hear()
        for each in crew:
            each.say("go")
        answers = [each.hear() for each in crew]

    claimed = sorted(itertools.chain.from_iterable(done for done, _ in answers))
    assert len(claimed) == count
    assert len({issue_id for _, issue_id in claimed}) == count
    assert events_of(tracker)["issue_claimed"] == events_of(tracker)["issue_completed"] == count
    for done, _ in answers:  # each process: no urgent issue after another one
        kinds = [issue_id in urgent for _, issue_id in done]
        assert kinds == sorted(kinds, reverse=True)
    assert sum(conflicts for _, conflicts in answers) < 2 * count  # without turns, it is about seven for each claim
    tried["claims by eight processes"] += count


def test_a_client_that_stops_with_an_issue_picked_delays_nobody(tracker: Tracker, opened: Open) -> None:
    """Others claim the next issue at once. They get this one as soon as the server has ended the turn; then the stopped
    client cannot commit."""
    first, second = create_issues(tracker, "first", "second")
    stopped, other = opened(), tracker_on(opened(), "agent:other")
    with stopped.engine.pick("agent:stopped", 0.0) as held:
        assert held is not None
        assert held.issue == min(first, second)
        began = time.monotonic()
        taken = [other.claims.take_next(other.claims.request()).issue.id for _ in range(2)]
        assert sorted(taken) == sorted((first, second))
        assert time.monotonic() - began < 10.0

        key: Key[Any] = ISSUES.key(held.issue)
        plan = served.CommitPlan("late", held.attempt.fetched, [key], {key.name: b"{}"}, [])
        assert not held.attempt.commit(plan)
    assert {each.state for each in tracker.snapshot()} == {State.IN_PROGRESS}
    assert events_of(tracker)["issue_claimed"] == 2


def test_a_pick_does_not_deadlock_with_a_change_of_the_same_issue(postgres_url: str) -> None:
    """A commit locks the claim before the issue, and so may wait for a picked issue with the claim locked."""
    with postgres.PostgresStore(postgres_url) as store, postgres.PostgresStore(postgres_url) as other:
        tracker = tracker_on(store)
        tracker.initialise()
        (issue_id,) = create_issues(tracker, "again and again")
        claimed = tracker.claims.take_next(tracker.claims.request())
        tracker.claims.release(issue_id, ClaimId.parse(claimed.claim.claim_id))
        engine: Any = other.engine
        lock = "BEGIN; SELECT name FROM holdfast.documents WHERE name = %s FOR UPDATE"
        with engine.connections.borrowed() as connection:
            connection.ask_at_once(lock, [CLAIMS.key(issue_id).name.encode()])
            assert picked(tracker) is None
            connection.execute("ROLLBACK")
        assert picked(tracker) is not None


# --- Stores that have no queue yet --------------------------------------------------------------------


def test_a_store_of_postgresql_gets_its_indexes_with_the_first_claim(
    postgres_url: str, reads_no_changes: Callable[[], None]
) -> None:
    with postgres.PostgresStore(postgres_url) as store:
        tracker = tracker_on(store)
        tracker.initialise()
        ids = create_issues(tracker, *"ab")
        reads_no_changes()
        assert {tracker.claims.take_next(tracker.claims.request()).issue.id for _ in "ab"} == {*ids}
    with postgres.PostgresStore(postgres_url) as store:
        assert indexes(store) == {"issues_free", "claims_expiry"}


def test_without_the_right_to_create_indexes_claims_work_as_before(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres.PostgresStore(postgres_url) as store:
        tracker = tracker_on(store)
        tracker.initialise()
        ids = create_issues(tracker, *"ab")
        monkeypatch.setattr(postgres_sql, "CREATE_QUEUE", ("CREATE INDEX ON pg_catalog.pg_class (relname)",))
        assert {tracker.claims.take_next(tracker.claims.request()).issue.id for _ in "ab"} == {*ids}
        assert indexes(store) == set()


def test_claims_go_on_after_the_prepared_statements_are_gone(postgres_url: str) -> None:
    """psycopg deallocates them all after a rollback."""
    with postgres.PostgresStore(postgres_url) as store:
        tracker = tracker_on(store)
        tracker.initialise()
        create_issues(tracker, *map(str, range(12)))
        engine: Any = store.engine
        for number in range(12):
            if number > 5:
                for each in engine.connections._idle:
                    each.ask_at_once("DEALLOCATE ALL")
                    each._prepared.clear()
            claimed = picked(tracker)
            assert claimed is not None
            finish(tracker, claimed)


def indexes(store: ServedStore) -> set[str]:
    engine: Any = store.engine
    statement = (
        "SELECT indexname FROM pg_indexes WHERE schemaname = %s AND indexname IN ('issues_free', 'claims_expiry')"
    )
    rows = engine.connections.run(lambda each: each.execute(statement, [engine.connections.address.schema]).fetchall())
    return {name for (name,) in rows}


def forget_queue(store: ServedStore, version: int) -> None:
    """Make a store of etcd one of an older version."""
    engine: Any = store.engine
    for prefix in (engine.keys.queue, engine.keys.expiries):
        engine.gateway.ask("/v3/kv/deleterange", {"key": encoded(prefix), "range_end": encoded(end_of(prefix))})
    engine.gateway.ask("/v3/kv/txn", {"success": [etcd._put(engine.keys.schema, b"%d" % version)]})


def version_of(store: ServedStore) -> int:
    engine: Any = store.engine
    return int(etcd._value(engine._ranges([etcd._get(engine.keys.schema)])[0][0]))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_older_store_of_etcd_gets_its_queue_with_the_first_claim(
    etcd_url: str, version: int, reads_no_changes: Callable[[], None]
) -> None:
    with etcd.EtcdStore(etcd_url) as store:
        tracker = Tracker(store, skew=0.0)
        tracker.initialise()
        chance = random.Random(version)
        write(tracker, *(planted(chance, number) for number in range(120)))
        urgent = tracker.create(NewIssue(title="u", priority=Priority.CRITICAL)).id
        tracker.claims.claim(urgent, tracker.claims.request(ttl=SHORT))
        forget_queue(store, version)
    with etcd.EtcdStore(etcd_url) as store:
        tracker = Tracker(store, actor="agent:me", skew=0.0)
        if version == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CHANCE, "randrange", lambda limit: limit - 1)  # no commit seals
                tracker.claims.take_next(tracker.claims.request())
            assert version_of(store) == 1
            assert list(tracker.events())  # seals events, and so upgrades the store
            assert version_of(store) == 2
        time.sleep(2 * SHORT)
        wanted = tracker.summaries().ready("agent:me")[:8]
        assert all(each.priority is Priority.CRITICAL for each in wanted)
        if version > 1:
            reads_no_changes()
        assert tracker.claims.take_next(tracker.claims.request()).issue.id in {each.id for each in wanted}
        assert version_of(store) == etcd.SCHEMA_VERSION


def test_a_place_of_an_issue_that_an_older_client_has_changed_is_removed(etcd_url: str) -> None:
    with etcd.EtcdStore(etcd_url) as store:
        tracker = tracker_on(store)
        tracker.initialise()
        first, second = sorted(create_issues(tracker, *"ab"))
        key = ISSUES.key(first)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(etcd.EtcdEngine, "_queue_changes", lambda self, plan: iter(()))
            tracker.update(first, DONE)
        assert tracker.claims.take_next(tracker.claims.request()).issue.id == second
        assert tracker.store.read(key) is not None
        engine: Any = store.engine
        assert engine._range(engine.keys.queue, end_of(engine.keys.queue), 10) == []
