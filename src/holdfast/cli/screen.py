"""Full-screen terminal: reads keys, draws frames, and restores the terminal at the end.

A frame is a list of lines. Only the lines that differ from those on the screen are written, in one write, so nothing
flickers. One `select` waits for keys, for a resize and for `wake`, which other threads may call.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Self

from holdfast.fs import calls

if sys.platform != "win32":
    import termios
    import tty

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the alternate screen, without a cursor, cleared
_LEAVE = "\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # synchronized update: terminals that support it show the frame at once
_CLEAR = "\x1b[2J"
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down",
    "\x1b[C": "right", "\x1bOC": "right", "\x1b[D": "left", "\x1bOD": "left",
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\x1b[1~": "home", "\x1b[4~": "end",
    "\x1b[Z": "back tab", "\x1b": "escape", "\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace",
    "\x08": "backspace",
}  # fmt: skip
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
_MOST = 4096


class Screen:
    """The screen of this process's terminal, during a `with` block."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._bell, self._ring = -1, -1
        self._drawn: list[str] = []
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}

    # --- Entering and leaving ----------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._bell, self._ring = os.pipe()
        if sys.platform != "win32":  # `top` has no screen there
            for end in (self._bell, self._ring):
                os.set_blocking(end, False)
        for name, handle in (("SIGWINCH", self._resized), ("SIGTSTP", self._suspend)):
            number = getattr(signal, name)
            self._handlers[number] = signal.signal(number, handle)
        self._take_over()
        return self

    def __exit__(self, *problem: object) -> None:
        with _undisturbed():
            self._give_back()
            for number, handle in self._handlers.items():
                signal.signal(number, handle)  # type: ignore[arg-type]
            for end in (self._bell, self._ring):
                calls.close(end)

    def _take_over(self) -> None:
        if sys.platform != "win32":
            self._before = termios.tcgetattr(self._in)
            tty.setcbreak(self._in, termios.TCSANOW)  # Ctrl-C and Ctrl-Z stay signals
        self._drawn = []
        self._write(_ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._write(_LEAVE)
        if sys.platform != "win32" and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]
            self._before = None

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop on Ctrl-Z like any other program, and redraw the screen afterwards."""
        if sys.platform != "win32":
            self._give_back()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._take_over()
            self.wake()

    def _resized(self, number: int, frame: FrameType | None) -> None:
        self.wake()

    # --- Drawing -----------------------------------------------------------------------------------

    @property
    def size(self) -> os.terminal_size:
        """The size of the terminal, or 80 by 24 if it reports none."""
        try:
            columns, lines = os.get_terminal_size(self._out)
        except OSError:
            columns, lines = 0, 0
        return os.terminal_size((columns or 80, lines or 24))

    def draw(self, lines: Sequence[str], size: os.terminal_size) -> None:
        """Show these lines, which fit the size. Lines that are already on the screen are not written again."""
        frame = [*lines[: size.lines], *[""] * (size.lines - len(lines))]
        parts = []
        if len(frame) != len(self._drawn):
            self._drawn = [""] * len(frame)
            parts.append(_CLEAR)
        for number, (before, now) in enumerate(zip(self._drawn, frame, strict=True), 1):
            if before != now:
                parts.append(f"\x1b[{number};1H{now}\x1b[K")
        self._drawn = frame
        if parts:
            self._write(_BEGIN + "".join(parts) + _END)

    def forget(self) -> None:
        """Draw everything again at the next frame: the terminal may have moved or cut its content."""
        self._drawn = []

    def _write(self, text: str) -> None:
        left = text.encode("utf-8", "backslashreplace")
        while left:
            left = left[calls.write(self._out, left) :]

    # --- Waiting -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `wait` return. For other threads and signal handlers."""
        with contextlib.suppress(BlockingIOError, OSError):
            calls.write(self._ring, b".")

    def wait(self, timeout: float | None) -> list[str]:
        """The keys typed since the last call; empty after the timeout or `wake`. Raises `EOFError` if the terminal is
        gone."""
        ready, _, _ = select.select([self._in, self._bell], [], [], timeout)
        if self._bell in ready:
            with contextlib.suppress(BlockingIOError):
                calls.read(self._bell, _MOST)
        if self._in not in ready:
            return []
        typed = calls.read(self._in, _MOST)
        if not typed:
            raise EOFError
        return list(keys_in(typed.decode("utf-8", "replace")))


def keys_in(typed: str) -> Iterator[str]:
    """The keys in some input, each as its name or its character."""
    while typed:
        known = next((each for each in sorted(_KEYS, key=len, reverse=True) if typed.startswith(each)), typed[0])
        yield _KEYS.get(known, known)
        typed = typed[len(known) :]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay the signals that end this process until the terminal is restored."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in _ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
