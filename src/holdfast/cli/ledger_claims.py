"""`holdfast claim`: reserve work in a ledger, so that nobody does it twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from holdfast.cli.entry import Group
from holdfast.cli.ledger import directory_option, open_at
from holdfast.cli.options import (
    CLAIM_FIELDS,
    UNLIMITED,
    duration,
    duration_or_none,
    field_of,
    json_option,
    tell,
)
from holdfast.cli.output import Output
from holdfast.clock import format_duration
from holdfast.ledger.log import is_under, node_id
from holdfast.ledger.projection import Claim, ClaimWaiter
from holdfast.ledger.service import Claims

group = Group(
    "claim",
    help="""\
Claims reserve the nodes of a ledger, such as 1.2.3, each for one owner at a time. A claim lasts until
it is released or has run out; whoever waits for it gets it in turn. Claims are events of the ledger.

\b
Example:
  holdfast claim take 1.2.3 --owner agent-7 --wait 1m
  holdfast claim release 1.2.3 --owner agent-7
""",
)

_owner_option = click.option("--owner", required=True, metavar="OWNER", help="In whose name.")
_ttl_option = click.option(
    "--ttl",
    metavar="DURATION",
    callback=duration,
    help="How long the claim lasts, from 1s to 1h.  [default: lock_timeout of the ledger]",
)
_claim_id_option = click.option(
    "--claim-id", metavar="ID", default="", help="Only if it is this very claim, as 'take' printed it."
)


@group.command(short_help="Claim a node, at once or by waiting in line.")
@click.argument("node")
@_owner_option
@_ttl_option
@click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait in line, such as 30s, 5m; 'none': without limit.  "
    "[default: not at all, fail with status 4]",
)
@click.option(
    "--priority",
    metavar="N",
    type=int,
    default=0,
    help="Who has a higher one is served first; equal ones in the order in which they asked.  [default: 0]",
)
@click.option("--purpose", metavar="TEXT", default="", help="What for: others are shown it.")
@field_of(*CLAIM_FIELDS)
@directory_option
@json_option
@click.pass_obj
def take(
    output: Output,
    *,
    node: str,
    owner: str,
    ttl: float | None,
    wait: float | None,
    priority: int,
    purpose: str,
    field: str | None,
    directory: str,
) -> None:
    """Claim NODE for OWNER. Ends with status 4 if another has it, with 75 if waiting was not enough.

    The claim outlives this command: extend it while you work, release it when you are done.

    \b
    Examples:
      holdfast claim take 1.2.3 --owner agent-7 --ttl 10m
      holdfast claim take 1.2.3 --owner agent-7 --wait 1m --json
    """
    from holdfast.locks.identity import calling_agent

    claims = open_at(directory).claims
    limit = 0.0 if wait is None else None if wait == UNLIMITED else wait
    held = claims.claim(
        node, owner, ttl=ttl, wait=limit, priority=priority, purpose=purpose, behalf_of=calling_agent()
    )
    now = claims.ledger.store.now()
    tell(output, field, claim_to_json(held.claim, now), claim_lines("Claimed", held.claim, now))


@group.command(short_help="Give a claim back.")
@click.argument("node")
@_owner_option
@_claim_id_option
@directory_option
@json_option
@click.pass_obj
def release(output: Output, *, node: str, owner: str, claim_id: str, directory: str) -> None:
    """Release the claim of OWNER on NODE. Ends with status 5 if OWNER does not have it (any more).

    \b
    Example:
      holdfast claim release 1.2.3 --owner agent-7
    """

    claims = open_at(directory).claims
    held = claims.release(node, owner, claim_id=claim_id)
    output.result(claim_to_json(held, claims.ledger.store.now()), [f"Released {held.node_id}."])


@group.command(short_help="Let a claim run on.")
@click.argument("node")
@_owner_option
@_ttl_option
@_claim_id_option
@directory_option
@json_option
@click.pass_obj
def extend(
    output: Output, *, node: str, owner: str, ttl: float | None, claim_id: str, directory: str
) -> None:
    """Let the claim of OWNER on NODE run for another --ttl from now.

    Ends with status 5 if OWNER does not have it (any more) or it has run out: stop working on the
    node, somebody else may have begun.

    \b
    Example:
      holdfast claim extend 1.2.3 --owner agent-7 --ttl 10m
    """

    claims = open_at(directory).claims
    held = claims.extend(node, owner, ttl=ttl, claim_id=claim_id)
    now = claims.ledger.store.now()
    output.result(claim_to_json(held, now), claim_lines("Extended", held, now))


@group.command("list", short_help="Show who has claimed what, and who waits.")
@click.option("--under", metavar="NODE", help="Only this node and those below it.")
@click.option(
    "--at-sequence", metavar="N", type=click.IntRange(0), help="As it was at the moment of event N."
)
@directory_option
@json_option
@click.pass_obj
def list_(output: Output, *, under: str | None, at_sequence: int | None, directory: str) -> None:
    """Show the claims that count now, those that have run out, and who waits. Changes nothing.

    \b
    Examples:
      holdfast claim list
      holdfast claim list --under 1.2
      holdfast claim list --at-sequence 41
    """

    record = claims_to_json(open_at(directory).claims, under=under, at_sequence=at_sequence)
    output.result(record, list_lines(record))


@group.command(short_help="Clear away claims that have run out.")
@click.option("--dry-run", is_flag=True, help="Only show which they are.")
@directory_option
@json_option
@click.pass_obj
def reap(output: Output, *, dry_run: bool, directory: str) -> None:
    """Clear away the claims that have run out, each by one event, however many reap at the same time.

    Nobody has to: whoever claims a node clears its old claim away first. Claim files, if the ledger
    has them, are brought into step as well.

    \b
    Example:
      holdfast claim reap
    """

    claims = open_at(directory).claims
    reaped = claims.expired() if dry_run else claims.reap()
    now = claims.ledger.store.now()
    word = "Would reap" if dry_run else "Reaped"
    lines = [f"{word} {each.node_id}, which {each.owner} had until {each.expires_at}." for each in reaped]
    record = {"dry_run": dry_run, "reaped": [claim_to_json(each, now) for each in reaped]}
    output.result(record, lines or ["No claim has run out."])


@group.command(short_help="Show everything that happened to the claims on a node.")
@click.argument("node")
@directory_option
@json_option
@click.pass_obj
def history(output: Output, *, node: str, directory: str) -> None:
    """Show who claimed, extended, released, waited for and was reaped from NODE, in order.

    \b
    Example:
      holdfast claim history 1.2.3
    """
    from holdfast.cli.ledger_events import event_line, event_to_json

    found = open_at(directory).claims.history(node)
    lines = [event_line(each) for each in found]
    record = {"node_id": node, "events": [event_to_json(each) for each in found]}
    output.result(record, lines or [f"Nobody has ever claimed {node}."])


def claim_to_json(claim: Claim, now: float) -> dict[str, Any]:
    """A claim for programs."""
    return {
        "node_id": claim.node_id,
        "owner": claim.owner,
        "claim_id": claim.claim_id,
        "acquired_at": claim.acquired_at,
        "expires_at": claim.expires_at,
        "time_left": round(claim.expiry() - now, 3),
        "sequence": claim.sequence,
        "purpose": claim.purpose,
        "holder": claim.holder,
    }


def claim_lines(word: str, claim: Claim, now: float) -> list[str]:
    """What came of taking or extending one."""
    left = format_duration(claim.expiry() - now)
    lines = [f"{word} {claim.node_id} for {claim.owner}, for {left} (until {claim.expires_at})."]
    return [*lines, f"  claim id  {claim.claim_id}"] if claim.claim_id else lines


def claims_to_json(claims: Claims, *, under: str | None, at_sequence: int | None) -> dict[str, Any]:
    """All claims, for programs. Those that have run out and those who wait are shown for now only."""
    now = claims.ledger.store.now()
    active = claims.active(at_sequence=at_sequence, under=under)
    past = at_sequence is not None
    above = None if under is None else node_id(under)
    expired = [] if past else [each for each in claims.expired() if _within(each, above)]
    waiting = [] if past else [each for each in claims.waiting() if _within(each, above)]
    return {
        "at_sequence": at_sequence,
        "active": [claim_to_json(each, now) for each in active],
        "expired": [claim_to_json(each, now) for each in expired],
        "waiting": [_waiter_to_json(each) for each in waiting],
    }


def list_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The same for people, in columns."""
    rows = [_row(each, "active") for each in record["active"]]
    rows += [_row(each, "run out") for each in record["expired"]]
    if not rows and not record["waiting"]:
        yield "Nothing is claimed."
        return
    if rows:
        yield from _columns([("NODE", "OWNER", "STATE", "LEFT", "SINCE"), *rows], past=record["at_sequence"])
    for each in record["waiting"]:
        yield f"{each['node_id']}: {each['owner']} waits (priority {each['priority']})"


def _row(claim: Mapping[str, Any], state: str) -> tuple[str, ...]:
    return (
        claim["node_id"],
        claim["owner"],
        state,
        format_duration(claim["time_left"]),
        claim["acquired_at"][:19].replace("T", " "),
    )


def _columns(rows: list[tuple[str, ...]], *, past: int | None) -> Iterator[str]:
    if past is not None:  # how much time was left then says nothing now
        rows = [(row[0], row[1], row[2], row[4]) for row in rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _waiter_to_json(waiter: ClaimWaiter) -> dict[str, Any]:
    return {
        "node_id": waiter.node_id,
        "owner": waiter.owner,
        "ticket": waiter.ticket,
        "priority": waiter.priority,
        "since_sequence": waiter.sequence,
    }


def _within(each: Claim | ClaimWaiter, above: str | None) -> bool:
    return above is None or is_under(each.node_id, above)
