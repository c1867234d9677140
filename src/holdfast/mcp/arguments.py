"""The arguments of the tools: one declaration validates a call and describes the tool to the client.

Everything that a client writes has a limit here. Durations are texts such as `30s` or `5m`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from holdfast.clock import format_duration
from holdfast.errors import UsageFailure
from holdfast.leases.service import COMMAND_TTL


def _about(description: str) -> Meta:
    return Meta(description=description)


KEPT = format_duration(COMMAND_TTL)  # the default ttl of what this server holds and renews
LONGEST_NAME, LONGEST_LINE, LONGEST_TEXT = 128, 200, 4000

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Line = Annotated[str, Meta(max_length=LONGEST_LINE)]
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
Duration = Annotated[str, Meta(max_length=32, pattern=r"^[0-9a-z.]+$")]

Worktree = Annotated[Name | None, _about("The worktree. Default: the one around the project directory, else main.")]
LockId = Annotated[Name | None, _about("The id of a lease acquired elsewhere, not with take_lease. Rarely needed.")]


class Arguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a tool."""


class Who(Arguments):
    pass


class TakeLease(Arguments):
    worktree: Worktree = None
    ttl: Annotated[Duration | None, _about(f"How long the lease lasts if this server dies. Default: {KEPT}.")] = None
    wait: Annotated[Duration, _about("How long to wait in the queue: 0s, 30s, 5m.")] = "0s"
    purpose: Annotated[Line, _about("The purpose, shown to others.")] = ""
    priority: Annotated[int, Meta(ge=-1000, le=1000, description="Higher priority is served first.")] = 0


class ReleaseLease(Arguments):
    worktree: Worktree = None


class TakeSnapshot(Arguments):
    worktree: Worktree = None
    note: Annotated[Text, _about("A note, for people.")] = ""
    tag: Annotated[Name | None, _about("A reference to it, which protects it from garbage collection.")] = None
    consistency: Annotated[
        Literal["quiesced", "best_effort"] | None,
        _about("quiesced: fail if a file changes meanwhile. Default: the worktree's setting."),
    ] = None
    lock_id: LockId = None


class Restore(Arguments):
    snapshot: Annotated[Name, _about("A prefix of its id, a reference, head, or head~2.")]
    into: Annotated[Name | None, _about("The name of the new worktree. Not with in_place.")] = None
    in_place: Annotated[bool, _about("Save the content of the worktree as a snapshot, and replace it.")] = False
    worktree: Worktree = None
    reason: Annotated[Text, _about("The reason. Required with in_place; recorded.")] = ""
    path: Annotated[Text | None, _about("With in_place: only this path, relative to the worktree.")] = None
    dry_run: Annotated[bool, _about("Only report what would be done.")] = False
    lock_id: LockId = None


class ReadHistory(Arguments):
    worktree: Worktree = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="Show the newest N.")] = 20
    all_worktrees: Annotated[bool, _about("Show the snapshots of all worktrees.")] = False


class ClaimNextWork(Arguments):
    issue: Annotated[Name | None, _about("The id of an issue. Default: the most urgent ready one.")] = None
    worktree: Annotated[Name | None, _about("The worktree. Default: one for the issue, created from main.")] = None
    gate: Annotated[Name | None, _about("The gate that this work decides: passed if done, else failed.")] = None
    ignore_touches: Annotated[bool, _about("Also claim work on the same paths as work in progress.")] = False
    ttl: Annotated[Duration, _about("How soon the work returns to the queue if this server dies.")] = KEPT
    wait: Annotated[Duration, _about("How long to wait for the worktree.")] = "10s"


class FinishWork(Arguments):
    outcome: Annotated[
        Literal["done", "failed", "released"],
        _about(
            "done: it is complete. failed: it was tried and returns to the queue. "
            "released: it returns to the queue as if it had not been claimed."
        ),
    ]
    issue: Annotated[Name | None, _about("The id of the issue. Default: the only one you have claimed.")] = None
    reason: Annotated[Text, _about("Why it failed or was released. Recorded.")] = ""


class AppendToLedger(Arguments):
    event: Annotated[
        dict[str, Any], _about('The event: an object with a "type", such as {"type": "note", "text": "..."}.')
    ]
    if_sequence: Annotated[Annotated[int, Meta(ge=0)] | None, _about("Append only at this sequence.")] = None


class AddWork(Arguments):
    title: Annotated[str, Meta(min_length=1, max_length=LONGEST_LINE, description="One line.")]
    description: Annotated[str, Meta(max_length=64_000, description="Everything that is needed to do it.")] = ""
    priority: Literal["low", "normal", "high", "critical"] = "normal"
    depends_on: Annotated[
        list[Name], Meta(max_length=100, description="The ids of the issues that must be done first.")
    ] = []
    labels: Annotated[list[Name], Meta(max_length=50)] = []
    touches: Annotated[
        list[Text], Meta(max_length=100, description="Patterns of the paths that the work changes, such as src/*.py.")
    ] = []


Checked = TypeVar("Checked", bound=Arguments)


def checked(kind: type[Checked], given: dict[str, Any] | None) -> Checked:
    """The arguments of a call; `UsageFailure` if they do not fit the tool."""
    try:
        return msgspec.convert(given or {}, kind)
    except msgspec.ValidationError as error:
        raise UsageFailure(f"invalid arguments: {error}", hint="See the tool's input schema.") from None


def schema_of(kind: type[Arguments]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, simplified."""
    _, components = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = components[kind.__name__]
    for each in schema["properties"].values():
        alternatives = [one for one in each.get("anyOf", ()) if one != {"type": "null"}]
        if len(alternatives) == 1:  # optional fields need not be nullable too
            del each["anyOf"]
            each.update(alternatives[0])
        if each.get("default", ...) is None:
            del each["default"]
    kept = {name: schema[name] for name in ("properties", "required") if schema.get(name)}
    return {"type": "object", "properties": {}, **kept, "additionalProperties": False}
