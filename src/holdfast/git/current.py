"""The git tree of a work tree's current files, uncommitted work included, without a trace in the repository.

A separate index records which files were read, so an unchanged work tree costs only one look. It is a cache: deleting
it costs only time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.fs import durable
from holdfast.git.look import WorkTree
from holdfast.git.program import Git
from holdfast.git.snapshots import GitSource, Sums, known_sums, publish_index, started, take_changes, with_links


def known_tree(git: Git, top: Path, index: Path) -> str | None:
    """The current tree, if nothing has changed since it was last read; else None. Writes nothing.

    Objects of uncommitted files may not exist.
    """
    known = known_sums(git, top, index)
    is_known = known is not None and with_links(WorkTree(git, top, index), known).look().is_clean
    return known.tree if known is not None and is_known else None


class CurrentTree(NamedTuple):
    """A tree, and whether every object that it needs is in the repository or in the directory for new ones."""

    tree: str
    is_complete: bool


def read_tree(source: GitSource, room: Path) -> CurrentTree:
    """Read the current tree. New objects go to `source.objects`, but not those of files that were read earlier. `room`
    is a directory for the working copy of the index."""
    working, known = _started(source, room)
    look, _ = take_changes(working, working.look(keep=True))
    tree = working.write_tree()
    links = working.with_links().links if working.links or look.nested else ()
    publish_index(source, working, Sums(tree, 0, len(links)))  # nobody asks for sizes
    return CurrentTree(tree, is_complete=known is None)


def read_again(source: GitSource, room: Path, head: str) -> str:
    """The current tree with all of its objects: every file that differs from `head` is read and written again."""
    working, _ = _started(source, room)
    take_changes(working, working.look(keep=True))
    differing = working.run("diff-index", "--cached", "-z", "--name-only", "--no-renames", head, "--")
    working.write_again([path for path in differing.split(b"\0") if path])
    return working.write_tree()


def _started(source: GitSource, room: Path) -> tuple[WorkTree, Sums | None]:
    working = WorkTree(source.git, source.top, room / source.index.name, source.objects)
    durable.remove(working.index)  # of an earlier reading in this room
    return started(source, working)
