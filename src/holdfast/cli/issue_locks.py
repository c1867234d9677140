"""`holdfast issue locks`: who holds the locks of a tracker, and who waits for whom."""

from __future__ import annotations

from typing import Any

import click

from holdfast.cli.output import Output
from holdfast.cli.tracking import reading_options, tracking


@click.command()
@reading_options
@click.pass_obj
def locks(output: Output, *, repo: str | None) -> None:
    """Show which locks of the tracker are held now, by whom, and who waits for them.

    Processes of every program are shown that use these lock files; only Linux tells who they are.

    \b
    Example:
      holdfast issue locks
    """
    from holdfast.cli.file_lock_state import look
    from holdfast.store.files import FileStore

    with tracking(repo) as tracker:
        tracker.transactions.check_initialised()
        found: list[dict[str, Any]] = []
        lines: list[str] = []
        if isinstance(tracker.store, FileStore):
            for path in tracker.store.guard_files(".jit"):
                state = look(path)
                if state.holders or state.waiting or state.state != "free":
                    found.append(state.as_record())
                    lines += state.lines()
    output.result({"locks": found}, lines or ["no lock is held"])
