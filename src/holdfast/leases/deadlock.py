"""Waits that can never end, because everyone in a circle holds what the next one waits for.

Each kind of thing that can be held and waited for draws a `Picture`: who holds what, who waits for
what. A circle may lead through several kinds, so their pictures are laid side by side. Nothing in a
circle can move until somebody gives up, so one does: the youngest wait, which has lost the least.

1. *Who is the same?* Who calls itself by a name (the owner of a claim) is the one with that name. Who
   does not is known by its processes: its own, and the agent's that it acts for. What a process holds
   for those that it runs (a lease) is held by whoever descends from it as well. Agents that live in one
   process and say in whose name they act (the actor of a lease) are not taken for each other.
2. *Who gives up?* Everyone in a circle judges by the same facts, so exactly one finds that it is the
   one. Until it has left the line, the others find the same.
3. *Is it one at all?* A picture is not drawn in a moment; what it shows side by side may never have
   been there at once. So two are drawn. Tickets and the ids of what is held are never used again: what
   is in both pictures was there all the time between them, and all of it together.
4. Who waits for what it holds itself is in no circle: it may release it yet, in another thread or by
   another command.
5. *What if several hold it?* Who waits for what others share waits for each of them: a circle through any of
   them never ends. Those who share something do not wait for each other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast.errors import Deadlock, Failure


class Thing(NamedTuple):
    """What can be held: `kind` and `name`, as in `the lease on main`.

    `place` tells those apart that have one name: where it is, in words that are for nobody's eyes.
    """

    kind: str
    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"the {self.kind} on {self.name}"


class Party(NamedTuple):
    """Who holds or waits: by the name that it gave itself, if it did, and by its processes.

    `above` are those that it descends from; see `process_id`. `actor` is in whose name they act. `proofs` are
    of what it can prove to hold, whoever took it: see `proof_of`.
    """

    shown: str
    owner: str = ""
    processes: frozenset[str] = frozenset()
    above: frozenset[str] = frozenset()
    actor: str = ""
    proofs: frozenset[str] = frozenset()


class Hold(NamedTuple):
    """Somebody holds something. `hold_id` tells this hold from all others, before and after it.

    `by_process` says that only the process is known: which of the agents that live in it, nobody can tell.
    """

    thing: Thing
    party: Party
    hold_id: str
    for_descendants: bool = False
    shared: bool = False
    by_process: bool = False


class WaitEdge(NamedTuple):
    """Somebody waits for something. `ticket` tells this wait from all others; `since` sorts by age."""

    thing: Thing
    party: Party
    since: str
    ticket: str
    shared: bool = False

    def is_of(self, hold: Hold) -> bool:
        """Whether the one who waits is certainly the one who holds that."""
        if hold.by_process and self.party.actor and not hold.party.processes.isdisjoint(self.party.processes):
            return False  # one of the agents of this process: perhaps another one
        return self.may_be_of(hold)

    def may_be_of(self, hold: Hold) -> bool:
        """Whether the one who waits is the one who holds that, as far as one can tell."""
        mine, theirs = self.party, hold.party
        if mine.proofs and proof_of(hold.hold_id) in mine.proofs:
            return True
        if mine.owner and theirs.owner:
            return mine.owner == theirs.owner
        if mine.actor and theirs.actor and mine.actor != theirs.actor:
            return False
        ours = mine.processes | mine.above if hold.for_descendants else mine.processes
        return not ours.isdisjoint(theirs.processes)

    def is_kept_by(self, hold: Hold) -> bool:
        """Whether this wait cannot end before somebody else lets go of that."""
        return not (self.shared and hold.shared) and not self.may_be_of(hold)

    def age(self) -> tuple[str, str]:
        return self.since, self.ticket


class WaitGraph(NamedTuple):
    """What is held, and who waits."""

    holds: tuple[Hold, ...] = ()
    waits: tuple[WaitEdge, ...] = ()


class Link(NamedTuple):
    """A wait, and what it waits for."""

    wait: WaitEdge
    hold: Hold


Look = Callable[[], WaitGraph]
"""Draws the picture of one kind, as of now. Takes no lock."""

Circle = tuple[Link, ...]


def circle_of(ticket: str, picture: WaitGraph) -> Circle:
    """A circle that the wait with this ticket is part of, itself first; else nothing.

    Who waits in several places waits in each of them: a circle through any of them blocks that one.
    """
    holds: dict[Thing, list[Hold]] = {}
    for hold in picture.holds:
        holds.setdefault(hold.thing, []).append(hold)
    waits = sorted(picture.waits, key=WaitEdge.age)
    trails: deque[Circle] = deque(
        (link,) for wait in waits if wait.ticket == ticket for link in _links(wait, holds)
    )
    visited = {ticket}
    while trails:  # the shortest ones first: a circle that is found has no smaller one in it
        trail = trails.popleft()
        for wait in waits:
            if not wait.is_of(trail[-1].hold):
                continue
            if wait.ticket == ticket:
                return trail
            if wait.ticket not in visited:
                visited.add(wait.ticket)
                trails.extend((*trail, link) for link in _links(wait, holds))
    return ()


def youngest(circle: Circle) -> WaitEdge:
    """The wait that gives up."""
    return max((link.wait for link in circle), key=WaitEdge.age)


def is_still_there(circle: Circle, picture: WaitGraph) -> bool:
    """Whether all of the circle, every wait and every hold, is in a later picture too."""
    waits = {(wait.ticket, wait.thing) for wait in picture.waits}
    holds = {(hold.hold_id, hold.thing) for hold in picture.holds}
    return all(
        (wait.ticket, wait.thing) in waits and (hold.hold_id, hold.thing) in holds for wait, hold in circle
    )


def refuse_circle(ticket: str, own: Look, elsewhere: Sequence[Look] = ()) -> None:
    """Raise `Deadlock` if the wait with this ticket is part of a circle and has to give up."""
    circle = circle_of(ticket, _together(own, elsewhere))
    if not circle or youngest(circle).ticket != ticket:
        return
    if is_still_there(circle, _together(own, elsewhere)):
        raise _deadlock(circle)


def process_id(holder_id: str, boot_id: str, pid_namespace: str) -> str:
    """A process, told from all others, also from one with the same number in another container.

    Its user is left out: who sees it from outside may call that by another name.
    """
    host, *rest = holder_id.split(":")
    known = ":".join((host, *rest[1:])) if len(rest) == 3 else holder_id
    return f"{known} {boot_id} {pid_namespace}"


def proof_of(hold_id: str) -> str:
    """Shows that somebody knows the id of what it holds, without telling it to others."""
    return hashlib.blake2s(hold_id.encode(), person=b"holds", digest_size=16).hexdigest() if hold_id else ""


def _links(wait: WaitEdge, holds: Mapping[Thing, Sequence[Hold]]) -> list[Link]:
    return [Link(wait, hold) for hold in holds.get(wait.thing, ()) if wait.is_kept_by(hold)]


def _together(own: Look, elsewhere: Sequence[Look]) -> WaitGraph:
    """All pictures as one. What cannot be looked at elsewhere does not end a wait that is none of its."""
    pictures = [own()]
    for look in elsewhere:
        try:
            pictures.append(look())
        except Failure:  # away, or not ours to read: circles through it are not found meanwhile
            continue
    holds = tuple(hold for each in pictures for hold in each.holds)
    return WaitGraph(holds, tuple(wait for each in pictures for wait in each.waits))


def _deadlock(circle: Circle) -> Deadlock:
    wait = circle[0].wait
    following = (*circle[1:], circle[0])
    told = [_told(here, after.wait) for here, after in zip(circle, following, strict=True)]
    return Deadlock(
        f"waiting for {wait.thing} would never end: "
        + "; ".join(
            f"{each['who']} waits for {each['waits_for']}, held by {each['held_by']}" for each in told
        ),
        what=str(wait.thing),
        cycle=told,
    )


def _told(link: Link, following: WaitEdge) -> dict[str, str]:
    """A link in words. Who holds by one name and waits by another is called by both."""
    holder, waiter = link.hold.party.shown, following.party.shown
    return {
        "who": link.wait.party.shown,
        "waits_for": str(link.wait.thing),
        "held_by": holder if holder == waiter else f"{holder} ({waiter})",
        "kind": link.wait.thing.kind,
        "name": link.wait.thing.name,
    }
