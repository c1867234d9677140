"""The home of a repository: where it keeps the directories of its worktrees, and how it stores its snapshots.

Other modules call `context.home`, and need not know which kind of home it is. This module has the interface, and the
plain home of the specifications: directories below the root, and trees in `.jvs/snapshots`.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import NotFound
from holdfast.fs.directory import Directory, entry_exists, failing_to, make_directories, move, status_at
from holdfast.fs.names import is_safe_name
from holdfast.repository import payloads
from holdfast.repository.context import (
    MAIN,
    READY,
    Descriptor,
    Operation,
    PlainWorktree,
    RepositoryContext,
    RepositoryPaths,
)
from holdfast.store.open import read_config

if TYPE_CHECKING:
    from holdfast.repository.content import Contents
    from holdfast.repository.doctor import RepositoryCheck
    from holdfast.repository.payloads import CaptureOptions, Scratch
    from holdfast.repository.restore import RestoreOptions
    from holdfast.repository.worktrees import CreateOptions
    from holdfast.trees.manifest import ManifestEntry
    from holdfast.trees.repair import RepairedFile
    from holdfast.trees.results import Captured, Change, Materialised, Problem
    from holdfast.trees.scan import Progress

PAYLOAD, REMOVED = "payload", "removed"  # in a scratch directory: the files of a new worktree, and of a removed one

ReadFile = Callable[[bytes, int], bytes]  # the content of a stored file, or the target of a link, up to a limit


class Home(ABC):
    """The interface of a home, plain or git. The steps of a protocol can be repeated: a process that finds a pending
    operation calls them again, however far they got before a kill."""

    kind: str
    skips_equal = False  # whether a snapshot that equals its parent is not taken
    has_branches = False  # whether worktrees are git worktrees
    replaces_directory = True  # whether a restore in place puts another directory at the path
    paths: RepositoryPaths
    contents: Contents | None = None  # the content store of a plain home, if it has one

    def finish(self, context: RepositoryContext, pending: Operation) -> Operation | None:
        """Finish the operation of a dead process; see `worktrees.finish`."""
        from holdfast.repository.worktrees import finish

        return finish(context, pending)

    # --- Content of snapshots ----------------------------------------------------------------------

    @abstractmethod
    def is_here(self, snapshot_id: str) -> bool:
        """Whether the content of a snapshot is on this machine, and is complete."""

    def is_ready(self, snapshot_id: str, descriptor: Descriptor | None = None) -> bool:
        """Whether the content of a snapshot is here, or can be fetched when it is needed. Without its descriptor, that
        may have to be read."""
        if self.is_here(snapshot_id):
            return True
        if self.contents is None:
            return False
        found = descriptor or self.contents.context.descriptor(snapshot_id)
        return found is not None and bool(found.content)

    @abstractmethod
    def stored(self) -> list[str]:
        """The ids of all stored content, complete or not, published or not."""

    @abstractmethod
    def capture(self, room: Scratch, source: Path, how: CaptureOptions) -> Captured:
        """Capture a directory durably, into a scratch directory."""

    @abstractmethod
    def publish(self, room: Scratch, snapshot_id: str) -> None:
        """Put the content of a scratch directory in place. Without a descriptor, it is not visible."""

    @abstractmethod
    def take_back(self, room: Scratch, snapshot_id: str) -> None:
        """Undo `publish`."""

    @abstractmethod
    def changes(self, directory: Path, snapshot_id: str | None, worktree: str) -> Iterator[Change]:
        """The changes from a snapshot, or from nothing, to a directory."""

    @abstractmethod
    def compare(self, one: str, other: str) -> Iterator[Change]:
        """The changes from one snapshot to another."""

    @abstractmethod
    def entries(self, snapshot_id: str) -> Iterator[ManifestEntry]: ...

    @abstractmethod
    def reader(self, snapshot_id: str) -> ReadFile: ...

    @abstractmethod
    def verify(self, descriptor: Descriptor, *, every_file: bool = True) -> Iterator[Problem]: ...

    @abstractmethod
    def repair(self, context: RepositoryContext, snapshot_ids: Sequence[str], room: Scratch) -> list[RepairedFile]: ...

    @abstractmethod
    def materialise(
        self, snapshot_id: str, target: Path, *, only: bytes | None = None, progress: Progress | None = None
    ) -> Materialised:
        """Write a snapshot, or only a part of it, to a path that does not exist."""

    # --- Garbage collection ------------------------------------------------------------------------

    @abstractmethod
    def check_collectable(self, snapshot_ids: Collection[str]) -> None:
        """Raise if it is impossible to tell what other snapshots need from these."""

    @abstractmethod
    def retire(self, context: RepositoryContext, snapshot_ids: Collection[str]) -> None:
        """Move the content of these snapshots out of sight, durably: then their descriptors may be deleted."""

    @abstractmethod
    def sweep(self, context: RepositoryContext) -> None:
        """Delete what no snapshot needs. The caller holds the collector's lock."""

    @abstractmethod
    def reclaimable(self, snapshot_ids: Sequence[str]) -> list[int]:
        """The reclaimable sizes of the first 0, 1, 2, ... of these snapshots."""

    @abstractmethod
    def total_bytes(self) -> int: ...

    # --- Directories of worktrees ------------------------------------------------------------------

    def place_for_worktrees(self) -> None:
        """Create the directory in which worktrees are created."""
        make_directories(self.paths.worktrees, mode=0o777)

    @abstractmethod
    def prepare_create(self, context: RepositoryContext, options: CreateOptions, room: Scratch) -> dict[str, Any]:
        """Step 2 of a creation. Returns facts for the record of the operation."""

    @abstractmethod
    def place(self, context: RepositoryContext, operation: Operation) -> None:
        """Step 4 of a creation; raises `AlreadyExists` if the path is taken."""

    @abstractmethod
    def is_placed(self, operation: Operation) -> bool:
        """Whether everything that is created except the record exists; if so, it is durable."""

    @abstractmethod
    def discard(self, context: RepositoryContext, operation: Operation) -> None:
        """Undo `place`, however far it got; keeps what it did not make."""

    @abstractmethod
    def check_rename(self, old: str, new: str) -> None:
        """Raise `AlreadyExists` if something other than the path is in the way of a rename."""

    @abstractmethod
    def move(self, context: RepositoryContext, operation: Operation, old: str, new: str) -> None:
        """Step 4 of a rename. Raises `AlreadyExists` if the new path is taken, `NotFound` or `DirectoryReplaced` if the
        directory is gone; then nothing is moved."""

    def revision(self, text: str) -> str:
        """The commit that `text` names: a worktree, or a git revision."""
        raise NotFound(f"there is no revision {text}", revision=text)

    def work_commit(self, worktree: str) -> str | None:
        """The commit that is checked out in a worktree, even an isolated one; a reference in the repository keeps it.
        It lacks uncommitted work. None before the first commit, and in a home without commits. Raises `Refused` if the
        worktree's own repository cannot be read."""
        return None

    def fetch_work(self, worktree: str) -> None:  # noqa: B027 - most have nothing to fetch
        """Fetch the commit that is checked out in an isolated worktree, so that a reference in the repository keeps it.
        Does nothing for other worktrees. Raises `Refused` if the worktree's own repository cannot be read."""

    def uncommitted(self, worktree: str) -> str:
        """A few paths with uncommitted changes, as text for people; empty if there are none."""
        return ""

    def first_commit(self) -> str | None:
        """The first commit in the history of the main checkout; None before there is one, and in a home without
        commits."""
        return None

    def below(self, worktree: str) -> tuple[list[Path], list[Path]]:
        """The contents of a worktree's directory that no snapshot of it has: other worktrees, and repositories."""
        return [], []

    def described(self, worktree: str) -> dict[str, Any]:
        """The fields of a worktree's record that describe its directory."""
        return {}

    def refuse_if_locked(self, worktree: str) -> None:  # noqa: B027 - only git has such locks
        """Raise `Refused` if the user has locked a worktree against its removal."""

    @abstractmethod
    def removed(self, operation: Operation) -> Path:
        """The path of the directory of a removed worktree, until it is deleted."""

    @abstractmethod
    def move_away(self, context: RepositoryContext, operation: Operation) -> None:
        """Move the directory of a worktree to `removed`, if it exists."""

    @abstractmethod
    def delete(self, context: RepositoryContext, operation: Operation) -> None:
        """Delete a removed directory, and what belongs to it."""

    @abstractmethod
    def prepare_restore(
        self, context: RepositoryContext, worktree: str, room: Scratch, source: Descriptor, how: RestoreOptions
    ) -> Operation:
        """Step 2 of a restore in place."""

    @abstractmethod
    def restore(self, context: RepositoryContext, operation: Operation) -> bool:
        """Steps 4 to 6 of a restore in place. False if it was abandoned, and nothing was replaced."""

    # --- For people --------------------------------------------------------------------------------

    @abstractmethod
    def engine(self) -> str: ...

    @abstractmethod
    def directories(self) -> Iterator[str]:
        """The worktrees that have a directory here, as far as files can tell."""

    @abstractmethod
    def checks(self, general: Sequence[RepositoryCheck]) -> Sequence[RepositoryCheck]:
        """The checks of the doctor for this home."""


