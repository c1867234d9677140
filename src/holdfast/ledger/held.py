"""A claim that is held, as an object to work under. What is appended through it takes that it is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.leases.heartbeat import Held, Subject, begun
from holdfast.ledger.claims import Claim
from holdfast.ledger.desk import ClaimDesk
from holdfast.ledger.events import Recorded


class HeldClaim(Held[Claim]):
    """A claim on a node. Used as a context manager, also an asynchronous one, it ends with its block."""

    def __init__(self, desk: ClaimDesk, claim: Claim, ttl: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
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
