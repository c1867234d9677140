"""`gc run` and `doctor --fix`, killed at every call that changes the disk.

A repository is built once and copied for each crash point. After each kill, every visible snapshot is whole
and every protected one exists; one repair converges, a second one changes nothing, byte for byte;
and the next operation works.
"""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from holdfast.repository import gc, gc_plan, gc_sweep
from holdfast.repository.context import MAIN, RepositoryContext
from holdfast.repository.history import create_reference
from holdfast.repository.repository import Repository
from holdfast.repository.retention import PlanState, Policy
from holdfast.store.audit import check_chain
from holdfast.store.files import FileStore
from holdfast.trees.shared_dirs import read_shared_directories
from proof.crash import Fault, Kill, Outcome, Report, fresh, judge, run_killed
from proof.crash import scratch as swept_directory
from proof.effort import SHARE
from proof.powercut import power_cuts
from tests.repository import damage
from tests.repository.interruptions import SEEN, failed_everywhere, killed_everywhere
from tests.repository.kept import (
    fingerprint,
    keep,
    line_of,
    parents_of,
    remnants_of,
    require_no_more_than_needed,
    require_whole,
    snapshots_of,
    trees_of,
)
from tests.repository.repositories import add_worktree, make_repository
from tests.repository.stages import files_kept

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def require_repair_converges(repository: Repository) -> None:
    """One repair converges; a second one finds nothing to do and changes nothing."""
    first = repository.repair()
    assert first.failed == (), first.failed
    assert first.remaining == (), first.remaining
    once = fingerprint(repository.root)
    assert repository.repair() == ((), (), ())
    twice = fingerprint(repository.root)
    assert twice == once, {name for name in once.keys() | twice.keys() if once.get(name) != twice.get(name)}
    check_chain(repository.context.store, repository.context.trail)


class World(NamedTuple):
    """The repository that is copied. The plan deletes `going` and keeps `staying`; of `going`, those in `left`
    store directories that others need."""

    root: Path
    plan_id: str = ""
    going: frozenset[str] = frozenset()
    staying: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()


