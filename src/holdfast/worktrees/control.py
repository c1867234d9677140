"""What every operation on a repository needs: its directories, its store, its audit trail, its leases."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import Failure, LockConflict, NotFound, UsageFailure
from holdfast.fs.reserve import Reserve
from holdfast.leases.service import LeaseService
from holdfast.locks.identity import Holder
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Append, Family, Store, View
from holdfast.worktrees.records import (
    MAIN,
    OPERATIONS,
    WORKTREES,
    Isolation,
    Operation,
    OperationKind,
    WorktreeConfig,
)


class Places(NamedTuple):
    """Where a repository keeps what is not a document. All of it is on one filesystem."""

    root: Path

    @property
    def worktrees(self) -> Path:
        return self.root / "worktrees"

    @property
    def snapshots(self) -> Path:
        return self.root / ".jvs" / "snapshots"

    @property
    def remnants(self) -> Path:
        """What is left of trees whose snapshots are gone: the directories that other snapshots need."""
        return self.root / ".jvs" / "remnants"

    @property
    def quarantine(self) -> Path:
        """Trees of which nobody knows where they come from, put aside for people to look at."""
        return self.root / ".jvs" / "quarantine"

    @property
    def scratch(self) -> Path:
        """Trees in the making, each in a directory of its own; see `scratch`."""
        return self.root / ".jvs" / "tmp"

    @property
    def caches(self) -> Path:
        """What can be deleted at any time, and costs only time then."""
        return self.root / ".jvs" / "cache"

    @property
    def guards(self) -> Path:
        return self.root / ".jvs" / "guards"

    @property
    def reserve(self) -> Reserve:
        """What is set aside for the day when the disk is full."""
        return Reserve(self.root / ".jvs" / "reserve", caches=self.caches)

    def payload(self, worktree: str) -> Path:
        """The directory that the users of a worktree work in: nothing of ours is ever in it."""
        return self.root / MAIN if worktree == MAIN else self.worktrees / worktree

    def tree(self, snapshot_id: str) -> Path:
        """The directory of a snapshot: `payload/`, `manifest` and `.READY`."""
        return self.snapshots / snapshot_id

    def stat_cache(self, worktree: str) -> Path:
        return self.caches / f"{worktree}.stat"


class Control(NamedTuple):
    """One repository, opened. It is handed to every part; none of them opens anything itself."""

    places: Places
    store: Store
    trail: AuditTrail
    desk: LeaseService

    @property
    def holder(self) -> Holder:
        return self.desk.holder

    def audit(self, view: View, now: float, event: str, **facts: object) -> Append:
        """The change that records what a transaction does; it must name `self.trail.stream`. Pure."""
        return self.trail.entry(view, now, event, actor=self.holder.holder_id, facts=facts)

    def config(self, worktree: str) -> WorktreeConfig:
        """The record of a worktree as of now; `NotFound` if there is none. Takes no lock."""
        document = self.store.read(WORKTREES.key(worktree))
        if document is None:
            raise no_worktree(worktree, names_in(self.store, WORKTREES))
        return document.record


def new_snapshot_id() -> str:
    """An id that no other snapshot has; random from the start, so that a few characters name it."""
    return secrets.token_hex(8)


def names_in(store: Store, family: Family[Any]) -> list[str]:
    """The names of all records of a kind, for a hint; none if some of them cannot be read."""
    with contextlib.suppress(Failure):
        return [name for name, _ in store.scan(family)]
    return []


def no_worktree(worktree: str, known: Iterable[str] = ()) -> NotFound:
    """What is raised for a worktree that is not there; of those that are known, one may be meant."""
    return NotFound(
        f"there is no worktree {worktree}",
        hint=meant(worktree, known) + "See 'holdfast worktree list' for those that are there.",
        worktree=worktree,
    )


def meant(name: str, known: Iterable[str]) -> str:
    """A question that helps who has mistyped a name; nothing if no known one is like it."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), n=1)
    return f"Did you mean {similar[0]}? " if similar else ""


def settled_config(view: View, worktree: str) -> WorktreeConfig:
    """The record of a worktree to which nothing is being done; else raise. Pure, for decide functions."""
    pending = view.get(OPERATIONS.key(worktree))
    if pending is not None:
        raise being_changed(pending)
    config = view.get(WORKTREES.key(worktree))
    if config is None:
        raise no_worktree(worktree)
    return config


def may_be_leased(view: View, worktree: str) -> None:
    """Refuse the lease of a worktree that is not there, is being changed, or has no leases. Pure."""
    if settled_config(view, worktree).isolation is Isolation.SHARED:
        raise UsageFailure(
            f"{worktree} is a shared worktree (high-risk): anybody may write at any time, "
            "so there is no lock to hold",
            hint="Write without a lock, or use an exclusive worktree: 'holdfast worktree create NAME'.",
            worktree=worktree,
        )


_DOING = {
    OperationKind.CREATE: "created",
    OperationKind.RENAME: "renamed",
    OperationKind.REMOVE: "removed",
    OperationKind.RESTORE: "restored in place",
}


def being_changed(operation: Operation) -> LockConflict:
    """What to tell who meets an operation that is not at its end."""
    return LockConflict(
        f"{operation.worktree_id} is being {_DOING[operation.kind]} by {operation.holder_id} "
        f"since {operation.begun_at}",
        hint="Try again in a moment. If its process has died, the next command finishes its work.",
        worktree=operation.worktree_id,
        operation=operation.kind.value,
        operation_id=operation.operation_id,
        holder_id=operation.holder_id,
        since=operation.begun_at,
    )
