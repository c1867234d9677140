"""Carrying out a decided restore in place, and saving late writes of a restore or removal.

Steps 4 to 6 of `docs/protocols/restore.md`. The pending operation says what to do; its scratch directory has the
content. Every step first checks whether it was done, so any process with the payload lock can continue after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Corrupt, ExchangeUnavailable, Failure, IoFailure, NotFound, PathEscape
from holdfast.fs import calls
from holdfast.fs.directory import Directory, make_directories, move, rename, status_at, sync_parents
from holdfast.fs.names import shortened
from holdfast.repository.compare import below, differs, unsaved
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Consistency,
    Descriptor,
    Operation,
    RepositoryContext,
    new_snapshot_id,
)
from holdfast.repository.payloads import CaptureOptions, Scratch, scratch, sweep
from holdfast.repository.snapshots import describe, publish_changes, published_tree, usable_base
from holdfast.store.model import Change, Create, Decision, Delete, Key, Replace, View

NEW, REPLACED, CACHE = "payload", "replaced", "stat"  # in the scratch directory; CACHE is the stat cache of NEW
_CONTENT = frozenset({"kind", "content", "target"})


def finish_restore(context: RepositoryContext, operation: Operation) -> None:
    """Finish the restore of a dead process. The caller holds the payload lock."""
    try:
        context.home.restore(context, operation)
    except IoFailure:
        if context.pending(operation.worktree_id) is not None:
            raise
    sweep(context.paths, operation.operation_id)


def carry_out(context: RepositoryContext, operation: Operation) -> bool:
    """Carry out a decided restore; the caller holds the payload lock. Returns False if the restore was abandoned and
    nothing was replaced, because the directories above the part are gone."""
    exchange = _Exchange(context, operation)
    with exchange.abandoned_if_impossible():
        if not exchange.is_done():
            if not exchange.is_reachable():
                exchange.abandon()
                return False
            exchange.make()  # 4
    sync_parents(exchange.new, exchange.target)
    if inode_at(exchange.new) is not None:
        exchange.move_aside(exchange.new)  # 5. the old content must not be taken for the new
    with exchange.late_snapshot() as late:
        exchange.end(late)  # 6
    if operation.path is None:
        with contextlib.suppress(OSError, Failure):  # the cache saves reading the new files
            rename(exchange.room / CACHE, context.paths.stat_cache(operation.worktree_id), calls.replace)
    return True


class _Exchange(NamedTuple):
    """The exchange of a worktree's directory, or a part of it, with the content in the scratch directory."""

    context: RepositoryContext
    operation: Operation

    @property
    def room(self) -> Path:
        return self.context.paths.scratch / self.operation.operation_id

    @property
    def new(self) -> Path:
        return self.room / NEW

    @property
    def target(self) -> Path:
        return self.context.paths.payload(self.operation.worktree_id) / (self.operation.path or "")

    @property
    def replaced(self) -> Path:
        """The path of the replaced content; a part has the same path here as in the worktree."""
        return self.room / REPLACED / (self.operation.path or "")

    def is_done(self) -> bool:
        """Whether the exchange was made, by inode; in a copy of the repository, by content."""
        new, target = inode_at(self.new), inode_at(self.target) if self.is_reachable() else None
        if self.operation.inode in (new, target):
            return target == self.operation.inode
        if self.operation.path is not None:
            return True  # either the old or the new part is in place; the user can restore again
        tree = self.context.paths.tree(self.operation.operation_id)
        if new is not None:
            return not _holds(self.new, tree)  # if this is the old content, the new one is in place
        return inode_at(self.replaced) is not None or _holds(self.target, tree)

    def is_reachable(self) -> bool:
        """Whether the directories above a part exist, and none of them is a link."""
        if self.operation.path is None:
            return True
        try:
            Directory.open(self.target.parent).close()
        except (NotFound, PathEscape):
            return False
        except IoFailure as failure:
            if failure.facts.get("errno") != errno.ENOTDIR:
                raise
            return False
        return True

    def make(self) -> None:
        """Exchange new and old in one step, or in two if the filesystem cannot do it in one. Between the two steps, the
        name is missing; the pending operation says how to continue."""
        from holdfast.trees.restore import exchange, materialise
        from holdfast.trees.walker import synced

        if inode_at(self.new) is None:  # the scratch directory was deleted; R has the content
            make_directories(self.room)
            with synced(self.room):
                materialise(self.context.paths.tree(self.operation.operation_id), self.new)
        if inode_at(self.target) is None:
            move(self.new, self.target)
            return
        try:
            exchange(self.new, self.target)
        except ExchangeUnavailable:
            self.move_aside(self.target)
            move(self.new, self.target)

    def move_aside(self, source: Path) -> None:
        """Keep the replaced content; a file at the directory's path is put into a directory, to become a snapshot."""
        replaced = self.replaced
        if self.operation.path is None and _kind(source) not in (None, stat.S_IFDIR, stat.S_IFLNK):
            replaced /= self.operation.worktree_id
        make_directories(replaced.parent)
        move(source, replaced)

    @contextlib.contextmanager
    def late_snapshot(self) -> Iterator[Descriptor | None]:
        """Yield the descriptor of a snapshot of the replaced content, so that no write is lost; None if that equals the
        kept snapshot. Its tree is in place for the block, which publishes it."""
        operation, replaced = self.operation, self.room / REPLACED
        if not operation.keeps or inode_at(self.replaced) is None:
            yield None
            return
        if operation.path is not None:
            kept = self.context.config(operation.worktree_id).tip
        else:
            published = self.context.descriptor(operation.operation_id)
            if published is None or _kind(replaced) == stat.S_IFLNK:  # a link's target was not touched
                yield None
                return
            kept = published.parent_id
        with late_writes(self.context, operation, replaced, kept, restore_note(operation)) as descriptor:
            yield descriptor

    def end(self, late: Descriptor | None) -> None:
        """Delete the operation; the late snapshot goes between R and its parent. The restore of a part has no R: the
        late snapshot becomes the head, and the restored part is unsaved work on top of it."""
        operation = self.operation
        published, record = DESCRIPTORS.key(operation.operation_id), WORKTREES.key(operation.worktree_id)
        keys: list[Key[Any]] = [published, record, *([DESCRIPTORS.key(late.snapshot_id)] if late else [])]

        def insert(view: View) -> list[Change]:
            above, config = view.get(published), view.get(record)
            if late is not None and operation.path is not None and config is not None:
                return publish_changes(config, late)[0]
            if late is None or above is None:
                return []
            under = msgspec.structs.replace(late, parent_id=above.parent_id)
            above = msgspec.structs.replace(above, parent_id=late.snapshot_id)
            return [Create(DESCRIPTORS.key(late.snapshot_id), under), Replace(published, above)]

        late_id = late.snapshot_id if late else None
        facts = {"restored_from": operation.snapshot_id, "path": operation.path, "late_snapshot_id": late_id}
        self._delete_operation("restore_finished", facts, keys, insert)

    def abandon(self) -> None:
        """Delete the operation, which has changed nothing."""
        self._delete_operation("restore_given_up", {"path": self.operation.path})

    def _delete_operation(
        self,
        event: str,
        facts: Mapping[str, object],
        keys: Sequence[Key[Any]] = (),
        further: Callable[[View], list[Change]] = lambda view: [],
    ) -> None:
        operation, pending = self.operation, OPERATIONS.key(self.operation.worktree_id)
        facts = {"worktree_id": operation.worktree_id, "operation_id": operation.operation_id, **facts}

        def decide(view: View, now: float) -> Decision[None]:
            found = view.get(pending)
            if found is None or found.operation_id != operation.operation_id:
                return Decision([], None)  # another process has ended it
            entry = self.context.audit(view, now, event, **facts)
            return Decision([Delete(pending), *further(view), entry], None)

        self.context.store.transact([pending, *keys, self.context.trail.stream], decide)

    @contextlib.contextmanager
    def abandoned_if_impossible(self) -> Iterator[None]:
        """Abandon the restore of a part that the system refuses to exchange, for instance in a read-only directory.
        Nothing was published, so nothing is lost; a pending operation would block the worktree."""
        try:
            yield
        except IoFailure:
            if self.operation.path is not None and self._is_untouched():
                self.abandon()
            raise

    def _is_untouched(self) -> bool:
        """Whether the new content is still in the scratch directory, and the old content is not."""
        if self.operation.inode is None or inode_at(self.new) != self.operation.inode:
            return False
        with contextlib.suppress(IoFailure):  # the path is too long, so nothing can have been moved there
            return inode_at(self.replaced) is None
        return True


