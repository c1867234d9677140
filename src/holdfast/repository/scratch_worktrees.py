"""Scratch worktrees of a git home: directories in which one commit after another is checked out for checks.

A scratch worktree is prepared once and kept: ignored files, such as installed dependencies and caches of builds, stay
from one use to the next. One process uses it at a time, under a lock. It has no branch, and git does not list it: its
file `.git` points to a private git directory, which names the repository as its common directory. So git commands work
in it, but `git worktree list`, `prune` and `gc` do not know it.

    <checkout>.worktrees/.landing-<n>/      the directory, beside the worktrees: relative paths work as in these
    <root>/.jvs/checks/<n>/lock             locked while in use; never deleted
    <root>/.jvs/checks/<n>/state.json       what it is prepared for, and the run that uses it
    <root>/.jvs/checks/<n>/index            git's index of the files, hidden from the commands of checks
    <root>/.jvs/checks/<n>/git/             the git directory that commands use, created again for each use

A killed run leaves its id in the state. The next run, or `holdfast doctor --fix`, then ends the processes that it has
left in the directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import Corrupt, Failure, GitFailed, LockConflict, NotFound, Refused
from holdfast.fs import durable
from holdfast.fs.directory import Directory, entry_exists, make_directories
from holdfast.fs.names import is_draft_name
from holdfast.git.look import copy_with_time
from holdfast.git.program import Git
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.process_tree import Mark, ProcessTree
from holdfast.repository.context import RepositoryPaths
from holdfast.repository.git_paths import GitPaths
from holdfast.repository.payloads import LOCK, is_abandoned
from holdfast.store.model import StructCodec

PREFIX = ".landing-"
RUN_VARIABLE = "HOLDFAST_CHECK_RUN"
"""The environment variable by which the processes of a run are found."""
_MOST = 1000
_LINK, _HEAD, _COMMON, _BACK = ".git", "HEAD", "commondir", "gitdir"
_SETTINGS = (  # nothing may hide a change from git
    "core.sparseCheckout=false",
    "core.ignoreStat=false",
    "core.trustctime=true",
    "core.checkStat=default",
)


class ScratchState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The purpose that a scratch worktree is prepared for, and the id of the run that uses it, if any."""

    prepared: str = ""
    run_id: str = ""


_CODEC: StructCodec[ScratchState] = StructCodec(ScratchState)


class ScratchWorktree(NamedTuple):
    """A scratch worktree by its number. The caller holds its lock, except to read."""

    paths: GitPaths
    number: int

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.number}"

    @property
    def path(self) -> Path:
        return self.paths.worktrees / self.name

    @property
    def records(self) -> Path:
        return self.paths.checks / str(self.number)

    @property
    def git_dir(self) -> Path:
        return self.records / "git"

    # --- State -----------------------------------------------------------------------------------------

    def state(self) -> ScratchState:
        path = self.records / "state.json"
        try:
            return _CODEC.decode(durable.read(path, limit=1 << 16), str(path))
        except (NotFound, Corrupt):
            return ScratchState()

    def is_prepared(self, purpose: str) -> bool:
        return self.state().prepared == purpose and entry_exists(self.path)

    def note(self, **changes: str) -> None:
        """Change the state."""
        durable.replace(
            self.records / "state.json", _CODEC.encode(msgspec.structs.replace(self.state(), **changes)) + b"\n"
        )

    def is_ours(self) -> bool:
        """Whether the path is free, or is our directory: one whose `.git` points to our records, or one that a killed
        process had only begun to create."""
        if not entry_exists(self.path):
            return True
        try:
            with Directory.open(self.path) as directory:
                begun = [name for name in directory.names() if not is_draft_name(name)]
                link = durable.read_in(directory, _LINK, limit=1 << 16) if _LINK in begun else b""
        except Failure:
            return False
        return link == self._link() or (not link and begun in ([], [_LINK]))

    # --- Content ---------------------------------------------------------------------------------------

    def check_out(self, commit: str) -> None:
        """Check out the tracked files of a commit, and remove files that are neither tracked nor ignored. If git fails,
        empty the directory and try again."""
        self._connect(commit)
        try:
            self._read_tree(commit)
        except GitFailed:
            self.empty()
            self._read_tree(commit)
        copy_with_time(self.records / "index", self.git_dir / "index")

    def _read_tree(self, commit: str) -> None:
        durable.remove(self.records / "index.lock")  # left by a killed git: a running one would hold our lock
        for command in (("read-tree", "--reset", "-u", commit), ("clean", "-ffdq")):
            Git(self.paths.common).run(
                *command,
                worktree=self.path,
                git_dir=self.git_dir,
                index=self.records / "index",
                settings=_SETTINGS,
            )

    def _connect(self, commit: str) -> None:
        """Create the directory, and its git directory again, with HEAD at the commit."""
        from holdfast.trees.walker import remove_tree

        make_directories(self.git_dir)
        with Directory.open(self.git_dir) as directory:
            for name in directory.names():
                if name not in (_HEAD, _COMMON, _BACK):
                    remove_tree(self.git_dir / name)
            common = os.path.relpath(self.paths.common, self.git_dir)
            for name, content in ((_COMMON, common), (_BACK, f"{self.path / _LINK}"), (_HEAD, commit)):
                durable.replace_in(directory, name, os.fsencode(content) + b"\n")
        make_directories(self.path)
        with Directory.open(self.path) as directory:
            durable.replace_in(directory, _LINK, self._link())

    def _link(self) -> bytes:
        return b"gitdir: " + os.fsencode(self.git_dir) + b"\n"

    def empty(self) -> None:
        """Remove everything in the directory except its `.git`, and forget what it was prepared for."""
        from holdfast.trees.walker import remove_tree

        self.note(prepared="")
        for name in ("index", "index.lock"):
            durable.remove(self.records / name)
        with contextlib.suppress(NotFound), Directory.open(self.path) as directory:
            for name in directory.names():
                if name != _LINK:
                    remove_tree(self.path / name)

    def remove(self) -> None:
        """Remove the directory; after a kill, the removal can be repeated."""
        from holdfast.trees.walker import remove_tree

        if not self.is_ours():
            raise Refused(f"{self.path} is not a scratch worktree of this repository", path=str(self.path))
        self.end_processes()
        self.empty()
        remove_tree(self.path)
        remove_tree(self.git_dir)
        durable.remove(self.records / "state.json")

    def end_processes(self) -> None:
        """End the processes in the directory that belong to the run that the state names."""
        if run_id := self.state().run_id:
            ProcessTree(None, Mark(RUN_VARIABLE, run_id, self.path)).kill()
            self.note(run_id="")


