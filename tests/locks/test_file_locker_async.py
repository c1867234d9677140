"""File locks in coroutines: the event loop keeps running, and a cancelled wait leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import LockReentry, LockTimeout
from holdfast.locks.file_lock import FileLocker, LockGuard
from tests.locks.lock_watch import (
    flocked,
    holding,
    is_free,
    linux_only,
    open_files,
    others_get,
    own_threads,
    start_holding,
    wait_until_no_thread_is_left,
    waiting_for,
)
from tests.locks.workers import PATIENCE, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until `condition` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "timed out waiting for the condition"
        await asyncio.sleep(0.001)


def test_async_with_holds_the_lock_for_its_block_and_no_longer(path: Path) -> None:
    async def use() -> None:
        async with FileLocker(0).lock_exclusive_async(path) as guard:
            assert guard.held
            assert not is_free(path)
        assert is_free(path)
        with pytest.raises(ZeroDivisionError):
            async with FileLocker(0).lock_exclusive_async(path):
                _ = 1 // 0
        assert is_free(path)

    asyncio.run(use())


def test_awaiting_returns_a_guard_that_the_caller_releases(path: Path) -> None:
    async def use() -> None:
        guard = await FileLocker(0).lock_shared_async(path)
        assert guard.shared
        assert is_free(path, shared=True)
        assert not is_free(path)
        guard.release()
        assert is_free(path)

    asyncio.run(use())


def test_the_event_loop_keeps_running_while_a_coroutine_waits(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)

    async def use() -> int:
        waiting = asyncio.create_task(take(FileLocker(PATIENCE), path))
        await until(lambda: waiting_for(path))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done(), "the task did not wait"
        holder.say("go on")
        guard = await waiting
        wait_until(lambda: holding(path) == [os.getpid()])
        guard.release()
        return 1

    assert asyncio.run(use())
    wait_until_no_thread_is_left()


async def take(locker: FileLocker, path: Path) -> LockGuard:
    return await locker.lock_exclusive_async(path)


def test_a_coroutine_that_times_out_gets_the_same_error(path: Path) -> None:
    async def use() -> None:
        started = time.monotonic()
        with pytest.raises(LockTimeout, match=f"{path} after 50ms"):
            await FileLocker(0.05).lock_exclusive_async(path)
        assert time.monotonic() - started >= 0.05

    with flocked(path):
        asyncio.run(use())
    wait_until_no_thread_is_left()


def test_two_tasks_of_one_thread_exclude_each_other(path: Path) -> None:
    inside = 0
    locker = FileLocker(PATIENCE)

    async def enter_often() -> None:
        nonlocal inside
        for _ in range(25):
            async with locker.lock_exclusive_async(path):
                assert inside == 0
                inside += 1
                await asyncio.sleep(0)
                inside -= 1

    async def use() -> None:
        await asyncio.gather(*(enter_often() for _ in range(4)))

    asyncio.run(use())
    assert locker.statistics().acquired == 100


def test_two_tasks_of_one_thread_share_a_shared_lock(path: Path) -> None:
    async def use() -> None:
        locker = FileLocker(0)
        async with locker.lock_shared_async(path):
            await asyncio.create_task(shared_too(locker))

    async def shared_too(locker: FileLocker) -> None:
        async with locker.lock_shared_async(path):
            assert locker.statistics().held_now == 2

    asyncio.run(use())


def test_reentry_by_the_holding_task_is_refused_at_once(path: Path) -> None:
    async def use() -> None:
        locker = FileLocker(None)
        async with locker.lock_exclusive_async(path):
            with pytest.raises(LockReentry):
                await locker.lock_exclusive_async(path)

    asyncio.run(use())


@linux_only
@pytest.mark.parametrize("fair", [False, True], ids=["unfair", "fair"])
def test_a_cancelled_wait_leaves_no_lock_thread_or_descriptor_and_is_never_granted(
    fair: bool, path: Path, workers: Workers
) -> None:
    holder = start_holding(workers, path, fair=fair)
    before = open_files().keys()

    async def use() -> None:
        locker = FileLocker(None, fair=fair)
        tasks = [asyncio.create_task(take(locker, path)) for _ in range(5)]
        await until(lambda: len(waiting_for(path)) == (1 if fair else 5))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        await until(lambda: not own_threads())
        assert waiting_for(path) == []
        locker.close()

    asyncio.run(use())
    assert open_files().keys() <= before
    assert holder.ask("go on") == "released"
    assert holding(path) == []
    assert others_get(workers, path)


@linux_only
def test_a_lock_granted_at_the_moment_of_the_cancellation_is_released(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)

    async def use() -> None:
        loop = asyncio.get_running_loop()
        locker = FileLocker(PATIENCE)
        task = asyncio.create_task(take(locker, path))
        await until(lambda: waiting_for(path))
        holder.say("go on")
        wait_until(lambda: not any(name == "holdfast-async-wait" for name in own_threads()))
        # The grant is now in the loop's queue. The cancellation follows it, and both run before the task:
        # the task is cancelled when it already holds the lock.
        loop.call_soon(task.cancel)
        await asyncio.wait([task])
        assert task.cancelled()
        assert locker.statistics()[0] == 1, "the lock was never granted"
        assert locker.statistics().held_now == 0
        assert is_free(path), "the lock must be free while the task and its exception still exist"

    asyncio.run(use())


@linux_only
def test_a_lock_granted_after_the_loop_was_closed_is_released(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)
    loop = asyncio.new_event_loop()
    locker = FileLocker(PATIENCE)
    coroutine = take(locker, path)
    task = loop.create_task(coroutine)
    loop.run_until_complete(until(lambda: waiting_for(path)))
    loop.close()

    holder.say("go on")

    wait_until_no_thread_is_left()
    wait_until(lambda: locker.statistics().acquired == 1)
    assert is_free(path)
    assert not task.done()
    coroutine.close()
    assert is_free(path)


@linux_only
def test_a_wait_that_asyncio_times_out_is_never_granted(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)

    async def use() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(take(FileLocker(None), path), 0.02)

    asyncio.run(use())
    wait_until_no_thread_is_left()
    assert waiting_for(path) == []
    holder.ask("go on")
    assert others_get(workers, path)
