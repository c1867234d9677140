"""`holdfast history` and `holdfast show`: which snapshots there are. Take no lock, change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree, repo_option, worktree_option

if TYPE_CHECKING:
    from holdfast.repository.history import History


@click.command(short_help="Show the snapshots that led to where a worktree is.")
@click.option("--limit", metavar="N", type=click.IntRange(1, 10**9), help="Show the newest N only.")
@click.option(
    "--all", "all_lines", is_flag=True, help="Show all snapshots of all worktrees, also removed ones."
)
@click.option("--graph", is_flag=True, help="Draw how they follow each other.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def history(
    output: Output,
    *,
    limit: int | None,
    all_lines: bool,
    graph: bool,
    repo: str | None,
    worktree: str | None,
) -> None:
    """Show the snapshots that led to the head of a worktree, newest first. Takes no lock, changes nothing.

    Snapshots of the level 'best_effort' carry a warning: their files may be of different moments.

    \b
    Examples:
      holdfast history --limit 10
      holdfast history --all --graph
    """
    from holdfast.repository.to_json import history_to_json

    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    found = snapshots.everything(limit=limit) if all_lines else snapshots.line(opened.worktree, limit=limit)
    data = history_to_json(found, None if all_lines else opened.worktree)
    output.result(data, _lines(found, graph=graph, with_worktree=all_lines))


def _lines(found: History, *, graph: bool, with_worktree: bool) -> Iterator[str]:
    from holdfast.cli.snapshot import entry_lines

    if not found.entries:
        yield "No snapshot yet."
    shown = [entry_lines(each, with_worktree=with_worktree) for each in found.entries]
    if graph:
        yield from _drawn(found, shown)
    else:
        yield from (line for lines in shown for line in lines)
    if found.more:
        yield "... and older ones: see --limit"
    for each in found.missing:
        yield f"The parent {each} is missing: run 'holdfast doctor'."


def _drawn(found: History, shown: list[list[str]]) -> Iterator[str]:

    ids = [(each.descriptor.snapshot_id, each.parent_id) for each in found.entries]
    for drawing, lines in zip(drawn(ids), shown, strict=True):
        yield from drawing.before
        yield f"{drawing.first}  {lines[0]}"
        yield from (f"{drawing.further}  {line}" for line in lines[1:])


@click.command(short_help="Show one snapshot.")
@click.argument("snapshot", metavar="[ID]", default="head")
@click.option("--files", is_flag=True, help="List everything that is in it, too.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def show(output: Output, *, snapshot: str, files: bool, repo: str | None, worktree: str | None) -> None:
    """Show the snapshot ID: its first characters, a reference, head (if none is named) or head~2.

    To look at its files, or to copy some of them: 'holdfast export'.

    \b
    Examples:
      holdfast show head~1
      holdfast show v1 --files --json
    """
    from holdfast.cli.snapshot import marks_to_json, snapshot_lines, snapshot_to_json

    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    found = snapshots.named(snapshot, seen_from=opened.worktree)
    marks = snapshots.marks(found.snapshot_id)
    data = {**snapshot_to_json(found), **marks_to_json(marks)}
    shown = [*snapshot_lines(found, marks)]
    if files:
        from holdfast.trees.manifest import escaped

        entries = list(snapshots.entries(found.snapshot_id))
        data["entries"] = [each.as_record() for each in entries]
        shown += [
            f"{each.kind} {each.mode:04o} {each.size:>12} {escaped(each.path) or '.'}" for each in entries
        ]
    output.result(data, shown)


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
