"""Issues and ledger of a git home: found from every checkout, and in nobody's way. On real git repositories."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import AlreadyExists, NotInitialised, Refused
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.ledgers import find_ledger, init_ledger, place_for_ledger
from holdfast.repository.opening import find_root, open_tracker, place_for_tracker, tracker_of
from holdfast.repository.overview import find_workspace, look_around
from holdfast.store.open import configure_store, read_config
from tests.cli.commands import HOLDFAST, holdfast
from tests.git.conftest import commit_all, git, new_repository, write
from tests.issues.trackers import create_issues


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a commit, and its repository adopted."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    top = new_repository(tmp_path / "checkout")
    write(top / "sub/file", "text\n")
    commit_all(top)
    adopt_checkout(top)
    return top


@pytest.fixture
def linked(checkout: Path) -> Path:
    git(checkout, "worktree", "add", "-q", "-b", "branch", "../linked")
    return checkout.parent / "linked"


def home(checkout: Path) -> Path:
    return checkout / ".git/holdfast"


def done(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Any:
    """The data that a command prints."""
    result = holdfast(*arguments, "--json", cwd=cwd, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["data"]


def test_the_tracker_and_the_ledger_of_a_git_home_are_found_from_everywhere(checkout: Path, linked: Path) -> None:
    root = home(checkout)
    for start in (checkout, checkout / "sub", linked, linked / "sub"):
        assert place_for_tracker(start) == place_for_ledger(start) == root
    open_tracker(root, actor="human:a").initialise()
    init_ledger(root).close()

    for start in (checkout, checkout / "sub", linked, linked / "sub", checkout / ".git", root, root / ".jit"):
        assert find_root(start) == find_ledger(start) == find_workspace(start) == root


def test_commands_in_any_checkout_share_one_queue_and_leave_git_status_clean(checkout: Path, linked: Path) -> None:
    done("issue", "init", cwd=checkout / "sub")
    done("ledger", "init", cwd=linked)
    issue = done("issue", "create", "work", cwd=checkout)["id"]
    claimed = done("issue", "claim-next", "--actor", "agent:a", cwd=linked / "sub")
    done("ledger", "append", '{"type":"note"}', cwd=linked)

    assert claimed["id"] == issue
    assert done("issue", "show", issue, cwd=checkout)["assignee"] == "agent:a"
    assert done("ledger", "show", "1", cwd=checkout / "sub")["event"]["type"] == "note"
    held = done("who", cwd=linked)["holdings"]
    assert [(each["kind"], each["what"]) for each in held] == [("issue", issue)]
    assert git(checkout, "status", "--porcelain", "--ignored") == git(linked, "status", "--porcelain") == ""
    assert sorted(each.name for each in checkout.iterdir()) == [".git", "sub"]


def test_a_tracker_in_the_tree_is_that_of_the_main_checkout(checkout: Path, linked: Path) -> None:
    made = holdfast("issue", "init", "--in-tree", cwd=linked / "sub", env={"HOLDFAST_REPO": str(home(checkout))})
    assert made.stdout == f"created a tracker in {checkout}/.jit\n"
    assert read_config(home(checkout)).issues_in_tree
    tracker = open_tracker(checkout, actor="human:a")
    create_issues(tracker, "one")
    done("issue", "list", cwd=checkout)
    assert (checkout / ".holdfast/checkpoints").exists()
    commit_all(checkout)
    assert git(checkout, "ls-files", ".holdfast") == ""
    git(linked, "merge", "-q", "trunk")
    assert (linked / ".jit/index.json").exists()
    before = (linked / ".jit/index.json").read_bytes()

    [two] = [done("issue", "create", "two", cwd=linked)["id"]]

    assert (linked / ".jit/index.json").read_bytes() == before
    assert tracker.issue(two).title == "two"
    for start in (checkout, linked, linked / "sub", linked / ".jit", home(checkout)):
        assert find_root(start) == tracker_of(home(checkout)) == checkout
    done("issue", "claim", two, "--actor", "agent:a", cwd=linked)
    assert [each.what for each in look_around(home(checkout)).holdings] == [two]
    assert holdfast("issue", "init", cwd=linked).stdout == "a tracker already exists\n"
    assert not (home(checkout) / ".jit").exists()
    assert git(linked, "status", "--porcelain") == ""


@pytest.mark.parametrize("where", ["elsewhere", "bare"])
def test_every_command_finds_the_home_that_git_names(tmp_path: Path, checkout: Path, where: str) -> None:
    """`GIT_DIR` in the environment, as in a hook; or the current directory is in a bare repository."""
    at, env = tmp_path, {"GIT_DIR": str(checkout / ".git")}
    if where == "bare":
        at = tmp_path / "b.git"
        git(checkout, "clone", "-q", "--bare", ".", str(at))
        git(at, "worktree", "add", "-q", str(tmp_path / "work"), "-b", "work")
        done("init", cwd=tmp_path / "work")
        env = {}
    done("issue", "init", cwd=at, env=env)
    done("issue", "create", "one", cwd=at, env=env)
    for words in ("who", "issue list", "ready", "lease list", "doctor", "prime", "trust --show"):
        found = holdfast(*words.split(), cwd=at, env=env)
        assert found.returncode == 0, (words, found.stderr)
    inside = tmp_path / "work" if where == "bare" else checkout
    assert [each["title"] for each in done("issue", "list", cwd=inside)["issues"]] == ["one"]


def test_a_main_checkout_whose_branch_has_no_tracker_is_no_reason_to_use_another(
    checkout: Path, linked: Path, tmp_path: Path
) -> None:
    open_tracker(tmp_path, actor="human:a").initialise()  # around the checkout
    done("issue", "init", "--in-tree", cwd=checkout)
    commit_all(checkout)
    git(checkout, "checkout", "-q", "-b", "older", "HEAD~")

    for start in (checkout, linked / "sub"):
        with pytest.raises(NotInitialised, match="the branch there has no"):
            find_root(start)
        with pytest.raises(NotInitialised, match="the branch there has no"):
            place_for_tracker(start)
    git(checkout, "checkout", "-q", "trunk")
    assert find_root(linked) == checkout


def test_a_second_tracker_is_refused(checkout: Path, tmp_path: Path) -> None:
    open_tracker(home(checkout), actor="human:a").initialise()
    with pytest.raises(AlreadyExists):
        place_for_tracker(checkout, in_tree=True)
    with pytest.raises(Refused):
        place_for_tracker(tmp_path, in_tree=True)
    refused = holdfast("issue", "init", "--in-tree", "--repo", checkout, cwd=checkout)
    assert refused.returncode == 2


def test_a_checkout_that_was_not_adopted_works_as_before(tmp_path: Path) -> None:
    top = new_repository(tmp_path / "plain")
    done("issue", "init", cwd=top)
    done("ledger", "init", cwd=top)
    commit_all(top)
    git(top, "worktree", "add", "-q", "../beside")

    assert find_root(top) == find_ledger(top) == find_workspace(top) == top
    assert find_root(tmp_path / "beside") == tmp_path / "beside"


def test_a_tracker_that_was_there_before_the_adoption_is_used_from_every_worktree(checkout: Path, linked: Path) -> None:
    open_tracker(checkout, actor="human:a").initialise()
    commit_all(checkout)
    git(linked, "merge", "-q", "trunk")

    assert find_root(checkout) == find_root(linked) == place_for_tracker(linked) == checkout


def test_a_named_directory_stays_what_it_is(checkout: Path, linked: Path) -> None:
    done("issue", "init", "--repo", "sub", cwd=checkout)
    done("ledger", "init", "--repo", "sub", cwd=checkout)

    assert (checkout / "sub/.jit/index.json").exists()
    assert find_ledger(checkout / "sub") == find_root(checkout / "sub") == checkout / "sub"
    assert not (home(checkout) / ".jit").exists()


def test_a_submodule_uses_the_superproject_until_it_is_adopted_itself(checkout: Path, tmp_path: Path) -> None:
    other = new_repository(tmp_path / "other")
    commit_all(other)
    git(checkout, "-c", "protocol.file.allow=always", "submodule", "-q", "add", str(other), "module")
    open_tracker(home(checkout), actor="human:a").initialise()
    assert find_root(checkout / "module") == home(checkout)

    own = checkout / ".git/modules/module/holdfast"
    adopt_checkout(checkout / "module")
    assert place_for_tracker(checkout / "module") == own
    assert place_for_tracker(checkout / "module", in_tree=True) == checkout / "module"
    assert find_root(checkout) == home(checkout)


def test_a_hook_of_git_finds_the_tracker_whatever_git_sets(checkout: Path, linked: Path) -> None:
    """Git sets GIT_DIR (for a linked worktree), GIT_INDEX_FILE and more for its hooks."""
    tracker = open_tracker(home(checkout), actor="human:a")
    tracker.initialise()
    command = f'{shlex.join(HOLDFAST)} issue create "$(pwd) $GIT_DIR"'
    write(checkout / ".git/hooks/pre-commit", f"#!/bin/sh\nexec {command}\n").chmod(0o755)
    for top in (checkout, linked):
        git(top / "sub", "commit", "-q", "--allow-empty", "-m", "x")

    titles = [each.title for each in tracker.snapshot()]
    assert titles[0].partition(" ")[0] == str(checkout)
    assert titles[1] == f"{linked} {checkout}/.git/worktrees/linked"
    done("issue", "create", "here", cwd=checkout / "sub", env={"GIT_DIR": ".git"})
    assert len(list(tracker.snapshot())) == 3


def test_a_checker_runs_in_the_checkout_that_the_command_was_started_in(checkout: Path, linked: Path) -> None:
    done("issue", "init", cwd=checkout)
    done("gate", "define", "here", "--checker", "pwd", cwd=checkout)
    issue = done("issue", "create", "work", "--gate", "here", cwd=checkout)["id"]
    for start, top in ((linked / "sub", linked), (checkout / "sub", checkout), (checkout.parent, checkout)):
        env = {"HOLDFAST_REPO": str(home(checkout))} if start == checkout.parent else None
        done("gate", "check", issue, "here", cwd=start, env=env)
        run = open_tracker(home(checkout), actor="human:a").gates.runs(issue)[-1]
        assert (run.exit_code, run.stdout.strip()) == (0, str(top))


def test_another_store_keeps_where_the_issues_are(checkout: Path) -> None:
    place_for_tracker(checkout, in_tree=True)
    configure_store(home(checkout), "files")

    assert read_config(home(checkout)).issues_in_tree
