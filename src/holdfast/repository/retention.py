"""Retention rules as pure functions: which snapshots are kept and why, which may be collected and in which order.

Each of these protects a snapshot, whatever the policy says:

- it is the head of a worktree (for a worktree without one: the snapshot that it was created from);
- a reference names it, or a pin that has not expired is on it;
- a running process needs it (so the intent of its scratch directory says), or a pending operation: the source of a
  restore, and the parent of the snapshot that a restore has published, which may insert another between them;
- another plan has marked it for deletion, and decides about it;
- a line of history is broken by a lost descriptor: any older snapshot that no head leads to may be behind the gap.

The policy protects ancestors of heads: without a policy, all; with one, the newest `keep_last` of each line, and all
younger than `keep_for`. Snapshots that no head leads to are kept only for `keep_for`. With `max_bytes`, the rest is
collected only until all snapshots fit into it: first those that no head leads to, then the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from holdfast.clock import format_duration, parse_instant
from holdfast.repository.context import Descriptor, Operation, Pin, Reference
from holdfast.store.audit import AuditEntry
from holdfast.store.model import Family, Instant, Key, SafeName, StructCodec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the history of heads is kept: all of it, if nothing is set."""

    keep_last: int | None = None  # the newest snapshots of each line, its head included
    keep_for: float | None = None  # every snapshot that is younger, in seconds
    max_bytes: int | None = None  # the rest too, while all snapshots together take no more than this

    @property
    def keeps_all_history(self) -> bool:
        return self.keep_last is None and self.keep_for is None and self.max_bytes is None


class PlanState(StrEnum):
    """How far a plan has come."""

    PROPOSED = "proposed"
    DECIDED = "decided"
    """Checked again after all snapshots were marked for deletion. A run that dies now is finished by the next."""
    FINISHED = "finished"


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshots to be deleted."""

    plan_id: SafeName
    created_at: str
    expires_at: Instant
    holder_id: str
    policy: Policy
    snapshots: tuple[SafeName, ...]
    bytes: int  # the reclaimable size
    state: PlanState = PlanState.PROPOSED

    def is_expired(self, now: float) -> bool:
        """Whether it is too old to be started; a decided plan is carried out at any age."""
        return self.state is not PlanState.DECIDED and now >= parse_instant(self.expires_at)


RETENTION: Key[Policy] = Key("jvs/retention", StructCodec(Policy))
PLANS: Family[GcPlan] = Family("jvs/plans", StructCodec(GcPlan), id_field="plan_id")


class Protection(StrEnum):
    """Why a snapshot is kept. The values are part of the interface."""

    HEAD = "head"
    HISTORY = "history"
    KEEP_LAST = "keep_last"
    KEEP_FOR = "keep_for"
    REFERENCE = "ref"
    PIN = "pin"
    IN_USE = "in_use"
    OPERATION = "operation"
    DOOMED = "doomed"
    BROKEN = "broken"
    CLOCK = "clock"
    BUDGET = "max_bytes"


class Reason(NamedTuple):
    """Why a snapshot is kept: the rule, and what it means for this one."""

    protection: Protection
    text: str


class Use(NamedTuple):
    """The use of a snapshot by a running process."""

    snapshot_id: str
    purpose: str


class GcRoots(NamedTuple):
    """All snapshots and gc roots. `heads` has the start of each worktree's line."""

    descriptors: Mapping[str, Descriptor]
    heads: Mapping[str, str]
    references: Sequence[Reference] = ()
    pins: Sequence[Pin] = ()
    uses: Sequence[Use] = ()
    operations: Sequence[Operation] = ()


class Collectable(NamedTuple):
    """A snapshot that nothing protects."""

    snapshot_id: str
    why: str
    created_at: str = ""
    worktree_id: str = ""
    note: str = ""


class RetentionDecision(NamedTuple):
    """Every snapshot is either protected or collectable; `collectable` is in the order of collection."""

    protected: Mapping[str, tuple[Reason, ...]]
    collectable: tuple[Collectable, ...]


