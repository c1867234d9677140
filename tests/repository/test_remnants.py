"""Collection of snapshots whose directories other snapshots share: the rest stays whole, nothing unneeded stays."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.errors import Corrupt, Failure, LockConflict, PlanMismatch, Refused
from holdfast.repository import compare, exchange, gc, gc_plan, gc_sweep, snapshots, worktree_changes
from holdfast.repository import payloads as scratches
from holdfast.repository import restore as repository_restore
from holdfast.repository.context import MAIN, Isolation, RepositoryContext
from holdfast.repository.history import add_pin, create_reference, pins, remove_pin
from holdfast.repository.patches import patches
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions, restore_in_place
from holdfast.repository.retention import Policy
from holdfast.repository.snapshot_service import Snapshots
from holdfast.repository.snapshots import SnapshotOptions, snapshot
from holdfast.store.model import Store
from holdfast.trees import shared_dirs
from holdfast.trees.restore import materialise
from holdfast.trees.shared_dirs import SharedDirectory, read_shared_directories, write_shared_directories
from proof.effort import until
from proof.interpose import Attempt, interposed
from tests.locks.race_rounds import delay_calls
from tests.locks.workers import Line, Workers
from tests.repository.kept import (
    fingerprint,
    keep,
    line_of,
    remnants_of,
    require_no_more_than_needed,
    require_whole,
    snapshots_of,
    trees_of,
)
from tests.repository.repositories import add_worktree, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="trees need directories that can be opened")


@pytest.fixture
def context(scratch: Path) -> RepositoryContext:
    context = make_repository(scratch / "repository", isolation=Isolation.SHARED).context
    gc_plan.set_policy(context, Policy(keep_last=1))
    return context


def collect(context: RepositoryContext) -> tuple[str, ...]:
    """Collect everything that is not protected."""
    proposal = gc_plan.propose(context)
    return gc.run(context, proposal.plan.plan_id).snapshots if proposal.stored else ()


def used(places: list[Path]) -> int:
    """Disk usage below these directories, each inode counted once, excluding the directories themselves."""
    if sys.platform == "win32":
        raise NotImplementedError
    found: dict[int, int] = {}
    for top in places:
        for directory, _, files in os.walk(top):
            for path in [Path(directory), *(Path(directory) / name for name in files)]:
                status = path.lstat()
                found[status.st_ino] = status.st_blocks * 512 if path not in places else 0
    return sum(found.values())


# --- Random histories -------------------------------------------------------------------------------


class Histories:
    """Two histories of random snapshots, in which directories are created, changed, moved and removed."""

    def __init__(self, context: RepositoryContext, chance: random.Random) -> None:
        self.context = context
        self.chance = chance
        self.held: dict[str, dict[str, str]] = {}

    def grow(self) -> None:
        worktree = self.chance.choice([MAIN, "dev"])
        top = self.context.paths.payload(worktree)
        for _ in range(self.chance.randrange(3)):
            self._change(top)
        taken = keep(self.context, {}, worktree=worktree, shared=True)
        self.held[taken] = fingerprint(top)

    def _change(self, top: Path) -> None:
        directories = [path for path in top.rglob("*") if path.is_dir()]
        one = self.chance.choice([top, *directories])
        what = self.chance.randrange(5)
        if what == 0 and one != top:
            shutil.rmtree(one)
        elif what == 1 and one != top and not (top / one.name).exists():
            one.rename(top / one.name)
        elif what == 2 and one != top:
            (one / "file").write_text(str(self.chance.random()))
        else:
            new = one / f"d{self.chance.randrange(100)}" / "below"
            new.mkdir(parents=True, exist_ok=True)
            for directory in (new, new.parent):
                (directory / "file").write_text(str(self.chance.random()) * self.chance.randrange(1, 500))

    def protect(self) -> None:
        """Remove all pins, and pin a random selection."""
        for pin in pins(self.context):
            remove_pin(self.context, pin.pin_id)
        alive = sorted(snapshots_of(self.context))
        for each in self.chance.sample(alive, self.chance.randrange(len(alive) // 2 + 1)):
            add_pin(self.context, each)


@pytest.mark.req("WT-11")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(1)
def test_after_any_collection_the_rest_is_whole_and_nothing_unneeded_is_left(
    context: RepositoryContext, scratch: Path, seed: int
) -> None:
    add_worktree(context, "dev", isolation=Isolation.SHARED)
    chance = random.Random(seed)
    histories = Histories(context, chance)
    shared = 0
    for generation in range(5):
        for _ in range(chance.randrange(2, 6)):
            histories.grow()
        histories.protect()
        policy = chance.choice([Policy(keep_last=1), Policy(keep_last=2), Policy(max_bytes=50_000)])
        gc_plan.set_policy(context, policy)
        proposal = gc_plan.propose(context)
        if not proposal.stored:
            continue
        places = [context.paths.snapshots, context.paths.remnants]
        before = used(places)
        gc.run(context, proposal.plan.plan_id)
        assert before - used(places) == proposal.plan.bytes
        require_whole(context)
        require_no_more_than_needed(context)
        assert trees_of(context) == snapshots_of(context).keys()
        assert list(context.paths.scratch.iterdir()) == []
        for each in trees_of(context):
            restored = scratch / f"{generation}-{each}"
            materialise(context.paths.tree(each), restored)
            assert fingerprint(restored) == histories.held[each]
        shared += len(remnants_of(context))
    assert shared > 0, "nothing was shared"
    assert Repository(context.paths.root).examine(strict=True) == []


def test_a_remnant_goes_with_the_last_snapshot_that_needs_it(context: RepositoryContext) -> None:
    ids = line_of(context, 4, shared=True)
    collect(context)
    assert remnants_of(context)
    shutil.rmtree(context.paths.payload(MAIN))
    context.paths.payload(MAIN).mkdir()
    last = keep(context, {"file": "nothing else"}, shared=True)
    plan = gc_plan.propose(context).plan
    places = [context.paths.snapshots, context.paths.remnants]
    before = used(places)
    gc.run(context, plan.plan_id)
    assert before - used(places) == plan.bytes
    assert (remnants_of(context), trees_of(context)) == (set(), {last})
    assert ids[0] not in snapshots_of(context)


def test_shared_directories_count_towards_the_budget_but_not_as_freed_bytes(context: RepositoryContext) -> None:
    keep(context, {"large/file": "x" * 400_000, "file": "1"}, shared=True)
    keep(context, {"file": "2"}, shared=True)
    keep(context, {"file": "3"}, shared=True)
    gc_plan.set_policy(context, Policy(max_bytes=100_000))
    proposal = gc_plan.propose(context)
    assert len(proposal.plan.snapshots) == 2
    assert proposal.plan.bytes < 100_000
    assert proposal.over_budget > 250_000
    gc.run(context, proposal.plan.plan_id)
    assert gc_plan.propose(context).total_bytes >= 400_000


def test_a_shared_directory_stays_shared_after_its_tree_is_trimmed(context: RepositoryContext) -> None:
    """Trimming preserves its timestamp; otherwise the next snapshot would store it again."""
    first, *_ = line_of(context, 3, shared=True)
    collect(context)
    assert first in remnants_of(context)
    newest = keep(context, {"file": "another"}, shared=True)
    assert first in {each.tree for each in read_shared_directories(context.paths.tree(newest)).values()}


def test_a_tree_restored_from_a_backup_is_collected_again(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    shutil.copytree(context.paths.tree(ids[0]), context.paths.root / "copy", symlinks=True)
    collect(context)
    assert ids[0] in remnants_of(context)
    (context.paths.root / "copy").rename(context.paths.tree(ids[0]))
    gc_sweep.retire(context, [ids[0]])
    gc_sweep.sweep(context)
    require_whole(context)
    require_no_more_than_needed(context)
    assert trees_of(context) == {ids[2]}


@pytest.mark.req("WT-11")
@pytest.mark.parametrize("damage", ["empty", "some files", "no manifest"])
def test_a_tree_partly_restored_from_a_backup_does_not_replace_its_remnant(
    context: RepositoryContext, damage: str
) -> None:
    """Copying it back was interrupted; its remnant is the only copy of the directories that others need."""
    ids = line_of(context, 3, shared=True)
    tree, copy = context.paths.tree(ids[0]), context.paths.root / "copy"
    shutil.copytree(tree, copy, symlinks=True)
    collect(context)
    if damage == "empty":
        shutil.rmtree(copy)
        copy.mkdir()
    else:
        for path in (copy / "payload").rglob("file"):
            path.unlink()
    if damage == "no manifest":
        (copy / "manifest").unlink()
    copy.rename(tree)
    repository = Repository(context.paths.root)
    repository.repair()
    assert repository.examine(strict=True) == []
    assert trees_of(context) == {ids[2]}
    require_whole(context)
    require_no_more_than_needed(context)


def test_a_tree_that_became_a_snapshot_again_replaces_its_remnant(
    context: RepositoryContext,
) -> None:
    """A directory that was only the parent of a needed one is needed itself by then."""
    first = keep(context, {"d/file": "1", "d/below/file": "1"}, shared=True)
    shutil.copytree(context.paths.tree(first), context.paths.root / "copy", symlinks=True)
    second = keep(context, {"d/file": "2", "file": "2"}, shared=True)
    assert read_shared_directories(context.paths.tree(second)) == {b"d/below": SharedDirectory(first, b"d/below")}
    collect(context)
    (context.paths.root / "copy").rename(context.paths.tree(first))
    shutil.copytree(context.paths.tree(second), context.paths.tree("0" * 16), symlinks=True)
    (context.paths.tree("0" * 16) / "homes").unlink()
    write_shared_directories(
        context.paths.tree("0" * 16),
        [(b"d/below", SharedDirectory(first, b"d/below")), (b"d", SharedDirectory(first, b"d"))],
    )
    gc_sweep.retire(context, [first])
    gc_sweep.sweep(context)
    assert (context.paths.remnants / first / "payload" / "d" / "file").read_text() == "1"
    require_whole(context)
    require_no_more_than_needed(context)


def test_a_tree_and_its_remnant_both_stay_if_neither_has_all_that_is_needed(
    context: RepositoryContext,
) -> None:
    ids = line_of(context, 3, shared=True)
    shutil.copytree(context.paths.tree(ids[0]), context.paths.root / "copy", symlinks=True)
    collect(context)
    kept = "main-0/kept/file"
    for top in (context.paths.root / "copy", context.paths.remnants / ids[0]):
        (top / "payload" / kept).unlink()
    (context.paths.root / "copy").rename(context.paths.tree(ids[0]))
    with pytest.raises(Refused, match="neither"):
        gc_sweep.retire(context, [ids[0]])
    assert ids[0] in trees_of(context) & remnants_of(context)


# --- Damaged lists of shared directories ------------------------------------------------------------


def damage_list(context: RepositoryContext, snapshot_id: str, *, lost: bool = False) -> None:
    where = context.paths.tree(snapshot_id) / "homes"
    where.chmod(0o600)
    if lost:
        where.unlink()
    else:
        where.write_bytes(where.read_bytes()[:-3])


@pytest.mark.parametrize("how", ["cut off", "lost", "lost after a restore"])
def test_nothing_is_deleted_while_the_list_of_one_tree_is_damaged(context: RepositoryContext, how: str) -> None:
    ids = line_of(context, 4, shared=True)
    if how == "lost after a restore":
        restore_in_place(context, MAIN, ids[1], None, RestoreOptions(reason="tested", allow_shared=True))
        ids.append(str(context.config(MAIN).head_snapshot_id))
    plan = gc_plan.propose(context).plan
    damage_list(context, ids[-1], lost=how != "cut off")
    before = fingerprint(context.paths.root)
    with pytest.raises(Corrupt, match="homes"):
        gc.run(context, plan.plan_id)
    with pytest.raises(Corrupt, match="homes"):
        gc_plan.propose(context)
    after = {name: what for name, what in fingerprint(context.paths.root).items() if "guards" not in name}
    assert after.items() <= before.items()
    codes = {each.code for each in Repository(context.paths.root).examine()}
    assert codes == {"snapshot-damaged"}


def test_a_list_damaged_after_the_decision_stops_only_the_sweep(context: RepositoryContext) -> None:
    ids = line_of(context, 4, shared=True)
    plan = gc_plan.propose(context).plan
    whole = (context.paths.tree(ids[-1]) / "homes").read_bytes()
    retire = gc_sweep.retire
    repository = Repository(context.paths.root)

    def late(context: RepositoryContext, snapshot_ids: Any) -> None:
        retire(context, snapshot_ids)
        damage_list(context, ids[-1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc_sweep, "retire", late)
        with pytest.raises(Corrupt):
            gc.run(context, plan.plan_id)
    assert remnants_of(context) == set(ids[:-1])
    assert repository.repair().failed  # reports the damage, and changes nothing
    assert remnants_of(context) == set(ids[:-1])
    (context.paths.tree(ids[-1]) / "homes").write_bytes(whole)
    gc.run(context, plan.plan_id)
    require_whole(context)
    require_no_more_than_needed(context)
    assert repository.examine() == []


def test_a_snapshot_with_a_damaged_list_can_itself_be_collected(context: RepositoryContext) -> None:
    ids = line_of(context, 4, shared=True)
    damage_list(context, ids[2])
    collect(context)
    require_whole(context)
    require_no_more_than_needed(context)
    assert trees_of(context) == {ids[3]}


# --- Unpublished trees ------------------------------------------------------------------------------


def unpublished_tree(context: RepositoryContext, stored_in: str, path: bytes) -> Path:
    """A complete tree that its process has not published yet."""
    tree = context.paths.scratch / "0123456789abcdef" / "tree"
    (tree / "payload").mkdir(parents=True)
    write_shared_directories(tree, [(path, SharedDirectory(stored_in, path))])
    (tree / ".READY").touch()
    return tree


def require_kept_for(context: RepositoryContext, tree: Path) -> None:
    for each in read_shared_directories(tree).values():
        kept = context.paths.remnants / each.tree / "payload" / os.fsdecode(each.path)
        assert kept.is_dir(), "a needed directory is gone"


def test_directories_that_an_unpublished_tree_needs_stay(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    tree = unpublished_tree(context, ids[0], b"main-0/lost")
    collect(context)
    require_kept_for(context, tree)
    repository = Repository(context.paths.root)
    assert {each.code for each in repository.examine()} == {"scratch-abandoned"}
    repository.repair()  # its process is dead, so nothing is needed any more
    assert repository.examine() == []
    require_no_more_than_needed(context)


def test_directories_that_a_quarantined_tree_needs_stay(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    tree = unpublished_tree(context, ids[0], b"main-0/lost")
    context.paths.quarantine.mkdir()
    tree = tree.rename(context.paths.quarantine / "0123456789abcdef")
    shutil.rmtree(context.paths.scratch)
    collect(context)
    require_kept_for(context, tree)
    assert Repository(context.paths.root).examine() == []


# --- The doctor -------------------------------------------------------------------------------------


def test_a_tree_without_a_descriptor_is_kept_while_others_need_it(
    context: RepositoryContext,
) -> None:
    """An unknown tree stays in place; an orphaned one becomes a remnant."""
    ids = line_of(context, 3, shared=True)
    repository = Repository(context.paths.root)
    unknown = "0123456789abcdef"
    needing = context.paths.tree(ids[2]) / "homes"
    shared = read_shared_directories(context.paths.tree(ids[2]))
    needing.unlink()
    write_shared_directories(
        context.paths.tree(ids[2]),
        [(path, SharedDirectory(unknown, each.path) if each.tree == ids[0] else each) for path, each in shared.items()],
    )
    shutil.copytree(context.paths.tree(ids[0]), context.paths.tree(unknown), symlinks=True)
    (found,) = repository.examine()
    assert (found.code, found.fix) == ("tree-unknown", None)
    assert repository.repair().fixed == ()
    require_whole(context)
    context.paths.scratch.mkdir(exist_ok=True)
    (context.paths.scratch / unknown).mkdir()  # now it is known to be an orphan: its process died before publishing it
    (found,) = repository.examine()
    assert (found.code, "need" in found.remedy) == ("tree-orphaned", True)
    assert repository.repair().remaining == ()
    assert remnants_of(context) == {unknown}
    require_whole(context)
    require_no_more_than_needed(context)
    once = fingerprint(context.paths.root)
    assert repository.repair() == ((), (), ())
    assert fingerprint(context.paths.root) == once


def test_a_lost_remnant_is_reported_as_damage(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    collect(context)
    assert ids[0] in remnants_of(context)
    (context.paths.remnants / ids[0]).rename(context.paths.root / "away")
    (found,) = Repository(context.paths.root).examine()
    assert (found.code, found.subject) == ("snapshot-damaged", ids[2])
    assert ids[0] in found.message
    assert found.fix is None


def test_the_doctor_does_not_report_the_pending_work_of_a_running_collection(
    context: RepositoryContext,
) -> None:
    ids = line_of(context, 3, shared=True)
    with gc.collector_locked(context):
        gc_sweep.retire(context, [ids[0]])
        codes = {each.code for each in Repository(context.paths.root).examine()}
    assert "remnant-excessive" not in codes


# --- Readers of the remaining snapshots -------------------------------------------------------------


class Overtaken:
    """Runs an action once, before the call with this number."""

    def __init__(self, index: int, happen: Callable[[], object]) -> None:
        self.left, self.happen = index, happen
        self.busy = False

    def __call__(self, attempt: Attempt) -> Any:
        if not self.busy and self.left > 0:
            self.left -= 1
            if self.left == 0:
                self.busy = True
                self.happen()
                self.busy = False
        return attempt.perform()


def verify(context: RepositoryContext, snapshot_id: str) -> object:
    return list(Snapshots(context).verify(snapshot_id))


def restore(context: RepositoryContext, snapshot_id: str) -> object:
    into = context.paths.root / "restored"
    materialise(context.paths.tree(snapshot_id), into)
    return fingerprint(into)


def diff(context: RepositoryContext, snapshot_id: str) -> object:
    found = compare.compare(context, MAIN, "first", snapshot_id)
    return [(each.change.path, each.lines) for each in patches(context, found)]


def examine(context: RepositoryContext, snapshot_id: str) -> object:
    codes = {each.code for each in Repository(context.paths.root).examine()}
    return codes - {"collection-unfinished"}


READERS = {"verify": verify, "restore": restore, "diff": diff, "doctor": examine}


class Sharing(NamedTuple):
    root: Path
    head: str
    plan: str


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    """A head that shares directories with two trees that may be collected."""
    root = tmp_path_factory.mktemp("sharing") / "repository"
    context = make_repository(root, isolation=Isolation.SHARED).context
    ids = [
        keep(context, {"a": "0", "one/file": "1", "one/two/file": "2"}, shared=True),
        keep(context, {"a": "1", "three/file": "3"}, shared=True),
        keep(context, {"a": "2"}, shared=True),
        keep(context, {"a": "3"}, shared=True),
    ]
    gc_plan.set_policy(context, Policy(keep_last=1))
    create_reference(context, "first", ids[0])
    return Sharing(root, ids[3], gc_plan.propose(context).plan.plan_id)


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.sampled(1)
def test_a_reader_of_the_head_never_notices_that_its_shared_directories_move(
    sharing: Sharing, scratch: Path, reader: str
) -> None:
    step = 4 if reader == "doctor" else 1  # it makes many unrelated calls
    assert len(overtaken(sharing, scratch, READERS[reader], step)) == 1


def overtaken(
    sharing: Sharing, scratch: Path, read: Callable[[RepositoryContext, str], object], step: int = 1
) -> list[object]:
    """Run a collection before each call of a reader in turn; return the distinct results of the reader."""
    seen: list[object] = []
    index, over = 0, False
    while not over:
        index += step
        root = scratch / "repository"
        shutil.copytree(sharing.root, root, symlinks=True)
        context, rival = Repository(root).context, Repository(root).context
        rule = Overtaken(index, partial(gc.run, rival, sharing.plan))
        try:
            with interposed(rule, ["open", "open_without_links", "stat", "scandir"]):
                found = read(context, sharing.head)
        except Failure as failure:
            found = failure.code
        if found not in seen:
            seen.append(found)
        over = rule.left > 0
        shutil.rmtree(root)
    assert index > 10
    return seen


@pytest.mark.long
def test_a_reader_that_checks_where_a_tree_is_before_opening_it_is_found(
    sharing: Sharing, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: the tree may move between the check and the open."""

    def looked_up(tree: Path, name: str) -> tuple[Path, ...]:
        return (shared_dirs.tree_beside(tree, name),)

    def tree_beside(tree: Path, name: str) -> Path:
        beside = tree.parent / name
        return beside if beside.is_dir() else tree.parent.parent / "remnants" / name

    monkeypatch.setattr(shared_dirs, "tree_beside", tree_beside)
    monkeypatch.setattr(shared_dirs, "places_beside", looked_up)
    assert len(overtaken(sharing, scratch, verify)) > 1


