"""`holdfast worktree`: create, list, show, rename and remove worktrees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import options
from holdfast.cli.entry import Group
from holdfast.cli.lease import HIGH_RISK, lease_state_lines, lease_summary
from holdfast.cli.output import Output, counted, show_table
from holdfast.cli.progress import showing
from holdfast.cli.repository import (
    current_directory,
    known_lock_id,
    open_repository,
    open_worktree,
    showing_output,
)
from holdfast.clock import format_ago
from holdfast.errors import NotFound
from holdfast.repository.to_json import worktree_to_json, worktrees_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.repository.usage import Usage
    from holdfast.repository.worktrees import WorktreeState


group = Group(
    "worktree",
    help="""\
Worktrees: directories to work in, each with its own lease and history. Every repository has
'main'; the others are in its directory worktrees/ or, in a git checkout, beside the checkout.
They contain nothing but your files.

\b
Example:
  holdfast worktree create experiment --from head
  cd "$(holdfast worktree path experiment)"
""",
)


@group.command(short_help="Create a worktree.")
@click.argument("name")
@click.option(
    "--from",
    "snapshot",
    metavar="SNAPSHOT",
    help="The snapshot to start from; in a git checkout also a worktree or revision.  [default: see above]",
)
@click.option("--branch", metavar="BRANCH", help="In a git checkout: a new or existing branch.  [default: hf/NAME]")
@click.option(
    "--isolated", is_flag=True, help="In a git checkout: a clone that shares objects, for an agent in a sandbox."
)
@click.option("--shared", is_flag=True, help="Create it without a lease. High-risk: nothing keeps writers apart.")
@click.option("--label", metavar="TEXT", help="A description, for people.")
@click.option("--no-setup", is_flag=True, help="Copy no files and run no setup commands.")
@options.repo_option
@options.field_option(*options.WORKTREE_FIELDS)
@options.with_output
def create(
    output: Output,
    *,
    name: str,
    snapshot: str | None,
    branch: str | None,
    isolated: bool,
    shared: bool,
    label: str | None,
    no_setup: bool,
    repo: str | None,
    field: str | None,
) -> None:
    """Create the worktree NAME: empty, or with the content of a snapshot. Then copy files from main and run the setup
    commands, if any are configured ('holdfast config'). If a command fails, the worktree is kept.

    In a git checkout, it is a git worktree beside the checkout, on its own branch. It starts at the tip of the branch
    that work lands on: at the commit that is checked out in main, without the uncommitted changes there, or, with
    'holdfast config set land.push REMOTE', at the tip of that branch on the remote.

    With --isolated, it is a clone instead, for an agent that may write only in this directory. Each snapshot fetches
    the commit that is checked out there into the worktree's branch in the repository.

    \b
    Examples:
      holdfast worktree create experiment --from head
      holdfast worktree create scratchpad --shared --label "anybody may write"
    """
    from holdfast.repository.context import Isolation
    from holdfast.repository.preparation import check_setup, prepare_leased, skip_setup

    repository, here = open_worktree(repo, None)
    isolation = Isolation.SHARED if shared else Isolation.EXCLUSIVE
    if not no_setup:
        check_setup(repository)
    how: dict[str, Any] = {"isolation": isolation, "label": label, "branch": branch, "isolated": isolated}
    with showing("Creating") as progress:
        repository.worktrees.create(name, snapshot=snapshot, seen_from=here, progress=progress, **how)
    with showing_output():
        done = skip_setup(repository, name) if no_setup else prepare_leased(repository, name)
    state = repository.worktrees.state(name)
    if changed := repository.worktrees.uncommitted(snapshot):
        output.warning(f"{snapshot or 'main'} has uncommitted changes, which are not in {name}: {changed}")
    lines = [f"Created {state.path}", worktree_line(state)]
    if done is not None:
        lines.append(f"Copied {counted(done.copied, 'file')}, ran {counted(len(done.commands), 'setup command')}.")
    options.print_record(output, field, worktree_to_json(state), lines)


@group.command(short_help="Adopt a linked git worktree.")
@click.argument("path", type=click.Path(file_okay=False))
@click.option("--name", metavar="NAME", help="Its name.  [default: the name of the directory]")
@click.option("--label", metavar="TEXT", help="A description, for people.")
@options.repo_option
@options.field_option(*options.WORKTREE_FIELDS)
@options.with_output
def adopt(
    output: Output, *, path: str, name: str | None, label: str | None, repo: str | None, field: str | None
) -> None:
    """Make the linked git worktree at PATH a worktree of this repository. It stays where it is.

    \b
    Example:
      git worktree add ../hotfix
      holdfast worktree adopt ../hotfix
    """
    from pathlib import Path

    repository = open_repository(repo)
    config = repository.worktrees.adopt(Path(path), name=name, label=label)
    state = repository.worktrees.state(config.worktree_id)
    options.print_record(output, field, worktree_to_json(state), [f"Adopted {state.path}", worktree_line(state)])


@group.command("list", short_help="List all worktrees.")
@options.in_repository
def list_(output: Output, *, repo: str | None) -> None:
    """List all worktrees with their heads, the holders of their leases, and their paths. Changes nothing.

    \b
    Example:
      holdfast worktree list --json
    """
    repository = open_repository(repo)
    states = list(repository.worktrees.states())
    here = repository.root
    with contextlib.suppress(NotFound):  # the current directory may be gone
        here = current_directory()
    if output.as_json:
        output.result(worktrees_to_json(repository.root, states))
    else:
        show_table(output, ("WORKTREE", "HEAD", "STATE", "PATH"), [_row(each, here) for each in states])


@group.command(short_help="Show one worktree, and which processes use it.")
@click.argument("name", required=False)
@options.in_repository
def show(output: Output, *, name: str | None, repo: str | None) -> None:
    """Show the worktree NAME (default: the current one), and which processes use it.

    \b
    Example:
      holdfast worktree show experiment
    """
    from holdfast.repository.usage import Usage

    repository, worktree = open_worktree(repo, name)
    state = repository.worktrees.state(worktree)
    usage = repository.worktrees.usage(worktree) if state.exists else Usage((), 0)
    output.result({**worktree_to_json(state), **_usage_to_json(usage)}, _worktree_lines(state, usage))


@group.command(short_help="Print the path of a worktree.")
@click.argument("name", required=False)
@options.in_repository
def path(output: Output, *, name: str | None, repo: str | None) -> None:
    """Print the path of the worktree NAME (default: the current one).

    \b
    Example:
      cd "$(holdfast worktree path experiment)"
      holdfast worktree path experiment
    """
    repository, worktree = open_worktree(repo, name)
    found = str(repository.path(worktree))
    output.result({"worktree": worktree, "path": found}, [found])


@group.command(short_help="Rename a worktree.")
@click.argument("old")
@click.argument("new")
@click.option("--force", is_flag=True, help="Ignore processes that use it, but not leases.")
@options.in_repository
def rename(output: Output, *, old: str, new: str, force: bool, repo: str | None) -> None:
    """Rename the worktree OLD to NEW. Refused while it is leased, or while processes use it.

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
@click.option(
    "--force",
    is_flag=True,
    help="Ignore processes that use it, repositories in it, a failed teardown and 'git worktree lock', but not leases.",
)
@options.dry_run_option("Show what would be removed, and what prevents it.")
@click.option("--no-snapshot", is_flag=True, help="Discard unsaved changes.")
@click.option("--lost", is_flag=True, help="Delete only its record: the clone that has its directory is gone for good.")
@options.duration_option("--keep-for", "How long a pin protects its last snapshot; 0s for no pin.", default="30d")
@options.lock_id_option
@options.in_repository
def remove(
    output: Output,
    *,
    name: str,
    force: bool,
    dry_run: bool,
    no_snapshot: bool,
    lost: bool,
    keep_for: float,
    lock_id: str | None,
    repo: str | None,
) -> None:
    """Remove the worktree NAME. Unsaved changes become a snapshot first.

    Its snapshots stay until garbage collection. A pin protects the last one, which has the worktree's content, for 30
    days. To bring the worktree back, restore that snapshot.

    If several machines share the repository ('holdfast join'), remove a worktree in the clone that has it. With --lost,
    only its record is deleted; if NAME is the checkout of a clone, the records of all worktrees of that clone.

    Teardown commands ('holdfast config') run first. The removal is refused if one fails, while another holder has the
    lease, while processes use the worktree, or while git has locked it ('git worktree lock'); the error says which. It
    is also refused if the worktree contains another one, or a repository that git does not ignore, because no
    snapshot has its commits and files.

    \b
    Examples:
      holdfast worktree remove experiment --dry-run
      holdfast worktree remove experiment
    """
    repository = open_repository(repo)
    if lost:
        forgotten = repository.worktrees.forget(name)
        output.result({"forgotten": forgotten}, [f"Forgot {each}." for each in forgotten])
        return
    if dry_run:
        state, usage = repository.worktrees.state(name), repository.worktrees.usage(name)
        worktrees, repositories = repository.worktrees.below(name)
        record = {**worktree_to_json(state), **_usage_to_json(usage)}
        record |= {"worktrees": list(map(str, worktrees)), "repositories": list(map(str, repositories))}
        lines = ["Would remove:", *_worktree_lines(state, usage)]
        lines += [f"First remove the git worktree in it: {each}" for each in worktrees]
        lines += [f"Only with --force, because of the repository in it: {each}" for each in repositories]
        output.result({"dry_run": True, "would_remove": record}, lines)
        return
    named = known_lock_id(lock_id)
    how: dict[str, Any] = {"keep_unsaved": not no_snapshot, "force": force, "lock_id": named, "keep_for": keep_for}
    with showing_output():
        removed = repository.remove_worktree(name, **how)
    record = {"dry_run": False, "worktree": removed.worktree, "head_snapshot_id": removed.head_snapshot_id}
    pin, lines = removed.pin, [f"Removed {removed.worktree}."]
    record |= {"saved_snapshot_id": removed.saved, "pin_id": pin and pin.pin_id, "pinned_until": pin and pin.until}
    if (head := removed.head_snapshot_id) is not None:
        kept = "Its last snapshot is" if no_snapshot else "Its content is in the snapshot"
        end = f"{pin.until[:16].replace('T', ' ')} UTC" if pin and pin.until else "it is removed"
        until = f", which a pin protects until {end}" if pin else ""
        lines += [f"{kept} {head}{until}.", f"To bring it back: holdfast restore {head} {removed.worktree}"]
    output.result(record, lines)


