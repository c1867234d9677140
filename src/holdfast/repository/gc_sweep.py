"""What is left of snapshots that are gone: moved to the remnants, and trimmed to what others need.

Most directories of a tree may be in other trees (see `holdfast.trees.shared_dirs`). So the tree of a snapshot
that goes is *retired*: moved to `.jvs/remnants/`, where those who have directories in it find it as well. A
*sweep* then takes from all remnants what no tree needs. It looks at the trees that are on the disk and not at
descriptors, so it asks nobody whether a snapshot is visible, or will be. `docs/protocols/gc.md` tells why
nothing goes that is needed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterable
from pathlib import Path

from holdfast.errors import Failure, NotFound, Refused
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, io_failure, make_directories
from holdfast.fs.names import is_safe_name
from holdfast.repository.context import RepositoryContext, RepositoryPaths
from holdfast.repository.payloads import scratch
from holdfast.trees.retained_dirs import (
    Need,
    RetainedDirectories,
    has_all,
    is_trimmed,
    needed,
    needed_in_the_making,
    readable_manifest,
    trim,
)

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def retire(control: RepositoryContext, snapshot_ids: Iterable[str]) -> None:
    """Move the trees of these snapshots to the remnants, durably. What is not there was moved before."""
    places, ids = control.places, tuple(snapshot_ids)
    make_directories(places.remnants)
    for each in ids:
        tree, remnant = places.tree(each), places.remnants / each
        try:
            try:
                calls.rename(tree, remnant)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                _choose(control, tree, remnant, but=ids)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise io_failure("move away", tree, error) from error
    for directory in (places.remnants, places.snapshots):  # it is there before it is gone
        with Directory.open(directory) as opened:
            durable.sync_names(opened)


def _choose(control: RepositoryContext, tree: Path, remnant: Path, *, but: Collection[str]) -> None:
    """Retire a tree that was brought back after its snapshot had been deleted, and is now there twice.

    The remnant stays if it has all that others need: of what was brought back nobody knows whether it is all
    of it. Only if it was a snapshot again, and others have directories there that had been trimmed away, it
    takes the remnant's place. If neither will do, both stay.
    """
    need = need_of_all(control.places, but=but).get(remnant.name, set())
    manifest = readable_manifest(tree)
    with scratch(control, "collection") as room:
        aside = room.path / remnant.name
        if has_all(remnant, need, manifest):
            calls.rename(tree, aside)
        elif has_all(tree, need, manifest):
            calls.rename(remnant, aside)
            calls.rename(tree, remnant)
        else:
            raise Refused(
                f"{tree} is not removed: other snapshots have directories in it that are neither all there "
                f"nor all in {remnant}",
                hint="Bring one of the two back as a whole from a copy.",
                path=str(tree),
            )


def need_of_all(places: RepositoryPaths, *, but: Collection[str] = ()) -> Need:
    """Which directories of which trees are needed, by all trees but some. Raises if one cannot say.

    In the order in which a tree moves: from where it is made to the snapshots, from there to the quarantine.
    So none is missed. Remnants need nothing: what they have is their own.
    """
    need = needed_in_the_making(trees_in_the_making(places))
    for each in (places.snapshots, places.quarantine):
        trees = [tree for tree in trees_in(each) if tree.name not in but]
        for name, paths in needed(trees).items():
            need.setdefault(name, set()).update(paths)
    return need


def trees_in_the_making(places: RepositoryPaths) -> list[Path]:
    """Where trees are being made, or were by processes that are gone."""
    return [each / "tree" for each in trees_in(places.scratch)]


def sweep(control: RepositoryContext) -> None:
    """Take from all remnants what nobody needs. Whoever calls this is the collector.

    What cannot be touched, because something is mounted in it for instance, is left; the first such failure
    is raised when all else is done. If a tree cannot say what it needs, nothing is done.
    """
    excessive, failures = untrimmed(control.places), list[Failure]()
    if not excessive:
        return
    with scratch(control, "sweep") as room:
        bin_ = RetainedDirectories(room.path)
        for name, need in excessive.items():
            try:
                trim(control.places.remnants / name, need, bin_)
            except Failure as failure:
                failures.append(failure)
    if failures:
        raise failures[0]


def untrimmed(places: RepositoryPaths) -> dict[str, Collection[bytes]]:
    """The remnants that have more than is needed of them, with what is. Changes nothing, takes no lock."""
    remnants, found = trees_in(places.remnants), dict[str, Collection[bytes]]()
    need = need_of_all(places) if remnants else {}
    for each in remnants:
        with contextlib.suppress(NotFound):  # somebody else was faster
            if not is_trimmed(each, need.get(each.name, ())):
                found[each.name] = need.get(each.name, ())
    return found


def trees_in(directory: Path) -> list[Path]:
    """The trees, or remnants, that are there; none if there is no such place."""
    try:
        with Directory.open(directory) as opened:
            return [directory / name for name in opened.directories() if is_safe_name(name)]
    except NotFound:
        return []
