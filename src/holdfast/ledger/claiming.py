"""Claims as they are asked for by those who work: at once, or by waiting in line."""

from __future__ import annotations

import contextlib
import threading

from holdfast.clock import SYSTEM_CLOCK, Clock, parse_instant
from holdfast.errors import Failure, UsageFailure
from holdfast.leases.queue import NotYet, QueueWait, wait_in_line
from holdfast.ledger.claims import Claim
from holdfast.ledger.desk import ClaimDesk
from holdfast.ledger.events import EVENTS
from holdfast.ledger.held import HeldClaim
from holdfast.ledger.protocol import Request, Waiting
from holdfast.locks.identity import Holder, processes_above

HIGHEST_PRIORITY = 1_000_000
_LOOK_AGAIN = 1.0
"""How often one who waits for another program's file looks again."""


class Claims(ClaimDesk):
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
        self, request: Request, wait: float | None, cancelled: threading.Event | None, clock: Clock
    ) -> Claim:
        request = request._replace(above=processes_above())

        def ask() -> Claim | NotYet:
            answer = self.line_up(request)
            return answer if isinstance(answer, Claim) else self._not_yet(request, answer)

        wish = QueueWait(f"the node {request.node_id}", wait, cancelled, clock)
        with self.ledger.store.watch(EVENTS) as watch:
            return wait_in_line(wish, ask, watch, lambda: self.refuse_circle(request.claim_id))

    def _not_yet(self, request: Request, answer: Waiting) -> NotYet:
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

    def _withdraw(self, request: Request) -> None:
        """Leave nothing behind: neither a place in the line nor a claim that came after all."""
        with contextlib.suppress(Failure):
            self.leave(request)
        with contextlib.suppress(Failure):
            self.release(request.node_id, request.owner, claim_id=request.claim_id)


def _told(held: Claim) -> dict[str, object]:
    return {
        "owner": held.owner,
        "claim_id": held.claim_id,
        "expires_at": held.expires_at,
        "shown": f"{held.owner} until {held.expires_at}",
    }
