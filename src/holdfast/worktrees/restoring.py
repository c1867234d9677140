"""Restoring in place: the directory of a worktree gets the content of a snapshot, all at once.

`docs/protocols/restore.md` has the same numbers.

1. What is in the directory now is kept as a snapshot, if it differs from the head.
2. In a scratch: the content as a new directory, and (for the whole tree) a new snapshot R with the
   same content, by links. Synced once; R's tree is renamed to its place, where nobody sees it.
3. Under the payload lock, one transaction: the lease is held with this very token; R is the new head,
   and the operation is on record. **Commit point.** From here on it is finished, by us or by others.
4. The new directory and the old one are exchanged in one step.
5. The old one is moved aside and compared with what was kept: something written at the last moment
   becomes a snapshot too, between that and R.
6. One transaction: the operation is off the record. Then the scratch is removed.

So history stays one line, and nothing that was ever on it becomes unreachable. Restoring a part
(`path`) exchanges that part only and publishes no R: it is unsaved work on top of the head.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import ExchangeUnavailable, NotFound, Refused, UsageFailure
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure, make_directories
from holdfast.fs.moving import move, sync_parents
from holdfast.fs.names import split_relative
from holdfast.leases.records import Identity
from holdfast.store.records import Change, Create, Decision, Delete, Key, Replace, Stream, View
from holdfast.worktrees.comparing import unsaved
from holdfast.worktrees.control import Control, new_snapshot_id
from holdfast.worktrees.naming import is_ready, no_snapshot, usable, visible
from holdfast.worktrees.payload_lock import payload_locked
from holdfast.worktrees.proof import Permission, Proof, check_early, permission, publishing_keys
from holdfast.worktrees.records import (
    DESCRIPTORS,
    OPERATIONS,
    Consistency,
    Descriptor,
    Isolation,
    Operation,
    OperationKind,
    WorktreeConfig,
)
from holdfast.worktrees.scratch import Scratch, scratch, sweep
from holdfast.worktrees.snapshots import Wanted, published_tree, publishing, same_worktree, snapshot

if TYPE_CHECKING:
    from holdfast.fs.trees import Change as Difference
    from holdfast.fs.trees.intake import Progress

NEW, REPLACED, LATE, CACHE = "payload", "replaced", "late", "stat"


class InPlace(NamedTuple):
    """How to restore in place. `path` is relative to the worktree; without it, everything is."""

    reason: str
    path: str | None = None
    keep: bool = True
    allow_shared: bool = False
    progress: Progress | None = None


class Restored(NamedTuple):
    """What was restored; the new head, if one was made; and what keeps that which was replaced."""

    source: Descriptor
    published: Descriptor | None
    kept: Descriptor | None


def restore_in_place(
    control: Control, worktree: str, snapshot_id: str, proof: Proof | None, how: InPlace
) -> Restored:
    """Make the directory of a worktree hold what a snapshot holds. See the module's text.

    In an exclusive worktree it takes the proof that the lease is held; in a shared one it is refused
    unless it is switched on for this call.
    """
    checked(control, worktree, how)
    config = check_early(control, worktree, proof)
    usable(visible(control, snapshot_id))
    kept = _keep(control, config, snapshot_id, proof, how) if how.keep else None  # 1
    tip = kept.snapshot_id if kept else config.head_snapshot_id or config.base_snapshot_id
    uses = [snapshot_id, *([tip] if tip else [])]
    operation_id = new_snapshot_id()
    with scratch(control, "restore", worktree=worktree, uses=uses, scratch_id=operation_id) as room:
        source = usable(visible(control, snapshot_id))  # looked at after our intent names it
        operation = _prepare(control, worktree, room, source, how)  # 2
        if how.path is None:
            _link(control, room, source)
            with payload_locked(control, worktree), published_tree(control, room, operation_id):
                published = _Beginning.of(control, config, proof, source, operation).whole()  # 3
                _carry_out(control, operation)  # 4, 5, 6
        else:
            published = None
            with payload_locked(control, worktree):
                _Beginning.of(control, config, proof, source, operation).part()
                _carry_out(control, operation)
        return Restored(source, published, kept)


def checked(control: Control, worktree: str, how: InPlace) -> WorktreeConfig:
    """The worktree's record, if restoring in place may be tried in it, for this reason."""
    if not how.reason.strip():
        raise UsageFailure("restoring in place needs a reason", hint="Say why: --reason TEXT.")
    if how.path is not None:
        split_relative(how.path)
    config = control.config(worktree)
    if config.isolation is Isolation.SHARED and not how.allow_shared:
        raise Refused(
            f"{worktree} is a shared worktree (high-risk): others may be writing into it at this moment",
            hint="Restore into a new worktree instead ('holdfast restore ID'), "
            "or switch this on for once: --allow-shared.",
            worktree=worktree,
        )
    return config


