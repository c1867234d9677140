"""The ledger: an append-only log of events on any store; on files, the files of its specification.

Appending is one transaction that names the stream of events. It neither lists the directory nor reads
what came before, so it costs the same at event 100 000 as at event 1. Reading takes no lock: events
never change once they are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from holdfast.errors import (
    JsonInvalid,
    NotFound,
    OutcomeUnknown,
    SequenceMismatch,
    TooLarge,
    UsageFailure,
)
from holdfast.fs import strictjson
from holdfast.fs.names import is_safe_name
from holdfast.ledger import checkpoints
from holdfast.ledger.checkpoints import Checkpoint, NoShelf, Shelf
from holdfast.ledger.events import EVENTS, Checked, Event, Recorded, checked, stamped
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from holdfast.store.model import Append, Decision, Store, View

State = TypeVar("State")
Reducer = Callable[[State, Recorded], State]

CHECKPOINT_EVERY = 64
"""How many events a fold may have to catch up with before it leaves a new checkpoint."""
LOOK_AGAIN = 1.0
"""How often a watch that may be cancelled looks whether it is."""


class Ledger:
    """One ledger. Safe to use from several threads."""

    def __init__(self, store: Store, *, shelf: Shelf | None = None) -> None:
        self.store = store
        self.shelf = shelf or NoShelf()
        self._known = 0

    # --- Writing -----------------------------------------------------------------------------------

    def append(self, event: Mapping[str, Any]) -> Recorded:
        """Add an event at the end; durable when this returns. Commit point: it gets its number.

        It gets an `id` and a `timestamp` unless it has them. `OutcomeUnknown` carries the event's id as
        a fact: `find` tells whether it was made.
        """
        return self._append([checked(event)], None)[0]

    def append_if_sequence(self, event: Mapping[str, Any], expected: int) -> Recorded:
        """Add an event only if the ledger is still at `expected`; else `SequenceMismatch`, and nothing."""
        return self._append([checked(event)], expected)[0]

    def append_many(self, events: Iterable[Mapping[str, Any]]) -> list[Recorded]:
        """Add several events in one commit: all or none, one lock, one sync of the directory."""
        prepared = [checked(event) for event in events]
        return self._append(prepared, None) if prepared else []

    def append_decided(
        self, decide: Callable[[int], Mapping[str, Any]], *, retry: RetryConfig | None = None
    ) -> Recorded:
        """Add the event that `decide(sequence)` gives, if nothing has come since; else ask it again.

        Bounded and with growing pauses; `TooManyRetries` when the attempts are used up.
        """

        def attempt() -> Recorded:
            sequence = self.sequence
            return self.append_if_sequence(decide(sequence), sequence)

        return retry_with_backoff(retry or RetryConfig(max_attempts=20, initial_delay=0.005), attempt)

    def _append(self, events: list[Checked], expected: int | None) -> list[Recorded]:
        def decide(view: View, now: float) -> Decision[list[Event]]:
            found = view.end(EVENTS)
            if expected is not None and found != expected:
                raise SequenceMismatch(expected, found)
            made = [stamped(event, now) for event in events]
            return Decision([Append(EVENTS, event) for event in made], made)

        event_id = events[0]["id"]
        try:
            commit = self.store.transact([EVENTS], decide, commit_id=commit_id_of(event_id))
        except OutcomeUnknown as unknown:
            tell_id(unknown, event_id)
            raise
        self._known = max(self._known, commit.positions[-1])
        for event in events:
            event.content = None  # whoever gets it may change it
        return [Recorded(*each) for each in zip(commit.positions, commit.result, strict=True)]

    # --- Reading -----------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """The sequence of the last event, 0 if there is none. A few looks, however many there are."""
        known, leap = self._known, 1
        if known and not self.has_after(known - 1):
            known = 0  # events were taken away
        while self.has_after(known + leap - 1):
            known += leap
            leap *= 2
        while leap > 1:  # there is something at `known`, nothing at `known + leap`
            leap //= 2
            if self.has_after(known + leap - 1):
                known += leap
        self._known = known
        return known

    def has_after(self, sequence: int) -> bool:
        """Whether there is an event behind this one."""
        return next(iter(self.store.entries(EVENTS, after=sequence)), None) is not None

    def events(self, *, after: int = 0, until: int | None = None) -> Iterator[Recorded]:
        """The events behind `after`, up to and with `until` or up to the end as of now."""
        if after < 0:
            raise UsageFailure(f"{after} is not a sequence", after=after)
        for position, event in self.store.entries(EVENTS, after=after):
            if until is not None and position > until:
                return
            yield Recorded(position, event)

    def read(self, sequence: int) -> Recorded:
        """One event; `NotFound` if the ledger has none with this sequence."""
        found = next(self.events(after=sequence - 1, until=sequence), None) if sequence > 0 else None
        if found is None:
            end = self.sequence
            raise NotFound(
                f"the ledger has no event {sequence}; "
                + (f"its last one is {end}" if end else "it has none"),
                hint="See what is there: 'holdfast ledger log'.",
                sequence=sequence,
                last=end,
            )
        return found

    def find(self, event_id: str, *, after: int = 0) -> Recorded | None:
        """The event with this id, looked for behind `after`: was my append made?"""
        return next((each for each in self.events(after=after) if each.event.get("id") == event_id), None)

    def watch(
        self,
        *,
        after: int | None = None,
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Generator[Recorded, None, None]:
        """The events behind `after` (default: the end as of now), and then each new one as it comes.

        Ends when nothing has come for `timeout` seconds, or soon after `cancelled` is set.
        """
        position = self.sequence if after is None else after
        with self.store.watch(EVENTS) as watch:
            quiet_since = time.monotonic()
            while cancelled is None or not cancelled.is_set():
                for each in self.events(after=position):
                    yield each
                    position, quiet_since = each.sequence, time.monotonic()
                left = None if timeout is None else quiet_since + timeout - time.monotonic()
                if left is not None and left <= 0:
                    return
                watch.wait(_pause(left, cancelled))

    # --- Folding -----------------------------------------------------------------------------------

    def fold(
        self,
        reducer: Reducer[State],
        initial: State,
        *,
        until: int | None = None,
        name: str | None = None,
        version: str = "1",
    ) -> State:
        """`reducer(state, recorded)` over all events, from the first to the last or to `until`.

        With a `name` the state is kept as a checkpoint, and the next fold of that name costs the new
        events only. Such a state must be what JSON can carry, and its reducer must not change it in
        place; who changes the reducer gives another `version`.
        """
        if name is not None:
            _check_json(initial)
        kept = None if name is None else self.checkpoint(name, version, until=until)
        state: State = initial if kept is None else kept.state
        begin = kept.sequence if kept else 0
        last: Recorded | None = None
        for each in self.events(after=begin, until=until):
            state = reducer(state, each)
            last = each
        if name is not None and last is not None and last.sequence - begin >= CHECKPOINT_EVERY:
            _check_json(state)
            self.keep(name, version, last, state)
        return state

    def checkpoint(self, name: str, version: str, *, until: int | None = None) -> Checkpoint | None:
        """The checkpoint of a fold, if it fits this ledger and is not behind `until`."""
        found = checkpoints.load(self.shelf, name, version)
        if found is None or (until is not None and found.sequence > until):
            return None
        there = next(self.events(after=found.sequence - 1, until=found.sequence), None)
        fits = there is not None and checkpoints.digest_of(there.event) == found.event
        return found if fits else None

    def keep(self, name: str, version: str, last: Recorded, state: object) -> None:
        """Leave a checkpoint behind the event `last`."""
        event = checkpoints.digest_of(last.event)
        checkpoints.save(self.shelf, Checkpoint(name, version, last.sequence, event, state))


def tell_id(unknown: OutcomeUnknown, event_id: str) -> None:
    """Say by which id the event can be looked for whose outcome is unknown."""
    unknown.facts = {**unknown.facts, "event_id": event_id}
    unknown.hint = f"Look for the event's own id before you try again: 'holdfast ledger show {event_id}'."


def commit_id_of(event_id: str) -> str | None:
    """The event's id as the id of its commit, if it can be one."""
    return event_id if is_safe_name(event_id) and not event_id.startswith(".") else None


def _pause(left: float | None, cancelled: threading.Event | None) -> float | None:
    if cancelled is None:
        return left
    return LOOK_AGAIN if left is None else min(left, LOOK_AGAIN)


def _check_json(state: object) -> None:
    try:
        same = strictjson.decode(strictjson.encode(state)) == state
    except (JsonInvalid, TooLarge):
        same = False
    if not same:
        raise UsageFailure("the state of a fold that has a name must be the same after a way through JSON")
