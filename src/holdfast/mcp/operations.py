"""The steps about leases, and the right by which other steps publish. They run in worker threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

from holdfast.clock import parse_duration
from holdfast.errors import FencingMismatch, LockConflict, LockExpired, LockNotHeld, LockTimeout, UsageFailure
from holdfast.issues import reading
from holdfast.issues.claims import Claimed
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import Priority
from holdfast.leases.rules import Lease
from holdfast.leases.service import DEFAULT_TTL, HeldLease
from holdfast.ledger import log
from holdfast.mcp import arguments
from holdfast.mcp.calls import Call, Plain
from holdfast.mcp.held import Work, WorktreeKey
from holdfast.repository import to_json
from holdfast.repository.agent import AssignmentOptions, outcome_to_json, take_work
from holdfast.repository.context import Consistency, Isolation, Proof
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.repository.restore import InPlace
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.repository.to_json import lease_to_json

OWN_TTL = 20.0
"""How long a lease lasts that is taken for the duration of one step; it is renewed until that ends."""


def take_lease(call: Call, given: arguments.TakeLease) -> Plain:
    repository = call.project.repository()
    place = WorktreeKey(repository.root, call.project.worktree(repository, given.worktree))
    ttl = None if given.ttl is None else parse_duration(given.ttl, setting="ttl")
    if (lease := _renewed(call, place, ttl)) is not None:
        return lease_to_json(lease)
    if (handed_on := call.project.given_lease(place.worktree)) is not None:
        return lease_to_json(repository.desk.renew(place.worktree, handed_on.lock_id, ttl))
    taken = _taken(call, repository, place, given, ttl)
    if isinstance(taken, Lease):
        return lease_to_json(taken)
    call.held.keep_lease(place, taken)
    call.undo = partial(_given_back, call, place)
    return lease_to_json(taken.lease)


def release_lease(call: Call, given: arguments.ReleaseLease) -> Plain:
    repository = call.project.repository()
    place = WorktreeKey(repository.root, call.project.worktree(repository, given.worktree))
    return lease_to_json(_given_back(call, place))


def _renewed(call: Call, place: WorktreeKey, ttl: float | None) -> Lease | None:
    """The lease that this client has on the worktree, running on from now; None if it has none."""
    held = call.held.lease(place)
    if held is None:
        return None
    with contextlib.suppress(LockNotHeld, LockExpired):
        return held.renew(ttl)
    with contextlib.suppress(LockNotHeld):
        call.held.drop_lease(place).release()  # it was lost: there is another one to be had
    return None


def _soon_renewed(call: Call, place: WorktreeKey, ttl: float | None) -> Lease | None:
    """The same, when another request of this client is just about to have it."""
    for _ in range(10):
        if (lease := _renewed(call, place, ttl)) is not None:
            return lease
        if call.cancelled.wait(0.05):
            return None
    return None


def _taken(
    call: Call, repository: Repository, place: WorktreeKey, given: arguments.TakeLease, ttl: float | None
) -> HeldLease | Lease:
    """A new lease; or the one that another request of the same client got meanwhile."""
    deadline = time.monotonic() + parse_duration(given.wait, setting="wait")
    moot = _Moot(call, place)
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return repository.lease(
                place.worktree,
                ttl=DEFAULT_TTL if ttl is None else ttl,
                wait=left,
                purpose=call.purpose(given.purpose),
                priority=given.priority,
                client=call.project.settings.client,
                cancelled=moot,
            )
        except LockTimeout:
            if not moot.is_set() or (lease := _soon_renewed(call, place, ttl)) is None:
                raise
            return lease
        except LockConflict as conflict:
            if conflict.facts.get("holder_id") != repository.desk.holder.holder_id:
                raise
            if (lease := _soon_renewed(call, place, ttl)) is not None:
                return lease
            if left == 0.0 or call.cancelled.is_set():
                raise


class _Moot(threading.Event):
    """Set when a wait has become pointless: cancelled, or another request of the client has the lease."""

    def __init__(self, call: Call, place: WorktreeKey) -> None:
        super().__init__()
        self._call = call
        self._place = place

    def is_set(self) -> bool:
        return self._call.cancelled.is_set() or self._call.held.lease(self._place) is not None


def _given_back(call: Call, place: WorktreeKey) -> Lease:
    held = call.held.drop_lease(place)
    try:
        return held.renew()  # raises if it is not ours any more; after that it is, until it is released
    finally:
        held.release()


@contextlib.contextmanager
def proven(
    call: Call, repository: Repository, place: WorktreeKey, lock_id: str | None, purpose: str
) -> Iterator[Proof | None]:
    """By which right a step publishes: the lease that is held or named, or one for its own duration."""
    if repository.config(place.worktree).isolation is Isolation.SHARED:
        yield None
        return
    if lock_id is not None:
        yield repository.proof(place.worktree, lock_id)
        return
    held = call.held.lease(place)
    if held is not None:
        held.check()
        yield _proof(held)
        return
    given = call.project.given_lease(place.worktree)
    if given is not None:
        yield repository.proof(place.worktree, given.lock_id, given.token)
        return
    try:
        own = repository.lease(
            place.worktree,
            ttl=OWN_TTL,
            purpose=call.purpose(purpose),
            client=call.project.settings.client,
        )
    except LockConflict as conflict:
        hint = "Wait for the holder with take_lease, or work in a worktree of your own."
        raise LockConflict(conflict.message, hint=hint, **conflict.facts) from None
    with own:
        yield _proof(own)


def _proof(lease: HeldLease) -> Proof:
    return Proof(lease.lock_id, lease.token)


def snapshot(call: Call, given: arguments.TakeSnapshot) -> Plain:
    repository = call.project.repository()
    place = WorktreeKey(repository.root, call.project.worktree(repository, given.worktree))
    call.total = repository.snapshots.files_of_head(place.worktree)
    wanted = SnapshotOptions(
        note=given.note,
        tag=given.tag,
        consistency=Consistency(given.consistency) if given.consistency else None,
        progress=call.progress,
    )
    with proven(call, repository, place, given.lock_id, "snapshot") as proof:
        call.check()
        made = repository.snapshots.take(place.worktree, proof, wanted)
    return to_json.new_snapshot_to_json(made, given.tag)


def history(call: Call, given: arguments.ReadHistory) -> Plain:
    repository = call.project.repository()
    if given.all_worktrees:
        return to_json.history_to_json(repository.snapshots.everything(limit=given.limit), None)
    worktree = call.project.worktree(repository, given.worktree)
    return to_json.history_to_json(repository.snapshots.line(worktree, limit=given.limit), worktree)


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
        return _restore_in_place(
            call, given, repository, WorktreeKey(repository.root, worktree), found.snapshot_id
        )
    return _restore_into_new(repository, found.snapshot_id, given)


def _restore_into_new(repository: Repository, snapshot_id: str, given: arguments.Restore) -> Plain:
    if given.dry_run:
        name = given.into or next(repository.snapshots.free_names(snapshot_id))
    else:
        name = repository.snapshots.restore(snapshot_id, given.into).worktree_id
    path = repository.payload(name)
    return to_json.restored_to_json(name, path, snapshot_id, dry_run=given.dry_run)


def _restore_in_place(
    call: Call, given: arguments.Restore, repository: Repository, place: WorktreeKey, snapshot_id: str
) -> Plain:
    path = given.path.rstrip("/") if given.path else None
    how = InPlace(reason=given.reason, path=path, progress=call.progress)
    if given.dry_run:
        plan = repository.snapshots.plan(place.worktree, snapshot_id, how)
        return to_json.restore_plan_to_json(place.worktree, how, plan)
    repository.snapshots.check_restore(place.worktree, how)  # before anybody's lease is asked for
    purpose = f"restore {snapshot_id} in place"
    with proven(call, repository, place, given.lock_id, purpose) as proof:
        call.check()
        restored = repository.snapshots.restore_in_place(place.worktree, snapshot_id, proof, how)
    return to_json.restored_in_place_to_json(place.worktree, how, restored)


def who(call: Call, given: arguments.Who) -> Plain:
    return look_around(call.project.root, repo_locks=call.project.repo_locks()).as_record()


def claim_next_work(call: Call, given: arguments.ClaimNextWork) -> Plain:
    project = call.project
    repository = project.repository()
    tracker, ledger = project.tracker(call.actor), project.ledger_if_any()
    wish = AssignmentOptions(
        issue_id=given.issue,
        worktree=given.worktree,
        assignee=call.actor,
        gate=given.gate,
        ttl=parse_duration(given.ttl, setting="ttl"),
        wait=parse_duration(given.wait, setting="wait"),
        by=call.client,
        client=project.settings.client,
        cancelled=call.cancelled,
    )
    with contextlib.ExitStack() as end:
        assignment = end.enter_context(take_work(repository, tracker, wish, ledger=ledger))
        work = Work(WorktreeKey(repository.root, assignment.lease.worktree), assignment, end.pop_all())
    call.held.keep_work(work)
    call.undo = partial(_dropped, call, assignment.issue.id)
    claimed = Claimed(assignment.issue, assignment.claim.claim, assignment.taken_over_from)
    return {
        **reading.claimed_issue_to_json(claimed),
        "description": assignment.issue.description,
        "worktree_id": assignment.lease.worktree,
        "path": str(assignment.path),
        "lock_id": assignment.lease.lock_id,
        "fencing_token": assignment.lease.token,
        "broken": reading.unreadable_issues_to_json(assignment.broken),
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
    return outcome_to_json(outcome, assignment)


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
    return reading.created_issues_to_json(created)


def append_to_ledger(call: Call, given: arguments.AppendToLedger) -> Plain:
    ledger = call.project.ledger()
    if given.if_sequence is None:
        return log.event_to_json(ledger.append(given.event))
    return log.event_to_json(ledger.append_if_sequence(given.event, given.if_sequence))
