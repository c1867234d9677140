"""`holdfast setup` in real projects: its files work, and undoing it leaves no trace."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

from holdfast.errors import Refused
from holdfast.setup.edits import apply
from holdfast.setup.plan import edits
from holdfast.setup.targets import Target

PROGRAMS = [Target.CLAUDE, Target.CODEX, Target.CURSOR, Target.GIT]


def set_up(project: Path, target: Target) -> None:
    apply(project, edits(project, target, remove=False))


def undo(project: Path, target: Target) -> None:
    apply(project, edits(project, target, remove=True))


def everything(project: Path) -> dict[str, tuple[bytes, int]]:
    """All files of a project with their content and mode."""
    return {
        str(path.relative_to(project)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in sorted(project.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git project with configuration of its own."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "AGENTS.md").write_text("# Rules\n\nBe kind.")
    os.symlink("AGENTS.md", tmp_path / "CLAUDE.md")
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude/settings.json").write_text(
        '{"permissions": {"allow": ["Bash(ls)"]},\n    "hooks": {"PreToolUse": '
        '[{"matcher": "Bash", "hooks": [{"type": "command", "command": "mine"}]}]}}'
    )
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text('model = "m"\n[mcp_servers.mine]\ncommand = "x"\n')
    hook = tmp_path / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho theirs >> hook.log\nexit 0\n")
    hook.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize("target", PROGRAMS)
def test_setting_up_and_undoing_leaves_every_byte_and_mode_as_it_was(project: Path, target: Target) -> None:
    before = everything(project)

    set_up(project, target)
    assert everything(project) != before
    undo(project, target)

    assert everything(project) == before
    assert (project / "CLAUDE.md").is_symlink()


@pytest.mark.parametrize("target", PROGRAMS)
def test_setting_up_twice_changes_nothing_the_second_time(project: Path, target: Target) -> None:
    set_up(project, target)

    assert edits(project, target, remove=False) == []


@pytest.mark.parametrize("target", PROGRAMS[:3])
def test_an_empty_project_is_empty_again_afterwards(tmp_path: Path, target: Target) -> None:
    set_up(tmp_path, target)
    assert (tmp_path / "AGENTS.md").exists()
    undo(tmp_path, target)

    assert list(tmp_path.iterdir()) == []


def test_shared_files_stay_until_the_last_program_that_uses_them_is_undone(project: Path) -> None:
    before = everything(project)
    for target in PROGRAMS[:3]:
        set_up(project, target)

    undo(project, Target.CLAUDE)
    assert b"holdfast:begin" in (project / "AGENTS.md").read_bytes()
    undo(project, Target.CODEX)
    undo(project, Target.CURSOR)

    assert everything(project) == before


def test_the_files_have_the_format_that_the_programs_read(project: Path) -> None:
    for target in PROGRAMS[:3]:
        set_up(project, target)

    claude = json.loads((project / ".claude/settings.json").read_text())["hooks"]
    assert claude["PreToolUse"][0]["hooks"][0]["command"] == "mine"
    assert claude["PreToolUse"][1]["hooks"][0]["command"] == "holdfast hook before-write --from claude@3"
    assert set(claude) == {"SessionStart", "PreToolUse", "PostToolUse", "SessionEnd"}
    assert json.loads((project / ".mcp.json").read_text())["mcpServers"]["holdfast"]["args"] == ["mcp"]
    codex = tomllib.loads((project / ".codex/config.toml").read_text())
    assert codex["mcp_servers"]["holdfast"] == {"command": "holdfast", "args": ["mcp"]}
    assert codex["mcp_servers"]["mine"] == {"command": "x"}
    cursor = json.loads((project / ".cursor/hooks.json").read_text())
    assert cursor["version"] == 1
    assert cursor["hooks"]["preToolUse"][0]["command"].startswith("holdfast hook before-write")


def test_nothing_is_changed_if_one_file_cannot_be_edited(project: Path) -> None:
    (project / ".claude/settings.json").write_text("{ // with a comment\n}")
    before = everything(project)

    with pytest.raises(Refused):
        set_up(project, Target.CLAUDE)

    assert everything(project) == before


def test_undoing_ignores_the_files_of_other_programs(project: Path) -> None:
    """Claude Code accepts comments, which are not JSON; that must not affect Codex."""
    before = everything(project)
    settings = project / ".claude/settings.json"
    set_up(project, Target.CODEX)
    settings.write_text('{ // mine\n "hooks": {},}')
    undo(project, Target.CODEX)
    after = everything(project)
    assert {name: after[name] for name in after if name != ".claude/settings.json"} == {
        name: before[name] for name in before if name != ".claude/settings.json"
    }


def test_a_link_out_of_the_project_is_not_followed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "AGENTS.md"
    outside.write_text("theirs")
    (project / "AGENTS.md").unlink()
    (project / "AGENTS.md").symlink_to(outside)

    with pytest.raises(Refused, match="leads out of the project"):
        set_up(project, Target.CODEX)

    assert outside.read_text() == "theirs"


@pytest.mark.parametrize("target", [Target.CLAUDE, Target.CODEX, Target.CURSOR])
def test_a_linked_directory_is_followed_inside_the_project_only(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, target: Target
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    linked = tmp_path / f".{target}"
    linked.symlink_to(outside)
    with pytest.raises(Refused, match="leads out of the project"):
        set_up(tmp_path, target)
    assert everything(outside) == {}
    assert not (tmp_path / "AGENTS.md").exists()

    linked.unlink()
    (tmp_path / "kept").mkdir()
    linked.symlink_to("kept")
    set_up(tmp_path, target)
    assert everything(tmp_path / "kept")
    undo(tmp_path, target)
    assert everything(tmp_path / "kept") == {}


# --- Git ---------------------------------------------------------------------------------------------


def commit(project: Path, guard_status: int) -> subprocess.CompletedProcess[str]:
    """Commit with a stub `holdfast` on the PATH that plays the guard and exits with this status."""
    programs = project / ".programs"
    programs.mkdir(exist_ok=True)
    stub = programs / "holdfast"
    stub.write_text(f'#!/bin/sh\necho "guard $*" >> hook.log\nexit {guard_status}\n')
    stub.chmod(0o755)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"],
        cwd=project,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


SCRIPTS = {
    "a shell script": "#!/bin/sh\necho theirs >> hook.log\nexit 0\n",
    "one without a last line break": "#!/usr/bin/env bash\necho theirs >> hook.log",
    "another language": "#!/usr/bin/env python3\nopen('hook.log', 'a').write('theirs\\n')\n",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_git_runs_the_guard_and_then_the_existing_hook(project: Path, script: str) -> None:
    hook = project / ".git/hooks/pre-commit"
    hook.write_text(script)
    before = everything(project)
    set_up(project, Target.GIT)

    refused = commit(project, guard_status=4)
    assert refused.returncode != 0
    assert (project / "hook.log").read_text() == "guard hook pre-commit\n"
    allowed = commit(project, guard_status=0)
    assert allowed.returncode == 0, allowed.stderr
    assert (project / "hook.log").read_text() == "guard hook pre-commit\n" * 2 + "theirs\n"

    undo(project, Target.GIT)
    assert everything(project).items() >= {k: v for k, v in before.items() if "hooks/" in k}.items()
    assert not (project / ".git/hooks/pre-commit.before-holdfast").exists()


def test_git_without_a_hook_gets_one_that_undoing_removes(project: Path) -> None:
    hook = project / ".git/hooks/pre-commit"
    hook.unlink()
    set_up(project, Target.GIT)

    assert commit(project, guard_status=4).returncode != 0
    assert commit(project, guard_status=0).returncode == 0
    undo(project, Target.GIT)

    assert not hook.exists()


def test_a_disabled_hook_stays_disabled(project: Path) -> None:
    (project / ".git/hooks/pre-commit").chmod(0o600)
    set_up(project, Target.GIT)

    assert commit(project, guard_status=0).returncode == 0

    assert (project / "hook.log").read_text() == "guard hook pre-commit\n"


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", directory, *identity, *arguments], check=True, capture_output=True)


def test_the_hooks_of_a_linked_worktree_of_git_are_those_of_its_repository(project: Path, tmp_path: Path) -> None:
    (project / ".git/hooks/pre-commit").unlink()
    git(project, "commit", "--allow-empty", "-m", "x")
    linked = tmp_path.parent / f"{tmp_path.name}-linked"
    git(project, "worktree", "add", str(linked))

    set_up(linked, Target.GIT)

    assert (project / ".git/hooks/pre-commit").exists()


def test_git_merges_the_files_of_a_tracker_with_the_driver_until_it_is_undone(project: Path, tmp_path: Path) -> None:
    git(project, "commit", "--allow-empty", "-m", "x")
    linked = tmp_path.parent / f"{tmp_path.name}-merging"
    git(project, "worktree", "add", str(linked))
    set_up(linked, Target.GIT)

    def driver(path: str) -> str:
        asked = ["git", "-C", str(linked), "check-attr", "merge", "--", path]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()[-1]

    assert driver(".jit/issues/a.json") == driver("part/.jit/index.json") == driver(".jit/gates.json") == "holdfast"
    assert driver("issues/a.json") == driver(".jit/events.jsonl") == "unspecified"
    asked = ["git", "-C", str(project), "config", "merge.holdfast.driver"]
    command = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert command.startswith("holdfast hook merge %O %A %B %P || { git merge-file ")
    assert command.endswith("%A %O %B; exit 1; }\n")
    undo(linked, Target.GIT)
    assert driver(".jit/issues/a.json") == "unspecified"
    assert subprocess.run(asked, check=False, capture_output=True).returncode == 1


def test_no_file_of_a_project_leads_to_the_hooks_of_another_repository(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A `.git` that names another repository, and one with the common directory of another."""
    before = everything(project)
    for way in ("gitdir", "commondir"):
        hostile = tmp_path_factory.mktemp("hostile")
        if way == "gitdir":
            (hostile / ".git").write_text(f"gitdir: {project}/.git\n")
        else:
            git(hostile, "init")
            (hostile / ".git/commondir").write_text(f"{project}/.git\n")
            (hostile / ".git/gitdir").write_text(f"{hostile}/.git\n")
        with pytest.raises(Refused, match="leads out of the project"):
            set_up(hostile, Target.GIT)
    assert everything(project) == before


def test_hooks_go_where_the_users_own_configuration_says(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path_factory.mktemp("own")
    (own / "config").write_text(f"[core]\n\thooksPath = {own}/hooks\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(own / "config"))
    set_up(project, Target.GIT)
    assert (own / "hooks/pre-commit").exists()

    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    git(project, "config", "core.hooksPath", f"{own}/hooks")
    with pytest.raises(Refused, match="leads out of the project"):
        undo(project, Target.GIT)
