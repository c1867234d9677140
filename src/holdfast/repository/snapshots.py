"""Taking a snapshot: the content of a worktree under a new id, whole or not at all.

`docs/protocols/snapshots.md` has the same numbers.

1. Scratch directory, with an intent that protects the parent; share nothing with a parent that is marked for deletion.
2. Capture the payload into the scratch directory's tree: files, manifest with hashes, `.READY` last.
3. Sync, once.
4. Rename the tree to `.jvs/snapshots/<id>`. Without a descriptor, it is not visible.
5. One transaction: the token check; then the descriptor, whose parent is the current head; the head; the
   reference; the audit entry. **Commit point.**

A refusal or an error at 5 takes the tree back. A kill leaves an invisible tree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, ConsistencyUnavailable, Failure, NotDurable, NotFound, OutcomeUnknown
from holdfast.fs.directory import status_at
from holdfast.repository.context import (
    DESCRIPTORS,
    REFERENCES,
    WORKTREES,
    Consistency,
    Descriptor,
    Isolation,
    Proof,
    Reference,
    RepositoryContext,
    WorktreeConfig,
    check_early,
    new_snapshot_id,
    publishing_keys,
    token_check,
)
from holdfast.repository.history import reference_name
from holdfast.repository.payloads import CaptureOptions, Scratch, refuse_replaced, scratch
from holdfast.store.model import Change, Create, Decision, Key, Replace, Stream, View

if TYPE_CHECKING:
    from holdfast.repository.content import Upload
    from holdfast.trees.engines import Engine
    from holdfast.trees.results import Captured
    from holdfast.trees.scan import Progress

MOST_LISTED, MOST_NAMED = 1000, 5


class SnapshotOptions(NamedTuple):
    """How to take a snapshot. None: the default of the worktree or the filesystem."""

    note: str = ""
    consistency: Consistency | None = None
    tag: str | None = None
    engine: Engine | None = None
    progress: Progress | None = None
    warn: Callable[[str], object] | None = None  # called if the parent is damaged; the new snapshot is sound
    allow_empty: bool = False  # take it even if it equals its parent, in a home that would skip it


DEFAULT_OPTIONS = SnapshotOptions()


def snapshot(
    context: RepositoryContext, worktree: str, proof: Proof | None, options: SnapshotOptions = DEFAULT_OPTIONS
) -> Descriptor:
    """Publish the content of a worktree; an exclusive one requires the proof of its lease.

    Raises `FencingMismatch` or `LockExpired` if the lease is lost by step 5, and `ConsistencyUnavailable`
    if something changed during a quiesced capture; nothing of the snapshot is visible then.
    """
    config = check_early(context, worktree, proof)
    _check_tag(context, options.tag)
    level = _consistency(config, options.consistency)
    context.home.fetch_work(worktree)
    snapshot_id, uses = new_snapshot_id(), [config.tip] if config.tip else []
    refuse_replaced(context, worktree)
    identity = _identity(context, worktree)
    # 1. The scratch directory has the snapshot's id: a tree with that id is in progress, not a leftover.
    with scratch(context, "snapshot", worktree=worktree, uses=uses, scratch_id=snapshot_id) as room:
        base = usable_base(context, config.tip)
        how = CaptureOptions(
            quiesced=level is Consistency.QUIESCED,
            base=base.snapshot_id if base else None,
            base_hash=base.payload_hash if base else None,
            cached=worktree,
            engine=options.engine,
            progress=options.progress,
            may_skip=_may_skip(context, options),
        )
        captured = context.home.capture(room, context.paths.payload(worktree), how)  # 2, 3
        _require_same(context, worktree, identity)
        if base is not None and _is_enough(context, base, captured, options):
            return base
        if captured.damaged and options.warn is not None:
            named = ", ".join(captured.damaged[:MOST_NAMED])
            options.warn(f"{config.tip} is damaged, in {named}: run 'holdfast verify {config.tip} --repair'")
        if options.progress is not None:
            options.progress(captured.files, captured.bytes)  # the last chance to cancel
        fencing = proof if config.isolation is Isolation.EXCLUSIVE else None
        descriptor = describe(context, worktree, snapshot_id, captured, level, options.note, fencing)
        with published_tree(context, room, snapshot_id):  # 4
            _require_same(context, worktree, identity)
            return _sent_and_published(context, config, descriptor, proof, options.tag)  # 5


def _is_enough(context: RepositoryContext, base: Descriptor, captured: Captured, options: SnapshotOptions) -> bool:
    """Whether the parent has the same content, so that no further snapshot is needed."""
    return _may_skip(context, options) and captured.payload_hash == base.payload_hash


def _may_skip(context: RepositoryContext, options: SnapshotOptions) -> bool:
    return context.home.skips_equal and not (options.allow_empty or options.tag)


def _check_tag(context: RepositoryContext, tag: str | None) -> None:
    if tag is not None and context.store.read(REFERENCES.key(reference_name(tag))) is not None:
        hint = "Choose another name, or delete it first: 'holdfast ref delete'."
        raise AlreadyExists(f"the reference {tag} already exists", hint=hint, name=tag)


def _consistency(config: WorktreeConfig, asked: Consistency | None) -> Consistency:
    """The level asked for, else the worktree's default, else the default of its isolation."""
    default = config.snapshot_defaults.consistency_level if config.snapshot_defaults else None
    of_isolation = Consistency.BEST_EFFORT if config.isolation is Isolation.SHARED else Consistency.QUIESCED
    return asked or default or of_isolation


