"""Landing: the queue, its order, outcomes, claims, and the checkout that follows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import (
    Changed,
    Failure,
    FencingMismatch,
    IssueClaimed,
    LandingConflict,
    LandingPending,
    NotFound,
    Refused,
    SetupFailed,
)
from holdfast.issues.model import ClaimId, State
from holdfast.issues.prompt import Ending, issue_prompt
from holdfast.issues.tracker import Update
from holdfast.leases.service import HeldLease
from holdfast.repository.context import Proof
from holdfast.repository.holdings import issue_claims
from holdfast.repository.landing import Landings, LandOptions, require_landed
from holdfast.repository.landing_changes import LandingChanges
from holdfast.repository.landing_plan import on_new_tip
from holdfast.repository.landing_publish import Publisher
from holdfast.repository.landing_records import (
    IntentEntry,
    Landing,
    LandingState,
    LandingStyle,
    LandingTarget,
    PublishIntent,
    in_order,
    target_name,
)
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, ENFORCE_TOUCHES, SETUP, change
from tests.repository.landings import ACTOR, Project, die, ended, forked
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="git homes are tested on POSIX")


@pytest.fixture
def project(scratch: Path) -> Project:
    return Project(scratch)


def leased(project: Project) -> HeldLease:
    return Repository(project.top).lease(name="landing-trunk")


def worktree(project: Project) -> Path:
    repository = Repository(project.top)
    repository.worktrees.create("dev")
    return repository.path("dev")


def enqueue(project: Project, worktree: str, options: LandOptions | None = None) -> Landing:
    landings = project.landings()
    with landings._repository.lease(worktree) as lease:
        return landings.enqueue(worktree, Proof.of(lease), options or LandOptions())


# --- Freezing ------------------------------------------------------------------------------------------


def test_uncommitted_work_is_committed_without_hooks_and_lands(project: Project) -> None:
    hook = project.top / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    path = worktree(project)
    (path / "src/f0").write_text("changed\n")
    (path / "untracked").write_text("new\n")
    entry = enqueue(project, "dev")
    assert git("status", "--porcelain", at=path) == ""
    assert git("log", "-1", "--format=%an|%s|%(trailers:key=Holdfast-Worktree,valueonly)", at=path) == (
        "person|Work in dev|dev"
    )
    assert require_landed(project.landings().wait(entry.landing_id)).landed_as == project.tip()
    assert (project.top / "untracked").read_text() == "new\n"
    project.verdict()


def test_the_same_work_is_queued_once_and_newer_work_replaces_it(project: Project) -> None:
    path = worktree(project)
    (path / "one").write_text("1\n")
    first = enqueue(project, "dev")
    assert enqueue(project, "dev") == first
    (path / "two").write_text("2\n")
    second = enqueue(project, "dev")
    assert second.landing_id != first.landing_id
    assert project.entry(first).state is LandingState.WITHDRAWN
    project.landings().work_off()
    assert project.landed() == [second.landing_id]
    project.verdict()


def test_work_is_queued_however_often_others_come_first(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    path = worktree(project)
    (path / "new").write_text("1\n")
    commits, real = [project.commit({f"f{number}": "1\n"}) for number in range(4)], LandingChanges.target

    def target(self: LandingChanges, name: str) -> LandingTarget | None:
        found = real(self, name)
        if commits:
            with monkeypatch.context() as patch:
                patch.setattr(LandingChanges, "target", real)
                project.queue(commits.pop())
        return found

    monkeypatch.setattr(LandingChanges, "target", target)
    entry = enqueue(project, "dev")
    assert project.entry(entry).is_open
    assert len(project.landings().queued()) == 5


def test_unresolved_conflicts_are_not_committed(project: Project) -> None:
    path = worktree(project)
    (path / "src/f0").write_text("mine\n")
    git("commit", "-qam", "mine", at=path)
    git("update-ref", "refs/heads/trunk", project.commit({"src/f0": "theirs\n"}), at=project.top)
    with pytest.raises(AssertionError):
        git("merge", "trunk", at=path)
    with pytest.raises(Refused, match="unresolved conflicts: src/f0"):
        enqueue(project, "dev")
    (path / "src/f0").write_text("both\n")
    git("add", "src/f0", at=path)
    entry = enqueue(project, "dev")
    assert len(git("log", "-1", "--format=%P", entry.commit, at=path).split()) == 2


def test_work_is_committed_without_a_git_in_nested_repositories(project: Project) -> None:
    path, harm = worktree(project), project.top.parent / "harm"
    nested = path / "nested"
    git("init", "-q", nested)
    git("commit", "-q", "--allow-empty", "-m", "nested", at=nested)
    git("add", "nested", at=path)
    git("commit", "-qm", "a link", at=path)
    (nested / "new").write_text("a change\n")
    git("config", "core.fsmonitor", f"touch {harm};:", at=nested)
    (path / "src/f0").unlink()
    (path / "src/f1").write_text("changed\n")
    (path / "new").mkdir()
    (path / "new/x").write_text("new\n")
    entry = enqueue(project, "dev")
    assert not harm.exists()
    changed = git("diff", "--name-status", f"{entry.commit}^", entry.commit, at=path).split()
    assert changed == ["A", "new/x", "D", "src/f0", "M", "src/f1"]
    assert git("status", "--porcelain", "--ignore-submodules=dirty", at=path) == ""


def test_a_preview_merges_uncommitted_work_and_changes_nothing(project: Project) -> None:
    path = worktree(project)
    git("update-ref", "refs/heads/trunk", project.commit({"src/f0": "theirs\n"}), at=project.top)
    landings = project.landings()
    before = landings.preview("dev", LandOptions())
    assert (before.has_uncommitted, before.conflicts) == (False, ())
    (path / "src/f0").write_text("mine\n")
    (path / "new").write_text("new\n")
    objects, status = git("count-objects", at=path), git("status", "--porcelain", at=path)
    found = landings.preview("dev", LandOptions())
    assert (found.has_uncommitted, found.conflicts, found.commit) == (True, ("src/f0",), before.commit)
    assert (git("count-objects", at=path), git("status", "--porcelain", at=path)) == (objects, status)
    git("commit", "-qam", "mine", at=path)
    assert landings.preview("dev", LandOptions()).conflicts == ("src/f0",)
    with pytest.raises(AssertionError):
        git("merge", "-q", "trunk", at=path)
    with pytest.raises(Refused, match="unresolved conflicts: src/f0"):
        landings.preview("dev", LandOptions())
    git("add", "src/f0", at=path)
    assert landings.preview("dev", LandOptions()).conflicts == ()


def test_a_preview_says_what_the_work_would_wait_for(project: Project) -> None:
    path, landings = worktree(project), project.landings()
    (path / "src/f1").write_text("mine\n")
    assert landings.preview("dev", LandOptions()).waits_for == ""
    (project.top / "src/f1").write_text("edited\n")
    index = (project.top / ".git/index").read_bytes()
    assert (
        "uncommitted changes in files that landing changes: src/f1" in landings.preview("dev", LandOptions()).waits_for
    )
    assert (project.top / ".git/index").read_bytes() == index
    (project.top / "src/f1").write_text("mine\n")
    assert landings.preview("dev", LandOptions()).waits_for == ""
    git("checkout", "-q", "src/f1", at=project.top)
    (project.top / "new").write_text("untracked\n")
    (path / "new").write_text("tracked\n")
    assert "new" in landings.preview("dev", LandOptions()).waits_for


def test_a_preview_says_that_the_branch_has_the_work_already(project: Project) -> None:
    path, landings = worktree(project), project.landings()
    squashed = LandOptions(style=LandingStyle.SQUASH)
    assert landings.preview("dev", LandOptions()).is_there
    (path / "new").write_text("new\n")
    assert not landings.preview("dev", squashed).is_there
    landings.wait(enqueue(project, "dev", squashed).landing_id)
    assert landings.preview("dev", squashed).is_there
    assert not landings.preview("dev", LandOptions()).is_there


def test_a_preview_raises_what_the_claim_of_somebody_else_would_raise(project: Project) -> None:
    worktree(project)
    issue_id, tracker = project.issue("of another"), project.landings().changes.tracker
    claim = tracker.claims.claim(issue_id, tracker.claims.request("agent:other"))
    with pytest.raises(IssueClaimed):
        project.landings().preview("dev", LandOptions(issue_id=issue_id))
    mine = LandOptions(issue_id=issue_id, claim=ClaimId.parse(claim.claim.claim_id))
    assert project.landings().preview("dev", mine).is_there
    enqueue(project, "dev", mine)
    assert project.landings().preview("dev", LandOptions(issue_id=issue_id)).ahead == 0


def test_a_stale_holder_of_the_worktree_cannot_queue_its_work(project: Project) -> None:
    landings = project.landings()
    landings._repository.worktrees.create("dev")
    lease = landings._repository.lease("dev")
    proof = Proof.of(lease)
    lease.release()
    with landings._repository.lease("dev"), pytest.raises(FencingMismatch):
        landings.enqueue("dev", proof, LandOptions())
    assert not project.landings().queued()


def test_the_target_itself_cannot_land(project: Project) -> None:
    with pytest.raises(Refused, match="trunk itself checked out"):
        enqueue(project, "main")


def test_work_outside_of_the_scope_of_its_issue_is_refused(project: Project) -> None:
    issue_id = project.issue("only docs")
    tracker = project.landings().changes.tracker
    tracker.edit(issue_id, lambda issue: msgspec.structs.replace(issue, touches=("docs/**",)))
    change(project.root, ENFORCE_TOUCHES, ["true"])
    path = worktree(project)
    (path / "src/f0").write_text("not docs\n")
    with pytest.raises(Refused, match="does not touch: src/f0"):
        enqueue(project, "dev", LandOptions(issue_id=issue_id))
    assert not project.landings().queued()


# --- Order ---------------------------------------------------------------------------------------------


def test_priority_comes_first_then_arrival_and_dependencies_before_all() -> None:
    def entry(number: int, priority: int = 0) -> Landing:
        return Landing(
            landing_id=f"e{number}",
            target="t",
            branch="t",
            commit="0" * 40,
            sequence=number,
            queued_at="2024-01-01T00:00:00Z",
            issue_id=f"i{number}",
            priority=priority,
        )

    entries = [entry(1), entry(2), entry(3, 5), entry(4), entry(5, 9)]
    waits = {"i5": ["i1"], "i2": ["i4"], "i4": ["elsewhere"]}
    assert [each.landing_id for each in in_order(entries, waits)] == ["e3", "e1", "e5"]
    assert [each.landing_id for each in in_order(entries, {"i5": ["i1"], "i2": ["i4"]})] == [
        *("e3", "e1", "e5"),
        *("e4", "e2"),
    ]


def test_targets_have_safe_names_that_differ() -> None:
    names = ["main", "feature/x", "feature_x", "feature-2fx", "ä", "a" * 300, "a" * 301, "x y"]
    found = [target_name(each) for each in names] + [target_name("main", "origin")]
    assert len(set(found)) == len(found)
    for each in found:
        Landing(landing_id="x", target=each, branch="x", commit="0" * 40, sequence=1, queued_at="2024-01-01T00:00:00Z")
        assert len(f"landing-{each}") <= 128


# --- Outcomes ------------------------------------------------------------------------------------------


def test_an_issue_is_finished_by_the_landing_and_not_before(project: Project) -> None:
    issue_id = project.issue("do it")
    entry = project.queue(project.commit({"new": "1\n"}), issue_id=issue_id)
    tracker = project.landings().changes.tracker
    record = tracker.claims.state(issue_id)
    assert record is not None
    assert record.claim is not None
    assert record.claim.held_for == entry.landing_id
    later = tracker.transactions.moment()._replace(now=tracker.store.now() + 1e6, boot=1e9)
    assert not record.claim.may_be_taken(later)
    with pytest.raises(IssueClaimed):
        tracker.claims.claim(issue_id, tracker.claims.request("agent:other"))
    assert tracker.issue(issue_id).state is State.IN_PROGRESS
    (held,) = issue_claims(project.root, None)
    assert (held.time_left, held.until) == (None, None)
    assert f"landing cancel {entry.landing_id}" in held.reclaim.how
    project.landings().wait(entry.landing_id)
    assert tracker.issue(issue_id).state is State.DONE
    record = tracker.claims.state(issue_id)
    assert record is not None
    assert record.claim is None


def test_a_conflict_gives_the_issue_back_with_the_reason_in_its_prompt(project: Project) -> None:
    issue_id = project.issue("change f0")
    old = project.tip()
    git("commit", "-q", "--allow-empty", "-m", "x", at=project.top)
    project.write("src/f0", "theirs\n")
    git("commit", "-qam", "the other side", at=project.top)
    entry = project.queue(project.commit({"src/f0": "mine\n"}, on=old), issue_id=issue_id)
    with pytest.raises(LandingConflict, match=r"src/f0.*the other side"):
        require_landed(project.landings().wait(entry.landing_id))
    tracker = project.landings().changes.tracker
    record = tracker.claims.state(issue_id)
    assert record is not None
    assert record.claim is not None
    assert record.claim.held_for is msgspec.UNSET
    assert record.claim.claim_id == project.entry(entry).claim_id
    text = issue_prompt(tracker, issue_id, ending=Ending.LANDING).text
    assert "> The work conflicts with trunk" in text
    assert ">   src/f0" in text
    assert project.status() == ""
    project.verdict()


def test_an_entry_that_conflicts_with_one_before_it_waits_for_that_one(project: Project) -> None:
    one = project.queue(project.commit({"src/f0": "one\n"}))
    two = project.queue(project.commit({"src/f0": "two\n"}))
    three = project.queue(project.commit({"src/f1": "three\n"}))
    project.landings().work_off()
    states = [project.entry(each).state for each in (one, two, three)]
    assert states == [LandingState.LANDED, LandingState.CONFLICT, LandingState.LANDED]
    assert project.entry(two).conflicts == ("src/f0",)
    project.verdict()


@pytest.mark.parametrize("withdrawn", [False, True])
def test_an_entry_lands_at_once_when_the_one_that_it_conflicts_with_is_out(
    project: Project, *, withdrawn: bool
) -> None:
    change(project.root, CHECKS, ["test ! -e bad"])
    one = project.queue(project.commit({"src/f0": "one\n", "bad": "1\n"}))
    two = project.queue(project.commit({"src/f0": "two\n"}))
    if withdrawn:
        cancel = f"{sys.executable} -m holdfast landing cancel {one.landing_id} --repo {project.root}"
        change(project.root, CHECKS, [f"test ! -e bad || {{ {cancel}; false; }}"])
    project.landings().work_off()
    outcome = LandingState.WITHDRAWN if withdrawn else LandingState.FAILED
    assert [project.entry(each).state for each in (one, two)] == [outcome, LandingState.LANDED]
    project.verdict()


def test_a_branch_that_is_gone_does_not_keep_other_queues_waiting(project: Project) -> None:
    git("branch", "aaa", at=project.top)
    lost = project.queue(project.commit({"lost": "1\n"}), branch="aaa")
    git("branch", "-D", "aaa", at=project.top)
    entry = project.queue(project.commit({"new": "1\n"}))
    with pytest.raises(NotFound, match="there is no branch aaa"):
        project.landings().work_off()
    assert [project.entry(each).state for each in (lost, entry)] == [LandingState.QUEUED, LandingState.LANDED]
    assert project.landings().waits_for(lost) == "there is no branch aaa"

    (found,) = Repository(project.top).examine()
    assert (found.code, found.subject, found.facts["landings"]) == ("landing-branch-missing", "aaa", [lost.landing_id])
    assert lost.landing_id in found.message
    git("branch", "aaa", at=project.top)
    assert not Repository(project.top).examine()
    project.landings().work_off()
    assert project.entry(lost).state is LandingState.LANDED


def test_what_an_emptied_queue_waited_for_is_forgotten(project: Project) -> None:
    git("branch", "aaa", at=project.top)
    lost, landings = project.queue(project.commit({"lost": "1\n"}), branch="aaa"), project.landings()
    git("branch", "-D", "aaa", at=project.top)
    with pytest.raises(NotFound, match="there is no branch aaa"):
        landings.work_off()
    landings.cancel(lost.landing_id, "")
    git("branch", "aaa", at=project.top)
    assert landings.waits_for(project.queue(project.commit({"new": "1\n"}), branch="aaa")) == ""
    assert landings.retry(lost.landing_id, None).is_open


def test_the_culprit_fails_alone_and_the_others_land(project: Project) -> None:
    change(project.root, CHECKS, ["test ! -e bad"])
    entries = [project.queue(project.commit({f"new/{number}": "1\n"})) for number in range(3)]
    bad = project.queue(project.commit({"bad": "1\n"}), issue_id=project.issue("bad"))
    entries.append(project.queue(project.commit({"new/last": "1\n"})))
    project.landings().work_off()
    assert {project.entry(each).state for each in entries} == {LandingState.LANDED}
    found = project.entry(bad)
    assert found.state is LandingState.FAILED
    assert "'test ! -e bad' failed: exit status 1" in found.reason
    assert found.log
    project.verdict()


def test_what_a_culprit_leaves_in_ignored_files_fails_nobody_else(project: Project) -> None:
    project.write(".git/info/exclude", "cache\n")
    change(project.root, CHECKS, ["test ! -e bad || touch cache; test ! -e cache"])
    bad, good = (project.queue(project.commit({name: "1\n"})) for name in ("bad", "good"))
    project.landings().work_off()
    assert [project.entry(each).state for each in (bad, good)] == [LandingState.FAILED, LandingState.LANDED]


def test_a_machine_on_which_no_setup_works_blames_no_entry(project: Project) -> None:
    change(project.root, CHECKS, ["true"])
    away = project.top.parent / "away"
    change(project.root, SETUP, [f"test ! -e {away}"])
    away.touch()
    entry = project.queue(project.commit({"new": "1\n"}), issue_id=project.issue("one"))
    landings = project.landings()
    with pytest.raises(SetupFailed):
        landings.wait(entry.landing_id)
    assert project.entry(entry).is_open
    assert "can be prepared" in landings.waits_for(project.entry(entry))
    away.unlink()
    assert landings.wait(entry.landing_id).state is LandingState.LANDED
    assert not landings.targets()[0].waits_for
    project.verdict()


def test_a_machine_that_can_make_no_scratch_worktree_blames_no_entry(project: Project) -> None:
    change(project.root, CHECKS, ["true"])
    in_the_way = project.top.with_name("project.worktrees")
    in_the_way.touch()
    entry, landings = project.queue(project.commit({"new": "1\n"})), project.landings()
    with pytest.raises(Failure) as refused:
        landings.wait(entry.landing_id)
    assert landings.waits_for(project.entry(entry)) == refused.value.message
    in_the_way.unlink()
    assert landings.wait(entry.landing_id).state is LandingState.LANDED
    assert not landings.targets()[0].waits_for


def test_results_of_a_killed_lander_count_until_an_entry_is_queued_again(project: Project) -> None:
    counter = project.top.parent / "runs"
    change(project.root, CHECKS, [f"printf x >> {counter}; test ! -e bad"])
    good, bad = project.queue(project.commit({"good": "1\n"})), project.queue(project.commit({"bad": "1\n"}))

    def land() -> None:
        Publisher.publish = lambda *_: die()  # type: ignore[assignment,method-assign]
        project.landings().work_off()

    assert ended(forked(land)) == -9
    assert counter.read_text() == "xxx", "the batch, the batch again, the first entry alone"
    project.end_lease()
    project.landings().work_off()
    states = [project.entry(each).state for each in (good, bad)]
    assert states == [LandingState.LANDED, LandingState.FAILED]
    assert counter.read_text() == "xxx", "the tip has the tree of the first entry, and the batch has failed twice on it"
    project.landings().retry(bad.landing_id, None)
    project.landings().work_off()
    assert counter.read_text() == "xxxxx"
    project.verdict()


def test_results_of_checks_do_not_survive_a_move_of_the_branch(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes that are green by themselves: one lands while the other has been checked, and is not published."""
    assert not _broken_together(project)
    monkeypatch.setattr("holdfast.repository.landing_plan.on_new_tip", lambda plan: plan)
    assert on_new_tip is not None
    other = Project(project.top.parent / "other")
    assert _broken_together(other), "the planted bug was not found"


