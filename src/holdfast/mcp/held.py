"""The leases and claimed work that the server holds for its client, and the project of the client."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from holdfast.errors import Ambiguous, LockNotHeld, NotFound
from holdfast.fs.names import checked_actor
from holdfast.issues.tracker import Tracker
from holdfast.leases.service import HeldLease
from holdfast.ledger.log import Ledger
from holdfast.locks.identity import Holder
from holdfast.locks.repo_lock import RepoLock
from holdfast.locks.retry import RetryConfig
from holdfast.repository.agent import Assignment
from holdfast.repository.ledgers import open_ledger
from holdfast.repository.opening import find_root, open_tracker
from holdfast.repository.overview import find_workspace
from holdfast.repository.payloads import worktree_name
from holdfast.repository.repository import Repository, find_repository

_log = logging.getLogger(__name__)


class WorktreeKey(NamedTuple):
    root: Path
    worktree: str


class Work(NamedTuple):
    """Claimed work. Closing `end` releases the lease and a claim without an outcome."""

    key: WorktreeKey
    assignment: Assignment
    end: contextlib.ExitStack


class ClientHoldings:
    """Everything that the client holds; threads may share it. After `release_all`, nothing can be held any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[WorktreeKey, HeldLease] = {}
        self._work: dict[str, Work] = {}
        self._closed = False

    def lease(self, key: WorktreeKey) -> HeldLease | None:
        """The lease on a worktree, including one that belongs to work. It may have been lost."""
        with self._lock:
            if key in self._leases:
                return self._leases[key]
            return next((each.assignment.lease for each in self._work.values() if each.key == key), None)

    def keep_lease(self, key: WorktreeKey, lease: HeldLease) -> None:
        """Hold a lease, and renew it from now on."""
        with self._lock:
            if not self._closed:
                self._leases[key] = lease.beat()  # it may replace a lost lease
                return
        lease.release()
        raise _client_gone()

    def drop_lease(self, key: WorktreeKey) -> HeldLease:
        """Stop holding a lease, and return it to be released; `LockNotHeld` if this server does not hold it."""
        with self._lock:
            lease = self._leases.pop(key, None)
            for_work = any(each.key == key for each in self._work.values())
        if lease is not None:
            return lease
        message = f"this server does not hold the lease of {key.worktree}"
        hint = "Acquire it first: take_lease. A lease that was acquired elsewhere is released there."
        if for_work:
            message = f"this server holds the lease of {key.worktree} only for claimed work"
            hint = "It is released with the work: finish_work."
        raise LockNotHeld(message, hint=hint, worktree=key.worktree)

    def keep_work(self, work: Work) -> None:
        name = work.assignment.issue.id
        with self._lock:
            closed, lost = self._closed, self._work.pop(name, None)
            if not closed:
                self._work[name] = work
        if lost is not None:
            lost.end.close()  # it expired, and was claimed again
        if closed:
            work.end.close()
            raise _client_gone()

    def take_work(self, issue: str | None) -> Work:
        """Stop holding work, and return it, so that no other request can finish it meanwhile."""
        with self._lock:
            found = [name for name in self._work if name.startswith(issue or "")]
            if len(found) == 1:
                return self._work.pop(found[0])
            held = sorted(self._work)
        if len(found) > 1:
            raise Ambiguous(issue or "the work", held)
        raise NotFound(
            f"the issue {issue} was not claimed through this server" if issue else "no work is claimed",
            hint=f"Claimed here: {', '.join(held)}." if held else "Claim work first: claim_next_work.",
            held=held,
        )

    def release_all(self) -> None:
        """Release everything. A lease or claim that cannot be released expires."""
        with self._lock:
            self._closed = True
            endings: list[Callable[[], object]] = [work.end.close for work in self._work.values()]
            endings += [lease.release for lease in self._leases.values()]
            self._work, self._leases = {}, {}
        for end in endings:
            try:
                end()
            except Exception:
                _log.exception("a lease or a claim could not be released")  # the others can


def _client_gone() -> LockNotHeld:
    return LockNotHeld("the client has disconnected: everything was released")


class GivenLease(NamedTuple):
    """A lease of the process that started the server, as `holdfast run` hands it on."""

    worktree: str
    lock_id: str
    token: int | None


class ServerSettings(NamedTuple):
    here: Path  # where the server was started
    repo: Path | None  # the project directory, if one was named
    data_directory: Path
    actor: str | None = None  # the actor that claims work; None: the client
    given: GivenLease | None = None
    client: Holder | None = None  # the process that started the server, on whose behalf it holds leases and claims
    environment: Mapping[str, str] | None = None  # of setup commands
    lock_timeout: float | None = None
    retry: RetryConfig | None = None


class Project(NamedTuple):
    """A project directory: its repository, tracker and ledger, as far as they exist."""

    root: Path
    start: Path  # the directory of the client in it
    settings: ServerSettings

    def repository(self) -> Repository:
        return Repository(self.root, actor=self.settings.actor, environment=self.settings.environment)

    def worktree(self, repository: Repository, name: str | None) -> str:
        return worktree_name(name) if name else repository.worktree_around(self.start)

    def given_lease(self, worktree: str) -> GivenLease | None:
        given, repo = self.settings.given, self.settings.repo
        if given is not None and given.worktree == worktree:
            with contextlib.suppress(NotFound):
                return given if repo is None or _root_above(repo) == self.root else None
        return None

    def tracker(self, actor: str) -> Tracker:
        settings = self.settings
        root, timeout, retry = find_root(self.root), settings.lock_timeout, settings.retry
        return open_tracker(root, actor=actor, timeout=timeout, retry=retry, start=self.start)

    def ledger(self) -> Ledger:
        return open_ledger(self.root).ledger

    def ledger_if_any(self) -> Ledger | None:
        with contextlib.suppress(NotFound):
            return self.ledger()
        return None

    def repo_locks(self) -> RepoLock:
        return RepoLock(self.settings.data_directory)


def find_project(settings: ServerSettings, roots: Iterable[str]) -> Project:
    """The project of a client with these roots; else the named directory, else the current one.

    Roots without a repository, tracker or ledger are skipped. If there are roots and no directory was named, nothing
    else is tried: the client would be surprised.
    """
    directories = list(filter(None, map(path_of, roots)))
    for directory in directories:
        with contextlib.suppress(NotFound):
            return Project(_root_above(directory), directory, settings)
    if settings.repo is None and directories:
        return Project(_root_above(directories[0]), directories[0], settings)  # raises, and names it
    start = settings.repo or settings.here
    return Project(_root_above(start), start, settings)


def path_of(uri: str) -> Path | None:
    """The directory that a root names; None if it is not on this machine."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    path = Path(url2pathname(parts.path))
    return path if path.is_absolute() else None


def actor_of(settings: ServerSettings, client: str) -> str:
    """The actor in whose name a client claims work."""
    if settings.actor is not None:
        return checked_actor(settings.actor, "actor")
    name = "".join(each if each.isalnum() or each in "._-" else "-" for each in client).strip("-")
    return f"agent:{name or 'mcp'}"


def _root_above(start: Path) -> Path:
    """The repository, or else the workspace, around a directory."""
    try:
        return find_repository(start)
    except NotFound:
        return find_workspace(start)
