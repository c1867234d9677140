"""Lease rules as pure functions: from stored documents and the time, they derive the changes to make.

Nothing here does I/O, reads a clock or draws random numbers: production runs the code that the tests explore, state
by state. The time is a `Now`, which combines two clocks. It decides only when a steal is *allowed*. A stale
holder is harmless because of `validate`, which every commit of protected work runs in its own transaction.

1. A lease is created only if none exists, and replaced only when it has expired (a steal).
2. Every grant takes the counter's next token. The counter is never lowered and never deleted.
3. Renewing and releasing need the exact `lock_id`. An expired lease cannot be renewed.
4. Waiters are served by priority, then in order of arrival; no request bypasses the queue.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from holdfast.clock import (
    BootMark,
    Deadline,
    Now,
    TimedRight,
    format_ago,
    format_duration,
    format_instant,
    parse_instant,
)
from holdfast.errors import FencingMismatch, LockConflict, LockExpired, LockNotHeld
from holdfast.locks.identity import Holder
from holdfast.store.model import Change, Create, Delete, Family, Instant, Key, Replace, Stream, StructCodec, View

WAITER_TTL = 30.0  # a waiter without a heartbeat for this long has left the queue
WAITER_HEARTBEAT = 5.0

# --- Records -----------------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True):
    """The machine of a process, so that others can tell whether the process is alive."""

    boot_id: str = ""
    machine_id: str = ""
    pid_namespace: str = ""

    @classmethod
    def of(cls, holder: Holder) -> Identity:
        return cls(holder.boot_id, holder.machine_id, holder.pid_namespace)

    def holder(self, holder_id: str) -> Holder | None:
        """The holder with this id and identity; None if the id is malformed."""
        return Holder.from_record({"holder_id": holder_id, **msgspec.structs.asdict(self)})


class Lease(TimedRight, msgspec.Struct, frozen=True, kw_only=True):
    """A timed right to write to a worktree."""

    lock_id: str
    worktree_id: str
    holder_id: str
    created_at: Instant
    last_renewed_at: Instant
    lease_expires_at: Instant
    fencing_token: int
    ttl: float
    purpose: str = ""
    identity: Identity = Identity()
    detached: bool = False  # outlives the process that asked for it, whose end proves nothing
    on_behalf_of: str = ""  # the agent for which a server holds it; the agent and its children act under it too
    boot_expires_at: BootMark | None = None
    actor: str = ""  # tells agents of one process apart; empty if none was named

    def deadline(self) -> Deadline:
        return Deadline(self.lease_expires_at, self.boot_expires_at)

    def holders(self) -> list[Holder]:
        """The processes that act under the lease: its holder, and the agent for which it is held."""
        named = (self.holder_id, self.on_behalf_of)
        return [holder for each in named if each and (holder := self.identity.holder(each))]

    def who(self) -> str:
        """The holder, in readable form: the actor, if one was named, and the process."""
        return f"{self.actor}, {self.holder_id}" if self.actor else self.holder_id

    @property
    def subject(self) -> str:
        """The leased worktree, or the name of a named lease."""
        return self.worktree_id


class NamedLease(Lease, frozen=True, kw_only=True):
    """A lease without a worktree, for anything that only one process at a time may do. Its `worktree_id` is empty."""

    name: str

    @property
    def subject(self) -> str:
        return self.name


class TokenCounter(msgspec.Struct, frozen=True):
    """The highest token ever granted for a worktree, or for a name (then `worktree_id` is empty). It outlives every
    lease, and the worktree too."""

    worktree_id: str
    fencing_token: int


class LeaseWaiter(msgspec.Struct, frozen=True, kw_only=True):
    """A waiter in the queue. It sends heartbeats; after `WAITER_TTL` without one, it is skipped."""

    ticket: str
    holder_id: str
    priority: int
    since: Instant
    seen_at: Instant
    purpose: str = ""
    identity: Identity = Identity()
    on_behalf_of: str = ""  # the future holder of the lease, if that is not the waiting process
    boot_seen_at: BootMark | None = None
    above: tuple[str, ...] = ()  # the ancestors of the waiting process, which shares their leases
    actor: str = ""

    def unseen_for(self, now: Now) -> float:
        """Seconds since its last heartbeat."""
        return -now.until(self.seen_at, self.boot_seen_at, margin=False)

    def order(self) -> tuple[int, str, str]:
        return -self.priority, self.since, self.ticket


class LeaseQueue(msgspec.Struct, frozen=True):
    """The waiters, in the order in which they will be served."""

    worktree_id: str
    waiters: tuple[LeaseWaiter, ...] = ()


class LeaseFamilies(NamedTuple):
    """The document families of one kind of lease. `word` names the kind in messages."""

    word: str
    leases: Family[Lease]
    counters: Family[TokenCounter]
    queues: Family[LeaseQueue]


def _families(word: str, prefix: str, lease: type[Lease], id_field: str) -> LeaseFamilies:
    counters, queues = StructCodec(TokenCounter), StructCodec(LeaseQueue)
    leases: Family[Lease] = Family(f"{prefix}leases", StructCodec(lease), id_field=id_field)
    return LeaseFamilies(word, leases, Family(f"{prefix}tokens", counters), Family(f"{prefix}queues", queues))


WORKTREE_LEASES = _families("lease", "jvs/", Lease, "worktree_id")
NAMED_LEASES = _families("named lease", "jvs/named-", NamedLease, "name")


class LeaseKeys(NamedTuple):
    """The documents of one lease. They share a document lock, so one transaction changes them."""

    subject: str  # the worktree, or the name of a named lease
    is_named: bool
    lease: Key[Lease]
    counter: Key[TokenCounter]
    queue: Key[LeaseQueue]

    @classmethod
    def of(cls, worktree: str) -> LeaseKeys:
        """The documents of a worktree's lease."""
        return cls.within(WORKTREE_LEASES, worktree)

    @classmethod
    def within(cls, families: LeaseFamilies, subject: str) -> LeaseKeys:
        keys = families.leases.key(subject), families.counters.key(subject), families.queues.key(subject)
        return cls(subject, families is NAMED_LEASES, *keys)

    @property
    def worktree(self) -> str:
        """The worktree; empty for a named lease."""
        return "" if self.is_named else self.subject

    def facts(self) -> dict[str, str]:
        """The subject, as a fact for a failure."""
        return {"name" if self.is_named else "worktree": self.subject}

    def all(self) -> list[Key[Any] | Stream[Any]]:
        return [self.lease, self.counter, self.queue]


