"""Updates the checkout of a branch when the branch moves, like git's own fast-forward.

The steps have the numbers of docs/decisions/0014:

3. Take git's `index.lock`; the caller holds a flock for the checkout, so an existing lock of ours is a dead process's.
4. HEAD names the branch, no git operation is in progress, and no untracked file is in the way.
5. `git read-tree -m -u` through a private copy of the index. git checks every file before it writes one.
6. The caller moves the branch. **Commit point.**
7. The private index replaces the user's; or, if HEAD names another branch by now, the files go back.

If anything is in the way, `CheckoutInTheWay` is raised and nothing is touched. After a kill, the same steps continue
from what they find: files that are as in the new tip count as done.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

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
_LONGEST_SWITCH, _PAUSE = 2.0, 0.01  # seconds
_MOST_OF_A_LOCK = 1 << 10
_MOST_OF_A_NAME = 1 << 16
_MOST_NAMED = 5
_REBASES = ("rebase-merge", "rebase-apply")
_SYMLINK = "120000"
_REFUSALS = ("not uptodate", "would be overwritten", "would be removed", "would lose", "Cannot merge")
_NOT_BELOW = "--ignore-submodules=dirty"  # see `look.STATUS`
_STAGED = ("diff-index", "--cached", "-z", "--name-only", "--no-renames")


class Follower(NamedTuple):
    """A checkout that has a branch checked out, or that rebases it; `git_id` is empty for the main checkout."""

    git_id: str
    top: Path
    git_dir: Path
    is_rebasing: bool = False


def followers(git: Git, branch: str, intent_id: str = "") -> list[Follower]:
    """The checkouts that have to follow a branch, and those that a dead process has begun to update for an intent.
    Checkouts whose directory is gone are left out."""
    found = []
    for each in linked.registered(git):
        git_dir = git.common if each.git_id is None else git.common / "worktrees" / each.git_id
        is_rebasing = _rebased(git_dir) == f"refs/heads/{branch}"
        is_begun = bool(intent_id) and _owner(git_dir) == intent_id
        if (each.branch == branch or is_rebasing or is_begun) and calls.is_directory(each.path):
            found.append(Follower(each.git_id or "", each.path, git_dir, is_rebasing))
    return found


def _rebased(git_dir: Path) -> str | None:
    """The reference that a rebase in progress will move when it ends."""
    for name in _REBASES:
        with contextlib.suppress(Failure):
            return os.fsdecode(durable.read(git_dir / name / "head-name", limit=_MOST_OF_A_NAME)).strip()
    return None


def wait_for_switches(git: Git) -> None:
    """Wait, for a moment at most, until no git is changing the index of a checkout: it may be switching to a branch
    that has just moved, and would then have the files of the old tip."""
    ends_at = time.monotonic() + _LONGEST_SWITCH
    for git_dir in (git.common, *(git.common / "worktrees" / git_id for git_id, _ in linked.git_ids(git))):
        lock = git_dir / _LOCK
        while entry_exists(lock) and time.monotonic() < ends_at:
            time.sleep(_PAUSE)


class Move(NamedTuple):
    """A move of a branch, and the id of the intent that it belongs to."""

    intent_id: str
    branch: str
    old: str
    new: str


def require_clear(git: Git, follower: Follower, move: Move, private: Path, *, objects: Path | None = None) -> None:
    """Raise `CheckoutInTheWay` if the checkout could not follow now. Changes nothing but the file `private`. With
    `objects`, the new tip may be a tree that exists only in this directory."""
    _require_idle(git, follower, move)
    if entry_exists(follower.git_dir / _LOCK) and _owner(follower.git_dir) != move.intent_id:
        raise _locked(follower)
    with _Files(git, follower, move, private, objects) as files:
        files.require_room()
        files.switch(dry=True)


def follow(
    git: Git, follower: Follower, move: Move, private: Path, swap: Callable[[], bool], *, has_moved: bool = False
) -> bool:
    """Update a checkout while `swap` moves the branch; False if the branch did not move: then nothing has changed.

    The caller holds the flock of the checkout. `private` is the path of the private index. Raises `CheckoutInTheWay`.
    """
    with _index_locked(follower, move) as held:  # 3
        if not held.resumed:
            _require_idle(git, follower, move)  # 4
            if not has_moved and linked.commit_of(git, f"refs/heads/{move.branch}") != move.old:
                return swap()  # whoever moved the branch has taken care of the checkout
        with _Files(git, follower, move, private) as files:
            _go_forward(files, held)  # 5
            try:
                moved = swap()  # 6
            except GitFailed as failure:
                files.go_back()
                held.is_settled = True
                message = f"{move.branch} cannot be moved: {failure.message}"
                raise CheckoutInTheWay(message, path=str(follower.top)) from failure
            if moved and linked.current_branch(git, follower.top) == move.branch:
                files.publish_index()  # 7
            else:
                files.go_back()
            held.is_settled = True
            return moved


def _go_forward(files: _Files, held: _HeldIndex) -> None:
    if held.resumed:
        files.resume()
    else:
        files.require_room()
    held.is_settled = False
    try:
        files.switch()
    except CheckoutInTheWay:  # git has refused, and touched nothing
        if held.resumed:
            files.go_back()
        held.is_settled = True
        raise
    except GitFailed as failure:  # halfway: the disk is full, or a file cannot be written
        if held.resumed or not files.undo():
            raise
        held.is_settled, top = True, files.tree.top
        message = f"{top} cannot be updated: {failure.message}"
        raise CheckoutInTheWay(message, hint=failure.hint, path=str(top)) from failure


def retreat(git: Git, follower: Follower, move: Move, private: Path) -> None:
    """Undo what a dead process began for an intent that is void. Does nothing if the intent has no `index.lock`."""
    if _owner(follower.git_dir) != move.intent_id:
        return
    with _index_locked(follower, move) as held, _Files(git, follower, move, private) as files:
        files.resume()
        files.switch()
        files.go_back()
        held.is_settled = True


def catch_up(git: Git, follower: Follower, move: Move, private: Path) -> None:
    """Update a checkout whose branch has moved without it: after a kill, or because somebody switched to the branch
    just then. Does nothing unless its index is as in the old tip at every path where the two tips differ."""
    if _owner(follower.git_dir) != move.intent_id:
        behind = git.run(*_STAGED, move.new, "--", worktree=follower.top).split(b"\0")
        staged = git.run(*_STAGED, move.old, "--", worktree=follower.top).split(b"\0")
        paths = {each.path for each in differences(git, move.old, move.new)}
        if not paths or not paths <= set(behind) or paths & set(staged):
            return
    follow(git, follower, move, private, lambda: True, has_moved=True)


# --- The lock of the index ----------------------------------------------------------------------------


class _HeldIndex:
    """A held index lock. It is released only if the files are settled: as in the index, or in the one that replaces
    it. Otherwise it stays, as after a kill, until somebody finishes. `resumed`: it was left by a dead process."""

    def __init__(self, *, resumed: bool) -> None:
        self.resumed = resumed
        self.is_settled = not resumed


@contextlib.contextmanager
def _index_locked(follower: Follower, move: Move) -> Iterator[_HeldIndex]:
    """Hold git's index lock for the block; `CheckoutInTheWay` if somebody else holds it."""
    with Directory.open(follower.git_dir) as directory:
        content = _OURS + move.intent_id.encode() + b"\n"
        try:
            durable.create_in(directory, _LOCK, content, mode=0o666, durable=False)
            held = _HeldIndex(resumed=False)
        except AlreadyExists:
            if _owner(follower.git_dir) != move.intent_id:
                raise _locked(follower) from None
            held = _HeldIndex(resumed=True)  # it has our content, and only we have the flock: it is ours now
        try:
            yield held
        finally:
            if held.is_settled and _owner(follower.git_dir) == move.intent_id:
                durable.remove_in(directory, _LOCK, durable=False)


