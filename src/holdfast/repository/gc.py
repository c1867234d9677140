"""Garbage collection: a plan that somebody has read is run; it looks again before anything is deleted.

`docs/protocols/gc.md` has the same numbers.

1. The plan is checked: it is not too old, the policy is the same, nothing in it is protected by now.
2. Every snapshot of the plan is *doomed*: its descriptor says so, and from then on nothing new can
   refer to it. Whoever begins to need a snapshot writes that down first and looks whether it is
   doomed afterwards; we doom first and look afterwards. One of the two sees the other.
3. A second look. If something is protected after all, everything is let go again, and the plan is off.
4. The plan is marked as decided. **Commit point**: before it a run is undone, after it finished.
5. For some at a time: the trees are moved to the remnants; then one transaction deletes the
   descriptors, links their children to the next ancestor that stays, and appends to the audit trail.
   A line of history has no gap at any moment.
6. Of all remnants, what no other tree needs is removed.
7. The plan is marked as finished.

One collection runs at a time, under a kernel lock that ends with its process. Killed anywhere, it goes
on where it was when the same plan is run again; `doctor --fix` ends it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Failure, LockConflict, PlanMismatch, Refused
from holdfast.fs.directory import make_directories
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import DESCRIPTORS, Descriptor, RepositoryContext
from holdfast.repository.gc_plan import plan_of, policy_of, survey
from holdfast.repository.gc_sweep import need_of_all, retire, sweep
from holdfast.repository.retention import PLANS, GcPlan, PlanState, judge
from holdfast.store.model import Change, Decision, Delete, Key, Replace, View

BATCH = 32
"""How many snapshots one transaction dooms or deletes."""

Progress = Callable[[int, int], None]
"""Is told how many snapshots are deleted, and of how many."""


class Collected(NamedTuple):
    """What a run has done. `snapshots` are those that this run deleted, not an earlier one of the plan."""

    plan: GcPlan
    snapshots: tuple[str, ...]


def check(control: RepositoryContext, plan_id: str) -> GcPlan:
    """Whether a plan can be run as it is; `PlanMismatch` says what stands against it. Changes nothing."""
    plan = plan_of(control, plan_id)
    if plan.state is PlanState.PROPOSED:
        _still_right(control, plan)
        need_of_all(control.places, but=plan.snapshots)
    return plan


def run(control: RepositoryContext, plan_id: str, *, progress: Progress | None = None) -> Collected:
    """Delete what a plan says, or raise `PlanMismatch` and delete nothing of it. Also on a full disk."""
    collected = control.places.reserve.relieve(lambda: _run(control, plan_id, progress))
    control.places.reserve.refill()
    return collected


def _run(control: RepositoryContext, plan_id: str, progress: Progress | None) -> Collected:
    with collector_locked(control):
        plan = plan_of(control, plan_id)
        if plan.state is PlanState.FINISHED:
            return Collected(plan, ())
        if plan.state is PlanState.PROPOSED:
            try:
                _still_right(control, plan)  # 1
                need_of_all(control.places, but=plan.snapshots)  # if one cannot say, nothing may go
                _doom(control, plan)  # 2
                _still_right(control, plan)  # 3
            except (
                BaseException
            ):  # a mismatch, an interruption, a full disk: what we cannot undo, others will
                with contextlib.suppress(Failure):
                    _call_off(control, plan.plan_id, plan.snapshots)
                raise
            plan = _mark(control, plan, PlanState.DECIDED, "gc_decided")  # 4
        deleted = _delete_all(control, plan, progress)  # 5
        _sweep(control)  # 6
        return Collected(_mark(control, plan, PlanState.FINISHED, "gc_finished"), deleted)  # 7


@contextlib.contextmanager
def collector_locked(control: RepositoryContext) -> Iterator[None]:
    """Be the only one who collects, for the block; never waits."""
    make_directories(control.places.guards)
    guard = FileLocker().try_lock_exclusive(control.places.guards / "collector.lock")
    if guard is None:
        raise LockConflict(
            "another collection is running", hint="Wait until it is done, and look at a new plan then."
        )
    with guard:
        yield


def end_dead_run(control: RepositoryContext, plan_id: str) -> None:
    """Bring a plan whose process is gone to its end: finish it if it was decided, else call it off.

    `LockConflict` if a collection is running.
    """
    with collector_locked(control):
        document = control.store.read(PLANS.key(plan_id))
        if document is not None and document.record.state is PlanState.DECIDED:
            _delete_all(control, document.record, None)
            _sweep(control)
            _mark(control, document.record, PlanState.FINISHED, "gc_finished")
            return
        doomed = tuple(
            name for name, found in control.store.scan(DESCRIPTORS) if found.record.doomed_by == plan_id
        )
        _call_off(control, plan_id, doomed)


# --- The steps --------------------------------------------------------------------------------------


def _still_right(control: RepositoryContext, plan: GcPlan) -> None:
    """Steps 1 and 3: raise unless all that the plan deletes may be deleted now."""
    now = control.store.now()
    if plan.is_expired(now):
        raise PlanMismatch(f"the plan {plan.plan_id} expired at {plan.expires_at}", plan=plan.plan_id)
    if policy_of(control) != plan.policy:
        raise PlanMismatch(
            f"the policy of retention is another one than when {plan.plan_id} was made", plan=plan.plan_id
        )
    standing = survey(control)
    verdict = judge(standing, plan.policy, now, plan_id=plan.plan_id)
    changed = [
        {"snapshot_id": each, "why": [reason.text for reason in verdict.protected[each]]}
        for each in plan.snapshots
        if each in verdict.protected
    ]
    changed += [
        {"snapshot_id": each, "why": ["it is gone"]}
        for each in plan.snapshots
        if each not in standing.descriptors
    ]
    if changed:
        first = changed[0]
        raise PlanMismatch(
            f"the plan {plan.plan_id} does not fit any more: {len(changed)} of {len(plan.snapshots)} "
            f"snapshots changed, such as {first['snapshot_id']}: {'; '.join(first['why'])}",
            plan=plan.plan_id,
            changed=changed,
        )


def _doom(control: RepositoryContext, plan: GcPlan) -> None:
    """Step 2."""
    for ids in batches(plan.snapshots):
        keys = [DESCRIPTORS.key(each) for each in ids]

        def decide(view: View, now: float, keys: Sequence[Key[Descriptor]] = keys) -> Decision[None]:
            changes: list[Change] = []
            for key in keys:
                descriptor = view.get(key)
                if descriptor is None or descriptor.doomed_by not in (None, plan.plan_id):
                    raise PlanMismatch(f"the plan {plan.plan_id} does not fit any more", plan=plan.plan_id)
                if descriptor.doomed_by is None:
                    changes.append(Replace(key, msgspec.structs.replace(descriptor, doomed_by=plan.plan_id)))
            return Decision(changes, None)

        control.store.transact(keys, decide)


def _call_off(control: RepositoryContext, plan_id: str, snapshot_ids: Sequence[str]) -> None:
    """The reverse of 2, for those that are doomed by this plan."""
    for ids in batches(snapshot_ids):
        keys = [DESCRIPTORS.key(each) for each in ids]

        def decide(view: View, now: float, keys: Sequence[Key[Descriptor]] = keys) -> Decision[None]:
            found = [(key, each) for key in keys if (each := view.get(key)) is not None]
            doomed = [(key, each) for key, each in found if each.doomed_by == plan_id]
            if not doomed:
                return Decision([], None)
            let_go = [Replace(key, msgspec.structs.replace(each, doomed_by=None)) for key, each in doomed]
            facts = {"plan": plan_id, "snapshot_ids": [each.snapshot_id for _, each in doomed]}
            return Decision([*let_go, control.audit(view, now, "gc_called_off", **facts)], None)

        control.store.transact([*keys, control.trail.stream], decide)


def _mark(control: RepositoryContext, plan: GcPlan, state: PlanState, event: str) -> GcPlan:
    """Steps 4 and 7."""
    key = PLANS.key(plan.plan_id)
    marked = msgspec.structs.replace(plan, state=state)

    def decide(view: View, now: float) -> Decision[GcPlan]:
        facts = {"plan": plan.plan_id, "snapshots": len(plan.snapshots), "bytes": plan.bytes}
        return Decision([Replace(key, marked), control.audit(view, now, event, **facts)], marked)

    return control.store.transact([key, control.trail.stream], decide).result


def _delete_all(control: RepositoryContext, plan: GcPlan, progress: Progress | None) -> tuple[str, ...]:
    """Step 5, for what is still there."""
    descriptors = {name: found.record for name, found in control.store.scan(DESCRIPTORS)}
    left = [
        each for each in plan.snapshots if each in descriptors and descriptors[each].doomed_by == plan.plan_id
    ]
    children: dict[str, list[str]] = {}
    for each in descriptors.values():
        if each.parent_id is not None:
            children.setdefault(each.parent_id, []).append(each.snapshot_id)
    done = 0
    for ids in batches(left):
        retire(control, ids)  # durably: then their descriptors may go
        _delete(control, plan, ids, [child for each in ids for child in children.get(each, ())])
        done += len(ids)
        if progress is not None:
            progress(done, len(left))
    return tuple(left)


def _sweep(control: RepositoryContext) -> None:
    """Step 6. A remnant in which something is mounted stays: that is for people to see to."""
    with contextlib.suppress(Refused):
        sweep(control)


def _delete(control: RepositoryContext, plan: GcPlan, ids: Sequence[str], children: Sequence[str]) -> None:
    keys: list[Key[Descriptor]] = [DESCRIPTORS.key(each) for each in dict.fromkeys([*ids, *children])]
    named: list[Any] = [*keys, control.trail.stream]

    def decide(view: View, now: float) -> Decision[None]:
        there = {each.snapshot_id: each for key in keys if (each := view.get(key)) is not None}
        going = {each: there[each] for each in ids if each in there}
        if not going:
            return Decision([], None)
        changes: list[Change] = [Delete(DESCRIPTORS.key(each)) for each in going]
        for each in there.values():
            if each.snapshot_id not in going and each.parent_id in going:
                relinked = msgspec.structs.replace(each, parent_id=staying_ancestor(each, going))
                changes.append(Replace(DESCRIPTORS.key(each.snapshot_id), relinked))
        facts = {"plan": plan.plan_id, "snapshot_ids": list(going)}
        return Decision([*changes, control.audit(view, now, "snapshots_collected", **facts)], None)

    control.store.transact(named, decide)


def staying_ancestor(descriptor: Descriptor, going: Mapping[str, Descriptor]) -> str | None:
    """The nearest ancestor of a snapshot that is not among those that go. Pure."""
    parent, seen = descriptor.parent_id, set[str]()
    while parent is not None and parent in going and parent not in seen:
        seen.add(parent)
        parent = going[parent].parent_id
    return None if parent in seen else parent


def batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time as one transaction takes."""
    return (ids[start : start + BATCH] for start in range(0, len(ids), BATCH))
