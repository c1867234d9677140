"""Every command ends within the documented limit on a server that is stopped, and says that it does not answer."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from holdfast.repository.init import initialise
from holdfast.store.served import TIMEOUT
from tests.cli.commands import HOLDFAST, data, environment, holdfast

pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems"),
]

LIMIT = TIMEOUT + 2.0  # as docs/how-to/many-machines.md has it
AT_ONCE, START = 6, 3.0  # so many interpreters start meanwhile
COMMANDS = """
run -- true|worktree list|worktree create other|lease acquire|lease status|snapshot|history|status|verify
restore head|ref list|ref create name head|pin list|gc plan|audit|audit --verify|who|guard main/file|trust --yes
worktree remove work|lease release --lock-id x|agent run --next -- true|issue list|issue create Title|issue claim-next
issue claim ISSUE|ready|blocked|events|graph|prime|issue validate|ledger append {"type":"x"}|ledger log|ledger verify
ledger claim 1 --actor agent:a|migrate --to files|dep add ISSUE ISSUE|gate list|export head ../out|conflicts
"""


def run(root: Path, line: str) -> tuple[str, float, str]:
    """Run a command; how long it took, and what it said."""
    began = time.monotonic()
    words = [*HOLDFAST, *line.split()]
    done = subprocess.run(words, cwd=root, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    return line, time.monotonic() - began, done.stderr


@pytest.mark.parametrize("kind", ["postgres", "etcd"])
def test_every_command_ends_in_time(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    server, url = (request.getfixturevalue(f"{kind}_{each}") for each in ("server", "url"))
    root = tmp_path / "repository"
    initialise(root, store=url)
    (root / "main" / "file").write_text("content")
    for command in ("issue init", "ledger init", "worktree create work", "snapshot"):
        run(root, command)
    issue = data(holdfast("issue", "create", "Title", "--json", cwd=root))["id"]
    lines = [each.replace("ISSUE", issue) for each in COMMANDS.replace("\n", "|").split("|") if each]
    server.pause()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(partial(run, root), lines))
    finally:
        server.resume()
    assert {line: seconds for line, seconds, _ in results if seconds > LIMIT + START} == {}
    assert {line: said for line, _, said in results if "cannot be reached" not in said} == {}
