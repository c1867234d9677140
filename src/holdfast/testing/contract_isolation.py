"""The contract for isolation (transactions and reads behave as if run one after the other) and for lost answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest

from holdfast.errors import AlreadyExists, Failure, OutcomeUnknown, StoreMoved
from holdfast.store.model import Append, Change, Create, Decision, Delete, Key, Replace, Store, Stream, View
from holdfast.testing import backend
from holdfast.testing.backend import EVENTS, GATES, INDEX, ISSUES, LEDGER, ONE, TWO, Backend, Event, Item, Task, When

CLIENTS = 8
ROUNDS = 25
FEW = 12


class IsolationContract(Backend):
    """Isolation between threads and between processes."""

    def test_threads_that_increment_lose_no_update(self, store: Store) -> None:
        with self.clients(store, CLIENTS) as clients, self.disturbed():
            counted = backend.run_threads(*(partial(backend.increment_often, c, ONE, None, FEW) for c in clients))

        assert sorted(chain.from_iterable(counted)) == list(range(1, CLIENTS * FEW + 1))
        assert backend.number_of(store, ONE) == CLIENTS * FEW

    def test_threads_that_share_one_client_lose_no_update(self, store: Store) -> None:
        with self.disturbed():
            counted = backend.run_threads(*[partial(backend.increment_often, store, ONE, EVENTS, FEW)] * 4)

        assert sorted(chain.from_iterable(counted)) == list(range(1, 4 * FEW + 1))
        assert [each.record.number for each in store.entries(EVENTS)] == list(range(1, 4 * FEW + 1))

    def test_exactly_one_thread_wins_each_swap(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(0)))
        with self.clients(store, CLIENTS) as clients, self.disturbed():
            won = backend.run_threads(*(partial(backend.swap_rounds, c, ONE, FEW, "") for c in clients))

        assert sorted(chain.from_iterable(won)) == list(range(FEW))
        assert backend.number_of(store, ONE) == FEW

    def test_exactly_one_thread_creates_each_document(self, store: Store) -> None:
        def create(client: Store) -> int:
            won = 0
            for each in range(FEW):
                try:
                    backend.apply(client, Create(ISSUES.key(f"new-{each}"), Item(each)))
                    won += 1
                except AlreadyExists:
                    pass
            return won

        with self.clients(store, 4) as clients, self.disturbed():
            won = backend.run_threads(*(partial(create, c) for c in clients))

        assert sum(won) == FEW == len(list(store.scan(ISSUES)))

    def test_processes_that_increment_and_swap_lose_no_update(self, store: Store) -> None:
        backend.apply(store, Create(TWO, Item(0)))
        tasks = [Task(backend.increment_often, (ONE, EVENTS, ROUNDS)) for _ in range(CLIENTS // 2)]
        tasks += [Task(backend.swap_rounds, (TWO, ROUNDS, str(each))) for each in range(CLIENTS // 2)]
        answers = self.elsewhere(store, *tasks)

        counted, won = list(chain(*answers[: CLIENTS // 2])), list(chain(*answers[CLIENTS // 2 :]))
        assert sorted(counted) == list(range(1, CLIENTS // 2 * ROUNDS + 1))
        assert sorted(won) == list(range(ROUNDS))
        assert backend.number_of(store, ONE) == len(counted)
        assert backend.number_of(store, TWO) == ROUNDS
        assert [each.record.number for each in store.entries(EVENTS)] == list(range(1, len(counted) + 1))

    def test_a_refused_change_is_never_visible(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)))
        done = threading.Event()

        def refuse(client: Store) -> None:
            for _ in range(ROUNDS):
                with pytest.raises(AlreadyExists):
                    backend.apply(client, Replace(ONE, Item(-1)), Create(TWO, Item(-1)))
            done.set()

        def look(client: Store) -> None:
            while not done.is_set():
                assert (backend.number_of(client, ONE), backend.number_of(client, TWO)) == (1, 1)

        with self.clients(store, 2) as (first, second), self.disturbed():
            backend.run_threads(partial(refuse, first), partial(look, second))

    def test_write_skew_cannot_break_a_constraint_on_two_documents(self, store: Store) -> None:
        def leave(client: Store, mine: Key[Item]) -> None:
            def decide(view: View, now: float) -> Decision[None]:
                both = [view.get(key) for key in (ONE, TWO)]
                if sum(each.number for each in both if each) < 2:
                    return Decision([], None)  # the other one has left, so this one stays
                return Decision([Replace(mine, Item(0))], None)

            client.transact([ONE, TWO], decide)

        backend.apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)))
        with self.clients(store, 2) as (first, second), self.disturbed():
            for _ in range(FEW):
                backend.run_threads(partial(leave, first, ONE), partial(leave, second, TWO))
                assert sum(backend.number_of(store, key) for key in (ONE, TWO)) == 1
                backend.apply(store, Replace(ONE, Item(1)), Replace(TWO, Item(1)))

    @pytest.mark.parametrize("count", [2, 5, 10])
    def test_documents_read_together_are_consistent(self, store: Store, count: int) -> None:
        keys = backend.accounts(count)
        backend.apply(store, *(Create(key, Item(100)) for key in keys))
        with self.clients(store, 4) as clients, self.disturbed():
            writing = [partial(backend.transfer_around, c, keys, ROUNDS) for c in clients[:2]]
            reading = [partial(backend.sums_seen, c, keys, ROUNDS) for c in clients[2:]]
            _, _, *seen = backend.run_threads(*writing, *reading)

        assert seen == [{100 * count}] * 2

    def test_documents_read_together_are_consistent_across_processes(self, store: Store) -> None:
        keys = backend.accounts(4)
        backend.apply(store, *(Create(key, Item(100)) for key in keys))
        tasks = [Task(backend.transfer_around, (keys, 4 * ROUNDS)) for _ in range(2)]
        tasks += [Task(backend.sums_seen, (keys, 4 * ROUNDS)) for _ in range(2)]

        assert self.elsewhere(store, *tasks)[2:] == [{400}, {400}]

    def test_a_commit_seen_in_one_document_is_seen_in_all(self, store: Store) -> None:
        """This holds for single reads too: once one document shows a commit, all later reads show it."""
        keys = [INDEX, ONE, GATES]
        backend.apply(store, *(Create(key, Item(0)) for key in keys))
        done = threading.Event()

        def write(client: Store) -> None:
            for each in range(1, 2 * ROUNDS):
                backend.apply(client, *(Replace(key, Item(each)) for key in keys))
            done.set()

        def look(client: Store) -> None:
            latest = 0
            while not done.is_set():
                for key in (*keys, *reversed(keys)):
                    number = backend.number_of(client, key)
                    assert number >= latest, f"{key.name} is at {number}, but {latest} was seen before"
                    latest = number

        with self.clients(store, 3) as (first, *others), self.disturbed():
            backend.run_threads(partial(write, first), *(partial(look, c) for c in others))

    def test_a_commit_seen_in_a_document_is_seen_in_the_stream_and_vice_versa(self, store: Store) -> None:
        backend.increment(store, ONE, EVENTS)
        done = threading.Event()

        def write(client: Store) -> None:
            backend.increment_often(client, ONE, EVENTS, ROUNDS)
            done.set()

        def look(client: Store) -> None:
            while not done.is_set():
                number = backend.number_of(client, ONE)
                entries = len(list(client.entries(EVENTS)))
                assert entries >= number
                assert backend.number_of(client, ONE) >= entries

        with self.clients(store, 2) as (first, second), self.disturbed():
            backend.run_threads(partial(write, first), partial(look, second))

    def test_a_transaction_sees_every_commit_that_ended_before_it_began(self, store: Store) -> None:
        with self.clients(store, 3) as clients:
            for each in range(ROUNDS):
                assert backend.increment(clients[each % 3], ONE, EVENTS if each % 2 else None) == each + 1
                assert backend.number_of(clients[(each + 1) % 3], ONE) == each + 1


LOST_ANSWERS = 6

NAMED: dict[str, Sequence[Key[Item] | Stream[Event]]] = {
    "one document": [ONE],
    "two documents": [ONE, INDEX],
    "a document and a stream": [ONE, EVENTS],
    "a document and two streams": [ONE, EVENTS, LEDGER],
    "a stream": [EVENTS],
    "the ledger": [LEDGER],
}


class OutcomesContract(Backend):
    """Commits whose answer is lost, and commits to a store that was moved."""

    def test_a_store_that_was_moved_refuses_commits_and_says_where_to(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        with self.client(store) as other:
            other.set_moved("somewhere else")
            changes: list[Change] = [Create(TWO, Item(1)), Append(EVENTS, Event(1)), Replace(ONE, Item(2)), Delete(ONE)]
            for change in changes:
                with pytest.raises(StoreMoved, match="somewhere else"):
                    backend.apply(store, change)
            assert store.transact([ONE], lambda view, now: Decision([], view.get(ONE))).result == Item(1)
            other.set_moved(None)
        backend.apply(store, Replace(ONE, Item(2)))

    @pytest.mark.parametrize("kind", NAMED)
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_the_reported_outcome_matches_the_state_and_no_commit_is_made_twice(
        self, store: Store, when: When, kind: str
    ) -> None:
        named = NAMED[kind]
        with self.client(store) as other:
            for each in range(LOST_ANSWERS):
                before = self._count(other, named)
                problem = self._count_up_losing_the_answer(store, when, named, f"commit-{each}")

                after = self._count(other, named)
                if isinstance(problem, OutcomeUnknown):
                    assert problem.commit_id == f"commit-{each}"
                    assert after in (before, before + 1)
                else:
                    assert after == (before + 1 if problem is None else before)
                self._count_up(store, named, f"next-{each}")
                assert self._count(other, named) == after + 1

    def test_answers_are_really_lost(self, store: Store) -> None:
        """A lost answer makes the commit fail; otherwise, the test above would prove nothing."""
        assert self._count_up_losing_the_answer(store, "before", [ONE, INDEX], "one") is not None
        assert self._count_up_losing_the_answer(store, "after", [ONE, INDEX], "two") is not None

    def _count_up_losing_the_answer(
        self, store: Store, when: When, named: Sequence[Key[Item] | Stream[Event]], commit_id: str
    ) -> Failure | None:
        try:
            with self.losing_answers(store, when):
                self._count_up(store, named, commit_id)
        except Failure as problem:
            return problem
        return None

    def _count_up(self, store: Store, named: Sequence[Key[Item] | Stream[Event]], commit_id: str) -> None:
        def decide(view: View, now: float) -> Decision[None]:
            changes: list[Change] = []
            for each in named:
                if isinstance(each, Stream):
                    changes.append(Append(each, Event(0)))
                else:
                    changes += backend.incrementing(view, each)[0]
            return Decision(changes, None)

        store.transact(named, decide, commit_id=commit_id)

    def _count(self, store: Store, named: Sequence[Key[Item] | Stream[Event]]) -> int:
        """The count, which must be the same in everything named."""
        counts = {_count(store, each) for each in named}
        assert len(counts) == 1, f"a commit was applied only in part: {counts}"
        return counts.pop()


def _count(store: Store, what: Any) -> int:
    if isinstance(what, Stream):
        return len(list(store.entries(what)))
    return 0 if store.read(what) is None else backend.number_of(store, what)
