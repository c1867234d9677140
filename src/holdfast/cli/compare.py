"""`holdfast status`, `diff` and `verify`: what has changed, and whether snapshots are sound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree, repo_option, worktree_option
from holdfast.errors import Corrupt, NotFound, PartialSnapshot, UsageFailure

if TYPE_CHECKING:
    from holdfast.repository.compare import Comparison
    from holdfast.repository.snapshot_service import Snapshots

all_option = click.option(
    "--all", "all_of_it", is_flag=True, help="Name everything below directories that came or went whole, too."
)


@click.command(short_help="Show what has changed since the last snapshot.")
@all_option
@repo_option
@worktree_option
@json_option
@click.pass_obj
def status(output: Output, *, all_of_it: bool, repo: str | None, worktree: str | None) -> None:
    """Show what has changed in a worktree since its head: A is new, M differs, D is gone.

    Of a directory that is new or gone with many entries only their number is shown, unless you say --all.

    \b
    Examples:
      holdfast status
      holdfast status --worktree experiment --json
    """
    from holdfast.cli.snapshot import change_summary, comparison_to_json

    opened = open_worktree(repo, worktree)
    found = opened.repository.snapshots.status(opened.worktree)
    clean = not found.changes
    data = {"worktree_id": opened.worktree, "clean": clean, **comparison_to_json(found)}
    head = (
        f"{opened.worktree}: head {found.old.label}"
        if found.old.descriptor
        else f"{opened.worktree}: no snapshot"
    )
    last = "Nothing has changed." if clean else change_summary(found.changes)
    output.result(data, [head, *_listed(found, all_of_it=all_of_it), last])


@click.command(short_help="Show what is different between snapshots, or in a worktree.")
@click.argument("old", metavar="[A", required=False)
@click.argument("new", metavar="[B]]", required=False)
@click.option("--patch", is_flag=True, help="Show the lines of text files that differ.")
@click.option("--stat", is_flag=True, help="Show how many lines of each file differ.")
@all_option
@repo_option
@worktree_option
@json_option
@click.pass_obj
def diff(
    output: Output,
    *,
    old: str | None,
    new: str | None,
    patch: bool,
    stat: bool,
    all_of_it: bool,
    repo: str | None,
    worktree: str | None,
) -> None:
    """Show what is different from the snapshot A (else the head) in B, else in the worktree as it is.

    \b
    Examples:
      holdfast diff
      holdfast diff v1 head --stat
      holdfast diff head~1 --patch
    """
    from holdfast.cli.snapshot import change_summary, comparison_to_json

    if patch and stat:
        raise UsageFailure("--patch and --stat do not go together", hint="Choose one of them.")
    opened = open_worktree(repo, worktree)
    found = opened.repository.snapshots.compare(opened.worktree, old, new)
    data = comparison_to_json(found)
    lines = _listed(found, all_of_it=all_of_it)
    if patch:
        data["patches"], lines = _patches(opened.repository.snapshots, found)
    elif stat:
        data["lines"], lines = _statistics(opened.repository.snapshots, found)
    last = [] if patch else [change_summary(found.changes) if found.changes else "No difference."]
    output.result(data, [*lines, *last])


def _listed(found: Comparison, *, all_of_it: bool) -> Iterator[str]:
    from holdfast.cli.snapshot import brief_change_lines, change_lines

    return change_lines(found.changes) if all_of_it else brief_change_lines(found.changes)


def _patches(snapshots: Snapshots, found: Comparison) -> tuple[list[object], Iterator[str]]:
    from holdfast.cli.snapshot import change_lines
    from holdfast.trees.manifest import escaped

    made = list(snapshots.patches(found))
    records: list[object] = [
        {"path": escaped(each.change.path), "binary": each.lines is None, "lines": list(each.lines or ())}
        for each in made
    ]
    by_path = {each.change.path: each for each in made}

    def lines() -> Iterator[str]:
        for change in found.changes:
            here = by_path.get(change.path)
            if here is None:
                yield from change_lines([change])
            elif here.lines is None:
                yield f"{escaped(change.path)}: {change.what}, no text"
            else:
                yield from here.lines or change_lines([change])

    return records, lines()


def _statistics(snapshots: Snapshots, found: Comparison) -> tuple[list[object], Iterator[str]]:
    from holdfast.trees.manifest import escaped

    made = list(snapshots.patches(found))
    records: list[object] = [
        {
            "path": escaped(each.change.path),
            "binary": each.lines is None,
            "added": each.added,
            "removed": each.removed,
        }
        for each in made
    ]
    width = max((len(escaped(each.change.path)) for each in made), default=0)
    return records, (
        f"{escaped(each.change.path):<{width}} | "
        + ("no text" if each.lines is None else f"+{each.added} -{each.removed}")
        for each in made
    )


@click.command(short_help="Check that snapshots are still what they were.")
@click.argument("snapshot", metavar="[ID]", required=False)
@click.option("--all", "all_of_them", is_flag=True, help="Check every snapshot of the repository.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def verify(
    output: Output, *, snapshot: str | None, all_of_them: bool, repo: str | None, worktree: str | None
) -> None:
    """Read everything that a snapshot holds (the head, if none is named) and compare it with its hashes.

    Ends with status 6 if something is wrong, and says what. Changes nothing.

    \b
    Examples:
      holdfast verify
      holdfast verify --all --json
    """
    if snapshot is not None and all_of_them:
        raise UsageFailure("--all takes no snapshot", hint="Name one, or check all of them.")
    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    if all_of_them:
        ids = snapshots.all_ids()
    else:
        ids = [snapshots.named(snapshot or "head", seen_from=opened.worktree).snapshot_id]
    results = list(_verified(snapshots, ids, may_go=all_of_them))
    problems = [problem for _, found in results for problem in found]
    if problems:
        broken = [snapshot_id for snapshot_id, found in results if found]
        raise Corrupt(
            f"{len(broken)} of {len(ids)} snapshots are not what they were: " + _first_few(problems),
            hint="Restore from another snapshot, and do not trust the disk that this one is on.",
            snapshots=broken,
            problems=problems,
        )
    output.result(
        {"verified": [each for each, _ in results], "problems": []},
        [*(f"{each}: sound" for each, _ in results), *([] if results else ["No snapshot yet."])],
    )


def _verified(
    snapshots: Snapshots, ids: list[str], *, may_go: bool
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """What is wrong with each of these; `may_go` leaves out those that are collected meanwhile."""
    for snapshot_id in ids:
        try:
            found = [each._asdict() for each in snapshots.verify(snapshot_id)]
        except PartialSnapshot as partial:
            found = [{"path": "", "what": "ready", "detail": partial.message}]
        except NotFound:
            if not may_go:
                raise
            continue
        yield snapshot_id, [{"snapshot_id": snapshot_id, **each} for each in found]


def _first_few(problems: list[dict[str, str]]) -> str:
    told = [f"{each['snapshot_id']}: {each['path']}: {each['detail']}" for each in problems[:5]]
    return "; ".join(told) + ("; ..." if len(problems) > 5 else "")
