"""The ledger: an append-only log of events on any store; on files, the files of its specification.

Appending is one transaction that names the stream of events. It neither lists the directory nor reads
what came before, so it costs the same at event 100 000 as at event 1. Reading takes no lock: events
never change once they are written.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from holdfast.clock import format_duration, format_instant, parse_duration, parse_instant
from holdfast.errors import (
    Corrupt,
    JsonInvalid,
    NameInvalid,
    NotFound,
    OutcomeUnknown,
    SequenceMismatch,
    SettingInvalid,
    TooLarge,
    UsageFailure,
)
from holdfast.fs import strictjson
from holdfast.fs.names import is_safe_name, unique_id
from holdfast.ledger import checkpoints
from holdfast.ledger.checkpoints import Checkpoint, CheckpointStore, NoCheckpoints
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from holdfast.store.model import Append, Create, Decision, Key, Store, Stream, StructCodec, View

Event: TypeAlias = dict[str, Any]

MOST_BYTES = 1 << 20
"""The largest event, as it is stored."""
LONGEST_TYPE = 128
LONGEST_ID = 128

_WHAT = "an event"
_PLAIN = frozenset((str, int, bool, type(None)))
_TEXT = frozenset((str,))


class Recorded(NamedTuple):
    """An event and its sequence: its place in the ledger, from 1 and without gaps."""

    sequence: int
    event: Event


class Checked(Event):
    """An event that has been looked at closely: all of it can be stored.

    `content` is how it is stored, until it is out of our hands and may be changed.
    """

    __slots__ = ("content",)

    def __init__(self, event: Event, content: bytes | None = None) -> None:
        super().__init__(event)
        self.content = content


class EventCodec:
    """Events as compact strict JSON, one line each, for people who look at the files."""

    def encode(self, record: Event) -> bytes:
        """The line; more than `MOST_BYTES` are refused."""
        if type(record) is Checked and record.content is not None:
            return record.content
        try:
            content = _plainly(record) or _closely(record)
        except JsonInvalid as error:
            raise UsageFailure(f"{_WHAT} cannot be stored: {error.facts['problem']}") from None
        if len(content) > MOST_BYTES:
            raise TooLarge(_WHAT, len(content), MOST_BYTES)
        return content

    def decode(self, content: bytes, source: str) -> Event:
        """The event. Other programs append too: any JSON object will do, but it must be strict JSON.

        What we have written ourselves is recognised by coding it again, which proves it strict and
        costs a third of looking closely.
        """
        try:
            event: Event = _DECODER.decode(content)
            if _ENCODER.encode(event) + b"\n" == content and content.count(b"{") + content.count(b"[") < 50:
                return event
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass  # the slow way says what is wrong
        return _strictly(content, source)


def _plainly(record: Event) -> bytes | None:
    """The line of an event in which nothing can be wrong but a lone surrogate; None for any other."""
    if _PLAIN.issuperset(map(type, record.values())) and _TEXT.issuperset(map(type, record)):
        try:
            return _ENCODER.encode(record) + b"\n"
        except (msgspec.MsgspecError, ValueError, OverflowError):
            pass  # the slow way says what is wrong, if anything
    return None


def _closely(record: Event) -> bytes:
    known = isinstance(record, Checked)
    try:
        return strictjson.encode(record, what=_WHAT, limit=MOST_BYTES - 1, string_keys=known) + b"\n"
    except TooLarge as error:
        raise TooLarge(_WHAT, int(str(error.facts["size"])) + 1, MOST_BYTES) from None


def _strictly(content: bytes, source: str) -> Event:
    try:
        value = strictjson.decode(content, source=source)
    except (JsonInvalid, TooLarge) as error:
        raise _unreadable(source, str(error)) from None
    if not isinstance(value, dict):
        raise _unreadable(source, "it is not a JSON object")
    return value


def _unreadable(source: str, problem: str) -> Corrupt:
    return Corrupt(
        f"the event at {source} cannot be understood: {problem}",
        hint="'holdfast ledger verify' lists all such files and says what to do about them.",
        source=source,
        problem=problem,
    )


_DECODER = msgspec.json.Decoder(Event)
_ENCODER = msgspec.json.Encoder()
CODEC = EventCodec()

EVENTS: Stream[Event] = Stream("ledger/events", CODEC)
"""The stream of all events of a ledger; the position of an entry is its sequence."""


def checked(event: Mapping[str, Any]) -> Checked:
    """A copy of the event with an `id`, if it may be appended; else `UsageFailure` or `TooLarge`.

    An event without a `timestamp` gets the time of its commit.
    """
    if not isinstance(event, Mapping):
        raise UsageFailure("an event must be a JSON object", problem="not an object")
    copy = dict(event)
    kind, identity, timestamp = copy.get("type"), copy.get("id"), copy.get("timestamp")
    if not isinstance(kind, str) or not 0 < len(kind) <= LONGEST_TYPE:
        raise UsageFailure(f"an event needs a `type`: a text of 1 to {LONGEST_TYPE} characters", type=kind)
    if identity is None:
        copy["id"] = new_id()
    elif not isinstance(identity, str) or not 0 < len(identity) <= LONGEST_ID:
        raise UsageFailure(f"the `id` of an event must be a text of 1 to {LONGEST_ID} characters")
    if timestamp is not None:
        check_timestamp(timestamp)
    content = CODEC.encode(stamped(copy, 0.0))  # refuse before anything is locked or written
    return Checked(copy, None if timestamp is None else content)


def check_timestamp(timestamp: object) -> float:
    """The instant that a timestamp names; `UsageFailure` if it names none."""
    try:
        return parse_instant(str(timestamp))
    except (ValueError, OverflowError):
        raise UsageFailure(
            f"the `timestamp` {timestamp!a} is not an ISO 8601 instant with a time zone",
            hint="Leave it out to get the time of the commit, or write it like 2024-01-15T10:30:00Z.",
        ) from None


def stamped(event: Event, now: float) -> Event:
    """The event with a timestamp: its own, or now."""
    if event.get("timestamp") is not None:
        return event
    rest = {name: value for name, value in event.items() if name not in ("type", "timestamp")}
    whole = {"type": event["type"], "timestamp": format_instant(now), **rest}
    return Checked(whole) if isinstance(event, Checked) else whole


def new_id() -> str:
    """An id that no other event has."""
    return unique_id()


State = TypeVar("State")
Reducer = Callable[[State, Recorded], State]

CHECKPOINT_EVERY = 64
"""How many events a fold may have to catch up with before it leaves a new checkpoint."""
LOOK_AGAIN = 1.0
"""How often a watch that may be cancelled looks whether it is."""


class Ledger:
    """One ledger. Safe to use from several threads."""

    def __init__(self, store: Store, *, shelf: CheckpointStore | None = None) -> None:
        self.store = store
        self.shelf = shelf or NoCheckpoints()
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


LONGEST_NODE_ID = 128
_NODE = re.compile(r"[1-9][0-9]{0,8}(?:\.[1-9][0-9]{0,8})*", re.ASCII)


def node_id(text: str) -> str:
    """The text, if it is the id of a node; else `NameInvalid` says why not."""
    if is_node_id(text):
        return text
    shown = ascii(text)
    raise NameInvalid(
        f"{shown if len(shown) < 100 else shown[:97] + '...'} is not the id of a node",
        hint=f"Node ids are numbers from 1 joined by dots, as 1.2.3; at most {LONGEST_NODE_ID} characters.",
        what="node",
        name=shown[:160],
    )


def is_node_id(text: object) -> bool:
    """Whether `node_id` would return it."""
    return isinstance(text, str) and len(text) <= LONGEST_NODE_ID and _NODE.fullmatch(text) is not None


def is_under(node: str, above: str) -> bool:
    """Whether a node is `above` itself or below it: `1.2.3` is under `1.2`, `1.23` is not."""
    return node == above or node.startswith(above + ".")


def order(node: str) -> tuple[int, ...]:
    """What sorts nodes as people count: `1.2` before `1.10`."""
    return tuple(int(part) for part in node.split("."))


DEFAULT_LOCK_TIMEOUT = 300.0
SHORTEST, LONGEST_META = 1.0, 3600.0
"""How long a claim may last."""

META: Key[dict[str, Any]] = Key("ledger/meta", StructCodec(dict[str, Any]))


def create_meta(
    store: Store, *, lock_timeout: float = DEFAULT_LOCK_TIMEOUT, claim_files: bool = False
) -> None:
    """Write the configuration of a new ledger; `AlreadyExists` if there is one."""
    record: dict[str, Any] = {"lock_timeout": format_duration(checked_ttl(lock_timeout, "lock_timeout"))}
    if claim_files:
        record["claim_files"] = True

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([Create(META, record)], None)

    store.transact([META], decide)


def read_meta(store: Store) -> dict[str, Any] | None:
    """The configuration, None if there is none."""
    document = store.read(META)
    return None if document is None else document.record


def lock_timeout(meta: dict[str, Any] | None) -> float:
    """How long a claim lasts if nobody says otherwise: `lock_timeout`, from 1 s to 1 h, else 5 minutes."""
    value = (meta or {}).get("lock_timeout")
    if value is None:
        return DEFAULT_LOCK_TIMEOUT
    setting, expected = "lock_timeout in meta.json", 'a duration from 1s to 1h, such as "5m"'
    if not isinstance(value, str):
        raise SettingInvalid(setting, str(value), expected)
    try:
        seconds = parse_duration(value, setting=setting)
    except SettingInvalid:
        raise SettingInvalid(setting, value, expected) from None
    if not SHORTEST <= seconds <= LONGEST_META:
        raise SettingInvalid(setting, value, expected)
    return seconds


def has_claim_files(meta: dict[str, Any] | None) -> bool:
    """Whether claims are kept as files in `locks/` too."""
    value = (meta or {}).get("claim_files", False)
    if not isinstance(value, bool):
        raise SettingInvalid("claim_files in meta.json", str(value), "true or false")
    return value


def checked_ttl(ttl: float, setting: str = "ttl") -> float:
    """A duration that a claim may last."""
    if not SHORTEST <= ttl <= LONGEST_META:
        raise SettingInvalid(setting, f"{ttl:g}s", "a duration from 1s to 1h")
    return float(ttl)


def event_to_json(recorded: Recorded) -> dict[str, Any]:
    """An event for programs."""
    return {"sequence": recorded.sequence, "event": recorded.event}


def events_to_json(events: Iterable[Recorded]) -> dict[str, Any]:
    """Some events of a ledger."""
    return {"events": [event_to_json(each) for each in events]}
