"""The policy of retention, and plans: what would be deleted, what is kept and why, what it frees.

Making a plan changes nothing but that the plan is written down, under an id by which it can be run.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import LockConflict, NotFound, SettingInvalid
from holdfast.repository import payloads
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    PINS,
    REFERENCES,
    WORKTREES,
    Descriptor,
    RepositoryContext,
    RepositoryPaths,
)
from holdfast.repository.retention import (
    PLANS,
    RETENTION,
    Collectable,
    GcPlan,
    Policy,
    Protection,
    Reason,
    Standing,
    Use,
    judge,
    within_budget,
)
from holdfast.store.model import Change, Create, Decision, Delete, Replace, View

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


def survey(control: RepositoryContext) -> Standing:
    """What there is, and all that protects it."""
    protecting = _protecting(control)
    descriptors = {name: document.record for name, document in control.store.scan(DESCRIPTORS)}
    return protecting._replace(descriptors=completed(control, descriptors))  # 3


def _protecting(control: RepositoryContext) -> Standing:
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


def _look(control: RepositoryContext) -> Standing:
    uses = [
        Use(snapshot_id, intent.purpose)
        for intent in payloads.in_use(control.places)
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


def completed(control: RepositoryContext, descriptors: dict[str, Descriptor]) -> dict[str, Descriptor]:
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


def _read(control: RepositoryContext, snapshot_id: str) -> Descriptor | None:
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    return None if document is None else document.record


def _end_of_trail(control: RepositoryContext) -> int:
    stream = control.trail.stream
    return control.store.transact([stream], lambda view, now: Decision([], view.end(stream))).result


def _has_moved(control: RepositoryContext, end: int) -> bool:
    later = (entry.record.event for entry in control.store.entries(control.trail.stream, after=end))
    return any(event not in _HARMLESS_EVENTS and not event.startswith(_HARMLESS) for event in later)


PLAN_TTL = 24 * 3600.0
"""A plan that is older is not begun any more: too much has happened since somebody looked at it."""

MOST_SNAPSHOTS = 50_000
"""The most that one plan deletes; what is left over is for the next one."""

LONGEST_KEEP = 36_500 * 86_400.0


class Proposal(NamedTuple):
    """A plan, with all that people want to know about it."""

    plan: GcPlan
    candidates: tuple[Collectable, ...]
    protected: Mapping[str, tuple[Reason, ...]]
    total_bytes: int
    stored: bool

    @property
    def over_budget(self) -> int:
        """How many bytes more than the budget will be left, because what is protected takes them."""
        budget = self.plan.policy.max_bytes
        return 0 if budget is None else max(0, self.total_bytes - self.plan.bytes - budget)


def policy_of(control: RepositoryContext) -> Policy:
    """The policy as of now. Takes no lock."""
    document = control.store.read(RETENTION)
    return Policy() if document is None else document.record


def set_policy(control: RepositoryContext, policy: Policy) -> Policy:
    """Put another policy in the place of the one that is there; the one that keeps everything is none."""
    check_policy(policy)

    def decide(view: View, now: float) -> Decision[Policy]:
        there = view.get(RETENTION)
        before = there or Policy()
        if before == policy:
            return Decision([], policy)
        change: Change
        if there is None:
            change = Create(RETENTION, policy)
        else:
            change = Delete(RETENTION) if policy.keeps_all_history else Replace(RETENTION, policy)
        facts = {"before": msgspec.to_builtins(before), "after": msgspec.to_builtins(policy)}
        return Decision([change, control.audit(view, now, "retention_changed", **facts)], policy)

    return control.places.reserve.relieve(
        lambda: control.store.transact([RETENTION, control.trail.stream], decide).result
    )


def check_policy(policy: Policy) -> None:
    """Refuse values that make no sense."""
    if policy.keep_last is not None and not 1 <= policy.keep_last <= 1_000_000:
        raise SettingInvalid("keep_last", str(policy.keep_last), "a number from 1 to 1000000")
    if policy.keep_for is not None and not (
        math.isfinite(policy.keep_for) and 0 < policy.keep_for <= LONGEST_KEEP
    ):
        raise SettingInvalid("keep_for", str(policy.keep_for), "a duration above 0 and of 36500d at most")
    if policy.max_bytes is not None and not 0 <= policy.max_bytes < 1 << 62:
        raise SettingInvalid("max_bytes", str(policy.max_bytes), "a number of bytes, 0 or more")


def propose(control: RepositoryContext, *, store: bool = True) -> Proposal:
    """Find out what may be deleted. With `store`, a plan to delete something is written down to be run.

    Also on a full disk: what is set aside is used, and if it is not there any more it is set aside again.
    """
    proposal = control.places.reserve.relieve(lambda: _propose(control, store=store))
    if store:
        control.places.reserve.refill()
    return proposal


def _propose(control: RepositoryContext, *, store: bool) -> Proposal:
    policy, standing, now = policy_of(control), survey(control), control.store.now()
    verdict = judge(standing, policy, now)
    total = _total_bytes(control.places) if policy.max_bytes is not None else 0
    freed = _freed_in_turn(control.places, [each.snapshot_id for each in verdict.collectable])
    count = within_budget(verdict.collectable, policy, total, lambda ids: freed[len(ids)])
    chosen, spared = verdict.collectable[: min(count, MOST_SNAPSHOTS)], verdict.collectable[count:]
    ids = [each.snapshot_id for each in chosen]
    fits = Reason(Protection.BUDGET, "fits into the budget")
    plan = GcPlan(
        plan_id=secrets.token_hex(4),
        created_at=format_instant(now),
        expires_at=format_instant(now + PLAN_TTL),
        holder_id=control.holder.holder_id,
        policy=policy,
        snapshots=tuple(ids),
        bytes=freed[len(ids)] if ids else 0,
    )
    stored = store and bool(ids)
    if stored:
        _store(control, plan)
    protected = {**verdict.protected, **{each.snapshot_id: (fits,) for each in spared}}
    return Proposal(plan, chosen, protected, total, stored)


def plan_of(control: RepositoryContext, plan_id: str) -> GcPlan:
    """A plan by its id."""
    document = control.store.read(PLANS.key(plan_id))
    if document is None:
        raise NotFound(
            f"there is no plan {plan_id}",
            hint="Plans are kept for a day. Make a new one: 'holdfast gc plan'.",
            plan=plan_id,
        )
    return document.record


def plans(control: RepositoryContext) -> list[GcPlan]:
    """All plans that are kept. Takes no lock."""
    return [document.record for _, document in control.store.scan(PLANS)]


def forget_plan(control: RepositoryContext, plan_id: str) -> bool:
    """Remove a plan that has expired; False if it is not there, or is not over."""
    key = PLANS.key(plan_id)

    def decide(view: View, now: float) -> Decision[bool]:
        plan = view.get(key)
        if plan is None or not plan.is_expired(now):
            return Decision([], False)
        return Decision([Delete(key), control.audit(view, now, "gc_plan_expired", plan=plan_id)], True)

    return control.store.transact([key, control.trail.stream], decide).result


def _store(control: RepositoryContext, plan: GcPlan) -> None:
    key = PLANS.key(plan.plan_id)

    def decide(view: View, now: float) -> Decision[None]:
        facts = {"plan": plan.plan_id, "snapshots": len(plan.snapshots), "bytes": plan.bytes}
        return Decision([Create(key, plan), control.audit(view, now, "gc_planned", **facts)], None)

    control.store.transact([key, control.trail.stream], decide)


def _freed_in_turn(places: RepositoryPaths, snapshot_ids: Sequence[str]) -> list[int]:
    """What is free once the first 0, 1, 2, ... of these are deleted; what is gone by now frees nothing."""
    from holdfast.repository.gc_sweep import need_of_all, trees_in
    from holdfast.trees.retained_dirs import freed_in_turn

    if not snapshot_ids:
        return [0]
    need = need_of_all(places, but=set(snapshot_ids))
    return freed_in_turn([places.tree(each) for each in snapshot_ids], need, trees_in(places.remnants))


def _total_bytes(places: RepositoryPaths) -> int:
    """What all snapshots take, with what is left of others because they need it."""
    from holdfast.repository.gc_sweep import trees_in
    from holdfast.trees.retained_dirs import tree_bytes

    return tree_bytes([*trees_in(places.snapshots), *trees_in(places.remnants)])
