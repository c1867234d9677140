"""Who certainly has a lock on a file: asked of those who have it open, not only of the kernel's list."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.fs import calls
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.kernel_locks import HeldFlock, held_flocks, inode_of, is_holding
from tests.locks.workers import Line, Workers

if sys.platform != "linux":
    pytest.skip("only Linux tells who holds a file lock", allow_module_level=True)

fcntl = pytest.importorskip("fcntl")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "a lock"
    path.touch()
    return path


def test_the_holder_of_a_lock_is_the_process_that_has_it(lock: Path) -> None:
    inode = inode_of(lock)
    assert held_flocks({inode}) == []
    with FileLocker().lock_exclusive(lock):
        assert held_flocks({inode}) == [HeldFlock(inode, False, (os.getpid(),))]
        assert held_flocks({inode_of(lock.parent)}) == []
    assert held_flocks({inode}) == []


def test_all_who_share_a_lock_are_its_holders(lock: Path) -> None:
    def share(line: Line) -> None:
        with FileLocker().lock_shared(lock):
            line.say("sharing")
            line.wait()

    with Workers() as workers, FileLocker().lock_shared(lock):
        worker = workers.start(share)
        assert worker.hear() == "sharing"
        found = held_flocks({inode_of(lock)})
    assert {each.pids for each in found} == {(os.getpid(),), (worker.pid,)}
    assert all(each.shared for each in found)


def test_who_merely_has_the_file_open_or_waits_for_it_is_no_holder(lock: Path) -> None:
    def wait(line: Line) -> None:
        with open(lock):
            line.say("open")
            FileLocker().lock_exclusive(lock)

    with Workers() as workers, FileLocker().lock_exclusive(lock):
        assert workers.start(wait).hear() == "open"
        assert [each.pids for each in held_flocks({inode_of(lock)})] == [(os.getpid(),)]


def test_a_lock_whose_taker_is_gone_is_held_by_those_who_have_its_open_file(lock: Path) -> None:
    """As shells do it: `exec 9> file; flock 9`."""

    def have_it_too(line: Line) -> None:
        line.say("has it too")
        line.wait()

    descriptor = os.open(lock, os.O_RDWR)
    try:
        with Workers() as workers:
            taker = workers.start(lambda line: fcntl.flock(descriptor, fcntl.LOCK_EX))
            assert taker.wait() == 0
            other = workers.start(have_it_too)
            assert other.hear() == "has it too"
            [held] = held_flocks({inode_of(lock)})
        assert held.pids == tuple(sorted((os.getpid(), other.pid)))
    finally:
        os.close(descriptor)


def test_a_number_that_is_another_process_by_now_is_not_believed(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list says that a process has the lock which does not: its number was used again."""
    with FileLocker().lock_exclusive(lock):
        told = calls.read_small("/proc/locks", 1 << 20).replace(b" %d " % os.getpid(), b" %d " % os.getppid())
        read = calls.read_small
        monkeypatch.setattr(
            calls, "read_small", lambda path, limit: told if path == "/proc/locks" else read(path, limit)
        )
        assert [each.pids for each in held_flocks({inode_of(lock)})] == [(os.getpid(),)]


def test_where_the_kernel_does_not_tell_nobody_is_known(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: object) -> bytes:
        raise PermissionError

    assert inode_of(lock.parent / "missing") == ""
    with FileLocker().lock_exclusive(lock):
        monkeypatch.setattr(calls, "read_small", refuse)
        assert held_flocks({inode_of(lock)}) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")
def test_whether_a_process_group_holds_any_lock_is_known(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    )
    path = str(tmp_path / "file")
    command = [sys.executable, "-c", program, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_holding(holder.pid)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as waiter:
            assert not is_holding(waiter.pid)
            waiter.kill()
        holder.kill()
    assert not is_holding(holder.pid)
