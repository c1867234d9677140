"""Restores into a new worktree, in place, and of a single path keep replaced content, down to the last write."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import (
    AlreadyExists,
    ConsistencyUnavailable,
    Corrupt,
    Failure,
    FencingMismatch,
    LockConflict,
    LockNotHeld,
    NotFound,
    NotWritable,
    PartialSnapshot,
    PathEscape,
    Refused,
    UsageFailure,
)
from holdfast.repository import exchange as repository_exchange
from holdfast.repository import payloads
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    Consistency,
    Descriptor,
    Isolation,
    Proof,
)
from holdfast.repository.history import resolve, worktree_history
from holdfast.repository.repository import Repository
from holdfast.repository.restore import Restored, RestoreOptions, restore_in_place
from holdfast.repository.snapshots import snapshot
from holdfast.repository.worktrees import settle
from holdfast.store.model import Decision, Replace
from holdfast.trees.verify import verify
from proof.crash import Kill, cut_short, fresh
from proof.crash import scratch as swept_directory
from proof.interpose import Attempt, interposed
from tests.repository.interruptions import (
    FIRST,
    UNSAVED,
    World,
    cases,
    content_of,
    killed_everywhere,
    opened,
    world,
    write,
)
from tests.repository.repositories import add_worktree
from tests.repository.stages import expire, files_stored, make_repository
from tests.support.loop_mounts import LoopMount

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="directories cannot be exchanged"),
]

OLD = {"file": "old", "directory/a": "old", "directory/b": "old"}
NEW = {"file": "new", "directory/a": "new", "more": "new"}


class Site:
    """A worktree with one snapshot, whose content has changed since."""

    def __init__(self, root: Path) -> None:
        self.repository = make_repository(root)
        self.context = self.repository.context
        self.payload = self.context.paths.payload(MAIN)
        lease = self.repository.leases.acquire(MAIN, self.repository.leases.request(ttl=3600.0)).lease
        self.proof = Proof(lease.lock_id, lease.fencing_token)
        write(self.payload, OLD)
        self.first = snapshot(self.context, MAIN, self.proof).snapshot_id
        write(self.payload, NEW)

    def restore(self, **how: Any) -> Restored:
        wanted = RestoreOptions(**{"reason": "tested", **how})
        return restore_in_place(self.context, MAIN, self.first, self.proof, wanted)

    def history(self, worktree: str = MAIN) -> list[Descriptor]:
        return [each.descriptor for each in worktree_history(self.context, worktree).entries]

    def kept(self, snapshot_id: str) -> dict[str, str]:
        return files_stored(self.context, snapshot_id)

    def require_nothing_happened(self) -> None:
        assert content_of(self.payload) == NEW
        assert [each.snapshot_id for each in self.history()] == [self.first]
        assert self.context.store.read(OPERATIONS.key(MAIN)) is None


@pytest.fixture
def site(scratch: Path) -> Site:
    return Site(scratch)


def before_the_exchange(action: Any) -> Any:
    def act(attempt: Attempt) -> Any:
        action()
        return attempt.perform()

    return interposed(act, ("rename_exchange",))


# --- Into a new worktree ----------------------------------------------------------------------------


@pytest.mark.req("LC-25")
def test_restoring_into_a_new_worktree_takes_no_lock_of_an_existing_one(site: Site) -> None:
    """The lock of `main` is held throughout, and nothing there is touched."""
    before = site.repository.leases.state(MAIN)
    config = site.repository.snapshots.restore(site.first)
    assert content_of(site.context.paths.payload(config.worktree_id)) == OLD
    assert config.base_snapshot_id == config.head_snapshot_id == site.first
    assert config.worktree_id.startswith("restored-")
    assert site.repository.snapshots.status(config.worktree_id).changes == ()
    again = site.repository.snapshots.restore(site.first)
    assert again.worktree_id == f"{config.worktree_id}-2"
    named = site.repository.snapshots.restore(site.first, "by-name")
    assert named.worktree_id == "by-name"
    with pytest.raises(AlreadyExists):
        site.repository.snapshots.restore(site.first, "by-name")
    after = site.repository.leases.state(MAIN)
    assert before is not None
    assert after is not None
    assert after.lease == before.lease
    site.require_nothing_happened()


@pytest.mark.plain_home("it damages the tree of a snapshot")
@pytest.mark.req("LC-27")
def test_a_partial_snapshot_cannot_be_restored(site: Site) -> None:
    (site.context.paths.tree(site.first) / ".READY").unlink()
    with pytest.raises(PartialSnapshot):
        site.repository.snapshots.restore(site.first)
    with pytest.raises(PartialSnapshot):
        site.restore()
    assert content_of(site.payload) == NEW


# --- In place ---------------------------------------------------------------------------------------


@pytest.mark.req("LC-26")
def test_a_restore_in_place_replaces_everything_and_keeps_the_old_content(site: Site) -> None:
    restored = site.restore()
    assert content_of(site.payload) == OLD
    new, kept, first = site.history()
    assert first.snapshot_id == site.first
    assert restored.kept == kept
    assert site.kept(kept.snapshot_id) == NEW
    assert restored.published == new
    assert new.restored_from == site.first
    assert new.note == "tested"
    assert new.payload_hash == first.payload_hash
    assert list(site.context.home.verify(new)) == []
    assert site.repository.snapshots.status(MAIN).changes == ()
    assert list(site.context.paths.scratch.iterdir()) == []


def test_content_equal_to_the_head_is_not_kept_twice(site: Site) -> None:
    saved = snapshot(site.context, MAIN, site.proof).snapshot_id
    assert site.restore().kept is None
    assert [each.snapshot_id for each in site.history()][1:] == [saved, site.first]


def test_replaced_content_is_discarded_only_on_request(site: Site) -> None:
    assert site.restore(keep=False).kept is None
    assert [each.snapshot_id for each in site.history()][1:] == [site.first]
    assert content_of(site.payload) == OLD
    assert site.repository.examine(strict=True) == []


@pytest.mark.req("LC-26")
def test_a_restore_in_place_needs_the_lock_and_a_reason(site: Site) -> None:
    with pytest.raises(LockNotHeld):
        restore_in_place(site.context, MAIN, site.first, None, RestoreOptions(reason="tested"))
    with pytest.raises(FencingMismatch):
        restore_in_place(site.context, MAIN, site.first, Proof("other", 1), RestoreOptions(reason="tested"))
    with pytest.raises(UsageFailure, match="reason"):
        site.restore(reason="  ")
    site.require_nothing_happened()


@pytest.mark.plain_home("it is about the exchange of directories")
@pytest.mark.req("LC-17", "LC-18", "LC-26")
@pytest.mark.parametrize("path", [None, "file"])
def test_a_restore_whose_lease_is_stolen_during_preparation_changes_nothing(site: Site, path: str | None) -> None:
    def steal(attempt: Attempt) -> Any:
        state = site.repository.leases.state(MAIN)
        if state is not None and state.lease.lock_id == site.proof.lock_id:
            expire(site.repository)
            site.repository.steal(MAIN)
        return attempt.perform()

    with interposed(steal, ("sync_filesystem",)), pytest.raises(FencingMismatch):
        site.restore(keep=False, path=path)
    site.require_nothing_happened()
    assert {each.name for each in site.context.paths.snapshots.iterdir()} == {site.first}
    assert list(site.context.paths.scratch.iterdir()) == []


@pytest.mark.req("LC-26")
def test_a_restore_in_place_is_refused_in_a_shared_worktree_unless_allowed(site: Site) -> None:
    add_worktree(site.context, "open", isolation=Isolation.SHARED)
    payload = site.context.paths.payload("open")
    write(payload, NEW)
    with pytest.raises(Refused, match="shared"):
        restore_in_place(site.context, "open", site.first, None, RestoreOptions(reason="tested"))
    assert content_of(payload) == NEW
    how = RestoreOptions(reason="tested", allow_shared=True)
    restored = restore_in_place(site.context, "open", site.first, None, how)
    assert content_of(payload) == OLD
    assert restored.kept is not None
    assert restored.kept.consistency_level is Consistency.BEST_EFFORT
    assert site.kept(restored.kept.snapshot_id) == NEW


def test_a_doomed_snapshot_is_not_restored(site: Site) -> None:
    key = DESCRIPTORS.key(site.first)
    doomed = msgspec.structs.replace(resolve(site.context, site.first), doomed_by="plan")
    site.context.store.transact([key], lambda view, now: Decision([Replace(key, doomed)], None))
    with pytest.raises(Refused, match="plan"):
        site.restore()
    site.require_nothing_happened()


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_write_just_before_the_exchange_is_kept_too(site: Site) -> None:
    """It comes after the safety snapshot, and becomes a snapshot between that and the new head."""
    late = {**NEW, "late": "written at the last moment"}
    with before_the_exchange(lambda: write(site.payload, late)):
        restored = site.restore()
    new, caught, kept, first = site.history()
    assert restored.late == caught.snapshot_id
    assert content_of(site.payload) == OLD
    assert site.kept(caught.snapshot_id) == late
    assert caught.consistency_level is Consistency.BEST_EFFORT
    assert site.kept(kept.snapshot_id) == NEW
    assert [new.parent_id, caught.parent_id] == [caught.snapshot_id, kept.snapshot_id]
    assert first.snapshot_id == site.first
    assert list(verify(site.context.paths.tree(caught.snapshot_id), caught.payload_hash)) == []


@pytest.mark.plain_home("it is about the exchange of directories")
@pytest.mark.parametrize("call", ["moving aside", "publishing its tree", "ending"])
def test_settling_an_unfinished_restore_keeps_late_writes_too(site: Site, call: str) -> None:
    """The restore fails after the exchange; settling it finds the late writes."""
    late = {**NEW, "late": "written at the last moment"}
    names, number = {
        "moving aside": ("rename_noreplace", 1),
        "publishing its tree": ("rename_noreplace", 2),
        "ending": ("sync_filesystem", 1),
    }[call]
    exchanged, count = False, 0

    def act(attempt: Attempt) -> Any:
        nonlocal exchanged, count
        if attempt.name == "rename_exchange":
            write(site.payload, late)
            exchanged = True
        elif exchanged and attempt.name == names:
            count += 1
            if count == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return attempt.perform()

    with interposed(act, ("rename_exchange", names)), pytest.raises(Failure, match="Input/output"):
        site.restore()
    assert content_of(site.payload) == OLD
    settle(site.context, MAIN)
    assert content_of(site.payload) == OLD
    assert [site.kept(each.snapshot_id) for each in site.history()] == [OLD, late, NEW, OLD]
    assert {each.name for each in site.context.paths.snapshots.iterdir()} == {
        each.snapshot_id for each in site.history()
    }
    assert list(site.context.paths.scratch.iterdir()) == []


def test_the_content_of_a_worktree_without_snapshots_is_kept_too(site: Site) -> None:
    add_worktree(site.context, "fresh")
    write(site.context.paths.payload("fresh"), NEW)
    lease = site.repository.lease("fresh")
    proof = Proof(lease.lock_id, lease.token)
    restore_in_place(site.context, "fresh", site.first, proof, RestoreOptions(reason="tested"))
    new, kept = site.history("fresh")
    assert site.kept(kept.snapshot_id) == NEW
    assert new.restored_from == site.first


@pytest.mark.plain_home("a git checkout that is gone has no git directory either")
def test_a_worktree_that_has_lost_its_directory_gets_it_back(site: Site) -> None:
    site.payload.rename(site.context.paths.root / "away")
    site.restore()
    assert content_of(site.payload) == OLD


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_recorded_restore_can_be_finished_by_any_process_and_takes_effect_once(site: Site) -> None:
    def fail(attempt: Attempt) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with interposed(fail, ("rename_exchange",)), pytest.raises(Failure, match="Input/output"):
        site.restore()
    assert content_of(site.payload) == NEW
    with pytest.raises(LockConflict, match="restored in place"):
        snapshot(site.context, MAIN, site.proof)
    finished = settle(site.context, MAIN)
    assert finished is not None
    assert content_of(site.payload) == OLD
    assert settle(site.context, MAIN) is None
    repository_exchange.finish_restore(site.context, finished)  # again, by a process that did not know
    assert content_of(site.payload) == OLD
    assert list(site.context.paths.scratch.iterdir()) == []
    assert len(site.history()) == 3


@pytest.mark.plain_home("it is about the exchange of directories")
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("lost", ["nothing", "scratch"])
def test_a_recorded_restore_can_be_finished_in_a_copy_of_the_repository(
    site: Site, tmp_path: Path, exchanged: bool, lost: str
) -> None:
    """Inode numbers differ in a copy, and a backup may leave out temporary files."""

    def fail(attempt: Attempt) -> Any:
        if exchanged:
            attempt.perform()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with interposed(fail, ("rename_exchange",)), pytest.raises(Failure, match="Input/output"):
        site.restore()
    copy = tmp_path / "copy"
    shutil.copytree(site.context.paths.root, copy, copy_function=shutil.copyfile)
    if lost == "scratch":
        shutil.rmtree(copy / ".jvs" / "tmp")
    context = Repository(copy).context
    settle(context, MAIN)
    assert content_of(context.paths.payload(MAIN)) == OLD
    assert context.store.read(OPERATIONS.key(MAIN)) is None
    kept = [files_stored(context, each.descriptor.snapshot_id) for each in worktree_history(context, MAIN).entries]
    assert kept[0] == kept[-1] == OLD
    assert NEW in kept


# --- A single path ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("file", {**NEW, "file": "old"}),
        ("directory", {**NEW, "directory/a": "old", "directory/b": "old"}),
        ("directory/b", {**NEW, "directory/b": "old"}),
    ],
)
def test_a_restored_path_is_unsaved_work_on_top_of_the_head(site: Site, path: str, expected: dict[str, str]) -> None:
    restored = site.restore(path=path)
    assert content_of(site.payload) == expected
    assert (restored.published, restored.late) == (None, None)
    assert restored.kept is not None
    assert site.kept(restored.kept.snapshot_id) == NEW
    assert [each.snapshot_id for each in site.history()] == [restored.kept.snapshot_id, site.first]
    assert site.repository.snapshots.status(MAIN).changes


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_path_is_not_replaced_if_it_was_written_to_after_the_safety_snapshot(
    site: Site,
) -> None:
    late = {**NEW, "file": "written at the last moment"}
    count = 0

    def act(attempt: Attempt) -> Any:
        nonlocal count
        count += 1
        if count == 2:  # the first syncs the safety snapshot, the second the restored path
            write(site.payload, late)
        return attempt.perform()

    with interposed(act, ("sync_filesystem",)), pytest.raises(ConsistencyUnavailable):
        site.restore(path="file")
    assert content_of(site.payload) == late


@pytest.mark.plain_home("it is about the exchange of directories")
@pytest.mark.parametrize("path", ["file", "directory", "directory/a"])
def test_a_write_to_a_path_just_before_its_exchange_is_kept_too(site: Site, path: str) -> None:
    """The write becomes the head, and the restored content is unsaved work on top of it."""
    late = {**NEW, "file": "written late", "directory/a": "written late"}
    with before_the_exchange(lambda: write(site.payload, late)):
        restored = site.restore(path=path)
    caught, kept, _ = site.history()
    assert restored.late == caught.snapshot_id
    assert site.kept(kept.snapshot_id) == NEW
    part = {name: text for name, text in late.items() if name == path or name.startswith(f"{path}/")}
    assert site.kept(caught.snapshot_id) == {**NEW, **part}
    assert (caught.parent_id, caught.consistency_level) == (kept.snapshot_id, Consistency.BEST_EFFORT)
    assert list(verify(site.context.paths.tree(caught.snapshot_id), caught.payload_hash)) == []
    there = content_of(site.payload)
    assert {name: there[name] for name in part} == {name: OLD[name] for name in part}
    assert list(site.context.paths.scratch.iterdir()) == []


def die_before_the_exchange(site: Site, path: str) -> None:
    """Decide on a restore of a path, and die before carrying it out."""

    def die(attempt: Attempt) -> Any:
        raise SystemExit

    with interposed(die, ("rename_exchange",)), pytest.raises(SystemExit):
        site.restore(path=path)
    assert site.context.store.read(OPERATIONS.key(MAIN)) is not None


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_write_between_the_death_of_a_restore_and_its_settling_is_kept(site: Site) -> None:
    """The process died after its decision; the user works on, and the next command finishes the restore."""
    die_before_the_exchange(site, "file")
    (site.payload / "file").write_text("the work of a day")
    settle(site.context, MAIN)
    assert (site.payload / "file").read_text() == "old"
    caught, kept, _ = site.history()
    assert site.kept(caught.snapshot_id) == {**NEW, "file": "the work of a day"}
    assert site.kept(kept.snapshot_id) == NEW


@pytest.mark.plain_home("it is about the exchange of directories")
@pytest.mark.parametrize("became", ["gone", "a file", "a link"])
def test_a_restore_of_a_path_is_abandoned_if_its_parent_is_no_longer_a_directory(site: Site, became: str) -> None:
    """Otherwise the worktree would be stuck for good, and a link would lead the restore elsewhere."""
    die_before_the_exchange(site, "directory/a")
    directory, away = site.payload / "directory", site.context.paths.root / "away"
    directory.rename(away)
    if became == "a file":
        directory.write_text("mine")
    elif became == "a link":
        directory.symlink_to(away)
    settle(site.context, MAIN)
    assert (away / "a").read_text() == "new"
    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    assert list(site.context.paths.scratch.iterdir()) == []
    snapshot(site.context, MAIN, site.proof)


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_path_whose_parent_disappears_just_before_the_exchange_is_not_restored(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done = repository_exchange._Exchange.is_done

    def take_away(*arguments: Any) -> bool:
        found = is_done(*arguments)
        (site.payload / "directory").rename(site.context.paths.root / "away")
        return found

    monkeypatch.setattr(repository_exchange._Exchange, "is_done", take_away)
    with pytest.raises(ConsistencyUnavailable, match="nothing was replaced"):
        site.restore(path="directory/a")
    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    assert list(site.context.paths.scratch.iterdir()) == []


@pytest.mark.plain_home("it is about the exchange of directories")
@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_restore_of_a_path_that_cannot_be_exchanged_is_abandoned(site: Site, by: str) -> None:
    """For example in a read-only directory: the worktree would be unusable until that is fixed."""

    def refuse(attempt: Attempt) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if by == "itself":
        with interposed(refuse, ("rename_exchange",)), pytest.raises(NotWritable, match="Permission denied"):
            site.restore(path="directory/a")
    else:
        die_before_the_exchange(site, "directory/a")
        with interposed(refuse, ("rename_exchange",)):
            settle(site.context, MAIN)
    assert content_of(site.payload) == NEW
    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    assert list(site.context.paths.scratch.iterdir()) == []
    site.restore(path="directory/a")
    assert content_of(site.payload) == {**NEW, "directory/a": "old"}


def test_a_path_that_is_not_utf8_is_refused_but_is_restored_with_its_directory(site: Site) -> None:
    name = os.fsdecode(b"\xff")
    (site.payload / "directory" / name).write_text("old")
    site.first = snapshot(site.context, MAIN, site.proof).snapshot_id
    (site.payload / "directory" / name).write_text("new")
    with pytest.raises(UsageFailure, match="not valid UTF-8"):
        site.restore(path=f"directory/{name}")
    assert site.history()[0].snapshot_id == site.first, "the refused restore changed the history"
    site.restore(path="directory")
    assert (site.payload / "directory" / name).read_text() == "old"


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_path_too_long_for_one_call_is_restored_step_by_step(site: Site) -> None:
    deep, here = "/".join(["d" * 200] * 25), os.open(site.payload, os.O_RDONLY)
    for name in deep.split("/"):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    site.first = snapshot(site.context, MAIN, site.proof).snapshot_id
    site.restore(path=deep)
    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    assert list(site.context.paths.scratch.iterdir()) == []


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_restore_in_place_is_refused_over_a_mount_point(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange would carry the mount away with the old directory."""
    monkeypatch.setattr(payloads, "mounts_beneath", lambda _: frozenset({"directory/a"}))
    for path in (None, "directory", "directory/a"):
        with pytest.raises(Refused, match="something is mounted at directory/a"):
            site.restore(path=path)
    site.require_nothing_happened()
    site.restore(path="file")
    assert (site.payload / "file").read_text() == "old"


