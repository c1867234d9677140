"""Worktrees and branches change through git, and git's list is read as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, GitFailed, NotFound, Refused
from holdfast.git import worktrees
from holdfast.git.checkout import find_checkout, is_worktree_of, main_checkout, name_in
from holdfast.git.program import Git
from tests.git.conftest import commit_all, git, new_repository, write


@pytest.fixture
def ours(checkout: Path) -> Git:
    return Git(checkout / ".git")


@pytest.fixture
def linked(checkout: Path, ours: Git) -> Path:
    path = checkout.parent / "linked\nworktree"
    worktrees.add(ours, path, "hf/linked", "trunk", new_branch=True)
    return path


def git_dir(path: Path) -> str:
    found = find_checkout(str(path))
    assert found is not None
    return found.git_dir


def test_the_list_has_every_worktree_with_its_state(checkout: Path, ours: Git, linked: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    gone = checkout.parent / "gone"
    worktrees.add(ours, gone, "gone", "trunk", new_branch=True)
    shutil.rmtree(gone)
    detached = checkout.parent / "detached"
    git(checkout, "worktree", "add", "-q", "--detach", str(detached))
    git(checkout, "worktree", "lock", "--reason", "on a stick", str(detached))

    main, *others = worktrees.registered(ours)
    by_path = {each.path: each for each in others}

    assert main == worktrees.Registered(None, checkout, head, "trunk", None, None)
    assert by_path[linked][2:] == (head, "hf/linked", None, None)
    assert (ours.common / "worktrees" / (by_path[linked].git_id or "") / "gitdir").exists()
    assert by_path[detached] == worktrees.Registered("detached", detached, head, None, "on a stick", None)
    assert by_path[gone].prunable is not None


def test_a_worktree_before_the_first_commit_has_no_head(tmp_path: Path) -> None:
    top = new_repository(tmp_path / "new")

    assert worktrees.registered(Git(top / ".git")) == [worktrees.Registered(None, top, None, "trunk", None, None)]
    assert worktrees.head_commit(Git(top / ".git"), top) is None
    assert worktrees.current_branch(Git(top / ".git"), top) == "trunk"


def test_a_bare_repository_lists_only_its_worktrees(checkout: Path) -> None:
    bare = checkout.parent / "bare.git"
    git(checkout, "clone", "-q", "--bare", str(checkout), str(bare))
    ours = Git(bare)
    worktrees.add(ours, bare.parent / "w", "w", "trunk", new_branch=True)

    assert [each.path.name for each in worktrees.registered(ours)] == ["w"]


def test_a_worktree_moves_and_goes_with_its_name(checkout: Path, ours: Git, linked: Path) -> None:
    worktrees.set_name(ours, linked, "agent-1")
    moved = checkout.parent / "moved"

    worktrees.move(ours, linked, moved)
    assert name_in(git_dir(moved)) == "agent-1"
    was = git_dir(moved)
    write(moved / "untracked", "x")
    worktrees.remove(ours, moved)
    assert not moved.exists()
    assert not Path(was).exists()


def test_a_name_is_written_only_for_a_linked_worktree_of_this_repository(checkout: Path, ours: Git) -> None:
    other = new_repository(checkout.parent / "other")

    for path in (checkout, other, checkout / "sub"):
        with pytest.raises(Refused):
            worktrees.set_name(ours, path, "agent-1")
    assert not (other / ".git/holdfast").exists()


def test_a_worktree_that_was_moved_behind_git_s_back_is_repaired(checkout: Path, ours: Git, linked: Path) -> None:
    moved = checkout.parent / "moved"
    linked.rename(moved)
    assert is_worktree_of(str(moved), str(ours.common)) is None

    [git_dir] = (ours.common / "worktrees").iterdir()
    worktrees.register_moved(git_dir, moved)

    assert is_worktree_of(str(moved), str(ours.common))


def test_an_existing_directory_is_not_overwritten(checkout: Path, ours: Git) -> None:
    write(checkout.parent / "there/file", "x")

    with pytest.raises(GitFailed, match="already exists"):
        worktrees.add(ours, checkout.parent / "there", "there", "trunk", new_branch=True)


def test_a_separate_git_directory_is_told_where_its_checkout_is(tmp_path: Path) -> None:
    top = new_repository(tmp_path / "top", "--separate-git-dir", str(tmp_path / "separate"))
    ours = Git(tmp_path / "separate")

    with pytest.raises(Refused):
        worktrees.set_main_checkout(ours, tmp_path)
    worktrees.set_main_checkout(ours, top)

    assert main_checkout(str(tmp_path / "separate")) == str(top)
    assert worktrees.current_branch(ours, top) == "trunk"


def test_a_branch_is_deleted_only_if_the_target_contains_it(checkout: Path, ours: Git, linked: Path) -> None:
    write(linked / "new", "x")
    commit_all(linked)
    git(checkout, "branch", "merged")

    assert not worktrees.delete_branch_if_contained(ours, "hf/linked", "trunk")
    assert worktrees.delete_branch_if_contained(ours, "merged", "trunk")
    assert not worktrees.branch_exists(ours, "merged")
    with pytest.raises(Refused, match="checked out"):
        worktrees.delete_branch_if_contained(ours, "hf/linked", "hf/linked")
    with pytest.raises(NotFound):
        worktrees.delete_branch_if_contained(ours, "missing", "trunk")


def test_a_branch_is_renamed_but_never_onto_another(checkout: Path, ours: Git, linked: Path) -> None:
    write(linked / "new", "x")
    commit_all(linked)
    commit, log = git(linked, "rev-parse", "HEAD"), git(linked, "reflog", "show", "--format=%H", "hf/linked")
    git(checkout, "config", "branch.hf/linked.remote", "origin")
    worktrees.rename_branch(ours, linked, "hf/linked", "hf/renamed")
    assert worktrees.current_branch(ours, linked) == "hf/renamed"
    assert git(linked, "rev-parse", "HEAD") == commit
    assert git(linked, "reflog", "show", "--format=%H", "hf/renamed").endswith(log)
    assert git(checkout, "config", "branch.hf/renamed.remote") == "origin"
    assert not worktrees.branch_exists(ours, "hf/linked")
    with pytest.raises(AlreadyExists):
        worktrees.rename_branch(ours, linked, "hf/renamed", "trunk")


def test_a_lock_that_a_killed_git_has_left_is_removed_but_not_one_in_use(
    ours: Git, linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ours.common / "refs/heads/hf/linked.lock"
    lock.touch()
    pauses: list[float] = []
    monkeypatch.setattr("holdfast.git.worktrees.time.sleep", pauses.append)
    worktrees.unlock(ours, "refs/heads/hf/linked", "refs/heads/none")
    assert not lock.exists()
    assert sum(pauses) > 1

    def used_by_another(_: float) -> None:
        lock.unlink()
        lock.touch()
        os.utime(lock, ns=(1, 1))

    lock.touch()
    monkeypatch.setattr("holdfast.git.worktrees.time.sleep", used_by_another)
    worktrees.unlock(ours, "refs/heads/hf/linked")
    assert lock.exists()


def test_a_revision_that_looks_like_an_option_is_only_a_revision(ours: Git) -> None:
    for revision in ("--all", "-x", "missing", "trunk:one"):
        with pytest.raises(NotFound):
            worktrees.commit_of(ours, revision)


def test_an_operation_under_way_is_told(checkout: Path, ours: Git, linked: Path) -> None:
    write(linked / "one", "theirs\n")
    commit_all(linked)
    write(checkout / "one", "mine\n")
    commit_all(checkout)
    assert worktrees.is_busy(ours, checkout) is None

    git(checkout, "merge", "hf/linked", check=False)

    assert worktrees.is_busy(ours, checkout) == "a merge"
    assert worktrees.is_busy(ours, linked) is None
