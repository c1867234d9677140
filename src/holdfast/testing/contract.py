"""The store contract: documents and limits. The other `contract_*` modules test the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from holdfast.errors import AlreadyExists, Corrupt, Failure, LockConflict, NameInvalid, NotFound, TooLarge, UsageFailure
from holdfast.store import model
from holdfast.store.model import Append, Create, Decision, Delete, Key, Replace, Store, View
from holdfast.testing import backend
from holdfast.testing.backend import AUDIT, EVENTS, GATES, INDEX, ISSUES, ONE, STREAMS, TWO, Backend, Event, Item
from holdfast.testing.contract_changes import ChangesContract
from holdfast.testing.contract_isolation import IsolationContract, OutcomesContract
from holdfast.testing.contract_streams import StreamsContract, WatchingContract

DIFFICULT = 'Grüße, 世界 \U0001f980 " \\ \n\r\t\0 \u2028 </script>'

REFUSED: dict[str, tuple[model.Change, type[Failure]]] = {
    "create an existing document": (Create(ONE, Item(9)), AlreadyExists),
    "replace a missing document": (Replace(TWO, Item(9)), NotFound),
    "delete a missing document": (Delete(TWO), NotFound),
    "change a document twice": (Replace(INDEX, Item(9)), UsageFailure),
    "delete a document that is also changed": (Delete(INDEX), UsageFailure),
    "a document that was not named": (Create(GATES, Item(9)), UsageFailure),
    "a stream that was not named": (Append(AUDIT, Event(9)), UsageFailure),
}
MEBIBYTE = 1 << 20
BATCH = 1000

INVALID_NAMES = ["", ".", "..", "a..b", "a/b", "/a", "a\\b", "a\0b", "a\nb", "a b", "é", "e\u0301", "*", "x" * 129]

DAMAGE = {
    "nothing": b"",
    "not JSON": b"{",
    "another type": b"[]",
    "a field of another type": b'{"number": "1"}',
    "a field is missing": b'{"text": ""}',
    "a key twice": b'{"number": 1, "number": 2}',
    "NaN": b'{"number": NaN}',
    "not UTF-8": b'{"number": 1, "text": "\xff"}',
    "trailing content": b'{"number": 1}\n{"number": 2}\n',
}


def record_of(document: model.Document[Item] | None) -> Item | None:
    return None if document is None else document.record


class DocumentsContract(Backend):
    """Creating, replacing, deleting and scanning documents; decisions; refused changes."""

    def test_a_store_is_healthy_and_a_closed_client_affects_no_other(self, store: Store) -> None:
        assert store.trouble is None
        assert 0 <= store.skew < 60
        assert store.files is None or store.files.unfinished_commits() == []
        with self.client(store) as other:
            backend.apply(other, Create(ONE, Item(1)))
        assert backend.increment(store, ONE) == 2

    def test_a_document_that_was_never_created_is_none(self, store: Store) -> None:
        assert store.read(ONE) is None
        assert store.read_together([ONE, INDEX]).get(ONE) is None
        assert list(store.scan(ISSUES)) == []

    @pytest.mark.parametrize(
        "key", [INDEX, ONE, backend.DESCRIPTORS.key("d"), backend.WORKTREES.key("w")], ids=lambda key: str(key.name)
    )
    def test_every_client_sees_documents_created_replaced_and_deleted(self, store: Store, key: Key[Item]) -> None:
        with self.client(store) as other:
            backend.apply(store, Create(key, Item(1, DIFFICULT)))
            assert record_of(other.read(key)) == Item(1, DIFFICULT)

            backend.apply(other, Replace(key, Item(2)))
            assert record_of(store.read(key)) == Item(2)

            backend.apply(store, Delete(key))
            assert other.read(key) is None

            backend.apply(other, Create(key, Item(3)))
            assert record_of(store.read(key)) == Item(3)

    def test_several_changes_are_committed_together(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
        backend.apply(store, Replace(INDEX, Item(2)), Delete(ONE), Create(TWO, Item(2)), Append(EVENTS, Event(2)))

        with self.client(store) as other:
            seen = other.read_together([INDEX, ONE, TWO])
            assert (seen.get(INDEX), seen.get(ONE), seen.get(TWO)) == (Item(2), None, Item(2))
            assert [each.record for each in other.entries(EVENTS)] == [Event(2)]

    @pytest.mark.parametrize("reason", REFUSED)
    def test_an_invalid_change_is_refused_and_nothing_is_committed(self, store: Store, reason: str) -> None:
        change, failure = REFUSED[reason]
        backend.apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))

        changes = [Append(EVENTS, Event(2)), Replace(INDEX, Item(2)), change]

        with pytest.raises(failure):
            store.transact([ONE, TWO, INDEX, EVENTS], lambda view, now: Decision(changes, None))

        self._assert_untouched(store)

    def _assert_untouched(self, store: Store) -> None:
        with self.client(store) as other:
            for each in (store, other):
                assert {name: document.record for name, document in each.scan(ISSUES)} == {"one": Item(1)}
                assert record_of(each.read(INDEX)) == Item(1)
                assert each.read(GATES) is None
                assert list(each.entries(EVENTS)) == list(each.entries(AUDIT)) == []

    @pytest.mark.parametrize("problem", [LockConflict("not now"), KeyError("a bug")], ids=["failure", "bug"])
    def test_a_decision_that_raises_changes_nothing(self, store: Store, problem: Exception) -> None:
        backend.apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))

        def decide(view: View, now: float) -> Decision[None]:
            raise problem

        with pytest.raises(type(problem)) as raised:
            store.transact([ONE, INDEX, EVENTS], decide)

        assert raised.value is problem
        self._assert_untouched(store)
        assert backend.increment(store, ONE) == 2

    def test_a_decision_sees_the_named_documents_and_no_others(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        expected = store.read(ONE)

        def decide(view: View, now: float) -> Decision[None]:
            assert view.document(ONE) == expected
            assert view.get(ONE) == Item(1)
            assert view.get(TWO) is None
            assert view.document(TWO) is None
            with pytest.raises(UsageFailure):
                view.get(INDEX)
            return Decision([], None)

        assert store.transact([ONE, TWO, ONE], decide).positions == ()

    def test_a_decision_gets_the_time_of_the_store(self, store: Store) -> None:
        seen: list[float] = []

        def decide(view: View, now: float) -> Decision[None]:
            seen.append(now)
            return Decision([Create(ONE, Item(1))], None)

        before = store.now()
        commit = store.transact([ONE], decide)

        assert commit.at == seen[-1]
        assert before <= commit.at <= store.now()

    def test_the_result_is_that_of_the_committed_decision(self, store: Store) -> None:
        runs: list[int] = []

        def decide(view: View, now: float) -> Decision[int]:
            runs.append(len(runs))  # a store may call `decide` more than once; the last call counts
            return Decision([Create(ONE, Item(runs[-1]))], runs[-1])

        assert store.transact([ONE], decide).result == runs[-1] == backend.number_of(store, ONE)

    def test_a_transaction_inside_a_decision_is_refused(self, store: Store) -> None:
        def decide(view: View, now: float) -> Decision[None]:
            with pytest.raises(UsageFailure):
                backend.apply(store, Create(TWO, Item(1)))
            return Decision([Create(ONE, Item(1))], None)

        store.transact([ONE], decide)

        assert record_of(store.read(ONE)) == Item(1)
        assert store.read(TWO) is None
        backend.apply(store, Create(TWO, Item(2)))  # transactions work again afterwards

    def test_a_decision_may_read_from_the_store(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        store.transact([TWO], lambda view, now: Decision([Create(TWO, Item(backend.number_of(store, ONE)))], None))

        assert record_of(store.read(TWO)) == Item(1)

    def test_a_decision_without_changes_is_a_commit_too(self, store: Store) -> None:
        commit = store.transact([ONE], lambda view, now: Decision([], "seen"))

        assert commit.result == "seen"
        assert store.read(ONE) is None

    def test_a_commit_has_the_given_id_or_a_unique_one(self, store: Store) -> None:
        given = store.transact(
            [ONE, INDEX],
            lambda view, now: Decision([Create(ONE, Item(1)), Create(INDEX, Item(1))], None),
            commit_id="4f1c-9",
        )
        own = {backend.apply(store, Replace(ONE, Item(each))).id for each in range(5)}

        assert given.id == "4f1c-9"
        assert len(own) == 5

    @pytest.mark.parametrize("commit_id", ["", "..", "../escaped", "a/b", "a\0b"], ids=ascii)
    def test_a_commit_id_that_is_not_a_safe_name_is_refused(self, store: Store, commit_id: str) -> None:
        with pytest.raises(UsageFailure):
            store.transact(
                [ONE, INDEX],
                lambda view, now: Decision([Create(ONE, Item(1)), Create(INDEX, Item(1))], None),
                commit_id=commit_id,
            )
        assert store.read(ONE) is None

    def test_different_records_have_different_versions(self, store: Store) -> None:
        versions = []
        for number in range(5):
            backend.increment(store, ONE)
            document = store.read(ONE)
            assert document is not None
            assert document.record.number == number + 1
            versions.append(document.version)

        assert len(set(versions)) == 5

    def test_a_state_has_the_same_version_however_it_is_read(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        with self.client(store) as other:
            document = store.read(ONE)

            assert other.read(ONE) == document
            assert store.read_together([ONE]).document(ONE) == document
            assert dict(other.scan(ISSUES)) == {"one": document}

    def test_a_scan_returns_the_members_of_a_family_in_order(self, store: Store) -> None:
        names = ["b", "a", "a-b", "A", "10", "9", "a.b", "_"]
        backend.apply(store, *(Create(ISSUES.key(each), Item(1, each)) for each in names))
        backend.apply(store, Create(backend.DESCRIPTORS.key("other"), Item(2)), Create(INDEX, Item(3)))
        backend.apply(store, Delete(ISSUES.key("9")))

        found = list(store.scan(ISSUES))

        assert [name for name, _ in found] == sorted(set(names) - {"9"})
        assert all(document.record.text == name for name, document in found)
        names = [name for name, _ in found]
        for after in (*names, "", "0", "zz"):
            assert [name for name, _ in store.scan(ISSUES, after=after)] == [each for each in names if each > after]
        assert [name for name, _ in store.scan(backend.DESCRIPTORS)] == ["other"]

    def test_members_may_be_named_like_files_of_the_store(self, store: Store) -> None:
        names = ["index", ".index", "a.json", "a.lock", "a.tmp", ".a-0123456789ab.tmp", "config.json", "-"]
        names.append("x" * 128)
        for family in (ISSUES, backend.WORKTREES, backend.DESCRIPTORS):
            for each in names:
                backend.apply(store, Create(family.key(each), Item(1, each)))

            assert [(name, each.record.text) for name, each in store.scan(family)] == [
                (name, name) for name in sorted(names)
            ]


def _read_all(store: Store) -> list[Item]:
    return [each.record for _, each in store.scan(ISSUES)]


class LimitsContract(Backend):
    """Large records, many documents, invalid names and records, damage."""

    def test_a_large_record_round_trips(self, store: Store) -> None:
        text = "0123456789abcdé\n" * (MEBIBYTE // 16)
        backend.apply(store, Create(ONE, Item(1, text)))
        backend.apply(store, Create(TWO, Item(2, text)), *(Append(stream, Event(3, text)) for stream in STREAMS))

        with self.client(store) as other:
            assert [each.record for _, each in other.scan(ISSUES)] == [Item(1, text), Item(2, text)]
            for stream in STREAMS:
                assert [each.record for each in other.entries(stream)] == [Event(3, text)]

    def test_a_record_may_be_as_large_as_the_limit_but_no_larger(self, store: Store) -> None:
        room = model.MOST_BYTES - len(ONE.codec.encode(Item(1, "")))
        backend.apply(store, Create(ONE, Item(1, "x" * room)))
        assert backend.number_of(store, ONE) == 1

        with pytest.raises(TooLarge):
            backend.apply(store, Replace(ONE, Item(2, "x" * (room + 1))))
        assert backend.number_of(store, ONE) == 1

    @pytest.mark.parametrize("beside", ["a document", "a stream"])
    def test_a_commit_that_is_too_large_writes_nothing(self, store: Store, beside: str) -> None:
        text = "x" * model.MOST_BYTES
        large = Append(EVENTS, Event(1, text)) if beside == "a stream" else Create(TWO, Item(1, text))
        with pytest.raises(TooLarge):
            backend.apply(store, Create(ONE, Item(1)), large)

        assert list(store.scan(ISSUES)) == []
        assert list(store.entries(EVENTS)) == []

    def test_many_documents_are_created_found_read_and_changed(self, store: Store) -> None:
        started = self.seconds()
        for first in range(0, self.many, BATCH):
            some = range(first, min(first + BATCH, self.many))
            backend.apply(store, *(Create(backend.DESCRIPTORS.key(f"{each:08d}"), Item(each)) for each in some))
        with self.client(store) as other:
            assert [each.record.number for _, each in other.scan(backend.DESCRIPTORS)] == list(range(self.many))
            middle = backend.DESCRIPTORS.key(f"{self.many // 2:08d}")
            assert backend.increment(other, middle) == self.many // 2 + 1
            assert backend.number_of(store, middle) == self.many // 2 + 1

        assert self.seconds() - started <= self.many_within

    @pytest.mark.parametrize("name", INVALID_NAMES, ids=ascii)
    def test_an_invalid_name_is_refused(self, store: Store, name: str) -> None:
        with pytest.raises(NameInvalid):
            store.read(ISSUES.key(name))
        if "/" not in name:
            with pytest.raises(NameInvalid):
                backend.apply(store, Create(Key(f"jit/issues/{name}", ONE.codec), Item(1)))

        assert list(store.scan(ISSUES)) == []

    @pytest.mark.parametrize(
        "record",
        [Item("1"), Item(1.5), Item(1, "\ud800"), object()],  # type: ignore[arg-type]
        ids=["text for a number", "a fraction", "half a surrogate pair", "not a record"],
    )
    def test_a_record_that_would_not_round_trip_is_refused(self, store: Store, record: Any) -> None:
        backend.apply(store, Create(ONE, Item(1)), Create(INDEX, Item(1)))
        with pytest.raises(UsageFailure):
            backend.apply(store, Replace(INDEX, Item(2)), Replace(ONE, record))
        with pytest.raises(UsageFailure):
            backend.apply(store, Replace(INDEX, Item(2)), Append(EVENTS, record))

        assert (backend.number_of(store, ONE), backend.number_of(store, INDEX)) == (1, 1)
        assert list(store.entries(EVENTS)) == []

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_document_is_reported_by_name_and_not_overwritten(self, store: Store, damage: str) -> None:
        backend.apply(store, Create(ONE, Item(1)), Create(TWO, Item(2)), Create(INDEX, Item(3)))
        good = self.stored(store, ONE)
        self.damage(store, ONE, DAMAGE[damage])
        with self.client(store) as other:
            for each in (store, other):
                for attempt in (
                    partial(each.read, ONE),
                    partial(each.read_together, [INDEX, ONE]),
                    partial(_read_all, each),
                    partial(backend.apply, each, Replace(ONE, Item(4))),
                    partial(backend.apply, each, Replace(INDEX, Item(4)), Replace(ONE, Item(4))),
                    partial(each.transact, [ONE, INDEX], lambda view, now: Decision([], None)),
                ):
                    with pytest.raises(Corrupt, match="one"):
                        attempt()

            scanned = dict(other.scan(ISSUES.tolerant()))
            assert isinstance(scanned["one"].record, model.Unreadable)
            assert "one" in scanned["one"].record.failure.message
            assert scanned["two"].record == Item(2)
            assert self.stored(store, ONE) == DAMAGE[damage]
            assert (backend.number_of(other, TWO), backend.number_of(other, INDEX)) == (2, 3)
            assert backend.increment(other, TWO) == 3

            self.damage(store, ONE, good)
            assert backend.number_of(other, ONE) == 1


class StoreContract(
    DocumentsContract,
    IsolationContract,
    StreamsContract,
    ChangesContract,
    WatchingContract,
    OutcomesContract,
    LimitsContract,
):
    """The whole contract."""
