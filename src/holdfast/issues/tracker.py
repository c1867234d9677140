"""The issue tracker: every operation on issues, each of them atomic.

Readers take no locks. Every change is one store transaction (see `transactions`), decided by the pure
functions of `rules`, and commits its events with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock
from holdfast.errors import AlreadyExists, Changed, IdAmbiguous, NotInitialised, SettingInvalid, VersionMismatch
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.fs.names import checked_actor, is_safe_name
from holdfast.issues import model, rules
from holdfast.issues.index import plan_index_change
from holdfast.issues.model import (
    CLAIMS,
    DEPENDENTS,
    EVENTS,
    GRAPH,
    INDEX,
    ISSUES,
    AnyIssue,
    ClaimId,
    Issue,
    IssueEvent,
    IssueSummary,
    Listed,
    Priority,
    State,
)
from holdfast.issues.reading import TOLERANT_INDEX, find_ids
from holdfast.issues.rules import IssueSet
from holdfast.issues.scopes import checked_touches
from holdfast.issues.transactions import Draft, IssueNeighbours, Seen, Transactions, check_dependents, no_issue
from holdfast.locks.retry import RetryConfig
from holdfast.store.model import Document, Entry, Key, Store, View, newest_first

if TYPE_CHECKING:
    from holdfast.issues.claims import Claiming
    from holdfast.issues.creating import Created, Creating, NewIssue
    from holdfast.issues.dependencies import Dependencies
    from holdfast.issues.gates import Gating


class Keep(Enum):
    """Leaves a field unchanged, where None has a meaning of its own."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP

GIT_FILES = {
    ".jit/.gitignore": b"""\
# Locks, claims and drafts belong to one machine.
*.lock
.*.tmp
/claims/
# These are derived from the issues: 'holdfast issue validate --fix' rebuilds them.
/dependents/
/graph.json
/unlisted.json
""",
    ".jit/.gitattributes": b"""\
# A merge keeps the lines of both branches. If that breaks the index, the next command rebuilds it from the issues.
/events.jsonl merge=union
/index.json merge=union
""",
    ".holdfast/.gitignore": b"""\
# Checkpoints, unfinished commits and settings belong to one machine.
*
""",
}


class Update(NamedTuple):
    """Changes to an issue; unset fields stay. In `context`, None removes a key."""

    title: str | None = None
    description: str | None = None
    priority: Priority | None = None
    state: State | None = None
    assignee: str | Literal[Keep.KEEP] | None = KEEP
    add_labels: tuple[str, ...] = ()
    remove_labels: tuple[str, ...] = ()
    touches: tuple[str, ...] | None = None
    context: Mapping[str, str | None] = {}
    increments: Mapping[str, int] = {}  # added to numbers in the context; a missing one starts at 0

    def applied(self, issue: Issue) -> Issue:
        """The issue with these changes, except the state."""
        added, described = model.checked_labels(self.add_labels), self.description
        labels = [each for each in (*issue.labels, *added) if each not in self.remove_labels]
        context = {k: v for k, v in {**issue.context, **self.context}.items() if v is not None}
        for name, by in self.increments.items():
            context[name] = str(_number(name, context.get(name, "0")) + by)
        assignee = issue.assignee if self.assignee is KEEP else self.assignee
        return msgspec.structs.replace(
            issue,
            title=issue.title if self.title is None else model.checked_title(self.title),
            description=issue.description if described is None else model.checked_description(described),
            priority=issue.priority if self.priority is None else self.priority,
            assignee=None if assignee is None else checked_actor(assignee, "assignee"),
            labels=model.without_repeats(labels),
            touches=issue.touches if self.touches is None else checked_touches(self.touches),
            context=model.checked_context(context),
        )


