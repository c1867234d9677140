"""`holdfast prime`, and how `agent run` tells an agent its work."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from holdfast.repository.opening import open_tracker
from tests.cli.commands import data, envelope, error, holdfast, python

if sys.platform == "win32":
    pytest.skip("needs a POSIX shell", allow_module_level=True)

SHOW = python("import json, sys; print(json.dumps(sys.argv[1:]))")
READ = python(
    "import json, os, stat; path = os.environ['HOLDFAST_PROMPT_FILE'];"
    "print(json.dumps([path, stat.S_IMODE(os.stat(path).st_mode), open(path).read()]))"
)


@pytest.fixture
def root(records: Path, scratch: Path) -> Path:
    open_tracker(records, actor="human:owner").initialise()
    return scratch / "repo"


def create(root: Path, title: str, *options: str) -> str:
    return str(data(holdfast("issue", "create", title, *options, "--json", cwd=root))["id"])


def test_placeholders_are_replaced_and_other_braces_stay(root: Path) -> None:
    issue = create(root, "Count {id} to \x1b 10", "--description", "In the file {worktree}.")

    words = ["{prompt}", "a {title} b", "{id}{id}", "{worktree}", "{}", "{other}", "{{id}}", '{"id": 1}']
    ended = holdfast("agent", "run", "--next", "--", *SHOW, *words, cwd=root)

    prompt, title, *rest = json.loads(ended.stdout)
    assert title == "a Count {id} to \\x1b 10 b"
    worktree = root / "worktrees" / f"issue-{issue[:8]}"
    assert rest == [issue * 2, str(worktree), "{}", "{other}", "{" + issue + "}", '{"id": 1}']
    assert "> In the file {worktree}." in prompt
    assert str(worktree) in prompt


def test_the_prompt_file_is_private_and_gone_at_the_end(root: Path) -> None:
    create(root, "Count")

    ended = holdfast("agent", "run", "--next", "--json", "--", *READ, cwd=root)

    path, mode, text = json.loads(ended.stdout)
    assert (mode, text.count("> Count\n")) == (0o600, 1)
    assert stat.S_IMODE(os.stat(root / ".jvs").st_mode) == 0o700
    assert not Path(path).exists()
    assert envelope(ended.stderr)["data"]["snapshot_id"] is None  # nothing was written to the worktree
    assert holdfast("doctor", "--strict", cwd=root).returncode == 0


@pytest.mark.parametrize("command", [["sh", "-c", "echo {title}"], ["/bin/bash", "-ec", "echo '{prompt}'"]])
def test_a_text_never_becomes_shell_code(root: Path, command: list[str]) -> None:
    create(root, "$(touch planted)")

    refused = holdfast("agent", "run", "--next", "--json", "--", *command, cwd=root)
    passed = holdfast("agent", "run", "--next", "--", "sh", "-c", 'echo "$1"', "sh", "{title}", cwd=root)

    assert error(refused, on="stderr")["code"] == "E_USAGE"
    assert passed.stdout == "$(touch planted)\n"
    assert not list(root.rglob("planted"))


def test_prime_prints_the_claimed_issue_and_without_one_what_is_ready(root: Path) -> None:
    issue = create(root, "Count")
    before = data(holdfast("prime", "--json", cwd=root))
    assert (before["issue_id"], "> " + issue[:8] + " normal: Count" in before["text"]) == (None, True)

    claim = data(holdfast("issue", "claim", issue, "--actor", "agent:a", "--json", cwd=root))["claim_id"]
    create(root, "Another")

    for given in ({"HOLDFAST_ACTOR": "agent:a"}, {"HOLDFAST_CLAIM_ID": claim}, {"HOLDFAST_ISSUE_ID": issue}):
        assert data(holdfast("prime", "--json", cwd=root, env=given))["issue_id"] == issue
    assert data(holdfast("prime", "--json", cwd=root))["issue_id"] is None  # another actor
    text = holdfast("prime", "--issue", issue[:8], cwd=root).stdout
    assert f"'holdfast issue finish {issue[:8]}'" in text
    assert len(holdfast("prime", "--budget", "200", "--issue", issue, cwd=root).stdout.encode()) <= 800


def test_of_several_claims_prime_prints_that_of_the_worktree(root: Path) -> None:
    first, second = create(root, "One"), create(root, "Two")
    for each in (first, second):
        holdfast("issue", "claim", each, "--actor", "agent:a", cwd=root)
    holdfast("worktree", "create", f"issue-{second[:8]}", cwd=root)
    given = {"HOLDFAST_ACTOR": "agent:a"}

    assert data(holdfast("prime", "--json", cwd=root, env=given))["issue_id"] is None
    here = root / "worktrees" / f"issue-{second[:8]}"
    assert data(holdfast("prime", "--json", cwd=here, env=given))["issue_id"] == second


def test_prime_inside_agent_run_prints_the_same_prompt(root: Path) -> None:
    create(root, "Count")
    program = python(
        "import os, subprocess, sys;"
        "told = subprocess.run([sys.executable, '-m', 'holdfast', 'prime'], capture_output=True, text=True).stdout;"
        "sys.exit(told != open(os.environ['HOLDFAST_PROMPT_FILE']).read())"
    )

    assert holdfast("agent", "run", "--next", "--", *program, cwd=root).returncode == 0
