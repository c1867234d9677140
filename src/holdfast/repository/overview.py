"""The overview: all leases, claims and locks below a directory; and the description of a repository. Takes no lock.

Each kind has a function that yields its `Holding`s; `look_around` calls them all and reports kinds that cannot be read.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.clock import SYSTEM_CLOCK, format_duration, format_instant
from holdfast.errors import Failure, NotFound, NotInitialised, StoreUnavailable
from holdfast.fs import probe
from holdfast.fs.directory import Directory, resolved
from holdfast.fs.mounts import filesystem_kind, is_network
from holdfast.fs.probe import network_problems
from holdfast.leases.rules import LeaseWaiter, NamedLease
from holdfast.leases.service import LeaseState
from holdfast.leases.wait_notes import WaitNotes
from holdfast.locks.identity import Holder, Liveness, described_liveness, liveness
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.repo_lock import RepoLock
from holdfast.repository import holdings as held
from holdfast.repository.agent_rows import AgentRow, agent_rows, count_changed_files
from holdfast.repository.context import DESCRIPTORS, OPERATIONS, Consistency, Descriptor, RepositoryFormat
from holdfast.repository.holdings import Holding, HoldingWaiter, Reclaim
from holdfast.repository.ledgers import open_ledger
from holdfast.repository.locating import find_records, git_home_of, is_git_home
from holdfast.repository.opening import tracker_of
from holdfast.repository.repository import Repository
from holdfast.repository.waits import waits_of_repository
from holdfast.repository.worktrees import WorktreeState
from holdfast.store.model import ServerVersion
from holdfast.store.open import address_of, open_store

if TYPE_CHECKING:
    from holdfast.issues.model import IssueSummary
    from holdfast.issues.rules import IssueSet
    from holdfast.repository.attention import Attention
    from holdfast.repository.conflicts import WorktreeConflict

LEDGER, META_FILE = "ledger", "meta.json"
MARKS = (".jvs", ".jit", LEDGER, ".holdfast")  # a workspace has one of these


class UnreadableKind(NamedTuple):
    """A kind of lock that could not be read, and why."""

    kind: str
    problem: str


class Overview(NamedTuple):
    """Everything that is held below a directory, as of one instant, and the agents that hold it.

    Only `with_details` fills in the conflicts, the changed files and landings of agents, and what needs attention.
    """

    root: Path
    at: str
    holdings: tuple[Holding, ...]
    unreadable: tuple[UnreadableKind, ...]
    conflicts: tuple[WorktreeConflict, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    attention: tuple[Attention, ...] = ()
    is_reachable: bool = True  # whether every server answered

    def as_record(self) -> dict[str, object]:
        """The overview as JSON values."""
        return {
            "root": str(self.root),
            "at": self.at,
            "holdings": [each.as_record() for each in self.holdings],
            "unreadable": [each._asdict() for each in self.unreadable],
            "conflicts": [each.as_record() for each in self.conflicts],
            "agents": [each.as_record() for each in self.agents],
            "attention": [each.as_record() for each in self.attention],
        }


def find_workspace(start: Path) -> Path:
    """The nearest directory upwards that has a repository, a tracker or a ledger."""
    found = find_records(str(resolved(start)), lambda directory: _is_workspace(Path(directory)))
    if found is not None:
        return Path(found)
    message = f"there is no repository, tracker or ledger in {start} or above it"
    raise NotInitialised(message, create=None, path=str(start))


def check_workspace(root: Path) -> None:
    """Raise `NotInitialised` if the directory is not a workspace."""
    if not _names(resolved(root)).intersection(MARKS) and git_home_of(str(root)) is None:
        raise NotInitialised(f"{root} has no repository, tracker or ledger", create=None, path=str(root))


def _is_workspace(directory: Path) -> bool:
    """Whether a directory has one of `MARKS`. A directory that is merely called `ledger` is not enough."""
    found = _names(directory)
    if found.intersection(MARKS) - {LEDGER}:
        return True
    if LEDGER not in found:
        return False
    return META_FILE in found or any(each.startswith("event-") for each in _names(directory / LEDGER))


def look_around(
    root: Path,
    *,
    repo_locks: RepoLock | None = None,
    address: str | None = None,
    issues: IssueSet[IssueSummary] | None = None,
) -> Overview:
    """Everything that is held below `root`, and all repository locks, which are in the data directory.

    `address` is the store of the issues and the ledger, if it is not the configured one; `issues` are the issues from
    an earlier read, if none has changed since.
    """
    root = _root_of(resolved(root))
    present = _names(root)
    tracker = root if ".jit" in present else _tracker_of(root)
    sources: dict[str, Callable[[], Iterable[Holding]]] = {}
    if ".jvs" in present:
        sources["lease"] = lambda: _of_repository(root, _leases)
        sources["operation"] = lambda: _of_repository(root, _operations)
    if ".jit" in present or tracker != root or ".holdfast" in present or address:
        sources["issue"] = lambda: held.issue_claims(tracker, address, issues)
    if "ledger" in present or ".holdfast" in present or address:
        sources["claim"] = lambda: _ledger_claims(root, address)
    notes = WaitNotes([waits_of_repository(root)]).notes(sweep=False)
    sources["file lock"] = lambda: held.file_locks(root, notes)
    if repo_locks is not None:
        sources["repo lock"] = lambda: held.repo_lock_holdings(repo_locks, notes)
    holdings: list[Holding] = []
    unreadable: list[UnreadableKind] = []
    stores = {"lease": None, "operation": None, "issue": address, "claim": address}
    away: dict[str | None, StoreUnavailable] = {}
    for kind, holdings_of in sources.items():
        try:
            if kind in stores and stores[kind] in away:
                raise away[stores[kind]]  # wait only once for an unavailable store
            holdings += holdings_of()
        except NotFound:
            continue  # this kind is not in use here
        except Failure as failure:
            unreadable.append(UnreadableKind(kind, failure.message))
            if kind in stores and isinstance(failure, StoreUnavailable):
                away[stores[kind]] = failure
    now = SYSTEM_CLOCK.wall() if None in away else _now(root)
    agents = agent_rows(holdings)
    return Overview(root, format_instant(now), tuple(holdings), tuple(unreadable), agents=agents, is_reachable=not away)


def with_details(overview: Overview, *, address: str | None = None) -> Overview:
    """The overview with the details that take longer to find out, because they depend on every file and issue."""
    from holdfast.repository.attention import completed, read_situation

    situation = read_situation(with_conflicts(overview), address=address, in_full=False)
    return completed(situation, changed_files(overview)).overview


def changed_files(overview: Overview) -> dict[str, int]:
    """The number of changed files in the worktree of each agent; empty if they cannot be compared."""
    worktrees = sorted({each.worktree for each in overview.agents if each.worktree is not None})
    if worktrees:
        with contextlib.suppress(Failure), Repository(overview.root) as repository:
            return count_changed_files(repository, worktrees)
    return {}


def with_conflicts(overview: Overview) -> Overview:
    """The overview with the conflicts of worktrees, if these are git worktrees. Examines every file."""
    if not (overview.is_reachable and is_git_home(str(overview.root))):
        return overview
    from holdfast.repository.conflicts import find_conflicts

    try:
        with Repository(overview.root) as repository:
            return overview._replace(conflicts=find_conflicts(repository).conflicts)
    except NotFound:  # before the first commit
        return overview
    except Failure as failure:
        return overview._replace(unreadable=(*overview.unreadable, UnreadableKind("conflict", failure.message)))


def _tracker_of(root: Path) -> Path:
    with contextlib.suppress(Failure):
        return tracker_of(root)
    return root


def _root_of(directory: Path) -> Path:
    """The directory itself, or the git home of the checkout there."""
    return Path(git_home_of(str(directory)) or directory)


def _now(root: Path) -> float:
    with contextlib.closing(open_store(root)) as store:
        return store.now()


def _of_repository(root: Path, holdings_of: Callable[[Repository], Iterable[Holding]]) -> list[Holding]:
    with Repository(root) as repository:
        return list(holdings_of(repository))


def _leases(repository: Repository) -> Iterator[Holding]:
    of_worktrees = (repository.leases.state(each.worktree_id) for each in repository.worktrees.configs())
    for state in filter(None, (*of_worktrees, *repository.named_leases.states())):
        lease = state.lease
        yield Holding(
            kind="named lease" if isinstance(lease, NamedLease) else "lease",
            what=lease.subject,
            who=lease.actor or lease.holder_id,
            since=lease.created_at,
            until=lease.lease_expires_at,
            time_left=state.time_left,
            liveness=state.liveness,
            purpose=lease.purpose,
            waiting=tuple(_waiter(each, position) for position, each in enumerate(state.waiters, 1)),
            reclaim=_reclaim_lease(state),
            process=lease.holder_id,
            ttl=lease.ttl,
        )


def _reclaim_lease(state: LeaseState) -> Reclaim:
    which = f"--{'name' if isinstance(state.lease, NamedLease) else 'worktree'} {state.lease.subject}"
    if state.expired:
        return Reclaim(True, f"holdfast lease steal {which}")
    left = format_duration(state.time_left)
    acquire = f"holdfast lease acquire {which} --wait"
    if state.liveness is Liveness.DEAD:
        return Reclaim(False, f"its process is gone; free in {left}: {acquire} {_enough(state.time_left)}")
    return Reclaim(False, f"wait: {acquire} 10m")


def _waiter(waiter: LeaseWaiter, position: int) -> HoldingWaiter:
    alive = _liveness(waiter.identity.holder(waiter.holder_id))
    process = waiter.on_behalf_of or waiter.holder_id
    return HoldingWaiter(waiter.actor or waiter.holder_id, position, waiter.since, waiter.purpose, alive, process)


def _liveness(holder: Holder | None) -> Liveness:
    return liveness(holder) if holder else Liveness.UNKNOWN


def _enough(time_left: float) -> str:
    return format_duration(math.ceil(time_left) + 1)


def _operations(repository: Repository) -> Iterator[Holding]:
    for name, document in repository.context.store.scan(OPERATIONS):
        operation = document.record
        alive = _liveness(operation.identity.holder(operation.holder_id))
        yield Holding(
            kind="operation",
            what=name,
            who=operation.holder_id,
            since=operation.begun_at,
            liveness=alive,
            purpose=operation.kind.value,
            # The doctor takes the payload lock first, so it never disturbs a live operation.
            reclaim=Reclaim(True, "holdfast doctor --fix")
            if alive is Liveness.DEAD
            else Reclaim(False, "wait: it is running; if it never ends: holdfast doctor"),
        )


def _ledger_claims(root: Path, address: str | None) -> Iterator[Holding]:
    with contextlib.closing(open_ledger(root, address=address)) as opened:
        now = opened.ledger.store.now()
        queues: dict[str, list[HoldingWaiter]] = {}
        for waiter in opened.claims.waiting():
            queue = queues.setdefault(waiter.node_id, [])
            alive = described_liveness(waiter.holder)
            process = waiter.holder.get("holder_id")
            queue.append(HoldingWaiter(waiter.owner, len(queue) + 1, waiter.since or None, "", alive, process))
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
                waiting=tuple(queues.get(claim.node_id, ())),
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
    how = f"it is unusually old: {unlock}" if state.suspect else "wait: it is held only briefly"
    if dead:
        how = f"the next append takes it over; or {unlock} --identity {state.identity}"
    yield Holding(
        kind="ledger lock",
        what=str(state.path),
        who=state.holder.holder_id if state.holder else state.agent_id or "somebody",
        since=format_instant(SYSTEM_CLOCK.wall() - state.age),
        liveness=state.liveness,
        purpose=state.agent_id or "",
        waiting=held.waiting_at(root / held.TURNSTILE),
        reclaim=Reclaim(dead, how),
    )


def _names(directory: Path) -> set[str]:
    try:
        with Directory.open(directory) as opened:
            return set(opened.names())
    except Failure:
        return set()


class RepositoryInfo(NamedTuple):
    """The description of a repository. `engine` is None if it is not known.

    If the store cannot be used, `trouble` says why; then only `directories` tells which worktrees exist.
    """

    root: Path
    store: str  # the address of the store, without secrets
    server: ServerVersion | None
    trouble: Failure | None
    format: RepositoryFormat | None
    worktrees: tuple[WorktreeState, ...]
    directories: tuple[str, ...]
    snapshots: int | None
    best_effort: tuple[Descriptor, ...]  # snapshots whose files may have changed while they were captured
    filesystem: str
    network: bool
    network_troubles: tuple[str, ...]  # why changes on other machines may be seen late here
    engine: str | None

    def warnings(self) -> list[str]:
        found = [] if self.trouble is None else [self.trouble.message]
        found += [
            f"the worktree {each.config.worktree_id} is shared (high-risk): nothing keeps writers apart"
            for each in self.worktrees
            if each.is_shared
        ]
        if self.best_effort:
            count = f"{len(self.best_effort)} of {self.snapshots}"
            found.append(f"{count} snapshots were taken while files may have changed (best_effort)")
        if self.server is not None and self.server.risk:
            found.append(f"the records are kept by {self.server}, which {self.server.risk}")
        return [*found, *self.network_troubles]


def describe(repository: Repository) -> RepositoryInfo:
    """Describe a repository, even one opened to be examined whose store cannot be used."""
    known, worktrees, descriptors = None, tuple[WorktreeState, ...](), list[Descriptor]()
    try:
        descriptors = [document.record for _, document in repository.context.store.scan(DESCRIPTORS)]
        known, worktrees = repository.format, tuple(repository.worktrees.states())
    except Failure as failure:
        if failure is not repository.trouble:
            raise
    kind, address, engine = filesystem_kind(repository.root), "unknown", None
    server = repository.context.store.server
    with contextlib.suppress(Failure):
        address = address_of(repository.root)
    with contextlib.suppress(Failure):
        engine = repository.context.home.engine()
    # For records on a server, all that matters is whether files are seen late.
    matters = repository.context.store.files is not None or kind == probe.JUICEFS
    return RepositoryInfo(
        root=repository.root,
        store=address,
        server=None if server is None else server.version,
        trouble=repository.trouble,
        format=known,
        worktrees=worktrees,
        directories=tuple(repository.context.home.directories()),
        snapshots=None if known is None else len(descriptors),
        best_effort=tuple(each for each in descriptors if each.consistency_level is Consistency.BEST_EFFORT),
        filesystem=kind,
        network=is_network(kind),
        network_troubles=tuple(network_problems(repository.root, kind)) if matters else (),
        engine=engine,
    )
