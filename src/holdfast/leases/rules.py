"""The lease protocol, as pure functions from what is stored and the time to what shall change.

Nothing here does I/O, asks a clock or rolls dice: what production runs is what the tests explore,
state by state. The time comes as a `Moment`, which knows two clocks. It decides only when a steal is
*allowed*. What makes a holder that has been stolen from harmless is `validate`, which every commit of
protected work runs inside its own transaction.

1. A lease is created only where there is none, and replaced only when it has expired (a steal).
2. Every grant takes the counter's next token. The counter is never lowered and never deleted.
3. Renewing and releasing take the exact `lock_id`. An expired lease cannot be renewed.
4. Who waits in line is served by priority, then by the time it came; nobody passes the line.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from holdfast.clock import BootMark, Now, format_duration, format_instant, parse_instant
from holdfast.errors import FencingMismatch, LockConflict, LockExpired, LockNotHeld
from holdfast.locks.identity import Holder
from holdfast.store.model import Change, Create, Delete, Family, Key, Replace, Stream, StructCodec, View


class Identity(msgspec.Struct, frozen=True):
    """What else is known of a holder, so that others can tell whether it is alive."""

    boot_id: str = ""
    machine_id: str = ""
    pid_namespace: str = ""

    @classmethod
    def of(cls, holder: Holder) -> Identity:
        return cls(holder.boot_id, holder.machine_id, holder.pid_namespace)

    def holder(self, holder_id: str) -> Holder | None:
        """The holder with this id and identity, as far as it makes sense."""
        return Holder.from_record({"holder_id": holder_id, **msgspec.structs.asdict(self)})


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A timed right to write. It counts until `lease_expires_at`, by the store's clock; within one boot of
    one machine until `boot_expires_at`, which nobody can move by setting a clock."""

    lock_id: str
    worktree_id: str
    holder_id: str
    created_at: str
    last_renewed_at: str
    lease_expires_at: str
    fencing_token: int
    ttl: float
    purpose: str = ""
    identity: Identity = Identity()
    detached: bool = False
    """Taken for others than the process that asked: the end of the holder's process says nothing."""
    on_behalf_of: str = ""
    """The agent that its holder, a server, holds it for; it and its children act under it too."""
    boot_expires_at: BootMark | None = None
    actor: str = ""
    """In whose name it was taken: tells agents apart that live in one process. Empty if it was not said."""

    def holders(self) -> list[Holder]:
        """Who acts under it: its holder, and the one that this holds it for; as far as they make sense."""
        named = (self.holder_id, self.on_behalf_of)
        return [holder for each in named if each and (holder := self.identity.holder(each))]

    def who(self) -> str:
        """Its holder as others are shown it: by the name that it gave, if it did, and by its process."""
        return f"{self.actor}, {self.holder_id}" if self.actor else self.holder_id

    def expires_at(self) -> float:
        return parse_instant(self.lease_expires_at)

    def time_left(self, moment: Now, *, for_others: bool) -> float:
        """How long the lease still counts: for its holder, or (with a margin) until others may take it."""
        return moment.until(self.lease_expires_at, self.boot_expires_at, margin=for_others)

    def is_expired(self, moment: Now) -> bool:
        """Whether its holder must not use it any more."""
        return self.time_left(moment, for_others=False) <= 0

    def may_be_taken(self, moment: Now) -> bool:
        """Whether others may take its place: never before it has expired for its holder."""
        return self.time_left(moment, for_others=True) <= 0


class TokenCounter(msgspec.Struct, frozen=True):
    """The highest token ever given for a worktree. It outlives every lease, and the worktree too."""

    worktree_id: str
    fencing_token: int


class LeaseWaiter(msgspec.Struct, frozen=True, kw_only=True):
    """One who waits. It shows itself from time to time; who has not done so for long is left out."""

    ticket: str
    holder_id: str
    priority: int
    since: str
    seen_at: str
    purpose: str = ""
    identity: Identity = Identity()
    on_behalf_of: str = ""
    """Who the lease will belong to, if that is not the process that waits."""
    boot_seen_at: BootMark | None = None
    above: tuple[str, ...] = ()
    """The processes that the one that waits descends from: what they hold, it holds too."""
    actor: str = ""
    """In whose name it waits."""

    def unseen_for(self, moment: Now) -> float:
        return -moment.until(self.seen_at, self.boot_seen_at, margin=False)


