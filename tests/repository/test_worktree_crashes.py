"""Creating, renaming and removing worktrees, killed at every call that changes the disk.

After each kill and a `settle`, the worktree is exactly old or new, settling again changes nothing, no byte
of a payload is lost unless it was to be removed, and the next operation works.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.leases.rules import LeaseKeys
from holdfast.repository import worktree_changes, worktrees
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    Isolation,
    Operation,
    OperationKind,
    RepositoryContext,
)
from holdfast.repository.repository import Repository
from holdfast.repository.worktrees import settle
from holdfast.store.model import Change, Decision, Delete
from holdfast.trees.walker import remove_tree
from proof.crash import Ending, Kill, Outcome, cut_short, error_points, kill_points
from proof.effort import SHARE
from proof.powercut import power_cuts
from tests.repository.stages import (
    LASTING,
    events,
    files_in,
    files_kept,
    make_repository,
    put_files,
    snapshot_by_hand,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

Files = dict[str, str]
State = dict[str, Files]
WORK = {"a": "saved", "b/c": "not saved"}


def names(repository: Repository) -> list[str]:
    return [each.worktree_id for each in repository.worktrees.configs() if each.worktree_id != MAIN]


def directories(repository: Repository) -> list[str]:
    return sorted(each.name for each in (repository.root / "worktrees").iterdir())


class Case:
    """One operation on one worktree. Afterwards its state is either `old` or `new`, as a whole."""

    old: ClassVar[State] = {}
    new: ClassVar[State] = {}
    event = ""
    moves = 1
    """The number of the call to `rename_noreplace` that moves the directory."""

    def prepare(self, directory: Path) -> None:
        repository = make_repository(directory)
        for name, files in self.old.items():
            repository.worktrees.create(name)
            put_files(repository.path(name), files)
            with repository.lease(name):
                pass

    def operate(self, directory: Path) -> object:
        raise NotImplementedError

    def check(self, directory: Path, outcome: Outcome) -> None:
        repository = Repository(directory)
        for name in {*self.old, *self.new}:
            settle(repository.context, name)
        found = self._state(repository)
        assert found in (self.old, self.new), found
        assert found == self.new or not outcome.acknowledged, "an acknowledged change is missing"
        recorded = [entry.event for entry in events(repository)][-1] == self.event
        assert recorded == (found == self.new), "the audit trail disagrees"
        for name in {*self.old, *self.new}:
            assert settle(repository.context, name) is None, "settling again found something to do"
            assert repository.context.store.read(OPERATIONS.key(name)) is None
        assert self._state(repository) == found
        self._check_leases(repository, found)
        self._check_next(repository, directory, done=found == self.new)

    def _state(self, repository: Repository) -> State:
        assert names(repository) == directories(repository), "a record without a directory, or the reverse"
        return {name: files_in(repository.path(name)) for name in names(repository)}

    def _check_leases(self, repository: Repository, found: State) -> None:
        """No lock exists without a worktree, and tokens have not gone back."""
        for name in {*self.old, *self.new} - {*found}:
            assert repository.leases.state(name) is None, "a ghost lock"
        for name in {*self.old, *(found if self.old else ())}:
            counter = repository.context.store.read(LeaseKeys.of(name).counter)
            assert counter is not None, "the token counter was reset"
            assert counter.record.fencing_token >= 1

    def _check_next(self, repository: Repository, directory: Path, *, done: bool) -> None:
        """The next operations work: first the same one, if it was not done, then all others."""
        self._let_expire(repository)
        if not done:
            self.operate(directory)
        assert self._state(repository) == self.new
        for name in list(self.new):
            with repository.lease(name) as held:
                assert held.token >= 1
            repository.worktrees.change_name(name, "next", force=True)
            repository.worktrees.remove("next", save=None, force=True)
        for name in {*self.old, *self.new}:
            repository.worktrees.create(name)
        assert sorted(names(repository)) == sorted({*self.old, *self.new})

    def _let_expire(self, repository: Repository) -> None:
        """Release the lease of the killed process, as if it had expired."""
        for name in names(repository):
            state = repository.leases.state(name)
            if state is not None:
                repository.leases.release(name, state.lease.lock_id)


class Creation(Case):
    new: ClassVar[State] = {"dev": {}}
    event = "worktree_created"

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.create("dev", isolation=Isolation.EXCLUSIVE, label="x")


class CreationFromASnapshot(Creation):
    new: ClassVar[State] = {"dev": WORK}

    def prepare(self, directory: Path) -> None:
        repository = make_repository(directory)
        put_files(repository.path(MAIN), WORK)
        snapshot_by_hand(repository, MAIN, "0123456789abcdef")

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.create("dev", snapshot="0123", label="x")


class Renaming(Case):
    old: ClassVar[State] = {"old": WORK}
    new: ClassVar[State] = {"new": WORK}
    event = "worktree_renamed"

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.change_name("old", "new", force=True)


class Removal(Case):
    old: ClassVar[State] = {"dev": WORK}
    event = "worktree_removed"

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.remove("dev", save=None, force=True)


class RemovalOfUnsavedWork(Removal):
    """The content of the worktree is in a snapshot before it disappears."""

    def operate(self, directory: Path) -> object:
        return Repository(directory).remove_worktree("dev", force=True)

    def check(self, directory: Path, outcome: Outcome) -> None:
        self._check_kept(Repository(directory))
        super().check(directory, outcome)
        self._check_kept(Repository(directory))

    def _check_kept(self, repository: Repository) -> None:
        """The work is in a snapshot, or still in the worktree."""
        places = repository.context.paths
        kept = [files_kept(places.tree(snapshot_id)) for snapshot_id, _ in repository.context.store.scan(DESCRIPTORS)]
        where_it_was = places.payload("dev")
        assert WORK in kept or (where_it_was.is_dir() and files_in(where_it_was) == WORK), "work was lost"


@pytest.mark.req("WT-10")
@pytest.mark.parametrize("case", [CreationFromASnapshot, Renaming, RemovalOfUnsavedWork])
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_leaves_the_worktree_exactly_old_or_new(
    case: type[Case], record_property: Callable[[str, object], None]
) -> None:
    report = kill_points(case(), names=LASTING, share=SHARE)
    record_property("points", report.points)
    report.require_clean(at_least=40)


# --- Killed again while settling ----------------------------------------------------------------------


class Settling(Case):
    """An operation was killed before or after it moved its directory; settling it is killed too."""

    def __init__(self, case: Case, when: Kill) -> None:
        self.case, self.when = case, when
        self.old, self.new, self.event = case.old, case.new, case.event  # type: ignore[misc]

    def prepare(self, directory: Path) -> None:
        self.case.prepare(directory)
        killed = cut_short(
            lambda: self.case.operate(directory), self.when, self.case.moves, names=("rename_noreplace",)
        )
        assert killed is not None

    def operate(self, directory: Path) -> object:
        repository = Repository(directory)
        for name in sorted({*self.old, *self.new}):
            settle(repository.context, name)
        return names(repository) == [*self.new] or self.case.operate(directory)


@pytest.mark.parametrize(
    ("case", "when"),
    [(Creation, Kill.AFTER), (Renaming, Kill.BEFORE), (Removal, Kill.AFTER)],
)
@pytest.mark.sampled(1)
def test_settling_can_be_killed_at_any_call_too(case: type[Case], when: Kill) -> None:
    kill_points(Settling(case(), when), names=LASTING, share=SHARE).require_clean(at_least=10)


@pytest.mark.parametrize("case", [Creation, Renaming, RemovalOfUnsavedWork])
@pytest.mark.sampled(1)
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new(
    case: type[Case], record_property: Callable[[str, object], None]
) -> None:
    report = power_cuts(case(), limit=2, share=SHARE)
    record_property("states", report.points)
    assert report.violations == [], str(report)
    assert report.points + report.skipped >= 60


@pytest.mark.parametrize("case", [Creation, Renaming])
@pytest.mark.long
def test_a_power_cut_finds_a_rename_that_was_not_made_durable(
    case: type[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.fs.directory.sync_parents", lambda *paths: None)
    assert power_cuts(case(), limit=2).violations


# --- Foreign directories, copies and disk errors ------------------------------------------------------


def begun(case: Case, directory: Path, when: Kill) -> Repository:
    """A repository in which the operation was killed before or after it moved its directory."""
    case.prepare(directory)
    assert cut_short(lambda: case.operate(directory), when, 1, names=("rename_noreplace",))
    return Repository(directory)


@pytest.mark.parametrize(
    ("case", "when", "path", "left"),
    [
        (Creation(), Kill.BEFORE, "dev", {}),
        (Renaming(), Kill.BEFORE, "new", {"old": WORK}),
        (Renaming(), Kill.AFTER, "old", {"new": WORK}),
        (Removal(), Kill.AFTER, "dev", {}),
    ],
    ids=["creating", "at the new name", "at the old name", "removing"],
)
def test_a_foreign_directory_at_a_path_of_the_operation_is_not_touched(
    scratch: Path, case: Case, when: Kill, path: str, left: State
) -> None:
    repository = begun(case, scratch / "repo", when)
    stranger = repository.root / "worktrees" / path
    put_files(stranger, {"precious": "a stranger's"})
    for name in {*case.old, *case.new}:
        settle(repository.context, name)
        assert repository.context.store.read(OPERATIONS.key(name)) is None
    assert files_in(stranger) == {"precious": "a stranger's"}
    assert {name: files_in(repository.path(name)) for name in names(repository)} == left


def test_a_rename_whose_directory_disappeared_can_be_settled(scratch: Path) -> None:
    repository = begun(Renaming(), scratch / "repo", Kill.BEFORE)
    (repository.root / "worktrees/old").rename(scratch / "taken")
    settle(repository.context, "old")
    assert names(repository) == ["old"]
    (scratch / "taken").rename(repository.root / "worktrees/old")
    repository.worktrees.change_name("old", "new", force=True)
    assert files_in(repository.path("new")) == WORK


def test_an_operation_pending_in_a_copied_repository_is_finished_there_too(scratch: Path) -> None:
    for when in (Kill.BEFORE, Kill.AFTER):
        for case in (Creation(), Renaming(), Removal()):
            original = begun(case, scratch / f"{when.name}-{case.event}", when).root
            copy = original.with_name(original.name + "-copy")
            shutil.copytree(original, copy, symlinks=True)
            case.check(copy, Outcome(Ending.KILLED))


def test_a_full_or_failing_disk_leaves_the_old_or_the_new() -> None:
    report = error_points(
        Renaming(), [errno.ENOSPC], lasting=[errno.EIO], names=LASTING, descriptors=False, share=SHARE
    )
    report.require_clean(at_least=40)


# --- Planted bugs, which the sweeps must find ---------------------------------------------------------


def forget(context: RepositoryContext, operation: Operation) -> None:
    """A finisher that only deletes the record of the operation."""
    key = OPERATIONS.key(operation.worktree_id)
    context.store.transact([key], lambda view, now: Decision([Delete(key)], None))


def nothing(*_: Any) -> list[Change]:
    return []


PLANTED: dict[str, tuple[type[Case], Callable[[pytest.MonkeyPatch], None]]] = {
    "a creation whose directory is there is forgotten": (
        Creation,
        lambda patch: patch.setitem(worktrees._FINISHERS, OperationKind.CREATE, forget),
    ),
    "a removal that has begun is forgotten": (
        Removal,
        lambda patch: patch.setitem(worktrees._FINISHERS, OperationKind.REMOVE, forget),
    ),
    "a renaming leaves the lock behind": (
        Renaming,
        lambda patch: patch.setattr(worktree_changes, "_end_of_lease", nothing),
    ),
    "a renaming counts tokens from the start": (
        Renaming,
        lambda patch: patch.setattr(worktree_changes, "_continue_tokens", nothing),
    ),
    "the payload is deleted before anything is decided": (
        RemovalOfUnsavedWork,
        lambda patch: patch.setattr(Repository, "remove_worktree", _delete_first),
    ),
}


def _delete_first(repository: Repository, name: str, **_: Any) -> object:
    remove_tree(repository.context.paths.payload(name))
    return repository.worktrees.remove(name, save=None, force=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mistake", PLANTED)
def test_each_planted_bug_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant = PLANTED[mistake]
    plant(monkeypatch)
    report = kill_points(case(), names=("rename_noreplace",))
    assert report.violations
