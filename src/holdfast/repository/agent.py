"""Assignments: one piece of work from the queue, with a worktree to do it in, from claim to record.

    with take(workshop, wish) as assignment:      # claimed, leased, what was left behind is kept
        ...work in assignment.path...
        assignment.succeed()                      # or .fail(reason)

1. The issue is claimed; a heartbeat keeps the claim.
2. Its worktree is made, from the head of `main`, or taken as it is; then it is leased, with a heartbeat.
3. What somebody who died has left unsaved in the worktree becomes a snapshot: nothing is lost.
4. The work is done. Whoever loses the claim or the lease is told by `check`, and must stop.
5. The outcome: what is in the worktree becomes a snapshot (under the token of the lease), the ledger
   gets a record (only if none has come since the claim was looked at), the gate is judged, and the issue is
   done (under the token of the claim). That last
   step is the commit point: until then, the issue comes back to the queue if this process dies.
   After a failure the issue is put back at once. If the agent itself has said already that the issue is
   done, or has put it back, then that was the commit point, and stands.
6. The lease and the claim are given back.

A kill anywhere leaves an issue that comes back to the queue when its claim runs out, a worktree with
all that was written in it, and at most a record in the ledger of an attempt that did not count: an
attempt counts if its token is the one with which the issue was done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import AlreadyExists, Failure, Refused, SequenceMismatch
from holdfast.fs.directory import Directory
from holdfast.issues.claims import Claimed, HeldIssueClaim
from holdfast.issues.model import GateStatus, Issue, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.leases.rules import Lease
from holdfast.leases.service import HeldLease
from holdfast.ledger.log import Ledger
from holdfast.locks.identity import Holder, acts_under, calling_agent
from holdfast.repository.context import Proof
from holdfast.repository.history import add_pin, remove_pin
from holdfast.repository.records import MAIN, WORKTREES, Pin
from holdfast.repository.repository import Repository
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.repository.worktree_changes import Removed

LONGEST_NOTE = 200
MOST_MISMATCHES = 100
"""How often a record gives way to those of others before it is appended whatever comes: nobody starves."""
FINISHED = frozenset([State.DONE, State.GATED, State.REJECTED, State.ARCHIVED])
"""The states of an issue that nobody is given to work on."""


class AgentContext(NamedTuple):
    """Where work is done: a repository, the queue of its work, and perhaps a ledger for the record."""

    repository: Repository
    tracker: Tracker
    ledger: Ledger | None = None


class AssignmentOptions(NamedTuple):
    """Which work, where, and how."""

    issue_id: str | None = None
    """None: the most urgent issue that is ready."""
    worktree: str | None = None
    """None: one of the issue's own."""
    assignee: str | None = None
    gate: str | None = None
    """The gate that this work decides: passed if it succeeds, failed if it does not."""
    ttl: float = 60.0
    wait: float | None = 0.0
    """How long to wait for the worktree; None without limit."""
    patience: float | None = 0.0
    """How long to wait until an issue is ready, as long as any is unfinished; None without limit."""
    by: str = "agent run"
    """Who does it, in the words that others are shown."""
    client: Holder | None = None
    """The agent that this process, a server, takes it for."""
    cancelled: threading.Event | None = None
    """Once this is set, nobody waits for the worktree any more."""


class Outcome(NamedTuple):
    """What became of an assignment."""

    issue: Issue
    succeeded: bool
    snapshot_id: str | None
    sequence: int | None
    """The event in the ledger, if there is one."""