class LeaseQueue(msgspec.Struct, frozen=True):
    """Those who wait, in the order in which they will be served."""

    worktree_id: str
    waiters: tuple[LeaseWaiter, ...] = ()


_LEASE: StructCodec[Lease] = StructCodec(Lease)
_COUNTER: StructCodec[TokenCounter] = StructCodec(TokenCounter)
_LINE: StructCodec[LeaseQueue] = StructCodec(LeaseQueue)


LEASES: Family[Lease] = Family("jvs/leases", _LEASE)
LINES: Family[LeaseQueue] = Family("jvs/queues", _LINE)


class LeaseKeys(NamedTuple):
    """The documents of one worktree's lease. They share a guard, so they are always changed together."""

    worktree: str
    lease: Key[Lease]
    counter: Key[TokenCounter]
    line: Key[LeaseQueue]

    @classmethod
    def of(cls, worktree: str) -> LeaseKeys:
        return cls(
            worktree,
            Key(f"jvs/leases/{worktree}", _LEASE),
            Key(f"jvs/tokens/{worktree}", _COUNTER),
            Key(f"jvs/queues/{worktree}", _LINE),
        )

    def all(self) -> list[Key[Any] | Stream[Any]]:
        return [self.lease, self.counter, self.line]


WAITER_TTL = 30.0
"""A waiter that has not shown itself for this long has left the line."""

SHOW_EVERY = 5.0
"""How often a waiter shows itself."""


class LeaseRequest(NamedTuple):
    """Who wants a lease, how long, and what for. `lock_id` is the id that the lease will have."""

    lock_id: str
    holder: Holder
    ttl: float
    purpose: str = ""
    priority: int = 0
    detached: bool = False
    waiter: Holder | None = None
    """Who stands in line for it, if that is not the holder itself."""
    client: Holder | None = None
    """The agent that the holder, a server, asks for it for."""
    actor: str = ""
    """In whose name."""
    above: tuple[str, ...] = ()
    """The processes that the one that waits descends from."""


class LeaseGranted(NamedTuple):
    """A lease was given; `stolen_from` is the expired one whose place it takes."""

    lease: Lease
    stolen_from: Lease | None


class LeaseWaiting(NamedTuple):
    """Not yet: `place` in the line, from 1; `lease` is the one that is held, if one is, and for how long."""

    place: int
    lease: Lease | None
    time_left: float = 0.0


class AuditEvent(NamedTuple):
    """What the audit trail shall say about it."""

    name: str
    facts: dict[str, object]


Told = TypeVar("Told", covariant=True)


class LeaseRuling(NamedTuple, Generic[Told]):
    """What the protocol decides: the changes to make, what to tell the caller, what to record."""

    changes: list[Change]
    result: Told
    event: AuditEvent | None = None


def acquire(
    view: View,
    moment: Now,
    keys: LeaseKeys,
    request: LeaseRequest,
    *,
    wait: bool,
    gone: frozenset[str] = frozenset(),
) -> LeaseRuling[LeaseGranted | LeaseWaiting]:
    """Give the lease if nobody has it and nobody is ahead in line; else wait in line, or refuse.

    `gone` are the tickets of waiters that are known to be dead.
    """
    lease = view.get(keys.lease)
    line = _waiters(view, moment, keys, gone)
    ahead = [
        each
        for each in line
        if each.ticket != request.lock_id and _order(each) < _order_of(request, line, moment)
    ]
    if (lease is None or lease.may_be_taken(moment)) and not ahead:
        return _grant(view, moment, keys, request, lease, line)
    if not wait:
        raise _conflict(moment, keys, lease, ahead)
    line = sorted(
        (_shown(request, line, moment), *(each for each in line if each.ticket != request.lock_id)),
        key=_order,
    )
    place = next(number for number, each in enumerate(line, 1) if each.ticket == request.lock_id)
    changes = _line_changes(view, keys, line)
    if lease is None or lease.may_be_taken(moment):
        return LeaseRuling(changes, LeaseWaiting(place, None))
    return LeaseRuling(changes, LeaseWaiting(place, lease, lease.time_left(moment, for_others=True)))


