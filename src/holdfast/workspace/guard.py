"""The guard before a write, where a glance is not enough: it asks the repository."""

from __future__ import annotations

import msgspec

from holdfast.errors import NotFound
from holdfast.leases.service import LeaseState
from holdfast.locks.identity import acts_under
from holdfast.workspace.glance import Place, conflict
from holdfast.workspace.repository import Repository


def look_closer(place: Place, lock_id: str | None, actor: str | None = None) -> None:
    """Raise `LockConflict` if somebody else holds the lease of this worktree, whatever that is kept in."""
    state = _state(place)
    if state is None or state.expired or state.lease.lock_id == lock_id:
        return
    if not acts_under(state.lease.holders(), state.lease.actor, actor):
        raise conflict(place, msgspec.to_builtins(state.lease), state.time_left, state.liveness)


def _state(place: Place) -> LeaseState | None:
    try:
        return Repository(place.root).desk.state(place.worktree)
    except NotFound:
        return None  # not a repository after all, or a newcomer in the making
