"""Assignments in a git checkout: where work starts, what is left of earlier attempts, and how it lands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.issues.model import State
from holdfast.repository.agent import AssignmentOptions, take_work
from holdfast.repository.repository import Repository
from tests.repository.landings import Project
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="git homes are tested on POSIX")


@pytest.fixture
def project(scratch: Path) -> Project:
    return Project(scratch)


def commit(path: Path, name: str, text: str = "work\n") -> str:
    (path / name).write_text(text)
    git("add", "-A", at=path)
    git("commit", "-qm", f"change {name}", at=path)
    return git("rev-parse", "HEAD", at=path)


# --- What is left of earlier attempts ------------------------------------------------------------------


def removed(repository: Repository, name: str, path: Path) -> None:
    repository.remove_worktree(name)


def removed_with_git(repository: Repository, name: str, path: Path) -> None:
    git("worktree", "remove", "--force", path, at=repository.path())


def pruned(repository: Repository, name: str, path: Path) -> None:
    deleted(repository, name, path)
    git("worktree", "prune", at=repository.path())


def deleted(repository: Repository, name: str, path: Path) -> None:
    shutil.rmtree(path)


LOSSES = [*((lose, False) for lose in (removed, removed_with_git, pruned, deleted)), (removed, True), (deleted, True)]


@pytest.mark.parametrize(("lose", "isolated"), LOSSES)
def test_an_attempt_continues_on_the_branch_of_a_worktree_that_is_gone(
    project: Project, lose: Callable[[Repository, str, Path], None], *, isolated: bool
) -> None:
    issue, repository = project.issue("do it"), Repository(project.top)
    tracker = project.landings().changes.tracker
    options = AssignmentOptions(assignee="agent:one", isolated=isolated)
    with take_work(repository, tracker, options) as assignment:
        name = assignment.lease.worktree
        made = commit(assignment.path, "work")
        (assignment.path / "unsaved").write_text("more\n")
        saved = assignment.fail("not finished").snapshot_id

    lose(repository, name, assignment.path)

    with take_work(repository, tracker, options) as assignment:
        assert assignment.lease.worktree == name
        assert git("rev-parse", "HEAD", at=assignment.path) == made
        assignment.succeed()
    assert tracker.issue(issue).state is State.DONE
    assert saved in [each.snapshot_id for each in repository.snapshots.pins()]
    assert [str(each) for each in repository.examine(strict=True)] == []


def test_a_worktree_whose_directory_is_gone_can_be_removed(project: Project) -> None:
    repository = Repository(project.top)
    repository.worktrees.create("dev")
    commit(repository.path("dev"), "work")
    shutil.rmtree(repository.path("dev"))

    repository.remove_worktree("dev")

    assert git("branch", "--list", "hf/dev", at=project.top)
    assert [str(each) for each in repository.examine(strict=True)] == []