def steal(view: View, moment: Now, keys: LeaseKeys, request: LeaseRequest) -> LeaseRuling[LeaseGranted]:
    """Take the place of a lease that has expired; one that has not is left alone."""
    lease = view.get(keys.lease)
    if lease is None:
        raise LockNotHeld(f"{keys.worktree} is not locked: there is nothing to steal", worktree=keys.worktree)
    if not lease.may_be_taken(moment):
        raise _conflict(moment, keys, lease, [])
    return _grant(view, moment, keys, request, lease, _waiters(view, moment, keys, frozenset()))


def renew(
    view: View, moment: Now, keys: LeaseKeys, lock_id: str, ttl: float | None = None
) -> LeaseRuling[Lease]:
    """Let the lease run for another `ttl` from now (its own, unless said otherwise)."""
    lease = _own(view, keys, lock_id)
    left = lease.time_left(moment, for_others=False)
    if left <= 0:
        raise LockExpired(
            f"the lease on {keys.worktree} ran out {format_duration(-left)} ago",
            worktree=keys.worktree,
            lock_id=lock_id,
        )
    ttl = lease.ttl if ttl is None else ttl
    renewed = msgspec.structs.replace(
        lease,
        ttl=ttl,
        last_renewed_at=format_instant(moment.now),
        lease_expires_at=format_instant(moment.now + ttl),
        boot_expires_at=moment.mark(ttl),
    )
    return LeaseRuling([Replace(keys.lease, renewed)], renewed)


def release(view: View, moment: Now, keys: LeaseKeys, lock_id: str) -> LeaseRuling[Lease]:
    """Give the lease back. An expired one may be given back too, as long as nobody has taken it."""
    lease = _own(view, keys, lock_id)
    return LeaseRuling([Delete(keys.lease)], lease, AuditEvent("lock_released", _facts(lease)))


def leave(view: View, moment: Now, keys: LeaseKeys, ticket: str) -> LeaseRuling[None]:
    """Leave the line."""
    line = [each for each in _waiters(view, moment, keys, frozenset()) if each.ticket != ticket]
    return LeaseRuling(_line_changes(view, keys, line), None)


def validate(view: View, moment: Now | float, keys: LeaseKeys, lock_id: str, token: int) -> Lease:
    """The lease, if this holder may commit now. Run inside the transaction that commits its work.

    A bare number is the store's time alone, which a step of the wall clock moves: see `Desk.validator`.
    """
    moment = Now(moment) if isinstance(moment, float | int) else moment
    lease = view.get(keys.lease)
    if lease is None or lease.lock_id != lock_id or lease.fencing_token != token:
        counter = view.get(keys.counter)
        raise FencingMismatch(
            f"the token {token} is not the current one of {keys.worktree}; nothing was published",
            worktree=keys.worktree,
            lock_id=lock_id,
            token=token,
            current_token=counter.fencing_token if counter else None,
        )
    if lease.is_expired(moment):
        raise LockExpired(
            f"the lease on {keys.worktree} has run out; nothing was published",
            worktree=keys.worktree,
            lock_id=lock_id,
        )
    return lease


def next_token(counter: TokenCounter | None) -> int:
    """The token of the next grant: greater than every one before it."""
    return 1 if counter is None else counter.fencing_token + 1


def _grant(
    view: View,
    moment: Now,
    keys: LeaseKeys,
    request: LeaseRequest,
    expired: Lease | None,
    line: list[LeaseWaiter],
) -> LeaseRuling[LeaseGranted]:
    counter = view.get(keys.counter)
    lease = Lease(
        lock_id=request.lock_id,
        worktree_id=keys.worktree,
        holder_id=request.holder.holder_id,
        created_at=format_instant(moment.now),
        last_renewed_at=format_instant(moment.now),
        lease_expires_at=format_instant(moment.now + request.ttl),
        fencing_token=next_token(counter),
        ttl=request.ttl,
        purpose=request.purpose,
        identity=Identity.of(request.holder),
        detached=request.detached,
        on_behalf_of=request.client.holder_id if request.client else "",
        boot_expires_at=moment.mark(request.ttl),
        actor=request.actor,
    )
    count = TokenCounter(keys.worktree, lease.fencing_token)
    changes: list[Change] = [
        Create(keys.lease, lease) if expired is None else Replace(keys.lease, lease),
        Create(keys.counter, count) if counter is None else Replace(keys.counter, count),
        *_line_changes(view, keys, [each for each in line if each.ticket != request.lock_id]),
    ]
    if expired is None:
        return LeaseRuling(changes, LeaseGranted(lease, None), AuditEvent("lock_acquired", _facts(lease)))
    facts: dict[str, object] = {
        "old": _facts(expired),
        "new": _facts(lease),
        "expired_at": expired.lease_expires_at,
    }
    return LeaseRuling(changes, LeaseGranted(lease, expired), AuditEvent("lock_stolen", facts))


