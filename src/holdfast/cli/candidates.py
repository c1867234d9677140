"""Shell completion of names: worktrees, snapshots, leases, issues and more.

The name of a parameter, or for a few parameters the command, decides which names are offered. If anything fails,
nothing is offered: the user is in the middle of typing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import REPO
from holdfast.cli.output import printable
from holdfast.fs import calls
from holdfast.fs.names import is_safe_name
from holdfast.repository.locating import find_records, is_git_home

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

MOST_EXPLAINED = 100
"""How many names get an explanation: reading more records would take too long."""
LONGEST_HELP = 60
_MOST_BYTES = 1 << 20

Names = dict[str, str]
"""Names, each with an explanation."""
Source = Callable[[click.Context, str], Names]
"""Finds the names that begin with a text."""


def offer_names(command: click.Command, path: str) -> None:
    """Give the parameters of a command their completions; `path` is the command as typed."""
    for parameter in command.params:
        if (source := source_of(path, parameter)) is not None:
            parameter.type = Offered(source)


def source_of(path: str, parameter: click.Parameter) -> Source | None:
    """The completions of a parameter; None if it has none."""
    name = parameter.name or ""
    return _OF_COMMANDS[path, name] if (path, name) in _OF_COMMANDS else _OF_NAMES.get(name)


class Offered(click.types.StringParamType):
    """A text with completions. Only safe names are offered: a shell would run others, or take them for options."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            names = self.source(ctx, incomplete)
        except Exception:
            return []
        return [
            CompletionItem(name, help=printable(text)[:LONGEST_HELP] or None)
            for name, text in names.items()
            if name.startswith(incomplete) and is_safe_name(name) and name[0] not in ".-"
        ]


def _worktrees(root: str, beginning: str) -> Names:
    at = os.path.join(root, ".jvs", "worktrees") if is_git_home(root) else os.path.join(root, "worktrees")
    names = dict.fromkeys(["main", *_listed(at)])
    return _explained(names, beginning, lambda name: _leased(_record(root, ".jvs/locks", name)))


def _snapshots(root: str, beginning: str) -> Names:
    def explanation(snapshot_id: str) -> str:
        record = _record(root, ".jvs/descriptors", snapshot_id)
        return f"{_text(record, 'created_at')[:19]} {_text(record, 'note')}".strip()

    head = {"head": "the last snapshot of the worktree"} if "head".startswith(beginning) else {}
    names = _records(root, ".jvs/descriptors") if is_git_home(root) else _listed(os.path.join(root, ".jvs/snapshots"))
    ids = _explained(names, beginning, explanation)
    return head | _fields(".jvs/refs", "snapshot_id")(root, beginning) | ids


def _leases(root: str, beginning: str) -> Names:
    found = (_record(root, ".jvs/locks", name) for name in _records(root, ".jvs/locks"))
    ids = {_text(each, "lock_id"): f"{_text(each, 'worktree_id')}, {_leased(each)}" for each in found}
    return {each: text for each, text in ids.items() if each and each.startswith(beginning)}


def _lease_names(root: str, beginning: str) -> Names:
    names, leases = _records(root, ".jvs/named/tokens"), ".jvs/named/leases"
    return _explained(names, beginning, lambda name: _leased(_record(root, leases, name)))


def _gates(root: str, beginning: str) -> Names:
    registry = _record(root, ".jit", "gates").get("gates", {})
    return {str(key): _text(gate, "title") for key, gate in registry.items() if str(key).startswith(beginning)}


def _repositories(context: click.Context, beginning: str) -> Names:
    """The repositories that have ever been locked."""
    from holdfast.store.approvals import data_directory

    directory = data_directory(context.params.get("data_dir"), os.environ)
    return _explained(_listed(os.path.join(directory, "repos")), beginning, lambda name: "")


def _fields(directory: str, field: str) -> Callable[[str, str], Names]:
    """The records of a directory, each explained by one of its fields."""

    def names(root: str, beginning: str) -> Names:
        return _explained(
            _records(root, directory), beginning, lambda name: _text(_record(root, directory, name), field)
        )

    return names


def _explained(names: Iterable[str], beginning: str, explanation: Callable[[str], str]) -> Names:
    chosen = sorted(name for name in names if name.startswith(beginning))
    return {name: explanation(name) if number < MOST_EXPLAINED else "" for number, name in enumerate(chosen)}


def _leased(lease: Any) -> str:
    holder = _text(lease, "actor") or _text(lease, "holder_id")
    return f"leased by {holder}" if holder else ""


def _records(root: str, directory: str) -> list[str]:
    names = _listed(os.path.join(root, directory))
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _record(root: str, directory: str, name: str) -> dict[str, Any]:
    try:
        path = os.path.join(root, directory, f"{name}.json")
        record = json.loads(calls.read_small(path, _MOST_BYTES, follow=False))
    except (OSError, ValueError, RecursionError):
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


def _below(mark: str, names: Callable[[str, str], Names]) -> Source:
    """Names from the repository or the tracker that the command would use."""

    def source(context: click.Context, beginning: str) -> Names:
        start = context.params.get("repo") or os.environ.get(REPO) or os.getcwd()
        root = find_records(start, lambda directory: mark in _listed(directory))
        return {} if root is None else names(root, beginning)

    return source


_WORKTREES = _below(".jvs", _worktrees)
_SNAPSHOTS = _below(".jvs", _snapshots)
_ISSUES = _below(".jit", _fields(".jit/issues", "title"))
_GATES = _below(".jit", _gates)

_OF_NAMES: dict[str, Source] = {
    "worktree": _WORKTREES,
    "lock_id": _below(".jvs", _leases),
    "snapshot": _SNAPSHOTS,
    "pin_id": _below(".jvs", _fields(".jvs/pins", "reason")),
    "landing_id": _below(".jvs", _fields(".jvs/landings", "title")),
    "work": _WORKTREES,
    **dict.fromkeys(("issue_id", "depends_on"), _ISSUES),
    **dict.fromkeys(("gate", "gates", "keys"), _GATES),
    "repo_id": _repositories,
}
"""By the name of a parameter."""

_OF_COMMANDS: dict[tuple[str, str], Source | None] = {
    ("run", "snapshot"): None,  # a flag
    **dict.fromkeys(
        [("run", "name"), *((f"lease {verb}", "name") for verb in ("acquire", "steal", "renew", "release", "status"))],
        _below(".jvs", _lease_names),
    ),
    **{(f"worktree {verb}", "name"): _WORKTREES for verb in ("show", "path", "remove")},
    ("worktree rename", "old"): _WORKTREES,
    ("diff", "old"): _SNAPSHOTS,
    ("diff", "new"): _SNAPSHOTS,
    ("ref create", "name"): None,
    ("worktree adopt", "name"): None,  # a new one
    ("ref delete", "name"): _below(".jvs", _fields(".jvs/refs", "snapshot_id")),
    ("gate pass", "key"): _GATES,
    ("gate fail", "key"): _GATES,
}
"""By command and parameter; these take precedence."""
