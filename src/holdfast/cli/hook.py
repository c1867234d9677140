"""`holdfast hook`: what coding agents and git call at certain moments; 'holdfast setup' arranges for it.

A hook must never be in the way for a reason of its own: outside of a repository, and whenever Holdfast
itself has trouble, it lets things pass and says so on standard error. The one thing that it refuses is a
write into a worktree that somebody else has leased: with exit status 2, which these programs take for
"no", and the reason on standard error, which they show to the agent.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from holdfast.cli.output import Output, printable
from holdfast.cli.repository import ACTOR, LOCK_ID
from holdfast.errors import Failure, LockConflict, NotFound

TYPE_CHECKING = False  # what checkers take for true; importing `typing` costs time

if TYPE_CHECKING:
    from holdfast.repository.repository import Repository


REFUSE = 2
MOST_BYTES = 64 << 20
_LOCK_ID, _ACTOR = "HOLDFAST_LOCK_ID", "HOLDFAST_ACTOR"
_PATHS = ("file_path", "notebook_path", "path", "target_file")
_PATCHED = r"^\*\*\* (?:Add|Update|Delete) File: (.+)$|^\*\*\* Move to: (.+)$"


def leniently(output: Output, act: Callable[[Output], int]) -> int:
    """Answer a hook. It is never in the way for a reason of its own."""
    try:
        return act(output)
    except NotFound:
        return 0  # not in a repository: nothing to do
    except Failure as failure:
        output.diagnostic(f"holdfast: {printable(failure.message)}")
        return 0


def before_write(output: Output, said: Mapping[str, Any], program: str) -> int:
    """Whether a tool may write to the paths that it is about to write to."""
    base = directory(said)
    return _guarded(output, [os.path.join(base, path) for path in _written(said)], program)


def pre_commit(output: Output, said: Mapping[str, Any], program: str) -> int:
    """Whether git may commit here."""
    return _guarded(output, [os.path.join(_here(), ".")], program)


def has_nothing_to_renew(said: Mapping[str, Any]) -> bool:
    """Whether it is certain that the agent holds no lease: after most tools it does not."""
    from holdfast.repository.guard import holds_nothing

    return holds_nothing(directory(said), os.environ.get(_LOCK_ID), os.environ.get(_ACTOR))


def heard() -> dict[str, Any]:
    """What the program says on standard input, if it does."""
    if sys.stdin is None or sys.stdin.isatty():
        return {}
    try:
        said = json.loads(sys.stdin.buffer.read(MOST_BYTES) or b"{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def directory(said: Mapping[str, Any]) -> str:
    """Where the agent is at work."""
    roots = said.get("workspace_roots")
    chosen = said.get("cwd") or (roots[0] if isinstance(roots, list) and roots else None)
    return chosen if isinstance(chosen, str) else _here()


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise NotFound("the current directory is gone") from None


def _guarded(output: Output, paths: list[str], program: str) -> int:
    from holdfast.repository.guard import check, place_of

    try:
        for place in dict.fromkeys(place for path in paths if (place := place_of(path)) is not None):
            check(place, os.environ.get(_LOCK_ID), os.environ.get(_ACTOR))
    except LockConflict as conflict:
        if program == "cursor":
            told = f"{conflict.message} {conflict.hint}"
            output.text(json.dumps({"permission": "deny", "user_message": told, "agent_message": told}))
        output.diagnostic(f"{printable(conflict.message)}\n{printable(conflict.hint)}")
        return REFUSE
    return 0


def _written(said: Mapping[str, Any]) -> Iterator[str]:
    """The paths that a tool is about to write to."""
    given = said.get("tool_input")
    if not isinstance(given, dict):
        return
    for name in _PATHS:
        if isinstance(given.get(name), str):
            yield given[name]
    for text in (given.get("command"), given.get("input"), given.get("patch")):
        if isinstance(text, str):
            found = re.findall(_PATCHED, text, re.MULTILINE)
            yield from (first or second for first, second in found)


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
