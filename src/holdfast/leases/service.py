"""Lease operations, each one transaction with its audit entry; and held leases, which a heartbeat renews."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from holdfast.clock import (
    SKEW,
    SYSTEM_CLOCK,
    Clock,
    ClockReading,
    Now,
    format_duration,
    format_instant,
    ttl_within,
)
from holdfast.errors import Failure, LockConflict, LockTimeout, SettingInvalid
from holdfast.fs.names import checked_actor, checked_text
from holdfast.fs.reserve import Reserve
from holdfast.leases import deadlock, rules
from holdfast.leases.deadlock import Hold, Participant, ReadGraph, Resource, WaitEdge, WaitGraph
from holdfast.leases.heartbeat import Held, Subject
from holdfast.leases.rules import Lease, LeaseGranted, LeaseKeys, LeaseRequest, LeaseWaiter, LeaseWaiting, NamedLease
from holdfast.locks import identity
from holdfast.locks.identity import Holder, Liveness, current_holder, liveness_behind, processes_above
from holdfast.store.audit import AuditTrail
from holdfast.store.layout import document_locks_until
from holdfast.store.model import Decision, Key, Store, Stream, View

if TYPE_CHECKING:
    from holdfast.leases.queue import NotYet

SHORTEST_TTL, LONGEST_TTL = 0.1, 24 * 3600.0
DEFAULT_TTL = 30.0
OWN_TTL = 10.0
"""The ttl of a lease that a command holds while it runs. If the command is killed, others wait at most this long. The
heartbeat renews the lease about every 3 s, so a holder loses it only if three renewals in a row are late or fail."""
COMMAND_TTL = 15.0
"""The ttl of a lease or claim under which a user's command or the agent of an MCP client works, renewed by a heartbeat.
It is longer than `OWN_TTL`, because losing such a lease costs the work of that command."""
HIGHEST_PRIORITY = 1_000_000

Result = TypeVar("Result")
Rule = Callable[[View, Now, LeaseKeys], rules.LeaseRuling[Result]]


class LeaseState(NamedTuple):
    """A lease as others see it now: once it has `expired`, any process may take it."""

    lease: Lease
    expired: bool
    time_left: float
    liveness: Liveness
    waiters: tuple[LeaseWaiter, ...]


class LeaseSite(Protocol):
    """The leased files, if the records are on a server."""

    def before_grant(self, keys: LeaseKeys) -> int:
        """Raise if this machine may not get a lease; return the highest token ever granted here."""

    def after_grant(self, keys: LeaseKeys, token: int) -> None:
        """Record a granted token."""


class LeaseService:
    """Grants, renews and releases the leases of one store: those of worktrees, or those of names (`of_names`).

    `also_named` and `precondition` let the layer above take part in every grant: documents that the transaction reads
    too, and a pure function that may refuse (the worktree does not exist). `skew` is the largest difference between the
    clocks of the processes that share the store: 0 if the store has its own clock. `other_graphs` are the other wait
    graphs that a deadlock may lead through, read only during a wait. With a `reserve`, leases can be renewed and
    released on a full disk. The `site` takes part in grants if the records are on a server.
    """

    def __init__(
        self,
        store: Store,
        trail: AuditTrail,
        *,
        also_named: Callable[[str], Sequence[Key[Any]]] = lambda worktree: (),
        precondition: Callable[[View, str], None] = lambda view, worktree: None,
        holder: Holder | None = None,
        actor: str = "",
        clock: Clock = SYSTEM_CLOCK,
        skew: float = SKEW,
        other_graphs: Callable[[], Sequence[ReadGraph]] = tuple,
        reserve: Reserve | None = None,
        site: LeaseSite | None = None,
    ) -> None:
        self.store = store
        self.families = rules.WORKTREE_LEASES
        self._reserve = reserve
        self._site = site
        self._trail = trail
        self._also_named = also_named
        self._precondition = precondition
        self._holder = holder
        self.actor = actor  # tells agents of one process apart
        self._clock = clock
        self._skew = skew
        self._other_graphs = other_graphs

    def of_names(self) -> LeaseService:
        """The same operations on named leases, which have no worktree and so no precondition."""
        service = copy.copy(self)
        service.families = rules.NAMED_LEASES
        return service

    def keys(self, subject: str) -> LeaseKeys:
        """The documents of a lease."""
        return LeaseKeys.within(self.families, subject)

    @property
    def holder(self) -> Holder:
        """The holder of new leases: by default, this process."""
        return self._holder or current_holder()

    def request(
        self,
        *,
        ttl: float = DEFAULT_TTL,
        purpose: str = "",
        priority: int = 0,
        behalf_of: Holder | None = None,
        client: Holder | None = None,
    ) -> LeaseRequest:
        """A request by this holder, with a new id.

        `behalf_of` is the future holder if that is not this process: an agent that runs each command
        as a new process. Such a lease outlives those processes; it ends by release or expiry. `client` is the agent
        for which this process, a server, holds the lease; the server releases it when that agent is gone.
        """
        lock_id, ttl = str(uuid.uuid4()), checked_ttl(ttl)
        checked_text(purpose, what="purpose")
        actor = checked_actor(self.actor) if self.actor else ""
        if abs(priority) > HIGHEST_PRIORITY:
            limits = f"a number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
            raise SettingInvalid("priority", str(priority), limits)
        request = LeaseRequest(lock_id, self.holder, ttl, purpose, priority, actor=actor)
        if behalf_of is None:
            return request._replace(client=client)
        return request._replace(holder=behalf_of, detached=True, waiter=self.holder)

    def reading(self) -> ClockReading:
        """A reading of the boot clock; take it before a transaction that judges a lease."""
        return ClockReading(identity.boot_clock_id(), self._clock.boot(), self._skew)

    def validator(self, worktree: str, lock_id: str, token: int) -> Callable[[View, float], Lease]:
        """`rules.validate` for one holder, with the boot clock read now. Call it in the decide function of the
        transaction that commits the holder's work; that transaction must name the lease's documents."""
        reading, keys = self.reading(), self.keys(worktree)
        return lambda view, now: rules.validate(view, reading.at(now), keys, lock_id, token)

    # --- Operations --------------------------------------------------------------------------------

    def acquire(self, worktree: str, request: LeaseRequest) -> LeaseGranted:
        """Grant the lease now, or raise `LockConflict`. An expired lease is taken over, which is a steal."""
        result = self._grant(worktree, request, wait=False)
        assert isinstance(result, LeaseGranted)
        return result

    def join_queue(self, worktree: str, request: LeaseRequest) -> LeaseGranted | LeaseWaiting:
        """Grant the lease, or join the queue. Call it again every few seconds to keep the position and move up."""
        return self._grant(worktree, request, wait=True)

    def leave(self, worktree: str, ticket: str) -> None:
        """Leave the queue; a ticket that is not in it changes nothing."""
        self._transact(worktree, lambda view, now, keys: rules.leave(view, now, keys, ticket))

    def steal(self, worktree: str, request: LeaseRequest) -> LeaseGranted:
        """Take over an expired lease; raise `LockConflict` if it has not expired."""
        return self._granting(worktree, request, rules.steal)

    def renew(self, worktree: str, lock_id: str, ttl: float | None = None) -> Lease:
        """Renew the lease from now. After `LockNotHeld` or `LockExpired`, stop writing."""
        ttl = None if ttl is None else checked_ttl(ttl)
        return self._relieved(worktree, lambda view, now, keys: rules.renew(view, now, keys, lock_id, ttl))

    def release(self, worktree: str, lock_id: str) -> Lease:
        """End the lease; raise `LockNotHeld`, and change nothing, if `lock_id` is not the current one."""
        return self._relieved(worktree, lambda view, now, keys: rules.release(view, now, keys, lock_id))

    def state(self, worktree: str) -> LeaseState | None:
        """The lease and its waiters; None if it is free. Takes no lock."""
        keys = self.keys(worktree)
        document, queue = self.store.read(keys.lease), self.store.read(keys.queue)
        if document is None:
            return None
        lease, now = document.record, self.reading().at(self.store.now())
        alive = liveness_behind(lease.identity.holder(lease.holder_id), detached=lease.detached)
        waiters = queue.record.waiters if queue else ()
        return LeaseState(lease, lease.may_be_taken(now), lease.time_left(now, for_others=True), alive, waiters)

    def states(self) -> Iterator[LeaseState]:
        """The state of each existing lease, by name. Takes no lock."""
        for subject, _ in self.store.scan(self.families.leases):
            if (state := self.state(subject)) is not None:
                yield state

    def wait_graph(self) -> WaitGraph:
        """The current holds and waits for worktree leases and named leases. Takes no lock."""
        now = self.reading().at(self.store.now())
        holds: list[Hold] = []
        waits: list[WaitEdge] = []
        for kind in (rules.WORKTREE_LEASES, rules.NAMED_LEASES):
            leases = (document.record for _, document in self.store.scan(kind.leases))
            holds += (_hold(kind.word, lease) for lease in leases if not lease.may_be_taken(now))
            waits += (
                _wait_edge(Resource(kind.word, subject), waiter)
                for subject, document in self.store.scan(kind.queues)
                for waiter in document.record.waiters
                if waiter.unseen_for(now) < rules.WAITER_TTL and not _is_dead(waiter)
            )
        return WaitGraph(tuple(holds), tuple(waits))

    def check_deadlock(self, ticket: str) -> None:
        """Raise `Deadlock` if the wait with this ticket is part of a deadlock and must give up."""
        deadlock.check_deadlock(ticket, self.wait_graph, self._other_graphs())

    # --- Transactions ------------------------------------------------------------------------------

    def _grant(self, worktree: str, request: LeaseRequest, *, wait: bool) -> LeaseGranted | LeaseWaiting:
        """Ask at once. Only if that fails, find out which waiters are dead, and ask again."""

        def ask(gone: frozenset[str]) -> LeaseGranted | LeaseWaiting:
            return self._granting(worktree, request, partial(rules.acquire, wait=wait, gone=gone))

        try:
            answer = ask(frozenset())
        except LockConflict:
            gone = self._dead_waiters(worktree)
            if not gone:
                raise
            return ask(gone)
        gone = frozenset() if isinstance(answer, LeaseGranted) else self._dead_waiters(worktree)
        return ask(gone) if gone else answer

    def _granting(self, worktree: str, request: LeaseRequest, rule: Callable[..., rules.LeaseRuling[Result]]) -> Result:
        keys, site = self.keys(worktree), self._site
        request = request if site is None else request._replace(seen=site.before_grant(keys))
        answer = self._transact(worktree, lambda view, now, keys: rule(view, now, keys, request), granting=True)
        if site is not None and isinstance(answer, LeaseGranted):
            try:
                site.after_grant(keys, answer.lease.fencing_token)
            except Failure:
                with contextlib.suppress(Failure):
                    self.release(worktree, answer.lease.lock_id)
                raise
        return answer

    def _relieved(self, worktree: str, rule: Rule[Result]) -> Result:
        """Apply a rule that must succeed even on a full disk; if a full disk makes it fail, nothing has changed."""
        if self._reserve is None:
            return self._transact(worktree, rule)
        return self._reserve.relieve(lambda: self._transact(worktree, rule))

    def _transact(self, worktree: str, rule: Rule[Result], *, granting: bool = False) -> Result:
        keys = self.keys(worktree)
        named: list[Key[Any] | Stream[Any]] = [*keys.all(), self._trail.stream]
        guarded = granting and not keys.is_named
        if guarded:
            named += self._also_named(worktree)
        reading = self.reading()

        def decide(view: View, now: float) -> Decision[Result]:
            if guarded:
                self._precondition(view, worktree)
            ruling = rule(view, reading.at(now), keys)
            changes = list(ruling.changes)
            if ruling.event is not None:
                name, facts = ruling.event
                changes.append(self._trail.entry(view, now, name, actor=self.holder.holder_id, facts=facts))
            return Decision(changes, ruling.result)

        try:
            return self.store.transact(named, decide).result
        except LockConflict as conflict:
            raise self._with_liveness(conflict, worktree) from None

    def _with_liveness(self, conflict: LockConflict, worktree: str) -> LockConflict:
        """Add the liveness of the holder, which a pure function cannot find out."""
        state = self.state(worktree)
        if state is None or state.lease.lock_id != conflict.facts.get("lock_id"):
            return conflict
        facts = {**conflict.facts, "host": host_of(state.lease), "liveness": state.liveness.value}
        message, hint = f"{conflict.message} (holder {state.liveness.value})", conflict.hint
        if state.liveness is Liveness.DEAD and not state.expired:
            free_at = format_instant(self.store.now() + state.time_left)
            message = f"{message}: nobody renews it, so it becomes free at {free_at}"
            hint = f"Take it at that moment: --wait {format_duration(math.ceil(state.time_left) + 1)}."
            facts["free_at"] = free_at
        return LockConflict(message, hint=hint, **facts)

    def _dead_waiters(self, worktree: str) -> frozenset[str]:
        queue = self.store.read(self.keys(worktree).queue)
        return frozenset(each.ticket for each in queue.record.waiters if _is_dead(each)) if queue else frozenset()


def checked_ttl(ttl: float) -> float:
    return ttl_within(ttl, SHORTEST_TTL, LONGEST_TTL)


def host_of(lease: Lease) -> str | None:
    """The host of a lease's holder; None if its id is malformed."""
    holder = lease.identity.holder(lease.holder_id)
    return holder.host if holder else None


