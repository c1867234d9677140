"""Deadlock detection finds every cycle of waits, and exactly one wait of each cycle gives up."""

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
    """A participant known only by its process, as the holder of a lease is."""
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


# --- Cycles ----------------------------------------------------------------------------------------------


def test_two_agents_that_wait_for_each_other_form_a_cycle() -> None:
    waits = (wait("a", "y", 1), wait("b", "x", 2))
    seen = graph({"x": "a", "y": "b"}, *waits)

    assert waits_of(find_cycle("a-y", seen)) == waits
    assert waits_of(find_cycle("b-x", seen)) == waits[::-1]


def test_the_youngest_wait_gives_up_and_names_the_cycle() -> None:
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


def test_an_agent_that_waits_for_its_own_lease_is_not_deadlocked() -> None:
    check_deadlock("a-x", lambda: graph({"x": "a"}, wait("a", "x")))
    seen = graph({"x": "a", "y": "a"}, wait("a", "x", 1), wait("a", "y", 2))
    check_deadlock("a-y", lambda: seen)


def test_a_wait_outside_the_cycle_continues() -> None:
    seen = graph({"x": "a", "y": "b"}, wait("a", "y", 1), wait("b", "x", 2), wait("c", "x", 3))

    assert find_cycle("c-x", seen) == ()
    check_deadlock("c-x", lambda: seen)


def test_a_chain_of_waits_that_ends_is_no_cycle() -> None:
    assert find_cycle("a-y", graph({"x": "a", "y": "b", "z": "c"}, wait("a", "y"), wait("b", "z"))) == ()


def test_a_cycle_counts_only_if_both_readings_have_it() -> None:
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


# --- Identity ---------------------------------------------------------------------------------------------

CLAIM, LEASE = Resource("claim", "n"), Resource("lease", "w")


def is_of(mine: Participant, theirs: Participant, *, for_descendants: bool = False) -> bool:
    return WaitEdge(LEASE, mine, "", "").is_of(Hold(CLAIM, theirs, "", for_descendants))


def test_a_named_participant_is_identified_by_its_name_not_by_its_process() -> None:
    one, other = (Participant(name, name, frozenset(("p",))) for name in "ab")
    assert is_of(one, one._replace(processes=frozenset(("q",))))
    assert not is_of(one, other)  # two agents of one program


def test_a_nameless_participant_is_identified_by_its_processes() -> None:
    named, nameless = Participant("a", "a", frozenset(("p",))), Participant("p", "", frozenset(("p", "q")))
    assert is_of(nameless, named)
    assert is_of(named, nameless)
    assert not is_of(named, Participant("r", "", frozenset(("r",))))


def test_agents_of_one_process_with_different_actors_are_distinct() -> None:
    one, other = (Participant("p", processes=frozenset(("p",)), actor=f"agent:{name}") for name in "ab")
    assert is_of(one, one)
    assert not is_of(one, other)
    assert is_of(one, participant("p"))  # no actor given


def test_a_hold_for_descendants_belongs_to_the_descendants_too() -> None:
    below = Participant("p", "", frozenset(("p",)), above=frozenset(("shell", "run")))
    assert is_of(below, participant("run"), for_descendants=True)
    assert not is_of(below, participant("run"))
    assert not is_of(participant("run"), below, for_descendants=True)


def test_a_participant_that_holds_and_waits_under_two_names_is_reported_with_both() -> None:
    b = Participant("b", "b", frozenset(("pb",)))
    holds = (Hold(CLAIM, b, "1"), Hold(LEASE, participant("pa"), "2"))
    waits = (
        WaitEdge(CLAIM, Participant("a", "a", frozenset(("pa",))), "1", "t1"),
        WaitEdge(LEASE, participant("pb"), "2", "t2"),
    )
    told = r"pb waits for the lease on w, held by pa \(a\); a waits for the claim on n, held by b \(pb\)"
    with pytest.raises(Deadlock, match=told):
        check_deadlock("t2", lambda: WaitGraph((holds[1],), (waits[1],)), [lambda: WaitGraph(holds[:1], waits[:1])])


def test_an_unreachable_store_ends_no_wait() -> None:
    def away() -> WaitGraph:
        raise StoreUnavailable("elsewhere", "it is away")

    check_deadlock("b-x", lambda: graph({"x": "a"}, wait("b", "x")), [away])


# --- Shared holds -----------------------------------------------------------------------------------------


def shared_graph(*waits: WaitEdge) -> WaitGraph:
    """A graph in which a and b hold x, shared."""
    holds = (Hold(resource("x"), participant(who), f"{who}+x", shared=True) for who in "ab")
    return WaitGraph((*holds, Hold(resource("y"), participant("c"), "c+y")), waits)


