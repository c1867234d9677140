"""`holdfast conflicts`: which worktrees would conflict if they were merged now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli.options import json_option, repo_option
from holdfast.cli.output import Output, counted
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_repository

if TYPE_CHECKING:
    from holdfast.repository.conflicts import ConflictReport, WorktreeConflict

MOST_PATHS = 5


@click.command()
@click.option("--into", metavar="BRANCH", help="The branch that work lands on.  [default: the branch of main]")
@click.option("--worktree", metavar="NAME", help="Show only the conflicts of this worktree.")
@repo_option
@json_option
@click.pass_obj
def conflicts(output: Output, *, into: str | None, worktree: str | None, repo: str | None) -> None:
    """Show which worktrees would conflict with each other, or with the branch that work lands on, if they were merged
    now. Uncommitted work counts.

    Every pair of worktrees whose changes may overlap is merged without a checkout: no branch, index or file changes.
    Results are cached, so a later call merges again only what has changed. A conflict for which 'git rerere' has
    recorded a resolution does not count.

    \b
    Examples:
      holdfast conflicts
      holdfast conflicts --worktree experiment
      holdfast conflicts --json | jq '.data.conflicts[].paths'
    """
    from holdfast.repository.conflicts import find_conflicts

    repository = open_repository(repo)
    with showing("Comparing worktrees"):
        found = find_conflicts(repository, into=into, only=worktree)
    output.result(found.as_record(), report_lines(found))


def report_lines(found: ConflictReport) -> Iterator[str]:
    for each in found.conflicts:
        yield conflict_line(each)
    for skipped in found.skipped:
        yield f"{skipped.worktree} was left out: {skipped.reason}"
    if not found.conflicts:
        yield f"No conflicts: {counted(len(found.worktrees), 'worktree')} and {found.target}."
        return
    yield ""
    behind = [each.worktree for each in found.conflicts if each.with_target]
    if behind:
        from holdfast.repository.landing_changes import how_to_resolve

        how = how_to_resolve(found.target, found.commit, remote="")
        yield f"To resolve a conflict with {found.target}, commit what is not committed yet."
        yield f"{how} Then land it: 'holdfast land {behind[0]}'."
    pairs = [each for each in found.conflicts if each.worktree not in behind and each.other not in behind]
    if pairs:
        yield (
            f"Of two worktrees that conflict, land one first: 'holdfast land {pairs[0].other}'. If the other one "
            "conflicts when it lands, Holdfast says how to resolve that. Or let one of them leave these files alone."
        )


def conflict_line(conflict: WorktreeConflict) -> str:
    """One conflict for people, with the first few paths."""
    paths = ", ".join(conflict.paths[:MOST_PATHS]) + (", ..." if len(conflict.paths) > MOST_PATHS else "")
    where = f" in {counted(len(conflict.paths), 'file')}: {paths}" if conflict.paths else f": {conflict.messages[0]}"
    return f"{conflict.worktree} conflicts with {conflict.other}{where}"
