"""The steps about leases, and the right by which other steps publish. They run in worker threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

from holdfast.clock import parse_duration
from holdfast.errors import LockConflict, LockExpired, LockNotHeld, LockTimeout
from holdfast.leases.rules import Lease
from holdfast.leases.service import DEFAULT_TTL, HeldLease
from holdfast.mcp import arguments
from holdfast.mcp.calls import Call, Plain
from holdfast.mcp.held import Place
from holdfast.repository.context import Proof, proof_of
from holdfast.repository.records import Isolation
from holdfast.repository.repository import Repository
from holdfast.repository.to_json import lease_to_json

OWN_TTL = 20.0
"""How long a lease lasts that is taken for the duration of one step; it is renewed until that ends."""


def take_lease(call: Call, given: arguments.TakeLease) -> Plain:
    repository = call.project.repository()
    place = Place(repository.root, call.project.worktree(repository, given.worktree))
    ttl = None if given.ttl is None else parse_duration(given.ttl, setting="ttl")
    if (lease := _renewed(call, place, ttl)) is not None:
        return lease_to_json(lease)
    if (handed_on := call.project.given_lease(place.worktree)) is not None:
        return lease_to_json(repository.desk.renew(place.worktree, handed_on.lock_id, ttl))
    taken = _taken(call, repository, place, given, ttl)
    if isinstance(taken, Lease):
        return lease_to_json(taken)
    call.held.keep_lease(place, taken)
    call.undo = partial(_given_back, call, place)
    return lease_to_json(taken.lease)


def release_lease(call: Call, given: arguments.ReleaseLease) -> Plain:
    repository = call.project.repository()
    place = Place(repository.root, call.project.worktree(repository, given.worktree))
    return lease_to_json(_given_back(call, place))


def _renewed(call: Call, place: Place, ttl: float | None) -> Lease | None:
    """The lease that this client has on the worktree, running on from now; None if it has none."""
    held = call.held.lease(place)
    if held is None:
        return None
    with contextlib.suppress(LockNotHeld, LockExpired):
        return held.renew(ttl)
    with contextlib.suppress(LockNotHeld):
        call.held.drop_lease(place).release()  # it was lost: there is another one to be had
    return None


def _soon_renewed(call: Call, place: Place, ttl: float | None) -> Lease | None:
    """The same, when another request of this client is just about to have it."""
    for _ in range(10):
        if (lease := _renewed(call, place, ttl)) is not None:
            return lease
        if call.cancelled.wait(0.05):
            return None
    return None


def _taken(
    call: Call, repository: Repository, place: Place, given: arguments.TakeLease, ttl: float | None
) -> HeldLease | Lease:
    """A new lease; or the one that another request of the same client got meanwhile."""
    deadline = time.monotonic() + parse_duration(given.wait, setting="wait")
    moot = _Moot(call, place)
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return repository.lease(
                place.worktree,
                ttl=DEFAULT_TTL if ttl is None else ttl,
                wait=left,
                purpose=call.purpose(given.purpose),
                priority=given.priority,
                client=call.project.settings.client,
                cancelled=moot,
            )
        except LockTimeout:
            if not moot.is_set() or (lease := _soon_renewed(call, place, ttl)) is None:
                raise
            return lease
        except LockConflict as conflict:
            if conflict.facts.get("holder_id") != repository.desk.holder.holder_id:
                raise
            if (lease := _soon_renewed(call, place, ttl)) is not None:
                return lease
            if left == 0.0 or call.cancelled.is_set():
                raise


class _Moot(threading.Event):
    """Set when a wait has become pointless: cancelled, or another request of the client has the lease."""

    def __init__(self, call: Call, place: Place) -> None:
        super().__init__()
        self._call = call
        self._place = place

    def is_set(self) -> bool:
        return self._call.cancelled.is_set() or self._call.held.lease(self._place) is not None


def _given_back(call: Call, place: Place) -> Lease:
    held = call.held.drop_lease(place)
    try:
        return held.renew()  # raises if it is not ours any more; after that it is, until it is released
    finally:
        held.release()


@contextlib.contextmanager
def proven(
    call: Call, repository: Repository, place: Place, lock_id: str | None, purpose: str
) -> Iterator[Proof | None]:
    """By which right a step publishes: the lease that is held or named, or one for its own duration."""
    if repository.control.config(place.worktree).isolation is Isolation.SHARED:
        yield None
        return
    if lock_id is not None:
        yield proof_of(repository.control, place.worktree, lock_id)
        return
    held = call.held.lease(place)
    if held is not None:
        held.check()
        yield _proof(held)
        return
    given = call.project.given_lease(place.worktree)
    if given is not None:
        yield proof_of(repository.control, place.worktree, given.lock_id, given.token)
        return
    try:
        own = repository.lease(
            place.worktree,
            ttl=OWN_TTL,
            purpose=call.purpose(purpose),
            client=call.project.settings.client,
        )
    except LockConflict as conflict:
        hint = "Wait for the holder with take_lease, or work in a worktree of your own."
        raise LockConflict(conflict.message, hint=hint, **conflict.facts) from None
    with own:
        yield _proof(own)


def _proof(lease: HeldLease) -> Proof:
    return Proof(lease.lock_id, lease.token)
