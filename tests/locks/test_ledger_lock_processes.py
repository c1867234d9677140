"""The write lock of a ledger between our own processes: contention, kills, stops and wrong breaks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, LockTimeout
from holdfast.fs import durable
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.identity import Liveness
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.lock_file import EncodedRecord
from proof.effort import rounds
from tests.locks.ledger_locks import (
    count_up,
    hold,
    is_held,
    is_waiting,
    observer,
    seen,
    start_holder,
    waiting_lock,
)
from tests.locks.race_rounds import pause
from tests.locks.workers import Line, Workers, stop_myself, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")


@pytest.fixture
def ledger(scratch: Path) -> Path:
    (scratch / "ledger").mkdir()
    return scratch / "ledger"


# --- Contention ------------------------------------------------------------------------------------------


def count_together(ledger: Path, workers: Workers, lock: Callable[[], AbstractContextManager[object]]) -> list[int]:
    """Let eight processes count to 2000 under a lock; returns the number of increments of each, sorted."""
    total, counter = 2000, ledger / "counter"
    counter.write_text("00000000\n")

    def task(line: Line) -> None:
        own = 0
        line.wait()
        while True:
            with lock():
                if int(counter.read_text()) >= total:
                    break
                count_up(counter)
                own += 1
        line.say(own)

    running = workers.start_many(8, task)
    for each in running:
        each.say("go")
    return sorted(each.hear() for each in running)


@pytest.mark.req("LG-02")
def test_eight_processes_exclude_each_other_and_none_starves(
    ledger: Path, workers: Workers, record_property: Callable[[str, object], None]
) -> None:
    lock = waiting_lock(ledger)
    shares = count_together(ledger, workers, lock.acquire)
    record_property("shares", shares)
    assert sum(shares) == 2000, "an increment was lost"
    assert shares[0] >= 2000 / 8 / 4, f"a process starved: {shares}"


def test_counting_without_a_lock_loses_increments(ledger: Path, workers: Workers) -> None:
    assert sum(count_together(ledger, workers, contextlib.nullcontext)) > 2000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the waiters of a lock")
def test_a_holder_that_comes_back_queues_behind_the_waiters(ledger: Path, workers: Workers) -> None:
    """Repeated, because a running process has an advantage over one that must first be woken."""
    diary = ledger / "diary"
    diary.touch()

    def write(name: str) -> None:
        with diary.open("a") as file:
            file.write(f"{name} ")

    def wait(line: Line) -> None:
        while True:
            line.wait()
            with waiting_lock(ledger).acquire():
                write("waiter")

    waiter, lock, held = workers.start(wait), waiting_lock(ledger), waiting_lock(ledger).acquire()
    for _ in range(20):
        waiter.say("come")
        wait_until(lambda: is_waiting(waiter, ledger))
        held.release()
        held = lock.acquire()
        write("again")
    held.release()
    assert diary.read_text() == "waiter again " * 20


# --- Kills -----------------------------------------------------------------------------------------------


@pytest.mark.req("LG-05")
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_the_lock_of_a_killed_process_is_recovered_at_once(ledger: Path, workers: Workers, reaped: bool) -> None:
    holder = start_holder(workers, ledger)
    assert is_held(ledger)
    holder.kill()
    if reaped:
        holder.wait()
    wait_until(lambda: not is_held(ledger))


@pytest.mark.req("LG-05")
def test_a_waiter_in_the_queue_takes_over_from_a_killed_holder(ledger: Path, workers: Workers) -> None:
    holder = start_holder(workers, ledger)
    waiter = workers.start(hold(ledger, "agent-next"))
    holder.kill()
    assert waiter.hear() == "held"
    assert waiter.ask("release") is True


def recover_together(ledger: Path, workers: Workers, lock: LedgerLock, *, rounds: int) -> list[str]:
    """Let eight processes recover a dead holder's lock in each round; returns the problems of the first bad round."""
    path = ledger / "ledger.lock"
    holder = start_holder(workers, ledger)
    holder.kill()
    holder.wait()
    left = path.read_bytes()
    gate, opener = os.pipe()

    def task(line: Line) -> None:
        while True:
            line.wait()
            os.read(gate, 1)
            try:
                held = lock.acquire()
            except LockTimeout:
                line.say(None)
            else:
                line.say(held.lock_id)
                line.wait()
                line.say(held.release())

    heirs = workers.start_many(8, task)
    problems: list[str] = []
    for _ in range(rounds):
        path.write_bytes(left)
        for each in heirs:
            each.say("to the gate")
        os.write(opener, b"." * len(heirs))
        answers = {each: each.hear() for each in heirs}
        winners = [each for each, lock_id in answers.items() if lock_id]
        there = json.loads(path.read_bytes())["lock_id"] if path.exists() else None
        if [answers[each] for each in winners] != [there]:
            problems.append(f"{len(winners)} processes hold the lock, and its ID is {there}")
        released = [each.ask("release") for each in winners]
        if not all(released) or path.exists():
            problems.append("a holder could not release its own lock")
        if problems:
            break
    os.close(gate)
    os.close(opener)
    return problems


