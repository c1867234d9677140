"""Taking snapshots: their guarantees and preconditions, and that a refusal leaves nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import (
    AlreadyExists,
    ConsistencyUnavailable,
    Failure,
    FencingMismatch,
    LockConflict,
    LockExpired,
    LockNotHeld,
    NotFound,
    OutcomeUnknown,
    UsageFailure,
)
from holdfast.repository import snapshots
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    WORKTREES,
    Consistency,
    Isolation,
    Operation,
    OperationKind,
    Proof,
    RepositoryContext,
    proof_of,
)
from holdfast.repository.history import resolve, worktree_history
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.repository.snapshots import MOST_LISTED, SnapshotOptions, snapshot
from holdfast.store.model import Create, Decision, Delete, Replace
from holdfast.trees.engines import Engine
from holdfast.trees.shared_dirs import located, read_shared_directories
from holdfast.trees.verify import verify
from proof.interpose import Attempt, interposed
from tests.locks.workers import Line, Workers
from tests.repository.repositories import add_reference, add_worktree, make_repository
from tests.repository.stages import expire, files_kept

pytestmark = pytest.mark.both_homes

BEST_EFFORT, QUIESCED = Consistency.BEST_EFFORT, Consistency.QUIESCED


class Site:
    """A repository, its `main`, and the proof of its lease."""

    def __init__(self, root: Path) -> None:
        self.repository = make_repository(root)
        self.context: RepositoryContext = self.repository.context
        self.payload = self.context.paths.payload(MAIN)
        lease = self.repository.leases.acquire(MAIN, self.repository.leases.request(ttl=3600.0)).lease
        self.proof = Proof(lease.lock_id, lease.fencing_token)
        (self.payload / "file").write_text("content")

    def take(self, **wanted: Any) -> str:
        return snapshot(self.context, MAIN, self.proof, SnapshotOptions(**wanted)).snapshot_id

    def ids(self, worktree: str = MAIN) -> list[str]:
        return [each.descriptor.snapshot_id for each in worktree_history(self.context, worktree).entries]

    def require_nothing_left(self, *expected: str) -> None:
        """Exactly these snapshots exist, newest first, and no other record, tree or scratch."""
        assert self.ids() == list(expected)
        assert {name for name, _ in self.context.store.scan(DESCRIPTORS)} == set(expected)
        trees = self.context.paths.snapshots
        assert ({each.name for each in trees.iterdir()} if trees.exists() else set()) == set(expected)
        rooms = self.context.paths.scratch
        assert not rooms.exists() or list(rooms.iterdir()) == []


@pytest.fixture
def site(scratch: Path) -> Site:
    return Site(scratch)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


def at_call(name: str, number: int, action: Callable[[], object]) -> Any:
    """Run the action just before the given call of this name."""
    count = 0

    def act(attempt: Attempt) -> Any:
        nonlocal count
        if attempt.name == name:
            count += 1
            if count == number:
                action()
        return attempt.perform()

    return interposed(act, (name,))


def once(action: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that runs the action at the first report, in the middle of the capture."""
    waiting = [action]

    def told(files: int, size: int) -> None:
        while waiting:
            waiting.pop()()

    return told


# --- Content ----------------------------------------------------------------------------------------


def test_a_snapshot_holds_the_content_of_the_worktree_and_becomes_the_head(site: Site) -> None:
    (site.payload / "directory").mkdir()
    (site.payload / "directory" / "below").write_text("deep")
    made = snapshot(site.context, MAIN, site.proof, SnapshotOptions(note="first"))
    tree = site.context.paths.tree(made.snapshot_id)
    assert files_kept(tree)["directory/below"] == "deep"
    assert list(verify(tree, made.payload_hash)) == []
    assert made.note == "first"
    assert made.files == 2
    assert made.parent_id is None
    assert (made.lock_id, made.fencing_token) == site.proof
    assert site.context.config(MAIN).head_snapshot_id == made.snapshot_id
    assert resolve(site.context, "head") == made
    second = snapshot(site.context, MAIN, site.proof)
    assert second.parent_id == made.snapshot_id
    site.require_nothing_left(second.snapshot_id, made.snapshot_id)


@pytest.mark.req("LC-27")
def test_a_ready_file_of_the_user_is_ordinary_payload(site: Site) -> None:
    (site.payload / ".READY").write_text("mine")
    made = site.take()
    tree = site.context.paths.tree(made)
    assert (tree / "payload" / ".READY").read_text() == "mine"
    (tree / ".READY").unlink()
    assert site.ids() == []


