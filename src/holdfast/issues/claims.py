"""Issue claims: the operations, each one transaction, and a held claim that renews itself."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import (
    Blocked,
    Corrupt,
    IssueClaimed,
    LockNotHeld,
    LockTimeout,
    NotFound,
    PathsInProgress,
    TransitionRefused,
)
from holdfast.fs.names import checked_actor, checked_text
from holdfast.issues import rules
from holdfast.issues.model import (
    CLAIMS,
    EVENTS,
    SHORT,
    AnyIssue,
    ClaimId,
    ClaimRecord,
    Issue,
    IssueClaim,
    IssueSummary,
    State,
    issue_summary_to_json,
)
from holdfast.issues.rules import Broken, IssueSet
from holdfast.issues.scopes import overlapping
from holdfast.issues.transactions import Draft, Seen, Transactions
from holdfast.locks.identity import Holder, current_holder, described
from holdfast.locks.retry import CHANCE
from holdfast.store.model import Decision, FirstFree, Replace, View

MOST_LOCKED = 5  # after as many locked issues, `claim_next` gives up: each has cost the lock timeout
MOST_BESIDE = 50  # the most issues with the same paths that a claim names
MOST_TOLD = 3  # the most issues whose paths a message tells
MEETING = 5.0  # seconds for which a claim counts as recent
_SPREAD = 8  # places in the queue for each of those who claim at once: so seven of eight attempts meet nobody
_WIDEST = 1024
POLL = 2.0  # how often a waiter for work checks whether a claim has expired: no event reports that


class Claimed(NamedTuple):
    """An issue and the caller's new claim on it. Nobody can claim the `broken` issues until they are repaired."""

    issue: Issue
    claim: IssueClaim
    taken_over_from: str | None = None
    broken: tuple[Broken, ...] = ()


def claimed_issue_to_json(claimed: Claimed) -> dict[str, Any]:
    """The claimed issue, and the claim that later commands must name."""
    claim = claimed.claim
    return {
        **issue_summary_to_json(claimed.issue, claimed.issue.state),
        "claim_id": claim.claim_id,
        "token": claim.token,
        "ttl": claim.ttl,
        "expires_at": claim.expires_at,
        "taken_over_from": claimed.taken_over_from,
    }


class _Search(NamedTuple):
    """A search for work: the issues that count (None: all), and those that were left out because of the paths that they
    touch; None if paths do not matter."""

    request: rules.IssueClaimRequest
    wanted: Callable[[IssueSummary], bool] | None
    skipped: dict[str, PathsInProgress] | None


