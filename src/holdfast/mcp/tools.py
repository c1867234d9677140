"""The tools that are offered, as the client is told about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from mcp_types import Resource, ResourceTemplate, Tool, ToolAnnotations

from holdfast.errors import NotFound, UsageFailure
from holdfast.issues import reading
from holdfast.ledger import log
from holdfast.mcp import arguments, operations
from holdfast.mcp.calls import JSON, Call, Plain
from holdfast.repository import to_json

Step = Callable[[Call, Any], Plain]


class ToolOffer(NamedTuple):
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


TOOLS = {
    "who": ToolOffer(
        operations.who,
        arguments.Who,
        "Who holds what",
        "Show who holds what here: leases of worktrees, work, claims, locks; since when, until when, what "
        "for, whether the holder is alive, who waits, and whether and how it can be reclaimed safely.",
        reads=True,
    ),
    "take_lease": ToolOffer(
        operations.take_lease,
        arguments.TakeLease,
        "Take the lease of a worktree",
        "Take the lease of a worktree before you write into it; others cannot have it meanwhile. It is kept "
        "alive for you until you release it or disconnect. On a lease that you hold already, it is renewed, "
        "with another ttl if you give one. E_LOCK_CONFLICT names who holds it: wait, or work elsewhere.",
        idempotent=True,
        waits=True,
    ),
    "release_lease": ToolOffer(
        operations.release_lease,
        arguments.ReleaseLease,
        "Release the lease of a worktree",
        "Give back a lease that you took with take_lease. Take a snapshot first if you want to keep a state.",
    ),
    "snapshot": ToolOffer(
        operations.snapshot,
        arguments.TakeSnapshot,
        "Keep what is in a worktree",
        "Keep everything that is in a worktree as a snapshot, whole or not at all. It uses the lease that "
        "you hold, or takes one for as long as it runs. Nothing that was kept is ever overwritten.",
    ),
    "restore": ToolOffer(
        operations.restore,
        arguments.Restore,
        "Bring a snapshot back",
        "Bring a snapshot back: into a new worktree (nothing that exists is touched), or with in_place into "
        "the worktree itself. In place, what was there is kept as a snapshot first; programs that are in the "
        "directory stay in the old one.",
        destroys=True,
    ),
    "history": ToolOffer(
        operations.history,
        arguments.ReadHistory,
        "Show snapshots",
        "Show the snapshots that led to where a worktree is, newest first.",
        reads=True,
    ),
    "claim_next_work": ToolOffer(
        operations.claim_next_work,
        arguments.ClaimNextWork,
        "Take work from the queue",
        "Claim the most urgent issue that is ready (or a certain one), with a worktree that is leased for "
        "it. Do the work in the directory `path` of the answer, then call finish_work. The claim is kept "
        "alive for you; if you disconnect, the work goes back to the queue, and what you wrote stays in the "
        "worktree.",
        waits=True,
    ),
    "finish_work": ToolOffer(
        operations.finish_work,
        arguments.FinishWork,
        "Finish work",
        "Finish work that you have claimed. done and failed: what is in the worktree becomes a snapshot and "
        "the ledger gets a record; then the issue is done, or goes back to the queue. E_FENCING_MISMATCH or "
        "E_LOCK_EXPIRED: somebody else has been given it, and nothing of yours was published.",
    ),
    "add_work": ToolOffer(
        operations.add_work,
        arguments.AddWork,
        "Add work to the queue",
        "Create an issue that somebody, you or another, will work on: one that you came upon, or a part of a "
        "bigger one.",
    ),
    "append_to_ledger": ToolOffer(
        operations.append_to_ledger,
        arguments.AppendToLedger,
        "Append an event to the ledger",
        "Append an event to the log that all agents here share: a finding, a decision, a result. It is on "
        "the disk when this returns. With if_sequence only if nothing has come since.",
    ),
}


SCHEME = "holdfast://"
TAIL = 50
LONGEST_PART = 200

Read = Callable[..., Plain]


class ResourceOffer(NamedTuple):
    """Something to read: its address, with parts in braces that the reader fills in."""

    address: str
    name: str
    description: str
    read: Read

    @property
    def is_template(self) -> bool:
        return "{" in self.address

    def as_resource(self) -> Resource:
        return Resource(
            uri=SCHEME + self.address, name=self.name, description=self.description, mime_type=JSON
        )

    def as_template(self) -> ResourceTemplate:
        return ResourceTemplate(
            uri_template=SCHEME + self.address, name=self.name, description=self.description, mime_type=JSON
        )


def _who(call: Call) -> Plain:
    return operations.who(call, arguments.Who())


def _worktrees(call: Call) -> Plain:
    repository = call.project.repository()
    return to_json.worktrees_to_json(repository.root, repository.worktrees.states())


def _history(call: Call, worktree: str | None = None) -> Plain:
    return operations.history(call, arguments.ReadHistory(worktree=worktree, limit=TAIL))


def _ready(call: Call) -> Plain:
    found = call.project.tracker(call.actor).snapshot()
    return reading.issues_to_json(found, found.ready())


def _issue(call: Call, name: str) -> Plain:
    tracker = call.project.tracker(call.actor)
    return reading.issue_to_json(tracker, tracker.find_id(name))


def _tail(call: Call) -> Plain:
    ledger = call.project.ledger()
    last = deque(ledger.events(after=max(0, ledger.sequence - TAIL)), maxlen=TAIL)
    return log.events_to_json(last)


def _event(call: Call, sequence: str) -> Plain:
    if not (sequence.isascii() and sequence.isdigit() and len(sequence) < 12):
        raise UsageFailure(f"{sequence!a} is not a sequence", hint="A number, from 1.")
    return log.event_to_json(call.project.ledger().read(int(sequence)))


RESOURCES = (
    ResourceOffer("who", "who", "Who holds what, who waits, and what can be reclaimed.", _who),
    ResourceOffer(
        "worktrees", "worktrees", "All worktrees, with their heads and who has leased them.", _worktrees
    ),
    ResourceOffer(
        "history", "history", f"The newest {TAIL} snapshots of the worktree that you are in.", _history
    ),
    ResourceOffer(
        "history/{worktree}", "history of", f"The newest {TAIL} snapshots of a worktree.", _history
    ),
    ResourceOffer(
        "issues/ready", "ready", "The issues that can be worked on now, the most urgent first.", _ready
    ),
    ResourceOffer(
        "issues/{id}", "issue", "Everything about one issue, by its id or the beginning of it.", _issue
    ),
    ResourceOffer("ledger/tail", "ledger", f"The last {TAIL} events of the ledger.", _tail),
    ResourceOffer("ledger/{sequence}", "event", "One event of the ledger, by its sequence.", _event),
)


def read(call: Call, uri: str) -> Plain:
    """What is at an address."""
    parts = uri.removeprefix(SCHEME).split("/")
    for offer in RESOURCES if uri.startswith(SCHEME) else ():
        pattern = offer.address.split("/")
        if len(pattern) == len(parts) and all(
            a == b or a[0] == "{" for a, b in zip(pattern, parts, strict=True)
        ):
            given = [unquote(b) for a, b in zip(pattern, parts, strict=True) if a[0] == "{"]
            if any(not 0 < len(each) <= LONGEST_PART for each in given):
                raise UsageFailure(f"a part of {uri[:LONGEST_PART]!a} is empty or too long")
            return offer.read(call, *given)
    raise NotFound(
        f"there is nothing at {uri[:LONGEST_PART]!a}",
        hint="There are: " + ", ".join(SCHEME + each.address for each in RESOURCES) + ".",
        uri=uri[:LONGEST_PART],
    )
