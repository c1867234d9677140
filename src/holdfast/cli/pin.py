"""`holdfast pin` and `holdfast ref`: keep snapshots from garbage collection, and name them."""

from __future__ import annotations

import click
import msgspec

from holdfast.cli.entry import Group
from holdfast.cli.options import duration, in_repository, with_output, worktree_options
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository, open_worktree
from holdfast.repository.retention import pin_holds

group = Group(
    "pin",
    help="""\
A pin protects a snapshot from garbage collection until the pin is removed or expires. A snapshot may have several pins;
removing one leaves the others.

\b
Example:
  holdfast pin add head --reason "the customer is testing it" --keep-for 30d
""",
)


@group.command(short_help="Pin a snapshot.")
@click.argument("snapshot")
@click.option("--reason", default="", metavar="TEXT", help="The reason, shown to others.")
@click.option("--keep-for", metavar="DURATION", callback=duration, help="Keep it this long.  [default: until removed]")
@worktree_options
@with_output
def add(
    output: Output, *, snapshot: str, reason: str, keep_for: float | None, repo: str | None, worktree: str | None
) -> None:
    """Pin SNAPSHOT: an id or a prefix of one, a reference, head, or head~2.

    \b
    Examples:
      holdfast pin add head --reason "the customer is testing it" --keep-for 30d
      holdfast pin add 4f1c
    """
    repository, here = open_worktree(repo, worktree)
    pin = repository.snapshots.pin(snapshot, seen_from=here, reason=reason, keep_for=keep_for)
    kept = f"{pin.snapshot_id} is kept until {pin.until or 'the pin is removed'}."
    output.result(msgspec.structs.asdict(pin), [kept, f"To remove the pin: holdfast pin remove {pin.pin_id}"])


@group.command("list", short_help="List all pins.")
@in_repository
def list_(output: Output, *, repo: str | None) -> None:
    """List all pins, including expired ones. Changes nothing.

    \b
    Example:
      holdfast pin list --json
    """
    repository = open_repository(repo)
    now, records, lines = repository.now(), [], []
    for pin in repository.snapshots.pins():
        holds = pin_holds(pin, now)
        records.append({**msgspec.structs.asdict(pin), "holds": holds})
        lasting = f"{'until' if holds else 'expired'} {pin.until}" if pin.until else "until removed"
        lines.append(f"{pin.pin_id}  {pin.snapshot_id}  {lasting}  {pin.reason}".rstrip())
    output.result({"pins": records}, lines or ["There are no pins."])


@group.command(short_help="Remove a pin.")
@click.argument("pin_id", metavar="PIN")
@in_repository
def remove(output: Output, *, pin_id: str, repo: str | None) -> None:
    """Remove the pin PIN, named by its id as in 'pin list'.

    \b
    Example:
      holdfast pin remove 9b8c4353
    """
    pin = open_repository(repo).snapshots.remove_pin(pin_id)
    output.result(msgspec.structs.asdict(pin), [f"Removed the pin {pin.pin_id} from {pin.snapshot_id}."])


ref_group = Group(
    "ref",
    help="""\
References are names for snapshots. A reference protects its snapshot from garbage collection, and can be used wherever
a command takes a snapshot.

\b
Example:
  holdfast ref create v1 head
""",
)


@ref_group.command(short_help="Name a snapshot.")
@click.argument("name")
@click.argument("snapshot")
@click.option("-m", "--note", default="", metavar="TEXT", help="A note, for people.")
@worktree_options
@with_output
def create(output: Output, *, name: str, snapshot: str, note: str, repo: str | None, worktree: str | None) -> None:
    """Create the reference NAME to SNAPSHOT. The name must be new.

    SNAPSHOT is an id or a prefix of one, another reference, head, or head~2.

    \b
    Examples:
      holdfast ref create v1 head
      holdfast ref create before-upgrade 4f1c -m "the last one that works"
    """
    repository, here = open_worktree(repo, worktree)
    reference = repository.snapshots.create_reference(name, snapshot, seen_from=here, note=note)
    output.result(msgspec.structs.asdict(reference), [f"{reference.name} refers to {reference.snapshot_id}."])


@ref_group.command("list", short_help="List all references.")
@in_repository
def list_refs(output: Output, *, repo: str | None) -> None:
    """List all references by name. Changes nothing.

    \b
    Example:
      holdfast ref list --json
    """
    found = open_repository(repo).snapshots.references()
    records = [msgspec.structs.asdict(each) for each in found]
    lines = [f"{each.name}  {each.snapshot_id}  {each.created_at}  {each.note}".rstrip() for each in found]
    output.result({"references": records}, lines or ["There are no references."])


@ref_group.command(short_help="Delete a reference; its snapshot stays.")
@click.argument("name")
@in_repository
def delete(output: Output, *, name: str, repo: str | None) -> None:
    """Delete the reference NAME. Its snapshot stays until garbage collection, unless something else protects it.

    \b
    Example:
      holdfast ref delete v1
    """
    reference = open_repository(repo).snapshots.delete_reference(name)
    line = f"Deleted {reference.name}, which referred to {reference.snapshot_id}."
    output.result(msgspec.structs.asdict(reference), [line])
