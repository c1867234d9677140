"""git's worktrees and branches: the worktrees that git has registered, and changes made through git.

Only `set_name` and `set_main_checkout` write records of our own, beside git's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, GitFailed, NameInvalid, NotFound, Refused
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, failing_to, make_directories, status_at
from holdfast.git.checkout import MAIN_CHECKOUT, find_checkout, is_worktree_of
from holdfast.git.program import Git
from holdfast.git.soundness import require_plain_reference

_MOST_OF_A_PATH = 1 << 16
_LONGEST_LOCK, _PAUSE = 1.5, 0.05  # seconds
_BUSY = {
    "MERGE_HEAD": "a merge",
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisection",
}


class Registered(NamedTuple):
    """A worktree in git's list. `git_id` names its directory below `worktrees/`, and is None for the main one. `locked`
    and `prunable` are git's reasons, perhaps empty; None if the worktree is not locked or prunable."""

    git_id: str | None
    path: Path
    head: str | None
    branch: str | None
    locked: str | None
    prunable: str | None


def registered(git: Git) -> list[Registered]:
    """Every worktree that git lists, the main one first, without the entry of a bare repository itself."""
    ids = {path: git_id for git_id, path in git_ids(git)}
    found = []
    for record in git.run("worktree", "list", "--porcelain", "-z").split(b"\0\0"):
        fields = dict(_field(each) for each in record.split(b"\0") if each)
        if not fields or "bare" in fields:
            continue
        path = fields["worktree"]
        branch = fields.get("branch")
        found.append(
            Registered(
                ids.get(path),
                Path(path),
                _commit_or_none(fields.get("HEAD")),
                branch and branch.removeprefix("refs/heads/"),
                fields.get("locked"),
                fields.get("prunable"),
            )
        )
    return found


def _field(text: bytes) -> tuple[str, str]:
    name, _, value = os.fsdecode(text).partition(" ")
    return name, value


def _commit_or_none(name: str | None) -> str | None:
    """The id of a commit; None for the zeros that git writes before the first commit."""
    return name if name and name.strip("0") else None


def git_ids(git: Git) -> Iterator[tuple[str, str]]:
    """The names of the directories below `worktrees/`, each with the path of its worktree as git lists it."""
    place = git.common / "worktrees"
    with failing_to("list", place):
        try:
            names = calls.listdir(place)
        except FileNotFoundError:
            return
        for name in names:
            try:
                content = calls.read_small(os.path.join(place, name, "gitdir"), _MOST_OF_A_PATH)
            except (FileNotFoundError, NotADirectoryError):
                continue
            path = os.path.join(place, name, os.fsdecode(content).rstrip("\r\n"))
            yield name, os.path.normpath(path).removesuffix("/.git")


def add(git: Git, path: Path, branch: str, commit: str, *, new_branch: bool) -> None:
    """Create a linked worktree at `path` on `branch`, which starts at `commit` if it is new."""
    require_plain_reference(git.common, f"refs/heads/{branch}")
    on = ("-b", branch, "--no-track") if new_branch else ()
    git.run("worktree", "add", "--quiet", *on, "--", os.fspath(path), commit if new_branch else branch)


def move(git: Git, old: Path, new: Path) -> None:
    git.run("worktree", "move", "--", os.fspath(old), os.fspath(new))


def remove(git: Git, path: Path) -> None:
    """Remove the registration of a worktree, and its directory with everything in it if it still exists."""
    git.run("worktree", "remove", "--force", "--force", "--", os.fspath(path))


def lock_reason(git_dir: Path) -> str | None:
    """The reason given to `git worktree lock`, perhaps empty; None if the worktree is not locked."""
    with Directory.open(git_dir) as directory:
        if directory.status("locked") is None:
            return None
        return durable.read_in(directory, "locked", limit=1 << 16).decode(errors="replace").strip()


