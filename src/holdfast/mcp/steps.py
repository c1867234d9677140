"""The steps that the tools carry out. Each is one use of the layers below, in a worker thread.

What they return is what the command of the same purpose prints with `--json`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from holdfast.clock import parse_duration
from holdfast.errors import FencingMismatch, LockConflict, LockExpired, LockNotHeld, UsageFailure
from holdfast.issues.claiming import Claimed
from holdfast.issues.creating import NewIssue
from holdfast.issues.records import Priority
from holdfast.leases.desk import DEFAULT_TTL
from holdfast.leases.held import HeldLease
from holdfast.leases.records import Lease
from holdfast.mcp import arguments
from holdfast.mcp.calls import Call
from holdfast.mcp.held import Place, Work
from holdfast.workspace.assignments import Wish, Workshop, take
from holdfast.workspace.overview import look_around
from holdfast.workspace.plain import events, issues, snapshots
from holdfast.workspace.plain.leases import lease_record
from holdfast.workspace.repository import Repository
from holdfast.worktrees.proof import Proof, proof_of
from holdfast.worktrees.records import DESCRIPTORS, Consistency, Isolation
from holdfast.worktrees.restoring import InPlace, checked
from holdfast.worktrees.snapshots import Wanted

Plain = dict[str, Any]

OWN_TTL = 20.0
"""How long a lease lasts that is taken for the duration of one step; it is renewed until that ends."""


def who(call: Call, given: arguments.Who) -> Plain:
    return look_around(call.project.root, repo_locks=call.project.repo_locks()).as_record()


# --- Leases -----------------------------------------------------------------------------------------


def take_lease(call: Call, given: arguments.TakeLease) -> Plain:
    repository = call.project.repository()
    place = Place(repository.root, call.project.worktree(repository, given.worktree))
    ttl = None if given.ttl is None else parse_duration(given.ttl, setting="ttl")
    wait = parse_duration(given.wait, setting="wait")
    if (lease := _renewed(call, place, ttl)) is not None:
        return lease_record(lease)
    try:
        held = repository.lease(
            place.worktree,
            ttl=DEFAULT_TTL if ttl is None else ttl,
            wait=wait,
            purpose=call.purpose(given.purpose),
            priority=given.priority,
            cancelled=call.cancelled,
        )
    except LockConflict:
        if (lease := _renewed(call, place, ttl)) is not None:  # another request of this client was faster
            return lease_record(lease)
        raise
    call.held.keep_lease(place, held)
    call.undo = partial(_given_back, call, place)
    return lease_record(held.lease)


def release_lease(call: Call, given: arguments.ReleaseLease) -> Plain:
    repository = call.project.repository()
    place = Place(repository.root, call.project.worktree(repository, given.worktree))
    return lease_record(_given_back(call, place))


def _renewed(call: Call, place: Place, ttl: float | None) -> Lease | None:
    """The lease that this client has on the worktree, running on from now; None if it has none."""
    held = call.held.lease(place)
    if held is None:
        return None
    with contextlib.suppress(LockNotHeld, LockExpired):
        return held.renew(ttl)
    with contextlib.suppress(LockNotHeld):
        call.held.drop_lease(place).release()  # it was lost: there is another one to be had
    return None


def _given_back(call: Call, place: Place) -> Lease:
    held = call.held.drop_lease(place)
    try:
        held.check()
    finally:
        held.release()
    return held.lease


@contextlib.contextmanager
def _proven(
    call: Call, repository: Repository, place: Place, lock_id: str | None, purpose: str
) -> Iterator[Proof | None]:
    """By which right a step publishes: the lease that is held or named, or one for its own duration."""
    if repository.control.config(place.worktree).isolation is Isolation.SHARED:
        yield None
        return
    if lock_id is not None:
        yield proof_of(repository.control, place.worktree, lock_id)
        return
    held = call.held.lease(place)
    if held is not None:
        held.check()
        yield Proof(held.lock_id, held.token)
        return
    try:
        own = repository.lease(place.worktree, ttl=OWN_TTL, purpose=call.purpose(purpose))
    except LockConflict as conflict:
        hint = "Wait for the holder with take_lease, or work in a worktree of your own."
        raise LockConflict(conflict.message, hint=hint, **conflict.facts) from None
    with own:
        yield _proof(own)


def _proof(lease: HeldLease) -> Proof:
    return Proof(lease.lock_id, lease.token)


# --- Snapshots --------------------------------------------------------------------------------------


def snapshot(call: Call, given: arguments.Snapshot) -> Plain:
    repository = call.project.repository()
    place = Place(repository.root, call.project.worktree(repository, given.worktree))
    head = repository.control.config(place.worktree).head_snapshot_id
    known = repository.control.store.read(DESCRIPTORS.key(head)) if head else None
    call.total = known.record.files if known else None
    wanted = Wanted(
        note=given.note,
        tag=given.tag,
        consistency=Consistency(given.consistency) if given.consistency else None,
        progress=call.progress,
    )
    with _proven(call, repository, place, given.lock_id, "snapshot") as proof:
        call.check()
        made = repository.snapshots.take(place.worktree, proof, wanted)
    return snapshots.taken_record(made, given.tag)


def history(call: Call, given: arguments.History) -> Plain:
    repository = call.project.repository()
    if given.all_worktrees:
        return snapshots.history_record(repository.snapshots.everything(limit=given.limit), None)
    worktree = call.project.worktree(repository, given.worktree)
    return snapshots.history_record(repository.snapshots.line(worktree, limit=given.limit), worktree)


def restore(call: Call, given: arguments.Restore) -> Plain:
    repository = call.project.repository()
    worktree = call.project.worktree(repository, given.worktree)
    if given.in_place and given.into:
        raise UsageFailure("into is for a new worktree, not for in_place", hint="Leave one of them out.")
    if not given.in_place and (given.path or given.reason):
        raise UsageFailure(
            f"{'path' if given.path else 'reason'} is for in_place", hint="Set in_place too, or leave it out."
        )
    found = repository.snapshots.named(given.snapshot, seen_from=worktree)
    call.total = found.files
    if given.in_place:
        return _restore_in_place(call, given, repository, Place(repository.root, worktree), found.snapshot_id)
    return _restore_into_new(repository, found.snapshot_id, given)


def _restore_into_new(repository: Repository, snapshot_id: str, given: arguments.Restore) -> Plain:
    if given.dry_run:
        name = given.into or next(repository.snapshots.free_names(snapshot_id))
    else:
        name = repository.snapshots.restore(snapshot_id, given.into).worktree_id
    path = repository.control.places.payload(name)
    return snapshots.restored_record(name, path, snapshot_id, dry_run=given.dry_run)


def _restore_in_place(
    call: Call, given: arguments.Restore, repository: Repository, place: Place, snapshot_id: str
) -> Plain:
    path = given.path.rstrip("/") if given.path else None
    how = InPlace(reason=given.reason, path=path, progress=call.progress)
    if given.dry_run:
        plan = repository.snapshots.plan(place.worktree, snapshot_id, how)
        return snapshots.plan_record(place.worktree, how, plan)
    checked(repository.control, place.worktree, how)  # before anybody's lease is asked for
    purpose = f"restore {snapshot_id} in place"
    with _proven(call, repository, place, given.lock_id, purpose) as proof:
        call.check()
        restored = repository.snapshots.restore_in_place(place.worktree, snapshot_id, proof, how)
    return snapshots.restored_in_place_record(place.worktree, how, restored)


# --- Work -------------------------------------------------------------------------------------------


def claim_next_work(call: Call, given: arguments.ClaimNextWork) -> Plain:
    project = call.project
    repository = project.repository()
    workshop = Workshop(repository, project.tracker(call.actor), project.ledger_if_any())
    wish = Wish(
        issue_id=given.issue,
        worktree=given.worktree,
        assignee=call.actor,
        gate=given.gate,
        ttl=parse_duration(given.ttl, setting="ttl"),
        wait=parse_duration(given.wait, setting="wait"),
        by=call.client,
        cancelled=call.cancelled,
    )
    with contextlib.ExitStack() as end:
        assignment = end.enter_context(take(workshop, wish))
        work = Work(Place(repository.root, assignment.lease.worktree), assignment, end.pop_all())
    call.held.keep_work(work)
    call.undo = partial(_dropped, call, assignment.issue.id)
    claimed = Claimed(assignment.issue, assignment.claim.claim, assignment.taken_over_from)
    return {
        **issues.claimed_record(claimed),
        "description": assignment.issue.description,
        "worktree_id": assignment.lease.worktree,
        "path": str(assignment.path),
        "lock_id": assignment.lease.lock_id,
        "fencing_token": assignment.lease.token,
    }


def _dropped(call: Call, issue: str) -> None:
    call.held.take_work(issue).end.close()


def finish_work(call: Call, given: arguments.FinishWork) -> Plain:
    work = call.held.take_work(given.issue)
    assignment = work.assignment
    try:
        if given.outcome == "done":
            outcome = assignment.succeed()
        elif given.outcome == "failed":
            outcome = assignment.fail(given.reason or "it was given up")
        else:
            outcome = assignment.put_back(given.reason or "was given back")
    except (LockNotHeld, LockExpired, FencingMismatch):
        work.end.close()  # it is not ours any more
        raise
    except BaseException:
        call.held.keep_work(work)  # still ours: it can be tried again, or given up
        raise
    work.end.close()
    return issues.outcome_record(outcome, assignment)


def add_work(call: Call, given: arguments.AddWork) -> Plain:
    tracker = call.project.tracker(call.actor)
    new = NewIssue(
        title=given.title,
        description=given.description,
        priority=Priority(given.priority),
        depends_on=tuple(map(tracker.find_id, given.depends_on)),
        labels=tuple(given.labels),
    )
    [created] = tracker.create_all([new])
    return issues.created_record(created)


def append_to_ledger(call: Call, given: arguments.AppendToLedger) -> Plain:
    ledger = call.project.ledger()
    if given.if_sequence is None:
        return events.as_record(ledger.append(given.event))
    return events.as_record(ledger.append_if_sequence(given.event, given.if_sequence))
