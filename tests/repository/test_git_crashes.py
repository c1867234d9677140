"""Operations on linked and isolated worktrees, killed around each git command and at each durable step of our own.

`test_git_kills` kills git along with our process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from proof.crash import kill_points
from proof.effort import SHARE
from tests.repository import test_git_home, test_git_isolated
from tests.repository.stages import LASTING
from tests.repository.test_git_home import Case, kill_at_git_commands
from tests.repository.test_git_home import unprobed as unprobed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

CASES: list[type[Case]] = [*test_git_home.CASES, *test_git_isolated.CASES]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(2)
def test_a_kill_at_any_command_of_git_leaves_the_old_or_the_new(case: type[Case], scratch: Path) -> None:
    assert kill_at_git_commands(case, scratch) > 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1)
def test_a_kill_at_any_durable_step_leaves_the_old_or_the_new(
    case: type[Case], record_property: Callable[[str, object], None]
) -> None:
    report = kill_points(case(), names=LASTING, share=SHARE)
    record_property("points", report.points)
    report.require_clean(at_least=5)
