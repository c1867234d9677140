"""What is stored about worktrees and snapshots, and under which keys."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from holdfast.leases.rules import Identity
from holdfast.store.model import Family, Key, StructCodec

MAIN = "main"
"""The worktree that every repository has. It is neither renamed nor removed."""

FORMAT_VERSION = 1
"""The newest layout of `.jvs/` that this program understands."""


class Isolation(StrEnum):
    """Who may write into a worktree."""

    EXCLUSIVE = "exclusive"
    """One writer at a time: whoever holds the lease."""
    SHARED = "shared"
    """Anybody at any time. High-risk: nothing keeps writers apart."""


class Consistency(StrEnum):
    """What a snapshot promises about the moment that it shows."""

    QUIESCED = "quiesced"
    """Nothing changed while it was captured."""
    BEST_EFFORT = "best_effort"
    """Each file as it was found; files may be of different moments."""


class RepositoryFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of repository this is; `version` grows when older programs could do harm."""

    version: int
    repository_id: str
    created_at: str


class SnapshotDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worktree's snapshots are like unless one says otherwise."""

    consistency_level: Consistency | None = None


class WorktreeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The one record of a worktree: `config.json`. `worktree_id` is its name."""

    worktree_id: str
    isolation: Isolation
    created_at: str
    base_snapshot_id: str | None
    head_snapshot_id: str | None
    label: str | None = None
    snapshot_defaults: SnapshotDefaults | None = None


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a snapshot. A snapshot is visible when it has one and its tree has `.READY`."""

    snapshot_id: str
    worktree_id: str
    parent_id: str | None
    created_at: str
    consistency_level: Consistency
    engine: str
    payload_hash: str
    files: int
    bytes: int
    note: str = ""
    holder_id: str = ""
    lock_id: str | None = None
    fencing_token: int | None = None
    restored_from: str | None = None
    """The snapshot whose content this is, if it was made by restoring one in place."""
    not_preserved: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    """Fifos, sockets and devices: recorded, not captured."""
    doomed_by: str | None = None
    """The plan that is about to delete this snapshot; nothing new may refer to it from then on."""


class OperationKind(StrEnum):
    """What is being done to a worktree's directory, and how it ends if its process dies."""

    CREATE = "create"  # undone, or finished if the directory is in its place
    RENAME = "rename"  # finished
    REMOVE = "remove"  # finished
    RESTORE = "restore"  # finished


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Something decided about a worktree's directory that has not been carried out in full.

    As long as it is there nobody is given the lease, and nothing is published. Whoever finds it and
    gets the payload lock (so that nobody else is at it) brings it to its end.
    """

    operation_id: str
    kind: OperationKind
    worktree_id: str
    begun_at: str
    holder_id: str
    identity: Identity = Identity()
    counterpart: str | None = None
    """The other name of a rename: the new one in the old one's record, and the other way round."""
    becomes: bool = False
    """Whether this is the record under the new name of a rename."""
    inode: str | None = None
    """Which directory it is about, if that has to be told from another one that stands in its way."""
    isolation: Isolation | None = None
    label: str | None = None
    """What the worktree that is created will be like."""
    snapshot_id: str | None = None
    """What is created from, or restored."""
    path: str | None = None
    """The part of the tree that is restored, if not all of it."""
    reason: str = ""
    keeps: bool = False
    """Of a restore or removal: whether what it takes away must be kept, down to the last write."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A name for a snapshot, which keeps it from being collected."""

    name: str
    snapshot_id: str
    created_at: str
    note: str = ""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a snapshot from being collected, for a reason, perhaps until a moment.

    A snapshot may have several, each somebody's own: taking one away leaves the others.
    """

    pin_id: str
    snapshot_id: str
    created_at: str
    reason: str = ""
    until: str | None = None
    holder_id: str = ""


FORMAT: Key[RepositoryFormat] = Key("jvs/format", StructCodec(RepositoryFormat))
WORKTREES: Family[WorktreeConfig] = Family("jvs/worktrees", StructCodec(WorktreeConfig))
OPERATIONS: Family[Operation] = Family("jvs/operations", StructCodec(Operation))
DESCRIPTORS: Family[Descriptor] = Family("jvs/descriptors", StructCodec(Descriptor))
REFERENCES: Family[Reference] = Family("jvs/refs", StructCodec(Reference))
PINS: Family[Pin] = Family("jvs/pins", StructCodec(Pin))


def worktree_keys(name: str) -> list[Key[Any]]:
    """What a decision about a worktree looks at: its record, and what is being done to it."""
    return [WORKTREES.key(name), OPERATIONS.key(name)]
