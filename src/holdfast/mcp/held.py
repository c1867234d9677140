"""What this server holds for its client: leases and work. It keeps them alive, and gives them all back."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.errors import Ambiguous, LockNotHeld, NotFound
from holdfast.leases.service import HeldLease
from holdfast.repository.agent import Assignment

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A worktree of a repository."""

    root: Path
    worktree: str


class Work(NamedTuple):
    """A piece of work that was claimed. Closing `end` gives back what is not decided."""

    place: Place
    assignment: Assignment
    end: contextlib.ExitStack


class _Ending(Protocol):
    def __call__(self) -> object: ...


class Held:
    """Everything that is held. For any number of threads; after `release_all` nothing is kept any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[Place, HeldLease] = {}
        self._work: dict[str, Work] = {}
        self._closed = False

    # --- Leases ------------------------------------------------------------------------------------

    def lease(self, place: Place) -> HeldLease | None:
        """The lease that is held on a worktree, also if that is for work. It may have been lost."""
        with self._lock:
            if place in self._leases:
                return self._leases[place]
            return next((each.assignment.lease for each in self._work.values() if each.place == place), None)

    def keep_lease(self, place: Place, lease: HeldLease) -> None:
        """Take charge of a lease: it is kept alive from now on."""
        with self._lock:
            if not self._closed:
                self._leases[place] = lease.beat()  # in the place of one that was lost, perhaps
                return
        lease.release()
        raise _client_gone()

    def drop_lease(self, place: Place) -> HeldLease:
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
