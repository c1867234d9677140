"""The lease service, on a memory store and on files, with a manual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import (
    FencingMismatch,
    LockConflict,
    LockExpired,
    LockNotHeld,
    LockTimeout,
    NotFound,
    SettingInvalid,
)
from holdfast.leases import rules
from holdfast.leases.rules import LeaseKeys
from holdfast.leases.service import HeldLease, LeaseService, acquire
from holdfast.locks.identity import Holder, Liveness
from holdfast.store.audit import AuditTrail, verify
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Decision, Store, View

TTL = 30.0


class Harness:
    """A store, its clock, and a lease service for each holder."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.trail = AuditTrail()

    def service(self, name: str = "") -> LeaseService:
        holder = Holder("elsewhere", name, 7, "1", "boot", "machine", "namespace") if name else None
        return LeaseService(self.store, self.trail, holder=holder, clock=self.clock)

    def events(self) -> list[str]:
        """The events of leases; the trail of a repository begins with another one."""
        found = [entry.event for entry in verify(self.store.entries(self.trail.stream))]
        return [each for each in found if each.startswith("lock_")]

    def validate(self, lock_id: str, token: int) -> None:
        validate = self.service().validator("main", lock_id, token)

        def decide(view: View, now: float) -> Decision[None]:
            validate(view, now)
            return Decision([], None)

        self.store.transact(LeaseKeys.of("main").all(), decide)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" in metafunc.fixturenames:  # a store in memory has no home
        kinds = [("plain", "memory"), ("plain", "files"), ("git", "files")]
        metafunc.parametrize(("home", "harness"), kinds, indirect=True)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Harness:
    clock = ManualClock()
    if request.param == "memory":
        return Harness(MemoryStore(clock=clock), clock)
    return Harness(FileStore(request.getfixturevalue("records"), clock=clock), clock)


def test_a_free_lease_is_granted_with_every_required_field(harness: Harness) -> None:
    service = harness.service()
    lease = service.acquire("main", service.request(ttl=TTL, purpose="tests")).lease
    assert lease.worktree_id == "main"
    assert lease.holder_id.count(":") == 3
    assert lease.fencing_token == 1
    assert lease.purpose == "tests"
    assert lease.created_at == lease.last_renewed_at < lease.lease_expires_at
    assert harness.events() == ["lock_acquired"]


def test_a_held_lease_is_refused_naming_the_holder_and_the_time_left(harness: Harness) -> None:
    service, other = harness.service(), harness.service("other")
    held = service.acquire("main", service.request(ttl=TTL, purpose="long work")).lease
    harness.clock.advance(10)
    with pytest.raises(LockConflict, match="long work; leased 10s ago, expires in 20s") as refused:
        other.acquire("main", other.request())
    assert refused.value.facts["holder_id"] == held.holder_id
    assert refused.value.facts["time_left"] == pytest.approx(20)
    assert refused.value.facts["liveness"] == Liveness.ALIVE.value


def test_acquiring_an_expired_lease_steals_it_with_a_greater_token(harness: Harness) -> None:
    service, thief = harness.service("first"), harness.service("thief")
    old = service.acquire("main", service.request(ttl=TTL)).lease
    harness.clock.advance(TTL)
    granted = thief.acquire("main", thief.request(ttl=TTL))
    assert granted.stolen_from == old
    assert granted.lease.fencing_token == old.fencing_token + 1
    assert harness.events() == ["lock_acquired", "lock_stolen"]
    last = list(harness.store.entries(harness.trail.stream))[-1].record.facts
    assert last["old"] != last["new"]
    assert last["expired_at"] == old.lease_expires_at


def test_a_lease_that_has_not_expired_cannot_be_stolen(harness: Harness) -> None:
    service, thief = harness.service("first"), harness.service("thief")
    service.acquire("main", service.request(ttl=TTL))
    with pytest.raises(LockConflict):
        thief.steal("main", thief.request())
    with pytest.raises(LockNotHeld, match="nothing to steal"):
        thief.steal("free", thief.request())


