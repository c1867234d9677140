"""A second clone takes part in a repository on a server: `holdfast join`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from holdfast.errors import (
    AlreadyExists,
    Failure,
    LockConflict,
    NotFound,
    Refused,
    SnapshotElsewhere,
    WorktreeElsewhere,
)
from holdfast.git.checkout import clone_in
from holdfast.repository import joining
from holdfast.repository import repository as opening
from holdfast.repository.context import (
    FORMAT,
    MAIN,
    OPERATIONS,
    OperationKind,
    Proof,
    RepositoryFormat,
)
from holdfast.repository.git_init import deinitialise
from holdfast.repository.init import initialise
from holdfast.repository.landing import LandOptions
from holdfast.repository.landing_records import LandingState
from holdfast.repository.locating import main_worktree
from holdfast.repository.migration import migrate
from holdfast.repository.repository import Repository
from holdfast.repository.snapshots import SnapshotOptions
from holdfast.store import addresses, approvals
from holdfast.store.files import FileStore
from holdfast.store.model import Create, Decision, Replace
from proof.crash import Outcome, Scenario, kill_points
from proof.effort import SHARE
from tests.repository.clones import Clone, make_remote
from tests.repository.stages import LASTING, files_in, put_files
from tests.support.homes import SAFE, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")
KINDS = ("postgresql", "etcd")


@pytest.fixture
def remote(scratch: Path) -> Path:
    return make_remote(scratch / "remote.git")


@pytest.fixture
def first(scratch: Path, remote: Path, postgres_url: str) -> Clone:
    clone = Clone(scratch / "first", remote)
    clone.adopt(postgres_url)
    return clone


@pytest.fixture
def second(scratch: Path, remote: Path, first: Clone, postgres_url: str) -> Clone:
    clone = Clone(scratch / "second", remote)
    clone.join(postgres_url, "beta")
    return clone


def findings(clone: Clone) -> list[str]:
    found = clone.repository.examine()
    return [str(each) for each in found if each.code != "store-risky"]  # the etcd of the tests


# --- Joining ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_clone_joins_and_everything_is_shared(
    kind: str, scratch: Path, remote: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres_url" if kind == "postgresql" else "etcd_url")
    first, second = Clone(scratch / "first", remote), Clone(scratch / "second", remote)
    first.adopt(url)
    issue = first.issue("made in the first clone")
    before = git("status", "--porcelain", at=second.path)

    done = second.join(url, "beta")

    assert (done.name, done.is_new, done.checkout) == ("beta", True, second.path)
    assert done.format.repository_id == first.repository.format.repository_id
    assert git("status", "--porcelain", at=second.path) == before
    assert second.tracker().issue(issue).title == "made in the first clone"
    assert second.repository.worktree_around(second.path / "src") == "beta"
    assert main_worktree(str(second.repository.root)) == "beta"
    assert [each.worktree_id for each in first.repository.worktrees.configs()] == [MAIN, "beta"]
    assert second.join(url).is_new is False  # again
    with pytest.raises(AlreadyExists, match="already joined, as beta"):
        second.join(url, "gamma")
    assert findings(first) == findings(second) == []


def test_naming_the_store_approves_it_on_this_machine(second: Clone, postgres_url: str) -> None:
    root = second.repository.root
    approvals.revoke(root)
    addresses._remembered.clear()
    with pytest.raises(Refused, match="not approved"):
        Repository(second.path)
    second.join(postgres_url)
    addresses._remembered.clear()
    assert Repository(second.path).root == root


def test_an_unrelated_repository_is_refused_and_stays_as_it_was(scratch: Path, first: Clone, postgres_url: str) -> None:
    other = Clone(scratch / "other", make_remote(scratch / "other.git", content="something else"))
    with pytest.raises(Refused, match="is not a clone of this repository"):
        other.join(postgres_url)
    assert not (other.path / ".git/holdfast").exists()
    assert [each.worktree_id for each in first.repository.worktrees.configs()] == [MAIN]


def test_a_shallow_clone_is_refused_until_it_is_complete(
    scratch: Path, remote: Path, first: Clone, postgres_url: str
) -> None:
    put_files(first.path, {"more": "1"})
    git("add", "-A", at=first.path)
    git("commit", "-qm", "second", at=first.path)
    git("push", "-q", at=first.path)
    shallow = Clone(scratch / "shallow", f"file://{remote}")
    git("fetch", "-q", "--depth=1", "origin", "trunk", at=shallow.path)
    git("reflog", "expire", "--expire=now", "--all", at=shallow.path)
    assert (shallow.path / ".git/shallow").exists()
    with pytest.raises(Refused) as raised:
        shallow.join(postgres_url)
    assert "--unshallow" in raised.value.hint
    git("fetch", "-q", "--unshallow", at=shallow.path)
    assert shallow.join(postgres_url).is_new


def test_a_store_without_a_repository_is_not_found(scratch: Path, remote: Path, postgres_url: str) -> None:
    with pytest.raises(NotFound, match="has no repository"):
        Clone(scratch / "alone", remote).join(postgres_url)


def test_a_plain_home_is_refused(scratch: Path, remote: Path, postgres_url: str) -> None:
    initialise(scratch / "plain", store=postgres_url, probe=lambda directory: SAFE)
    with pytest.raises(Refused, match="not in a git checkout"):  # see `test_content` for empty directories
        Clone(scratch / "second", remote).join(postgres_url)


def test_files_are_no_store_to_join(scratch: Path, remote: Path, first: Clone) -> None:
    with pytest.raises(Refused, match="is not a server"):
        Clone(scratch / "second", remote).join((scratch / "records").as_uri())


def test_a_repository_with_another_store_is_refused(scratch: Path, remote: Path, first: Clone, etcd_url: str) -> None:
    with pytest.raises(AlreadyExists, match="already a repository"):
        first.join(etcd_url)
    local = Clone(scratch / "local", remote)
    local.adopt()
    with pytest.raises(AlreadyExists, match="with its records in files"):
        local.join(etcd_url)


def test_the_first_clone_records_the_first_commit_if_it_is_not_known(
    scratch: Path, remote: Path, first: Clone, postgres_url: str
) -> None:
    store = first.repository.context.store
    known = first.repository.format

    def forget(view: object, now: float) -> Decision[None]:
        old = RepositoryFormat(
            version=1, repository_id=known.repository_id, created_at=known.created_at, home=known.home
        )
        return Decision([Replace(FORMAT, old)], None)

    store.transact([FORMAT], forget)
    second = Clone(scratch / "second", remote)
    with pytest.raises(Refused, match="does not have the first commit"):
        second.join(postgres_url)
    done = first.join(postgres_url)
    assert (done.name, done.is_new) == (MAIN, False)
    assert done.format.history == known.history == git("rev-list", "--max-parents=0", "HEAD", at=first.path)
    assert second.join(postgres_url).is_new


def test_clones_of_one_machine_get_different_names(
    scratch: Path, remote: Path, first: Clone, postgres_url: str
) -> None:
    names = [Clone(scratch / name, remote).join(postgres_url).name for name in ("one", "two", "three")]
    assert len(set(names)) == 3
    assert names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]


def test_a_taken_name_is_refused_and_leaves_no_clone(
    scratch: Path, remote: Path, second: Clone, postgres_url: str
) -> None:
    third = Clone(scratch / "third", remote)
    for name in ("beta", MAIN):
        with pytest.raises(AlreadyExists):
            third.join(postgres_url, name)
        assert clone_in(str(third.path / ".git")) == (MAIN, "")
        with pytest.raises(NotFound):
            Repository(third.path)
    assert third.join(postgres_url, "gamma").name == "gamma"


@pytest.mark.parametrize("step", ["_commit", "configure_store"])
def test_an_interrupted_join_means_nothing_and_is_continued(
    step: str, scratch: Path, remote: Path, first: Clone, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Clone(scratch / "second", remote)

    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(joining, step, die)
        with pytest.raises(KeyboardInterrupt):
            second.join(postgres_url)
    with pytest.raises(NotFound):
        Repository(second.path)
    name, identity = clone_in(str(second.path / ".git"))
    done = second.join(postgres_url)
    assert (done.name, clone_in(str(second.path / ".git"))[1]) == (name, identity)
    assert [each.worktree_id for each in first.repository.worktrees.configs()] == [MAIN, name]


class Join(Scenario):
    """A join of one more clone. After a kill, there is no repository, or the clone is part of it; the next join
    finishes it."""

    def __init__(self, first: Clone, remote: Path, store: str) -> None:
        self._first, self._remote, self._store = first, remote, store

    def prepare(self, directory: Path) -> None:
        Clone(directory / "clone", self._remote)

    def operate(self, directory: Path) -> object:
        return Clone.at(directory / "clone").join(self._store)

    def check(self, directory: Path, outcome: Outcome) -> None:
        clone = Clone.at(directory / "clone")
        with contextlib.suppress(NotFound):
            repository = clone.repository
            assert repository.config(repository.context.paths.main).clone == repository.context.paths.main
        done = clone.join(self._store)
        identity = clone_in(str(clone.path / ".git"))[1]
        found = [
            each for each in self._first.repository.worktrees.configs() if each.git and each.git.clone_id == identity
        ]
        assert [each.worktree_id for each in found] == [done.name]
        assert findings(clone) == []
        self._first.repository.worktrees.forget(done.name)


@pytest.mark.sampled(1)
def test_a_join_that_is_killed_anywhere_is_finished_by_the_next(first: Clone, remote: Path, postgres_url: str) -> None:
    report = kill_points(Join(first, remote, postgres_url), names=LASTING, share=SHARE)
    report.require_clean(at_least=3)


def test_older_programs_refuse_a_joined_repository(second: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "CONTENT_VERSION", 1)  # what an older program knows
    with pytest.raises(Refused, match="has format 2"):
        Repository(second.path)


# --- Which clone has a directory ----------------------------------------------------------------------


def test_a_worktree_is_in_one_clone_and_others_say_so(first: Clone, second: Clone) -> None:
    first.repository.worktrees.create("here")
    there = second.repository
    for attempt in (
        lambda: there.path("here"),
        lambda: there.lease("here"),
        lambda: there.remove_worktree("here"),
        lambda: there.worktrees.change_name("here", "elsewhere"),
        lambda: there.worktrees.usage("here"),
        lambda: there.lease(MAIN),
    ):
        with pytest.raises(WorktreeElsewhere, match="is in the clone main") as raised:
            attempt()
        assert raised.value.facts["clone"] == MAIN
    state = there.worktrees.state("here")
    assert (state.clone, state.exists, state.path) == (MAIN, False, first.repository.path("here"))
    with pytest.raises(AlreadyExists):
        there.worktrees.create("here")
    there.worktrees.create("another")
    assert first.repository.worktrees.state("another").clone == "beta"
    assert findings(first) == findings(second) == []


def test_a_directory_of_the_same_name_does_not_stand_in_for_that_of_another_clone(first: Clone, second: Clone) -> None:
    """The lease and every publish compare the clone in the record, in the transaction."""
    second.repository.worktrees.create("work")
    second.take("work", {"a": "of the second"})
    first.repository.worktrees.forget("work")
    first.repository.worktrees.create("work")
    with pytest.raises(WorktreeElsewhere):
        second.repository.lease("work")
    with first.repository.lease("work") as lease, pytest.raises(WorktreeElsewhere):
        second.repository.snapshots.take("work", Proof(lease.lock_id, lease.token), SnapshotOptions())
    assert first.take("work", {"a": "of the first"})
    assert [each.code for each in second.repository.examine()] == ["worktree-name-stale"]
    second.repository.repair()
    left = second.path.with_name("second.worktrees") / "work"
    assert second.repository.worktrees.adopt(left, name="rescued").clone == "beta"


def test_an_unfinished_operation_of_another_clone_is_left_to_it(first: Clone, second: Clone) -> None:
    """The lock that tells whether its process lives does not reach."""
    context = second.repository.context

    def begin(view: object, now: float) -> Decision[None]:
        operation = context.operation(OperationKind.CREATE, "0" * 16, "work", now, git=context.config("beta").git)
        return Decision([Create(OPERATIONS.key("work"), operation)], None)

    context.store.transact([OPERATIONS.key("work")], begin)
    with pytest.raises(LockConflict):
        first.repository.worktrees.create("work")
    assert findings(first) == []
    assert [each.code for each in second.repository.examine()] == ["operation-unfinished"]
    second.repository.repair()
    first.repository.worktrees.create("work")


def test_garbage_is_collected_in_the_first_clone_alone(first: Clone, second: Clone) -> None:
    for clone, name in ((first, "one"), (second, "two")):
        clone.repository.worktrees.create(name)
        clone.take(name, {"a": name})
        clone.repository.remove_worktree(name, keep_for=0)
    plan = first.repository.gc.plan().plan
    assert len(plan.snapshots) == 2
    with pytest.raises(Refused, match="collected in the clone main"):
        second.repository.gc.run(plan.plan_id)
    first.repository.gc.run(plan.plan_id)
    assert not git("for-each-ref", "refs/holdfast/snapshots", at=first.path)
    assert [each.code for each in second.repository.examine()] == ["tree-orphaned"]
    second.repository.repair()
    assert findings(first) == findings(second) == []


def test_the_content_of_a_snapshot_travels_through_the_remote(scratch: Path, first: Clone, second: Clone) -> None:
    taken = first.take(MAIN, {"src/a": "new"})
    with pytest.raises(SnapshotElsewhere, match="taken in the clone main") as raised:
        second.repository.snapshots.export(taken, scratch / "out")
    assert "snapshot push" in raised.value.hint
    assert findings(second) == []
    first.repository.snapshots.push("origin", [taken])
    second.repository.snapshots.fetch("origin", [taken], seen_from="beta")
    second.repository.snapshots.export(taken, scratch / "out")
    assert files_in(scratch / "out") == files_in(first.path)
    second.repository.worktrees.create("from-there", snapshot=taken)
    assert (second.repository.path("from-there") / "src/a").read_text() == "new"
    assert findings(first) == findings(second) == []


def test_the_records_of_several_clones_do_not_move_to_files(first: Clone, second: Clone) -> None:
    repository = first.repository
    with pytest.raises(Refused, match="must be on a server"):
        migrate(repository.context.store, FileStore(repository.root))
    repository.worktrees.forget("beta")
    assert first.landings().default_remote() is None  # as if nobody had ever joined
    migrate(repository.context.store, FileStore(repository.root))


# --- Landing ------------------------------------------------------------------------------------------


def work(clone: Clone, name: str, files: dict[str, str]) -> str:
    """Queue the work of a new worktree; the id of the entry."""
    repository = clone.repository
    repository.worktrees.create(name)
    put_files(repository.path(name), files)
    landings = clone.landings()
    with repository.lease(name) as lease:
        return landings.enqueue(name, Proof.of(lease), LandOptions(remote=landings.default_remote())).landing_id


def test_work_of_both_clones_lands_on_the_branch_of_the_remote(first: Clone, second: Clone, remote: Path) -> None:
    one, two = work(first, "one", {"one": "1"}), work(second, "two", {"two": "2"})
    assert first.landings().wait(two).state is LandingState.LANDED  # also the entry of the other clone
    assert second.landings().wait(one).state is LandingState.LANDED
    assert {"one", "two"} <= set(git("ls-tree", "--name-only", "trunk", at=remote).split())
    assert second.landings().wait(work(second, "three", {"three": "3"})).state is LandingState.LANDED
    assert {"one", "two", "three"} <= set(files_in(second.path))  # the checkout of the lander follows
    assert git("for-each-ref", "refs/holdfast/landing", at=remote) == ""


def test_landing_on_a_local_branch_is_refused_when_several_clones_share_the_repository(
    first: Clone, second: Clone
) -> None:
    for clone in (first, second):
        clone.repository.worktrees.create(clone.path.name)
        landings = clone.landings()
        assert landings.default_remote() == "origin"
        with clone.repository.lease(clone.path.name) as lease, pytest.raises(Refused, match="of a remote"):
            landings.enqueue(clone.path.name, Proof.of(lease), LandOptions())


def test_a_clone_without_a_remote_says_that_it_cannot_land(first: Clone, second: Clone) -> None:
    assert second.landings().start() == git("rev-parse", "origin/trunk", at=second.path)
    git("remote", "remove", "origin", at=second.path)
    with pytest.raises(Refused, match="this clone has none"):
        second.landings().default_remote()
    assert second.landings().start() is None


def test_new_work_begins_where_the_other_clone_has_landed(first: Clone, second: Clone) -> None:
    assert first.landings().start() == git("rev-parse", "HEAD", at=first.path)
    landed = first.landings().wait(work(first, "one", {"one": "1"}))
    assert second.landings().start() == landed.landed_as


def test_the_queue_of_a_local_branch_is_worked_off_in_its_own_clone(
    scratch: Path, remote: Path, first: Clone, postgres_url: str
) -> None:
    entry = work(first, "early", {"early": "1"})  # before anybody has joined
    second = Clone(scratch / "second", remote)
    second.join(postgres_url)
    second.landings().work_off()
    with pytest.raises(Refused, match="a branch of the clone main"):
        second.landings().wait(entry)
    assert first.landings().wait(entry).state is LandingState.LANDED


# --- Leaving ------------------------------------------------------------------------------------------


def test_deinit_in_a_joined_clone_leaves_the_others_alone(first: Clone, second: Clone, postgres_url: str) -> None:
    first.repository.worktrees.create("one")
    second.repository.worktrees.create("two")
    with first.repository.lease("one"):
        with second.repository.lease("two"), pytest.raises(Refused, match="holds the lease two"):
            deinitialise(second.repository)
        deinitialise(second.repository)
    assert [each.worktree_id for each in first.repository.worktrees.configs()] == [MAIN, "one"]
    assert git("for-each-ref", "refs/holdfast", at=second.path) == ""
    assert findings(first) == []
    assert second.join(postgres_url, "beta").is_new
    with pytest.raises(Refused, match="on a server"):
        deinitialise(first.repository)


def test_the_worktrees_of_a_lost_clone_can_be_forgotten(first: Clone, second: Clone) -> None:
    second.repository.worktrees.create("two")
    with second.repository.lease("two"), pytest.raises(LockConflict):
        first.repository.worktrees.forget("two")
    for name in ("two", "beta"):
        with pytest.raises(Refused):
            second.repository.worktrees.forget(name)
    with pytest.raises(Refused):
        second.repository.worktrees.forget(MAIN)
    assert first.repository.worktrees.forget("beta") == ["two", "beta"]
    assert [each.worktree_id for each in first.repository.worktrees.configs()] == [MAIN]


# --- A planted clone file -----------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [b"..", b".", b"a/b", b"\xff", b"", b"x\0y", b"-x", b"n" * 10_000, b"other\n"])
def test_a_planted_clone_file_chooses_no_directory(planted: bytes, scratch: Path, remote: Path) -> None:
    clone = Clone(scratch / "clone", remote)
    clone.adopt()
    outside = scratch / "outside"
    outside.mkdir()
    (clone.path / ".git/holdfast/clone").write_bytes(planted)
    repository = clone.repository
    assert repository.context.paths.payload(repository.context.paths.main) == clone.path
    with contextlib.suppress(Failure), repository.lease(repository.context.paths.main) as lease:
        repository.snapshot(repository.context.paths.main, lease)
    assert clone.repository.examine() is not None
    assert files_in(outside) == {}


def test_a_clone_file_that_is_a_link_or_a_pipe_is_none(scratch: Path, remote: Path) -> None:
    clone = Clone(scratch / "clone", remote)
    clone.adopt()
    place, elsewhere = clone.path / ".git/holdfast/clone", scratch / "elsewhere"
    elsewhere.write_text("other\n1\n")
    place.symlink_to(elsewhere)
    assert clone_in(str(clone.path / ".git")) == (MAIN, "")
    place.unlink()
    os.mkfifo(place)
    assert clone_in(str(clone.path / ".git")) == (MAIN, "")
