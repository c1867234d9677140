"""The rules of claims, as pure functions from the book and the time to the event that shall be added.

Nothing here does I/O, asks a clock or rolls dice: what production runs is what the tests explore.
Every rule adds at most one event, and the event is added only behind the very sequence that the book
stands at. So a rule has seen everything that came before its event.

1. A claim is given only where there is none. One that has run out is reaped first, by an event of its own.
2. Only its owner extends or releases a claim; with its `claim_id`, only this very claim.
3. A claim that has run out cannot be extended; it may be released as long as nobody has reaped it.
4. Who waits is served by priority, then in the order of the ledger; nobody passes the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from holdfast.clock import format_duration, format_instant
from holdfast.errors import LockExpired, LockNotHeld, NodeLocked
from holdfast.ledger.claim_files import ABOVE, AGENT, BETWEEN
from holdfast.ledger.log import Event
from holdfast.ledger.projection import (
    ACQUIRED,
    REAPED,
    RELEASED,
    REQUESTED,
    WITHDRAWN,
    Claim,
    ClaimState,
    ClaimWaiter,
)


class ClaimRequest(NamedTuple):
    """Who wants which node, and for how long. `claim_id` is the id that the claim will have, and the
    ticket in the line; `patience` is how long a waiter counts without showing itself."""

    node_id: str
    owner: str
    claim_id: str
    ttl: float
    priority: int = 0
    patience: float = 15.0
    holder: Mapping[str, str] = MappingProxyType({})
    agent: Mapping[str, str] = MappingProxyType({})
    """The process that the claim is for, if that is not the one that asks for it."""
    purpose: str = ""
    above: tuple[str, ...] = ()
    """The processes that the one that waits descends from."""


class ClaimGranted(NamedTuple):
    """The node is the requester's, by the claim with this id."""

    claim_id: str


class Cleared(NamedTuple):
    """The claim in the way had run out and is reaped: ask again."""

    claim: Claim


class ClaimWaiting(NamedTuple):
    """Not yet: `place` in the line, from 1; `claim` is the one that is held, if one is; `ahead` is who
    comes next before the requester."""

    place: int
    claim: Claim | None
    ahead: ClaimWaiter | None


Told = TypeVar("Told", covariant=True)


class ClaimRuling(NamedTuple, Generic[Told]):
    """What a rule decides: the event to add, if any, and what to tell the caller."""

    event: Event | None
    result: Told


def claim(
    book: ClaimState,
    now: float,
    request: ClaimRequest,
    *,
    wait: bool,
    gone: frozenset[str] = frozenset(),
) -> ClaimRuling[ClaimGranted | Cleared | ClaimWaiting]:
    """Give the claim if nobody has it and nobody is ahead in line; else wait in line, or refuse.

    `gone` are the tickets of waiters that are known to be dead.
    """
    held = book.claims.get(request.node_id)
    if held is not None and held.claim_id == request.claim_id:
        return ClaimRuling(None, ClaimGranted(held.claim_id))  # made by an attempt whose outcome was not seen
    if held is not None and held.is_expired(now):
        return ClaimRuling(reaped(held, now), Cleared(held))
    ahead = _ahead(book, now, request, gone)
    if held is None and not ahead:
        event = _acquired(request.node_id, request.owner, request.claim_id, now, request.ttl)
        return ClaimRuling(event | _described(request), ClaimGranted(request.claim_id))
    if not wait:
        raise locked(request.node_id, now, held, ahead)
    own = _own_place(book, request)
    waiting = ClaimWaiting(len(ahead) + 1, held, ahead[0] if ahead else None)
    if own is not None and own.counts(now + request.patience / 2):
        return ClaimRuling(None, waiting)
    return ClaimRuling(_requested(request, now), waiting)


def first_in_line(book: ClaimState, now: float, request: ClaimRequest) -> list[ClaimWaiter]:
    """Those before the requester who could take the node now; nobody while somebody holds it."""
    held = book.claims.get(request.node_id)
    return [] if held is not None else _ahead(book, now, request, frozenset())


def withdraw(book: ClaimState, now: float, request: ClaimRequest) -> ClaimRuling[None]:
    """Leave the line."""
    if _own_place(book, request) is None:
        return ClaimRuling(None, None)
    event = {"type": WITHDRAWN, "timestamp": format_instant(now), "node_id": request.node_id}
    return ClaimRuling({**event, "owner": request.owner, "ticket": request.claim_id}, None)


def extend(
    book: ClaimState, now: float, node: str, owner: str, ttl: float, claim_id: str = ""
) -> ClaimRuling[ClaimGranted]:
    """Let a claim run for another `ttl` from now."""
    held = valid(book, now, node, owner, claim_id)
    event = {**_acquired(node, owner, held.claim_id, now, ttl), "extended": True}
    return ClaimRuling(event, ClaimGranted(held.claim_id))


def release(book: ClaimState, now: float, node: str, owner: str, claim_id: str = "") -> ClaimRuling[Claim]:
    """Give a claim back. One that has run out may be given back too, as long as nobody has reaped it."""
    held = own(book, node, owner, claim_id)
    return ClaimRuling(_about(RELEASED, held, now), held)


