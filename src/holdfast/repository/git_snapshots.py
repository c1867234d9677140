"""Snapshots of a git home: commits under our own references, captured, compared, read and collected by git."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import Failure, GitFailed, NotFound
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.git import contents
from holdfast.git import snapshots as commits
from holdfast.git import worktrees as linked
from holdfast.git.checkout import is_worktree_of
from holdfast.git.program import Git
from holdfast.git.restore import unsaved
from holdfast.git.snapshots import GitSource
from holdfast.repository.context import MAIN, WORKTREES, Descriptor, RepositoryContext
from holdfast.repository.git_isolated import fetch_work
from holdfast.repository.git_paths import GitPaths
from holdfast.repository.home import Home, ReadFile
from holdfast.trees.manifest import ManifestEntry
from holdfast.trees.results import Captured, Change, Problem

if TYPE_CHECKING:
    from holdfast.repository.payloads import CaptureOptions, Scratch
    from holdfast.trees.repair import RepairedFile
    from holdfast.trees.results import Materialised
    from holdfast.trees.scan import Progress

ENGINE = "git"
_COMMIT = "commit"  # in a scratch directory: the captured commit


class GitSnapshots(Home):
    """The content of snapshots as commits. `GitHome` adds the worktrees."""

    skips_equal = True
    paths: GitPaths

    def __init__(self, paths: GitPaths) -> None:
        self.paths = paths
        self.git = Git(paths.common)
        self._refs: dict[str, str] = {}

    def commit(self, snapshot_id: str) -> str:
        """The commit of a snapshot; raises `NotFound` if it has none."""
        if not self.is_ready(snapshot_id):
            raise NotFound(f"git has no reference for the snapshot {snapshot_id}", snapshot_id=snapshot_id)
        return self._refs[snapshot_id]

    def is_here(self, snapshot_id: str) -> bool:
        return snapshot_id in self._refs or snapshot_id in self.stored()

    def stored(self) -> list[str]:
        self._refs = commits.refs(self.git)
        return sorted(self._refs)

    def capture(self, room: Scratch, source: Path, how: CaptureOptions) -> Captured:
        made = commits.capture(
            GitSource(self.git, source, self.index(source), room.path / "objects"),
            snapshot_id=room.scratch_id,
            parent_tree=how.base_hash,
            message=f"holdfast snapshot {room.scratch_id}",
            quiesced=how.quiesced,
            progress=how.progress,
            may_skip=how.may_skip,
        )
        commit = made.commit or self.commit(f"{how.base}")  # nothing differs: the same commit has the content
        self.note_commit(room, commit)
        left_out = {"ignored": made.left_out.ignored, "nested": made.left_out.nested}
        return Captured(
            engine=ENGINE,
            payload_hash=made.tree,
            files=made.files,
            directories=0,
            bytes=made.bytes,
            stored_bytes=0,
            not_preserved=(),
            special=(),
            left_out={what: count for what, count in left_out.items() if count},
        )

    def index(self, directory: Path) -> Path:
        """The private index of the worktree at `directory`."""
        make_directories(self.paths.indexes)
        found = is_worktree_of(os.fspath(directory), os.fspath(self.paths.common))
        return self.paths.indexes / (
            MAIN if found is None or found.git_dir == found.common else Path(found.git_dir).name
        )

    def note_commit(self, room: Scratch, commit: str) -> None:
        """Record the commit that `publish` will publish."""
        durable.replace(room.path / _COMMIT, commit.encode())

    def is_committed(self, snapshot_id: str, commit: str | None) -> bool:
        """Whether a snapshot has the content of the commit that was checked out when it was taken, or of `commit`."""
        taken = self.commit(snapshot_id)
        known = [each for each in (f"{taken}^", commit) if each is not None]
        with contextlib.suppress(GitFailed):  # it was taken before the first commit
            return self.tree(taken) in [self.tree(each) for each in known]
        return False

    def publish(self, room: Scratch, snapshot_id: str) -> None:
        try:
            commits.create_ref(self.git, snapshot_id, durable.read(room.path / _COMMIT).decode())
        finally:
            commits.drop_keep(self.git, snapshot_id)

    def take_back(self, room: Scratch, snapshot_id: str) -> None:
        self._delete_refs([snapshot_id])

    def _delete_refs(self, snapshot_ids: Collection[str]) -> None:
        commits.delete_refs(self.git, list(snapshot_ids))
        for each in snapshot_ids:
            self._refs.pop(each, None)

    def changes(self, directory: Path, snapshot_id: str | None, worktree: str) -> Iterator[Change]:
        """Without a snapshot, the changes since the commit that is checked out."""
        if snapshot_id is None:
            with contextlib.suppress(Failure):  # the last fetched commit will do: this only compares
                fetch_work(self.paths, self.git, directory)
        commit = linked.head_commit(self.git, directory) if snapshot_id is None else self.commit(snapshot_id)
        tree = self.tree(commit) if commit else self.git.run("hash-object", "-t", "tree", "--stdin").decode().strip()
        return unsaved(self.git, directory, self.index(directory), tree)

    def tree(self, commit: str) -> str:
        """The tree of a commit."""
        return self.git.run("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}").decode().strip()

    def compare(self, one: str, other: str) -> Iterator[Change]:
        return contents.compare(self.git, self.commit(one), self.commit(other))

    def entries(self, snapshot_id: str) -> Iterator[ManifestEntry]:
        for path, kind, mode, oid, size in contents.entries(self.git, self.commit(snapshot_id)):
            yield ManifestEntry(path, kind, int(mode, 8) & 0o7777, 0, 0, 0, size, oid if kind == "f" else "")

    def reader(self, snapshot_id: str) -> ReadFile:
        commit = self.commit(snapshot_id)
        return lambda path, limit: contents.read_file(self.git, commit, path, limit)

    def verify(self, descriptor: Descriptor, *, every_file: bool = True) -> Iterator[Problem]:
        try:
            commit = self.commit(descriptor.snapshot_id)
            tree = self.tree(commit)
        except (NotFound, GitFailed) as failure:
            yield Problem("", "ready", f"its commit is missing: {failure.message}")
            return
        if tree != descriptor.payload_hash:
            yield Problem("", "manifest", f"its commit has the tree {tree}, not {descriptor.payload_hash}")
        elif every_file:
            yield from contents.verify(self.git, commit)

    def repair(self, context: RepositoryContext, snapshot_ids: Sequence[str], room: Scratch) -> list[RepairedFile]:
        """Repairs from the files of worktrees, because git stores each object only once."""
        from holdfast.git.repair import repair

        directories = [self.paths.payload(name) for name, _ in context.store.scan(WORKTREES)]
        objects = room.path / "objects"
        make_directories(objects)
        return repair(self.git, map(self.commit, filter(self.is_ready, snapshot_ids)), directories, objects)

    def materialise(
        self, snapshot_id: str, target: Path, *, only: bytes | None = None, progress: Progress | None = None
    ) -> Materialised:
        return contents.export(self.git, self.commit(snapshot_id), target, only)

    # --- Garbage collection ------------------------------------------------------------------------

    def check_collectable(self, snapshot_ids: Collection[str]) -> None:
        """Nothing to check: git itself knows what other commits need."""

    def retire(self, context: RepositoryContext, snapshot_ids: Collection[str]) -> None:
        self._delete_refs(snapshot_ids)

    def sweep(self, context: RepositoryContext) -> None:
        """Nothing to do: git's next garbage collection deletes what no reference reaches."""

    def reclaimable(self, snapshot_ids: Sequence[str]) -> list[int]:
        stored = commits.refs(self.git)  # their commits: a reference may be deleted meanwhile
        here = [stored[each] for each in snapshot_ids if each in stored]  # another clone has the others
        kept = [stored[each] for each in sorted(stored.keys() - set(snapshot_ids))]
        sizes = contents.reclaimable_sizes(self.git, here, kept)
        return [sizes[number] for number in itertools.accumulate((each in stored for each in snapshot_ids), initial=0)]

    def total_bytes(self) -> int:
        return contents.reclaimable(self.git, commits.refs(self.git).values(), [])
