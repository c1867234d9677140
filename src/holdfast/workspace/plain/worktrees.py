"""Worktrees for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.workspace.plain.leases import state_record

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.worktrees.lifecycle import WorktreeState


def record(state: WorktreeState) -> dict[str, object]:
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
        "lock": state_record(config, state.lease),
        "operation": None
        if state.operation is None
        else {
            "kind": state.operation.kind.value,
            "holder_id": state.operation.holder_id,
            "since": state.operation.begun_at,
        },
    }


def list_record(root: Path, states: Iterable[WorktreeState]) -> dict[str, object]:
    """All worktrees of a repository."""
    return {"root": str(root), "worktrees": [record(each) for each in states]}
