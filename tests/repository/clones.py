"""Two clones of a git repository that share the records on a server, through a bare repository as their remote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.issues.creating import NewIssue
from holdfast.issues.tracker import Tracker
from holdfast.repository import git_init, joining
from holdfast.repository.context import Proof
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.joining import Joined, join
from holdfast.repository.landing import Landings
from holdfast.repository.repository import Repository
from holdfast.repository.snapshots import SnapshotOptions
from tests.repository.stages import put_files
from tests.support.homes import SAFE, git

ACTOR = "agent:tester"
_SETTINGS = ("user.name=person", "user.email=person@example", "gc.auto=0", "core.fsync=none")


def make_remote(path: Path, content: str = "read me") -> Path:
    """A bare repository with one commit on the branch `trunk`."""
    git("init", "-q", "--bare", "-b", "trunk", path)
    seed = path.with_name(f"{path.name}.seed")
    git("clone", "-q", path, seed)
    put_files(seed, {"README": content, "src/a": "a\n" * 9, "src/b": "b\n" * 9})
    git("add", "-A", at=seed)
    git("commit", "-qm", "first", at=seed)
    git("push", "-q", "origin", "HEAD:trunk", at=seed)
    return path


class Clone:
    """A clone of the remote."""

    def __init__(self, path: Path, remote: Path | str) -> None:
        git("clone", "-q", remote, path)
        for setting in _SETTINGS:
            git("config", *setting.split("="), at=path)
        self.path = path

    @classmethod
    def at(cls, path: Path) -> Clone:
        """The clone that exists at a path."""
        clone = cls.__new__(cls)
        clone.path = path
        return clone

    def adopt(self, store: str | None = None) -> Repository:
        """Make it the first clone of a repository, with an issue tracker."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
            adopt_checkout(self.path, store=store)
        self.tracker().initialise()
        return self.repository

    def join(self, store: str, name: str | None = None) -> Joined:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joining, "require_safe", lambda directory, records_elsewhere: SAFE)
            return join(store, self.path, name=name)

    @property
    def repository(self) -> Repository:
        """The repository, opened anew."""
        return Repository(self.path)

    def tracker(self) -> Tracker:
        repository = self.repository
        return Tracker(repository.context.store, actor=ACTOR, root=repository.root)

    def landings(self) -> Landings:
        return Landings(self.repository, actor=ACTOR)

    def issue(self, title: str, **fields: Any) -> str:
        return self.tracker().create(NewIssue(title=title, **fields)).id

    def take(self, worktree: str, files: dict[str, str]) -> str:
        """A snapshot of a worktree with these files."""
        repository = self.repository
        put_files(repository.path(worktree), files)
        with repository.lease(worktree) as lease:
            made = repository.snapshots.take(worktree, Proof.of(lease), SnapshotOptions(note=f"of {worktree}"))
        return made.snapshot_id
