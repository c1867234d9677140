"""Running the checker of a gate: a command with a time limit, its whole process group killed at the limit.

No lock is held meanwhile. Of what it prints the end is kept. Whatever it leaves running in its group is
killed when it ends, so that a gate never leaves anything behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from holdfast.errors import PathEscape
from holdfast.fs import calls
from holdfast.fs.names import split_relative
from holdfast.issues.records import Checker

MOST_OUTPUT = 256 << 10
"""How many bytes are kept of each of its outputs: the last ones."""

_LAST_WORDS = 2.0
"""How long to wait for the output of something that got away from its process group."""


class Outcome(NamedTuple):
    """How a checker ended. `exit_code` is None if it did not end by itself."""

    passed: bool
    exit_code: int | None
    message: str | None
    stdout: str
    stderr: str
    seconds: float


def run_checker(checker: Checker, root: Path, environment: Mapping[str, str]) -> Outcome:
    """Run it to its end, or to its limit."""
    directory = root
    if checker.working_dir:
        try:
            directory = root.joinpath(*split_relative(checker.working_dir.removeprefix("./").rstrip("/")))
        except PathEscape as failure:
            return Outcome(False, None, f"its working directory is refused: {failure.message}", "", "", 0.0)
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", checker.command] if sys.platform != "win32" else checker.command,
            shell=sys.platform == "win32",
            cwd=directory,
            env={**environment, **checker.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=sys.platform != "win32",
        )
    except OSError as error:
        return Outcome(False, None, f"it could not be started: {error.strerror}", "", "", 0.0)
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = [_Output(process.stdout), _Output(process.stderr)]
    message = None
    try:
        process.wait(checker.timeout)
    except subprocess.TimeoutExpired:
        message = f"it was killed after its {checker.timeout:g} s"
    finally:
        _kill_group(process)
    seconds = time.monotonic() - began
    stdout, stderr = (each.text() for each in outputs)
    code = process.returncode
    if message is None and code < 0:
        message = f"it was ended by the signal {-code}"
    own = code if message is None else None
    return Outcome(own == 0, own, message, stdout, stderr, seconds)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and everything that it has started and not set free."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its group outlives it as long as somebody is in it
    process.wait()


class _Output:
    """Reads one output in the background and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._dropped = 0
        self._reader = threading.Thread(target=self._read, name="holdfast-checker", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while block := calls.read(self._stream.fileno(), 1 << 16):
                kept = self._kept + block
                self._dropped += max(0, len(kept) - MOST_OUTPUT)
                self._kept = kept[-MOST_OUTPUT:]

    def text(self) -> str:
        """What was kept, as text that can be stored."""
        self._reader.join(_LAST_WORDS)
        if not self._reader.is_alive():
            self._stream.close()
        text = self._kept.decode("utf-8", "backslashreplace")
        return f"[{self._dropped} bytes left out]\n{text}" if self._dropped else text
