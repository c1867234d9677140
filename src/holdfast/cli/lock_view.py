"""The lock of a worktree as it is shown: as a record for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from holdfast.clock import format_duration
from holdfast.leases.desk import host_of
from holdfast.locks.holders import Liveness
from holdfast.worktrees.records import Isolation

if TYPE_CHECKING:
    from holdfast.leases.desk import LeaseState
    from holdfast.leases.records import Lease
    from holdfast.worktrees.records import WorktreeConfig

HIGH_RISK = "shared (high-risk: nothing keeps writers apart)"


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
        "state": "shared" if shared else "free" if state is None else _word(state),
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
    return f"{_word(state)}{', was held' if state.expired else ''} by {state.lease.holder_id}"


def _word(state: LeaseState) -> str:
    return "expired" if state.expired else "locked"


def _expiry(state: LeaseState) -> str:
    if state.expired:
        return f"{format_duration(-state.time_left)} ago; the next one who wants it takes it over"
    return f"in {format_duration(state.time_left)}, unless its holder renews it"


def _life(state: LeaseState) -> str:
    if state.lease.detached and state.liveness is Liveness.UNKNOWN:
        return "not to be seen; the lock belongs to whoever has its id, and lasts until it expires"
    return state.liveness.value
