"""The lock of a worktree for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.leases.service import host_of
from holdfast.worktrees.records import Isolation

if TYPE_CHECKING:
    from holdfast.leases.rules import Lease
    from holdfast.leases.service import LeaseState
    from holdfast.worktrees.records import WorktreeConfig


def lease_record(lease: Lease) -> dict[str, object]:
    """The record of a lease, as it is stored."""
    return dict(msgspec.to_builtins(lease))


def state_record(config: WorktreeConfig, state: LeaseState | None) -> dict[str, object]:
    """Everything that is known. `state` is `free`, `locked`, `expired` or, without locks, `shared`."""
    shared = config.isolation is Isolation.SHARED
    record: dict[str, object] = {
        "worktree_id": config.worktree_id,
        "isolation": config.isolation.value,
        "high_risk": shared,
        "state": "shared" if shared else "free" if state is None else state_word(state),
    }
    if state is not None:
        record |= {
            "lease": lease_record(state.lease),
            "host": host_of(state.lease),
            "time_left": round(state.time_left, 3),
            "liveness": state.liveness.value,
            "waiting": [
                {"holder_id": each.holder_id, "priority": each.priority, "since": each.since}
                for each in state.waiters
            ],
        }
    return record


def state_word(state: LeaseState) -> str:
    """Whether the lease still counts, in a word."""
    return "expired" if state.expired else "locked"
