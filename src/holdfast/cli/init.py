"""`holdfast init`: create a repository."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output, files_as_text


@click.command()
@click.argument("directory", default=".", type=click.Path(file_okay=False))
@click.option("--import", "source", metavar="DIR", type=click.Path(file_okay=False), help="Copy DIR into main/.")
@click.option("--store", metavar="URL", help="Keep the records in postgresql://… or etcd://…, for several machines.")
@click.option("--nested", is_flag=True, help="Allow a repository inside a worktree of another repository.")
@json_option
@click.pass_obj
def init(output: Output, *, directory: str, source: str | None, store: str | None, nested: bool) -> None:
    """Create a repository in DIRECTORY, which must be empty; it is created if it is missing.

    An existing repository stays unchanged. Work in DIRECTORY/main, or in further worktrees: 'holdfast worktree create'.
    The filesystem is tested first, and refused if its locks do not work. A directory inside another repository is
    refused too, because commands there would use the new repository.

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
        output.result(record, [f"{made.root} is already a repository."])
        return
    lines = [f"Created a repository in {made.root}."]
    if made.imported is not None:
        advice = "Take the first snapshot, so that other worktrees can start from it: holdfast snapshot"
        lines += [f"Copied {files_as_text(made.imported)} from {source}.", advice]
    output.result(record, [*lines, *advice_about_secrets(store or ""), f"Work in {main}."])
