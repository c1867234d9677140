"""Audit entries and issue events on a server: loose at first, so that unrelated commits do not meet; then sealed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from holdfast.clock import format_instant
from holdfast.errors import AuditChainBroken, StoreMoved
from holdfast.issues.model import EVENTS, IssueEvent
from holdfast.leases.service import LeaseService
from holdfast.locks.retry import CHANCE
from holdfast.repository.migration import migrate
from holdfast.store import served
from holdfast.store.audit import START, AuditEntry, AuditReader, AuditTrail, check_chain
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Append, Decision, Store, Stream, View
from holdfast.store.open import open_address
from holdfast.store.served import Attempt, ServedStore
from holdfast.testing.backend import run_threads
from tests.issues.trackers import claim_id_of, create_issues, tracker_on

TRAIL = AuditTrail()
CLIENTS, OFTEN = 6, 8


class Kind(NamedTuple):
    """A stream whose records are loose at first."""

    stream: Stream[Any]
    record: Callable[[View, float, str], Append]
    names: Callable[[Store], list[str]]


def _entry(view: View, now: float, what: str) -> Append:
    return TRAIL.entry(view, now, what, actor="agent:me", facts={})


def _event(view: View, now: float, what: str) -> Append:
    return Append(
        EVENTS, IssueEvent(type=what, issue_id="i", timestamp=format_instant(now), unknown={"by": "agent:me"})
    )


AUDIT = Kind(
    TRAIL.stream, _entry, lambda store: [each.event for each in AuditReader(store, TRAIL, verified=True).read()]
)
ISSUES = Kind(EVENTS, _event, lambda store: [each.record.type for each in store.entries(EVENTS)])


@pytest.fixture(params=[AUDIT, ISSUES], ids=lambda kind: kind.stream.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(params=["postgresql", "etcd"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ServedStore]]:
    url = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "etcd_url")
    with contextlib.ExitStack() as opened:

        def client() -> ServedStore:
            store = open_address(tmp_path, url)
            assert isinstance(store, ServedStore)
            return opened.enter_context(store)

        client().now()
        yield client


def note(store: ServedStore, kind: Kind, *names: str, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Append records; return how often that was decided."""
    decided: list[None] = []

    def decide(view: View, now: float) -> Decision[None]:
        decided.append(None)
        meanwhile()
        return Decision([kind.record(view, now, each) for each in names], None)

    store.transact([kind.stream], decide)
    return len(decided)


def loose(store: ServedStore, kind: Kind) -> int:
    return len(store.engine.loose_records(kind.stream.name, 1000))


@contextlib.contextmanager
def never_sealing() -> Iterator[None]:
    with mock.patch.object(CHANCE, "randrange", lambda limit: limit - 1):
        yield


def test_commits_that_share_only_the_stream_do_not_meet(clients: Callable[[], ServedStore], kind: Kind) -> None:
    one, two = clients(), clients()
    assert note(one, kind, "first", meanwhile=lambda: note(two, kind, "meanwhile")) == 1
    assert sorted(kind.names(one)) == ["first", "meanwhile"]


def test_entries_are_sealed_in_the_order_of_commits_that_depend_on_each_other(
    clients: Callable[[], ServedStore],
) -> None:
    def work(number: int, store: ServedStore) -> None:
        leases = LeaseService(store, TRAIL)
        for _ in range(OFTEN):
            lease = leases.acquire(f"w{number}", leases.request(ttl=60)).lease
            leases.release(f"w{number}", lease.lock_id)
            if number % 2:
                store.seal(TRAIL.stream)

    run_threads(*(partial(work, number, clients()) for number in range(CLIENTS)))
    store = clients()
    entries = list(AuditReader(store, TRAIL, verified=True).read())
    assert len(entries) == CLIENTS * OFTEN * 2
    for number in range(CLIENTS):
        own = [each.event for each in entries if each.facts["worktree_id"] == f"w{number}"]
        assert own == ["lock_acquired", "lock_released"] * OFTEN
    assert loose(store, AUDIT) == 0


def test_events_are_sealed_in_the_order_of_commits_that_depend_on_each_other(
    clients: Callable[[], ServedStore],
) -> None:
    first = tracker_on(clients())
    first.initialise()
    issues = create_issues(first, *map(str, range(CLIENTS)))

    def work(number: int, store: ServedStore) -> list[str]:
        tracker, seen = tracker_on(store), list[str]()
        for _ in range(OFTEN):
            claimed = tracker.claims.claim(issues[number], tracker.claims.request(ttl=60))
            tracker.claims.release(issues[number], claim_id_of(claimed))
            if number % 2:
                seen = [each.record.id for each in tracker.events(after=len(issues))]
        return seen

    seen = run_threads(*(partial(work, number, clients()) for number in range(CLIENTS)))
    store = clients()
    events = [each.record for each in tracker_on(store).events()]
    for issue in issues:
        own = [each.type for each in events if each.issue_id == issue]
        assert own == ["issue_created", *["issue_claimed", "issue_released"] * OFTEN]
    for each in seen:  # what was read once stays where it is
        assert each == [event.id for event in events[len(issues) :]][: len(each)]
    assert loose(store, ISSUES) == 0


