"""Two machines share a plain home through a content store: each has its own directory, data directory and processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Result, holdfast
from tests.support.s3 import S3Server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")


class Machine:
    """A directory, and a data directory for approvals, of one machine."""

    def __init__(self, scratch: Path, name: str, **variables: str) -> None:
        self.root = scratch / name / "project"
        self.root.parent.mkdir()
        self._variables = {"HOLDFAST_DATA_DIR": str(scratch / name / "data"), **variables}

    def try_run(self, *words: str | Path) -> Result:
        where = self.root if self.root.exists() else self.root.parent
        return holdfast(*words, env=self._variables, cwd=where)

    def run(self, *words: str | Path) -> Any:
        done = self.try_run(*words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["data"]

    def snapshot(self, worktree: str) -> None:
        done = self.try_run("run", "--snapshot", "--worktree", worktree, "--", "true")
        assert done.returncode == 0, done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["postgres", "s3"])
def test_two_machines_work_on_one_plain_home(
    kind: str, scratch: Path, postgres_url: str, request: pytest.FixtureRequest
) -> None:
    secrets, content = {}, "postgres:"
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        content = server.bucket()
        secrets = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "never shown"}
    one, other = Machine(scratch, "one", **secrets), Machine(scratch, "other", **secrets)
    made = one.run("init", one.root, "--store", postgres_url, "--content", content)
    assert (made["content"], one.run("init", one.root, "--content", content)["created"]) == (content, False)
    (one.root / "main/README").write_text("from the first machine")
    one.snapshot("main")

    joined = other.run("join", postgres_url, other.root, "--name", "beta")
    assert (joined["joined"], joined["checkout"]) == (True, str(other.root / "worktrees/beta"))
    if kind == "s3":
        refused = other.try_run("worktree", "create", "work", "--from", "main:head")
        assert refused.returncode == 7
        assert "never shown" not in refused.stderr
        assert other.run("trust", "--yes")["content"] == content
    other.run("worktree", "create", "work", "--from", "main:head")
    readme = other.root / "worktrees/work/README"
    assert readme.read_text() == "from the first machine"

    readme.write_text("from the second machine")
    other.snapshot("work")
    assert "+from the second machine" in one.try_run("diff", "--patch", "main:head", "work:head").stdout
    assert [each["code"] for each in other.run("doctor")["findings"]] == []
    assert one.try_run("worktree", "create", "work").returncode == 4
    files = [*one.root.rglob("*.json"), *other.root.rglob("*.json")]
    assert all("never shown" not in each.read_text() for each in files)


def test_a_content_store_is_refused_where_it_has_no_use(scratch: Path) -> None:
    machine = Machine(scratch, "one")
    for words in (["--content", "postgres:"], ["--content", "s3://key:secret@bucket"]):
        done = machine.try_run("init", machine.root, *words)
        assert done.returncode != 0
        assert "secret" not in done.stderr
    assert not machine.root.exists()