def test_a_descriptor_lists_no_more_than_a_record_can_hold(site: Site) -> None:
    """Otherwise many fifos with long paths would make a snapshot impossible."""
    if sys.platform == "win32":
        raise NotImplementedError("there are no fifos on Windows")
    for number in range(MOST_LISTED + 2):
        os.mkfifo(site.payload / f"fifo-{number}")
    made = snapshot(site.context, MAIN, site.proof)
    assert len(made.special) == MOST_LISTED + 1
    assert made.special[-1] == "... and 2 more"
    assert made.files >= MOST_LISTED + 2


def test_unchanged_files_are_stored_once(site: Site) -> None:
    trees = [site.context.paths.tree(site.take(engine=Engine.LINKED)) for _ in range(2)]
    inodes = {located(tree, read_shared_directories(tree), b"file").stat().st_ino for tree in trees}
    assert len(inodes) == 1
    assert (site.payload / "file").stat().st_ino not in inodes


def test_files_are_not_linked_to_those_of_a_doomed_parent(site: Site) -> None:
    first = site.take(engine=Engine.LINKED)
    key = DESCRIPTORS.key(first)
    doomed = msgspec.structs.replace(resolve(site.context, first), doomed_by="plan")
    site.context.store.transact([key], lambda view, now: Decision([Replace(key, doomed)], None))
    second = site.take(engine=Engine.LINKED)
    inodes = {(site.context.paths.tree(each) / "payload" / "file").stat().st_ino for each in (first, second)}
    assert len(inodes) == 2


def test_a_tag_is_created_in_the_same_commit(site: Site) -> None:
    made = site.take(tag="v1")
    assert resolve(site.context, "v1").snapshot_id == made
    with pytest.raises(AlreadyExists):
        site.take(tag="v1")
    with pytest.raises(UsageFailure):
        site.take(tag="head")
    with (
        at_call("sync_filesystem", 1, lambda: add_reference(site.context, "v2", made)),
        pytest.raises(AlreadyExists),
    ):
        site.take(tag="v2")  # another process created it first
    site.require_nothing_left(made)


# --- Consistency ------------------------------------------------------------------------------------


@pytest.mark.req("LC-19", "LC-20")
def test_quiesced_is_the_default_and_the_requested_level_is_stored(site: Site) -> None:
    assert resolve(site.context, site.take()).consistency_level is QUIESCED
    assert resolve(site.context, site.take(consistency=BEST_EFFORT)).consistency_level is BEST_EFFORT
    stored = site.context.paths.root / ".jvs" / "descriptors" / f"{site.ids()[0]}.json"
    assert '"consistency_level": "best_effort"' in stored.read_text()


@pytest.mark.req("WT-05", "LC-23")
@pytest.mark.parametrize(
    ("policy", "wanted", "expected"),
    [
        (None, None, BEST_EFFORT),
        (QUIESCED, None, QUIESCED),
        (None, QUIESCED, QUIESCED),
        (QUIESCED, BEST_EFFORT, BEST_EFFORT),
    ],
)
def test_a_shared_worktree_needs_no_lock_and_is_best_effort_unless_a_policy_says_otherwise(
    site: Site, policy: Consistency | None, wanted: Consistency | None, expected: Consistency
) -> None:
    add_worktree(site.context, "open", isolation=Isolation.SHARED, consistency=policy)
    made = snapshot(site.context, "open", None, SnapshotOptions(consistency=wanted))
    assert made.consistency_level is expected
    assert made.lock_id is None
    assert site.ids("open") == [made.snapshot_id]


def test_a_policy_applies_to_an_exclusive_worktree_too(site: Site) -> None:
    add_worktree(site.context, "loose", consistency=BEST_EFFORT)
    lease = site.repository.lease("loose")
    made = snapshot(site.context, "loose", Proof(lease.lock_id, lease.token))
    assert made.consistency_level is BEST_EFFORT


@pytest.mark.req("LC-19", "LC-29")
@pytest.mark.parametrize("change", ["write", "create", "delete"])
def test_content_that_changes_during_capture_is_not_published_as_quiesced(site: Site, change: str) -> None:
    def happen() -> None:
        if change == "write":
            (site.payload / "file").write_text("changed")
        elif change == "create":
            (site.payload / "new").write_text("new")
        else:
            (site.payload / "file").unlink()

    with pytest.raises(ConsistencyUnavailable) as refused:
        site.take(progress=once(happen))
    assert refused.value.code == "E_CONSISTENCY_UNAVAILABLE"
    site.require_nothing_left()


def writing(payload: Path) -> Callable[[Line], None]:
    """A worker that writes to many files until it is told to stop."""

    def work(line: Line) -> None:
        number = 0
        line.say("writing")
        while not line.has_news():
            for each in range(0, 1000, 50):
                (payload / f"many-{each}").write_text(str(number))
            number += 1
        line.say("stopped")

    return work