class Claiming:
    """The claims of one issue tracker."""

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
        """A request for the actor, or for another assignee.

        `behalf_of` is the holder, if that is not this process; the claim then outlives this process.
        """
        assignee = checked_actor(assignee or self._transactions.actor, "assignee")
        checked_text(purpose, what="purpose")
        holder = described(behalf_of or current_holder(), detached=behalf_of is not None)
        return rules.IssueClaimRequest(assignee, rules.checked_ttl(ttl), uuid.uuid4().hex[:16], purpose, holder)

    def claim(self, issue_id: str, request: rules.IssueClaimRequest) -> Claimed:
        """Claim the issue, or raise `IssueClaimed` or `Blocked`. Of concurrent claims, one succeeds."""
        return self._transactions.retrying(lambda: self._claim(issue_id, request))

    def claim_next(
        self,
        request: rules.IssueClaimRequest,
        *,
        wanted: Callable[[IssueSummary], bool] | None = None,
        wait: float | None = 0.0,
        ignore_touches: bool = False,
    ) -> Claimed | None:
        """Claim the most urgent ready issue, or return None. Among equals, the one unchanged for longest is first.
        `wanted` selects the issues that count.

        Issues that others claim first are skipped, and so are those whose lock another program keeps for too long:
        `LockTimeout` only if nothing else is left, or after `MOST_LOCKED` of them. Unless `ignore_touches`, issues that
        touch the paths of one in progress are skipped too; of two that are claimed at once, one. `wait` is the time
        limit in seconds (None: no limit) for a ready issue, while any issue is unfinished. Unreadable issues are not
        waited for.
        """
        return self._claim_next(_Search(request, wanted, None if ignore_touches else {}), wait)[0]

    def take_next(
        self,
        request: rules.IssueClaimRequest,
        *,
        wanted: Callable[[IssueSummary], bool] | None = None,
        wait: float | None = 0.0,
        ignore_touches: bool = False,
    ) -> Claimed:
        """Like `claim_next`, but raise `NotFound` if none is ready. It names unreadable issues, and those that were
        skipped for the paths that they touch."""
        search = _Search(request, wanted, None if ignore_touches else {})
        found, seen = self._claim_next(search, wait)
        if found is None:
            raise _nothing_ready(() if seen is None else seen.broken, list((search.skipped or {}).values()))
        return found

    def _claim_next(self, search: _Search, wait: float | None) -> tuple[Claimed | None, IssueSet[IssueSummary] | None]:
        store, wanted = self._transactions.store, search.wanted
        found = self._claim_picked(search)
        if found is not None:
            return found, None
        seen = self._transactions.summaries(finished=False)
        found = self._claim_first(seen, search)
        if found is not None or wait == 0.0:
            return found, seen
        deadline = math.inf if wait is None else time.monotonic() + wait
        with store.watch(EVENTS) as watch:
            while True:
                seen = self._transactions.summaries(finished=False)  # newer than the watch: nothing is missed
                found = self._claim_first(seen, search)
                left = deadline - time.monotonic()
                if found is not None or left <= 0 or not any(map(wanted, seen) if wanted else seen):
                    return found, seen
                watch.wait(min(left, POLL))

    def _claim_picked(self, search: _Search) -> Claimed | None:
        """Claim the issue that the server picks, without reading any other. None if it cannot pick one, or if the issue
        touches paths: then only all issues tell what may be claimed."""
        request = search.request
        if search.wanted is not None:
            return None
        try:
            return self._transactions.change_once(
                lambda draft, issue_id: self._granted(draft, issue_id, request),
                FirstFree(request.assignee, self._transactions.skew),
                lambda issue, view: issue.state in rules.WAITING and (search.skipped is None or not issue.touches),
            )
        except (IssueClaimed, TransitionRefused, NotFound):
            return None  # its record says that it is free, but it is not

    def _claim_first(self, seen: IssueSet[IssueSummary], search: _Search) -> Claimed | None:
        locked: dict[str, LockTimeout] = {}
        if search.skipped is not None:
            search.skipped.clear()
        assignee = search.request.assignee
        available = seen.by_urgency(assignee)
        wanted = available if search.wanted is None else filter(search.wanted, available)
        queue = _Queue(wanted, _others_claiming(seen, assignee))
        for issue in queue:
            try:
                beside = [] if search.skipped is None else _beside(seen, issue)
                attempt = partial(self._claim, issue.id, search.request, beside, issue.dependencies)
                return self._transactions.retrying(attempt)._replace(broken=tuple(seen.broken))
            except (IssueClaimed, Blocked, TransitionRefused, NotFound):
                queue.lost()
            except PathsInProgress as failure:
                assert search.skipped is not None
                search.skipped[issue.id] = failure
            except LockTimeout as failure:
                if failure.path in locked:  # not the lock of one issue, but one that every claim needs
                    raise
                locked[failure.path] = failure
                if len(locked) == MOST_LOCKED:
                    break
            except Corrupt as failure:
                seen.add_broken(Broken(issue.id, failure))
        for first in locked.values():
            raise first
        return None

    def renew(self, claim_id: ClaimId, ttl: float | None = None) -> IssueClaim:
        """Renew a claim. After `FencingMismatch` or `LockExpired`, stop: others may work on the issue."""
        key = CLAIMS.key(claim_id.issue_id)
        ttl = None if ttl is None else rules.checked_ttl(ttl)
        reading = self._transactions.reading()

        def decide(view: View, now: float) -> Decision[IssueClaim]:
            record = rules.renewed(claim_id.issue_id, view.get(key), reading.at(now), claim_id, ttl)
            assert record.claim is not None
            return Decision([Replace(key, record)], record.claim)

        return self._transactions.store.transact([key], decide).result

    def release(self, issue_id: str, claim_id: ClaimId | None = None, *, reason: str = "") -> Issue:
        """Release the issue for others. Needs the claim's id, unless the claim has expired."""
        checked_text(reason, what="reason")
        return self._transactions.retrying(lambda: self._release(issue_id, claim_id, reason, force=True))

    def reclaim(self, issue_id: str) -> bool:
        """Release an abandoned issue; False if it is not abandoned."""
        with contextlib.suppress(LockNotHeld, IssueClaimed):
            self._transactions.retrying(lambda: self._release(issue_id, None, "the claim expired", force=False))
            return True
        return False

    def state(self, issue_id: str) -> ClaimRecord | None:
        """The claim of an issue and its token, as of now. Takes no lock."""
        document = self._transactions.store.read(CLAIMS.key(issue_id))
        return document.record if document else None

    def time_left(self, claim: IssueClaim) -> float:
        """Seconds until a claim expires for its holder."""
        return claim.time_left(self._transactions.moment(), for_others=False)

    def _claim(
        self,
        issue_id: str,
        request: rules.IssueClaimRequest,
        beside: Sequence[IssueSummary] = (),
        dependencies: Sequence[str] | None = None,
    ) -> Claimed:
        """Claim an issue. `beside` are issues that touch the same paths, and were not in progress when they were read:
        the transaction names them, so of two that are claimed at once, one is refused. `dependencies` are those of the
        issue, if they are known; if they have changed, the transaction notices."""
        if dependencies is None:
            dependencies = self._transactions.need(issue_id).dependencies
        seen = Seen({issue_id: None}, {})
        self._transactions.look_at_each((*dependencies, *(each.id for each in beside)), seen)

        def body(draft: Draft) -> Claimed:
            issue = draft.issue(issue_id)
            for each in beside:
                now = draft.lookup(each.id)
                if now is not None and IssueSummary.of(now) != each:
                    _refuse_overlap(issue, now)
            return self._granted(draft, issue_id, request)

        return self._transactions.change(body, issues=seen.named(), seen=seen, also=[CLAIMS.key(issue_id)])

    def _granted(self, draft: Draft, issue_id: str, request: rules.IssueClaimRequest) -> Claimed:
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

    def _release(self, issue_id: str, claim_id: ClaimId | None, reason: str, *, force: bool) -> Issue:
        seen = self._transactions.with_dependencies(self._transactions.need(issue_id))

        def body(draft: Draft) -> Issue:
            issue, record = draft.issue(issue_id), draft.claim(issue_id)
            if not force and not rules.is_abandoned(issue, record, draft.moment):
                raise LockNotHeld(f"{issue_id} is not abandoned", issue_id=issue_id)
            rules.check_release(issue, record, draft.moment, claim_id)
            draft.record("issue_released", issue_id, assignee=issue.assignee, reason=reason)
            draft.set_claim(issue_id, rules.ended(record))
            state = State.BACKLOG if issue.state is State.IN_PROGRESS else issue.state
            free = msgspec.structs.replace(issue, state=state, assignee=None)
            return draft.put(rules.in_line(free, draft.lookup), announced=True)

        return self._transactions.change(body, issues=seen.named(), seen=seen, also=[CLAIMS.key(issue_id)])


