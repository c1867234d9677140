"""Capturing by the best engine that there is for a directory, and by the next one if that cannot do it."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import EngineUnavailable
from holdfast.fs.trees.capturing import Captured, capture
from holdfast.fs.trees.engines import Engine, choose_engine
from holdfast.fs.trees.removal import remove_tree
from holdfast.fs.trees.tally import Progress


def capture_best(
    source: Path,
    tree: Path,
    *,
    beside: Path,
    wanted: Engine | str | None = None,
    base: Path | None = None,
    cache: Path | None = None,
    quiesced: bool,
    progress: Progress | None = None,
) -> Captured:
    """Capture `source` as the new tree `tree`, which will be kept in the file system of `beside`.

    By the `wanted` engine or not at all, if one is; else by the best. Some engines leave the work to the
    file system, which may find only then that it cannot do it: then the next best one does.
    """
    engine = choose_engine(source, beside, wanted)
    try:
        return capture(
            source, tree, engine=engine, base=base, cache=cache, quiesced=quiesced, progress=progress
        )
    except EngineUnavailable:
        if wanted is not None:
            raise
    remove_tree(tree)
    engine = choose_engine(source, beside, but=engine)
    return capture(source, tree, engine=engine, base=base, cache=cache, quiesced=quiesced, progress=progress)
