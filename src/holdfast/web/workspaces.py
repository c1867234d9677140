"""A workspace: one repository, tracker or ledger that the server shows. Each request opens it again.

While the store is watched, issues are kept between requests. After a reported change, the next request reads them
again.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, NotFound
from holdfast.fs import calls
from holdfast.issues.model import EVENTS as ISSUE_EVENTS
from holdfast.issues.model import IssueSummary
from holdfast.issues.rules import IssueSet
from holdfast.issues.tracker import Tracker
from holdfast.ledger.log import EVENTS as LEDGER_EVENTS
from holdfast.locks.repo_lock import RepoLock
from holdfast.repository.landing import Landings
from holdfast.repository.ledgers import OpenLedger, open_ledger
from holdfast.repository.live import ChangeWatcher, holder_pids
from holdfast.repository.locating import is_git_home, main_checkout_of
from holdfast.repository.opening import open_tracker, tracker_of
from holdfast.repository.overview import Overview, look_around
from holdfast.repository.repository import Repository
from holdfast.store.model import Watch
from holdfast.store.open import open_store
from holdfast.web.html import Html

ISSUES, AUDIT, LANDING, LEDGER = "issues", "audit", "landing", "ledger"
REMEMBERED = 3.0  # seconds that an expensive answer is good enough
OpenWatch = Callable[[], AbstractContextManager[Watch]]


class WorkspaceSettings(NamedTuple):
    """Settings of the command line that the pages need."""

    actor: str
    address: str | None  # of the issues and the ledger, if it is not the configured store
    data_directory: Path
    home: Path | None = None  # of the user, shown as `~`


class Workspace:
    """One shown workspace. `slug` is its name in addresses, `label` its name for people, `where` its place for them."""

    def __init__(self, root: Path, slug: str, settings: WorkspaceSettings) -> None:
        self.root = root
        self.slug = slug
        self.settings = settings
        self.place: Path = _place(root)
        self.label: str = self.place.name or str(self.place)
        self.where: str = _where(self.place, settings.home)
        self.repo_option = ""  # of commands, if the server shows several workspaces
        self.exported: frozenset[str] | None = None  # in a file: the pages that it has, to which links lead
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # of the issues, which takes long if there are many
        self._locks: dict[str, threading.Lock] = {}
        self._answers: dict[str, tuple[float, Html]] = {}
        self._counts: Counter[str] = Counter()
        self._watched: set[str] = set()
        self._tracked: Path | None = None
        self._issues: tuple[int, IssueSet[IssueSummary]] | None = None
        self._holders: ChangeWatcher | None = None

    # --- Opening -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def repository(self, *, to_examine: bool = False) -> Iterator[Repository]:
        """The repository; raises `NotInitialised` if there is only a tracker or a ledger."""
        actor = self.settings.actor
        with Repository(
            self.root, actor=actor, ledger_address=self.settings.address, to_examine=to_examine
        ) as repository:
            yield repository

    @contextlib.contextmanager
    def tracker(self) -> Iterator[Tracker]:
        """The tracker; its issues may not exist yet."""
        root, settings = tracker_of(self.root), self.settings
        if root != self._tracked:  # it was created in another place than it was expected in
            self._tracked = root
            self._watched.discard(ISSUES)
        tracker = open_tracker(root, actor=settings.actor, address=settings.address, start=self.place)
        with contextlib.closing(tracker.store):
            yield tracker

    @contextlib.contextmanager
    def ledger(self) -> Iterator[OpenLedger]:
        """The ledger; raises `NotInitialised` if there is none."""
        opened = open_ledger(self.root, address=self.settings.address, actor=self.settings.actor)
        with contextlib.closing(opened):
            yield opened

    @contextlib.contextmanager
    def landings(self) -> Iterator[Landings]:
        """The landing queues; raises `Refused` if there is no git home."""
        with self.repository() as repository:
            yield Landings(repository, actor=self.settings.actor)

    # --- Reading -----------------------------------------------------------------------------------

    def overview(self) -> Overview:
        locks = RepoLock(self.settings.data_directory)
        address, issues = self.settings.address, self._known_issues()
        found = look_around(self.root, repo_locks=locks, address=address, issues=issues)
        if self._holders is not None:
            self._holders.watch_processes(holder_pids(found))
        return found

    def issues(self) -> IssueSet[IssueSummary]:
        """All issues as they are now, without their claims; raises `NotInitialised` if there is no tracker."""
        with self._reading:
            count, known = self._counts[ISSUES], self._known_issues()
            if known is None:
                with self.tracker() as tracker:
                    known = tracker.summaries()
                self._issues = count, known
        return known

    def _known_issues(self) -> IssueSet[IssueSummary] | None:
        """The issues of the last read, if no change was reported since."""
        count, known = self._issues or (-1, None)
        return known if ISSUES in self._watched and count == self._counts[ISSUES] else None

    def remembered(self, name: str, make: Callable[[], Html]) -> tuple[Html, bool]:
        """An answer, and whether it was computed just now. Of several concurrent callers, one computes it."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            known = self._answers.get(name)
            if known is not None and time.monotonic() - known[0] < REMEMBERED:
                return known[1], False
            made = make()
            self._answers[name] = time.monotonic(), made
            return made, True

    def last_answer(self, name: str) -> Html | None:
        """The last answer, however old."""
        known = self._answers.get(name)
        return None if known is None else known[1]

    def warm(self) -> None:
        """Read everything once, so that the first page does not wait for it."""
        with contextlib.suppress(Failure):
            self.issues()
        with contextlib.suppress(Failure):
            self.overview()

    # --- Watching ----------------------------------------------------------------------------------

    def watches(self) -> dict[str, OpenWatch]:
        """The records whose changes the pages follow, by topic. Watching creates nothing, and records that do not exist
        yet are watched too: a watch reports their creation."""
        watches: dict[str, OpenWatch] = {ISSUES: self._watch_issues, LEDGER: self._watch_ledger}
        if calls.exists(self.root / ".jvs"):
            watches[AUDIT] = self._watch_audit
        if is_git_home(str(self.root)):
            watches[LANDING] = self._watch_landing
        return watches

    @contextlib.contextmanager
    def _watch_issues(self) -> Iterator[Watch]:
        with self.tracker() as tracker, tracker.store.watch(ISSUE_EVENTS) as watch:
            yield watch

    @contextlib.contextmanager
    def _watch_audit(self) -> Iterator[Watch]:
        with self.repository() as repository, repository.watch_audit() as watch:
            yield watch

    @contextlib.contextmanager
    def _watch_landing(self) -> Iterator[Watch]:
        with self.repository() as repository, repository.watch_landing() as watch:
            yield watch

    @contextlib.contextmanager
    def _watch_ledger(self) -> Iterator[Watch]:
        store = open_store(self.root, self.settings.address)
        with contextlib.closing(store), store.watch(LEDGER_EVENTS) as watch:
            yield watch

    def watch_holders(self, notify: Callable[[], None]) -> ChangeWatcher:
        """From now on, report the end of each process that was seen to hold something: no store does."""
        self._holders = ChangeWatcher(notify)
        return self._holders

    def changed(self, topic: str) -> None:
        """Forget what was read of a topic."""
        self._counts[topic] += 1

    def begin_watch(self, topic: str) -> None:
        """From now on, every change of a topic is reported."""
        self.changed(topic)  # something may have changed before
        self._watched.add(topic)

    def is_watched(self, topic: str) -> bool:
        return topic in self._watched

    def end_watch(self, topic: str) -> bool:
        """Note that changes of a topic are no longer reported, so each request reads again. Returns whether they were
        before."""
        was = topic in self._watched
        self._watched.discard(topic)
        return was


