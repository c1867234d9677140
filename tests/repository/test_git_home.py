"""What only a git home has: adopting a checkout in place, branches, and kills at every git command."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from holdfast.errors import (
    AlreadyExists,
    DirectoryReplaced,
    GitFailed,
    LockConflict,
    NameInvalid,
    NestedRepository,
    NotFound,
    Refused,
)
from holdfast.git import program
from holdfast.git import worktrees as linked
from holdfast.repository import git_init
from holdfast.repository.context import MAIN, OPERATIONS, WORKTREES, GitWorktree, OperationKind, Proof, settle
from holdfast.repository.git_home import GitHome, branch_of
from holdfast.repository.git_init import adopt_checkout, deinitialise, finish_deinit_around
from holdfast.repository.git_paths import GitPaths
from holdfast.repository.guard import WorktreePath, worktrees_at, worktrees_of
from holdfast.repository.init import initialise, is_repository
from holdfast.repository.repository import Repository, find_repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.store.model import Create, Decision, Delete
from proof.crash import Ending, Outcome, Scenario
from proof.effort import sweep
from proof.traced import end_of_group, orphans_are_ours
from tests.cli.commands import holdfast
from tests.locks.workers import Line, Workers
from tests.repository.stages import files_in, files_stored, put_files
from tests.support.homes import SAFE, approve_programs, copied, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

FILES = {"README": "read me", "src/a": "a", "src/b": "b", ".gitignore": "*.log\n"}


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)


def checkout(path: Path) -> Path:
    """A checkout with two commits, a staged and an unstaged change, a stash and an ignored file."""
    return copied(make_checkout, path)


def make_checkout(path: Path) -> None:
    git("init", "-q", "-b", "trunk", path)
    git("config", "user.name", "user", at=path)
    git("config", "user.email", "user@example", at=path)
    put_files(path, FILES)
    git("add", "-A", at=path)
    git("commit", "-qm", "first", at=path)
    put_files(path, {"src/a": "stashed"})
    git("stash", "-q", at=path)
    put_files(path, {"src/b": "staged"})
    git("add", "src/b", at=path)
    put_files(path, {"src/a": "changed", "new": "new", "x.log": "ignored"})


def of_the_user(path: Path) -> dict[str, str]:
    """What no command of Holdfast may change: HEAD, index, branches other than ours, stash and reflogs."""
    refs = git("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads", "refs/tags", "refs/stash", at=path)
    return {
        "HEAD": git("rev-parse", "HEAD", "--symbolic-full-name", "HEAD", at=path),
        "index": hashlib.sha256((path / ".git/index").read_bytes()).hexdigest(),
        "refs": "\n".join(each for each in refs.splitlines() if not each.startswith("refs/heads/hf/")),
        "stash": git("stash", "list", at=path),
        "reflog": (path / ".git/logs/HEAD").read_text(),
    }


@pytest.fixture
def path(scratch: Path) -> Path:
    return checkout(scratch / "project")


@pytest.fixture
def repository(path: Path) -> Repository:
    adopt_checkout(path)
    return Repository(path)


def home_of(repository: Repository) -> GitHome:
    assert isinstance(repository.context.home, GitHome)
    return repository.context.home


def record_creation(repository: Repository, name: str, work: GitWorktree, snapshot_id: str | None = None) -> None:
    context = repository.context

    def plant(view: object, now: float) -> Decision[None]:
        operation = context.operation(OperationKind.CREATE, "0" * 16, name, now, git=work, snapshot_id=snapshot_id)
        return Decision([Create(OPERATIONS.key(name), operation)], None)

    context.store.transact([OPERATIONS.key(name)], plant)


def undo_creation(repository: Repository, name: str, work: GitWorktree, snapshot_id: str | None = None) -> None:
    """Let the next command find the record of a creation, and finish it."""
    record_creation(repository, name, work, snapshot_id)
    repository.repair(strict=True)


@pytest.mark.parametrize("where", ["main", "feature", "empty", "begun", "occupied"])
def test_only_what_a_creation_made_is_removed_when_it_is_undone(repository: Repository, where: str) -> None:
    """Whatever the record of a creation says that never took place."""
    context, top = repository.context, repository.payload()
    git("branch", "theirs", git("commit-tree", "HEAD^{tree}", "-m", "nowhere else", at=top), at=top)
    git("worktree", "add", "-q", "-b", "feature", top.parent / "feature", at=top)
    (top.parent / "feature/work").write_text("not committed")
    (top.parent / "empty").mkdir()
    begun = context.paths.worktrees / "begun"
    if where == "occupied":
        begun.parent.mkdir()
        git("worktree", "move", top.parent / "feature", begun, at=top)
    place = {"main": top, "begun": begun, "occupied": begun}.get(where, top.parent / where)
    feature = begun if where == "occupied" else top.parent / "feature"
    before, files = of_the_user(top), files_in(feature)
    work = GitWorktree(
        path=str(place), branch="theirs", commit=git("rev-parse", "theirs", at=top), new_branch=True, new=True
    )
    undo_creation(repository, "begun", work)

    assert context.store.read(OPERATIONS.key("begun")) is None
    assert (of_the_user(top), files_in(feature)) == (before, files)
    assert (top.parent / "empty").is_dir()


@pytest.mark.parametrize("name", ["w1", "w10"])
def test_a_creation_that_was_killed_before_its_end_is_undone(repository: Repository, name: str) -> None:
    context, top = repository.context, repository.payload()
    path, branch = context.paths.worktrees / name, branch_of(name)
    path.parent.mkdir(exist_ok=True)
    before = of_the_user(top)
    git("worktree", "add", "-q", "-b", branch, path, at=top)
    work = GitWorktree(
        path=str(path), branch=branch, commit=git("rev-parse", "HEAD", at=top), new_branch=True, new=True
    )
    undo_creation(repository, name, work)

    assert (of_the_user(top), path.exists()) == (before, False)


WORK: dict[str, Callable[[Path], object]] = {
    "changed": lambda path: put_files(path, {"src/a": "work"}),
    "new": lambda path: put_files(path, {"work": "work"}),
    "ignored": lambda path: put_files(path, {"work.log": "work"}),
    "committed": lambda path: git("commit", "-q", "--allow-empty", "-m", "work", at=path),
}


def _commit_and_leave(path: Path, how: str) -> None:
    git("checkout", "-q", *how.split(), at=path)
    git("commit", "-q", "--allow-empty", "-m", "work", at=path)
    git("checkout", "-q", branch_of("dev"), at=path)


def _stage_only(path: Path) -> None:
    put_files(path, {"src/a": "work"})
    git("add", "src/a", at=path)
    git("restore", "--worktree", "--source=HEAD", "src/a", at=path)


def _work_in(make: str, path: Path) -> None:
    git(*make.split(), path / "inner", at=path)
    put_files(path / "inner", {"work": "work"})


def _differ_in_case(path: Path) -> None:
    put_files(path, {"SRC/A": "work"})
    git("config", "core.ignoreCase", "true", at=path)


def _hide_a_change(path: Path) -> None:
    git("update-index", "--assume-unchanged", "src/a", at=path)
    put_files(path, {"src/a": "work"})


def _lose(name: str, path: Path) -> None:
    put_files(path, {"src/a": "work", "work": "work"})
    (path.parents[1] / "project/.git/worktrees/dev" / name).unlink()


HIDDEN_WORK: dict[str, Callable[[Path], object]] = {
    "in a worktree": partial(_work_in, "worktree add -q -b inner"),
    "in a repository": partial(_work_in, "init -q"),
    "only staged": _stage_only,
    "on no branch": partial(_commit_and_leave, how="--detach"),
    "on another branch": partial(_commit_and_leave, how="-b other"),
    "assumed unchanged": _hide_a_change,
    "of another case": _differ_in_case,
    "without index": partial(_lose, "index"),
    "without HEAD": partial(_lose, "HEAD"),
}


@pytest.mark.parametrize(
    ("what", "start"),
    [
        *itertools.product(WORK, ["commit", "snapshot", "isolated"]),
        *itertools.product(HIDDEN_WORK, ["commit"]),
        *itertools.product(["only staged", "on another branch", "without index"], ["isolated"]),
    ],
)
def test_a_worktree_that_somebody_works_in_is_kept_when_its_creation_is_undone(
    repository: Repository, what: str, start: str
) -> None:
    """Although it stands where the record says, on the branch that the record names; and whatever hides it from git."""
    context, top = repository.context, repository.payload()
    path = context.paths.worktrees / "dev"
    commit = git("rev-parse", "HEAD", at=top)
    if start == "isolated":
        repository.worktrees.create("dev", isolated=True)
        key = WORKTREES.key("dev")
        context.store.transact([key], lambda view, now: Decision([Delete(key)], None))
        linked.clear_name(home_of(repository).git, path)
    else:
        git("worktree", "add", "-q", "-b", branch_of("dev"), path, commit, at=top)
    taken = None
    if start == "snapshot":
        with repository.lease() as lease:
            taken = repository.snapshot(lease=lease).snapshot_id
    (WORK | HIDDEN_WORK)[what](path)
    before, files = of_the_user(top), files_in(path)
    work = GitWorktree(
        path=str(path),
        branch=branch_of("dev"),
        commit=commit,
        new_branch=True,
        new=True,
        isolated=start == "isolated" or msgspec.UNSET,
    )
    undo_creation(repository, "dev", work, taken)

    assert context.store.read(OPERATIONS.key("dev")) is None
    assert (of_the_user(top), files_in(path)) == (before, files)


def test_undoing_a_creation_leaves_one_of_a_similar_name_alone(repository: Repository) -> None:
    """git adds a number to the directory of a name that is taken, and `w10` may be in the making."""
    context, top = repository.context, repository.payload()
    commit = git("rev-parse", "HEAD", at=top)
    begun = top / ".git/worktrees/w10"
    begun.mkdir(parents=True)
    (begun / "locked").write_text("initializing")
    for name in ("w1", "w10"):
        work = GitWorktree(
            path=str(context.paths.worktrees / name), branch=branch_of(name), commit=commit, new_branch=True, new=True
        )
        record_creation(repository, name, work)
    found = context.store.read(OPERATIONS.key("w1"))
    assert found is not None
    context.home.discard(context, found.record)

    assert begun.is_dir()


def require_sound(repository: Repository) -> None:
    git("fsck", "--strict", at=repository.payload())
    assert repository.repair(strict=True).failed == ()
    assert [str(each) for each in repository.examine(strict=True)] == []


# --- Adopting a checkout -------------------------------------------------------------------------------


def test_a_checkout_is_adopted_as_it_stands(path: Path) -> None:
    before, status, files = of_the_user(path), git("status", "--porcelain", at=path), files_in(path)
    made = adopt_checkout(path / "src")
    again = adopt_checkout(path)

    assert (made.created, again.created) == (True, False)
    assert made.root == path / ".git/holdfast"
    assert of_the_user(path) == before
    assert git("status", "--porcelain", at=path) == status
    assert files_in(path) == files
    assert Repository(path).payload() == path


def test_a_repository_is_found_from_everywhere(repository: Repository, path: Path, scratch: Path) -> None:
    repository.worktrees.create("dev")
    dev = repository.path("dev")
    (dev / "deep").mkdir()

    for start in (path, path / "src", dev, dev / "deep", path / ".git", path / ".git/holdfast"):
        assert find_repository(start) == repository.root, start
    assert find_repository(scratch, str(path / ".git")) == repository.root
    assert repository.worktree_around(path / "src") == MAIN
    assert repository.worktree_around(dev / "deep") == "dev"
    assert worktrees_of(str(dev / "deep/x")) == [WorktreePath(str(repository.root), "dev")]
    assert worktrees_of(str(path)) == [WorktreePath(str(repository.root), MAIN)]
    assert [each.worktree for each in worktrees_at(str(path / "src"))] == [MAIN]
    with pytest.raises(NotFound):
        find_repository(scratch)


def test_a_linked_worktree_that_is_not_adopted_is_nobodys_place(repository: Repository, path: Path) -> None:
    git("worktree", "add", "-q", path.parent / "hot", at=path)

    assert worktrees_of(str(path.parent / "hot/x")) == []
    with pytest.raises(NotFound, match="does not know"):
        repository.worktree_around(path.parent / "hot")
    repository.worktrees.adopt(path.parent / "hot")
    assert repository.worktree_around(path.parent / "hot") == "hot"
    with pytest.raises(AlreadyExists):
        repository.worktrees.adopt(path.parent / "hot", name="other")


def test_a_linked_worktree_is_adopted_from_inside_it(
    repository: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("worktree", "add", "-q", path.parent / "hot", at=path)
    monkeypatch.chdir(path.parent / "hot")

    assert repository.worktrees.adopt(Path()).worktree_id == "hot"


def test_what_cannot_be_adopted_is_refused(scratch: Path, path: Path) -> None:
    git("init", "-q", "--bare", scratch / "bare.git")
    with pytest.raises(Refused, match="not in a checkout"):
        adopt_checkout(scratch / "bare.git")
    with pytest.raises(Refused, match="not in a checkout"):
        adopt_checkout(path / ".git/objects")
    with pytest.raises(NotFound, match="not in a git checkout"):
        adopt_checkout(scratch)
    with pytest.raises(AlreadyExists) as refused:
        initialise(path, probe=lambda directory: SAFE)
    assert "'holdfast init' in it" in refused.value.hint
    initialise(scratch / "plain", probe=lambda directory: SAFE)
    inside = checkout(scratch / "plain/main/inner")
    with pytest.raises(NestedRepository):
        adopt_checkout(inside)


def test_a_bare_repository_a_submodule_and_a_separate_git_directory_are_adopted(scratch: Path, path: Path) -> None:
    git("clone", "-q", "--bare", path, scratch / "bare.git")
    git("worktree", "add", "-q", scratch / "first", "trunk", at=scratch / "bare.git")
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", path, "sub", at=scratch / "first")
    git("init", "-q", f"--separate-git-dir={scratch / 'elsewhere.git'}", scratch / "apart")
    for place in (scratch / "first", scratch / "first/sub", scratch / "apart"):
        made = adopt_checkout(place)
        repository = Repository(place)
        put_files(place, {"more": "more"})
        with repository.lease() as lease:
            taken = repository.snapshot(lease=lease)
        assert repository.payload() == place
        assert made.root == find_repository(place)
        assert files_stored(repository.context, taken.snapshot_id)["more"] == "more"
        require_sound(repository)


# --- Worktrees and their branches ----------------------------------------------------------------------


def test_a_worktree_begins_at_the_commit_of_main_on_a_branch_of_its_own(repository: Repository, path: Path) -> None:
    before = of_the_user(path)
    config = repository.worktrees.create("dev")

    dev = repository.path("dev")
    assert dev == path.parent / "project.worktrees/dev"
    assert files_in(dev) == FILES
    assert git("symbolic-ref", "--short", "HEAD", at=dev) == "hf/dev"
    assert config.git
    assert (config.git.path, config.git.branch) == (str(dev), "hf/dev")
    assert repository.worktrees.uncommitted() == "new, src/a, src/b"
    assert of_the_user(path) == before
    require_sound(repository)


def test_a_branch_that_exists_is_continued_only_if_it_is_named(repository: Repository, path: Path) -> None:
    git("branch", "hf/dev", at=path)
    with pytest.raises(AlreadyExists, match="hf/dev"):
        repository.worktrees.create("dev")
    assert repository.worktrees.configs()[1:] == []

    repository.worktrees.create("dev", branch="hf/dev")
    assert git("symbolic-ref", "--short", "HEAD", at=repository.path("dev")) == "hf/dev"


@pytest.mark.parametrize("branch", ["-M", "--force", "a b", "a..b", "x.lock", "/", "@{-1}"])
def test_a_branch_that_is_no_name_is_refused_before_git_sees_it(
    repository: Repository, path: Path, branch: str
) -> None:
    """`git worktree add -b -M` renames the branch that is checked out in `main`."""
    before = of_the_user(path)
    with pytest.raises(NameInvalid, match="name of a branch"):
        repository.worktrees.create("dev", branch=branch)

    assert of_the_user(path) == before
    assert repository.worktrees.configs()[1:] == []


def test_a_creation_that_fails_leaves_those_of_others_alone(repository: Repository, path: Path) -> None:
    """Between two steps, `git worktree add` has a directory without, or with an empty, file `gitdir`."""
    begun = [path / f".git/worktrees/{name}" for name in ("dev2", "other")]
    for each in begun:
        each.mkdir(parents=True)
        (each / "locked").write_text("initializing")
    (begun[1] / "gitdir").write_bytes(b"\0")
    with pytest.raises(GitFailed):
        repository.worktrees.create("dev1", branch="trunk")

    assert all(each.is_dir() for each in begun)
    assert repository.worktrees.configs()[1:] == []


def test_a_worktree_begins_at_a_revision_a_worktree_or_a_snapshot(repository: Repository, path: Path) -> None:
    git("commit", "-qm", "second", at=path)
    with repository.lease() as lease:
        taken = repository.snapshot(lease=lease)
    repository.worktrees.create("old", snapshot="HEAD~1")
    put_files(repository.path("old"), {"made": "in old"})
    git("add", "-A", at=repository.path("old"))
    git("commit", "-qm", "third", at=repository.path("old"))
    repository.worktrees.create("same", snapshot="old")
    repository.worktrees.create("saved", snapshot=taken.snapshot_id)

    assert files_in(repository.path("same"))["made"] == "in old"
    assert files_in(repository.path("saved"))["src/a"] == "changed"
    assert git("rev-parse", "HEAD", at=repository.path("saved")) == git("rev-parse", "HEAD", at=path)
    assert repository.config("saved").head_snapshot_id == taken.snapshot_id
    assert list(repository.snapshots.status("saved").changes) == []


def test_a_rename_takes_the_branch_along_and_a_removal_keeps_commits(repository: Repository, path: Path) -> None:
    before = of_the_user(path)
    for name in ("landed", "ahead"):
        repository.worktrees.create(name)
    put_files(repository.path("ahead"), {"work": "done"})
    git("add", "-A", at=repository.path("ahead"))
    git("commit", "-qm", "work", at=repository.path("ahead"))
    put_files(repository.path("ahead"), {"unsaved": "too"})

    repository.worktrees.change_name("ahead", "further")
    assert git("symbolic-ref", "--short", "HEAD", at=repository.path("further")) == "hf/further"
    removed = [repository.remove_worktree(name) for name in ("landed", "further")]

    assert git("for-each-ref", "--format=%(refname:short)", "refs/heads/hf", at=path) == "hf/further"
    assert removed[1].saved is not None
    assert files_stored(repository.context, removed[1].saved)["unsaved"] == "too"
    assert git("worktree", "list", at=path).count("\n") == 0
    assert of_the_user(path) == before
    require_sound(repository)


def test_a_rename_is_refused_as_a_whole_if_its_branch_is_somebody_elses(repository: Repository, path: Path) -> None:
    """Also one at the same commit, such as a rename that was killed would have left."""
    repository.worktrees.create("old")
    git("branch", "hf/new", "hf/old", at=path)
    with pytest.raises(AlreadyExists, match="branch hf/new"):
        repository.worktrees.change_name("old", "new")

    assert repository.path("old") == path.parent / "project.worktrees/old"
    assert git("symbolic-ref", "--short", "HEAD", at=repository.path("old")) == "hf/old"
    assert repository.context.store.read(OPERATIONS.key("old")) is None
    require_sound(repository)


def test_a_commit_without_a_branch_survives_the_removal_of_its_worktree(repository: Repository, path: Path) -> None:
    repository.worktrees.create("dev")
    dev = repository.path("dev")
    git("checkout", "-q", "--detach", at=dev)
    put_files(dev, {"work": "done"})
    git("add", "-A", at=dev)
    git("commit", "-qm", "work", at=dev)
    commit = git("rev-parse", "HEAD", at=dev)
    repository.remove_worktree("dev")

    git("gc", "-q", "--prune=now", at=path)
    assert git("for-each-ref", f"--contains={commit}", at=path)


def test_a_directory_that_is_moved_away_while_it_is_looked_at_is_missing_and_not_replaced(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.worktrees.create("a")
    check = GitPaths.check

    def check_late(paths: GitPaths, worktree: str, path: Path) -> None:
        path.rename(path.with_name("moved"))
        check(paths, worktree, path)

    monkeypatch.setattr(GitPaths, "check", check_late)
    with pytest.raises(NotFound, match="has lost its directory"):
        repository.path("a")


def test_a_worktree_that_git_has_locked_is_removed_only_by_force(repository: Repository, path: Path) -> None:
    for name, reason in (("dev", "on a stick"), ("other", "")):
        repository.worktrees.create(name)
        top = repository.path(name)
        git("worktree", "lock", f"--reason={reason}", top, at=path)
        with pytest.raises(Refused, match=f"locked by 'git worktree lock'.*{reason or 'without a reason'}") as refused:
            repository.remove_worktree(name)
        assert "--force" in refused.value.hint
        assert top.is_dir()
        repository.remove_worktree(name, force=True)
        assert not top.exists()
    require_sound(repository)


# --- Behind our back -----------------------------------------------------------------------------------


def test_worktrees_that_git_moved_removed_or_pruned_are_noticed_and_fixed(repository: Repository, path: Path) -> None:
    for name in ("moved", "removed", "pruned"):
        repository.worktrees.create(name)
    git("worktree", "move", repository.path("moved"), path.parent / "there", at=path)
    git("worktree", "remove", repository.path("removed"), at=path)
    shutil.rmtree(repository.path("pruned"))
    git("worktree", "prune", at=path)

    assert repository.path("moved") == path.parent / "there"
    found = {each.subject: each.code for each in repository.examine()}
    assert found == {
        "moved": "worktree-moved",
        "removed": "worktree-unregistered",
        "pruned": "worktree-unregistered",
    }
    require_sound(repository)
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN, "moved"]


def test_a_worktree_of_a_copy_is_the_originals_and_the_doctor_says_so(repository: Repository, path: Path) -> None:
    repository.worktrees.create("dev")
    copied = Repository(shutil.copytree(path, path.with_name("copy"), symlinks=True))

    assert {each.code: each.subject for each in copied.examine()} == {
        "worktree-moved": MAIN,
        "worktree-disconnected": "dev",
    }
    with pytest.raises(DirectoryReplaced, match="not the directory"):
        copied.remove_worktree("dev")
    assert list(repository.examine(strict=True)) == []

    path.rename(path.with_name("moved"))  # nothing leads back from `dev`, until git is told
    moved = Repository(path.with_name("moved"))
    with pytest.raises(DirectoryReplaced) as refused:
        moved.path("dev")
    git("worktree", "repair", path.with_name("project.worktrees") / "dev", at=path.with_name("moved"))
    assert "worktree repair" in refused.value.hint
    assert moved.path("dev") == path.with_name("project.worktrees") / "dev"
    require_sound(moved)


def test_a_removal_ends_although_git_has_forgotten_the_worktree(
    repository: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the renaming of the directory and telling git, and then `git worktree prune`."""
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"work": "precious"})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(linked, "register_moved", killed)
        with pytest.raises(KeyboardInterrupt):
            repository.remove_worktree("dev")
    git("worktree", "prune", at=path)

    require_sound(repository)
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN]
    [left] = repository.context.paths.worktrees.iterdir()
    assert left.name.startswith("dev.")
    assert (left / "work").read_text() == "precious"


