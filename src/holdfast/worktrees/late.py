"""What was written at the last moment: behind the snapshot that keeps a directory, before it was moved away.

Who restores in place or removes a worktree keeps its content as a snapshot first. Between that and the
moment when the directory is out of reach somebody may have written into it. So it is compared once more,
where it was moved to, and what was written late becomes a snapshot of its own.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.clock import format_instant
from holdfast.fs import calls
from holdfast.fs.directory import make_directories
from holdfast.fs.names import shortened
from holdfast.worktrees.comparing import below, differs, unsaved
from holdfast.worktrees.control import Control, new_snapshot_id
from holdfast.worktrees.naming import is_ready
from holdfast.worktrees.records import Consistency, Descriptor, Operation
from holdfast.worktrees.scratch import Scratch, scratch
from holdfast.worktrees.snapshots import can_be_base, listed, published_tree

if TYPE_CHECKING:
    from holdfast.trees import Captured


@contextlib.contextmanager
def late_whole(
    control: Control, operation: Operation, directory: Path, kept: str | None, note: str
) -> Iterator[Descriptor | None]:
    """The descriptor of what is in `directory`, if that is not what the snapshot `kept` holds; else None.

    Its tree is in place for the block, which is to publish it; its parent is known then.
    """
    if not differs(control, directory, kept, operation.worktree_id):
        yield None
        return
    with _room(control, kept) as own:
        captured = _captured(control, directory, own, kept)
        with published_tree(control, own, own.scratch_id):
            yield _descriptor(control, operation, own.scratch_id, captured, note)


@contextlib.contextmanager
def late_part(
    control: Control, operation: Operation, replaced: Path, kept: str | None, note: str
) -> Iterator[Descriptor | None]:
    """The same for a part: `replaced` has nothing but `operation.path`, the rest is as `kept` has it."""
    assert operation.path is not None
    if not _part_differs(control, operation, replaced, kept):
        yield None
        return
    with _room(control, kept) as own:
        whole = _put_together(control, own, replaced, operation.path, kept)
        captured = _captured(control, whole, own, kept)
        with published_tree(control, own, own.scratch_id):
            yield _descriptor(control, operation, own.scratch_id, captured, note)


def _room(control: Control, kept: str | None) -> contextlib.AbstractContextManager[Scratch]:
    uses = [kept] if kept else []
    return scratch(control, "what was written late", uses=uses, scratch_id=new_snapshot_id())


def _part_differs(control: Control, operation: Operation, replaced: Path, kept: str | None) -> bool:
    assert operation.path is not None
    if kept is not None and not is_ready(control.places, kept):
        return True
    found = unsaved(control, replaced, kept, operation.worktree_id)
    return next(below(operation.path, found), None) is not None


def _put_together(control: Control, own: Scratch, replaced: Path, path: str, kept: str | None) -> Path:
    """The content of `kept`, with what was replaced at `path`, as a directory of the scratch."""
    from holdfast.trees import capture_best, materialise, remove_tree

    whole, part = own.path / "whole", own.path / "part"
    if kept is not None and is_ready(control.places, kept):
        materialise(control.places.tree(kept), whole)
    capture_best(replaced, part, beside=own.path, quiesced=False)
    for above in reversed((whole / path).parents[: path.count("/")]):
        if not _is_directory(above):
            remove_tree(above)  # it was of another kind
    make_directories((whole / path).parent)
    remove_tree(whole / path)
    materialise(part, whole / path, only=os.fsencode(path))
    return whole


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(calls.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _captured(control: Control, directory: Path, own: Scratch, kept: str | None) -> Captured:
    from holdfast.trees import capture_best, synced

    base = control.places.tree(kept) if kept and can_be_base(control, kept) else None
    with synced(own.path):
        return capture_best(directory, own.tree, beside=own.path, base=base, quiesced=False)


def _descriptor(
    control: Control, operation: Operation, late_id: str, captured: Captured, note: str
) -> Descriptor:
    return Descriptor(
        snapshot_id=late_id,
        worktree_id=operation.worktree_id,
        parent_id=None,  # known when it is published
        created_at=format_instant(control.store.now()),
        consistency_level=Consistency.BEST_EFFORT,
        engine=str(captured.engine),
        payload_hash=captured.payload_hash,
        files=captured.files,
        bytes=captured.bytes,
        note=shortened(note),
        holder_id=control.holder.holder_id,
        not_preserved=listed(captured.not_preserved),
        special=listed(captured.special),
    )
