"""Every reachable state of three holders, with crashes and clock steps, under the production rules.

A holder may acquire, renew, release, steal, begin to publish (it notes its token, as a snapshot does
before it copies) and commit. It may crash at any point and restart without its memory. Time may pass
and the wall clock may be set between any two steps. Every step that the protocol allows is tried from
every state. The tick is the true time, which the boot clocks show.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from holdfast.clock import Now
from holdfast.errors import Failure
from holdfast.leases import rules
from holdfast.leases.rules import Lease, LeaseGranted, LeaseKeys, LeaseRequest, TokenCounter
from holdfast.locks.identity import Holder
from holdfast.store.model import Change, Create, Delete, Document, Replace, View
from proof.effort import SHARE

KEYS = LeaseKeys.of("main")
HOLDERS = 3
TTL = 2.0
LAST_TICK = 5 if SHARE == 1 else 2
MOST_TOKENS = 4
START = 1_700_000_000.0


class Memory(NamedTuple):
    """The memory of one holder: its lease, and the token with which it has begun to publish.

    Only the planted bug uses `checked`: the holder has validated, and publishes in a second step.
    """

    lock_id: str = ""
    token: int = 0
    publishing: int = 0
    checked: bool = False


class Setting(NamedTuple):
    """The machines of the holders and their clocks.

    The wall clocks may be set to any of `steps`, each holder's is `ahead` by some seconds, and `skew` is
    the difference that the rules allow for.
    """

    boots: tuple[str, ...] = ("boot",) * HOLDERS
    steps: tuple[int, ...] = (0,)
    ahead: tuple[int, ...] = (0,) * HOLDERS
    skew: float = 0.0
    last_tick: int = LAST_TICK
    most_tokens: int = MOST_TOKENS
    clocks_are_sane: bool = True
    """Whether all clocks stay within the allowed skew; only then is no lease granted too early."""


class World(NamedTuple):
    """One state. `published` holds the tokens of all commits, in order."""

    setting: Setting
    tick: int
    step: int
    lease: Lease | None
    counter: TokenCounter | None
    memories: tuple[Memory, ...]
    published: tuple[int, ...]

    def moment(self, who: int) -> Now:
        wall = START + self.tick + self.step + self.setting.ahead[who]
        return Now(wall, self.setting.boots[who], float(self.tick), self.setting.skew)

    def is_over(self) -> bool:
        """Whether the lease has expired by the true time."""
        assert self.lease is not None
        assert self.lease.boot_expires_at is not None
        return self.tick >= self.lease.boot_expires_at.at

    def view(self) -> View:
        return View(
            {
                KEYS.lease: None if self.lease is None else Document(self.lease, "1"),
                KEYS.counter: None if self.counter is None else Document(self.counter, "1"),
                KEYS.queue: None,
            }
        )

    def after(self, changes: list[Change]) -> World:
        """The world after these changes, applied at once."""
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

    def remembering(self, who: int, memory: Memory) -> World:
        memories = list(self.memories)
        memories[who] = memory
        return self._replace(memories=tuple(memories))


def request(world: World, who: int) -> LeaseRequest:
    grants = 0 if world.counter is None else world.counter.fencing_token
    holder = Holder("host", f"user{who}", who + 1, "1", "boot", "machine", "namespace")
    return LeaseRequest(f"{who}-{grants + 1}", holder, TTL)


PLAIN = Setting()
Commit = Callable[[World, int], Iterator[World]]


def commit_in_one_step(world: World, who: int) -> Iterator[World]:
    """Validate and publish in one transaction, as production does."""
    memory = world.memories[who]
    rules.validate(world.view(), world.moment(who), KEYS, memory.lock_id, memory.publishing)
    done = world._replace(published=(*world.published, memory.publishing))
    yield done.remembering(who, memory._replace(publishing=0))


def validate_then_publish(world: World, who: int) -> Iterator[World]:
    """Planted bug: validate now, publish later."""
    memory = world.memories[who]
    if not memory.checked:
        rules.validate(world.view(), world.moment(who), KEYS, memory.lock_id, memory.publishing)
        yield world.remembering(who, memory._replace(checked=True))
    else:
        done = world._replace(published=(*world.published, memory.publishing))
        yield done.remembering(who, memory._replace(publishing=0, checked=False))


def steps(world: World, commit: Commit) -> Iterator[World]:
    """All states that are one step away."""
    if world.tick < world.setting.last_tick:
        yield world._replace(tick=world.tick + 1)
    for step in world.setting.steps:
        yield world._replace(step=step)
    for who, memory in enumerate(world.memories):
        if memory != Memory():
            yield world.remembering(who, Memory())  # a crash loses the memory, not the store
        for action in (_acquire, _steal, _renew, _release, _begin):
            with contextlib.suppress(Failure):  # refused: no change
                yield from action(world, who)
        if memory.publishing:
            try:
                yield from commit(world, who)
            except Failure:
                yield world.remembering(who, Memory())  # fenced out: it gives up


def _acquire(world: World, who: int) -> Iterator[World]:
    if world.counter is not None and world.counter.fencing_token >= world.setting.most_tokens:
        return
    ruling = rules.acquire(world.view(), world.moment(who), KEYS, request(world, who), wait=False)
    assert isinstance(ruling.result, LeaseGranted)
    lease = ruling.result.lease
    memory = world.memories[who]._replace(lock_id=lease.lock_id, token=lease.fencing_token)
    yield world.after(ruling.changes).remembering(who, memory)


def _steal(world: World, who: int) -> Iterator[World]:
    if world.counter is not None and world.counter.fencing_token >= world.setting.most_tokens:
        return
    ruling = rules.steal(world.view(), world.moment(who), KEYS, request(world, who))
    lease = ruling.result.lease
    memory = world.memories[who]._replace(lock_id=lease.lock_id, token=lease.fencing_token)
    yield world.after(ruling.changes).remembering(who, memory)


def _renew(world: World, who: int) -> Iterator[World]:
    ruling = rules.renew(world.view(), world.moment(who), KEYS, world.memories[who].lock_id)
    yield world.after(ruling.changes)


def _release(world: World, who: int) -> Iterator[World]:
    ruling = rules.release(world.view(), world.moment(who), KEYS, world.memories[who].lock_id)
    yield world.after(ruling.changes).remembering(who, Memory())


def _begin(world: World, who: int) -> Iterator[World]:
    memory = world.memories[who]
    if memory.token and not memory.publishing and len(world.published) < 3:
        yield world.remembering(who, memory._replace(publishing=memory.token))


def check(before: World, after: World) -> None:
    """Check the invariants of one step."""
    counted_before = before.counter.fencing_token if before.counter else 0
    counted = after.counter.fencing_token if after.counter else 0
    assert counted >= counted_before, "the token counter went back (LC-06)"
    if after.lease is not None:
        assert after.lease.fencing_token <= counted
    if after.lease is not None and (before.lease is None or after.lease.lock_id != before.lease.lock_id):
        assert after.lease.fencing_token > counted_before, "a grant without a greater token (LC-14)"
        if after.setting.clocks_are_sane:
            assert before.lease is None or before.is_over(), "two holders at once (LC-02)"
    if len(after.published) > len(before.published):
        lease = before.lease
        assert lease is not None
        assert after.published[-1] == lease.fencing_token, "published without the lease (LC-17)"
        assert not before.is_over(), "published after the lease had expired (LC-18)"
        assert list(after.published) == sorted(after.published), "a stale token published (LC-18)"


def explore(commit: Commit, setting: Setting = PLAIN) -> int:
    """Visit every reachable state; return the number of states."""
    first = World(setting, 0, setting.steps[0], None, None, (Memory(),) * HOLDERS, ())
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
    assert states > (100_000 if SHARE == 1 else 1_000)


@pytest.mark.req("LC-30")
def test_validating_first_and_publishing_later_is_found() -> None:
    with pytest.raises(AssertionError, match="LC-1"):
        explore(validate_then_publish)


TWO_BOOTS = ("here", "here", "there")


@pytest.mark.req("LC-30")
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(steps=(0, -3, 4), last_tick=2, most_tokens=2), id="wall-clock-is-set"),
        pytest.param(
            Setting(boots=TWO_BOOTS, ahead=(0, 0, 1), skew=1.0, last_tick=4, most_tokens=3),
            id="one-host-is-ahead",
        ),
        pytest.param(
            Setting(boots=TWO_BOOTS, ahead=(0, 0, -1), skew=1.0, last_tick=4, most_tokens=3),
            id="one-host-is-behind",
        ),
        pytest.param(
            Setting(boots=TWO_BOOTS, steps=(0, 4), last_tick=2, most_tokens=2, clocks_are_sane=False),
            id="clocks-further-apart-than-allowed",
        ),
    ],
)
@pytest.mark.sampled(1)
@pytest.mark.long
def test_clock_steps_allow_no_stale_commit_and_within_the_margin_no_early_grant(
    setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    states = explore(commit_in_one_step, setting)
    record_property("states", states)
    assert states > 1_000


@pytest.mark.req("LC-30")
def test_without_a_margin_clocks_that_disagree_allow_two_holders_at_once() -> None:
    with pytest.raises(AssertionError, match="LC-02"):
        explore(commit_in_one_step, Setting(boots=TWO_BOOTS, ahead=(0, 0, 1), last_tick=3, most_tokens=2))
