"""What a shell offers for the words of a command line that name something: worktrees, snapshots, issues.

Which parameter names what follows from its own name, and for a few from the command. Whatever goes wrong,
nothing is offered: somebody is in the middle of typing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from holdfast.cli.output import printable
from holdfast.cli.places import data_directory
from holdfast.cli.repository import REPO
from holdfast.workspace import known_names

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from holdfast.workspace.known_names import Names

Source = Callable[[click.Context, str], "Names"]
LONGEST_HELP = 60


class Offered(click.types.StringParamType):
    """A text for which those that there are can be offered."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin like this, each with a line that tells what it is."""
        from click.shell_completion import CompletionItem

        try:
            names = self.source(ctx, incomplete)
        except Exception:
            return []
        return [
            CompletionItem(name, help=printable(told)[:LONGEST_HELP] or None)
            for name, told in names.items()
            if name.startswith(incomplete) and name.isprintable()
        ]


def offer_names(command: click.Command, path: str) -> None:
    """Make the parameters of a command offer what they can be; `path` is the command as it is typed."""
    for parameter in command.params:
        source = source_of(path, parameter)
        if source is not None:
            parameter.type = Offered(source)


def source_of(path: str, parameter: click.Parameter) -> Source | None:
    """What can be offered for a parameter of a command; None if it is for anything."""
    name = parameter.name or ""
    if (path, name) in _OF_COMMANDS:
        return _OF_COMMANDS[path, name]
    return _OF_NAMES.get(name)


def _below(mark: str, names: Callable[[str, str], Names]) -> Source:
    """Names from the repository, or the tracker, that the command would be about."""

    def source(context: click.Context, beginning: str) -> Names:
        start = context.params.get("repo") or os.environ.get(REPO) or os.getcwd()
        root = known_names.find_root(start, mark)
        return {} if root is None else names(root, beginning)

    return source


def _repositories(context: click.Context, beginning: str) -> Names:
    directory = data_directory(context.params.get("data_dir"), os.environ)
    return known_names.repositories(str(directory), beginning)


_WORKTREES = _below(".jvs", known_names.worktrees)
_SNAPSHOTS = _below(".jvs", known_names.snapshots)
_REFERENCES = _below(".jvs", known_names.references)
_ISSUES = _below(".jit", known_names.issues)
_GATES = _below(".jit", known_names.gates)

_OF_NAMES: dict[str, Source] = {
    "worktree": _WORKTREES,
    "lock_id": _below(".jvs", known_names.locks),
    "snapshot": _SNAPSHOTS,
    "pin_id": _below(".jvs", known_names.pins),
    "issue_id": _ISSUES,
    "depends_on": _ISSUES,
    "gate": _GATES,
    "gates": _GATES,
    "keys": _GATES,
    "repo_id": _repositories,
}
"""What a parameter with this name is."""

_OF_COMMANDS: dict[tuple[str, str], Source | None] = {
    ("run", "snapshot"): None,  # whether to take one
    ("worktree show", "name"): _WORKTREES,
    ("worktree path", "name"): _WORKTREES,
    ("worktree rename", "old"): _WORKTREES,
    ("worktree remove", "name"): _WORKTREES,
    ("diff", "old"): _SNAPSHOTS,
    ("diff", "new"): _SNAPSHOTS,
    ("ref create", "name"): None,
    ("ref delete", "name"): _REFERENCES,
    ("gate pass", "key"): _GATES,
    ("gate fail", "key"): _GATES,
}
"""Where the name of a parameter does not tell."""
