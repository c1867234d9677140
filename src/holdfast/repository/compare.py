"""Differences between a worktree and a snapshot, or between two snapshots; and export. Takes no lock.

A compared snapshot is not protected from collection. If it is collected meanwhile, `SnapshotCollected` is raised: a
collection never counts as a difference or as damage. An export protects its snapshot.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import AlreadyExists, Failure, NotFound, Refused, UsageFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, chosen, failing_to, move, status_at
from holdfast.repository.context import Descriptor, RepositoryContext
from holdfast.repository.history import reading, resolve, usable, visible
from holdfast.repository.payloads import is_within, refuse_replaced, scratch

if TYPE_CHECKING:
    from holdfast.trees.results import Change, Materialised
    from holdfast.trees.scan import Progress


class Side(NamedTuple):
    """One side of a comparison: a snapshot, a worktree's directory (`files`), or nothing."""

    label: str
    files: Path | None
    descriptor: Descriptor | None


class Comparison(NamedTuple):
    """Two sides, and the changes from the first to the second."""

    old: Side
    new: Side
    changes: tuple[Change, ...]


def status(context: RepositoryContext, worktree: str) -> Comparison:
    """The changes in a worktree since its head; everything in it, if it has no head."""
    tip = context.config(worktree).tip
    head = Side("nothing", None, None) if tip is None else _snapshot(visible(context, tip))
    return _with_worktree(context, head, worktree)


def compare(context: RepositoryContext, worktree: str, old: str | None, new: str | None) -> Comparison:
    """The changes from the snapshot `old` to the snapshot `new`, or to the worktree; without both, see `status`."""
    if old is None:
        if new is not None:
            raise UsageFailure("a comparison needs the older snapshot too", worktree=worktree, new=new)
        return status(context, worktree)
    before = _snapshot(resolve(context, old, worktree=worktree))
    if new is None:
        return _with_worktree(context, before, worktree)
    after = _snapshot(resolve(context, new, worktree=worktree))
    ids = [each.descriptor.snapshot_id for each in (before, after) if each.descriptor]
    with reading(context, *ids):
        found = tuple(filter(_is_significant, context.home.compare(*ids)))
    return Comparison(before, after, found)


def unsaved(context: RepositoryContext, payload: Path, tip: str | None, worktree: str) -> Iterator[Change]:
    """The differences between a directory and the snapshot `tip`."""
    found = filter(_is_significant, context.home.changes(payload, tip, worktree))
    return (each for each in found if each.path) if tip is None else found


def differs(context: RepositoryContext, payload: Path, tip: str | None, worktree: str) -> bool:
    """Whether a directory differs from the snapshot `tip`; an incomplete snapshot equals nothing."""
    if tip is not None and not context.home.is_ready(tip):
        return True
    return next(unsaved(context, payload, tip, worktree), None) is not None


def below(path: str, found: Iterable[Change]) -> Iterator[Change]:
    """The changes at `path` and below it."""
    top = os.fsencode(path)
    return (each for each in found if each.path == top or each.path.startswith(top + b"/"))


def _is_significant(change: Change) -> bool:
    """Whether a change is more than the modification time of a directory."""
    return not (change.kind == "d" and change.aspects == ("mtime",))


def _with_worktree(context: RepositoryContext, old: Side, worktree: str) -> Comparison:
    refuse_replaced(context, worktree)
    payload = context.paths.payload(worktree)
    tip = None if old.descriptor is None else old.descriptor.snapshot_id
    with reading(context, *([tip] if tip else [])):
        found = tuple(unsaved(context, payload, tip, worktree))
    return Comparison(old, Side(worktree, payload, None), found)


def _snapshot(descriptor: Descriptor) -> Side:
    return Side(descriptor.snapshot_id, None, descriptor)


def read_file(path: Path, limit: int) -> bytes:
    """The content of a file, or the target of a link."""
    with Directory.open(path.parent) as directory:
        if directory.is_link(path.name):
            with failing_to("read", path):
                return os.fsencode(calls.readlink(directory.at(path.name), dir_fd=directory.fd))
        return durable.read_in(directory, path.name, limit=limit)


# --- Export -----------------------------------------------------------------------------------------


def export(
    context: RepositoryContext,
    snapshot_id: str,
    destination: Path,
    *,
    path: bytes | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Write a snapshot, or only `path` of it, to `destination`, which must not exist."""
    from holdfast.trees.walker import remove_tree

    destination = chosen(destination)
    _check_destination(context, destination)
    draft = destination.with_name(f".{destination.name[:200]}-{secrets.token_hex(6)}.tmp")
    with contextlib.ExitStack() as stack:
        context.paths.reserve.relieve(  # 1. works on a full disk: the destination may be on another
            lambda: stack.enter_context(scratch(context, "export", uses=[snapshot_id]))
        )
        usable(visible(context, snapshot_id))
        try:
            made = context.home.materialise(snapshot_id, draft, only=path, progress=progress)  # 2
            move(draft, destination)  # 3. commit point
        except BaseException:
            with contextlib.suppress(Failure):
                remove_tree(draft)
            raise
    return made


def _check_destination(context: RepositoryContext, destination: Path) -> None:
    """Refuse early what step 3 would refuse, and anything inside .jvs."""
    above, path = destination.parent, str(destination)
    try:
        with Directory.open(above) as parent:
            exists = parent.status(destination.name) is not None
    except NotFound:
        hint = "Create it first, or name another directory."
        raise NotFound(f"there is no directory {above}", hint=hint, path=str(above)) from None
    if exists:
        hint = "Name a directory that does not exist: nothing is ever overwritten."
        raise AlreadyExists(f"{path} already exists", hint=hint, path=path)
    private = status_at(context.paths.root / ".jvs")
    if private is not None and is_within(above, private):
        hint = "Name a directory outside it."
        raise Refused(f"{path} is inside .jvs, where only Holdfast writes", hint=hint, path=path)