def _holds(directory: Path, tree: Path) -> bool:
    """Whether a directory has the content of a snapshot, apart from attributes that copying may lose."""
    from holdfast.trees.verify import changes

    try:
        found = list(changes(directory, tree))
    except NotFound:
        return False
    return all(each.what == "modified" and not _CONTENT.intersection(each.aspects) for each in found)


def inode_at(path: Path) -> str | None:
    """Identifies a file or directory on the filesystem; None if it does not exist."""
    status = status_at(path)
    return None if status is None else str(status.st_ino)


def _kind(path: Path) -> int | None:
    status = status_at(path)
    return None if status is None else stat.S_IFMT(status.st_mode)


# --- Late writes --------------------------------------------------------------------------------------


@contextlib.contextmanager
def late_writes(
    context: RepositoryContext, operation: Operation, directory: Path, kept: str | None, note: str
) -> Iterator[Descriptor | None]:
    """Yield the descriptor of a snapshot of `directory`, or None if the snapshot `kept` has the same content.

    Its tree is in place for the block, which publishes it. If the operation restores a part, `directory` contains only
    `operation.path`; the rest comes from `kept`.
    """
    if not _has_late_writes(context, operation, directory, kept):
        yield None
        return
    with scratch(context, "late writes", uses=[kept] if kept else [], scratch_id=new_snapshot_id()) as room:
        if operation.path is not None:
            directory = _complete(context, room, directory, operation.path, kept)
        with _captured(context, operation, room, directory, kept, note) as descriptor:
            yield descriptor


