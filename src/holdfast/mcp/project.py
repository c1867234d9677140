"""Which directory a client works on, and what is in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from holdfast.errors import NotFound
from holdfast.fs.names import checked_actor
from holdfast.issues.tracker import Tracker
from holdfast.ledger.log import Ledger
from holdfast.locks.identity import Holder
from holdfast.locks.repo_lock import RepoLock
from holdfast.locks.retry import RetryConfig
from holdfast.repository.opening import find_root, open_ledger, open_tracker
from holdfast.repository.overview import find_workspace
from holdfast.repository.payloads import worktree_name
from holdfast.repository.repository import Repository, find_repository


class GivenLease(NamedTuple):
    """A lease that whoever started the server holds and hands on, as `holdfast run` does."""

    worktree: str
    lock_id: str
    token: int | None


class Settings(NamedTuple):
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
    settings: Settings

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


def find_project(settings: Settings, roots: Iterable[str]) -> Project:
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


def actor_of(settings: Settings, client: str) -> str:
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
