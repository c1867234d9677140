"""Examining a repository: what is wrong with it, what that means, and what repairing would do.

A *check* is a function that looks at one kind of trouble and yields findings; the layers above put the
checks together into a list. Each looks in an order, and looks twice, such that what live processes
are doing at the moment is never taken for damage.

Repairing never deletes what users have made, nor what cannot be made again. Each repair is a
transaction that decides anew, or a removal of what provably nobody uses; repairing twice is the
same as repairing once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import Corrupt, Failure
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Descriptor,
    Operation,
    RepositoryContext,
    WorktreeConfig,
)

MOST_ROUNDS = 5
"""One repair may uncover what another one takes care of; it ends long before this."""


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Something is lost or damaged, or will be."""
    WARNING = "warning"
    """Something was left behind, or is not as it should be; no work is at risk."""
    NOTE = "note"
    """Worth knowing; it takes care of itself."""


class Finding(NamedTuple):
    """One thing that was found. `code` is stable: programs may rely on it."""

    code: str
    severity: Severity
    subject: str
    message: str
    meaning: str
    remedy: str
    fix: Callable[[], object] | None = None
    facts: Mapping[str, object] = MappingProxyType({})

    def as_record(self) -> dict[str, object]:
        """The finding as plain values."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "subject": self.subject,
            "message": self.message,
            "meaning": self.meaning,
            "remedy": self.remedy,
            "fixable": self.fix is not None,
            **({"facts": dict(self.facts)} if self.facts else {}),
        }


class Examination:
    """One pass over a repository. What several checks look at is read once."""

    def __init__(self, control: RepositoryContext, *, strict: bool = False) -> None:
        self.control = control
        self.strict = strict
        self.not_made: list[str] = []
        """The checks that could not be made, because the store cannot be used."""

    @property
    def trouble(self) -> Failure | None:
        """Why the store cannot be used; None as far as it is known to work."""
        return self.control.store.trouble

    @property
    def now(self) -> float:
        return self.control.store.now()

    @property
    def file_time(self) -> float:
        """What to judge the age of files by. Machines date them: without the store this one's is good."""
        try:
            return self.now
        except Failure as failure:
            if failure is not self.trouble:
                raise
            return SYSTEM_CLOCK.wall()

    @cached_property
    def descriptors(self) -> dict[str, Descriptor]:
        """All descriptors. What is found with them is confirmed with `descriptor` before it is told."""
        return {name: document.record for name, document in self.control.store.scan(DESCRIPTORS)}

    def descriptor(self, snapshot_id: str) -> Descriptor | None:
        """One descriptor as of now."""
        document = self.control.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record

    def operations(self) -> dict[str, Operation]:
        """What is pending now, by worktree."""
        return {name: document.record for name, document in self.control.store.scan(OPERATIONS)}

    def configs(self) -> dict[str, WorktreeConfig]:
        """The worktrees that are there now."""
        return {name: document.record for name, document in self.control.store.scan(WORKTREES)}

    def config(self, worktree: str) -> WorktreeConfig | None:
        """One worktree as of now."""
        document = self.control.store.read(WORKTREES.key(worktree))
        return None if document is None else document.record


Look = Callable[[Examination], Iterator[Finding]]


class Check(NamedTuple):
    """A kind of trouble to look for."""

    name: str
    look: Look


class Repaired(NamedTuple):
    """What was repaired, what was tried in vain and why, and what an examination finds afterwards."""

    fixed: tuple[Finding, ...]
    failed: tuple[tuple[Finding, Failure], ...]
    remaining: tuple[Finding, ...]


def examine(control: RepositoryContext, checks: Sequence[Check], *, strict: bool = False) -> list[Finding]:
    """All findings, in the order of the checks. Changes nothing."""
    examination = Examination(control, strict=strict)
    findings = list(_each_once(finding for check in checks for finding in _look(check, examination)))
    return [*findings, _not_made(examination)] if examination.not_made else findings


def repair(control: RepositoryContext, checks: Sequence[Check], *, strict: bool = False) -> Repaired:
    """Repair what can be repaired, one check after the other, until nothing is left that can be."""
    fixed: list[Finding] = []
    failed: dict[tuple[str, str], tuple[Finding, Failure]] = {}
    for _ in range(MOST_ROUNDS):
        again = False
        for check in checks:
            for finding in list(_look(check, Examination(control, strict=strict))):
                if finding.fix is None or (finding.code, finding.subject) in failed:
                    continue
                try:
                    control.places.reserve.relieve(finding.fix)
                except Failure as failure:
                    failed[finding.code, finding.subject] = finding, failure
                else:
                    fixed.append(finding)
                    again = True
        if not again:
            break
    return Repaired(tuple(fixed), tuple(failed.values()), tuple(examine(control, checks, strict=strict)))


def is_wrong(findings: Sequence[Finding]) -> bool:
    """Whether there is more than notes."""
    return any(each.severity is not Severity.NOTE for each in findings)


def _look(check: Check, examination: Examination) -> Iterator[Finding]:
    """The findings of a check. What it cannot read ends it: nothing is judged by half of the facts."""
    try:
        yield from check.look(examination)
    except Failure as failure:
        if failure is examination.trouble:  # that is told once, for all of them
            examination.not_made.append(check.name)
        else:
            yield _stopped(check, failure)


def _stopped(check: Check, failure: Failure) -> Finding:
    if isinstance(failure, Corrupt):
        return Finding(
            "document-corrupt",
            Severity.ERROR,
            str(failure.facts.get("source") or failure.facts.get("path") or check.name),
            failure.message,
            "A record cannot be understood. What depends on it was not examined.",
            "nothing: compare it with a copy from before; what it says cannot be made up",
            facts={"check": check.name},
        )
    return Finding(
        "check-failed",
        Severity.ERROR,
        check.name,
        f"the check {check.name} could not be made: {failure.message}",
        "What it would have found is not known.",
        f"nothing: {failure.hint}",
        facts={"check": check.name, "code": failure.code},
    )


def _not_made(examination: Examination) -> Finding:
    names = examination.not_made
    return Finding(
        "checks-not-made",
        Severity.WARNING,
        "store",
        f"{len(names)} checks could not be made without the store: {', '.join(names)}",
        "What they would have found is not known.",
        "nothing: see to the store, and examine the repository again",
        facts={"checks": names},
    )


def _each_once(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Leave out what another check has told already: one unreadable record stops several."""
    seen: set[tuple[str, str]] = set()
    for each in findings:
        if (each.code, each.subject) not in seen:
            seen.add((each.code, each.subject))
            yield each
