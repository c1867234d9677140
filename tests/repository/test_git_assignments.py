"""Assignments in a git checkout: where work starts, what is left of earlier attempts, and how it lands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import init_ledger
from holdfast.errors import GitFailed, LandingConflict, Refused
from holdfast.git import look
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import State
from holdfast.issues.prompt import Ending
from holdfast.repository import agent
from holdfast.repository.agent import AssignmentOptions, take_work
from holdfast.repository.context import MAIN, Proof
from holdfast.repository.landing import LandOptions, require_landed
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, ENFORCE_TOUCHES, PUSH, change
from holdfast.store.approvals import revoke
from tests.cli.commands import holdfast
from tests.repository.landings import Project
from tests.repository.stages import files_stored
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="git homes are tested on POSIX")


@pytest.fixture
def project(scratch: Path) -> Project:
    return Project(scratch)


@pytest.fixture
def remote(project: Project, scratch: Path) -> Path:
    place = scratch / "remote"
    git("init", "-q", "--bare", "-b", "trunk", place)
    git("remote", "add", "origin", place, at=project.top)
    git("push", "-q", "origin", "trunk", at=project.top)
    return place


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


# --- Where work starts ---------------------------------------------------------------------------------


def test_work_starts_from_the_branch_that_it_lands_on(project: Project) -> None:
    issue, landings = project.issue("do it"), project.landings()
    tip = project.commit({"new": "on the other branch\n"})
    git("branch", "integration", tip, at=project.top)
    how = LandOptions(branch="integration")
    options = AssignmentOptions(issue_id=issue, assignee="agent:one", landing=how)

    with take_work(Repository(project.top), landings.changes.tracker, options) as assignment:
        assert git("rev-parse", "HEAD", at=assignment.path) == tip
        commit(assignment.path, "work")
        assert assignment.land(landings, how).succeeded

    assert set(git("ls-tree", "--name-only", "integration", at=project.top).split()) == {"new", "src", "work"}


def test_an_agent_does_not_begin_if_the_branch_to_land_on_does_not_exist(project: Project) -> None:
    issue = project.issue("do it")
    done = holdfast("agent", "run", "--issue", issue, "--land", "--into", "none", "--", "touch", "x", cwd=project.top)
    assert "there is no branch none" in done.stderr
    assert not (project.top.parent / "project.worktrees").exists()


@pytest.mark.parametrize("by_agent", [False, True])
def test_work_that_lands_on_a_remote_starts_from_its_branch_there(
    project: Project, remote: Path, *, by_agent: bool
) -> None:
    project.issue("do it")
    repository = Repository(project.top)
    change(repository.root, PUSH, ["origin"])
    pushed = project.commit({"pushed": "by somebody\n"})
    git("push", "-q", remote, f"{pushed}:refs/heads/trunk", at=project.top)

    if by_agent:
        with take_work(repository, project.landings().changes.tracker, AssignmentOptions()) as assignment:
            assert git("rev-parse", "HEAD", at=assignment.path) == pushed
    else:
        repository.worktrees.create("dev")
        assert git("rev-parse", "HEAD", at=repository.path("dev")) == pushed

    remote.rename(remote.with_name("away"))
    with pytest.raises(GitFailed) as failed:
        repository.worktrees.create("other")
    assert "--from COMMIT" in failed.value.hint
    repository.worktrees.create("other", snapshot="HEAD")


def test_the_scope_of_work_and_a_dry_run_look_at_the_branch_of_the_remote(project: Project, remote: Path) -> None:
    """The branch `rel` exists only there, and the local trunk is behind."""
    tracker = project.landings().changes.tracker
    issue = tracker.create(NewIssue(title="do it", touches=("src/**",)))
    repository = Repository(project.top)
    change(repository.root, ENFORCE_TOUCHES, ["true"])
    pushed = project.commit({"elsewhere": "by somebody\n", "src/f0": "somebody\n"})
    git("push", "-q", remote, f"{pushed}:refs/heads/rel", f"{pushed}:refs/heads/trunk", at=project.top)
    repository.worktrees.create("dev", snapshot=pushed)
    commit(repository.path("dev"), "src/f1")
    repository.worktrees.create("old")
    commit(repository.path("old"), "src/f0", "the agent\n")

    landings = project.landings()
    for branch in ("rel", "trunk"):
        how = LandOptions(branch=branch, remote="origin", issue_id=issue.id)
        assert landings.preview("dev", how).conflicts == ()
        assert landings.preview("old", how).conflicts == ("src/f0",)
    with repository.lease("dev") as lease:
        entry = landings.enqueue("dev", Proof.of(lease), how)
    assert require_landed(landings.wait(entry.landing_id)).landed_as == git("rev-parse", "trunk", at=remote)


def test_uncommitted_changes_that_a_new_worktree_lacks_are_told(project: Project) -> None:
    issue = project.issue("do it")
    project.write("src/f0", "uncommitted\n")
    text = "main has uncommitted changes, which are not in"
    for expected, command in ((True, "exit 1"), (False, "echo work > work")):
        done = holdfast("agent", "run", "--issue", issue, "--", "sh", "-c", command, cwd=project.top)
        assert (f"{text} issue-{issue[:8]}: src/f0" in done.stderr) is expected, done.stderr
    (Repository(project.top).path(f"issue-{issue[:8]}") / "more").touch()
    done = holdfast("worktree", "create", "dev", "--from", f"issue-{issue[:8]}", cwd=project.top)
    assert f"issue-{issue[:8]} has uncommitted changes, which are not in dev: more, work" in done.stderr


def test_an_agent_starts_although_something_keeps_writing_to_the_worktree(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.issue("do it")
    repository = Repository(project.top)
    monkeypatch.setattr(agent, "CAPTURE_PAUSE", 0.0)
    project.write("src/f0", "left unsaved\n")
    real = look.WorkTree.look

    def written(tree: look.WorkTree, *, keep: bool = False) -> look.Look:
        project.write("src/f1", f"{time.monotonic_ns()}\n")
        return real(tree, keep=keep)

    with monkeypatch.context() as patch:
        patch.setattr(look.WorkTree, "look", written)
        options = AssignmentOptions(worktree=MAIN)
        with take_work(repository, project.landings().changes.tracker, options) as assignment:
            head = repository.config().head_snapshot_id
            assignment.put_back("enough")
    assert head is not None
    assert files_stored(repository.context, head)["src/f0"] == "left unsaved\n"


# --- Conflicts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_remote", [False, True])
@pytest.mark.parametrize("isolated", [False, True])
def test_the_text_about_a_conflict_can_be_followed(
    project: Project, remote: Path, *, isolated: bool, on_remote: bool
) -> None:
    issue, repository, landings = project.issue("do it"), Repository(project.top), project.landings()
    options = AssignmentOptions(assignee="agent:one", isolated=isolated)
    how = LandOptions(remote="origin" if on_remote else None)
    with take_work(repository, landings.changes.tracker, options) as assignment:
        commit(assignment.path, "src/f0", "the agent\n")
        others = project.commit({"src/f0": "somebody else\n"})
        git("push", "-q", remote, f"{others}:refs/heads/trunk", at=project.top)
        if not on_remote:
            git("fetch", "-q", remote, "trunk", at=project.top)
            git("merge", "-q", "--ff-only", others, at=project.top)
        assert assignment.land(landings, how).succeeded is False

    with pytest.raises(LandingConflict) as refused:
        require_landed(landings.all()[0])
    with take_work(repository, landings.changes.tracker, options) as assignment:
        [command] = set(re.findall(r"'(git merge [0-9a-f]+)'", assignment.prompt(Ending.LANDING)))
        assert f"'{command}'" in refused.value.hint
        assert ("'git fetch origin trunk'" in refused.value.hint) is on_remote
        subprocess.run(command.split(), cwd=assignment.path, capture_output=True, check=False)
        commit(assignment.path, "src/f0", "both\n")
        assert assignment.land(landings, how).succeeded is True
    assert landings.changes.tracker.issue(issue).state is State.DONE
    assert git("show", "trunk:src/f0", at=remote if on_remote else project.top) == "both"


def test_work_that_cannot_be_queued_goes_back_with_the_reason(project: Project) -> None:
    issue, repository, landings = project.issue("do it"), Repository(project.top), project.landings()
    tracker = landings.changes.tracker
    ledger = init_ledger(project.top.parent / "ledger").ledger
    options = AssignmentOptions(assignee="agent:one", isolated=True)
    with take_work(repository, tracker, options, ledger=ledger) as assignment:
        assert "Commit all of your work first" in assignment.prompt(Ending.LANDING)
        (assignment.path / "work").write_text("uncommitted\n")
        with pytest.raises(Refused, match="has uncommitted changes: work"):
            assignment.land(landings, LandOptions())
    assert tracker.issue(issue).state is State.READY
    assert [each.event["type"] for each in ledger.events()] == ["work_failed"]

    with take_work(repository, tracker, options, ledger=ledger) as assignment:
        assert "> the work could not be queued to land: " in assignment.prompt(Ending.LANDING)
        git("add", "-A", at=assignment.path)
        git("commit", "-qm", "work", at=assignment.path)
        assert assignment.land(landings, LandOptions()).succeeded
    assert (project.top / "work").exists()


def test_work_whose_checks_are_not_approved_stays_queued(project: Project) -> None:
    issue, repository, landings = project.issue("do it"), Repository(project.top), project.landings()
    change(repository.root, CHECKS, ["true"])
    revoke(repository.root)
    with take_work(repository, landings.changes.tracker, AssignmentOptions(issue_id=issue)) as assignment:
        commit(assignment.path, "work")
        outcome = assignment.land(landings, LandOptions())
    assert outcome.succeeded
    (entry,) = landings.queued()
    assert "approved" in landings.waits_for(entry)


def test_a_worktree_whose_directory_is_gone_can_be_removed(project: Project) -> None:
    repository = Repository(project.top)
    repository.worktrees.create("dev")
    commit(repository.path("dev"), "work")
    shutil.rmtree(repository.path("dev"))

    repository.remove_worktree("dev")

    assert git("branch", "--list", "hf/dev", at=project.top)
    assert [str(each) for each in repository.examine(strict=True)] == []
