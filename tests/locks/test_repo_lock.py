"""The repository lock: its file, contention, unlocking, refreshing and breaking."""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import ManualClock, format_instant, parse_instant
from holdfast.errors import (
    IoFailure,
    JsonInvalid,
    LockChanged,
    LockNotHeld,
    NameInvalid,
    NotDurable,
    PathEscape,
    RepoLocked,
    TooLarge,
)
from holdfast.fs import calls
from holdfast.locks.identity import Holder, Liveness, current_holder
from holdfast.locks.repo_lock import DEFAULT_STALE_AFTER, RepoLock, RepoLockInfo
from tests.locks.repo_locks import (
    ALIVE,
    DEAD,
    NOW,
    REPO,
    UNKNOWN,
    is_held,
    locker,
    needs_fork,
    needs_links,
    needs_modes,
    put,
)
from tests.locks.workers import Line, Workers


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=NOW)


# --- The file -------------------------------------------------------------------------------------------


@pytest.mark.req("RL-01", "RL-02")
def test_the_lock_is_the_file_repos_id_lock_below_the_data_directory(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock("github.com_acme_x")
    assert held.path == tmp_path / "repos" / "github.com_acme_x" / ".lock"
    assert held.path.is_file()


@pytest.mark.req("RL-01")
def test_the_environment_does_not_choose_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENCY_DATA_DIR", "HOLDFAST_DATA_DIR", "XDG_DATA_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    RepoLock(tmp_path / "data").lock(REPO)
    assert sorted(os.listdir(tmp_path)) == ["data"]


@pytest.mark.req("RL-02")
@pytest.mark.parametrize("given_as", [Path, str])
def test_parent_directories_are_created(tmp_path: Path, given_as: Callable[[Path], Path | str]) -> None:
    held = RepoLock(given_as(tmp_path / "not" / "there" / "yet")).lock(REPO)
    assert held.path.is_file()


def test_a_relative_data_directory_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RepoLock("data").lock(REPO)
    assert (tmp_path / "data" / "repos" / REPO / ".lock").is_file()


@needs_modes
@pytest.mark.req("RL-03")
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_the_mode_is_0600_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        held = RepoLock(tmp_path).lock(REPO)
        modes = [stat.S_IMODE(held.path.stat().st_mode)]
        held.refresh()
        modes.append(stat.S_IMODE(held.path.stat().st_mode))
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]


@pytest.mark.req("RL-03")
def test_the_file_records_pid_created_at_and_cmd(tmp_path: Path, clock: ManualClock) -> None:
    held = locker(tmp_path, clock).lock(REPO, "push")
    said = json.loads(held.path.read_bytes())
    assert (said["pid"], parse_instant(said["created_at"]), said["cmd"]) == (os.getpid(), NOW, "push")
    assert Holder.from_record(said) == current_holder()
    assert said["lock_id"] == held.lock_id


