"""Machines that share a plain home: each has its own directory, and reaches the records and the content on servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.repository import joining
from holdfast.repository.content import Contents
from holdfast.repository.context import Descriptor, Proof
from holdfast.repository.init import configure_content, initialise
from holdfast.repository.joining import Joined, join
from holdfast.repository.repository import Repository
from holdfast.repository.snapshots import SnapshotOptions
from tests.repository.stages import put_files
from tests.support.homes import SAFE


class Machine:
    """One machine, at the root of its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, store: str, content: str | None = "postgres:") -> Repository:
        """Make it the first machine of a new repository."""
        initialise(self.root, store=store, probe=lambda directory: SAFE)
        if content is not None:
            configure_content(self.root, content)
        return self.repository

    def join(self, store: str, name: str | None = None) -> Joined:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joining, "require_safe", lambda directory, records_elsewhere: SAFE)
            return join(store, self.root, name=name)

    @property
    def repository(self) -> Repository:
        """The repository, opened anew."""
        return Repository(self.root)

    @property
    def contents(self) -> Contents:
        found = self.repository.context.home.contents
        assert found is not None
        return found

    def take(self, worktree: str, files: dict[str, str] | None = None) -> Descriptor:
        """A snapshot of a worktree with these files."""
        repository = self.repository
        put_files(repository.path(worktree), files or {})
        with repository.lease(worktree) as lease:
            return repository.snapshots.take(worktree, Proof.of(lease), SnapshotOptions(note=f"of {worktree}"))
