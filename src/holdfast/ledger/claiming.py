"""Claims as they are asked for by those who work: at once, or by waiting in line."""

from __future__ import annotations

import contextlib
import threading

from holdfast.clock import SYSTEM_CLOCK, Clock, format_duration, parse_instant
from holdfast.errors import Failure, LockTimeout, UsageFailure
from holdfast.ledger.claims import Claim
from holdfast.ledger.desk import ClaimDesk
from holdfast.ledger.events import EVENTS
from holdfast.ledger.held import HeldClaim
from holdfast.ledger.protocol import Request, Waiting
from holdfast.locks.holders import Holder

HIGHEST_PRIORITY = 1_000_000
_LOOK_AGAIN = 1.0
"""How often one who may be cancelled, or who waits for another program's file, looks again."""


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
        `purpose` is shown to others; for `behalf_of` see `request`.
        `NodeLocked` names the owner if there is no time to wait, `LockTimeout` if it was not enough.
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
        deadline = None if wait is None else clock.monotonic() + wait
        with self.ledger.store.watch(EVENTS) as watch:
            while True:
                answer = self.line_up(request)
                if isinstance(answer, Claim):
                    return answer
                left = None if deadline is None else deadline - clock.monotonic()
                if (left is not None and left <= 0) or (cancelled is not None and cancelled.is_set()):
                    raise _timed_out(request, wait or 0.0, answer)
                watch.wait(self._pause(request, answer, left, cancellable=cancelled is not None))

    def _pause(self, request: Request, answer: Waiting, left: float | None, *, cancellable: bool) -> float:
        """Until the claim may run out, the waiter must show itself, or the time is up; a little at least."""
        now = self.ledger.store.now()
        pauses = [request.patience / 3]
        if left is not None:
            pauses.append(left)
        if cancellable or (answer.claim is not None and not answer.claim.claim_id):
            pauses.append(_LOOK_AGAIN)
        if answer.claim is not None:
            pauses.append(answer.claim.expiry() - now)
        elif answer.ahead is not None:  # free, but somebody comes first: it is about to take it, or has died
            pauses += [parse_instant(answer.ahead.until) - now, 0.25]
        return max(0.002, min(pauses))

    def _withdraw(self, request: Request) -> None:
        """Leave nothing behind: neither a place in the line nor a claim that came after all."""
        with contextlib.suppress(Failure):
            self.leave(request)
        with contextlib.suppress(Failure):
            self.release(request.node_id, request.owner, claim_id=request.claim_id)


def _timed_out(request: Request, waited: float, answer: Waiting) -> LockTimeout:
    holders: list[dict[str, object]] = []
    if answer.claim is not None:
        held = answer.claim
        holders.append(
            {
                "owner": held.owner,
                "claim_id": held.claim_id,
                "expires_at": held.expires_at,
                "shown": f"{held.owner} until {held.expires_at}",
            }
        )
    return LockTimeout(f"the node {request.node_id}", waited, format_duration(waited), holders=holders)
