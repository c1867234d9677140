"""Issues whose work is queued to land: what the transactions of a landing decide about issues and claims. Pure.

1. While the work is queued, the claim is *held* for the landing: it does not expire, and keeps its id and token.
2. When the work has landed, the issue is done, or waits for its open gates, and the claim ends.
3. When it cannot land, the claim is given back: it expires again, one ttl from now, unless its holder renews it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.issues import rules
from holdfast.issues.model import CLAIMS, DEPENDENTS, ClaimId, ClaimRecord, GateStatus, Issue, IssueClaim, State
from holdfast.issues.transactions import Draft, IssueNeighbours, Seen, Transactions, check_dependents
from holdfast.store.model import Key


class HeldFor(NamedTuple):
    """The landing that a claim is held for, and facts for the events of the issue."""

    landing_id: str
    facts: Mapping[str, object]


class Surroundings(NamedTuple):
    """Several issues with their neighbours, read without locks; the transaction names `named` and `keys`."""

    each: dict[str, IssueNeighbours]
    named: list[str]
    seen: Seen
    keys: list[Key[Any]]


def surroundings(transactions: Transactions, issue_ids: Iterable[str]) -> Surroundings:
    """The neighbours of issues that a transaction may finish; issues that do not exist any more are left out."""
    found = Surroundings({}, [], Seen({}, {}), [])
    for issue_id in dict.fromkeys(issue_ids):
        if transactions.read(issue_id) is None:
            continue
        around = transactions.surroundings(issue_id)
        found.each[issue_id] = around
        found.named.extend(each for each in around.named if each not in found.named)
        found.seen.issues.update(around.seen.issues)
        found.seen.broken.update(around.seen.broken)
        found.keys.extend([CLAIMS.key(issue_id), DEPENDENTS.key(issue_id)])
    return found


def hold(
    draft: Draft,
    issue_id: str,
    claim: ClaimId | None,
    request: rules.IssueClaimRequest,
    held: HeldFor,
    superseded: Collection[str] = (),
) -> IssueClaim | None:
    """Hold the claim on an issue for a landing; without a claim, claim the issue first. None if it needs none.

    Raises as a claim does if somebody else has the issue. `superseded` are landings that this one replaces.
    """
    issue, record = draft.issue(issue_id), draft.claim(issue_id)
    if issue.state in (*rules.FINISHED, State.GATED):
        return None
    current = record.claim if record else None
    if current is not None and any(current.held_for == each for each in superseded):
        pass
    elif claim is not None:
        current = rules.in_force(issue_id, record, draft.moment, claim)
    else:
        record = rules.grant(issue, record, draft.moment, request, draft.lookup)
        current = record.claim
        facts = {"assignee": request.assignee, "token": record.token, "from": issue.state.value}
        draft.record("issue_claimed", issue_id, **facts, taken_over_from=None)
        draft.put(msgspec.structs.replace(issue, state=State.IN_PROGRESS, assignee=request.assignee), announced=True)
    assert current is not None
    assert record is not None
    current = msgspec.structs.replace(current, held_for=held.landing_id)
    draft.set_claim(issue_id, msgspec.structs.replace(record, claim=current))
    draft.record("issue_queued_to_land", issue_id, landing=held.landing_id, **held.facts)
    return current


def lost_claim(issue: Issue | None, record: ClaimRecord | None, claim_id: str, landing_id: str) -> str:
    """Why the work of an issue must not land: the claim is not the one that was held. Empty if it may."""
    if issue is None:
        return "its issue was deleted"
    if issue.state is State.REJECTED:
        return f"its issue {issue.id} is rejected"
    current = record.claim if record else None
    if not claim_id or issue.state in (*rules.FINISHED, State.GATED):
        return ""
    if current is None or current.claim_id != claim_id or current.held_for != landing_id:
        return f"the claim {claim_id} on its issue is no longer the current one"
    return ""


def finish(draft: Draft, around: IssueNeighbours, claim_id: str, gates: Iterable[str], held: HeldFor) -> None:
    """Finish an issue whose work has landed, with the gates that the checks of the landing have passed.

    The work is on the branch, so this refuses nothing: an issue that somebody else has claimed by now, or that the
    rules keep open, stays as it is, and its events say that its work has landed.
    """
    issue_id = around.issue.id
    check_dependents(draft, around)
    issue, record = draft.lookup(issue_id), draft.claim(issue_id)
    if issue is None:
        return
    draft.record("issue_landed", issue_id, landing=held.landing_id, **held.facts)
    current = record.claim if record else None
    is_ours = current is None or current.claim_id == claim_id
    if not is_ours or issue.state in rules.FINISHED:
        return
    others = [found for each in around.dependents if (found := draft.lookup(each)) is not None]
    try:
        for gate in gates:
            if gate in issue.gates_required and issue.gate_status(gate) is not GateStatus.PASSED:
                issue = rules.judged(issue, gate, GateStatus.PASSED, draft.actor, draft.at, draft.lookup)
                draft.record("gate_passed", issue_id, gate_key=gate, updated_by=draft.actor)
        issue = rules.moved(issue, State.DONE, draft.lookup, others)
    except (
        Failure
    ):  # a dependency was added meanwhile; the claim runs out, and people see an open issue that has landed
        if record is not None and current is not None:
            draft.set_claim(issue_id, msgspec.structs.replace(record, claim=_released(draft, current)))
        return
    draft.put(issue)
    if record is not None:
        draft.set_claim(issue_id, rules.ended(record))
    draft.settle(around.followers)


def give_back(draft: Draft, issue_id: str, claim_id: str, reason: str, held: HeldFor) -> None:
    """Give the claim back to its holder: the work could not land, or was withdrawn, for this reason."""
    issue, record = draft.lookup(issue_id), draft.claim(issue_id)
    if issue is None:
        return
    draft.record("issue_not_landed", issue_id, landing=held.landing_id, reason=reason, **held.facts)
    if record is None:
        return
    record = msgspec.structs.replace(record, returned_by=held.landing_id)
    if record.claim is not None and record.claim.claim_id == claim_id and record.claim.held_for == held.landing_id:
        record = msgspec.structs.replace(record, claim=_released(draft, record.claim))
    draft.set_claim(issue_id, record)


def _released(draft: Draft, claim: IssueClaim) -> IssueClaim:
    """A claim that was held, with its time running again from now."""
    now = draft.moment
    return msgspec.structs.replace(
        claim,
        held_for=msgspec.UNSET,
        renewed_at=format_instant(now.now),
        expires_at=format_instant(now.now + claim.ttl),
        boot_expires_at=now.mark(claim.ttl),
    )
