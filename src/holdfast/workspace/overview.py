"""Who holds what, across everything that can be held below a directory. Takes no lock, changes nothing.

Each kind of lock has a function here that turns what it knows into `Holding`s; `look_around` asks them
all. A kind that is not in use there has none. One that cannot be read is told about, not passed over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import SYSTEM_CLOCK, format_duration, format_instant, parse_instant
from holdfast.errors import Failure, NotFound, NotInitialised, StoreUnavailable
from holdfast.fs.directory import Directory
from holdfast.issues.keys import CLAIMS
from holdfast.leases.desk import Desk, LeaseState
from holdfast.locks.holders import Holder, Liveness, liveness
from holdfast.locks.kernel_locks import find_holders
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.repo_lock import RepoLock
from holdfast.store.base import Store
from holdfast.workspace.ledgers import open_ledger
from holdfast.workspace.repository import Repository
from holdfast.workspace.stores import close_store, open_store
from holdfast.worktrees.records import OPERATIONS

MARKS = (".jvs", ".jit", "ledger", ".holdfast")
"""What a directory has in it that is a workspace."""

_GUARDS = (".jvs/guards", ".jvs/audit", ".jit", ".jit/issues", "ledger")


class Reclaim(NamedTuple):
    """Whether what is held can be had without harm, and how."""

    safe: bool
    how: str


class Waiting(NamedTuple):
    """One who waits, and in which place."""

    who: str
    place: int
    since: str | None
    purpose: str = ""


class Holding(NamedTuple):
    """Something that somebody holds. What is not known is None."""

    kind: str
    what: str
    who: str
    since: str | None
    until: str | None
    time_left: float | None
    liveness: Liveness
    purpose: str
    waiting: tuple[Waiting, ...]
    reclaim: Reclaim

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {
            **self._asdict(),
            "liveness": self.liveness.value,
            "waiting": [each._asdict() for each in self.waiting],
            "reclaim": self.reclaim._asdict(),
        }


class Trouble(NamedTuple):
    """A kind of lock that could not be looked at, and why."""

    kind: str
    problem: str


class Overview(NamedTuple):
    """What `look_around` saw."""

    root: Path
    at: str
    holdings: tuple[Holding, ...]
    troubles: tuple[Trouble, ...]

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {
            "root": str(self.root),
            "at": self.at,
            "holdings": [each.as_record() for each in self.holdings],
            "troubles": [each._asdict() for each in self.troubles],
        }


def find_workspace(start: Path) -> Path:
    """The nearest directory upwards that has anything of Holdfast in it."""
    for directory in (start, *start.parents):
        if _names(directory).intersection(MARKS):
            return directory
    raise NotFound(
        f"there is nothing of Holdfast in {start}, nor above it",
        hint="Begin with 'holdfast init DIR', 'holdfast issue init' or 'holdfast ledger init'.",
        path=str(start),
    )


def look_around(root: Path, *, repo_locks: RepoLock | None = None, address: str | None = None) -> Overview:
    """Everything that is held below `root`; and of the repo locks, which are kept elsewhere, all.

    `address` is where issues and the ledger are kept, if that is not as it was settled for `root`.
    """
    present = _names(root)
    sources: dict[str, Callable[[], Iterable[Holding]]] = {}
    if ".jvs" in present:
        sources["lease"] = lambda: _of_repository(root, _leases)
        sources["operation"] = lambda: _of_repository(root, _operations)
    if ".jit" in present or ".holdfast" in present or address:
        sources["issue"] = lambda: _issue_claims(root, address)
    if "ledger" in present or ".holdfast" in present or address:
        sources["claim"] = lambda: _ledger_claims(root, address)
    sources["file lock"] = lambda: _file_locks(root)
    if repo_locks is not None:
        sources["repo lock"] = lambda: _repo_locks(repo_locks)
    holdings: list[Holding] = []
    troubles: list[Trouble] = []
    stores = {"lease": None, "operation": None, "issue": address, "claim": address}
    away: dict[str | None, StoreUnavailable] = {}
    for kind, look in sources.items():
        try:
            if kind in stores and stores[kind] in away:
                raise away[stores[kind]]  # who is away is waited for once
            holdings += look()
        except (NotFound, NotInitialised):
            continue  # this kind is not in use here
        except Failure as failure:
            troubles.append(Trouble(kind, failure.message))
            if kind in stores and isinstance(failure, StoreUnavailable):
                away[stores[kind]] = failure
    now = SYSTEM_CLOCK.wall() if None in away else _now(root)
    return Overview(root, format_instant(now), tuple(holdings), tuple(troubles))


def _of_repository(root: Path, look: Callable[[Repository], Iterable[Holding]]) -> list[Holding]:
    with Repository(root) as repository:
        return list(look(repository))


@contextlib.contextmanager
def _opened(root: Path, address: str | None = None) -> Iterator[Store]:
    store = open_store(root, address)
    try:
        yield store
    finally:
        close_store(store)


# --- Worktrees ----------------------------------------------------------------------------------------


def _leases(repository: Repository) -> Iterator[Holding]:
    desk: Desk = repository.desk
    for config in repository.worktrees.configs():
        state = desk.state(config.worktree_id)
        if state is not None:
            yield _lease(state)


def _lease(state: LeaseState) -> Holding:
    lease = state.lease
    waiting = tuple(
        Waiting(each.holder_id, place, each.since, each.purpose)
        for place, each in enumerate(state.waiters, 1)
    )
    return Holding(
        kind="lease",
        what=lease.worktree_id,
        who=lease.holder_id,
        since=lease.created_at,
        until=lease.lease_expires_at,
        time_left=state.time_left,
        liveness=state.liveness,
        purpose=lease.purpose,
        waiting=waiting,
        reclaim=_reclaim_lease(state),
    )


def _reclaim_lease(state: LeaseState) -> Reclaim:
    name = state.lease.worktree_id
    if state.expired:
        return Reclaim(True, f"holdfast lock steal --worktree {name}")
    left = format_duration(state.time_left)
    if state.liveness is Liveness.DEAD:
        return Reclaim(False, f"its process is gone; free in {left}: holdfast lock acquire --wait {left}")
    return Reclaim(False, f"wait: holdfast lock acquire --worktree {name} --wait DURATION")


def _operations(repository: Repository) -> Iterator[Holding]:
    for name, document in repository.control.store.scan(OPERATIONS):
        operation = document.record
        holder = operation.identity.holder(operation.holder_id)
        alive = liveness(holder) if holder else Liveness.UNKNOWN
        yield Holding(
            kind="operation",
            what=name,
            who=operation.holder_id,
            since=operation.begun_at,
            until=None,
            time_left=None,
            liveness=alive,
            purpose=operation.kind.value,
            waiting=(),
            reclaim=Reclaim(alive is Liveness.DEAD, "the next command that needs it brings it to its end"),
        )


# --- Work ---------------------------------------------------------------------------------------------


def _issue_claims(root: Path, address: str | None) -> Iterator[Holding]:
    with _opened(root, address) as store:
        now = store.now()
        for issue_id, document in store.scan(CLAIMS):
            claim = document.record.claim
            if claim is None:
                continue
            expired = claim.is_expired(now)
            how = "claimed again by the next one" if expired else "wait until it is released or runs out"
            yield Holding(
                kind="issue",
                what=issue_id,
                who=claim.assignee,
                since=claim.claimed_at,
                until=claim.expires_at,
                time_left=parse_instant(claim.expires_at) - now,
                liveness=Liveness.UNKNOWN,
                purpose=claim.purpose,
                waiting=(),
                reclaim=Reclaim(expired, f"holdfast issue claim {issue_id}" if expired else how),
            )


def _ledger_claims(root: Path, address: str | None) -> Iterator[Holding]:
    with contextlib.closing(open_ledger(root, address=address)) as opened:
        now = opened.ledger.store.now()
        lines: dict[str, list[Waiting]] = {}
        for waiter in opened.claims.waiting():
            line = lines.setdefault(waiter.node_id, [])
            line.append(Waiting(waiter.owner, len(line) + 1, waiter.since or None))
        for claim in (*opened.claims.active(), *opened.claims.expired()):
            expired = claim.is_expired(now)
            yield Holding(
                kind="claim",
                what=claim.node_id,
                who=claim.owner,
                since=claim.acquired_at,
                until=claim.expires_at,
                time_left=claim.expiry() - now,
                liveness=Liveness.UNKNOWN,
                purpose="",
                waiting=tuple(lines.get(claim.node_id, ())),
                reclaim=Reclaim(
                    expired, "holdfast claim reap" if expired else "wait: holdfast claim take --wait"
                ),
            )
        if opened.lock is not None:
            yield from _ledger_lock(opened.lock)


def _ledger_lock(lock: LedgerLock) -> Iterator[Holding]:
    state = lock.state()
    if state is None:
        return
    dead = state.liveness is Liveness.DEAD
    yield Holding(
        kind="ledger lock",
        what=str(state.path),
        who=state.holder.holder_id if state.holder else state.agent_id or "somebody",
        since=None,
        until=None,
        time_left=None,
        liveness=state.liveness,
        purpose=state.agent_id or "",
        waiting=(),
        reclaim=Reclaim(dead, "holdfast ledger unlock" if dead else "wait: it is held for moments only"),
    )


# --- Locks --------------------------------------------------------------------------------------------


def _repo_locks(locks: RepoLock) -> Iterator[Holding]:
    for repo_id, state in locks.states().items():
        if state is None:
            continue
        info = state.info
        holder: Holder | None = info.holder if info else None
        created_at = info.created_at if info else None
        who = f"pid {info.pid}" if info and info.pid else "somebody"
        how = "taken over by the next one" if state.stale else f"holdfast repo-lock status {repo_id}"
        yield Holding(
            kind="repo lock",
            what=repo_id,
            who=holder.holder_id if holder else who,
            since=None if created_at is None else format_instant(created_at),
            until=None,
            time_left=None,
            liveness=state.liveness,
            purpose=info.cmd if info else "",
            waiting=(),
            reclaim=Reclaim(state.stale, how),
        )


def _file_locks(root: Path) -> Iterator[Holding]:
    """The locks on our own lock files that somebody holds at this very moment."""
    for relative in _GUARDS:
        for name in sorted(_names(root / relative)):
            if name.endswith(".lock") and name != "ledger.lock":
                yield from _file_lock(root / relative / name, f"{relative}/{name}")


def _file_lock(path: Path, shown: str) -> Iterator[Holding]:
    seen = find_holders(path) or []
    waiting = [each for each in seen if each.waiting]
    for holder in (each for each in seen if not each.waiting):
        yield Holding(
            kind="file lock",
            what=shown,
            who=f"pid {holder.pid}" if holder.pid else "a process that cannot be seen from here",
            since=None,
            until=None,
            time_left=None,
            liveness=Liveness.ALIVE,
            purpose=holder.command or "",
            waiting=tuple(
                Waiting(f"pid {each.pid}", place, None, each.command or "")
                for place, each in enumerate(waiting, 1)
            ),
            reclaim=Reclaim(False, "wait: the kernel frees it when the process lets go or ends"),
        )


def _names(directory: Path) -> set[str]:
    try:
        with Directory.open(directory) as opened:
            return set(opened.names())
    except Failure:
        return set()


def _now(root: Path) -> float:
    with _opened(root) as store:
        return store.now()