def _identity(context: RepositoryContext, worktree: str) -> tuple[int, int]:
    path = context.paths.payload(worktree)
    status = status_at(path)
    if status is None:
        hint = "Put it back, or restore a snapshot: 'holdfast restore ID'."
        raise NotFound(f"the directory of {worktree} does not exist: {path}", hint=hint, worktree=worktree)
    return status.st_dev, status.st_ino


def _require_same(context: RepositoryContext, worktree: str, identity: tuple[int, int]) -> None:
    """Raise if a restore in place or a rename has put another directory at the path."""
    if _identity(context, worktree) != identity:
        message = f"the directory of {worktree} was replaced while it was being captured"
        raise ConsistencyUnavailable(message, worktree=worktree)


def usable_base(context: RepositoryContext, snapshot_id: str | None) -> Descriptor | None:
    """The snapshot, if it is safe to share files and directories with it. An intent must already name it."""
    found = None if snapshot_id is None else context.descriptor(snapshot_id)
    if found is None or found.doomed_by or not context.home.is_here(found.snapshot_id):
        return None
    return found


def describe(
    context: RepositoryContext,
    worktree: str,
    snapshot_id: str,
    captured: Captured,
    level: Consistency,
    note: str,
    proof: Proof | None = None,
) -> Descriptor:
    return Descriptor(
        snapshot_id=snapshot_id,
        worktree_id=worktree,
        parent_id=None,  # known when it is published
        created_at=format_instant(context.store.now()),
        consistency_level=level,
        engine=str(captured.engine),
        payload_hash=captured.payload_hash,
        files=captured.files,
        bytes=captured.bytes,
        note=note,
        holder_id=context.holder.holder_id,
        lock_id=proof.lock_id if proof else None,
        fencing_token=proof.token if proof else None,
        not_preserved=truncated(captured.not_preserved),
        special=truncated(captured.special),
        left_out=msgspec.UNSET if captured.left_out is None else captured.left_out,
        clone=context.clone,
    )


def truncated(names: Sequence[str]) -> tuple[str, ...]:
    """The names that a descriptor lists, which must stay small. The manifest has them all."""
    more = len(names) - MOST_LISTED
    return tuple(names) if more <= 0 else (*names[:MOST_LISTED], f"... and {more} more")