# --- Operations that begin to share directories -----------------------------------------------------


class Begun(NamedTuple):
    root: Path
    old: str


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """Two snapshots, the second of which shares a directory with the first."""
    root = tmp_path_factory.mktemp("begun") / "repository"
    context = make_repository(root, isolation=Isolation.SHARED).context
    old = keep(context, {"a": "0", "one/file": "1", "one/two/file": "2"}, shared=True)
    keep(context, {"a": "1", "three/file": "3"}, shared=True)
    gc_plan.set_policy(context, Policy(keep_last=1))
    return Begun(root, old)


def take(context: RepositoryContext, old: str) -> None:
    snapshot(context, MAIN, None, SnapshotOptions(note="taken"))


def put_back(context: RepositoryContext, old: str) -> None:
    how = RestoreOptions(reason="tested", allow_shared=True, keep=False, force=True)
    restore_in_place(context, MAIN, old, None, how)


TOO_LATE = ("", "E_REFUSED", "E_NOT_FOUND", "E_SNAPSHOT_COLLECTED")
"""The results that a restore of a snapshot may have while that is being collected; empty for success."""

SHARERS = {"snapshot": take, "restore in place": put_back}


def collect_all_but_a_new_head(context: RepositoryContext) -> None:
    """Publish a snapshot that shares no directory, as another process would, and collect everything else."""
    keep(context, {})
    with contextlib.suppress(PlanMismatch, LockConflict):
        collect(context)


