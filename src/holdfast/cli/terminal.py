"""The terminal that a person looks at, if there is one."""

from __future__ import annotations

import os
import sys

USUAL_WIDTH, USUAL_HEIGHT = 80, 24


def width() -> int | None:
    """How many characters fit into a line; None if standard output is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return _named("COLUMNS") or _size().columns or USUAL_WIDTH


def cut(lines: list[str], rest: str) -> list[str]:
    """As many lines as fit on the terminal; if that is not all, the last one says how many more there are."""
    height = _named("LINES") or _size().lines or USUAL_HEIGHT
    if len(lines) <= height:
        return lines
    kept = max(0, height - 1)
    return [*lines[:kept], f"... {len(lines) - kept} more lines; {rest}"]


def _named(variable: str) -> int:
    """What the environment says, over what the terminal says, as is the custom."""
    named = os.environ.get(variable, "")
    return int(named) if named.isascii() and named.isdigit() and len(named) < 6 else 0


def _size() -> os.terminal_size:
    try:
        return os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return os.terminal_size((0, 0))


def wrapped(line: str) -> list[str]:
    """The line as several where it does not fit; words stay whole."""
    wide = width()
    if wide is None or len(line) <= wide:
        return [line]
    import textwrap

    return textwrap.wrap(line, wide, break_on_hyphens=False)
