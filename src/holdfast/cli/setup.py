"""`holdfast setup`: configure coding agents and git to use Holdfast in a project, and undo it."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast.cli.options import dry_run_option, with_output
from holdfast.cli.output import Output
from holdfast.errors import NotFound
from holdfast.fs import calls
from holdfast.setup.edits import FileEdit, apply, summary
from holdfast.setup.plan import edits
from holdfast.setup.targets import Target

HELP = """\
Configure a program to use Holdfast in this project: instructions for the agent, hooks at the start and end
of a session and before it writes a file, and an entry for the MCP server. For git: a guard before each
commit, which runs before an existing hook, and a merge driver, so that branches that changed the same issues
(.jit/) merge without a conflict.

Everything written is marked and versioned. Run the command again to update it. --remove removes it and leaves
everything else as it was, byte for byte.

\b
Examples:
  holdfast setup claude --dry-run
  holdfast setup git --remove
"""

_DONE = {"create": "created", "change": "changed", "remove": "removed"}
_PLANNED = {"create": "would create", "change": "would change", "remove": "would remove"}
_NEXT_STEPS = {
    Target.CODEX: "Codex runs a project's hooks only once you trust them: start it here and type /hooks.",
    Target.CLAUDE: "Claude Code reads its hooks when a session starts: start a new one.",
}


@click.command(help=HELP)
@click.argument("program", type=click.Choice([each.value for each in Target]))
@click.option("--remove", is_flag=True, help="Remove everything that this command has written.")
@dry_run_option("Show the changes as a diff; change nothing.")
@click.option(
    "--project",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="The project's directory.  [default: the current one]",
)
@with_output
def setup(output: Output, *, program: str, remove: bool, dry_run: bool, project: Path) -> None:
    target, project = Target(program), Path(calls.realpath(project))
    changes = edits(project, target, remove=remove)
    if not dry_run:
        apply(project, changes)
    files = summary(changes, project)
    words = _PLANNED if dry_run else _DONE
    lines = [f"{words[each['action']]} {each['path']}" for each in files] or ["nothing to change"]
    if dry_run:
        lines += [line for edit in changes for line in _diff(edit)]
    elif files and not remove:
        lines += _next_steps(target, project)
    output.result({"program": program, "removed": remove, "dry_run": dry_run, "files": files}, lines)


def _next_steps(target: Target, project: Path) -> Iterator[str]:
    from importlib.util import find_spec

    from holdfast.repository.repository import find_repository

    if target in _NEXT_STEPS:
        yield _NEXT_STEPS[target]
    with contextlib.suppress(NotFound):
        if find_repository(project) == project and target is not Target.GIT:
            yield (
                "This is the directory around the worktrees. For agents that start in one of them, "
                f"such as main: 'holdfast setup {target} --project main'."
            )
    if not _is_on_path("holdfast"):
        yield "The new configuration calls 'holdfast', which is not on your PATH: add it."
    if target is not Target.GIT and find_spec("mcp") is None:
        yield "The MCP tools need the package mcp: pip install 'mcp>=2'. The hooks work without it."


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
