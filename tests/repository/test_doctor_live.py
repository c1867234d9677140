"""The doctor examines a repository in use: work in progress is not damage, and is not repaired."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import LockConflict, NotFound, PartialSnapshot, PlanMismatch, Refused
from holdfast.findings import Severity
from holdfast.repository import gc, gc_plan
from holdfast.repository.context import MAIN, Isolation
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.retention import Policy
from proof.effort import rounds
from tests.locks.race_rounds import delay_calls
from tests.locks.workers import Line, Workers
from tests.repository.kept import line_of, require_whole
from tests.repository.repositories import add_worktree, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

LOOKS = rounds(40)
"""The least number of examinations and repairs; the doctor continues until each worker has succeeded once."""

Act = Callable[[Repository, int], object]


def take(repository: Repository, round_: int) -> None:
    if len(repository.snapshots.all_ids()) > 15:
        return  # let the collector catch up
    (repository.context.paths.payload(MAIN) / "file").write_text(f"{round_}")
    repository.snapshots.take(MAIN, None)


def create_rename_and_remove(repository: Repository, round_: int) -> None:
    repository.worktrees.create("here", snapshot=repository.context.config(MAIN).head_snapshot_id)
    repository.worktrees.change_name("here", "there", force=True)
    repository.remove_worktree("there", force=True)


def restore(repository: Repository, round_: int) -> None:
    head = repository.context.config(MAIN).head_snapshot_id
    assert head is not None
    how = RestoreOptions(reason="tested", allow_shared=True)
    repository.snapshots.restore_in_place("target", head, None, how)


def collect(repository: Repository, round_: int) -> None:
    proposal = gc_plan.propose(repository.context)
    if proposal.stored:
        gc.run(repository.context, proposal.plan.plan_id)


def busy(root: Path, act: Act) -> Callable[[Line], None]:
    """Act again and again; conflicts with other workers are expected."""

    def task(line: Line) -> None:
        delay_calls(most=0.0005)
        repository, round_ = Repository(root), 0
        while not line.has_news():
            try:
                act(repository, round_)
                round_ += 1
            except (LockConflict, NotFound, PartialSnapshot, PlanMismatch, Refused):
                continue
            if round_ == 1:
                line.say("succeeded")
        line.say("ended")

    return task


def test_nothing_is_wrong_with_a_repository_in_use(scratch: Path) -> None:
    root = scratch / "repository"
    repository = make_repository(root, isolation=Isolation.SHARED)
    context = repository.context
    context.paths.worktrees.mkdir()
    add_worktree(context, "target", isolation=Isolation.SHARED)
    line_of(context, 2)
    gc_plan.set_policy(context, Policy(keep_last=3))
    with Workers() as workers:
        crew = [workers.start(busy(root, act)) for act in (take, create_rename_and_remove, restore, collect)]
        looks = 0
        while looks < LOOKS or not all(worker.line.has_news() for worker in crew):
            looks += 1
            wrong = [each for each in repository.examine() if each.severity is not Severity.NOTE]
            assert wrong == []
            repaired = repository.repair()
            assert [each for each in repaired.fixed if each.severity is not Severity.NOTE] == []
        assert [worker.hear() for worker in crew] == ["succeeded"] * len(crew)
        assert [worker.ask("enough") for worker in crew] == ["ended"] * len(crew)
    require_whole(context)
    assert repository.examine(strict=True) == []
