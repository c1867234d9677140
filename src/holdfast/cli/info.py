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

    If the server that has its records cannot be used, it says so, and shows what is known without it.

    \b
    Examples:
      holdfast info
      holdfast info --json
    """
    from holdfast.cli.worktree import worktree_line, worktree_to_json
    from holdfast.repository.overview import describe

    opened = open_worktree(repo, None, to_examine=True)
    found = describe(opened.repository)
    data: dict[str, object] = {
        "root": str(found.root),
        "format": found.format.version if found.format else None,
        "repository_id": found.format.repository_id if found.format else None,
        "created_at": found.format.created_at if found.format else None,
        "worktree": opened.worktree,
        "worktrees": [worktree_to_json(each) for each in found.worktrees],
        "snapshots": found.snapshots,
        "best_effort_snapshots": [
            {"snapshot_id": each.snapshot_id, "worktree_id": each.worktree_id, "warning": "best_effort"}
            for each in found.best_effort
        ],
        "filesystem": found.filesystem,
        "network": found.network,
        "engine": found.engine,
        "directories": list(found.directories),
        "store": found.store,
        "store_error": found.trouble.as_record() if found.trouble else None,
        "warnings": found.warnings(),
    }
    known = f" (format {found.format.version}, made {found.format.created_at})" if found.format else ""
    snapshots = "not known" if found.snapshots is None else found.snapshots
    lines = [
        f"{found.root}{known}",
        f"  records   in {found.store}",
        f"  files     on {found.filesystem or 'an unknown filesystem'}",
        f"  snapshots {snapshots}, made by {found.engine or 'an engine that cannot be told'}",
        *(f"  {worktree_line(each)}" for each in found.worktrees),
    ]
    if found.trouble:
        lines += [f"  {each}: a directory; the rest is not known" for each in found.directories]
    lines += [f"  warning   {each}" for each in found.warnings()]
    if found.trouble:
        lines.append(f"            {found.trouble.hint}")
    output.result(data, lines)
