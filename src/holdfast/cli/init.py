"""`holdfast init`: create a repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast.cli.options import accept_unsafe_server_option, consistency_option, json_option
from holdfast.cli.output import Output, counted

if TYPE_CHECKING:
    from holdfast.repository.context import Consistency


@click.command()
@click.argument("directory", default=".", type=click.Path(file_okay=False))
@click.option("--import", "source", metavar="DIR", type=click.Path(file_okay=False), help="Copy DIR into main/.")
@consistency_option("the import", default="quiesced")
@click.option("--store", metavar="URL", help="Keep the records in postgresql://… or etcd://…, for several machines.")
@accept_unsafe_server_option
@click.option("--nested", is_flag=True, help="Allow a repository inside a worktree of another repository.")
@click.option("--shared", is_flag=True, help="Let the group of DIRECTORY use the repository like its owner.")
@json_option
@click.pass_obj
def init(
    output: Output,
    *,
    directory: str,
    source: str | None,
    consistency: Consistency | None,
    store: str | None,
    accept_unsafe_server: bool,
    nested: bool,
    shared: bool,
) -> None:
    """Create a repository in DIRECTORY, which must be empty; it is created if it is missing.

    An existing repository stays unchanged. Work in DIRECTORY/main, or in further worktrees: 'holdfast worktree create'.
    The filesystem is tested first, and refused if its locks do not work. A directory inside another repository is
    refused too, because commands there would use the new repository. Other users cannot read its records and snapshots,
    unless it is --shared with a group.

    \b
    Examples:
      holdfast init my-repo
      holdfast init my-repo --import ~/my-project
      holdfast init /shared/my-repo --store postgresql://db.example.org/holdfast
    """
    from holdfast.repository.init import initialise
    from holdfast.store.addresses import accepting_unsafe_server, advice_about_secrets
    from holdfast.store.open import address_of

    if store is not None and accept_unsafe_server:
        store = accepting_unsafe_server(store)
    made = initialise(directory, source=source, consistency=consistency, store=store, nested=nested, shared=shared)
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
        lines += [f"Copied {counted(made.imported, 'file')} from {source}.", advice]
    output.result(record, [*lines, *advice_about_secrets(store or ""), f"Work in {main}."])