class Copied:
    """A scenario on copies of a world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, directory: Path) -> None:
        shutil.copytree(self.world.root, directory, symlinks=True, dirs_exist_ok=True)

    def operate(self, directory: Path) -> None:
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        repository = Repository(directory)
        assert isinstance(repository.context.store, FileStore)
        with repository.context.store:
            self.judge(repository, outcome)

    def judge(self, repository: Repository, outcome: Outcome) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def make_world() -> Iterator[Callable[[str], Repository]]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=memory) as directory:
        yield lambda name: make_repository(Path(directory) / name / "repository")


# --- gc run -----------------------------------------------------------------------------------------


class CollectionKilled(Copied):
    """A run that deletes four snapshots of two histories, two at a time."""

    def operate(self, directory: Path) -> None:
        gc.BATCH = 2
        gc.run(Repository(directory).context, self.world.plan_id)

    def judge(self, repository: Repository, outcome: Outcome) -> None:
        context, world = repository.context, self.world
        self.require_sound(context)
        if outcome.call is None or outcome.call.index % 2:
            state = gc_plan.plan_of(context, world.plan_id).state
            require_repair_converges(repository)
            gone = frozenset() if state is PlanState.PROPOSED else world.going
            assert snapshots_of(context).keys() == (world.staying | world.going) - gone
            assert trees_of(context) == snapshots_of(context).keys()
            self.require_sound(context)
        done = gc.run(context, world.plan_id)  # resumes, or does nothing
        assert done.plan.state is PlanState.FINISHED
        assert snapshots_of(context).keys() == trees_of(context) == world.staying
        self.require_sound(context)
        require_repair_converges(repository)
        require_no_more_than_needed(context)
        assert remnants_of(context) == world.left
        keep(context, {"next": "works"})
        self.require_sound(context)

    def require_sound(self, context: RepositoryContext) -> None:
        require_whole(context)
        assert are_kept(context, self.world.staying)
        for worktree in (MAIN, "dev"):
            parents_of(context, context.config(worktree).head_snapshot_id)


def are_kept(context: RepositoryContext, snapshot_ids: frozenset[str]) -> bool:
    found = snapshots_of(context)
    return all(each in found and found[each].doomed_by is None for each in snapshot_ids)


def test_a_collection_killed_anywhere_loses_nothing_and_can_be_resumed(
    make_world: Callable[[str], Repository],
) -> None:
    context = make_world("collection").context
    ids = line_of(context, 5, shared=True)
    create_reference(context, "kept", ids[2])
    add_worktree(context, "dev", head=ids[1])
    line_of(context, 2, worktree="dev", shared=True)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    going = frozenset(plan.snapshots)
    assert len(going) == 4
    world = World(context.paths.root, plan.plan_id, going, frozenset(snapshots_of(context)) - going)
    lists = [read_shared_directories(context.paths.tree(each)) for each in world.staying]
    world = world._replace(left=going.intersection(shared.tree for each in lists for shared in each.values()))
    assert len(world.left) >= 2
    report = killed_everywhere(CollectionKilled(world), share=SHARE)
    report.require_clean(at_least=100)


# --- doctor --fix -----------------------------------------------------------------------------------


class RepairKilled(Copied):
    """A repair of every kind of damage that can be repaired."""

    def operate(self, directory: Path) -> None:
        Repository(directory).repair()

    def judge(self, repository: Repository, outcome: Outcome) -> None:
        context = repository.context
        self.require_sound(context)
        require_repair_converges(repository)
        self.require_sound(context)
        assert snapshots_of(context).keys() == trees_of(context)
        keep(context, {"next": "works"})
        assert repository.examine() == []

    def require_sound(self, context: RepositoryContext) -> None:
        require_whole(context)
        assert self.world.staying <= snapshots_of(context).keys()
        assert (context.paths.payload(MAIN) / "unsaved").read_text() == "precious"


ALL_AT_ONCE = [
    damage.decided_collection,
    damage.unfinished_commit,
    damage.unfinished_operation,
    damage.expired_plan,
    damage.abandoned_scratch,
    damage.orphaned_tree,
    damage.useless_remnant,
    damage.old_draft,
    damage.old_probe,
    damage.orphaned_lease,
    damage.expired_lease,
    damage.dead_waiter,
    damage.head_behind,
    damage.dangling_reference,
    damage.dangling_pin,
    damage.undecided_collection,
    damage.readable_to_all,
]


@pytest.mark.req("LC-28")
def test_a_repair_killed_anywhere_loses_nothing_and_the_next_one_completes_it(
    make_world: Callable[[str], Repository],
) -> None:
    repository = make_world("repair")
    context = repository.context
    damage.prepare(context)
    staying = frozenset(snapshots_of(context))
    for plant in ALL_AT_ONCE:
        plant(context)
    (context.paths.payload(MAIN) / "unsaved").write_text("precious")
    codes = {each.code for each in repository.examine()}
    codes |= {"tree-orphaned", "tree-unknown"}  # trees are not judged while an operation is pending
    codes |= {"control-linked"}  # a link would take the place of a directory that is damaged here
    assert codes == {each.code for each in damage.ALL.values() if each.repaired}
    report = killed_everywhere(RepairKilled(World(context.paths.root, staying=staying)), share=SHARE)
    report.require_clean(at_least=100)


# --- A planted bug ----------------------------------------------------------------------------------


def test_the_sweep_finds_a_collection_that_does_not_relink_children(
    make_world: Callable[[str], Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_world("planted").context
    line_of(context, 3)
    gc_plan.set_policy(context, Policy(keep_last=1))
    add_worktree(context, "dev", head=context.config(MAIN).head_snapshot_id)
    plan = gc_plan.propose(context).plan
    going = frozenset(plan.snapshots)
    monkeypatch.setattr(gc, "staying_ancestor", lambda descriptor, going: descriptor.parent_id)
    world = World(context.paths.root, plan.plan_id, going, frozenset(snapshots_of(context)) - going)
    report = Report("planted")
    scenario = CollectionKilled(world)
    with swept_directory() as base, fresh(base) as directory:
        outcome = run_killed(scenario, directory, Kill.BEFORE, 10_000, names=SEEN)
        report.add(outcome, judge(scenario, directory, outcome), "")
    assert len(report.violations) == 1


# --- Power cuts -------------------------------------------------------------------------------------


class CollectionCutByPowerLoss(CollectionKilled):
    """A run that deletes one snapshot, which stores a directory of the other. A disk rebuilt after a power cut
    has no timestamps, so contents are compared, not manifests."""

    def require_sound(self, context: RepositoryContext) -> None:
        found = snapshots_of(context)
        for each in self.world.staying:
            assert found[each].doomed_by is None
            assert files_kept(context.paths.tree(each)) == {
                "file": "new",
                "one/file": "1",
                "one/two/file": "3",
            }
        parents_of(context, context.config(MAIN).head_snapshot_id)
        for each, descriptor in found.items():
            assert descriptor.doomed_by or context.home.is_ready(each)


def power_cut_collection(repository: Repository, *, share: float = 1.0) -> Report:
    context = repository.context
    going = frozenset({keep(context, {"file": "old", "one/file": "1", "one/two/file": "2"}, shared=True)})
    keep(context, {"file": "new", "one/two/file": "3"}, shared=True)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    staying = frozenset(snapshots_of(context)) - going
    world = World(context.paths.root, plan.plan_id, going, staying, left=going)
    return power_cuts(CollectionCutByPowerLoss(world), limit=2, share=share)


def test_a_power_cut_during_a_collection_loses_nothing_and_it_can_be_resumed(
    make_world: Callable[[str], Repository],
) -> None:
    report = power_cut_collection(make_world("power"), share=SHARE)
    assert report.violations == [], str(report)
    assert report.points + report.skipped >= 50


@pytest.mark.long
def test_the_sweep_finds_a_collection_that_does_not_sync_its_renames(
    make_world: Callable[[str], Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_sweep, "durable", SimpleNamespace(sync_names=lambda directory: None))
    assert power_cut_collection(make_world("planted power")).violations


# --- Errors -----------------------------------------------------------------------------------------


def test_a_collection_that_fails_anywhere_loses_nothing_and_can_be_resumed(
    make_world: Callable[[str], Repository],
) -> None:
    context = make_world("errors").context
    line_of(context, 2)
    add_worktree(context, "dev", head=context.config(MAIN).head_snapshot_id)
    gc_plan.set_policy(context, Policy(keep_last=1))
    plan = gc_plan.propose(context).plan
    going = frozenset(plan.snapshots)
    world = World(context.paths.root, plan.plan_id, going, frozenset(snapshots_of(context)) - going)
    faults = [Fault(errno.EIO), Fault(errno.ENOSPC, lasting=True), Fault(errno.ENOSPC)]
    failed_everywhere(CollectionKilled(world), faults, share=SHARE).require_clean(at_least=50)
