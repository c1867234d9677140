"""The paths of a git home: records in the directory of the git repository, worktrees wherever git has registered them.

git's registration of a linked worktree has a file with the worktree's name, so paths never come from our records: a
planted record cannot choose what is written or deleted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import Corrupt, DirectoryReplaced, Failure, NotFound, SettingInvalid
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, resolved
from holdfast.git.checkout import Checkout, checkout_name, is_worktree_of, main_checkout, name_in
from holdfast.repository.context import RepositoryPaths
from holdfast.repository.settings import read_settings


class GitPaths(RepositoryPaths):
    """The paths below the root, the directory `holdfast` in git's common directory; and those of the worktrees."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.common = self.private = root.parent
        self.main = checkout_name(os.fspath(self.common))
        self.indexes = root / ".jvs" / "index"  # git's index of each worktree as of its last capture
        self.incoming = root / ".jvs" / "isolated"  # objects copied from isolated worktrees, while git fetches them

    @property
    def worktrees(self) -> Path:
        """The directory that the setting names, relative to the main checkout; by default, one beside the checkout."""
        main, chosen = self.payload(self.main), None
        with contextlib.suppress(Corrupt, SettingInvalid):  # `place_for_worktrees` raises it
            chosen = read_settings(self.root).directory
        if chosen is not None:
            return resolved(chosen) if os.path.isabs(chosen) else Path(os.path.normpath(main / chosen))
        is_bare = main_checkout(os.fspath(self.common)) is None  # then the user keeps all worktrees side by side
        return main.with_name("worktrees" if is_bare else f"{main.name}.worktrees")

    def foreign(self, worktree: str) -> list[Path]:
        found = (Path(each.top) for name, each in self.registrations() if name != worktree and each.top is not None)
        return [self.private, *found]

    def payload(self, worktree: str) -> Path:
        if worktree == self.main and (main := main_checkout(os.fspath(self.common))) is not None:
            return Path(main)
        found = self.registration(worktree)
        if found is not None and found.top is not None:
            return Path(found.top)
        return self.root / worktree if worktree == self.main else self.worktrees / worktree

    def above(self, worktree: str) -> Directory:
        try:
            return Directory.open(self.payload(worktree).parent)
        except NotFound:
            return Directory.open(self.common)  # nothing there has the name of a worktree

    def registration(self, worktree: str) -> Checkout | None:
        """git's registration of a linked worktree, found by our name in it."""
        return next((each for name, each in self.registrations(worktree) if name == worktree), None)

    def registrations(self, first: str = "") -> Iterator[tuple[str, Checkout]]:
        """The linked git worktrees that we have named, with their names; the one with the git id `first` first."""
        for each in sorted(self.git_ids(), key=lambda git_id: (git_id != first, git_id)):
            git_dir = os.path.join(self.common, "worktrees", each)
            name = name_in(git_dir)
            if name is not None:
                yield name, Checkout(registered_path(Path(git_dir)), git_dir, os.fspath(self.common))

    def git_ids(self) -> list[str]:
        """git's names for all linked worktrees."""
        try:
            with Directory.open(self.common / "worktrees") as directory:
                return directory.directories()
        except NotFound:
            return []

    def git_dir(self, worktree: str) -> Path:
        """git's own directory of a worktree."""
        found = self.registration(worktree)
        if found is not None:
            return Path(found.git_dir)
        if worktree != self.main:
            hint = "It was removed with 'git worktree remove' or 'prune'. 'holdfast doctor --fix' forgets it too."
            raise NotFound(f"git does not know the worktree {worktree}", hint=hint, worktree=worktree)
        return self.common

    def check(self, worktree: str, path: Path) -> None:
        """Refuse a directory that git does not register as this worktree, or that leads to another repository."""
        found = is_worktree_of(os.fspath(path), os.fspath(self.common))
        if found is None or Path(found.git_dir) != self.git_dir(worktree):
            message = f"{path} is not the directory that git knows as the worktree {worktree}"
            main = self.payload(self.main)
            hint = f"If it or {main} was moved: 'git worktree repair {path}' in {main}."
            raise DirectoryReplaced(message, hint=hint, worktree=worktree, path=str(path))


def registered_path(git_dir: Path) -> str | None:
    """The directory that git has registered for a linked worktree; if a link has replaced it, the link's own path."""
    try:
        content = durable.read(git_dir / "gitdir", limit=1 << 16)
    except (NotFound, Corrupt):
        return None
    if not content.strip() or b"\0" in content:  # git was killed before it wrote the path; or it is not a path
        return None
    path = os.path.dirname(os.path.join(git_dir, os.fsdecode(content).rstrip("\r\n")))
    return os.path.join(calls.realpath(os.path.dirname(path)), os.path.basename(path))


def names_in_git(paths: GitPaths) -> Iterator[str]:
    """The names of the main checkout and of the linked worktrees that we have named, as far as they can be read."""
    yield paths.main
    try:
        yield from (name for name, _ in paths.registrations() if name != paths.main)
    except Failure:
        return
