"""Events in and out: appending what is given, and showing them to people or as lines of JSON."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from holdfast.cli.fields import tell
from holdfast.cli.ledger_view import event_line, event_lines
from holdfast.cli.output import Output
from holdfast.errors import Failure, JsonInvalid, NotFound, UsageFailure
from holdfast.fs import strictjson
from holdfast.ledger.log import Event, Ledger, Recorded, events_to_json, is_node_id, is_under, node_id
from holdfast.ledger.log import event_to_json as event_to_json


class Selection(NamedTuple):
    """Which events are wanted."""

    after: int | None
    until: int | None
    last: int | None
    kind: str | None
    node: str | None

    def checked(self) -> Selection:
        if self.node is not None:
            node_id(self.node)
        return self

    def takes(self, event: Event) -> bool:
        if self.kind is not None and event.get("type") != self.kind:
            return False
        if self.node is None:
            return True
        node = event.get("node_id")
        return is_node_id(node) and is_under(str(node), self.node)


def append_one(ledger: Ledger, text: str, if_sequence: int | None, output: Output, field: str | None) -> None:
    """Append the event that was written on the command line."""
    event = _event(text.encode("utf-8", "surrogateescape"), "EVENT")
    made = ledger.append(event) if if_sequence is None else ledger.append_if_sequence(event, if_sequence)
    tell(output, field, event_to_json(made), [f"Appended event {made.sequence}."])


def append_lines(ledger: Ledger, output: Output, field: str | None) -> None:
    """Append the lines of standard input, all or none."""
    lines = [] if sys.stdin is None else sys.stdin.buffer.read().splitlines()
    events = [_event(line, f"line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    made = ledger.append_many(events)
    records = [event_to_json(each) for each in made]
    shown = (
        f"Appended events {made[0].sequence} to {made[-1].sequence}."
        if made
        else "There was nothing to append."
    )
    tell(output, field, {"appended": len(made), "events": records}, [shown], records=records)


def show_log(ledger: Ledger, selection: Selection, output: Output) -> None:
    """Show the events that are there."""
    selection.checked()
    found = (each for each in _events(ledger, selection) if selection.takes(each.event))
    chosen = found if selection.last is None else iter(deque(found, maxlen=selection.last))
    if output.as_json:
        output.result(events_to_json(chosen))
    else:
        _show(chosen, output)


def show_watch(
    ledger: Ledger, selection: Selection, output: Output, *, count: int | None, timeout: float | None
) -> None:
    """Show the events that come, each at once: for programs an envelope each, because there may be no end."""
    selection.checked()
    new = ledger.watch(after=selection.after, timeout=timeout)
    chosen = (each for each in new if selection.takes(each.event))
    limited = chosen if count is None else (each for _, each in zip(range(count), chosen, strict=False))
    if output.as_json:
        for each in limited:
            output.result(event_to_json(each))
    else:
        _show(limited, output)


def show_one(ledger: Ledger, name: str, output: Output) -> None:
    """Show one event whole."""
    if name.isascii() and name.isdigit() and len(name) < 12:
        found: Recorded | None = ledger.read(int(name))
    else:
        found = ledger.find(name)
    if found is None:
        raise NotFound(
            f"the ledger has no event with the id {name}",
            hint="If you were to find out whether an append was made: it was not.",
            event_id=name,
        )
    output.result(event_to_json(found), event_lines(found))


def _events(ledger: Ledger, selection: Selection) -> Iterator[Recorded]:
    after = selection.after or 0
    plain = selection.kind is None and selection.node is None and selection.until is None
    if plain and selection.last is not None:  # no need to read what is not shown
        after = max(after, ledger.sequence - selection.last)
    return ledger.events(after=after, until=selection.until)


def _show(events: Iterable[Recorded], output: Output) -> None:
    """For people if a person looks; else a line of JSON each."""
    if sys.stdout is not None and sys.stdout.isatty():
        for each in events:
            output.line(event_line(each))
    else:
        for each in events:
            output.text(_harmless(strictjson.encode(event_to_json(each)).decode()))


def _harmless(text: str) -> str:
    """The same JSON with everything escaped that could move a cursor or turn a line around: pipes often end
    at a terminal after all."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _event(text: bytes, source: str) -> dict[str, Any]:
    try:
        value = strictjson.decode(text, source=source)
    except JsonInvalid as error:
        raise _not_an_event(error, source) from None
    if not isinstance(value, dict):
        raise UsageFailure(f"{source} is not a JSON object", hint='Such as {"type":"note","text":"..."}.')
    return value


def _not_an_event(error: Failure, source: str) -> UsageFailure:
    hint = 'Write it as {"type":"note","text":"..."}, in single quotes for the shell.'
    return UsageFailure(f"{source} is not an event: {error.facts.get('problem')}", hint=hint)