class Effect(NamedTuple):
    """The effect of an audited event on gc."""

    moves_root: bool = False  # it may move a root from an unread record to one already read
    deletes_snapshot: bool = False  # the snapshots that it names are gone, as they should be


_HARMLESS = """
    lock_acquired lock_released lock_stolen lock_removed
    pin_added pin_removed reference_created reference_deleted retention_changed
    snapshot_published snapshot_fetched snapshots_repaired head_repaired restore_begun restore_finished restore_given_up
    worktree_created worktree_removed clone_joined tree_quarantined audit_archived content_configured snapshot_sent
    gc_planned gc_plan_expired gc_called_off gc_decided gc_finished
""".split()
EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(_HARMLESS, Effect()),
    **dict.fromkeys(("snapshots_collected", "tree_removed"), Effect(deletes_snapshot=True)),
    **dict.fromkeys(("repository_created", "worktree_renamed"), Effect(moves_root=True)),
}
"""The effect of every event of the audit trail."""


def effect_of(entry: AuditEntry) -> Effect:
    """The effect of an event. An unknown event, of a later version, may move a root."""
    return EFFECTS.get(entry.event, Effect(moves_root=True))


def retain(roots: GcRoots, policy: Policy, now: float, *, plan_id: str | None = None) -> RetentionDecision:
    """Decide for each snapshot whether it is protected. Marks of the plan `plan_id` do not protect."""
    reasons: dict[str, list[Reason]] = {each: [] for each in roots.descriptors}
    reached = _reached(roots)
    for snapshot_id, reason in _all_reasons(roots, reached, policy, now, plan_id):
        if snapshot_id in reasons:  # a root without a descriptor is for the doctor
            reasons[snapshot_id].append(reason)
    protected = {each: tuple(why) for each, why in reasons.items() if why}
    rest = [each for each in roots.descriptors.values() if each.snapshot_id not in protected]
    rest.sort(key=lambda each: (each.snapshot_id in reached, each.created_at, each.snapshot_id))
    return RetentionDecision(protected, tuple(_collectable(each, reached, policy) for each in rest))


def within_budget(
    collectable: Sequence[Collectable], policy: Policy, total: int, reclaimable: Callable[[Sequence[str]], int]
) -> int:
    """How many collectable snapshots, from the first on, to delete so that the rest fits into `max_bytes`; else all.

    `reclaimable` returns the reclaimable size of snapshots, which is not a sum, because snapshots share files.
    """
    if policy.max_bytes is None:
        return len(collectable)
    ids = [each.snapshot_id for each in collectable]
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if total - reclaimable(ids[:middle]) <= policy.max_bytes:
            high = middle
        else:
            low = middle + 1
    return low


class _Reached(NamedTuple):
    """The worktree whose head leads to a snapshot, and in how many steps, counted from 1."""

    worktree: str
    rank: int


def _reached(roots: GcRoots) -> dict[str, list[_Reached]]:
    found: dict[str, list[_Reached]] = {}
    for worktree, head in roots.heads.items():
        for rank, snapshot_id in enumerate(line(roots.descriptors, head), 1):
            found.setdefault(snapshot_id, []).append(_Reached(worktree, rank))
    return found


def line(descriptors: Mapping[str, Descriptor], start: str | None) -> Iterator[str]:
    """A snapshot and its ancestors, as far as they exist; a cycle ends where it closes."""
    seen: set[str] = set()
    while start is not None and start in descriptors and start not in seen:
        seen.add(start)
        yield start
        start = descriptors[start].parent_id


def _all_reasons(
    roots: GcRoots, reached: Mapping[str, Sequence[_Reached]], policy: Policy, now: float, plan_id: str | None
) -> Iterator[tuple[str, Reason]]:
    for worktree, head in roots.heads.items():
        yield head, Reason(Protection.HEAD, f"head of {worktree}")
    for reference in roots.references:
        yield reference.snapshot_id, Reason(Protection.REFERENCE, f"reference {reference.name}")
    for pin in roots.pins:
        if pin_holds(pin, now):
            until, why = f" until {pin.until}" if pin.until else "", f": {pin.reason}" if pin.reason else ""
            yield pin.snapshot_id, Reason(Protection.PIN, f"pin {pin.pin_id}{until}{why}")
    for use in roots.uses:
        yield use.snapshot_id, Reason(Protection.IN_USE, f"needed by a running {use.purpose}")
    yield from _by_operations(roots)
    for each in roots.descriptors.values():
        if each.doomed_by is not None and each.doomed_by != plan_id:
            yield each.snapshot_id, Reason(Protection.DOOMED, f"being collected by the plan {each.doomed_by}")
        yield from _by_age(each, policy, now)
    yield from _by_history(reached, policy)
    yield from _by_breaks(roots, reached)


