"""A ledger as it is shown: its events, its state, its lock, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.cli.output import Output
from holdfast.clock import format_duration
from holdfast.errors import Corrupt, NotFound
from holdfast.ledger.log import Recorded
from holdfast.ledger.verify import LedgerReport
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


def status_record(opened: OpenLedger) -> dict[str, Any]:
    """Where a ledger stands."""
    claims, state = opened.claims, opened.lock.state() if opened.lock else None
    return {
        "root": str(opened.root),
        "sequence": opened.ledger.sequence,
        "lock": None if state is None else lock_record(state),
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


def lock_record(state: LedgerLockState) -> dict[str, Any]:
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
        record = None if state is None else lock_record(state)
        free = [f"{lock.path}: free"]
        shown = free if state is None else [*lock_lines(state), *_how_to_break(state)]
        output.result({"lock": record, "broken": False}, shown)
        return
    lock.break_lock(identity)
    gone = None if state is None else lock_record(state)
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
    findings = [each.as_record() for each in verdict.findings]
    errors = sum(each.severity == "error" for each in verdict.findings)
    lines = [f"{_counted(verdict.events)} can be read in order."]
    for each in verdict.findings:
        lines += [f"{each.severity}: {each.where}", f"  {each.problem}", f"  -> {each.remedy}"]
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
