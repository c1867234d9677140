"""The retention policy, gc roots, and gc plans. Planning writes nothing but the plan.

`docs/protocols/gc.md` explains why no root is missed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast.clock import LONGEST_DURATION, format_duration, format_instant
from holdfast.errors import LockConflict, NotFound, SettingInvalid, format_size
from holdfast.repository import payloads, retention
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    PINS,
    REFERENCES,
    WORKTREES,
    Descriptor,
    RepositoryContext,
)
from holdfast.repository.retention import PLANS, RETENTION, GcPlan, GcRoots, Policy, Reason
from holdfast.store.model import Change, Create, Decision, Delete, Replace, View

MAX_READS = 50  # limits how often the roots are read again because one was moved meanwhile
PLAN_TTL = 24 * 3600.0  # older plans are not run: the repository has changed too much
MOST_KEPT, LARGEST_BUDGET = 1_000_000, 1 << 62
MOST_SNAPSHOTS = 50_000  # the most that one plan deletes; the rest is left to the next plan


def find_roots(context: RepositoryContext) -> GcRoots:
    """All snapshots and gc roots. Takes no lock."""
    stream = context.trail.stream
    for _ in range(MAX_READS):
        end = context.store.transact([stream], lambda view, now: Decision([], view.end(stream))).result
        roots = _read_roots(context)  # 1
        later = context.store.entries(stream, after=end)
        if not any(retention.effect_of(entry.record).moves_root for entry in later):  # 2
            break
    else:
        message, hint = (
            "worktrees are renamed faster than they can be read",
            "Try again when fewer processes are running.",
        )
        raise LockConflict(message, hint=hint, looks=MAX_READS)
    descriptors = {name: document.record for name, document in context.store.scan(DESCRIPTORS)}
    return roots._replace(descriptors=completed(context, descriptors))  # 3


def _read_roots(context: RepositoryContext) -> GcRoots:
    """The roots, read in the order in which protection passes from one kind to the next."""
    uses = [retention.Use(used, each.purpose) for each in payloads.in_use(context.paths) for used in each.uses]
    operations = [document.record for _, document in context.store.scan(OPERATIONS)]
    configs = [document.record for _, document in context.store.scan(WORKTREES)]
    heads = {each.worktree_id: each.head_snapshot_id or each.base_snapshot_id for each in configs}
    return GcRoots(
        descriptors={},
        uses=uses,
        operations=operations,
        heads={worktree: head for worktree, head in heads.items() if head is not None},
        references=[document.record for _, document in context.store.scan(REFERENCES)],
        pins=[document.record for _, document in context.store.scan(PINS)],
    )


def completed(context: RepositoryContext, descriptors: dict[str, Descriptor]) -> dict[str, Descriptor]:
    """The descriptors, with parents that the scan missed, and children that were attached to another parent since."""

    def lacks_parent(each: Descriptor) -> bool:
        return each.parent_id is not None and each.parent_id not in descriptors

    def read(snapshot_id: str) -> Descriptor | None:
        document = context.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record

    waiting = [each.snapshot_id for each in descriptors.values() if lacks_parent(each)]
    while waiting:
        child = read(waiting.pop())
        if child is None:
            continue
        descriptors[child.snapshot_id] = child
        if lacks_parent(child) and child.parent_id is not None:
            parent = read(child.parent_id)
            if parent is not None:
                descriptors[parent.snapshot_id] = parent
                waiting.append(parent.snapshot_id)
            elif (again := read(child.snapshot_id)) is not None and again != child:
                waiting.append(again.snapshot_id)  # it got another parent between the two reads
    return descriptors


def policy_of(context: RepositoryContext) -> Policy:
    """The current policy. Takes no lock."""
    document = context.store.read(RETENTION)
    return Policy() if document is None else document.record


def set_policy(context: RepositoryContext, policy: Policy) -> Policy:
    """Replace the policy; a policy that keeps everything is deleted."""
    check_policy(policy)

    def decide(view: View, now: float) -> Decision[Policy]:
        stored = view.get(RETENTION)
        before = stored or Policy()
        if before == policy:
            return Decision([], policy)
        changed = Delete(RETENTION) if policy.keeps_all_history else Replace(RETENTION, policy)
        change: Change = Create(RETENTION, policy) if stored is None else changed
        facts = {"before": msgspec.to_builtins(before), "after": msgspec.to_builtins(policy)}
        return Decision([change, context.audit(view, now, "retention_changed", **facts)], policy)

    keys = (RETENTION, context.trail.stream)
    return context.paths.reserve.relieve(lambda: context.store.transact(keys, decide).result)


def check_policy(policy: Policy) -> None:
    if policy.keep_last is not None and not 1 <= policy.keep_last <= MOST_KEPT:
        raise SettingInvalid("keep_last", str(policy.keep_last), f"a number from 1 to {MOST_KEPT}")
    if policy.keep_for is not None and not 0 < policy.keep_for <= LONGEST_DURATION:
        expected = f"a duration above 0s and of {format_duration(LONGEST_DURATION)} at most"
        raise SettingInvalid("keep_for", format_duration(policy.keep_for), expected)
    if policy.max_bytes is not None and not 0 <= policy.max_bytes <= LARGEST_BUDGET:
        expected = f"a size from 0 B to {format_size(LARGEST_BUDGET)}"
        raise SettingInvalid("max_bytes", f"{policy.max_bytes} bytes", expected)


class Proposal(NamedTuple):
    """A plan, with the reasons for it."""

    plan: GcPlan
    candidates: tuple[retention.Collectable, ...]
    protected: Mapping[str, tuple[Reason, ...]]
    total_bytes: int
    stored: bool

    @property
    def over_budget(self) -> int:
        """By how many bytes protected snapshots exceed the budget."""
        budget = self.plan.policy.max_bytes
        return 0 if budget is None else max(0, self.total_bytes - self.plan.bytes - budget)


def propose(context: RepositoryContext, *, store: bool = True) -> Proposal:
    """Plan a collection; with `store`, save the plan so that it can be run. Works on a full disk, with the reserve."""
    proposal = context.paths.reserve.relieve(lambda: _propose(context, store=store))
    if store:
        context.paths.reserve.refill()
    return proposal


def _propose(context: RepositoryContext, *, store: bool) -> Proposal:
    policy, roots, now = policy_of(context), find_roots(context), context.store.now()
    decision = retention.retain(roots, policy, now)
    total = context.home.total_bytes() if policy.max_bytes is not None else 0
    found = [each.snapshot_id for each in decision.collectable]
    sizes = context.home.reclaimable(found) if found else [0]
    count = retention.within_budget(decision.collectable, policy, total, lambda ids: sizes[len(ids)])
    chosen, spared = decision.collectable[: min(count, MOST_SNAPSHOTS)], decision.collectable[count:]
    ids = [each.snapshot_id for each in chosen]
    fits = Reason(retention.Protection.BUDGET, "fits into the budget")
    plan = GcPlan(
        plan_id=secrets.token_hex(4),
        created_at=format_instant(now),
        expires_at=format_instant(now + PLAN_TTL),
        holder_id=context.holder.holder_id,
        policy=policy,
        snapshots=tuple(ids),
        bytes=sizes[len(ids)] if ids else 0,
    )
    stored = store and bool(ids)
    if stored:
        _store(context, plan)
    protected = {**decision.protected, **{each.snapshot_id: (fits,) for each in spared}}
    return Proposal(plan, chosen, protected, total, stored)


def plan_of(context: RepositoryContext, plan_id: str) -> GcPlan:
    document = context.store.read(PLANS.key(plan_id))
    if document is None:
        hint = "Plans are kept for a day. Make a new one: 'holdfast gc plan'."
        raise NotFound(f"there is no plan {plan_id}", hint=hint, plan=plan_id)
    return document.record


def plans(context: RepositoryContext) -> list[GcPlan]:
    """All stored plans. Takes no lock."""
    return [document.record for _, document in context.store.scan(PLANS)]


def forget_plan(context: RepositoryContext, plan_id: str) -> bool:
    """Remove an expired plan; False if it does not exist, or has not expired."""
    key = PLANS.key(plan_id)

    def decide(view: View, now: float) -> Decision[bool]:
        plan = view.get(key)
        if plan is None or not plan.is_expired(now):
            return Decision([], False)
        return Decision([Delete(key), context.audit(view, now, "gc_plan_expired", plan=plan_id)], True)

    return context.store.transact([key, context.trail.stream], decide).result


def _store(context: RepositoryContext, plan: GcPlan) -> None:
    key = PLANS.key(plan.plan_id)

    def decide(view: View, now: float) -> Decision[None]:
        facts = {"plan": plan.plan_id, "snapshots": len(plan.snapshots), "bytes": plan.bytes}
        return Decision([Create(key, plan), context.audit(view, now, "gc_planned", **facts)], None)

    context.store.transact([key, context.trail.stream], decide)
