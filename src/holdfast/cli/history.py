"""`holdfast history` and `holdfast show`: the snapshots of a repository. They take no lease."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli.options import json_option, limit_option, repo_option, worktree_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree
from holdfast.cli.styled import Span

if TYPE_CHECKING:
    from holdfast.repository.history import History


@click.command()
@limit_option("Show only the newest N.")
@click.option("--all", "everything", is_flag=True, help="Show the snapshots of all worktrees, including removed ones.")
@click.option("--graph", is_flag=True, help="Draw the graph of parents.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def history(output: Output, /, *, limit: int | None, everything: bool, graph: bool, **where: Any) -> None:
    """Show the snapshots that led to the head of a worktree, newest first. Changes nothing.

    A 'best_effort' snapshot has a warning: its files may have been captured at different instants.

    \b
    Examples:
      holdfast history --limit 10
      holdfast history --all --graph
    """
    from holdfast.repository.to_json import history_to_json

    opened = open_worktree(**where)
    snapshots = opened.repository.snapshots
    found = snapshots.everything(limit=limit) if everything else snapshots.line(opened.worktree, limit=limit)
    record = history_to_json(found, None if everything else opened.worktree)
    output.result(record, _history_lines(found, graph=graph, with_worktree=everything), paint=_paint)


_ENTRY = re.compile(r"([|*/_ ]*)([0-9a-f-]{8,})(  \d{4}-.*?Z)(.*)")


def _paint(line: str) -> list[Span]:
    """Style the graph, the id, the time and the marks in the first line of an entry."""
    from holdfast.cli.snapshot import WARNING

    found = _ENTRY.fullmatch(line)
    if found is None:
        return [Span(line, "yellow" if WARNING in line else "")]
    graph, snapshot_id, taken, rest = found.groups()
    return [Span(graph, "dim"), Span(snapshot_id, "yellow"), Span(taken, "dim"), Span(rest, "cyan")]


def _history_lines(found: History, *, graph: bool, with_worktree: bool) -> Iterator[str]:
    from holdfast.cli.snapshot import entry_lines

    if not found.entries:
        yield "No snapshot yet."
    entries = [entry_lines(each, with_worktree=with_worktree) for each in found.entries]
    if graph:
        drawings = drawn([(each.descriptor.snapshot_id, each.parent_id) for each in found.entries])
        for (first, further, before), (line, *more) in zip(drawings, entries, strict=True):
            yield from (*before, f"{first}  {line}", *(f"{further}  {each}" for each in more))
    else:
        yield from (line for lines in entries for line in lines)
    if found.more:
        yield "... and older ones: see --limit"
    for each in found.missing:
        yield f"The parent {each} is missing: run 'holdfast doctor'."


class Drawn(NamedTuple):
    """The graph left of a snapshot's first line, left of its further lines, and above it, where histories join."""

    first: str
    further: str
    before: tuple[str, ...] = ()


def drawn(history: Iterable[tuple[str, str | None]]) -> Iterator[Drawn]:
    """Draw snapshots with their parents, children first. A snapshot has at most one parent."""
    columns: list[str] = []  # the snapshot that each column leads to
    for snapshot, parent in history:
        if snapshot not in columns:
            columns.append(snapshot)
        here, *joining = [number for number, each in enumerate(columns) if each == snapshot]
        before: list[str] = []
        for number in reversed(joining):  # histories that join here come in from the right
            before.append(_joining(len(columns), here, number))
            del columns[number]
        first = " ".join("*" if number == here else "|" for number in range(len(columns)))
        if parent is None:
            del columns[here]
        else:
            columns[here] = parent
        yield Drawn(first, " ".join("|" for _ in columns).ljust(len(first)), tuple(before))


def _joining(count: int, left: int, right: int) -> str:
    """The line where column `right` joins column `left`; the columns further right move up."""
    line = " ".join(["|"] * right)
    if right - left > 1:
        start = 2 * left + 1
        line = line[:start] + line[start : 2 * right - 1].replace(" ", "_")
    return line.rstrip() + "/" + "".join(" /" for _ in range(count - right - 1))


@click.command()
@click.argument("snapshot", metavar="[ID]", default="head")
@click.option("--files", is_flag=True, help="Also list its entries.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def show(output: Output, /, *, snapshot: str, files: bool, **where: Any) -> None:
    """Show the snapshot ID: a prefix of an id, a reference, head (the default), or head~2.

    To read or copy its files, use 'holdfast export'.

    \b
    Examples:
      holdfast show head~1
      holdfast show v1 --files --json
    """
    from holdfast.cli.snapshot import snapshot_lines
    from holdfast.repository.to_json import marks_to_json, snapshot_to_json

    opened = open_worktree(**where)
    snapshots = opened.repository.snapshots
    found = snapshots.named(snapshot, seen_from=opened.worktree)
    marks = snapshots.marks(found.snapshot_id)
    record, lines = {**snapshot_to_json(found), **marks_to_json(marks)}, [*snapshot_lines(found, marks)]
    if files:
        from holdfast.trees.manifest import escaped

        entries = list(snapshots.entries(found.snapshot_id))
        record["entries"] = [each.as_record() for each in entries]
        lines += [f"{each.kind} {each.mode:04o} {each.size:>12} {escaped(each.path) or '.'}" for each in entries]
    output.result(record, lines)
