"""A look at all that protects snapshots, without a lock over everything, that misses nothing.

1. The order of looking is that of handing over: what protects a snapshot hands it on before it lets go. A
   running process commits an operation or a record before its scratch ends; an operation ends in the
   commit that makes its result a record. So uses come first, then operations, then records: what left
   one place before we looked there is found at the next.
2. A rename moves a head from one record to another. Its old record may be gone when we come to it, and
   its new one may not have been there when we made the list. But it is in the audit trail, in the same
   commit: if there is one that was added meanwhile, or anything that we do not know, we look again.
3. Descriptors come last: what a record points to was there before. Lines change under our eyes only where
   a collection links a child to another parent, or a restore puts a snapshot between two: so where a
   parent is not among those that we have read, it and its child are read again.
"""

from __future__ import annotations

from holdfast.errors import LockConflict
from holdfast.store.model import Decision
from holdfast.worktrees import scratch
from holdfast.worktrees.control import Control
from holdfast.worktrees.records import (
    DESCRIPTORS,
    OPERATIONS,
    PINS,
    REFERENCES,
    WORKTREES,
    Descriptor,
)
from holdfast.worktrees.retention import Standing, Use

MOST_LOOKS = 50

_HARMLESS = (
    "lock_",
    "pin_",
    "reference_",
    "snapshot_",
    "snapshots_",
    "restore_",
    "retention_",
    "gc_",
    "tree_",
)
_HARMLESS_EVENTS = frozenset({"worktree_created", "worktree_removed", "head_repaired"})
"""Events that move no protection from where we have not looked yet to where we have looked already."""


def survey(control: Control) -> Standing:
    """What there is, and all that protects it."""
    protecting = _protecting(control)
    descriptors = {name: document.record for name, document in control.store.scan(DESCRIPTORS)}
    return protecting._replace(descriptors=completed(control, descriptors))  # 3


def _protecting(control: Control) -> Standing:
    for _ in range(MOST_LOOKS):
        end = _end_of_trail(control)
        standing = _look(control)  # 1
        if not _has_moved(control, end):  # 2
            return standing
    raise LockConflict(
        "worktrees are renamed faster than they can be looked at",
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
        descriptors={},
        uses=uses,
        operations=operations,
        heads={worktree: head for worktree, head in heads.items() if head is not None},
        references=[document.record for _, document in control.store.scan(REFERENCES)],
        pins=[document.record for _, document in control.store.scan(PINS)],
    )


def completed(control: Control, descriptors: dict[str, Descriptor]) -> dict[str, Descriptor]:
    """The descriptors, with those that lines lead to by now, and without those that are gone by now."""
    waiting = [each.snapshot_id for each in descriptors.values() if _lacks_parent(each, descriptors)]
    while waiting:
        child = _read(control, waiting.pop())
        if child is None:
            continue
        descriptors[child.snapshot_id] = child
        if _lacks_parent(child, descriptors) and child.parent_id is not None:
            parent = _read(control, child.parent_id)
            if parent is not None:
                descriptors[parent.snapshot_id] = parent
                waiting.append(parent.snapshot_id)
            elif (again := _read(control, child.snapshot_id)) is not None and again != child:
                waiting.append(again.snapshot_id)  # it was linked anew between the two reads
    return descriptors


def _lacks_parent(each: Descriptor, descriptors: dict[str, Descriptor]) -> bool:
    return each.parent_id is not None and each.parent_id not in descriptors


def _read(control: Control, snapshot_id: str) -> Descriptor | None:
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    return None if document is None else document.record


def _end_of_trail(control: Control) -> int:
    stream = control.trail.stream
    return control.store.transact([stream], lambda view, now: Decision([], view.end(stream))).result


def _has_moved(control: Control, end: int) -> bool:
    later = (entry.record.event for entry in control.store.entries(control.trail.stream, after=end))
    return any(event not in _HARMLESS_EVENTS and not event.startswith(_HARMLESS) for event in later)
