"""Claims: expiry, takeover, and the refusal of writes under an old claim."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.clock import ManualClock
from holdfast.errors import (
    FencingMismatch,
    IssueClaimed,
    LockExpired,
    LockNotHeld,
    LockTimeout,
    SettingInvalid,
    TransitionRefused,
)
from holdfast.issues.claims import _Queue
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.held_claim import HeldIssueClaim
from holdfast.issues.model import ClaimId, GateStatus, Issue, IssueSummary, Priority, State
from holdfast.issues.rules import IssueSet
from holdfast.issues.tracker import Tracker, Update
from holdfast.locks.file_lock import FileLocker
from holdfast.store.files import FileStore
from tests.issues.trackers import claim_id_of, create_issues, events_of, tracker_at
from tests.locks.workers import Line, Workers, wait_until

DONE = Update(state=State.DONE)
TTL = 60.0


def test_an_issue_that_keeps_failing_does_not_hold_up_the_others(tracker: Tracker, clock: ManualClock) -> None:
    a, b, c = create_issues(tracker, "a", "b", "c")
    taken = []
    for _ in range(5):
        clock.advance(1)
        claimed = tracker.claims.claim_next(tracker.claims.request())
        assert claimed is not None
        taken.append(claimed.issue.id)
        clock.advance(1)
        if claimed.issue.id == a:
            tracker.claims.release(a, ClaimId.parse(claimed.claim.claim_id), reason="it failed")
        else:
            tracker.update(claimed.issue.id, DONE, claim=ClaimId.parse(claimed.claim.claim_id))

    assert taken == [a, b, c, a, a]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The issues that were examined for work, in order."""
    found: list[str] = []
    original = IssueSet.is_available

    def noting(self: IssueSet[Any], issue: Any, assignee: str | None = None) -> bool:
        found.append(issue.id)
        return original(self, issue, assignee)

    monkeypatch.setattr(IssueSet, "is_available", noting)
    return found


def test_claims_come_in_the_exact_order_and_examine_one_issue_each(
    tracker: Tracker, clock: ManualClock, examined: list[str]
) -> None:
    """Whatever is created, changed, claimed, finished and released in between."""
    chance, count = random.Random(21), 60
    for number in range(count):
        clock.advance(chance.choice((0.0, 1.0)))  # some are of the same instant
        tracker.create(NewIssue(title=str(number), priority=chance.choice(list(Priority))))
    for number in range(count):
        everything = list(tracker.snapshot())
        changed = chance.choice(everything)
        if changed.state is State.READY:
            tracker.update(changed.id, Update(priority=chance.choice(list(Priority))))
        everything = list(tracker.snapshot())
        ready = [each for each in everything if each.state is State.READY]
        wanted = min(ready, key=lambda each: (-each.priority.rank, each.updated_at, everything.index(each)))
        examined.clear()
        claimed = tracker.claims.take_next(tracker.claims.request())
        working = {each.id for each in everything if each.state is State.IN_PROGRESS}
        assert (claimed.issue.id, [each for each in examined if each not in working]) == (wanted.id, [wanted.id])
        clock.advance(1)
        if number % 3 == 0:
            tracker.claims.release(claimed.issue.id, claim_id_of(claimed))
        elif number % 3 == 1:
            tracker.update(claimed.issue.id, DONE, claim=claim_id_of(claimed))


def test_the_search_goes_on_however_many_others_claim() -> None:
    issue = IssueSummary.of(Issue(id="0", title="issue"))
    candidates = [msgspec.structs.replace(issue, id=str(each)) for each in range(2000)]
    queue = _Queue(candidates, others=200)
    found = []
    for each in queue:
        found.append(each)
        queue.lost()
    assert sorted(found, key=lambda each: int(each.id)) == candidates


@contextmanager
def locked_by_another_program(*paths: Path) -> Iterator[None]:
    def hold(line: Line) -> None:
        with ExitStack() as locks:
            for path in paths:
                locks.enter_context(FileLocker(60.0).lock_exclusive(path))
            line.say("held")
            line.wait()

    with Workers() as workers:
        assert workers.start(hold).hear() == "held"
        yield


def test_an_issue_that_another_program_keeps_locked_is_skipped(scratch: Path) -> None:
    tracker = Tracker(FileStore(scratch, timeout=0.05))
    tracker.initialise()
    ids = create_issues(tracker, "a", "b", "c")
    tracker.update(ids[2], Update(priority=Priority.CRITICAL))
    with locked_by_another_program(*(scratch / f".jit/issues/{each}.lock" for each in (ids[2], ids[0]))):
        claimed = tracker.claims.take_next(tracker.claims.request())
        assert claimed.issue.id == ids[1]
        with pytest.raises(LockTimeout, match=ids[2]):  # nothing else is left
            tracker.claims.take_next(tracker.claims.request())
    assert tracker.claims.take_next(tracker.claims.request()).issue.id == ids[2]


