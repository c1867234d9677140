"""The checkout that has a branch checked out follows when the branch moves, as with git's own fast-forward.

The steps have the numbers of docs/decisions/0014:

3. Take git's `index.lock`; the caller holds a flock for the checkout, so one of ours that exists is a dead process's.
4. HEAD names the branch, no operation of git is in progress, and no untracked file is in the way.
5. `git read-tree -m -u` through a private copy of the index. git checks every file before it writes one.
6. The caller moves the branch. **Commit point.**
7. The private index replaces the user's; or, if HEAD names another branch by now, the files go back.

If anything is in the way, `CheckoutInTheWay` is raised, and nothing was touched. After a kill, the same steps go on
from what they find: files that are as in the new tip count as done.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, CheckoutInTheWay, Failure, GitFailed, NotFound, Refused
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, entry_exists, failing_to, rename
from holdfast.git import worktrees as linked
from holdfast.git.contents import LINK, NONE, Difference, differences
from holdfast.git.look import WorkTree, copy_with_time
from holdfast.git.program import Git
from holdfast.git.restore import hashes, mode_now, require_room
from holdfast.trees.walker import shown

_OURS = b"holdfast landing "
_LOCK = "index.lock"
_MOST_OF_A_LOCK = 1 << 10
_MOST_OF_A_NAME = 1 << 16
_MOST_NAMED = 5
_REBASES = ("rebase-merge", "rebase-apply")
_SYMLINK = "120000"
_STAGED = ("diff-index", "--cached", "-z", "--name-only", "--no-renames")


class Follower(NamedTuple):
    """A checkout that has a branch checked out, or that rebases it; `git_id` is empty for the main checkout."""

    git_id: str
    top: Path
    git_dir: Path
    is_rebasing: bool = False


def followers(git: Git, branch: str) -> list[Follower]:
    """The checkouts that have to follow a branch. One whose directory is gone has no files that could."""
    found = []
    for each in linked.registered(git):
        git_dir = git.common if each.git_id is None else git.common / "worktrees" / each.git_id
        is_rebasing = _rebased(git_dir) == f"refs/heads/{branch}"
        if (each.branch == branch or is_rebasing) and calls.is_directory(each.path):
            found.append(Follower(each.git_id or "", each.path, git_dir, is_rebasing))
    return found


def _rebased(git_dir: Path) -> str | None:
    """The reference that a rebase in progress will move when it ends."""
    for name in _REBASES:
        with contextlib.suppress(Failure):
            return os.fsdecode(durable.read(git_dir / name / "head-name", limit=_MOST_OF_A_NAME)).strip()
    return None


class Move(NamedTuple):
    """A move of a branch, and the id of the intent that it belongs to."""

    intent_id: str
    branch: str
    old: str
    new: str


def require_clear(git: Git, follower: Follower, move: Move, private: Path) -> None:
    """Raise `CheckoutInTheWay` if the checkout could not follow now. Changes nothing but the file `private`."""
    _require_idle(git, follower, move)
    if entry_exists(follower.git_dir / _LOCK) and _owner(follower) != move.intent_id:
        raise _locked(follower)
    found = list(differences(git, move.old, move.new))
    tree = _started(git, follower, private)
    try:
        _require_room(follower, found)
        _switch(tree, follower, found, move.old, move.new, dry=True)
    finally:
        durable.remove(private)


def follow(
    git: Git, follower: Follower, move: Move, private: Path, swap: Callable[[], bool], *, has_moved: bool = False
) -> bool:
    """Bring a checkout along while `swap` moves the branch; False if the branch was not moved: then nothing changed.

    The caller holds the flock of the checkout. `private` is the path of the private index. Raises `CheckoutInTheWay`.
    """
    with _index_locked(follower, move) as resumed:  # 3
        if not resumed:
            _require_idle(git, follower, move)  # 4
            if not has_moved and linked.commit_of(git, f"refs/heads/{move.branch}") != move.old:
                return swap()  # whoever moved the branch has taken care of the checkout
        found = list(differences(git, move.old, move.new))
        tree = _started(git, follower, private)
        try:
            if resumed:
                _resume(tree, follower, found, move)
            else:
                _require_room(follower, found)
            _switch(tree, follower, found, move.old, move.new)  # 5
            if not swap():  # 6
                _go_back(tree, follower, found, move)
                return False
            if linked.current_branch(git, follower.top) != move.branch:
                _go_back(tree, follower, found, move)
                return True
            with Directory.open(private.parent) as directory:
                durable.sync_in(directory, private.name)
            with failing_to("replace", follower.git_dir / "index"):
                rename(private, follower.git_dir / "index")  # 7
            return True
        finally:
            durable.remove(private)


def retreat(git: Git, follower: Follower, move: Move, private: Path) -> None:
    """Undo what a dead process began for an intent that is void. Does nothing if its `index.lock` is not there."""
    if _owner(follower) != move.intent_id:
        return
    with _index_locked(follower, move):
        found = list(differences(git, move.old, move.new))
        tree = _started(git, follower, private)
        try:
            _resume(tree, follower, found, move)
            _switch(tree, follower, found, move.old, move.new)
            _go_back(tree, follower, found, move)
        finally:
            durable.remove(private)


def catch_up(git: Git, follower: Follower, move: Move, private: Path) -> None:
    """Bring a checkout along whose branch has moved without it: after a kill, or because somebody switched to the
    branch just then. Does nothing if its index is not that of the old tip, as far as the two tips differ."""
    if _owner(follower) != move.intent_id:
        behind = git.run(*_STAGED, move.new, "--", worktree=follower.top).split(b"\0")
        staged = git.run(*_STAGED, move.old, "--", worktree=follower.top).split(b"\0")
        paths = {each.path for each in differences(git, move.old, move.new)}
        if not paths or not paths <= set(behind) or paths & set(staged):
            return
    follow(git, follower, move, private, lambda: True, has_moved=True)


# --- The lock of the index ----------------------------------------------------------------------------


@contextlib.contextmanager
def _index_locked(follower: Follower, move: Move) -> Iterator[bool]:
    """Hold git's lock of the index for the block; the value says whether it was that of a dead process of the same
    intent. A foreign lock raises `CheckoutInTheWay`."""
    resumed = False
    with Directory.open(follower.git_dir) as directory:
        content = _OURS + move.intent_id.encode() + b"\n"
        try:
            durable.create_in(directory, _LOCK, content, mode=0o666, durable=False)
        except AlreadyExists:
            if _owner(follower) != move.intent_id:
                raise _locked(follower) from None
            resumed = True  # it has our content, and nobody but us can have the flock: it is ours now
        try:
            yield resumed
        finally:
            if _owner(follower) == move.intent_id:
                durable.remove_in(directory, _LOCK, durable=False)


def _owner(follower: Follower) -> str | None:
    """The intent that the lock of the index belongs to; None if there is none, or if it is not one of ours."""
    try:
        content = durable.read(follower.git_dir / _LOCK, limit=_MOST_OF_A_LOCK)
    except Failure:  # there is none; or it is too long for ours
        return None
    return content.removeprefix(_OURS).decode(errors="replace").strip() if content.startswith(_OURS) else None


def _locked(follower: Follower) -> CheckoutInTheWay:
    where = follower.git_dir / _LOCK
    hint = f"A command of git is running there. If none is, one has died: remove {where}."
    return CheckoutInTheWay(f"{where} exists", hint=hint, path=str(follower.top))


def _require_idle(git: Git, follower: Follower, move: Move) -> None:
    """4. HEAD names the branch, and nothing is in progress."""
    doing = "a rebase" if follower.is_rebasing else linked.is_busy(git, follower.top)
    if doing is not None:
        message = f"{doing} is in progress in {follower.top}"
        raise CheckoutInTheWay(message, hint="Finish or abort it: 'git status' says how.", path=str(follower.top))
    if linked.current_branch(git, follower.top) != move.branch:
        raise CheckoutInTheWay(f"{follower.top} has just switched branches", path=str(follower.top))


# --- Files --------------------------------------------------------------------------------------------


def _started(git: Git, follower: Follower, private: Path) -> WorkTree:
    """The work tree with a private copy of its index."""
    tree = WorkTree(git, follower.top, private)
    if not copy_with_time(follower.git_dir / "index", private):
        _run(tree, "read-tree", "--empty")
    return tree


def _run(tree: WorkTree, *arguments: str, content: bytes | None = None) -> bytes:
    """Run git on the private index with the user's own settings: it is to replace the user's index."""
    return tree.git.run(*arguments, worktree=tree.top, index=tree.index, content=content)


def _refresh(tree: WorkTree) -> None:
    with contextlib.suppress(GitFailed):  # some files differ
        _run(tree, "update-index", "-q", "--refresh")


def _require_room(follower: Follower, found: list[Difference]) -> None:
    try:
        require_room(follower.top, found)
    except Refused as refusal:
        message = refusal.message.replace(", nothing was written", "")
        raise CheckoutInTheWay(message, path=str(follower.top), files=refusal.facts["files"]) from None


def _switch(
    tree: WorkTree, follower: Follower, found: list[Difference], old: str, new: str, *, dry: bool = False
) -> None:
    """5. Change the files from one commit to another. If git refuses, its index may only not know the files: look at
    them, and accept those that are already as in the new commit."""
    command = ("read-tree", "-m", "-u", *(("-n",) if dry else ()), old, new)
    try:
        _run(tree, *command)
        return
    except GitFailed:
        done = [each for each in found if _is_as(tree, each)[1]]
    _stage(tree, done)
    _refresh(tree)
    try:
        _run(tree, *command)
    except GitFailed as refusal:
        raise _overlapping(tree, follower, found, old, refusal) from refusal


def _overlapping(
    tree: WorkTree, follower: Follower, found: list[Difference], old: str, refusal: GitFailed
) -> CheckoutInTheWay:
    changed = _run(tree, "diff-index", "-z", "--name-only", "--no-renames", old, "--").split(b"\0")
    paths = sorted({each.path for each in found} & set(changed))
    names = [shown(os.fsdecode(path)) for path in paths]
    some = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    message = f"{follower.top} has uncommitted changes in files that landing changes: {some or refusal.message}"
    hint = "Commit or discard them. To land without touching this checkout, use another branch: --into."
    return CheckoutInTheWay(message, hint=hint, path=str(follower.top), files=names)


def _stage(tree: WorkTree, found: list[Difference]) -> None:
    """Let the private index have these paths as in the new commit."""
    lines = b"".join(f"{each.modes[1]} {each.oids[1]}\t".encode() + each.path + b"\0" for each in found)
    if lines:
        _run(tree, "update-index", "-z", "--index-info", content=lines)


def _is_as(tree: WorkTree, each: Difference) -> tuple[bool, bool]:
    """Whether the file at a path is as in the old commit, and whether it is as in the new one."""
    mode = mode_now(os.path.join(tree.top, os.fsdecode(each.path)))
    if LINK in each.modes:
        return True, False  # the files of a nested repository do not change
    oid = dict(hashes(tree, [each.path])).get(each.path, "") if mode != NONE else ""

    def is_at(side: int) -> bool:
        if NONE in (mode, each.modes[side]):
            return mode == each.modes[side]
        return oid == each.oids[side] and (mode == _SYMLINK) == (each.modes[side] == _SYMLINK)

    old, new = is_at(0), is_at(1)
    return (mode == each.modes[0], mode == each.modes[1]) if old and new else (old, new)


def _resume(tree: WorkTree, follower: Follower, found: list[Difference], move: Move) -> None:
    """Make sense of files that a dead process left: those that are as in the new commit are done, one that git began
    to write starts again as in the old commit, and everything else is a person's work, which stays."""
    kept: list[Difference] = []
    for each in found:
        is_old, is_new = _is_as(tree, each)
        if is_old and not is_new:
            continue
        if not is_new and _is_torn(tree, each, move.new):
            _roll_back(tree, each)
        else:
            kept.append(each)
    _stage(tree, kept)
    _refresh(tree)


