"""The snapshots of one repository: taking, naming, comparing, verifying and restoring them.

Each operation on a worktree first brings to its end what a process that died there has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import AlreadyExists
from holdfast.fs.names import checked_text
from holdfast.worktrees import comparing, history, naming, restoring, snapshots
from holdfast.worktrees.comparing import Comparison
from holdfast.worktrees.control import Control
from holdfast.worktrees.finishing import settle
from holdfast.worktrees.history import History
from holdfast.worktrees.lifecycle import Worktrees
from holdfast.worktrees.proof import Proof
from holdfast.worktrees.records import DESCRIPTORS, MAIN, WORKTREES, Descriptor, WorktreeConfig
from holdfast.worktrees.restoring import InPlace, Restored
from holdfast.worktrees.snapshots import AS_USUAL, Wanted

if TYPE_CHECKING:
    from holdfast.trees import Materialised, Problem
    from holdfast.trees.scan import Progress


class Plan(NamedTuple):
    """What restoring in place would do: `comparison.changes` are what would be undone, from the snapshot's
    content to what is there now; `keeps` says that what is there would be kept as a snapshot first."""

    source: Descriptor
    comparison: Comparison
    keeps: bool


class Snapshots:
    """The snapshots of one repository."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def take(self, worktree: str, proof: Proof | None, wanted: Wanted = AS_USUAL) -> Descriptor:
        """Keep what is in a worktree; see `snapshots.snapshot`."""
        checked_text(wanted.note, what="note")
        settle(self._control, worktree)
        return snapshots.snapshot(self._control, worktree, proof, wanted)

    def take_if_changed(
        self, worktree: str, proof: Proof | None, wanted: Wanted = AS_USUAL
    ) -> Descriptor | None:
        """The same, unless the worktree is as its head is; None then."""
        config = self._control.config(worktree)
        if not restoring.differs_from_head(self._control, config):
            return None
        return snapshots.snapshot(self._control, worktree, proof, wanted)

    # --- Looking: takes no lock and changes nothing ------------------------------------------------

    def named(self, text: str, *, seen_from: str = MAIN) -> Descriptor:
        """The snapshot that `text` names: an id, a part of one, a reference, `head`, `head~2`."""
        return naming.resolve(self._control, text, worktree=seen_from)

    def line(self, worktree: str, *, limit: int | None = None) -> History:
        """The snapshots that led to the head of a worktree."""
        return history.line(self._control, worktree, limit=limit)

    def everything(self, *, limit: int | None = None) -> History:
        """All snapshots of all lines."""
        return history.everything(self._control, limit=limit)

    def marks(self, snapshot_id: str) -> history.Marks:
        """What points at a snapshot."""
        return history.marks_of(self._control).get(snapshot_id, history.Marks())

    def status(self, worktree: str) -> Comparison:
        """What has changed in a worktree since its head."""
        return comparing.status(self._control, worktree)

    def compare(self, worktree: str, old: str | None = None, new: str | None = None) -> Comparison:
        """What is different between two snapshots, or a snapshot and the worktree."""
        return comparing.compare(self._control, worktree, old, new)

    def verify(self, snapshot_id: str) -> Iterator[Problem]:
        """Read everything that a snapshot holds; what is wrong with it.

        `SnapshotCollected` if it is deleted meanwhile: that is no damage.
        """
        from holdfast.trees import verify

        descriptor = naming.visible(self._control, snapshot_id)
        for problem in verify(self._control.places.tree(snapshot_id), descriptor.payload_hash):
            naming.refuse_if_collected(self._control, snapshot_id)
            yield problem

    def all_ids(self) -> list[str]:
        """Every snapshot that has a descriptor, complete or not."""
        return [name for name, _ in self._control.store.scan(DESCRIPTORS)]

    def export(
        self,
        snapshot_id: str,
        destination: Path,
        *,
        path: bytes | None = None,
        progress: Progress | None = None,
    ) -> Materialised:
        """Write what a snapshot holds, or the one `path` of it, to a new directory; see `exporting`."""
        from holdfast.worktrees.exporting import export

        return export(self._control, snapshot_id, destination, path=path, progress=progress)

    # --- Restoring ---------------------------------------------------------------------------------

    def restore(self, snapshot_id: str, name: str | None = None) -> WorktreeConfig:
        """Make a new worktree with the content of a snapshot. Nothing that exists is touched."""
        worktrees = Worktrees(self._control)
        for candidate in [name] if name else self.free_names(snapshot_id):
            try:
                return worktrees.create(candidate, snapshot=snapshot_id)
            except AlreadyExists:
                if name:
                    raise
        raise AssertionError("never reached")

    def free_names(self, snapshot_id: str) -> Iterator[str]:
        """Names that a worktree restored from a snapshot may get, as far as they are free now."""
        first, number = f"restored-{snapshot_id[:8]}", 1
        while True:
            name = first if number == 1 else f"{first}-{number}"
            number += 1
            if self._control.store.read(WORKTREES.key(name)) is None:
                yield name

    def plan(self, worktree: str, snapshot_id: str, how: InPlace) -> Plan:
        """What restoring in place would do. Changes nothing."""
        config = restoring.checked(self._control, worktree, how)
        source = naming.usable(naming.visible(self._control, snapshot_id))
        found = comparing.compare(self._control, worktree, snapshot_id, None)
        if how.path is not None:
            found = found._replace(changes=tuple(comparing.below(how.path, found.changes)))
        keeps = how.keep and restoring.differs_from_head(self._control, config)
        return Plan(source, found, keeps)

    def restore_in_place(
        self, worktree: str, snapshot_id: str, proof: Proof | None, how: InPlace
    ) -> Restored:
        """Make a worktree hold what a snapshot holds; see `restoring`."""
        settle(self._control, worktree)
        return restoring.restore_in_place(self._control, worktree, snapshot_id, proof, how)
