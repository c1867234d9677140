"""The hooks that guard a write or a commit, and what all hooks share. They run before every write of an
agent, so this module loads next to nothing; `hook` has the others."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping

from holdfast.cli.output import Output, printable
from holdfast.errors import Failure, LockConflict, NotFound

TYPE_CHECKING = False  # checkers take it for true; importing `typing` costs time

if TYPE_CHECKING:
    from typing import Any

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
