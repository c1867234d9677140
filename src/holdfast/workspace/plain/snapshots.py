"""Snapshots, histories and differences for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from holdfast.worktrees.records import Consistency, Descriptor

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.trees import Change
    from holdfast.worktrees.comparing import Comparison, Side
    from holdfast.worktrees.history import Entry, History, Marks
    from holdfast.worktrees.keeping import Plan
    from holdfast.worktrees.restoring import InPlace, Restored

CHANGES = ("added", "removed", "modified")
_OPPOSITE = {"added": "removed", "removed": "added", "modified": "modified"}


def record(descriptor: Descriptor) -> dict[str, object]:
    """All that is stored about a snapshot, and the warning flag of one that was not quiesced."""
    fields: dict[str, object] = msgspec.to_builtins(descriptor)
    return {**fields, "warning": is_best_effort(descriptor)}


def taken_record(descriptor: Descriptor, tag: str | None) -> dict[str, object]:
    """A snapshot that was just taken."""
    return {**record(descriptor), "tag": tag}


def is_best_effort(descriptor: Descriptor) -> bool:
    return descriptor.consistency_level is Consistency.BEST_EFFORT


def history_record(found: History, worktree: str | None) -> dict[str, object]:
    """The snapshots of a worktree, or of all of them."""
    return {
        "worktree_id": worktree,
        "snapshots": [entry_record(each) for each in found.entries],
        "missing": list(found.missing),
        "more": found.more,
    }


def entry_record(entry: Entry) -> dict[str, object]:
    """A snapshot of a history; `visible_parent_id` passes over those that are not complete."""
    return {
        **record(entry.descriptor),
        "visible_parent_id": entry.parent_id,
        **marks_record(entry.marks),
    }


def marks_record(marks: Marks) -> dict[str, object]:
    return {"heads": list(marks.heads), "references": list(marks.references), "pinned": marks.pinned}


# --- Restoring --------------------------------------------------------------------------------------


def restored_record(worktree: str, path: Path, snapshot_id: str, *, dry_run: bool) -> dict[str, object]:
    """A snapshot that was, or would be, restored into a new worktree."""
    return {"dry_run": dry_run, "worktree_id": worktree, "path": str(path), "snapshot_id": snapshot_id}


def restored_in_place_record(worktree: str, how: InPlace, restored: Restored) -> dict[str, object]:
    """A snapshot that was restored in place."""
    return {
        "dry_run": False,
        "worktree_id": worktree,
        "snapshot_id": restored.source.snapshot_id,
        "path": how.path,
        "kept_snapshot_id": restored.kept.snapshot_id if restored.kept else None,
        "late_snapshot_id": restored.late,
        "head_snapshot_id": restored.published.snapshot_id if restored.published else None,
    }


def plan_record(worktree: str, how: InPlace, plan: Plan) -> dict[str, object]:
    """What restoring in place would do."""
    return {
        **comparison_record(plan.comparison._replace(changes=tuple(undone(plan)))),
        "dry_run": True,
        "worktree_id": worktree,
        "snapshot_id": plan.source.snapshot_id,
        "path": how.path,
        "keeps": plan.keeps,
    }


def undone(plan: Plan) -> list[Change]:
    """The changes that restoring would make: those of the plan, backwards."""
    return [each._replace(what=_OPPOSITE[each.what]) for each in plan.comparison.changes]


# --- Differences ------------------------------------------------------------------------------------


def change_record(change: Change) -> dict[str, object]:
    from holdfast.trees.manifest import escaped

    return {
        "path": escaped(change.path),
        "what": change.what,
        "kind": change.kind,
        "aspects": list(change.aspects),
        "size": change.size,
    }


def comparison_record(comparison: Comparison) -> dict[str, object]:
    return {
        "old": _side_record(comparison.old),
        "new": _side_record(comparison.new),
        "changes": [change_record(each) for each in comparison.changes],
        "counts": counts(comparison.changes),
    }


def _side_record(side: Side) -> dict[str, object]:
    return {
        "label": side.label,
        "snapshot_id": side.descriptor.snapshot_id if side.descriptor else None,
        "path": str(side.files) if side.files else None,
        "warning": side.descriptor is not None and is_best_effort(side.descriptor),
    }


def counts(changes: Iterable[Change]) -> dict[str, int]:
    found = Counter(each.what for each in changes)
    return {what: found[what] for what in CHANGES}
