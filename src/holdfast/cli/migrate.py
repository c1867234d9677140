"""`holdfast migrate`: move everything that is shared to another store."""

from __future__ import annotations

import os

import click

from holdfast.cli.options import json_option, store_address
from holdfast.cli.output import Output


@click.command(short_help="Move everything that is shared to another store.")
@click.argument("directory", type=click.Path(file_okay=False), default=".")
@click.option("--to", "target", required=True, metavar="ADDRESS", help="The store to move to.")
@click.option(
    "--from", "source", metavar="ADDRESS", help="The store to move from.  [default: the one that is used]"
)
@click.option("--overwrite", is_flag=True, help="The target may be an older copy: replace what differs.")
@click.option("--dry-run", is_flag=True, help="Only look what would be copied, and whether it could be.")
@json_option
@click.pass_obj
def migrate(
    output: Output, *, directory: str, target: str, source: str | None, overwrite: bool, dry_run: bool
) -> None:
    """Copy every document and every stream of the repository in DIRECTORY to the store at ADDRESS, compare
    all of it, and only then use that store from now on. The old store keeps what it has.

    An address is 'files' for the plain files of DIRECTORY, file:///another/directory,
    postgresql://host/database?schema=name, or etcd://host:port,host:port/prefix. Passwords in it are used,
    but never written down. Stop everybody who uses the repository first; leases that are held are refused.
    A migration that was interrupted is simply started again.

    \b
    Examples:
      holdfast migrate --to 'postgresql://db.example/work?schema=hf' --dry-run
      holdfast migrate --to files --overwrite
    """
    from holdfast.repository.migration import migrate as copy
    from holdfast.store.addresses import advice_about_secrets
    from holdfast.store.open import (
        address_of,
        configure_store,
        open_address,
        open_store,
        open_to_look,
        require_other_store,
    )

    source = source or store_address(os.environ)
    old = address_of(directory, source)
    require_other_store(directory, old, target)
    from_store = open_store(directory, source)
    to_store = open_to_look(directory, target) if dry_run else open_address(directory, target)
    try:
        moved = copy(from_store, to_store, dry_run=dry_run, overwrite=overwrite)
    finally:
        from_store.close()
        to_store.close()
    new = address_of(directory, target) if dry_run else configure_store(directory, target)
    done = "Would copy" if dry_run else "Copied and compared"
    documents = f"{moved.copied_documents} of {moved.documents} documents"
    records = f"{moved.copied_records} of {moved.records} records of streams"
    lines = [f"{done} {documents} and {records}", f"  from {old}", f"  to   {new}"]
    if not dry_run:
        lines += ["This directory uses the new store from now on.", *advice_about_secrets(target)]
    if not dry_run and os.environ.get("HOLDFAST_STORE"):
        lines.append("But HOLDFAST_STORE is set, and comes first: change it, or remove it.")
    output.result({"from": old, "to": new, "dry_run": dry_run, **moved._asdict()}, lines)
