"""Entries of the audit trail on a server: loose at first, so that unrelated commits do not meet; then sealed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.clock import format_instant
from holdfast.errors import AuditChainBroken, StoreMoved
from holdfast.leases.service import LeaseService
from holdfast.locks.retry import CHANCE
from holdfast.repository.migration import migrate
from holdfast.store import served
from holdfast.store.audit import START, AuditEntry, AuditReader, AuditTrail, check_chain
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Append, Decision, View
from holdfast.store.open import open_address
from holdfast.store.served import Attempt, ServedStore
from holdfast.testing.backend import run_threads

TRAIL = AuditTrail()
CLIENTS, OFTEN = 6, 8


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


def note(store: ServedStore, what: str, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Append an entry; return how often that was decided."""
    decided: list[None] = []

    def decide(view: View, now: float) -> Decision[None]:
        decided.append(None)
        meanwhile()
        return Decision([TRAIL.entry(view, now, what, actor="agent:me", facts={})], None)

    store.transact([TRAIL.stream], decide)
    return len(decided)


def events(store: ServedStore) -> list[str]:
    return [each.event for each in AuditReader(store, TRAIL, verified=True).read()]


def loose(store: ServedStore) -> int:
    return len(store.engine.loose_records(TRAIL.stream.name, 1000))


@contextlib.contextmanager
def never_sealing() -> Iterator[None]:
    with mock.patch.object(CHANCE, "randrange", lambda limit: limit - 1):
        yield


def test_commits_that_share_only_the_trail_do_not_meet(clients: Callable[[], ServedStore]) -> None:
    one, two = clients(), clients()
    assert note(one, "first", meanwhile=lambda: note(two, "meanwhile")) == 1
    assert sorted(events(one)) == ["first", "meanwhile"]


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
    assert loose(store) == 0


def test_loose_entries_do_not_pile_up(clients: Callable[[], ServedStore]) -> None:
    store = clients()
    with mock.patch.object(CHANCE, "randrange", return_value=0):
        for number in range(100):
            note(store, str(number))
    assert loose(store) == 0
    assert check_chain(store, TRAIL).entries == 100


def test_no_entry_replaces_another_that_got_the_same_place(
    clients: Callable[[], ServedStore], monkeypatch: pytest.MonkeyPatch
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
        note(store, str(number))
    assert sorted(events(store), key=int) == [str(each) for each in range(12)]


def test_more_entries_than_fit_into_one_commit_are_sealed(clients: Callable[[], ServedStore]) -> None:
    store = clients()
    count = store.engine.most_sealed + 1

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([TRAIL.entry(view, now, str(each), actor="agent:me", facts={}) for each in range(count)], None)

    with never_sealing():
        store.transact([TRAIL.stream], decide)
    assert events(store) == [str(each) for each in range(count)]


def test_two_clients_that_seal_at_once_seal_each_entry_once(clients: Callable[[], ServedStore]) -> None:
    one, two = clients(), clients()
    with never_sealing():
        for number in range(10):
            note(one, str(number))
    original = type(one.engine).attempt

    @contextlib.contextmanager
    def attempt(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        with original(self, *arguments, **options) as found:
            if self is one.engine:
                two.seal(TRAIL.stream)  # after this one has read
            yield found

    with mock.patch.object(type(one.engine), "attempt", attempt):
        one.seal(TRAIL.stream)
    assert events(one) == [str(number) for number in range(10)]


def test_a_client_of_an_older_version_appends_to_the_same_chain(clients: Callable[[], ServedStore]) -> None:
    store = clients()
    old = AuditTrail()
    old.stream.chain = None
    note(store, "loose")

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([old.entry(view, now, "direct", actor="agent:me", facts={})], None)

    store.transact([old.stream], decide)
    assert sorted(events(store)) == ["direct", "loose"]


def test_a_moved_store_can_still_be_sealed_and_read(clients: Callable[[], ServedStore]) -> None:
    store = clients()
    with never_sealing():
        note(store, "last")
    store.set_moved("elsewhere")
    with pytest.raises(StoreMoved):
        note(store, "late")
    assert events(store) == ["last"]


def test_a_migration_takes_the_loose_entries_along(clients: Callable[[], ServedStore]) -> None:
    store, target = clients(), MemoryStore()
    with never_sealing():
        note(store, "first")
        migrate(store, target, address="elsewhere", switch=lambda: None)
    assert [each.event for each in AuditReader(target, TRAIL, verified=True).read()] == ["first"]


def test_a_sealed_entry_that_was_forged_is_found(clients: Callable[[], ServedStore]) -> None:
    store = clients()
    for number in range(3):
        note(store, str(number))
    events(store)
    forged = AuditTrail()
    forged.stream.chain = None
    entry = AuditEntry(4, format_instant(0), "forged", "agent:me", {}, START, START)
    store.transact([forged.stream], lambda view, now: Decision([Append(forged.stream, entry)], None))
    with pytest.raises(AuditChainBroken):
        check_chain(store, TRAIL)


@pytest.mark.parametrize("notified", [True, False])
def test_a_watch_of_the_trail_wakes_up(clients: Callable[[], ServedStore], notified: bool) -> None:
    store, other = clients(), clients()
    for each in (store, other):
        if not notified and hasattr(each.engine, "connections"):
            each.engine.connections.notifies = False  # it polls
    with store.watch(TRAIL.stream) as watch, never_sealing():
        note(other, "x")
        assert watch.wait(30) == {TRAIL.stream.name}
