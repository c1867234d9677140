"""`holdfast restore`: bring a snapshot back, into a new worktree or in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import (
    current_directory,
    lock_id_option,
    open_worktree,
    proven,
    repo_option,
    wait_option,
    worktree_option,
)
from holdfast.errors import UsageFailure

if TYPE_CHECKING:
    from holdfast.cli.repository import OpenedRepository
    from holdfast.repository.context import Descriptor, Proof
    from holdfast.repository.restore import InPlace


@click.command(short_help="Bring a snapshot back: into a new worktree, or in place.")
@click.argument("snapshot", metavar="ID")
@click.argument("name", required=False)
@click.option("--inplace", is_flag=True, help="Replace what is in the worktree now.")
@click.option("--reason", metavar="TEXT", help="With --inplace: why. It is required, and recorded.")
@click.option(
    "--path", metavar="PATH", help="With --inplace: only this, relative to the worktree's directory."
)
@click.option("--no-snapshot", is_flag=True, help="With --inplace: do not keep what is replaced. It is lost.")
@click.option("--allow-shared", is_flag=True, help="With --inplace: also in a shared worktree. High-risk.")
@click.option("--force", is_flag=True, help="With --inplace: in spite of processes that write into it.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@repo_option
@worktree_option
@lock_id_option
@wait_option
@json_option
@click.pass_obj
def restore(
    output: Output,
    *,
    snapshot: str,
    name: str | None,
    inplace: bool,
    reason: str | None,
    path: str | None,
    no_snapshot: bool,
    allow_shared: bool,
    force: bool,
    dry_run: bool,
    repo: str | None,
    worktree: str | None,
    lock_id: str | None,
    wait: float | None,
) -> None:
    """Bring back the snapshot ID: its first characters, a reference, head or head~2.

    Without --inplace a new worktree called NAME gets its content; nothing that exists is touched, and
    no lock is needed.

    With --inplace the directory of the worktree is exchanged for one with the content of the snapshot, in
    one step. What was there is kept as a snapshot first, unless it is the same as the head. It takes the
    lock of the worktree: the one that you name, or, if nobody holds it, one for as long as the command
    runs. A program that is in the directory meanwhile stays in the old one: leave it, and enter it again.
    Refused while a program has a file in it open for writing: what it writes afterwards would be lost.

    \b
    Examples:
      holdfast restore v1
      holdfast restore head~1 --inplace --reason "went wrong" --dry-run
      holdfast restore v1 --inplace --reason "was lost" --path docs/plan.md
    """
    from holdfast.fs.names import shortened
    from holdfast.repository.restore import InPlace

    opened = open_worktree(repo, worktree)
    found = opened.repository.snapshots.named(snapshot, seen_from=opened.worktree)
    if not inplace:
        given = {
            "--reason": reason,
            "--path": path,
            "--no-snapshot": no_snapshot,
            "--allow-shared": allow_shared,
            "--force": force,
        }
        _refuse([option for option, value in given.items() if value], "is for --inplace")
        _into_new(output, opened, found, name, dry_run=dry_run)
        return
    _refuse(["NAME"] if name else [], "is for a new worktree, not for --inplace (see --worktree)")
    how = InPlace(
        reason=reason or "",
        path=path.rstrip("/") if path else None,
        keep=not no_snapshot,
        allow_shared=allow_shared,
        force=force,
    )
    if dry_run:
        _plan(output, opened, found, how)
    else:
        purpose = shortened(f"restore {found.snapshot_id} in place: {how.reason}")
        _in_place(output, opened, found, how, lambda: proven(opened, lock_id, purpose, wait=wait))


def _refuse(options: list[str], why: str) -> None:
    if options:
        raise UsageFailure(f"{options[0]} {why}")


def _into_new(
    output: Output, opened: OpenedRepository, found: Descriptor, name: str | None, *, dry_run: bool
) -> None:
    from holdfast.repository.to_json import restored_to_json

    snapshots = opened.repository.snapshots
    if dry_run:
        chosen = name or next(snapshots.free_names(found.snapshot_id))
        path = opened.repository.payload(chosen)
        output.result(
            restored_to_json(chosen, path, found.snapshot_id, dry_run=True),
            [f"Would restore {found.snapshot_id} into the new worktree {chosen}: {path}"],
        )
        return
    config = snapshots.restore(found.snapshot_id, name)
    path = opened.repository.payload(config.worktree_id)
    output.result(
        restored_to_json(config.worktree_id, path, found.snapshot_id, dry_run=False),
        [f"Restored {found.snapshot_id} into the new worktree {config.worktree_id}: {path}"],
    )


def _plan(output: Output, opened: OpenedRepository, found: Descriptor, how: InPlace) -> None:
    from holdfast.cli.snapshot import change_lines
    from holdfast.repository.to_json import counts, restore_plan_to_json, undone

    plan = opened.repository.snapshots.plan(opened.worktree, found.snapshot_id, how)
    numbers = counts(undone(plan))
    told = [f"{numbers[what]} would {verb}" for what, verb in _VERBS.items()]
    kept = "What is there now would be kept as a snapshot first." if plan.keeps else _not_kept(how)
    output.result(
        restore_plan_to_json(opened.worktree, how, plan),
        [
            f"Would restore {found.snapshot_id} in {opened.worktree}:",
            *change_lines(undone(plan)),
            ", ".join(told) + ".",
            kept,
        ],
    )


_VERBS = {"added": "come back", "removed": "go", "modified": "change"}


def _not_kept(how: InPlace) -> str:
    if how.keep:
        return "What is there now is the same as the head: nothing would be lost."
    return "What is there now would not be kept."


def _is_inside(opened: OpenedRepository) -> bool:
    """Whether the current directory is the worktree's, or below it."""
    here, payload = current_directory(), opened.repository.payload(opened.worktree)
    return payload in (here, *here.parents)


