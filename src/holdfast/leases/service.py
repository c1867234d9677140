"""Where leases are asked for: each operation of the protocol as one transaction, with its audit entry."""

from __future__ import annotations

import contextlib
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock, ClockReading, Now
from holdfast.errors import Failure, LockConflict, SettingInvalid
from holdfast.fs.names import checked_actor, checked_text
from holdfast.fs.reserve import Reserve
from holdfast.leases import rules
from holdfast.leases.deadlock import Hold, Look, Party, Thing, WaitEdge, WaitGraph, process_id, refuse_circle
from holdfast.leases.heartbeat import Held, Subject
from holdfast.leases.queue import NotYet, QueueWait, wait_in_line
from holdfast.leases.rules import (
    LEASES,
    LINES,
    SHOW_EVERY,
    Identity,
    Lease,
    LeaseGranted,
    LeaseKeys,
    LeaseRequest,
    LeaseRuling,
    LeaseWaiter,
    LeaseWaiting,
    Told,
)
from holdfast.locks.identity import (
    Holder,
    Liveness,
    boot_clock_id,
    current_holder,
    liveness,
    liveness_behind,
    processes_above,
)
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Decision, Key, Store, Stream, View

SHORTEST_TTL, LONGEST_TTL = 0.1, 24 * 3600.0
DEFAULT_TTL = 30.0
HIGHEST_PRIORITY = 1_000_000

Rule = Callable[[View, Now, LeaseKeys], LeaseRuling[Told]]


class LeaseState(NamedTuple):
    """A lease that is there, as others see it now: `expired` means that anybody may take its place."""

    lease: Lease
    expired: bool
    time_left: float
    liveness: Liveness
    waiters: tuple[LeaseWaiter, ...]


