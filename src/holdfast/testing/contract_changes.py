"""The contract for the changes of a family since a cursor."""

from __future__ import annotations

import random
from functools import partial

import pytest

from holdfast.store.model import Append, Change, Create, Delete, Document, Family, Replace, Store
from holdfast.testing import backend
from holdfast.testing.backend import EVENTS, INDEX, ISSUES, ONE, TWO, WORKTREES, Backend, Event, Item

STEPS = 60
WRITERS = 4


class FamilyCopy:
    """A copy of a family, kept up to date with `Store.changes`."""

    def __init__(self, store: Store, family: Family[Item] = ISSUES) -> None:
        self._store, self._family = store, family
        self.cursor = b""
        self.members: dict[str, Document[Item]] = {}

    def catch_up(self) -> dict[str, Document[Item]]:
        changes = self._store.changes(self._family, self.cursor)
        if changes.is_whole:
            self.members = {}
        self.members |= changes.changed
        for name in changes.removed:
            self.members.pop(name, None)
        self.cursor = changes.cursor
        return self.members


def increment_members(store: Store, count: int, times: int, seed: int) -> None:
    """Increment random members of a family."""
    chance = random.Random(seed)
    for _ in range(times):
        key = ISSUES.key(f"member-{chance.randrange(count)}")
        backend.increment(store, key, EVENTS)


class ChangesContract(Backend):
    """The changes of a family since a cursor."""

    @pytest.mark.parametrize("family", [ISSUES, WORKTREES], ids=lambda family: str(family.name))
    def test_without_a_cursor_every_member_is_returned(self, store: Store, family: Family[Item]) -> None:
        assert store.changes(family).changed == {}
        backend.apply(store, Create(family.key("b"), Item(2)), Create(family.key("a"), Item(1)), Create(INDEX, Item(3)))
        with self.client(store) as other:
            found = other.changes(family)
        assert found.is_whole
        assert found.changed == dict(store.scan(family))
        assert found.removed == frozenset()

    @pytest.mark.parametrize("family", [ISSUES, WORKTREES], ids=lambda family: str(family.name))
    def test_with_a_cursor_later_changes_are_returned(self, store: Store, family: Family[Item]) -> None:
        kept, replaced, deleted, new = map(family.key, ("kept", "replaced", "deleted", "new"))
        backend.apply(store, *(Create(each, Item(1)) for each in (kept, replaced, deleted)))
        cursor = store.changes(family).cursor
        with self.client(store) as other:
            backend.apply(other, Replace(replaced, Item(2)), Delete(deleted), Create(new, Item(1)))
            backend.apply(other, Create(INDEX, Item(1)), Append(EVENTS, Event(1)))
        found = store.changes(family, cursor)
        assert not found.is_whole
        assert found.changed.keys() - {"kept"} == {"replaced", "new"}  # more may be returned than changed
        assert found.changed["replaced"] == store.read(replaced)
        assert found.removed == {"deleted"}

    def test_a_deleted_member_that_is_created_again_is_a_change(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        cursor = store.changes(ISSUES).cursor
        backend.apply(store, Delete(ONE))
        gone = store.changes(ISSUES, cursor)
        assert (len(gone.changed), gone.removed) == (0, frozenset({"one"}))
        backend.apply(store, Create(ONE, Item(1)))
        assert store.changes(ISSUES, gone.cursor).changed == {"one": store.read(ONE)}
        back = store.changes(ISSUES, cursor)
        assert back.changed == {"one": store.read(ONE)}
        assert back.removed == frozenset()

    @pytest.mark.parametrize("cursor", [b"x", b"\0" * 100, b"999999999999 1.5 2", b"12 " + b"f" * 32, b"\xff\xfe"])
    def test_an_unknown_cursor_counts_as_none(self, store: Store, cursor: bytes) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        found = store.changes(ISSUES, cursor)
        assert found.is_whole
        assert found.changed == {"one": store.read(ONE)}

    def test_the_time_is_that_of_the_store(self, store: Store) -> None:
        before = store.now()
        assert before <= store.changes(ISSUES).at <= store.now()

    def test_documents_read_each_are_current(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)), Append(EVENTS, Event(1)))
        view = store.read_each([ONE, TWO])
        assert view.document(ONE) == store.read(ONE)
        assert view.document(TWO) is None

    def test_a_random_history_is_followed_exactly(self, store: Store) -> None:
        chance, follower = random.Random(20), FamilyCopy(store)
        names = [f"member-{each}" for each in range(8)]
        for _ in range(STEPS):
            known = dict(store.scan(ISSUES))
            for name in chance.sample(names, chance.randrange(3)):
                key, item = ISSUES.key(name), Item(chance.randrange(10))
                change: Change = Create(key, item) if name not in known else Replace(key, item)
                backend.apply(store, Delete(key) if name in known and chance.random() < 0.3 else change)
            if chance.random() < 0.7:
                assert follower.catch_up() == dict(store.scan(ISSUES))

    def test_no_change_of_concurrent_writers_is_missed(self, store: Store) -> None:
        follower = FamilyCopy(store)
        done: list[bool] = []

        def follow() -> None:
            while not done:
                follower.catch_up()

        def write(seed: int) -> None:
            with self.client(store) as own, self.disturbed():
                increment_members(own, 6, 15, seed)
            if seed == 0:
                done.append(True)

        backend.run_threads(follow, *(partial(write, seed) for seed in range(WRITERS)))
        assert follower.catch_up() == dict(store.scan(ISSUES))
