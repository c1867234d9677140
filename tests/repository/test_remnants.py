"""Collecting snapshots whose directories others need: what stays is whole, and what nobody needs goes."""

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
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions, restore_in_place
from holdfast.repository.retention import Policy
from holdfast.repository.snapshot_service import Snapshots
from holdfast.repository.snapshots import SnapshotOptions, snapshot
from holdfast.store.model import Store
from holdfast.trees import shared_dirs as homes_module
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
    """Let go whatever may go."""
    proposal = gc_plan.propose(context)
    return gc.run(context, proposal.plan.plan_id).snapshots if proposal.stored else ()


def used(places: list[Path]) -> int:
    """What is on the disk below these directories, each inode once, without themselves."""
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
    """Two lines of snapshots of random content, in which directories come, change, move and go."""

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
        """Let go what was pinned, and pin some others."""
        for pin in pins(self.context):
            remove_pin(self.context, pin.pin_id)
        alive = sorted(snapshots_of(self.context))
        for each in self.chance.sample(alive, self.chance.randrange(len(alive) // 2 + 1)):
            add_pin(self.context, each)


@pytest.mark.req("WT-11")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(1)
def test_whatever_is_collected_in_whatever_order_the_rest_is_whole_and_nothing_else_is_left(
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


def test_what_is_needed_counts_for_the_budget_but_not_as_free(context: RepositoryContext) -> None:
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


def test_a_shared_directory_is_shared_on_after_its_home_is_trimmed(context: RepositoryContext) -> None:
    """Its time is what it was: else all of it would be stored once more."""
    first, *_ = line_of(context, 3, shared=True)
    collect(context)
    assert first in remnants_of(context)
    newest = keep(context, {"file": "another"}, shared=True)
    assert first in {home.tree for home in read_shared_directories(context.paths.tree(newest)).values()}


def test_a_tree_that_was_brought_back_from_a_copy_is_collected_again(context: RepositoryContext) -> None:
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
def test_a_part_of_a_tree_that_was_brought_back_does_not_replace_what_others_need(
    context: RepositoryContext, damage: str
) -> None:
    """Copying it back was interrupted; what is left of it among the remnants is all that there is."""
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


def test_a_tree_that_was_a_snapshot_again_takes_the_place_of_what_was_left_of_it(
    context: RepositoryContext,
) -> None:
    """A directory that had been on the way to a needed one is needed itself by then."""
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


def test_of_two_trees_neither_of_which_has_all_that_is_needed_none_is_removed(
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


# --- What cannot be known ---------------------------------------------------------------------------


def spoil(context: RepositoryContext, snapshot_id: str, *, lost: bool = False) -> None:
    where = context.paths.tree(snapshot_id) / "homes"
    where.chmod(0o600)
    if lost:
        where.unlink()
    else:
        where.write_bytes(where.read_bytes()[:-3])


@pytest.mark.parametrize("how", ["cut off", "lost", "lost after a restore"])
def test_while_one_tree_cannot_say_what_it_needs_nothing_is_deleted(context: RepositoryContext, how: str) -> None:
    ids = line_of(context, 4, shared=True)
    if how == "lost after a restore":
        restore_in_place(context, MAIN, ids[1], None, RestoreOptions(reason="tested", allow_shared=True))
        ids.append(str(context.config(MAIN).head_snapshot_id))
    plan = gc_plan.propose(context).plan
    spoil(context, ids[-1], lost=how != "cut off")
    before = fingerprint(context.paths.root)
    with pytest.raises(Corrupt, match="homes"):
        gc.run(context, plan.plan_id)
    with pytest.raises(Corrupt, match="homes"):
        gc_plan.propose(context)
    after = {name: what for name, what in fingerprint(context.paths.root).items() if "guards" not in name}
    assert after.items() <= before.items()
    codes = {each.code for each in Repository(context.paths.root).examine()}
    assert codes == {"snapshot-damaged"}


def test_one_that_is_spoilt_after_the_decision_stops_the_sweep_alone(context: RepositoryContext) -> None:
    ids = line_of(context, 4, shared=True)
    plan = gc_plan.propose(context).plan
    whole = (context.paths.tree(ids[-1]) / "homes").read_bytes()
    retire = gc_sweep.retire
    repository = Repository(context.paths.root)

    def late(context: RepositoryContext, snapshot_ids: Any) -> None:
        retire(context, snapshot_ids)
        spoil(context, ids[-1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "retire", late)
        with pytest.raises(Corrupt):
            gc.run(context, plan.plan_id)
    assert remnants_of(context) == set(ids[:-1])
    assert repository.repair().failed  # it says so, and touches nothing
    assert remnants_of(context) == set(ids[:-1])
    (context.paths.tree(ids[-1]) / "homes").write_bytes(whole)
    gc.run(context, plan.plan_id)
    require_whole(context)
    require_no_more_than_needed(context)
    assert repository.examine() == []


def test_a_spoilt_one_can_be_deleted_itself(context: RepositoryContext) -> None:
    ids = line_of(context, 4, shared=True)
    spoil(context, ids[2])
    collect(context)
    require_whole(context)
    require_no_more_than_needed(context)
    assert trees_of(context) == {ids[3]}


# --- Trees in the making ----------------------------------------------------------------------------


def in_the_making(context: RepositoryContext, home: str, path: bytes) -> Path:
    """A complete tree that a process has not put in its place yet."""
    tree = context.paths.scratch / "0123456789abcdef" / "tree"
    (tree / "payload").mkdir(parents=True)
    write_shared_directories(tree, [(path, SharedDirectory(home, path))])
    (tree / ".READY").touch()
    return tree


def require_kept_for(context: RepositoryContext, tree: Path) -> None:
    for home in read_shared_directories(tree).values():
        assert (context.paths.remnants / home.tree / "payload" / os.fsdecode(home.path)).is_dir(), "it is gone"


def test_what_a_tree_in_the_making_needs_stays(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    tree = in_the_making(context, ids[0], b"main-0/lost")
    collect(context)
    require_kept_for(context, tree)
    repository = Repository(context.paths.root)
    assert {each.code for each in repository.examine()} == {"scratch-abandoned"}
    repository.repair()  # its process is gone: so is the need
    assert repository.examine() == []
    require_no_more_than_needed(context)


def test_what_a_tree_in_quarantine_needs_stays(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    tree = in_the_making(context, ids[0], b"main-0/lost")
    context.paths.quarantine.mkdir()
    tree = tree.rename(context.paths.quarantine / "0123456789abcdef")
    shutil.rmtree(context.paths.scratch)
    collect(context)
    require_kept_for(context, tree)
    assert Repository(context.paths.root).examine() == []


# --- The doctor -------------------------------------------------------------------------------------


def test_a_tree_without_a_descriptor_that_others_need_is_never_taken_from_them(
    context: RepositoryContext,
) -> None:
    """One of which nothing is known is left where it is; one that is not missed is left as a remnant."""
    ids = line_of(context, 3, shared=True)
    repository = Repository(context.paths.root)
    unknown = "0123456789abcdef"
    needing = context.paths.tree(ids[2]) / "homes"
    homes = read_shared_directories(context.paths.tree(ids[2]))
    needing.unlink()
    write_shared_directories(
        context.paths.tree(ids[2]),
        [(path, SharedDirectory(unknown, home.path) if home.tree == ids[0] else home) for path, home in homes.items()],
    )
    shutil.copytree(context.paths.tree(ids[0]), context.paths.tree(unknown), symlinks=True)
    (found,) = repository.examine()
    assert (found.code, found.fix) == ("tree-unknown", None)
    assert repository.repair().fixed == ()
    require_whole(context)
    context.paths.scratch.mkdir(exist_ok=True)
    (context.paths.scratch / unknown).mkdir()  # now it is known: its process died before it was published
    (found,) = repository.examine()
    assert (found.code, "need" in found.remedy) == ("tree-orphaned", True)
    assert repository.repair().remaining == ()
    assert remnants_of(context) == {unknown}
    require_whole(context)
    require_no_more_than_needed(context)
    once = fingerprint(context.paths.root)
    assert repository.repair() == ((), (), ())
    assert fingerprint(context.paths.root) == once


def test_a_home_that_is_lost_is_told_as_damage(context: RepositoryContext) -> None:
    ids = line_of(context, 3, shared=True)
    collect(context)
    assert ids[0] in remnants_of(context)
    (context.paths.remnants / ids[0]).rename(context.paths.root / "away")
    (found,) = Repository(context.paths.root).examine()
    assert (found.code, found.subject) == ("snapshot-damaged", ids[2])
    assert ids[0] in found.message
    assert found.fix is None


def test_the_doctor_says_nothing_of_what_a_running_collection_is_about_to_do(
    context: RepositoryContext,
) -> None:
    ids = line_of(context, 3, shared=True)
    with gc.collector_locked(context):
        gc_sweep.retire(context, [ids[0]])
        codes = {each.code for each in Repository(context.paths.root).examine()}
    assert "remnant-excessive" not in codes


# --- Readers of what stays --------------------------------------------------------------------------


class Overtaken:
    """Lets something happen once, before the call with this number."""

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
    return [(each.change.path, each.lines) for each in compare.patches(context, found)]


def examine(context: RepositoryContext, snapshot_id: str) -> object:
    codes = {each.code for each in Repository(context.paths.root).examine()}
    return codes - {"collection-unfinished"}


READERS = {"verify": verify, "restore": restore, "diff": diff, "doctor": examine}


class Homely(NamedTuple):
    root: Path
    head: str
    plan: str


@pytest.fixture(scope="module")
def homely(tmp_path_factory: pytest.TempPathFactory) -> Homely:
    """A head with directories in two trees that may go."""
    root = tmp_path_factory.mktemp("homely") / "repository"
    context = make_repository(root, isolation=Isolation.SHARED).context
    ids = [
        keep(context, {"a": "0", "one/file": "1", "one/two/file": "2"}, shared=True),
        keep(context, {"a": "1", "three/file": "3"}, shared=True),
        keep(context, {"a": "2"}, shared=True),
        keep(context, {"a": "3"}, shared=True),
    ]
    gc_plan.set_policy(context, Policy(keep_last=1))
    create_reference(context, "first", ids[0])
    return Homely(root, ids[3], gc_plan.propose(context).plan.plan_id)


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.sampled(2)
def test_a_reader_of_what_stays_never_notices_that_the_homes_of_its_directories_move(
    homely: Homely, scratch: Path, reader: str
) -> None:
    step = 4 if reader == "doctor" else 1  # it looks at much else
    assert len(overtaken(homely, scratch, READERS[reader], step)) == 1


def overtaken(
    homely: Homely, scratch: Path, read: Callable[[RepositoryContext, str], object], step: int = 1
) -> list[object]:
    """What a reader sees if at one of its calls in turn a collection comes in between: all that differs."""
    seen: list[object] = []
    index, over = 0, False
    while not over:
        index += step
        root = scratch / "repository"
        shutil.copytree(homely.root, root, symlinks=True)
        context, rival = Repository(root).context, Repository(root).context
        rule = Overtaken(index, partial(gc.run, rival, homely.plan))
        try:
            with interposed(rule, ["open", "stat", "scandir"]):
                found = read(context, homely.head)
        except Failure as failure:
            found = failure.code
        if found not in seen:
            seen.append(found)
        over = rule.left > 0
        shutil.rmtree(root)
    assert index > 10
    return seen


def test_a_reader_that_looks_where_a_home_is_before_it_opens_it_is_found(
    homely: Homely, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake."""

    def looked_up(tree: Path, name: str) -> tuple[Path, ...]:
        return (homes_module.tree_beside(tree, name),)

    def tree_beside(tree: Path, name: str) -> Path:
        beside = tree.parent / name
        return beside if beside.is_dir() else tree.parent.parent / "remnants" / name

    monkeypatch.setattr(homes_module, "tree_beside", tree_beside)
    monkeypatch.setattr(homes_module, "places_beside", looked_up)
    assert len(overtaken(homely, scratch, verify)) > 1


# --- Those who begin to share -----------------------------------------------------------------------


class Begun(NamedTuple):
    root: Path
    old: str


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """Two snapshots, and a directory that is in the second by being in the first."""
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
"""What one may be told who restores what is being collected; or it is restored."""

SHARERS = {"snapshot": take, "restore in place": put_back}


def collect_all_but_a_new_head(context: RepositoryContext) -> None:
    """Somebody else publishes a snapshot that shares no directory, and collects whatever may go."""
    keep(context, {})
    with contextlib.suppress(PlanMismatch, LockConflict):
        collect(context)


class BetweenTransactions(Overtaken):
    """The same, but not amidst a transaction: nobody else gets in there either."""

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


def met(begun: Begun, scratch: Path, share: Callable[[RepositoryContext, str], object], step: int) -> Iterator[str]:
    """Let somebody begin to share directories, and at one of its calls after the other all else be collected.
    What is wrong after that: something visible that is not whole, or a failure that does not say why."""
    index, over, shared = 1 - step, False, 0
    while not over:
        index += step
        root = scratch / "repository"
        shutil.copytree(begun.root, root, symlinks=True)
        context, rival = Repository(root).context, Repository(root).context
        keep(context, {"three/more": "4"}, shared=True)  # with the inodes that it has here
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
def test_who_begins_to_share_directories_never_loses_them_to_a_collection(
    begun: Begun, scratch: Path, sharer: str
) -> None:
    assert list(met(begun, scratch, SHARERS[sharer], step=4)) == []


@pytest.mark.parametrize("sharer", list(SHARERS))
@pytest.mark.sampled(1)
def test_who_does_not_say_what_it_shares_does(
    begun: Begun, scratch: Path, monkeypatch: pytest.MonkeyPatch, sharer: str
) -> None:
    """A planted mistake."""
    real = scratches.scratch
    for module in (snapshots, exchange, repository_restore):
        monkeypatch.setattr(module, "scratch", lambda *words, **more: real(*words, **{**more, "uses": ()}))
    assert next(met(begun, scratch, SHARERS[sharer], step=2), "")


# --- Races ------------------------------------------------------------------------------------------

ROUNDS = 200


def taker(root: Path) -> Callable[[Line], None]:
    """Takes a snapshot of some change, or restores an older one in place, whenever it is told to."""

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
    """Take snapshots and collect at the same time; all that is visible is whole all the time.
    It goes on until some were collected and somebody needed a remnant."""
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


def test_of_what_is_captured_while_others_collect_nothing_is_ever_missing(context: RepositoryContext) -> None:
    line_of(context, 3, shared=True)
    storm(context)
    collect(context)
    require_no_more_than_needed(context)
    assert Repository(context.paths.root).examine(strict=True) == []


def test_who_collects_and_is_killed_at_any_time_leaves_nothing_that_one_repair_does_not_end(
    context: RepositoryContext,
) -> None:
    """While somebody goes on taking snapshots, and after each kill is asked for more."""
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


# --- Planted mistakes -------------------------------------------------------------------------------


def test_a_sweep_that_looks_at_what_was_needed_before_is_found(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    line_of(context, 3, shared=True)
    collect(context)
    stale = gc_sweep.need_of_all(context.paths)
    monkeypatch.setattr(gc_sweep, "need_of_all", lambda places: stale)
    with pytest.raises(AssertionError):
        storm(context, ROUNDS)


def test_a_sweep_that_leaves_trees_in_the_making_out_is_found(
    context: RepositoryContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = line_of(context, 3, shared=True)
    tree = in_the_making(context, ids[0], b"main-0/lost")
    monkeypatch.setattr(gc_sweep, "trees_in_progress", lambda places: [])
    collect(context)
    with pytest.raises(AssertionError, match="it is gone"):
        require_kept_for(context, tree)


def test_a_sweep_that_takes_one_directory_too_much_is_found(
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


def test_a_sweep_that_leaves_something_is_found(context: RepositoryContext, monkeypatch: pytest.MonkeyPatch) -> None:
    line_of(context, 4, shared=True)
    monkeypatch.setattr(gc, "sweep", lambda context: None)
    collect(context)
    with pytest.raises(AssertionError, match="not trimmed"):
        require_no_more_than_needed(context)


def test_a_worktree_that_is_removed_frees_what_only_it_needed(context: RepositoryContext) -> None:
    (first,) = line_of(context, 1, shared=True)
    add_worktree(context, "dev", head=first, isolation=Isolation.SHARED)
    keep(context, {"only/here": "1"}, worktree="dev", shared=True)
    keep(context, {"file": "2"}, worktree="dev", shared=True)
    collect(context)
    assert remnants_of(context)
    worktree_changes.remove(context, "dev", save=None, force=True)
    collect(context)
    assert remnants_of(context) == set()
    require_whole(context)


def test_a_snapshot_whose_base_is_doomed_shares_nothing_with_it(context: RepositoryContext) -> None:
    """A scratch that names its base is seen by the collector: of the two, one steps back."""
    ids = line_of(context, 3, shared=True)
    plan = gc_plan.propose(context).plan
    with scratches.scratch(context, "snapshot", uses=[ids[1]]), pytest.raises(PlanMismatch):
        gc.run(context, plan.plan_id)
    assert trees_of(context) == set(ids)