def test_a_worktree_inside_the_checkout_is_no_content_of_it(repository: Repository, path: Path) -> None:
    git("worktree", "add", "-q", path / "inside", at=path)
    repository.worktrees.adopt(path / "inside")
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease)
        put_files(path / "inside", {"work": "done"})
        git("add", "-A", at=path / "inside")
        git("commit", "-qm", "work", at=path / "inside")
        second = repository.snapshot(lease=lease)

    assert "inside" not in {os.fsdecode(each.path) for each in repository.snapshots.entries(first.snapshot_id)}
    assert second.snapshot_id == first.snapshot_id
    assert "inside" not in repository.worktrees.uncommitted()
    require_sound(repository)


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize("force", [True, False])
def test_a_worktree_that_contains_another_one_stays(
    repository: Repository, path: Path, *, adopted: bool, force: bool
) -> None:
    repository.worktrees.create("outer")
    inner = repository.path("outer") / "deep/inner"
    git("worktree", "add", "-q", inner, at=path)
    put_files(inner, {"work": "precious"})
    if adopted:
        repository.worktrees.adopt(inner)

    with repository.lease("inner") if adopted else contextlib.nullcontext():
        with pytest.raises(Refused, match=r"outer cannot be removed: .*inner is in it"):
            repository.remove_worktree("outer", force=force)
        with pytest.raises(Refused, match=r"outer cannot be renamed: .*inner is in it"):
            repository.worktrees.change_name("outer", "new", force=force)

    assert (inner / "work").read_text() == "precious"
    git("worktree", "move", inner, path.with_name("away"), at=path)
    repository.worktrees.change_name("outer", "new")
    repository.remove_worktree("new")
    assert (path.with_name("away") / "work").read_text() == "precious"
    require_sound(repository)