def workspaces_of(roots: Sequence[Path], settings: WorkspaceSettings) -> list[Workspace]:
    """The workspaces in these directories, each with a slug of its own."""
    made: list[Workspace] = []
    for root in dict.fromkeys(roots):
        base = re.sub(r"[^A-Za-z0-9_-]+", "-", _place(root).name).strip("-")[:40] or "repository"
        taken = {each.slug for each in made}
        slug = next(name for number in range(len(taken) + 1) if (name := f"{base}{number or ''}") not in taken)
        made.append(Workspace(root, slug, settings))
    for each in made if len(made) > 1 else ():
        home = "~/" if each.where.startswith("~/") else ""
        each.repo_option = f" --repo {home}{shlex.quote(each.where.removeprefix(home))}"
    return made


def workspace_named(workspaces: Sequence[Workspace], slug: str) -> Workspace:
    for each in workspaces:
        if each.slug == slug:
            return each
    raise NotFound(f"this server shows nothing called {slug}")


def _place(root: Path) -> Path:
    """The directory that people know: the main checkout of a git home."""
    main = main_checkout_of(str(root)) if is_git_home(str(root)) else None
    return Path(main) if main is not None else root


def _where(place: Path, home: Path | None) -> str:
    """A place as people write it: `~` is the home directory."""
    return f"~/{place.relative_to(home)}" if home is not None and home in place.parents else str(place)
