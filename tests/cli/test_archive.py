"""`holdfast ledger archive` and `holdfast audit archive`; what other commands and pages say then."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.ledger.log import EVENTS
from holdfast.repository import metrics
from holdfast.repository.context import DESCRIPTORS
from holdfast.repository.repository import Repository
from holdfast.store.served import ServedStore
from tests.cli.commands import Result, data, error, holdfast
from tests.web.served import Client, serving

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")


class Repo:
    """A repository on a server, with a ledger, a claim and an audit trail."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        assert holdfast("init", root, "--store", address).returncode == 0
        self.ok("ledger", "init")
        self.ok("ledger", "claim", "1.2", "--actor", "alice")
        events = "\n".join(json.dumps({"type": "note", "number": each}) for each in range(20))
        self.ok("ledger", "append", "-", stdin=events)
        for _ in range(5):
            assert self("run", "--", "true").returncode == 0

    def __call__(self, *arguments: str | Path, **options: Any) -> Result:
        return holdfast(*arguments, cwd=self.root, **options)

    def ok(self, *arguments: str | Path, **options: Any) -> Any:
        result = self(*arguments, "--json", **options)
        assert result.returncode == 0, result
        return data(result)

    def refused(self, *arguments: str | Path) -> Any:
        result = self(*arguments, "--json")
        assert result.returncode != 0
        return error(result)


@pytest.fixture(params=["postgresql", "etcd"])
def repo(request: pytest.FixtureRequest, tmp_path: Path) -> Repo:
    return Repo(
        tmp_path / "repo",
        request.getfixturevalue("postgres_url" if request.param == "postgresql" else "etcd_url"),
    )


@pytest.mark.sampled(1)
def test_an_archived_ledger(repo: Repo, tmp_path: Path) -> None:
    to = tmp_path / "new/archive"
    planned = repo.ok("ledger", "archive", "--keep", "10", "--to", to, "--dry-run")
    assert not to.exists()
    assert repo.ok("ledger", "log")["events"][0]["sequence"] == 1
    made = repo.ok("ledger", "archive", "--keep", "10", "--to", to)
    assert made["segments"][0]["sha256"] == planned["segments"][0]["sha256"]
    file = to / "ledger-1-11.jsonl"
    assert [json.loads(line)["sequence"] for line in file.read_text().splitlines()] == list(range(1, 12))
    assert file.stat().st_mode & 0o777 == 0o600

    shown = repo("ledger", "log")
    assert [json.loads(line)["sequence"] for line in shown.stdout.splitlines()] == list(range(12, 22))
    assert "Events 1 to 11 are archived" in shown.stderr
    assert [each["sequence"] for each in repo.ok("ledger", "log", "--limit", "2")["events"]] == [20, 21]
    assert repo.refused("ledger", "log", "--after", "3")["code"] == "E_ARCHIVED"
    assert repo.refused("ledger", "show", "5")["file"] == str(file)
    assert repo("ledger", "show", "5").returncode == 3
    assert repo.refused("ledger", "show", "no-such-id")["code"] == "E_ARCHIVED"
    assert [each["node_id"] for each in repo.ok("ledger", "claims")["active"]] == ["1.2"]
    assert repo("ledger", "claim", "1.2", "--actor", "bob").returncode == 4
    assert "are archived" in repo("ledger", "claim-history", "1.2").stderr
    status = repo.ok("ledger", "status")
    assert (status["sequence"], status["archived"], status["segments"]) == (21, 11, [str(file)])
    assert repo.ok("ledger", "verify")["events"] == 10
    assert repo.ok("ledger", "verify", "--archive", file)["events"] == 21
    assert "There is nothing to archive" in repo("ledger", "archive", "--before", "90d", "--to", to).stdout
    assert repo.refused("ledger", "archive", "--to", to)["code"] == "E_USAGE"
    assert repo.refused("migrate", "--to", "files")["code"] == "E_REFUSED"
    file.write_text(file.read_text().replace("1.2", "1.3"))
    damaged = repo.refused("ledger", "verify", "--archive", file)
    assert [(each["kind"], each["where"]) for each in damaged["findings"]] == [("segment", str(file))]


