"""Holdfast: many agents and people in one repository at the same time, without lost work or stuck locks.

The names here and in `holdfast.errors` are the public API: docs/reference/python.md. Each is loaded when it
is first used, so importing the package costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for true; importing `typing` would double the import time

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.errors import Failure as Failure
    from holdfast.issues.claims import Claiming as Claiming
    from holdfast.issues.creating import NewIssue as NewIssue
    from holdfast.issues.dependencies import Dependencies as Dependencies
    from holdfast.issues.gates import Gating as Gating
    from holdfast.issues.model import Issue as Issue
    from holdfast.issues.model import Priority as Priority
    from holdfast.issues.model import State as State
    from holdfast.issues.tracker import Tracker as Tracker
    from holdfast.issues.tracker import Update as Update
    from holdfast.leases.service import HeldLease as HeldLease
    from holdfast.ledger.asynchronous import AsyncClaims as AsyncClaims
    from holdfast.ledger.asynchronous import AsyncLedger as AsyncLedger
    from holdfast.ledger.log import Ledger as Ledger
    from holdfast.ledger.service import Claims as Claims
    from holdfast.locks.file_lock import FileLocker as FileLocker
    from holdfast.locks.file_lock import LockGuard as LockGuard
    from holdfast.locks.ledger_lock import LedgerLock as LedgerLock
    from holdfast.locks.repo_lock import RepoLock as RepoLock
    from holdfast.locks.retry import RetryConfig as RetryConfig
    from holdfast.locks.retry import retry_with_backoff as retry_with_backoff
    from holdfast.repository.agent import Assignment as Assignment
    from holdfast.repository.agent import AssignmentOptions as AssignmentOptions
    from holdfast.repository.agent import Outcome as Outcome
    from holdfast.repository.agent import take_work as take_work
    from holdfast.repository.context import Descriptor as Descriptor
    from holdfast.repository.init import initialise as initialise
    from holdfast.repository.ledgers import OpenLedger as OpenLedger
    from holdfast.repository.ledgers import find_ledger as find_ledger
    from holdfast.repository.ledgers import init_ledger as init_ledger
    from holdfast.repository.ledgers import open_ledger as open_ledger
    from holdfast.repository.opening import open_tracker as open_tracker
    from holdfast.repository.overview import Overview as Overview
    from holdfast.repository.overview import look_around as look_around
    from holdfast.repository.repository import Repository as Repository
    from holdfast.repository.repository import find_repository as find_repository
    from holdfast.repository.snapshot_service import Snapshots as Snapshots
    from holdfast.repository.worktrees import Worktrees as Worktrees
    from holdfast.store.approvals import approve as approve
    from holdfast.store.approvals import revoke as revoke

_OFFERED = (
    ("repository.init", "initialise"),
    ("repository.repository", "find_repository Repository"),
    ("leases.service", "HeldLease"),
    ("repository.worktrees", "Worktrees"),
    ("repository.snapshot_service", "Snapshots"),
    ("repository.context", "Descriptor"),
    ("repository.opening", "open_tracker"),
    ("issues.tracker", "Tracker"),
    ("issues.claims", "Claiming"),
    ("issues.dependencies", "Dependencies"),
    ("issues.gates", "Gating"),
    ("issues.creating", "NewIssue"),
    ("issues.tracker", "Update"),
    ("issues.model", "Issue State Priority"),
    ("repository.agent", "take_work AssignmentOptions Assignment Outcome"),
    ("repository.ledgers", "init_ledger find_ledger open_ledger OpenLedger"),
    ("ledger.log", "Ledger"),
    ("ledger.service", "Claims"),
    ("ledger.asynchronous", "AsyncLedger AsyncClaims"),
    ("store.approvals", "approve revoke"),
    ("repository.overview", "look_around Overview"),
    ("locks.file_lock", "FileLocker LockGuard"),
    ("locks.repo_lock", "RepoLock"),
    ("locks.ledger_lock", "LedgerLock"),
    ("locks.retry", "RetryConfig retry_with_backoff"),
    ("errors", "Failure"),
)
_MODULES = {name: f"holdfast.{module}" for module, names in _OFFERED for name in names.split()}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
