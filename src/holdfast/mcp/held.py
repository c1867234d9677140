"""What this server holds for its client: leases and work. It keeps them alive, and gives them all back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol
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
from holdfast.repository.opening import find_root, open_ledger, open_tracker
from holdfast.repository.overview import find_workspace
from holdfast.repository.payloads import worktree_name
from holdfast.repository.repository import Repository, find_repository

_log = logging.getLogger(__name__)


class WorktreeKey(NamedTuple):
    """A worktree of a repository."""

    root: Path
    worktree: str


class Work(NamedTuple):
    """A piece of work that was claimed. Closing `end` gives back what is not decided."""

    place: WorktreeKey
    assignment: Assignment
    end: contextlib.ExitStack


class _Ending(Protocol):
    def __call__(self) -> object: ...


class ClientHoldings:
    """Everything that is held. For any number of threads; after `release_all` nothing is kept any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[WorktreeKey, HeldLease] = {}
        self._work: dict[str, Work] = {}
        self._closed = False

    # --- Leases ------------------------------------------------------------------------------------

    def lease(self, place: WorktreeKey) -> HeldLease | None:
        """The lease that is held on a worktree, also if that is for work. It may have been lost."""
        with self._lock:
            if place in self._leases:
                return self._leases[place]
            return next((each.assignment.lease for each in self._work.values() if each.place == place), None)

    def keep_lease(self, place: WorktreeKey, lease: HeldLease) -> None:
        """Take charge of a lease: it is kept alive from now on."""
        with self._lock:
            if not self._closed:
                self._leases[place] = lease.beat()  # in the place of one that was lost, perhaps
                return
        lease.release()
        raise _client_gone()

    def drop_lease(self, place: WorktreeKey) -> HeldLease:
        """Hand out a lease, to be released; `LockNotHeld` if it is not held through this server."""
        with self._lock:
            lease = self._leases.pop(place, None)
            works_there = any(each.place == place for each in self._work.values())
        if lease is not None:
            return lease
        hint = "Take it first: take_lease. A lease that was taken elsewhere is released there."
        raise LockNotHeld(
            f"this server does not hold the lease of {place.worktree}"
            + (" for itself, but for work that was claimed" if works_there else ""),
            hint="It is given back with the work: finish_work." if works_there else hint,
            worktree=place.worktree,
        )

    # --- Work --------------------------------------------------------------------------------------

    def keep_work(self, work: Work) -> None:
        """Take charge of work."""
        name = work.assignment.issue.id
        with self._lock:
            closed, lost = self._closed, self._work.pop(name, None)
            if not closed:
                self._work[name] = work
        if lost is not None:
            lost.end.close()  # it ran out, and was claimed again
        if closed:
            work.end.close()
            raise _client_gone()

    def take_work(self, issue: str | None) -> Work:
        """Hand out work that was claimed through this server, so that nobody else finishes it meanwhile."""
        with self._lock:
            found = [name for name in self._work if name.startswith(issue or "")]
            if len(found) == 1:
                return self._work.pop(found[0])
            held = sorted(self._work)
        if len(found) > 1:
            raise Ambiguous(issue or "the work", held)
        raise NotFound(
            f"the issue {issue} was not claimed through this server" if issue else "no work is claimed",
            hint=f"Claimed through this server: {', '.join(held)}."
            if held
            else "Claim some: claim_next_work.",
            held=held,
        )

    # --- The end -----------------------------------------------------------------------------------

    def release_all(self) -> None:
        """Give everything back. What cannot be given back runs out by itself."""
        with self._lock:
            self._closed = True
            endings: list[_Ending] = [work.end.close for work in self._work.values()]
            endings += [lease.release for lease in self._leases.values()]
            self._work, self._leases = {}, {}
        for end in endings:
            try:
                end()
            except Exception:
                _log.exception("something could not be given back")  # the others can


def _client_gone() -> LockNotHeld:
    return LockNotHeld("the client has gone: everything was given back")


class GivenLease(NamedTuple):
    """A lease that whoever started the server holds and hands on, as `holdfast run` does."""

    worktree: str
    lock_id: str
    token: int | None


class ServerSettings(NamedTuple):
    """What the one who starts the server decides."""

    here: Path
    """The directory that the server was started in."""
    repo: Path | None
    """The project directory, if one was named."""
    data_directory: Path
    """Where the repo locks are."""
    actor: str | None = None
    """In whose name work is claimed; None: in the client's."""
    given: GivenLease | None = None
    client: Holder | None = None
    """The process that started us, for which we hold what we hold."""
    lock_timeout: float | None = None
    retry: RetryConfig | None = None


class Project(NamedTuple):
    """A project directory: a repository, a tracker and a ledger, as far as they are there."""

    root: Path
    start: Path
    """Where in it the client is."""
    settings: ServerSettings

    def repository(self) -> Repository:
        return Repository(self.root, actor=self.settings.actor)

    def worktree(self, repository: Repository, name: str | None) -> str:
        """The worktree that is meant; it need not be there."""
        return worktree_name(name) if name else repository.worktree_around(self.start)

    def given_lease(self, worktree: str) -> GivenLease | None:
        """The lease of this worktree that was handed on, if one was."""
        given, repo = self.settings.given, self.settings.repo
        here = repo is None or self.root in (repo, *repo.parents)
        return given if given is not None and here and given.worktree == worktree else None

    def tracker(self, actor: str) -> Tracker:
        settings = self.settings
        root = find_root(self.root)
        return open_tracker(root, actor=actor, timeout=settings.lock_timeout, retry=settings.retry)

    def ledger(self) -> Ledger:
        return open_ledger(self.root).ledger

    def ledger_if_any(self) -> Ledger | None:
        try:
            return self.ledger()
        except NotFound:
            return None

    def repo_locks(self) -> RepoLock:
        return RepoLock(self.settings.data_directory)


def find_project(settings: ServerSettings, roots: Iterable[str]) -> Project:
    """The project of a client with these roots; else the directory that was named, else where we are.

    Roots that have nothing to do with Holdfast are passed over. But if there are roots, and no directory
    was named, we do not look elsewhere: the client would be surprised.
    """
    places = list(filter(None, map(path_of, roots)))
    for place in places:
        try:
            return Project(_root_above(place), place, settings)
        except NotFound:
            continue
    if settings.repo is None and places:
        return Project(_root_above(places[0]), places[0], settings)  # raises, and names it
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
    """In whose name a client claims work."""
    if settings.actor is not None:
        return checked_actor(settings.actor, "actor")
    plain = "".join(each if each.isalnum() or each in "._-" else "-" for each in client).strip("-")
    return f"agent:{plain or 'mcp'}"


def _root_above(start: Path) -> Path:
    """The repository that a directory is in; where there is none, whatever else of Holdfast there is."""
    try:
        return find_repository(start)
    except NotFound:
        return find_workspace(start)
