"""A reader of a snapshot that is being collected sees the right content, or a failure that gives the reason.

Nothing is left to chance: before each call of a reader in turn, a collection advances to a given stage.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.errors import NotFound, Refused, SnapshotCollected
from holdfast.repository import compare, gc, gc_plan
from holdfast.repository.context import MAIN, Isolation, RepositoryContext
from holdfast.repository.history import create_reference, resolve
from holdfast.repository.patches import patches
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.retention import GcPlan, PlanState, Policy
from holdfast.repository.snapshot_service import Snapshots
from proof.interpose import Attempt, interposed
from tests.repository.kept import keep
from tests.repository.repositories import make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="trees need directories that can be opened")


class World(NamedTuple):
    root: Path
    old: str
    plan: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three snapshots, and a plan to collect the middle one, which relinks its child."""
    root = tmp_path_factory.mktemp("world") / "repository"
    context = make_repository(root, isolation=Isolation.SHARED).context
    first = keep(context, {"file": "zero\n"})
    old = keep(context, {"file": "one\n", "other": "same\n"})
    keep(context, {"file": "two\n"})
    gc_plan.set_policy(context, Policy(keep_last=1))
    create_reference(context, "first", first)
    return World(root, old, gc_plan.propose(context).plan.plan_id)


# --- Stages of a collection -------------------------------------------------------------------------


def doom(context: RepositoryContext, plan: GcPlan) -> None:
    gc._mark(context, plan)


def move(context: RepositoryContext, plan: GcPlan) -> None:
    doom(context, plan)
    decided = gc._set_state(context, plan, PlanState.DECIDED, "gc_decided")
    for each in decided.snapshots:
        context.paths.tree(each).rename(context.paths.root / ".jvs" / each)


def finish(context: RepositoryContext, plan: GcPlan) -> None:
    gc.run(context, plan.plan_id)


STAGES: dict[str, Callable[[RepositoryContext, GcPlan], None]] = {
    "doomed": doom,
    "moved": move,
    "finished": finish,
}


# --- Readers ----------------------------------------------------------------------------------------


def diff(context: RepositoryContext, old: str) -> object:
    found = compare.compare(context, MAIN, old, "head")
    return [(each.change.path, each.lines) for each in patches(context, found)]


def diff_worktree(context: RepositoryContext, old: str) -> object:
    return [each.path for each in compare.compare(context, MAIN, old, None).changes]


def verify(context: RepositoryContext, old: str) -> object:
    return list(Snapshots(context).verify(old))


def name(context: RepositoryContext, old: str) -> object:
    """Resolve a prefix, and `head~1`, which is an older snapshot once this one is gone, but never missing."""
    resolve(context, old[:10])
    parent = resolve(context, "head~1").snapshot_id
    return parent == old or parent == resolve(context, "first").snapshot_id


def plan_restore(context: RepositoryContext, old: str) -> object:
    how = RestoreOptions(reason="tested", allow_shared=True)
    return [each.path for each in Snapshots(context).plan(MAIN, old, how).comparison.changes]


READERS = {
    "diff": diff,
    "diff with the worktree": diff_worktree,
    "verify": verify,
    "name": name,
    "plan of a restore": plan_restore,
}
"""`test_collecting_races` covers operations that begin to need a snapshot: restoring it, creating from it."""


class Overtaken:
    """Runs an action once, before the call with this number."""

    def __init__(self, index: int, happen: Callable[[], object]) -> None:
        self.left = index
        self.happen = happen
        self.happened = self.busy = False

    def __call__(self, attempt: Attempt) -> Any:
        if not self.busy and not self.happened:
            self.left -= 1
            if self.left == 0:
                self.busy = self.happened = True
                self.happen()
                self.busy = False
        return attempt.perform()


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.sampled(1)
def test_a_reader_sees_the_right_content_or_a_failure_that_names_the_collection(
    world: World, scratch: Path, reader: str, stage: str
) -> None:
    read, advance = READERS[reader], STAGES[stage]
    shutil.copytree(world.root, scratch / "whole", symlinks=True)
    right = read(Repository(scratch / "whole").context, world.old)
    index, told, seen = 0, 0, 0
    while True:
        index += 1
        root = scratch / "repository"
        shutil.copytree(world.root, root, symlinks=True)
        context, rival = Repository(root).context, Repository(root).context
        plan = gc_plan.plan_of(rival, world.plan)
        overtaken = Overtaken(index, partial(advance, rival, plan))
        try:
            with interposed(overtaken):
                found = read(context, world.old)
            assert found == right, f"before call {index}"
            seen += 1
        except SnapshotCollected:
            told += 1
        except Refused:
            assert reader == "plan of a restore"  # nothing new may depend on a doomed snapshot
            told += 1
        except NotFound:
            assert stage == "finished" or (stage, reader) == ("moved", "name"), f"before call {index}"
            told += 1
        shutil.rmtree(root)
        if not overtaken.happened:
            break
    assert seen >= 1
    assert told >= 1 or stage == "doomed", "no call met the collection"
    assert index >= 10
