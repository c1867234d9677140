"""File locks where they are known to fail: forks, killed holders, replaced files, odd paths, full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import (
    Failure,
    IoFailure,
    LockReentry,
    LockTimeout,
    NotFound,
    NotWritable,
    PathEscape,
    Refused,
)
from holdfast.locks.descriptors import MOST_IDLE
from holdfast.locks.file_locker import FileLocker, LockGuard
from holdfast.locks.repo_lock import RepoLock
from holdfast.locks.waiting import Wait
from tests.locks.lock_watch import (
    Caller,
    become_nobody,
    descriptors_of,
    flocked,
    hold,
    holding,
    is_free,
    linux_only,
    obey,
    others_get,
    public_directory,
    start_holding,
    wait_until_waiting,
    waiting_for,
)
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("forks, signals and modes are not those of Windows", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


# --- Forks and executed programs ----------------------------------------------------------------------


@pytest.mark.req("FL-02")
def test_a_forked_child_that_releases_its_copy_leaves_the_lock_to_the_parent(
    path: Path, workers: Workers
) -> None:
    locker = FileLocker(0)
    guard = locker.lock_exclusive(path)

    def release_everything(line: Line) -> None:
        nonlocal guard
        held_here = guard.held, locker.statistics().held_now
        guard.release()
        with guard:
            pass
        locker.close()
        line.say((held_here, locker.try_lock_exclusive(path) is None))

    assert workers.start(release_everything).hear() == ((False, 0), True)
    assert guard.held
    assert not others_get(workers, path)


@pytest.mark.req("FL-02")
def test_a_forked_child_that_drops_its_copy_leaves_the_lock_to_the_parent(
    path: Path, workers: Workers
) -> None:
    guards = [FileLocker(0).lock_exclusive(path)]

    def drop(line: Line) -> None:
        guards.clear()
        line.say("dropped")

    assert workers.start(drop).hear() == "dropped"
    assert not others_get(workers, path)


@pytest.mark.req("FL-02")
def test_a_forked_child_can_use_the_locker_of_its_parent_for_locks_of_its_own(
    scratch: Path, workers: Workers
) -> None:
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
    assert not is_free(scratch / "idle.lock"), "it is not the parent's description that the child has locked"
    wait_until_waiting(scratch / "held.lock")
    guard.release()
    assert child.hear() == (True, 2)


@pytest.mark.req("FL-02")
def test_the_lock_of_a_killed_process_is_free_although_its_forked_child_lives(
    path: Path, workers: Workers
) -> None:
    def hold_and_fork(line: Line) -> None:
        guard = FileLocker(0).lock_exclusive(path)
        child = os.fork()
        if child == 0:
            signal.pause()
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
def test_the_lock_of_a_killed_process_is_free_although_a_program_that_it_started_lives(
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
        listed = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True
        )

    assert listed.returncode == 0
    assert "/proc" in listed.stdout
    assert path.name not in listed.stdout


FORKS_AMID_THREADS = """
import os, sys, threading, traceback
from holdfast.errors import LockTimeout
from holdfast.locks.file_locker import FileLocker

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


