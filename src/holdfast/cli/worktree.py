"""`holdfast worktree`: directories to work in, each with a lock and a history of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli.entry import Group
from holdfast.cli.lease import HIGH_RISK, lease_state_lines, lease_summary
from holdfast.cli.options import WORKTREE_FIELDS, field_of, json_option, tell
from holdfast.cli.output import Output
from holdfast.cli.repository import (
    current_directory,
    known_lock_id,
    lock_id_option,
    open_repository,
    open_worktree,
    repo_option,
)
from holdfast.errors import NotFound
from holdfast.repository.to_json import worktree_to_json as worktree_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.repository.usage import Usage
    from holdfast.repository.worktrees import WorktreeState


group = Group(
    "worktree",
    help="""\
Worktrees: directories to work in, each with a lock and a history of its own. Every repository has
'main'; the others are in its directory worktrees/. They hold nothing but your files.

\b
Example:
  holdfast worktree create experiment --from head
  cd "$(holdfast worktree path experiment)"
""",
)


@group.command(short_help="Make a worktree.")
@click.argument("name")
@click.option("--from", "snapshot", metavar="SNAPSHOT", help="The snapshot to begin with.  [default: empty]")
@click.option("--shared", is_flag=True, help="Without a lock. High-risk: nothing keeps writers apart.")
@click.option("--label", metavar="TEXT", help="A description, for people.")
@repo_option
@field_of(*WORKTREE_FIELDS)
@json_option
@click.pass_obj
def create(
    output: Output,
    *,
    name: str,
    snapshot: str | None,
    shared: bool,
    label: str | None,
    repo: str | None,
    field: str | None,
) -> None:
    """Make a worktree called NAME: empty, or with the content of a snapshot.

    \b
    Examples:
      holdfast worktree create experiment --from head
      holdfast worktree create scratchpad --shared --label "anybody may write"
    """
    from holdfast.repository.records import Isolation

    repository, here = open_worktree(repo, None)
    isolation = Isolation.SHARED if shared else Isolation.EXCLUSIVE
    repository.worktrees.create(name, snapshot=snapshot, seen_from=here, isolation=isolation, label=label)
    state = repository.worktrees.state(name)
    tell(output, field, worktree_to_json(state), [f"Made {state.path}", worktree_line(state)])


@group.command("list", short_help="Show all worktrees.")
@repo_option
@json_option
@click.pass_obj
def list_(output: Output, *, repo: str | None) -> None:
    """Show all worktrees: their heads, who has locked them, and where they are. Changes nothing.

    \b
    Example:
      holdfast worktree list --json
    """
    from holdfast.cli.output import show_table
    from holdfast.repository.to_json import worktrees_to_json

    repository = open_repository(repo)
    states = list(repository.worktrees.states())
    here = repository.root
    with contextlib.suppress(NotFound):  # the current directory may be gone
        here = current_directory()
    if output.as_json:
        output.result(worktrees_to_json(repository.root, states))
    else:
        show_table(output, COLUMNS, [worktree_row(each, here) for each in states])


@group.command(short_help="Show one worktree, and who works in it.")
@click.argument("name", required=False)
@repo_option
@json_option
@click.pass_obj
def show(output: Output, *, name: str | None, repo: str | None) -> None:
    """Show the worktree NAME (the one you are in, if none is named) and which processes work in it.

    \b
    Example:
      holdfast worktree show experiment
    """
    from holdfast.repository.usage import Usage

    repository, worktree = open_worktree(repo, name)
    state = repository.worktrees.state(worktree)
    usage = repository.worktrees.usage(worktree) if state.is_there else Usage((), 0)
    output.result({**worktree_to_json(state), **usage_to_json(usage)}, worktree_lines(state, usage))


@group.command(short_help="Print the directory of a worktree.")
@click.argument("name", required=False)
@repo_option
@json_option
@click.pass_obj
def path(output: Output, *, name: str | None, repo: str | None) -> None:
    """Print the directory of the worktree NAME (the one you are in, if none is named).

    \b
    Example:
      cd "$(holdfast worktree path experiment)"
      holdfast worktree path experiment
    """
    repository, worktree = open_worktree(repo, name)
    found = repository.path(worktree)
    output.result({"worktree_id": worktree, "path": str(found)}, [str(found)])


@group.command(short_help="Give a worktree another name.")
@click.argument("old")
@click.argument("new")
@click.option("--force", is_flag=True, help="In spite of running processes in it. Never of a lock.")
@repo_option
@json_option
@click.pass_obj
def rename(output: Output, *, old: str, new: str, force: bool, repo: str | None) -> None:
    """Give the worktree OLD the name NEW. Refused while it is locked, or processes work in it.

    \b
    Example:
      holdfast worktree rename experiment parser
    """

    repository = open_repository(repo)
    config = repository.worktrees.change_name(old, new, force=force)
    state = repository.worktrees.state(config.worktree_id)
    line = f"{old} is now {config.worktree_id}: {state.path}"
    output.result({**worktree_to_json(state), "renamed_from": old}, [line])


@group.command(short_help="Remove a worktree; its snapshots stay.")
@click.argument("name")
@click.option("--force", is_flag=True, help="In spite of running processes in it. Never of another's lock.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed, and what stands against it.")
@click.option("--no-snapshot", is_flag=True, help="Do not save what is unsaved: it is lost.")
@lock_id_option
@repo_option
@json_option
@click.pass_obj
def remove(
    output: Output,
    *,
    name: str,
    force: bool,
    dry_run: bool,
    no_snapshot: bool,
    lock_id: str | None,
    repo: str | None,
) -> None:
    """Remove the worktree NAME. What is unsaved in it is saved as a snapshot first. Snapshots stay.

    Refused while somebody else has it locked, or while processes work in it; they are named.

    \b
    Examples:
      holdfast worktree remove experiment --dry-run
      holdfast worktree remove experiment
    """

    repository = open_repository(repo)
    if dry_run:
        state, usage = repository.worktrees.state(name), repository.worktrees.usage(name)
        output.result(
            {"dry_run": True, "would_remove": {**worktree_to_json(state), **usage_to_json(usage)}},
            ["Would remove:", *worktree_lines(state, usage)],
        )
        return
    removed = repository.remove_worktree(
        name, keep_unsaved=not no_snapshot, force=force, lock_id=known_lock_id(lock_id)
    )
    saved = [f"What was unsaved is in the snapshot {removed.saved}."] if removed.saved else []
    output.result(
        {
            "dry_run": False,
            "worktree_id": removed.worktree,
            "head_snapshot_id": removed.head_snapshot_id,
            "saved_snapshot_id": removed.saved,
        },
        [f"Removed {removed.worktree}.", *saved],
    )


def usage_to_json(usage: Usage) -> dict[str, object]:
    """The processes that work in a worktree, and how many could not be looked into."""
    return {"processes": [each.as_record() for each in usage.users], "hidden_processes": usage.hidden}


COLUMNS = ("WORKTREE", "HEAD", "STATE", "PATH")


def worktree_row(state: WorktreeState, here: Path) -> list[str]:
    """A worktree in the table of all; its path as one would write it `here`."""
    head = state.config.head_snapshot_id or "no snapshot"
    path = state.path.relative_to(here) if state.path.is_relative_to(here) else state.path
    return [state.config.worktree_id, head, "; ".join(_marks(state)) or "free", str(path)]


def worktree_line(state: WorktreeState) -> str:
    """A worktree in a list."""
    head = state.config.head_snapshot_id or "no snapshot"
    return f"{state.config.worktree_id}: {'; '.join([head, *_marks(state)])}"


def _marks(state: WorktreeState) -> list[str]:
    marks = []
    if state.is_shared:
        marks.append(HIGH_RISK)
    elif state.lease is not None:
        marks.append(lease_summary(state.lease))
    if state.operation is not None:
        marks.append(f"being changed: {state.operation.kind.value}")
    if not state.is_there:
        marks.append("its directory is missing")
    if state.config.label:
        marks.append(state.config.label)
    return marks


def worktree_lines(state: WorktreeState, usage: Usage) -> Iterator[str]:
    """One worktree with all that is known."""
    config = state.config
    yield from lease_state_lines(config, state.lease)
    yield f"  path      {state.path}{'' if state.is_there else ' (missing)'}"
    yield f"  created   {config.created_at}"
    yield f"  base      {config.base_snapshot_id or 'none'}"
    yield f"  head      {config.head_snapshot_id or 'none'}"
    if config.label:
        yield f"  label     {config.label}"
    if state.operation is not None:
        operation = state.operation
        yield f"  pending   {operation.kind.value}, begun by {operation.holder_id} at {operation.begun_at}"
    for each in usage.users:
        yield f"  in use    {each}"
    if usage.hidden:
        yield f"  in use    perhaps: {usage.hidden} of the running processes may not be looked into"
