"""Checks for the leftovers of dead processes."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from holdfast import findings
from holdfast.clock import Now, format_ago, format_duration
from holdfast.errors import LockConflict, LockNotHeld, NotFound
from holdfast.findings import Finding
from holdfast.fs import durable
from holdfast.fs.directory import Directory, status_at
from holdfast.fs.names import counted, is_draft_name
from holdfast.leases.rules import NAMED_LEASES, WAITER_TTL, WORKTREE_LEASES, LeaseKeys, LeaseWaiter
from holdfast.leases.service import LeaseService, LeaseState
from holdfast.locks.identity import Liveness, liveness
from holdfast.repository import payloads, scratch_worktrees
from holdfast.repository.context import OPERATIONS, WORKTREES, Operation, RepositoryContext, worktree_keys
from holdfast.repository.doctor import Examination
from holdfast.repository.gc import collector_locked, end_dead_runs, open_runs
from holdfast.repository.gc_plan import forget_plan
from holdfast.repository.gc_plan import plans as kept_plans
from holdfast.repository.payloads import payload_locked
from holdfast.repository.worktrees import names_of, settle
from holdfast.store.model import Decision, Delete, View

DRAFT_AGE = 3600.0
"""A draft normally exists for milliseconds. If a process that was suspended for longer than this continues, its commit
fails as on a full disk: removing the draft loses nothing."""

_PROBE = re.compile(r"\.holdfast-probe-[0-9a-f]{12}", re.ASCII)
_CONTROL = (".jvs", ".holdfast", ".jit", "ledger")  # where drafts are written
_MOST_LEVELS = 9  # records are not deeper
_TREES = ("snapshots", "remnants", "quarantine", "tmp")  # users' content, and scratch directories


def scratches(examination: Examination) -> Iterator[Finding]:
    """Scratch directories whose process is gone and that no pending operation needs."""
    context = examination.context
    left = list(payloads.abandoned(context.paths))
    needed = {each.operation_id for each in examination.operations().values()}  # read second: an operation may end
    for each in left:
        if each.scratch_id in needed or _is_young_and_empty(each.path, examination.now):
            continue
        if not payloads.is_abandoned(each.path):  # its process was about to lock it when it was listed
            continue
        snapshot_id = each.scratch_id.removesuffix(payloads.SWEPT)
        if status_at(context.paths.tree(snapshot_id)) is not None and examination.descriptor(snapshot_id) is None:
            continue  # nothing else explains the unpublished tree
        holder = f"{each.intent.holder_id} ({each.intent.purpose})" if each.intent else "a process"
        message = f"{each.path} was left by {holder}, which is gone"
        yield findings.of("scratch-abandoned", each.scratch_id, message, partial(_sweep, context, each.scratch_id))
    for place in scratch_worktrees.abandoned(context.paths):
        message = f"{place.path} was left by the checks of a process that is gone"
        yield findings.of("scratch-abandoned", place.name, message, partial(scratch_worktrees.remove_unused, place))


def _is_young_and_empty(path: Path, now: float) -> bool:
    """Whether a process may have just created the scratch directory, and be about to lock it."""
    if path.name.endswith(payloads.SWEPT):
        return False
    try:
        with Directory.open(path) as directory:
            if set(directory.names()) - {payloads.LOCK}:
                return False
    except NotFound:
        return True
    status = status_at(path)
    return status is None or now - status.st_mtime < DRAFT_AGE


def _sweep(context: RepositoryContext, scratch_id: str) -> None:
    if not payloads.sweep(context.paths, scratch_id):
        raise LockConflict(f"the scratch directory {scratch_id} is in use", scratch_id=scratch_id)


def drafts(examination: Examination) -> Iterator[Finding]:
    """Drafts that were never published, and leftovers of probes of the filesystem."""
    root, files = examination.context.paths.root, examination.context.store.files
    needed = tuple(f"-{each.drafts}.tmp" for each in (files.unfinished_commits() if files else ()))
    for name in _CONTROL:
        for path, age in _litter_below(root / name, examination.file_time, is_top=True):
            if path.name.endswith(needed):
                continue  # the draft shows whether a document of the commit was published
            message = f"{path} was written {format_duration(age)} ago and never published"
            yield findings.of("draft-left", str(path.relative_to(root)), message, partial(_remove, path))


def _litter_below(
    path: Path, now: float, *, is_top: bool = False, levels: int = _MOST_LEVELS
) -> Iterator[tuple[Path, float]]:
    try:
        with Directory.open(path) as directory:
            names, below = sorted(directory.names()), set(directory.directories())
            probes = {each for each in below if is_top and _PROBE.fullmatch(each)}
            # Only files are drafts: a directory has the name of something, such as a worktree.
            drafts = {each for each in names if each not in below and is_draft_name(each)}
            statuses = {each: directory.status(each) for each in sorted(drafts | probes)}
    except NotFound:
        return
    for name, status in statuses.items():
        if status is not None and now - status.st_mtime >= DRAFT_AGE:
            yield path / name, now - status.st_mtime
    for name in sorted(below - probes):
        if levels and not (is_top and name in _TREES):
            yield from _litter_below(path / name, now, levels=levels - 1)


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
        message = f"the commit {commit.id} is decided, but its process died before it was applied"
        fix, documents = partial(files.finish_commits, [commit]), list(commit.documents)
        yield findings.of("commit-unfinished", commit.id, message, fix, documents=documents)
    for path in files.changes_set_aside():
        message = f"{path} has changes that were not applied, because another program had changed the same documents"
        yield findings.of("commit-conflict", Path(path).stem, message, path=path)


def operations(examination: Examination) -> Iterator[Finding]:
    """Pending operations on a worktree's directory whose process is gone."""
    for worktree, pending in examination.operations().items():
        if pending.clone == examination.context.clone and _is_dead(examination, worktree, pending):
            kind, begun = pending.kind.value, f"begun {format_ago(pending.begun_at)} by {pending.holder_id}"
            message = f"the {kind} of {worktree}, {begun}, was not finished"
            fix, facts = partial(settle, examination.context, worktree), {"operation_id": pending.operation_id}
            yield findings.of("operation-unfinished", worktree, message, fix, **facts, operation=kind)


