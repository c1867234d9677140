"""`holdfast snapshot`: keep what is in a worktree."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from holdfast.cli.fields import SNAPSHOT, field_of, tell
from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.proving import proven, wait_option
from holdfast.cli.repository import lock_id_option, open_worktree, repo_option, worktree_option

if TYPE_CHECKING:
    from holdfast.cli.repository import Opened
    from holdfast.trees import Engine

ENGINE = "JVS_SNAPSHOT_ENGINE"
ENGINES = ("juicefs-clone", "btrfs-subvolume", "reflink", "linked", "copy")
LEVELS = ("quiesced", "best_effort")


@click.command(short_help="Keep what is in a worktree.")
@click.option("-m", "--note", "--message", metavar="TEXT", default="", help="What this is, for people.")
@click.option(
    "--consistency",
    type=click.Choice(LEVELS),
    help="Whether nothing may change meanwhile.  [default: as the worktree has it, else quiesced, "
    "in shared worktrees best_effort]",
)
@click.option("--tag", metavar="NAME", help="A name for it, which also keeps it from being collected.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    help=f"How files get into it.  [default: {ENGINE}, else the best one that works here]",
)
@repo_option
@worktree_option
@lock_id_option
@wait_option
@field_of(*SNAPSHOT)
@json_option
@click.pass_obj
def snapshot(
    output: Output,
    *,
    note: str,
    consistency: str | None,
    tag: str | None,
    engine: str | None,
    repo: str | None,
    worktree: str | None,
    lock_id: str | None,
    wait: float | None,
    field: str | None,
) -> None:
    """Keep everything that is in a worktree as a snapshot. It is there whole, or not at all.

    It takes the lock of the worktree: the one that you name, or, if nobody holds it, one for as long as
    the command runs. If the lock is lost meanwhile nothing is published (status 5). If a file changes
    while it is being captured, a 'quiesced' snapshot fails (status 4) and nothing is published.

    \b
    Examples:
      holdfast snapshot -m "tests pass"
      holdfast snapshot --tag v1 --worktree experiment
    """
    from holdfast.cli import progress
    from holdfast.cli.snapshot_view import WARNING
    from holdfast.repository.records import Consistency
    from holdfast.repository.snapshots import SnapshotOptions
    from holdfast.repository.to_json import is_best_effort, new_snapshot_to_json

    opened = open_worktree(repo, worktree)
    with (
        proven(opened, lock_id, "snapshot", wait=wait) as proof,
        progress.shown(output, "Capturing", files=_about_how_many(opened)) as told,
    ):
        wanted = SnapshotOptions(
            note=note,
            consistency=Consistency(consistency) if consistency else None,
            tag=tag,
            engine=engine_named(engine),
            progress=told,
        )
        made = opened.repository.snapshots.take(opened.worktree, proof, wanted)
    much = f"{progress.files_as_text(made.files)}, {progress.bytes_as_text(made.bytes)}"
    lines = [f"{made.snapshot_id}  {much}, {made.consistency_level.value}, {made.engine}"]
    lines += [f"  {WARNING}"] if is_best_effort(made) else []
    lines += [f"  recorded, not captured: {each}" for each in made.special]
    lines += [f"  not preserved: {each}" for each in made.not_preserved]
    tell(output, field, new_snapshot_to_json(made, tag), lines)


def engine_named(flag: str | None) -> Engine | None:
    """The engine that is asked for: a flag, over the environment."""
    from holdfast.errors import SettingInvalid
    from holdfast.trees import Engine

    text = flag or os.environ.get(ENGINE)
    if not text:
        return None
    if text not in ENGINES:
        raise SettingInvalid(ENGINE, text, f"one of {', '.join(ENGINES)}")
    return Engine(text)


def _about_how_many(opened: Opened) -> int | None:
    """How many files the head has: most likely about as many as there will be."""
    from holdfast.repository.records import DESCRIPTORS

    control = opened.repository.control
    head = control.config(opened.worktree).head_snapshot_id
    document = control.store.read(DESCRIPTORS.key(head)) if head else None
    return None if document is None else document.record.files
