"""The layout table: the paths that the specifications demand, and the order of locks."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import LockTimeout, NameInvalid, UsageFailure
from holdfast.store.files import FileStore
from holdfast.store.layout import TABLE, DocumentLocks, Kind, Layout, Location
from holdfast.store.model import Append, Change, Create, Decision, Key, Replace, Stream, View
from holdfast.testing.backend import EVENTS, GATES, INDEX, ISSUES, PATIENCE, Event, Item, number_of
from tests.locks.workers import Line, Workers

LAYOUT = Layout()

PATHS = {
    "jit/index": (".jit/index.json", ".jit/.index.lock"),
    "jit/gates": (".jit/gates.json", ".jit/.gates.lock"),
    "jit/issues/4f1c": (".jit/issues/4f1c.json", ".jit/issues/4f1c.lock"),
    "jit/events": (".jit/events.jsonl", ".jit/.events.lock"),
    "jvs/leases/main": (".jvs/locks/main.json", ".jvs/guards/worktree-main.lock"),
    "jvs/worktrees/main": (".jvs/worktrees/main/config.json", ".jvs/guards/worktree-main.lock"),
    "ledger/events": ("ledger/event-{number}.json", "ledger/ledger.lock"),
    "ledger/meta": ("meta.json", "ledger/.meta.lock"),
}


@pytest.mark.parametrize("key", PATHS)
def test_paths_and_locks_are_those_of_the_specifications(key: str) -> None:
    place = LAYOUT.locate(key)

    assert (place.path, place.lock) == PATHS[key]


def test_names_that_may_be_one_file_share_a_lock() -> None:
    """Not every filesystem tells upper case from lower case."""
    for row in TABLE:
        one, other = (LAYOUT.locate(row.key.replace("{name}", name)) for name in ("nightly", "Nightly"))
        assert one.lock.lower() == other.lock.lower()


def test_every_row_has_its_own_path() -> None:
    places = [LAYOUT.locate(row.key.replace("{name}", "member")) for row in TABLE]

    assert len({place.path for place in places}) == len(TABLE) == len({row.key for row in TABLE})
    assert not {place.path for place in places} & {place.lock for place in places}
    assert all(not place.path.startswith("/") and ".." not in place.path for place in places)


def test_the_numbers_of_a_stream_are_padded_and_may_grow_longer() -> None:
    place = LAYOUT.locate("ledger/events")

    assert place.kind is Kind.NUMBERED
    assert [place.numbered(each) for each in (1, 999_999, 1_000_000, 12_345_678)] == [
        "event-000001.json",
        "event-999999.json",
        "event-1000000.json",
        "event-12345678.json",
    ]


@pytest.mark.parametrize("key", ["", "jit", "jit/issues", "jit/issue/a", "jit/index/a", "nowhere/at/all"])
def test_a_key_outside_the_table_is_refused(key: str) -> None:
    with pytest.raises(UsageFailure):
        LAYOUT.locate(key)


@pytest.mark.parametrize("member", ["", "..", "a..b", "a\0b", "a b", "x" * 129])
def test_a_member_with_an_invalid_name_is_refused(member: str) -> None:
    with pytest.raises(NameInvalid):
        LAYOUT.locate(f"jit/issues/{member}")


def test_a_stream_cannot_be_used_as_a_document_or_a_document_as_a_stream(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        for attempt in (
            lambda: store.read(Key("jit/events", INDEX.codec)),
            lambda: store.transact([Key("ledger/events", INDEX.codec)], _nothing),
            lambda: list(store.entries(Stream("jit/index", EVENTS.codec))),
            lambda: store.transact([Stream("jit/issues/a", EVENTS.codec)], _nothing),
        ):
            with pytest.raises(UsageFailure):
                attempt()


def _nothing(view: View, now: float) -> Decision[None]:
    return Decision([], None)


# --- Lock order --------------------------------------------------------------------------------------------

NAMED: list[Key[Item] | Stream[Event]] = [
    INDEX,
    GATES,
    *(ISSUES.key(each) for each in ("a", "a-b", "a.b", "ab", "b")),
    EVENTS,
]
LOCKS = [
    *(".jit/.index.lock", ".jit/.gates.lock"),
    *(f".jit/issues/{each}.lock" for each in ("a", "a-b", "a.b", "ab", "b")),  # by ID, not by file name
    ".jit/.events.lock",
]


def test_members_that_share_a_lock_share_its_rank() -> None:
    for one, other in [
        ("jvs/worktrees/w", "jvs/leases/w"),
        ("jvs/tokens/w", "jvs/queues/w"),
        ("jvs/refs/r", "jvs/pins/p"),
    ]:
        assert LAYOUT.locate(one).lock == LAYOUT.locate(other).lock
        assert LAYOUT.locate(one).rank == LAYOUT.locate(other).rank

    places = [LAYOUT.locate(f"jvs/descriptors/{each}") for each in range(2000)]
    by_rank = {place.rank: place.lock for place in places}
    assert len(by_rank) == len({place.lock for place in places}) == 64
    assert all(by_rank[place.rank] == place.lock for place in places)


@pytest.mark.req("FL-06")
def test_locks_are_taken_in_one_order_however_the_keys_are_named(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = DocumentLocks._take

    def note(locks: DocumentLocks, lock: str, *, shared: bool) -> Any:
        taken.append(lock)
        return take(locks, lock, shared=shared)

    with FileStore(scratch) as store:
        store.transact(NAMED, _nothing)
        monkeypatch.setattr(DocumentLocks, "_take", note)
        for _ in range(20):
            taken.clear()
            named = random.sample(NAMED, len(NAMED))
            store.transact(named * 2, _nothing)
            assert taken == LOCKS

            taken.clear()
            store.read_together([each for each in named if isinstance(each, Key)])
            assert taken == LOCKS[:-1]


ROUNDS = 200


def _count_up(view: View, now: float) -> Decision[None]:
    changes: list[Change] = [Append(EVENTS, Event(0))]
    for each in NAMED:
        if isinstance(each, Key):
            there = view.get(each)
            number = 0 if there is None else there.number
            changes.append((Create if there is None else Replace)(each, Item(number + 1)))
    return Decision(changes, None)


def compete(directory: Path, *, timeout: float, rounds: int) -> None:
    """Run processes that name the same keys in opposite and random orders, in rounds that start together."""
    if sys.platform == "win32":
        pytest.skip("there is no fork on Windows")
    orders = [NAMED, NAMED[::-1], random.sample(NAMED, len(NAMED)), random.sample(NAMED, len(NAMED))]
    barrier = multiprocessing.get_context("fork").Barrier(len(orders))

    def work(line: Line) -> None:
        order = orders[line.hear()]
        try:
            with FileStore(directory, timeout=timeout) as store:
                for _ in range(rounds):
                    barrier.wait(PATIENCE)
                    store.transact(order, _count_up)
            line.say("done")
        except threading.BrokenBarrierError:
            line.say("another process failed")
        except BaseException:
            barrier.abort()
            raise

    with Workers() as workers:
        started = workers.start_many(len(orders), work)
        for each, worker in enumerate(started):
            worker.say(each)
        assert [worker.hear() for worker in started] == ["done"] * len(orders)


@pytest.mark.req("FL-06")
def test_processes_that_name_keys_in_opposite_orders_never_deadlock(scratch: Path) -> None:
    compete(scratch, timeout=PATIENCE, rounds=ROUNDS)

    with FileStore(scratch) as store:
        assert {number_of(store, each) for each in NAMED if isinstance(each, Key)} == {4 * ROUNDS}
        assert len(list(store.entries(EVENTS))) == 4 * ROUNDS


def test_locks_taken_in_the_order_of_naming_would_be_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def as_named(locks: DocumentLocks, places: Iterable[Location], *, shared: bool = False) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for place in places:
                held.enter_context(locks._lock(place.lock, shared=shared))
            yield

    monkeypatch.setattr(DocumentLocks, "locked", as_named)
    with pytest.raises(AssertionError, match=LockTimeout.__name__):
        compete(scratch, timeout=0.3, rounds=ROUNDS)
