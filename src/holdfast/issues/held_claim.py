"""An issue claim that is kept alive while a block of code runs."""

from __future__ import annotations

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.issues.claims import Claiming
from holdfast.issues.model import ClaimId, IssueClaim
from holdfast.leases.heartbeat import Held, Subject, began_at


class HeldIssueClaim(Held[IssueClaim]):
    """An issue claim that is renewed in the background while its block runs.

    The claim stays when the block ends: the issue is finished or released by its own operations.
    """

    ends_with_block = False

    def __init__(self, claiming: Claiming, claim: IssueClaim, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.id = ClaimId.parse(claim.claim_id)
        subject = Subject(f"the claim on {self.id.issue_id}", "renewed", {"issue_id": self.id.issue_id})
        began = began_at(clock, claim.ttl, claiming.time_left(claim))
        super().__init__(subject, claim, claim.ttl, clock=clock, began=began)
        self._claiming = claiming

    @property
    def claim(self) -> IssueClaim:
        """The claim as it was last renewed."""
        return self.record

    def _renew(self, ttl: float | None) -> tuple[IssueClaim, float]:
        claim = self._claiming.renew(self.id, ttl)
        return claim, claim.ttl

    def _release(self) -> None:
        self._claiming.release(self.id.issue_id, self.id)