def _is_torn(tree: WorkTree, each: Difference, new: str) -> bool:
    """Whether git may have been killed while it wrote this file: it is missing, or the beginning of the new content."""
    where = os.path.join(tree.top, os.fsdecode(each.path))
    if mode_now(where) == NONE:
        return True
    if each.modes[1] == NONE or calls.is_directory(where):
        return False
    wanted = _run(tree, "cat-file", "--filters", f"{new}:{os.fsdecode(each.path)}")
    try:
        return wanted.startswith(durable.read(Path(where), limit=len(wanted)))
    except Failure:
        return False


def _roll_back(tree: WorkTree, each: Difference) -> None:
    path = tree.top / os.fsdecode(each.path)
    if each.modes[0] == NONE:
        with contextlib.suppress(NotFound):
            durable.remove(path)
        return
    _run(tree, "checkout-index", "--force", "-z", "--stdin", content=each.path + b"\0")


def _go_back(tree: WorkTree, follower: Follower, found: list[Difference], move: Move) -> None:
    """Give the checkout the files of the old commit again, except those that the user's index, which was not touched,
    does not have as in that commit."""
    staged = tree.git.run(*_STAGED, move.old, "--", worktree=follower.top).split(b"\0")
    back = [Difference(each.path, each.modes[::-1], each.oids[::-1]) for each in found]
    _stage(tree, [each for each in back if each.path in staged])
    try:
        _switch(tree, follower, back, move.new, move.old)
    except CheckoutInTheWay:  # a person has edited one of them since: what is theirs stays
        _resume(tree, follower, back, move._replace(old=move.new, new=move.old))
        with contextlib.suppress(CheckoutInTheWay):
            _switch(tree, follower, back, move.new, move.old)
