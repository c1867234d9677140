"""The commands of `holdfast worktree`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.clock import parse_instant
from holdfast.repository.repository import Repository
from tests.cli.commands import data, error, holdfast
from tests.repository.stages import files_in, make_repository, put_files

pytestmark = pytest.mark.both_homes


@pytest.fixture
def repo(scratch: Path) -> Path:
    make_repository(scratch / "repo")
    return scratch / "repo"


def save(repo: Path, worktree: str = "main") -> str:
    repository = Repository(repo)
    with repository.lease(worktree) as held:
        return repository.snapshot(worktree, held).snapshot_id


@pytest.mark.req("WT-09")
def test_a_worktree_is_created_listed_renamed_and_removed(repo: Path) -> None:
    put_files(repo / "main", {"file": "content"})
    snapshot = save(repo)
    made = data(holdfast("worktree", "create", "dev", "--from", "head", "--label", "mine", "--json", cwd=repo))
    assert made["base_snapshot_id"] == made["head_snapshot_id"] == snapshot
    assert files_in(repo / "worktrees/dev") == {"file": "content"}
    assert holdfast("worktree", "path", "dev", cwd=repo).stdout == f"{repo / 'worktrees/dev'}\n"
    assert "dev" in holdfast("worktree", "list", cwd=repo).stdout
    renamed = data(holdfast("worktree", "rename", "dev", "parser", "--json", cwd=repo))
    assert renamed["renamed_from"] == "dev"
    assert renamed["path"] == str(repo / "worktrees/parser")
    assert holdfast("worktree", "remove", "parser", cwd=repo).returncode == 0
    listed = data(holdfast("worktree", "list", "--json", cwd=repo))["worktrees"]
    assert [each["worktree"] for each in listed] == ["main"]


def test_the_list_shows_paths_and_a_misspelled_name_gets_a_suggestion(repo: Path) -> None:
    holdfast("worktree", "create", "parser", cwd=repo)

    assert holdfast("worktree", "list", cwd=repo).stdout.splitlines() == [
        "WORKTREE  HEAD         STATE  PATH",
        "main      no snapshot  free   main",
        "parser    no snapshot  free   worktrees/parser",
    ]
    assert str(repo / "main") in holdfast("worktree", "list", cwd=repo / "worktrees").stdout
    assert "Did you mean parser?" in holdfast("worktree", "path", "parzer", cwd=repo).stderr
    assert "Did you mean" not in holdfast("worktree", "path", "something", cwd=repo).stderr
    holdfast("snapshot", "--tag", "stable", "--message", "as others call it", cwd=repo)
    assert "Did you mean stable?" in holdfast("show", "stabel", cwd=repo).stderr


@pytest.mark.req("WT-11")
def test_removing_a_worktree_keeps_its_snapshots_and_saves_unsaved_changes(repo: Path) -> None:
    Repository(repo).worktrees.create("dev")
    put_files(repo / "worktrees/dev", {"a": "saved"})
    first = save(repo, "dev")
    put_files(repo / "worktrees/dev", {"b": "not saved"})
    removed = data(holdfast("worktree", "remove", "dev", "--json", cwd=repo))
    kept = removed["saved_snapshot_id"]
    assert kept not in (None, first)
    assert removed["head_snapshot_id"] == kept
    for snapshot, expected in ((first, {"a": "saved"}), (kept, {"a": "saved", "b": "not saved"})):
        name = f"from-{snapshot}"
        Repository(repo).worktrees.create(name, snapshot=snapshot)
        assert files_in(repo / "worktrees" / name) == expected


def test_removing_a_worktree_saves_nothing_if_nothing_changed_or_if_told_not_to(repo: Path) -> None:
    Repository(repo).worktrees.create("dev")
    put_files(repo / "worktrees/dev", {"a": "saved"})
    save(repo, "dev")
    assert data(holdfast("worktree", "remove", "dev", "--json", cwd=repo))["saved_snapshot_id"] is None
    Repository(repo).worktrees.create("dev")
    put_files(repo / "worktrees/dev", {"a": "not wanted"})
    removed = data(holdfast("worktree", "remove", "dev", "--no-snapshot", "--json", cwd=repo))
    assert removed["saved_snapshot_id"] is None
    assert not (repo / "worktrees/dev").exists()


def test_a_dry_run_shows_the_processes_in_the_worktree_and_changes_nothing(repo: Path) -> None:
    Repository(repo).worktrees.create("dev")
    put_files(repo / "worktrees/dev", {"a": "work"})
    where = repo / "worktrees/dev"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=where) as user:
        told = data(holdfast("worktree", "remove", "dev", "--dry-run", "--json", cwd=repo))
        assert told["dry_run"] is True
        assert [each["pid"] for each in told["would_remove"]["processes"]] == [user.pid]
        refused = holdfast("worktree", "remove", "dev", "--json", cwd=repo)
        assert (refused.returncode, error(refused)["code"]) == (4, "E_IN_USE")
        assert error(refused)["processes"][0]["pid"] == user.pid
        assert files_in(where) == {"a": "work"}
        assert holdfast("worktree", "remove", "dev", "--force", cwd=repo).returncode == 0
        user.kill()


@pytest.mark.req("WT-08")
def test_an_active_lease_is_a_conflict_but_its_holder_may_remove_the_worktree(repo: Path) -> None:
    Repository(repo).worktrees.create("dev")
    lock = data(holdfast("lease", "acquire", "--worktree", "dev", "--ttl", "10m", "--json", cwd=repo))
    for command in (
        ["rename", "dev", "new"],
        ["remove", "dev", "--force"],
        ["rename", "dev", "x", "--force"],
    ):
        refused = holdfast("worktree", *command, "--json", cwd=repo)
        assert (refused.returncode, error(refused)["code"]) == (4, "E_LOCK_CONFLICT")
        assert error(refused)["lock_id"] == lock["lock_id"]
    env = {"HOLDFAST_LOCK_ID": lock["lock_id"]}
    assert holdfast("worktree", "remove", "dev", cwd=repo, env=env).returncode == 0


@pytest.mark.req("WT-06")
@pytest.mark.parametrize("name", ["../main", ""])
def test_invalid_names_are_refused(repo: Path, name: str) -> None:
    for command in (["create", name], ["remove", name], ["rename", name, "x"], ["rename", "main", name]):
        refused = holdfast("worktree", *command, "--json", cwd=repo)
        assert refused.returncode in (2, 7)
        assert error(refused)["code"] in ("E_NAME_INVALID", "E_REFUSED")
        assert refused.stdout.count("\n") == 1
    assert list((repo / "worktrees").glob("*")) == []
    assert (repo / "main").is_dir()


@pytest.mark.req("LC-03", "WT-01")
def test_a_shared_worktree_is_marked_high_risk_wherever_it_is_shown(repo: Path) -> None:
    made = holdfast("worktree", "create", "open", "--shared", cwd=repo)
    shown = [
        made.stdout,
        holdfast("worktree", "list", cwd=repo).stdout,
        holdfast("worktree", "show", "open", cwd=repo).stdout,
        holdfast("lease", "list", cwd=repo).stdout,
        holdfast("lease", "status", "--worktree", "open", cwd=repo).stdout,
        holdfast("lease", "acquire", "--worktree", "open", cwd=repo).stderr,
        holdfast("info", cwd=repo).stdout,
    ]
    assert all("high-risk" in each for each in shown), shown
    assert data(holdfast("worktree", "show", "open", "--json", cwd=repo))["high_risk"] is True


def test_show_describes_the_current_worktree(repo: Path) -> None:
    holdfast("worktree", "create", "dev", "--label", "experiments", cwd=repo)
    told = data(holdfast("worktree", "show", "--json", cwd=repo / "worktrees/dev"))
    assert told["worktree"] == "dev"
    assert told["label"] == "experiments"
    assert told["lease"]["state"] == "free"
    assert told["operation"] is None
    assert os.getpid() not in [each["pid"] for each in told["processes"]]


def test_a_misspelled_repository_is_not_created(repo: Path) -> None:
    for command, rest in ((["info"], []), (["run"], ["--", "true"]), (["lease", "acquire"], [])):
        refused = holdfast(*command, "--repo", repo / "nowhere", *rest, cwd=repo)
        assert (refused.returncode, (repo / "nowhere").exists()) == (3, False)


@pytest.mark.plain_home("the top of a git checkout is a worktree")
def test_setup_outside_a_worktree_suggests_the_worktree(repo: Path) -> None:
    around = holdfast("setup", "claude", cwd=repo)
    inside = holdfast("setup", "claude", "--project", "main", cwd=repo)

    assert "'holdfast setup claude --project main'" in around.stdout
    assert "around the worktrees" not in inside.stdout
    assert (repo / "main" / ".claude" / "settings.json").exists()


@pytest.mark.req("WT-11")
def test_removing_a_worktree_names_the_snapshot_with_its_content_and_the_next_collection_keeps_it(repo: Path) -> None:
    put_files(repo / "main", {"file": "content"})
    save(repo)
    holdfast("worktree", "create", "dev", "--from", "head", cwd=repo)
    put_files(repo / "worktrees/dev", {"b": "not saved"})
    removed = data(holdfast("worktree", "remove", "dev", "--json", cwd=repo))
    kept = removed["head_snapshot_id"]
    assert removed["saved_snapshot_id"] == kept
    (pin,) = data(holdfast("pin", "list", "--json", cwd=repo))["pins"]
    assert (pin["snapshot_id"], pin["pin_id"], pin["until"]) == (kept, removed["pin_id"], removed["pinned_until"])
    assert 29.9 < (parse_instant(pin["until"]) - time.time()) / 86_400 < 30.1
    plan = data(holdfast("gc", "plan", "--json", cwd=repo))
    assert plan["delete"] == []
    (why,) = next(each["why"] for each in plan["protected"] if each["snapshot_id"] == kept)
    assert why["text"] == f"pin {kept} until {pin['until']}: the worktree dev was removed"
    again = holdfast("restore", kept, "dev", cwd=repo)
    assert again.returncode == 0, again.stderr
    assert files_in(repo / "worktrees/dev") == {"file": "content", "b": "not saved"}


def test_the_pin_of_a_removed_worktree_lasts_as_long_as_wanted_and_is_never_shortened(repo: Path) -> None:
    put_files(repo / "main", {"file": "content"})
    snapshot = save(repo)

    def remove(*options: str) -> str:
        holdfast("worktree", "create", "dev", "--from", "head", cwd=repo)
        return holdfast("worktree", "remove", "dev", *options, cwd=repo).stdout

    def lasting() -> list[float]:
        pins = data(holdfast("pin", "list", "--json", cwd=repo))["pins"]
        return [round((parse_instant(each["until"]) - time.time()) / 86_400) for each in pins]

    assert f"Its content is in the snapshot {snapshot}.\n" in remove("--keep-for", "0s")
    assert lasting() == []
    assert f"the snapshot {snapshot}, which a pin protects until 20" in remove("--keep-for", "5d")
    remove()
    assert lasting() == [30]
    remove("--keep-for", "5d")
    assert lasting() == [30]
    holdfast("worktree", "create", "dev", cwd=repo)
    refused = holdfast("worktree", "remove", "dev", "--keep-for", "999999999d", cwd=repo)
    assert (refused.returncode, "36500d at most" in refused.stderr) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs symbolic links and flock")
def test_a_symlink_in_place_of_a_worktree_is_refused_wherever_the_worktree_is_named(repo: Path) -> None:
    holdfast("worktree", "create", "dev", cwd=repo)
    (repo / "worktrees/dev").rename(repo.parent / "elsewhere")
    (repo / "worktrees/dev").symlink_to(repo.parent / "elsewhere")
    for command in (
        ["lease", "acquire", "--worktree", "dev"],
        ["lease", "steal", "--worktree", "dev"],
        ["worktree", "show", "dev"],
        ["worktree", "path", "dev"],
        ["worktree", "remove", "dev", "--dry-run"],
        ["snapshot", "--worktree", "dev"],
        ["status", "--worktree", "dev"],
    ):
        refused = holdfast(*command, "--json", cwd=repo)
        assert (error(refused)["code"], refused.returncode) == ("E_PATH_ESCAPE", 7), command
    assert "dev" in holdfast("worktree", "list", cwd=repo).stdout
    assert Repository(repo).leases.state("dev") is None


def test_the_name_of_a_draft_is_reserved(repo: Path) -> None:
    name = ".a-0123456789ab.tmp"
    holdfast("worktree", "create", "dev", cwd=repo)
    snapshot = save(repo)
    for command in (["worktree", "create", name], ["worktree", "rename", "dev", name], ["restore", snapshot, name]):
        assert error(holdfast(*command, "--json", cwd=repo))["code"] == "E_NAME_INVALID"
    assert holdfast("worktree", "create", ".a-0123456789ab.tm", cwd=repo).returncode == 0


RESERVED = (".jvs", ".JIT", ".holdfast", ".Git", "-x", "--force")


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.sampled(1)
def test_a_new_worktree_cannot_have_a_reserved_name_but_an_old_one_can_be_removed(
    repo: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("worktree", "create", "spare", cwd=repo)
    for line in (("create", "--", name), ("rename", "--", "spare", name)):
        refused = holdfast("worktree", *line[:1], "--json", *line[1:], cwd=repo)
        assert (refused.returncode, error(refused)["code"]) == (2, "E_NAME_INVALID"), line
    with monkeypatch.context() as before:  # as former versions made them
        before.setattr("holdfast.repository.worktrees.worktree_name", lambda text, new=False: text)
        for each in (name, f"{name}2"):
            Repository(repo).worktrees.create(each)
    assert holdfast("worktree", "rename", "--", f"{name}2", "plain", cwd=repo).returncode == 0
    assert holdfast("worktree", "remove", "--", name, cwd=repo).returncode == 0
