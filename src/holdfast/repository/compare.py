"""What is different: a worktree from its head, or from any snapshot, or two snapshots. Takes no lock.

Nothing keeps a snapshot from being collected while it is compared; that is told as `SnapshotCollected`, never
as a difference or as damage.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import AlreadyExists, Failure, NotFound, Refused, TooLarge
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, close_quietly, io_failure, move
from holdfast.repository.context import (
    RepositoryContext,
    is_ready,
    reading,
    refuse_if_collected,
    resolve,
    usable,
    visible,
)
from holdfast.repository.payloads import refuse_replaced, scratch
from holdfast.repository.records import Descriptor

if TYPE_CHECKING:
    from holdfast.trees.restore import Materialised
    from holdfast.trees.scan import Progress
    from holdfast.trees.shared_dirs import SharedDirectory
    from holdfast.trees.verify import Change


MOST_TEXT = 4 << 20
"""The largest file whose lines are compared."""
_LOOKED_AT = 8192
"""How much of a file is looked at to tell whether it is text."""


class Side(NamedTuple):
    """One of the two that are compared: a snapshot, or a worktree as it is now, or nothing at all."""

    label: str
    files: Path | None
    """The directory of a worktree."""
    descriptor: Descriptor | None


class Comparison(NamedTuple):
    """Two sides, and what is different in the second one."""

    old: Side
    new: Side
    changes: tuple[Change, ...]


def status(control: RepositoryContext, worktree: str) -> Comparison:
    """What has changed in a worktree since its head; all that is in it, if it has none."""
    config = control.config(worktree)
    tip = config.head_snapshot_id or config.base_snapshot_id
    head = Side("nothing", None, None) if tip is None else _snapshot(visible(control, tip))
    return _with_worktree(control, head, worktree)


def compare(control: RepositoryContext, worktree: str, old: str | None, new: str | None) -> Comparison:
    """What is different from the snapshot `old` (else the head) in `new`, else in the worktree as it is."""
    if old is None:
        return status(control, worktree)
    one = _snapshot(resolve(control, old, worktree=worktree))
    if new is None:
        return _with_worktree(control, one, worktree)
    from holdfast.trees.verify import compare as compare_trees

    other = _snapshot(resolve(control, new, worktree=worktree))
    ids = [each.descriptor.snapshot_id for each in (one, other) if each.descriptor]
    with reading(control, *ids):
        found = tuple(filter(is_work, compare_trees(*map(control.places.tree, ids))))
    return Comparison(one, other, found)


def unsaved(control: RepositoryContext, payload: Path, tip: str | None, worktree: str) -> Iterator[Change]:
    """What is in a directory and not in the snapshot `tip` as it is there, or the other way round."""
    from holdfast.trees.verify import changes

    tree = None if tip is None else control.places.tree(tip)
    found = changes(payload, tree, cache=control.places.stat_cache(worktree))
    return (each for each in found if each.path and is_work(each)) if tip is None else filter(is_work, found)


def differs(control: RepositoryContext, payload: Path, tip: str | None, worktree: str) -> bool:
    """Whether a directory is not what the snapshot `tip` holds; one that is not complete is like nothing."""
    if tip is not None and not is_ready(control.places, tip):
        return True
    return next(unsaved(control, payload, tip, worktree), None) is not None


def below(path: str, found: Iterable[Change]) -> Iterator[Change]:
    """Of these differences, those at `path` and below it."""
    top = os.fsencode(path)
    return (each for each in found if each.path == top or each.path.startswith(top + b"/"))


def is_work(change: Change) -> bool:
    """Whether a difference is worth anything: not the mere time at which a directory was changed."""
    return not (change.kind == "d" and change.aspects == ("mtime",))


def _with_worktree(control: RepositoryContext, old: Side, worktree: str) -> Comparison:
    refuse_replaced(control, worktree)
    payload = control.places.payload(worktree)
    tip = None if old.descriptor is None else old.descriptor.snapshot_id
    with reading(control, *([tip] if tip else [])):
        found = tuple(unsaved(control, payload, tip, worktree))
    return Comparison(old, Side(worktree, payload, None), found)


def _snapshot(descriptor: Descriptor) -> Side:
    return Side(descriptor.snapshot_id, None, descriptor)


# --- Lines ------------------------------------------------------------------------------------------


class Patch(NamedTuple):
    """How the lines of one file differ; `lines` is None if it is not text, or too long."""

    change: Change
    lines: tuple[str, ...] | None

    @property
    def added(self) -> int:
        return self._count("+")

    @property
    def removed(self) -> int:
        return self._count("-")

    def _count(self, sign: str) -> int:
        return sum(each.startswith(sign) for each in (self.lines or ())[2:])


def patches(control: RepositoryContext, comparison: Comparison) -> Iterator[Patch]:
    """The differing lines of every file and symbolic link whose content differs, in the usual form."""
    from holdfast.trees.manifest import escaped

    one, other = _Content(control, comparison.old), _Content(control, comparison.new)
    for change in comparison.changes:
        if not _has_lines(change):
            continue
        old = one.lines(change.path) if change.what != "added" else []
        new = other.lines(change.path) if change.what != "removed" else []
        if old is None or new is None:
            yield Patch(change, None)
            continue
        name = _on_one_line(escaped(change.path))
        before = "/dev/null" if change.what == "added" else f"a/{name}"
        after = "/dev/null" if change.what == "removed" else f"b/{name}"
        yield Patch(change, tuple(_marked(difflib.unified_diff(old, new, before, after, lineterm=""))))


def _on_one_line(name: str) -> str:
    """A name in the head of a patch: a line break in it must not make lines of its own."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)