class LeaseRequest(NamedTuple):
    """A request for a lease; `lock_id` is the id of the future lease, and the ticket in the queue."""

    lock_id: str
    holder: Holder
    ttl: float
    purpose: str = ""
    priority: int = 0
    detached: bool = False
    waiter: Holder | None = None  # the waiting process, if that is not the holder itself
    client: Holder | None = None  # the agent for which the holder, a server, requests it
    actor: str = ""
    above: tuple[str, ...] = ()  # the ancestors of the waiting process
    seen: int = 0  # the highest token ever granted here, which a restored store may have forgotten


class LeaseGranted(NamedTuple):
    """A granted lease; `stolen_from` is the expired lease that it replaces, if any."""

    lease: Lease
    stolen_from: Lease | None


class LeaseWaiting(NamedTuple):
    """The answer to a waiter: its `position` in the queue, from 1, and the current lease, if there is one."""

    position: int
    lease: Lease | None
    time_left: float = 0.0


Result = TypeVar("Result", covariant=True)


class LeaseRuling(NamedTuple, Generic[Result]):
    """The decision of a rule: the changes to make, the answer, and the name and facts of the audit event."""

    changes: list[Change]
    result: Result
    event: tuple[str, dict[str, object]] | None = None


def acquire(
    view: View, now: Now, keys: LeaseKeys, request: LeaseRequest, *, wait: bool, gone: frozenset[str] = frozenset()
) -> LeaseRuling[LeaseGranted | LeaseWaiting]:
    """Grant the lease if it is free and no waiter is ahead in the queue. Otherwise join the queue or, without `wait`,
    raise `LockConflict`. `gone` has the tickets of waiters that are known to be dead."""
    lease = view.get(keys.lease)
    free = lease is None or lease.may_be_taken(now)
    queue = _waiters(view, now, keys, gone)
    own = _own_entry(request, queue, now)
    others = [each for each in queue if each.ticket != request.lock_id]
    ahead = [each for each in others if each.order() < own.order()]
    if free and not ahead:
        return _grant(view, now, keys, request, lease, others)
    if not wait:
        raise _conflict(now, keys, lease, ahead)
    changes = _queue_changes(view, keys, sorted((own, *others), key=LeaseWaiter.order))
    if lease is None or free:
        return LeaseRuling(changes, LeaseWaiting(len(ahead) + 1, None))
    return LeaseRuling(changes, LeaseWaiting(len(ahead) + 1, lease, lease.time_left(now, for_others=True)))


