"""`holdfast hook`: the hooks of coding agents and git; `quick` answers some without loading this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from holdfast.cli import quick
from holdfast.cli.output import Output


def _session_start(output: Output, request: Mapping[str, Any], program: str) -> int:
    import json
    from pathlib import Path

    from holdfast.cli.overview_view import overview_lines
    from holdfast.repository.overview import find_workspace, look_around

    overview = look_around(find_workspace(Path(quick.working_directory(request))))
    first = "Holdfast keeps the agents and people who work here apart. 'holdfast who' shows this again."
    text = "\n".join([first, *overview_lines(overview)])
    output.text(json.dumps({"additional_context": text}) if program == "cursor" else text)
    return 0


def _session_end(output: Output, request: Mapping[str, Any], program: str) -> int:
    from holdfast.repository.agent import release_own

    release_own(quick.repository_of(request))
    return 0


_EVENTS: dict[str, Callable[[Output, Any, str], int]] = {
    "session-start": _session_start,
    "before-write": quick.before_write,
    "after-tool": quick.after_tool,
    "session-end": _session_end,
    "pre-commit": quick.pre_commit,
}


@click.command(hidden=True)
@click.argument("event", type=click.Choice(list(_EVENTS)))
@click.option("--from", "program", metavar="PROGRAM@VERSION", default="", help="The calling program.")
@click.pass_obj
def hook(output: Output, *, event: str, program: str) -> int:
    """Answer the hook of a program; 'holdfast setup' installs the hooks."""
    request = {} if event == "pre-commit" else quick.read_request()
    said = request if event == "before-write" else request or {}
    return quick.answer_hook(output, lambda output: _EVENTS[event](output, said, program.partition("@")[0]))