def test_a_repository_in_a_worktree_is_deleted_only_by_force(repository: Repository, path: Path) -> None:
    repository.worktrees.create("dev")
    dev = repository.path("dev")
    for each in ("lib", "ignored.log"):
        git("clone", "-q", path, dev / each)
    (dev / "marker/.git").mkdir(parents=True)
    put_files(dev, {"lib/work": "precious", "marker/file": "x"})

    with pytest.raises(Refused, match="do not contain the repositories in it") as refused:
        repository.remove_worktree("dev")
    shown = json.loads(holdfast("worktree", "remove", "dev", "--dry-run", "--json", cwd=path).stdout)["data"]

    assert refused.value.facts["repositories"] == [str(dev / "lib"), str(dev / "marker")]
    assert shown["would_remove"]["repositories"] == [str(dev / "lib"), str(dev / "marker")]
    assert (dev / "lib/work").read_text() == "precious"
    repository.worktrees.change_name("dev", "new")
    repository.remove_worktree("new", force=True)
    require_sound(repository)


def test_a_reference_and_a_pack_of_a_dead_process_are_removed(repository: Repository, path: Path) -> None:
    home = repository.context.home
    assert isinstance(home, GitHome)
    git("update-ref", "refs/holdfast/snapshots/0123456789abcdef", "HEAD", at=path)
    keep = path / ".git/objects/pack/pack-1234.keep"
    keep.parent.mkdir(exist_ok=True)
    keep.write_text("holdfast fedcba9876543210\n")

    assert {each.code for each in repository.examine()} == {"tree-orphaned"}
    require_sound(repository)
    assert not keep.exists()
    assert home.stored() == []


