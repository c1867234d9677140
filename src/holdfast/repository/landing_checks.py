"""Runs of a target's checks on one commit, in scratch worktrees that stay prepared between runs.

Signatures only: the bodies follow in the next commits of this branch.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.issues.model import Checker

if TYPE_CHECKING:
    from holdfast.issues.tracker import Tracker
    from holdfast.repository.context import RepositoryPaths
    from holdfast.repository.repository import Repository


class LandingCheck(NamedTuple):
    """A command that a candidate must pass. `gate` and `issue_id` are set if a gate of an issue asks for it."""

    checker: Checker
    gate: str | None = None
    issue_id: str | None = None


class CommandRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command of a run. `exit_status` is None if the command was killed or not started; `message` says why."""

    command: str
    passed: bool
    seconds: float
    exit_status: int | None = None
    message: str | None = None
    gate: str | None = None
    issue_id: str | None = None


class CheckRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of the checks on one commit. `passed` is None while it runs, and if it was cancelled or its process died.

    The commands are those that have ended, setup commands included; the first that fails ends the run. The log has the
    name `run_id`: see `read_log`.
    """

    run_id: str
    commit: str
    target: str
    landing_id: str
    began_at: str
    holder_id: str
    passed: bool | None = None
    cancelled: bool = False
    seconds: float = 0.0
    commands: tuple[CommandRun, ...] = ()


def target_checks(repository: Repository) -> list[LandingCheck]:
    """The commands of the setting `land.checks`, with the time limit `land.check_timeout`.

    Raises `NotApproved` if the user has not approved one of them, or a setup command that would run before them.
    """
    raise NotImplementedError


def gate_checks(tracker: Tracker, issue_ids: Collection[str]) -> list[LandingCheck]:
    """The checkers of the automatic gates that these issues require and that have not passed, each checker once.

    Raises `NotApproved` if the user has not approved one of them.
    """
    raise NotImplementedError


def run_checks(
    repository: Repository,
    commit: str,
    checks: Sequence[LandingCheck],
    *,
    target: str,
    landing_id: str,
    cancelled: threading.Event | None = None,
) -> CheckRun:
    """Run the checks on a commit, one after the other, and return the record of the run.

    Takes a scratch worktree that no process uses, or makes one; it is locked until this returns. Threads and processes
    may call this at the same time, with a worktree for each. No document lock is held. When `cancelled` is set, the
    command that runs is ended with its whole process tree, and the run has no result. Whoever holds a lease meanwhile
    sets it when the lease is lost. Raises `Refused` in a home that is not a git checkout.
    """
    raise NotImplementedError


def check_runs(paths: RepositoryPaths) -> Iterator[CheckRun]:
    """The runs that this machine keeps, the newest first."""
    raise NotImplementedError


def read_log(paths: RepositoryPaths, run_id: str, *, offset: int = 0, limit: int = 1 << 20) -> bytes:
    """Part of the log of a run, also while it runs; empty at the end. Raises `NotFound` if the log is not kept here."""
    raise NotImplementedError
