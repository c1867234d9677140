"""A fault to be found: with fencing switched off, the demo must fail. Nothing else uses this."""

from __future__ import annotations

from typing import Any

from holdfast.issues import rules
from holdfast.issues.claims import HeldIssueClaim
from holdfast.issues.model import IssueClaim
from holdfast.leases import rules
from holdfast.leases.service import HeldLease


def switch_off_fencing() -> None:
    """Let everybody publish in this process, whoever holds the lease or the claim by now."""

    def any_lease(view: Any, moment: Any, keys: Any, lock_id: str, token: int) -> Any:
        return view.get(keys.lease)

    def any_claim(issue_id: str, record: Any, moment: Any, shown: Any) -> Any:
        return IssueClaim(
            claim_id=shown.text,
            assignee="agent:stale",
            token=shown.token,
            ttl=60.0,
            claimed_at="",
            renewed_at="",
            expires_at="9999-01-01T00:00:00Z",
        )

    def nothing(self: Any) -> None:
        return None

    rules.validate = any_lease
    rules.in_force = any_claim
    HeldIssueClaim.check = nothing  # type: ignore[method-assign]
    HeldIssueClaim.renew = nothing  # type: ignore[assignment, method-assign]
    HeldLease.check = nothing  # type: ignore[method-assign]
    HeldLease.release = nothing  # type: ignore[method-assign]
