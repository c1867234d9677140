"""Signals: the command gets each signal once, and `run` ends the way the command ended."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import FileLocker
from holdfast.cli import child
from holdfast.cli.child import Periodic
from tests.cli.commands import (
    HOLDFAST,
    LISTENING,
    FileLockHeld,
    Running,
    died_of,
    envelope,
    environment,
    error,
    is_gone,
    python,
    wait_until,
)

if sys.platform == "win32":
    pytest.skip("Windows has no such signals", allow_module_level=True)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do or show this")

ALL = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture
def lock(scratch: Path) -> Path:
    return scratch / "a.lock"


def run_listening(lock: Path, *, before_exec: Callable[[], object] | None = None) -> Running:
    """Start a command under the lock that prints the signals it receives."""
    running = Running("lock", "run", lock, "--json", "--", *python(LISTENING), before_exec=before_exec)
    assert running.hear() == "running"
    return running


@pytest.mark.parametrize("number", ALL, ids=lambda number: number.name)
def test_a_signal_is_forwarded_to_the_command_once(lock: Path, number: signal.Signals) -> None:
    with run_listening(lock) as command:
        command.send(number)
        assert command.hear() == number.name
        result = command.finish()

    assert (result.returncode, result.stdout) == (0, "")
    assert envelope(result.stderr)["data"]["exit_status"] == 0


def test_any_number_of_signals_is_forwarded(lock: Path) -> None:
    with run_listening(lock) as command:
        for _ in range(20):
            command.send(signal.SIGUSR1)
            assert command.hear() == "SIGUSR1"
        assert command.finish().stdout == ""


@linux_only
def test_a_signal_is_forwarded_to_a_command_that_had_to_wait_for_its_lock(lock: Path) -> None:
    quick = ("/bin/sh", "-c", "trap 'exit 3' TERM; echo running; while :; do sleep 0.01; done")
    with (
        FileLockHeld(lock) as holder,
        Running("lock", "run", lock, "--wait", "30s", "--", *quick) as command,
    ):
        wait_until(lambda: _waits_for(lock, command.pid))
        holder.finish()
        assert command.hear() == "running"
        command.send(signal.SIGTERM)
        assert command.finish().returncode == 3


def _waits_for(lock: Path, pid: int) -> bool:
    """Whether the kernel lists the process as a waiter for the lock."""
    inode = f":{lock.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line and inode in line for line in lines)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not report the sender of a signal")
def test_the_interrupt_key_reaches_the_command_once(lock: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable,
            [*HOLDFAST, "lock", "run", str(lock), "--", *python(LISTENING)],
            environment(),
        )
    try:
        with os.fdopen(terminal, "r+b", buffering=0) as screen:
            lines = _lines(screen.fileno())
            assert next(lines) == "running"
            screen.write(b"\x03")
            assert next(lines).removeprefix("^C") == "SIGINT"
            # A duplicate of the first signal would arrive before this one.
            os.kill(pid, signal.SIGUSR1)
            assert next(lines) == "SIGUSR1"
            screen.write(b"\x1c")
            assert next(lines).removeprefix("^\\") == "SIGQUIT"
            screen.write(b"\n\x04")
            assert list(lines) == [""]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def _lines(terminal: int) -> Iterator[str]:
    """The lines that appear on a terminal until its other end is closed."""
    text = b""
    while True:
        while b"\n" in text:
            line, _, text = text.partition(b"\n")
            yield line.decode().strip("\r")
        try:
            more = os.read(terminal, 4096)
        except OSError:  # the end of input on Linux
            return
        if not more:
            return
        text += more


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV])
def test_run_dies_of_the_signal_that_killed_the_command_leaving_no_core_and_no_lock(
    lock: Path, tmp_path: Path, number: signal.Signals
) -> None:
    def allow_a_core_here() -> None:
        os.chdir(tmp_path)
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))

    program = ("/bin/sh", "-c", f"ulimit -c 0; kill -{int(number)} $$")
    arguments = ("lock", "run", str(lock), "--json", "--", *program)
    with Running(*arguments, before_exec=allow_a_core_here) as command:
        result = command.finish()

    assert died_of(result) is number
    assert envelope(result.stderr)["data"]["signal"] == number.name
    assert envelope(result.stderr)["data"]["exit_status"] is None
    assert list(tmp_path.iterdir()) == []
    assert FileLocker(0.0).try_lock_exclusive(lock)


@linux_only
@pytest.mark.req("FL-02")
def test_killing_run_kills_its_command_and_frees_the_lock(lock: Path) -> None:
    program = python("import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    with Running("lock", "run", lock, "--", *program) as command:
        child_pid = int(command.hear())
        command.send(signal.SIGKILL)
        assert died_of(command.finish()) is signal.SIGKILL

    wait_until(lambda: is_gone(child_pid))
    assert FileLocker(0.0).try_lock_exclusive(lock)


def ignore(number: int) -> Callable[[], object]:
    """Ignore a signal, as `nohup` does with SIGHUP."""
    return lambda: signal.signal(number, signal.SIG_IGN)


def block(number: int) -> Callable[[], object]:
    return lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [number])


def signals_of_a_command(lock: Path, field: str, before_exec: Callable[[], object] | None) -> set[int]:
    """The signals that are blocked (`SigBlk`) or ignored (`SigIgn`) when a command starts."""
    command_line = ("grep", field, "/proc/self/status")  # a shell or Python would change them
    with Running("lock", "run", lock, "--", *command_line, before_exec=before_exec) as command:
        bits = int(command.finish().stdout.split()[1], 16)
    return {number for number in range(1, 32) if bits & 1 << (number - 1)}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
@pytest.mark.parametrize(
    ("field", "before_exec", "found"),
    [
        ("SigBlk", None, set()),
        ("SigBlk", block(signal.SIGUSR1), {signal.SIGUSR1}),
        ("SigIgn", None, set()),
        ("SigIgn", ignore(signal.SIGHUP), {signal.SIGHUP}),
    ],
    ids=["none blocked", "blocked before", "none ignored", "ignored before"],
)
def test_the_command_finds_its_signals_as_the_caller_left_them(
    lock: Path, field: str, before_exec: Callable[[], object] | None, found: set[int]
) -> None:
    assert signals_of_a_command(lock, field, before_exec) == found


def test_the_exit_status_of_the_command_is_known_even_if_sigchld_was_ignored(lock: Path) -> None:
    program = python("raise SystemExit(7)")
    with Running("lock", "run", lock, "--", *program, before_exec=ignore(signal.SIGCHLD)) as command:
        assert command.finish().returncode == 7


@linux_only
def test_an_interrupt_while_waiting_exits_with_130(lock: Path) -> None:
    waiting = ("lock", "run", lock, "--wait", "forever", "--json", "--", "true")
    with FileLockHeld(lock), Running(*waiting) as command:
        wait_until(lambda: _waits_for(lock, command.pid))
        command.send(signal.SIGINT)
        result = command.finish()

    assert result.returncode == 130
    assert error(result, on="stderr")["code"] == "E_INTERRUPTED"


# --- A periodic check that fails --------------------------------------------------------------------


class Lost(Exception):
    """The failure of a check."""


def test_a_command_is_terminated_when_the_check_fails(tmp_path: Path) -> None:
    program = python(
        "import signal, sys, pathlib, time\n"
        f"note = pathlib.Path({str(tmp_path / 'note')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (note.write_text('asked to end'), sys.exit()))\n"
        "note.write_text('ready')\n"
        "time.sleep(1000)"
    )

    def fail_when_ready() -> None:
        if (tmp_path / "note").exists() and (tmp_path / "note").read_text() == "ready":
            raise Lost

    with pytest.raises(Lost):
        child.run(program, check=Periodic(0.01, fail_when_ready))

    assert (tmp_path / "note").read_text() == "asked to end"


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE", 0.1)
    program = python(
        "import os, signal, pathlib, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()) + ' ')\n"
        "time.sleep(1000)"
    )

    def fail_when_ready() -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" "):
            raise Lost

    with pytest.raises(Lost):
        child.run(program, check=Periodic(0.01, fail_when_ready))

    assert is_gone(int((tmp_path / "pid").read_text()))


def test_the_signal_mask_is_restored_when_the_command_ends() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child.run(["true"])

    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


TAKEN = """
import os, subprocess, threading, time
from holdfast.cli import child

ended, poll = threading.Event(), subprocess.Popen.poll

def slow_poll(process):
    code = poll(process)
    if code is None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it ends
        time.sleep(0.1)  # the other thread takes the signal
    return code

subprocess.Popen.poll = slow_poll
threading.Thread(target=ended.wait).start()
assert child.run(["true"]).exit_status == 0
ended.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it waits for the process itself")
def test_the_end_of_a_command_is_noticed_although_another_thread_takes_the_signal() -> None:
    """A thread of a library may not block signals. Then the kernel may give it the SIGCHLD before we wait for it."""
    assert subprocess.run(python(TAKEN), timeout=60, env=environment()).returncode == 0
