"""Events in and out: appending what is given, and showing them to people or as lines of JSON."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.cli.options import tell
from holdfast.cli.output import Output
from holdfast.clock import format_duration
from holdfast.errors import Corrupt, Failure, JsonInvalid, NotFound, UsageFailure
from holdfast.fs import strictjson
from holdfast.ledger.log import Event, Ledger, Recorded, events_to_json, is_node_id, is_under, node_id
from holdfast.ledger.log import event_to_json as event_to_json
from holdfast.ledger.verify import LedgerReport, finding_to_json
from holdfast.locks.identity import Liveness
from holdfast.locks.ledger_lock import LedgerLock, LedgerLockState
from holdfast.repository.opening import OpenLedger

_SHOWN_FIRST = ("type", "timestamp", "node_id", "owner")
_NOT_SHOWN = ("id", "claim_id", "ticket", "holder")
LONGEST_VALUE = 60


def event_line(recorded: Recorded) -> str:
    """One event on one line: sequence, time, type, node, owner, the rest."""
    event = recorded.event
    when = str(event.get("timestamp", ""))[:19].replace("T", " ")
    start = f"{recorded.sequence:>6}  {when:<19}  {event.get('type', '?')!s:<16}"
    node, owner = event.get("node_id", ""), event.get("owner", "")
    rest = " ".join(
        f"{name}={_short(value)}" for name, value in event.items() if name not in _SHOWN_FIRST + _NOT_SHOWN
    )
    return "  ".join(part for part in (start, f"{node!s:<8}", str(owner), rest) if part.strip()).rstrip()


def event_lines(recorded: Recorded) -> Iterator[str]:
    """One event whole, a field on each line."""
    yield f"event {recorded.sequence}"
    width = max((len(name) for name in recorded.event), default=0)
    for name, value in recorded.event.items():
        yield f"  {name:<{width}}  {value}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def ledger_status_to_json(opened: OpenLedger) -> dict[str, Any]:
    """Where a ledger stands."""
    claims, state = opened.claims, opened.lock.state() if opened.lock else None
    return {
        "root": str(opened.root),
        "sequence": opened.ledger.sequence,
        "lock": None if state is None else ledger_lock_to_json(state),
        "lock_timeout": claims.lock_timeout(),
        "claim_files": opened.files is not None,
        "active_claims": len(claims.active()),
        "expired_claims": len(claims.expired()),
        "waiting": len(claims.waiting()),
    }


def status_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield f"{record['root']}: {_counted(record['sequence'])}"
    lock = record["lock"]
    yield f"  lock     {'free' if lock is None else 'held by ' + lock['shown']}"
    claims = (
        f"{record['active_claims']} active, {record['expired_claims']} run out, {record['waiting']} waiting"
    )
    yield f"  claims   {claims}; each for {format_duration(record['lock_timeout'])} unless said otherwise"


def _counted(events: int) -> str:
    return "1 event" if events == 1 else f"{events} events"


def ledger_lock_to_json(state: LedgerLockState) -> dict[str, Any]:
    """Everything that is known about a lock that is there."""
    return {**state.as_record(), "certainly_dead": state.liveness is Liveness.DEAD, "path": str(state.path)}


def lock_lines(state: LedgerLockState) -> Iterator[str]:
    """The same for people, with what to do about it."""
    who = state.agent_id or ("a shell tool, which leaves no name" if state.is_directory else "somebody")
    yield f"{state.path}: held by {who}"
    if state.holder is not None:
        yield f"  process   {state.holder.holder_id}"
    yield f"  age       {format_duration(state.age)}"
    yield f"  holder    {_CERTAINTY[state.liveness]}"
    yield f"  identity  {state.identity}"


_CERTAINTY = {
    Liveness.DEAD: "certainly dead: the next writer takes the lock over",
    Liveness.ALIVE: "alive: wait for it, or find out why it does not go on",
    Liveness.UNKNOWN: "not known: it says too little, or is on another machine",
}


def unlock(opened: OpenLedger, identity: str | None, output: Output) -> None:
    """Show the lock, or break the one with this identity."""
    lock = _lock_of(opened)
    state = lock.state()
    if identity is None:
        record = None if state is None else ledger_lock_to_json(state)
        free = [f"{lock.path}: free"]
        shown = free if state is None else [*lock_lines(state), *_how_to_break(state)]
        output.result({"lock": record, "broken": False}, shown)
        return
    lock.break_lock(identity)
    gone = None if state is None else ledger_lock_to_json(state)
    output.result({"lock": gone, "broken": True}, [f"Broke the lock {identity} of {lock.path}."])


def _how_to_break(state: LedgerLockState) -> list[str]:
    if state.liveness is Liveness.DEAD:
        return []
    young = [] if state.suspect else ["It is not old: most likely somebody is writing just now."]
    return [
        "",
        *young,
        "If you are certain that its holder will not go on, break it:",
        f"  holdfast ledger unlock --identity {state.identity}",
    ]


def _lock_of(opened: OpenLedger) -> LedgerLock:
    if opened.lock is None:
        raise NotFound("this ledger is kept by a server and has no lock file", path=str(opened.root))
    return opened.lock


def report_verdict(verdict: LedgerReport, output: Output) -> None:
    """Say what was found; errors end as `E_CORRUPT`."""
    findings = [finding_to_json(each) for each in verdict.findings]
    errors = sum(each.severity == "error" for each in verdict.findings)
    lines = [f"{_counted(verdict.events)} can be read in order."]
    for each in verdict.findings:
        lines += [f"{each.severity}: {each.subject}", f"  {each.message}", f"  -> {each.remedy}"]
    if verdict.sound:
        output.result({"sound": True, "events": verdict.events, "findings": findings}, lines)
        return
    if not output.as_json:
        for line in lines:
            output.line(line)
    raise Corrupt(
        f"the ledger has {errors} {'error' if errors == 1 else 'errors'}",
        hint="Each finding says what to do about it. Nothing was changed.",
        events=verdict.events,
        findings=findings,
    )


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
