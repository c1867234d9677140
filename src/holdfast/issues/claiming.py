"""Claiming issues: each operation of `claims` as one transaction, and a claim that keeps itself alive."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    Blocked,
    Failure,
    FencingMismatch,
    IssueClaimed,
    LockExpired,
    LockNotHeld,
    NotFound,
    TransitionRefused,
)
from holdfast.fs.names import checked_text
from holdfast.issues import claims, rules
from holdfast.issues.claim_records import Claim, ClaimId, ClaimRecord
from holdfast.issues.draft import Draft
from holdfast.issues.keys import CLAIMS
from holdfast.issues.reading import take_snapshot
from holdfast.issues.records import Issue, State, checked_actor
from holdfast.issues.transactions import MOST_NAMED, Transactions
from holdfast.store.records import Decision, Replace, View

BEATS = 3
"""How many times a claim is renewed in the time that it lasts."""


class Claimed(NamedTuple):
    """An issue that is now the caller's, and the proof of it."""

    issue: Issue
    claim: Claim
    taken_over_from: str | None = None


class Claiming:
    """Who works on what."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def request(
        self, assignee: str | None = None, *, ttl: float = claims.DEFAULT_TTL, purpose: str = ""
    ) -> claims.Request:
        """A request in the actor's name, or in somebody else's."""
        who = checked_actor(assignee or self._transactions.actor, "assignee")
        checked_text(purpose, what="purpose")
        return claims.Request(who, claims.checked_ttl(ttl), uuid.uuid4().hex[:16], purpose)

    def claim(self, issue_id: str, request: claims.Request) -> Claimed:
        """Take the issue, or raise `IssueClaimed` or `Blocked`. Of any number of claimers one gets it."""
        return self._transactions.retrying(lambda: self._claim(issue_id, request))

    def claim_next(
        self, request: claims.Request, *, wanted: Callable[[Issue], bool] = lambda issue: True
    ) -> Claimed | None:
        """Take the most urgent issue that can be had, what was left alone longest first; None if none is.

        One that somebody else takes first is passed over.
        """
        for issue in take_snapshot(self._transactions.store).ready(request.assignee):
            if wanted(issue):
                with contextlib.suppress(IssueClaimed, Blocked, TransitionRefused, NotFound):
                    return self.claim(issue.id, request)
        return None

    def renew(self, shown: ClaimId, ttl: float | None = None) -> Claim:
        """Keep a claim alive. `FencingMismatch` or `LockExpired`: stop, somebody else may be at it."""
        key = CLAIMS.key(shown.issue_id)
        ttl = None if ttl is None else claims.checked_ttl(ttl)

        def decide(view: View, now: float) -> Decision[Claim]:
            record = claims.renewed(shown.issue_id, view.get(key), now, shown, ttl)
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

    def _claim(self, issue_id: str, request: claims.Request) -> Claimed:
        seen = self._transactions.with_dependencies(self._transactions.need(issue_id))

        def body(draft: Draft) -> Claimed:
            issue, before = draft.issue(issue_id), draft.claim(issue_id)
            record = claims.grant(issue, before, draft.now, request, draft.lookup)
            assert record.claim is not None
            taken_over = before.claim.assignee if before and before.claim else None
            draft.set_claim(issue_id, record)
            state = rules.state_of(issue, draft.lookup)
            working = msgspec.structs.replace(issue, state=State.IN_PROGRESS, assignee=request.assignee)
            facts = {"assignee": request.assignee, "token": record.token, "from": state.value}
            draft.record("issue_claimed", issue_id, **facts, taken_over_from=taken_over)
            return Claimed(draft.put(working, told=True), record.claim, taken_over)

        named = list(seen)[:MOST_NAMED]
        return self._transactions.change(body, issues=named, seen=seen, also=[CLAIMS.key(issue_id)])

    def _release(self, issue_id: str, shown: ClaimId | None, reason: str, *, force: bool) -> Issue:
        seen = self._transactions.with_dependencies(self._transactions.need(issue_id))

        def body(draft: Draft) -> Issue:
            issue, record = draft.issue(issue_id), draft.claim(issue_id)
            if not force and not claims.is_abandoned(issue, record, draft.now):
                raise LockNotHeld(f"{issue_id} is not abandoned", issue_id=issue_id)
            claims.check_release(issue, record, draft.now, shown)
            draft.record("issue_released", issue_id, assignee=issue.assignee, reason=reason)
            draft.set_claim(issue_id, claims.ended(record))
            state = State.BACKLOG if issue.state is State.IN_PROGRESS else issue.state
            free = msgspec.structs.replace(issue, state=state, assignee=None)
            return draft.put(rules.in_line(free, draft.lookup), told=True)

        named = list(seen)[:MOST_NAMED]
        return self._transactions.change(body, issues=named, seen=seen, also=[CLAIMS.key(issue_id)])


class HeldClaim:
    """A claim that is renewed in the background, so that nobody has to remember; a context manager.

    When renewing is refused, or has not succeeded for as long as the claim lasts, it is *lost*: `lost`
    is set and `check` raises. What its holder writes later with it is refused anyway.
    """

    def __init__(self, claiming: Claiming, claim: Claim, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.lost = threading.Event()
        self.claim = claim
        self.id = ClaimId.parse(claim.claim_id)
        self._claiming = claiming
        self._clock = clock
        self._ended = threading.Event()
        self._reason: Failure | None = None
        self._valid_until = clock.boot() + claim.ttl
        self._heart = threading.Thread(target=self._keep_alive, name="holdfast-claim", daemon=True)

    def check(self) -> None:
        """Raise if this is not held any more: call it before every piece of work."""
        if not self.lost.is_set() and self._clock.boot() >= self._valid_until:
            self._lose(LockExpired(f"the claim on {self.id.issue_id} was not renewed in time"))
        if self._reason is not None:
            raise self._reason

    def renew(self) -> None:
        """Keep it alive now; if that is refused, it is lost."""
        self.check()
        began = self._clock.boot()
        try:
            self.claim = self._claiming.renew(self.id)
        except (FencingMismatch, LockExpired) as failure:
            self._lose(failure)
            raise
        self._valid_until = began + self.claim.ttl

    def _keep_alive(self) -> None:
        pause = self.claim.ttl / BEATS
        while not self._ended.wait(pause):
            try:
                self.renew()
                pause = self.claim.ttl / BEATS
            except Failure:
                if self.lost.is_set():
                    return
                pause = min(1.0, self.claim.ttl / (4 * BEATS))  # a store that does not answer: try again

    def _lose(self, reason: Failure) -> None:
        self._reason = reason
        self.lost.set()

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing. The claim stays: the issue is finished or released by its own operations."""
        self._ended.set()
        self._heart.join()
