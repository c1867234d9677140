"""The tools that are offered, as the client is told about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mcp_types import Tool, ToolAnnotations

from holdfast.mcp import arguments, keeping, leasing, working
from holdfast.mcp.calls import Call, Plain

Step = Callable[[Call, Any], Plain]


class Offer(NamedTuple):
    """A tool: what it takes, what carries it out, and what a client should know before it is called."""

    step: Step
    takes: type[arguments.Arguments]
    title: str
    description: str
    reads: bool = False
    destroys: bool = False
    idempotent: bool = False
    waits: bool = False
    """Whether it may wait long for others."""

    def as_tool(self, name: str) -> Tool:
        return Tool(
            name=name,
            title=self.title,
            description=self.description,
            input_schema=arguments.schema_of(self.takes),
            annotations=ToolAnnotations(
                title=self.title,
                read_only_hint=self.reads,
                destructive_hint=self.destroys,
                idempotent_hint=self.reads or self.idempotent,
                open_world_hint=False,
            ),
        )


OFFERS = {
    "who": Offer(
        working.who,
        arguments.Who,
        "Who holds what",
        "Show who holds what here: leases of worktrees, work, claims, locks; since when, until when, what "
        "for, whether the holder is alive, who waits, and whether and how it can be reclaimed safely.",
        reads=True,
    ),
    "take_lease": Offer(
        leasing.take_lease,
        arguments.TakeLease,
        "Take the lease of a worktree",
        "Take the lease of a worktree before you write into it; others cannot have it meanwhile. It is kept "
        "alive for you until you release it or disconnect. On a lease that you hold already, it is renewed, "
        "with another ttl if you give one. E_LOCK_CONFLICT names who holds it: wait, or work elsewhere.",
        idempotent=True,
        waits=True,
    ),
    "release_lease": Offer(
        leasing.release_lease,
        arguments.ReleaseLease,
        "Release the lease of a worktree",
        "Give back a lease that you took with take_lease. Take a snapshot first if you want to keep a state.",
    ),
    "snapshot": Offer(
        keeping.snapshot,
        arguments.Snapshot,
        "Keep what is in a worktree",
        "Keep everything that is in a worktree as a snapshot, whole or not at all. It uses the lease that "
        "you hold, or takes one for as long as it runs. Nothing that was kept is ever overwritten.",
    ),
    "restore": Offer(
        keeping.restore,
        arguments.Restore,
        "Bring a snapshot back",
        "Bring a snapshot back: into a new worktree (nothing that exists is touched), or with in_place into "
        "the worktree itself. In place, what was there is kept as a snapshot first; programs that are in the "
        "directory stay in the old one.",
        destroys=True,
    ),
    "history": Offer(
        keeping.history,
        arguments.History,
        "Show snapshots",
        "Show the snapshots that led to where a worktree is, newest first.",
        reads=True,
    ),
    "claim_next_work": Offer(
        working.claim_next_work,
        arguments.ClaimNextWork,
        "Take work from the queue",
        "Claim the most urgent issue that is ready (or a certain one), with a worktree that is leased for "
        "it. Do the work in the directory `path` of the answer, then call finish_work. The claim is kept "
        "alive for you; if you disconnect, the work goes back to the queue, and what you wrote stays in the "
        "worktree.",
        waits=True,
    ),
    "finish_work": Offer(
        working.finish_work,
        arguments.FinishWork,
        "Finish work",
        "Finish work that you have claimed. done and failed: what is in the worktree becomes a snapshot and "
        "the ledger gets a record; then the issue is done, or goes back to the queue. E_FENCING_MISMATCH or "
        "E_LOCK_EXPIRED: somebody else has been given it, and nothing of yours was published.",
    ),
    "add_work": Offer(
        working.add_work,
        arguments.AddWork,
        "Add work to the queue",
        "Create an issue that somebody, you or another, will work on: one that you came upon, or a part of a "
        "bigger one.",
    ),
    "append_to_ledger": Offer(
        working.append_to_ledger,
        arguments.AppendToLedger,
        "Append an event to the ledger",
        "Append an event to the log that all agents here share: a finding, a decision, a result. It is on "
        "the disk when this returns. With if_sequence only if nothing has come since.",
    ),
}
