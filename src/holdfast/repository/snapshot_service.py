"""`Snapshots`: taking, naming, comparing, verifying, restoring and keeping the snapshots of a repository."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import AlreadyExists
from holdfast.fs.names import checked_text
from holdfast.repository import compare, history, restore, snapshots
from holdfast.repository.compare import Comparison
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    WORKTREES,
    Descriptor,
    Pin,
    Proof,
    Reference,
    RepositoryContext,
    WorktreeConfig,
    fenced,
    settle,
)
from holdfast.repository.history import History
from holdfast.repository.payloads import scratch
from holdfast.repository.restore import Restored, RestoreOptions
from holdfast.repository.snapshots import DEFAULT_OPTIONS, MOST_LISTED, SnapshotOptions
from holdfast.repository.usage import User, standing_in
from holdfast.repository.worktree_changes import KEEP_FOR
from holdfast.repository.worktrees import Worktrees
from holdfast.store.model import Decision, View

if TYPE_CHECKING:
    from holdfast.repository.patches import Patch
    from holdfast.repository.transfer import FetchResult, Pushed
    from holdfast.trees.manifest import ManifestEntry
    from holdfast.trees.repair import RepairedFile
    from holdfast.trees.results import Materialised, Problem
    from holdfast.trees.scan import Progress


class RestorePlan(NamedTuple):
    """A planned restore in place. It undoes `comparison.changes`, from the snapshot to the worktree. With `keeps`, the
    content of the worktree becomes a snapshot first. The processes in `standing` would stay in the old directory."""

    source: Descriptor
    comparison: Comparison
    keeps: bool
    standing: tuple[User, ...] = ()


class Snapshots:
    """The snapshots of one repository."""

    def __init__(self, context: RepositoryContext) -> None:
        self._context = context

    def take(self, worktree: str, proof: Proof | None, options: SnapshotOptions = DEFAULT_OPTIONS) -> Descriptor:
        """Take a snapshot of a worktree; see `snapshots.snapshot`."""
        checked_text(options.note, what="note")
        with fenced(self._context, worktree, proof):
            settle(self._context, worktree)
            return snapshots.snapshot(self._context, worktree, proof, options)

    def take_if_changed(
        self, worktree: str, proof: Proof | None, options: SnapshotOptions = DEFAULT_OPTIONS
    ) -> Descriptor | None:
        """Like `take`, but returns None if the worktree equals its head."""
        with fenced(self._context, worktree, proof):
            if not restore.differs_from_head(self._context, self._context.config(worktree)):
                self._context.home.fetch_work(worktree)
                return None
            return snapshots.snapshot(self._context, worktree, proof, options)

    # --- Reading: takes no lock and changes nothing ------------------------------------------------

    def named(self, text: str, *, seen_from: str = MAIN) -> Descriptor:
        """The snapshot that `text` names: an id or a unique prefix of it, a reference, `head`, `head~2`."""
        return history.resolve(self._context, text, worktree=seen_from)

    def line(self, worktree: str, *, limit: int | None = None) -> History:
        """The history of a worktree, newest first."""
        return history.worktree_history(self._context, worktree, limit=limit)

    def everything(self, *, limit: int | None = None) -> History:
        """All snapshots, newest first, children before parents."""
        return history.all_history(self._context, limit=limit)

    def marks(self, snapshot_id: str) -> history.Marks:
        """The heads, references and pins of a snapshot."""
        return history.marks_of(self._context).get(snapshot_id, history.Marks())

    def status(self, worktree: str) -> Comparison:
        """The changes in a worktree since its head."""
        return compare.status(self._context, worktree)

    def patches(self, comparison: Comparison, *, steps: int = sys.maxsize) -> Iterator[Patch]:
        """The differing lines of every file and symbolic link whose content differs. Once `steps` are used up, every
        other file counts as too large."""
        from holdfast.repository.patches import patches

        return patches(self._context, comparison, steps=steps)

    def entries(self, snapshot_id: str) -> Iterator[ManifestEntry]:
        """The entries of a snapshot's manifest."""
        return self._context.home.entries(snapshot_id)

    def files_of_head(self, worktree: str) -> int | None:
        """The number of files in the head of a worktree; None if it has no head."""
        head = self._context.config(worktree).head_snapshot_id
        found = self._context.descriptor(head) if head else None
        return None if found is None else found.files

    def compare(self, worktree: str, old: str | None = None, new: str | None = None) -> Comparison:
        """The changes between two snapshots, or from a snapshot to the worktree."""
        return compare.compare(self._context, worktree, old, new)

    def verify(self, snapshot_id: str) -> Iterator[Problem]:
        """Read a whole snapshot and yield its problems. Raises `SnapshotCollected` if it is deleted meanwhile."""
        for problem in self._context.home.verify(history.visible(self._context, snapshot_id)):
            history.refuse_if_collected(self._context, snapshot_id)
            yield problem

    def repair(self, snapshot_ids: Iterable[str]) -> list[RepairedFile]:
        """Bring back lost and changed content of snapshots from other snapshots and the worktrees, where these have it.

        Raises `LockConflict` while a garbage collection runs. `verify` tells what is still damaged.
        """
        from holdfast.repository.gc import collector_locked, trees_locked

        context, ids = self._context, list(snapshot_ids)
        locked = collector_locked if context.home.has_branches else trees_locked
        with locked(context), scratch(context, "repair") as room:
            done = context.home.repair(context, ids, room)

        def decide(view: View, now: float) -> Decision[None]:
            facts = {"snapshot_ids": ids, "files": [each.path for each in done[:MOST_LISTED]]}
            return Decision([context.audit(view, now, "snapshots_repaired", **facts)], None)

        if done:
            context.store.transact([context.trail.stream], decide)
        return done

    def all_ids(self) -> list[str]:
        """All snapshots that have a descriptor, complete or not."""
        return [name for name, _ in self._context.store.scan(DESCRIPTORS)]

    def export(
        self, snapshot_id: str, destination: Path, *, path: bytes | None = None, progress: Progress | None = None
    ) -> Materialised:
        """Write a snapshot, or only `path` of it, to a new directory; see `compare.export`."""
        return compare.export(self._context, snapshot_id, destination, path=path, progress=progress)

    # --- Other machines ----------------------------------------------------------------------------

    def push(self, remote: str | None = None, names: Collection[str] | None = None, *, seen_from: str = MAIN) -> Pushed:
        """Copy all snapshots, or those that `names` name, to a git remote; see `transfer.push`."""
        from holdfast.repository import transfer

        ids = None if names is None else [self.named(each, seen_from=seen_from).snapshot_id for each in names]
        return transfer.push(self._context, remote, ids, worktree=seen_from)

    def fetch(
        self,
        remote: str | None = None,
        snapshot_ids: Collection[str] | None = None,
        *,
        seen_from: str = MAIN,
        keep_for: float = KEEP_FOR,
    ) -> FetchResult:
        """Copy snapshots from a git remote, all or those with these ids or prefixes; see `transfer.fetch`."""
        from holdfast.repository import transfer

        return transfer.fetch(self._context, remote, snapshot_ids, worktree=seen_from, keep_for=keep_for)

    # --- Restoring ---------------------------------------------------------------------------------

    def restore(self, snapshot_id: str, name: str | None = None, *, progress: Progress | None = None) -> WorktreeConfig:
        """Create a new worktree from a snapshot. Existing worktrees stay as they are."""
        worktrees = Worktrees(self._context)
        for candidate in self.free_names(snapshot_id) if name is None else [name]:
            try:
                return worktrees.create(candidate, snapshot=snapshot_id, progress=progress)
            except AlreadyExists:
                if name is not None:
                    raise
        raise AssertionError("never reached")

    def free_names(self, snapshot_id: str) -> Iterator[str]:
        """Free names for a worktree restored from a snapshot."""
        first = f"restored-{snapshot_id[:8]}"
        names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
        return (name for name in names if self._context.store.read(WORKTREES.key(name)) is None)

    def check_restore(self, worktree: str, how: RestoreOptions) -> None:
        """Raise the refusals of `restore_in_place` early, before a lease is acquired."""
        restore.checked(self._context, worktree, how)

    def plan(self, worktree: str, snapshot_id: str, how: RestoreOptions) -> RestorePlan:
        """Plan a restore in place. Changes nothing."""
        config = restore.checked(self._context, worktree, how)
        source = history.usable(history.visible(self._context, snapshot_id))
        found = compare.compare(self._context, worktree, snapshot_id, None)
        if how.path is not None:
            found = found._replace(changes=tuple(compare.below(how.path, found.changes)))
        keeps = how.keep and restore.differs_from_head(self._context, config)
        path = self._context.paths.payload(worktree) / (how.path or "")
        standing = standing_in(path) if self._context.home.replaces_directory else ()
        return RestorePlan(source, found, keeps, standing)

    def restore_in_place(self, worktree: str, snapshot_id: str, proof: Proof | None, how: RestoreOptions) -> Restored:
        """Restore a worktree in place; see `restore.restore_in_place`."""
        with fenced(self._context, worktree, proof):
            settle(self._context, worktree)
            return restore.restore_in_place(self._context, worktree, snapshot_id, proof, how)

    # --- Keeping -----------------------------------------------------------------------------------

    def pin(self, text: str, *, seen_from: str = MAIN, reason: str = "", keep_for: float | None = None) -> Pin:
        """Pin the snapshot that `text` names, for `keep_for` seconds or until the pin is removed."""
        return history.add_pin(self._context, self._usable(text, seen_from), reason=reason, keep_for=keep_for)

    def remove_pin(self, pin_id: str) -> Pin:
        """Remove a pin; returns it."""
        return history.remove_pin(self._context, pin_id)

    def pins(self) -> list[Pin]:
        """All pins, expired ones included, the oldest first."""
        return history.pins(self._context)

    def create_reference(self, name: str, text: str, *, seen_from: str = MAIN, note: str = "") -> Reference:
        """Create a reference to the snapshot that `text` names; the reference protects it."""
        return history.create_reference(self._context, name, self._usable(text, seen_from), note=note)

    def delete_reference(self, name: str) -> Reference:
        """Delete a reference; returns it."""
        return history.delete_reference(self._context, name)

    def references(self) -> list[Reference]:
        """All references, by name."""
        return history.references(self._context)

    def _usable(self, text: str, seen_from: str) -> str:
        return history.resolve_usable(self._context, text, worktree=seen_from).snapshot_id
