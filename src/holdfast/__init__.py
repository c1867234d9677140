"""Holdfast: many agents and people in one repository at the same time, without lost work or stuck locks.

What is offered here is loaded when it is first used: importing the package costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what checkers take for true; importing `typing` would double the cost of this

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.errors import Failure as Failure
    from holdfast.locks.file_locker import FileLocker as FileLocker
    from holdfast.locks.file_locker import LockGuard as LockGuard
    from holdfast.locks.ledger_lock import LedgerLock as LedgerLock
    from holdfast.locks.repo_lock import RepoLock as RepoLock
    from holdfast.locks.retry import RetryConfig as RetryConfig
    from holdfast.locks.retry import retry_with_backoff as retry_with_backoff
    from holdfast.workspace.repository import Repository as Repository

_HOMES = {
    "Failure": "holdfast.errors",
    "FileLocker": "holdfast.locks.file_locker",
    "LockGuard": "holdfast.locks.file_locker",
    "LedgerLock": "holdfast.locks.ledger_lock",
    "RepoLock": "holdfast.locks.repo_lock",
    "Repository": "holdfast.workspace.repository",
    "RetryConfig": "holdfast.locks.retry",
    "retry_with_backoff": "holdfast.locks.retry",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