def test_garbage_collection_of_git_keeps_every_snapshot(repository: Repository, path: Path) -> None:
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease)
        put_files(path, {"src/a": "again"})
        second = repository.snapshot(lease=lease)
    git("gc", "-q", "--prune=now", at=path)

    assert files_stored(repository.context, first.snapshot_id)["src/a"] == "changed"
    assert files_stored(repository.context, second.snapshot_id)["src/a"] == "again"
    require_sound(repository)


# --- Snapshots and restores ----------------------------------------------------------------------------


def test_a_snapshot_has_what_git_would_add_and_counts_the_rest(repository: Repository, path: Path) -> None:
    before = of_the_user(path)
    with repository.lease() as lease:
        taken = repository.snapshot(lease=lease)
        again = repository.snapshot(lease=lease)
        proof = Proof(lease.lock_id, lease.token)
        forced = repository.snapshots.take(MAIN, proof, SnapshotOptions(allow_empty=True))

    expected = {name: text for name, text in files_in(path).items() if name != "x.log"}
    assert files_stored(repository.context, taken.snapshot_id) == expected
    assert taken.left_out == {"ignored": 1}
    assert again.snapshot_id == taken.snapshot_id
    assert forced.parent_id == taken.snapshot_id
    assert forced.left_out == {"ignored": 1}
    assert of_the_user(path) == before


