"""How far a long operation is, for a person who looks at a terminal; nobody else is shown anything."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from holdfast.cli.output import Output

Told = Callable[[int, int], None]
"""Is told how many files and bytes have been dealt with."""


@contextlib.contextmanager
def shown(output: Output, what: str, *, files: int | None = None) -> Iterator[Told | None]:
    """A bar on standard error while the block runs, if that is a terminal; `files` is about how many."""
    if output.as_json or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} files, {task.fields[size]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=files or None, size="0 B")
        yield lambda done, size: progress.update(task, completed=done, size=bytes_as_text(size))


def bytes_as_text(count: int) -> str:
    """A number of bytes the way people say it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def files_as_text(count: int) -> str:
    """A number of files the way people say it."""
    return "1 file" if count == 1 else f"{count} files"