def _broken_together(project: Project) -> bool:
    """Whether a tip was published that does not pass the check."""
    change(project.root, CHECKS, ["! { test -e one && test -e two; }"])
    project.queue(project.commit({"one": "1\n"}))
    landings = project.landings()
    lander = landings._lander("trunk")
    real = lander._publish

    def publish(*arguments: object) -> bool:
        if not (project.top / "two").exists():
            project.write("two", "2\n")
            git("add", "two", at=project.top)
            git("commit", "-qm", "a person commits just then", at=project.top)
        return real(*arguments)  # type: ignore[arg-type]

    lander._publish = publish  # type: ignore[method-assign,assignment]
    with leased(project) as lease:
        lander.work(lease, lambda: False, lambda: False)
    names = git("ls-tree", "--name-only", "trunk", at=project.top).split()
    return {"one", "two"} <= set(names)


def test_an_entry_whose_claim_is_lost_is_withdrawn(project: Project) -> None:
    issue_id = project.issue("lost")
    entry = project.queue(project.commit({"new": "1\n"}), issue_id=issue_id)
    tracker = project.landings().changes.tracker
    record = tracker.claims.state(issue_id)
    assert record is not None
    assert record.claim is not None
    from holdfast.issues.model import ClaimId

    tracker.claims.release(issue_id, ClaimId.parse(record.claim.claim_id), reason="given up")
    other = project.queue(project.commit({"other": "1\n"}))
    project.landings().work_off()
    assert project.entry(entry).state is LandingState.WITHDRAWN
    assert project.entry(other).state is LandingState.LANDED
    assert not (project.top / "new").exists()
    assert tracker.issue(issue_id).state is State.READY


