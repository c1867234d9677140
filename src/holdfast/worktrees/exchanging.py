"""Carrying out a restore in place that was decided: the exchange, and what follows it.

Steps 4 to 6 of `docs/protocols/restore.md`. The operation on record says what is to be done; its scratch
holds what it is done with. Every step looks first whether it is done, so this can be interrupted anywhere,
and be done again by anybody who holds the payload lock.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import ExchangeUnavailable, NotFound
from holdfast.fs import calls
from holdfast.fs.directory import io_failure, make_directories
from holdfast.fs.moving import move, sync_parents
from holdfast.store.records import Change, Create, Decision, Delete, Key, Replace, Stream, View
from holdfast.worktrees.comparing import differs
from holdfast.worktrees.control import Control, new_snapshot_id
from holdfast.worktrees.naming import is_ready
from holdfast.worktrees.records import DESCRIPTORS, OPERATIONS, Consistency, Descriptor, Operation
from holdfast.worktrees.scratch import Scratch, scratch, sweep
from holdfast.worktrees.snapshots import published_tree

if TYPE_CHECKING:
    from holdfast.fs.trees import Captured

NEW, REPLACED, CACHE = "payload", "replaced", "stat"
"""In the scratch: what is put in place, what was there before, what is known of the new files."""


def finish(control: Control, operation: Operation) -> None:
    """Bring the restore of a process that is gone to its end. Whoever calls this holds the payload lock."""
    carry_out(control, operation)
    sweep(control.places, operation.operation_id)


def carry_out(control: Control, operation: Operation) -> None:
    """Do what was decided. Whoever calls this holds the payload lock."""
    room = control.places.scratch / operation.operation_id
    new, target = room / NEW, _target(control, operation)
    if not _is_in_place(control, operation, room):
        _exchange(control, operation, room)  # 4
    sync_parents(new, target)
    if inode_at(new) is not None:
        _put_aside(operation, new, room)  # 5. never to be taken for what is to be put in place
    with _late(control, operation, room) as late:
        _end(control, operation, late)  # 6
    if operation.path is None:
        _adopt_cache(control, operation, room)


def _is_in_place(control: Control, operation: Operation, room: Path) -> bool:
    """Whether the exchange has been made: the inode tells, or in a copy of the repository the content."""
    new, target = inode_at(room / NEW), inode_at(_target(control, operation))
    if operation.inode in (new, target):
        return target == operation.inode
    if operation.path is not None:
        return True  # either part may be there, and is: whoever wants the other one restores it again
    tree = control.places.tree(operation.operation_id)
    if new is not None:
        return not _holds(room / NEW, tree)  # the old content is here, so the new one is there
    return inode_at(room / REPLACED) is not None or _holds(_target(control, operation), tree)


def _holds(directory: Path, tree: Path) -> bool:
    """Whether a directory has the content of a snapshot, apart from what copying may lose."""
    from holdfast.fs.trees import changes

    try:
        found = list(changes(directory, tree))
    except NotFound:
        return False
    return all(each.what == "modified" and not _CONTENT.intersection(each.aspects) for each in found)


_CONTENT = frozenset({"kind", "content", "target"})


def _exchange(control: Control, operation: Operation, room: Path) -> None:
    """Put the new directory in the place of the old one: in one step, or where there is none such in two.

    Between the two the name is missing; the operation on record says how it goes on.
    """
    from holdfast.fs.trees import exchange, materialise, sync_tree

    new, target = room / NEW, _target(control, operation)
    if inode_at(new) is None:  # somebody has cleared our scratch away; the snapshot has it all
        make_directories(room)
        materialise(control.places.tree(operation.operation_id), new)
        sync_tree(room)
    if inode_at(target) is None:
        move(new, target)
        return
    try:
        exchange(new, target)
    except ExchangeUnavailable:
        _put_aside(operation, target, room)
        move(new, target)


def _put_aside(operation: Operation, old: Path, room: Path) -> None:
    """Keep what was in the place of the directory. A file that somebody has put there is kept in a directory,
    such that it can become a snapshot like everything else."""
    if operation.path is not None or stat.S_IFMT(_mode(old)) in (stat.S_IFDIR, stat.S_IFLNK):
        move(old, room / REPLACED)
    else:
        make_directories(room / REPLACED)
        move(old, room / REPLACED / operation.worktree_id)


@contextlib.contextmanager
def _late(control: Control, operation: Operation, room: Path) -> Iterator[Descriptor | None]:
    """A snapshot of what was replaced, if it is not what was kept of it: nobody's last write is lost.

    Its tree is in place for the block, which is to publish it.
    """
    published = control.store.read(DESCRIPTORS.key(operation.operation_id))
    replaced = room / REPLACED
    if not operation.keeps or published is None or inode_at(replaced) is None or _is_link(replaced):
        yield None
        return
    kept = published.record.parent_id
    if not differs(control, replaced, kept, operation.worktree_id):
        yield None
        return
    late_id = new_snapshot_id()
    uses = [kept] if kept else []
    with scratch(control, "what was written late", uses=uses, scratch_id=late_id) as own:
        captured = _captured(control, replaced, own, kept)
        descriptor = _late_descriptor(control, operation, late_id, captured)
        with published_tree(control, own, late_id):
            yield descriptor


def _is_link(path: Path) -> bool:
    """Whether somebody had put a link in the place of the directory: what it leads to was not touched."""
    return stat.S_ISLNK(_mode(path))


def _mode(path: Path) -> int:
    try:
        return calls.stat(path, follow_symlinks=False).st_mode
    except OSError as error:
        raise io_failure("look at", path, error) from error


def _captured(control: Control, replaced: Path, own: Scratch, kept: str | None) -> Captured:
    from holdfast.fs.trees import capture_best, sync_tree

    base = control.places.tree(kept) if kept and is_ready(control.places, kept) else None
    captured = capture_best(replaced, own.tree, beside=own.path, base=base, quiesced=False)
    sync_tree(own.tree)
    return captured


def _late_descriptor(control: Control, operation: Operation, late_id: str, captured: Captured) -> Descriptor:
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
        note=f"written while {operation.snapshot_id} was being restored: {operation.reason}",
        holder_id=control.holder.holder_id,
        not_preserved=tuple(captured.not_preserved),
        special=tuple(captured.special),
    )


def _end(control: Control, operation: Operation, late: Descriptor | None) -> None:
    """Take the operation off the record; a late snapshot goes between R and its parent."""
    pending, published = OPERATIONS.key(operation.worktree_id), DESCRIPTORS.key(operation.operation_id)
    named: list[Key[Any] | Stream[Any]] = [pending, published, control.trail.stream]
    if late is not None:
        named.append(DESCRIPTORS.key(late.snapshot_id))

    def decide(view: View, now: float) -> Decision[None]:
        found = view.get(pending)
        if found is None or found.operation_id != operation.operation_id:
            return Decision([], None)  # ended by another
        changes: list[Change] = [Delete(pending)]
        above = view.get(published)
        if late is not None and above is not None:
            below = msgspec.structs.replace(late, parent_id=above.parent_id)
            changes.append(Create(DESCRIPTORS.key(late.snapshot_id), below))
            changes.append(Replace(published, msgspec.structs.replace(above, parent_id=late.snapshot_id)))
        facts = {
            "worktree_id": operation.worktree_id,
            "operation_id": operation.operation_id,
            "restored_from": operation.snapshot_id,
            "path": operation.path,
            "late_snapshot_id": late.snapshot_id if late else None,
        }
        return Decision([*changes, control.audit(view, now, "restore_finished", **facts)], None)

    control.store.transact(named, decide)


def _adopt_cache(control: Control, operation: Operation, room: Path) -> None:
    """What was noted about the new files while they were written spares reading them again."""
    with contextlib.suppress(OSError):
        calls.replace(room / CACHE, control.places.stat_cache(operation.worktree_id))


def _target(control: Control, operation: Operation) -> Path:
    payload = control.places.payload(operation.worktree_id)
    return payload if operation.path is None else payload / operation.path


def inode_at(path: Path) -> str | None:
    """What tells this file or directory from every other one on the filesystem; None if it is not there."""
    try:
        return str(calls.stat(path, follow_symlinks=False).st_ino)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise io_failure("look at", path, error) from error
