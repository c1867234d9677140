"""The leases that an agent holds, found from any process that it starts: to keep them, and to end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.leases.records import Lease
from holdfast.locks.callers import is_ours
from holdfast.workspace.repository import Repository

Act = Callable[[str, str], Lease]


class Kept(NamedTuple):
    """What came of renewing or releasing a lease: `problem` is why it could not be done."""

    lease: Lease
    problem: Failure | None


def own_leases(repository: Repository, lock_id: str | None = None) -> Iterator[Lease]:
    """The leases with this id, and those whose holder is a process that this one descends from.

    Not those that a server holds for the agent: the server keeps them, and ends them.
    """
    for config in repository.worktrees.configs():
        state = repository.desk.state(config.worktree_id)
        if state is None:
            continue
        holder = state.lease.identity.holder(state.lease.holder_id)
        if state.lease.lock_id == lock_id or (holder is not None and is_ours(holder)):
            yield state.lease


def renew_own(repository: Repository, lock_id: str | None = None) -> list[Kept]:
    """Let all own leases run on."""
    return [_tried(lease, repository.desk.renew) for lease in own_leases(repository, lock_id)]


def release_own(repository: Repository, lock_id: str | None = None) -> list[Kept]:
    """Give all own leases back."""
    return [_tried(lease, repository.desk.release) for lease in own_leases(repository, lock_id)]


def _tried(lease: Lease, act: Act) -> Kept:
    try:
        act(lease.worktree_id, lease.lock_id)
    except Failure as problem:
        return Kept(lease, problem)
    return Kept(lease, None)
