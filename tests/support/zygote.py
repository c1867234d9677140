"""Run commands without interpreter start-up: one process loads everything and forks for each command.

Each command is still a separate process, with its own environment, directory and standard streams. Only its parent
differs: the zygote, which ends with the process that started it.
"""

from __future__ import annotations

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

from proof.forked import exit_with

_SERVE = "from tests.support.zygote import serve; serve()"
_running: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
_starting = threading.Lock()


def run(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, stdin: str, timeout: float
) -> tuple[int, str, str]:
    """Run `holdfast` to completion and return its exit status, as `subprocess` reports it, and its output."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin.encode())
        given.seek(0)
        order = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or os.getcwd())})
        ours, theirs = socket.socketpair()
        with ours, theirs:
            streams = [given.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(_connected(), [order.encode()], streams)
            theirs.close()
            ours.settimeout(timeout)
            status = int(ours.recv(64))
        out.seek(0)
        err.seek(0)
        return status, out.read().decode(), err.read().decode()


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
    return _running[2]


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