def test_an_issue_that_its_agent_has_finished_lands_and_stays_done(project: Project) -> None:
    issue_id = project.issue("done already")
    entry = project.queue(project.commit({"new": "1\n"}), issue_id=issue_id)
    tracker = project.landings().changes.tracker
    from holdfast.issues.model import ClaimId

    tracker.update(issue_id, Update(state=State.DONE), claim=ClaimId.parse(project.entry(entry).claim_id))
    project.landings().wait(entry.landing_id)
    assert project.entry(entry).state is LandingState.LANDED
    assert tracker.issue(issue_id).state is State.DONE


def test_a_cancelled_entry_is_withdrawn_and_can_be_queued_again(project: Project) -> None:
    issue_id = project.issue("think again")
    entry = project.queue(project.commit({"new": "1\n"}), issue_id=issue_id)
    landings = project.landings()
    assert landings.cancel(entry.landing_id, "not now").state is LandingState.WITHDRAWN
    landings.work_off()
    assert not (project.top / "new").exists()
    claim = landings.changes.tracker.claims.state(issue_id)
    assert claim is not None
    assert claim.claim is not None
    from holdfast.issues.model import ClaimId

    again = landings.retry(entry.landing_id, ClaimId.parse(claim.claim.claim_id))
    assert again.sequence > entry.sequence
    landings.work_off()
    assert (project.top / "new").exists()
    project.verdict()


