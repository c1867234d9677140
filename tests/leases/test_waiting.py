"""Threads and agents of one process that wait for its own lease are served in turn: that is no cycle."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import Deadlock, LockTimeout
from holdfast.leases import service
from holdfast.leases.service import LeaseService
from holdfast.store.audit import AuditTrail
from holdfast.store.memory import MemoryStore
from tests.locks.workers import PATIENCE, wait_until

LONG = 3600.0


@pytest.mark.parametrize("detached", [False, True])
def test_threads_of_one_process_and_agents_of_one_program_wait_in_turn(detached: bool) -> None:
    leases = LeaseService(MemoryStore(), AuditTrail())
    behalf_of = leases.holder if detached else None
    served: list[int] = []

    def work(number: int) -> None:
        request = leases.request(ttl=LONG, behalf_of=behalf_of)
        lease = service.acquire(leases, "main", request, wait=PATIENCE)
        served.append(number)
        leases.release("main", lease.lock_id)

    first = leases.acquire("main", leases.request(ttl=LONG, behalf_of=behalf_of)).lease
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(work, number) for number in range(3)]
        while not (state := leases.state("main")) or len(state.waiters) < 3:
            assert not any(each.done() and each.exception() for each in waits)
            time.sleep(0.01)
        leases.release("main", first.lock_id)
        for each in waits:
            each.result(PATIENCE)

    assert sorted(served) == [0, 1, 2]


def test_named_agents_of_one_process_can_form_a_cycle() -> None:
    store = MemoryStore()
    one, other = (LeaseService(store, AuditTrail(), actor=f"agent:{name}") for name in "ab")

    def wait() -> str:
        try:
            return service.acquire(other, "x", other.request(ttl=LONG), wait=PATIENCE).worktree
        except Deadlock:
            other.release("y", second.lock_id)
            return "gave up"

    one.acquire("x", one.request(ttl=LONG))
    second = other.acquire("y", other.request(ttl=LONG)).lease
    with ThreadPoolExecutor(1) as pool:
        older = one.request(ttl=LONG)
        one.join_queue("y", older)
        younger = pool.submit(wait)
        assert service.acquire(one, "y", older, wait=PATIENCE).worktree == "y"
        assert younger.result(PATIENCE) == "gave up"


def test_a_waiter_that_times_out_is_told_who_holds_the_lease() -> None:
    leases = LeaseService(MemoryStore(), AuditTrail())
    lease = leases.acquire("main", leases.request(ttl=LONG, purpose="important work")).lease
    with pytest.raises(LockTimeout, match="important work"):
        service.acquire(leases, "main", leases.request(ttl=LONG), wait=0.05)
    wait_until(lambda: (state := leases.state("main")) is not None and not state.waiters)
    assert lease.purpose == "important work"