def test_a_restore_in_place_changes_files_and_nothing_else(repository: Repository, path: Path) -> None:
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease)
        put_files(path, {"src/a": "worse", "worse": "too"})
        before, inode = of_the_user(path), path.stat().st_ino
        done = repository.restore(first.snapshot_id, lease=lease, reason="it was better")

    assert files_in(path)["src/a"] == "changed"
    assert not (path / "worse").exists()
    assert (path / "x.log").read_text() == "ignored"
    assert path.stat().st_ino == inode
    assert of_the_user(path) == before
    assert done.kept is not None
    assert files_stored(repository.context, done.kept.snapshot_id)["worse"] == "too"
    require_sound(repository)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("only", [None, "built"])
@pytest.mark.sampled(1)
def test_a_restore_that_an_ignored_file_blocks_is_refused_before_anything_is_published(
    repository: Repository, path: Path, only: str | None, keep: bool
) -> None:
    put_files(path, {"built/x": "captured"})
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease)
        shutil.rmtree(path / "built")
        put_files(path, {".gitignore": "*.log\nbuilt\n", "built": "mine, and ignored", "src/a": "later"})
        repository.snapshot(lease=lease)
        before, head, files = repository.snapshots.all_ids(), repository.config(MAIN).head_snapshot_id, files_in(path)
        how = RestoreOptions(reason="it was better", path=only, keep=keep)
        with pytest.raises(Refused, match="in the way, nothing was written: built"):
            repository.snapshots.restore_in_place(MAIN, first.snapshot_id, Proof.of(lease), how)

        assert repository.snapshots.all_ids() == before
        assert repository.config(MAIN).head_snapshot_id == head
        assert files_in(path) == files
        (path / "built").unlink()
        repository.snapshots.restore_in_place(MAIN, first.snapshot_id, Proof.of(lease), how)
    assert files_in(path)["built/x"] == "captured"
    require_sound(repository)


