"""Garbage collection: runs a plan, and checks it again before anything is deleted.

`docs/protocols/gc.md` has the same numbers.

1. Check the plan: it has not expired, the policy is the same, nothing in it is protected.
2. *Mark* every snapshot of the plan for deletion, in its descriptor: from then on, nothing new can refer to it. A
   process that begins to need a snapshot records that first and checks for the mark afterwards; the
   collector marks first and checks afterwards. One of the two sees the other.
3. Check again. If something is protected after all, unmark everything and give up.
4. The plan becomes decided. **Commit point**: a run killed before this step is undone, one killed later is completed.
5. In batches: retire the trees; then one transaction deletes the descriptors, attaches their children
   to the nearest ancestor that stays, and appends to the audit trail. No history ever has a gap.
6. Sweep: remove from all retired trees what no other tree needs, and from a content store what nothing needs.
7. The plan becomes finished.

One collection runs at a time, under a kernel lock that ends with its process. If it is killed, the next `gc plan` or
`gc run` of any plan finishes or undoes it; so does `doctor --fix`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Failure, LockConflict, PlanMismatch, Refused
from holdfast.fs.directory import make_directories
from holdfast.locks.file_lock import FileLocker
from holdfast.repository import gc_plan
from holdfast.repository.context import DESCRIPTORS, MAIN, PINS, Descriptor, Pin, RepositoryContext
from holdfast.repository.gc_plan import Proposal, find_roots, plan_of, plans, policy_of
from holdfast.repository.retention import PLANS, GcPlan, PlanState, Policy, retain
from holdfast.store.model import Change, Decision, Delete, Key, Replace, View

BATCH = 32  # how many snapshots one transaction marks or deletes

Progress = Callable[[int, int], None]  # called with the number of deleted snapshots, and of all to delete


class Collected(NamedTuple):
    """The result of a run. `snapshots` excludes those that an earlier run of the plan deleted."""

    plan: GcPlan
    snapshots: tuple[str, ...]


def check(context: RepositoryContext, plan_id: str) -> GcPlan:
    """The plan, if it can be run as it is; else raises `PlanMismatch`. Changes nothing."""
    plan = plan_of(context, plan_id)
    if plan.state is PlanState.PROPOSED:
        _check_again(context, plan)
        context.home.check_collectable(plan.snapshots)
    return plan


def run(context: RepositoryContext, plan_id: str, *, progress: Progress | None = None) -> Collected:
    """Delete the snapshots of a plan, or raise `PlanMismatch` and delete none. Works on a full disk."""
    collected = context.paths.reserve.relieve(lambda: _run(context, plan_id, progress))
    context.paths.reserve.refill()
    return collected


def _run(context: RepositoryContext, plan_id: str, progress: Progress | None) -> Collected:
    context.prove_site()
    with collector_locked(context):
        plan = plan_of(context, plan_id)
        if plan.state is PlanState.FINISHED:
            return Collected(plan, ())
        end_dead_runs(context, but=plan_id)
        if plan.state is PlanState.PROPOSED:
            try:
                _check_again(context, plan)  # 1
                context.home.check_collectable(plan.snapshots)  # unless all needs are known, nothing may be deleted
                _mark(context, plan)  # 2
                _check_again(context, plan)  # 3
            except BaseException:  # also an interruption or a full disk; if this fails, the doctor undoes the marks
                with contextlib.suppress(Failure):
                    _unmark(context, plan.plan_id, plan.snapshots)
                raise
            plan = _set_state(context, plan, PlanState.DECIDED, "gc_decided")  # 4
        return _finish(context, plan, progress)


def _finish(context: RepositoryContext, plan: GcPlan, progress: Progress | None = None) -> Collected:
    """Steps 5 to 7: carry out a decided plan."""
    deleted = _delete_all(context, plan, progress)  # 5
    with contextlib.suppress(Refused):  # only people can remove a mount in a retired tree
        context.home.sweep(context)  # 6
    if context.home.contents is not None:
        from holdfast.repository.content_sweep import sweep

        sweep(context.home.contents)
    return Collected(_set_state(context, plan, PlanState.FINISHED, "gc_finished"), deleted)  # 7


@contextlib.contextmanager
def collector_locked(context: RepositoryContext) -> Iterator[None]:
    """Hold the collector's lock for the block. It does not reach other clones, so all collections run in the clone
    `main`."""
    if context.paths.main != MAIN:
        message = f"several clones share this repository, and garbage is collected in the clone {MAIN}"
        raise Refused(message, hint=f"Run it in the clone {MAIN}.", clone=context.paths.main)
    with trees_locked(context):
        yield


@contextlib.contextmanager
def trees_locked(context: RepositoryContext) -> Iterator[None]:
    """Hold the lock of the trees here for the block; never waits. A collection holds it too."""
    make_directories(context.paths.guards)
    lock = FileLocker(follow_links=False).try_lock_exclusive(context.paths.guards / "collector.lock")
    if lock is None:
        raise LockConflict("another collection is running", hint="Wait until it has finished, then make a new plan.")
    with lock:
        yield


def open_runs(context: RepositoryContext) -> dict[str, list[str]]:
    """The snapshots marked by each unfinished run, by plan; empty if a decided run has already deleted them all."""
    found: dict[str, list[str]] = {each.plan_id: [] for each in plans(context) if each.state is PlanState.DECIDED}
    for name, document in context.store.scan(DESCRIPTORS):
        if document.record.doomed_by is not None:
            found.setdefault(document.record.doomed_by, []).append(name)
    return found


def end_dead_runs(context: RepositoryContext, *, but: str | None = None) -> None:
    """Finish the decided runs of dead processes, and undo the others, except that of the plan `but`. The caller holds
    the collector's lock, so no other run is alive."""
    for plan_id, marked in open_runs(context).items():
        document = context.store.read(PLANS.key(plan_id))
        if plan_id == but:
            continue
        if document is not None and document.record.state is PlanState.DECIDED:
            _finish(context, document.record)
        else:
            _unmark(context, plan_id, marked)


