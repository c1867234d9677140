"""Snapshots and differences as they are shown: as records for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from holdfast.cli.progress import bytes_as_text, files_as_text
from holdfast.repository.to_json import comparison_to_json as comparison_to_json
from holdfast.repository.to_json import counts, is_best_effort
from holdfast.repository.to_json import marks_to_json as marks_to_json
from holdfast.repository.to_json import snapshot_to_json as snapshot_to_json

if TYPE_CHECKING:
    from holdfast.repository.history import HistoryEntry, Marks
    from holdfast.repository.records import Descriptor
    from holdfast.trees import Change

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


def lines(descriptor: Descriptor, marks: Marks) -> Iterator[str]:
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


def summary(changes: Iterable[Change]) -> str:
    numbers = counts(changes)
    return ", ".join(f"{number} {what}" for what, number in numbers.items())
