"""A look at all that protects snapshots, as of one moment, without a lock over everything.

The order of looking matters: what protects a snapshot hands it on before it lets go. A running process
commits an operation or a record before its scratch ends; an operation ends in the commit that makes
its result a record. So uses are looked at first, then operations, then records: what left one place
before we looked there is found at the next.

Records themselves move when a worktree is renamed: its old name may be gone when we come to it, and
its new one may not have been there when we made the list. But every such change is in the audit
trail, in the same commit: if the trail has grown meanwhile by anything but leases, we look again.
"""

from __future__ import annotations

from holdfast.errors import LockConflict
from holdfast.store.records import Decision
from holdfast.worktrees import scratch
from holdfast.worktrees.control import Control
from holdfast.worktrees.records import DESCRIPTORS, OPERATIONS, PINS, REFERENCES, WORKTREES
from holdfast.worktrees.retention import Standing, Use

MOST_LOOKS = 50
_HARMLESS = "lock_"
"""How the events of leases begin: they protect nothing."""


def survey(control: Control) -> Standing:
    """What there is, and what protects it, all of one moment."""
    for _ in range(MOST_LOOKS):
        end = _end_of_trail(control)
        standing = _look(control)
        if not _has_moved(control, end):
            return standing
    raise LockConflict(
        "the repository changes faster than it can be looked at",
        hint="Try again when less is going on.",
        looks=MOST_LOOKS,
    )


def _look(control: Control) -> Standing:
    uses = [
        Use(snapshot_id, intent.purpose)
        for intent in scratch.in_use(control.places)
        for snapshot_id in intent.uses
    ]
    operations = [document.record for _, document in control.store.scan(OPERATIONS)]
    configs = [document.record for _, document in control.store.scan(WORKTREES)]
    heads = {each.worktree_id: each.head_snapshot_id or each.base_snapshot_id for each in configs}
    return Standing(
        uses=uses,
        operations=operations,
        heads={worktree: head for worktree, head in heads.items() if head is not None},
        references=[document.record for _, document in control.store.scan(REFERENCES)],
        pins=[document.record for _, document in control.store.scan(PINS)],
        descriptors={name: document.record for name, document in control.store.scan(DESCRIPTORS)},
    )


def _end_of_trail(control: Control) -> int:
    stream = control.trail.stream
    return control.store.transact([stream], lambda view, now: Decision([], view.end(stream))).result


def _has_moved(control: Control, end: int) -> bool:
    later = control.store.entries(control.trail.stream, after=end)
    return any(not entry.record.event.startswith(_HARMLESS) for entry in later)