def test_a_lock_that_every_claim_needs_is_waited_for_at_most_twice(scratch: Path) -> None:
    store = FileStore(scratch, timeout=0.05)
    tracker = Tracker(store)
    tracker.initialise()
    create_issues(tracker, *"abcdef")
    with locked_by_another_program(scratch / ".jit/.events.lock"):
        before = store.lock_statistics().contended
        with pytest.raises(LockTimeout, match=r"\.events\.lock"):
            tracker.claims.take_next(tracker.claims.request())
        assert store.lock_statistics().contended - before <= 2


def test_a_waiter_gets_the_next_ready_issue_and_returns_when_none_is_left(scratch: Path) -> None:
    tracker = Tracker(FileStore(scratch))
    tracker.initialise()
    first = tracker.create(NewIssue(title="first")).id
    second = tracker.create(NewIssue(title="second", depends_on=(first,))).id
    claims = tracker.claims
    mine = claims.claim(first, claims.request())
    assert claims.claim_next(claims.request(), wait=0.01) is None

    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(claims.claim_next, claims.request(), wait=None)
        assert not waiting.done()
        tracker.update(first, DONE, claim=ClaimId.parse(mine.claim.claim_id))
        got = waiting.result(60)
        assert got is not None
        assert got.issue.id == second
        idle = others.submit(claims.claim_next, claims.request(), wait=None)
        tracker.update(second, DONE, claim=ClaimId.parse(got.claim.claim_id))
        assert idle.result(60) is None
    assert claims.claim_next(claims.request(), wait=None) is None


@pytest.mark.req("FL-19")
def test_an_expired_claim_is_taken_over_with_a_greater_token(tracker: Tracker, clock: ManualClock) -> None:
    [a] = create_issues(tracker, "a")
    first = tracker.claims.claim(a, tracker.claims.request("agent:one", ttl=TTL))
    clock.advance(TTL - 1)
    with pytest.raises(IssueClaimed, match="agent:one"):
        tracker.claims.claim(a, tracker.claims.request("agent:two"))
    clock.advance(1)

    assert [issue.id for issue in tracker.snapshot().ready()] == [a]
    second = tracker.claims.claim_next(tracker.claims.request("agent:two"))
    assert second is not None
    assert (second.taken_over_from, second.claim.token) == ("agent:one", first.claim.token + 1)


@pytest.mark.req("FL-19")
def test_late_writes_under_an_old_claim_are_refused(tracker: Tracker, clock: ManualClock) -> None:
    [a] = create_issues(tracker, "a")
    old = claim_id_of(tracker.claims.claim(a, tracker.claims.request("agent:one", ttl=TTL)))
    clock.advance(TTL)
    new = claim_id_of(tracker.claims.claim(a, tracker.claims.request("agent:two", ttl=TTL)))
    before = tracker.document(a)

    for act in (
        lambda: tracker.update(a, DONE, claim=old),
        lambda: tracker.update(a, Update(title="late"), claim=old),
        lambda: tracker.claims.release(a, old),
        lambda: tracker.claims.renew(old),
        lambda: tracker.delete(a, claim=old),
    ):
        with pytest.raises(FencingMismatch) as caught:
            act()
        assert caught.value.facts["current_token"] == 2
    assert tracker.document(a) == before
    assert tracker.update(a, DONE, claim=new).state is State.DONE


def test_an_expired_claim_cannot_write_even_if_nobody_took_it_over(tracker: Tracker, clock: ManualClock) -> None:
    [a] = create_issues(tracker, "a")
    claim = claim_id_of(tracker.claims.claim(a, tracker.claims.request(ttl=TTL)))
    clock.advance(TTL)

    with pytest.raises(LockExpired):
        tracker.update(a, DONE, claim=claim)
    with pytest.raises(LockExpired):
        tracker.claims.renew(claim)


def test_heartbeats_and_writes_keep_a_claim_alive(tracker: Tracker, clock: ManualClock) -> None:
    [a] = create_issues(tracker, "a")
    claim = claim_id_of(tracker.claims.claim(a, tracker.claims.request(ttl=TTL)))
    for _ in range(3):
        clock.advance(TTL - 1)
        tracker.claims.renew(claim)
        clock.advance(TTL - 1)
        tracker.update(a, Update(increments={"n": 1}), claim=claim)

    assert tracker.update(a, DONE, claim=claim).state is State.DONE


def test_only_the_holder_of_the_claim_moves_a_claimed_issue(tracker: Tracker) -> None:
    [a] = create_issues(tracker, "a")
    claim = claim_id_of(tracker.claims.claim(a, tracker.claims.request("agent:one")))

    moves: list[Callable[[], object]] = [
        lambda: tracker.update(a, DONE),
        lambda: tracker.update(a, Update(assignee="agent:two")),
        lambda: tracker.delete(a),
        lambda: tracker.claims.release(a),
    ]
    for act in moves:
        with pytest.raises(IssueClaimed, match="agent:one"):
            act()
    assert tracker.update(a, Update(title="anybody may add to it")).title
    assert tracker.claims.release(a, claim, reason="later").state is State.READY
    assert tracker.issue(a).assignee is None
    with pytest.raises(LockNotHeld):
        tracker.claims.release(a)


