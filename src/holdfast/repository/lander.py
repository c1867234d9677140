"""The lander: drains the queue of one target while it holds the landing lease.

It builds candidates, tests them as planned, publishes those that pass, and records the outcome of the others. The lease
only keeps landers out of each other's way: a stale lander is harmless because transaction 1 of a publish checks its
token, and because git moves the branch by compare-and-swap.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from holdfast.errors import Changed, Failure
from holdfast.git import landing
from holdfast.issues import rules
from holdfast.leases.service import HeldLease
from holdfast.repository import landing_plan
from holdfast.repository.git_home import GitHome
from holdfast.repository.landing_candidates import Chain, with_failure
from holdfast.repository.landing_changes import LandingChanges
from holdfast.repository.landing_checks import (
    CandidateCommit,
    CheckRun,
    LandingCheck,
    check_runs,
    checks_key,
    described,
    gate_checks,
    run_checks,
    target_checks,
)
from holdfast.repository.landing_plan import Candidate, LandingPlan
from holdfast.repository.landing_publish import Publisher, Tell
from holdfast.repository.landing_records import Landing, LandingTarget, in_order
from holdfast.repository.landing_target import LandingBranch, remote_of
from holdfast.repository.landing_tests import CandidateTests, Tested
from holdfast.repository.payloads import scratch
from holdfast.repository.repository import Repository
from holdfast.repository.settings import Settings, read_settings

_LEASE_CHECK = 1.0  # seconds between two checks of the lease while candidates are tested


class _Work:
    """The state of a lander on the current tip: its chain of candidates, their tests, and the plan."""

    def __init__(self, chain: Chain, tests: CandidateTests, is_late: Callable[[], bool]) -> None:
        self.chain = chain
        self.tests = tests
        self.is_late = is_late
        self.plan: LandingPlan | None = None

    def begin(self, queue: Sequence[Landing], settings: Settings) -> None:
        ids = [each.landing_id for each in queue]
        batch, parallel = settings.batch or landing_plan.BATCH, settings.parallel or landing_plan.PARALLEL
        has_checks = bool(settings.checks) or any(each.gates for each in queue)
        self.plan = landing_plan.plan_for(ids, batch=batch, parallel=parallel, has_checks=has_checks)

    def fit(self, queue: Iterable[str]) -> None:
        assert self.plan is not None
        self.plan = landing_plan.with_queue(self.plan, queue)

    def restart(self, chain: Chain) -> None:
        """Start over on a target that has moved: everything is built and tested again."""
        self.chain = chain
        self.tests.keep(())
        self.plan = landing_plan.on_new_tip(self.plan) if self.plan else None


class Lander:
    """Drains the queue of one target under its landing lease."""

    def __init__(self, repository: Repository, changes: LandingChanges, target: LandingTarget, *, tell: Tell) -> None:
        context = repository.context
        assert isinstance(context.home, GitHome)
        git, remote = context.home.git, remote_of(context.home, target.remote) if target.remote else None
        self._repository, self._changes = repository, changes
        self._target = LandingBranch(git, target.branch, target.name, remote)
        self._author = landing.author_of(git)
        self._tell = tell
        self._rooms = contextlib.ExitStack()
        self._runs: dict[Candidate, CheckRun] = {}  # the last failed run of each candidate
        self._earlier: list[CheckRun] | None = None  # earlier runs that have a result, oldest first
        self.publisher = Publisher(context, changes, self._target, tell)

    def work(self, lease: HeldLease, until: Callable[[], bool], is_late: Callable[[], bool]) -> bool:
        """Drain the queue until `until()` is true or nothing more can be done; return whether anything was done. Once
        `is_late()` is true, do not wait for tests. A failure, such as a full disk or a missing branch, blames no entry:
        it is what the queue waits for."""
        try:
            return self._drain(lease, until, is_late)
        except Failure as failure:
            with contextlib.suppress(Failure):  # the lease is lost; or the disk is full for this record too
                self._changes.note_wait(self._target.name, lease, failure.message)
            raise

    def _drain(self, lease: HeldLease, until: Callable[[], bool], is_late: Callable[[], bool]) -> bool:
        self.publisher.recover(lease)
        self._earlier = None
        did = False
        with CandidateTests() as tests, contextlib.ExitStack() as rooms:
            self._rooms = rooms
            work = _Work(self._chain(), tests, is_late)
            while not until() and self._go_on(lease, work):
                did = True
        if did:
            self.publisher.sweep()
        return did

    def _chain(self) -> Chain:
        """An empty chain on the current tip. Merges read attributes from a scratch directory."""
        git, tip = self._target.git, self._target.tip()
        room = self._rooms.enter_context(scratch(self._repository.context, "land"))
        return Chain(git, tip, self._author, landing.attributes_in(git, tip, room.path / "attributes"))

    def _go_on(self, lease: HeldLease, work: _Work) -> bool:
        """Take one step: build, test, publish or record an outcome. Returns False if nothing can be done."""
        lease.check()
        if work.chain.tip != self._target.tip():
            work.restart(self._chain())
        queue = self._queue(work.chain)
        while self._fit(work.chain, queue):
            queue = self._queue(work.chain)
        if not queue:
            return False
        work.fit(each.landing_id for each in queue) if work.plan else work.begin(queue, self._settings())
        assert work.plan is not None
        decided = landing_plan.outcome(work.plan)
        if decided.failed:
            return self._fail(lease, work, decided.failed)
        if decided.publish:
            return self._publish(lease, work, queue, decided)
        return self._test(lease, work, queue)

    def _settings(self) -> Settings:
        return read_settings(self._repository.root)

    def _test(self, lease: HeldLease, work: _Work, queue: list[Landing]) -> bool:
        """Start the planned tests, and add the next result to the plan."""
        assert work.plan is not None
        wanted = landing_plan.wanted(work.plan, work.tests.candidates())
        work.tests.keep(wanted)
        for candidate in wanted:
            if candidate in work.tests.candidates():
                continue
            if self._extend(lease, work.chain, queue, len(candidate)):
                return True  # the queue has changed
            entries = work.chain.entries[: len(candidate)]
            checks = self._checks(entries)
            if not checks:
                work.plan = landing_plan.with_result(work.plan, candidate, passed=True)
                return True
            tested = CandidateCommit(
                work.chain.tips[len(entries) - 1], work.chain.trees[len(entries) - 1], work.chain.tip, candidate
            )
            if (known := self._known_result(tested.tree, checks, entries)) is not None:
                self._take_in(work, Tested(candidate, bool(known.passed), known))
                return True
            name = f"{self._target.name}/{len(candidate)}"
            landing.keep_candidate(
                self._target.git, name, tested.commit, [work.chain.tip, *(e.commit for e in entries)]
            )
            self._changes.note_wait(self._target.name, lease, "")
            work.tests.start(candidate, partial(self._run, tested, checks, entries[-1].landing_id))
        if work.is_late():
            return False
        if (found := work.tests.next(_LEASE_CHECK)) is not None:
            self._take_in(work, found)
        return True

    def _take_in(self, work: _Work, found: Tested) -> None:
        assert work.plan is not None
        work.plan = landing_plan.with_result(work.plan, found.candidate, passed=found.passed)
        if found.run is not None and not found.passed:
            self._runs[found.candidate] = found.run

    def _known_result(self, tree: str, checks: Sequence[LandingCheck], entries: Sequence[Landing]) -> CheckRun | None:
        """An earlier run of the same checks on the same tree; None if there is none. Each run is used once, and only if
        it began after the entries were queued: an entry that is queued again is tested again."""
        if self._earlier is None:
            runs = check_runs(self._repository.context.paths)
            self._earlier = [each for each in runs if each.passed is not None][::-1]
        queued_at, key = max(each.queued_at for each in entries), checks_key(self._repository, checks)
        for each in self._earlier:
            if (each.tree, each.checks) == (tree, key) and each.began_at >= queued_at:
                self._earlier.remove(each)
                return each
        return None

    def _checks(self, entries: Sequence[Landing]) -> list[LandingCheck]:
        issue_ids = [each.issue_id for each in entries if each.issue_id is not None and each.gates]
        gates = gate_checks(self._changes.tracker, issue_ids) if issue_ids else []
        return [*target_checks(self._repository), *gates]

    def _run(
        self, tested: CandidateCommit, checks: Sequence[LandingCheck], landing_id: str, cancelled: threading.Event
    ) -> CheckRun:
        """Run the checks; if they have failed for the same candidate, in a worktree without the leftovers of others."""
        return run_checks(
            self._repository,
            tested,
            checks,
            target=self._target.branch,
            landing_id=landing_id,
            afresh=tested.entries in self._runs,
            cancelled=cancelled,
        )

    def _fail(self, lease: HeldLease, work: _Work, failed: Candidate) -> bool:
        """Record the failure of entries that fail on their own."""
        assert work.plan is not None
        run = self._runs.get(failed)
        for each in failed:
            entry = self._changes.landing(each)
            outcome = with_failure(entry, work.chain.tip, described(run))
            self._decide(lease, msgspec.structs.replace(outcome, log=run.run_id if run else ""))
        work.plan = landing_plan.with_failed(work.plan, failed)
        return True

    def _decide(self, lease: HeldLease, outcome: Landing) -> None:
        with contextlib.suppress(Changed):
            self._changes.decide(outcome, lease)
            self._tell(f"{outcome.landing_id} {outcome.state.value}: {outcome.title}")

    def _publish(self, lease: HeldLease, work: _Work, queue: list[Landing], decided: landing_plan.PlanOutcome) -> bool:
        """Publish a candidate that has passed."""
        assert work.plan is not None
        length = len(decided.publish)
        if self._extend(lease, work.chain, queue, length):
            return True  # the queue has changed
        tip = work.chain.tips[length - 1]
        done = self.publisher.publish(lease, work.chain, length, decided.publish if decided.flaky else ())
        if done and work.chain.tip == tip:
            work.plan = landing_plan.published(work.plan, decided.publish)
            work.tests.advance(decided.publish)
        elif done:
            work.restart(self._chain())
        return done

    def _queue(self, chain: Chain) -> list[Landing]:
        target = self._changes.target(self._target.name)
        entries = [] if target is None else self._changes.queued(target)
        waits = {each.issue_id: found for each in entries if each.issue_id and (found := self._open(each.issue_id))}
        return [each for each in in_order(entries, waits) if each.landing_id not in chain.deferred]

    def _open(self, issue_id: str) -> list[str]:
        """The open dependencies of an issue."""
        transactions = self._changes.tracker.transactions
        issue = transactions.lookup(issue_id)
        return [] if issue is None else rules.open_dependencies(issue, transactions.lookup)

    def _fit(self, chain: Chain, queue: list[Landing]) -> bool:
        """Drop candidates that were built from entries no longer at the head of the queue. Returns whether entries that
        were deferred are in the queue again: those that they conflict with may be gone."""
        same = 0
        for built, entry in zip(chain.entries, queue, strict=False):
            if built.landing_id != entry.landing_id or built.commit != entry.commit:
                break
            same += 1
        return chain.cut(same)

    def _extend(self, lease: HeldLease, chain: Chain, queue: list[Landing], length: int) -> bool:
        """Build a candidate of this length, if that many entries merge. Returns whether an entry was left out, which
        changes the queue. An entry whose issue depends on one that was left out is left out too."""
        changed = False
        out: set[str] = set()
        for entry in queue[len(chain.entries) :]:
            if len(chain.entries) >= length:
                break
            self._target.require(entry)
            if out and entry.issue_id and out & set(self._open(entry.issue_id)):
                chain.deferred.add(entry.landing_id)
            elif (outcome := chain.extend(entry)) is not None:
                self._decide(lease, outcome)
            if not chain.entries or chain.entries[-1] is not entry:
                changed = True
                out.update([entry.issue_id] if entry.issue_id else ())
        return changed