def _check_again(context: RepositoryContext, plan: GcPlan) -> None:
    """Steps 1 and 3: raise unless everything in the plan may be deleted now."""
    now = context.store.now()
    if plan.is_expired(now):
        raise PlanMismatch(f"the plan {plan.plan_id} expired at {plan.expires_at}", plan=plan.plan_id)
    if policy_of(context) != plan.policy:
        raise PlanMismatch(
            f"the retention policy has changed since the plan {plan.plan_id} was made", plan=plan.plan_id
        )
    roots = find_roots(context)
    protected = retain(roots, plan.policy, now, plan_id=plan.plan_id).protected
    changed = [
        {"snapshot_id": each, "why": [reason.text for reason in protected[each]]}
        for each in plan.snapshots
        if each in protected
    ]
    gone = [each for each in plan.snapshots if each not in roots.descriptors]
    changed += [{"snapshot_id": each, "why": ["it is gone"]} for each in gone]
    if changed:
        first = changed[0]
        raise PlanMismatch(
            f"the plan {plan.plan_id} is out of date: {len(changed)} of {len(plan.snapshots)} "
            f"snapshots changed, such as {first['snapshot_id']}: {'; '.join(first['why'])}",
            plan=plan.plan_id,
            changed=changed,
        )


def _mark(context: RepositoryContext, plan: GcPlan) -> None:
    """Step 2."""
    for ids in _batches(plan.snapshots):
        keys = [DESCRIPTORS.key(each) for each in ids]

        def decide(view: View, now: float, keys: Sequence[Key[Descriptor]] = keys) -> Decision[None]:
            changes: list[Change] = []
            for key in keys:
                descriptor = view.get(key)
                if descriptor is None or descriptor.doomed_by not in (None, plan.plan_id):
                    raise PlanMismatch(f"the plan {plan.plan_id} is out of date", plan=plan.plan_id)
                if descriptor.doomed_by is None:
                    changes.append(Replace(key, msgspec.structs.replace(descriptor, doomed_by=plan.plan_id)))
            return Decision(changes, None)

        context.store.transact(keys, decide)


def _unmark(context: RepositoryContext, plan_id: str, snapshot_ids: Sequence[str]) -> None:
    """Undo step 2, for the snapshots that this plan has marked."""
    for ids in _batches(snapshot_ids):
        keys = [DESCRIPTORS.key(each) for each in ids]

        def decide(view: View, now: float, keys: Sequence[Key[Descriptor]] = keys) -> Decision[None]:
            found = [(key, each) for key in keys if (each := view.get(key)) is not None]
            marked = [(key, each) for key, each in found if each.doomed_by == plan_id]
            if not marked:
                return Decision([], None)
            unmarked = [Replace(key, msgspec.structs.replace(each, doomed_by=None)) for key, each in marked]
            facts = {"plan": plan_id, "snapshot_ids": [each.snapshot_id for _, each in marked]}
            return Decision([*unmarked, context.audit(view, now, "gc_called_off", **facts)], None)

        context.store.transact([*keys, context.trail.stream], decide)


