"""The report of a suite: tables, targets and notes, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from bench.measure import Ratio

Value: TypeAlias = float | str | Ratio | None


@dataclass(frozen=True)
class Column:
    """One column of a table and the format of its values."""

    title: str
    write: Callable[[Value], str] = str

    def cell(self, value: Value) -> str:
        return "-" if value is None else self.write(value)


def number(form: str) -> Callable[[Value], str]:
    """A formatter of numbers: `number(".1f")`."""
    return lambda value: format(value, form) if isinstance(value, int | float) else str(value)


@dataclass
class Table:
    """Rows of values, one per contender."""

    title: str
    columns: list[Column]
    rows: dict[str, list[Value]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The table as text, its numbers aligned at the right."""
        grid = [["", *(column.title for column in self.columns)]]
        for name, values in self.rows.items():
            cells = [column.cell(value) for column, value in zip(self.columns, values, strict=True)]
            grid.append([name, *cells])
        widths = [max(len(row[place]) for row in grid) for place in range(len(grid[0]))]
        yield self.title
        for first, *others in grid:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            yield "  ".join(["  " + first.ljust(widths[0]), *cells]).rstrip()

    def record(self) -> dict[str, object]:
        """The table for JSON."""
        titles = [column.title for column in self.columns]
        rows = {
            name: {title: _plain(value) for title, value in zip(titles, values, strict=True)}
            for name, values in self.rows.items()
        }
        return {"title": self.title, "rows": rows}


def _plain(value: object) -> object:
    if isinstance(value, Ratio):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


@dataclass(frozen=True)
class Target:
    """A performance target and the measured value: met, missed, or not measured."""

    text: str
    measured: float | None
    met: bool
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.met else "MISSED"

    def line(self) -> str:
        found = "" if self.measured is None else f": {self.measured:.4g} {self.unit}".rstrip()
        return f"{self.verdict:<12}  {self.text}{found}"


def at_most(limit: float, text: str, measured: float | None, unit: str = "") -> Target:
    """A target that is met by any value up to the limit."""
    return Target(text, measured, measured is not None and measured <= limit, unit)


def below(limit: float, text: str, measured: float | None, unit: str = "") -> Target:
    """A target that is met by any value under the limit."""
    return Target(text, measured, measured is not None and measured < limit, unit)


def at_least(limit: float, text: str, measured: float | None, unit: str = "") -> Target:
    """A target that is met by the limit and any value above it."""
    return Target(text, measured, measured is not None and measured >= limit, unit)


@dataclass
class Report:
    """The results of one suite."""

    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """Actions to run after the report was printed, such as removing large directories."""

    @property
    def all_met(self) -> bool:
        """Whether every target was measured and met."""
        return all(target.met for target in self.targets)

    def note_failures(self, where: str, failures: Mapping[str, str]) -> None:
        """Note the contenders that failed, and why."""
        self.notes += [f"{where}: {name} failed and is left out: {why}" for name, why in failures.items()]

    def lines(self) -> Iterator[str]:
        """The report as text."""
        for table in self.tables:
            yield from table.lines()
            yield ""
        yield from (f"note: {note}" for note in self.notes)
        yield from (target.line() for target in self.targets)

    def record(self) -> dict[str, object]:
        """The report for JSON."""
        targets = [
            {"text": each.text, "measured": _plain(each.measured), "unit": each.unit, "verdict": each.verdict}
            for each in self.targets
        ]
        return {"tables": [each.record() for each in self.tables], "targets": targets, "notes": self.notes}