def steal(view: View, now: Now, keys: LeaseKeys, request: LeaseRequest) -> LeaseRuling[LeaseGranted]:
    """Replace an expired lease; raise `LockConflict` if it has not expired."""
    lease = view.get(keys.lease)
    if lease is None:
        raise LockNotHeld(f"{keys.subject} is not leased: there is nothing to steal", **keys.facts())
    if not lease.may_be_taken(now):
        raise _conflict(now, keys, lease, [])
    others = [each for each in _waiters(view, now, keys) if each.ticket != request.lock_id]
    return _grant(view, now, keys, request, lease, others)


def renew(view: View, now: Now, keys: LeaseKeys, lock_id: str, ttl: float | None = None) -> LeaseRuling[Lease]:
    """Renew the lease for `ttl` seconds from now (None: as long as before)."""
    lease = _own(view, keys, lock_id)
    left = lease.time_left(now, for_others=False)
    if left <= 0:
        message = f"the lease on {keys.subject} expired {format_duration(-left)} ago"
        raise LockExpired(message, **keys.facts(), lock_id=lock_id)
    ttl = lease.ttl if ttl is None else ttl
    begin, end = format_instant(now.now), format_instant(now.now + ttl)
    renewed = msgspec.structs.replace(
        lease, ttl=ttl, last_renewed_at=begin, lease_expires_at=end, boot_expires_at=now.mark(ttl)
    )
    return LeaseRuling([Replace(keys.lease, renewed)], renewed)


def release(view: View, now: Now, keys: LeaseKeys, lock_id: str) -> LeaseRuling[Lease]:
    """End the lease, even if it has expired, as long as nobody has taken it over."""
    lease = _own(view, keys, lock_id)
    return LeaseRuling([Delete(keys.lease)], lease, ("lock_released", _facts(lease)))


def leave(view: View, now: Now, keys: LeaseKeys, ticket: str) -> LeaseRuling[None]:
    """Leave the queue."""
    others = [each for each in _waiters(view, now, keys) if each.ticket != ticket]
    return LeaseRuling(_queue_changes(view, keys, others), None)


def validate(view: View, now: Now | float, keys: LeaseKeys, lock_id: str, token: int) -> Lease:
    """The lease, if this holder may commit now. Call it in the transaction that commits the holder's work. If `now` is
    a bare number, a step of the wall clock shifts it: see `LeaseService.validator`."""
    lease = view.get(keys.lease)
    if lease is None or lease.lock_id != lock_id or lease.fencing_token != token:
        counter = view.get(keys.counter)
        current = counter.fencing_token if counter else None
        message = f"nothing was published: the token {token} is not the current one of {keys.subject}"
        raise FencingMismatch(message, **keys.facts(), lock_id=lock_id, token=token, current_token=current)
    if lease.is_expired(now):
        message = f"nothing was published: the lease on {keys.subject} has expired"
        raise LockExpired(message, **keys.facts(), lock_id=lock_id)
    return lease


def _grant(
    view: View, now: Now, keys: LeaseKeys, request: LeaseRequest, expired: Lease | None, others: list[LeaseWaiter]
) -> LeaseRuling[LeaseGranted]:
    counter = view.get(keys.counter)
    make = partial(NamedLease, name=keys.subject) if keys.is_named else Lease
    lease = make(
        lock_id=request.lock_id,
        worktree_id=keys.worktree,
        holder_id=request.holder.holder_id,
        created_at=format_instant(now.now),
        last_renewed_at=format_instant(now.now),
        lease_expires_at=format_instant(now.now + request.ttl),
        fencing_token=max(counter.fencing_token if counter else 0, request.seen) + 1,
        ttl=request.ttl,
        purpose=request.purpose,
        identity=Identity.of(request.holder),
        detached=request.detached,
        on_behalf_of=request.client.holder_id if request.client else "",
        boot_expires_at=now.mark(request.ttl),
        actor=request.actor,
    )
    count = TokenCounter(keys.worktree, lease.fencing_token)
    changes: list[Change] = [
        Create(keys.lease, lease) if expired is None else Replace(keys.lease, lease),
        Create(keys.counter, count) if counter is None else Replace(keys.counter, count),
        *_queue_changes(view, keys, others),
    ]
    facts = _facts(lease)
    if expired is not None:
        facts = {"old": _facts(expired), "new": facts, "expired_at": expired.lease_expires_at}
    name = "lock_acquired" if expired is None else "lock_stolen"
    return LeaseRuling(changes, LeaseGranted(lease, expired), (name, facts))


