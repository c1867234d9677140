"""The kept draft of a lock that is taken often: one per process, and never written while it is the lock."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import parse_instant
from holdfast.errors import LockTimeout, TooLarge
from holdfast.fs import calls, strictjson
from holdfast.locks.ledger_lock import LedgerLock
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no draft is kept on Windows")


@pytest.fixture
def ledger(scratch: Path) -> Path:
    (scratch / "ledger").mkdir()
    return scratch / "ledger"


def drafts(ledger: Path) -> list[Path]:
    return sorted(ledger.glob(".ledger.lock-*.tmp"))


def test_a_lock_taken_once_leaves_no_draft(ledger: Path) -> None:
    LedgerLock(ledger, "once").acquire().release()
    assert drafts(ledger) == []


def test_a_lock_taken_often_keeps_one_draft_and_has_a_new_identity_each_time(ledger: Path) -> None:
    lock, said = LedgerLock(ledger, "often"), []
    for _ in range(5):
        with lock.acquire() as held:
            record = json.loads((ledger / "ledger.lock").read_bytes())
            assert record["lock_id"] == held.lock_id
            state = lock.state()
            assert state is not None
            said.append(state.identity)
        assert not (ledger / "ledger.lock").exists()
    assert len(set(said)) == 5
    assert len(drafts(ledger)) == 1
    assert drafts(ledger)[0].stat().st_mode & 0o777 == 0o600
    lock.close()
    assert drafts(ledger) == []
    lock.acquire().release()


def test_the_draft_is_removed_with_the_lock_object(ledger: Path) -> None:
    lock = LedgerLock(ledger, "often")
    for _ in range(3):
        lock.acquire().release()
    assert drafts(ledger)
    del lock
    assert drafts(ledger) == []


def test_a_shorter_record_leaves_no_remainder_of_a_longer_one(ledger: Path) -> None:
    lock = LedgerLock(ledger, "a-very-long-agent-id")
    for name in ("a-very-long-agent-id", "a-very-long-agent-id", "x"):
        lock.agent_id = name
        with lock.acquire():
            assert json.loads((ledger / "ledger.lock").read_bytes())["agent_id"] == name


@pytest.mark.req("LG-04")
def test_a_wrongly_broken_holder_does_not_remove_its_successors_lock(ledger: Path) -> None:
    lock, other = LedgerLock(ledger, "first"), LedgerLock(ledger, "second", timeout=0.1)
    for each in (lock, other):
        for _ in range(2):
            each.acquire().release()
    held = lock.acquire()
    (ledger / "ledger.lock").unlink()
    (ledger / ".ledger.lock.turnstile").unlink()
    with ThreadPoolExecutor(1) as elsewhere:
        others = elsewhere.submit(other.acquire).result()
        assert held.release() is False
        assert json.loads((ledger / "ledger.lock").read_bytes())["agent_id"] == "second"
        assert elsewhere.submit(others.release).result() is True


def test_writing_a_new_record_never_changes_a_held_lock(ledger: Path) -> None:
    lock = LedgerLock(ledger, "first", timeout=0.0)
    for _ in range(2):
        lock.acquire().release()
    held = lock.acquire()
    before = (ledger / "ledger.lock").read_bytes()
    (ledger / ".ledger.lock.turnstile").unlink()
    os.rename(ledger / "ledger.lock", ledger / "moved")  # the lock is moved away, and the file still has two links
    with ThreadPoolExecutor(1) as elsewhere:
        again = elsewhere.submit(lock.acquire).result()
        assert (ledger / "moved").read_bytes() == before
        elsewhere.submit(again.release).result()
    held.release()


def test_a_deleted_draft_is_recreated(ledger: Path) -> None:
    lock = LedgerLock(ledger, "often")
    for _ in range(3):
        lock.acquire().release()
        for path in drafts(ledger):
            path.unlink()
    with lock.acquire():
        assert (ledger / "ledger.lock").exists()


def test_a_forked_child_has_a_draft_of_its_own(ledger: Path, workers: Workers) -> None:
    lock = LedgerLock(ledger, "parent")
    for _ in range(2):
        lock.acquire().release()
    (own,) = drafts(ledger)

    def task(line: Line) -> None:
        for _ in range(3):
            with lock.acquire() as held:
                assert json.loads((ledger / "ledger.lock").read_bytes())["lock_id"] == held.lock_id
        line.say(len(drafts(ledger)))

    assert workers.start(task).hear() == 2
    assert own.exists()
    lock.acquire().release()


def test_no_draft_is_kept_if_the_file_system_has_no_links(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(calls, "link", refused)
    lock = LedgerLock(ledger, "often")
    for _ in range(4):
        with lock.acquire():
            assert (ledger / "ledger.lock").exists()
    assert drafts(ledger) == []


def test_a_draft_deleted_while_the_lock_is_held_is_not_written(ledger: Path) -> None:
    """The only link left is the lock itself: a write to the draft would change the lock."""
    lock = LedgerLock(ledger, "often", timeout=0.0)
    for _ in range(2):
        lock.acquire().release()
    held = lock.acquire()
    before = (ledger / "ledger.lock").read_bytes()
    for path in drafts(ledger):
        path.unlink()
    (ledger / ".ledger.lock.turnstile").unlink()
    with ThreadPoolExecutor(1) as elsewhere:
        with pytest.raises(LockTimeout):
            elsewhere.submit(lock.acquire).result()
        assert (ledger / "ledger.lock").read_bytes() == before
    assert held.release() is True
    assert not (ledger / "ledger.lock").exists()


def test_a_directory_that_replaced_the_old_one_gets_the_lock(ledger: Path) -> None:
    lock = LedgerLock(ledger, "often")
    for _ in range(3):
        lock.acquire().release()
    os.rename(ledger, ledger.with_name("old"))
    ledger.mkdir()
    with lock.acquire():
        assert (ledger / "ledger.lock").exists()
    assert not (ledger / "ledger.lock").exists()
    assert not (ledger.with_name("old") / "ledger.lock").exists()


def test_no_descriptor_is_left_open(ledger: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    lock = LedgerLock(ledger, "often")
    for _ in range(3):
        lock.acquire().release()
    lock.close()
    del lock
    assert len(os.listdir("/dev/fd")) == before


def test_the_record_is_strict_json_for_any_agent_id(ledger: Path) -> None:
    lock = LedgerLock(ledger, "")
    for name in ('a "quoted" \\ one', "new\nline", "{}%s", "später", "x" * 1000):
        lock.agent_id = name
        for _ in range(2):
            with lock.acquire() as held:
                record = strictjson.decode((ledger / "ledger.lock").read_bytes())
                assert list(record)[:3] == ["agent_id", "acquired_at", "lock_id"]
                assert (record["agent_id"], record["lock_id"]) == (name, held.lock_id)
                assert abs(parse_instant(record["acquired_at"]) - time.time()) < 3600
    lock.agent_id = "x" * (64 << 10)
    with pytest.raises(TooLarge):
        lock.acquire()
    assert not (ledger / "ledger.lock").exists()