def _is_dead(of: LeaseWaiter | Lease) -> bool:
    return deadlock.is_dead(of.identity.holder(of.holder_id))


def _hold(word: str, lease: Lease) -> Hold:
    holder = _participant(lease, (lease.holder_id, lease.on_behalf_of))
    return Hold(Resource(word, lease.subject), holder, lease.lock_id, for_descendants=True)


def _wait_edge(thing: Resource, waiter: LeaseWaiter) -> WaitEdge:
    process = _participant(waiter, (waiter.holder_id, waiter.on_behalf_of), waiter.above)
    return WaitEdge(thing, process, waiter.since, waiter.ticket)


def _participant(record: Lease | LeaseWaiter, processes: Iterable[str], above: Iterable[str] = ()) -> Participant:
    machine = record.identity.boot_id, record.identity.pid_namespace
    process = record.on_behalf_of or record.holder_id
    return Participant(
        f"{record.actor}, {process}" if record.actor else process,
        processes=deadlock.process_ids(processes, *machine),
        above=deadlock.process_ids(above, *machine),
        actor=record.actor,
    )


class HeldLease(Held[Lease]):
    """A held lease on a worktree, or a held named lease. As a context manager (`with` or `async with`), it is released
    at the end of the block."""

    def __init__(
        self, service: LeaseService, lease: Lease, *, clock: Clock = SYSTEM_CLOCK, began: float | None = None
    ) -> None:
        """`began` is the time by the boot clock just before the lease was requested."""
        facts = service.keys(lease.subject).facts()
        subject = Subject(f"the lease on {lease.subject}", "renewed", facts)
        super().__init__(subject, lease, lease.ttl, clock=clock, began=began)
        self._service = service

    @property
    def lease(self) -> Lease:
        """The lease as it was last renewed."""
        return self.record

    @property
    def worktree(self) -> str:
        """The worktree; empty for a named lease."""
        return self.lease.worktree_id

    @property
    def name(self) -> str:
        """The name of a named lease; empty for the lease of a worktree."""
        return self.lease.name if isinstance(self.lease, NamedLease) else ""

    @property
    def lock_id(self) -> str:
        """The id of the lease: any process that has it can renew and release the lease."""
        return self.lease.lock_id

    @property
    def token(self) -> int:
        """The fencing token: it grows with every grant, so a later holder has a greater one."""
        return self.lease.fencing_token

    def _renew(self, ttl: float | None) -> tuple[Lease, float]:
        lease = self._service.renew(self.lease.subject, self.lock_id, ttl)
        return lease, lease.ttl

    def _release(self) -> None:
        self._service.release(self.lease.subject, self.lock_id)


