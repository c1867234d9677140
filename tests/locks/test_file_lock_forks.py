"""File locks across forks and in programs that a holder starts: each process has only its own locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import LockNotHeld
from holdfast.locks.file_lock import FileLocker
from tests.locks.lock_watch import (
    is_free,
    linux_only,
    others_get,
    wait_until_waiting,
)
from tests.locks.workers import PATIENCE, Line, Workers

if sys.platform == "win32":
    pytest.skip("needs POSIX forks, signals and modes", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


@pytest.mark.req("FL-02")
def test_a_forked_child_that_releases_its_copy_leaves_the_lock_to_the_parent(path: Path, workers: Workers) -> None:
    locker = FileLocker(0)
    guard = locker.lock_exclusive(path)

    def release_everything(line: Line) -> None:
        nonlocal guard
        held_here = guard.held, locker.statistics().held_now
        with pytest.raises(LockNotHeld), guard:
            pass
        guard.release()
        locker.close()
        line.say((held_here, locker.try_lock_exclusive(path) is None))

    assert workers.start(release_everything).hear() == ((False, 0), True)
    assert guard.held
    assert not others_get(workers, path)


@pytest.mark.req("FL-02")
def test_a_forked_child_that_drops_its_copy_leaves_the_lock_to_the_parent(path: Path, workers: Workers) -> None:
    guards = [FileLocker(0).lock_exclusive(path)]

    def drop(line: Line) -> None:
        guards.clear()
        line.say("dropped")

    assert workers.start(drop).hear() == "dropped"
    assert not others_get(workers, path)


@pytest.mark.req("FL-02")
def test_a_forked_child_can_use_the_locker_of_its_parent_for_locks_of_its_own(scratch: Path, workers: Workers) -> None:
    locker = FileLocker(PATIENCE)
    locker.lock_exclusive(scratch / "idle.lock")
    guard = locker.lock_exclusive(scratch / "held.lock")

    def use(line: Line) -> None:
        own = locker.lock_exclusive(scratch / "idle.lock")
        line.say("held")
        with locker.lock_exclusive(scratch / "held.lock"):
            line.say((own.held, locker.statistics().held_now))

    child = workers.start(use)
    assert child.hear() == "held"
    assert not is_free(scratch / "idle.lock"), "the child did not lock a description of its own"
    wait_until_waiting(scratch / "held.lock")
    guard.release()
    assert child.hear() == (True, 2)


@pytest.mark.req("FL-02")
def test_the_lock_of_a_killed_process_is_free_even_if_its_forked_child_lives(path: Path, workers: Workers) -> None:
    def hold_and_fork(line: Line) -> None:
        guard = FileLocker(0).lock_exclusive(path)
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writable, b".")
            signal.pause()
        os.read(readable, 1)  # the child is running
        line.say((guard.held, child))
        signal.pause()

    holder = workers.start(hold_and_fork)
    held, child = holder.hear()
    try:
        assert held
        assert not is_free(path)
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        assert is_free(path)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.req("FL-02")
@pytest.mark.parametrize("close_fds", [True, False])
def test_the_lock_of_a_killed_process_is_free_even_if_a_program_it_started_lives(
    close_fds: bool, path: Path, workers: Workers
) -> None:
    def hold_and_start(line: Line) -> None:
        guard = FileLocker(0).lock_exclusive(path)
        program = subprocess.Popen(["sleep", "1000"], close_fds=close_fds)
        line.say((guard.held, program.pid))
        signal.pause()

    holder = workers.start(hold_and_start)
    held, program = holder.hear()
    try:
        assert held
        assert not is_free(path)
        holder.kill()
        holder.wait()
        os.kill(program, 0)
        assert is_free(path)
    finally:
        os.kill(program, signal.SIGKILL)


@linux_only
@pytest.mark.req("FL-02")
def test_an_executed_program_inherits_no_descriptor(path: Path) -> None:
    with FileLocker(0).lock_exclusive(path):
        listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)

    assert listed.returncode == 0
    assert "/proc" in listed.stdout
    assert path.name not in listed.stdout


WAITING = """
import sys
from holdfast.errors import LockTimeout
from holdfast.locks.file_lock import FileLocker, _import_for_waiting

_import_for_waiting()
before = set(sys.modules)
try:
    FileLocker(0.01).lock_exclusive(sys.argv[1])
except LockTimeout as timeout:
    str(timeout), timeout.as_record()
print(set(sys.modules) - before)
"""


def test_waiting_imports_only_modules_that_are_loaded_before_the_first_wait(scratch: Path) -> None:
    """A child forked while a thread imports a module finds it half loaded, and waits for it forever."""
    path = str(scratch / "taken.lock")
    with FileLocker(60).lock_exclusive(path):
        command = [sys.executable, "-c", WAITING, path]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)

    assert result.stdout == "set()\n"


FORKS_AMID_THREADS = """
import os, sys, threading, traceback
from holdfast.errors import LockTimeout
from holdfast.errors import LockNotHeld
from holdfast.locks.file_lock import FileLocker

root, forks = sys.argv[1], int(sys.argv[2])
done = threading.Event()
locker = FileLocker(60)

def busy(number):
    mine, impatient = FileLocker(60), FileLocker(0.0005)
    while not done.is_set():
        with locker.lock_exclusive(f"{root}/common.lock"):      # held, and waited for
            pass
        mine.lock_shared(f"{root}/{number}.lock").release()     # opened and closed
        mine.close()
        try:
            impatient.lock_exclusive(f"{root}/common.lock")     # watched
        except LockTimeout:
            pass

def child():
    assert locker.statistics().held_now == 0
    assert opened() == []
    with locker.lock_exclusive(f"{root}/common.lock"), FileLocker(60).lock_shared(f"{root}/shared.lock"):
        pass
    try:
        with FileLocker(60).lock_exclusive(f"{root}/child.lock"):
            FileLocker(0.001).lock_exclusive(f"{root}/taken.lock")
    except LockTimeout:
        pass

def opened():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass
    return [name for name in found if root in name]

threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
taken = locker.lock_exclusive(f"{root}/taken.lock")
statuses = []
for batch in range(forks // 10):
    children = []
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    statuses += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
done.set()
for thread in threads:
    thread.join()
taken.release()
locker.close()
print(len(statuses), set(statuses), opened())
"""


@pytest.mark.long
@linux_only
@pytest.mark.req("FL-02", "FL-03")
def test_forks_amid_busy_locking_threads_neither_deadlock_nor_leak(
    scratch: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_AMID_THREADS, str(scratch), "200"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert (ended.stdout, ended.stderr) == ("200 {0} []\n", "")