def touching_exchange(attempt: Attempt) -> Any:
    """Exchange two directories as xfs does: both get a new modification time."""
    result = attempt.perform()
    for name, directory in zip(attempt.arguments, ("src_dir_fd", "dst_dir_fd"), strict=True):
        os.utime(name, dir_fd=attempt.options[directory])
    return result


def require_times(site: Site) -> None:
    os.utime(site.payload, ns=(0, 1_000_000_000))
    os.utime(site.payload / "directory", ns=(0, 2_000_000_000))
    site.first = snapshot(site.context, MAIN, site.proof).snapshot_id
    (site.payload / "another").touch()
    site.restore()
    assert site.payload.stat().st_mtime_ns == 1_000_000_000
    (site.payload / "directory/another").touch()
    site.restore(path="directory")
    assert (site.payload / "directory").stat().st_mtime_ns == 2_000_000_000


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_directory_restored_in_place_has_its_time_even_if_the_exchange_changes_it(site: Site) -> None:
    with interposed(touching_exchange, ("rename_exchange",)):
        require_times(site)


@pytest.mark.plain_home("git keeps no times of directories")
def test_a_directory_restored_in_place_has_its_time_on_xfs(loop_mount: Callable[[str], LoopMount]) -> None:
    require_times(Site(loop_mount("xfs").path / "repository"))


