"""The implementation of the tools; the docstring of a public function is the tool's description for the client.

Each operation runs in a worker thread and returns a JSON record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

from holdfast.clock import parse_duration
from holdfast.errors import FencingMismatch, LockConflict, LockExpired, LockNotHeld, LockTimeout, UsageFailure
from holdfast.issues import reading
from holdfast.issues.claims import Claimed, claimed_issue_to_json
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import Priority
from holdfast.issues.prompt import Ending
from holdfast.leases.rules import Lease
from holdfast.leases.service import COMMAND_TTL, OWN_TTL, HeldLease
from holdfast.ledger import log
from holdfast.mcp import arguments
from holdfast.mcp.calls import Call, Record
from holdfast.mcp.held import Work, WorktreeKey
from holdfast.repository import to_json
from holdfast.repository.agent import AssignmentOptions, outcome_to_json, take_work
from holdfast.repository.context import Consistency, Isolation, Proof
from holdfast.repository.overview import look_around, with_details
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.repository.to_json import lease_to_json


def take_lease(call: Call, given: arguments.TakeLease) -> Record:
    """Acquire the lease of a worktree before you write to it; nobody else can have it meanwhile. The server renews it
    until you release it or disconnect. A lease that you already hold is renewed, with a new ttl if you give one.
    E_LOCK_CONFLICT names the holder: wait, or work elsewhere."""
    repository, key = _keyed(call, given.worktree)
    ttl = None if given.ttl is None else parse_duration(given.ttl, setting="ttl")
    if (lease := _renewed(call, key, ttl)) is not None:
        return lease_to_json(lease)
    if (handed_on := call.project.given_lease(key.worktree)) is not None:
        return lease_to_json(repository.leases.renew(key.worktree, handed_on.lock_id, ttl))
    taken = _taken(call, repository, key, given, ttl)
    if isinstance(taken, Lease):
        return lease_to_json(taken)
    call.held.keep_lease(key, taken)
    call.undo = partial(_given_back, call, key)
    return lease_to_json(taken.lease)


def release_lease(call: Call, given: arguments.ReleaseLease) -> Record:
    """Release a lease that you acquired with take_lease. Take a snapshot first to save your work."""
    return lease_to_json(_given_back(call, _keyed(call, given.worktree)[1]))


def _keyed(call: Call, worktree: str | None) -> tuple[Repository, WorktreeKey]:
    repository = call.project.repository()
    return repository, WorktreeKey(repository.root, call.project.worktree(repository, worktree))


def _renewed(call: Call, key: WorktreeKey, ttl: float | None) -> Lease | None:
    """Renew the lease of this client on the worktree; None if it has none."""
    if (held := call.held.lease(key)) is None:
        return None
    with contextlib.suppress(LockNotHeld, LockExpired):
        return held.renew(ttl)
    with contextlib.suppress(LockNotHeld):
        call.held.drop_lease(key).release()  # it was lost: acquire another one
    return None


def _soon_renewed(call: Call, key: WorktreeKey, ttl: float | None) -> Lease | None:
    """Renew the lease that another request of this client is about to get."""
    for _ in range(10):
        if (lease := _renewed(call, key, ttl)) is not None:
            return lease
        if call.cancelled.wait(0.05):
            return None
    return None


def _taken(
    call: Call, repository: Repository, key: WorktreeKey, given: arguments.TakeLease, ttl: float | None
) -> HeldLease | Lease:
    """A new lease, or the lease that another request of the same client got meanwhile."""
    deadline = time.monotonic() + parse_duration(given.wait, setting="wait")
    moot = _Moot(call, key)
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return repository.lease(
                key.worktree,
                ttl=COMMAND_TTL if ttl is None else ttl,
                wait=left,
                purpose=call.purpose(given.purpose),
                priority=given.priority,
                client=call.project.settings.client,
                cancelled=moot,
            )
        except LockTimeout:
            if not moot.is_set() or (lease := _soon_renewed(call, key, ttl)) is None:
                raise
            return lease
        except LockConflict as conflict:
            if conflict.facts.get("holder_id") != repository.leases.holder.holder_id:
                raise
            if (lease := _soon_renewed(call, key, ttl)) is not None:
                return lease
            if left == 0.0 or call.cancelled.is_set():
                raise


class _Moot(threading.Event):
    """Set when a wait is pointless: cancelled, or another request of the client has the lease."""

    def __init__(self, call: Call, key: WorktreeKey) -> None:
        super().__init__()
        self._call = call
        self._key = key

    def is_set(self) -> bool:
        return self._call.cancelled.is_set() or self._call.held.lease(self._key) is not None


def _given_back(call: Call, key: WorktreeKey) -> Lease:
    held = call.held.drop_lease(key)
    try:
        return held.renew()  # raises if it is no longer ours
    finally:
        held.release()


@contextlib.contextmanager
def proven(
    call: Call, repository: Repository, key: WorktreeKey, lock_id: str | None, purpose: str
) -> Iterator[Proof | None]:
    """Yield the proof needed to publish: of the named or held lease, else of a lease acquired for this block."""
    if repository.config(key.worktree).isolation is Isolation.SHARED:
        yield None
        return
    if lock_id is not None:
        yield repository.proof(key.worktree, lock_id)
        return
    if (held := call.held.lease(key)) is not None:
        proof = Proof(held.lock_id, held.token)
        with repository.fenced(key.worktree, proof):
            held.check()
        yield proof
        return
    if (given := call.project.given_lease(key.worktree)) is not None:
        yield repository.proof(key.worktree, given.lock_id, given.token)
        return
    try:
        client = call.project.settings.client
        own = repository.lease(key.worktree, ttl=OWN_TTL, purpose=call.purpose(purpose), client=client)
    except LockConflict as conflict:
        hint = "Wait for the holder with take_lease, or work in a worktree of your own."
        raise LockConflict(conflict.message, hint=hint, **conflict.facts) from None
    with own:
        yield Proof(own.lock_id, own.token)


def snapshot(call: Call, given: arguments.TakeSnapshot) -> Record:
    """Save the content of a worktree as a snapshot, completely or not at all. It uses the lease that you hold, or
    acquires one while it runs. Snapshots are never overwritten."""
    repository, key = _keyed(call, given.worktree)
    call.total = repository.snapshots.files_of_head(key.worktree)
    wanted = SnapshotOptions(
        note=given.note,
        tag=given.tag,
        consistency=Consistency(given.consistency) if given.consistency else None,
        progress=call.progress,
    )
    with proven(call, repository, key, given.lock_id, "snapshot") as proof:
        call.check()
        made = repository.snapshots.take(key.worktree, proof, wanted)
    return to_json.new_snapshot_to_json(made, given.tag)


def history(call: Call, given: arguments.ReadHistory) -> Record:
    """Show the snapshots of a worktree, newest first."""
    repository = call.project.repository()
    if given.all_worktrees:
        return to_json.history_to_json(repository.snapshots.everything(limit=given.limit), None)
    worktree = call.project.worktree(repository, given.worktree)
    return to_json.history_to_json(repository.snapshots.line(worktree, limit=given.limit), worktree)


def restore(call: Call, given: arguments.Restore) -> Record:
    """Restore a snapshot into a new worktree, or with in_place into the worktree itself, after saving its content as a
    snapshot. Outside git checkouts, in_place replaces the directory, and programs in it stay in the old one."""
    repository, key = _keyed(call, given.worktree)
    if given.in_place and given.into:
        raise UsageFailure("into is for a new worktree, not for in_place", hint="Leave one of them out.")
    if not given.in_place and (given.path or given.reason):
        wrong = "path" if given.path else "reason"
        raise UsageFailure(f"{wrong} requires in_place", hint="Set in_place too, or leave it out.")
    found = repository.snapshots.named(given.snapshot, seen_from=key.worktree)
    call.total = found.files
    if given.in_place:
        return _restore_in_place(call, given, repository, key, found.snapshot_id)
    if given.dry_run:
        name = given.into or next(repository.snapshots.free_names(found.snapshot_id))
    else:
        name = repository.snapshots.restore(found.snapshot_id, given.into).worktree_id
    return to_json.restored_to_json(name, repository.payload(name), found.snapshot_id, dry_run=given.dry_run)


def _restore_in_place(
    call: Call, given: arguments.Restore, repository: Repository, key: WorktreeKey, snapshot_id: str
) -> Record:
    path = given.path.rstrip("/") if given.path else None
    how = RestoreOptions(reason=given.reason, path=path, progress=call.progress)
    if given.dry_run:
        plan = repository.snapshots.plan(key.worktree, snapshot_id, how)
        return to_json.restore_plan_to_json(key.worktree, how, plan)
    repository.snapshots.check_restore(key.worktree, how)  # before a lease is acquired
    with proven(call, repository, key, given.lock_id, f"restore {snapshot_id} in place") as proof:
        call.check()
        restored = repository.snapshots.restore_in_place(key.worktree, snapshot_id, proof, how)
    return to_json.restored_in_place_to_json(key.worktree, how, restored)


def who(call: Call, given: arguments.Who | None = None) -> Record:
    """Show who holds what here: leases of worktrees, work, claims, locks; since when, until when, the purpose,
    whether the holder is alive, who waits, and whether and how it can be reclaimed safely."""
    return with_details(look_around(call.project.root, repo_locks=call.project.repo_locks())).as_record()


def claim_next_work(call: Call, given: arguments.ClaimNextWork) -> Record:
    """Claim the most urgent issue that is ready (or the one that you name), with a leased worktree. Do the work in the
    directory `path` of the answer; its `prompt` has the task. Then call finish_work. The server renews the claim; if
    you disconnect, the work returns to the queue, and your files stay in the worktree."""
    project, repository = call.project, call.project.repository()
    tracker, ledger = project.tracker(call.actor), project.ledger_if_any()
    options = AssignmentOptions(
        issue_id=given.issue,
        worktree=given.worktree,
        assignee=call.actor,
        gate=given.gate,
        ttl=parse_duration(given.ttl, setting="ttl"),
        wait=parse_duration(given.wait, setting="wait"),
        by=call.client,
        ignore_touches=given.ignore_touches,
        client=project.settings.client,
        cancelled=call.cancelled,
    )
    with contextlib.ExitStack() as end:
        assignment = end.enter_context(take_work(repository, tracker, options, ledger=ledger))
        work = Work(WorktreeKey(repository.root, assignment.lease.worktree), assignment, end.pop_all())
    call.held.keep_work(work)
    call.undo = partial(_dropped, call, assignment.issue.id)
    claimed = Claimed(assignment.issue, assignment.claim.claim, assignment.taken_over_from)
    return {
        **claimed_issue_to_json(claimed),
        "description": assignment.issue.description,
        "prompt": assignment.prompt(Ending.TOOL),
        "worktree": assignment.lease.worktree,
        "path": str(assignment.path),
        "lock_id": assignment.lease.lock_id,
        "token": assignment.lease.token,
        "claim_token": assignment.claim.claim.token,
        "broken": reading.unreadable_issues_to_json(assignment.broken),
    }


def _dropped(call: Call, issue: str) -> None:
    call.held.take_work(issue).end.close()


def finish_work(call: Call, given: arguments.FinishWork) -> Record:
    """Finish work that you have claimed. done and failed: the worktree is saved as a snapshot and the ledger gets an
    event; then the issue is done, or returns to the queue. If the worktree could not be saved, not_saved says why; the
    outcome still counts, and the files stay in the worktree. E_FENCING_MISMATCH or E_LOCK_EXPIRED: another agent has
    the work now, and nothing of yours was published."""
    work = call.held.take_work(given.issue)
    assignment = work.assignment
    try:
        if given.outcome == "done":
            outcome = assignment.succeed()
        elif given.outcome == "failed":
            outcome = assignment.fail(given.reason or "given up")
        else:
            outcome = assignment.put_back(given.reason or "released")
    except (LockNotHeld, LockExpired, FencingMismatch):
        work.end.close()  # it is no longer ours
        raise
    except BaseException:
        call.held.keep_work(work)  # still ours: try again, or give up
        raise
    work.end.close()
    return outcome_to_json(outcome, assignment)


def add_work(call: Call, given: arguments.AddWork) -> Record:
    """Create an issue for you or another agent: a problem that you found, or a part of a bigger issue."""
    tracker = call.project.tracker(call.actor)
    new = NewIssue(
        title=given.title,
        description=given.description,
        priority=Priority(given.priority),
        depends_on=tuple(map(tracker.find_id, given.depends_on)),
        labels=tuple(given.labels),
        touches=tuple(given.touches),
    )
    [created] = tracker.create_all([new])
    return reading.created_issues_to_json(created)


def append_to_ledger(call: Call, given: arguments.AppendToLedger) -> Record:
    """Append an event to the log that all agents here share: a finding, a decision, a result. It is on disk when
    this returns. With if_sequence, it is appended only if the ledger is still at that sequence."""
    ledger = call.project.ledger()
    if given.if_sequence is None:
        return log.event_to_json(ledger.append(given.event))
    return log.event_to_json(ledger.append_if_sequence(given.event, given.if_sequence))