def test_squashed_work_is_one_commit(project: Project) -> None:
    one = project.commit({"new": "1\n"})
    two = project.commit({"new": "2\n"}, on=one)
    entry = project.queue(two, style=LandingStyle.SQUASH)
    before = project.tip()
    project.landings().wait(entry.landing_id)
    assert git("rev-list", "--count", f"{before}..trunk", at=project.top) == "1"
    assert (project.top / "new").read_text() == "2\n"
    project.verdict()
    again, tip = project.queue(two, style=LandingStyle.SQUASH), project.tip()
    assert project.landings().wait(again.landing_id).landed_as == tip
    assert project.tip() == tip


def test_work_that_is_on_the_branch_lands_without_a_commit(project: Project) -> None:
    issue_id = project.issue("nothing to do")
    before = project.tip()
    entry = project.queue(before, issue_id=issue_id)
    project.landings().wait(entry.landing_id)
    assert project.tip() == before
    assert project.landings().changes.tracker.issue(issue_id).state is State.DONE


def test_merges_follow_the_attributes_of_the_target(project: Project) -> None:
    project.write(".gitattributes", "list merge=union\n")
    project.write("list", "first\n")
    git("add", "-A", at=project.top)
    git("commit", "-qm", "a list", at=project.top)
    entries = [project.queue(project.commit({"list": f"first\n{word}\n"})) for word in ("one", "two")]
    project.landings().work_off()
    assert {project.entry(each).state for each in entries} == {LandingState.LANDED}
    assert (project.top / "list").read_text().split() == ["first", "one", "two"]
    project.verdict()


