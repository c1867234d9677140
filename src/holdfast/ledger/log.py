"""The ledger: an append-only log of events on any store; on files, the files of its specification.

Appending is one transaction that names the stream of events. It neither lists the directory nor reads earlier
events, so event 100 000 costs the same as event 1. Reading takes no lock, because events never change.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from holdfast.clock import format_instant, parse_instant
from holdfast.errors import (
    Archived,
    Corrupt,
    Failure,
    IoFailure,
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
from holdfast.fs.names import is_safe_name, safe_name, unique_id
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from holdfast.store.layout import read_checkpoint, write_checkpoint
from holdfast.store.model import Append, Blind, Decide, Decision, Key, Store, Stream, StructCodec, View, newest_first

MOST_BYTES = 1 << 20  # the largest event, as it is stored
LONGEST_TYPE = LONGEST_ID = LONGEST_NODE_ID = 128
RESERVED = "lock_"  # how the types of claims begin: only the rules of claims append them
UNLOCKED = "ledger_unlocked"  # the type of the event that records a broken lock: see `OpenLedger.break_lock`

Event: TypeAlias = dict[str, Any]


class Recorded(NamedTuple):
    """An event and its sequence: its number in the ledger, from 1."""

    sequence: int
    event: Event


class Checked(Event):
    """An event that passed all checks. `content` is its stored form, until the event is handed out."""

    __slots__ = ("content",)

    def __init__(self, event: Event, content: bytes | None = None) -> None:
        super().__init__(event)
        self.content = content


_WHAT = "an event"
_SCALARS = frozenset((str, int, bool, type(None)))
_STRINGS = frozenset((str,))
_DECODER = msgspec.json.Decoder(Event)
_ENCODER = msgspec.json.Encoder()


class EventCodec:
    """Events as compact strict JSON, one line each, for people who read the files."""

    def encode(self, record: Event) -> bytes:
        """The line; `TooLarge` above `MOST_BYTES`."""
        if type(record) is Checked and record.content is not None:
            return record.content
        content = _encode_flat(record)
        try:
            if content is None:
                known = isinstance(record, Checked)
                content = strictjson.encode(record, what=_WHAT, limit=MOST_BYTES - 1, string_keys=known) + b"\n"
        except JsonInvalid as error:
            raise UsageFailure(f"{_WHAT} cannot be stored: {error.facts['problem']}") from None
        except TooLarge as error:
            raise TooLarge(_WHAT, int(str(error.facts["size"])) + 1, MOST_BYTES) from None
        if len(content) > MOST_BYTES:
            raise TooLarge(_WHAT, len(content), MOST_BYTES)
        return content

    def decode(self, content: bytes, source: str) -> Event:
        """The event: any JSON object, because other programs append too, but strict JSON. Our own events are recognised
        by encoding them again, which proves them strict and costs a third of the full check."""
        try:
            event: Event = _DECODER.decode(content)
            if _ENCODER.encode(event) + b"\n" == content and content.count(b"{") + content.count(b"[") < 50:
                return event
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass  # the full check says what is wrong
        try:
            value = strictjson.decode(content, source=source)
            if isinstance(value, dict):
                return value
            problem = "it is not a JSON object"
        except (JsonInvalid, TooLarge) as error:
            problem = str(error)
        hint = "'holdfast ledger verify' lists all such files and says what to do about them."
        message = f"the event at {source} cannot be read: {problem}"
        raise Corrupt(message, hint=hint, source=source, problem=problem)


def _encode_flat(record: Event) -> bytes | None:
    """The line of a flat event, in which only a lone surrogate can be wrong; None for any other event."""
    if _SCALARS.issuperset(map(type, record.values())) and _STRINGS.issuperset(map(type, record)):
        try:
            return _ENCODER.encode(record) + b"\n"
        except (msgspec.MsgspecError, ValueError, OverflowError):
            pass  # the full check says what is wrong, if anything
    return None


CODEC = EventCodec()

EVENTS: Stream[Event] = Stream("ledger/events", CODEC)
"""The stream of all events of a ledger; the position of an entry is its sequence."""


def checked(event: Mapping[str, Any]) -> Checked:
    """A copy of the event with an `id`, if it may be appended; else `UsageFailure` or `TooLarge`. An event without a
    `timestamp` gets the time of its commit."""
    if not isinstance(event, Mapping):
        raise UsageFailure("an event must be a JSON object", problem="not an object")
    copy = dict(event)
    kind, identity, timestamp = copy.get("type"), copy.get("id"), copy.get("timestamp")
    if not isinstance(kind, str) or not 0 < len(kind) <= LONGEST_TYPE:
        raise UsageFailure(
            f"an event needs a `type`: a text of 1 to {LONGEST_TYPE} characters{_found(kind)}", type=kind
        )
    if kind.startswith(RESERVED):
        hint = "Use 'holdfast ledger claim', 'extend', 'release' and 'reap', or choose another type."
        message = f"the type {kind!a} is reserved: types that begin with {RESERVED!r} are the claims of the ledger"
        raise UsageFailure(message, hint=hint, type=kind)
    if identity is None:
        copy["id"] = unique_id()
    elif not isinstance(identity, str) or not 0 < len(identity) <= LONGEST_ID:
        raise UsageFailure(f"the `id` of an event must be a text of 1 to {LONGEST_ID} characters{_found(identity)}")
    if timestamp is not None:
        try:
            parse_instant(str(timestamp))
        except (ValueError, OverflowError):
            hint = "Leave it out to get the time of the commit, or write it like 2024-01-15T10:30:00Z."
            message = f"the `timestamp` {timestamp!a} is not an ISO 8601 instant with a time zone"
            raise UsageFailure(message, hint=hint) from None
    content = CODEC.encode(stamped(copy, 0.0))  # refuse before anything is locked or written
    return Checked(copy, None if timestamp is None else content)


def _found(text: object) -> str:
    return f", not {len(text)}" if isinstance(text, str) else ""


def stamped(event: Event, now: float) -> Event:
    """The event with a timestamp: its own, or now."""
    if event.get("timestamp") is not None:
        return event
    rest = {name: value for name, value in event.items() if name not in ("type", "timestamp")}
    whole = {"type": event["type"], "timestamp": format_instant(now), **rest}
    return Checked(whole) if isinstance(event, Checked) else whole


def commit_id_of(event_id: str) -> str | None:
    """The event's id as the id of its commit, if it can be one."""
    return event_id if is_safe_name(event_id) and not event_id.startswith(".") else None


