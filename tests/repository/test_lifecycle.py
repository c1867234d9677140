"""Worktrees from creation to removal, and the requests that are refused."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import (
    AlreadyExists,
    DirectoryReplaced,
    Failure,
    LockConflict,
    NameInvalid,
    NotFound,
    NotWritable,
    PathEscape,
    Refused,
    UsageFailure,
)
from holdfast.leases.rules import LeaseKeys
from holdfast.repository.context import MAIN, Isolation, Proof
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.worktrees import settle
from proof.interpose import Attempt, interposed
from tests.repository.stages import events, expire, files_in, files_stored, json_at, make_repository, put_files

pytestmark = pytest.mark.both_homes

BAD_NAMES = ["", ".", "..", "a/b", "../main", "a\\b", "a..b", "a b", "a\nb", "a\0b", "é", "x" * 129, "naïve"]


@pytest.fixture
def repository(scratch: Path) -> Repository:
    return make_repository(scratch / "repo")


def next_token(repository: Repository, worktree: str) -> int:
    """Acquire and release the lease of a worktree; return its token."""
    with repository.lease(worktree) as held:
        return held.token


# --- Creation -----------------------------------------------------------------------------------------


@pytest.mark.req("WT-01", "WT-02", "WT-03", "WT-04", "WT-09")
def test_a_new_worktree_is_an_empty_directory_with_a_separate_record(repository: Repository) -> None:
    config = repository.worktrees.create("dev", label="for development")
    assert repository.path("dev") == repository.payload("dev")
    assert files_in(repository.path("dev")) == {}
    stored = json_at(repository.root / ".jvs/worktrees/dev/config.json")
    assert stored["worktree_id"] == config.worktree_id == "dev"
    assert stored["isolation"] == "exclusive"
    assert stored["label"] == "for development"
    assert stored["base_snapshot_id"] is stored["head_snapshot_id"] is None
    assert stored["created_at"].endswith("Z")
    assert events(repository)[-1].event == "worktree_created"
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN, "dev"]


@pytest.mark.req("LC-03", "WT-01")
def test_a_shared_worktree_has_no_lease_and_is_called_high_risk(repository: Repository) -> None:
    config = repository.worktrees.create("open", isolation=Isolation.SHARED)
    assert config.isolation is Isolation.SHARED
    assert repository.worktrees.state("open").is_shared
    with pytest.raises(UsageFailure, match="high-risk"):
        repository.lease("open")
    assert not (repository.root / ".jvs/locks/open.json").exists()


def test_a_name_that_is_taken_is_refused(repository: Repository) -> None:
    repository.worktrees.create("dev")
    for name in ("dev", MAIN):
        with pytest.raises(AlreadyExists):
            repository.worktrees.create(name)


def test_a_foreign_directory_at_the_path_of_a_worktree_is_left_alone(repository: Repository) -> None:
    put_files(repository.payload("dev"), {"precious": "mine"})
    with pytest.raises(AlreadyExists, match="belongs to no worktree"):
        repository.worktrees.create("dev")
    repository.worktrees.create("other")
    with pytest.raises(AlreadyExists, match="belongs to no worktree"):
        repository.worktrees.change_name("other", "dev")
    assert files_in(repository.context.paths.worktrees) == {"dev/precious": "mine"}
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN, "other"]
    assert next_token(repository, "other") > 0


@pytest.mark.req("WT-06")
@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_by_every_operation(repository: Repository, name: str) -> None:
    repository.worktrees.create("dev")
    before = sorted(repository.root.rglob("*"))
    attempts: list[Callable[[], object]] = [
        lambda: repository.worktrees.create(name),
        lambda: repository.worktrees.change_name(name, "new"),
        lambda: repository.worktrees.change_name("dev", name),
        lambda: repository.worktrees.remove(name, save=None),
        lambda: repository.worktrees.state(name),
        lambda: repository.worktrees.usage(name),
        lambda: repository.path(name),
        lambda: repository.lease(name),
        lambda: repository.steal(name),
    ]
    for attempt in attempts:
        with pytest.raises(NameInvalid, match="name of a worktree"):
            attempt()
    assert sorted(repository.root.rglob("*")) == before


@pytest.mark.req("WT-06")
@pytest.mark.parametrize("name", ["a", "A-b_c.9", ".hidden", "a-dash", "x" * 128, "main2"])
def test_names_of_letters_digits_dot_underscore_and_hyphen_are_accepted(repository: Repository, name: str) -> None:
    repository.worktrees.create(name)
    assert repository.worktrees.state(name).exists
    assert name in [each.worktree_id for each in repository.worktrees.configs()]
    with repository.lease(name):
        pass
    repository.worktrees.remove(name, save=None)


@pytest.mark.req("WT-06")
def test_a_name_is_normalised_before_it_is_checked(repository: Repository) -> None:
    kelvin = "\N{KELVIN SIGN}elvin"
    assert unicodedata.normalize("NFC", kelvin) == "Kelvin"
    assert repository.worktrees.create(kelvin).worktree_id == "Kelvin"
    with pytest.raises(AlreadyExists):
        repository.worktrees.create("Kelvin")


@pytest.mark.req("WT-07")
@pytest.mark.parametrize("where", ["worktrees", "worktrees/dev", "main"])
def test_a_symlink_that_leads_outside_is_refused_and_its_target_is_untouched(
    repository: Repository, scratch: Path, where: str
) -> None:
    repository.worktrees.create("dev")
    outside = scratch / "outside"
    put_files(outside, {"precious": "mine", "dev/precious": "mine"})
    (scratch / "repo" / where).rename(scratch / "moved")
    (scratch / "repo" / where).symlink_to(outside)
    attempts: list[Callable[[], object]] = [lambda: repository.path(MAIN)]
    if where != "main":
        attempts = [
            lambda: repository.path("dev"),
            lambda: repository.worktrees.usage("dev"),
            lambda: repository.worktrees.remove("dev", save=None),
            lambda: repository.worktrees.remove("dev", save=None, force=True),
            lambda: repository.worktrees.change_name("dev", "new"),
        ]
    if where == "worktrees":
        attempts.append(lambda: repository.worktrees.create("another"))
    for attempt in attempts:
        with pytest.raises((PathEscape, DirectoryReplaced)):
            attempt()
    assert files_in(outside) == {"precious": "mine", "dev/precious": "mine"}
    assert repository.context.config("dev").worktree_id == "dev"


# --- Renames ------------------------------------------------------------------------------------------


@pytest.mark.req("WT-08")
def test_a_rename_moves_directory_and_record_and_leaves_no_lease(repository: Repository) -> None:
    repository.worktrees.create("old", label="kept")
    put_files(repository.path("old"), {"work": "unsaved"})
    renamed = repository.worktrees.change_name("old", "new")
    assert renamed.worktree_id == "new"
    assert renamed.label == "kept"
    assert files_in(repository.context.paths.worktrees) == {"new/work": "unsaved"}
    assert not (repository.root / ".jvs/worktrees/old").exists()
    assert repository.leases.state("old") is repository.leases.state("new") is None
    with pytest.raises(NotFound):
        repository.lease("old")
    assert events(repository)[-1].facts["renamed_to"] == "new"


@pytest.mark.req("WT-08")
def test_renaming_a_leased_worktree_is_a_conflict_that_names_the_holder(repository: Repository) -> None:
    repository.worktrees.create("old")
    with repository.lease("old", purpose="long work") as held:
        with pytest.raises(LockConflict, match="long work") as refused:
            repository.worktrees.change_name("old", "new", force=True)
        held.check()
    assert refused.value.facts["lock_id"] == held.lock_id
    repository.worktrees.change_name("old", "new")


@pytest.mark.req("WT-08")
def test_an_expired_lease_does_not_prevent_a_rename(repository: Repository) -> None:
    repository.worktrees.create("old")
    held = repository.lease("old")
    expire(repository, "old")
    repository.worktrees.change_name("old", "new")
    assert repository.leases.state("new") is None
    assert next_token(repository, "new") > held.token


def test_main_cannot_be_renamed_removed_or_replaced(repository: Repository) -> None:
    repository.worktrees.create("dev")
    with pytest.raises(Refused, match="every repository has it"):
        repository.worktrees.change_name(MAIN, "new")
    with pytest.raises(Refused, match="every repository has it"):
        repository.worktrees.remove(MAIN, save=None, force=True)
    with pytest.raises(AlreadyExists):
        repository.worktrees.change_name("dev", MAIN)
    assert repository.path(MAIN).is_dir()


def test_a_shared_worktree_is_renamed_and_removed_without_a_lease(repository: Repository) -> None:
    repository.worktrees.create("open", isolation=Isolation.SHARED)
    repository.worktrees.change_name("open", "wide-open")
    assert repository.worktrees.state("wide-open").is_shared
    repository.worktrees.remove("wide-open", save=None)
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN]


# --- Removal ------------------------------------------------------------------------------------------


@pytest.mark.req("WT-10")
def test_a_removal_deletes_payload_and_record_and_is_audited(repository: Repository) -> None:
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"a": "1", "b/c": "2"})
    (repository.path("dev") / "b").chmod(0o555)
    repository.worktrees.remove("dev", save=None)
    assert list((repository.context.paths.worktrees).iterdir()) == []
    assert not (repository.root / ".jvs/worktrees/dev").exists()
    assert list((repository.root / ".jvs/tmp").iterdir()) == []
    assert repository.leases.state("dev") is None
    assert events(repository)[-1].event == "worktree_removed"
    with pytest.raises(NotFound):
        repository.worktrees.remove("dev", save=None)


def test_a_file_written_during_a_removal_is_saved(repository: Repository) -> None:
    """The write comes after the snapshot of the worktree and before its directory is out of reach."""
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"a": "1"})

    def write_late(attempt: Attempt) -> Any:
        if "removed" in str(attempt.arguments):
            put_files(repository.payload("dev"), {"late": "2"})
        return attempt.perform()

    with interposed(write_late, ("rename_noreplace",)):
        removed = repository.remove_worktree("dev")
    assert removed.saved is not None
    caught = repository.snapshots.named(removed.saved)
    assert files_stored(repository.context, caught.snapshot_id) == {"a": "1", "late": "2"}
    assert caught.parent_id is not None
    assert files_stored(repository.context, caught.parent_id) == {"a": "1"}
    assert [each.event for each in events(repository)][-2:] == ["snapshot_published", "worktree_removed"]
    assert list((repository.root / ".jvs/tmp").iterdir()) == []


def test_a_half_deleted_directory_is_not_saved_as_work(repository: Repository) -> None:
    """A removal that failed while it deleted the directory is completed, and saves nothing more."""
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"a": "1", "b/c": "2"})

    def fail(attempt: Attempt) -> Any:
        if attempt.arguments[0] == "b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return attempt.perform()

    with interposed(fail, ("rmdir",)), pytest.raises(Failure, match="Input/output"):
        repository.remove_worktree("dev")
    before = repository.snapshots.all_ids()
    assert settle(repository.context, "dev") is not None
    assert repository.snapshots.all_ids() == before
    assert events(repository)[-1].event == "worktree_removed"


def test_a_live_lease_of_another_holder_is_never_overridden(repository: Repository) -> None:
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"work": "in progress"})
    with repository.lease("dev") as held:
        for force in (False, True):
            with pytest.raises(LockConflict):
                repository.worktrees.remove("dev", save=None, force=force)
            with pytest.raises(LockConflict):
                repository.worktrees.remove("dev", save=None, force=force, lock_id="another")
        held.check()
    assert files_in(repository.path("dev")) == {"work": "in progress"}


def test_the_holder_can_remove_its_worktree(repository: Repository) -> None:
    repository.worktrees.create("dev")
    held = repository.lease("dev")
    repository.worktrees.remove("dev", save=None, lock_id=held.lock_id)
    assert repository.leases.state("dev") is None
    with pytest.raises(NotFound):
        repository.context.config("dev")


def test_a_worktree_whose_directory_was_deleted_by_hand_can_be_removed(repository: Repository) -> None:
    repository.worktrees.create("dev")
    shutil.rmtree(repository.path("dev"))
    assert not repository.worktrees.state("dev").exists
    with pytest.raises(NotFound, match="lost its directory"):
        repository.path("dev")
    repository.worktrees.remove("dev", save=None)
    repository.worktrees.create("dev")
    assert repository.path("dev").is_dir()


@pytest.mark.plain_home("git renames it in place")
def test_a_directory_that_cannot_be_moved_is_refused_before_anything_is_decided(repository: Repository) -> None:
    """Its parent belongs to another user. A later failure would leave the operation stuck until that is fixed."""
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"a": "1"})
    parent = os.stat(repository.path("dev").parent)

    def refuse(attempt: Attempt) -> Any:
        return not os.path.samestat(os.fstat(attempt.options["dir_fd"]), parent) and attempt.perform()

    with interposed(refuse, ("access",)):
        for attempt in (
            lambda: repository.worktrees.change_name("dev", "new"),
            lambda: repository.remove_worktree("dev"),
        ):
            with pytest.raises(NotWritable):
                attempt()
        with repository.lease("dev") as held, pytest.raises(NotWritable):
            repository.snapshots.restore_in_place("dev", "none", Proof.of(held), RestoreOptions(reason="x"))
    assert repository.worktrees.state("dev").operation is None
    assert repository.leases.state("dev") is None
    repository.worktrees.change_name("dev", "new")


def test_a_directory_of_another_user_is_refused_before_anything_is_decided(repository: Repository) -> None:
    """Moving a directory to another parent writes its `..`, which needs the right to write to it."""
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    repository.worktrees.create("dev")
    os.chown(repository.path("dev"), 12345, -1)
    with (
        interposed(lambda attempt: attempt.arguments[0] != "dev" and attempt.perform(), ("access",)),
        pytest.raises(NotWritable),
    ):
        repository.worktrees.change_name("dev", "new")
    assert repository.worktrees.state("dev").operation is None
    repository.worktrees.change_name("dev", "new")


# --- Tokens -------------------------------------------------------------------------------------------


@pytest.mark.req("LC-06")
def test_tokens_grow_across_release_steal_rename_removal_and_recreation(repository: Repository) -> None:
    seen = {"a": [0], "b": [0]}
    for name in ("a", "b"):
        repository.worktrees.create(name)
        seen[name].append(next_token(repository, name))
    lease = repository.lease("a")
    seen["a"].append(lease.token)
    expire(repository, "a")
    seen["a"].append(next_token(repository, "a"))
    repository.worktrees.remove("b", save=None)
    repository.worktrees.change_name("a", "b")  # b continues from the greater token
    seen["b"] += [seen["a"][-1], next_token(repository, "b")]
    repository.worktrees.create("a")
    seen["a"].append(next_token(repository, "a"))
    for _ in range(3):
        repository.worktrees.remove("b", save=None)
        repository.worktrees.create("b")
        seen["b"].append(next_token(repository, "b"))
    for each in seen.values():
        assert all(later > earlier for earlier, later in itertools.pairwise(each)), seen
    counter = json_at(repository.root / ".jvs/tokens/b.json")
    assert counter["fencing_token"] == seen["b"][-1]
    repository.worktrees.remove("b", save=None)
    assert json_at(repository.root / ".jvs/tokens/b.json")["fencing_token"] >= seen["b"][-1]
    assert repository.context.store.read(LeaseKeys.of("b").lease) is None
