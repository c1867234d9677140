"""Creating, renaming and removing worktrees, killed at every call that changes the disk.

After each kill the worktree is exactly old or new once `settle` has been run, settling again changes
nothing, no byte of a payload is lost that was not to be removed, and the next operation works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, Failure
from holdfast.fs import calls
from holdfast.leases.records import LeaseKeys
from holdfast.store.records import Decision, Delete
from holdfast.testing.crash import Outcome, Report, kill_points
from holdfast.workspace.repository import Repository
from holdfast.worktrees import creating, payloads, removing, renaming
from holdfast.worktrees.control import Control
from holdfast.worktrees.finishing import settle
from holdfast.worktrees.records import MAIN, OPERATIONS, WORKTREES, Isolation, Operation
from tests.worktrees.stages import LASTING, events, files_in, make_repository, put_files, snapshot_by_hand

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

WORK = {"a": "saved", "b/c": "not saved"}
OTHER = {"precious": "somebody else's"}


def names(repository: Repository) -> list[str]:
    return [each.worktree_id for each in repository.worktrees.configs() if each.worktree_id != MAIN]


def directories(repository: Repository) -> list[str]:
    return sorted(each.name for each in (repository.root / "worktrees").iterdir())


class Case:
    """One operation on one worktree. What may be there afterwards: `old`, or `new`, as a whole."""

    old: dict[str, dict[str, str]]
    new: dict[str, dict[str, str]]
    event: str

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
            settle(repository.control, name)
        found = self._state(repository)
        assert found in (self.old, self.new), found
        assert found == self.new or not outcome.acknowledged, "what was acknowledged is not there"
        recorded = [entry.event for entry in events(repository)].count(self.event)
        assert recorded == self._recorded_before + (found == self.new and self.old != self.new)
        for name in {*self.old, *self.new}:
            assert settle(repository.control, name) is None, "settling again found something to do"
            assert repository.control.store.read(OPERATIONS.key(name)) is None
        assert self._state(repository) == found
        self._check_leases(repository, found)
        self._check_next(repository, directory, done=found == self.new)

    _recorded_before = 0

    def _state(self, repository: Repository) -> dict[str, dict[str, str]]:
        assert names(repository) == directories(repository), "a record without a directory, or the reverse"
        return {name: files_in(repository.path(name)) for name in names(repository)}

    def _check_leases(self, repository: Repository, found: dict[str, dict[str, str]]) -> None:
        """There is no lock without a worktree, and tokens have not gone back."""
        for name in {*self.old, *self.new} - {*found}:
            assert repository.desk.state(name) is None, "a ghost lock"
        for name in self.old:
            counter = repository.control.store.read(LeaseKeys.of(name).counter)
            assert counter is not None
            assert counter.record.fencing_token >= 1

    def _check_next(self, repository: Repository, directory: Path, *, done: bool) -> None:
        """The next operation works: the same one if it was not done, and then all the others."""
        self._let_expire(repository)
        if not done:
            self.operate(directory)
        assert self._state(repository) == self.new
        for name in list(self.new):
            with repository.lease(name) as held:
                assert held.token >= 1
            repository.worktrees.rename(name, "next", force=True)
            repository.worktrees.remove("next", save=None, force=True)
        for name in {*self.old, *self.new}:
            repository.worktrees.create(name)
        assert sorted(names(repository)) == sorted({*self.old, *self.new})

    def _let_expire(self, repository: Repository) -> None:
        """The lease of the one that was killed has run out by now."""
        for name in names(repository):
            state = repository.desk.state(name)
            if state is not None:
                repository.desk.release(name, state.lease.lock_id)


class Creation(Case):
    old: dict[str, dict[str, str]] = {}
    new: dict[str, dict[str, str]] = {"dev": {}}
    event = "worktree_created"

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.create("dev", isolation=Isolation.EXCLUSIVE, label="x")

    def check(self, directory: Path, outcome: Outcome) -> None:
        super().check(directory, outcome)


class CreationFromASnapshot(Creation):
    new = {"dev": WORK}

    def prepare(self, directory: Path) -> None:
        repository = make_repository(directory)
        put_files(repository.path(MAIN), WORK)
        snapshot_by_hand(repository, MAIN, "0123456789abcdef")

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.create("dev", snapshot="0123", label="x")


class Renaming(Case):
    old = {"old": WORK}
    new = {"new": WORK}
    event = "worktree_renamed"

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.rename("old", "new", force=True)


class Removal(Case):
    old = {"dev": WORK}
    new: dict[str, dict[str, str]] = {}
    event = "worktree_removed"

    def operate(self, directory: Path) -> object:
        return Repository(directory).worktrees.remove("dev", save=None, force=True)


@pytest.mark.req("WT-10")
@pytest.mark.parametrize("case", [Creation, CreationFromASnapshot, Renaming, Removal])
def test_killed_anywhere_the_worktree_is_exactly_old_or_new(
    case: type[Case], record_property: Callable[[str, object], None]
) -> None:
    report = kill_points(case(), names=LASTING)
    record_property("points", report.points)
    report.require_clean(at_least=40)
