"""Waits that can never end, because everyone in a circle holds what the next one waits for.

Nothing in a circle can move until somebody gives up, so one does: the youngest wait, which has lost
the least. Everyone in the circle judges by the same facts, so exactly one finds that it is the one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.errors import Deadlock


class Wait(NamedTuple):
    """Somebody waits for something. `ticket` tells this wait from all others; `since` sorts by age."""

    who: str
    what: str
    since: str
    ticket: str


def circle_of(ticket: str, held_by: Mapping[str, str], waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """The waits of a circle that the wait with this ticket is part of, itself first; else nothing.

    `held_by` says who holds a thing. Who waits in several places waits in each of them: only if all
    of its ways out are blocked it is stuck, but a circle through any of them blocks that one.
    """
    all_waits = sorted(waits, key=lambda wait: (wait.since, wait.ticket))
    start = next((wait for wait in all_waits if wait.ticket == ticket), None)
    if start is None:
        return ()
    by_who: dict[str, list[Wait]] = {}
    for wait in all_waits:
        by_who.setdefault(wait.who, []).append(wait)
    trail, visited = [start], {ticket}
    branches = [iter(by_who.get(held_by.get(start.what, ""), ()))]
    while branches:
        for wait in branches[-1]:
            if wait.ticket == ticket:
                return tuple(trail)
            if wait.ticket not in visited:
                visited.add(wait.ticket)
                trail.append(wait)
                branches.append(iter(by_who.get(held_by.get(wait.what, ""), ())))
                break
        else:
            branches.pop()
            trail.pop()
    return ()


def youngest(circle: Sequence[Wait]) -> Wait:
    """The wait that gives up."""
    return max(circle, key=lambda wait: (wait.since, wait.ticket))


def refuse_deadlock(ticket: str, held_by: Mapping[str, str], waits: Iterable[Wait]) -> None:
    """Raise `Deadlock` if this wait is the one that has to give up."""
    circle = circle_of(ticket, held_by, waits)
    if len({wait.who for wait in circle}) < 2:
        return  # who waits for what it holds itself may release it yet: in another thread, by another command
    if youngest(circle).ticket != ticket:
        return
    told = "; ".join(f"{each.who} waits for {each.what}, held by {held_by[each.what]}" for each in circle)
    raise Deadlock(
        f"waiting for {circle[0].what} would never end: {told}",
        what=circle[0].what,
        cycle=[{"who": each.who, "waits_for": each.what, "held_by": held_by[each.what]} for each in circle],
    )
