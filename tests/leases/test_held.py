"""Held leases and claims are renewed in time; a holder that loses one learns at once, and why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import Clock, ManualClock
from holdfast.errors import Failure, LockExpired, LockNotHeld, LockTimeout
from holdfast.issues.creating import NewIssue
from holdfast.issues.held_claim import HeldIssueClaim
from holdfast.issues.tracker import Tracker
from holdfast.leases import heartbeat
from holdfast.leases.heartbeat import BEATS, JITTER, Held, Subject
from holdfast.leases.service import HeldLease, LeaseService, acquire
from holdfast.ledger.log import Ledger
from holdfast.ledger.service import Claims
from holdfast.locks.file_lock import FileLocker
from holdfast.store.audit import AuditTrail
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

LONG = 3600.0
TTL = 0.6
KINDS = ["lease", "claim", "issue"]


class FakeLease(Held[int]):
    """A fake lease whose record is the number of its renewals."""

    def __init__(self, clock: Clock, ttl: float, problem: BaseException | None = None) -> None:
        super().__init__(Subject("the thing", "renewed", {}), 0, ttl, clock=clock)
        self.fails_with = problem
        self.release_calls = 0

    def _renew(self, ttl: float | None) -> tuple[int, float]:
        if self.fails_with is not None:
            raise self.fails_with
        return self.record + 1, self.ttl if ttl is None else ttl

    def _release(self) -> None:
        self.release_calls += 1


@pytest.fixture
def short_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heartbeats wake often, so that tests need not wait for them."""
    monkeypatch.setattr(heartbeat, "LONGEST_SLEEP", 0.02)


def heartbeat_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("holdfast-")]


def turn(held: FakeLease) -> float | None:
    """Run one turn of the heartbeat, and wait until its renewal has ended."""
    pause = held.turn()
    wait_until(lambda: not any(each.name == "holdfast-renewal" for each in threading.enumerate()))
    return pause


def hold(kind: str, root: Path, ttl: float, *, timeout: float = PATIENCE) -> Held[Any]:
    """Acquire a free lease, claim or issue, on files."""
    store = FileStore(root, timeout=timeout)
    if kind == "lease":
        service = LeaseService(store, AuditTrail())
        return acquire(service, "main", service.request(ttl=ttl))
    if kind == "claim":
        return Claims(Ledger(store)).claim("1", "me", ttl=max(1.0, ttl))
    tracker = Tracker(store, actor="agent:me")
    tracker.initialise()
    issue = tracker.create(NewIssue(title="work"))
    return HeldIssueClaim(tracker.claims, tracker.claims.claim(issue.id, tracker.claims.request(ttl=ttl)).claim)


@contextlib.contextmanager
def guard_taken(root: Path) -> Iterator[None]:
    """Hold the guard of the lease, so that renewals block as on a slow store."""
    with FileLocker(PATIENCE).lock_exclusive(root / ".jvs/guards/worktree-main.lock"):
        yield


# --- Renewal ----------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_shortly_before_each_third_of_its_ttl() -> None:
    clock = ManualClock()
    held = FakeLease(clock, 30.0)
    for beats in range(1, 50):
        clock.advance(30.0 / BEATS * (1 - JITTER) - 0.001)
        turn(held)
        assert held.record == beats - 1
        clock.advance(30.0 / BEATS * JITTER + 0.002)
        turn(held)
        assert held.record == beats
    held.check()


def test_jitter_spreads_renewals_of_leases_acquired_together() -> None:
    clock = ManualClock()
    pauses = set()
    for _ in range(20):
        held = FakeLease(clock, 3.0)
        pause = held.turn()
        assert pause is not None
        assert 1.0 * (1 - JITTER) <= pause <= 1.0
        pauses.add(round(pause, 6))
    assert len(pauses) > 10


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_held_lease_or_claim_outlives_its_ttl_and_ends_with_its_block(kind: str, records: Path) -> None:
    with hold(kind, records, TTL) as held:
        first = held.record
        for _ in range(2 * BEATS):
            before = held.record
            wait_until(lambda before=before: held.record != before)  # type: ignore[misc]
            held.check()
        assert held.record != first
    wait_until(lambda: not heartbeat_threads())
    with pytest.raises(LockNotHeld, match="was released"):
        held.check()
    with pytest.raises(LockNotHeld):
        held.renew()
    held.release()  # releasing twice is fine