def undisturbed(site: Site) -> list[str]:
    """Take quiesced snapshots until a write disturbs one; return those before it, during which nothing was written."""
    taken: list[str] = []
    while True:
        try:
            taken.append(site.take())
        except ConsistencyUnavailable:
            return taken
        assert len(taken) < 50, "no write disturbed a snapshot"


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.req("LC-19", "LC-21")
def test_with_a_concurrent_writer_quiesced_fails_and_best_effort_works(site: Site, workers: Workers) -> None:
    for each in range(1000):
        (site.payload / f"many-{each}").write_text("")
    writer = workers.start(writing(site.payload))
    assert writer.hear() == "writing"
    taken = undisturbed(site)
    site.require_nothing_left(*reversed(taken))
    rough = snapshot(site.context, MAIN, site.proof, SnapshotOptions(consistency=BEST_EFFORT))
    assert writer.ask("stop") == "stopped"
    assert rough.files == 1001
    assert list(verify(site.context.paths.tree(rough.snapshot_id), rough.payload_hash)) == []
    assert resolve(site.context, site.take()).consistency_level is QUIESCED


def test_a_directory_replaced_during_capture_is_not_published(site: Site) -> None:
    def replace() -> None:
        site.payload.rename(site.payload.parent / "away")
        site.payload.mkdir()

    with pytest.raises(ConsistencyUnavailable):
        site.take(consistency=BEST_EFFORT, progress=once(replace))
    site.require_nothing_left()


def test_a_directory_replaced_between_capture_and_publication_is_not_published(site: Site) -> None:
    def replace() -> None:
        site.payload.rename(site.payload.parent / "away")
        site.payload.mkdir()

    with at_call("rename_noreplace", 1, replace), pytest.raises(ConsistencyUnavailable):
        site.take()
    site.require_nothing_left()


def test_a_worktree_that_lost_its_directory_is_reported_as_such(site: Site) -> None:
    site.payload.rename(site.payload.parent / "away")
    with pytest.raises(NotFound, match="does not exist"):
        site.take()


# --- The right to publish ---------------------------------------------------------------------------


@pytest.mark.req("LC-23", "LC-29")
def test_an_exclusive_worktree_needs_its_lock(site: Site) -> None:
    with pytest.raises(LockNotHeld):
        snapshot(site.context, MAIN, None)
    site.take()


@pytest.mark.req("LC-18")
@pytest.mark.parametrize("proof", ["another lock", "another token"])
def test_a_proof_with_another_lock_or_token_is_refused(site: Site, proof: str) -> None:
    lock_id, token = site.proof
    wrong = Proof("somebody", token) if proof == "another lock" else Proof(lock_id, token - 1)
    with pytest.raises(FencingMismatch):
        snapshot(site.context, MAIN, wrong)
    site.require_nothing_left()


@pytest.mark.req("LC-18", "LC-29")
def test_an_expired_lease_publishes_nothing(site: Site) -> None:
    with at_call("sync_filesystem", 1, lambda: expire(site.repository)), pytest.raises(LockExpired):
        site.take()
    site.require_nothing_left()
    with pytest.raises(LockExpired):
        site.take()


@pytest.mark.req("LC-17", "LC-18")
def test_a_lease_stolen_and_released_meanwhile_publishes_nothing(site: Site) -> None:
    """If the token counter were reset, the old token would be valid again."""

    def steal_and_release() -> None:
        expire(site.repository)
        site.repository.steal(MAIN)
        lease = site.repository.leases.state(MAIN)
        assert lease is not None
        site.repository.leases.release(MAIN, lease.lease.lock_id)

    with at_call("sync_filesystem", 1, steal_and_release), pytest.raises(FencingMismatch):
        site.take()
    site.require_nothing_left()


def test_the_proof_of_a_lock_never_has_the_token_of_another(site: Site) -> None:
    assert proof_of(site.context, MAIN, site.proof.lock_id) == site.proof
    expire(site.repository)
    thief = site.repository.steal(MAIN).lease
    with pytest.raises(FencingMismatch):
        proof_of(site.context, MAIN, site.proof.lock_id)
    assert proof_of(site.context, MAIN, thief.lock_id).token == thief.fencing_token
    assert proof_of(site.context, MAIN, "old", 1) == Proof("old", 1)


@pytest.mark.req("LC-12")
def test_the_library_refuses_to_publish_with_a_lost_lease(site: Site) -> None:
    add_worktree(site.context, "dev")
    held = site.repository.lease("dev")
    made = site.repository.snapshot("dev", held, note="held")
    assert made.fencing_token == held.token
    expire(site.repository, "dev")
    with pytest.raises(LockExpired):
        held.renew()
    assert held.lost.is_set()
    with pytest.raises(LockExpired):
        site.repository.snapshot("dev", held)
    assert site.ids("dev") == [made.snapshot_id]


def _writes(site: Site) -> None:
    (site.payload / "file").write_text("the thief's")


