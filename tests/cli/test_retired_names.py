"""Renamed commands and options: the error names the current one."""

from __future__ import annotations

import pytest

from tests.cli.commands import holdfast


@pytest.mark.parametrize(
    ("retired", "current"),
    [
        ("file-lock run x -- true", "'file-lock' is now 'holdfast lock'."),
        ("claim take 1 --owner me", "'claim' is now 'holdfast ledger claim'."),
        ("lock acquire --ttl 1m", "'acquire' is now 'holdfast lease acquire'."),
        ("lock release", "'release' is now 'holdfast lease release'."),
        ("ledger log --last 3", "There is no option --last: it is now --limit."),
        ("ledger init --dir x", "There is no option --dir: it is now --repo."),
        ("ledger claim 1 --owner me", "There is no option --owner: it is now --actor."),
        ("lock run x --timeout 1s -- true", "There is no option --timeout: it is now --wait."),
        ("run --chdir -- true", "There is no option --chdir: it is now the default"),
        ("lock run x --wait none -- true", "'forever'"),
    ],
)
def test_a_retired_name_gets_a_suggestion(retired: str, current: str) -> None:
    result = holdfast(*retired.split())

    assert result.returncode == 2
    assert current in result.stderr
