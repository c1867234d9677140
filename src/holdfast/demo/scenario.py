"""The course of the demo: agents work, some are killed, one is paused until others have taken over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.demo.agents import Agent, Command, Crew, Stage, set_up
from holdfast.demo.check import Audit, examine
from holdfast.issues import rules as issue_rules
from holdfast.issues.claims import HeldIssueClaim
from holdfast.issues.model import CLAIMS, Issue, IssueClaim, State
from holdfast.issues.tracker import Tracker
from holdfast.leases import rules as lease_rules
from holdfast.leases.service import HeldLease
from holdfast.repository.overview import look_around

KILLS = 3
LOOK_EVERY = 0.1
LONGEST = 300.0
"""After this long the demo gives up: something is stuck, which is a finding."""


class DemoPlan(NamedTuple):
    """How the demo is to be played."""

    workers: int
    issues: int
    seed: int
    ttl: float
    store: str | None = None


class Incident(NamedTuple):
    """Something that was done to an agent, `after` so many seconds: `killed`, `paused`, `resumed`, or
    `refused`, which is what becomes of one that was paused."""

    after: float
    what: str
    agent: int
    issue: str | None


class Scene(NamedTuple):
    """How things stand: for whoever watches."""

    after: float
    issues: Sequence[Issue]
    states: Sequence[State]
    working: dict[int, str | None]
    """Which agent works on which issue."""
    paused: frozenset[int]


class DemoReport(NamedTuple):
    """What was shown. It has passed if the audit has no findings."""

    seconds: float
    incidents: Sequence[Incident]
    agents: int
    audit: Audit


def play(
    directory: Path,
    plan: DemoPlan,
    command: Callable[[Stage], Command],
    *,
    tell: Callable[[Incident], None],
    show: Callable[[Scene], None],
) -> DemoReport:
    """Play the demo in an empty directory, and judge what is left."""
    stage = Stage.at(directory)
    issues = set_up(stage, issues=plan.issues, seed=plan.seed, store=plan.store)
    with Crew(plan.workers, command(stage), stage.notes) as crew:
        course = _Course(stage.tracker(), plan, crew, tell, show)
        finished = course.run()
    _let_leases_run_out(stage, plan.ttl)
    audit = examine(stage, issues, crew.ended, finished=finished, paused=course.was_paused)
    return DemoReport(course.elapsed(), course.incidents, len(crew.ended), audit)


def _let_leases_run_out(stage: Stage, ttl: float) -> None:
    """One who was killed after its work was done may have left a lease, which lasts for its time."""
    deadline = time.monotonic() + 2 * ttl
    while time.monotonic() < deadline:
        held = look_around(stage.root).holdings
        if all(each.reclaim.safe for each in held):
            return
        time.sleep(LOOK_EVERY)


class _Course:
    def __init__(
        self,
        tracker: Tracker,
        plan: DemoPlan,
        crew: Crew,
        tell: Callable[[Incident], None],
        show: Callable[[Scene], None],
    ) -> None:
        self.incidents: list[Incident] = []
        self.was_paused = False
        self._tracker = tracker
        self._plan = plan
        self._crew = crew
        self._tell = tell
        self._show = show
        self._chance = random.Random(plan.seed)
        self._began = time.monotonic()
        self._kill_at = [self._chance.uniform(1.0, 3.0) for _ in range(KILLS)]
        self._pause_at = self._chance.uniform(1.5, 3.5)
        self._paused: tuple[Agent, str, int] | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> bool:
        """Play until everything is done; False if that does not come about."""
        busy_since = time.monotonic()
        while self.elapsed() < LONGEST:
            for ended in self._crew.gather():
                if ended.paused and not ended.killed:
                    self._happened("refused" if ended.exit_status == 5 else "not refused", ended.agent, None)
            seen = self._tracker.snapshot()
            working = self._working()
            self._show(
                Scene(
                    self.elapsed(),
                    list(seen),
                    [seen.state(issue) for issue in seen],
                    working,
                    frozenset(number for number, agent in self._crew.working.items() if agent.paused),
                )
            )
            if all(issue.state is State.DONE for issue in seen) and not self._crew.working:
                return True
            self._do_harm(working, time.monotonic() - busy_since)
            looking = (number for number, agent in self._crew.working.items() if not agent.paused)
            unclaimed = sum(working.get(number) is None for number in looking)
            for number in self._crew.idle()[: max(0, len(seen.ready()) - unclaimed)]:
                self._crew.start(number)
            time.sleep(LOOK_EVERY)
        return False

    def _working(self) -> dict[int, str | None]:
        """Which of the agents that run has which issue, by the claims that are in force."""
        claims = [document.record.claim for _, document in self._tracker.store.scan(CLAIMS)]
        issues = [issue_id for issue_id, _ in self._tracker.store.scan(CLAIMS)]
        moment = self._tracker.transactions.moment()
        held = {
            claim.assignee: issue
            for issue, claim in zip(issues, claims, strict=False)
            if claim is not None and not claim.is_expired(moment)
        }
        return {number: held.get(agent.name) for number, agent in self._crew.working.items()}

    def _do_harm(self, working: dict[int, str | None], elapsed: float) -> None:
        if self._paused is not None:
            self._perhaps_resume()
        elif not self.was_paused and elapsed >= self._pause_at:
            self._pause(working)
        if self._kill_at and elapsed >= self._kill_at[0]:
            self._kill(working)

    def _kill(self, working: dict[int, str | None]) -> None:
        running = [number for number, agent in self._crew.working.items() if not agent.paused]
        if not running:
            return
        number = self._chance.choice(running)
        self._crew.working[number].kill()
        self._kill_at.pop(0)
        self._kill_at = [max(each, self.elapsed() + self._chance.uniform(0.3, 1.5)) for each in self._kill_at]
        self._happened("killed", number, working[number])

    def _pause(self, working: dict[int, str | None]) -> None:
        """Pause one that is at work, and leave it so until its work has been given to another."""
        busy = [(number, issue) for number, issue in working.items() if issue is not None]
        if not busy:
            return
        number, issue = self._chance.choice(busy)
        agent = self._crew.working[number]
        agent.pause()
        claim = self._tracker.claims.state(issue)
        at_its_end = claim is None or claim.claim is None or claim.claim.assignee != agent.name
        if claim is None or at_its_end or agent.is_holding_others_up():
            agent.paused = False
            agent.resume()  # in the middle of a commit nobody could take over: at another moment, then
            return
        self._paused, self.was_paused = (agent, issue, claim.token), True
        self._happened("paused", number, issue)

    def _perhaps_resume(self) -> None:
        assert self._paused is not None
        agent, issue, token = self._paused
        claim = self._tracker.claims.state(issue)
        if claim is not None and claim.token > token and claim.claim is None:  # the other has finished
            agent.resume()
            self._paused = None
            self._happened("resumed", agent.number, issue)

    def _happened(self, what: str, agent: int, issue: str | None) -> None:
        incident = Incident(self.elapsed(), what, agent, issue)
        self.incidents.append(incident)
        self._tell(incident)


def switch_off_fencing() -> None:
    """Let everybody publish in this process, whoever holds the lease or the claim by now."""

    def any_lease(view: Any, now: Any, keys: Any, lock_id: str, token: int) -> Any:
        return view.get(keys.lease)

    def any_claim(issue_id: str, record: Any, now: Any, claim_id: Any) -> Any:
        return IssueClaim(
            claim_id=claim_id.text,
            assignee="agent:stale",
            token=claim_id.token,
            ttl=60.0,
            claimed_at="",
            renewed_at="",
            expires_at="9999-01-01T00:00:00Z",
        )

    def nothing(self: Any) -> None:
        return None

    lease_rules.validate = any_lease
    issue_rules.in_force = any_claim
    HeldIssueClaim.check = nothing  # type: ignore[method-assign]
    HeldIssueClaim.renew = nothing  # type: ignore[assignment, method-assign]
    HeldLease.check = nothing  # type: ignore[method-assign]
    HeldLease.release = nothing  # type: ignore[method-assign]
