"""The lander: works off the queue of one target while it holds the landing lease.

The steps of a publish and of recovery are those of docs/decisions/0014. The lease only keeps landers out of each
other's way: what makes a stale one harmless is that transaction 1 checks its token, and that git moves the branch by
compare-and-swap.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import Changed, CheckoutInTheWay, Failure, GitFailed, NotFound
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.git import following, landing
from holdfast.git.following import Follower, Move
from holdfast.git.landing import Addition
from holdfast.git.program import Author, Git
from holdfast.issues import rules
from holdfast.leases.service import HeldLease
from holdfast.locks.file_lock import FileLocker
from holdfast.repository import landing_plan
from holdfast.repository.context import MAIN
from holdfast.repository.git_home import GitHome
from holdfast.repository.landing_changes import LandingChanges
from holdfast.repository.landing_checks import CheckRun, LandingCheck, gate_checks, run_checks, target_checks
from holdfast.repository.landing_plan import Candidate, LandingPlan
from holdfast.repository.landing_records import (
    IntentEntry,
    Landing,
    LandingState,
    LandingStyle,
    LandingTarget,
    PublishIntent,
    in_order,
    new_landing_id,
)
from holdfast.repository.landing_tests import CandidateTests
from holdfast.repository.payloads import in_use
from holdfast.repository.repository import Repository
from holdfast.repository.settings import Settings, read_settings

_MOST_SUBJECTS = 3
_LEASE_CHECK = 1.0  # seconds between two checks of the lease while candidates are tested
Tell = Callable[[str], object]


class Target(NamedTuple):
    """A branch here that work lands on."""

    git: Git
    branch: str

    def tip(self) -> str:
        """The commit that the next candidate is built on; raises `NotFound` if there is no such branch."""
        found = landing.tip_of(self.git, self.branch)
        if found is None:
            hint = f"Create it: 'git branch {self.branch}'. Or name another one: --into."
            raise NotFound(f"there is no branch {self.branch}", hint=hint, branch=self.branch)
        return found


class Chain:
    """Candidates on one tip: each entry on top of the one before, as long as they merge."""

    def __init__(self, git: Git, tip: str, author: Author) -> None:
        self.git = git
        self.tip = tip
        self.entries: list[Landing] = []
        self.tips: list[str] = []
        self.deferred: set[str] = set()  # conflict with an entry before them, not with the tip
        self._author = author
        self._tree = ""

    def end(self) -> str:
        return self.tips[-1] if self.tips else self.tip

    def extend(self, entry: Landing) -> Landing | None:
        """Put an entry on top; if it conflicts with the tip, return it with that outcome. One that conflicts only with
        entries before it is deferred: they may not land."""
        self._tree = self._tree or landing.tree_of(self.git, self.end())
        squash = entry.style is LandingStyle.SQUASH
        addition = Addition(entry.commit, message_of(entry), squash=squash)
        try:
            added = landing.add(self.git, self.end(), self._tree, addition, self._author)
        except GitFailed as failure:
            return _failed(entry, self.tip, f"git cannot merge it: {failure.message}")
        if added.tip is not None:
            self.entries.append(entry)
            self.tips.append(added.tip)
            self._tree = f"{added.merged.tree}"
            return None
        alone = added if not self.entries else landing.add(self.git, self.tip, "", addition, self._author)
        if alone.tip is not None:
            self.deferred.add(entry.landing_id)
            return None
        return msgspec.structs.replace(
            entry,
            state=LandingState.CONFLICT,
            conflicts=alone.merged.conflicts,
            against=self.tip,
            reason="; ".join(_others(self.git, entry, self.tip, alone.merged.conflicts)),
        )

    def cut(self, length: int) -> None:
        """Keep the first entries only."""
        del self.entries[length:], self.tips[length:]
        self._tree = ""

    def advance(self, length: int) -> None:
        """The first entries are on the target now: the rest stays as it was built."""
        self.tip = self.tips[length - 1]
        del self.entries[:length], self.tips[:length]
        self.deferred.clear()


def _failed(entry: Landing, tip: str, reason: str) -> Landing:
    return msgspec.structs.replace(entry, state=LandingState.FAILED, against=tip, reason=reason)


def message_of(entry: Landing) -> str:
    """The message of the commit that puts an entry on its target."""
    subject = entry.title or f"work of {entry.worktree_id or entry.commit[:12]}"
    if entry.style is LandingStyle.MERGE:
        subject = f"Land {entry.worktree_id or entry.commit[:12]}: {subject}"
    trailers = [f"Holdfast-Landing: {entry.landing_id}"]
    trailers += [f"Holdfast-Issue: {entry.issue_id}"] if entry.issue_id else []
    trailers += [f"Holdfast-Worktree: {entry.worktree_id}"] if entry.worktree_id else []
    return f"{subject}\n\n" + "\n".join(trailers) + "\n"


def _others(git: Git, entry: Landing, tip: str, paths: Sequence[str]) -> Iterator[str]:
    """The commits on the target that touched the conflicting paths since the work began, for its agent."""
    with contextlib.suppress(GitFailed):
        words = "log", f"-{_MOST_SUBJECTS}", "--no-merges", "--format=%h %s", f"{entry.commit}..{tip}", "--"
        found = git.run("--literal-pathspecs", *words, *paths[:50]).decode(errors="replace").splitlines()
        yield from (f"{entry.branch} has: {line}" for line in found)


class _Work:
    """What a lander has built and tested on the current tip."""

    def __init__(self, chain: Chain, tests: CandidateTests, is_late: Callable[[], bool]) -> None:
        self.chain = chain
        self.tests = tests
        self.is_late = is_late
        self.plan: LandingPlan | None = None

    def begin(self, queue: Sequence[Landing], settings: Settings) -> None:
        ids = [each.landing_id for each in queue]
        batch, parallel = settings.batch or landing_plan.BATCH, settings.parallel or landing_plan.PARALLEL
        self.plan = landing_plan.plan_for(ids, batch=batch, parallel=parallel)

    def fit(self, queue: Iterable[str]) -> None:
        assert self.plan is not None
        self.plan = landing_plan.with_queue(self.plan, queue)

    def restart(self, chain: Chain) -> None:
        """The target is somewhere else: everything is built and tested anew."""
        self.chain = chain
        self.tests.keep(())
        self.plan = landing_plan.on_new_tip(self.plan) if self.plan else None


def _why(run: CheckRun | None) -> str:
    """The command of a run that failed, for people."""
    last = run.commands[-1] if run and run.commands else None
    if last is None:
        return "the checks could not run"
    return f"'{last.command}' failed: {last.message or f'exit status {last.exit_status}'}"


class Lander:
    """Works on the queue of one target, in the name of one lease."""

    def __init__(self, repository: Repository, changes: LandingChanges, name: str, branch: str, *, tell: Tell) -> None:
        context = repository.context
        assert isinstance(context.home, GitHome)
        self._repository = repository
        self._context = context
        self._home = context.home
        self._git = context.home.git
        self._changes = changes
        self._name = name
        self._target = Target(self._git, branch)
        self._branch = branch
        self._tell = tell
        self._author = landing.author_of(self._git)
        self._told = ""
        self._runs: dict[Candidate, CheckRun] = {}  # the last failed run of each candidate

    # --- The queue ---------------------------------------------------------------------------------

    def work(self, lease: HeldLease, until: Callable[[], bool], is_late: Callable[[], bool] = lambda: False) -> bool:
        """Work until the condition holds, or until nothing can be done; whether anything was done. Once it `is_late`,
        tests are not waited for."""
        self.recover(lease)
        did = False
        with CandidateTests() as tests:
            work = _Work(self._chain(), tests, is_late)
            while not until() and self._go_on(lease, work):
                did = True
        if did:
            self._sweep()
        return did

    def _chain(self) -> Chain:
        return Chain(self._git, self._target.tip(), self._author)

    def _go_on(self, lease: HeldLease, work: _Work) -> bool:
        """Take one step: build, test, publish, or give an entry its outcome; False if nothing can be done."""
        lease.check()
        if work.chain.tip != self._target.tip():
            work.restart(self._chain())
        queue = self._queue(work.chain)
        if not queue:
            return False
        self._fit(work.chain, queue)
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
        """Start the tests that the plan wants, and take in the next result."""
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
            commit = work.chain.tips[len(candidate) - 1]
            landing.keep_candidate(self._git, f"{self._name}/{len(candidate)}", commit, [work.chain.tip])
            work.tests.start(candidate, partial(self._run, commit, checks, entries[-1].landing_id))
        if work.is_late():
            return False
        found = work.tests.next(_LEASE_CHECK)
        if found is not None:
            work.plan = landing_plan.with_result(work.plan, found.candidate, passed=found.passed)
            if found.run is not None and not found.passed:
                self._runs[found.candidate] = found.run
        return True

    def _checks(self, entries: Sequence[Landing]) -> list[LandingCheck]:
        issue_ids = [each.issue_id for each in entries if each.issue_id is not None and each.gates]
        gates = gate_checks(self._changes.tracker, issue_ids) if issue_ids else []
        return [*target_checks(self._repository), *gates]

    def _run(
        self, commit: str, checks: Sequence[LandingCheck], landing_id: str, cancelled: threading.Event
    ) -> CheckRun:
        return run_checks(
            self._repository, commit, checks, target=self._branch, landing_id=landing_id, cancelled=cancelled
        )

    def _fail(self, lease: HeldLease, work: _Work, failed: Candidate) -> bool:
        """Give entries that fail alone their outcome."""
        assert work.plan is not None
        run = self._runs.get(failed)
        for each in failed:
            entry = self._changes.landing(each)
            outcome = _failed(entry, work.chain.tip, _why(run))
            self._decide(lease, msgspec.structs.replace(outcome, log=run.run_id if run else ""))
        work.plan = landing_plan.with_failed(work.plan, failed)
        return True

    def _decide(self, lease: HeldLease, outcome: Landing) -> None:
        with contextlib.suppress(Changed):
            self._changes.decide(outcome, lease)
            self._tell(f"{outcome.landing_id} {outcome.state.value}: {outcome.title}")

    def _publish(self, lease: HeldLease, work: _Work, queue: list[Landing], decided: landing_plan.Outcome) -> bool:
        """Publish a candidate that has passed."""
        assert work.plan is not None
        length = len(decided.publish)
        if self._extend(lease, work.chain, queue, length):
            return True  # the queue has changed
        tip = work.chain.tips[length - 1]
        done = self.publish(lease, work.chain, length, decided.publish if decided.flaky else ())
        if done and work.chain.tip == tip:
            work.plan = landing_plan.published(work.plan, decided.publish)
            work.tests.advance(decided.publish)
        elif done:
            work.restart(self._chain())
        return done

    def _queue(self, chain: Chain) -> list[Landing]:
        target = self._changes.target(self._name)
        entries = [] if target is None else self._changes.queued(target)
        waits = {each.issue_id: found for each in entries if each.issue_id and (found := self._open(each.issue_id))}
        return [each for each in in_order(entries, waits) if each.landing_id not in chain.deferred]

    def _open(self, issue_id: str) -> list[str]:
        """The open dependencies of an issue."""
        transactions = self._changes.tracker.transactions
        issue = transactions.lookup(issue_id)
        return [] if issue is None else rules.open_dependencies(issue, transactions.lookup)

    def _fit(self, chain: Chain, queue: list[Landing]) -> None:
        """Forget what was built from entries that are not at the beginning of the queue any more."""
        same = 0
        for built, entry in zip(chain.entries, queue, strict=False):
            if built.landing_id != entry.landing_id or built.commit != entry.commit:
                break
            same += 1
        chain.cut(same)

    def _extend(self, lease: HeldLease, chain: Chain, queue: list[Landing], length: int) -> bool:
        """Build a candidate of this length, if so many merge; whether an entry was left out, which changes the queue.
        An entry whose issue depends on one that was left out is left out too."""
        changed = False
        out: set[str] = set()
        for entry in queue[len(chain.entries) :]:
            if len(chain.entries) >= length:
                break
            if out and entry.issue_id and out & set(self._open(entry.issue_id)):
                chain.deferred.add(entry.landing_id)
            elif (outcome := chain.extend(entry)) is not None:
                self._decide(lease, outcome)
            if not chain.entries or chain.entries[-1] is not entry:
                changed = True
                out.update([entry.issue_id] if entry.issue_id else ())
        return changed

    # --- Publishing --------------------------------------------------------------------------------

    def publish(self, lease: HeldLease, chain: Chain, length: int, flaky: Sequence[str] = ()) -> bool:
        """Publish the first entries of a chain; False if a checkout is in the way. True if they have landed, or if
        something changed so that the candidate has to be built anew."""
        entries = tuple(
            IntentEntry(entry.landing_id, tip)
            for entry, tip in zip(chain.entries[:length], chain.tips[:length], strict=True)
        )
        new = chain.tips[length - 1]
        try:
            known = [chain.tip, *(entry.commit for entry in chain.entries[:length])]
            landing.keep_candidate(self._git, f"{self._name}/new", new, known)
        except GitFailed:  # pruned meanwhile
            chain.cut(0)
            return True
        now = format_instant(self._context.store.now())
        intent = PublishIntent(
            intent_id=new_landing_id(),
            old=chain.tip,
            new=new,
            entries=entries,
            begun_at=now,
            holder_id=self._context.holder.holder_id,
            flaky=tuple(flaky),
        )
        try:
            self._require_clear(intent)  # 1
            if self._changes.begin(self._name, intent, lease):  # 2
                return True
        except CheckoutInTheWay as failure:
            self._wait_for(lease, failure)
            return False
        except Changed:
            return True
        return self._carry_out(lease, intent, chain, length)

    def _carry_out(self, lease: HeldLease, intent: PublishIntent, chain: Chain, length: int) -> bool:
        try:
            swapped = self._swap(intent)  # 3 to 7
        except (CheckoutInTheWay, GitFailed) as failure:
            self._changes.give_up(self._name, intent, lease, failure.message)
            self._wait_for(lease, failure)
            return False
        if not swapped:
            self._changes.give_up(self._name, intent, lease, "")
            return True
        self._finish(intent)  # 8
        chain.advance(length)
        return True

    def _finish(self, intent: PublishIntent) -> None:
        if self._changes.finish(self._name, intent):
            for each in intent.entries:
                self._tell(f"{each.landing_id} landed on {self._branch} as {each.landed_as[:12]}")
        self._told = ""

    def _wait_for(self, lease: HeldLease, failure: Failure) -> None:
        self._changes.note_wait(self._name, lease, failure.message)
        if self._told != failure.message:
            self._tell(f"waiting: {failure.message}")
            self._told = failure.message

    def _move(self, intent: PublishIntent) -> Move:
        return Move(intent.intent_id, self._branch, intent.old, intent.new)

    def _require_clear(self, intent: PublishIntent) -> None:
        """1. The checkout that has the target could follow."""
        if intent.old == intent.new:
            return
        found = following.followers(self._git, self._branch)
        for each in _at_most_one(found, self._branch):
            with self._checkout_locked(each) as private:
                following.require_clear(self._git, each, self._move(intent), private)

    def _swap(self, intent: PublishIntent) -> bool:
        """3 to 7. Move the branch, and the checkout that has it; False if the branch is not where it was."""
        if intent.old == intent.new:
            return True
        move = self._move(intent)
        found = following.followers(self._git, self._branch)
        for each in _at_most_one(found, self._branch):
            with self._checkout_locked(each) as private:

                def swap(top: Path = each.top) -> bool:
                    return landing.swap(self._git, self._branch, move.old, move.new, top)

                return following.follow(self._git, each, move, private, swap)
        if not landing.swap(self._git, self._branch, move.old, move.new):
            return False
        self._catch_up(intent)  # somebody may have switched to the branch just then
        return True

    def _catch_up(self, intent: PublishIntent) -> None:
        for each in following.followers(self._git, self._branch):
            if not each.is_rebasing:
                with contextlib.suppress(CheckoutInTheWay), self._checkout_locked(each) as private:
                    following.catch_up(self._git, each, self._move(intent), private)

    @contextlib.contextmanager
    def _checkout_locked(self, follower: Follower) -> Iterator[Path]:
        """Hold the flock of a checkout for the block; the value is a path for a private index. A git that was started
        under the lock holds it too, so a lock that can be acquired has no process left that it was for."""
        name = f"landing-{follower.git_id or MAIN}"
        make_directories(self._context.paths.guards)
        make_directories(self._home.paths.indexes)
        lock = FileLocker(follow_links=False).try_lock_exclusive(self._context.paths.guards / f"{name}.lock")
        if lock is None:
            message = f"another process is bringing {follower.top} along, or was stopped while it did"
            raise CheckoutInTheWay(message, path=str(follower.top))
        with lock:
            with Directory.open(self._home.paths.indexes) as directory:
                for each in directory.names():
                    if each.startswith(f"{name}."):
                        durable.remove_in(directory, each, durable=False)  # of a dead process
            yield self._home.paths.indexes / f"{name}.{durable.new_mark()}"

    # --- Recovery ----------------------------------------------------------------------------------

    def recover(self, lease: HeldLease) -> None:
        """Finish what another process began, from the intent and the branch alone."""
        target = self._changes.target(self._name)
        if target is None:
            return
        if target.intent is not None:
            self._recover_intent(lease, target.intent)
        if target.void:
            self._recover_void(target)

    def _recover_intent(self, lease: HeldLease, intent: PublishIntent) -> None:
        tip = self._target.tip()
        if landing.is_contained(self._git, intent.new, tip):
            self._catch_up(intent)
            self._finish(intent)
            return
        try:
            if tip == intent.old and self._swap(intent):
                self._finish(intent)
                return
            for each in following.followers(self._git, self._branch):
                with self._checkout_locked(each) as private:
                    following.retreat(self._git, each, self._move(intent), private)
        except (CheckoutInTheWay, GitFailed) as failure:
            self._changes.give_up(self._name, intent, lease, failure.message)
            return
        self._changes.give_up(self._name, intent, lease, "")

    def _recover_void(self, target: LandingTarget) -> None:
        """A process that was stopped may have moved the branch after its intent had been given up."""
        tip = self._target.tip()
        for each in target.void:
            if landing.is_contained(self._git, each.new, tip):
                self._catch_up(each)
                self._finish(each)

    def _sweep(self) -> None:
        """Delete the references of entries that have landed, or that were never queued. A process that is about to
        queue one has a scratch directory of its id: so references are read first, then scratch directories, then
        entries."""
        found = landing.kept(self._git)
        queueing = {each.scratch_id for each in in_use(self._context.paths)}
        gone = [(each, commit) for each, commit in found.items() if each not in queueing and self._is_over(each)]
        with contextlib.suppress(GitFailed):  # another process deletes them too
            landing.forget(self._git, gone)
            landing.drop_candidates(self._git, self._name)

    def _is_over(self, landing_id: str) -> bool:
        try:
            return self._changes.landing(landing_id).state is LandingState.LANDED
        except NotFound:
            return True


def _at_most_one(found: list[Follower], branch: str) -> list[Follower]:
    if len(found) > 1:
        names = ", ".join(str(each.top) for each in found)
        hint = "Switch all but one of them to another branch."
        raise CheckoutInTheWay(f"{branch} is checked out in several worktrees: {names}", hint=hint, path=names)
    return found
