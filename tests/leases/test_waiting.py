"""Threads and agents of one process that wait for its own lease are served in turn: that is no cycle."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import Deadlock, LockTimeout
from holdfast.leases import service
from holdfast.leases.rules import LeaseWaiting
from holdfast.leases.service import LeaseService
from holdfast.locks.file_lock import FileLocker
from holdfast.store.audit import AuditTrail
from holdfast.store.files import FileStore
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


# --- A document lock that is not free, such as that of a stopped process ----------------------------------


def waiting_service(root: Path, timeout: float) -> tuple[FileStore, LeaseService]:
    store = FileStore(root, timeout=timeout)
    leases = LeaseService(store, AuditTrail())
    leases.release("main", leases.acquire("main", leases.request()).lease.lock_id)  # its directories exist
    return store, leases


def test_a_wait_ends_at_its_own_time_limit_not_at_that_of_a_document_lock(records: Path) -> None:
    _, leases = waiting_service(records, LONG)
    with (
        FileLocker().lock_exclusive(records / ".jvs/guards/worktree-main.lock"),
        ThreadPoolExecutor(1) as pool,
    ):
        wait = pool.submit(service.acquire, leases, "main", leases.request(), wait=0.3)
        failure = wait.exception(PATIENCE)
    assert isinstance(failure, LockTimeout)
    assert failure.timeout == 0.3
    assert re.search(r"the worktree main, at .*worktree-main.lock, after 300ms; held by", failure.message)


def test_a_wait_outlasts_a_document_lock_that_is_not_free_in_time(records: Path) -> None:
    store, leases = waiting_service(records, 0.02)
    with ThreadPoolExecutor(1) as pool:
        with FileLocker().lock_exclusive(records / ".jvs/guards/worktree-main.lock"):
            wait = pool.submit(service.acquire, leases, "main", leases.request(), wait=PATIENCE)
            wait_until(lambda: wait.done() or store.lock_statistics().timed_out >= 3)
        assert wait.result(PATIENCE).token == 2


def test_the_next_waiter_asks_when_the_lease_expires() -> None:
    leases = LeaseService(MemoryStore(), AuditTrail())
    leases.acquire("main", leases.request(ttl=2.0))
    answer = leases.join_queue("main", leases.request())
    assert isinstance(answer, LeaseWaiting)
    asked_again = vars(service)["_or_not_yet"](answer)
    assert asked_again.pause == answer.time_left <= 2.0
