"""The overview for people: agents, what needs attention, and each holding in detail. For `who`, `top` and hooks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.cli.output import plain_table, printable, shortened
from holdfast.cli.styled import Column, Span
from holdfast.clock import format_ago, format_duration, parse_instant

if TYPE_CHECKING:
    from holdfast.repository.agent_rows import AgentRow, AwaitedHolding
    from holdfast.repository.attention import Attention
    from holdfast.repository.holdings import Holding, HoldingWaiter
    from holdfast.repository.overview import Overview

COLUMNS = ("WHAT", "HELD BY", "SINCE", "LEFT", "ALIVE", "WAITING", "TO GET IT")
INDENT, MOST_NARROW = 13, 40
LONGEST_PURPOSE = 60
SOON = 60.0  # seconds: a time left that is shown in colour

AGENT_COLUMNS = (
    Column("ACTOR", 0, 8),
    Column("WORK", 3, 12),
    Column("WORKTREE", 5, 8),
    Column("SINCE", 7),
    Column("LEFT", 2),
    Column("ALIVE", 1),
    Column("CHANGED", 6),
    Column("WAITS FOR", 4, 10),
)
ALIVE_STYLES = {"alive": "green", "dead": "bold red", "unknown": "dim"}
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def nobody(overview: Overview) -> str:
    """The text of an overview without holdings; it promises nothing about records that cannot be read."""
    return "No visible holder." if overview.unreadable else "Nobody holds anything."


def agent_cells(row: AgentRow, now: float, age: float = 0.0) -> list[Span]:
    """The cells of an agent's row, which was read `age` seconds ago."""
    liveness = row.liveness.value
    return [
        Span(printable(row.actor), "bold"),
        Span(printable(row.work)),
        Span(printable(row.worktree or ""), "cyan"),
        Span("" if row.since is None else _duration_since(row.since, now), "dim"),
        _time_left(None if row.time_left is None else row.time_left - age),
        Span(liveness, ALIVE_STYLES[liveness]),
        Span("" if row.changed_files is None else str(row.changed_files)),
        Span(", ".join(_awaited(each, age) for each in row.waits_for), "yellow"),
    ]


def _duration_since(instant: str, now: float) -> str:
    return format_duration(max(1, round(now - parse_instant(instant))))


def _time_left(left: float | None) -> Span:
    if left is None:
        return Span("")
    if left <= 0:
        return Span("expired", "bold red")
    return Span(format_duration(max(1, round(left))), "yellow" if left <= SOON else "")


def _awaited(awaited: AwaitedHolding, age: float) -> str:
    if awaited.kind == "landing":
        return f"landing on {printable(awaited.what)} ({awaited.place}.)"
    left = "" if awaited.time_left is None else f", {format_duration(max(1, round(awaited.time_left - age)))} left"
    return printable(f"{awaited.kind} {awaited.what} ({awaited.held_by}{left})")


def attention_line(attention: Attention) -> list[Span]:
    style = SEVERITY_STYLES[attention.severity.value]
    return [
        Span("! ", style),
        Span(printable(attention.message), style),
        Span(f"  {printable(attention.command)}", "dim"),
    ]


def detail_lines(overview: Overview, holdings: Sequence[Holding], width: int) -> list[str]:
    """A few lines for each holding."""
    return [line for row in _holding_rows(overview, holdings) for line in _block(row, width)]


def _holding_rows(overview: Overview, holdings: Sequence[Holding]) -> list[list[str]]:
    now = parse_instant(overview.at)
    return [[printable(cell) for cell in _row(each, now)] for each in holdings]


def overview_lines(overview: Overview) -> list[str]:
    """The overview for people, without anything that could harm a terminal."""
    return [*held_lines(overview, None), *problem_lines(overview)]


def held_lines(overview: Overview, width: int | None) -> list[str]:
    """A table of everything that is held; or a few lines for each, on a terminal that is too narrow for the table."""
    if not overview.holdings:
        return [nobody(overview)]
    whole = plain_table(COLUMNS, _holding_rows(overview, overview.holdings))
    if width is None or max(map(len, whole)) <= width:
        return whole
    return detail_lines(overview, overview.holdings, width)


def _block(row: Sequence[str], width: int) -> Iterator[str]:
    yield row[0]
    for title, cell in zip(COLUMNS[1:], row[1:], strict=True):
        if cell:
            wide = max(width, MOST_NARROW) - INDENT
            first, *rest = textwrap.wrap(cell, wide, break_on_hyphens=False) or [""]
            yield f"  {title.lower():<{INDENT - 2}}{first}"
            yield from (" " * INDENT + line for line in rest)


def problem_lines(overview: Overview) -> list[str]:
    return [f"Cannot list every {each.kind}: {printable(each.problem)}" for each in overview.unreadable]


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
    """The waiters by position; if they have no positions, the text says so."""
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
