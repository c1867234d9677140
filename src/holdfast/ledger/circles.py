"""Claims and waits for them as parts of a picture in which circles are looked for: see `holding.circles`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.clock import format_instant, parse_instant
from holdfast.holding.circles import Hold, Party, Thing, Wait, process_id
from holdfast.ledger.claims import Claim, Waiter
from holdfast.ledger.protocol import Request

_AGENT, _ABOVE, _BETWEEN = "agent", "above", "|"


def from_below(request: Request, above: Sequence[str]) -> Request:
    """The request of one who waits, which tells too which processes it acts for and descends from."""
    told = {**request.holder, _ABOVE: _BETWEEN.join(above)}
    if request.agent:
        told[_AGENT] = request.agent.get("holder_id", "")
    return request._replace(holder=told)


def hold(claim: Claim) -> Hold:
    """A claim is its owner's; its process tells who that is where others go by processes only."""
    party = Party(claim.owner, claim.owner, _processes(claim.holder, claim.holder.get("holder_id", "")))
    return Hold(Thing("claim", claim.node_id), party, claim.claim_id or f"event-{claim.sequence}")


def wait(waiter: Waiter) -> Wait:
    told = waiter.holder
    party = Party(
        waiter.owner,
        waiter.owner,
        _processes(told, told.get("holder_id", ""), told.get(_AGENT, "")),
        _processes(told, *told.get(_ABOVE, "").split(_BETWEEN)),
    )
    since = format_instant(parse_instant(waiter.since)) if waiter.since else ""
    return Wait(Thing("claim", waiter.node_id), party, since, waiter.ticket)


def _processes(told: Mapping[str, str], *holder_ids: str) -> frozenset[str]:
    boot_id, namespace = told.get("boot_id", ""), told.get("pid_namespace", "")
    return frozenset(process_id(each, boot_id, namespace) for each in holder_ids if each)
