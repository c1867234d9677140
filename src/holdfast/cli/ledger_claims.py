"""`holdfast ledger claim` and related commands: reserve the nodes of a ledger, so that no work is done twice."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import click

from holdfast.cli import ACTOR, options
from holdfast.cli.ledger import event_line, in_ledger, open_at
from holdfast.cli.output import Output, plain_table
from holdfast.cli.progress import waiting, waiting_for
from holdfast.clock import format_ago, format_duration
from holdfast.ledger.log import event_to_json, is_under, node_id
from holdfast.ledger.projection import Claim, ClaimWaiter
from holdfast.ledger.service import Claims

CLAIM_FIELDS = "claim_id node_id actor created_at expires_at time_left sequence purpose holder".split()


def _actor(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    chosen = value or os.environ.get(ACTOR) or ""
    if not chosen and not context.resilient_parsing:
        raise click.UsageError(f"Name the actor: --actor, or {ACTOR}.", context)
    return chosen


_actor_option = options.actor_option("none", callback=_actor)
_ttl_option = options.ttl_option("Time until the claim expires, from 1s to 1h.  [default: lock_timeout of the ledger]")
_claim_id_option = click.option(
    "--claim", "claim_id", metavar="ID", default="", help="Only if the claim has this id, as printed by 'claim'."
)


@click.command(short_help="Claim a node, at once or by waiting in the queue.")
@click.argument("node")
@_actor_option
@_ttl_option
@options.wait_option("How long to wait in the queue")
@options.priority_option
@options.purpose_option
@options.field_option(*CLAIM_FIELDS)
@in_ledger
def claim(
    output: Output,
    *,
    node: str,
    actor: str,
    ttl: float | None,
    wait: float | None,
    priority: int,
    purpose: str,
    field: str | None,
    repo: str,
) -> None:
    """Claim NODE. Fails with status 4 if another actor holds it, or with 75 when --wait has passed.

    The claim outlives this command: extend it while you work, and release it when you are done.

    \b
    Examples:
      holdfast ledger claim 1.2.3 --actor agent-7 --ttl 10m
      holdfast ledger claim 1.2.3 --actor agent-7 --wait 1m --json
    """
    from holdfast.locks.identity import calling_agent

    claims = open_at(repo).claims
    given: dict[str, Any] = {"ttl": ttl, "priority": priority, "purpose": purpose, "behalf_of": calling_agent()}
    with contextlib.ExitStack() as unless_printed:
        with waiting(wait, lambda: _waiting_text(claims, node)):
            held = claims.claim(node, actor, wait=wait, **given)
            made = held.claim
            release = partial(claims.release, made.node_id, made.owner, claim_id=made.claim_id)
            unless_printed.enter_context(options.given_back(release))
        now = claims.ledger.store.now()
        options.print_record(output, field, claim_to_json(made, now), _claim_lines("Claimed", made, now))


def _waiting_text(claims: Claims, node: str) -> str:
    held = next((each for each in claims.active() if each.node_id == node), None)
    known = (held.owner, held.expiry() - claims.ledger.store.now()) if held else ()
    return waiting_for(f"the node {node}", *known)


@click.command(short_help="Release a claim.")
@click.argument("node")
@_actor_option
@_claim_id_option
@in_ledger
def release(output: Output, *, node: str, actor: str, claim_id: str, repo: str) -> None:
    """Release the actor's claim on NODE. Fails with status 5 if the actor does not hold it.

    \b
    Example:
      holdfast ledger release 1.2.3 --actor agent-7
    """
    claims = open_at(repo).claims
    held = claims.release(node, actor, claim_id=claim_id)
    output.result(claim_to_json(held, claims.ledger.store.now()), [f"Released {held.node_id}."])


@click.command(short_help="Renew a claim.")
@click.argument("node")
@_actor_option
@_ttl_option
@_claim_id_option
@in_ledger
def extend(output: Output, *, node: str, actor: str, ttl: float | None, claim_id: str, repo: str) -> None:
    """Renew the actor's claim on NODE for --ttl from now.

    Fails with status 5 if the actor does not hold it, or it has expired: stop working on the node, because another
    actor may have claimed it.

    \b
    Example:
      holdfast ledger extend 1.2.3 --actor agent-7 --ttl 10m
    """
    claims = open_at(repo).claims
    held = claims.extend(node, actor, ttl=ttl, claim_id=claim_id)
    now = claims.ledger.store.now()
    output.result(claim_to_json(held, now), _claim_lines("Extended", held, now))


@click.command(short_help="List the claims and their waiters.")
@click.option("--under", metavar="NODE", help="Only this node and those below it.")
@click.option("--at-sequence", metavar="N", type=click.IntRange(0), help="The claims as of event N.")
@in_ledger
def claims(output: Output, *, under: str | None, at_sequence: int | None, repo: str) -> None:
    """List the active claims, the expired claims and the waiters. Changes nothing.

    \b
    Examples:
      holdfast ledger claims
      holdfast ledger claims --under 1.2
      holdfast ledger claims --at-sequence 41
    """
    record = _claims_to_json(open_at(repo).claims, under=under, at_sequence=at_sequence)
    output.result(record, _list_lines(record))


@click.command(short_help="Reap expired claims.")
@options.dry_run_option("Show the expired claims; change nothing.")
@in_ledger
def reap(output: Output, *, dry_run: bool, repo: str) -> None:
    """Reap expired claims. Each is reaped by exactly one event, however many processes reap.

    This is optional: claiming a node reaps its expired claim first. Claim files, if the ledger has them, are brought up
    to date as well.

    \b
    Example:
      holdfast ledger reap
    """
    claims = open_at(repo).claims
    reaped = claims.expired() if dry_run else claims.reap()
    now = claims.ledger.store.now()
    word = "Would reap" if dry_run else "Reaped"
    lines = [f"{word} {each.node_id}, which {each.owner} held until {each.expires_at}." for each in reaped]
    record = {"dry_run": dry_run, "reaped": [claim_to_json(each, now) for each in reaped]}
    output.result(record, lines or ["No claim has expired."])


@click.command("claim-history", short_help="Show every event about claims on a node.")
@click.argument("node")
@in_ledger
def claim_history(output: Output, *, node: str, repo: str) -> None:
    """Show every claim, extension, release, wait and expiry of NODE, in order.

    \b
    Example:
      holdfast ledger claim-history 1.2.3
    """
    claims = open_at(repo).claims
    found = claims.history(node)
    record = {"node_id": node, "events": [event_to_json(each) for each in found]}
    none = "There are none." if claims.ledger.archived else f"{node} has never been claimed."
    output.result(record, [event_line(each) for each in found] or [none])


def claim_to_json(claim: Claim, now: float) -> dict[str, Any]:
    return {
        "node_id": claim.node_id,
        "actor": claim.owner,
        "claim_id": claim.claim_id,
        "created_at": claim.acquired_at,
        "expires_at": claim.expires_at,
        "time_left": round(claim.expiry() - now, 3),
        "sequence": claim.sequence,
        "purpose": claim.purpose,
        "holder": claim.holder,
    }


def _claim_lines(word: str, claim: Claim, now: float) -> list[str]:
    left = format_duration(claim.expiry() - now)
    lines = [f"{word} {claim.node_id} for {claim.owner}; expires in {left} ({claim.expires_at})."]
    return [*lines, f"  claim id  {claim.claim_id}"] if claim.claim_id else lines


def _claims_to_json(claims: Claims, *, under: str | None, at_sequence: int | None) -> dict[str, Any]:
    """All claims. Expired claims and waiters are listed for the present only."""
    now = claims.ledger.store.now()
    top = None if under is None else node_id(under)

    def is_listed(each: Claim | ClaimWaiter) -> bool:
        return at_sequence is None and (top is None or is_under(each.node_id, top))

    return {
        "at_sequence": at_sequence,
        "active": [claim_to_json(each, now) for each in claims.active(at_sequence=at_sequence, under=under)],
        "expired": [claim_to_json(each, now) for each in filter(is_listed, claims.expired())],
        "waiting": [_waiter_to_json(each) for each in filter(is_listed, claims.waiting())],
    }


def _waiter_to_json(waiter: ClaimWaiter) -> dict[str, Any]:
    known = {"node_id": waiter.node_id, "actor": waiter.owner, "ticket": waiter.ticket}
    return {**known, "priority": waiter.priority, "sequence": waiter.sequence}


def _list_lines(record: Mapping[str, Any]) -> Iterator[str]:
    rows = [_row(each, state) for state in ("active", "expired") for each in record[state]]
    columns = ["NODE", "ACTOR", "STATE", "SINCE", "LEFT"]
    if record["at_sequence"] is not None:  # the time left is that of now, not of event N
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    if rows:
        yield from plain_table(columns, rows)
    elif not record["waiting"]:
        yield "Nothing is claimed."
    for each in record["waiting"]:
        yield f"{each['node_id']}: {each['actor']} waits (priority {each['priority']})"


def _row(claim: Mapping[str, Any], state: str) -> list[str]:
    since, left = format_ago(claim["created_at"]), format_duration(claim["time_left"])
    return [claim["node_id"], claim["actor"], state, since, left]
