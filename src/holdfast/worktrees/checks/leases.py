"""Leases that nobody will give back, and waiters that will never come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from holdfast.clock import Now, format_duration
from holdfast.errors import LockNotHeld
from holdfast.leases.rules import WAITER_TTL, Lease, LeaseKeys, LeaseQueue, LeaseWaiter
from holdfast.locks.identity import Liveness, liveness
from holdfast.store.model import Decision, Delete, Family, StructCodec, View
from holdfast.worktrees.control import Control
from holdfast.worktrees.doctor import Examination, Finding, Severity
from holdfast.worktrees.records import OPERATIONS, WORKTREES, worktree_keys

LEASES: Family[Lease] = Family("jvs/leases", StructCodec(Lease))
LINES: Family[LeaseQueue] = Family("jvs/queues", StructCodec(LeaseQueue))


def leases(examination: Examination) -> Iterator[Finding]:
    """Leases that have expired, and leases of worktrees that are not there."""
    control = examination.control
    for worktree, _ in control.store.scan(LEASES):
        orphaned = _has_no_worktree(examination, worktree)
        state = control.desk.state(worktree)  # after that: a rename takes the lease along
        if state is None:
            continue
        if orphaned:
            yield Finding(
                "lock-orphaned",
                Severity.WARNING,
                worktree,
                f"{worktree} is locked by {state.lease.holder_id}, but there is no such worktree",
                "Nothing is protected by it. A new worktree of this name could not be locked.",
                "remove the lock; its token is never given again",
                fix=partial(_remove_orphan, control, worktree),
                facts={"lock_id": state.lease.lock_id},
            )
        elif state.expired:
            yield Finding(
                "lock-expired",
                Severity.NOTE,
                worktree,
                f"the lock of {worktree}, held by {state.lease.holder_id} ({state.liveness.value}), "
                f"expired {format_duration(-state.time_left)} ago",
                "Its holder did not come back. The next one who wants the lock takes it over.",
                "release it",
                fix=partial(_release, control, worktree, state.lease.lock_id),
                facts={"lock_id": state.lease.lock_id, "liveness": state.liveness.value},
            )


def _has_no_worktree(examination: Examination, worktree: str) -> bool:
    store = examination.control.store
    return store.read(OPERATIONS.key(worktree)) is None and store.read(WORKTREES.key(worktree)) is None


def _remove_orphan(control: Control, worktree: str) -> None:
    keys = LeaseKeys.of(worktree)

    def decide(view: View, now: float) -> Decision[None]:
        lease = view.get(keys.lease)
        there = any(view.get(key) is not None for key in worktree_keys(worktree))
        if lease is None or there:
            return Decision([], None)
        facts = {"worktree_id": worktree, "lock_id": lease.lock_id, "fencing_token": lease.fencing_token}
        return Decision([Delete(keys.lease), control.audit(view, now, "lock_removed", **facts)], None)

    control.store.transact([*keys.all(), *worktree_keys(worktree), control.trail.stream], decide)


def _release(control: Control, worktree: str, lock_id: str) -> None:
    with contextlib.suppress(LockNotHeld):  # taken over meanwhile
        control.desk.release(worktree, lock_id)


def waiters(examination: Examination) -> Iterator[Finding]:
    """Places in line whose processes are gone."""
    control = examination.control
    for worktree, document in control.store.scan(LINES):
        moment = control.desk.reading().at(examination.now)
        dead = [each for each in document.record.waiters if _is_gone(each, moment)]
        if dead:
            yield Finding(
                "waiter-dead",
                Severity.NOTE,
                worktree,
                f"{', '.join(each.holder_id for each in dead)} wait for {worktree} no more: gone",
                "They are passed over when the lock is given.",
                "take them out of the line",
                fix=partial(_take_out, control, worktree, dead),
            )


def _is_gone(waiter: LeaseWaiter, moment: Now) -> bool:
    holder = waiter.identity.holder(waiter.holder_id)
    return waiter.unseen_for(moment) >= WAITER_TTL or (
        holder is not None and liveness(holder) is Liveness.DEAD
    )


def _take_out(control: Control, worktree: str, dead: list[LeaseWaiter]) -> None:
    for each in dead:
        control.desk.leave(worktree, each.ticket)
