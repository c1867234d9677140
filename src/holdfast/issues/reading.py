"""Reading of issues without locks, and issues as JSON.

The index lists the issues in one read, so a created batch or a deletion is seen whole. Where there is no index, the
events tell what was created meanwhile. The state of an issue is derived from its dependencies, so a change that moves
an issue and its dependents shows its whole effect or none. If an issue refers to a missing one, both are read again.

An issue that cannot be read, because another program damaged it, is `Broken`: it is reported and left alone. Issues
that depend on it keep waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import ClockReading, Now
from holdfast.errors import Corrupt, IoFailure, NotInitialised, Refused, StoreIncompatible
from holdfast.fs.names import is_safe_name
from holdfast.issues import rules
from holdfast.issues.model import (
    CLAIMS,
    EVENTS,
    INDEX,
    ISSUES,
    RAW_INDEX,
    SHORT,
    UNLISTED,
    AnyIssue,
    ClaimRecord,
    Issue,
    Unlisted,
    has_index,
    issue_summary_to_json,
)
from holdfast.issues.rules import Broken, IssueSet
from holdfast.store.model import Decision, Key, Record, Store, TolerantCodec, Unreadable, View

if TYPE_CHECKING:
    from holdfast.issues.creating import Created
    from holdfast.issues.model import IssueClaim
    from holdfast.issues.tracker import Tracker


TOLERANT_ISSUES = ISSUES.tolerant()
TOLERANT_INDEX = Key(INDEX.name, TolerantCodec(INDEX.codec))
TOLERANT_UNLISTED = Key(UNLISTED.name, TolerantCodec(UNLISTED.codec))


class IssueListing(NamedTuple):
    """The ids that the index lists, and those noted beside it, in order of creation; perhaps with repeats.

    `problem` says why the index cannot be used: the ids are then incomplete, and it is rebuilt from the issues.
    """

    ids: list[str]
    deleted: frozenset[str] = frozenset()
    problem: str = ""
    exists: bool = True


def read_listing(store: Store) -> IssueListing:
    """Read the index. If the store keeps none, the listing is empty, and says only whether a tracker exists."""
    if not has_index(store):
        index = store.read(TOLERANT_INDEX)
        if index is None:
            return IssueListing([], problem="the index is missing", exists=False)
        return IssueListing([], problem=index.record.failure.message if isinstance(index.record, Unreadable) else "")
    noted = store.read(TOLERANT_UNLISTED)  # first: ids only move from here to the index
    index = store.read(TOLERANT_INDEX)
    more = noted.record.ids if noted is not None and isinstance(noted.record, Unlisted) else []
    if index is None:
        return IssueListing(more, problem="the index is missing", exists=False)
    if isinstance(index.record, Unreadable):
        return IssueListing(more, problem=index.record.failure.message)
    return IssueListing([*index.record.all_ids, *more], frozenset(index.record.deleted_ids))


def read_claims(store: Store, issue_ids: list[str]) -> Mapping[str, ClaimRecord | Broken | None]:
    """The claims of issues, in one request unless one of them cannot be read."""
    keys = {each: CLAIMS.key(each) for each in issue_ids}
    try:
        view = store.read_each(list(keys.values())) if keys else View({})
        return {each: view.get(key) for each, key in keys.items()}
    except (Corrupt, IoFailure, Refused):
        found: dict[str, ClaimRecord | Broken | None] = {}
        for each, key in keys.items():
            claim = tried(store, key, each)
            found[each] = claim
        return found


def take_snapshot(store: Store, reading: ClockReading) -> IssueSet[Issue]:
    """All issues as they are now; unreadable ones are in `broken`. `reading` is used to judge claims."""
    listing, before = read_listing(store), None if has_index(store) else end_of_events(store)
    (found, others), issues, broken = _scanned(store), dict[str, Issue](), dict[str, Broken]()
    if not (listing.exists or found):
        raise NotInitialised("there is no issue tracker here")
    more = _unlisted(store, listing, found) if before is None else [*found, *others, *_created(store, before)]
    for issue_id in dict.fromkeys((*listing.ids, *more)):
        issue = found.get(issue_id) or look_at(store, issue_id)  # none: it was deleted since
        if isinstance(issue, Broken):
            broken[issue_id] = issue
        elif issue is not None:
            issues[issue_id] = issue
    _mend(store, issues, broken)
    listed = {each: issues[each] for each in listing.ids if each in issues}
    ordered = listed | {each: issues[each] for each in _by_age(issues)}  # the others by age, however they were found
    seen = IssueSet(ordered, reading.at(store.now()), broken, claims=partial(read_claims, store))
    seen.index_problem = listing.problem
    return seen


def _unlisted(store: Store, listing: IssueListing, found: dict[str, Issue]) -> list[str]:
    """The issues that no list contains: git or another program brought the files.

    An issue that was created during the scan is listed by now. It is left out, because others that were created with it
    may have been missed.
    """
    listed = set(listing.ids)
    if listed.issuperset(found):
        return []  # the usual case
    now = read_listing(store)
    listed.update(now.ids, now.deleted)
    return [each for each in found if each not in listed]


def _by_age(found: dict[str, Issue]) -> list[str]:
    return sorted(found, key=lambda each: (found[each].created_at, each))


def by_age(store: Store) -> list[str]:
    """The ids of all issues, the oldest first, and those that cannot be read last."""
    found, others = _scanned(store)
    return [*_by_age(found), *others]


def end_of_events(store: Store) -> int:
    """The position of the last event, including those of all commits until now."""
    end = store.transact([EVENTS], lambda view, now: Decision((), view.end(EVENTS))).result
    for entry in store.entries(EVENTS, after=end):  # which seals loose events
        end = entry.position
    return end


def _created(store: Store, after: int) -> list[str]:
    """The issues that were created after a position of the events: a scan may have missed some of a batch."""
    events = (entry.record for entry in store.entries(EVENTS, after=after))
    return [each.issue_id for each in events if each.type == "issue_created"]


def _scanned(store: Store) -> tuple[dict[str, Issue], list[str]]:
    """The issues that one scan can read, and the names of the others. Those are read one by one: another program may
    have been writing them."""
    found, others = dict[str, Issue](), list[str]()
    for name, document in store.scan(TOLERANT_ISSUES):
        if isinstance(document.record, Issue) and document.record.id == name:
            found[name] = document.record
        else:
            others.append(name)
    return found, others


def _mend(store: Store, issues: dict[str, Issue], broken: dict[str, Broken]) -> None:
    """Read issues again that refer to a missing issue, and read the missing one by its id."""
    todo = list(issues)
    missing: set[str] = set()
    while todo:
        issue_id = todo.pop()
        if issue_id not in issues:
            continue
        before = issues[issue_id]
        lost = [each for each in before.dependencies if each not in issues and each not in broken]
        if not lost:
            continue
        for each in lost:
            found = None if each in missing else look_at(store, each)
            if isinstance(found, Broken):
                broken[each] = found
            elif found is None:
                missing.add(each)
            else:
                issues[each] = found
                todo.append(each)
        again = look_at(store, issue_id)
        if isinstance(again, Issue):
            issues[issue_id] = again
            if again.dependencies != before.dependencies:
                todo.append(issue_id)
            continue
        del issues[issue_id]
        if again is not None:
            broken[issue_id] = again


MOST_MATCHES = 50  # how many ids with the same prefix are checked


def find_ids(store: Store, *prefixes: str) -> list[str]:
    """The ids of issues that begin with one of these. The index is searched as text, which is faster than decoding."""
    if not has_index(store):
        return [each for prefix in sorted(prefixes) for each in _named(store, prefix)]
    index, noted = store.read(RAW_INDEX), store.read(TOLERANT_UNLISTED)
    pattern = rb'"((?:%s)[^"\\]*)"' % b"|".join(re.escape(each.encode()) for each in prefixes)
    found = [each.decode("utf-8", "replace") for each in re.findall(pattern, index.record)] if index else []
    if noted is not None and isinstance(noted.record, Unlisted):
        found += [each for each in noted.record.ids if each.startswith(prefixes)]
    found = [each for each in list(dict.fromkeys(found))[:MOST_MATCHES] if look_at(store, each) is not None]
    if found:
        return found
    return [name for name, _ in store.scan(TOLERANT_ISSUES) if name.startswith(prefixes)]  # brought by git, for example


def _named(store: Store, prefix: str) -> Iterator[str]:
    if look_at(store, prefix) is not None:
        yield prefix
    names = (name for name, _ in store.scan(TOLERANT_ISSUES, after=prefix))
    yield from islice(takewhile(lambda name: name.startswith(prefix), names), MOST_MATCHES)


def read_issue(store: Store, issue_id: str) -> Issue | None:
    """One issue, or None; raises if it cannot be read."""
    found = look_at(store, issue_id)
    if isinstance(found, Broken):
        raise found.failure
    return found


def look_at(store: Store, issue_id: str) -> Issue | Broken | None:
    """One issue, or why it cannot be read; None if there is none."""
    if not is_safe_name(issue_id):  # written by another program: no issue can have that id
        return None
    found = tried(store, ISSUES.key(issue_id), issue_id)
    if isinstance(found, Issue) and found.id != issue_id:
        return Broken(issue_id, misnamed(issue_id, found))
    return found


def misnamed(issue_id: str, found: Issue) -> Corrupt:
    """The failure of a document whose id differs from its name."""
    name = ISSUES.key(issue_id).name
    return Corrupt(
        f"{name} contains the issue {found.id}",
        source=name,
        issue_id=issue_id,
        hint="If the file was copied, rename it to its id, or change its id to its name.",
    )


def tried(store: Store, key: Key[Record], issue_id: str) -> Record | Broken | None:
    try:
        document = store.read(key)
    except StoreIncompatible:  # the store cannot be read, not this one document
        raise
    except (Corrupt, IoFailure, Refused) as failure:
        return Broken(issue_id, failure)
    return None if document is None else document.record


def issues_to_json(snapshot: IssueSet[Any], issues: Iterable[AnyIssue]) -> dict[str, Any]:
    """These issues, and the broken ones of the whole tracker."""
    listed = [issue_summary_to_json(issue, snapshot.state(issue)) for issue in issues]
    return {"issues": listed, "count": len(listed), "broken": unreadable_issues_to_json(snapshot.broken)}


def unreadable_issues_to_json(broken: Iterable[Broken]) -> list[dict[str, str]]:
    return [each.as_record() for each in broken]


def issue_to_json(tracker: Tracker, issue_id: str) -> dict[str, Any]:
    """The whole issue document, its derived state, its claim and its dependents."""
    issue, version = tracker.document(issue_id)
    known = msgspec.to_builtins(issue)
    known.pop("(unknown)", None)
    record = tracker.claims.state(issue_id)
    claim = record.claim if record else None
    seen = tracker.transactions.with_dependencies(issue)
    return {
        **known,
        **{name: value for name, value in issue.unknown.items() if name not in known},
        "state": rules.state_of(issue, seen.issues.get).value,
        "short_id": issue.id[:SHORT],
        "blocked_by": rules.open_dependencies(issue, seen.issues.get),
        "broken": unreadable_issues_to_json(seen.broken.values()),
        "dependents": list(tracker.dependents_of(issue_id)),
        "claim": claim and issue_claim_to_json(claim, tracker.transactions.moment()),
        "version": version,
    }


_CLAIM_NAMES = {"assignee": "actor", "claimed_at": "created_at"}


def issue_claim_to_json(claim: IssueClaim, moment: Now) -> dict[str, Any]:
    """A claim as others see it: once `expired`, anyone may claim the issue."""
    left = claim.time_left(moment, for_others=True)
    record = {_CLAIM_NAMES.get(name, name): value for name, value in msgspec.to_builtins(claim).items()}
    return {**record, "expired": left <= 0, "time_left": round(left, 3)}


def created_issues_to_json(created: Created) -> dict[str, Any]:
    """The new issue, and the dependencies that were skipped because others imply them."""
    skipped = [{"depends_on": on, "implied_by": path} for on, path in created.implied.items()]
    return {**issue_summary_to_json(created.issue, created.issue.state), "skipped_dependencies": skipped}
