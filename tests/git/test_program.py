"""git is started in the right place, with a clean environment, and its failures are told."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import GitFailed, GitUnavailable, GitUntrusted, NotFound, PathEscape, Refused
from holdfast.git import program, soundness
from holdfast.git import worktrees as linked
from holdfast.git.program import Background, Git, require_git
from tests.git.conftest import git, new_repository, write


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Before a test, and after it: the next one in this process may need git."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    for remembered in (program._why_unavailable, program._require_trust):
        remembered.cache_clear()
    soundness._sound.clear()


def test_variables_of_a_hook_do_not_lead_git_elsewhere(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = new_repository(checkout.parent / "other")
    for name, value in {
        "GIT_DIR": ".git",
        "GIT_INDEX_FILE": ".git/index",
        "GIT_WORK_TREE": ".",
        "GIT_PREFIX": "x",
    }.items():
        monkeypatch.setenv(name, str(other / value))
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.bare'='true'")

    found = Git(checkout / ".git").run("ls-files", worktree=checkout)

    assert found == b"one\nsub/three\ntwo\n"


def test_hooks_do_not_run(checkout: Path) -> None:
    hook = write(checkout / ".git/hooks/post-index-change", "#!/bin/sh\ntouch ran\n")
    hook.chmod(0o755)
    ours = Git(checkout / ".git")
    refresh = ("update-index", "--force-write-index")

    ours.run(*refresh, worktree=checkout)
    assert not (checkout / "ran").exists()
    assert ours.run("config", "--get", "hook.post-index-change.enabled") == b"false\n"  # for git 2.55
    git(checkout, *refresh)
    assert (checkout / "ran").exists()


def test_a_name_with_a_nul_byte_is_refused_as_git_refuses_names(checkout: Path) -> None:
    with pytest.raises(GitFailed, match="NUL byte") as failed:
        Git(checkout / ".git").run("rev-parse", "--verify", "refs/heads/a\0b")
    assert "\0" not in str(failed.value)
    with pytest.raises(NotFound):
        linked.commit_of(Git(checkout / ".git"), "refs/heads/a\0b")


def test_a_git_that_reads_slowly_gets_all_of_its_input(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a pipe holds, and for longer than the time between two looks at it."""
    real, content = shutil.which("git"), b"0123456789abcde\n" * (1 << 16)
    slow = write(tmp_path / "bin/git", f'#!/bin/sh\ncase "$*" in *hash-object*) sleep 0.3 ;; esac\nexec {real} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(program, "_LOOK", 0.05)

    named = Git(checkout / ".git").run("hash-object", "-w", "--stdin", content=content).decode().strip()

    assert Git(checkout / ".git").run("cat-file", "blob", named) == content


def test_a_worktree_that_another_git_is_adding_does_not_end_a_command(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "worktree", "add", "-q", str(tmp_path / "other"))
    head, ours = checkout / ".git/worktrees/other/HEAD", Git(checkout / ".git")
    whole = head.read_text()
    head.write_text("0" * 40 + "\n")
    with pytest.raises(GitFailed, match="bad object worktrees/other/HEAD"):  # its git has been killed
        ours.run("rev-list", "--all")
    with Background(lambda: ours.run("rev-list", "--all")) as running:
        time.sleep(0.05)
        head.write_text(whole)
        assert running.result() == ours.run("rev-list", "--all")


def test_a_command_that_succeeded_is_not_repeated(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it said: a hook that it ran may have met the half-added worktree."""
    real = shutil.which("git")
    said = "echo 'fatal: bad object worktrees/other/HEAD' >&2"
    told = write(tmp_path / "bin/git", f'#!/bin/sh\necho "$*" >> {tmp_path}/ran\n{said}\nexec {real} "$@"\n')
    told.chmod(0o755)
    ours = Git(checkout / ".git")
    monkeypatch.setenv("PATH", f"{told.parent}:{os.environ['PATH']}")

    ours.run("rev-parse", "HEAD")

    assert (tmp_path / "ran").read_text().count("rev-parse") == 1


def test_a_failure_has_the_command_and_what_git_said(checkout: Path) -> None:
    with pytest.raises(GitFailed, match=r"'git rev-parse --verify nonsense' failed: fatal: .*revision") as failed:
        Git(checkout / ".git").run("rev-parse", "--verify", "nonsense")

    assert failed.value.facts["status"] == 128
    assert failed.value.facts["command"] == ["rev-parse", "--verify", "nonsense"]


def test_a_failure_names_the_cause_and_not_the_last_line_of_advice(checkout: Path) -> None:
    write(checkout / ".git/index.lock", "")
    with pytest.raises(GitFailed, match=r"index\.lock': File exists"):
        Git(checkout / ".git").run("read-tree", "HEAD", worktree=checkout)
    write(checkout / ".git/packed-refs.lock", "")
    with pytest.raises(GitFailed, match=r"packed-refs\.lock': File exists.*; fatal: Branch rename failed"):
        Git(checkout / ".git").run("branch", "--move", "trunk", "other")


def test_a_question_is_answered_by_the_status(checkout: Path) -> None:
    ours = Git(checkout / ".git")

    assert ours.succeeds("show-ref", "--quiet", "refs/heads/trunk")
    assert not ours.succeeds("show-ref", "--quiet", "refs/heads/other")
    with pytest.raises(GitFailed):
        ours.succeeds("rev-parse", "--verify", "nonsense")


def test_a_directory_of_another_repository_is_refused(checkout: Path) -> None:
    other = new_repository(checkout.parent / "other")

    with pytest.raises(Refused, match="not a worktree"):
        Git(checkout / ".git").run("status", worktree=other)
    with pytest.raises(NotFound):
        Git(checkout / ".git").run("status", worktree=checkout / "missing")


def test_objects_go_to_their_own_directory_also_if_the_path_has_a_colon(tmp_path: Path) -> None:
    top = new_repository(tmp_path / 'a:"b')
    head = git(top, "hash-object", "-w", "--stdin", content=b"known")
    private = tmp_path / "private"
    private.mkdir()
    ours = Git(top / ".git")

    new = ours.run("hash-object", "-w", "--stdin", objects=private, content=b"new").decode().strip()
    ours.run("hash-object", "-w", "--stdin", objects=private, content=b"known")

    assert ours.run("cat-file", "blob", head, objects=private) == b"known"
    assert [path.parent.name + path.name for path in private.glob("??/*")] == [new]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo git version 2.37.9", "2.37"),
        ("echo nonsense", "version"),
        (None, "start"),
    ],
)
def test_a_git_that_is_missing_or_too_old_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, why: str
) -> None:
    if script:
        write(tmp_path / "git", f"#!/bin/sh\n{script}\n").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(GitUnavailable, match=why):
        require_git()


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can give files away")
def test_a_repository_of_another_user_is_refused_until_git_trusts_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["chown", "-R", "65534", checkout], check=True)

    with pytest.raises(GitUntrusted):
        Git(checkout / ".git").run("status", worktree=checkout)
    settings = write(checkout.parent / "settings", f"[safe]\ndirectory = {checkout}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    assert Git(checkout / ".git").run("status", "--porcelain", worktree=checkout) == b""


@pytest.mark.parametrize(
    "place", ["logs", "refs/holdfast", "objects/pack", "config", "worktrees", "COMMIT_EDITMSG", "logs/HEAD", "any"]
)
def test_a_link_that_git_would_follow_is_refused(checkout: Path, place: str) -> None:
    there = checkout / ".git" / place
    if there.exists():
        there.rename(checkout.parent / "elsewhere")
    there.parent.mkdir(parents=True, exist_ok=True)
    there.symlink_to(checkout.parent / "elsewhere")

    with pytest.raises(PathEscape, match="git would follow it"):
        Git(checkout / ".git").run("status", worktree=checkout)


def test_a_link_that_comes_while_the_process_runs_is_refused_too(checkout: Path) -> None:
    """A server looks once, and again when a directory has changed."""
    ours = Git(checkout / ".git")
    while str(checkout / ".git") not in soundness._sound:  # it has changed a moment ago
        ours.run("rev-parse", "--git-dir")
    examined = dict(soundness._sound)
    ours.run("rev-parse", "--git-dir")
    assert soundness._sound == examined
    for place in ("ORIG_HEAD", "objects/00", "logs/x"):
        (checkout / ".git" / place).symlink_to(checkout.parent)
        with pytest.raises(PathEscape, match=place):
            ours.run("rev-parse", "--git-dir")
        (checkout / ".git" / place).unlink()


def test_a_link_in_place_of_an_object_is_refused_before_git_touches_it(checkout: Path) -> None:
    name = git(checkout, "rev-parse", "HEAD")
    there = checkout / ".git/objects" / name[:2] / name[2:]
    there.rename(checkout.parent / "object")
    there.symlink_to(checkout.parent / "object")

    Git(checkout / ".git").run("status", worktree=checkout)
    with pytest.raises(PathEscape, match=name[2:]):
        Git(checkout / ".git").run("update-index", "--refresh", worktree=checkout)


@pytest.mark.skipif(sys.platform == "win32", reason="needs sockets and links")
def test_what_people_keep_in_a_git_directory_is_accepted(checkout: Path) -> None:
    """A linked directory of hooks, the socket of git's own monitor, and files and directories of other programs."""
    place = checkout / ".git"
    if (place / "hooks").exists():
        shutil.rmtree(place / "hooks")
    (place / "hooks").symlink_to(checkout.parent)
    write(place / "tool/state.db", "any bytes")
    write(place / "gk/config", "x")
    (place / "tool/link").symlink_to(checkout.parent)
    with socket.socket(socket.AF_UNIX) as monitor, contextlib.chdir(place):
        monitor.bind("fsmonitor--daemon.ipc")

    assert b"trunk" in Git(place).run("status", worktree=checkout)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process waits for")
@pytest.mark.parametrize("words", [("rev-parse", "trunk"), ("-c", "alias.x=!git rev-parse trunk", "x")])
def test_git_does_not_wait_for_a_pipe_in_place_of_a_file(checkout: Path, words: tuple[str, ...]) -> None:
    """Nor does a git that git has started, and neither is left behind."""
    (checkout / ".git/refs/heads/trunk").unlink()
    os.mkfifo(checkout / ".git/refs/heads/trunk")

    with pytest.raises(GitFailed, match="named pipe"):
        Git(checkout / ".git").run(*words, worktree=checkout, content=b"x" * 100)
    left = subprocess.run(["pgrep", "-f", "git.*rev-parse trunk"], capture_output=True, text=True, check=False)
    assert not [pid for pid in left.stdout.split() if os.readlink(f"/proc/{pid}/cwd") == str(checkout)]


def test_a_pipe_in_place_of_the_settings_is_refused_at_once(checkout: Path) -> None:
    (checkout / ".git/config").unlink()
    os.mkfifo(checkout / ".git/config")

    with pytest.raises(Refused, match="is not a file"):
        Git(checkout / ".git").run("status", worktree=checkout)