@pytest.mark.plain_home("it damages the tree of a snapshot")
@pytest.mark.parametrize("path", [None, "directory"])
def test_a_damaged_snapshot_is_not_restored_and_the_worktree_stays_as_it_is(site: Site, path: str | None) -> None:
    stored = site.context.paths.tree(site.first) / "payload/directory/a"
    stored.chmod(0o644)
    stored.write_text("bad")
    with pytest.raises(Corrupt, match=r"directory/a \(changed\)") as refused:
        site.restore(path=path)
    assert f"holdfast verify {site.first} --repair" in refused.value.hint
    assert content_of(site.payload) == NEW
    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    with pytest.raises(Corrupt):
        site.repository.snapshots.restore(site.first, "new")
    assert not site.context.paths.payload("new").exists()


def test_missing_parents_of_a_restored_path_are_created(site: Site) -> None:
    write(site.payload, {"file": "new"})
    (site.payload / "directory").rmdir()
    site.restore(path="directory/b")
    assert content_of(site.payload) == {"file": "new", "directory/b": "old"}


def test_a_restored_path_replaces_an_entry_of_another_kind(site: Site) -> None:
    for each in (site.payload / "directory").iterdir():
        each.unlink()
    (site.payload / "directory").rmdir()
    (site.payload / "directory").write_text("now a file")
    site.restore(path="directory")
    assert (site.payload / "directory" / "a").read_text() == "old"