def register_moved(git_dir: Path, path: Path) -> None:
    """Write to a worktree's git directory that the worktree was moved to `path`. (`git worktree repair` fails if any
    other worktree is isolated.)"""
    durable.replace(git_dir / "gitdir", os.fsencode(path / ".git") + b"\n")


def set_name(git: Git, path: Path, name: str) -> None:
    """Write a linked worktree's name to its git directory, where `checkout.name_in` finds it."""
    durable.replace(_git_dir(git, path) / "holdfast", f"{name}\n".encode())


def clear_name(git: Git, path: Path) -> None:
    durable.remove(_git_dir(git, path) / "holdfast")


def _git_dir(git: Git, path: Path) -> Path:
    """The git directory of a linked worktree; `Refused` if it does not belong to this repository."""
    found = is_worktree_of(os.fspath(path), os.fspath(git.common))
    if found is None or found.git_dir == found.common:
        raise Refused(f"{path} is not a linked worktree of {git.common}", path=str(path))
    return Path(found.git_dir)


def set_main_checkout(git: Git, path: Path) -> None:
    """Record where the main checkout is if git does not: after `git init --separate-git-dir`."""
    found = find_checkout(os.fspath(path))
    if found is None or found.git_dir != os.fspath(git.common) or found.top is None:
        raise Refused(f"{path} is not the main checkout of {git.common}", path=str(path))
    noted = git.common.joinpath(*MAIN_CHECKOUT)
    make_directories(noted.parent)
    durable.replace(noted, os.fsencode(found.top) + b"\n")


# --- Branches -----------------------------------------------------------------------------------------


def current_branch(git: Git, path: Path) -> str | None:
    """The branch that is checked out at `path`, even before its first commit; None if HEAD is detached."""
    try:
        return os.fsdecode(git.run("symbolic-ref", "--quiet", "--short", "HEAD", worktree=path)).strip()
    except GitFailed as failure:
        if failure.facts["status"] != 1:
            raise
        return None


def commit_of(git: Git, revision: str, worktree: Path | None = None) -> str:
    """The id of the commit that a revision names; raises `NotFound` if there is none."""
    try:
        found = git.run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", worktree=worktree
        )
    except GitFailed as failure:
        if failure.facts["status"] not in (1, 128):
            raise
        raise NotFound(f"there is no commit {revision}", revision=revision) from failure
    return found.decode().strip()


def head_commit(git: Git, path: Path) -> str | None:
    """The commit that is checked out at `path`; None before the first one."""
    try:
        return commit_of(git, "HEAD", path)
    except NotFound:
        return None


def was_elsewhere(git_dir: Path, commit: str) -> bool:
    """Whether HEAD of a worktree has ever been at another commit, as far as its reflog tells, or it has submodules."""
    with Directory.open(git_dir) as directory:
        if directory.status("modules") is not None:
            return True
    try:
        lines = durable.read(git_dir / "logs/HEAD").splitlines()
    except NotFound:
        return False
    return any(each.split(b" ", 2)[1:2] != [commit.encode()] for each in lines)


def first_commit(git: Git, commit: str) -> str:
    """The first commit in the history of a commit, along first parents."""
    return git.run("rev-list", "--first-parent", "--max-parents=0", commit).decode().split()[-1]


def require_branch_name(git: Git, branch: str) -> None:
    """Raise `NameInvalid` for a name that git would take for an option, or does not accept."""
    if branch.startswith("-") or not git.succeeds("check-ref-format", f"refs/heads/{branch}"):
        hint = "Choose a name without spaces, '..' or any of ~^:?*[\\, which does not begin with '-' or '.'."
        raise NameInvalid(f"{branch!a} cannot be the name of a branch", hint=hint, name=branch)


def branch_exists(git: Git, branch: str) -> bool:
    return git.succeeds("show-ref", "--verify", "--quiet", f"refs/heads/{branch}")