class BetweenTransactions(Overtaken):
    """Like `Overtaken`, but never inside a transaction, from which other processes are locked out."""

    def __init__(self, index: int, happen: Callable[[], object], store: Store) -> None:
        super().__init__(index, happen)
        self.inside = False
        self.transact = store.transact
        vars(store)["transact"] = self.transacted

    def transacted(self, *words: Any) -> Any:
        self.inside = True
        try:
            return self.transact(*words)
        finally:
            self.inside = False

    def __call__(self, attempt: Attempt) -> Any:
        return attempt.perform() if self.inside else super().__call__(attempt)


def violations(
    begun: Begun, scratch: Path, share: Callable[[RepositoryContext, str], object], step: int
) -> Iterator[str]:
    """Collect everything else before each call in turn of an operation that begins to share directories.

    Yields the violations: a visible snapshot that is not whole, or an unexpected failure."""
    index, over, shared = 1 - step, False, 0
    while not over:
        index += step
        root = scratch / "repository"
        shutil.copytree(begun.root, root, symlinks=True)
        context, rival = Repository(root).context, Repository(root).context
        keep(context, {"three/more": "4"}, shared=True)  # records the inodes of this copy
        rule = BetweenTransactions(index, partial(collect_all_but_a_new_head, rival), context.store)
        try:
            with interposed(rule):
                share(context, begun.old)
            head = context.config(MAIN).head_snapshot_id
            shared += bool(read_shared_directories(context.paths.tree(head or "")))
        except Failure as failure:
            if rule.left > 0 or failure.code not in TOO_LATE:
                yield f"before call {index}: {failure}"
        try:
            require_whole(context)
            collect(context)
            require_whole(context)
            require_no_more_than_needed(context)
        except AssertionError as problem:
            yield f"before call {index}: {problem}"
        over = rule.left > 0
        shutil.rmtree(root)
    assert index > 30
    assert shared > 5, "nothing was shared"


