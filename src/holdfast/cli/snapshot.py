"""`holdfast snapshot`: keep what is in a worktree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli.options import SNAPSHOT_FIELDS, field_of, json_option, tell
from holdfast.cli.output import Output, bytes_as_text, files_as_text
from holdfast.cli.repository import (
    lock_id_option,
    open_worktree,
    proven,
    repo_option,
    wait_option,
    worktree_option,
)
from holdfast.repository.to_json import comparison_to_json as comparison_to_json
from holdfast.repository.to_json import counts, is_best_effort
from holdfast.repository.to_json import marks_to_json as marks_to_json
from holdfast.repository.to_json import snapshot_to_json as snapshot_to_json

if TYPE_CHECKING:
    from holdfast.cli.repository import OpenedRepository
    from holdfast.repository.history import HistoryEntry, Marks
    from holdfast.repository.records import Descriptor
    from holdfast.trees import Change, Engine


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
@field_of(*SNAPSHOT_FIELDS)
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
    from holdfast.cli import output as cli_output
    from holdfast.repository.records import Consistency
    from holdfast.repository.snapshots import SnapshotOptions
    from holdfast.repository.to_json import is_best_effort, new_snapshot_to_json

    opened = open_worktree(repo, worktree)
    with (
        proven(opened, lock_id, "snapshot", wait=wait) as proof,
        cli_output.shown(output, "Capturing", files=_about_how_many(opened)) as told,
    ):
        wanted = SnapshotOptions(
            note=note,
            consistency=Consistency(consistency) if consistency else None,
            tag=tag,
            engine=engine_named(engine),
            progress=told,
        )
        made = opened.repository.snapshots.take(opened.worktree, proof, wanted)
    much = f"{cli_output.files_as_text(made.files)}, {cli_output.bytes_as_text(made.bytes)}"
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


def _about_how_many(opened: OpenedRepository) -> int | None:
    """How many files the head has: most likely about as many as there will be."""
    from holdfast.repository.records import DESCRIPTORS

    control = opened.repository.control
    head = control.config(opened.worktree).head_snapshot_id
    document = control.store.read(DESCRIPTORS.key(head)) if head else None
    return None if document is None else document.record.files


MANY_BELOW = 20
"""How many entries of a new directory are named one by one."""
WARNING = "warning: best effort, its files may be of different moments"
SIGNS = {"added": "A", "removed": "D", "modified": "M"}
KINDS = {
    "f": "file",
    "d": "directory",
    "l": "symbolic link",
    "p": "fifo",
    "s": "socket",
    "c": "character device",
    "b": "block device",
    "m": "mount point",
}


def entry_lines(entry: HistoryEntry, *, with_worktree: bool) -> list[str]:
    """A snapshot of a history, for people: one line, and one more for each thing to know about it."""
    descriptor = entry.descriptor
    first = f"{descriptor.snapshot_id}  {descriptor.created_at[:19].replace('T', ' ')}Z"
    if with_worktree:
        first += f"  {descriptor.worktree_id}"
    marks = marks_text(entry.marks)
    lines = [first + (f"  ({marks})" if marks else "")]
    if descriptor.note:
        lines.append(f"  {descriptor.note}")
    if descriptor.restored_from:
        lines.append(f"  restored from {descriptor.restored_from}")
    if entry.warning:
        lines.append(f"  {WARNING}")
    return lines


def marks_text(marks: Marks) -> str:
    heads = [f"head of {each}" for each in marks.heads]
    return ", ".join([*heads, *marks.references, *(["pinned"] if marks.pinned else [])])


def snapshot_lines(descriptor: Descriptor, marks: Marks) -> Iterator[str]:
    """One snapshot with all that is known."""
    yield f"{descriptor.snapshot_id}: {descriptor.note or 'no note'}"
    yield f"  worktree  {descriptor.worktree_id}"
    yield f"  taken     {descriptor.created_at} by {descriptor.holder_id}"
    yield f"  parent    {descriptor.parent_id or 'none'}"
    if descriptor.restored_from:
        yield f"  restored  from {descriptor.restored_from}"
    yield f"  promise   {descriptor.consistency_level.value}"
    if is_best_effort(descriptor):
        yield f"  {WARNING}"
    yield f"  content   {files_as_text(descriptor.files)}, {bytes_as_text(descriptor.bytes)}"
    yield f"  engine    {descriptor.engine}"
    yield f"  hash      {descriptor.payload_hash}"
    if descriptor.fencing_token is not None:
        yield f"  token     {descriptor.fencing_token}, lock {descriptor.lock_id}"
    if text := marks_text(marks):
        yield f"  named     {text}"
    if descriptor.doomed_by:
        yield f"  doomed    by the plan {descriptor.doomed_by}: it is being deleted"
    for each in descriptor.special:
        yield f"  special   {each}: recorded, not captured"
    for each in descriptor.not_preserved:
        yield f"  lost      {each}"
    yield f"  files     holdfast export {descriptor.snapshot_id} DIR"


# --- Differences ------------------------------------------------------------------------------------


def change_lines(changes: Iterable[Change]) -> Iterator[str]:
    """A line for each difference: a letter, the path, and what it is or in what respect it differs."""
    from holdfast.trees.manifest import escaped

    for change in changes:
        words = [] if change.kind == "f" else [KINDS.get(change.kind, change.kind)]
        hidden = {"content", "mtime"} if "content" in change.aspects else set()
        words += [each for each in change.aspects if each not in hidden]
        told = f"  ({', '.join(words)})" if words else ""
        yield f"{SIGNS[change.what]} {escaped(change.path) or '.'}{told}"


def brief_change_lines(changes: Iterable[Change]) -> Iterator[str]:
    """The same, but what is below a directory that has come or gone as a whole is only counted, if it is
    much: nobody reads the ten thousand files of a package directory, and they hide what was changed."""
    from itertools import groupby

    whole = b""

    def outermost(change: Change) -> bytes:
        """The directory above everything, if this is in one that has come or gone whole; else its path."""
        nonlocal whole
        if not (whole and change.path.startswith(whole)):
            whole = b"" if change.kind != "d" or change.what == "modified" else change.path + b"/"
        return whole or change.path

    for path, group in groupby(changes, key=outermost):
        below = list(group)
        if path.endswith(b"/") and len(below) > MANY_BELOW:
            line = next(change_lines(below[:1]))
            yield f"{line.removesuffix(')')} with {len(below) - 1} entries)"
        else:
            yield from change_lines(below)


def change_summary(changes: Iterable[Change]) -> str:
    numbers = counts(changes)
    return ", ".join(f"{number} {what}" for what, number in numbers.items())
