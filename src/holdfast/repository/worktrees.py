"""Worktrees: creating, listing, renaming and removing them.

Each operation first finishes pending operations of dead processes on the names involved (`settle`). The steps
are numbered as in `docs/protocols/worktrees.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, GitFailed, NotFound, Refused
from holdfast.fs.directory import resolved
from holdfast.fs.names import checked_text
from holdfast.leases.service import LeaseState
from holdfast.repository import exchange, payloads, worktree_changes
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    WORKTREES,
    Isolation,
    Operation,
    OperationKind,
    RepositoryContext,
    WorktreeConfig,
    operation_pending,
    require_here,
    worktree_keys,
)
from holdfast.repository.context import settle as settle
from holdfast.repository.history import require_usable, resolve_usable, usable, visible
from holdfast.repository.payloads import payload_locked, scratch, sweep, worktree_name
from holdfast.repository.usage import Usage, usage_of
from holdfast.repository.worktree_changes import KEEP_FOR, Removed, Save, Teardown
from holdfast.store.model import Create, Decision, Delete, View

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress


class CreateOptions(NamedTuple):
    """The worktree to create: empty, or with the content of a snapshot. In a git home also the commit to start at, the
    branch, whether it is isolated, and whether it `continues` on the branch that an earlier worktree of this name has
    left; or the directory of a linked worktree to adopt."""

    name: str
    snapshot_id: str | None = None
    isolation: Isolation = Isolation.EXCLUSIVE
    label: str | None = None
    commit: str | None = None
    branch: str | None = None
    adopted: Path | None = None
    isolated: bool = False
    continues: bool = False
    progress: Progress | None = None


def create(context: RepositoryContext, options: CreateOptions) -> WorktreeConfig:
    """Create a worktree; no operation may be pending on its name."""
    name, uses = options.name, [] if options.snapshot_id is None else [options.snapshot_id]
    with payload_locked(context, name), scratch(context, "create", worktree=name, uses=uses) as room:  # 1
        _check_early(context, options)
        facts = context.home.prepare_create(context, options, room)  # 2
        operation = _decide(context, options, room.scratch_id, facts)  # 3
        try:
            context.home.place(context, operation)  # 4
        except AlreadyExists:
            _undo(context, operation)
            raise payloads.path_taken(context.paths.payload(name)) from None
        except GitFailed:
            _undo(context, operation)
            raise
        return _publish(context, operation)  # 5


def finish_create(context: RepositoryContext, operation: Operation) -> WorktreeConfig | None:
    """Finish a creation that a dead process began; if its directory is not in place, undo it and return None."""
    if context.home.is_placed(operation):
        return _publish(context, operation)
    context.home.discard(context, operation)
    _undo(context, operation)
    sweep(context.paths, operation.operation_id)
    return None


def _check_early(context: RepositoryContext, options: CreateOptions) -> None:
    """Refuse early what step 3 would refuse, and a machine that may not see the files of the repository."""
    context.prove_site()
    if context.store.read(WORKTREES.key(options.name)) is not None:
        raise payloads.worktree_exists(options.name)
    if options.adopted is not None:
        return
    context.home.place_for_worktrees()
    if payloads.status_of(context.paths, options.name) is not None:
        raise payloads.path_taken(context.paths.payload(options.name))
    if options.snapshot_id is not None:
        usable(visible(context, options.snapshot_id))


def _decide(
    context: RepositoryContext, options: CreateOptions, operation_id: str, more: Mapping[str, Any]
) -> Operation:
    name, snapshot_id = options.name, options.snapshot_id
    keys = [*worktree_keys(name), *([] if snapshot_id is None else [DESCRIPTORS.key(snapshot_id)])]

    def decide(view: View, now: float) -> Decision[Operation]:
        pending = view.get(OPERATIONS.key(name))
        if pending is not None:
            raise operation_pending(pending)
        if view.get(WORKTREES.key(name)) is not None:
            raise payloads.worktree_exists(name)
        if snapshot_id is not None:
            require_usable(view, snapshot_id)
        facts = {"isolation": options.isolation, "label": options.label, "snapshot_id": snapshot_id, **more}
        operation = context.operation(OperationKind.CREATE, operation_id, name, now, **facts)
        return Decision([Create(OPERATIONS.key(name), operation)], operation)

    return context.store.transact(keys, decide).result


def _publish(context: RepositoryContext, operation: Operation) -> WorktreeConfig:
    """Commit point of a creation."""
    name = operation.worktree_id
    described = context.home.described(name)

    def decide(view: View, now: float) -> Decision[WorktreeConfig]:
        config = WorktreeConfig(
            worktree_id=name,
            isolation=operation.isolation or Isolation.EXCLUSIVE,
            created_at=format_instant(now),
            base_snapshot_id=operation.snapshot_id,
            head_snapshot_id=operation.snapshot_id,
            label=operation.label,
            **described,
        )
        facts = {"worktree_id": name, "isolation": config.isolation.value, "base_snapshot_id": operation.snapshot_id}
        entry = context.audit(view, now, "worktree_created", **facts)
        return Decision([Create(WORKTREES.key(name), config), Delete(OPERATIONS.key(name)), entry], config)

    return context.store.transact([*worktree_keys(name), context.trail.stream], decide).result


def _undo(context: RepositoryContext, operation: Operation) -> None:
    key = OPERATIONS.key(operation.worktree_id)
    context.store.transact([key], lambda view, now: Decision([Delete(key)], None))


# Finishers run under the payload locks, any number of times.
_FINISHERS: dict[OperationKind, Callable[[RepositoryContext, Operation], object]] = {
    OperationKind.CREATE: finish_create,
    OperationKind.RENAME: worktree_changes.finish_rename,
    OperationKind.REMOVE: worktree_changes.finish_remove,
    OperationKind.RESTORE: exchange.finish_restore,
}


def finish(context: RepositoryContext, pending: Operation) -> Operation | None:
    """Finish the operation of a dead process, for `settle`; None if another process was faster. Locks show that
    it is dead. They may not reach another machine, so an operation that began there raises as still pending."""
    context.prove_site()
    if context.paths.is_elsewhere(pending.identity):
        raise operation_pending(pending)
    with payload_locked(context, *names_of(pending)):
        found = context.pending(pending.worktree_id)
        if found is None or found.operation_id != pending.operation_id:
            return None
        _FINISHERS[found.kind](context, found)
        return found


def names_of(operation: Operation) -> list[str]:
    """The worktrees whose payload locks an operation requires."""
    return [operation.worktree_id, *([operation.counterpart] if operation.counterpart is not None else [])]


class WorktreeState(NamedTuple):
    """A worktree, whether its directory exists here (`exists`), its lease, the operation pending on it, and the clone
    that has the directory, if it is another one."""

    config: WorktreeConfig
    path: Path
    exists: bool
    lease: LeaseState | None
    operation: Operation | None
    clone: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether writers are unprotected from each other: marked as high-risk in every view."""
        return self.config.isolation is Isolation.SHARED


