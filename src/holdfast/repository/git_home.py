"""The git home: the user's checkout and linked git worktrees are the worktrees, and snapshots are commits.

`docs/decisions/0013-a-git-checkout-is-a-home.md` has the reasons and the numbered steps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import AlreadyExists, Changed, Corrupt, Failure, GitFailed, NotFound, NotWritable, Refused
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, entry_exists, make_directories, move, sync_parents
from holdfast.fs.names import printable
from holdfast.git import contents
from holdfast.git import worktrees as linked
from holdfast.git.checkout import clone_in, is_worktree_of
from holdfast.git.isolated import DRAFT, detach, is_begun, is_isolated, is_new, isolate
from holdfast.git.look import below
from holdfast.git.restore import foreign_files, require_no_ignored, restore
from holdfast.git.snapshots import GitSource
from holdfast.repository.context import (
    MAIN,
    OPERATIONS,
    Descriptor,
    GitWorktree,
    Operation,
    OperationKind,
    RepositoryContext,
)
from holdfast.repository.git_isolated import fetch_work, keep_commits
from holdfast.repository.git_paths import names_in_git, registered_path
from holdfast.repository.git_place import require_place
from holdfast.repository.git_snapshots import ENGINE, GitSnapshots
from holdfast.store.model import not_understood
from holdfast.trees.walker import shown

if TYPE_CHECKING:
    from holdfast.repository.doctor import RepositoryCheck
    from holdfast.repository.payloads import Scratch
    from holdfast.repository.restore import RestoreOptions
    from holdfast.repository.worktrees import CreateOptions

_BEGUN = "begun"  # a mark in a scratch directory: files may have changed
_MOST_ATTEMPTS = 10
_MOST_NAMED = 3


class GitHome(GitSnapshots):
    """A git checkout with its linked worktrees."""

    kind = "git"
    has_branches = True
    replaces_directory = False

    # --- Directories of worktrees ------------------------------------------------------------------

    def place_for_worktrees(self) -> None:
        require_place(self.paths, self.git)
        with Directory.open(self.paths.root) as root:  # git keeps no modes: what is private in a snapshot stays so here
            make_directories(self.paths.worktrees, mode=0o777 if root.is_shared() else 0o700)

    def revision(self, text: str) -> str:
        if text == self.paths.main or self.paths.registration(text) is not None:
            self.fetch_work(text)
            return linked.commit_of(self.git, "HEAD", self.paths.payload(text))
        return linked.commit_of(self.git, text, self.paths.payload(self.paths.main))

    def work_commit(self, worktree: str) -> str | None:
        self.fetch_work(worktree)
        return linked.head_commit(self.git, self.paths.payload(worktree))

    def fetch_work(self, worktree: str) -> None:
        fetch_work(self.paths, self.git, self.paths.payload(worktree))

    def uncommitted(self, worktree: str) -> str:
        found = list(itertools.islice(self.changes(self.paths.payload(worktree), None, worktree), _MOST_NAMED + 1))
        names = [shown(os.fsdecode(each.path)) for each in found[:_MOST_NAMED]]
        return ", ".join([*names, *(["..."] if len(found) > _MOST_NAMED else [])])

    def below(self, worktree: str) -> tuple[list[Path], list[Path]]:
        return below(self.git, self.paths.payload(worktree))

    def first_commit(self) -> str | None:
        head = linked.head_commit(self.git, self.paths.payload(self.paths.main))
        return None if head is None else linked.first_commit(self.git, head)

    def described(self, worktree: str) -> dict[str, Any]:
        path, (clone, clone_id) = self.paths.payload(worktree), clone_in(os.fspath(self.paths.common))
        facts: dict[str, Any] = {} if clone == MAIN else {"clone": clone}
        facts |= {"clone_id": clone_id} if clone == worktree and clone_id else {}
        if not entry_exists(path):
            return {"git": GitWorktree(path=str(path), **facts)}
        branch, isolated = linked.current_branch(self.git, path), is_isolated(path)
        return {"git": GitWorktree(path=str(path), branch=branch, isolated=isolated or msgspec.UNSET, **facts)}

    def prepare_create(self, context: RepositoryContext, options: CreateOptions, room: Scratch) -> dict[str, Any]:
        from holdfast.repository.landing_target import start_of_work

        name, main = options.name, self.paths.payload(self.paths.main)
        if options.adopted is not None:
            return {"git": GitWorktree(path=str(self._adoptable(options.adopted)), new=False)}
        commit = options.commit
        if options.snapshot_id is not None:
            taken = self.commit(options.snapshot_id)
            with contextlib.suppress(NotFound):  # it was taken before the first commit
                commit = linked.commit_of(self.git, f"{taken}^")
            commit = commit or taken
        branch, is_new = options.branch or branch_of(name), True
        linked.require_branch_name(self.git, branch)
        if linked.branch_exists(self.git, branch):
            if options.branch is None and not options.continues:
                hint = f"Continue on it: --branch {branch}. Or choose another name, or another branch."
                raise AlreadyExists(f"the branch {branch} already exists", hint=hint, branch=branch)
            commit, is_new = linked.commit_of(self.git, f"refs/heads/{branch}"), False
        if commit is None:
            commit = start_of_work(self, context.store) or linked.head_commit(self.git, main)
        if commit is None:
            message = f"{main} has no commit yet, so there is nothing to start from"
            raise Refused(message, hint="Make the first one: 'git commit'. Or start from a snapshot: --from.")
        work = GitWorktree(
            path=str(self.paths.worktrees / name),
            branch=branch,
            commit=commit,
            new_branch=is_new,
            new=True,
            isolated=options.isolated or msgspec.UNSET,
        )
        return {"git": work}

    def _adoptable(self, path: Path) -> Path:
        found = is_worktree_of(os.fspath(path), os.fspath(self.paths.common))
        if found is None or found.git_dir == found.common:
            hint = "'git worktree list' shows what can be adopted."
            raise Refused(f"{path} is not a linked worktree of {self.paths.common}", hint=hint, path=str(path))
        known = next((name for name, each in self.paths.registrations() if each.git_dir == found.git_dir), None)
        if known is not None:
            raise AlreadyExists(f"{path} is already the worktree {known}", worktree=known)
        return path

    def place(self, context: RepositoryContext, operation: Operation) -> None:
        """Writes the name in git's registration last: with it, the worktree is complete."""
        work, name = _work(operation), operation.worktree_id
        path = Path(work.path)
        if work.new:
            if entry_exists(path):
                raise AlreadyExists(f"{path} already exists", path=str(path))
            try:
                make_directories(path.parent, mode=0o777)
                linked.add(self.git, path, work.branch or "", work.commit or "", new_branch=bool(work.new_branch))
                if work.isolated:
                    isolate(self.git, path)
                if operation.snapshot_id is not None:
                    self._write(operation, path, f"{work.commit}", self.commit(operation.snapshot_id))
                sync_parents(path)
            except Failure:
                self.discard(context, operation)
                raise
        linked.set_name(self.git, path, name)

    def _write(self, operation: Operation, path: Path, old: str, new: str) -> None:
        """Turn the files of commit `old` into those of `new`; if a file matches neither, raises and changes nothing."""
        objects = self._empty_room(operation, "objects")
        source = GitSource(self.git, path, self.index(path), objects)
        only = None if operation.path is None else os.fsencode(operation.path)
        restore(source, self.tree(old), self.tree(new), only)

    def _empty_room(self, operation: Operation, name: str) -> Path:
        """A path in the operation's scratch directory that does not exist: a killed git leaves its lock files."""
        from holdfast.trees.walker import remove_tree

        room = self.paths.scratch / operation.operation_id / name
        make_directories(room.parent)
        remove_tree(room)
        return room

    def is_placed(self, operation: Operation) -> bool:
        return self.paths.registration(operation.worktree_id) is not None

    def discard(self, context: RepositoryContext, operation: Operation) -> None:
        """Remove the worktree that git may have begun to create, and its branch if that is still where it started.

        Acts only where a worktree of this name is created, and keeps what the creation cannot have made: the record
        does not choose what is deleted.
        """
        from holdfast.trees.walker import remove_tree

        work = _work(operation)
        path = Path(work.path)
        if not work.new or path != self.paths.worktrees / operation.worktree_id:
            return
        require_place(self.paths, self.git)
        begun = list(self._registrations_at(context, path, f"{work.branch}"))
        if begun and (self._is_begun(path, begun) or is_begun(path, self.paths.common)):
            if self._has_work(operation, path, self._git_dir_at(path) or begun[0]):
                return
            remove_tree(path)
        else:
            with contextlib.suppress(OSError, NotFound), Directory.open(path.parent) as parent:
                calls.rmdir(parent.at(path.name), dir_fd=parent.fd)  # git creates it empty; content is never removed
        for each in begun:
            remove_tree(each)
        if work.new_branch:
            self._forget_branch(f"{work.branch}", f"{work.commit}")

    def _has_work(self, operation: Operation, path: Path, git_dir: Path) -> bool:
        """Whether the worktree at `path` may have commits or files that its creation did not make. The index may be
        planted, so nothing depends on it; what cannot be read is kept."""
        work, index = _work(operation), git_dir / "index"
        commit, branch = f"{work.commit}", f"refs/heads/{work.branch}"
        with Directory.open(path) as directory:
            is_empty = not {*directory.names()} - {".git"} and not directory.is_directory(".git")
        if is_empty and not entry_exists(index):
            return False  # git has not begun to write files
        try:
            if self._branch_of(git_dir) != branch or linked.commit_of(self.git, branch) != commit:
                return True
            if linked.was_elsewhere(git_dir, commit) or (is_isolated(path) and not is_new(path, git_dir, commit)):
                return True
            how: dict[str, Any] = {"worktree": path, "git_dir": git_dir, "index": index}
            if entry_exists(index) and self.git.run("diff-index", "--cached", "--raw", commit, "--", **how):
                return True
            commits = [commit, *([] if operation.snapshot_id is None else [self.commit(operation.snapshot_id)])]
            room = self._empty_room(operation, "index")
            make_directories(room)
            found = [foreign_files(self.git, path, git_dir, room / "index", each) for each in commits]
            draft = os.fsencode(f"{DRAFT}/") if work.isolated else None
            return bool(set.intersection(*found) - {draft})
        except Failure:
            return True

    def _forget_branch(self, branch: str, commit: str) -> None:
        """Delete a branch that is at a commit, unless it is checked out or no other reference reaches the commit."""
        with contextlib.suppress(GitFailed, NotFound, Refused):
            linked.unlock(self.git, f"refs/heads/{branch}")
            having = self.git.run("for-each-ref", "--count=2", f"--contains={commit}").splitlines()
            if len(having) > 1 and linked.commit_of(self.git, f"refs/heads/{branch}") == commit:
                linked.delete_branch_if_contained(self.git, branch, commit)

    def _git_dir_at(self, path: Path) -> Path | None:
        found = is_worktree_of(os.fspath(path), os.fspath(self.paths.common))
        return None if found is None else Path(found.git_dir)

    def _is_begun(self, path: Path, registrations: Sequence[Path]) -> bool:
        """Whether git created the directory at `path` for one of these registrations. If git was killed, even the file
        `.git` may be incomplete."""
        if self._git_dir_at(path) is not None:
            return True
        try:
            content = durable.read(path / ".git", limit=1 << 16)
        except (NotFound, Corrupt):
            return False
        return any(b"gitdir: %s\n".__mod__(os.fsencode(each)).startswith(content) for each in registrations)

    def _registrations_at(self, context: RepositoryContext, path: Path, branch: str) -> Iterator[Path]:
        """git's directories of a linked worktree of a branch at `path`, and incomplete ones of that name, to which git
        may have added a number. Incomplete ones of other names may belong to live processes."""
        name = path.name
        for each in self.paths.git_ids():
            git_dir = self.paths.common / "worktrees" / each
            registered = registered_path(git_dir)
            is_half_made = registered is None and re.fullmatch(rf"{re.escape(name)}\d*", each)
            if is_half_made and each != name and context.store.read(OPERATIONS.key(each)) is not None:
                continue
            head = self._branch_of(git_dir) or ""
            is_ours = head == f"refs/heads/{branch}" or not head.strip("0")  # git writes zeros first
            if is_half_made or (registered == str(path) and is_ours):
                yield git_dir

    def check_rename(self, old: str, new: str) -> None:
        branch = branch_of(new)
        is_renamed = linked.current_branch(self.git, self.paths.payload(old)) == branch_of(old)
        if is_renamed and linked.branch_exists(self.git, branch):
            hint = "Choose another name, or rename that branch: 'git branch --move'."
            raise AlreadyExists(f"the branch {branch} already exists", hint=hint, branch=branch)

    def move(self, context: RepositoryContext, operation: Operation, old: str, new: str) -> None:
        """Rename the directory, if it has the worktree's name; then the branch; and last the name in git's
        registration. After a kill, another call does the remaining steps."""
        if self.paths.registration(new) is not None:
            return
        git_dir, path = self.paths.git_dir(old), self.paths.payload(old)  # raises if git does not know it
        target = path.with_name(new) if path.name == old else path
        self._move_directory(git_dir, path, target)
        branch = linked.current_branch(self.git, target)
        if branch == branch_of(old):
            linked.rename_branch(self.git, target, branch_of(old), branch_of(new))
        elif branch == branch_of(new):
            linked.end_rename_of_branch(self.git, target, branch_of(old), branch_of(new))
        linked.set_name(self.git, target, new)

    def _move_directory(self, git_dir: Path, path: Path, target: Path) -> None:
        """Rename a directory and tell git. Not with `git worktree move`, which refuses locked worktrees and those with
        submodules."""
        if path == target:
            return
        if entry_exists(path):
            if is_worktree_of(os.fspath(path), os.fspath(self.paths.common)) is None:
                self.paths.check(path.name, path)
            move(path, target)
        elif not entry_exists(target):
            raise NotFound(f"the directory {path} is gone", path=str(path))
        linked.register_moved(git_dir, target)

    def refuse_if_locked(self, worktree: str) -> None:
        reason = None
        with contextlib.suppress(NotFound):
            reason = linked.lock_reason(self.paths.git_dir(worktree))
        if reason is not None:
            path = self.paths.payload(worktree)
            hint = f"Unlock it: 'git worktree unlock {path}'. Or remove it anyway: --force."
            why = f": {printable(reason)}" if reason else ", without a reason"
            raise Refused(f"{worktree} is locked by 'git worktree lock'{why}", hint=hint, worktree=worktree)

    def removed(self, operation: Operation) -> Path:
        return self.paths.payload(operation.worktree_id).with_name(f".holdfast-removed-{operation.operation_id}")

    def move_away(self, context: RepositoryContext, operation: Operation) -> None:
        """If git has forgotten the worktree since a kill, nothing can be captured: its directory stays, visibly."""
        name, removed = operation.worktree_id, self.removed(operation)
        if self.paths.registration(name) is None and entry_exists(removed):
            self._leave_in_sight(operation)
            return
        with contextlib.suppress(NotFound):
            self._move_directory(self.paths.git_dir(name), self.paths.payload(name), removed)

    def _leave_in_sight(self, operation: Operation) -> None:
        removed = self.removed(operation)
        move(removed, removed.with_name(f"{operation.worktree_id}.{operation.operation_id}"))

    def delete(self, context: RepositoryContext, operation: Operation) -> None:
        """Delete the directory and git's registration of it; and the branch, if the branch of `main` contains it."""
        from holdfast.trees.walker import remove_tree

        found = self.paths.registration(operation.worktree_id)
        if found is None:
            return
        removed = self.removed(operation)
        branch = self._branch_of(Path(found.git_dir))
        git_dir = Path(found.git_dir)
        try:
            keep_commits(self.paths, self.git, operation, removed, branch_of(operation.worktree_id))
        except (NotWritable, Refused):  # its commits cannot be fetched, so its directory stays
            detach(removed)
            self._leave_in_sight(operation)
        remove_tree(removed)
        if branch is not None and branch.startswith("refs/heads/"):
            with contextlib.suppress(Failure):  # then the branch stays
                target = linked.commit_of(self.git, "HEAD", self.paths.payload(self.paths.main))
                name = branch.removeprefix("refs/heads/")
                linked.delete_branch_if_contained(self.git, name, target, last=git_dir.name)
        elif branch is not None:
            self._keep(branch, operation.worktree_id)
        remove_tree(git_dir)
        with contextlib.suppress(NotFound):
            durable.remove(self.paths.indexes / git_dir.name)

    def _branch_of(self, git_dir: Path) -> str | None:
        """The branch that is checked out, as a reference, or else the commit; None if HEAD cannot be read."""
        try:
            text = durable.read(git_dir / "HEAD", limit=1 << 16).decode().strip()
        except (NotFound, Corrupt, UnicodeDecodeError):
            return None
        return text.removeprefix("ref: ") or None

    def _keep(self, commit: str, name: str) -> None:
        """Create a branch for a commit that was checked out without one, unless a reference reaches it."""
        if not self.git.run("for-each-ref", "--count=1", f"--contains={commit}"):
            self.git.run("update-ref", f"refs/heads/{branch_of(name)}-{commit[:8]}", commit)

    # --- Restoring in place ------------------------------------------------------------------------

    def prepare_restore(
        self, context: RepositoryContext, worktree: str, room: Scratch, source: Descriptor, how: RestoreOptions
    ) -> Operation:
        from holdfast.repository.restore import exchanged_path

        commit, path = self.commit(source.snapshot_id), self.paths.payload(worktree)
        if how.path is not None:
            exchanged_path(context, worktree, how.path)  # refuses a link on the way
        if how.path is not None and not self._has(commit, how.path):
            raise NotFound(f"there is no {how.path} in the snapshot {source.snapshot_id}", path=how.path)
        is_missing = not entry_exists(path) and worktree != self.paths.main
        if is_missing:  # recreate it as git would
            self._require_known_place(worktree, path)
            make_directories(path, mode=0o777)
            durable.create(path / ".git", b"gitdir: " + os.fsencode(self.paths.git_dir(worktree)) + b"\n")
            if (known := context.config(worktree).git) and known.isolated:
                isolate(self.git, path)
        if not is_missing and (before := self._before(context, worktree)) is not None:
            only = None if how.path is None else os.fsencode(how.path)
            require_no_ignored(self.git, path, self.tree(before), self.tree(commit), only)  # before a head is published
        self.note_commit(room, commit)
        facts: dict[str, Any] = {"snapshot_id": source.snapshot_id, "path": how.path, "reason": how.reason}
        facts["keeps"] = how.keep and not is_missing
        return context.operation(OperationKind.RESTORE, room.scratch_id, worktree, context.store.now(), **facts)

    def _require_known_place(self, worktree: str, path: Path) -> None:
        """Refuse to create the directory of a worktree except beside the others: a stranger's repository may register
        any path."""
        self.place_for_worktrees()
        if calls.realpath(path.parent) != calls.realpath(self.paths.worktrees):
            hint = "Put it back. Or restore the snapshot into a new worktree: without --inplace."
            message = f"the directory of {worktree} is missing, and {path} is not in {self.paths.worktrees}"
            raise Refused(message, hint=hint, worktree=worktree, path=str(path))

    def _before(self, context: RepositoryContext, worktree: str) -> str | None:
        """The commit of the content that a restore replaces, as far as it is known; None before the first commit."""
        tip = context.config(worktree).tip
        if tip is not None and self.is_ready(tip):
            return self.commit(tip)
        return linked.head_commit(self.git, self.paths.payload(worktree))

    def _has(self, commit: str, path: str) -> bool:
        return bool(self.git.run("--literal-pathspecs", "ls-tree", "--full-tree", commit, "--", path.rstrip("/")))

    def restore(self, context: RepositoryContext, operation: Operation) -> bool:
        """Turn the files of the kept tree into those of the restored one; git refuses if a file matches neither.

        In that case, and after a kill, the current content is captured first: a file that matches neither tree is a
        late write, which becomes a snapshot.
        """
        from holdfast.repository.exchange import end_restore

        room = self.paths.scratch / operation.operation_id
        path = self.paths.payload(operation.worktree_id)
        target, kept = self.commit(f"{operation.snapshot_id}"), self._kept(context, operation)
        make_directories(room)
        first = not entry_exists(room / _BEGUN)
        make_directories(room / _BEGUN)
        if first and operation.keeps and kept is not None:
            with contextlib.suppress(Changed, Refused):
                self._write(operation, path, kept, target)
                end_restore(context, operation, None)
                return True
        self._restore_found(context, operation, path, target)
        return True

    def _kept(self, context: RepositoryContext, operation: Operation) -> str | None:
        """The commit of the snapshot that has the content before the restore."""
        if operation.path is not None:
            tip = context.config(operation.worktree_id).tip
        else:
            published = context.descriptor(operation.operation_id)
            tip = None if published is None else published.parent_id
        return None if tip is None or not self.is_ready(tip) else self.commit(tip)

    def _restore_found(self, context: RepositoryContext, operation: Operation, path: Path, target: str) -> None:
        from holdfast.repository.exchange import abandon_restore, capture_late, end_restore

        for attempt in range(_MOST_ATTEMPTS):
            with capture_late(context, operation, path) as late:
                found = self.commit(late.snapshot_id)
                try:
                    self._write(operation, path, found, target)
                except Changed:
                    if attempt + 1 == _MOST_ATTEMPTS:
                        raise
                    continue
                except Refused:  # a pending operation would block the worktree
                    abandon_restore(context, operation)
                    raise
                is_late = operation.keeps and self._has_late(found, self._kept(context, operation), target)
                end_restore(context, operation, late if is_late else None)
                return

    def _has_late(self, found: str, kept: str | None, target: str) -> bool:
        """Whether the commit `found` has a path that matches neither the kept commit nor the restored one."""
        known = [each for each in (kept, target) if each is not None]
        differing = [{each.path for each in contents.differences(self.git, one, found)} for one in known]
        return bool(set.intersection(*differing))

    # --- For people --------------------------------------------------------------------------------

    def engine(self) -> str:
        return ENGINE

    def directories(self) -> Iterator[str]:
        for name in names_in_git(self.paths):
            if calls.is_directory(self.paths.payload(name)):
                yield name

    def checks(self, general: Sequence[RepositoryCheck]) -> Sequence[RepositoryCheck]:
        from holdfast.repository.checks_git import adapted

        return adapted(self, general)


def branch_of(worktree: str) -> str:
    """The default branch of a worktree; replaces the parts of its name that git accepts in no branch."""
    return "hf/" + re.sub(r"^\.|\.$|\.lock$", "_", worktree)


def _work(operation: Operation) -> GitWorktree:
    if not operation.git:
        raise not_understood(f"the operation {operation.operation_id}", "it names no git worktree")
    return operation.git
