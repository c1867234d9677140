"""A status line on standard error for commands that take longer than a moment.

The line is updated in place, and removed at the end. It exists only where standard error is a terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import click

from holdfast.cli.output import Output, format_size, printable, width
from holdfast.cli.styled import cut
from holdfast.clock import format_duration

_DELAY = 0.5  # seconds: a command that has finished by then needs no line
_EVERY = 0.2
_LOOK_EVERY = 1.0  # while waiting: each update reads records
_LONGEST_JOIN = 0.5
_TURNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 20


class StatusLine:
    """Shows a text during a block, after a short delay. An empty text shows nothing."""

    def __init__(self, text: Callable[[], str], every: float = _EVERY) -> None:
        self._text, self._every = text, every
        self._ended = threading.Event()
        self._shown = False
        self._thread = threading.Thread(target=self._run, name="holdfast-status", daemon=True)

    def __enter__(self) -> Self:
        with _signals_blocked():  # a signal must reach the thread that waits
            self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ended.set()
        self._thread.join(_LONGEST_JOIN)  # reading the text may wait for a server that does not answer
        if self._shown:
            self._write("")

    def _run(self) -> None:
        if self._ended.wait(_DELAY):
            return
        while True:
            with contextlib.suppress(Exception):  # a line for people must not fail the command
                text = self._text()
                if (text or self._shown) and not self._ended.is_set():
                    self._write(text)
            if self._ended.wait(self._every):
                return

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            short = cut(text, (width(sys.stderr) or 80) - 1)
            sys.stderr.write(f"\r{short}\x1b[K")
            sys.stderr.flush()
            self._shown = bool(short)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_shown() -> bool:
    """Whether status lines are shown: on a terminal, without --quiet."""
    context = click.get_current_context(silent=True)
    output = context.find_object(Output) if context else None
    quiet = output is not None and output.quiet
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not quiet


@contextlib.contextmanager
def showing(
    what: str, *, total: int | None = None, noun: str = "files", sized: bool = True
) -> Iterator[Callable[[int, int], None] | None]:
    """Show the progress of some work. Yields a function to call with the number of items and bytes so far, or None.
    Unless `sized`, call it with the number of items so far and in total (0 if that is unknown)."""
    if not is_shown():
        yield None
        return
    began, done = time.monotonic(), [0, 0]

    def report(count: int, size: int) -> None:
        done[:] = count, size

    def text() -> str:
        elapsed = time.monotonic() - began
        parts = [_TURNS[int(elapsed / _EVERY) % len(_TURNS)], what]
        whole = total or (0 if sized else done[1])
        if whole:
            filled = min(_BAR, _BAR * done[0] // whole)
            parts.append(f"[{'#' * filled}{'.' * (_BAR - filled)}]")
        if done[0]:
            count = f"{done[0]} of {whole} {noun}" if whole else f"{done[0]} {noun}"
            parts.append(f"{count}, {format_size(done[1])}" if sized else count)
        return " ".join([*parts, format_duration(round(elapsed))])

    with StatusLine(text):
        yield report


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """Show a text at once, and only once: for work during which another program may prompt the user, as ssh does for a
    passphrase. The prompt follows the text, and nothing overwrites it."""
    if not is_shown():
        yield
        return
    sys.stderr.write(f"{text}… ")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


@contextlib.contextmanager
def waiting(wait: float | None, text: Callable[[], str]) -> Iterator[None]:
    """Show what a command waits for, if it waits. `text` is called about once per second."""
    if wait == 0.0 or not is_shown():
        yield
        return
    with StatusLine(text, every=_LOOK_EVERY):
        yield


def waiting_for(what: str, holder: str = "", left: float | None = None) -> str:
    """`waiting for the worktree main (held by agent:a, 40s left)…`"""
    known = [f"held by {holder}"] if holder else []
    known += [] if left is None else [f"{format_duration(max(1, round(left)))} left"]
    return printable(f"waiting for {what}" + (f" ({', '.join(known)})" if known else "")) + "…"