def _usage_to_json(usage: Usage) -> dict[str, object]:
    """The processes that use a worktree, and how many could not be examined."""
    return {"processes": [each.as_record() for each in usage.users], "hidden_processes": usage.hidden}


def _row(state: WorktreeState, here: Path) -> list[str]:
    head = state.config.head_snapshot_id or "no snapshot"
    path = state.path.relative_to(here) if state.path.is_relative_to(here) else state.path
    return [state.config.worktree_id, head, "; ".join(_remarks(state)) or "free", str(path)]


def worktree_line(state: WorktreeState) -> str:
    head = state.config.head_snapshot_id or "no snapshot"
    return f"{state.config.worktree_id}: {'; '.join([head, *_remarks(state)])}"


def _remarks(state: WorktreeState) -> Iterator[str]:
    if state.is_shared:
        yield HIGH_RISK
    elif state.lease is not None:
        yield lease_summary(state.lease)
    if state.operation is not None:
        yield f"unfinished operation: {state.operation.kind.value}"
    if state.clone:
        yield f"in the clone {state.clone}"
    elif not state.exists:
        yield "its directory is missing"
    if state.config.label:
        yield state.config.label


def _worktree_lines(state: WorktreeState, usage: Usage) -> Iterator[str]:
    config, operation = state.config, state.operation
    yield from lease_state_lines(config, state.lease)
    where = f" (in the clone {state.clone})" if state.clone else "" if state.exists else " (missing)"
    yield f"  path      {state.path}{where}"
    if config.git:
        yield f"  branch    {config.git.branch or 'none'}{', isolated' if config.git.isolated else ''}"
    yield f"  created   {config.created_at}"
    yield f"  base      {config.base_snapshot_id or 'none'}"
    yield f"  head      {config.head_snapshot_id or 'none'}"
    if config.label:
        yield f"  label     {config.label}"
    if operation is not None:
        yield f"  pending   {operation.kind.value}, begun {format_ago(operation.begun_at)} by {operation.holder_id}"
    for each in usage.users:
        yield f"  in use    {each}"
    if usage.hidden:
        processes = "1 running process" if usage.hidden == 1 else f"{usage.hidden} running processes"
        yield f"  in use    perhaps: {processes} cannot be examined"