@pytest.mark.parametrize("sharer", list(SHARERS))
@pytest.mark.sampled(1)
def test_a_new_sharer_never_loses_its_directories_to_a_collection(begun: Begun, scratch: Path, sharer: str) -> None:
    assert list(violations(begun, scratch, SHARERS[sharer], step=4)) == []


@pytest.mark.long
@pytest.mark.parametrize("sharer", list(SHARERS))
@pytest.mark.sampled(1)
def test_a_sharer_that_does_not_declare_what_it_uses_is_found(
    begun: Begun, scratch: Path, monkeypatch: pytest.MonkeyPatch, sharer: str
) -> None:
    """A planted bug: the collector cannot see what the operation needs."""
    real = scratches.scratch
    for module in (snapshots, exchange, repository_restore):
        monkeypatch.setattr(module, "scratch", lambda *words, **more: real(*words, **{**more, "uses": ()}))
    assert next(violations(begun, scratch, SHARERS[sharer], step=2), "")


# --- Races ------------------------------------------------------------------------------------------

ROUNDS = 200


def taker(root: Path) -> Callable[[Line], None]:
    """A worker that, for each message, takes a snapshot of a change or restores an older one in place."""

    def task(line: Line) -> None:
        delay_calls(most=0.0001)
        context, chance, count = Repository(root).context, random.Random(1), 0
        top = context.paths.payload(MAIN)
        while (told := line.wait()) != "enough":
            count += 1
            try:
                if count % 10 == 0:
                    how = RestoreOptions(reason="tested", allow_shared=True, keep=False, force=True)
                    restore_in_place(context, MAIN, told, None, how)
                else:
                    directory = top / f"d{chance.randrange(8)}" / f"e{chance.randrange(3)}"
                    directory.mkdir(parents=True, exist_ok=True)
                    (directory / "file").write_text(f"{count}")
                    snapshot(context, MAIN, None, SnapshotOptions(note=f"{count}"))
                line.say("")
            except Failure as failure:
                line.say(failure.code)

    return task


