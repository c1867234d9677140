"""Assignments: an agent's piece of work, from the claim of an issue to its outcome.

    with take_work(repository, tracker, options) as assignment:   # claimed and leased
        ...work in assignment.path...
        assignment.succeed()                                      # or .fail(reason)

1. Claim the issue; a heartbeat renews the claim.
2. Create its worktree from the head of `main`, or use the existing one; lease it, with a heartbeat.
3. Save unsaved work of a dead predecessor in the worktree as a snapshot; then run the worktree's setup, unless that has
   already succeeded. If the setup fails, the issue is released.
4. Work. `check` raises when the claim or the lease is lost; the agent must then stop.
5. The outcome: the worktree's content becomes a snapshot (under the lease's token), the ledger gets an event, the gate
   is decided, and the issue is done (under the claim's token). **Commit point**, unless the agent has already finished
   or released the issue. After a failure, the issue is released at once. If something keeps writing, the snapshot is
   taken again, then as best effort; if that fails too, the outcome stands without one: successful work is never put
   back in the queue for lack of a snapshot.
6. Release the lease and the claim.

A kill before the commit point leaves an issue that returns to the queue when its claim expires, a worktree with all
writes, and at most the ledger event of an attempt that does not count: only the attempt whose token finished the issue
counts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import (
    AlreadyExists,
    ConsistencyUnavailable,
    Failure,
    FencingMismatch,
    LandingPending,
    LockExpired,
    LockNotHeld,
    NotFound,
    Refused,
    SequenceMismatch,
    SetupFailed,
)
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import shortened
from holdfast.issues.claims import Claimed
from holdfast.issues.held_claim import HeldIssueClaim
from holdfast.issues.model import GateStatus, Issue, State
from holdfast.issues.prompt import Ending, Workplace, issue_prompt
from holdfast.issues.tracker import Tracker, Update
from holdfast.leases.rules import Lease, NamedLease
from holdfast.leases.service import COMMAND_TTL, HeldLease, LeaseService
from holdfast.ledger.log import Ledger
from holdfast.locks.identity import Holder, acts_under, calling_agent
from holdfast.repository.context import MAIN, WORKTREES, Consistency, Pin, Proof, settle
from holdfast.repository.history import add_pin, remove_pin
from holdfast.repository.payloads import status_of
from holdfast.repository.preparation import check_setup, prepare
from holdfast.repository.repository import Repository
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.repository.worktree_changes import Removed

if TYPE_CHECKING:
    from holdfast.repository.landing import Landings, LandOptions
    from holdfast.repository.landing_records import Landing

LONGEST_NOTE = 200
MOST_MISMATCHES = 100  # after losing to this many other events, an event is appended unconditionally: no starvation
MOST_CAPTURES, CAPTURE_PAUSE = 3, 0.5  # attempts at a quiesced snapshot of the work, and the seconds between them
FINISHED = frozenset([State.DONE, State.GATED, State.REJECTED, State.ARCHIVED])  # cannot be claimed

Quietly = Callable[[], contextlib.AbstractContextManager[object]]


class AssignmentOptions(NamedTuple):
    """Options of `take_work`: the issue, the worktree, and the waits."""

    issue_id: str | None = None  # None: the most urgent issue that is ready
    worktree: str | None = None  # None: the issue's own
    isolated: bool = False  # create an isolated worktree, for an agent that may write in its directory only
    assignee: str | None = None
    consistency: Consistency | None = None  # of the snapshots of the work; None: the best that can be achieved
    gate: str | None = None  # the gate that this work decides: passed if it succeeds, failed if it does not
    ttl: float = COMMAND_TTL  # 15 s, of the claim and of the lease
    wait: float | None = 0.0  # how long to wait for the worktree; None: without limit
    wait_for_issue: float | None = (
        0.0  # how long to wait for a ready issue while any is unfinished; None: without limit
    )
    by: str = "agent run"  # the command or program that does the work, shown to other users
    client: Holder | None = None  # the agent on whose behalf this process, a server, takes the work
    ignore_touches: bool = False  # whether the next issue may touch paths of an issue in progress
    landing: LandOptions | None = None  # how the work is to land: it starts from the tip of that branch
    cancelled: threading.Event | None = None  # setting it ends the wait for the worktree
    leasing: Callable[[str], object] = lambda worktree: None  # called with the worktree's name before the wait for it


class Outcome(NamedTuple):
    """The result of an assignment; `sequence` is the number of its ledger event, if there is one. If no snapshot could
    be taken, `not_saved` says why; the work still counts, and stays in the worktree. `warning` says that something kept
    writing while the snapshot was taken. Work that is still queued to land counts as succeeded; its landing will finish
    the issue."""

    issue: Issue
    succeeded: bool
    snapshot_id: str | None
    sequence: int | None
    not_saved: Failure | None = None
    warning: str | None = None
    landing: Landing | None = None  # if the work was to land


class _Saved(NamedTuple):
    """The snapshot of the work, or why there is none."""

    snapshot_id: str | None
    failure: Failure | None = None
    warning: str | None = None


class Assignment:
    """A claimed issue and the worktree leased for it."""

    def __init__(
        self,
        repository: Repository,
        tracker: Tracker,
        ledger: Ledger | None,
        options: AssignmentOptions,
        claimed: Claimed,
        claim: HeldIssueClaim,
        lease: HeldLease,
    ) -> None:
        self.issue: Issue = claimed.issue
        self.taken_over_from: str | None = claimed.taken_over_from  # the assignee whose claim had expired
        self.broken = claimed.broken  # the issues that could not be read during the search for work
        self.claim = claim
        self.lease = lease
        self.path: Path = repository.path(lease.worktree)
        self.in_new_worktree = False
        self.outcome: Outcome | None = None
        self._repository = repository
        self._tracker = tracker
        self._ledger = ledger
        self._gate = options.gate
        self._consistency = options.consistency

    def check(self) -> None:
        """Raise if the claim or the lease is lost; call it before each step of the work. A claim that ended because the
        issue was finished, usually by the agent itself, is not lost."""
        try:
            self.claim.check()
        except Failure:
            ended = self._ended_without_successor()
            if ended is None or ended.state not in FINISHED:
                raise
        self.lease.check()

    def prompt(self, ending: Ending) -> str:
        """The task as text: see `issues.prompt`."""
        known = self._repository.config(self.lease.worktree).git
        place = Workplace(self.lease.worktree, str(self.path), bool(known and known.isolated))
        return issue_prompt(self._tracker, self.issue.id, ending=ending, workplace=place).text

    @contextlib.contextmanager
    def prompt_file(self, ending: Ending = Ending.COMMAND) -> Iterator[tuple[str, Path]]:
        """Yield the prompt for a command, and the path of a file that contains it while the block runs. The file is
        private and part of no snapshot; if a kill leaves it behind, the next attempt in the worktree replaces it."""
        prompt, caches = self.prompt(ending), self._repository.context.paths.caches
        make_directories(caches)
        path = caches / f"{self.lease.worktree}.prompt"
        durable.replace(path, f"{prompt}\n".encode(), mode=0o600)
        try:
            yield prompt, path
        finally:
            with contextlib.suppress(Failure):
                durable.remove(path)

    def succeed(self, **facts: object) -> Outcome:
        """Record the work as done; refused if another agent has claimed the issue since. If the agent itself has
        already finished or released the issue, that outcome stands."""
        ended = self._ended_without_successor()
        if ended is None:
            self.claim.renew()  # refused before anything is published
        elif ended.state not in FINISHED:
            return self._failed(ended, "it was given back", facts)
        saved = self._save("done")
        sequence = self._record("work_done", saved, facts, ours=ended is None)
        self._decide_gate(GateStatus.PASSED)
        if ended is None:
            self._tracker.update(self.issue.id, Update(state=State.DONE), claim=self.claim.id)
        issue = self._tracker.issue(self.issue.id)
        if ended is None and issue.state is State.GATED:  # a waiting issue needs no claim
            with contextlib.suppress(Failure):  # the last gate may have just passed
                issue = self._tracker.claims.release(issue.id, self.claim.id, reason="it waits for its gates")
        self.outcome = Outcome(issue, True, saved.snapshot_id, sequence, saved.failure, saved.warning)
        return self.outcome

    def land(self, landings: Landings, options: LandOptions, *, wait: float | None = None) -> Outcome:
        """Record the work, queue it to land, and wait for the outcome. Only the landing finishes the issue.

        If the work does not land, or cannot be queued, the issue goes back to the queue, with the reason for its next
        agent; in the latter case, the failure is raised. If the agent itself has already finished or released the
        issue, that outcome stands.
        """
        if self._ended_without_successor() is not None:
            return self.succeed()
        self.claim.renew()
        saved = self._save("done")
        self._decide_gate(GateStatus.PASSED)
        how = options._replace(issue_id=self.issue.id, claim=self.claim.id)
        try:
            entry = landings.enqueue(self.lease.worktree, Proof.of(self.lease), how)
        except (LockNotHeld, LockExpired, FencingMismatch):
            raise
        except Failure as failure:
            self._failed(None, shortened(f"the work could not be queued to land: {failure.message}"), {})
            raise
        sequence = self._record("work_done", saved, {}, ours=False)  # the entry was queued under the claim
        try:
            entry = landings.wait(entry.landing_id, wait=wait)
        except LandingPending:
            pass
        except Failure as failure:  # nothing can land now (a full disk, say): the work stays queued
            landings.tell(f"{failure.message}. {failure.hint}")
        issue = self._tracker.issue(self.issue.id)
        succeeded = entry.is_open or entry.landed_as is not None
        if not succeeded:
            with contextlib.suppress(Failure):  # the claim was lost, or the issue is finished
                issue = self._tracker.claims.release(issue.id, self.claim.id, reason=f"{entry.landing_id} did not land")
        self.outcome = Outcome(issue, succeeded, saved.snapshot_id, sequence, saved.failure, saved.warning, entry)
        return self.outcome

    def fail(self, reason: str, **facts: object) -> Outcome:
        """Return the issue to the queue. The work stays in the worktree and becomes a snapshot."""
        ended = self._ended_without_successor()
        if ended is None:
            self.claim.renew()
        return self._failed(ended, reason, facts)

    def _failed(self, ended: Issue | None, reason: str, facts: dict[str, object]) -> Outcome:
        saved = self._save(f"failed: {reason}")
        sequence = self._record("work_failed", saved, {**facts, "reason": reason}, ours=ended is None)
        self._decide_gate(GateStatus.FAILED)
        issue = ended or self._tracker.claims.release(self.issue.id, self.claim.id, reason=reason)
        self.outcome = Outcome(issue, False, saved.snapshot_id, sequence, saved.failure, saved.warning)
        return self.outcome

    def put_back(self, reason: str) -> Outcome:
        """Return the issue to the queue as if it had not been claimed. The work stays in the worktree."""
        issue = self._tracker.claims.release(self.issue.id, self.claim.id, reason=reason)
        self.outcome = Outcome(issue, False, None, None)
        return self.outcome

    def remove_worktree(self) -> Removed:
        """Remove the worktree after the outcome; a pin protects the snapshot of the work. Refused while processes use
        the worktree, and if no such snapshot could be taken. The pin is created first, so a kill leaves at most an
        unneeded pin. The removal itself pins the head for a time. That pin keeps what was written after the outcome,
        and all of the work if another process finishes an interrupted removal."""
        assert self.outcome is not None
        if self.outcome.not_saved is not None:
            raise Refused("it has the only copy of the work: no snapshot was taken", worktree=self.lease.worktree)
        repository, name = self._repository, self.lease.worktree
        base = repository.context.config(name).base_snapshot_id
        pin = self._pin(self.outcome.snapshot_id) if self.outcome.snapshot_id != base else None
        try:
            return repository.remove_worktree(name, lock_id=self.lease.lock_id)
        except BaseException:
            if pin is not None:
                remove_pin(repository.context, pin.pin_id)
            raise

    def _ended_without_successor(self) -> Issue | None:
        """The issue, if its claim has ended and no other claim followed: then the agent itself finished or released it.
        None if the claim is still ours, or is lost."""
        record = self._tracker.claims.state(self.issue.id)
        if record is None or record.claim is not None or record.token != self.claim.claim.token:
            return None
        return self._tracker.issue(self.issue.id)

    def _pin(self, snapshot_id: str | None) -> Pin | None:
        if snapshot_id is None:
            return None
        reason = f"issue {self.issue.id[:8]}: {self.issue.title}"[:LONGEST_NOTE]
        return add_pin(self._repository.context, snapshot_id, reason=reason)

    def _save(self, outcome: str) -> _Saved:
        """The snapshot of the worktree's content: a new one, or the head if nothing changed.

        A failed capture is not raised, because it must not undo the work; the loss of the lease is.
        """
        note = f"{self.issue.id[:8]} {self.issue.title} ({outcome})"[:LONGEST_NOTE]
        try:
            return _capture(self._repository, self.lease, note, self._consistency)
        except (LockNotHeld, LockExpired, FencingMismatch):
            raise
        except Failure as failure:
            return _Saved(None, failure)

    def _decide_gate(self, status: GateStatus) -> None:
        if self._gate is not None:
            self._tracker.gates.judge(self.issue.id, self._gate, status)

    def _record(self, kind: str, saved: _Saved, facts: dict[str, object], *, ours: bool) -> int | None:
        """Append the event to the ledger, if there is one; return its sequence.

        The event is appended only if no other event followed since the claim was found to be `ours`. This refuses a
        process that was suspended while another claimed the issue and recorded its outcome.
        """
        if self._ledger is None:
            if ours:
                self.claim.check()
            return None
        claim, lease = self.claim.claim, self.lease
        event = {"type": kind, "issue_id": self.issue.id, "claim_token": claim.token, "assignee": claim.assignee}
        event |= {
            "worktree_id": lease.worktree,
            "fencing_token": lease.token,
            "snapshot_id": saved.snapshot_id,
            **facts,
        }
        if saved.failure is not None:
            event["not_saved"] = saved.failure.code
        if saved.warning is not None:
            event["warning"] = saved.warning
        for _ in range(MOST_MISMATCHES):
            sequence = self._ledger.sequence
            if ours:
                self.claim.renew()
            with contextlib.suppress(SequenceMismatch):  # another event came first: check the claim again
                return self._ledger.append_if_sequence(event, sequence).sequence
        return self._ledger.append(event).sequence


@contextlib.contextmanager
def take_work(
    repository: Repository,
    tracker: Tracker,
    options: AssignmentOptions,
    *,
    ledger: Ledger | None = None,
    quietly: Quietly = contextlib.nullcontext,
) -> Iterator[Assignment]:
    """Claim an issue and lease a worktree for it; raises `NotFound` if no issue is ready. `ledger` records outcomes.

    If the block ends without an outcome, the issue is released. The heartbeat threads start inside the context manager
    `quietly`, with which a command blocks signals in them.
    """
    check_setup(repository)
    claims = tracker.claims
    request = claims.request(options.assignee, ttl=options.ttl, purpose=options.by)
    if options.issue_id is not None:
        claimed = claims.claim(tracker.find_id(options.issue_id), request)
    else:
        claimed = claims.take_next(request, wait=options.wait_for_issue, ignore_touches=options.ignore_touches)
    with contextlib.ExitStack() as held:
        claim = HeldIssueClaim(claims, claimed.claim)
        with quietly():
            held.enter_context(claim)
        assignment, reason = None, "was not finished"
        try:
            lease, created = _lease_worktree(repository, options, claimed, held, quietly)
            assignment = Assignment(repository, tracker, ledger, options, claimed, claim, lease)
            assignment.in_new_worktree = created
            yield assignment
        except SetupFailed as failure:
            reason = shortened(failure.message)
            raise
        finally:
            if assignment is None or assignment.outcome is None:
                with contextlib.suppress(Failure):  # the claim is lost, or will expire
                    claims.release(claimed.issue.id, claim.id, reason=reason)


def _lease_worktree(
    repository: Repository, options: AssignmentOptions, claimed: Claimed, held: contextlib.ExitStack, quietly: Quietly
) -> tuple[HeldLease, bool]:
    """Returns the lease, and whether the worktree is a new one."""
    issue = claimed.issue
    name = options.worktree or _worktree_for(repository, f"issue-{issue.id[:8]}")
    created = _create_worktree(repository, name, claimed.claim.assignee, options)
    options.leasing(name)
    lease = repository.lease(
        name,
        ttl=options.ttl,
        wait=options.wait,
        purpose=f"{options.by}, issue {issue.id[:8]}: {issue.title}"[:LONGEST_NOTE],
        client=options.client,
        cancelled=options.cancelled,
    )
    held.callback(lease.release)
    with quietly():
        lease.beat()
    if not created:
        note = f"unsaved when {claimed.claim.assignee} claimed the issue"
        _capture(repository, lease, note, options.consistency)
    prepare(repository, name, lease)
    return lease, created


def _worktree_for(repository: Repository, name: str) -> str:
    """The name, or one for this clone if that worktree is in another clone: its agent is gone, so work starts over."""
    document, here = repository.context.store.read(WORKTREES.key(name)), repository.context.paths.main
    return name if document is None or document.record.clone == here else f"{name}-{here}"


def _create_worktree(repository: Repository, name: str, actor: str, options: AssignmentOptions) -> bool:
    """Create the worktree from the head of `main`, in a git home from the tip of the branch that the work lands on, or
    from the branch that an earlier worktree of this name has left; False if it already exists. Refused if `main` has
    files but no snapshot: the agent expects them, and would find nothing."""
    home, isolated = repository.context.home, options.isolated
    _remove_lost(repository, name)
    head = _start_of_work(repository, name, actor, options.landing)
    if head is None and not home.has_branches and repository.context.store.read(WORKTREES.key(name)) is None:
        with Directory.open(repository.path(MAIN)) as main:
            if main.names():
                message = f"{MAIN} is not empty but has no snapshot, so the worktree {name} would be empty"
                hint = "Take the first one: 'holdfast snapshot --worktree main -m \"the beginning\"'."
                raise Refused(message, hint=hint, worktree=name)
    try:
        repository.worktrees.create(name, snapshot=head, isolated=isolated, continues=True)
        return True
    except AlreadyExists:
        if repository.context.store.read(WORKTREES.key(name)) is None:
            raise
    known = repository.context.config(name).git
    if isolated and not (known and known.isolated):
        hint = "Leave out --isolated, or name another worktree: --worktree."
        raise Refused(f"the worktree {name} exists but is not isolated", hint=hint, worktree=name)
    return False


def _remove_lost(repository: Repository, name: str) -> None:
    """Remove a worktree whose directory is gone, perhaps with git: a new one continues on its branch."""
    context = repository.context
    document = context.store.read(WORKTREES.key(name)) if context.home.has_branches else None
    if document is None or document.record.clone != context.paths.main or name == context.paths.main:
        return
    settle(context, name)
    if status_of(context.paths, name) is None:
        with contextlib.suppress(NotFound):  # another agent was faster
            repository.remove_worktree(name)


def _start_of_work(repository: Repository, name: str, actor: str, landing: LandOptions | None) -> str | None:
    """The snapshot that a new worktree starts from: the head of `main`. In a git home, a commit, or None for the
    default."""
    if not repository.context.home.has_branches:
        return repository.context.config(MAIN).head_snapshot_id
    if landing is None or repository.context.store.read(WORKTREES.key(name)) is not None:
        return None
    from holdfast.repository.landing import Landings

    return Landings(repository, actor=actor).start(landing)


def _capture(repository: Repository, lease: HeldLease, note: str, consistency: Consistency | None) -> _Saved:
    """Take the snapshot if something has changed: again if something is written meanwhile, and at last as best effort
    unless a consistency was requested."""
    options = SnapshotOptions(note=note, consistency=consistency)

    def captured(options: SnapshotOptions, warning: str | None = None) -> _Saved:
        made = repository.snapshots.take_if_changed(lease.worktree, Proof.of(lease), options)
        head = made.snapshot_id if made else repository.context.config(lease.worktree).head_snapshot_id
        return _Saved(head, warning=warning)

    for left in reversed(range(MOST_CAPTURES)):
        try:
            return captured(options)
        except ConsistencyUnavailable:
            if not left and consistency is not None:
                raise
        time.sleep(CAPTURE_PAUSE)
    warning = f"something kept writing to {lease.worktree}: files of the snapshot may be from different instants"
    return captured(options._replace(consistency=Consistency.BEST_EFFORT), warning)


def outcome_to_json(outcome: Outcome, assignment: Assignment) -> dict[str, Any]:
    from holdfast.repository.landing_records import landing_to_json

    return {
        "issue_id": outcome.issue.id,
        "state": outcome.issue.state.value,
        "succeeded": outcome.succeeded,
        "worktree": assignment.lease.worktree,
        "claim_token": assignment.claim.claim.token,
        "token": assignment.lease.token,
        "snapshot_id": outcome.snapshot_id,
        "not_saved": outcome.not_saved.as_record() if outcome.not_saved else None,
        "warning": outcome.warning,
        "sequence": outcome.sequence,
        "landing": landing_to_json(outcome.landing) if outcome.landing else None,
        "taken_over_from": assignment.taken_over_from,
    }


# --- The leases of an agent ---------------------------------------------------------------------------


class OwnLeaseResult(NamedTuple):
    """The result of renewing or releasing a lease; `problem` says why it failed."""

    lease: Lease
    problem: Failure | None


def own_leases(repository: Repository, lock_id: str | None = None) -> Iterator[Lease]:
    """The lease with this id, and the leases that this process acts under: see `acts_under`. Leases that a server holds
    for an agent do not count: the server renews and releases them."""
    for state in (*repository.leases.states(), *repository.named_leases.states()):
        lease = state.lease
        holder = lease.identity.holder(lease.holder_id)
        if lease.lock_id == lock_id or acts_under([holder], lease.actor, repository.leases.actor):
            yield lease


def renew_own(repository: Repository, lock_id: str | None = None) -> list[OwnLeaseResult]:
    return [_try(lease, _service(repository, lease).renew) for lease in own_leases(repository, lock_id)]


def release_own(repository: Repository) -> list[OwnLeaseResult]:
    """Release the leases that the calling agent acquired with its own commands. Leases of a parent process stay:
    'holdfast run' releases its lease after its snapshot, and the user who started the agent may need theirs."""
    agent = calling_agent()
    return [
        _try(lease, _service(repository, lease).release)
        for lease in list(own_leases(repository))
        if lease.detached and lease.identity.holder(lease.holder_id) == agent
    ]


def _service(repository: Repository, lease: Lease) -> LeaseService:
    return repository.named_leases if isinstance(lease, NamedLease) else repository.leases


def _try(lease: Lease, act: Callable[[str, str], Lease]) -> OwnLeaseResult:
    try:
        act(lease.subject, lease.lock_id)
    except Failure as problem:
        return OwnLeaseResult(lease, problem)
    return OwnLeaseResult(lease, None)