class RecoversByPath(LedgerLock):
    """Planted bug: the lock is judged, removed by path, and created again."""

    def _recover(self, record: EncodedRecord) -> bool:
        state = self.state()
        if state is None or state.liveness is not Liveness.DEAD:
            return False
        pause()
        self.path.unlink(missing_ok=True)
        return self._file.create(record, synced=False)


@pytest.mark.req("LG-05")
def test_exactly_one_of_eight_processes_recovers_the_lock_of_a_killed_one(ledger: Path, workers: Workers) -> None:
    """With a timeout of 0 none of them queues: they all try at once."""
    lock = LedgerLock(ledger, "agent-heir", timeout=0.0)
    assert recover_together(ledger, workers, lock, rounds=rounds(150, least=20)) == []


def test_a_recovery_by_path_that_gives_two_holders_is_noticed(ledger: Path, workers: Workers) -> None:
    lock = RecoversByPath(ledger, "agent-heir", timeout=0.0)
    assert recover_together(ledger, workers, lock, rounds=300) != []


@pytest.mark.req("LG-05")
def test_a_process_stopped_during_recovery_keeps_no_other_past_its_timeout(ledger: Path, workers: Workers) -> None:
    holder = start_holder(workers, ledger)
    holder.kill()
    holder.wait()

    def recover(line: Line) -> None:
        guard = FileLocker().lock_exclusive(ledger / ".ledger.lock.guard")
        line.say("in")
        line.wait()
        guard.release()

    stopped = workers.start(recover)
    assert stopped.hear() == "in"
    stopped.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.locks.lock_file.FileLocker.lock_exclusive", _refuse_to_wait_for_a_guard)
        with pytest.raises(LockTimeout, match="timeout waiting for lock"):
            LedgerLock(ledger, "agent-7", timeout=0.05).acquire()
    stopped.kill()
    stopped.wait()
    assert not is_held(ledger)


_lock_exclusive = FileLocker.lock_exclusive


def _refuse_to_wait_for_a_guard(locker: FileLocker, path: str) -> object:
    assert not path.endswith(".guard"), "must not wait for the guard"
    return _lock_exclusive(locker, path)


# --- Stopped processes -----------------------------------------------------------------------------------


@pytest.mark.req("LG-05")
def test_a_stopped_holder_keeps_its_lock_however_old_it_gets(ledger: Path, workers: Workers) -> None:
    holder = start_holder(workers, ledger)
    holder.stop()
    late = observer(ledger, ahead=10_000.0)
    state = seen(late)
    assert (state.suspect, state.liveness) == (True, Liveness.ALIVE)
    with pytest.raises(LockTimeout) as refused:
        late.acquire()
    assert state.identity in refused.value.hint
    holder.resume()
    assert holder.ask("release") is True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the waiters of a lock")