class LeaseService:
    """Gives, renews and takes back the leases of one store.

    `also_named` and `precondition` let the layer above take part in every grant: documents that the
    transaction reads too, and a pure function that may refuse (a worktree that is not there). `skew` is
    how far the clocks of those who share the store may be apart: 0 if the store has a clock of its own.
    `elsewhere` is what else can be held and waited for, so that a circle of waits may lead through it. With
    a `reserve` a lease can be renewed and released on a full disk too.
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
        elsewhere: Sequence[Look] = (),
        reserve: Reserve | None = None,
    ) -> None:
        self.store = store
        self._reserve = reserve
        self._trail = trail
        self._also_named = also_named
        self._precondition = precondition
        self._holder = holder
        self.actor = actor
        """In whose name leases are asked for, beyond the process: one may be the home of several agents."""
        self._clock = clock
        self._skew = skew
        self._elsewhere = elsewhere

    @property
    def holder(self) -> Holder:
        """In whose name leases are asked for: this process, unless said otherwise."""
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
        """A request in this holder's name, under a new id.

        `behalf_of` is who the lease is for, if that is not this process: the agent whose every command is
        a process of its own. Such a lease outlives its processes; only its time ends it. `client` is the
        agent that this process, a server, holds it for, and gives it back when that is gone.
        """
        lock_id, ttl = str(uuid.uuid4()), checked_ttl(ttl)
        checked_text(purpose, what="purpose")
        actor = checked_actor(self.actor) if self.actor else ""
        if abs(priority) > HIGHEST_PRIORITY:
            limits = f"a number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
            raise SettingInvalid("priority", str(priority), limits)
        if behalf_of is None:
            return LeaseRequest(lock_id, self.holder, ttl, purpose, priority, client=client, actor=actor)
        return LeaseRequest(
            *(lock_id, behalf_of, ttl, purpose, priority), detached=True, waiter=self.holder, actor=actor
        )

    def reading(self) -> ClockReading:
        """What the boot clock shows: taken before a transaction that judges a lease."""
        return ClockReading(boot_clock_id(), self._clock.boot(), self._skew)

    def validator(self, worktree: str, lock_id: str, token: int) -> Callable[[View, float], Lease]:
        """`protocol.validate` for one holder, by the clocks as of now: for the decide function of the
        transaction that commits its work, which must name the lease's documents."""
        reading, keys = self.reading(), LeaseKeys.of(worktree)
        return lambda view, now: rules.validate(view, reading.at(now), keys, lock_id, token)

    def acquire(self, worktree: str, request: LeaseRequest) -> LeaseGranted:
        """Give the lease now, or raise `LockConflict`. An expired one is taken over: that is a steal."""
        result = self._grant(worktree, request, wait=False)
        assert isinstance(result, LeaseGranted)
        return result

    def line_up(self, worktree: str, request: LeaseRequest) -> LeaseGranted | LeaseWaiting:
        """Give the lease, or a place in the line; ask again to move up, at least every few seconds."""
        return self._grant(worktree, request, wait=True)

    def leave(self, worktree: str, ticket: str) -> None:
        """Leave the line."""
        self._rule(worktree, lambda view, moment, keys: rules.leave(view, moment, keys, ticket))

    def steal(self, worktree: str, request: LeaseRequest) -> LeaseGranted:
        """Take over a lease that has expired; `LockConflict` if it has not."""
        return self._rule(
            worktree, lambda view, moment, keys: rules.steal(view, moment, keys, request), granting=True
        )

    def renew(self, worktree: str, lock_id: str, ttl: float | None = None) -> Lease:
        """Let the lease run on. `LockNotHeld` or `LockExpired`: stop writing."""
        ttl = None if ttl is None else checked_ttl(ttl)
        return self._relieved(
            worktree, lambda view, moment, keys: rules.renew(view, moment, keys, lock_id, ttl)
        )

    def release(self, worktree: str, lock_id: str) -> Lease:
        """Give the lease back; `LockNotHeld` if it is not this one any more, and then nothing is touched."""
        return self._relieved(worktree, lambda view, moment, keys: rules.release(view, moment, keys, lock_id))

    def state(self, worktree: str) -> LeaseState | None:
        """Who holds the lease and who waits; None if it is free. Takes no lock."""
        keys = LeaseKeys.of(worktree)
        document, line = self.store.read(keys.lease), self.store.read(keys.line)
        if document is None:
            return None
        lease, moment = document.record, self.reading().at(self.store.now())
        return LeaseState(
            lease=lease,
            expired=lease.may_be_taken(moment),
            time_left=lease.time_left(moment, for_others=True),
            liveness=liveness_of(lease),
            waiters=line.record.waiters if line else (),
        )

    def look(self) -> WaitGraph:
        """Who holds which lease, and who waits for one. Takes no lock."""
        moment = self.reading().at(self.store.now())
        holds = [
            _hold(document.record)
            for _, document in self.store.scan(LEASES)
            if not document.record.may_be_taken(moment)
        ]
        waits = [
            _wait(worktree, waiter)
            for worktree, document in self.store.scan(LINES)
            for waiter in document.record.waiters
            if waiter.unseen_for(moment) < rules.WAITER_TTL and not _is_dead(waiter)
        ]
        return WaitGraph(tuple(holds), tuple(waits))

    def refuse_circle(self, ticket: str) -> None:
        """Raise `Deadlock` if the wait with this ticket is part of a circle and has to give up."""
        refuse_circle(ticket, self.look, self._elsewhere)

    def _grant(self, worktree: str, request: LeaseRequest, *, wait: bool) -> LeaseGranted | LeaseWaiting:
        """Ask at once; only if others are in the way, see whether they are dead, and ask without them."""

        def ask(gone: frozenset[str]) -> LeaseGranted | LeaseWaiting:
            return self._rule(
                worktree,
                lambda view, moment, keys: rules.acquire(view, moment, keys, request, wait=wait, gone=gone),
                granting=True,
            )

        try:
            answer = ask(frozenset())
        except LockConflict:
            gone = self._dead_waiters(worktree)
            if not gone:
                raise
            return ask(gone)
        gone = frozenset() if isinstance(answer, LeaseGranted) else self._dead_waiters(worktree)
        return ask(gone) if gone else answer

    def _relieved(self, worktree: str, rule: Rule[Told]) -> Told:
        """Apply a rule for which there must be room: a failure over a full disk has changed nothing."""
        if self._reserve is None:
            return self._rule(worktree, rule)
        return self._reserve.relieve(lambda: self._rule(worktree, rule))

    def _rule(self, worktree: str, rule: Rule[Told], *, granting: bool = False) -> Told:
        keys = LeaseKeys.of(worktree)
        named: list[Key[Any] | Stream[Any]] = [*keys.all(), self._trail.stream]
        if granting:
            named += self._also_named(worktree)

        reading = self.reading()

        def decide(view: View, now: float) -> Decision[Told]:
            if granting:
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
        """Say too whether the holder is alive, which a pure function cannot find out."""
        state = self.state(worktree)
        if state is None or state.lease.lock_id != conflict.facts.get("lock_id"):
            return conflict
        return LockConflict(
            f"{conflict.message} (holder {state.liveness.value})",
            hint=conflict.hint,
            **{**conflict.facts, "host": host_of(state.lease), "liveness": state.liveness.value},
        )

    def _dead_waiters(self, worktree: str) -> frozenset[str]:
        line = self.store.read(LeaseKeys.of(worktree).line)
        if line is None:
            return frozenset()
        return frozenset(each.ticket for each in line.record.waiters if _is_dead(each))


def _is_dead(waiter: LeaseWaiter) -> bool:
    holder = waiter.identity.holder(waiter.holder_id)
    return holder is not None and liveness(holder) is Liveness.DEAD


