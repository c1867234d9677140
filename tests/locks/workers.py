"""Worker processes for tests: they follow instructions, and can be stopped and killed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any, NamedTuple, NoReturn, Self

PATIENCE = 60.0
"""Seconds that anything may take before the test fails instead of hanging; no result depends on the value."""


class Silent(AssertionError):
    """The other end said nothing in time."""


class Line:
    """One end of the connection between a test and a worker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, message: object) -> None:
        """Send a message to the other end."""
        self._connection.send(message)

    def hear(self) -> Any:
        """Wait for the next message; EOFError if the other end has closed."""
        if not self._connection.poll(PATIENCE):
            raise Silent(f"no message arrived within {PATIENCE:.0f} s")
        message = self._connection.recv()
        if isinstance(message, _Raised):
            raise AssertionError(f"the worker failed:\n{message.trace}")
        return message

    def wait(self) -> Any:
        """Like `hear`, but without a timeout: for a worker, which ends with its test."""
        return self._connection.recv()

    def has_news(self) -> bool:
        """Whether a message is waiting, or the other end has closed."""
        return self._connection.poll(0)

    def close(self) -> None:
        self._connection.close()


class _Raised(NamedTuple):
    trace: str


Task = Callable[[Line], object]


class Worker:
    """A forked process that runs a task with one end of a connection; the other end is `line`."""

    pid: int
    line: Line
    _stacks: IO[bytes]

    def __init__(self, task: Task) -> None:
        if sys.platform == "win32":
            raise NotImplementedError("there is no fork on Windows")
        self._status: int | None = None
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it has ended
        here, there = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a watcher thread may still be ending
            self.pid = os.fork()
        if self.pid == 0:
            here.close()
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)
            _work(task, Line(there))
        there.close()
        self.line = Line(here)

    def say(self, message: object) -> None:
        """Send a message to the worker."""
        self.line.say(message)

    def hear(self) -> Any:
        """Wait for the worker's next message."""
        try:
            return self.line.hear()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the worker ended with {self.wait()}") from None
        except Silent as silent:
            raise AssertionError(f"{silent}; the worker is here:\n{self.stacks()}") from None

    def stacks(self) -> str:
        """Where the threads of the worker are now."""
        if sys.platform != "win32":
            os.kill(self.pid, signal.SIGUSR1)
        end = time.monotonic() + 5.0
        while os.fstat(self._stacks.fileno()).st_size == 0 and time.monotonic() < end:
            time.sleep(0.01)
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def ask(self, message: object) -> Any:
        """Send a message to the worker and wait for the answer."""
        with contextlib.suppress(BrokenPipeError):  # its last message says why it ended
            self.say(message)
        return self.hear()

    def kill(self) -> None:
        """Kill the worker with SIGKILL; it is a zombie until `wait`."""
        if sys.platform != "win32" and self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the worker with SIGSTOP, wherever it is."""
        if sys.platform != "win32":
            os.kill(self.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        """Wait until the worker has stopped, or has stopped itself."""
        if sys.platform != "win32":
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), f"the worker did not stop but ended: {status}"

    def resume(self) -> None:
        if sys.platform != "win32" and self._status is None:
            os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> int:
        """Wait until the worker has ended; returns its exit status, negative for a signal. Can be repeated."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._stacks.close()
        return self._status


class Workers:
    """The workers of one test, killed at its end."""

    def __init__(self) -> None:
        self._all: list[Worker] = []

    def start(self, task: Task) -> Worker:
        worker = Worker(task)
        self._all.append(worker)
        return worker

    def start_many(self, count: int, task: Task) -> list[Worker]:
        """Start `count` workers with the same task."""
        return [self.start(task) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._all:
            worker.kill()
            worker.wait()
            worker.line.close()


def stop_myself() -> None:
    """In a worker: stop here until the test resumes it."""
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; fail the test if it never does."""
    began = time.monotonic()
    end = began + PATIENCE
    while not condition():
        now = time.monotonic()
        assert now < end, "timed out waiting for the condition"
        time.sleep(max(0.001, 2 * (now - began)))  # leaves most of the time to what it waits for
        began = time.monotonic()


def _work(task: Task, line: Line) -> NoReturn:
    """Run the task in the worker, and never return into the code of the test."""
    status = 1
    try:
        random.seed(os.getpid())
        task(line)
        status = 0
    except EOFError:
        pass  # the test is over
    except BaseException:
        with contextlib.suppress(OSError):
            line.say(_Raised(traceback.format_exc()))
    finally:
        os._exit(status)
