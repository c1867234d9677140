"""`holdfast who` and `holdfast top`: one glance at everything that is held, and by whom."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli import output as cli_output
from holdfast.cli.options import data_directory, duration, json_option, store_address
from holdfast.cli.output import Output, plain_table, printable, show_table
from holdfast.cli.repository import REPO, current_directory, repo_option

if TYPE_CHECKING:
    from holdfast.repository.holdings import Holding, HoldingWaiter
    from holdfast.repository.overview import Overview

COLUMNS = ("WHAT", "HELD BY", "SINCE", "LEFT", "ALIVE", "WAITING", "TO GET IT")
INDENT, MOST_NARROW = 13, 40
LONGEST_PURPOSE = 60
NOTHING = "Nobody holds anything."
NOTHING_SEEN = "Nobody holds anything of what could be looked at."


@click.command(short_help="Show who holds what, who waits, and what can be reclaimed.")
@repo_option
@click.option(
    "--data-dir", metavar="DIRECTORY", help="Where the repo locks are.  [default: as 'repo-lock' has it]"
)
@json_option
@click.pass_obj
def who(output: Output, *, repo: str | None, data_dir: str | None) -> None:
    """Show who holds what: leases of worktrees, issues, claims in the ledger, repo locks, file locks.

    For each: since when, until when, whether its holder is alive, what for, who waits, in which place and
    since when, and whether and how it can be reclaimed without harm. Those who wait for file locks and
    repo locks are served in no order. Takes no lock and changes nothing.

    \b
    Examples:
      holdfast who
      holdfast who --json | jq '.data.holdings[] | select(.reclaim.safe)'
    """
    seen = _look(repo, data_dir)
    if output.as_json:
        output.result(seen.as_record())
        return
    width = cli_output.width()
    if seen.holdings and width is not None and _fits(seen, width):
        show_table(output, COLUMNS, rows_of(seen))
    else:
        output.text("\n".join(_held_lines(seen, width)))
    for line in _troubles(seen):
        output.diagnostic(line)


@click.command(short_help="The same as 'who', live, for a terminal.")
@repo_option
@click.option(
    "--data-dir", metavar="DIRECTORY", help="Where the repo locks are.  [default: as 'repo-lock' has it]"
)
@click.option(
    "--every",
    metavar="DURATION",
    default="1s",
    show_default=True,
    callback=duration,
    help="How often to look.",
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks.  [default: at Ctrl-C]")
@json_option
@click.pass_obj
def top(output: Output, *, repo: str | None, data_dir: str | None, every: float, count: int | None) -> None:
    """Show who holds what, again and again, until Ctrl-C. Not on a terminal, or with --json: one look after
    the other, with --json a JSON object per line.

    \b
    Example:
      holdfast top --every 500ms
    """
    live = not output.as_json and sys.stdout is not None and sys.stdout.isatty()
    looks = _looks(repo, data_dir, every, count)
    try:
        if live:
            _show_live(looks)
        else:
            for seen in looks:
                output.result(seen.as_record(), [*seen_lines(seen), ""])
    except KeyboardInterrupt:
        return  # that is how one ends it


def _looks(repo: str | None, data_dir: str | None, every: float, count: int | None) -> Iterator[Overview]:
    made = 0
    while count is None or made < count:
        if made:
            time.sleep(every)
        yield _look(repo, data_dir)
        made += 1


def _show_live(looks: Iterator[Overview]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        for seen in looks:
            head = f"{printable(str(seen.root))}  {seen.at}"
            lines = [head, "", *_held_lines(seen, cli_output.width()), *_troubles(seen)]
            folded = [part for line in lines for part in cli_output.wrapped(line)]
            shown = cli_output.cut(folded, "all: 'holdfast who'")
            live.update(Text("\n".join(shown), overflow="fold"), refresh=True)


def _look(repo: str | None, data_dir: str | None) -> Overview:
    from holdfast.locks.repo_lock import RepoLock
    from holdfast.repository.overview import check_workspace, find_workspace, look_around

    chosen, address = repo or os.environ.get(REPO) or None, store_address(os.environ)
    if chosen is None:
        root = find_workspace(current_directory())
    else:
        root = Path(os.path.abspath(chosen))
        if address is None:
            check_workspace(root)
    locks = RepoLock(data_directory(data_dir, os.environ))
    return look_around(root, repo_locks=locks, address=address)


def seen_lines(seen: Overview) -> list[str]:
    """What was seen, for people, without anything that could harm a terminal."""
    return [*_held_lines(seen, None), *_troubles(seen)]


def _held_lines(seen: Overview, width: int | None) -> list[str]:
    """A table; on a terminal of this width for which that is too wide, a few lines for each."""
    if not seen.holdings:
        return [_nothing(seen)]
    rows = [[printable(cell) for cell in row] for row in rows_of(seen)]
    if width is None or _fits(seen, width):
        return plain_table(COLUMNS, rows)
    return [line for row in rows for line in _block(row, width)]


def _block(row: Sequence[str], width: int) -> Iterator[str]:
    """One thing that is held, where there is no room for a table."""
    import textwrap

    yield row[0]
    for title, cell in zip(COLUMNS[1:], row[1:], strict=True):
        if cell:
            wide = max(width, MOST_NARROW) - INDENT
            first, *rest = textwrap.wrap(cell, wide, break_on_hyphens=False) or [""]
            yield f"  {title.lower():<{INDENT - 2}}{first}"
            yield from (" " * INDENT + line for line in rest)


def _fits(seen: Overview, width: int) -> bool:
    rows = [[printable(cell) for cell in row] for row in rows_of(seen)]
    return max(map(len, plain_table(COLUMNS, rows))) <= width


def _nothing(seen: Overview) -> str:
    return NOTHING_SEEN if seen.troubles else NOTHING


def _troubles(seen: Overview) -> list[str]:
    return [f"Cannot look at each {each.kind}: {printable(each.problem)}" for each in seen.troubles]


def rows_of(seen: Overview) -> list[list[str]]:
    """What is held, as lines of the table."""
    from holdfast.clock import parse_instant

    now = parse_instant(seen.at)
    return [row(each, now) for each in seen.holdings]


def row(held: Holding, now: float) -> list[str]:
    """One thing that is held, as a line of the table."""
    from holdfast.clock import format_duration, parse_instant

    left = since = ""
    if held.time_left is not None:
        left = format_duration(round(held.time_left)) if held.time_left > 0 else "expired"
    if held.since is not None:
        ago = round(now - parse_instant(held.since))
        since = f"{format_duration(ago)} ago" if ago > 0 else "just now"
    return [
        f"{held.kind} {held.what}",
        _holder(held),
        since,
        left,
        held.liveness.value,
        _waiters(held.waiting, now),
        ("safe: " if held.reclaim.safe else "") + held.reclaim.how,
    ]


def _waiters(waiting: Sequence[HoldingWaiter], now: float) -> str:
    """Those who wait, in their places; those who have none are served in no order, and it says so."""
    shown = ", ".join(_waiter(each, now) for each in waiting)
    unordered = sum(each.place is None for each in waiting)
    return f"{shown}; in no order" if unordered > 1 else shown


def _waiter(waiting: HoldingWaiter, now: float) -> str:
    from holdfast.clock import format_duration, parse_instant

    known = []
    if waiting.since is not None:
        known.append(f"for {format_duration(max(0, round(now - parse_instant(waiting.since))))}")
    if waiting.liveness.value == "dead":
        known.append("dead")
    place = "" if waiting.place is None else f"{waiting.place}. "
    return f"{place}{waiting.who}" + (f" ({', '.join(known)})" if known else "")


def _holder(held: Holding) -> str:
    who = held.who if held.process in (None, held.who) else f"{held.who}, {held.process}"
    if not held.purpose:
        return who
    short = (
        held.purpose[: LONGEST_PURPOSE - 3] + "..." if len(held.purpose) > LONGEST_PURPOSE else held.purpose
    )
    return f"{who} ({short})"
