"""Fast path for the checks that hooks make before every write, without the slow command parser.

`answer` handles the simplest forms; it returns None for the others, and the command of the same name takes
over. A hook fails open: outside a repository, and when Holdfast itself fails, it lets the write pass and reports
the failure on standard error. It refuses only a write to a worktree that another holder has leased: with exit
status 2, which the calling programs treat as a refusal, and a reason on standard error, which they show the agent.
"""

from __future__ import annotations

import os
import sys

from holdfast.cli import ACTOR, LOCK_ID

TYPE_CHECKING = False  # importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from holdfast.cli.output import Output
    from holdfast.repository.repository import Repository

REFUSE = 2
MOST_BYTES = 64 << 20
_EVENTS = ("before-write", "pre-commit", "after-tool")
_PATHS = ("file_path", "notebook_path", "path", "target_file")
_PATCHED = r"^\*\*\* (?:Add|Update|Delete) File: (.+)$|^\*\*\* Move to: (.+)$"


def answer(arguments: list[str]) -> int | None:
    """The exit status of `guard PATH...` or of a hook that guards; None if the command parser must decide."""
    if arguments[0] == "guard":
        return _guard(arguments[1:])
    match arguments[1:]:
        case [event] if event in _EVENTS:
            return _hook(event, "")
        case [event, "--from", named] if event in _EVENTS:
            return _hook(event, named.partition("@")[0])
    return None


def _guard(paths: list[str]) -> int | None:
    from holdfast.repository.guard import quick_check, worktree_of

    if not paths or any(path.startswith("-") for path in paths):
        return None  # options need the parser
    lock_id, actor = os.environ.get(LOCK_ID), os.environ.get(ACTOR)
    try:
        worktrees = dict.fromkeys(worktree_of(path) for path in paths)
    except (OSError, ValueError):
        return None
    for worktree in worktrees:
        allowed = True if worktree is None else quick_check(worktree, lock_id, actor)
        if allowed is None:
            return None
        if allowed is not True:
            from holdfast.cli.output import Output

            Output(as_json=False).failure(allowed)
            return int(allowed.exit_status)
    return 0


def _hook(event: str, program: str) -> int:
    from holdfast.cli.output import Output

    def act(output: Output) -> int:
        if event == "pre-commit":
            return pre_commit(output, {}, program)
        request = read_request()
        if event == "before-write":
            return before_write(output, request, program)
        return 0 if _has_nothing_to_renew(request) else after_tool(output, request, program)

    return answer_hook(Output(as_json=False), act)


def answer_hook(output: Output, act: Callable[[Output], int]) -> int:
    """The exit status of a hook; a failure of Holdfast itself is reported, and lets the write pass."""
    from holdfast.errors import Failure, NotFound

    try:
        return act(output)
    except NotFound:
        return 0  # not in a repository
    except Failure as failure:
        from holdfast.cli.output import printable

        output.diagnostic(f"holdfast: {printable(failure.message)}")
        return 0


def read_request() -> dict[str, Any]:
    """The JSON object that the calling program writes to standard input; empty if there is none."""
    import json

    if sys.stdin is None or sys.stdin.isatty():
        return {}
    try:
        request = json.loads(sys.stdin.buffer.read(MOST_BYTES) or b"{}")
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


def before_write(output: Output, request: Mapping[str, Any], program: str) -> int:
    """Check whether a tool may write to the paths that it names."""
    base = working_directory(request)
    return _check(output, [os.path.join(base, path) for path in _written_paths(request)], program)


def pre_commit(output: Output, request: Mapping[str, Any], program: str) -> int:
    """Check whether git may commit in the current directory."""
    return _check(output, [os.path.join(_current_directory(), ".")], program)


def after_tool(output: Output, request: Mapping[str, Any], program: str) -> int:
    """Renew the agent's leases; tell it to stop if one is lost."""
    from holdfast.cli.output import printable
    from holdfast.repository.agent import renew_own

    kept = renew_own(repository_of(request), os.environ.get(LOCK_ID))
    lost = [each for each in kept if each.problem is not None]
    for each in lost:
        output.diagnostic(
            f"Your lease on {each.lease.worktree_id} cannot be renewed: {printable(str(each.problem))}\n"
            "Stop writing there. Acquire it again, and check what has changed before you continue."
        )
    return REFUSE if lost else 0


def repository_of(request: Mapping[str, Any]) -> Repository:
    from holdfast.repository.repository import Repository, find_repository

    return Repository(find_repository(working_directory(request)), actor=os.environ.get(ACTOR))


def working_directory(request: Mapping[str, Any]) -> str:
    roots = request.get("workspace_roots")
    chosen = request.get("cwd") or (roots[0] if isinstance(roots, list) and roots else None)
    return chosen if isinstance(chosen, str) else _current_directory()


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        from holdfast.errors import NotFound

        raise NotFound("the current directory is gone") from None


def _check(output: Output, paths: list[str], program: str) -> int:
    from holdfast.errors import LockConflict
    from holdfast.repository.guard import check, worktree_of

    try:
        for worktree in dict.fromkeys(found for path in paths if (found := worktree_of(path)) is not None):
            check(worktree, os.environ.get(LOCK_ID), os.environ.get(ACTOR))
    except LockConflict as conflict:
        from holdfast.cli.output import printable

        if program == "cursor":
            import json

            text = f"{conflict.message} {conflict.hint}"
            output.text(json.dumps({"permission": "deny", "user_message": text, "agent_message": text}))
        output.diagnostic(f"{printable(conflict.message)}\n{printable(conflict.hint)}")
        return REFUSE
    return 0


def _written_paths(request: Mapping[str, Any]) -> Iterator[str]:
    given = request.get("tool_input")
    if not isinstance(given, dict):
        return
    for name in _PATHS:
        if isinstance(given.get(name), str):
            yield given[name]
    for text in (given.get("command"), given.get("input"), given.get("patch")):
        if isinstance(text, str):
            import re

            yield from (first or second for first, second in re.findall(_PATCHED, text, re.MULTILINE))


def _has_nothing_to_renew(request: Mapping[str, Any]) -> bool:
    """Whether the agent certainly holds no lease, as after most tools."""
    from holdfast.repository.guard import holds_nothing

    return holds_nothing(working_directory(request), os.environ.get(LOCK_ID), os.environ.get(ACTOR))