@pytest.mark.req("RL-03")
def test_without_a_command_the_file_has_no_cmd(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    assert "cmd" not in json.loads(held.path.read_bytes())


@pytest.mark.req("RL-03")
def test_created_at_is_now_by_default(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    said = parse_instant(json.loads(held.path.read_bytes())["created_at"])
    assert abs(said - held.path.stat().st_mtime) < 60


@pytest.mark.parametrize("cmd", ["x" * 70_000, "\ud800"])
def test_a_command_that_could_not_be_read_back_is_refused_and_nothing_is_locked(tmp_path: Path, cmd: str) -> None:
    with pytest.raises((TooLarge, JsonInvalid)):
        RepoLock(tmp_path).lock(REPO, cmd)
    assert not is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-01")
@pytest.mark.parametrize("repo_id", ["", ".", "..", "a/b", "../a", "a\\b", "a\0", "a\nb", "a b", "x" * 129, "a..b"])
def test_an_invalid_repo_id_is_refused_before_anything_is_created(tmp_path: Path, repo_id: str) -> None:
    lock = RepoLock(tmp_path / "data")
    for attempt in (lock.lock, lock.state, lambda repo_id: lock.break_lock(repo_id, "00")):
        with pytest.raises(NameInvalid):
            attempt(repo_id)
    assert not (tmp_path / "data").exists()


@needs_links
def test_a_repository_directory_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    data_dir, outside = tmp_path / "data", tmp_path / "outside"
    (data_dir / "repos").mkdir(parents=True)
    outside.mkdir()
    (data_dir / "repos" / REPO).symlink_to(outside)
    lock = RepoLock(data_dir)
    for attempt in (lock.lock, lock.state, lambda repo_id: lock.break_lock(repo_id, "00")):
        with pytest.raises(PathEscape):
            attempt(REPO)
    assert os.listdir(outside) == [], "something was created behind the link"


# --- Contention -----------------------------------------------------------------------------------------


@pytest.mark.req("RL-02", "RL-04")
def test_a_second_locker_gets_repo_locked_with_the_details_of_the_holder(tmp_path: Path, clock: ManualClock) -> None:
    held = locker(tmp_path, clock).lock(REPO, "push")
    with pytest.raises(RepoLocked) as refused:
        locker(tmp_path, clock).lock(REPO)
    failure = refused.value
    assert (failure.repo_id, failure.path) == (REPO, held.path)
    assert failure.info is not None
    assert (failure.info["pid"], failure.info["cmd"]) == (os.getpid(), "push")
    assert failure.info["created_at"] == format_instant(NOW)
    assert f"pid {os.getpid()} (push)" in failure.message
    assert json.loads(json.dumps(failure.as_record()))["code"] == "E_REPO_LOCKED"


@needs_fork
@pytest.mark.req("RL-02")
def test_one_process_keeps_the_others_out(tmp_path: Path, workers: Workers) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    asked = workers.start_many(4, lambda line: line.say(is_held(RepoLock(tmp_path))))
    assert [each.hear() for each in asked] == [True] * 4
    held.unlock()
    assert not is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-04")
def test_another_thread_does_not_wait_for_a_held_lock(tmp_path: Path) -> None:
    """The sanity test from the specification: another thread is refused without any sleep."""
    RepoLock(tmp_path).lock(REPO)
    answers: queue.Queue[bool] = queue.Queue()
    threading.Thread(target=lambda: answers.put(is_held(RepoLock(tmp_path))), daemon=True).start()
    assert answers.get(timeout=60) is True


@pytest.mark.req("RL-04")
def test_a_held_lock_is_refused_without_sleep_or_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RepoLock(tmp_path).lock(REPO)
    looks: list[object] = []
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    monkeypatch.setattr(calls, "stat", _recording(calls.stat, looks))
    assert is_held(RepoLock(tmp_path))
    assert looks.count(".lock") == 2, "once before creating, once to identify the holder"


def _recording(call: Callable[..., os.stat_result], seen: list[object]) -> Callable[..., os.stat_result]:
    def recording(path: object, **options: object) -> os.stat_result:
        seen.append(path)
        return call(path, **options)

    return recording


@pytest.mark.req("RL-02")
def test_locks_of_different_repositories_are_independent(tmp_path: Path) -> None:
    RepoLock(tmp_path).lock("one")
    RepoLock(tmp_path).lock("two")


@pytest.mark.req("RL-04")
@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe", b"[]", b'"text"', b'{"pid": NaN}', b"x" * 70_000])
def test_the_info_is_none_if_the_lock_cannot_be_read(tmp_path: Path, clock: ManualClock, content: bytes) -> None:
    path = put(tmp_path, content, age=1.0)
    with pytest.raises(RepoLocked) as refused:
        locker(tmp_path, clock, UNKNOWN).lock(REPO)
    assert (refused.value.info, refused.value.path) == (None, path)
    assert "cannot be read" in refused.value.message
    assert path.read_bytes() == content


def test_contention_leaves_no_draft_behind(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    for _ in range(5):
        assert is_held(RepoLock(tmp_path))
    assert sorted(os.listdir(held.path.parent)) == [".lock", ".lock.guard"]


@pytest.mark.req("RL-04")
def test_a_directory_in_place_of_the_lock_counts_as_held_at_any_age(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "repos" / REPO / ".lock"
    path.mkdir(parents=True)
    os.utime(path, (1.0, 1.0))
    assert is_held(locker(tmp_path, clock, DEAD))
    assert path.is_dir()


# --- Unlocking ------------------------------------------------------------------------------------------


@pytest.mark.req("RL-09")
def test_unlocking_removes_the_file_and_can_be_repeated(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    held.unlock()
    assert not held.path.exists()
    held.unlock()


@pytest.mark.req("RL-09")
def test_a_with_block_unlocks_even_after_an_exception(tmp_path: Path) -> None:
    def fail_in_the_block() -> None:
        with RepoLock(tmp_path).lock(REPO):
            assert is_held(RepoLock(tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert not is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-09")
@pytest.mark.parametrize("what", ["the file", "its directory", "everything"])
def test_unlocking_a_lock_that_is_already_gone_succeeds(tmp_path: Path, what: str) -> None:
    held = RepoLock(tmp_path / "data").lock(REPO)
    match what:
        case "the file":
            held.path.unlink()
        case "its directory":
            shutil.rmtree(held.path.parent)
        case "everything":
            shutil.rmtree(tmp_path / "data")
    held.unlock()
    held.unlock()


@pytest.mark.req("RL-09")
def test_a_second_unlock_does_not_remove_the_next_holders_lock(tmp_path: Path) -> None:
    first = RepoLock(tmp_path).lock(REPO)
    first.unlock()
    second = RepoLock(tmp_path).lock(REPO)
    first.unlock()
    assert json.loads(second.path.read_bytes())["lock_id"] == second.lock_id


@pytest.mark.req("RL-09")
def test_unlocking_does_not_remove_the_lock_of_a_holder_that_took_over(tmp_path: Path, clock: ManualClock) -> None:
    slow = locker(tmp_path, clock).lock(REPO, "slow")
    clock.advance(DEFAULT_STALE_AFTER + 1)
    thief = locker(tmp_path, clock).lock(REPO, "thief")
    slow.unlock()
    assert json.loads(thief.path.read_bytes())["cmd"] == "thief"
    assert is_held(locker(tmp_path, clock)), "a third locker got the lock"
    thief.unlock()
    assert not thief.path.exists()


@pytest.mark.req("RL-09")
@pytest.mark.parametrize("content", ["", "garbage", "{}", '{"lock_id": "another"}'])
def test_unlocking_does_not_remove_a_lock_that_is_not_provably_ours(tmp_path: Path, content: str) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    held.path.write_text(content)
    held.unlock()
    assert held.path.read_text() == content


@needs_fork
@pytest.mark.req("RL-09")
def test_a_forked_child_can_neither_unlock_nor_refresh(tmp_path: Path, workers: Workers) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    before = held.path.read_bytes()

    def child(line: Line) -> None:
        held.unlock()
        with pytest.raises(LockNotHeld):
            held.refresh()
        line.say("done")

    assert workers.start(child).hear() == "done"
    assert held.path.read_bytes() == before
    held.unlock()
    assert not held.path.exists()


@pytest.mark.req("RL-09")
def test_unlocking_needs_no_disk_space(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    there = sorted(tmp_path.rglob("*"))
    held.unlock()
    assert set(tmp_path.rglob("*")) < set(there), "unlocking created something new"


@pytest.mark.req("RL-09")
def test_an_unlock_that_cannot_read_the_lock_fails_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors, for example: an unreadable lock is not proven to be another's."""
    held = RepoLock(tmp_path).lock(REPO)

    def failing(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith(".lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.open(str(path), flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "open", failing)
        with pytest.raises(IoFailure):
            held.unlock()
    held.unlock()
    assert not held.path.exists()


@pytest.mark.req("RL-09")
def test_an_unlock_that_cannot_remove_the_lock_fails_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = RepoLock(tmp_path).lock(REPO)

    def failing(path: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(calls, "unlink", failing)
        with pytest.raises(IoFailure):
            held.unlock()
    assert held.path.exists()
    held.unlock()
    assert not held.path.exists()


def test_a_lock_that_could_not_be_made_durable_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process would ever unlock it: its holder is alive, but was told that it has no lock."""
    RepoLock(tmp_path).lock(REPO).unlock()

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(calls, "sync_directory", failing)
        if sys.platform != "win32":
            with pytest.raises(NotDurable):
                RepoLock(tmp_path).lock(REPO)
    assert not is_held(RepoLock(tmp_path))


# --- Refreshing -----------------------------------------------------------------------------------------


def test_a_refreshed_lock_does_not_become_stale(tmp_path: Path, clock: ManualClock) -> None:
    held = locker(tmp_path, clock).lock(REPO, "long work")
    for _ in range(4):
        clock.advance(0.75 * DEFAULT_STALE_AFTER)
        held.refresh()
        assert is_held(locker(tmp_path, clock))
    said = json.loads(held.path.read_bytes())
    assert (said["lock_id"], said["cmd"]) == (held.lock_id, "long work")
    assert parse_instant(said["created_at"]) == clock.wall()
    held.unlock()
    assert not held.path.exists()


@pytest.mark.parametrize("how", ["unlocked", "taken over", "file gone", "directory gone"])
def test_refreshing_a_lost_lock_is_refused_and_restores_nothing(tmp_path: Path, clock: ManualClock, how: str) -> None:
    held = locker(tmp_path, clock).lock(REPO)
    match how:
        case "unlocked":
            held.unlock()
        case "taken over":
            clock.advance(DEFAULT_STALE_AFTER + 1)
            locker(tmp_path, clock).lock(REPO, "thief")
        case "file gone":
            held.path.unlink()
        case "directory gone":
            shutil.rmtree(held.path.parent)
    before = held.path.read_bytes() if held.path.exists() else None
    with pytest.raises(LockNotHeld):
        held.refresh()
    assert (held.path.read_bytes() if held.path.exists() else None) == before


@pytest.mark.req("RL-08")
def test_a_lock_refreshed_after_it_was_judged_is_not_taken_over(tmp_path: Path, clock: ManualClock) -> None:
    held = locker(tmp_path, clock).lock(REPO)
    clock.advance(DEFAULT_STALE_AFTER + 1)

    def check(info: RepoLockInfo) -> Liveness:
        held.refresh()
        return ALIVE

    assert is_held(RepoLock(tmp_path, clock=clock, liveness_check=check))
    assert json.loads(held.path.read_bytes())["lock_id"] == held.lock_id


# --- State and breaking ---------------------------------------------------------------------------------


def test_the_state_names_the_holder_and_reading_it_changes_nothing(tmp_path: Path, clock: ManualClock) -> None:
    lock = locker(tmp_path, clock)
    assert lock.state(REPO) is None
    assert not (tmp_path / "repos").exists()
    held = lock.lock(REPO, "push")
    clock.advance(60)
    state = lock.state(REPO)
    assert state is not None
    assert state.info == RepoLockInfo(os.getpid(), NOW, "push", current_holder(), held.lock_id)
    assert (state.path, state.age, state.liveness, state.stale) == (held.path, 60, ALIVE, False)
    clock.advance(DEFAULT_STALE_AFTER)
    aged = lock.state(REPO)
    assert aged is not None
    assert aged.stale
    assert held.path.exists()


def test_breaking_a_lock_requires_its_exact_identity(tmp_path: Path) -> None:
    lock = RepoLock(tmp_path)
    held = lock.lock(REPO)
    state = lock.state(REPO)
    assert state is not None
    for wrong in ("", state.identity[:-1], state.identity + "0", state.identity.upper() + "x", "*"):
        with pytest.raises(LockChanged):
            lock.break_lock(REPO, wrong)
    assert held.path.exists()
    lock.break_lock(REPO, state.identity)
    assert not held.path.exists()


def test_the_identity_of_an_earlier_lock_does_not_break_the_next_one(tmp_path: Path) -> None:
    lock = RepoLock(tmp_path)
    held = lock.lock(REPO)
    state = lock.state(REPO)
    assert state is not None
    held.unlock()
    second = lock.lock(REPO)
    with pytest.raises(LockChanged):
        lock.break_lock(REPO, state.identity)
    assert second.path.exists()


@pytest.mark.parametrize("missing", ["repository", "data directory", "lock"])
def test_breaking_a_missing_lock_creates_nothing(tmp_path: Path, missing: str) -> None:
    lock = RepoLock(tmp_path / "data")
    if missing != "data directory":
        (tmp_path / "data" / "repos").mkdir(parents=True)
    if missing == "lock":
        lock.lock(REPO).unlock()
    with pytest.raises(LockChanged):
        lock.break_lock(REPO, "0123456789abcdef")
    assert not (tmp_path / "data" / "repos" / REPO / ".lock").exists()


@pytest.mark.req("RL-09")
def test_a_holder_whose_lock_was_broken_does_not_remove_its_successors_lock(tmp_path: Path) -> None:
    lock = RepoLock(tmp_path)
    broken = lock.lock(REPO)
    state = lock.state(REPO)
    assert state is not None
    lock.break_lock(REPO, state.identity)
    with lock.lock(REPO) as second:
        broken.unlock()
        with pytest.raises(LockNotHeld):
            broken.refresh()
        assert json.loads(second.path.read_bytes())["lock_id"] == second.lock_id


def test_a_released_repository_lock_cannot_be_entered_again(tmp_path: Path) -> None:
    with RepoLock(tmp_path).lock("r") as held:
        pass
    with pytest.raises(LockNotHeld), held:
        raise AssertionError("the block ran without the lock")
