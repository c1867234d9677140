"""The sweep: retires the trees of deleted snapshots, and trims them to the directories that other trees need.

Most directories of a tree may be stored in other trees (see `holdfast.trees.shared_dirs`). So the tree of a deleted
snapshot is *retired*: moved to `.jvs/remnants/`, where the trees that need its directories look as well. A *sweep* then
removes from all retired trees what no tree needs. It reads the trees on disk, not descriptors, so it does not matter
whether a snapshot is visible. `docs/protocols/gc.md` explains why nothing needed is removed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterable
from pathlib import Path

from holdfast.errors import Failure, NotFound, Refused
from holdfast.fs import durable
from holdfast.fs.directory import Directory, io_failure, make_directories, rename
from holdfast.fs.names import is_safe_name
from holdfast.repository.context import RepositoryContext, RepositoryPaths
from holdfast.repository.payloads import scratch
from holdfast.trees import retained_dirs
from holdfast.trees.retained_dirs import Need

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def retire(context: RepositoryContext, snapshot_ids: Iterable[str]) -> None:
    """Move the trees of these snapshots to `.jvs/remnants/`, durably. A missing tree counts as already moved."""
    places, ids = context.paths, tuple(snapshot_ids)
    make_directories(places.remnants)
    for each in ids:
        tree, remnant = places.tree(each), places.remnants / each
        try:
            try:
                rename(tree, remnant)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                _choose(context, tree, remnant, but=ids)
        except (FileNotFoundError, NotFound):
            continue
        except OSError as error:
            raise io_failure("move away", tree, error) from error
    for directory in (places.remnants, places.snapshots):  # the new name is durable first
        with Directory.open(directory) as opened:
            durable.sync_names(opened)


def _choose(context: RepositoryContext, tree: Path, remnant: Path, *, but: Collection[str]) -> None:
    """Retire a tree that was copied back after its snapshot was deleted, and now exists twice.

    The retired tree stays if it has everything that others need, because the copy may be partial. The copy replaces
    it only if it was a snapshot again and others need directories that had been trimmed away. Else raises `Refused`.
    """
    need = need_of_all(context.paths, but=but).get(remnant.name, set())
    manifest = retained_dirs.readable_manifest(tree)
    with scratch(context, "collection") as room:
        aside = room.path / remnant.name
        if retained_dirs.has_all(remnant, need, manifest):
            rename(tree, aside)
        elif retained_dirs.has_all(tree, need, manifest):
            rename(remnant, aside)
            rename(tree, remnant)
        else:
            missing = f"other snapshots need directories of it, but neither it nor {remnant} has all of them"
            hint = "Restore one of the two as a whole from a backup."
            raise Refused(f"{tree} is not removed: {missing}", hint=hint, path=str(tree))


def need_of_all(places: RepositoryPaths, *, but: Collection[str] = ()) -> Need:
    """The directories that all trees, except `but`, need from others. Raises if the needs of a tree cannot be read.

    Reads in the order in which a tree moves, so that none is missed: scratch directory, snapshots, quarantine.
    Retired trees need nothing from others.
    """
    need = retained_dirs.needed_by_captures(trees_in_progress(places))
    for each in (places.snapshots, places.quarantine):
        trees = [tree for tree in trees_in(each) if tree.name not in but]
        for name, paths in retained_dirs.needed(trees).items():
            need.setdefault(name, set()).update(paths)
    return need


def trees_in_progress(places: RepositoryPaths) -> list[Path]:
    """The trees in scratch directories, of live and dead processes."""
    return [each / "tree" for each in trees_in(places.scratch)]


def sweep(context: RepositoryContext) -> None:
    """Remove from all retired trees what no tree needs. The caller holds the collector's lock.

    A tree that cannot be trimmed, for example because of a mount in it, is skipped; the first such failure is raised
    at the end. If the needs of a tree cannot be read, nothing is removed.
    """
    excessive, failures = untrimmed(context.paths), list[Failure]()
    if not excessive:
        return
    with scratch(context, "sweep") as room:
        bin_ = retained_dirs.TrashDirectory(room.path)
        for name, need in excessive.items():
            try:
                retained_dirs.trim(context.paths.remnants / name, need, bin_)
            except Failure as failure:
                failures.append(failure)
    if failures:
        raise failures[0]


def untrimmed(places: RepositoryPaths) -> dict[str, Collection[bytes]]:
    """The retired trees that have more than other trees need, each with the needed directories. Takes no lock."""
    remnants, found = trees_in(places.remnants), dict[str, Collection[bytes]]()
    need = need_of_all(places) if remnants else {}
    for each in remnants:
        with contextlib.suppress(NotFound):  # another process was faster
            if not retained_dirs.is_trimmed(each, need.get(each.name, ())):
                found[each.name] = need.get(each.name, ())
    return found


def trees_in(directory: Path) -> list[Path]:
    """The trees in a directory; none if it does not exist."""
    try:
        with Directory.open(directory) as opened:
            return [directory / name for name in opened.directories() if is_safe_name(name)]
    except NotFound:
        return []
