"""Checks for the leftovers of dead processes, which nobody misses."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from holdfast import findings
from holdfast.clock import Now, format_duration
from holdfast.errors import LockConflict, LockNotHeld, NotFound
from holdfast.findings import Finding
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.leases.rules import WAITER_TTL, Lease, LeaseKeys, LeaseQueue, LeaseWaiter
from holdfast.locks.identity import Liveness, liveness
from holdfast.repository import payloads
from holdfast.repository.context import DESCRIPTORS, OPERATIONS, WORKTREES, Operation, RepositoryContext, worktree_keys
from holdfast.repository.doctor import Examination, status_of
from holdfast.repository.gc import collector_locked, end_dead_run
from holdfast.repository.gc_plan import forget_plan
from holdfast.repository.gc_plan import plans as kept_plans
from holdfast.repository.payloads import payload_locked
from holdfast.repository.retention import PlanState
from holdfast.repository.worktrees import names_of, settle
from holdfast.store.model import Decision, Delete, Family, StructCodec, View

DRAFT_AGE = 3600.0
"""A draft lives for milliseconds. If its process was merely stopped for longer, its commit fails when it goes
on, as on a full disk: removing the draft loses nothing."""

_DRAFT = re.compile(r"\..+-[0-9a-f]{12}\.tmp", re.ASCII | re.DOTALL)
_PROBE = re.compile(r"\.holdfast-probe-[0-9a-f]{12}", re.ASCII)
_CONTROL = (".jvs", ".holdfast", ".jit", "ledger")  # where drafts are written
_TREES = ("snapshots", "remnants", "quarantine", "tmp")  # these hold users' content, or scratches

LEASES: Family[Lease] = Family("jvs/leases", StructCodec(Lease))
QUEUES: Family[LeaseQueue] = Family("jvs/queues", StructCodec(LeaseQueue))


def scratches(examination: Examination) -> Iterator[Finding]:
    """Scratches whose process is gone, and that no pending operation needs."""
    context = examination.context
    left = list(payloads.abandoned(context.places))
    needed = {each.operation_id for each in examination.operations().values()}  # read second: it may end
    for each in left:
        if each.scratch_id in needed or _is_young_and_empty(each.path, examination.now):
            continue
        if not payloads.is_abandoned(each.path):  # it was about to be locked when it was listed
            continue
        if _explains_a_tree(examination, each.scratch_id.removesuffix(payloads.SWEPT)):
            continue
        holder = f"{each.intent.holder_id} ({each.intent.purpose})" if each.intent else "a process"
        yield findings.warning(
            "scratch-abandoned",
            each.scratch_id,
            f"{each.path} was left by {holder} that is gone",
            "It takes space. Nothing in it was ever visible, or it was being removed.",
            "remove it",
            fix=partial(_sweep, context, each.scratch_id),
        )


def _is_young_and_empty(path: Path, now: float) -> bool:
    """Whether a process may have created it just now, and be about to lock it. It takes no space."""
    if path.name.endswith(payloads.SWEPT):
        return False
    try:
        with Directory.open(path) as directory:
            return not set(directory.names()) - {payloads.LOCK} and now - calls.stat(path).st_mtime < DRAFT_AGE
    except (NotFound, FileNotFoundError):
        return True


def _explains_a_tree(examination: Examination, snapshot_id: str) -> bool:
    """Whether this scratch is all that tells what an unpublished tree is."""
    tree = examination.context.places.tree(snapshot_id)
    return status_of(tree) is not None and examination.descriptor(snapshot_id) is None


def _sweep(context: RepositoryContext, scratch_id: str) -> None:
    if not payloads.sweep(context.places, scratch_id):
        raise LockConflict(f"the scratch {scratch_id} is in use", scratch_id=scratch_id)


def drafts(examination: Examination) -> Iterator[Finding]:
    """Files that were never published."""
    root = examination.context.places.root
    for name in _CONTROL:
        for path, age in _litter_below(root / name, examination.file_time, is_top=True):
            yield findings.warning(
                "draft-left",
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
    from holdfast.trees.walker import remove_tree

    with Directory.open(path.parent) as directory:
        status = directory.status(path.name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            durable.remove_in(directory, path.name)
            return
    remove_tree(path)


def commits(examination: Examination) -> Iterator[Finding]:
    """Commits to several documents whose process died after the commit point."""
    files = examination.context.store.files
    if files is None:
        return
    for commit in files.unfinished_commits():
        obstacle = commit.obstacle
        if obstacle is not None:
            yield Finding(
                "commit-blocked",
                commit.id,
                f"the commit {commit.id} is decided, but cannot be carried out: {obstacle.message}",
                "Readers see it whole; changes of its documents are refused.",
                f"nothing: {obstacle.hint}",
                facts={"documents": list(commit.documents), **obstacle.facts},
            )
            continue
        yield findings.warning(
            "commit-unfinished",
            commit.id,
            f"the commit {commit.id} is decided, but its process died before it was carried out",
            "Nothing is lost: readers see it whole, and the next change of its documents finishes it.",
            "carry it out",
            fix=partial(files.finish_commits, [commit]),
            facts={"documents": list(commit.documents)},
        )


def operations(examination: Examination) -> Iterator[Finding]:
    """Pending operations on a worktree's directory that no process works on."""
    for worktree, pending in examination.operations().items():
        if not _is_dead(examination, worktree, pending):
            continue
        yield findings.warning(
            "operation-unfinished",
            worktree,
            f"the {pending.kind.value} of {worktree}, begun at {pending.begun_at} by {pending.holder_id}, "
            "was not finished",
            "Its process died. Until it is finished nobody can lease this worktree.",
            "finish it, as the next command that needs the worktree does",
            fix=partial(settle, examination.context, worktree),
            facts={"operation_id": pending.operation_id, "operation": pending.kind.value},
        )


