"""Staleness of the repository lock, by liveness and by age, and the takeover of a stale lock."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import ManualClock, format_instant
from holdfast.errors import (
    RepoLocked,
)
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.identity import Liveness, current_holder
from holdfast.locks.repo_lock import DEFAULT_STALE_AFTER, RepoLock, RepoLockInfo
from proof.effort import rounds
from tests.locks.repo_locks import (
    ALIVE,
    DEAD,
    NOW,
    REPO,
    UNKNOWN,
    is_held,
    locker,
    needs_fork,
    put,
    record,
    start_with,
)
from tests.locks.workers import Workers, wait_until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=NOW)


# --- Stale by liveness ----------------------------------------------------------------------------------


@pytest.mark.req("RL-05", "RL-07")
def test_a_lock_of_a_dead_pid_is_taken_over(tmp_path: Path, clock: ManualClock) -> None:
    put(tmp_path, record(pid=999_999, created_at="2001-01-01T00:00:00Z"))
    held = locker(tmp_path, clock, DEAD).lock(REPO)
    assert json.loads(held.path.read_bytes())["pid"] == os.getpid()


@needs_fork
@pytest.mark.req("RL-05")
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_a_fresh_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path, workers: Workers, reaped: bool) -> None:
    holder = start_with(workers, lambda: RepoLock(tmp_path).lock(REPO))
    assert is_held(RepoLock(tmp_path))
    holder.kill()
    if reaped:
        holder.wait()
    wait_until(lambda: not is_held(RepoLock(tmp_path)))


@needs_fork
@pytest.mark.req("RL-05")
def test_a_lock_of_another_program_with_only_a_pid_is_stale_once_that_process_ends(
    tmp_path: Path, workers: Workers
) -> None:
    holder = workers.start(lambda line: line.wait())
    put(
        tmp_path,
        json.dumps({"pid": holder.pid, "created_at": format_instant(RepoLock(tmp_path)._clock.wall())}),
    )
    assert is_held(RepoLock(tmp_path))
    holder.kill()
    holder.wait()
    assert not is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-05")
def test_a_pid_that_was_reused_does_not_keep_the_lock(tmp_path: Path) -> None:
    held = RepoLock(tmp_path).lock(REPO)
    said = json.loads(held.path.read_bytes())
    assert is_held(RepoLock(tmp_path))
    before_us = current_holder()._replace(start_time="1")
    held.path.write_text(json.dumps({**said, **before_us.as_record()}))
    assert not is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-05")
def test_a_lock_from_before_a_reboot_of_this_machine_is_taken_over(tmp_path: Path) -> None:
    here = current_holder()
    if not here.machine_id or not here.boot_id:
        pytest.skip("this system has no machine id or no boot id: a reboot cannot be told from another machine")
    held = RepoLock(tmp_path).lock(REPO)
    said = json.loads(held.path.read_bytes())
    held.path.write_text(json.dumps({**said, **here._replace(boot_id="another").as_record()}))
    assert not is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-07")
@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"pid_namespace": "1"}, {"machine_id": "x", "boot_id": "y"}])
def test_a_holder_that_cannot_be_judged_from_here_counts_as_alive(tmp_path: Path, change: dict[str, str]) -> None:
    """Its pid certainly does not exist here."""
    held = RepoLock(tmp_path).lock(REPO)
    said = json.loads(held.path.read_bytes())
    foreign = current_holder()._replace(pid=(1 << 31) - 1, **change)
    held.path.write_text(json.dumps({**said, **foreign.as_record(), "pid": foreign.pid}))
    assert is_held(RepoLock(tmp_path))


@pytest.mark.req("RL-07")
@pytest.mark.parametrize("alive", [ALIVE, UNKNOWN])
def test_a_lock_whose_holder_is_not_certainly_dead_is_held_until_it_is_too_old(
    tmp_path: Path, clock: ManualClock, alive: Liveness
) -> None:
    put(tmp_path, record())
    assert is_held(locker(tmp_path, clock, alive))
    clock.advance(DEFAULT_STALE_AFTER + 1)
    assert not is_held(locker(tmp_path, clock, alive))


@pytest.mark.req("RL-07")
def test_the_liveness_check_gets_the_record_of_the_lock(tmp_path: Path, clock: ManualClock) -> None:
    put(tmp_path, record(pid=4711, cmd="push"))
    asked: list[RepoLockInfo] = []

    def check(info: RepoLockInfo) -> Liveness:
        asked.append(info)
        return DEAD

    RepoLock(tmp_path, clock=clock, liveness_check=check).lock(REPO)
    assert asked == [RepoLockInfo(4711, NOW, "push", None)]


@pytest.mark.req("RL-07")
@pytest.mark.parametrize("pid", [0, -1, 1 << 31, 1 << 70, True, False, "4711", 1.5, None, [], {}])
def test_an_invalid_pid_is_not_judged_dead(tmp_path: Path, clock: ManualClock, pid: object) -> None:
    """The real check: signals to 0 and -1 reach many processes, and none of these values is a dead process."""
    put(tmp_path, json.dumps({"pid": pid, "created_at": format_instant(NOW)}))
    assert is_held(RepoLock(tmp_path, clock=clock))
    clock.advance(DEFAULT_STALE_AFTER + 1)
    assert not is_held(RepoLock(tmp_path, clock=clock))


@pytest.mark.parametrize("pid", [True, "4711", 1.5, None, []])
def test_a_value_that_is_not_an_integer_is_not_shown_as_a_pid(tmp_path: Path, clock: ManualClock, pid: object) -> None:
    put(tmp_path, json.dumps({"pid": pid, "created_at": format_instant(NOW)}))
    with pytest.raises(RepoLocked) as refused:
        locker(tmp_path, clock).lock(REPO)
    assert refused.value.info is not None
    assert refused.value.info["pid"] is None


# --- Stale by age ---------------------------------------------------------------------------------------


@pytest.mark.req("RL-05")
def test_a_lock_is_honoured_for_two_hours_by_default(tmp_path: Path) -> None:
    assert RepoLock(tmp_path).stale_after == DEFAULT_STALE_AFTER == 2 * 60 * 60


@pytest.mark.req("RL-05")
@pytest.mark.parametrize("stale_after", [0.5, 60.0, DEFAULT_STALE_AFTER])
def test_a_lock_is_stale_only_when_it_is_older_than_stale_after(
    tmp_path: Path, clock: ManualClock, stale_after: float
) -> None:
    put(tmp_path, record())
    lock = RepoLock(tmp_path, stale_after=stale_after, clock=clock, liveness_check=lambda _: ALIVE)
    clock.advance(stale_after)
    assert is_held(lock)
    clock.advance(1.0)
    assert not is_held(lock)


@pytest.mark.req("RL-06")
@pytest.mark.parametrize(
    "content",
    ["", "garbage", "[]", "{}", '{"pid": 4711}']
    + [
        json.dumps({"pid": 4711, "created_at": value})
        for value in (
            None,
            "",
            "yesterday",
            1_700_000_000,
            "2023-11-14T22:13:20",
            "9999-12-31T23:59:59-01:00",
        )
    ],
)
def test_without_a_readable_created_at_the_age_is_that_of_the_file(
    tmp_path: Path, clock: ManualClock, content: str
) -> None:
    put(tmp_path, content, age=0.0)
    assert is_held(locker(tmp_path, clock))
    put(tmp_path, content, age=DEFAULT_STALE_AFTER)
    assert is_held(locker(tmp_path, clock))
    put(tmp_path, content, age=DEFAULT_STALE_AFTER + 1)
    assert not is_held(locker(tmp_path, clock))


@pytest.mark.req("RL-06")
def test_a_readable_created_at_overrides_the_time_of_the_file(tmp_path: Path, clock: ManualClock) -> None:
    put(tmp_path, record(), age=10 * DEFAULT_STALE_AFTER)
    assert is_held(locker(tmp_path, clock))
    put(tmp_path, record(created_at=format_instant(NOW - DEFAULT_STALE_AFTER - 1)), age=0.0)
    assert not is_held(locker(tmp_path, clock))


@pytest.mark.req("RL-05")
@pytest.mark.parametrize(
    "created_at", ["2023-11-14T20:13:19Z", "2023-11-14T20:13:19.123456789Z", "2023-11-14T21:13:19+01:00"]
)
def test_timestamps_of_other_programs_are_understood(tmp_path: Path, clock: ManualClock, created_at: str) -> None:
    """Each is two hours and about a second before NOW."""
    put(tmp_path, record(created_at=created_at))
    assert not is_held(locker(tmp_path, clock))
    put(tmp_path, record(created_at=created_at))
    clock.advance(-2)
    assert is_held(locker(tmp_path, clock))


@pytest.mark.req("RL-05")
def test_a_lock_from_the_future_is_held_until_it_is_too_old_by_its_own_time(tmp_path: Path, clock: ManualClock) -> None:
    put(tmp_path, record(created_at=format_instant(NOW + 3600)))
    assert is_held(locker(tmp_path, clock))
    clock.advance(3600 + DEFAULT_STALE_AFTER)
    assert is_held(locker(tmp_path, clock))
    clock.advance(1)
    assert not is_held(locker(tmp_path, clock))


_VALUES: st.SearchStrategy[object] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just({}), st.just([])
)
_FIELDS = st.sampled_from(["pid", "created_at", "cmd", "holder_id", "lock_id"])


@pytest.mark.req("RL-04", "RL-06")
@settings(deadline=None, max_examples=rounds(60, least=5))
@given(content=st.binary(max_size=80) | st.dictionaries(_FIELDS, _VALUES).map(lambda said: json.dumps(said).encode()))
def test_a_lock_with_any_content_is_held_when_recent_and_free_when_old(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    data_dir, clock = tmp_path_factory.mktemp("data"), ManualClock(wall=NOW)
    put(data_dir, content, age=0.0)
    assert is_held(locker(data_dir, clock))
    put(data_dir, content, age=DEFAULT_STALE_AFTER + 1)
    assert not is_held(locker(data_dir, clock))


# --- Taking over ----------------------------------------------------------------------------------------


@pytest.mark.req("RL-05")
def test_a_takeover_is_tried_at_most_three_times(tmp_path: Path, clock: ManualClock) -> None:
    """Another process is always faster, and its lock is always stale too."""
    judged: list[int | None] = []

    def check(info: RepoLockInfo) -> Liveness:
        judged.append(info.pid)
        put(tmp_path, record(pid=len(judged)))  # a different lock by the time of the verdict
        return DEAD

    put(tmp_path, record(pid=0))
    with pytest.raises(RepoLocked):
        RepoLock(tmp_path, clock=clock, liveness_check=check).lock(REPO)
    assert judged == [0, 1, 2]


@pytest.mark.req("RL-05", "RL-08")
def test_a_lock_that_replaced_a_stale_one_is_judged_again(tmp_path: Path, clock: ManualClock) -> None:
    def check(info: RepoLockInfo) -> Liveness:
        if info.pid == 2:
            return ALIVE
        put(tmp_path, record(pid=2, cmd="was faster"))
        return DEAD

    path = put(tmp_path, record(pid=1))
    with pytest.raises(RepoLocked, match="pid 2"):
        RepoLock(tmp_path, clock=clock, liveness_check=check).lock(REPO)
    assert json.loads(path.read_bytes())["cmd"] == "was faster"


@needs_fork
@pytest.mark.req("RL-04")
def test_a_process_stopped_during_a_takeover_blocks_no_other(tmp_path: Path, workers: Workers) -> None:
    put(tmp_path, record(pid=999_999, created_at="2001-01-01T00:00:00Z"))
    guard = tmp_path / "repos" / REPO / ".lock.guard"
    stopped = start_with(workers, lambda: FileLocker().lock_exclusive(guard))
    stopped.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.locks.flock_wait.LockWait.acquire", lambda *_, **__: pytest.fail("must not wait"))
        assert is_held(RepoLock(tmp_path))
    stopped.kill()
    stopped.wait()
    assert not is_held(RepoLock(tmp_path))
