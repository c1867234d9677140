"""`holdfast guard`: whether paths may be written to. `quick` answers the simple form without this module."""

from __future__ import annotations

import os

import click

from holdfast.cli import ACTOR
from holdfast.cli.options import json_option, lock_id_option
from holdfast.cli.output import Output
from holdfast.cli.repository import known_lock_id


@click.command(short_help="Check whether paths may be written to.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@lock_id_option
@json_option
@click.pass_obj
def guard(output: Output, *, paths: tuple[str, ...], lock_id: str | None) -> None:
    """Check whether PATHs may be written to. Status 4 if one is in a worktree that another holder has leased.

    A lease is yours if you name its id, or if its holder is this process or an ancestor of it. If HOLDFAST_ACTOR is
    set, the lease of another actor is not yours: that distinguishes the agents of one process. Every repository that
    contains a path is checked, and a lease that cannot be read counts as held. Paths outside all worktrees are not
    guarded. Changes nothing. Meant for hooks that run before every write.

    \b
    Examples:
      holdfast guard src/main.py
      holdfast guard worktrees/experiment || echo "leased by somebody else"
    """
    from holdfast.repository.guard import check, worktrees_of

    own = known_lock_id(lock_id)
    worktrees = {path: worktrees_of(os.path.abspath(path)) for path in paths}
    for place in dict.fromkeys(each for found in worktrees.values() for each in found):
        check(place, own, os.environ.get(ACTOR))
    records = [{"path": path, "worktree": found[0].worktree if found else None} for path, found in worktrees.items()]
    output.result({"allowed": True, "paths": records})
