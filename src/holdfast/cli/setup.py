"""`holdfast setup`: teach coding agents and git to use Holdfast in a project, and undo it."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.errors import NotFound
from holdfast.fs import calls
from holdfast.setup.edits import FileEdit, apply, summary
from holdfast.setup.plan import edits
from holdfast.setup.targets import Target

HELP = """\
Teach a program to use Holdfast in this project: instructions for the agent, hooks at the start and end
of a session and before it writes a file, and an entry for the MCP server; for git, a guard before each
commit, in front of the hook that is there.

What is written is marked and versioned. Running this again brings it up to date; --remove takes it out
and leaves everything else as it was, byte for byte.

\b
Examples:
  holdfast setup claude --dry-run
  holdfast setup git --remove
"""

DONE = {"create": "made", "change": "changed", "remove": "removed"}
PLANNED = {"create": "would make", "change": "would change", "remove": "would remove"}
AFTERWARDS = {
    Target.CODEX: "Codex runs a project's hooks only once you trust them: start it here and type /hooks.",
    Target.CLAUDE: "Claude Code reads its hooks when a session starts: begin a new one.",
}


@click.command(help=HELP)
@click.argument("program", type=click.Choice([each.value for each in Target]))
@click.option("--remove", is_flag=True, help="Take out what this command has put in.")
@click.option("--dry-run", is_flag=True, help="Show what would change, as a diff, and change nothing.")
@click.option(
    "--project",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="The project's directory; by default the current one.",
)
@json_option
@click.pass_obj
def setup(output: Output, *, program: str, remove: bool, dry_run: bool, project: Path) -> None:
    target, project = Target(program), Path(os.path.abspath(project))
    changes = edits(project, target, remove=remove)
    if not dry_run:
        apply(project, changes)
    files = summary(changes, project)
    data = {"program": program, "removed": remove, "dry_run": dry_run, "files": files}
    words = PLANNED if dry_run else DONE
    lines = [f"{words[each['action']]} {each['path']}" for each in files] or ["nothing to change"]
    if dry_run:
        for edit in changes:
            lines += _diff(edit)
    elif files and not remove:
        lines += _afterwards(target, project)
    output.result(data, lines)


def _afterwards(target: Target, project: Path) -> list[str]:
    """What is left to do for the person who has set it up."""
    from holdfast.repository.repository import find_repository

    lines = [AFTERWARDS[target]] if target in AFTERWARDS else []
    with contextlib.suppress(NotFound):
        if find_repository(project) == project and target is not Target.GIT:
            lines.append(
                "This is the directory around the worktrees. For agents that are started in one of them, "
                f"such as main: 'holdfast setup {target} --project main'."
            )
    return [*lines, *_missing(target)]


def _missing(target: Target) -> Iterator[str]:
    """What the program will call, and would not find."""
    from importlib.util import find_spec

    if not _is_on_path("holdfast"):
        yield "What was written calls 'holdfast', which is not on the PATH: the program must find it there."
    if target is not Target.GIT and find_spec("mcp") is None:
        yield "The tools for agents (MCP) need the package mcp: pip install 'mcp>=2'. The hooks work without."


def _is_on_path(name: str) -> bool:
    for directory in os.get_exec_path():
        for suffix in ("", ".exe"):
            with contextlib.suppress(OSError):
                calls.stat(os.path.join(directory, name + suffix))
                return True
    return False


def _diff(edit: FileEdit) -> list[str]:
    texts = ((each or b"").decode("utf-8", "replace") for each in (edit.before, edit.after))
    before, after = (text.splitlines() for text in texts)
    return list(difflib.unified_diff(before, after, str(edit.path), str(edit.path), lineterm=""))
