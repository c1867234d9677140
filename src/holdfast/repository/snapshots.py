"""Taking a snapshot: the content of a worktree, kept under an id, whole or not at all.

`docs/protocols/snapshots.md` has the same numbers.

1. Scratch: an intent that names the parent, so that nobody collects it meanwhile; then a look
   whether somebody is about to.
2. Capture the payload into the scratch's tree: files, manifest with hashes, `.READY` last.
3. Sync, once.
4. Rename the tree to `.jvs/snapshots/<id>`. Nobody sees it: there is no descriptor.
5. One transaction: nothing is being done to the worktree, the lease is held with this very token,
   and then the descriptor, whose parent is the head of this moment; the head; the reference; the
   audit entry. **Commit point.**

A refusal at 5 takes the tree back. So does an error; what a kill leaves is a tree that nobody sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import (
    AlreadyExists,
    ConsistencyUnavailable,
    Failure,
    NotDurable,
    NotFound,
    OutcomeUnknown,
)
from holdfast.fs import calls
from holdfast.fs.directory import io_failure, make_directories, move
from holdfast.fs.names import shortened
from holdfast.fs.paths import is_directory
from holdfast.repository.compare import below, differs, unsaved
from holdfast.repository.context import (
    Proof,
    RepositoryContext,
    check_early,
    is_ready,
    new_snapshot_id,
    permission,
    publishing_keys,
    reference_name,
)
from holdfast.repository.payloads import Scratch, refuse_replaced, scratch
from holdfast.repository.records import (
    DESCRIPTORS,
    REFERENCES,
    WORKTREES,
    Consistency,
    Descriptor,
    Isolation,
    Operation,
    Reference,
    WorktreeConfig,
)
from holdfast.store.model import Change, Create, Decision, Key, Replace, Stream, View

if TYPE_CHECKING:
    from holdfast.trees.capture import Captured
    from holdfast.trees.engines import Engine
    from holdfast.trees.scan import Progress


class SnapshotOptions(NamedTuple):
    """How a snapshot shall be taken. What is None is as the worktree and the filesystem have it."""

    note: str = ""
    consistency: Consistency | None = None
    tag: str | None = None
    engine: Engine | None = None
    progress: Progress | None = None


AS_USUAL = SnapshotOptions()


def snapshot(
    control: RepositoryContext, worktree: str, proof: Proof | None, wanted: SnapshotOptions = AS_USUAL
) -> Descriptor:
    """Keep what is in a worktree. In an exclusive one it takes the proof that its lease is held.

    Raises `FencingMismatch` or `LockExpired` if it is not any more when it comes to publishing, and
    `ConsistencyUnavailable` if something changed while a quiesced snapshot was captured; then nothing
    of it is visible.
    """
    config = check_early(control, worktree, proof)
    _check_tag(control, wanted.tag)
    level = consistency_of(config, wanted.consistency)
    snapshot_id = new_snapshot_id()
    tip = config.head_snapshot_id or config.base_snapshot_id
    uses = [tip] if tip else []
    refuse_replaced(control, worktree)
    payload = _Directory(control.places.payload(worktree), worktree)
    # 1. The scratch has the id of the snapshot: whoever finds the tree can tell that it is in the making.
    with scratch(control, "snapshot", worktree=worktree, uses=uses, scratch_id=snapshot_id) as room:
        captured = _capture(control, payload, room, tip, level, wanted)  # 2, 3
        descriptor = _describe(control, config, snapshot_id, captured, level, proof, wanted.note)
        with published_tree(control, room, snapshot_id):  # 4
            payload.require_same()
            return _publish(control, config, descriptor, proof, wanted.tag)  # 5


def consistency_of(config: WorktreeConfig, wanted: Consistency | None) -> Consistency:
    """What a snapshot promises: as asked for, else by the worktree's policy, else by its isolation."""
    defaults = config.snapshot_defaults
    if wanted is not None:
        return wanted
    if defaults is not None and defaults.consistency_level is not None:
        return defaults.consistency_level
    return Consistency.BEST_EFFORT if config.isolation is Isolation.SHARED else Consistency.QUIESCED


@contextlib.contextmanager
def published_tree(control: RepositoryContext, room: Scratch, snapshot_id: str) -> Iterator[None]:
    """Put the tree of a scratch among the snapshots; take it back if the block fails to publish it."""
    make_directories(control.places.snapshots)
    tree = control.places.tree(snapshot_id)
    try:
        move(room.tree, tree)
    except NotDurable:
        _take_back(control, room, snapshot_id)
        raise
    try:
        yield
    except OutcomeUnknown:
        raise  # perhaps it was published: the tree stays; if it was not, nobody sees it
    except BaseException:
        _take_back(control, room, snapshot_id)
        raise


