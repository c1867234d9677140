"""Commits that are to land: freezing the work of a worktree, candidates on the tip of a branch, and moving the branch.

Nothing here changes a checkout, except `commit_work`, which commits in a worktree. The references are our own:
`refs/holdfast/landing/<id>` keeps a frozen commit, `refs/holdfast/candidates/<name>` a candidate.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, GitFailed, NotFound, Refused
from holdfast.fs import durable
from holdfast.fs.directory import Directory, sync_parents
from holdfast.git import worktrees as linked
from holdfast.git.look import STATUS, Look, WorkTree, looked
from holdfast.git.merging import Merged, merge, write_attributes
from holdfast.git.program import HOLDFAST, Author, Git
from holdfast.git.snapshots import git_dir_of, update_refs
from holdfast.git.soundness import require_plain_reference
from holdfast.trees.walker import remove_tree

FROZEN = "refs/holdfast/landing/"
CANDIDATES = "refs/holdfast/candidates/"
FETCHED = "refs/holdfast/fetched/"  # the tips of branches on remotes
_NOT_COMMITTED = ("a rebase", "a cherry-pick", "a revert", "a bisection")
_MOST_SYNCED = 16  # objects that are synced one by one; more go to a pack, which takes one sync
_DURABLE = ("core.fsync=all", "core.fsyncMethod=batch")
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between attempts to move a branch that another git has locked


def author_of(git: Git, worktree: Path | None = None) -> Author:
    """The user according to git's settings; Holdfast if these name nobody."""
    found = []
    for key in ("user.name", "user.email"):
        try:
            found.append(git.run("config", "--get", key, worktree=worktree).decode(errors="replace").strip())
        except GitFailed as failure:
            if failure.facts["status"] != 1:
                raise
    return Author(*found) if len(found) == 2 and all(found) else HOLDFAST


# --- Freezing -----------------------------------------------------------------------------------------


def require_committable(git: Git, path: Path) -> str | None:
    """Raise `Refused` if there are unresolved conflicts, or if an operation is in progress that only its author can
    conclude, such as a rebase. Returns "a merge" if one is in progress, which `commit_work` concludes; else None."""
    if (doing := linked.is_busy(git, path)) in _NOT_COMMITTED:
        hint = "Finish or abort it ('git status' says how), and try again."
        raise Refused(f"{doing} is in progress in {path}", hint=hint, path=str(path))
    if unmerged := git.run("ls-files", "--unmerged", "-z", worktree=path).split(b"\0")[:-1]:
        names = sorted({each.partition(b"\t")[2].decode(errors="replace") for each in unmerged})
        hint = "Resolve them, 'git add' the files, and try again."
        message = f"{path} has unresolved conflicts: {', '.join(names[:5])}"
        raise Refused(message, hint=hint, path=str(path), files=names)
    return doing


def commit_work(git: Git, path: Path, message: str, author: Author) -> str:
    """Commit all uncommitted work at `path`, without hooks, and return the commit that is then checked out.

    A merge whose conflicts are resolved is concluded. Raises `Refused` as `require_committable` does.
    """
    doing = require_committable(git, path)
    found = git.run(*STATUS, worktree=path)
    if doing is not None or found:
        if (branch := linked.current_branch(git, path)) is not None:
            require_plain_reference(git.common, f"refs/heads/{branch}")
        _stage(git, path, looked(found))
        words = "commit", "--quiet", "--no-verify", "--no-edit", "--cleanup=verbatim", "--allow-empty", "-F", "-"
        git.run(*words, worktree=path, content=message.encode(), settings=_DURABLE, author=author)
    commit = linked.head_commit(git, path)
    if commit is None:
        raise Refused(f"{path} has no commit, so there is nothing to land", path=str(path))
    return commit


def _stage(git: Git, path: Path, look: Look) -> None:
    """Stage everything; `git add --all` would also start another git, with other settings, in nested repositories."""
    tree = WorkTree(git, path, git_dir_of(git, path) / "index")
    links = [each.rstrip(b"/") for each in look.nested if tree.has_commit(each)]
    for option, paths in (("--force-remove", [*look.removed]), ("--replace", [*look.changed, *links])):
        if paths:
            words = "update-index", "-z", "--add", "--remove", option, "--stdin"
            git.run(*words, worktree=path, content=b"\0".join(paths), settings=_DURABLE)


def keep(git: Git, landing_id: str, commit: str) -> None:
    """Protect a frozen commit from git's garbage collection, durably."""
    update_refs(git, f"update {FROZEN}{landing_id} {commit}\n")
    _sync_reference(git, f"{FROZEN}{landing_id}")


def kept(git: Git) -> dict[str, str]:
    """The frozen commits, by the id of their landing."""
    found = git.run("for-each-ref", "--format=%(objectname) %(refname)", FROZEN).decode()
    pairs = (line.split(" ", 1) for line in found.splitlines())
    return {name.removeprefix(FROZEN): commit for commit, name in pairs}


def forget(git: Git, frozen: Iterable[tuple[str, str]]) -> None:
    """Delete the references of frozen commits, given by landing ids and the commits that they must still name."""
    if lines := "".join(f"delete {FROZEN}{landing_id} {commit}\n" for landing_id, commit in frozen):
        update_refs(git, lines)


def forget_all(git: Git) -> None:
    """Delete every reference of landing, and the empty directories that git leaves."""
    found = git.run("for-each-ref", "--format=%(refname)", FROZEN, CANDIDATES, FETCHED).decode().splitlines()
    if found:
        update_refs(git, "".join(f"delete {each}\n" for each in found))
    for name in (FROZEN, CANDIDATES, FETCHED):
        remove_tree(git.common / name.rstrip("/"))


