"""What can be read: the same as the commands that only look print with `--json`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

from mcp_types import Resource, ResourceTemplate

from holdfast.errors import NotFound, UsageFailure
from holdfast.issues import reading
from holdfast.ledger import log
from holdfast.mcp import arguments, keeping, working
from holdfast.mcp.answers import JSON
from holdfast.mcp.calls import Call, Plain
from holdfast.repository import to_json

SCHEME = "holdfast://"
TAIL = 50
LONGEST_PART = 200

Read = Callable[..., Plain]


class Offer(NamedTuple):
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
    return working.who(call, arguments.Who())


def _worktrees(call: Call) -> Plain:
    repository = call.project.repository()
    return to_json.worktrees_to_json(repository.root, repository.worktrees.states())


def _history(call: Call, worktree: str | None = None) -> Plain:
    return keeping.history(call, arguments.History(worktree=worktree, limit=TAIL))


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


OFFERS = (
    Offer("who", "who", "Who holds what, who waits, and what can be reclaimed.", _who),
    Offer("worktrees", "worktrees", "All worktrees, with their heads and who has leased them.", _worktrees),
    Offer("history", "history", f"The newest {TAIL} snapshots of the worktree that you are in.", _history),
    Offer("history/{worktree}", "history of", f"The newest {TAIL} snapshots of a worktree.", _history),
    Offer("issues/ready", "ready", "The issues that can be worked on now, the most urgent first.", _ready),
    Offer("issues/{id}", "issue", "Everything about one issue, by its id or the beginning of it.", _issue),
    Offer("ledger/tail", "ledger", f"The last {TAIL} events of the ledger.", _tail),
    Offer("ledger/{sequence}", "event", "One event of the ledger, by its sequence.", _event),
)


def read(call: Call, uri: str) -> Plain:
    """What is at an address."""
    parts = uri.removeprefix(SCHEME).split("/")
    for offer in OFFERS if uri.startswith(SCHEME) else ():
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
        hint="There are: " + ", ".join(SCHEME + each.address for each in OFFERS) + ".",
        uri=uri[:LONGEST_PART],
    )