def _take_back(control: RepositoryContext, room: Scratch, snapshot_id: str) -> None:
    """Our transaction has ended: whether there is a descriptor is final. What cannot be undone is litter."""
    with contextlib.suppress(Failure):
        if control.store.read(DESCRIPTORS.key(snapshot_id)) is None:
            move(control.places.tree(snapshot_id), room.path / "refused")


class _Directory:
    """The payload as it was when a snapshot began: another one at the same path is not what was captured."""

    def __init__(self, path: Path, worktree: str) -> None:
        self.path = path
        self.worktree = worktree
        self._identity = self._look()

    def require_same(self) -> None:
        """Raise if the directory was replaced since; it may have been restored in place, or renamed."""
        if self._look() != self._identity:
            raise ConsistencyUnavailable(
                f"the directory of {self.worktree} was replaced while it was being captured",
                worktree=self.worktree,
            )

    def _look(self) -> tuple[int, int]:
        try:
            status = calls.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise NotFound(
                f"the directory of {self.worktree} is not there: {self.path}",
                hint="Bring it back, or restore a snapshot: 'holdfast restore ID'.",
                worktree=self.worktree,
            ) from None
        except OSError as error:
            raise io_failure("look at", self.path, error) from error
        return status.st_dev, status.st_ino


def _capture(
    control: RepositoryContext,
    payload: _Directory,
    room: Scratch,
    tip: str | None,
    level: Consistency,
    wanted: SnapshotOptions,
) -> Captured:
    from holdfast.trees.capture import capture_best
    from holdfast.trees.walker import synced

    make_directories(control.places.caches)
    with synced(room.path):
        captured = capture_best(
            payload.path,
            room.tree,
            beside=room.path,
            wanted=wanted.engine,
            base=control.places.tree(tip) if tip and can_be_base(control, tip) else None,
            cache=control.places.stat_cache(payload.worktree),
            quiesced=level is Consistency.QUIESCED,
            progress=wanted.progress,
        )
        payload.require_same()
    if wanted.progress is not None:
        wanted.progress(captured.files, captured.bytes)  # the last moment to say no: nobody sees it yet
    return captured


def can_be_base(control: RepositoryContext, snapshot_id: str) -> bool:
    """Whether directories and files may be shared with this one; looked at after our intent names it."""
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    return (
        document is not None and document.record.doomed_by is None and is_ready(control.places, snapshot_id)
    )


def _describe(
    control: RepositoryContext,
    config: WorktreeConfig,
    snapshot_id: str,
    captured: Captured,
    level: Consistency,
    proof: Proof | None,
    note: str,
) -> Descriptor:
    exclusive = config.isolation is Isolation.EXCLUSIVE
    return Descriptor(
        snapshot_id=snapshot_id,
        worktree_id=config.worktree_id,
        parent_id=None,  # known when it is published
        created_at=format_instant(control.store.now()),
        consistency_level=level,
        engine=str(captured.engine),
        payload_hash=captured.payload_hash,
        files=captured.files,
        bytes=captured.bytes,
        note=note,
        holder_id=control.holder.holder_id,
        lock_id=proof.lock_id if proof and exclusive else None,
        fencing_token=proof.token if proof and exclusive else None,
        not_preserved=listed(captured.not_preserved),
        special=listed(captured.special),
    )


MOST_LISTED = 1000


def listed(names: Sequence[str]) -> tuple[str, ...]:
    """What a descriptor lists of them: it must stay small. The manifest has them all."""
    more = len(names) - MOST_LISTED
    return tuple(names) if more <= 0 else (*names[:MOST_LISTED], f"... and {more} more")


def _publish(
    control: RepositoryContext,
    config: WorktreeConfig,
    descriptor: Descriptor,
    proof: Proof | None,
    tag: str | None,
) -> Descriptor:
    worktree, key = descriptor.worktree_id, DESCRIPTORS.key(descriptor.snapshot_id)
    may_publish = permission(control, worktree, proof)
    named: list[Key[Any] | Stream[Any]] = [*publishing_keys(worktree), key, control.trail.stream]
    reference = REFERENCES.key(tag) if tag is not None else None
    if reference is not None:
        named.append(reference)

    def decide(view: View, now: float) -> Decision[Descriptor]:
        current = same_worktree(config, may_publish(view, now))
        changes, published = publishing(current, descriptor)
        if reference is not None and tag is not None:
            made = Reference(name=tag, snapshot_id=published.snapshot_id, created_at=format_instant(now))
            changes.append(Create(reference, made))
        facts = {
            "worktree_id": worktree,
            "snapshot_id": published.snapshot_id,
            **_told(published),
            "tag": tag,
        }
        return Decision([*changes, control.audit(view, now, "snapshot_published", **facts)], published)

    return control.store.transact(named, decide).result


