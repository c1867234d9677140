"""`--isolated` on the command line, in a real checkout: an agent whose commits write in its own directory only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import data, error, holdfast
from tests.support.homes import git

if sys.platform == "win32":
    pytest.skip("needs a POSIX shell", allow_module_level=True)

COMMIT = "echo work > work; git add work; git -c user.name=a -c user.email=a@b commit -qm work; echo more > more"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    git("init", "-q", "-b", "trunk", top)
    (top / "README").write_text("read me\n")
    git("add", "-A", at=top)
    git("commit", "-qm", "first", at=top)
    assert holdfast("init", cwd=top).returncode == 0
    assert holdfast("issue", "init", cwd=top).returncode == 0
    return top


def test_an_isolated_agent_works_from_its_issue_to_its_branch(project: Path) -> None:
    issue = str(data(holdfast("issue", "create", "Work", "--json", cwd=project))["id"])
    done = holdfast("agent", "run", "--next", "--isolated", "--json", "--", "sh", "-c", COMMIT, cwd=project)
    assert done.returncode == 0, done.stderr
    name = f"issue-{issue[:8]}"
    top = project.with_name("project.worktrees") / name

    assert (top / ".git").is_dir()
    assert git("log", "-1", "--format=%s", f"hf/{name}", at=project) == "work"
    shown = holdfast("worktree", "show", cwd=top)
    assert f"hf/{name}, isolated" in shown.stdout
    assert json.loads(holdfast("status", "--json", cwd=top).stdout)["data"]["changes"] == []
    assert holdfast("guard", top / "x", cwd=top).returncode == 0
    one = {"HOLDFAST_ACTOR": "agent:one"}
    held = data(holdfast("lease", "acquire", "--worktree", name, "--json", cwd=project, env=one))
    assert holdfast("guard", top / "x", cwd=top, env={"HOLDFAST_ACTOR": "agent:two"}).returncode == 4
    assert holdfast("guard", project / "x", cwd=top, env={"HOLDFAST_ACTOR": "agent:two"}).returncode == 0
    release = ("lease", "release", "--worktree", name, "--lock-id", str(held["lock_id"]))
    assert holdfast(*release, cwd=project, env=one).returncode == 0
    removed = holdfast("worktree", "remove", name, cwd=project)
    assert removed.returncode == 0, removed.stderr
    assert not top.exists()
    assert git("log", "-1", "--format=%s", f"hf/{name}", at=project) == "work"
    assert holdfast("doctor", "--strict", cwd=project).returncode == 0


def test_isolation_needs_a_git_checkout(tmp_path: Path) -> None:
    assert holdfast("init", tmp_path / "plain").returncode == 0
    refused = error(holdfast("worktree", "create", "dev", "--isolated", "--json", cwd=tmp_path / "plain"))
    assert (refused["code"], refused["hint"]) == ("E_REFUSED", "Leave out --isolated.")
