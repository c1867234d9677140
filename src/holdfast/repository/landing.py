"""Landing: freezing the work of a worktree, queueing it for a branch, and helping to drain the queue.

    landings = Landings(repository, actor="agent:alice")
    entry = landings.enqueue("issue-4f1c", proof, LandOptions(issue_id=issue.id, claim=claim.id))
    entry = landings.wait(entry.landing_id)          # landed, conflict, failed or withdrawn

There is no daemon: processes that wait for an entry drain the queue. `docs/decisions/0014-landing.md` has the protocol.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import (
    Ambiguous,
    CheckoutInTheWay,
    Failure,
    FencingMismatch,
    LandingConflict,
    LandingFailed,
    LandingPending,
    LandingWithdrawn,
    LockConflict,
    LockExpired,
    LockNotHeld,
    LockTimeout,
    NotFound,
    Refused,
)
from holdfast.fs.directory import make_directories
from holdfast.fs.names import shortened
from holdfast.git import landing as frozen
from holdfast.git import transfer
from holdfast.git import worktrees as linked
from holdfast.git.contents import commit_tree
from holdfast.git.current import read_again
from holdfast.git.following import Move, followers, require_clear
from holdfast.git.isolated import is_isolated
from holdfast.git.merging import merge
from holdfast.git.snapshots import GitSource
from holdfast.issues.model import ClaimId, Issue
from holdfast.issues.scopes import outside_scope
from holdfast.leases.service import OWN_TTL, HeldLease
from holdfast.repository.conflict_cache import LOOK
from holdfast.repository.context import MAIN, Proof, check_early
from holdfast.repository.git_home import GitHome
from holdfast.repository.lander import Lander
from holdfast.repository.landing_changes import LandingChanges, NewLanding, how_to_resolve
from holdfast.repository.landing_publish import Tell
from holdfast.repository.landing_records import (
    LANDINGS,
    TARGETS,
    Landing,
    LandingState,
    LandingStyle,
    LandingTarget,
    lease_of,
    new_landing_id,
)
from holdfast.repository.landing_target import (
    LandingBranch,
    default_branch,
    default_remote,
    landing_branch,
    remote_of,
    start_of_work,
    tip_to_start_from,
)
from holdfast.repository.payloads import scratch
from holdfast.repository.repository import Repository
from holdfast.repository.settings import read_settings

_FIRST_PAUSE, _LAST_PAUSE = 0.2, 2.0  # between two attempts while something is in the way: no event reports its end
_LONGEST_TITLE = 200
_MOST_NAMED = 5
_ISSUE = "issue-"  # prefix of the worktree of an issue


class LandOptions(NamedTuple):
    """Options of `Landings.enqueue`."""

    branch: str | None = None  # None: the branch that is checked out in the main checkout
    issue_id: str | None = None  # None: the issue that the worktree is named after, if any
    claim: ClaimId | None = None
    style: LandingStyle = LandingStyle.MERGE
    priority: int = 0
    remote: str | None = None  # land on the branch of this remote; None: on the local branch


class Preview(NamedTuple):
    """A preview of a landing: the current commit, whether uncommitted work would be added to it, the paths that
    would conflict with the branch, the number of entries ahead, what the work would wait for, and whether the branch
    has all of it already."""

    branch: str
    commit: str | None
    has_uncommitted: bool
    conflicts: tuple[str, ...]
    ahead: int
    waits_for: str
    is_there: bool


class Landings:
    """The landing queues of one repository, in the name of one actor."""

    def __init__(self, repository: Repository, *, actor: str, tell: Tell = lambda text: None) -> None:
        home = repository.context.home
        if not isinstance(home, GitHome):
            hint = "Landing needs a repository in a git checkout: run 'holdfast init' in one."
            raise Refused("this repository is not in a git checkout, so there is no branch to land on", hint=hint)
        self._repository = repository
        self._context = repository.context
        self.git = home.git
        self._home = home
        self.tell = tell
        self.changes = LandingChanges(repository.context, actor=actor)

    # --- Reading -----------------------------------------------------------------------------------

    def targets(self) -> list[LandingTarget]:
        return [document.record for _, document in self._context.store.scan(TARGETS)]

    def queued(self) -> list[Landing]:
        """The entries without an outcome, by target, in the order of arrival within a priority."""
        return [each for target in self.targets() for each in sorted(self.changes.queued(target), key=Landing.order)]

    def all(self) -> list[Landing]:
        """All entries, the newest last."""
        found = [document.record for _, document in self._context.store.scan(LANDINGS)]
        return sorted(found, key=lambda each: (each.queued_at, each.sequence))

    def find(self, text: str) -> Landing:
        """The entry whose id begins with `text`; raises `Ambiguous` or `NotFound`."""
        matches = [name for name, _ in self._context.store.scan(LANDINGS) if name.startswith(text)] if text else []
        if len(matches) > 1:
            raise Ambiguous(text, matches)
        return self.changes.landing(matches[0] if matches else text or "none")

    def waits_for(self, landing: Landing) -> str:
        """The cause for which a queued entry waits, as text for people; empty if it has an outcome or can land now."""
        target = self.changes.target(landing.target)
        if not landing.is_open or target is None:
            return ""
        if landing.issue_id is not None and (waiting := self._open_dependencies(landing.issue_id)):
            return f"its issue waits for {', '.join(each[:8] for each in waiting)}"
        return target.waits_for

    def _open_dependencies(self, issue_id: str) -> list[str]:
        from holdfast.issues import rules

        lookup = self.changes.tracker.transactions.lookup
        issue = lookup(issue_id)
        return [] if issue is None else rules.open_dependencies(issue, lookup)

    def default_branch(self) -> str:
        """The branch that is checked out in the main checkout."""
        return default_branch(self._home)

    def default_remote(self) -> str | None:
        """The remote of the setting `land.push`, or what several clones have in common; None: work lands here."""
        return default_remote(self._home, self._context.store)

    def target(self, options: LandOptions) -> LandingBranch:
        """The branch that work with these options starts from and lands on; raises `Refused` or `NotFound`."""
        return landing_branch(self._home, self._context.store, options.branch, options.remote)

    def start(self, options: LandOptions | None = None) -> str | None:
        """The commit that new work starts from: the tip of the branch that it is to land on, with these options or by
        default. None: what is checked out in the main checkout."""
        if options is None:
            return start_of_work(self._home, self._context.store)
        return tip_to_start_from(self.target(options))

    # --- Queueing ----------------------------------------------------------------------------------

    def enqueue(self, worktree: str, proof: Proof | None, options: LandOptions) -> Landing:
        """Commit the uncommitted work of a worktree, and queue the commit. An exclusive worktree needs its lease.

        Calling it again for the same commit returns the queued entry. Raises `Refused` if the worktree has unresolved
        conflicts or has the target itself checked out, and the failure of a claim if somebody else has the issue.
        """
        target, issue = self.target(options), self._issue(worktree, options.issue_id)
        self._check_apart(worktree, target.branch)
        commit = self._commit(worktree, proof, issue, target)
        title = issue.title if issue else self._subject(commit)
        landing = Landing(
            landing_id=new_landing_id(),
            target=target.name,
            branch=target.branch,
            commit=commit,
            sequence=0,
            queued_at="",
            worktree_id=worktree,
            issue_id=issue.id if issue else None,
            title=shortened(title, _LONGEST_TITLE),
            style=options.style,
            priority=options.priority,
            gates=tuple(self._gates(issue)) if issue else (),
            actor=self.changes.actor,
            remote=options.remote or "",
        )
        with scratch(self._context, "land", scratch_id=landing.landing_id):
            frozen.keep(self.git, landing.landing_id, commit)
            if target.remote is not None:
                transfer.push_ref(self.git, target.remote, f"{frozen.FROZEN}{landing.landing_id}", commit)
            entry = None
            try:
                entry = self.changes.enqueue(NewLanding(landing, options.claim, proof))
            finally:
                if entry is None or entry.landing_id != landing.landing_id:
                    frozen.forget(self.git, [(landing.landing_id, commit)])
        return entry

    def _check_scope(
        self, issue: Issue | None, target: LandingBranch, commit: str, *, objects: Path | None = None
    ) -> None:
        """Raise `Refused` if the work changes paths that its issue does not touch, and the project forbids that."""
        if issue is None or not issue.touches or not read_settings(self._repository.root).enforce_touches:
            return
        words = "diff", "--name-only", "-z", "--no-renames", f"{target.tip()}...{commit}"
        changed = [os.fsdecode(each) for each in self.git.run(*words, objects=objects).split(b"\0") if each]
        if outside := outside_scope(changed, issue.touches):
            names = ", ".join(outside[:_MOST_NAMED]) + (", ..." if len(outside) > _MOST_NAMED else "")
            message = f"the work changes paths that its issue {issue.id[:8]} does not touch: {names}"
            allow = f"'holdfast issue update {issue.id[:8]} --touches GLOB'"
            hint = f"Undo these changes, or let the issue touch the paths: {allow}."
            raise Refused(message, hint=hint, issue_id=issue.id, paths=outside)

    def push_beside(self, worktree: str, proof: Proof | None, options: LandOptions) -> tuple[str, str]:
        """Push the work, merged with the tip of a branch that may not be pushed to, as a separate branch. Returns the
        name of that branch and its commit. Queues nothing, and does not change the issue."""
        target = self.target(options._replace(remote=options.remote or "origin"))
        branch, remote, beside = target.branch, target.remote, f"holdfast/{worktree}"
        assert remote is not None
        issue = self._issue(worktree, options.issue_id)
        commit, tip = self._commit(worktree, proof, issue, target), target.tip()
        addition = frozen.FrozenWork(
            commit, self._message(worktree, issue), squash=options.style is LandingStyle.SQUASH
        )
        added = frozen.add(self.git, tip, frozen.tree_of(self.git, tip), addition, frozen.author_of(self.git))
        if added.tip is None:
            conflicts = added.merged.conflicts
            message = f"{worktree} conflicts with {branch} in {', '.join(conflicts[:_MOST_NAMED])}"
            raise _conflict(message, f"{worktree} --via-branch", branch, tip, remote.name, conflicts)
        transfer.push_ref(self.git, remote, f"refs/heads/{beside}", added.tip)
        return beside, added.tip

    def _commit(self, worktree: str, proof: Proof | None, issue: Issue | None, target: LandingBranch) -> str:
        """Commit the uncommitted work, check it against the scope of the issue, and return the commit."""
        check_early(self._context, worktree, proof)
        self._home.fetch_work(worktree)
        path = self._repository.path(worktree)
        self._check_isolated(worktree, path)
        message, author = self._message(worktree, issue), frozen.author_of(self.git, path)
        commit = frozen.commit_work(self.git, path, message, author)
        self._check_scope(issue, target, commit)
        return commit

    def _check_isolated(self, worktree: str, path: Path) -> None:
        if is_isolated(path) and (names := self._home.uncommitted(worktree)):
            hint = "Commit them in that worktree: its own repository would not have a commit that is made here."
            raise Refused(f"{worktree} is isolated, and has uncommitted changes: {names}", hint=hint, path=str(path))

    def _check_apart(self, worktree: str, branch: str) -> None:
        if linked.current_branch(self.git, self._repository.path(worktree)) == branch:
            message = f"{worktree} has {branch} itself checked out: there is nothing to land"
            raise Refused(message, hint="Name the worktree whose work is to land, or another branch: --into.")

    def issue_of(self, worktree: str, issue_id: str | None) -> str | None:
        """The id of the issue that a landing finishes: `issue_id`, or the issue that the worktree is named after."""
        issue = self._issue(worktree, issue_id)
        return None if issue is None else issue.id

    def require_issues(self) -> None:
        """Raise `Refused` unless the issues are in the repository's store: one transaction must finish them."""
        if not self.changes.has_issues():
            message = "this repository keeps no issues, so a landing cannot finish any"
            hint = "Create a tracker: 'holdfast issue init'. Or land the worktree without its issue."
            raise Refused(message, hint=hint)

    def _issue(self, worktree: str, issue_id: str | None) -> Issue | None:
        has_issues = self.changes.has_issues()
        tracker = self.changes.tracker
        if issue_id is not None:
            self.require_issues()
            return tracker.issue(tracker.find_id(issue_id))
        if has_issues and worktree.startswith(_ISSUE):
            name = worktree.removeprefix(_ISSUE).removesuffix(f"-{self._home.paths.main}")
            with contextlib.suppress(NotFound):
                return tracker.issue(tracker.find_id(name))
        return None

    def _gates(self, issue: Issue) -> Iterator[str]:
        """The automatic gates of an issue. Their commands run again on the candidate, whatever their status."""
        defined = self.changes.tracker.gates.all() if issue.gates_required else {}
        for key in issue.gates_required:
            if (gate := defined.get(key)) is not None and gate.checker is not None:
                yield key

    def _message(self, worktree: str, issue: Issue | None) -> str:
        trailers = [f"Holdfast-Issue: {issue.id}"] if issue else []
        trailers.append(f"Holdfast-Worktree: {worktree}")
        subject = shortened(issue.title, _LONGEST_TITLE) if issue else f"Work in {worktree}"
        return f"{subject}\n\n" + "\n".join(trailers) + "\n"

    def _subject(self, commit: str) -> str:
        return self.git.run("log", "-1", "--format=%s", commit).decode(errors="replace").strip()

    def preview(self, worktree: str, options: LandOptions) -> Preview:
        """A preview of `enqueue` and `wait`, which changes nothing. Raises what they would raise at once."""
        place, issue = self.target(options), self._issue(worktree, options.issue_id)
        self._check_apart(worktree, place.branch)
        path, commit = self._repository.path(worktree), self._home.work_commit(worktree)
        is_merging = frozen.require_committable(self.git, path) is not None
        self._check_isolated(worktree, path)
        if commit is None:
            raise Refused(f"{path} has no commit, so there is nothing to land", path=str(path))
        parents = [commit, *([linked.commit_of(self.git, "MERGE_HEAD", path)] if is_merging else [])]
        with scratch(self._context, "land") as room:
            frozen_now, objects = self._as_if_committed(worktree, path, parents, room.path)
            self._check_scope(issue, place, frozen_now, objects=objects)
            tip = place.tip()
            attributes = frozen.attributes_in(self.git, tip, room.path / "attributes")
            merged = merge(self.git, tip, frozen_now, objects=objects, attributes=attributes)
            has_changed = merged.tree not in (None, frozen.tree_of(self.git, tip))
            waits = self._in_the_way(place, tip, f"{merged.tree}", room.path, objects) if has_changed else ""
            in_it = options.style is LandingStyle.SQUASH or frozen.is_contained(self.git, frozen_now, tip)
        target = self.changes.target(place.name)
        others = [each for each in self.changes.queued(target) if each.worktree_id != worktree] if target else []
        ahead = [each for each in others if each.priority >= options.priority]
        if issue is not None:
            self.changes.check_claim(issue.id, options.claim, place.name, worktree)
            if waiting := self._open_dependencies(issue.id):
                waits = f"its issue waits for {', '.join(each[:8] for each in waiting)}"
        waits = waits or (target.waits_for if target is not None and ahead else "")
        is_there, is_new = merged.tree is not None and not has_changed and in_it, frozen_now != commit
        return Preview(place.branch, commit, is_new, merged.conflicts, len(ahead), waits, is_there)

    def _in_the_way(self, place: LandingBranch, tip: str, tree: str, room: Path, objects: Path) -> str:
        """Why the checkout of a local branch could not follow to a tree now; empty if it could."""
        try:
            for each in followers(self.git, place.branch) if place.remote is None else ():
                require_clear(self.git, each, Move("", place.branch, tip, tree), room / "index", objects=objects)
        except CheckoutInTheWay as failure:
            return failure.message
        return ""

    def _as_if_committed(self, worktree: str, path: Path, parents: list[str], room: Path) -> tuple[str, Path]:
        """The commit that `enqueue` would freeze, and the directory in scratch that has its new objects."""
        objects, look = room / "objects", self._home.paths.caches / f"{worktree}{LOOK}"
        for each in (objects, look.parent):
            make_directories(each)
        tree = read_again(GitSource(self.git, path, look, objects), room, parents[0])
        if len(parents) == 1 and tree == frozen.tree_of(self.git, parents[0]):
            return parents[0], objects
        return commit_tree(self.git, tree, parents, objects=objects), objects

    def cancel(self, landing_id: str, reason: str) -> Landing:
        """Withdraw an entry from its queue, and give its claim back. An entry with an outcome is left alone; `Refused`
        if it has landed."""
        import msgspec

        entry = self.changes.landing(landing_id)
        found = self.changes.decide(msgspec.structs.replace(entry, state=LandingState.WITHDRAWN, reason=reason))
        if found.state is LandingState.LANDED:
            hint = f"'git show {(found.landed_as or '')[:12]}' shows it; 'git revert' can take it back."
            raise Refused(f"{landing_id} has landed on {found.branch}, so it cannot be withdrawn", hint=hint)
        return found

    def retry(self, landing_id: str, claim: ClaimId | None) -> Landing:
        """Requeue the commit of an entry that did not land; `NotFound` if its commit is no longer here."""
        entry = self.changes.landing(landing_id)
        if entry.is_open or entry.landed_as is not None:
            return self.changes.requeue(landing_id, claim)
        commit = linked.commit_of(self.git, entry.commit)
        with scratch(self._context, "land", scratch_id=landing_id):  # no sweep deletes the reference meanwhile
            frozen.keep(self.git, landing_id, commit)
            if entry.remote:
                remote = remote_of(self._home, entry.remote)
                transfer.push_ref(self.git, remote, f"{frozen.FROZEN}{landing_id}", commit)
            return self.changes.requeue(landing_id, claim)

    # --- Taking part -------------------------------------------------------------------------------

    def wait(self, landing_id: str, *, wait: float | None = None) -> Landing:
        """Help to drain the queue until an entry has an outcome. Raises `LandingPending` when the time is up; the
        entry stays queued."""
        deadline = math.inf if wait is None else time.monotonic() + wait
        entry = self.changes.landing(landing_id)

        def is_decided() -> bool:
            return not self.changes.landing(landing_id).is_open

        def left() -> float:
            return deadline - time.monotonic()

        pause = _FIRST_PAUSE
        with self._context.store.watch(TARGETS.key(entry.target)) as watch:
            lander = None if is_decided() else self._lander(entry.target)
            while lander is not None and not is_decided():
                lease = self._lease(entry, deadline)
                did = lease is not None and self._work(lander, lease, is_decided, lambda: left() <= 0)
                if left() <= 0 and not is_decided():
                    raise self._pending(self.changes.landing(landing_id))
                pause = _FIRST_PAUSE if did else min(2 * pause, _LAST_PAUSE)
                if lease is not None and not did and not is_decided():
                    watch.wait(max(0.0, min(pause, left())))
        return self.changes.landing(landing_id)

    def work_off(self, branch: str | None = None) -> None:
        """Drain the queue of a branch, or of every branch, as far as possible now. A branch that nothing can land on
        does not keep the others waiting: its failure is raised at the end."""
        failures: list[Failure] = []
        for target in filter(self._is_here, self.targets()):
            if branch in (None, target.branch) and (target.queue or target.intent is not None):
                try:
                    lander, name = self._lander(target.name), lease_of(target.name)
                    lease = self._repository.lease(name=name, ttl=OWN_TTL, wait=None, purpose="landing")
                    self._work(lander, lease, lambda: False, lambda: False)
                except Failure as failure:
                    failures.append(failure)
                    self.tell(f"nothing lands on {target.branch}: {failure.message}")
        if failures:
            raise failures[0]

    def help_out(self, branch: str) -> None:
        """Drain what a killed process may have left in the queue of a branch, unless another process is doing so."""
        for target in filter(self._is_here, self.targets()):
            if target.branch == branch and (target.queue or target.intent is not None):
                with contextlib.suppress(LockConflict):
                    lease = self._repository.lease(name=lease_of(target.name), ttl=OWN_TTL, purpose="landing")
                    self._work(self._lander(target.name), lease, lambda: False, lambda: False)

    def _is_here(self, target: LandingTarget) -> bool:
        """Whether this clone can land on a target. Without a remote, it is a branch of the clone `main`."""
        return bool(target.remote) or self._home.paths.main == MAIN

    def _work(self, lander: Lander, lease: HeldLease, until: Callable[[], bool], is_late: Callable[[], bool]) -> bool:
        """Drain the queue under a lease; return whether anything was done or another process has taken over."""
        try:
            with lease:
                return lander.work(lease, until, is_late)
        except (LockNotHeld, LockExpired, FencingMismatch):
            return True

    def _lander(self, name: str) -> Lander:
        target = self.changes.target(name)
        if target is None:
            raise NotFound(f"nothing was ever queued for {name}", target=name)
        if not self._is_here(target):
            raise Refused(f"{target.branch} is a branch of the clone {MAIN}", hint=f"Run it in the clone {MAIN}.")
        return Lander(self._repository, self.changes, target, tell=self.tell)

    def _lease(self, entry: Landing, deadline: float) -> HeldLease | None:
        """The landing lease; None if the entry got its outcome first, or the time is up."""
        name, purpose = lease_of(entry.target), f"landing {entry.landing_id}"
        with contextlib.suppress(LockConflict):
            return self._repository.lease(name=name, ttl=OWN_TTL, purpose=purpose)
        left = None if deadline == math.inf else max(0.001, deadline - time.monotonic())
        with self._decided(entry.landing_id) as decided, contextlib.suppress(LockTimeout):
            return self._repository.lease(name=name, ttl=OWN_TTL, wait=left, purpose=purpose, cancelled=decided)
        return None

    @contextlib.contextmanager
    def _decided(self, landing_id: str) -> Iterator[threading.Event]:
        """An event that is set when an entry has an outcome: another process may land it."""
        decided, over = threading.Event(), threading.Event()

        def look() -> None:
            with contextlib.suppress(Failure), self._context.store.watch(LANDINGS.key(landing_id)) as watch:
                while not over.is_set():
                    if not self.changes.landing(landing_id).is_open:
                        decided.set()
                        return
                    watch.wait(_LAST_PAUSE)

        threading.Thread(target=look, name="holdfast-landing", daemon=True).start()
        try:
            yield decided
        finally:
            over.set()

    def _pending(self, entry: Landing) -> LandingPending:
        why = self.waits_for(entry)
        message = f"{entry.landing_id} is still queued for {entry.branch}{f': {why}' if why else ''}"
        return LandingPending(message, landing=entry.landing_id, branch=entry.branch, waits_for=why)


