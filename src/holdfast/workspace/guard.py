"""The guard before a write: refuses to touch a worktree that somebody else has leased, and says who."""

from __future__ import annotations

import msgspec

from holdfast.errors import LockConflict, NotFound
from holdfast.leases.desk import LeaseState
from holdfast.locks.callers import is_ours
from holdfast.workspace.glance import Place, conflict, glance
from holdfast.workspace.repository import Repository


def check(place: Place, lock_id: str | None) -> None:
    """Raise `LockConflict` if somebody else holds the lease of this worktree; see `glance`."""
    seen = glance(place, lock_id)
    if isinstance(seen, LockConflict):
        raise seen
    if seen is None:
        _look_closer(place, lock_id)


def _look_closer(place: Place, lock_id: str | None) -> None:
    state = _state(place)
    if state is None or state.expired:
        return
    if state.lease.lock_id != lock_id and not any(map(is_ours, state.lease.holders())):
        raise conflict(place, msgspec.to_builtins(state.lease), state.time_left)


def _state(place: Place) -> LeaseState | None:
    try:
        return Repository(place.root).desk.state(place.worktree)
    except NotFound:
        return None  # not a repository after all, or a newcomer in the making