# --- The checkout --------------------------------------------------------------------------------------


def test_a_checkout_with_overlapping_changes_is_not_touched(project: Project) -> None:
    project.write("src/f0", "mine\n")
    entry = project.queue(project.commit({"src/f0": "landing\n", "new": "1\n"}))
    before = project.tip()
    with pytest.raises(LandingPending, match="uncommitted changes in files that landing changes: src/f0"):
        project.landings().wait(entry.landing_id, wait=0.5)
    assert project.tip() == before
    assert (project.top / "src/f0").read_text() == "mine\n"
    assert not (project.top / "new").exists()
    git("checkout", "src/f0", at=project.top)
    assert project.landings().wait(entry.landing_id).state is LandingState.LANDED
    project.verdict()


@pytest.mark.parametrize("ignored", [False, True])
def test_an_untracked_file_in_the_way_is_not_replaced(project: Project, ignored: bool) -> None:
    if ignored:
        (project.top / ".git/info/exclude").write_text("new\n")
    project.write("new", "mine\n")
    entry = project.queue(project.commit({"new": "landing\n"}))
    with pytest.raises(LandingPending, match="in the way: new"):
        project.landings().wait(entry.landing_id, wait=0.3)
    assert (project.top / "new").read_text() == "mine\n"


def test_a_merge_in_progress_is_not_trampled(project: Project) -> None:
    side = project.commit({"side": "1\n"})
    git("merge", "-q", "--no-commit", "--no-ff", side, at=project.top)
    entry = project.queue(project.commit({"new": "1\n"}))
    with pytest.raises(LandingPending, match="a merge is in progress"):
        project.landings().wait(entry.landing_id, wait=0.3)
    git("commit", "-qm", "merged", at=project.top)
    project.landings().wait(entry.landing_id)
    project.verdict()