def test_a_lease_held_by_a_coroutine_is_renewed_too(records: Path) -> None:
    async def work() -> HeldLease:
        service = LeaseService(FileStore(records), AuditTrail())
        async with acquire(service, "main", service.request(ttl=TTL)) as held:
            first = held.lease
            while held.lease == first:
                await asyncio.sleep(0.01)
            held.check()
        return held

    held = asyncio.run(work())
    with pytest.raises(LockNotHeld):
        held.check()
    assert LeaseService(FileStore(records), AuditTrail()).state("main") is None


# --- Expiry -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_stopped_beyond_its_ttl_learns_of_the_loss_when_it_resumes(kind: str, records: Path) -> None:
    def work(line: Line) -> None:
        with hold(kind, records, TTL) as held:
            line.say(held.ttl)
            held.lost.wait(PATIENCE)
            try:
                held.check()
                line.say("still held")
            except Failure as failure:
                line.say(failure.code)

    with Workers() as workers:
        worker = workers.start(work)
        ttl = worker.hear()
        worker.stop()
        threading.Event().wait(1.2 * ttl)
        assert not worker.line.has_news()
        worker.resume()
        assert worker.hear() in ("E_LOCK_EXPIRED", "E_LOCK_NOT_HELD", "E_FENCING_MISMATCH")


def test_a_machine_that_slept_beyond_the_ttl_learns_of_the_loss_soon_after_waking(short_sleeps: None) -> None:
    clock = ManualClock()
    with FakeLease(clock, LONG) as held:
        clock.advance(LONG)  # the boot clock has advanced, threads and timers have not
        assert held.lost.wait(PATIENCE)
        with pytest.raises(LockExpired, match="the thing was not renewed in time"):
            held.check()


@pytest.mark.parametrize("step", [-LONG, LONG])
def test_setting_the_wall_clock_changes_nothing(step: float) -> None:
    clock = ManualClock()
    held = FakeLease(clock, 30.0)
    clock.step_wall(step)
    held.check()
    clock.advance(30.0 - 0.001)
    held.check()
    clock.advance(0.001)
    with pytest.raises(LockExpired):
        held.check()


def test_a_holder_learns_of_the_expiry_even_if_the_store_does_not_answer(records: Path) -> None:
    held = hold("lease", records, TTL)
    with guard_taken(records):
        held.beat()
        assert held.lost.wait(PATIENCE)  # although a renewal is blocked
        with pytest.raises(LockExpired):
            held.check()
    held.release()


class RenewsInTheHeartbeat(FakeLease):
    """Planted bug: the heartbeat thread itself blocks on the store."""

    asked, answer = threading.Event(), threading.Event()

    def _begin_renewal(self) -> None:
        self._try_to_renew()

    def _renew(self, ttl: float | None) -> tuple[int, float]:
        self.asked.set()
        self.answer.wait(PATIENCE)
        return super()._renew(ttl)


def test_a_heartbeat_that_blocks_on_the_store_would_be_found(short_sleeps: None) -> None:
    clock = ManualClock()
    held = RenewsInTheHeartbeat(clock, 30.0).beat()
    clock.advance(15.0)
    assert held.asked.wait(PATIENCE)
    clock.advance(30.0)
    assert not held.lost.wait(0.3)  # longer than a heartbeat sleeps here
    held.answer.set()
    held.release()


# --- Failures ---------------------------------------------------------------------------------------------


def test_a_renewal_is_retried_until_the_store_is_back(records: Path) -> None:
    with hold("lease", records, 6.0, timeout=0.05) as held:
        with guard_taken(records):
            wait_until(lambda: isinstance(held.problem, LockTimeout))
            held.check()  # not expired yet
        before = held.record
        wait_until(lambda: held.record != before)
        assert held.problem is None
        held.check()


@pytest.mark.parametrize("problem", [LockTimeout("the guard", 1.0, "1s"), ZeroDivisionError("a bug")])
def test_an_expired_lease_reports_why_its_renewal_failed(problem: Exception) -> None:
    clock = ManualClock()
    held = FakeLease(clock, 30.0, problem)
    tries = 0
    while not held.lost.is_set():
        clock.advance(0.5)
        turn(held)
        tries += 1
    assert held.problem is problem
    with pytest.raises(LockExpired, match="the last attempt failed: ") as raised:
        held.check()
    assert raised.value.__cause__ is problem
    assert tries == 60  # not earlier