def _others_claiming(seen: IssueSet[IssueSummary], assignee: str) -> int:
    """How many others have claimed issues in the last seconds, and so may be about to claim more."""
    since = format_instant(seen.moment.now - MEETING)
    recent = (each for each in seen.working() if each.updated_at >= since)
    return len({each.assignee for each in recent}.difference((assignee,)))


class _Queue:
    """Candidates in an order in which concurrent claims rarely meet at the same one.

    A process that is alone gets the first. The more others claim, the further from the front an attempt may begin, at
    random, but never beyond the front's priority. A lost attempt shows that there are more others than it seemed.
    """

    def __init__(self, candidates: Iterable[IssueSummary], others: int) -> None:
        self._candidates = iter(candidates)
        self._front: list[IssueSummary] = []
        self._width = min(_SPREAD * others, _WIDEST) if others else 1

    def __iter__(self) -> Iterator[IssueSummary]:
        while choices := self._choices():
            yield self._front.pop(CHANCE.randrange(choices))

    def _choices(self) -> int:
        """The number of candidates at the front that the next one is taken from."""
        self._front += islice(self._candidates, self._width - len(self._front))
        return sum(1 for _ in takewhile(lambda each: each.priority is self._front[0].priority, self._front))

    def lost(self) -> None:
        """Another client was faster."""
        self._width = min(_SPREAD * self._width, _WIDEST)


def _beside(seen: IssueSet[IssueSummary], issue: IssueSummary) -> list[IssueSummary]:
    """The unfinished issues that touch paths of this one; raises `PathsInProgress` if somebody works on one of them."""
    if not issue.touches:
        return []
    others = [each for each in seen if each.touches and each.id != issue.id and each.state not in rules.FINISHED]
    for each in others:
        if each.state is State.IN_PROGRESS and not seen.is_abandoned(each):
            _refuse_overlap(issue, each)
    waiting = sorted(others, key=lambda each: -each.priority.rank)
    return [each for each in waiting if overlapping(issue.touches, each.touches) is not None][:MOST_BESIDE]


def _refuse_overlap(issue: AnyIssue, other: AnyIssue) -> None:
    """Raise `PathsInProgress` if somebody works on the other issue, and it touches paths of this one."""
    found = overlapping(issue.touches, other.touches) if other.state is State.IN_PROGRESS else None
    if found is None:
        return
    both = found[0] if found[0] == found[1] else " and ".join(found)
    raise PathsInProgress(
        f"{issue.id[:SHORT]} ({issue.title}) touches {both}, like {other.id[:SHORT]}, which "
        f"{other.assignee or 'somebody'} works on",
        issue_id=issue.id,
        touches=found[0],
        in_progress=other.id,
        assignee=other.assignee,
    )


def _nothing_ready(broken: Sequence[Broken], skipped: Sequence[PathsInProgress]) -> NotFound:
    hint = "'holdfast blocked' lists the issues that wait for others; 'holdfast who' shows the work in progress."
    if skipped:
        left = f"; and {len(skipped) - MOST_TOLD} more" if len(skipped) > MOST_TOLD else ""
        reasons = "; ".join(each.message for each in skipped[:MOST_TOLD]) + left
        message = f"no issue is ready to be worked on beside those in progress: {reasons}"
        more: dict[str, object] = {"broken": [each.as_record() for each in broken]} if broken else {}
        hint = "Wait until these are done ('--wait'). To claim one of them all the same: --ignore-touches."
        return NotFound(message, hint=hint, skipped=[each.facts for each in skipped], **more)
    if not broken:
        return NotFound("no issue is ready to be worked on", hint=hint)
    paths = ", ".join(each.path for each in broken)
    return NotFound(
        f"no issue is ready to be worked on, and some cannot be read ({paths})",
        hint=f"{hint} 'holdfast issue validate' shows what to repair.",
        broken=[each.as_record() for each in broken],
    )
