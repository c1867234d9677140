"""Finding, creating and opening the ledger of a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.clock import format_duration
from holdfast.errors import AlreadyExists, NotFound, NotInitialised
from holdfast.fs import calls
from holdfast.fs.directory import Directory, entry_exists, make_directories, resolved
from holdfast.ledger import log
from holdfast.ledger.log import DEFAULT_LOCK_TIMEOUT, META, Ledger, has_claim_files, read_meta
from holdfast.repository.locating import find_records, git_home_around
from holdfast.store.model import Create, Decision, Store
from holdfast.store.open import FILES, open_store, read_config

if TYPE_CHECKING:
    from holdfast.ledger.claim_files import ClaimFiles
    from holdfast.ledger.service import Claims
    from holdfast.ledger.verify import LedgerReport
    from holdfast.locks.ledger_lock import LedgerLock
    from holdfast.store.archive import Archive, Segment

AGENT = "holdfast"
DIRECTORY = "ledger"
META_FILE = "meta.json"
FIRST_EVENT = "event-000001.json"


class OpenLedger:
    """A ledger with its claims, lock and claim files. Each part is opened on first use. `lock` and `files` are None if
    a server keeps the ledger; `files` is also None if it has no claim files."""

    def __init__(self, root: Path, store: Store, address: str | None, actor: str = "") -> None:
        self._on_files = store.files is not None
        self._has_claim_files = self._on_files and has_claim_files(read_meta(store))
        self.root: Path = root if store.files is None else store.files.path
        # The checkpoints of a ledger on a server are here too: they are a cache.
        self.ledger = Ledger(store, checkpoint_root=root)
        self._directory = root
        self._address = address
        self._actor = actor

    @cached_property
    def claims(self) -> Claims:
        """The claims of the ledger."""
        from holdfast.ledger.service import Claims
        from holdfast.repository.waits import LeaseGraph, locks_waited_for

        # Leases are in the configured store, wherever the ledger is.
        leases = LeaseGraph(self._directory, self.ledger.store if self._address is None else None)
        others = (leases, partial(locks_waited_for, self._directory))
        return Claims(self.ledger, files=self.files, actor=self._actor, other_graphs=others)

    @cached_property
    def lock(self) -> LedgerLock | None:
        """The lock file of the ledger."""
        from holdfast.locks.ledger_lock import LedgerLock

        return LedgerLock(self.root / DIRECTORY, AGENT) if self._on_files else None

    @cached_property
    def files(self) -> ClaimFiles | None:
        """The claim files of the ledger."""
        from holdfast.ledger.claim_files import ClaimFiles

        return ClaimFiles(self.root) if self._has_claim_files else None

    def close(self) -> None:
        """Close cached files. Calling it is optional."""
        self.ledger.store.close()

    def break_lock(self, identity: str) -> int | None:
        """Break the ledger's lock, as `LedgerLock.break_lock` does. Even a holder that continues overwrites nothing: it
        may be about to rename its event to the next number, so an event that records the break takes that number
        first. Returns the number, or None if the holder is certainly dead."""
        from holdfast.store.layout import Layout
        from holdfast.store.streams import publish_without_lock

        if self.lock is None:
            raise NotFound("this ledger is on a server and has no lock file", path=str(self.root))
        state, number = self.lock.state(), None
        if state is not None and state.identity == identity and state.liveness.value != "dead":
            event = log.checked({"type": log.UNLOCKED, "identity": identity, "agent_id": state.agent_id})
            content = log.CODEC.encode(log.stamped(event, self.ledger.store.now()))
            with Directory.open(self.root / DIRECTORY) as directory:
                number = publish_without_lock(directory, Layout().locate(log.EVENTS.name), content)
        self.lock.break_lock(identity)
        return number

    def verify(self, segments: Sequence[Path] = ()) -> LedgerReport:
        """Examine the ledger, and its archived events if the files of all segments are given. Repairs nothing, but
        finishes a batch whose author is gone, as every reader does."""
        from holdfast.ledger.verify import verify

        return verify(self.ledger, self.root if self._on_files else None, self.files, segments)

    def archive(
        self, directory: Path, *, keep: int = 1, before: float | None = None, dry_run: bool = False
    ) -> list[Segment]:
        """Move the events of a ledger on a server, except the last `keep` and those that are not older than `before`,
        to files in a directory; return these segments."""
        from holdfast.ledger.projection import archivable
        from holdfast.locks.identity import current_holder
        from holdfast.store.archive import archive

        holder_id = current_holder().holder_id
        how: dict[str, Any] = {"keep": keep, "before": before, "dry_run": dry_run}
        return archive(self.ledger.store, archivable(), directory, holder_id=holder_id, **how)

    def archived(self) -> Archive | None:
        """The archived events; None if there are none."""
        from holdfast.store.archive import archive_of

        return archive_of(self.ledger.store, log.EVENTS.name)


def init_ledger(
    root: str | os.PathLike[str],
    *,
    lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
    claim_files: bool = False,
    address: str | None = None,
) -> OpenLedger:
    """Create a ledger in a directory; raises `AlreadyExists` if it has one. Commit point: `meta.json`. Events that
    another program has already appended there become its first events."""
    from holdfast.ledger.rules import checked_ttl

    path, store = resolved(root), open_store(root, address)
    meta: dict[str, Any] = {"lock_timeout": format_duration(checked_ttl(lock_timeout, "lock_timeout"))}
    if claim_files:
        meta["claim_files"] = True
    try:
        store.transact([META], lambda view, now: Decision([Create(META, meta)], None))
    except AlreadyExists:
        hint = "Use it, or create another one elsewhere: --repo DIR."
        raise AlreadyExists(f"a ledger already exists in {path}", hint=hint, path=str(path)) from None
    if store.files is not None:
        make_directories(store.files.path / DIRECTORY)
    return OpenLedger(path, store, address)


def open_ledger(root: str | os.PathLike[str], *, address: str | None = None, actor: str | None = None) -> OpenLedger:
    """Open the ledger of a directory, or at `address`; `NotInitialised` if there is none. `actor` (`kind:name`) is the
    claiming actor; it distinguishes agents of one process. Creates nothing."""
    path = resolved(root)
    if not entry_exists(path):
        raise _no_ledger(path)
    store = open_store(path, address)
    try:
        on_files = store.files is not None and entry_exists(store.files.path / DIRECTORY)
        if not on_files and read_meta(store) is None:
            raise _no_ledger(path)
        return OpenLedger(path, store, address, actor or "")
    except BaseException:
        store.close()
        raise


def find_ledger(start: str | os.PathLike[str]) -> Path | None:
    """The nearest directory upwards, from `start` on, that has a ledger; None if there is none. A directory that is
    merely called `ledger` does not count: other programs use that name too. Whether a ledger on a server exists is
    known only when it is opened."""
    here = resolved(start)
    found = calls.find_upwards(here, lambda each: _has_ledger(Path(each)) or entry_exists(Path(each, ".git")))
    if found is not None and entry_exists(Path(found, ".git")):
        found = find_records(str(here), lambda each: _has_ledger(Path(each)))  # it may be in the git home
    return None if found is None else Path(found)


def place_for_ledger(start: str | os.PathLike[str]) -> Path:
    """Where to create a ledger: in the git home around a directory, else in the directory itself."""
    home = git_home_around(str(resolved(start)))
    return Path(start if home is None else home)


def _has_ledger(path: Path) -> bool:
    if entry_exists(path / DIRECTORY):
        return entry_exists(path / META_FILE) or entry_exists(path / DIRECTORY / FIRST_EVENT)
    return read_config(path).store != FILES


def _no_ledger(path: Path) -> NotInitialised:
    return NotInitialised(f"there is no ledger in {path}", create="holdfast ledger init", path=str(path))
