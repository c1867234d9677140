"""Leases when wall clocks are set or disagree: with a manual clock, and in real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.clock import SKEW, ClockReading, ManualClock
from holdfast.errors import LockConflict, LockExpired
from holdfast.leases.rules import WAITER_HEARTBEAT, LeaseGranted, LeaseKeys, LeaseWaiting
from holdfast.leases.service import LeaseService
from holdfast.locks.identity import boot_clock_id
from holdfast.store.audit import AuditTrail
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Decision, View
from tests.cli.commands import data, error, holdfast
from tests.support.wall_clock import WallClock, settable_wall_clock

TTL = 30.0
HOUR = 3600.0
on_linux = pytest.mark.skipif(not boot_clock_id(), reason="this system does not name its boot clock")


class Elsewhere(LeaseService):
    """The service on another machine, or on this one after a reboot: its boot clock differs."""

    def reading(self) -> ClockReading:
        return super().reading()._replace(clock_id="another boot", boot=self._clock.boot() + 5000)


class Machines:
    """A store without its own clock, used from two machines whose wall clocks agree at first."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.here = LeaseService(self.store, AuditTrail(), clock=self.clock)
        self.there = Elsewhere(self.store, AuditTrail(), clock=self.clock)

    def commit(self, service: LeaseService, lock_id: str, token: int) -> None:
        validate = service.validator("main", lock_id, token)

        def decide(view: View, now: float) -> Decision[None]:
            validate(view, now)
            return Decision([], None)

        self.store.transact(LeaseKeys.of("main").all(), decide)


@pytest.fixture
def machines() -> Machines:
    return Machines()


@on_linux
@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_setting_the_wall_clock_neither_ends_nor_prolongs_a_lease_on_the_same_machine(
    machines: Machines, step: float
) -> None:
    service, clock = machines.here, machines.clock
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    clock.step_wall(step)
    clock.advance(TTL - 1)
    machines.commit(service, lease.lock_id, lease.fencing_token)
    with pytest.raises(LockConflict, match="expires in 1s"):
        service.acquire("main", service.request())
    clock.advance(1)
    with pytest.raises(LockExpired):
        machines.commit(service, lease.lock_id, lease.fencing_token)
    assert service.acquire("main", service.request()).stolen_from == lease


@on_linux
@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_lease_is_renewed_as_if_the_wall_clock_had_not_been_set(machines: Machines, step: float) -> None:
    service, clock = machines.here, machines.clock
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    for _ in range(3):
        clock.advance(TTL - 1)
        clock.step_wall(step)
        service.renew("main", lease.lock_id)
    clock.advance(TTL - 1)
    with pytest.raises(LockConflict):
        service.steal("main", service.request())


def test_another_machine_judges_a_lease_by_the_store_clock_plus_a_margin(machines: Machines) -> None:
    service, thief, clock = machines.here, machines.there, machines.clock
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    clock.advance(TTL)
    with pytest.raises(LockExpired):  # the holder stops at once
        service.renew("main", lease.lock_id)
    with pytest.raises(LockConflict):  # others wait for the allowed clock skew as well
        thief.acquire("main", thief.request())
    state = thief.state("main")
    assert state is not None
    assert not state.expired
    assert state.time_left == pytest.approx(SKEW)
    clock.advance(SKEW)
    assert thief.acquire("main", thief.request()).stolen_from == lease


def test_a_holder_that_moves_to_another_machine_gets_no_margin(machines: Machines) -> None:
    service, moved = machines.here, machines.there
    lease = service.acquire("main", service.request(ttl=TTL)).lease
    moved.renew("main", lease.lock_id)
    machines.clock.advance(TTL)
    with pytest.raises(LockExpired):
        moved.renew("main", lease.lock_id)
    with pytest.raises(LockExpired):
        service.renew("main", lease.lock_id)


@on_linux
@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_waiter_keeps_its_place_when_the_wall_clock_is_set(machines: Machines, step: float) -> None:
    service, clock = machines.here, machines.clock
    held = service.acquire("main", service.request(ttl=TTL)).lease
    first, second = service.request(ttl=TTL), service.request(ttl=TTL)
    assert isinstance(service.join_queue("main", first), LeaseWaiting)
    clock.step_wall(step)
    clock.advance(WAITER_HEARTBEAT / 2)
    assert isinstance(service.join_queue("main", second), LeaseWaiting)
    service.release("main", held.lock_id)
    answer = service.join_queue("main", second)
    assert isinstance(answer, LeaseWaiting)
    assert answer.position == 2
    assert isinstance(service.join_queue("main", first), LeaseGranted)


# --- Real processes whose wall clock is set ------------------------------------------------------------


@pytest.fixture
def wall_clock(tmp_path: Path) -> WallClock:
    return settable_wall_clock(tmp_path)


@pytest.fixture
def repo(records: Path, scratch: Path) -> Path:
    return scratch / "repo"


def test_the_shim_sets_the_wall_clock_of_a_process(wall_clock: WallClock) -> None:
    wall_clock.set(HOUR)
    program = [sys.executable, "-c", "import time; print(time.time())"]
    shown = subprocess.run(program, env=wall_clock.environment, capture_output=True, text=True, check=True)
    assert HOUR / 2 < float(shown.stdout) - time.time() < HOUR * 2


def test_a_process_whose_wall_clock_is_an_hour_ahead_cannot_take_a_held_lease(
    repo: Path, wall_clock: WallClock
) -> None:
    lease = data(holdfast("lease", "acquire", "--repo", repo, "--ttl", "10m", "--json"))
    wall_clock.set(HOUR)
    for how in ("acquire", "steal"):
        refused = holdfast("lease", how, "--repo", repo, "--json", env=wall_clock.environment)
        assert error(refused)["code"] == "E_LOCK_CONFLICT"
        assert 0 < error(refused)["time_left"] <= 600
    again = holdfast("lease", "renew", "--repo", repo, "--lock-id", lease["lock_id"], env=wall_clock.environment)
    assert again.returncode == 0, again.stderr


def test_a_process_whose_wall_clock_is_an_hour_behind_takes_over_an_expired_lease(
    repo: Path, wall_clock: WallClock
) -> None:
    old = data(holdfast("lease", "acquire", "--repo", repo, "--ttl", "200ms", "--json"))
    wall_clock.set(-HOUR)
    new = holdfast("lease", "acquire", "--repo", repo, "--wait", "20s", "--json", env=wall_clock.environment)
    assert data(new)["token"] == old["token"] + 1


def test_a_command_under_a_lease_survives_a_step_of_the_wall_clock(
    repo: Path, wall_clock: WallClock, tmp_path: Path
) -> None:
    step = f"""
import os, pathlib, time
renewed = lambda: pathlib.Path({str(repo / ".jvs/locks/main.json")!r}).read_text()
for step in (3600, -3600):
    before = renewed()
    pathlib.Path({str(tmp_path / "step.new")!r}).write_text(str(step))
    os.replace({str(tmp_path / "step.new")!r}, os.environ["WALL_CLOCK_STEP"])
    for _ in range(2):
        while renewed() == before:
            time.sleep(0.01)
        before = renewed()
"""
    command = (sys.executable, "-c", step)
    result = holdfast("run", "--repo", repo, "--ttl", "1s", "--", *command, env=wall_clock.environment)
    assert result.returncode == 0, result.stderr