@pytest.mark.parametrize("holder", ["a", "b"])
def test_a_wait_for_a_shared_resource_is_a_wait_for_each_holder(holder: str) -> None:
    seen = shared_graph(wait(holder, "y", 1), wait("c", "x", 2))
    [mine, theirs] = find_cycle("c-x", seen)
    assert (mine.hold.holder.label, theirs.wait.waiter.label) == (holder, holder)
    assert gives_up("c-x", seen)
    assert not gives_up(f"{holder}-y", seen)


def test_a_shared_wait_is_not_blocked_by_shared_holds() -> None:
    reader = wait("c", "x", 2)._replace(shared=True)
    assert not find_cycle("c-x", shared_graph(wait("a", "y", 1), reader))
    assert not find_cycle("a-y", shared_graph(wait("a", "y", 1), reader))


def test_the_shortest_cycle_is_reported() -> None:
    seen = shared_graph(wait("a", "y", 1), wait("b", "z", 2), wait("d", "y", 3), wait("c", "x", 4))
    longer = WaitGraph((*seen.holds, Hold(resource("z"), participant("d"), "d+z")), seen.waits)
    assert len(find_cycle("c-x", longer)) == 2
    assert len(find_cycle("b-z", longer)) == 3


# --- Holds known only by process --------------------------------------------------------------------------


def test_a_hold_known_by_process_may_belong_to_any_agent_of_that_process() -> None:
    agent = Participant("p", processes=frozenset(("p",)), above=frozenset(("run",)), actor="agent:a")
    by_process = Hold(LEASE, participant("p"), "", for_descendants=True, by_process=True)
    mine = WaitEdge(CLAIM, agent, "", "")
    assert not mine.is_of(by_process), "it may be another agent's"
    assert mine.may_be_of(by_process), "but it may be its own, and then there is no cycle"
    assert not WaitEdge(LEASE, agent, "", "").is_blocked_by(by_process)
    assert mine.is_of(by_process._replace(holder=participant("run"))), "it descends from the holder"
    assert mine._replace(waiter=participant("p")).is_of(by_process), "without a name it is known by its process"


def test_a_participant_that_knows_the_proof_of_a_hold_is_its_holder() -> None:
    hold = Hold(LEASE, participant("a command that is gone"), "the lock id")
    assert not WaitEdge(CLAIM, participant("p"), "", "").is_of(hold)
    knows = participant("p")._replace(proofs=frozenset((proof_of("the lock id"),)))
    assert WaitEdge(CLAIM, knows, "", "").is_of(hold)


def test_a_process_id_does_not_depend_on_the_user_name() -> None:
    assert process_ids(["host:me:7:123"], "boot", "ns") == process_ids(["host:0:7:123"], "boot", "ns")
    assert process_ids(["host:me:7:123"], "boot", "ns") != process_ids(["host:me:8:123"], "boot", "ns")
    assert process_ids(["host:me:7:123"], "boot", "ns") != process_ids(["host:me:7:123"], "boot", "other")


# --- Random graphs ----------------------------------------------------------------------------------------