def _by_breaks(roots: GcRoots, reached: Mapping[str, object]) -> Iterator[tuple[str, Reason]]:
    """Snapshots that a head may have led to before a descriptor was lost. Collecting leaves no such gap."""
    breaks = list(_breaks(roots))
    for each in roots.descriptors.values() if breaks else ():
        if each.snapshot_id in reached:
            continue
        for lost, child in breaks:
            if child is None or each.created_at <= child.created_at:
                text = f"it may be an ancestor of {lost}, which is lost: see 'holdfast doctor'"
                yield each.snapshot_id, Reason(Protection.BROKEN, text)
                break


def _breaks(roots: GcRoots) -> Iterator[tuple[str, Descriptor | None]]:
    """The lost snapshots that lines lead to, each with its child; a lost head has none."""
    for head in roots.heads.values():
        last = None
        for each in line(roots.descriptors, head):
            last = roots.descriptors[each]
        lost = head if last is None else last.parent_id
        if lost is not None and lost not in roots.descriptors:
            yield lost, last


def _by_operations(roots: GcRoots) -> Iterator[tuple[str, Reason]]:
    for operation in roots.operations:
        text = f"needed by a pending {operation.kind.value} of {operation.worktree_id}"
        made = roots.descriptors.get(operation.operation_id)
        for needed in (operation.snapshot_id, made.parent_id if made else None):
            if needed is not None:
                yield needed, Reason(Protection.OPERATION, text)


def pin_holds(pin: Pin, now: float) -> bool:
    """Whether a pin has not expired. A pin whose end cannot be read holds."""
    try:
        return pin.until is None or now < parse_instant(pin.until)
    except ValueError:
        return True


def _by_age(each: Descriptor, policy: Policy, now: float) -> Iterator[tuple[str, Reason]]:
    if policy.keep_for is None:
        return
    try:
        age = now - parse_instant(each.created_at)
    except ValueError:
        yield each.snapshot_id, Reason(Protection.CLOCK, f"its age is not known: {each.created_at!a}")
        return
    if age < policy.keep_for:
        text = f"{format_duration(max(age, 0.0))} old, kept for {format_duration(policy.keep_for)}"
        yield each.snapshot_id, Reason(Protection.KEEP_FOR, text)


def _by_history(reached: Mapping[str, Sequence[_Reached]], policy: Policy) -> Iterator[tuple[str, Reason]]:
    for snapshot_id, by in reached.items():
        if policy.keeps_all_history:
            yield snapshot_id, Reason(Protection.HISTORY, f"in the history of {_of(by)}; no policy limits it")
        elif policy.keep_last is not None and (near := [each for each in by if each.rank <= policy.keep_last]):
            yield snapshot_id, Reason(Protection.KEEP_LAST, f"one of the newest {policy.keep_last} of {_of(near)}")


def _of(lines: Sequence[_Reached]) -> str:
    """One worktree, and how many more: most of them may share most of the history."""
    return lines[0].worktree + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")


def _collectable(each: Descriptor, reached: Mapping[str, object], policy: Policy) -> Collectable:
    kept = [] if policy.keep_last is None else [f"the newest {policy.keep_last}"]
    if policy.keep_for is not None:
        kept.append(f"those younger than {format_duration(policy.keep_for)}")
    why = f"beyond {' and '.join(kept)}" if kept else "an ancestor of a head"
    if each.snapshot_id not in reached:
        why = "no head leads to it"
    return Collectable(each.snapshot_id, why, each.created_at, each.worktree_id, each.note)