def _has_lines(change: Change) -> bool:
    if change.kind not in ("f", "l"):
        return False
    return change.what != "modified" or bool({"content", "target", "kind"} & set(change.aspects))


class _Content:
    """What the files of one side hold."""

    def __init__(self, control: RepositoryContext, side: Side) -> None:
        self._control, self._side = control, side
        self._homes: Mapping[bytes, SharedDirectory] | None = None

    def lines(self, path: bytes) -> list[str] | None:
        """The lines of a file, without their breaks but for a last one that has none; None if no text."""
        try:
            content = self._read(path)
        except TooLarge:
            return None
        except NotFound:
            if self._side.descriptor is not None:
                refuse_if_collected(self._control, self._side.descriptor.snapshot_id)
            return None
        if b"\0" in content[:_LOOKED_AT]:
            return None
        lines = content.decode("utf-8", "backslashreplace").split("\n")
        if lines[-1] == "":
            return lines[:-1]
        return [*lines[:-1], lines[-1] + _NO_END]

    def _read(self, path: bytes) -> bytes:
        place = self._place(path)
        try:
            return b"" if place is None else _content(place)
        except NotFound:
            again = self._place(path)
            if again is None or again == place:
                raise
            return _content(again)  # another snapshot that has it was collected meanwhile

    def _place(self, path: bytes) -> Path | None:
        """Where a file is; None if there is nothing on this side."""
        if self._side.descriptor is None:
            return None if self._side.files is None else self._side.files / os.fsdecode(path)
        from holdfast.trees.shared_dirs import located, read_shared_directories

        tree = self._control.places.tree(self._side.descriptor.snapshot_id)
        if self._homes is None:
            with reading(self._control, self._side.descriptor.snapshot_id):
                self._homes = read_shared_directories(tree)
        return located(tree, self._homes, path)


_NO_END = "\n\\ No newline at end of file"


def _marked(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield from line.split("\n")


def _content(path: Path) -> bytes:
    try:
        return calls.readlink(path).encode("utf-8", "surrogateescape")
    except OSError:
        pass  # no symbolic link
    try:
        return durable.read(path, limit=MOST_TEXT)
    except Failure:
        raise
    except OSError as error:
        raise io_failure("read", path, error) from error


def export(
    control: RepositoryContext,
    snapshot_id: str,
    destination: Path,
    *,
    path: bytes | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Make `destination`, where nothing is yet, hold what the snapshot holds, or the one `path` of it."""
    from holdfast.trees.restore import materialise
    from holdfast.trees.walker import remove_tree, synced

    _check(control, destination)
    draft = destination.with_name(f".{destination.name[:200]}-{secrets.token_hex(6)}.tmp")
    with contextlib.ExitStack() as stack:
        control.places.reserve.relieve(  # 1. also from a full disk, to another one
            lambda: stack.enter_context(scratch(control, "export", uses=[snapshot_id]))
        )
        usable(visible(control, snapshot_id))
        tree = control.places.tree(snapshot_id)
        try:
            with synced(destination.parent):
                made = materialise(tree, draft, only=path, progress=progress)  # 2
            move(draft, destination)  # 3
        except BaseException:
            with contextlib.suppress(Failure):
                remove_tree(draft)
            raise
    return made


def _check(control: RepositoryContext, destination: Path) -> None:
    """Refuse early what would be refused when all is made, and to write where only we do."""
    private = calls.stat(control.places.root / ".jvs")
    try:
        with Directory.open(destination.parent) as parent:
            if parent.status(destination.name) is not None:
                raise AlreadyExists(
                    f"{destination} is there already",
                    hint="Name a directory that is not there yet: nothing is ever overwritten.",
                    path=str(destination),
                )
            inside = _is_inside(destination.parent, private)
    except NotFound:
        raise NotFound(
            f"there is no directory {destination.parent}",
            hint="Make it first, or name another place.",
            path=str(destination.parent),
        ) from None
    if inside:
        raise Refused(
            f"{destination} is inside of .jvs, where only Holdfast writes",
            hint="Name a place outside of it.",
            path=str(destination),
        )


def _is_inside(directory: Path, other: os.stat_result) -> bool:
    """Whether a directory is the other one, or somewhere below it, whatever links lead there."""
    from holdfast.trees.walker import DIRECTORY, open_directory

    here = open_directory(os.fspath(directory))
    try:
        while True:
            status = calls.fstat(here)
            if os.path.samestat(status, other):
                return True
            above = calls.open("..", DIRECTORY, dir_fd=here)
            close_quietly(here)
            here = above
            if os.path.samestat(status, calls.fstat(here)):
                return False
    except OSError as error:
        raise io_failure("look at", directory, error) from error
    finally:
        close_quietly(here)