def test_a_path_that_is_not_in_the_snapshot_or_leads_outside_is_refused(site: Site) -> None:
    outside = site.context.paths.root / "outside"
    outside.mkdir()
    (outside / "a").write_text("not yours")
    with pytest.raises(NotFound):
        site.restore(path="more", keep=False)
    for path in ("../outside/a", "/etc/passwd", "directory//a", "."):
        with pytest.raises(PathEscape):
            site.restore(path=path, keep=False)
    for each in (site.payload / "directory").iterdir():
        each.unlink()
    (site.payload / "directory").rmdir()
    (site.payload / "directory").symlink_to(outside)
    with pytest.raises(PathEscape):
        site.restore(path="directory/a", keep=False)
    assert (outside / "a").read_text() == "not yours"
    assert list(site.context.paths.scratch.iterdir()) == []


# --- The plan ---------------------------------------------------------------------------------------


def test_a_plan_says_what_would_happen_and_changes_nothing(site: Site) -> None:
    plan = site.repository.snapshots.plan(MAIN, site.first, RestoreOptions(reason="tested"))
    found = {(each.path.decode(), each.what) for each in plan.comparison.changes}
    assert found == {
        ("file", "modified"),
        ("directory/a", "modified"),
        ("directory/b", "removed"),
        ("more", "added"),
    }
    assert plan.keeps
    part = site.repository.snapshots.plan(MAIN, site.first, RestoreOptions(reason="tested", path="directory"))
    assert {each.path.decode() for each in part.comparison.changes} == {"directory/a", "directory/b"}
    site.require_nothing_happened()


