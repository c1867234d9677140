"""Deadlock detection: finds cycles of waits, in which each participant waits for a resource that the next one holds.

Each kind of lock, lease or claim that can be waited for has its own `WaitGraph`; a cycle may lead through
several, so they are merged. The steps are those of docs/protocols/waits.md:

2. From its own wait, the waiter follows the graph: from the holder to the resource that it waits for, and so on.
   A wait for a resource with several holders is a wait for each of them; sharers do not wait for each other. A wait
   for a resource that the waiter itself holds is not a deadlock: another thread or command may still release it.
3. The youngest wait gives up: it has lost the least. All waiters in a cycle judge by the same records, so exactly one
   gives up.
4. One reading is not a consistent snapshot, so the graph is read twice. Tickets and ids of holds are never
   reused: every wait and hold in both readings existed throughout, all at once.

Identity: a participant that names itself (the owner of a claim) is known by that name. Others are known by their
processes: their own, and that of the agent for which they act. The descendants of a process share a hold that is for
them (a lease). Agents in one process that name different actors are different participants.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.errors import Deadlock, Failure
from holdfast.locks.identity import Holder, Liveness, liveness


class Resource(NamedTuple):
    """Something that can be held: `kind` and `name`, as in `the lease on main`. `place` tells resources with the same
    name apart; messages leave it out."""

    kind: str
    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"the {self.kind} on {self.name}"


class Participant(NamedTuple):
    """A holder or waiter: the name it gave itself, if any, and its processes (see `process_ids`). `above` are their
    ancestors. `proofs` prove its holds, even those that another process acquired: see `proof_of`."""

    label: str
    owner: str = ""
    processes: frozenset[str] = frozenset()
    above: frozenset[str] = frozenset()
    actor: str = ""
    proofs: frozenset[str] = frozenset()


class Hold(NamedTuple):
    """A held resource. `hold_id` tells this hold apart from all others, earlier and later. `by_process` says that only
    the process is known, not the agent in it."""

    resource: Resource
    holder: Participant
    hold_id: str
    for_descendants: bool = False
    shared: bool = False
    by_process: bool = False


class WaitEdge(NamedTuple):
    """A wait for a resource. `ticket` tells this wait apart from all others; `since` sorts by age."""

    resource: Resource
    waiter: Participant
    since: str
    ticket: str
    shared: bool = False

    def is_of(self, hold: Hold) -> bool:
        """Whether the waiter is certainly the holder."""
        same_process = not hold.holder.processes.isdisjoint(self.waiter.processes)
        if hold.by_process and self.waiter.actor and same_process:
            return False  # perhaps another agent of this process
        return self.may_be_of(hold)

    def may_be_of(self, hold: Hold) -> bool:
        """Whether the waiter may be the holder."""
        mine, theirs = self.waiter, hold.holder
        if mine.proofs and proof_of(hold.hold_id) in mine.proofs:
            return True
        if mine.owner and theirs.owner:
            return mine.owner == theirs.owner
        if mine.actor and theirs.actor and mine.actor != theirs.actor:
            return False
        ours = mine.processes | mine.above if hold.for_descendants else mine.processes
        return not ours.isdisjoint(theirs.processes)

    def is_blocked_by(self, hold: Hold) -> bool:
        """Whether this wait can end only after another participant ends that hold."""
        return not (self.shared and hold.shared) and not self.may_be_of(hold)

    def age(self) -> tuple[str, str]:
        return self.since, self.ticket


class WaitGraph(NamedTuple):
    """The holds and the waits at one time."""

    holds: tuple[Hold, ...] = ()
    waits: tuple[WaitEdge, ...] = ()


class Link(NamedTuple):
    """A wait, and a hold that blocks it."""

    wait: WaitEdge
    hold: Hold


Cycle = tuple[Link, ...]

ReadGraph = Callable[[], WaitGraph]  # reads the current graph of one kind, without taking a lock


def check_deadlock(ticket: str, own: ReadGraph, others: Sequence[ReadGraph] = ()) -> None:
    """Raise `Deadlock` if the wait with this ticket is part of a cycle and must give up."""
    cycle = find_cycle(ticket, _merged(own, others))  # 2.
    if cycle and youngest(cycle).ticket == ticket and is_in(cycle, _merged(own, others)):  # 3. and 4.
        raise _deadlock(cycle)


def find_cycle(ticket: str, graph: WaitGraph) -> Cycle:
    """A cycle that contains the wait with this ticket, beginning with that wait; empty if there is none. A participant
    may have several waits: a cycle through any of them blocks that one."""
    holds: dict[Resource, list[Hold]] = {}
    for hold in graph.holds:
        holds.setdefault(hold.resource, []).append(hold)
    waits = sorted(graph.waits, key=WaitEdge.age)
    paths: deque[Cycle] = deque((link,) for wait in waits if wait.ticket == ticket for link in _links(wait, holds))
    visited = {ticket}
    while paths:  # shortest first: the first cycle found contains no smaller one
        path = paths.popleft()
        for wait in waits:
            if not wait.is_of(path[-1].hold):
                continue
            if wait.ticket == ticket:
                return path
            if wait.ticket not in visited:
                visited.add(wait.ticket)
                paths.extend((*path, link) for link in _links(wait, holds))
    return ()


def youngest(cycle: Cycle) -> WaitEdge:
    """The wait that gives up."""
    return max((link.wait for link in cycle), key=WaitEdge.age)


def is_in(cycle: Cycle, graph: WaitGraph) -> bool:
    """Whether every wait and every hold of the cycle is also in a later graph."""
    waits = {(wait.ticket, wait.resource) for wait in graph.waits}
    holds = {(hold.hold_id, hold.resource) for hold in graph.holds}
    return all((wait.ticket, wait.resource) in waits and (hold.hold_id, hold.resource) in holds for wait, hold in cycle)


def process_ids(holder_ids: Iterable[str], boot_id: str, pid_namespace: str) -> frozenset[str]:
    """Ids of processes that no other process has, not even one with the same pid in another container."""

    def process_id(holder_id: str) -> str:  # without the user, which may have another name in another container
        host, *rest = holder_id.split(":")
        known = ":".join((host, *rest[1:])) if len(rest) == 3 else holder_id
        return f"{known} {boot_id} {pid_namespace}"

    return frozenset(process_id(each) for each in holder_ids if each)


def proof_of(hold_id: str) -> str:
    """A digest that proves knowledge of the id of a hold without revealing it."""
    return hashlib.blake2s(hold_id.encode(), person=b"holds", digest_size=16).hexdigest() if hold_id else ""


def is_dead(holder: Holder | None) -> bool:
    """Whether a waiter is certainly dead; a dead one does not wait (5.)."""
    return holder is not None and liveness(holder) is Liveness.DEAD


def _links(wait: WaitEdge, holds: Mapping[Resource, Sequence[Hold]]) -> list[Link]:
    return [Link(wait, hold) for hold in holds.get(wait.resource, ()) if wait.is_blocked_by(hold)]


def _merged(own: ReadGraph, others: Sequence[ReadGraph]) -> WaitGraph:
    graphs = [own()]
    for read in others:
        try:
            graphs.append(read())
        except Failure:  # unreachable or unreadable: cycles through it are not found for now
            continue
    holds = tuple(hold for each in graphs for hold in each.holds)
    return WaitGraph(holds, tuple(wait for each in graphs for wait in each.waits))


def _deadlock(cycle: Cycle) -> Deadlock:
    links = []
    for (wait, hold), (following, _) in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        resource, holder, waiter = wait.resource, hold.holder.label, following.waiter.label
        held_by = holder if holder == waiter else f"{holder} ({waiter})"
        names = {"who": wait.waiter.label, "waits_for": str(resource), "held_by": held_by}
        links.append({**names, "kind": resource.kind, "name": resource.name})
    resource = cycle[0].wait.resource
    parts = (f"{each['who']} waits for {each['waits_for']}, held by {each['held_by']}" for each in links)
    return Deadlock(f"waiting for {resource} would never end: {'; '.join(parts)}", what=str(resource), cycle=links)