@pytest.mark.sampled(1)
def test_an_archived_audit_trail(repo: Repo, tmp_path: Path) -> None:
    before = repo.ok("audit", "--verify")
    counted = {each.name: each for each in metrics.measure(Repository(repo.root))}
    count = before["count"]
    file = tmp_path / f"audit-1-{count - 4}.jsonl"
    assert [each["file"] for each in repo.ok("audit", "archive", "--keep", "4", "--to", tmp_path)["segments"]] == [
        str(file)
    ]
    assert [json.loads(line) for line in file.read_text().splitlines()] == before["entries"][:-4]

    after = repo.ok("audit", "--verify")
    assert after["entries"][:4] == before["entries"][-4:]
    assert after["entries"][4]["event"] == "audit_archived"
    assert (after["count"], after["archived"]) == (count + 1, count - 4)
    assert f"Entries 1 to {count - 4} are archived, and were not checked." in repo("audit", "--verify").stdout
    assert [each["number"] for each in repo.ok("audit", "--limit", "2")["entries"]] == [count, count + 1]
    assert repo.ok("audit", "--verify", "--archive", file)["count"] == count + 1
    assert repo.refused("audit", "--archive", file)["code"] == "E_USAGE"
    assert repo("doctor").returncode == 0, repo("doctor")

    name = "holdfast_audit_entries_total"
    again = {each.name: each for each in metrics.measure(Repository(repo.root))}
    assert (
        sum(each.value for each in again[name].samples)
        == count + 1
        == 1 + sum(each.value for each in counted[name].samples)
    )
    (repo.root / ".jvs/cache/metrics.json").unlink()
    from_the_cut = {each.name: each for each in metrics.measure(Repository(repo.root))}
    assert sum(each.value for each in from_the_cut[name].samples) == 5

    file.write_text(file.read_text().replace("lock_acquired", "lock_replaced"))
    assert "was altered" in repo.refused("audit", "--verify", "--archive", file)["message"]


@pytest.mark.sampled(1)
def test_the_doctor_finishes_an_archive_that_was_killed(repo: Repo, tmp_path: Path) -> None:
    from holdfast.repository.ledgers import open_ledger

    with mock.patch.object(ServedStore, "drop"):
        open_ledger(repo.root).archive(tmp_path, keep=5)
    found = repo.refused("doctor")["findings"]
    assert [each["subject"] for each in found if each["code"] == "archive-unfinished"] == [EVENTS.name]
    assert [each["code"] for each in repo.ok("doctor", "--fix")["fixed"]] == ["archive-unfinished"]
    assert repo.refused("ledger", "show", "5")["code"] == "E_ARCHIVED"


def test_a_tree_without_a_descriptor_is_not_removed_if_its_entries_may_be_archived(
    postgres_url: str, tmp_path: Path
) -> None:
    """Its snapshot may have been published: the entry that says so is archived."""
    repo = Repo(tmp_path / "repo", postgres_url)
    (repo.root / "main/file").write_text("x")
    assert repo("run", "--snapshot", "--", "true").returncode == 0
    with Repository(repo.root) as repository:
        ((snapshot, _),) = repository.context.store.scan(DESCRIPTORS)
        tree = repository.context.paths.tree(snapshot)
    lost = tree.with_name("0123456789abcdef")
    shutil.copytree(tree, lost, symlinks=True)
    (lost / ".READY").unlink()

    def codes() -> list[str]:
        return [each["code"] for each in repo.refused("doctor")["findings"] if each["subject"] == lost.name]

    assert codes() == ["tree-orphaned"]
    repo.ok("audit", "archive", "--keep", "1", "--to", tmp_path)
    assert codes() == ["tree-unknown"]


def test_the_pages_show_what_is_not_archived(postgres_url: str, tmp_path: Path) -> None:
    repo = Repo(tmp_path / "repo", postgres_url)
    repo.ok("ledger", "archive", "--keep", "3", "--to", tmp_path)
    repo.ok("audit", "archive", "--keep", "3", "--to", tmp_path)
    with serving([repo.root], tmp_path / "data") as server:
        client = Client(server)
        for page, said in (
            ("ledger", "Events 1 to 18 are archived."),
            ("ledger?before=10", "Events 1 to 18 are archived."),
            ("ledger-check", "Verified: 3 events"),
            ("audit", "are archived."),
            ("audit-check", "The chain is intact"),
            ("timeline", "Timeline"),
        ):
            answer = client.get(f"/r/repo/{page}")
            assert answer.status == 200
            assert said in answer.text, (page, answer.text)


@pytest.mark.parametrize("what", ["ledger", "audit"])
def test_plain_files_are_refused_with_a_reason(tmp_path: Path, what: str) -> None:
    assert holdfast("init", tmp_path / "repo").returncode == 0
    assert holdfast("ledger", "init", cwd=tmp_path / "repo").returncode == 0
    result = holdfast(what, "archive", "--keep", "1", "--to", tmp_path, "--json", cwd=tmp_path / "repo")
    assert result.returncode == 7
    assert "plain files" in error(result)["message"]
    assert "holdfast migrate" in error(result)["hint"]
