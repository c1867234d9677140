"""A history with its branches as a drawing of characters: `*` is a snapshot, lines lead to its parent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Drawn(NamedTuple):
    """What is to be drawn beside one snapshot: its first line, and what is to the left of further ones."""

    first: str
    further: str
    before: tuple[str, ...] = ()
    """Lines in front of it, at which other lines of history meet."""


def drawn(history: Iterable[tuple[str, str | None]]) -> Iterator[Drawn]:
    """Draw snapshots and their parents, which come children first; each has one parent or none."""
    columns: list[str] = []  # what each column waits for
    for snapshot, parent in history:
        waiting = [number for number, each in enumerate(columns) if each == snapshot]
        before: list[str] = []
        if not waiting:
            columns.append(snapshot)
            waiting = [len(columns) - 1]
        for number in reversed(waiting[1:]):  # lines that meet here come in from the right
            before.append(_joining(len(columns), waiting[0], number))
            del columns[number]
        here = waiting[0]
        first = " ".join("*" if number == here else "|" for number in range(len(columns)))
        if parent is None:
            del columns[here]
        else:
            columns[here] = parent
        further = " ".join("|" for _ in columns)
        yield Drawn(first, further.ljust(len(first)), tuple(before))


def _joining(count: int, left: int, right: int) -> str:
    """A line at which the column `right` comes to the column `left`; those further right move up."""
    cells = ["|"] * (right)
    line = " ".join(cells)
    between = "_" if right - left > 1 else ""
    if between:
        start = 2 * left + 1
        line = line[:start] + line[start : 2 * right - 1].replace(" ", between)
    return line.rstrip() + "/" + "".join(" /" for _ in range(count - right - 1))