# --- Where directories cannot be exchanged ----------------------------------------------------------


def without_exchange(attempt: Attempt) -> Any:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.plain_home("it is about the exchange of directories")
def test_without_atomic_exchange_two_renames_replace_the_content(site: Site) -> None:
    with interposed(without_exchange, ("rename_exchange",)):
        site.restore()
        assert content_of(site.payload) == OLD
        write(site.payload, NEW)
        site.restore(path="file")
    assert content_of(site.payload) == {**NEW, "file": "old"}


RENAMES = ("rename", "rename_noreplace")


def test_the_sweep_finds_a_worktree_missing_between_two_renames_and_settling_repairs_it() -> None:
    """This is why the exchange is atomic, and shows that the sweep would notice if it were not."""
    with world() as made, interposed(without_exchange, ("rename_exchange",)):
        report = killed_everywhere(cases(made)["restore in place, nothing kept"], RENAMES)
        assert [each.problem for each in report.violations] == ["AssertionError: the worktree is neither old nor new"]
        assert report.violations[0].outcome.call is not None
        require_settling_repairs(made)


def require_settling_repairs(made: World) -> None:
    """Kill the restore after each of its first renames, and settle."""
    case = cases(made)["restore in place, nothing kept"]
    with swept_directory() as base:
        for index in (1, 2, 3):
            with fresh(base) as directory:
                case.prepare(directory)
                cut_short(lambda: case.operate(directory), Kill.AFTER, index, names=("rename_noreplace",))
                with opened(directory) as context:
                    settle(context, MAIN)
                    assert content_of(context.paths.payload(MAIN)) in (UNSAVED, FIRST)
                    assert context.store.read(OPERATIONS.key(MAIN)) is None


