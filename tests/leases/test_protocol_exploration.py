"""Every state that three holders can reach, with crashes and clock steps, by the functions of production.

A holder may acquire, renew, release, steal, begin to publish (it notes its token, as a snapshot does
before it copies) and commit; it may crash at any point and come back with nothing; the clock may
tick between any two steps. Everything that the protocol allows is tried from everywhere.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from holdfast.errors import Failure
from holdfast.leases import protocol
from holdfast.leases.protocol import Granted, Request
from holdfast.leases.records import Lease, LeaseKeys, TokenCounter
from holdfast.locks.holders import Holder
from holdfast.store.records import Change, Create, Delete, Document, Replace, View

KEYS = LeaseKeys.of("main")
HOLDERS = 3
TTL = 2.0
LAST_TICK = 5
MOST_TOKENS = 4
START = 1_700_000_000.0


class Mind(NamedTuple):
    """What one holder remembers: its lease, and the token with which it has begun to publish.

    `checked` exists only in the broken variant: it has validated, and publishes in a second step.
    """

    lock_id: str = ""
    token: int = 0
    publishing: int = 0
    checked: bool = False


class World(NamedTuple):
    """One state. `published` are the tokens of what was committed, in order."""

    tick: int
    lease: Lease | None
    counter: TokenCounter | None
    minds: tuple[Mind, ...]
    published: tuple[int, ...]

    def now(self) -> float:
        return START + self.tick

    def view(self) -> View:
        return View(
            {
                KEYS.lease: None if self.lease is None else Document(self.lease, "1"),
                KEYS.counter: None if self.counter is None else Document(self.counter, "1"),
                KEYS.line: None,
            }
        )

    def after(self, changes: list[Change]) -> World:
        """The world with these changes made, all at once."""
        lease, counter = self.lease, self.counter
        for change in changes:
            if isinstance(change, Delete):
                lease = None
            elif isinstance(change, Create | Replace):
                if isinstance(change.record, Lease):
                    lease = change.record
                elif isinstance(change.record, TokenCounter):
                    counter = change.record
        return self._replace(lease=lease, counter=counter)

    def remembering(self, who: int, mind: Mind) -> World:
        minds = list(self.minds)
        minds[who] = mind
        return self._replace(minds=tuple(minds))


def request(world: World, who: int) -> Request:
    grants = 0 if world.counter is None else world.counter.fencing_token
    holder = Holder("host", f"user{who}", who + 1, "1", "boot", "machine", "namespace")
    return Request(f"{who}-{grants + 1}", holder, TTL)


Commit = Callable[[World, int], Iterator[World]]


def commit_in_one_step(world: World, who: int) -> Iterator[World]:
    """What production does: validate and publish in one transaction."""
    mind = world.minds[who]
    protocol.validate(world.view(), world.now(), KEYS, mind.lock_id, mind.publishing)
    done = world._replace(published=(*world.published, mind.publishing))
    yield done.remembering(who, mind._replace(publishing=0))


def validate_then_publish(world: World, who: int) -> Iterator[World]:
    """The planted mistake: validate now, publish at some later time."""
    mind = world.minds[who]
    if not mind.checked:
        protocol.validate(world.view(), world.now(), KEYS, mind.lock_id, mind.publishing)
        yield world.remembering(who, mind._replace(checked=True))
    else:
        done = world._replace(published=(*world.published, mind.publishing))
        yield done.remembering(who, mind._replace(publishing=0, checked=False))


def steps(world: World, commit: Commit) -> Iterator[World]:
    """Every state that is one step away."""
    if world.tick < LAST_TICK:
        yield world._replace(tick=world.tick + 1)
    for who, mind in enumerate(world.minds):
        if mind != Mind():
            yield world.remembering(who, Mind())  # a crash: it forgets, what is stored stays
        for action in (_acquire, _steal, _renew, _release, _begin):
            with contextlib.suppress(Failure):  # refused: nothing changed
                yield from action(world, who)
        if mind.publishing:
            try:
                yield from commit(world, who)
            except Failure:
                yield world.remembering(who, Mind())  # fenced out: it gives up


def _acquire(world: World, who: int) -> Iterator[World]:
    if world.counter is not None and world.counter.fencing_token >= MOST_TOKENS:
        return
    ruling = protocol.acquire(world.view(), world.now(), KEYS, request(world, who), wait=False)
    assert isinstance(ruling.result, Granted)
    lease = ruling.result.lease
    mind = world.minds[who]._replace(lock_id=lease.lock_id, token=lease.fencing_token)
    yield world.after(ruling.changes).remembering(who, mind)


def _steal(world: World, who: int) -> Iterator[World]:
    if world.counter is not None and world.counter.fencing_token >= MOST_TOKENS:
        return
    ruling = protocol.steal(world.view(), world.now(), KEYS, request(world, who))
    lease = ruling.result.lease
    mind = world.minds[who]._replace(lock_id=lease.lock_id, token=lease.fencing_token)
    yield world.after(ruling.changes).remembering(who, mind)


def _renew(world: World, who: int) -> Iterator[World]:
    ruling = protocol.renew(world.view(), world.now(), KEYS, world.minds[who].lock_id)
    yield world.after(ruling.changes)


def _release(world: World, who: int) -> Iterator[World]:
    ruling = protocol.release(world.view(), world.now(), KEYS, world.minds[who].lock_id)
    yield world.after(ruling.changes).remembering(who, Mind())


def _begin(world: World, who: int) -> Iterator[World]:
    mind = world.minds[who]
    if mind.token and not mind.publishing and len(world.published) < 3:
        yield world.remembering(who, mind._replace(publishing=mind.token))


def check(before: World, after: World) -> None:
    """What must hold between any two states that follow each other."""
    counted_before = before.counter.fencing_token if before.counter else 0
    counted = after.counter.fencing_token if after.counter else 0
    assert counted >= counted_before, "the token counter went back (LC-06)"
    if after.lease is not None:
        assert after.lease.fencing_token <= counted
    if after.lease is not None and (before.lease is None or after.lease.lock_id != before.lease.lock_id):
        assert after.lease.fencing_token > counted_before, "a grant without a greater token (LC-14)"
        taken = before.lease is None or before.lease.is_expired(before.now())
        assert taken, "two holders at once (LC-02)"
    if len(after.published) > len(before.published):
        lease = before.lease
        assert lease is not None
        assert after.published[-1] == lease.fencing_token, "published without the lease (LC-17)"
        assert not lease.is_expired(before.now()), "published after the lease had run out (LC-18)"
        assert list(after.published) == sorted(after.published), "a stale token published (LC-18)"


def explore(commit: Commit) -> int:
    """Go everywhere; return how many distinct states there are."""
    first = World(0, None, None, (Mind(),) * HOLDERS, ())
    seen, waiting = {first}, deque([first])
    while waiting:
        world = waiting.popleft()
        for following in steps(world, commit):
            check(world, following)
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(seen)


@pytest.mark.req("LC-30")
def test_no_reachable_state_has_two_writers_or_a_stale_commit(
    record_property: Callable[[str, object], None],
) -> None:
    states = explore(commit_in_one_step)
    record_property("states", states)
    assert states > 100_000


@pytest.mark.req("LC-30")
def test_validating_first_and_publishing_later_is_found_out() -> None:
    with pytest.raises(AssertionError, match="LC-1"):
        explore(validate_then_publish)
