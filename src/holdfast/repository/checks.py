"""All checks of the doctor, in order, and the checks of the store, the ledger and the issues."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from holdfast import errors, findings
from holdfast.clock import SKEW, format_duration
from holdfast.errors import Failure, NotFound, NotInitialised, format_size
from holdfast.findings import Check, Finding
from holdfast.issues import validate
from holdfast.repository import checks_leftovers, checks_storage, checks_worktrees
from holdfast.repository.doctor import Examination, RepositoryCheck
from holdfast.repository.ledgers import open_ledger
from holdfast.repository.opening import open_tracker, tracker_of
from holdfast.store.model import StoreServer
from holdfast.store.open import CONFIG, FILES, address_of, check_store

if TYPE_CHECKING:
    from holdfast.repository.home import Home

CHECKS: tuple[RepositoryCheck, ...] = (
    # Decided changes are carried out before anything is judged.
    Check("commits", checks_leftovers.commits),
    Check("operations", checks_leftovers.operations),
    Check("collections", checks_leftovers.collections),
    Check("plans", checks_leftovers.plans),
    # Snapshots and worktrees.
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
    # Leftovers of dead processes.
    Check("scratch", checks_leftovers.scratches),
    Check("remnants", checks_storage.remnants),
    Check("drafts", checks_leftovers.drafts),
    Check("leases", checks_leftovers.leases),
    Check("waiters", checks_leftovers.waiters),
    # Foundations.
    Check("audit", checks_storage.trail),
    Check("clock", checks_storage.clock),
    Check("format", checks_storage.repository_format),
    Check("site", checks_storage.site),
    Check("links", checks_storage.links),
    Check("permissions", checks_storage.permissions),
    Check("owners", checks_storage.owners),
    Check("filesystem", checks_storage.filesystem),
    Check("disk", checks_storage.disk),
)
"""In order: a repair may make a later repair unnecessary, but never an earlier one necessary."""

ACTOR = "auto:doctor"

FULL = "NOSPACE"  # an alarm of etcd
ALMOST_FULL = 0.8


def all_checks(home: Home) -> tuple[RepositoryCheck, ...]:
    after = Check("archives", _archives), Check("ledger", _ledger), Check("issues", _issues)
    return (Check("store", store_health), *home.checks(CHECKS), *after)


def store_health(examination: Examination) -> Iterator[Finding]:
    """A store that cannot be used, or whose clock differs from this machine's."""
    root, store = examination.context.paths.root, examination.context.store
    try:
        store.now()
        address = address_of(root)
        if address == FILES:
            return
        health = check_store(store, address)
    except Failure as failure:
        if failure is not examination.trouble:
            raise
        yield _store_unusable(failure, str(failure.facts.get("store", root / CONFIG)))
        return
    if (server := store.server) is not None:
        version, moved_to = server.version, server.moved_to()
        if version is not None and version.risk:
            message = f"the records are kept by {version}, which {version.risk}"
            yield findings.of("store-risky", address, message, version=version.version)
        if moved_to is not None:
            yield findings.of("store-moved", address, f"the records were moved to {moved_to}", moved_to=moved_to)
        yield from _space(server, address)
    if abs(health.clock_difference) > SKEW:
        message = f"the store's clock and this machine's are {format_duration(abs(health.clock_difference))} apart"
        yield findings.of("clock-differs", address, message, **health.as_record())


def _space(server: StoreServer, address: str) -> Iterator[Finding]:
    """A server that is full by its own limit, or will be soon, or that has raised another alarm."""
    if (space := server.space()) is None:
        return
    facts = space._asdict()
    if FULL in space.alarms:
        message = f"the server is full, with {format_size(space.size)}"
        yield findings.of("store-full", address, message, **facts)
    elif space.limit and space.size >= ALMOST_FULL * space.limit:
        kept = f"{space.revision - space.compacted} revisions are kept, {format_size(space.in_use)} are in use"
        message = f"the server uses {format_size(space.size)} of {format_size(space.limit)}; {kept}"
        yield findings.of("store-filling", address, message, **facts)
    for alarm in sorted({*space.alarms} - {FULL}):
        yield findings.of("store-alarm", address, f"the server has raised the alarm {alarm}", **facts)


def _archives(examination: Examination) -> Iterator[Finding]:
    """Archived records that are still on the server."""
    _require_store(examination)
    server = examination.context.store.server
    if server is None:
        return
    for stream, last in server.unfinished_archives().items():
        message = f"records of {stream} up to {last} are archived, but still on the server"
        yield findings.of("archive-unfinished", stream, message, partial(server.drop, stream, last), last=last)


_UNUSABLE: dict[type[Failure], tuple[str, str]] = {
    errors.StoreAccessRefused: ("store-refused", "The server runs, but does not let this user in."),
    errors.StoreUntrusted: ("store-untrusted", "The server may run, but cannot be trusted."),
    errors.StoreUnsafe: ("store-unsafe", "The server runs, but may lose records that it has acknowledged."),
    errors.StoreFull: ("store-full", "The server runs, but refuses every commit, and etcd also most reads."),
    errors.StoreMissing: ("store-missing", "The server runs, but the database with all records does not exist."),
    errors.StoreIncompatible: ("store-incompatible", "The records exist, in a form unknown to this program."),
    errors.StoreUnavailable: ("store-away", "The server, or the network to it, is down."),
    errors.NotApproved: ("store-unusable", "The address is not approved on this machine, so it was not contacted."),
    NotFound: ("store-empty", "The server runs, but has no records of this repository."),
}
"""Code and meaning of each failure of the store; the first match counts."""


def _store_unusable(failure: Failure, subject: str) -> Finding:
    fitting = (found for kind, found in _UNUSABLE.items() if isinstance(failure, kind))
    code, meaning = next(fitting, ("store-unusable", "The location of the records is unknown."))
    return Finding(
        code,
        subject,
        failure.message,
        f"{meaning} Only this command and 'info' work. Your files and snapshots are untouched.",
        f"nothing: {failure.hint}",
        facts={"code": failure.code, "retryable": failure.retryable},
    )


def _require_store(examination: Examination) -> None:
    """Raise the failure of an unusable store: the ledger and the tracker would open it, and wait for it, once more."""
    if examination.trouble is not None:
        raise examination.trouble


def _ledger(examination: Examination) -> Iterator[Finding]:
    """The ledger beside the repository, if any. It is never changed."""
    _require_store(examination)
    try:
        opened = open_ledger(examination.context.paths.root)
    except NotFound:
        return
    for each in opened.verify().findings:
        yield each._replace(
            code=f"ledger-{each.code}",
            message=f"{each.subject}: {each.message}",
            meaning="The ledger is not as it was written.",
            remedy=f"nothing: {each.remedy}",
        )


def _issues(examination: Examination) -> Iterator[Finding]:
    """The issues beside the repository, if any."""
    _require_store(examination)
    try:
        tracker = open_tracker(tracker_of(examination.context.paths.root), actor=ACTOR)
        fix = partial(validate.repair, tracker)
        found = validate.examine(tracker)
    except NotInitialised:
        return
    for each in found:
        if each.code not in validate.OF_COMMITS:  # the check "commits" reports those
            by_hand = f"nothing: {each.remedy or 'a person has to look at it'}"
            yield each._replace(
                code=f"issue-{each.code}",
                subject=each.subject or "issues",
                remedy="repair it" if each.fixable else by_hand,
                fix=fix if each.fixable else None,
            )
