"""Checkouts are found as git finds them, without starting it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.git.checkout import Checkout, find_checkout, is_worktree_of, main_checkout, name_in
from tests.git.conftest import commit_all, git, new_repository, write


def as_git_says(directory: Path) -> Checkout:
    said = git(directory, "rev-parse", "--show-toplevel", "--absolute-git-dir", "--git-common-dir").split("\n")
    top, git_dir, common = said
    return Checkout(top, git_dir, os.path.realpath(directory / common))


def found(start: Path) -> Checkout:
    checkout = find_checkout(str(start))
    assert checkout is not None
    return checkout


def test_a_checkout_is_found_from_its_directory_and_from_below(checkout: Path) -> None:
    for start in (checkout, checkout / "sub"):
        assert found(start) == as_git_says(start)
    assert found(checkout / "sub/not/there") == as_git_says(checkout)


def test_a_linked_worktree_has_a_git_directory_of_its_own(checkout: Path) -> None:
    linked = checkout.parent / "linked"
    git(checkout, "worktree", "add", "-q", "-b", "b", str(linked))

    assert found(linked / "sub") == as_git_says(linked)
    assert found(linked).common == str(checkout / ".git")
    assert is_worktree_of(str(linked), str(checkout / ".git")) == found(linked)
    assert is_worktree_of(str(checkout), str(checkout / ".git")) == found(checkout)


def test_a_submodule_is_a_checkout_of_its_own_repository(checkout: Path) -> None:
    inner = new_repository(checkout.parent / "inner")
    commit_all(inner)
    git(checkout, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "inner")
    there = checkout / "inner"

    assert found(there) == as_git_says(there)
    assert main_checkout(found(there).common) == str(there)
    assert is_worktree_of(str(there), found(there).common) == found(there)
    assert is_worktree_of(str(there), str(checkout / ".git")) is None


def test_a_separate_git_directory_leads_back_to_its_checkout(tmp_path: Path) -> None:
    separate = tmp_path / "a #git; dir"
    top = new_repository(tmp_path / "top", "--separate-git-dir", str(separate))
    commit_all(top)

    assert found(top) == as_git_says(top)
    assert main_checkout(str(separate)) is None  # git does not know where it is
    write(separate / "holdfast/checkout", f"{top}\n")
    assert main_checkout(str(separate)) == str(top)
    assert is_worktree_of(str(top), str(separate))


def test_a_configured_work_tree_is_the_checkout(tmp_path: Path) -> None:
    separate = tmp_path / 'a "#git; \\dir'
    top = new_repository(tmp_path / 'a "top; \\#1')
    (top / ".git").rename(separate)
    git(tmp_path, "--git-dir", str(separate), "config", "core.worktree", str(top))

    assert main_checkout(str(separate)) is None  # any directory could be named
    write(top / ".git", f"gitdir: {separate}\n")
    assert main_checkout(str(separate)) == str(top)


def test_a_bare_repository_has_no_main_checkout_but_worktrees(checkout: Path) -> None:
    bare = checkout.parent / "bare.git"
    git(checkout, "clone", "-q", "--bare", str(checkout), str(bare))
    linked = bare.parent / "linked"
    git(bare, "worktree", "add", "-q", "-b", "b", str(linked))

    assert found(bare / "refs") == Checkout(None, str(bare), str(bare))
    assert main_checkout(str(bare)) is None
    assert found(linked) == as_git_says(linked)
    assert is_worktree_of(str(linked), str(bare))


def test_a_bare_repository_in_a_directory_named_dot_git(checkout: Path) -> None:
    project = checkout.parent / "project"
    git(checkout, "clone", "-q", "--bare", str(checkout), str(project / ".git"))
    git(project, "worktree", "add", "-q", "-b", "b", str(project / "b"))

    assert main_checkout(str(project / ".git")) is None
    assert found(project / "b").top == str(project / "b")


def test_worktree_configuration_says_that_the_main_one_is_bare(checkout: Path) -> None:
    git(checkout, "config", "extensions.worktreeConfig", "true")
    git(checkout, "config", "--unset", "core.bare")
    git(checkout, "config", "--worktree", "core.bare", "true")

    assert main_checkout(str(checkout / ".git")) is None


def test_the_variable_names_the_git_directory(checkout: Path) -> None:
    linked = checkout.parent / "linked"
    git(checkout, "worktree", "add", "-q", "-b", "b", str(linked))

    assert find_checkout(str(checkout), ".git") == as_git_says(checkout)
    assert find_checkout("/", str(checkout / ".git/worktrees/linked")) == as_git_says(linked)
    assert find_checkout("/", str(linked / ".git")) == as_git_says(linked)
    assert find_checkout(str(checkout), "missing") is None


@pytest.mark.parametrize("content", ["", "nonsense\n", "gitdir: /missing\n", "gitdir: a\0b\n"])
def test_a_file_that_leads_nowhere_is_no_checkout(tmp_path: Path, content: str) -> None:
    write(tmp_path / "x/.git", content)

    assert find_checkout(str(tmp_path / "x")) is None


def test_a_directory_that_only_looks_like_one_is_passed_over(checkout: Path) -> None:
    (checkout / "sub/.git").mkdir()

    assert found(checkout / "sub").top == str(checkout)


def test_a_link_leads_to_the_real_place(checkout: Path) -> None:
    link = checkout.parent / "link"
    link.symlink_to(checkout)

    assert found(link / "sub") == as_git_says(checkout)
    assert is_worktree_of(str(link), str(checkout / ".git")) is None


def test_a_directory_that_git_does_not_list_is_not_a_worktree(checkout: Path) -> None:
    linked, copy = checkout.parent / "linked", checkout.parent / "copy"
    git(checkout, "worktree", "add", "-q", "-b", "b", str(linked))
    write(copy / ".git", (linked / ".git").read_text())

    assert is_worktree_of(str(copy), str(checkout / ".git")) is None
    write(copy / ".git", f"gitdir: {checkout / '.git'}\n")
    assert is_worktree_of(str(copy), str(checkout / ".git")) is None
    git_dir = Path(found(linked).git_dir)
    (git_dir / "gitdir").unlink()
    assert is_worktree_of(str(linked), str(checkout / ".git")) is None


def test_a_name_is_read_from_git_s_own_directory(checkout: Path) -> None:
    (checkout / ".git/holdfast").mkdir(exist_ok=True)
    assert name_in(str(checkout / ".git")) is None
    write(checkout / ".git/worktrees/x/holdfast", "agent-1\n")
    assert name_in(str(checkout / ".git/worktrees/x")) == "agent-1"
    write(checkout / ".git/worktrees/x/holdfast", b"\xff\n")
    assert name_in(str(checkout / ".git/worktrees/x")) is None


def test_finding_a_checkout_loads_neither_git_nor_heavy_modules(checkout: Path) -> None:
    code = f"""
import sys
before = set(sys.modules)
from holdfast.git.checkout import find_checkout
assert find_checkout({str(checkout)!r}).top == {str(checkout)!r}
print(*sorted(each for each in set(sys.modules) - before if not each.startswith("holdfast")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not {"subprocess", "typing", "pathlib", "re"} & set(done.stdout.split())
