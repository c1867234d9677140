"""Plans and policies as they are shown: as records for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.cli.sizes import format_size
from holdfast.clock import format_duration
from holdfast.repository.gc_plan import Proposal
from holdfast.repository.retention import Policy

MOST_SHOWN = 20
"""People want to see what goes, and a few of those that stay; programs get everything."""


def proposal_record(proposal: Proposal) -> dict[str, object]:
    """Everything that is known about a plan."""
    plan = proposal.plan
    return {
        "plan": plan.plan_id if proposal.stored else None,
        "expires_at": plan.expires_at if proposal.stored else None,
        "policy": msgspec.structs.asdict(plan.policy),
        "bytes": plan.bytes,
        "over_budget": proposal.over_budget,
        "delete": [each._asdict() for each in proposal.candidates],
        "protected": [
            {
                "snapshot_id": snapshot_id,
                "why": [{"rule": reason.protection.value, "text": reason.text} for reason in reasons],
            }
            for snapshot_id, reasons in proposal.protected.items()
        ],
    }


def proposal_lines(proposal: Proposal) -> Iterator[str]:
    """The same for people."""
    plan = proposal.plan
    if proposal.candidates:
        yield f"{counted(len(proposal.candidates))} may be deleted, which frees {format_size(plan.bytes)}:"
        for each in proposal.candidates[:MOST_SHOWN]:
            note = f'  "{each.note}"' if each.note else ""
            yield f"  {each.snapshot_id}  {each.created_at}  of {each.worktree_id}: {each.why}{note}"
        yield from _more(len(proposal.candidates))
    else:
        yield "There is nothing to delete."
    yield f"Kept: {counted(len(proposal.protected))}" + (":" if proposal.protected else ".")
    for snapshot_id, reasons in list(proposal.protected.items())[:MOST_SHOWN]:
        yield f"  {snapshot_id}  {'; '.join(reason.text for reason in reasons)}"
    yield from _more(len(proposal.protected))
    if proposal.over_budget:
        yield f"That is {format_size(proposal.over_budget)} over the budget: what is kept takes more than it."
    if proposal.stored and proposal.candidates:
        yield f"To go ahead, before {plan.expires_at}: holdfast gc run --plan {plan.plan_id}"


def policy_lines(policy: Policy) -> Iterator[str]:
    """What a policy means."""
    if policy.keeps_all_history:
        yield "There is no policy: all history that leads to a head is kept."
        return
    if policy.keep_last is not None:
        yield f"keep_last  {policy.keep_last}: the newest {policy.keep_last} of each line are kept"
    if policy.keep_for is not None:
        yield f"keep_for   {format_duration(policy.keep_for)}: what is younger is kept"
    if policy.max_bytes is not None:
        yield (
            f"max_bytes  {format_size(policy.max_bytes)}: the rest is kept too, "
            "as long as all snapshots together take no more"
        )


def counted(number: int) -> str:
    """So many snapshots, in words."""
    return "1 snapshot" if number == 1 else f"{number} snapshots"


def _more(count: int) -> Iterator[str]:
    if count > MOST_SHOWN:
        yield f"  … and {count - MOST_SHOWN} more; --json shows them all"
