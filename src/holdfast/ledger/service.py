"""Where claims are asked for: each rule of the protocol as one transaction on the stream of events.

1. What is new in the ledger is read, without any lock; a rule that adds nothing, or refuses, ends here.
2. The transaction takes the lock. The few events that came until then are read inside of it. That keeps
   the decision pure all the same: events never change, so what stands before the end that the
   transaction has seen is a function of that end.
3. The rule decides again, with the book at that very end and the store's time.
4. Its event is added behind that end, or not at all. Commit point: the event's publication.
5. Claim files, if there are any, are brought into step.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from holdfast.clock import SYSTEM_CLOCK, Clock, parse_instant
from holdfast.errors import Failure, OutcomeUnknown, UsageFailure
from holdfast.fs.names import checked_actor, checked_text
from holdfast.leases.deadlock import Look, WaitGraph, refuse_circle
from holdfast.leases.heartbeat import Held, Subject, begun
from holdfast.leases.queue import NotYet, QueueWait, wait_in_line
from holdfast.ledger import claim_files, log, rules
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import (
    EVENTS,
    Ledger,
    Recorded,
    checked,
    commit_id_of,
    is_under,
    new_id,
    node_id,
    order,
    stamped,
    tell_id,
)
from holdfast.ledger.projection import KINDS, Claim, ClaimProjection, ClaimState, ClaimWaiter
from holdfast.ledger.rules import ClaimGranted, ClaimRequest, ClaimRuling, ClaimWaiting, Cleared
from holdfast.locks.identity import Holder, Liveness, current_holder, described, liveness, processes_above
from holdfast.store.model import Append, Decision, View

PATIENCE = 15.0
"""How long a waiter counts without showing itself; it shows itself in half of that."""
LONGEST_OWNER = 256
_FILES = uuid.UUID("0d6f3c0a-3f5f-4e0e-9b52-3c9a1f6f7a11")

Told = TypeVar("Told")
Rule = Callable[[ClaimState, float], ClaimRuling[Told]]


class ClaimService:
    """Gives, extends and takes back the claims of one ledger. Safe to use from several threads."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        files: ClaimFiles | None = None,
        patience: float = PATIENCE,
        actor: str = "",
        elsewhere: Sequence[Look] = (),
    ) -> None:
        """`actor` is who asks, beyond the process and the owners that it names: the same as for leases.

        `elsewhere` is what else can be held and waited for: a circle of waits may lead through it.
        """
        self.ledger = ledger
        self._actor = actor
        self._elsewhere = elsewhere
        self._files = files
        self._patience = patience
        self._keeper = ClaimProjection(ledger)

    # --- Asking ------------------------------------------------------------------------------------

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
        """A request under a new id; without a `ttl` it is for the `lock_timeout` of the ledger.

        `behalf_of` is the process that the claim is for, if that is not this one: it outlives this one then.
        """
        return ClaimRequest(
            node_id(node),
            checked_owner(owner),
            new_id(),
            self._ttl(ttl),
            priority,
            self._patience,
            holder=described(current_holder()) | self._named(),
            agent={} if behalf_of is None else described(behalf_of, detached=True) | self._named(),
            purpose=checked_text(purpose, what="purpose"),
        )

    def take(self, request: ClaimRequest) -> Claim:
        """Give the claim now, or raise `NodeLocked`. One that has run out is reaped first."""
        answer = self._answer(request, wait=False)
        assert isinstance(answer, Claim)  # who does not wait is given it or refused
        return answer

    def line_up(self, request: ClaimRequest) -> Claim | ClaimWaiting:
        """Give the claim, or a place in the line; ask again to move up, and so as not to lose the place."""
        return self._answer(request, wait=True)

    def leave(self, request: ClaimRequest) -> None:
        """Leave the line."""
        self._commit(lambda book, now: rules.withdraw(book, now, request))

    def extend(self, node: str, owner: str, *, ttl: float | None = None, claim_id: str = "") -> Claim:
        """Let a claim run for another `ttl` from now. `LockNotHeld` or `LockExpired`: stop working on it."""
        node, ttl = node_id(node), self._ttl(ttl)
        extended = self._commit(lambda book, now: rules.extend(book, now, node, owner, ttl, claim_id))
        return self._current(node, owner, extended.claim_id)

    def release(self, node: str, owner: str, *, claim_id: str = "") -> Claim:
        """Give a claim back; `LockNotHeld` if it is not this owner's, and then nothing is touched."""
        node = node_id(node)
        held = self._commit(lambda book, now: rules.release(book, now, node, owner, claim_id))
        self._bring_in_step(node)
        return held

    def reap(self) -> list[Claim]:
        """Clear away all claims that have run out, each by exactly one `lock_reaped`, however many reap.

        Returns those that were cleared away here.
        """
        if self._files is not None:
            for node in self._files.nodes():
                self._bring_in_step(node)
        return [claim for each in self.expired() if (claim := self._reap(each)) is not None]

    def append(self, event: Mapping[str, Any], node: str, owner: str, *, claim_id: str = "") -> Recorded:
        """Add an event only if the claim is held at that very moment: who has lost it cannot write."""
        prepared, node = checked(event), node_id(node)

        def rule(book: ClaimState, now: float) -> ClaimRuling[int]:
            rules.valid(book, now, node, owner, claim_id)
            return ClaimRuling(prepared, book.sequence + 1)

        return self.ledger.read(self._commit(rule))

    # --- Looking -----------------------------------------------------------------------------------

    def active(self, *, at_sequence: int | None = None, under: str | None = None) -> list[Claim]:
        """The claims that count: now, or as of the moment of an event. Takes no lock."""
        if at_sequence is None:
            now = self.ledger.store.now()
            claims = self._keeper.look(lambda book: list(book.claims.values()))
        else:
            now = self._moment_of(at_sequence)
            claims = list(self._keeper.at_sequence(at_sequence).claims.values())
        above = None if under is None else node_id(under)
        return _sorted(
            each
            for each in claims
            if not each.is_expired(now) and (above is None or is_under(each.node_id, above))
        )

    def expired(self) -> list[Claim]:
        """The claims that have run out and wait to be reaped."""
        now = self.ledger.store.now()
        claims = self._keeper.look(lambda book: list(book.claims.values()))
        return _sorted(each for each in claims if each.is_expired(now))

    def waiting(self, node: str | None = None) -> list[ClaimWaiter]:
        """Those who wait, for one node or for any, in the order in which they will be served."""
        lines = self._keeper.look(lambda book: dict(book.lines))
        nodes = sorted(lines, key=order) if node is None else [node_id(node)]
        now = self.ledger.store.now()
        return [each for name in nodes for each in lines.get(name, ()) if each.counts(now)]

    def look(self) -> WaitGraph:
        """Who holds which claim, and who waits for one. Takes no lock."""
        claims, lines = self._keeper.look(
            lambda book: (list(book.claims.values()), list(book.lines.values()))
        )
        now = self.ledger.store.now()
        holds = (claim_files.hold(each) for each in claims if not each.is_expired(now))
        waiters = (each for line in lines for each in line if each.counts(now) and not _is_dead(each))
        return WaitGraph(tuple(holds), tuple(map(claim_files.wait, waiters)))

    def refuse_circle(self, ticket: str) -> None:
        """Raise `Deadlock` if the wait with this ticket is part of a circle and has to give up."""
        refuse_circle(ticket, self.look, self._elsewhere)

    def history(self, node: str) -> list[Recorded]:
        """Everything that the ledger says about the claims on a node."""
        node = node_id(node)
        return [
            each
            for each in self.ledger.events()
            if each.event.get("type") in KINDS and each.event.get("node_id") == node
        ]

    def lock_timeout(self) -> float:
        """How long claims last here unless somebody says otherwise."""
        return log.lock_timeout(log.read_meta(self.ledger.store))

    # --- Deciding ----------------------------------------------------------------------------------

    def _answer(self, request: ClaimRequest, *, wait: bool) -> Claim | ClaimWaiting:
        while True:
            foreign = self._foreign(request.node_id)
            if foreign is not None and not wait:
                raise rules.locked(request.node_id, self.ledger.store.now(), foreign, [])
            if foreign is not None:
                return ClaimWaiting(1, foreign, None)
            answer = self._rule_on(request, wait=wait)
            if isinstance(answer, ClaimGranted):
                return self._current(request.node_id, request.owner, request.claim_id)
            if isinstance(answer, ClaimWaiting):
                return answer
            self._bring_in_step(request.node_id)  # `Cleared`: now it is free, or somebody was faster

    def _rule_on(self, request: ClaimRequest, *, wait: bool) -> ClaimGranted | Cleared | ClaimWaiting:
        gone = self._gone(request)
        return self._commit(lambda book, now: rules.claim(book, now, request, wait=wait, gone=gone))

    def _commit(self, rule: Rule[Told]) -> Told:
        """Run a rule and add its event behind the very events that it has seen: steps 1 to 4."""
        store = self.ledger.store
        now = store.now()
        first = self._keeper.look(lambda book: rule(book, now))  # 1.
        if first.event is None:
            return first.result
        event_id = str(first.event.get("id") or new_id())

        def decide(view: View, now: float) -> Decision[Told]:
            end = view.end(EVENTS)  # 2.
            ruling = self._keeper.look(lambda book: rule(book, now), until=end)  # 3.
            if ruling.event is None:
                return Decision([], ruling.result)
            return Decision([Append(EVENTS, stamped({**ruling.event, "id": event_id}, now))], ruling.result)

        try:
            return store.transact([EVENTS], decide, commit_id=commit_id_of(event_id)).result  # 4.
        except OutcomeUnknown as unknown:
            tell_id(unknown, event_id)
            raise

    def _current(self, node: str, owner: str, claim_id: str) -> Claim:
        """The claim that was just given or extended, as the ledger has it."""
        self._bring_in_step(node)
        return self._keeper.look(lambda book: rules.own(book, node, owner, claim_id))

    def _reap(self, seen: Claim) -> Claim | None:
        reaped = self._commit(lambda book, now: rules.reap(book, now, seen))
        self._bring_in_step(seen.node_id)
        return reaped

    def _foreign(self, node: str) -> Claim | None:
        return None if self._files is None else self._files.foreign(node, self.ledger.store.now())

    def _bring_in_step(self, node: str) -> None:
        if self._files is not None:  # 5.
            self._files.bring_in_step(
                node,
                self.ledger.store.now(),
                lambda: self._keeper.look(lambda book: book.claims.get(node)),
                self._reap_file,
            )

    def _reap_file(self, stale: Claim) -> None:
        """Another program's file has run out and the ledger knows nothing of it: say so in the ledger.

        The event's id follows from the claim, so one who was killed before it removed the file has
        not made an event that the next one makes again.
        """
        event_id = str(uuid.uuid5(_FILES, f"{stale.node_id} {stale.owner} {stale.acquired_at}"))
        if self.ledger.find(event_id) is not None:
            return

        def rule(book: ClaimState, now: float) -> ClaimRuling[None]:
            held = book.claims.get(stale.node_id)
            return ClaimRuling(None if held else {**rules.reaped(stale, now), "id": event_id}, None)

        self._commit(rule)

    def _gone(self, request: ClaimRequest) -> frozenset[str]:
        """Those at the head of the line who are certainly dead; it matters only when the node is free."""
        now = self.ledger.store.now()
        line = self._keeper.look(lambda book: rules.first_in_line(book, now, request))
        return frozenset(each.ticket for each in itertools.takewhile(_is_dead, line))

    def _moment_of(self, sequence: int) -> float:
        if sequence == 0:
            return 0.0
        try:
            return parse_instant(str(self.ledger.read(sequence).event.get("timestamp")))
        except ValueError:  # another program's, which did not say when
            return self.ledger.store.now()

    def _named(self) -> dict[str, str]:
        return {claim_files.ACTOR: checked_actor(self._actor)} if self._actor else {}

    def _ttl(self, ttl: float | None) -> float:
        return self.lock_timeout() if ttl is None else log.checked_ttl(ttl)


