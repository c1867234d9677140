"""Claim rules as pure functions, from the state and the time to at most one event.

Nothing here does I/O, reads a clock or draws random numbers: production runs what the tests explore. A rule's event is
appended only right after the sequence of the state, so the rule has seen everything before its event.

1. A claim is granted only if the node has none. An expired one is reaped first, by its own event.
2. Only its owner renews or releases a claim; with a `claim_id`, only the claim with that id.
3. An expired claim cannot be renewed; it may be released until it is reaped.
4. Waiters are served by priority, then in the order of the ledger; no request bypasses the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.clock import format_ago, format_duration, format_instant, parse_duration, ttl_within
from holdfast.errors import LockExpired, LockNotHeld, NodeLocked, SettingInvalid
from holdfast.ledger.log import DEFAULT_LOCK_TIMEOUT, Event
from holdfast.ledger.projection import ACQUIRED, REAPED, RELEASED, REQUESTED, WITHDRAWN, Claim, ClaimState, ClaimWaiter

SHORTEST_TTL, LONGEST_TTL = 1.0, 3600.0
ACTOR, AGENT, ABOVE, SEPARATOR = "actor", "agent", "above", "|"
"""Fields of a `holder`: its actor; and, of a waiter, the process it waits for, and its ancestors."""


class ClaimRequest(NamedTuple):
    """A request for a node; `claim_id` is the id that the claim will have, and the ticket in the queue. `patience` is
    how long a waiter counts without a heartbeat."""

    node_id: str
    owner: str
    claim_id: str
    ttl: float
    priority: int = 0
    patience: float = 15.0
    holder: Mapping[str, str] = MappingProxyType({})
    agent: Mapping[str, str] = MappingProxyType({})  # the process that the claim is for, if that is not the requester
    purpose: str = ""
    above: tuple[str, ...] = ()  # the ancestors of the process that waits


class ClaimGranted(NamedTuple):
    """The requester has the node, by the claim with this id."""

    claim_id: str


class Cleared(NamedTuple):
    """The claim in the way had expired and was reaped: ask again."""

    claim: Claim


class ClaimWaiting(NamedTuple):
    """Not yet: the `position` in the queue, from 1; the current claim, if any; and the first waiter ahead."""

    position: int
    claim: Claim | None
    ahead: ClaimWaiter | None


Result = TypeVar("Result", covariant=True)


class ClaimRuling(NamedTuple, Generic[Result]):
    """The decision of a rule: the event to append, if any, and the answer."""

    event: Event | None
    result: Result


def checked_ttl(ttl: float, setting: str = "ttl") -> float:
    return ttl_within(ttl, SHORTEST_TTL, LONGEST_TTL, setting=setting)


def lock_timeout(meta: Mapping[str, Any] | None) -> float:
    """The default ttl of a ledger's claims: `lock_timeout`, from 1 s to 1 h, else 5 minutes."""
    value = (meta or {}).get("lock_timeout")
    if value is None:
        return DEFAULT_LOCK_TIMEOUT
    try:
        return checked_ttl(parse_duration(value if isinstance(value, str) else ""))
    except SettingInvalid:
        expected = 'a duration from 1s to 1h, such as "5m"'
        raise SettingInvalid("lock_timeout in meta.json", str(value), expected) from None


def claim(
    state: ClaimState, now: float, request: ClaimRequest, *, wait: bool, gone: frozenset[str] = frozenset()
) -> ClaimRuling[ClaimGranted | Cleared | ClaimWaiting]:
    """Grant the claim if the node is free and no waiter is ahead; else join the queue, or refuse. `gone` are the
    tickets of waiters that are known to be dead."""
    held = state.claims.get(request.node_id)
    if held is not None and held.claim_id == request.claim_id:
        return ClaimRuling(None, ClaimGranted(held.claim_id))  # by an attempt whose outcome was unknown
    if held is not None and held.is_expired(now):
        return ClaimRuling(reaped(held, now), Cleared(held))
    ahead = _ahead(state, now, request, gone)
    if held is None and not ahead:
        event = _acquired(request.node_id, request.owner, request.claim_id, now, request.ttl)
        if holder := request.agent or request.holder:
            event["holder"] = dict(holder)
        if request.purpose:
            event["purpose"] = request.purpose
        return ClaimRuling(event, ClaimGranted(request.claim_id))
    if not wait:
        raise locked(request.node_id, now, held, ahead)
    own = _own_entry(state, request)
    waiting = ClaimWaiting(len(ahead) + 1, held, ahead[0] if ahead else None)
    if own is not None and own.counts(now + request.patience / 2):
        return ClaimRuling(None, waiting)
    return ClaimRuling(_requested(request, now), waiting)


def waiters_ahead(state: ClaimState, now: float, request: ClaimRequest) -> list[ClaimWaiter]:
    """The waiters ahead of the requester that could take the node now; none while it is claimed."""
    return [] if request.node_id in state.claims else _ahead(state, now, request, frozenset())


def withdraw(state: ClaimState, now: float, request: ClaimRequest) -> ClaimRuling[None]:
    """Leave the queue."""
    if _own_entry(state, request) is None:
        return ClaimRuling(None, None)
    event = _event(WITHDRAWN, now, request.node_id, request.owner)
    return ClaimRuling({**event, "ticket": request.claim_id}, None)