def reap(book: ClaimState, now: float, seen: Claim) -> ClaimRuling[Claim | None]:
    """Clear away the claim that was seen, if it is still there as it was and has run out."""
    held = book.claims.get(seen.node_id)
    if held != seen or not seen.is_expired(now):
        return ClaimRuling(None, None)
    return ClaimRuling(reaped(seen, now), seen)


def reaped(seen: Claim, now: float) -> Event:
    """The event that clears a claim away."""
    return _about(REAPED, seen, now)


def valid(book: ClaimState, now: float, node: str, owner: str, claim_id: str = "") -> Claim:
    """The claim, if this owner may act on it now; `LockNotHeld` or `LockExpired` if it may not."""
    held = own(book, node, owner, claim_id)
    if held.is_expired(now):
        raise LockExpired(
            f"the claim of {owner} on {node} ran out {format_duration(now - held.expiry())} ago",
            node_id=node,
            actor=owner,
            expires_at=held.expires_at,
        )
    return held


def own(book: ClaimState, node: str, owner: str, claim_id: str = "") -> Claim:
    """The claim on a node, if it is this owner's."""
    held = book.claims.get(node)
    if held is None or held.owner != owner or (claim_id and held.claim_id != claim_id):
        holder = "nobody has" if held is None else f"{held.owner} has"
        raise LockNotHeld(
            f"{owner} has no such claim on {node}: {holder} claimed it",
            hint="List the claims: 'holdfast ledger claims'. Their past: 'holdfast ledger claim-history'.",
            node_id=node,
            actor=owner,
            held_by=held.owner if held else None,
        )
    return held


def locked(node: str, now: float, held: Claim | None, ahead: list[ClaimWaiter]) -> NodeLocked:
    """Why a node cannot be had at once."""
    if held is None:
        first = ahead[0]
        return NodeLocked(
            f"node already locked: {node} is free, but {first.owner} waits for it and comes first",
            hint=_how_to_wait(node),
            node_id=node,
            actor=first.owner,
            waiting=len(ahead),
        )
    left = held.expiry() - now
    purpose = f", for: {held.purpose}; the claim runs" if held.purpose else ","
    return NodeLocked(
        f"node already locked: {node} is claimed by {held.owner} since {held.acquired_at}{purpose} "
        f"for another {format_duration(left)}",
        hint=_how_to_wait(node),
        node_id=node,
        actor=held.owner,
        purpose=held.purpose,
        claim_id=held.claim_id,
        created_at=held.acquired_at,
        expires_at=held.expires_at,
        time_left=left,
        waiting=len(ahead),
    )


def _how_to_wait(node: str) -> str:
    return f"Work on another node, or wait: 'holdfast ledger claim {node} --actor YOU --wait 5m'."


def _own_place(book: ClaimState, request: ClaimRequest) -> ClaimWaiter | None:
    return next((each for each in book.line(request.node_id) if each.ticket == request.claim_id), None)


def _ahead(book: ClaimState, now: float, request: ClaimRequest, gone: frozenset[str]) -> list[ClaimWaiter]:
    """Those who come before the requester. Who has no place yet comes behind all of its priority."""
    place = _own_place(book, request)
    order = place.order() if place else (-request.priority, book.sequence + 1)
    return [
        each
        for each in book.line(request.node_id)
        if each.order() < order and each.ticket not in gone and each.counts(now)
    ]


def _acquired(node: str, owner: str, claim_id: str, now: float, ttl: float) -> Event:
    event = {
        "type": ACQUIRED,
        "timestamp": format_instant(now),
        "node_id": node,
        "owner": owner,
        "expires_at": format_instant(now + ttl),
    }
    return {**event, "claim_id": claim_id} if claim_id else event


def _described(request: ClaimRequest) -> Event:
    """What others are shown of a claim: whose process it is, and what for."""
    holder = request.agent or request.holder
    told: Event = {"holder": dict(holder)} if holder else {}
    return {**told, "purpose": request.purpose} if request.purpose else told


def _about(kind: str, held: Claim, now: float) -> Event:
    event = {"type": kind, "timestamp": format_instant(now), "node_id": held.node_id, "owner": held.owner}
    return {**event, "claim_id": held.claim_id} if held.claim_id else event


def _waiting(request: ClaimRequest) -> dict[str, str]:
    """Who waits: its process, and those that it acts for and descends from; see `circles`."""
    told = {**request.holder, ABOVE: BETWEEN.join(request.above)} if request.above else dict(request.holder)
    return {**told, AGENT: request.agent.get("holder_id", "")} if request.agent else told


def _requested(request: ClaimRequest, now: float) -> Event:
    return {
        "type": REQUESTED,
        "timestamp": format_instant(now),
        "node_id": request.node_id,
        "owner": request.owner,
        "ticket": request.claim_id,
        "priority": request.priority,
        "until": format_instant(now + request.patience),
        "holder": _waiting(request),
    }
