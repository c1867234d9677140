"""The write lock of a ledger: its file, waiting, release, recovery and breaking."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import ManualClock, format_instant, parse_instant
from holdfast.errors import JsonInvalid, LockChanged, LockNotHeld, LockReentry, LockTimeout, NotFound, TooLarge
from holdfast.locks.identity import Holder, Liveness, current_holder
from holdfast.locks.ledger_lock import (
    DEFAULT_TIMEOUT,
    POLL_INTERVAL,
    SUSPECT_AFTER,
    HeldLedgerLock,
    LedgerLock,
    LedgerLockState,
)
from tests.locks.race_rounds import pause
from tests.locks.workers import Line, Workers

NOW = 1_700_000_000.0

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
needs_modes = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    (tmp_path / "ledger").mkdir()
    return tmp_path / "ledger"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=NOW)


class FakeTime:
    """A stand-in for the module `time`, in which time passes only during a sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("holdfast.locks.ledger_lock.time", fake)
    return fake


def at_once(ledger: Path, clock: ManualClock | None = None, *, alive: Liveness | None = None) -> LedgerLock:
    """A lock that tries only once."""
    lock = LedgerLock(ledger, "agent-late", timeout=0.0)
    if clock is not None:
        lock._clock = clock
    if alive is not None:
        lock._liveness_check = lambda _: alive
    return lock


def put(ledger: Path, content: str, *, age: float = 0.0) -> Path:
    """Write a lock as another program would, `age` seconds before NOW."""
    path = ledger / "ledger.lock"
    path.write_text(content)
    os.utime(path, (NOW - age, NOW - age))
    return path


def foreign(*, age: float = 0.0) -> str:
    """The record of another program, without a holder identity."""
    return json.dumps({"agent_id": "agent-foreign", "acquired_at": format_instant(NOW - age)})


def seen(lock: LedgerLock) -> LedgerLockState:
    """The state of the lock, which must be held."""
    state = lock.state()
    assert state is not None
    return state


def acquired_by_another_thread(lock: LedgerLock) -> HeldLedgerLock:
    held: list[HeldLedgerLock] = []
    thread = threading.Thread(target=lambda: held.append(lock.acquire()))
    thread.start()
    thread.join()
    return held[0]


def refusal(lock: LedgerLock) -> LockTimeout:
    """The failure with which `lock` is refused."""
    with pytest.raises(LockTimeout) as refused:
        lock.acquire()
    return refused.value


# --- The file -------------------------------------------------------------------------------------------


@pytest.mark.req("LG-01")
def test_the_lock_is_the_file_ledger_lock_with_agent_and_time(ledger: Path, clock: ManualClock) -> None:
    held = LedgerLock(ledger, "agent-7", clock=clock).acquire()
    said = json.loads((ledger / "ledger.lock").read_bytes())
    assert (said["agent_id"], parse_instant(said["acquired_at"])) == ("agent-7", NOW)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", said["acquired_at"]), "not RFC 3339 in UTC"
    assert (said["lock_id"], Holder.from_record(said)) == (held.lock_id, current_holder())


