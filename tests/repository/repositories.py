"""Quickly made repositories, with handmade snapshots for tests in which only their records matter."""

from __future__ import annotations

from pathlib import Path

from holdfast.clock import format_instant
from holdfast.git import worktrees
from holdfast.repository.context import (
    DESCRIPTORS,
    FORMAT,
    FORMAT_VERSION,
    MAIN,
    REFERENCES,
    WORKTREES,
    Consistency,
    Descriptor,
    Isolation,
    Reference,
    RepositoryContext,
    RepositoryFormat,
    SnapshotDefaults,
    WorktreeConfig,
)
from holdfast.repository.git_home import GitHome
from holdfast.repository.repository import Repository
from holdfast.store.files import FileStore
from holdfast.store.model import Change, Create, Decision, Replace

BEGIN = 1_700_000_000.0


def make_repository(root: Path, *, isolation: Isolation = Isolation.EXCLUSIVE) -> Repository:
    """A new repository with an empty `main`."""
    record = RepositoryFormat(version=FORMAT_VERSION, repository_id="test", created_at=format_instant(BEGIN))
    with FileStore(root) as store:
        store.transact([FORMAT], lambda view, now: Decision([Create(FORMAT, record)], None))
    repository = Repository(root)
    add_worktree(repository.context, MAIN, isolation=isolation)
    return repository


def add_worktree(
    context: RepositoryContext,
    name: str,
    *,
    isolation: Isolation = Isolation.EXCLUSIVE,
    head: str | None = None,
    consistency: Consistency | None = None,
) -> WorktreeConfig:
    """A worktree with an empty directory."""
    config = WorktreeConfig(
        worktree_id=name,
        isolation=isolation,
        created_at=format_instant(BEGIN),
        base_snapshot_id=None,
        head_snapshot_id=head,
        snapshot_defaults=SnapshotDefaults(consistency) if consistency else None,
    )
    add_directory(context, name)
    key = WORKTREES.key(name)
    context.store.transact([key], lambda view, now: Decision([Create(key, config)], None))
    return config


def add_directory(context: RepositoryContext, name: str) -> None:
    """The directory of a worktree, in any home."""
    if isinstance(context.home, GitHome):
        git, path = context.home.git, context.paths.worktrees / name
        worktrees.add(git, path, f"hf/{name}", "trunk", new_branch=True)
        worktrees.set_name(git, path, name)
    else:
        context.paths.payload(name).mkdir(parents=True)


def add_snapshot(
    context: RepositoryContext,
    snapshot_id: str,
    *,
    parent: str | None = None,
    worktree: str = MAIN,
    ready: bool = True,
    tree: bool = True,
    at: float = BEGIN,
    head: bool = True,
    consistency: Consistency = Consistency.QUIESCED,
    doomed_by: str | None = None,
) -> Descriptor:
    """Create the records of a snapshot and as much of its tree as requested, and move the head to it."""
    descriptor = Descriptor(
        snapshot_id=snapshot_id,
        worktree_id=worktree,
        parent_id=parent,
        created_at=format_instant(at),
        consistency_level=consistency,
        engine="copy",
        payload_hash="",
        files=0,
        bytes=0,
        doomed_by=doomed_by,
    )
    if tree:
        context.paths.tree(snapshot_id).mkdir(parents=True)
    if tree and ready:
        (context.paths.tree(snapshot_id) / ".READY").touch()
    key, config = DESCRIPTORS.key(snapshot_id), context.config(worktree)
    changes: list[Change] = [Create(key, descriptor)]
    if head:
        fields = {name: getattr(config, name) for name in config.__struct_fields__}
        moved = WorktreeConfig(**{**fields, "head_snapshot_id": snapshot_id})
        changes.append(Replace(WORKTREES.key(worktree), moved))
    context.store.transact([key, WORKTREES.key(worktree)], lambda view, now: Decision(changes, None))
    return descriptor


def add_reference(context: RepositoryContext, name: str, snapshot_id: str) -> None:
    key = REFERENCES.key(name)
    record = Reference(name=name, snapshot_id=snapshot_id, created_at=format_instant(BEGIN))
    context.store.transact([key], lambda view, now: Decision([Create(key, record)], None))
