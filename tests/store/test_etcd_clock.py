"""The time of a store on etcd stays close to the servers and never ahead, whatever the clocks of clients say."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest

from holdfast.clock import ManualClock
from holdfast.store.etcd_gateway import MARGIN, ServerTime

START = 1_800_000_000.0


class World:
    """A server whose clock is right, and a client whose clocks are not."""

    def __init__(self, *, client_is_off_by: float = -3600.0) -> None:
        self.now = START + 0.7
        self.clock = ManualClock(wall=START + client_is_off_by, monotonic=77.0)
        self.time = ServerTime(self.clock)

    def advance(self, seconds: float, *, client_seconds: float | None = None) -> None:
        self.now += seconds
        self.clock.advance(seconds if client_seconds is None else client_seconds)

    def answer(self, *, delay: float = 0.0, ahead: float = 0.0) -> None:
        date = formatdate(self.now + ahead, usegmt=True)
        self.advance(delay)
        self.time.heard(date)

    def error(self) -> float:
        return self.time.now() - self.now


@pytest.mark.parametrize("off", [-3600.0, 0.0, 3600.0, 1e8])
def test_one_answer_brings_the_clock_within_a_second(off: float) -> None:
    world = World(client_is_off_by=off)
    world.answer(delay=0.01)

    assert -1.01 <= world.error() <= 0


def test_many_answers_bring_the_clock_close_and_never_ahead() -> None:
    world = World()
    for _ in range(300):
        world.advance(random.random())
        world.answer(delay=random.random() * 0.02)
        assert -1.1 <= world.error() <= 0
    assert world.error() >= -0.2


def test_a_slow_answer_does_no_harm() -> None:
    world = World()
    world.answer()
    before = world.error()
    world.answer(delay=30.0)

    assert before <= world.error() <= 0


def test_a_client_clock_that_runs_fast_is_corrected() -> None:
    world = World()
    for _ in range(2000):
        world.advance(10.0, client_seconds=10.002)  # 200 ppm
        world.answer()
        assert -1.1 <= world.error() <= 0.05


def test_time_does_not_go_backwards_between_commits() -> None:
    fresh, old = World(), World()
    for _ in range(20):
        old.advance(0.3)
        old.answer()
    fresh.now = old.now
    fresh.answer()
    committed = old.time.now()

    assert fresh.time.now(committed) >= committed
    assert fresh.time.now() >= committed


def test_a_member_that_is_far_ahead_is_not_followed() -> None:
    world = World()
    world.answer()

    assert world.time.now(world.now + MARGIN / 2) == world.now + MARGIN / 2
    world = World()
    world.answer()
    assert world.time.now(world.now + 3600) <= world.now


def test_servers_whose_clock_is_set_back_are_followed_after_a_while() -> None:
    world = World()
    world.answer()
    for _ in range(20):
        world.advance(10.0)
        world.answer(ahead=-3600.0)

    assert world.error() == pytest.approx(-3600.0, abs=1.1)


def test_an_invalid_date_is_ignored() -> None:
    world = World()
    for date in (None, "", "yesterday"):
        world.time.heard(date)

    assert not world.time.is_known()
    world.answer()
    assert world.time.is_known()
