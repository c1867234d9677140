"""`holdfast info`: a repository at a glance."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree, repo_option


@click.command(short_help="Show what is in a repository, and who works in it.")
@repo_option
@json_option
@click.pass_obj
def info(output: Output, *, repo: str | None) -> None:
    """Show a repository: its format, its worktrees with their heads and locks, and what to beware of.

    \b
    Examples:
      holdfast info
      holdfast info --json
    """
    from holdfast.cli.worktree_view import one_line, record
    from holdfast.workspace.describing import describe
    from holdfast.workspace.stores import address_of

    opened = open_worktree(repo, None)
    found = describe(opened.repository)
    data: dict[str, object] = {
        "root": str(found.root),
        "format": found.format.version,
        "repository_id": found.format.repository_id,
        "created_at": found.format.created_at,
        "worktree": opened.worktree,
        "worktrees": [record(each) for each in found.worktrees],
        "snapshots": found.snapshots,
        "best_effort_snapshots": [
            {"snapshot_id": each.snapshot_id, "worktree_id": each.worktree_id, "warning": "best_effort"}
            for each in found.best_effort
        ],
        "filesystem": found.filesystem,
        "network": found.network,
        "engine": found.engine,
        "store": address_of(found.root),
        "warnings": found.warnings(),
    }
    output.result(
        data,
        [
            f"{found.root} (format {found.format.version}, made {found.format.created_at})",
            f"  files     on {found.filesystem or 'an unknown filesystem'}",
            f"  snapshots {found.snapshots}, made by {found.engine or 'an engine that cannot be told'}",
            *(f"  {one_line(each)}" for each in found.worktrees),
            *(f"  warning   {each}" for each in found.warnings()),
        ],
    )
