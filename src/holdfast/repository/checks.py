"""Which checks an examination of a repository makes: those of every layer that keeps something."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.clock import SKEW
from holdfast.errors import (
    Failure,
    NotFound,
    NotInitialised,
    StoreAccessRefused,
    StoreIncompatible,
    StoreMissing,
    StoreUnavailable,
    StoreUntrusted,
)
from holdfast.issues import validate
from holdfast.issues.tracker import Tracker
from holdfast.repository import checks_leftovers, checks_storage, checks_worktrees
from holdfast.repository.doctor import Check, Examination, Finding, Severity
from holdfast.repository.opening import open_ledger, open_tracker
from holdfast.store.open import CONFIG, FILES, address_of, check_store

CHECKS: tuple[Check, ...] = (
    # What is decided is carried out before anything else is judged.
    Check("commits", checks_leftovers.commits),
    Check("operations", checks_leftovers.operations),
    Check("collections", checks_leftovers.collections),
    Check("plans", checks_leftovers.plans),
    # What is kept.
    Check("trees", checks_storage.orphans),
    Check("snapshots", checks_storage.incomplete),
    Check("content", checks_storage.damaged),
    Check("heads", checks_worktrees.heads),
    Check("parents", checks_worktrees.parents),
    Check("references", checks_worktrees.references),
    Check("pins", checks_worktrees.pins),
    Check("directories", checks_worktrees.worktrees),
    Check("payloads", checks_worktrees.payloads),
    Check("records", checks_worktrees.records),
    # What dead processes have left behind.
    Check("scratch", checks_leftovers.scratches),
    Check("remnants", checks_storage.remnants),
    Check("drafts", checks_leftovers.drafts),
    Check("leases", checks_leftovers.leases),
    Check("waiters", checks_leftovers.waiters),
    # What all of it rests on.
    Check("audit", checks_storage.trail),
    Check("clock", checks_storage.clock),
    Check("format", checks_storage.repository_format),
    Check("permissions", checks_storage.permissions),
    Check("filesystem", checks_storage.filesystem),
    Check("disk", checks_storage.disk),
)
"""In this order: a repair may make a later one unnecessary, never an earlier one necessary."""


ACTOR = "auto:doctor"


def all_checks() -> tuple[Check, ...]:
    """The checks in the order in which they are made and repaired."""
    return (
        Check("store", _store),
        *CHECKS,
        Check("ledger", _ledger),
        Check("issues", _issues),
    )


def _store(examination: Examination) -> Iterator[Finding]:
    """Whether the store answers, knows our schema, and goes by about the same time as this machine."""
    root, store = examination.control.places.root, examination.control.store
    try:
        store.now()
        address = address_of(root)
        if address == FILES:
            return
        health = check_store(store, address)
    except Failure as failure:
        if failure is not examination.trouble:
            raise
        yield _store_trouble(failure, str(failure.facts.get("store", root / CONFIG)))
        return
    if abs(health.clock_difference) > SKEW:
        yield Finding(
            "clock-differs",
            Severity.WARNING,
            address,
            f"the store's clock and this machine's are {abs(health.clock_difference):.1f} s apart",
            "Leases are judged by the store's clock. What this machine says about times is off by that much.",
            "nothing: set this machine's clock, or the server's",
            facts=health.as_record(),
        )


_TROUBLES: dict[type[Failure], tuple[str, str]] = {
    StoreAccessRefused: ("store-refused", "The server runs, but does not let this user in."),
    StoreUntrusted: ("store-untrusted", "The server may run, but it is not to be trusted with anything."),
    StoreMissing: ("store-missing", "The server runs, but the database with all records is not there."),
    StoreIncompatible: ("store-incompatible", "The records are there, in a form unknown to this program."),
    StoreUnavailable: ("store-away", "The server, or the way to it, is down."),
    NotFound: ("store-empty", "The server runs, but the records of this repository are not in it."),
}
"""What may be wrong with a store, by the failure that it shows in: the first that fits."""


def _store_trouble(failure: Failure, subject: str) -> Finding:
    fitting = (told for kind, told in _TROUBLES.items() if isinstance(failure, kind))
    code, meaning = next(fitting, ("store-unusable", "It is not known where the records are."))
    return Finding(
        code,
        Severity.ERROR,
        subject,
        failure.message,
        f"{meaning} No command works but this one and 'info'. Your files and snapshots are untouched.",
        f"nothing: {failure.hint}",
        facts={"code": failure.code, "retryable": failure.retryable},
    )


def _require_store(examination: Examination) -> None:
    """They open the store anew: one that is away is not waited for again."""
    if examination.trouble is not None:
        raise examination.trouble


def _ledger(examination: Examination) -> Iterator[Finding]:
    """The ledger beside the repository, if there is one; it is never changed."""
    _require_store(examination)
    try:
        opened = open_ledger(examination.control.places.root)
    except NotFound:
        return
    severities = {"error": Severity.ERROR, "warning": Severity.WARNING}
    for each in opened.verify().findings:
        yield Finding(
            f"ledger-{each.kind}",
            severities.get(each.severity, Severity.NOTE),
            each.where,
            f"{each.where}: {each.problem}",
            "The ledger is not as it was written.",
            f"nothing: {each.remedy}",
        )


def _issues(examination: Examination) -> Iterator[Finding]:
    """The issues beside the repository, if there are any."""
    _require_store(examination)
    tracker = open_tracker(examination.control.places.root, actor=ACTOR)
    try:
        found = validate.examine(tracker)
    except NotInitialised:
        return
    for each in found:
        if not each.kind.startswith("commit"):  # the check of commits has told of these
            yield _issue_finding(each, tracker)


_MEANINGS = {
    "abandoned": "The next one who looks for work takes it over.",
    "unreadable": "The others go on without it, and what waits for it goes on waiting. It was not changed.",
}


def _issue_finding(found: validate.IssueFinding, tracker: Tracker) -> Finding:
    abandoned = found.kind == "abandoned"
    meaning = _MEANINGS.get(found.kind, "The issues do not fit together.")
    severity = Severity.NOTE if abandoned else Severity.WARNING if found.fixable else Severity.ERROR
    return Finding(
        f"issue-{found.kind}",
        severity,
        found.issue_id or "issues",
        found.message,
        meaning,
        "puts it right: there is only one way"
        if found.fixable
        else f"nothing: {found.hint or 'a person has to look at it'}",
        fix=(lambda: validate.repair(tracker)) if found.fixable else None,
    )
