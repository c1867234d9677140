"""Opening the ledger of a directory: its store, its checkpoints, its claims and, on files, its lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import SKEW
from holdfast.errors import AlreadyExists, NotFound, NotInitialised
from holdfast.fs import calls
from holdfast.fs.directory import exists, make_directories
from holdfast.issues.tracker import Tracker
from holdfast.leases.deadlock import Look
from holdfast.ledger import log
from holdfast.ledger.checkpoints import FileCheckpoints
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import Ledger
from holdfast.ledger.service import Claims
from holdfast.ledger.verify import DIRECTORY, LedgerReport, verify
from holdfast.locks.file_lock import DEFAULT_TIMEOUT
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.retry import RetryConfig
from holdfast.repository.waits import LeasesElsewhere, LocksElsewhere
from holdfast.store.files import FileStore
from holdfast.store.model import Store
from holdfast.store.open import FILES, address_of, close_store, open_store, read_config, skew_of

AGENT = "holdfast"
META = "meta.json"
FIRST_EVENT = "event-000001.json"


class OpenLedger(NamedTuple):
    """A ledger with all that belongs to it. `lock` and `files` are there only if it is kept in files."""

    root: Path
    ledger: Ledger
    claims: Claims
    lock: LedgerLock | None
    files: ClaimFiles | None

    def close(self) -> None:
        """Let go of the files that are kept open for speed. Nothing is lost by not doing so."""
        store = self.ledger.store
        if isinstance(store, FileStore):
            store.close()

    def verify(self) -> LedgerReport:
        """Look it over."""
        return verify(self.ledger, None if self.lock is None else self.root, self.files)


def init_ledger(
    root: str | os.PathLike[str],
    *,
    lock_timeout: float = log.DEFAULT_LOCK_TIMEOUT,
    claim_files: bool = False,
    address: str | None = None,
) -> OpenLedger:
    """Begin a ledger in a directory; `AlreadyExists` if there is one.

    Commit point: `meta.json`. A directory of events that another program began is taken as it is.
    """
    store = open_store(root, address)
    try:
        log.create_meta(store, lock_timeout=lock_timeout, claim_files=claim_files)
    except AlreadyExists:
        raise AlreadyExists(
            f"there is a ledger in {os.path.abspath(root)} already",
            hint="Use it as it is, or begin another one elsewhere: --repo DIR.",
            path=os.path.abspath(root),
        ) from None
    if isinstance(store, FileStore):
        make_directories(store.path / DIRECTORY)
    return _wired(Path(os.path.abspath(root)), store, address)


def open_ledger(
    root: str | os.PathLike[str], *, address: str | None = None, actor: str | None = None
) -> OpenLedger:
    """Open the ledger of a directory, kept at this address if one is given; `NotFound` if there is none.

    `actor` (`kind:name`) is who claims, as for leases: it tells agents of one process apart. Makes nothing.
    """
    path = Path(os.path.abspath(root))
    if not _is_there(path):
        raise _no_ledger(path)
    store = open_store(path, address)
    files_there = isinstance(store, FileStore) and _is_there(store.path / DIRECTORY)
    try:
        if not files_there and log.read_meta(store) is None:
            raise _no_ledger(path)
        return _wired(path, store, address, actor or "")
    except BaseException:
        close_store(store)
        raise


def find_ledger(start: str | os.PathLike[str]) -> Path | None:
    """The directory that has a ledger: this one, or the nearest above it; None if there is none.

    What merely is called `ledger` is not taken for one: others call their directories so, too.
    Whether one that is kept on a server is there is found out by opening it.
    """
    here = Path(os.path.abspath(start))
    return next((each for each in (here, *here.parents) if _has_ledger(each)), None)


def _has_ledger(path: Path) -> bool:
    ledger = path / DIRECTORY
    if _is_there(ledger):
        return _is_there(path / META) or _is_there(ledger / FIRST_EVENT)
    return address_of(path) != FILES


def _wired(root: Path, store: Store, address: str | None, actor: str = "") -> OpenLedger:
    ledger = Ledger(
        store, shelf=FileCheckpoints(root)
    )  # also of a ledger on a server: a cache, here, of what is there
    # Leases are kept where it was settled, wherever the ledger is.
    settled = None if address is None else read_config(root).store
    elsewhere: list[Look] = [LeasesElsewhere(root, store, settled), LocksElsewhere(root)]
    if not isinstance(store, FileStore):
        return OpenLedger(root, ledger, Claims(ledger, actor=actor, elsewhere=elsewhere), None, None)
    files = ClaimFiles(store.path) if log.has_claim_files(log.read_meta(store)) else None
    claims = Claims(ledger, files=files, actor=actor, elsewhere=elsewhere)
    return OpenLedger(store.path, ledger, claims, LedgerLock(store.path / DIRECTORY, AGENT), files)


def _is_there(path: Path) -> bool:
    try:
        calls.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _no_ledger(path: Path) -> NotFound:
    return NotFound(
        f"there is no ledger in {path}",
        hint="Begin one with 'holdfast ledger init', or name its directory with --repo.",
        path=str(path),
    )


MARKS = (".jit", ".holdfast")
"""What a directory has in it that is the root of a tracker: its files, or else those of a store elsewhere."""


def find_root(start: Path) -> Path:
    """The directory with a tracker in it, this one or the nearest above it; else `NotInitialised`."""
    for mark in MARKS:
        for directory in (start, *start.parents):
            if exists(directory / mark):
                return directory
    raise NotInitialised(f"there is no issue tracker in {start}, nor above it", path=str(start))


def open_tracker(
    root: str | os.PathLike[str],
    *,
    actor: str,
    address: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    retry: RetryConfig | None = None,
) -> Tracker:
    """The tracker of the directory `root`, kept at this address if one is given, for who acts on it.

    `actor` is who that is, such as `agent:alice`. A new one is to be initialised first.
    """
    store = open_store(root, address, timeout=timeout)
    skew = skew_of(store)
    return Tracker(
        store,
        actor=actor,
        root=Path(os.path.abspath(root)),
        retry=retry,
        skew=SKEW if skew is None else skew,
    )
