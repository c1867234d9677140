"""Claims as they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.clock import format_duration
from holdfast.ledger.log import is_under, node_id
from holdfast.ledger.projection import Claim, ClaimWaiter
from holdfast.ledger.service import Claims


def claim_record(claim: Claim, now: float) -> dict[str, Any]:
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


def taken_lines(word: str, claim: Claim, now: float) -> list[str]:
    """What came of taking or extending one."""
    left = format_duration(claim.expiry() - now)
    lines = [f"{word} {claim.node_id} for {claim.owner}, for {left} (until {claim.expires_at})."]
    return [*lines, f"  claim id  {claim.claim_id}"] if claim.claim_id else lines


def list_record(claims: Claims, *, under: str | None, at_sequence: int | None) -> dict[str, Any]:
    """All claims, for programs. Those that have run out and those who wait are shown for now only."""
    now = claims.ledger.store.now()
    active = claims.active(at_sequence=at_sequence, under=under)
    past = at_sequence is not None
    above = None if under is None else node_id(under)
    expired = [] if past else [each for each in claims.expired() if _within(each, above)]
    waiting = [] if past else [each for each in claims.waiting() if _within(each, above)]
    return {
        "at_sequence": at_sequence,
        "active": [claim_record(each, now) for each in active],
        "expired": [claim_record(each, now) for each in expired],
        "waiting": [_waiter_record(each) for each in waiting],
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


def _waiter_record(waiter: ClaimWaiter) -> dict[str, Any]:
    return {
        "node_id": waiter.node_id,
        "owner": waiter.owner,
        "ticket": waiter.ticket,
        "priority": waiter.priority,
        "since_sequence": waiter.sequence,
    }


def _within(each: Claim | ClaimWaiter, above: str | None) -> bool:
    return above is None or is_under(each.node_id, above)