def _sync_reference(git: Git, name: str) -> None:
    with contextlib.suppress(NotFound):  # git may keep references elsewhere
        sync_parents(git.common / name)


# --- Candidates ---------------------------------------------------------------------------------------


class FrozenWork(NamedTuple):
    """A frozen commit to put on a tip, and the message of the new commit."""

    commit: str
    message: str
    squash: bool = False


class NewTip(NamedTuple):
    """The new tip, or None if the merge conflicts. It is the old tip if that already contains the commit, or with
    `squash` all of its changes."""

    tip: str | None
    merged: Merged


def add(
    git: Git, tip: str, tip_tree: str, addition: FrozenWork, author: Author, attributes: Path | None = None
) -> NewTip:
    """Put a frozen commit on a tip, as a merge of both or, with `squash`, as one commit with all of its changes.

    `tip_tree` is the tree of the tip: if the merge does not change it, the tip may already contain the commit.
    `attributes` is as for `merge`.
    """
    merged = merge(git, tip, addition.commit, attributes=attributes)
    if merged.tree is None:
        return NewTip(None, merged)
    if merged.tree == tip_tree and (addition.squash or is_contained(git, addition.commit, tip)):
        return NewTip(tip, merged)
    parents = ("-p", tip) if addition.squash else ("-p", tip, "-p", addition.commit)
    words = "commit-tree", *parents, "-F", "-", merged.tree
    made = git.run(*words, content=addition.message.encode(), author=author)
    return NewTip(made.decode().strip(), merged)


def attributes_in(git: Git, commit: str, directory: Path) -> Path | None:
    """Create `directory` with the `.gitattributes` files of a commit, and return it; None if there are none."""
    names = git.run("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit).split(b"\0")
    if not any(name.rpartition(b"/")[2] == b".gitattributes" for name in names):
        return None
    write_attributes(git, commit, directory)
    return directory


def is_contained(git: Git, commit: str, tip: str) -> bool:
    """Whether a commit equals another or is an ancestor of it. A commit that does not exist here is neither."""
    try:
        return commit == tip or git.succeeds("merge-base", "--is-ancestor", commit, tip)
    except GitFailed:
        return False


def tree_of(git: Git, commit: str) -> str:
    return git.run("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}").decode().strip()


def keep_candidate(git: Git, name: str, tip: str, known: Iterable[str]) -> None:
    """Protect a candidate from git's garbage collection; raise `GitFailed` if one of its objects is already pruned.

    `known` are commits that references keep. All other objects of the candidate are durable when this returns.
    """
    update_refs(git, f"update {CANDIDATES}{name} {tip}\n")
    listed = git.run("rev-list", "--objects", "--no-object-names", tip, "--not", *known).split()
    if len(listed) > _MOST_SYNCED:
        path, settings = git.objects / "pack", ("core.fsync=pack,pack-metadata", "core.fsyncMethod=fsync")
        words = "pack-objects", "-q", "--window=0", os.fspath(path / "pack")
        git.run(*words, content=b"\n".join([*listed, b""]), settings=settings)
        with Directory.open(path) as directory:
            durable.sync_names(directory)
        return
    below: dict[str, list[str]] = {}
    for oid in map(os.fsdecode, listed):
        below.setdefault(oid[:2], []).append(oid[2:])
    for name, files in below.items():
        with contextlib.suppress(NotFound), Directory.open(git.objects / name) as directory:
            for file in files:
                with contextlib.suppress(NotFound):  # it is in a pack
                    durable.sync_in(directory, file)
            durable.sync_names(directory)


def drop_candidates(git: Git, name: str) -> None:
    """Delete the references of candidates whose names begin with `name` and a slash."""
    found = git.run("for-each-ref", "--format=%(refname)", f"{CANDIDATES}{name}/").decode().splitlines()
    if found:
        update_refs(git, "".join(f"delete {each}\n" for each in found))


# --- The branch ---------------------------------------------------------------------------------------


def tip_of(git: Git, branch: str) -> str | None:
    """The commit of a branch; None if there is no such branch."""
    try:
        return linked.commit_of(git, f"refs/heads/{branch}")
    except NotFound:
        return None


def follow_push(git: Git, remote: str, branch: str, commit: str) -> None:
    """Advance the user's reference for a branch of a remote, if there is one, as `git push` does."""
    name = f"refs/remotes/{remote}/{branch}"
    with contextlib.suppress(Failure):  # it is only a note of where the remote was
        here = linked.commit_of(git, name)
        if here != commit and is_contained(git, here, commit):
            require_plain_reference(git.common, name)
            git.run("update-ref", "--no-deref", "-m", "holdfast: land", name, commit, here)


def swap(git: Git, branch: str, old: str, new: str, worktree: Path | None = None) -> bool:
    """Move a branch from `old` to `new`, durably; False if it is at neither. **The commit point of a landing.**

    `worktree` is the checkout of the branch, whose reflog records the move. Raises `GitFailed` if the branch stays at
    `old`, because another git keeps it locked.
    """
    words = "update-ref", "-m", "holdfast: land", f"refs/heads/{branch}", new, old
    for pause in (*_PAUSES, None):
        try:
            git.run(*words, worktree=worktree, settings=("core.fsync=reference", "core.fsyncMethod=fsync"))
        except GitFailed:
            found = tip_of(git, branch)
            if found not in (old, new):
                return False
            if found == old:
                if pause is None:
                    raise
                time.sleep(pause)
                continue
        _sync_reference(git, f"refs/heads/{branch}")
        return True
    raise AssertionError("the last attempt returns or raises")
