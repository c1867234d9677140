"""`holdfast who` and `holdfast top`: an overview of everything that is held, and by whom."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli import REPO, options
from holdfast.cli import output as cli_output
from holdfast.cli.output import Output, plain_table, printable, shortened, show_table
from holdfast.cli.repository import current_directory
from holdfast.clock import format_ago, format_duration, parse_instant

if TYPE_CHECKING:
    from holdfast.repository.holdings import Holding, HoldingWaiter
    from holdfast.repository.overview import Overview

COLUMNS = ("WHAT", "HELD BY", "SINCE", "LEFT", "ALIVE", "WAITING", "TO GET IT")
INDENT, MOST_NARROW = 13, 40
LONGEST_PURPOSE = 60


@click.command(short_help="Show who holds what, who waits, and what can be reclaimed.")
@options.repo_option
@options.data_dir_option
@options.with_output
def who(output: Output, *, repo: str | None, data_dir: str | None) -> None:
    """Show who holds what: leases of worktrees, issues, claims in the ledger, repository locks, file locks.

    For each, it shows when it was acquired and when it expires, whether the holder is alive, the purpose, the waiters,
    and whether and how it can be reclaimed safely. Waiters for file locks and repository locks have no order. Then come
    the worktrees of a git checkout that conflict with others ('holdfast conflicts'). Takes no lock and changes nothing.

    \b
    Examples:
      holdfast who
      holdfast who --json | jq '.data.holdings[] | select(.reclaim.safe)'
    """
    from holdfast.repository.overview import with_conflicts

    overview = with_conflicts(_overview(repo, data_dir))
    if output.as_json:
        output.result(overview.as_record())
        return
    width = cli_output.width()
    if overview.holdings and width is not None and _fits(overview, width):
        show_table(output, COLUMNS, _rows(overview))
    else:
        output.text("\n".join(_held_lines(overview, width)))
    for line in _conflict_lines(overview):
        output.line(line)
    for line in _problem_lines(overview):
        output.diagnostic(line)


@click.command(short_help="Show who holds what, refreshed in the terminal.")
@options.repo_option
@options.data_dir_option
@options.duration_option("--every", "How often to refresh.", default="1s")
@options.limit_option("Stop after N refreshes.  [default: at Ctrl-C]")
@options.with_output
def top(output: Output, *, repo: str | None, data_dir: str | None, every: float, limit: int | None) -> None:
    """Show who holds what, and refresh it until Ctrl-C. Without a terminal, or with --json, print one
    overview after the other; with --json, one JSON object per line.

    \b
    Example:
      holdfast top --every 500ms
    """
    overviews = _overviews(repo, data_dir, every, limit)
    try:
        if not output.as_json and sys.stdout is not None and sys.stdout.isatty():
            _show_live(overviews)
        else:
            for overview in overviews:
                output.result(overview.as_record(), [*overview_lines(overview), ""])
    except KeyboardInterrupt:
        return  # the usual way to end it


def _overviews(repo: str | None, data_dir: str | None, every: float, limit: int | None) -> Iterator[Overview]:
    for number in itertools.count() if limit is None else range(limit):
        if number:
            time.sleep(every)
        yield _overview(repo, data_dir)


def _show_live(overviews: Iterator[Overview]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        for overview in overviews:
            head = f"{printable(str(overview.root))}  {overview.at}"
            lines = [head, "", *_held_lines(overview, cli_output.width()), *_problem_lines(overview)]
            folded = [part for line in lines for part in cli_output.wrapped(line)]
            visible = cli_output.cut(folded, "all: 'holdfast who'")
            live.update(Text("\n".join(visible), overflow="fold"), refresh=True)


def _overview(repo: str | None, data_dir: str | None) -> Overview:
    from holdfast.locks.repo_lock import RepoLock
    from holdfast.repository.overview import check_workspace, find_workspace, look_around
    from holdfast.store.approvals import data_directory

    chosen, address = repo or os.environ.get(REPO), options.store_address(os.environ)
    root = Path(os.path.abspath(chosen)) if chosen else find_workspace(current_directory())
    if chosen and address is None:
        check_workspace(root)
    locks = RepoLock(data_directory(data_dir, os.environ))
    return look_around(root, repo_locks=locks, address=address)


def overview_lines(overview: Overview) -> list[str]:
    """The overview for people, without anything that could harm a terminal."""
    return [*_held_lines(overview, None), *_problem_lines(overview)]


def _held_lines(overview: Overview, width: int | None) -> list[str]:
    """A table; or a few lines for each holding, on a terminal that is too narrow for the table."""
    if not overview.holdings:
        return ["No visible holder." if overview.troubles else "Nobody holds anything."]
    rows = [[printable(cell) for cell in row] for row in _rows(overview)]
    if width is None or _fits(overview, width):
        return plain_table(COLUMNS, rows)
    return [line for row in rows for line in _block(row, width)]


def _block(row: Sequence[str], width: int) -> Iterator[str]:
    import textwrap

    yield row[0]
    for title, cell in zip(COLUMNS[1:], row[1:], strict=True):
        if cell:
            wide = max(width, MOST_NARROW) - INDENT
            first, *rest = textwrap.wrap(cell, wide, break_on_hyphens=False) or [""]
            yield f"  {title.lower():<{INDENT - 2}}{first}"
            yield from (" " * INDENT + line for line in rest)


def _fits(overview: Overview, width: int) -> bool:
    rows = [[printable(cell) for cell in row] for row in _rows(overview)]
    return max(map(len, plain_table(COLUMNS, rows))) <= width


def _conflict_lines(overview: Overview) -> Iterator[str]:
    """A line for each worktree that conflicts with others."""
    found: dict[str, dict[str, None]] = {}
    for each in overview.conflicts:
        found.setdefault(each.worktree, {})[each.other] = None
        if not each.with_target:
            found.setdefault(each.other, {})[each.worktree] = None
    for worktree, others in sorted(found.items()):
        yield f"{worktree} conflicts with {', '.join(others)}: holdfast conflicts --worktree {worktree}"


def _problem_lines(overview: Overview) -> list[str]:
    return [f"Cannot list every {each.kind}: {printable(each.problem)}" for each in overview.troubles]


def _rows(overview: Overview) -> list[list[str]]:
    now = parse_instant(overview.at)
    return [_row(each, now) for each in overview.holdings]


def _row(held: Holding, now: float) -> list[str]:
    left = ""
    if held.time_left is not None:
        left = format_duration(round(held.time_left)) if held.time_left > 0 else "expired"
    return [
        f"{held.kind} {held.what}",
        _holder(held),
        "" if held.since is None else format_ago(held.since, now),
        left,
        held.liveness.value,
        _waiters(held.waiting, now),
        ("safe: " if held.reclaim.safe else "") + held.reclaim.how,
    ]


def _waiters(waiting: Sequence[HoldingWaiter], now: float) -> str:
    """The waiters by position; the text says so if they have none."""
    shown = ", ".join(_waiter(each, now) for each in waiting)
    unordered = sum(each.place is None for each in waiting)
    return f"{shown}; in no order" if unordered > 1 else shown


def _waiter(waiting: HoldingWaiter, now: float) -> str:
    known = []
    if waiting.since is not None:
        known.append(f"for {format_duration(max(0, round(now - parse_instant(waiting.since))))}")
    if waiting.liveness.value == "dead":
        known.append("dead")
    position = "" if waiting.place is None else f"{waiting.place}. "
    return f"{position}{waiting.who}" + (f" ({', '.join(known)})" if known else "")


def _holder(held: Holding) -> str:
    holder = held.who if held.process in (None, held.who) else f"{held.who}, {held.process}"
    return f"{holder} ({shortened(held.purpose, LONGEST_PURPOSE)})" if held.purpose else holder
