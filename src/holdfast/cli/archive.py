"""`holdfast ledger archive` and `holdfast audit archive`: move the beginning of a stream on a server to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.audit import Since, since_option
from holdfast.cli.ledger import ledger_option, open_at
from holdfast.cli.options import dry_run_option, repo_option, with_output
from holdfast.cli.output import Output, counted, format_size
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_repository

if TYPE_CHECKING:
    from holdfast.store.archive import Segment


def _archiving(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        dry_run_option("Show what would be archived; write and delete nothing."),
        click.option("--keep", metavar="N", type=click.IntRange(1), help="Keep the last N on the server."),
        click.option(
            "--before",
            metavar="WHEN",
            callback=since_option,
            help="Only what is older than this (90d), or than this instant.",
        ),
        click.option(
            "--to",
            "directory",
            metavar="DIR",
            required=True,
            type=click.Path(file_okay=False),
            help="The directory for the files; created if missing.",
        ),
    ):
        command = option(command)
    return with_output(command)


@click.command("archive")
@ledger_option
@_archiving
def ledger_archive(
    output: Output, *, repo: str, directory: str, before: Since, keep: int | None, dry_run: bool
) -> None:
    """Move the first events of a ledger on a server to files in DIR.

    Each file is a segment: JSON lines as 'ledger log' prints them, named after its events. Once it is on disk, the
    ledger records its SHA-256, and the events are deleted from the server. Claims stay as they are. Reading an
    archived event fails with E_ARCHIVED, which names the file. Keep the files: 'ledger verify --archive' checks them.

    After an interruption, run the command again. Versions of Holdfast without this command cannot use the store any
    more: upgrade all machines first. An archived store cannot be migrated. A ledger in plain files is refused.

    \b
    Examples:
      holdfast ledger archive --before 90d --to /srv/archive --dry-run
      holdfast ledger archive --keep 100000 --to /srv/archive
    """
    ledger = open_at(repo)
    limits = _limits(ledger.ledger.store.now, before, keep)
    with showing("Archiving events"):
        made = ledger.archive(Path(directory), dry_run=dry_run, **limits)
    _print(output, made, "event", dry_run=dry_run)


@click.command("archive")
@repo_option
@_archiving
def audit_archive(
    output: Output, *, repo: str | None, directory: str, before: Since, keep: int | None, dry_run: bool
) -> None:
    """Move the first entries of an audit trail on a server to files in DIR.

    Each file is a segment: JSON lines, as in a trail in plain files, named after its entries. The chain is verified
    first. Once a segment is on disk, its SHA-256 and its last hash are recorded, and the entries are deleted from the
    server. Keep the files: 'audit --verify --archive' checks them.

    After an interruption, run the command again. Versions of Holdfast without this command cannot use the store any
    more: upgrade all machines first. An archived store cannot be migrated. A trail in plain files is refused.

    \b
    Examples:
      holdfast audit archive --before 90d --to /srv/archive --dry-run
      holdfast audit archive --keep 100000 --to /srv/archive
    """
    repository = open_repository(repo)
    limits = _limits(repository.now, before, keep)
    with showing("Archiving entries"):
        made = repository.archive_audit(Path(directory), dry_run=dry_run, **limits)
    _print(output, made, "entry", dry_run=dry_run)


def _limits(now: Callable[[], float], before: Since, keep: int | None) -> dict[str, Any]:
    if before is None and keep is None:
        raise click.UsageError("Say what to archive: --before WHEN, --keep N, or both.", click.get_current_context())
    return {"keep": keep or 1, "before": None if before is None else before(now())}


def _print(output: Output, made: Sequence[Segment], noun: str, *, dry_run: bool) -> None:
    import msgspec

    done = "Would archive" if dry_run else "Archived"
    lines = [
        f"{done} {counted(each.last - each.first + 1, noun)}, {each.first} to {each.last}: {each.file}"
        f" ({format_size(each.size)}, SHA-256 {each.sha256})"
        for each in made
    ]
    segments = [msgspec.structs.asdict(each) for each in made]
    output.result({"dry_run": dry_run, "segments": segments}, lines or ["There is nothing to archive."])