class Tracker:
    """The issues of one store. `root` is its directory, for which checkers are approved; they run in `checked()`, or
    else in `root`. Each part is loaded on first use: a command needs one or none."""

    def __init__(
        self,
        store: Store,
        *,
        actor: str = "human:unknown",
        root: Path | None = None,
        checked: Callable[[], Path] | None = None,
        retry: RetryConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        skew: float = SKEW,
    ) -> None:
        """`skew` is how far apart the clocks of the store's clients may be."""
        self.store = store
        self.root = root
        self._checked = checked
        self.actor: str = checked_actor(actor)
        self.transactions = Transactions(store, actor=self.actor, retry=retry, clock=clock, skew=skew, root=root)

    @cached_property
    def claims(self) -> Claiming:
        """Claiming issues."""
        from holdfast.issues.claims import Claiming

        return Claiming(self.transactions)

    @cached_property
    def dependencies(self) -> Dependencies:
        """The dependencies between issues."""
        from holdfast.issues.dependencies import Dependencies

        return Dependencies(self.transactions)

    @cached_property
    def gates(self) -> Gating:
        """Gates and their checkers."""
        from holdfast.issues.gates import Gating

        return Gating(self.transactions, self.root, self._checked)

    @cached_property
    def _creating(self) -> Creating:
        from holdfast.issues.creating import Creating

        return Creating(self.transactions)

    def initialise(self) -> bool:
        """Create an empty tracker; False if one already exists. A tracker in files gets files for git, too."""
        with contextlib.suppress(NotInitialised):
            self.transactions.check_initialised()

        def body(draft: Draft) -> bool:
            if draft.get(TOLERANT_INDEX) is not None:
                return False
            draft.set(INDEX, model.Index())
            if draft.get(model.GATES) is None:
                draft.set(model.GATES, model.Registry())
            if draft.get(model.GRAPH) is None:
                draft.set(model.GRAPH, model.Graph(dependents_complete=True))
            return True

        created = self.transactions.change(body, also=[TOLERANT_INDEX, model.GRAPH, model.GATES])
        if self.store.files is not None:
            for name, content in GIT_FILES.items():
                path = self.store.files.path / name
                make_directories(path.parent)
                with contextlib.suppress(AlreadyExists):
                    durable.create(path, content)
        return created

    # --- Reading -----------------------------------------------------------------------------------

    def summaries(self, *, finished: bool = True) -> IssueSet[IssueSummary]:
        """The summaries of all issues as they are now, or only of the unfinished ones. Costs what has changed since the
        last call, in this process or an earlier one."""
        return self.transactions.summaries(finished=finished)

    def snapshot(self) -> IssueSet[Issue]:
        """All issues as they are now, in full: reads every one."""
        return self.transactions.snapshot()

    def issue(self, issue_id: str) -> Issue:
        """One stored issue; raises `NotFound`."""
        return self.transactions.need(issue_id)

    def document(self, issue_id: str) -> Document[Issue]:
        """One stored issue with its version; raises `NotFound`."""
        document = self.store.read(ISSUES.key(issue_id))
        if document is None:
            self.transactions.check_initialised()
            raise no_issue(issue_id)
        return document

    def state(self, issue: Issue) -> State:
        """The effective state of an issue, derived from its dependencies."""
        return rules.state_of(issue, self.transactions.lookup)

    def dependents_of(self, issue_id: str) -> tuple[str, ...]:
        """The ids of the issues that depend on this one."""
        return self.transactions.dependents_of(issue_id)

    def find_id(self, text: str) -> str:
        """The id that starts with `text`; raises `IdAmbiguous` or `NotFound`."""
        text = text.strip()
        if is_safe_name(text) and self.store.read(ISSUES.key(text)) is not None:
            return text
        matches = find_ids(self.store, *{text, text.lower()}) if text else []
        if len(matches) > 1:
            raise IdAmbiguous(text, matches)
        if not matches:
            self.transactions.check_initialised()
            raise no_issue(text or "''")
        return matches[0]

    def events(self, *, after: int = 0) -> Iterator[Entry[IssueEvent]]:
        """The events after a position."""
        return self.store.entries(EVENTS, after=after)

    def newest_events(self) -> Iterator[Entry[IssueEvent]]:
        """All events, newest first. The cost grows with the number used."""
        return newest_first(self.store, EVENTS)

    def newest_events_of(self, issue_id: str) -> Iterator[Entry[IssueEvent]]:
        """The events of an issue, the newest first, back to its creation."""
        for each in self.newest_events():
            if each.record.issue_id == issue_id:
                yield each
                if each.record.type == "issue_created":
                    return

    # --- Changing ----------------------------------------------------------------------------------

    def create(self, new: NewIssue) -> Issue:
        """Create one issue."""
        return self._creating.create([new])[0].issue

    def create_all(self, new: Sequence[NewIssue]) -> list[Created]:
        """Create several issues; up to 250 of them in one transaction, or as many as the store accepts."""
        return self._creating.create(new)

    def adopt(self, issues: Sequence[Issue]) -> list[Created]:
        """Import issues under the ids and states that they have."""
        return self._creating.adopt(issues)

    def break_down(self, issue_id: str, parts: Sequence[NewIssue]) -> list[Created]:
        """Create the parts of an issue: they inherit its dependencies, and it depends on them."""
        return self._creating.break_down(issue_id, parts)

    def update(
        self, issue_id: str, update: Update, *, claim: ClaimId | None = None, if_version: str | None = None
    ) -> Issue:
        """Change an issue. Concurrent updates are merged, because each applies to the current record.

        With `claim`, refused unless that claim is held; with `if_version`, unless the version matches.
        """
        if update.state is None:
            return self._edit(issue_id, update.applied, claim, if_version)
        return self.transactions.retrying(lambda: self._move(issue_id, update, claim, if_version))

    def edit(self, issue_id: str, function: Callable[[Issue], Issue], *, claim: ClaimId | None = None) -> Issue:
        """Change an issue by a pure function, which may run more than once. It cannot change the state, dependencies or
        gates, which have their own operations."""
        return self._edit(issue_id, function, claim, None)

    def delete(self, issue_id: str, *, claim: ClaimId | None = None) -> Issue:
        """Delete an issue and remove it from the dependencies of others."""
        return self.transactions.retrying(lambda: self._delete(issue_id, claim))

    def _edit(
        self, issue_id: str, function: Callable[[Issue], Issue], claim: ClaimId | None, if_version: str | None
    ) -> Issue:
        def body(draft: Draft) -> Issue:
            before = draft.issue(issue_id)
            _check_version(draft, issue_id, if_version)
            issue = _unmoved(before, function(before))
            moving = issue.assignee != before.assignee  # taking work away counts as a move
            record = rules.authorised(before, draft.claim(issue_id), draft.moment, claim, moving=moving)
            draft.set_claim(issue_id, record)
            if issue != before:
                draft.record("issue_updated", issue_id, fields=_changed_fields(before, issue))
            return draft.put(issue)

        return self.transactions.change(body, issues=[issue_id], also=[CLAIMS.key(issue_id)])

    def _move(self, issue_id: str, update: Update, claim: ClaimId | None, if_version: str | None) -> Issue:
        def body(draft: Draft, around: IssueNeighbours | None = None) -> Issue:
            before = draft.issue(issue_id)
            around = around or IssueNeighbours(before, [], Seen({}, {}), (), [])
            assert update.state is not None
            _check_version(draft, issue_id, if_version)
            check_dependents(draft, around)
            if rules.is_released(before) and update.state not in (State.DONE, State.ARCHIVED):
                around.check_dependents_known()  # a dependent that is done would rest on it
            record = draft.claim(issue_id)
            draft.set_claim(issue_id, rules.authorised(before, record, draft.moment, claim, moving=True))
            issue = update.applied(before)
            if issue != before:
                draft.record("issue_updated", issue_id, fields=_changed_fields(before, issue))
            others = [found for each in around.dependents if (found := draft.lookup(each)) is not None]
            issue = draft.put(rules.moved(issue, update.state, draft.lookup, others))
            draft.end_claim_unless_working(issue)
            draft.settle(around.followers)
            return issue

        made = self.transactions.change_once(
            lambda draft, _: body(draft),
            issue_id,
            lambda _, view: _has_no_dependents(view, issue_id),
            also=(CLAIMS, DEPENDENTS),
            hints=[GRAPH],
        )
        if made is not None:
            return made
        around = self.transactions.surroundings(issue_id)
        keys: list[Key[Any]] = [CLAIMS.key(issue_id), DEPENDENTS.key(issue_id)]
        issue = self.transactions.change(
            lambda draft: body(draft, around), issues=around.named, seen=around.seen, also=keys
        )
        self.transactions.settle_others(around, issue)
        return issue

    def _delete(self, issue_id: str, claim: ClaimId | None) -> Issue:
        around = self.transactions.surroundings(issue_id)
        index = plan_index_change(self.transactions, whole=True)

        def body(draft: Draft) -> Issue:
            issue = draft.issue(issue_id)
            check_dependents(draft, around)
            if issue.dependencies != around.issue.dependencies:
                raise Changed(f"{issue_id} was changed meanwhile", issue_id=issue_id)
            rules.authorised(issue, draft.claim(issue_id), draft.moment, claim, moving=True)
            draft.drop(issue_id)
            for on in issue.dependencies:
                draft.drop_dependent(on, issue_id)
            for each in around.dependents:
                self._detach(draft, each, issue_id)
            index.remove(draft, issue_id)
            draft.record("issue_deleted", issue_id, title=issue.title)
            return issue

        keys: list[Key[Any]] = [*index.keys, CLAIMS.key(issue_id), DEPENDENTS.key(issue_id)]
        keys += map(DEPENDENTS.key, around.issue.dependencies)
        named = [*around.named, *around.dependents]  # all of these change, however many they are
        return self.transactions.change(body, issues=named, seen=around.seen, also=keys)

    def _detach(self, draft: Draft, dependent_id: str, issue_id: str) -> None:
        dependent = draft.lookup(dependent_id)
        if dependent is not None and issue_id in dependent.dependencies:
            draft.put(rules.in_line(rules.without_dependency(dependent, issue_id), draft.lookup))
            draft.record("dependency_removed", dependent_id, depends_on=issue_id)