def _set_state(context: RepositoryContext, plan: GcPlan, state: PlanState, event: str) -> GcPlan:
    """Steps 4 and 7."""
    key = PLANS.key(plan.plan_id)
    changed = msgspec.structs.replace(plan, state=state)

    def decide(view: View, now: float) -> Decision[GcPlan]:
        facts = {"plan": plan.plan_id, "snapshots": len(plan.snapshots), "bytes": plan.bytes}
        return Decision([Replace(key, changed), context.audit(view, now, event, **facts)], changed)

    return context.store.transact([key, context.trail.stream], decide).result


def _delete_all(context: RepositoryContext, plan: GcPlan, progress: Progress | None) -> tuple[str, ...]:
    """Step 5, for the snapshots that still exist."""
    descriptors = {name: found.record for name, found in context.store.scan(DESCRIPTORS)}
    left = [each for each in plan.snapshots if each in descriptors and descriptors[each].doomed_by == plan.plan_id]
    children: dict[str, list[str]] = {}
    for each in descriptors.values():
        if each.parent_id is not None:
            children.setdefault(each.parent_id, []).append(each.snapshot_id)
    pins = [found.record for _, found in context.store.scan(PINS)]  # expired; a marked snapshot gets no new one
    done = 0
    for ids in _batches(left):
        context.home.retire(context, ids)  # durably: then their descriptors may be deleted
        expired = [PINS.key(each.pin_id) for each in pins if each.snapshot_id in ids]
        _delete(context, plan, ids, [child for each in ids for child in children.get(each, ())], expired)
        done += len(ids)
        if progress is not None:
            progress(done, len(left))
    return tuple(left)


def _delete(
    context: RepositoryContext, plan: GcPlan, ids: Sequence[str], children: Sequence[str], pins: Sequence[Key[Pin]]
) -> None:
    keys: list[Key[Descriptor]] = [DESCRIPTORS.key(each) for each in dict.fromkeys([*ids, *children])]
    named: list[Any] = [*keys, *pins, context.trail.stream]

    def decide(view: View, now: float) -> Decision[None]:
        found = {each.snapshot_id: each for key in keys if (each := view.get(key)) is not None}
        going = {each: found[each] for each in ids if each in found}
        if not going:
            return Decision([], None)
        changes: list[Change] = [Delete(DESCRIPTORS.key(each)) for each in going]
        changes += [Delete(key) for key in pins if view.get(key) is not None]
        for each in found.values():
            if each.snapshot_id not in going and each.parent_id in going:
                attached = msgspec.structs.replace(each, parent_id=staying_ancestor(each, going))
                changes.append(Replace(DESCRIPTORS.key(each.snapshot_id), attached))
        facts = {"plan": plan.plan_id, "snapshot_ids": list(going)}
        return Decision([*changes, context.audit(view, now, "snapshots_collected", **facts)], None)

    context.store.transact(named, decide)


def staying_ancestor(descriptor: Descriptor, going: Mapping[str, Descriptor]) -> str | None:
    """The nearest ancestor of a snapshot that is not in `going`. Pure."""
    parent, seen = descriptor.parent_id, set[str]()
    while parent is not None and parent in going and parent not in seen:
        seen.add(parent)
        parent = going[parent].parent_id
    return None if parent in seen else parent


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + BATCH] for start in range(0, len(ids), BATCH))


class GarbageCollector:
    """Garbage collection of one repository."""

    def __init__(self, context: RepositoryContext) -> None:
        self._context = context

    @property
    def policy(self) -> Policy:
        """The retention policy as of now."""
        return gc_plan.policy_of(self._context)

    def set_policy(self, policy: Policy) -> Policy:
        """Replace the retention policy; it applies to the next plan."""
        return gc_plan.set_policy(self._context, policy)

    def plan(self, *, store: bool = True) -> Proposal:
        """Plan a collection. With `store`, save the plan so that it can be run; before that, finish the run of a dead
        process if it was decided, else undo it."""
        if store and open_runs(self._context):
            with contextlib.suppress(LockConflict), collector_locked(self._context):  # else a run is alive
                self._context.paths.reserve.relieve(lambda: end_dead_runs(self._context))
        return gc_plan.propose(self._context, store=store)

    def check(self, plan_id: str) -> GcPlan:
        """The plan, if it can be run as it is; else raises `PlanMismatch`."""
        return check(self._context, plan_id)

    def run(self, plan_id: str, *, progress: Progress | None = None) -> Collected:
        """Delete the snapshots of a plan, or raise `PlanMismatch` and delete none."""
        return run(self._context, plan_id, progress=progress)