resources = st.sampled_from("uvwxyz")
agents = st.sampled_from("abcdef")


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.dictionaries(resources, agents), st.lists(st.tuples(agents, resources), unique=True, max_size=12))
def test_no_cycle_remains_after_the_victims_give_up(held_by: dict[str, str], pairs: list[tuple[str, str]]) -> None:
    waits = [wait(who, what, number) for number, (who, what) in enumerate(pairs)]
    while found := [cycle for each in waits if (cycle := find_cycle(each.ticket, graph(held_by, *waits)))]:
        for cycle in found:
            for here, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
                assert held_by[here.wait.resource.name] == following.wait.waiter.label
        seen = graph(held_by, *waits)
        leaving = [each for each in waits if gives_up(each.ticket, seen)]
        assert leaving, "a cycle in which nobody gives up"
        waits = [each for each in waits if each not in leaving]


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.dictionaries(resources, agents), st.dictionaries(agents, resources))
def test_with_one_wait_per_agent_exactly_one_wait_of_each_cycle_gives_up(
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


# --- All interleavings ------------------------------------------------------------------------------------
#
# Each agent holds one resource and waits for another. Some release their own before they wait, some from
# another thread while they wait. A waiter checks for cycles, and gives up or is served. A check reads the
# two kinds of resources one after the other, holds before waits, and does so twice; between any two of
# these readings any agent may move.

READINGS = ("leases held", "leases waited for", "claims held", "claims waited for")
FEWER = ("all held", "all waited for")
BACKWARDS = ("leases waited for", "leases held", "claims waited for", "claims held")


class Plan(NamedTuple):
    """The plan of an agent. It releases its hold `before` it waits, or perhaps `meanwhile`, or not at all; or it
    releases it `and takes it again` before it waits. A name in capitals is that of a file lock."""

    holds: str
    wants: str
    releases: str = ""


class Agent(NamedTuple):
    """The progress of an agent, and the readings of its current check so far.

    `stuck` says whether it really was in a cycle at the moment between its two graphs.
    """

    at: str = "begins"  # begins, released, again, waits, gives up, served, done
    checks: int = 0
    read: tuple[tuple[object, ...], ...] = ()
    stuck: bool = False


class World(NamedTuple):
    """`held` and `waiting` number their entries, so that a repeated one is distinct from the first."""

    agents: tuple[Agent, ...]
    held: tuple[tuple[str, int, int], ...]
    waiting: tuple[tuple[str, int, int], ...]
    number: int


def kind_of(name: str) -> str:
    return "leases" if name in "xzXZ" else "claims"


def hold_id_of(what: str, who: int, number: int) -> str:
    """File locks have no ids of their own: successive holds of one process look the same."""
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
    """Decide as `check_deadlock` does with its two graphs."""
    graphs = iter([first, second])
    try:
        check_deadlock(ticket, graphs.__next__)
    except Deadlock:
        return True
    return False


class Explorer:
    """Explores every interleaving of the moves of a few agents, and collects the problems."""

    def __init__(
        self,
        plans: tuple[Plan, ...],
        judged_by: Judge,
        checks: int,
        readings: tuple[str, ...] | None = None,
    ) -> None:
        self.plans = plans
        self.checks = checks
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
        if agent.checks == self.checks:
            return
        read = (*agent.read, reading(world, self.readings[len(agent.read) % len(self.readings)]))
        ticket = next(str(no) for _, waiter, no in world.waiting if waiter == who)
        if len(read) < 2 * len(self.readings):
            stuck = agent.stuck
            if len(read) == len(self.readings):
                stuck = bool(find_cycle(ticket, WaitGraph(as_holds(world), as_waits(world))))
            yield self.put(world, who, agent._replace(read=read, stuck=stuck))
            return
        checked = Agent("waits", agent.checks + 1)
        if self.judged_by(ticket, drawn(read[: len(read) // 2]), drawn(read[len(read) // 2 :])):
            self.judge_victim(world, agent, ticket)
            checked = Agent("gives up", agent.checks + 1)
        yield self.put(world, who, checked)

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
        """No agent can move any more: all checks are used up. One more check must resolve any cycle that is left."""
        seen = WaitGraph(as_holds(world), as_waits(world))
        left = [each for each in as_waits(world) if find_cycle(each.ticket, seen)]
        if left and sum(self.judged_by(each.ticket, seen, seen) for each in left) != 1:
            self.problems.add("a cycle in which not exactly one gives up")


def dropped(held: tuple[tuple[str, int, int], ...], who: int) -> tuple[tuple[str, int, int], ...]:
    return tuple(each for each in held if each[1] != who)


CYCLE = (Plan("x", "y"), Plan("y", "x"))
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


def explored(plans: tuple[Plan, ...], judged_by: Judge = judge, checks: int = 2) -> Explorer:
    explorer = Explorer(plans, judged_by, checks)
    explorer.run()
    return explorer


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plans", "checks", "states"),
    [
        (CYCLE, 2, 500),
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
def test_in_every_interleaving_exactly_one_agent_gives_up_and_only_in_a_cycle(
    plans: tuple[Plan, ...], checks: int, states: int
) -> None:
    found = explored(plans, checks=checks)
    assert not found.problems
    assert found.states > states


@pytest.mark.parametrize("plans", [FILES, FILE_LET_GO, FILE_TAKEN_AGAIN, BOTH_TAKEN_AGAIN])
def test_exactly_one_gives_up_even_if_waits_are_read_before_holds(plans: tuple[Plan, ...]) -> None:
    explorer = Explorer(plans, judge, 1, BACKWARDS)
    explorer.run()
    assert not explorer.problems
    assert explorer.states > 200


def after_one_reading(ticket: str, first: WaitGraph, second: WaitGraph) -> bool:
    return judge(ticket, first, first)


def every_member_gives_up(ticket: str, first: WaitGraph, second: WaitGraph) -> bool:
    cycle = find_cycle(ticket, first)
    return bool(cycle) and is_in(cycle, second)


@pytest.mark.parametrize(
    ("plans", "planted", "problem"),
    [
        (ONE_LETS_GO, after_one_reading, "gave up without a cycle"),
        (FILE_LET_GO, after_one_reading, "gave up without a cycle"),
        (CYCLE, every_member_gives_up, "two of one cycle gave up"),
        (CYCLE, lambda *seen: False, "a cycle in which not exactly one gives up"),
    ],
    ids=["looks once", "looks once at files", "any victim", "no victim"],
)
def test_a_planted_bug_in_the_detector_is_found(plans: tuple[Plan, ...], planted: Judge, problem: str) -> None:
    assert problem in explored(plans, planted).problems
