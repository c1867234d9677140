"""Claiming issues: each operation of `claims` as one transaction, and a claim that keeps itself alive."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    Blocked,
    Corrupt,
    IssueClaimed,
    LockNotHeld,
    NotFound,
    TransitionRefused,
)
from holdfast.fs.names import checked_actor, checked_text
from holdfast.issues import rules
from holdfast.issues.model import CLAIMS, EVENTS, ClaimId, ClaimRecord, Issue, IssueClaim, State
from holdfast.issues.reading import Broken, IssueSet
from holdfast.issues.transactions import Draft, Transactions
from holdfast.leases.heartbeat import Held, Subject, begun
from holdfast.locks.identity import Holder, current_holder, described
from holdfast.store.model import Decision, Replace, View

LOOK_AGAIN = 2.0
"""How often one who waits for work looks whether somebody's claim has run out: no event tells that."""


class Claimed(NamedTuple):
    """An issue that is now the caller's, and the proof of it. `broken` is what could not be read when it
    was looked for: work that nobody is given until somebody repairs it."""

    issue: Issue
    claim: IssueClaim
    taken_over_from: str | None = None
    broken: tuple[Broken, ...] = ()


class Claiming:
    """Who works on what."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def request(
        self,
        assignee: str | None = None,
        *,
        ttl: float = rules.DEFAULT_TTL,
        purpose: str = "",
        behalf_of: Holder | None = None,
    ) -> rules.IssueClaimRequest:
        """A request in the actor's name, or in somebody else's.

        `behalf_of` is whose claim it will be, if not this process's: it outlives the processes then.
        """
        who = checked_actor(assignee or self._transactions.actor, "assignee")
        checked_text(purpose, what="purpose")
        holder = described(behalf_of or current_holder(), detached=behalf_of is not None)
        return rules.IssueClaimRequest(who, rules.checked_ttl(ttl), uuid.uuid4().hex[:16], purpose, holder)

    def claim(self, issue_id: str, request: rules.IssueClaimRequest) -> Claimed:
        """Take the issue, or raise `IssueClaimed` or `Blocked`. Of any number of claimers one gets it."""
        return self._transactions.retrying(lambda: self._claim(issue_id, request))

    def claim_next(
        self,
        request: rules.IssueClaimRequest,
        *,
        wanted: Callable[[Issue], bool] = lambda issue: True,
        wait: float | None = 0.0,
    ) -> Claimed | None:
        """Take the most urgent issue that can be had, what was left alone longest first; None if none is.

        One that somebody else takes first is passed over. `wait` is how many seconds to wait until one is
        ready (None: without limit), as long as there is one at all that is not finished. Whether one that
        cannot be read is finished is not known: nobody waits for it.
        """
        return self._look_for_work(request, wanted, wait)[0]

    def take_next(
        self,
        request: rules.IssueClaimRequest,
        *,
        wanted: Callable[[Issue], bool] = lambda issue: True,
        wait: float | None = 0.0,
    ) -> Claimed:
        """The same, but `NotFound` if there is none; that says too what could not be read."""
        found, seen = self._look_for_work(request, wanted, wait)
        if found is None:
            raise _nothing_ready(seen.broken)
        return found

    def _look_for_work(
        self, request: rules.IssueClaimRequest, wanted: Callable[[Issue], bool], wait: float | None
    ) -> tuple[Claimed | None, IssueSet]:
        store = self._transactions.store
        seen = self._transactions.snapshot()
        found = self._claim_first(seen, request, wanted)
        if found is not None or wait == 0.0:
            return found, seen
        deadline = math.inf if wait is None else time.monotonic() + wait
        with store.watch(EVENTS) as watch:
            while True:
                seen = self._transactions.snapshot()  # after the watch was made: nothing is missed
                found = self._claim_first(seen, request, wanted)
                left = deadline - time.monotonic()
                unfinished = any(wanted(issue) and issue.state not in rules.FINISHED for issue in seen)
                if found is not None or left <= 0 or not unfinished:
                    return found, seen
                watch.wait(min(left, LOOK_AGAIN))

    def _claim_first(
        self, seen: IssueSet, request: rules.IssueClaimRequest, wanted: Callable[[Issue], bool]
    ) -> Claimed | None:
        for issue in seen.ready(request.assignee):
            if wanted(issue):
                with contextlib.suppress(IssueClaimed, Blocked, TransitionRefused, NotFound):
                    try:
                        return self.claim(issue.id, request)._replace(broken=tuple(seen.broken))
                    except Corrupt as failure:
                        if "intent" in failure.facts:  # nothing can be claimed until somebody has decided
                            raise
                        seen.add_broken(Broken(issue.id, failure))
        return None

    def renew(self, shown: ClaimId, ttl: float | None = None) -> IssueClaim:
        """Keep a claim alive. `FencingMismatch` or `LockExpired`: stop, somebody else may be at it."""
        key = CLAIMS.key(shown.issue_id)
        ttl = None if ttl is None else rules.checked_ttl(ttl)

        reading = self._transactions.reading()

        def decide(view: View, now: float) -> Decision[IssueClaim]:
            record = rules.renewed(shown.issue_id, view.get(key), reading.at(now), shown, ttl)
            assert record.claim is not None
            return Decision([Replace(key, record)], record.claim)

        return self._transactions.store.transact([key], decide).result

    def release(self, issue_id: str, shown: ClaimId | None = None, *, reason: str = "") -> Issue:
        """Put the issue back, so that others can have it. It takes the claim, unless that has run out."""
        checked_text(reason, what="reason")
        return self._transactions.retrying(lambda: self._release(issue_id, shown, reason, force=True))

    def reclaim(self, issue_id: str) -> bool:
        """Put back what was abandoned; False if it is not (any more)."""
        with contextlib.suppress(LockNotHeld, IssueClaimed):
            self._transactions.retrying(
                lambda: self._release(issue_id, None, "the claim ran out", force=False)
            )
            return True
        return False

    def state(self, issue_id: str) -> ClaimRecord | None:
        """The claim of an issue and its token, as of now. Takes no lock."""
        document = self._transactions.store.read(CLAIMS.key(issue_id))
        return document.record if document else None

    def time_left(self, claim: IssueClaim) -> float:
        """How long a claim still counts for its holder."""
        return claim.time_left(self._transactions.moment(), for_others=False)

    def _claim(self, issue_id: str, request: rules.IssueClaimRequest) -> Claimed:
        seen = self._transactions.with_dependencies(self._transactions.need(issue_id))

        def body(draft: Draft) -> Claimed:
            issue, before = draft.issue(issue_id), draft.claim(issue_id)
            record = rules.grant(issue, before, draft.moment, request, draft.lookup)
            assert record.claim is not None
            taken_over = before.claim.assignee if before and before.claim else None
            draft.set_claim(issue_id, record)
            state = rules.state_of(issue, draft.lookup)
            working = msgspec.structs.replace(issue, state=State.IN_PROGRESS, assignee=request.assignee)
            facts = {"assignee": request.assignee, "token": record.token, "from": state.value}
            draft.record("issue_claimed", issue_id, **facts, taken_over_from=taken_over)
            return Claimed(draft.put(working, announced=True), record.claim, taken_over)

        return self._transactions.change(body, issues=seen.named(), seen=seen, also=[CLAIMS.key(issue_id)])

    def _release(self, issue_id: str, shown: ClaimId | None, reason: str, *, force: bool) -> Issue:
        seen = self._transactions.with_dependencies(self._transactions.need(issue_id))

        def body(draft: Draft) -> Issue:
            issue, record = draft.issue(issue_id), draft.claim(issue_id)
            if not force and not rules.is_abandoned(issue, record, draft.moment):
                raise LockNotHeld(f"{issue_id} is not abandoned", issue_id=issue_id)
            rules.check_release(issue, record, draft.moment, shown)
            draft.record("issue_released", issue_id, assignee=issue.assignee, reason=reason)
            draft.set_claim(issue_id, rules.ended(record))
            state = State.BACKLOG if issue.state is State.IN_PROGRESS else issue.state
            free = msgspec.structs.replace(issue, state=state, assignee=None)
            return draft.put(rules.in_line(free, draft.lookup), announced=True)

        return self._transactions.change(body, issues=seen.named(), seen=seen, also=[CLAIMS.key(issue_id)])


def _nothing_ready(broken: Sequence[Broken]) -> NotFound:
    hint = "'holdfast blocked' shows what waits for what, 'holdfast who' what others work on."
    if not broken:
        return NotFound("no issue is ready to be worked on", hint=hint)
    paths = ", ".join(each.path for each in broken)
    return NotFound(
        f"no issue is ready to be worked on, without those that cannot be read ({paths})",
        hint=f"{hint} 'holdfast issue validate' shows what is to be repaired.",
        broken=[each.as_record() for each in broken],
    )


class HeldIssueClaim(Held[IssueClaim]):
    """A claim that is renewed in the background while its block runs; once lost, it proves nothing any more.

    The claim stays when the block ends: the issue is finished or released by its own operations.
    """

    ends_with_block = False

    def __init__(self, claiming: Claiming, claim: IssueClaim, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.id = ClaimId.parse(claim.claim_id)
        subject = Subject(f"the claim on {self.id.issue_id}", "renewed", {"issue_id": self.id.issue_id})
        began = begun(clock, claim.ttl, claiming.time_left(claim))
        super().__init__(subject, claim, claim.ttl, clock=clock, began=began)
        self._claiming = claiming

    @property
    def claim(self) -> IssueClaim:
        """The claim as it was last renewed."""
        return self.record

    def _renewed(self, ttl: float | None) -> tuple[IssueClaim, float]:
        claim = self._claiming.renew(self.id, ttl)
        return claim, claim.ttl

    def _given_back(self) -> None:
        self._claiming.release(self.id.issue_id, self.id)