def below(path: str, found: Iterable[Difference]) -> Iterator[Difference]:
    """Of these differences, those at `path` and below it."""
    top = os.fsencode(path)
    return (each for each in found if each.path == top or each.path.startswith(top + b"/"))


# --- 1. What is there now ---------------------------------------------------------------------------


def _keep(
    control: Control, config: WorktreeConfig, snapshot_id: str, proof: Proof | None, how: InPlace
) -> Descriptor | None:
    lost = _inode(control.places.payload(config.worktree_id)) is None
    if lost or not differs_from_head(control, config):
        return None
    note = f"before restoring {snapshot_id}: {how.reason}"
    return snapshot(control, config.worktree_id, proof, Wanted(note=note, progress=how.progress))


def differs_from_head(control: Control, config: WorktreeConfig) -> bool:
    """Whether a worktree's directory holds something that its head does not, or lacks something."""
    tip = config.head_snapshot_id or config.base_snapshot_id
    return _differs(control, control.places.payload(config.worktree_id), tip, config.worktree_id)


def _differs(control: Control, payload: Path, tip: str | None, worktree: str) -> bool:
    if tip is not None and not is_ready(control.places, tip):
        return True
    return next(unsaved(control, payload, tip, worktree), None) is not None


# --- 2. What shall be there -------------------------------------------------------------------------


def _prepare(control: Control, worktree: str, room: Scratch, source: Descriptor, how: InPlace) -> Operation:
    from holdfast.fs.trees import materialise, sync_tree

    tree = control.places.tree(source.snapshot_id)
    new, path = room.path / NEW, None
    if how.path is None:
        materialise(tree, new, cache=room.path / CACHE, progress=how.progress)
    else:
        path, rest = _placed(control, worktree, how.path)
        for each in rest:
            make_directories(new)
            new = new / each
        materialise(tree, new, only=os.fsencode(how.path), progress=how.progress)
    sync_tree(room.path)
    if how.progress is not None and how.path is None:
        how.progress(source.files, source.bytes)  # the last moment to say no: nothing was changed yet
    operation = Operation(
        operation_id=room.scratch_id,
        kind=OperationKind.RESTORE,
        worktree_id=worktree,
        begun_at=format_instant(control.store.now()),
        holder_id=control.holder.holder_id,
        identity=Identity.of(control.holder),
        snapshot_id=source.snapshot_id,
        path=path,
        reason=how.reason,
        keeps=how.keep,
    )
    return msgspec.structs.replace(operation, inode=_inode(room.path / NEW))


def _placed(control: Control, worktree: str, path: str) -> tuple[str, tuple[str, ...]]:
    """What is exchanged so that `path` comes back: itself, or the first that is missing above it; and
    which names lead on from there."""
    parts = split_relative(path)
    with contextlib.ExitStack() as opened:
        here = opened.enter_context(Directory.open(control.places.payload(worktree)))
        for depth, part in enumerate(parts[:-1], 1):
            if here.status(part) is None:
                return "/".join(parts[:depth]), parts[depth:]
            here = opened.enter_context(here.enter(part))  # refuses a link: it could lead elsewhere
    return path, ()


def _link(control: Control, room: Scratch, source: Descriptor) -> None:
    from holdfast.fs.trees import link_tree, sync_tree

    link_tree(control.places.tree(source.snapshot_id), room.tree)
    sync_tree(room.tree)


# --- 3. The decision --------------------------------------------------------------------------------


class _Beginning(NamedTuple):
    """The transaction that decides."""

    control: Control
    config: WorktreeConfig
    proof: Proof | None
    source: Descriptor
    operation: Operation
    may_publish: Permission

    @classmethod
    def of(
        cls,
        control: Control,
        config: WorktreeConfig,
        proof: Proof | None,
        source: Descriptor,
        operation: Operation,
    ) -> _Beginning:
        may_publish = permission(control, config.worktree_id, proof)
        return cls(control, config, proof, source, operation, may_publish)

    def whole(self) -> Descriptor:
        """Publish R on top of the line and put the operation on record."""
        key = DESCRIPTORS.key(self.operation.operation_id)

        def decide(view: View, now: float) -> Decision[Descriptor]:
            current, source = self._allowed(view, now)
            changes, published = publishing(current, self._restored(source))
            return Decision([*changes, *self._recorded(view, now)], published)

        return self.control.store.transact([*self._named(), key], decide).result

    def part(self) -> None:
        """Put the operation on record: what is exchanged is unsaved work on top of the head."""

        def decide(view: View, now: float) -> Decision[None]:
            self._allowed(view, now)
            return Decision(self._recorded(view, now), None)

        self.control.store.transact(self._named(), decide)

    def _named(self) -> list[Key[Any] | Stream[Any]]:
        source = DESCRIPTORS.key(self.source.snapshot_id)
        return [*publishing_keys(self.config.worktree_id), source, self.control.trail.stream]

    def _allowed(self, view: View, now: float) -> tuple[WorktreeConfig, Descriptor]:
        config = same_worktree(self.config, self.may_publish(view, now))
        source = view.get(DESCRIPTORS.key(self.source.snapshot_id))
        if source is None:
            raise no_snapshot(self.source.snapshot_id)
        return config, usable(source)

    def _recorded(self, view: View, now: float) -> list[Change]:
        operation = self.operation
        facts = {
            "worktree_id": operation.worktree_id,
            "operation_id": operation.operation_id,
            "restored_from": operation.snapshot_id,
            "path": operation.path,
            "reason": operation.reason,
            "lock_id": self.proof.lock_id if self.proof else None,
            "fencing_token": self.proof.token if self.proof else None,
        }
        return [
            Create(OPERATIONS.key(operation.worktree_id), operation),
            self.control.audit(view, now, "restore_begun", **facts),
        ]

    def _restored(self, source: Descriptor) -> Descriptor:
        exclusive = self.config.isolation is Isolation.EXCLUSIVE
        return msgspec.structs.replace(
            source,
            snapshot_id=self.operation.operation_id,
            worktree_id=self.operation.worktree_id,
            parent_id=None,
            created_at=self.operation.begun_at,
            note=self.operation.reason,
            holder_id=self.operation.holder_id,
            lock_id=self.proof.lock_id if self.proof and exclusive else None,
            fencing_token=self.proof.token if self.proof and exclusive else None,
            restored_from=source.snapshot_id,
        )


