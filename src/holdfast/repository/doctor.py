"""Examining a repository: what is wrong with it, what that means, and what a repair would do.

Each check reads in such an order, and confirms by a second read, that it never takes live work for damage.

A repair never deletes users' work, nor anything that cannot be recreated. Each repair is a transaction that
decides anew, or removes something that is provably unused. Repairing twice is the same as repairing once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from holdfast import findings
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import Corrupt, Failure, NotFound
from holdfast.findings import Check, Finding, Repaired, Severity
from holdfast.fs.directory import Directory
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Descriptor,
    Operation,
    RepositoryContext,
    WorktreeConfig,
)

MEANINGS: dict[Severity, dict[str, str]] = {
    Severity.ERROR: {
        "audit-broken": "It was edited, or the disk is faulty. From there on it proves nothing.",
        "check-failed": "What it would have found is not known.",
        "commit-blocked": "Readers see it whole; changes to its documents are refused.",
        "descriptor-missing": "Its files still exist, but it cannot be listed or restored.",
        "document-corrupt": "The record cannot be understood. What depends on it was not examined.",
        "filesystem-unsafe": "Two processes may hold one lock, or a power cut may lose acknowledged writes.",
        "head-behind": "History omits a published snapshot, and garbage collection would delete it.",
        "head-missing": "History cannot be shown, and no snapshot can be taken. The worktree's files are untouched.",
        "parent-missing": "History ends here, though it continued. The snapshot itself is complete.",
        "permissions-missing": "Commands that change something there fail.",
        "snapshot-damaged": "The disk, or a program, has changed it. Restoring it would give wrong content.",
        "snapshot-incomplete": "It cannot be restored and is not listed. It was complete when published.",
        "worktree-directory-missing": "It was moved or deleted. Its snapshots have what was saved.",
    },
    Severity.WARNING: {
        "checks-not-made": "What they would have found is not known.",
        "clock-behind": "This machine's clock is behind, or another's is ahead. Leases and retention last longer.",
        "clock-differs": "The store's clock decides about leases. Times that this machine prints are off.",
        "collection-unfinished": "Its process died. Marked snapshots cannot be referred to or restored.",
        "commit-unfinished": "Readers see it whole. The next change to its documents carries it out.",
        "control-file-in-payload": "Commands may take it for the repository. Every snapshot contains it.",
        "disk-full": "Snapshots and new leases fail. Existing content is safe; renew, release and gc use the reserve.",
        "draft-left": "Its process died. Nothing reads it.",
        "lock-orphaned": "It protects nothing. A new worktree of this name could not be leased.",
        "operation-unfinished": "Its process died. Nobody can lease the worktree until it is finished.",
        "permissions-open": "Anybody can delete or forge its content.",
        "pin-dangling": "It keeps nothing.",
        "record-foreign": "It is never read: the record of a worktree is config.json alone.",
        "reference-dangling": "It keeps nothing.",
        "remnant-excessive": "It takes space. A collection was not finished, or the trees that needed it are gone.",
        "scratch-abandoned": "It takes space. It was never visible, or it was being removed.",
        "snapshot-directory-strange": "Holdfast neither created it nor uses it.",
        "tree-orphaned": "It takes space. It is not visible, and the audit trail shows that it is not needed.",
        "tree-unknown": "It is not visible. It was copied here, or its descriptor and the audit trail were lost.",
        "worktree-directory-unknown": "Holdfast neither created it nor reads it, and takes no snapshots of it.",
    },
    Severity.NOTE: {
        "format-old": "It works as it is.",
        "lock-expired": "Its holder did not renew it. The next one to acquire the lease takes it over.",
        "plan-expired": "It can no longer be run.",
        "waiter-dead": "They are passed over when the lease is granted.",
    },
}
REMEDIES = {
    "audit-broken": "compare it with a backup",
    "checks-not-made": "repair the store, then run doctor again",
    "clock-behind": "set the clocks, best by a time server",
    "clock-differs": "set the clock of this machine or of the server",
    "collection-unfinished": "finish it if it was decided; otherwise unmark the snapshots",
    "commit-unfinished": "carry it out",
    "control-file-in-payload": "it is among your files; move it away if it is not yours",
    "descriptor-missing": "restore the descriptor from a backup; its tree is kept as it is",
    "disk-full": "'holdfast gc plan' lists what may be deleted; or free space elsewhere on the disk",
    "document-corrupt": "compare it with an older copy",
    "draft-left": "remove it",
    "filesystem-unsafe": "move the repository to a local filesystem, or use one of the server-backed stores",
    "head-behind": "there is more than one line; keep each with 'holdfast ref create'",
    "head-missing": "the right snapshot is not known; restore the descriptor from a backup",
    "lock-expired": "release it",
    "lock-orphaned": "remove the lease; its token is never granted again",
    "operation-unfinished": "finish it",
    "parent-missing": "restore the descriptor from a backup",
    "permissions-missing": "only its owner or an administrator can change that",
    "pin-dangling": "remove it; the audit trail keeps what it said",
    "plan-expired": "forget it",
    "record-foreign": "it is not ours to remove",
    "reference-dangling": "remove it; the audit trail keeps what it said",
    "remnant-excessive": "remove what is not needed",
    "scratch-abandoned": "remove it",
    "snapshot-damaged": "restore missing and changed files from a backup",
    "snapshot-directory-strange": "it is not ours to remove",
    "snapshot-incomplete": "restore its directory from a backup",
    "tree-orphaned": "remove it",
    "tree-unknown": "other snapshots may share its directories",
    "waiter-dead": "remove them from the queue",
    "worktree-directory-missing": "put it back, or restore its head into a new worktree and remove this one",
    "worktree-directory-unknown": "it may be somebody's work; move it elsewhere",
}
"""What `--fix` does for a finding; or what people can do, if it has no fix. Some findings bring their own remedy."""
_KINDS = {code: (severity, each[code]) for severity, each in MEANINGS.items() for code in each}


def finding(
    code: str, subject: str, message: str, fix: Callable[[], object] | None = None, remedy: str = "", /, **facts: object
) -> Finding:
    severity, meaning = _KINDS[code]
    remedy = remedy or REMEDIES.get(code, "")
    if fix is None:
        remedy = f"nothing: {remedy}" if remedy else "nothing"
    return Finding(code, subject, message, meaning, remedy, fix, facts, severity)


class Examination:
    """One pass over a repository. Records that several checks need are read once."""

    def __init__(self, context: RepositoryContext, *, strict: bool = False) -> None:
        self.context = context
        self.strict = strict
        self.not_made: list[str] = []  # the checks that could not be made, because the store cannot be used

    @property
    def trouble(self) -> Failure | None:
        """Why the store cannot be used; None as far as it is known to work."""
        return self.context.store.trouble

    @property
    def now(self) -> float:
        return self.context.store.now()

    @property
    def file_time(self) -> float:
        """The time by which files are judged: without a store, that of this machine."""
        try:
            return self.now
        except Failure as failure:
            if failure is not self.trouble:
                raise
            return SYSTEM_CLOCK.wall()

    @cached_property
    def descriptors(self) -> dict[str, Descriptor]:
        """All descriptors. A finding that rests on them is confirmed with `descriptor` first."""
        return {name: document.record for name, document in self.context.store.scan(DESCRIPTORS)}

    def descriptor(self, snapshot_id: str) -> Descriptor | None:
        """One descriptor as of now."""
        document = self.context.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record

    def operations(self) -> dict[str, Operation]:
        """What is pending now, by worktree."""
        return {name: document.record for name, document in self.context.store.scan(OPERATIONS)}

    def configs(self) -> dict[str, WorktreeConfig]:
        """The worktrees as of now."""
        return {name: document.record for name, document in self.context.store.scan(WORKTREES)}

    def config(self, worktree: str) -> WorktreeConfig | None:
        """One worktree as of now."""
        document = self.context.store.read(WORKTREES.key(worktree))
        return None if document is None else document.record


def names_in(path: Path) -> list[str]:
    """The entries of a directory, in order; none if it does not exist."""
    try:
        with Directory.open(path) as directory:
            return sorted(directory.names())
    except NotFound:
        return []


def status_of(path: Path) -> os.stat_result | None:
    """The status of what is at a path, without following a link; None if nothing is."""
    try:
        with Directory.open(path.parent) as directory:
            return directory.status(path.name)
    except NotFound:
        return None


def is_directory(path: Path) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


RepositoryCheck = Check[Examination]


def examine(context: RepositoryContext, checks: Sequence[RepositoryCheck], *, strict: bool = False) -> list[Finding]:
    """All findings, in the order of the checks. Changes nothing."""
    return findings.examine(Examination(context, strict=strict), [*checks, _LAST], _stopped)


def repair(context: RepositoryContext, checks: Sequence[RepositoryCheck], *, strict: bool = False) -> Repaired:
    """Repair what can be repaired, one check after the other, until nothing is left that can be."""
    relieve = context.places.reserve.relieve
    return findings.repair(lambda: Examination(context, strict=strict), [*checks, _LAST], _stopped, apply=relieve)


def _stopped(examination: Examination, check: RepositoryCheck, failure: Failure) -> Iterator[Finding]:
    if failure is examination.trouble:  # reported once, for all checks
        examination.not_made.append(check.name)
    elif isinstance(failure, Corrupt):
        source = str(failure.facts.get("source") or failure.facts.get("path") or check.name)
        yield finding("document-corrupt", source, failure.message, check=check.name)
    else:
        message, facts = f"the check {check.name} could not be made: {failure.message}", {"code": failure.code}
        yield finding("check-failed", check.name, message, None, failure.hint, check=check.name, **facts)


def _not_made(examination: Examination) -> Iterator[Finding]:
    names = examination.not_made
    if names:
        message = f"{len(names)} checks could not be made without the store: {', '.join(names)}"
        yield finding("checks-not-made", "store", message, checks=names)


_LAST = Check("not-made", _not_made)