@contextlib.contextmanager
def _captured(
    context: RepositoryContext, operation: Operation, room: Scratch, directory: Path, kept: str | None, note: str
) -> Iterator[Descriptor]:
    base = usable_base(context, kept)
    facts = (base.snapshot_id, base.payload_hash) if base else (None, None)
    captured = context.home.capture(room, directory, CaptureOptions(False, *facts))
    with published_tree(context, room, room.scratch_id):
        yield describe(
            context, operation.worktree_id, room.scratch_id, captured, Consistency.BEST_EFFORT, shortened(note)
        )


@contextlib.contextmanager
def capture_late(context: RepositoryContext, operation: Operation, directory: Path) -> Iterator[Descriptor]:
    """Capture a directory that is being restored, and yield the descriptor; the captured tree exists for the block, and
    longer if the block publishes the descriptor."""
    with (
        scratch(context, "late writes", scratch_id=new_snapshot_id()) as room,
        _captured(context, operation, room, directory, None, restore_note(operation)) as descriptor,
    ):
        yield descriptor
        if context.descriptor(descriptor.snapshot_id) is None:
            context.home.take_back(room, descriptor.snapshot_id)


def restore_note(operation: Operation) -> str:
    return f"written while {operation.snapshot_id} was being restored: {operation.reason}"


def end_restore(context: RepositoryContext, operation: Operation, late: Descriptor | None) -> None:
    """Step 6, for a restore that exchanges no directories."""
    _Exchange(context, operation).end(late)


def abandon_restore(context: RepositoryContext, operation: Operation) -> None:
    """Delete the operation of a restore that was refused, and has changed no file."""
    _Exchange(context, operation).abandon()


def _has_late_writes(context: RepositoryContext, operation: Operation, directory: Path, kept: str | None) -> bool:
    if operation.path is None:
        return differs(context, directory, kept, operation.worktree_id)
    if kept is not None and not context.home.is_ready(kept):
        return True
    found = unsaved(context, directory, kept, operation.worktree_id)
    return next(below(operation.path, found), None) is not None


def _complete(context: RepositoryContext, room: Scratch, replaced: Path, path: str, kept: str | None) -> Path:
    """A scratch directory with the content of `kept`, and the replaced content at `path`."""
    from holdfast.trees.capture import capture_best
    from holdfast.trees.restore import materialise
    from holdfast.trees.walker import remove_tree

    whole, part = room.path / "whole", room.path / "part"
    if kept is not None and context.home.is_here(kept):
        with contextlib.suppress(Corrupt):  # damaged files are left out: the late writes matter
            materialise(context.paths.tree(kept), whole)
    capture_best(replaced, part, beside=room.path, quiesced=False)
    for above in reversed((whole / path).parents[: path.count("/")]):
        if _kind(above) != stat.S_IFDIR:
            remove_tree(above)  # in `kept`, it was not a directory
    make_directories((whole / path).parent, mode=0o777)
    remove_tree(whole / path)
    materialise(part, whole / path, only=os.fsencode(path))
    return whole
