"""`holdfast hook`: what coding agents and git call at certain events; 'holdfast setup' arranges for it.

The hooks that run before every write are in `quick`, and are answered there without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from holdfast.cli.output import Output
from holdfast.cli.quick import (
    after_tool,
    answer_hook,
    before_write,
    open_request_repository,
    pre_commit,
    read_request,
    working_directory,
)


@click.command(hidden=True)
@click.argument(
    "event", type=click.Choice(["session-start", "before-write", "after-tool", "session-end", "pre-commit"])
)
@click.option("--from", "program", metavar="PROGRAM@VERSION", default="", help="The program that calls.")
@click.pass_obj
def hook(output: Output, *, event: str, program: str) -> int:
    """Answer a program that calls at certain events. 'holdfast setup' arranges for it."""
    request = {} if event == "pre-commit" else read_request()
    return answer_hook(output, lambda output: _EVENTS[event](output, request, program.partition("@")[0]))


def _session_start(output: Output, request: Mapping[str, Any], program: str) -> int:
    import json
    from pathlib import Path

    from holdfast.cli.who import overview_lines
    from holdfast.repository.overview import find_workspace, look_around

    overview = look_around(find_workspace(Path(working_directory(request))))
    lines = ["Holdfast keeps apart the agents and people who work here. 'holdfast who' shows this again."]
    text = "\n".join(lines + overview_lines(overview))
    output.text(json.dumps({"additional_context": text}) if program == "cursor" else text)
    return 0


def _session_end(output: Output, request: Mapping[str, Any], program: str) -> int:
    from holdfast.repository.agent import release_own

    release_own(open_request_repository(request))
    return 0


_EVENTS: dict[str, Callable[[Output, Mapping[str, Any], str], int]] = {
    "session-start": _session_start,
    "before-write": before_write,
    "after-tool": after_tool,
    "session-end": _session_end,
    "pre-commit": pre_commit,
}
