"""The rules of claims, as pure functions: who may work on an issue, until when, and whose writes count.

1. A claim is given only where there is none, or where the one there is has run out.
2. Every claim takes the next token of its issue. Tokens only grow, and outlive their claims.
3. Renewing, releasing and finishing take the exact id of the claim. One that has run out renews nothing.
4. A write that shows a claim is refused unless that claim is the one in force: so the late writes of
   somebody whose work was given to another do no harm, whatever its clock says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from holdfast.clock import Now, format_duration, format_instant
from holdfast.errors import (
    FencingMismatch,
    IssueClaimed,
    LockExpired,
    LockNotHeld,
    SettingInvalid,
    TransitionRefused,
)
from holdfast.issues.claim_records import Claim, ClaimId, ClaimRecord
from holdfast.issues.records import Issue, State
from holdfast.issues.rules import WAITING, Lookup, check_not_blocked

DEFAULT_TTL = 3600.0
SHORTEST_TTL, LONGEST_TTL = 0.1, 30 * 24 * 3600.0


class Request(NamedTuple):
    """Who wants to work on an issue, how long at least, and what for. `secret` makes its id unique."""

    assignee: str
    ttl: float
    secret: str
    purpose: str = ""
    holder: Mapping[str, str] = MappingProxyType({})


def grant(
    issue: Issue, record: ClaimRecord | None, moment: Now, request: Request, lookup: Lookup
) -> ClaimRecord:
    """The claim that is given, or `IssueClaimed`, `Blocked` or `TransitionRefused`."""
    current = record.claim if record else None
    if issue.state is State.IN_PROGRESS:
        if current is None or not current.may_be_taken(moment):
            raise held_by(issue, current, moment)
    elif issue.state not in WAITING:
        raise TransitionRefused(
            f"{issue.id} is {issue.state.value}: there is nothing to claim",
            issue_id=issue.id,
            state=issue.state.value,
        )
    elif issue.assignee not in (None, request.assignee):
        raise held_by(issue, None, moment)
    check_not_blocked(issue, lookup)
    token = (record.token if record else 0) + 1
    claim = Claim(
        claim_id=f"{issue.id}.{token}.{request.secret}",
        assignee=request.assignee,
        token=token,
        ttl=request.ttl,
        claimed_at=format_instant(moment.now),
        renewed_at=format_instant(moment.now),
        expires_at=format_instant(moment.now + request.ttl),
        boot_expires_at=moment.mark(request.ttl),
        purpose=request.purpose,
        holder=dict(request.holder),
    )
    return ClaimRecord(issue_id=issue.id, token=token, claim=claim)


def in_force(issue_id: str, record: ClaimRecord | None, moment: Now, shown: ClaimId) -> Claim:
    """The claim that was shown, if it is the one in force; else nothing may be written."""
    current = record.claim if record else None
    if current is None or current.claim_id != shown.text:
        raise FencingMismatch(
            f"the claim {shown.text} is not the one of {issue_id} any more; nothing was written",
            issue_id=issue_id,
            token=shown.token,
            current_token=record.token if record else None,
            held_by=current.assignee if current else None,
            hint="Your claim was released or taken over. Look at it, and claim it again if it is free.",
        )
    if current.is_expired(moment):
        ago = format_duration(abs(current.time_left(moment, for_others=False)))
        raise LockExpired(
            f"the claim on {issue_id} ran out {ago} ago; nothing was written",
            issue_id=issue_id,
            token=current.token,
            hint="Claim the issue again: nobody else has yet.",
        )
    return current


def authorised(
    issue: Issue, record: ClaimRecord | None, moment: Now, shown: ClaimId | None, *, moving: bool
) -> ClaimRecord | None:
    """Refuse a write by somebody who may not; the record as it shall be: a shown claim is renewed too.

    Without a claim anybody may add to an issue, but not move one that somebody has claimed (`moving`).
    """
    if shown is not None and shown.issue_id == issue.id:
        return renewed(issue.id, record, moment, shown)
    current = record.claim if record else None
    if moving and current is not None and not current.may_be_taken(moment):
        raise held_by(issue, current, moment)
    return record


def renewed(
    issue_id: str, record: ClaimRecord | None, moment: Now, shown: ClaimId, ttl: float | None = None
) -> ClaimRecord:
    """The record with the claim running for another ttl from now."""
    current = in_force(issue_id, record, moment, shown)
    assert record is not None
    ttl = current.ttl if ttl is None else ttl
    claim = msgspec.structs.replace(
        current,
        ttl=ttl,
        renewed_at=format_instant(moment.now),
        expires_at=format_instant(moment.now + ttl),
        boot_expires_at=moment.mark(ttl),
    )
    return msgspec.structs.replace(record, claim=claim)


def ended(record: ClaimRecord | None) -> ClaimRecord | None:
    """The record without its claim; the token stays."""
    return record and msgspec.structs.replace(record, claim=None)


def check_release(issue: Issue, record: ClaimRecord | None, moment: Now, shown: ClaimId | None) -> None:
    """Refuse to release what somebody else works on. What has run out anybody may put back."""
    if issue.state is not State.IN_PROGRESS and issue.assignee is None:
        raise LockNotHeld(f"{issue.id} is not claimed by anybody", issue_id=issue.id)
    current = record.claim if record else None
    if current is not None and not current.may_be_taken(moment):
        if shown is None:
            raise held_by(issue, current, moment)
        if shown.text != current.claim_id:
            in_force(issue.id, record, moment, shown)


def is_abandoned(issue: Issue, record: ClaimRecord | None, moment: Now) -> bool:
    """Whether somebody began to work on the issue, and has let the claim run out."""
    current = record.claim if record else None
    return issue.state is State.IN_PROGRESS and current is not None and current.may_be_taken(moment)


def held_by(issue: Issue, claim: Claim | None, moment: Now) -> IssueClaimed:
    """Why somebody else cannot have the issue now."""
    if claim is None:
        who = issue.assignee or "somebody"
        return IssueClaimed(
            f"{issue.id} is assigned to {who} ({issue.state.value})",
            issue_id=issue.id,
            assignee=issue.assignee,
            hint="Take another one, or release this one first: 'holdfast issue release ID'.",
        )
    left = claim.time_left(moment, for_others=True)
    purpose = f", for: {claim.purpose}" if claim.purpose else ""
    return IssueClaimed(
        f"{issue.id} is claimed by {claim.assignee} since {claim.claimed_at}{purpose}; "
        f"the claim runs for another {format_duration(left)}",
        issue_id=issue.id,
        assignee=claim.assignee,
        claim_id=claim.claim_id,
        expires_at=claim.expires_at,
        time_left=left,
    )


def checked_ttl(ttl: float) -> float:
    """A ttl that makes sense."""
    if not (math.isfinite(ttl) and SHORTEST_TTL <= ttl <= LONGEST_TTL):
        raise SettingInvalid("ttl", str(ttl), f"from {SHORTEST_TTL:g} s to {LONGEST_TTL:g} s")
    return ttl
