"""What the tools take: checked when a call comes in, described to the client by the same declarations.

Everything that is written by a client has a limit here. Durations are texts such as `30s` or `5m`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from holdfast.errors import UsageFailure

LONGEST_NAME, LONGEST_LINE, LONGEST_TEXT = 128, 200, 4000

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Line = Annotated[str, Meta(max_length=LONGEST_LINE)]
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
Duration = Annotated[str, Meta(max_length=32, pattern=r"^[0-9a-z.]+$")]

Worktree = Annotated[
    Name | None,
    Meta(description="The worktree. Default: the one that the project directory is in, else main."),
]
LockId = Annotated[
    Name | None,
    Meta(description="The id of a lease that you hold otherwise, not through take_lease. Seldom needed."),
]


class Arguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a tool takes."""


class Who(Arguments):
    pass


class TakeLease(Arguments):
    worktree: Worktree = None
    ttl: Annotated[
        Duration | None,
        Meta(description="How long others have to wait if this server is killed. Default: 30s."),
    ] = None
    wait: Annotated[
        Duration, Meta(description="How long to wait in line if somebody else holds it: 0s, 30s, 5m.")
    ] = "0s"
    purpose: Annotated[Line, Meta(description="What for; others are shown it.")] = ""
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)],
        Meta(description="Who waits with a higher one is served first."),
    ] = 0


class ReleaseLease(Arguments):
    worktree: Worktree = None


class TakeSnapshot(Arguments):
    worktree: Worktree = None
    note: Annotated[Text, Meta(description="What this is, for people.")] = ""
    tag: Annotated[
        Name | None, Meta(description="A name for it, which also keeps it from being collected.")
    ] = None
    consistency: Annotated[
        Literal["quiesced", "best_effort"] | None,
        Meta(description="quiesced: fail if a file changes meanwhile. Default: as the worktree has it."),
    ] = None
    lock_id: LockId = None


class Restore(Arguments):
    snapshot: Annotated[
        Name, Meta(description="Which one: the first characters of its id, a tag, head, or head~2.")
    ]
    into: Annotated[
        Name | None,
        Meta(description="The name of the new worktree that gets its content. Not with in_place."),
    ] = None
    in_place: Annotated[
        bool,
        Meta(description="Replace what is in the worktree now. What is replaced is kept as a snapshot."),
    ] = False
    worktree: Worktree = None
    reason: Annotated[Text, Meta(description="Why. Required with in_place, and recorded.")] = ""
    path: Annotated[
        Text | None, Meta(description="With in_place: only this, relative to the worktree's directory.")
    ] = None
    dry_run: Annotated[bool, Meta(description="Only tell what would be done.")] = False
    lock_id: LockId = None


class ReadHistory(Arguments):
    worktree: Worktree = None
    limit: Annotated[Annotated[int, Meta(ge=1, le=1000)], Meta(description="The newest so many.")] = 20
    all_worktrees: Annotated[bool, Meta(description="All snapshots of all worktrees.")] = False


class ClaimNextWork(Arguments):
    issue: Annotated[
        Name | None, Meta(description="This issue, by its id. Default: the most urgent one that is ready.")
    ] = None
    worktree: Annotated[
        Name | None,
        Meta(description="Where to work. Default: a worktree of the issue's own, made from main."),
    ] = None
    gate: Annotated[
        Name | None, Meta(description="The gate that this work decides: passed if it is done, else failed.")
    ] = None
    ttl: Annotated[
        Duration, Meta(description="How long until the work goes back if this server is killed.")
    ] = "1m"
    wait: Annotated[
        Duration, Meta(description="How long to wait for the worktree if somebody else holds it.")
    ] = "10s"


class FinishWork(Arguments):
    outcome: Annotated[
        Literal["done", "failed", "released"],
        Meta(
            description="done: it is complete. failed: it was tried; it goes back to the queue. "
            "released: it goes back as if it had not been taken."
        ),
    ]
    issue: Annotated[
        Name | None, Meta(description="Which one, by its id. Default: the only one that you have taken.")
    ] = None
    reason: Annotated[Text, Meta(description="Why it failed or was released. Recorded.")] = ""


class AppendToLedger(Arguments):
    event: Annotated[
        dict[str, Any],
        Meta(description='The event: an object with a "type", such as {"type": "note", "text": "..."}.'),
    ]
    if_sequence: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Append only if the ledger is still at this sequence."),
    ] = None


class AddWork(Arguments):
    title: Annotated[
        Annotated[str, Meta(min_length=1, max_length=LONGEST_LINE)], Meta(description="One line.")
    ]
    description: Annotated[
        Annotated[str, Meta(max_length=64_000)], Meta(description="All that one needs to know to do it.")
    ] = ""
    priority: Literal["low", "normal", "high", "critical"] = "normal"
    depends_on: Annotated[
        Annotated[list[Name], Meta(max_length=100)],
        Meta(description="The ids of the issues that have to be done before."),
    ] = []
    labels: Annotated[list[Name], Meta(max_length=50)] = []


Taken = TypeVar("Taken", bound=Arguments)


def checked(kind: type[Taken], given: dict[str, Any] | None) -> Taken:
    """The arguments of a call; `UsageFailure` if the tool does not take them."""
    try:
        return msgspec.convert(given or {}, kind)
    except msgspec.ValidationError as error:
        raise UsageFailure(
            f"the arguments cannot be taken: {error}", hint="See the tool's input schema for what it takes."
        ) from None


def schema_of(kind: type[Arguments]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, in the simplest form that says the same."""
    _, components = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = components[kind.__name__]
    for each in schema["properties"].values():
        alternatives = [one for one in each.get("anyOf", ()) if one != {"type": "null"}]
        if len(alternatives) == 1:  # what may be left out need not be null, too
            del each["anyOf"]
            each.update(alternatives[0])
        if each.get("default", ...) is None:
            del each["default"]
    kept = {name: schema[name] for name in ("properties", "required") if schema.get(name)}
    return {"type": "object", "properties": {}, **kept, "additionalProperties": False}
