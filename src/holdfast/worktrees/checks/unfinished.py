"""What was decided by processes that are gone: commits, operations on directories, collections, plans."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from holdfast.errors import LockConflict
from holdfast.store.files import FileStore
from holdfast.worktrees.collecting import collector_locked, end_dead_run
from holdfast.worktrees.doctor import Examination, Finding, Severity
from holdfast.worktrees.finishing import names_of, settle
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.planning import forget_plan
from holdfast.worktrees.planning import plans as kept_plans
from holdfast.worktrees.records import DESCRIPTORS, OPERATIONS, Operation
from holdfast.worktrees.retention import PlanState


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
