"""The tools and resources of the server, as it describes them to the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from mcp_types import Resource, ResourceTemplate, Tool, ToolAnnotations

from holdfast.errors import NotFound, UsageFailure
from holdfast.fs.names import counted
from holdfast.issues import reading
from holdfast.ledger import log
from holdfast.mcp import arguments, operations
from holdfast.mcp.calls import JSON, Call, Record
from holdfast.repository import to_json

Step = Callable[[Call, Any], Record]


class ToolOffer(NamedTuple):
    """A tool and its properties. Its description is the docstring of its implementation."""

    step: Step
    takes: type[arguments.Arguments]
    title: str
    reads: bool = False
    destroys: bool = False
    idempotent: bool = False
    waits: bool = False  # it may wait long for other holders

    def as_tool(self, name: str) -> Tool:
        return Tool(
            name=name,
            title=self.title,
            description=" ".join((self.step.__doc__ or "").split()),
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
    "who": ToolOffer(operations.who, arguments.Who, "Who holds what", reads=True),
    "take_lease": ToolOffer(
        operations.take_lease, arguments.TakeLease, "Acquire the lease of a worktree", idempotent=True, waits=True
    ),
    "release_lease": ToolOffer(operations.release_lease, arguments.ReleaseLease, "Release the lease of a worktree"),
    "snapshot": ToolOffer(operations.snapshot, arguments.TakeSnapshot, "Take a snapshot of a worktree"),
    "restore": ToolOffer(operations.restore, arguments.Restore, "Restore a snapshot", destroys=True),
    "history": ToolOffer(operations.history, arguments.ReadHistory, "Show snapshots", reads=True),
    "claim_next_work": ToolOffer(
        operations.claim_next_work, arguments.ClaimNextWork, "Take work from the queue", waits=True
    ),
    "finish_work": ToolOffer(operations.finish_work, arguments.FinishWork, "Finish work"),
    "add_work": ToolOffer(operations.add_work, arguments.AddWork, "Add work to the queue"),
    "append_to_ledger": ToolOffer(
        operations.append_to_ledger, arguments.AppendToLedger, "Append an event to the ledger"
    ),
}

SCHEME = "holdfast://"
TAIL = 50
LONGEST_PART = 200


class ResourceOffer(NamedTuple):
    """A resource to read: its address, with parts in braces that the reader fills in."""

    address: str
    name: str
    description: str
    read: Callable[..., Record]

    @property
    def is_template(self) -> bool:
        return "{" in self.address

    def as_resource(self) -> Resource:
        return Resource(uri=SCHEME + self.address, name=self.name, description=self.description, mime_type=JSON)

    def as_template(self) -> ResourceTemplate:
        uri = SCHEME + self.address
        return ResourceTemplate(uri_template=uri, name=self.name, description=self.description, mime_type=JSON)


def _worktrees(call: Call) -> Record:
    repository = call.project.repository()
    return to_json.worktrees_to_json(repository.root, repository.worktrees.states())


def _history(call: Call, worktree: str | None = None) -> Record:
    return operations.history(call, arguments.ReadHistory(worktree=worktree, limit=TAIL))


def _ready(call: Call) -> Record:
    found = call.project.tracker(call.actor).summaries(finished=False)
    return reading.issues_to_json(found, found.ready())


def _issue(call: Call, name: str) -> Record:
    tracker = call.project.tracker(call.actor)
    return reading.issue_to_json(tracker, tracker.find_id(name))


def _tail(call: Call) -> Record:
    ledger = call.project.ledger()
    return log.events_to_json(deque(ledger.latest(TAIL), maxlen=TAIL))


def _event(call: Call, sequence: str) -> Record:
    if not (sequence.isascii() and sequence.isdigit() and len(sequence) < 12):
        raise UsageFailure(f"{sequence!a} is not a sequence", hint="Give a number from 1, of at most 11 digits.")
    return log.event_to_json(call.project.ledger().read(int(sequence)))


RESOURCES = (
    ResourceOffer("who", "who", "Who holds what, who waits, and what can be reclaimed.", operations.who),
    ResourceOffer("worktrees", "worktrees", "All worktrees, with their heads and leases.", _worktrees),
    ResourceOffer("history", "history", f"The newest {TAIL} snapshots of your worktree.", _history),
    ResourceOffer("history/{worktree}", "history of", f"The newest {TAIL} snapshots of a worktree.", _history),
    ResourceOffer("issues/ready", "ready", "The issues that can be worked on now, most urgent first.", _ready),
    ResourceOffer("issues/{id}", "issue", "One issue in full, by its id or a prefix of it.", _issue),
    ResourceOffer("ledger/tail", "ledger", f"The last {TAIL} events of the ledger.", _tail),
    ResourceOffer("ledger/{sequence}", "event", "One event of the ledger, by its sequence.", _event),
)


def read(call: Call, uri: str) -> Record:
    parts = uri.removeprefix(SCHEME).split("/")
    for offer in RESOURCES if uri.startswith(SCHEME) else ():
        pattern = offer.address.split("/")
        if len(pattern) == len(parts) and all(a == b or a[0] == "{" for a, b in zip(pattern, parts, strict=True)):
            given = [unquote(b) for a, b in zip(pattern, parts, strict=True) if a[0] == "{"]
            for each in given:
                if not 0 < len(each) <= LONGEST_PART:
                    found = f"a part of {uri[:LONGEST_PART]!a} has {counted(len(each), 'character')}"
                    raise UsageFailure(f"{found}; it must have 1 to {LONGEST_PART}")
            return offer.read(call, *given)
    raise NotFound(
        f"there is nothing at {uri[:LONGEST_PART]!a}",
        hint="The resources are: " + ", ".join(SCHEME + each.address for each in RESOURCES) + ".",
        uri=uri[:LONGEST_PART],
    )