def checked_owner(owner: str) -> str:
    """An owner that can be told from nobody."""
    if not owner.strip() or len(owner) > LONGEST_OWNER or not owner.isprintable():
        raise UsageFailure(
            f"an owner must be a printable text of 1 to {LONGEST_OWNER} characters", owner=ascii(owner)[:160]
        )
    return owner


def _is_dead(waiter: ClaimWaiter) -> bool:
    holder = Holder.from_record(waiter.holder)
    return holder is not None and liveness(holder) is Liveness.DEAD


def _sorted(claims: Iterable[Claim]) -> list[Claim]:
    return sorted(claims, key=lambda each: order(each.node_id))


class HeldClaim(Held[Claim]):
    """A claim on a node. Used as a context manager, also an asynchronous one, it ends with its block."""

    def __init__(self, desk: ClaimService, claim: Claim, ttl: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        subject = Subject(f"the claim on {claim.node_id}", "extended", {"node_id": claim.node_id})
        began = begun(clock, ttl, claim.expiry() - desk.ledger.store.now())
        super().__init__(subject, claim, ttl, clock=clock, began=began)
        self._desk = desk

    @property
    def claim(self) -> Claim:
        """The claim as it was last extended."""
        return self.record

    @property
    def node_id(self) -> str:
        return self.claim.node_id

    @property
    def owner(self) -> str:
        return self.claim.owner

    def extend(self, ttl: float | None = None) -> Claim:
        """Let the claim run on; if that is refused, it is lost."""
        return self.renew(ttl)

    def append(self, event: Mapping[str, Any]) -> Recorded:
        """Add an event to the ledger, only if the claim is held at that very moment."""
        self.check()
        return self._desk.append(event, self.node_id, self.owner, claim_id=self.claim.claim_id)

    def _renewed(self, ttl: float | None) -> tuple[Claim, float]:
        ttl = self.ttl if ttl is None else ttl
        claim = self._desk.extend(self.node_id, self.owner, ttl=ttl, claim_id=self.claim.claim_id)
        return claim, ttl

    def _given_back(self) -> None:
        self._desk.release(self.node_id, self.owner, claim_id=self.claim.claim_id)


HIGHEST_PRIORITY = 1_000_000
_LOOK_AGAIN = 1.0
"""How often one who waits for another program's file looks again."""


class Claims(ClaimService):
    """The claims of one ledger."""

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
        """Get the claim on a node: at once, or by waiting in line at most `wait` seconds (None: no limit).

        Those who wait are served by priority (higher first), then in the order in which they asked.
        `purpose` is shown to others; for `behalf_of` see `request`. `NodeLocked` names the owner if there is
        no time to wait, `LockTimeout` if it was not enough, `Deadlock` if the owner waits in turn for
        something that the requester holds.
        """
        if abs(priority) > HIGHEST_PRIORITY:
            raise UsageFailure(f"a priority is a number from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}")
        request = self.request(node, owner, ttl=ttl, priority=priority, purpose=purpose, behalf_of=behalf_of)
        if wait is not None and wait <= 0.0:
            return HeldClaim(self, self.take(request), request.ttl, clock=clock)
        try:
            claim = self._wait(request, wait, cancelled, clock)
        except BaseException:
            self._withdraw(request)
            raise
        return HeldClaim(self, claim, request.ttl, clock=clock)

    def _wait(
        self, request: ClaimRequest, wait: float | None, cancelled: threading.Event | None, clock: Clock
    ) -> Claim:
        request = request._replace(above=processes_above())

        def ask() -> Claim | NotYet:
            answer = self.line_up(request)
            return answer if isinstance(answer, Claim) else self._not_yet(request, answer)

        wish = QueueWait(f"the node {request.node_id}", wait, cancelled, clock)
        with self.ledger.store.watch(EVENTS) as watch:
            return wait_in_line(wish, ask, watch, lambda: self.refuse_circle(request.claim_id))

    def _not_yet(self, request: ClaimRequest, answer: ClaimWaiting) -> NotYet:
        """Until the claim may run out, or the waiter must show itself."""
        now = self.ledger.store.now()
        pauses = [request.patience / 3]
        if answer.claim is not None:
            pauses.append(answer.claim.expiry() - now)
            if not answer.claim.claim_id:
                pauses.append(_LOOK_AGAIN)
        elif answer.ahead is not None:  # free, but somebody comes first: it is about to take it, or has died
            pauses += [parse_instant(answer.ahead.until) - now, 0.25]
        return NotYet(min(pauses), [] if answer.claim is None else [_told(answer.claim)])

    def _withdraw(self, request: ClaimRequest) -> None:
        """Leave nothing behind: neither a place in the line nor a claim that came after all."""
        with contextlib.suppress(Failure):
            self.leave(request)
        with contextlib.suppress(Failure):
            self.release(request.node_id, request.owner, claim_id=request.claim_id)


def _told(held: Claim) -> dict[str, object]:
    return {
        "actor": held.owner,
        "claim_id": held.claim_id,
        "expires_at": held.expires_at,
        "shown": f"{held.owner} until {held.expires_at}",
    }