def _in_place(
    output: Output,
    opened: OpenedRepository,
    found: Descriptor,
    how: InPlace,
    right: Callable[[], AbstractContextManager[Proof | None]],
) -> None:
    from holdfast.cli import output as cli_output
    from holdfast.repository.to_json import restored_in_place_to_json

    opened.repository.snapshots.check_restore(opened.worktree, how)  # before anybody's lock is asked for
    inside = how.path is None and _is_inside(opened)
    with (
        right() as proof,
        cli_output.shown(output, "Restoring", files=found.files) as told,
    ):
        restored = opened.repository.snapshots.restore_in_place(
            opened.worktree, found.snapshot_id, proof, how._replace(progress=told)
        )
    kept = restored.kept.snapshot_id if restored.kept else None
    head = restored.published.snapshot_id if restored.published else None
    lines = [f"Restored {how.path or 'everything'} of {found.snapshot_id} in {opened.worktree}."]
    lines += [f"What was there before is in the snapshot {kept}."] if kept else []
    if restored.late:
        lines.append(f"What was written while it was restored is in the snapshot {restored.late}.")
    lines += [f"The head is now {head}."] if head else ["It is unsaved work on top of the head."]
    lines += ['You are in the old directory. Enter the new one: cd "$PWD"'] if inside else []
    output.result(restored_in_place_to_json(opened.worktree, how, restored), lines)


@click.command(short_help="Write what a snapshot holds into a new directory.")
@click.argument("snapshot", metavar="ID")
@click.argument("directory", metavar="DIR")
@click.option("--path", metavar="PATH", help="Only this file or directory of it; DIR is what it becomes.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def export(
    output: Output, *, snapshot: str, directory: str, path: str | None, repo: str | None, worktree: str | None
) -> None:
    """Write what the snapshot ID holds into DIR, to look at or to take elsewhere. DIR must not be there yet.

    ID is the first characters of one, a reference, head or head~2. What is written is yours: it shares
    nothing with the snapshot, and Holdfast does not know of it any more. It takes no lock. To go on working
    from a snapshot, make a worktree of it instead: 'holdfast restore'.

    \b
    Examples:
      holdfast export head~2 /tmp/before
      holdfast export v1 old.py --path src/app.py
    """
    import os
    from pathlib import Path

    from holdfast.cli import output as cli_output
    from holdfast.fs.names import split_relative
    from holdfast.trees.walker import shown

    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    found = snapshots.named(snapshot, seen_from=opened.worktree)
    destination = Path(os.path.abspath(current_directory() / directory))
    wanted = None if path is None else os.fsencode("/".join(split_relative(path.rstrip("/") or path)))
    with cli_output.shown(output, "Exporting", files=None if path else found.files) as told:
        made = snapshots.export(found.snapshot_id, destination, path=wanted, progress=told)
    data = {
        "snapshot_id": found.snapshot_id,
        "path": path,
        "directory": str(destination),
        "files": made.files,
        "bytes": made.bytes,
        "not_preserved": list(made.not_preserved),
    }
    much = f"{cli_output.files_as_text(made.files)}, {cli_output.bytes_as_text(made.bytes)}"
    lines = [f"Wrote {path or 'all'} of {found.snapshot_id} to {shown(str(destination))}: {much}."]
    output.result(data, [*lines, *(f"Not kept: {each}" for each in made.not_preserved)])
