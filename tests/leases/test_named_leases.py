"""Named leases: fenced, queued and renewed like those of worktrees, and independent of them, on every store."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import Deadlock, LockConflict, LockNotHeld, NameInvalid, NotFound, Refused
from holdfast.leases.service import LeaseService, acquire
from holdfast.repository.migration import migrate
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.memory import MemoryStore
from holdfast.store.open import open_address
from tests.locks.workers import PATIENCE, wait_until
from tests.repository.stages import expire, make_repository

pytestmark = pytest.mark.both_homes

LONG = 3600.0
JOB = "nightly-job"


@pytest.fixture
def repository(scratch: Path) -> Repository:
    return make_repository(scratch / "repo")


def service_at(root: Path, address: str) -> LeaseService:
    return LeaseService(open_address(root, address), AuditTrail()).of_names()


@pytest.mark.plain_home("it is about stores alone")
def test_every_grant_has_the_next_token_and_the_queue_is_served_in_order(tmp_path: Path, store_url: str) -> None:
    first, second, third = (service_at(tmp_path, store_url) for _ in range(3))
    held = acquire(first, JOB, first.request(ttl=LONG, purpose="the report"))
    assert (held.name, held.worktree, held.token) == (JOB, "", 1)
    with pytest.raises(LockConflict, match=r"nightly-job is leased by .* for: the report") as conflict:
        second.acquire(JOB, second.request())
    assert conflict.value.facts["name"] == JOB
    with ThreadPoolExecutor(2) as pool:
        waits = []
        for number, each in enumerate((second, third), 1):
            waits.append(pool.submit(acquire, each, JOB, each.request(ttl=LONG), wait=PATIENCE))
            wait_until(lambda number=number: (state := first.state(JOB)) and len(state.waiters) == number)  # type: ignore[misc]
        held.release()
        following = waits[0].result(PATIENCE)
        assert following.token == 2
        following.release()
        assert waits[1].result(PATIENCE).token == 3
    events = [entry.event for entry in verify(first.store.entries(AuditTrail().stream))]
    assert events == ["lock_acquired", "lock_released"] * 2 + ["lock_acquired"]


@pytest.mark.plain_home("it is about stores alone")
def test_a_heartbeat_keeps_it_and_a_released_one_is_lost_to_nobody(tmp_path: Path, store_url: str) -> None:
    leases = service_at(tmp_path, store_url)
    with acquire(leases, JOB, leases.request(ttl=1.0)) as held:
        before = held.lease.last_renewed_at
        wait_until(lambda: held.lease.last_renewed_at != before)
        held.check()
        assert [each.lease.subject for each in leases.states()] == [JOB]
    assert list(leases.states()) == []


def test_a_name_and_a_worktree_of_the_same_name_have_nothing_to_do_with_each_other(repository: Repository) -> None:
    with repository.lease("main") as of_worktree, repository.lease(name="main") as named:
        of_worktree.check()
        named.check()
        assert (named.token, of_worktree.token) == (1, 1)
        with pytest.raises(LockConflict):
            repository.lease(name="main")
        with pytest.raises(LockNotHeld):
            repository.leases.release("main", named.lock_id)
        repository.snapshot(lease=of_worktree)
        with pytest.raises(LockNotHeld):
            repository.named_leases.renew("main", of_worktree.lock_id)
    assert repository.lease(name="main").token == 2


def test_a_name_that_is_no_worktree_leads_to_named_leases(repository: Repository) -> None:
    with pytest.raises(NotFound) as failure:
        repository.lease(JOB)
    assert "lease(name=...)" in failure.value.hint
    assert "--name" in failure.value.hint


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 129])
def test_an_unsafe_or_empty_name_is_refused(repository: Repository, name: str) -> None:
    for attempt in (repository.lease, repository.steal):
        with pytest.raises(NameInvalid):
            attempt(name=name)


def test_an_expired_one_is_stolen_and_its_holder_learns_that(repository: Repository) -> None:
    held = repository.lease(name=JOB, ttl=LONG)
    with pytest.raises(LockConflict):
        repository.steal(name=JOB)
    expire(repository, JOB, service=repository.named_leases)
    stolen = repository.steal(name=JOB)
    assert stolen.stolen_from is not None
    assert stolen.lease.fencing_token == held.token + 1
    with pytest.raises(LockNotHeld):
        held.renew()
    with pytest.raises(LockNotHeld):
        held.check()


def test_coroutines_wait_for_a_name(repository: Repository) -> None:
    done: list[int] = []

    async def work() -> None:
        async with await repository.lease_async(name=JOB, wait=PATIENCE) as lease:
            done.append(lease.token)

    async def main() -> None:
        await asyncio.gather(work(), work())

    asyncio.run(main())
    assert sorted(done) == [1, 2]


@pytest.mark.plain_home("it is about stores alone")
def test_a_deadlock_may_lead_through_a_name_and_a_worktree() -> None:
    store = MemoryStore()
    one, other = (LeaseService(store, AuditTrail(), actor=f"agent:{name}") for name in "ab")
    one.acquire("main", one.request(ttl=LONG))
    named = other.of_names().acquire(JOB, other.request(ttl=LONG)).lease

    def wait() -> str:
        try:
            return acquire(other, "main", other.request(ttl=LONG), wait=PATIENCE).worktree
        except Deadlock as deadlock:
            other.of_names().release(JOB, named.lock_id)
            return deadlock.message

    with ThreadPoolExecutor(1) as pool:
        older = one.request(ttl=LONG)
        one.of_names().join_queue(JOB, older)
        younger = pool.submit(wait)
        assert acquire(one.of_names(), JOB, older, wait=PATIENCE).name == JOB
        assert f"named lease on {JOB}" in younger.result(PATIENCE)


def test_it_is_in_the_overview_and_ended_by_the_doctor_when_it_has_expired(repository: Repository) -> None:
    repository.lease(name=JOB, ttl=LONG, purpose="the report")
    (found,) = look_around(repository.root).holdings
    assert (found.kind, found.what, found.purpose) == ("named lease", JOB, "the report")
    assert f"lease acquire --name {JOB}" in found.reclaim.how
    assert repository.examine() == []
    expire(repository, JOB, service=repository.named_leases)
    assert [(each.code, each.subject) for each in repository.examine()] == [("lock-expired", JOB)]
    repository.repair()
    assert list(repository.named_leases.states()) == []


def test_a_store_is_not_migrated_while_a_named_lease_is_held(repository: Repository) -> None:
    held = repository.lease(name=JOB, ttl=LONG)
    with pytest.raises(Refused, match=JOB):
        migrate(repository.context.store, MemoryStore())
    held.release()
    target = MemoryStore()
    migrate(repository.context.store, target)
    moved = LeaseService(target, AuditTrail()).of_names()
    assert moved.acquire(JOB, moved.request()).lease.fencing_token == held.token + 1


@pytest.mark.skipif(sys.platform == "win32", reason="compares paths")
def test_its_files_are_apart_from_those_of_worktrees(repository: Repository) -> None:
    held = repository.lease(name=JOB)
    record = json.loads((repository.root / f".jvs/named/leases/{JOB}.json").read_text())
    assert (record["name"], record["worktree_id"], record["lock_id"]) == (JOB, "", held.lock_id)
    assert not (repository.root / f".jvs/locks/{JOB}.json").exists()
