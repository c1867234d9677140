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
from holdfast.fs.directory import io_failure
from holdfast.fs.moving import move
from holdfast.worktrees.control import Control
from holdfast.worktrees.naming import usable, visible
from holdfast.worktrees.scratch import scratch

if TYPE_CHECKING:
    from holdfast.fs.trees import Materialised
    from holdfast.fs.trees.tally import Progress


def export(
    control: Control,
    snapshot_id: str,
    destination: Path,
    *,
    path: bytes | None = None,
    progress: Progress | None = None,
) -> Materialised:
    """Make `destination`, where nothing is yet, hold what the snapshot holds, or the one `path` of it."""
    from holdfast.fs.trees import materialise, remove_tree, sync_tree

    _check(control, destination)
    draft = destination.with_name(f".{destination.name[:200]}-{secrets.token_hex(6)}.tmp")
    with scratch(control, "export", uses=[snapshot_id]):  # 1
        usable(visible(control, snapshot_id))
        tree = control.places.tree(snapshot_id)
        try:
            made = materialise(tree, draft, only=path, progress=progress)  # 2
            sync_tree(destination.parent)
            move(draft, destination)  # 3
        except BaseException:
            with contextlib.suppress(Failure):
                remove_tree(draft)
            raise
    return made


def _check(control: Control, destination: Path) -> None:
    """Refuse early what would be refused when all is made."""
    try:
        parent = destination.parent.resolve(strict=True)
        if os.path.lexists(destination):
            raise AlreadyExists(
                f"{destination} is there already",
                hint="Name a directory that is not there yet: nothing is ever overwritten.",
                path=str(destination),
            )
        private = calls.stat(control.places.root / ".jvs")
        inside = any(os.path.samestat(private, calls.stat(each)) for each in (parent, *parent.parents))
    except FileNotFoundError:
        raise NotFound(
            f"there is no directory {destination.parent}",
            hint="Make it first, or name another place.",
            path=str(destination.parent),
        ) from None
    except OSError as error:
        raise io_failure("look at", destination, error) from error
    if inside:
        raise Refused(
            f"{destination} is inside of .jvs, where only Holdfast writes",
            hint="Name a place outside of it.",
            path=str(destination),
        )
