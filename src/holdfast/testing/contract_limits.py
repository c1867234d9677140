"""Limits: big documents, many documents, strange names, strange records, damage."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from holdfast.errors import Corrupt, NameInvalid, TooLarge, UsageFailure
from holdfast.store.model import MOST_BYTES, Append, Create, Decision, Key, Replace, Store, Unreadable
from holdfast.testing.backend import (
    DESCRIPTORS,
    EVENTS,
    INDEX,
    ISSUES,
    STREAMS,
    Backend,
    Event,
    Item,
    apply,
    increment,
    number_of,
)

ONE = ISSUES.key("one")
TWO = ISSUES.key("two")
MEBIBYTE = 1 << 20
BATCH = 1000

STRANGE = ["", ".", "..", "a..b", "a/b", "/a", "a\\b", "a\0b", "a\nb", "a b", "é", "e\u0301", "*", "x" * 129]

DAMAGE = {
    "nothing": b"",
    "not JSON": b"{",
    "another type": b"[]",
    "a field of another type": b'{"number": "1"}',
    "a field is missing": b'{"text": ""}',
    "a key twice": b'{"number": 1, "number": 2}',
    "NaN": b'{"number": NaN}',
    "not UTF-8": b'{"number": 1, "text": "\xff"}',
    "something behind it": b'{"number": 1}\n{"number": 2}\n',
}


def _encoded_size(item: Item) -> int:
    return len(ONE.codec.encode(item))


def _read_all(store: Store) -> list[Item]:
    return [each.record for _, each in store.scan(ISSUES)]


class LimitsContract(Backend):
    """Limits."""

    # --- Big and many -------------------------------------------------------------------------------------

    def test_a_big_record_comes_back_whole(self, store: Store) -> None:
        text = "0123456789abcdé\n" * (MEBIBYTE // 16)
        apply(store, Create(ONE, Item(1, text)))
        apply(store, Create(TWO, Item(2, text)), *(Append(stream, Event(3, text)) for stream in STREAMS))

        with self.client(store) as other:
            assert [each.record for _, each in other.scan(ISSUES)] == [Item(1, text), Item(2, text)]
            for stream in STREAMS:
                assert [each.record for each in other.entries(stream)] == [Event(3, text)]

    def test_a_record_may_be_as_large_as_the_limit_and_not_larger(self, store: Store) -> None:
        room = MOST_BYTES - _encoded_size(Item(1, ""))
        apply(store, Create(ONE, Item(1, "x" * room)))
        assert number_of(store, ONE) == 1

        with pytest.raises(TooLarge):
            apply(store, Replace(ONE, Item(2, "x" * (room + 1))))
        assert number_of(store, ONE) == 1

    @pytest.mark.parametrize("beside", ["a document", "a stream"])
    def test_of_a_commit_that_is_too_large_nothing_is_written(self, store: Store, beside: str) -> None:
        text = "x" * MOST_BYTES
        large = Append(EVENTS, Event(1, text)) if beside == "a stream" else Create(TWO, Item(1, text))
        with pytest.raises(TooLarge):
            apply(store, Create(ONE, Item(1)), large)

        assert list(store.scan(ISSUES)) == []
        assert list(store.entries(EVENTS)) == []

    def test_many_documents_are_created_found_read_and_changed(self, store: Store) -> None:
        started = self.seconds()
        for first in range(0, self.many, BATCH):
            some = range(first, min(first + BATCH, self.many))
            apply(store, *(Create(DESCRIPTORS.key(f"{each:08d}"), Item(each)) for each in some))
        with self.client(store) as other:
            assert [each.record.number for _, each in other.scan(DESCRIPTORS)] == list(range(self.many))
            middle = DESCRIPTORS.key(f"{self.many // 2:08d}")
            assert increment(other, middle) == self.many // 2 + 1
            assert number_of(store, middle) == self.many // 2 + 1

        assert self.seconds() - started <= self.many_within

    # --- Strange ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", STRANGE, ids=ascii)
    def test_a_strange_name_is_refused(self, store: Store, name: str) -> None:
        with pytest.raises(NameInvalid):
            store.read(ISSUES.key(name))
        if "/" not in name:
            with pytest.raises(NameInvalid):
                apply(store, Create(Key(f"jit/issues/{name}", ONE.codec), Item(1)))

        assert list(store.scan(ISSUES)) == []

    @pytest.mark.parametrize(
        "record",
        [Item("1"), Item(1.5), Item(1, "\ud800"), object()],  # type: ignore[arg-type]
        ids=["text for a number", "a fraction", "half a character", "no record at all"],
    )
    def test_a_record_that_would_not_come_back_is_refused(self, store: Store, record: Any) -> None:
        apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
        with pytest.raises(UsageFailure):
            apply(store, Replace(INDEX, Item(2)), Replace(ONE, record))
        with pytest.raises(UsageFailure):
            apply(store, Replace(INDEX, Item(2)), Append(EVENTS, record))

        assert (number_of(store, ONE), number_of(store, INDEX)) == (1, 1)
        assert list(store.entries(EVENTS)) == []

    # --- Damage -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_document_is_reported_with_its_place_and_not_overwritten(
        self, store: Store, damage: str
    ) -> None:
        apply(store, Create(ONE, Item(1)), Create(TWO, Item(2)), Create(INDEX, Item(3)))
        good = self.stored(store, ONE)
        self.damage(store, ONE, DAMAGE[damage])
        with self.client(store) as other:
            for each in (store, other):
                for attempt in (
                    partial(each.read, ONE),
                    partial(each.read_together, [INDEX, ONE]),
                    partial(_read_all, each),
                    partial(apply, each, Replace(ONE, Item(4))),
                    partial(apply, each, Replace(INDEX, Item(4)), Replace(ONE, Item(4))),
                    partial(each.transact, [ONE, INDEX], lambda view, now: Decision([], None)),
                ):
                    with pytest.raises(Corrupt, match="one"):
                        attempt()

            told = dict(other.scan(ISSUES.tolerant()))
            assert isinstance(told["one"].record, Unreadable)
            assert "one" in told["one"].record.failure.message
            assert told["two"].record == Item(2)
            assert self.stored(store, ONE) == DAMAGE[damage]
            assert (number_of(other, TWO), number_of(other, INDEX)) == (2, 3)
            assert increment(other, TWO) == 3

            self.damage(store, ONE, good)
            assert number_of(other, ONE) == 1
