"""`holdfast info`: an overview of a repository."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option, repo_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree
from holdfast.cli.worktree import worktree_line
from holdfast.repository.to_json import worktree_to_json


@click.command()
@repo_option
@json_option
@click.pass_obj
def info(output: Output, *, repo: str | None) -> None:
    """Show the format of a repository, its worktrees with their heads and leases, and any warnings.

    If the server with the records is unavailable, the command says so and shows everything else.

    \b
    Examples:
      holdfast info
      holdfast info --json
    """
    from holdfast.repository.overview import describe

    opened = open_worktree(repo, None, to_examine=True)
    found = describe(opened.repository)
    format, warnings = found.format, found.warnings()
    record: dict[str, object] = {
        "root": str(found.root),
        "format": format and format.version,
        "repository_id": format and format.repository_id,
        "created_at": format and format.created_at,
        "worktree": opened.worktree,
        "worktrees": [worktree_to_json(each) for each in found.worktrees],
        "snapshots": found.snapshots,
        "best_effort_snapshots": [
            {"snapshot_id": each.snapshot_id, "worktree": each.worktree_id, "warning": "best_effort"}
            for each in found.best_effort
        ],
        **{name: getattr(found, name) for name in ("filesystem", "network", "engine")},
        "directories": list(found.directories),
        "store": found.store,
        "server": str(found.server) if found.server else None,
        "store_error": found.trouble.as_record() if found.trouble else None,
        "warnings": warnings,
    }
    snapshots = "unknown" if found.snapshots is None else found.snapshots
    lines = [
        f"{found.root}" + (f" (format {format.version}, created {format.created_at})" if format else ""),
        f"  records   in {found.store}" + (f" ({found.server})" if found.server else ""),
        f"  files     on {found.filesystem or 'an unknown filesystem'}",
        f"  snapshots {snapshots}, engine {found.engine or 'unknown'}",
        *(f"  {worktree_line(each)}" for each in found.worktrees),
    ]
    if found.trouble:
        lines += [f"  {each}: a directory; nothing else is known about it" for each in found.directories]
    lines += [f"  warning   {each}" for each in warnings]
    output.result(record, [*lines, f"            {found.trouble.hint}"] if found.trouble else lines)