def test_only_the_holder_renews_and_only_in_time(harness: Harness) -> None:
    service, other = harness.service("first"), harness.service("other")
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    harness.clock.advance(TTL - 1)
    renewed = service.renew("main", lease.lock_id)
    assert renewed.expiry() == pytest.approx(harness.clock.wall() + TTL)
    assert renewed.last_renewed_at > lease.last_renewed_at
    with pytest.raises(LockNotHeld):
        other.renew("main", "another-id")
    harness.clock.advance(TTL)
    with pytest.raises(LockExpired):
        service.renew("main", lease.lock_id)


def test_only_the_holder_releases_a_lease(harness: Harness) -> None:
    service = harness.service()
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    with pytest.raises(LockNotHeld):
        service.release("main", "another-id")
    state = service.state("main")
    assert state is not None
    assert state.lease == lease
    service.release("main", lease.lock_id)
    assert service.state("main") is None
    with pytest.raises(LockNotHeld):
        service.release("main", lease.lock_id)


def test_tokens_grow_across_releases_and_steals(harness: Harness) -> None:
    service = harness.service()
    tokens: list[int] = []
    for step in range(6):
        lease = service.acquire("main", service.request(ttl=TTL)).lease
        tokens.append(lease.fencing_token)
        if step % 2:
            harness.clock.advance(TTL)
        else:
            service.release("main", lease.lock_id)
    assert tokens == [1, 2, 3, 4, 5, 6]


def test_a_stale_token_is_fenced_out(harness: Harness) -> None:
    service, thief = harness.service("first"), harness.service("thief")
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    harness.validate(lease.lock_id, lease.fencing_token)
    with pytest.raises(FencingMismatch):
        harness.validate(lease.lock_id, lease.fencing_token + 1)
    harness.clock.advance(TTL)
    with pytest.raises(LockExpired):
        harness.validate(lease.lock_id, lease.fencing_token)
    thief.acquire("main", thief.request(ttl=TTL))
    with pytest.raises(FencingMismatch) as refused:
        harness.validate(lease.lock_id, lease.fencing_token)
    assert refused.value.facts["current_token"] == 2


def test_waiters_are_served_by_priority_and_then_in_order_of_arrival(harness: Harness) -> None:
    service = harness.service("first")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    waiting = {}
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("c", 0)):
        each = harness.service(name)
        waiting[name] = (each, each.request(ttl=TTL, priority=priority))
        assert isinstance(each.join_queue("main", waiting[name][1]), rules.LeaseWaiting)
    service.release("main", held.lock_id)
    passer_by = harness.service("passer-by")
    with pytest.raises(LockConflict, match="comes first"):
        passer_by.acquire("main", passer_by.request())
    served = []
    while waiting:
        for name, (each, request) in list(waiting.items()):
            answer = each.join_queue("main", request)
            if isinstance(answer, rules.LeaseGranted):
                served.append(name)
                del waiting[name]
                each.release("main", answer.lease.lock_id)
    assert served == ["urgent", "a", "b", "c"]


def test_a_waiter_without_heartbeats_is_skipped(harness: Harness) -> None:
    service, silent, patient = harness.service("first"), harness.service("silent"), harness.service("patient")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    silent.join_queue("main", silent.request(ttl=TTL))
    harness.clock.advance(1)
    request = patient.request(ttl=TTL)
    for _ in range(8):
        answer = patient.join_queue("main", request)
        assert isinstance(answer, rules.LeaseWaiting)
        harness.clock.advance(rules.WAITER_HEARTBEAT)
        service.renew("main", held.lock_id)
    service.release("main", held.lock_id)
    assert isinstance(patient.join_queue("main", request), rules.LeaseGranted)


def test_a_waiter_whose_process_is_dead_is_skipped_at_once(harness: Harness) -> None:
    here = harness.service().holder
    dead = here._replace(pid=2**22 + 7, start_time="1")
    gone = LeaseService(harness.store, harness.trail, holder=dead, clock=harness.clock)
    service, patient = harness.service("first"), harness.service("patient")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    gone.join_queue("main", gone.request(ttl=TTL))
    service.release("main", held.lock_id)
    assert isinstance(patient.join_queue("main", patient.request(ttl=TTL)), rules.LeaseGranted)