class PlainHome(Home):
    """The home of the specifications: `main/`, `worktrees/`, and trees of files."""

    kind = "plain"

    def __init__(self, paths: RepositoryPaths) -> None:
        self.paths = paths

    def is_here(self, snapshot_id: str) -> bool:
        status = status_at(self.paths.tree(snapshot_id) / READY)
        return status is not None and stat.S_ISREG(status.st_mode)

    def _tree(self, snapshot_id: str) -> Path:
        """The tree of a snapshot, which is fetched if it is not here."""
        if self.contents is not None and not self.is_here(snapshot_id):
            self.contents.fetch(snapshot_id)
        return self.paths.tree(snapshot_id)

    def stored(self) -> list[str]:
        try:
            with Directory.open(self.paths.snapshots) as directory:
                return sorted(name for name in directory.names() if is_safe_name(name))
        except NotFound:
            return []

    def capture(self, room: Scratch, source: Path, how: CaptureOptions) -> Captured:
        from holdfast.trees.capture import capture_best
        from holdfast.trees.walker import synced

        if how.cached is not None:
            make_directories(self.paths.caches)
        with synced(room.path):
            return capture_best(
                source,
                room.tree,
                beside=room.path,
                wanted=how.engine,
                base=None if how.base is None else self.paths.tree(how.base),
                cache=None if how.cached is None else self.paths.stat_cache(how.cached),
                quiesced=how.quiesced,
                progress=how.progress,
            )

    def publish(self, room: Scratch, snapshot_id: str) -> None:
        from holdfast.trees.shared_dirs import adopt_tree

        make_directories(self.paths.snapshots)
        with failing_to("write", room.tree):
            adopt_tree(room.tree)
        move(room.tree, self.paths.tree(snapshot_id))

    def take_back(self, room: Scratch, snapshot_id: str) -> None:
        move(self.paths.tree(snapshot_id), room.path / "refused")

    def changes(self, directory: Path, snapshot_id: str | None, worktree: str) -> Iterator[Change]:
        from holdfast.trees.verify import changes

        tree = None if snapshot_id is None else self._tree(snapshot_id)
        return changes(directory, tree, cache=self.paths.stat_cache(worktree))

    def compare(self, one: str, other: str) -> Iterator[Change]:
        from holdfast.trees.verify import compare

        return compare(self._tree(one), self._tree(other))

    def entries(self, snapshot_id: str) -> Iterator[ManifestEntry]:
        from holdfast.trees.manifest import read_manifest

        return read_manifest(self._tree(snapshot_id))

    def reader(self, snapshot_id: str) -> ReadFile:
        from holdfast.repository.compare import read_file
        from holdfast.trees.shared_dirs import located, read_shared_directories

        tree = self._tree(snapshot_id)
        shared = read_shared_directories(tree)

        def read(path: bytes, limit: int) -> bytes:
            file = located(tree, shared, path)
            try:
                return read_file(file, limit)
            except NotFound:
                again = located(tree, shared, path)
                if again == file:
                    raise
                return read_file(again, limit)  # the snapshot that stored it has been collected

        return read

    def verify(self, descriptor: Descriptor, *, every_file: bool = True) -> Iterator[Problem]:
        from holdfast.trees.verify import verify, verify_manifest

        check = verify if every_file else verify_manifest
        return iter(check(self._tree(descriptor.snapshot_id), descriptor.payload_hash))

    def repair(self, context: RepositoryContext, snapshot_ids: Sequence[str], room: Scratch) -> list[RepairedFile]:
        from holdfast.repository.context import WORKTREES
        from holdfast.repository.gc_sweep import trees_in
        from holdfast.trees.repair import repair

        directories = [self.paths.payload(name) for name, _ in context.store.scan(WORKTREES)]
        return repair(map(self.paths.tree, snapshot_ids), trees_in(self.paths.snapshots), directories, room.path)

    def materialise(
        self, snapshot_id: str, target: Path, *, only: bytes | None = None, progress: Progress | None = None
    ) -> Materialised:
        from holdfast.trees.restore import materialise
        from holdfast.trees.walker import synced

        with synced(target.parent):
            return materialise(self._tree(snapshot_id), target, only=only, progress=progress)

    # --- Garbage collection ------------------------------------------------------------------------

    def check_collectable(self, snapshot_ids: Collection[str]) -> None:
        from holdfast.repository.gc_sweep import need_of_all

        need_of_all(self.paths, but=snapshot_ids)

    def retire(self, context: RepositoryContext, snapshot_ids: Collection[str]) -> None:
        from holdfast.repository.gc_sweep import retire

        retire(context, snapshot_ids)

    def sweep(self, context: RepositoryContext) -> None:
        from holdfast.repository.gc_sweep import sweep

        sweep(context)

    def reclaimable(self, snapshot_ids: Sequence[str]) -> list[int]:
        from holdfast.repository.gc_sweep import need_of_all, trees_in
        from holdfast.trees.retained_dirs import reclaimable_sizes

        need, trees = need_of_all(self.paths, but=set(snapshot_ids)), [self.paths.tree(each) for each in snapshot_ids]
        return reclaimable_sizes(trees, need, trees_in(self.paths.remnants))

    def total_bytes(self) -> int:
        from holdfast.repository.gc_sweep import trees_in
        from holdfast.trees.retained_dirs import tree_bytes

        return tree_bytes([*trees_in(self.paths.snapshots), *trees_in(self.paths.remnants)])

    # --- Directories of worktrees ------------------------------------------------------------------

    def prepare_create(self, context: RepositoryContext, options: CreateOptions, room: Scratch) -> dict[str, Any]:
        from holdfast.trees.restore import materialise
        from holdfast.trees.walker import synced

        payload = room.path / PAYLOAD
        if options.snapshot_id is None:
            make_directories(payload, mode=0o777)
            return {}
        make_directories(self.paths.caches)
        with synced(room.path):
            tree, cache = self._tree(options.snapshot_id), self.paths.stat_cache(options.name)
            materialise(tree, payload, cache=cache, progress=options.progress)
        return {}

    def place(self, context: RepositoryContext, operation: Operation) -> None:
        move(self._room(operation) / PAYLOAD, self.paths.payload(operation.worktree_id))

    def is_placed(self, operation: Operation) -> bool:
        name = operation.worktree_id
        if entry_exists(self._room(operation) / PAYLOAD) or payloads.status_of(self.paths, name) is None:
            return False
        payloads.sync_names(self.paths, name)
        return True

    def discard(self, context: RepositoryContext, operation: Operation) -> None:
        """Nothing to undo: the directory is still in the scratch directory."""

    def check_rename(self, old: str, new: str) -> None:
        """Nothing but the path can be in the way."""

    def move(self, context: RepositoryContext, operation: Operation, old: str, new: str) -> None:
        if payloads.is_moved(context, operation, old, new):
            payloads.sync_names(self.paths, new)
        else:
            move(payloads.directory_of(context, old), self.paths.payload(new))

    def removed(self, operation: Operation) -> Path:
        return self._room(operation) / REMOVED

    def move_away(self, context: RepositoryContext, operation: Operation) -> None:
        name, removed = operation.worktree_id, self.removed(operation)
        if not entry_exists(removed) and payloads.status_of(self.paths, name) is not None:
            move(payloads.directory_of(context, name), removed)

    def delete(self, context: RepositoryContext, operation: Operation) -> None:
        from holdfast.trees.walker import remove_tree

        remove_tree(self.removed(operation))

    def _room(self, operation: Operation) -> Path:
        return self.paths.scratch / operation.operation_id

    def prepare_restore(
        self, context: RepositoryContext, worktree: str, room: Scratch, source: Descriptor, how: RestoreOptions
    ) -> Operation:
        from holdfast.repository.restore import prepare

        self._tree(source.snapshot_id)
        return prepare(context, worktree, room, source, how)

    def restore(self, context: RepositoryContext, operation: Operation) -> bool:
        from holdfast.repository.exchange import carry_out

        return carry_out(context, operation)

    # --- For people --------------------------------------------------------------------------------

    def engine(self) -> str:
        from holdfast.trees.engines import choose_engine

        return choose_engine(self.paths.payload(self.paths.main), self.paths.snapshots).value

    def described(self, worktree: str) -> dict[str, Any]:
        if self.paths.main == MAIN:
            return {}
        place = PlainWorktree(path=os.fspath(self.paths.payload(worktree)), clone=self.paths.main)
        if worktree == self.paths.main:
            place = msgspec.structs.replace(place, clone_id=read_config(self.paths.root).clone_id)
        return {"plain": place}

    def directories(self) -> Iterator[str]:
        for path, names in ((self.paths.root, [MAIN]), (self.paths.worktrees, None)):
            try:
                with Directory.open(path) as directory:
                    found = directory.directories()
            except NotFound:
                continue
            yield from sorted(each for each in found if names is None or each in names)

    def checks(self, general: Sequence[RepositoryCheck]) -> Sequence[RepositoryCheck]:
        if self.paths.main == MAIN:
            return general
        return tuple(each for each in general if each.name != "collections")  # the clone `main` collects garbage