@pytest.mark.req("LG-02")
def test_a_stopped_waiter_does_not_block_the_others_forever(ledger: Path, workers: Workers) -> None:
    holder = start_holder(workers, ledger)
    stopped = workers.start(hold(ledger, "agent-stopped"))
    wait_until(lambda: is_waiting(stopped, ledger))
    stopped.stop()
    assert holder.ask("release") is True
    with LedgerLock(ledger, "agent-7", timeout=1.0).acquire():
        assert seen(observer(ledger)).agent_id == "agent-7"
    stopped.resume()
    assert stopped.hear() == "held"
    assert stopped.ask("release") is True


# --- Wrongly broken locks --------------------------------------------------------------------------------

Publish = Callable[[Path, bytes], None]


def append(ledger: Path, event: bytes, publish: Publish, before: Callable[[], object] = lambda: None) -> int:
    """Append as the ledger does; returns the number of the event."""
    number = len(list(ledger.glob("event-*.json"))) + 1
    before()
    while True:
        try:
            publish(ledger / f"event-{number:06}.json", event)
        except AlreadyExists:
            number += 1
        else:
            return number


def publish_by_rename(path: Path, event: bytes) -> None:
    """Planted bug: a rename replaces an event that already exists."""
    draft = path.with_name(f".{os.getpid()}.tmp")
    draft.write_bytes(event)
    os.rename(draft, path)


def lost_events(ledger: Path, acknowledged: list[tuple[int, bytes]]) -> list[str]:
    """The acknowledged events that are missing or changed, and gaps in the numbers."""
    there = {int(each.name[6:12]): each.read_bytes() for each in ledger.glob("event-*.json")}
    problems = [
        f"event {number} was acknowledged as {event!r}, but is {there.get(number)!r}"
        for number, event in acknowledged
        if there.get(number) != event
    ]
    if sorted(there) != list(range(1, len(there) + 1)):
        problems.append(f"the numbers have gaps: {sorted(there)}")
    return problems


def break_the_lock_of_a_stopped_writer(ledger: Path, workers: Workers, publish: Publish) -> list[str]:
    """A writer stops before it publishes; its lock is broken; another one writes; the first resumes and publishes."""

    def slow(line: Line) -> None:
        held = waiting_lock(ledger, "agent-slow").acquire()
        event = b'{"by": "slow"}\n'
        line.say((append(ledger, event, publish, before=stop_myself), event))
        line.say(held.release())

    def quick(line: Line) -> None:
        held = waiting_lock(ledger, "agent-quick").acquire()
        for count in range(3):
            event = b'{"by": "quick", "count": %d}\n' % count
            line.say((append(ledger, event, publish), event))
        line.wait()
        line.say(held.release())

    slow_writer = workers.start(slow)
    slow_writer.wait_until_stopped()
    late = observer(ledger, ahead=31.0)
    assert seen(late).suspect
    late.break_lock(seen(late).identity)
    quick_writer = workers.start(quick)
    acknowledged = [quick_writer.hear() for _ in range(3)]
    slow_writer.resume()
    acknowledged.append(slow_writer.hear())
    assert slow_writer.hear() is False, "the release did not report that the lock was lost"
    assert seen(late).agent_id == "agent-quick", "the release removed the lock of the successor"
    assert quick_writer.ask("release") is True
    return lost_events(ledger, acknowledged)


@pytest.mark.req("LG-05")
def test_a_wrongly_broken_lock_loses_no_event(ledger: Path, workers: Workers) -> None:
    assert break_the_lock_of_a_stopped_writer(ledger, workers, durable.create) == []
    assert len(list(ledger.glob("event-*.json"))) == 4


def test_an_event_lost_by_publishing_with_a_rename_is_noticed(ledger: Path, workers: Workers) -> None:
    problems = break_the_lock_of_a_stopped_writer(ledger, workers, publish_by_rename)
    assert len(problems) == 1
    assert "event 1 was acknowledged" in problems[0]