def test_a_waiter_that_times_out_leaves_the_queue(harness: Harness) -> None:
    service, impatient = harness.service("first"), harness.service("impatient")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    with pytest.raises(LockTimeout, match="held by"):
        acquire(impatient, "main", impatient.request(ttl=TTL), wait=0.01)
    service.release("main", held.lock_id)
    assert harness.store.read(LeaseKeys.of("main").queue) is None
    service.acquire("main", service.request(ttl=TTL))


def test_setting_the_clock_back_lets_nobody_jump_the_queue(harness: Harness) -> None:
    service, first, second = harness.service("holder"), harness.service("first"), harness.service("second")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    early = first.request(ttl=TTL)
    first.join_queue("main", early)
    harness.clock.step_wall(-10)
    late = second.request(ttl=TTL)
    answer = second.join_queue("main", late)
    assert isinstance(answer, rules.LeaseWaiting)
    assert answer.position == 2
    service.release("main", held.lock_id)
    assert isinstance(second.join_queue("main", late), rules.LeaseWaiting)
    assert isinstance(first.join_queue("main", early), rules.LeaseGranted)


def test_a_grant_refused_by_a_precondition_changes_nothing(harness: Harness) -> None:
    def refuse(view: View, worktree: str) -> None:
        raise NotFound(f"there is no worktree {worktree}")

    service = LeaseService(harness.store, harness.trail, precondition=refuse)
    with pytest.raises(NotFound):
        service.acquire("main", service.request())
    assert harness.events() == []


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_invalid_ttl_is_refused(harness: Harness, ttl: float) -> None:
    with pytest.raises(SettingInvalid):
        harness.service().request(ttl=ttl)


# --- Held leases ------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail if that takes absurdly long."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail("the condition never became true")


def test_a_heartbeat_keeps_a_lease_alive_beyond_its_ttl(records: Path) -> None:
    service = LeaseService(FileStore(records), AuditTrail())
    with acquire(service, "main", service.request(ttl=1.0)) as held:
        first = held.lease.last_renewed_at
        wait_for(lambda: held.lease.last_renewed_at > first)
        second = held.lease.last_renewed_at
        wait_for(lambda: held.lease.last_renewed_at > second)
        held.check()
    assert service.state("main") is None


def test_the_holder_of_a_stolen_lease_learns_that_it_is_lost(harness: Harness) -> None:
    service, thief = harness.service("first"), harness.service("thief")
    held = HeldLease(service, service.acquire("main", service.request(ttl=TTL)).lease, clock=harness.clock)
    own = ManualClock()  # by this clock the lease has not expired yet
    held = HeldLease(service, held.lease, clock=own)
    harness.clock.advance(TTL)
    taken = thief.acquire("main", thief.request(ttl=TTL)).lease
    held.check()
    with pytest.raises(LockNotHeld):
        held.renew()
    assert held.lost.is_set()
    with pytest.raises(LockNotHeld):
        held.check()
    held.release()
    state = service.state("main")
    assert state is not None
    assert state.lease == taken


def test_a_holder_that_could_not_renew_in_time_stops_on_its_own(harness: Harness) -> None:
    service = harness.service()
    held = HeldLease(service, service.acquire("main", service.request(ttl=TTL)).lease, clock=harness.clock)
    harness.clock.advance(TTL)
    with pytest.raises(LockExpired):
        held.check()
    assert held.lost.is_set()


def test_a_released_lease_is_not_held(harness: Harness) -> None:
    service = harness.service()
    held = HeldLease(service, service.acquire("main", service.request(ttl=TTL)).lease, clock=harness.clock)
    held.release()
    held.release()
    with pytest.raises(LockNotHeld):
        held.check()


async def _in_a_coroutine(service: LeaseService) -> int:
    async with acquire(service, "main", service.request(ttl=TTL)) as held:
        held.check()
        return held.token


def test_a_coroutine_can_hold_a_lease(records: Path) -> None:
    import asyncio

    service = LeaseService(FileStore(records), AuditTrail())
    assert asyncio.run(_in_a_coroutine(service)) == 1
    assert service.state("main") is None