def require_landed(entry: Landing) -> Landing:
    """The entry, if it has landed; else raise the failure that says why it has not."""
    facts = {"landing": entry.landing_id, "reason": entry.reason}
    work, why = entry.worktree_id or entry.commit[:12], f" ({entry.reason})" if entry.reason else ""
    match entry.state:
        case LandingState.CONFLICT:
            paths = ", ".join(entry.conflicts[:_MOST_NAMED]) + (", ..." if len(entry.conflicts) > _MOST_NAMED else "")
            message, against = f"{work} conflicts with {entry.branch} in {paths}{why}", entry.against or ""
            raise _conflict(message, work, entry.branch, against, entry.remote, entry.conflicts, **facts)
        case LandingState.FAILED:
            log = f"'holdfast landing log {entry.landing_id}' shows the output of the check."
            raise LandingFailed(
                f"{work} did not pass the checks on top of {entry.branch}{why}",
                hint=f"{log} Fix the work and land it again: 'holdfast land {work}'.",
                branch=entry.branch,
                **facts,
                log=entry.log,
            )
        case LandingState.WITHDRAWN:
            message = f"{work} was withdrawn from the queue of {entry.branch}{why}"
            hint = f"To queue it again: 'holdfast landing retry {entry.landing_id}'."
            raise LandingWithdrawn(message, hint=hint, branch=entry.branch, **facts)
    return entry


def _conflict(
    message: str, work: str, branch: str, against: str, remote: str, conflicts: tuple[str, ...], **facts: str
) -> LandingConflict:
    hint = f"{how_to_resolve(branch, against, remote)} Then land again: 'holdfast land {work}'."
    return LandingConflict(message, hint=hint, branch=branch, against=against, conflicts=list(conflicts), **facts)
