"""`holdfast export`: the files of a snapshot, as a plain directory."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import current_directory, open_worktree, repo_option, worktree_option


@click.command(short_help="Write what a snapshot holds into a new directory.")
@click.argument("snapshot", metavar="ID")
@click.argument("directory", metavar="DIR")
@click.option("--path", metavar="PATH", help="Only this file or directory of it; DIR is what it becomes.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def export(
    output: Output, *, snapshot: str, directory: str, path: str | None, repo: str | None, worktree: str | None
) -> None:
    """Write what the snapshot ID holds into DIR, to look at or to take elsewhere. DIR must not be there yet.

    ID is the first characters of one, a reference, head or head~2. What is written is yours: it shares
    nothing with the snapshot, and Holdfast does not know of it any more. It takes no lock. To go on working
    from a snapshot, make a worktree of it instead: 'holdfast restore'.

    \b
    Examples:
      holdfast export head~2 /tmp/before
      holdfast export v1 old.py --path src/app.py
    """
    import os
    from pathlib import Path

    from holdfast.cli import progress
    from holdfast.fs.names import split_relative
    from holdfast.trees.scan import shown

    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    found = snapshots.named(snapshot, seen_from=opened.worktree)
    destination = Path(os.path.abspath(current_directory() / directory))
    wanted = None if path is None else os.fsencode("/".join(split_relative(path.rstrip("/") or path)))
    with progress.shown(output, "Exporting", files=None if path else found.files) as told:
        made = snapshots.export(found.snapshot_id, destination, path=wanted, progress=told)
    data = {
        "snapshot_id": found.snapshot_id,
        "path": path,
        "directory": str(destination),
        "files": made.files,
        "bytes": made.bytes,
        "not_preserved": list(made.not_preserved),
    }
    much = f"{progress.files_as_text(made.files)}, {progress.bytes_as_text(made.bytes)}"
    lines = [f"Wrote {path or 'all'} of {found.snapshot_id} to {shown(str(destination))}: {much}."]
    output.result(data, [*lines, *(f"Not kept: {each}" for each in made.not_preserved)])