def _own(view: View, keys: LeaseKeys, lock_id: str) -> Lease:
    lease = view.get(keys.lease)
    if lease is None or lease.lock_id != lock_id:
        held = "nobody" if lease is None else lease.holder_id
        raise LockNotHeld(
            f"{keys.worktree} is not locked with the id {lock_id}; it is held by {held}",
            worktree=keys.worktree,
            lock_id=lock_id,
            holder_id=lease.holder_id if lease else None,
        )
    return lease


def _conflict(moment: Now, keys: LeaseKeys, lease: Lease | None, ahead: list[LeaseWaiter]) -> LockConflict:
    if lease is None or lease.may_be_taken(moment):
        first = ahead[0]
        return LockConflict(
            f"{keys.worktree} is free, but {first.holder_id} waits for it and comes first",
            worktree=keys.worktree,
            holder_id=first.holder_id,
            waiting=len(ahead),
        )
    left = lease.time_left(moment, for_others=True)
    purpose = f", for: {lease.purpose}" if lease.purpose else ""
    return LockConflict(
        f"{keys.worktree} is locked by {lease.who()} since {lease.created_at}{purpose}; "
        f"the lease runs for another {format_duration(left)}",
        worktree=keys.worktree,
        lock_id=lease.lock_id,
        holder_id=lease.holder_id,
        actor=lease.actor,
        purpose=lease.purpose,
        since=lease.created_at,
        expires_at=lease.lease_expires_at,
        time_left=left,
    )


def _facts(lease: Lease) -> dict[str, object]:
    return {
        "worktree_id": lease.worktree_id,
        "lock_id": lease.lock_id,
        "holder_id": lease.holder_id,
        "fencing_token": lease.fencing_token,
        "purpose": lease.purpose,
    }


# --- The line ---------------------------------------------------------------------------------------


def _waiters(view: View, moment: Now, keys: LeaseKeys, gone: frozenset[str]) -> list[LeaseWaiter]:
    """Those who still wait, in order."""
    line = view.get(keys.line)
    waiters = line.waiters if line else ()
    alive = (each for each in waiters if each.ticket not in gone and each.unseen_for(moment) < WAITER_TTL)
    return sorted(alive, key=_order)


def _order(waiter: LeaseWaiter) -> tuple[int, str, str]:
    return -waiter.priority, waiter.since, waiter.ticket


def _order_of(request: LeaseRequest, line: list[LeaseWaiter], moment: Now) -> tuple[int, str, str]:
    return _order(_shown(request, line, moment))


def _shown(request: LeaseRequest, line: list[LeaseWaiter], moment: Now) -> LeaseWaiter:
    """The requester's own entry, seen now: the one that it has in the line, or a new one at the end."""
    own = next((each for each in line if each.ticket == request.lock_id), None)
    if own is not None:
        if own.unseen_for(moment) < SHOW_EVERY:
            return own
        return msgspec.structs.replace(own, seen_at=format_instant(moment.now), boot_seen_at=moment.mark())
    waiter = request.waiter or request.holder
    behind = max((parse_instant(each.since) for each in line), default=0.0) + 1e-6
    return LeaseWaiter(
        ticket=request.lock_id,
        holder_id=waiter.holder_id,
        priority=request.priority,
        since=format_instant(max(moment.now, behind)),  # a clock that was set back does not pass the line
        seen_at=format_instant(moment.now),
        purpose=request.purpose,
        identity=Identity.of(waiter),
        on_behalf_of=request.holder.holder_id if request.waiter else "",
        boot_seen_at=moment.mark(),
        above=request.above,
        actor=request.actor,
    )


def _line_changes(view: View, keys: LeaseKeys, line: list[LeaseWaiter]) -> list[Change]:
    """What makes the stored line this one; nothing if it is."""
    stored = view.get(keys.line)
    wanted = LeaseQueue(keys.worktree, tuple(line))
    if stored == wanted or (stored is None and not line):
        return []
    if stored is None:
        return [Create(keys.line, wanted)]
    return [Replace(keys.line, wanted) if line else Delete(keys.line)]
