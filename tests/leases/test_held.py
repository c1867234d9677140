"""What is held is kept alive in time; who has lost it is told, at once, and why."""

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
from holdfast.issues.claims import HeldIssueClaim
from holdfast.issues.creating import NewIssue
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


class Kept(Held[int]):
    """Something of which only the number of its renewals is of interest."""

    def __init__(self, clock: Clock, ttl: float, problem: BaseException | None = None) -> None:
        super().__init__(Subject("the thing", "renewed", {}), 0, ttl, clock=clock)
        self.fails_with = problem
        self.given_back = 0

    def _renew(self, ttl: float | None) -> tuple[int, float]:
        if self.fails_with is not None:
            raise self.fails_with
        return self.record + 1, self.ttl if ttl is None else ttl

    def _release(self) -> None:
        self.given_back += 1


@pytest.fixture
def wakeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts that look up often, so that nobody has to wait for them."""
    monkeypatch.setattr(heartbeat, "LONGEST_SLEEP", 0.02)


def threads_of_hearts() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("holdfast-")]


def turn(kept: Kept) -> float | None:
    """Let the heart do what is due, and wait until it is done."""
    pause = kept.turn()
    wait_until(lambda: not any(each.name == "holdfast-renewal" for each in threading.enumerate()))
    return pause


def hold(kind: str, root: Path, ttl: float, *, timeout: float = PATIENCE) -> Held[Any]:
    """Something of this kind that nobody had, on files."""
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
    """The guard of the lease is in other hands: whoever needs it waits, as for a store that is slow."""
    with FileLocker(PATIENCE).lock_exclusive(root / ".jvs/guards/worktree-main.lock"):
        yield


# --- In time ----------------------------------------------------------------------------------------------


def test_it_is_renewed_a_little_before_each_third_of_its_time() -> None:
    clock = ManualClock()
    kept = Kept(clock, 30.0)
    for beats in range(1, 50):
        clock.advance(30.0 / BEATS * (1 - JITTER) - 0.001)
        turn(kept)
        assert kept.record == beats - 1
        clock.advance(30.0 / BEATS * JITTER + 0.002)
        turn(kept)
        assert kept.record == beats
    kept.check()


def test_those_who_began_together_do_not_go_on_together() -> None:
    clock = ManualClock()
    pauses = set()
    for _ in range(20):
        kept = Kept(clock, 3.0)
        pause = kept.turn()
        assert pause is not None
        assert 1.0 * (1 - JITTER) <= pause <= 1.0
        pauses.add(round(pause, 6))
    assert len(pauses) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_it_lives_beyond_its_time_and_ends_with_its_block(kind: str, scratch: Path) -> None:
    with hold(kind, scratch, TTL) as held:
        first = held.record
        for _ in range(2 * BEATS):
            before = held.record
            wait_until(lambda before=before: held.record != before)  # type: ignore[misc]
            held.check()
        assert held.record != first
    wait_until(lambda: not threads_of_hearts())
    with pytest.raises(LockNotHeld, match="was released"):
        held.check()
    with pytest.raises(LockNotHeld):
        held.renew()
    held.release()  # twice is fine


def test_a_coroutine_holds_it_in_the_same_way(scratch: Path) -> None:
    async def work() -> HeldLease:
        service = LeaseService(FileStore(scratch), AuditTrail())
        async with acquire(service, "main", service.request(ttl=TTL)) as held:
            first = held.lease
            while held.lease == first:
                await asyncio.sleep(0.01)
            held.check()
        return held

    held = asyncio.run(work())
    with pytest.raises(LockNotHeld):
        held.check()
    assert LeaseService(FileStore(scratch), AuditTrail()).state("main") is None


# --- Too late ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_was_stopped_for_too_long_is_told_when_it_goes_on(kind: str, scratch: Path) -> None:
    def work(line: Line) -> None:
        with hold(kind, scratch, TTL) as held:
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


def test_a_machine_that_slept_for_too_long_is_told_soon_after_it_wakes(wakeful: None) -> None:
    clock = ManualClock()
    with Kept(clock, LONG) as kept:
        clock.advance(LONG)  # the boot clock has gone on, all other threads and timers have not
        assert kept.lost.wait(PATIENCE)
        with pytest.raises(LockExpired, match="the thing was not renewed in time"):
            kept.check()


@pytest.mark.parametrize("step", [-LONG, LONG])
def test_setting_the_wall_clock_changes_nothing(step: float) -> None:
    clock = ManualClock()
    kept = Kept(clock, 30.0)
    clock.step_wall(step)
    kept.check()
    clock.advance(30.0 - 0.001)
    kept.check()
    clock.advance(0.001)
    with pytest.raises(LockExpired):
        kept.check()


def test_a_store_that_does_not_answer_does_not_keep_the_holder_from_being_told(scratch: Path) -> None:
    held = hold("lease", scratch, TTL)
    with guard_taken(scratch):
        held.beat()
        assert held.lost.wait(PATIENCE)  # while a renewal is on its way, and cannot come back
        with pytest.raises(LockExpired):
            held.check()
    held.release()


class RenewsInTheHeart(Kept):
    """A planted fault: the heart itself waits for the store, and for nothing else meanwhile."""

    asked, answer = threading.Event(), threading.Event()

    def _begin_renewal(self) -> None:
        self._try_to_renew()

    def _renew(self, ttl: float | None) -> tuple[int, float]:
        self.asked.set()
        self.answer.wait(PATIENCE)
        return super()._renew(ttl)


def test_a_heart_that_waits_for_the_store_itself_would_be_found(wakeful: None) -> None:
    clock = ManualClock()
    kept = RenewsInTheHeart(clock, 30.0).beat()
    clock.advance(15.0)
    assert kept.asked.wait(PATIENCE)
    clock.advance(30.0)
    assert not kept.lost.wait(0.3)  # longer than any heart sleeps here
    kept.answer.set()
    kept.release()


# --- Problems ---------------------------------------------------------------------------------------------


def test_a_store_that_is_away_for_a_while_is_asked_again_until_it_is_back(scratch: Path) -> None:
    with hold("lease", scratch, 6.0, timeout=0.05) as held:
        with guard_taken(scratch):
            wait_until(lambda: isinstance(held.problem, LockTimeout))
            held.check()  # its time is not up
        before = held.record
        wait_until(lambda: held.record != before)
        assert held.problem is None
        held.check()


@pytest.mark.parametrize("problem", [LockTimeout("the guard", 1.0, "1s"), ZeroDivisionError("a bug")])
def test_what_kept_it_from_being_renewed_is_told_in_the_end(problem: Exception) -> None:
    clock = ManualClock()
    kept = Kept(clock, 30.0, problem)
    tries = 0
    while not kept.lost.is_set():
        clock.advance(0.5)
        turn(kept)
        tries += 1
    assert kept.problem is problem
    with pytest.raises(LockExpired, match="the last attempt failed: ") as raised:
        kept.check()
    assert raised.value.__cause__ is problem
    assert tries == 60  # not earlier


def test_a_renewal_that_was_refused_is_not_tried_again_and_says_so_for_ever() -> None:
    clock = ManualClock()
    kept = Kept(clock, 30.0, LockNotHeld("somebody else has it"))
    clock.advance(15.0)
    turn(kept)
    assert kept.lost.is_set()
    assert kept.turn() is None
    kept.fails_with = None
    for _ in range(2):
        with pytest.raises(LockNotHeld, match="somebody else has it"):
            kept.check()
        with pytest.raises(LockNotHeld, match="somebody else has it"):
            kept.renew()
    assert kept.record == 0


def test_a_heart_that_cannot_be_started_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kept = Kept(ManualClock(), 30.0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError), kept:
        pytest.fail("entered without a heart")
    assert kept.given_back == 1


def test_where_no_thread_can_be_had_for_a_renewal_another_attempt_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clock = ManualClock()
    kept = Kept(clock, 30.0)
    clock.advance(10.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert kept.turn() is not None
    assert isinstance(kept.problem, RuntimeError)
    clock.advance(1.0)
    turn(kept)
    assert kept.record == 1
    assert kept.problem is None


# --- Others -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_forked_child_holds_nothing_and_releases_nothing(scratch: Path) -> None:
    with hold("lease", scratch, TTL) as held:

        def work(line: Line) -> None:
            found: list[object] = [threads_of_hearts()]
            held.beat()
            for call in (held.check, held.renew):
                try:
                    call()
                    found.append("held")
                except LockNotHeld as failure:
                    found.append("from which this one was forked" in failure.message)
            held.hand_on()
            with held:
                held.release()
            found.append([each.name for each in threads_of_hearts()])
            line.say(found)

        with Workers() as workers:
            assert workers.start(work).hear() == [[], True, True, []]
        before = held.record
        wait_until(lambda: held.record != before)
        held.check()


def test_what_nobody_has_any_more_is_not_kept_alive(scratch: Path) -> None:
    def hold_for_a_while() -> weakref.ref[Held[Any]]:
        held = hold("lease", scratch, TTL).beat()
        before = held.record
        wait_until(lambda: held.record != before)
        return weakref.ref(held)

    gone = hold_for_a_while()
    gc.collect()
    wait_until(lambda: gone() is None)
    wait_until(lambda: not threads_of_hearts())
    state = LeaseService(FileStore(scratch), AuditTrail()).state("main")
    assert state is not None  # it was not released: its time ends it


def test_each_thing_has_one_thread_and_a_second_one_only_while_it_is_renew() -> None:
    clock = ManualClock()
    with contextlib.ExitStack() as all_of_them:
        for _ in range(8):
            all_of_them.enter_context(Kept(clock, LONG))
        assert [each.name for each in threads_of_hearts()] == ["holdfast-heartbeat"] * 8


def test_who_is_told_to_release_in_the_middle_of_renewing_can() -> None:
    class Interrupted(Kept):
        def _renew(self, ttl: float | None) -> tuple[int, float]:
            self.release()  # as the handler of a signal may
            return super()._renew(ttl)

    kept = Interrupted(ManualClock(), 30.0)
    with pytest.raises(LockNotHeld):
        kept.renew()
    assert kept.given_back == 1
    assert not kept.lost.is_set()


def test_renewing_at_once_from_many_threads_and_releasing_leaves_nothing_held() -> None:
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
