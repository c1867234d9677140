"""`holdfast restore` and `holdfast export`: bring the content of a snapshot back."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.options import dry_run_option, lock_id_option, with_output, worktree_options
from holdfast.cli.output import Output, counted, format_size
from holdfast.cli.progress import showing
from holdfast.cli.repository import current_directory, fenced_by_name, open_worktree, proven, wait_option
from holdfast.cli.snapshot import change_lines
from holdfast.errors import UsageFailure
from holdfast.repository import to_json
from holdfast.repository.restore import RestoreOptions

if TYPE_CHECKING:
    from holdfast.cli.repository import OpenedRepository
    from holdfast.repository.context import Descriptor


@click.command()
@click.argument("snapshot", metavar="ID")
@click.argument("name", required=False)
@click.option("--inplace", is_flag=True, help="Replace the content of the worktree.")
@click.option("--reason", metavar="TEXT", help="With --inplace: the reason. Required and recorded.")
@click.option("--path", metavar="PATH", help="With --inplace: restore only this path, relative to the worktree.")
@click.option("--no-snapshot", is_flag=True, help="With --inplace: discard the replaced content.")
@click.option("--allow-shared", is_flag=True, help="With --inplace: allow a shared worktree. High-risk.")
@click.option("--force", is_flag=True, help="With --inplace: restore even if processes have files open for writing.")
@dry_run_option("Show what would be done; change nothing.")
@worktree_options
@lock_id_option
@wait_option
@with_output
def restore(
    output: Output,
    *,
    snapshot: str,
    name: str | None,
    inplace: bool,
    dry_run: bool,
    repo: str | None,
    worktree: str | None,
    lock_id: str | None,
    wait: float | None,
    **only_inplace: Any,
) -> None:
    """Restore the snapshot ID: a prefix of an id, a reference, head, or head~2.

    Without --inplace, its content goes into a new worktree called NAME. Existing worktrees are not touched, and no
    lease is needed.

    With --inplace, its content replaces that of the worktree. The previous content becomes a snapshot first, unless it
    equals the head. This needs the lease of the worktree. Name the one that you hold; if the worktree is free, the
    command acquires the lease for its duration. Refused while a process has a file in the worktree open for writing,
    because its later writes would be lost.

    In a git checkout, the directory stays the same: only files that differ change, and ignored files and branches are
    not touched. Elsewhere, a new directory replaces it in one step. A process whose current directory is in the
    worktree stays in the old one and must enter the new one; the output names such processes.

    The restored content is verified against its hashes. If the snapshot is damaged, nothing is restored, and the error
    names the damaged files.

    \b
    Examples:
      holdfast restore v1
      holdfast restore head~1 --inplace --reason "went wrong" --dry-run
      holdfast restore v1 --inplace --reason "was lost" --path docs/plan.md
    """
    opened = open_worktree(repo, worktree)
    with fenced_by_name(opened, lock_id) if inplace else contextlib.nullcontext():
        found = opened.repository.snapshots.named(snapshot, seen_from=opened.worktree)
    if not inplace:
        if wrong := [option for option, value in only_inplace.items() if value]:
            raise UsageFailure(f"--{wrong[0].replace('_', '-')} requires --inplace")
        _restore_into_new(output, opened, found, name, dry_run=dry_run)
        return
    if name:
        raise UsageFailure("NAME is for a new worktree, not for --inplace (see --worktree)")
    how = _restore_options(**only_inplace)
    if dry_run:
        _show_plan(output, opened, found, how)
    else:
        _restore_in_place(output, opened, found, how, lock_id=lock_id, wait=wait)


def _restore_in_place(
    output: Output,
    opened: OpenedRepository,
    found: Descriptor,
    how: RestoreOptions,
    *,
    lock_id: str | None,
    wait: float | None,
) -> None:
    from holdfast.fs.names import shortened

    check = partial(opened.repository.snapshots.check_restore, opened.worktree, how)
    inside = (
        how.path is None
        and opened.repository.home.replaces_directory
        and current_directory().is_relative_to(opened.repository.payload(opened.worktree))
    )
    purpose = shortened(f"restore {found.snapshot_id} in place: {how.reason}")
    with (
        proven(opened, lock_id, purpose, wait=wait, check=check) as proof,
        showing("Restoring", total=found.files) as report,
    ):
        restored = opened.repository.snapshots.restore_in_place(
            opened.worktree, found.snapshot_id, proof, how._replace(progress=report)
        )
    lines = [f"Restored {how.path or 'everything'} of {found.snapshot_id} in {opened.worktree}."]
    if restored.kept:
        lines.append(f"The previous content is in the snapshot {restored.kept.snapshot_id}.")
    if restored.late:
        lines.append(f"Files written during the restore are in the snapshot {restored.late}.")
    head = f"The head is now {restored.published.snapshot_id}." if restored.published else None
    lines.append(head or "It is not in a snapshot yet.")
    lines += [f"Still in the old directory: {each}" for each in restored.standing]
    if inside:
        lines.append('You are in the old directory. Enter the new one: cd "$PWD"')
    output.result(to_json.restored_in_place_to_json(opened.worktree, how, restored), lines)


def _restore_options(
    *, reason: str | None, path: str | None, no_snapshot: bool, allow_shared: bool, force: bool
) -> RestoreOptions:
    part = path.rstrip("/") if path else None
    return RestoreOptions(reason or "", part, keep=not no_snapshot, allow_shared=allow_shared, force=force)


def _restore_into_new(
    output: Output, opened: OpenedRepository, found: Descriptor, name: str | None, *, dry_run: bool
) -> None:
    snapshots = opened.repository.snapshots
    if dry_run:
        chosen = name or next(snapshots.free_names(found.snapshot_id))
    else:
        with showing("Restoring", total=found.files) as progress:
            chosen = snapshots.restore(found.snapshot_id, name, progress=progress).worktree_id
    path = opened.repository.payload(chosen)
    verb = "Would restore" if dry_run else "Restored"
    record = to_json.restored_to_json(chosen, path, found.snapshot_id, dry_run=dry_run)
    output.result(record, [f"{verb} {found.snapshot_id} into the new worktree {chosen}: {path}"])


_EFFECTS = {"added": "come back", "removed": "be removed", "modified": "change"}


def _show_plan(output: Output, opened: OpenedRepository, found: Descriptor, how: RestoreOptions) -> None:
    plan = opened.repository.snapshots.plan(opened.worktree, found.snapshot_id, how)
    numbers = to_json.counts(to_json.undone(plan))
    if plan.keeps:
        kept = "The current content would become a snapshot first."
    elif how.keep:
        kept = "The current content equals the head: nothing would be lost."
    else:
        kept = "The current content would be lost."
    lines = [
        f"Would restore {found.snapshot_id} in {opened.worktree}:",
        *change_lines(to_json.undone(plan)),
        ", ".join(f"{numbers[what]} would {effect}" for what, effect in _EFFECTS.items()) + ".",
        kept,
        *(f"Would stay in the old directory: {each}" for each in plan.standing),
    ]
    output.result(to_json.restore_plan_to_json(opened.worktree, how, plan), lines)


@click.command()
@click.argument("snapshot", metavar="ID")
@click.argument("directory", metavar="DIR")
@click.option("--path", metavar="PATH", help="Export only this file or directory, as DIR.")
@worktree_options
@with_output
def export(
    output: Output, *, snapshot: str, directory: str, path: str | None, repo: str | None, worktree: str | None
) -> None:
    """Write the content of the snapshot ID to DIR, which must not exist yet.

    ID is a prefix of an id, a reference, head, or head~2. The copy shares nothing with the snapshot, and Holdfast does
    not track it. No lease is needed. To continue working from a snapshot, restore it into a worktree instead: 'holdfast
    restore'.

    \b
    Examples:
      holdfast export head~2 /tmp/before
      holdfast export v1 old.py --path src/app.py
    """
    from holdfast.fs.names import split_relative
    from holdfast.trees.walker import shown as shown_path

    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    found = snapshots.named(snapshot, seen_from=opened.worktree)
    destination = Path(os.path.abspath(current_directory() / directory))
    wanted = None if path is None else os.fsencode("/".join(split_relative(path.rstrip("/") or path)))
    with showing("Exporting", total=None if path else found.files) as progress:
        made = snapshots.export(found.snapshot_id, destination, path=wanted, progress=progress)
    record = {"snapshot_id": found.snapshot_id, "path": path, "directory": str(destination)}
    contents = {"files": made.files, "bytes": made.bytes, "not_preserved": list(made.not_preserved)}
    size = f"{counted(made.files, 'file')}, {format_size(made.bytes)}"
    line = f"Wrote {path or 'all'} of {found.snapshot_id} to {shown_path(str(destination))}: {size}."
    output.result({**record, **contents}, [line, *(f"Not preserved: {each}" for each in made.not_preserved)])