def test_a_rebase_of_the_target_is_not_trampled(project: Project) -> None:
    topic = project.commit({"src/f0": "theirs\n"})
    project.write("src/f0", "mine\n")
    git("commit", "-qam", "mine", at=project.top)
    with pytest.raises(AssertionError):
        git("rebase", topic, at=project.top)
    entry = project.queue(project.commit({"new": "1\n"}))
    with pytest.raises(LandingPending, match="a rebase is in progress"):
        project.landings().wait(entry.landing_id, wait=0.3)
    git("rebase", "--abort", at=project.top)
    project.landings().wait(entry.landing_id)
    project.verdict()


def test_a_foreign_index_lock_is_waited_for_and_stays(project: Project) -> None:
    lock = project.top / ".git/index.lock"
    lock.write_bytes(b"DIRC")
    entry = project.queue(project.commit({"new": "1\n"}))
    with pytest.raises(LandingPending, match=r"index\.lock exists"):
        project.landings().wait(entry.landing_id, wait=0.3)
    assert lock.read_bytes() == b"DIRC"
    lock.unlink()
    project.landings().wait(entry.landing_id)
    project.verdict()


def test_staged_and_unstaged_changes_of_other_files_stay(project: Project) -> None:
    project.write("src/f1", "staged\n")
    git("add", "src/f1", at=project.top)
    project.write("src/f2", "unstaged\n")
    project.write("untracked", "1\n")
    entry = project.queue(project.commit({"src/f0": "landing\n", "src/f3": None, "deep/er/new": "1\n"}))
    project.landings().wait(entry.landing_id)
    assert project.status().split("\n") == ["M  src/f1", " M src/f2", "?? untracked"]
    git("commit", "-qam", "a person commits all", at=project.top)
    assert git("show", "trunk:src/f0", at=project.top) == "landing"
    assert (project.top / "deep/er/new").exists()


def test_the_target_may_be_checked_out_in_a_linked_worktree(project: Project) -> None:
    git("branch", "integration", at=project.top)
    linked = project.top.parent / "linked"
    git("worktree", "add", "-q", linked, "integration", at=project.top)
    (linked / "src/f1").write_text("an edit\n")
    entry = project.queue(project.commit({"src/f0": "landing\n"}), branch="integration")
    project.landings().wait(entry.landing_id)
    assert (linked / "src/f0").read_text() == "landing\n"
    assert git("status", "--porcelain", at=linked) == "M src/f1"
    assert git("rev-parse", "HEAD", at=linked) == project.tip("integration")
    project.verdict()


