"""`holdfast pin`: keep a snapshot from being collected, for a reason, for some time."""

from __future__ import annotations

import click

from holdfast.cli.entry import Group
from holdfast.cli.options import duration, json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository, open_worktree, repo_option, worktree_option

group = Group(
    "pin",
    help="""\
A pin keeps a snapshot from being collected: until it is removed, or for some time. A snapshot may
have several pins, each somebody's own; removing one leaves the others.

\b
Example:
  holdfast pin add head --reason "the customer looks at it" --until 30d
""",
)


@group.command(short_help="Keep a snapshot.")
@click.argument("snapshot")
@click.option("--reason", default="", metavar="TEXT", help="Why it is kept: others will read it.")
@click.option(
    "--until", metavar="DURATION", callback=duration, help="For how long, such as 30d.  [default: for good]"
)
@repo_option
@worktree_option
@json_option
@click.pass_obj
def add(
    output: Output,
    *,
    snapshot: str,
    reason: str,
    until: float | None,
    repo: str | None,
    worktree: str | None,
) -> None:
    """Keep the snapshot SNAPSHOT: an id or the beginning of one, a reference, head, or head~2.

    \b
    Examples:
      holdfast pin add head --reason "the customer looks at it" --until 30d
      holdfast pin add 4f1c
    """
    import msgspec

    found = open_worktree(repo, worktree)
    snapshots = found.repository.snapshots
    made = snapshots.pin(snapshot, seen_from=found.worktree, reason=reason, keep_for=until)
    lasting = f"until {made.until}" if made.until else "until the pin is removed"
    output.result(
        msgspec.structs.asdict(made),
        [
            f"{made.snapshot_id} is kept {lasting}.",
            f"To let it go: holdfast pin remove {made.pin_id}",
        ],
    )


@group.command("list", short_help="Show all pins.")
@repo_option
@json_option
@click.pass_obj
def list_(output: Output, *, repo: str | None) -> None:
    """Show all pins, also those that have run out. Changes nothing.

    \b
    Example:
      holdfast pin list --json
    """
    import msgspec

    from holdfast.repository.retention import pin_holds

    repository = open_repository(repo)
    found, now = repository.snapshots.pins(), repository.now()
    records = [{**msgspec.structs.asdict(each), "holds": pin_holds(each, now)} for each in found]
    lines = [
        f"{each.pin_id}  {each.snapshot_id}  "
        + (f"{'until' if pin_holds(each, now) else 'ran out'} {each.until}" if each.until else "for good")
        + (f"  {each.reason}" if each.reason else "")
        for each in found
    ]
    output.result({"pins": records}, lines or ["There are no pins."])


@group.command(short_help="Take a pin away.")
@click.argument("pin_id", metavar="PIN")
@repo_option
@json_option
@click.pass_obj
def remove(output: Output, *, pin_id: str, repo: str | None) -> None:
    """Take the pin PIN away, named by its id as 'pin list' shows it.

    \b
    Example:
      holdfast pin remove 9b8c4353
    """
    import msgspec

    gone = open_repository(repo).snapshots.remove_pin(pin_id)
    output.result(msgspec.structs.asdict(gone), [f"The pin {gone.pin_id} on {gone.snapshot_id} is gone."])


ref_group = Group(
    "ref",
    help="""\
References are names for snapshots. A snapshot that has one is never collected, and can be named by
it wherever a snapshot is asked for.

\b
Example:
  holdfast ref create v1 head
""",
)


@ref_group.command(short_help="Give a snapshot a name.")
@click.argument("name")
@click.argument("snapshot")
@click.option("-m", "--note", default="", metavar="TEXT", help="What it is for.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def create(
    output: Output, *, name: str, snapshot: str, note: str, repo: str | None, worktree: str | None
) -> None:
    """Give the snapshot SNAPSHOT the name NAME, which no other one has.

    SNAPSHOT is an id or the beginning of one, another reference, head, head~2.

    \b
    Examples:
      holdfast ref create v1 head
      holdfast ref create before-upgrade 4f1c -m "the last one that works"
    """
    import msgspec

    found = open_worktree(repo, worktree)
    made = found.repository.snapshots.create_reference(name, snapshot, seen_from=found.worktree, note=note)
    output.result(msgspec.structs.asdict(made), [f"{made.name} names {made.snapshot_id}."])


@ref_group.command("list", short_help="Show all references.")
@repo_option
@json_option
@click.pass_obj
def list_refs(output: Output, *, repo: str | None) -> None:
    """Show all references by name. Changes nothing.

    \b
    Example:
      holdfast ref list --json
    """
    import msgspec

    found = open_repository(repo).snapshots.references()
    lines = [f"{each.name}  {each.snapshot_id}  {each.created_at}  {each.note}".rstrip() for each in found]
    output.result(
        {"references": [msgspec.structs.asdict(each) for each in found]},
        lines or ["There are no references."],
    )


@ref_group.command(short_help="Take a name away; the snapshot stays.")
@click.argument("name")
@repo_option
@json_option
@click.pass_obj
def delete(output: Output, *, name: str, repo: str | None) -> None:
    """Take the name NAME away. Its snapshot stays until it is collected, if nothing else keeps it.

    \b
    Example:
      holdfast ref delete v1
    """
    import msgspec

    gone = open_repository(repo).snapshots.delete_reference(name)
    output.result(msgspec.structs.asdict(gone), [f"{gone.name} no longer names {gone.snapshot_id}."])
