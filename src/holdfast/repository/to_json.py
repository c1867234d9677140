"""The lock of a worktree for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from holdfast.leases.service import host_of
from holdfast.repository.context import Consistency, Descriptor, Isolation

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.leases.rules import Lease
    from holdfast.leases.service import LeaseState
    from holdfast.repository.compare import Comparison, Side
    from holdfast.repository.context import WorktreeConfig
    from holdfast.repository.history import History, HistoryEntry, Marks
    from holdfast.repository.restore import InPlace, Restored
    from holdfast.repository.snapshot_service import RestorePlan
    from holdfast.repository.worktrees import WorktreeState
    from holdfast.trees.verify import Change


def lease_to_json(lease: Lease) -> dict[str, object]:
    """The record of a lease, as it is stored."""
    return dict(msgspec.to_builtins(lease))


def lease_state_to_json(config: WorktreeConfig, state: LeaseState | None) -> dict[str, object]:
    """Everything that is known. `state` is `free`, `locked`, `expired` or, without locks, `shared`."""
    shared = config.isolation is Isolation.SHARED
    record: dict[str, object] = {
        "worktree_id": config.worktree_id,
        "isolation": config.isolation.value,
        "high_risk": shared,
        "state": "shared" if shared else "free" if state is None else lease_state_word(state),
    }
    if state is not None:
        record |= {
            "lease": lease_to_json(state.lease),
            "host": host_of(state.lease),
            "time_left": round(state.time_left, 3),
            "liveness": state.liveness.value,
            "waiting": [
                {"holder_id": each.holder_id, "priority": each.priority, "since": each.since}
                for each in state.waiters
            ],
        }
    return record


def lease_state_word(state: LeaseState) -> str:
    """Whether the lease still counts, in a word."""
    return "expired" if state.expired else "locked"


CHANGES = ("added", "removed", "modified")
_OPPOSITE = {"added": "removed", "removed": "added", "modified": "modified"}


def snapshot_to_json(descriptor: Descriptor) -> dict[str, object]:
    """All that is stored about a snapshot, and the warning flag of one that was not quiesced."""
    fields: dict[str, object] = msgspec.to_builtins(descriptor)
    return {**fields, "warning": is_best_effort(descriptor)}


def new_snapshot_to_json(descriptor: Descriptor, tag: str | None) -> dict[str, object]:
    """A snapshot that was just taken."""
    return {**snapshot_to_json(descriptor), "tag": tag}


def is_best_effort(descriptor: Descriptor) -> bool:
    return descriptor.consistency_level is Consistency.BEST_EFFORT


def history_to_json(found: History, worktree: str | None) -> dict[str, object]:
    """The snapshots of a worktree, or of all of them."""
    return {
        "worktree_id": worktree,
        "snapshots": [history_entry_to_json(each) for each in found.entries],
        "missing": list(found.missing),
        "more": found.more,
    }


def history_entry_to_json(entry: HistoryEntry) -> dict[str, object]:
    """A snapshot of a history; `visible_parent_id` passes over those that are not complete."""
    return {
        **snapshot_to_json(entry.descriptor),
        "visible_parent_id": entry.parent_id,
        **marks_to_json(entry.marks),
    }


def marks_to_json(marks: Marks) -> dict[str, object]:
    return {"heads": list(marks.heads), "references": list(marks.references), "pinned": marks.pinned}


# --- Restoring --------------------------------------------------------------------------------------


def restored_to_json(worktree: str, path: Path, snapshot_id: str, *, dry_run: bool) -> dict[str, object]:
    """A snapshot that was, or would be, restored into a new worktree."""
    return {"dry_run": dry_run, "worktree_id": worktree, "path": str(path), "snapshot_id": snapshot_id}


def restored_in_place_to_json(worktree: str, how: InPlace, restored: Restored) -> dict[str, object]:
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


def restore_plan_to_json(worktree: str, how: InPlace, plan: RestorePlan) -> dict[str, object]:
    """What restoring in place would do."""
    return {
        **comparison_to_json(plan.comparison._replace(changes=tuple(undone(plan)))),
        "dry_run": True,
        "worktree_id": worktree,
        "snapshot_id": plan.source.snapshot_id,
        "path": how.path,
        "keeps": plan.keeps,
    }


def undone(plan: RestorePlan) -> list[Change]:
    """The changes that restoring would make: those of the plan, backwards."""
    return [each._replace(what=_OPPOSITE[each.what]) for each in plan.comparison.changes]


# --- Differences ------------------------------------------------------------------------------------


def change_to_json(change: Change) -> dict[str, object]:
    from holdfast.trees.manifest import escaped

    return {
        "path": escaped(change.path),
        "what": change.what,
        "kind": change.kind,
        "aspects": list(change.aspects),
        "size": change.size,
    }


def comparison_to_json(comparison: Comparison) -> dict[str, object]:
    return {
        "old": _side_to_json(comparison.old),
        "new": _side_to_json(comparison.new),
        "changes": [change_to_json(each) for each in comparison.changes],
        "counts": counts(comparison.changes),
    }


def _side_to_json(side: Side) -> dict[str, object]:
    return {
        "label": side.label,
        "snapshot_id": side.descriptor.snapshot_id if side.descriptor else None,
        "path": str(side.files) if side.files else None,
        "warning": side.descriptor is not None and is_best_effort(side.descriptor),
    }


def counts(changes: Iterable[Change]) -> dict[str, int]:
    found = Counter(each.what for each in changes)
    return {what: found[what] for what in CHANGES}


def worktree_to_json(state: WorktreeState) -> dict[str, object]:
    """Everything that is known, as plain values."""
    config = state.config
    return {
        "worktree_id": config.worktree_id,
        "path": str(state.path),
        "is_there": state.is_there,
        "isolation": config.isolation.value,
        "high_risk": state.is_shared,
        "label": config.label,
        "created_at": config.created_at,
        "base_snapshot_id": config.base_snapshot_id,
        "head_snapshot_id": config.head_snapshot_id,
        "lock": lease_state_to_json(config, state.lease),
        "operation": None
        if state.operation is None
        else {
            "kind": state.operation.kind.value,
            "holder_id": state.operation.holder_id,
            "since": state.operation.begun_at,
        },
    }


def worktrees_to_json(root: Path, states: Iterable[WorktreeState]) -> dict[str, object]:
    """All worktrees of a repository."""
    return {"root": str(root), "worktrees": [worktree_to_json(each) for each in states]}
