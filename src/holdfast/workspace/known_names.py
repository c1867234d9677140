"""The names of what is there, for who is about to type one: read from the directories, with little loaded.

Worktrees and snapshots are directories wherever their records are kept. Of the rest only those are found
that are kept in files: nobody is to wait for a server at the press of a key. Each name comes with a line
that tells what it stands for, if that is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from holdfast.fs import calls
from holdfast.fs import directory as fs_directory

MAIN = "main"
MOST_TOLD = 100
"""How many are explained; who has more of them types some letters first."""
_MOST_BYTES = 1 << 20

Names = dict[str, str]


def find_root(start: str, mark: str) -> str | None:
    """The nearest directory upwards that has this in it."""
    here = os.path.abspath(start)
    while True:
        if mark in _listed(here):
            return here
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above


def worktrees(root: str, beginning: str = "") -> Names:
    """Every worktree, with who has leased it."""
    names = [MAIN, *_listed(os.path.join(root, "worktrees"))]
    return _told(names, beginning, lambda name: _leased(_record(root, ".jvs/locks", name)))


def snapshots(root: str, beginning: str = "") -> Names:
    """Everything that a snapshot goes by: `head`, the names given to some, and the ids of all."""
    ids = _listed(os.path.join(root, ".jvs/snapshots"))
    head = {"head": "the last one of the worktree"} if "head".startswith(beginning) else {}
    return head | references(root, beginning) | _told(ids, beginning, lambda each: _snapshot(root, each))


def references(root: str, beginning: str = "") -> Names:
    """The names that were given to snapshots."""
    return _told_by(root, ".jvs/refs", "snapshot_id", beginning)


def pins(root: str, beginning: str = "") -> Names:
    """The pins that keep snapshots."""
    return _told_by(root, ".jvs/pins", "reason", beginning)


def locks(root: str, beginning: str = "") -> Names:
    """The ids of the locks of worktrees."""
    found = (_record(root, ".jvs/locks", name) for name in _records(root, ".jvs/locks"))
    ids = {_text(each, "lock_id"): f"{_text(each, 'worktree_id')}, {_leased(each)}" for each in found}
    return {each: told for each, told in ids.items() if each and each.startswith(beginning)}


def issues(root: str, beginning: str = "") -> Names:
    """The issues, with their titles."""
    return _told_by(root, ".jit/issues", "title", beginning)


def gates(root: str, beginning: str = "") -> Names:
    """The gates that there are."""
    registry = _record(root, ".jit", "gates").get("gates", {})
    return {
        str(key): _text(gate, "title") for key, gate in registry.items() if str(key).startswith(beginning)
    }


def repositories(data_directory: str, beginning: str = "") -> Names:
    """The repositories that were ever locked."""
    return _told(_listed(os.path.join(data_directory, "repos")), beginning, lambda name: "")


def _told_by(root: str, directory: str, field: str, beginning: str) -> Names:
    """The records of a directory, each with one of its fields."""
    names = _records(root, directory)
    return _told(names, beginning, lambda name: _text(_record(root, directory, name), field))


def _told(names: list[str], beginning: str, tell: Callable[[str], str]) -> Names:
    chosen = sorted(name for name in names if name.startswith(beginning))
    return {name: tell(name) if number < MOST_TOLD else "" for number, name in enumerate(chosen)}


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
        record = json.loads(
            fs_directory.read_small(os.path.join(root, directory, f"{name}.json"), _MOST_BYTES)
        )
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _text(record: Any, name: str) -> str:
    value = record.get(name) if isinstance(record, dict) else None
    return value if isinstance(value, str) else ""


def _listed(directory: str) -> list[str]:
    """What is in a directory, but for hidden drafts."""
    try:
        return [name for name in calls.listdir(directory) if not (name[:1] == "." and name.endswith(".tmp"))]
    except OSError:
        return []