def _is_dead(examination: Examination, worktree: str, pending: Operation) -> bool:
    context = examination.context
    try:
        with payload_locked(context, *names_of(pending)):
            now = context.store.read(OPERATIONS.key(worktree))
            return now is not None and now.record.operation_id == pending.operation_id
    except LockConflict:
        return False


def collections(examination: Examination) -> Iterator[Finding]:
    """Snapshots that are marked for deletion, and plans that are decided, while no collection runs."""
    context = examination.context
    if not _open_plans(examination):
        return
    try:
        with collector_locked(context):  # no collection runs, and none begins
            dead = _open_plans(examination)
    except LockConflict:
        return
    for plan_id, marked in dead.items():
        yield findings.warning(
            "collection-unfinished",
            plan_id,
            f"the collection of the plan {plan_id} was not finished; {marked} snapshots are marked",
            "Its process died. Marked snapshots cannot be referred to or restored.",
            "finish it if it was decided; otherwise unmark the snapshots",
            fix=partial(end_dead_run, context, plan_id),
            facts={"doomed": marked},
        )


def _open_plans(examination: Examination) -> dict[str, int]:
    store = examination.context.store
    found = {each.plan_id: 0 for each in kept_plans(examination.context) if each.state is PlanState.DECIDED}
    for _, document in store.scan(DESCRIPTORS):
        if document.record.doomed_by is not None:
            found[document.record.doomed_by] = found.get(document.record.doomed_by, 0) + 1
    return found


def plans(examination: Examination) -> Iterator[Finding]:
    """Plans that are too old to be run."""
    for each in kept_plans(examination.context):
        if each.is_expired(examination.now):
            yield findings.note(
                "plan-expired",
                each.plan_id,
                f"the plan {each.plan_id} expired at {each.expires_at}",
                "It can no longer be run.",
                "forget it",
                fix=partial(forget_plan, examination.context, each.plan_id),
            )


def leases(examination: Examination) -> Iterator[Finding]:
    """Expired leases, and leases of worktrees that do not exist."""
    context = examination.context
    for worktree, _ in context.store.scan(LEASES):
        orphaned = _has_no_worktree(examination, worktree)
        state = context.desk.state(worktree)  # read second: a rename takes the lease along
        if state is None:
            continue
        if orphaned:
            yield findings.warning(
                "lock-orphaned",
                worktree,
                f"{worktree} is leased by {state.lease.holder_id}, but there is no such worktree",
                "It protects nothing. A new worktree of this name could not be leased.",
                "remove the lease; its token is never granted again",
                fix=partial(_remove_orphan, context, worktree),
                facts={"lock_id": state.lease.lock_id},
            )
        elif state.expired:
            yield findings.note(
                "lock-expired",
                worktree,
                f"the lease of {worktree}, held by {state.lease.holder_id} ({state.liveness.value}), "
                f"expired {format_duration(-state.time_left)} ago",
                "Its holder did not renew it. The next one to acquire the lease takes it over.",
                "release it",
                fix=partial(_release, context, worktree, state.lease.lock_id),
                facts={"lock_id": state.lease.lock_id, "liveness": state.liveness.value},
            )


def _has_no_worktree(examination: Examination, worktree: str) -> bool:
    store = examination.context.store
    return store.read(OPERATIONS.key(worktree)) is None and store.read(WORKTREES.key(worktree)) is None


def _remove_orphan(context: RepositoryContext, worktree: str) -> None:
    keys = LeaseKeys.of(worktree)

    def decide(view: View, now: float) -> Decision[None]:
        lease = view.get(keys.lease)
        if lease is None or any(view.get(key) is not None for key in worktree_keys(worktree)):
            return Decision([], None)
        facts = {"worktree_id": worktree, "lock_id": lease.lock_id, "fencing_token": lease.fencing_token}
        return Decision([Delete(keys.lease), context.audit(view, now, "lock_removed", **facts)], None)

    context.store.transact([*keys.all(), *worktree_keys(worktree), context.trail.stream], decide)


def _release(context: RepositoryContext, worktree: str, lock_id: str) -> None:
    with contextlib.suppress(LockNotHeld):  # taken over meanwhile
        context.desk.release(worktree, lock_id)


def waiters(examination: Examination) -> Iterator[Finding]:
    """Waiters in queues whose processes are gone."""
    context = examination.context
    for worktree, document in context.store.scan(QUEUES):
        now = context.desk.reading().at(examination.now)
        dead = [each for each in document.record.waiters if _is_gone(each, now)]
        if dead:
            yield findings.note(
                "waiter-dead",
                worktree,
                f"waiters for {worktree} are gone: {', '.join(each.holder_id for each in dead)}",
                "They are passed over when the lease is granted.",
                "remove them from the queue",
                fix=partial(_remove_waiters, context, worktree, dead),
            )


def _is_gone(waiter: LeaseWaiter, now: Now) -> bool:
    holder = waiter.identity.holder(waiter.holder_id)
    return waiter.unseen_for(now) >= WAITER_TTL or (holder is not None and liveness(holder) is Liveness.DEAD)


def _remove_waiters(context: RepositoryContext, worktree: str, dead: list[LeaseWaiter]) -> None:
    for each in dead:
        context.desk.leave(worktree, each.ticket)
