"""Watching: whoever watches learns of every change, whoever makes it."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest

from holdfast.store.model import Append, Change, Create, Delete, Replace, Store, Stream, Watch, Watched
from holdfast.testing.contract_clients import (
    AUDIT,
    EVENTS,
    INDEX,
    ISSUES,
    LEDGER,
    PATIENCE,
    STREAMS,
    WORKTREES,
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
TIMES = 25
SHORTLY = 0.1

WATCHED: dict[str, tuple[Watched, Change, str]] = {
    "a document": (INDEX, Create(INDEX, Item(1)), INDEX.name),
    "a member": (ONE, Create(ONE, Item(1)), ONE.name),
    "a family": (ISSUES, Create(ONE, Item(1)), ONE.name),
    "a worktree": (WORKTREES.key("w"), Create(WORKTREES.key("w"), Item(1)), "jvs/worktrees/w"),
    "all worktrees": (WORKTREES, Create(WORKTREES.key("w"), Item(1)), "jvs/worktrees/w"),
    **{f"the stream {stream.name}": (stream, Append(stream, Event(1)), stream.name) for stream in STREAMS},
}
OTHERS = [Create(ISSUES.key("one.json"), Item(1)), Create(ISSUES.key("on"), Item(1))]


def told(watch: Watch, *names: str) -> set[str]:
    """Wait until all of these were reported; all that was."""
    found: set[str] = set()
    while not found.issuperset(names):
        new = watch.wait(PATIENCE)
        assert new, f"waited in vain for {set(names) - found}"
        found |= new
    return found


class WatchingContract(Backend):
    """Watching."""

    @pytest.mark.parametrize("what", WATCHED)
    def test_a_change_by_another_client_is_reported(self, store: Store, what: str) -> None:
        subject, change, name = WATCHED[what]
        with self.client(store) as other, store.watch(subject) as watch:
            apply(other, change)

            assert told(watch, name) == {name}

    @pytest.mark.parametrize("what", WATCHED)
    def test_a_commit_of_several_changes_is_reported_to_each_watcher(self, store: Store, what: str) -> None:
        subject, change, name = WATCHED[what]
        with self.client(store) as other, store.watch(subject) as watch:
            apply(other, change, Create(ISSUES.key("another"), Item(1)), Append(_another(name), Event(1)))

            assert told(watch, name) <= {name, "jit/issues/another"}

    @pytest.mark.parametrize("subject", [ONE, ISSUES], ids=["a document", "a family"])
    def test_replacing_and_deleting_are_reported(self, store: Store, subject: Watched) -> None:
        apply(store, Create(ONE, Item(1)))
        for change in (Replace(ONE, Item(2)), Delete(ONE)):
            with self.client(store) as other, store.watch(subject) as watch:
                apply(other, change)

                assert told(watch, ONE.name) == {ONE.name}

    @pytest.mark.parametrize("what", WATCHED)
    def test_nothing_is_reported_when_nothing_happens(self, store: Store, what: str) -> None:
        subject, change, _ = WATCHED[what]
        apply(store, change)  # before the watch was made
        with store.watch(subject) as watch:
            started = time.monotonic()
            assert watch.wait(0) == frozenset()
            assert watch.wait(SHORTLY) == frozenset()
            assert time.monotonic() - started >= SHORTLY

    def test_what_is_not_watched_is_not_reported(self, store: Store) -> None:
        apply(store, Create(ONE, Item(1)))
        with store.watch(ONE) as watch, self.client(store) as other:
            for change in OTHERS:
                apply(other, change)
            apply(other, Create(INDEX, Item(1)), Append(EVENTS, Event(1)))
            assert watch.wait(SHORTLY) == frozenset()

    def test_every_member_that_changed_is_reported(self, store: Store) -> None:
        names = [f"jit/issues/m{each}" for each in range(TIMES)]
        with store.watch(ISSUES) as watch, self.client(store) as other:
            for each in range(TIMES):
                apply(other, Create(ISSUES.key(f"m{each}"), Item(each)))

            assert told(watch, *names) == set(names)

    def test_who_reads_and_waits_in_turn_misses_nothing(self, store: Store) -> None:
        """Changes may be reported together; but after the last of them there is a report."""
        apply(store, Create(ONE, Item(0)))

        def follow(watch: Watch) -> None:
            while number_of(store, ONE) < TIMES:
                assert watch.wait(PATIENCE) == {ONE.name}

        with self.client(store) as other, store.watch(ONE) as watch, self.disturbed():
            run_threads(partial(follow, watch), partial(increment_often, other, ONE, None, TIMES))

    @pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: str(stream.name))
    def test_who_follows_a_stream_misses_nothing(self, store: Store, stream: Stream[Event]) -> None:
        def follow(watch: Watch) -> list[int]:
            found: list[int] = []
            position = 0
            while True:
                for entry in store.entries(stream, after=position):
                    position = entry.position
                    found.append(entry.record.number)
                if len(found) >= TIMES:
                    return found
                assert watch.wait(PATIENCE) == {stream.name}

        with self.client(store) as other, store.watch(stream) as watch, self.disturbed():
            found, _ = run_threads(partial(follow, watch), partial(append_often, other, stream, "", TIMES))

        assert found == list(range(TIMES))

    def test_a_change_by_another_process_is_reported(self, store: Store) -> None:
        with contextlib.ExitStack() as watches:
            one, family, audit = (watches.enter_context(store.watch(each)) for each in (ONE, ISSUES, AUDIT))
            self.elsewhere(store, Task(increment_often, (ONE, AUDIT, 1)))

            assert told(one, ONE.name) == {ONE.name}
            assert told(family, ONE.name) == {ONE.name}
            assert told(audit, AUDIT.name) == {AUDIT.name}


def _another(name: str) -> Stream[Event]:
    return LEDGER if name != LEDGER.name else EVENTS
