"""Findings and the checks that report them: one mechanism for `doctor`, `issue validate` and `ledger verify`.

A *check* looks for one kind of damage and yields findings. A check that cannot read its records becomes a finding
itself and does not stop the others. A repairable finding carries its fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from holdfast.errors import Failure

MAX_ROUNDS = 5  # a repair may uncover another finding; fewer rounds suffice in practice
Subject = TypeVar("Subject")  # the examined thing, with state that its checks share


class Severity(StrEnum):
    ERROR = "error"  # something is lost or damaged, or will be
    WARNING = "warning"  # something was left behind or is wrong; no work is at risk
    NOTE = "note"  # worth knowing; needs no action


class Finding(NamedTuple):
    """A problem that a check found. `code` is stable: programs may rely on it."""

    code: str
    subject: str
    message: str
    meaning: str = ""
    remedy: str = ""
    fix: Callable[[], object] | None = None
    facts: Mapping[str, object] = MappingProxyType({})
    severity: Severity = Severity.ERROR

    @property
    def fixable(self) -> bool:
        return self.fix is not None

    def as_record(self) -> dict[str, object]:
        return {
            "code": self.code,
            "severity": self.severity.value,
            "subject": self.subject,
            "message": self.message,
            "meaning": self.meaning,
            "remedy": self.remedy,
            "fixable": self.fixable,
            **({"facts": dict(self.facts)} if self.facts else {}),
        }


warning = partial(Finding, severity=Severity.WARNING)
note = partial(Finding, severity=Severity.NOTE)


MEANINGS: dict[Severity, dict[str, str]] = {
    Severity.ERROR: {
        "audit-broken": "It was edited, or the disk is faulty. Entries from there on prove nothing.",
        "check-failed": "Its findings are unknown.",
        "control-linked": "Commands that need it are refused: a link could lead out of the repository.",
        "descriptor-missing": "Its files still exist, but it cannot be listed or restored.",
        "document-corrupt": "The record cannot be understood. Nothing that depends on it was examined.",
        "files-unproven": "This directory may be a copy: this machine gets no lease and takes no snapshot.",
        "filesystem-unsafe": "Two processes may hold one lock, or a power cut may lose acknowledged writes.",
        "group-wrong": "Other members of the group cannot use it.",
        "head-behind": "History omits a published snapshot, and garbage collection would delete it.",
        "head-missing": "History cannot be shown, and no snapshot can be taken. The worktree's files are untouched.",
        "owner-wrong": "Root created it, perhaps with sudo. The owner cannot change it.",
        "parent-missing": "History ends too early here. The snapshot itself is complete.",
        "permissions-missing": "Commands that write there fail.",
        "store-alarm": "The server reports an internal problem. Its records may be damaged.",
        "store-moved": "The records here are outdated, and every change is refused.",
        "store-full": "Every commit is refused, until the server has space and the alarm is disarmed.",
        "store-restored": "Acknowledged changes are missing from the records, and no worktree can be leased.",
        "snapshot-damaged": "The disk, or a program, has changed it. Restoring it would give wrong content.",
        "snapshot-incomplete": "It cannot be restored and is not listed. It was complete when published.",
        "worktree-directory-missing": "It was moved or deleted. Saved work is in its snapshots.",
        "worktree-disconnected": "The checkout was moved or copied, or the directory replaced. Commands refuse it.",
        "worktree-unregistered": "It was removed or pruned with git. Its snapshots and its branch still exist.",
    },
    Severity.WARNING: {
        "archive-unfinished": "They take up space. The process that archived them died, or has not finished.",
        "checks-not-made": "Their findings are unknown.",
        "clock-behind": "This machine's clock is behind, or another's is ahead. Leases and retention last longer.",
        "clock-differs": "Leases use the store's clock. Times printed by this machine are off.",
        "collection-unfinished": "Its process died. Marked snapshots cannot be referred to or restored.",
        "commit-conflict": "The other program's content was kept. The rest of the commit was applied.",
        "commit-unfinished": "Readers see it applied. The next change to its documents applies it on disk.",
        "control-file-in-payload": "Commands may take it for the repository. Every snapshot contains it.",
        "disk-full": "Snapshots and new leases fail. Existing content is safe; renew, release and gc use the reserve.",
        "draft-left": "Its process died. Nothing reads it.",
        "landing-branch-missing": "The queued work cannot land. Its commits are safe.",
        "lock-orphaned": "It protects nothing. A new worktree of this name could not be leased.",
        "operation-unfinished": "Its process died. Nobody can lease the worktree until it is finished.",
        "permissions-open": "Anybody can delete or forge its content.",
        "pin-dangling": "It protects nothing.",
        "record-foreign": "It is never read: the record of a worktree is config.json alone.",
        "reference-dangling": "It protects nothing.",
        "remnant-excessive": "It takes up space. A collection was not finished, or the trees that needed it are gone.",
        "scratch-abandoned": "It takes up space. It was never visible, or it was being removed.",
        "snapshot-directory-strange": "Holdfast neither created it nor uses it.",
        "store-filling": "When it is full, every commit is refused.",
        "tree-orphaned": "It takes up space. It is not visible, and the audit trail shows that it is not needed.",
        "tree-unknown": "It is not visible. It was copied here, or its descriptor and the audit trail were lost.",
        "worktree-directory-unknown": "Holdfast neither created it nor reads it, and takes no snapshots of it.",
    },
    Severity.NOTE: {
        "format-old": "It still works.",
        "lock-expired": "Its holder did not renew it. The next holder takes it over.",
        "permissions-readable": "They can read the names, hashes and records of private files.",
        "plan-expired": "It can no longer be run.",
        "store-risky": "It may lose records that it has acknowledged. The store's address accepts that, for a trial.",
        "worktree-moved": "It was moved with git, and works there.",
        "worktree-name-stale": "Its worktree was removed, or never completed.",
        "waiter-dead": "They are skipped when the lease is granted.",
    },
}
REMEDIES = {
    "archive-unfinished": "delete them from the server; they are in the segment",
    "audit-broken": "compare it with a backup",
    "checks-not-made": "repair the store, then run doctor again",
    "clock-behind": "synchronise the clocks, preferably with a time server",
    "control-linked": "replace it with a directory or file of the repository; a bind mount can be on another disk",
    "clock-differs": "set the clock of this machine or of the server",
    "collection-unfinished": "finish it if it was decided; otherwise unmark the snapshots",
    "commit-conflict": "compare both, make the change again if it is needed, and remove the file",
    "commit-unfinished": "apply it",
    "control-file-in-payload": "it is in your worktree; move it away if it is not yours",
    "descriptor-missing": "restore the descriptor from a backup; its tree is kept as it is",
    "disk-full": "'holdfast gc plan' lists what may be deleted; or free space elsewhere on the disk",
    "document-corrupt": "compare it with an older copy",
    "draft-left": "remove it",
    "filesystem-unsafe": "move the repository to a local filesystem, or use one of the server-backed stores",
    "group-wrong": "give it to the group of the repository; root can: 'sudo holdfast doctor --fix'",
    "head-behind": "there are several newest snapshots; keep each with 'holdfast ref create'",
    "head-missing": "the correct snapshot is unknown; restore the descriptor from a backup",
    "landing-branch-missing": "create the branch again, or withdraw the work: 'holdfast landing cancel ID'",
    "lock-expired": "release it",
    "lock-orphaned": "remove the lease; its token is never granted again",
    "operation-unfinished": "finish it",
    "parent-missing": "restore the descriptor from a backup",
    "owner-wrong": "give it to the owner of the repository; only root can: 'sudo holdfast doctor --fix'",
    "permissions-readable": "allow only the owner, and a group that can write there",
    "permissions-missing": "only its owner or an administrator can change that",
    "pin-dangling": "remove it; the audit trail still records it",
    "plan-expired": "delete it",
    "record-foreign": "Holdfast does not remove it; remove it if nothing needs it",
    "reference-dangling": "remove it; the audit trail still records it",
    "remnant-excessive": "remove the parts that no tree needs",
    "scratch-abandoned": "remove it",
    "snapshot-damaged": "'holdfast verify --all --repair' finds copies of lost and changed files; else use a backup",
    "snapshot-directory-strange": "Holdfast does not remove it; remove it if nothing needs it",
    "snapshot-incomplete": "restore its directory from a backup",
    "store-alarm": "'etcdctl alarm list' and the server's log say more; restore the member from a backup",
    "store-filling": "compact and defragment etcd, or start it with a larger '--quota-backend-bytes'",
    "store-full": "compact and defragment etcd, or raise its quota; then 'etcdctl alarm disarm'",
    "store-moved": "repeat an interrupted 'holdfast migrate'; otherwise use the new store",
    "store-risky": "upgrade the server",
    "tree-orphaned": "remove it",
    "tree-unknown": "other snapshots may share its directories",
    "waiter-dead": "remove them from the queue",
    "worktree-directory-missing": "put it back, or restore its head into a new worktree and remove this one",
    "worktree-directory-unknown": "it may contain work; move it elsewhere",
    "worktree-disconnected": "in the main checkout: 'git worktree repair PATH', unless it is another repository's",
    "worktree-moved": "record its new path",
    "worktree-name-stale": "remove the name",
    "worktree-unregistered": "delete its record; its snapshots stay",
}
"""The effect of `--fix`; for findings without a fix, advice for people. Some findings bring their own remedy."""
_KINDS = {code: (severity, each[code]) for severity, each in MEANINGS.items() for code in each}


def of(
    code: str, subject: str, message: str, fix: Callable[[], object] | None = None, remedy: str = "", /, **facts: object
) -> Finding:
    """A finding of the doctor, with the severity, meaning and remedy of its code."""
    severity, meaning = _KINDS[code]
    remedy = remedy or REMEDIES.get(code, "")
    if fix is None:
        remedy = f"nothing: {remedy}" if remedy else "nothing"
    return Finding(code, subject, message, meaning, remedy, fix, facts, severity)


class Check(NamedTuple, Generic[Subject]):
    """A named function that finds one kind of damage."""

    name: str
    find: Callable[[Subject], Iterable[Finding]]


class Repaired(NamedTuple):
    """The repaired findings, those whose repair failed (with the failure), and all findings of a new examination."""

    fixed: tuple[Finding, ...]
    failed: tuple[tuple[Finding, Failure], ...]
    remaining: tuple[Finding, ...]


Stopped = Callable[[Subject, Check[Subject], Failure], Iterable[Finding]]
"""Turns the failure that ended a check into findings, or raises it."""


def examine(subject: Subject, checks: Iterable[Check[Subject]], stopped: Stopped[Subject]) -> list[Finding]:
    """All findings, in the order of the checks, without duplicates."""
    found: dict[tuple[str, str, str], Finding] = {}
    for check in checks:
        for finding in _run(subject, check, stopped):
            found.setdefault((finding.code, finding.subject, finding.message), finding)
    return list(found.values())


def repair(
    subject: Callable[[], Subject],
    checks: Sequence[Check[Subject]],
    stopped: Stopped[Subject],
    *,
    apply: Callable[[Callable[[], object]], object] = lambda fix: fix(),
) -> Repaired:
    """Apply all fixes, check by check, until none is left. Each check gets a new subject.

    A fix that several findings of a check share is applied once. A failed fix is not tried again.
    """
    fixed: list[Finding] = []
    failed: dict[tuple[str, str], tuple[Finding, Failure]] = {}
    for _ in range(MAX_ROUNDS):
        before = len(fixed)
        for check in checks:
            applied: list[Callable[[], object]] = []
            for finding in list(_run(subject(), check, stopped)):
                if finding.fix is None or (finding.code, finding.subject) in failed:
                    continue
                try:
                    if finding.fix not in applied:
                        apply(finding.fix)
                        applied.append(finding.fix)
                except Failure as failure:
                    failed[finding.code, finding.subject] = finding, failure
                else:
                    fixed.append(finding)
        if len(fixed) == before:
            break
    return Repaired(tuple(fixed), tuple(failed.values()), tuple(examine(subject(), checks, stopped)))


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Whether any finding is more than a note."""
    return any(each.severity is not Severity.NOTE for each in findings)


def _run(subject: Subject, check: Check[Subject], stopped: Stopped[Subject]) -> Iterator[Finding]:
    """The findings of a check. A failure ends the check: incomplete facts would mislead it."""
    try:
        yield from check.find(subject)
    except Failure as failure:
        yield from stopped(subject, check, failure)
