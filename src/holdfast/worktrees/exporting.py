"""Writing what a snapshot holds into a plain directory, which has nothing to do with the repository then.

1. A scratch that names the snapshot, so that nobody collects it meanwhile; then a look whether somebody
   is about to.
2. The files are made beside where they go, under a name that nobody else uses, and brought to the disk.
3. They get their name, if nothing has it. **Commit point.**

What fails before 3 is removed; what a kill leaves is a directory `.NAME-….tmp` beside it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import AlreadyExists, Failure, NotFound, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly, io_failure, move
from holdfast.worktrees.control import Control
from holdfast.worktrees.naming import usable, visible
from holdfast.worktrees.scratch import scratch

if TYPE_CHECKING:
    from holdfast.trees import Materialised
    from holdfast.trees.scan import Progress


def export(
    control: Control,
    snapshot_id: str,
    destination: Path,
    *,
    path: bytes | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Make `destination`, where nothing is yet, hold what the snapshot holds, or the one `path` of it."""
    from holdfast.trees import materialise, remove_tree, synced

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


def _check(control: Control, destination: Path) -> None:
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
    from holdfast.trees.scan import DIRECTORY, open_directory

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