def rename_branch(git: Git, path: Path, old: str, new: str) -> None:
    """Rename the branch that is checked out at `path`; after a kill, call it again.

    This does not use `git branch --move`, which deletes the old reference before it creates the new one: a kill in
    between would lose the branch. Here, a branch always has the commits. `new` may exist only from a killed call.
    """
    head, both = f"worktrees/{_git_dir(git, path).name}/HEAD", [f"refs/heads/{each}" for each in (old, new)]
    unlock(git, head, *both)
    commit = _commit_if_any(git, both[0])
    if commit is not None:
        if _commit_if_any(git, both[1]) not in (None, commit):
            raise AlreadyExists(f"the branch {new} already exists", branch=new)
        _copy_reflog(git, *both)
        git.run("update-ref", both[1], commit)
    git.run("symbolic-ref", "-m", f"renamed {old} to {new}", "HEAD", both[1], worktree=path)
    end_rename_of_branch(git, path, old, new)


def end_rename_of_branch(git: Git, path: Path, old: str, new: str) -> None:
    """Finish `rename_branch` once `new` is checked out at `path`."""
    before, after = (_commit_if_any(git, f"refs/heads/{each}") for each in (old, new))
    if before is not None and after is not None:
        if not git.succeeds("merge-base", "--is-ancestor", before, after):  # somebody has committed meanwhile
            git.run("update-ref", f"refs/heads/{new}", before, after)
        unlock(git, f"refs/heads/{old}")
        git.run("update-ref", "-d", f"refs/heads/{old}", before)
    with contextlib.suppress(GitFailed):  # the branch has no settings
        git.run("config", "--local", "--rename-section", f"branch.{old}", f"branch.{new}")


def _commit_if_any(git: Git, reference: str) -> str | None:
    try:
        return commit_of(git, reference)
    except NotFound:
        return None


def _copy_reflog(git: Git, old: str, new: str) -> None:
    target = git.common / "logs" / new
    with contextlib.suppress(NotFound, AlreadyExists):
        content = durable.read(git.common / "logs" / old)
        make_directories(target.parent)
        durable.create(target, content)


def delete_branch_if_contained(git: Git, branch: str, target: str, *, last: str | None = None) -> bool:
    """Delete a branch if `target` contains its commits; return whether it was deleted. Raises `Refused` if the branch
    is checked out, except in the linked worktree with the id `last`, which is about to be removed.

    If the branch moves after the check, it is not deleted, and `GitFailed` is raised.
    """
    commit = commit_of(git, f"refs/heads/{branch}")
    if not git.succeeds("merge-base", "--is-ancestor", commit, target):
        return False
    if any(each.branch == branch for each in registered(git) if last is None or each.git_id != last):
        raise Refused(f"the branch {branch} is checked out", branch=branch)
    unlock(git, f"refs/heads/{branch}")
    git.run("update-ref", "-d", f"refs/heads/{branch}", commit)
    return True


def unlock(git: Git, *references: str) -> None:
    """Remove lock files of references that a killed git left behind.

    git does not record who holds such a lock. It holds one only for moments, and waits a tenth of a second for
    another's; so a lock that stays much longer has no owner. Only for references that nobody else has reason to change.
    """
    for each in references:
        require_plain_reference(git.common, each)
        path = git.common / f"{each}.lock"
        first, waited = status_at(path), 0.0
        while first is not None and waited < _LONGEST_LOCK:
            time.sleep(_PAUSE)
            waited += _PAUSE
            now = status_at(path)
            if now is None or (now.st_ino, now.st_mtime_ns) != (first.st_ino, first.st_mtime_ns):
                first = None
        if first is not None:
            durable.remove(path)


def is_busy(git: Git, path: Path) -> str | None:
    """The git operation in progress at `path`, such as a merge; None if there is none."""
    found = is_worktree_of(os.fspath(path), os.fspath(git.common))
    if found is None:
        return None
    with Directory.open(found.git_dir) as directory:
        return next((what for name, what in _BUSY.items() if directory.status(name) is not None), None)