def extend(
    state: ClaimState, now: float, node: str, owner: str, ttl: float, claim_id: str = ""
) -> ClaimRuling[ClaimGranted]:
    """Let a claim run for another `ttl` from now."""
    held = valid(state, now, node, owner, claim_id)
    event = {**_acquired(node, owner, held.claim_id, now, ttl), "extended": True}
    return ClaimRuling(event, ClaimGranted(held.claim_id))


def release(state: ClaimState, now: float, node: str, owner: str, claim_id: str = "") -> ClaimRuling[Claim]:
    """End a claim, even an expired one that has not been reaped."""
    held = own(state, node, owner, claim_id)
    return ClaimRuling(_event(RELEASED, now, node, owner, held.claim_id), held)


def reap(state: ClaimState, now: float, seen: Claim) -> ClaimRuling[Claim | None]:
    """Remove the claim that was seen, if it is unchanged and has expired."""
    if state.claims.get(seen.node_id) != seen or not seen.is_expired(now):
        return ClaimRuling(None, None)
    return ClaimRuling(reaped(seen, now), seen)


def reaped(seen: Claim, now: float) -> Event:
    """The event that removes an expired claim."""
    return _event(REAPED, now, seen.node_id, seen.owner, seen.claim_id)


def valid(state: ClaimState, now: float, node: str, owner: str, claim_id: str = "") -> Claim:
    """The claim, if this owner may act on it now; else `LockNotHeld` or `LockExpired`."""
    held = own(state, node, owner, claim_id)
    if held.is_expired(now):
        message = (
            f"the claim of {owner} on {node} expired {format_duration(-held.time_left(now, for_others=False))} ago"
        )
        raise LockExpired(message, node_id=node, actor=owner, expires_at=held.expires_at)
    return held


def own(state: ClaimState, node: str, owner: str, claim_id: str = "") -> Claim:
    """The claim on a node, if it is this owner's."""
    held = state.claims.get(node)
    if held is None or held.owner != owner or (claim_id and held.claim_id != claim_id):
        holder = held.owner if held else None
        message = f"{owner} has no such claim on {node}: {holder or 'nobody'} has claimed it"
        hint = "List the claims: 'holdfast ledger claims'. Their history: 'holdfast ledger claim-history'."
        raise LockNotHeld(message, hint=hint, node_id=node, actor=owner, held_by=holder)
    return held


def locked(node: str, now: float, held: Claim | None, ahead: list[ClaimWaiter]) -> NodeLocked:
    """Why a node cannot be claimed at once."""
    hint = f"Work on another node, or wait: 'holdfast ledger claim {node} --actor YOU --wait 5m'."
    if held is None:
        first = ahead[0].owner
        message = f"node already locked: {node} is free, but {first} waits for it and comes first"
        return NodeLocked(message, hint=hint, node_id=node, actor=first, waiting=len(ahead))
    left = held.time_left(now, for_others=False)
    purpose = f", for: {held.purpose}" if held.purpose else ""
    message = f"node already locked: {node} is claimed by {held.owner}{purpose}"
    message += f"; claimed {format_ago(held.acquired_at, now)}, expires in {format_duration(left)}"
    facts = {"node_id": node, "actor": held.owner, "purpose": held.purpose, "claim_id": held.claim_id}
    times = {"created_at": held.acquired_at, "expires_at": held.expires_at, "time_left": left}
    return NodeLocked(message, hint=hint, **facts, **times, waiting=len(ahead))


def _own_entry(state: ClaimState, request: ClaimRequest) -> ClaimWaiter | None:
    return next((each for each in state.queue(request.node_id) if each.ticket == request.claim_id), None)


def _ahead(state: ClaimState, now: float, request: ClaimRequest, gone: frozenset[str]) -> list[ClaimWaiter]:
    """The waiters ahead of the requester. A new request comes after all of its priority."""
    own_entry = _own_entry(state, request)
    order = own_entry.order() if own_entry else (-request.priority, state.sequence + 1)
    queue = state.queue(request.node_id)
    return [each for each in queue if each.order() < order and each.ticket not in gone and each.counts(now)]


def _event(kind: str, now: float, node: str, owner: str, claim_id: str = "") -> Event:
    event = {"type": kind, "timestamp": format_instant(now), "node_id": node, "owner": owner}
    return {**event, "claim_id": claim_id} if claim_id else event


def _acquired(node: str, owner: str, claim_id: str, now: float, ttl: float) -> Event:
    event = {**_event(ACQUIRED, now, node, owner), "expires_at": format_instant(now + ttl)}
    return {**event, "claim_id": claim_id} if claim_id else event


def _requested(request: ClaimRequest, now: float) -> Event:
    holder = dict(request.holder)
    if request.above:
        holder[ABOVE] = SEPARATOR.join(request.above)
    if request.agent:
        holder[AGENT] = request.agent.get("holder_id", "")
    event = {**_event(REQUESTED, now, request.node_id, request.owner), "ticket": request.claim_id}
    until = format_instant(now + request.patience)
    return {**event, "priority": request.priority, "until": until, "holder": holder}