@needs_modes
@pytest.mark.req("LG-01")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_mode_is_0600_whatever_the_umask(ledger: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with LedgerLock(ledger, "agent-7").acquire():
            assert stat.S_IMODE((ledger / "ledger.lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("agent_id", ["x" * 70_000, "\ud800"])
def test_an_agent_id_that_could_not_be_read_back_is_refused_and_nothing_stays_locked(
    ledger: Path, agent_id: str
) -> None:
    with pytest.raises((TooLarge, JsonInvalid)):
        LedgerLock(ledger, agent_id).acquire()
    at_once(ledger).acquire().release()


def test_a_missing_ledger_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        LedgerLock(tmp_path / "nowhere", "agent-7").acquire()
    assert os.listdir(tmp_path) == []


# --- Waiting --------------------------------------------------------------------------------------------


@pytest.mark.req("LG-02")
def test_the_constants_are_those_of_the_protocol(ledger: Path) -> None:
    assert (DEFAULT_TIMEOUT, POLL_INTERVAL, SUSPECT_AFTER) == (5.0, 0.01, 30.0)
    assert LedgerLock(ledger, "agent-7").timeout == DEFAULT_TIMEOUT


@pytest.mark.req("LG-02")
def test_a_waiter_polls_every_10_ms_for_5_s(ledger: Path, fake_time: FakeTime) -> None:
    put(ledger, foreign())
    refusal(LedgerLock(ledger, "agent-7"))
    assert set(fake_time.sleeps) == {0.01}
    assert sum(fake_time.sleeps) == pytest.approx(5.0, abs=0.011)


@pytest.mark.req("LG-02")
def test_a_waiter_gets_the_lock_at_the_first_poll_after_it_is_free(
    ledger: Path, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(ledger, foreign())

    def sleep(seconds: float) -> None:
        fake_time.sleeps.append(seconds)
        if len(fake_time.sleeps) == 3:
            path.unlink()

    monkeypatch.setattr(fake_time, "sleep", sleep)
    LedgerLock(ledger, "agent-7").acquire()
    assert fake_time.sleeps == [0.01] * 3


@pytest.mark.req("LG-02")
def test_a_timeout_of_0_tries_once(ledger: Path, fake_time: FakeTime) -> None:
    at_once(ledger).acquire().release()
    put(ledger, foreign())
    refusal(at_once(ledger))
    assert fake_time.sleeps == []


@pytest.mark.req("LG-02")
def test_a_timeout_names_the_holder_and_how_long_it_has_held_the_lock(ledger: Path, clock: ManualClock) -> None:
    held = acquired_by_another_thread(LedgerLock(ledger, "agent-7", clock=clock))
    clock.advance(12)
    failure = refusal(at_once(ledger, clock))
    assert "timeout waiting for lock" in failure.message
    assert "agent-7 for 12s (holder alive" in failure.message
    assert failure.path == str(ledger / "ledger.lock")
    (holder,) = failure.holders
    assert (holder["agent_id"], holder["age"], holder["liveness"], holder["suspect"]) == (
        "agent-7",
        12.0,
        "alive",
        False,
    )
    assert json.loads(json.dumps(failure.as_record()))["code"] == "E_LOCK_TIMEOUT"
    assert held.release()


def test_a_refused_waiter_does_not_block_others(ledger: Path) -> None:
    path = put(ledger, foreign())
    failure = refusal(at_once(ledger))  # kept, with the frames of its traceback and all that they refer to
    path.unlink()
    at_once(ledger).acquire().release()
    assert failure.__traceback__ is not None


def test_reentry_by_the_holding_thread_is_refused_at_once(ledger: Path) -> None:
    lock = LedgerLock(ledger, "agent-7")
    with lock.acquire(), pytest.raises(LockReentry, match=r"ledger\.lock is already held by this thread"):
        lock.acquire()
    lock.acquire().release()


@pytest.mark.req("LG-02")
def test_threads_of_one_process_exclude_each_other(ledger: Path) -> None:
    lock = LedgerLock(ledger, "agent-7", timeout=60)
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with lock.acquire():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(most), max(most)) == (80, 1)


@pytest.mark.req("LG-02")
@pytest.mark.parametrize("content", ["", "garbage", "{}", "[]", '{"agent_id": 7}', '{"acquired_at": "yesterday"}'])
def test_a_lock_file_with_any_content_counts_as_held(ledger: Path, clock: ManualClock, content: str) -> None:
    """Another program creates the file before it writes: for a moment its lock is empty."""
    path = put(ledger, content, age=12)
    failure = refusal(at_once(ledger, clock))
    assert "a holder without a name for 12s (holder unknown" in failure.message
    assert path.read_text() == content


@pytest.mark.req("LG-02")
@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs a privilege on Windows")
def test_a_dangling_symbolic_link_counts_as_held_as_it_does_for_o_excl(ledger: Path) -> None:
    (ledger / "ledger.lock").symlink_to("nowhere")
    refusal(at_once(ledger))
    assert not (ledger / "nowhere").exists()


def contents_seen_by_readers(ledger: Path, workers: Workers, hold_briefly: Callable[[], object]) -> set[str]:
    """The contents of the lock file that two processes see by reading it constantly while it is in use."""

    def read(line: Line) -> None:
        found: list[str] = []
        while not line.has_news():
            with contextlib.suppress(FileNotFoundError):
                found.append((ledger / "ledger.lock").read_text())
            if len(found) == 300:
                line.say(found)

    readers = workers.start_many(2, read)
    while not all(each.line.has_news() for each in readers):
        hold_briefly()
    return {text for each in readers for text in each.hear()}


@needs_fork
@pytest.mark.req("LG-02")
def test_no_reader_ever_sees_an_empty_or_partial_record(ledger: Path, workers: Workers) -> None:
    lock = LedgerLock(ledger, "agent-7")
    found = contents_seen_by_readers(ledger, workers, lambda: lock.acquire().release())
    assert {json.loads(text)["agent_id"] for text in found} == {"agent-7"}


@needs_fork
def test_a_lock_that_is_created_before_it_is_written_is_seen_empty(ledger: Path, workers: Workers) -> None:
    def create_then_write() -> None:
        with (ledger / "ledger.lock").open("x") as file:
            pause()
            file.write(foreign())
        (ledger / "ledger.lock").unlink()

    assert "" in contents_seen_by_readers(ledger, workers, create_then_write)


# --- A directory as the lock ----------------------------------------------------------------------------


@pytest.mark.req("LG-03")
@pytest.mark.parametrize("age", [0.0, 31.0, 1e6])
def test_a_directory_counts_as_held_at_any_age(ledger: Path, clock: ManualClock, age: float) -> None:
    path = ledger / "ledger.lock"
    path.mkdir()
    os.utime(path, (NOW - age, NOW - age))
    failure = refusal(at_once(ledger, clock))
    assert "held by a shell tool for" in failure.message
    assert path.is_dir()


@pytest.mark.req("LG-03")
def test_a_directory_can_be_broken_by_its_identity(ledger: Path) -> None:
    (ledger / "ledger.lock").mkdir()
    lock = at_once(ledger)
    lock.break_lock(seen(lock).identity)
    lock.acquire().release()


# --- Releasing ------------------------------------------------------------------------------------------


@pytest.mark.req("LG-04")
def test_releasing_removes_the_file_and_can_be_repeated(ledger: Path) -> None:
    held = LedgerLock(ledger, "agent-7").acquire()
    assert held.release()
    assert not (ledger / "ledger.lock").exists()
    held.release()


@pytest.mark.req("LG-04")
def test_a_with_block_releases_the_lock(ledger: Path) -> None:
    with LedgerLock(ledger, "agent-7").acquire():
        assert (ledger / "ledger.lock").exists()
    assert not (ledger / "ledger.lock").exists()


@pytest.mark.req("LG-04")
@pytest.mark.parametrize("content", ["", "garbage", "{}", foreign(), '{"lock_id": "another"}'])
def test_a_lock_that_is_not_ours_is_not_removed(ledger: Path, content: str) -> None:
    held = LedgerLock(ledger, "agent-7").acquire()
    path = put(ledger, content)
    assert not held.release()
    assert path.read_text() == content


@pytest.mark.req("LG-04")
@pytest.mark.parametrize("what", ["the file", "the ledger"])
def test_releasing_a_lock_that_is_gone_returns_false(ledger: Path, what: str) -> None:
    held = LedgerLock(ledger, "agent-7").acquire()
    if what == "the file":
        (ledger / "ledger.lock").unlink()
    else:
        shutil.rmtree(ledger)
    assert not held.release()


@pytest.mark.req("LG-04")
def test_a_second_release_leaves_the_next_holder_alone(ledger: Path) -> None:
    first = LedgerLock(ledger, "agent-7").acquire()
    first.release()
    with LedgerLock(ledger, "agent-8").acquire():
        first.release()
        assert json.loads((ledger / "ledger.lock").read_bytes())["agent_id"] == "agent-8"


@needs_fork
@pytest.mark.req("LG-04")
def test_a_forked_child_cannot_release_the_lock(ledger: Path, workers: Workers) -> None:
    held = LedgerLock(ledger, "agent-7").acquire()
    before = (ledger / "ledger.lock").read_bytes()
    assert workers.start(lambda line: line.say(held.release())).hear()
    assert (ledger / "ledger.lock").read_bytes() == before
    assert held.release()


# --- Recovery and breaking ------------------------------------------------------------------------------


@pytest.mark.req("LG-05")
def test_the_lock_of_a_holder_that_is_certainly_dead_is_recovered_at_once(ledger: Path) -> None:
    acquired_by_another_thread(LedgerLock(ledger, "agent-gone"))._turn = None
    with at_once(ledger, alive=Liveness.DEAD).acquire():
        assert json.loads((ledger / "ledger.lock").read_bytes())["agent_id"] == "agent-late"


@pytest.mark.req("LG-05")
@pytest.mark.parametrize("alive", [Liveness.ALIVE, Liveness.UNKNOWN])
@pytest.mark.parametrize("age", [0.0, 31.0, 1e7])
def test_the_lock_of_a_holder_that_may_be_alive_is_not_recovered_at_any_age(
    ledger: Path, clock: ManualClock, alive: Liveness, age: float
) -> None:
    held = acquired_by_another_thread(LedgerLock(ledger, "agent-7", clock=clock))
    clock.advance(age)
    refusal(at_once(ledger, clock, alive=alive))
    assert held.release()


@pytest.mark.req("LG-05")
@pytest.mark.parametrize("age", [30.0, 30.5, 31.0, 1e7])
def test_an_old_lock_of_another_program_is_reported_with_its_identity_and_left_alone(
    ledger: Path, clock: ManualClock, age: float
) -> None:
    path = put(ledger, foreign(age=age))
    state = seen(at_once(ledger, clock))
    failure = refusal(at_once(ledger, clock, alive=Liveness.DEAD))
    assert state.suspect == (age > 30)
    assert (state.identity in failure.hint) == state.suspect
    assert "agent-foreign for " in failure.message
    assert path.read_text() == foreign(age=age)


@pytest.mark.req("LG-05")
def test_the_age_is_that_of_the_file_if_the_record_does_not_say(ledger: Path, clock: ManualClock) -> None:
    put(ledger, "", age=31)
    state = seen(at_once(ledger, clock))
    assert (state.age, state.suspect, state.liveness) == (31.0, True, Liveness.UNKNOWN)


@pytest.mark.req("LG-05")
def test_breaking_a_lock_requires_its_exact_identity(ledger: Path, clock: ManualClock) -> None:
    path = put(ledger, foreign(age=31))
    lock = at_once(ledger, clock)
    identity = seen(lock).identity
    for wrong in ("", identity[:-1], identity + "0", "*"):
        with pytest.raises(LockChanged):
            lock.break_lock(wrong)
    assert path.exists()
    lock.break_lock(identity)
    assert not path.exists()
    lock.acquire().release()


@pytest.mark.req("LG-05")
def test_the_identity_of_an_earlier_lock_does_not_break_the_next_one(ledger: Path) -> None:
    lock = at_once(ledger)
    held = lock.acquire()
    identity = seen(lock).identity
    held.release()
    with lock.acquire(), pytest.raises(LockChanged):
        lock.break_lock(identity)


@pytest.mark.req("LG-04", "LG-05")
def test_a_holder_whose_lock_was_broken_does_not_release_its_successors_lock(ledger: Path) -> None:
    lock = LedgerLock(ledger, "agent-7")
    broken = lock.acquire()
    lock.break_lock(seen(lock).identity)
    assert lock.state() is None
    successor = acquired_by_another_thread(LedgerLock(ledger, "agent-8"))
    assert not broken.release()
    assert seen(lock).agent_id == "agent-8"
    assert successor.release()


def test_the_state_of_a_free_ledger_is_none_and_reading_it_creates_nothing(ledger: Path) -> None:
    assert LedgerLock(ledger, "agent-7").state() is None
    assert os.listdir(ledger) == []


def test_a_released_ledger_lock_cannot_be_entered_again(ledger: Path) -> None:
    with LedgerLock(ledger, "me").acquire() as held:
        pass
    with pytest.raises(LockNotHeld), held:
        raise AssertionError("the block ran without the lock")