@contextlib.contextmanager
def scratch_worktree(paths: GitPaths, run_id: str, purpose: str, *, kept: int) -> Iterator[ScratchWorktree]:
    """A scratch worktree for one run: a free one, preferably one that is prepared for the same purpose, or a new one.

    Locked for the block. On exit, processes of the run in it are ended. A worktree numbered above `kept` is removed.
    """
    found, lock = _lock_one(paths, purpose)
    with lock:
        found.end_processes()
        found.note(run_id=run_id)
        try:
            yield found
        finally:
            found.end_processes()
            if found.number > kept:
                found.remove()


def is_scratch_name(name: str) -> bool:
    return name.startswith(PREFIX)


def scratch_worktrees(paths: RepositoryPaths) -> list[ScratchWorktree]:
    """The scratch worktrees that have a state, even if the directory is gone."""
    if not isinstance(paths, GitPaths):
        return []
    try:
        with Directory.open(paths.checks) as directory:
            numbers = sorted(int(name) for name in directory.directories() if name.isascii() and name.isdigit())
    except NotFound:
        return []
    found = (ScratchWorktree(paths, number) for number in numbers)
    return [each for each in found if entry_exists(each.records / "state.json")]


def abandoned(paths: RepositoryPaths) -> Iterator[ScratchWorktree]:
    """The scratch worktrees that a killed run was using."""
    for each in scratch_worktrees(paths):
        if each.state().run_id and is_abandoned(each.records) and each.state().run_id:  # it may have just ended
            yield each


def remove_unused(scratch: ScratchWorktree) -> None:
    """Remove a scratch worktree; `LockConflict` if a process uses it."""
    lock = _try_to_lock(scratch)
    if lock is None:
        raise LockConflict(f"the scratch worktree {scratch.path} is in use", path=str(scratch.path))
    with lock:
        scratch.remove()


def _lock_one(paths: GitPaths, purpose: str) -> tuple[ScratchWorktree, LockGuard]:
    existing = sorted(scratch_worktrees(paths), key=lambda each: not each.is_prepared(purpose))
    others = (ScratchWorktree(paths, number) for number in range(1, _MOST + 1))
    for each in (*existing, *(new for new in others if new not in existing)):
        lock = _try_to_lock(each)
        if lock is None:
            continue
        if each.is_ours():
            return each, lock
        lock.release()
    raise Refused(f"all {_MOST} scratch worktrees are in use", path=str(paths.worktrees))


def _try_to_lock(scratch: ScratchWorktree) -> LockGuard | None:
    make_directories(scratch.records, mode=0o700)
    return FileLocker(follow_links=False).try_lock_exclusive(scratch.records / LOCK)
