"""`holdfast ledger`: create, append to, read, watch and verify a ledger. `ledger_claims` has the claims."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import ACTOR, REPO, options
from holdfast.cli.entry import Group, LazyCommand
from holdfast.cli.output import Output, counted, escaped_json, shortened
from holdfast.clock import format_duration
from holdfast.errors import Corrupt, JsonInvalid, NotFound, UsageFailure

if TYPE_CHECKING:
    from holdfast.ledger.log import Ledger, Recorded
    from holdfast.locks.ledger_lock import LedgerLockState
    from holdfast.repository.ledgers import OpenLedger

_CLAIMS = "holdfast.cli.ledger_claims"

group = Group(
    "ledger",
    help="""\
A ledger is an append-only log of events in plain files, to which many processes may append at once. Claims
reserve its nodes, such as 1.2.3, each for one actor at a time. A claim lasts until it is released or
expires; then the next waiter gets it. Claims are events of the ledger.

\b
Examples:
  holdfast ledger init
  holdfast ledger append '{"type":"note","text":"the build is red"}'
  holdfast ledger claim 1.2.3 --actor agent-7 --wait 1m
""",
    table={
        "claim": LazyCommand(f"{_CLAIMS}:claim", "Claim a node, at once or by waiting in the queue."),
        "claims": LazyCommand(f"{_CLAIMS}:claims", "List the claims and their waiters."),
        "extend": LazyCommand(f"{_CLAIMS}:extend", "Renew a claim."),
        "release": LazyCommand(f"{_CLAIMS}:release", "Release a claim."),
        "reap": LazyCommand(f"{_CLAIMS}:reap", "Reap expired claims."),
        "claim-history": LazyCommand(f"{_CLAIMS}:claim_history", "Show every event about claims on a node."),
        "archive": LazyCommand("holdfast.cli.archive:ledger_archive", "Move old events from a server to files."),
    },
)


def _nearest(context: click.Context, _: click.Parameter, named: str | None) -> str:
    """The directory that was named, else the nearest one upwards that has a ledger, else the current one."""
    if named or context.resilient_parsing:
        return named or "."
    from holdfast.repository.ledgers import find_ledger

    starts = filter(None, (".", os.environ.get(REPO)))
    return next((str(found) for start in starts if (found := find_ledger(start)) is not None), ".")


ledger_option = options.repo_option_for(
    f"The directory of the ledger.  [default: the nearest one upwards that has a ledger, else {REPO}]",
    callback=_nearest,
)


def in_ledger(command: Callable[..., Any]) -> Callable[..., Any]:
    return ledger_option(options.with_output(command))


def open_at(directory: str) -> OpenLedger:
    from holdfast.repository.ledgers import open_ledger

    opened = open_ledger(directory, address=options.store_address(os.environ), actor=os.environ.get(ACTOR))
    context = click.get_current_context()
    context.call_on_close(lambda: _warn(context.find_object(Output), opened.ledger))
    return opened


def _warn(output: Output | None, ledger: Ledger) -> None:
    """Say which events were not read."""
    if output is None:
        return
    for first, last in sorted(ledger.gaps):
        missing = f"event {first} is" if first == last else f"events {first} to {last} are"
        output.diagnostic(f"Warning: {missing} missing. 'holdfast ledger verify' says what to do.")
    if ledger.archived:
        output.diagnostic(f"Events 1 to {ledger.archived} are archived: 'holdfast ledger status' lists the files.")


@group.command(short_help="Create a ledger in a directory.")
@options.repo_option_for("The directory to create the ledger in.  [default: the current one, or its git home]")
@options.duration_option("--lock-timeout", "How long a claim lasts by default, from 1s to 1h.", default="5m")
@click.option("--claim-files", is_flag=True, help="Also keep each claim as a file in locks/, for other programs.")
@options.with_output
def init(output: Output, *, repo: str | None, lock_timeout: float, claim_files: bool) -> None:
    """Create a ledger. It consists of DIR/meta.json and DIR/ledger/.

    \b
    Examples:
      holdfast ledger init
      holdfast ledger init --repo proof --lock-timeout 10m
    """
    from holdfast.repository.ledgers import init_ledger, place_for_ledger

    address, place = options.store_address(os.environ), repo or place_for_ledger(".")
    made = init_ledger(place, lock_timeout=lock_timeout, claim_files=claim_files, address=address)
    record = {"root": str(made.root), "sequence": made.ledger.sequence, "lock_timeout": lock_timeout}
    output.result(record, [f"Created a ledger in {made.root}."])


@group.command(short_help="Append an event, or many at once.")
@click.argument("event")
@ledger_option
@click.option("--if-sequence", metavar="N", type=click.IntRange(0), help="Fail (status 4) unless the ledger is at N.")
@options.field_option("sequence", "event")
@options.with_output
def append(output: Output, *, event: str, repo: str, if_sequence: int | None, field: str | None) -> None:
    """Append EVENT, a JSON object with a "type"; with '-', the JSON lines of standard input.

    Lines are appended all or none; etcd with its default limits refuses more than 119 of them. An event without a
    "timestamp" or an "id" gets one; if the outcome of an append is unknown, look the event up with 'ledger show ID'.
    Events over 1 MiB are refused, and so are types that begin with "lock_", which are reserved for claims. The events
    are on disk when the command returns.

    \b
    Examples:
      holdfast ledger append '{"type":"note","text":"the build is red"}'
      holdfast ledger append '{"type":"note"}' --if-sequence 41
      ./report | holdfast ledger append -
    """
    from holdfast.ledger.log import event_to_json

    ledger = open_at(repo).ledger
    if event != "-":
        given = _event(event.encode("utf-8", "surrogateescape"), "EVENT")
        made = ledger.append(given) if if_sequence is None else ledger.append_if_sequence(given, if_sequence)
        options.print_record(output, field, event_to_json(made), [f"Appended event {made.sequence}."])
        return
    if if_sequence is not None:
        raise click.UsageError("--if-sequence takes one event.", click.get_current_context())
    lines = [] if sys.stdin is None else sys.stdin.buffer.read().splitlines()
    events = [_event(line, f"line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    appended = ledger.append_many(events)
    records = [event_to_json(each) for each in appended]
    text = f"Appended events {appended[0].sequence} to {appended[-1].sequence}." if appended else "Nothing to append."
    options.print_record(output, field, {"appended": len(appended), "events": records}, [text], records=records)


def _event(text: bytes, source: str) -> dict[str, Any]:
    from holdfast.fs import strictjson

    hint = 'Write it as {"type":"note","text":"..."}, in single quotes for the shell.'
    try:
        value = strictjson.decode(text, source=source)
    except JsonInvalid as error:
        raise UsageFailure(f"{source} is not an event: {error.facts.get('problem')}", hint=hint) from None
    if not isinstance(value, dict):
        raise UsageFailure(f"{source} is not a JSON object", hint=hint)
    return value


def _selects(kind: str | None, node: str | None) -> Callable[[Recorded], bool]:
    """A filter for events of this type, about this node or nodes below it."""
    from holdfast.ledger.log import is_node_id, is_under, node_id

    top = None if node is None else node_id(node)

    def selects(recorded: Recorded) -> bool:
        found = recorded.event.get("node_id")
        about = top is None or (is_node_id(found) and is_under(str(found), top))
        return about and (kind is None or recorded.event.get("type") == kind)

    return selects


_after_option = click.option("--after", metavar="N", type=click.IntRange(0), help="Only events after N.")
_type_option = click.option("--type", "kind", metavar="TYPE", help="Only events of this type.")
_node_option = click.option("--node", metavar="NODE", help="Only events about this node or nodes below it.")


@group.command(short_help="Show events: for people on a terminal, as JSON lines through a pipe.")
@ledger_option
@_after_option
@click.option("--until", metavar="N", type=click.IntRange(1), help="Only events up to N.")
@options.limit_option("Only the last N events.")
@_type_option
@_node_option
@options.with_output
def log(
    output: Output,
    *,
    repo: str,
    after: int | None,
    until: int | None,
    limit: int | None,
    kind: str | None,
    node: str | None,
) -> None:
    """Show the events in order. Takes no lock, so it never waits.

    On a terminal, each event is a line for people; through a pipe, a line of JSON, {"sequence":N,"event":{...}}. With
    --json, all of them are one JSON object.

    \b
    Examples:
      holdfast ledger log --limit 20
      holdfast ledger log --node 1.2 --type lock_acquired
      holdfast ledger log | jq -r .event.type | sort | uniq -c
    """
    from holdfast.ledger.log import events_to_json

    ledger, selects = open_at(repo).ledger, _selects(kind, node)
    last = limit if kind is None and node is None and until is None else None  # events that are not shown are not read
    if after is None:
        events = ledger.latest(last, until=until)
    else:
        events = ledger.events(after=max(after, ledger.sequence - last) if last else after, until=until)
    found = filter(selects, events)
    chosen = found if limit is None else iter(deque(found, maxlen=limit))
    if output.as_json:
        output.result(events_to_json(chosen))
    else:
        _print_events(chosen, output)


@group.command(short_help="Show new events as they are appended.")
@ledger_option
@_after_option
@_type_option
@_node_option
@options.limit_option("Stop after N events.")
@options.wait_option("How long to wait for the next event before stopping", default="forever", default_text="forever")
@options.with_output
def watch(
    output: Output,
    *,
    repo: str,
    after: int | None,
    kind: str | None,
    node: str | None,
    limit: int | None,
    wait: float | None,
) -> None:
    """Show each event as it is appended, in the format of 'log'; with --after, first the events after N.

    With --json, one JSON object per line for each event.

    \b
    Examples:
      holdfast ledger watch
      holdfast ledger watch --node 1.2 --limit 1 --wait 10m
    """
    from holdfast.ledger.log import event_to_json

    chosen = filter(_selects(kind, node), open_at(repo).ledger.watch(after=after, timeout=wait))
    limited = chosen if limit is None else (each for _, each in zip(range(limit), chosen, strict=False))
    if output.as_json:
        for each in limited:
            output.result(event_to_json(each))
    else:
        _print_events(limited, output)


@group.command(short_help="Show one event, by its sequence or by its id.")
@click.argument("event")
@in_ledger
def show(output: Output, *, event: str, repo: str) -> None:
    """Show EVENT in full: a sequence such as 41, or the id of an event.

    If the outcome of an append is unknown, look the event up by its id.

    \b
    Examples:
      holdfast ledger show 41
      holdfast ledger show 6f1c0a52-8f3b-4c39-9d5e-0a1b2c3d4e5f
    """
    from holdfast.ledger.log import event_to_json

    ledger = open_at(repo).ledger
    is_sequence = event.isascii() and event.isdigit() and len(event) < 12
    found: Recorded | None = ledger.read(int(event)) if is_sequence else ledger.find(event)
    if found is None:
        raise NotFound(
            f"the ledger has no event with the id {event}",
            hint="If you are checking whether the event was appended: it was not.",
            event_id=event,
        )
    width = max((len(name) for name in found.event), default=0)
    fields = [f"  {name:<{width}}  {value}" for name, value in found.event.items()]
    output.result(event_to_json(found), [f"event {found.sequence}", *fields])


def _print_events(events: Iterable[Recorded], output: Output) -> None:
    """On a terminal, a line for people per event; elsewhere, a line of JSON."""
    from holdfast.fs import strictjson
    from holdfast.ledger.log import event_to_json

    for each in events:
        if sys.stdout is not None and sys.stdout.isatty():
            output.line(event_line(each))
        else:
            output.text(escaped_json(strictjson.encode(event_to_json(each)).decode()))


_COLUMNS = ("type", "timestamp", "node_id", "owner")
_NOT_SHOWN = ("id", "claim_id", "ticket", "holder")
_LONGEST_VALUE = 60


def event_line(recorded: Recorded) -> str:
    """An event on one line: sequence, time, type, node, owner, the rest."""
    event = recorded.event
    when = str(event.get("timestamp", ""))[:19].replace("T", " ")
    start = f"{recorded.sequence:>6}  {when:<19}  {event.get('type', '?')!s:<16}"
    node, owner = event.get("node_id", ""), event.get("owner", "")
    others = [(name, str(value)) for name, value in event.items() if name not in _COLUMNS + _NOT_SHOWN]
    rest = " ".join(f"{name}={shortened(value, _LONGEST_VALUE)}" for name, value in others)
    return "  ".join(part for part in (start, f"{node!s:<8}", str(owner), rest) if part.strip()).rstrip()


@group.command(short_help="Show the length of the ledger, its lock and the number of claims.")
@in_ledger
def status(output: Output, *, repo: str) -> None:
    """Show the sequence of the ledger, the holder of its lock, and the number of claims. Changes nothing.

    \b
    Example:
      holdfast ledger status
    """
    opened = open_at(repo)
    claims, lock, archive = opened.claims, opened.lock.state() if opened.lock else None, opened.archived()
    record = {
        "root": str(opened.root),
        "sequence": opened.ledger.sequence,
        "lock": None if lock is None else ledger_lock_to_json(lock),
        "lock_timeout": claims.lock_timeout(),
        "claim_files": opened.files is not None,
        "active_claims": len(claims.active()),
        "expired_claims": len(claims.expired()),
        "waiting": len(claims.waiting()),
        "archived": archive.last if archive else 0,
        "segments": [each.file for each in archive.segments] if archive else [],
    }
    output.result(record, _status_lines(record))


def _status_lines(record: Mapping[str, Any]) -> Iterator[str]:
    lock, active, expired = record["lock"], record["active_claims"], record["expired_claims"]
    yield f"{record['root']}: {counted(record['sequence'], 'event')}"
    yield f"  lock     {'free' if lock is None else 'held by ' + lock['shown']}"
    yield f"  claims   {active} active, {expired} expired, {record['waiting']} waiting"
    yield f"  ttl      {format_duration(record['lock_timeout'])} for each claim, unless given"
    for each in record["segments"]:
        yield f"  archived {each}"


@group.command(short_help="Check the ledger, and say what to do about each finding.")
@options.archive_option
@in_ledger
def verify(output: Output, *, repo: str, archive: Sequence[str]) -> None:
    """Check for gaps, torn or foreign files, wrong names, and events that contradict each other.

    Repairs nothing. Fails with status 6 if there is an error. Harmless findings, such as drafts left by an
    interruption, are notes. Each finding says what to do about it.

    \b
    Examples:
      holdfast ledger verify
      holdfast ledger verify --archive /srv/archive/ledger-1-90000.jsonl
    """
    from holdfast.cli.progress import showing
    from holdfast.ledger.verify import finding_to_json

    opened = open_at(repo)
    with showing("Verifying"):
        report = opened.verify(tuple(map(Path, archive)))
    findings = [finding_to_json(each) for each in report.findings]
    lines = [f"{counted(report.events, 'event')} can be read in order."]
    for each in report.findings:
        lines += [f"{each.severity}: {each.subject}", f"  {each.message}", f"  -> {each.remedy}"]
    if report.sound or not output.as_json:
        output.result({"sound": report.sound, "events": report.events, "findings": findings}, lines)
    if report.sound:
        return
    errors = sum(each.severity == "error" for each in report.findings)
    raise Corrupt(
        f"the ledger has {errors} {'error' if errors == 1 else 'errors'}",
        hint="Each finding says what to do about it. Nothing was changed.",
        events=report.events,
        findings=findings,
    )


@group.command(short_help="Show the holder of the ledger's lock; break the lock by its exact identity.")
@ledger_option
@click.option("--identity", metavar="IDENTITY", help="Break the lock that has this identity.")
@options.with_output
def unlock(output: Output, *, repo: str, identity: str | None) -> None:
    """Show the holder of ledger.lock and whether it is certainly dead; with --identity, break the lock.

    The next writer takes over a lock whose holder is certainly dead. A lock that is only old may belong to a suspended
    process: break it only if you know that the process will not continue. If it does, it may overwrite the next event,
    as the specification allows. Breaking such a lock therefore first appends an event of type ledger_unlocked, which
    would be overwritten instead. A process that counts the events only after that may still overwrite an event that is
    appended at the same moment; 'ledger verify' reports this.

    \b
    Examples:
      holdfast ledger unlock
      holdfast ledger unlock --identity 9f86d081884c7d65
    """
    opened = open_at(repo)
    if opened.lock is None:
        raise NotFound("this ledger is on a server and has no lock file", path=str(opened.root))
    state = opened.lock.state()
    record = None if state is None else ledger_lock_to_json(state)
    if identity is None:
        lines = [f"{opened.lock.path}: free"] if state is None else _lock_lines(state)
        output.result({"lock": record, "broken": False}, lines)
        return
    event = opened.break_lock(identity)
    lines = [f"Broke the lock {identity} of {opened.lock.path}."]
    lines += [] if event is None else [f"Event {event} records that its holder may still be alive."]
    output.result({"lock": record, "broken": True, "sequence": event}, lines)


_LIVENESS = {
    "dead": "certainly dead: the next writer takes the lock over",
    "alive": "alive: wait for it, or find out why it is stuck",
    "unknown": "unknown: the lock does not identify its holder, or the holder is on another machine",
}


def ledger_lock_to_json(state: LedgerLockState) -> dict[str, Any]:
    return {**state.as_record(), "certainly_dead": state.liveness.value == "dead", "path": str(state.path)}


def _lock_lines(state: LedgerLockState) -> Iterator[str]:
    holder = state.agent_id or ("a shell tool, which records no name" if state.is_directory else "unknown")
    yield f"{state.path}: held by {holder}"
    if state.holder is not None:
        yield f"  process   {state.holder.holder_id}"
    yield f"  age       {format_duration(state.age)}"
    yield f"  holder    {_LIVENESS[state.liveness.value]}"
    yield f"  identity  {state.identity}"
    if state.liveness.value == "dead":
        return
    yield ""
    if not state.suspect:
        yield "The lock is recent: a process is probably writing right now."
    yield "If you are certain that the holder will not continue, break the lock:"
    yield f"  holdfast ledger unlock --identity {state.identity}"
