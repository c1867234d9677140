"""Streams: appending, reading from a position, order, and nothing lost."""

from __future__ import annotations

from functools import partial

import pytest

from holdfast.errors import AlreadyExists, UsageFailure
from holdfast.store.model import Append, Create, Decision, Entry, Replace, Store, Stream, View
from holdfast.testing.contract_clients import (
    AUDIT,
    EVENTS,
    ISSUES,
    LEDGER,
    STREAMS,
    Event,
    Item,
    Task,
    append_often,
    apply,
    increment_often,
    number_of,
    run_threads,
)
from holdfast.testing.contract_parts.backend import Backend

ONE = ISSUES.key("one")
TIMES = 12

DIFFICULT = [
    "",
    "\n",
    "a\nb\r\nc\r",
    "\u2028\x85\x0b\x0c\x1c",
    "Grüße, 世界 \U0001f980",
    '"\\\\n"',
    "\0",
    "{}\n{}",
]

each_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: str(stream.name))


def numbers(store: Store, stream: Stream[Event], *, after: int = 0) -> list[int]:
    """The numbers in the records behind a position."""
    return [each.record.number for each in store.entries(stream, after=after)]


class StreamsContract(Backend):
    """Streams."""

    @each_stream
    def test_a_stream_begins_empty(self, store: Store, stream: Stream[Event]) -> None:
        assert list(store.entries(stream)) == []

    @each_stream
    def test_records_come_back_in_order_at_the_positions_that_were_told(
        self, store: Store, stream: Stream[Event]
    ) -> None:
        appended = []
        for number, text in enumerate(DIFFICULT):
            commit = apply(store, Append(stream, Event(number, text)))
            appended.append(Entry(commit.positions[0], Event(number, text)))

        with self.client(store) as other:
            assert list(store.entries(stream)) == list(other.entries(stream)) == appended
        positions = [each.position for each in appended]
        assert positions == sorted(set(positions))
        assert positions[0] > 0

    @each_stream
    def test_reading_goes_on_behind_any_position(self, store: Store, stream: Stream[Event]) -> None:
        positions = append_often(store, stream, "", TIMES)
        with self.client(store) as other:
            for number, position in enumerate(positions):
                assert numbers(other, stream, after=position) == list(range(number + 1, TIMES))

            last = apply(store, Append(stream, Event(99))).positions[0]
            assert numbers(other, stream, after=positions[-1]) == [99]
            assert numbers(other, stream, after=last) == []

    @each_stream
    def test_a_position_below_zero_is_refused(self, store: Store, stream: Stream[Event]) -> None:
        apply(store, Append(stream, Event(1)))
        with pytest.raises(UsageFailure):
            list(store.entries(stream, after=-1))

    def test_several_records_are_appended_together_in_order(self, store: Store) -> None:
        for round_ in range(3):
            changes = [Append(stream, Event(3 * round_ + each)) for each in range(3) for stream in STREAMS]
            commit = apply(store, *changes)
            for index, stream in enumerate(STREAMS):
                found = list(store.entries(stream))
                assert [each.record.number for each in found] == list(range(3 * round_ + 3))
                assert [each.position for each in found[-3:]] == list(commit.positions[index::3])

    @each_stream
    def test_a_decision_sees_the_end_of_a_stream_that_it_names(
        self, store: Store, stream: Stream[Event]
    ) -> None:
        def decide(view: View, now: float) -> Decision[tuple[int, Entry[Event] | None]]:
            last = view.last(stream)
            number = 0 if last is None else last.record.number + 1
            with pytest.raises(UsageFailure):
                view.end(next(each for each in STREAMS if each != stream))
            return Decision([Append(stream, Event(number, "\n"))], (view.end(stream), last))

        position, last = 0, None
        for number in range(3):
            commit = store.transact([stream], decide)
            assert commit.result == (position, last)
            position = commit.positions[0]
            last = Entry(position, Event(number, "\n"))

    def test_documents_and_records_are_committed_together(self, store: Store) -> None:
        apply(store, Create(ONE, Item(1)), Append(EVENTS, Event(1)), Append(LEDGER, Event(1)))
        with pytest.raises(AlreadyExists):
            apply(store, Append(EVENTS, Event(2)), Append(LEDGER, Event(2)), Create(ONE, Item(2)))

        assert (numbers(store, EVENTS), numbers(store, LEDGER), number_of(store, ONE)) == ([1], [1], 1)
        apply(store, Append(EVENTS, Event(3)), Replace(ONE, Item(3)))
        assert (numbers(store, EVENTS), numbers(store, LEDGER), number_of(store, ONE)) == ([1, 3], [1], 3)

    @each_stream
    def test_threads_that_append_lose_nothing(self, store: Store, stream: Stream[Event]) -> None:
        with self.clients(store, 4) as clients, self.disturbed():
            told = run_threads(
                *(partial(append_often, c, stream, str(n), TIMES) for n, c in enumerate(clients))
            )

        self._assert_all_there(store, stream, told)

    def test_threads_that_append_with_documents_lose_nothing(self, store: Store) -> None:
        with self.clients(store, 4) as clients, self.disturbed():
            run_threads(*(partial(increment_often, c, ONE, AUDIT, TIMES) for c in clients))

        assert numbers(store, AUDIT) == list(range(1, 4 * TIMES + 1))
        assert number_of(store, ONE) == 4 * TIMES

    def test_processes_that_append_lose_nothing(self, store: Store) -> None:
        tasks = [
            Task(append_often, (stream, str(each), 2 * TIMES)) for each in range(2) for stream in STREAMS
        ]
        told = self.elsewhere(store, *tasks)

        for index, stream in enumerate(STREAMS):
            self._assert_all_there(store, stream, told[index::3])

    def _assert_all_there(self, store: Store, stream: Stream[Event], told: list[list[int]]) -> None:
        """Each one's records are where it was told that they are, and there are no others."""
        found = {each.position: each.record for each in store.entries(stream)}
        assert found == {
            position: Event(number, str(name))
            for name, positions in enumerate(told)
            for number, position in enumerate(positions)
        }
        assert list(found) == sorted(found)