def test_work_in_another_worktree_does_not_stop_a_restore_of_main(repository: Repository, path: Path) -> None:
    """Its process has lock files open below `.git`, which is in the directory of `main`, but not part of it."""
    repository.worktrees.create("dev")
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease)
        put_files(path, {"src/a": "worse"})
        with Workers() as workers:

            def work(line: Line) -> None:
                with Repository(path).lease("dev"):
                    line.say("holds it")
                    line.wait()

            assert workers.start(work).hear() == "holds it"
            repository.restore(first.snapshot_id, lease=lease, reason="it was better")

    assert files_in(path)["src/a"] == "changed"


# --- Deinit --------------------------------------------------------------------------------------------


def test_deinit_leaves_git_as_it_was(repository: Repository, path: Path) -> None:
    refs, before = git("for-each-ref", at=path), of_the_user(path)
    repository.worktrees.create("dev")
    with repository.lease() as lease:
        repository.snapshot(lease=lease)
        with pytest.raises(Refused, match="holds the lease"):
            deinitialise(repository)
    put_files(repository.path("dev"), {"work": "x"})
    with pytest.raises(Refused, match="not in a commit"):
        deinitialise(repository)
    (repository.path("dev") / "work").unlink()
    with pytest.raises(Refused, match="1 snapshot would be deleted with content that is in no commit"):
        deinitialise(repository)
    done = deinitialise(repository, force=True)

    assert done.worktrees == (path.parent / "project.worktrees/dev",)
    assert git("for-each-ref", "--exclude=refs/heads/hf/*", at=path) == refs if _excludes() else True
    assert of_the_user(path) == before
    assert not any(each.name.startswith("holdfast") for each in (path / ".git").rglob("*"))
    with pytest.raises(NotFound):
        find_repository(path)


