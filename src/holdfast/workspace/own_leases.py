"""The leases that an agent holds, found from any process that it starts: to keep them, and to end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.leases.rules import Lease
from holdfast.locks.identity import acts_under, calling_agent
from holdfast.workspace.repository import Repository

Act = Callable[[str, str], Lease]


class Kept(NamedTuple):
    """What came of renewing or releasing a lease: `problem` is why it could not be done."""

    lease: Lease
    problem: Failure | None


def own_leases(repository: Repository, lock_id: str | None = None) -> Iterator[Lease]:
    """The leases with this id, and those that this process acts under: see `acts_under`.

    Not those that a server holds for the agent: the server keeps them, and ends them.
    """
    for config in repository.worktrees.configs():
        state = repository.desk.state(config.worktree_id)
        if state is None:
            continue
        lease = state.lease
        holder = lease.identity.holder(lease.holder_id)
        if lease.lock_id == lock_id or acts_under([holder], lease.actor, repository.desk.actor):
            yield lease


def renew_own(repository: Repository, lock_id: str | None = None) -> list[Kept]:
    """Let all own leases run on."""
    return [_tried(lease, repository.desk.renew) for lease in own_leases(repository, lock_id)]


def release_own(repository: Repository) -> list[Kept]:
    """Give back what the agent that runs this has acquired by a command of its own.

    Not what a process above it holds: 'holdfast run' gives its lease back itself, after its snapshot, and
    the person who started the agent may have plans for theirs.
    """
    agent = calling_agent()
    own = [
        lease
        for lease in own_leases(repository)
        if lease.detached and lease.identity.holder(lease.holder_id) == agent
    ]
    return [_tried(lease, repository.desk.release) for lease in own]


def _tried(lease: Lease, act: Act) -> Kept:
    try:
        act(lease.worktree_id, lease.lock_id)
    except Failure as problem:
        return Kept(lease, problem)
    return Kept(lease, None)
