"""What dead processes have left behind, and nobody misses."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from holdfast.clock import Now, format_duration
from holdfast.errors import LockConflict, LockNotHeld, NotFound
from holdfast.findings import Finding, Severity
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.leases.rules import WAITER_TTL, Lease, LeaseKeys, LeaseQueue, LeaseWaiter
from holdfast.locks.identity import Liveness, liveness
from holdfast.repository import payloads
from holdfast.repository.context import RepositoryContext
from holdfast.repository.doctor import Examination
from holdfast.repository.gc import collector_locked, end_dead_run
from holdfast.repository.gc_plan import forget_plan
from holdfast.repository.gc_plan import plans as kept_plans
from holdfast.repository.payloads import payload_locked
from holdfast.repository.records import DESCRIPTORS, OPERATIONS, WORKTREES, Operation, worktree_keys
from holdfast.repository.retention import PlanState
from holdfast.repository.worktrees import names_of, settle
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, Delete, Family, StructCodec, View

DRAFT_AGE = 3600.0
"""A draft lives for milliseconds. Should its process really have been stopped for longer than this, its
commit fails when it goes on, as if the disk were full: nothing is lost by removing it."""

_DRAFT = re.compile(r"\..+-[0-9a-f]{12}\.tmp", re.ASCII | re.DOTALL)
_PROBE = re.compile(r"\.holdfast-probe-[0-9a-f]{12}", re.ASCII)
_CONTROL = (".jvs", ".holdfast", ".jit", "ledger")
"""Where drafts are written."""
_TREES = ("snapshots", "remnants", "quarantine", "tmp")
"""What is in there is users' content, or in a scratch."""


def scratches(examination: Examination) -> Iterator[Finding]:
    """Scratches whose process is gone; not one that a pending operation still needs."""
    control = examination.control
    left = list(payloads.abandoned(control.places))
    needed = {each.operation_id for each in examination.operations().values()}  # after that: it may end
    for each in left:
        if each.scratch_id in needed or _is_young_and_empty(each.path, examination.now):
            continue
        if not payloads.is_abandoned(each.path):  # when we looked first it was just about to be locked
            continue
        if _explains_a_tree(examination, each.scratch_id.removesuffix(payloads.SWEPT)):
            continue
        who = f"{each.intent.holder_id} ({each.intent.purpose})" if each.intent else "a process"
        yield Finding(
            "scratch-abandoned",
            Severity.WARNING,
            each.scratch_id,
            f"{each.path} was left by {who} that is gone",
            "It takes space. Nothing in it was ever visible, or it was on its way out.",
            "remove it",
            fix=partial(_sweep, control, each.scratch_id),
        )


def _is_young_and_empty(path: Path, now: float) -> bool:
    """Whether somebody may have made it just now, and be about to lock it; if not, it takes no space."""
    if path.name.endswith(payloads.SWEPT):
        return False
    try:
        with Directory.open(path) as directory:
            return (
                not set(directory.names()) - {payloads.LOCK} and now - calls.stat(path).st_mtime < DRAFT_AGE
            )
    except (NotFound, FileNotFoundError):
        return True


def _explains_a_tree(examination: Examination, snapshot_id: str) -> bool:
    """Whether there is an unpublished tree of which nothing but this scratch tells what it is."""
    try:
        with Directory.open(examination.control.places.snapshots) as directory:
            there = directory.status(snapshot_id) is not None
    except NotFound:
        return False
    return there and examination.descriptor(snapshot_id) is None


def _sweep(control: RepositoryContext, scratch_id: str) -> None:
    if not payloads.sweep(control.places, scratch_id):
        raise LockConflict(f"somebody else is looking at the scratch {scratch_id}", scratch_id=scratch_id)


def drafts(examination: Examination) -> Iterator[Finding]:
    """Files that were to be published, and never were."""
    root = examination.control.places.root
    for name in _CONTROL:
        for path, age in _litter_below(root / name, examination.file_time, is_top=True):
            yield Finding(
                "draft-left",
                Severity.WARNING,
                str(path.relative_to(root)),
                f"{path} was written {format_duration(age)} ago and never published",
                "Its process died. Nobody ever reads it.",
                "remove it",
                fix=partial(_remove, path),
            )


def _litter_below(path: Path, now: float, *, is_top: bool = False) -> Iterator[tuple[Path, float]]:
    try:
        with Directory.open(path) as directory:
            names, below = sorted(directory.names()), set(directory.directories())
            statuses = {each: directory.status(each) for each in names if _is_litter(each)}
    except NotFound:
        return
    for name, status in statuses.items():
        if status is not None and now - status.st_mtime >= DRAFT_AGE:
            yield path / name, now - status.st_mtime
    for name in sorted(below):
        if not (is_top and name in _TREES) and not _is_litter(name):
            yield from _litter_below(path / name, now)


def _is_litter(name: str) -> bool:
    return bool(_DRAFT.fullmatch(name) or _PROBE.fullmatch(name))