class Assignment:
    """Work that is claimed, and a worktree that is leased for it."""

    def __init__(
        self,
        workshop: AgentContext,
        wish: AssignmentOptions,
        claimed: Claimed,
        claim: HeldIssueClaim,
        lease: HeldLease,
    ) -> None:
        self.issue = claimed.issue
        self.taken_over_from = claimed.taken_over_from
        self.broken = claimed.broken
        """What could not be read when work was looked for."""
        self.claim = claim
        self.lease = lease
        self.path: Path = workshop.repository.path(lease.worktree)
        self.outcome: Outcome | None = None
        self._workshop = workshop
        self._wish = wish

    def check(self) -> None:
        """Raise if the claim or the lease is lost: call it before every piece of work.

        A claim that was ended because the work was said to be done, by the agent itself as a rule, is not
        lost: nobody else is given it.
        """
        try:
            self.claim.check()
        except Failure:
            left = self._left_to_us()
            if left is None or left.state not in FINISHED:
                raise
        self.lease.check()

    def succeed(self, **facts: object) -> Outcome:
        """Record the work as done. Refused by a token if somebody else has been given it meanwhile.

        An agent may have said so itself already, or have given the work back: then that counts.
        """
        left = self._left_to_us()
        if left is None:
            self.claim.renew()  # refused now, if it is: before anything is published
        elif left.state not in FINISHED:
            return self._failed(left, "it was given back", facts)
        snapshot_id = self._kept("done")
        sequence = self._recorded("work_done", snapshot_id, facts, ours=left is None)
        if self._wish.gate is not None:
            self._workshop.tracker.gates.judge(self.issue.id, self._wish.gate, GateStatus.PASSED)
        if left is None:
            self._workshop.tracker.update(self.issue.id, Update(state=State.DONE), claim=self.claim.id)
        issue = self._workshop.tracker.issue(self.issue.id)
        if left is None and issue.state is State.GATED:  # nobody works on it while it waits for its gates
            with contextlib.suppress(Failure):  # somebody passes the last one just now
                issue = self._workshop.tracker.claims.release(
                    issue.id, self.claim.id, reason="it waits for its gates"
                )
        self.outcome = Outcome(issue, True, snapshot_id, sequence)
        return self.outcome

    def fail(self, reason: str, **facts: object) -> Outcome:
        """Put the work back into the queue. What was written stays in the worktree, and in a snapshot."""
        left = self._left_to_us()
        if left is None:
            self.claim.renew()
        return self._failed(left, reason, facts)

    def _failed(self, left: Issue | None, reason: str, facts: dict[str, object]) -> Outcome:
        snapshot_id = self._kept(f"failed: {reason}")
        facts = {**facts, "reason": reason}
        sequence = self._recorded("work_failed", snapshot_id, facts, ours=left is None)
        if self._wish.gate is not None:
            self._workshop.tracker.gates.judge(self.issue.id, self._wish.gate, GateStatus.FAILED)
        issue = left or self._workshop.tracker.claims.release(self.issue.id, self.claim.id, reason=reason)
        self.outcome = Outcome(issue, False, snapshot_id, sequence)
        return self.outcome

    def _left_to_us(self) -> Issue | None:
        """The issue as it is, if its claim was ended without anybody else being given it since: the agent
        itself has said that it is done, or has given it back. None if the claim is ours, or is lost."""
        tracker = self._workshop.tracker
        record = tracker.claims.state(self.issue.id)
        if record is None or record.claim is not None or record.token != self.claim.claim.token:
            return None
        return tracker.issue(self.issue.id)

    def put_back(self, reason: str) -> Outcome:
        """Put the work back as if it had not been taken. What was written stays where it is."""
        issue = self._workshop.tracker.claims.release(self.issue.id, self.claim.id, reason=reason)
        self.outcome = Outcome(issue, False, None, None)
        return self.outcome

    def remove_worktree(self) -> Removed:
        """Remove the worktree when the work is done. What was done in it stays: a pin keeps its snapshot,
        which the worktree does not any more. Refused, and all stays, while processes work in it.

        The pin comes first, so a kill leaves a pin too many at most.
        """
        assert self.outcome is not None
        repository, name = self._workshop.repository, self.lease.worktree
        control, base = repository.control, repository.control.config(name).base_snapshot_id
        pin = self._pinned(self.outcome.snapshot_id) if self.outcome.snapshot_id != base else None
        try:
            removed = repository.remove_worktree(name, lock_id=self.lease.lock_id)
        except BaseException:
            if pin is not None:
                remove_pin(control, pin.pin_id)
            raise
        self._pinned(removed.saved)  # written behind the back of the one that had said that it was done
        return removed

    def _pinned(self, snapshot_id: str | None) -> Pin | None:
        if snapshot_id is None:
            return None
        reason = f"issue {self.issue.id[:8]}: {self.issue.title}"[:LONGEST_NOTE]
        return add_pin(self._workshop.repository.control, snapshot_id, reason=reason)

    def _kept(self, what: str) -> str | None:
        """What is in the worktree as a snapshot; its head, if that is the same."""
        note = f"{self.issue.id[:8]} {self.issue.title} ({what})"[:LONGEST_NOTE]
        repository = self._workshop.repository
        made = _take_if_changed(repository, self.lease, note)
        return made or repository.control.config(self.lease.worktree).head_snapshot_id

    def _recorded(
        self, kind: str, snapshot_id: str | None, facts: dict[str, object], *, ours: bool
    ) -> int | None:
        """Append the record to the ledger, if there is one; where it is.

        Appended only if nothing has come to the ledger since the claim was found to be `ours`: one who was
        stopped in between, while another was given the work and recorded it, finds that out.
        """
        ledger = self._workshop.ledger
        if ledger is None:
            if ours:
                self.claim.check()
            return None
        event = {
            "type": kind,
            "issue_id": self.issue.id,
            "claim_token": self.claim.claim.token,
            "assignee": self.claim.claim.assignee,
            "worktree_id": self.lease.worktree,
            "fencing_token": self.lease.token,
            "snapshot_id": snapshot_id,
            **facts,
        }
        for _ in range(MOST_MISMATCHES):
            sequence = ledger.sequence
            if ours:
                self.claim.renew()
            with contextlib.suppress(SequenceMismatch):  # others record theirs: look at the claim again
                return ledger.append_if_sequence(event, sequence).sequence
        return ledger.append(event).sequence