def gatherer(root: Path) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        delay_calls(most=0.0001)
        context = Repository(root).context
        while line.wait() != "enough":
            try:
                line.say(len(collect(context)))
            except (PlanMismatch, LockConflict):
                line.say(0)

    return task


def storm(context: RepositoryContext, full: int = ROUNDS) -> None:
    """Take snapshots and collect concurrently; every visible snapshot stays whole.

    The storm lasts until snapshots were collected and a remnant was needed."""
    root, seen = context.paths.root, Counter[str]()
    with Workers() as workers:
        takes, collects = workers.start(taker(root)), workers.start(gatherer(root))
        for _ in until(lambda: seen["collected"] and seen["shared"], full):
            takes.say(random.choice(sorted(snapshots_of(context))))
            collects.say("go")
            assert takes.hear() in TOO_LATE
            seen["collected"] += collects.hear()
            require_whole(context)
            seen["shared"] += bool(remnants_of(context))
        for worker in (takes, collects):
            worker.say("enough")


def test_snapshots_taken_during_collections_are_always_whole(context: RepositoryContext) -> None:
    line_of(context, 3, shared=True)
    storm(context)
    collect(context)
    require_no_more_than_needed(context)
    assert Repository(context.paths.root).examine(strict=True) == []


def test_one_repair_cleans_up_after_a_collector_that_is_killed_at_any_time(
    context: RepositoryContext,
) -> None:
    """Meanwhile another process takes snapshots, and continues after each kill."""
    line_of(context, 3, shared=True)
    root, killed = context.paths.root, Counter[bool]()
    with Workers() as workers:
        takes = workers.start(taker(root))
        for _ in until(lambda: killed[True], 12):
            for _ in range(3):
                assert takes.ask(random.choice(sorted(snapshots_of(context)))) in TOO_LATE
            collects = workers.start(gatherer(root))
            collects.say("go")
            takes.say(random.choice(sorted(snapshots_of(context))))
            time.sleep(random.uniform(0.0, 0.06))
            collects.kill()
            killed[not collects.line.has_news()] += 1
            collects.wait()
            assert takes.hear() in TOO_LATE
            require_whole(context)
            repaired = Repository(root).repair()
            assert (repaired.failed, repaired.remaining) == ((), ())
            require_whole(context)
            require_no_more_than_needed(context)
        takes.say("enough")


