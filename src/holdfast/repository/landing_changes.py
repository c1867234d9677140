"""The transactions of landing. Each decides with a pure function, and commits all or nothing.

enqueue   the entry, its position in the queue, the claim that is held for it; under the token of the worktree's lease
begin     transaction 1 of a publish: the intent; under the token of the landing lease
finish    transaction 2: entries landed, issues done, claims ended, events; needs the intent, not the lease
give_up   the intent is void, but remembered; its entries stay queued
decide    an entry has an outcome other than `landed`, and its claim is given back
requeue   an entry with such an outcome is queued again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.errors import Changed, NotFound, Refused
from holdfast.issues import landing as issue_landing
from holdfast.issues import rules as issue_rules
from holdfast.issues.landing import HeldFor, Surroundings, surroundings
from holdfast.issues.model import CLAIMS, INDEX, ClaimId, State
from holdfast.issues.rules import IssueClaimRequest
from holdfast.issues.tracker import Tracker
from holdfast.issues.transactions import Draft, Seen, Transactions
from holdfast.leases import rules as lease_rules
from holdfast.leases.service import COMMAND_TTL, HeldLease
from holdfast.ledger.log import EVENTS as LEDGER
from holdfast.ledger.log import META, checked, stamped
from holdfast.locks.retry import RetryConfig
from holdfast.repository.context import Proof, RepositoryContext, publishing_keys, token_check
from holdfast.repository.landing_records import (
    LANDINGS,
    TARGETS,
    IntentEntry,
    Landing,
    LandingState,
    LandingTarget,
    PublishIntent,
)
from holdfast.store.model import Append, Decision, Key, Stream, View

Result = TypeVar("Result")
_MOST_VOID = 64
_PERSISTENT = RetryConfig(max_attempts=100, initial_delay=0.02, max_delay=0.5)  # an agent's work depends on it


class NewLanding(NamedTuple):
    """An entry to be queued: its record, the claim of its issue if the caller has it, and the proof of its lease."""

    landing: Landing
    claim: ClaimId | None
    proof: Proof | None


class LandingChanges:
    """The transactions of one repository, in the name of one actor."""

    def __init__(self, context: RepositoryContext, *, actor: str) -> None:
        self._context = context
        self._store = context.store
        self.actor = actor
        self.tracker = Tracker(context.store, actor=actor, root=context.paths.root, skew=context.store.skew)

    @property
    def _transactions(self) -> Transactions:
        return self.tracker.transactions

    def has_issues(self) -> bool:
        """Whether the issues are in the store of the repository, so that one transaction can finish them."""
        return self._store.read(INDEX) is not None

    def is_finished(self, issue_id: str) -> bool:
        """Whether an issue is done or rejected, or does not exist."""
        issue = self._transactions.read(issue_id)
        return issue is None or issue.state in (State.DONE, State.REJECTED, State.ARCHIVED)

    # --- Reading -----------------------------------------------------------------------------------

    def target(self, name: str) -> LandingTarget | None:
        document = self._store.read(TARGETS.key(name))
        return None if document is None else document.record

    def landing(self, landing_id: str) -> Landing:
        document = self._store.read(LANDINGS.key(landing_id))
        if document is None:
            raise NotFound(f"there is no landing {landing_id}", hint="See 'holdfast landing list --all'.")
        return document.record

    def queued(self, target: LandingTarget) -> list[Landing]:
        """The queued entries of a target."""
        found = [self._store.read(LANDINGS.key(each)) for each in target.queue]
        return [each.record for each in found if each is not None and each.record.is_open]

    def check_claim(self, issue_id: str, claim: ClaimId | None, target: str, worktree: str) -> None:
        """Raise what `enqueue` would raise if somebody else has the issue, or its claim is not in force."""
        transactions = self._transactions
        issue, record, now = transactions.read(issue_id), self.tracker.claims.state(issue_id), transactions.moment()
        if issue is None or issue.state in (*issue_rules.FINISHED, State.GATED):
            return
        held_for = record.claim.held_for if record is not None and record.claim is not None else None
        known = self.target(target)
        if held_for in [
            each.landing_id for each in (self.queued(known) if known else []) if each.worktree_id == worktree
        ]:
            return
        if claim is not None:
            issue_rules.in_force(issue_id, record, now, claim)
        else:
            issue_rules.grant(issue, record, now, self.tracker.claims.request(), transactions.lookup)

    # --- Changing ----------------------------------------------------------------------------------

    def enqueue(self, new: NewLanding) -> Landing:
        """Queue an entry; **commit point**. If the worktree already has an entry in the queue, that entry is returned
        if its commit is the same, and withdrawn if not."""
        landing = new.landing
        request = self.tracker.claims.request(ttl=COMMAND_TTL, purpose=f"landing {landing.landing_id}")
        check = None
        keys: list[Key[Any]] = []
        if landing.worktree_id is not None:
            check = token_check(self._context, landing.worktree_id, new.proof)
            keys = publishing_keys(landing.worktree_id)

        def attempt() -> Landing:
            known = self.target(landing.target)
            before = [each for each in self.queued(known) if _same(each, landing)] if known else []

            def body(draft: Draft) -> Landing:
                if check is not None:
                    check(draft.view, draft.moment.now)
                target = draft.get(TARGETS.key(landing.target))
                if target is not None and not set(target.queue) <= set(known.queue if known else ()):
                    raise Changed("the queue changed meanwhile", target=landing.target)  # perhaps by this worktree
                return self._enqueue(draft, new, target, before, request)

            issue_ids = [each for each in (landing.issue_id, *(e.issue_id for e in before)) if each]
            named = [landing.landing_id, *(each.landing_id for each in before)]
            return self._change(body, landing.target, named, issue_ids, also=keys, dependencies=True)

        return self._transactions.retrying(attempt, _PERSISTENT)

    def _enqueue(
        self,
        draft: Draft,
        new: NewLanding,
        target: LandingTarget | None,
        before: Sequence[Landing],
        request: IssueClaimRequest,
    ) -> Landing:
        landing = new.landing
        target = target or LandingTarget(name=landing.target, branch=landing.branch, remote=landing.remote)
        for each in before:
            if each.commit == landing.commit and each.issue_id == landing.issue_id:
                return each
            if target.intent is not None and each.landing_id in target.intent.ids():
                raise Changed(f"{each.landing_id} is being published", landing=each.landing_id)
        superseded = [each.landing_id for each in before]
        if landing.issue_id is not None:
            held = issue_landing.hold(
                draft, landing.issue_id, new.claim, request, _held(landing, commit=landing.commit), superseded
            )
            landing = msgspec.structs.replace(landing, claim_id=held.claim_id if held else "")
        for each in before:
            gone = _decided(each, draft, LandingState.WITHDRAWN, reason=f"superseded by {landing.landing_id}")
            draft.set(LANDINGS.key(each.landing_id), gone)
        landing = msgspec.structs.replace(landing, sequence=target.sequence + 1, queued_at=draft.at)
        queue = (*target.without(superseded), landing.landing_id)
        draft.set(LANDINGS.key(landing.landing_id), landing)
        draft.set(TARGETS.key(target.name), msgspec.structs.replace(target, sequence=landing.sequence, queue=queue))
        self._audit(draft, "landing_queued", [landing])
        return landing

    def begin(self, name: str, intent: PublishIntent, lease: HeldLease) -> list[Landing]:
        """Transaction 1: write the intent. If entries have lost their claims, withdraw and return those instead, and
        write no intent. Raises `Changed` if the queue has changed."""
        ids = intent.ids()

        def body(draft: Draft) -> list[Landing]:
            self._check_lease(draft, lease)
            target = self._target(draft, name)
            entries = [self._entry(draft, each) for each in ids]
            if target.intent is not None or not all(each.is_open for each in entries):
                raise Changed("the queue changed meanwhile", target=name)
            lost = [(each, why) for each in entries if (why := _lost(draft, each))]
            if lost:
                gone = [self._withdraw(draft, each, why) for each, why in lost]
                self._audit(draft, "landing_withdrawn", gone)
                draft.set(TARGETS.key(name), target.dropping([each.landing_id for each in gone]))
                return gone
            draft.set(TARGETS.key(name), msgspec.structs.replace(target, intent=intent, waits_for=""))
            return []

        issue_ids = [each.issue_id for each in map(self.landing, ids) if each.issue_id]
        return self._change(body, name, ids, issue_ids, also=self._lease_keys(lease))

    def finish(self, name: str, intent: PublishIntent) -> bool:
        """Transaction 2: the branch contains the intent's new tip. Returns False if another process has finished it."""
        ids = intent.ids()
        entries = {each: self.landing(each) for each in ids}
        events = [(each, checked(_ledger_event(entries[each.landing_id], each.landed_as))) for each in intent.entries]
        has_ledger = self._store.read(META) is not None

        def attempt() -> bool:
            around = surroundings(self._transactions, (e.issue_id for e in entries.values() if e.issue_id))

            def body(draft: Draft) -> bool:
                target = self._target(draft, name)
                known = (target.intent, *target.void)
                if not any(each is not None and each.intent_id == intent.intent_id for each in known):
                    return False
                landed = [(each, event) for each, event in events if self._mark_landed(draft, intent, each, around)]
                for _, event in landed if has_ledger else ():
                    draft.append(Append(LEDGER, stamped(event, draft.moment.now)))
                if landed:
                    told = [self._entry(draft, each.landing_id) for each, _ in landed]
                    self._audit(draft, "landing_landed", told, old=intent.old, new=intent.new)
                draft.set(TARGETS.key(name), self._finished(draft, target, intent))
                return True

            target = self.target(name)
            named = [*ids, *(each for void in (target.void if target else ()) for each in void.ids())]
            also: list[Key[Any] | Stream[Any]] = [*around.keys]
            also += [LEDGER] if has_ledger else []
            done = self._change(body, name, named, list(around.each), also=also, seen=around.seen, named=around.named)
            for issue_id, neighbours in around.each.items():
                if (issue := self._transactions.read(issue_id)) is not None:
                    self._transactions.settle_others(neighbours, issue)
            return done

        return self._transactions.retrying(attempt, _PERSISTENT)

    def _mark_landed(self, draft: Draft, intent: PublishIntent, each: IntentEntry, around: Surroundings) -> bool:
        """Mark an entry as landed, and finish its issue; False if it has landed before."""
        entry = self._entry(draft, each.landing_id)
        if entry.state is LandingState.LANDED:
            return False
        flaky = each.landing_id in intent.flaky
        entry = _decided(entry, draft, LandingState.LANDED, landed_as=each.landed_as, flaky=flaky)
        draft.set(LANDINGS.key(entry.landing_id), entry)
        if entry.issue_id in around.each:
            held = _held(entry, commit=each.landed_as)
            issue_landing.finish(draft, around.each[entry.issue_id], entry.claim_id, entry.gates, held)
        return True

    def _finished(self, draft: Draft, target: LandingTarget, intent: PublishIntent) -> LandingTarget:
        current = target.intent
        if current is not None and current.intent_id == intent.intent_id:
            current = None

        def is_over(void: PublishIntent) -> bool:
            found = (draft.get(LANDINGS.key(each)) for each in void.ids())
            return all(each is None or each.state is LandingState.LANDED for each in found)

        void = tuple(each for each in target.void if not is_over(each))
        return msgspec.structs.replace(
            target, queue=target.without(intent.ids()), intent=current, void=void, waits_for=""
        )

    def give_up(self, name: str, intent: PublishIntent, lease: HeldLease, why: str) -> None:
        """Void the intent: the branch has moved elsewhere, or a checkout cannot follow. The entries stay queued."""

        def body(draft: Draft) -> None:
            self._check_lease(draft, lease)
            target = self._target(draft, name)
            if target.intent is None or target.intent.intent_id != intent.intent_id:
                return
            void = (*target.void, target.intent)[-_MOST_VOID:]
            draft.set(TARGETS.key(name), msgspec.structs.replace(target, intent=None, void=void, waits_for=why))

        self._change(body, name, also=self._lease_keys(lease))

    def note_wait(self, name: str, lease: HeldLease, why: str) -> None:
        """Record what the queue waits for."""
        known = self.target(name)
        if known is None or known.waits_for == why:
            return

        def body(draft: Draft) -> None:
            self._check_lease(draft, lease)
            draft.set(TARGETS.key(name), msgspec.structs.replace(self._target(draft, name), waits_for=why))

        self._change(body, name, also=self._lease_keys(lease))

    def decide(self, outcome: Landing, lease: HeldLease | None = None) -> Landing:
        """Record the outcome of an entry, and give its claim back. Without a lease, a person withdraws the entry.

        An earlier outcome stands. Raises `Changed` if the entry is being published.
        """
        name, landing_id = outcome.target, outcome.landing_id

        def body(draft: Draft) -> Landing:
            if lease is not None:
                self._check_lease(draft, lease)
            target, entry = self._target(draft, name), self._entry(draft, landing_id)
            if not entry.is_open:
                return entry
            if target.intent is not None and landing_id in target.intent.ids():
                raise Changed(f"{landing_id} is being published", landing=landing_id)
            decided = msgspec.structs.replace(outcome, decided_at=draft.at)
            draft.set(LANDINGS.key(landing_id), decided)
            draft.set(TARGETS.key(name), target.dropping([landing_id]))
            self._give_back(draft, decided)
            self._audit(draft, f"landing_{decided.state.value}", [decided])
            return decided

        also = self._lease_keys(lease) if lease is not None else []
        return self._change(body, name, [landing_id], [outcome.issue_id] if outcome.issue_id else [], also=also)

    def requeue(self, landing_id: str, claim: ClaimId | None) -> Landing:
        """Queue the same commit again, at the end of the queue."""
        known = self.landing(landing_id)
        request = self.tracker.claims.request(ttl=COMMAND_TTL, purpose=f"landing {landing_id}")

        def attempt() -> Landing:
            def body(draft: Draft) -> Landing:
                target, entry = self._target(draft, known.target), self._entry(draft, landing_id)
                if entry.is_open:
                    return entry
                if entry.state is LandingState.LANDED:
                    hint = "To land newer work of the worktree: 'holdfast land'."
                    raise Refused(f"{landing_id} has landed already", hint=hint, landing=landing_id)
                fresh = Landing(
                    **{name: getattr(entry, name) for name in _KEPT}, sequence=target.sequence + 1, queued_at=draft.at
                )
                if entry.issue_id is not None:
                    held = issue_landing.hold(draft, entry.issue_id, claim, request, _held(entry, commit=entry.commit))
                    fresh = msgspec.structs.replace(fresh, claim_id=held.claim_id if held else "")
                draft.set(LANDINGS.key(landing_id), fresh)
                queue = (*target.queue, landing_id)
                new = msgspec.structs.replace(target, sequence=fresh.sequence, queue=queue)
                draft.set(TARGETS.key(known.target), new)
                self._audit(draft, "landing_queued", [fresh])
                return fresh

            issue_ids = [known.issue_id] if known.issue_id else []
            return self._change(body, known.target, [landing_id], issue_ids, dependencies=True)

        return self._transactions.retrying(attempt, _PERSISTENT)

    # --- Parts -------------------------------------------------------------------------------------

    def _change(
        self,
        body: Callable[[Draft], Result],
        target: str,
        landings: Iterable[str] = (),
        issues: Sequence[str] = (),
        *,
        also: Sequence[Key[Any] | Stream[Any]] = (),
        seen: Seen | None = None,
        named: Sequence[str] = (),
        dependencies: bool = False,
    ) -> Result:
        """One transaction on a target, entries, and issues with their claims. Without issues, it does not touch the
        tracker, which need not exist."""
        keys = [TARGETS.key(target), *map(LANDINGS.key, dict.fromkeys(landings)), *also, self._context.trail.stream]
        if not issues:
            reading = self._transactions.reading()

            def decide(view: View, now: float) -> Decision[Result]:
                draft = Draft(view, reading.at(now), seed=0, actor=self.actor, named=(), evidence={})
                result = body(draft)
                return Decision(draft.changes(), result)

            return self._store.transact(keys, decide).result
        if dependencies:
            seen = Seen({}, {})
            for each in issues:
                around = self._transactions.with_dependencies(self._transactions.need(each))
                seen.issues.update(around.issues)
                seen.broken.update(around.broken)
            named = seen.named()
        claims = [CLAIMS.key(each) for each in issues if CLAIMS.key(each) not in keys]
        return self._transactions.change(body, issues=[*issues, *named], seen=seen, also=[*keys, *claims])

    def _lease_keys(self, lease: HeldLease) -> list[Key[Any]]:
        keys = self._context.leases.of_names().keys(lease.lease.subject)
        return [keys.lease, keys.counter]

    def _check_lease(self, draft: Draft, lease: HeldLease) -> None:
        """The token check of the landing lease, in the transaction that commits."""
        keys = self._context.leases.of_names().keys(lease.lease.subject)
        lease_rules.validate(draft.view, draft.moment, keys, lease.lock_id, lease.token)

    def _target(self, draft: Draft, name: str) -> LandingTarget:
        target = draft.get(TARGETS.key(name))
        if not isinstance(target, LandingTarget):
            raise NotFound(f"nothing is queued for {name}", target=name)
        return target

    def _entry(self, draft: Draft, landing_id: str) -> Landing:
        entry = draft.get(LANDINGS.key(landing_id))
        if not isinstance(entry, Landing):
            raise NotFound(f"there is no landing {landing_id}", landing=landing_id)
        return entry

    def _withdraw(self, draft: Draft, entry: Landing, why: str) -> Landing:
        gone = _decided(entry, draft, LandingState.WITHDRAWN, reason=why)
        draft.set(LANDINGS.key(entry.landing_id), gone)
        self._give_back(draft, gone)
        return gone

    def _give_back(self, draft: Draft, entry: Landing) -> None:
        if entry.issue_id is not None and draft.lookup(entry.issue_id) is not None:
            held = _held(entry, outcome=entry.state.value)
            issue_landing.give_back(draft, entry.issue_id, entry.claim_id, explained(entry), held)

    def _audit(self, draft: Draft, event: str, entries: Sequence[Landing], **facts: object) -> None:
        """Add the transaction's single audit entry."""
        fields = ("landing_id", "commit", "worktree_id", "issue_id", "landed_as", "reason")
        known = [{name: value for name in fields if (value := getattr(each, name))} for each in entries]
        whole = {"branch": entries[0].branch, **facts, "entries": known}
        draft.append(self._context.audit(draft.view, draft.moment.now, event, **whole))