def _own(view: View, keys: LeaseKeys, lock_id: str) -> Lease:
    lease = view.get(keys.lease)
    if lease is None or lease.lock_id != lock_id:
        holder_id = lease.holder_id if lease else None
        message = f"{keys.subject} is not leased under the id {lock_id}; it is held by {holder_id or 'nobody'}"
        raise LockNotHeld(message, **keys.facts(), lock_id=lock_id, holder_id=holder_id)
    return lease


def _conflict(now: Now, keys: LeaseKeys, lease: Lease | None, ahead: list[LeaseWaiter]) -> LockConflict:
    if lease is None or lease.may_be_taken(now):
        first = ahead[0].holder_id
        message = f"{keys.subject} is free, but {first} waits for it and comes first"
        return LockConflict(message, **keys.facts(), holder_id=first, waiting=len(ahead))
    left = lease.time_left(now, for_others=True)
    purpose = f", for: {lease.purpose}" if lease.purpose else ""
    message = f"{keys.subject} is leased by {lease.who()}{purpose}; leased {format_ago(lease.created_at, now.now)}"
    facts = {name: getattr(lease, name) for name in ("lock_id", "holder_id", "actor", "purpose")}
    facts |= {"created_at": lease.created_at, "expires_at": lease.lease_expires_at, "time_left": left}
    message += f", expires in {format_duration(left)}"
    return LockConflict(message, **keys.facts(), **facts)


def _facts(lease: Lease) -> dict[str, object]:
    subject = "name" if isinstance(lease, NamedLease) else "worktree_id"
    facts = {name: getattr(lease, name) for name in (subject, "lock_id", "holder_id", "fencing_token", "purpose")}
    return {**facts, "actor": lease.actor} if lease.actor else facts


def _waiters(view: View, now: Now, keys: LeaseKeys, gone: frozenset[str] = frozenset()) -> list[LeaseWaiter]:
    """The waiters with a recent heartbeat that are not `gone`, in order."""
    queue = view.get(keys.queue)
    waiters = queue.waiters if queue else ()
    alive = (each for each in waiters if each.ticket not in gone and each.unseen_for(now) < WAITER_TTL)
    return sorted(alive, key=LeaseWaiter.order)


def _own_entry(request: LeaseRequest, queue: list[LeaseWaiter], now: Now) -> LeaseWaiter:
    """The requester's entry, with a recent heartbeat: its entry in the queue, or a new one at the end."""
    own = next((each for each in queue if each.ticket == request.lock_id), None)
    if own is not None:
        if own.unseen_for(now) < WAITER_HEARTBEAT:
            return own
        return msgspec.structs.replace(own, seen_at=format_instant(now.now), boot_seen_at=now.mark())
    waiter = request.waiter or request.holder
    behind = max((parse_instant(each.since) for each in queue), default=0.0) + 1e-6
    return LeaseWaiter(
        ticket=request.lock_id,
        holder_id=waiter.holder_id,
        priority=request.priority,
        since=format_instant(max(now.now, behind)),  # a clock that was set back does not bypass the queue
        seen_at=format_instant(now.now),
        purpose=request.purpose,
        identity=Identity.of(waiter),
        on_behalf_of=request.holder.holder_id if request.waiter else "",
        boot_seen_at=now.mark(),
        above=request.above,
        actor=request.actor,
    )


def _queue_changes(view: View, keys: LeaseKeys, waiters: list[LeaseWaiter]) -> list[Change]:
    """The change that stores these waiters; empty if they are already stored."""
    stored = view.get(keys.queue)
    queue = LeaseQueue(keys.worktree, tuple(waiters))
    if stored == queue or (stored is None and not waiters):
        return []
    if stored is None:
        return [Create(keys.queue, queue)]
    return [Replace(keys.queue, queue) if waiters else Delete(keys.queue)]
