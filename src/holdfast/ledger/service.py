"""Claim operations; each is one rule in one transaction on the stream of events.

1. Read new events without a lock, and apply the rule. If it refuses or adds nothing, that is the answer.
2. The transaction takes the lock and reads the few events that arrived until then. The decision stays pure:
   events never change, so the claims are a function of the end of the ledger that the transaction sees.
3. Apply the rule again, to those claims and the store's time.
4. Append its event right after that end, or nothing. Commit point: the event's publication.
5. Bring the claim files up to date, if there are any.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.clock import SYSTEM_CLOCK, Clock, format_instant, parse_instant
from holdfast.errors import Archived, OutcomeUnknown, UsageFailure
from holdfast.fs.names import checked_actor, checked_text, unique_id
from holdfast.leases import deadlock
from holdfast.leases.deadlock import Hold, Participant, ReadGraph, Resource, WaitEdge, WaitGraph
from holdfast.leases.heartbeat import Held, Subject, began_at
from holdfast.ledger import log, rules
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import EVENTS, Ledger, Recorded, checked, is_under, node_id, order
from holdfast.ledger.projection import KINDS, Claim, ClaimProjection, ClaimState, ClaimWaiter
from holdfast.ledger.rules import ClaimGranted, ClaimRequest, ClaimRuling, ClaimWaiting, Cleared
from holdfast.locks.identity import Holder, current_holder, described, processes_above
from holdfast.store.model import Append, Decision, View

if TYPE_CHECKING:
    from holdfast.leases.queue import NotYet

PATIENCE = 15.0  # how long a waiter counts without a heartbeat; it sends one after half of that
HIGHEST_PRIORITY = 1_000_000
LONGEST_OWNER = 256
_POLL_FILE = 1.0  # how often a waiter for another program's claim file reads it
_FILES = uuid.UUID("0d6f3c0a-3f5f-4e0e-9b52-3c9a1f6f7a11")

Result = TypeVar("Result")
Rule = Callable[[ClaimState, float], ClaimRuling[Result]]


class HeldClaim(Held[Claim]):
    """A claim on a node. As a context manager (`async with` too) it is released with its block."""

    def __init__(self, claims: Claims, claim: Claim, ttl: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        subject = Subject(f"the claim on {claim.node_id}", "extended", {"node_id": claim.node_id})
        began = began_at(clock, ttl, claim.time_left(claims.ledger.store.now(), for_others=False))
        super().__init__(subject, claim, ttl, clock=clock, began=began)
        self._claims = claims

    @property
    def claim(self) -> Claim:
        """The claim as it was last extended."""
        return self.record

    @property
    def node_id(self) -> str:
        """The claimed node."""
        return self.claim.node_id

    @property
    def owner(self) -> str:
        """The actor that claimed it."""
        return self.claim.owner

    def extend(self, ttl: float | None = None) -> Claim:
        """Extend the claim from now; if that is refused, it is lost."""
        return self.renew(ttl)

    def append(self, event: Mapping[str, Any]) -> Recorded:
        """Append an event to the ledger, only if the claim is held at the commit."""
        self.check()
        return self._claims.append(event, self.node_id, self.owner, claim_id=self.claim.claim_id)

    def _renew(self, ttl: float | None) -> tuple[Claim, float]:
        ttl = self.ttl if ttl is None else ttl
        return self._claims.extend(self.node_id, self.owner, ttl=ttl, claim_id=self.claim.claim_id), ttl

    def _release(self) -> None:
        self._claims.release(self.node_id, self.owner, claim_id=self.claim.claim_id)


class Claims:
    """The claims of one ledger. Safe to use from several threads."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        files: ClaimFiles | None = None,
        patience: float = PATIENCE,
        actor: str = "",
        other_graphs: Sequence[ReadGraph] = (),
    ) -> None:
        """`actor` tells agents of one process apart, as for leases. `other_graphs` are the wait graphs that a deadlock
        may lead through."""
        self.ledger = ledger
        self._actor = actor
        self._other_graphs = other_graphs
        self._files = files
        self._patience = patience
        self._projection = ClaimProjection(ledger)

    # --- Claiming ----------------------------------------------------------------------------------

    def claim(
        self,
        node: str,
        owner: str,
        *,
        ttl: float | None = None,
        wait: float | None = 0.0,
        priority: int = 0,
        purpose: str = "",
        behalf_of: Holder | None = None,
        cancelled: threading.Event | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> HeldClaim:
        """Claim a node: at once, or by waiting in the queue for at most `wait` seconds (None: no limit).

        Waiters are served by priority (higher first), then in the order of asking. `purpose` is shown to others; for
        `behalf_of` see `request`. Raises `NodeLocked`, which names the owner, if `wait` is 0; `LockTimeout` at the time
        limit; `Deadlock` if the wait is part of a deadlock and must give up.
        """
        if abs(priority) > HIGHEST_PRIORITY:
            raise UsageFailure(f"a priority is a number from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, not {priority}")
        request = self.request(node, owner, ttl=ttl, priority=priority, purpose=purpose, behalf_of=behalf_of)
        if wait is not None and wait <= 0.0:
            return HeldClaim(self, self.take(request), request.ttl, clock=clock)
        try:
            claim = self._wait(request, wait, cancelled, clock)
        except BaseException as failure:
            from holdfast.leases.queue import leave_in_time

            leave_in_time(lambda: self.leave_queue(request), failure)
            # It may have been granted after all.
            leave_in_time(lambda: self.release(request.node_id, request.owner, claim_id=request.claim_id), failure)
            raise
        return HeldClaim(self, claim, request.ttl, clock=clock)

    def request(
        self,
        node: str,
        owner: str,
        *,
        ttl: float | None = None,
        priority: int = 0,
        purpose: str = "",
        behalf_of: Holder | None = None,
    ) -> ClaimRequest:
        """A request with a new id. The default `ttl` is the `lock_timeout` of the ledger. `behalf_of` is the holder, if
        that is not this process; the claim then outlives this process."""
        named = {rules.ACTOR: checked_actor(self._actor)} if self._actor else {}
        ids = node_id(node), checked_owner(owner), unique_id()
        holder = described(current_holder()) | named
        agent = {} if behalf_of is None else described(behalf_of, detached=True) | named
        purpose = checked_text(purpose, what="purpose")
        return ClaimRequest(*ids, self._ttl(ttl), priority, self._patience, holder, agent, purpose)

    def take(self, request: ClaimRequest) -> Claim:
        """Grant the claim now, or raise `NodeLocked`. An expired claim is reaped first."""
        answer = self._answer(request, wait=False)
        assert isinstance(answer, Claim)
        return answer

    def join_queue(self, request: ClaimRequest) -> Claim | ClaimWaiting:
        """Grant the claim, or return a position in the queue. Call it again to move up and to keep the position."""
        return self._answer(request, wait=True)

    def leave_queue(self, request: ClaimRequest) -> None:
        """Leave the queue; a request that is not in it changes nothing."""
        self._commit(lambda state, now: rules.withdraw(state, now, request))

    def extend(self, node: str, owner: str, *, ttl: float | None = None, claim_id: str = "") -> Claim:
        """Renew a claim for `ttl` from now. After `LockNotHeld` or `LockExpired`, stop."""
        node, ttl = node_id(node), self._ttl(ttl)
        extended = self._commit(lambda state, now: rules.extend(state, now, node, owner, ttl, claim_id))
        return self._current(node, owner, extended.claim_id)

    def release(self, node: str, owner: str, *, claim_id: str = "") -> Claim:
        """Release a claim. Raises `LockNotHeld`, and changes nothing, if it is not this owner's."""
        node = node_id(node)
        held = self._commit(lambda state, now: rules.release(state, now, node, owner, claim_id))
        self._update_file(node)
        return held

    def reap(self) -> list[Claim]:
        """Reap all expired claims, each by exactly one `lock_reaped`, however many processes reap. Returns those that
        this call reaped."""
        if self._files is not None:
            for node in self._files.nodes():
                self._update_file(node)
        return [claim for each in self.expired() if (claim := self._reap(each)) is not None]

    def append(self, event: Mapping[str, Any], node: str, owner: str, *, claim_id: str = "") -> Recorded:
        """Append an event only if the claim is held at the commit: a lost claim cannot write."""
        prepared, node = checked(event), node_id(node)

        def rule(state: ClaimState, now: float) -> ClaimRuling[int]:
            rules.valid(state, now, node, owner, claim_id)
            return ClaimRuling(prepared, state.sequence + 1)

        return self.ledger.read(self._commit(rule))

    # --- Reading; takes no lock --------------------------------------------------------------------

    def active(self, *, at_sequence: int | None = None, under: str | None = None) -> list[Claim]:
        """The active claims: now, or as of an event."""
        if at_sequence is None:
            now, claims = self.ledger.store.now(), self._all()
        else:
            now = self._time_of(at_sequence)
            claims = list(self._projection.at_sequence(at_sequence).claims.values())
        above = None if under is None else node_id(under)
        below = (each for each in claims if above is None or is_under(each.node_id, above))
        return _sorted(each for each in below if not each.is_expired(now))

    def expired(self) -> list[Claim]:
        """The expired claims that have not been reaped yet."""
        now = self.ledger.store.now()
        return _sorted(each for each in self._all() if each.is_expired(now))

    def waiting(self, node: str | None = None) -> list[ClaimWaiter]:
        """The waiters, for one node or for any, in the order in which they will be served."""
        queues = self._projection.query(lambda state: dict(state.queues))
        nodes = sorted(queues, key=order) if node is None else [node_id(node)]
        now = self.ledger.store.now()
        return [each for name in nodes for each in queues.get(name, ()) if each.counts(now)]

    def history(self, node: str) -> list[Recorded]:
        """All events about the claims on a node that are not archived."""
        node = node_id(node)
        events = (each for each in self.ledger.latest() if str(each.event.get("type")) in KINDS)
        return [each for each in events if each.event.get("node_id") == node]

    def lock_timeout(self) -> float:
        """The default ttl of claims."""
        return rules.lock_timeout(log.read_meta(self.ledger.store))

    def wait_graph(self) -> WaitGraph:
        """The current claims and waiters."""
        claims, queues = self._projection.query(lambda state: (list(state.claims.values()), dict(state.queues)))
        now = self.ledger.store.now()
        holds = (_hold(each) for each in claims if not each.is_expired(now))
        waiters = (each for queue in queues.values() for each in queue if each.counts(now) and not _is_dead(each))
        return WaitGraph(tuple(holds), tuple(map(_wait_edge, waiters)))

    def check_deadlock(self, ticket: str) -> None:
        """Raise `Deadlock` if the wait with this ticket is part of a deadlock and has to give up."""
        deadlock.check_deadlock(ticket, self.wait_graph, self._other_graphs)

    def _all(self) -> list[Claim]:
        return self._projection.query(lambda state: list(state.claims.values()))

    def _time_of(self, sequence: int) -> float:
        if sequence == 0:
            return 0.0
        try:
            return parse_instant(str(self.ledger.read(sequence).event.get("timestamp")))
        except ValueError:  # another program's event without a time
            return self.ledger.store.now()

    def _ttl(self, ttl: float | None) -> float:
        return self.lock_timeout() if ttl is None else rules.checked_ttl(ttl)

    # --- Waiting -----------------------------------------------------------------------------------

    def _wait(
        self, request: ClaimRequest, wait: float | None, cancelled: threading.Event | None, clock: Clock
    ) -> Claim:
        from holdfast.leases.queue import QueueWait, wait_in_queue

        request = request._replace(above=processes_above())

        def ask() -> Claim | NotYet:
            answer = self.join_queue(request)
            return answer if isinstance(answer, Claim) else self._not_yet(request, answer)

        queue_wait = QueueWait(f"the node {request.node_id}", wait, cancelled, clock, clock.monotonic())
        with self.ledger.store.watch(EVENTS) as watch:
            return wait_in_queue(queue_wait, ask, watch, lambda: self.check_deadlock(request.claim_id))

    def _not_yet(self, request: ClaimRequest, answer: ClaimWaiting) -> NotYet:
        """The pause lasts until the claim may expire, or the next heartbeat is due."""
        from holdfast.leases.queue import NotYet

        now, held = self.ledger.store.now(), answer.claim
        pauses = [request.patience / 3]
        if held is None:
            if answer.ahead is not None:  # free, but others come first: they are about to take it, or have died
                pauses += [parse_instant(answer.ahead.until) - now, 0.25]
            return NotYet(min(pauses), [])
        pauses.append(held.time_left(now, for_others=False))
        if not held.claim_id:
            pauses.append(_POLL_FILE)
        holder = {"actor": held.owner, "claim_id": held.claim_id, "expires_at": held.expires_at}
        return NotYet(min(pauses), [{**holder, "shown": f"{held.owner} until {held.expires_at}"}])

    # --- Deciding ----------------------------------------------------------------------------------

    def _answer(self, request: ClaimRequest, *, wait: bool) -> Claim | ClaimWaiting:
        node = request.node_id
        while True:
            foreign = self._files.foreign(node, self.ledger.store.now()) if self._files else None
            if foreign is not None and not wait:
                raise rules.locked(node, self.ledger.store.now(), foreign, [])
            if foreign is not None:
                return ClaimWaiting(1, foreign, None)
            answer = self._ask(request, wait=wait)
            if isinstance(answer, ClaimGranted):
                return self._current(node, request.owner, request.claim_id)
            if isinstance(answer, ClaimWaiting):
                return answer
            self._update_file(node)  # `Cleared`: the node is free now, or another process was faster

    def _ask(self, request: ClaimRequest, *, wait: bool) -> ClaimGranted | Cleared | ClaimWaiting:
        """Apply `rules.claim` without the dead waiters at the head of the queue."""
        now = self.ledger.store.now()
        ahead = self._projection.query(lambda state: rules.waiters_ahead(state, now, request))
        gone = frozenset(each.ticket for each in itertools.takewhile(_is_dead, ahead))
        return self._commit(lambda state, now: rules.claim(state, now, request, wait=wait, gone=gone))

    def _commit(self, rule: Rule[Result]) -> Result:
        """Apply a rule and append its event right after the events that it has seen: steps 1 to 4."""
        store = self.ledger.store
        now = store.now()
        first = self._projection.query(lambda state: rule(state, now))  # 1.
        if first.event is None:
            return first.result
        event_id = str(first.event.get("id") or unique_id())

        def decide(view: View, now: float) -> Decision[Result]:
            end = view.end(EVENTS)  # 2.
            ruling = self._projection.query(lambda state: rule(state, now), until=end)  # 3.
            if ruling.event is None:
                return Decision([], ruling.result)
            return Decision([Append(EVENTS, log.stamped({**ruling.event, "id": event_id}, now))], ruling.result)

        try:
            return store.transact([EVENTS], decide, commit_id=log.commit_id_of(event_id)).result  # 4.
        except Archived:  # while this process was suspended between the fetch and the decision
            return self._commit(rule)
        except OutcomeUnknown as unknown:
            log.add_event_id(unknown, event_id)
            raise

    def _current(self, node: str, owner: str, claim_id: str) -> Claim:
        """The claim that was just granted or extended, as the ledger has it."""
        self._update_file(node)
        return self._projection.query(lambda state: rules.own(state, node, owner, claim_id))

    def _reap(self, seen: Claim) -> Claim | None:
        reaped = self._commit(lambda state, now: rules.reap(state, now, seen))
        self._update_file(seen.node_id)
        return reaped

    def _update_file(self, node: str) -> None:
        def current() -> Claim | None:
            return self._projection.query(lambda state: state.claims.get(node))

        if self._files is not None:
            self._files.update(node, self.ledger.store.now(), current, self._reap_file)  # 5.

    def _reap_file(self, stale: Claim) -> None:
        """Record in the ledger that another program's claim file has expired. The event's id is derived from the claim:
        if a process is killed before it removes the file, the next one appends no second event."""
        event_id = str(uuid.uuid5(_FILES, f"{stale.node_id} {stale.owner} {stale.acquired_at}"))
        if self.ledger.find(event_id) is not None:
            return

        def rule(state: ClaimState, now: float) -> ClaimRuling[None]:
            held = state.claims.get(stale.node_id)
            return ClaimRuling(None if held else {**rules.reaped(stale, now), "id": event_id}, None)

        self._commit(rule)


def checked_owner(owner: str) -> str:
    """The owner, if it is a printable text that is not blank."""
    if not owner.strip() or len(owner) > LONGEST_OWNER or not owner.isprintable():
        message = f"an owner must be a printable text of 1 to {LONGEST_OWNER} characters; it has {len(owner)}"
        raise UsageFailure(message, owner=ascii(owner)[:160])
    return owner


def _sorted(claims: Iterable[Claim]) -> list[Claim]:
    return sorted(claims, key=lambda each: order(each.node_id))


def _is_dead(waiter: ClaimWaiter) -> bool:
    return deadlock.is_dead(Holder.from_record(waiter.holder))


def _hold(claim: Claim) -> Hold:
    return Hold(Resource("claim", claim.node_id), _participant(claim), claim.claim_id or f"event-{claim.sequence}")


def _wait_edge(waiter: ClaimWaiter) -> WaitEdge:
    since = format_instant(parse_instant(waiter.since)) if waiter.since else ""
    return WaitEdge(Resource("claim", waiter.node_id), _participant(waiter), since, waiter.ticket)


def _participant(record: Claim | ClaimWaiter) -> Participant:
    """The owner; its processes match it with participants that are known only by their processes."""
    holder = record.holder
    machine = holder.get("boot_id", ""), holder.get("pid_namespace", "")
    waiter = holder if isinstance(record, ClaimWaiter) else {}
    processes = deadlock.process_ids((holder.get("holder_id", ""), waiter.get(rules.AGENT, "")), *machine)
    above = deadlock.process_ids(waiter.get(rules.ABOVE, "").split(rules.SEPARATOR), *machine)
    return Participant(record.owner, record.owner, processes, above, holder.get(rules.ACTOR, ""))
