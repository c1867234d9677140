"""The terminal that a person looks at, if there is one."""

from __future__ import annotations

import os
import sys

USUAL_WIDTH = 80


def width() -> int | None:
    """How many characters fit into a line; None if standard output is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    named = os.environ.get("COLUMNS", "")
    if named.isascii() and named.isdigit() and int(named) > 0:
        return int(named)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or USUAL_WIDTH
    except OSError:
        return USUAL_WIDTH


def wrapped(line: str) -> list[str]:
    """The line as several where it does not fit; words stay whole."""
    wide = width()
    if wide is None or len(line) <= wide:
        return [line]
    import textwrap

    return textwrap.wrap(line, wide, break_on_hyphens=False)
