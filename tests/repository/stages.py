"""Repositories for tests, and helpers that arrange and inspect their state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import format_instant
from holdfast.fs import calls
from holdfast.fs.probe import Capabilities
from holdfast.leases.rules import Lease
from holdfast.leases.service import LeaseService
from holdfast.repository.context import DESCRIPTORS, MAIN, Consistency, Descriptor, RepositoryContext
from holdfast.repository.repository import Repository
from holdfast.store.audit import AuditEntry, verify
from holdfast.store.model import Create, Decision, Replace, View
from holdfast.trees.capture import capture
from holdfast.trees.engines import choose_engine
from holdfast.trees.manifest import read_manifest
from holdfast.trees.shared_dirs import located, read_shared_directories
from tests.support.homes import SAFE
from tests.support.homes import make_repository as make_repository

LASTING = tuple(
    name
    for name in calls.CHANGING
    if name not in ("open", "close", "flock", "flock_interruptible") and "sync" not in name
)
"""Calls that change the disk. (A file that was only opened exists, empty, before the next of them.)"""


def unprobed(directory: Path) -> Capabilities:
    """Stand in for the probe of the filesystem, which starts processes."""
    return SAFE


def expire(repository: Repository, worktree: str = MAIN, *, service: LeaseService | None = None) -> Lease:
    """Expire the lease of a worktree, or of another service, as if its holder had died long ago."""
    keys, reading = (service or repository.leases).keys(worktree), repository.leases.reading()

    def decide(view: View, now: float) -> Decision[Lease]:
        lease = view.get(keys.lease)
        assert lease is not None
        past = msgspec.structs.replace(
            lease, lease_expires_at=format_instant(now - 60), boot_expires_at=reading.at(now).mark(-60)
        )
        return Decision([Replace(keys.lease, past)], past)

    return repository.context.store.transact(keys.all(), decide).result


def events(repository: Repository) -> list[AuditEntry]:
    """The entries of the audit trail; reading them verifies the chain."""
    return list(verify(repository.context.store.entries(repository.context.trail.stream)))


def put_files(directory: Path, files: dict[str, str]) -> None:
    """Write files, and create the directories they need."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _is_of_git(directory: Path, path: Path) -> bool:
    """Whether a file belongs to git itself: the `.git` of a linked worktree, or anything in that of a checkout."""
    return path.name == ".git" or (".git" in path.relative_to(directory).parts and (directory / ".git/HEAD").exists())


def files_in(directory: Path) -> dict[str, str]:
    """The files below a directory and their content."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not _is_of_git(directory, path)
    }


def files_stored(context: RepositoryContext, snapshot_id: str) -> dict[str, str]:
    """The files of a snapshot and their content, in any home."""
    read = context.home.reader(snapshot_id)
    paths = [each.path for each in context.home.entries(snapshot_id) if each.kind == "f"]
    return {os.fsdecode(path): read(path, 1 << 20).decode() for path in paths}


def files_kept(tree: Path) -> dict[str, str]:
    """The files of a snapshot's tree and their content, including those in shared directories."""
    homes = read_shared_directories(tree)
    paths = [each.path for each in read_manifest(tree) if each.kind == "f"]
    return {os.fsdecode(path): located(tree, homes, path).read_text() for path in paths}


def json_at(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())


def snapshot_by_hand(repository: Repository, worktree: str, snapshot_id: str) -> Descriptor:
    """Create a snapshot of a worktree without the safeguards of publishing."""
    places = repository.context.paths
    engine = choose_engine(places.payload(worktree), places.snapshots)
    captured = capture(places.payload(worktree), places.tree(snapshot_id), engine=engine, quiesced=False)
    descriptor = Descriptor(
        snapshot_id=snapshot_id,
        worktree_id=worktree,
        parent_id=None,
        created_at=format_instant(0),
        consistency_level=Consistency.QUIESCED,
        engine=captured.engine,
        payload_hash=captured.payload_hash,
        files=captured.files,
        bytes=captured.bytes,
    )
    key = DESCRIPTORS.key(snapshot_id)
    repository.context.store.transact([key], lambda view, now: Decision([Create(key, descriptor)], None))
    return descriptor