@contextlib.contextmanager
def take(
    workshop: AgentContext,
    wish: AssignmentOptions,
    *,
    quietly: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Assignment]:
    """Claim work and lease a worktree for it; see the module's text. Raises `NotFound` if nothing is ready.

    What is still undecided when the block ends is put back. `quietly` is entered while the threads of
    the heartbeats are started: a command line keeps signals away from them with it.
    """
    claimed = _claimed(workshop.tracker, wish)
    with contextlib.ExitStack() as held:
        claim = HeldIssueClaim(workshop.tracker.claims, claimed.claim)
        with quietly():
            held.enter_context(claim)
        assignment = None
        try:
            assignment = _begun(workshop, wish, claimed, claim, held, quietly)
            yield assignment
        finally:
            if assignment is None or assignment.outcome is None:
                with contextlib.suppress(Failure):  # it is not ours any more, or comes back by itself
                    workshop.tracker.claims.release(claimed.issue.id, claim.id, reason="was not finished")


take_work = take
"""What `take` is called by those who import it from `holdfast`."""


def _begun(
    workshop: AgentContext,
    wish: AssignmentOptions,
    claimed: Claimed,
    claim: HeldIssueClaim,
    held: contextlib.ExitStack,
    quietly: Callable[[], contextlib.AbstractContextManager[object]],
) -> Assignment:
    repository = workshop.repository
    name = wish.worktree or f"issue-{claimed.issue.id[:8]}"
    made = _make_worktree(repository, name)
    purpose = f"{wish.by}, issue {claimed.issue.id[:8]}: {claimed.issue.title}"[:LONGEST_NOTE]
    lease = repository.lease(
        name, ttl=wish.ttl, wait=wish.wait, purpose=purpose, client=wish.client, cancelled=wish.cancelled
    )
    held.callback(lease.release)
    with quietly():
        lease.beat()
    if not made:
        _take_if_changed(repository, lease, f"left unsaved before {claimed.claim.assignee} came")
    return Assignment(workshop, wish, claimed, claim, lease)


