"""Helpers that run commands in their own processes and wait for the effects."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support import zygote

HOLDFAST = (sys.executable, "-m", "holdfast")
PATIENCE = 30.0
"""The timeout in seconds of every wait: a test fails instead of hanging. No result depends on the value."""

_OURS = ("HOLDFAST_", "AGENCY_", "JIT_", "XDG_", "_HOLDFAST", "COLUMNS")

Result = subprocess.CompletedProcess[str]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process without the variables that Holdfast reads, plus `extra`.

    The data directory stays that of the tests.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, "XDG_DATA_HOME": os.environ["XDG_DATA_HOME"], **(extra or {})}


def holdfast(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    as_child: bool = False,
) -> Result:
    """Run a command to completion in its own process, forked from one that has loaded all modules.

    With `as_child` a new interpreter starts as our direct child, for tests that depend on either.
    """
    words = [str(each) for each in arguments]
    if as_child or sys.platform == "win32":
        return subprocess.run(
            [*HOLDFAST, *words],
            input=stdin,
            capture_output=True,
            text=True,
            env=environment(env),
            cwd=cwd,
            timeout=PATIENCE,
        )
    status, out, err = zygote.run(words, env=environment(env), cwd=cwd, stdin=stdin, timeout=PATIENCE)
    return Result([*HOLDFAST, *words], status, out, err)


def on_a_terminal(*arguments: str | Path, columns: int, cwd: Path | None = None, **env: str) -> str:
    """The output of a command on a terminal of this width."""
    import pty

    main, terminal = pty.openpty()
    with subprocess.Popen(
        [*HOLDFAST, *map(str, arguments)],
        stdout=terminal,
        stderr=terminal,
        cwd=cwd,
        env=environment({"TERM": "xterm", "COLUMNS": str(columns), **env}),
    ):
        os.close(terminal)
        drawn = b""
        with os.fdopen(main, "rb", buffering=0) as screen, contextlib.suppress(OSError):
            while part := screen.read(4096):
                drawn += part
    return drawn.decode()


def python(program: str) -> list[str]:
    """The command line that runs a Python program."""
    return [sys.executable, "-c", program]


def envelope(text: str) -> Any:
    """Parse the output of a command, which must be a single JSON line."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return json.loads(lines[0])


def error(result: Result, *, on: str = "stdout") -> Any:
    """The error in the envelope that a command printed."""
    content = envelope(result.stdout if on == "stdout" else result.stderr)
    assert content["schema_version"] == 1
    assert content["ok"] is False
    return content["error"]


def data(result: Result) -> Any:
    """The data in the envelope that a command printed."""
    content = envelope(result.stdout)
    assert content["schema_version"] == 1
    assert content["ok"] is True, content
    return content["data"]


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds, and leave most of the time to what it waits for: it may run a command."""
    began = time.monotonic()
    deadline = began + PATIENCE
    while not condition():
        now = time.monotonic()
        assert now < deadline, "timed out waiting for the condition"
        time.sleep(max(0.01, 2 * (now - began)))
        began = time.monotonic()


def wait_until_idle(pid: int) -> None:
    """Wait until a process sleeps and uses no more CPU time, so that a signal reaches it while it waits and not
    before."""
    process, before = psutil.Process(pid), (-1.0, -1.0)
    while (now := process.cpu_times()[:2]) != before or process.status() != psutil.STATUS_SLEEPING:
        before = now
        time.sleep(0.1)


def stop_between_commits(pid: int) -> None:
    """Stop a process while it holds no file lock: stopped in the middle of a commit, it would block other writers."""
    process = psutil.Process(pid)
    while True:
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        if all(
            line.split()[4] != str(pid) for line in Path("/proc/locks").read_text().splitlines() if "->" not in line
        ):
            return
        process.resume()
        time.sleep(0.01)


class Running:
    """A command in the background. Leaving the block kills it if it still runs.

    Like `holdfast`, it is forked; with `as_child`, `before_exec` or `pass_fds`, a new interpreter starts as our direct
    child.
    """

    process: zygote.Forked | subprocess.Popen[str]

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        as_child: bool = False,
        before_exec: Callable[[], object] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        words = [str(each) for each in arguments]
        if not (as_child or before_exec or pass_fds or sys.platform == "win32"):
            self.process = zygote.Forked(words, env=environment(env))
            return
        self.process = subprocess.Popen(
            [*HOLDFAST, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(env),
            preexec_fn=before_exec,  # noqa: PLW1509 (there are no other threads)
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """Read the next line of its standard output; "" at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def send(self, number: int) -> None:
        """Send a signal to this process only, not to its children."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill this process only, not its children."""
        self.process.kill()

    def finish(self) -> Result:
        """Close its standard input and wait for it to exit."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return Result(self.process.args, self.process.wait(), out, err)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE)


UNTIL_STDIN_ENDS = ["sh", "-c", "echo running; exec cat > /dev/null"]


class FileLockHeld(Running):
    """A process that holds a file lock until the end of the block."""

    def __init__(self, path: Path, *options: str, as_child: bool = False) -> None:
        super().__init__("lock", "run", path, *options, "--", *UNTIL_STDIN_ENDS, as_child=as_child)
        assert self.hear() == "running"


class RepoLockHeld(Running):
    """A process that holds a repo lock until the end of the block."""

    def __init__(self, data_dir: Path, repo_id: str, *options: str) -> None:
        place = ("--data-dir", str(data_dir))
        super().__init__("repo-lock", "run", repo_id, *place, *options, "--", *UNTIL_STDIN_ENDS)
        assert self.hear() == "running"


LISTENING = """
import os, select, signal
bell, ring = os.pipe()
os.set_blocking(ring, False)
signal.set_wakeup_fd(ring)
for name in "HUP INT QUIT TERM USR1 USR2".split():
    signal.signal(getattr(signal, "SIG" + name), lambda *_: None)
print("running", flush=True)
while True:
    ready = select.select([0, bell], [], [])[0]
    for number in os.read(bell, 99) if bell in ready else b"":
        print(signal.Signals(number).name, flush=True)
    if 0 in ready and not os.read(0, 1): break
"""
"""A program that prints each signal it receives, until its standard input ends.

It waits for signals and input with one `select`: a signal just before a plain `read` would be printed only after it.
"""


def is_gone(pid: int) -> bool:
    """Whether the process does not exist or is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def died_of(result: Result) -> signal.Signals | None:
    """The signal that killed a command, or None."""
    return signal.Signals(-result.returncode) if result.returncode < 0 else None
