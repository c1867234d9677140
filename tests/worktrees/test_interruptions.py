"""Snapshot and restore, killed and failed at every call: history is old or new, and no work is lost."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator

import pytest

from holdfast.testing.crash import Fault
from tests.worktrees.interruptions import World, cases, failed_everywhere, killed_everywhere, world

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="needs fork, and directories that can be exchanged"
)

OPERATIONS = ["snapshot", "restore in place", "restore in place, nothing kept", "restore a path"]


@pytest.fixture(scope="module")
def old() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.mark.req("LC-30", "WT-09")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_at_any_call_leaves_the_old_or_the_new_and_the_next_one_goes_on(old: World, name: str) -> None:
    report = killed_everywhere(cases(old)[name])
    report.require_clean(at_least=20)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_error_at_any_call_leaves_the_old_or_the_new_and_the_next_one_goes_on(
    old: World, name: str
) -> None:
    faults = [Fault(errno.EIO), Fault(errno.ENOSPC, lasting=True), Fault(errno.ENOSPC)]
    report = failed_everywhere(cases(old)[name], faults)
    report.require_clean(at_least=50)
