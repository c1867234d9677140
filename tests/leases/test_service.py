"""Leases asked for at the service, on a store in memory and on files, with a clock that tests move."""

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


class Office:
    """A store, its clock and its services: one for each holder."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.trail = AuditTrail()

    def service(self, name: str = "") -> LeaseService:
        holder = Holder("elsewhere", name, 7, "1", "boot", "machine", "namespace") if name else None
        return LeaseService(self.store, self.trail, holder=holder, clock=self.clock)

    def events(self) -> list[str]:
        return [entry.event for entry in verify(self.store.entries(self.trail.stream))]

    def validate(self, lock_id: str, token: int) -> None:
        validate = self.service().validator("main", lock_id, token)

        def decide(view: View, now: float) -> Decision[None]:
            validate(view, now)
            return Decision([], None)

        self.store.transact(LeaseKeys.of("main").all(), decide)


@pytest.fixture(params=["memory", "files"])
def office(request: pytest.FixtureRequest, scratch: Path) -> Office:
    clock = ManualClock()
    store: Store = MemoryStore(clock=clock) if request.param == "memory" else FileStore(scratch, clock=clock)
    return Office(store, clock)


def test_a_free_lease_is_given_with_everything_that_its_record_must_have(office: Office) -> None:
    service = office.service()
    lease = service.acquire("main", service.request(ttl=TTL, purpose="tests")).lease
    assert lease.worktree_id == "main"
    assert lease.holder_id.count(":") == 3
    assert lease.fencing_token == 1
    assert lease.purpose == "tests"
    assert lease.created_at == lease.last_renewed_at < lease.lease_expires_at
    assert office.events() == ["lock_acquired"]


def test_a_held_lease_is_refused_naming_the_holder_and_the_time_left(office: Office) -> None:
    service, other = office.service(), office.service("other")
    held = service.acquire("main", service.request(ttl=TTL, purpose="long work")).lease
    office.clock.advance(10)
    with pytest.raises(LockConflict, match="long work; leased 10s ago, expires in 20s") as refused:
        other.acquire("main", other.request())
    assert refused.value.facts["holder_id"] == held.holder_id
    assert refused.value.facts["time_left"] == pytest.approx(20)
    assert refused.value.facts["liveness"] == Liveness.ALIVE.value


def test_an_expired_lease_is_taken_over_by_the_steal_flow_with_a_greater_token(office: Office) -> None:
    service, thief = office.service("first"), office.service("thief")
    old = service.acquire("main", service.request(ttl=TTL)).lease
    office.clock.advance(TTL)
    granted = thief.acquire("main", thief.request(ttl=TTL))
    assert granted.stolen_from == old
    assert granted.lease.fencing_token == old.fencing_token + 1
    assert office.events() == ["lock_acquired", "lock_stolen"]
    last = list(office.store.entries(office.trail.stream))[-1].record.facts
    assert last["old"] != last["new"]
    assert last["expired_at"] == old.lease_expires_at


def test_a_lease_that_has_not_expired_cannot_be_stolen(office: Office) -> None:
    service, thief = office.service("first"), office.service("thief")
    service.acquire("main", service.request(ttl=TTL))
    with pytest.raises(LockConflict):
        thief.steal("main", thief.request())
    with pytest.raises(LockNotHeld, match="nothing to steal"):
        thief.steal("free", thief.request())


def test_only_the_holder_renews_and_only_in_time(office: Office) -> None:
    service, other = office.service("first"), office.service("other")
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    office.clock.advance(TTL - 1)
    renewed = service.renew("main", lease.lock_id)
    assert renewed.expiry() == pytest.approx(office.clock.wall() + TTL)
    assert renewed.last_renewed_at > lease.last_renewed_at
    with pytest.raises(LockNotHeld):
        other.renew("main", "another-id")
    office.clock.advance(TTL)
    with pytest.raises(LockExpired):
        service.renew("main", lease.lock_id)


def test_only_the_holder_releases_and_a_stranger_touches_nothing(office: Office) -> None:
    service = office.service()
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


def test_tokens_grow_over_release_and_steal_and_never_start_again(office: Office) -> None:
    service = office.service()
    tokens: list[int] = []
    for step in range(6):
        lease = service.acquire("main", service.request(ttl=TTL)).lease
        tokens.append(lease.fencing_token)
        if step % 2:
            office.clock.advance(TTL)
        else:
            service.release("main", lease.lock_id)
    assert tokens == [1, 2, 3, 4, 5, 6]


def test_a_stale_token_is_fenced_out(office: Office) -> None:
    service, thief = office.service("first"), office.service("thief")
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    office.validate(lease.lock_id, lease.fencing_token)
    with pytest.raises(FencingMismatch):
        office.validate(lease.lock_id, lease.fencing_token + 1)
    office.clock.advance(TTL)
    with pytest.raises(LockExpired):
        office.validate(lease.lock_id, lease.fencing_token)
    thief.acquire("main", thief.request(ttl=TTL))
    with pytest.raises(FencingMismatch) as refused:
        office.validate(lease.lock_id, lease.fencing_token)
    assert refused.value.facts["current_token"] == 2


def test_who_waits_is_served_by_priority_and_then_in_the_order_of_asking(office: Office) -> None:
    service = office.service("first")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    waiting = {}
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("c", 0)):
        each = office.service(name)
        waiting[name] = (each, each.request(ttl=TTL, priority=priority))
        assert isinstance(each.join_queue("main", waiting[name][1]), rules.LeaseWaiting)
    service.release("main", held.lock_id)
    passer_by = office.service("passer-by")
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


def test_a_waiter_that_no_longer_shows_itself_is_passed(office: Office) -> None:
    service, silent, patient = office.service("first"), office.service("silent"), office.service("patient")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    silent.join_queue("main", silent.request(ttl=TTL))
    office.clock.advance(1)
    request = patient.request(ttl=TTL)
    for _ in range(8):
        answer = patient.join_queue("main", request)
        assert isinstance(answer, rules.LeaseWaiting)
        office.clock.advance(rules.WAITER_HEARTBEAT)
        service.renew("main", held.lock_id)
    service.release("main", held.lock_id)
    assert isinstance(patient.join_queue("main", request), rules.LeaseGranted)


def test_a_waiter_whose_process_is_dead_is_passed_at_once(office: Office) -> None:
    here = office.service().holder
    dead = here._replace(pid=2**22 + 7, start_time="1")
    gone = LeaseService(office.store, office.trail, holder=dead, clock=office.clock)
    service, patient = office.service("first"), office.service("patient")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    gone.join_queue("main", gone.request(ttl=TTL))
    service.release("main", held.lock_id)
    assert isinstance(patient.join_queue("main", patient.request(ttl=TTL)), rules.LeaseGranted)


def test_who_leaves_the_line_is_not_waited_for(office: Office) -> None:
    service, impatient = office.service("first"), office.service("impatient")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    with pytest.raises(LockTimeout, match="held by"):
        acquire(impatient, "main", impatient.request(ttl=TTL), wait=0.01)
    service.release("main", held.lock_id)
    assert office.store.read(LeaseKeys.of("main").queue) is None
    service.acquire("main", service.request(ttl=TTL))


def test_a_clock_that_was_set_back_does_not_let_anybody_pass_the_line(office: Office) -> None:
    service, first, second = office.service("holder"), office.service("first"), office.service("second")
    held = service.acquire("main", service.request(ttl=TTL)).lease
    early = first.request(ttl=TTL)
    first.join_queue("main", early)
    office.clock.step_wall(-10)
    late = second.request(ttl=TTL)
    answer = second.join_queue("main", late)
    assert isinstance(answer, rules.LeaseWaiting)
    assert answer.position == 2
    service.release("main", held.lock_id)
    assert isinstance(second.join_queue("main", late), rules.LeaseWaiting)
    assert isinstance(first.join_queue("main", early), rules.LeaseGranted)


def test_a_precondition_can_refuse_a_grant_and_nothing_is_changed(office: Office) -> None:
    def refuse(view: View, worktree: str) -> None:
        raise NotFound(f"there is no worktree {worktree}")

    service = LeaseService(office.store, office.trail, precondition=refuse)
    with pytest.raises(NotFound):
        service.acquire("main", service.request())
    assert office.events() == []


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_ttl_that_makes_no_sense_is_refused(office: Office, ttl: float) -> None:
    with pytest.raises(SettingInvalid):
        office.service().request(ttl=ttl)


# --- Holding one ------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; fail if that takes absurdly long."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail("it never came")


def test_a_heartbeat_keeps_a_lease_alive_beyond_its_ttl(scratch: Path) -> None:
    service = LeaseService(FileStore(scratch), AuditTrail())
    with acquire(service, "main", service.request(ttl=0.3)) as held:
        first = held.lease.last_renewed_at
        wait_for(lambda: held.lease.last_renewed_at > first)
        second = held.lease.last_renewed_at
        wait_for(lambda: held.lease.last_renewed_at > second)
        held.check()
    assert service.state("main") is None


def test_a_lease_that_was_stolen_is_lost_to_its_holder(office: Office) -> None:
    service, thief = office.service("first"), office.service("thief")
    held = HeldLease(service, service.acquire("main", service.request(ttl=TTL)).lease, clock=office.clock)
    own = ManualClock()  # by which it has not expired yet
    held = HeldLease(service, held.lease, clock=own)
    office.clock.advance(TTL)
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


def test_a_holder_that_could_not_renew_in_time_stops_by_itself(office: Office) -> None:
    service = office.service()
    held = HeldLease(service, service.acquire("main", service.request(ttl=TTL)).lease, clock=office.clock)
    office.clock.advance(TTL)
    with pytest.raises(LockExpired):
        held.check()
    assert held.lost.is_set()


def test_a_released_lease_is_not_held(office: Office) -> None:
    service = office.service()
    held = HeldLease(service, service.acquire("main", service.request(ttl=TTL)).lease, clock=office.clock)
    held.release()
    held.release()
    with pytest.raises(LockNotHeld):
        held.check()


async def _in_a_coroutine(service: LeaseService) -> int:
    async with acquire(service, "main", service.request(ttl=TTL)) as held:
        held.check()
        return held.token


def test_a_coroutine_can_hold_a_lease(scratch: Path) -> None:
    import asyncio

    service = LeaseService(FileStore(scratch), AuditTrail())
    assert asyncio.run(_in_a_coroutine(service)) == 1
    assert service.state("main") is None
