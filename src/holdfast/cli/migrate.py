"""`holdfast migrate`: move the records of a repository to another store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from holdfast.cli import STORE
from holdfast.cli.options import (
    accept_unsafe_server_option,
    dry_run_option,
    store_address,
    with_output,
)
from holdfast.cli.output import Output
from holdfast.cli.progress import showing


@click.command()
@click.argument("directory", type=click.Path(file_okay=False), default=".")
@click.option("--to", "target", required=True, metavar="ADDRESS", help="The store to move to.")
@click.option("--from", "source", metavar="ADDRESS", help="The store to move from.  [default: the current one]")
@accept_unsafe_server_option
@click.option("--overwrite", is_flag=True, help="Overwrite an older copy in the target store.")
@dry_run_option("Show what would be copied; fail if the migration is impossible.")
@with_output
def migrate(
    output: Output,
    *,
    directory: str,
    target: str,
    source: str | None,
    accept_unsafe_server: bool,
    overwrite: bool,
    dry_run: bool,
) -> None:
    """Copy every document and stream of the repository in DIRECTORY to another store, and switch to it.

    The switch happens only after everything has been copied and compared. The old store keeps its content, but accepts
    no further commits: a process that still uses it fails with an error that names the new address.

    An address is 'files' for the plain files of DIRECTORY, file:///another/directory,
    postgresql://host/database?schema=name, or etcd://host:port,host:port/prefix. Passwords in it are used but never
    stored. Stop all users of the repository first; the migration is refused while a lease is held. After an
    interruption, start the migration again.

    \b
    Examples:
      holdfast migrate --to 'postgresql://db.example/work?schema=hf' --dry-run
      holdfast migrate --to files --overwrite
    """
    from holdfast.repository.migration import migrate as copy
    from holdfast.store import open as stores
    from holdfast.store.addresses import accepting_unsafe_server, advice_about_secrets

    if accept_unsafe_server:
        target = accepting_unsafe_server(target)
    source = source or store_address(os.environ)
    old = stores.address_of(directory, source)
    stores.require_other_store(directory, old, target)
    from_store = stores.open_store(directory, source)
    to_store = stores.open_read_only(directory, target) if dry_run else stores.open_address(directory, target)
    new = stores.address_of(directory, target)

    def switch() -> None:
        stores.configure_store(directory, target)

    try:
        shown = Path(os.path.abspath(directory)).as_uri() if new == stores.FILES else new
        how: dict[str, Any] = {"dry_run": dry_run, "overwrite": overwrite, "address": shown, "switch": switch}
        with showing("Copying and comparing", noun="records", sized=False) as progress:
            moved = copy(from_store, to_store, progress=progress, **how)
    finally:
        from_store.close()
        to_store.close()
    done = "Would copy" if dry_run else "Copied and compared"
    documents = f"{moved.copied_documents} of {moved.documents} documents"
    records = f"{moved.copied_records} of {moved.records} stream records"
    lines = [f"{done} {documents} and {records}", f"  from {old}", f"  to   {new}"]
    if not dry_run:
        lines += ["This directory now uses the new store.", *advice_about_secrets(target)]
        if os.environ.get(STORE):
            lines.append(f"But {STORE} is set and takes precedence: change it or unset it.")
    output.result({"from": old, "to": new, "dry_run": dry_run, **moved._asdict()}, lines)
