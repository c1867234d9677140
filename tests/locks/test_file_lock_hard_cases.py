"""Hard cases of file locks: replaced files, reentry, crowds of threads, clock changes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import (
    LockReentry,
    LockTimeout,
)
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.flock import MOST_IDLE
from holdfast.locks.flock_wait import LockWait
from tests.locks.lock_watch import (
    Caller,
    descriptors_of,
    flocked,
    hold,
    holding,
    linux_only,
    obey,
    others_get,
    start_holding,
    wait_until_waiting,
    waiting_for,
)
from tests.locks.workers import PATIENCE, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs POSIX forks, signals and modes", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


# --- The file at the path is replaced -----------------------------------------------------------------


def unlink(path: Path) -> None:
    path.unlink()


def unlink_and_recreate(path: Path) -> None:
    path.unlink()
    path.touch()


def rename_over(path: Path) -> None:
    path.with_suffix(".new").touch()
    path.with_suffix(".new").rename(path)


def rename_away_and_recreate(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.touch()


changes = pytest.mark.parametrize(
    "change",
    [unlink, unlink_and_recreate, rename_over, rename_away_and_recreate],
    ids=lambda each: each.__name__,
)
Change = Callable[[Path], None]


@linux_only
@pytest.mark.req("FL-03")
@changes
@pytest.mark.parametrize("fair", [False, True], ids=["unfair", "fair"])
def test_a_waiter_whose_file_is_replaced_ends_up_with_the_new_file(
    change: Change, fair: bool, path: Path, workers: Workers
) -> None:
    holder = start_holding(workers, path, fair=fair)
    waiter = workers.start(hold(path, fair=fair))
    wait_until_waiting(path)
    old = path.stat()

    change(path)
    holder.say("go on")

    assert waiter.hear() == "held"
    assert not os.path.samestat(path.stat(), old)
    wait_until(lambda: holding(path) == [waiter.pid])
    assert not others_get(workers, path)


@linux_only
@pytest.mark.req("FL-03")
@changes
def test_a_waiter_that_gets_the_old_file_keeps_waiting_for_the_holder_of_the_new_one(
    change: Change, path: Path, workers: Workers
) -> None:
    old_holder = start_holding(workers, path)
    waiter = workers.start(hold(path))
    wait_until_waiting(path)
    change(path)
    new_holder = start_holding(workers, path)

    assert old_holder.ask("go on") == "released"

    wait_until(lambda: waiting_for(path) == [waiter.pid])
    new_holder.say("go on")
    assert waiter.hear() == "held"
    wait_until(lambda: holding(path) == [waiter.pid])


@pytest.mark.req("FL-03")
@changes
def test_a_locker_with_the_old_file_still_open_locks_the_new_one(change: Change, path: Path, workers: Workers) -> None:
    locker = FileLocker(0)
    locker.lock_exclusive(path).release()
    change(path)

    with locker.lock_exclusive(path):
        assert not others_get(workers, path)


@linux_only
def test_one_deadline_covers_the_waits_for_the_old_and_the_new_file(path: Path, workers: Workers) -> None:
    old_holder = start_holding(workers, path)
    waiter = workers.start(obey(path))
    started = time.monotonic()
    waiter.say(("lock", False, 0.3))
    wait_until(lambda: waiting_for(path) or waiter.line.has_news())
    unlink(path)
    start_holding(workers, path)
    old_holder.say("go on")

    assert waiter.hear() is False

    assert 0.3 <= time.monotonic() - started < PATIENCE / 2


# --- One process --------------------------------------------------------------------------------------


@pytest.mark.req("FL-03")
def test_two_lockers_in_one_thread_exclude_each_other(path: Path) -> None:
    with FileLocker(0).lock_exclusive(path):
        assert FileLocker(0).try_lock_exclusive(path) is None
        assert FileLocker(0).try_lock_shared(path) is None


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything waits for a lock."""
    monkeypatch.setattr(LockWait, "acquire", lambda *_, **__: pytest.fail("must not wait"))