def _replaces_the_directory(site: Site) -> None:
    site.payload.rename(site.payload.with_name("aside"))
    site.payload.symlink_to("aside")


def _begins_an_operation(site: Site) -> None:
    key = OPERATIONS.key(MAIN)
    pending = Operation(
        operation_id="x",
        kind=OperationKind.RESTORE,
        worktree_id=MAIN,
        begun_at="2024-01-01T00:00:00Z",
        holder_id="thief",
    )
    site.context.store.transact([key], lambda view, now: Decision([Create(key, pending)], None))


def _removes_the_record(site: Site) -> None:
    site.context.store.transact([WORKTREES.key(MAIN)], lambda view, now: Decision([Delete(WORKTREES.key(MAIN))], None))


@pytest.mark.req("LC-18")
@pytest.mark.parametrize("act", [_writes, _replaces_the_directory, _begins_an_operation, _removes_the_record])
@pytest.mark.parametrize("publish", ["snapshot", "restore"])
def test_a_holder_that_was_stolen_from_learns_that_whatever_the_thief_did(
    site: Site, act: Callable[[Site], None], publish: str
) -> None:
    first = site.take()
    (site.payload / "file").write_text("unsaved")

    def steal(*_: object) -> None:
        expire(site.repository)
        site.repository.steal(MAIN)
        act(site)

    snapshots, how = site.repository.snapshots, RestoreOptions(reason="x", progress=once(steal))
    attempts: dict[str, Callable[[], object]] = {
        "snapshot": lambda: snapshots.take(MAIN, site.proof, SnapshotOptions(progress=once(steal))),
        "restore": lambda: snapshots.restore_in_place(MAIN, first, site.proof, how),
    }
    with pytest.raises(FencingMismatch) as failure:
        attempts[publish]()
    assert failure.value.facts["current_token"] == site.proof.token + 1
    assert [each for each in site.repository.snapshots.all_ids() if each != first] == []


def test_a_held_lease_that_was_stolen_is_a_fencing_mismatch_even_if_its_holder_only_knows_that_it_is_late(
    site: Site,
) -> None:
    site.repository.leases.release(MAIN, site.proof.lock_id)
    held = site.repository.lease(MAIN)
    expire(site.repository)
    with pytest.raises(LockExpired):
        held.renew()
    site.repository.steal(MAIN)
    with pytest.raises(FencingMismatch):
        site.repository.snapshot(MAIN, held)


def test_nothing_is_published_while_another_operation_is_pending(site: Site) -> None:
    begin = partial(_begins_an_operation, site)
    with at_call("sync_filesystem", 1, begin), pytest.raises(LockConflict, match="thief"):
        site.take()
    site.require_nothing_left()


def test_nothing_is_published_into_another_worktree_of_the_same_name(site: Site) -> None:
    add_worktree(site.context, "open", isolation=Isolation.SHARED)

    def exchange() -> None:
        key = WORKTREES.key("open")
        other = msgspec.structs.replace(site.context.config("open"), created_at="2030-01-01T00:00:00Z")
        site.context.store.transact([key], lambda view, now: Decision([Replace(key, other)], None))

    with at_call("sync_filesystem", 1, exchange), pytest.raises(ConsistencyUnavailable):
        snapshot(site.context, "open", None)
    assert site.ids("open") == []
    site.require_nothing_left()


# --- Unknown outcomes and failures ------------------------------------------------------------------


def test_a_tree_that_may_have_been_published_is_left_in_place(site: Site) -> None:
    def publish(*arguments: Any) -> Any:
        REAL_PUBLISH(*arguments)
        raise OutcomeUnknown("commit", "the line is cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "_publish", publish)
        with pytest.raises(OutcomeUnknown):
            site.take()
    made = site.ids()
    assert len(made) == 1
    assert list(verify(site.context.paths.tree(made[0]), resolve(site.context, "head").payload_hash)) == []


REAL_PUBLISH = snapshots._publish


def test_an_interrupt_after_the_commit_point_undoes_nothing(site: Site) -> None:
    def publish(*arguments: Any) -> Any:
        REAL_PUBLISH(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "_publish", publish)
        with pytest.raises(KeyboardInterrupt):
            site.take()
    assert len(site.ids()) == 1


def test_an_error_of_any_call_is_reported_as_a_failure(site: Site) -> None:
    def fail(attempt: Attempt) -> Any:
        raise OSError(28, os.strerror(28))

    for name in ("rename_noreplace", "sync_filesystem", "mkdir", "link"):
        with interposed(fail, (name,)), pytest.raises(Failure):
            site.take()
    assert site.ids() == []


def test_a_reopened_repository_continues_the_history(site: Site) -> None:
    first = site.take()
    again = Repository(site.context.paths.root)
    second = snapshot(again.context, MAIN, site.proof)
    assert second.parent_id == first
