"""JSON records of leases, worktrees, snapshots, restores and comparisons.

Each field has one name, whatever the record on disk calls it: `worktree`, `token`, `renewed_at`, `expires_at`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
    from holdfast.repository.history import History, Marks
    from holdfast.repository.restore import Restored, RestoreOptions
    from holdfast.repository.snapshot_service import RestorePlan
    from holdfast.repository.worktrees import WorktreeState
    from holdfast.trees.results import Change


_NAMES = {
    "worktree_id": "worktree",
    "fencing_token": "token",
    "last_renewed_at": "renewed_at",
    "lease_expires_at": "expires_at",
}


def renamed(record: Mapping[str, object]) -> dict[str, object]:
    """The record with the field names of JSON output instead of those on disk."""
    return {_NAMES.get(name, name): value for name, value in record.items()}


def lease_to_json(lease: Lease) -> dict[str, object]:
    """The lease; `worktree` is None for a named lease, and only such a lease has a `name`."""
    record = renamed(msgspec.to_builtins(lease))
    return {**record, "worktree": record["worktree"] or None}


def lease_state_to_json(subject: WorktreeConfig | str, state: LeaseState | None) -> dict[str, object]:
    """The lease of a worktree, or of a name, and its waiters. `state` is `free`, `leased`, `expired` or `shared`."""
    shared = not isinstance(subject, str) and subject.isolation is Isolation.SHARED
    word = "shared" if shared else "free" if state is None else "expired" if state.expired else "leased"
    record: dict[str, object] = {"name": subject, "state": word}
    if not isinstance(subject, str):
        record = {
            "worktree": subject.worktree_id,
            "isolation": subject.isolation.value,
            "high_risk": shared,
            "state": word,
        }
    if state is not None:
        record |= {
            "lease": lease_to_json(state.lease),
            "host": host_of(state.lease),
            "time_left": round(state.time_left, 3),
            "liveness": state.liveness.value,
            "waiting": [
                {"holder_id": each.holder_id, "priority": each.priority, "since": each.since} for each in state.waiters
            ],
        }
    return record


def worktree_to_json(state: WorktreeState) -> dict[str, object]:
    config, operation = state.config, state.operation
    branch = {"branch": config.git.branch} if config.git else {}
    return {
        "worktree": config.worktree_id,
        "path": str(state.path),
        **branch,
        "exists": state.exists,
        **({"clone": state.clone} if state.clone else {}),
        "isolation": config.isolation.value,
        "high_risk": state.is_shared,
        "label": config.label,
        "created_at": config.created_at,
        "base_snapshot_id": config.base_snapshot_id,
        "head_snapshot_id": config.head_snapshot_id,
        "lease": lease_state_to_json(config, state.lease),
        "operation": operation
        and {"kind": operation.kind.value, "holder_id": operation.holder_id, "since": operation.begun_at},
    }


def worktrees_to_json(root: Path, states: Iterable[WorktreeState]) -> dict[str, object]:
    return {"root": str(root), "worktrees": [worktree_to_json(each) for each in states]}


def snapshot_to_json(descriptor: Descriptor) -> dict[str, object]:
    """The descriptor, and `warning` for a snapshot that was not quiesced."""
    return {**renamed(msgspec.to_builtins(descriptor)), "warning": is_best_effort(descriptor)}


def new_snapshot_to_json(descriptor: Descriptor, tag: str | None) -> dict[str, object]:
    return {**snapshot_to_json(descriptor), "tag": tag}


def is_best_effort(descriptor: Descriptor) -> bool:
    return descriptor.consistency_level is Consistency.BEST_EFFORT


def history_to_json(found: History, worktree: str | None) -> dict[str, object]:
    """The history of a worktree; of all worktrees if `worktree` is None."""
    return {
        "worktree": worktree,
        "snapshots": [
            # The `parent_id` of a descriptor may name an incomplete snapshot.
            {**snapshot_to_json(each.descriptor), "visible_parent_id": each.parent_id, **marks_to_json(each.marks)}
            for each in found.entries
        ],
        "missing": list(found.missing),
        "more": found.more,
    }


def marks_to_json(marks: Marks) -> dict[str, object]:
    return {"heads": list(marks.heads), "references": list(marks.references), "pinned": marks.pinned}


def restored_to_json(worktree: str, path: Path, snapshot_id: str, *, dry_run: bool) -> dict[str, object]:
    """A snapshot that was, or would be, restored into a new worktree."""
    return {"dry_run": dry_run, "worktree": worktree, "path": str(path), "snapshot_id": snapshot_id}


def restored_in_place_to_json(worktree: str, how: RestoreOptions, restored: Restored) -> dict[str, object]:
    return {
        "dry_run": False,
        "worktree": worktree,
        "snapshot_id": restored.source.snapshot_id,
        "path": how.path,
        "kept_snapshot_id": restored.kept.snapshot_id if restored.kept else None,
        "late_snapshot_id": restored.late,
        "head_snapshot_id": restored.published.snapshot_id if restored.published else None,
        "processes": [each.as_record() for each in restored.standing],
    }


def restore_plan_to_json(worktree: str, how: RestoreOptions, plan: RestorePlan) -> dict[str, object]:
    """The changes that a restore in place would make."""
    return {
        **comparison_to_json(plan.comparison._replace(changes=tuple(undone(plan)))),
        "dry_run": True,
        "worktree": worktree,
        "snapshot_id": plan.source.snapshot_id,
        "path": how.path,
        "keeps": plan.keeps,
        "processes": [each.as_record() for each in plan.standing],
    }


_OPPOSITE = {"added": "removed", "removed": "added", "modified": "modified"}


def undone(plan: RestorePlan) -> list[Change]:
    """The changes that a restore would make: those of the plan, reversed."""
    return [each._replace(what=_OPPOSITE[each.what]) for each in plan.comparison.changes]


def comparison_to_json(comparison: Comparison) -> dict[str, object]:
    from holdfast.trees.manifest import escaped

    changes = comparison.changes
    return {
        "old": _side_to_json(comparison.old),
        "new": _side_to_json(comparison.new),
        "changes": [{**each._asdict(), "path": escaped(each.path), "aspects": list(each.aspects)} for each in changes],
        "counts": counts(changes),
    }


def _side_to_json(side: Side) -> dict[str, object]:
    return {
        "label": side.label,
        "snapshot_id": side.descriptor.snapshot_id if side.descriptor else None,
        "path": str(side.files) if side.files else None,
        "warning": side.descriptor is not None and is_best_effort(side.descriptor),
    }


def counts(changes: Iterable[Change]) -> dict[str, int]:
    """How many entries were added, removed and modified."""
    found = Counter(each.what for each in changes)
    return {what: found[what] for what in _OPPOSITE}