def publishing(config: WorktreeConfig, descriptor: Descriptor) -> tuple[list[Change], Descriptor]:
    """The changes that put a snapshot on top of its worktree's line as it is at this moment. Pure."""
    parent = config.head_snapshot_id or config.base_snapshot_id
    published = msgspec.structs.replace(descriptor, parent_id=parent)
    moved = msgspec.structs.replace(config, head_snapshot_id=published.snapshot_id)
    changes: list[Change] = [
        Create(DESCRIPTORS.key(published.snapshot_id), published),
        Replace(WORKTREES.key(config.worktree_id), moved),
    ]
    return changes, published


def same_worktree(before: WorktreeConfig, now: WorktreeConfig) -> WorktreeConfig:
    """The record as it is now, unless the name was given to another worktree meanwhile. Pure."""
    if now.created_at != before.created_at:
        raise ConsistencyUnavailable(
            f"{now.worktree_id} is another worktree by now; nothing was published", worktree=now.worktree_id
        )
    return now


def _told(descriptor: Descriptor) -> dict[str, object]:
    return {
        "parent_id": descriptor.parent_id,
        "consistency_level": descriptor.consistency_level.value,
        "payload_hash": descriptor.payload_hash,
        "lock_id": descriptor.lock_id,
        "fencing_token": descriptor.fencing_token,
        "note": descriptor.note,
    }


def _check_tag(control: RepositoryContext, tag: str | None) -> None:
    """Refuse early what the transaction would refuse: a reference that is there, or a name that is none."""
    if tag is not None and control.store.read(REFERENCES.key(reference_name(tag))) is not None:
        raise AlreadyExists(
            f"there is a reference {tag} already",
            hint="Choose another name, or delete it first: 'holdfast ref delete'.",
            name=tag,
        )


@contextlib.contextmanager
def late_whole(
    control: RepositoryContext, operation: Operation, directory: Path, kept: str | None, note: str
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
    control: RepositoryContext, operation: Operation, replaced: Path, kept: str | None, note: str
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


def _room(control: RepositoryContext, kept: str | None) -> contextlib.AbstractContextManager[Scratch]:
    uses = [kept] if kept else []
    return scratch(control, "what was written late", uses=uses, scratch_id=new_snapshot_id())


def _part_differs(control: RepositoryContext, operation: Operation, replaced: Path, kept: str | None) -> bool:
    assert operation.path is not None
    if kept is not None and not is_ready(control.places, kept):
        return True
    found = unsaved(control, replaced, kept, operation.worktree_id)
    return next(below(operation.path, found), None) is not None


def _put_together(
    control: RepositoryContext, own: Scratch, replaced: Path, path: str, kept: str | None
) -> Path:
    """The content of `kept`, with what was replaced at `path`, as a directory of the scratch."""
    from holdfast.trees.capture import capture_best
    from holdfast.trees.restore import materialise
    from holdfast.trees.walker import remove_tree

    whole, part = own.path / "whole", own.path / "part"
    if kept is not None and is_ready(control.places, kept):
        materialise(control.places.tree(kept), whole)
    capture_best(replaced, part, beside=own.path, quiesced=False)
    for above in reversed((whole / path).parents[: path.count("/")]):
        if not is_directory(above):
            remove_tree(above)  # it was of another kind
    make_directories((whole / path).parent)
    remove_tree(whole / path)
    materialise(part, whole / path, only=os.fsencode(path))
    return whole


def _captured(control: RepositoryContext, directory: Path, own: Scratch, kept: str | None) -> Captured:
    from holdfast.trees.capture import capture_best
    from holdfast.trees.walker import synced

    base = control.places.tree(kept) if kept and can_be_base(control, kept) else None
    with synced(own.path):
        return capture_best(directory, own.tree, beside=own.path, base=base, quiesced=False)


def _descriptor(
    control: RepositoryContext, operation: Operation, late_id: str, captured: Captured, note: str
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
