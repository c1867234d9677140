"""`holdfast guard`: may these paths be written to? The quick answer needs none of what is imported here."""

from __future__ import annotations

import os

import click

from holdfast.cli import ACTOR
from holdfast.cli.options import json_option, lock_id_option
from holdfast.cli.output import Output
from holdfast.cli.repository import known_lock_id


@click.command(short_help="Say whether paths may be written to, or who has leased them.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@lock_id_option
@json_option
@click.pass_obj
def guard(output: Output, *, paths: tuple[str, ...], lock_id: str | None) -> None:
    """Say whether PATHs may be written to: fails with status 4, and names the holder, if one of them is in
    a worktree that somebody else has leased.

    A lease is yours if you name its id, or if the process that holds it runs this command; but not if it was
    taken in the name of another agent than the one that HOLDFAST_ACTOR names, which tells agents apart that
    live in one process. Paths outside of all worktrees are not guarded. Changes nothing. Meant for hooks
    that run before every write.

    \b
    Examples:
      holdfast guard src/main.py
      holdfast guard worktrees/experiment || echo "somebody is at it"
    """
    from holdfast.repository.guard import check, place_of

    own = known_lock_id(lock_id)
    places = {path: place_of(os.path.abspath(path)) for path in paths}
    for place in dict.fromkeys(place for place in places.values() if place is not None):
        check(place, own, os.environ.get(ACTOR))
    output.result(
        {
            "allowed": True,
            "paths": [
                {"path": path, "worktree": place.worktree if place else None}
                for path, place in places.items()
            ],
        }
    )