_KEPT = (
    *("landing_id", "target", "branch", "commit", "worktree_id", "issue_id", "title", "style", "priority"),
    *("gates", "actor", "remote"),
)
"""The fields of an entry that stay when it is queued again."""


def explained(entry: Landing) -> str:
    """Why an entry has not landed, for its agent."""
    if entry.state is LandingState.CONFLICT:
        paths = "\n".join(f"  {path}" for path in entry.conflicts[:50])
        return (
            f"The work conflicts with {entry.branch} at {(entry.against or '')[:12]}:\n{paths}\n"
            f"{entry.reason}\n"
            f"{how_to_resolve(entry.branch, entry.against or '', entry.remote)}"
        )
    if entry.state is LandingState.FAILED:
        log = f" 'holdfast landing log {entry.landing_id}' has the output." if entry.log else ""
        return f"The work did not pass the checks on top of {entry.branch}: {entry.reason}.{log}"
    return f"The work was withdrawn from the queue of {entry.branch}: {entry.reason}."


def how_to_resolve(branch: str, against: str, remote: str) -> str:
    """The advice about a conflict. It names the commit, which exists in an isolated worktree too; the branch does not,
    and a local branch may be older than that of the remote."""
    fetch = f" (if git does not know that commit: 'git fetch {remote} {branch}' first)" if remote else ""
    return f"Run 'git merge {against[:12]}' in the worktree{fetch}, resolve the conflicts, test, and commit."


def _same(one: Landing, other: Landing) -> bool:
    """Whether two entries are about the same work."""
    if one.worktree_id is None or other.worktree_id is None:
        return one.worktree_id == other.worktree_id and one.commit == other.commit
    return one.worktree_id == other.worktree_id


def _held(entry: Landing, **facts: object) -> HeldFor:
    return HeldFor(entry.landing_id, {"branch": entry.branch, **facts})


def _decided(entry: Landing, draft: Draft, state: LandingState, **facts: Any) -> Landing:
    return msgspec.structs.replace(entry, state=state, decided_at=draft.at, **facts)


def _lost(draft: Draft, entry: Landing) -> str:
    if entry.issue_id is None:
        return ""
    claim = draft.claim(entry.issue_id)
    return issue_landing.lost_claim(draft.lookup(entry.issue_id), claim, entry.claim_id, entry.landing_id)


def _ledger_event(entry: Landing, landed_as: str) -> dict[str, Any]:
    return {
        "type": "work_landed",
        "landing_id": entry.landing_id,
        "issue_id": entry.issue_id,
        "worktree_id": entry.worktree_id,
        "branch": entry.branch,
        "commit": entry.commit,
        "landed_as": landed_as,
        "actor": entry.actor,
    }
