"""Carrying out a restore in place that was decided: the exchange, and what follows it.

Steps 4 to 6 of `docs/protocols/restore.md`. The operation on record says what is to be done; its scratch
holds what it is done with. Every step looks first whether it is done, so this can be interrupted anywhere,
and be done again by anybody who holds the payload lock.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ExchangeUnavailable, IoFailure, NotFound, PathEscape
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure, make_directories, move, sync_parents
from holdfast.fs.names import split_relative
from holdfast.repository.context import RepositoryContext
from holdfast.repository.payloads import sweep
from holdfast.repository.records import DESCRIPTORS, OPERATIONS, WORKTREES, Descriptor, Operation
from holdfast.repository.snapshots import late_part, late_whole, publishing
from holdfast.store.model import Change, Create, Decision, Delete, Key, Replace, Stream, View

NEW, REPLACED, CACHE = "payload", "replaced", "stat"
"""In the scratch: what is put in place, what was there before, what is known of the new files."""


def finish(control: RepositoryContext, operation: Operation) -> None:
    """Bring the restore of a process that is gone to its end. Whoever calls this holds the payload lock."""
    try:
        carry_out(control, operation)
    except IoFailure:
        if control.store.read(OPERATIONS.key(operation.worktree_id)) is not None:
            raise
    sweep(control.places, operation.operation_id)


def carry_out(control: RepositoryContext, operation: Operation) -> bool:
    """Do what was decided. Whoever calls this holds the payload lock.

    False if it was given up, and nothing replaced: the way to the part to be restored was taken away.
    """
    room = control.places.scratch / operation.operation_id
    new, target = room / NEW, _target(control, operation)
    with _undone_if_impossible(control, operation, room):
        if not _is_in_place(control, operation, room):
            if not _is_reachable(control, operation):
                _give_up(control, operation)
                return False
            _exchange(control, operation, room)  # 4
    sync_parents(new, target)
    if inode_at(new) is not None:
        _set_aside(new, operation, room)  # 5. never to be taken for what is to be put in place
    with _late(control, operation, room) as late:
        _end(control, operation, late)  # 6
    if operation.path is None:
        _adopt_cache(control, operation, room)
    return True


def _is_reachable(control: RepositoryContext, operation: Operation) -> bool:
    """Whether the directories above a part are there, and none of them is a link that leads elsewhere."""
    above = split_relative(operation.path)[:-1] if operation.path is not None else ()
    if not above:
        return operation.path is None or inode_at(control.places.payload(operation.worktree_id)) is not None
    try:
        with Directory.open(control.places.payload(operation.worktree_id)) as payload:
            payload.beneath("/".join(above)).close()
    except (NotFound, PathEscape):
        return False
    except IoFailure as failure:
        if failure.facts.get("errno") != errno.ENOTDIR:
            raise
        return False
    return True


@contextlib.contextmanager
def _undone_if_impossible(control: RepositoryContext, operation: Operation, room: Path) -> Iterator[None]:
    """Give up a part that the system does not let us exchange, in a read-only directory for instance.

    Nothing of it was published, so nothing is lost; else nobody could use the worktree until that is mended.
    """
    try:
        yield
    except IoFailure:
        if operation.path is not None and _is_untouched(operation, room):
            _give_up(control, operation)
        raise


def _is_untouched(operation: Operation, room: Path) -> bool:
    """Whether what is to be put in place is still in the scratch, and what it replaces is not."""
    if operation.inode is None or inode_at(room / NEW) != operation.inode:
        return False
    try:
        return inode_at(_replaced(operation, room)) is None
    except IoFailure:  # a path that is too long, so nothing can have been put there
        return True


def _give_up(control: RepositoryContext, operation: Operation) -> None:
    """Take an operation off the record that has changed nothing."""
    pending = OPERATIONS.key(operation.worktree_id)
    facts = {
        "worktree_id": operation.worktree_id,
        "operation_id": operation.operation_id,
        "path": operation.path,
    }

    def decide(view: View, now: float) -> Decision[None]:
        found = view.get(pending)
        if found is None or found.operation_id != operation.operation_id:
            return Decision([], None)
        return Decision([Delete(pending), control.audit(view, now, "restore_given_up", **facts)], None)

    control.store.transact([pending, control.trail.stream], decide)


def _is_in_place(control: RepositoryContext, operation: Operation, room: Path) -> bool:
    """Whether the exchange has been made: the inode tells, or in a copy of the repository the content."""
    new, target = inode_at(room / NEW), inode_at(_target(control, operation))
    if operation.inode in (new, target):
        return target == operation.inode
    if operation.path is not None:
        return True  # either part may be there, and is: whoever wants the other one restores it again
    tree = control.places.tree(operation.operation_id)
    if new is not None:
        return not _holds(room / NEW, tree)  # the old content is here, so the new one is there
    return inode_at(_replaced(operation, room)) is not None or _holds(_target(control, operation), tree)


def _holds(directory: Path, tree: Path) -> bool:
    """Whether a directory has the content of a snapshot, apart from what copying may lose."""
    from holdfast.trees.verify import changes

    try:
        found = list(changes(directory, tree))
    except NotFound:
        return False
    return all(each.what == "modified" and not _CONTENT.intersection(each.aspects) for each in found)


_CONTENT = frozenset({"kind", "content", "target"})


def _exchange(control: RepositoryContext, operation: Operation, room: Path) -> None:
    """Put the new directory in the place of the old one: in one step, or where there is none such in two.

    Between the two the name is missing; the operation on record says how it goes on.
    """
    from holdfast.trees.restore import exchange, materialise
    from holdfast.trees.walker import synced

    new, target = room / NEW, _target(control, operation)
    if inode_at(new) is None:  # somebody has cleared our scratch away; the snapshot has it all
        make_directories(room)
        with synced(room):
            materialise(control.places.tree(operation.operation_id), new)
    if inode_at(target) is None:
        move(new, target)
        return
    try:
        exchange(new, target)
    except ExchangeUnavailable:
        _set_aside(target, operation, room)
        move(new, target)


@contextlib.contextmanager
def _late(control: RepositoryContext, operation: Operation, room: Path) -> Iterator[Descriptor | None]:
    """A snapshot of what was replaced, if it is not what was kept of it: nobody's last write is lost.

    Its tree is in place for the block, which is to publish it.
    """
    replaced = room / REPLACED
    if not operation.keeps or inode_at(_replaced(operation, room)) is None:
        yield None
        return
    note = f"written while {operation.snapshot_id} was being restored: {operation.reason}"
    if operation.path is not None:
        config = control.config(operation.worktree_id)
        kept = config.head_snapshot_id or config.base_snapshot_id
        with late_part(control, operation, replaced, kept, note) as descriptor:
            yield descriptor
        return
    published = control.store.read(DESCRIPTORS.key(operation.operation_id))
    if published is None or _is_link(replaced):
        yield None
        return
    with late_whole(control, operation, replaced, published.record.parent_id, note) as descriptor:
        yield descriptor


def _is_link(path: Path) -> bool:
    """Whether somebody had put a link in the place of the directory: what it leads to was not touched."""
    return stat.S_ISLNK(_mode(path))


def _mode(path: Path) -> int:
    try:
        return calls.stat(path, follow_symlinks=False).st_mode
    except OSError as error:
        raise io_failure("look at", path, error) from error


def _end(control: RepositoryContext, operation: Operation, late: Descriptor | None) -> None:
    """Take the operation off the record; a late snapshot goes between R and its parent.

    Of a part there is no R: it goes on top of the head, and what was restored is unsaved work on top of it.
    """
    pending, published = OPERATIONS.key(operation.worktree_id), DESCRIPTORS.key(operation.operation_id)
    record = WORKTREES.key(operation.worktree_id)
    named: list[Key[Any] | Stream[Any]] = [pending, published, record, control.trail.stream]
    if late is not None:
        named.append(DESCRIPTORS.key(late.snapshot_id))

    def decide(view: View, now: float) -> Decision[None]:
        found = view.get(pending)
        if found is None or found.operation_id != operation.operation_id:
            return Decision([], None)  # ended by another
        changes: list[Change] = [Delete(pending)]
        above, config = view.get(published), view.get(record)
        if late is not None and operation.path is not None and config is not None:
            changes += publishing(config, late)[0]
        elif late is not None and above is not None:
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


def _adopt_cache(control: RepositoryContext, operation: Operation, room: Path) -> None:
    """What was noted about the new files while they were written spares reading them again."""
    with contextlib.suppress(OSError):
        calls.replace(room / CACHE, control.places.stat_cache(operation.worktree_id))


def _replaced(operation: Operation, room: Path) -> Path:
    """Where what was replaced is kept; a part has the path there that it had in the worktree."""
    if operation.path is None:
        return room / REPLACED
    return room / REPLACED / operation.path


def _set_aside(source: Path, operation: Operation, room: Path) -> None:
    """Keep what was in the place of the directory. A file that somebody has put there is kept in a directory,
    such that it can become a snapshot like everything else."""
    replaced = _replaced(operation, room)
    if operation.path is None and stat.S_IFMT(_mode(source)) not in (stat.S_IFDIR, stat.S_IFLNK):
        replaced /= operation.worktree_id
    make_directories(replaced.parent)
    move(source, replaced)


def _target(control: RepositoryContext, operation: Operation) -> Path:
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
