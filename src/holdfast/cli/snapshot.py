"""`holdfast snapshot`, and the text output of snapshots and their differences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli import options
from holdfast.cli.entry import CommandGroup, LazyCommand
from holdfast.cli.output import Output, counted, format_size
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_worktree, proven, wait_option
from holdfast.repository.to_json import counts, is_best_effort, new_snapshot_to_json

if TYPE_CHECKING:
    from holdfast.repository.context import Consistency, Descriptor
    from holdfast.repository.history import HistoryEntry, Marks
    from holdfast.trees.engines import Engine
    from holdfast.trees.results import Change


ENGINE = "JVS_SNAPSHOT_ENGINE"
ENGINES = ("juicefs-clone", "btrfs-subvolume", "reflink", "linked", "copy")
WARNING = "warning: best effort: its files may be from different instants"


@click.command(
    cls=CommandGroup,
    table={
        "push": LazyCommand("holdfast.cli.transfer:push", "Copy snapshots to a git remote."),
        "fetch": LazyCommand("holdfast.cli.transfer:fetch", "Copy snapshots from a git remote."),
    },
)
@click.option("-m", "--note", "--message", metavar="TEXT", default="", help="A note, for people.")
@options.consistency_option(
    "the capture", default="the worktree's setting, else quiesced; best_effort in shared worktrees"
)
@click.option("--tag", metavar="NAME", help="Create this reference to the snapshot, which also protects it.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    help=f"How files are captured.  [default: {ENGINE}, else the best available]",
)
@click.option("--allow-empty", is_flag=True, help="In a git checkout: take a snapshot even if nothing has changed.")
@options.worktree_options
@options.lock_id_option
@wait_option
@options.field_option(*options.SNAPSHOT_FIELDS)
@options.with_output
def snapshot(
    output: Output,
    *,
    note: str,
    consistency: Consistency | None,
    tag: str | None,
    engine: str | None,
    allow_empty: bool,
    repo: str | None,
    worktree: str | None,
    lock_id: str | None,
    wait: float | None,
    field: str | None,
) -> None:
    """Capture the content of a worktree as a snapshot. It is published completely or not at all.

    It needs the lease of the worktree. Name the one that you hold; if the worktree is free, the command acquires the
    lease for its duration. If the lease is lost, nothing is published (status 5). If a file changes during the capture,
    a 'quiesced' snapshot fails (status 4) and nothing is published. In a git checkout, a snapshot contains tracked
    files and new files that are not ignored; if nothing has changed since the last one, none is taken.

    \b
    Examples:
      holdfast snapshot -m "tests pass"
      holdfast snapshot --tag v1 --worktree experiment
    """
    if CommandGroup.passes_on():
        return
    from holdfast.repository.snapshots import SnapshotOptions

    opened = open_worktree(repo, worktree)
    files_of_head = opened.repository.snapshots.files_of_head
    with (
        proven(opened, lock_id, "snapshot", wait=wait) as proof,
        showing("Capturing", total=files_of_head(opened.worktree)) as progress,
    ):
        wanted = SnapshotOptions(
            note=note,
            consistency=consistency,
            tag=tag,
            engine=engine_named(engine),
            progress=progress,
            warn=output.warning,
            allow_empty=allow_empty,
        )
        before = opened.repository.config(opened.worktree).head_snapshot_id
        made = opened.repository.snapshots.take(opened.worktree, proof, wanted)
    size = f"{counted(made.files, 'file')}, {format_size(made.bytes)}"
    lines = [f"{made.snapshot_id}  {size}, {made.consistency_level.value}, {made.engine}"]
    if made.snapshot_id == before:
        lines = [f"{made.snapshot_id}  nothing has changed since it was taken"]
    lines += [f"  {WARNING}"] if is_best_effort(made) else []
    lines += left_out_lines(made)
    lines += [f"  recorded, not captured: {each}" for each in made.special]
    lines += [f"  not preserved: {each}" for each in made.not_preserved]
    options.print_record(output, field, new_snapshot_to_json(made, tag), lines)


def left_out_lines(descriptor: Descriptor) -> list[str]:
    """One line about the files that a snapshot of a git checkout leaves out; none if it leaves out nothing."""
    found = descriptor.left_out or {}
    counts = [f"{found['ignored']} ignored by git"] if "ignored" in found else []
    if "nested" in found:
        counts.append(f"{counted(found['nested'], 'nested repository')}, of which only the commit is recorded")
    return [f"  left out  {'; '.join(counts)}"] if counts else []


def engine_named(flag: str | None) -> Engine | None:
    """The engine that the option names, else the environment; None if neither does."""
    text = flag or os.environ.get(ENGINE)
    if not text:
        return None
    from holdfast.errors import SettingInvalid
    from holdfast.trees.engines import Engine

    if text not in ENGINES:
        raise SettingInvalid(ENGINE, text, f"one of {', '.join(ENGINES)}")
    return Engine(text)


def entry_lines(entry: HistoryEntry, *, with_worktree: bool) -> list[str]:
    """A snapshot in a history: one line, and one more for each remark."""
    descriptor, marks = entry.descriptor, marks_text(entry.marks)
    first = f"{descriptor.snapshot_id}  {descriptor.created_at[:19].replace('T', ' ')}Z"
    from_remote = f" of {descriptor.fetched_from}" if descriptor.fetched_from else ""
    first += f"  {descriptor.worktree_id}{from_remote}" if with_worktree else ""
    lines = [first + (f"  ({marks})" if marks else "")]
    lines += [f"  {descriptor.note}"] if descriptor.note else []
    lines += [f"  restored from {descriptor.restored_from}"] if descriptor.restored_from else []
    return [*lines, f"  {WARNING}"] if entry.warning else lines


def marks_text(marks: Marks) -> str:
    heads = [f"head of {each}" for each in marks.heads]
    return ", ".join([*heads, *marks.references, *(["pinned"] if marks.pinned else [])])


def snapshot_lines(descriptor: Descriptor, marks: Marks) -> Iterator[str]:
    yield f"{descriptor.snapshot_id}: {descriptor.note or 'no note'}"
    yield f"  worktree  {descriptor.worktree_id}"
    if descriptor.fetched_from:
        yield f"  fetched   from {descriptor.fetched_from}: the worktree is on another machine"
    yield f"  taken     {descriptor.created_at} by {descriptor.holder_id}"
    yield f"  parent    {descriptor.parent_id or 'none'}"
    if descriptor.restored_from:
        yield f"  restored  from {descriptor.restored_from}"
    yield f"  level     {descriptor.consistency_level.value}"
    if is_best_effort(descriptor):
        yield f"  {WARNING}"
    yield f"  content   {counted(descriptor.files, 'file')}, {format_size(descriptor.bytes)}"
    yield f"  engine    {descriptor.engine}"
    yield f"  hash      {descriptor.payload_hash}"
    if descriptor.fencing_token is not None:
        yield f"  token     {descriptor.fencing_token} of the lease {descriptor.lock_id}"
    if text := marks_text(marks):
        yield f"  marks     {text}"
    if descriptor.doomed_by:
        yield f"  gc        marked for deletion by the plan {descriptor.doomed_by}"
    yield from left_out_lines(descriptor)
    for each in descriptor.special:
        yield f"  special   {each}: recorded, not captured"
    for each in descriptor.not_preserved:
        yield f"  lost      {each}"
    yield f"  files     holdfast export {descriptor.snapshot_id} DIR"


MANY_BELOW = 20  # entries of a new or removed directory that are listed one by one
_SIGNS = {"added": "A", "removed": "D", "modified": "M"}
_KINDS = {"f": "file", "d": "directory", "l": "symbolic link", "m": "mount point or repository"}
_KINDS |= {"p": "fifo", "s": "socket", "c": "character device", "b": "block device"}


def change_lines(changes: Iterable[Change]) -> Iterator[str]:
    """One line per difference: a letter, the path, and the kind or the aspects that differ."""
    from holdfast.trees.manifest import escaped

    for change in changes:
        words = [] if change.kind == "f" else [_KINDS.get(change.kind, change.kind)]
        implied = {"content", "mtime"} if "content" in change.aspects else set()
        words += [each for each in change.aspects if each not in implied]
        detail = f"  ({', '.join(words)})" if words else ""
        yield f"{_SIGNS[change.what]} {escaped(change.path) or '.'}{detail}"


def brief_change_lines(changes: Iterable[Change]) -> Iterator[str]:
    """Like `change_lines`, but the entries of a large directory that was added or removed are only counted:
    the ten thousand files of a package directory would hide the changes that matter."""
    from itertools import groupby

    whole = b""

    def outermost(change: Change) -> bytes:
        """The outermost directory around this path that was added or removed as a whole; else the path."""
        nonlocal whole
        if not (whole and change.path.startswith(whole)):
            whole = b"" if change.kind != "d" or change.what == "modified" else change.path + b"/"
        return whole or change.path

    for path, group in groupby(changes, key=outermost):
        below = list(group)
        if path.endswith(b"/") and len(below) > MANY_BELOW:
            line = next(change_lines(below[:1]))
            yield f"{line.removesuffix(')')} with {counted(len(below) - 1, 'entry')})"
        else:
            yield from change_lines(below)


def change_summary(changes: Iterable[Change]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts(changes).items())