# --- 4 to 6. Carrying it out ------------------------------------------------------------------------


def finish(control: Control, operation: Operation) -> None:
    """Bring the restore of a process that is gone to its end. Whoever calls this holds the payload lock."""
    _carry_out(control, operation)
    sweep(control.places, operation.operation_id)


def _carry_out(control: Control, operation: Operation) -> None:
    """Do what was decided. Every step looks first whether it is done: so this can be interrupted
    anywhere, and be done again."""
    room = control.places.scratch / operation.operation_id
    new, target, replaced = room / NEW, _target(control, operation), room / REPLACED
    if not _is_in_place(control, operation, room):
        _exchange(control, operation, room)  # 4
    sync_parents(new, target)
    if _inode(new) is not None:
        move(new, replaced)  # 5. what was replaced is never taken for what is to be put in place
    late = _late(control, operation, room) if operation.keeps and operation.path is None else None
    _end(control, operation, late)  # 6
    if operation.path is None:
        _adopt_cache(control, operation, room)


def _is_in_place(control: Control, operation: Operation, room: Path) -> bool:
    """Whether the exchange has been made: the inode tells, or in a copy of the repository the content."""
    new, target = _inode(room / NEW), _inode(_target(control, operation))
    if operation.inode in (new, target):
        return target == operation.inode
    if operation.path is not None:
        return True  # either part may be there, and is: whoever wants the other one restores it again
    tree = control.places.tree(operation.operation_id)
    if new is not None:
        return not _holds(room / NEW, tree)  # the old content is here, so the new one is there
    return _inode(room / REPLACED) is not None or _holds(_target(control, operation), tree)


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
    if _inode(new) is None:  # somebody has cleared our scratch away; the snapshot has it all
        make_directories(room)
        materialise(control.places.tree(operation.operation_id), new)
        sync_tree(room)
    if _inode(target) is None:
        move(new, target)
        return
    try:
        exchange(new, target)
    except ExchangeUnavailable:
        move(target, room / REPLACED)
        move(new, target)


def _late(control: Control, operation: Operation, room: Path) -> Descriptor | None:
    """A snapshot of what was replaced, if it is not what was kept of it: nobody's last write is lost."""
    document = control.store.read(DESCRIPTORS.key(operation.operation_id))
    replaced = room / REPLACED
    if document is None or _inode(replaced) is None:
        return None
    kept = document.record.parent_id
    if not _differs(control, replaced, kept, operation.worktree_id):
        return None
    return _captured_late(control, operation, room, kept)


def _captured_late(control: Control, operation: Operation, room: Path, kept: str | None) -> Descriptor:
    from holdfast.fs.trees import capture, choose_engine, remove_tree, sync_tree

    remove_tree(room / LATE)  # what a finisher that died has left
    base = control.places.tree(kept) if kept and is_ready(control.places, kept) else None
    engine = choose_engine(room / REPLACED, room)
    captured = capture(room / REPLACED, room / LATE, engine=engine, base=base, cache=None, quiesced=False)
    sync_tree(room / LATE)
    late_id = new_snapshot_id()
    make_directories(control.places.snapshots)
    move(room / LATE, control.places.tree(late_id))
    return Descriptor(
        snapshot_id=late_id,
        worktree_id=operation.worktree_id,
        parent_id=kept,
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


def _inode(path: Path) -> str | None:
    """What tells this file or directory from every other one on the filesystem; None if it is not there."""
    try:
        return str(calls.stat(path, follow_symlinks=False).st_ino)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise io_failure("look at", path, error) from error