def test_a_checkout_that_switched_to_the_branch_as_it_moved_catches_up(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.git import landing as frozen

    git("switch", "-q", "-c", "elsewhere", at=project.top)
    real = frozen.swap

    def swap(*arguments: object) -> bool:
        done = real(*arguments)  # type: ignore[arg-type]
        git("symbolic-ref", "HEAD", "refs/heads/trunk", at=project.top)  # as git does at the end of a switch
        return done

    monkeypatch.setattr(frozen, "swap", swap)
    entry = project.queue(project.commit({"src/f0": "landing\n"}))
    project.landings().wait(entry.landing_id)
    assert project.status() == ""
    assert (project.top / "src/f0").read_text() == "landing\n"


def test_a_checkout_that_switched_away_as_the_branch_moved_keeps_its_files(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.git import landing as frozen

    real = frozen.swap

    def swap(*arguments: object) -> bool:
        git("branch", "elsewhere", at=project.top)
        git("symbolic-ref", "HEAD", "refs/heads/elsewhere", at=project.top)  # needs no lock of the index
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(frozen, "swap", swap)
    entry = project.queue(project.commit({"src/f0": "landing\n", "new": "1\n"}))
    project.landings().wait(entry.landing_id)
    assert project.status() == ""
    assert (project.top / "src/f0").read_text().startswith("0\n")
    assert not (project.top / "new").exists()


# --- Transactions --------------------------------------------------------------------------------------


def intent_of(project: Project, *entries: Landing) -> PublishIntent:
    new = project.commit({"x": "1\n"})
    return PublishIntent(
        intent_id="i1",
        old=project.tip(),
        new=new,
        entries=tuple(IntentEntry(each.landing_id, new) for each in entries),
        begun_at="2024-01-01T00:00:00Z",
        holder_id=ACTOR,
    )


def test_a_lost_lease_cannot_begin_a_publish_nor_give_one_up(project: Project) -> None:
    use_a_lost_lease(project)


def test_a_publish_that_does_not_check_the_lease_in_its_transaction_is_found(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: the lease was checked before, at the beginning of the step."""
    monkeypatch.setattr(LandingChanges, "_check_lease", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        use_a_lost_lease(project)


def use_a_lost_lease(project: Project) -> None:
    entry = project.queue(project.commit({"new": "1\n"}))
    changes, intent = project.landings().changes, intent_of(project, entry)
    lost = leased(project)
    lost.release()
    with leased(project) as lease:
        with pytest.raises(FencingMismatch):
            changes.begin("trunk", intent, lost)
        assert changes.begin("trunk", intent, lease) == []
        with pytest.raises(FencingMismatch):
            changes.give_up("trunk", intent, lost, "")
        with pytest.raises(Changed):
            changes.decide(msgspec.structs.replace(entry, state=LandingState.WITHDRAWN))
    assert changes.finish("trunk", intent)
    assert not changes.finish("trunk", intent)
    assert project.entry(entry).state is LandingState.LANDED


# --- Remotes -------------------------------------------------------------------------------------------


@pytest.fixture
def remote(project: Project) -> Path:
    """A bare repository, `origin` of the project, with its branch."""
    place = project.top.parent / "origin.git"
    git("init", "-q", "--bare", "-b", "trunk", place)
    git("remote", "add", "origin", place, at=project.top)
    git("push", "-q", "origin", "trunk", at=project.top)
    return place


def test_work_lands_on_the_branch_of_a_remote_and_the_checkout_follows(project: Project, remote: Path) -> None:
    path = worktree(project)
    (path / "new").write_text("1\n")
    entry = enqueue(project, "dev", LandOptions(remote="origin"))
    assert git("rev-parse", f"refs/holdfast/landing/{entry.landing_id}", at=remote) == entry.commit
    someone = project.commit({"pushed": "by somebody\n"})
    git("push", "-q", "origin", f"{someone}:refs/heads/trunk", at=project.top)  # since the entry was queued
    landed = require_landed(project.landings().wait(entry.landing_id))
    assert git("rev-parse", "trunk", at=remote) == landed.landed_as == project.tip()
    assert git("rev-parse", "origin/trunk", at=project.top) == landed.landed_as, "git status must not say: ahead"
    assert (project.top / "new").exists()
    assert (project.top / "pushed").exists()
    assert git("for-each-ref", "refs/holdfast", at=remote) == ""
    project.verdict()


def test_references_stay_only_while_an_entry_may_be_queued_again(project: Project, remote: Path) -> None:
    path, how = worktree(project), LandOptions(remote="origin")
    (path / "one").write_text("1\n")
    superseded = enqueue(project, "dev", how)
    (path / "two").write_text("2\n")
    cancelled = enqueue(project, "dev", how)
    project.landings().cancel(cancelled.landing_id, "later")
    finished = project.queue(project.commit({"x": "1\n"}), issue_id=project.issue("rejected"))
    project.landings().cancel(finished.landing_id, "never")
    tracker, claim = project.landings().changes.tracker, ClaimId.parse(finished.claim_id)
    tracker.update(f"{finished.issue_id}", Update(state=State.REJECTED), claim=claim)

    def kept(name: str) -> set[str]:
        """After another entry of another worktree has landed on the branch of the remote."""
        repository = Repository(project.top)
        repository.worktrees.create(name)
        (repository.path(name) / name).touch()
        require_landed(project.landings().wait(enqueue(project, name, how).landing_id))
        form = "--format=%(refname:lstrip=3)"
        here, there = (
            set(git("for-each-ref", form, "refs/holdfast/landing", at=at).split()) for at in (project.top, remote)
        )
        assert here == there
        return here

    assert superseded.landing_id != cancelled.landing_id
    assert kept("first") == {cancelled.landing_id}
    Repository(project.top).remove_worktree("dev")
    assert kept("second") == set()
    again = project.landings().retry(cancelled.landing_id, None)  # its branch still has the commit
    assert git("rev-parse", f"refs/holdfast/landing/{again.landing_id}", at=remote) == cancelled.commit
    require_landed(project.landings().wait(again.landing_id))
    assert kept("third") == set()


def test_a_push_that_comes_between_is_not_overwritten(
    project: Project, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.git import transfer

    path = worktree(project)
    (path / "new").write_text("1\n")
    entry = enqueue(project, "dev", LandOptions(remote="origin"))
    real = transfer.push_branch
    between: list[str] = []

    def push_branch(*arguments: object, **options: object) -> None:
        if not between:
            between.append(project.commit({"pushed": "just then\n"}))
            git("push", "-q", "origin", f"{between[0]}:refs/heads/trunk", at=project.top)
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "push_branch", push_branch)
    require_landed(project.landings().wait(entry.landing_id))
    assert {"new", "pushed"} <= set(git("ls-tree", "--name-only", "trunk", at=remote).split())
    project.verdict()


def test_another_machine_lands_what_this_one_has_queued(project: Project, remote: Path) -> None:
    """The commit is not in the repository that lands: it comes from the remote."""
    path = worktree(project)
    (path / "new").write_text("1\n")
    entry = enqueue(project, "dev", LandOptions(remote="origin"))
    project.landings()._repository.remove_worktree("dev")
    git("update-ref", "-d", f"refs/holdfast/landing/{entry.landing_id}", at=project.top)
    git("for-each-ref", "refs/holdfast/snapshots", at=project.top)
    for name in git("for-each-ref", "--format=%(refname)", "refs/heads/hf", "refs/holdfast", at=project.top).split():
        git("update-ref", "-d", name, at=project.top)
    git("reflog", "expire", "--expire=now", "--all", at=project.top)
    git("gc", "-q", "--prune=now", at=project.top)
    with pytest.raises(AssertionError):
        git("cat-file", "-e", entry.commit, at=project.top)
    require_landed(project.landings().wait(entry.landing_id))
    assert (project.top / "new").exists()


def test_a_protected_branch_gets_a_branch_beside_it(project: Project, remote: Path) -> None:
    hook = remote / "hooks/update"
    hook.write_text('#!/bin/sh\ntest "$1" != refs/heads/trunk || { echo protected >&2; exit 1; }\n')
    hook.chmod(0o755)
    path = worktree(project)
    (path / "new").write_text("1\n")
    before = git("rev-parse", "trunk", at=remote)
    entry = enqueue(project, "dev", LandOptions(remote="origin"))
    told: list[str] = []
    landings = Landings(Repository(project.top), actor=ACTOR, tell=told.append)
    with pytest.raises(LandingPending, match=r"protected.*--via-branch"):
        landings.wait(entry.landing_id, wait=0.1)
    assert told
    assert not re.search("[0-9a-f]{40}", "".join(told)), "each attempt makes another commit, and would print a line"
    landings = project.landings()
    with landings._repository.lease("dev") as lease:
        beside, commit = landings.push_beside("dev", Proof.of(lease), LandOptions(remote="origin"))
    assert git("rev-parse", "trunk", at=remote) == before
    assert git("rev-parse", beside, at=remote) == commit
    assert "new" in git("ls-tree", "--name-only", beside, at=remote).split()

    git("push", "-q", remote, f"{commit}:refs/heads/merged", at=project.top)
    git("update-ref", "refs/heads/trunk", "merged", at=remote)  # as a pull request does
    assert require_landed(project.landings().wait(entry.landing_id)).landed_as == commit


def test_a_checkout_that_switches_to_the_branch_while_it_moves_follows(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git switches the files first, and HEAD a moment later: here, after the lander has looked for checkouts."""
    finish = LandingChanges.finish

    def finish_late(changes: LandingChanges, name: str, intent: PublishIntent) -> bool:
        git("symbolic-ref", "HEAD", "refs/heads/trunk", at=project.top)
        assert "landed" in git("status", "--porcelain", at=project.top), "it has the files of the old tip"
        return finish(changes, name, intent)

    git("switch", "-q", "-c", "side", at=project.top)
    entry = project.queue(project.commit({"landed": "1\n"}))
    monkeypatch.setattr(LandingChanges, "finish", finish_late)
    project.landings().work_off()

    assert project.entry(entry).state is LandingState.LANDED
    assert (project.top / "landed").read_text() == "1\n"
    assert git("status", "--porcelain", at=project.top) == ""
