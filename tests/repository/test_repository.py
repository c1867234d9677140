"""The library interface of a repository: leases with a heartbeat, sync and async, and waiting for them."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path

import pytest

from holdfast.cli.repository import OpenedRepository, proven
from holdfast.errors import LockConflict, LockNotHeld, LockTimeout, NotFound
from holdfast.leases.rules import LeaseKeys
from holdfast.repository.context import MAIN, OPERATIONS, Operation, OperationKind
from holdfast.repository.overview import look_around
from holdfast.repository.payloads import leased, payload_locked
from holdfast.repository.repository import Repository
from holdfast.store.model import Create, Decision, Delete
from tests.locks.workers import Line, Workers
from tests.repository.stages import expire, make_repository
from tests.support.descriptors import open_descriptors

pytestmark = pytest.mark.both_homes


@pytest.fixture
def repository(scratch: Path) -> Repository:
    return make_repository(scratch / "repo")


def begin_removal(repository: Repository, name: str) -> None:
    """Record a removal, as left by a process that is killed right after deciding on it."""
    key = OPERATIONS.key(name)
    operation = Operation(
        operation_id="0123456789abcdef",
        kind=OperationKind.REMOVE,
        worktree_id=name,
        begun_at="2026-01-01T00:00:00Z",
        holder_id="host:user:1:1",
    )
    repository.context.store.transact([key], lambda view, now: Decision([Create(key, operation)], None))


def test_a_lease_is_held_for_a_block_and_checked_in_it(repository: Repository) -> None:
    with repository.lease(purpose="tests") as held:
        held.check()
        with pytest.raises(LockConflict, match="tests"):
            repository.lease()
    assert repository.leases.state(MAIN) is None
    with pytest.raises(LockNotHeld):
        held.check()


def test_a_coroutine_can_hold_a_lease(repository: Repository) -> None:
    async def work() -> int:
        async with await repository.lease_async(purpose="tests") as held:
            held.check()
            return held.token

    assert asyncio.run(work()) == 1
    assert repository.leases.state(MAIN) is None


def test_a_coroutine_cancelled_while_waiting_leaves_the_queue_and_holds_nothing(
    repository: Repository,
) -> None:
    queue = LeaseKeys.of(MAIN).queue

    async def work() -> None:
        waiting = asyncio.ensure_future(repository.lease_async(wait=None))
        while repository.context.store.read(queue) is None:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.release()  # wakes the waiting thread, which may be granted the lease and gives it back

    held = repository.lease()
    asyncio.run(work())
    assert repository.context.store.read(queue) is None
    assert repository.leases.state(MAIN) is None


@pytest.mark.req("LC-12")
def test_after_a_failed_renewal_the_library_refuses_to_write(repository: Repository) -> None:
    held = repository.lease(ttl=600)
    expire(repository)
    with pytest.raises(Exception, match="expired"):
        held.renew()
    assert held.lost.is_set()
    for attempt in (held.check, held.renew, lambda: repository.snapshot(MAIN, held)):
        with pytest.raises(Exception, match="expired"):
            attempt()
    assert repository.context.config(MAIN).head_snapshot_id is None


def test_a_worktree_that_does_not_exist_cannot_be_leased(repository: Repository) -> None:
    for attempt in (repository.lease, repository.steal, repository.path):
        with pytest.raises(NotFound, match="no worktree nowhere"):
            attempt("nowhere")
    assert not (repository.root / ".jvs/locks").exists() or not list((repository.root / ".jvs/locks").iterdir())


def test_the_next_command_finishes_the_operation_of_a_dead_process(repository: Repository) -> None:
    repository.worktrees.create("dev")
    begin_removal(repository, "dev")
    with pytest.raises(NotFound):
        repository.lease("dev")
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN]
    repository.worktrees.create("dev")


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_a_waiter_for_the_lease_also_waits_for_a_pending_operation(repository: Repository) -> None:
    repository.worktrees.create("dev")

    def change(line: Line) -> None:
        with payload_locked(Repository(repository.root).context, "dev"):
            line.say("at it")
            line.wait()

    with Workers() as workers:
        worker = workers.start(change)
        assert worker.hear() == "at it"
        begin_removal(repository, "dev")
        with pytest.raises(LockConflict, match="being removed by host:user:1:1"):
            repository.lease("dev")
        with pytest.raises((LockConflict, LockTimeout)):
            repository.lease("dev", wait=0.2)
        ended: list[object] = []

        def wait() -> None:
            try:
                ended.append(repository.lease("dev", wait=60))
            except NotFound as failure:
                ended.append(failure)

        waiting = threading.Thread(target=wait)
        waiting.start()
        worker.say("be done")
        waiting.join()
    assert isinstance(ended[0], NotFound), "the waiter did not finish the removal of the dead process"


@pytest.mark.plain_home("only there, a path tells the worktree")
def test_a_path_belongs_to_the_worktree_around_it(repository: Repository) -> None:
    root = repository.root
    assert repository.worktree_around(root) == MAIN
    assert repository.worktree_around(root / "main" / "deep" / "below") == MAIN
    assert repository.worktree_around(root / "worktrees") == MAIN
    assert repository.worktree_around(root / "worktrees" / "dev" / "below") == "dev"
    assert repository.worktree_around(root.parent) == MAIN


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are counted in /proc")
def test_opening_a_repository_repeatedly_leaks_no_descriptors(scratch: Path) -> None:
    make_repository(scratch / "repo")

    def use() -> set[str]:
        with Repository(scratch / "repo") as opened, opened.lease():
            pass
        look_around(scratch / "repo")
        return open_descriptors()

    first = [use() for _ in range(3)][-1]
    assert len([use() for _ in range(20)][-1]) <= len(first)


def test_a_time_limit_covers_the_wait_for_an_operation_and_that_in_the_queue(repository: Repository) -> None:
    key = OPERATIONS.key(MAIN)

    class EndsOperation(threading.Event):
        """Asked after each conflict; the first time, the operation ends."""

        def is_set(self) -> bool:
            if repository.context.store.read(key) is not None:
                repository.context.store.transact([key], lambda view, now: Decision([Delete(key)], None))
            return False

    repository.lease(ttl=600)
    begin_removal(repository, MAIN)
    with payload_locked(repository.context, MAIN), pytest.raises(LockTimeout) as failure:
        repository.lease(wait=0.3, cancelled=EndsOperation())
    assert failure.value.timeout == 0.3


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_the_lease_of_a_killed_holder_says_when_it_is_free_and_a_waiter_gets_it_then(repository: Repository) -> None:
    def hold(line: Line) -> None:
        line.say(Repository(repository.root).lease(ttl=2.0, purpose="snapshot").lease.lease_expires_at)
        line.wait()

    with Workers() as workers:
        worker = workers.start(hold)
        expires_at = worker.hear()
        worker.kill()
        worker.wait()
    with pytest.raises(LockConflict) as conflict:
        repository.lease()
    facts = conflict.value.facts
    assert facts["liveness"] == "dead"
    assert f"becomes free at {facts['free_at']}" in conflict.value.message
    assert facts["expires_at"] == expires_at
    assert re.search(r"--wait \ds", conflict.value.hint)
    with pytest.raises(LockConflict):
        repository.steal()
    with pytest.raises(LockTimeout, match="which is dead: nobody renews it, so it becomes free in "):
        repository.lease(wait=0.01)
    assert repository.lease(wait=60).token == 2


def test_a_command_that_needs_the_lease_for_its_own_duration_takes_a_short_one(repository: Repository) -> None:
    with proven(OpenedRepository(repository, MAIN), None, "snapshot", environment={}):
        assert ttl_of_main(repository) <= 10
    with leased(repository.context, MAIN, "rename"):
        assert ttl_of_main(repository) <= 10


def ttl_of_main(repository: Repository) -> float:
    state = repository.leases.state(MAIN)
    assert state is not None
    return state.lease.ttl
