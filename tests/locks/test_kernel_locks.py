"""The proven holders of a file lock: confirmed by their open files, not only by the kernel's list."""

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
    pytest.skip("only Linux lists the holders of a file lock", allow_module_level=True)

fcntl = pytest.importorskip("fcntl")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "a lock"
    path.touch()
    return path


def test_the_process_that_took_a_lock_is_its_holder(lock: Path) -> None:
    inode = inode_of(lock)
    assert held_flocks({inode}) == []
    with FileLocker().lock_exclusive(lock):
        assert held_flocks({inode}) == [HeldFlock(inode, False, (os.getpid(),))]
        assert held_flocks({inode_of(lock.parent)}) == []
    assert held_flocks({inode}) == []


def test_an_entry_that_the_kernel_lists_twice_is_one_lock(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is read page by page: an entry moves to the next page when others are inserted before it."""

    def shifted(path: str, most: int) -> bytes:
        content = read_small(path, most)
        return 2 * content if path == "/proc/locks" else content

    read_small = calls.read_small
    with FileLocker().lock_exclusive(lock):
        monkeypatch.setattr(calls, "read_small", shifted)
        assert held_flocks({inode_of(lock)}) == [HeldFlock(inode_of(lock), False, (os.getpid(),))]


def test_every_process_that_shares_a_lock_is_a_holder(lock: Path) -> None:
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


def test_a_process_that_only_opens_or_waits_for_the_file_is_not_a_holder(lock: Path) -> None:
    def wait(line: Line) -> None:
        with open(lock):
            line.say("open")
            FileLocker().lock_exclusive(lock)

    with Workers() as workers, FileLocker().lock_exclusive(lock):
        assert workers.start(wait).hear() == "open"
        assert [each.pids for each in held_flocks({inode_of(lock)})] == [(os.getpid(),)]


def test_a_lock_whose_taker_has_exited_is_held_by_all_that_share_its_description(lock: Path) -> None:
    """Shell scripts do this: `exec 9> file; flock 9`."""

    def keep_the_descriptor(line: Line) -> None:
        line.say("has the descriptor")
        line.wait()

    descriptor = os.open(lock, os.O_RDWR)
    try:
        with Workers() as workers:
            taker = workers.start(lambda line: fcntl.flock(descriptor, fcntl.LOCK_EX))
            assert taker.wait() == 0
            other = workers.start(keep_the_descriptor)
            assert other.hear() == "has the descriptor"
            [held] = held_flocks({inode_of(lock)})
        assert held.pids == tuple(sorted((os.getpid(), other.pid)))
    finally:
        os.close(descriptor)


def test_a_listed_pid_that_was_reused_is_not_trusted(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list names a process that does not hold the lock, because its pid was reused."""
    with FileLocker().lock_exclusive(lock):
        told = calls.read_small("/proc/locks", 1 << 20).replace(b" %d " % os.getpid(), b" %d " % os.getppid())
        read = calls.read_small
        monkeypatch.setattr(
            calls, "read_small", lambda path, limit: told if path == "/proc/locks" else read(path, limit)
        )
        assert [each.pids for each in held_flocks({inode_of(lock)})] == [(os.getpid(),)]


def test_no_holder_is_known_if_the_kernels_list_cannot_be_read(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: object) -> bytes:
        raise PermissionError

    assert inode_of(lock.parent / "missing") == ""
    with FileLocker().lock_exclusive(lock):
        monkeypatch.setattr(calls, "read_small", refuse)
        assert held_flocks({inode_of(lock)}) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the holders of a file lock")
def test_a_process_group_that_holds_any_lock_is_recognised(tmp_path: Path) -> None:
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