def test_the_next_deinit_finishes_one_that_was_killed(
    repository: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with repository.lease() as lease:
        repository.snapshot(lease=lease)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(git_init, "_forget_everything", killed)
        with pytest.raises(KeyboardInterrupt):
            deinitialise(repository, force=True)
    assert git("for-each-ref", "refs/holdfast", at=path) != ""
    done = holdfast("deinit", cwd=path / "src")
    again = holdfast("deinit", cwd=path)

    assert done.stdout == f"Removed the leftovers of an interrupted deinit in {path}/.git.\n"
    assert git("for-each-ref", "refs/holdfast", at=path) == ""
    assert not (path / ".git/holdfast.removed").exists()
    assert (again.returncode, "not in a Holdfast repository" in again.stderr) == (3, True)


def _excludes() -> bool:
    with contextlib.suppress(AssertionError):
        return git("version").split()[2] >= "2.42"
    return False


# --- Kills ---------------------------------------------------------------------------------------------


class Case:
    """One operation in a checkout of the user. Afterwards, what it changes is as before or complete."""

    def prepare(self, directory: Path) -> None:
        path = checkout(directory / "project")
        self.adopt(path)
        (directory / "before").write_text(json.dumps(of_the_user(path)))

    def adopt(self, path: Path) -> None:
        adopt_checkout(path)
        self.arrange(Repository(path))

    def arrange(self, repository: Repository) -> None: ...

    def operate(self, directory: Path) -> object:
        return self.act(Repository(directory / "project"))

    def act(self, repository: Repository) -> object:
        raise NotImplementedError

    def is_new(self, repository: Repository) -> bool:
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        path = directory / "project"
        repository = Repository(path)
        for name in [each for each, _ in repository.context.store.scan(OPERATIONS)]:
            settle(repository.context, name)
        require_sound(repository)
        assert of_the_user(path) == json.loads((directory / "before").read_text()), "something of the user has changed"
        for state in list(repository.leases.states()):  # of the killed process
            repository.leases.release(state.lease.worktree_id, state.lease.lock_id)
        is_new = self.is_new(repository)
        assert is_new or not outcome.acknowledged, "an acknowledged change is missing"
        if not is_new:
            self.act(repository)
            assert self.is_new(repository)
            require_sound(repository)


def worktree_names(repository: Repository) -> list[str]:
    """The worktrees other than `main`, of which git and the records must have the same."""
    listed = git("worktree", "list", "--porcelain", at=repository.payload())
    directories = [Path(line[9:]).name for line in listed.splitlines() if line.startswith("worktree ")][1:]
    names = sorted(each.worktree_id for each in repository.worktrees.configs()[1:])
    assert sorted(directories) == names, "git and the records disagree"
    return names


class Creation(Case):
    def act(self, repository: Repository) -> object:
        return repository.worktrees.create("dev")

    def is_new(self, repository: Repository) -> bool:
        names = worktree_names(repository)
        branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/hf", at=repository.payload())
        assert branches.split() == [f"hf/{name}" for name in names], "a branch without its worktree, or the reverse"
        return names == ["dev"] and files_in(repository.path("dev")) == self.content

    content: ClassVar[dict[str, str]] = FILES


class CreationFromASnapshot(Creation):
    content: ClassVar[dict[str, str]] = {**FILES, "src/a": "changed", "src/b": "staged", "new": "new"}

    def arrange(self, repository: Repository) -> None:
        with repository.lease() as lease:
            repository.snapshot(lease=lease)

    def act(self, repository: Repository) -> object:
        return repository.worktrees.create("dev", snapshot="head")


class Adoption(Case):
    def arrange(self, repository: Repository) -> None:
        git("worktree", "add", "-q", repository.payload().with_name("hot"), "-b", "hf/hot", at=repository.payload())

    def act(self, repository: Repository) -> object:
        return repository.worktrees.adopt(repository.payload().with_name("hot"))

    def is_new(self, repository: Repository) -> bool:
        return [each.worktree_id for each in repository.worktrees.configs()] == [MAIN, "hot"]


class Renaming(Case):
    def arrange(self, repository: Repository) -> None:
        repository.worktrees.create("old")
        put_files(repository.path("old"), {"work": "unsaved"})

    def act(self, repository: Repository) -> object:
        return repository.worktrees.change_name("old", "new", force=True)

    def is_new(self, repository: Repository) -> bool:
        [name] = worktree_names(repository)
        assert files_in(repository.path(name))["work"] == "unsaved"
        assert git("symbolic-ref", "--short", "HEAD", at=repository.path(name)) == f"hf/{name}"
        return name == "new"


class Removal(Renaming):
    def act(self, repository: Repository) -> object:
        return repository.remove_worktree("old", force=True)

    def is_new(self, repository: Repository) -> bool:
        if names := worktree_names(repository):
            assert files_in(repository.path(names[0]))["work"] == "unsaved"
            return False
        stored = [files_stored(repository.context, each) for each in repository.snapshots.all_ids()]
        assert any(each.get("work") == "unsaved" for each in stored), "work was lost"
        assert os.listdir(repository.context.paths.worktrees) == []
        return True


class Snapshot(Case):
    def act(self, repository: Repository) -> object:
        with repository.lease() as lease:
            return repository.snapshot(lease=lease)

    def is_new(self, repository: Repository) -> bool:
        stored = [files_stored(repository.context, each) for each in repository.snapshots.all_ids()]
        assert all(each["new"] == "new" for each in stored)
        return bool(stored)


class Restoring(Case):
    def arrange(self, repository: Repository) -> None:
        with repository.lease() as lease:
            repository.snapshot(lease=lease)
        put_files(repository.payload(), {"src/a": "worse", "worse": "too"})
        (repository.payload() / "new").unlink()

    def act(self, repository: Repository) -> object:
        first = repository.snapshots.line(MAIN).entries[-1].descriptor.snapshot_id
        with repository.lease() as lease:
            return repository.restore(first, lease=lease, reason="it was better")

    def is_new(self, repository: Repository) -> bool:
        found = files_in(repository.payload())
        stored = [files_stored(repository.context, each) for each in repository.snapshots.all_ids()]
        if found["src/a"] == "worse":
            assert found["worse"] == "too"
            return False
        assert found == {**CreationFromASnapshot.content, "x.log": "ignored"}
        assert any(each.get("worse") == "too" for each in stored), "replaced work was lost"
        return True


class RestoringAPath(Restoring):
    def act(self, repository: Repository) -> object:
        first = repository.snapshots.line(MAIN).entries[-1].descriptor.snapshot_id
        with repository.lease() as lease:
            return repository.restore(first, lease=lease, reason="it was better", path="src/a")

    def is_new(self, repository: Repository) -> bool:
        found = files_in(repository.payload())
        assert "new" not in found
        assert found["worse"] == "too"
        stored = [files_stored(repository.context, each) for each in repository.snapshots.all_ids()]
        assert found["src/a"] == "worse" or any(each["src/a"] == "worse" for each in stored), "replaced work was lost"
        return found["src/a"] == "changed"


class RemovalWithoutABranch(Removal):
    """The commit that is checked out is on no branch: a snapshot, or a branch of its own, keeps it."""

    def arrange(self, repository: Repository) -> None:
        super().arrange(repository)
        git("checkout", "-q", "--detach", at=repository.path("old"))
        put_files(repository.path("old"), {"committed": "too"})
        git("add", "committed", at=repository.path("old"))
        git("commit", "-qm", "on no branch", at=repository.path("old"))
        (repository.root.parent / "kept").write_text(git("rev-parse", "HEAD", at=repository.path("old")))

    def is_new(self, repository: Repository) -> bool:
        if worktree_names(repository):
            return False
        commit = (repository.root.parent / "kept").read_text()
        assert git("for-each-ref", f"--contains={commit}", at=repository.payload()), "a commit was lost"
        return True


class Initialisation(Case):
    def adopt(self, path: Path) -> None: ...

    def operate(self, directory: Path) -> object:
        return adopt_checkout(directory / "project")

    def check(self, directory: Path, outcome: Outcome) -> None:
        made = adopt_checkout(directory / "project")
        assert not (made.created and outcome.acknowledged), "an acknowledged repository is missing"
        super().check(directory, outcome)

    def is_new(self, repository: Repository) -> bool:
        return [each.worktree_id for each in repository.worktrees.configs()] == [MAIN]


class Deinitialisation(Case):
    def arrange(self, repository: Repository) -> None:
        repository.worktrees.create("dev")
        with repository.lease() as lease:
            repository.snapshot(lease=lease)

    def operate(self, directory: Path) -> object:
        return deinitialise(Repository(directory / "project"), force=True)

    def check(self, directory: Path, outcome: Outcome) -> None:
        """The repository is whole, or there is none; and then nothing of it is left when the removal is finished."""
        path = directory / "project"
        if is_repository(path / ".git/holdfast"):
            assert not outcome.acknowledged
            super().check(directory, outcome)
            deinitialise(Repository(path), force=True)
        finish_deinit_around(path)
        assert of_the_user(path) == json.loads((directory / "before").read_text()), "something of the user has changed"
        assert not any(each.name.startswith("holdfast") for each in (path / ".git").rglob("*"))
        assert git("for-each-ref", "refs/holdfast", at=path) == ""
        assert files_in(directory / "project.worktrees/dev") == FILES
        adopt_checkout(path)
        require_sound(Repository(path))

    def is_new(self, repository: Repository) -> bool:
        [taken] = repository.snapshots.all_ids()
        assert files_stored(repository.context, taken)["new"] == "new"
        assert worktree_names(repository) == ["dev"]
        return True


CASES = [
    *(Creation, CreationFromASnapshot, Adoption, Renaming, Removal, RemovalWithoutABranch),
    *(Snapshot, Restoring, RestoringAPath, Initialisation, Deinitialisation),
]


def killed_while_git_writes(repository: Repository, path: Path, *, with_git: bool) -> Path:
    """Kill a process that restores `src/a`, while its git is about to write it. If git lives, it waits for a file."""
    started, go_on = path.with_name("started"), path.with_name("go-on")
    git("config", "filter.slow.smudge", f"touch {started}; until [ -e {go_on} ]; do sleep 0.01; done; cat", at=path)
    git("config", "filter.slow.clean", "cat", at=path)
    approve_programs(path)
    put_files(path, {".gitattributes": "src/a filter=slow\n"})
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease)
    put_files(path, {"src/a": "worse"})
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            with repository.lease() as lease:
                repository.restore(first.snapshot_id, lease=lease, reason="it was better")
        finally:
            os._exit(1)
    wait_until(started.exists)
    os.kill(-child if with_git else child, signal.SIGKILL)
    os.waitpid(child, 0)
    return go_on


