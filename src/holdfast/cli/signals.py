"""Signals between us and the command that we run: each reaches it once, and none is lost.

What a process sends to us goes on to the command. A Ctrl-C is different: the terminal has sent it to
the command already, and sending it on would make it two. Where the kernel says who sent a signal
(`sigwaitinfo`: everywhere but on macOS and Windows), only what came from a process is passed on.
Elsewhere it is a guess: while we are in the terminal's foreground, a SIGINT or SIGQUIT came from there.

A signal that was sent to our whole process group (`kill -TERM -PGID`) looks like one that was sent to
us alone: that one does reach the command twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.fs import calls

Child = subprocess.Popen[bytes]

FORWARDED = frozenset(
    number
    for name in "SIGHUP SIGINT SIGQUIT SIGTERM SIGUSR1 SIGUSR2 SIGALRM SIGWINCH SIGPWR".split()
    if (number := getattr(signal, name, None)) is not None
)


class Duty(NamedTuple):
    """Something to do every so often while a command runs; if it raises, the command is ended."""

    every: float
    do: Callable[[], object]


if sys.platform == "win32":

    @contextlib.contextmanager
    def kept_back() -> Iterator[frozenset[int]]:
        """A Ctrl-C reaches every process at the console: the command acts on it, we wait for that."""
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield frozenset()
        finally:
            signal.signal(signal.SIGINT, before)

    def before_exec(mask: frozenset[int]) -> Callable[[], None] | None:
        """Nothing has to be done in the child: it is not a copy of us."""
        return None

else:

    @contextlib.contextmanager
    def kept_back() -> Iterator[frozenset[int]]:
        """Block the signals that concern us, from before the command exists until its end is known.

        Yields what was blocked before, which is what the command is to inherit.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, exit statuses are lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
        try:
            yield frozenset(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def before_exec(mask: frozenset[int]) -> Callable[[], None] | None:
        """What the child has to do before it becomes the command: die with us, and listen again."""
        parent = os.getpid()
        if sys.platform == "linux":
            from holdfast.fs.native import die_with_parent

        def prepare() -> None:
            if sys.platform == "linux":
                die_with_parent()
                if os.getppid() != parent:  # it died before we could ask for that
                    os.kill(os.getpid(), signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(signal.getsignal(number)):  # ours: what it does is not for the command
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        return prepare


if sys.platform == "win32":

    def attend(child: Child, duty: Duty | None) -> int:
        """Wait for the child, doing the duty meanwhile; return its code."""
        return _wait(child, duty)

elif sys.platform == "darwin":

    def attend(child: Child, duty: Duty | None) -> int:
        """Wait for the child, forwarding signals and doing the duty meanwhile; return its code."""

        def forward(number: int, frame: object) -> None:
            if number not in (signal.SIGINT, signal.SIGQUIT) or not _in_foreground():
                child.send_signal(number)

        before = {each: signal.getsignal(each) for each in FORWARDED}
        wanted = [each for each in FORWARDED if before[each] is not signal.SIG_IGN]
        for each in wanted:
            signal.signal(each, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            return _wait(child, duty)
        finally:
            for each in wanted:
                signal.signal(each, before[each])

    def _in_foreground() -> bool:
        """Whether the keys of the terminal reach our process group."""
        try:
            terminal = calls.open("/dev/tty", os.O_RDONLY)
        except OSError:
            return False
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        except OSError:
            return False
        finally:
            calls.close(terminal)

else:

    def attend(child: Child, duty: Duty | None) -> int:
        """Wait for the child, forwarding signals and doing the duty meanwhile; return its code."""
        due = time.monotonic() + duty.every if duty else None
        while (code := child.poll()) is None:
            arrived = _next_signal(due)
            if arrived and arrived.si_signo in FORWARDED and not _reached_already(child, arrived):
                child.send_signal(arrived.si_signo)
            if duty and due is not None and time.monotonic() >= due:
                duty.do()
                due = time.monotonic() + duty.every
        while signal.sigtimedwait(FORWARDED, 0):  # too late for the child, and not meant for us
            pass
        return code

    def _next_signal(due: float | None) -> signal.struct_siginfo | None:
        """Wait for the next of the signals that are kept back; None if `due` comes first."""
        watched = FORWARDED | {signal.SIGCHLD}
        if due is None:
            return signal.sigwaitinfo(watched)
        return signal.sigtimedwait(watched, max(0.0, due - time.monotonic()))

    def _reached_already(child: Child, arrived: signal.struct_siginfo) -> bool:
        """Whether the terminal sent this, to us and to the child alike."""
        from_the_kernel = arrived.si_code > 0
        try:
            return from_the_kernel and os.getpgid(child.pid) == os.getpgrp()
        except OSError:
            return True


if sys.platform in ("win32", "darwin"):

    def _wait(child: Child, duty: Duty | None) -> int:
        while True:
            try:
                return child.wait(duty.every if duty else None)
            except subprocess.TimeoutExpired:
                if duty:
                    duty.do()
