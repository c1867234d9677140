"""What is kept and why, what may be collected and in which order: decided by pure functions.

A snapshot is protected by any one of these, whatever the policy says:

- it is the head of a worktree (for a worktree without one: the snapshot that it was made from);
- a reference names it; a pin that has not run out is on it;
- a running process needs it (the intent of its scratch says so), or a pending operation does: what is
  restored, and the parent of what a restore has published, on top of which it may put another one yet;
- another plan has doomed it: that is decided there;
- a line is broken, because a descriptor was lost, and it may have been on the other side: what no head leads
  to is kept then, as far as it is not younger than the break.

The ancestors of heads are protected as the policy says: without one, all of them. With one, the
newest `keep_last` of each line, and whatever is younger than `keep_for`. What no head leads to is
kept only as long as `keep_for` says. With `max_bytes`, what is left is collected only as far as it
takes to come down to that many bytes: first what no head leads to, then the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from holdfast.clock import format_duration, parse_instant
from holdfast.repository.context import Descriptor, Operation, Pin, Reference
from holdfast.store.model import Family, Key, StructCodec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How much is kept of the history that heads lead to. Nothing set: all of it."""

    keep_last: int | None = None
    """So many of the newest snapshots of each line, its head included."""
    keep_for: float | None = None
    """Every snapshot that is younger than this, in seconds."""
    max_bytes: int | None = None
    """What is beyond the above is kept too, as long as all snapshots together take no more than this."""

    @property
    def keeps_all_history(self) -> bool:
        return self.keep_last is None and self.keep_for is None and self.max_bytes is None


class PlanState(StrEnum):
    """How far a plan has come."""

    PROPOSED = "proposed"
    DECIDED = "decided"
    """Looked at again after all of it was doomed: from here on it is carried out, by whoever comes by."""
    FINISHED = "finished"


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which snapshots are to be deleted."""

    plan_id: str
    created_at: str
    expires_at: str
    holder_id: str
    policy: Policy
    snapshots: tuple[str, ...]
    bytes: int
    """What deleting them frees."""
    state: PlanState = PlanState.PROPOSED

    def is_expired(self, now: float) -> bool:
        """Whether it is too old to be begun; what is decided is carried out at any age."""
        return self.state is not PlanState.DECIDED and now >= parse_instant(self.expires_at)


RETENTION: Key[Policy] = Key("jvs/retention", StructCodec(Policy))
PLANS: Family[GcPlan] = Family("jvs/plans", StructCodec(GcPlan))


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
    """A running process needs a snapshot."""

    snapshot_id: str
    purpose: str


class Standing(NamedTuple):
    """All that the decision rests on, as of one moment. `heads` has the start of each worktree's line."""

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
    """Every snapshot is in one of the two. What is collectable stands in the order of collecting."""

    protected: Mapping[str, tuple[Reason, ...]]
    collectable: tuple[Collectable, ...]


def judge(standing: Standing, policy: Policy, now: float, *, plan_id: str | None = None) -> RetentionDecision:
    """Say of each snapshot whether it is protected. `plan_id` is the plan whose own doom does not count."""
    reasons: dict[str, list[Reason]] = {each: [] for each in standing.descriptors}
    reached = dict(_reached(standing))
    for snapshot_id, reason in _all_reasons(standing, reached, policy, now, plan_id):
        if snapshot_id in reasons:  # what is not there cannot be kept: that is for the doctor
            reasons[snapshot_id].append(reason)
    protected = {each: tuple(why) for each, why in reasons.items() if why}
    rest = [each for each in standing.descriptors.values() if each.snapshot_id not in protected]
    rest.sort(key=lambda each: (each.snapshot_id in reached, each.created_at, each.snapshot_id))
    return RetentionDecision(protected, tuple(_collectable(each, reached, policy) for each in rest))


def within_budget(
    collectable: Sequence[Collectable], policy: Policy, total: int, freed: Callable[[Sequence[str]], int]
) -> int:
    """How many of the collectable ones, from the first, must go for the rest to fit into `max_bytes`.

    `freed` tells what deleting these frees: never less for more of them (snapshots share files, so it is
    not a sum). Without a budget, all of them go; if all are not enough, all of them go as well.
    """
    if policy.max_bytes is None:
        return len(collectable)
    ids = [each.snapshot_id for each in collectable]
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if total - freed(ids[:middle]) <= policy.max_bytes:
            high = middle
        else:
            low = middle + 1
    return low


class _Reached(NamedTuple):
    """A head leads to a snapshot: which one, and in how many steps, counted from 1."""

    worktree: str
    rank: int


def _reached(standing: Standing) -> Iterator[tuple[str, tuple[_Reached, ...]]]:
    """For each snapshot that a head leads to: by which lines, and how far from their heads."""
    found: dict[str, list[_Reached]] = {}
    for worktree, head in standing.heads.items():
        for rank, snapshot_id in enumerate(line(standing.descriptors, head), 1):
            found.setdefault(snapshot_id, []).append(_Reached(worktree, rank))
    for snapshot_id, by in found.items():
        yield snapshot_id, tuple(by)