def test_the_token_grows_across_releases(tracker: Tracker) -> None:
    [a] = create_issues(tracker, "a")
    tokens = []
    for _ in range(3):
        claimed = tracker.claims.claim(a, tracker.claims.request())
        tokens.append(claimed.claim.token)
        tracker.claims.release(a, claim_id_of(claimed))

    assert tokens == [1, 2, 3]


def test_finishing_ends_the_claim_and_waiting_for_gates_keeps_it(tracker: Tracker) -> None:
    tracker.gates.define(Definition("review"))
    [a] = create_issues(tracker, "a")
    tracker.gates.require(a, ["review"])
    claim = claim_id_of(tracker.claims.claim(a, tracker.claims.request()))

    assert tracker.update(a, DONE, claim=claim).state is State.GATED
    record = tracker.claims.state(a)
    assert record is not None
    assert record.claim is not None
    tracker.gates.judge(a, "review", GateStatus.PASSED)
    record = tracker.claims.state(a)
    assert record is not None
    assert (record.claim, record.token) == (None, 1)
    with pytest.raises(TransitionRefused):
        tracker.claims.claim(a, tracker.claims.request())


def test_an_abandoned_issue_is_reclaimed_once(tracker: Tracker, clock: ManualClock) -> None:
    [a] = create_issues(tracker, "a")
    tracker.claims.claim(a, tracker.claims.request(ttl=TTL))
    assert not tracker.claims.reclaim(a)
    clock.advance(TTL)

    assert tracker.claims.reclaim(a)
    assert not tracker.claims.reclaim(a)
    assert (tracker.issue(a).state, tracker.issue(a).assignee) == (State.READY, None)
    assert events_of(tracker)["issue_released"] == 1


def test_an_issue_assigned_to_somebody_else_cannot_be_claimed(tracker: Tracker) -> None:
    a, b = create_issues(tracker, "a", "b")
    tracker.update(a, Update(assignee="human:bob"))
    tracker.update(b, Update(state=State.IN_PROGRESS))

    for issue in (a, b):
        with pytest.raises(IssueClaimed):
            tracker.claims.claim(issue, tracker.claims.request("agent:one"))
    assert tracker.claims.claim(a, tracker.claims.request("human:bob")).claim.token == 1


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "a.1", ".1.x", "a.1."])
def test_a_malformed_claim_id_is_refused(text: str) -> None:
    with pytest.raises(SettingInvalid):
        ClaimId.parse(text)


def test_a_claim_id_names_its_issue_even_if_that_contains_dots() -> None:
    assert ClaimId.parse(" a.b-1.12.0f ")[:2] == ("a.b-1", 12)


def test_an_invalid_ttl_is_refused(tracker: Tracker) -> None:
    for ttl in (0.0, -1.0, float("inf"), float("nan"), 1e9):
        with pytest.raises(SettingInvalid):
            tracker.claims.request(ttl=ttl)


# --- With real time and real processes --------------------------------------------------------------


def test_a_held_claim_renews_itself_and_notices_when_it_is_lost(scratch: Path) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    [a] = create_issues(tracker, "a")
    claimed = tracker.claims.claim(a, tracker.claims.request(ttl=1.0))
    with HeldIssueClaim(tracker.claims, claimed.claim) as held:
        wait_until(lambda: held.claim.renewed_at != claimed.claim.renewed_at)
        held.check()
        tracker.claims.release(a, held.id)
        wait_until(held.lost.is_set)
        with pytest.raises(FencingMismatch):
            held.check()


@pytest.mark.req("FL-19")
@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_the_issue_of_a_killed_agent_becomes_ready_again(scratch: Path) -> None:
    tracker = tracker_at(scratch)
    tracker.initialise()
    [a] = create_issues(tracker, "a")

    def work(line: Line) -> None:
        here = tracker_at(scratch, "agent:doomed")
        claimed = here.claims.claim(a, here.claims.request(ttl=1.0))
        with HeldIssueClaim(here.claims, claimed.claim):
            line.say(claimed.claim.claim_id)
            line.wait()

    with Workers() as workers:
        worker = workers.start(work)
        old = ClaimId.parse(worker.hear())
        with pytest.raises(IssueClaimed):
            tracker.claims.claim(a, tracker.claims.request())
        worker.kill()
        assert worker.wait() < 0
        wait_until(lambda: tracker.snapshot().ready())
        second = tracker.claims.claim_next(tracker.claims.request())
    assert second is not None
    assert (second.claim.token, second.taken_over_from) == (2, "agent:doomed")
    with pytest.raises(FencingMismatch):
        tracker.update(a, DONE, claim=old)
