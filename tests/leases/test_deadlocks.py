"""Circles of waits are found, and exactly one wait of each gives up."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.audit.chain import AuditTrail
from holdfast.errors import Deadlock, Failure
from holdfast.leases import held
from holdfast.leases.deadlocks import Wait, circle_of, refuse_deadlock, youngest
from holdfast.leases.desk import Desk
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from tests.locks.workers import Line, Workers


def wait(who: str, what: str, since: int = 0) -> Wait:
    return Wait(who, what, f"{since:03d}", f"{who}-{what}")


def test_two_that_wait_for_each_other_are_a_circle() -> None:
    held_by = {"x": "a", "y": "b"}
    waits = [wait("a", "y", 1), wait("b", "x", 2)]

    assert circle_of("a-y", held_by, waits) == (waits[0], waits[1])
    assert circle_of("b-x", held_by, waits) == (waits[1], waits[0])


def test_the_youngest_gives_up_and_names_the_circle() -> None:
    held_by = {"x": "a", "y": "b", "z": "c"}
    waits = [wait("a", "y", 1), wait("b", "z", 3), wait("c", "x", 2)]

    refuse_deadlock("a-y", held_by, waits)
    refuse_deadlock("c-x", held_by, waits)
    with pytest.raises(Deadlock, match="b waits for z, held by c; c waits for x, held by a") as caught:
        refuse_deadlock("b-z", held_by, waits)
    assert caught.value.code == "E_DEADLOCK"
    assert len(caught.value.facts["cycle"]) == 3  # type: ignore[arg-type]


def test_who_waits_for_what_it_holds_itself_may_still_release_it() -> None:
    refuse_deadlock("a-x", {"x": "a"}, [wait("a", "x")])
    refuse_deadlock("a-y", {"x": "a", "y": "a"}, [wait("a", "x", 1), wait("a", "y", 2)])


def test_a_wait_outside_the_circle_goes_on() -> None:
    held_by = {"x": "a", "y": "b"}
    waits = [wait("a", "y", 1), wait("b", "x", 2), wait("c", "x", 3)]

    assert circle_of("c-x", held_by, waits) == ()
    refuse_deadlock("c-x", held_by, waits)


def test_a_line_that_ends_somewhere_is_no_circle() -> None:
    assert circle_of("a-y", {"x": "a", "y": "b", "z": "c"}, [wait("a", "y"), wait("b", "z")]) == ()


things = st.sampled_from("uvwxyz")
people = st.sampled_from("abcdef")


@settings(deadline=None)
@given(st.dictionaries(things, people), st.lists(st.tuples(people, things), unique=True, max_size=12))
def test_when_the_chosen_ones_give_up_no_circle_is_left(
    held_by: dict[str, str], pairs: list[tuple[str, str]]
) -> None:
    waits = [wait(who, what, number) for number, (who, what) in enumerate(pairs)]
    rounds = 0
    while circles := [circle for each in waits if (circle := circle_of(each.ticket, held_by, waits))]:
        for circle in circles:
            for here, following in zip(circle, (*circle[1:], circle[0]), strict=True):
                assert held_by[here.what] == following.who
        waits.remove(youngest(circles[0]))
        rounds += 1
    assert rounds <= len(pairs)


@pytest.mark.parametrize("detached", [False, True])
def test_threads_of_one_process_and_agents_of_one_program_wait_in_turn(detached: bool) -> None:
    desk = Desk(MemoryStore(), AuditTrail())
    behalf_of = desk.holder if detached else None
    served: list[int] = []

    def work(number: int) -> None:
        request = desk.request(ttl=3600.0, behalf_of=behalf_of)
        lease = held.acquire(desk, "main", request, wait=60.0)
        served.append(number)
        desk.release("main", lease.lock_id)

    first = desk.acquire("main", desk.request(ttl=3600.0, behalf_of=behalf_of)).lease
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(work, number) for number in range(3)]
        while not (state := desk.state("main")) or len(state.waiters) < 3:
            assert not any(each.done() and each.exception() for each in waits)
            time.sleep(0.01)
        desk.release("main", first.lock_id)
        for each in waits:
            each.result(60)

    assert sorted(served) == [0, 1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
@pytest.mark.parametrize("number", [2, 3])
def test_processes_that_wait_in_a_circle_get_out_of_it(tmp_path: Path, number: int) -> None:
    """Each holds its own worktree and waits for the next one's; whoever gives up lets the rest go on."""
    names = [f"tree-{index}" for index in range(number)]

    def work(line: Line) -> None:
        own, following = line.wait()
        desk = Desk(FileStore(tmp_path, timeout=60.0), AuditTrail())
        with held.acquire(desk, own, desk.request(ttl=3600.0)):
            line.say("holding")
            line.wait()
            try:
                with held.acquire(desk, following, desk.request(ttl=3600.0), wait=60.0):
                    line.say("got it")
            except Failure as failure:
                line.say(failure.code)

    with Workers() as workers:
        crew = workers.start_many(number, work)
        for index, worker in enumerate(crew):
            worker.say((names[index], names[(index + 1) % number]))
        assert [worker.hear() for worker in crew] == ["holding"] * number
        for worker in crew:
            worker.say("go")

        assert sorted(worker.hear() for worker in crew) == ["E_DEADLOCK"] + ["got it"] * (number - 1)
