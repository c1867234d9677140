"""The same commands behave the same on files, PostgreSQL and etcd, end to end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import (
    HOLDFAST,
    Result,
    Running,
    data,
    envelope,
    environment,
    error,
    holdfast,
    python,
    wait_until,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


class Repo:
    """A repository with its records in one of the stores."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        self.address = address

    def __call__(self, *arguments: str, **options: Any) -> Result:
        return holdfast(*arguments, cwd=self.root, **options)

    def ok(self, *arguments: str, **options: Any) -> Any:
        result = self(*arguments, "--json", **options)
        assert result.returncode == 0, result
        return data(result)

    def refused(self, *arguments: str, **options: Any) -> str:
        result = self(*arguments, "--json", **options)
        assert result.returncode != 0
        return str(error(result)["code"])


@pytest.fixture
def repo(tmp_path: Path, store_url: str) -> Repo:
    root = tmp_path / "repo"
    made = data(holdfast("init", root, "--store", store_url, "--json"))
    assert made["created"] is True
    return Repo(root, store_url)


@pytest.mark.sampled(1)
def test_leases_worktrees_and_snapshots(repo: Repo) -> None:
    lease = repo.ok("lease", "acquire", "--ttl", "1h", "--holder-pid", "1")
    assert repo.refused("lease", "acquire") == "E_LOCK_CONFLICT"
    (repo.root / "main/a.txt").write_text("one")
    own = {"HOLDFAST_LOCK_ID": lease["lock_id"]}
    first = repo.ok("snapshot", "-m", "first", env=own)["snapshot_id"]
    (repo.root / "main/a.txt").write_text("two")
    assert repo.refused("snapshot", "--lock-id", "00000000-0000-0000-0000-000000000000") == "E_FENCING_MISMATCH"
    repo.ok("snapshot", "-m", "second", "--tag", "good", env=own)
    repo.ok("lease", "release", env=own)
    again = repo.ok("lease", "acquire", "--ttl", "1h")
    assert again["token"] > lease["token"]
    repo.ok("lease", "release", "--lock-id", again["lock_id"])

    assert [each["note"] for each in repo.ok("history")["snapshots"]] == ["second", "first"]
    repo.ok("worktree", "create", "copy", "--from", first[:6])
    assert (repo.root / "worktrees/copy/a.txt").read_text() == "one"
    repo.ok("worktree", "rename", "copy", "other")
    repo.ok("restore", "good", "--worktree", "other", "--inplace", "--reason", "back to the good one")
    assert (repo.root / "worktrees/other/a.txt").read_text() == "two"
    repo.ok("worktree", "remove", "other")
    assert repo("audit", "--verify").returncode == 0
    assert repo("doctor", "--strict").returncode == 0, repo("doctor", "--strict")


@pytest.mark.sampled(1)
def test_a_terminated_command_releases_its_lease(repo: Repo) -> None:
    with Running("run", "--repo", repo.root, "--ttl", "1h", "--", "sleep", "99") as run:
        wait_until(lambda: repo.ok("lease", "status")["state"] == "leased")
        held = repo.ok("lease", "status")["lease"]
        assert repo.refused("lease", "steal") == "E_LOCK_CONFLICT"
        run.send(15)
        run.finish()
    assert repo.ok("lease", "status")["state"] == "free"
    assert repo.refused("lease", "renew", "--lock-id", held["lock_id"]) == "E_LOCK_NOT_HELD"


@pytest.mark.sampled(1)
def test_the_ledger_and_its_claims(repo: Repo) -> None:
    repo.ok("ledger", "init")
    assert repo.ok("ledger", "append", '{"type":"note"}')["sequence"] == 1
    assert repo.refused("ledger", "append", '{"type":"note"}', "--if-sequence", "0") == "E_SEQUENCE_MISMATCH"
    claim = repo.ok("ledger", "claim", "1.2", "--actor", "alice")
    assert repo("ledger", "claim", "1.2", "--actor", "bob").returncode == 4
    assert claim["actor"] == "alice"
    repo.ok("ledger", "release", "1.2", "--actor", "alice")
    repo.ok("ledger", "claim", "1.2", "--actor", "bob")
    assert repo("ledger", "verify").returncode == 0


@pytest.mark.sampled(1)
def test_issues_with_dependencies_gates_and_agents(repo: Repo) -> None:
    repo.ok("issue", "init")
    repo.ok("ledger", "init")
    repo.ok("gate", "define", "review", "--title", "Review")
    first = repo.ok("issue", "create", "First")["id"]
    second = repo.ok("issue", "create", "Second", "--depends-on", first, "--gate", "review")["id"]
    assert repo("dep", "add", first, second).returncode != 0  # a cycle
    write = python("open('out', 'w').write('done')")
    told = repo("agent", "run", "--next", "--actor", "agent:a", "--json", "--", *write)
    assert envelope(told.stderr)["data"]["issue_id"] == first
    repo("agent", "run", "--next", "--actor", "agent:a", "--gate", "review", "--", *write)
    states = {each["id"]: each["state"] for each in repo.ok("issue", "list", "--all")["issues"]}
    assert states == {first: "done", second: "done"}
    assert repo.ok("who")["holdings"] == []


@pytest.mark.sampled(1)
def test_a_migration_to_files_and_back_keeps_the_history(repo: Repo, tmp_path: Path) -> None:
    (repo.root / "main/a.txt").write_text("one")
    assert repo("run", "--snapshot", "-m", "kept", "--", "true").returncode == 0
    before = repo.ok("history")
    other = (tmp_path / "elsewhere").as_uri()

    repo.ok("migrate", "--to", other)
    assert repo.ok("history") == before
    repo.ok("migrate", "--to", repo.address, "--overwrite")

    assert repo.ok("history") == before


@pytest.mark.sampled(1)
@pytest.mark.long
def test_the_demo_passes(repo: Repo, tmp_path: Path, store_url: str) -> None:
    if store_url.startswith("file:"):
        pytest.skip("tests/cli/test_demo.py runs it on files")
    address = re.sub(r"(test[-_]\d+)", r"\1demo", store_url)
    options = ("--workers", "3", "--issues", "6", "--store", address, "--json")
    result = subprocess.run(
        [*HOLDFAST, "demo", *options],
        capture_output=True,
        text=True,
        env=environment({"TMPDIR": str(tmp_path)}),
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
