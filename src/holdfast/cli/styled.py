"""Styled text for terminals: colours, and tables that fit.

Text that comes from others is escaped before it gets a style (`printable`), so every escape sequence is our own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, TextIO

GAP = "  "
_CODES = {
    "bold": "1",
    "dim": "2",
    "reverse": "7",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
}
_RESET = "\x1b[0m"
_ELLIPSIS = "…"


class Span(NamedTuple):
    """A piece of printable text, and the words of its style: `bold red`."""

    text: str
    style: str = ""


StyledLine = Sequence[Span]


class Column(NamedTuple):
    """A column of a table. If the table is too wide, columns without content are dropped. Then a column may be cut down
    to `least` cells, if given; and if that is not enough, more are dropped, highest `rank` first."""

    title: str
    rank: int
    least: int | None = None


def has_colour(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that shows colours, and the user has not declined them."""
    if stream is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", None):
        return False
    return stream.isatty()


def painted(text: str, style: str, *, colour: bool = True) -> str:
    """The text with escape sequences for its style."""
    codes = ";".join(_CODES[word] for word in style.split()) if colour else ""
    return f"\x1b[{codes}m{text}{_RESET}" if codes and text else text


def as_text(line: StyledLine, *, colour: bool) -> str:
    return "".join(painted(*each, colour=colour) for each in line)


@cache
def _cells() -> Callable[[str], int]:
    from rich.cells import cell_len

    return cell_len


def width_of(text: str) -> int:
    """The number of cells that a text takes: two for each wide character."""
    return len(text) if text.isascii() else _cells()(text)


def cut(text: str, width: int) -> str:
    """The text, shortened to a number of cells."""
    if width_of(text) <= width:
        return text
    if text.isascii():
        return text[: width - 1] + _ELLIPSIS if width > 0 else ""
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1).rstrip() + _ELLIPSIS if width > 0 else ""


def padded(text: str, width: int) -> str:
    """The text, shortened or padded to a number of cells."""
    short = cut(text, width)
    return short + " " * (width - width_of(short))


def cut_line(line: StyledLine, width: int) -> list[Span]:
    """The line, shortened to a number of cells."""
    found, left = list[Span](), width
    for text, style in line:
        if left <= 0:
            break
        short = cut(text, left)
        found.append(Span(short, style))
        left -= width_of(short) if short == text else left
    return found


def fitting(columns: Sequence[Column], widths: Sequence[int], width: int | None) -> dict[int, int]:
    """The columns that are shown, by number, and how wide each is. `widths` are those of their content; 0 is a column
    that has none, and is not needed."""
    shown = {number: wide for number, wide in enumerate(widths) if wide}
    while width is not None:
        excess = sum(shown.values()) + len(GAP) * (len(shown) - 1) - width
        for number in sorted(shown, key=lambda each: -shown[each]):
            least = columns[number].least
            if least is not None and excess > 0:
                taken = min(excess, max(0, shown[number] - least))
                shown[number] -= taken
                excess -= taken
        if excess <= 0:
            break
        if len(shown) == 1:
            return dict.fromkeys(shown, width)
        dropped = max(shown, key=lambda each: columns[each].rank)
        shown = {number: widths[number] for number in shown if number != dropped}
    return shown


def table(columns: Sequence[Column], rows: Iterable[StyledLine], width: int | None) -> list[list[Span]]:
    """The header and the rows, each with one span per column that fits."""
    grid = [[Span(each.title, "bold") for each in columns], *map(list, rows)]
    widths = [max(width_of(row[number].text) for row in grid) for number in range(len(columns))]
    if width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        used = {number for row in grid[1:] for number, each in enumerate(row) if each.text}
        widths = [wide if number in used else 0 for number, wide in enumerate(widths)]
    shown = fitting(columns, widths, width)
    return [_cut_row(row, shown) for row in grid]


def _cut_row(row: StyledLine, shown: dict[int, int]) -> list[Span]:
    found, last = list[Span](), max(shown)
    for number, wide in shown.items():
        text, style = row[number]
        if found:
            found.append(Span(GAP))
        found.append(Span(cut(text, wide) if number == last else padded(text, wide), style))
    return found
