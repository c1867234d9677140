"""The contract for streams (appending, reading from a position, order) and for watching."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest

from holdfast.errors import AlreadyExists, UsageFailure
from holdfast.store import model
from holdfast.store.model import Append, Create, Decision, Delete, Entry, Replace, Store, Stream, View
from holdfast.testing import backend
from holdfast.testing.backend import AUDIT, EVENTS, INDEX, ISSUES, LEDGER, ONE, PATIENCE, STREAMS, Backend, Event, Item

APPENDS = 12

DIFFICULT = ["", "\n", "a\nb\r\nc\r", "\u2028\x85\x0b\x0c\x1c", "Grüße, 世界 \U0001f980", '"\\\\n"', "\0", "{}\n{}"]

each_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: str(stream.name))


def numbers(store: Store, stream: Stream[Event], *, after: int = 0) -> list[int]:
    return [each.record.number for each in store.entries(stream, after=after)]


class StreamsContract(Backend):
    """Appending to streams and reading them."""

    @each_stream
    def test_a_new_stream_is_empty(self, store: Store, stream: Stream[Event]) -> None:
        assert list(store.entries(stream)) == []

    @each_stream
    def test_records_are_read_in_order_at_the_returned_positions(self, store: Store, stream: Stream[Event]) -> None:
        appended = []
        for number, text in enumerate(DIFFICULT):
            commit = backend.apply(store, Append(stream, Event(number, text)))
            appended.append(Entry(commit.positions[0], Event(number, text)))

        with self.client(store) as other:
            assert list(store.entries(stream)) == list(other.entries(stream)) == appended
        positions = [each.position for each in appended]
        assert positions == sorted(set(positions))
        assert positions[0] > 0

    @each_stream
    def test_reading_resumes_after_any_position(self, store: Store, stream: Stream[Event]) -> None:
        positions = backend.append_often(store, stream, "", APPENDS)
        with self.client(store) as other:
            for number, position in enumerate(positions):
                assert numbers(other, stream, after=position) == list(range(number + 1, APPENDS))

            last = backend.apply(store, Append(stream, Event(99))).positions[0]
            assert numbers(other, stream, after=positions[-1]) == [99]
            assert numbers(other, stream, after=last) == []

    @each_stream
    def test_a_negative_position_is_refused(self, store: Store, stream: Stream[Event]) -> None:
        backend.apply(store, Append(stream, Event(1)))
        with pytest.raises(UsageFailure):
            list(store.entries(stream, after=-1))

    def test_several_records_are_appended_together_in_order(self, store: Store) -> None:
        for round_ in range(3):
            changes = [Append(stream, Event(3 * round_ + each)) for each in range(3) for stream in STREAMS]
            commit = backend.apply(store, *changes)
            for index, stream in enumerate(STREAMS):
                found = list(store.entries(stream))
                assert [each.record.number for each in found] == list(range(3 * round_ + 3))
                assert [each.position for each in found[-3:]] == list(commit.positions[index::3])

    @each_stream
    def test_a_decision_sees_the_end_of_a_stream_that_it_names(self, store: Store, stream: Stream[Event]) -> None:
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
        backend.apply(store, Create(ONE, Item(1)), Append(EVENTS, Event(1)), Append(LEDGER, Event(1)))
        with pytest.raises(AlreadyExists):
            backend.apply(store, Append(EVENTS, Event(2)), Append(LEDGER, Event(2)), Create(ONE, Item(2)))

        assert (numbers(store, EVENTS), numbers(store, LEDGER), backend.number_of(store, ONE)) == ([1], [1], 1)
        backend.apply(store, Append(EVENTS, Event(3)), Replace(ONE, Item(3)))
        assert (numbers(store, EVENTS), numbers(store, LEDGER), backend.number_of(store, ONE)) == ([1, 3], [1], 3)

    @each_stream
    def test_threads_that_append_lose_no_record(self, store: Store, stream: Stream[Event]) -> None:
        with self.clients(store, 4) as clients, self.disturbed():
            appended = backend.run_threads(
                *(partial(backend.append_often, c, stream, str(n), APPENDS) for n, c in enumerate(clients))
            )

        self._assert_complete(store, stream, appended)

    def test_threads_that_append_and_change_documents_lose_nothing(self, store: Store) -> None:
        with self.clients(store, 4) as clients, self.disturbed():
            backend.run_threads(*(partial(backend.increment_often, c, ONE, AUDIT, APPENDS) for c in clients))

        assert numbers(store, AUDIT) == list(range(1, 4 * APPENDS + 1))
        assert backend.number_of(store, ONE) == 4 * APPENDS

    def test_processes_that_append_lose_no_record(self, store: Store) -> None:
        tasks = [
            backend.Task(backend.append_often, (stream, str(each), 2 * APPENDS))
            for each in range(2)
            for stream in STREAMS
        ]
        appended = self.elsewhere(store, *tasks)

        for index, stream in enumerate(STREAMS):
            self._assert_complete(store, stream, appended[index::3])

    def _assert_complete(self, store: Store, stream: Stream[Event], appended: list[list[int]]) -> None:
        """Every record is at the position that was returned for it, and there are no others."""
        found = {each.position: each.record for each in store.entries(stream)}
        assert found == {
            position: Event(number, str(name))
            for name, positions in enumerate(appended)
            for number, position in enumerate(positions)
        }
        assert list(found) == sorted(found)


CHANGES = 25
SHORTLY = 0.1

WATCHED: dict[str, tuple[model.Watched, model.Change, str]] = {
    "a document": (INDEX, Create(INDEX, Item(1)), INDEX.name),
    "a member": (ONE, Create(ONE, Item(1)), ONE.name),
    "a family": (ISSUES, Create(ONE, Item(1)), ONE.name),
    "a worktree": (backend.WORKTREES.key("w"), Create(backend.WORKTREES.key("w"), Item(1)), "jvs/worktrees/w"),
    "all worktrees": (backend.WORKTREES, Create(backend.WORKTREES.key("w"), Item(1)), "jvs/worktrees/w"),
    **{f"the stream {stream.name}": (stream, Append(stream, Event(1)), stream.name) for stream in STREAMS},
}
OTHERS = [Create(ISSUES.key("one.json"), Item(1)), Create(ISSUES.key("on"), Item(1))]


def reported(watch: model.Watch, *names: str) -> set[str]:
    """Wait until all these names are reported; return everything reported."""
    found: set[str] = set()
    while not found.issuperset(names):
        new = watch.wait(PATIENCE)
        assert new, f"no report of {set(names) - found}"
        found |= new
    return found


class WatchingContract(Backend):
    """Watching documents, families and streams."""

    @pytest.mark.parametrize("what", WATCHED)
    def test_a_change_by_another_client_is_reported(self, store: Store, what: str) -> None:
        subject, change, name = WATCHED[what]
        with self.client(store) as other, store.watch(subject) as watch:
            backend.apply(other, change)

            assert reported(watch, name) == {name}

    @pytest.mark.parametrize("what", WATCHED)
    def test_a_commit_of_several_changes_is_reported_to_each_watcher(self, store: Store, what: str) -> None:
        subject, change, name = WATCHED[what]
        with self.client(store) as other, store.watch(subject) as watch:
            another = LEDGER if name != LEDGER.name else EVENTS
            backend.apply(other, change, Create(ISSUES.key("another"), Item(1)), Append(another, Event(1)))

            assert reported(watch, name) <= {name, "jit/issues/another"}

    @pytest.mark.parametrize("subject", [ONE, ISSUES], ids=["a document", "a family"])
    def test_replacing_and_deleting_are_reported(self, store: Store, subject: model.Watched) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        for change in (Replace(ONE, Item(2)), Delete(ONE)):
            with self.client(store) as other, store.watch(subject) as watch:
                backend.apply(other, change)

                assert reported(watch, ONE.name) == {ONE.name}

    @pytest.mark.parametrize("what", WATCHED)
    def test_nothing_is_reported_when_nothing_happens(self, store: Store, what: str) -> None:
        subject, change, _ = WATCHED[what]
        backend.apply(store, change)  # before the watch begins
        with store.watch(subject) as watch:
            started = time.monotonic()
            assert watch.wait(0) == frozenset()
            assert watch.wait(SHORTLY) == frozenset()
            assert time.monotonic() - started >= SHORTLY

    def test_changes_to_unwatched_keys_are_not_reported(self, store: Store) -> None:
        backend.apply(store, Create(ONE, Item(1)))
        with store.watch(ONE) as watch, self.client(store) as other:
            for change in OTHERS:
                backend.apply(other, change)
            backend.apply(other, Create(INDEX, Item(1)), Append(EVENTS, Event(1)))
            assert watch.wait(SHORTLY) == frozenset()

    def test_every_changed_member_is_reported(self, store: Store) -> None:
        names = [f"jit/issues/m{each}" for each in range(CHANGES)]
        with store.watch(ISSUES) as watch, self.client(store) as other:
            for each in range(CHANGES):
                backend.apply(other, Create(ISSUES.key(f"m{each}"), Item(each)))

            assert reported(watch, *names) == set(names)

    def test_a_client_that_alternates_reads_and_waits_misses_nothing(self, store: Store) -> None:
        """Changes may be reported together, but there is a report after the last one."""
        backend.apply(store, Create(ONE, Item(0)))

        def follow(watch: model.Watch) -> None:
            while backend.number_of(store, ONE) < CHANGES:
                assert watch.wait(PATIENCE) == {ONE.name}

        with self.client(store) as other, store.watch(ONE) as watch, self.disturbed():
            backend.run_threads(partial(follow, watch), partial(backend.increment_often, other, ONE, None, CHANGES))

    @pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: str(stream.name))
    def test_a_client_that_follows_a_stream_misses_nothing(self, store: Store, stream: Stream[Event]) -> None:
        def follow(watch: model.Watch) -> list[int]:
            found: list[int] = []
            position = 0
            while True:
                for entry in store.entries(stream, after=position):
                    position = entry.position
                    found.append(entry.record.number)
                if len(found) >= CHANGES:
                    return found
                assert watch.wait(PATIENCE) == {stream.name}

        with self.client(store) as other, store.watch(stream) as watch, self.disturbed():
            found, _ = backend.run_threads(
                partial(follow, watch), partial(backend.append_often, other, stream, "", CHANGES)
            )

        assert found == list(range(CHANGES))

    def test_a_change_by_another_process_is_reported(self, store: Store) -> None:
        with contextlib.ExitStack() as watches:
            one, family, audit = (watches.enter_context(store.watch(each)) for each in (ONE, ISSUES, AUDIT))
            self.elsewhere(store, backend.Task(backend.increment_often, (ONE, AUDIT, 1)))

            assert reported(one, ONE.name) == {ONE.name}
            assert reported(family, ONE.name) == {ONE.name}
            assert reported(audit, AUDIT.name) == {AUDIT.name}
