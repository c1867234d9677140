"""`holdfast ledger`: an event log that many agents append to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from holdfast.cli.entry import Group
from holdfast.cli.options import duration, field_of, json_option, store_address
from holdfast.cli.output import Output
from holdfast.cli.repository import ACTOR, REPO

if TYPE_CHECKING:
    from holdfast.repository.opening import OpenLedger

group = Group(
    "ledger",
    help="""\
An append-only log of events in plain files, DIRECTORY/ledger/event-000001.json and so on. Any number
of agents append at the same time, together with other programs that keep to its lock; nobody loses an
event, and reading takes no lock.

\b
Example:
  holdfast ledger init
  holdfast ledger append '{"type":"note","text":"the build is red"}'
  holdfast ledger log
""",
)


def _nearest(context: click.Context, _: click.Parameter, named: str | None) -> str:
    """The directory that was named, else the nearest one that has a ledger, else the one we are in."""
    if named or context.resilient_parsing:
        return named or "."
    from holdfast.repository.opening import find_ledger

    found = find_ledger(".")
    if found is None and (repo := os.environ.get(REPO)):
        found = find_ledger(repo)
    return "." if found is None else str(found)


directory_option = click.option(
    "--dir",
    "directory",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False),
    callback=_nearest,
    help="The directory that has the ledger.  [default: the current one, or the nearest above it that has "
    "one, else HOLDFAST_REPO]",
)
_new_directory_option = click.option(
    "--dir",
    "directory",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False),
    default=".",
    help="The directory that gets the ledger.  [default: the current one]",
)


def open_at(directory: str) -> OpenLedger:
    """The ledger of the directory that was named."""
    from holdfast.repository.opening import open_ledger

    return open_ledger(directory, address=store_address(os.environ), actor=os.environ.get(ACTOR))


@group.command(short_help="Begin a ledger in a directory.")
@_new_directory_option
@click.option(
    "--lock-timeout",
    metavar="DURATION",
    default="5m",
    show_default=True,
    callback=duration,
    help="How long a claim lasts unless its owner says otherwise: from 1s to 1h.",
)
@click.option(
    "--claim-files",
    is_flag=True,
    help="Keep each claim as a file in locks/ too, for programs that look there.",
)
@json_option
@click.pass_obj
def init(output: Output, *, directory: str, lock_timeout: float, claim_files: bool) -> None:
    """Begin a ledger. It is made of DIRECTORY/meta.json and DIRECTORY/ledger/.

    \b
    Examples:
      holdfast ledger init
      holdfast ledger init --dir proof --lock-timeout 10m
    """
    from holdfast.repository.opening import init_ledger

    address = store_address(os.environ)
    made = init_ledger(directory, lock_timeout=lock_timeout, claim_files=claim_files, address=address)
    record = {"root": str(made.root), "sequence": made.ledger.sequence, "lock_timeout": lock_timeout}
    output.result(record, [f"Began a ledger in {made.root}."])


@group.command(short_help="Append an event, or many at once.")
@click.argument("event")
@directory_option
@click.option(
    "--if-sequence",
    metavar="N",
    type=click.IntRange(0),
    help="Append only if the ledger is still at N; otherwise change nothing and end with status 4.",
)
@field_of("sequence", "event")
@json_option
@click.pass_obj
def append(output: Output, *, event: str, directory: str, if_sequence: int | None, field: str | None) -> None:
    """Append EVENT, a JSON object with a "type"; with '-', the JSON lines of standard input.

    Lines are appended all or not at all. An event without a "timestamp" gets one, and so it gets an
    "id": by that it can be found if you could not see whether it was appended. Events over 1 MiB are
    refused. What was appended is on the disk when this ends.

    \b
    Examples:
      holdfast ledger append '{"type":"note","text":"the build is red"}'
      holdfast ledger append '{"type":"note"}' --if-sequence 41
      ./report | holdfast ledger append -
    """
    from holdfast.cli.ledger_events import append_lines, append_one

    opened = open_at(directory)
    if event == "-":
        if if_sequence is not None:
            raise click.UsageError("--if-sequence takes one event.", click.get_current_context())
        append_lines(opened.ledger, output, field)
    else:
        append_one(opened.ledger, event, if_sequence, output, field)


_after_option = click.option(
    "--after", metavar="N", type=click.IntRange(0), default=None, help="Only events behind N."
)
_type_option = click.option("--type", "kind", metavar="TYPE", help="Only events of this type.")
_node_option = click.option("--node", metavar="NODE", help="Only events about this node, or nodes below it.")


@group.command(short_help="Show the events: for people on a terminal, as JSON lines through a pipe.")
@directory_option
@_after_option
@click.option("--until", metavar="N", type=click.IntRange(1), help="Only events up to N.")
@click.option("--last", metavar="COUNT", type=click.IntRange(1), help="Only the last COUNT events.")
@_type_option
@_node_option
@json_option
@click.pass_obj
def log(
    output: Output,
    *,
    directory: str,
    after: int | None,
    until: int | None,
    last: int | None,
    kind: str | None,
    node: str | None,
) -> None:
    """Show the events in order. Takes no lock, so it never waits for anybody.

    On a terminal each event is a line for people. Through a pipe each is a line of JSON,
    {"sequence":N,"event":{...}}. With --json all of them are one JSON object.

    \b
    Examples:
      holdfast ledger log --last 20
      holdfast ledger log --node 1.2 --type lock_acquired
      holdfast ledger log | jq -r .event.type | sort | uniq -c
    """
    from holdfast.cli.ledger_events import Selection, show_log

    show_log(open_at(directory).ledger, Selection(after or 0, until, last, kind, node), output)


@group.command(short_help="Show one event, by its sequence or by its id.")
@click.argument("event")
@directory_option
@json_option
@click.pass_obj
def show(output: Output, *, event: str, directory: str) -> None:
    """Show EVENT whole: a sequence such as 41, or the id of an event.

    Use the id to find out whether an append was made whose outcome you could not see.

    \b
    Examples:
      holdfast ledger show 41
      holdfast ledger show 6f1c0a52-8f3b-4c39-9d5e-0a1b2c3d4e5f
    """
    from holdfast.cli.ledger_events import show_one

    show_one(open_at(directory).ledger, event, output)


@group.command(short_help="Show how long the ledger is, who writes, who has claimed what.")
@directory_option
@json_option
@click.pass_obj
def status(output: Output, *, directory: str) -> None:
    """Show where the ledger stands, who holds its lock, and how many claims there are. Changes nothing.

    \b
    Example:
      holdfast ledger status
    """
    from holdfast.cli.ledger_events import ledger_status_to_json, status_lines

    record = ledger_status_to_json(open_at(directory))
    output.result(record, status_lines(record))


@group.command(short_help="Look the ledger over, and say what to do about what is wrong.")
@directory_option
@json_option
@click.pass_obj
def verify(output: Output, *, directory: str) -> None:
    """Look for gaps, torn or foreign files, wrong names, and events that contradict each other.

    Changes nothing. Ends with status 6 if something is wrong; drafts that an interruption left and
    other things that only need to be known are notes. Each comes with what to do about it.

    \b
    Example:
      holdfast ledger verify
    """
    from holdfast.cli.ledger_events import report_verdict

    report_verdict(open_at(directory).verify(), output)


@group.command(short_help="Show events as they come.")
@directory_option
@_after_option
@_type_option
@_node_option
@click.option("--count", metavar="COUNT", type=click.IntRange(1), help="End after so many events.")
@click.option(
    "--timeout", metavar="DURATION", callback=duration, help="End when nothing has come for so long."
)
@json_option
@click.pass_obj
def watch(
    output: Output,
    *,
    directory: str,
    after: int | None,
    kind: str | None,
    node: str | None,
    count: int | None,
    timeout: float | None,
) -> None:
    """Show each event when it comes, in the same form as 'log'; with --after, those behind N first.

    With --json, one JSON object per line for each event.

    \b
    Examples:
      holdfast ledger watch
      holdfast ledger watch --node 1.2 --count 1 --timeout 10m
    """
    from holdfast.cli.ledger_events import Selection, show_watch

    selection = Selection(after, None, None, kind, node)
    show_watch(open_at(directory).ledger, selection, output, count=count, timeout=timeout)


@group.command(short_help="Show who holds the ledger's lock; break it by its exact identity.")
@directory_option
@click.option("--identity", metavar="IDENTITY", help="Break the lock that has this identity.")
@json_option
@click.pass_obj
def unlock(output: Output, *, directory: str, identity: str | None) -> None:
    """Show who holds ledger.lock and whether that is certainly dead; with --identity, break the lock.

    A lock whose holder is certainly dead needs no breaking: the next writer takes it over. One that
    is only old may belong to a process that is stopped and will go on. Break it only if you know
    better. No event is lost even if you are wrong: events are never overwritten.

    \b
    Examples:
      holdfast ledger unlock
      holdfast ledger unlock --identity 9f86d081884c7d65
    """
    from holdfast.cli.ledger_events import unlock as unlock_lock

    unlock_lock(open_at(directory), identity, output)
