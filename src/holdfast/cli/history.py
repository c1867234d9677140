"""`holdfast history` and `holdfast show`: which snapshots there are. Take no lock, change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    from holdfast.cli.snapshot_view import entry_lines

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
    from holdfast.cli.graph import drawn

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
    from holdfast.cli.snapshot_view import lines, marks_to_json, snapshot_to_json

    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    found = snapshots.named(snapshot, seen_from=opened.worktree)
    marks = snapshots.marks(found.snapshot_id)
    data = {**snapshot_to_json(found), **marks_to_json(marks)}
    shown = [*lines(found, marks)]
    if files:
        from holdfast.trees import read_manifest
        from holdfast.trees.manifest import escaped

        entries = list(read_manifest(opened.repository.control.places.tree(found.snapshot_id)))
        data["entries"] = [each.as_record() for each in entries]
        shown += [
            f"{each.kind} {each.mode:04o} {each.size:>12} {escaped(each.path) or '.'}" for each in entries
        ]
    output.result(data, shown)