def test_nobody_finishes_the_work_of_a_killed_process_while_its_git_still_works(
    repository: Repository, path: Path
) -> None:
    go_on = killed_while_git_writes(repository, path, with_git=False)
    with pytest.raises(LockConflict, match="being restored"):
        settle(repository.context, MAIN)
    go_on.touch()
    wait_until(lambda: has_settled(repository))

    assert files_in(path)["src/a"] == "changed"
    require_sound(repository)


def test_a_restore_is_finished_although_its_git_was_killed_too(repository: Repository, path: Path) -> None:
    """The lock file that git leaves beside its index is in a scratch directory."""
    killed_while_git_writes(repository, path, with_git=True).touch()
    wait_until(lambda: has_settled(repository))

    assert files_in(path)["src/a"] == "changed"
    require_sound(repository)


def has_settled(repository: Repository) -> bool:
    with contextlib.suppress(LockConflict):
        settle(repository.context, MAIN)
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


class DiesAtGit:
    """A process that dies right before or right after it starts git for the n-th time."""

    def __init__(self, number: int, *, after: bool) -> None:
        self.left, self.after = number, after
        self.run = program._output

    def __call__(self, *arguments: Any) -> bytes:
        self.left -= 1
        if self.left == 0 and not self.after:
            os._exit(9)
        try:
            return self.run(*arguments)
        finally:
            if self.left == 0:
                os._exit(9)


def killed_at_git(case: Scenario, directory: Path, number: int, *, after: bool) -> int | None:
    """Run a case in a child that dies at this git command; None if it died, else how often it starts git.

    Another git may outlive the child for a moment. It holds the child's locks, so it is waited for.
    """
    with orphans_are_ours():
        status = end_of_group(_start_dying(case, directory, number, after=after), kill=False)
    assert status in (0, 9), f"it failed with {status}"
    return None if status == 9 else number


def _start_dying(case: Scenario, directory: Path, number: int, *, after: bool) -> int:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        dying = DiesAtGit(number, after=after)
        program._output = dying  # type: ignore[assignment]
        try:
            case.operate(directory)
        except BaseException:
            os._exit(8)
        os._exit(0)
    return child


def kill_at_git_commands(case: Callable[[], Scenario], scratch: Path) -> int:
    """Kill a case before and after each of its git commands in turn, and check it; return how many it has."""
    for point in sweep(stride=16):
        number, after = divmod(point + 1, 2)
        directory = scratch / str(point)
        directory.mkdir()
        case().prepare(directory)
        ended = killed_at_git(case(), directory, number, after=bool(after))
        case().check(directory, Outcome(Ending.SUCCEEDED if ended else Ending.KILLED, acknowledged=bool(ended)))
        shutil.rmtree(directory)
        if ended is not None:
            return ended
    raise AssertionError("a sweep has an end")
