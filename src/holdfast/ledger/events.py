"""Events: JSON objects with a `type`, a `timestamp` and whatever else; how they are checked and coded.

Every event that is appended here has an `id` of its own. So whoever could not see the outcome of an
append (a kill, a disk that failed to sync) can look for the id and knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from holdfast.clock import format_instant, parse_instant
from holdfast.errors import Corrupt, JsonInvalid, TooLarge, UsageFailure
from holdfast.fs import strictjson
from holdfast.fs.names import unique_id
from holdfast.store.model import Stream

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