def test_loose_records_do_not_pile_up(clients: Callable[[], ServedStore], kind: Kind) -> None:
    store = clients()
    with mock.patch.object(CHANCE, "randrange", return_value=0):
        for number in range(100):
            note(store, kind, str(number))
    assert loose(store, kind) == 0
    assert kind.names(store) == [str(each) for each in range(100)]


def test_no_record_replaces_another_that_got_the_same_place(
    clients: Callable[[], ServedStore], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a server may stand still for many commits."""
    monkeypatch.setattr(served, "_RANDOM_BITS", 1)
    store = clients()
    now, rounds = store.now(), itertools.count()
    fetch = type(store.engine).attempt

    def standing_still(engine: Any, *arguments: Any, **options: Any) -> Any:
        @contextlib.contextmanager
        def attempt() -> Iterator[Attempt]:
            with fetch(engine, *arguments, **options) as made:
                yield made._replace(fetched=made.fetched._replace(now=now + 1e-6 * (next(rounds) // 4)))

        return attempt()

    monkeypatch.setattr(type(store.engine), "attempt", standing_still)
    for number in range(12):
        note(store, kind, str(number))
    assert sorted(kind.names(store), key=int) == [str(each) for each in range(12)]


def test_more_records_than_fit_into_one_commit_are_sealed(clients: Callable[[], ServedStore], kind: Kind) -> None:
    store = clients()
    names = [str(each) for each in range(store.engine.most_sealed + 1)]
    with never_sealing():
        note(store, kind, *names)
    assert kind.names(store) == names


def test_two_clients_that_seal_at_once_seal_each_record_once(clients: Callable[[], ServedStore], kind: Kind) -> None:
    one, two = clients(), clients()
    with never_sealing():
        for number in range(10):
            note(one, kind, str(number))

    def meanwhile(store: ServedStore) -> None:
        if store is one:
            two.seal(kind.stream)

    with after_each_fetch(one, meanwhile):
        one.seal(kind.stream)
    assert kind.names(one) == [str(number) for number in range(10)]


def test_sealing_ends_though_others_append_all_the_time(clients: Callable[[], ServedStore], kind: Kind) -> None:
    one, two = clients(), clients()
    with never_sealing():
        note(one, kind, "before")
        with after_each_fetch(one, lambda _: note(two, kind, "meanwhile")):
            one.seal(kind.stream)
    names = [each.record for each in one.entries(Stream(kind.stream.name, kind.stream.codec))]
    assert len(names) == 2
    assert kind.names(two) == ["before", "meanwhile"]


@contextlib.contextmanager
def after_each_fetch(store: ServedStore, act: Callable[[ServedStore], object]) -> Iterator[None]:
    """Act whenever a transaction of this store has fetched what it names."""
    original = type(store.engine).attempt

    @contextlib.contextmanager
    def attempt(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        with original(self, *arguments, **options) as found:
            if self is store.engine:
                act(store)
            yield found

    with mock.patch.object(type(store.engine), "attempt", attempt):
        yield


def test_a_client_of_an_older_version_appends_to_the_same_stream(
    clients: Callable[[], ServedStore], kind: Kind
) -> None:
    store = clients()
    note(store, kind, "loose")
    with mock.patch.object(kind.stream, "chain", None):
        note(store, kind, "direct")
    assert sorted(kind.names(store)) == ["direct", "loose"]


def test_a_moved_store_can_still_be_sealed_and_read(clients: Callable[[], ServedStore], kind: Kind) -> None:
    store = clients()
    with never_sealing():
        note(store, kind, "last")
    store.set_moved("elsewhere")
    with pytest.raises(StoreMoved):
        note(store, kind, "late")
    assert kind.names(store) == ["last"]


def test_a_migration_takes_the_loose_records_along(clients: Callable[[], ServedStore], kind: Kind) -> None:
    store, target = clients(), MemoryStore()
    with never_sealing():
        note(store, kind, "first")
        migrate(store, target, address="elsewhere", switch=lambda: None)
    assert kind.names(target) == ["first"]


def test_a_sealed_entry_that_was_forged_is_found(clients: Callable[[], ServedStore]) -> None:
    store = clients()
    for number in range(3):
        note(store, AUDIT, str(number))
    AUDIT.names(store)
    forged = AuditTrail()
    forged.stream.chain = None
    entry = AuditEntry(4, format_instant(0), "forged", "agent:me", {}, START, START)
    store.transact([forged.stream], lambda view, now: Decision([Append(forged.stream, entry)], None))
    with pytest.raises(AuditChainBroken):
        check_chain(store, TRAIL)


@pytest.mark.parametrize("notified", [True, False])
def test_a_watch_of_the_stream_wakes_up(clients: Callable[[], ServedStore], kind: Kind, notified: bool) -> None:
    store, other = clients(), clients()
    for each in (store, other):
        if not notified and hasattr(each.engine, "connections"):
            each.engine.connections.notifies = False  # it polls
    with store.watch(kind.stream) as watch, never_sealing():
        note(other, kind, "x")
        assert watch.wait(30) == {kind.stream.name}
