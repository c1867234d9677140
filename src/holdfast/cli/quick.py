"""What hooks run before every write, answered without the parser of commands: that would take longer.

Only what is typed in the simplest form is answered here; for the rest the answer is None, and the command
of the same name has it. Both ask the same functions.
"""

from __future__ import annotations

import os

from holdfast.repository.guard import glance, place_of

_EVENTS = ("before-write", "pre-commit", "after-tool")
_LOCK_ID, _ACTOR = "HOLDFAST_LOCK_ID", "HOLDFAST_ACTOR"


def answer(arguments: list[str]) -> int | None:
    """The exit status of `guard PATH...` or of a hook that guards; None if it takes more to tell it."""
    if arguments[0] == "guard":
        return _guard(arguments[1:])
    match arguments[1:]:
        case [event] if event in _EVENTS:
            return _hook(event, "")
        case [event, "--from", named] if event in _EVENTS:
            return _hook(event, named.partition("@")[0])
    return None


def _hook(event: str, program: str) -> int:
    from holdfast.cli.hook_guard import before_write, has_nothing_to_renew, heard, leniently, pre_commit
    from holdfast.cli.output import Output

    def act(output: Output) -> int:
        if event == "pre-commit":
            return pre_commit(output, {}, program)
        said = heard()
        if event == "before-write":
            return before_write(output, said, program)
        if has_nothing_to_renew(said):
            return 0
        from holdfast.cli.hook import after_tool

        return after_tool(output, said, program)

    return leniently(Output(as_json=False), act)


def _guard(paths: list[str]) -> int | None:
    if not paths or any(path.startswith("-") for path in paths):
        return None  # options are for the parser
    lock_id, actor = os.environ.get(_LOCK_ID), os.environ.get(_ACTOR)
    try:
        places = dict.fromkeys(place_of(path) for path in paths)
    except (OSError, ValueError):
        return None
    for place in places:
        seen = True if place is None else glance(place, lock_id, actor)
        if seen is None:
            return None
        if seen is not True:
            from holdfast.cli.output import Output

            Output(as_json=False).failure(seen)
            return int(seen.exit_status)
    return 0
