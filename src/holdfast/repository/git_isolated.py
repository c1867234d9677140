"""Fetching the commits of isolated worktrees into the repository: HEAD whenever it is needed, all before a removal.

In the repository, the branch of an isolated worktree follows HEAD of the worktree's own repository, whatever branch is
checked out there. git's reflog has its earlier commits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import Refused
from holdfast.fs.directory import entry_exists, make_directories
from holdfast.git import isolated, transfer
from holdfast.git import worktrees as linked
from holdfast.git.checkout import is_worktree_of
from holdfast.git.program import Git
from holdfast.git.snapshots import update_refs
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.repository.context import Operation
from holdfast.repository.git_paths import GitPaths

_FETCHED = "fetched"  # a mark in the scratch directory of a removal


def fetch_work(paths: GitPaths, git: Git, top: Path) -> None:
    """Fetch the commit that is checked out in an isolated worktree to its branch in the repository. Does nothing for
    other worktrees. Raises `Refused` if the worktree's own repository cannot be read."""
    found = is_worktree_of(os.fspath(top), os.fspath(paths.common))
    if found is None or not isolated.is_isolated(top) or _is_fetched(git, top):
        return
    git_id = Path(found.git_dir).name
    with _locked(paths, git_id):  # else a slower process could put an older commit in its place
        head, branch = isolated.read_head(top), linked.current_branch(git, top)
        if branch is None:
            raise Refused(f"no branch of {paths.common} belongs to the isolated worktree {top}", path=str(top))
        if head is not None:
            isolated.fetch_commits(git, top, paths.incoming / git_id, {f"refs/heads/{branch}": head})


def _is_fetched(git: Git, top: Path) -> bool:
    head = isolated.read_head(top)
    return head is None or head == linked.head_commit(git, top)


def _locked(paths: GitPaths, git_id: str) -> LockGuard:
    make_directories(paths.guards)
    return FileLocker(follow_links=False).lock_exclusive(paths.guards / f"isolated-{git_id}.lock")


def keep_commits(paths: GitPaths, git: Git, operation: Operation, top: Path, branch: str) -> None:
    """Give every branch of an isolated worktree that is about to be deleted a branch in the repository, unless a
    reference there reaches its commit; likewise HEAD and the stash. Does nothing for other worktrees.

    Raises `Refused` if its repository cannot be read. A mark records that this is done, because a half-deleted
    worktree can no longer be read.
    """
    mark = paths.scratch / operation.operation_id / _FETCHED
    if not isolated.is_isolated(top) or entry_exists(mark):
        return
    head, others = isolated.read_tips(top)
    oids = sorted({*others, *([head] if head else [])})
    place = operation.operation_id
    if oids:
        wanted = {f"{transfer.INCOMING}{place}/{oid}": oid for oid in oids}
        isolated.fetch_commits(git, top, paths.incoming / place, wanted)
        _give_branches(git, oids, branch)
        transfer.forget_incoming(git, place)
    make_directories(mark)


def _give_branches(git: Git, oids: Sequence[str], branch: str) -> None:
    for oid in git.run("merge-base", "--independent", *oids).decode().split():
        others = ("--not", f"--exclude={transfer.INCOMING}*", "--all")
        if git.run("rev-list", "--max-count=1", oid, *others):
            update_refs(git, f"update refs/heads/{branch}-{oid[:8]} {oid}\n")
