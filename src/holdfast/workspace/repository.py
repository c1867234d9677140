"""A repository, opened: the directory with `.jvs/`, wired to its store, its leases and its parts."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.audit.chain import AuditTrail
from holdfast.errors import NotFound, Refused
from holdfast.fs import calls
from holdfast.leases.desk import DEFAULT_TTL, Desk
from holdfast.leases.held import HeldLease, acquire
from holdfast.locks.holders import Holder
from holdfast.store.base import Store
from holdfast.workspace.stores import open_store
from holdfast.worktrees.control import Control, Places, may_be_leased
from holdfast.worktrees.records import FORMAT, FORMAT_VERSION, MAIN, RepositoryFormat, worktree_keys

if TYPE_CHECKING:
    from holdfast.worktrees.doctor import Finding, Repaired


class Repository:
    """One repository. Its parts are loaded when they are first used."""

    def __init__(self, root: str | os.PathLike[str], *, holder: Holder | None = None) -> None:
        places = Places(Path(os.path.abspath(root)))
        store = open_store(places.root)
        self.format = _checked_format(store, places.root)
        trail = AuditTrail()
        desk = Desk(
            store,
            trail,
            also_named=worktree_keys,
            precondition=may_be_leased,
            holder=holder,
        )
        self.control = Control(places, store, trail, desk)

    @property
    def root(self) -> Path:
        return self.control.places.root

    @cached_property
    def desk(self) -> Desk:
        """Where leases are asked for."""
        return self.control.desk

    def lease(
        self,
        worktree: str = MAIN,
        *,
        ttl: float = DEFAULT_TTL,
        wait: float | None = 0.0,
        purpose: str = "",
        priority: int = 0,
    ) -> HeldLease:
        """Acquire the lease of a worktree, to be used as a context manager, also an asynchronous one."""
        request = self.desk.request(ttl=ttl, purpose=purpose, priority=priority)
        return acquire(self.desk, worktree, request, wait=wait)

    def examine(self, *, strict: bool = False) -> list[Finding]:
        """What is wrong here; changes nothing. `strict` reads every file of every snapshot."""
        from holdfast.workspace.checks import all_checks
        from holdfast.worktrees.doctor import examine

        return examine(self.control, all_checks(), strict=strict)

    def repair(self, *, strict: bool = False) -> Repaired:
        """Repair what can be repaired without risk. Repairing twice is the same as repairing once."""
        from holdfast.workspace.checks import all_checks
        from holdfast.worktrees.doctor import repair

        return repair(self.control, all_checks(), strict=strict)


def find_repository(start: str | os.PathLike[str]) -> Path:
    """The repository that a directory belongs to: the nearest one upwards that has `.jvs/`."""
    here = Path(os.path.abspath(start))
    for directory in (here, *here.parents):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(calls.stat(directory / ".jvs", follow_symlinks=False).st_mode):
                return directory
    raise NotFound(
        f"{here} is not in a Holdfast repository",
        hint="Go to one, name one with --repo, or make one: 'holdfast init DIR'.",
        path=str(here),
    )


def _checked_format(store: Store, root: Path) -> RepositoryFormat:
    document = store.read(FORMAT)
    if document is None:
        raise NotFound(
            f"{root} is not a Holdfast repository",
            hint="Make one with 'holdfast init DIR'.",
            path=str(root),
        )
    if document.record.version > FORMAT_VERSION:
        raise Refused(
            f"{root} has the format {document.record.version}, but this program knows {FORMAT_VERSION} at most",
            hint="Use the newer version of Holdfast that wrote it: an older one could do harm.",
            path=str(root),
            version=document.record.version,
            known=FORMAT_VERSION,
        )
    return document.record
