"""The records of worktrees and snapshots, and their keys in the store."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from holdfast.leases.rules import Identity
from holdfast.store.model import Family, Key, StructCodec

MAIN = "main"
"""The worktree that every repository has; it is never renamed or removed."""

FORMAT_VERSION = 1
"""The newest layout of `.jvs/` that this program understands."""


class Isolation(StrEnum):
    EXCLUSIVE = "exclusive"
    """One writer at a time: the holder of the lease."""
    SHARED = "shared"
    """Any number of writers. High-risk: nothing keeps them apart."""


class Consistency(StrEnum):
    QUIESCED = "quiesced"
    """Nothing changed during the capture."""
    BEST_EFFORT = "best_effort"
    """Each file as it was found; files may be from different moments."""


class RepositoryFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`version` grows when older programs could do harm."""

    version: int
    repository_id: str
    created_at: str


class SnapshotDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
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

    @property
    def tip(self) -> str | None:
        """The snapshot that the worktree's content builds on: its head, else the base it was created from."""
        return self.head_snapshot_id or self.base_snapshot_id


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
    """The snapshot whose content this is, if a restore in place published it."""
    not_preserved: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    """Fifos, sockets and devices: recorded, not captured."""
    doomed_by: str | None = None
    """The gc plan that is deleting this snapshot; nothing new may refer to it."""


class OperationKind(StrEnum):
    """A change of a worktree's directory. The comments say how it ends if its process dies."""

    CREATE = "create"  # undone; finished if the directory is in place
    RENAME = "rename"  # finished
    REMOVE = "remove"  # finished
    RESTORE = "restore"  # finished


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A decided change of a worktree's directory that is not complete.

    While it exists, nobody gets the lease and nothing is published. A process that finds it and gets the
    payload lock finishes it: the process that began it is gone.
    """

    operation_id: str
    kind: OperationKind
    worktree_id: str
    begun_at: str
    holder_id: str
    identity: Identity = Identity()
    counterpart: str | None = None
    """The other name of a rename."""
    becomes: bool = False
    """Whether this is a rename's record under the new name."""
    inode: str | None = None
    """Identifies the directory when another one exists at its path."""
    isolation: Isolation | None = None
    label: str | None = None
    """Isolation and label of the worktree to create."""
    snapshot_id: str | None = None
    """The snapshot to create from or to restore; of a removal, the one that saved unsaved work."""
    path: str | None = None
    """The part of the tree to restore, if not all of it."""
    reason: str = ""
    keeps: bool = False
    """Of a restore or removal: whether to keep the old content, down to the last write."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A name for a snapshot, which protects it from collection."""

    name: str
    snapshot_id: str
    created_at: str
    note: str = ""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Protects a snapshot from collection, perhaps for a limited time. A snapshot can have several."""

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
    """The record of a worktree, and the operation pending on it."""
    return [WORKTREES.key(name), OPERATIONS.key(name)]
