"""Garbage collection: readable plans, runs that check them again, and histories without gaps."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from random import Random
from typing import NoReturn

import msgspec
import pytest

from holdfast.clock import format_instant
from holdfast.errors import (
    AlreadyExists,
    LockConflict,
    NotFound,
    PlanMismatch,
    Refused,
    SettingInvalid,
    UsageFailure,
)
from holdfast.repository import gc, gc_plan, payloads, worktree_changes
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    Operation,
    OperationKind,
    RepositoryContext,
)
from holdfast.repository.gc_plan import find_roots
from holdfast.repository.history import (
    add_pin,
    create_reference,
    delete_reference,
    pins,
    references,
    remove_pin,
)
from holdfast.repository.repository import Repository
from holdfast.repository.retention import PLANS, RETENTION, GcPlan, PlanState, Policy, Protection
from holdfast.store.audit import check_chain
from holdfast.store.model import Create, Decision, Replace, View
from tests.repository.kept import (
    fingerprint,
    keep,
    line_of,
    parents_of,
    require_whole,
    snapshots_of,
    trees_of,
)
from tests.repository.repositories import add_worktree
from tests.support.homes import make_repository

pytestmark = pytest.mark.both_homes


@pytest.fixture
def context(scratch: Path) -> RepositoryContext:
    return make_repository(scratch / "repository").context


def head_of(context: RepositoryContext, worktree: str = MAIN) -> str | None:
    return context.config(worktree).head_snapshot_id


def doom(context: RepositoryContext, snapshot_id: str, plan_id: str | None) -> None:
    key = DESCRIPTORS.key(snapshot_id)

    def decide(view: View, now: float) -> Decision[None]:
        descriptor = view.get(key)
        assert descriptor is not None
        return Decision([Replace(key, msgspec.structs.replace(descriptor, doomed_by=plan_id))], None)

    context.store.transact([key], decide)


# --- Plans ------------------------------------------------------------------------------------------


def test_planning_writes_only_the_plan_and_a_dry_run_writes_nothing(context: RepositoryContext) -> None:
    line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    before = fingerprint(context.paths.root)
    dry = gc_plan.propose(context, store=False)
    assert fingerprint(context.paths.root) == before
    wet = gc_plan.propose(context)
    changed = {name for name, what in fingerprint(context.paths.root).items() if before.get(name) != what}
    new = {f".jvs/plans/{wet.plan.plan_id}.json", ".jvs/audit/audit.jsonl", ".jvs/audit/head.json", ".jvs/plans"}
    assert {name for name in changed if "guards" not in name and ".holdfast" not in name} == new
    assert dry.plan.snapshots == wet.plan.snapshots
    with pytest.raises(NotFound):
        gc.run(context, dry.plan.plan_id)


def test_a_plan_lists_deleted_and_kept_snapshots_with_reasons_and_the_freed_bytes(context: RepositoryContext) -> None:
    first, second, third = line_of(context, 3)
    create_reference(context, "v1", second)
    gc_plan.set_policy(context, Policy(keep_last=1))
    proposal = gc_plan.propose(context)
    assert proposal.plan.snapshots == (first,)
    assert proposal.candidates[0].why == "beyond the newest 1"
    assert [each.protection for each in proposal.protected[second]] == [Protection.REFERENCE]
    assert {each.protection for each in proposal.protected[third]} == {Protection.HEAD, Protection.KEEP_LAST}
    assert proposal.plan.bytes > 0


@pytest.mark.req("WT-11")
def test_the_snapshots_of_a_removed_worktree_stay_until_they_are_collected(
    context: RepositoryContext,
) -> None:
    (root,) = line_of(context, 1)
    add_worktree(context, "dev", head=root)
    pinned, named, loose = line_of(context, 3, worktree="dev")
    add_pin(context, pinned)
    create_reference(context, "named", named)
    assert gc_plan.propose(context).plan.snapshots == ()
    worktree_changes.remove(context, "dev", save=None, force=True, keep_for=0.0)
    assert {root, pinned, named, loose} == snapshots_of(context).keys()
    plan = gc_plan.propose(context).plan
    assert plan.snapshots == (loose,)
    gc.run(context, plan.plan_id)
    assert {root, pinned, named} == snapshots_of(context).keys() == trees_of(context)


def test_a_pin_that_has_expired_is_deleted_with_its_snapshot(context: RepositoryContext) -> None:
    (root,) = line_of(context, 1)
    add_worktree(context, "dev", head=root)
    (loose,) = line_of(context, 1, worktree="dev")
    removed = worktree_changes.remove(context, "dev", save=None, force=True, keep_for=1e-6)
    assert [each.pin_id for each in pins(context)] == [removed.pin.pin_id if removed.pin else None]
    plan = gc_plan.propose(context).plan
    assert plan.snapshots == (loose,)
    gc.run(context, plan.plan_id)
    assert pins(context) == []


def test_a_budget_deletes_the_oldest_snapshots_until_the_rest_fits(context: RepositoryContext) -> None:
    ids = [keep(context, {"file": "x" * 40_000 * number}) for number in range(1, 6)]
    gc_plan.set_policy(context, Policy(max_bytes=1 << 40))
    assert gc_plan.propose(context).plan.snapshots == ()
    total = gc_plan.propose(context).total_bytes
    gc_plan.set_policy(context, Policy(max_bytes=total - 1))
    proposal = gc_plan.propose(context)
    assert proposal.plan.snapshots == (ids[0],)
    assert proposal.over_budget == 0
    assert {each.protection for each in proposal.protected[ids[1]]} == {Protection.BUDGET}
    gc_plan.set_policy(context, Policy(max_bytes=0))
    proposal = gc_plan.propose(context)
    assert proposal.plan.snapshots == tuple(ids[:-1])
    assert proposal.over_budget > 0


def test_an_invalid_policy_is_refused_and_one_that_keeps_everything_is_not_stored(
    context: RepositoryContext,
) -> None:
    invalid = [Policy(keep_last=0), Policy(keep_for=0.0), Policy(keep_for=math.nan), Policy(max_bytes=-1)]
    for policy in invalid:
        with pytest.raises(SettingInvalid):
            gc_plan.set_policy(context, policy)
    assert context.store.read(RETENTION) is None
    assert gc_plan.set_policy(context, Policy(keep_last=3)) == gc_plan.policy_of(context)
    gc_plan.set_policy(context, Policy())
    assert context.store.read(RETENTION) is None


# --- Runs -------------------------------------------------------------------------------------------


def test_a_run_deletes_the_planned_snapshots_and_relinks_their_children(context: RepositoryContext) -> None:
    ids = line_of(context, 6)
    create_reference(context, "kept", ids[2])
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    assert set(plan.snapshots) == {ids[0], ids[1], ids[3], ids[4]}
    done = gc.run(context, plan.plan_id)
    assert set(done.snapshots) == set(plan.snapshots)
    assert done.plan.state is PlanState.FINISHED
    assert parents_of(context, ids[5]) == [ids[5], ids[2]]
    assert snapshots_of(context).keys() == trees_of(context) == {ids[2], ids[5]}
    assert list(context.paths.scratch.iterdir()) == []
    require_whole(context)
    events = [entry.record.event for entry in context.store.entries(context.trail.stream)]
    assert events[-3:] == ["gc_decided", "snapshots_collected", "gc_finished"]
    check_chain(context.store, context.trail)


def test_running_a_plan_again_does_nothing(context: RepositoryContext) -> None:
    line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    gc.run(context, plan.plan_id)
    before = fingerprint(context.paths.root)
    assert gc.run(context, plan.plan_id).snapshots == ()
    assert fingerprint(context.paths.root) == before


def test_many_snapshots_are_deleted_in_batches_that_leave_no_gap_in_the_history(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "BATCH", 3)
    ids = line_of(context, 11)
    gc_plan.set_policy(context, Policy(keep_last=2))
    seen: list[tuple[int, int]] = []
    plan = gc_plan.propose(context).plan
    gc.run(context, plan.plan_id, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(3, 9), (6, 9), (9, 9)]
    assert parents_of(context, ids[-1]) == [ids[10], ids[9]]


def test_freed_bytes_exclude_files_that_other_snapshots_share(context: RepositoryContext) -> None:
    keep(context, {"large": Random(1).randbytes(500_000).hex()})  # git compresses
    keep(context, {"small": "y"})
    gc_plan.set_policy(context, Policy(keep_last=1))
    assert gc_plan.propose(context).plan.bytes < 500_000  # the large file is in the head too


# --- Stale plans ------------------------------------------------------------------------------------


def refused_after(context: RepositoryContext, plan_id: str, *, untouched: set[str]) -> PlanMismatch:
    with pytest.raises(PlanMismatch) as caught:
        gc.check(context, plan_id)
    with pytest.raises(PlanMismatch) as caught:
        gc.run(context, plan_id)
    assert snapshots_of(context).keys() == trees_of(context) == untouched
    assert all(each.doomed_by is None for each in snapshots_of(context).values())
    return caught.value


def operate(context: RepositoryContext, snapshot_id: str) -> None:
    record = Operation(
        operation_id="0",
        kind=OperationKind.RESTORE,
        worktree_id=MAIN,
        begun_at=format_instant(1e9),
        holder_id="",
        snapshot_id=snapshot_id,
    )
    key = OPERATIONS.key(MAIN)
    context.store.transact([key], lambda view, now: Decision([Create(key, record)], None))


@pytest.mark.parametrize("how", ["reference", "pin", "head", "operation", "policy", "expired", "gone"])
def test_a_stale_plan_deletes_nothing(context: RepositoryContext, how: str) -> None:
    ids = line_of(context, 4)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    untouched = set(ids)
    if how == "reference":
        create_reference(context, "late", ids[1])
    elif how == "pin":
        add_pin(context, ids[1], reason="wait", keep_for=60.0)
    elif how == "head":
        add_worktree(context, "late", head=ids[1])
    elif how == "operation":
        operate(context, ids[1])
    elif how == "policy":
        gc_plan.set_policy(context, Policy(keep_last=2))
    elif how == "expired":
        key = PLANS.key(plan.plan_id)
        old = msgspec.structs.replace(plan, expires_at=format_instant(context.store.now() - 1))
        context.store.transact([key], lambda view, now: Decision([Replace(key, old)], None))
    else:
        other = gc_plan.propose(context).plan
        gc.run(context, other.plan_id)
        untouched = {ids[-1]}
    failure = refused_after(context, plan.plan_id, untouched=untouched)
    assert failure.code == "E_GC_PLAN_MISMATCH"
    if how in ("reference", "pin", "head", "operation"):
        assert [each["snapshot_id"] for each in failure.facts["changed"]] == [ids[1]]  # type: ignore[attr-defined]


def test_a_snapshot_that_a_running_process_uses_is_not_deleted(context: RepositoryContext) -> None:
    ids = line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    with payloads.scratch(context, "restore", uses=[ids[0]]):
        refused_after(context, plan.plan_id, untouched=set(ids))
    gc.run(context, plan.plan_id)
    assert snapshots_of(context).keys() == {ids[2]}


def test_a_snapshot_that_is_protected_between_the_two_checks_is_spared(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second check can see a process that wrote its intent just before the snapshot was doomed."""
    ids = line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    doom_all = gc._mark

    def late(context: RepositoryContext, plan: GcPlan) -> None:
        doom_all(context, plan)
        assert snapshots_of(context)[ids[0]].doomed_by == plan.plan_id
        add_worktree(context, "late", head=ids[0])

    monkeypatch.setattr(gc, "_mark", late)
    with pytest.raises(PlanMismatch):
        gc.run(context, plan.plan_id)
    assert snapshots_of(context).keys() == set(ids)
    assert all(each.doomed_by is None for each in snapshots_of(context).values())


