"""`holdfast init`: make a repository."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output


@click.command(short_help="Make a repository.")
@click.argument("directory", default=".", type=click.Path(file_okay=False))
@click.option(
    "--import",
    "source",
    metavar="PATH",
    type=click.Path(file_okay=False),
    help="Copy this directory into the new repository's main/. It stays as it is.",
)
@click.option(
    "--store",
    metavar="URL",
    help="Keep the records there, not in files: postgresql://… or etcd://…, for work on several machines.",
)
@click.option(
    "--nested",
    is_flag=True,
    help="Also inside of a worktree of another repository, whose snapshots will hold the new one.",
)
@json_option
@click.pass_obj
def init(output: Output, *, directory: str, source: str | None, store: str | None, nested: bool) -> None:
    """Make a repository in DIRECTORY, which is made if it is missing and must be empty.

    A directory that is a repository already is left as it is. Work in DIRECTORY/main, or in further
    worktrees: 'holdfast worktree create'. What the filesystem does is tried out first; one that does not
    keep processes apart is refused. So is a directory that is in a repository: commands there would mean the
    new one.

    \b
    Examples:
      holdfast init my-repo
      holdfast init my-repo --import ~/my-project
      holdfast init /shared/my-repo --store postgresql://db.example.org/holdfast
    """
    from holdfast.repository.init import initialise
    from holdfast.store.addresses import advice_about_secrets
    from holdfast.store.open import address_of

    made = initialise(directory, source=source, store=store, nested=nested)
    main = made.root / "main"
    record: dict[str, object] = {
        "root": str(made.root),
        "created": made.created,
        "format": made.format.version,
        "repository_id": made.format.repository_id,
        "main": str(main),
        "filesystem": made.filesystem.kind if made.filesystem else None,
        "imported_files": made.imported,
        "store": address_of(made.root),
    }
    if not made.created:
        output.result(record, [f"{made.root} is a repository already."])
        return
    lines = [f"Made a repository in {made.root}."]
    if made.imported is not None:
        files = "1 file" if made.imported == 1 else f"{made.imported} files"
        lines.append(f"Copied {files} from {source}.")
        lines.append(
            "Keep them as the first snapshot, which further worktrees can begin with: holdfast snapshot"
        )
    output.result(record, [*lines, *advice_about_secrets(store or ""), f"Work in {main}."])