def _has_no_dependents(view: View, issue_id: str) -> bool:
    graph, known = view.get(GRAPH), view.get(DEPENDENTS.key(issue_id))
    return graph is not None and graph.dependents_complete and (known is None or not known.dependents)


def _check_version(draft: Draft, issue_id: str, wanted: str | None) -> None:
    document = draft.view.document(ISSUES.key(issue_id))
    if wanted is not None and document is not None and document.version != wanted:
        raise VersionMismatch(f"{issue_id} has changed since you read it", version=document.version)


def _unmoved(before: Issue, after: Issue) -> Issue:
    """The change, without what an edit may not touch."""
    return msgspec.structs.replace(
        after,
        id=before.id,
        state=before.state,
        dependencies=before.dependencies,
        gates_required=before.gates_required,
        gates_status=before.gates_status,
    )


def _changed_fields(before: Issue, after: Issue) -> list[str]:
    names = [name for name in before.__struct_fields__ if name not in ("updated_at", "state")]
    return [name for name in names if getattr(before, name) != getattr(after, name)]


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SettingInvalid(f"context {name}", text, "a whole number") from None


class Query(NamedTuple):
    """A filter. Every given field must match; of several states or priorities, one."""

    words: tuple[str, ...] = ()
    states: tuple[State, ...] = ()
    priorities: tuple[Priority, ...] = ()
    assignee: str | None = None
    labels: tuple[str, ...] = ()

    def fits(self, issue: AnyIssue, state: State) -> bool:
        """Whether an issue matches, whatever the words are."""
        return (
            (not self.states or state in self.states)
            and (not self.priorities or issue.priority in self.priorities)
            and (self.assignee is None or issue.assignee == self.assignee)
            and (not self.labels or all(_has_label(issue, label) for label in self.labels))
        )

    @property
    def finished(self) -> bool:
        """Whether finished issues may match."""
        return not self.states or any(each in rules.FINISHED for each in self.states)


def find(seen: IssueSet[Listed], query: Query) -> Iterator[Listed]:
    """The matching issues, in order of creation."""
    found = (issue for issue, state in seen.with_states(seen) if query.fits(issue, state))
    words = [each.casefold() for each in query.words]
    return (issue for issue in found if _has_words(issue.id, seen.text(issue), words)) if words else found


def _has_label(issue: AnyIssue, wanted: str) -> bool:
    """Matches a label, or with a trailing `*` a prefix."""
    if wanted.endswith("*"):
        return any(label.startswith(wanted[:-1]) for label in issue.labels)
    return wanted in issue.labels


def _has_words(issue_id: str, text: str, words: Sequence[str]) -> bool:
    return all(word in text or issue_id.startswith(word) for word in words)