class Worktrees:
    """The worktrees of one repository."""

    def __init__(self, context: RepositoryContext) -> None:
        self._context = context

    def configs(self) -> list[WorktreeConfig]:
        """The record of each worktree, `main` first, then by name. Takes no lock."""
        found = [document.record for _, document in self._context.store.scan(WORKTREES)]
        return sorted(found, key=lambda each: (each.worktree_id != MAIN, each.worktree_id))

    def states(self) -> Iterator[WorktreeState]:
        """The state of each worktree. Takes no lock and changes nothing."""
        return map(self._state, self.configs())

    def state(self, name: str) -> WorktreeState:
        """The state of one worktree; refused if its path is a link or a file. Takes no lock and changes nothing."""
        config = self._context.config(worktree_name(name))
        payloads.refuse_replaced(self._context, config.worktree_id)
        return self._state(config)

    def _state(self, config: WorktreeConfig) -> WorktreeState:
        context, name = self._context, config.worktree_id
        is_here = config.clone == context.paths.main
        exists = is_here and payloads.inode_of(payloads.status_of(context.paths, name)) is not None
        path = context.paths.payload(name) if is_here or not config.place else Path(config.place.path)
        lease, pending = context.leases.state(name), context.pending(name)
        return WorktreeState(config, path, exists, lease, pending, None if is_here else config.clone)

    def usage(self, name: str) -> Usage:
        """The running processes that use the directory of a worktree."""
        require_here(self._context.config(worktree_name(name)), self._context.paths.main)
        return usage_of(payloads.directory_of(self._context, name))

    def create(
        self,
        name: str,
        *,
        snapshot: str | None = None,
        seen_from: str = MAIN,
        isolation: Isolation = Isolation.EXCLUSIVE,
        label: str | None = None,
        branch: str | None = None,
        isolated: bool = False,
        continues: bool = False,
        progress: Progress | None = None,
    ) -> WorktreeConfig:
        """Create a worktree: empty, or with the content of a snapshot, which becomes its base and head. `snapshot` is
        any name of it; `head` means the head of the worktree `seen_from`.

        In a git home, it begins at the tip of the branch that work lands on, which is the commit that is checked out in
        `main` unless that is the branch of a remote; or at `snapshot`, which may also name a worktree or a revision. It
        is on a new branch, or on an existing one if `branch` names it or the worktree `continues` on that of an earlier
        one of its name. With `isolated`, it is a clone that shares objects: commits there write nothing outside its
        directory.
        """
        name = self._new_name(name, label)
        if (branch is not None or isolated) and not self._context.home.has_branches:
            hint = f"Leave out --{'isolated' if branch is None else 'branch'}."
            raise Refused("this repository has no branches: it is not in a git checkout", hint=hint)
        found, commit = None, None
        try:
            found = None if snapshot is None else resolve_usable(self._context, snapshot, worktree=seen_from)
        except NotFound:
            if not self._context.home.has_branches or snapshot is None:
                raise
            commit = self._context.home.revision(snapshot)
        settle(self._context, name)
        snapshot_id = found.snapshot_id if found else None
        how: dict[str, Any] = {"branch": branch, "isolated": isolated, "continues": continues}
        options = CreateOptions(name, snapshot_id, isolation, label, commit, progress=progress, **how)
        return create(self._context, options)

    def below(self, name: str) -> tuple[list[Path], list[Path]]:
        """The contents of a worktree's directory that no snapshot of it has: other worktrees, and repositories."""
        require_here(self._context.config(worktree_name(name)), self._context.paths.main)
        return self._context.home.below(name)

    def uncommitted(self, name: str | None = None) -> str:
        """The uncommitted paths, or a few of them, in a worktree, by default the main checkout. Empty in a plain home,
        and for a name that is not that of a worktree here."""
        context, name = self._context, name or self._context.paths.main
        known = next((each for each in self.configs() if each.worktree_id == name), None)
        return context.home.uncommitted(name) if known is not None and known.clone == context.paths.main else ""

    def adopt(
        self,
        path: Path,
        *,
        name: str | None = None,
        isolation: Isolation = Isolation.EXCLUSIVE,
        label: str | None = None,
    ) -> WorktreeConfig:
        """Adopt a linked git worktree, which stays where it is, as a worktree of this repository."""
        if not self._context.home.has_branches:
            raise Refused("this repository is not in a git checkout, so it cannot adopt a git worktree")
        path = resolved(path)
        name = self._new_name(path.name if name is None else name, label)
        settle(self._context, name)
        return create(self._context, CreateOptions(name, None, isolation, label, adopted=path))

    def _new_name(self, name: str, label: str | None) -> str:
        name = worktree_name(name, new=True)
        if name == MAIN:
            raise payloads.worktree_exists(MAIN)
        if label is not None:
            checked_text(label, what="label")
        return name

    def change_name(self, old: str, new: str, *, force: bool = False) -> WorktreeConfig:
        """Rename a worktree. An active lease is a conflict; `force` ignores processes that use it."""
        old, new = worktree_name(old), worktree_name(new, new=True)
        if new in (old, MAIN):
            raise payloads.worktree_exists(new)
        settle(self._context, old)
        settle(self._context, new)
        payloads.require_changeable(self._context, old, "renamed")
        return worktree_changes.rename(self._context, old, new, force=force)

    def remove(
        self,
        name: str,
        *,
        save: Save | None,
        teardown: Teardown | None = None,
        force: bool = False,
        lock_id: str | None = None,
        keep_for: float = KEEP_FOR,
    ) -> Removed:
        """Remove a worktree; its snapshots stay. `teardown` runs first, under the lease. `save` saves unsaved work;
        without it, that work is deleted. An active lease is a conflict unless it is the caller's (`lock_id`); `force`
        ignores processes that use the directory, repositories in it, and `git worktree lock`. A pin protects the last
        snapshot for `keep_for` seconds."""
        context, name = self._context, worktree_name(name)
        settle(context, name)
        payloads.require_changeable(context, name, "removed")
        work = functools.partial(
            worktree_changes.remove,
            context,
            name,
            save=save,
            teardown=teardown,
            force=force,
            lock_id=lock_id,
            keep_for=keep_for,
        )
        return context.paths.reserve.relieve(work, again=lambda: self._finish_remove(name) or work())

    def forget(self, name: str) -> list[str]:
        """Forget a worktree of another clone that is lost, or all worktrees of that clone if it is its checkout.
        Returns their names. Refused for the clone `main` and for worktrees of this clone; a lease must have expired."""
        config, here = self._context.config(worktree_name(name)), self._context.paths.main
        if config.clone in (here, MAIN):
            clone = "this clone" if config.clone == here else f"the clone {MAIN}, which every repository has"
            hint = "Leave out --lost." if config.clone == here else "Restore its directory from a backup."
            raise Refused(f"{name} is in {clone}", hint=hint, worktree=name)
        if config.clone == name:
            return worktree_changes.forget_clone(self._context, name)
        worktree_changes.forget_worktree(self._context, name)
        return [name]

    def _finish_remove(self, name: str) -> Removed | None:
        """Finish a removal that was decided before the disk was full."""
        config = self._context.store.read(WORKTREES.key(name))
        if config is None:
            return Removed(name, None, None)
        done = settle(self._context, name)
        head = config.record.head_snapshot_id
        return None if done is None else Removed(name, done.snapshot_id or head, done.snapshot_id)
