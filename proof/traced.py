"""Programs that die at one of their own system calls, together with every process that they have started.

A sweep with `proof.crash` kills our process. `Doomed` also kills a program that ours has started, which writes without
`holdfast.fs.calls`: it is traced (`ptrace`), and killed when it is about to make its n-th call that changes the disk.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any

IS_POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether this system has the calls, and the numbers, that the module uses."""

_SYSCALL, _SEIZE, _SYSCALL_INFO = 24, 0x4206, 0x420E
_SUBREAPER = 36
_GOOD, _FORK, _VFORK, _CLONE, _EXITKILL = 1, 2, 4, 8, 1 << 20
_NOTHREAD, _WALL = 0x20000000, 0x40000000
_INFO = struct.Struct("=B3xIQQ7Q")  # kind, architecture, two pointers; at an entry: the number and six arguments
_ENTRY = 1
_WHEN_TRACED = ("/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh")
_AT_CALL = signal.SIGTRAP | 0x80
_WRITES = (1, 18, 20)  # write, pwrite64, writev
_OPENS = {2: 1, 257: 2}  # open, openat: the argument with the flags
_CHANGES = {77, 82, 83, 84, 85, 86, 87, 88, 258, 263, 264, 265, 266, 316}  # truncate, rename, mkdir, link, unlink ...


class Doomed:
    """Takes the place of `subprocess.run` for one program, which dies at its call `number` that changes the disk.

    `died` tells whether it did; if it makes fewer such calls, it ends as it does without us.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.died = False
        self._trace = ctypes.CDLL(None, use_errno=True).ptrace
        self._trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._trace.restype = ctypes.c_long

    def run(
        self, command: list[str], *, input: bytes, capture_output: bool, check: bool, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        assert capture_output
        assert not check
        with TemporaryFile() as source, TemporaryFile() as output, TemporaryFile() as errors:
            source.write(input)
            source.seek(0)
            options |= {"stdin": source, "stdout": output, "stderr": errors}
            process = subprocess.Popen([*_WHEN_TRACED, *command], **options)
            process.returncode = self._follow(process.pid)
            for each in (output, errors):
                each.seek(0)
            return subprocess.CompletedProcess(command, process.returncode, output.read(), errors.read())

    def _follow(self, first: int) -> int:
        """Let all processes of the program run from call to call; return the exit status of the first one."""
        os.waitpid(first, os.WUNTRACED)
        assert self._trace(_SEIZE, first, None, _GOOD | _FORK | _VFORK | _CLONE | _EXITKILL) == 0, "cannot trace it"
        os.kill(first, signal.SIGCONT)
        living, result = {first}, 0
        while living:
            process, status = os.waitpid(-1, _WALL | _NOTHREAD)
            if not os.WIFSTOPPED(status):
                living.discard(process)
                result = os.waitstatus_to_exitcode(status) if process == first else result
                continue
            passed_on = 0
            if os.WSTOPSIG(status) == _AT_CALL:
                self._count(process, living)
            elif process not in living:
                living.add(process)  # it begins with a stop
            elif status >> 16 == 0:  # a signal, not an event
                passed_on = os.WSTOPSIG(status)
            self._trace(_SYSCALL, process, None, passed_on)
        return result

    def _count(self, process: int, living: set[int]) -> None:
        """Kill everything if the process is about to make the call."""
        if self.died or not self._changes_the_disk(process):
            return
        self.left -= 1
        if self.left == 0:
            self.died = True
            for each in living:
                os.kill(each, signal.SIGKILL)

    def _changes_the_disk(self, process: int) -> bool:
        room = ctypes.create_string_buffer(_INFO.size)
        self._trace(_SYSCALL_INFO, process, _INFO.size, ctypes.addressof(room))
        kind, _, _, _, call, *arguments = _INFO.unpack(room.raw)
        if kind != _ENTRY:
            return False
        if call in _OPENS:
            return bool(arguments[_OPENS[call]] & os.O_CREAT)
        return call in _CHANGES or (call in _WRITES and arguments[0] > 2)


@contextmanager
def orphans_are_ours() -> Iterator[None]:
    """Within the block, a process whose parent has ended becomes a child of this one, which can wait for it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def end_of_group(leader: int, *, kill: bool = True) -> int:
    """Wait for a child, kill all others of the process group that it leads, and wait for their end too; return the
    exit status of the child. Without `kill`, the others end by themselves."""
    status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    with suppress(ProcessLookupError):
        if kill:
            os.killpg(leader, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-leader, 0)
    return status
