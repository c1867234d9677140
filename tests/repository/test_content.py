"""A plain home whose content is in a content store, on two machines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.repository.context import MAIN, DESCRIPTORS
from tests.repository.machines import Machine
from tests.repository.stages import files_in, put_files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")
FILES = {"README": "read me", "src/a": "a\n" * 9, "src/b": "b\n" * 9, "empty": ""}


@pytest.fixture
def first(scratch: Path, postgres_url: str) -> Machine:
    machine = Machine(scratch / "first")
    machine.create(postgres_url)
    return machine


@pytest.fixture
def second(scratch: Path, first: Machine, postgres_url: str) -> Machine:
    machine = Machine(scratch / "second")
    machine.join(postgres_url, "beta")
    return machine


def findings(machine: Machine) -> list[str]:
    return [str(each) for each in machine.repository.examine()]


def test_a_machine_joins_with_an_empty_directory_and_gets_the_content(first: Machine, second: Machine) -> None:
    taken = first.take(MAIN, FILES)
    repository = second.repository
    assert repository.context.paths.main == "beta"
    assert not repository.context.home.is_here(taken.snapshot_id)
    assert repository.snapshots.named(taken.snapshot_id[:6]).snapshot_id == taken.snapshot_id
    repository.worktrees.create("work", snapshot=taken.snapshot_id)
    assert files_in(repository.path("work")) == FILES
    assert list(repository.snapshots.verify(taken.snapshot_id)) == []
    more = second.take("work", {"src/c": "from the second"})
    assert more.content and more.clone == "beta"
    assert {each.path for each in first.repository.snapshots.compare(MAIN, taken.snapshot_id, more.snapshot_id).changes} >= {b"src/c"}
    assert findings(first) == findings(second) == []
