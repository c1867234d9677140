"""Shell completion of names: worktrees, snapshots, leases, issues and more.

The name of a parameter says what it names; for a few parameters the command does. If anything fails, nothing is
offered: the user is in the middle of typing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import REPO
from holdfast.cli.options import data_directory
from holdfast.cli.output import printable
from holdfast.fs import calls

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


MAIN = "main"
MOST_EXPLAINED = 100
"""How many names get an explanation: reading more records would take too long."""
_MOST_BYTES = 1 << 20

Names = dict[str, str]


def find_root(start: str, mark: str) -> str | None:
    """The nearest directory upwards that contains `mark`."""
    here = os.path.abspath(start)
    while True:
        if mark in _listed(here):
            return here
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above


def worktrees(root: str, beginning: str = "") -> Names:
    """The worktrees, each with the holder of its lease."""
    names = [MAIN, *_listed(os.path.join(root, "worktrees"))]
    return _explained(names, beginning, lambda name: _leased(_record(root, ".jvs/locks", name)))


def snapshots(root: str, beginning: str = "") -> Names:
    """All names of snapshots: `head`, references and ids."""
    ids = _listed(os.path.join(root, ".jvs/snapshots"))
    head = {"head": "the last snapshot of the worktree"} if "head".startswith(beginning) else {}
    return head | references(root, beginning) | _explained(ids, beginning, lambda each: _snapshot(root, each))


def references(root: str, beginning: str = "") -> Names:
    return _explained_by(root, ".jvs/refs", "snapshot_id", beginning)


def pins(root: str, beginning: str = "") -> Names:
    return _explained_by(root, ".jvs/pins", "reason", beginning)


def leases(root: str, beginning: str = "") -> Names:
    """The ids of leases."""
    found = (_record(root, ".jvs/locks", name) for name in _records(root, ".jvs/locks"))
    ids = {_text(each, "lock_id"): f"{_text(each, 'worktree_id')}, {_leased(each)}" for each in found}
    return {each: told for each, told in ids.items() if each and each.startswith(beginning)}


def issues(root: str, beginning: str = "") -> Names:
    return _explained_by(root, ".jit/issues", "title", beginning)


def gates(root: str, beginning: str = "") -> Names:
    registry = _record(root, ".jit", "gates").get("gates", {})
    return {str(key): _text(gate, "title") for key, gate in registry.items() if str(key).startswith(beginning)}


def repositories(data_directory: str, beginning: str = "") -> Names:
    """The repositories that have ever been locked."""
    return _explained(_listed(os.path.join(data_directory, "repos")), beginning, lambda name: "")


def _explained_by(root: str, directory: str, field: str, beginning: str) -> Names:
    """The records of a directory, each explained by one of its fields."""
    names = _records(root, directory)
    return _explained(names, beginning, lambda name: _text(_record(root, directory, name), field))


def _explained(names: list[str], beginning: str, tell: Callable[[str], str]) -> Names:
    chosen = sorted(name for name in names if name.startswith(beginning))
    return {name: tell(name) if number < MOST_EXPLAINED else "" for number, name in enumerate(chosen)}


def _leased(lease: Any) -> str:
    holder = _text(lease, "actor") or _text(lease, "holder_id")
    return f"leased by {holder}" if holder else ""


def _snapshot(root: str, name: str) -> str:
    record = _record(root, ".jvs/descriptors", name)
    return " ".join(filter(None, (_text(record, "created_at")[:19], _text(record, "note"))))


def _records(root: str, directory: str) -> list[str]:
    names = _listed(os.path.join(root, directory))
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _record(root: str, directory: str, name: str) -> dict[str, Any]:
    try:
        record = json.loads(calls.read_small(os.path.join(root, directory, f"{name}.json"), _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _text(record: Any, name: str) -> str:
    value = record.get(name) if isinstance(record, dict) else None
    return value if isinstance(value, str) else ""


def _listed(directory: str) -> list[str]:
    """The entries of a directory, without drafts."""
    try:
        return [name for name in calls.listdir(directory) if not (name[:1] == "." and name.endswith(".tmp"))]
    except OSError:
        return []


Source = Callable[[click.Context, str], "Names"]
LONGEST_HELP = 60


class Offered(click.types.StringParamType):
    """A text with completions."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
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
    """Give the parameters of a command their completions; `path` is the command as typed."""
    for parameter in command.params:
        source = source_of(path, parameter)
        if source is not None:
            parameter.type = Offered(source)


def source_of(path: str, parameter: click.Parameter) -> Source | None:
    """The completions of a parameter; None if it has none."""
    name = parameter.name or ""
    if (path, name) in _OF_COMMANDS:
        return _OF_COMMANDS[path, name]
    return _OF_NAMES.get(name)


def _below(mark: str, names: Callable[[str, str], Names]) -> Source:
    """Names from the repository or the tracker that the command would use."""

    def source(context: click.Context, beginning: str) -> Names:
        start = context.params.get("repo") or os.environ.get(REPO) or os.getcwd()
        root = calls.find_upwards(start, lambda directory: mark in _listed(directory))
        return {} if root is None else names(root, beginning)

    return source


def _repositories(context: click.Context, beginning: str) -> Names:
    directory = data_directory(context.params.get("data_dir"), os.environ)
    return repositories(str(directory), beginning)


_WORKTREES = _below(".jvs", worktrees)
_SNAPSHOTS = _below(".jvs", snapshots)
_REFERENCES = _below(".jvs", references)
_ISSUES = _below(".jit", issues)
_GATES = _below(".jit", gates)

_OF_NAMES: dict[str, Source] = {
    "worktree": _WORKTREES,
    "lock_id": _below(".jvs", leases),
    "snapshot": _SNAPSHOTS,
    "pin_id": _below(".jvs", pins),
    "issue_id": _ISSUES,
    "depends_on": _ISSUES,
    "gate": _GATES,
    "gates": _GATES,
    "keys": _GATES,
    "repo_id": _repositories,
}
"""By the name of a parameter."""

_OF_COMMANDS: dict[tuple[str, str], Source | None] = {
    ("run", "snapshot"): None,  # a flag
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
"""By command, where the name of the parameter does not say."""