def test_an_interruption_before_the_decision_spares_every_snapshot(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan

    def interrupted(context: RepositoryContext) -> object:
        if any(each.doomed_by for each in snapshots_of(context).values()):
            raise KeyboardInterrupt
        return find_roots(context)

    with monkeypatch.context() as patched:
        patched.setattr(gc, "find_roots", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gc.run(context, plan.plan_id)
    assert all(each.doomed_by is None for each in snapshots_of(context).values())
    gc.run(context, plan.plan_id)
    assert snapshots_of(context).keys() == {ids[-1]}


def test_a_doomed_snapshot_gets_no_new_reference_or_pin(context: RepositoryContext) -> None:
    (only,) = line_of(context, 1)
    doom(context, only, "some-plan")
    with pytest.raises(Refused):
        create_reference(context, "late", only)
    with pytest.raises(Refused):
        add_pin(context, only)
    assert references(context) == []
    assert pins(context) == []


def test_only_one_collection_runs_at_a_time(context: RepositoryContext) -> None:
    line_of(context, 2)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    with gc.collector_locked(context), pytest.raises(LockConflict):
        gc.run(context, plan.plan_id)
    gc.run(context, plan.plan_id)


def test_a_dead_run_that_was_not_decided_is_cancelled(context: RepositoryContext) -> None:
    ids = line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    doom(context, ids[0], plan.plan_id)
    with gc.collector_locked(context):
        gc.end_dead_runs(context)
    assert all(each.doomed_by is None for each in snapshots_of(context).values())
    gc.run(context, plan.plan_id)  # the plan itself is still valid
    assert snapshots_of(context).keys() == {ids[2]}


def killed_after(context: RepositoryContext, plan_id: str, step: str) -> None:
    """Run a plan until just after this step, as if it were killed there."""

    class Killed(BaseException):
        pass

    def end(*_: object) -> NoReturn:
        raise Killed

    ends_at = {"marked": ("_set_state", "_unmark"), "decided": ("_delete_all",), "deleted": ("sweep",)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ends_at[step]:
            patch.setattr(context.home if name == "sweep" else gc, name, end)
        with pytest.raises(Killed):
            gc.run(context, plan_id)


@pytest.mark.parametrize("step", ["marked", "decided", "deleted"])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_killed_run_is_ended_by_the_next_command(context: RepositoryContext, step: str, command: str) -> None:
    ids = line_of(context, 4)
    gc_plan.set_policy(context, Policy(keep_last=2))
    first, second = (gc_plan.propose(context).plan.plan_id for _ in range(2))
    killed_after(context, first, step)
    if command == "plan":
        proposal = gc.GarbageCollector(context).plan()
        assert bool(proposal.candidates) is (step == "marked")
    else:
        with contextlib.suppress(PlanMismatch):  # all of it is gone
            gc.run(context, second)
    assert gc.open_runs(context) == {}
    kept = ids if (step, command) == ("marked", "plan") else ids[2:]
    assert snapshots_of(context).keys() == set(kept)
    assert Repository(context.paths.root).examine() == []


def test_a_dry_run_leaves_a_killed_run_alone(context: RepositoryContext) -> None:
    line_of(context, 4)
    gc_plan.set_policy(context, Policy(keep_last=2))
    plan_id = gc_plan.propose(context).plan.plan_id
    killed_after(context, plan_id, "decided")
    before = fingerprint(context.paths.root)
    gc.GarbageCollector(context).plan(store=False)
    assert fingerprint(context.paths.root) == before


# --- References and pins ----------------------------------------------------------------------------


def test_a_reference_is_created_once_and_deleted_once(context: RepositoryContext) -> None:
    first, second = line_of(context, 2)
    create_reference(context, "v1", first, note="why")
    with pytest.raises(AlreadyExists):
        create_reference(context, "v1", second)
    with pytest.raises(NotFound):
        create_reference(context, "v2", "0" * 16)
    with pytest.raises(UsageFailure):
        create_reference(context, "head", second)
    (made,) = references(context)
    assert (made.name, made.snapshot_id, made.note) == ("v1", first, "why")
    assert delete_reference(context, "v1").snapshot_id == first
    with pytest.raises(NotFound):
        delete_reference(context, "v1")


def test_pins_are_listed_by_age_whatever_snapshots_they_protect(context: RepositoryContext) -> None:
    made = [add_pin(context, each) for each in sorted(line_of(context, 3), reverse=True)]
    assert pins(context) == made


def test_a_snapshot_can_have_several_independent_pins(context: RepositoryContext) -> None:
    (only,) = line_of(context, 1)
    mine, yours = add_pin(context, only, reason="mine"), add_pin(context, only, reason="yours")
    remove_pin(context, mine.pin_id)
    assert [each.reason for each in pins(context)] == ["yours"]
    with pytest.raises(NotFound):
        remove_pin(context, mine.pin_id)
    remove_pin(context, yours.pin_id)
    events = [entry.record.event for entry in context.store.entries(context.trail.stream)]
    assert events[-4:] == ["pin_added", "pin_added", "pin_removed", "pin_removed"]