def _hold(lease: Lease) -> Hold:
    named = (lease.holder_id, lease.on_behalf_of)
    party = Party(
        _shown(lease.on_behalf_of or lease.holder_id, lease.actor),
        processes=_processes(named, lease.identity),
        actor=lease.actor,
    )
    return Hold(Thing("lease", lease.worktree_id), party, lease.lock_id, for_descendants=True)


def _wait(worktree: str, waiter: LeaseWaiter) -> WaitEdge:
    party = Party(
        _shown(waiter.on_behalf_of or waiter.holder_id, waiter.actor),
        processes=_processes((waiter.holder_id, waiter.on_behalf_of), waiter.identity),
        above=_processes(waiter.above, waiter.identity),
        actor=waiter.actor,
    )
    return WaitEdge(Thing("lease", worktree), party, waiter.since, waiter.ticket)


def _shown(process: str, actor: str) -> str:
    return f"{actor}, {process}" if actor else process


def _processes(holder_ids: Iterable[str], identity: Identity) -> frozenset[str]:
    return frozenset(
        process_id(each, identity.boot_id, identity.pid_namespace) for each in holder_ids if each
    )


def host_of(lease: Lease) -> str | None:
    """The host of a lease's holder."""
    holder = lease.identity.holder(lease.holder_id)
    return holder.host if holder else None


def liveness_of(lease: Lease) -> Liveness:
    """Whether the holder of a lease still exists."""
    return liveness_behind(lease.identity.holder(lease.holder_id), detached=lease.detached)


def checked_ttl(ttl: float) -> float:
    """A ttl that makes sense."""
    if not (math.isfinite(ttl) and SHORTEST_TTL <= ttl <= LONGEST_TTL):
        raise SettingInvalid("ttl", str(ttl), f"from {SHORTEST_TTL:g} s to {LONGEST_TTL:g} s")
    return ttl


class HeldLease(Held[Lease]):
    """A lease on a worktree. Used as a context manager, also an asynchronous one, it ends with its block."""

    def __init__(
        self, desk: LeaseService, lease: Lease, *, clock: Clock = SYSTEM_CLOCK, began: float | None = None
    ) -> None:
        """`began` is what the boot clock showed before the lease was asked for."""
        subject = Subject(f"the lease on {lease.worktree_id}", "renewed", {"worktree": lease.worktree_id})
        super().__init__(subject, lease, lease.ttl, clock=clock, began=began)
        self._desk = desk

    @property
    def lease(self) -> Lease:
        """The lease as it was last renewed."""
        return self.record

    @property
    def worktree(self) -> str:
        return self.lease.worktree_id

    @property
    def lock_id(self) -> str:
        return self.lease.lock_id

    @property
    def token(self) -> int:
        return self.lease.fencing_token

    def _renewed(self, ttl: float | None) -> tuple[Lease, float]:
        lease = self._desk.renew(self.worktree, self.lock_id, ttl)
        return lease, lease.ttl

    def _given_back(self) -> None:
        self._desk.release(self.worktree, self.lock_id)


def acquire(
    desk: LeaseService,
    worktree: str,
    request: LeaseRequest,
    *,
    wait: float | None = 0.0,
    cancelled: threading.Event | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> HeldLease:
    """Get a lease: at once, or by waiting in line at most `wait` seconds (None: without limit).

    `LockConflict` names the holder if there is no time to wait, `LockTimeout` if it was not enough or
    `cancelled` was set, `Deadlock` if the holder waits in turn for something that the requester holds.
    """
    if wait == 0.0:
        began = clock.boot()
        return HeldLease(desk, desk.acquire(worktree, request).lease, clock=clock, began=began)
    request = request._replace(above=processes_above())

    def ask() -> HeldLease | NotYet:
        began = clock.boot()
        answer = desk.line_up(worktree, request)
        if isinstance(answer, LeaseGranted):
            return HeldLease(desk, answer.lease, clock=clock, began=began)
        return _not_yet(answer)

    wish = QueueWait(f"the worktree {worktree}", wait, cancelled, clock)
    try:
        with desk.store.watch(LeaseKeys.of(worktree).lease) as watch:
            return wait_in_line(wish, ask, watch, lambda: desk.refuse_circle(request.lock_id))
    except BaseException:
        with contextlib.suppress(Failure):
            desk.leave(worktree, request.lock_id)
        raise


def _not_yet(answer: LeaseWaiting) -> NotYet:
    """Until the lease may expire, or the waiter must show itself."""
    lease = answer.lease
    if lease is None:  # free, but others come first: they are about to take it, or have died
        return NotYet(0.05 if answer.place > 1 else SHOW_EVERY, [])
    shown = f"{lease.holder_id}" + (f" ({lease.purpose})" if lease.purpose else "")
    holder = {"holder_id": lease.holder_id, "lock_id": lease.lock_id, "shown": shown}
    return NotYet(min(SHOW_EVERY, answer.time_left), [holder])