def line(descriptors: Mapping[str, Descriptor], start: str | None) -> Iterator[str]:
    """A snapshot and its ancestors, as far as they are there; a circle ends where it closes."""
    seen: set[str] = set()
    while start is not None and start in descriptors and start not in seen:
        seen.add(start)
        yield start
        start = descriptors[start].parent_id


def _all_reasons(
    standing: Standing,
    reached: Mapping[str, tuple[_Reached, ...]],
    policy: Policy,
    now: float,
    plan_id: str | None,
) -> Iterator[tuple[str, Reason]]:
    for worktree, head in standing.heads.items():
        yield head, Reason(Protection.HEAD, f"head of {worktree}")
    for reference in standing.references:
        yield reference.snapshot_id, Reason(Protection.REFERENCE, f"reference {reference.name}")
    for pin in standing.pins:
        if pin_holds(pin, now):
            yield pin.snapshot_id, Reason(Protection.PIN, _pin_text(pin))
    for use in standing.uses:
        yield use.snapshot_id, Reason(Protection.IN_USE, f"needed by a running {use.purpose}")
    yield from _by_operations(standing)
    for each in standing.descriptors.values():
        if each.doomed_by is not None and each.doomed_by != plan_id:
            yield each.snapshot_id, Reason(Protection.DOOMED, f"being collected by the plan {each.doomed_by}")
        yield from _by_age(each, policy, now)
    yield from _by_history(reached, policy)
    yield from _by_breaks(standing, reached)


def _by_breaks(standing: Standing, reached: Mapping[str, object]) -> Iterator[tuple[str, Reason]]:
    """What no head leads to, but may have before a descriptor was lost. Collecting leaves no such gap."""
    breaks = list(_breaks(standing))
    for each in standing.descriptors.values() if breaks else ():
        if each.snapshot_id in reached:
            continue
        for lost, child in breaks:
            if child is None or each.created_at <= child.created_at:
                text = f"{lost} is lost, and it may be one of its ancestors: see 'holdfast doctor'"
                yield each.snapshot_id, Reason(Protection.BROKEN, text)
                break


def _breaks(standing: Standing) -> Iterator[tuple[str, Descriptor | None]]:
    """The snapshots that lines lead to and that are not there, each with its child; a head has none."""
    for head in standing.heads.values():
        last = None
        for each in line(standing.descriptors, head):
            last = standing.descriptors[each]
        lost = head if last is None else last.parent_id
        if lost is not None and lost not in standing.descriptors:
            yield lost, last


def _by_operations(standing: Standing) -> Iterator[tuple[str, Reason]]:
    for operation in standing.operations:
        text = f"needed by a pending {operation.kind.value} of {operation.worktree_id}"
        made = standing.descriptors.get(operation.operation_id)
        for needed in (operation.snapshot_id, made.parent_id if made else None):
            if needed is not None:
                yield needed, Reason(Protection.OPERATION, text)


def pin_holds(pin: Pin, now: float) -> bool:
    """Whether a pin has not run out. One whose end cannot be read holds."""
    try:
        return pin.until is None or now < parse_instant(pin.until)
    except ValueError:
        return True


def _pin_text(pin: Pin) -> str:
    text = f"pin {pin.pin_id}"
    text += f" until {pin.until}" if pin.until else ""
    return text + (f": {pin.reason}" if pin.reason else "")


def _by_age(each: Descriptor, policy: Policy, now: float) -> Iterator[tuple[str, Reason]]:
    if policy.keep_for is None:
        return
    try:
        age = now - parse_instant(each.created_at)
    except ValueError:
        yield each.snapshot_id, Reason(Protection.CLOCK, f"its age cannot be told: {each.created_at!a}")
        return
    if age < policy.keep_for:
        text = f"{format_duration(max(age, 0.0))} old, kept for {format_duration(policy.keep_for)}"
        yield each.snapshot_id, Reason(Protection.KEEP_FOR, text)


def _by_history(reached: Mapping[str, tuple[_Reached, ...]], policy: Policy) -> Iterator[tuple[str, Reason]]:
    for snapshot_id, by in reached.items():
        if policy.keeps_all_history:
            text = f"in the history of {_of(by)}; no policy lets it go"
            yield snapshot_id, Reason(Protection.HISTORY, text)
        elif policy.keep_last is not None:
            near = [each for each in by if each.rank <= policy.keep_last]
            if near:
                text = f"one of the newest {policy.keep_last} of {_of(near)}"
                yield snapshot_id, Reason(Protection.KEEP_LAST, text)


def _of(lines: Sequence[_Reached]) -> str:
    """Whose lines, in a few words: most of the worktrees may share most of the history."""
    return lines[0].worktree + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")


def _collectable(each: Descriptor, reached: Mapping[str, object], policy: Policy) -> Collectable:
    if each.snapshot_id not in reached:
        return _told(each, "no head leads to it")
    kept: list[str] = []
    if policy.keep_last is not None:
        kept.append(f"the newest {policy.keep_last}")
    if policy.keep_for is not None:
        kept.append(f"what is younger than {format_duration(policy.keep_for)}")
    return _told(each, f"beyond {' and '.join(kept)}" if kept else "an ancestor of a head")


def _told(each: Descriptor, why: str) -> Collectable:
    return Collectable(each.snapshot_id, why, each.created_at, each.worktree_id, each.note)