def add_event_id(unknown: OutcomeUnknown, event_id: str) -> None:
    """Say by which id to search for an event whose outcome is unknown."""
    unknown.facts = {**unknown.facts, "event_id": event_id}
    unknown.hint = f"Search for the event's id before you try again: 'holdfast ledger show {event_id}'."


def event_to_json(recorded: Recorded) -> dict[str, Any]:
    return {"sequence": recorded.sequence, "event": recorded.event}


def events_to_json(events: Iterable[Recorded]) -> dict[str, Any]:
    return {"events": [event_to_json(each) for each in events]}


# --- The log ---------------------------------------------------------------------------------------------

State = TypeVar("State")
Reducer = Callable[[State, Recorded], State]

CHECKPOINT_EVERY = 64  # a fold that has caught up with this many events saves a new checkpoint
POLL = 1.0  # how often a watch checks whether it is cancelled


class Ledger:
    """One ledger. Safe to use from several threads. Folds keep their checkpoints below the directory `checkpoint_root`;
    without one, they keep none."""

    def __init__(self, store: Store, *, checkpoint_root: Path | None = None) -> None:
        self.store = store
        self._checkpoint_root = checkpoint_root
        self._known = 0
        self.gaps: set[tuple[int, int]] = set()
        """The first and last number of each gap that reading came to: events that another program removed."""
        self.archived = 0
        """The sequence of the last archived event that `latest` has omitted."""

    def append(self, event: Mapping[str, Any]) -> Recorded:
        """Append an event; durable when this returns. Commit point: it gets its number.

        The event gets an `id` and a `timestamp` unless it has them. On files, that is the time before the wait for the
        lock, so the timestamps of events that were appended at once may contradict their order. `OutcomeUnknown`
        carries the id: look it up with `find`.
        """
        return self._append([checked(event)], None)[0]

    def append_if_sequence(self, event: Mapping[str, Any], expected: int) -> Recorded:
        """Append an event only if the ledger is still at `expected`; else raise `SequenceMismatch`."""
        return self._append([checked(event)], expected)[0]

    def append_many(self, events: Iterable[Mapping[str, Any]]) -> list[Recorded]:
        """Append several events in one commit, all or none."""
        prepared = [checked(event) for event in events]
        return self._append(prepared, None) if prepared else []

    def append_decided(
        self, decide: Callable[[int], Mapping[str, Any]], *, retry: RetryConfig | None = None
    ) -> Recorded:
        """Append the event that `decide(sequence)` returns, if nothing was appended since; else decide again. Retries
        are bounded, with growing delays; then it raises `TooManyRetries`."""

        def attempt() -> Recorded:
            sequence = self.sequence
            return self.append_if_sequence(decide(sequence), sequence)

        return retry_with_backoff(retry or RetryConfig(max_attempts=20, initial_delay=0.005), attempt)

    def _append(self, events: list[Checked], expected: int | None) -> list[Recorded]:
        def decide_at(now: float) -> Decision[list[Event]]:
            made = [stamped(event, now) for event in events]
            return Decision([Append(EVENTS, event) for event in made], made)

        def decide(view: View, now: float) -> Decision[list[Event]]:
            if (found := view.end(EVENTS)) != expected:
                raise SequenceMismatch(expected or 0, found)
            return decide_at(now)

        event_id = events[0]["id"]
        try:
            how: Decide[list[Event]] = Blind(decide_at) if expected is None else decide
            commit = self.store.transact([EVENTS], how, commit_id=commit_id_of(event_id))
        except OutcomeUnknown as unknown:
            add_event_id(unknown, event_id)
            raise
        self._known = max(self._known, commit.positions[-1])
        for event in events:
            event.content = None  # the caller may change it
        return [Recorded(*each) for each in zip(commit.positions, commit.result, strict=True)]

    @property
    def sequence(self) -> int:
        """The sequence of the last event, 0 in an empty ledger. A server knows it; in files, it is found by galloping:
        a few reads, however many events."""
        if (server := self.store.server) is not None:
            return server.end(EVENTS)
        known, leap = self._known, 1
        if known and not self._has_after(known - 1):
            known = 0  # events were removed
        while self._has_after(known + leap - 1):
            known += leap
            leap *= 2
        while leap > 1:  # there is an event at `known`, none at `known + leap`
            leap //= 2
            if self._has_after(known + leap - 1):
                known += leap
        self._known = known
        return known

    def _has_after(self, sequence: int) -> bool:
        return next(iter(self.store.entries(EVENTS, after=sequence)), None) is not None

    def events(self, *, after: int = 0, until: int | None = None) -> Iterator[Recorded]:
        """The events after the sequence `after`, up to and including `until`, or up to the end as of now. `Archived` if
        one of them is archived."""
        if after < 0:
            raise UsageFailure(f"{after} is not a sequence", after=after)
        if until is not None and until <= after:
            return
        last = after
        for position, event in self.store.entries(EVENTS, after=after):
            if position > last + 1:
                self.gaps.add((last + 1, position - 1))
            if until is not None and position > until:
                return
            yield Recorded(position, event)
            if position == until:
                return  # without looking for more
            last = position

    def latest(self, count: int | None = None, *, until: int | None = None) -> Iterator[Recorded]:
        """The last `count` events (None: all) up to `until`, except archived ones."""
        after = 0 if count is None else max(0, (self.sequence if until is None else until) - count)
        try:
            yield from self.events(after=after, until=until)
        except Archived as archived:
            self.archived = archived.last
            yield from self.events(after=archived.last, until=until)

    def newest(self) -> Iterator[Recorded]:
        """All events, newest first. The cost grows with the number used. `Archived` if it comes to an archived one."""
        return (Recorded(*each) for each in newest_first(self.store, EVENTS, end=self.sequence))

    def read(self, sequence: int) -> Recorded:
        """One event; `NotFound` if the ledger has none with this sequence."""
        found = next(self.events(after=sequence - 1, until=sequence), None) if sequence > 0 else None
        if found is None:
            end = self.sequence
            message = f"the ledger has no event {sequence}; {f'its last one is {end}' if end else 'it is empty'}"
            raise NotFound(message, hint="List its events: 'holdfast ledger log'.", sequence=sequence, last=end)
        return found

    def find(self, event_id: str, *, after: int = 0) -> Recorded | None:
        """The event with this id after the sequence `after`, or None: tells whether an append succeeded. `Archived` if
        it may be among the archived events."""
        hidden: Archived | None = None
        while True:
            known = self.sequence
            try:
                for each in takewhile(lambda each: each.sequence > after, self.newest()):  # noqa: B023
                    if each.event.get("id") == event_id:
                        return each
            except Archived as archived:
                hidden = archived if archived.last > after else hidden
            after = max(after, known)
            with contextlib.suppress(IoFailure):  # a transaction first finishes a commit whose author has died
                end = self.store.transact([EVENTS], lambda view, now: Decision([], view.end(EVENTS))).result
                if end > after:
                    continue
            if hidden is not None:
                raise hidden
            return None

    def watch(
        self, *, after: int | None = None, timeout: float | None = None, cancelled: threading.Event | None = None
    ) -> Generator[Recorded, None, None]:
        """The events after `after` (default: the end as of now), and then each new one as it arrives. Ends when nothing
        has arrived for `timeout` seconds, or soon after `cancelled` is set."""
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
                if cancelled is not None:
                    left = POLL if left is None else min(left, POLL)
                watch.wait(left)

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

        With a `name`, the state is saved as a checkpoint, and the next fold of that name reads only new events. Such a
        state must be representable in JSON, and its reducer must not change it in place; a changed reducer needs
        another `version`. `Archived` if an event that it has to read is archived.
        """
        if name is not None:
            _check_json(initial)
        found = None if name is None else self.checkpoint(name, version, until=until)
        state: State = initial if found is None else found.state
        begin = found.sequence if found else 0
        last: Recorded | None = None
        for each in self.events(after=begin, until=until):
            state = reducer(state, each)
            last = each
        if name is not None and last is not None and last.sequence - begin >= CHECKPOINT_EVERY:
            _check_json(state)
            self.save_checkpoint(name, version, last, state)
        return state

    def checkpoint(self, name: str, version: str, *, until: int | None = None) -> Checkpoint | None:
        """The checkpoint of a fold, if it matches this ledger and is not after `until`."""
        found = None if self._checkpoint_root is None else load_checkpoint(self._checkpoint_root, name, version)
        if found is None or (until is not None and found.sequence > until):
            return None
        with contextlib.suppress(Archived):
            stored = next(self.events(after=found.sequence - 1, until=found.sequence), None)
            return found if stored is not None and _event_digest(stored.event) == found.event else None
        return None

    def save_checkpoint(self, name: str, version: str, last: Recorded, state: object) -> None:
        """Save the state of a fold after the event `last`."""
        if self._checkpoint_root is not None:
            checkpoint = Checkpoint(name, version, last.sequence, _event_digest(last.event), state)
            save_checkpoint(self._checkpoint_root, checkpoint)


def _check_json(state: object) -> None:
    try:
        same = strictjson.decode(strictjson.encode(state)) == state
    except (JsonInvalid, TooLarge):
        same = False
    if not same:
        raise UsageFailure("the state of a named fold must survive a round trip through JSON")


# --- Checkpoints -----------------------------------------------------------------------------------------
# A checkpoint names the event that it follows by a digest, and carries a digest of itself: if it is torn, of another
# form, or of another ledger, it is ignored.

CHECKPOINT_FORMAT = 1


class Checkpoint(NamedTuple):
    """The state of the fold `name` after the event `sequence`, whose digest is `event`."""

    name: str
    version: str
    sequence: int
    event: str
    state: Any


def load_checkpoint(root: Path, name: str, version: str) -> Checkpoint | None:
    """The checkpoint of a fold, if it is whole and has this version."""
    content = read_checkpoint(root, _checkpoint_file(name)) or b""
    try:
        value = strictjson.decode(content.removesuffix(b"\n"))
        record = value["checkpoint"]
        if value["digest"] != _digest(strictjson.encode(record)) or record.get("format") != CHECKPOINT_FORMAT:
            return None
        names = (str(record["name"]), str(record["version"]))
        found = Checkpoint(*names, int(record["sequence"]), str(record["event"]), record["state"])
    except (Failure, KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if names == (name, version) and found.sequence > 0 else None


def save_checkpoint(root: Path, checkpoint: Checkpoint) -> None:
    """Save a checkpoint, unless it cannot be written or its state cannot be encoded."""
    with contextlib.suppress(Failure, OSError):
        file = _checkpoint_file(checkpoint.name)
        content = strictjson.encode({"format": CHECKPOINT_FORMAT, **checkpoint._asdict()})
        whole = b'{"digest":"' + _digest(content).encode() + b'","checkpoint":' + content + b"}\n"
        write_checkpoint(root, file, whole)


def _checkpoint_file(name: str) -> str:
    return f"{safe_name(name, what='name of a fold')}.json"


def _event_digest(event: Event) -> str:
    return _digest(strictjson.encode(event))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


_NODE = re.compile(r"[1-9][0-9]{0,8}(?:\.[1-9][0-9]{0,8})*", re.ASCII)


def node_id(text: str) -> str:
    """The text, if it is the id of a node; else `NameInvalid`."""
    if is_node_id(text):
        return text
    shown = ascii(text)
    message = f"{shown if len(shown) < 100 else shown[:97] + '...'} is not the id of a node"
    if len(text) > LONGEST_NODE_ID:
        message += f": it has {len(text)} characters, more than {LONGEST_NODE_ID}"
    hint = f"Node ids are numbers from 1 joined by dots, as 1.2.3; at most {LONGEST_NODE_ID} characters."
    raise NameInvalid(message, hint=hint, what="node", name=shown[:160])


def is_node_id(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_NODE_ID and _NODE.fullmatch(text) is not None


def is_under(node: str, above: str) -> bool:
    """Whether a node is `above` itself or below it: `1.2.3` is under `1.2`, `1.23` is not."""
    return node == above or node.startswith(above + ".")


def order(node: str) -> tuple[int, ...]:
    """A sort key: `1.2` before `1.10`."""
    return tuple(int(part) for part in node.split("."))


# --- Configuration ---------------------------------------------------------------------------------------

META: Key[dict[str, Any]] = Key("ledger/meta", StructCodec(dict[str, Any]))
DEFAULT_LOCK_TIMEOUT = 300.0  # how long claims last if the configuration does not say


def read_meta(store: Store) -> dict[str, Any] | None:
    document = store.read(META)
    return None if document is None else document.record


def has_claim_files(meta: Mapping[str, Any] | None) -> bool:
    """Whether the configuration of a ledger asks for claim files."""
    value = (meta or {}).get("claim_files", False)
    if not isinstance(value, bool):
        raise SettingInvalid("claim_files in meta.json", str(value), "true or false")
    return value