def test_a_refused_renewal_is_final() -> None:
    clock = ManualClock()
    held = FakeLease(clock, 30.0, LockNotHeld("somebody else has it"))
    clock.advance(15.0)
    turn(held)
    assert held.lost.is_set()
    assert held.turn() is None
    held.fails_with = None
    for _ in range(2):
        with pytest.raises(LockNotHeld, match="somebody else has it"):
            held.check()
        with pytest.raises(LockNotHeld, match="somebody else has it"):
            held.renew()
    assert held.record == 0


def test_a_heartbeat_that_cannot_start_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = FakeLease(ManualClock(), 30.0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError), held:
        pytest.fail("entered without a heartbeat")
    assert held.release_calls == 1


def test_a_renewal_is_retried_if_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clock = ManualClock()
    held = FakeLease(clock, 30.0)
    clock.advance(10.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert held.turn() is not None
    assert isinstance(held.problem, RuntimeError)
    clock.advance(1.0)
    turn(held)
    assert held.record == 1
    assert held.problem is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_released_cannot_be_entered_again(kind: str, records: Path) -> None:
    held = hold(kind, records, LONG)
    with held:
        held.check()
    with pytest.raises(LockNotHeld), held:
        raise AssertionError("the block ran without the lease")

    async def enter() -> None:
        async with held:
            raise AssertionError("the block ran without the lease")

    with pytest.raises(LockNotHeld):
        asyncio.run(enter())


def test_a_lost_lease_cannot_be_entered() -> None:
    clock = ManualClock()
    held = FakeLease(clock, 30.0)
    clock.advance(31.0)
    with pytest.raises(LockExpired), held:
        raise AssertionError("the block ran without the lease")


# --- Forks, threads and signals ---------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_forked_child_holds_nothing_and_releases_nothing(records: Path) -> None:
    with hold("lease", records, TTL) as held:

        def work(line: Line) -> None:
            found: list[object] = [heartbeat_threads()]
            held.beat()
            for call in (held.check, held.renew, held.__enter__):
                try:
                    call()
                    found.append("held")
                except LockNotHeld as failure:
                    found.append("from which this one was forked" in failure.message)
            held.hand_on()
            held.release()
            found.append([each.name for each in heartbeat_threads()])
            line.say(found)

        with Workers() as workers:
            assert workers.start(work).hear() == [[], True, True, True, []]
        before = held.record
        wait_until(lambda: held.record != before)
        held.check()


def test_an_unreferenced_lease_is_not_kept_alive(records: Path) -> None:
    def hold_for_a_while() -> weakref.ref[Held[Any]]:
        held = hold("lease", records, TTL).beat()
        before = held.record
        wait_until(lambda: held.record != before)
        return weakref.ref(held)

    def is_collected() -> bool:
        gc.collect()  # each time: a renewal in progress may have kept it, or a failed one may keep its traceback
        return gone() is None

    gone = hold_for_a_while()
    wait_until(is_collected)
    wait_until(lambda: not heartbeat_threads())
    state = LeaseService(FileStore(records), AuditTrail()).state("main")
    assert state is not None  # not released: it will expire


def test_each_lease_has_one_thread_while_it_is_not_being_renewed() -> None:
    clock = ManualClock()
    with contextlib.ExitStack() as leases:
        for _ in range(8):
            leases.enter_context(FakeLease(clock, LONG))
        assert [each.name for each in heartbeat_threads()] == ["holdfast-heartbeat"] * 8


def test_a_signal_handler_may_release_during_a_renewal() -> None:
    class Interrupted(FakeLease):
        def _renew(self, ttl: float | None) -> tuple[int, float]:
            self.release()  # as a signal handler may
            return super()._renew(ttl)

    held = Interrupted(ManualClock(), 30.0)
    with pytest.raises(LockNotHeld):
        held.renew()
    assert held.release_calls == 1
    assert not held.lost.is_set()


def test_concurrent_renewals_and_a_release_leave_nothing_held() -> None:
    service = LeaseService(MemoryStore(), AuditTrail())
    for _ in range(30):
        held = acquire(service, "main", service.request(ttl=TTL)).beat()
        refused: list[Failure] = []

        def renew(held: HeldLease = held, refused: list[Failure] = refused) -> None:
            try:
                for ttl in (None, 5.0, None, 0.7):
                    held.renew(ttl)
            except LockNotHeld as failure:
                refused.append(failure)

        threads = [threading.Thread(target=renew) for _ in range(3)]
        for thread in threads:
            thread.start()
        held.release()
        for thread in threads:
            thread.join()
        assert service.state("main") is None
        assert not held.lost.is_set()
