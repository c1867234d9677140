"""Isolation: transactions and reads behave as if they had happened one after the other."""

from __future__ import annotations

import threading
from functools import partial
from itertools import chain

import pytest

from holdfast.errors import AlreadyExists
from holdfast.store.model import Create, Decision, Key, Replace, Store, View
from holdfast.testing.contract_clients import (
    EVENTS,
    GATES,
    INDEX,
    ISSUES,
    Item,
    Task,
    accounts,
    apply,
    increment,
    increment_often,
    number_of,
    run_threads,
    sums_seen,
    swap_rounds,
    transfer_around,
)
from holdfast.testing.contract_parts.backend import Backend

CLIENTS = 8
ROUNDS = 25
FEW = 12

ONE = ISSUES.key("one")
TWO = ISSUES.key("two")


class IsolationContract(Backend):
    """Isolation, between threads and between processes."""

    # --- Nothing is lost, nothing is won twice ----------------------------------------------------------

    def test_threads_that_count_lose_nothing(self, store: Store) -> None:
        with self.clients(store, CLIENTS) as clients, self.disturbed():
            counted = run_threads(*(partial(increment_often, c, ONE, None, FEW) for c in clients))

        assert sorted(chain.from_iterable(counted)) == list(range(1, CLIENTS * FEW + 1))
        assert number_of(store, ONE) == CLIENTS * FEW

    def test_threads_that_share_one_client_lose_nothing(self, store: Store) -> None:
        with self.disturbed():
            counted = run_threads(*[partial(increment_often, store, ONE, EVENTS, FEW)] * 4)

        assert sorted(chain.from_iterable(counted)) == list(range(1, 4 * FEW + 1))
        assert [each.record.number for each in store.entries(EVENTS)] == list(range(1, 4 * FEW + 1))

    def test_one_thread_wins_each_swap(self, store: Store) -> None:
        apply(store, Create(ONE, Item(0)))
        with self.clients(store, CLIENTS) as clients, self.disturbed():
            won = run_threads(*(partial(swap_rounds, c, ONE, FEW, "") for c in clients))

        assert sorted(chain.from_iterable(won)) == list(range(FEW))
        assert number_of(store, ONE) == FEW

    def test_one_thread_creates(self, store: Store) -> None:
        def create(client: Store) -> int:
            won = 0
            for each in range(FEW):
                try:
                    apply(client, Create(ISSUES.key(f"new-{each}"), Item(each)))
                    won += 1
                except AlreadyExists:
                    pass
            return won

        with self.clients(store, 4) as clients, self.disturbed():
            won = run_threads(*(partial(create, c) for c in clients))

        assert sum(won) == FEW == len(list(store.scan(ISSUES)))

    def test_processes_that_count_and_swap_lose_nothing(self, store: Store) -> None:
        apply(store, Create(TWO, Item(0)))
        tasks = [Task(increment_often, (ONE, EVENTS, ROUNDS)) for _ in range(CLIENTS // 2)]
        tasks += [Task(swap_rounds, (TWO, ROUNDS, str(each))) for each in range(CLIENTS // 2)]
        answers = self.elsewhere(store, *tasks)

        counted, won = list(chain(*answers[: CLIENTS // 2])), list(chain(*answers[CLIENTS // 2 :]))
        assert sorted(counted) == list(range(1, CLIENTS // 2 * ROUNDS + 1))
        assert sorted(won) == list(range(ROUNDS))
        assert number_of(store, ONE) == len(counted)
        assert number_of(store, TWO) == ROUNDS
        assert [each.record.number for each in store.entries(EVENTS)] == list(range(1, len(counted) + 1))

    # --- Nothing is seen that was not committed ---------------------------------------------------------

    def test_what_was_refused_is_never_seen(self, store: Store) -> None:
        apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)))
        done = threading.Event()

        def refuse(client: Store) -> None:
            for _ in range(ROUNDS):
                with pytest.raises(AlreadyExists):
                    apply(client, Replace(ONE, Item(-1)), Create(TWO, Item(-1)))
            done.set()

        def look(client: Store) -> None:
            while not done.is_set():
                assert (number_of(client, ONE), number_of(client, TWO)) == (1, 1)

        with self.clients(store, 2) as (first, second), self.disturbed():
            run_threads(partial(refuse, first), partial(look, second))

    def test_a_constraint_on_two_documents_holds_although_each_transaction_changes_one(
        self, store: Store
    ) -> None:
        def leave(client: Store, mine: Key[Item]) -> None:
            def decide(view: View, now: float) -> Decision[None]:
                both = [view.get(key) for key in (ONE, TWO)]
                if sum(each.number for each in both if each) < 2:
                    return Decision([], None)  # the other one has left already: one has to stay
                return Decision([Replace(mine, Item(0))], None)

            client.transact([ONE, TWO], decide)

        apply(store, Create(ONE, Item(1)), Create(TWO, Item(1)))
        with self.clients(store, 2) as (first, second), self.disturbed():
            for _ in range(FEW):
                run_threads(partial(leave, first, ONE), partial(leave, second, TWO))
                assert sum(number_of(store, key) for key in (ONE, TWO)) == 1
                apply(store, Replace(ONE, Item(1)), Replace(TWO, Item(1)))

    @pytest.mark.parametrize("count", [2, 5, 10])
    def test_what_is_read_together_is_of_one_moment(self, store: Store, count: int) -> None:
        keys = accounts(count)
        apply(store, *(Create(key, Item(100)) for key in keys))
        with self.clients(store, 4) as clients, self.disturbed():
            writing = [partial(transfer_around, c, keys, ROUNDS) for c in clients[:2]]
            reading = [partial(sums_seen, c, keys, ROUNDS) for c in clients[2:]]
            _, _, *seen = run_threads(*writing, *reading)

        assert seen == [{100 * count}] * 2

    def test_what_is_read_together_is_of_one_moment_across_processes(self, store: Store) -> None:
        keys = accounts(4)
        apply(store, *(Create(key, Item(100)) for key in keys))
        tasks = [Task(transfer_around, (keys, 4 * ROUNDS)) for _ in range(2)]
        tasks += [Task(sums_seen, (keys, 4 * ROUNDS)) for _ in range(2)]

        assert self.elsewhere(store, *tasks)[2:] == [{400}, {400}]

    # --- Order --------------------------------------------------------------------------------------------

    def test_what_was_seen_in_one_document_is_seen_in_all(self, store: Store) -> None:
        """Without locks: if one document shows a commit, whatever is read later shows it too."""
        keys = [INDEX, ONE, GATES]
        apply(store, *(Create(key, Item(0)) for key in keys))
        done = threading.Event()

        def write(client: Store) -> None:
            for each in range(1, 2 * ROUNDS):
                apply(client, *(Replace(key, Item(each)) for key in keys))
            done.set()

        def look(client: Store) -> None:
            latest = 0
            while not done.is_set():
                for key in (*keys, *reversed(keys)):
                    number = number_of(client, key)
                    assert number >= latest, f"{key.name} is at {number}, but {latest} was seen before"
                    latest = number

        with self.clients(store, 3) as (first, *others), self.disturbed():
            run_threads(partial(write, first), *(partial(look, c) for c in others))

    def test_what_was_seen_in_a_document_is_seen_in_the_stream_and_the_other_way_round(
        self, store: Store
    ) -> None:
        increment(store, ONE, EVENTS)
        done = threading.Event()

        def write(client: Store) -> None:
            increment_often(client, ONE, EVENTS, ROUNDS)
            done.set()

        def look(client: Store) -> None:
            while not done.is_set():
                number = number_of(client, ONE)
                entries = len(list(client.entries(EVENTS)))
                assert entries >= number
                assert number_of(client, ONE) >= entries

        with self.clients(store, 2) as (first, second), self.disturbed():
            run_threads(partial(write, first), partial(look, second))

    def test_a_transaction_sees_all_that_ended_before_it_began(self, store: Store) -> None:
        with self.clients(store, 3) as clients:
            for each in range(ROUNDS):
                assert increment(clients[each % 3], ONE, EVENTS if each % 2 else None) == each + 1
                assert number_of(clients[(each + 1) % 3], ONE) == each + 1