def _claimed(tracker: Tracker, wish: AssignmentOptions) -> Claimed:
    request = tracker.claims.request(wish.assignee, ttl=wish.ttl, purpose=wish.by)
    if wish.issue_id is not None:
        return tracker.claims.claim(tracker.find_id(wish.issue_id), request)
    return tracker.claims.take_next(request, wait=wish.patience)


def _make_worktree(repository: Repository, name: str) -> bool:
    """Make the worktree if it is not there; False if it is."""
    head = repository.control.config(MAIN).head_snapshot_id
    if head is None:
        _refuse_to_begin_with_nothing(repository, name)
    with contextlib.suppress(AlreadyExists):
        repository.worktrees.create(name, snapshot=head)
        return True
    return False


def _refuse_to_begin_with_nothing(repository: Repository, name: str) -> None:
    """An agent that is to work on what is in `main` must not be sent to an empty directory."""
    if repository.control.store.read(WORKTREES.key(name)) is not None:
        return
    with Directory.open(repository.path(MAIN)) as main:
        if not main.names():
            return
    raise Refused(
        f"{MAIN} has no snapshot yet, so the worktree {name} would be empty, although {MAIN} is not",
        hint="Take the first one: 'holdfast snapshot --worktree main -m \"the beginning\"'.",
        worktree=name,
    )


def _take_if_changed(repository: Repository, lease: HeldLease, note: str) -> str | None:
    lease.check()
    proof = Proof(lease.lock_id, lease.token)
    made = repository.snapshots.take_if_changed(lease.worktree, proof, SnapshotOptions(note=note))
    return None if made is None else made.snapshot_id


Act = Callable[[str, str], Lease]


class Kept(NamedTuple):
    """What came of renewing or releasing a lease: `problem` is why it could not be done."""

    lease: Lease
    problem: Failure | None


def own_leases(repository: Repository, lock_id: str | None = None) -> Iterator[Lease]:
    """The leases with this id, and those that this process acts under: see `acts_under`.

    Not those that a server holds for the agent: the server keeps them, and ends them.
    """
    for config in repository.worktrees.configs():
        state = repository.desk.state(config.worktree_id)
        if state is None:
            continue
        lease = state.lease
        holder = lease.identity.holder(lease.holder_id)
        if lease.lock_id == lock_id or acts_under([holder], lease.actor, repository.desk.actor):
            yield lease


def renew_own(repository: Repository, lock_id: str | None = None) -> list[Kept]:
    """Let all own leases run on."""
    return [_tried(lease, repository.desk.renew) for lease in own_leases(repository, lock_id)]


def release_own(repository: Repository) -> list[Kept]:
    """Give back what the agent that runs this has acquired by a command of its own.

    Not what a process above it holds: 'holdfast run' gives its lease back itself, after its snapshot, and
    the person who started the agent may have plans for theirs.
    """
    agent = calling_agent()
    own = [
        lease
        for lease in own_leases(repository)
        if lease.detached and lease.identity.holder(lease.holder_id) == agent
    ]
    return [_tried(lease, repository.desk.release) for lease in own]


def _tried(lease: Lease, act: Act) -> Kept:
    try:
        act(lease.worktree_id, lease.lock_id)
    except Failure as problem:
        return Kept(lease, problem)
    return Kept(lease, None)


def outcome_to_json(outcome: Outcome, assignment: Assignment) -> dict[str, Any]:
    """What became of a piece of work."""
    return {
        "issue_id": outcome.issue.id,
        "state": outcome.issue.state.value,
        "succeeded": outcome.succeeded,
        "worktree": assignment.lease.worktree,
        "claim_token": assignment.claim.claim.token,
        "token": assignment.lease.token,
        "snapshot_id": outcome.snapshot_id,
        "sequence": outcome.sequence,
        "taken_over_from": assignment.taken_over_from,
    }
