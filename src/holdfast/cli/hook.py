"""`holdfast hook`: what coding agents and git call at certain moments; 'holdfast setup' arranges for it.

A hook must never be in the way for a reason of its own: outside of a repository, and whenever Holdfast
itself has trouble, it lets things pass and says so on standard error. The one thing that it refuses is a
write into a worktree that somebody else has leased: with exit status 2, which these programs take for
"no", and the reason on standard error, which they show to the agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.hook_guard import REFUSE, before_write, directory, heard, leniently, pre_commit
from holdfast.cli.output import Output, printable
from holdfast.cli.repository import ACTOR, LOCK_ID

if TYPE_CHECKING:
    from holdfast.repository.repository import Repository


@click.command(hidden=True)
@click.argument(
    "event", type=click.Choice(["session-start", "before-write", "after-tool", "session-end", "pre-commit"])
)
@click.option("--from", "program", metavar="PROGRAM@VERSION", default="", help="Which program calls.")
@click.pass_obj
def hook(output: Output, *, event: str, program: str) -> int:
    """Answer a program that calls at certain moments. 'holdfast setup' arranges for it."""
    said = {} if event == "pre-commit" else heard()
    return leniently(output, lambda output: _EVENTS[event](output, said, program.partition("@")[0]))


def _session_start(output: Output, said: Mapping[str, Any], program: str) -> int:
    from pathlib import Path

    from holdfast.cli.who import seen_lines
    from holdfast.repository.overview import find_workspace, look_around

    seen = look_around(find_workspace(Path(directory(said))))
    lines = ["Holdfast keeps those apart who work here at the same time. 'holdfast who' shows this again."]
    lines += seen_lines(seen)
    text = "\n".join(lines)
    output.text(json.dumps({"additional_context": text}) if program == "cursor" else text)
    return 0


def after_tool(output: Output, said: Mapping[str, Any], program: str) -> int:
    """Keep the leases of the agent alive; tell it to stop if one cannot be."""
    from holdfast.repository.agent import renew_own

    kept = renew_own(_repository(said), os.environ.get(LOCK_ID))
    lost = [each for each in kept if each.problem is not None]
    for each in lost:
        output.diagnostic(
            f"Your lease on {each.lease.worktree_id} cannot be renewed: {printable(str(each.problem))}\n"
            "Stop writing there. Acquire it again, and look at what has changed before you go on."
        )
    return REFUSE if lost else 0


def _session_end(output: Output, said: Mapping[str, Any], program: str) -> int:
    from holdfast.repository.agent import release_own

    release_own(_repository(said))
    return 0


_EVENTS: dict[str, Callable[[Output, Mapping[str, Any], str], int]] = {
    "session-start": _session_start,
    "before-write": before_write,
    "after-tool": after_tool,
    "session-end": _session_end,
    "pre-commit": pre_commit,
}


def _repository(said: Mapping[str, Any]) -> Repository:
    from holdfast.repository.repository import Repository, find_repository

    return Repository(find_repository(directory(said)), actor=os.environ.get(ACTOR))
