"""A file at the path of a worktree's directory is never lost, and never mistaken for the worktree."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import AlreadyExists, DirectoryReplaced, ExchangeUnavailable, NotFound
from holdfast.repository import exchange as repository_exchange
from holdfast.repository.context import OPERATIONS, Proof
from holdfast.repository.history import worktree_history
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.repository.worktrees import settle
from proof.crash import Kill, cut_short
from tests.cli.commands import error, holdfast
from tests.repository.stages import files_in, files_kept, make_repository, put_files
from tests.repository.test_worktree_crashes import (
    WORK,
    CreationFromASnapshot,
    Removal,
    Renaming,
    begun,
    names,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, and names of open files")

SAVED = {"a": "saved"}
PRECIOUS = "somebody's file"


class Site:
    """A repository whose worktree `dev` has a snapshot; `replace` puts a file in place of its directory."""

    def __init__(self, root: Path) -> None:
        self.repository = make_repository(root)
        self.context = self.repository.context
        self.repository.worktrees.create("dev")
        self.path = self.repository.path("dev")
        put_files(self.path, SAVED)
        lease = self.repository.leases.acquire("dev", self.repository.leases.request(ttl=3600.0)).lease
        self.proof = Proof(lease.lock_id, lease.fencing_token)
        self.saved = self.repository.snapshots.take("dev", self.proof, SnapshotOptions(note="saved")).snapshot_id
        self.taken = root.parent / "taken"

    def replace(self) -> None:
        self.path.rename(self.taken)
        self.path.write_text(PRECIOUS)


@pytest.fixture
def site(scratch: Path) -> Site:
    return Site(scratch / "repo")


def test_every_operation_reports_the_file_and_touches_nothing(site: Site) -> None:
    site.replace()
    repository, proof, how = site.repository, site.proof, RestoreOptions(reason="tested")
    attempts: list[Callable[[], object]] = [
        lambda: repository.path("dev"),
        lambda: repository.snapshots.status("dev"),
        lambda: repository.snapshots.compare("dev", site.saved),
        lambda: repository.snapshots.take("dev", proof),
        lambda: repository.snapshots.plan("dev", site.saved, how),
        lambda: repository.snapshots.restore_in_place("dev", site.saved, proof, how),
        lambda: repository.snapshots.restore_in_place("dev", site.saved, proof, how._replace(keep=False)),
        lambda: repository.snapshots.restore_in_place("dev", site.saved, proof, how._replace(path="a")),
        lambda: repository.remove_worktree("dev", lock_id=proof.lock_id),
        lambda: repository.remove_worktree("dev", lock_id=proof.lock_id, keep_unsaved=False, force=True),
    ]
    for attempt in attempts:
        with pytest.raises(DirectoryReplaced) as caught:
            attempt()
        assert caught.value.facts["path"] == str(site.path)
        assert site.path.read_text() == PRECIOUS
    repository.leases.release("dev", proof.lock_id)
    with pytest.raises(DirectoryReplaced):
        repository.worktrees.change_name("dev", "other")
    with pytest.raises(AlreadyExists):
        repository.worktrees.create("dev")
    assert site.path.read_text() == PRECIOUS
    assert site.context.store.read(OPERATIONS.key("dev")) is None
    assert repository.snapshots.named("head", seen_from="dev").snapshot_id == site.saved


def test_the_doctor_reports_the_file_and_the_suggested_remedy_works(site: Site) -> None:
    site.replace()
    (found,) = site.repository.examine()
    assert found.code == "worktree-directory-missing"
    assert "something else is in its place" in found.message
    assert site.repository.repair().fixed == ()
    shown = holdfast("status", "--repo", site.repository.root, "--worktree", "dev", "--json")
    assert shown.returncode == 7
    assert error(shown)["code"] == "E_DIRECTORY_REPLACED"
    assert "Move it away" in error(shown)["hint"]
    site.path.rename(site.path.with_name("kept"))
    restored = site.repository.snapshots.restore_in_place(
        "dev", site.saved, site.proof, RestoreOptions(reason="it was replaced")
    )
    assert restored.published is not None
    assert files_in(site.path) == SAVED
    assert site.path.with_name("kept").read_text() == PRECIOUS


def test_a_file_at_the_path_of_a_new_worktree_is_refused_and_kept(site: Site) -> None:
    stranger = site.repository.root / "worktrees" / "new"
    stranger.write_text(PRECIOUS)
    site.repository.leases.release("dev", site.proof.lock_id)
    attempts: list[Callable[[], object]] = [
        lambda: site.repository.worktrees.create("new"),
        lambda: site.repository.snapshots.restore(site.saved, "new"),
        lambda: site.repository.worktrees.change_name("dev", "new"),
    ]
    for attempt in attempts:
        with pytest.raises(AlreadyExists, match="belongs to no worktree"):
            attempt()
    assert stranger.read_text() == PRECIOUS
    assert files_in(site.path) == SAVED


@pytest.mark.parametrize("exchanges", [True, False], ids=["in one step", "in two steps"])
def test_a_file_that_appears_during_a_restore_becomes_a_snapshot(
    site: Site, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    exchange = repository_exchange._Exchange.make

    def replace_first(*arguments: Any) -> None:
        site.replace()
        exchange(*arguments)

    def unavailable(*_: object) -> None:
        raise ExchangeUnavailable("not here")

    monkeypatch.setattr(repository_exchange._Exchange, "make", replace_first)
    if not exchanges:
        monkeypatch.setattr("holdfast.trees.restore.exchange", unavailable)
    how = RestoreOptions(reason="tested")
    site.repository.snapshots.restore_in_place("dev", site.saved, site.proof, how)
    assert files_in(site.path) == SAVED
    late = worktree_history(site.context, "dev").entries[1].descriptor
    assert "written while" in late.note
    assert files_kept(site.context.paths.tree(late.snapshot_id)) == {"dev": PRECIOUS}
    assert site.repository.examine(strict=True) == []


# --- A file that appears after an operation was killed ---------------------------------------------------


@pytest.mark.parametrize("when", [Kill.BEFORE, Kill.AFTER])
def test_a_killed_rename_is_settled_despite_a_file_at_either_path(scratch: Path, when: Kill) -> None:
    """The file is at the old path of the directory, or at the new one."""
    for at in ("old", "new"):
        repository = begun(Renaming(), scratch / at, when)
        directory = repository.root / "worktrees" / ("old" if when is Kill.BEFORE else "new")
        file = repository.root / "worktrees" / at
        if file == directory:
            shutil.move(directory, scratch / f"{at}-taken")
        file.write_text(PRECIOUS)
        for name in ("old", "new"):
            settle(repository.context, name)
            assert repository.context.store.read(OPERATIONS.key(name)) is None
        assert file.read_text() == PRECIOUS
        (left,) = names(repository)
        if file == directory:
            assert files_in(scratch / f"{at}-taken") == WORK
            with pytest.raises((DirectoryReplaced, NotFound)):
                repository.path(left)
        else:
            assert files_in(repository.path(left)) == WORK


def test_a_killed_removal_is_pending_until_the_file_is_moved_away(scratch: Path) -> None:
    repository = begun(Removal(), scratch / "repo", Kill.BEFORE)
    file = repository.root / "worktrees" / "dev"
    shutil.move(file, scratch / "taken")
    file.write_text(PRECIOUS)
    with pytest.raises(DirectoryReplaced):
        settle(repository.context, "dev")
    assert file.read_text() == PRECIOUS
    file.rename(scratch / "file")
    settle(repository.context, "dev")
    assert names(repository) == []
    assert files_in(scratch / "taken") == WORK


def test_a_killed_creation_never_mistakes_a_file_for_its_directory(scratch: Path) -> None:
    repository = begun(CreationFromASnapshot(), scratch / "repo", Kill.BEFORE)
    file = repository.root / "worktrees" / "dev"
    file.write_text(PRECIOUS)
    settle(repository.context, "dev")
    assert names(repository) == []
    assert file.read_text() == PRECIOUS


def test_a_killed_restore_keeps_the_file_as_a_snapshot(site: Site) -> None:
    how = RestoreOptions(reason="tested")
    put_files(site.path, {"unsaved": "work"})

    def restore() -> object:
        return Repository(site.repository.root).snapshots.restore_in_place("dev", site.saved, site.proof, how)

    assert cut_short(restore, Kill.BEFORE, 1, names=("rename_exchange",)) is not None
    site.replace()
    settle(site.context, "dev")
    assert files_in(site.path) == SAVED
    contents = [
        files_kept(site.context.paths.tree(each.descriptor.snapshot_id))
        for each in worktree_history(site.context, "dev").entries
    ]
    assert {"dev": PRECIOUS} in contents
    assert {**SAVED, "unsaved": "work"} in contents
