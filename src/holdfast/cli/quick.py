"""Fast path for the checks that hooks make before every write, without the slow command parser.

`answer` handles the simplest forms; it returns None for the others, and the command of the same name takes
over. The hooks before a write refuse it with exit status 2, which the calling programs treat as a refusal, and give
the reason on standard error, which they show the agent. They refuse a write to a worktree that another holder has
leased, and fail closed: a lease or a request that cannot be understood counts as held, or as a write to the worktree
that it comes from (`docs/protocols/leases.md` has the table). Outside all repositories they do nothing. The other hooks
never stop the agent's session: they report a failure of Holdfast itself on standard error.
"""

from __future__ import annotations

import os
import sys

from holdfast.cli import ACTOR, LOCK_ID

TYPE_CHECKING = False  # importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from holdfast.cli.output import Output
    from holdfast.errors import Failure
    from holdfast.repository.guard import WorktreePath
    from holdfast.repository.repository import Repository

REFUSE = 2
MOST_BYTES = 64 << 20
MOST_PATHS, LONGEST_NAME = 1000, 4096
_EVENTS = ("before-write", "pre-commit", "after-tool")
_PATHS = ("file_path", "notebook_path", "path", "target_file", "file_paths", "paths", "files")
_PATCHES = ("command", "input", "patch")
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
        case ["merge", old, ours, theirs, path]:
            return _merge(old, ours, theirs, path)
    return None


def _guard(paths: list[str]) -> int | None:
    from holdfast.repository.guard import quick_check, worktrees_of

    if not paths or any(path.startswith("-") for path in paths):
        return None  # options need the parser
    lock_id, actor = os.environ.get(LOCK_ID), os.environ.get(ACTOR)
    try:
        worktrees = dict.fromkeys(each for path in paths for each in worktrees_of(path))
    except OSError:  # the current directory is gone
        return None
    for worktree in worktrees:
        allowed = quick_check(worktree, lock_id, actor)
        if allowed is None:
            return None
        if allowed is not True:
            from holdfast.cli.output import Output

            _say(Output(as_json=False).failure, allowed)
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
        return 0 if _has_nothing_to_renew(request or {}) else after_tool(output, request or {}, program)

    return answer_hook(Output(as_json=False), act)


def _merge(old: str, ours: str, theirs: str, path: str) -> int:
    """git's merge driver for the files of a tracker: replaces `ours` with the merged content. Status 1 means that
    nothing has changed, so git reports a conflict."""
    from pathlib import Path

    from holdfast.errors import Failure
    from holdfast.fs import durable
    from holdfast.issues.merging import Sides, merge_file

    try:
        sides = (durable.read(Path(os.path.abspath(each)), limit=MOST_BYTES) for each in (old, ours, theirs))
        durable.replace(Path(os.path.abspath(ours)), merge_file(path, Sides(*sides)))
    except Failure as failure:
        from holdfast.cli.output import Output, printable

        _say(Output(as_json=False).diagnostic, f"holdfast: {printable(f'{path} is not merged: {failure.message}')}")
        return 1
    return 0


def answer_hook(output: Output, act: Callable[[Output], int]) -> int:
    """The exit status of a hook. A failure of Holdfast itself is reported, but does not stop the agent's session."""
    from holdfast.errors import Failure, NotFound

    try:
        return act(output)
    except NotFound:
        return 0  # not in a repository
    except Failure as failure:
        from holdfast.cli.output import printable

        _say(output.diagnostic, f"holdfast: {printable(failure.message)}")
        return 0


def read_request() -> dict[str, Any] | None:
    """The JSON object that the calling program writes to standard input, empty if it writes nothing; None if it is
    something else, too deep or too large."""
    import json

    if sys.stdin is None or sys.stdin.isatty():
        return {}
    try:
        request = json.loads(sys.stdin.buffer.read(MOST_BYTES) or b"{}")
    except (ValueError, RecursionError, MemoryError):
        return None
    return request if isinstance(request, dict) else None


def before_write(output: Output, request: Mapping[str, Any] | None, program: str) -> int:
    """Check whether a tool may write to the paths that it names."""
    from holdfast.repository.guard import worktrees_at, worktrees_of

    def worktrees() -> Iterator[WorktreePath]:
        base = working_directory(request or {})
        paths = None if request is None else written_paths(request)
        if paths is None:
            yield from worktrees_at(base)
        for path in paths or ():
            yield from worktrees_of(os.path.join(base, path))

    return _check(output, worktrees, program)


def pre_commit(output: Output, request: Mapping[str, Any], program: str) -> int:
    """Check whether git may commit in the current directory."""
    from holdfast.repository.guard import worktrees_of

    return _check(output, lambda: worktrees_of(_current_directory()), program)


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
    if not isinstance(chosen, str):
        return _current_directory()
    from holdfast.repository.guard import possible_path

    return possible_path(os.path.join(_current_directory(), chosen))


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it is gone: no relative path leads anywhere
        return os.sep


def _check(output: Output, worktrees: Callable[[], Iterable[WorktreePath]], program: str) -> int:
    """Refuse a write to a worktree that another holder has leased, or whose lease is in doubt for any reason."""
    from holdfast.errors import Failure
    from holdfast.repository.guard import check

    try:
        for worktree in dict.fromkeys(worktrees()):
            check(worktree, os.environ.get(LOCK_ID), os.environ.get(ACTOR))
    except Failure as failure:
        return _refuse(output, failure, program)
    except Exception as error:  # a bug in Holdfast must not allow the write
        return _refuse(output, Failure(f"{type(error).__name__}: {error}"), program)
    return 0


def _refuse(output: Output, failure: Failure, program: str) -> int:
    from holdfast.cli.output import printable

    message, hint = printable(failure.message), printable(failure.hint)
    if program == "cursor":
        import json

        text = f"{message} {hint}"
        _say(output.text, json.dumps({"permission": "deny", "user_message": text, "agent_message": text}))
    _say(output.diagnostic, f"{message}\n{hint}")
    return REFUSE


def _say(write: Callable[..., object], said: object) -> None:
    """Write an answer. A failure to write it must not change the exit status."""
    from holdfast.errors import IoFailure

    try:
        write(said)
    except (IoFailure, OSError):
        return


def written_paths(request: Mapping[str, Any]) -> list[str] | None:
    """The paths that a request names; None if it names too many. If none of its fields is known, each of its texts may
    be a path, and so may the working directory."""
    texts = list(_texts(request.get("tool_input"), ""))
    paths = [text for name, text in texts if name in _PATHS]
    patches = [text for name, text in texts if name in _PATCHES and "*** " in text]
    if patches:
        import re

        found = re.findall(_PATCHED, "\n".join(patches), re.MULTILINE)
        paths += [first or second for first, second in found]
    if not paths:
        paths = [".", *(text for _, text in _texts(request, "") if len(text) <= LONGEST_NAME and "\n" not in text)]
    return paths if len(paths) <= MOST_PATHS else None


def _texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    """All texts in a JSON value, each with the name of the nearest field that it is in."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]


def _has_nothing_to_renew(request: Mapping[str, Any]) -> bool:
    """Whether the agent certainly holds no lease, as after most tools."""
    from holdfast.repository.guard import holds_nothing

    return holds_nothing(working_directory(request), os.environ.get(LOCK_ID), os.environ.get(ACTOR))