def _owner(git_dir: Path) -> str | None:
    """The id of the intent that the index lock belongs to; None if there is no lock, or it is not ours."""
    try:
        content = durable.read(git_dir / _LOCK, limit=_MOST_OF_A_LOCK)
    except Failure:  # there is none; or it is too long for ours
        return None
    return content.removeprefix(_OURS).decode(errors="replace").strip() if content.startswith(_OURS) else None


def _locked(follower: Follower) -> CheckoutInTheWay:
    where = follower.git_dir / _LOCK
    hint = f"A git command is running there. If none is, one has died: remove {where}."
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


class _Files:
    """The files of a checkout that a move changes, and a private copy of its index. A context manager."""

    def __init__(self, git: Git, follower: Follower, move: Move, private: Path, objects: Path | None = None) -> None:
        self._follower, self._move = follower, move
        self._found = list(differences(git, move.old, move.new, objects=objects))
        self.tree = WorkTree(git, follower.top, private, objects)

    def __enter__(self) -> Self:
        if not copy_with_time(self._follower.git_dir / "index", self.tree.index):
            self._run("read-tree", "--empty")
        return self

    def __exit__(self, *_: object) -> None:
        durable.remove(self.tree.index)

    def _run(self, *arguments: str, content: bytes | None = None) -> bytes:
        """Run git on the private index with the user's own settings, because it will replace the user's index."""
        tree = self.tree
        return tree.git.run(*arguments, worktree=tree.top, index=tree.index, objects=tree.objects, content=content)

    def require_room(self) -> None:
        """4. Raise if an untracked file is in the way."""
        try:
            require_room(self._follower.top, self._found)
        except Refused as refusal:
            message = refusal.message.replace(", nothing was written", "")
            raise CheckoutInTheWay(message, path=str(self._follower.top), files=refusal.facts["files"]) from None

    def switch(self, *, dry: bool = False) -> None:
        """5. Change the files from the old commit to the new one."""
        self._switch(self._found, self._move.old, self._move.new, dry=dry)

    def publish_index(self) -> None:
        """7. Replace the user's index."""
        private, index = self.tree.index, self._follower.git_dir / "index"
        with Directory.open(private.parent) as directory:
            durable.sync_in(directory, private.name)
        with failing_to("replace", index):
            rename(private, index)

    def resume(self) -> None:
        """Settle the files that a dead process left behind."""
        self._resume(self._found, self._move.new)

    def undo(self) -> bool:
        """Give the checkout its files again after git has failed halfway, and has left the private index as it was.
        Returns False if one of them still differs: a person may have written it since."""
        for each in sorted(self._found, key=lambda each: each.modes[0] != NONE):
            is_old, is_new = self._is_as(each)
            if not is_old and (is_new or self._is_torn(each, self._move.new)):
                self._roll_back(each)
        return all(self._is_as(each)[0] for each in self._found)

    def go_back(self) -> None:
        """Give the checkout the files of the old commit again, except those that differ from that commit in the user's
        index, which was not touched."""
        old, new, top = self._move.old, self._move.new, self._follower.top
        staged = self.tree.git.run(*_STAGED, old, "--", worktree=top).split(b"\0")
        back = [Difference(each.path, each.modes[::-1], each.oids[::-1]) for each in self._found]
        self._stage([each for each in back if each.path in staged])
        try:
            self._switch(back, new, old)
        except CheckoutInTheWay:  # a person has edited one of them since: their edit stays
            self._resume(back, old)
            with contextlib.suppress(CheckoutInTheWay):
                self._switch(back, new, old)

    def _switch(self, found: list[Difference], old: str, new: str, *, dry: bool = False) -> None:
        """Change files. If git refuses, perhaps only its index is out of date: compare the files, and accept those that
        are already as in the new commit. Raises `GitFailed` if git failed halfway."""
        command = ("read-tree", "-m", "-u", *(("-n",) if dry else ()), old, new)
        try:
            self._run(*command)
            return
        except GitFailed as failure:
            if not _is_refusal(failure):
                raise
        self._stage([each for each in found if self._is_as(each)[1]])
        self._refresh()
        try:
            self._run(*command)
        except GitFailed as failure:
            if not _is_refusal(failure):
                raise
            raise self._overlapping(found, old, failure) from failure

    def _overlapping(self, found: list[Difference], old: str, refusal: GitFailed) -> CheckoutInTheWay:
        top = self._follower.top
        changed = self._run("diff-index", "-z", "--name-only", "--no-renames", _NOT_BELOW, old, "--").split(b"\0")
        names = [shown(os.fsdecode(path)) for path in sorted({each.path for each in found} & set(changed))]
        some = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        message = f"{top} has uncommitted changes in files that landing changes: {some or refusal.message}"
        hint = "Commit or discard them. To land without touching this checkout, use another branch: --into."
        return CheckoutInTheWay(message, hint=hint, path=str(top), files=names)

    def _stage(self, found: list[Difference]) -> None:
        """Set these paths in the private index to the new commit."""
        lines = b"".join(f"{each.modes[1]} {each.oids[1]}\t".encode() + each.path + b"\0" for each in found)
        if lines:
            self._run("update-index", "-z", "--index-info", content=lines)

    def _refresh(self) -> None:
        with contextlib.suppress(GitFailed):  # some files differ
            self._run("update-index", "-q", "--refresh")

    def _is_as(self, each: Difference) -> tuple[bool, bool]:
        """Whether the file matches the old commit, and whether it matches the new one."""
        if LINK in each.modes:
            return True, False  # the files of a nested repository do not change
        mode = mode_now(os.path.join(self.tree.top, os.fsdecode(each.path)))
        oid = dict(hashes(self.tree, [each.path])).get(each.path, "") if mode != NONE else ""

        def is_at(side: int) -> bool:
            if NONE in (mode, each.modes[side]):
                return mode == each.modes[side]
            return oid == each.oids[side] and (mode == _SYMLINK) == (each.modes[side] == _SYMLINK)

        old, new = is_at(0), is_at(1)
        return (mode == each.modes[0], mode == each.modes[1]) if old and new else (old, new)

    def _resume(self, found: list[Difference], new: str) -> None:
        """Settle each file: if it is as in the new commit, it is done; if git began to write it, it goes back to the
        old commit; anything else is a person's work, which stays."""
        kept: list[Difference] = []
        for each in found:
            is_old, is_new = self._is_as(each)
            if is_old and not is_new:
                continue
            if not is_new and self._is_torn(each, new):
                self._roll_back(each)
            else:
                kept.append(each)
        self._stage(kept)
        self._refresh()

    def _is_torn(self, each: Difference, new: str) -> bool:
        """Whether git may have been killed while it wrote this file: it is missing, or a beginning of the new one."""
        where = self.tree.top / os.fsdecode(each.path)
        if mode_now(os.fspath(where)) == NONE:
            return True
        if each.modes[1] == NONE or calls.is_directory(where):
            return False
        wanted = self._run("cat-file", "--filters", f"{new}:{os.fsdecode(each.path)}")
        try:
            return wanted.startswith(durable.read(where, limit=len(wanted)))
        except Failure:
            return False

    def _roll_back(self, each: Difference) -> None:
        if each.modes[0] == NONE:
            with contextlib.suppress(NotFound):
                durable.remove(self.tree.top / os.fsdecode(each.path))
            return
        self._run("checkout-index", "--force", "-z", "--stdin", content=each.path + b"\0")


def _is_refusal(failure: GitFailed) -> bool:
    """Whether git has compared the files and touched none."""
    return any(words in str(failure.facts["stderr"]) for words in _REFUSALS)
