"""`holdfast land`, `holdfast landing` and `agent run --land`, end to end, on every store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Result, data, error, holdfast
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a git home needs POSIX")


class Shop:
    """A git repository with two files, adopted, with a tracker."""

    def __init__(self, top: Path, *options: str) -> None:
        self.top = top
        git("init", "-q", "-b", "trunk", top)
        for name in ("one", "two"):
            (top / name).write_text(f"{name}\n")
        git("add", "-A", at=top)
        git("commit", "-qm", "first", at=top)
        self.ok("init", *options)
        self.ok("issue", "init")

    def __call__(self, *arguments: str, **options: Any) -> Result:
        return holdfast(*arguments, cwd=self.top, **options)

    def ok(self, *arguments: str, **options: Any) -> Any:
        result = self(*arguments, "--json", **options)
        assert result.returncode == 0, result
        return data(result)

    def failed(self, *arguments: str, status: int) -> Any:
        result = self(*arguments, "--json")
        assert result.returncode == status, result
        return error(result)

    def run(self, *options: str, code: str, status: int = 0) -> None:
        """Run an agent, whose envelope is on standard error."""
        result = self("agent", "run", *options, "--", "sh", "-c", code)
        assert result.returncode == status, result

    def worktree(self, name: str, **files: str) -> None:
        self.ok("worktree", "create", name)
        for path, content in files.items():
            (self.top.with_name(f"{self.top.name}.worktrees") / name / path).write_text(content)


@pytest.mark.sampled(1)
def test_issues_agents_conflict_repair_and_landing_on_every_store(tmp_path: Path, store_url: str) -> None:
    shop = Shop(tmp_path / "shop", "--store", store_url)
    shop.ok("ledger", "init")
    first = shop.ok("issue", "create", "First")["id"]
    second = shop.ok("issue", "create", "Second")["id"]
    shop.ok("worktree", "create", f"issue-{second[:8]}")
    shop.run("--issue", first, "--land", code="echo 1 > one")
    assert shop.ok("issue", "show", first)["state"] == "done"
    assert (shop.top / "one").read_text() == "1\n"
    shop.run("--issue", second, "--land", code="echo 2 > one", status=4)
    assert shop.ok("issue", "show", second)["state"] == "ready"
    merge = (
        "grep -q 'conflicts with trunk' $HOLDFAST_PROMPT_FILE && ! git merge -q trunk && echo 12 > one && git add one"
    )
    shop.run("--issue", second, "--land", code=merge)
    assert shop.ok("issue", "show", second)["state"] == "done"
    assert (shop.top / "one").read_text() == "12\n"
    assert git("status", "--porcelain", at=shop.top) == ""
    states = [each["state"] for each in shop.ok("landing", "list", "--all")["landings"]]
    assert states == ["landed", "conflict", "landed"]
    kinds = [each["event"]["type"] for each in shop.ok("ledger", "log")["events"]]
    assert kinds.count("work_landed") == 2
    shop.ok("audit", "--verify")
    assert [each for each in shop.ok("doctor")["findings"] if each["severity"] != "note"] == []


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop")


def test_work_is_queued_and_worked_off_by_another_command(shop: Shop) -> None:
    shop.worktree("dev", one="changed\n")
    preview = shop.ok("land", "dev", "--dry-run")
    assert (preview["has_uncommitted"], preview["conflicts"], preview["ahead"]) == (True, [], 0)
    queued = shop.ok("land", "dev", "--no-wait")
    assert queued["state"] == "queued"
    assert (shop.top / "one").read_text() == "one\n"
    assert shop.ok("landing", "show", queued["id"][:6])["commit"] == queued["commit"]
    decided = shop.ok("land", "--all")["decided"]
    assert [(each["id"], each["state"]) for each in decided] == [(queued["id"], "landed")]
    assert (shop.top / "one").read_text() == "changed\n"


def test_a_cancelled_entry_can_be_retried(shop: Shop) -> None:
    shop.worktree("dev", one="changed\n")
    queued = shop.ok("land", "dev", "--no-wait")["id"]
    assert shop.ok("landing", "cancel", queued, "--reason", "not yet")["state"] == "withdrawn"
    assert shop.ok("landing", "list")["landings"] == []
    assert shop.ok("landing", "retry", queued)["state"] == "landed"


def test_a_failed_check_has_a_log(shop: Shop) -> None:
    shop.ok("config", "set", "land.checks", "echo looking; test ! -e bad")
    shop.worktree("dev", bad="1\n")
    failure = shop.failed("land", "dev", status=1)
    assert failure["code"] == "E_LANDING_FAILED"
    assert f"landing log {failure['landing']}" in failure["hint"]
    assert "looking" in shop.ok("landing", "log", failure["landing"])["log"]
    assert "test ! -e bad" in shop("landing", "log", failure["landing"]).stdout


def test_what_has_landed_cannot_be_withdrawn_and_names_are_told_apart(shop: Shop) -> None:
    shop.worktree("dev", one="changed\n")
    landed = shop.ok("land", "dev")["id"]
    assert "has landed on trunk" in shop.failed("landing", "cancel", landed, status=7)["message"]
    assert "holdfast land" in shop.failed("landing", "retry", landed, status=7)["hint"]
    assert shop.failed("land", "nothing", status=3)["message"] == "there is no worktree or issue nothing"


def test_the_failed_run_of_a_flaky_check_has_a_log_too(shop: Shop) -> None:
    shop.ok("config", "set", "land.checks", "if mkdir ../seen; then echo flaked; exit 1; fi; echo passed")
    shop.worktree("dev", one="changed\n")
    result = shop("land", "dev")
    assert "a check failed first" in result.stderr
    landed = shop.ok("landing", "list", "--all")["landings"][0]
    assert landed["flaky"]
    found = shop.ok("landing", "log", landed["id"], "--all")
    assert ["\nflaked\n" in each["log"] for each in found["runs"]] == [True, False]
    assert "\npassed\n" in shop.ok("landing", "log", landed["id"])["log"]


def test_every_entry_of_a_batch_has_its_log(shop: Shop) -> None:
    shop.ok("config", "set", "land.checks", "echo looking")
    for name in ("a", "b"):
        shop.worktree(name, **{name: "new\n"})
        shop.ok("land", name, "--no-wait")
    decided = shop.ok("land", "--all")["decided"]
    assert len({shop.ok("landing", "log", each["id"])["run_id"] for each in decided}) == 1


def test_a_checkout_in_the_way_is_named_when_the_time_is_up(shop: Shop) -> None:
    shop.worktree("dev", one="changed\n")
    (shop.top / "one").write_text("mine\n")
    failure = shop.failed("land", "dev", "--wait", "100ms", status=75)
    assert failure["code"] == "E_LANDING_PENDING"
    assert "one" in failure["waits_for"]
    assert "Waiting: " in shop("landing", "list").stdout


def test_an_issue_of_somebody_else_cannot_be_landed(shop: Shop) -> None:
    issue_id = shop.ok("issue", "create", "Mine")["id"]
    claim = shop.ok("issue", "claim", issue_id, "--actor", "agent:other")["claim_id"]
    shop.worktree(f"issue-{issue_id[:8]}", one="changed\n")
    assert shop.failed("land", issue_id[:8], status=4)["code"] == "E_ISSUE_CLAIMED"
    assert shop.ok("land", issue_id[:8], "--claim", claim)["state"] == "landed"
    assert shop.ok("issue", "show", issue_id)["state"] == "done"


def test_a_plain_home_has_nothing_to_land_on(tmp_path: Path) -> None:
    holdfast("init", tmp_path / "plain")
    result = holdfast("land", "--all", "--json", cwd=tmp_path / "plain")
    assert result.returncode == 7
    assert "not in a git checkout" in error(result)["message"]
