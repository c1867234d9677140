"""Findings and the checks that make them: one mechanism for `doctor`, `issue validate` and `ledger verify`.

A *check* looks at one kind of damage and yields findings. A check that cannot read what it needs becomes a
finding itself and does not stop the others. A finding that can be repaired carries its fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from holdfast.errors import Failure

MAX_ROUNDS = 5  # one repair may uncover what another one repairs; this ends long before

Subject = TypeVar("Subject")  # what is examined, with whatever its checks share


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # something is lost or damaged, or will be
    WARNING = "warning"  # something was left behind, or is not as it should be; no work is at risk
    NOTE = "note"  # worth knowing; it takes care of itself


class Finding(NamedTuple):
    """One thing that was found. `code` is stable: programs may rely on it."""

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


class Check(NamedTuple, Generic[Subject]):
    """A kind of damage, and how it is found."""

    name: str
    find: Callable[[Subject], Iterable[Finding]]


class Repaired(NamedTuple):
    """What was repaired, what could not be and why, and what an examination finds afterwards."""

    fixed: tuple[Finding, ...]
    failed: tuple[tuple[Finding, Failure], ...]
    remaining: tuple[Finding, ...]


Stopped = Callable[[Subject, Check[Subject], Failure], Iterable[Finding]]
"""Turns the failure that ended a check into findings; raises what is not to be reported as one."""


def examine(subject: Subject, checks: Iterable[Check[Subject]], stopped: Stopped[Subject]) -> list[Finding]:
    """All findings, in the order of the checks. What several checks find is reported once."""
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
    """Apply all fixes, check by check, each check on a new subject, until nothing is left to be fixed.

    Findings of one check may share a fix, which is then applied once. What failed is not tried again.
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
    """Whether there is more than notes."""
    return any(each.severity is not Severity.NOTE for each in findings)


def _run(subject: Subject, check: Check[Subject], stopped: Stopped[Subject]) -> Iterator[Finding]:
    """The findings of a check. A failure ends it: nothing is judged by half of the facts."""
    try:
        yield from check.find(subject)
    except Failure as failure:
        yield from stopped(subject, check, failure)
