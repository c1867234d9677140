"""The commits that the sweeps run: one document, one record, or several changes; on new stores and used ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.store.model import Append, Change, Create, Delete, Replace, View
from tests.store.commit_operations import Operation, making
from tests.store.commit_scenarios import CommitCase
from tests.store.worlds import (
    AUDIT,
    DESCRIPTORS,
    EVENTS,
    GATES,
    INDEX,
    ISSUES,
    LEDGER,
    LOOSE_EVENTS,
    REFS,
    WORKTREES,
    Listed,
    Text,
)

LONG = "long " * 1200
"""Longer than a page, and longer than one read at the end of a stream."""


# --- Histories ---------------------------------------------------------------------------------------

ISSUE = making(
    Create(ISSUES.key("a"), Text("the first issue")),
    Create(INDEX, Listed(("a",))),
    Append(EVENTS, Text("a created")),
)
RULES = making(Create(GATES, Text("rules")))
SNAPSHOT = making(
    Create(DESCRIPTORS.key("s1"), Text("the first snapshot")),
    Create(WORKTREES.key("main"), Text("main", head="s1")),
    Append(AUDIT, Text("s1 taken")),
)
ACCOUNTS = making(Create(REFS.key("alice"), Text("10")), Create(REFS.key("bob"), Text("0")))
CLAIMS = making(Append(LEDGER, Text("claimed")), Append(LEDGER, Text("released")))


# --- Operations --------------------------------------------------------------------------------------

CLAIM_AGAIN = making(Append(LEDGER, Text("claimed again")), Append(LEDGER, Text("released again")))
CREATE_ISSUE = making(
    Create(ISSUES.key("b"), Text("the second issue")),
    Replace(INDEX, Listed(("a", "b"))),
    Append(EVENTS, Text("b created")),
)
DELETE_ISSUE = making(
    Delete(ISSUES.key("a")),
    Replace(INDEX, Listed(())),
    Append(EVENTS, Text("a deleted")),
)
TAKE_SNAPSHOT = making(
    Create(DESCRIPTORS.key("s2"), Text("the second snapshot")),
    Replace(WORKTREES.key("main"), Text("main", head="s2")),
    Append(AUDIT, Text("s2 taken")),
)
WIDE = making(
    Replace(ISSUES.key("a"), Text("the first issue, claimed")),
    Create(DESCRIPTORS.key("s2"), Text("the second snapshot")),
    Replace(WORKTREES.key("main"), Text("main", head="s2")),
    Append(EVENTS, Text("a claimed")),
    Append(LEDGER, Text("claimed again")),
)


def _transfer(view: View) -> Sequence[Change]:
    alice, bob = (view.get(REFS.key(name)) for name in ("alice", "bob"))
    assert alice is not None
    assert bob is not None
    return [
        Replace(REFS.key("alice"), Text(f"{alice.text} less 5")),
        Replace(REFS.key("bob"), Text(f"{bob.text} and 5")),
    ]


TRANSFER = Operation([REFS.key("alice"), REFS.key("bob")], _transfer)


def _rest_on_others(view: View) -> Sequence[Change]:
    event, rules = view.last(EVENTS), view.get(GATES)
    return [Create(ISSUES.key("c"), Text(f"after {event and event.record.text}, by {rules and rules.text}"))]


REPLACE_AND_TELL = making(Replace(GATES, Text("other rules")), Append(EVENTS, Text("rules replaced")))
SHARE_OUT = making(
    Replace(REFS.key("alice"), Text("4")),
    Replace(REFS.key("bob"), Text("3")),
    Create(REFS.key("carol"), Text("3")),
)
REST_ON_OTHERS = Operation([ISSUES.key("c"), GATES, EVENTS], _rest_on_others)


def loose(operation: Operation) -> Operation:
    """The same, but the lock of the events is taken late."""
    named = [LOOSE_EVENTS if each == EVENTS else each for each in operation.named]

    def decide(view: View) -> Sequence[Change]:
        changes = operation.decide(view)
        return [each._replace(stream=LOOSE_EVENTS) if isinstance(each, Append) else each for each in changes]

    return Operation(named, decide)


UPDATE_AND_TELL = making(Replace(ISSUES.key("a"), Text("the first issue, updated")), Append(EVENTS, Text("a updated")))
TELL_TWICE = Operation([GATES, EVENTS], lambda view: [Append(EVENTS, Text(each)) for each in ("seen", "seen again")])

_NAMES = [f"n{number}" for number in range(10)]
TWELVE = making(
    *(Create(ISSUES.key(name), Text(name)) for name in _NAMES),
    Replace(INDEX, Listed(("a", *_NAMES))),
    Append(EVENTS, Text("ten created")),
)
"""A commit large enough to be synced all at once."""


SINGLE: Mapping[str, CommitCase] = {
    "create": CommitCase([ISSUE], making(Create(ISSUES.key("b"), Text("alone")))),
    "create, large": CommitCase([ISSUE], making(Create(ISSUES.key("b"), Text(LONG)))),
    "create in a new store": CommitCase([], making(Create(GATES, Text("rules")))),
    "create in a new directory": CommitCase([ISSUE], making(Create(WORKTREES.key("w"), Text("work")))),
    "replace": CommitCase([RULES], making(Replace(GATES, Text("other rules")))),
    "delete": CommitCase([ACCOUNTS], making(Delete(REFS.key("bob")))),
    "rest on others": CommitCase([ISSUE, RULES], REST_ON_OTHERS),
    "append a line": CommitCase([ISSUE], making(Append(EVENTS, Text("seen")))),
    "append a long line": CommitCase([ISSUE], making(Append(EVENTS, Text(LONG)))),
    "append the first line": CommitCase([], making(Append(AUDIT, Text("begun")))),
    "append to the ledger": CommitCase([CLAIMS], making(Append(LEDGER, Text("claimed again")))),
    "append blindly": CommitCase([CLAIMS], making(Append(LEDGER, Text("claimed again")), is_blind=True)),
    "append blindly to a new ledger": CommitCase([], making(Append(LEDGER, Text("claimed")), is_blind=True)),
    "begin the ledger": CommitCase([], making(Append(LEDGER, Text("claimed")))),
}
SEVERAL: Mapping[str, CommitCase] = {
    "create an issue": CommitCase([ISSUE], CREATE_ISSUE),
    "create the first issue": CommitCase([], ISSUE),
    "delete an issue": CommitCase([ISSUE], DELETE_ISSUE),
    "replace and tell": CommitCase([ISSUE, RULES], REPLACE_AND_TELL),
    "transfer": CommitCase([ACCOUNTS], TRANSFER),
    "share out": CommitCase([ACCOUNTS], SHARE_OUT),
    "take a snapshot": CommitCase([SNAPSHOT], TAKE_SNAPSHOT),
    "take the first snapshot": CommitCase([], SNAPSHOT),
    "begin the ledger with two": CommitCase([], CLAIMS),
    "append two to the ledger": CommitCase([CLAIMS], CLAIM_AGAIN),
    "wide": CommitCase([ISSUE, SNAPSHOT, CLAIMS], WIDE),
}
LATE: Mapping[str, CommitCase] = {
    "create an issue, late": CommitCase([ISSUE], loose(CREATE_ISSUE)),
    "delete an issue, late": CommitCase([ISSUE], loose(DELETE_ISSUE)),
    "update and tell": CommitCase([ISSUE], loose(UPDATE_AND_TELL)),
    "tell twice": CommitCase([ISSUE, RULES], loose(TELL_TWICE)),
    "tell the first time": CommitCase([RULES], loose(TELL_TWICE)),
}
LARGE: Mapping[str, CommitCase] = {"twelve steps": CommitCase([ISSUE], TWELVE)}
ALL: Mapping[str, CommitCase] = {**SINGLE, **SEVERAL, **LATE, **LARGE}
