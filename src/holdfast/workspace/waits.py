"""What waits for what across kinds: the leases and the claims of one directory, seen together.

A repository and a ledger in the same directory belong together, also if the one is kept in files and the
other on a server. Whoever waits for a lease looks at the claims there too, and the other way round; and all
look at the notes of those who wait for file locks and repository locks (`lock_waits`). So everyone in a
circle sees all of it, and exactly one gives up. A ledger that is kept in another directory than the
repository is not seen with it: such waits are ended by their time limits.
"""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast.fs.directory import exists
from holdfast.leases.deadlock import Look, WaitGraph
from holdfast.store.audit import AuditTrail
from holdfast.store.files import FileStore
from holdfast.store.model import Store


class Elsewhere:
    """What can be held and waited for in another part of a directory. It is opened when it is first needed.

    `store` is that of the part that looks, None if it has none; `address` is where the other one is kept,
    None: in the same, or where it was settled.
    """

    def __init__(self, root: Path, store: Store | None, address: str | None = None) -> None:
        self._root = root
        self._store = store
        self._address = address
        self._opened: Store | None = None
        self._look: Look | None = None
        self._opening = threading.Lock()  # any number of threads may wait

    def __call__(self) -> WaitGraph:
        """The picture of it, as of now; an empty one if it is not in use here."""
        with self._opening:
            if self._look is None and self._is_in_use():
                self._look = self._open(self._other_store())
            look = self._look
        return WaitGraph() if look is None else look()

    def close(self) -> None:
        """Let go of what was opened here. What is being opened at this moment goes when nobody needs it."""
        from holdfast.store.open import close_store

        if not self._opening.acquire(blocking=False):
            return  # perhaps by asking a server that is away: not to be waited for
        try:
            self._look = None
            if self._opened is not None:
                close_store(self._opened)
                self._opened = None
        finally:
            self._opening.release()

    def _is_in_use(self) -> bool:
        raise NotImplementedError

    def _open(self, store: Store) -> Look:
        raise NotImplementedError

    def _other_store(self) -> Store:
        from holdfast.store.open import open_store

        if self._address is None and self._store is not None:
            return self._store
        self._opened = open_store(self._root, self._address)
        return self._opened


class ClaimsElsewhere(Elsewhere):
    """The claims of the ledger of a directory, for those who wait for a lease of the repository there."""

    def _is_in_use(self) -> bool:
        from holdfast.store.open import FILES, address_of

        if self._address is not None:
            return True
        if self._store is None:
            return address_of(self._root) != FILES or exists(self._root / "ledger")
        return not isinstance(self._store, FileStore) or exists(self._store.path / "ledger")

    def _open(self, store: Store) -> Look:
        from holdfast.ledger.checkpoints import FileCheckpoints
        from holdfast.ledger.log import Ledger
        from holdfast.ledger.service import ClaimService

        return ClaimService(Ledger(store, shelf=FileCheckpoints(self._root))).look


class LeasesElsewhere(Elsewhere):
    """The leases of the repository of a directory, for those who wait for a claim in the ledger there."""

    def _is_in_use(self) -> bool:
        return exists(self._root / ".jvs")

    def _open(self, store: Store) -> Look:
        from holdfast.clock import SKEW
        from holdfast.leases.service import LeaseService
        from holdfast.store.open import skew_of

        skew = skew_of(store)
        return LeaseService(store, AuditTrail(), skew=SKEW if skew is None else skew).look


class LocksElsewhere:
    """The file locks and repository locks that somebody in a repository waits for, and who holds them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self) -> WaitGraph:
        """The picture of them, as of now; an empty one if nobody ever waited for one here."""
        from holdfast.leases.wait_notes import WaitNotes
        from holdfast.workspace.lock_waits import look_at, waits_of_repository

        place = waits_of_repository(self._root)
        return look_at(WaitNotes([place])) if exists(place) else WaitGraph()