# --- Planted bugs -----------------------------------------------------------------------------------


def test_a_sweep_that_uses_a_stale_list_of_needs_is_found(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    line_of(context, 3, shared=True)
    collect(context)
    stale = gc_sweep.need_of_all(context.paths)
    monkeypatch.setattr(gc_sweep, "need_of_all", lambda places: stale)
    with pytest.raises(AssertionError):
        storm(context, ROUNDS)


def test_a_sweep_that_ignores_unpublished_trees_is_found(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = line_of(context, 3, shared=True)
    tree = unpublished_tree(context, ids[0], b"main-0/lost")
    monkeypatch.setattr(gc_sweep, "trees_in_progress", lambda places: [])
    collect(context)
    with pytest.raises(AssertionError, match="a needed directory is gone"):
        require_kept_for(context, tree)


def test_a_sweep_that_removes_one_directory_too_many_is_found(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    line_of(context, 4, shared=True)
    real = gc_sweep.need_of_all

    def less(places: Any, **options: Any) -> Any:
        return {name: set(sorted(paths)[1:]) for name, paths in real(places, **options).items()}

    monkeypatch.setattr(gc_sweep, "need_of_all", less)
    collect(context)
    with pytest.raises(AssertionError):
        require_whole(context)


def test_a_sweep_that_removes_nothing_is_found(context: RepositoryContext, monkeypatch: pytest.MonkeyPatch) -> None:
    line_of(context, 4, shared=True)
    monkeypatch.setattr(context.home, "sweep", lambda context: None)
    collect(context)
    with pytest.raises(AssertionError, match="not trimmed"):
        require_no_more_than_needed(context)


def test_removing_a_worktree_frees_the_directories_that_only_it_needed(context: RepositoryContext) -> None:
    (first,) = line_of(context, 1, shared=True)
    add_worktree(context, "dev", head=first, isolation=Isolation.SHARED)
    keep(context, {"only/here": "1"}, worktree="dev", shared=True)
    keep(context, {"file": "2"}, worktree="dev", shared=True)
    collect(context)
    assert remnants_of(context)
    worktree_changes.remove(context, "dev", save=None, force=True, keep_for=0.0)
    collect(context)
    assert remnants_of(context) == set()
    require_whole(context)


def test_a_collection_gives_up_if_a_scratch_uses_one_of_its_snapshots(context: RepositoryContext) -> None:
    """A snapshot in progress declares its base in its scratch, where the collector sees it."""
    ids = line_of(context, 3, shared=True)
    plan = gc_plan.propose(context).plan
    with scratches.scratch(context, "snapshot", uses=[ids[1]]), pytest.raises(PlanMismatch):
        gc.run(context, plan.plan_id)
    assert trees_of(context) == set(ids)