@pytest.mark.parametrize(("held", "wanted"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("fair", [False, True], ids=["unfair", "fair"])
@pytest.mark.usefixtures("nothing_waits")
def test_reentry_by_the_holding_thread_is_refused_at_once(held: bool, wanted: bool, fair: bool, path: Path) -> None:
    locker = FileLocker(None, fair=fair)
    guard = locker.acquire(path, shared=held)

    with pytest.raises(LockReentry, match="is already locked by this thread") as caught:
        locker.acquire(path, shared=wanted)

    assert caught.value.code == "E_LOCK_REENTRY"
    assert not caught.value.retryable
    assert "Reuse the lock that this thread holds" in caught.value.hint
    assert caught.value.facts["path"] == str(path)
    assert guard.held
    guard.release()
    assert locker.acquire(path, shared=wanted).held, "the lock was refused after its release"


@pytest.mark.usefixtures("nothing_waits")
def test_reentry_is_noticed_across_lockers_and_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = FileLocker(None).lock_exclusive(path)
    other_name = path.with_name("b.lock")
    other_name.hardlink_to(path)
    monkeypatch.chdir(path.parent)

    for name in (str(path), "./a.lock", other_name):
        with pytest.raises(LockReentry):
            FileLocker(None).lock_exclusive(name)
    assert guard.held


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize("fair", [False, True], ids=["unfair", "fair"])
def test_a_thread_that_shares_a_lock_can_share_it_again(fair: bool, path: Path, workers: Workers) -> None:
    locker = FileLocker(None, fair=fair)
    first = locker.lock_shared(path)
    second = locker.lock_shared(path)
    first.release()

    assert second.held
    assert not others_get(workers, path)


@linux_only
@pytest.mark.parametrize(("held", "wanted"), [(False, False), (True, False), (False, True)])
def test_reentry_of_a_fair_lock_is_refused_at_once_even_with_waiters(
    held: bool, wanted: bool, path: Path, workers: Workers
) -> None:
    locker = FileLocker(PATIENCE, fair=True)
    guard = locker.acquire(path, shared=held)
    waiter = workers.start(hold(path, fair=True))
    wait_until_waiting(path)

    with pytest.raises(LockReentry):
        locker.acquire(path, shared=wanted)

    wait_until(lambda: waiting_for(path) == [waiter.pid])
    guard.release()
    assert waiter.hear() == "held"


@linux_only
def test_sharing_a_fair_lock_again_does_not_deadlock_with_a_waiting_writer(path: Path, workers: Workers) -> None:
    locker = FileLocker(PATIENCE, fair=True)
    guards = [locker.lock_shared(path)]
    waiter = workers.start(hold(path, fair=True))
    wait_until_waiting(path)

    guards.append(locker.lock_shared(path))

    for guard in guards:
        guard.release()
    assert waiter.hear() == "held"


def test_a_guard_can_be_released_by_another_thread(path: Path, workers: Workers) -> None:
    locker = FileLocker(PATIENCE)
    guard = locker.lock_exclusive(path)

    Caller(guard.release).result()

    assert not guard.held
    assert others_get(workers, path)
    assert locker.lock_exclusive(path).held


@linux_only
def test_a_thread_is_not_mistaken_for_an_ended_thread_with_the_same_ident(path: Path) -> None:
    locker = FileLocker(None)
    first = Caller(lambda: locker.lock_exclusive(path))
    guard = first.guard()  # its thread has ended, but the lock is still held
    later: list[Caller] = []
    while not any(each.ident == first.ident for each in later):
        later.append(Caller(lambda: locker.lock_exclusive(path).release()))
        wait_until(lambda: len(waiting_for(path)) == len(later) or not later[-1].is_alive())
        assert len(later) < 200, "no thread ident was reused"

    guard.release()

    for each in later:
        each.result()


@pytest.mark.req("FL-02")
def test_two_threads_releasing_one_guard_at_once_never_free_the_next_holders_lock(path: Path) -> None:
    locker, other = FileLocker(PATIENCE), FileLocker(0)
    rounds = 1000
    begin = threading.Barrier(3)
    current: list[LockGuard] = []

    def release_each() -> None:
        for _ in range(rounds):
            begin.wait(PATIENCE)
            current[-1].release()
            begin.wait(PATIENCE)

    releasing = [Caller(release_each) for _ in range(2)]
    for _ in range(rounds):
        current.append(locker.lock_exclusive(path))
        begin.wait(PATIENCE)
        following = locker.try_lock_exclusive(path)  # perhaps between the two releases, on the same description
        begin.wait(PATIENCE)
        if following is not None:
            assert following.held
            assert other.try_lock_exclusive(path) is None, "a held lock was freed"
            following.release()
        current.clear()
    for caller in releasing:
        caller.result()
    assert locker.statistics().held_now == 0


def test_a_guard_outlives_its_locker(path: Path, workers: Workers) -> None:
    guards = [FileLocker(0).lock_exclusive(path)]
    assert not others_get(workers, path)

    guards.clear()

    assert others_get(workers, path)


@pytest.mark.req("FL-02")
def test_opening_and_closing_the_file_elsewhere_in_the_process_does_not_drop_the_lock(
    path: Path, workers: Workers
) -> None:
    with FileLocker(0).lock_exclusive(path):
        path.read_bytes()
        with path.open("a"):
            pass
        with contextlib.suppress(BlockingIOError), flocked(path):
            pass
        assert FileLocker(0).try_lock_exclusive(path) is None

        assert not others_get(workers, path)


def test_five_hundred_threads_wait_for_one_lock_and_all_get_it(path: Path) -> None:
    locker = FileLocker(PATIENCE)
    entered: list[int] = []

    def enter() -> None:
        with locker.lock_exclusive(path):
            entered.append(len(entered))

    with flocked(path):
        callers = [Caller(enter) for _ in range(500)]
        if sys.platform == "linux":
            wait_until_waiting(path, 500)
    for caller in callers:
        caller.result()

    assert entered == list(range(500))
    assert locker.statistics()[:4] == (500, 500, 0, 0)


@pytest.mark.long
def test_five_hundred_threads_wait_for_one_lock_and_all_time_out(path: Path) -> None:
    locker = FileLocker(0.1)

    def wait_and_time_out() -> float:
        started = time.monotonic()
        with pytest.raises(LockTimeout):
            locker.lock_exclusive(path)
        return time.monotonic() - started

    with flocked(path):
        waited = [caller.result() for caller in [Caller(wait_and_time_out) for _ in range(500)]]

    assert all(isinstance(each, float) and each >= 0.1 for each in waited)
    assert locker.statistics()[:4] == (0, 500, 500, 0)
    if sys.platform == "linux":
        locker.close()
        assert descriptors_of(path) == []


@linux_only
def test_only_a_bounded_number_of_the_latest_idle_files_stays_open(scratch: Path) -> None:
    locker = FileLocker(0)
    paths = [scratch / f"{number}.lock" for number in range(MOST_IDLE + 40)]
    for each in paths:
        locker.lock_exclusive(each).release()

    kept = [each for each in paths if descriptors_of(each)]

    assert kept == paths[-MOST_IDLE:]
    locker.lock_exclusive(kept[0]).release()
    locker.lock_exclusive(paths[0]).release()
    assert descriptors_of(kept[0]), "it was used again, so another file was idle longer"
    assert not descriptors_of(kept[1])
    locker.close()
    assert not any(descriptors_of(each) for each in paths)


# --- Clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [86400.0, -86400.0], ids=["forward", "backward"])
def test_setting_the_wall_clock_neither_shortens_nor_prolongs_a_wait(
    step: float, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, jumps = time.time, 0

    def jumping() -> float:
        nonlocal jumps
        jumps += 1
        return real() + step * jumps

    locker = FileLocker(0.1)
    with flocked(path):
        monkeypatch.setattr(time, "time", jumping)
        started = time.monotonic()
        with pytest.raises(LockTimeout):
            locker.lock_exclusive(path)
        waited = time.monotonic() - started
        monkeypatch.undo()

    assert 0.1 <= waited < PATIENCE / 2
    assert 0.09 <= locker.statistics().seconds_waited <= waited  # a little less: the call has begun before


def test_a_wait_ends_by_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    real, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)
    waiter = LockWait(3600.0)
    assert not waiter.is_over()

    ahead = 3601.0

    assert waiter.is_over()
    assert waiter.remaining() == 0


def test_another_process_can_tell_a_free_lock_from_a_held_one(path: Path, workers: Workers) -> None:
    """Most of these tests end with `others_get`, so it must be able to give either answer."""
    path.touch()

    assert others_get(workers, path)
    with FileLocker(0).lock_shared(path):
        assert not others_get(workers, path)
        assert others_get(workers, path, shared=True)