def _is_dead(examination: Examination, worktree: str, pending: Operation) -> bool:
    context = examination.context
    if context.paths.is_elsewhere(pending.identity):
        return False
    try:
        with payload_locked(context, *names_of(pending)):
            now = context.store.read(OPERATIONS.key(worktree))
            return now is not None and now.record.operation_id == pending.operation_id
    except LockConflict:
        return False


def collections(examination: Examination) -> Iterator[Finding]:
    """Unfinished collections: snapshots marked for deletion, and decided plans, although no collection runs."""
    context = examination.context
    if not open_runs(context):
        return
    try:
        with collector_locked(context):  # no collection runs, and none begins
            dead = open_runs(context)
    except LockConflict:
        return
    for plan_id, marked in dead.items():
        message = f"the collection of the plan {plan_id} was not finished; {counted(len(marked), 'snapshot')} marked"
        yield findings.of("collection-unfinished", plan_id, message, partial(_end_runs, context), doomed=len(marked))


def _end_runs(context: RepositoryContext) -> None:
    with collector_locked(context):
        end_dead_runs(context)


def plans(examination: Examination) -> Iterator[Finding]:
    """Plans that are too old to be run."""
    for each in kept_plans(examination.context):
        if each.is_expired(examination.now):
            message = f"the plan {each.plan_id} expired at {each.expires_at}"
            fix = partial(forget_plan, examination.context, each.plan_id)
            yield findings.of("plan-expired", each.plan_id, message, fix)


def leases(examination: Examination) -> Iterator[Finding]:
    """Expired leases, and leases of worktrees that do not exist."""
    context, store = examination.context, examination.context.store
    for worktree, _ in store.scan(WORKTREE_LEASES.leases):
        orphaned = store.read(OPERATIONS.key(worktree)) is None and store.read(WORKTREES.key(worktree)) is None
        state = context.leases.state(worktree)  # read second: a rename takes the lease along
        if state is None:
            continue
        lock_id, holder = state.lease.lock_id, state.lease.holder_id
        if orphaned:
            message = f"{worktree} is leased by {holder}, but there is no such worktree"
            yield findings.of(
                "lock-orphaned", worktree, message, partial(_remove_orphan, context, worktree), lock_id=lock_id
            )
        elif state.expired:
            yield _expired(context.leases, state)
    named = context.leases.of_names()
    yield from (_expired(named, state) for state in named.states() if state.expired)


def _expired(service: LeaseService, state: LeaseState) -> Finding:
    lease, alive, ago = state.lease, state.liveness.value, format_duration(-state.time_left)
    message = f"the lease of {lease.subject}, held by {lease.holder_id} ({alive}), expired {ago} ago"
    fix = partial(_release, service, lease.subject, lease.lock_id)
    return findings.of("lock-expired", lease.subject, message, fix, lock_id=lease.lock_id, liveness=alive)


def _remove_orphan(context: RepositoryContext, worktree: str) -> None:
    keys = LeaseKeys.of(worktree)

    def decide(view: View, now: float) -> Decision[None]:
        lease = view.get(keys.lease)
        if lease is None or any(view.get(key) is not None for key in worktree_keys(worktree)):
            return Decision([], None)
        facts = {"worktree_id": worktree, "lock_id": lease.lock_id, "fencing_token": lease.fencing_token}
        return Decision([Delete(keys.lease), context.audit(view, now, "lock_removed", **facts)], None)

    context.store.transact([*keys.all(), *worktree_keys(worktree), context.trail.stream], decide)


def _release(service: LeaseService, subject: str, lock_id: str) -> None:
    with contextlib.suppress(LockNotHeld):  # taken over meanwhile
        service.release(subject, lock_id)


def waiters(examination: Examination) -> Iterator[Finding]:
    """Waiters in queues whose processes are gone."""
    context = examination.context
    now = context.leases.reading().at(examination.now)
    kinds = (WORKTREE_LEASES, context.leases), (NAMED_LEASES, context.leases.of_names())
    for kind, service in kinds:
        for subject, document in context.store.scan(kind.queues):
            dead = [each for each in document.record.waiters if _is_gone(each, now)]
            if dead:
                message = f"waiters for {subject} are gone: {', '.join(each.holder_id for each in dead)}"
                yield findings.of("waiter-dead", subject, message, partial(_remove_waiters, service, subject, dead))


def _is_gone(waiter: LeaseWaiter, now: Now) -> bool:
    holder = waiter.identity.holder(waiter.holder_id)
    return waiter.unseen_for(now) >= WAITER_TTL or (holder is not None and liveness(holder) is Liveness.DEAD)


def _remove_waiters(service: LeaseService, subject: str, dead: list[LeaseWaiter]) -> None:
    for each in dead:
        service.leave(subject, each.ticket)
