"""Run commands without interpreter start-up: one process loads everything and forks for each command.

Each command is still a separate process, with its own environment, directory and standard streams. Only its parent
differs: the zygote, which ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from proof.forked import exit_with

_SERVE = "from tests.support.zygote import serve; serve()"
_running: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
_starting = threading.Lock()


def run(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, stdin: str, timeout: float
) -> tuple[int, str, str]:
    """Run `holdfast` to completion and return its exit status, as `subprocess` reports it, and its output."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin.encode())
        given.seek(0)
        with _order(arguments, env, cwd, [given.fileno(), out.fileno(), err.fileno()]) as reply:
            reply.recv(64)
            reply.settimeout(timeout)
            status = int(reply.recv(64))
        out.seek(0)
        err.seek(0)
        return status, out.read().decode(), err.read().decode()


class Forked:
    """A command in the background with pipes as its standard streams, like `subprocess.Popen`, but forked."""

    def __init__(self, arguments: Sequence[str], *, env: Mapping[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.args = list(arguments)
        self.returncode: int | None = None
        self.stdin = open(pipes[0][1], "w")  # noqa: SIM115 (closed by `communicate`)
        self.stdout, self.stderr = (open(pipe[0]) for pipe in pipes[1:])  # noqa: SIM115
        try:
            self._reply = _order(arguments, env, None, theirs)
        finally:
            for each in theirs:
                os.close(each)
        self.pid = int(self._reply.recv(64))

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with contextlib.suppress(TimeoutError):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `TimeoutError` if it has not ended in time."""
        if self.returncode is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise TimeoutError(f"{self.args} still runs")
            self.returncode = int(self._reply.recv(64))
            self._reply.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close its standard input and return the rest of its output when it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        found: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: found.update({name: _rest(stream)}), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
        ]
        for each in readers:
            each.start()
        for each in readers:
            each.join(timeout)
        if any(each.is_alive() for each in readers):
            state = "still runs" if self.poll() is None else "has ended, but something else has its output open"
            raise TimeoutError(f"{self.args} {state} after {timeout} s; its output so far: {found}")
        self.wait(timeout)
        return found["out"], found["err"]


def _rest(stream: TextIO) -> str:
    if stream.closed:
        return ""
    with stream:
        return stream.read()


def _order(arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None, streams: Sequence[int]) -> socket.socket:
    """Have a command started. The result says its process ID, and when it has ended, its exit status."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    order = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or os.getcwd())})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(_connected(), [order.encode()], [*streams, theirs.fileno()])
    return ours


def _connected() -> socket.socket:
    """The connection to the zygote of this process, which starts on demand."""
    with _starting:
        return _start_if_needed()


def _start_if_needed() -> socket.socket:
    global _running
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    if _running is None or _running[0] != os.getpid() or _running[1].poll() is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVE], stdin=theirs.fileno(), cwd=Path(__file__).parents[2]
            )
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        _running = (os.getpid(), process, ours)
        atexit.register(_end, *_running)
    return _running[2]


def _end(parent: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """End the zygote of this process; one that a parent has started stays."""
    if parent == os.getpid():
        connection.close()
        process.wait()


def serve() -> None:
    """Be the zygote: fork for each order until the other end closes the connection."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    _load_everything()
    connection = socket.socket(fileno=os.dup(0))
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    running: dict[int, int] = {}  # where to report the end of each command
    while True:
        ready = select.select([connection.fileno(), bell], [], [])[0]
        if bell in ready:
            os.read(bell, 4096)
            _report(running)
        if connection.fileno() in ready:
            order, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 4)
            if not order:
                return
            *streams, reply = descriptors
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (bell, ring, reply, connection.fileno(), *running.values()):
                    os.close(each)
                _become(json.loads(order), streams)
            os.write(reply, b"%d" % child)
            running[child] = reply
            for each in streams:
                os.close(each)


def _load_everything() -> None:
    import pkgutil
    from importlib import import_module

    import holdfast

    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.startswith(("holdfast.mcp.", "holdfast.testing.")):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                import_module(module.name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def _report(running: dict[int, int]) -> None:
    """Report each command that has ended to its caller."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    for child in list(running):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            reply = running.pop(child)
            with contextlib.suppress(OSError):
                os.write(reply, b"%d" % os.waitstatus_to_exitcode(status))
            os.close(reply)


def _become(order: Mapping[str, object], streams: Sequence[int]) -> None:
    """Run the command in this process; never returns."""

    def live() -> object:
        for number, each in enumerate(streams):
            os.dup2(each, number)
            os.close(each)
        os.environ.clear()
        os.environ.update(order["env"])  # type: ignore[call-overload]
        os.chdir(str(order["cwd"]))
        sys.argv = ["holdfast", *order["arguments"]]  # type: ignore[misc]
        from holdfast.__main__ import main

        return main()

    exit_with(live)
