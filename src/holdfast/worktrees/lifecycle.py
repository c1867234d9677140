"""The life of worktrees as their users see it: created, listed, renamed, removed.

Each operation first brings to its end what a dead process has left pending on the names it is about.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.fs.names import checked_text
from holdfast.leases.service import LeaseState
from holdfast.worktrees import creating, naming, payloads, removing, renaming
from holdfast.worktrees.control import Control
from holdfast.worktrees.finishing import settle
from holdfast.worktrees.payloads import other_than_main, worktree_name
from holdfast.worktrees.records import MAIN, OPERATIONS, WORKTREES, Isolation, Operation, WorktreeConfig
from holdfast.worktrees.removing import Removed, Save
from holdfast.worktrees.usage import Usage, usage_of


class WorktreeState(NamedTuple):
    """A worktree as it stands. `is_there` says whether its directory is; `operation` is what is pending."""

    config: WorktreeConfig
    path: Path
    is_there: bool
    lease: LeaseState | None
    operation: Operation | None

    @property
    def is_shared(self) -> bool:
        """Whether nothing keeps writers apart: shown as high-risk everywhere."""
        return self.config.isolation is Isolation.SHARED


class Worktrees:
    """The worktrees of one repository."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def configs(self) -> list[WorktreeConfig]:
        """The record of each worktree, `main` first, then by name. Takes no lock."""
        found = [document.record for _, document in self._control.store.scan(WORKTREES)]
        return sorted(found, key=lambda each: (each.worktree_id != MAIN, each.worktree_id))

    def states(self) -> Iterator[WorktreeState]:
        """The state of each worktree. Takes no lock and changes nothing."""
        return map(self._state, self.configs())

    def state(self, name: str) -> WorktreeState:
        """The state of one worktree. Takes no lock and changes nothing."""
        return self._state(self._control.config(worktree_name(name)))

    def usage(self, name: str) -> Usage:
        """Which running processes work in the directory of a worktree."""
        self._control.config(worktree_name(name))
        return usage_of(payloads.directory_of(self._control, name))

    def create(
        self,
        name: str,
        *,
        snapshot: str | None = None,
        seen_from: str = MAIN,
        isolation: Isolation = Isolation.EXCLUSIVE,
        label: str | None = None,
    ) -> WorktreeConfig:
        """Make a worktree: empty, or with the content of a snapshot, which becomes its base and head.

        The snapshot may be named in all ways that there are; `seen_from` is whose head `head` is.
        """
        name = worktree_name(name)
        if name == MAIN:
            raise payloads.already_there(MAIN)
        if label is not None:
            checked_text(label, what="label")
        snapshot_id = None
        if snapshot is not None:
            snapshot_id = naming.resolve_usable(self._control, snapshot, worktree=seen_from).snapshot_id
        settle(self._control, name)
        return creating.create(self._control, creating.Wanted(name, snapshot_id, isolation, label))

    def change_name(self, old: str, new: str, *, force: bool = False) -> WorktreeConfig:
        """Give a worktree another name. An active lease is a conflict; `force` overlooks processes in it."""
        old, new = other_than_main(worktree_name(old), "renamed"), worktree_name(new)
        if new in (old, MAIN):
            raise payloads.already_there(new)
        settle(self._control, old)
        settle(self._control, new)
        self._control.config(old)
        return renaming.rename(self._control, old, new, force=force)

    def remove(
        self, name: str, *, save: Save | None, force: bool = False, lock_id: str | None = None
    ) -> Removed:
        """Remove a worktree; its snapshots stay. `save` keeps what is unsaved; without it, that is lost.

        An active lease is a conflict unless it is the caller's, named by `lock_id`; `force` overlooks
        processes that work in it.
        """
        name = other_than_main(worktree_name(name), "removed")
        settle(self._control, name)
        self._control.config(name)
        work = functools.partial(
            removing.remove, self._control, name, save=save, force=force, lock_id=lock_id
        )
        return self._control.places.reserve.relieve(work, again=lambda: self._finish_removal(name) or work())

    def _finish_removal(self, name: str) -> Removed | None:
        """Bring to its end a removal that was decided before the disk was full."""
        there = self._control.store.read(WORKTREES.key(name))
        if there is None:
            return Removed(name, None, None)
        done = settle(self._control, name)
        head = there.record.head_snapshot_id
        return None if done is None else Removed(name, done.snapshot_id or head, done.snapshot_id)

    def _state(self, config: WorktreeConfig) -> WorktreeState:
        control, name = self._control, config.worktree_id
        pending = control.store.read(OPERATIONS.key(name))
        return WorktreeState(
            config=config,
            path=control.places.payload(name),
            is_there=payloads.inode_of(payloads.status_of(control.places, name)) is not None,
            lease=control.desk.state(name),
            operation=None if pending is None else pending.record,
        )
