"""The same commands on files, on PostgreSQL and on etcd: the same things happen, from end to end."""

from __future__ import annotations

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

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


class Shop:
    """A repository whose records are in one of the stores."""

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
def shop(tmp_path: Path, store_url: str) -> Shop:
    root = tmp_path / "shop"
    made = data(holdfast("init", root, "--store", store_url, "--json"))
    assert made["created"] is True
    return Shop(root, store_url)


@pytest.mark.sampled(1)
def test_leases_worktrees_and_snapshots(shop: Shop) -> None:
    lease = shop.ok("lease", "acquire", "--ttl", "1h", "--holder-pid", "1")
    assert shop.refused("lease", "acquire") == "E_LOCK_CONFLICT"
    (shop.root / "main/a.txt").write_text("one")
    own = {"HOLDFAST_LOCK_ID": lease["lock_id"]}
    first = shop.ok("snapshot", "-m", "first", env=own)["snapshot_id"]
    (shop.root / "main/a.txt").write_text("two")
    assert shop.refused("snapshot", "--lock-id", "00000000-0000-0000-0000-000000000000") == "E_FENCING_MISMATCH"
    shop.ok("snapshot", "-m", "second", "--tag", "good", env=own)
    shop.ok("lease", "release", env=own)
    again = shop.ok("lease", "acquire", "--ttl", "1h")
    assert again["token"] > lease["token"]
    shop.ok("lease", "release", "--lock-id", again["lock_id"])

    assert [each["note"] for each in shop.ok("history")["snapshots"]] == ["second", "first"]
    shop.ok("worktree", "create", "copy", "--from", first[:6])
    assert (shop.root / "worktrees/copy/a.txt").read_text() == "one"
    shop.ok("worktree", "rename", "copy", "other")
    shop.ok("restore", "good", "--worktree", "other", "--inplace", "--reason", "back to the good one")
    assert (shop.root / "worktrees/other/a.txt").read_text() == "two"
    shop.ok("worktree", "remove", "other")
    assert shop("audit", "--verify").returncode == 0
    assert shop("doctor", "--strict").returncode == 0, shop("doctor", "--strict")


@pytest.mark.sampled(1)
def test_a_command_under_the_lease_and_one_that_loses_it(shop: Shop) -> None:
    with Running("run", "--repo", shop.root, "--ttl", "1h", "--", "sleep", "99") as run:
        wait_until(lambda: shop.ok("lease", "status")["state"] == "leased")
        held = shop.ok("lease", "status")["lease"]
        assert shop.refused("lease", "steal") == "E_LOCK_CONFLICT"
        run.send(15)
        run.finish()
    assert shop.ok("lease", "status")["state"] == "free"
    assert shop.refused("lease", "renew", "--lock-id", held["lock_id"]) == "E_LOCK_NOT_HELD"


@pytest.mark.sampled(1)
def test_the_ledger_and_its_claims(shop: Shop) -> None:
    shop.ok("ledger", "init")
    assert shop.ok("ledger", "append", '{"type":"note"}')["sequence"] == 1
    assert shop.refused("ledger", "append", '{"type":"note"}', "--if-sequence", "0") == "E_SEQUENCE_MISMATCH"
    claim = shop.ok("ledger", "claim", "1.2", "--actor", "alice")
    assert shop("ledger", "claim", "1.2", "--actor", "bob").returncode == 4
    assert claim["actor"] == "alice"
    shop.ok("ledger", "release", "1.2", "--actor", "alice")
    shop.ok("ledger", "claim", "1.2", "--actor", "bob")
    assert shop("ledger", "verify").returncode == 0


@pytest.mark.sampled(1)
def test_issues_with_dependencies_gates_and_agents(shop: Shop) -> None:
    shop.ok("issue", "init")
    shop.ok("ledger", "init")
    shop.ok("gate", "define", "review", "--title", "Review")
    first = shop.ok("issue", "create", "First")["id"]
    second = shop.ok("issue", "create", "Second", "--depends-on", first, "--gate", "review")["id"]
    assert shop("dep", "add", first, second).returncode != 0  # a cycle
    write = python("open('out', 'w').write('done')")
    told = shop("agent", "run", "--next", "--actor", "agent:a", "--json", "--", *write)
    assert envelope(told.stderr)["data"]["issue_id"] == first
    shop("agent", "run", "--next", "--actor", "agent:a", "--gate", "review", "--", *write)
    states = {each["id"]: each["state"] for each in shop.ok("issue", "list")["issues"]}
    assert states == {first: "done", second: "done"}
    assert shop.ok("who")["holdings"] == []


@pytest.mark.sampled(1)
def test_everything_moves_from_files_to_the_store_and_back(shop: Shop, tmp_path: Path) -> None:
    (shop.root / "main/a.txt").write_text("one")
    assert shop("run", "--snapshot", "-m", "kept", "--", "true").returncode == 0
    before = shop.ok("history")
    other = (tmp_path / "elsewhere").as_uri()

    shop.ok("migrate", "--to", other)
    assert shop.ok("history") == before
    shop.ok("migrate", "--to", shop.address, "--overwrite")

    assert shop.ok("history") == before


@pytest.mark.sampled(1)
@pytest.mark.long
def test_the_demo_passes_on_it(shop: Shop, tmp_path: Path, store_url: str) -> None:
    if store_url.startswith("file:"):
        pytest.skip("tests/cli/test_demo.py plays it on files")
    address = f"{store_url}demo" if "?" in store_url else f"{store_url}/demo"
    options = ("--workers", "3", "--issues", "6", "--store", address, "--json")
    result = subprocess.run(
        [*HOLDFAST, "demo", *options],
        capture_output=True,
        text=True,
        env=environment({"TMPDIR": str(tmp_path)}),
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
