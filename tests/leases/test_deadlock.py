"""Cycles of waits are found, whatever they lead through, and exactly one wait of each gives up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Deadlock, StoreUnavailable
from holdfast.leases.deadlock import (
    Cycle,
    Hold,
    Participant,
    Resource,
    WaitEdge,
    WaitGraph,
    check_deadlock,
    find_cycle,
    is_in,
    process_ids,
    proof_of,
)
from proof.effort import rounds


def participant(name: str) -> Participant:
    """One that is known by its process only, as those who hold leases are."""
    return Participant(name, processes=frozenset((name,)))


def resource(name: str) -> Resource:
    return Resource("lease", name)


def wait(who: str, what: str, since: int = 0) -> WaitEdge:
    return WaitEdge(resource(what), participant(who), f"{since:03d}", f"{who}-{what}")


def graph(held_by: Mapping[str, str], *waits: WaitEdge) -> WaitGraph:
    return WaitGraph(
        tuple(Hold(resource(what), participant(who), f"{who}+{what}") for what, who in held_by.items()), waits
    )


def waits_of(cycle: Cycle) -> tuple[WaitEdge, ...]:
    return tuple(link.wait for link in cycle)


# --- What a cycle is -------------------------------------------------------------------------------------


def test_two_that_wait_for_each_other_are_a_cycle() -> None:
    waits = (wait("a", "y", 1), wait("b", "x", 2))
    seen = graph({"x": "a", "y": "b"}, *waits)

    assert waits_of(find_cycle("a-y", seen)) == waits
    assert waits_of(find_cycle("b-x", seen)) == waits[::-1]


def test_the_youngest_gives_up_and_names_the_cycle() -> None:
    seen = graph({"x": "a", "y": "b", "z": "c"}, wait("a", "y", 1), wait("b", "z", 3), wait("c", "x", 2))

    check_deadlock("a-y", lambda: seen)
    check_deadlock("c-x", lambda: seen)
    told = "b waits for the lease on z, held by c; c waits for the lease on x, held by a; a waits"
    with pytest.raises(Deadlock, match=told) as caught:
        check_deadlock("b-z", lambda: seen)
    assert caught.value.code == "E_DEADLOCK"
    assert caught.value.facts["cycle"][0] == {  # type: ignore[index]
        "who": "b",
        "waits_for": "the lease on z",
        "held_by": "c",
        "kind": "lease",
        "name": "z",
    }


def test_who_waits_for_what_it_holds_itself_may_still_release_it() -> None:
    check_deadlock("a-x", lambda: graph({"x": "a"}, wait("a", "x")))
    seen = graph({"x": "a", "y": "a"}, wait("a", "x", 1), wait("a", "y", 2))
    check_deadlock("a-y", lambda: seen)


def test_a_wait_outside_the_cycle_goes_on() -> None:
    seen = graph({"x": "a", "y": "b"}, wait("a", "y", 1), wait("b", "x", 2), wait("c", "x", 3))

    assert find_cycle("c-x", seen) == ()
    check_deadlock("c-x", lambda: seen)


def test_a_line_that_ends_somewhere_is_no_cycle() -> None:
    assert find_cycle("a-y", graph({"x": "a", "y": "b", "z": "c"}, wait("a", "y"), wait("b", "z"))) == ()


def test_what_is_not_in_the_second_picture_too_is_no_cycle() -> None:
    waits = (wait("a", "y", 1), wait("b", "x", 2))
    first = graph({"x": "a", "y": "b"}, *waits)
    again = Hold(resource("x"), participant("a"), "acquired again")
    for later in (
        graph({"x": "a", "y": "b"}, waits[1]),  # a has given up, or was served
        graph({"x": "a"}, *waits),
        WaitGraph((again, first.holds[1]), waits),
    ):
        seen = iter([first, later])
        check_deadlock("b-x", seen.__next__)
        assert next(seen, None) is None


# --- Who is the same --------------------------------------------------------------------------------------

CLAIM, LEASE = Resource("claim", "n"), Resource("lease", "w")


def is_of(mine: Participant, theirs: Participant, *, for_descendants: bool = False) -> bool:
    return WaitEdge(LEASE, mine, "", "").is_of(Hold(CLAIM, theirs, "", for_descendants))


def test_who_has_a_name_is_known_by_it_and_not_by_its_process() -> None:
    one, other = (Participant(name, name, frozenset(("p",))) for name in "ab")
    assert is_of(one, one._replace(processes=frozenset(("q",))))
    assert not is_of(one, other)  # two agents of one program


def test_who_has_no_name_is_known_by_its_processes() -> None:
    named, nameless = Participant("a", "a", frozenset(("p",))), Participant("p", "", frozenset(("p", "q")))
    assert is_of(nameless, named)
    assert is_of(named, nameless)
    assert not is_of(named, Participant("r", "", frozenset(("r",))))


def test_agents_of_one_process_that_say_in_whose_name_they_act_are_not_the_same() -> None:
    one, other = (Participant("p", processes=frozenset(("p",)), actor=f"agent:{name}") for name in "ab")
    assert is_of(one, one)
    assert not is_of(one, other)
    assert is_of(one, participant("p"))  # who does not say


def test_what_a_process_holds_for_those_that_it_runs_is_held_by_them() -> None:
    below = Participant("p", "", frozenset(("p",)), above=frozenset(("shell", "run")))
    assert is_of(below, participant("run"), for_descendants=True)
    assert not is_of(below, participant("run"))
    assert not is_of(participant("run"), below, for_descendants=True)


def test_who_holds_by_one_name_and_waits_by_another_is_called_by_both() -> None:
    b = Participant("b", "b", frozenset(("pb",)))
    holds = (Hold(CLAIM, b, "1"), Hold(LEASE, participant("pa"), "2"))
    waits = (
        WaitEdge(CLAIM, Participant("a", "a", frozenset(("pa",))), "1", "t1"),
        WaitEdge(LEASE, participant("pb"), "2", "t2"),
    )
    told = r"pb waits for the lease on w, held by pa \(a\); a waits for the claim on n, held by b \(pb\)"
    with pytest.raises(Deadlock, match=told):
        check_deadlock("t2", lambda: WaitGraph((holds[1],), (waits[1],)), [lambda: WaitGraph(holds[:1], waits[:1])])


def test_a_place_that_cannot_be_looked_at_ends_no_wait() -> None:
    def away() -> WaitGraph:
        raise StoreUnavailable("elsewhere", "it is away")

    check_deadlock("b-x", lambda: graph({"x": "a"}, wait("b", "x")), [away])


# --- What several share -----------------------------------------------------------------------------------


def shared_graph(*waits: WaitEdge) -> WaitGraph:
    """Both a and b have x, shared."""
    holds = (Hold(resource("x"), participant(who), f"{who}+x", shared=True) for who in "ab")
    return WaitGraph((*holds, Hold(resource("y"), participant("c"), "c+y")), waits)


@pytest.mark.parametrize("holder", ["a", "b"])
def test_who_waits_for_what_others_share_waits_for_each_of_them(holder: str) -> None:
    seen = shared_graph(wait(holder, "y", 1), wait("c", "x", 2))
    [mine, theirs] = find_cycle("c-x", seen)
    assert (mine.hold.holder.label, theirs.wait.waiter.label) == (holder, holder)
    assert gives_up("c-x", seen)
    assert not gives_up(f"{holder}-y", seen)


def test_those_who_share_do_not_wait_for_each_other() -> None:
    reader = wait("c", "x", 2)._replace(shared=True)
    assert not find_cycle("c-x", shared_graph(wait("a", "y", 1), reader))
    assert not find_cycle("a-y", shared_graph(wait("a", "y", 1), reader))


def test_the_smallest_cycle_is_the_one_that_is_named() -> None:
    seen = shared_graph(wait("a", "y", 1), wait("b", "z", 2), wait("d", "y", 3), wait("c", "x", 4))
    longer = WaitGraph((*seen.holds, Hold(resource("z"), participant("d"), "d+z")), seen.waits)
    assert len(find_cycle("c-x", longer)) == 2
    assert len(find_cycle("b-z", longer)) == 3


# --- What only a process is known of ----------------------------------------------------------------------


def test_of_agents_that_live_in_one_process_it_is_not_known_who_has_what_the_process_has() -> None:
    agent = Participant("p", processes=frozenset(("p",)), above=frozenset(("run",)), actor="agent:a")
    by_process = Hold(LEASE, participant("p"), "", for_descendants=True, by_process=True)
    mine = WaitEdge(CLAIM, agent, "", "")
    assert not mine.is_of(by_process), "it may be another agent's"
    assert mine.may_be_of(by_process), "but perhaps it is its own, and no cycle"
    assert not WaitEdge(LEASE, agent, "", "").is_blocked_by(by_process)
    assert mine.is_of(by_process._replace(holder=participant("run"))), "it descends from who has it"
    assert mine._replace(waiter=participant("p")).is_of(by_process), "without a name: known by its process"


def test_who_can_prove_to_hold_something_holds_it_whoever_took_it() -> None:
    hold = Hold(LEASE, participant("a command that is gone"), "the lock id")
    assert not WaitEdge(CLAIM, participant("p"), "", "").is_of(hold)
    knows = participant("p")._replace(proofs=frozenset((proof_of("the lock id"),)))
    assert WaitEdge(CLAIM, knows, "", "").is_of(hold)


def test_a_process_is_the_same_whatever_its_user_is_called() -> None:
    assert process_ids(["host:me:7:123"], "boot", "ns") == process_ids(["host:0:7:123"], "boot", "ns")
    assert process_ids(["host:me:7:123"], "boot", "ns") != process_ids(["host:me:8:123"], "boot", "ns")
    assert process_ids(["host:me:7:123"], "boot", "ns") != process_ids(["host:me:7:123"], "boot", "other")


# --- Any number of them -----------------------------------------------------------------------------------

things = st.sampled_from("uvwxyz")
people = st.sampled_from("abcdef")


@settings(deadline=None, max_examples=rounds(100, least=25))
@given(st.dictionaries(things, people), st.lists(st.tuples(people, things), unique=True, max_size=12))
def test_when_the_chosen_ones_give_up_no_cycle_is_left(held_by: dict[str, str], pairs: list[tuple[str, str]]) -> None:
    waits = [wait(who, what, number) for number, (who, what) in enumerate(pairs)]
    while found := [cycle for each in waits if (cycle := find_cycle(each.ticket, graph(held_by, *waits)))]:
        for cycle in found:
            for here, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
                assert held_by[here.wait.resource.name] == following.wait.waiter.label
        seen = graph(held_by, *waits)
        leaving = [each for each in waits if gives_up(each.ticket, seen)]
        assert leaving, "a cycle in which nobody gives up"
        waits = [each for each in waits if each not in leaving]


@settings(deadline=None, max_examples=rounds(100, least=25))
@given(st.dictionaries(things, people), st.dictionaries(people, things))
def test_of_those_who_wait_for_one_thing_each_exactly_one_of_each_cycle_gives_up(
    held_by: dict[str, str], wants: dict[str, str]
) -> None:
    waits = [wait(who, what, number) for number, (who, what) in enumerate(wants.items())]
    seen = graph(held_by, *waits)
    found = {frozenset(waits_of(cycle)) for each in waits if (cycle := find_cycle(each.ticket, seen))}
    leaving = {each for each in waits if gives_up(each.ticket, seen)}
    assert leaving == {max(each, key=WaitEdge.age) for each in found}
    assert len(leaving) == len(found)


def gives_up(ticket: str, seen: WaitGraph) -> bool:
    try:
        check_deadlock(ticket, lambda: seen)
    except Deadlock:
        return True
    return False


# --- All orders -------------------------------------------------------------------------------------------
#
# Agents that hold one thing each and wait for another one; some release what they have before, some by
# another thread meanwhile. Who waits looks for cycles, and gives up or is served. A look reads the two
# kinds of things one after the other, what is held before who waits, twice; between any two of these
# readings anybody may move.

READINGS = ("leases held", "leases waited for", "claims held", "claims waited for")
FEWER = ("all held", "all waited for")
BACKWARDS = ("leases waited for", "leases held", "claims waited for", "claims held")


class Plan(NamedTuple):
    """What an agent does. It releases what it holds `before` it waits, or perhaps `meanwhile`, or not; or
    `and takes it again`, before it waits. A name in capitals is that of a file lock."""

    holds: str
    wants: str
    releases: str = ""


class Agent(NamedTuple):
    """Where an agent is, and what it has read of its look by now.

    `stuck` is whether it really was in a cycle at the moment between its two graphs.
    """

    at: str = "begins"  # begins, released, again, waits, gives up, served, done
    looks: int = 0
    read: tuple[tuple[object, ...], ...] = ()
    stuck: bool = False


class World(NamedTuple):
    """`held` and `waiting` have a number for each, so that one that came again is another one."""

    agents: tuple[Agent, ...]
    held: tuple[tuple[str, int, int], ...]
    waiting: tuple[tuple[str, int, int], ...]
    number: int


def kind_of(name: str) -> str:
    return "leases" if name in "xzXZ" else "claims"


def hold_id_of(what: str, who: int, number: int) -> str:
    """File locks have no ids of their own: of two holds of one process, nobody can tell which is which."""
    return f"{who} {what}" if what.isupper() else str(number)


def as_holds(world: World) -> tuple[Hold, ...]:
    return tuple(
        Hold(Resource(kind_of(what), what), participant(f"agent {who}"), hold_id_of(what, who, no))
        for what, who, no in world.held
    )


def as_waits(world: World) -> tuple[WaitEdge, ...]:
    return tuple(
        WaitEdge(Resource(kind_of(what), what), participant(f"agent {who}"), f"{no:03d}", str(no))
        for what, who, no in world.waiting
    )


def reading(world: World, name: str) -> tuple[object, ...]:
    kind, what = name.split(" ", 1)
    everything: tuple[Hold | WaitEdge, ...] = as_holds(world) if what == "held" else as_waits(world)
    return tuple(each for each in everything if kind in (each.resource.kind, "all"))


def drawn(readings: tuple[tuple[object, ...], ...]) -> WaitGraph:
    everything = [each for part in readings for each in part]
    return WaitGraph(
        tuple(each for each in everything if isinstance(each, Hold)),
        tuple(each for each in everything if isinstance(each, WaitEdge)),
    )


Judge = Callable[[str, WaitGraph, WaitGraph], bool]


def judge(ticket: str, first: WaitGraph, second: WaitGraph) -> bool:
    """What `check_deadlock` does with its two graphs."""
    graphs = iter([first, second])
    try:
        check_deadlock(ticket, graphs.__next__)
    except Deadlock:
        return True
    return False


class Explorer:
    """Every order of the moves of a few agents; says what goes wrong in any of them."""

    def __init__(
        self,
        plans: tuple[Plan, ...],
        judged_by: Judge,
        looks: int,
        readings: tuple[str, ...] | None = None,
    ) -> None:
        self.plans = plans
        self.looks = looks
        self.readings = readings or (READINGS if len(plans) < 3 else FEWER)
        self.judged_by = judged_by
        self.problems: set[str] = set()
        self.states = 0

    def run(self) -> None:
        held = tuple(sorted((plan.holds, who, who) for who, plan in enumerate(self.plans)))
        start = World(tuple(Agent() for _ in self.plans), held, (), len(held))
        seen, queue = {start}, deque([start])
        while queue:
            world = queue.popleft()
            self.states += 1
            after = [each for who in range(len(self.plans)) for each in self.moves(world, who)]
            if not after:
                self.judge_end(world)
            for each in after:
                if each not in seen:
                    seen.add(each)
                    queue.append(each)

    def moves(self, world: World, who: int) -> Iterator[World]:
        agent, plan = world.agents[who], self.plans[who]
        if agent.at == "begins" and plan.releases in ("before", "and takes it again"):
            yield self.put(world, who, Agent("released"), held=dropped(world.held, who))
        elif agent.at == "released" and plan.releases == "and takes it again":
            if not any(what == plan.holds for what, _, _ in world.held):
                held = tuple(sorted((*world.held, (plan.holds, who, world.number))))
                yield self.put(world, who, Agent("again"), held=held, number=world.number + 1)
        elif agent.at in ("begins", "released", "again"):
            waiting = (*world.waiting, (plan.wants, who, world.number))
            yield self.put(world, who, Agent("waits"), waiting=waiting, number=world.number + 1)
        elif agent.at in ("gives up", "served"):
            rest = {"held": dropped(world.held, who), "waiting": dropped(world.waiting, who)}
            yield self.put(world, who, Agent("done"), **rest)
        elif agent.at == "waits":
            yield from self.while_waiting(world, who)

    def while_waiting(self, world: World, who: int) -> Iterator[World]:
        agent, plan = world.agents[who], self.plans[who]
        if not any(what == plan.wants for what, _, _ in world.held):
            yield self.put(
                world,
                who,
                Agent("served"),
                held=tuple(sorted((*world.held, (plan.wants, who, world.number)))),
                waiting=dropped(world.waiting, who),
                number=world.number + 1,
            )
        if plan.releases == "meanwhile" and dropped(world.held, who) != world.held:
            yield self.put(world, who, agent, held=dropped(world.held, who))
        if agent.looks == self.looks:
            return
        read = (*agent.read, reading(world, self.readings[len(agent.read) % len(self.readings)]))
        ticket = next(str(no) for _, waiter, no in world.waiting if waiter == who)
        if len(read) < 2 * len(self.readings):
            stuck = agent.stuck
            if len(read) == len(self.readings):
                stuck = bool(find_cycle(ticket, WaitGraph(as_holds(world), as_waits(world))))
            yield self.put(world, who, agent._replace(read=read, stuck=stuck))
            return
        looked = Agent("waits", agent.looks + 1)
        if self.judged_by(ticket, drawn(read[: len(read) // 2]), drawn(read[len(read) // 2 :])):
            self.judge_victim(world, agent, ticket)
            looked = Agent("gives up", agent.looks + 1)
        yield self.put(world, who, looked)

    def put(self, world: World, who: int, agent: Agent, **changes: object) -> World:
        agents = (*world.agents[:who], agent, *world.agents[who + 1 :])
        return world._replace(agents=agents, **changes)  # type: ignore[arg-type]

    def judge_victim(self, world: World, victim: Agent, ticket: str) -> None:
        if not victim.stuck:
            self.problems.add("gave up without a cycle")
        for each in find_cycle(ticket, WaitGraph(as_holds(world), as_waits(world))):
            who = next(who for _, who, no in world.waiting if str(no) == each.wait.ticket)
            if each.wait.ticket != ticket and world.agents[who].at == "gives up":
                self.problems.add("two of one cycle gave up")

    def judge_end(self, world: World) -> None:
        """Nobody can move any more: who has looked for the last time. A last look finds what is left."""
        seen = WaitGraph(as_holds(world), as_waits(world))
        left = [each for each in as_waits(world) if find_cycle(each.ticket, seen)]
        if left and sum(self.judged_by(each.ticket, seen, seen) for each in left) != 1:
            self.problems.add("a cycle in which not one gives up")


def dropped(held: tuple[tuple[str, int, int], ...], who: int) -> tuple[tuple[str, int, int], ...]:
    return tuple(each for each in held if each[1] != who)


CIRCLE = (Plan("x", "y"), Plan("y", "x"))
LONGER = (Plan("x", "y"), Plan("y", "z"), Plan("z", "x"))
ONE_RELEASES = (Plan("x", "y", "before"), Plan("y", "x"))
ONE_LETS_GO = (Plan("x", "y", "meanwhile"), Plan("y", "x"))


FILES = (Plan("X", "Y"), Plan("Y", "X"))
FILE_AND_CLAIM = (Plan("X", "y"), Plan("y", "X"))
LONGER_FILES = (Plan("X", "y"), Plan("y", "Z"), Plan("Z", "X"))
FILE_RELEASED = (Plan("X", "Y", "before"), Plan("Y", "X"))
FILE_LET_GO = (Plan("X", "y", "meanwhile"), Plan("y", "X"))
FILE_TAKEN_AGAIN = (Plan("X", "Y", "and takes it again"), Plan("Y", "X"))
BOTH_TAKEN_AGAIN = (Plan("X", "y", "and takes it again"), Plan("y", "X", "and takes it again"))


def explored(plans: tuple[Plan, ...], judged_by: Judge = judge, looks: int = 2) -> Explorer:
    explorer = Explorer(plans, judged_by, looks)
    explorer.run()
    return explorer


@pytest.mark.parametrize(
    ("plans", "looks", "states"),
    [
        (CIRCLE, 2, 500),
        (ONE_RELEASES, 2, 500),
        (ONE_LETS_GO, 2, 500),
        (LONGER, 1, 2000),
        (FILES, 2, 500),
        (FILE_AND_CLAIM, 2, 500),
        (FILE_RELEASED, 2, 500),
        (FILE_LET_GO, 2, 500),
        (FILE_TAKEN_AGAIN, 2, 500),
        (BOTH_TAKEN_AGAIN, 1, 500),
        (LONGER_FILES, 1, 2000),
    ],
    ids=[
        *("a cycle", "released before", "released meanwhile", "a longer cycle"),
        *("of files", "of a file and a claim", "a file released before", "a file released meanwhile"),
        *("a file taken again", "both taken again", "a longer one with files"),
    ],
)
def test_in_every_order_of_readings_and_moves_exactly_one_gives_up_and_only_in_a_cycle(
    plans: tuple[Plan, ...], looks: int, states: int
) -> None:
    found = explored(plans, looks=looks)
    assert not found.problems
    assert found.states > states


@pytest.mark.parametrize("plans", [FILES, FILE_LET_GO, FILE_TAKEN_AGAIN, BOTH_TAKEN_AGAIN])
def test_the_same_if_those_who_wait_are_read_before_what_is_held(plans: tuple[Plan, ...]) -> None:
    explorer = Explorer(plans, judge, 1, BACKWARDS)
    explorer.run()
    assert not explorer.problems
    assert explorer.states > 200


def after_one_look(ticket: str, first: WaitGraph, second: WaitGraph) -> bool:
    return judge(ticket, first, first)


def whoever_is_in_one(ticket: str, first: WaitGraph, second: WaitGraph) -> bool:
    cycle = find_cycle(ticket, first)
    return bool(cycle) and is_in(cycle, second)


@pytest.mark.parametrize(
    ("plans", "planted", "problem"),
    [
        (ONE_LETS_GO, after_one_look, "gave up without a cycle"),
        (FILE_LET_GO, after_one_look, "gave up without a cycle"),
        (CIRCLE, whoever_is_in_one, "two of one cycle gave up"),
        (CIRCLE, lambda *seen: False, "a cycle in which not one gives up"),
    ],
    ids=["looks once", "looks once at files", "any victim", "no victim"],
)
def test_a_detector_that_is_wrong_is_found(plans: tuple[Plan, ...], planted: Judge, problem: str) -> None:
    assert problem in explored(plans, planted).problems