@contextlib.contextmanager
def published_tree(context: RepositoryContext, room: Scratch, snapshot_id: str) -> Iterator[None]:
    """Put the content of a scratch directory in place; take it back if the block fails to publish it."""
    try:
        context.home.publish(room, snapshot_id)
    except NotDurable:
        _take_back(context, room, snapshot_id)
        raise
    try:
        yield
    except OutcomeUnknown:
        raise  # it may have been published: the tree stays
    except BaseException:
        _take_back(context, room, snapshot_id)
        raise


def _take_back(context: RepositoryContext, room: Scratch, snapshot_id: str) -> None:
    """Take back a tree without descriptor: the transaction has ended, so none will follow. A failure leaves garbage."""
    with contextlib.suppress(Failure):
        if context.store.read(DESCRIPTORS.key(snapshot_id)) is None:
            context.home.take_back(room, snapshot_id)


def _sent_and_published(
    context: RepositoryContext, config: WorktreeConfig, descriptor: Descriptor, proof: Proof | None, tag: str | None
) -> Descriptor:
    """Publish a snapshot, after its content was sent to the content store, if there is one."""
    if (contents := context.home.contents) is None:
        return _publish(context, config, descriptor, proof, tag)

    def publish(upload: Upload) -> Descriptor:
        sent = msgspec.structs.replace(descriptor, content=upload.content)
        return _publish(context, config, sent, proof, tag, upload)

    return contents.sending(descriptor.snapshot_id, descriptor.payload_hash, config.tip, publish)


def _publish(
    context: RepositoryContext,
    config: WorktreeConfig,
    descriptor: Descriptor,
    proof: Proof | None,
    tag: str | None,
    upload: Upload | None = None,
) -> Descriptor:
    """Commit point of a snapshot."""
    worktree, key = descriptor.worktree_id, DESCRIPTORS.key(descriptor.snapshot_id)
    check = token_check(context, worktree, proof)
    keys: list[Key[Any] | Stream[Any]] = [*publishing_keys(worktree), key, context.trail.stream]
    if tag is not None:
        keys.append(REFERENCES.key(tag))
    if upload is not None:
        keys += upload.keys

    def decide(view: View, now: float) -> Decision[Descriptor]:
        current = same_worktree(config, check(view, now))
        changes, published = publish_changes(current, descriptor)
        if upload is not None:
            changes += upload.changes(view)
        if tag is not None:
            made = Reference(name=tag, snapshot_id=published.snapshot_id, created_at=format_instant(now))
            changes.append(Create(REFERENCES.key(tag), made))
        facts: dict[str, object] = {"worktree_id": worktree, "snapshot_id": published.snapshot_id}
        facts |= {"parent_id": published.parent_id, "consistency_level": published.consistency_level.value}
        facts |= {"payload_hash": published.payload_hash, "lock_id": published.lock_id}
        facts |= {"fencing_token": published.fencing_token, "note": published.note, "tag": tag}
        entry = context.audit(view, now, "snapshot_published", **facts)
        return Decision([*changes, entry], published)

    return context.store.transact(keys, decide).result


def publish_changes(config: WorktreeConfig, descriptor: Descriptor) -> tuple[list[Change], Descriptor]:
    """The changes that make a snapshot the head, with the current head as its parent. Pure."""
    published = msgspec.structs.replace(descriptor, parent_id=config.tip)
    moved = msgspec.structs.replace(config, head_snapshot_id=published.snapshot_id)
    create = Create(DESCRIPTORS.key(published.snapshot_id), published)
    return [create, Replace(WORKTREES.key(config.worktree_id), moved)], published


def same_worktree(before: WorktreeConfig, now: WorktreeConfig) -> WorktreeConfig:
    """The current record, unless another worktree has the name by now. Pure."""
    if now.created_at != before.created_at:
        message = f"{now.worktree_id} is now a different worktree; nothing was published"
        raise ConsistencyUnavailable(message, worktree=now.worktree_id)
    return now
