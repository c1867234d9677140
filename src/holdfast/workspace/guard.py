"""The guard before a write: refuses to touch a worktree that somebody else has leased, and says who."""

from __future__ import annotations

from holdfast.errors import LockConflict, NotFound
from holdfast.leases.desk import LeaseState
from holdfast.locks.callers import is_ours
from holdfast.workspace.glance import Place, nobody_in_the_way
from holdfast.workspace.repository import Repository


def check(place: Place, lock_id: str | None) -> LeaseState | None:
    """Raise `LockConflict` if somebody else holds the lease of this worktree.

    It is ours if we name its `lock_id`, or if its holder (or the agent that a server holds it for) is a
    process that this one descends from.
    """
    if nobody_in_the_way(place, lock_id):
        return None
    state = _state(place)
    if state is None or state.expired:
        return None
    lease = state.lease
    if lease.lock_id == lock_id or any(map(is_ours, lease.holders())):
        return state
    purpose = f", for: {lease.purpose}" if lease.purpose else ""
    raise LockConflict(
        f"{place.worktree} is leased by {lease.holder_id} since {lease.created_at}{purpose}: "
        "do not write there",
        hint="Work in a worktree of your own ('holdfast worktree create NAME'), or wait: "
        f"'holdfast lock acquire --worktree {place.worktree} --wait 10m'.",
        worktree=place.worktree,
        root=place.root,
        holder_id=lease.holder_id,
        purpose=lease.purpose,
        since=lease.created_at,
        expires_at=lease.lease_expires_at,
        time_left=state.time_left,
        liveness=state.liveness.value,
    )


def _state(place: Place) -> LeaseState | None:
    try:
        return Repository(place.root).desk.state(place.worktree)
    except NotFound:
        return None  # not a repository after all, or a newcomer in the making
