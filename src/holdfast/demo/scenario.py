"""The demo scenario: agents work, some are killed, one is paused until another has done its work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.demo.agents import Agent, AgentExit, Stage, set_up
from holdfast.demo.check import Audit, examine
from holdfast.issues import rules as issue_rules
from holdfast.issues.held_claim import HeldIssueClaim
from holdfast.issues.model import CLAIMS, Issue, IssueClaim, State
from holdfast.leases import rules as lease_rules
from holdfast.leases.service import HeldLease
from holdfast.repository.overview import look_around

KILLS = 3
POLL_INTERVAL = 0.1
LONGEST = 300.0
"""The demo gives up after this long, which is a finding."""

Command = Callable[[Stage, str], list[str]]
"""The command line of the agent with this name."""


class DemoPlan(NamedTuple):
    """The parameters of one demo."""

    workers: int
    issues: int
    seed: int
    ttl: float
    store: str | None = None


class Incident(NamedTuple):
    """Something that happened to an agent, `after` seconds into the demo."""

    after: float
    what: str  # "killed", "paused", "resumed", and then "refused" or "not refused"
    agent: int
    issue: str | None


class Scene(NamedTuple):
    """The current state, for display. `working` maps each running agent to its issue."""

    after: float
    issues: Sequence[tuple[Issue, State]]
    working: dict[int, str | None]
    paused: frozenset[int]


Report = Callable[[Incident], None]
Show = Callable[[Scene], None]


class DemoReport(NamedTuple):
    """The result. The demo has passed if the audit has no findings."""

    seconds: float
    incidents: Sequence[Incident]
    agents: int
    audit: Audit


def play(directory: Path, plan: DemoPlan, command: Command, *, report: Report, show: Show) -> DemoReport:
    """Run the demo in an empty directory, and check the result."""
    stage = Stage.at(directory)
    issues = set_up(stage, issues=plan.issues, seed=plan.seed, store=plan.store)
    scenario = _Scenario(stage, plan, command, report, show)
    try:
        finished = scenario.run()
    finally:
        scenario.end_agents()
    deadline = time.monotonic() + 2 * plan.ttl  # an agent that was killed after its work may have left a lease
    while time.monotonic() < deadline and not all(each.reclaim.safe for each in look_around(stage.root).holdings):
        time.sleep(POLL_INTERVAL)
    audit = examine(stage, issues, scenario.exits, finished=finished, paused=scenario.was_paused)
    return DemoReport(scenario.elapsed(), scenario.incidents, len(scenario.exits), audit)


class _Scenario:
    def __init__(self, stage: Stage, plan: DemoPlan, command: Command, report: Report, show: Show) -> None:
        self.exits: list[AgentExit] = []
        self.incidents: list[Incident] = []
        self.was_paused = False
        self._stage, self._plan, self._command = stage, plan, command
        self._report, self._show = report, show
        self._tracker = stage.tracker()
        self._agents: dict[int, Agent] = {}
        self._started = 0
        self._chance = random.Random(plan.seed)
        self._kill_at = [self._chance.uniform(1.0, 3.0) for _ in range(KILLS)]
        self._pause_at = self._chance.uniform(0.5, 1.5)  # well before the last issue is done
        self._paused: tuple[Agent, str, int] | None = None
        self._began = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> bool:
        """Run until all issues are done; False if that takes too long."""
        while self.elapsed() < LONGEST:
            self._gather()
            seen = self._tracker.snapshot()
            working = self._working()
            paused = frozenset(number for number, agent in self._agents.items() if agent.paused)
            self._show(Scene(self.elapsed(), [(each, seen.state(each)) for each in seen], working, paused))
            if all(issue.state is State.DONE for issue in seen) and not self._agents:
                return True
            self._do_harm(working)
            looking = [number for number in self._agents if number not in paused and working.get(number) is None]
            idle = [number for number in range(1, self._plan.workers + 1) if number not in self._agents]
            for number in idle[: max(0, len(seen.ready()) - len(looking))]:
                self._start(number)
            time.sleep(POLL_INTERVAL)
        return False

    def end_agents(self) -> None:
        for agent in self._agents.values():
            agent.end()

    def _start(self, number: int) -> None:
        self._started += 1
        name = f"agent:{number}-{self._started}"  # never reused: it identifies the agent's claims
        log = self._stage.notes / f"{name.replace(':', '-')}.log"
        self._agents[number] = Agent(number, name, self._command(self._stage, name), log)

    def _gather(self) -> None:
        for agent in [each for each in self._agents.values() if each.has_ended()]:
            del self._agents[agent.number]
            ended = agent.exit()
            self.exits.append(ended)
            if ended.paused and not ended.killed:
                self._happened("refused" if ended.exit_status == 5 else "not refused", agent.number, None)

    def _working(self) -> dict[int, str | None]:
        """The issue that each running agent has claimed."""
        moment = self._tracker.transactions.moment()
        claims = [(issue, document.record.claim) for issue, document in self._tracker.store.scan(CLAIMS)]
        held = {claim.assignee: issue for issue, claim in claims if claim and not claim.is_expired(moment)}
        return {number: held.get(agent.name) for number, agent in self._agents.items()}

    def _do_harm(self, working: dict[int, str | None]) -> None:
        if self._paused is not None:
            self._resume(*self._paused)
        elif not self.was_paused and self.elapsed() >= self._pause_at:
            self._pause(working)
        if self._kill_at and self.elapsed() >= self._kill_at[0]:
            self._kill(working)

    def _kill(self, working: dict[int, str | None]) -> None:
        running = [number for number, agent in self._agents.items() if not agent.paused]
        if not running:
            return
        number = self._chance.choice(running)
        self._agents[number].kill()
        self._kill_at = [max(each, self.elapsed() + self._chance.uniform(0.3, 1.5)) for each in self._kill_at[1:]]
        self._happened("killed", number, working[number])

    def _pause(self, working: dict[int, str | None]) -> None:
        """Pause a working agent; `_resume` resumes it once another agent has done its work."""
        busy = [(number, issue) for number, issue in working.items() if issue is not None]
        if not busy:
            return
        number, issue = self._chance.choice(busy)
        agent = self._agents[number]
        agent.pause()
        record = self._tracker.claims.state(issue)
        claim = record.claim if record else None
        if claim is None or claim.assignee != agent.name or agent.is_committing():
            agent.paused = False  # it is about to end, or no other agent could take over: try again later
            agent.resume()
            return
        self._paused, self.was_paused = (agent, issue, claim.token), True
        self._happened("paused", number, issue)

    def _resume(self, agent: Agent, issue: str, token: int) -> None:
        record = self._tracker.claims.state(issue)
        if record is not None and record.token > token and record.claim is None:  # the other one has finished
            agent.resume()
            self._paused = None
            self._happened("resumed", agent.number, issue)

    def _happened(self, what: str, agent: int, issue: str | None) -> None:
        self.incidents.append(Incident(self.elapsed(), what, agent, issue))
        self._report(self.incidents[-1])


def switch_off_fencing() -> None:
    """Plant a fault: from now on, no check of a lease or claim fails in this process."""

    def any_lease(view: Any, now: Any, keys: Any, lock_id: str, token: int) -> Any:
        return view.get(keys.lease)

    def any_claim(issue_id: str, record: Any, now: Any, claim_id: Any) -> Any:
        times: Any = {"ttl": 60.0, "claimed_at": "", "renewed_at": "", "expires_at": "9999-01-01T00:00:00Z"}
        return IssueClaim(claim_id=claim_id.text, assignee="agent:stale", token=claim_id.token, **times)

    lease_rules.validate = any_lease
    issue_rules.in_force = any_claim
    for held, name in (
        (HeldIssueClaim, "check"),
        (HeldIssueClaim, "renew"),
        (HeldLease, "check"),
        (HeldLease, "release"),
    ):
        setattr(held, name, lambda self: None)
