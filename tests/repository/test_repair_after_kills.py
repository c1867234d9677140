"""One repair cleans up after an operation on worktrees or snapshots that was killed anywhere.

Other sweeps kill these operations at every call and check that nothing is lost. This one kills them at
every second call and checks that `doctor --fix` repairs the result.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.repository.context import MAIN
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.snapshots import SnapshotOptions
from proof.crash import Kill, Outcome, Report, fresh, judge, run_killed
from proof.crash import scratch as swept_directory
from proof.effort import SHARE
from tests.repository.interruptions import SEEN, World, world
from tests.repository.kept import parents_of, require_whole, trees_of
from tests.repository.test_retention_kills import require_repair_converges

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

EVERY, AT_LEAST = (2, 8) if SHARE >= 1 else (10, 3)  # calls between two kills; the fewest kills


@pytest.fixture(scope="module")
def old() -> Iterator[World]:
    with world() as made:
        context = Repository(made.root).context
        context.paths.worktrees.mkdir(exist_ok=True)
        Repository(made.root).worktrees.create("dev", snapshot=made.first)
        (context.paths.payload("dev") / "unsaved").write_text("precious")
        yield made


Operate = Callable[[Repository, World], object]

OPERATIONS: dict[str, Operate] = {
    "snapshot": lambda repository, old: repository.snapshots.take(MAIN, old.proof, SnapshotOptions(tag="v1")),
    "restore in place": lambda repository, old: repository.snapshots.restore_in_place(
        MAIN, old.first, old.proof, RestoreOptions(reason="tested")
    ),
    "restore": lambda repository, old: repository.snapshots.restore(old.first, "new"),
    "rename": lambda repository, old: repository.worktrees.change_name("dev", "new"),
    "remove": lambda repository, old: repository.remove_worktree("dev"),
}


class Killed:
    """One operation on a copy of the world."""

    def __init__(self, old: World, operation: Operate) -> None:
        self.old = old
        self.operation = operation

    def prepare(self, directory: Path) -> None:
        shutil.copytree(self.old.root, directory, symlinks=True, dirs_exist_ok=True)

    def operate(self, directory: Path) -> None:
        self.operation(Repository(directory), self.old)

    def check(self, directory: Path, outcome: Outcome) -> None:
        repository = Repository(directory)
        context = repository.context
        require_repair_converges(repository)
        require_whole(context)
        assert trees_of(context) == set(repository.snapshots.all_ids())
        for config in repository.worktrees.configs():
            parents_of(context, config.head_snapshot_id)
        assert list(context.paths.scratch.iterdir()) == []
        (context.paths.payload(MAIN) / "next").write_text("works")
        repository.snapshots.take(MAIN, self.old.proof)
        assert repository.examine() == []


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sampled(1)
def test_one_repair_cleans_up_after_a_killed_operation(old: World, name: str) -> None:
    scenario, report = Killed(old, OPERATIONS[name]), Report(name)
    with swept_directory() as base:
        index, over = 1, False
        while not over:
            with fresh(base) as directory:
                outcome = run_killed(scenario, directory, Kill.BEFORE, index, names=SEEN)
                report.add(outcome, judge(scenario, directory, outcome), "")
            over, index = outcome.call is None, index + EVERY
    report.require_clean(at_least=AT_LEAST)