# --- A symlink in place of the directory --------------------------------------------------------------


def replace_with_link(site: Site, elsewhere: Path) -> None:
    elsewhere.mkdir()
    (elsewhere / "theirs").write_text("theirs")
    shutil.rmtree(site.payload)
    site.payload.symlink_to(elsewhere)


def test_a_symlink_in_place_of_the_directory_is_not_followed(scratch: Path) -> None:
    site = Site(scratch / "repo")
    first = snapshot(site.context, MAIN, site.proof).snapshot_id
    replace_with_link(site, scratch / "elsewhere")

    snapshots = site.repository.snapshots
    for follow in (
        lambda: snapshots.status(MAIN),
        lambda: snapshots.compare(MAIN, first),
        lambda: snapshots.take(MAIN, site.proof),
        lambda: snapshots.restore_in_place(MAIN, first, site.proof, RestoreOptions(reason="x")),
    ):
        with pytest.raises(PathEscape, match="is a symbolic link"):
            follow()
    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    assert resolve(site.context, "head", worktree=MAIN).snapshot_id == first


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_symlink_created_during_a_restore_does_not_leave_the_worktree_stuck(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(scratch / "repo")
    first = snapshot(site.context, MAIN, site.proof).snapshot_id
    exchange = repository_exchange._Exchange.make

    def link_first(*arguments: Any) -> None:
        replace_with_link(site, scratch / "elsewhere")
        exchange(*arguments)

    monkeypatch.setattr(repository_exchange._Exchange, "make", link_first)
    restore_in_place(site.context, MAIN, first, site.proof, RestoreOptions(reason="x"))

    assert site.context.store.read(OPERATIONS.key(MAIN)) is None
    assert not site.payload.is_symlink()
    assert (scratch / "elsewhere/theirs").read_text() == "theirs"