def acquire(
    service: LeaseService,
    worktree: str,
    request: LeaseRequest,
    *,
    wait: float | None = 0.0,
    began: float | None = None,
    cancelled: threading.Event | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> HeldLease:
    """Acquire a lease: at once, or by waiting in the queue for at most `wait` seconds (None: no limit). The wait counts
    from `began`, by the monotonic clock (None: from now).

    Raises `LockConflict`, which names the holder, if `wait` is 0 and the lease is not free; `LockTimeout` when the time
    is up or `cancelled` is set; `Deadlock` if the holder in turn waits for something that the requester holds.
    """

    def ask() -> HeldLease | LeaseWaiting:
        began = clock.boot()
        answer = service.join_queue(worktree, request)
        if isinstance(answer, LeaseWaiting):
            return answer
        return HeldLease(service, answer.lease, clock=clock, began=began)

    if wait == 0.0:
        began = clock.boot()
        return HeldLease(service, service.acquire(worktree, request).lease, clock=clock, began=began)
    request = request._replace(above=processes_above())
    start = clock.monotonic() if began is None else began
    try:
        ends_at = None if wait is None else time.monotonic() + start + wait - clock.monotonic()
        with document_locks_until(ends_at), contextlib.suppress(LockTimeout):
            answer = ask()  # usually the lease is free; then neither the queue module nor a watch is needed
            if isinstance(answer, HeldLease):
                return answer
        from holdfast.leases.queue import QueueWait, wait_in_queue

        what = f"the {'lease' if service.keys(worktree).is_named else 'worktree'} {worktree}"
        queue_wait = QueueWait(what, wait, cancelled, clock, start)
        check = partial(service.check_deadlock, request.lock_id)
        with service.store.watch(service.keys(worktree).lease) as watch:
            return wait_in_queue(queue_wait, lambda: _or_not_yet(ask()), watch, check)
    except BaseException as failure:
        from holdfast.leases.queue import leave_in_time

        leave_in_time(lambda: service.leave(worktree, request.lock_id), failure)
        raise


def _or_not_yet(answer: HeldLease | LeaseWaiting) -> HeldLease | NotYet:
    """The held lease, or a pause until the lease may expire or the next heartbeat is due."""
    from holdfast.leases.queue import NotYet

    if isinstance(answer, HeldLease):
        return answer
    lease = answer.lease
    if lease is None:  # free, but waiters ahead are about to take it, or have died
        return NotYet(0.05 if answer.position > 1 else rules.WAITER_HEARTBEAT, [])
    shown = lease.holder_id + (f" ({lease.purpose})" if lease.purpose else "")
    if _is_dead(lease):
        shown += f", which is dead: nobody renews it, so it becomes free in {format_duration(answer.time_left)}"
    holder = {"holder_id": lease.holder_id, "lock_id": lease.lock_id, "shown": shown}
    return NotYet(min(rules.WAITER_HEARTBEAT, answer.time_left), [holder])
