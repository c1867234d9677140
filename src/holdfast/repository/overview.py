"""Who holds what, across everything that can be held below a directory. Takes no lock, changes nothing.

Each kind of lock has a function here that turns what it knows into `Holding`s; `look_around` asks them
all. A kind that is not in use there has none. One that cannot be read is told about, not passed over.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import SKEW, SYSTEM_CLOCK, ClockReading, Now, format_duration, format_instant
from holdfast.errors import Failure, NotFound, NotInitialised, StoreUnavailable
from holdfast.fs import probe
from holdfast.fs.directory import Directory
from holdfast.fs.probe import filesystem_kind, is_network, network_troubles
from holdfast.issues.model import CLAIMS, Issue, State
from holdfast.issues.reading import look_at
from holdfast.leases.rules import LeaseWaiter
from holdfast.leases.service import LeaseService, LeaseState
from holdfast.leases.wait_notes import WaitNote, WaitNotes
from holdfast.locks.identity import Holder, Liveness, boot_clock_id, described_liveness, liveness
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.repo_lock import RepoLock
from holdfast.repository.holdings import TURNSTILE, Holding, HoldingWaiter, Reclaim, file_locks, waiting_at
from holdfast.repository.opening import open_ledger
from holdfast.repository.records import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    Consistency,
    Descriptor,
    RepositoryFormat,
)
from holdfast.repository.repository import Repository
from holdfast.repository.waits import is_repo_lock_of, waits_of_data, waits_of_repository
from holdfast.repository.worktrees import WorktreeState
from holdfast.store.files import FileStore
from holdfast.store.model import Store, Unreadable
from holdfast.store.open import address_of, close_store, open_store, skew_of

LEDGER, META_FILE = "ledger", "meta.json"
MARKS = (".jvs", ".jit", LEDGER, ".holdfast")
"""What a directory has in it that is a workspace."""


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
        if _is_workspace(directory):
            return directory
    raise NotFound(
        f"there is nothing of Holdfast in {start}, nor above it",
        hint="Begin with 'holdfast init DIR', 'holdfast issue init' or 'holdfast ledger init'.",
        path=str(start),
    )


def check_workspace(root: Path) -> None:
    """Raise `NotFound` if there is nothing of Holdfast in the directory that was named."""
    if not _names(root).intersection(MARKS):
        raise NotFound(
            f"there is nothing of Holdfast in {root}",
            hint="Name the directory that has the repository, the tracker or the ledger in it.",
            path=str(root),
        )


def _is_workspace(directory: Path) -> bool:
    """Whether anything of Holdfast is in a directory; that something is called `ledger` is not enough."""
    found = _names(directory)
    if found.intersection(MARKS) - {LEDGER}:
        return True
    if LEDGER not in found:
        return False
    return META_FILE in found or any(each.startswith("event-") for each in _names(directory / LEDGER))


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
    notes = WaitNotes([waits_of_repository(root)]).notes(sweep=False)
    sources["file lock"] = lambda: file_locks(root, notes)
    if repo_locks is not None:
        sources["repo lock"] = lambda: _repo_locks(repo_locks, notes)
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
    desk: LeaseService = repository.desk
    for config in repository.worktrees.configs():
        state = desk.state(config.worktree_id)
        if state is not None:
            yield _lease(state)


def _lease(state: LeaseState) -> Holding:
    lease = state.lease
    waiting = tuple(_waiter(each, place) for place, each in enumerate(state.waiters, 1))
    return Holding(
        kind="lease",
        what=lease.worktree_id,
        who=lease.actor or lease.holder_id,
        since=lease.created_at,
        until=lease.lease_expires_at,
        time_left=state.time_left,
        liveness=state.liveness,
        purpose=lease.purpose,
        waiting=waiting,
        reclaim=_reclaim_lease(state),
        process=lease.holder_id,
    )


def _reclaim_lease(state: LeaseState) -> Reclaim:
    name = state.lease.worktree_id
    if state.expired:
        return Reclaim(True, f"holdfast lease steal --worktree {name}")
    left = format_duration(state.time_left)
    acquire = f"holdfast lease acquire --worktree {name} --wait"
    if state.liveness is Liveness.DEAD:
        return Reclaim(False, f"its process is gone; free in {left}: {acquire} {_enough(state.time_left)}")
    return Reclaim(False, f"wait: {acquire} 10m")


def _waiter(waiter: LeaseWaiter, place: int) -> HoldingWaiter:
    holder = waiter.identity.holder(waiter.holder_id)
    alive = liveness(holder) if holder else Liveness.UNKNOWN
    return HoldingWaiter(waiter.actor or waiter.holder_id, place, waiter.since, waiter.purpose, alive)


def _enough(time_left: float) -> str:
    """A time to wait that is certainly not too short."""
    return format_duration(math.ceil(time_left) + 1)


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
            reclaim=_reclaim_operation(alive),
        )


def _reclaim_operation(alive: Liveness) -> Reclaim:
    """Who gets the lock of a directory finishes what was begun there: nobody can be run over by that."""
    if alive is Liveness.DEAD:
        return Reclaim(True, "holdfast doctor --fix")
    return Reclaim(False, "wait: it is under way; if it never ends: holdfast doctor")


# --- Work ---------------------------------------------------------------------------------------------


def _issue_claims(root: Path, address: str | None) -> Iterator[Holding]:
    with _opened(root, address) as store:
        moment = _moment(store)
        broken: Failure | None = None
        for issue_id, document in store.scan(CLAIMS.tolerant()):
            if isinstance(document.record, Unreadable):
                broken = broken or document.record.failure  # told when the others have been
                continue
            claim = document.record.claim
            if claim is None:
                continue
            alive, left = described_liveness(claim.holder), claim.time_left(moment, for_others=True)
            gated = _is_gated(store, issue_id)
            if gated and left <= 0:
                continue  # nobody works on it, and nobody can: it waits for its gates
            yield Holding(
                kind="issue",
                what=issue_id,
                who=claim.assignee,
                since=claim.claimed_at,
                until=claim.expires_at,
                time_left=left,
                liveness=alive,
                purpose=claim.purpose,
                waiting=(),
                reclaim=_BY_ITS_GATES if gated else _reclaim_issue(issue_id, left, alive),
                process=claim.holder.get("holder_id"),
            )
        if broken is not None:
            raise broken


def _moment(store: Store) -> Now:
    """Now, for one who judges the claims of others."""
    skew = skew_of(store)
    reading = ClockReading(boot_clock_id(), SYSTEM_CLOCK.boot(), SKEW if skew is None else skew)
    return reading.at(store.now())


_BY_ITS_GATES = Reclaim(False, "the work is done; it waits for its gates: holdfast gate check")


def _is_gated(store: Store, issue_id: str) -> bool:
    issue = look_at(store, issue_id)  # of one that cannot be read nobody knows
    return isinstance(issue, Issue) and issue.state is State.GATED


def _reclaim_issue(issue_id: str, left: float, alive: Liveness) -> Reclaim:
    command = f"holdfast issue claim {issue_id}"
    if left <= 0:
        return Reclaim(True, command)
    gone = "its process is gone; " if alive is Liveness.DEAD else ""
    return Reclaim(False, f"{gone}free in {format_duration(left)} unless it is renewed, then: {command}")


def _ledger_claims(root: Path, address: str | None) -> Iterator[Holding]:
    with contextlib.closing(open_ledger(root, address=address)) as opened:
        now = opened.ledger.store.now()
        lines: dict[str, list[HoldingWaiter]] = {}
        for waiter in opened.claims.waiting():
            line = lines.setdefault(waiter.node_id, [])
            alive = described_liveness(waiter.holder)
            line.append(HoldingWaiter(waiter.owner, len(line) + 1, waiter.since or None, "", alive))
        for claim in (*opened.claims.active(), *opened.claims.expired()):
            alive, left = described_liveness(claim.holder), claim.expiry() - now
            yield Holding(
                kind="claim",
                what=claim.node_id,
                who=claim.owner,
                since=claim.acquired_at,
                until=claim.expires_at,
                time_left=left,
                liveness=alive,
                purpose=claim.purpose,
                waiting=tuple(lines.get(claim.node_id, ())),
                reclaim=_reclaim_claim(root, claim.node_id, left, alive),
                process=claim.holder.get("holder_id"),
            )
        if opened.lock is not None:
            yield from _ledger_lock(opened.lock, opened.root)


def _reclaim_claim(root: Path, node: str, left: float, alive: Liveness) -> Reclaim:
    where = shlex.quote(str(root))
    if left <= 0:
        return Reclaim(True, f"holdfast ledger reap --repo {where}")
    take = f"holdfast ledger claim {node} --actor YOU --repo {where} --wait"
    if alive is Liveness.DEAD:
        return Reclaim(False, f"its process is gone; free in {format_duration(left)}: {take} {_enough(left)}")
    return Reclaim(False, f"wait: {take} 10m")


def _ledger_lock(lock: LedgerLock, root: Path) -> Iterator[Holding]:
    state = lock.state()
    if state is None:
        return
    dead = state.liveness is Liveness.DEAD
    unlock = f"holdfast ledger unlock --repo {shlex.quote(str(root))}"
    stuck = f"it is older than it should be: {unlock}"
    yield Holding(
        kind="ledger lock",
        what=str(state.path),
        who=state.holder.holder_id if state.holder else state.agent_id or "somebody",
        since=format_instant(SYSTEM_CLOCK.wall() - state.age),
        until=None,
        time_left=None,
        liveness=state.liveness,
        purpose=state.agent_id or "",
        waiting=waiting_at(root / TURNSTILE),
        reclaim=Reclaim(
            dead,
            f"taken over by the next one who appends; or {unlock} --identity {state.identity}"
            if dead
            else stuck
            if state.suspect
            else "wait: it is held for moments only",
        ),
    )


# --- Locks --------------------------------------------------------------------------------------------


def _repo_locks(locks: RepoLock, notes: Sequence[WaitNote]) -> Iterator[Holding]:
    """Each lock of a repository, with those who wait: they ask again and again, so there is no order."""
    told = (*notes, *WaitNotes([waits_of_data(locks.data_dir)]).notes(sweep=False))
    waiting = [note for note in {each.ticket: each for each in told}.values() if is_repo_lock_of(note, locks)]
    for repo_id, state in locks.states().items():
        if state is None:
            continue
        info = state.info
        holder: Holder | None = info.holder if info else None
        created_at = info.created_at if info else None
        who = f"pid {info.pid}" if info and info.pid else "somebody"
        command = f"holdfast repo-lock run {repo_id} --wait 10m -- COMMAND"
        yield Holding(
            kind="repo lock",
            what=repo_id,
            who=holder.holder_id if holder else who,
            since=None if created_at is None else format_instant(created_at),
            until=None,
            time_left=None,
            liveness=state.liveness,
            purpose=info.cmd if info else "",
            waiting=tuple(
                HoldingWaiter(
                    note.actor or note.holder.holder_id, None, note.since, note.purpose, Liveness.ALIVE
                )
                for note in waiting
                if note.thing.name == repo_id
            ),
            reclaim=Reclaim(state.stale, command if state.stale else f"wait: {command}"),
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


class RepositoryInfo(NamedTuple):
    """A repository as it stands. `engine` is how its snapshots are made, None if that cannot be told.

    If its store cannot be used, `trouble` says why; then the format is not known, there are no worktrees
    and snapshots to be told of, and `directories` is what there is of worktrees on this filesystem.
    """

    root: Path
    store: str
    """The address of the store, without secrets."""
    trouble: Failure | None
    format: RepositoryFormat | None
    worktrees: tuple[WorktreeState, ...]
    directories: tuple[str, ...]
    snapshots: int | None
    best_effort: tuple[Descriptor, ...]
    """Snapshots whose files may be of different moments."""
    filesystem: str
    network: bool
    network_troubles: tuple[str, ...]
    """Why what other machines do may not be seen here in time."""
    engine: str | None

    def warnings(self) -> list[str]:
        """What a user should know before relying on this repository."""
        found = [] if self.trouble is None else [self.trouble.message]
        found += [
            f"the worktree {each.config.worktree_id} is shared (high-risk): nothing keeps writers apart"
            for each in self.worktrees
            if each.is_shared
        ]
        if self.best_effort:
            found.append(
                f"{len(self.best_effort)} of {self.snapshots} snapshots were taken while files may have "
                "changed (best_effort)"
            )
        return [*found, *self.network_troubles]


class _Records(NamedTuple):
    """What only the store knows."""

    format: RepositoryFormat | None = None
    worktrees: tuple[WorktreeState, ...] = ()
    descriptors: tuple[Descriptor, ...] | None = None


def describe(repository: Repository) -> RepositoryInfo:
    """What is in a repository; if it was opened to be examined, also if its store cannot be used."""
    try:
        records = _records(repository)
    except Failure as failure:
        if failure is not repository.trouble:
            raise
        records = _Records()
    kind = filesystem_kind(repository.root)
    descriptors = records.descriptors or ()
    return RepositoryInfo(
        root=repository.root,
        store=_address(repository),
        trouble=repository.trouble,
        format=records.format,
        worktrees=records.worktrees,
        directories=tuple(_directories(repository)),
        snapshots=None if records.descriptors is None else len(descriptors),
        best_effort=tuple(each for each in descriptors if each.consistency_level is Consistency.BEST_EFFORT),
        filesystem=kind,
        network=is_network(kind),
        network_troubles=_network_troubles(repository, kind),
        engine=_engine(repository),
    )


def _records(repository: Repository) -> _Records:
    descriptors = [document.record for _, document in repository.control.store.scan(DESCRIPTORS)]
    return _Records(repository.format, tuple(repository.worktrees.states()), tuple(descriptors))


def _address(repository: Repository) -> str:
    try:
        return address_of(repository.root)
    except Failure:
        return "unknown"


def _directories(repository: Repository) -> Iterator[str]:
    """The worktrees that have a directory here."""
    places = repository.control.places
    for path, names in ((places.root, [MAIN]), (places.worktrees, None)):
        try:
            with Directory.open(path) as directory:
                there = directory.directories()
        except NotFound:
            continue
        yield from sorted(each for each in there if names is None or each in names)


def _network_troubles(repository: Repository, kind: str) -> tuple[str, ...]:
    """For records on a server, only that files may be seen late; else what stands against records here."""
    if isinstance(repository.control.store, FileStore) or kind == probe.KIND:
        return tuple(network_troubles(repository.root, kind))
    return ()


def _engine(repository: Repository) -> str | None:
    from holdfast.trees import choose_engine

    places = repository.control.places
    try:
        return choose_engine(places.payload(MAIN), places.snapshots).value
    except Failure:
        return None
