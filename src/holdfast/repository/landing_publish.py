"""Publishing a candidate, and finishing what another process began. The steps are those of docs/decisions/0014.

1. Find the checkout that has the target; if it cannot follow, nothing is done.
2. Transaction 1: the intent.
3. to 7. The checkout follows while git moves the branch by compare-and-swap: **the commit point** (`git.following`).
8. Transaction 2: the entries have landed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from holdfast.clock import format_instant
from holdfast.errors import Changed, CheckoutInTheWay, Failure, GitFailed, NotFound
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.git import following, landing, transfer
from holdfast.git import worktrees as linked
from holdfast.git.following import Follower, Move
from holdfast.leases.service import HeldLease
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.kernel_locks import find_holders
from holdfast.repository.context import MAIN, WORKTREES, RepositoryContext
from holdfast.repository.git_home import GitHome
from holdfast.repository.landing_candidates import Chain
from holdfast.repository.landing_changes import LandingChanges
from holdfast.repository.landing_records import (
    IntentEntry,
    Landing,
    LandingState,
    LandingTarget,
    PublishIntent,
    new_landing_id,
)
from holdfast.repository.landing_target import LandingBranch
from holdfast.repository.payloads import in_use

Tell = Callable[[str], object]


class Publisher:
    """Publishes candidates of one target. It needs the landing lease, whose token transaction 1 checks."""

    def __init__(self, context: RepositoryContext, changes: LandingChanges, target: LandingBranch, tell: Tell) -> None:
        assert isinstance(context.home, GitHome)
        self._context, self._home, self._git = context, context.home, context.home.git
        self._changes = changes
        self._name, self._branch, self._target = target.name, target.branch, target
        self._tell = tell
        self._told = ""
        self._is_unfollowed = False  # whether no checkout had the branch when it moved last

    def publish(self, lease: HeldLease, chain: Chain, length: int, flaky: Sequence[str] = ()) -> bool:
        """Publish the first `length` entries of a chain. Returns False if a checkout is in the way, and True if they
        have landed or if the candidate must be built again because something has changed."""
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
        except CheckoutInTheWay as failure:  # nothing was touched; any other failure is left to recovery
            self._changes.give_up(self._name, intent, lease, failure.message)
            self._wait_for(lease, failure)
            return False
        if not swapped:
            self._changes.give_up(self._name, intent, lease, "")
            return True
        self._finish(intent)  # 8
        if self._is_unfollowed:  # git changes the index first, and HEAD a moment later
            self._catch_up(self._move(intent))
        chain.advance(length)
        return True

    def _finish(self, intent: PublishIntent) -> None:
        if self._changes.finish(self._name, intent):
            for each in intent.entries:
                flaky = each.landing_id in intent.flaky
                how = f"; a check failed first ('holdfast landing log {each.landing_id} --all')" if flaky else ""
                self._tell(f"{each.landing_id} landed on {self._branch} as {each.landed_as[:12]}{how}")
        self._told = ""

    def _wait_for(self, lease: HeldLease, failure: Failure) -> None:
        self._changes.note_wait(self._name, lease, failure.message)
        if self._told != failure.message:
            self._tell(f"waiting: {failure.message}")
            self._told = failure.message

    def _move(self, intent: PublishIntent) -> Move:
        return Move(intent.intent_id, self._branch, intent.old, intent.new)

    def _require_clear(self, intent: PublishIntent) -> None:
        """1. Raise `CheckoutInTheWay` unless the checkout that has the target can follow."""
        if intent.old == intent.new or self._target.remote is not None:
            return
        found = following.followers(self._git, self._branch)
        for each in _at_most_one(found, self._branch):
            with self._checkout_locked(each) as private:
                following.require_clear(self._git, each, self._move(intent), private)

    def _swap(self, intent: PublishIntent) -> bool:
        """3 to 7. Move the branch, and the checkout that has it; return False if the branch has moved meanwhile."""
        if intent.old == intent.new:
            return True
        if self._target.remote is not None:
            with self._waiting_for_git():
                if not self._target.push(intent.old, intent.new):
                    return False
            self._follow_remote(intent)
            return True
        return self._swap_here(self._move(intent))

    def _swap_here(self, move: Move) -> bool:
        found = following.followers(self._git, self._branch)
        self._is_unfollowed = not found
        for each in _at_most_one(found, self._branch):
            with self._checkout_locked(each) as private:

                def swap(top: Path = each.top) -> bool:
                    return landing.swap(self._git, self._branch, move.old, move.new, top)

                return following.follow(self._git, each, move, private, swap)
        with self._waiting_for_git():
            if not landing.swap(self._git, self._branch, move.old, move.new):
                return False
        following.wait_for_switches(self._git)  # somebody may be switching to the branch just now
        self._catch_up(move)
        return True

    @contextlib.contextmanager
    def _waiting_for_git(self) -> Iterator[None]:
        """Raise `CheckoutInTheWay`, so that callers wait, if git cannot move the branch; no checkout was touched."""
        try:
            yield
        except GitFailed as failure:
            message = f"{self._branch} cannot be moved: {failure.message}"
            if self._target.remote is not None:
                message += ". If the remote forbids it: 'holdfast land WORKTREE --via-branch'"
            raise CheckoutInTheWay(message, hint=failure.hint, path=str(self._git.common)) from failure

    def _follow_remote(self, intent: PublishIntent) -> None:
        """Let the local branch follow the remote one if nothing is in the way; otherwise, a person has to pull."""
        if (remote := self._target.remote) is not None:
            landing.follow_push(self._git, remote.name, self._branch, intent.new)
        here = landing.tip_of(self._git, self._branch)
        if here is None or here == intent.new or not landing.is_contained(self._git, here, intent.new):
            return
        try:
            self._swap_here(self._move(intent)._replace(old=here))
        except (CheckoutInTheWay, GitFailed) as failure:
            self._tell(f"the local {self._branch} stays behind: {failure.message}")

    def _catch_up(self, move: Move) -> None:
        for each in following.followers(self._git, self._branch, move.intent_id):
            if not each.is_rebasing:
                with contextlib.suppress(CheckoutInTheWay), self._checkout_locked(each) as private:
                    following.catch_up(self._git, each, move, private)

    @contextlib.contextmanager
    def _checkout_locked(self, follower: Follower) -> Iterator[Path]:
        """Hold the file lock of a checkout for the block, and yield a path for a private index. A git that was started
        under the lock holds it too: once the lock can be acquired, none of them is left."""
        name = f"landing-{follower.git_id or MAIN}"
        make_directories(self._context.paths.guards)
        make_directories(self._home.paths.indexes)
        path = self._context.paths.guards / f"{name}.lock"
        lock = FileLocker(follow_links=False).try_lock_exclusive(path)
        if lock is None:
            raise _occupied(follower.top, path)
        with lock:
            with Directory.open(self._home.paths.indexes) as directory:
                for each in directory.names():
                    if each.startswith(f"{name}."):
                        durable.remove_in(directory, each, durable=False)  # left by a dead process
            yield self._home.paths.indexes / f"{name}.{durable.new_mark()}"

    # --- Recovery ----------------------------------------------------------------------------------

    def recover(self, lease: HeldLease) -> None:
        """Finish publishes that another process began, from the intents and the branch alone."""
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
            self._bring_along(intent)
            self._finish(intent)
            return
        try:
            self._retreat(intent, only_switched=tip == intent.old)
            if tip == intent.old and self._swap(intent):
                self._finish(intent)
                return
        except CheckoutInTheWay as failure:
            self._changes.give_up(self._name, intent, lease, failure.message)
            return
        self._changes.give_up(self._name, intent, lease, "")

    def _retreat(self, intent: PublishIntent, *, only_switched: bool) -> None:
        """Undo what a dead process began in checkouts, or only in those that have since switched to another branch."""
        for each in following.followers(self._git, self._branch, intent.intent_id):
            if not only_switched or linked.current_branch(self._git, each.top) != self._branch:
                with self._checkout_locked(each) as private:
                    following.retreat(self._git, each, self._move(intent), private)

    def _recover_void(self, target: LandingTarget) -> None:
        """Finish void intents that are on the branch: a stopped process may move it after its intent was given up."""
        tip = self._target.tip()
        for each in target.void:
            if landing.is_contained(self._git, each.new, tip):
                self._bring_along(each)
                self._finish(each)

    def _bring_along(self, intent: PublishIntent) -> None:
        """Do what follows the commit point: let the checkouts, or the local branch, follow."""
        if self._target.remote is None:
            self._catch_up(self._move(intent))
        else:
            self._follow_remote(intent)

    def sweep(self) -> None:
        """Delete the references of entries that nobody will land or retry, or that were never queued. A process that is
        about to queue an entry has a scratch directory with its id, so references are read first, then scratch
        directories, then entries."""
        found = landing.kept(self._git)
        queueing = {each.scratch_id for each in in_use(self._context.paths)}
        known = {each: self._entry(each) for each in found if each not in queueing}
        gone = {each: entry for each, entry in known.items() if entry is None or self._is_over(entry, known.values())}
        with contextlib.suppress(GitFailed):  # another process is deleting them too
            landing.forget(self._git, [(each, found[each]) for each in gone])
            landing.drop_candidates(self._git, self._name)
        remote = self._target.remote
        for landing_id, entry in gone.items():
            if remote is not None and (entry is None or entry.remote == remote.name):
                with contextlib.suppress(GitFailed):  # the machine that has landed it did so already
                    transfer.push_ref(self._git, remote, f"{landing.FROZEN}{landing_id}", "")

    def _entry(self, landing_id: str) -> Landing | None:
        try:
            return self._changes.landing(landing_id)
        except NotFound:
            return None

    def _is_over(self, entry: Landing, others: Collection[Landing | None]) -> bool:
        """Whether an entry has landed, or has another outcome while its issue is finished, its worktree is gone, or a
        newer entry has the work. Until then, it may be queued again."""
        if entry.state is LandingState.LANDED or entry.is_open:
            return not entry.is_open
        if entry.issue_id is not None and self._changes.is_finished(entry.issue_id):
            return True
        if entry.worktree_id is None:
            return False
        of_same = [each for each in others if each is not None and each.worktree_id == entry.worktree_id]
        is_gone = self._context.store.read(WORKTREES.key(entry.worktree_id)) is None
        return is_gone or any(each.queued_at > entry.queued_at for each in of_same)


def _occupied(top: Path, lock: Path) -> CheckoutInTheWay:
    pids = [str(each.pid) for each in find_holders(lock) or () if not each.waiting and each.pid is not None]
    who = f"process {pids[0]}" if pids else "another process"
    hint = f"It takes a moment. If it was stopped, continue it ('kill -CONT {pids[0] if pids else 'PID'}') or end it."
    return CheckoutInTheWay(f"{who} is updating {top}", hint=hint, path=str(top))


def _at_most_one(found: list[Follower], branch: str) -> list[Follower]:
    if len(found) > 1:
        names = ", ".join(str(each.top) for each in found)
        hint = "Switch all but one of them to another branch."
        raise CheckoutInTheWay(f"{branch} is checked out in several worktrees: {names}", hint=hint, path=names)
    return found
