"""The lock of a worktree as it is shown: as a record for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.clock import format_duration
from holdfast.locks.identity import Liveness
from holdfast.repository.records import Isolation
from holdfast.repository.to_json import lease_state_to_json as lease_state_to_json
from holdfast.repository.to_json import lease_state_word
from holdfast.repository.to_json import lease_to_json as lease_to_json

if TYPE_CHECKING:
    from holdfast.leases.service import LeaseState
    from holdfast.repository.records import WorktreeConfig

HIGH_RISK = "shared (high-risk: nothing keeps writers apart)"


def state_lines(config: WorktreeConfig, state: LeaseState | None) -> Iterator[str]:
    """The same for people."""
    name = config.worktree_id
    if config.isolation is Isolation.SHARED:
        yield f"{name}: {HIGH_RISK}"
    elif state is None:
        yield f"{name}: free"
    else:
        yield f"{name}: {summary(state)}"
        lease = state.lease
        if lease.purpose:
            yield f"  purpose   {lease.purpose}"
        yield f"  since     {lease.created_at}, renewed {lease.last_renewed_at}"
        yield f"  expires   {_expiry(state)}"
        yield f"  process   {_life(state)}"
        yield f"  lock id   {lease.lock_id}"
        yield f"  token     {lease.fencing_token}"
        for place, waiter in enumerate(state.waiters, 1):
            yield f"  waiting   {place}. {waiter.holder_id} since {waiter.since}"


def summary(state: LeaseState) -> str:
    """Who holds a lock, in one line."""
    return f"{lease_state_word(state)}{', was held' if state.expired else ''} by {state.lease.who()}"


def _expiry(state: LeaseState) -> str:
    if state.expired:
        return f"{format_duration(-state.time_left)} ago; the next one who wants it takes it over"
    return f"in {format_duration(state.time_left)}, unless its holder renews it"


def _life(state: LeaseState) -> str:
    if state.lease.detached and state.liveness is Liveness.UNKNOWN:
        return "not to be seen; the lock belongs to whoever has its id, and lasts until it expires"
    return state.liveness.value
