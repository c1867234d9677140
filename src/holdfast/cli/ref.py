"""`holdfast ref`: names for snapshots, which keep them from being collected."""

from __future__ import annotations

import click

from holdfast.cli.group import Group
from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository, open_worktree, repo_option, worktree_option

group = Group(
    "ref",
    help="""\
References are names for snapshots. A snapshot that has one is never collected, and can be named by
it wherever a snapshot is asked for.

\b
Example:
  holdfast ref create v1 head
""",
)


@group.command(short_help="Give a snapshot a name.")
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

    from holdfast.repository.context import resolve_usable
    from holdfast.repository.history import create_reference

    found = open_worktree(repo, worktree)
    control = found.repository.control
    snapshot_id = resolve_usable(control, snapshot, worktree=found.worktree).snapshot_id
    made = create_reference(control, name, snapshot_id, note=note)
    output.result(msgspec.structs.asdict(made), [f"{made.name} names {made.snapshot_id}."])


@group.command("list", short_help="Show all references.")
@repo_option
@json_option
@click.pass_obj
def list_(output: Output, *, repo: str | None) -> None:
    """Show all references by name. Changes nothing.

    \b
    Example:
      holdfast ref list --json
    """
    import msgspec

    from holdfast.repository.history import references

    found = references(open_repository(repo).control)
    lines = [f"{each.name}  {each.snapshot_id}  {each.created_at}  {each.note}".rstrip() for each in found]
    output.result(
        {"references": [msgspec.structs.asdict(each) for each in found]},
        lines or ["There are no references."],
    )


@group.command(short_help="Take a name away; the snapshot stays.")
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

    from holdfast.repository.history import delete_reference

    gone = delete_reference(open_repository(repo).control, name)
    output.result(msgspec.structs.asdict(gone), [f"{gone.name} no longer names {gone.snapshot_id}."])