def _remove(path: Path) -> None:
    from holdfast.trees import remove_tree

    with Directory.open(path.parent) as directory:
        status = directory.status(path.name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            durable.remove_in(directory, path.name)
            return
    remove_tree(path)


def commits(examination: Examination) -> Iterator[Finding]:
    """Commits to several documents whose author died after the commit point."""
    store = examination.control.store
    if not isinstance(store, FileStore):
        return
    for intent, obstacle in store.abandoned_commits():
        if obstacle is not None:
            yield Finding(
                "commit-blocked",
                Severity.ERROR,
                intent.id,
                f"the commit {intent.id} is decided, but cannot be carried out: {obstacle.message}",
                "Readers see it whole; whoever has to change one of its documents is refused.",
                f"nothing: {obstacle.hint}",
                facts={"documents": [step.name for step in intent.steps], **obstacle.facts},
            )
            continue
        yield Finding(
            "commit-unfinished",
            Severity.WARNING,
            intent.id,
            f"the commit {intent.id} is decided, but its process died before it was carried out",
            "Nothing is lost: readers see it whole, and the next one who needs its documents finishes it.",
            "carry it out",
            fix=partial(store.finish_commits, [intent]),
            facts={"documents": [step.name for step in intent.steps]},
        )


def operations(examination: Examination) -> Iterator[Finding]:
    """Operations on a worktree's directory that are pending though nobody is at them."""
    for worktree, pending in examination.operations().items():
        if not _is_dead(examination, worktree, pending):
            continue
        yield Finding(
            "operation-unfinished",
            Severity.WARNING,
            worktree,
            f"the {pending.kind.value} of {worktree}, begun at {pending.begun_at} by {pending.holder_id}, "
            "was not brought to its end",
            "Its process died. Until it is ended nobody can lock this worktree.",
            "bring it to its end, as the next command that needs the worktree does",
            fix=partial(settle, examination.control, worktree),
            facts={"operation_id": pending.operation_id, "operation": pending.kind.value},
        )


def _is_dead(examination: Examination, worktree: str, pending: Operation) -> bool:
    control = examination.control
    try:
        with payload_locked(control, *names_of(pending)):
            now = control.store.read(OPERATIONS.key(worktree))
            return now is not None and now.record.operation_id == pending.operation_id
    except LockConflict:
        return False


def collections(examination: Examination) -> Iterator[Finding]:
    """Snapshots that are doomed, and plans that are decided, though no collection runs."""
    control = examination.control
    if not _open_plans(examination):
        return
    try:
        with collector_locked(control):  # nobody else is at it, and nobody begins
            dead = _open_plans(examination)
    except LockConflict:
        return
    for plan_id, doomed in dead.items():
        yield Finding(
            "collection-unfinished",
            Severity.WARNING,
            plan_id,
            f"the collection of the plan {plan_id} was not brought to its end; {doomed} snapshots are doomed",
            "Its process died. What is doomed cannot be referred to or restored.",
            "finish it if it was decided; otherwise let the snapshots go again",
            fix=partial(end_dead_run, control, plan_id),
            facts={"doomed": doomed},
        )


def _open_plans(examination: Examination) -> dict[str, int]:
    store = examination.control.store
    found = {each.plan_id: 0 for each in kept_plans(examination.control) if each.state is PlanState.DECIDED}
    for _, document in store.scan(DESCRIPTORS):
        if document.record.doomed_by is not None:
            found[document.record.doomed_by] = found.get(document.record.doomed_by, 0) + 1
    return found


def plans(examination: Examination) -> Iterator[Finding]:
    """Plans that are too old to be run."""
    for each in kept_plans(examination.control):
        if each.is_expired(examination.now):
            yield Finding(
                "plan-expired",
                Severity.NOTE,
                each.plan_id,
                f"the plan {each.plan_id} expired at {each.expires_at}",
                "It is not run any more.",
                "forget it",
                fix=partial(forget_plan, examination.control, each.plan_id),
            )


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


def _remove_orphan(control: RepositoryContext, worktree: str) -> None:
    keys = LeaseKeys.of(worktree)

    def decide(view: View, now: float) -> Decision[None]:
        lease = view.get(keys.lease)
        there = any(view.get(key) is not None for key in worktree_keys(worktree))
        if lease is None or there:
            return Decision([], None)
        facts = {"worktree_id": worktree, "lock_id": lease.lock_id, "fencing_token": lease.fencing_token}
        return Decision([Delete(keys.lease), control.audit(view, now, "lock_removed", **facts)], None)

    control.store.transact([*keys.all(), *worktree_keys(worktree), control.trail.stream], decide)


def _release(control: RepositoryContext, worktree: str, lock_id: str) -> None:
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


def _take_out(control: RepositoryContext, worktree: str, dead: list[LeaseWaiter]) -> None:
    for each in dead:
        control.desk.leave(worktree, each.ticket)
