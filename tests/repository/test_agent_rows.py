"""Each agent is one row of the overview, and everything that needs attention is listed, the most severe first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import Now
from holdfast.findings import Severity
from holdfast.issues.model import Issue, State
from holdfast.issues.rules import IssueSet
from holdfast.locks.identity import Liveness
from holdfast.repository.agent_rows import AgentRow, agent_rows, with_landings
from holdfast.repository.attention import LOW_DISK, Attention, LandingQueues, Situation, attention_list
from holdfast.repository.conflicts import WorktreeConflict
from holdfast.repository.holdings import Holding, HoldingWaiter, Reclaim
from holdfast.repository.landing_records import Landing, LandingState, LandingTarget
from holdfast.repository.overview import Overview, UnreadableKind, look_around, with_details
from holdfast.repository.repository import Repository
from tests.cli.commands import holdfast

ISSUE = "4f1c2a9b-0000-4000-8000-000000000000"
FREE_AT = "2026-01-01T00:00:00Z"


def lease(worktree: str, who: str, process: str | None = None, **more: Any) -> Holding:
    return Holding("lease", worktree, who, FREE_AT, process=process or who)._replace(**more)


def claim(issue_id: str, who: str, process: str | None = None, **more: Any) -> Holding:
    return Holding("issue", issue_id, who, FREE_AT, process=process, title="Parse")._replace(**more)


def held(rows: tuple[AgentRow, ...]) -> list[tuple[str, list[str]]]:
    return [(each.actor, [holding.what for holding in each.holdings]) for each in rows]


# --- Rows --------------------------------------------------------------------------------------------------


def test_an_issue_joins_the_worktree_named_after_it() -> None:
    rows = agent_rows(
        [lease("issue-11111111", "agent:a", "p1"), lease("issue-4f1c2a9b", "agent:a", "p2"), claim(ISSUE, "agent:a")]
    )

    assert held(rows) == [("agent:a", ["issue-11111111"]), ("agent:a", ["issue-4f1c2a9b", ISSUE])]
    assert rows[1].work == "4f1c2a9b Parse"
    assert (rows[1].worktree, rows[1].issue_id) == ("issue-4f1c2a9b", ISSUE)


def test_what_one_process_holds_is_one_row_and_the_actor_is_its_name() -> None:
    rows = agent_rows([lease("main", "host:u:7:1"), claim(ISSUE, "agent:a", "host:u:7:1")])

    assert held(rows) == [("agent:a", ["main", ISSUE])]


def test_agents_with_one_actor_but_two_worktrees_are_two_rows_and_nothing_is_guessed() -> None:
    node = Holding("claim", "1.2", "agent:a", process="p3")
    rows = agent_rows([lease("one", "agent:a", "p1"), lease("two", "agent:a", "p2"), node])

    assert held(rows) == [("agent:a", ["one"]), ("agent:a", ["two"]), ("agent:a", ["1.2"])]


def test_two_issues_of_one_actor_are_two_rows() -> None:
    assert len(agent_rows([claim(ISSUE, "agent:a", "p"), claim("other", "agent:a", "p")])) == 2


def test_the_time_left_is_the_shortest_and_a_dead_holder_makes_the_row_dead() -> None:
    (row,) = agent_rows(
        [
            lease("main", "agent:a", "p", time_left=30.0, liveness=Liveness.ALIVE),
            claim(ISSUE, "agent:a", "p", time_left=20.0, liveness=Liveness.DEAD),
        ]
    )

    assert (row.time_left, row.liveness) == (20.0, Liveness.DEAD)


def test_a_waiter_that_holds_something_else_is_one_row() -> None:
    waiter = HoldingWaiter("agent:b", 1, FREE_AT, "later", Liveness.ALIVE, "p2")
    rows = agent_rows(
        [lease("main", "agent:a", "p1", waiting=(waiter,), time_left=40.0), lease("two", "agent:b", "p2")]
    )

    assert held(rows) == [("agent:a", ["main"]), ("agent:b", ["two"])]
    (awaited,) = rows[1].waits_for
    assert (awaited.what, awaited.held_by, awaited.time_left, awaited.place) == ("main", "agent:a", 40.0, 1)


def test_a_waiter_with_the_actor_of_the_holder_is_another_agent() -> None:
    waiter = HoldingWaiter("agent:a", 1, FREE_AT, "later", Liveness.ALIVE, "p2")
    rows = agent_rows([lease("main", "agent:a", "p1", waiting=(waiter,))])

    assert [(each.actor, each.work, len(each.waits_for)) for each in rows] == [
        ("agent:a", "", 0),
        ("agent:a", "later", 1),
    ]
    assert rows[1].liveness is Liveness.ALIVE


def test_locks_that_a_command_holds_while_it_runs_are_no_row() -> None:
    own = Holding("file lock", ".jvs/guards/worktree-main.lock", "pid 7")
    other = Holding("file lock", "main/build.lock", "pid 7", purpose="make")

    assert held(agent_rows([own, other])) == [("pid 7", ["main/build.lock"])]


def landing(number: int, **more: Any) -> Landing:
    facts: dict[str, Any] = {"target": "main", "branch": "main", "commit": "0" * 40, "queued_at": FREE_AT, **more}
    return Landing(landing_id=f"l{number}", sequence=number, **facts)


def test_queued_work_is_waited_for_by_its_worktree_or_has_a_row_of_its_own() -> None:
    rows = agent_rows([lease("one", "agent:a", "p1")])
    queued = [landing(1, worktree_id="gone", actor="agent:b", title="Old"), landing(2, worktree_id="one")]

    first, second = with_landings(rows, queued)

    assert [(each.what, each.place) for each in first.waits_for] == [("main", 2)]
    assert (second.actor, second.work, second.holdings) == ("agent:b", "Old", ())


# --- Attention ---------------------------------------------------------------------------------------------


def attention(*holdings: Holding, **more: Any) -> list[tuple[str, str]]:
    overview = Overview(Path("/r"), FREE_AT, holdings, ())
    return [(each.kind, each.subject) for each in attention_list(Situation(overview)._replace(**more))]


@pytest.mark.parametrize(
    ("left", "ttl", "liveness", "expected"),
    [
        (0.0, 60.0, Liveness.ALIVE, "expired"),
        (14.0, 60.0, Liveness.ALIVE, "expiring"),
        (40.0, 60.0, Liveness.DEAD, "dead"),
        (59.0, None, Liveness.UNKNOWN, "expiring"),
    ],
)
def test_a_holder_that_is_about_to_lose_its_lease_is_listed(
    left: float, ttl: float | None, liveness: Liveness, expected: str
) -> None:
    found = lease("main", "agent:a", time_left=left, ttl=ttl, liveness=liveness)

    assert attention(found) == [(expected, "lease main")]
    assert attention(found._replace(time_left=41.0, ttl=60.0, liveness=Liveness.ALIVE)) == []


def test_the_command_reclaims_what_is_safe_to_reclaim() -> None:
    overview = Overview(Path("/r"), FREE_AT, (lease("m", "a", time_left=0.0, reclaim=Reclaim(True, "take it")),), ())

    (found,) = attention_list(Situation(overview))
    assert (found.command, "let the lease m expire" in found.message) == ("take it", True)


def test_a_lease_without_an_actor_is_named_after_what_its_process_claims() -> None:
    holdings = (lease("main", "host:u:7:1", liveness=Liveness.DEAD), claim(ISSUE, "agent:a", "host:u:7:1"))

    (found,) = attention_list(Situation(Overview(Path("/r"), FREE_AT, holdings, ())))
    assert found.message == "the process of agent:a, which has the lease main, is gone"


def issues(*all_: Issue) -> IssueSet[Issue]:
    return IssueSet({each.id: each for each in all_}, Now(0.0), claims=lambda ids: {})


def test_a_failed_gate_is_listed_until_the_issue_is_finished() -> None:
    failed = Issue(
        id=ISSUE, title="x", state=State.GATED, gates_required=("tests",), gates_status={"tests": {"status": "failed"}}
    )
    passed = Issue(
        id="ok", title="y", state=State.GATED, gates_required=("tests",), gates_status={"tests": {"status": "passed"}}
    )

    assert attention(issues=issues(failed, passed)) == [("gate", ISSUE)]
    done = Issue(id=ISSUE, title="x", state=State.DONE, gates_required=("t",), gates_status={"t": {"status": "failed"}})
    assert attention(issues=issues(done)) == []


def test_a_queue_in_which_everything_waits_is_listed() -> None:
    one, two = Issue(id="one", title="", dependencies=("two",)), Issue(id="two", title="", dependencies=("gone",))

    assert attention(issues=issues(one, two)) == [("queue", "issues")]
    assert attention(issues=issues(one, two, Issue(id="gone", title="", state=State.IN_PROGRESS))) == []
    assert attention(issues=issues(one, Issue(id="two", title=""))) == []


def test_blocked_and_failed_landings_are_listed_until_they_are_queued_again() -> None:
    target = LandingTarget(name="main", branch="main", queue=("l1",), waits_for="a rebase is in progress")
    failed = landing(2, worktree_id="w", state=LandingState.FAILED)
    again = landing(3, worktree_id="w")

    assert attention(landings=LandingQueues((target,), (landing(1), failed))) == [("landing", "l2"), ("queue", "main")]
    assert attention(landings=LandingQueues((), (failed, again))) == []


def test_work_that_did_not_land_is_listed_until_its_worktree_is_gone_or_its_issue_finished() -> None:
    failed = landing(2, worktree_id="w", issue_id=ISSUE, state=LandingState.CONFLICT)
    rejected = Issue(id=ISSUE, title="x", state=State.REJECTED)

    assert attention(landings=LandingQueues((), (failed,)), issues=issues()) == [("landing", "l2")]
    assert attention(landings=LandingQueues((), (failed,)), issues=issues(rejected)) == []
    assert attention(landings=LandingQueues((), (failed,), frozenset({"w"}))) == []


def test_a_queue_that_nobody_lands_is_listed() -> None:
    target = LandingTarget(name="main", branch="main", queue=("l1",))
    queues = LandingQueues((target,), (landing(1, issue_id=ISSUE),))
    lander = Holding("named lease", "landing-main", "agent:a", time_left=5.0, ttl=10.0, liveness=Liveness.ALIVE)
    waiting = Issue(id=ISSUE, title="x", dependencies=("other",))

    assert attention(landings=queues) == [("queue", "main")]
    assert attention(lander, landings=queues) == []
    assert ("queue", "main") in attention(lander._replace(liveness=Liveness.DEAD), landings=queues)
    assert ("queue", "main") not in attention(
        landings=queues, issues=issues(waiting, Issue(id="other", title="", state=State.IN_PROGRESS))
    )


def test_a_claim_that_is_held_for_a_landing_outlives_its_process_without_a_word() -> None:
    held = claim(ISSUE, "agent:a", "p1")._replace(time_left=None, liveness=Liveness.DEAD)

    assert attention(held) == []


def test_conflicts_the_disk_and_the_store_are_listed_and_errors_come_first() -> None:
    conflict = WorktreeConflict("a", "b", False, ("f1", "f2", "f3", "f4"), ())
    unreadable = (UnreadableKind("lease", "no answer"), UnreadableKind("issue", "no answer"))
    overview = Overview(Path("/r"), FREE_AT, (), unreadable, (conflict,))

    found = attention_list(Situation(overview, free_space=LOW_DISK - 1))

    assert [each.kind for each in found] == ["store", "disk", "conflict"]
    assert found[2].message == "a conflicts with b: f1, f2, f3 and 1 more"
    assert [each.severity for each in found] == [Severity.ERROR, Severity.ERROR, Severity.WARNING]
    assert attention_list(Situation(overview._replace(unreadable=(), conflicts=()), free_space=LOW_DISK)) == ()


# --- Together ----------------------------------------------------------------------------------------------


def test_details_of_a_real_repository(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for command in (("init", root), ("issue", "init", "--repo", root), ("gate", "define", "tests", "--repo", root)):
        assert holdfast(*command).returncode == 0
    create = holdfast("issue", "create", "Parse", "--gate", "tests", "--field", "id", "--repo", root)
    assert holdfast("gate", "fail", create.stdout.strip(), "tests", "--repo", root).returncode == 0
    for number in range(3):
        (root / f"main/f{number}").write_text("x")
    with Repository(root, actor="agent:a") as repository, repository.lease("main", purpose="try"):
        found = with_details(look_around(root))

    (row,) = found.agents
    assert (row.actor, row.work, row.changed_files, row.liveness) == ("agent:a", "try", 3, Liveness.ALIVE)
    (gate,) = found.attention
    assert gate == Attention("gate", create.stdout.strip(), gate.message, gate.command, Severity.ERROR)
    record = found.as_record()
    assert [each["changed_files"] for each in record["agents"]] == [3]  # type: ignore[attr-defined]