@linux_only
@pytest.mark.req("FL-02", "FL-03")
def test_forks_amid_threads_that_hold_wait_for_and_open_locks_neither_deadlock_nor_leak(
    scratch: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_AMID_THREADS, str(scratch), "200"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert (ended.stdout, ended.stderr) == ("200 {0} []\n", "")


# --- The file at the path becomes another one ---------------------------------------------------------


def unlink(path: Path) -> None:
    path.unlink()


def unlink_and_make_anew(path: Path) -> None:
    path.unlink()
    path.touch()


def rename_over(path: Path) -> None:
    path.with_suffix(".new").touch()
    path.with_suffix(".new").rename(path)


def rename_away_and_make_anew(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.touch()


changes = pytest.mark.parametrize(
    "change",
    [unlink, unlink_and_make_anew, rename_over, rename_away_and_make_anew],
    ids=lambda each: each.__name__,
)
Change = Callable[[Path], None]


@linux_only
@pytest.mark.req("FL-03")
@changes
@pytest.mark.parametrize("fair", [False, True], ids=["as it comes", "fair"])
def test_who_waits_while_the_file_is_replaced_ends_up_with_the_file_that_is_there_now(
    change: Change, fair: bool, path: Path, workers: Workers
) -> None:
    holder = start_holding(workers, path, fair=fair)
    waiter = workers.start(hold(path, fair=fair))
    wait_until_waiting(path)
    old = path.stat()

    change(path)
    holder.say("go on")

    assert waiter.hear() == "held"
    assert not os.path.samestat(path.stat(), old)
    wait_until(lambda: holding(path) == [waiter.pid])
    assert not others_get(workers, path)


@linux_only
@pytest.mark.req("FL-03")
@changes
def test_who_gets_the_old_file_goes_on_waiting_for_the_holder_of_the_new_one(
    change: Change, path: Path, workers: Workers
) -> None:
    old_holder = start_holding(workers, path)
    waiter = workers.start(hold(path))
    wait_until_waiting(path)
    change(path)
    new_holder = start_holding(workers, path)

    assert old_holder.ask("go on") == "released"

    wait_until(lambda: waiting_for(path) == [waiter.pid])
    new_holder.say("go on")
    assert waiter.hear() == "held"
    wait_until(lambda: holding(path) == [waiter.pid])


@pytest.mark.req("FL-03")
@changes
def test_a_locker_that_has_the_old_file_still_open_locks_the_new_one(
    change: Change, path: Path, workers: Workers
) -> None:
    locker = FileLocker(0)
    locker.lock_exclusive(path).release()
    change(path)

    with locker.lock_exclusive(path):
        assert not others_get(workers, path)


@linux_only
def test_a_deadline_spans_all_the_files_that_were_waited_for(path: Path, workers: Workers) -> None:
    old_holder = start_holding(workers, path)
    waiter = workers.start(obey(path))
    started = time.monotonic()
    waiter.say(("lock", False, 0.3))
    wait_until(lambda: waiting_for(path) or waiter.line.has_news())
    unlink(path)
    start_holding(workers, path)
    old_holder.say("go on")

    assert waiter.hear() is False

    assert 0.3 <= time.monotonic() - started < PATIENCE / 2


# --- One process --------------------------------------------------------------------------------------


@pytest.mark.req("FL-03")
def test_two_lockers_in_one_thread_exclude_each_other(path: Path) -> None:
    with FileLocker(0).lock_exclusive(path):
        assert FileLocker(0).try_lock_exclusive(path) is None
        assert FileLocker(0).try_lock_shared(path) is None


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything waits for a lock."""
    monkeypatch.setattr(Wait, "acquire", lambda *_, **__: pytest.fail("it waits"))


@pytest.mark.parametrize(("held", "wanted"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("fair", [False, True], ids=["as it comes", "fair"])
@pytest.mark.usefixtures("nothing_waits")
def test_locking_again_what_this_thread_holds_is_refused_at_once(
    held: bool, wanted: bool, fair: bool, path: Path
) -> None:
    locker = FileLocker(None, fair=fair)
    guard = locker.acquire(path, shared=held)

    with pytest.raises(LockReentry, match="is locked by this thread already") as caught:
        locker.acquire(path, shared=wanted)

    assert caught.value.code == "E_LOCK_REENTRY"
    assert not caught.value.retryable
    assert "Pass the guard that you have" in caught.value.hint
    assert caught.value.facts["path"] == str(path)
    assert guard.held
    guard.release()
    assert locker.acquire(path, shared=wanted).held, "once it is given back, all is well"


@pytest.mark.usefixtures("nothing_waits")
def test_locking_again_is_noticed_by_whatever_locker_and_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = FileLocker(None).lock_exclusive(path)
    other_name = path.with_name("b.lock")
    other_name.hardlink_to(path)
    monkeypatch.chdir(path.parent)

    for name in (str(path), "./a.lock", other_name):
        with pytest.raises(LockReentry):
            FileLocker(None).lock_exclusive(name)
    assert guard.held


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize("fair", [False, True], ids=["as it comes", "fair"])
def test_sharing_again_what_this_thread_shares_is_granted(fair: bool, path: Path, workers: Workers) -> None:
    locker = FileLocker(None, fair=fair)
    first = locker.lock_shared(path)
    second = locker.lock_shared(path)
    first.release()

    assert second.held
    assert not others_get(workers, path)


@linux_only
@pytest.mark.parametrize(("held", "wanted"), [(False, False), (True, False), (False, True)])
def test_locking_again_in_turn_is_refused_at_once_even_if_others_wait(
    held: bool, wanted: bool, path: Path, workers: Workers
) -> None:
    locker = FileLocker(PATIENCE, fair=True)
    guard = locker.acquire(path, shared=held)
    waiter = workers.start(hold(path, fair=True))
    wait_until_waiting(path)

    with pytest.raises(LockReentry):
        locker.acquire(path, shared=wanted)

    wait_until(lambda: waiting_for(path) == [waiter.pid])
    guard.release()
    assert waiter.hear() == "held"


@linux_only
def test_sharing_again_in_turn_does_not_wait_for_a_writer_that_waits_for_us(
    path: Path, workers: Workers
) -> None:
    locker = FileLocker(PATIENCE, fair=True)
    guards = [locker.lock_shared(path)]
    waiter = workers.start(hold(path, fair=True))
    wait_until_waiting(path)

    guards.append(locker.lock_shared(path))

    for guard in guards:
        guard.release()
    assert waiter.hear() == "held"


def test_a_guard_can_be_released_by_another_thread(path: Path, workers: Workers) -> None:
    locker = FileLocker(PATIENCE)
    guard = locker.lock_exclusive(path)

    Caller(guard.release).result()

    assert not guard.held
    assert others_get(workers, path)
    assert locker.lock_exclusive(path).held


@linux_only
def test_a_thread_is_not_mistaken_for_one_that_has_ended_and_whose_number_it_has(path: Path) -> None:
    locker = FileLocker(None)
    first = Caller(lambda: locker.lock_exclusive(path))
    guard = first.guard()  # its thread has ended, the lock is still held
    later: list[Caller] = []
    while not any(each.ident == first.ident for each in later):
        later.append(Caller(lambda: locker.lock_exclusive(path).release()))
        wait_until(lambda: len(waiting_for(path)) == len(later) or not later[-1].is_alive())
        assert len(later) < 200, "the number was not used again"

    guard.release()

    for each in later:
        each.result()


@pytest.mark.req("FL-02")
def test_two_threads_that_release_one_guard_at_once_never_free_the_next_ones_lock(path: Path) -> None:
    locker, other = FileLocker(PATIENCE), FileLocker(0)
    rounds = 1000
    begin = threading.Barrier(3)
    current: list[LockGuard] = []

    def release_each() -> None:
        for _ in range(rounds):
            begin.wait(PATIENCE)
            current[-1].release()
            begin.wait(PATIENCE)

    releasing = [Caller(release_each) for _ in range(2)]
    for _ in range(rounds):
        current.append(locker.lock_exclusive(path))
        begin.wait(PATIENCE)
        following = locker.try_lock_exclusive(path)  # perhaps between the two, on the same description
        begin.wait(PATIENCE)
        if following is not None:
            assert following.held
            assert other.try_lock_exclusive(path) is None, "a lock was freed that is held"
            following.release()
        current.clear()
    for caller in releasing:
        caller.result()
    assert locker.statistics().held_now == 0


def test_a_guard_outlives_its_locker(path: Path, workers: Workers) -> None:
    guards = [FileLocker(0).lock_exclusive(path)]
    assert not others_get(workers, path)

    guards.clear()

    assert others_get(workers, path)


@pytest.mark.req("FL-02")
def test_opening_and_closing_the_file_elsewhere_in_the_process_does_not_drop_the_lock(
    path: Path, workers: Workers
) -> None:
    with FileLocker(0).lock_exclusive(path):
        path.read_bytes()
        with path.open("a"):
            pass
        with contextlib.suppress(BlockingIOError), flocked(path):
            pass
        assert FileLocker(0).try_lock_exclusive(path) is None

        assert not others_get(workers, path)


def test_five_hundred_threads_wait_for_one_lock_and_all_get_it(path: Path) -> None:
    locker = FileLocker(PATIENCE)
    entered: list[int] = []

    def enter() -> None:
        with locker.lock_exclusive(path):
            entered.append(len(entered))

    with flocked(path):
        callers = [Caller(enter) for _ in range(500)]
        if sys.platform == "linux":
            wait_until_waiting(path, 500)
    for caller in callers:
        caller.result()

    assert entered == list(range(500))
    assert locker.statistics()[:4] == (500, 500, 0, 0)


def test_five_hundred_threads_wait_in_vain_and_all_come_back(path: Path) -> None:
    locker = FileLocker(0.1)

    def wait_in_vain() -> float:
        started = time.monotonic()
        with pytest.raises(LockTimeout):
            locker.lock_exclusive(path)
        return time.monotonic() - started

    with flocked(path):
        waited = [caller.result() for caller in [Caller(wait_in_vain) for _ in range(500)]]

    assert all(isinstance(each, float) and each >= 0.1 for each in waited)
    assert locker.statistics()[:4] == (0, 500, 500, 0)
    if sys.platform == "linux":
        locker.close()
        assert descriptors_of(path) == []


@linux_only
def test_the_files_that_are_kept_open_are_bounded_and_the_latest_are_kept(scratch: Path) -> None:
    locker = FileLocker(0)
    paths = [scratch / f"{number}.lock" for number in range(MOST_IDLE + 40)]
    for each in paths:
        locker.lock_exclusive(each).release()

    kept = [each for each in paths if descriptors_of(each)]

    assert kept == paths[-MOST_IDLE:]
    locker.lock_exclusive(kept[0]).release()
    locker.lock_exclusive(paths[0]).release()
    assert descriptors_of(kept[0]), "it was used again, so another one was longer idle"
    assert not descriptors_of(kept[1])
    locker.close()
    assert not any(descriptors_of(each) for each in paths)


# --- What may be at the path --------------------------------------------------------------------------


def test_a_directory_can_be_locked(scratch: Path, workers: Workers) -> None:
    with FileLocker(0).lock_exclusive(scratch):
        assert not others_get(workers, scratch)
        assert not others_get(workers, scratch, shared=True)
    assert others_get(workers, scratch)


def test_a_missing_directory_is_named_with_a_hint_and_not_made(scratch: Path) -> None:
    with pytest.raises(NotFound, match=str(scratch / "missing")) as caught:
        FileLocker(None).lock_exclusive(scratch / "missing" / "a.lock")

    assert caught.value.hint == "Make the directory first."
    assert os.listdir(scratch) == []


def make_fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def take_device(path: Path) -> Path:
    return Path("/dev/null")


@pytest.mark.parametrize("make", [make_fifo, make_socket, take_device], ids=["fifo", "socket", "device"])
def test_what_is_neither_a_file_nor_a_directory_is_refused_at_once(
    make: Callable[[Path], Path], path: Path
) -> None:
    made = make(path)

    with pytest.raises((Refused, IoFailure), match=str(made)):
        FileLocker(None).lock_exclusive(made)
    with pytest.raises((Refused, IoFailure), match=str(made)):
        FileLocker(None).try_lock_shared(made)

    if sys.platform == "linux":
        assert descriptors_of(made) == [] or made == Path("/dev/null")


@pytest.mark.parametrize("target", ["elsewhere.lock", "missing.lock", "a.lock", "."])
def test_a_symbolic_link_at_the_path_is_refused_and_nothing_is_made(
    target: str, path: Path, workers: Workers
) -> None:
    elsewhere = path.with_name("elsewhere.lock")
    elsewhere.write_bytes(b"content")
    path.symlink_to(target)

    for take in (FileLocker.lock_exclusive, FileLocker.try_lock_shared):
        with pytest.raises(PathEscape, match="is a symbolic link"):
            take(FileLocker(None), path)

    assert not path.with_name("missing.lock").exists()
    assert is_free(elsewhere)
    assert elsewhere.read_bytes() == b"content"


def test_a_symbolic_link_that_appears_between_two_uses_is_refused(path: Path) -> None:
    locker = FileLocker(None)
    locker.lock_exclusive(path).release()
    elsewhere = path.rename(path.with_name("elsewhere.lock"))
    path.symlink_to(elsewhere)

    with pytest.raises(PathEscape):
        locker.lock_exclusive(path)
    with pytest.raises(PathEscape):
        locker.try_lock_shared(path)

    assert is_free(elsewhere)


@linux_only
def test_a_symbolic_link_that_appears_during_the_wait_is_refused(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)
    waiter = Caller(lambda: FileLocker(PATIENCE).lock_exclusive(path))
    wait_until_waiting(path)
    elsewhere = path.rename(path.with_name("elsewhere.lock"))
    path.symlink_to(elsewhere)

    holder.ask("go on")

    with pytest.raises(PathEscape):
        waiter.result()
    assert is_free(elsewhere)


def test_a_link_on_the_way_is_followed_because_the_caller_chose_the_path(scratch: Path) -> None:
    (scratch / "real").mkdir()
    (scratch / "link").symlink_to("real")

    with FileLocker(0).lock_exclusive(scratch / "link" / "a.lock"):
        assert not is_free(scratch / "real" / "a.lock")


# --- What this user may do ----------------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as directory:
        yield directory


def failure_of_nobody(workers: Workers, path: Path, *, shared: bool = False) -> tuple[str, str, str] | None:
    """What an unprivileged user gets: the code, message and hint of the failure, or None for the lock."""

    def task(line: Line) -> None:
        become_nobody()
        try:
            FileLocker(0).acquire(path, shared=shared)
        except Failure as failure:
            line.say((failure.code, failure.message, failure.hint))
        else:
            line.say(None)

    failure: tuple[str, str, str] | None = workers.start(task).hear()
    return failure


def test_in_a_directory_that_is_read_only_for_this_user_a_new_lock_fails_clearly(
    public: Path, workers: Workers
) -> None:
    public.chmod(0o555)

    failure = failure_of_nobody(workers, public / "a.lock")

    assert failure == (
        "E_NOT_WRITABLE",
        f"cannot open the lock file {public}/a.lock: {os.strerror(errno.EACCES)}",
        NotWritable.hint,
    )
    assert os.listdir(public) == []


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_a_lock_file_that_is_there_can_be_locked_by_who_can_only_read_it(
    shared: bool, public: Path, workers: Workers
) -> None:
    path = public / "a.lock"
    path.touch(mode=0o444)
    public.chmod(0o555)

    def lock_and_wait(line: Line) -> None:
        become_nobody()
        with FileLocker(0).acquire(path, shared=shared):
            line.say("held")
            line.wait()

    assert workers.start(lock_and_wait).hear() == "held"
    assert is_free(path, shared=True) is shared
    assert not is_free(path)


def test_a_lock_file_that_this_user_cannot_even_read_fails_clearly(public: Path, workers: Workers) -> None:
    path = public / "a.lock"
    path.touch()
    path.chmod(0)

    failure = failure_of_nobody(workers, path, shared=True)

    assert failure is not None
    assert failure[0] == "E_NOT_WRITABLE"
    assert str(path) in failure[1]


def test_a_new_lock_file_has_the_mode_that_the_users_mask_allows(path: Path) -> None:
    before = os.umask(0o027)
    try:
        FileLocker(0).lock_exclusive(path)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@contextlib.contextmanager
def small_disk(where: Path, options: str) -> Iterator[Path]:
    """A file system in memory with hardly any room."""
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "holdfast-test", str(where)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(directory: Path) -> None:
    """Use up all the room that there is."""
    with (directory / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


@linux_only
def test_a_disk_without_room_for_one_more_file_makes_a_new_lock_fail_cleanly(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k,nr_inodes=4") as disk:
        locker = FileLocker(0)
        (disk / "there.lock").touch()
        with contextlib.suppress(OSError):
            for number in range(8):
                (disk / f"filler-{number}").touch()
        before = sorted(os.listdir(disk))

        with pytest.raises(IoFailure) as caught:
            locker.lock_exclusive(disk / "a.lock")

        assert caught.value.facts["errno"] == errno.ENOSPC
        assert caught.value.code == "E_IO"
        assert sorted(os.listdir(disk)) == before
        assert locker.lock_exclusive(disk / "there.lock").held, "one that is there needs no room"
        locker.close()


@linux_only
def test_a_full_disk_needs_no_room_for_locking_a_file_that_is_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        fill(disk)
        (disk / "new.lock").touch()
        locker = FileLocker(0)

        with locker.lock_exclusive(disk / "new.lock"):
            assert not is_free(disk / "new.lock")
        locker.close()


@linux_only
def test_a_repo_lock_on_a_full_disk_fails_cleanly_and_leaves_neither_lock_nor_draft(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        repo = disk / "repos" / "repo"
        RepoLock(disk).lock("repo").unlock()
        before = sorted(os.listdir(repo))
        fill(disk)

        with pytest.raises(IoFailure) as caught:
            RepoLock(disk).lock("repo")

        assert caught.value.facts["errno"] == errno.ENOSPC
        assert sorted(os.listdir(repo)) == before
        assert ".lock" not in before
        (disk / "filler").unlink()
        RepoLock(disk).lock("repo").unlock()


# --- Clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [86400.0, -86400.0], ids=["forward", "backward"])
def test_setting_the_wall_clock_neither_shortens_nor_prolongs_a_wait(
    step: float, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, jumps = time.time, 0

    def jumping() -> float:
        nonlocal jumps
        jumps += 1
        return real() + step * jumps

    locker = FileLocker(0.1)
    with flocked(path):
        monkeypatch.setattr(time, "time", jumping)
        started = time.monotonic()
        with pytest.raises(LockTimeout):
            locker.lock_exclusive(path)
        waited = time.monotonic() - started
        monkeypatch.undo()

    assert 0.1 <= waited < PATIENCE / 2
    assert 0.1 <= locker.statistics().seconds_waited < PATIENCE / 2


def test_a_wait_ends_by_the_clock_that_never_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    real, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)
    waiter = Wait(3600.0)
    assert not waiter.is_over()

    ahead = 3601.0

    assert waiter.is_over()
    assert waiter.remaining() == 0


def test_the_workers_of_these_tests_can_tell_a_broken_lock(path: Path, workers: Workers) -> None:
    """The question that most of these tests end with, asked where the answer must be the other one."""
    path.touch()

    assert others_get(workers, path)
    with FileLocker(0).lock_shared(path):
        assert not others_get(workers, path)
        assert others_get(workers, path, shared=True)
