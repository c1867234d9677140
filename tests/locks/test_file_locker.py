"""File locks: acquisition, release, exclusion, and errors."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import ExitStatus, IoFailure, LockNotHeld, LockTimeout, NotFound, TooManyRetries
from holdfast.fs import calls
from holdfast.locks import kernel_locks
from holdfast.locks.file_lock import FileLocker, LockGuard
from holdfast.locks.flock_wait import LockWait
from holdfast.locks.retry import RetryConfig, retry_with_backoff
from tests.locks.lock_watch import (
    Caller,
    Pair,
    descriptors_of,
    flocked,
    hold,
    holding,
    is_free,
    linux_only,
    obey,
    others_get,
    own_threads,
    pairs,
    start_holding,
    wait_until_waiting,
    waiting_for,
)
from tests.locks.workers import PATIENCE, Line, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


# --- Taking a lock ------------------------------------------------------------------------------------

Take = Callable[[FileLocker, Path], LockGuard | None]
WAYS: list[tuple[Take, bool]] = [
    (FileLocker.lock_exclusive, False),
    (FileLocker.lock_shared, True),
    (FileLocker.try_lock_exclusive, False),
    (FileLocker.try_lock_shared, True),
]
NAMES = [take.__name__ for take, _ in WAYS]


@pytest.mark.req("FL-01")
@pytest.mark.parametrize(("take", "shared"), WAYS, ids=NAMES)
def test_a_free_file_is_locked_at_once(take: Take, shared: bool, path: Path) -> None:
    guard = take(FileLocker(0), path)

    assert guard is not None
    assert guard.held
    assert guard.shared is shared
    assert guard.path == str(path)
    assert not is_free(path)
    assert is_free(path, shared=True) is shared


@pytest.mark.req("FL-01")
@pytest.mark.parametrize(("take", "shared"), WAYS[:2], ids=NAMES[:2])
def test_a_waiter_gets_the_lock_when_the_holder_releases_it(
    take: Take, shared: bool, path: Path, workers: Workers
) -> None:
    holder = start_holding(workers, path)
    waiter = Caller(lambda: take(FileLocker(PATIENCE), path))
    wait_until_waiting(path)

    assert holder.ask("go on") == "released"

    assert waiter.guard().held
    wait_until(lambda: holding(path) == [os.getpid()])


@pytest.mark.req("FL-01")
@pytest.mark.parametrize(("take", "shared"), WAYS[2:], ids=NAMES[2:])
def test_trying_returns_none_at_once_if_the_file_is_held(
    take: Take, shared: bool, path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_holding(workers, path)
    monkeypatch.setattr(LockWait, "acquire", lambda *_, **__: pytest.fail("must not wait"))

    assert take(FileLocker(None), path) is None


@pytest.mark.req("FL-01")
@pytest.mark.parametrize(("take", "shared"), WAYS[:2], ids=NAMES[:2])
def test_a_wait_ends_at_the_timeout_and_not_before(take: Take, shared: bool, path: Path, workers: Workers) -> None:
    start_holding(workers, path)
    started = time.monotonic()

    with pytest.raises(LockTimeout):
        take(FileLocker(0.2), path)

    assert 0.2 <= time.monotonic() - started < PATIENCE / 2


@pytest.mark.req("FL-01")
def test_a_timeout_of_zero_does_not_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("must not sleep"))

    with flocked(path), pytest.raises(LockTimeout, match="after 0ms"):
        FileLocker(0).lock_exclusive(path)


@pytest.mark.req("FL-01")
def test_without_a_timeout_the_wait_has_no_limit(path: Path, workers: Workers) -> None:
    wait_until(lambda: not own_threads())  # threads of earlier tests that had a deadline
    holder = start_holding(workers, path)
    waiter = Caller(lambda: FileLocker(None).lock_exclusive(path))
    wait_until_waiting(path)
    assert not own_threads(), "a thread watches a wait without a deadline"

    holder.say("go on")

    assert waiter.guard().held


def test_the_default_timeout_is_five_seconds() -> None:
    assert FileLocker().timeout == 5.0


@pytest.mark.parametrize("timeout", [-1.0, -0.001, float("nan"), float("-inf")])
def test_an_invalid_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="0 or more seconds, or None"):
        FileLocker(timeout)


def test_a_path_may_be_a_string_and_may_be_relative(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)

    with FileLocker(0).lock_exclusive("a.lock"):
        assert not is_free(path)
        assert FileLocker(0).try_lock_exclusive(str(path)) is None


def test_the_file_is_created_but_never_written_or_deleted(path: Path, workers: Workers) -> None:
    with FileLocker(0).lock_exclusive(path):
        assert path.read_bytes() == b""
    path.write_bytes(b"somebody's content")
    before = path.stat()

    with FileLocker(0).lock_exclusive(path):
        assert not others_get(workers, path)

    assert path.read_bytes() == b"somebody's content"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_locks_on_different_files_are_independent(scratch: Path) -> None:
    locker = FileLocker(0)

    guards = [locker.lock_exclusive(scratch / f"{number}.lock") for number in range(20)]

    assert locker.statistics().held_now == 20
    guards[7].release()
    assert [is_free(scratch / f"{number}.lock") for number in (6, 7, 8)] == [False, True, False]


# --- Releasing a lock ---------------------------------------------------------------------------------


@pytest.mark.req("FL-02")
def test_leaving_the_block_releases_the_lock(path: Path, workers: Workers) -> None:
    with FileLocker(0).lock_exclusive(path) as guard:
        assert not others_get(workers, path)

    assert not guard.held
    assert others_get(workers, path)


@pytest.mark.req("FL-02")
def test_an_exception_releases_the_lock_and_propagates(path: Path, workers: Workers) -> None:
    with pytest.raises(ZeroDivisionError), FileLocker(0).lock_exclusive(path):
        _ = 1 // 0

    assert others_get(workers, path)


@pytest.mark.req("FL-02")
def test_dropping_the_guard_releases_the_lock(path: Path, workers: Workers) -> None:
    locker = FileLocker(0)
    guard = locker.lock_exclusive(path)
    assert not others_get(workers, path)

    del guard

    assert others_get(workers, path)
    assert locker.statistics().held_now == 0


@pytest.mark.req("FL-02")
def test_a_guard_in_a_reference_cycle_releases_the_lock_when_it_is_collected(path: Path) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            self.guard = FileLocker(0).lock_exclusive(path)

    Cycle()

    gc.collect()
    assert is_free(path)


@pytest.mark.req("FL-02")
def test_a_lock_whose_guard_is_not_kept_is_free_at_once(path: Path) -> None:
    FileLocker(0).lock_exclusive(path)

    assert is_free(path)


@pytest.mark.req("FL-02")
def test_releasing_twice_is_harmless_and_frees_no_other_lock(path: Path, workers: Workers) -> None:
    locker = FileLocker(0)
    first = locker.lock_exclusive(path)
    first.release()
    second = locker.lock_exclusive(path)

    first.release()
    del first

    assert second.held
    assert not others_get(workers, path)


@pytest.mark.req("FL-02")
def test_the_kernel_releases_the_lock_of_a_killed_process(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)
    waiter = Caller(lambda: FileLocker(PATIENCE).lock_exclusive(path))
    wait_until_waiting(path)

    holder.kill()

    assert waiter.guard().held
    assert holder.wait() == -signal.SIGKILL


@pytest.mark.req("FL-02")
def test_a_stopped_process_keeps_its_lock(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)

    holder.stop()

    assert not is_free(path)
    holder.resume()
    assert holder.ask("go on") == "released"
    assert is_free(path)


@pytest.mark.req("FL-02")
def test_a_program_that_exits_with_live_guards_prints_nothing(path: Path) -> None:
    program = (
        "import sys\n"
        "from holdfast.locks.file_lock import FileLocker\n"
        "class Cycle: pass\n"
        "cycle = Cycle(); cycle.itself = cycle\n"
        f"cycle.guard = FileLocker(0).lock_shared({str(path)!r})\n"
        f"guard = FileLocker(0).lock_shared({str(path)!r})\n"
        "sys.modules['kept to the very end'] = cycle\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert is_free(path)


def test_the_repr_of_a_guard_shows_mode_path_and_state(path: Path) -> None:
    guard = FileLocker(0).lock_exclusive(path)
    assert repr(guard) == f"<LockGuard exclusive on {str(path)!r}, held>"
    guard.release()
    assert repr(guard) == f"<LockGuard exclusive on {str(path)!r}, released>"
    assert repr(FileLocker(0).lock_shared(path)).startswith("<LockGuard shared on")


def test_closing_a_locker_keeps_its_held_locks(path: Path, workers: Workers) -> None:
    locker = FileLocker(0)
    guard = locker.lock_exclusive(path)

    locker.close()

    assert guard.held
    assert not others_get(workers, path)
    guard.release()
    locker.close()
    if sys.platform == "linux":
        assert descriptors_of(path) == []


# --- Exclusion ----------------------------------------------------------------------------------------


@pytest.mark.req("FL-03")
@pairs
def test_exclusive_excludes_all_and_shared_excludes_exclusive_between_processes(
    pair: Pair, path: Path, workers: Workers
) -> None:
    holder, other = workers.start(obey(path)), workers.start(obey(path))
    assert holder.ask(("try", pair.held == "shared"))

    assert other.ask(("try", pair.wanted == "shared")) is pair.granted
    assert other.ask(("lock", pair.wanted == "shared", 0.01)) is pair.granted

    if not pair.granted:
        other.say(("lock", pair.wanted == "shared", PATIENCE))
        wait_until_waiting(path)
        holder.ask("release")
        assert other.hear() is True


@pytest.mark.req("FL-03")
@pairs
@pytest.mark.parametrize("one_locker", [True, False], ids=["one locker", "two lockers"])
def test_exclusive_excludes_all_and_shared_excludes_exclusive_between_threads(
    pair: Pair, one_locker: bool, path: Path
) -> None:
    first = FileLocker(PATIENCE)
    second = first if one_locker else FileLocker(PATIENCE)
    shared = pair.wanted == "shared"
    guard = Caller(lambda: first.acquire(path, shared=pair.held == "shared")).guard()

    tried = Caller(lambda: second.try_acquire(path, shared=shared)).result()

    assert (tried is not None) is pair.granted
    if not pair.granted:
        waiter = Caller(lambda: second.acquire(path, shared=shared))
        wait_until_waiting(path)
        guard.release()
        assert waiter.guard().held


@pytest.mark.req("FL-03")
def test_many_processes_and_threads_share_one_lock_at_the_same_time(path: Path, workers: Workers) -> None:
    sharing = [start_holding(workers, path, shared=True) for _ in range(5)]
    guards = [Caller(lambda: FileLocker(0).lock_shared(path)).guard() for _ in range(5)]
    assert all(guard.held for guard in guards)
    writer = workers.start(hold(path))
    wait_until_waiting(path)
    for worker in sharing[:-1]:
        assert worker.ask("go on") == "released"
    for guard in guards:
        guard.release()
    wait_until(lambda: waiting_for(path) == [writer.pid])  # one still shares it

    sharing[-1].say("go on")

    assert writer.hear() == "held"


@pytest.mark.req("FL-03")
def test_a_locker_used_by_many_threads_at_once_lets_in_one_at_a_time(path: Path) -> None:
    locker = FileLocker(PATIENCE)
    inside: list[int] = []
    most = 0

    def enter_often() -> None:
        nonlocal most
        for _ in range(100):
            with locker.lock_exclusive(path):
                inside.append(1)
                most = max(most, len(inside))
                time.sleep(0)
                inside.pop()

    for caller in [Caller(enter_often) for _ in range(8)]:
        caller.result()

    assert most == 1


# --- Timeout messages ---------------------------------------------------------------------------------


def timeout_of(path: Path, seconds: float, *, holders: int) -> LockTimeout:
    """The failure of a wait that times out and names `holders` holders.

    The kernel's list is read in pieces, so an entry may be missed on a busy machine with hundreds of locks.
    """
    for _ in range(100):
        with pytest.raises(LockTimeout) as caught:
            FileLocker(seconds).lock_exclusive(path)
        if len(caught.value.holders) == holders:
            break
    return caught.value


@linux_only
@pytest.mark.req("FL-04")
def test_a_timeout_names_the_path_the_time_and_the_holder(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)

    timeout = timeout_of(path, 0.05, holders=1)

    command = " ".join(sys.orig_argv)
    message = str(timeout)
    assert message.startswith(f"Lock timeout: could not acquire lock on {path} after 50ms; held by pid {holder.pid} (")
    assert command[:70] in message
    assert re.search(r"started (just now|\S+ ago)", message)
    assert timeout.path == str(path)
    assert timeout.timeout == 0.05
    [named] = timeout.holders
    assert (named["pid"], named["command"], named["shared"]) == (holder.pid, command, False)
    assert timeout.as_record()["holders"] == [named]


@linux_only
@pytest.mark.req("FL-04")
def test_a_timeout_names_every_holder_and_no_waiter(path: Path, workers: Workers) -> None:
    sharing = [start_holding(workers, path, shared=True) for _ in range(3)]
    workers.start(hold(path))
    wait_until_waiting(path)

    timeout = timeout_of(path, 0, holders=3)

    assert {each["pid"] for each in timeout.holders} == {worker.pid for worker in sharing}


@linux_only
@pytest.mark.req("FL-04")
def test_a_timeout_names_a_holder_that_is_another_program(path: Path) -> None:
    with other_program("flock", str(path), "cat") as program:
        wait_until(lambda: not is_free(path))

        [named] = timeout_of(path, 0, holders=1).holders

        assert named["pid"] == program.pid
        assert named["command"] == f"flock {path} cat"


@pytest.mark.req("FL-04")
@pytest.mark.parametrize(("timeout", "shown"), [(0.0, "0ms"), (0.001, "1ms"), (0.05, "50ms")])
def test_a_timeout_with_an_unknown_holder_still_names_the_path_and_the_time(
    timeout: float, shown: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_locks, "find_holders", lambda _: None)

    with flocked(path), pytest.raises(LockTimeout) as caught:
        FileLocker(timeout).lock_exclusive(path)

    assert str(caught.value) == f"Lock timeout: could not acquire lock on {path} after {shown}"
    assert caught.value.holders == []


# --- Other programs -----------------------------------------------------------------------------------


@contextlib.contextmanager
def other_program(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the end of the block, with an open pipe as its input."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]}(1) is not installed")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        try:
            yield program
        finally:
            program.kill()


def bare_flock(path: Path, *, shared: bool) -> Callable[[Line], None]:
    """Task for a worker: take a bare flock(2), without Holdfast, and report it."""

    def task(line: Line) -> None:
        with flocked(path, shared=shared):
            line.say("held")
            line.wait()

    return task


@pytest.mark.req("FL-05")
@pairs
def test_a_process_that_calls_flock_directly_excludes_us(pair: Pair, path: Path, workers: Workers) -> None:
    other = workers.start(bare_flock(path, shared=pair.held == "shared"))
    assert other.hear() == "held"
    shared = pair.wanted == "shared"

    assert (FileLocker(0).try_acquire(path, shared=shared) is not None) is pair.granted

    if not pair.granted:
        waiter = Caller(lambda: FileLocker(PATIENCE).acquire(path, shared=shared))
        wait_until_waiting(path)
        other.kill()
        assert waiter.guard().held


@pytest.mark.req("FL-05")
@pairs
def test_a_process_that_calls_flock_directly_is_excluded_by_us(pair: Pair, path: Path, workers: Workers) -> None:
    def try_flock(line: Line) -> None:
        try:
            with flocked(path, shared=pair.wanted == "shared"):
                line.say(True)
        except BlockingIOError:
            line.say(False)

    with FileLocker(0).acquire(path, shared=pair.held == "shared"):
        assert workers.start(try_flock).hear() is pair.granted
    assert workers.start(try_flock).hear() is True


@pytest.mark.req("FL-05")
@pairs
def test_the_flock_command_is_excluded_by_us(pair: Pair, path: Path) -> None:
    if shutil.which("flock") is None:
        pytest.skip("flock(1) is not installed")
    attempt = ["flock", "--nonblock", f"--{pair.wanted}", str(path), "true"]

    with FileLocker(0).acquire(path, shared=pair.held == "shared"):
        assert (subprocess.run(attempt).returncode == 0) is pair.granted
    assert subprocess.run(attempt).returncode == 0


@pytest.mark.req("FL-05")
@pairs
def test_the_flock_command_excludes_us(pair: Pair, path: Path) -> None:
    with other_program("flock", f"--{pair.held}", str(path), "-c", "echo held; exec cat") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"held\n"

        guard = FileLocker(0).try_acquire(path, shared=pair.wanted == "shared")

        assert (guard is not None) is pair.granted


# --- Kinds of errors ----------------------------------------------------------------------------------


@pytest.mark.req("FL-15")
def test_lock_timeout_too_many_retries_and_io_failure_are_distinct_errors() -> None:
    kinds = (LockTimeout, TooManyRetries, IoFailure)

    assert [kind.code for kind in kinds] == ["E_LOCK_TIMEOUT", "E_TOO_MANY_RETRIES", "E_IO"]
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)
    assert [kind.retryable for kind in kinds] == [True, True, False]
    assert [kind.exit_status for kind in kinds] == [
        ExitStatus.TIMED_OUT,
        ExitStatus.TIMED_OUT,
        ExitStatus.UNEXPECTED,
    ]


@pytest.mark.req("FL-15")
def test_a_lock_that_stays_held_raises_too_many_retries_after_the_last_attempt(path: Path) -> None:
    config = RetryConfig(max_attempts=3, initial_delay=0)
    locker = FileLocker(0.001)

    with flocked(path), pytest.raises(TooManyRetries) as caught:
        retry_with_backoff(config, lambda: locker.lock_exclusive(path))

    assert caught.value.attempts == 3
    assert isinstance(caught.value.__cause__, LockTimeout)
    assert locker.statistics().timed_out == 3


@pytest.mark.req("FL-15")
@pytest.mark.parametrize("take", [FileLocker.lock_exclusive, FileLocker.try_lock_shared])
def test_a_path_below_a_file_is_an_io_failure_that_names_the_path(take: Take, path: Path) -> None:
    path.write_bytes(b"")

    with pytest.raises(IoFailure) as caught:
        take(FileLocker(0), path / "below.lock")

    assert caught.value.code == "E_IO"
    assert caught.value.facts["errno"] == errno.ENOTDIR
    assert str(path / "below.lock") in str(caught.value)


@pytest.mark.req("FL-15")
@pytest.mark.parametrize("call", ["flock", "flock_interruptible"])
def test_a_lock_call_that_fails_is_an_io_failure_and_leaves_nothing_open(
    call: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> int:
        if call == "flock_interruptible":
            return errno.ENOLCK
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    locker = FileLocker(PATIENCE)
    with flocked(path):
        with monkeypatch.context() as patch:
            patch.setattr(calls, call, refuse)
            with pytest.raises(IoFailure, match=str(path)) as caught:
                locker.lock_exclusive(path)
        assert caught.value.facts["errno"] == errno.ENOLCK
        del caught
        gc.collect()
        if sys.platform == "linux":
            assert len(descriptors_of(path)) == 1, "only the holder may have the file open"
    assert locker.try_lock_exclusive(path) is not None


@pytest.mark.req("FL-15")
def test_a_missing_directory_is_not_found_and_the_hint_says_to_create_it(path: Path) -> None:
    with pytest.raises(NotFound, match="its directory does not exist") as caught:
        FileLocker(0).lock_exclusive(path / "a" / "b.lock")

    assert caught.value.hint == "Create the directory first."


def test_a_released_lock_cannot_be_entered_again(path: Path) -> None:
    with FileLocker(0).lock_exclusive(path) as guard:
        assert guard.held
    with pytest.raises(LockNotHeld), guard:
        raise AssertionError("the block ran without the lock")
