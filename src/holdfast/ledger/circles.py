"""Claims and waits for them as parts of a picture in which circles are looked for: see `holding.circles`."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.clock import format_instant, parse_instant
from holdfast.leases.deadlock import Hold, Party, Thing, WaitEdge, process_id
from holdfast.ledger.claims import Claim, Waiter

ACTOR, AGENT, ABOVE, BETWEEN = "actor", "agent", "above", "|"
"""How a `holder` says in whose name it acts; and, of one who waits, for which process and below which."""


def hold(claim: Claim) -> Hold:
    """A claim is its owner's; its process tells who that is where others go by processes only."""
    told = claim.holder
    processes = _processes(told, told.get("holder_id", ""))
    party = Party(claim.owner, claim.owner, processes, actor=told.get(ACTOR, ""))
    return Hold(Thing("claim", claim.node_id), party, claim.claim_id or f"event-{claim.sequence}")


def wait(waiter: Waiter) -> WaitEdge:
    """One who waits for a claim."""
    told = waiter.holder
    party = Party(
        waiter.owner,
        waiter.owner,
        _processes(told, told.get("holder_id", ""), told.get(AGENT, "")),
        _processes(told, *told.get(ABOVE, "").split(BETWEEN)),
        told.get(ACTOR, ""),
    )
    since = format_instant(parse_instant(waiter.since)) if waiter.since else ""
    return WaitEdge(Thing("claim", waiter.node_id), party, since, waiter.ticket)


def _processes(told: Mapping[str, str], *holder_ids: str) -> frozenset[str]:
    boot_id, namespace = told.get("boot_id", ""), told.get("pid_namespace", "")
    return frozenset(process_id(each, boot_id, namespace) for each in holder_ids if each)
