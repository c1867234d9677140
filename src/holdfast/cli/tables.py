"""Tables: plain aligned columns, or drawn with `rich` when a person looks at a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast.cli.output import Output, printable


def show_table(output: Output, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows under their titles; the last column may be as wide as it is."""
    if not rows:
        return
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _draw(columns, cells)
    else:
        output.text("\n".join(plain_table(columns, cells)))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table as lines."""
    grid = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)][:-1]
    form = "  ".join(f"{{:<{width}}}" for width in widths)
    form = f"{form}  {{}}" if widths else "{}"
    return [form.format(*row).rstrip() for row in grid]


_STYLES = {
    "ready": "green",
    "in_progress": "yellow",
    "gated": "magenta",
    "done": "dim",
    "rejected": "red dim",
    "archived": "dim",
    "critical": "bold red",
    "high": "bold",
}


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in columns[:-1]:
        table.add_column(title, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)
