"""The doctor: examines a repository, explains each finding, and repairs what it can.

Each check orders its reads, and confirms what it found by a second read, so that it never takes live work for damage.

A repair never deletes users' work, nor anything that cannot be recreated. Each repair is a transaction that
decides again, or removes something that is provably unused. Repairs are idempotent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import findings
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import Corrupt, Failure, NotFound
from holdfast.findings import Check, Finding, Repaired
from holdfast.fs.directory import Directory
from holdfast.fs.names import counted
from holdfast.repository.context import (
    DESCRIPTORS,
    OPERATIONS,
    WORKTREES,
    Descriptor,
    Operation,
    RepositoryContext,
    WorktreeConfig,
)

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress


class Examination:
    """One pass over a repository. Records that several checks need are read once."""

    def __init__(self, context: RepositoryContext, *, strict: bool = False, progress: Progress | None = None) -> None:
        self.context = context
        self.strict = strict
        self.progress = progress  # called with the number of examined snapshots, and of all
        self.not_made: list[str] = []  # the checks that could not run, because the store cannot be used

    @property
    def trouble(self) -> Failure | None:
        """The known reason why the store cannot be used, or None."""
        return self.context.store.trouble

    @property
    def now(self) -> float:
        return self.context.store.now()

    @property
    def file_time(self) -> float:
        """The current time for judging files; without a store, the time of this machine."""
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
        """The current descriptor of one snapshot."""
        document = self.context.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record

    def operations(self) -> dict[str, Operation]:
        """The pending operations, by worktree."""
        return {name: document.record for name, document in self.context.store.scan(OPERATIONS)}

    def configs(self) -> dict[str, WorktreeConfig]:
        return {name: document.record for name, document in self.context.store.scan(WORKTREES)}

    def config(self, worktree: str) -> WorktreeConfig | None:
        document = self.context.store.read(WORKTREES.key(worktree))
        return None if document is None else document.record


def names_in(path: Path) -> list[str]:
    """The entries of a directory, in order; none if it does not exist."""
    try:
        with Directory.open(path) as directory:
            return sorted(directory.names())
    except NotFound:
        return []


RepositoryCheck = Check[Examination]


def examine(
    context: RepositoryContext,
    checks: Sequence[RepositoryCheck],
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> list[Finding]:
    """All findings, in the order of the checks. Changes nothing."""
    return findings.examine(Examination(context, strict=strict, progress=progress), [*checks, _LAST], _stopped)


def repair(
    context: RepositoryContext,
    checks: Sequence[RepositoryCheck],
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> Repaired:
    """Repair all repairable findings, one check after the other."""
    subject = partial(Examination, context, strict=strict, progress=progress)
    return findings.repair(subject, [*checks, _LAST], _stopped, apply=context.paths.reserve.relieve)


def _stopped(examination: Examination, check: RepositoryCheck, failure: Failure) -> Iterator[Finding]:
    if failure is examination.trouble:  # reported once, for all checks
        examination.not_made.append(check.name)
    elif isinstance(failure, Corrupt):
        source = str(failure.facts.get("source") or failure.facts.get("path") or check.name)
        yield findings.of("document-corrupt", source, failure.message, check=check.name)
    else:
        message, facts = f"the check {check.name} could not run: {failure.message}", {"code": failure.code}
        yield findings.of("check-failed", check.name, message, None, failure.hint, check=check.name, **facts)


def _not_made(examination: Examination) -> Iterator[Finding]:
    names = examination.not_made
    if names:
        message = f"{counted(len(names), 'check')} could not run without the store: {', '.join(names)}"
        yield findings.of("checks-not-made", "store", message, checks=names)


_LAST = Check("not-made", _not_made)
